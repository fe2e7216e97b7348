// What ends some layers behind their feed-forward part: an input of the layer's own, and a factor of all.

#pragma once

#include <optional>
#include <utility>
#include <vector>

#include "base/check.h"
#include "base/tensor.h"
#include "layers/elementwise.h"
#include "layers/modules.h"
#include "layers/torch_math.h"

namespace twostep {

// An input [T, N] of the layer's own is multiplied by a gelu of rows, projected, normed and added to them; the sum is
// scaled.
struct LayerEnd {
  std::optional<Ref<Linear>> gate, projection;  // none without an input
  OptionalNorm norm;
  double factor;

  LayerEnd(std::optional<Ref<Linear>> gate, std::optional<Ref<Linear>> projection, OptionalNorm norm, double factor)
      : gate(std::move(gate)), projection(std::move(projection)), norm(std::move(norm)), factor(factor) {
    const bool has_input = this->gate.has_value();
    TWOSTEP_CHECK(this->projection.has_value() == has_input && this->norm.has_value() == has_input,
                  "an input is gated, projected and normed");
  }

  // residual and added [T, H] -> their sum, in `work.residual`, with what its end makes of it
  Tensor operator()(const Tensor& residual, const Tensor& added, const OptionalTensor& input, const Workspace& work,
                    const AdapterRows& rows) const {
    Tensor x = add_rows(residual, added, work.residual);
    if (gate) {
      TWOSTEP_CHECK(input, "a layer with an input of its own gets one");
      const Tensor gated = (**gate)(x, {}, Activation::kNone, rows);
      elementwise::gelu_in_place(gated, "tanh");
      torch_math::multiply_in_place(gated, *input);
      x = add_rows(x, (*norm)->in_place((**projection)(gated, work.added, Activation::kNone, rows)), work.residual);
    }
    if (factor != 1.0) scale_rows(x, factor);
    return x;
  }

  // The layers to which adapters may add.
  std::vector<Ref<Linear>> linears() const {
    return gate ? std::vector<Ref<Linear>>{*gate, *projection} : std::vector<Ref<Linear>>{};
  }
};

using OptionalEnd = std::optional<Ref<LayerEnd>>;

}  // namespace twostep
