// Linear attention (engine/mixers/linear_attention.py): a matrix of state per head, which decays at each token, gets
// the outer product of its key and value, and is read by its query. Prompts and single tokens go through the same
// steps.
//
// The columns of a state do not depend on one another. A task is sixteen of them, of one head and sequence: they are
// copied into one piece of memory, which stays in the first cache for all tokens of the step.

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty_like.h>
#include <c10/util/Exception.h>
#include <torch/library.h>

#include <algorithm>
#include <optional>

#include "base/sizes.h"
#include "base/thread_pool.h"
#include "base/vec.h"

namespace {

using namespace twostep;

constexpr int64_t kMaxKeySize = 1024;  // of the copied columns, 64 KB on the stack
constexpr int kSums = 4;               // partial sums, as in engine/mixers/sums.py
constexpr int64_t kSerialWork = 1 << 15;  // numbers of state below which a second thread does not pay

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

struct Problem {
  const float *query, *key, *value, *decay, *rate;  // rate may be null
  float *states, *output;
  const int64_t *slots, *starts;
  int64_t num_groups, num_heads, key_size, value_size;
  int64_t num_decays;  // of a head: one, or key_size

  // Computes columns [column, column + count) of a head, for all tokens of a sequence.
  void run(int64_t sequence, int64_t head, int64_t column, int64_t count) const {
    alignas(64) float state[kMaxKeySize * kLanes];
    float* own = states + (slots[sequence] * num_heads + head) * key_size * value_size + column;
    for (int64_t k = 0; k < key_size; ++k) store(state + k * kLanes, load_upto(own + k * value_size, count));
    for (int64_t token = starts[sequence]; token < starts[sequence + 1]; ++token) {
      const int64_t at = (token * num_heads + head) * value_size + column;
      store_upto(output + at, count, step(state, token, head, load_upto(value + at, count)));
    }
    for (int64_t k = 0; k < key_size; ++k) store_upto(own + k * value_size, count, load(state + k * kLanes));
  }

  // Advances the columns by a token with this value; returns what its query reads.
  TWOSTEP_INLINE Vec step(float* state, int64_t token, int64_t head, Vec written) const {
    const int64_t group = token * num_groups + head / (num_heads / num_groups);
    const float *keys = key + group * key_size, *queries = query + group * key_size;
    const float* decays = decay + (token * num_heads + head) * num_decays;
    const int64_t stride = num_decays == 1 ? 0 : 1;
    const auto decayed = [&](int64_t k) TWOSTEP_INLINE {
      return load(state + k * kLanes) * broadcast(decays[k * stride]);
    };
    if (rate == nullptr) {
      return sum_of(key_size, [&](int64_t k) TWOSTEP_INLINE {
        return write(state, k, decayed(k), keys[k], written) * broadcast(queries[k]);
      });
    }
    const Vec read = sum_of(key_size, [&](int64_t k) TWOSTEP_INLINE {
      const Vec now = decayed(k);
      store(state + k * kLanes, now);
      return now * broadcast(keys[k]);
    });
    written = (written - read) * broadcast(rate[token * num_heads + head]);
    return sum_of(key_size, [&](int64_t k) TWOSTEP_INLINE {
      return write(state, k, load(state + k * kLanes), keys[k], written) * broadcast(queries[k]);
    });
  }

  TWOSTEP_INLINE static Vec write(float* state, int64_t k, Vec before, float key, Vec written) {
    const Vec after = before + broadcast(key) * written;
    store(state + k * kLanes, after);
    return after;
  }
};

void check(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value, const at::Tensor& decay,
           const std::optional<at::Tensor>& rate, const at::Tensor& states) {
  TORCH_CHECK(query.dim() == 3 && query.sizes() == key.sizes() && value.dim() == 3 && decay.dim() == 3,
              "queries, keys, values and decays are [tokens, heads, size]");
  const int64_t num_tokens = value.size(0), num_heads = value.size(1);
  TORCH_CHECK(key.size(0) == num_tokens && key.size(1) > 0 && num_heads % key.size(1) == 0, "heads are in groups");
  TORCH_CHECK(decay.size(0) == num_tokens && decay.size(1) == num_heads &&
                  (decay.size(2) == 1 || decay.size(2) == key.size(2)),
              "a decay is one number, or one for each of a key");
  TORCH_CHECK(!rate || (rate->dim() == 2 && rate->size(0) == num_tokens && rate->size(1) == num_heads),
              "rates are [tokens, heads]");
  TORCH_CHECK(states.dim() == 4 && states.size(1) == num_heads && states.size(2) == key.size(2) &&
                  states.size(3) == value.size(2) && states.is_contiguous(),
              "states are [slots, heads, key size, value size]");
  TORCH_CHECK(key.size(2) <= kMaxKeySize, "keys have at most ", kMaxKeySize, " numbers");
  for (const at::Tensor& each : {query, key, value, decay, rate.value_or(value), states})
    TORCH_CHECK(each.scalar_type() == at::kFloat, "linear attention is computed in float32");
}

void check_places(const at::Tensor& slots, const at::Tensor& starts, int64_t num_slots, int64_t num_tokens) {
  const int64_t count = slots.numel();
  TORCH_CHECK(slots.scalar_type() == at::kLong && slots.is_contiguous() && starts.scalar_type() == at::kLong &&
                  starts.is_contiguous() && starts.numel() == count + 1,
              "slots and starts are int64");
  const auto *slot = slots.const_data_ptr<int64_t>(), *start = starts.const_data_ptr<int64_t>();
  TORCH_CHECK(std::all_of(slot, slot + count, [&](int64_t each) { return 0 <= each && each < num_slots; }),
              "a slot is out of range");
  TORCH_CHECK(start[0] == 0 && start[count] == num_tokens && std::is_sorted(start, start + count + 1),
              "sequences follow one another");
}

at::Tensor linear_attention(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                            const at::Tensor& decay, const std::optional<at::Tensor>& rate, at::Tensor& states,
                            const at::Tensor& slots, const at::Tensor& starts) {
  check(query, key, value, decay, rate, states);
  check_places(slots, starts, states.size(0), value.size(0));
  const at::Tensor queries = query.contiguous(), keys = key.contiguous(), values = value.contiguous();
  const at::Tensor decays = decay.contiguous(), rates = rate ? rate->contiguous() : at::Tensor();
  at::Tensor output = at::empty_like(values);
  const Problem problem{
      queries.const_data_ptr<float>(), keys.const_data_ptr<float>(), values.const_data_ptr<float>(),
      decays.const_data_ptr<float>(), rate ? rates.const_data_ptr<float>() : nullptr,
      states.mutable_data_ptr<float>(), output.mutable_data_ptr<float>(), slots.const_data_ptr<int64_t>(),
      starts.const_data_ptr<int64_t>(), keys.size(1), values.size(1), keys.size(2), values.size(2), decays.size(2)};
  const int64_t num_panels = divide_up(values.size(2), kLanes), panels = num_panels * values.size(1);
  const bool serial = values.numel() * keys.size(2) < kSerialWork;
  run_tasks(slots.numel() * panels, serial, [&](int64_t task) {
    const int64_t column = task % num_panels * kLanes;
    problem.run(task / panels, task % panels / num_panels, column, values.size(2) - column);
  });
  return output;
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(twostep, library) {
  library.def(
      "linear_attention(Tensor query, Tensor key, Tensor value, Tensor decay, Tensor? rate, Tensor(a!) states, "
      "Tensor slots, Tensor starts) -> Tensor");
}

TORCH_LIBRARY_IMPL(twostep, CPU, library) { library.impl("linear_attention", &linear_attention); }
