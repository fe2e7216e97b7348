// Rows of float32 rounded to integers of 8 bits, for weights that stay in the blocks of a file: 32 numbers along K have
// one scale, the largest of them becoming 127 or minus that. round_rows of engine/weights/activation_quantization.py is
// the plain path.

#pragma once

#include <cstdint>
#include <numeric>

#include "base/int_dot.h"
#include "base/scratch.h"
#include "base/sizes.h"
#include "base/thread_pool.h"
#include "base/vec.h"

namespace twostep::rounded {

// What products need of the numbers of a row in one group of a weight.
struct RowGroup {
  float scale, sum;  // the sum is of the integers
  int32_t start;     // of a dot product: it makes up for integers::kOffset
};

// Rounded rows, K padded with zeros to whole groups.
struct RoundedRows {
  static constexpr int64_t kGroup = 32, kHalf = kGroup / 2;
  static constexpr int64_t kTileRows = 16;  // of which the last ones may not be there

  int64_t groups;
  int8_t* numbers;   // [rows][groups][kGroup], after which a tile may read more
  RowGroup* wholes;  // [rows][groups]
  RowGroup* halves;  // [rows][groups][2], for weights with groups of kHalf

  int64_t stride() const { return groups * kGroup; }
};

inline RowGroup row_group(float scale, int32_t sum) { return {scale, float(sum), -integers::kOffset * sum}; }

// Rounds a group of a row of which `count` numbers are left; its scale is NaN if one of them is not finite.
inline void round_group(const float* x, int64_t count, int8_t* to, RowGroup& whole, RowGroup* halves) {
  constexpr float kLargest = 127;
  const Vec shift = broadcast(12582912.0f);  // as in exp_nonpositive
  const Vec values[2] = {load_upto(x, count), count > kLanes ? load_upto(x + kLanes, count - kLanes) : Vec{}};
  const float most = integers::fold_larger(integers::larger(integers::larger({}, values[0]), values[1]));
  const bool is_zero = most <= kLargest * 1e-38f;  // or so near to it that the reciprocal would overflow
  const Vec factor = broadcast(is_zero ? 0.0f : kLargest / most);
  const float scale = most / kLargest + (most - most);
  int32_t sums[2];
  for (int half = 0; half < 2; ++half, to += kLanes) {
    integers::store_low_bytes(to, integers::to_integers(values[half] * factor + shift - shift));
    sums[half] = std::accumulate(to, to + kLanes, int32_t{0});
    halves[half] = row_group(scale, sums[half]);
  }
  whole = row_group(scale, sums[0] + sums[1]);
}

// Rounds rows [rows, k], in memory that the calling thread keeps for its next call.
inline RoundedRows round_rows(const float* x, int64_t rows, int64_t k) {
  static thread_local Scratch<int8_t> numbers;
  static thread_local Scratch<RowGroup> wholes, halves;
  const int64_t groups = divide_up(k, RoundedRows::kGroup), all = rows * groups;
  const int64_t readable = (rows + RoundedRows::kTileRows - 1) * groups * RoundedRows::kGroup;
  const RoundedRows to{groups, numbers.get(readable), wholes.get(all), halves.get(2 * all)};
  constexpr int64_t kGrain = 1 << 15;
  run_ranges(rows, divide_up(kGrain, k), [&](int64_t begin, int64_t end) {
    for (int64_t i = begin * groups; i < end * groups; ++i) {
      const int64_t row = i / groups, start = i % groups * RoundedRows::kGroup;
      int8_t* integers = to.numbers + i * RoundedRows::kGroup;
      round_group(x + row * k + start, k - start, integers, to.wholes[i], to.halves + 2 * i);
    }
  });
  return to;
}

}  // namespace twostep::rounded
