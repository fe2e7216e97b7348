// The bfloat16 product of linear.cpp in AMX tiles. A tile multiplication adds 32 products along K to each of 16 x 16
// float32 sums, for every row by itself and always in the same order. So one code path for all numbers of rows is batch
// invariant, and blocking along K changes nothing: a sum that waits in memory between two blocks is stored and loaded
// as the float32 it is.

#pragma once

#include <immintrin.h>

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "ahead.h"
#include "coded_panels.h"
#include "linear.h"
#include "panels_amx.h"
#include "row_writer_amx.h"
#include "tiles_amx.h"

namespace twostep::amx {

constexpr int64_t kSumElements = 2 * kTile * kTile;  // 16 rows times one panel
constexpr int64_t kBlockRowTiles = 16, kBlockPanels = 8, kBlockSteps = 8;  // 256 rows, 256 columns, 256 of K

// A step of two row tiles takes 28 ns from the L1 cache, 38 to 47 with its weights in the L2 cache, and 62 to 80 here,
// of which loading and storing sums, finishing rows and asking for more take about 8 each. Tried without gain: blocks
// of half and twice the size in each direction, other orders of loads and products, asking for weights into the L1
// cache, and, where rows are few, pieces of K so that these stay there.

// The block of sums [row_tile, row_tile_end) x [panel, panel_end), computed by one thread. Each panel is multiplied in
// several passes, with two row tiles each.
struct Block {
  int64_t row_tile = 0, row_tile_end = 0, panel = 0, panel_end = 0;

  int64_t num_passes() const { return divide_up(row_tile_end - row_tile, 2); }
};

// x as row tiles: 16 rows, `row_bytes` apart. Where x itself is not of that form (the rows after the last whole tile,
// and all rows when K is no multiple of a step), the tiles lie in a copy, K filled up with zeros. What the copy holds
// beyond the last row matters to nobody: those sums are not written.
struct RowTiles {
  const BFloat16* direct;
  const BFloat16* copied;
  int64_t num_direct, tile_elements, row_bytes;

  const BFloat16* operator[](int64_t tile) const {
    return tile < num_direct ? direct + tile * tile_elements : copied + (tile - num_direct) * tile_elements;
  }
};

inline RowTiles row_tiles_of(const Problem<BFloat16>& p) {
  static thread_local Scratch<BFloat16> scratch;
  const int64_t width = divide_up(p.k, kStep) * kStep, num_direct = p.k == width ? p.rows / kTile : 0;
  const int64_t first_copied = num_direct * kTile, num_copied = p.rows - first_copied;
  BFloat16* copied = scratch.get(divide_up(num_copied, kTile) * kTile * width);
  run_tasks(num_copied, num_copied <= kTile, [&](int64_t i) {
    std::copy_n(p.x + (first_copied + i) * p.k, p.k, copied + i * width);
    std::fill_n(copied + i * width + p.k, width - p.k, BFloat16(0));
  });
  return {p.x, copied, num_direct, kTile * width, width * int64_t{sizeof(BFloat16)}};
}

// sums += 16 * kRowTiles rows of x times one panel, over `steps` steps of K. Tiles 0 to 3 are the sums, 4 and 5 the
// rows of x, 6 and 7 the columns of the panel.
template <int kRowTiles, class Steps, class Writer>
inline void multiply_tiles(const BFloat16* x, const BFloat16* x_below, int64_t row_bytes, Steps weights, int64_t steps,
                           bool is_first, float* sums, Writer& writer, Ahead ahead) {
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
    load_tile<6>(w, kPairBytes), load_tile<4>(x, row_bytes);
    multiply_tile<0, 4, 6>(), turn(0);
    if constexpr (kRowTiles == 1) writer.take_turn();
    load_tile<7>(w + kTileElements, kPairBytes);
    multiply_tile<1, 4, 7>(), turn(1), writer.take_turn();
    if constexpr (kRowTiles == 2) {
      load_tile<5>(x_below, row_bytes);
      multiply_tile<2, 5, 6>(), turn(2);
      multiply_tile<3, 5, 7>(), turn(3), writer.take_turn();
    }
  }
  store_tile<0>(sums, kSumBytes), store_tile<1>(sums + kTile, kSumBytes);
  if constexpr (kRowTiles == 2) store_tile<2>(sums_below, kSumBytes), store_tile<3>(sums_below + kTile, kSumBytes);
}

// The piece that takes the place of `now` in the caches: the same panel's next one, or the first of the panel at its
// place in the next block. Of no steps where there is none, or where the next block has the same panels.
inline Piece piece_after(const Piece& now, int64_t all_steps, int64_t max_steps, const Block& block,
                         const Block& next) {
  const int64_t end = now.step + now.steps, panel = next.panel + now.panel - block.panel;
  if (end < all_steps) return {now.panel, end, std::min(max_steps, all_steps - end)};
  const bool has_one = next.panel != block.panel && panel < next.panel_end;
  return has_one ? Piece{panel, 0, max_steps} : Piece{};
}

// One block, K in pieces so that what is multiplied again at once stays in the L1 cache, and the rest in the L2 cache:
// the rows of a pass meet all panels, or a panel that had to be expanded meets all rows. In one piece where there is
// but one pass. Meanwhile asks memory for the block that comes next.
template <class Finish, class Panels>
class BlockProduct {
 public:
  BlockProduct(const Problem<BFloat16>& p, const RowTiles& rows, const Panels& panels, const Block& block,
               const Block& next, float* sums)
      : p_(p), rows_(rows), panels_(panels), block_(block), next_(next), sums_(sums), writer_(p),
        all_steps_(divide_up(p.k, kStep)), passes_(block.num_passes()),
        max_steps_(passes_ == 1 ? all_steps_ : divide_up(all_steps_, divide_up(all_steps_, kBlockSteps))) {}

  void compute() {
    for (int64_t step = 0; step < all_steps_; step += max_steps_) {
      const int64_t steps = std::min(max_steps_, all_steps_ - step);
      const auto for_passes = [&](const auto& f) { for (int64_t pass = 0; pass < passes_; ++pass) f(pass); };
      const auto for_panels = [&](const auto& f) { for (int64_t i = block_.panel; i < block_.panel_end; ++i) f(i); };
      if constexpr (Panels::kIsPanelByPanel) {
        for_panels([&](int64_t panel) { for_passes([&](int64_t pass) { multiply(pass, {panel, step, steps}); }); });
      } else {
        for_passes([&](int64_t pass) { for_panels([&](int64_t panel) { multiply(pass, {panel, step, steps}); }); });
      }
    }
  }

 private:
  void multiply(int64_t pass, const Piece& now) {
    const int64_t tile = block_.row_tile + 2 * pass, tile_end = std::min(tile + 2, block_.row_tile_end);
    const bool is_first = now.step == 0, is_last = now.step + now.steps == all_steps_;
    float* sums = sums_ + place_of_sums(pass, now.panel) * 2 * kSumElements;
    const auto multiply_by = [&](const auto& weights) {
      const BFloat16 *x = rows_[tile] + now.step * kStep, *x_below = rows_[tile_end - 1] + now.step * kStep;
      if (tile_end == tile + 2) {
        multiply_tiles<2>(x, x_below, rows_.row_bytes, weights, now.steps, is_first, sums, writer_,
                          ahead_of<2>(now, pass));
      } else {
        multiply_tiles<1>(x, x, rows_.row_bytes, weights, now.steps, is_first, sums, writer_, ahead_of<1>(now, pass));
      }
    };
    pass == 0 ? multiply_by(panels_.first_pass(now, passes_ == 1)) : multiply_by(panels_.later_pass(now));
    if (is_last) writer_.start(tile * kTile, std::min(tile_end * kTile, p_.rows), now.panel, sums);
  }

  // Sums that need not wait for the next piece take turns in two places, which stay in the L1 cache.
  int64_t place_of_sums(int64_t pass, int64_t panel) {
    if (max_steps_ == all_steps_) return turn_ ^= 1;
    return pass * (block_.panel_end - block_.panel) + panel - block_.panel;
  }

  // A share of the piece that takes the place of this one. A panel that is read once asks for its own steps, a few of
  // them ahead.
  template <int kRowTiles>
  Ahead ahead_of(const Piece& now, int64_t pass) const {
    constexpr int64_t kStepLines = Panels::kStepBytes / kLineBytes;
    const int64_t turns = now.steps * 2 * kRowTiles;
    if (passes_ > 1) {
      const Piece then = piece_after(now, all_steps_, max_steps_, block_, next_);
      return Ahead(panels_.start_of(then), then.steps * kStepLines, pass, passes_, turns);
    }
    if (Panels::kAsksForItself && kRowTiles == 1) return {};
    return Ahead(panels_.start_of({now.panel, Panels::kStepsAhead}), now.steps * kStepLines, 0, 1, turns);
  }

  const Problem<BFloat16>& p_;
  const RowTiles& rows_;
  const Panels& panels_;
  const Block &block_, &next_;
  float* const sums_;
  RowWriter<Finish> writer_;
  const int64_t all_steps_, passes_, max_steps_;
  int64_t turn_ = 0;
};

// How a problem is cut into blocks. Large ones reread less; some per thread are wanted so that all end together, and
// blocks of one size: a thread that gets a smaller one than the others waits for them.
class Blocks {
 public:
  Blocks(int64_t rows, int64_t columns) : row_tiles_(divide_up(rows, kTile)), panels_(divide_up(columns, kPanel)) {
    const int64_t threads = at::get_num_threads(), wanted = 4 * threads;
    while (count() < wanted && (height_ > 2 || width_ > 1)) {
      const bool is_wide = width_ * kPanel >= std::min(height_, row_tiles_) * kTile;
      (width_ > 1 && (is_wide || height_ == 2) ? width_ : height_) /= 2;
    }
    height_ = 2 * evened(divide_up(row_tiles_, 2), height_ / 2, 1, 1);  // a pass takes two
    width_ = evened(panels_, width_, divide_up(row_tiles_, height_), threads);
  }

  int64_t count() const { return divide_up(row_tiles_, height_) * divide_up(panels_, width_); }

  // Those of the same panels follow each other. An empty one from count() on.
  Block operator[](int64_t i) const {
    if (i >= count()) return {};
    const int64_t row_blocks = divide_up(row_tiles_, height_);
    const int64_t row_tile = i % row_blocks * height_, panel = i / row_blocks * width_;
    return {row_tile, std::min(row_tile + height_, row_tiles_), panel, std::min(panel + width_, panels_)};
  }

 private:
  // The size, `most` or a little less, with which threads that share `times` as many parts are done soonest.
  static int64_t evened(int64_t total, int64_t most, int64_t times, int64_t threads) {
    const auto duration = [&](int64_t size) { return divide_up(divide_up(total, size) * times, threads) * size; };
    int64_t best = most;
    for (int64_t size = most; size > 0 && 4 * size >= 3 * most; --size) {
      if (duration(size) < duration(best)) best = size;
    }
    return best;
  }

  int64_t row_tiles_, panels_, height_ = kBlockRowTiles, width_ = kBlockPanels;
};

template <class Finish, class PanelsOfThread>
inline void multiply_and_finish(const Problem<BFloat16>& p, const PanelsOfThread& panels_of_thread) {
  const RowTiles rows = row_tiles_of(p);
  const Blocks blocks(p.rows, p.n);
  run_foreseen_tasks(blocks.count(), is_small(p), [&](int64_t task, int64_t then) {
    static thread_local Scratch<float> scratch;
    float* sums = scratch.get(kBlockRowTiles * kBlockPanels * kSumElements);
    const auto panels = panels_of_thread();
    const Block block = blocks[task], next = blocks[then];
    configure_tiles(std::min(p.rows, kTile));
    BlockProduct<Finish, std::decay_t<decltype(panels)>>(p, rows, panels, block, next, sums).compute();
    release_tiles();
  });
}

template <class PanelsOfThread>
inline void multiply_panels(const Problem<BFloat16>& p, const PanelsOfThread& panels_of_thread) {
  if (p.activation == Activation::kNone) return multiply_and_finish<Rounded>(p, panels_of_thread);
  with_activation(p.activation, [&]<class Op>() { multiply_and_finish<Gated<Op>>(p, panels_of_thread); });
}

// By what `pack` made.
inline void multiply(const Problem<BFloat16>& p, const BFloat16* packed) {
  multiply_panels(p, [&] { return PlainPanels{packed, divide_up(p.k, kStep)}; });
}

// By what `pack_coded` made.
inline void multiply_coded(const Problem<BFloat16>& p, const uint8_t* packed, int64_t panel_bytes) {
  multiply_panels(p, [&] {
    static thread_local Scratch<uint8_t> scratch;
    // A piece is no longer than that where there are several passes, else two places are enough.
    uint8_t* expanded = scratch.get(kBlockSteps * PlainPanels::kStepBytes);
    return CodedPanels{coding::Panels(packed, panel_bytes, divide_up(p.k, kStep) * kStepUnits), expanded};
  });
}

}  // namespace twostep::amx
