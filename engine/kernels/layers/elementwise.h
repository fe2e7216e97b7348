// Batch-invariant activations, which replace torch's own for CPU tensors (binding/operators.cpp): arguments
// and results are those of torch's operators of these names.

#pragma once

#include <string_view>

#include "base/tensor.h"

namespace twostep::elementwise {

Tensor silu(const Tensor& x);
void silu_in_place(const Tensor& x);
Tensor sigmoid(const Tensor& x);
void sigmoid_in_place(const Tensor& x);
Tensor gelu(const Tensor& x, std::string_view approximate);
void gelu_in_place(const Tensor& x, std::string_view approximate);
Tensor softplus(const Tensor& x);

}  // namespace twostep::elementwise
