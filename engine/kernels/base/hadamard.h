// The Hadamard transform of rows. Its reference is engine/weights/hadamard.py: the same operations
// in the same order, so the same bits.

#pragma once

#include <bit>
#include <cstdint>
#include <type_traits>
#include <utility>

#include "base/vec.h"

namespace twostep::hadamard {

constexpr int64_t kSmallestBlock = 64, kLargestBlock = 256;  // of weights: numbers that are transformed together

// Replaces two lanes that are kDistance apart by their sum and their difference (first minus second).
template <int kDistance>
inline Vec sums_and_differences(Vec v) {
  if constexpr (kDistance >= kPartLanes) {
    constexpr int kBetween = kDistance / kPartLanes;
    return each_part([&](int i) {
      const PartF other = v.part[i ^ kBetween];
      return i & kBetween ? other - v.part[i] : v.part[i] + other;
    });
  } else {
    return [&]<int... I>(std::integer_sequence<int, I...>) {
      constexpr PartF kSigns = {(I & kDistance ? -1.0f : 1.0f)...};
      return each_part([&](int i) {
        const PartF other = __builtin_shufflevector(v.part[i], v.part[i], (I ^ kDistance)...);
        return fma_part(v.part[i], kSigns, other);  // exact products
      });
    }(std::make_integer_sequence<int, kPartLanes>{});
  }
}

constexpr bool is_flipped(int number) { return std::popcount(unsigned(number & number >> 1 & 0x55)) % 2; }

// Loads sixteen numbers of a block, of which some change their signs.
template <int kFirst>
inline Vec flipped(Vec v) {
  return [&]<int... I>(std::integer_sequence<int, I...>) {
    alignas(64) static constexpr float kSigns[] = {(is_flipped(kFirst + I) ? -1.0f : 1.0f)...};
    return v * load(kSigns);
  }(std::make_integer_sequence<int, kLanes>{});
}

template <int kVectors>
TWOSTEP_INLINE inline void add_and_subtract(Vec (&v)[kVectors]) {
  unroll<kVectors>([&](auto i) TWOSTEP_INLINE {
    v[i] = sums_and_differences<2>(sums_and_differences<1>(v[i]));
    v[i] = sums_and_differences<8>(sums_and_differences<4>(v[i]));
  });
  unroll<std::bit_width(unsigned(kVectors)) - 1>([&](auto stage) TWOSTEP_INLINE {
    unroll<kVectors>([&](auto i) TWOSTEP_INLINE {
      if constexpr (constexpr int kUpper = i | 1 << stage; kUpper != i) {
        const Vec low = v[i], high = v[kUpper];
        v[i] = low + high, v[kUpper] = low - high;
      }
    });
  });
}

template <int kVectors>
inline void transform_block(float* numbers) {
  Vec v[kVectors];
  unroll<kVectors>([&](auto i) { v[i] = flipped<i * kLanes>(load(numbers + i * kLanes)); });
  add_and_subtract(v);
  unroll<kVectors>([&](auto i) { store(numbers + i * kLanes, v[i]); });
}

template <int kVectors>
inline void undo_block(float* numbers) {
  Vec v[kVectors];
  unroll<kVectors>([&](auto i) { v[i] = load(numbers + i * kLanes); });
  add_and_subtract(v);
  const Vec scale = broadcast(1.0f / (kVectors * kLanes));
  unroll<kVectors>([&](auto i) { store(numbers + i * kLanes, flipped<i * kLanes>(v[i]) * scale); });
}

// Calls f(block, size) for the blocks of `count` numbers, a multiple of 16: as large as may be, in turn.
template <class F>
inline void for_each_block(float* numbers, int64_t count, F f) {
  const auto next = [&]<int kSize>(std::integral_constant<int, kSize> size) {
    f(numbers, size);
    numbers += kSize, count -= kSize;
  };
  while (count >= kLargestBlock) next(std::integral_constant<int, kLargestBlock>());
  if (count >= 128) next(std::integral_constant<int, 128>());
  if (count >= 64) next(std::integral_constant<int, 64>());
  if (count >= 32) next(std::integral_constant<int, 32>());
  if (count >= 16) next(std::integral_constant<int, 16>());
}

// Transforms numbers in place.
inline void transform(float* numbers, int64_t count) {
  for_each_block(numbers, count, [](float* block, auto size) { transform_block<size / kLanes>(block); });
}

// Transforms numbers in place such that products with numbers that `transform` has transformed stay the same.
inline void invert(float* numbers, int64_t count) {
  for_each_block(numbers, count, [](float* block, auto size) {
    transform_block<size / kLanes>(block);
    for (int i = 0; i < size; ++i) block[i] *= 1.0f / size;
  });
}

// Returns transformed numbers to what they were, but for rounding.
inline void undo(float* numbers, int64_t count) {
  for_each_block(numbers, count, [](float* block, auto size) { undo_block<size / kLanes>(block); });
}

}  // namespace twostep::hadamard
