// The product of linear_int4.h in AMX tiles: 16 rows, 16 columns, a group along K at a time.

#pragma once

#include <algorithm>
#include <cstdint>

#include "linear_amx.h"
#include "linear_int4.h"

namespace twostep::int4 {

constexpr int64_t kFewRows = 3;  // up to these the vector units are faster

template <int kSums, int kRows, int kColumns>
inline void multiply_integers() {
  asm volatile("tdpbssd %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(kSums), "i"(kRows), "i"(kColumns));
}

constexpr int64_t kExpandedBytes = 2 * kLanes * kStep;  // of one step of a panel, a byte for each code

// A step of a panel -> its two tiles of bytes.
inline void expand(const uint8_t* from, uint8_t* to) {
  for (int64_t tile = 0; tile < 2; ++tile, from += kTileBytes) {
    ask_ahead(from);
    const uint8_t* codes = from + kHeaderBytes;
    for (int64_t subgroup = 0; subgroup < 2; ++subgroup) {
      const Expander expander(from, subgroup, 0);
      for (int64_t line = 0; line < kLines / 2; ++line, codes += kLineBytes, to += 2 * kLineBytes) {
        ask_ahead(codes);
        const Bytes bytes = integers::load_bytes(codes), low = expander.low(bytes), high = expander.high(bytes);
        std::memcpy(to, &low, sizeof(low));
        std::memcpy(to + kLineBytes, &high, sizeof(high));
      }
    }
  }
}

// One panel, whose steps are expanded while the first rows are multiplied. Where there are no others, two places in turn
// are enough, which stay in the L1 cache.
struct Panel {
  const uint8_t* packed;
  uint8_t* expanded;
  int64_t steps;
  bool is_only;

  uint8_t* place_of(int64_t step) const { return expanded + (is_only ? step % 2 : step) * kExpandedBytes; }
  void expand_step(int64_t step) const {
    if (step < steps) expand(packed + step * kStepBytes, place_of(step));
  }
};

typedef int32_t TileDots[integers::kTileRows][kLanes];

// Sums of two tiles of rows, and the dot products of two groups in turn.
struct alignas(64) Sums {
  float sums[2][2][integers::kTileRows][kLanes];  // tile of rows, tile of columns
  TileDots dots[2][2][2];                         // turn, tile of rows, tile of columns
};

constexpr int64_t kHalf = integers::kTileRows / 2;

// Eight rows of one tile, from `row` on: their sums += what a group adds.
TWOSTEP_INLINE inline void add_group(const float* row_scales, int64_t row, const uint8_t* packed,
                                     const TileDots (&dots)[2], float (&sums)[2][integers::kTileRows][kLanes]) {
  const Vec scales[2] = {scales_of(packed), scales_of(packed + kTileBytes)};
  unroll<kHalf>([&](auto r) TWOSTEP_INLINE {
    const Vec row_scale = broadcast(row_scales[row + r]);
    unroll<2>([&](auto half) TWOSTEP_INLINE {
      const Vec dot{{(PartF)_mm512_cvtepi32_ps(_mm512_load_si512(dots[half][row + r]))}};
      float* sum = sums[half][row + r];
      store(sum, add(load(sum), dot, scales[half], row_scale));
    });
  });
}

template <int kRowTiles>
inline void clear_dots() {
  amx::zero_tile<0>(), amx::zero_tile<1>();
  if constexpr (kRowTiles == 2) amx::zero_tile<2>(), amx::zero_tile<3>();
}

// Adds the products of one step.
template <int kRowTiles>
inline void multiply_step(const Rows& rows, int64_t tile, int64_t step, const uint8_t* weights) {
  constexpr int64_t kBytes = 64;
  amx::load_tile<6>(weights, kBytes), amx::load_tile<4>(rows.numbers_of(tile, step), kBytes);
  multiply_integers<0, 4, 6>();
  amx::load_tile<7>(weights + kExpandedBytes / 2, kBytes);
  multiply_integers<1, 4, 7>();
  if constexpr (kRowTiles == 2) {
    amx::load_tile<5>(rows.numbers_of(tile + 1, step), kBytes);
    multiply_integers<2, 5, 6>(), multiply_integers<3, 5, 7>();
  }
}

template <int kRowTiles>
inline void store_dots(TileDots (&dots)[2][2]) {
  constexpr int64_t kBytes = 64;
  amx::store_tile<0>(dots[0][0], kBytes), amx::store_tile<1>(dots[0][1], kBytes);
  if constexpr (kRowTiles == 2) amx::store_tile<2>(dots[1][0], kBytes), amx::store_tile<3>(dots[1][1], kBytes);
}

// kRows of each of kRowTiles tiles times one panel. The dot products of a group are scaled in shares, one after each step
// of the next: the tiles multiply meanwhile.
template <int kRowTiles, int kRows>
inline void multiply_panel_tiles(const Rows& rows, int64_t tile, const Panel& panel, bool expands, Sums& s) {
  constexpr int64_t kShares = kRowTiles * kRows / kHalf;
  static_assert(kShares <= integers::kGroupSteps);
  std::memset(s.sums, 0, sizeof(s.sums[0]) * kRowTiles);
  const auto add_share = [&](int64_t group, int64_t share) {
    if (group < 0 || share >= kShares) return;
    const int64_t i = share * kHalf / kRows, row = share * kHalf % kRows;
    add_group(rows.scales + rows.place(tile + i, group), row,
              panel.packed + group * integers::kGroupSteps * kStepBytes, s.dots[group % 2][i], s.sums[i]);
  };
  if (expands) panel.expand_step(0);
  for (int64_t group = 0; group < rows.groups; ++group) {
    clear_dots<kRowTiles>();
    int64_t i = 0;
    for (int64_t step = group * integers::kGroupSteps; i < rows.steps_of(group); ++i, ++step) {
      multiply_step<kRowTiles>(rows, tile, step, panel.place_of(step));
      if (expands) panel.expand_step(step + 1);
      add_share(group - 1, i);
    }
    for (; i < kShares; ++i) add_share(group - 1, i);
    store_dots<kRowTiles>(s.dots[group % 2]);
  }
  for (int64_t i = 0; i < kShares; ++i) add_share(rows.groups - 1, i);
}

// `count` rows from a tile on, of two tiles at most, times one panel.
inline void multiply_panel(const Rows& rows, int64_t tile, int64_t count, const Panel& panel, bool expands, Sums& s) {
  if (count > integers::kTileRows) return multiply_panel_tiles<2, 16>(rows, tile, panel, expands, s);
  if (count > kHalf) return multiply_panel_tiles<1, 16>(rows, tile, panel, expands, s);
  multiply_panel_tiles<1, kHalf>(rows, tile, panel, expands, s);
}

template <class Element>
inline void multiply_block(const Problem<Element>& p, const Rows& rows, const uint8_t* packed, const amx::Block& block,
                           Sums& sums, uint8_t* expanded) {
  const int64_t passes = block.num_passes();
  for (int64_t index = block.panel; index < block.panel_end; ++index) {
    const Panel panel{packed + index * rows.steps * kStepBytes, expanded, rows.steps, passes == 1};
    const PanelWriter<Element> writer(p, index);
    for (int64_t pass = 0; pass < passes; ++pass) {
      const int64_t tile = block.row_tile + 2 * pass, tiles = std::min<int64_t>(2, block.row_tile_end - tile);
      const int64_t first = tile * integers::kTileRows, count = std::min(tiles * integers::kTileRows, p.rows - first);
      multiply_panel(rows, tile, count, panel, pass == 0, sums);
      for (int64_t row = 0; row < count; ++row) {
        const auto& sum = sums.sums[row / integers::kTileRows];
        const int64_t r = row % integers::kTileRows;
        writer.write(first + row, load(sum[0][r]), load(sum[1][r]));
      }
    }
  }
}

template <class Element>
inline void multiply_amx(const Problem<Element>& p, const Rows& rows, const uint8_t* packed) {
  const amx::Blocks blocks(p.rows, p.n);
  run_tasks(blocks.count(), is_small(p), [&](int64_t task) {
    static thread_local Scratch<Sums> sums;
    static thread_local Scratch<uint8_t> expanded;
    const amx::Block block = blocks[task];
    amx::configure_tiles(std::min(p.rows, integers::kTileRows));
    multiply_block(p, rows, packed, block, *sums.get(1), expanded.get(std::max<int64_t>(rows.steps, 2) * kExpandedBytes));
    amx::release_tiles();
  });
}

}  // namespace twostep::int4
