// All implementations of the linear layer that this library has.

#pragma once

#include "linear_vector.h"

#if defined(__AMX_BF16__)
#include "linear_amx.h"
#endif

namespace twostep {

// Whether a product with n columns gates itself; else gating is a step of its own.
inline bool gates_itself(int64_t n) {
  constexpr int64_t kPair = 2 * kGateBlock;  // of blocks, which must not lie in two panels
  return vector::kPanel % kPair == 0 && n % kPair == 0;
}

}  // namespace twostep
