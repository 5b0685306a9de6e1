// The C ABI of the CPU kernels, and the layouts of what is passed through it.
//
// Every field has eight bytes, so that ctypes and numpy describe the structures without padding. Strides of floats are in
// floats, strides of bytes in bytes. No function throws; a null result or -1 means that memory ran out.
//
// Panels. A matrix [outputs][inputs] is stored as panels of 16 outputs, one after the other, the same for all
// instruction sets. `outputs` is a multiple of 16, `inputs` of 32 (256 for K-quants). One panel:
//
//   FLOAT32   float [inputs][16]
//   BFLOAT16  bfloat16 [inputs / 2][16][2]: VDPBF16PS and AMX read it as it is
//   FLOAT16   half [inputs][16]
//   INT8      per 32 inputs: uint8 [8][16][4], value + 128; then half scales[16]
//   INT4      per 32 inputs: 4 x uint8 [16][4]: low nibbles are inputs 4 j … 4 j + 3 of part j, high nibbles 16 + 4 j …;
//             then half scales[16], half offsets[16]; value = nibble · scale + offset
//   INT5      as INT4, with uint8 [16][4] of fifth bits before the scales: bit i of part j belongs to input 4 i + j;
//             value = (nibble + 16 · bit) · scale + offset
//   Q2_K … Q6_K  see matmul_k.h
//
// The KV cache. A row holds one token: keys [kv_heads][head_dim], then values [kv_heads][head_dim], float, bfloat16
// or half. A page is page_size rows, a multiple of 16. Unwritten rows contain arbitrary bytes.

#pragma once

#include <cstdint>

#define MEGATRON_EXPORT extern "C" __attribute__((visibility("default")))

namespace megatron {

enum Format : int64_t { FLOAT32, BFLOAT16, FLOAT16, INT8, INT5, INT4, Q2_K, Q3_K, Q4_K, Q5_K, Q6_K };

// Outputs of a panel.
constexpr int64_t PANEL = 16;

struct Matrix {
  int64_t format;  // Format
  int64_t inputs;
  int64_t outputs;
  const uint8_t* panels;
};

enum Activation : int64_t { SILU, GELU_TANH };

// One transformer block as this rank holds it. Norms and bias are float, null where the model has none.
struct Layer {
  int64_t is_local;  // attends to a window
  const float* attention_norm;
  const float* qkv_bias;
  const float* q_norm;  // both or none; [head_dim], with Model::joint_qk_norm [heads][head_dim]
  const float* k_norm;
  const float* attention_output_norm;
  const float* mlp_norm;
  const float* mlp_output_norm;
  int64_t num_qkv;  // matrices whose outputs together are queries, keys and values; several are all of integer formats
  const Matrix* qkv;
  Matrix output;
  int64_t num_experts;  // in gate, up and down; 1 without a mixture
  const Matrix* gate;
  const Matrix* up;  // of an integer format if the gate is, otherwise of its format
  const Matrix* down;
  const float* router;  // [routed][hidden]; null without a mixture
};

// What a step of a rank needs of a model. head.panels is null before the last pipeline stage.
struct Model {
  int64_t num_layers;
  const Layer* layers;
  int64_t hidden;
  int64_t heads;
  int64_t kv_heads;
  int64_t head_dim;
  int64_t activation;
  int64_t window;
  int64_t routed;          // experts of a mixture, on all ranks
  int64_t routed_first;    // number of the first one in gate
  int64_t routed_per_token;
  int64_t routed_normalize;  // the shares of a token's experts sum to one
  const float* norm;
  Matrix head;
  double epsilon;
  double scale;
  int64_t joint_qk_norm;  // the norms of queries and keys are over all heads of a token
};

// The tokens of a step and the memory that it reads and writes.
struct Step {
  int64_t tokens;
  float* x;  // [tokens][hidden], changed in place
  const int32_t* positions;
  const int64_t* slots;  // rows of the cache
  int64_t sequences;
  const int32_t* query_lengths;    // tokens of the step, by sequence
  const int32_t* context_lengths;  // tokens in the cache after the step
  const int32_t* block_tables;
  int64_t block_table_stride;
  uint8_t* cache;
  int64_t layer_bytes;
  int64_t row_bytes;
  int64_t page_size;
  int64_t cache_format;  // Format
  const float* cos;  // [positions][head_dim / 2]
  const float* sin;
  const float* local_cos;
  const float* local_sin;
  const int64_t* logit_rows;
  int64_t num_logits;
  float* logits;  // [num_logits][outputs of the head]
  // [tokens][hidden]: what attention and feed-forward add to x, if it must be summed over ranks before it is added; null
  // for one rank.
  float* sums;
  // [gathered_tokens][hidden]: the hidden states before a mixture of all ranks that share its experts, and what this
  // rank's experts add to them; null for one rank.
  int64_t gathered_tokens;
  const float* gathered;
  float* gathered_sums;
  // [layers of the call][gathered_tokens, or tokens][routed_per_token]: written by mixtures, the experts of each token, the
  // largest share first; null if they are not recorded.
  int32_t* routing;
  // [tokens][2]: the mean squares of queries and of keys over the heads of all ranks, with Model::joint_qk_norm: between
  // two phases the caller averages this rank's over the ranks. Null for one rank.
  float* means;
};

}  // namespace megatron
