// The scan of Mamba-2 (engine/mixers/mamba2_scan.py): linear attention whose decays and factors of values come from one
// time per head and token; and with it all that is between a layer's projections (engine/mixers/mamba2_layer.py).

#include <cstdint>
#include <optional>
#include <tuple>

#include "base/activations.h"
#include "base/check.h"
#include "base/rows.h"
#include "base/sizes.h"
#include "base/tensor.h"
#include "base/thread_pool.h"
#include "base/vec.h"
#include "recurrent/matrix_states.h"
#include "recurrent/operators.h"
#include "recurrent/sequences.h"

namespace twostep::recurrent {

std::tuple<Tensor, Tensor> mamba2_gates(const Tensor& time_step, const Tensor& decay_rates, const Tensor& time_bias,
                                        double least_time, double most_time) {
  TWOSTEP_CHECK(time_step.dim() == 2 && time_step.stride(1) == 1, "every token has a time step for each head");
  const int64_t num_tokens = time_step.size(0), num_heads = time_step.size(1);
  for (const Tensor& each : {decay_rates, time_bias}) {
    TWOSTEP_CHECK(each.scalar_type() == kFloat && each.is_contiguous() && each.numel() == num_heads,
                  "each head has a rate and a bias in float32");
  }
  const Tensor decays = new_empty({num_tokens, num_heads}, kFloat);
  const Tensor times = new_empty_like(decays);
  auto *decay = decays.mutable_data_ptr<float>(), *time = times.mutable_data_ptr<float>();
  const auto *rates = decay_rates.const_data_ptr<float>(), *bias = time_bias.const_data_ptr<float>();
  with_element_of(time_step, "scans of Mamba-2", [&]<class Element>(Element* element) {
    const auto* steps = time_step.const_data_ptr<Element>();
    const Vec least = rounded_to(broadcast(float(least_time)), element);
    const Vec most = rounded_to(broadcast(float(most_time)), element);
    run_ranges(num_tokens, divide_up(1 << 10, num_heads), [&](int64_t begin, int64_t end) {
      for (int64_t token = begin; token < end; ++token) {
        const Element* own = steps + token * time_step.stride(0);
        for_each_vector(num_heads, [&](int64_t i, int64_t count) TWOSTEP_INLINE {
          const Vec biased = rounded_to(load_upto(own + i, count) + load_upto(bias + i, count), element);
          const Vec positive = rounded_to(Softplus::apply(biased), element);
          const Vec longer = where_less(positive, least, least, positive);
          const Vec limited = where_less(most, longer, most, longer);
          store_upto(time + token * num_heads + i, count, limited);
          store_upto(decay + token * num_heads + i, count, exp_nonpositive(load_upto(rates + i, count) * limited));
        });
      }
    });
  });
  return {decays, times};
}

Tensor mamba2_scan(const Tensor& rows, const Tensor& time_step, const Tensor& decay_rates, const Tensor& time_bias,
                   const Tensor& skip, double least_time, double most_time, int64_t num_groups, const Tensor& states,
                   const Tensor& slots, const Tensor& starts) {
  TWOSTEP_CHECK(states.dim() == 5 && rows.dim() == 2 && num_groups > 0,
                "a row of inputs, writes and reads for each token");
  const int64_t num_tokens = rows.size(0), num_heads = states.size(1), state_size = states.size(3);
  const int64_t width = num_groups * state_size, inner = rows.size(1) - 2 * width, head_size = inner / num_heads;
  TWOSTEP_CHECK(inner > 0 && head_size * num_heads == inner && num_heads % num_groups == 0,
                "rows have heads of inputs, and groups of writes and reads, side by side");
  TWOSTEP_CHECK(time_step.size(0) == num_tokens && time_step.size(1) == num_heads &&
                    time_step.scalar_type() == rows.scalar_type(),
                "every token has a time step for each head, of the rows' dtype");
  TWOSTEP_CHECK(skip.scalar_type() == kFloat && skip.is_contiguous() && skip.numel() == num_heads,
                "each head has a factor in float32");
  check_states(states, num_heads, state_size, head_size);
  const Sequences sequences(slots, starts, states.size(0), num_tokens);
  const Tensor own = rows.stride(1) == 1 ? rows : rows.contiguous();
  const Tensor writes = widened(own.narrow(1, inner, width)), reads = widened(own.narrow(1, inner + width, width));
  const Tensor keys = writes.contiguous(), queries = reads.contiguous();
  const auto [decays, times] = mamba2_gates(time_step, decay_rates, time_bias, least_time, most_time);
  const Tensor output = new_empty({num_tokens, inner}, kFloat);
  const auto *decay = decays.const_data_ptr<float>(), *time = times.const_data_ptr<float>();
  with_element_of(own, "scans of Mamba-2", [&]<class Element>(Element*) {
    const MatrixStates<Element, float> problem{queries.const_data_ptr<float>(),
                                               keys.const_data_ptr<float>(),
                                               decay,
                                               nullptr,
                                               own.const_data_ptr<Element>(),
                                               own.stride(0),
                                               states.mutable_data_ptr<float>(),
                                               output.mutable_data_ptr<float>(),
                                               num_groups,
                                               num_heads,
                                               state_size,
                                               head_size,
                                               1,
                                               time,
                                               skip.const_data_ptr<float>()};
    problem.run_all(sequences);
  });
  return output;
}

Tensor mamba2_layer(const Tensor& rows, const Tensor& taps, const std::optional<Tensor>& bias,
                    const Tensor& decay_rates, const Tensor& time_bias, const Tensor& skip, double least_time,
                    double most_time, int64_t num_groups, const std::optional<Tensor>& norm_weight, double eps,
                    const Tensor& window, const Tensor& states, const Tensor& slots, const Tensor& starts) {
  TWOSTEP_CHECK(rows.dim() == 2 && taps.dim() == 2 && states.dim() == 5, "a row and states for each token");
  const int64_t num_channels = taps.size(1), inner = num_channels - 2 * num_groups * states.size(3);
  TWOSTEP_CHECK(inner > 0 && rows.size(1) == inner + num_channels + states.size(1),
                "rows have gates, inputs and time steps side by side");
  const Tensor gates = rows.narrow(1, 0, inner), time_step = rows.narrow(1, inner + num_channels, states.size(1));
  const Tensor mixed = convolution(rows.narrow(1, inner, num_channels), taps, bias, true, window, slots, starts);
  const Tensor read = mamba2_scan(mixed, time_step, decay_rates, time_bias, skip, least_time, most_time, num_groups,
                                  states, slots, starts);
  return norm_weight ? gated_group_norm(read, gates, *norm_weight, eps, num_groups) : gated_reads(read, gates);
}

}  // namespace twostep::recurrent
