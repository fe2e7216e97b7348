// Products of rounded rows with a weight that stays in the blocks of a file. The integers of a group are multiplied
// exactly, whatever instruction does it; a group adds
//
//   row_scale * (scale * dot + offset * row_sum)
//
// to an output, rounded after each operation, one group after the other. So a row has the same bits among any others.
//
// A panel's groups are expanded to codes of 8 bits as for float32. The first pass over a piece of K expands it and
// multiplies each group by the first rows; passes with other rows find all of its groups in the L1 cache.

#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "base/int_dot.h"
#include "base/prefetch.h"
#include "blocks/expand.h"
#include "linear/formats_vector.h"
#include "linear/problem.h"
#include "linear/rounded_rows.h"
#include "linear/sums_writer.h"

namespace twostep::vector {

using rounded::RoundedRows, rounded::RowGroup;

// Dot products of so many rows and vectors of columns, and their sums, fill the vector registers.
#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int kRoundedTileRows = 6;
constexpr int vectors_at_once(int rows) { return rows > 3 ? 2 : 4; }
#else
constexpr int kRoundedTileRows = 4;
constexpr int vectors_at_once(int rows) { return rows > 2 ? 1 : 2; }
#endif

constexpr int64_t kRoundedRowsPerTask = 32 * kRoundedTileRows;
constexpr int64_t kPieceLength = 256, kPieceGroups = kPieceLength / RoundedRows::kHalf;  // of K; at most

// Some rows at the first of some groups.
struct RowsAtGroup {
  const int8_t* numbers;
  const RowGroup* groups;
  int64_t stride, group_stride;  // from one row to the next
};

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

// Multiplies one task.
class RoundedProduct {
 public:
  // `first_row` is that of the problem; `next` is another panel that is read then, or null.
  RoundedProduct(const Problem<float>& p, const RoundedRows& rows, int64_t first_row, const Task& task,
                 const uint8_t* next)
      : p_(p), rows_(rows), first_row_(first_row), task_(task), header_(blocks::header_of(p.packed)),
        reader_(blocks::reader_of(header_.panels[task.panel].kind)), next_(next), writer_(p, task.panel),
        passes_(divide_up(task.row_end - task.row, kRoundedTileRows)) {}

  // sums [kRoundedRowsPerTask, kColumns], groups [kPieceGroups]
  void compute(float* sums, blocks::Group* groups) {
    std::memset(sums, 0, (task_.row_end - task_.row) * blocks::kColumns * sizeof(float));
    const uint8_t* panel = header_.start_of(task_.panel);
    for (int64_t g = 0; g < kPieceGroups; ++g) groups[g].factors = panel;
    const uint8_t* at = panel + reader_.factor_bytes;
    for (int64_t start = 0; start < p_.k; start += kPieceLength) {
      const int64_t num_groups = std::min(kPieceLength, p_.k - start) / reader_.group;
      const int64_t bytes = num_groups / reader_.groups * reader_.block_bytes;
      const Prefetcher ahead = ahead_of(at + bytes, p_.k - start - kPieceLength, num_groups);
      multiply_piece(at, start, num_groups, sums, groups, ahead);
      at += bytes;
    }
    for (int64_t row = task_.row; row < task_.row_end; ++row) {
      writer_.write(row, sums + (row - task_.row) * blocks::kColumns);
    }
  }

 private:
  void multiply_piece(const uint8_t* at, int64_t start, int64_t num_groups, float* sums, blocks::Group* groups,
                      Prefetcher ahead) const {
    // Tiles of nearly equal height: 8 rows run as 4 + 4, not as 6 + 2.
    for (int64_t pass = 0, row = task_.row; pass < passes_; ++pass) {
      const int64_t count = divide_up(task_.row_end - row, passes_ - pass);
      const MultiplyGroups multiply = multiplier_of(reader_, count);
      float* to = sums + (row - task_.row) * blocks::kColumns;
      if (pass > 0) {
        ahead = multiply(rows_at(row, start), groups, num_groups, to, ahead);
      } else {
        for (int64_t g = 0; g < num_groups; ++g) {
          reader_.expand(at + g / reader_.groups * reader_.block_bytes, g % reader_.groups, groups[g]);
          ahead = multiply(rows_at(row, start + g * reader_.group), groups + g, 1, to, ahead);
        }
      }
      row += count;
    }
  }

  RowsAtGroup rows_at(int64_t row, int64_t start) const {
    const bool has_halves = reader_.group == RoundedRows::kHalf;
    const RowGroup* groups = has_halves ? rows_.halves : rows_.wholes;
    const int64_t stride = rows_.stride(), group_stride = has_halves ? 2 * rows_.groups : rows_.groups;
    row += first_row_;
    return {rows_.numbers + row * stride + start, groups + row * group_stride + start / reader_.group, stride,
            group_stride};
  }

  // What to prefetch in all passes over a piece: the next one, before which `left` numbers along K are left.
  Prefetcher ahead_of(const uint8_t* rest, int64_t left, int64_t num_groups) const {
    const uint8_t* then = left > 0 ? rest : next_;
    const int64_t bytes = then ? num_groups / reader_.groups * reader_.block_bytes : 0;
    const int64_t rows = divide_up(task_.row_end - task_.row, passes_);
    const int64_t turns_of_group = reader_.group / 4 * (blocks::kColumns / kLanes / vectors_at_once(rows));
    return Prefetcher(then, divide_up(bytes, kLineBytes), 0, 1, passes_ * num_groups * turns_of_group);
  }

  const Problem<float>& p_;
  const RoundedRows& rows_;
  const int64_t first_row_;
  const Task& task_;
  const blocks::Header& header_;
  const blocks::Reader reader_;
  const uint8_t* const next_;
  const SumsWriter<float, blocks::kColumns> writer_;
  const int64_t passes_;
};

// Multiplies by weights in blocks that were packed for rows of integers.
inline void multiply_rounded(Problems<float> problems) {
  const Problem<float>&first = problems.front(), &last = problems.back();
  const int64_t k = first.k;
  const RoundedRows rows = rounded::round_rows(first.x, (last.x - first.x) / k + last.rows, k);
  const Tasks<float> tasks(problems, blocks::kColumns, kRoundedTileRows, kRoundedRowsPerTask);
  const auto panel_of = [problems](const Task& task) {
    return blocks::header_of(problems[task.problem].packed).start_of(task.panel);
  };
  run_foreseen_tasks(tasks.count(), is_small(problems), [=, &tasks, &rows](int64_t i, int64_t then) {
    static thread_local Scratch<float> sums;
    static thread_local Scratch<blocks::Group> groups;
    const Task task = tasks[i];
    const Problem<float>& p = problems[task.problem];
    const uint8_t *at = panel_of(task), *next = then < tasks.count() ? panel_of(tasks[then]) : at;
    RoundedProduct product(p, rows, (p.x - problems.front().x) / k, task, next == at ? nullptr : next);
    product.compute(sums.get(kRoundedRowsPerTask * blocks::kColumns), groups.get(kPieceGroups));
  });
}

}  // namespace twostep::vector
