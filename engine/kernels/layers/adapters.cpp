#include "layers/adapters.h"

#include <algorithm>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "base/array_ref.h"
#include "base/bfloat16.h"
#include "base/operators.h"
#include "base/rows.h"
#include "base/thread_pool.h"
#include "base/vec.h"

namespace twostep {

AdapterRows::AdapterRows(const std::optional<Tensor>& adapters) {
  if (!adapters) return;
  adapters_ = adapters->contiguous();
  const auto* numbers = adapters_.const_data_ptr<int64_t>();
  for (int64_t row = 0; row < adapters_.numel(); ++row) {
    if (numbers[row] >= 0) group_of(numbers[row]).rows.push_back(row);
  }
}

AdapterRows AdapterRows::taken(const Tensor& rows) const {
  return empty() ? AdapterRows() : AdapterRows(take_rows(adapters_.unsqueeze(-1), rows).squeeze(-1));
}

AdapterRows AdapterRows::narrowed(int64_t first, int64_t count) const {
  return empty() ? AdapterRows() : AdapterRows(adapters_.narrow(0, first, count));
}

AdapterRows::Group& AdapterRows::group_of(int64_t adapter) {
  const auto is_same = [&](const Group& each) { return each.adapter == adapter; };
  const auto found = std::find_if(groups_.begin(), groups_.end(), is_same);
  return found != groups_.end() ? *found : groups_.emplace_back(Group{adapter, {}});
}

AdaptedColumns::AdaptedColumns(const Tensor& columns) : columns_(columns.contiguous()) {
  const auto* to = columns_.const_data_ptr<int64_t>();
  for (int64_t i = 0; i < columns_.numel(); ++i) {
    if (i > 0 && to[i] == to[i - 1] + 1) {
      ++runs_.back().count;
    } else {
      runs_.push_back({to[i], i, 1});
    }
  }
}

template <class Element>
void AdaptedColumns::add_to(const Tensor& out, ArrayRef<int64_t> numbers, const Tensor& added) const {
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

void AdaptedColumns::add(const Tensor& x, const Tensor& out, int64_t adapter, ArrayRef<int64_t> rows) const {
  const Factors& factors = factors_.at(adapter);
  const auto count = static_cast<int64_t>(rows.size());
  const Tensor which = over_memory({std::shared_ptr<void>(), const_cast<int64_t*>(rows.data())}, {count}, kLong);
  const Tensor down = grouped_linear(take_rows(x, which), {{&factors.down, {}, count}}, factors.rank);
  const Tensor added = grouped_linear(down, {{&factors.up, {}, count}}, columns_.numel());
  if (out.scalar_type() == kFloat) {
    add_to<float>(out, rows, added);
  } else {
    add_to<BFloat16>(out, rows, added);
  }
}

// Each task multiplies some rows of one adapter for one layer of the checkpoint, both times: nobody waits between the
// products.
void add_adapted(const std::vector<AdaptedColumns>& adapted, const Tensor& x, const Tensor& out,
                 const AdapterRows& rows) {
  constexpr int64_t kFew = 8, kMany = 64;  // rows of a task
  struct Piece {
    const AdaptedColumns* columns;
    int64_t adapter;
    ArrayRef<int64_t> rows;
  };
  std::vector<Piece> pieces;
  for (const auto& group : rows.groups()) {
    const ArrayRef<int64_t> all(group.rows);
    const auto count = static_cast<int64_t>(all.size());
    const int64_t most = std::clamp(divide_up(count, allowed_threads()), kFew, kMany);
    for (const AdaptedColumns& columns : adapted) {
      for (int64_t first = 0; columns.has(group.adapter) && first < count; first += most) {
        pieces.push_back({&columns, group.adapter, all.slice(first, std::min(most, count - first))});
      }
    }
  }
  run_tasks(static_cast<int64_t>(pieces.size()), false,
            [&](int64_t i) { pieces[i].columns->add(x, out, pieces[i].adapter, pieces[i].rows); });
}

}  // namespace twostep
