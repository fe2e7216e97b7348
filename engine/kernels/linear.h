// What the implementations of the linear layer share: the problem's description, its checks, and the way to spread it
// over threads.

#pragma once

#include <ATen/ATen.h>
#include <ATen/Parallel.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <optional>
#include <vector>

#include "operators.h"

namespace twostep {

inline int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

template <class Element>
struct Problem {
  const Element* x;     // [rows, k]
  const Element* bias;  // [n], or null
  Element* out;         // [rows, n]
  int64_t rows, k, n;
  Activation activation;  // with one, out is [rows, n / 2], gated
};

struct Free {
  void operator()(void* memory) const { std::free(memory); }
};

// Memory of one thread, kept between calls, grown on demand.
template <class T>
class Scratch {
 public:
  T* get(int64_t count) {
    if (count > count_) {
      memory_.reset(static_cast<T*>(std::aligned_alloc(64, divide_up(count * sizeof(T), 64) * 64)));
      count_ = count;
    }
    return memory_.get();
  }

 private:
  std::unique_ptr<T, Free> memory_;
  int64_t count_ = 0;
};

// Asks for the bytes to come, with every vector that is read: a core has places for only some of what it asked for, and
// those of a whole step at once would wait for them. First into the L2 cache, from where the way is short; that also
// finds the next page, for which the core would stop.
inline void ask_ahead(const uint8_t* at) {
  __builtin_prefetch(at + 1024);
  __builtin_prefetch(at + 3072, 0, 2);
}

// Whether waking the thread pool would cost more than it saves.
template <class Element>
bool is_small(const Problem<Element>& p) {
  return p.rows * p.n * p.k < 1 << 15;
}

// The tasks 0 to num_tasks - 1, shared out among threads: each begins with a run of its own, in order, and then takes the
// last ones of whoever has some left. So what a thread reads lies in a row, as memory likes it: two threads that
// alternate between pieces of 8 KB get 19 GB/s on a machine that gives each half of it to one of them with 32.
class TaskShares {
 public:
  TaskShares(int64_t num_tasks, int64_t num_threads) : shares_(num_threads), num_tasks_(num_tasks) {
    for (int64_t i = 0; i < num_threads; ++i) {
      shares_[i].rest = join(num_tasks * i / num_threads, num_tasks * (i + 1) / num_threads);
    }
  }

  // The next one for that thread, each once; num_tasks when none is left.
  int64_t take(int64_t thread) {
    const int64_t own = take_from(shares_[thread].rest, true), count = shares_.size();
    if (own < num_tasks_) return own;
    for (int64_t i = 1; i < count; ++i) {
      const int64_t task = take_from(shares_[(thread + i) % count].rest, false);
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

  std::vector<Share> shares_;
  int64_t num_tasks_;
};

// Calls task(i, then) for i = 0 ... num_tasks - 1, each once, on whichever thread is free: one that the system delays
// delays only the tasks it has begun. `then` is what this thread does after i, or num_tasks.
template <class Task>
void run_foreseen_tasks(int64_t num_tasks, bool serial, const Task& task) {
  const int64_t num_threads = serial ? 1 : std::min<int64_t>(num_tasks, at::get_num_threads());
  if (num_threads <= 1) {
    for (int64_t i = 0; i < num_tasks; ++i) task(i, i + 1);
    return;
  }
  TaskShares shares(num_tasks, num_threads);
  const auto work = [&](int64_t thread) {
    for (int64_t i = shares.take(thread), then; i < num_tasks; i = then) {
      then = shares.take(thread);
      task(i, then);
    }
  };
  at::parallel_for(0, num_threads, 1, [&](int64_t first, int64_t end) {
    for (int64_t thread = first; thread < end; ++thread) work(thread);
  });
}

// As run_foreseen_tasks, without the foresight.
template <class Task>
void run_tasks(int64_t num_tasks, bool serial, const Task& task) {
  run_foreseen_tasks(num_tasks, serial, [&](int64_t i, int64_t) { task(i); });
}

template <class Element, class Multiply>
at::Tensor multiply_into_new(const at::Tensor& x, const at::Tensor& bias, int64_t n, Activation activation,
                             const Multiply& multiply) {
  at::Tensor out = at::empty({x.size(0), activation == Activation::kNone ? n : n / 2}, x.options());
  multiply(Problem<Element>{x.const_data_ptr<Element>(), bias.defined() ? bias.const_data_ptr<Element>() : nullptr,
                            out.mutable_data_ptr<Element>(), x.size(0), x.size(1), n, activation});
  return out;
}

// x [T, K], bias [n] -> [T, n], gated with an activation, by calling multiply with the problem of x's dtype: float32 or
// bfloat16.
template <class Multiply>
at::Tensor multiply_rows_of(const at::Tensor& x, const std::optional<at::Tensor>& bias, int64_t n,
                            Activation activation, const Multiply& multiply) {
  at::Tensor addend;
  if (bias.has_value()) {
    TORCH_CHECK(bias->numel() == n && bias->scalar_type() == x.scalar_type(), "bias differs in size or dtype");
    addend = bias->contiguous();
  }
  const at::Tensor rows = x.contiguous();
  return x.scalar_type() == at::kFloat ? multiply_into_new<float>(rows, addend, n, activation, multiply)
                                       : multiply_into_new<at::BFloat16>(rows, addend, n, activation, multiply);
}

}  // namespace twostep
