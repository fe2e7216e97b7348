// Low-rank adapters of linear layers (LoRA: Hu et al., 2021): each adds up * (down * x) to the rows of its requests.
//
// Both products are those of `grouped_linear`: a row has the same bits whatever adapters the other rows have. The plain
// path is engine/weights/adapters.py.

#pragma once

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/from_blob.h>
#include <c10/util/BFloat16.h>

#include <algorithm>
#include <cstdint>
#include <map>
#include <optional>
#include <utility>
#include <vector>

#include "base/operators.h"
#include "base/rows.h"
#include "base/thread_pool.h"
#include "base/vec.h"

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
  explicit AdapterRows(const std::optional<at::Tensor>& adapters) {
    if (!adapters) return;
    adapters_ = adapters->contiguous();
    const auto* numbers = adapters_.const_data_ptr<int64_t>();
    for (int64_t row = 0; row < adapters_.numel(); ++row) {
      if (numbers[row] >= 0) group_of(numbers[row]).rows.push_back(row);
    }
  }

  bool empty() const { return groups_.empty(); }
  const std::vector<Group>& groups() const { return groups_; }

  // Returns these rows alone, in this order.
  AdapterRows taken(const at::Tensor& rows) const {
    return empty() ? AdapterRows() : AdapterRows(adapters_.index_select(0, rows));
  }
  AdapterRows narrowed(int64_t first, int64_t count) const {
    return empty() ? AdapterRows() : AdapterRows(adapters_.narrow(0, first, count));
  }

 private:
  Group& group_of(int64_t adapter) {
    const auto is_same = [&](const Group& each) { return each.adapter == adapter; };
    const auto found = std::find_if(groups_.begin(), groups_.end(), is_same);
    return found != groups_.end() ? *found : groups_.emplace_back(Group{adapter, {}});
  }

  at::Tensor adapters_;
  std::vector<Group> groups_;
};

// Columns of a linear layer's result to which adapters add as one: those of one layer of the checkpoint.
class AdaptedColumns {
 public:
  // columns [N]: where they lie in a row of the result
  explicit AdaptedColumns(const at::Tensor& columns) : columns_(columns.contiguous()) {
    const auto* to = columns_.const_data_ptr<int64_t>();
    for (int64_t i = 0; i < columns_.numel(); ++i) {
      if (i > 0 && to[i] == to[i - 1] + 1) {
        ++runs_.back().count;
      } else {
        runs_.push_back({to[i], i, 1});
      }
    }
  }

  bool are(const at::Tensor& columns) const { return columns_.equal(columns); }

  // down packed of [rank, K], up packed of [N, rank]
  void set(int64_t adapter, at::Tensor down, at::Tensor up, int64_t rank) {
    factors_.insert_or_assign(adapter, Factors{std::move(down), std::move(up), rank});
  }
  void release(int64_t adapter) { factors_.erase(adapter); }

  // Whether the adapter has factors for these columns.
  bool has(int64_t adapter) const { return factors_.contains(adapter); }

  // x [T, K], out [T, columns of all]; the rows of these numbers have the adapter.
  void add(const at::Tensor& x, const at::Tensor& out, int64_t adapter, c10::ArrayRef<int64_t> rows) const {
    const Factors& factors = factors_.at(adapter);
    const auto count = static_cast<int64_t>(rows.size());
    const at::Tensor which = at::from_blob(const_cast<int64_t*>(rows.data()), {count}, at::kLong);
    const at::Tensor down = grouped_linear(take_rows(x, which), {{&factors.down, {}, count}}, factors.rank);
    const at::Tensor added = grouped_linear(down, {{&factors.up, {}, count}}, columns_.numel());
    if (out.scalar_type() == at::kFloat) {
      add_to<float>(out, rows, added);
    } else {
      add_to<at::BFloat16>(out, rows, added);
    }
  }

 private:
  struct Factors {
    at::Tensor down, up;
    int64_t rank;
  };
  struct Run {
    int64_t to, from, count;
  };

  template <class Element>
  void add_to(const at::Tensor& out, c10::ArrayRef<int64_t> numbers, const at::Tensor& added) const {
    constexpr int64_t kGrain = 1 << 14;  // numbers
    const auto* terms = added.const_data_ptr<Element>();
    auto* sums = out.mutable_data_ptr<Element>();
    const int64_t count = added.size(1), stride = out.size(1);
    run_ranges(static_cast<int64_t>(numbers.size()), divide_up(kGrain, count), [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        for (const Run& run : runs_) {
          Element* sum = sums + numbers[i] * stride + run.to;
          const Element* term = terms + i * count + run.from;
          for_each_vector(run.count, [&](int64_t j, int64_t lanes) TWOSTEP_INLINE {
            store_upto(sum + j, lanes, load_upto(sum + j, lanes) + load_upto(term + j, lanes));
          });
        }
      }
    });
  }

  at::Tensor columns_;
  std::vector<Run> runs_;
  std::map<int64_t, Factors> factors_;
};

// Adds to out [T, N], in its place, what the rows' adapters make of x [T, K]. Each task multiplies some rows of one
// adapter for one layer of the checkpoint, both times: nobody waits between the products.
inline void add_adapted(const std::vector<AdaptedColumns>& adapted, const at::Tensor& x, const at::Tensor& out,
                        const AdapterRows& rows) {
  constexpr int64_t kFew = 8, kMany = 64;  // rows of a task
  struct Piece {
    const AdaptedColumns* columns;
    int64_t adapter;
    c10::ArrayRef<int64_t> rows;
  };
  std::vector<Piece> pieces;
  for (const auto& group : rows.groups()) {
    const c10::ArrayRef<int64_t> all(group.rows);
    const auto count = static_cast<int64_t>(all.size());
    const int64_t most = std::clamp(divide_up(count, int64_t{at::get_num_threads()}), kFew, kMany);
    for (const AdaptedColumns& columns : adapted) {
      for (int64_t first = 0; columns.has(group.adapter) && first < count; first += most) {
        pieces.push_back({&columns, group.adapter, all.slice(first, std::min(most, count - first))});
      }
    }
  }
  run_tasks(static_cast<int64_t>(pieces.size()), false, [&](int64_t i) {
    pieces[i].columns->add(x, out, pieces[i].adapter, pieces[i].rows);
  });
}

}  // namespace twostep
