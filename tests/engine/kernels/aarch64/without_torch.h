// For programs of kernels' sources that are linked without torch: what these need that is torch's. What else they name
// stays unresolved, and is never called.

#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>

#include "base/check.h"
#include "base/thread_pool.h"

namespace twostep {
int64_t allowed_threads() { return 1; }
void raise(const std::string& message) { throw std::runtime_error(message); }
void raise_not_implemented(const std::string& message) { raise(message); }
}  // namespace twostep
