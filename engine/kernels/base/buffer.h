// Memory for an operator's result, reused from one step to the next.

#pragma once

#include <utility>

#include "base/array_ref.h"
#include "base/tensor.h"

namespace twostep {

// Keeps a tensor for the next result of the same sizes. Torch takes a microsecond or more to make one, and a decoder
// layer needs half a dozen, between matmuls whose weights evict torch's code and data from the caches.
class Buffer {
 public:
  Buffer() = default;

  // Uses an existing contiguous tensor for the result.
  explicit Buffer(Tensor tensor) : tensor_(std::move(tensor)) {}

  // Returns a tensor of unspecified content: the same one as before if the sizes are the same.
  const Tensor& get(IntArrayRef sizes, const Tensor& like) const {
    if (!tensor_.defined() || tensor_.sizes() != sizes || tensor_.scalar_type() != like.scalar_type()) {
      tensor_ = new_empty(sizes, like.scalar_type());
    }
    return tensor_;
  }

 private:
  mutable Tensor tensor_;
};

}  // namespace twostep
