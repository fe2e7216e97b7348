// A weight in the layout that AMX tiles read, with prefetches of what is read next.

#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "base/amx_tiles.h"
#include "base/bfloat16.h"
#include "base/huge_pages.h"
#include "base/prefetch.h"
#include "base/tensor.h"
#include "base/thread_pool.h"
#include "base/vec.h"

namespace twostep::amx {


// Panels that are multiplied straight from packed memory.
struct PlainPanels {
  static constexpr int64_t kStepBytes = kStepElements * sizeof(BFloat16);
  static constexpr int64_t kStepsAhead = 2;  // within a panel that is read once
  static constexpr bool kPrefetchesItself = false;
  static constexpr int64_t kTurns = 0;  // of prefetching while a step is expanded

  // The steps of a piece.
  struct Steps {
    const BFloat16* start;

    const BFloat16* operator[](int64_t step) const { return start + step * kStepElements; }
    template <int kRowTiles>
    void prepare_first() {}
    template <int kRowTiles>
    void prepare_next(int) {}
  };

  const BFloat16* packed;
  int64_t all_steps;

  const BFloat16* start_of(const Piece& piece) const {
    return packed + (piece.panel * all_steps + piece.step) * kStepElements;
  }
  Steps only_pass(const Piece& piece) const { return {start_of(piece)}; }
  Steps expanded(const Piece& piece, Prefetcher&) const { return {start_of(piece)}; }
};

// Calls use(panel, numbers) for each panel of a weight [N, K], with its numbers as tiles take them, zero padded:
// [K step][2 tiles of columns][16 pairs along K][16 columns][2].
template <class Use>
inline void for_each_panel(const Tensor& weight, const Use& use) {
  const int64_t n = weight.size(0), k = weight.size(1), steps = divide_up(k, kStep);
  const BFloat16* source = weight.const_data_ptr<BFloat16>();
  run_tasks(divide_up(n, kPanel), false, [&](int64_t panel) {
    std::vector<BFloat16> numbers(steps * kStepElements, BFloat16(0));
    for (int64_t column = panel * kPanel; column < std::min(n, (panel + 1) * kPanel); ++column) {
      BFloat16* to = numbers.data() + column % kPanel / kTile * kTileElements + column % kTile * 2;
      for (int64_t i = 0; i < k; ++i) {
        to[i / kStep * kStepElements + i % kStep / 2 * kStep + i % 2] = source[column * k + i];
      }
    }
    use(panel, numbers);
  });
}

// Packs a weight [N, K] -> [panel, K step, ...].
inline Tensor pack(const Tensor& weight) {
  const int64_t panels = divide_up(weight.size(0), kPanel), steps = divide_up(weight.size(1), kStep);
  Tensor packed = zeros_in_huge_pages({panels, steps, kPanel, kStep}, weight.scalar_type());
  BFloat16* target = packed.mutable_data_ptr<BFloat16>();
  for_each_panel(weight, [&](int64_t panel, const std::vector<BFloat16>& numbers) {
    std::copy(numbers.begin(), numbers.end(), target + panel * steps * kStepElements);
  });
  return packed;
}

}  // namespace twostep::amx
