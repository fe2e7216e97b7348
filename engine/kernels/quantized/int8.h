// Weights of 8 bits, minimum + scale * code, with one scale and minimum per column and 256 along K. Such a group adds
// row_scale * (scale * dot + minimum * row_sum) to an output. Codes are multiplied straight from packed memory.
//
// A panel's group is a word per column, the scale in its upper half and the minimum in its lower, then for each step
// and tile bytes of four along K for each column.

#pragma once

#include <cstdint>

#include "quantized/vector.h"

namespace twostep::int8 {

using integers::kWordBytes;

// A weight for rows of that precision, so many at once.
template <class RowPrecision, class RowDots, int kRowsOfPass>
struct WeightFor {
  using Precision = RowPrecision;
  using Dots = RowDots;
  static constexpr int64_t kHeaderBytes = 2 * kWordBytes, kStepBytes = 2 * integers::kTileBytes;
  static constexpr int64_t kPrefetches = kStepBytes / kLineBytes;  // per step
  static constexpr int kRowsAtOnce = kRowsOfPass;

  // Adds a group's dot products to the sums of one tile.
  class Scales {
   public:
    Scales(const uint8_t* group, int64_t tile)
        : scales_(integers::upper_numbers(group + tile * kWordBytes)),
          minimums_(lower_numbers(group + tile * kWordBytes)) {}
    Vec add(Vec sums, Vec dots, float row_scale, typename Precision::Sum row_sum) const {
      return fma(broadcast(row_scale), fma(dots, scales_, minimums_ * broadcast(float(row_sum))), sums);
    }

   private:
    static Vec lower_numbers(const uint8_t* header) {
      return each_part([&](int i) { return (PartF)(integers::load_words(header, i) << 16); });
    }

    Vec scales_, minimums_;
  };

  static Dots first_dots(typename Precision::Sum row_sum) { return Dots::first(row_sum); }
  static integers::Dots total(const Dots& dots) { return dots.total(); }

  // dots += kRows rows times one step of a panel; calls prefetch(line) with each of its lines.
  template <int kRows, class Prefetch>
  TWOSTEP_INLINE static void multiply_step(const integers::RowsOfStep& rows, const uint8_t* at, Dots (&dots)[kRows][2],
                                           const Prefetch& prefetch) {
    integers::multiply_bytes<Precision, kRows>(rows, at, integers::kTileBytes, dots, prefetch);
  }
};

using Weight = WeightFor<integers::EightBits, integers::CodeDots, 8>;
using WeightForWideRows = WeightFor<integers::SixteenBits, integers::WideDots, 6>;

}  // namespace twostep::int8
