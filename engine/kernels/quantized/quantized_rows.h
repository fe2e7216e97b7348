// Activation quantization: rows as integers of 8 or 16 bits. Sums of their products with integer weights are exact, so
// the same in any order and on any unit that adds integers.
//
// A row's numbers share a scale in groups of 256 along K: the largest of them becomes the largest integer, or minus
// that. Rows of 8 bits are transformed before (base/hadamard.h), so that no number is much larger than the others.

#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "base/hadamard.h"
#include "base/int_dot.h"
#include "base/small_vector.h"
#include "base/vec.h"
#include "linear/problem.h"

namespace twostep::integers {

constexpr int64_t kGroupSteps = 4, kGroup = kGroupSteps * kStep;  // numbers with one scale
static_assert(kGroup == hadamard::kLargestBlock && kStep == hadamard::kSmallestBlock);

struct EightBits {
  static constexpr bool kIsTransformed = true, kSumsHalves = true;
  static constexpr int64_t kBytes = 1;  // per number
  static constexpr int32_t kLargest = 127;
  using Sum = int32_t;  // type of the sum of a group's numbers

  static void store(int8_t* to, int64_t row, int64_t place, const Dots& integers) {
    store_low_bytes(to + row * kStep + place, integers);
  }
  static const int8_t* find(const int8_t* from, int64_t row, int64_t place) { return from + row * kStep + place; }
};

struct SixteenBits {
  static constexpr bool kIsTransformed = false, kSumsHalves = false;
  static constexpr int64_t kBytes = 2;
  static constexpr int32_t kLargest = 127 * 256 + 127;  // so that both halves have 8 bits and a sign
  using Sum = float;

  static void store(int8_t* to, int64_t row, int64_t place, const Dots& integers) {
    if constexpr (kHalvesApart) {
      EightBits::store(to, row, place, upper_halves(integers));
      EightBits::store(to + kTileBytes, row, place, integers);
    } else {
      store_wide(to + 2 * (row * kStep + place), integers);
    }
  }
  static const int8_t* find(const int8_t* from, int64_t row, int64_t place) {
    return from + (row * kStep + place) * (kHalvesApart ? 1 : 2);
  }
};

// Rows in tiles of 16, a step of one tile contiguous. What lies beyond the last row is unspecified.
template <class Precision>
struct Rows {
  int64_t steps, groups;
  int8_t* numbers;  // [tiles][steps][16 x 64], zeros beyond K
  float* scales;    // [tiles][groups][16]
  typename Precision::Sum* sums;  // [tiles][groups][16], each of a row's numbers in the group
  int32_t* half_sums;             // [tiles][steps][16], where Precision::kSumsHalves: two of 16 bits

  int8_t* numbers_of(int64_t tile, int64_t step) const {
    return numbers + (tile * steps + step) * kTileBytes * Precision::kBytes;
  }
  int32_t* half_sums_of(int64_t tile, int64_t step) const { return half_sums + (tile * steps + step) * kTileRows; }
  int64_t place(int64_t tile, int64_t group) const { return (tile * groups + group) * kTileRows; }
  int64_t steps_of(int64_t group) const { return std::min(kGroupSteps, steps - group * kGroupSteps); }

  // The tiles from `tile` on.
  Rows from(int64_t tile) const {
    return {steps, groups, numbers_of(tile, 0), scales + place(tile, 0), sums + place(tile, 0), half_sums_of(tile, 0)};
  }
};

template <class Element>
Vec load_up_to(const Element* row, int64_t start, int64_t end) {
  if (start + kLanes <= end) return load(row + start);
  return start < end ? load_first(row + start, end - start) : Vec{};
}

// Rounds a group of one row, which is padded with zeros to a whole step; its scale is NaN if a number is not finite.
template <class Precision, class Element>
void round_group(const Element* row, int64_t k, const Rows<Precision>& rows, int64_t index, int64_t group) {
  const int64_t tile = index / kTileRows, row_of_tile = index % kTileRows, at = rows.place(tile, group) + row_of_tile;
  const int64_t start = group * kGroup, end = std::min(start + kGroup, k), size = round_up(end - start, kStep);
  const Vec shift = broadcast(12582912.0f);  // as in exp_nonpositive
  alignas(64) float values[kGroup];
  for (int64_t i = 0; i < size; i += kLanes) store(values + i, load_up_to(row, start + i, end));
  if constexpr (Precision::kIsTransformed) hadamard::transform(values, size);
  Dots largest{}, total{};
  for (int64_t i = 0; i < size; i += kLanes) largest = larger(largest, load(values + i));
  const float most = fold_larger(largest);
  const bool is_zero = most <= Precision::kLargest * 1e-38f;  // or so near to it that the reciprocal would overflow
  const Vec factor = broadcast(is_zero ? 0.0f : Precision::kLargest / most);
  for (int64_t i = 0; i < size; i += kLanes) {
    const Vec shifted = load(values + i) * factor + shift;
    Dots numbers;
    unroll<kParts>([&](auto part) {
      numbers.part[part] = (PartI)shifted.part[part] - (PartI)shift.part[part];
      total.part[part] += numbers.part[part];
    });
    Precision::store(rows.numbers_of(tile, group * kGroupSteps + i / kStep), row_of_tile, i % kStep, numbers);
  }
  if constexpr (Precision::kSumsHalves) {
    for (int64_t step = group * kGroupSteps; step < group * kGroupSteps + size / kStep; ++step) {
      const int8_t* numbers = Precision::find(rows.numbers_of(tile, step), row_of_tile, 0);
      rows.half_sums_of(tile, step)[row_of_tile] = pair_of(sum_of_32(numbers), sum_of_32(numbers + 32));
    }
  }
  rows.scales[at] = most / Precision::kLargest + (most - most);
  rows.sums[at] = typename Precision::Sum(fold_add(to_floats(total)));
}

// Quantizes the rows of each problem, in memory that the calling thread keeps for its next call.
template <class Precision, class Element>
SmallVector<Rows<Precision>, 1> round_rows(Problems<Element> problems) {
  static thread_local Scratch<int8_t> numbers;
  static thread_local Scratch<float> scales;
  static thread_local Scratch<typename Precision::Sum> sums;
  static thread_local Scratch<int32_t> half_sums;
  const int64_t k = problems.front().k, steps = divide_up(k, kStep), groups = divide_up(k, kGroup);
  Runs rows;
  int64_t size = 0;  // of whole tiles
  for (const auto& p : problems) rows.add(p.rows), size += round_up(p.rows, kTileRows);
  Rows<Precision> rest{steps, groups, numbers.get(size * steps * kStep * Precision::kBytes), scales.get(size * groups),
                       sums.get(size * groups), half_sums.get(Precision::kSumsHalves ? size * steps : 0)};
  SmallVector<Rows<Precision>, 1> rounded;
  for (const auto& p : problems) rounded.push_back(rest), rest = rest.from(divide_up(p.rows, kTileRows));
  run_tasks(rows.count(), rows.count() * k < 1 << 15, [&](int64_t i) {
    const auto [problem, row] = rows[i];
    const Element* x = problems[problem].x + row * k;
    for (int64_t group = 0; group < groups; ++group) round_group(x, k, rounded[problem], row, group);
  });
  return rounded;
}

}  // namespace twostep::integers
