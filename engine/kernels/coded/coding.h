// What both codings of bfloat16 weights share: the frequencies of the byte that a table codes, and expanded numbers.

#pragma once

#include <immintrin.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <numeric>
#include <optional>
#include <vector>

#include "base/bfloat16.h"
#include "base/prefetch.h"
#include "base/tensor.h"
#include "base/thread_pool.h"
#include "base/vec.h"

namespace twostep {

#if defined(__AVX512BW__)
using ByteVector = __m512i;
constexpr int kExpandedVectors = 4;
#else
using ByteVector = __m256i;
constexpr int kExpandedVectors = 2;
#endif

struct Expanded {
  static constexpr int64_t kBytes = kExpandedVectors * sizeof(ByteVector), kNumbers = kBytes / sizeof(BFloat16);

  ByteVector vectors[kExpandedVectors];

  TWOSTEP_INLINE void store(uint8_t* to) const {
    unroll<kExpandedVectors>([&](auto i) TWOSTEP_INLINE {
      std::memcpy(to + i * sizeof(ByteVector), &vectors[i], sizeof(ByteVector));
    });
  }
  TWOSTEP_INLINE static Expanded load(const uint8_t* from) {
    Expanded numbers;
    unroll<kExpandedVectors>([&](auto i) TWOSTEP_INLINE {
      std::memcpy(&numbers.vectors[i], from + i * sizeof(ByteVector), sizeof(ByteVector));
    });
    return numbers;
  }
};

using Frequencies = std::array<int64_t, 256>;

// Makes a coder for each panel of a weight from the frequencies of byte_of(bits of a number) among its `size` numbers,
// with those of the zero padding.
template <class PanelCoder, class ByteOf>
std::vector<std::optional<PanelCoder>> coders_of(const Tensor& weight, int64_t columns, int64_t size,
                                                 const ByteOf& byte_of) {
  const int64_t n = weight.size(0), k = weight.size(1);
  const BFloat16* numbers = weight.const_data_ptr<BFloat16>();
  std::vector<std::optional<PanelCoder>> coders(divide_up(n, columns));
  run_tasks(coders.size(), false, [&](int64_t panel) {
    const int64_t begin = panel * columns * k, end = std::min((panel + 1) * columns, n) * k;
    Frequencies frequencies{};
    for (int64_t i = begin; i < end; ++i) ++frequencies[byte_of(numbers[i].bits)];
    frequencies[0] += size - (end - begin);
    coders[panel].emplace(frequencies);
  });
  return coders;
}

// Returns the values below `limit`, the most frequent first.
inline std::array<uint8_t, 256> most_frequent(const Frequencies& frequencies, int64_t limit = 256) {
  std::array<uint8_t, 256> values;
  std::iota(values.begin(), values.end(), 0);
  std::stable_sort(values.begin(), values.begin() + limit,
                   [&](uint8_t a, uint8_t b) { return frequencies[a] > frequencies[b]; });
  return values;
}

}  // namespace twostep
