// All implementations of the linear layer that this library has.

#pragma once

#include "linear_vector.h"

#if defined(__AMX_BF16__)
#include "linear_amx.h"
#endif

namespace twostep {

// Whether a product of rows of this dtype with n columns gates itself; else gating is a step of its own.
inline bool gates_itself(at::ScalarType dtype, int64_t n) {
#if defined(__AMX_BF16__)
  return dtype == at::kBFloat16 && n % amx::kPanel == 0 && amx::is_granted();
#else
  return static_cast<void>(dtype), static_cast<void>(n), false;
#endif
}

}  // namespace twostep
