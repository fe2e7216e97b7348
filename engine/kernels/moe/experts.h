// The experts of a layer in one call. Rows are sorted by expert, so that a chosen expert's weights are read once; the
// products of all of them are one loop over tasks. Then a row's outputs are weighed, and summed in the order of its
// slots. `PackedExperts` of engine/weights/moe.py is the plain path: the same operations, so the same bits.

#pragma once

#include <ATen/core/Tensor.h>
#include <torch/custom_class.h>
#include <torch/library.h>

#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

#include "base/operators.h"
#include "moe/gates.h"
#include "moe/order.h"
#include "ranks/exchange.h"

namespace twostep::moe {

template <class T>
using Ref = c10::intrusive_ptr<T>;

// The packed weights [N, K] of all experts, with their biases.
struct Stack : torch::CustomClassHolder {
  std::vector<at::Tensor> weights;
  std::vector<at::Tensor> biases;  // [N] each, or none at all
  int64_t out_features, bits;      // 8 or 4 bits, or 0 if they are not quantized

  Stack(std::vector<at::Tensor> weights, const std::optional<at::Tensor>& biases, int64_t out_features, int64_t bits);

  // Multiplies rows [E, T, K], as many for each of the weights, which are dense -> [E, T, N].
  at::Tensor multiply_each(const at::Tensor& rows, const Buffer& out = {}) const;

  // Multiplies the rows of the experts [first, end) by their weights.
  at::Tensor multiply(const at::Tensor& rows, const Order& order, int64_t first, int64_t end, const Buffer& out) const;
};

// Where these are one rank's part of the experts, with some columns of each weight, all ranks' columns of the gated
// rows are gathered, and those of the result.
struct Experts : torch::CustomClassHolder {
  Ref<Stack> up, down;
  Ref<Gate> gate;
  ranks::OptionalGather gated_columns, result_columns;

  Experts(Ref<Stack> up, Ref<Stack> down, Ref<Gate> gate, ranks::OptionalGather gated_columns,
          ranks::OptionalGather result_columns)
      : up(std::move(up)), down(std::move(down)), gate(std::move(gate)), gated_columns(std::move(gated_columns)),
        result_columns(std::move(result_columns)) {}

  // hidden [T, H], the chosen experts and their weights [T, S] -> [T, H]
  at::Tensor run(const at::Tensor& hidden, const at::Tensor& chosen, const at::Tensor& weights) const;
};

// To be called before classes are registered that hold these: torch must know theirs then.
void register_classes(torch::Library& library);

}  // namespace twostep::moe
