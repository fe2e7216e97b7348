// What follows a layer's attention: an MLP, gated or not, or a mixture of experts.

#pragma once

#include <ATen/ATen.h>
#include <torch/custom_class.h>

#include <algorithm>
#include <cstdint>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "layers/modules.h"
#include "moe/experts.h"

namespace twostep {

struct FeedForward : torch::CustomClassHolder {
  // normed [T, H] -> [T, H]
  virtual at::Tensor operator()(const at::Tensor& normed, const Workspace& work, const AdapterRows& rows) const = 0;

  // The layers to which adapters may add.
  virtual std::vector<Ref<Linear>> linears() const { return {}; }
};

// Tokens whose gated rows are in memory at once: these rows are several times as wide as all others, and for more
// tokens they would take most of a step's memory.
constexpr int64_t kGatedTokens = 1024;

struct Mlp : FeedForward {
  Ref<Linear> gate_up, down;  // the former without a gate, if there is none
  Activation activation;
  bool is_gated;

  Mlp(Ref<Linear> gate_up, Ref<Linear> down, const std::string& activation, bool is_gated)
      : gate_up(std::move(gate_up)), down(std::move(down)), activation(activation_named(activation)),
        is_gated(is_gated) {}

  at::Tensor operator()(const at::Tensor& normed, const Workspace& work, const AdapterRows& rows) const override {
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
    if (is_gated) return (*gate_up)(normed, gated, activation, rows);
    at::Tensor up = (*gate_up)(normed, gated, Activation::kNone, rows);
    return activation == Activation::kSilu ? at::silu_(up) : at::gelu_(up, "tanh");  // those of elementwise.cpp
  }

  std::vector<Ref<Linear>> linears() const override { return {gate_up, down}; }
};

// Chooses the likeliest experts of each row, by torch's own operators.
struct Router : torch::CustomClassHolder {
  Ref<Linear> weight;
  int64_t num_chosen;
  bool is_of_chosen;   // whether the softmax is that of the chosen experts alone, in the rows' dtype
  bool is_normalized;  // else: whether the weights of a row add up to one
  bool is_rounded;     // and whether they are rounded to the rows' dtype

  Router(Ref<Linear> weight, int64_t num_chosen, bool is_of_chosen, bool is_normalized, bool is_rounded)
      : weight(std::move(weight)), num_chosen(num_chosen), is_of_chosen(is_of_chosen), is_normalized(is_normalized),
        is_rounded(is_rounded) {}

  // normed [T, H] -> the chosen experts and their weights [T, S]
  std::tuple<at::Tensor, at::Tensor> operator()(const at::Tensor& normed) const {
    const at::Tensor logits = (*weight)(normed, {});
    if (is_of_chosen) {
      const auto [largest, experts] = at::topk(logits, num_chosen, -1);
      return {experts, at::softmax(largest, -1)};
    }
    auto [weights, experts] = at::topk(at::softmax(logits, -1, at::kFloat), num_chosen, -1);
    if (is_normalized) weights.div_(weights.sum(-1, true));
    return {experts, is_rounded ? weights.to(logits.scalar_type()) : weights};
  }
};

struct Mixture : FeedForward {
  Ref<Router> router;
  Ref<moe::Experts> experts;

  Mixture(Ref<Router> router, Ref<moe::Experts> experts) : router(std::move(router)), experts(std::move(experts)) {}

  at::Tensor operator()(const at::Tensor& normed, const Workspace& /*work*/,
                        const AdapterRows& /*rows*/) const override {
    const auto [chosen, weights] = (*router)(normed);
    return experts->run(normed, chosen, weights);
  }
};

}  // namespace twostep
