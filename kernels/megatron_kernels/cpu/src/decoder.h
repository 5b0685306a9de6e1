// A decoder's step: from hidden states to logits, on all threads of a pool. No intrinsics.

#pragma once

#include <atomic>
#include <memory>
#include <new>
#include <vector>

#include "operations.h"
#include "thread_pool.h"

namespace megatron {

// Memory that grows and is aligned to cache lines. Its content is undefined.
template <typename T>
class Buffer {
 public:
  T* reserve(int64_t count) {
    if (count > size_) {
      memory_.reset();
      memory_.reset(static_cast<T*>(::operator new(count * sizeof(T), std::align_val_t{64})));
      size_ = count;
    }
    return memory_.get();
  }
  T* get() const { return memory_.get(); }

 private:
  struct Free {
    void operator()(T* memory) const { ::operator delete(memory, std::align_val_t{64}); }
  };
  std::unique_ptr<T, Free> memory_;
  int64_t size_ = 0;
};

// Rows of inputs in the format that a product needs.
struct Prepared {
  int64_t format;
  const uint8_t* rows;
  int64_t row_bytes;
};

// Some rows of inputs, which one matrix of several multiplies: that of an expert.
struct RowBlock {
  int64_t expert;
  int64_t first;
  int64_t rows;
};

class Decoder {
 public:
  explicit Decoder(const Model& model);

  // Run phases first … end - 1 of a step. Phases 3 l, 3 l + 1 and 3 l + 2 are the products of queries, keys and values,
  // attention, and feed-forward of layer l; phase 3 · num_layers computes the logits. With Step::sums, a phase does not
  // change x. With Step::means, phase 3 l writes them and phase 3 l + 1 reads them. With Step::gathered, a mixture reads
  // these hidden states and writes Step::gathered_sums.
  void run(ThreadPool& pool, const Step& step, int64_t first, int64_t end);

  // Add Step::sums of a phase to x.
  void add_sums(ThreadPool& pool, const Step& step, int64_t phase);

 private:
  // Some tokens of a sequence, some groups of heads that share keys and values, and a range of keys.
  struct AttentionWork {
    int64_t sequence;
    int64_t first_group;
    int64_t groups;
    int64_t first;  // token of the step
    int64_t tokens;
    int64_t position;  // of the first token
    int64_t begin;     // keys
    int64_t end;
    int64_t split;  // of splits_; -1: this work covers all keys
    int64_t partial;  // first row of partial results, if split
  };
  // The work on one token's keys is split among threads. The thread that finishes last merges the results.
  struct Split {
    std::atomic<int64_t> remaining;
    int64_t parts;
    int64_t partial;
  };

  void plan(const Step& step, int64_t threads);
  void plan_mixture(int64_t tokens);
  void plan_attention(const Step& step, int64_t threads);
  void project(Worker& worker, const Step& step, const Layer& layer);
  void attention(Worker& worker, const Step& step, int64_t number);
  void append(const Step& step, int64_t number, int64_t token);
  float* qkv_of(int64_t token) const;
  void mean_squares(const float* qkv, float* means) const;
  void attend(const Step& step, int64_t number, int64_t thread, const AttentionWork& work);
  void feed_forward(Worker& worker, const Step& step, const Layer& layer);
  void mixture(Worker& worker, const Step& step, const Layer& layer, int64_t layer_of_call);
  void route(const Layer& layer, const float* x, int64_t token, float* memory, int32_t* routing);
  void group_by_expert(int64_t tokens, int64_t held);
  void logits(Worker& worker, const Step& step);
  void add_output(Worker& worker, const Step& step, const Matrix& matrix, Prepared inputs, const float* norm);
  Prepared gated(Worker& worker, const Layer& layer, const std::vector<RowBlock>& blocks, Prepared x,
                 int64_t rows_of_product);
  void product(Worker& worker, const Matrix* matrices, const std::vector<RowBlock>& blocks, Prepared x, float* y,
               int64_t y_stride, bool add);
  Prepared prepare(Worker& worker, const Matrix& matrix, const float* x, const float* norm, int64_t rows,
                   const int64_t* rows_of = nullptr, int64_t matrices = 1);
  float* scratch(int64_t thread) const { return scratch_.get() + thread * scratch_stride_; }

  Model model_;
  std::vector<Layer> layers_;
  const Operations& operations_;
  int64_t row_bytes_ = 0;     // most of a prepared row
  int64_t group_ = 1;         // query heads that share keys and values
  int64_t prompt_tokens_ = 1;  // of a prompt that one work item computes

  std::vector<RowBlock> token_blocks_, logit_blocks_, expert_blocks_;
  std::vector<AttentionWork> attention_work_;
  std::unique_ptr<Split[]> splits_;
  int64_t num_splits_ = 0;
  int64_t scratch_stride_ = 0;
  Buffer<float> qkv_, attended_, added_, partials_, scratch_;
  Buffer<uint8_t> prepared_, gated_;

  // Of a mixture: the choices [tokens][routed_per_token] in the order of experts, their shares and their rows among all
  // choices in the order of experts, -1 if another rank has the expert; and the token of each such row.
  std::vector<int64_t> chosen_, row_of_choice_, token_of_row_;
  std::vector<float> shares_;
};

}  // namespace megatron
