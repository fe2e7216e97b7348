// What the implementations of the linear layer share: the problem's description and the way to spread it over threads.

#pragma once

#include <ATen/ATen.h>
#include <ATen/Parallel.h>

#include <algorithm>
#include <atomic>
#include <cstdint>

namespace twostep {

template <class Element>
struct Problem {
  const Element* x;       // [rows, k]
  const Element* packed;  // panels of columns, as the implementation's pack made them
  const Element* bias;    // [n], or null
  Element* out;           // [rows, n]
  int64_t rows, k, n;
};

// Whether waking the thread pool would cost more than it saves.
template <class Element>
bool is_small(const Problem<Element>& p) {
  return p.rows * p.n * p.k < 1 << 15;
}

// Calls task(0) ... task(num_tasks - 1), each once, on whichever thread is free: a thread that the system delays
// delays only the task it is in.
template <class Task>
void run_tasks(int64_t num_tasks, bool serial, const Task& task) {
  std::atomic<int64_t> next{0};
  const auto work = [&](int64_t, int64_t) {
    for (int64_t i = next++; i < num_tasks; i = next++) task(i);
  };
  if (serial) return work(0, 1);
  at::parallel_for(0, std::min<int64_t>(num_tasks, at::get_num_threads()), 1, work);
}

}  // namespace twostep
