// The thread pool that runs steps and products.

#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

namespace megatron {

class ThreadPool;

// One thread of a job.
class Worker {
 public:
  Worker(ThreadPool& pool, int64_t number) : pool_(pool), number_(number) {}
  int64_t number() const { return number_; }
  int64_t threads() const;

  // Wait until every thread has arrived.
  void barrier();

  // Call run(part) for each of `parts` parts. A thread takes the parts of its own range in their order, so that consecutive
  // phases over the same rows find them in its cache, then parts of the other ranges: fixed shares would wait for the slowest
  // core. Returns when all parts are done. Every thread must call it.
  template <typename Run>
  void share(int64_t parts, Run run);

 private:
  ThreadPool& pool_;
  const int64_t number_;
};

// `threads` threads, one of them the caller's. It runs one job at a time. A thread that waits spins for at most
// 50 microseconds, then sleeps.
class ThreadPool {
 public:
  explicit ThreadPool(int64_t threads);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int64_t threads() const { return threads_; }

  // Run `job` on all threads. Returns when it has returned on all of them.
  template <typename Job>
  void run(Job job) {
    run([](void* context, Worker& worker) { (*static_cast<Job*>(context))(worker); }, &job);
  }

 private:
  friend class Worker;
  using Call = void (*)(void* context, Worker& worker);

  void run(Call call, void* context);
  void serve(int64_t number);

  // A word that threads wait on, in a cache line of its own.
  struct alignas(64) Word {
    std::atomic<uint32_t> value{0};
    void wait_while(uint32_t old);
  };

  const int64_t threads_;
  std::mutex running_;
  Call call_ = nullptr;  // null: the pool ends
  void* context_ = nullptr;
  Word jobs_;        // number of jobs so far
  Word arrived_;     // threads at the barrier
  Word generation_;  // barriers so far
  // Parts that were taken of each thread's range, in a cache line of its own.
  struct alignas(64) Taken {
    std::atomic<int64_t> parts{0};
  };
  const std::unique_ptr<Taken[]> taken_;
  std::vector<std::thread> others_;
};

template <typename Run>
void Worker::share(int64_t parts, Run run) {
  const int64_t threads = pool_.threads_;
  for (int64_t i = 0; i < threads; ++i) {
    const int64_t range = (number_ + i) % threads, begin = parts * range / threads, end = parts * (range + 1) / threads;
    std::atomic<int64_t>& taken = pool_.taken_[range].parts;
    for (int64_t part; (part = begin + taken.fetch_add(1, std::memory_order_relaxed)) < end;) run(part);
  }
  barrier();
}

}  // namespace megatron
