// Products with weights in float32, bfloat16 and float16. Activations are float32, or bfloat16 where the CPU multiplies it.

// Tiles of formats. DotMany: of bfloat16 that the CPU multiplies. WidenedMany: of bfloat16 that is converted.
#if defined(__AVX512F__)
using FloatFew = Tiles<4, 1, 2, 4>;
using FloatMany = Tiles<1, 6, 8>;
using DotMany = Tiles<2, 6, 8>;
using WidenedMany = FloatMany;
#elif defined(MEGATRON_PORTABLE)
using FloatFew = Tiles<1, 1>;
using FloatMany = Tiles<1, 2>;
using DotMany = FloatMany;
using WidenedMany = FloatMany;
#else
using FloatFew = Tiles<2, 1, 2>;
using FloatMany = Tiles<1, 4, 6>;
using DotMany = FloatMany;
using WidenedMany = Tiles<1, 4>;  // bfloat16 as pairs takes two more registers
#endif

inline float float_at(const uint8_t* x, int64_t number) {
  float value;
  __builtin_memcpy(&value, x + number * 4, sizeof value);
  return value;
}

// Weights that W::weights(panel, k, lane) converts to float32: those of input k of LANES outputs.
template <class W>
struct FloatWeights {
  using Few = FloatFew;
  using Many = FloatMany;

  static constexpr int64_t INPUT_BYTES = 4;  // of a prepared row
  static int64_t row_bytes(int64_t inputs) { return (inputs * INPUT_BYTES + 63) / 64 * 64; }

  template <int ROWS, int PANELS>
  static void accumulate(const uint8_t* panels, int64_t inputs, const uint8_t* const (&x)[ROWS],
                         Floats (&sums)[ROWS][PANELS * PARTS], NextPanels next) {
    const int64_t bytes = W::panel_bytes(inputs);
    for (int64_t even = 0; even < inputs; even += 2) {
      prefetch<PANELS>(next, panels + bytes / inputs * even, bytes, bytes / inputs * 2);
#pragma GCC unroll 2
      for (int64_t k = even; k < even + 2; ++k) {
        Floats weights[PANELS * PARTS];
        for (int i = 0; i < PANELS * PARTS; ++i) weights[i] = W::weights(panels + i / PARTS * bytes, k, i % PARTS * LANES);
        for (int r = 0; r < ROWS; ++r) {
          const Floats value = broadcast(float_at(x[r], k));
          for (int i = 0; i < PANELS * PARTS; ++i) sums[r][i] = fma(value, weights[i], sums[r][i]);
        }
      }
    }
  }
};

struct Float32Weights : FloatWeights<Float32Weights> {
  static int64_t panel_bytes(int64_t inputs) { return inputs * PANEL * 4; }
  static Floats weights(const uint8_t* panel, int64_t k, int64_t lane) {
    return load(reinterpret_cast<const float*>(panel) + k * PANEL + lane);
  }
};

struct Float16Weights : FloatWeights<Float16Weights> {
  static int64_t panel_bytes(int64_t inputs) { return inputs * PANEL * 2; }
  static Floats weights(const uint8_t* panel, int64_t k, int64_t lane) {
    return widen_half(reinterpret_cast<const uint16_t*>(panel) + k * PANEL + lane);
  }
};

// Two inputs of an output are neighbours.
#if defined(MEGATRON_BFLOAT16)

struct Bfloat16Weights {
  using Few = FloatFew;
  using Many = DotMany;

  static int64_t panel_bytes(int64_t inputs) { return inputs * PANEL * 2; }
  // An odd number of cache lines, so that the same inputs of all rows do not share a set of the cache.
  static constexpr int64_t INPUT_BYTES = 2;
  static int64_t row_bytes(int64_t inputs) { return (inputs * INPUT_BYTES + 63) / 64 * 64 | 64; }

  template <int ROWS, int PANELS>
  static void accumulate(const uint8_t* panels, int64_t inputs, const uint8_t* const (&x)[ROWS],
                         Floats (&sums)[ROWS][PANELS * PARTS], NextPanels next) {
    const int64_t bytes = panel_bytes(inputs);
#pragma GCC unroll 2
    for (int64_t pair = 0; pair < inputs / 2; ++pair) {
      prefetch<PANELS>(next, panels + pair * PANEL * 4, bytes, PANEL * 4);
      Integers weights[PANELS * PARTS];
      for (int i = 0; i < PANELS * PARTS; ++i) {
        weights[i] = load_bytes(panels + i / PARTS * bytes + (pair * PANEL + i % PARTS * LANES) * 4);
      }
      for (int r = 0; r < ROWS; ++r) {
        const Integers value = broadcast_word(x[r] + pair * 4);
        for (int i = 0; i < PANELS * PARTS; ++i) sums[r][i] = dot_bfloat16(sums[r][i], weights[i], value);
      }
    }
  }
};

#else

struct Bfloat16Weights : FloatWeights<Bfloat16Weights> {
  using Many = WidenedMany;
  static int64_t panel_bytes(int64_t inputs) { return inputs * PANEL * 2; }
  static Floats weights(const uint8_t* panel, int64_t k, int64_t lane) {
    const Floats pairs = load(reinterpret_cast<const float*>(panel) + k / 2 * PANEL + lane);
    return k % 2 ? high_bfloat16(pairs) : low_bfloat16(pairs);
  }
};

#endif
