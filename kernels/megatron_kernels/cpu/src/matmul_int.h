// Products with weights in int8, int5 and int4, of blocks of 32 inputs. Activations are int8 with a scale for each block.

// 32 activations of a prepared row.
struct ActivationBlock {
  int8_t values[32];       // round(x / scale)
  float scale;             // max |x| / 127
  float scaled_sum;        // scale · sum of values
  int32_t correction;      // -128 · sum of values: what the offset of stored int8 weights adds to a sum, negated
  int32_t sums[2];         // of the first and of the last 16 values
  float scaled_sums[2];    // scale · sums
  int32_t unused;
};
static_assert(sizeof(ActivationBlock) == 64);

constexpr int64_t BLOCK = 32;

inline const ActivationBlock& activations(const uint8_t* prepared, int64_t block) {
  return reinterpret_cast<const ActivationBlock*>(prepared)[block];
}

inline void prepare_integers(const float* x, int64_t inputs, uint8_t* prepared) {
  auto* block = reinterpret_cast<ActivationBlock*>(prepared);
  for (int64_t k = 0; k < inputs; k += BLOCK, ++block) {
    Floats maximum = broadcast(0.0f);
    for (int64_t i = 0; i < BLOCK; i += LANES) {
      const Floats value = load(x + k + i);
      maximum = max(maximum, max(value, broadcast(0.0f) - value));
    }
    const float greatest = largest(maximum);
    const Floats inverse = broadcast(greatest > 0.0f ? 127.0f / greatest : 0.0f);
    int32_t sums[2];
    for (int64_t half = 0; half < 2; ++half) {
      const int64_t begin = half * BLOCK / 2;
      Integers total = narrow_int8(load(x + k + begin) * inverse, block->values + begin);
      for (int64_t i = LANES; i < BLOCK / 2; i += LANES) {
        total = total + narrow_int8(load(x + k + begin + i) * inverse, block->values + begin + i);
      }
      sums[half] = sum(total);
    }
    block->scale = greatest * (1.0f / 127.0f);
    block->scaled_sum = block->scale * static_cast<float>(sums[0] + sums[1]);
    block->correction = -128 * (sums[0] + sums[1]);
    for (int64_t half = 0; half < 2; ++half) {
      block->sums[half] = sums[half];
      block->scaled_sums[half] = block->scale * static_cast<float>(sums[half]);
    }
  }
}

#if defined(__AVX512F__)
using IntegerFew = Tiles<4, 1, 2>;
using IntegerMany = Tiles<2, 4, 6>;
#elif defined(MEGATRON_PORTABLE)
using IntegerFew = Tiles<1, 1>;
using IntegerMany = Tiles<1, 2>;
#else
using IntegerFew = Tiles<1, 1>;
using IntegerMany = Tiles<1, 2, 3, 4>;
#endif

struct IntegerWeights {
  using Few = IntegerFew;
  using Many = IntegerMany;
  static int64_t row_bytes(int64_t inputs) { return inputs / BLOCK * static_cast<int64_t>(sizeof(ActivationBlock)); }
};

struct Int8Weights : IntegerWeights {
  static constexpr int64_t BLOCK_BYTES = BLOCK * PANEL + 2 * PANEL;
  static int64_t panel_bytes(int64_t inputs) { return inputs / BLOCK * BLOCK_BYTES; }
  static Floats scale(const uint8_t* panel, int64_t block, int64_t lane) {
    return widen_half(reinterpret_cast<const uint16_t*>(panel + block * BLOCK_BYTES + BLOCK * PANEL) + lane);
  }

  template <int ROWS, int PANELS>
  static void accumulate(const uint8_t* panels, int64_t inputs, const uint8_t* const (&x)[ROWS],
                         Floats (&sums)[ROWS][PANELS * PARTS], NextPanels next) {
    const int64_t bytes = panel_bytes(inputs);
    for (int64_t block = 0; block < inputs / BLOCK; ++block) {
      const uint8_t* at = panels + block * BLOCK_BYTES;
      prefetch<PANELS>(next, at, bytes, BLOCK_BYTES);
      Integers dots[ROWS][PANELS * PARTS];
      for (int r = 0; r < ROWS; ++r) {
        const int32_t start = CORRECTED_SUMS ? activations(x[r], block).correction : 0;
        for (int i = 0; i < PANELS * PARTS; ++i) dots[r][i] = broadcast_word(&start);
      }
#pragma GCC unroll 8
      for (int word = 0; word < 8; ++word) {
        Integers weights[PANELS * PARTS];
        for (int i = 0; i < PANELS * PARTS; ++i) {
          weights[i] = load_weights(at + i / PARTS * bytes + word * 64 + i % PARTS * LANES * 4);
        }
        for (int r = 0; r < ROWS; ++r) {
          const Integers values = broadcast_word(activations(x[r], block).values + 4 * word);
          for (int i = 0; i < PANELS * PARTS; ++i) dots[r][i] = dot_stored(dots[r][i], weights[i], values);
        }
      }
      for (int i = 0; i < PANELS * PARTS; ++i) {
        const Floats weight_scale = scale(panels + i / PARTS * bytes, block, i % PARTS * LANES);
        for (int r = 0; r < ROWS; ++r) {
          sums[r][i] = fma(to_floats(dots[r][i]), weight_scale * broadcast(activations(x[r], block).scale), sums[r][i]);
        }
      }
    }
  }
};

// Weights of four or five bits: value = integer · scale + offset. W describes where a panel has them:
//   W::FIFTH_BITS                         whether there are five bits
//   W::nibbles(block)                     offset of 4 x uint8 [16][4]: low halves are inputs 4 j … 4 j + 3 of part j, high
//                                         halves are inputs 16 later; then, with FIFTH_BITS, uint8 [16][4] of these bits
//   W::scale(panel, block, lane), W::offset(panel, block, lane)    of LANES outputs
template <class W>
struct NibbleWeights : IntegerWeights {
  static constexpr int64_t NIBBLES = BLOCK * PANEL / 2, BITS = BLOCK * PANEL / 8;

  // Four inputs of LANES outputs, 4 · word … 4 · word + 3 of a block and those 16 later.
  struct Words {
    Integers low, high;
  };
  static Words words(const uint8_t* nibbles, int word, int64_t lane) {
    const Integers both = load_bytes(nibbles + word * 64 + lane * 4);
    const Words four{low_nibbles(both), high_nibbles(both)};
    if constexpr (!W::FIFTH_BITS) return four;
    const Integers bits = load_bytes(nibbles + NIBBLES + lane * 4);
    return {with_bit(four.low, bits, word, 4), with_bit(four.high, bits, word + 4, 4)};
  }

  template <int ROWS, int PANELS>
  static void accumulate(const uint8_t* panels, int64_t inputs, const uint8_t* const (&x)[ROWS],
                         Floats (&sums)[ROWS][PANELS * PARTS], NextPanels next) {
    const int64_t bytes = W::panel_bytes(inputs), share = bytes / (inputs / BLOCK);
    for (int64_t block = 0; block < inputs / BLOCK; ++block) {
      const uint8_t* at = panels + W::nibbles(block);
      prefetch<PANELS>(next, panels + block * share, bytes, share);
      Integers dots[ROWS][PANELS * PARTS] = {};
#pragma GCC unroll 4
      for (int word = 0; word < 4; ++word) {
        Words weights[PANELS * PARTS];
        for (int i = 0; i < PANELS * PARTS; ++i) weights[i] = words(at + i / PARTS * bytes, word, i % PARTS * LANES);
        for (int r = 0; r < ROWS; ++r) {
          const int8_t* values = activations(x[r], block).values + 4 * word;
          const Integers low = broadcast_word(values);
          for (int i = 0; i < PANELS * PARTS; ++i) {
            dots[r][i] = W::FIFTH_BITS ? dot(dots[r][i], weights[i].low, low) : dot_nibbles(dots[r][i], weights[i].low, low);
          }
          const Integers high = broadcast_word(values + 16);
          for (int i = 0; i < PANELS * PARTS; ++i) {
            dots[r][i] = W::FIFTH_BITS ? dot(dots[r][i], weights[i].high, high) : dot_nibbles(dots[r][i], weights[i].high, high);
          }
        }
      }
      for (int i = 0; i < PANELS * PARTS; ++i) {
        const uint8_t* panel = panels + i / PARTS * bytes;
        const Floats scale = W::scale(panel, block, i % PARTS * LANES), offset = W::offset(panel, block, i % PARTS * LANES);
        for (int r = 0; r < ROWS; ++r) {
          const ActivationBlock& values = activations(x[r], block);
          const Integers total = W::FIFTH_BITS ? dots[r][i] : totals(dots[r][i]);
          sums[r][i] = fma(to_floats(total), scale * broadcast(values.scale), sums[r][i]);
          sums[r][i] = fma(offset, broadcast(values.scaled_sum), sums[r][i]);
        }
      }
    }
  }
};

// INT4 and INT5.
template <bool FIVE>
struct ScaledWeights : NibbleWeights<ScaledWeights<FIVE>> {
  using Base = NibbleWeights<ScaledWeights<FIVE>>;
  static constexpr bool FIFTH_BITS = FIVE;
  static constexpr int64_t HALVES = Base::NIBBLES + (FIVE ? Base::BITS : 0), BLOCK_BYTES = HALVES + 4 * PANEL;
  static int64_t panel_bytes(int64_t inputs) { return inputs / BLOCK * BLOCK_BYTES; }
  static int64_t nibbles(int64_t block) { return block * BLOCK_BYTES; }
  static Floats scale(const uint8_t* panel, int64_t block, int64_t lane) {
    return widen_half(reinterpret_cast<const uint16_t*>(panel + nibbles(block) + HALVES) + lane);
  }
  static Floats offset(const uint8_t* panel, int64_t block, int64_t lane) {
    return widen_half(reinterpret_cast<const uint16_t*>(panel + nibbles(block) + HALVES) + PANEL + lane);
  }
};
using Int4Weights = ScaledWeights<false>;
using Int5Weights = ScaledWeights<true>;
