// The second step to weights of 4 bits: integer levels. Its reference, with explanations, is
// engine/weights/int4_levels.py: the same operations in the same order, so the same bits.

#pragma once

#include <algorithm>
#include <cmath>
#include <limits>

#include "quantized/quantize.h"
#include "quantized/quantized_rows.h"

namespace twostep::levels {

constexpr int64_t kGroup = quantizing::kGroup4, kScaleGroup = integers::kGroup;
constexpr int64_t kScaleGroups = kScaleGroup / kGroup;  // groups with one scale

using Values = quantizing::Values<kGroup / kLanes>;
inline Values all(float value) { return quantizing::all<kGroup / kLanes>(value); }

// The range of a group's codes, zero included.
struct Reach {
  float lowest, step;

  Reach(float scale, float minimum) {
    const float last = minimum + 15 * scale;
    lowest = std::min(std::min(minimum, last), 0.0f);
    step = (std::max(std::max(minimum, last), 0.0f) - lowest) / 15;
  }

  float zero_of(float size) const {
    const float divisor = size > 0 ? size : std::numeric_limits<float>::infinity();
    return std::clamp(std::nearbyint(-lowest / divisor), 0.0f, 15.0f);
  }
};

inline float largest_multiplier(float zero) { return std::min(std::floor(127 / std::max(zero, 15 - zero)), 15.0f); }

struct Levels {
  Values codes;
  float multiplier, zero, error;
};

inline Levels with(const Values& numbers, const Reach& reach, float wanted, float factor) {
  Levels levels;
  levels.zero = reach.zero_of(wanted * factor);
  levels.multiplier = std::min(wanted, largest_multiplier(levels.zero));
  const Values size = all(levels.multiplier * factor), zero = all(levels.zero);
  levels.codes = quantizing::nearest_codes(numbers / size + zero, 15.0f);
  const Values errors = (levels.codes - zero) * size - numbers;
  levels.error = quantizing::sum(errors * errors);
  return levels;
}

// Returns the best of the nearest multiplier and its neighbours; the first of equals.
inline Levels best(const Values& numbers, const Reach& reach, float factor) {
  const float nearest = std::nearbyint(reach.step / factor);
  Levels best;
  for (const float offset : {0.0f, -1.0f, 1.0f}) {
    const Levels levels = with(numbers, reach, std::clamp(nearest + offset, 1.0f, 15.0f), factor);
    if (offset == 0 || levels.error < best.error) best = levels;
  }
  return best;
}

template <class Element>
Values load_group(const Element* row, int64_t start, int64_t end) {
  return {{integers::load_up_to(row, start, end), integers::load_up_to(row, start + kLanes, end)}};
}

// Converts a row of k numbers, with scales and minimums of its groups, to codes [k], levels of groups, scales per 256.
template <class Element>
void level_row(const Element* row, int64_t k, const at::BFloat16* scales, const at::BFloat16* minimums, uint8_t* codes,
               uint8_t* levels, at::BFloat16* shared) {
  const int64_t groups = divide_up(k, kGroup);
  for (int64_t first = 0; first < groups; first += kScaleGroups, ++shared) {
    const int64_t end = std::min(first + kScaleGroups, groups);
    float largest = 0;
    for (int64_t group = first; group < end; ++group) {
      const Reach reach(scales[group], minimums[group]);
      largest = std::max(largest, reach.step / largest_multiplier(reach.zero_of(reach.step)));
    }
    *shared = largest;
    const float factor = *shared > 0 ? float(*shared) : 1.0f;
    for (int64_t group = first; group < end; ++group) {
      const int64_t start = group * kGroup;
      const Levels found = best(load_group(row, start, k), Reach(scales[group], minimums[group]), factor);
      quantizing::store_codes(found.codes, k - start, codes + start);
      levels[group] = uint8_t(int32_t(found.zero) << 4 | int32_t(found.multiplier));
    }
  }
}

}  // namespace twostep::levels
