// How a matmul of AMX tiles is cut into blocks, and in which order the pieces of a block are computed.

#pragma once

#include <algorithm>
#include <cstdint>

#include "base/amx_tiles.h"
#include "base/prefetch.h"
#include "base/runs.h"
#include "base/small_vector.h"
#include "base/thread_pool.h"

namespace twostep::amx {

// A block has 256 rows and as many columns; twice as many columns where rows come from the L3 cache or memory.
constexpr int64_t kBlockRowTiles = 16, kBlockPanels = 8, kMaxBlockPanels = 16;

// The block of sums [row_tile, row_tile_end) x [panel, panel_end), computed by one thread. Each panel is multiplied in
// several passes, with two row tiles each.
struct Block {
  int64_t row_tile = 0, row_tile_end = 0, panel = 0, panel_end = 0;

  int64_t num_passes() const { return divide_up(row_tile_end - row_tile, 2); }
};

// Cuts a problem into blocks. Large blocks reread less, but several per thread let all threads end together, and so do
// blocks of one size: a thread with a smaller one waits for the others. Wide blocks are fewer, and reread rows less.
// Threads share all of `num_problems`, so that one of many is for few of them.
class Blocks {
 public:
  Blocks(int64_t rows, int64_t columns, int64_t num_problems, bool is_wide = false)
      : row_tiles_(divide_up(rows, kTile)), panels_(divide_up(columns, kPanel)) {
    const int64_t threads = divide_up(allowed_threads(), num_problems), wanted = (is_wide ? 1 : 4) * threads;
    if (is_wide) width_ = kMaxBlockPanels;
    while (count() < wanted && (height_ > 2 || width_ > 1)) {
      const bool is_wider = width_ * kPanel >= std::min(height_, row_tiles_) * kTile;
      (width_ > 1 && (is_wider || height_ == 2) ? width_ : height_) /= 2;
    }
    height_ = 2 * evened(divide_up(row_tiles_, 2), height_ / 2, 1, 1);  // a pass has two row tiles
    width_ = evened(panels_, width_, divide_up(row_tiles_, height_), threads);
  }

  int64_t count() const { return divide_up(row_tiles_, height_) * divide_up(panels_, width_); }

  // Blocks of the same panels follow each other. From count() on blocks are empty.
  Block operator[](int64_t i) const {
    if (i >= count()) return {};
    const int64_t row_blocks = divide_up(row_tiles_, height_);
    const int64_t row_tile = i % row_blocks * height_, panel = i / row_blocks * width_;
    return {row_tile, std::min(row_tile + height_, row_tiles_), panel, std::min(panel + width_, panels_)};
  }

 private:
  // Returns the size, `most` or a little less, for which the threads that share `times` as many parts end soonest.
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

// The blocks of several problems; those of one follow each other.
class GroupedBlocks {
 public:
  struct Place {
    int64_t problem = 0;
    Block block;
  };

  void add(const Blocks& blocks) { blocks_.push_back(blocks), numbers_.add(blocks.count()); }

  int64_t count() const { return numbers_.count(); }

  // From count() on blocks are empty.
  Place operator[](int64_t i) const {
    if (i >= count()) return {};
    const auto [problem, number] = numbers_[i];
    return {problem, blocks_[problem][number]};
  }

 private:
  SmallVector<Blocks, 1> blocks_;
  Runs numbers_;
};

// The order in which a block's products are computed, and how much of K at once.
class Order {
 public:
  // Steps of a piece that is used in many passes: rows are streamed past the L1 cache, so it may take more than half.
  static constexpr int64_t kMaxSteps = 14;

  Order(const Block& block, int64_t all_steps)
      : all_steps_(all_steps), is_once_(block.num_passes() == 1), is_by_panel_(goes_by_panel(block, all_steps)) {
    const int64_t most = is_by_panel_ && block.num_passes() >= kManyPasses ? kMaxSteps : kFewSteps;
    max_steps_ = divide_up(all_steps, is_once_ ? 1 : divide_up(all_steps, most));
  }

  // Whether a panel is finished before the next one begins: if it is read only once, or if the rows, all of K, fit into
  // the L2 cache beside everything else. Otherwise each piece of K is multiplied with all panels.
  static bool goes_by_panel(const Block& block, int64_t all_steps) {
    return block.num_passes() == 1 || (block.row_tile_end - block.row_tile) * all_steps <= kMaxTiles;
  }

  bool is_by_panel() const { return is_by_panel_; }

  // With one pass every panel is read once, from end to end.
  bool is_once() const { return is_once_; }

  // The first piece of a block, and the piece after another one; a piece of no steps if there is none.
  Piece first(const Block& block) const { return piece(block, block.panel, 0); }
  Piece after(const Piece& now, const Block& block) const {
    const int64_t next_step = now.step + now.steps, next_panel = now.panel + 1;
    const bool turns_back = is_by_panel_ ? next_step == all_steps_ : next_panel == block.panel_end;
    if (is_by_panel_) return turns_back ? piece(block, next_panel, 0) : piece(block, now.panel, next_step);
    return turns_back ? piece(block, block.panel, next_step) : piece(block, next_panel, now.step);
  }

  bool is_last(const Piece& now) const { return now.step + now.steps == all_steps_; }

 private:
  static constexpr int64_t kMaxTiles = 640, kManyPasses = 5, kFewSteps = 8;

  Piece piece(const Block& block, int64_t panel, int64_t step) const {
    if (panel >= block.panel_end || step >= all_steps_) return {};
    return {panel, step, std::min(max_steps_, all_steps_ - step)};
  }

  const int64_t all_steps_;
  const bool is_once_, is_by_panel_;
  int64_t max_steps_;
};

}  // namespace twostep::amx
