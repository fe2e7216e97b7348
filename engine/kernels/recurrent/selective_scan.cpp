// The selective scan of Mamba (engine/mixers/selective_scan.py): each channel has a few numbers of state, which decay
// at each token, get its input and are read.

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "base/check.h"
#include "base/sizes.h"
#include "base/tensor.h"
#include "base/thread_pool.h"
#include "base/vec.h"
#include "recurrent/operators.h"
#include "recurrent/sequences.h"

namespace twostep::recurrent {
namespace {

// Adds the quads of v, one after the other.
TWOSTEP_INLINE inline Quad plus_quads(Quad sum, Vec v) {
  alignas(64) float x[kLanes];
  store(x, v);
  unroll<kLanes / 4>([&](auto i) TWOSTEP_INLINE {
    Quad quad;
    std::memcpy(&quad, x + 4 * i, sizeof(quad));
    sum = sum + quad;
  });
  return sum;
}

struct SelectiveScan {
  static constexpr int64_t kChannels = 64;         // of a task: their states stay in the first cache
  static constexpr int64_t kSerialWork = 1 << 13;  // numbers of state below which a second thread does not pay

  const float *x, *time_step, *rates, *write, *read;
  float *states, *output;
  int64_t num_channels, state_size;

  void run_all(const Sequences& sequences) const {
    const int64_t parts = divide_up(num_channels, kChannels);
    const bool is_serial = sequences.starts[sequences.count] * num_channels * state_size < kSerialWork;
    run_tasks(sequences.count * parts, is_serial, [&](int64_t task) {
      const int64_t sequence = task / parts, first = task % parts * kChannels;
      run(sequences.slots[sequence], sequences.starts[sequence], sequences.starts[sequence + 1], first,
          std::min(first + kChannels, num_channels));
    });
  }

  // Computes channels [first, last) of a sequence's tokens [begin, end).
  void run(int64_t slot, int64_t begin, int64_t end, int64_t first, int64_t last) const {
    for (int64_t token = begin; token < end; ++token) {
      for (int64_t channel = first; channel < last; ++channel) {
        const int64_t at = token * num_channels + channel;
        float* state = states + (slot * num_channels + channel) * state_size;
        output[at] = step(state, rates + channel * state_size, time_step[at], x[at], token * state_size);
      }
    }
  }

  // Advances a channel by a token; returns what is read. The sum has the order of engine/mixers/sums.py.
  TWOSTEP_INLINE float step(float* state, const float* own_rates, float time, float input, int64_t row) const {
    const Vec times = broadcast(time), inputs = broadcast(input);
    Quad sum{};
    for_each_vector(state_size, [&](int64_t i, int64_t count) TWOSTEP_INLINE {
      const Vec decay = exp_nonpositive(times * load_upto(own_rates + i, count));
      const Vec written = times * load_upto(write + row + i, count) * inputs;
      const Vec after = load_upto(state + i, count) * decay + written;
      store_upto(state + i, count, after);
      sum = plus_quads(sum, after * load_upto(read + row + i, count));
    });
    return (sum[0] + sum[2]) + (sum[1] + sum[3]);
  }
};

}  // namespace

Tensor selective_scan(const Tensor& x, const Tensor& time_step, const Tensor& rates, const Tensor& write,
                      const Tensor& read, const Tensor& states, const Tensor& slots, const Tensor& starts) {
  TWOSTEP_CHECK(x.dim() == 2 && x.sizes() == time_step.sizes() && rates.dim() == 2 && rates.size(0) == x.size(1),
                "inputs and times are [tokens, channels], rates [channels, state size]");
  const int64_t num_tokens = x.size(0), num_channels = x.size(1), state_size = rates.size(1);
  for (const Tensor& each : {write, read}) {
    TWOSTEP_CHECK(each.dim() == 2 && each.size(0) == num_tokens && each.size(1) == state_size,
                  "what is written and what reads are [tokens, state size]");
  }
  TWOSTEP_CHECK(
      states.dim() == 3 && states.size(1) == num_channels && states.size(2) == state_size && states.is_contiguous(),
      "states are [slots, channels, state size]");
  for (const Tensor& each : {x, time_step, rates, write, read, states})
    TWOSTEP_CHECK(each.scalar_type() == kFloat, "a selective scan is computed in float32");
  const Sequences sequences(slots, starts, states.size(0), num_tokens);
  const Tensor inputs = x.contiguous(), times = time_step.contiguous(), own_rates = rates.contiguous();
  const Tensor writes = write.contiguous(), reads = read.contiguous(), output = new_empty_like(inputs);
  const SelectiveScan scan{inputs.const_data_ptr<float>(), times.const_data_ptr<float>(),
                           own_rates.const_data_ptr<float>(), writes.const_data_ptr<float>(),
                           reads.const_data_ptr<float>(), states.mutable_data_ptr<float>(),
                           output.mutable_data_ptr<float>(), num_channels, state_size};
  scan.run_all(sequences);
  return output;
}

}  // namespace twostep::recurrent
