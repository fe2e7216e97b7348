// Checks of the caches of keys and values, for attention and for writes, and the formats of their rows.

#pragma once

#include <cstdint>

#include "attention/problem.h"
#include "attention/quantized_rows.h"
#include "base/bfloat16.h"
#include "base/check.h"
#include "base/tensor.h"

namespace twostep {

// Whether values are the first numbers of keys, and lie nowhere else.
inline bool are_values_in_keys(const Tensor& key_cache, const Tensor& value_cache) {
  return key_cache.const_data_ptr() == value_cache.const_data_ptr() && key_cache.strides() == value_cache.strides() &&
         value_cache.size(3) <= key_cache.size(3);
}

inline void check_caches(const Tensor& key_cache, const Tensor& value_cache) {
  TWOSTEP_CHECK(key_cache.dim() == 4 && value_cache.dim() == 4, "caches are [blocks, kv heads, block size, row size]");
  TWOSTEP_CHECK(key_cache.is_contiguous(), "caches must be contiguous");
  TWOSTEP_CHECK(value_cache.is_contiguous() || are_values_in_keys(key_cache, value_cache),
                "values are contiguous, or the first of what keys consist of");
  TWOSTEP_CHECK(key_cache.sizes().slice(0, 3) == value_cache.sizes().slice(0, 3),
                "key and value cache differ in shape");
  TWOSTEP_CHECK(key_cache.size(1) > 0 && key_cache.size(2) > 0, "caches must have kv heads, and blocks with room");
  TWOSTEP_CHECK(key_cache.scalar_type() == value_cache.scalar_type(), "key and value cache differ in type");
}

// Calls f(format) with the format of a cache's rows: int8 has numbers of 8 bits, uint8 two of 4 bits in a byte.
template <class F>
void with_format(const Tensor& cache, F f) {
  using namespace attention;
  switch (cache.scalar_type()) {
    case kFloat: return f(Plain<float>());
    case kBFloat16: return f(Plain<BFloat16>());
    case kChar: return f(Quantized<8>());
    case kByte: return f(Quantized<4>());
    default: TWOSTEP_CHECK(false, "caches are float32, bfloat16, int8 or uint8");
  }
}

// Returns how many numbers a key or a value of this cache has.
inline int64_t num_numbers(const Tensor& cache) {
  int64_t size = 0;
  with_format(cache, [&](auto format) { size = format.num_numbers(cache.size(3)); });
  TWOSTEP_CHECK(size > 0 || cache.size(3) == 0, "no row of the cache has ", cache.size(3), " bytes");
  return size;
}

}  // namespace twostep
