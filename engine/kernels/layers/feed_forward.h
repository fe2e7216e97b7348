// What follows a layer's attention: an MLP, or a mixture of experts.

#pragma once

#include <ATen/ATen.h>
#include <torch/custom_class.h>

#include <algorithm>
#include <cstdint>
#include <string>
#include <tuple>
#include <utility>

#include "layers/modules.h"
#include "moe/experts.h"

namespace twostep {

struct FeedForward : torch::CustomClassHolder {
  // normed [T, H] -> [T, H]
  virtual at::Tensor operator()(const at::Tensor& normed, const Workspace& work) const = 0;
};

// Tokens whose gated rows are in memory at once: these rows are several times as wide as all others, and for more
// tokens they would take most of a step's memory.
constexpr int64_t kGatedTokens = 1024;

struct Mlp : FeedForward {
  Ref<Linear> gate_up, down;
  Activation activation;

  Mlp(Ref<Linear> gate_up, Ref<Linear> down, const std::string& activation)
      : gate_up(std::move(gate_up)), down(std::move(down)), activation(activation_named(activation)) {}

  at::Tensor operator()(const at::Tensor& normed, const Workspace& work) const override {
    if (normed.size(0) <= kGatedTokens) return (*down)((*gate_up)(normed, work.gated, activation), work.added);
    const at::Tensor& out = work.added.get(normed.sizes(), normed);
    for (int64_t first = 0; first < normed.size(0); first += kGatedTokens) {
      const int64_t count = std::min(kGatedTokens, normed.size(0) - first);
      const at::Tensor gated = (*gate_up)(normed.narrow(0, first, count), work.gated, activation);
      (*down)(gated, Buffer(out.narrow(0, first, count)));
    }
    return out;
  }
};

// Chooses the likeliest experts of each row, by torch's own operators.
struct Router : torch::CustomClassHolder {
  Ref<Linear> weight;
  int64_t num_chosen;
  bool is_normalized;  // whether the weights of a row add up to one
  bool is_rounded;     // whether they are rounded to the rows' dtype

  Router(Ref<Linear> weight, int64_t num_chosen, bool is_normalized, bool is_rounded)
      : weight(std::move(weight)), num_chosen(num_chosen), is_normalized(is_normalized), is_rounded(is_rounded) {}

  // normed [T, H] -> the chosen experts and their weights [T, S]
  std::tuple<at::Tensor, at::Tensor> operator()(const at::Tensor& normed) const {
    const at::Tensor logits = (*weight)(normed, {});
    auto [weights, experts] = at::topk(at::softmax(logits, -1, at::kFloat), num_chosen, -1);
    if (is_normalized) weights.div_(weights.sum(-1, true));
    return {experts, is_rounded ? weights.to(logits.scalar_type()) : weights};
  }
};

struct Mixture : FeedForward {
  Ref<Router> router;
  Ref<moe::Experts> experts;

  Mixture(Ref<Router> router, Ref<moe::Experts> experts) : router(std::move(router)), experts(std::move(experts)) {}

  at::Tensor operator()(const at::Tensor& normed, const Workspace& /*work*/) const override {
    const auto [chosen, weights] = (*router)(normed);
    return experts->run(normed, chosen, weights);
  }
};

}  // namespace twostep
