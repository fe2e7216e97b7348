// Distributes paged attention over threads: by tasks, or where those are few by splits of their contexts.

#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <utility>
#include <vector>

#include "attention/worker.h"
#include "base/tensor.h"
#include "base/thread_pool.h"

namespace twostep::attention {

constexpr int kTasksPerThread = 4;        // with fewer, contexts are split among threads
constexpr int64_t kSerialWork = 1 << 18;  // multiply-adds below which a second thread does not pay

// Runs f(worker, i, then) for i in [0, count), each thread taking the next i when it is free. Where no other thread
// would wait for it, a thread takes one i ahead: `then`, which is `count` if it is not known yet.
template <class Tiles, class F>
void share(const ProblemOf<Tiles>& problem, int64_t max_rows, int64_t count, int64_t threads, F f) {
  std::atomic<int64_t> next{0};
  Threads::of_process().run(std::min(count, threads), [&](int64_t) {
    Worker<Tiles> worker(problem, max_rows);
    for (int64_t i = next++, then; i < count; i = then) {
      then = i + kTasksPerThread * threads < count ? next++ : count;
      f(worker, i, std::min(then, count));
      if (then == count) then = next++;
    }
  });
}

template <class Element, class Format>
std::vector<Task> make_tasks(const Problem<Element, Format>& p, int64_t rows_per_task) {
  int64_t tokens_per_task = std::max<int64_t>(1, rows_per_task / p.group);
  if (tokens_per_task > 16) tokens_per_task = tokens_per_task / 16 * 16;  // whole blocks of rows for any group
  std::vector<Task> tasks;
  for (int64_t sequence = 0; sequence < p.num_seqs; ++sequence) {
    // The sequence's tokens are [cu_seqlens_q[sequence], end); token t has position t + to_position.
    const int64_t end = p.cu_seqlens_q[sequence + 1], to_position = p.context_lens[sequence] - end;
    for (int64_t token = p.cu_seqlens_q[sequence]; token < end; token += tokens_per_task) {
      for (int64_t kv_head = 0; kv_head < p.num_kv_heads; ++kv_head) {
        Task task{sequence, kv_head, token, std::min(tokens_per_task, end - token), token + to_position, 0, 0};
        task.first_split = p.first_visible(task.first_position) / kSplitKeys;
        task.end_split = task.last_position() / kSplitKeys + 1;
        tasks.push_back(task);
      }
    }
  }
  // Longest first, so that threads finish together.
  const auto length = [&](const Task& task) { return task.last_position() - p.first_visible(task.first_position); };
  const auto longer = [&](const Task& a, const Task& b) { return length(a) > length(b); };
  std::stable_sort(tasks.begin(), tasks.end(), longer);
  return tasks;
}

// Few tasks for many threads: the unit of work is one split of one task, and merging comes after.
template <class Tiles>
void run_splits(const ProblemOf<Tiles>& p, std::vector<Task>& tasks, int64_t max_rows, int64_t threads) {
  std::vector<std::pair<const Task*, int64_t>> units;
  int64_t num_floats = 0;
  for (const Task& task : tasks) {
    for (int64_t split = task.first_split; split < task.end_split; ++split) units.emplace_back(&task, split);
    num_floats += task.num_splits() * State::num_floats(task.num_tokens * p.group, p.padded_value_size());
  }
  const Tensor memory = new_empty({num_floats}, kFloat);
  float* partials = memory.mutable_data_ptr<float>();
  for (Task& task : tasks) {
    task.partials = partials;
    partials += task.num_splits() * State::num_floats(task.num_tokens * p.group, p.padded_value_size());
  }
  share<Tiles>(p, max_rows, units.size(), threads,
               [&](Worker<Tiles>& worker, int64_t i, int64_t) { worker.run_split(*units[i].first, units[i].second); });
  share<Tiles>(p, max_rows, tasks.size(), threads,
               [&](Worker<Tiles>& worker, int64_t i, int64_t) { worker.finish_shared(tasks[i]); });
}

template <class Tiles>
void run_all(const ProblemOf<Tiles>& p) {
  std::vector<Task> tasks = make_tasks(p, Tiles::kRowsPerTask);
  int64_t max_rows = 0, work = 0, num_splits = 0;
  for (const Task& task : tasks) {
    const int64_t rows = task.num_tokens * p.group;
    max_rows = std::max(max_rows, rows);
    num_splits += task.num_splits();
    work += rows * std::min(task.last_position() + 1, p.window) * (p.head_size + p.value_size);
  }
  const int64_t threads = work < kSerialWork ? 1 : allowed_threads();
  const int64_t num_tasks = tasks.size();
  if (threads > 1 && num_tasks < threads * kTasksPerThread && num_splits > num_tasks) {
    run_splits<Tiles>(p, tasks, max_rows, threads);
  } else {
    share<Tiles>(p, max_rows, num_tasks, threads, [&](Worker<Tiles>& worker, int64_t i, int64_t then) {
      worker.run(tasks[i], then < num_tasks ? &tasks[then] : nullptr);
    });
  }
}

}  // namespace twostep::attention
