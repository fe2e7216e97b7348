// Checks of the caches of keys and values, for attention and for writes.

#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>

namespace twostep {

inline void check_caches(const at::Tensor& key_cache, const at::Tensor& value_cache) {
  TORCH_CHECK(key_cache.dim() == 4 && value_cache.dim() == 4, "caches are [blocks, kv heads, block size, head size]");
  TORCH_CHECK(key_cache.is_contiguous() && value_cache.is_contiguous(), "caches must be contiguous");
  TORCH_CHECK(key_cache.sizes().slice(0, 3) == value_cache.sizes().slice(0, 3), "key and value cache differ in shape");
  TORCH_CHECK(key_cache.size(1) > 0 && key_cache.size(2) > 0, "caches must have kv heads, and blocks with room");
  TORCH_CHECK(key_cache.scalar_type() == value_cache.scalar_type(), "key and value cache differ in type");
}

}  // namespace twostep
