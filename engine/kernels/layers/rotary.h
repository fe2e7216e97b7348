// Rotary embeddings: the angles by which queries and keys are rotated at each position.

#pragma once

#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/floor_divide.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/polar.h>
#include <ATen/ops/view_as_real.h>

#include <algorithm>
#include <cstdint>
#include <optional>
#include <utility>

#include "base/rows.h"
#include "base/thread_pool.h"

namespace twostep {

// What rotates the heads of rows: cos and sin [T, 2 * frequencies], and numbers [T] that multiply queries then.
struct Angles {
  at::Tensor cos, sin;
  std::optional<at::Tensor> query_scales;
};

// Numbers [N] in float32, each that of the queries at `interval` positions one after the other; the first of them has
// `shift` less.
struct QueryScales {
  at::Tensor numbers;
  int64_t interval, shift;

  at::Tensor of(const at::Tensor& positions) const {
    return take_rows(numbers.unsqueeze(-1), at::floor_divide(positions + shift, interval)).squeeze(-1);
  }
};

// Angles are computed once per position: MKL's sine and cosine wake torch's threads, which then spin for a while beside
// the kernels' own. On two cores a step of 8 requests took a sixth longer. Not thread-safe.
class Rotations {
 public:
  // Tables are rounded to `dtype`, if one is given, and have the dtype `to`; those that are polar are the parts of
  // complex numbers, as torch computes these.
  Rotations(at::Tensor frequencies, double scaling, std::optional<at::ScalarType> dtype, at::ScalarType to,
            bool is_polar, std::optional<QueryScales> query_scales)
      : frequencies_(std::move(frequencies)), scaling_(scaling), dtype_(dtype.value_or(at::kFloat)), to_(to),
        is_polar_(is_polar), query_scales_(std::move(query_scales)) {}

  // positions [T] -> cos and sin as LlamaRotaryEmbedding of transformers computes them
  Angles of(const at::Tensor& positions) {
    const at::Tensor which = positions.contiguous();
    const auto* position = which.const_data_ptr<int64_t>();
    const int64_t count = which.numel(), end = count > 0 ? *std::max_element(position, position + count) + 1 : 1;
    if (end > known_) extend(round_up(end, kAtOnce));
    const auto scales = query_scales_ ? std::optional(query_scales_->of(which)) : std::nullopt;
    return {take_rows(cos_, which), take_rows(sin_, which), scales};
  }

 private:
  static constexpr int64_t kAtOnce = 4096;

  void extend(int64_t end) {
    const at::Tensor positions = at::arange(known_, end, frequencies_.options()).unsqueeze(-1);
    const at::Tensor angles = positions * frequencies_, both = at::cat({angles, angles}, -1);
    const at::Tensor turned = is_polar_ ? at::view_as_real(at::polar(at::ones_like(both), both)) : at::Tensor();
    const auto append = [&](at::Tensor& table, const at::Tensor& x) {
      const at::Tensor scaled = (x * scaling_).to(dtype_).to(to_);
      table = known_ > 0 ? at::cat({table, scaled}) : scaled;
    };
    append(cos_, is_polar_ ? turned.select(-1, 0) : both.cos());
    append(sin_, is_polar_ ? turned.select(-1, 1) : both.sin());
    known_ = end;
  }

  at::Tensor frequencies_, cos_, sin_;  // the latter [known, head_size]
  double scaling_;
  at::ScalarType dtype_, to_;
  bool is_polar_;
  std::optional<QueryScales> query_scales_;
  int64_t known_ = 0;
};

}  // namespace twostep
