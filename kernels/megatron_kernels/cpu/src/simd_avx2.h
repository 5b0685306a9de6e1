// Floats of AVX2 with FMA and F16C. Included by variant.cpp within the variant's namespace.

constexpr int64_t LANES = 8;

struct Floats {
  __m256 v;
};

inline __m256i first_lanes(int64_t count) {
  return _mm256_cmpgt_epi32(_mm256_set1_epi32(static_cast<int>(count)), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}
inline Floats load(const float* x) { return {_mm256_loadu_ps(x)}; }
inline void store(float* x, Floats a) { _mm256_storeu_ps(x, a.v); }
inline Floats load_first(const float* x, int64_t count) { return {_mm256_maskload_ps(x, first_lanes(count))}; }
inline void store_first(float* x, Floats a, int64_t count) { _mm256_maskstore_ps(x, first_lanes(count), a.v); }
inline Floats broadcast(float x) { return {_mm256_set1_ps(x)}; }
inline Floats operator+(Floats a, Floats b) { return {_mm256_add_ps(a.v, b.v)}; }
inline Floats operator-(Floats a, Floats b) { return {_mm256_sub_ps(a.v, b.v)}; }
inline Floats operator*(Floats a, Floats b) { return {_mm256_mul_ps(a.v, b.v)}; }
inline Floats operator/(Floats a, Floats b) { return {_mm256_div_ps(a.v, b.v)}; }
inline Floats fma(Floats a, Floats b, Floats c) { return {_mm256_fmadd_ps(a.v, b.v, c.v)}; }
inline Floats max(Floats a, Floats b) { return {_mm256_max_ps(a.v, b.v)}; }
inline Floats min(Floats a, Floats b) { return {_mm256_min_ps(a.v, b.v)}; }
// value where a >= b, else 0.
inline Floats where_at_least(Floats a, Floats b, Floats value) {
  return {_mm256_and_ps(_mm256_cmp_ps(a.v, b.v, _CMP_GE_OQ), value.v)};
}
inline float sum(Floats a) {
  __m128 s = _mm_add_ps(_mm256_castps256_ps128(a.v), _mm256_extractf128_ps(a.v, 1));
  s = _mm_add_ps(s, _mm_movehl_ps(s, s));
  return _mm_cvtss_f32(_mm_add_ss(s, _mm_movehdup_ps(s)));
}
inline float largest(Floats a) {
  __m128 s = _mm_max_ps(_mm256_castps256_ps128(a.v), _mm256_extractf128_ps(a.v, 1));
  s = _mm_max_ps(s, _mm_movehl_ps(s, s));
  return _mm_cvtss_f32(_mm_max_ss(s, _mm_movehdup_ps(s)));
}
inline Floats round(Floats a) { return {_mm256_round_ps(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)}; }
// 2^n of whole numbers -126 … 127.
inline Floats power_of_two(Floats n) {
  return {_mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n.v), _mm256_set1_epi32(127)), 23))};
}
inline Floats widen_bfloat16(const uint16_t* x) {
  const __m128i bits = _mm_loadu_si128(reinterpret_cast<const __m128i*>(x));
  return {_mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16))};
}
inline Floats widen_half(const uint16_t* x) {
  return {_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(x)))};
}
// To the nearest, halves to even.
inline void narrow_bfloat16(Floats a, uint16_t* y) {
  const __m256i bits = _mm256_castps_si256(a.v);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  const __m256i rounded = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7FFF)));
  const __m256i high = _mm256_srli_epi32(rounded, 16);
  const __m128i packed = _mm_packus_epi32(_mm256_castsi256_si128(high), _mm256_extracti128_si256(high, 1));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(y), packed);
}
inline void narrow_half(Floats a, uint16_t* y) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(y), _mm256_cvtps_ph(a.v, _MM_FROUND_TO_NEAREST_INT));
}
// The bfloat16 numbers in the low and the high halves of 32-bit lanes.
inline Floats low_bfloat16(Floats pairs) { return {_mm256_castsi256_ps(_mm256_slli_epi32(_mm256_castps_si256(pairs.v), 16))}; }
inline Floats high_bfloat16(Floats pairs) {
  return {_mm256_castsi256_ps(_mm256_and_si256(_mm256_castps_si256(pairs.v), _mm256_set1_epi32(-65536)))};
}
// Transpose LANES x LANES lanes of 32 bits, which may be any data.
inline void transpose(Floats (&r)[LANES]) {
  __m256 t[8];
  for (int i = 0; i < 8; i += 2) {
    t[i] = _mm256_unpacklo_ps(r[i].v, r[i + 1].v);
    t[i + 1] = _mm256_unpackhi_ps(r[i].v, r[i + 1].v);
  }
  for (int i = 0; i < 8; i += 4) {
    for (int j = 0; j < 2; ++j) {
      r[i + 2 * j].v = _mm256_shuffle_ps(t[i + j], t[i + j + 2], 0x44);
      r[i + 2 * j + 1].v = _mm256_shuffle_ps(t[i + j], t[i + j + 2], 0xEE);
    }
  }
  for (int i = 0; i < 4; ++i) {
    t[i] = _mm256_permute2f128_ps(r[i].v, r[i + 4].v, 0x20);
    t[i + 4] = _mm256_permute2f128_ps(r[i].v, r[i + 4].v, 0x31);
  }
  for (int i = 0; i < 8; ++i) r[i].v = t[i];
}
