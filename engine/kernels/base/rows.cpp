#include "base/rows.h"

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "base/bfloat16.h"
#include "base/check.h"
#include "base/tensor.h"
#include "base/thread_pool.h"
#include "base/vec.h"

namespace twostep {

Tensor take_rows(const Tensor& table, const Tensor& numbers) {
  const Tensor from = table.stride(1) == 1 ? table : table.contiguous(), which = numbers.contiguous();
  const int64_t rows = from.size(0), row_bytes = from.size(1) * from.element_size();
  const int64_t stride_bytes = from.stride(0) * from.element_size();
  const auto* number = which.const_data_ptr<int64_t>();
  TWOSTEP_CHECK(std::all_of(number, number + which.numel(), [&](int64_t i) { return 0 <= i && i < rows; }),
                "a row's number is out of range");
  Tensor out = new_empty({which.numel(), from.size(1)}, from.scalar_type());
  if (row_bytes == 0) return out;
  const auto* source = static_cast<const char*>(from.const_data_ptr());
  auto* target = static_cast<char*>(out.mutable_data_ptr());
  constexpr int64_t kGrainBytes = 1 << 16;
  run_ranges(which.numel(), divide_up(kGrainBytes, std::max<int64_t>(1, row_bytes)), [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      std::memcpy(target + i * row_bytes, source + number[i] * stride_bytes, row_bytes);
    }
  });
  return out;
}

Tensor widened(const Tensor& x) {
  if (x.scalar_type() != kBFloat16) return x.to(kFloat);
  const Tensor from = x.contiguous(), out = new_empty(x.sizes(), kFloat);
  const auto* source = from.const_data_ptr<BFloat16>();
  auto* target = out.mutable_data_ptr<float>();
  constexpr int64_t kGrain = 1 << 14;
  run_ranges(x.numel(), kGrain, [&](int64_t begin, int64_t end) {
    for_each_vector(end - begin, [&](int64_t i, int64_t count) TWOSTEP_INLINE {
      store_upto(target + begin + i, count, load_upto(source + begin + i, count));
    });
  });
  return out;
}

}  // namespace twostep
