// Weights of 4 bits in AMX tiles.

#pragma once

#include <algorithm>
#include <cstdint>

#include "quantized/amx.h"
#include "quantized/int4.h"

namespace twostep::int4 {

constexpr int64_t kExpandedBytes = 2 * integers::kTileBytes;  // of one step of a panel, a byte for each code

// Expands a step of a panel to its two tiles of bytes.
inline void expand(const uint8_t* from, uint8_t* to) {
  for (int64_t tile = 0; tile < 2; ++tile) expand_tile(from + tile * kTileBytes, 0, to + tile * integers::kTileBytes);
}

struct TileWeight : Weight {
  static constexpr int64_t kFewRows = 3;  // up to these the vector units are faster
  static constexpr bool kIsExpanded = true;

  template <int kSums, int kRows, int kColumns>
  static void multiply_tile() {
    amx::multiply_bytes<kSums, kRows, kColumns>();
  }

  struct Panel {
    const uint8_t* packed;
    uint8_t* expanded;
    int64_t steps, mask;

    uint8_t* place_of(int64_t step) const { return expanded + (step & mask) * kExpandedBytes; }
    void expand(int64_t step) const {
      if (step < steps) int4::expand(packed + step * kStepBytes, place_of(step));
    }
  };

  // In a single pass over a panel, two places in turn are enough for its steps, which stay in the L1 cache.
  static Panel panel_at(const uint8_t* packed, int64_t steps, bool is_read_once) {
    static thread_local Scratch<uint8_t> scratch;
    return {packed, scratch.get(std::max<int64_t>(steps, 2) * kExpandedBytes), steps, is_read_once ? 1 : -1};
  }
};

}  // namespace twostep::int4
