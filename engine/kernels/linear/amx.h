// The bfloat16 matmul of linear.cpp in AMX tiles. A tile multiplication adds 32 products along K to each of 16 x 16
// float32 sums, for every row by itself and always in the same order. So one code path for all numbers of rows is batch
// invariant, and blocking along K changes nothing: a sum that waits in memory between two blocks is stored and loaded
// as the float32 it is.

#pragma once

#include <immintrin.h>

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "base/amx_blocks.h"
#include "base/amx_tiles.h"
#include "base/bfloat16.h"
#include "base/prefetch.h"
#include "base/small_vector.h"
#include "linear/coded_panels_amx.h"
#include "linear/panels_amx.h"
#include "linear/problem.h"
#include "linear/row_writer_amx.h"

namespace twostep::amx {

constexpr int64_t kSumElements = 2 * kTile * kTile;  // 16 rows times one panel

// x as row tiles: 16 rows, `row_bytes` apart, or all rows if there are fewer. Where x itself is not of that form (the
// rows after the last whole tile, and all rows when K is no multiple of a step), the tiles lie in a copy, with K padded
// with zeros. What the copy holds beyond the last row does not matter: those sums are not written.
struct RowTiles {
  const BFloat16* direct;
  BFloat16* copied;
  int64_t num_direct, tile_elements, row_bytes;

  const BFloat16* operator[](int64_t tile) const {
    return tile < num_direct ? direct + tile * tile_elements : copied + (tile - num_direct) * tile_elements;
  }
};

inline SmallVector<RowTiles, 1> row_tiles_of(Problems<BFloat16> problems) {
  static thread_local Scratch<BFloat16> scratch;
  const int64_t k = problems.front().k, width = round_up(k, kStep);
  const auto num_direct_of = [&](int64_t rows) { return k != width ? 0 : rows <= kTile ? 1 : rows / kTile; };
  Runs copied_rows;
  int64_t size = 0;  // of whole tiles
  for (const auto& p : problems) {
    copied_rows.add(std::max<int64_t>(0, p.rows - num_direct_of(p.rows) * kTile));
    size += round_up(p.rows, kTile) - std::min(round_up(p.rows, kTile), num_direct_of(p.rows) * kTile);
  }
  BFloat16* copied = scratch.get(size * width);
  SmallVector<RowTiles, 1> tiles;
  for (const auto& p : problems) {
    const int64_t num_direct = num_direct_of(p.rows);
    tiles.push_back({p.x, copied, num_direct, kTile * width, width * int64_t{sizeof(BFloat16)}});
    copied += std::max<int64_t>(0, divide_up(p.rows, kTile) - num_direct) * kTile * width;
  }
  run_tasks(copied_rows.count(), copied_rows.count() <= kTile, [&](int64_t i) {
    const auto [problem, row] = copied_rows[i];
    const RowTiles& to = tiles[problem];
    BFloat16* copy = to.copied + row * width;
    std::copy_n(problems[problem].x + (to.num_direct * kTile + row) * k, k, copy);
    std::fill_n(copy + k, width - k, BFloat16(0));
  });
  return tiles;
}

// A block, and the panels of its weight.
template <class Panels>
struct Part {
  Panels panels;
  Block block;
};

// sums += 16 * kRowTiles rows of x times one panel, over `steps` steps of K. Tiles 0 to 3 are the sums, 4 and 5 the
// rows of x, 6 and 7 the columns of the panel. Rows that are streamed leave the L1 cache to the panel.
template <int kRowTiles, bool kStreamsRows, class Steps, class Writer>
inline Prefetcher multiply_tiles(const BFloat16* x, const BFloat16* x_below, int64_t row_bytes, Steps weights,
                                 int64_t steps, bool is_first, float* sums, Writer& writer, Prefetcher ahead) {
  constexpr int64_t kSumBytes = kPanel * sizeof(float), kPairBytes = kStep * sizeof(BFloat16);
  float* sums_below = sums + kSumElements;
  if (is_first) {
    zero_tile<0>(), zero_tile<1>();
    if constexpr (kRowTiles == 2) zero_tile<2>(), zero_tile<3>();
  } else {
    load_tile<0>(sums, kSumBytes), load_tile<1>(sums + kTile, kSumBytes);
    if constexpr (kRowTiles == 2) load_tile<2>(sums_below, kSumBytes), load_tile<3>(sums_below + kTile, kSumBytes);
  }
  const auto turn = [&](int number) TWOSTEP_INLINE {
    ahead.fetch(), weights.template prepare_next<kRowTiles>(number);
  };
  weights.template prepare_first<kRowTiles>();
  for (int64_t step = 0; step < steps; ++step, x += kStep, x_below += kStep) {
    const BFloat16* w = weights[step];
    load_tile<6>(w, kPairBytes), load_tile<4, kStreamsRows>(x, row_bytes);
    multiply_tile<0, 4, 6>(), turn(0);
    if constexpr (kRowTiles == 1) writer.take_turn();
    load_tile<7>(w + kTileElements, kPairBytes);
    multiply_tile<1, 4, 7>(), turn(1), writer.take_turn();
    if constexpr (kRowTiles == 2) {
      load_tile<5, kStreamsRows>(x_below, row_bytes);
      multiply_tile<2, 5, 6>(), turn(2);
      multiply_tile<3, 5, 7>(), turn(3), writer.take_turn();
    }
  }
  store_tile<0>(sums, kSumBytes), store_tile<1>(sums + kTile, kSumBytes);
  if constexpr (kRowTiles == 2) store_tile<2>(sums_below, kSumBytes), store_tile<3>(sums_below + kTile, kSumBytes);
  return ahead;
}

// Multiplies one block. A piece of K stays in the L1 cache for all passes over it, if there are several. Meanwhile what
// comes next is prefetched, and rows are finished.
template <class Finish, class Panels>
class BlockProduct {
 public:
  BlockProduct(const Problem<BFloat16>& p, const RowTiles& rows, const Part<Panels>& now, const Part<Panels>& next,
               float* sums)
      : p_(p), rows_(rows), panels_(now.panels), block_(now.block), next_(next), sums_(sums), writer_(p),
        order_(block_, divide_up(p.k, kStep)) {}

  void compute() {
    for (Piece now = order_.first(block_); now.steps > 0; now = order_.after(now, block_)) {
      Prefetcher ahead = ahead_of(now);
      if (order_.is_once()) {
        multiply<false>(0, now, panels_.only_pass(now), ahead);
      } else {
        const auto weights = panels_.expanded(now, ahead);
        multiply_all(now, weights, ahead);
      }
      if (order_.is_last(now)) finish(now.panel);
    }
  }

 private:
  template <class Steps>
  void multiply_all(const Piece& now, const Steps& weights, Prefetcher ahead) {
    for (int64_t pass = 0; pass < block_.num_passes(); ++pass) {
      ahead = order_.is_by_panel() ? multiply<true>(pass, now, weights, ahead)
                                   : multiply<false>(pass, now, weights, ahead);
    }
  }

  template <bool kStreamsRows, class Steps>
  Prefetcher multiply(int64_t pass, const Piece& now, const Steps& weights, Prefetcher ahead) {
    const int64_t tile = block_.row_tile + 2 * pass, tile_end = std::min(tile + 2, block_.row_tile_end);
    const BFloat16 *x = rows_[tile] + now.step * kStep, *x_below = rows_[tile_end - 1] + now.step * kStep;
    const auto multiply_by = tile_end == tile + 2 ? multiply_tiles<2, kStreamsRows, Steps, RowWriter<Finish>>
                                                  : multiply_tiles<1, kStreamsRows, Steps, RowWriter<Finish>>;
    return multiply_by(x, x_below, rows_.row_bytes, weights, now.steps, now.step == 0,
                       sums_of(now.panel) + pass * 2 * kSumElements, writer_, ahead);
  }

  // Sums that need not wait for the next piece alternate between two places, so that these stay in a near cache.
  float* sums_of(int64_t panel) const {
    return sums_ + (order_.is_by_panel() ? turn_ : panel - block_.panel) * block_.num_passes() * 2 * kSumElements;
  }

  void finish(int64_t panel) {
    writer_.start(block_.row_tile * kTile, std::min(block_.row_tile_end * kTile, p_.rows), panel, sums_of(panel));
    turn_ ^= 1;
  }

  // What to prefetch in all passes over a piece: the piece that takes its place, or nothing where the next block has
  // the same panels. A panel that is read once prefetches its own steps, a few of them ahead.
  Prefetcher ahead_of(const Piece& now) const {
    const int64_t turns = 2 * (block_.row_tile_end - block_.row_tile);
    if (order_.is_once()) {
      if constexpr (Panels::kPrefetchesItself) {
        return {};
      } else {
        return prefetcher(panels_, {now.panel, Panels::kStepsAhead, now.steps}, now.steps * turns);
      }
    }
    const int64_t all_turns = now.steps * (turns + Panels::kTurns);
    const Piece then = order_.after(now, block_);
    if (then.steps > 0) return prefetcher(panels_, then, all_turns);
    const Piece next = Order(next_.block, divide_up(p_.k, kStep)).first(next_.block);
    const bool is_here = next_.panels.start_of(next) == panels_.start_of(order_.first(block_));
    return is_here ? Prefetcher() : prefetcher(next_.panels, next, all_turns);
  }

  static Prefetcher prefetcher(const Panels& panels, const Piece& piece, int64_t turns) {
    return Prefetcher(panels.start_of(piece), piece.steps * (Panels::kStepBytes / kLineBytes), 0, 1, turns);
  }

  const Problem<BFloat16>& p_;
  const RowTiles& rows_;
  const Panels& panels_;
  const Block& block_;
  const Part<Panels>& next_;
  float* const sums_;
  RowWriter<Finish> writer_;
  const Order order_;
  int64_t turn_ = 0;
};

template <class Finish, class PanelsOf>
inline void multiply_and_finish(Problems<BFloat16> problems, const PanelsOf& panels_of) {
  const auto rows = row_tiles_of(problems);
  GroupedBlocks blocks;
  for (const auto& p : problems) {
    const Block highest{0, std::min(kBlockRowTiles, divide_up(p.rows, kTile))};
    blocks.add(Blocks(p.rows, p.n, problems.size(), !Order::goes_by_panel(highest, divide_up(p.k, kStep))));
  }
  run_foreseen_tasks(blocks.count(), is_small(problems), [&](int64_t task, int64_t then) {
    static thread_local Scratch<float> scratch;
    float* sums = scratch.get(kBlockRowTiles * kMaxBlockPanels * kSumElements);
    const auto [number, block] = blocks[task];
    const auto [next_number, next_block] = blocks[then];
    const auto& p = problems[number];
    const Part now{panels_of(p), block}, next{panels_of(problems[next_number]), next_block};
    configure_tiles(std::min(p.rows, kTile));
    BlockProduct<Finish, decltype(now.panels)>(p, rows[number], now, next, sums).compute();
    release_tiles();
  });
}

// Multiplies the problems in one loop. `panels_of` returns the panels of a problem's weight for the calling thread.
template <class PanelsOf>
inline void multiply_panels(Problems<BFloat16> problems, const PanelsOf& panels_of) {
  const Activation activation = problems.front().activation;
  if (activation == Activation::kNone) return multiply_and_finish<Rounded>(problems, panels_of);
  with_activation(activation, [&]<class Op>() { multiply_and_finish<Gated<Op>>(problems, panels_of); });
}

// Multiplies by weights that `pack` made.
inline void multiply(Problems<BFloat16> problems) {
  multiply_panels(problems, [](const Problem<BFloat16>& p) {
    return PlainPanels{static_cast<const BFloat16*>(p.packed), divide_up(p.k, kStep)};
  });
}

// Multiplies by weights that `pack_coded` made.
inline void multiply_coded(Problems<BFloat16> problems) {
  multiply_panels(problems, [](const Problem<BFloat16>& p) {
    static thread_local Scratch<uint8_t> scratch;
    uint8_t* places = scratch.get(Order::kMaxSteps * PlainPanels::kStepBytes);
    const exponents::Panels panels(static_cast<const uint8_t*>(p.packed), divide_up(p.n, kPanel),
                                   divide_up(p.k, kStep) * kStepUnits);
    return CodedPanels{panels, places};
  });
}

}  // namespace twostep::amx
