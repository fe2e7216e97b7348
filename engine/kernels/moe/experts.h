// The experts of a layer in one call. Rows are sorted by expert, so that a chosen expert's weights are read once; the
// products of all of them are one loop over tasks. Then a row's outputs are weighed, and summed in the order of its
// slots. `PackedExperts` of engine/weights/moe.py is the plain path: the same operations, so the same bits.

#pragma once

#include <cstdint>
#include <optional>
#include <tuple>
#include <utility>
#include <vector>

#include "base/operators.h"
#include "base/ref.h"
#include "base/tensor.h"
#include "moe/gates.h"
#include "moe/order.h"
#include "ranks/exchange.h"

namespace twostep::moe {

// The packed weights [N, K] of all experts, with their biases.
struct Stack {
  std::vector<Tensor> weights;
  std::vector<Tensor> biases;      // [N] each, or none at all
  int64_t out_features, bits;      // 8 or 4 bits, or 0 if they are not quantized

  Stack(std::vector<Tensor> weights, const std::optional<Tensor>& biases, int64_t out_features, int64_t bits);

  // Multiplies rows [E, T, K], as many for each of the weights, which are dense -> [E, T, N].
  Tensor multiply_each(const Tensor& rows, const Buffer& out = {}) const;

  // Multiplies the rows of the experts [first, end) by their weights.
  Tensor multiply(const Tensor& rows, const Order& order, int64_t first, int64_t end, const Buffer& out) const;
};

// Where these are one rank's part of the experts, with some columns of each weight, all ranks' columns of the gated
// rows are gathered, and those of the result.
struct Experts {
  Ref<Stack> up, down;
  Ref<Gate> gate;
  ranks::OptionalGather gated_columns, result_columns;

  Experts(Ref<Stack> up, Ref<Stack> down, Ref<Gate> gate, ranks::OptionalGather gated_columns,
          ranks::OptionalGather result_columns)
      : up(std::move(up)), down(std::move(down)), gate(std::move(gate)), gated_columns(std::move(gated_columns)),
        result_columns(std::move(result_columns)) {}

  // hidden [T, H], the chosen experts and their weights [T, S] -> [T, H]
  Tensor run(const Tensor& hidden, const Tensor& chosen, const Tensor& weights) const;
};

// Returns how many experts were chosen, and how many could have been, in all layers that ran on this thread since it
// was last asked.
std::tuple<int64_t, int64_t> take_experts_read();

}  // namespace twostep::moe
