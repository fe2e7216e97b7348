// Low-rank adapters of linear layers (LoRA: Hu et al., 2021): each adds up * (down * x) to the rows of its requests.
//
// Both products are those of `grouped_linear`: a row has the same bits whatever adapters the other rows have. The plain
// path is engine/weights/adapters.py.

#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <utility>
#include <vector>

#include "base/array_ref.h"
#include "base/tensor.h"

namespace twostep {

// The rows of a step that have adapters.
class AdapterRows {
 public:
  struct Group {
    int64_t adapter;
    std::vector<int64_t> rows;
  };

  AdapterRows() = default;

  // adapters [T]: the number of each row's adapter, -1 for none
  explicit AdapterRows(const std::optional<Tensor>& adapters);

  bool empty() const { return groups_.empty(); }
  const std::vector<Group>& groups() const { return groups_; }

  // Returns these rows alone, in this order.
  AdapterRows taken(const Tensor& rows) const;
  AdapterRows narrowed(int64_t first, int64_t count) const;

 private:
  Group& group_of(int64_t adapter);

  Tensor adapters_;
  std::vector<Group> groups_;
};

// Columns of a linear layer's result to which adapters add as one: those of one layer of the checkpoint.
class AdaptedColumns {
 public:
  // columns [N]: where they lie in a row of the result
  explicit AdaptedColumns(const Tensor& columns);

  bool are(const Tensor& columns) const { return columns_.equal(columns); }

  // down packed of [rank, K], up packed of [N, rank]
  void set(int64_t adapter, Tensor down, Tensor up, int64_t rank) {
    factors_.insert_or_assign(adapter, Factors{std::move(down), std::move(up), rank});
  }
  void release(int64_t adapter) { factors_.erase(adapter); }

  // Whether the adapter has factors for these columns.
  bool has(int64_t adapter) const { return factors_.contains(adapter); }

  // x [T, K], out [T, columns of all]; the rows of these numbers have the adapter.
  void add(const Tensor& x, const Tensor& out, int64_t adapter, ArrayRef<int64_t> rows) const;

 private:
  struct Factors {
    Tensor down, up;
    int64_t rank;
  };
  struct Run {
    int64_t to, from, count;
  };

  template <class Element>
  void add_to(const Tensor& out, ArrayRef<int64_t> numbers, const Tensor& added) const;

  Tensor columns_;
  std::vector<Run> runs_;
  std::map<int64_t, Factors> factors_;
};

// Adds to out [T, N], in its place, what the rows' adapters make of x [T, K].
void add_adapted(const std::vector<AdaptedColumns>& adapted, const Tensor& x, const Tensor& out,
                 const AdapterRows& rows);

}  // namespace twostep
