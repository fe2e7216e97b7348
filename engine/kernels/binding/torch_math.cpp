#include "layers/torch_math.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/polar.h>
#include <ATen/ops/view_as_real.h>

namespace twostep::torch_math {
namespace {

const at::Tensor& torch_of(const Tensor& tensor) { return tensor; }

}  // namespace

Tensor cat(const std::vector<Tensor>& parts, int64_t dim) {
  return at::cat(std::vector<at::Tensor>(parts.begin(), parts.end()), dim);
}

Tensor product(const Tensor& x, const Tensor& y) { return torch_of(x).mul(y); }
Tensor scaled(const Tensor& x, double factor) { return torch_of(x).mul(factor); }
Tensor floor_divided(const Tensor& x, int64_t added, int64_t divisor) {
  return torch_of(x).add(added).floor_divide(divisor);
}
void multiply_in_place(const Tensor& x, const Tensor& y) { torch_of(x).mul_(y); }

Tensor cos(const Tensor& x) { return torch_of(x).cos(); }
Tensor sin(const Tensor& x) { return torch_of(x).sin(); }
Tensor turned(const Tensor& angles) {
  const at::Tensor& all = angles;
  return at::view_as_real(at::polar(all.new_ones(all.sizes()), all));
}

Tensor range(int64_t first, int64_t end, Dtype dtype) {
  return at::arange(first, end, static_cast<at::ScalarType>(dtype));
}
Tensor ones_like(const Tensor& x) { return torch_of(x).new_ones(x.sizes()); }

}  // namespace twostep::torch_math
