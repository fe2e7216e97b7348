// Linear layers of integers: rows are rounded to some bits with a scale per group along K, weights are 8-bit integers
// or become such. A group's dot products are exact, whatever unit computes them, and what becomes of them has one
// order. So every number of rows has the same bits: few rows go through the vector units, for which memory is slower;
// many through AMX tiles (linear_integers_amx.h).
//
// A weight's panel is two tiles of 16 columns, its groups one after the other along K. What a weight is tells a class,
// int4::Weight or int8::Weight: how rows are rounded, the bytes of a group, how its steps are multiplied and what is
// added for them.

#pragma once

#include <algorithm>
#include <cstdint>

#include "activations.h"
#include "linear.h"
#include "rounded_rows.h"
#include "rows.h"
#include "vec.h"

namespace twostep::integers {

constexpr int64_t kPanel = 2 * kLanes;
constexpr int64_t kWordBytes = kLanes * sizeof(uint32_t);  // of a word per column of a tile

inline PartU load_words(const uint8_t* header, int part) {
  PartU words;
  std::memcpy(&words, header + part * sizeof(words), sizeof(words));
  return words;
}

// The upper halves of a word per column, bfloat16 numbers.
inline Vec upper_numbers(const uint8_t* header) {
  return each_part([&](int i) { return (PartF)(load_words(header, i) & 0xffff0000u); });
}

template <class Weight>
using RowsOf = Rows<typename Weight::Precision>;

// Where a panel's group starts. Its steps follow a header.
template <class Weight>
constexpr int64_t kGroupBytes = Weight::kHeaderBytes + kGroupSteps * Weight::kStepBytes;

template <class Weight>
constexpr int64_t panel_bytes(int64_t k) {
  return divide_up(k, kGroup) * Weight::kHeaderBytes + divide_up(k, kStep) * Weight::kStepBytes;
}

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
    Element line[kPanel];
    store(line, low), store(line + kLanes, high);
    gate_row<Op>(line, kLanes, p_.out + (row * p_.n + first_) / 2);
  }

  const Problem<Element>& p_;
  int64_t first_, columns_;
  Vec bias_[2] = {};
};

// Rows [row, row + kRows) of a tile of rows times one panel.
template <class Weight, int kRows, class Element>
void multiply_panel(const RowsOf<Weight>& rows, int64_t tile, int64_t row, const uint8_t* panel,
                    const PanelWriter<Element>& writer) {
  Vec sums[kRows][2] = {};
  for (int64_t group = 0; group < rows.groups; ++group, panel += kGroupBytes<Weight>) {
    const int64_t place = rows.place(tile, group) + row;
    typename Weight::Dots dots[kRows][2];
    unroll<kRows>([&](auto r) { dots[r][0] = dots[r][1] = Weight::first_dots(rows.sums[place + r]); });
    for (int64_t step = 0; step < rows.steps_of(group); ++step) {
      const int8_t* numbers = rows.numbers_of(tile, group * kGroupSteps + step);
      const uint8_t* at = panel + Weight::kHeaderBytes + step * Weight::kStepBytes;
      Weight::template multiply_step<kRows>(numbers, row, at, dots);
    }
    unroll<2>([&](auto half) TWOSTEP_INLINE {
      const typename Weight::Scales scales(panel, half);
      unroll<kRows>([&](auto r) TWOSTEP_INLINE {
        const Vec dot = to_floats(Weight::total(dots[r][half]));
        sums[r][half] = scales.add(sums[r][half], dot, rows.scales[place + r], rows.sums[place + r]);
      });
    });
  }
  unroll<kRows>([&](auto r) { writer.write(tile * kTileRows + row + r, sums[r][0], sums[r][1]); });
}

template <class Weight, int kRows = Weight::kRowsAtOnce, class Element>
void multiply_panel_rows(const RowsOf<Weight>& rows, int64_t tile, int64_t row, int64_t count, const uint8_t* panel,
                         const PanelWriter<Element>& writer) {
  if constexpr (kRows > 0) {
    if (count == kRows) return multiply_panel<Weight, kRows>(rows, tile, row, panel, writer);
    multiply_panel_rows<Weight, kRows - 1>(rows, tile, row, count, panel, writer);
  }
}

// Through the vector units. A task is a panel and some tiles of rows.
template <class Weight, class Element>
void multiply_vectors(const Problem<Element>& p, const RowsOf<Weight>& rows, const uint8_t* packed) {
  constexpr int64_t kTilesPerTask = 8;
  const int64_t tiles = divide_up(p.rows, kTileRows), blocks = divide_up(tiles, kTilesPerTask);
  run_tasks(divide_up(p.n, kPanel) * blocks, is_small(p), [&](int64_t task) {
    const int64_t panel = task / blocks, first = task % blocks * kTilesPerTask;
    const PanelWriter<Element> writer(p, panel);
    for (int64_t tile = first; tile < std::min(first + kTilesPerTask, tiles); ++tile) {
      const int64_t end = std::min(kTileRows, p.rows - tile * kTileRows);
      for (int64_t row = 0, parts = divide_up(end, Weight::kRowsAtOnce), count; row < end; row += count, --parts) {
        count = divide_up(end - row, parts);
        const uint8_t* at = packed + panel * panel_bytes<Weight>(p.k);
        multiply_panel_rows<Weight>(rows, tile, row, count, at, writer);
      }
    }
  });
}

}  // namespace twostep::integers
