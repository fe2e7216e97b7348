// The operators of recurrent mixers that layers call; they are registered with torch, too. Each advances the states of
// the sequences in their slots (recurrent/sequences.h) and returns what the step's tokens read.

#pragma once

#include <cstdint>
#include <optional>
#include <string_view>
#include <tuple>

#include "base/tensor.h"

namespace twostep::recurrent {

// x [T, channels], weight [taps, channels] and bias [channels] in float32; with a silu if it is gated.
Tensor convolution(const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias, bool is_gated,
                   const Tensor& states, const Tensor& slots, const Tensor& starts);

// A convolution between two gates: rows [T, 3 * channels] are those of x, those of the result, and x.
Tensor short_convolution(const Tensor& rows, const Tensor& weight, const std::optional<Tensor>& bias,
                         const Tensor& states, const Tensor& slots, const Tensor& starts);

// query and key [T, groups, key size], value [T, heads, value size], decay [T, heads, 1 or key size], rate [T, heads],
// all in float32.
Tensor linear_attention(const Tensor& query, const Tensor& key, const Tensor& value, const Tensor& decay,
                        const std::optional<Tensor>& rate, const Tensor& states, const Tensor& slots,
                        const Tensor& starts);

// Linear attention of a gated delta net: qkv [T, 2 * groups * key size + heads * value size], write and time_step
// [T, heads], decay_rates and time_bias [heads] in float32 -> [T, heads * value size].
Tensor gated_delta_rule(const Tensor& qkv, const Tensor& write, const Tensor& time_step, const Tensor& decay_rates,
                        const Tensor& time_bias, int64_t num_groups, const Tensor& states, const Tensor& slots,
                        const Tensor& starts);

// The scan of Mamba-2: rows [T, heads * head size + 2 * groups * state size] are x, what writes and what reads it;
// time_step [T, heads], decay_rates, time_bias and skip [heads] in float32 -> [T, heads * head size] in float32.
Tensor mamba2_scan(const Tensor& rows, const Tensor& time_step, const Tensor& decay_rates, const Tensor& time_bias,
                   const Tensor& skip, double least_time, double most_time, int64_t num_groups, const Tensor& states,
                   const Tensor& slots, const Tensor& starts);

// What a layer of Mamba-2 does between its projections: rows [T, N] are gates, inputs of a convolution of these taps,
// and time steps; what the scan of its results reads is gated, and normed in groups if there is a weight.
Tensor mamba2_layer(const Tensor& rows, const Tensor& taps, const std::optional<Tensor>& bias,
                    const Tensor& decay_rates, const Tensor& time_bias, const Tensor& skip, double least_time,
                    double most_time, int64_t num_groups, const std::optional<Tensor>& norm_weight, double eps,
                    const Tensor& window, const Tensor& states, const Tensor& slots, const Tensor& starts);

// What that scan makes of its time steps: the decay of each head, and its time.
std::tuple<Tensor, Tensor> mamba2_gates(const Tensor& time_step, const Tensor& decay_rates, const Tensor& time_bias,
                                        double least_time, double most_time);

// A selective scan: x and time_step [T, channels], rates [channels, state size], write and read [T, state size], all in
// float32 -> [T, channels].
Tensor selective_scan(const Tensor& x, const Tensor& time_step, const Tensor& rates, const Tensor& write,
                      const Tensor& read, const Tensor& states, const Tensor& slots, const Tensor& starts);

// A real-gated linear recurrence: x [T, channels] and gates [T, heads, 2, channels / heads] of the input and of the
// decay, rates [channels] in float32 and is_first [T] of bools -> as x.
Tensor real_gated_recurrence(const Tensor& x, const Tensor& gates, const Tensor& rates, const Tensor& is_first,
                             const Tensor& states, const Tensor& slots, const Tensor& starts);

// What a gated delta net makes of its projections: the decay of each head, and how much of a value's error is written.
std::tuple<Tensor, Tensor> delta_gates(const Tensor& write, const Tensor& time_step, const Tensor& decay_rates,
                                       const Tensor& time_bias);

// x and gates [T, N] -> x * activation(gates), in x's place; sigmoid, silu or none.
void multiply_by_gates(const Tensor& x, const Tensor& gates, std::string_view activation);

// x [T, N] in float32, of which it makes x * silu(gates), and weight [N] -> an RMSNorm of each group, as gates [T, N].
Tensor gated_group_norm(const Tensor& x, const Tensor& gates, const Tensor& weight, double eps, int64_t num_groups);

// x [T, N] in float32, gates [T, N] -> x * silu(gates), as gates.
Tensor gated_reads(const Tensor& x, const Tensor& gates);

}  // namespace twostep::recurrent
