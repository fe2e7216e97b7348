// Batch-invariant activations, which replace torch's own for CPU tensors (registration.cpp): arguments and results are
// those of torch's operators of these names.

#pragma once

#include <ATen/core/Tensor.h>

#include <string_view>

namespace twostep::elementwise {

at::Tensor silu(const at::Tensor& x);
at::Tensor& silu_in_place(at::Tensor& x);
at::Tensor sigmoid(const at::Tensor& x);
at::Tensor& sigmoid_in_place(at::Tensor& x);
at::Tensor gelu(const at::Tensor& x, std::string_view approximate);
at::Tensor& gelu_in_place(at::Tensor& x, std::string_view approximate);
at::Tensor softplus(const at::Tensor& x, const at::Scalar& beta, const at::Scalar& threshold);

}  // namespace twostep::elementwise
