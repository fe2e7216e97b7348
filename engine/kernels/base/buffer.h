// Memory for an operator's result, kept from one step to the next.

#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>

#include <utility>

namespace twostep {

// Keeps a tensor for the next result of its sizes. To make one takes torch a microsecond or more, and a decoder layer
// needs half a dozen, between products whose weights drive torch's code and data out of the caches.
class Buffer {
 public:
  Buffer() = default;

  // For a result that belongs in a tensor that is there, contiguous.
  explicit Buffer(at::Tensor tensor) : tensor_(std::move(tensor)) {}

  // Of unknown content; overwrites what it gave before for those sizes.
  const at::Tensor& get(at::IntArrayRef sizes, const at::Tensor& like) const {
    if (!tensor_.defined() || tensor_.sizes() != sizes || tensor_.scalar_type() != like.scalar_type()) {
      tensor_ = at::empty(sizes, like.options());
    }
    return tensor_;
  }

 private:
  mutable at::Tensor tensor_;
};

}  // namespace twostep
