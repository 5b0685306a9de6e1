// Floats of AVX-512 (F, BW, VL, DQ). Included by variant.cpp within the variant's namespace.

constexpr int64_t LANES = 16;

struct Floats {
  __m512 v;
};

inline __mmask16 first_lanes(int64_t count) { return static_cast<__mmask16>((1u << count) - 1); }
inline Floats load(const float* x) { return {_mm512_loadu_ps(x)}; }
inline void store(float* x, Floats a) { _mm512_storeu_ps(x, a.v); }
inline Floats load_first(const float* x, int64_t count) {
  return {_mm512_maskz_loadu_ps(first_lanes(count), x)};
}
inline void store_first(float* x, Floats a, int64_t count) {
  _mm512_mask_storeu_ps(x, first_lanes(count), a.v);
}
inline Floats broadcast(float x) { return {_mm512_set1_ps(x)}; }
inline Floats operator+(Floats a, Floats b) { return {_mm512_add_ps(a.v, b.v)}; }
inline Floats operator-(Floats a, Floats b) { return {_mm512_sub_ps(a.v, b.v)}; }
inline Floats operator*(Floats a, Floats b) { return {_mm512_mul_ps(a.v, b.v)}; }
inline Floats operator/(Floats a, Floats b) { return {_mm512_div_ps(a.v, b.v)}; }
inline Floats fma(Floats a, Floats b, Floats c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
inline Floats max(Floats a, Floats b) { return {_mm512_max_ps(a.v, b.v)}; }
inline Floats min(Floats a, Floats b) { return {_mm512_min_ps(a.v, b.v)}; }
// value where a >= b, else 0.
inline Floats where_at_least(Floats a, Floats b, Floats value) {
  return {_mm512_maskz_mov_ps(_mm512_cmp_ps_mask(a.v, b.v, _CMP_GE_OQ), value.v)};
}
inline float sum(Floats a) { return _mm512_reduce_add_ps(a.v); }
inline float largest(Floats a) { return _mm512_reduce_max_ps(a.v); }
inline Floats round(Floats a) { return {_mm512_roundscale_ps(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)}; }
// 2^n of whole numbers -126 … 127.
inline Floats power_of_two(Floats n) {
  return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_add_epi32(_mm512_cvtps_epi32(n.v), _mm512_set1_epi32(127)), 23))};
}
inline Floats widen_bfloat16(const uint16_t* x) {
  const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(x));
  return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16))};
}
inline Floats widen_half(const uint16_t* x) {
  return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(x)))};
}
// To the nearest, halves to even.
inline void narrow_bfloat16(Floats a, uint16_t* y) {
#if defined(__AVX512BF16__)
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(y), reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(a.v)));
#else
  const __m512i bits = _mm512_castps_si512(a.v);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  const __m512i rounded = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7FFF)));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(y), _mm512_cvtepi32_epi16(_mm512_srli_epi32(rounded, 16)));
#endif
}
inline void narrow_half(Floats a, uint16_t* y) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(y), _mm512_cvtps_ph(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
// The bfloat16 numbers in the low and the high halves of 32-bit lanes.
inline Floats low_bfloat16(Floats pairs) { return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_castps_si512(pairs.v), 16))}; }
inline Floats high_bfloat16(Floats pairs) {
  return {_mm512_castsi512_ps(_mm512_and_si512(_mm512_castps_si512(pairs.v), _mm512_set1_epi32(-65536)))};
}
// Transpose LANES x LANES lanes of 32 bits, which may be any data.
inline void transpose(Floats (&r)[LANES]) {
  __m512 t[16];
  for (int i = 0; i < 16; i += 2) {
    t[i] = _mm512_unpacklo_ps(r[i].v, r[i + 1].v);
    t[i + 1] = _mm512_unpackhi_ps(r[i].v, r[i + 1].v);
  }
  for (int i = 0; i < 16; i += 4) {
    for (int j = 0; j < 2; ++j) {
      const __m512d a = _mm512_castps_pd(t[i + j]), b = _mm512_castps_pd(t[i + j + 2]);
      r[i + 2 * j].v = _mm512_castpd_ps(_mm512_unpacklo_pd(a, b));
      r[i + 2 * j + 1].v = _mm512_castpd_ps(_mm512_unpackhi_pd(a, b));
    }
  }
  for (int i = 0; i < 4; ++i) {
    t[i] = _mm512_shuffle_f32x4(r[i].v, r[i + 4].v, 0x88);
    t[i + 4] = _mm512_shuffle_f32x4(r[i].v, r[i + 4].v, 0xDD);
    t[i + 8] = _mm512_shuffle_f32x4(r[i + 8].v, r[i + 12].v, 0x88);
    t[i + 12] = _mm512_shuffle_f32x4(r[i + 8].v, r[i + 12].v, 0xDD);
  }
  for (int i = 0; i < 4; ++i) {
    r[i].v = _mm512_shuffle_f32x4(t[i], t[i + 8], 0x88);
    r[i + 8].v = _mm512_shuffle_f32x4(t[i], t[i + 8], 0xDD);
    r[i + 4].v = _mm512_shuffle_f32x4(t[i + 4], t[i + 12], 0x88);
    r[i + 12].v = _mm512_shuffle_f32x4(t[i + 4], t[i + 12], 0xDD);
  }
}
