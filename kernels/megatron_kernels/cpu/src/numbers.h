// Conversions of single numbers by integer operations, for every CPU. Included within a namespace of the includer.

inline float float_of_bits(uint32_t bits) {
  float x;
  __builtin_memcpy(&x, &bits, sizeof x);
  return x;
}
inline uint32_t bits_of_float(float x) {
  uint32_t bits;
  __builtin_memcpy(&bits, &x, sizeof bits);
  return bits;
}
inline float float_of_bfloat16(uint16_t x) { return float_of_bits(uint32_t{x} << 16); }
// To the nearest, halves to even.
inline uint16_t bfloat16_of_float(float x) {
  const uint32_t bits = bits_of_float(x);
  return static_cast<uint16_t>((bits + 0x7FFFu + (bits >> 16 & 1u)) >> 16);
}
// A half's exponent and fraction as those of a float, whose exponent is 112 too small; a denormal half is exact.
inline float float_of_half(uint16_t x) {
  const uint32_t magnitude = x & 0x7FFFu, sign = uint32_t{x & 0x8000u} << 16;
  const float scaled = float_of_bits(magnitude << 13) * float_of_bits(0x77800000u);
  const uint32_t bits = magnitude >= 0x7C00u ? 0x7F800000u | (magnitude << 13) : bits_of_float(scaled);
  return float_of_bits(sign | bits);
}
// To the nearest, halves to even.
inline uint16_t half_of_float(float x) {
  const uint32_t bits = bits_of_float(x), magnitude = bits & 0x7FFFFFFFu, sign = bits >> 16 & 0x8000u;
  if (magnitude > 0x7F800000u) return static_cast<uint16_t>(sign | 0x7E00u);
  if (magnitude >= 0x477FF000u) return static_cast<uint16_t>(sign | 0x7C00u);
  if (magnitude < 0x38800000u) {
    // Adding 0.5 leaves the bits of a denormal half, rounded, in the fraction.
    return static_cast<uint16_t>(sign | (bits_of_float(float_of_bits(magnitude) + 0.5f) - 0x3F000000u));
  }
  return static_cast<uint16_t>(sign | ((magnitude - 0x38000000u + 0xFFFu + (magnitude >> 13 & 1u)) >> 13));
}
