// Quantized weights in the layout that products read: columns one by one into panels.

#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <tuple>
#include <utility>

#include "base/bfloat16.h"
#include "base/hadamard.h"
#include "base/huge_pages.h"
#include "base/scratch.h"
#include "base/tensor.h"
#include "base/thread_pool.h"
#include "quantized/int4.h"
#include "quantized/int4_levels.h"
#include "quantized/int8.h"
#include "quantized/quantize.h"
#include "quantized/quantize_lanes.h"

namespace twostep::packing {

// Packs columns into [panels, bytes of one] uint8, which is opaque: calls pack_column(column, place of its panel).
template <class Weight, class PackColumn>
Tensor pack(int64_t n, int64_t k, const PackColumn& pack_column) {
  const int64_t panels = divide_up(n, integers::kPanel), bytes = integers::panel_bytes<Weight>(k);
  Tensor packed = zeros_in_huge_pages({panels, bytes}, kByte);
  uint8_t* to = packed.mutable_data_ptr<uint8_t>();
  run_tasks(panels, false, [&](int64_t panel) {
    const int64_t first = panel * integers::kPanel;
    for (int64_t column = first; column < std::min(first + integers::kPanel, n); ++column) {
      pack_column(column, to + panel * bytes);
    }
  });
  return packed;
}

// A column in 8 bits.
struct Int8Column {
  const uint8_t* codes;                   // [k]
  const BFloat16 *scales, *minimums;      // [groups]
  int64_t k, groups;
};

inline void pack_int8_column(const Int8Column& q, int64_t column_of_panel, uint8_t* panel) {
  using integers::kStep, integers::kGroupBytes, int8::Weight;
  const int64_t tile = column_of_panel / kLanes, lane = column_of_panel % kLanes;
  for (int64_t group = 0; group < q.groups; ++group) {
    const uint32_t word = uint32_t{q.scales[group].bits} << 16 | q.minimums[group].bits;
    uint8_t* words = panel + group * kGroupBytes<Weight> + tile * integers::kWordBytes;
    std::memcpy(words + lane * sizeof(word), &word, sizeof(word));
  }
  for (int64_t i = 0; i < q.k; ++i) {
    const int64_t step = i / kStep, group = step / integers::kGroupSteps;
    uint8_t* to = panel + (group + 1) * Weight::kHeaderBytes + step * Weight::kStepBytes + tile * integers::kTileBytes;
    to[i % kStep / 4 * kLineBytes + lane * 4 + i % 4] = q.codes[i];
  }
}

// A column in 4 bits.
struct Int4Column {
  const uint8_t *codes, *levels;  // [k], [subgroups]
  const BFloat16* scales;         // [groups]
  int64_t k, subgroups;
};

inline void pack_int4_column(const Int4Column& q, int64_t column_of_panel, uint8_t* panel) {
  using integers::kStep;
  const int64_t lane = column_of_panel % kLanes;
  uint8_t* tile = panel + column_of_panel / kLanes * int4::kTileBytes;
  for (int64_t subgroup = 0; subgroup < q.subgroups; ++subgroup) {
    const int64_t start = subgroup * int4::kSubgroup;
    uint32_t word = uint32_t{q.scales[start / levels::kScaleGroup].bits} << 16;
    word |= uint32_t{q.levels[subgroup]} << start % kStep / int4::kSubgroup * 8;
    uint32_t& header = reinterpret_cast<uint32_t*>(tile + start / kStep * int4::Weight::kStepBytes)[lane];
    header |= word;
  }
  for (int64_t i = 0; i < q.k; ++i) {
    uint8_t* codes = tile + i / kStep * int4::Weight::kStepBytes + integers::kWordBytes;
    codes[i % kStep / 8 * kLineBytes + lane * 4 + i % 4] |= q.codes[i] << i % 8 / 4 * 4;
  }
}

struct Settings {
  int64_t bits, num_refits;
  bool is_transformed;
};

// One column on its way from a row of numbers into a panel, in memory that a thread keeps for its next one.
class Quantizer {
 public:
  // Loads a row of `count` numbers, inversely transformed and padded with zeros for that if they shall be; returns
  // whether all are finite.
  template <class Element>
  bool load(const Element* row, int64_t count, bool is_transformed) {
    k_ = is_transformed ? round_up(count, hadamard::kSmallestBlock) : count;
    row_ = numbers_.get(k_);
    Vec nothing{};
    for_each_vector(count, [&](int64_t i, int64_t size) TWOSTEP_INLINE {
      const Vec numbers = load_upto(row + i, size);
      store_upto(row_ + i, size, numbers);
      nothing = nothing + (numbers - numbers);
    });
    std::fill(row_ + count, row_ + k_, 0.0f);
    if (is_transformed) hadamard::invert(row_, k_);
    return fold_add(nothing) == 0;
  }

  void pack_8_bits(int64_t num_refits, int64_t column_of_panel, uint8_t* panel) {
    const int64_t groups = divide_up(k_, quantizing::kGroup8);
    uint8_t* codes = codes_.get(k_);
    BFloat16 *scales = scales_.get(groups), *minimums = minimums_.get(groups);
    quantizing::quantize_row<quantizing::kGroup8>(row_, k_, 8, num_refits, codes, scales, minimums);
    pack_int8_column({codes, scales, minimums, k_, groups}, column_of_panel, panel);
  }

  void pack_4_bits(int64_t num_refits, int64_t column_of_panel, uint8_t* panel) {
    const int64_t groups = divide_up(k_, quantizing::kGroup4);
    uint8_t *codes = codes_.get(k_), *found = levels_.get(groups);
    BFloat16 *scales = scales_.get(groups), *minimums = minimums_.get(groups);
    BFloat16* shared = shared_.get(divide_up(k_, levels::kScaleGroup));
    quantizing::quantize_row_in_lanes(row_, k_, 4, num_refits, codes, scales, minimums);
    levels::level_row(row_, k_, scales, minimums, codes, found, shared);
    pack_int4_column({codes, found, shared, k_, groups}, column_of_panel, panel);
  }

 private:
  Scratch<float> numbers_;
  Scratch<uint8_t> codes_, levels_;
  Scratch<BFloat16> scales_, minimums_, shared_;
  float* row_ = nullptr;
  int64_t k_ = 0;
};

// rows [n, k] -> packed, and whether all numbers are finite
template <class Element>
std::tuple<Tensor, bool> quantize_and_pack(const Element* rows, int64_t n, int64_t k, const Settings& settings) {
  std::atomic<bool> is_finite{true};
  const auto pack_column = [&](int64_t column, uint8_t* panel) {
    static thread_local Quantizer quantizer;
    if (!quantizer.load(rows + column * k, k, settings.is_transformed)) return is_finite.store(false);
    const int64_t place = column % integers::kPanel;
    settings.bits == 8 ? quantizer.pack_8_bits(settings.num_refits, place, panel)
                       : quantizer.pack_4_bits(settings.num_refits, place, panel);
  };
  const bool has_8_bits = settings.bits == 8;
  Tensor packed = has_8_bits ? pack<int8::Weight>(n, k, pack_column) : pack<int4::Weight>(n, k, pack_column);
  return {std::move(packed), is_finite.load()};
}

}  // namespace twostep::packing
