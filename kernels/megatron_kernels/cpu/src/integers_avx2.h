// Integers of AVX2. Included after simd_avx2.h.

// LANES integers of 32 bits, or LANES words of four bytes.
struct Integers {
  __m256i v;
};

inline Integers load_bytes(const uint8_t* x) { return {_mm256_loadu_si256(reinterpret_cast<const __m256i*>(x))}; }
inline Integers broadcast_word(const void* x) {
  int32_t word;
  __builtin_memcpy(&word, x, sizeof word);
  return {_mm256_set1_epi32(word)};
}
// y = x as int8, to the nearest, halves to even. Returns the integers.
inline Integers narrow_int8(Floats x, int8_t* y) {
  const __m256i integers = _mm256_cvtps_epi32(x.v);
  const __m128i pairs = _mm_packs_epi32(_mm256_castsi256_si128(integers), _mm256_extracti128_si256(integers, 1));
  _mm_storel_epi64(reinterpret_cast<__m128i*>(y), _mm_packs_epi16(pairs, pairs));
  return {integers};
}
inline Integers operator+(Integers a, Integers b) { return {_mm256_add_epi32(a.v, b.v)}; }
inline int32_t sum(Integers a) {
  __m128i s = _mm_add_epi32(_mm256_castsi256_si128(a.v), _mm256_extracti128_si256(a.v, 1));
  s = _mm_add_epi32(s, _mm_shuffle_epi32(s, 0x4E));
  return _mm_cvtsi128_si32(_mm_add_epi32(s, _mm_shuffle_epi32(s, 0xB1)));
}
inline Floats to_floats(Integers a) { return {_mm256_cvtepi32_ps(a.v)}; }
inline Integers widen_uint8(const uint8_t* x) {
  return {_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(x)))};
}
inline Integers widen_int8(const uint8_t* x) {
  return {_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(x)))};
}
inline Integers low_nibbles(Integers a) { return {_mm256_and_si256(a.v, _mm256_set1_epi8(15))}; }
inline Integers high_nibbles(Integers a) { return {_mm256_and_si256(_mm256_srli_epi16(a.v, 4), _mm256_set1_epi8(15))}; }
// low | (bit `number` of each byte of `bits`) << to
inline Integers with_bit(Integers low, Integers bits, int number, int to) {
  const __m256i moved = number < to ? _mm256_slli_epi16(bits.v, to - number) : _mm256_srli_epi16(bits.v, number - to);
  return {_mm256_or_si256(low.v, _mm256_and_si256(moved, _mm256_set1_epi8(static_cast<char>(1 << to))))};
}
// low | (pair `number` of the bits of each byte of `bits`) << to
inline Integers with_pair(Integers low, Integers bits, int number, int to) {
  const int from = 2 * number;
  const __m256i moved = from < to ? _mm256_slli_epi16(bits.v, to - from) : _mm256_srli_epi16(bits.v, from - to);
  return {_mm256_or_si256(low.v, _mm256_and_si256(moved, _mm256_set1_epi8(static_cast<char>(3 << to))))};
}

// Added now: GCC would add all products of a block at its end, and store them in memory until then.
inline Integers added_now(__m256i sums) {
  asm("" : "+x"(sums));
  return {sums};
}

// sums + the product of four bytes in each lane. Weights are 0 … 63, activations -127 … 127.
inline Integers dot(Integers sums, Integers weights, Integers x) {
  const __m256i pairs = _mm256_maddubs_epi16(weights.v, x.v);
  return added_now(_mm256_add_epi32(sums.v, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1))));
}

// As dot(), of at most eight products of weights 0 … 15, with totals() at the end: they fit into 16 bits.
inline Integers dot_nibbles(Integers sums, Integers weights, Integers x) {
  return added_now(_mm256_add_epi16(sums.v, _mm256_maddubs_epi16(weights.v, x.v)));
}
inline Integers totals(Integers sums) { return {_mm256_madd_epi16(sums.v, _mm256_set1_epi16(1))}; }

// Weights of eight bits, stored with 128 added. |weight| times activation with the sign of the weight: at most
// 2 · 128 · 127 in 16 bits.
constexpr bool CORRECTED_SUMS = false;
inline Integers load_weights(const uint8_t* x) {
  return {_mm256_xor_si256(load_bytes(x).v, _mm256_set1_epi8(-128))};
}
inline Integers dot_stored(Integers sums, Integers weights, Integers x) {
  return dot(sums, {_mm256_abs_epi8(weights.v)}, {_mm256_sign_epi8(x.v, weights.v)});
}
