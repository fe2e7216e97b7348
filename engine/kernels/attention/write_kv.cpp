// Writes keys and values of tokens into the cache's blocks.

#include <ATen/core/Tensor.h>
#include <torch/library.h>

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "attention/caches.h"
#include "base/operators.h"
#include "base/thread_pool.h"

namespace twostep {
namespace {

constexpr int64_t kSerialCopy = 1 << 15;  // elements below which a second thread does not pay

// Copies each token's heads into slot slots[token] of the cache: block slot / block_size, offset slot % block_size.
void write_cache(const at::Tensor& rows, const at::Tensor& cache, const int64_t* slots) {
  TORCH_CHECK(rows.dim() == 3 && rows.size(1) == cache.size(1) && rows.size(2) == cache.size(3),
              "keys and values are [tokens, kv heads, head size]");
  TORCH_CHECK(rows.scalar_type() == cache.scalar_type(), "keys or values differ from the cache in type");
  const at::Tensor source = rows.stride(2) == 1 || rows.size(2) == 1 ? rows : rows.contiguous();
  const int64_t num_heads = cache.size(1), block_size = cache.size(2), size = cache.size(3);
  const int64_t bytes = cache.element_size(), token_stride = source.stride(0), head_stride = source.stride(1);
  const char* from = static_cast<const char*>(source.const_data_ptr());
  char* to = static_cast<char*>(cache.mutable_data_ptr());
  const int64_t grain = std::max<int64_t>(1, kSerialCopy / std::max<int64_t>(1, num_heads * size));
  run_ranges(source.size(0), grain, [&](int64_t begin, int64_t end) {
    for (int64_t token = begin; token < end; ++token) {
      const int64_t block = slots[token] / block_size, offset = slots[token] % block_size;
      for (int64_t head = 0; head < num_heads; ++head)
        std::memcpy(to + ((block * num_heads + head) * block_size + offset) * size * bytes,
                    from + (token * token_stride + head * head_stride) * bytes, size * bytes);
    }
  });
}

}  // namespace

void write_kv(const at::Tensor& key, const at::Tensor& value, const at::Tensor& key_cache,
              const at::Tensor& value_cache, const at::Tensor& slot_mapping) {
  check_caches(key_cache, value_cache);
  TORCH_CHECK(slot_mapping.scalar_type() == at::kLong && slot_mapping.is_contiguous() &&
                  slot_mapping.numel() == key.size(0) && slot_mapping.numel() == value.size(0),
              "slot_mapping is one int64 per token");
  const auto* slots = slot_mapping.const_data_ptr<int64_t>();
  const int64_t num_slots = key_cache.size(0) * key_cache.size(2);
  TORCH_CHECK(std::all_of(slots, slots + key.size(0), [&](int64_t slot) { return 0 <= slot && slot < num_slots; }),
              "a slot is out of range");
  write_cache(key, key_cache, slots);
  write_cache(value, value_cache, slots);
}

}  // namespace twostep

TORCH_LIBRARY_FRAGMENT(twostep, library) {
  library.def(
      "write_kv(Tensor key, Tensor value, Tensor(a!) key_cache, Tensor(b!) value_cache, Tensor slot_mapping) -> ()");
}

TORCH_LIBRARY_IMPL(twostep, CPU, library) { library.impl("write_kv", &twostep::write_kv); }
