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

#include "linear_integers.h"

namespace twostep::int4 {

using integers::Bytes;

constexpr int64_t kStep = integers::kStep, kSubgroup = 32;
constexpr int64_t kCodeBytes = kLanes * kStep / 2, kTileBytes = integers::kWordBytes + kCodeBytes;
constexpr int64_t kLines = kCodeBytes / kLineBytes;  // a line has eight along K

// Codes of one tile, in one of the two subgroups of a step, to integers. One product of 16 bits makes two of 8: a code
// times its multiplier is below 256.
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
  typedef uint16_t PartS __attribute__((vector_size(4 * kPartLanes)));
  using PartB = integers::PartB;

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

struct Weight {
  using Precision = integers::EightBits;
  using Dots = integers::Dots;
  static constexpr int64_t kHeaderBytes = 0, kStepBytes = 2 * kTileBytes;
  static constexpr int kRowsAtOnce = 8;

  // What a group adds to the sums of one tile.
  class Scales {
   public:
    Scales(const uint8_t* group, int64_t tile) : scales_(integers::upper_numbers(group + tile * kTileBytes)) {}
    Vec add(Vec sums, Vec dots, float row_scale, int32_t /*row_sum*/) const {
      return fma(broadcast(row_scale), dots * scales_, sums);
    }

   private:
    Vec scales_;
  };

  static Dots first_dots(int32_t row_sum) { return integers::first_sums(row_sum); }
  static const Dots& total(const Dots& dots) { return dots; }

  // dots += rows [row, row + kRows) of a tile times one step of a panel; ask(line) comes with each of its lines.
  template <int kRows, class Ask>
  TWOSTEP_INLINE static void multiply_step(const int8_t* numbers, int64_t row, const uint8_t* at,
                                           Dots (&dots)[kRows][2], const Ask& ask) {
    unroll<2>([&](auto tile) TWOSTEP_INLINE {
      ask(at);
      const uint8_t* codes = at + integers::kWordBytes;
      for (int64_t subgroup = 0; subgroup < 2; ++subgroup) {
        const Expander expander(at, subgroup, integers::kOffset);
        for (int64_t line = 0; line < kLines / 2; ++line, codes += kLineBytes) {
          ask(codes);
          const Bytes bytes = integers::load_bytes(codes), low = expander.low(bytes), high = expander.high(bytes);
          unroll<kRows>([&](auto r) TWOSTEP_INLINE {
            const int8_t* x = Precision::find(numbers, row + r, subgroup * kSubgroup + line * 8);
            dots[r][tile] = integers::add_products(dots[r][tile], low, x);
            dots[r][tile] = integers::add_products(dots[r][tile], high, x + 4);
          });
        }
      }
      at += kTileBytes;
    });
  }
};

}  // namespace twostep::int4
