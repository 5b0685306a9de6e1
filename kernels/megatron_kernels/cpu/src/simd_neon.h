// Floats of NEON on AArch64. Included by variant.cpp within the variant's namespace.

constexpr int64_t LANES = 4;

struct Floats {
  float32x4_t v;
};

inline Floats load(const float* x) { return {vld1q_f32(x)}; }
inline void store(float* x, Floats a) { vst1q_f32(x, a.v); }
inline Floats load_first(const float* x, int64_t count) {
  float lanes[LANES] = {};
  for (int64_t i = 0; i < count; ++i) lanes[i] = x[i];
  return load(lanes);
}
inline void store_first(float* x, Floats a, int64_t count) {
  float lanes[LANES];
  store(lanes, a);
  for (int64_t i = 0; i < count; ++i) x[i] = lanes[i];
}
inline Floats broadcast(float x) { return {vdupq_n_f32(x)}; }
inline Floats operator+(Floats a, Floats b) { return {vaddq_f32(a.v, b.v)}; }
inline Floats operator-(Floats a, Floats b) { return {vsubq_f32(a.v, b.v)}; }
inline Floats operator*(Floats a, Floats b) { return {vmulq_f32(a.v, b.v)}; }
inline Floats operator/(Floats a, Floats b) { return {vdivq_f32(a.v, b.v)}; }
inline Floats fma(Floats a, Floats b, Floats c) { return {vfmaq_f32(c.v, a.v, b.v)}; }
inline Floats max(Floats a, Floats b) { return {vmaxq_f32(a.v, b.v)}; }
inline Floats min(Floats a, Floats b) { return {vminq_f32(a.v, b.v)}; }
// value where a >= b, else 0.
inline Floats where_at_least(Floats a, Floats b, Floats value) {
  return {vreinterpretq_f32_u32(vandq_u32(vcgeq_f32(a.v, b.v), vreinterpretq_u32_f32(value.v)))};
}
inline float sum(Floats a) { return vaddvq_f32(a.v); }
inline float largest(Floats a) { return vmaxvq_f32(a.v); }
inline Floats round(Floats a) { return {vrndnq_f32(a.v)}; }
// 2^n of whole numbers -126 … 127.
inline Floats power_of_two(Floats n) {
  return {vreinterpretq_f32_s32(vshlq_n_s32(vaddq_s32(vcvtq_s32_f32(n.v), vdupq_n_s32(127)), 23))};
}
inline Floats widen_bfloat16(const uint16_t* x) { return {vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(x), 16))}; }
inline Floats widen_half(const uint16_t* x) { return {vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(x)))}; }
// To the nearest, halves to even.
inline void narrow_bfloat16(Floats a, uint16_t* y) {
  const uint32x4_t bits = vreinterpretq_u32_f32(a.v);
  const uint32x4_t odd = vandq_u32(vshrq_n_u32(bits, 16), vdupq_n_u32(1));
  vst1_u16(y, vshrn_n_u32(vaddq_u32(bits, vaddq_u32(odd, vdupq_n_u32(0x7FFF))), 16));
}
inline void narrow_half(Floats a, uint16_t* y) { vst1_u16(y, vreinterpret_u16_f16(vcvt_f16_f32(a.v))); }
// The bfloat16 numbers in the low and the high halves of 32-bit lanes.
inline Floats low_bfloat16(Floats pairs) { return {vreinterpretq_f32_u32(vshlq_n_u32(vreinterpretq_u32_f32(pairs.v), 16))}; }
inline Floats high_bfloat16(Floats pairs) {
  return {vreinterpretq_f32_u32(vandq_u32(vreinterpretq_u32_f32(pairs.v), vdupq_n_u32(0xFFFF0000u)))};
}
// Transpose LANES x LANES lanes of 32 bits, which may be any data.
inline void transpose(Floats (&r)[LANES]) {
  const float32x4x2_t a = vtrnq_f32(r[0].v, r[1].v), b = vtrnq_f32(r[2].v, r[3].v);
  r[0].v = vcombine_f32(vget_low_f32(a.val[0]), vget_low_f32(b.val[0]));
  r[1].v = vcombine_f32(vget_low_f32(a.val[1]), vget_low_f32(b.val[1]));
  r[2].v = vcombine_f32(vget_high_f32(a.val[0]), vget_high_f32(b.val[0]));
  r[3].v = vcombine_f32(vget_high_f32(a.val[1]), vget_high_f32(b.val[1]));
}
