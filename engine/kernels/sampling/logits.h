// Helpers for rows of logits, in the model's own dtype.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>

#include "base/check.h"
#include "base/tensor.h"
#include "base/vec.h"

namespace twostep {

constexpr int64_t kNoToken = -1;        // the result if no token is possible: the largest logit is not finite
constexpr int64_t kLogitsAtOnce = 256;  // in a block; few blocks of a row have a new largest logit

// Whether all numbers are `limit` or less; NaN is not.
template <class Element>
bool are_at_most(float limit, const Element* numbers, int64_t count) {
  const Vec limits = broadcast(limit);
  PartU are_less[kParts];
  std::fill_n(are_less, kParts, PartU{} - 1);
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    const Vec v = load(numbers + i);
    unroll<kParts>([&](auto part) { are_less[part] &= (PartU)(v.part[part] <= limits.part[part]); });
  }
  bool result = true;
  for (; i < count; ++i) result &= float(numbers[i]) <= limit;
  for (int lane = 0; lane < kLanes; ++lane) result &= are_less[lane / kPartLanes][lane % kPartLanes] != 0;
  return result;
}

// Returns the index of the first of the largest, or of the first NaN: as numpy's argmax.
template <class Element>
int64_t argmax_row(const Element* row, int64_t size) {
  float largest = -std::numeric_limits<float>::infinity();
  int64_t found = 0;
  for (int64_t start = 0; start < size; start += kLogitsAtOnce) {
    const int64_t end = std::min(start + kLogitsAtOnce, size);
    if (are_at_most(largest, row + start, end - start)) continue;
    for (int64_t i = start; i < end; ++i) {
      if (std::isnan(float(row[i]))) return i;
      if (float(row[i]) > largest) largest = row[i], found = i;
    }
  }
  return found;
}

// Raises unless all tokens [T] int64, contiguous, are from `lowest` to the end of the vocabulary.
inline void check_tokens(const Tensor& tokens, int64_t vocab_size, int64_t lowest = 0) {
  const int64_t* ids = tokens.const_data_ptr<int64_t>();
  for (int64_t row = 0; row < tokens.size(0); ++row) {
    const int64_t id = ids[row];
    TWOSTEP_CHECK(lowest <= id && id < vocab_size, "token ", id, " is not in a vocabulary of ", vocab_size);
  }
}

}  // namespace twostep
