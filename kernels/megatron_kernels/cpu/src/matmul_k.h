// Products with weights in K-quants of GGUF files, of super blocks of 256 inputs. Activations as in matmul_int.h.
//
// A panel of Q4_K, per super block: half d[16], half dmin[16]; then for each of 8 blocks of 32 inputs: nibbles as INT4,
// uint8 scales[16], uint8 mins[16]. value = nibble · d · scale - dmin · min. Q5_K has fifth bits as INT5 after the nibbles.
//
// The scales of Q2_K, Q3_K and Q6_K belong to 16 inputs. "Pairs" are 2 x uint8 [16][4] of two bits of each input: bits
// 2 i … 2 i + 1 of part j belong to inputs 16 j + 4 i … 16 j + 4 i + 3.
//
//   Q2_K, per super block: half d[16], half dmin[16]; per block: pairs, uint8 scales[2][16] in low nibbles and minima in
//         high nibbles. value = pair · d · scale - dmin · minimum
//   Q3_K, per super block: half d[16]; per block: pairs, uint8 [16][4] of third bits as the fifth bits of INT5, int8
//         scales[2][16]. value = (pair + 4 · bit - 4) · d · scale
//   Q6_K, per super block: half d[16]; per block: nibbles as INT4, pairs, int8 scales[2][16].
//         value = (nibble + 16 · pair - 32) · d · scale

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
    return widen_half(d + lane) * to_floats(widen_uint8(panel + nibbles(block) + SCALES + lane));
  }
  static Floats offset(const uint8_t* panel, int64_t block, int64_t lane) {
    const auto* minimum = reinterpret_cast<const uint16_t*>(panel + block / 8 * SUPER_BLOCK_BYTES) + PANEL;
    const Floats value = widen_half(minimum + lane) * to_floats(widen_uint8(panel + nibbles(block) + SCALES + PANEL + lane));
    return broadcast(0.0f) - value;
  }
};
using Q4KWeights = KWeights<false>;
using Q5KWeights = KWeights<true>;

// Q2_K, Q3_K and Q6_K. W describes a block of 32 inputs at `at`, and the super block at `head`:
//   W::ZERO                                      what is subtracted from its integers
//   W::IS_NIBBLE                                 whether they are below 16
//   W::HAS_OFFSET                                whether there are minima
//   W::integers(at, half, word, lane)            those of inputs 16 · half + 4 · word … of LANES outputs
//   W::scale(head, at, half, lane), W::offset    as those of NibbleWeights
template <class W>
struct PairWeights : IntegerWeights {
  static constexpr int64_t PAIRS = BLOCK * PANEL / 4, SCALES = 2 * PANEL;
  static int64_t panel_bytes(int64_t inputs) { return inputs / SUPER_BLOCK * super_block_bytes(); }
  static constexpr int64_t super_block_bytes() { return W::HEAD + SUPER_BLOCK / BLOCK * W::BLOCK_BYTES; }
  static const uint8_t* head(const uint8_t* panel, int64_t block) { return panel + block / 8 * super_block_bytes(); }
  static const uint8_t* block_at(const uint8_t* panel, int64_t block) {
    return head(panel, block) + W::HEAD + block % 8 * W::BLOCK_BYTES;
  }

  template <int ROWS, int PANELS>
  static void accumulate(const uint8_t* panels, int64_t inputs, const uint8_t* const (&x)[ROWS],
                         Floats (&sums)[ROWS][PANELS * PARTS], NextPanels next) {
    const int64_t bytes = panel_bytes(inputs), share = bytes / (inputs / BLOCK);
    for (int64_t block = 0; block < inputs / BLOCK; ++block) {
      prefetch<PANELS>(next, panels + block * share, bytes, share);
      for (int half = 0; half < 2; ++half) {
        Integers dots[ROWS][PANELS * PARTS] = {};
#pragma GCC unroll 4
        for (int word = 0; word < 4; ++word) {
          Integers weights[PANELS * PARTS];
          for (int i = 0; i < PANELS * PARTS; ++i) {
            weights[i] = W::integers(block_at(panels + i / PARTS * bytes, block), half, word, i % PARTS * LANES);
          }
          for (int r = 0; r < ROWS; ++r) {
            const Integers values = broadcast_word(activations(x[r], block).values + 16 * half + 4 * word);
            for (int i = 0; i < PANELS * PARTS; ++i) {
              dots[r][i] = W::IS_NIBBLE ? dot_nibbles(dots[r][i], weights[i], values) : dot(dots[r][i], weights[i], values);
            }
          }
        }
        Floats scales[PANELS * PARTS], offsets[PANELS * PARTS];
        for (int i = 0; i < PANELS * PARTS; ++i) {
          const uint8_t* panel = panels + i / PARTS * bytes;
          scales[i] = W::scale(head(panel, block), block_at(panel, block), half, i % PARTS * LANES);
          if constexpr (W::HAS_OFFSET) {
            offsets[i] = W::offset(head(panel, block), block_at(panel, block), half, i % PARTS * LANES);
          }
        }
        for (int r = 0; r < ROWS; ++r) {
          const ActivationBlock& values = activations(x[r], block);
          const int32_t correction = -W::ZERO * values.sums[half];
          for (int i = 0; i < PANELS * PARTS; ++i) {
            const Integers total = (W::IS_NIBBLE ? totals(dots[r][i]) : dots[r][i]) + broadcast_word(&correction);
            sums[r][i] = fma(to_floats(total), scales[i] * broadcast(values.scale), sums[r][i]);
            if constexpr (W::HAS_OFFSET) sums[r][i] = fma(offsets[i], broadcast(values.scaled_sums[half]), sums[r][i]);
          }
        }
      }
    }
  }
};

struct Q2KWeights : PairWeights<Q2KWeights> {
  static constexpr bool IS_NIBBLE = true, HAS_OFFSET = true;
  static constexpr int ZERO = 0;
  static constexpr int64_t HEAD = 4 * PANEL, BLOCK_BYTES = PAIRS + SCALES;
  static Integers integers(const uint8_t* at, int half, int word, int64_t lane) {
    return with_pair(Integers{}, load_bytes(at + half * 64 + lane * 4), word, 0);
  }
  static Floats scale(const uint8_t* head, const uint8_t* at, int half, int64_t lane) {
    const Floats d = widen_half(reinterpret_cast<const uint16_t*>(head) + lane);
    return d * to_floats(low_nibbles(widen_uint8(at + PAIRS + half * PANEL + lane)));
  }
  static Floats offset(const uint8_t* head, const uint8_t* at, int half, int64_t lane) {
    const Floats minimum = widen_half(reinterpret_cast<const uint16_t*>(head) + PANEL + lane);
    return broadcast(0.0f) - minimum * to_floats(high_nibbles(widen_uint8(at + PAIRS + half * PANEL + lane)));
  }
};

// Q3_K and Q6_K: the scales after BITS bytes of integers.
template <class W, int64_t BITS>
struct ScaledPairs : PairWeights<W> {
  static constexpr bool HAS_OFFSET = false;
  static constexpr int64_t HEAD = 2 * PANEL, BLOCK_BYTES = BITS + PairWeights<W>::SCALES;
  static Floats scale(const uint8_t* head, const uint8_t* at, int half, int64_t lane) {
    const Floats d = widen_half(reinterpret_cast<const uint16_t*>(head) + lane);
    return d * to_floats(widen_int8(at + BITS + half * PANEL + lane));
  }
};

struct Q3KWeights : ScaledPairs<Q3KWeights, BLOCK * PANEL * 3 / 8> {
  static constexpr bool IS_NIBBLE = true;
  static constexpr int ZERO = 4;
  static Integers integers(const uint8_t* at, int half, int word, int64_t lane) {
    const Integers pairs = with_pair(Integers{}, load_bytes(at + half * 64 + lane * 4), word, 0);
    return with_bit(pairs, load_bytes(at + PAIRS + lane * 4), 4 * half + word, 2);
  }
};

struct Q6KWeights : ScaledPairs<Q6KWeights, BLOCK * PANEL * 6 / 8> {
  static constexpr bool IS_NIBBLE = false;
  static constexpr int ZERO = 32;
  static constexpr int64_t NIBBLES = BLOCK * PANEL / 2;
  static Integers integers(const uint8_t* at, int half, int word, int64_t lane) {
    const Integers both = load_bytes(at + word * 64 + lane * 4);
    const Integers nibbles = half ? high_nibbles(both) : low_nibbles(both);
    return with_pair(nibbles, load_bytes(at + NIBBLES + half * 64 + lane * 4), word, 4);
  }
};
