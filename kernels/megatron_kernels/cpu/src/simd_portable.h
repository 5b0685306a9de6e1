// Floats in GCC's vector extension, for every CPU. Included by variant.cpp within the variant's namespace.

constexpr int64_t LANES = 4;

typedef float Vector __attribute__((vector_size(16)));
typedef int32_t Bits __attribute__((vector_size(16)));

struct Floats {
  Vector v;
};

inline Floats load(const float* x) {
  Floats a;
  __builtin_memcpy(&a, x, sizeof a);
  return a;
}
inline void store(float* x, Floats a) { __builtin_memcpy(x, &a, sizeof a); }
inline Floats load_first(const float* x, int64_t count) {
  Floats a{};
  for (int64_t i = 0; i < count; ++i) a.v[i] = x[i];
  return a;
}
inline void store_first(float* x, Floats a, int64_t count) {
  for (int64_t i = 0; i < count; ++i) x[i] = a.v[i];
}
inline Floats broadcast(float x) { return {Vector{x, x, x, x}}; }
inline Floats operator+(Floats a, Floats b) { return {a.v + b.v}; }
inline Floats operator-(Floats a, Floats b) { return {a.v - b.v}; }
inline Floats operator*(Floats a, Floats b) { return {a.v * b.v}; }
inline Floats operator/(Floats a, Floats b) { return {a.v / b.v}; }
inline Floats fma(Floats a, Floats b, Floats c) { return {a.v * b.v + c.v}; }
inline Floats max(Floats a, Floats b) { return {a.v > b.v ? a.v : b.v}; }
inline Floats min(Floats a, Floats b) { return {a.v < b.v ? a.v : b.v}; }
// value where a >= b, else 0.
inline Floats where_at_least(Floats a, Floats b, Floats value) { return {a.v >= b.v ? value.v : Vector{}}; }
inline float sum(Floats a) { return (a.v[0] + a.v[2]) + (a.v[1] + a.v[3]); }
inline float largest(Floats a) {
  const float x = a.v[0] > a.v[1] ? a.v[0] : a.v[1], y = a.v[2] > a.v[3] ? a.v[2] : a.v[3];
  return x > y ? x : y;
}
// Of numbers below 2^22: adding 1.5 · 2^23 leaves no bits for a fraction.
inline Floats round(Floats a) { return (a + broadcast(12582912.0f)) - broadcast(12582912.0f); }
// 2^n of whole numbers -126 … 127.
inline Floats power_of_two(Floats n) {
  const Bits bits = (__builtin_convertvector(n.v, Bits) + 127) << 23;
  Floats a;
  __builtin_memcpy(&a, &bits, sizeof a);
  return a;
}
inline Floats widen_bfloat16(const uint16_t* x) {
  return {Vector{float_of_bits(uint32_t{x[0]} << 16), float_of_bits(uint32_t{x[1]} << 16),
                 float_of_bits(uint32_t{x[2]} << 16), float_of_bits(uint32_t{x[3]} << 16)}};
}
inline Floats widen_half(const uint16_t* x) {
  return {Vector{float_of_half(x[0]), float_of_half(x[1]), float_of_half(x[2]), float_of_half(x[3])}};
}
// To the nearest, halves to even.
inline void narrow_bfloat16(Floats a, uint16_t* y) {
  uint32_t bits[LANES];
  __builtin_memcpy(bits, &a, sizeof bits);
  for (int64_t i = 0; i < LANES; ++i) y[i] = static_cast<uint16_t>((bits[i] + 0x7FFFu + (bits[i] >> 16 & 1u)) >> 16);
}
inline void narrow_half(Floats a, uint16_t* y) {
  for (int64_t i = 0; i < LANES; ++i) y[i] = half_of_float(a.v[i]);
}
// The bfloat16 numbers in the low and the high halves of 32-bit lanes.
inline Floats low_bfloat16(Floats pairs) {
  Bits bits;
  __builtin_memcpy(&bits, &pairs, sizeof bits);
  bits = bits << 16;
  __builtin_memcpy(&pairs, &bits, sizeof bits);
  return pairs;
}
inline Floats high_bfloat16(Floats pairs) {
  Bits bits;
  __builtin_memcpy(&bits, &pairs, sizeof bits);
  bits = bits & -65536;
  __builtin_memcpy(&pairs, &bits, sizeof bits);
  return pairs;
}
// Transpose LANES x LANES lanes of 32 bits, which may be any data.
inline void transpose(Floats (&r)[LANES]) {
  Bits from[LANES], to[LANES];
  __builtin_memcpy(from, r, sizeof from);
  for (int64_t i = 0; i < LANES; ++i) {
    for (int64_t j = 0; j < LANES; ++j) to[i][j] = from[j][i];
  }
  __builtin_memcpy(r, to, sizeof to);
}
