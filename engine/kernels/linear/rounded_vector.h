// Rounded rows times a panel in blocks (see rounded_task.h), in vectors.
//
// A panel's groups are expanded to codes of 8 bits as for float32. The first pass over a piece of K expands it and
// multiplies each group by the first rows; passes with other rows find all of its groups in the L1 cache.

#pragma once

#include <cstdint>
#include <cstring>

#include "base/int_dot.h"
#include "base/prefetch.h"
#include "blocks/expand.h"
#include "linear/formats_vector.h"
#include "linear/rounded_task.h"

namespace twostep::vector {

using rounded::PanelTask, rounded::PieceOfK, rounded::RoundedRows, rounded::RowGroup, rounded::RowsAtGroup;

// Dot products of so many rows and vectors of columns, and their sums, fill the vector registers.
#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int kRoundedTileRows = 6;
constexpr int vectors_at_once(int rows) { return rows > 3 ? 2 : 4; }
#else
constexpr int kRoundedTileRows = 4;
constexpr int vectors_at_once(int rows) { return rows > 2 ? 1 : 2; }
#endif

// sums += kRows rows times groups of kGroup along K, in kVectors vectors of columns from `column` on.
template <int64_t kGroup, bool kHasOffsets, int kRows, int kVectors>
Prefetcher multiply_columns(const RowsAtGroup& rows, const blocks::Group* groups, int64_t num_groups, int64_t column,
                            float* sums, Prefetcher ahead) {
  using integers::PartB, integers::PartI;
  Vec tile[kRows][kVectors];
  const auto for_each_sum = [&](auto f) TWOSTEP_INLINE {
    unroll<kRows>([&](auto r) TWOSTEP_INLINE {
      unroll<kVectors>([&](auto v) TWOSTEP_INLINE {
        f(tile[r][v], sums + r * blocks::kColumns + column + v * kLanes);
      });
    });
  };
  for_each_sum([](Vec& sum, const float* at) TWOSTEP_INLINE { std::memcpy(&sum, at, sizeof(sum)); });
  for (int64_t g = 0; g < num_groups; ++g) {
    const blocks::Group& group = groups[g];
    PartI dots[kRows][kVectors];
    unroll<kRows>([&](auto r) TWOSTEP_INLINE {
      unroll<kVectors>([&](auto v) { dots[r][v] = PartI{} + rows.groups[r * rows.group_stride + g].start; });
    });
    const uint8_t* codes = group.codes + column * 4;
    const int8_t* x = rows.numbers + g * kGroup;
    for (int64_t k = 0; k < kGroup; k += 4, x += 4, codes += 4 * blocks::kColumns) {
      PartB bytes[kVectors];
      unroll<kVectors>([&](auto v) TWOSTEP_INLINE {
        std::memcpy(&bytes[v], codes + v * sizeof(PartB), sizeof(PartB));
        bytes[v] ^= uint8_t(integers::kOffset);  // which adds it
      });
      unroll<kRows>([&](auto r) TWOSTEP_INLINE {
        unroll<kVectors>([&](auto v) TWOSTEP_INLINE {
          dots[r][v] = integers::add_products(dots[r][v], bytes[v], x + r * rows.stride);
        });
      });
      ahead.fetch();
    }
    unroll<kVectors>([&](auto v) TWOSTEP_INLINE {
      const Vec scales = Float32::load(group.scales + column + v * kLanes);
      const Vec offsets = Float32::load(group.offsets + column + v * kLanes);
      unroll<kRows>([&](auto r) TWOSTEP_INLINE {
        const RowGroup& of_row = rows.groups[r * rows.group_stride + g];
        Vec share = __builtin_convertvector(dots[r][v], Vec) * scales;
        if constexpr (kHasOffsets) share = share + offsets * of_row.sum;
        tile[r][v] = tile[r][v] + share * of_row.scale;
      });
    });
  }
  for_each_sum([](const Vec& sum, float* at) TWOSTEP_INLINE { std::memcpy(at, &sum, sizeof(sum)); });
  return ahead;
}

template <int64_t kGroup, bool kHasOffsets, int kRows>
Prefetcher multiply_groups(const RowsAtGroup& rows, const blocks::Group* groups, int64_t num_groups, float* sums,
                           Prefetcher ahead) {
  constexpr int kVectors = vectors_at_once(kRows);
  for (int64_t column = 0; column < blocks::kColumns; column += kVectors * kLanes) {
    ahead = multiply_columns<kGroup, kHasOffsets, kRows, kVectors>(rows, groups, num_groups, column, sums, ahead);
  }
  return ahead;
}

using MultiplyGroups = Prefetcher (*)(const RowsAtGroup&, const blocks::Group*, int64_t, float*, Prefetcher);

template <int64_t kGroup, bool kHasOffsets, int kRows = kRoundedTileRows>
MultiplyGroups multiplier_of(int64_t rows) {
  if constexpr (kRows > 1) {
    if (rows < kRows) return multiplier_of<kGroup, kHasOffsets, kRows - 1>(rows);
  }
  return multiply_groups<kGroup, kHasOffsets, kRows>;
}

inline MultiplyGroups multiplier_of(const blocks::Reader& reader, int64_t rows) {
  if (reader.group == RoundedRows::kHalf) {
    return reader.has_offsets ? multiplier_of<16, true>(rows) : multiplier_of<16, false>(rows);
  }
  return reader.has_offsets ? multiplier_of<32, true>(rows) : multiplier_of<32, false>(rows);
}

// Multiplies all rows of a task by the groups of a piece.
inline void multiply_piece(const PanelTask& task, const PieceOfK& piece, float* sums, blocks::Group* groups) {
  const blocks::Reader& reader = task.reader();
  const int64_t num_rows = task.num_rows(), passes = divide_up(num_rows, kRoundedTileRows);
  const int64_t vectors = vectors_at_once(divide_up(num_rows, passes));
  const int64_t turns_of_group = reader.group / 4 * (blocks::kColumns / kLanes / vectors);
  Prefetcher ahead = task.ahead_of(piece, passes * piece.num_groups * turns_of_group);
  // Tiles of nearly equal height: 8 rows run as 4 + 4, not as 6 + 2.
  for (int64_t pass = 0, row = 0; pass < passes; ++pass) {
    const int64_t count = divide_up(num_rows - row, passes - pass);
    const MultiplyGroups multiply = multiplier_of(reader, count);
    float* to = sums + row * blocks::kColumns;
    if (pass > 0) {
      ahead = multiply(task.rows_at(row, piece.start), groups, piece.num_groups, to, ahead);
    } else {
      for (int64_t g = 0; g < piece.num_groups; ++g) {
        task.expand(piece, g, groups[g]);
        ahead = multiply(task.rows_at(row, piece.start + g * reader.group), groups + g, 1, to, ahead);
      }
    }
    row += count;
  }
}

}  // namespace twostep::vector
