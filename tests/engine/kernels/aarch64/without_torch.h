// For programs of kernels' sources that include torch's headers but are linked without torch: what they need of it, and
// registrations that do nothing. What else they name stays unresolved, and is never called.

#pragma once

#include <ATen/Parallel.h>
#include <torch/library.h>

namespace at {
int get_num_threads() { return 1; }
}  // namespace at

#undef TORCH_LIBRARY_FRAGMENT
#undef TORCH_LIBRARY_IMPL
#define WITHOUT_TORCH_JOINED(name, line) name##line
#define WITHOUT_TORCH_NAME(line) WITHOUT_TORCH_JOINED(unused_registration_, line)
#define TORCH_LIBRARY_FRAGMENT(ns, m) [[maybe_unused]] static void WITHOUT_TORCH_NAME(__LINE__)(torch::Library & m)
#define TORCH_LIBRARY_IMPL(ns, key, m) TORCH_LIBRARY_FRAGMENT(ns, m)
