// What follows a layer's attention: an MLP, gated or not, or a mixture of experts.

#pragma once

#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/gelu.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/sigmoid.h>
#include <ATen/ops/silu.h>
#include <ATen/ops/softmax.h>
#include <ATen/ops/topk.h>
#include <c10/util/Exception.h>
#include <torch/custom_class.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <limits>
#include <optional>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

#include "layers/modules.h"
#include "layers/sparse_mixer.h"
#include "moe/experts.h"

namespace twostep {

struct FeedForward : torch::CustomClassHolder {
  // x [T, H], which is added to the result then, and its norm -> [T, H]
  virtual at::Tensor operator()(const at::Tensor& x, const at::Tensor& normed, const Workspace& work,
                                const AdapterRows& rows) const = 0;

  // The layers to which adapters may add.
  virtual std::vector<Ref<Linear>> linears() const { return {}; }
};

// Tokens whose gated rows are in memory at once: these rows are several times as wide as all others, and for more
// tokens they would take most of a step's memory.
constexpr int64_t kGatedTokens = 1024;

struct Mlp : FeedForward {
  // Activations without a gate.
  static constexpr std::array<std::string_view, 6> kPlain = {"square_relu", "xielu",     "gelu_new",
                                                             "silu",        "gelu_tanh", "gelu"};

  Ref<Linear> gate_up, down;  // the former without a gate, if there is none
  std::string activation;
  Activation gate;  // none without a gate
  std::vector<double> numbers;  // of an activation that has some

  Mlp(Ref<Linear> gate_up, Ref<Linear> down, const std::string& activation, bool is_gated, std::vector<double> numbers)
      : gate_up(std::move(gate_up)), down(std::move(down)), activation(activation),
        gate(is_gated ? activation_named(activation) : Activation::kNone), numbers(std::move(numbers)) {
    const bool is_known = is_gated || std::find(kPlain.begin(), kPlain.end(), activation) != kPlain.end();
    TORCH_CHECK(is_known, "the activation ", activation, " is not known");
    TORCH_CHECK(this->numbers.size() == (activation == "xielu" ? 4 : 0), "only xIELU has numbers, four of them");
  }

  at::Tensor operator()(const at::Tensor&, const at::Tensor& normed, const Workspace& work,
                        const AdapterRows& rows) const override {
    return (*this)(normed, work, rows);
  }

  at::Tensor operator()(const at::Tensor& normed, const Workspace& work, const AdapterRows& rows) const {
    if (normed.size(0) <= kGatedTokens) return project(normed, work.gated, work.added, rows);
    const at::Tensor& out = work.added.get(normed.sizes(), normed);
    for (int64_t first = 0; first < normed.size(0); first += kGatedTokens) {
      const int64_t count = std::min(kGatedTokens, normed.size(0) - first);
      project(normed.narrow(0, first, count), work.gated, Buffer(out.narrow(0, first, count)),
              rows.narrowed(first, count));
    }
    return out;
  }

  at::Tensor project(const at::Tensor& normed, const Buffer& gated, const Buffer& out, const AdapterRows& rows) const {
    return (*down)(activated(normed, gated, rows), out, Activation::kNone, rows);
  }

  at::Tensor activated(const at::Tensor& normed, const Buffer& gated, const AdapterRows& rows) const {
    at::Tensor up = (*gate_up)(normed, gated, gate, rows);
    if (gate == Activation::kNone) activate(up);
    return up;
  }

  void activate(at::Tensor& x) const {
    if (activation == "square_relu") return square_relu(x);
    if (activation == "xielu") return xielu(x, {numbers[0], numbers[1], numbers[2], numbers[3]});
    if (activation == "gelu_new") return gelu_new(x);
    if (activation == "silu") at::silu_(x);  // these are of elementwise.cpp
    else at::gelu_(x, activation == "gelu_tanh" ? "tanh" : "none");
  }

  std::vector<Ref<Linear>> linears() const override { return {gate_up, down}; }
};

// Chooses experts of each row and weighs them, by torch's own operators.
struct Router : torch::CustomClassHolder {
  enum class Scoring { kSoftmax, kSigmoid, kRoundedSigmoid, kSoftmaxOfChosen, kSigmoidOfChosen, kSparseMixer };

  Ref<Linear> weight;
  int64_t num_chosen;
  Scoring scoring;
  bool is_wide;               // whether logits are in float32
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
  std::tuple<at::Tensor, at::Tensor> operator()(const at::Tensor& normed) const {
    const at::Tensor logits = (*weight)(is_wide ? widened(normed) : normed, {});
    if (scoring == Scoring::kSparseMixer) return mix_sparsely(logits, margin);
    if (scoring == Scoring::kSoftmaxOfChosen) {
      const auto [largest, experts] = at::topk(is_rounded ? logits.to(at::kFloat) : logits, num_chosen, -1);
      return {experts, at::softmax(largest, -1).to(normed.scalar_type())};
    }
    if (scoring == Scoring::kSigmoidOfChosen) {
      const auto [largest, experts] = at::topk(logits, num_chosen, -1);
      const at::Tensor weights = at::sigmoid(largest.to(at::kFloat)).to(normed.scalar_type());
      return {experts, is_normalized ? weights / weights.sum(-1, true) : weights};
    }
    const at::Tensor scores = scores_of(logits);
    auto [weights, experts] = at::topk(of_choice(scores), num_chosen, -1, true, is_sorted);
    if (choice_bias) weights = scores.gather(1, experts);
    if (is_normalized) weights.div_(weights.sum(-1, true).add_(sum_offset).clamp_min_(least_sum));
    if (factor != 1.0) weights.mul_(factor);
    if (of_experts) weights.mul_(of_experts->take(experts));
    return {experts, is_rounded ? weights.to(normed.scalar_type()) : weights};
  }

 private:
  static Scoring scoring_named(const std::string& name) {
    if (name == "softmax") return Scoring::kSoftmax;
    if (name == "sigmoid") return Scoring::kSigmoid;
    if (name == "rounded sigmoid") return Scoring::kRoundedSigmoid;
    if (name == "sigmoid of chosen") return Scoring::kSigmoidOfChosen;
    if (name == "sparse mixer") return Scoring::kSparseMixer;
    TORCH_CHECK(name == "softmax of chosen", "the scoring ", name, " is not known");
    return Scoring::kSoftmaxOfChosen;
  }

  at::Tensor scores_of(const at::Tensor& logits) const {  // [T, N] -> [T, N]
    if (scoring == Scoring::kSoftmax) return at::softmax(logits, -1, at::kFloat);
    return at::sigmoid(scoring == Scoring::kSigmoid ? logits.to(at::kFloat) : logits);
  }

  // scores [T, N] -> those by which experts are chosen: in groups whose two best have the largest sums, if not in all
  at::Tensor of_choice(const at::Tensor& scores) const {
    const at::Tensor biased = choice_bias ? scores + *choice_bias : scores;
    if (num_chosen_groups == num_groups) return biased;
    const at::Tensor grouped = biased.view({biased.size(0), num_groups, -1});
    const at::Tensor sums = std::get<0>(grouped.topk(2, -1)).sum(-1);
    const at::Tensor best = std::get<1>(at::topk(sums, num_chosen_groups, -1, true, false));
    const at::Tensor is_left = at::ones_like(sums, at::kBool).scatter_(1, best, false);
    return grouped.masked_fill(is_left.unsqueeze(-1), -std::numeric_limits<double>::infinity()).view_as(biased);
  }
};

// Norms of a mixture's parts: its router and its experts read norms of their own of a layer's sum, and not the one that
// the MLP beside them reads, and what experts and MLP make is normed before it is added.
struct MixtureNorms : torch::CustomClassHolder {
  Ref<Norm> router;
  double router_factor;  // what the router's rows are multiplied by
  Ref<Norm> experts, added, shared;

  MixtureNorms(Ref<Norm> router, double router_factor, Ref<Norm> experts, Ref<Norm> added, Ref<Norm> shared)
      : router(std::move(router)), router_factor(router_factor), experts(std::move(experts)), added(std::move(added)),
        shared(std::move(shared)) {}

  at::Tensor routed(const at::Tensor& x) const {
    const at::Tensor rows = (*router)(x);
    scale_rows(rows, router_factor);
    return rows;
  }
};

// Experts that a router chooses, and mostly none that all rows have: an MLP, which may be weighed by a gate's sigmoid.
struct Mixture : FeedForward {
  Ref<Router> router;
  Ref<moe::Experts> experts;
  std::optional<Ref<Mlp>> shared;
  std::optional<Ref<Linear>> shared_gate;
  std::optional<Ref<MixtureNorms>> norms;
  bool weighs_rows;  // whether weights multiply what experts read, and not what they make
  double factor;     // what the sum of experts and that MLP is multiplied by

  Mixture(Ref<Router> router, Ref<moe::Experts> experts, std::optional<Ref<Mlp>> shared,
          std::optional<Ref<Linear>> shared_gate, std::optional<Ref<MixtureNorms>> norms, bool weighs_rows,
          double factor)
      : router(std::move(router)), experts(std::move(experts)), shared(std::move(shared)),
        shared_gate(std::move(shared_gate)), norms(std::move(norms)), weighs_rows(weighs_rows),
        factor(factor) {
    TORCH_CHECK(!weighs_rows || this->router->num_chosen == 1, "rows that are weighed are one expert's each");
  }

  at::Tensor operator()(const at::Tensor& x, const at::Tensor& normed, const Workspace& work,
                        const AdapterRows& rows) const override {
    const auto [chosen, weights] = (*router)(norms ? (*norms)->routed(x) : normed);
    const at::Tensor read = norms ? (*(*norms)->experts)(x) : normed;
    const at::Tensor sum = weighs_rows ? experts->run(read * weights, chosen, at::ones_like(weights))
                                       : experts->run(read, chosen, weights);
    if (norms) (*norms)->added->in_place(sum);
    if (!shared) return sum;
    const OptionalTensor gates =
        shared_gate ? OptionalTensor((**shared_gate)(normed, {}, Activation::kNone, rows)) : std::nullopt;
    const at::Tensor own = (**shared)(normed, work, rows);
    add_gated_rows(sum, norms ? (*norms)->shared->in_place(own) : own, gates);
    if (factor != 1.0) scale_rows(sum, factor);
    return sum;
  }

  std::vector<Ref<Linear>> linears() const override {
    std::vector<Ref<Linear>> all;
    if (shared) all = (*shared)->linears();
    if (shared_gate) all.push_back(*shared_gate);
    return all;
  }
};

}  // namespace twostep
