// Routers compute by torch's own operators, as the models' own code does.

#include "layers/router.h"

#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>

#include <cstdint>
#include <limits>
#include <string>
#include <tuple>

#include "base/rows.h"
#include "layers/torch_math.h"

namespace twostep {
namespace {

using Rows = at::Tensor;

constexpr double kNever = -std::numeric_limits<double>::infinity();

// logits [T, N], and those that are left to choose from -> the number of the largest that is left, and its weight among
// those that are less by a share of `margin` at most, [T, 1] each
std::tuple<Rows, Rows> mix_one(const Rows& logits, const Rows& left, double margin) {
  const auto [largest, expert] = left.max(-1, true);
  const Rows is_far = largest.sub(logits).div(logits.abs().clamp(largest, {})).gt(margin);
  return {expert, left.masked_fill(is_far, kNever).softmax(-1).gather(-1, expert)};
}

// The choice by a sparse mixer (Liu et al., Sparse Backpropagation for MoE Training, 2023), as PhiMoE's code has it:
// logits [T, N] -> the two chosen experts and their weights [T, 2], of the type of logits
std::tuple<Rows, Rows> mix_sparsely(const Rows& logits, double margin) {
  const auto [first, first_weight] = mix_one(logits, logits, margin);
  const auto [second, second_weight] = mix_one(logits, logits.scatter(-1, first, kNever), margin);
  return {torch_math::cat({first, second}, -1), torch_math::cat({first_weight, second_weight}, -1)};
}

// logits [T, N] -> scores [T, N]
Rows scores_of(const Rows& logits, Router::Scoring scoring) {
  if (scoring == Router::Scoring::kSoftmax) return logits.softmax(-1, at::kFloat);
  return (scoring == Router::Scoring::kSigmoid ? logits.to(at::kFloat) : logits).sigmoid();
}

// scores [T, N] -> those by which experts are chosen: in groups whose two best have the largest sums, if not in all
Rows of_choice(const Rows& scores, const Router& router) {
  const Rows biased = router.choice_bias ? scores.add(*router.choice_bias) : scores;
  if (router.num_chosen_groups == router.num_groups) return biased;
  const Rows grouped = biased.view({biased.size(0), router.num_groups, -1});
  const Rows sums = std::get<0>(grouped.topk(2, -1)).sum(-1);
  const Rows best = std::get<1>(sums.topk(router.num_chosen_groups, -1, true, false));
  const Rows is_left = sums.new_ones(sums.sizes(), at::kBool).scatter_(1, best, false);
  return grouped.masked_fill(is_left.unsqueeze(-1), kNever).view_as(biased);
}

}  // namespace

std::tuple<Tensor, Tensor> Router::operator()(const Tensor& normed) const {
  const Rows logits = (*weight)(is_wide ? widened(normed) : normed, {});
  const at::ScalarType dtype = static_cast<const Rows&>(normed).scalar_type();
  if (scoring == Scoring::kSparseMixer) return mix_sparsely(logits, margin);
  if (scoring == Scoring::kSoftmaxOfChosen) {
    const auto [largest, experts] = (is_rounded ? logits.to(at::kFloat) : logits).topk(num_chosen, -1);
    return {experts, largest.softmax(-1).to(dtype)};
  }
  if (scoring == Scoring::kSigmoidOfChosen) {
    const auto [largest, experts] = logits.topk(num_chosen, -1);
    const Rows weights = largest.to(at::kFloat).sigmoid().to(dtype);
    return {experts, is_normalized ? weights.div(weights.sum(-1, true)) : weights};
  }
  const Rows scores = scores_of(logits, scoring);
  auto [weights, experts] = of_choice(scores, *this).topk(num_chosen, -1, true, is_sorted);
  if (choice_bias) weights = scores.gather(1, experts);
  if (is_normalized) weights.div_(weights.sum(-1, true).add_(sum_offset).clamp_min_(least_sum));
  if (factor != 1.0) weights.mul_(factor);
  if (of_experts) weights.mul_(static_cast<const Rows&>(*of_experts).take(experts));
  return {experts, is_rounded ? weights.to(dtype) : weights};
}

Router::Scoring Router::scoring_named(const std::string& name) {
  if (name == "softmax") return Scoring::kSoftmax;
  if (name == "sigmoid") return Scoring::kSigmoid;
  if (name == "rounded sigmoid") return Scoring::kRoundedSigmoid;
  if (name == "sigmoid of chosen") return Scoring::kSigmoidOfChosen;
  if (name == "sparse mixer") return Scoring::kSparseMixer;
  TORCH_CHECK(name == "softmax of chosen", "the scoring ", name, " is not known");
  return Scoring::kSoftmaxOfChosen;
}

}  // namespace twostep
