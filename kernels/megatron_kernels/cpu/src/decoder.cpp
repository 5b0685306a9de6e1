#include "decoder.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>
#include <span>

namespace megatron {

namespace {

// Keys that one partial result of attention covers. The limits are the same for every step and number of threads, so
// that results are.
constexpr int64_t SPLIT_KEYS = 512;
// Rows of a group (tokens · heads) that share one gather of keys and values in a prompt.
constexpr int64_t PROMPT_ROWS = 96;
// Rows of a block are a multiple of the first one: they fill the tiles of all instruction sets.
constexpr int64_t MIN_BLOCK_ROWS = 32;
constexpr int64_t MAX_BLOCK_ROWS = 256;
// Panels of the gate that one work item multiplies.
constexpr int64_t MAX_GATE_PANELS = 8;
// Work items of a product per thread: enough for a thread that is delayed to leave its share to others.
constexpr int64_t PARTS_PER_THREAD = 8;
// Inputs that each thread prepares for itself, because that takes less time than a barrier.
constexpr int64_t MAX_PRIVATE_INPUTS = 4096;

constexpr int64_t MIN_PANELS = 2;

int64_t divide_up(int64_t value, int64_t by) { return (value + by - 1) / by; }

// Panels that one work item multiplies: an even number, or the last one.
int64_t panels_of_part(int64_t panels, int64_t threads) {
  return divide_up(divide_up(panels, threads * PARTS_PER_THREAD), MIN_PANELS) * MIN_PANELS;
}

// Divide rows into blocks of about the same size.
void split_rows(int64_t rows, std::vector<RowBlock>& blocks, int64_t expert = 0, int64_t first = 0) {
  const int64_t count = std::max<int64_t>(1, divide_up(rows, MAX_BLOCK_ROWS));
  const int64_t size = divide_up(divide_up(rows, count), MIN_BLOCK_ROWS) * MIN_BLOCK_ROWS;
  for (int64_t at = 0; at < rows; at += size) {
    blocks.push_back({.expert = expert, .first = first + at, .rows = std::min(size, rows - at)});
  }
}

}  // namespace

Decoder::Decoder(const Model& model)
    : model_(model), layers_(model.layers, model.layers + model.num_layers), operations_(operations()) {
  group_ = model_.heads / model_.kv_heads;
  prompt_tokens_ = std::max<int64_t>(1, PROMPT_ROWS / group_);
  const auto measure = [this](const Matrix& matrix) {
    for (const int64_t format : {matrix.format, operations_.activation_format(matrix, MAX_BLOCK_ROWS)}) {
      row_bytes_ = std::max(row_bytes_, operations_.activation_bytes(format, matrix.inputs));
    }
  };
  for (const Layer& layer : layers_) {
    for (int64_t i = 0; i < layer.num_qkv; ++i) measure(layer.qkv[i]);
    measure(layer.output);
    measure(layer.gate[0]);
    measure(layer.down[0]);
  }
  if (model_.head.panels != nullptr) measure(model_.head);
}

void Decoder::run(ThreadPool& pool, const Step& step, int64_t first, int64_t end) {
  if (first == 0) plan(step, pool.threads());
  if (step.gathered != nullptr) plan_mixture(step.gathered_tokens);
  pool.run([&](Worker& worker) {
    for (int64_t phase = first; phase < end; ++phase) {
      const int64_t number = phase / 3;
      if (number == model_.num_layers) {
        if (step.num_logits > 0) logits(worker, step);
      } else if (phase % 3 == 0) {
        project(worker, step, layers_[number]);
      } else if (phase % 3 == 1) {
        attention(worker, step, number);
      } else if (layers_[number].router != nullptr) {
        mixture(worker, step, layers_[number], number - first / 3);
      } else {
        feed_forward(worker, step, layers_[number]);
      }
    }
  });
}

// Provide the memory of a step and divide its work.
void Decoder::plan(const Step& step, int64_t threads) {
  const int64_t rows = std::max(step.tokens, step.num_logits);
  const int64_t queries = model_.heads * model_.head_dim;
  qkv_.reserve(step.tokens * (queries + 2 * model_.kv_heads * model_.head_dim));
  attended_.reserve(step.tokens * queries);
  gated_.reserve(step.tokens * row_bytes_);
  added_.reserve(rows * model_.hidden);
  prepared_.reserve(std::max(rows, threads) * row_bytes_);
  const int64_t attention_rows = std::max(prompt_tokens_ * group_, model_.heads);
  const int64_t attention_floats =
      2 * attention_rows * (model_.head_dim + PARTIAL_EXTRA) + attention_scratch(attention_rows, model_.head_dim);
  const int64_t gate_floats = 2 * MAX_BLOCK_ROWS * MAX_GATE_PANELS * PANEL;
  const int64_t routing_floats = model_.hidden + 2 * model_.routed;
  scratch_stride_ = divide_up(std::max({attention_floats, gate_floats, routing_floats, queries}), 16) * 16;
  scratch_.reserve(threads * scratch_stride_);
  token_blocks_.clear();
  logit_blocks_.clear();
  split_rows(step.tokens, token_blocks_);
  split_rows(step.num_logits, logit_blocks_);
  if (std::any_of(layers_.begin(), layers_.end(), [](const Layer& layer) { return layer.router != nullptr; })) {
    plan_mixture(step.tokens);
  }
  plan_attention(step, threads);
}

// Provide the memory of a mixture of so many tokens.
void Decoder::plan_mixture(int64_t tokens) {
  const int64_t choices = tokens * model_.routed_per_token;
  gated_.reserve(choices * row_bytes_);
  added_.reserve(choices * model_.hidden);
  prepared_.reserve(choices * row_bytes_);
  chosen_.resize(choices);
  shares_.resize(choices);
  row_of_choice_.resize(choices);
  token_of_row_.resize(choices);
}

// A sequence with several new tokens is divided by tokens and groups of heads. One with a single token is divided by its
// keys, and by groups only if there is too little work otherwise: the keys of all groups are contiguous.
void Decoder::plan_attention(const Step& step, int64_t threads) {
  attention_work_.clear();
  const int64_t kv_heads = model_.kv_heads;
  int64_t decode_parts = 0;
  for (int64_t sequence = 0; sequence < step.sequences; ++sequence) {
    if (step.query_lengths[sequence] == 1) decode_parts += divide_up(step.context_lengths[sequence], SPLIT_KEYS);
  }
  int64_t groups = kv_heads;
  while (groups > 1 && decode_parts * (kv_heads / groups) < threads * PARTS_PER_THREAD / 2) groups = divide_up(groups, 2);
  int64_t num_splits = 0, rows = 0;
  std::vector<std::pair<int64_t, int64_t>> splits;  // parts and first row of each
  // Prompts first, and their last tokens first: the largest work begins early.
  for (const bool is_prompt : {true, false}) {
    int64_t first = 0;
    for (int64_t sequence = 0; sequence < step.sequences; first += step.query_lengths[sequence++]) {
      const int64_t count = step.query_lengths[sequence], length = step.context_lengths[sequence];
      if ((count > 1) != is_prompt) continue;
      if (is_prompt) {
        for (int64_t at = (count - 1) / prompt_tokens_ * prompt_tokens_; at >= 0; at -= prompt_tokens_) {
          const int64_t tokens = std::min(prompt_tokens_, count - at), position = length - count + at;
          for (int64_t group = 0; group < kv_heads; ++group) {
            attention_work_.push_back({.sequence = sequence,
                                       .first_group = group,
                                       .groups = 1,
                                       .first = first + at,
                                       .tokens = tokens,
                                       .position = position,
                                       .begin = 0,
                                       .end = position + tokens,
                                       .split = -1,
                                       .partial = 0});
          }
        }
        continue;
      }
      const int64_t parts = divide_up(length, SPLIT_KEYS);
      for (int64_t group = 0; group < kv_heads; group += groups) {
        const int64_t some = std::min(groups, kv_heads - group), split = parts > 1 ? num_splits++ : -1;
        if (parts > 1) splits.emplace_back(parts, rows);
        for (int64_t part = 0; part < parts; ++part) {
          const int64_t begin = part * SPLIT_KEYS;
          attention_work_.push_back({.sequence = sequence,
                                     .first_group = group,
                                     .groups = some,
                                     .first = first,
                                     .tokens = 1,
                                     .position = length - 1,
                                     .begin = begin,
                                     .end = begin + SPLIT_KEYS,
                                     .split = split,
                                     .partial = rows});
          if (parts > 1) rows += some * group_;
        }
      }
    }
  }
  partials_.reserve(rows * (model_.head_dim + PARTIAL_EXTRA));
  if (num_splits > num_splits_) {
    splits_ = std::make_unique<Split[]>(num_splits);
    num_splits_ = num_splits;
  }
  for (int64_t i = 0; i < num_splits; ++i) {
    splits_[i].parts = splits[i].first;
    splits_[i].partial = splits[i].second;
    splits_[i].remaining.store(splits[i].first, std::memory_order_relaxed);
  }
}

// Queries, keys and values of all tokens, and their mean squares if other ranks need them.
void Decoder::project(Worker& worker, const Step& step, const Layer& layer) {
  const int64_t width = (model_.heads + 2 * model_.kv_heads) * model_.head_dim;
  const Prepared x = prepare(worker, layer.qkv[0], step.x, layer.attention_norm, step.tokens);
  float* qkv = qkv_.get();
  for (int64_t i = 0; i < layer.num_qkv; qkv += layer.qkv[i++].outputs) {
    product(worker, &layer.qkv[i], token_blocks_, x, qkv, width, false);
  }
  if (step.means == nullptr) return;
  worker.share(step.tokens, [&](int64_t token) {
    if (layer.qkv_bias != nullptr) operations_.add(layer.qkv_bias, qkv_of(token), width);
    mean_squares(qkv_of(token), step.means + 2 * token);
  });
}

void Decoder::attention(Worker& worker, const Step& step, int64_t number) {
  const Layer& layer = layers_[number];
  worker.share(step.tokens, [&](int64_t token) { append(step, number, token); });
  worker.share(static_cast<int64_t>(attention_work_.size()),
               [&](int64_t i) { attend(step, number, worker.number(), attention_work_[i]); });
  const Prepared attended = prepare(worker, layer.output, attended_.get(), nullptr, step.tokens);
  add_output(worker, step, layer.output, attended, layer.attention_output_norm);
}

// Complete a token's queries, keys and values, and write keys and values to the cache.
void Decoder::append(const Step& step, int64_t number, int64_t token) {
  const Layer& layer = layers_[number];
  const int64_t size = model_.head_dim, heads = model_.heads, kv_heads = model_.kv_heads;
  const int64_t angle = step.positions[token] * (size / 2);
  const float epsilon = static_cast<float>(model_.epsilon);
  float* qkv = qkv_of(token);
  float means[2] = {};
  if (step.means != nullptr) {  // project() has added the bias
    std::copy_n(step.means + 2 * token, 2, means);
  } else {
    if (layer.qkv_bias != nullptr) operations_.add(layer.qkv_bias, qkv, (heads + 2 * kv_heads) * size);
    if (model_.joint_qk_norm != 0) mean_squares(qkv, means);
  }
  const float* cos = (layer.is_local ? step.local_cos : step.cos) + angle;
  const float* sin = (layer.is_local ? step.local_sin : step.sin) + angle;
  for (int64_t head = 0; head < heads + kv_heads; ++head) {
    float* at = qkv + head * size;
    const bool is_query = head < heads;
    const float* norm = is_query ? layer.q_norm : layer.k_norm;
    if (model_.joint_qk_norm != 0) {
      const int64_t own = is_query ? head : head - heads;
      operations_.normalize(at, norm + own * size, at, size, means[is_query ? 0 : 1], epsilon);
    } else if (norm != nullptr) {
      operations_.rms_norm(at, norm, at, size, epsilon);
    }
    operations_.rotate(at, cos, sin, size / 2);
  }
  operations_.scale(qkv, qkv, heads * size, static_cast<float>(model_.scale));
  const float* kv = qkv + heads * size;
  uint8_t* to = step.cache + number * step.layer_bytes + step.slots[token] * step.row_bytes;
  operations_.write_cache(step.cache_format, kv, to, 2 * kv_heads * size);
}

float* Decoder::qkv_of(int64_t token) const {
  return qkv_.get() + token * (model_.heads + 2 * model_.kv_heads) * model_.head_dim;
}

// The mean squares of a token's queries and keys.
void Decoder::mean_squares(const float* qkv, float* means) const {
  const int64_t queries = model_.heads * model_.head_dim, keys = model_.kv_heads * model_.head_dim;
  means[0] = operations_.dot(qkv, qkv, queries) / static_cast<float>(queries);
  means[1] = operations_.dot(qkv + queries, qkv + queries, keys) / static_cast<float>(keys);
}

void Decoder::attend(const Step& step, int64_t number, int64_t thread, const AttentionWork& work) {
  const int64_t size = model_.head_dim, stride = size + PARTIAL_EXTRA, rows = work.groups * work.tokens * group_;
  const int64_t width = step.cache_format == FLOAT32 ? 4 : 2, queries = model_.heads * size;
  AttentionItem item;
  item.cache = {.rows = step.cache + number * step.layer_bytes + work.first_group * size * width,
                .row_bytes = step.row_bytes,
                .values = model_.kv_heads * size * width,
                .page_size = step.page_size,
                .pages = step.block_tables + work.sequence * step.block_table_stride,
                .format = step.cache_format};
  item.query_stride = queries + 2 * model_.kv_heads * size;
  item.queries = qkv_.get() + work.first * item.query_stride + work.first_group * group_ * size;
  item.tokens = work.tokens;
  item.groups = work.groups;
  item.heads = group_;
  item.head_dim = size;
  item.position = work.position;
  item.window = layers_[number].is_local ? model_.window : work.position + work.tokens;
  float* merged = scratch(thread);
  float* later = merged + rows * stride;
  float* memory = later + rows * stride;
  if (work.split >= 0) {
    operations_.attend(item, work.begin, work.end, partials_.get() + work.partial * stride, memory);
    Split& split = splits_[work.split];
    if (split.remaining.fetch_sub(1, std::memory_order_acq_rel) > 1) return;
    split.remaining.store(split.parts, std::memory_order_relaxed);  // for the next layer
    merged = partials_.get() + split.partial * stride;
    for (int64_t part = 1; part < split.parts; ++part) {
      operations_.merge(merged + part * rows * stride, merged, rows, size);
    }
  } else {
    const int64_t visible = std::max<int64_t>(0, item.position - item.window + 1);
    const int64_t begin = std::max(work.begin, visible / SPLIT_KEYS * SPLIT_KEYS);
    for (int64_t keys = begin; keys < work.end; keys += SPLIT_KEYS) {
      operations_.attend(item, keys, keys + SPLIT_KEYS, keys == begin ? merged : later, memory);
      if (keys > begin) operations_.merge(later, merged, rows, size);
    }
  }
  for (int64_t group = 0; group < work.groups; ++group) {
    for (int64_t token = 0; token < work.tokens; ++token) {
      float* to = attended_.get() + (work.first + token) * queries + (work.first_group + group) * group_ * size;
      for (int64_t head = 0; head < group_; ++head, merged += stride) operations_.finish(merged, to + head * size, size);
    }
  }
}

void Decoder::feed_forward(Worker& worker, const Step& step, const Layer& layer) {
  const Prepared x = prepare(worker, layer.gate[0], step.x, layer.mlp_norm, step.tokens);
  add_output(worker, step, layer.down[0], gated(worker, layer, token_blocks_, x, step.tokens), layer.mlp_output_norm);
}

// Each token's experts compute in one product for all tokens of an expert (Shazeer et al. 2017, arXiv:1701.06538), without
// capacity limits.
void Decoder::mixture(Worker& worker, const Step& step, const Layer& layer, int64_t layer_of_call) {
  const int64_t hidden = model_.hidden, per_token = model_.routed_per_token;
  const bool is_gathered = step.gathered != nullptr;
  const int64_t tokens = is_gathered ? step.gathered_tokens : step.tokens;
  const float* source = is_gathered ? step.gathered : step.x;
  int32_t* routing = step.routing == nullptr ? nullptr : step.routing + layer_of_call * tokens * per_token;
  worker.share(tokens, [&](int64_t token) {
    const float* normed = source + token * hidden;
    if (layer.mlp_norm != nullptr) {
      float* to = scratch(worker.number());
      operations_.rms_norm(normed, layer.mlp_norm, to, hidden, static_cast<float>(model_.epsilon));
      normed = to;
    }
    route(layer, normed, token, scratch(worker.number()) + hidden, routing);
  });
  if (worker.number() == 0) group_by_expert(tokens, layer.num_experts);
  worker.barrier();
  const int64_t rows = static_cast<int64_t>(token_of_row_.size());
  const Prepared x = prepare(worker, layer.gate[0], source, layer.mlp_norm, rows, token_of_row_.data(), layer.num_experts);
  const Prepared y = gated(worker, layer, expert_blocks_, x, rows / layer.num_experts);
  product(worker, layer.down, expert_blocks_, y, added_.get(), hidden, false);
  worker.share(tokens, [&](int64_t token) {
    float* total = scratch(worker.number());
    std::fill_n(total, hidden, 0.0f);
    for (int64_t choice = token * per_token; choice < (token + 1) * per_token; ++choice) {
      if (row_of_choice_[choice] < 0) continue;
      operations_.add_scaled(added_.get() + row_of_choice_[choice] * hidden, total, hidden, shares_[choice]);
    }
    if (is_gathered) {
      std::memcpy(step.gathered_sums + token * hidden, total, hidden * sizeof(float));
      return;
    }
    if (layer.mlp_output_norm != nullptr) {
      operations_.rms_norm(total, layer.mlp_output_norm, total, hidden, static_cast<float>(model_.epsilon));
    }
    operations_.add(total, step.x + token * hidden, hidden);
  });
}

// Choose the experts with the largest probabilities for a token. memory: 2 · routed floats. routing: of all tokens, null if
// it is not recorded.
void Decoder::route(const Layer& layer, const float* x, int64_t token, float* memory, int32_t* routing) {
  const int64_t per_token = model_.routed_per_token;
  const std::span<float> shares(memory, model_.routed);
  const std::span<int32_t> order(reinterpret_cast<int32_t*>(memory + model_.routed), model_.routed);
  for (int64_t expert = 0; expert < model_.routed; ++expert) {
    shares[expert] = operations_.dot(x, layer.router + expert * model_.hidden, model_.hidden);
  }
  const float maximum = *std::max_element(shares.begin(), shares.end());
  float total = 0.0f;
  for (float& share : shares) total += share = std::exp(share - maximum);
  int64_t* chosen = chosen_.data() + token * per_token;
  std::iota(order.begin(), order.end(), 0);
  std::partial_sort(order.begin(), order.begin() + per_token, order.end(), [&](int32_t a, int32_t b) {
    return shares[a] > shares[b] || (shares[a] == shares[b] && a < b);
  });
  if (routing != nullptr) std::copy_n(order.begin(), per_token, routing + token * per_token);
  std::copy_n(order.begin(), per_token, chosen);
  std::sort(chosen, chosen + per_token);
  if (model_.routed_normalize) {
    total = 0.0f;
    for (int64_t i = 0; i < per_token; ++i) total += shares[chosen[i]];
  }
  for (int64_t i = 0; i < per_token; ++i) shares_[token * per_token + i] = shares[chosen[i]] / total;
}

// Order the choices of all tokens by expert, leaving out those of other ranks' experts.
void Decoder::group_by_expert(int64_t tokens, int64_t held) {
  const int64_t per_token = model_.routed_per_token, first = model_.routed_first;
  std::vector<int64_t> starts(held + 1);
  for (const int64_t expert : chosen_) {
    if (expert >= first && expert < first + held) ++starts[expert - first + 1];
  }
  expert_blocks_.clear();
  for (int64_t expert = 0; expert < held; ++expert) {
    split_rows(starts[expert + 1], expert_blocks_, expert, starts[expert]);
    starts[expert + 1] += starts[expert];
  }
  token_of_row_.resize(starts[held]);
  for (int64_t choice = 0; choice < tokens * per_token; ++choice) {
    const int64_t expert = chosen_[choice] - first;
    row_of_choice_[choice] = expert >= 0 && expert < held ? starts[expert]++ : -1;
    if (row_of_choice_[choice] >= 0) token_of_row_[row_of_choice_[choice]] = choice / per_token;
  }
}

void Decoder::logits(Worker& worker, const Step& step) {
  const Prepared x = prepare(worker, model_.head, step.x, model_.norm, step.num_logits, step.logit_rows);
  product(worker, &model_.head, logit_blocks_, x, step.logits, model_.head.outputs, false);
}

void Decoder::add_sums(ThreadPool& pool, const Step& step, int64_t phase) {
  const Layer& layer = layers_[phase / 3];
  const float* norm = phase % 3 == 1 ? layer.attention_output_norm : layer.mlp_output_norm;
  pool.run([&](Worker& worker) {
    worker.share(step.tokens, [&](int64_t token) {
      float* sums = step.sums + token * model_.hidden;
      if (norm != nullptr) operations_.rms_norm(sums, norm, sums, model_.hidden, static_cast<float>(model_.epsilon));
      operations_.add(sums, step.x + token * model_.hidden, model_.hidden);
    });
  });
}

// x += (norm of) inputs · matrix
void Decoder::add_output(Worker& worker, const Step& step, const Matrix& matrix, Prepared inputs, const float* norm) {
  if (step.sums != nullptr) {
    product(worker, &matrix, token_blocks_, inputs, step.sums, model_.hidden, false);
  } else if (norm == nullptr) {
    product(worker, &matrix, token_blocks_, inputs, step.x, model_.hidden, true);
  } else {
    product(worker, &matrix, token_blocks_, inputs, added_.get(), model_.hidden, false);
    worker.share(step.tokens, [&](int64_t token) {
      float* at = added_.get() + token * model_.hidden;
      operations_.rms_norm(at, norm, at, model_.hidden, static_cast<float>(model_.epsilon));
      operations_.add(at, step.x + token * model_.hidden, model_.hidden);
    });
  }
}

// y = (y +) x · matrix for the rows of each block and the matrix of its expert.
void Decoder::product(Worker& worker, const Matrix* matrices, const std::vector<RowBlock>& blocks, Prepared x, float* y,
                      int64_t y_stride, bool add) {
  const int64_t panels = matrices[0].outputs / PANEL, size = panels_of_part(panels, worker.threads());
  const int64_t parts = divide_up(panels, size);
  worker.share(parts * static_cast<int64_t>(blocks.size()), [&](int64_t part) {
    const RowBlock& block = blocks[part / parts];
    const int64_t first = part % parts * size, end = std::min(panels, first + size);
    operations_.multiply(matrices[block.expert], first, end, x.format, x.rows + block.first * x.row_bytes, block.rows,
                         y + block.first * y_stride + first * PANEL, y_stride, add);
  });
}

// activation(x · gate) · (x · up), in the format that `down` needs for a product of so many rows. Returns its rows.
Prepared Decoder::gated(Worker& worker, const Layer& layer, const std::vector<RowBlock>& blocks, Prepared x,
                        int64_t rows_of_product) {
  const int64_t format = operations_.activation_format(layer.down[0], rows_of_product);
  const int64_t bytes = operations_.activation_bytes(format, layer.down[0].inputs), panels = layer.gate[0].outputs / PANEL;
  const int64_t size = std::min(MAX_GATE_PANELS, panels_of_part(panels, worker.threads())), parts = divide_up(panels, size);
  worker.share(parts * static_cast<int64_t>(blocks.size()), [&](int64_t part) {
    const RowBlock& block = blocks[part / parts];
    const int64_t first = part % parts * size, end = std::min(panels, first + size), outputs = (end - first) * PANEL;
    const uint8_t* rows = x.rows + block.first * x.row_bytes;
    uint8_t* to = gated_.get() + block.first * bytes + operations_.activation_offset(format, first * PANEL);
    float* gate = scratch(worker.number());
    float* up = gate + block.rows * outputs;
    operations_.multiply(layer.gate[block.expert], first, end, x.format, rows, block.rows, gate, outputs, false);
    operations_.multiply(layer.up[block.expert], first, end, x.format, rows, block.rows, up, outputs, false);
    for (int64_t row = 0; row < block.rows; ++row, gate += outputs, up += outputs, to += bytes) {
      operations_.gate(model_.activation, gate, up, gate, outputs);
      operations_.prepare(format, gate, outputs, 1, outputs, to);
    }
  });
  return {.format = format, .rows = gated_.get(), .row_bytes = bytes};
}

// Normalise rows of x unless norm is null, and bring them into the format of a matrix. rows_of: rows of x, in their order;
// null for all. matrices: number of those that share the rows.
Prepared Decoder::prepare(Worker& worker, const Matrix& matrix, const float* x, const float* norm, int64_t rows,
                          const int64_t* rows_of, int64_t matrices) {
  const int64_t inputs = matrix.inputs, format = operations_.activation_format(matrix, rows / matrices);
  const int64_t bytes = operations_.activation_bytes(format, inputs);
  const bool is_private = rows == 1 && inputs <= MAX_PRIVATE_INPUTS;
  uint8_t* to = prepared_.get() + (is_private ? worker.number() * bytes : 0);
  const auto prepare_row = [&](int64_t row) {
    const float* at = x + (rows_of == nullptr ? row : rows_of[row]) * inputs;
    if (norm != nullptr) {
      float* normed = scratch(worker.number());
      operations_.rms_norm(at, norm, normed, inputs, static_cast<float>(model_.epsilon));
      at = normed;
    }
    operations_.prepare(format, at, inputs, 1, inputs, to + row * bytes);
  };
  if (is_private) {
    prepare_row(0);
  } else {
    worker.share(rows, prepare_row);
  }
  return {.format = format, .rows = to, .row_bytes = bytes};
}

}  // namespace megatron
