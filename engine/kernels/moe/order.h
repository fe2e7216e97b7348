// Rows sorted by the expert that they chose.

#pragma once

#include <cstdint>
#include <numeric>
#include <vector>

#include "base/check.h"
#include "base/tensor.h"

namespace twostep::moe {

// The slots of all rows, sorted by expert; those of one expert stay in their order.
class Order {
 public:
  // experts [T, S]
  Order(const Tensor& experts, int64_t num_experts)
      : starts_(num_experts + 1), slots_(experts.numel()), places_(experts.numel()) {
    const auto* expert = experts.const_data_ptr<int64_t>();
    for (int64_t slot = 0; slot < count(); ++slot) {
      TWOSTEP_CHECK(0 <= expert[slot] && expert[slot] < num_experts, "a row's expert is out of range");
      ++starts_[expert[slot] + 1];
    }
    std::partial_sum(starts_.begin(), starts_.end(), starts_.begin());
    std::vector<int64_t> next = starts_;
    for (int64_t slot = 0; slot < count(); ++slot) {
      places_[slot] = next[expert[slot]]++;
      slots_[places_[slot]] = slot;
    }
  }

  int64_t count() const { return slots_.size(); }
  int64_t num_experts() const { return starts_.size() - 1; }

  // How many experts have a place.
  int64_t num_chosen() const {
    int64_t count = 0;
    for (int64_t expert = 0; expert < num_experts(); ++expert) count += count_of(expert, expert + 1) > 0;
    return count;
  }

  int64_t slot_at(int64_t place) const { return slots_[place]; }
  int64_t place_of(int64_t slot) const { return places_[slot]; }

  // The places of the experts [first, end).
  int64_t start_of(int64_t expert) const { return starts_[expert]; }
  int64_t count_of(int64_t first, int64_t end) const { return starts_[end] - starts_[first]; }

  // Returns the end of the experts from `first` on that have at most `most` places together, or of one that has more.
  int64_t end_of_batch(int64_t first, int64_t most) const {
    int64_t end = first + 1;
    while (end < num_experts() && count_of(first, end + 1) <= most) ++end;
    return end;
  }

 private:
  std::vector<int64_t> starts_;          // of each expert's places, and the end
  std::vector<int64_t> slots_, places_;  // by place, by slot
};

}  // namespace twostep::moe
