// Rows of a packed matrix as floats, for embeddings.

inline uint16_t half_bits(const uint8_t* halves, int64_t number) {
  uint16_t bits;
  __builtin_memcpy(&bits, halves + number * 2, sizeof bits);
  return bits;
}
inline float half_at(const uint8_t* halves, int64_t number) { return float_of_half(half_bits(halves, number)); }

// The nibble of input k of a block.
inline int nibble_at(const uint8_t* nibbles, int64_t lane, int64_t k) {
  const uint8_t both = nibbles[k % 16 / 4 * 64 + lane * 4 + k % 4];
  return k < 16 ? both & 15 : both >> 4;
}

// The integer of input k of a block in W: a nibble and its fifth bit.
template <class W>
inline float integer_at(const uint8_t* nibbles, int64_t lane, int64_t k) {
  const int bit = W::FIFTH_BITS ? nibbles[W::NIBBLES + lane * 4 + k % 4] >> (k / 4) & 1 : 0;
  return static_cast<float>(nibble_at(nibbles, lane, k) + 16 * bit);
}

// x[32] = one block of an output in INT4 or INT5.
template <class W>
inline void unpack_scaled(const uint8_t* panel, int64_t block, int64_t lane, float* x) {
  const uint8_t* at = panel + W::nibbles(block);
  const float scale = half_at(at + W::HALVES, lane), offset = half_at(at + W::HALVES, PANEL + lane);
  for (int64_t k = 0; k < BLOCK; ++k) x[k] = integer_at<W>(at, lane, k) * scale + offset;
}

// x[32] = one block of an output in Q4_K or Q5_K.
template <class W>
inline void unpack_k(const uint8_t* panel, int64_t block, int64_t lane, float* x) {
  const uint8_t* head = panel + block / 8 * W::SUPER_BLOCK_BYTES;
  const uint8_t* at = panel + W::nibbles(block);
  const float scale = half_at(head, lane) * at[W::SCALES + lane];
  const float offset = half_at(head, PANEL + lane) * at[W::SCALES + PANEL + lane];
  for (int64_t k = 0; k < BLOCK; ++k) x[k] = integer_at<W>(at, lane, k) * scale - offset;
}

// x[32] = one block of an output in Q2_K, Q3_K or Q6_K.
template <class W>
inline void unpack_pairs(const uint8_t* panel, int64_t block, int64_t lane, float* x) {
  const int64_t vector = lane / LANES * LANES;
  const uint8_t* head = W::head(panel, block);
  const uint8_t* at = W::block_at(panel, block);
  for (int half = 0; half < 2; ++half) {
    float scales[LANES], offsets[LANES] = {};
    store(scales, W::scale(head, at, half, vector));
    if constexpr (W::HAS_OFFSET) store(offsets, W::offset(head, at, half, vector));
    for (int word = 0; word < 4; ++word) {
      const Integers integers = W::integers(at, half, word, vector);
      uint8_t bytes[4 * LANES];
      __builtin_memcpy(bytes, &integers, sizeof bytes);
      for (int k = 0; k < 4; ++k) {
        const int value = bytes[4 * (lane - vector) + k] - W::ZERO;
        *x++ = static_cast<float>(value) * scales[lane - vector] + offsets[lane - vector];
      }
    }
  }
}

// x[32] = one block of an output.
inline void unpack_block(int64_t format, const uint8_t* panel, int64_t block, int64_t lane, float* x) {
  switch (format) {
    case FLOAT32:
      for (int64_t k = 0; k < BLOCK; ++k) x[k] = float_at(panel, (block * BLOCK + k) * PANEL + lane);
      return;
    case FLOAT16:
      for (int64_t k = 0; k < BLOCK; ++k) x[k] = half_at(panel, (block * BLOCK + k) * PANEL + lane);
      return;
    case BFLOAT16:
      for (int64_t k = 0; k < BLOCK; ++k) {
        x[k] = float_of_bfloat16(half_bits(panel, (block * BLOCK + k) / 2 * 2 * PANEL + lane * 2 + k % 2));
      }
      return;
    case INT8: {
      const uint8_t* at = panel + block * Int8Weights::BLOCK_BYTES;
      const float scale = half_at(at + BLOCK * PANEL, lane);
      for (int64_t k = 0; k < BLOCK; ++k) x[k] = static_cast<float>(at[k / 4 * 64 + lane * 4 + k % 4] - 128) * scale;
      return;
    }
    case INT5:
      return unpack_scaled<Int5Weights>(panel, block, lane, x);
    case INT4:
      return unpack_scaled<Int4Weights>(panel, block, lane, x);
    case Q4_K:
      return unpack_k<Q4KWeights>(panel, block, lane, x);
    case Q5_K:
      return unpack_k<Q5KWeights>(panel, block, lane, x);
    case Q2_K:
      return unpack_pairs<Q2KWeights>(panel, block, lane, x);
    case Q3_K:
      return unpack_pairs<Q3KWeights>(panel, block, lane, x);
    case Q6_K:
      return unpack_pairs<Q6KWeights>(panel, block, lane, x);
  }
}

inline int64_t panel_bytes(int64_t format, int64_t inputs) {
  switch (format) {
    case FLOAT32:
      return Float32Weights::panel_bytes(inputs);
    case BFLOAT16:
      return Bfloat16Weights::panel_bytes(inputs);
    case FLOAT16:
      return Float16Weights::panel_bytes(inputs);
    case INT8:
      return Int8Weights::panel_bytes(inputs);
    case INT5:
      return Int5Weights::panel_bytes(inputs);
    case INT4:
      return Int4Weights::panel_bytes(inputs);
    case Q2_K:
      return Q2KWeights::panel_bytes(inputs);
    case Q3_K:
      return Q3KWeights::panel_bytes(inputs);
    case Q4_K:
      return Q4KWeights::panel_bytes(inputs);
    case Q5_K:
      return Q5KWeights::panel_bytes(inputs);
    default:
      return Q6KWeights::panel_bytes(inputs);
  }
}

inline void unpack_row(const Matrix& matrix, int64_t output, float* x) {
  const uint8_t* panel = matrix.panels + output / PANEL * panel_bytes(matrix.format, matrix.inputs);
  for (int64_t block = 0; block < matrix.inputs / BLOCK; ++block) {
    unpack_block(matrix.format, panel, block, output % PANEL, x + block * BLOCK);
  }
}
