// A causal convolution of each channel by itself over a few tokens (engine/mixers/convolution.py).

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <optional>

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

constexpr int64_t kMaxTaps = 16;

template <class Element>
struct Convolution {
  static constexpr int64_t kChannels = 256;        // of a task: its rows, weights and states stay in the first cache
  static constexpr int64_t kSerialWork = 1 << 16;  // products below which a second thread does not pay

  const Element* x;  // rows of channels, `row_stride` apart
  int64_t row_stride;
  const float* weight;  // [taps, channels], the oldest token's first
  const float* bias;    // [channels] or null
  Element *states, *output;  // [slots, taps - 1, channels], [tokens, channels]
  int64_t num_channels, num_taps;
  bool is_gated;  // whether a result r becomes silu(r)

  void run_all(const Sequences& sequences) const {
    const int64_t parts = divide_up(num_channels, kChannels), slot_size = (num_taps - 1) * num_channels;
    const bool is_serial = sequences.starts[sequences.count] * num_channels * num_taps < kSerialWork;
    run_tasks(sequences.count * parts, is_serial, [&](int64_t task) {
      const int64_t sequence = task / parts, first = task % parts * kChannels;
      run(states + sequences.slots[sequence] * slot_size, sequences.starts[sequence], sequences.starts[sequence + 1],
          first, std::min(kChannels, num_channels - first));
    });
  }

  // Computes channels [first, first + count) of a sequence's tokens [begin, end).
  void run(Element* state, int64_t begin, int64_t end, int64_t first, int64_t count) const {
    for (int64_t token = begin; token < end; ++token) {
      const Element* rows[kMaxTaps];
      for (int64_t tap = 0; tap < num_taps; ++tap) {
        rows[tap] = row_at(state, begin, token + tap - num_taps + 1) + first;
      }
      for_each_vector(count, [&](int64_t i, int64_t width) TWOSTEP_INLINE {
        const float* factor = weight + first + i;
        Vec total = load_upto(rows[0] + i, width) * load_upto(factor, width);
        for (int64_t tap = 1; tap < num_taps; ++tap) {
          total = total + load_upto(rows[tap] + i, width) * load_upto(factor + tap * num_channels, width);
        }
        if (bias) total = total + load_upto(bias + first + i, width);
        Element* to = output + token * num_channels + first + i;
        store_upto(to, width, is_gated ? Silu::apply(rounded_to(total, to)) : total);
      });
    }
    Element newest[kMaxTaps * kChannels];
    for (int64_t tap = 0; tap < num_taps - 1; ++tap) {
      const Element* row = row_at(state, begin, end + tap - num_taps + 1);
      std::memcpy(newest + tap * count, row + first, count * sizeof(Element));
    }
    for (int64_t tap = 0; tap < num_taps - 1; ++tap) {
      std::memcpy(state + tap * num_channels + first, newest + tap * count, count * sizeof(Element));
    }
  }

  // Returns a token's row; those before the sequence's first of the step are in its state.
  const Element* row_at(const Element* state, int64_t begin, int64_t token) const {
    return token >= begin ? x + token * row_stride : state + (token - begin + num_taps - 1) * num_channels;
  }
};

}  // namespace

Tensor convolution(const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias, bool is_gated,
                   const Tensor& states, const Tensor& slots, const Tensor& starts) {
  const int64_t num_tokens = x.size(0), num_channels = x.size(1), num_taps = weight.size(0);
  TWOSTEP_CHECK(x.dim() == 2 && weight.dim() == 2 && weight.size(1) == num_channels && weight.is_contiguous() &&
                    weight.scalar_type() == kFloat && 0 < num_taps && num_taps <= kMaxTaps,
                "weights are float32 [up to ", kMaxTaps, " taps, channels]");
  TWOSTEP_CHECK(!bias || (bias->scalar_type() == kFloat && bias->is_contiguous() && bias->numel() == num_channels),
                "biases are float32 [channels]");
  TWOSTEP_CHECK(states.dim() == 3 && states.size(1) == num_taps - 1 && states.size(2) == num_channels &&
                    states.is_contiguous() && states.scalar_type() == x.scalar_type(),
                "states are [slots, taps - 1, channels], of the rows' dtype");
  const Sequences sequences(slots, starts, states.size(0), num_tokens);
  const Tensor rows = x.stride(1) == 1 ? x : x.contiguous();
  const Tensor output = new_empty({num_tokens, num_channels}, x.scalar_type());
  with_element_of(x, "convolutions", [&]<class Element>(Element*) {
    const Convolution<Element> convolution{rows.const_data_ptr<Element>(),
                                           rows.stride(0),
                                           weight.const_data_ptr<float>(),
                                           bias ? bias->const_data_ptr<float>() : nullptr,
                                           states.mutable_data_ptr<Element>(),
                                           output.mutable_data_ptr<Element>(),
                                           num_channels,
                                           num_taps,
                                           is_gated};
    convolution.run_all(sequences);
  });
  return output;
}

Tensor short_convolution(const Tensor& rows, const Tensor& weight, const std::optional<Tensor>& bias,
                         const Tensor& states, const Tensor& slots, const Tensor& starts) {
  const int64_t num_channels = weight.size(-1);
  TWOSTEP_CHECK(rows.dim() == 2 && rows.size(1) == 3 * num_channels, "rows are gates, gates and inputs side by side");
  const auto part = [&](int64_t index) { return rows.narrow(1, index * num_channels, num_channels); };
  const Tensor x = part(2).contiguous_clone();
  multiply_by_gates(x, part(0), "none");
  const Tensor output = convolution(x, weight, bias, false, states, slots, starts);
  multiply_by_gates(output, part(1), "none");
  return output;
}

}  // namespace twostep::recurrent
