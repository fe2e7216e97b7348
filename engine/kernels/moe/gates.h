// The gates of experts: what they make of columns of gate and of up, which lie side by side, or in turn; and what those
// without a gate make of their columns.

#pragma once

#include <string>

#include "base/activations.h"
#include "base/buffer.h"
#include "base/tensor.h"

namespace twostep::moe {

// A gate with its numbers: gates up to `limit`, ups from -limit to limit; or an activation without a gate, which has
// none. Results are rounded wherever the modules of transformers round.
class Gate {
 public:
  Gate(const std::string& name, double limit, double alpha, bool is_in_turn);

  // gate and up [T, 2 * F] -> [T, F]; without a gate [T, F] -> [T, F]
  Tensor operator()(const Tensor& gate_up, const Buffer& buffer) const;

 private:
  float limit_, alpha_;
  bool is_in_turn_, is_swiglu_, is_plain_;
  Activation activation_;
};

}  // namespace twostep::moe
