// Packing of weights into panels, directly from the rows of a file.
//
// Blocks of GGUF files keep their values where the target has their format. Everything else is decoded to floats, 16 rows
// and up to 256 inputs at a time, and encoded in the format of the target.

// Types of weights in files, numbered as in GGML.
enum Source : int64_t {
  F32 = 0, F16 = 1, Q4_0 = 2, Q4_1 = 3, Q5_0 = 6, Q5_1 = 7, Q8_0 = 8, K2 = 10, K3 = 11, K4 = 12, K5 = 13, K6 = 14, BF16 = 30
};

// Bytes of a panel's nibbles, fifth bits and pairs of bits of one block.
constexpr int64_t NIBBLES = Int5Weights::NIBBLES, FIFTH_BITS = Int5Weights::BITS, BIT_PAIRS = Q2KWeights::PAIRS;

// Bytes of `count` values of a row.
int64_t source_bytes(int64_t source, int64_t count) {
  switch (source) {
    case F32:
      return count * 4;
    case F16:
    case BF16:
      return count * 2;
    case Q4_0:
      return count / BLOCK * 18;
    case Q4_1:
      return count / BLOCK * 20;
    case Q5_0:
      return count / BLOCK * 22;
    case Q5_1:
      return count / BLOCK * 24;
    case Q8_0:
      return count / BLOCK * 34;
    case K2:
      return count / SUPER_BLOCK * 84;
    case K3:
      return count / SUPER_BLOCK * 110;
    case K4:
      return count / SUPER_BLOCK * 144;
    case K5:
      return count / SUPER_BLOCK * 176;
    default:
      return count / SUPER_BLOCK * 210;
  }
}

// Bytes of `count` inputs of a panel.
int64_t target_bytes(int64_t format, int64_t count) {
  switch (format) {
    case FLOAT32:
      return Float32Weights::panel_bytes(count);
    case BFLOAT16:
      return Bfloat16Weights::panel_bytes(count);
    case FLOAT16:
      return Float16Weights::panel_bytes(count);
    case INT8:
      return Int8Weights::panel_bytes(count);
    case INT5:
      return Int5Weights::panel_bytes(count);
    case INT4:
      return Int4Weights::panel_bytes(count);
    case Q2_K:
      return Q2KWeights::panel_bytes(count);
    case Q3_K:
      return Q3KWeights::panel_bytes(count);
    case Q4_K:
      return Q4KWeights::panel_bytes(count);
    case Q5_K:
      return Q5KWeights::panel_bytes(count);
    default:
      return Q6KWeights::panel_bytes(count);
  }
}

uint16_t half_at(const uint8_t* x) {
  uint16_t bits;
  __builtin_memcpy(&bits, x, sizeof bits);
  return bits;
}

void put_half(uint8_t* halves, int64_t lane, uint16_t bits) { __builtin_memcpy(halves + lane * 2, &bits, sizeof bits); }

// Words of four bytes of 16 rows, `count` of each, to [count][16].
void put_words(const uint8_t* rows, int64_t row_bytes, int64_t count, uint8_t* to) {
  if (count % LANES > 0) {
    for (int64_t word = 0; word < count; ++word) {
      for (int64_t lane = 0; lane < PANEL; ++lane) {
        __builtin_memcpy(to + (word * PANEL + lane) * 4, rows + lane * row_bytes + word * 4, 4);
      }
    }
    return;
  }
  for (int64_t word = 0; word < count; word += LANES) {
    for (int64_t lane = 0; lane < PANEL; lane += LANES) {
      Floats square[LANES];
      for (int64_t i = 0; i < LANES; ++i) square[i] = load(reinterpret_cast<const float*>(rows + (lane + i) * row_bytes + word * 4));
      transpose(square);
      for (int64_t i = 0; i < LANES; ++i) store(reinterpret_cast<float*>(to) + (word + i) * PANEL + lane, square[i]);
    }
  }
}

// The scale and the minimum of block `number` of Q4_K or Q5_K, six bits each.
void scale_and_minimum(const uint8_t* packed, int64_t number, uint8_t& scale, uint8_t& minimum) {
  if (number < 4) {
    scale = packed[number] & 63;
    minimum = packed[number + 4] & 63;
  } else {
    scale = static_cast<uint8_t>((packed[number + 4] & 15) | (packed[number - 4] >> 6 << 4));
    minimum = static_cast<uint8_t>((packed[number + 4] >> 4) | (packed[number] >> 6 << 4));
  }
}

// The 32 integers of a block of Q5_0 or Q5_1, 0 … 31.
void integers_of_q5(int64_t source, const uint8_t* block, uint8_t* q) {
  const uint8_t* bits = block + (source == Q5_1 ? 4 : 2);
  const uint8_t* nibbles = bits + 4;
  for (int64_t k = 0; k < BLOCK; ++k) {
    const int nibble = nibbles[k % 16] >> (k / 16 * 4) & 15, bit = bits[k / 8] >> (k % 8) & 1;
    q[k] = static_cast<uint8_t>(nibble | bit << 4);
  }
}

// The 256 integers of a super block of Q4_K, 0 … 15, or Q5_K, 0 … 31.
void integers_of_k45(int64_t source, const uint8_t* block, uint8_t* q) {
  const uint8_t* bits = block + 16;
  const uint8_t* nibbles = source == K5 ? bits + 32 : bits;
  for (int64_t k = 0; k < SUPER_BLOCK; ++k) {
    const int nibble = nibbles[k / 64 * 32 + k % 32] >> (k % 64 / 32 * 4) & 15;
    const int bit = source == K5 ? bits[k % 32] >> (k / 32) & 1 : 0;
    q[k] = static_cast<uint8_t>(nibble | bit << 4);
  }
}

// The 256 integers of a super block of Q2_K, 0 … 3, or Q3_K, 0 … 7.
void integers_of_k23(int64_t source, const uint8_t* block, uint8_t* q) {
  const uint8_t* pairs = block + (source == K3 ? 32 : 16);
  for (int64_t k = 0; k < SUPER_BLOCK; ++k) {
    const int low = pairs[k / 128 * 32 + k % 32] >> (k % 128 / 32 * 2) & 3;
    const int bit = source == K3 ? block[k % 32] >> (k / 32) & 1 : 0;
    q[k] = static_cast<uint8_t>(low | bit << 2);
  }
}

// The 256 integers of a super block of Q6_K, 0 … 63.
void integers_of_k6(const uint8_t* block, uint8_t* q) {
  const uint8_t* nibbles = block;
  const uint8_t* bits = block + 128;
  for (int64_t part = 0; part < 8; ++part) {
    const int64_t half = part / 4, of_half = part % 4;
    for (int64_t i = 0; i < 32; ++i) {
      const int low = nibbles[half * 64 + of_half % 2 * 32 + i] >> (of_half / 2 * 4) & 15;
      const int high = bits[half * 32 + i] >> (2 * of_half) & 3;
      q[part * 32 + i] = static_cast<uint8_t>(low | high << 4);
    }
  }
}

// The byte of scales of 16 values of Q2_K, Q3_K or Q6_K: the scale and the minimum of Q2_K, a signed scale of the others.
uint8_t scale_of_pairs(int64_t source, const uint8_t* block, int64_t number) {
  if (source == K2) return block[number];
  if (source == K6) return block[192 + number];
  const uint8_t* packed = block + 96;
  const int low = packed[number % 8] >> (number / 8 * 4) & 15, high = packed[8 + number % 4] >> (number / 4 * 2) & 3;
  return static_cast<uint8_t>((low | high << 4) - 32);
}

// The bits of the factor of all scales of Q2_K, Q3_K or Q6_K, after everything else but the factor of the minima.
uint16_t factor_of_pairs(int64_t source, const uint8_t* block) {
  return half_at(block + (source == K2 ? 80 : source == K3 ? 108 : 208));
}

// x[count] = the values at `row`.
void decode(int64_t source, const uint8_t* row, int64_t count, float* x) {
  switch (source) {
    case F32:
      __builtin_memcpy(x, row, static_cast<uint64_t>(count) * 4);
      return;
    case F16:
      for (int64_t k = 0; k < count; ++k) x[k] = float_of_half(half_at(row + 2 * k));
      return;
    case BF16:
      for (int64_t k = 0; k < count; ++k) x[k] = float_of_bfloat16(half_at(row + 2 * k));
      return;
    case Q4_0:
    case Q4_1: {
      const float scale = float_of_half(half_at(row)), offset = source == Q4_1 ? float_of_half(half_at(row + 2)) : 0.0f;
      const uint8_t* nibbles = row + (source == Q4_1 ? 4 : 2);
      const int zero = source == Q4_1 ? 0 : 8;
      for (int64_t k = 0; k < 16; ++k) {
        x[k] = static_cast<float>((nibbles[k] & 15) - zero) * scale + offset;
        x[16 + k] = static_cast<float>((nibbles[k] >> 4) - zero) * scale + offset;
      }
      return;
    }
    case Q8_0: {
      const float scale = float_of_half(half_at(row));
      for (int64_t k = 0; k < BLOCK; ++k) x[k] = static_cast<float>(static_cast<int8_t>(row[2 + k])) * scale;
      return;
    }
    case Q5_0:
    case Q5_1: {
      uint8_t q[BLOCK];
      integers_of_q5(source, row, q);
      const float scale = float_of_half(half_at(row)), offset = source == Q5_1 ? float_of_half(half_at(row + 2)) : 0.0f;
      const int zero = source == Q5_1 ? 0 : 16;
      for (int64_t k = 0; k < BLOCK; ++k) x[k] = static_cast<float>(q[k] - zero) * scale + offset;
      return;
    }
    case K4:
    case K5: {
      uint8_t q[SUPER_BLOCK];
      integers_of_k45(source, row, q);
      for (int64_t k = 0; k < SUPER_BLOCK; ++k) {
        uint8_t scale, minimum;
        scale_and_minimum(row + 4, k / BLOCK, scale, minimum);
        const float offset = float_of_half(half_at(row + 2)) * minimum;
        x[k] = float_of_half(half_at(row)) * scale * q[k] - offset;
      }
      return;
    }
    case K2: {
      uint8_t q[SUPER_BLOCK];
      integers_of_k23(source, row, q);
      for (int64_t k = 0; k < SUPER_BLOCK; ++k) {
        const uint8_t both = scale_of_pairs(source, row, k / 16);
        const float scale = float_of_half(factor_of_pairs(source, row)) * static_cast<float>(both & 15);
        x[k] = scale * q[k] - float_of_half(half_at(row + 82)) * static_cast<float>(both >> 4);
      }
      return;
    }
    default: {
      uint8_t q[SUPER_BLOCK];
      source == K3 ? integers_of_k23(source, row, q) : integers_of_k6(row, q);
      const int zero = source == K3 ? 4 : 32;
      const float d = float_of_half(factor_of_pairs(source, row));
      for (int64_t k = 0; k < SUPER_BLOCK; ++k) {
        const auto scale = static_cast<int8_t>(scale_of_pairs(source, row, k / 16));
        x[k] = d * static_cast<float>(scale) * static_cast<float>(q[k] - zero);
      }
    }
  }
}

// Round to the nearest integer, halves to even, of numbers that are clamped first. NaN gives 0.
float rounded(float x, float low, float high) {
  constexpr float SHIFT = 12582912.0f;  // 1.5 · 2^23 leaves no bits for a fraction
  const float clamped = x > high ? high : x > low ? x : x <= low ? low : 0.0f;
  return (clamped + SHIFT) - SHIFT;
}

// One block of 16 rows, x[row][32], in int8: 127 steps from 0 to the greatest magnitude.
void encode_int8(const float* x, int64_t stride, uint8_t* to) {
  uint8_t stored[PANEL * BLOCK];
  for (int64_t lane = 0; lane < PANEL; ++lane) {
    const float* row = x + lane * stride;
    float maximum = 0.0f;
    for (int64_t k = 0; k < BLOCK; ++k) {
      const float magnitude = __builtin_fabsf(row[k]);
      maximum = magnitude > maximum ? magnitude : maximum;
    }
    const uint16_t half = half_of_float(maximum / 127.0f);
    const float scale = float_of_half(half);
    for (int64_t k = 0; k < BLOCK; ++k) {
      const float steps = scale == 0.0f ? 0.0f : rounded(row[k] / scale, -127.0f, 127.0f);
      stored[lane * BLOCK + k] = static_cast<uint8_t>(static_cast<int32_t>(steps) + 128);
    }
    put_half(to + BLOCK * PANEL, lane, half);
  }
  put_words(stored, BLOCK, BLOCK / 4, to);
}

// One block of 16 rows in int4: 15 steps from the minimum to the maximum.
void encode_int4(const float* x, int64_t stride, uint8_t* to) {
  uint8_t stored[PANEL * BLOCK / 2];
  uint8_t* scales = to + BLOCK * PANEL / 2;
  for (int64_t lane = 0; lane < PANEL; ++lane) {
    const float* row = x + lane * stride;
    float minimum = row[0], maximum = row[0];
    for (int64_t k = 1; k < BLOCK; ++k) {
      minimum = row[k] < minimum ? row[k] : minimum;
      maximum = row[k] > maximum ? row[k] : maximum;
    }
    const uint16_t scale_bits = half_of_float((maximum - minimum) / 15.0f), offset_bits = half_of_float(minimum);
    const float scale = float_of_half(scale_bits), offset = float_of_half(offset_bits);
    uint8_t nibbles[BLOCK];
    for (int64_t k = 0; k < BLOCK; ++k) {
      const float steps = scale == 0.0f ? 0.0f : rounded((row[k] - offset) / scale, 0.0f, 15.0f);
      nibbles[k] = static_cast<uint8_t>(static_cast<int32_t>(steps));
    }
    for (int64_t k = 0; k < 16; ++k) stored[lane * 16 + k] = static_cast<uint8_t>(nibbles[k] | nibbles[16 + k] << 4);
    put_half(scales, lane, scale_bits);
    put_half(scales + 2 * PANEL, lane, offset_bits);
  }
  put_words(stored, BLOCK / 2, 4, to);
}

// `count` inputs of 16 rows, x[row][stride], in a format of floats or of blocks of 32.
void encode(int64_t format, const float* x, int64_t stride, int64_t count, uint8_t* to) {
  for (int64_t k = 0; k < count; k += BLOCK, x += BLOCK, to += target_bytes(format, BLOCK)) {
    if (format == INT8) {
      encode_int8(x, stride, to);
    } else if (format == INT4) {
      encode_int4(x, stride, to);
    } else if (format == FLOAT32) {
      put_words(reinterpret_cast<const uint8_t*>(x), stride * 4, BLOCK, to);
    } else {
      uint16_t square[PANEL][BLOCK];
      for (int64_t lane = 0; lane < PANEL; ++lane) {
        const float* row = x + lane * stride;
        for (int64_t i = 0; i < BLOCK; ++i) {
          square[lane][i] = format == BFLOAT16 ? bfloat16_of_float(row[i]) : half_of_float(row[i]);
        }
      }
      if (format == BFLOAT16) {
        put_words(reinterpret_cast<const uint8_t*>(square), sizeof square[0], BLOCK / 2, to);
      } else {
        for (int64_t i = 0; i < BLOCK; ++i) {
          for (int64_t lane = 0; lane < PANEL; ++lane) put_half(to, i * PANEL + lane, square[lane][i]);
        }
      }
    }
  }
}

// One block of 16 rows of Q4_0, Q4_1 or Q8_0 in int4 or int8. The bytes of a word are in the order of the file.
void move_block(int64_t source, const uint8_t* rows, int64_t row_bytes, uint8_t* to) {
  const int64_t words = source == Q8_0 ? 8 : 4, begin = source == Q4_1 ? 4 : 2;
  uint8_t values[PANEL * BLOCK];
  uint8_t* scales = to + words * PANEL * 4;
  for (int64_t lane = 0; lane < PANEL; ++lane) {
    const uint8_t* block = rows + lane * row_bytes;
    uint8_t* at = values + lane * words * 4;
    __builtin_memcpy(at, block + begin, static_cast<uint64_t>(words) * 4);
    const uint16_t scale = half_at(block);
    put_half(scales, lane, scale);
    if (source == Q8_0) {
      for (int64_t k = 0; k < BLOCK; ++k) at[k] ^= 0x80;
    } else {
      // The offset of Q4_0 is -8 · scale.
      const uint16_t offset = source == Q4_1 ? half_at(block + 2) : half_of_float(float_of_half(scale) * -8.0f);
      put_half(scales + 2 * PANEL, lane, offset);
    }
  }
  put_words(values, words * 4, words, to);
}

// The nibbles of one block of 16 rows, q[row][stride], of which a word's low halves are 4 inputs and its high halves those
// 16 later.
void put_nibbles(const uint8_t* q, int64_t stride, uint8_t* to) {
  uint8_t bytes[PANEL][16];
  for (int64_t lane = 0; lane < PANEL; ++lane, q += stride) {
    for (int64_t k = 0; k < 16; ++k) bytes[lane][k] = static_cast<uint8_t>((q[k] & 15) | (q[16 + k] & 15) << 4);
  }
  put_words(bytes[0], sizeof bytes[0], 4, to);
}

// Bit `from` of the integers of one block of 16 rows, q[row][stride], in the layout of fifth bits.
void put_bits(const uint8_t* q, int64_t stride, int from, uint8_t* to) {
  for (int64_t lane = 0; lane < PANEL; ++lane, q += stride) {
    for (int64_t j = 0; j < 4; ++j) {
      int bits = 0;
      for (int64_t i = 0; i < 8; ++i) bits |= (q[4 * i + j] >> from & 1) << i;
      to[lane * 4 + j] = static_cast<uint8_t>(bits);
    }
  }
}

// One block of 16 rows of Q5_0 or Q5_1.
void move_q5(int64_t source, const uint8_t* rows, int64_t row_bytes, uint8_t* to) {
  uint8_t q[PANEL][BLOCK];
  uint8_t* scales = to + NIBBLES + FIFTH_BITS;
  for (int64_t lane = 0; lane < PANEL; ++lane) {
    const uint8_t* block = rows + lane * row_bytes;
    integers_of_q5(source, block, q[lane]);
    const uint16_t scale = half_at(block);
    put_half(scales, lane, scale);
    // The offset of Q5_0 is -16 · scale.
    const uint16_t offset = source == Q5_1 ? half_at(block + 2) : half_of_float(float_of_half(scale) * -16.0f);
    put_half(scales + 2 * PANEL, lane, offset);
  }
  put_nibbles(q[0], BLOCK, to);
  put_bits(q[0], BLOCK, 4, to + NIBBLES);
}

// One super block of 16 rows of Q4_K or Q5_K.
void move_k45(int64_t source, const uint8_t* rows, int64_t row_bytes, uint8_t* to) {
  uint8_t q[PANEL][SUPER_BLOCK];
  for (int64_t lane = 0; lane < PANEL; ++lane) {
    const uint8_t* block = rows + lane * row_bytes;
    integers_of_k45(source, block, q[lane]);
    put_half(to, lane, half_at(block));
    put_half(to + 2 * PANEL, lane, half_at(block + 2));
  }
  to += 4 * PANEL;
  for (int64_t number = 0; number < 8; ++number, to += 2 * PANEL) {
    put_nibbles(q[0] + number * BLOCK, SUPER_BLOCK, to);
    to += NIBBLES;
    if (source == K5) {
      put_bits(q[0] + number * BLOCK, SUPER_BLOCK, 4, to);
      to += FIFTH_BITS;
    }
    for (int64_t lane = 0; lane < PANEL; ++lane) {
      scale_and_minimum(rows + lane * row_bytes + 4, number, to[lane], to[PANEL + lane]);
    }
  }
}

// The pairs of bits from bit `from` on of one block of 16 rows, q[row][stride].
void put_pairs(const uint8_t* q, int64_t stride, int from, uint8_t* to) {
  for (int64_t lane = 0; lane < PANEL; ++lane, q += stride) {
    for (int64_t half = 0; half < 2; ++half) {
      for (int64_t j = 0; j < 4; ++j) {
        int pairs = 0;
        for (int64_t i = 0; i < 4; ++i) pairs |= (q[16 * half + 4 * i + j] >> from & 3) << 2 * i;
        to[half * 64 + lane * 4 + j] = static_cast<uint8_t>(pairs);
      }
    }
  }
}

// One super block of 16 rows of Q2_K, Q3_K or Q6_K.
void move_pairs(int64_t source, const uint8_t* rows, int64_t row_bytes, uint8_t* to) {
  uint8_t q[PANEL][SUPER_BLOCK];
  for (int64_t lane = 0; lane < PANEL; ++lane) {
    const uint8_t* block = rows + lane * row_bytes;
    source == K6 ? integers_of_k6(block, q[lane]) : integers_of_k23(source, block, q[lane]);
    put_half(to, lane, factor_of_pairs(source, block));
    if (source == K2) put_half(to + 2 * PANEL, lane, half_at(block + 82));
  }
  to += (source == K2 ? 4 : 2) * PANEL;
  for (int64_t number = 0; number < 8; ++number) {
    const uint8_t* block = q[0] + number * BLOCK;
    if (source == K6) {
      put_nibbles(block, SUPER_BLOCK, to);
      to += NIBBLES;
    }
    put_pairs(block, SUPER_BLOCK, source == K6 ? 4 : 0, to);
    to += BIT_PAIRS;
    if (source == K3) {
      put_bits(block, SUPER_BLOCK, 2, to);
      to += FIFTH_BITS;
    }
    for (int64_t half = 0; half < 2; ++half) {
      for (int64_t lane = 0; lane < PANEL; ++lane) *to++ = scale_of_pairs(source, rows + lane * row_bytes, number * 2 + half);
    }
  }
}

// The format that a source's values are moved to without arithmetic; -1 for F16.
int64_t kept_format(int64_t source) {
  switch (source) {
    case F32:
      return FLOAT32;
    case BF16:
      return BFLOAT16;
    case Q4_0:
    case Q4_1:
      return INT4;
    case Q5_0:
    case Q5_1:
      return INT5;
    case Q8_0:
      return INT8;
    case K4:
      return Q4_K;
    case K5:
      return Q5_K;
    case K2:
      return Q2_K;
    case K3:
      return Q3_K;
    case K6:
      return Q6_K;
    default:
      return -1;
  }
}

// Inputs that are packed at once, so that the cache holds them: whole blocks of the source.
int64_t chunk_of(int64_t source) { return source >= K2 && source <= K6 ? SUPER_BLOCK : BLOCK; }

// One chunk of 16 rows in the format that keeps its values.
void move_chunk(int64_t source, const uint8_t* rows, int64_t row_bytes, uint8_t* to) {
  switch (source) {
    case F32:
    case BF16:
      return put_words(rows, row_bytes, source_bytes(source, BLOCK) / 4, to);
    case Q5_0:
    case Q5_1:
      return move_q5(source, rows, row_bytes, to);
    case K4:
    case K5:
      return move_k45(source, rows, row_bytes, to);
    case K2:
    case K3:
    case K6:
      return move_pairs(source, rows, row_bytes, to);
    default:
      return move_block(source, rows, row_bytes, to);
  }
}

inline void pack(const Packing& packing, int64_t first, int64_t end) {
  const auto& [source, rows, row_bytes, matrix, panels] = packing;
  const int64_t chunk = chunk_of(source);
  float x[PANEL][SUPER_BLOCK];
  for (int64_t panel = first; panel < end; ++panel) {
    const uint8_t* from = rows + panel * PANEL * row_bytes;
    uint8_t* to = panels + panel * target_bytes(matrix.format, matrix.inputs);
    for (int64_t k = 0; k < matrix.inputs; k += chunk) {
      if (kept_format(source) == matrix.format) {
        move_chunk(source, from, row_bytes, to);
      } else {
        for (int64_t lane = 0; lane < PANEL; ++lane) decode(source, from + lane * row_bytes, chunk, x[lane]);
        encode(matrix.format, x[0], SUPER_BLOCK, chunk, to);
      }
      from += source_bytes(source, chunk);
      to += target_bytes(matrix.format, chunk);
    }
  }
}

inline int64_t matrix_bytes(const Matrix& matrix) {
  return matrix.outputs / PANEL * target_bytes(matrix.format, matrix.inputs);
}
