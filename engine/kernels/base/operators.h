// The operators, which torch calls by the same names (binding/operators.cpp) and other kernels as they are; those of
// recurrent mixers are in recurrent/operators.h. A result goes into a buffer, by default into a new one, where
// others call them.

#pragma once

#include <cstdint>
#include <optional>
#include <string_view>
#include <tuple>
#include <vector>

#include "base/activations.h"
#include "base/array_ref.h"
#include "base/buffer.h"
#include "base/tensor.h"

namespace twostep {

// Packs a weight [N, K] -> [panels, steps of K, columns of a panel, K of a step], or coded as uint8, on x86-64 where
// its numbers allow it. The result is opaque to the caller.
Tensor pack_weight(const Tensor& weight, bool may_be_coded);

// x [T, K], packed of weights [N, K], biases [N] -> [T, N]. Sums in float32, adds the bias to the sum, rounds once.
// With an activation the product is gated, as by `gate`.
Tensor linear(const Tensor& x, const Tensor& packed, const std::optional<Tensor>& bias, int64_t n,
              Activation activation = Activation::kNone, const Buffer& out = {});
Tensor linear_int8(const Tensor& x, const Tensor& packed, const std::optional<Tensor>& bias, int64_t n,
                   Activation activation = Activation::kNone, const Buffer& out = {});
Tensor linear_int4(const Tensor& x, const Tensor& packed, const std::optional<Tensor>& bias, int64_t n,
                   Activation activation = Activation::kNone, const Buffer& out = {});

// A packed weight, its bias [N] if it has one, and how many of the rows are its share.
struct Share {
  const Tensor* packed;
  Tensor bias;  // contiguous, or undefined
  int64_t rows;
};

// Weights of one size in one loop over tasks: the first rows of x [T, K] are the first weight's share, and so on.
using Shares = ArrayRef<Share>;
Tensor grouped_linear(const Tensor& x, Shares shares, int64_t n, Activation activation = Activation::kNone,
                      const Buffer& out = {});
Tensor grouped_linear_int8(const Tensor& x, Shares shares, int64_t n, Activation activation = Activation::kNone,
                           const Buffer& out = {});
Tensor grouped_linear_int4(const Tensor& x, Shares shares, int64_t n, Activation activation = Activation::kNone,
                           const Buffer& out = {});

// weight [N, K] -> codes [N, K] uint8, scales and minimums [N, groups of 256 or 32 along K] bfloat16.
std::tuple<Tensor, Tensor, Tensor> quantize(const Tensor& weight, int64_t bits, int64_t num_refits);

// weight [N, K] and what `quantize` made of it in 4 bits -> codes [N, K], levels [N, ceil(K / 32)] (zero << 4 |
// multiplier) uint8, scales [N, ceil(K / 256)] bfloat16.
std::tuple<Tensor, Tensor, Tensor> to_levels(const Tensor& weight, const Tensor& scales, const Tensor& minimums);

// They pack a weight that `quantize` made in 8 bits, and one that `to_levels` made.
Tensor pack_int8(const Tensor& codes, const Tensor& scales, const Tensor& minimums);
Tensor pack_int4(const Tensor& codes, const Tensor& levels, const Tensor& scales);

// weight [N, K] -> packed, as by the operators above one after the other: `inverse_hadamard` for rows of 8 bits,
// `quantize`, `to_levels` for 4 bits, and a `pack`; and whether all of its numbers are finite, without which others may
// be missing.
std::tuple<Tensor, bool> quantize_and_pack(const Tensor& weight, int64_t bits, int64_t row_bits, int64_t num_refits);

// weight [N, K] -> [N, K rounded up to a smallest block] float32: its product with transformed rows is that of weight
// and rows.
Tensor inverse_hadamard(const Tensor& weight);

// `linear_int8` with rows rounded to more bits.
Tensor linear_int8_wide_rows(const Tensor& x, const Tensor& packed, const std::optional<Tensor>& bias, int64_t n);

// Stored rows of a weight [N, K], in pieces of one kind each -> the packed weight; nothing where a panel would have
// rows of several kinds. What is `for_integers` is multiplied by rows of integers.
std::optional<Tensor> pack_blocks(const std::vector<Tensor>& pieces, IntArrayRef kinds, bool for_integers);

// Stored rows [N, bytes] of one kind -> their numbers [N, K] float32, those of a panel after the other.
Tensor expand_blocks(const Tensor& stored, int64_t kind);

// A weight [N, K] packed in blocks, the numbers of rows [T] -> [T, K] float32
Tensor take_block_rows(const Tensor& packed, const Tensor& numbers);

// Rows of blocks of kGateBlock columns, gate and up in turn (the last two may be narrower) [T, 2 * F] ->
// activation(gate) * up [T, F].
constexpr int64_t kGateBlock = 16;
Tensor gate(const Tensor& gate_up, Activation activation, const Buffer& out = {});

// x and residual [..., H] -> their sum.
Tensor add_rows(const Tensor& residual, const Tensor& x, const Buffer& out = {});

// Multiplies x by a number, in its place.
void scale_rows(const Tensor& x, double factor);

// Multiplies each column of x [T, N] by its number of factors [N], in float32, in its place.
void scale_columns(const Tensor& x, const Tensor& factors);

// The norm of rows [..., H] without their mean; weight and bias [H] are in float32.
Tensor layer_norm(const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias, double eps,
                  const Buffer& out = {});

// The norm of rows [..., H], and residual + x with its norm. A weight [H] of the rows' dtype multiplies what was
// rounded to it, one in float32 what was not.
Tensor rms_norm(const Tensor& x, const Tensor& weight, double eps, const Buffer& out = {});
std::tuple<Tensor, Tensor> add_rms_norm(const Tensor& residual, const Tensor& x, const Tensor& weight, double eps,
                                        const Buffer& sum = {}, const Buffer& normed = {});

// Adds x [T, H] to a sum [T, H], in the sum's place; each row may be multiplied before by the sigmoid of its number in
// `gates` [T, 1].
void add_gated_rows(const Tensor& sum, const Tensor& x, const std::optional<Tensor>& gates);

// Makes of each number of x the square of what is positive of it, in its place.
void square_relu(const Tensor& x);

// Makes of each number of x its xIELU, in its place: above zero positive * x**2 + slope * x, and else
// negative * (e**min(x, bound) - 1 - x) + slope * x, rounded at each step.
struct Xielu {
  double positive, negative, slope, bound;
};
void xielu(const Tensor& x, const Xielu& numbers);

// Makes of each number of x its gelu by the formula with tanh, in its place, rounded at each step:
// x / 2 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 * x**3)))
void gelu_new(const Tensor& x);

// Norms heads [T, N, D] without their mean, in their place; rows may be longer. Weight and bias in float32 are those of
// a head [D], or of each [N, D].
void norm_heads(const Tensor& heads, const Tensor& weight, const std::optional<Tensor>& bias, double eps);

// Norms, where given, and then rotates queries and keys of qkv [T, (num_heads + 2 * num_kv_heads) * head_size] in
// place, or rotates and then norms them. Tables [..., T, up to head_size] of the rows' dtype make products that are
// rounded to it, those in float32 sums that are. They may be narrower than heads, whose last columns then stay. A
// norm's weight is that of a head, or of all heads of a row together. Queries that are rotated are multiplied by the
// number [T] of their row, in float32, if there are such numbers.
void rotate_heads(const Tensor& qkv, const Tensor& cos, const Tensor& sin, int64_t num_heads, int64_t num_kv_heads,
                  const std::optional<Tensor>& query_norm, const std::optional<Tensor>& key_norm, double eps,
                  bool in_pairs = false, bool norms_last = false, const std::optional<Tensor>& query_scales = {});

// query [T, num_heads, head_size] -> [T, num_heads * value_size]
Tensor paged_attention(const Tensor& query, const Tensor& key_cache, const Tensor& value_cache,
                       const Tensor& block_tables, const Tensor& cu_seqlens_q, const Tensor& context_lens,
                       double scaling, std::optional<int64_t> sliding_window, std::optional<double> softcap,
                       const std::optional<Tensor>& sinks, const Buffer& out = {});
void write_kv(const Tensor& key, const Tensor& value, const Tensor& key_cache, const Tensor& value_cache,
              const Tensor& slot_mapping);

// query [T, index heads, size], weights [T, index heads] float32, index_keys [blocks, block size, size] -> the slots
// [T, num_chosen] int32 of the positions that each token's sparse attention reads, of which those behind the last are
// zero.
Tensor choose_slots(const Tensor& query, const Tensor& weights, const Tensor& index_keys, const Tensor& block_tables,
                    const Tensor& cu_seqlens_q, const Tensor& context_lens, int64_t num_chosen);

// logits [T, V] -> the likeliest tokens [T] int64, or kNoToken.
Tensor argmax(const Tensor& logits);

// logits [T, V], likeliest [T] int64 or kNoToken, controls [T, 5] float64: temperature, number, top_k, top_p, min_p ->
// [T] int64
Tensor draw_tokens(const Tensor& logits, const Tensor& likeliest, const Tensor& controls);

// logits [V] float32, of which `largest` is the largest -> [V] int64: the weights of draw_tokens, for its tests.
Tensor token_weights(const Tensor& logits, double largest, double temperature);

// logits [T, V], tokens [T] int64 -> of each row the token's log-probability [T] float32 and rank [T] int64, and the
// num_top largest log-probabilities with their tokens, [T, num_top].
std::tuple<Tensor, Tensor, Tensor, Tensor> score_tokens(const Tensor& logits, const Tensor& tokens, int64_t num_top);

}  // namespace twostep
