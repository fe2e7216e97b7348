// Weights of 8 bits in AMX tiles: codes are multiplied straight from packed memory.

#pragma once

#include <cstdint>

#include "quantized/amx.h"
#include "quantized/int8.h"

namespace twostep::int8 {

static_assert(integers::kHalvesApart);  // the layout that tiles need

template <class Weight>
struct TileWeightFor : Weight {
  static constexpr int64_t kFewRows = 6;  // up to these the vector units are faster
  static constexpr bool kIsExpanded = false;

  template <int kSums, int kRows, int kColumns>
  static void multiply_tile() {
    asm volatile("tdpbsud %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(kSums), "i"(kRows), "i"(kColumns));
  }

  struct Panel {
    const uint8_t* packed;

    const uint8_t* place_of(int64_t step) const {
      return packed + (step / integers::kGroupSteps + 1) * Weight::kHeaderBytes + step * Weight::kStepBytes;
    }
  };

  static Panel panel_at(const uint8_t* packed, int64_t /*steps*/, bool /*is_read_once*/) { return {packed}; }
};

using TileWeight = TileWeightFor<Weight>;
using TileWeightForWideRows = TileWeightFor<WeightForWideRows>;

}  // namespace twostep::int8
