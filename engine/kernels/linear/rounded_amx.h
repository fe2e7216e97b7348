// Rounded rows times a panel in blocks (see rounded_task.h), in AMX tiles of 16 rows, 16 columns and a group along K.
// Groups have their codes as tiles want them: four along K of each column.
//
// The groups of a piece are expanded first. Then, by turns, tiles multiply some groups while vectors add the dot
// products of the turn before.

#pragma once

#include <algorithm>
#include <cstdint>

#include "base/amx_tiles.h"
#include "base/int_dot.h"
#include "base/prefetch.h"
#include "base/scratch.h"
#include "blocks/expand.h"
#include "linear/rounded_task.h"

namespace twostep::rounded::amx {

using namespace twostep::amx;

constexpr int64_t kFewRows = 8;  // up to these the vector units are faster
constexpr int kTurnGroups = 4;   // of a turn, at most
constexpr int64_t kRowBytes = 4 * blocks::kColumns, kTileColumns = kPanel;  // of codes; two tiles side by side

inline bool is_for_tiles(const PanelTask& task) { return task.num_rows() > kFewRows && is_granted(); }

typedef int32_t GroupDots[2][kTile][kLanes];

// Some groups times rows of a tile and the columns of two.
struct Turn {
  RowsAtGroup rows;
  int64_t num_rows, column;
  const blocks::Group* groups;
  float* sums;
};

// Tiles 0 to 3 are dot products, 4 and 5 rows, 6 and 7 codes; groups take turns at those of rows and dot products.
template <int kGroup, int kOdd>
TWOSTEP_INLINE inline void multiply_group(const Turn& turn, int64_t group, GroupDots& dots) {
  const uint8_t* codes = turn.groups[group].codes + 4 * turn.column;
  constexpr int kDots = 2 * kOdd, kRows = 4 + kOdd;
  zero_tile<kDots>(), zero_tile<kDots + 1>();
  load_tile<kRows>(turn.rows.numbers + group * kGroup, turn.rows.stride);
  load_tile<6>(codes, kRowBytes), multiply_bytes<kDots, kRows, 6>();
  load_tile<7>(codes + 4 * kTile, kRowBytes), multiply_bytes<kDots + 1, kRows, 7>();
  store_tile<kDots>(dots[0], sizeof(dots[0][0])), store_tile<kDots + 1>(dots[1], sizeof(dots[1][0]));
}

// Adds dot products of a turn to the sums, row by row.
template <bool kHasOffsets, int kGroups>
class Addition {
 public:
  TWOSTEP_INLINE Addition(const Turn& turn, const GroupDots* dots) : turn_(turn), dots_(dots) {
    for_each_tile([&](auto g, auto half) TWOSTEP_INLINE {
      const int64_t column = turn.column + half * kLanes;
      scales_[g][half] = load(turn.groups[g].scales + column);
      if constexpr (kHasOffsets) offsets_[g][half] = load(turn.groups[g].offsets + column);
    });
  }

  TWOSTEP_INLINE void add(int64_t row) const {
    const RowGroup* of_row = turn_.rows.groups + row * turn_.rows.group_stride;
    float* at = turn_.sums + row * blocks::kColumns;
    Vec sums[2] = {load(at), load(at + kLanes)};
    for_each_tile([&](auto g, auto half) TWOSTEP_INLINE {
      const integers::Dots dots{{(integers::PartI)_mm512_load_si512(dots_[g][half][row])}};
      Vec share = integers::to_floats(dots) * scales_[g][half];
      if constexpr (kHasOffsets) share = share + offsets_[g][half] * broadcast(of_row[g].sum);
      sums[half] = sums[half] + share * broadcast(of_row[g].scale);
    });
    store(at, sums[0]), store(at + kLanes, sums[1]);
  }

 private:
  template <class F>
  TWOSTEP_INLINE static void for_each_tile(F f) {
    unroll<kGroups>([&](auto g) TWOSTEP_INLINE { unroll<2>([&](auto half) TWOSTEP_INLINE { f(g, half); }); });
  }

  const Turn& turn_;
  const GroupDots* dots_;
  Vec scales_[kGroups][2], offsets_[kGroups][2];
};

// The working memory of a thread.
struct alignas(64) Working {
  GroupDots dots[2][kTurnGroups];
};

// Multiplies by `kGroups` groups of a panel at a time.
template <int kGroup, bool kHasOffsets, int kGroups>
class Turns {
 public:
  Turns(Working& working, Prefetcher& ahead) : working_(working), ahead_(ahead) {}
  ~Turns() {
    if (before_.num_rows > 0) add_rows<false>(before_);
  }

  void take(const Turn& turn) {
    add_rows<true>(turn);
    before_ = turn, number_ ^= 1;
  }

 private:
  // Adds the rows of the turn before, with kMultiplies meanwhile the groups are multiplied.
  template <bool kMultiplies>
  TWOSTEP_INLINE void add_rows(const Turn& turn) {
    const Turn before = before_;
    const Addition<kHasOffsets, kGroups> addition(before.num_rows > 0 ? before : turn, working_.dots[number_ ^ 1]);
    const int64_t share = divide_up(before.num_rows, kGroups);
    unroll<kGroups>([&](auto g) TWOSTEP_INLINE {
      if constexpr (kMultiplies) multiply_group<kGroup, g % 2>(turn, g, working_.dots[number_][g]), ahead_.fetch();
      const int64_t end = std::min((g + 1) * share, before.num_rows);
      for (int64_t row = g * share; row < end; ++row) addition.add(row);
    });
  }

  Working& working_;
  Prefetcher& ahead_;
  Turn before_{};
  int number_ = 0;
};

// Multiplies all rows of a task by the groups [first, end) of a piece.
template <int kGroup, bool kHasOffsets, int kGroups>
void multiply_groups(const PanelTask& task, const PieceOfK& piece, int64_t first, int64_t end, float* sums,
                     const blocks::Group* groups, Working& working, Prefetcher& ahead) {
  Turns<kGroup, kHasOffsets, kGroups> turns(working, ahead);
  for (; first < end; first += kGroups) {
    for (int64_t row = 0; row < task.num_rows(); row += kTile) {
      const RowsAtGroup rows = task.rows_at(row, piece.start + first * kGroup);
      const int64_t num_rows = std::min(kTile, task.num_rows() - row);
      for (int64_t column = 0; column < blocks::kColumns; column += kTileColumns) {
        turns.take({rows, num_rows, column, groups + first, sums + row * blocks::kColumns + column});
      }
    }
  }
}

template <int kGroup, bool kHasOffsets>
void multiply_piece(const PanelTask& task, const PieceOfK& piece, float* sums, blocks::Group* groups,
                    Working& working) {
  const int64_t whole = piece.num_groups / kTurnGroups * kTurnGroups;
  const int64_t turns = divide_up(task.num_rows(), kTile) * (blocks::kColumns / kTileColumns);
  Prefetcher ahead = task.ahead_of(piece, turns * piece.num_groups);
  for (int64_t g = 0; g < piece.num_groups; ++g) task.expand(piece, g, groups[g]);
  multiply_groups<kGroup, kHasOffsets, kTurnGroups>(task, piece, 0, whole, sums, groups, working, ahead);
  multiply_groups<kGroup, kHasOffsets, 1>(task, piece, whole, piece.num_groups, sums, groups, working, ahead);
}

using MultiplyPiece = void (*)(const PanelTask&, const PieceOfK&, float*, blocks::Group*, Working&);

inline MultiplyPiece multiplier_of(const blocks::Reader& reader) {
  if (reader.group == RoundedRows::kHalf) {
    return reader.has_offsets ? multiply_piece<16, true> : multiply_piece<16, false>;
  }
  return reader.has_offsets ? multiply_piece<32, true> : multiply_piece<32, false>;
}

inline void multiply_task(const PanelTask& task, float* sums, blocks::Group* groups) {
  static thread_local Scratch<Working> scratch;
  Working& working = *scratch.get(1);
  const MultiplyPiece multiply = multiplier_of(task.reader());
  configure_tiles(std::min(task.num_rows(), kTile), task.reader().group);
  task.compute(sums, groups, [&](const PieceOfK& piece) { multiply(task, piece, sums, groups, working); });
  release_tiles();
}

}  // namespace twostep::rounded::amx
