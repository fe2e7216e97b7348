// What a layer's attention does beside attending, whatever its keys and values are.

#pragma once

#include <utility>
#include <vector>

#include "base/tensor.h"
#include "layers/modules.h"
#include "layers/rotary.h"

namespace twostep {

struct Attention {
  OptionalNorm input_norm;

  virtual ~Attention() = default;
  explicit Attention(OptionalNorm input_norm) : input_norm(std::move(input_norm)) {}

  Tensor normed(const Tensor& x) const { return input_norm ? (**input_norm)(x) : x; }

  // normed [T, H] -> query [T, num_heads, head_size], key and value [T, num_kv_heads, head_size], rotated; the latter
  // are none if they are another layer's; and gates, if there are some
  virtual Heads project(const Tensor& normed, const Angles& angles, Workspace& work, const AdapterRows& rows) const = 0;

  // attended [T, num_heads * value_size] -> what the output projection multiplies
  virtual Tensor finished(const Tensor& attended, const Workspace&) const { return attended; }

  virtual bool takes_keys_of_others() const { return false; }

  // The layers to which adapters may add.
  virtual std::vector<Ref<Linear>> linears() const = 0;
};

}  // namespace twostep
