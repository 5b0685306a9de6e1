// Operations on rows of floats, written once for all instruction sets. Lengths are multiples of 16 unless stated.

// e^x within 2 units of the last place for x from -87 to 88; 0 below, also of -infinity; at most e^88.
inline Floats exponential(Floats x) {
  const Floats lowest = broadcast(-87.0f), clamped = min(max(x, lowest), broadcast(88.0f));
  const Floats n = round(clamped * broadcast(1.44269504088896341f));
  // Cody and Waite: x - n log 2, with log 2 as the sum of two floats.
  Floats r = fma(n, broadcast(-0.693359375f), clamped);
  r = fma(n, broadcast(2.12194440e-4f), r);
  Floats p = broadcast(1.9875691500e-4f);
  p = fma(p, r, broadcast(1.3981999507e-3f));
  p = fma(p, r, broadcast(8.3334519073e-3f));
  p = fma(p, r, broadcast(4.1665795894e-2f));
  p = fma(p, r, broadcast(1.6666665459e-1f));
  p = fma(p, r, broadcast(5.0000001201e-1f));
  p = fma(p, r * r, r + broadcast(1.0f));
  return where_at_least(x, lowest, p * power_of_two(n));
}

// y += x
inline void add(const float* x, float* y, int64_t count) {
  for (int64_t i = 0; i < count; i += LANES) store(y + i, load(y + i) + load(x + i));
}

// y = x · factor
inline void scale(const float* x, float* y, int64_t count, float factor) {
  for (int64_t i = 0; i < count; i += LANES) store(y + i, load(x + i) * broadcast(factor));
}

// y += x · factor
inline void add_scaled(const float* x, float* y, int64_t count, float factor) {
  for (int64_t i = 0; i < count; i += LANES) store(y + i, fma(load(x + i), broadcast(factor), load(y + i)));
}

inline float dot(const float* x, const float* y, int64_t count) {
  Floats total = broadcast(0.0f);
  for (int64_t i = 0; i < count; i += LANES) total = fma(load(x + i), load(y + i), total);
  return sum(total);
}

// y = x · weight / sqrt(mean_square + epsilon)
inline void normalize(const float* x, const float* weight, float* y, int64_t count, float mean_square, float epsilon) {
  const Floats factor = broadcast(1.0f / __builtin_sqrtf(mean_square + epsilon));
  for (int64_t i = 0; i < count; i += LANES) store(y + i, load(x + i) * factor * load(weight + i));
}

// The same with the mean of x².
inline void rms_norm(const float* x, const float* weight, float* y, int64_t count, float epsilon) {
  normalize(x, weight, y, count, dot(x, x, count) / static_cast<float>(count), epsilon);
}

// y = activation(gate) · up
inline void gate(int64_t activation, const float* gate, const float* up, float* y, int64_t count) {
  for (int64_t i = 0; i < count; i += LANES) {
    const Floats x = load(gate + i);
    Floats z = x;
    // The approximation of GELU with tanh: 0.5 (1 + tanh(u)) is sigmoid(2 u).
    if (activation == GELU_TANH) {
      z = x * fma(x * x, broadcast(0.044715f), broadcast(1.0f)) * broadcast(1.5957691216057308f);
    }
    const Floats below = broadcast(1.0f) + exponential(broadcast(0.0f) - z);
    store(y + i, x / below * load(up + i));
  }
}

// Rotate one head of 2 · half floats; `cos` and `sin` have `half` floats, any number.
inline void rotate(float* x, const float* cos, const float* sin, int64_t half) {
  for (int64_t i = 0; i < half; i += LANES) {
    const int64_t count = half - i < LANES ? half - i : LANES;
    const Floats first = load_first(x + i, count), second = load_first(x + half + i, count);
    const Floats c = load_first(cos + i, count), s = load_first(sin + i, count);
    store_first(x + i, first * c - second * s, count);
    store_first(x + half + i, fma(first, s, second * c), count);
  }
}

// y = x as bfloat16, to the nearest, halves to even
inline void narrow(const float* x, uint16_t* y, int64_t count) {
  for (int64_t i = 0; i < count; i += LANES) narrow_bfloat16(load(x + i), y + i);
}

// Write keys and values to the cache. Those beyond the range of float16 become its largest number.
inline void write_cache(int64_t format, const float* x, uint8_t* y, int64_t count) {
  uint16_t* narrowed = reinterpret_cast<uint16_t*>(y);
  const Floats highest = broadcast(65504.0f), lowest = broadcast(-65504.0f);
  switch (format) {
    case FLOAT32:
      __builtin_memcpy(y, x, static_cast<uint64_t>(count) * sizeof *x);
      break;
    case BFLOAT16:
      narrow(x, narrowed, count);
      break;
    default:
      for (int64_t i = 0; i < count; i += LANES) narrow_half(max(min(load(x + i), highest), lowest), narrowed + i);
  }
}
