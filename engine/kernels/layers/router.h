// Which experts rows go to, and what these weigh.

#pragma once

#include <cstdint>
#include <string>
#include <tuple>
#include <utility>

#include "base/tensor.h"
#include "layers/modules.h"

namespace twostep {

// Chooses experts of each row and weighs them, by torch's own operators.
struct Router {
  enum class Scoring { kSoftmax, kSigmoid, kRoundedSigmoid, kSoftmaxOfChosen, kSigmoidOfChosen, kSparseMixer };

  Ref<Linear> weight;
  int64_t num_chosen;
  Scoring scoring;
  bool is_wide;                // whether logits are in float32
  OptionalTensor choice_bias;  // [N], added to scores for the choice alone
  int64_t num_groups, num_chosen_groups;
  bool is_sorted;             // whether the chosen are in the order of their scores
  bool is_normalized;         // whether the weights of a row are divided by their sum,
  double sum_offset;          // to which this is added,
  double least_sum;           // and which is this at least
  double factor;              // of the weights then
  bool is_rounded;            // whether they are rounded to the rows' dtype
  OptionalTensor of_experts;  // [N] in float32: what each expert's weights are multiplied by then
  double margin;              // by which share of the best logit others may be less that are weighed with it

  Router(Ref<Linear> weight, int64_t num_chosen, const std::string& scoring, bool is_wide, OptionalTensor choice_bias,
         int64_t num_groups, int64_t num_chosen_groups, bool is_sorted, bool is_normalized, double sum_offset,
         double least_sum, double factor, bool is_rounded, OptionalTensor of_experts, double margin)
      : weight(std::move(weight)), num_chosen(num_chosen), scoring(scoring_named(scoring)), is_wide(is_wide),
        choice_bias(std::move(choice_bias)), num_groups(num_groups), num_chosen_groups(num_chosen_groups),
        is_sorted(is_sorted), is_normalized(is_normalized), sum_offset(sum_offset), least_sum(least_sum),
        factor(factor), is_rounded(is_rounded), of_experts(std::move(of_experts)), margin(margin) {}

  // normed [T, H] -> the chosen experts and their weights [T, S]
  std::tuple<Tensor, Tensor> operator()(const Tensor& normed) const;

 private:
  static Scoring scoring_named(const std::string& name);
};

}  // namespace twostep
