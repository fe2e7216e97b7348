// Rotary embeddings: the angles by which queries and keys are rotated at each position.

#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>
#include <utility>

#include "base/rows.h"
#include "base/sizes.h"
#include "base/tensor.h"
#include "layers/torch_math.h"

namespace twostep {

// What rotates the heads of rows: cos and sin [T, 2 * frequencies], and numbers [T] that multiply queries then.
struct Angles {
  Tensor cos, sin;
  std::optional<Tensor> query_scales;
};

// Numbers [N] in float32, each that of the queries at `interval` positions one after the other; the first of them has
// `shift` less.
struct QueryScales {
  Tensor numbers;
  int64_t interval, shift;

  Tensor of(const Tensor& positions) const {
    return take_rows(numbers.unsqueeze(-1), torch_math::floor_divided(positions, shift, interval)).squeeze(-1);
  }
};

// Angles are computed once per position: MKL's sine and cosine wake torch's threads, which then spin for a while beside
// the kernels' own. On two cores a step of 8 requests took a sixth longer. Not thread-safe.
class Rotations {
 public:
  // Tables are rounded to `dtype`, if one is given, and have the dtype `to`; those that are polar are the parts of
  // complex numbers, as torch computes these.
  Rotations(Tensor frequencies, double scaling, std::optional<Dtype> dtype, Dtype to, bool is_polar,
            std::optional<QueryScales> query_scales)
      : frequencies_(std::move(frequencies)), scaling_(scaling), dtype_(dtype.value_or(kFloat)), to_(to),
        is_polar_(is_polar), query_scales_(std::move(query_scales)) {}

  // positions [T] -> cos and sin as LlamaRotaryEmbedding of transformers computes them
  Angles of(const Tensor& positions) {
    const Tensor which = positions.contiguous();
    const auto* position = which.const_data_ptr<int64_t>();
    const int64_t count = which.numel(), end = count > 0 ? *std::max_element(position, position + count) + 1 : 1;
    if (end > known_) extend(round_up(end, kAtOnce));
    const auto scales = query_scales_ ? std::optional(query_scales_->of(which)) : std::nullopt;
    return {take_rows(cos_, which), take_rows(sin_, which), scales};
  }

 private:
  static constexpr int64_t kAtOnce = 4096;

  void extend(int64_t end) {
    using namespace torch_math;
    const Tensor positions = range(known_, end, frequencies_.scalar_type()).unsqueeze(-1);
    const Tensor angles = product(positions, frequencies_), both = cat({angles, angles}, -1);
    const Tensor parts = is_polar_ ? turned(both) : Tensor();
    const auto append = [&](Tensor& table, const Tensor& x) {
      const Tensor rows = scaled(x, scaling_).to(dtype_).to(to_);
      table = known_ > 0 ? cat({table, rows}, 0) : rows;
    };
    append(cos_, is_polar_ ? parts.select(-1, 0) : cos(both));
    append(sin_, is_polar_ ? parts.select(-1, 1) : sin(both));
    known_ = end;
  }

  Tensor frequencies_, cos_, sin_;  // the latter [known, head_size]
  double scaling_;
  Dtype dtype_, to_;
  bool is_polar_;
  std::optional<QueryScales> query_scales_;
  int64_t known_ = 0;
};

}  // namespace twostep
