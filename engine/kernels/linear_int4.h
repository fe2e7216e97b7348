// Linear layers over weights of 4 bits, whose rows are rounded to 8: integers are multiplied. A weight is
//
//   scale * multiplier * (code - zero),
//
// with one scale per column and 256 along K, and one multiplier and zero of 4 bits each per 32; multiplier * (code - zero)
// is an integer from -127 to 127. A group of 256 adds row_scale * (dot * scale) to an output, where the dot product of
// integers is exact whatever unit computes it. So every number of rows has the same bits: few rows go through the
// vector units, for which memory is slower than expanding codes into registers; many through AMX tiles, with little
// left to do for each of their sums.
//
// A panel is two tiles of 16 columns. A tile's step of 64 along K is a word per column, the scale in its upper half and
// below it zero and multiplier of both 32s, then the codes: bytes of four along K for each column, in their low halves,
// and in their high halves the four after them.

#pragma once

#include <cstdint>
#include <utility>

#include "activations.h"
#include "integers.h"
#include "linear.h"
#include "vec.h"

namespace twostep::int4 {

using integers::Bytes;
using integers::Rows;

constexpr int64_t kStep = integers::kStep, kSubgroup = 32;
constexpr int64_t kPanel = 2 * kLanes;
constexpr int64_t kHeaderBytes = kLanes * sizeof(uint32_t), kCodeBytes = kLanes * kStep / 2;
constexpr int64_t kTileBytes = kHeaderBytes + kCodeBytes, kStepBytes = 2 * kTileBytes;
constexpr int64_t kLineBytes = 64, kLines = kCodeBytes / kLineBytes;  // a line has eight along K

inline PartU load_words(const uint8_t* header, int part) {
  PartU words;
  std::memcpy(&words, header + part * sizeof(words), sizeof(words));
  return words;
}

// The scales of a tile's columns.
inline Vec scales_of(const uint8_t* header) {
  return each_part([&](int i) { return (PartF)(load_words(header, i) & 0xffff0000u); });
}

// What a group adds, for one row.
inline Vec add(Vec sums, Vec dots, Vec scales, Vec row_scale) { return fma(row_scale, dots * scales, sums); }

// Codes of one tile, in one of the two subgroups of a step, to integers. One product of 16 bits makes two of 8: a code
// times its multiplier is below 256.
class Expander {
 public:
  Expander(const uint8_t* header, int64_t subgroup, uint32_t offset) {
    unroll<kParts>([&](auto i) {
      const PartU words = load_words(header, i) >> (8 * subgroup), multipliers = words & 15;
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

// Finishes the sums of one panel: adds the bias, and rounds, or gates its upper tile with its lower.
template <class Element>
class PanelWriter {
 public:
  PanelWriter(const Problem<Element>& p, int64_t panel)
      : p_(p), first_(panel * kPanel), columns_(std::min(kPanel, p.n - first_)) {
    if (!p.bias) return;
    Element bias[kPanel] = {};
    std::copy_n(p.bias + first_, columns_, bias);
    bias_[0] = load(bias), bias_[1] = load(bias + kLanes);
  }

  void write(int64_t row, Vec low, Vec high) const {
    low = low + bias_[0], high = high + bias_[1];
    if (p_.activation != Activation::kNone) {
      return with_activation(p_.activation, [&]<class Op>() { write_gated<Op>(row, low, high); });
    }
    Element* out = p_.out + row * p_.n + first_;
    if (columns_ == kPanel) return store(out, low), store(out + kLanes, high);
    store_first(out, std::min<int64_t>(columns_, kLanes), low);
    if (columns_ > kLanes) store_first(out + kLanes, columns_ - kLanes, high);
  }

 private:
  template <class Op>
  void write_gated(int64_t row, Vec low, Vec high) const {
    Element gate[kLanes], up[kLanes], activated[kLanes];
    store(gate, low), store(up, high);
    store(activated, Op::apply(load(gate)));
    store(p_.out + row * p_.n / 2 + first_ / 2, load(activated) * load(up));
  }

  const Problem<Element>& p_;
  int64_t first_, columns_;
  Vec bias_[2] = {};
};

// Rows [row, row + kRows) of a tile of rows times one panel.
template <int kRows, class Element>
void multiply_panel(const Rows& rows, int64_t tile, int64_t row, const uint8_t* at, const PanelWriter<Element>& writer) {
  Vec sums[kRows][2] = {};
  for (int64_t group = 0; group < rows.groups; ++group) {
    const int64_t place = rows.place(tile, group) + row;
    integers::Dots dots[kRows][2];
    unroll<kRows>([&](auto r) { dots[r][0] = dots[r][1] = integers::first_sums(rows.sums[place + r]); });
    Vec scales[2];
    for (int64_t step = 0; step < rows.steps_of(group); ++step) {
      const int8_t* numbers = rows.numbers_of(tile, group * integers::kGroupSteps + step) + row * kStep;
      unroll<2>([&](auto half) {
        scales[half] = scales_of(at);
        ask_ahead(at);
        const uint8_t* codes = at + kHeaderBytes;
        for (int64_t subgroup = 0; subgroup < 2; ++subgroup) {
          const Expander expander(at, subgroup, integers::kOffset);
          for (int64_t line = 0; line < kLines / 2; ++line, codes += kLineBytes) {
            ask_ahead(codes);
            const Bytes bytes = integers::load_bytes(codes), low = expander.low(bytes), high = expander.high(bytes);
            const int8_t* x = numbers + subgroup * kSubgroup + line * 8;
            unroll<kRows>([&](auto r) {
              dots[r][half] = integers::add_products(dots[r][half], low, x + r * kStep);
              dots[r][half] = integers::add_products(dots[r][half], high, x + r * kStep + 4);
            });
          }
        }
        at += kTileBytes;
      });
    }
    unroll<kRows>([&](auto r) {
      const Vec row_scale = broadcast(rows.scales[place + r]);
      unroll<2>([&](auto half) {
        sums[r][half] = add(sums[r][half], integers::to_floats(dots[r][half]), scales[half], row_scale);
      });
    });
  }
  unroll<kRows>([&](auto r) { writer.write(tile * integers::kTileRows + row + r, sums[r][0], sums[r][1]); });
}

constexpr int kRowsAtOnce = 8;

template <int kRows = kRowsAtOnce, class Element>
void multiply_panel_rows(const Rows& rows, int64_t tile, int64_t row, int64_t count, const uint8_t* at,
                         const PanelWriter<Element>& writer) {
  if constexpr (kRows > 0) {
    if (count == kRows) return multiply_panel<kRows>(rows, tile, row, at, writer);
    multiply_panel_rows<kRows - 1>(rows, tile, row, count, at, writer);
  }
}

// Through the vector units. A task is a panel and some tiles of rows.
template <class Element>
void multiply_vectors(const Problem<Element>& p, const Rows& rows, const uint8_t* packed) {
  constexpr int64_t kTilesPerTask = 8;
  const int64_t tiles = divide_up(p.rows, integers::kTileRows), blocks = divide_up(tiles, kTilesPerTask);
  run_tasks(divide_up(p.n, kPanel) * blocks, is_small(p), [&](int64_t task) {
    const int64_t panel = task / blocks, first = task % blocks * kTilesPerTask;
    const PanelWriter<Element> writer(p, panel);
    for (int64_t tile = first; tile < std::min(first + kTilesPerTask, tiles); ++tile) {
      const int64_t end = std::min(integers::kTileRows, p.rows - tile * integers::kTileRows);
      for (int64_t row = 0, parts = divide_up(end, kRowsAtOnce), count; row < end; row += count, --parts) {
        count = divide_up(end - row, parts);
        multiply_panel_rows(rows, tile, row, count, packed + panel * rows.steps * kStepBytes, writer);
      }
    }
  });
}

}  // namespace twostep::int4
