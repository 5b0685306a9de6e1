// Products of float32 activations. One accumulator for each output, in the order of inputs.

inline int64_t activation_bytes(int64_t, int64_t inputs) { return (inputs * 4 + 63) / 64 * 64; }

inline void prepare(int64_t format, const float* x, int64_t x_stride, int64_t rows, int64_t inputs, uint8_t* prepared) {
  const int64_t bytes = activation_bytes(format, inputs);
  for (int64_t row = 0; row < rows; ++row) __builtin_memcpy(prepared + row * bytes, x + row * x_stride, inputs * 4);
}

template <int ROWS>
inline void float32_tile(const float* panel, int64_t inputs, const uint8_t* prepared, int64_t row_bytes, float* y,
                         int64_t y_stride, bool add) {
  constexpr int PARTS = PANEL / LANES;
  Floats sums[ROWS][PARTS];
  for (int r = 0; r < ROWS; ++r) {
    for (int p = 0; p < PARTS; ++p) sums[r][p] = broadcast(0.0f);
  }
  for (int64_t k = 0; k < inputs; ++k) {
    for (int r = 0; r < ROWS; ++r) {
      const Floats x = broadcast(reinterpret_cast<const float*>(prepared + r * row_bytes)[k]);
      for (int p = 0; p < PARTS; ++p) sums[r][p] = fma(x, load(panel + k * PANEL + p * LANES), sums[r][p]);
    }
  }
  for (int r = 0; r < ROWS; ++r) {
    for (int p = 0; p < PARTS; ++p) {
      float* at = y + r * y_stride + p * LANES;
      store(at, add ? load(at) + sums[r][p] : sums[r][p]);
    }
  }
}

inline void multiply(const Matrix& matrix, int64_t first, int64_t end, const uint8_t* prepared, int64_t rows, float* y,
                     int64_t y_stride, bool add) {
  const int64_t row_bytes = activation_bytes(matrix.format, matrix.inputs);
  for (int64_t panel = first; panel < end; ++panel, y += PANEL) {
    const float* weights = reinterpret_cast<const float*>(matrix.panels) + panel * matrix.inputs * PANEL;
    int64_t row = 0;
    for (; row + 4 <= rows; row += 4) {
      float32_tile<4>(weights, matrix.inputs, prepared + row * row_bytes, row_bytes, y + row * y_stride, y_stride, add);
    }
    for (; row < rows; ++row) {
      float32_tile<1>(weights, matrix.inputs, prepared + row * row_bytes, row_bytes, y + row * y_stride, y_stride, add);
    }
  }
}

inline void unpack_row(const Matrix& matrix, int64_t output, float* x) {
  const float* panel = reinterpret_cast<const float*>(matrix.panels) + output / PANEL * matrix.inputs * PANEL;
  for (int64_t k = 0; k < matrix.inputs; ++k) x[k] = panel[k * PANEL + output % PANEL];
}
