// Rows of tokens, from which layers start, and inputs that each layer has of its own.

#pragma once

#include <cstdint>
#include <optional>
#include <utility>

#include "base/operators.h"
#include "base/rows.h"
#include "base/tensor.h"
#include "layers/modules.h"

namespace twostep {

// A table of rows [N, H], or packed in blocks, with what its rows are multiplied by. A rank may have some of its
// columns, which are gathered.
struct Embedding {
  Tensor table;
  ranks::OptionalGather columns;
  std::optional<double> scale;

  bool is_in_blocks() const { return table.scalar_type() == kByte; }

  // token ids [T] -> [T, H]
  Tensor operator()(const Tensor& token_ids) const {
    Tensor rows = is_in_blocks() ? take_block_rows(table, token_ids) : take_rows(table, token_ids);
    if (columns) rows = (**columns)(rows, {});
    if (scale) scale_rows(rows, *scale);
    return rows;
  }
};

// An input of each layer: half of it is an embedding of the token, and half a projection of the row that layers start
// from, which is scaled and normed.
struct LayerInputs {
  Embedding embedding;  // [N, layers * size]
  Ref<Linear> projection;
  double projection_scale;
  Ref<Norm> norm;  // of one layer's part
  double factor;   // of the sum

  LayerInputs(Tensor table, std::optional<double> scale, Ref<Linear> projection, double projection_scale,
              Ref<Norm> norm, double factor)
      : embedding{std::move(table), {}, scale}, projection(std::move(projection)), projection_scale(projection_scale),
        norm(std::move(norm)), factor(factor) {}

  // token ids [T], x [T, H] -> [T, layers * size]
  Tensor operator()(const Tensor& token_ids, const Tensor& x, const AdapterRows& rows) const {
    const Tensor projected = (*projection)(x, {}, Activation::kNone, rows);
    scale_rows(projected, projection_scale);
    norm->in_place(projected.view({-1, norm->weight.numel()}));
    const Tensor sum = add_rows(projected, embedding(token_ids), Buffer(projected));
    scale_rows(sum, factor);
    return sum;
  }
};

}  // namespace twostep
