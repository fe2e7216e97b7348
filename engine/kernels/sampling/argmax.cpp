// Greedy sampling: the likeliest token of each row, from logits in the model's own dtype.

#include <cmath>

#include "base/bfloat16.h"
#include "base/check.h"
#include "base/operators.h"
#include "base/tensor.h"
#include "base/thread_pool.h"
#include "sampling/logits.h"

namespace twostep {
namespace {

template <class Element>
void argmax_rows(const Tensor& logits, int64_t* to) {
  const Element* from = logits.const_data_ptr<Element>();
  const int64_t size = logits.size(1);
  run_ranges(logits.size(0), 1, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const Element* numbers = from + row * size;
      const int64_t found = argmax_row(numbers, size);
      to[row] = std::isfinite(float(numbers[found])) ? found : kNoToken;
    }
  });
}

}  // namespace

Tensor argmax(const Tensor& logits) {
  TWOSTEP_CHECK(logits.dim() == 2 && logits.size(1) > 0, "logits are rows [T, V]");
  const Tensor rows = logits.contiguous();
  Tensor found = new_empty({rows.size(0)}, kLong);
  switch (rows.scalar_type()) {
    case kFloat: argmax_rows<float>(rows, found.mutable_data_ptr<int64_t>()); break;
    case kBFloat16: argmax_rows<BFloat16>(rows, found.mutable_data_ptr<int64_t>()); break;
    default: fail_not_implemented("argmax of ", rows.scalar_type(), " is not implemented");
  }
  return found;
}

}  // namespace twostep
