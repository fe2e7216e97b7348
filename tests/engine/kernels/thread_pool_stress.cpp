// Drives the thread pool the ways the kernels do, for a thread sanitizer to watch. What tasks write and callers then
// read has no lock of its own, so that the pool's own order of memory is all that keeps them apart. Exits with 1 where
// a task ran never or twice.

#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <numeric>
#include <thread>
#include <vector>

#include "base/thread_pool.h"

namespace twostep {

std::atomic<int64_t> given_threads{4};

int64_t allowed_threads() { return given_threads.load(std::memory_order_relaxed); }

}  // namespace twostep

namespace {

using twostep::run_foreseen_tasks, twostep::run_ranges, twostep::run_tasks, twostep::Threads;

void expect(bool holds, const char* what) {
  if (holds) return;
  std::fprintf(stderr, "%s\n", what);
  std::exit(1);
}

void expect_each_once(const std::vector<int>& counts) {
  for (const int count : counts) expect(count == 1, "a task ran never or twice");
}

void share_tasks(int64_t num_tasks) {
  std::vector<int> counts(num_tasks);
  run_tasks(num_tasks, false, [&](int64_t i) { ++counts[i]; });
  expect_each_once(counts);
}

void share_foreseen_tasks(int64_t num_tasks) {
  std::vector<int> counts(num_tasks);
  run_foreseen_tasks(num_tasks, false, [&](int64_t i, int64_t then) {
    expect(then == num_tasks || counts[then] == 0, "a foreseen task had run before");
    ++counts[i];
  });
  expect_each_once(counts);
}

void share_ranges(int64_t size) {
  std::vector<int> counts(size);
  run_ranges(size, 3, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) ++counts[i];
  });
  expect_each_once(counts);
}

void share_within_tasks(int64_t num_tasks) {
  run_tasks(num_tasks, false, [&](int64_t) { share_tasks(5); });
}

// As attention does: a counter of the caller's own, and memory that each thread writes and the next round reads.
void share_by_counter(int64_t num_tasks) {
  std::vector<int> first(num_tasks), second(num_tasks);
  const auto share = [&](const std::function<void(int64_t)>& task) {
    std::atomic<int64_t> next{0};
    Threads::of_process().run(twostep::allowed_threads(), [&](int64_t) {
      for (int64_t i = next++; i < num_tasks; i = next++) task(i);
    });
  };
  share([&](int64_t i) { first[i] = 1; });
  share([&](int64_t i) { second[i] = first[num_tasks - 1 - i]; });
  expect_each_once(second);
}

void share_in_every_way(int64_t num_tasks) {
  for (const auto share : {share_tasks, share_foreseen_tasks, share_ranges, share_within_tasks, share_by_counter}) {
    share(num_tasks);
  }
}

// Rounds one after the other, in which threads are still awake, and after pauses, in which they sleep.
void drive(int num_rounds) {
  for (int round = 0; round < num_rounds; ++round) {
    for (const int64_t num_tasks : {0, 1, 2, 7, 64}) share_in_every_way(num_tasks);
    if (round % 10 == 9) std::this_thread::sleep_for(std::chrono::milliseconds(6));
  }
}

}  // namespace

int main() {
  for (const int num_threads : {2, 4, 3, 12}) {  // more are started as more are asked for
    twostep::given_threads = num_threads;
    drive(50);
    std::vector<std::thread> callers;
    for (int i = 0; i < 3; ++i) callers.emplace_back(drive, 30);
    for (std::thread& caller : callers) caller.join();
  }
  std::puts("done");
}
