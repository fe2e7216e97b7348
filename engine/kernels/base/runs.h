// Runs of consecutive numbers.

#pragma once

#include <algorithm>
#include <cstdint>

#include "base/small_vector.h"

namespace twostep {

// The numbers from 0 on, cut into runs one after the other.
class Runs {
 public:
  struct Place {
    int64_t run, offset;
  };

  void add(int64_t length) { ends_.push_back(count() + length); }

  int64_t count() const { return ends_.empty() ? 0 : ends_.back(); }

  // Returns the run that a number below count() is in, and its offset from the run's first.
  Place operator[](int64_t number) const {
    if (ends_.size() == 1) return {0, number};
    const int64_t run = std::upper_bound(ends_.begin(), ends_.end(), number) - ends_.begin();
    return {run, run == 0 ? number : number - ends_[run - 1]};
  }

 private:
  SmallVector<int64_t, 8> ends_;
};

}  // namespace twostep
