// Rounded rows and a panel of a weight that stays in the blocks of a file: what of them each product of the two reads.
// The integers of a group are multiplied exactly, whatever instruction does it; a group adds
//
//   row_scale * (scale * dot + offset * row_sum)
//
// to an output, rounded after each operation, one group after the other. So a row has the same bits among any others.

#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "base/prefetch.h"
#include "blocks/expand.h"
#include "linear/problem.h"
#include "linear/rounded_rows.h"
#include "linear/sums_writer.h"

namespace twostep::rounded {

constexpr int64_t kRowsPerTask = 192;
constexpr int64_t kPieceLength = 256, kPieceGroups = kPieceLength / RoundedRows::kHalf;  // of K; at most

// Some rows at the first of some groups.
struct RowsAtGroup {
  const int8_t* numbers;
  const RowGroup* groups;
  int64_t stride, group_stride;  // from one row to the next
};

// Some groups of a panel: where they lie, and their place in K.
struct PieceOfK {
  const uint8_t* at;
  int64_t start, num_groups;
  const uint8_t* then;  // what is read after them, or null
};

class PanelTask {
 public:
  // `first_row` is that of the problem; `next` is another panel that is read then, or null.
  PanelTask(const Problem<float>& p, const RoundedRows& rows, int64_t first_row, const Task& task, const uint8_t* next)
      : p_(p), rows_(rows), first_row_(first_row), task_(task), header_(blocks::header_of(p.packed)),
        reader_(blocks::reader_of(header_.panels[task.panel].kind)), next_(next), writer_(p, task.panel) {}

  int64_t num_rows() const { return task_.row_end - task_.row; }
  const blocks::Reader& reader() const { return reader_; }

  // Calls multiply(piece) for all pieces of the panel, in their order, and writes what it has added to `sums`
  // [num_rows, kColumns]. `groups` [kPieceGroups] learn where the panel's factors are.
  template <class Multiply>
  void compute(float* sums, blocks::Group* groups, const Multiply& multiply) const {
    std::memset(sums, 0, num_rows() * blocks::kColumns * sizeof(float));
    const uint8_t* panel = header_.start_of(task_.panel);
    for (int64_t g = 0; g < kPieceGroups; ++g) groups[g].factors = panel;
    PieceOfK piece{panel + reader_.factor_bytes, 0, 0, nullptr};
    for (; piece.start < p_.k; piece.start += kPieceLength, piece.at += bytes_of(piece)) {
      piece.num_groups = std::min(kPieceLength, p_.k - piece.start) / reader_.group;
      piece.then = piece.start + kPieceLength < p_.k ? piece.at + bytes_of(piece) : next_;
      multiply(piece);
    }
    for (int64_t row = 0; row < num_rows(); ++row) writer_.write(task_.row + row, sums + row * blocks::kColumns);
  }

  void expand(const PieceOfK& piece, int64_t group, blocks::Group& to) const {
    reader_.expand(piece.at + group / reader_.groups * reader_.block_bytes, group % reader_.groups, to);
  }

  // The rows from `row` of the task on, at a place in K.
  RowsAtGroup rows_at(int64_t row, int64_t start) const {
    const bool has_halves = reader_.group == RoundedRows::kHalf;
    const RowGroup* groups = has_halves ? rows_.halves : rows_.wholes;
    const int64_t stride = rows_.stride(), group_stride = has_halves ? 2 * rows_.groups : rows_.groups;
    row += first_row_ + task_.row;
    return {rows_.numbers + row * stride + start, groups + row * group_stride + start / reader_.group, stride,
            group_stride};
  }

  // Prefetches what is read after a piece, in so many turns.
  Prefetcher ahead_of(const PieceOfK& piece, int64_t turns) const {
    return Prefetcher(piece.then, piece.then ? divide_up(bytes_of(piece), kLineBytes) : 0, 0, 1, turns);
  }

 private:
  int64_t bytes_of(const PieceOfK& piece) const { return piece.num_groups / reader_.groups * reader_.block_bytes; }

  const Problem<float>& p_;
  const RoundedRows& rows_;
  const int64_t first_row_;
  const Task& task_;
  const blocks::Header& header_;
  const blocks::Reader reader_;
  const uint8_t* const next_;
  const vector::SumsWriter<float, blocks::kColumns> writer_;
};

}  // namespace twostep::rounded
