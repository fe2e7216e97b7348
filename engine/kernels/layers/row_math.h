// What norms and rotations do with one row, for kernels that do more with it in the same pass.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "base/rows.h"
#include "base/tensor.h"
#include "base/thread_pool.h"
#include "base/vec.h"

namespace twostep::row_math {

constexpr int64_t kGrain = 1 << 13;  // elements below which waking another thread costs more than it saves

// Calls f(row) for every row, on several threads if there is enough work.
template <class F>
void for_each_row(int64_t rows, int64_t row_size, const F& f) {
  const int64_t grain = std::max<int64_t>(1, kGrain / std::max<int64_t>(1, row_size));
  run_ranges(rows, grain, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) f(row);
  });
}

// x / sqrt(mean(x**2) + eps), rounded, times weight; a weight that is finer than x multiplies what is not rounded yet.
// `to` may be `x`.
template <class Element, class Weight>
void normalize(const Element* x, const Weight* weight, int64_t size, float eps, Element* to) {
  Vec squares{};
  for_each_vector(size, [&](int64_t i, int64_t count) TWOSTEP_INLINE {
    const Vec v = load_upto(x + i, count);
    squares = squares + v * v;
  });
  const Vec factor = broadcast(1.0f / std::sqrt(fold_add(squares) / float(size) + eps));
  for_each_vector(size, [&](int64_t i, int64_t count) TWOSTEP_INLINE {
    const Vec normed = rounded_to(load_upto(x + i, count) * factor, weight);
    store_upto(to + i, count, normed * load_upto(weight + i, count));
  });
}

// Rotates the first 2 * half columns of a head in place: of each pair (x[i], x[i + half]), by the angle of that i.
template <class Element, class Table>
void rotate(Element* head, const Table* cos, const Table* sin, int64_t half) {
  for_each_vector(half, [&](int64_t i, int64_t count) TWOSTEP_INLINE {
    const auto rounded = [&](Vec v) { return rounded_to(v, cos); };
    const Vec low = load_upto(head + i, count), high = load_upto(head + half + i, count);
    const Vec from_high = rounded(Vec{} - high * load_upto(sin + i, count));
    const Vec from_low = rounded(low * load_upto(sin + half + i, count));
    store_upto(head + i, count, rounded(low * load_upto(cos + i, count)) + from_high);
    store_upto(head + half + i, count, rounded(high * load_upto(cos + half + i, count)) + from_low);
  });
}

// Does so with neighbours: of each pair (x[2 * i], x[2 * i + 1]), by the angle of that i.
template <class Element, class Table>
void rotate_pairs(Element* head, const Table* cos, const Table* sin, int64_t half) {
  for_each_vector(half, [&](int64_t i, int64_t count) TWOSTEP_INLINE {
    Element apart[2 * kLanes];
    Table cosines[2 * kLanes], sines[2 * kLanes];
    Element* pairs = head + 2 * i;
    for (int64_t j = 0; j < count; ++j) {
      apart[j] = pairs[2 * j], apart[count + j] = pairs[2 * j + 1];
      cosines[j] = cosines[count + j] = cos[i + j], sines[j] = sines[count + j] = sin[i + j];
    }
    rotate(apart, cosines, sines, count);
    for (int64_t j = 0; j < count; ++j) pairs[2 * j] = apart[j], pairs[2 * j + 1] = apart[count + j];
  });
}

// Calls f with a null pointer of the element type.
template <class F>
void with_element_of(const Tensor& tensor, const F& f) {
  twostep::with_element_of(tensor, "fused layers", f);
}

// Calls f with a null pointer of the rows' element type, and one of the weight's: the same or float.
template <class F>
void with_elements_of(const Tensor& rows, const Tensor& weight, const F& f) {
  with_element_of(rows, [&]<class Element>(Element* element) {
    if (weight.scalar_type() == rows.scalar_type()) return f(element, element);
    f(element, static_cast<float*>(nullptr));
  });
}

}  // namespace twostep::row_math
