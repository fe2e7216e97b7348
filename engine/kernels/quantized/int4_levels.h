// The second step to weights of 4 bits: integer levels, of sixteen groups at once, a lane each. Its reference, with
// explanations, is engine/weights/int4_levels.py: the same operations in the same order, so the same bits.

#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>

#include "base/bfloat16.h"
#include "base/vec.h"
#include "quantized/quantize_lanes.h"
#include "quantized/quantized_rows.h"

namespace twostep::levels {

constexpr int64_t kGroup = quantizing::kGroup4, kScaleGroup = integers::kGroup;
constexpr int64_t kScaleGroups = kScaleGroup / kGroup;  // groups with one scale
static_assert(kGroup == quantizing::kLaneGroup && kLanes % kScaleGroups == 0);

inline Vec at_least(Vec x, float least) { return where_less(x, broadcast(least), broadcast(least), x); }
inline Vec at_most(Vec x, float most) { return where_less(broadcast(most), x, broadcast(most), x); }

// The nearest integer, ties to even, of numbers that are not negative; of large ones it may be off, but is large.
inline Vec nearest(Vec x) { return x + broadcast(12582912.0f) - broadcast(12582912.0f); }

// The range of each group's codes, zero included.
struct Reach {
  Vec lowest, step;

  Reach(Vec scales, Vec minimums) {
    const Vec last = minimums + broadcast(15) * scales;
    lowest = at_most(where_less(last, minimums, last, minimums), 0);
    step = (at_least(where_less(minimums, last, last, minimums), 0) - lowest) / broadcast(15);
  }

  Vec zero_of(Vec size) const {
    const Vec infinity = broadcast(std::numeric_limits<float>::infinity());
    const Vec divisor = where_less(Vec{}, size, size, infinity);
    return at_most(at_least(nearest(broadcast(-1.0f) * lowest / divisor), 0), 15);
  }
};

inline Vec largest_multiplier(Vec zero) {
  const Vec rest = broadcast(15) - zero, most = broadcast(127) / where_less(zero, rest, rest, zero);
  const Vec rounded = nearest(most);
  return at_most(where_less(most, rounded, rounded - broadcast(1), rounded), 15);
}

struct Levels {
  Vec multiplier, zero, error;

  // Calls use(i, codes of numbers i).
  template <class Use>
  void for_each_code(const Vec* numbers, Vec factor, const Use& use) const {
    const Vec size = multiplier * factor;
    for (int i = 0; i < kGroup; ++i) use(i, quantizing::nearest_codes(numbers[i] / size + zero, 15.0f));
  }
};

inline Levels with(const Vec* numbers, const Reach& reach, Vec wanted, Vec factor) {
  Levels levels;
  levels.zero = reach.zero_of(wanted * factor);
  const Vec most = largest_multiplier(levels.zero);
  levels.multiplier = where_less(most, wanted, most, wanted);
  const Vec size = levels.multiplier * factor;
  levels.error = quantizing::lane_sum([&](int i) {
    const Vec code = quantizing::nearest_codes(numbers[i] / size + levels.zero, 15.0f);
    const Vec error = (code - levels.zero) * size - numbers[i];
    return error * error;
  });
  return levels;
}

// Returns the best of the nearest multiplier and its neighbours; the first of equals.
inline Levels best(const Vec* numbers, const Reach& reach, Vec factor) {
  const Vec middle = nearest(reach.step / factor);
  const auto beside = [&](float offset) {
    return with(numbers, reach, at_most(at_least(middle + broadcast(offset), 1), 15), factor);
  };
  Levels best = beside(0);
  for (const float offset : {-1.0f, 1.0f}) {
    const Levels levels = beside(offset);
    const auto better = [&](Vec other, Vec mine) { return where_less(levels.error, best.error, other, mine); };
    best = {better(levels.multiplier, best.multiplier), better(levels.zero, best.zero),
            better(levels.error, best.error)};
  }
  return best;
}

// The scale of each 256, a factor for each of its groups, from the steps that groups would have by themselves.
inline Vec shared_factors(const Reach& reach, int64_t groups, BFloat16* shared) {
  alignas(64) float wanted[kLanes], factors[kLanes];
  store(wanted, reach.step / largest_multiplier(reach.zero_of(reach.step)));
  std::fill_n(factors, kLanes, 1.0f);
  for (int64_t first = 0; first < groups; first += kScaleGroups, ++shared) {
    *shared = *std::max_element(wanted + first, wanted + std::min(first + kScaleGroups, groups));
    if (*shared > 0) std::fill_n(factors + first, kScaleGroups, float(*shared));
  }
  return load(factors);
}

// Converts a row of k numbers, with scales and minimums of its groups, to codes [k], levels of groups, scales per 256.
template <class Element>
void level_row(const Element* row, int64_t k, const BFloat16* scales, const BFloat16* minimums, uint8_t* codes,
               uint8_t* levels, BFloat16* shared) {
  const int64_t all_groups = divide_up(k, kGroup);
  for (int64_t group = 0; group < all_groups; group += kLanes, shared += kLanes / kScaleGroups) {
    const int64_t groups = std::min<int64_t>(kLanes, all_groups - group);
    Vec numbers[kGroup];
    quantizing::load_lanes(row, group * kGroup, k, Element(0), numbers);
    const Reach reach(load_upto(scales + group, groups), load_upto(minimums + group, groups));
    const Vec factor = shared_factors(reach, groups, shared);
    const Levels found = best(numbers, reach, factor);
    quantizing::store_lane_codes(group * kGroup, k, codes, [&](const auto& use) {
      found.for_each_code(numbers, factor, use);
    });
    alignas(64) float zeros[kLanes], multipliers[kLanes];
    store(zeros, found.zero), store(multipliers, found.multiplier);
    for (int64_t i = 0; i < groups; ++i) levels[group + i] = uint8_t(int32_t(zeros[i]) << 4 | int32_t(multipliers[i]));
  }
}

}  // namespace twostep::levels
