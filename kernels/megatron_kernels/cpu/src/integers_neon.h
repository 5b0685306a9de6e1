// Integers of NEON, and of its extensions for dot products and bfloat16 where the variant has them. Included after
// simd_neon.h.

// LANES integers of 32 bits, or LANES words of four bytes.
struct Integers {
  int32x4_t v;
};

inline int8x16_t bytes(Integers a) { return vreinterpretq_s8_s32(a.v); }
inline uint8x16_t unsigned_bytes(Integers a) { return vreinterpretq_u8_s32(a.v); }
inline Integers integers(uint8x16_t a) { return {vreinterpretq_s32_u8(a)}; }

inline Integers load_bytes(const uint8_t* x) { return integers(vld1q_u8(x)); }
inline Integers broadcast_word(const void* x) {
  int32_t word;
  __builtin_memcpy(&word, x, sizeof word);
  return {vdupq_n_s32(word)};
}
// y = x as int8, to the nearest, halves to even. Returns the integers.
inline Integers narrow_int8(Floats x, int8_t* y) {
  const int32x4_t integers = vcvtnq_s32_f32(x.v);
  const int16x4_t pairs = vmovn_s32(integers);
  const int8x8_t narrow = vmovn_s16(vcombine_s16(pairs, pairs));
  __builtin_memcpy(y, &narrow, 4);
  return {integers};
}
inline Integers operator+(Integers a, Integers b) { return {vaddq_s32(a.v, b.v)}; }
inline int32_t sum(Integers a) { return vaddvq_s32(a.v); }
inline Floats to_floats(Integers a) { return {vcvtq_f32_s32(a.v)}; }
inline Integers widen_uint8(const uint8_t* x) {
  uint32_t word;
  __builtin_memcpy(&word, x, sizeof word);
  return {vreinterpretq_s32_u32(vmovl_u16(vget_low_u16(vmovl_u8(vcreate_u8(word)))))};
}
inline Integers widen_int8(const uint8_t* x) {
  uint32_t word;
  __builtin_memcpy(&word, x, sizeof word);
  return {vmovl_s16(vget_low_s16(vmovl_s8(vcreate_s8(word))))};
}
inline Integers low_nibbles(Integers a) { return integers(vandq_u8(unsigned_bytes(a), vdupq_n_u8(15))); }
inline Integers high_nibbles(Integers a) { return integers(vshrq_n_u8(unsigned_bytes(a), 4)); }
// low | (bit `number` of each byte of `bits`) << to
inline Integers with_bit(Integers low, Integers bits, int number, int to) {
  const uint8x16_t moved = vshlq_u8(unsigned_bytes(bits), vdupq_n_s8(static_cast<int8_t>(to - number)));
  return integers(vorrq_u8(unsigned_bytes(low), vandq_u8(moved, vdupq_n_u8(static_cast<uint8_t>(1 << to)))));
}
// low | (pair `number` of the bits of each byte of `bits`) << to
inline Integers with_pair(Integers low, Integers bits, int number, int to) {
  const uint8x16_t moved = vshlq_u8(unsigned_bytes(bits), vdupq_n_s8(static_cast<int8_t>(to - 2 * number)));
  return integers(vorrq_u8(unsigned_bytes(low), vandq_u8(moved, vdupq_n_u8(static_cast<uint8_t>(3 << to)))));
}

// sums + the product of four signed bytes in each lane.
inline Integers dot(Integers sums, Integers weights, Integers x) {
#if defined(__ARM_FEATURE_DOTPROD)
  return {vdotq_s32(sums.v, bytes(weights), bytes(x))};
#else
  const int16x8_t low = vmull_s8(vget_low_s8(bytes(weights)), vget_low_s8(bytes(x)));
  const int16x8_t high = vmull_high_s8(bytes(weights), bytes(x));
  return {vaddq_s32(sums.v, vpaddq_s32(vpaddlq_s16(low), vpaddlq_s16(high)))};
#endif
}
inline Integers dot_nibbles(Integers sums, Integers weights, Integers x) { return dot(sums, weights, x); }
inline Integers totals(Integers sums) { return sums; }

// Weights of eight bits, stored with 128 added.
constexpr bool CORRECTED_SUMS = false;
inline Integers load_weights(const uint8_t* x) {
  return integers(veorq_u8(unsigned_bytes(load_bytes(x)), vdupq_n_u8(128)));
}
inline Integers dot_stored(Integers sums, Integers weights, Integers x) { return dot(sums, weights, x); }

#if defined(__ARM_FEATURE_BF16)
// sums + the product of two bfloat16 numbers in each lane, by BFDOT.
inline Floats dot_bfloat16(Floats sums, Integers weights, Integers x) {
  return {vbfdotq_f32(sums.v, vreinterpretq_bf16_s32(weights.v), vreinterpretq_bf16_s32(x.v))};
}
// Pairs of LANES numbers of two bytes: even[0], odd[0], even[1] …
inline Integers interleave(const uint8_t* even, const uint8_t* odd) {
  const uint16x4_t low = vreinterpret_u16_u8(vld1_u8(even)), high = vreinterpret_u16_u8(vld1_u8(odd));
  return {vreinterpretq_s32_u16(vcombine_u16(vzip1_u16(low, high), vzip2_u16(low, high)))};
}
inline void store(float* x, Integers a) { vst1q_f32(x, vreinterpretq_f32_s32(a.v)); }
#define MEGATRON_BFLOAT16
#endif
