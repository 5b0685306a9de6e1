// The C ABI of the CPU kernels, and the layouts of what is passed through it.
//
// Every field has eight bytes, so that ctypes and numpy describe the structures without padding. Strides of floats are in
// floats, strides of bytes in bytes. No function throws; a null result or -1 means that memory ran out.
//
// Panels. A matrix [outputs][inputs] is stored as panels of 16 outputs, one after the other, the same for all
// instruction sets. `outputs` is a multiple of 16, `inputs` of 32 (256 for Q4_K and Q6_K). One panel:
//
//   FLOAT32   float [inputs][16]
//   BFLOAT16  bfloat16 [inputs / 2][16][2]: VDPBF16PS and AMX read it as it is
//   FLOAT16   half [inputs][16]
//   INT8      per 32 inputs: uint8 [8][16][4], value + 128; then half scales[16]
//   INT4      per 32 inputs: 4 x uint8 [16][4]: low nibbles are inputs 4 j … 4 j + 3 of part j, high nibbles 16 + 4 j …;
//             then half scales[16], half offsets[16]; value = nibble · scale + offset
//   Q4_K, Q6_K  see matmul_k.h
//
// The KV cache. A row holds one token: keys [kv_heads][head_dim], then values [kv_heads][head_dim], float or bfloat16. A
// page is page_size rows, a multiple of 16. Unwritten rows contain arbitrary bytes.

#pragma once

#include <cstdint>

#define MEGATRON_EXPORT extern "C" __attribute__((visibility("default")))

namespace megatron {

enum Format : int64_t { FLOAT32, BFLOAT16, FLOAT16, INT8, INT4, Q4_K, Q6_K, NUM_FORMATS };

// Outputs of a panel.
constexpr int64_t PANEL = 16;

struct Matrix {
  int64_t format;  // Format
  int64_t inputs;
  int64_t outputs;
  const uint8_t* panels;
};

enum Activation : int64_t { SILU, GELU_TANH };

}  // namespace megatron
