// What the implementations of the linear layer share: the description of a problem, its checks, its tasks, and when
// threads pay. There may be several problems at once, each with a weight of its own: their tasks are in one loop.

#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>

#include "base/array_ref.h"
#include "base/bfloat16.h"
#include "base/check.h"
#include "base/operators.h"
#include "base/runs.h"
#include "base/scratch.h"
#include "base/small_vector.h"
#include "base/tensor.h"
#include "base/thread_pool.h"

namespace twostep {

// In lines of its own, as all threads read it (see OwnLines).
template <class Element>
struct alignas(64) Problem {
  const Element* x;     // [rows, k]
  const Element* bias;  // [n], or null
  Element* out;         // [rows, n]
  int64_t rows, k, n;
  Activation activation;  // with one, out is [rows, n / 2], gated
  const void* packed = nullptr;  // the weight
  bool is_bytes = false;         // whether that is bytes, not numbers of the rows' dtype
  int64_t panel_bytes = 0;       // of the weight, if it is
};

// Problems of one size, whose rows lie one after the other in one matrix.
template <class Element>
using Problems = ArrayRef<Problem<Element>>;

template <class Element>
using ProblemList = SmallVector<Problem<Element>, 1>;

template <class Element>
int64_t num_rows_of(Problems<Element> problems) {
  int64_t rows = 0;
  for (const auto& p : problems) rows += p.rows;
  return rows;
}

// Whether waking the thread pool would cost more than it saves.
template <class Element>
bool is_small(Problems<Element> problems) {
  return num_rows_of(problems) * problems.front().n * problems.front().k < 1 << 15;
}

template <class Element>
bool is_small(const Problem<Element>& p) {
  return is_small(Problems<Element>(p));
}

// Rows of a problem, and the panel that they are multiplied with.
struct Task {
  int64_t problem, row, row_end, panel;
};

// The tasks of all problems, each a panel of columns and a block of rows. Those of one panel follow each other, then
// those of one problem: so a thread reads weights in the order in which they lie in memory.
template <class Element>
class alignas(64) Tasks {
 public:
  // Blocks have at most so many rows, of whole tiles, and about equally many.
  Tasks(Problems<Element> problems, int64_t panel_columns, int64_t tile_rows, int64_t block_rows)
      : problems_(problems), tile_rows_(tile_rows), block_rows_(block_rows) {
    const int64_t panels = divide_up(problems.front().n, panel_columns);
    for (const auto& p : problems) {
      most_blocks_ = std::max(most_blocks_, divide_up(p.rows, block_rows));
      tasks_.add(panels * divide_up(p.rows, block_rows));
    }
  }

  int64_t count() const { return tasks_.count(); }

  Task operator[](int64_t i) const {
    const auto [problem, number] = tasks_[i];
    if (most_blocks_ == 1) return {problem, 0, problems_[problem].rows, number};  // without a division
    const int64_t all_rows = problems_[problem].rows, blocks = divide_up(all_rows, block_rows_);
    const int64_t rows = round_up(divide_up(all_rows, blocks), tile_rows_), row = number % blocks * rows;
    return {problem, row, std::min(row + rows, all_rows), number / blocks};
  }

 private:
  const Problems<Element> problems_;
  const int64_t tile_rows_, block_rows_;
  int64_t most_blocks_ = 0;  // of a problem
  Runs tasks_;
};

// A weight with all rows.
inline Share share_of(const Tensor& x, const Tensor& packed, const std::optional<Tensor>& bias) {
  return {&packed, bias.has_value() ? bias->contiguous() : Tensor(), x.size(0)};
}

template <class Element, class Multiply>
Tensor multiply_into(const Buffer& buffer, const Tensor& x, Shares shares, int64_t n, Activation activation,
                     const Multiply& multiply) {
  const int64_t k = x.size(1), columns = activation == Activation::kNone ? n : n / 2;
  const Tensor& out = buffer.get({x.size(0), columns}, x);
  const auto* from = x.const_data_ptr<Element>();
  auto* to = out.mutable_data_ptr<Element>();
  ProblemList<Element> problems;
  for (const Share& each : shares) {
    const auto* bias = each.bias.defined() ? each.bias.const_data_ptr<Element>() : nullptr;
    const bool is_bytes = each.packed->scalar_type() == kByte;
    problems.push_back({from, bias, to, each.rows, k, n, activation, each.packed->const_data_ptr(), is_bytes,
                        is_bytes ? each.packed->size(-1) : 0});
    from += each.rows * k, to += each.rows * columns;
  }
  multiply(Problems<Element>(problems));
  return out;
}

// x [T, K] -> [T, n], or [T, n / 2] gated with an activation. Calls `multiply` with the problems of x's dtype: float32
// or bfloat16.
template <class Multiply>
Tensor multiply_rows_of(const Tensor& x, Shares shares, int64_t n, Activation activation, const Buffer& out,
                        const Multiply& multiply) {
  int64_t rows_left = x.size(0);
  for (const Share& each : shares) {
    TWOSTEP_CHECK(!each.bias.defined() || (each.bias.numel() == n && each.bias.scalar_type() == x.scalar_type()),
                  "bias differs in size or dtype");
    rows_left -= each.rows;
  }
  TWOSTEP_CHECK(rows_left == 0 && !shares.empty(), "each row has one weight");
  const Tensor rows = x.contiguous();
  return x.scalar_type() == kFloat ? multiply_into<float>(out, rows, shares, n, activation, multiply)
                                   : multiply_into<BFloat16>(out, rows, shares, n, activation, multiply);
}

}  // namespace twostep
