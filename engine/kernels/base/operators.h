// The operators that other kernels call; they are registered with torch under the same names. A result goes into a
// buffer, by default into a new one.

#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/ArrayRef.h>

#include <cstdint>
#include <optional>
#include <tuple>

#include "base/activations.h"
#include "base/buffer.h"

namespace twostep {

// With an activation the product is gated, as by `gate`.
at::Tensor linear(const at::Tensor& x, const at::Tensor& packed, const std::optional<at::Tensor>& bias, int64_t n,
                  Activation activation = Activation::kNone, const Buffer& out = {});
at::Tensor linear_int8(const at::Tensor& x, const at::Tensor& packed, const std::optional<at::Tensor>& bias, int64_t n,
                       Activation activation = Activation::kNone, const Buffer& out = {});
at::Tensor linear_int4(const at::Tensor& x, const at::Tensor& packed, const std::optional<at::Tensor>& bias, int64_t n,
                       Activation activation = Activation::kNone, const Buffer& out = {});

// A packed weight, its bias [N] if it has one, and how many of the rows are its share.
struct Share {
  const at::Tensor* packed;
  at::Tensor bias;  // contiguous, or undefined
  int64_t rows;
};

// Weights of one size in one loop over tasks: the first rows of x [T, K] are the first weight's share, and so on.
using Shares = c10::ArrayRef<Share>;
at::Tensor grouped_linear(const at::Tensor& x, Shares shares, int64_t n, Activation activation = Activation::kNone,
                          const Buffer& out = {});
at::Tensor grouped_linear_int8(const at::Tensor& x, Shares shares, int64_t n,
                               Activation activation = Activation::kNone, const Buffer& out = {});
at::Tensor grouped_linear_int4(const at::Tensor& x, Shares shares, int64_t n,
                               Activation activation = Activation::kNone, const Buffer& out = {});

// A weight [N, K] packed in blocks, the numbers of rows [T] -> [T, K] float32
at::Tensor take_block_rows(const at::Tensor& packed, const at::Tensor& numbers);

// Rows of blocks of kGateBlock columns, gate and up in turn (the last two may be narrower) -> activation(gate) * up.
constexpr int64_t kGateBlock = 16;
at::Tensor gate(const at::Tensor& gate_up, Activation activation, const Buffer& out = {});

// x and residual [..., H] -> their sum.
at::Tensor add_rows(const at::Tensor& residual, const at::Tensor& x, const Buffer& out = {});

// Multiplies x by a number, in its place.
void scale_rows(const at::Tensor& x, double factor);

// The norm of rows without their mean; weight and bias [H] are in float32.
at::Tensor layer_norm(const at::Tensor& x, const at::Tensor& weight, const std::optional<at::Tensor>& bias, double eps,
                      const Buffer& out = {});

// A weight of the rows' dtype multiplies what was rounded to it, one in float32 what was not.
at::Tensor rms_norm(const at::Tensor& x, const at::Tensor& weight, double eps, const Buffer& out = {});
std::tuple<at::Tensor, at::Tensor> add_rms_norm(const at::Tensor& residual, const at::Tensor& x,
                                                const at::Tensor& weight, double eps, const Buffer& sum = {},
                                                const Buffer& normed = {});

// Adds x [T, H] to a sum [T, H], in the sum's place; each row may be multiplied before by the sigmoid of its number in
// `gates` [T, 1].
void add_gated_rows(const at::Tensor& sum, const at::Tensor& x, const std::optional<at::Tensor>& gates);

// Makes of each number of x the square of what is positive of it, in its place.
void square_relu(const at::Tensor& x);

// Makes of each number of x its xIELU, in its place: above zero positive * x**2 + slope * x, and else
// negative * (e**min(x, bound) - 1 - x) + slope * x, rounded at each step.
struct Xielu {
  double positive, negative, slope, bound;
};
void xielu(const at::Tensor& x, const Xielu& numbers);

// Tables of the rows' dtype make products that are rounded to it, those in float32 sums that are. They may be narrower
// than heads, whose last columns then stay. A norm's weight is that of a head, or of all heads of a row together.
// Queries that are rotated are multiplied by the number [T] of their row, in float32, if there are such numbers.
void rotate_heads(at::Tensor& qkv, const at::Tensor& cos, const at::Tensor& sin, int64_t num_heads,
                  int64_t num_kv_heads, const std::optional<at::Tensor>& query_norm,
                  const std::optional<at::Tensor>& key_norm, double eps, bool in_pairs = false,
                  bool norms_last = false, const std::optional<at::Tensor>& query_scales = {});

// query [T, num_heads, head_size] -> [T, num_heads * value_size]
at::Tensor paged_attention(const at::Tensor& query, const at::Tensor& key_cache, const at::Tensor& value_cache,
                           const at::Tensor& block_tables, const at::Tensor& cu_seqlens_q,
                           const at::Tensor& context_lens, double scaling, std::optional<int64_t> sliding_window,
                           std::optional<double> softcap, const std::optional<at::Tensor>& sinks,
                           const Buffer& out = {});
void write_kv(const at::Tensor& key, const at::Tensor& value, const at::Tensor& key_cache,
              const at::Tensor& value_cache, const at::Tensor& slot_mapping);

}  // namespace twostep
