// What both ways share to code a weight's numbers of bfloat16: how often they have each value of the byte that a table
// codes, and 128 of them expanded.

#pragma once

#include <ATen/ATen.h>
#include <immintrin.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <numeric>

#include "ahead.h"
#include "vec.h"

namespace twostep {

// In vectors of as many bytes as a line has.
struct Expanded {
  static constexpr int64_t kNumbers = 128, kBytes = kNumbers * sizeof(at::BFloat16);

  __m512i lines[4];

  TWOSTEP_INLINE void store(uint8_t* to) const {
    unroll<4>([&](auto i) TWOSTEP_INLINE { _mm512_store_si512(to + i * kLineBytes, lines[i]); });
  }
  TWOSTEP_INLINE static Expanded load(const uint8_t* from) {
    Expanded numbers;
    unroll<4>([&](auto i) TWOSTEP_INLINE { numbers.lines[i] = _mm512_load_si512(from + i * kLineBytes); });
    return numbers;
  }
};

using Frequencies = std::array<int64_t, 256>;

// Of byte_of(bits of a number), in the `size` numbers of the panel that holds a weight's columns from `first` to `end`,
// and zeros that fill it up.
template <class ByteOf>
Frequencies frequencies_of(const at::Tensor& weight, int64_t first, int64_t end, int64_t size, const ByteOf& byte_of) {
  const at::BFloat16* numbers = weight.const_data_ptr<at::BFloat16>();
  Frequencies frequencies{};
  for (int64_t i = first * weight.size(1); i < end * weight.size(1); ++i) ++frequencies[byte_of(numbers[i].x)];
  frequencies[0] += size - (end - first) * weight.size(1);
  return frequencies;
}

// The values below `limit`, the most frequent first.
inline std::array<uint8_t, 256> most_frequent(const Frequencies& frequencies, int64_t limit = 256) {
  std::array<uint8_t, 256> values;
  std::iota(values.begin(), values.end(), 0);
  std::stable_sort(values.begin(), values.begin() + limit,
                   [&](uint8_t a, uint8_t b) { return frequencies[a] > frequencies[b]; });
  return values;
}

}  // namespace twostep
