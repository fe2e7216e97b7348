// Rows of the KV cache with numbers of 8 or 4 bits: a key or a value of one token and head.
//
// The numbers are transformed (base/hadamard.h) and then rounded to levels, with one scale for each group of 32; the
// last group may have 16. What a row holds depends on its numbers alone. First come the levels: with 8 bits a byte
// each, with 4 bits a byte for two, in its low half a number of the group's first half and in its high half, both plus
// 8, the number as far into the second half. Then come the scales, in bfloat16, whose range no key leaves. The
// reference is engine/attention/kv_format.py: the same operations in the same order, so the same bytes.

#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "attention/problem.h"
#include "base/sizes.h"
#include "base/vec.h"

namespace twostep::attention {

template <int BITS>
struct Quantized {
  using Stored = uint8_t;
  static constexpr int64_t kGroup = 32, kSmallestGroup = 16, kScaleBytes = 2;

  static constexpr int64_t level_bytes(int64_t size) { return size * BITS / 8; }
  static constexpr int64_t row_bytes(int64_t size) {
    return level_bytes(size) + divide_up(size, kGroup) * kScaleBytes;
  }
  // Returns how many numbers a row of so many bytes has, 0 if there is no such row.
  static int64_t num_numbers(int64_t bytes) {
    constexpr int64_t kWhole = row_bytes(kGroup), kHalf = row_bytes(kSmallestGroup);
    const int64_t size = bytes / kWhole * kGroup + (bytes % kWhole == kHalf ? kSmallestGroup : 0);
    return row_bytes(size) == bytes ? size : 0;
  }

  static float scale(const uint8_t* row, int64_t size, int64_t group) {
    uint16_t upper_half;
    std::memcpy(&upper_half, row + level_bytes(size) + group * kScaleBytes, sizeof(upper_half));
    const uint32_t bits = uint32_t{upper_half} << 16;
    float scale;
    std::memcpy(&scale, &bits, sizeof(scale));
    return scale;
  }
};

// ---- Reading --------------------------------------------------------------------------------------------------------

typedef int8_t Bytes __attribute__((vector_size(kLanes)));
typedef int8_t PartB __attribute__((vector_size(kPartLanes)));

inline PartF widened(PartB bytes) {
#if defined(__AVX512F__)
  return (PartF)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32((__m128i)bytes));
#elif defined(__AVX2__) && defined(__FMA__)
  return (PartF)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(__m128i{(long long)bytes, 0}));
#else
  return __builtin_convertvector(bytes, PartF);
#endif
}

// The levels of the sixteen numbers of a row from `column` on, a multiple of 16.
inline Vec load_levels(Quantized<8>, const uint8_t* row, int64_t /*size*/, int64_t column) {
  return each_part([&](int i) {
    PartB part;
    std::memcpy(&part, row + column + i * kPartLanes, sizeof(part));
    return widened(part);
  });
}

inline Vec load_levels(Quantized<4>, const uint8_t* row, int64_t size, int64_t column) {
  typedef uint64_t Halves __attribute__((vector_size(kLanes)));
  const int64_t group = column / 32 * 32, shift = column == group ? 0 : 4;
  Halves pairs;
  if (size - group >= 32) {
    std::memcpy(&pairs, row + group / 2, sizeof(pairs));
    pairs >>= shift;
  } else {
    uint64_t eight;
    std::memcpy(&eight, row + group / 2, sizeof(eight));
    pairs = Halves{eight, eight >> 4};
  }
  const Bytes levels = (Bytes)(pairs & 0x0f0f0f0f0f0f0f0f) - 8;
  return each_part([&](int i) {
    PartB part;
    std::memcpy(&part, (const char*)&levels + i * kPartLanes, sizeof(part));
    return widened(part);
  });
}

// Sixteen rows: the scales of the group of this even number, and of the next one, if there is one.
template <int BITS>
TWOSTEP_INLINE inline void load_two_scales(Quantized<BITS>, const SixteenRows<uint8_t>& rows, int64_t size,
                                           int64_t group, Vec (&scales)[2]) {
  using Format = Quantized<BITS>;
  const int64_t offset = Format::level_bytes(size) + group * Format::kScaleBytes;
  const bool is_last = (group + 1) * Format::kGroup >= size;
  alignas(64) uint32_t words[kLanes] = {};  // two scales each
  for (int i = 0; i < kLanes; ++i)
    is_last ? std::memcpy(&words[i], rows[i] + offset, 2) : std::memcpy(&words[i], rows[i] + offset, 4);
  const Vec pairs = load(reinterpret_cast<const float*>(words));
  scales[0] = each_part([&](int i) { return (PartF)((PartU)pairs.part[i] << 16); });
  scales[1] = each_part([&](int i) { return (PartF)((PartU)pairs.part[i] & 0xffff0000u); });
}

// Sixteen rows: calls f(group, scales) for each group.
template <int BITS, class F>
TWOSTEP_INLINE inline void for_each_scale(Quantized<BITS> format, const SixteenRows<uint8_t>& rows, int64_t size, F f) {
  const int64_t num_groups = divide_up(size, format.kGroup);
  for (int64_t group = 0; group < num_groups; group += 2) {
    Vec scales[2];
    load_two_scales(format, rows, size, group, scales);
    f(group, scales[0]);
    if (group + 1 < num_groups) f(group + 1, scales[1]);
  }
}

// Sixteen keys: calls begin(group, count) for each group of their numbers, then f(number, word) for its words, 32 bits
// of each key; `number` is that of the word's lowest bits.
template <int BITS, class Begin, class F>
TWOSTEP_INLINE inline void for_each_word(Quantized<BITS>, const SixteenRows<uint8_t>& rows, int64_t size, Begin begin,
                                         F f) {
  using Format = Quantized<BITS>;
  for (int64_t group = 0; group < size; group += Format::kGroup) {
    const int64_t count = std::min(Format::kGroup, size - group), num_words = Format::level_bytes(count) / 4;
    begin(group, count);
    for (int64_t first = 0; first < num_words; first += 4) {
      const int64_t num = std::min<int64_t>(4, num_words - first);
      const auto words = [&](int key) {
        Quad quad{};
        const uint8_t* source = rows[key] + Format::level_bytes(group) + 4 * first;
        num == 4 ? std::memcpy(&quad, source, 16) : std::memcpy(&quad, source, 8);
        return quad;
      };
      Vec v[4];
#pragma GCC unroll 4
      for (int r = 0; r < 4; ++r) v[r] = concatenate(words(r), words(4 + r), words(8 + r), words(12 + r));
      transpose_quarters(v);
#pragma GCC unroll 4
      for (int r = 0; r < 4; ++r)
        if (r < num) f(group + 4 * (first + r), v[r]);
    }
  }
}

// ---- Writing --------------------------------------------------------------------------------------------------------

// Numbers below 2**-100 become zero: their inverse would leave the range of a float32.
constexpr float kSmallestScale = 7.8886090522101181e-31f;

// The largest level times a scale is about the number farthest from zero. Of these parts of it the one is taken with
// which a group has the least square error, the first of equal ones.
template <int BITS>
constexpr float kScaleParts[4] = {-1 / 128.0f, -1 / 127.0f, -1 / 126.0f, -1 / 125.0f};
template <>
constexpr float kScaleParts<4>[4] = {-1 / 8.0f, -1 / 7.5f, -1 / 8.5f, -1 / 9.0f};

struct Group {
  Vec part[2];  // of 16 numbers, the second may be zeros
};

inline float fold_add(const Group& group) { return fold_add(group.part[0] + group.part[1]); }

template <class F>
inline Group each_half(F f) {
  return {{f(0), f(1)}};
}

// Levels of a group of finite numbers, as floats.
template <int BITS>
inline Group to_levels(const Group& numbers, float scale) {
  const Vec inverse = broadcast(scale == 0.0f ? 0.0f : 1.0f / scale), shift = broadcast(12582912.0f);
  const Vec most = broadcast((1 << (BITS - 1)) - 1), least = broadcast(-(1 << (BITS - 1)));
  return each_half([&](int i) {
    const Vec level = (numbers.part[i] * inverse + shift) - shift;  // the nearest integer
    return max(where_less(most, level, most, level), least);
  });
}

// The nearest bfloat16 to a finite number, or zero.
inline float rounded_scale(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof(bits));
  bits = (bits + 0x7fffu + (bits >> 16 & 1u)) & 0xffff0000u;
  std::memcpy(&x, &bits, sizeof(bits));
  return -kSmallestScale < x && x < kSmallestScale ? 0.0f : x;
}

// Returns the number that is farthest from zero, the negative one of two.
inline float farthest(const Group& numbers) {
  const float high = fold_max(max(numbers.part[0], numbers.part[1]));
  const float low = -fold_max(max(Vec{} - numbers.part[0], Vec{} - numbers.part[1]));
  return high > -low ? high : low;
}

// Returns the scale of a group, and sets its levels.
template <int BITS>
inline float round_group(const Group& numbers, Group& levels) {
  const float largest = farthest(numbers);
  float best_scale = 0.0f, best_error = 0.0f;
  for (int i = 0; i < 4; ++i) {
    const float scale = rounded_scale(largest * kScaleParts<BITS>[i]);
    const Group candidate = to_levels<BITS>(numbers, scale);
    const float error = fold_add(each_half([&](int half) {
      const Vec difference = candidate.part[half] * broadcast(scale) - numbers.part[half];
      return difference * difference;
    }));
    if (i == 0 || error < best_error) best_scale = scale, best_error = error, levels = candidate;
  }
  return best_scale;
}

// Writes transformed numbers, as many as whole groups have, into a row. A group with a number that is not finite gets
// the scale NaN.
template <int BITS>
inline void write_row(const float* numbers, int64_t size, uint8_t* row) {
  using Format = Quantized<BITS>;
  for (int64_t first = 0; first < size; first += Format::kGroup) {
    const int64_t count = std::min(Format::kGroup, size - first);
    const Group group{{load(numbers + first), count == Format::kGroup ? load(numbers + first + kLanes) : Vec{}}};
    Group levels{};
    uint16_t scale_bits = 0x7fc0;
    if (fold_add(each_half([&](int i) { return group.part[i] - group.part[i]; })) == 0.0f) {
      const float scale = round_group<BITS>(group, levels);
      uint32_t bits;
      std::memcpy(&bits, &scale, sizeof(bits));
      scale_bits = uint16_t(bits >> 16);
    }
    alignas(64) float integers[Format::kGroup];
    store(integers, levels.part[0]), store(integers + kLanes, levels.part[1]);
    uint8_t* target = row + Format::level_bytes(first);
    for (int64_t i = 0; i < Format::level_bytes(count); ++i) {
      if constexpr (BITS == 8) {
        target[i] = uint8_t(int8_t(integers[i]));
      } else {
        target[i] = uint8_t(int(integers[i]) + 8 + ((int(integers[i + count / 2]) + 8) << 4));
      }
    }
    std::memcpy(row + Format::level_bytes(size) + first / Format::kGroup * Format::kScaleBytes, &scale_bits,
                sizeof(scale_bits));
  }
}

}  // namespace twostep::attention
