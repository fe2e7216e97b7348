// The little arithmetic of layers that is torch's own, which the plain path computes with the same operators: results
// have torch's types and bits (binding/torch_math.cpp).

#pragma once

#include <cstdint>
#include <vector>

#include "base/tensor.h"

namespace twostep::torch_math {

Tensor cat(const std::vector<Tensor>& parts, int64_t dim);

Tensor product(const Tensor& x, const Tensor& y);
Tensor scaled(const Tensor& x, double factor);
Tensor floor_divided(const Tensor& x, int64_t added, int64_t divisor);  // x + added, rounded down
void multiply_in_place(const Tensor& x, const Tensor& y);

Tensor cos(const Tensor& x);
Tensor sin(const Tensor& x);
Tensor turned(const Tensor& angles);  // [...] -> the parts [..., 2] of complex numbers of size 1

// Integers from `first` on, as numbers of a type [end - first].
Tensor range(int64_t first, int64_t end, Dtype dtype);

// [...] -> as many ones
Tensor ones_like(const Tensor& x);

}  // namespace twostep::torch_math
