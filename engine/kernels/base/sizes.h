// Arithmetic of sizes.

#pragma once

#include <cstdint>

namespace twostep {

inline constexpr int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }
inline constexpr int64_t round_up(int64_t size, int64_t unit) { return divide_up(size, unit) * unit; }

}  // namespace twostep
