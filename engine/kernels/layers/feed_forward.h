// What follows a layer's attention: an MLP, gated or not, or a mixture of experts.

#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/check.h"
#include "base/tensor.h"
#include "layers/elementwise.h"
#include "layers/modules.h"
#include "layers/router.h"
#include "layers/torch_math.h"
#include "moe/experts.h"

namespace twostep {

struct FeedForward {
  virtual ~FeedForward() = default;

  // x [T, H], which is added to the result then, and its norm -> [T, H]
  virtual Tensor operator()(const Tensor& x, const Tensor& normed, const Workspace& work,
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
    TWOSTEP_CHECK(is_known, "the activation ", activation, " is not known");
    TWOSTEP_CHECK(this->numbers.size() == (activation == "xielu" ? 4 : 0), "only xIELU has numbers, four of them");
  }

  Tensor operator()(const Tensor&, const Tensor& normed, const Workspace& work,
                    const AdapterRows& rows) const override {
    return (*this)(normed, work, rows);
  }

  Tensor operator()(const Tensor& normed, const Workspace& work, const AdapterRows& rows) const {
    if (normed.size(0) <= kGatedTokens) return project(normed, work.gated, work.added, rows);
    const Tensor& out = work.added.get(normed.sizes(), normed);
    for (int64_t first = 0; first < normed.size(0); first += kGatedTokens) {
      const int64_t count = std::min(kGatedTokens, normed.size(0) - first);
      project(normed.narrow(0, first, count), work.gated, Buffer(out.narrow(0, first, count)),
              rows.narrowed(first, count));
    }
    return out;
  }

  Tensor project(const Tensor& normed, const Buffer& gated, const Buffer& out, const AdapterRows& rows) const {
    return (*down)(activated(normed, gated, rows), out, Activation::kNone, rows);
  }

  Tensor activated(const Tensor& normed, const Buffer& gated, const AdapterRows& rows) const {
    const Tensor up = (*gate_up)(normed, gated, gate, rows);
    if (gate == Activation::kNone) activate(up);
    return up;
  }

  void activate(const Tensor& x) const {
    if (activation == "square_relu") return square_relu(x);
    if (activation == "xielu") return xielu(x, {numbers[0], numbers[1], numbers[2], numbers[3]});
    if (activation == "gelu_new") return gelu_new(x);
    if (activation == "silu") elementwise::silu_in_place(x);
    else elementwise::gelu_in_place(x, activation == "gelu_tanh" ? "tanh" : "none");
  }

  std::vector<Ref<Linear>> linears() const override { return {gate_up, down}; }
};

// Norms of a mixture's parts: its router and its experts read norms of their own of a layer's sum, and not the one that
// the MLP beside them reads, and what experts and MLP make is normed before it is added.
struct MixtureNorms {
  Ref<Norm> router;
  double router_factor;  // what the router's rows are multiplied by
  Ref<Norm> experts, added, shared;

  MixtureNorms(Ref<Norm> router, double router_factor, Ref<Norm> experts, Ref<Norm> added, Ref<Norm> shared)
      : router(std::move(router)), router_factor(router_factor), experts(std::move(experts)), added(std::move(added)),
        shared(std::move(shared)) {}

  Tensor routed(const Tensor& x) const {
    const Tensor rows = (*router)(x);
    scale_rows(rows, router_factor);
    return rows;
  }
};

// Projections around experts that read and make narrower rows than their layer has.
struct Narrowing {
  Ref<Linear> down, up;

  Narrowing(Ref<Linear> down, Ref<Linear> up) : down(std::move(down)), up(std::move(up)) {}
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
  std::optional<Ref<Narrowing>> narrowing;

  Mixture(Ref<Router> router, Ref<moe::Experts> experts, std::optional<Ref<Mlp>> shared,
          std::optional<Ref<Linear>> shared_gate, std::optional<Ref<MixtureNorms>> norms, bool weighs_rows,
          double factor, std::optional<Ref<Narrowing>> narrowing)
      : router(std::move(router)), experts(std::move(experts)), shared(std::move(shared)),
        shared_gate(std::move(shared_gate)), norms(std::move(norms)), weighs_rows(weighs_rows),
        factor(factor), narrowing(std::move(narrowing)) {
    TWOSTEP_CHECK(!weighs_rows || this->router->num_chosen == 1, "rows that are weighed are one expert's each");
  }

  Tensor operator()(const Tensor& x, const Tensor& normed, const Workspace& work,
                    const AdapterRows& rows) const override {
    const auto [chosen, weights] = (*router)(norms ? (*norms)->routed(x) : normed);
    const Tensor whole = norms ? (*(*norms)->experts)(x) : normed;
    const Tensor read = narrowing ? (*(*narrowing)->down)(whole, {}) : whole;
    const Tensor made = weighs_rows
                            ? experts->run(torch_math::product(read, weights), chosen, torch_math::ones_like(weights))
                            : experts->run(read, chosen, weights);
    const Tensor sum = narrowing ? (*(*narrowing)->up)(made, {}) : made;
    if (norms) (*norms)->added->in_place(sum);
    if (!shared) return sum;
    const OptionalTensor gates =
        shared_gate ? OptionalTensor((**shared_gate)(normed, {}, Activation::kNone, rows)) : std::nullopt;
    const Tensor own = (**shared)(normed, work, rows);
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
