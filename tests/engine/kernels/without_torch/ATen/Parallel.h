// Stands in for torch's header of this name, so that the thread pool compiles without torch.

#pragma once

#include <atomic>
#include <cstdint>

namespace at {

inline std::atomic<int> num_threads{4};

inline int get_num_threads() { return num_threads.load(std::memory_order_relaxed); }

}  // namespace at
