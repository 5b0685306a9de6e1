// Attention over a cache in bfloat16 by the tiles of AMX. Queries and weights are rounded to bfloat16, sums are float32. A tile
// has 16 rows of a group.

#if defined(__AMX_TILE__)

inline bool attends_by_tiles(const AttentionItem& item) {
  return item.cache.format == BFLOAT16 && item.head_dim % TILE_INPUTS == 0;
}

// scores = queries · keys of a tile of rows
inline void score_tile(const uint16_t* queries, const float* keys, int64_t head_dim, float* scores) {
  constexpr int64_t STRIDE = ATTENTION_BLOCK * 4;
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (int64_t k = 0; k < head_dim; k += TILE_INPUTS) {
    const float* columns = keys + k / 2 * ATTENTION_BLOCK;
    _tile_loadd(4, queries + k, head_dim * 2);
    _tile_loadd(6, columns, STRIDE);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(7, columns + 16, STRIDE);
    _tile_dpbf16ps(1, 4, 7);
    _tile_loadd(6, columns + 32, STRIDE);
    _tile_dpbf16ps(2, 4, 6);
    _tile_loadd(7, columns + 48, STRIDE);
    _tile_dpbf16ps(3, 4, 7);
  }
  _tile_stored(0, scores, STRIDE);
  _tile_stored(1, scores + 16, STRIDE);
  _tile_stored(2, scores + 32, STRIDE);
  _tile_stored(3, scores + 48, STRIDE);
}

// sums += weights · values of a tile of rows; sums: rows of partial results
inline void add_values(const uint16_t* weights, const float* values, int64_t head_dim, int64_t count, float* sums) {
  const int64_t stride = (head_dim + PARTIAL_EXTRA) * 4, bytes = head_dim * 4;
  const float* later = values + TILE_INPUTS / 2 * head_dim;
  _tile_loadd(4, weights, ATTENTION_BLOCK * 2);
  _tile_loadd(5, weights + TILE_INPUTS, ATTENTION_BLOCK * 2);
  for (int64_t c = 0; c < head_dim; c += 2 * PANEL) {
    _tile_loadd(0, sums + c, stride);
    _tile_loadd(1, sums + c + PANEL, stride);
    _tile_loadd(6, values + c, bytes);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(7, values + c + PANEL, bytes);
    _tile_dpbf16ps(1, 4, 7);
    if (count > TILE_INPUTS) {
      _tile_loadd(6, later + c, bytes);
      _tile_dpbf16ps(0, 5, 6);
      _tile_loadd(7, later + c + PANEL, bytes);
      _tile_dpbf16ps(1, 5, 7);
    }
    _tile_stored(0, sums + c, stride);
    _tile_stored(1, sums + c + PANEL, stride);
  }
}

// As AttentionByVectors.
struct AttentionByTiles {
  AttentionByTiles(const AttentionItem& given, float* scratch)
      : item(given), keys(scratch), values(keys + ATTENTION_BLOCK * given.head_dim),
        scores(keys + 2 * ATTENTION_BLOCK * given.head_dim),
        weights(reinterpret_cast<uint16_t*>(scores + TILE_HEIGHT * ATTENTION_BLOCK)),
        queries(weights + TILE_HEIGHT * ATTENTION_BLOCK) {
    const int64_t width = item.heads * item.head_dim;
    for (int64_t group = 0; group < item.groups; ++group) {
      for (int64_t token = 0; token < item.tokens; ++token) {
        const float* from = item.queries + token * item.query_stride + group * width;
        narrow(from, queries + (group * item.tokens + token) * width, width);
      }
    }
  }
  ~AttentionByTiles() { _tile_release(); }

  void compute(int64_t group, int64_t first, int64_t count, const Block& block, float* partial) {
    // Rows whose weights are computed before more of the next keys and values are requested.
    constexpr int64_t SOFTENED = 4;
    const int64_t head_dim = item.head_dim, rows = item.tokens * item.heads, stride = head_dim + PARTIAL_EXTRA;
    const Ahead next_keys{block.next_rows, block.next_keys, block.bytes};
    const Ahead next_values{block.next_rows, block.next_values, block.bytes};
    const int64_t begin = first > item.position ? (first - item.position) * item.heads : 0;
    // Whole tiles.
    const int64_t gathered = (count + TILE_INPUTS - 1) / TILE_INPUTS * TILE_INPUTS;
    gather_values(CachedPairs(block.rows, block.values), head_dim, gathered, values);
    for (int64_t row = begin; row < rows; row += TILE_HEIGHT) {
      const int64_t some = rows - row < TILE_HEIGHT ? rows - row : TILE_HEIGHT;
      if (some != height) configure_tiles(height = some);
      // The compiler does not know what a tile reads.
      asm volatile("" ::: "memory");
      score_tile(queries + (group * rows + row) * head_dim, block.gathered_keys, head_dim, scores);
      for (int64_t r = 0; r < TILE_HEIGHT; r += SOFTENED) {
        for (int64_t k = r * 4; row == begin && k < (r + SOFTENED) * 4; ++k) {
          next_keys(k);
          next_values(k);
        }
        if (r >= some) continue;
        const int64_t few = some - r < SOFTENED ? some - r : SOFTENED;
        soften(item, row + r, few, first, scores + r * ATTENTION_BLOCK, partial + (row + r) * stride);
      }
      narrow(scores, weights, some * ATTENTION_BLOCK);
      asm volatile("" ::: "memory");
      add_values(weights, values, head_dim, count, partial + row * stride);
    }
  }

  const AttentionItem& item;
  float* const keys;        // Block::gathered_keys
  float* const values;      // bfloat16 [ATTENTION_BLOCK / 2][head_dim][2]
  float* const scores;      // [TILE_HEIGHT][ATTENTION_BLOCK]
  uint16_t* const weights;  // bfloat16 [TILE_HEIGHT][ATTENTION_BLOCK]
  uint16_t* const queries;  // bfloat16 [groups][tokens][heads][head_dim]
  int64_t height = 0;       // of the configured tiles
};

#endif
