// What the implementations of the linear layer share: the description of a problem, its checks, and when threads pay.

#pragma once

#include <ATen/ATen.h>

#include <algorithm>
#include <cstdint>
#include <optional>

#include "base/operators.h"
#include "base/scratch.h"
#include "base/thread_pool.h"

namespace twostep {

template <class Element>
struct Problem {
  const Element* x;     // [rows, k]
  const Element* bias;  // [n], or null
  Element* out;         // [rows, n]
  int64_t rows, k, n;
  Activation activation;  // with one, out is [rows, n / 2], gated
};

// Whether waking the thread pool would cost more than it saves.
template <class Element>
bool is_small(const Problem<Element>& p) {
  return p.rows * p.n * p.k < 1 << 15;
}

template <class Element, class Multiply>
at::Tensor multiply_into(const Buffer& buffer, const at::Tensor& x, const at::Tensor& bias, int64_t n,
                         Activation activation, const Multiply& multiply) {
  const at::Tensor& out = buffer.get({x.size(0), activation == Activation::kNone ? n : n / 2}, x);
  multiply(Problem<Element>{x.const_data_ptr<Element>(), bias.defined() ? bias.const_data_ptr<Element>() : nullptr,
                            out.mutable_data_ptr<Element>(), x.size(0), x.size(1), n, activation});
  return out;
}

// x [T, K], bias [n] -> [T, n], or [T, n / 2] gated with an activation. Calls `multiply` with the problem of x's dtype:
// float32 or bfloat16.
template <class Multiply>
at::Tensor multiply_rows_of(const at::Tensor& x, const std::optional<at::Tensor>& bias, int64_t n,
                            Activation activation, const Buffer& out, const Multiply& multiply) {
  at::Tensor addend;
  if (bias.has_value()) {
    TORCH_CHECK(bias->numel() == n && bias->scalar_type() == x.scalar_type(), "bias differs in size or dtype");
    addend = bias->contiguous();
  }
  const at::Tensor rows = x.contiguous();
  return x.scalar_type() == at::kFloat ? multiply_into<float>(out, rows, addend, n, activation, multiply)
                                       : multiply_into<at::BFloat16>(out, rows, addend, n, activation, multiply);
}

}  // namespace twostep
