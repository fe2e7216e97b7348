// Quantized keys and values as the operands of AMX tiles: each number, its level times its scale, rounded to bfloat16.
//
// Packing is much of what decode computes, so numbers are rounded and paired in as few instructions as the CPU has for
// it: two vectors become one of 32 bfloat16, of which one permutation makes sixteen pairs.

#pragma once

#include "attention/quantized_rows.h"

#if defined(__AMX_BF16__)

#include <immintrin.h>

#include <algorithm>
#include <cstdint>
#include <cstring>

namespace twostep::attention {

// The numbers 0, 16, 1, 17, ... of 32: pairs of those of two vectors that were rounded into one.
inline __m512i of_both_halves() {
  alignas(64) static constexpr uint16_t kOrder[32] = {0,  16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
                                                      8,  24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
  return _mm512_load_si512(kOrder);
}

// Lane by lane (even, odd), each rounded to bfloat16.
inline __m512i rounded_pairs(__m512 even, __m512 odd) {
  return _mm512_permutexvar_epi16(of_both_halves(), (__m512i)_mm512_cvtne2ps_pbh(odd, even));
}

// ---- Keys: sixteen of them, with a key in each lane -----------------------------------------------------------------

// Calls put(number, pairs) for every two numbers of a word, `number` even.
template <class Put>
TWOSTEP_INLINE inline void unpack_word(Quantized<8>, int64_t number, int64_t /*half*/, __m512i word, __m512 scale,
                                       Put put) {
  // A level in the uppermost byte of an integer is 2 ** 24 levels.
  const __m512 fraction = _mm512_mul_ps(scale, _mm512_set1_ps(0x1p-24f));
  const auto times = [&](__m512i levels) { return _mm512_mul_ps(_mm512_cvtepi32_ps(levels), fraction); };
  const __m512i second = _mm512_set4_epi32(0x0dffffff, 0x09ffffff, 0x05ffffff, 0x01ffffff);
  const __m512i third = _mm512_set4_epi32(0x0effffff, 0x0affffff, 0x06ffffff, 0x02ffffff);
  put(number, rounded_pairs(times(_mm512_slli_epi32(word, 24)), times(_mm512_shuffle_epi8(word, second))));
  put(number + 2, rounded_pairs(times(_mm512_shuffle_epi8(word, third)),
                                times(_mm512_and_si512(word, _mm512_set1_epi32(int(0xff000000))))));
}

// The numbers -8 to 7: a permutation by a level's bits, the lowest four of a lane, finds the level.
inline __m512 all_levels() {
  return _mm512_setr_ps(-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7);
}

template <class Put>
TWOSTEP_INLINE inline void unpack_word(Quantized<4>, int64_t number, int64_t half, __m512i word, __m512 scale,
                                       Put put) {
  const __m512 table = all_levels();
  const auto times = [&](int shift) TWOSTEP_INLINE {
    return _mm512_mul_ps(_mm512_permutexvar_ps(_mm512_srli_epi32(word, shift), table), scale);
  };
  put(number, rounded_pairs(times(0), times(8)));
  put(number + 2, rounded_pairs(times(16), times(24)));
  put(number + half, rounded_pairs(times(4), times(12)));
  put(number + half + 2, rounded_pairs(times(20), times(28)));
}

// The keys become columns of target [head_size / 2][row_words].
template <int BITS>
inline void pack_sixteen_keys(Quantized<BITS> format, const SixteenRows<uint8_t>& rows, int64_t head_size,
                              int64_t row_words, float* target) {
  constexpr int64_t kGroupsAtOnce = 2;  // for_each_scale reads so many scales at a time
  Vec scales[kGroupsAtOnce], scale{};
  int64_t half = 0;
  const auto begin = [&](int64_t group, int64_t count) TWOSTEP_INLINE {
    const int64_t index = group / format.kGroup;
    if (index % kGroupsAtOnce == 0) load_two_scales(format, rows, head_size, index, scales);
    half = count / 2, scale = scales[index % kGroupsAtOnce];
  };
  for_each_word(format, rows, head_size, begin, [&](int64_t number, Vec word) TWOSTEP_INLINE {
    unpack_word(format, number, half, (__m512i)word.part[0], (__m512)scale.part[0],
                [&](int64_t first, __m512i pairs)
                    TWOSTEP_INLINE { _mm512_storeu_si512(target + first / 2 * row_words, pairs); });
  });
}

// ---- Values: pairs of two keys, with a column in each lane ----------------------------------------------------------

template <int BITS>
inline __m512 scale_of(Quantized<BITS> format, const uint8_t* row, int64_t row_numbers, int64_t group) {
  return _mm512_set1_ps(format.scale(row, row_numbers, group));
}

// target[column] = the pair (even[column], odd[column]), with zeros for an odd value that is not.
inline void pack_two_values(Quantized<8> format, const uint8_t* even, const uint8_t* odd, bool has_odd,
                            int64_t row_numbers, int64_t value_size, float* target) {
  for (int64_t first = 0; first < value_size; first += format.kGroup) {
    const int64_t group = first / format.kGroup, end = std::min(value_size, first + format.kGroup);
    const __m512 even_scale = scale_of(format, even, row_numbers, group);
    const __m512 odd_scale = has_odd ? scale_of(format, odd, row_numbers, group) : _mm512_setzero_ps();
    for (int64_t column = first; column < end; column += kLanes) {
      const auto levels = [&](const uint8_t* row) {
        return _mm512_cvtepi32_ps(
            _mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(row + column))));
      };
      const __m512 a = _mm512_mul_ps(levels(even), even_scale), b = _mm512_mul_ps(levels(odd), odd_scale);
      _mm512_storeu_si512(target + column, rounded_pairs(a, b));
    }
  }
}

// A group's sixteen possible numbers are rounded, those of both values, and then found by their levels.
inline void pack_two_values(Quantized<4> format, const uint8_t* even, const uint8_t* odd, bool has_odd,
                            int64_t row_numbers, int64_t value_size, float* target) {
  const __m512i mask = _mm512_set1_epi32(0x000f000f), of_odd = _mm512_set1_epi32(0x00100000);
  for (int64_t first = 0; first < value_size; first += format.kGroup) {
    const int64_t group = first / format.kGroup;
    const bool is_whole = value_size - first >= format.kGroup;
    const __m512 even_scale = scale_of(format, even, row_numbers, group);
    const __m512 odd_scale = has_odd ? scale_of(format, odd, row_numbers, group) : _mm512_setzero_ps();
    const __m512i table = (__m512i)_mm512_cvtne2ps_pbh(_mm512_mul_ps(all_levels(), odd_scale),
                                                       _mm512_mul_ps(all_levels(), even_scale));
    const auto bytes = [&](const uint8_t* row) {
      const auto* source = reinterpret_cast<const __m128i*>(row + first / 2);
      return _mm512_cvtepu8_epi32(is_whole ? _mm_loadu_si128(source) : _mm_loadl_epi64(source));
    };
    const __m512i both = _mm512_or_si512(bytes(even), _mm512_slli_epi32(bytes(odd), 16));
    const auto numbers = [&](__m512i levels) {
      return _mm512_permutexvar_epi16(_mm512_or_si512(_mm512_and_si512(levels, mask), of_odd), table);
    };
    const __m512i low = numbers(both), high = numbers(_mm512_srli_epi32(both, 4));
    const __mmask16 lanes = is_whole ? 0xffff : 0x00ff;
    _mm512_mask_storeu_epi32(target + first, lanes, low);
    _mm512_mask_storeu_epi32(target + first + (is_whole ? kLanes : kLanes / 2), lanes, high);
  }
}

}  // namespace twostep::attention

#endif  // __AMX_BF16__
