// A row of a matrix, sixteen elements at a time.

#pragma once

#include <algorithm>
#include <cstdint>

#include "operators.h"
#include "vec.h"

namespace twostep {

template <class Element>
inline Vec load_upto(const Element* source, int64_t count) {
  return count >= kLanes ? load(source) : load_first(source, count);
}

template <class Element>
inline void store_upto(Element* target, int64_t count, Vec v) {
  count >= kLanes ? store(target, v) : store_first(target, count, v);
}

inline Vec rounded_to(Vec v, const float*) { return v; }
inline Vec rounded_to(Vec v, const at::BFloat16*) {
  at::BFloat16 buffer[kLanes];
  store(buffer, v);
  return load(buffer);
}

// Calls f(i, count) for every sixteen elements of `size`, and for what is left of them.
template <class F>
TWOSTEP_INLINE inline void for_each_vector(int64_t size, F f) {
  for (int64_t i = 0; i < size; i += kLanes) f(i, std::min<int64_t>(kLanes, size - i));
}

// Blocks of gate and up in turn -> `size` gated elements.
template <class Op, class Element>
void gate_row(const Element* gate_up, int64_t size, Element* to) {
  static_assert(kGateBlock == kLanes);
  for_each_vector(size, [&](int64_t i, int64_t count) {
    const Element* block = gate_up + 2 * i;
    const Vec activated = rounded_to(Op::apply(load_upto(block, count)), block);
    store_upto(to + i, count, activated * load_upto(block + count, count));
  });
}

}  // namespace twostep
