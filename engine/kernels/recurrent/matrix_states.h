// The steps of linear attention over states of one matrix per head, as several operators take them.
//
// The columns of a state do not depend on one another. They lie in panels of sixteen, [key size, 16] each, and a panel
// of one head and sequence is a task: it stays in the first cache for all tokens of the step.

#pragma once

#include <cstdint>

#include "base/check.h"
#include "base/rows.h"
#include "base/sizes.h"
#include "base/tensor.h"
#include "base/thread_pool.h"
#include "base/vec.h"
#include "recurrent/sequences.h"

namespace twostep::recurrent {

constexpr int kSums = 4;  // partial sums, as in engine/mixers/sums.py

// Terms are added in turn to four sums, whose tree is the total.
struct Sum {
  Vec parts[kSums] = {};
  TWOSTEP_INLINE Vec total() const { return (parts[0] + parts[2]) + (parts[1] + parts[3]); }
};

// Calls f(k, sum) for k = 0 ... size - 1 with the partial sum that gets term k.
template <class F>
TWOSTEP_INLINE inline Vec sum_of(int64_t size, F f) {
  Sum sum;
  int64_t k = 0;
  for (; k + kSums <= size; k += kSums) {
    unroll<kSums>([&](auto i) TWOSTEP_INLINE { sum.parts[i] = sum.parts[i] + f(k + i); });
  }
  unroll<kSums>([&](auto i) TWOSTEP_INLINE {
    if (k + i < size) sum.parts[i] = sum.parts[i] + f(k + i);
  });
  return sum.total();
}

// Values are in rows of Element, and what is read of the state in rows of Output.
template <class Element, class Output = Element>
struct MatrixStates {
  static constexpr int64_t kSerialWork = 1 << 15;  // numbers of state below which a second thread does not pay

  const float *query, *key, *decay, *rate;  // rate may be null
  const Element* value;
  int64_t value_stride;  // of tokens
  float* states;         // [slots, heads, panels, key size, 16]
  Output* output;        // [tokens, heads, value size]
  int64_t num_groups, num_heads, key_size, value_size;
  int64_t num_decays;            // of a head: one, or key_size
  const float* time = nullptr;  // [tokens, heads]: what values are multiplied by before they are written, if not null
  const float* skip = nullptr;  // [heads]: how much of a value is added to what is read

  int64_t num_panels() const { return divide_up(value_size, kLanes); }

  void run_all(const Sequences& sequences) const {
    const int64_t panels = num_panels() * num_heads, num_tokens = sequences.starts[sequences.count];
    const bool is_serial = num_tokens * num_heads * value_size * key_size < kSerialWork;
    run_tasks(sequences.count * panels, is_serial, [&](int64_t task) {
      const int64_t sequence = task / panels, head = task % panels / num_panels(), panel = task % num_panels();
      run(sequences.slots[sequence], sequences.starts[sequence], sequences.starts[sequence + 1], head, panel);
    });
  }

  // Computes a panel of a head for the tokens [begin, end) of a sequence.
  void run(int64_t slot, int64_t begin, int64_t end, int64_t head, int64_t panel) const {
    float* state = states + ((slot * num_heads + head) * num_panels() + panel) * key_size * kLanes;
    const int64_t column = panel * kLanes, count = value_size - column;
    for (int64_t token = begin; token < end; ++token) {
      const Vec own = load_upto(value + token * value_stride + head * value_size + column, count);
      const Vec written = time == nullptr ? own : own * broadcast(time[token * num_heads + head]);
      const Vec read = step(state, token, head, written);
      Output* to = output + (token * num_heads + head) * value_size + column;
      store_upto(to, count, skip == nullptr ? read : read + broadcast(skip[head]) * own);
    }
  }

  // Advances a panel by a token with this value; returns what its query reads.
  TWOSTEP_INLINE Vec step(float* state, int64_t token, int64_t head, Vec written) const {
    const int64_t group = token * num_groups + head / (num_heads / num_groups);
    const float *keys = key + group * key_size, *queries = query + group * key_size;
    const float* decays = decay + (token * num_heads + head) * num_decays;
    const int64_t stride = num_decays == 1 ? 0 : 1;
    const auto decayed = [&](int64_t k) TWOSTEP_INLINE {
      return load(state + k * kLanes) * broadcast(decays[k * stride]);
    };
    if (rate != nullptr) {
      const Vec read =
          sum_of(key_size, [&](int64_t k) TWOSTEP_INLINE { return decayed(k) * broadcast(keys[k]); });
      written = (written - read) * broadcast(rate[token * num_heads + head]);
    }
    return sum_of(key_size, [&](int64_t k) TWOSTEP_INLINE {
      const Vec after = decayed(k) + broadcast(keys[k]) * written;
      store(state + k * kLanes, after);
      return after * broadcast(queries[k]);
    });
  }
};

inline void check_states(const Tensor& states, int64_t num_heads, int64_t key_size, int64_t value_size) {
  TWOSTEP_CHECK(states.dim() == 5 && states.size(1) == num_heads && states.size(2) == divide_up(value_size, kLanes) &&
                    states.size(3) == key_size && states.size(4) == kLanes && states.is_contiguous() &&
                    states.scalar_type() == kFloat,
                "states are float32 [slots, heads, panels, key size, ", kLanes, "]");
}

}  // namespace twostep::recurrent
