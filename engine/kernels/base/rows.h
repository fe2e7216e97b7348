// Rows of matrices: gathered by index, and computed sixteen elements at a time.

#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/BFloat16.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "base/operators.h"
#include "base/tensors.h"
#include "base/thread_pool.h"
#include "base/vec.h"

namespace twostep {

// Gathers rows: table [N, size], numbers [T] -> [T, size]. Unlike at::embedding it never wakes torch's threads.
inline at::Tensor take_rows(const at::Tensor& table, const at::Tensor& numbers) {
  const at::Tensor from = table.stride(1) == 1 ? table : table.contiguous(), which = numbers.contiguous();
  const int64_t rows = from.size(0), row_bytes = from.size(1) * from.element_size();
  const int64_t stride_bytes = from.stride(0) * from.element_size();
  const auto* number = which.const_data_ptr<int64_t>();
  TORCH_CHECK(std::all_of(number, number + which.numel(), [&](int64_t i) { return 0 <= i && i < rows; }),
              "a row's number is out of range");
  at::Tensor out = new_empty({which.numel(), from.size(1)}, from.options());
  if (row_bytes == 0) return out;
  const auto* source = static_cast<const char*>(from.const_data_ptr());
  auto* target = static_cast<char*>(out.mutable_data_ptr());
  constexpr int64_t kGrainBytes = 1 << 16;
  run_ranges(which.numel(), divide_up(kGrainBytes, std::max<int64_t>(1, row_bytes)), [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      std::memcpy(target + i * row_bytes, source + number[i] * stride_bytes, row_bytes);
    }
  });
  return out;
}

// Returns the same numbers in float32. Unlike at::Tensor::to it never wakes torch's threads.
inline at::Tensor widened(const at::Tensor& x) {
  if (x.scalar_type() != at::kBFloat16) return x.to(at::kFloat);
  const at::Tensor from = x.contiguous(), out = new_empty(x.sizes(), x.options().dtype(at::kFloat));
  const auto* source = from.const_data_ptr<at::BFloat16>();
  auto* target = out.mutable_data_ptr<float>();
  constexpr int64_t kGrain = 1 << 14;
  run_ranges(x.numel(), kGrain, [&](int64_t begin, int64_t end) {
    for_each_vector(end - begin, [&](int64_t i, int64_t count) TWOSTEP_INLINE {
      store_upto(target + begin + i, count, load_upto(source + begin + i, count));
    });
  });
  return out;
}

// Calls f with a null pointer of a tensor's element type; `what` names the operators that know no other.
template <class F>
void with_element_of(const at::Tensor& tensor, const char* what, const F& f) {
  switch (tensor.scalar_type()) {
    case at::kFloat: return f(static_cast<float*>(nullptr));
    case at::kBFloat16: return f(static_cast<at::BFloat16*>(nullptr));
    default: TORCH_CHECK_NOT_IMPLEMENTED(false, what, " of ", tensor.scalar_type(), " are not implemented");
  }
}

inline Vec rounded_to(Vec v, const float*) { return v; }
inline Vec rounded_to(Vec v, const at::BFloat16*) {
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
