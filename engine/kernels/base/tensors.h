// Tensors for results. Torch's own header of its factories brings its whole context along, which takes a compiler
// longer than most kernels.

#pragma once

#include <ATen/core/Tensor.h>

namespace twostep {

// Returns a contiguous tensor of unspecified content.
at::Tensor new_empty(at::IntArrayRef sizes, const at::TensorOptions& options);

// Returns one of the sizes and the dtype of another.
inline at::Tensor new_empty_like(const at::Tensor& tensor) { return new_empty(tensor.sizes(), tensor.options()); }

}  // namespace twostep
