// Attention over the paged cache with an online softmax.
//
// The rows of a group are its tokens times its heads: all read the same keys and values. Keys are processed in blocks of
// ATTENTION_BLOCK positions. The keys of a block are gathered from their pages once for all rows of a group, as columns.
// Values are gathered, as float32, for many rows only: few rows read them in the cache. All groups of an item read a block
// before the next one, because the keys and values of a token are contiguous. Blocks begin at multiples of
// ATTENTION_BLOCK, and each row has its own sums in the order of positions. So a row's result is the same in a prompt,
// in a part of a prompt and alone.

// Vectors of one tile's columns, and rows of a tile: its sums and one row of operands fill the registers.
constexpr int TILE_VECTORS = LANES == 16 ? 4 : 2;
constexpr int TILE_ROWS = LANES == 16 ? 6 : 4;
constexpr int64_t TILE_COLUMNS = TILE_VECTORS * LANES;
// Rows that read values in the cache. More rows convert bfloat16 more often than a copy takes.
constexpr int64_t FEW_ROWS = 2 * TILE_ROWS;

// The keys of ATTENTION_BLOCK positions in the cache.
using Rows = const uint8_t* [ATTENTION_BLOCK];

// A block of keys and values of one group.
struct Block {
  const Rows& rows;  // of the first group
  int64_t keys;      // bytes from there to the keys of this group
  int64_t values;
  int64_t bytes;  // of a key, and of a value
  const Rows& next_rows;  // what is computed next: those of the next group or block
  int64_t next_keys;
  int64_t next_values;
  bool is_bfloat16;
  float* gathered_keys;    // float [head_dim][ATTENTION_BLOCK], or bfloat16 [head_dim / 2][ATTENTION_BLOCK][2]
  float* gathered_values;  // [ATTENTION_BLOCK][head_dim], or null: they are read in the cache
};

// Second operands of products: LANES numbers of row k from `column` on.
struct FloatRows {
  const float* at;
  int64_t stride;
  Floats operator()(int64_t k, int64_t column) const { return load(at + k * stride + column); }
};
struct BfloatPairs {
  const float* at;
  Floats operator()(int64_t k, int64_t column) const {
    const Floats pairs = load(at + k / 2 * ATTENTION_BLOCK + column);
    return k % 2 ? high_bfloat16(pairs) : low_bfloat16(pairs);
  }
};
struct CachedFloats {
  const Rows& rows;
  int64_t from;
  Floats operator()(int64_t k, int64_t column) const {
    return load(reinterpret_cast<const float*>(rows[k] + from) + column);
  }
};
struct CachedBfloats {
  const Rows& rows;
  int64_t from;
  Floats operator()(int64_t k, int64_t column) const {
    return widen_bfloat16(reinterpret_cast<const uint16_t*>(rows[k] + from) + column);
  }
};

// Requests the memory of what is computed next, a row for each k, so that it arrives meanwhile. All requests at once would
// stop the computation until most of them are answered. Inlined, or GCC takes the call for one without effect.
struct Ahead {
  const Rows& rows;
  int64_t from;
  int64_t bytes;
  __attribute__((always_inline)) void operator()(int64_t k) const {
    if (k >= ATTENTION_BLOCK) return;
    for (int64_t at = 0; at < bytes; at += 64) __builtin_prefetch(rows[k] + from + at);
  }
};

// Find the keys of a block's positions. A page contains whole groups of 16.
inline void locate(const CacheView& cache, int64_t begin, int64_t end, Rows& rows) {
  for (int64_t first = 0; first < ATTENTION_BLOCK; first += 16) {
    const int64_t position = begin + first < end ? begin + first : begin, page = position / cache.page_size;
    const uint8_t* at = cache.rows + (cache.pages[page] * cache.page_size + position % cache.page_size) * cache.row_bytes;
    for (int64_t i = 0; i < 16; ++i) rows[first + i] = at + i * cache.row_bytes;
  }
}

// Gather the keys of `count` positions, rounded up to whole groups of LANES, and the values if there is memory for them.
inline void gather(const Block& block, int64_t head_dim, int64_t count) {
  Floats square[LANES];
  for (int64_t first = 0; first < count; first += LANES) {
    // A lane has 32 bits: one float or two numbers in bfloat16.
    for (int64_t lane = 0; lane < block.bytes / 4; lane += LANES) {
      const int64_t width = block.bytes / 4 - lane < LANES ? block.bytes / 4 - lane : LANES;
      for (int64_t i = 0; i < LANES; ++i) {
        square[i] = load_first(reinterpret_cast<const float*>(block.rows[first + i] + block.keys) + lane, width);
      }
      transpose(square);
      for (int64_t i = 0; i < width; ++i) store(block.gathered_keys + (lane + i) * ATTENTION_BLOCK + first, square[i]);
    }
    if (block.gathered_values == nullptr) continue;
    for (int64_t k = first; k < first + LANES; ++k) {
      float* at = block.gathered_values + k * head_dim;
      for (int64_t c = 0; c < head_dim; c += LANES) {
        store(at + c, block.is_bfloat16 ? CachedBfloats{block.rows, block.values}(k, c)
                                        : CachedFloats{block.rows, block.values}(k, c));
      }
    }
  }
}

// y[row][column …] (+)= the sum over k of x[row][k] · columns(k, column …)
template <int ROWS, int VECTORS, bool ADD, class Columns>
inline void product_tile(const float* const* x, Columns columns, int64_t column, int64_t inputs, float* const* y, Ahead ahead) {
  Floats sums[ROWS][VECTORS];
  for (int r = 0; r < ROWS; ++r) {
    for (int v = 0; v < VECTORS; ++v) sums[r][v] = ADD ? load(y[r] + column + v * LANES) : broadcast(0.0f);
  }
#pragma GCC unroll 2
  for (int64_t k = 0; k < inputs; ++k) {
    ahead(k);
    Floats operands[VECTORS];
    for (int v = 0; v < VECTORS; ++v) operands[v] = columns(k, column + v * LANES);
    for (int r = 0; r < ROWS; ++r) {
      const Floats factor = broadcast(x[r][k]);
      for (int v = 0; v < VECTORS; ++v) sums[r][v] = fma(factor, operands[v], sums[r][v]);
    }
  }
  for (int r = 0; r < ROWS; ++r) {
    for (int v = 0; v < VECTORS; ++v) store(y[r] + column + v * LANES, sums[r][v]);
  }
}

// y[rows][width] (+)= x[rows][inputs] · columns[inputs][width], of at most TILE_ROWS rows given by their addresses
template <bool ADD, class Columns>
inline void product(int64_t rows, const float* const* x, Columns columns, int64_t width, int64_t inputs, float* const* y,
                    Ahead ahead) {
  int64_t column = 0;
  for (; column + TILE_COLUMNS <= width; column += TILE_COLUMNS) {
    switch (rows) {
      case 1: product_tile<1, TILE_VECTORS, ADD>(x, columns, column, inputs, y, ahead); break;
      case 2: product_tile<2, TILE_VECTORS, ADD>(x, columns, column, inputs, y, ahead); break;
      case 3: product_tile<3, TILE_VECTORS, ADD>(x, columns, column, inputs, y, ahead); break;
      case 4: product_tile<4, TILE_VECTORS, ADD>(x, columns, column, inputs, y, ahead); break;
      case 5: product_tile<TILE_ROWS < 5 ? 1 : 5, TILE_VECTORS, ADD>(x, columns, column, inputs, y, ahead); break;
      default: product_tile<TILE_ROWS, TILE_VECTORS, ADD>(x, columns, column, inputs, y, ahead); break;
    }
  }
  for (; column < width; column += 16) {
    for (int64_t row = 0; row < rows; ++row) {
      product_tile<1, 16 / LANES, ADD>(x + row, columns, column, inputs, y + row, ahead);
    }
  }
}

// Set the scores of positions outside first … last of a block to -infinity.
inline void mask(float* scores, int64_t first, int64_t last) {
  for (int64_t i = 0; i < ATTENTION_BLOCK; ++i) {
    if (i < first || i > last) scores[i] = -__builtin_inff();
  }
}

// Turn the scores of a block into weights, and rescale a row's sums to the new maximum of its scores.
inline void soften(float* scores, float* partial, int64_t head_dim) {
  float& maximum = partial[head_dim];
  float& weights = partial[head_dim + 1];
  Floats top = load(scores);
  for (int64_t i = LANES; i < ATTENTION_BLOCK; i += LANES) top = max(top, load(scores + i));
  const float next = __builtin_fmaxf(maximum, largest(top));
  if (next == -__builtin_inff()) {
    for (int64_t i = 0; i < ATTENTION_BLOCK; i += LANES) store(scores + i, broadcast(0.0f));
    return;
  }
  if (next > maximum) {
    float factors[LANES];
    store(factors, exponential(broadcast(maximum - next)));
    scale(partial, partial, head_dim, factors[0]);
    weights *= factors[0];
    maximum = next;
  }
  Floats total = broadcast(0.0f);
  for (int64_t i = 0; i < ATTENTION_BLOCK; i += LANES) {
    const Floats weight = exponential(load(scores + i) - broadcast(next));
    total = total + weight;
    store(scores + i, weight);
  }
  weights += sum(total);
}

// One block of positions from `first` on, `count` of them gathered, for the rows of one group.
inline void attend_block(const AttentionItem& item, const float* queries, int64_t first, int64_t count, const Block& block,
                         float* scores, float* partial) {
  const int64_t head_dim = item.head_dim, rows = item.tokens * item.heads, stride = head_dim + PARTIAL_EXTRA;
  const Ahead keys{block.next_rows, block.next_keys, block.bytes}, values{block.next_rows, block.next_values, block.bytes};
  // Rows before this block attend to none of its positions.
  for (int64_t row = first > item.position ? (first - item.position) * item.heads : 0; row < rows; row += TILE_ROWS) {
    const int64_t some = rows - row < TILE_ROWS ? rows - row : TILE_ROWS;
    const float* queries_of[TILE_ROWS];
    float* scores_of[TILE_ROWS];
    float* sums_of[TILE_ROWS];
    for (int64_t r = 0; r < some; ++r) {
      queries_of[r] = queries + (row + r) / item.heads * item.query_stride + (row + r) % item.heads * head_dim;
      scores_of[r] = scores + r * ATTENTION_BLOCK;
      sums_of[r] = partial + (row + r) * stride;
    }
    if (block.is_bfloat16) {
      product<false>(some, queries_of, BfloatPairs{block.gathered_keys}, ATTENTION_BLOCK, head_dim, scores_of, keys);
    } else {
      const FloatRows columns{block.gathered_keys, ATTENTION_BLOCK};
      product<false>(some, queries_of, columns, ATTENTION_BLOCK, head_dim, scores_of, keys);
    }
    for (int64_t r = 0; r < some; ++r) {
      const int64_t position = item.position + (row + r) / item.heads;
      const int64_t visible = position - item.window + 1 - first;
      if (visible > 0 || position - first < ATTENTION_BLOCK - 1) mask(scores_of[r], visible, position - first);
      soften(scores_of[r], sums_of[r], head_dim);
    }
    if (block.gathered_values != nullptr) {
      product<true>(some, scores_of, FloatRows{block.gathered_values, head_dim}, head_dim, count, sums_of, values);
    } else if (block.is_bfloat16) {
      product<true>(some, scores_of, CachedBfloats{block.rows, block.values}, head_dim, count, sums_of, values);
    } else {
      product<true>(some, scores_of, CachedFloats{block.rows, block.values}, head_dim, count, sums_of, values);
    }
  }
}

inline void attend(const AttentionItem& item, int64_t begin, int64_t end, float* partial, float* scratch) {
  const int64_t head_dim = item.head_dim, rows = item.tokens * item.heads, stride = head_dim + PARTIAL_EXTRA;
  const int64_t bytes = head_dim * (item.cache.is_bfloat16 ? 2 : 4);
  float* keys = scratch;
  float* values = keys + ATTENTION_BLOCK * head_dim;
  float* scores = values + ATTENTION_BLOCK * head_dim;
  for (int64_t row = 0; row < item.groups * rows; ++row) {
    float* at = partial + row * stride;
    for (int64_t c = 0; c < head_dim; c += LANES) store(at + c, broadcast(0.0f));
    at[head_dim] = -__builtin_inff();
    at[head_dim + 1] = 0.0f;
  }
  const int64_t last = item.position + item.tokens - 1;
  const int64_t first_visible = item.position - item.window + 1;
  if (end > last + 1) end = last + 1;
  if (begin < first_visible) begin = first_visible / ATTENTION_BLOCK * ATTENTION_BLOCK;
  if (begin >= end) return;
  Rows located[2];
  locate(item.cache, begin, end, located[0]);
  for (int64_t first = begin, number = 0; first < end; first += ATTENTION_BLOCK, number = 1 - number) {
    const int64_t count = end - first < ATTENTION_BLOCK ? end - first : ATTENTION_BLOCK;
    const bool is_last = first + ATTENTION_BLOCK >= end;
    if (!is_last) locate(item.cache, first + ATTENTION_BLOCK, end, located[1 - number]);
    for (int64_t group = 0; group < item.groups; ++group) {
      const bool is_last_group = group + 1 == item.groups;
      const int64_t from = group * bytes, next = is_last_group ? 0 : from + bytes;
      const Rows& next_rows = located[is_last_group && !is_last ? 1 - number : number];
      const Block block{located[number], from, from + item.cache.values, bytes, next_rows, next, next + item.cache.values,
                        item.cache.is_bfloat16 != 0, keys, rows > FEW_ROWS ? values : nullptr};
      gather(block, head_dim, count);
      const float* queries = item.queries + group * item.heads * head_dim;
      attend_block(item, queries, first, count, block, scores, partial + group * rows * stride);
    }
  }
}

inline void merge(const float* later, float* into, int64_t rows, int64_t head_dim) {
  const int64_t stride = head_dim + PARTIAL_EXTRA;
  for (int64_t row = 0; row < rows; ++row, later += stride, into += stride) {
    const float next = __builtin_fmaxf(into[head_dim], later[head_dim]);
    if (later[head_dim] == -__builtin_inff()) continue;
    float ours[LANES], theirs[LANES];
    store(ours, exponential(broadcast(into[head_dim] - next)));
    store(theirs, exponential(broadcast(later[head_dim] - next)));
    scale(into, into, head_dim, ours[0]);
    add_scaled(later, into, head_dim, theirs[0]);
    into[head_dim] = next;
    into[head_dim + 1] = into[head_dim + 1] * ours[0] + later[head_dim + 1] * theirs[0];
  }
}

inline void finish(const float* partial, float* y, int64_t head_dim) {
  scale(partial, y, head_dim, 1.0f / partial[head_dim + 1]);
}
