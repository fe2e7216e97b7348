// Affine quantization of sixteen groups of 32 at once, a lane each. A group's sums run through registers then, and have
// no lanes to fold: the same operations in the same order as those of Fitter (quantize.h), in a third of the time.

#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>

#include "base/bfloat16.h"
#include "base/int_dot.h"
#include "base/sizes.h"
#include "base/vec.h"
#include "quantized/quantize.h"

namespace twostep::quantizing {

constexpr int kLaneGroup = 32;  // numbers of each lane's group

// The nearest bfloat16, of all numbers: `rounded_to_bfloat16` may take subnormal ones for zero.
inline Vec nearest_bfloat16(Vec x) {
  return each_part([&](int i) {
    const PartF v = x.part[i];
    const PartU bits = (PartU)v;
    return (PartF)((v == v ? bits + 0x7fffu + (bits >> 16 & 1u) : bits | 0x400000u) & 0xffff0000u);
  });
}

// The nearest bfloat16 that is not above.
inline Vec bfloat16_below(Vec x) {
  const Vec nearest = nearest_bfloat16(x);
  return each_part([&](int i) {
    const PartU bits = (PartU)nearest.part[i];
    const PartU below = bits & 0x80000000u ? bits + 0x10000u : bits - 0x10000u;
    return (PartF)(nearest.part[i] > x.part[i] ? below : bits);
  });
}

// Combines value(i) of a group's numbers with value(i + 16), then halves again, down to one.
template <class Value, class Combine>
Vec fold_lanes(const Value& value, const Combine& combine) {
  Vec values[kLaneGroup / 2];
  for (int i = 0; i < kLaneGroup / 2; ++i) values[i] = combine(value(i), value(i + kLaneGroup / 2));
  for (int half = kLaneGroup / 4; half > 0; half /= 2) {
    for (int i = 0; i < half; ++i) values[i] = combine(values[i], values[i + half]);
  }
  return values[0];
}

template <class Value>
Vec lane_sum(const Value& value) {
  return fold_lanes(value, [](Vec a, Vec b) { return a + b; });
}

class LaneFitter {
 public:
  // The fit's codes are those nearest to its line.
  struct Fit {
    Vec scale, minimum, error;
  };

  // numbers[i] has number i of each group; it must outlive this.
  LaneFitter(const Vec* numbers, float max_code) : numbers_(numbers), max_code_(max_code) {
    const Vec opposite = fold_lanes([&](int i) { return Vec{} - numbers_[i]; }, max);
    lowest_ = broadcast(-1.0f) * opposite;
    highest_ = fold_lanes([&](int i) { return numbers_[i]; }, max);
    mean_ = lane_sum([&](int i) { return numbers_[i]; }) / broadcast(kLaneGroup);
  }

  Fit best(int64_t num_refits) {
    Fit best = through_ends();
    for (int64_t i = 0; i < num_refits; ++i) keep_better(best, refitted());
    keep_better(best, around_zero());
    return best;
  }

  // Calls use(i, codes of numbers i).
  template <class Use>
  void for_each_code(const Fit& fit, const Use& use) const {
    const Vec divisor = divisor_of(fit.scale);
    for (int i = 0; i < kLaneGroup; ++i) use(i, code_of(i, fit.minimum, divisor));
  }

 private:
  static void keep_better(Fit& best, const Fit& other) {
    const auto choose = [&](Vec a, Vec b) { return where_less(other.error, best.error, a, b); };
    best = {choose(other.scale, best.scale), choose(other.minimum, best.minimum), choose(other.error, best.error)};
  }

  Fit through_ends() {
    const Vec minimum = bfloat16_below(lowest_);
    return with((highest_ - minimum) / broadcast(max_code_), minimum);
  }

  Fit around_zero() {
    const float middle = (max_code_ + 1) / 2;
    const Vec farthest = where_less(broadcast(-1.0f) * lowest_, highest_, highest_, lowest_);
    const Vec scale = nearest_bfloat16(farthest / broadcast(-middle));
    return with(scale, scale * broadcast(-middle));
  }

  // The least-squares line through the codes of the last fit and their numbers.
  Fit refitted() {
    const Vec mean_code = lane_sum([&](int i) { return codes_[i]; }) / broadcast(kLaneGroup);
    const Vec covariance = lane_sum([&](int i) { return (codes_[i] - mean_code) * (numbers_[i] - mean_); });
    const Vec variance = lane_sum([&](int i) {
      const Vec centred = codes_[i] - mean_code;
      return centred * centred;
    });
    const Vec least = broadcast(1e-9f);
    const Vec scale = covariance / where_less(variance, least, least, variance);
    return with(scale, mean_ - scale * mean_code);
  }

  Fit with(Vec scale, Vec minimum) {
    scale = nearest_bfloat16(scale), minimum = nearest_bfloat16(minimum);
    const Vec divisor = divisor_of(scale);
    const Vec error = lane_sum([&](int i) {
      codes_[i] = code_of(i, minimum, divisor);
      const Vec error = minimum + codes_[i] * scale - numbers_[i];
      return error * error;
    });
    return {scale, minimum, error};
  }

  static Vec divisor_of(Vec scale) {
    const Vec infinity = broadcast(std::numeric_limits<float>::infinity());
    return each_part([&](int i) { return scale.part[i] != 0 ? scale.part[i] : infinity.part[i]; });
  }

  Vec code_of(int i, Vec minimum, Vec divisor) const {
    return nearest_codes((numbers_[i] - minimum) / divisor, max_code_);
  }

  const Vec* const numbers_;
  const float max_code_;
  Vec lowest_, highest_, mean_;
  Vec codes_[kLaneGroup];
};

// Sixteen groups from row[start] on, lane by lane, with a number that is taken for those beyond the row.
template <class Element>
void load_lanes(const Element* row, int64_t start, int64_t end, Element beyond, Vec* numbers) {
  alignas(64) float lanes[kLaneGroup][kLanes];
  for (int64_t lane = 0; lane < kLanes; ++lane) {
    const Element* from = row + start + lane * kLaneGroup;
    const int64_t count = std::clamp<int64_t>(row + end - from, 0, kLaneGroup);
    for (int64_t i = 0; i < count; ++i) lanes[i][lane] = from[i];
    for (int64_t i = count; i < kLaneGroup; ++i) lanes[i][lane] = beyond;
  }
  for (int i = 0; i < kLaneGroup; ++i) numbers[i] = twostep::load(lanes[i]);
}

// Stores the codes of sixteen groups from codes[start] on, or as many as there are; for_each_code(use) calls use(i,
// codes of numbers i).
template <class ForEachCode>
void store_lane_codes(int64_t start, int64_t end, uint8_t* codes, const ForEachCode& for_each_code) {
  int8_t lanes[kLaneGroup][kLanes];
  for_each_code([&](int i, Vec values) { integers::store_low_bytes(lanes[i], integers::to_integers(values)); });
  for (int64_t lane = 0, first = start; lane < kLanes && first < end; ++lane, first += kLaneGroup) {
    const int64_t count = std::min<int64_t>(kLaneGroup, end - first);
    for (int64_t i = 0; i < count; ++i) codes[first + i] = uint8_t(lanes[i][lane]);
  }
}

// Quantizes sixteen groups from row[start] on, or as many as there are, to codes [k] and a scale and a minimum each.
template <class Element>
void quantize_lanes(const Element* row, int64_t start, int64_t end, int64_t bits, int64_t num_refits, uint8_t* codes,
                    BFloat16* scales, BFloat16* minimums) {
  Vec numbers[kLaneGroup];
  load_lanes(row, start, end, row[end - 1], numbers);  // which is in the last group anyway
  LaneFitter fitter(numbers, float((1 << bits) - 1));
  const auto fit = fitter.best(num_refits);
  store_lane_codes(start, end, codes, [&](const auto& use) { fitter.for_each_code(fit, use); });
  const int64_t groups = std::min<int64_t>(divide_up(end - start, kLaneGroup), kLanes);
  alignas(64) float scale[kLanes], minimum[kLanes];
  store(scale, fit.scale), store(minimum, fit.minimum);
  std::copy_n(scale, groups, scales), std::copy_n(minimum, groups, minimums);
}

// Quantizes a row of k numbers in groups of 32.
template <class Element>
void quantize_row_in_lanes(const Element* row, int64_t k, int64_t bits, int64_t num_refits, uint8_t* codes,
                           BFloat16* scales, BFloat16* minimums) {
  for (int64_t start = 0; start < k; start += kLanes * kLaneGroup, scales += kLanes, minimums += kLanes) {
    quantize_lanes(row, start, k, bits, num_refits, codes, scales, minimums);
  }
}

}  // namespace twostep::quantizing
