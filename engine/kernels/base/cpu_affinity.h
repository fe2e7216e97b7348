// CPU affinity of the kernels' threads: they must not wake up on the CPU of the thread that wakes them.
//
// After a pause Linux may wake a thread on that CPU, and leave both there for milliseconds while another CPU idles. As
// a guest of KVM it often does: it mistakes halted CPUs for CPUs that the host has preempted. So sleeping threads may
// run on any other CPU only, until they are awake: then Linux may move them again, as other processes need CPUs.

#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <thread>
#include <vector>

#if defined(__linux__)
#include <pthread.h>
#include <sched.h>
#include <unistd.h>
#endif

namespace twostep {

class OtherCpus {
 public:
  // Registers a thread, which must never end.
  void add(std::thread& thread) { threads_.push_back(thread.native_handle()); }

  // Called by the thread that distributes work, before it wakes the others: after a pause they are moved off its CPU,
  // if there are enough CPUs.
  void leave_mine(int64_t num_threads) {
    const auto now = Clock::now();
    const bool was_pause = now - last_ > kPause;
    last_ = now;
    if (was_pause) move_threads(num_threads - 1);
  }

  // Called by a thread that has woken up, with its own `seen`: it may run on any CPU of the process again.
  void come_back([[maybe_unused]] uint32_t& seen) {
#if defined(__linux__)
    const uint32_t moves = moves_.load(std::memory_order_acquire);
    if (moves == seen) return;
    seen = moves;
    cpu_set_t all;
    if (sched_getaffinity(process_, sizeof(all), &all) == 0) sched_setaffinity(0, sizeof(all), &all);
#endif
  }

 private:
  using Clock = std::chrono::steady_clock;
  static constexpr auto kPause = std::chrono::milliseconds(5);

  void move_threads([[maybe_unused]] int64_t num_others) {
#if defined(__linux__)
    const int mine = sched_getcpu();
    cpu_set_t others;  // the process's CPUs without this one
    if (mine < 0 || getpid() != process_ || sched_getaffinity(process_, sizeof(others), &others) != 0) return;
    CPU_CLR(mine, &others);
    if (CPU_COUNT(&others) < num_others) return;
    for (const auto thread : threads_) pthread_setaffinity_np(thread, sizeof(others), &others);
    moves_.fetch_add(1, std::memory_order_release);
#endif
  }

  std::vector<std::thread::native_handle_type> threads_;
  Clock::time_point last_;
  std::atomic<uint32_t> moves_{0};
#if defined(__linux__)
  const pid_t process_ = getpid();  // a fork has none of the threads
#endif
};

}  // namespace twostep
