// Memory for weights. A step reads all of them once, and in pages of 4 KiB that is a page walk every 64 cache lines:
// a tenth of the time of one row, as measured, and prefetches far ahead, which wait for the walk, are of no use.

#pragma once

#include <ATen/ATen.h>
#include <sys/mman.h>

#include <algorithm>
#include <cstdint>

namespace twostep {

// A new tensor of zeros that starts with a huge page and lies in as many as fit, or one more where little of it is
// wasted. In ordinary pages where the system has no huge ones, or none left, and where the tensor is small: a model may
// have tens of thousands of experts, more than a process may have mappings.
inline at::Tensor zeros_in_huge_pages(at::IntArrayRef sizes, const at::TensorOptions& options) {
#if defined(MADV_HUGEPAGE)
  constexpr size_t kHugePage = size_t{2} << 20;
  const size_t bytes = c10::multiply_integers(sizes) * options.dtype().itemsize();
  const size_t unused = (kHugePage - bytes % kHugePage) % kHugePage;  // of one page more
  const size_t huge_bytes = unused * 16 <= bytes ? bytes + unused : bytes / kHugePage * kHugePage;
  const size_t size = std::max(bytes, huge_bytes);
  // A mapping of its own starts anywhere, so it is a page larger than needed; what is never touched takes no memory.
  constexpr int kAccess = PROT_READ | PROT_WRITE, kKind = MAP_PRIVATE | MAP_ANONYMOUS;
  void* mapping = bytes >= 4 * kHugePage ? mmap(nullptr, size + kHugePage, kAccess, kKind, -1, 0) : MAP_FAILED;
  if (mapping != MAP_FAILED) {
    const uintptr_t start = (reinterpret_cast<uintptr_t>(mapping) + kHugePage - 1) / kHugePage * kHugePage;
    madvise(reinterpret_cast<void*>(start), huge_bytes, MADV_HUGEPAGE);
    const auto unmap = [mapping, size](void*) { munmap(mapping, size + kHugePage); };
    return at::from_blob(reinterpret_cast<void*>(start), sizes, unmap, options);
  }
#endif
  return at::zeros(sizes, options);
}

}  // namespace twostep
