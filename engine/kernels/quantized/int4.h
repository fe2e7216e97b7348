// Weights of 4 bits, for rows of 8:
//
//   scale * multiplier * (code - zero),
//
// with one scale per column and 256 along K, and one multiplier and zero of 4 bits each per 32; multiplier * (code -
// zero) is an integer from -127 to 127. A group of 256 adds row_scale * (dot * scale) to an output.
//
// A tile's step of 64 along K is a word per column, the scale in its upper half and below it zero and multiplier of
// both 32s, then the codes: bytes of four along K for each column, in their low halves, and in their high halves the
// four after them.

#pragma once

#include <cstdint>
#include <cstring>

#include "quantized/vector.h"

namespace twostep::int4 {

using integers::Bytes, integers::PartB, integers::PartI;
typedef uint16_t PartS __attribute__((vector_size(4 * kPartLanes)));

constexpr int64_t kStep = integers::kStep, kSubgroup = 32;
constexpr int64_t kCodeBytes = kLanes * kStep / 2, kTileBytes = integers::kWordBytes + kCodeBytes;
constexpr int64_t kLines = kCodeBytes / kLineBytes;  // a line has eight along K

// Turns codes of one tile, in one of the two subgroups of a step, to integers. One product of 16 bits makes two of 8: a
// code times its multiplier is below 256.
class Expander {
 public:
  Expander(const uint8_t* header, int64_t subgroup, uint32_t offset) {
    unroll<kParts>([&](auto i) {
      const PartU words = integers::load_words(header, i) >> (8 * subgroup), multipliers = words & 15;
      multipliers_.part[i] = (PartB)(multipliers * 0x00010001u);
      zeros_.part[i] = (PartB)(((multipliers * ((words >> 4) & 15) - offset) & 255) * 0x01010101u);
    });
  }

  Bytes low(const Bytes& codes) const { return expand(codes, [](PartB part) { return part & 15; }); }
  Bytes high(const Bytes& codes) const { return expand(codes, [](PartB part) { return part >> 4; }); }

 private:
  template <class Half>
  Bytes expand(const Bytes& codes, Half half) const {
    Bytes bytes;
    unroll<kParts>([&](auto i) {
      bytes.part[i] = (PartB)((PartS)half(codes.part[i]) * (PartS)multipliers_.part[i]) - zeros_.part[i];
    });
    return bytes;
  }

  Bytes multipliers_, zeros_;
};

// Expands the codes of a tile in one step to bytes, four along K for each column, and adds `offset`.
inline void expand_tile(const uint8_t* from, uint32_t offset, uint8_t* to) {
  prefetch_ahead(from);
  const uint8_t* codes = from + integers::kWordBytes;
  for (int64_t subgroup = 0; subgroup < 2; ++subgroup) {
    const Expander expander(from, subgroup, offset);
    for (int64_t line = 0; line < kLines / 2; ++line, codes += kLineBytes, to += 2 * kLineBytes) {
      prefetch_ahead(codes);
      const Bytes bytes = integers::load_bytes(codes), low = expander.low(bytes), high = expander.high(bytes);
      std::memcpy(to, &low, sizeof(low));
      std::memcpy(to + kLineBytes, &high, sizeof(high));
    }
  }
}

// Where pairs are added, rows are multiplied by codes without expanding them: as many as have registers for their sums.
#if defined(__AVX512F__) || !defined(__AVX2__)
constexpr int kRowsOfPass = 8;
#else
constexpr int kRowsOfPass = 4;
#endif

// The base of weights whose tiles take so many bytes in a step, of which the first are the header.
template <int64_t kBytes>
struct TilesOf {
  using Precision = integers::EightBits;
  using Dots = integers::Dots;
  static constexpr int64_t kHeaderBytes = 0, kStepBytes = 2 * kBytes;
  static constexpr int kRowsAtOnce = kRowsOfPass;

  // Adds a group's dot products to the sums of one tile.
  class Scales {
   public:
    Scales(const uint8_t* group, int64_t tile) : scales_(integers::upper_numbers(group + tile * kBytes)) {}
    Vec add(Vec sums, Vec dots, float row_scale, int32_t /*row_sum*/) const {
      return fma(broadcast(row_scale), dots * scales_, sums);
    }

   private:
    Vec scales_;
  };

  static Dots first_dots(int32_t row_sum) { return integers::first_sums(row_sum); }
  static const Dots& total(const Dots& dots) { return dots; }
};

constexpr int64_t kExpandedTileBytes = integers::kWordBytes + integers::kTileBytes;

// A weight that was expanded to bytes.
struct ExpandedWeight : TilesOf<kExpandedTileBytes> {
  static constexpr int64_t kPrefetches = 2 * integers::kTileBytes / kLineBytes;  // per step

  template <int kRows, class Prefetch>
  TWOSTEP_INLINE static void multiply_step(const integers::RowsOfStep& rows, const uint8_t* at, Dots (&dots)[kRows][2],
                                           const Prefetch& prefetch) {
    integers::multiply_bytes<Precision, kRows>(rows, at + integers::kWordBytes, kExpandedTileBytes, dots, prefetch);
  }
};

// So many rows at once are multiplied by codes directly, with fewer instructions than to expand them. Per subgroup
//
//   sum(multiplier * (code - zero) * x) = multiplier * sum(code * x) - multiplier * zero * sum(x).
constexpr int kRowsOfCodes = integers::kAddsPairs ? kRowsOfPass : 3;

// Turns the codes' products with a row into dot products, in a part of the columns of a tile's step.
class Levels {
 public:
  Levels(const uint8_t* header, int part) {
    const PartU words = integers::load_words(header, part);
    multipliers_[0] = (PartI)(words & 15), multipliers_[1] = (PartI)(words >> 8 & 15);
    const PartS zeros = (PartS)((words >> 4 & 15) | (words << 4 & 15 << 16));
    shifts_ = (PartI)((PartS)(multipliers_[0] | multipliers_[1] << 16) * zeros - uint16_t(integers::kOffset));
  }

  // Dot products of one of both subgroups.
  TWOSTEP_INLINE PartI times(const integers::CodeSums& products, int part, int subgroup) const {
    return products.times(part, multipliers_[subgroup]);
  }
  // Corrections for both subgroups, as kOffset is added to expanded bytes; `half_sums` are those of the row's numbers.
  TWOSTEP_INLINE PartI shift(int32_t half_sums) const { return integers::times_pairs(shifts_, PartI{} + half_sums); }

 private:
  PartI multipliers_[2], shifts_;
};

// Implements Weight::multiply_step for rows that are multiplied by codes directly.
template <int kRows, class Prefetch>
TWOSTEP_INLINE inline void multiply_codes(const integers::RowsOfStep& rows, const uint8_t* at,
                                          integers::Dots (&dots)[kRows][2], const Prefetch& prefetch) {
  const int8_t* first_x = integers::EightBits::find(rows.numbers, rows.row, 0);
  unroll<2>([&](auto tile) TWOSTEP_INLINE {
    const uint8_t *header = at + tile * kTileBytes, *codes = header + integers::kWordBytes;
    prefetch(header);
    unroll<2>([&](auto subgroup) TWOSTEP_INLINE {
      integers::CodeSums products[kRows];
      for (int64_t k = subgroup * kSubgroup; k < (subgroup + 1) * kSubgroup; k += 8, codes += kLineBytes) {
        prefetch(codes);
        const Bytes bytes = integers::load_bytes(codes);
        unroll<kRows>([&](auto r) TWOSTEP_INLINE {
          products[r].add_products(bytes, integers::EightBits::find(first_x, r, k));
        });
      }
      unroll<kParts>([&](auto part) TWOSTEP_INLINE {
        const Levels levels(header, part);
        unroll<kRows>([&](auto r) TWOSTEP_INLINE {
          PartI& sum = dots[r][tile].part[part];
          sum += levels.times(products[r], part, subgroup);
          if constexpr (subgroup == 1) sum -= levels.shift(rows.half_sums[rows.row + r]);
        });
      });
    });
  });
}

struct Weight : TilesOf<kTileBytes> {
  using Expanded = ExpandedWeight;
  static constexpr int64_t kPrefetches = kStepBytes / kLineBytes;  // per step
  // Passes over a panel up to which it is not expanded beforehand.
  static constexpr int64_t kMaxPasses = kRowsOfCodes == kRowsAtOnce ? integers::kRowsPerTask : 2;

  // Expands a panel, in memory that the calling thread keeps for its next one.
  static const uint8_t* expand(const uint8_t* panel, int64_t steps) {
    static thread_local Scratch<uint8_t> scratch;
    uint8_t* expanded = scratch.get(steps * Expanded::kStepBytes);
    for (int64_t tile = 0; tile < 2 * steps; ++tile, panel += kTileBytes) {
      uint8_t* to = expanded + tile * kExpandedTileBytes;
      std::memcpy(to, panel, integers::kWordBytes);
      expand_tile(panel, integers::kOffset, to + integers::kWordBytes);
    }
    return expanded;
  }

  // dots += kRows rows times one step of a panel; calls prefetch(line) with each of its lines.
  template <int kRows, class Prefetch>
  TWOSTEP_INLINE static void multiply_step(const integers::RowsOfStep& rows, const uint8_t* at, Dots (&dots)[kRows][2],
                                           const Prefetch& prefetch) {
    if constexpr (kRows <= kRowsOfCodes) return multiply_codes<kRows>(rows, at, dots, prefetch);
    integers::for_tiles_at_once<Prefetch>([&](auto tiles) TWOSTEP_INLINE {
      tiles([&](auto tile) TWOSTEP_INLINE { prefetch(at + tile * kTileBytes); });
      for (int64_t subgroup = 0; subgroup < 2; ++subgroup) {
        const Expander expanders[] = {{at, subgroup, integers::kOffset},
                                      {at + kTileBytes, subgroup, integers::kOffset}};
        for (int64_t line = 0; line < kLines / 2; ++line) {
          Bytes low[2], high[2];
          tiles([&](auto tile) TWOSTEP_INLINE {
            const uint8_t* codes = at + tile * kTileBytes + integers::kWordBytes;
            codes += (subgroup * kLines / 2 + line) * kLineBytes;
            prefetch(codes);
            const Bytes bytes = integers::load_bytes(codes);
            low[tile] = expanders[tile].low(bytes), high[tile] = expanders[tile].high(bytes);
          });
          const int8_t* first_x = Precision::find(rows.numbers, rows.row, subgroup * kSubgroup + line * 8);
          unroll<kRows>([&](auto r) TWOSTEP_INLINE {
            const int8_t* x = Precision::find(first_x, r, 0);
            tiles([&](auto tile) TWOSTEP_INLINE {
              dots[r][tile] = integers::add_products(dots[r][tile], low[tile], x);
              dots[r][tile] = integers::add_products(dots[r][tile], high[tile], x + 4);
            });
          });
        }
      }
    });
  }
};

}  // namespace twostep::int4
