// Runs steps of a small model in the instruction sets that the arguments name, whether or not the CPU reports them.
//
// Prints one line for each: instruction set, type of the cache, number of the step, and the logits. The second layer attends
// to a window. Pages of a sequence are in descending order, and unwritten rows of the cache are not numbers.

#include <cmath>
#include <cstdio>
#include <deque>
#include <vector>

#include "operations.h"

using namespace megatron;

extern "C" {
int64_t megatron_runs(const char* name);
void megatron_select(const char* name);
void* megatron_create_pool(int64_t threads);
void megatron_destroy_pool(void* pool);
void* megatron_create_decoder(const Model* model);
void megatron_destroy_decoder(void* decoder);
int64_t megatron_run(void* decoder, void* pool, const Step* step, int64_t first, int64_t end);
int64_t megatron_matrix_bytes(const Matrix* matrix);
void megatron_pack(const Packing* packing, int64_t first, int64_t end);
}

namespace {

constexpr int64_t HIDDEN = 64, HEADS = 6, KV_HEADS = 2, HEAD_DIM = 32, WIDTH = 96, VOCABULARY = 32, LAYERS = 2;
constexpr int64_t QUERIES = HEADS * HEAD_DIM, KEYS_AND_VALUES = 2 * KV_HEADS * HEAD_DIM;
constexpr int64_t PAGE = 16, PAGES = 10, SEQUENCES = 2, WINDOW = 20, POSITIONS = PAGE * PAGES;
// New tokens of each sequence by step.
constexpr int64_t NEW[][SEQUENCES] = {{70, 0}, {1, 20}, {1, 1}, {40, 1}};

struct CacheType {
  const char* name;
  Format format;
  int64_t bytes;
};
constexpr CacheType CACHES[] = {{"float32", FLOAT32, 4}, {"bfloat16", BFLOAT16, 2}, {"float16", FLOAT16, 2}};

// Random tensors, and their memory.
class Tensors {
 public:
  const float* vector(int64_t size, float mean, float range) {
    vectors_.emplace_back(size);
    for (float& value : vectors_.back()) value = mean + range * next();
    return vectors_.back().data();
  }

  Matrix matrix(int64_t outputs, int64_t inputs) {
    const float* values = vector(outputs * inputs, 0.0f, 1.7f / std::sqrt(static_cast<float>(inputs)));
    Matrix matrix{FLOAT32, inputs, outputs, nullptr};
    panels_.emplace_back(megatron_matrix_bytes(&matrix));
    uint8_t* panels = panels_.back().data();
    matrix.panels = panels;
    const Packing packing{0, reinterpret_cast<const uint8_t*>(values), inputs * 4, matrix, panels};
    megatron_pack(&packing, 0, outputs / PANEL);
    return matrix;
  }

 private:
  // From -1 to 1.
  float next() {
    state_ = state_ * 6364136223846793005u + 1442695040888963407u;
    return static_cast<float>(state_ >> 40) / static_cast<float>(1 << 23) - 1.0f;
  }

  uint64_t state_ = 1;
  std::deque<std::vector<float>> vectors_;
  std::deque<std::vector<uint8_t>> panels_;
};

struct SmallModel {
  explicit SmallModel(Tensors& tensors) {
    for (int64_t i = 0; i < LAYERS; ++i) {
      qkv[i] = tensors.matrix(QUERIES + KEYS_AND_VALUES, HIDDEN);
      gate[i] = tensors.matrix(WIDTH, HIDDEN);
      up[i] = tensors.matrix(WIDTH, HIDDEN);
      down[i] = tensors.matrix(HIDDEN, WIDTH);
      Layer& layer = layers[i];
      layer.is_local = i;
      layer.attention_norm = tensors.vector(HIDDEN, 1.0f, 0.2f);
      layer.qkv_bias = tensors.vector(QUERIES + KEYS_AND_VALUES, 0.0f, 0.1f);
      layer.q_norm = tensors.vector(HEAD_DIM, 1.0f, 0.2f);
      layer.k_norm = tensors.vector(HEAD_DIM, 1.0f, 0.2f);
      layer.attention_output_norm = tensors.vector(HIDDEN, 1.0f, 0.2f);
      layer.mlp_norm = tensors.vector(HIDDEN, 1.0f, 0.2f);
      layer.num_qkv = 1;
      layer.qkv = &qkv[i];
      layer.output = tensors.matrix(HIDDEN, QUERIES);
      layer.num_experts = 1;
      layer.gate = &gate[i];
      layer.up = &up[i];
      layer.down = &down[i];
    }
    model.num_layers = LAYERS;
    model.layers = layers;
    model.hidden = HIDDEN;
    model.heads = HEADS;
    model.kv_heads = KV_HEADS;
    model.head_dim = HEAD_DIM;
    model.activation = GELU_TANH;
    model.window = WINDOW;
    model.norm = tensors.vector(HIDDEN, 1.0f, 0.2f);
    model.head = tensors.matrix(VOCABULARY, HIDDEN);
    model.epsilon = 1e-5;
    model.scale = 1.0 / std::sqrt(static_cast<double>(HEAD_DIM));
  }

  Matrix qkv[LAYERS], gate[LAYERS], up[LAYERS], down[LAYERS];
  Layer layers[LAYERS] = {};
  Model model = {};
};

bool run(const char* isa, const CacheType& cache_type, void* pool) {
  Tensors tensors;
  const SmallModel small(tensors);
  void* decoder = megatron_create_decoder(&small.model);
  std::vector<float> angles[4];
  for (int64_t table = 0; table < 4; ++table) {
    for (int64_t i = 0; i < POSITIONS * (HEAD_DIM / 2); ++i) {
      const float place = static_cast<float>(i % (HEAD_DIM / 2)) / (HEAD_DIM / 2);
      const float angle = static_cast<float>(i / (HEAD_DIM / 2)) * std::pow(table < 2 ? 500.0f : 100.0f, -place);
      angles[table].push_back(table % 2 == 0 ? std::cos(angle) : std::sin(angle));
    }
  }
  const int64_t row_bytes = KEYS_AND_VALUES * cache_type.bytes, layer_bytes = SEQUENCES * POSITIONS * row_bytes;
  std::vector<uint8_t> cache(static_cast<size_t>(LAYERS * layer_bytes), 0xFF);
  int64_t lengths[SEQUENCES] = {};
  int64_t number = 0;
  for (const auto& added : NEW) {
    std::vector<int32_t> positions, query_lengths, context_lengths, tables;
    std::vector<int64_t> slots, logit_rows;
    for (int64_t sequence = 0; sequence < SEQUENCES; ++sequence) {
      if (added[sequence] == 0) continue;
      for (int64_t page = 0; page < PAGES; ++page) tables.push_back(static_cast<int32_t>(sequence * PAGES + PAGES - 1 - page));
      const int32_t* pages = tables.data() + tables.size() - PAGES;
      for (int64_t i = 0; i < added[sequence]; ++i) {
        const int64_t position = lengths[sequence]++;
        positions.push_back(static_cast<int32_t>(position));
        slots.push_back(pages[position / PAGE] * PAGE + position % PAGE);
      }
      query_lengths.push_back(static_cast<int32_t>(added[sequence]));
      context_lengths.push_back(static_cast<int32_t>(lengths[sequence]));
      logit_rows.push_back(static_cast<int64_t>(positions.size()) - 1);
    }
    const float* embedded = tensors.vector(static_cast<int64_t>(positions.size()) * HIDDEN, 0.0f, 1.0f);
    std::vector<float> x(embedded, embedded + positions.size() * HIDDEN), logits(logit_rows.size() * VOCABULARY);
    Step step = {};
    step.tokens = static_cast<int64_t>(positions.size());
    step.x = x.data();
    step.positions = positions.data();
    step.slots = slots.data();
    step.sequences = static_cast<int64_t>(query_lengths.size());
    step.query_lengths = query_lengths.data();
    step.context_lengths = context_lengths.data();
    step.block_tables = tables.data();
    step.block_table_stride = PAGES;
    step.cache = cache.data();
    step.layer_bytes = layer_bytes;
    step.row_bytes = row_bytes;
    step.page_size = PAGE;
    step.cache_format = cache_type.format;
    step.cos = angles[0].data();
    step.sin = angles[1].data();
    step.local_cos = angles[2].data();
    step.local_sin = angles[3].data();
    step.logit_rows = logit_rows.data();
    step.num_logits = static_cast<int64_t>(logit_rows.size());
    step.logits = logits.data();
    if (megatron_run(decoder, pool, &step, 0, 3 * LAYERS + 1) != 0) return false;
    std::printf("%s %s %d", isa, cache_type.name, static_cast<int>(number++));
    for (const float logit : logits) std::printf(" %.9g", static_cast<double>(logit));
    std::printf("\n");
  }
  megatron_destroy_decoder(decoder);
  return true;
}

}  // namespace

int main(int argc, char** argv) {
  bool right = true;
  for (int i = 1; i < argc; ++i) {
    megatron_runs(argv[i]);  // also requests the tiles of AMX from Linux
    megatron_select(argv[i]);
    void* pool = megatron_create_pool(2);
    for (const CacheType& cache_type : CACHES) right = run(argv[i], cache_type, pool) && right;
    megatron_destroy_pool(pool);
  }
  return right ? 0 : 1;
}
