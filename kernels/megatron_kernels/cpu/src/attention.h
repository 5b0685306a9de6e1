// Attention over the paged cache with an online softmax.
//
// Where the CPU multiplies bfloat16, queries and weights are rounded to it for a cache in bfloat16. Everything else is float32.
//
// The rows of a group are its tokens times its heads: all read the same keys and values. Keys are processed in blocks of
// ATTENTION_BLOCK positions. The keys of a block are gathered from their pages once for all rows of a group, as columns.
// Values are gathered for many rows only: few rows read them in the cache. All groups of an item read a block
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
  float* gathered_keys;  // float [head_dim][ATTENTION_BLOCK], or bfloat16 [head_dim / 2][ATTENTION_BLOCK][2]
};

// Second operands of products: LANES numbers of row k from `column` on, which are multiplied by a float.
struct FloatColumns {
  using Operand = Floats;
  static constexpr int64_t PER_STEP = 1;
  static Floats multiply(Floats sums, Floats operand, const float* x, int64_t k) { return fma(broadcast(x[k]), operand, sums); }
};
struct FloatRows : FloatColumns {
  FloatRows(const float* rows, int64_t row_stride) : at(rows), stride(row_stride) {}
  Floats operator()(int64_t k, int64_t column) const { return load(at + k * stride + column); }
  const float* at;
  int64_t stride;
};
// Values in the cache. READ returns LANES numbers as floats.
template <class Number, Floats (*READ)(const Number*)>
struct CachedNumbers : FloatColumns {
  CachedNumbers(const Rows& of, int64_t bytes) : rows(of), from(bytes) {}
  Floats operator()(int64_t k, int64_t column) const { return READ(reinterpret_cast<const Number*>(rows[k] + from) + column); }
  const Rows& rows;
  int64_t from;
};

// How a cache in float32 is multiplied. Number: of queries and weights.
struct Float32Cache {
  using Number = float;
  using Keys = FloatRows;
  using Values = FloatRows;
  using CachedValues = CachedNumbers<float, load>;
};

// A cache in float16 is multiplied in float32: keys are converted as they are gathered.
struct Float16Cache : Float32Cache {
  using CachedValues = CachedNumbers<uint16_t, widen_half>;
};

#if defined(MEGATRON_BFLOAT16)
// Pairs of bfloat16 of rows 2 k and 2 k + 1, which are multiplied by a pair.
struct PairColumns {
  using Operand = Integers;
  static constexpr int64_t PER_STEP = 2;
  static Floats multiply(Floats sums, Integers operand, const uint16_t* x, int64_t k) {
    return dot_bfloat16(sums, operand, broadcast_word(x + 2 * k));
  }
};
struct PairRows : PairColumns {
  PairRows(const float* rows, int64_t row_stride) : at(rows), stride(row_stride) {}
  Integers operator()(int64_t k, int64_t column) const {
    return load_bytes(reinterpret_cast<const uint8_t*>(at + k * stride + column));
  }
  const float* at;  // 32 bits are a pair
  int64_t stride;
};
struct CachedPairs : PairColumns {
  CachedPairs(const Rows& of, int64_t bytes) : rows(of), from(bytes) {}
  Integers operator()(int64_t k, int64_t column) const {
    return interleave(rows[2 * k] + from + column * 2, rows[2 * k + 1] + from + column * 2);
  }
  const Rows& rows;
  int64_t from;
};
struct Bfloat16Cache {
  using Number = uint16_t;
  using Keys = PairRows;
  using Values = PairRows;
  using CachedValues = CachedPairs;
};
#else
struct BfloatPairs : FloatColumns {
  BfloatPairs(const float* rows, int64_t) : at(rows) {}
  Floats operator()(int64_t k, int64_t column) const {
    const Floats pairs = load(at + k / 2 * ATTENTION_BLOCK + column);
    return k % 2 ? high_bfloat16(pairs) : low_bfloat16(pairs);
  }
  const float* at;
};
struct Bfloat16Cache {
  using Number = float;
  using Keys = BfloatPairs;
  using Values = FloatRows;
  using CachedValues = CachedNumbers<uint16_t, widen_bfloat16>;
};
#endif

// Prefetches what is computed next into the L2 cache, a row for each k. All prefetches at once, or prefetches into the L1 cache,
// would fill the line fill buffers, and loads would wait for a free one. Inlined, or GCC takes the call for one without effect.
struct Ahead {
  const Rows& rows;
  int64_t from;
  int64_t bytes;
  __attribute__((always_inline)) void operator()(int64_t k) const {
    if (k >= ATTENTION_BLOCK) return;
    for (int64_t at = 0; at < bytes; at += 64) __builtin_prefetch(rows[k] + from + at, 0, 2);
  }
};

// Find the keys of a block's positions. A page contains whole groups of 16. Positions from `end` on, whose rows may be
// unwritten, have the row of an earlier position.
inline void locate(const CacheView& cache, int64_t begin, int64_t end, Rows& rows) {
  for (int64_t first = 0; first < ATTENTION_BLOCK; first += 16) {
    const int64_t position = begin + first < end ? begin + first : begin, page = position / cache.page_size;
    const uint8_t* at = cache.rows + (cache.pages[page] * cache.page_size + position % cache.page_size) * cache.row_bytes;
    for (int64_t i = 0; i < 16; ++i) rows[first + i] = begin + first + i < end ? at + i * cache.row_bytes : at;
  }
}

// Gather the keys of `count` positions, rounded up to whole groups of LANES.
inline void gather_keys(const Block& block, int64_t count, bool is_float16) {
  Floats square[LANES];
  // A lane has 32 bits: one float or two numbers in bfloat16.
  const int64_t lanes = block.bytes / (is_float16 ? 2 : 4);
  for (int64_t first = 0; first < count; first += LANES) {
    for (int64_t lane = 0; lane < lanes; lane += LANES) {
      const int64_t width = lanes - lane < LANES ? lanes - lane : LANES;
      for (int64_t i = 0; i < LANES; ++i) {
        const uint8_t* key = block.rows[first + i] + block.keys;
        square[i] = is_float16 ? widen_half(reinterpret_cast<const uint16_t*>(key) + lane)
                               : load_first(reinterpret_cast<const float*>(key) + lane, width);
      }
      transpose(square);
      for (int64_t i = 0; i < width; ++i) store(block.gathered_keys + (lane + i) * ATTENTION_BLOCK + first, square[i]);
    }
  }
}

// Gather the values of `count` positions: rows of floats or of pairs, 32 bits each.
template <class Columns>
inline void gather_values(Columns columns, int64_t head_dim, int64_t count, float* values) {
  for (int64_t k = 0; k * Columns::PER_STEP < count; ++k, values += head_dim) {
    for (int64_t c = 0; c < head_dim; c += LANES) store(values + c, columns(k, c));
  }
}

// y[row][column …] (+)= the sum over k of x[row][k] · columns(k, column …)
template <int ROWS, int VECTORS, bool ADD, class Number, class Columns>
inline void product_tile(const Number* const* x, Columns columns, int64_t column, int64_t inputs, float* const* y, Ahead ahead) {
  Floats sums[ROWS][VECTORS];
  for (int r = 0; r < ROWS; ++r) {
    for (int v = 0; v < VECTORS; ++v) sums[r][v] = ADD ? load(y[r] + column + v * LANES) : broadcast(0.0f);
  }
#pragma GCC unroll 2
  for (int64_t k = 0; k * Columns::PER_STEP < inputs; ++k) {
    for (int64_t i = 0; i < Columns::PER_STEP; ++i) ahead(k * Columns::PER_STEP + i);
    typename Columns::Operand operands[VECTORS];
    for (int v = 0; v < VECTORS; ++v) operands[v] = columns(k, column + v * LANES);
    for (int r = 0; r < ROWS; ++r) {
      for (int v = 0; v < VECTORS; ++v) sums[r][v] = Columns::multiply(sums[r][v], operands[v], x[r], k);
    }
  }
  for (int r = 0; r < ROWS; ++r) {
    for (int v = 0; v < VECTORS; ++v) store(y[r] + column + v * LANES, sums[r][v]);
  }
}

// y[rows][width] (+)= x[rows][inputs] · columns[inputs][width], of at most TILE_ROWS rows given by their addresses
template <bool ADD, class Number, class Columns>
inline void product(int64_t rows, const Number* const* x, Columns columns, int64_t width, int64_t inputs, float* const* y,
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

// Rows whose weights are computed at once.
constexpr int64_t MAX_SOFTENED = 16;

// Turn the scores [rows][ATTENTION_BLOCK] of some rows from `row` on and a block from position `first` on into weights, and
// rescale their sums in `partial` to the new maximum of their scores. Each step is done for all rows before the next one,
// because the steps of a row wait for each other.
inline void soften(const AttentionItem& item, int64_t row, int64_t rows, int64_t first, float* scores, float* partial) {
  const int64_t head_dim = item.head_dim, stride = head_dim + PARTIAL_EXTRA;
  float tops[MAX_SOFTENED];
  Floats totals[MAX_SOFTENED];
  for (int64_t r = 0; r < rows; ++r) {
    float* at = scores + r * ATTENTION_BLOCK;
    const int64_t position = item.position + (row + r) / item.heads - first, visible = position - item.window + 1;
    if (visible > 0 || position < ATTENTION_BLOCK - 1) mask(at, visible, position);
    Floats top = load(at);
    for (int64_t i = LANES; i < ATTENTION_BLOCK; i += LANES) top = max(top, load(at + i));
    tops[r] = largest(top);
  }
  for (int64_t r = 0; r < rows; ++r) {
    float* sums = partial + r * stride;
    float& maximum = sums[head_dim];
    if (tops[r] <= maximum) continue;
    float factors[LANES];
    store(factors, exponential(broadcast(maximum - tops[r])));
    scale(sums, sums, head_dim, factors[0]);
    sums[head_dim + 1] *= factors[0];
    maximum = tops[r];
  }
  for (int64_t r = 0; r < rows; ++r) {
    float* at = scores + r * ATTENTION_BLOCK;
    const float maximum = partial[r * stride + head_dim];
    // All weights of a row without a visible position are 0.
    const Floats top = broadcast(maximum == -__builtin_inff() ? 0.0f : maximum);
    totals[r] = broadcast(0.0f);
    for (int64_t i = 0; i < ATTENTION_BLOCK; i += LANES) {
      const Floats weight = exponential(load(at + i) - top);
      totals[r] = totals[r] + weight;
      store(at + i, weight);
    }
  }
  for (int64_t r = 0; r < rows; ++r) partial[r * stride + head_dim + 1] += sum(totals[r]);
}

// Numbers of a row as the second operands of their type are multiplied: in place, or rounded to `memory`.
inline const float* rounded(const float* x, int64_t, float*) { return x; }
inline const uint16_t* rounded(const float* x, int64_t count, uint16_t* memory) {
  narrow(x, memory, count);
  return memory;
}

// Computes blocks of positions by vectors. `scratch`: see Operations::attend().
template <class Cache>
struct AttentionByVectors {
  using Number = typename Cache::Number;

  AttentionByVectors(const AttentionItem& given, float* scratch)
      : item(given), rows(given.tokens * given.heads), keys(scratch), values(keys + ATTENTION_BLOCK * given.head_dim),
        scores(values + ATTENTION_BLOCK * given.head_dim),
        weights(reinterpret_cast<Number*>(scores + MAX_SOFTENED * ATTENTION_BLOCK)),
        queries(weights + MAX_SOFTENED * ATTENTION_BLOCK) {}

  // One block of positions from `first` on, `count` of them gathered, for the rows of one group.
  void compute(int64_t group, int64_t first, int64_t count, const Block& block, float* partial) const {
    const int64_t head_dim = item.head_dim, stride = head_dim + PARTIAL_EXTRA;
    const Ahead next_keys{block.next_rows, block.next_keys, block.bytes};
    const Ahead next_values{block.next_rows, block.next_values, block.bytes};
    const typename Cache::Keys key_columns(block.gathered_keys, ATTENTION_BLOCK);
    const typename Cache::CachedValues cached_values(block.rows, block.values);
    if (rows > FEW_ROWS) gather_values(cached_values, head_dim, count, values);
    // Rows before this block attend to none of its positions.
    for (int64_t row = first > item.position ? (first - item.position) * item.heads : 0; row < rows; row += TILE_ROWS) {
      const int64_t some = rows - row < TILE_ROWS ? rows - row : TILE_ROWS;
      const Number* x[TILE_ROWS];
      float* scores_of[TILE_ROWS];
      float* sums_of[TILE_ROWS];
      for (int64_t r = 0; r < some; ++r) {
        const int64_t head = group * item.heads + (row + r) % item.heads;
        const float* query = item.queries + (row + r) / item.heads * item.query_stride + head * head_dim;
        x[r] = rounded(query, head_dim, queries + r * head_dim);
        scores_of[r] = scores + r * ATTENTION_BLOCK;
        sums_of[r] = partial + (row + r) * stride;
      }
      product<false>(some, x, key_columns, ATTENTION_BLOCK, head_dim, scores_of, next_keys);
      soften(item, row, some, first, scores, sums_of[0]);
      for (int64_t r = 0; r < some; ++r) x[r] = rounded(scores_of[r], ATTENTION_BLOCK, weights + r * ATTENTION_BLOCK);
      if (rows > FEW_ROWS) {
        product<true>(some, x, typename Cache::Values(values, head_dim), head_dim, count, sums_of, next_values);
      } else {
        product<true>(some, x, cached_values, head_dim, count, sums_of, next_values);
      }
    }
  }

  const AttentionItem& item;
  const int64_t rows;
  float* const keys;     // Block::gathered_keys
  float* const values;   // as gather_values() writes them
  float* const scores;   // [TILE_ROWS][ATTENTION_BLOCK]
  Number* const weights;  // [TILE_ROWS][ATTENTION_BLOCK], if they are rounded
  Number* const queries;  // [TILE_ROWS][head_dim], if they are rounded
};

#include "attention_amx.h"

template <class Method>
inline void attend_by(const AttentionItem& item, int64_t begin, int64_t end, float* partial, float* scratch) {
  const int64_t head_dim = item.head_dim, rows = item.tokens * item.heads, stride = head_dim + PARTIAL_EXTRA;
  const int64_t bytes = head_dim * (item.cache.format == FLOAT32 ? 4 : 2);
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
  Method method(item, scratch);
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
                        method.keys};
      gather_keys(block, count, item.cache.format == FLOAT16);
      method.compute(group, first, count, block, partial + group * rows * stride);
    }
  }
}

inline void attend(const AttentionItem& item, int64_t begin, int64_t end, float* partial, float* scratch) {
#if defined(__AMX_TILE__)
  if (attends_by_tiles(item)) return attend_by<AttentionByTiles>(item, begin, end, partial, scratch);
#endif
  switch (item.cache.format) {
    case FLOAT32:
      return attend_by<AttentionByVectors<Float32Cache>>(item, begin, end, partial, scratch);
    case BFLOAT16:
      return attend_by<AttentionByVectors<Bfloat16Cache>>(item, begin, end, partial, scratch);
    default:
      return attend_by<AttentionByVectors<Float16Cache>>(item, begin, end, partial, scratch);
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
