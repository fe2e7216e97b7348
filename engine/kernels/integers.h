// Rows as 8-bit integers, and their products with others: sums that are exact, so the same in any order and on any unit
// that adds integers.
//
// A row's numbers share a scale in groups of 256 along K: the largest of them becomes 127, or -127.

#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "linear.h"
#include "vec.h"

namespace twostep::integers {

constexpr int64_t kStep = 64;  // along K, of a tile
constexpr int64_t kGroupSteps = 4, kGroup = kGroupSteps * kStep;
constexpr int64_t kTileRows = 16;

// Tiles of 16 rows, a step of one tile side by side. What lies beyond the last row means nothing.
struct Rows {
  int64_t steps, groups;
  int8_t* numbers;  // [tiles][steps][16][64], zeros beyond K
  float* scales;    // [tiles][groups][16]
  int32_t* sums;    // [tiles][groups][16], each of a row's numbers in the group

  int8_t* numbers_of(int64_t tile, int64_t step) const { return numbers + (tile * steps + step) * kTileRows * kStep; }
  int64_t place(int64_t tile, int64_t group) const { return (tile * groups + group) * kTileRows; }
  int64_t steps_of(int64_t group) const { return std::min(kGroupSteps, steps - group * kGroupSteps); }
};

typedef uint8_t PartB __attribute__((vector_size(4 * kPartLanes)));
typedef int32_t PartI __attribute__((vector_size(4 * kPartLanes)));

// Sixteen columns times four along K.
struct Bytes {
  PartB part[kParts];
};

// Sixteen columns.
struct Dots {
  PartI part[kParts];
};

inline Vec to_floats(const Dots& dots) {
  return each_part([&](int i) { return __builtin_convertvector(dots.part[i], PartF); });
}

// The low bytes of sixteen integers.
inline void store_low_bytes(int8_t* to, const Dots& integers) {
  typedef int8_t PartB __attribute__((vector_size(kPartLanes)));
  unroll<kParts>([&](auto i) {
    const PartB bytes = __builtin_convertvector(integers.part[i], PartB);
    std::memcpy(to + i * kPartLanes, &bytes, sizeof(bytes));
  });
}

template <class Element>
Vec load_up_to(const Element* row, int64_t start, int64_t end) {
  if (start + kLanes <= end) return load(row + start);
  return start < end ? load_first(row + start, end - start) : Vec{};
}

// The larger magnitude of each lane: its bits, as an integer. Those of what is not finite are larger than all others.
inline Dots larger(Dots largest, Vec x) {
  unroll<kParts>([&](auto i) {
    const PartI magnitude = (PartI)x.part[i] & 0x7fffffff;
    largest.part[i] = magnitude > largest.part[i] ? magnitude : largest.part[i];
  });
  return largest;
}

inline float fold_larger(const Dots& magnitudes) {
  typedef int32_t QuadI __attribute__((vector_size(16)));
  return fold(each_part([&](int i) { return (PartF)magnitudes.part[i]; }),
              [](Quad a, Quad b) { return (QuadI)a > (QuadI)b ? a : b; });
}

// Numbers [start, end) of a row, which are followed by zeros up to a whole step -> their integers, scale and sum; a scale
// of NaN where one of them is not finite. `to` takes the integers of a step, the next step's are kTileRows * kStep on.
template <class Element>
void round_group(const Element* row, int64_t start, int64_t end, int8_t* to, float* scale, int32_t* sum) {
  const Vec shift = broadcast(12582912.0f);  // as in exp_nonpositive
  Dots largest{}, total{};
  for (int64_t k = start; k < end; k += kLanes) largest = larger(largest, load_up_to(row, k, end));
  const float most = fold_larger(largest);
  const Vec factor = broadcast(most > 1e-36f ? 127.0f / most : 0.0f);  // no reciprocal that overflows
  for (int64_t k = start; k < start + divide_up(end - start, kStep) * kStep; k += kLanes) {
    const Vec shifted = load_up_to(row, k, end) * factor + shift;
    Dots numbers;
    unroll<kParts>([&](auto i) {
      numbers.part[i] = (PartI)shifted.part[i] - (PartI)shift.part[i];
      total.part[i] += numbers.part[i];
    });
    store_low_bytes(to + (k - start) / kStep * kTileRows * kStep + k % kStep, numbers);
  }
  *scale = most / 127.0f + (most - most);
  *sum = int32_t(fold_add(to_floats(total)));
}

template <class Element>
void round_row(const Element* row, int64_t k, const Rows& rows, int64_t index) {
  const int64_t tile = index / kTileRows, row_of_tile = index % kTileRows;
  for (int64_t group = 0; group < rows.groups; ++group) {
    const int64_t start = group * kGroup, at = rows.place(tile, group) + row_of_tile;
    round_group(row, start, std::min(start + kGroup, k), rows.numbers_of(tile, group * kGroupSteps) + row_of_tile * kStep,
                rows.scales + at, rows.sums + at);
  }
}

// The problem's rows, in memory that the calling thread keeps for its next call.
template <class Element>
Rows round_rows(const Problem<Element>& p) {
  static thread_local Scratch<int8_t> numbers;
  static thread_local Scratch<float> scales;
  static thread_local Scratch<int32_t> sums;
  const int64_t steps = divide_up(p.k, kStep), groups = divide_up(p.k, kGroup);
  const int64_t rows = divide_up(p.rows, kTileRows) * kTileRows;
  const Rows rounded{steps, groups, numbers.get(rows * steps * kStep), scales.get(rows * groups), sums.get(rows * groups)};
  run_tasks(p.rows, p.rows * p.k < 1 << 15, [&](int64_t i) { round_row(p.x + i * p.k, p.k, rounded, i); });
  return rounded;
}

inline Bytes load_bytes(const uint8_t* from) {
  Bytes bytes;
  std::memcpy(&bytes, from, sizeof(bytes));
  return bytes;
}

// What is added to the bytes of a weight, from -127 to 127, to make them what add_products takes.
#if defined(__AVX512VNNI__)
constexpr int32_t kOffset = 128;
#else
constexpr int32_t kOffset = 0;
#endif

// sum + (weights + kOffset) * x, four products per lane.
inline PartI add_products(PartI sum, PartB weights, const int8_t* x) {
  [[maybe_unused]] int32_t four;
  std::memcpy(&four, x, sizeof(four));
#if defined(__AVX512VNNI__)
  return (PartI)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)weights, _mm512_set1_epi32(four));
#elif defined(__AVX512BW__)
  // The weight's sign goes to x: two products of its magnitude fit in 16 bits.
  const __m512i w = (__m512i)weights, fours = _mm512_set1_epi32(four);
  const __m512i signed_x = _mm512_mask_sub_epi8(fours, _mm512_movepi8_mask(w), _mm512_setzero_si512(), fours);
  const __m512i pairs = _mm512_maddubs_epi16(_mm512_abs_epi8(w), signed_x);
  return sum + (PartI)_mm512_madd_epi16(pairs, _mm512_set1_epi16(1));
#elif defined(__AVX2__) && defined(__FMA__)
  const __m256i w = (__m256i)weights, signed_x = _mm256_sign_epi8(_mm256_set1_epi32(four), w);
  const __m256i pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(w), signed_x);
  return sum + (PartI)_mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
#elif defined(__ARM_FEATURE_DOTPROD)
  return (PartI)vdotq_s32((int32x4_t)sum, (int8x16_t)weights, vreinterpretq_s8_s32(vdupq_n_s32(four)));
#else
  for (int lane = 0; lane < kPartLanes; ++lane) {
    for (int i = 0; i < 4; ++i) sum[lane] += int8_t(weights[4 * lane + i]) * x[i];
  }
  return sum;
#endif
}

inline Dots add_products(Dots sums, const Bytes& weights, const int8_t* x) {
  unroll<kParts>([&](auto i) { sums.part[i] = add_products(sums.part[i], weights.part[i], x); });
  return sums;
}

// Sums that take back what kOffset will add, for a row's numbers of that sum.
inline Dots first_sums(int32_t row_sum) {
  Dots dots;
  unroll<kParts>([&](auto i) { dots.part[i] = PartI{} - kOffset * row_sum; });
  return dots;
}

}  // namespace twostep::integers
