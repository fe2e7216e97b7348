// The operators of recurrent mixers that layers call; they are registered with torch, too. Each advances the states of
// the sequences in their slots (recurrent/sequences.h) and returns what the step's tokens read.

#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <string_view>
#include <tuple>

namespace twostep::recurrent {

// x [T, channels], weight [taps, channels] and bias [channels] in float32; with a silu if it is gated.
at::Tensor convolution(const at::Tensor& x, const at::Tensor& weight, const std::optional<at::Tensor>& bias,
                       bool is_gated, const at::Tensor& states, const at::Tensor& slots, const at::Tensor& starts);

// A convolution between two gates: rows [T, 3 * channels] are those of x, those of the result, and x.
at::Tensor short_convolution(const at::Tensor& rows, const at::Tensor& weight, const std::optional<at::Tensor>& bias,
                             const at::Tensor& states, const at::Tensor& slots, const at::Tensor& starts);

// query and key [T, groups, key size], value [T, heads, value size], decay [T, heads, 1 or key size], rate [T, heads],
// all in float32.
at::Tensor linear_attention(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                            const at::Tensor& decay, const std::optional<at::Tensor>& rate, const at::Tensor& states,
                            const at::Tensor& slots, const at::Tensor& starts);

// Linear attention of a gated delta net: qkv [T, 2 * groups * key size + heads * value size], write and time_step
// [T, heads], decay_rates and time_bias [heads] in float32 -> [T, heads * value size].
at::Tensor gated_delta_rule(const at::Tensor& qkv, const at::Tensor& write, const at::Tensor& time_step,
                            const at::Tensor& decay_rates, const at::Tensor& time_bias, int64_t num_groups,
                            const at::Tensor& states, const at::Tensor& slots, const at::Tensor& starts);

// The scan of Mamba-2: rows [T, heads * head size + 2 * groups * state size] are x, what writes and what reads it;
// time_step [T, heads], decay_rates, time_bias and skip [heads] in float32 -> [T, heads * head size] in float32.
at::Tensor mamba2_scan(const at::Tensor& rows, const at::Tensor& time_step, const at::Tensor& decay_rates,
                       const at::Tensor& time_bias, const at::Tensor& skip, double least_time, double most_time,
                       int64_t num_groups, const at::Tensor& states, const at::Tensor& slots,
                       const at::Tensor& starts);

// What that scan makes of its time steps: the decay of each head, and its time.
std::tuple<at::Tensor, at::Tensor> mamba2_gates(const at::Tensor& time_step, const at::Tensor& decay_rates,
                                                const at::Tensor& time_bias, double least_time, double most_time);

// A selective scan: x and time_step [T, channels], rates [channels, state size], write and read [T, state size], all in
// float32 -> [T, channels].
at::Tensor selective_scan(const at::Tensor& x, const at::Tensor& time_step, const at::Tensor& rates,
                          const at::Tensor& write, const at::Tensor& read, const at::Tensor& states,
                          const at::Tensor& slots, const at::Tensor& starts);

// A real-gated linear recurrence: x [T, channels] and gates [T, heads, 2, channels / heads] of the input and of the
// decay, rates [channels] in float32 and is_first [T] of bools -> as x.
at::Tensor real_gated_recurrence(const at::Tensor& x, const at::Tensor& gates, const at::Tensor& rates,
                                 const at::Tensor& is_first, const at::Tensor& states, const at::Tensor& slots,
                                 const at::Tensor& starts);

// What a gated delta net makes of its projections: the decay of each head, and how much of a value's error is written.
std::tuple<at::Tensor, at::Tensor> delta_gates(const at::Tensor& write, const at::Tensor& time_step,
                                               const at::Tensor& decay_rates, const at::Tensor& time_bias);

// x and gates [T, N] -> x * activation(gates), in x's place; sigmoid, silu or none.
void multiply_by_gates(const at::Tensor& x, const at::Tensor& gates, std::string_view activation);

// x [T, N] in float32, of which it makes x * silu(gates), and weight [N] -> an RMSNorm of each group, as gates [T, N].
at::Tensor gated_group_norm(const at::Tensor& x, const at::Tensor& gates, const at::Tensor& weight, double eps,
                            int64_t num_groups);

}  // namespace twostep::recurrent
