// Greedy sampling: the likeliest token of each row, from logits in the model's own number format.

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <c10/util/BFloat16.h>
#include <c10/util/Exception.h>
#include <torch/library.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "threads.h"
#include "vec.h"

namespace {

using namespace twostep;

constexpr int64_t kBlock = 256;  // elements that are looked at together: few blocks of a row hold a new largest one

// Whether all numbers are `limit` or less; NaN is not.
template <class Element>
bool are_at_most(float limit, const Element* numbers, int64_t count) {
  const Vec limits = broadcast(limit);
  PartU are_less[kParts];
  std::fill_n(are_less, kParts, PartU{} - 1);
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    const Vec v = load(numbers + i);
    unroll<kParts>([&](auto part) { are_less[part] &= (PartU)(v.part[part] <= limits.part[part]); });
  }
  bool result = true;
  for (; i < count; ++i) result &= float(numbers[i]) <= limit;
  for (int lane = 0; lane < kLanes; ++lane) result &= are_less[lane / kPartLanes][lane % kPartLanes] != 0;
  return result;
}

// Index of the first of the largest, or of the first NaN: as numpy's argmax.
template <class Element>
int64_t argmax_row(const Element* row, int64_t size) {
  float largest = -std::numeric_limits<float>::infinity();
  int64_t found = 0;
  for (int64_t start = 0; start < size; start += kBlock) {
    const int64_t end = std::min(start + kBlock, size);
    if (are_at_most(largest, row + start, end - start)) continue;
    for (int64_t i = start; i < end; ++i) {
      if (std::isnan(float(row[i]))) return i;
      if (float(row[i]) > largest) largest = row[i], found = i;
    }
  }
  return found;
}

template <class Element>
void argmax_rows(const at::Tensor& logits, int64_t* to) {
  const Element* from = logits.const_data_ptr<Element>();
  const int64_t size = logits.size(1);
  run_ranges(logits.size(0), 1, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) to[row] = argmax_row(from + row * size, size);
  });
}

// logits [T, V] -> [T] int64
at::Tensor argmax(const at::Tensor& logits) {
  TORCH_CHECK(logits.dim() == 2 && logits.size(1) > 0, "logits are rows [T, V]");
  const at::Tensor rows = logits.contiguous();
  at::Tensor found = at::empty({rows.size(0)}, rows.options().dtype(at::kLong));
  switch (rows.scalar_type()) {
    case at::kFloat: argmax_rows<float>(rows, found.mutable_data_ptr<int64_t>()); break;
    case at::kBFloat16: argmax_rows<at::BFloat16>(rows, found.mutable_data_ptr<int64_t>()); break;
    default: TORCH_CHECK_NOT_IMPLEMENTED(false, "argmax of ", rows.scalar_type(), " is not implemented");
  }
  return found;
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(twostep, library) { library.def("argmax(Tensor logits) -> Tensor"); }

TORCH_LIBRARY_IMPL(twostep, CPU, library) { library.impl("argmax", &argmax); }
