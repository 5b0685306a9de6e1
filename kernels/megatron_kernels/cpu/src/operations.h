// The operations that one instruction set provides. Everything else is written against this table.

#pragma once

#include "kernels.h"

namespace megatron {

// Keys and values that attention reads: those of one layer and sequence.
struct CacheView {
  const uint8_t* rows;  // the first byte of the item's keys
  int64_t row_bytes;
  int64_t values;  // bytes from a token's keys to its values
  int64_t page_size;
  const int32_t* pages;
  int64_t format;  // of keys and values
};

// One or more tokens of a sequence, and one or more groups of query heads. A group shares keys and values.
struct AttentionItem {
  CacheView cache;
  const float* queries;  // [tokens][groups][heads][head_dim], scaled
  int64_t query_stride;  // between tokens
  int64_t tokens;
  int64_t groups;
  int64_t heads;  // of a group
  int64_t head_dim;
  int64_t position;  // of the first token
  int64_t window;    // tokens that a token attends to, itself included
};

// Rows of a file and the matrix that they become.
struct Packing {
  int64_t source;       // type of the rows, numbered as in GGML
  const uint8_t* rows;  // of the matrix's first output
  int64_t row_bytes;    // between rows
  Matrix matrix;
  uint8_t* panels;  // those of the matrix
};

struct Operations {
  const char* name;

  // Pack panels first … end - 1. int5 and K-quants are packed from blocks of a file that they keep; int8 and int4 from
  // anything.
  void (*pack)(const Packing& packing, int64_t first, int64_t end);
  int64_t (*matrix_bytes)(const Matrix& matrix);  // of all panels

  // Matrix products: y = x · matrix for panels first … end - 1. `prepared`: rows as prepare() wrote them in the format that
  // activation_format() returns for a product of so many rows. y: of the first panel's outputs; `add`: y += . A row of y
  // depends on this format, but neither on the other rows nor on the range of panels.
  int64_t (*activation_format)(const Matrix& matrix, int64_t rows);
  int64_t (*activation_bytes)(int64_t format, int64_t inputs);  // of one prepared row, a multiple of 64
  // Bytes of a prepared row before an input, a multiple of 32. The inputs from there on may be prepared by themselves.
  int64_t (*activation_offset)(int64_t format, int64_t input);
  void (*prepare)(int64_t format, const float* x, int64_t x_stride, int64_t rows, int64_t inputs, uint8_t* prepared);
  void (*multiply)(const Matrix& matrix, int64_t first, int64_t end, int64_t x_format, const uint8_t* prepared, int64_t rows,
                   float* y, int64_t y_stride, bool add);
  void (*unpack_row)(const Matrix& matrix, int64_t output, float* x);

  // Rows of floats. `count`: a multiple of 16. x may be y.
  // y = x · weight / sqrt(mean_square + epsilon); rms_norm() takes the mean of x².
  void (*normalize)(const float* x, const float* weight, float* y, int64_t count, float mean_square, float epsilon);
  void (*rms_norm)(const float* x, const float* weight, float* y, int64_t count, float epsilon);
  void (*add)(const float* x, float* y, int64_t count);                 // y += x
  void (*scale)(const float* x, float* y, int64_t count, float factor);  // y = x · factor
  void (*add_scaled)(const float* x, float* y, int64_t count, float factor);  // y += x · factor
  float (*dot)(const float* x, const float* y, int64_t count);
  void (*gate)(int64_t activation, const float* gate, const float* up, float* y, int64_t count);  // activation(gate) · up
  void (*rotate)(float* x, const float* cos, const float* sin, int64_t half);  // one head of 2 · half floats
  void (*write_cache)(int64_t format, const float* x, uint8_t* y, int64_t count);  // to the nearest, halves to even

  // Attention of an item over keys begin … end - 1 of its sequence, multiples of ATTENTION_BLOCK. Each row of `partial`
  // [groups][tokens][heads][head_dim + 16] is set to the sum of weighted values, the maximum of the scores and the sum of
  // the weights. scratch: float [attention_scratch(rows, head_dim)], with all rows of the item.
  void (*attend)(const AttentionItem& item, int64_t begin, int64_t end, float* partial, float* scratch);
  // Merge the partial results of a later range of keys into those of an earlier one.
  void (*merge)(const float* later, float* into, int64_t rows, int64_t head_dim);
  // y = the sums divided by the weights.
  void (*finish)(const float* partial, float* y, int64_t head_dim);
};

// Keys that attend() processes at once.
constexpr int64_t ATTENTION_BLOCK = 64;
// Floats of a row of partial results beyond its values.
constexpr int64_t PARTIAL_EXTRA = 16;
// Floats of the memory that attend() uses: a block of keys and of values, 16 rows of scores in float32 and in bfloat16, and
// queries in bfloat16.
constexpr int64_t attention_scratch(int64_t rows, int64_t head_dim) {
  return ATTENTION_BLOCK * (2 * head_dim + 24) + rows * head_dim / 2;
}

// The table of this CPU's best instruction set, or of the one that MEGATRON_CPU_ISA names. Selected once.
const Operations& operations();

#define MEGATRON_VARIANTS_X86(X) X(amx) X(avx512_bf16) X(avx512_vnni) X(avx512) X(avx2) X(portable)
#define MEGATRON_VARIANTS_ARM(X) X(neon_i8mm) X(neon_dotprod) X(neon) X(portable)
#if defined(__x86_64__)
#define MEGATRON_VARIANTS(X) MEGATRON_VARIANTS_X86(X)
#elif defined(__aarch64__)
#define MEGATRON_VARIANTS(X) MEGATRON_VARIANTS_ARM(X)
#else
#define MEGATRON_VARIANTS(X) X(portable)
#endif

// Best first. variant.cpp defines each.
#define MEGATRON_DECLARE(variant) namespace variant { extern const Operations OPERATIONS; }
MEGATRON_VARIANTS(MEGATRON_DECLARE)
#undef MEGATRON_DECLARE

}  // namespace megatron
