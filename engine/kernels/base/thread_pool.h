// A thread pool for loops over tasks. OpenMP's threads synchronize at the end of every loop, whether each had work or
// not: where another process has one of the cores for a few milliseconds, every loop takes as long. Here a loop starts
// without waiting for other threads, threads that are awake join it, and it ends when those that have joined are done.
// So work is not divided among threads, but into tasks, which any thread takes.

#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <mutex>
#include <thread>
#include <vector>

#include "base/cpu_affinity.h"
#include "base/sizes.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace twostep {

// Returns how many threads torch may use, which is as many as kernels may (binding/tensor.cpp).
int64_t allowed_threads();

// Waits until is_done: first it spins, as waking up takes longer than the pause between two loops of a step. Then it
// calls `sleep`, which may return too early.
template <class IsDone, class Sleep>
void wait_until(const IsDone& is_done, const Sleep& sleep) {
  constexpr auto kAwake = std::chrono::microseconds(100);
  const auto start = std::chrono::steady_clock::now();
  for (uint32_t i = 1; !is_done(); ++i) {
#if defined(__x86_64__)
    _mm_pause();
#endif
    if (i % 64 == 0 && std::chrono::steady_clock::now() - start > kAwake) sleep();
  }
}

// What all threads read, in cache lines that hold nothing else: on the stack of the thread that shares it, it would lie
// beside variables that are written all the time, and each write takes the line from the other threads.
template <class T>
struct alignas(64) OwnLines {
  T value;
};

// The worker threads of the process; the calling thread works, too.
class Threads {
 public:
  // The threads are never joined: at the end of a process that would be too late.
  static Threads& of_process() {
    static Threads* threads = new Threads;
    return *threads;
  }

  // Calls work(0) on this thread and, on threads that are free meanwhile, work(i) for i below `count`: never, once or
  // repeatedly, but never concurrently for the same i. All runs on this thread where it is called from such work, or by
  // two threads at once. Work must not throw on other threads.
  template <class Work>
  void run(int64_t count, const Work& work) {
    std::unique_lock lock(mutex_, std::defer_lock);
    if (count <= 1 || is_inside() || !lock.try_lock()) return work(0);
    const OwnLines<Work> shared{work};
    const auto call = [](const void* each, int64_t i) { static_cast<const OwnLines<Work>*>(each)->value(i); };
    const Round round(*this, {call, &shared, count});
    shared.value(0);
  }

 private:
  struct Job {
    void (*call)(const void* work, int64_t i);
    const void* work;
    int64_t count;
  };

  static constexpr uint32_t kIsOpen = uint32_t{1} << 31;

  // Threads may join as long as it lives; its destructor waits for them.
  class Round {
   public:
    Round(Threads& threads, const Job& job) : threads_(threads) {
      threads.start_workers(job.count - 1);
      threads.other_cpus_.leave_mine(job.count);
      threads.job_ = job;
      threads.state_.store(kIsOpen, std::memory_order_release);
      threads.rounds_.fetch_add(1, std::memory_order_release);
      threads.rounds_.notify_all();
      is_inside() = true;
    }
    Round(const Round&) = delete;
    ~Round() {
      is_inside() = false;
      auto& state = threads_.state_;
      uint32_t inside = state.fetch_and(~kIsOpen, std::memory_order_acquire) & ~kIsOpen;
      const auto is_empty = [&] { return inside == 0 || (inside = state.load(std::memory_order_acquire)) == 0; };
      wait_until(is_empty, [&] { state.wait(inside, std::memory_order_acquire); });
    }

   private:
    Threads& threads_;
  };

  Threads() = default;

  static bool& is_inside() {
    static thread_local bool is_inside = false;
    return is_inside;
  }

  void start_workers(int64_t count) {
    for (; num_workers_ < count; ++num_workers_) {
      std::thread worker([this, i = num_workers_ + 1] { serve(i); });
      other_cpus_.add(worker);
      worker.detach();
    }
  }

  [[noreturn]] void serve(int64_t i) noexcept {
    is_inside() = true;
    for (uint32_t seen = 0, moves_seen = 0;;) {
      const auto has_begun = [&] { return rounds_.load(std::memory_order_acquire) != seen; };
      wait_until(has_begun, [&] { rounds_.wait(seen, std::memory_order_acquire); });
      seen = rounds_.load(std::memory_order_acquire);
      other_cpus_.come_back(moves_seen);
      if (!enter()) continue;
      if (i < job_.count) job_.call(job_.work, i);
      if (state_.fetch_sub(1, std::memory_order_release) == 1) state_.notify_one();
    }
  }

  // Joins the current job, if there is one, which then stays until this thread leaves.
  bool enter() {
    uint32_t state = state_.load(std::memory_order_relaxed);
    while (state & kIsOpen) {
      if (state_.compare_exchange_weak(state, state + 1, std::memory_order_acquire)) return true;
    }
    return false;
  }

  std::mutex mutex_;  // protects the members below
  int64_t num_workers_ = 0;
  OtherCpus other_cpus_;
  Job job_{};
  alignas(64) std::atomic<uint32_t> rounds_{0};
  alignas(64) std::atomic<uint32_t> state_{0};  // how many are inside, and whether others may come
};

// The tasks 0 to num_tasks - 1, shared among threads (work stealing): each starts with a run of its own, in order, and
// then takes the last tasks of threads that have some left. So a thread reads memory sequentially: two threads that
// alternate between pieces of 8 KB get 19 GB/s on a machine that gives each half of it to one of them with 32.
class TaskShares {
 public:
  TaskShares(const TaskShares&) = delete;
  TaskShares(int64_t num_tasks, int64_t num_threads)
      : many_(num_threads > kFew ? num_threads : 0), shares_(num_threads > kFew ? many_.data() : few_),
        num_threads_(num_threads), num_tasks_(num_tasks) {
    for (int64_t i = 0; i < num_threads; ++i) {
      shares_[i].rest = join(num_tasks * i / num_threads, num_tasks * (i + 1) / num_threads);
    }
  }

  // Takes the next task of the thread's own run; num_tasks when none is left.
  int64_t take_own(int64_t thread) { return take_from(shares_[thread].rest, true); }

  // Takes a task of the thread's own run, or else of any other's.
  int64_t take(int64_t thread) {
    const int64_t own = take_own(thread);
    if (own < num_tasks_) return own;
    for (int64_t i = 1; i < num_threads_; ++i) {
      const int64_t task = take_from(shares_[(thread + i) % num_threads_].rest, false);
      if (task < num_tasks_) return task;
    }
    return num_tasks_;
  }

 private:
  struct alignas(64) Share {
    std::atomic<uint64_t> rest;  // first and end, of 32 bits each
  };

  static uint64_t join(uint64_t first, uint64_t end) { return first << 32 | end; }

  int64_t take_from(std::atomic<uint64_t>& rest, bool first_one) {
    uint64_t seen = rest.load(std::memory_order_relaxed);
    while (true) {
      const uint64_t first = seen >> 32, end = seen & 0xffffffff;
      if (first == end) return num_tasks_;
      const uint64_t left = first_one ? join(first + 1, end) : join(first, end - 1);
      if (rest.compare_exchange_weak(seen, left, std::memory_order_relaxed)) return first_one ? first : end - 1;
    }
  }

  static constexpr int64_t kFew = 8;  // up to so many threads nothing is allocated

  Share few_[kFew];
  std::vector<Share> many_;
  Share* const shares_;
  const int64_t num_threads_, num_tasks_;
};

// Calls task(i, then) for i = 0 ... num_tasks - 1, each once, on whichever thread is free: one that the system delays
// delays only the tasks it has begun. `then` is this thread's next task after i, to be prefetched, or num_tasks where
// that is not known yet: while a thread has work, others may take its last tasks.
template <class Task>
void run_foreseen_tasks(int64_t num_tasks, bool serial, const Task& task) {
  const int64_t num_threads = serial ? 1 : std::min<int64_t>(num_tasks, allowed_threads());
  if (num_threads <= 1) {
    for (int64_t i = 0; i < num_tasks; ++i) task(i, i + 1);
    return;
  }
  TaskShares shares(num_tasks, num_threads);
  Threads::of_process().run(num_threads, [&shares, num_tasks, task](int64_t thread) {
    for (int64_t i = shares.take(thread), then; i < num_tasks; i = then < num_tasks ? then : shares.take(thread)) {
      then = shares.take_own(thread);
      task(i, then);
    }
  });
}

// Calls task(i) for i = 0 ... num_tasks - 1, each once; as run_foreseen_tasks without `then`.
template <class Task>
void run_tasks(int64_t num_tasks, bool serial, const Task& task) {
  run_foreseen_tasks(num_tasks, serial, [&](int64_t i, int64_t) { task(i); });
}

// Calls f(begin, end) for parts of 0 ... size - 1, each once; there are several if `size` is above `grain`.
template <class F>
void run_ranges(int64_t size, int64_t grain, const F& f) {
  const int64_t parts = std::min<int64_t>(divide_up(size, grain), 2 * allowed_threads());
  run_tasks(parts, false, [&](int64_t i) { f(size * i / parts, size * (i + 1) / parts); });
}

}  // namespace twostep
