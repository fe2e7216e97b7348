// Categorical draws from rows of logits by temperature, top_k, top_p and min_p; engine/runner/token_draw.py explains
// them and has the same in torch. Probabilities are integers here: a sum of them is the same in any order, so no filter
// needs to sort.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <memory>

#include "base/array_ref.h"
#include "base/bfloat16.h"
#include "base/check.h"
#include "base/operators.h"
#include "base/tensor.h"
#include "base/thread_pool.h"
#include "base/vec.h"
#include "sampling/logits.h"

namespace twostep {
namespace {

using Weight = uint32_t;  // of a token; the likeliest one has kLargest
constexpr Weight kLargest = 1 << 30;
constexpr int64_t kBlock = 64;  // weights that are compared together

typedef int32_t PartI __attribute__((vector_size(4 * kPartLanes)));

// The columns of `controls`.
struct Controls {
  double temperature, number, top_k, top_p, min_p;
};
constexpr int64_t kNumControls = sizeof(Controls) / sizeof(double);

template <class Element>
void weigh(const Element* logits, int64_t size, float largest, float temperature, Weight* weights) {
  const auto weights_of = [=](Vec x) {
    const Vec ratios = exp_nonpositive((x - broadcast(largest)) / broadcast(temperature));
    return fma(ratios, broadcast(kLargest), broadcast(0.5f));
  };
  const auto put = [](Vec numbers, Weight* to) {
    unroll<kParts>([&](auto i) {
      const PartI part = __builtin_convertvector(numbers.part[i], PartI);
      std::memcpy(to + i * kPartLanes, &part, sizeof(part));
    });
  };
  int64_t i = 0;
  for (; i + kLanes <= size; i += kLanes) put(weights_of(load(logits + i)), weights + i);
  Weight last[kLanes];
  put(weights_of(load_first(logits + i, size - i)), last);
  std::copy_n(last, size - i, weights + i);
}

uint64_t sum(const Weight* weights, int64_t size) {
  uint64_t total = 0;
  for (int64_t i = 0; i < size; ++i) total += weights[i];
  return total;
}

// Copies the matching weights, in order, to `found`, which may be `weights`; returns their number. It has no branch
// that could be mispredicted.
template <class Matches>
int64_t select(const Weight* weights, int64_t size, const Matches& matches, Weight* found) {
  int64_t num_found = 0;
  for (int64_t i = 0; i < size; ++i) {
    const Weight weight = weights[i];
    found[num_found] = weight;
    num_found += matches(weight);
  }
  return num_found;
}

// The largest weights that are needed to reach a limit: all above `weight`, and the first `num_equal` of those like it.
struct Cut {
  Weight weight;
  uint64_t num_equal;
};

// `measure` is what a weight counts, and all together reach `limit`, which is positive. Finds ten bits of the cut at a
// time: the digit with which the larger ones before it reach the limit. `scratch` has room for all weights.
template <class Measure>
Cut find_cut(const Weight* weights, int64_t size, uint64_t limit, const Measure& measure, Weight* scratch) {
  constexpr int kBits = 10;
  constexpr Weight kLast = (1 << kBits) - 1;
  Weight cut = 0;
  uint64_t before = 0;
  for (int shift = 2 * kBits; shift >= 0; shift -= kBits) {
    const Weight zero = cut << kBits, last = shift == 2 * kBits ? kLast + 1 : kLast;  // that of kLargest
    // Most weights are small, and the digit zero is what remains when no other is the one. What is in scratch is little
    // and would be lost: it goes along with all its digits.
    const Weight first = weights == scratch ? 0 : 1;
    const auto matches = [=](Weight weight) { return (weight >> shift) - zero - first <= last - first; };
    const int64_t num_found = select(weights, size, matches, scratch);
    uint64_t measures[kLast + 2] = {};
    for (int64_t i = 0; i < num_found; ++i) measures[(scratch[i] >> shift) - zero] += measure(scratch[i]);
    Weight digit = last;
    for (; digit > 0 && before + measures[digit] < limit; --digit) before += measures[digit];
    if (digit >= first) weights = scratch, size = num_found;
    cut = zero + digit;
  }
  const uint64_t each = std::max<uint64_t>(measure(cut), 1);
  return {cut, (limit - before + each - 1) / each};
}

// Sets all other weights to zero. Few blocks have a weight equal to the cut.
void keep(Weight* weights, int64_t size, Cut cut) {
  uint64_t num_equal = 0;
  for (int64_t start = 0; start < size; start += kBlock) {
    const int64_t end = std::min(start + kBlock, size);
    bool any_equal = false;
    for (int64_t i = start; i < end; ++i) {
      any_equal |= weights[i] == cut.weight;
      weights[i] = weights[i] < cut.weight ? 0 : weights[i];
    }
    for (int64_t i = start; any_equal && i < end; ++i) {
      if (weights[i] == cut.weight && ++num_equal > cut.num_equal) weights[i] = 0;
    }
  }
}

void filter(Weight* weights, int64_t size, const Controls& controls, Weight* scratch) {
  if (controls.top_k > 0 && controls.top_k < size) {
    keep(weights, size, find_cut(weights, size, controls.top_k, [](Weight) { return 1; }, scratch));
  }
  if (controls.top_p < 1) {
    const double needed = std::ceil(controls.top_p * static_cast<double>(sum(weights, size)));
    keep(weights, size, find_cut(weights, size, std::max(needed, 1.0), [](Weight weight) { return weight; }, scratch));
  }
  const Weight least = std::ceil(controls.min_p * kLargest);
  for (int64_t i = 0; i < size; ++i) weights[i] = weights[i] < least ? 0 : weights[i];
}

// Returns the index at which the running sum of weights exceeds `number`, in [0, 1), times their total.
int64_t find(const Weight* weights, int64_t size, double number) {
  const uint64_t total = sum(weights, size);
  uint64_t left = std::min<uint64_t>(number * static_cast<double>(total), total - 1);
  int64_t i = 0;
  for (uint64_t block; (block = sum(weights + i, std::min(kBlock, size - i))) <= left; i += kBlock) left -= block;
  for (; weights[i] <= left; ++i) left -= weights[i];
  return i;
}

template <class Element>
void draw_rows(const Tensor& logits, const int64_t* likeliest, const Controls* controls, int64_t* drawn) {
  const Element* from = logits.const_data_ptr<Element>();
  const int64_t size = logits.size(1);
  run_ranges(logits.size(0), 1, [&](int64_t begin, int64_t end) {
    const auto weights = std::make_unique_for_overwrite<Weight[]>(2 * size);
    for (int64_t row = begin; row < end; ++row) {
      drawn[row] = likeliest[row];
      if (likeliest[row] == kNoToken) continue;
      const float largest = from[row * size + likeliest[row]];
      weigh(from + row * size, size, largest, controls[row].temperature, weights.get());
      filter(weights.get(), size, controls[row], weights.get() + size);
      drawn[row] = find(weights.get(), size, controls[row].number);
    }
  });
}

void check(const Tensor& logits, const Tensor& likeliest, const Tensor& controls) {
  const int64_t rows = logits.dim() == 2 ? logits.size(0) : -1;
  TWOSTEP_CHECK(rows >= 0 && logits.size(1) > 0, "logits are rows [T, V]");
  TWOSTEP_CHECK(likeliest.dim() == 1 && likeliest.size(0) == rows, "there is one likeliest token a row");
  TWOSTEP_CHECK(controls.sizes() == IntArrayRef({rows, kNumControls}), "controls are rows of ", kNumControls);
  TWOSTEP_CHECK(likeliest.scalar_type() == kLong && controls.scalar_type() == kDouble, "of int64 and float64");
}

}  // namespace

Tensor draw_tokens(const Tensor& logits, const Tensor& likeliest, const Tensor& controls) {
  check(logits, likeliest, controls);
  const Tensor rows = logits.contiguous(), tokens = likeliest.contiguous(), all_controls = controls.contiguous();
  check_tokens(tokens, rows.size(1), kNoToken);
  Tensor drawn = new_empty(tokens.sizes(), tokens.scalar_type());
  const auto draw = [&]<class Element>(Element) {
    draw_rows<Element>(rows, tokens.const_data_ptr<int64_t>(),
                       reinterpret_cast<const Controls*>(all_controls.const_data_ptr<double>()),
                       drawn.mutable_data_ptr<int64_t>());
  };
  switch (rows.scalar_type()) {
    case kFloat: draw(float{}); break;
    case kBFloat16: draw(BFloat16{}); break;
    default: fail_not_implemented("a draw from ", rows.scalar_type(), " is not implemented");
  }
  return drawn;
}

Tensor token_weights(const Tensor& logits, double largest, double temperature) {
  TWOSTEP_CHECK(logits.dim() == 1 && logits.is_contiguous(), "logits are a row [V]");
  TWOSTEP_CHECK(logits.scalar_type() == kFloat, "of float32");
  Tensor weights = new_empty(logits.sizes(), kInt);
  weigh(logits.const_data_ptr<float>(), logits.size(0), largest, temperature,
        reinterpret_cast<Weight*>(weights.mutable_data_ptr<int32_t>()));
  return weights.to(kLong);
}

}  // namespace twostep
