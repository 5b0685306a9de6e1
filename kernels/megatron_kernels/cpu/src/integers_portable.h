// Integers in GCC's vector extension, for every CPU. Included after simd_portable.h.

// LANES integers of 32 bits, or LANES words of four bytes.
struct Integers {
  Bits v;
};

inline Integers load_bytes(const uint8_t* x) {
  Integers a;
  __builtin_memcpy(&a, x, sizeof a);
  return a;
}
inline Integers broadcast_word(const void* x) {
  int32_t word;
  __builtin_memcpy(&word, x, sizeof word);
  return {Bits{word, word, word, word}};
}
// y = x as int8, to the nearest, halves to even. Returns the integers.
inline Integers narrow_int8(Floats x, int8_t* y) {
  const Bits integers = __builtin_convertvector(round(x).v, Bits);
  for (int64_t i = 0; i < LANES; ++i) y[i] = static_cast<int8_t>(integers[i]);
  return {integers};
}
inline Integers operator+(Integers a, Integers b) { return {a.v + b.v}; }
inline int32_t sum(Integers a) { return a.v[0] + a.v[1] + a.v[2] + a.v[3]; }
inline Floats to_floats(Integers a) { return {__builtin_convertvector(a.v, Vector)}; }
inline Integers widen_uint8(const uint8_t* x) { return {Bits{x[0], x[1], x[2], x[3]}}; }
inline Integers widen_int8(const uint8_t* x) {
  const auto* y = reinterpret_cast<const int8_t*>(x);
  return {Bits{y[0], y[1], y[2], y[3]}};
}
inline Integers low_nibbles(Integers a) { return {a.v & 0x0F0F0F0F}; }
inline Integers high_nibbles(Integers a) { return {a.v >> 4 & 0x0F0F0F0F}; }
// low | (bit `number` of each byte of `bits`) << to
inline Integers with_bit(Integers low, Integers bits, int number, int to) {
  return {low.v | ((bits.v >> number & 0x01010101) << to)};
}
// low | (pair `number` of the bits of each byte of `bits`) << to
inline Integers with_pair(Integers low, Integers bits, int number, int to) {
  return {low.v | ((bits.v >> 2 * number & 0x03030303) << to)};
}

// sums + the product of four signed bytes in each lane.
inline Integers dot(Integers sums, Integers weights, Integers x) {
  for (int shift = 0; shift < 32; shift += 8) {
    sums.v += (weights.v << (24 - shift) >> 24) * (x.v << (24 - shift) >> 24);
  }
  return sums;
}
inline Integers dot_nibbles(Integers sums, Integers weights, Integers x) { return dot(sums, weights, x); }
inline Integers totals(Integers sums) { return sums; }

// Weights of eight bits, stored with 128 added.
constexpr bool CORRECTED_SUMS = false;
inline Integers load_weights(const uint8_t* x) { return {load_bytes(x).v ^ static_cast<int32_t>(0x80808080)}; }
inline Integers dot_stored(Integers sums, Integers weights, Integers x) { return dot(sums, weights, x); }
