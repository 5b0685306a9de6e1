// Attention over the paged cache with an online softmax.
//
// The rows of a group are its tokens times its heads: all read the same keys and values. Keys are processed in blocks of
// ATTENTION_BLOCK positions. A block is gathered from its pages once for all rows of a group: keys as columns
// [head_dim][ATTENTION_BLOCK], values as rows [ATTENTION_BLOCK][head_dim], float32. All groups of an item read a block
// before the next one, because the keys and values of a token are contiguous. Blocks begin at multiples of
// ATTENTION_BLOCK, and each row has its own sums in the order of positions. So a row's result is the same in a prompt,
// in a part of a prompt and alone.

// Vectors of one tile's columns, and rows of a tile: its sums and one row of operands fill the registers.
constexpr int TILE_VECTORS = LANES == 16 ? 4 : 2;
constexpr int TILE_ROWS = LANES == 16 ? 6 : 4;
constexpr int64_t TILE_COLUMNS = TILE_VECTORS * LANES;

struct Gathered {
  float* keys;    // [head_dim][ATTENTION_BLOCK]
  float* values;  // [ATTENTION_BLOCK][head_dim]
};

inline const uint8_t* cache_row(const CacheView& cache, int64_t position) {
  const int64_t page = position / cache.page_size;
  return cache.rows + (cache.pages[page] * cache.page_size + position - page * cache.page_size) * cache.row_bytes;
}

// Request the cache lines of a token's keys and values.
inline void prefetch_row(const uint8_t* row, int64_t values, int64_t bytes) {
  for (int64_t at = 0; at < bytes; at += 64) {
    __builtin_prefetch(row + at);
    __builtin_prefetch(row + values + at);
  }
}

// Gather `count` positions from `begin` on, rounded up to whole groups of LANES, which a page contains. Values of further
// positions are 0, because unwritten rows contain arbitrary bytes and 0 · NaN is NaN.
inline void gather(const CacheView& cache, int64_t head_dim, int64_t begin, int64_t count, int64_t end, Gathered to) {
  const int64_t bytes = head_dim * (cache.is_bfloat16 ? 2 : 4);
  Floats block[LANES];
  for (int64_t first = 0; first < count; first += LANES) {
    const uint8_t* rows = cache_row(cache, begin + first);
    const uint8_t* next = begin + ATTENTION_BLOCK + first < end ? cache_row(cache, begin + ATTENTION_BLOCK + first) : rows;
    // A lane has 32 bits: one float or two numbers in bfloat16.
    for (int64_t lane = 0; lane < bytes / 4; lane += LANES) {
      const int64_t width = bytes / 4 - lane < LANES ? bytes / 4 - lane : LANES;
      for (int64_t i = 0; i < LANES; ++i) {
        block[i] = load_first(reinterpret_cast<const float*>(rows + i * cache.row_bytes) + lane, width);
      }
      transpose(block);
      for (int64_t i = 0; i < width; ++i) {
        if (cache.is_bfloat16) {
          float* at = to.keys + 2 * (lane + i) * ATTENTION_BLOCK + first;
          store(at, low_bfloat16(block[i]));
          store(at + ATTENTION_BLOCK, high_bfloat16(block[i]));
        } else {
          store(to.keys + (lane + i) * ATTENTION_BLOCK + first, block[i]);
        }
      }
    }
    for (int64_t i = 0; i < LANES; ++i) {
      float* at = to.values + (first + i) * head_dim;
      const uint8_t* row = rows + i * cache.row_bytes + cache.values;
      prefetch_row(next + i * cache.row_bytes, cache.values, bytes);
      for (int64_t c = 0; c < head_dim; c += LANES) {
        if (first + i >= count) {
          store(at + c, broadcast(0.0f));
        } else if (cache.is_bfloat16) {
          store(at + c, widen_bfloat16(reinterpret_cast<const uint16_t*>(row) + c));
        } else {
          store(at + c, load(reinterpret_cast<const float*>(row) + c));
        }
      }
    }
  }
}

// y[row] (+)= the sum over k of x[row][k] · columns[k][…]
template <int ROWS, bool ADD>
inline void product_tile(const float* const* x, const float* columns, int64_t stride, int64_t inputs, float* const* y) {
  Floats sums[ROWS][TILE_VECTORS];
  for (int r = 0; r < ROWS; ++r) {
    for (int v = 0; v < TILE_VECTORS; ++v) sums[r][v] = ADD ? load(y[r] + v * LANES) : broadcast(0.0f);
  }
  for (int64_t k = 0; k < inputs; ++k) {
    Floats column[TILE_VECTORS];
    for (int v = 0; v < TILE_VECTORS; ++v) column[v] = load(columns + k * stride + v * LANES);
    for (int r = 0; r < ROWS; ++r) {
      const Floats factor = broadcast(x[r][k]);
      for (int v = 0; v < TILE_VECTORS; ++v) sums[r][v] = fma(factor, column[v], sums[r][v]);
    }
  }
  for (int r = 0; r < ROWS; ++r) {
    for (int v = 0; v < TILE_VECTORS; ++v) store(y[r] + v * LANES, sums[r][v]);
  }
}

// As product_tile, for the last columns: 16 of them.
template <bool ADD>
inline void product_rest(const float* x, const float* columns, int64_t stride, int64_t inputs, float* y) {
  constexpr int VECTORS = 16 / LANES;
  Floats sums[VECTORS];
  for (int v = 0; v < VECTORS; ++v) sums[v] = ADD ? load(y + v * LANES) : broadcast(0.0f);
  for (int64_t k = 0; k < inputs; ++k) {
    for (int v = 0; v < VECTORS; ++v) sums[v] = fma(broadcast(x[k]), load(columns + k * stride + v * LANES), sums[v]);
  }
  for (int v = 0; v < VECTORS; ++v) store(y + v * LANES, sums[v]);
}

// y[rows][width] (+)= x[rows][inputs] · columns[inputs][width], of rows given by their addresses
template <bool ADD>
inline void product(int64_t rows, const float* const* x, const float* columns, int64_t width, int64_t inputs, float* const* y) {
  int64_t column = 0;
  for (; column + TILE_COLUMNS <= width; column += TILE_COLUMNS) {
    float* at[TILE_ROWS];
    for (int64_t row = 0; row < rows; row += TILE_ROWS) {
      const int64_t count = rows - row < TILE_ROWS ? rows - row : TILE_ROWS;
      for (int64_t r = 0; r < count; ++r) at[r] = y[row + r] + column;
      switch (count) {
        case 1: product_tile<1, ADD>(x + row, columns + column, width, inputs, at); break;
        case 2: product_tile<2, ADD>(x + row, columns + column, width, inputs, at); break;
        case 3: product_tile<3, ADD>(x + row, columns + column, width, inputs, at); break;
        case 4: product_tile<4, ADD>(x + row, columns + column, width, inputs, at); break;
        case 5: product_tile<TILE_ROWS < 5 ? 1 : 5, ADD>(x + row, columns + column, width, inputs, at); break;
        default: product_tile<TILE_ROWS, ADD>(x + row, columns + column, width, inputs, at); break;
      }
    }
  }
  for (; column < width; column += 16) {
    for (int64_t row = 0; row < rows; ++row) product_rest<ADD>(x[row], columns + column, width, inputs, y[row] + column);
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

// One block of positions, `count` of them gathered, for the rows of one group.
inline void attend_block(const AttentionItem& item, const float* queries, int64_t block, int64_t count,
                         const Gathered& gathered, float* scores, float* partial) {
  const int64_t head_dim = item.head_dim, rows = item.tokens * item.heads, stride = head_dim + PARTIAL_EXTRA;
  // Rows before this block attend to none of its positions.
  for (int64_t row = block > item.position ? (block - item.position) * item.heads : 0; row < rows; row += TILE_ROWS) {
    const int64_t some = rows - row < TILE_ROWS ? rows - row : TILE_ROWS;
    const float* queries_of[TILE_ROWS];
    float* scores_of[TILE_ROWS];
    float* sums_of[TILE_ROWS];
    for (int64_t r = 0; r < some; ++r) {
      queries_of[r] = queries + (row + r) / item.heads * item.query_stride + (row + r) % item.heads * head_dim;
      scores_of[r] = scores + r * ATTENTION_BLOCK;
      sums_of[r] = partial + (row + r) * stride;
    }
    product<false>(some, queries_of, gathered.keys, ATTENTION_BLOCK, head_dim, scores_of);
    for (int64_t r = 0; r < some; ++r) {
      const int64_t position = item.position + (row + r) / item.heads;
      const int64_t first = position - item.window + 1 - block;
      if (first > 0 || position - block < ATTENTION_BLOCK - 1) mask(scores_of[r], first, position - block);
      soften(scores_of[r], sums_of[r], head_dim);
    }
    product<true>(some, scores_of, gathered.values, head_dim, count, sums_of);
  }
}

inline void attend(const AttentionItem& item, int64_t begin, int64_t end, float* partial, float* scratch) {
  const int64_t head_dim = item.head_dim, rows = item.tokens * item.heads, stride = head_dim + PARTIAL_EXTRA;
  const Gathered gathered{scratch, scratch + ATTENTION_BLOCK * head_dim};
  float* scores = gathered.values + ATTENTION_BLOCK * head_dim;
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
  for (int64_t block = begin; block < end; block += ATTENTION_BLOCK) {
    const int64_t count = end - block < ATTENTION_BLOCK ? end - block : ATTENTION_BLOCK;
    CacheView cache = item.cache;
    for (int64_t group = 0; group < item.groups; ++group) {
      gather(cache, head_dim, block, count, end, gathered);
      const float* queries = item.queries + group * item.heads * head_dim;
      attend_block(item, queries, block, count, gathered, scores, partial + group * rows * stride);
      cache.rows += head_dim * (cache.is_bfloat16 ? 2 : 4);
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
