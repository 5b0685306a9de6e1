#include "thread_pool.h"

#include <chrono>

namespace megatron {

namespace {

constexpr std::chrono::microseconds MAX_SPINNING{50};
// Reading the clock takes as long as a few pauses.
constexpr int PAUSES_PER_CLOCK = 32;

void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

}  // namespace

void ThreadPool::Word::wait_while(uint32_t old) {
  const auto end = std::chrono::steady_clock::now() + MAX_SPINNING;
  do {
    for (int i = 0; i < PAUSES_PER_CLOCK; ++i) {
      if (value.load(std::memory_order_acquire) != old) return;
      pause();
    }
  } while (std::chrono::steady_clock::now() < end);
  value.wait(old, std::memory_order_acquire);
}

int64_t Worker::threads() const { return pool_.threads_; }

void Worker::barrier() {
  const uint32_t generation = pool_.generation_.value.load(std::memory_order_relaxed);
  if (pool_.arrived_.value.fetch_add(1, std::memory_order_acq_rel) + 1 == pool_.threads_) {
    // No thread takes parts between the last arrival and the next generation.
    for (int64_t i = 0; i < pool_.threads_; ++i) pool_.taken_[i].parts.store(0, std::memory_order_relaxed);
    pool_.arrived_.value.store(0, std::memory_order_relaxed);
    pool_.generation_.value.store(generation + 1, std::memory_order_release);
    pool_.generation_.value.notify_all();
  } else {
    pool_.generation_.wait_while(generation);
  }
}

ThreadPool::ThreadPool(int64_t threads) : threads_(threads), taken_(std::make_unique<Taken[]>(threads)) {
  for (int64_t number = 1; number < threads; ++number) others_.emplace_back([this, number] { serve(number); });
}

ThreadPool::~ThreadPool() {
  const std::lock_guard lock(running_);
  call_ = nullptr;
  jobs_.value.fetch_add(1, std::memory_order_release);
  jobs_.value.notify_all();
  for (std::thread& other : others_) other.join();
}

void ThreadPool::run(Call call, void* context) {
  const std::lock_guard lock(running_);
  call_ = call;
  context_ = context;
  jobs_.value.fetch_add(1, std::memory_order_release);
  jobs_.value.notify_all();
  Worker worker(*this, 0);
  call(context, worker);
  worker.barrier();
}

void ThreadPool::serve(int64_t number) {
  Worker worker(*this, number);
  for (uint32_t job = 0;; ++job) {
    jobs_.wait_while(job);
    if (call_ == nullptr) return;
    call_(context_, worker);
    worker.barrier();
  }
}

}  // namespace megatron
