// Memory for weights. A step reads all of them once, and in pages of 4 KiB that is a page walk every 64 cache lines: a
// tenth of the time of one row of bfloat16, as measured, a third with 4 bits, and prefetches far ahead, which wait for
// the walk, are useless.

#pragma once

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <mutex>
#include <utility>

#include "base/array_ref.h"
#include "base/sizes.h"
#include "base/tensor.h"

namespace twostep {

// A mapping from which tensors are allocated one after the other, so that small ones use huge pages, too, and a model
// of tens of thousands of experts does not need as many mappings. It lives as long as its tensors.
class Pages {
 public:
  // Returns zeros, aligned to a page; null if the system has no memory. Pages that are not written take none.
  static std::shared_ptr<uint8_t> take(size_t bytes) {
    static std::mutex mutex;
    static std::weak_ptr<Pages> current;
    const std::lock_guard lock(mutex);
    std::shared_ptr<Pages> pages = current.lock();
    if (!pages || pages->left_ < bytes) current = pages = std::make_shared<Pages>(std::max(bytes, kUsualBytes));
    return pages->left_ < bytes ? nullptr : std::shared_ptr<uint8_t>(pages->cut(bytes), Return{pages, bytes});
  }

  explicit Pages(size_t bytes) : size_(bytes + kHugePage) {
    mapping_ = mmap(nullptr, size_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (mapping_ == MAP_FAILED) return;
    next_ = reinterpret_cast<uint8_t*>(round_up(reinterpret_cast<uintptr_t>(mapping_), kHugePage)), left_ = bytes;
#if defined(MADV_HUGEPAGE)
    madvise(next_, bytes, MADV_HUGEPAGE);  // best effort: ordinary pages where there are none
#endif
  }
  Pages(const Pages&) = delete;
  ~Pages() {
    if (mapping_ != MAP_FAILED) munmap(mapping_, size_);
  }

 private:
  static constexpr size_t kHugePage = size_t{2} << 20, kUsualBytes = size_t{128} << 20;

  // Returns a tensor's pages to the system, though other tensors of the mapping may stay.
  struct Return {
    std::shared_ptr<Pages> pages;
    size_t bytes;

    void operator()(uint8_t* start) const { madvise(start, bytes, MADV_DONTNEED); }
  };

  uint8_t* cut(size_t bytes) {
    uint8_t* start = next_;
    bytes = std::min<size_t>(round_up(bytes, sysconf(_SC_PAGESIZE)), left_);
    next_ += bytes, left_ -= bytes;
    return start;
  }

  size_t size_;
  void* mapping_;
  uint8_t* next_ = nullptr;
  size_t left_ = 0;
};

inline Tensor zeros_in_huge_pages(IntArrayRef sizes, Dtype dtype) {
  size_t bytes = element_size(dtype);
  for (const int64_t size : sizes) bytes *= size;
  std::shared_ptr<uint8_t> memory = Pages::take(bytes);
  if (!memory) return new_empty(sizes, dtype).zero_();
  return over_memory(std::move(memory), sizes, dtype);
}

}  // namespace twostep
