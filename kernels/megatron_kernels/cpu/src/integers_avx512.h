// Integers of AVX-512, and of its extensions VNNI and BF16 where the variant has them. Included after simd_avx512.h.

// LANES integers of 32 bits, or LANES words of four bytes.
struct Integers {
  __m512i v;
};

inline Integers load_bytes(const uint8_t* x) { return {_mm512_loadu_si512(x)}; }
inline Integers broadcast_word(const void* x) {
  int32_t word;
  __builtin_memcpy(&word, x, sizeof word);
  return {_mm512_set1_epi32(word)};
}
// y = x as int8, to the nearest, halves to even. Returns the integers.
inline Integers narrow_int8(Floats x, int8_t* y) {
  const __m512i integers = _mm512_cvtps_epi32(x.v);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(y), _mm512_cvtepi32_epi8(integers));
  return {integers};
}
inline Integers operator+(Integers a, Integers b) { return {_mm512_add_epi32(a.v, b.v)}; }
inline int32_t sum(Integers a) { return _mm512_reduce_add_epi32(a.v); }
inline Floats to_floats(Integers a) { return {_mm512_cvtepi32_ps(a.v)}; }
inline Integers widen_uint8(const uint8_t* x) {
  return {_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(x)))};
}
inline Integers widen_int8(const uint8_t* x) {
  return {_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(x)))};
}
inline Integers low_nibbles(Integers a) { return {_mm512_and_si512(a.v, _mm512_set1_epi8(15))}; }
inline Integers high_nibbles(Integers a) { return {_mm512_and_si512(_mm512_srli_epi16(a.v, 4), _mm512_set1_epi8(15))}; }
// low | (bit `number` of each byte of `bits`) << to
inline Integers with_bit(Integers low, Integers bits, int number, int to) {
  const __m512i moved = number < to ? _mm512_slli_epi16(bits.v, to - number) : _mm512_srli_epi16(bits.v, number - to);
  return {_mm512_or_si512(low.v, _mm512_and_si512(moved, _mm512_set1_epi8(static_cast<char>(1 << to))))};
}
// low | (pair `number` of the bits of each byte of `bits`) << to
inline Integers with_pair(Integers low, Integers bits, int number, int to) {
  const int from = 2 * number;
  const __m512i moved = from < to ? _mm512_slli_epi16(bits.v, to - from) : _mm512_srli_epi16(bits.v, from - to);
  return {_mm512_or_si512(low.v, _mm512_and_si512(moved, _mm512_set1_epi8(static_cast<char>(3 << to))))};
}

// sums + the product of four bytes in each lane. Weights are 0 … 63, activations -127 … 127.
inline Integers dot(Integers sums, Integers weights, Integers x) {
#if defined(__AVX512VNNI__)
  return {_mm512_dpbusd_epi32(sums.v, weights.v, x.v)};
#else
  const __m512i pairs = _mm512_maddubs_epi16(weights.v, x.v);
  return {_mm512_add_epi32(sums.v, _mm512_madd_epi16(pairs, _mm512_set1_epi16(1)))};
#endif
}

// As dot(), of at most eight products of weights 0 … 15, with totals() at the end.
inline Integers dot_nibbles(Integers sums, Integers weights, Integers x) {
#if defined(__AVX512VNNI__)
  return dot(sums, weights, x);
#else
  return {_mm512_add_epi16(sums.v, _mm512_maddubs_epi16(weights.v, x.v))};
#endif
}
inline Integers totals(Integers sums) {
#if defined(__AVX512VNNI__)
  return sums;
#else
  return {_mm512_madd_epi16(sums.v, _mm512_set1_epi16(1))};
#endif
}

// Weights of eight bits, stored with 128 added: VNNI multiplies them as they are, and the sums begin with the correction
// of an activation block.
#if defined(__AVX512VNNI__)
constexpr bool CORRECTED_SUMS = true;
inline Integers load_weights(const uint8_t* x) { return load_bytes(x); }
inline Integers dot_stored(Integers sums, Integers weights, Integers x) { return dot(sums, weights, x); }
#else
constexpr bool CORRECTED_SUMS = false;
inline Integers load_weights(const uint8_t* x) {
  return {_mm512_xor_si512(load_bytes(x).v, _mm512_set1_epi8(-128))};
}
// |weight| times activation with the sign of the weight: at most 2 · 128 · 127 in 16 bits.
inline Integers dot_stored(Integers sums, Integers weights, Integers x) {
  const __m512i zero = _mm512_setzero_si512();
  const __m512i signed_x = _mm512_mask_sub_epi8(x.v, _mm512_movepi8_mask(weights.v), zero, x.v);
  return dot(sums, {_mm512_abs_epi8(weights.v)}, {signed_x});
}
#endif

#if defined(__AVX512BF16__)
// sums + the product of two bfloat16 numbers in each lane, by VDPBF16PS.
inline Floats dot_bfloat16(Floats sums, Integers weights, Integers x) {
  return {_mm512_dpbf16_ps(sums.v, reinterpret_cast<__m512bh>(weights.v), reinterpret_cast<__m512bh>(x.v))};
}
// Pairs of LANES numbers of two bytes: even[0], odd[0], even[1] …
inline Integers interleave(const uint8_t* even, const uint8_t* odd) {
  const __m512i low = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(even)));
  const __m512i high = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(odd)));
  return {_mm512_or_si512(low, _mm512_slli_epi32(high, 16))};
}
inline void store(float* x, Integers a) { _mm512_storeu_si512(x, a.v); }
#define MEGATRON_BFLOAT16
#endif
