// Linear attention (engine/mixers/linear_attention.py): a matrix of state per head, which decays at each token, gets
// the outer product of its key and value, and is read by its query. Prompts and single tokens go through the same
// steps.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <optional>
#include <tuple>
#include <utility>

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
namespace {

void check(const Tensor& query, const Tensor& key, const Tensor& value, const Tensor& decay,
           const std::optional<Tensor>& rate) {
  TWOSTEP_CHECK(query.dim() == 3 && query.sizes() == key.sizes() && value.dim() == 3 && decay.dim() == 3,
                "queries, keys, values and decays are [tokens, heads, size]");
  const int64_t num_tokens = value.size(0), num_heads = value.size(1);
  TWOSTEP_CHECK(key.size(0) == num_tokens && key.size(1) > 0 && num_heads % key.size(1) == 0, "heads are in groups");
  TWOSTEP_CHECK(
      decay.size(0) == num_tokens && decay.size(1) == num_heads && (decay.size(2) == 1 || decay.size(2) == key.size(2)),
      "a decay is one number, or one for each of a key");
  TWOSTEP_CHECK(!rate || (rate->dim() == 2 && rate->size(0) == num_tokens && rate->size(1) == num_heads),
                "rates are [tokens, heads]");
  for (const Tensor& each : {query, key, value, decay, rate.value_or(value)})
    TWOSTEP_CHECK(each.scalar_type() == kFloat, "linear attention is computed in float32");
}

// x / |x| * factor, but for an epsilon in the length: what an RMSNorm of weights 1 / sqrt(size) makes of it.
template <class Element>
void to_unit_length(const Element* x, int64_t size, float factor, float* to) {
  constexpr double kEps = 1e-6;
  Vec squares{};
  for_each_vector(size, [&](int64_t i, int64_t count) TWOSTEP_INLINE {
    const Vec v = load_upto(x + i, count);
    squares = squares + v * v;
  });
  const Vec length = broadcast(1.0f / std::sqrt(fold_add(squares) / float(size) + float(kEps / double(size))));
  const Vec weight = broadcast(float(1.0 / std::sqrt(double(size)))), factors = broadcast(factor);
  for_each_vector(size, [&](int64_t i, int64_t count) TWOSTEP_INLINE {
    store_upto(to + i, count, load_upto(x + i, count) * length * weight * factors);
  });
}

void check_gates(const Tensor& write, const Tensor& time_step, const Tensor& decay_rates, const Tensor& time_bias) {
  TWOSTEP_CHECK(write.dim() == 2 && write.sizes() == time_step.sizes() && write.stride(1) == 1 &&
                    time_step.stride(1) == 1 && write.scalar_type() == time_step.scalar_type(),
                "every token has two numbers for each head");
  for (const Tensor& each : {decay_rates, time_bias}) {
    TWOSTEP_CHECK(each.scalar_type() == kFloat && each.is_contiguous() && each.numel() == write.size(1),
                  "each head has a rate and a bias in float32");
  }
}

// Queries and keys of rows [T, groups of queries, then of keys, ...], of length 1, and queries scaled.
template <class Element>
std::pair<Tensor, Tensor> unit_heads(const Tensor& rows, int64_t num_groups, int64_t key_size) {
  const int64_t num_tokens = rows.size(0), width = num_groups * key_size;
  const Tensor queries = new_empty({num_tokens, width}, kFloat), keys = new_empty({num_tokens, width}, kFloat);
  auto *query = queries.mutable_data_ptr<float>(), *key = keys.mutable_data_ptr<float>();
  const auto* from = rows.const_data_ptr<Element>();
  const float scale = float(1.0 / std::sqrt(double(key_size)));
  run_ranges(num_tokens, divide_up(1 << 13, width), [&](int64_t begin, int64_t end) {
    for (int64_t token = begin; token < end; ++token) {
      const Element* row = from + token * rows.stride(0);
      for (int64_t at = 0; at < width; at += key_size) {
        to_unit_length(row + at, key_size, scale, query + token * width + at);
        to_unit_length(row + width + at, key_size, 1.0f, key + token * width + at);
      }
    }
  });
  return {queries, keys};
}

}  // namespace

Tensor linear_attention(const Tensor& query, const Tensor& key, const Tensor& value, const Tensor& decay,
                        const std::optional<Tensor>& rate, const Tensor& states, const Tensor& slots,
                        const Tensor& starts) {
  check(query, key, value, decay, rate);
  check_states(states, value.size(1), key.size(2), value.size(2));
  const Tensor queries = query.contiguous(), keys = key.contiguous(), values = value.contiguous();
  const Tensor decays = decay.contiguous(), rates = rate ? rate->contiguous() : Tensor();
  const Tensor output = new_empty_like(values);
  const MatrixStates<float> problem{queries.const_data_ptr<float>(), keys.const_data_ptr<float>(),
                                    decays.const_data_ptr<float>(), rate ? rates.const_data_ptr<float>() : nullptr,
                                    values.const_data_ptr<float>(), values.stride(0), states.mutable_data_ptr<float>(),
                                    output.mutable_data_ptr<float>(), keys.size(1), values.size(1), keys.size(2),
                                    values.size(2), decays.size(2)};
  problem.run_all(Sequences(slots, starts, states.size(0), value.size(0)));
  return output;
}

std::tuple<Tensor, Tensor> delta_gates(const Tensor& write, const Tensor& time_step, const Tensor& decay_rates,
                                       const Tensor& time_bias) {
  check_gates(write, time_step, decay_rates, time_bias);
  const int64_t num_tokens = write.size(0), num_heads = write.size(1);
  const Tensor decays = new_empty({num_tokens, num_heads}, kFloat), rates = new_empty_like(decays);
  auto *decay = decays.mutable_data_ptr<float>(), *rate = rates.mutable_data_ptr<float>();
  const auto *own_rates = decay_rates.const_data_ptr<float>(), *bias = time_bias.const_data_ptr<float>();
  with_element_of(write, "delta rules", [&]<class Element>(Element* element) {
    const auto *writes = write.const_data_ptr<Element>(), *steps = time_step.const_data_ptr<Element>();
    run_ranges(num_tokens, divide_up(1 << 10, num_heads), [&](int64_t begin, int64_t end) {
      for (int64_t token = begin; token < end; ++token) {
        const Element *own_writes = writes + token * write.stride(0), *own_steps = steps + token * time_step.stride(0);
        for_each_vector(num_heads, [&](int64_t i, int64_t count) TWOSTEP_INLINE {
          const Vec written = Sigmoid::apply(load_upto(own_writes + i, count));
          const Vec step = Softplus::apply(load_upto(own_steps + i, count) + load_upto(bias + i, count));
          store_upto(rate + token * num_heads + i, count, rounded_to(written, element));
          store_upto(decay + token * num_heads + i, count, exp_nonpositive(load_upto(own_rates + i, count) * step));
        });
      }
    });
  });
  return {decays, rates};
}

Tensor gated_delta_rule(const Tensor& qkv, const Tensor& write, const Tensor& time_step, const Tensor& decay_rates,
                        const Tensor& time_bias, int64_t num_groups, const Tensor& states, const Tensor& slots,
                        const Tensor& starts) {
  TWOSTEP_CHECK(states.dim() == 5 && qkv.dim() == 2, "a row of queries, keys and values for each token");
  const int64_t num_tokens = qkv.size(0), num_heads = states.size(1), key_size = states.size(3);
  const int64_t before_values = 2 * num_groups * key_size, value_size = (qkv.size(1) - before_values) / num_heads;
  TWOSTEP_CHECK(before_values + num_heads * value_size == qkv.size(1) && num_groups > 0 && num_heads % num_groups == 0,
                "rows have the heads of queries, keys and values side by side");
  TWOSTEP_CHECK(write.size(0) == num_tokens && write.size(1) == num_heads && write.scalar_type() == qkv.scalar_type(),
                "every token has two numbers for each head, of the rows' dtype");
  check_states(states, num_heads, key_size, value_size);
  const Sequences sequences(slots, starts, states.size(0), num_tokens);
  const Tensor rows = qkv.stride(1) == 1 ? qkv : qkv.contiguous();
  const Tensor output = new_empty({num_tokens, num_heads * value_size}, qkv.scalar_type());
  Tensor decays, rates;
  std::tie(decays, rates) = delta_gates(write, time_step, decay_rates, time_bias);
  with_element_of(rows, "delta rules", [&]<class Element>(Element*) {
    const auto [queries, keys] = unit_heads<Element>(rows, num_groups, key_size);
    const MatrixStates<Element> problem{queries.template const_data_ptr<float>(),
                                        keys.template const_data_ptr<float>(),
                                        decays.template const_data_ptr<float>(),
                                        rates.template const_data_ptr<float>(),
                                        rows.const_data_ptr<Element>() + before_values,
                                        rows.stride(0),
                                        states.mutable_data_ptr<float>(),
                                        output.mutable_data_ptr<Element>(),
                                        num_groups,
                                        num_heads,
                                        key_size,
                                        value_size,
                                        1};
    problem.run_all(sequences);
  });
  return output;
}

}  // namespace twostep::recurrent
