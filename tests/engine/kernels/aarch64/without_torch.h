// For programs of kernels' sources that include torch's headers but are linked without torch: what they need of it. What
// else they name stays unresolved, and is never called.

#pragma once

#include <ATen/Parallel.h>

namespace at {
int get_num_threads() { return 1; }
}  // namespace at
