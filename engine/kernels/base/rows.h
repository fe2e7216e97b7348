// Rows of matrices: gathered by index, and computed sixteen elements at a time.

#pragma once

#include <cstdint>

#include "base/bfloat16.h"
#include "base/check.h"
#include "base/operators.h"
#include "base/tensor.h"
#include "base/vec.h"

namespace twostep {

// Gathers rows: table [N, size], numbers [T] -> [T, size]. Unlike at::embedding it never wakes torch's threads.
Tensor take_rows(const Tensor& table, const Tensor& numbers);

// Returns the same numbers in float32. Unlike at::Tensor::to it never wakes torch's threads.
Tensor widened(const Tensor& x);

// Calls f with a null pointer of a tensor's element type; `what` names the operators that know no other.
template <class F>
void with_element_of(const Tensor& tensor, const char* what, const F& f) {
  switch (tensor.scalar_type()) {
    case kFloat: return f(static_cast<float*>(nullptr));
    case kBFloat16: return f(static_cast<BFloat16*>(nullptr));
    default: fail_not_implemented(what, " of ", tensor.scalar_type(), " are not implemented");
  }
}

inline Vec rounded_to(Vec v, const float*) { return v; }
inline Vec rounded_to(Vec v, const BFloat16*) {
  return each_part([&](int i) { return rounded_to_bfloat16(v.part[i]); });
}

// Returns activation(gate) * up for numbers of the type Element, to which the activation is rounded, too.
template <class Op, class Element>
inline Vec gated(Vec gate, Vec up, const Element* element) {
  return rounded_to(Op::apply(gate), element) * up;
}

// Blocks of gate and up in turn -> `size` gated elements.
template <class Op, class Element>
void gate_row(const Element* gate_up, int64_t size, Element* to) {
  static_assert(kGateBlock == kLanes);
  for_each_vector(size, [&](int64_t i, int64_t count) TWOSTEP_INLINE {
    const Element* block = gate_up + 2 * i;
    store_upto(to + i, count, gated<Op>(load_upto(block, count), load_upto(block + count, count), block));
  });
}

}  // namespace twostep
