// The real-gated linear recurrence of RecurrentGemma (engine/mixers/real_gated_recurrence.py): each channel has one
// number of state, which decays at each token and gets its input.

#include <cmath>
#include <cstdint>

#include "base/activations.h"
#include "base/check.h"
#include "base/rows.h"
#include "base/sizes.h"
#include "base/tensor.h"
#include "base/thread_pool.h"
#include "base/vec.h"
#include "recurrent/operators.h"
#include "recurrent/sequences.h"

namespace twostep::recurrent {
namespace {

inline Vec root(Vec v) {
  alignas(64) float x[kLanes];
  store(x, v);
  for (float& each : x) each = std::sqrt(each);
  return load(x);
}

template <class Element>
struct RealGatedRecurrence {
  static constexpr int64_t kSerialWork = 1 << 12;  // channels of all tokens below which a second thread does not pay

  const Element *x, *gates;  // [tokens, channels], [tokens, heads, 2, size]
  const float* rates;        // [channels]
  const bool* is_first;      // [tokens]
  float* states;             // [slots, channels]
  Element* output;           // [tokens, channels]
  int64_t num_heads, size;   // channels of a head

  void run_all(const Sequences& sequences) const {
    const bool is_serial = sequences.starts[sequences.count] * num_heads * size < kSerialWork;
    run_tasks(sequences.count * num_heads, is_serial, [&](int64_t task) {
      const int64_t sequence = task / num_heads;
      run(sequences.slots[sequence], sequences.starts[sequence], sequences.starts[sequence + 1], task % num_heads);
    });
  }

  // Computes a head's channels of a sequence's tokens [begin, end).
  void run(int64_t slot, int64_t begin, int64_t end, int64_t head) const {
    const int64_t num_channels = num_heads * size, first = head * size;
    float* state = states + slot * num_channels + first;
    for (int64_t token = begin; token < end; ++token) {
      const Element* row = x + token * num_channels + first;
      const Element* own = gates + (token * num_heads + head) * 2 * size;
      Element* to = output + token * num_channels + first;
      for_each_vector(size, [&](int64_t i, int64_t count) TWOSTEP_INLINE {
        const Vec opened = Sigmoid::apply(load_upto(own + i, count));
        const Vec exponent = load_upto(rates + first + i, count) * Sigmoid::apply(load_upto(own + size + i, count));
        Vec written = load_upto(row + i, count) * opened;
        if (!is_first[token]) {
          written = written * root(max(broadcast(1.0f) - exp_nonpositive(exponent + exponent), Vec{}));
        }
        const Vec after = load_upto(state + i, count) * exp_nonpositive(exponent) + written;
        store_upto(state + i, count, after);
        store_upto(to + i, count, after);
      });
    }
  }
};

void check(const Tensor& x, const Tensor& gates, const Tensor& rates, const Tensor& is_first, const Tensor& states) {
  TWOSTEP_CHECK(x.dim() == 2 && gates.dim() == 4 && gates.size(0) == x.size(0) && gates.size(2) == 2 &&
                    gates.size(1) * gates.size(3) == x.size(1) && gates.scalar_type() == x.scalar_type(),
                "inputs are [tokens, channels], gates [tokens, heads, 2, channels of a head], of one dtype");
  TWOSTEP_CHECK(rates.numel() == x.size(1) && rates.is_contiguous() && rates.scalar_type() == kFloat,
                "each channel has a rate in float32");
  TWOSTEP_CHECK(is_first.numel() == x.size(0) && is_first.scalar_type() == kBool,
                "each token is its sequence's first or not");
  TWOSTEP_CHECK(
      states.dim() == 2 && states.size(1) == x.size(1) && states.is_contiguous() && states.scalar_type() == kFloat,
      "states are [slots, channels], in float32");
}

}  // namespace

Tensor real_gated_recurrence(const Tensor& x, const Tensor& gates, const Tensor& rates, const Tensor& is_first,
                             const Tensor& states, const Tensor& slots, const Tensor& starts) {
  check(x, gates, rates, is_first, states);
  const Sequences sequences(slots, starts, states.size(0), x.size(0));
  const Tensor inputs = x.contiguous(), own_gates = gates.contiguous(), firsts = is_first.contiguous();
  const Tensor output = new_empty_like(inputs);
  with_element_of(inputs, "real-gated recurrences", [&]<class Element>(Element*) {
    const RealGatedRecurrence<Element> recurrence{
        inputs.const_data_ptr<Element>(),  own_gates.const_data_ptr<Element>(), rates.const_data_ptr<float>(),
        firsts.const_data_ptr<bool>(),     states.mutable_data_ptr<float>(),    output.mutable_data_ptr<Element>(),
        gates.size(1),                     gates.size(3)};
    recurrence.run_all(sequences);
  });
  return output;
}

}  // namespace twostep::recurrent
