// Writes keys and values of tokens into the cache's blocks.

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "attention/caches.h"
#include "attention/quantized_rows.h"
#include "base/bfloat16.h"
#include "base/check.h"
#include "base/hadamard.h"
#include "base/operators.h"
#include "base/scratch.h"
#include "base/tensor.h"
#include "base/thread_pool.h"
#include "base/vec.h"

namespace twostep {
namespace {

constexpr int64_t kSerialCopy = 1 << 15;  // elements below which a second thread does not pay

template <class Element, class T>
void store_row(attention::Plain<T>, const Element* numbers, int64_t size, T* row) {
  if constexpr (std::is_same_v<Element, T>) {
    std::memcpy(row, numbers, size * sizeof(T));
  } else {
    for_each_vector(size, [&](int64_t i, int64_t count) { store_upto(row + i, count, load_upto(numbers + i, count)); });
  }
}

template <class Element, int BITS>
void store_row(attention::Quantized<BITS>, const Element* numbers, int64_t size, uint8_t* row) {
  static thread_local Scratch<float> scratch;
  float* transformed = scratch.get(size);
  std::copy_n(numbers, size, transformed);
  hadamard::transform(transformed, size);
  attention::write_row<BITS>(transformed, size, row);
}

// Stores each token's heads in slot slots[token] of the cache: block slot / block_size, offset slot % block_size.
template <class Element, class Format>
void write_cache(Format format, const Tensor& source, const Tensor& cache, const int64_t* slots) {
  const int64_t num_heads = cache.size(1), block_size = cache.size(2), size = source.size(2), row = cache.size(3);
  const int64_t token_stride = source.stride(0), head_stride = source.stride(1);
  const auto* from = source.const_data_ptr<Element>();
  auto* to = static_cast<typename Format::Stored*>(cache.mutable_data_ptr());
  const int64_t grain = std::max<int64_t>(1, kSerialCopy / std::max<int64_t>(1, num_heads * size));
  run_ranges(source.size(0), grain, [&](int64_t begin, int64_t end) {
    for (int64_t token = begin; token < end; ++token) {
      const int64_t block = slots[token] / block_size, offset = slots[token] % block_size;
      for (int64_t head = 0; head < num_heads; ++head)
        store_row(format, from + token * token_stride + head * head_stride, size,
                  to + ((block * num_heads + head) * block_size + offset) * row);
    }
  });
}

void write_rows(const Tensor& rows, const Tensor& cache, const int64_t* slots) {
  TWOSTEP_CHECK(rows.dim() == 3 && rows.size(1) == cache.size(1) && rows.size(2) == num_numbers(cache),
                "keys and values are [tokens, kv heads, head size]");
  const Tensor source = rows.stride(2) == 1 || rows.size(2) == 1 ? rows : rows.contiguous();
  with_format(cache, [&](auto format) {
    if (rows.scalar_type() == kFloat) return write_cache<float>(format, source, cache, slots);
    TWOSTEP_CHECK(rows.scalar_type() == kBFloat16, "keys and values are float32 or bfloat16");
    TWOSTEP_CHECK(cache.scalar_type() != kFloat, "keys or values differ from the cache in type");
    write_cache<BFloat16>(format, source, cache, slots);
  });
}

}  // namespace

void write_kv(const Tensor& key, const Tensor& value, const Tensor& key_cache, const Tensor& value_cache,
              const Tensor& slot_mapping) {
  check_caches(key_cache, value_cache);
  TWOSTEP_CHECK(slot_mapping.scalar_type() == kLong && slot_mapping.is_contiguous() &&
                    slot_mapping.numel() == key.size(0) && slot_mapping.numel() == value.size(0),
                "slot_mapping is one int64 per token");
  const auto* slots = slot_mapping.const_data_ptr<int64_t>();
  const int64_t num_slots = key_cache.size(0) * key_cache.size(2);
  TWOSTEP_CHECK(std::all_of(slots, slots + key.size(0), [&](int64_t slot) { return 0 <= slot && slot < num_slots; }),
                "a slot is out of range");
  write_rows(key, key_cache, slots);
  if (!are_values_in_keys(key_cache, value_cache)) write_rows(value, value_cache, slots);
}

}  // namespace twostep
