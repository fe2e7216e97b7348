// The bfloat16 product of linear.cpp in AMX tiles. A tile multiplication adds 32 products along K to each of 16 x 16
// float32 sums, for every row by itself and always in the same order. So one code path for all numbers of rows is batch
// invariant, and blocking along K changes nothing: a sum that waits in memory between two blocks is stored and loaded
// as the float32 it is.

#pragma once

#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>

#include "huge_pages.h"
#include "linear.h"

namespace twostep::amx {

using at::BFloat16;

constexpr int64_t kTile = 16;                          // rows and columns of sums in one tile
constexpr int64_t kStep = 32;                          // K per tile multiplication
constexpr int64_t kTileElements = kTile * kStep;       // of one operand
constexpr int64_t kPanel = 2 * kTile;                  // columns of one panel: two tiles
constexpr int64_t kStepElements = 2 * kTileElements;   // of one panel
constexpr int64_t kSumElements = 2 * kTile * kTile;    // 16 rows times one panel
constexpr int64_t kBlockRowTiles = 16, kBlockPanels = 8, kBlockSteps = 8;  // 256 rows, 256 columns, 256 of K

// A step of two row tiles takes 28 ns from the L1 cache, 38 to 47 with its weights in the L2 cache, and 62 to 80 here,
// of which loading and storing sums, finishing rows and asking for more take about 8 each. Tried without gain: blocks of
// half and twice the size in each direction, other orders of loads and products, asking for weights into the L1 cache,
// and, where rows are few, pieces of K so that these stay there.

// Linux saves tile registers only for processes that asked for them.
inline bool is_granted() {
  constexpr int kRequestPermission = 0x1023, kTileData = 18;
  static const bool granted = syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
  return granted;
}

// The instructions themselves: GCC's intrinsics do not tell the compiler what memory they read.
template <int kDestination>
inline void load_tile(const void* from, int64_t row_bytes) {
  asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(from), "r"(row_bytes), "i"(kDestination) : "memory");
}

template <int kSource>
inline void store_tile(void* to, int64_t row_bytes) {
  asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(to), "r"(row_bytes), "i"(kSource) : "memory");
}

template <int kDestination>
inline void zero_tile() {
  asm volatile("tilezero %%tmm%c0" ::"i"(kDestination));
}

template <int kSums, int kRows, int kColumns>
inline void multiply_tile() {
  asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(kSums), "i"(kRows), "i"(kColumns));
}

inline void release_tiles() { asm volatile("tilerelease"); }

// All eight tiles of the calling thread: of 64 bytes, those of the weight with 16 rows, the others with `rows`.
inline void configure_tiles(int64_t rows) {
  struct alignas(64) {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
    uint8_t rows[16] = {};
  } config;
  for (int64_t tile = 0; tile < 8; ++tile) config.rows[tile] = tile < 6 ? rows : kTile;
  asm volatile("ldtilecfg %0" ::"m"(config));
}

// The block of sums [row_tile, row_tile_end) x [panel, panel_end), computed by one thread. Each panel is multiplied in
// several passes, with two row tiles each.
struct Block {
  int64_t row_tile = 0, row_tile_end = 0, panel = 0, panel_end = 0;

  int64_t num_passes() const { return divide_up(row_tile_end - row_tile, 2); }
};

// The steps [step, step + steps) of a panel.
struct Piece {
  int64_t panel = 0, step = 0, steps = 0;
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

// What becomes of the sums of a row in one panel: rounded, they are the result.
struct Rounded {
  static constexpr int64_t kColumns = kPanel;  // of the result

  static void write(__m512 low, __m512 high, __mmask32 mask, BFloat16* out) {
    _mm512_mask_storeu_epi16(out, mask, (__m512i)_mm512_cvtne2ps_pbh(high, low));
  }
};

// Or one tile of the panel gates the other.
template <class Op>
struct Gated {
  static constexpr int64_t kColumns = kTile;
  static_assert(kColumns == kGateBlock && kColumns == kLanes);

  static void write(__m512 gate, __m512 up, __mmask32, BFloat16* out) {
    const __m512i rounded = (__m512i)_mm512_cvtne2ps_pbh(up, gate);
    const Vec activated = Op::apply(widen(_mm512_castsi512_si256(rounded)));
    const Vec factor = widen((__m256i)rounded_to_halves(activated.part[0]));
    store(out, factor * widen(_mm512_extracti64x4_epi64(rounded, 1)));
  }

 private:
  static Vec widen(__m256i x) { return Vec{{(PartF)_mm512_slli_epi32(_mm512_cvtepu16_epi32(x), 16)}}; }
};

// Adds the bias to the finished sums of some rows of one panel and finishes them. It does so one row at a time, between
// the tile multiplications that come after: they leave the vector units idle. Two at a time are too many to overlap.
template <class Finish>
class RowWriter {
 public:
  explicit RowWriter(const Problem<BFloat16>& p) : p_(p), row_size_(p.n * Finish::kColumns / kPanel) {}
  ~RowWriter() { write(p_.rows); }

  // Takes over the sums of rows [row, row_end), which must stay until the next call.
  void start(int64_t row, int64_t row_end, int64_t panel, const float* sums) {
    write(p_.rows);
    const int64_t column = panel * kPanel, columns = std::min(kPanel, p_.n - column);
    for (int64_t i = 0; p_.bias && i < columns; ++i) bias_[i] = float(p_.bias[column + i]);
    mask_ = columns == kPanel ? ~__mmask32{0} : (__mmask32{1} << columns) - 1;
    out_ = p_.out + row * row_size_ + panel * Finish::kColumns;
    sums_ = sums;
    num_rows_ = row_end - row;
  }

  void write(int64_t count) {
    if (num_rows_ == 0) return;
    count = std::min(count, num_rows_), num_rows_ -= count;
    for (; count > 0; --count, out_ += row_size_, sums_ += kPanel) {
      const __m512 low = _mm512_add_ps(_mm512_load_ps(sums_), _mm512_load_ps(bias_));
      const __m512 high = _mm512_add_ps(_mm512_load_ps(sums_ + kTile), _mm512_load_ps(bias_ + kTile));
      Finish::write(low, high, mask_, out_);
    }
  }

 private:
  const Problem<BFloat16>& p_;
  const int64_t row_size_;  // of the result
  alignas(64) float bias_[kPanel] = {};
  __mmask32 mask_ = 0;
  BFloat16* out_ = nullptr;
  const float* sums_ = nullptr;
  int64_t num_rows_ = 0;
};

// Asks memory for some cache lines, into the L2 cache, a few of them at each turn: what is multiplied next arrives
// while the tiles multiply. A turn comes after each tile multiplication: with all lines of a step at once 32 rows took
// 6 % more time, since a core has places for 16 only and drops or delays the others. Asking for every second line only,
// and leaving the others to the hardware, was slower.
struct Ahead {
  static constexpr int64_t kLine = 64;

  const char* at = nullptr;
  int64_t num_lines = 0, lines_per_turn = 0;

  // One of so many equal shares of the lines from `start` on, for that many turns.
  static Ahead share(const void* start, int64_t num_lines, int64_t number, int64_t shares, int64_t turns) {
    const int64_t size = divide_up(num_lines, shares), first = std::min(number * size, num_lines);
    return {static_cast<const char*>(start) + first * kLine, std::min(size, num_lines - first), divide_up(size, turns)};
  }

  TWOSTEP_INLINE void fetch() {
    const int64_t count = std::min(lines_per_turn, num_lines);
    for (const char* end = at + count * kLine; at < end; at += kLine) __builtin_prefetch(at, 0, 2);
    num_lines -= count;
  }
};

// The panels of a weight as they lie in memory.
struct Panels {
  static constexpr int64_t kStepLines = kStepElements * sizeof(BFloat16) / Ahead::kLine;
  static constexpr int64_t kStepsAhead = 2;  // within a panel that is read once

  const BFloat16* packed;
  int64_t all_steps;

  const BFloat16* start_of(const Piece& piece) const {
    return packed + (piece.panel * all_steps + piece.step) * kStepElements;
  }

  // What to ask for in one of `passes` over `now`, in so many turns: a share of the piece `then`. A panel that is read
  // once asks for its own steps, a few of them ahead.
  Ahead ahead_of(const Piece& now, const Piece& then, int64_t pass, int64_t passes, int64_t turns) const {
    if (passes > 1) return Ahead::share(start_of(then), then.steps * kStepLines, pass, passes, turns);
    return Ahead::share(start_of({now.panel, kStepsAhead}), now.steps * kStepLines, 0, 1, turns);
  }
};

// sums += 16 * kRowTiles rows of x times one panel, over `steps` steps of K. Tiles 0 to 3 are the sums, 4 and 5 the
// rows of x, 6 and 7 the columns of the panel.
template <int kRowTiles, class Writer>
inline void multiply_tiles(const BFloat16* x, const BFloat16* x_below, int64_t row_bytes, const BFloat16* w,
                           int64_t steps, bool is_first, float* sums, Writer& writer, Ahead ahead) {
  constexpr int64_t kSumBytes = kPanel * sizeof(float), kPairBytes = kStep * sizeof(BFloat16);
  float* sums_below = sums + kSumElements;
  if (is_first) {
    zero_tile<0>(), zero_tile<1>();
    if constexpr (kRowTiles == 2) zero_tile<2>(), zero_tile<3>();
  } else {
    load_tile<0>(sums, kSumBytes), load_tile<1>(sums + kTile, kSumBytes);
    if constexpr (kRowTiles == 2) load_tile<2>(sums_below, kSumBytes), load_tile<3>(sums_below + kTile, kSumBytes);
  }
  for (; steps > 0; --steps, x += kStep, x_below += kStep, w += kStepElements) {
    load_tile<6>(w, kPairBytes), load_tile<4>(x, row_bytes);
    multiply_tile<0, 4, 6>(), ahead.fetch();
    if constexpr (kRowTiles == 1) writer.write(1);
    load_tile<7>(w + kTileElements, kPairBytes);
    multiply_tile<1, 4, 7>(), ahead.fetch(), writer.write(1);
    if constexpr (kRowTiles == 2) {
      load_tile<5>(x_below, row_bytes);
      multiply_tile<2, 5, 6>(), ahead.fetch();
      multiply_tile<3, 5, 7>(), ahead.fetch(), writer.write(1);
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

// One block, K in pieces so that the rows of a pass stay in the L1 cache and the block's panels in the L2 cache; in one
// piece where there is but one pass. Meanwhile asks memory for the block that comes next.
template <class Finish>
inline void multiply_block(const Problem<BFloat16>& p, const Panels& panels, const Block& block, const Block& next,
                           const RowTiles& rows, float* sums) {
  const int64_t all_steps = divide_up(p.k, kStep), width = block.panel_end - block.panel, passes = block.num_passes();
  const int64_t max_steps = passes == 1 ? all_steps : divide_up(all_steps, divide_up(all_steps, kBlockSteps));
  RowWriter<Finish> writer(p);
  for (int64_t step = 0, end = 0; step < all_steps; step = end) {
    end = std::min(step + max_steps, all_steps);
    int64_t turn = 0;
    for (int64_t pass = 0; pass < passes; ++pass) {
      const int64_t tile = block.row_tile + 2 * pass, tile_end = std::min(tile + 2, block.row_tile_end);
      for (int64_t panel = block.panel; panel < block.panel_end; ++panel, turn ^= 1) {
        const Piece now{panel, step, end - step};
        const Piece then = piece_after(now, all_steps, max_steps, block, next);
        const BFloat16* w = panels.start_of(now);
        const BFloat16 *x = rows[tile] + step * kStep, *x_below = rows[tile_end - 1] + step * kStep;
        // Sums that need not wait for the next piece take turns in two places, which stay in the L1 cache.
        const int64_t place = max_steps == all_steps ? turn : pass * width + panel - block.panel;
        float* tile_sums = sums + place * 2 * kSumElements;
        const bool is_whole = tile_end == tile + 2;
        const int64_t products_per_step = is_whole ? 4 : 2;
        const Ahead ahead = panels.ahead_of(now, then, pass, passes, now.steps * products_per_step);
        if (is_whole) {
          multiply_tiles<2>(x, x_below, rows.row_bytes, w, now.steps, step == 0, tile_sums, writer, ahead);
        } else {
          multiply_tiles<1>(x, x_below, rows.row_bytes, w, now.steps, step == 0, tile_sums, writer, ahead);
        }
        if (end == all_steps) writer.start(tile * kTile, std::min(tile_end * kTile, p.rows), panel, tile_sums);
      }
    }
  }
}

// How a problem is cut into blocks. Large ones reread less; some per thread are wanted so that all end together, and
// blocks of one size: a thread that gets a smaller one than the others waits for them.
class Blocks {
 public:
  Blocks(int64_t rows, int64_t columns) : row_tiles_(divide_up(rows, kTile)), panels_(divide_up(columns, kPanel)) {
    const int64_t wanted = 4 * at::get_num_threads();
    while (count() < wanted && (height_ > 2 || width_ > 1)) {
      const bool is_wide = width_ * kPanel >= std::min(height_, row_tiles_) * kTile;
      (width_ > 1 && (is_wide || height_ == 2) ? width_ : height_) /= 2;
    }
    height_ = 2 * evened(divide_up(row_tiles_, 2), height_ / 2);  // a pass takes two
    width_ = evened(panels_, width_);
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
  // The size, `most` or a little less, that leaves least to be desired of the last part.
  static int64_t evened(int64_t total, int64_t most) {
    int64_t best = most;
    for (int64_t size = most; size > 0 && 4 * size >= 3 * most; --size) {
      if (missing(total, size) < missing(total, best)) best = size;
    }
    return best;
  }
  static int64_t missing(int64_t total, int64_t size) { return divide_up(total, size) * size - total; }

  int64_t row_tiles_, panels_, height_ = kBlockRowTiles, width_ = kBlockPanels;
};

template <class Finish>
inline void multiply_and_finish(const Problem<BFloat16>& p, const BFloat16* packed) {
  const RowTiles rows = row_tiles_of(p);
  const Blocks blocks(p.rows, p.n);
  const Panels panels{packed, divide_up(p.k, kStep)};
  run_foreseen_tasks(blocks.count(), is_small(p), [&](int64_t task, int64_t then) {
    static thread_local Scratch<float> sums;
    configure_tiles(std::min(p.rows, kTile));
    multiply_block<Finish>(p, panels, blocks[task], blocks[then], rows,
                           sums.get(kBlockRowTiles * kBlockPanels * kSumElements));
    release_tiles();
  });
}

inline void multiply(const Problem<BFloat16>& p, const BFloat16* packed) {
  if (p.activation == Activation::kNone) return multiply_and_finish<Rounded>(p, packed);
  with_activation(p.activation, [&]<class Op>() { multiply_and_finish<Gated<Op>>(p, packed); });
}

// weight [N, K] -> [panel][K step][2 tiles of columns][16 pairs along K][16 columns][2], zero padded.
inline at::Tensor pack(const at::Tensor& weight) {
  const int64_t n = weight.size(0), k = weight.size(1), panels = divide_up(n, kPanel), steps = divide_up(k, kStep);
  at::Tensor packed = zeros_in_huge_pages({panels, steps, kPanel, kStep}, weight.options());
  const BFloat16* source = weight.const_data_ptr<BFloat16>();
  BFloat16* target = packed.mutable_data_ptr<BFloat16>();
  run_tasks(panels, false, [&](int64_t panel) {
    for (int64_t column = panel * kPanel; column < std::min(n, (panel + 1) * kPanel); ++column) {
      const int64_t tile = column % kPanel / kTile;
      BFloat16* to = target + panel * steps * kStepElements + tile * kTileElements + column % kTile * 2;
      for (int64_t i = 0; i < k; ++i) {
        to[i / kStep * kStepElements + i % kStep / 2 * kStep + i % 2] = source[column * k + i];
      }
    }
  });
  return packed;
}

}  // namespace twostep::amx
