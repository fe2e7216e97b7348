// The choice of experts by a sparse mixer (Liu et al., Sparse Backpropagation for MoE Training, 2023), by torch's own
// operators, as PhiMoE's code has it.

#pragma once

#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/softmax.h>

#include <limits>
#include <tuple>

namespace twostep {

// logits [T, N], and those that are left to choose from -> the number of the largest that is left, and its weight among
// those that are less by a share of `margin` at most, [T, 1] each
inline std::tuple<at::Tensor, at::Tensor> mix_one(const at::Tensor& logits, const at::Tensor& left, double margin) {
  const auto [largest, expert] = left.max(-1, true);
  const at::Tensor is_far = (largest - logits) / logits.abs().clamp(largest, {}) > margin;
  const at::Tensor near = left.masked_fill(is_far, -std::numeric_limits<double>::infinity());
  return {expert, at::softmax(near, -1).gather(-1, expert)};
}

// logits [T, N] -> the two chosen experts and their weights [T, 2], of the type of logits
inline std::tuple<at::Tensor, at::Tensor> mix_sparsely(const at::Tensor& logits, double margin) {
  const auto [first, first_weight] = mix_one(logits, logits, margin);
  const at::Tensor left = logits.scatter(-1, first, -std::numeric_limits<double>::infinity());
  const auto [second, second_weight] = mix_one(logits, left, margin);
  return {at::cat({first, second}, -1), at::cat({first_weight, second_weight}, -1)};
}

}  // namespace twostep
