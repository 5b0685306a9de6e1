// Matrix products of all weight formats.

#include "tiles.h"

#include "matmul_float.h"

#include "matmul_int.h"

#include "matmul_k.h"

#include "matmul_amx.h"

#include "matmul_unpacked.h"

// Integer formats: bfloat16 if so many rows are multiplied by tiles.
inline int64_t activation_format([[maybe_unused]] const Matrix& matrix, [[maybe_unused]] int64_t rows) {
#if defined(__AMX_TILE__)
  if (is_unpacked(matrix.format, matrix.inputs, rows)) return BFLOAT16;
#endif
  return matrix.format;
}

inline int64_t activation_bytes(int64_t format, int64_t inputs) {
  switch (format) {
    case FLOAT32:
    case FLOAT16:
      return Float32Weights::row_bytes(inputs);
    case BFLOAT16:
      return Bfloat16Weights::row_bytes(inputs);
    default:
      return IntegerWeights::row_bytes(inputs);
  }
}

inline int64_t activation_offset(int64_t format, int64_t input) {
  switch (format) {
    case FLOAT32:
    case FLOAT16:
      return input * Float32Weights::INPUT_BYTES;
    case BFLOAT16:
      return input * Bfloat16Weights::INPUT_BYTES;
    default:
      return IntegerWeights::row_bytes(input);
  }
}

inline void prepare(int64_t format, const float* x, int64_t x_stride, int64_t rows, int64_t inputs, uint8_t* prepared) {
  const int64_t bytes = activation_bytes(format, inputs);
  for (; rows > 0; --rows, x += x_stride, prepared += bytes) {
    switch (format) {
      case BFLOAT16:
#if defined(MEGATRON_BFLOAT16)
        narrow(x, reinterpret_cast<uint16_t*>(prepared), inputs);
        break;
#endif
      case FLOAT32:
      case FLOAT16:
        __builtin_memcpy(prepared, x, static_cast<uint64_t>(inputs) * 4);
        break;
      default:
        prepare_integers(x, inputs, prepared);
    }
  }
}

template <class W>
inline void multiply_integers(const Matrix& matrix, int64_t first, int64_t end, [[maybe_unused]] int64_t x_format,
                              const uint8_t* prepared, int64_t rows, float* y, int64_t y_stride, bool add) {
#if defined(__AMX_TILE__)
  if (x_format == BFLOAT16) return multiply_unpacked<W>(matrix, first, end, prepared, rows, y, y_stride, add);
#endif
  multiply_by<W>(matrix, first, end, prepared, rows, y, y_stride, add);
}

inline void multiply(const Matrix& matrix, int64_t first, int64_t end, int64_t x_format, const uint8_t* prepared, int64_t rows,
                     float* y, int64_t y_stride, bool add) {
#if defined(__AMX_TILE__)
  if (matrix.format == BFLOAT16) return multiply_bfloat16_tiles(matrix, first, end, prepared, rows, y, y_stride, add);
#endif
  switch (matrix.format) {
    case FLOAT32:
      return multiply_by<Float32Weights>(matrix, first, end, prepared, rows, y, y_stride, add);
    case BFLOAT16:
      return multiply_by<Bfloat16Weights>(matrix, first, end, prepared, rows, y, y_stride, add);
    case FLOAT16:
      return multiply_by<Float16Weights>(matrix, first, end, prepared, rows, y, y_stride, add);
    case INT8:
      return multiply_integers<Int8Weights>(matrix, first, end, x_format, prepared, rows, y, y_stride, add);
    case INT5:
      return multiply_integers<Int5Weights>(matrix, first, end, x_format, prepared, rows, y, y_stride, add);
    case INT4:
      return multiply_integers<Int4Weights>(matrix, first, end, x_format, prepared, rows, y, y_stride, add);
    case Q2_K:
      return multiply_integers<Q2KWeights>(matrix, first, end, x_format, prepared, rows, y, y_stride, add);
    case Q3_K:
      return multiply_integers<Q3KWeights>(matrix, first, end, x_format, prepared, rows, y, y_stride, add);
    case Q4_K:
      return multiply_integers<Q4KWeights>(matrix, first, end, x_format, prepared, rows, y, y_stride, add);
    case Q5_K:
      return multiply_integers<Q5KWeights>(matrix, first, end, x_format, prepared, rows, y, y_stride, add);
    case Q6_K:
      return multiply_integers<Q6KWeights>(matrix, first, end, x_format, prepared, rows, y, y_stride, add);
  }
}
