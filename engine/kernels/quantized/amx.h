// The integer matmuls of quantized/vector.h in AMX tiles: 16 rows, 16 columns, a group along K at a time.
//
// Tiles 0 to 3 are dot products, 4 and 5 rows, 6 and 7 the weights of a panel. Rows of 8 bits go two tiles at a time,
// those of 16 one tile at a time, as its two halves. A weight's Panel has the bytes of each step.

#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <new>

#include "base/amx_blocks.h"
#include "base/array_ref.h"
#include "base/prefetch.h"
#include "quantized/vector.h"

namespace twostep::integers {

typedef int32_t TileDots[kTileRows][kLanes];
typedef float TileSums[2][kTileRows][kLanes];  // of two tiles of columns

constexpr int64_t kSomeRows = kTileRows / 2;

// Some tiles of rows times one panel.
struct Place {
  int64_t tile, num_tiles, rows;  // of each tile
  const uint8_t* panel;
  TileSums* sums;  // of each tile
};

// Adds a group's dot products to the sums, eight rows at a time, after each step of the group that is multiplied next,
// since the tiles work meanwhile.
template <class Weight>
class Addition {
 public:
  void start(const RowsOf<Weight>& rows, const Place& place, int64_t group, const TileDots (&dots)[2][2]) {
    rows_ = &rows, place_ = place, group_ = group, dots_ = dots, done_ = 0;
    wanted_ = place.num_tiles * place.rows / kSomeRows;
  }

  TWOSTEP_INLINE void add_some() {
    if (done_ == wanted_) return;
    const int64_t i = done_ * kSomeRows / place_.rows, row = done_ * kSomeRows % place_.rows;
    const int64_t at = rows_->place(place_.tile + i, group_) + row;
    const uint8_t* group = place_.panel + group_ * kGroupBytes<Weight>;
    add(rows_->scales + at, rows_->sums + at, group, dots_ + i, row, place_.sums[i]);
    ++done_;
  }

  void finish() {
    while (done_ < wanted_) add_some();
  }

 private:
  template <class Sum>
  TWOSTEP_INLINE static void add(const float* row_scales, const Sum* row_sums, const uint8_t* group,
                                 const TileDots (*dots)[2], int64_t row, TileSums& sums) {
    const typename Weight::Scales scales[2] = {{group, 0}, {group, 1}};
    unroll<kSomeRows>([&](auto r) TWOSTEP_INLINE {
      unroll<2>([&](auto half) TWOSTEP_INLINE {
        Dots dot{{(PartI)_mm512_load_si512(dots[0][half][row + r])}};
        if constexpr (Weight::Precision::kBytes == 2) {
          dot = joined(dot, Dots{{(PartI)_mm512_load_si512(dots[1][half][row + r])}});
        }
        float* sum = sums[half][row + r];
        store(sum, scales[half].add(load(sum), to_floats(dot), row_scales[r], row_sums[r]));
      });
    });
  }

  const RowsOf<Weight>* rows_ = nullptr;
  Place place_{};
  int64_t group_ = 0, done_ = 0, wanted_ = 0;
  const TileDots (*dots_)[2] = nullptr;
};

template <int kOperands>
inline void clear_dots() {
  amx::zero_tile<0>(), amx::zero_tile<1>();
  if constexpr (kOperands == 2) amx::zero_tile<2>(), amx::zero_tile<3>();
}

// Adds the products of one step.
template <class Weight, int kOperands>
inline void multiply_step(const int8_t* numbers, const int8_t* others, const uint8_t* weights) {
  amx::load_tile<6>(weights, kStep), amx::load_tile<4>(numbers, kStep);
  Weight::template multiply_tile<0, 4, 6>();
  amx::load_tile<7>(weights + kTileBytes, kStep);
  Weight::template multiply_tile<1, 4, 7>();
  if constexpr (kOperands == 2) {
    amx::load_tile<5>(others, kStep);
    Weight::template multiply_tile<2, 5, 6>(), Weight::template multiply_tile<3, 5, 7>();
  }
}

template <int kOperands>
inline void store_dots(TileDots (&dots)[2][2]) {
  amx::store_tile<0>(dots[0][0], kStep), amx::store_tile<1>(dots[0][1], kStep);
  if constexpr (kOperands == 2) amx::store_tile<2>(dots[1][0], kStep), amx::store_tile<3>(dots[1][1], kStep);
}

// The working memory of a thread.
template <class Weight>
struct alignas(64) ThreadState {
  TileSums sums[amx::kBlockPanels][amx::kBlockRowTiles];
  TileDots dots[2][2][2];  // turn, operand of rows, tile of columns
  int64_t turn = 0;
  Addition<Weight> addition;
};

// Multiplies the groups [group, group_end) of one panel. The first rows expand it, if its format needs that.
template <class Weight, int kTiles, class Panel>
inline void multiply_tiles(const RowsOf<Weight>& rows, const Place& place, const Panel& panel, bool is_first,
                           Prefetcher ahead, int64_t group, int64_t group_end, ThreadState<Weight>& state) {
  constexpr int kOperands = kTiles * int(Weight::Precision::kBytes);
  const auto expand = [&](int64_t step) {
    if constexpr (Weight::kIsExpanded) {
      if (is_first) panel.expand(step);
    }
  };
  if (group == 0) std::memset(place.sums, 0, sizeof(TileSums) * kTiles);
  expand(group * kGroupSteps);
  for (; group < group_end; ++group) {
    clear_dots<kOperands>();
    const int64_t first = group * kGroupSteps;
    for (int64_t step = first; step < first + rows.steps_of(group); ++step) {
      const int8_t* numbers = rows.numbers_of(place.tile, step);
      const int8_t* others = kTiles == 2 ? rows.numbers_of(place.tile + 1, step) : numbers + kTileBytes;
      multiply_step<Weight, kOperands>(numbers, others, panel.place_of(step));
      expand(step + 1), ahead.fetch();
      state.addition.add_some();
    }
    state.addition.finish();
    auto& dots = state.dots[state.turn ^= 1];
    store_dots<kOperands>(dots);
    state.addition.start(rows, place, group, dots);
  }
}

// Computes a block. An expanded panel is multiplied as a whole, first by some rows, then by others. Of other formats
// each group is multiplied by all rows if they are few; many rows are multiplied by pieces of all panels, so short that
// a piece of a panel and the rows' share of it stay in the L1 cache.
template <class Weight, class Element>
class BlockProduct {
 public:
  BlockProduct(const Problem<Element>& p, const RowsOf<Weight>& rows, const uint8_t* packed, const amx::Block& block,
               ThreadState<Weight>& state)
      : p_(p), rows_(rows), packed_(packed), block_(block), state_(state),
        num_tiles_(block.row_tile_end - block.row_tile), passes_(divide_up(num_tiles_, kTiles)) {}

  void compute() {
    const int64_t groups = rows_.groups, length = piece_length();
    if (is_by_piece()) {
      for (int64_t group = 0; group < groups; group += length) {
        for (int64_t panel = block_.panel; panel < block_.panel_end; ++panel) multiply(panel, group, group + length);
      }
    } else {
      for (int64_t panel = block_.panel; panel < block_.panel_end; ++panel) {
        for (int64_t group = 0; group < groups; group += length) multiply(panel, group, group + length);
      }
    }
  }

 private:
  static constexpr int64_t kTiles = 2 / Weight::Precision::kBytes;  // tiles of rows at once
  static constexpr int64_t kFewTiles = 4;  // up to these, rows of any length stay in the L2 cache
  static constexpr int64_t kPieceGroups = 2;

  bool is_by_piece() const { return !Weight::kIsExpanded && num_tiles_ > kFewTiles; }

  int64_t piece_length() const {
    if (Weight::kIsExpanded || passes_ == 1) return rows_.groups;
    return is_by_piece() ? divide_up(rows_.groups, divide_up(rows_.groups, kPieceGroups)) : 1;
  }

  // Multiplies all rows by the groups [group, end) of a panel.
  void multiply(int64_t index, int64_t group, int64_t end) {
    end = std::min(end, rows_.groups);
    const uint8_t* at = packed_ + index * panel_bytes<Weight>(p_.k);
    const auto panel = Weight::panel_at(at, rows_.steps, passes_ == 1);
    for (int64_t pass = 0; pass < passes_; ++pass) {
      const int64_t tile = block_.row_tile + pass * kTiles, first = tile * kTileRows;
      const int64_t count = std::min(kTiles * kTileRows, p_.rows - first);
      const Place place{tile, count > kTileRows ? 2 : 1, count > kSomeRows ? kTileRows : kSomeRows, at,
                        state_.sums[index - block_.panel] + pass * kTiles};
      const auto multiply_both = multiply_tiles<Weight, kTiles, decltype(panel)>;
      const auto multiply_one = multiply_tiles<Weight, 1, decltype(panel)>;
      const Prefetcher ahead = ahead_of(index, group, end, pass);
      (count > kTileRows ? multiply_both : multiply_one)(rows_, place, panel, pass == 0, ahead, group, end, state_);
      if (end == rows_.groups) write(index, first, count, place.sums);
    }
  }

  // Prefetches a pass's share of what follows the groups [group, end) of a panel, unless expanding prefetches it.
  Prefetcher ahead_of(int64_t panel, int64_t group, int64_t end, int64_t pass) const {
    if (Weight::kIsExpanded) return {};
    int64_t next_panel = panel, next = end;  // the panel's end if there is none
    if (is_by_piece()) {
      const bool is_last = panel + 1 == block_.panel_end;
      next_panel = is_last ? block_.panel : panel + 1, next = is_last ? end : group;
    } else if (end == rows_.groups) {
      next_panel = panel + 1, next = 0;
    }
    const int64_t start = place_of(next), bytes = place_of(next + piece_length()) - start;
    const int64_t steps = std::min(end * kGroupSteps, rows_.steps) - group * kGroupSteps;
    return Prefetcher(packed_ + next_panel * place_of(rows_.groups) + start, bytes / kLineBytes, pass, passes_, steps);
  }

  // Returns the offset of a group in its panel; after the last group, the panel's end.
  int64_t place_of(int64_t group) const { return std::min(group * kGroupBytes<Weight>, panel_bytes<Weight>(p_.k)); }

  void write(int64_t panel, int64_t first, int64_t count, const TileSums* sums) {
    state_.addition.finish();
    const PanelWriter<Element> writer(p_, panel);
    Vec finished[kTileRows][2];
    for (int64_t row = 0; row < count; row += kTileRows, ++sums) {
      const int64_t rows = std::min(kTileRows, count - row);
      for (int64_t r = 0; r < rows; ++r) finished[r][0] = load((*sums)[0][r]), finished[r][1] = load((*sums)[1][r]);
      writer.write(first + row, rows, finished);
    }
  }

  const Problem<Element>& p_;
  const RowsOf<Weight>& rows_;
  const uint8_t* packed_;
  const amx::Block& block_;
  ThreadState<Weight>& state_;
  const int64_t num_tiles_, passes_;
};

// Multiplies the problems in one loop.
template <class Weight, class Element>
inline void multiply_amx(Problems<Element> problems, ArrayRef<RowsOf<Weight>> all_rows) {
  amx::GroupedBlocks blocks;
  for (const auto& p : problems) blocks.add(amx::Blocks(p.rows, p.n, problems.size()));
  run_tasks(blocks.count(), is_small(problems), [&](int64_t task) {
    static thread_local Scratch<ThreadState<Weight>> scratch;
    ThreadState<Weight>& state = *new (scratch.get(1)) ThreadState<Weight>;
    const auto [number, block] = blocks[task];
    const auto& p = problems[number];
    amx::configure_tiles(std::min(p.rows, kTileRows));
    const auto* packed = static_cast<const uint8_t*>(p.packed);
    BlockProduct<Weight, Element>(p, all_rows[number], packed, block, state).compute();
    amx::release_tiles();
  });
}

}  // namespace twostep::integers
