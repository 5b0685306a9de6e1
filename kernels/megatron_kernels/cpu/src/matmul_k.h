// Products with weights in Q4_K, Q5_K and Q6_K of GGUF files, of super blocks of 256 inputs. Activations as in matmul_int.h.
//
// A panel of Q4_K, per super block: half d[16], half dmin[16]; then for each of 8 blocks of 32 inputs: nibbles as INT4,
// uint8 scales[16], uint8 mins[16]. value = nibble · d · scale - dmin · min. Q5_K has fifth bits as INT5 after the nibbles.
//
// A panel of Q6_K, per super block: half d[16]; then for each of 8 blocks of 32 inputs: low nibbles as INT4, 2 x uint8
// [16][4] of the high bits, int8 scales[2][16]. Bits 2 i … 2 i + 1 of part j belong to inputs 16 j + 4 i …
// 16 j + 4 i + 3. value = (nibble + 16 · bits - 32) · d · scale[input / 16]. Q3_K is a case of it: three bits, 28 added.

constexpr int64_t SUPER_BLOCK = 256;

// Q4_K and Q5_K.
template <bool FIVE>
struct KWeights : NibbleWeights<KWeights<FIVE>> {
  using Base = NibbleWeights<KWeights<FIVE>>;
  static constexpr bool FIFTH_BITS = FIVE;
  static constexpr int64_t SCALES = Base::NIBBLES + (FIVE ? Base::BITS : 0), BLOCK_BYTES = SCALES + 2 * PANEL;
  static constexpr int64_t HEAD = 4 * PANEL, SUPER_BLOCK_BYTES = HEAD + SUPER_BLOCK / BLOCK * BLOCK_BYTES;
  static int64_t panel_bytes(int64_t inputs) { return inputs / SUPER_BLOCK * SUPER_BLOCK_BYTES; }
  static int64_t nibbles(int64_t block) { return block / 8 * SUPER_BLOCK_BYTES + HEAD + block % 8 * BLOCK_BYTES; }
  static Floats scale(const uint8_t* panel, int64_t block, int64_t lane) {
    const auto* d = reinterpret_cast<const uint16_t*>(panel + block / 8 * SUPER_BLOCK_BYTES);
    return widen_half(d + lane) * widen_uint8(panel + nibbles(block) + SCALES + lane);
  }
  static Floats offset(const uint8_t* panel, int64_t block, int64_t lane) {
    const auto* least = reinterpret_cast<const uint16_t*>(panel + block / 8 * SUPER_BLOCK_BYTES) + PANEL;
    const Floats value = widen_half(least + lane) * widen_uint8(panel + nibbles(block) + SCALES + PANEL + lane);
    return broadcast(0.0f) - value;
  }
};
using Q4KWeights = KWeights<false>;
using Q5KWeights = KWeights<true>;

struct Q6KWeights : IntegerWeights {
#if defined(__AVX512F__)
  using Few = Tiles<1, 1, 2>;
  using Many = Tiles<2, 4>;
#else
  using Few = Tiles<1, 1>;
  using Many = Tiles<1, 2>;
#endif
  static constexpr int64_t NIBBLES = BLOCK * PANEL / 2, BITS = BLOCK * PANEL / 4;
  static constexpr int64_t BLOCK_BYTES = NIBBLES + BITS + 2 * PANEL;
  static constexpr int64_t HEAD = 2 * PANEL, SUPER_BLOCK_BYTES = HEAD + SUPER_BLOCK / BLOCK * BLOCK_BYTES;
  static int64_t panel_bytes(int64_t inputs) { return inputs / SUPER_BLOCK * SUPER_BLOCK_BYTES; }

  template <int ROWS, int PANELS>
  static void accumulate(const uint8_t* panels, int64_t inputs, const uint8_t* const (&x)[ROWS],
                         Floats (&sums)[ROWS][PANELS * PARTS]) {
    const int64_t bytes = panel_bytes(inputs);
    for (int64_t block = 0; block < inputs / BLOCK; ++block) {
      const uint8_t* head = panels + block / 8 * SUPER_BLOCK_BYTES;
      const uint8_t* at = head + HEAD + block % 8 * BLOCK_BYTES;
      prefetch<PANELS>(at, bytes, BLOCK_BYTES);
      for (int half = 0; half < 2; ++half) {
        for (int i = 0; i < PANELS * PARTS; ++i) {
          const int64_t panel = i / PARTS * bytes, lane = i % PARTS * LANES;
          const Integers bits = load_bytes(at + panel + NIBBLES + half * 64 + lane * 4);
          Integers dots[ROWS];
          for (int r = 0; r < ROWS; ++r) dots[r] = broadcast_word(&activations(x[r], block).corrections[half]);
#pragma GCC unroll 4
          for (int word = 0; word < 4; ++word) {
            const Integers both = load_bytes(at + panel + word * 64 + lane * 4);
            const Integers weights = with_high_bits(half ? high_nibbles(both) : low_nibbles(both), bits, word);
            for (int r = 0; r < ROWS; ++r) {
              const Integers values = broadcast_word(activations(x[r], block).values + 16 * half + 4 * word);
              dots[r] = dot(dots[r], weights, values);
            }
          }
          const Floats d = widen_half(reinterpret_cast<const uint16_t*>(head + panel) + lane);
          const Floats scale = d * widen_int8(at + panel + NIBBLES + BITS + half * PANEL + lane);
          for (int r = 0; r < ROWS; ++r) {
            sums[r][i] = fma(to_floats(dots[r]), scale * broadcast(activations(x[r], block).scale), sums[r][i]);
          }
        }
      }
    }
  }
};
