// Paged attention on CPUs: causal attention of query tokens over keys and values that lie in cache blocks.
//
// A query row's result is, bit for bit, a function of its query, its keys and values in position order and the
// parameters, as long as these are finite. It does not depend on the rest of the batch, on how many tokens of its
// sequence are computed at once, on block size or placement, or on threads. That holds because every sum has one order,
// which positions alone fix:
//
//   - Keys are cut into tiles of kTileKeys and splits of kSplitKeys positions, counted from position 0.
//   - A score sums over the head size in order. A row walks the tiles of a split in order with the online softmax
//     (Milakov and Gimelshein 2018; Dao et al., FlashAttention 2022), starting anew in each split.
//   - The splits of a row are merged in order, whether one thread did them all or each another (Flash-Decoding, 2023).
//   - Of quantized keys and values integers are added, exactly (attention/integers.h); weights are rounded by row and
//     tile.
//   - Rows share the loading of a tile, never arithmetic: blocks of however many rows run the same instructions, with
//     explicit fused multiply-adds. Keys that a row may not see have weight 0, and adding 0 times a (finite) value
//     changes no sum (`finish` turns the one exception, a zero's sign, into +0), so such keys can also be left out.
//
// Block tables are those of PagedAttention (Kwon et al. 2023).

#include <algorithm>
#include <cstdint>
#include <optional>
#include <type_traits>

#include "attention/amx.h"
#include "attention/caches.h"
#include "attention/integers.h"
#include "attention/metadata.h"
#include "attention/threads.h"
#include "attention/vector.h"
#include "base/bfloat16.h"
#include "base/check.h"
#include "base/hadamard.h"
#include "base/operators.h"
#include "base/tensor.h"
#include "base/thread_pool.h"

namespace twostep {
namespace {

using namespace attention;

void run_problem(const Problem<float, Plain<float>>& p) { run_all<VectorTiles<float, FloatWords>>(p); }

void run_problem(const Problem<float, Plain<BFloat16>>& p) {
  run_all<VectorTiles<float, WidenedWords, Plain<BFloat16>>>(p);
}

void run_problem(const Problem<BFloat16, Plain<BFloat16>>& p) {
#if defined(__AMX_BF16__)
  if (amx::is_granted()) return run_all<AmxTiles<BFloat16, Plain<BFloat16>>>(p);
  run_all<VectorTiles<BFloat16, WidenedWords>>(p);  // Intel multiplies pairs at half the speed of float32
#elif defined(__AVX512BF16__)
  run_all<VectorTiles<BFloat16, PairWords>>(p);
#else
  run_all<VectorTiles<BFloat16, WidenedWords>>(p);
#endif
}

template <int BITS>
void run_problem(const Problem<float, Quantized<BITS>>& p) {
#if defined(__AMX_BF16__)
  if (amx::is_granted()) return run_all<AmxTiles<float, Quantized<BITS>>>(p);
#endif
  run_all<IntegerTiles<BITS>>(p);
}

// The arguments of an operator, checked.
struct Call {
  const Tensor &key_cache, &value_cache, &block_tables, &cu_seqlens_q, &context_lens;
  double scaling;
  std::optional<int64_t> sliding_window;
  std::optional<double> softcap;
  const float* sinks;
};

template <class Element, class Format>
void attend(const Call& call, const Tensor& query, const Tensor& output) {
  using Stored = typename Format::Stored;
  Problem<Element, Format> p;
  p.query = query.const_data_ptr<Element>();
  p.query_token_stride = query.stride(0), p.query_head_stride = query.stride(1);
  p.key_cache = static_cast<const Stored*>(call.key_cache.const_data_ptr());
  p.value_cache = static_cast<const Stored*>(call.value_cache.const_data_ptr());
  const bool in_keys = are_values_in_keys(call.key_cache, call.value_cache);
  p.key_row = call.key_cache.size(3), p.value_row = in_keys ? p.key_row : call.value_cache.size(3);
  p.block_tables = call.block_tables.const_data_ptr<int32_t>();
  p.cu_seqlens_q = call.cu_seqlens_q.const_data_ptr<int32_t>();
  p.context_lens = call.context_lens.const_data_ptr<int32_t>();
  p.num_seqs = call.block_tables.size(0), p.max_blocks = call.block_tables.size(1);
  p.sinks = call.sinks;
  p.output = output.mutable_data_ptr<Element>();
  p.num_heads = query.size(1), p.num_kv_heads = call.key_cache.size(1), p.group = p.num_heads / p.num_kv_heads;
  p.block_size = call.key_cache.size(2), p.head_size = query.size(2), p.value_size = num_numbers(call.value_cache);
  p.value_row_numbers = in_keys ? p.head_size : p.value_size;
  p.scaling = float(call.scaling), p.softcap = float(call.softcap.value_or(0.0));
  p.exponent = 1.44269504f * (p.softcap > 0 ? 1.0f : p.scaling);  // log2(e): e ** x = 2 ** (x * log2(e))
  p.window = call.sliding_window.value_or(int64_t(1) << 40);
  run_problem(p);
}

// Calls f(numbers, token, head) for a row of floats of each token's heads, [tokens, heads, size].
template <class F>
void for_each_head(const Tensor& floats, F f) {
  constexpr int64_t kGrain = 1 << 14;  // numbers below which a second thread does not pay
  const int64_t heads = floats.size(1), size = floats.size(2);
  float* numbers = floats.mutable_data_ptr<float>();
  run_ranges(floats.size(0), divide_up(kGrain, heads * size), [&](int64_t begin, int64_t end) {
    for (int64_t row = begin * heads; row < end * heads; ++row) f(numbers + row * size, row / heads, row % heads);
  });
}

// Keys and values in the cache are transformed: so are queries, and what comes out is transformed back.
template <class Element, int BITS>
void attend_transformed(const Call& call, const Tensor& query, const Tensor& output) {
  const int64_t num_tokens = query.size(0), heads = query.size(1), value_size = num_numbers(call.value_cache);
  if (num_tokens == 0) return;
  const Tensor transformed = new_empty({num_tokens, heads, query.size(2)}, kFloat);
  const Tensor attended = new_empty({num_tokens, heads, value_size}, kFloat);
  const auto* source = query.const_data_ptr<Element>();
  for_each_head(transformed, [&](float* numbers, int64_t token, int64_t head) {
    std::copy_n(source + token * query.stride(0) + head * query.stride(1), query.size(2), numbers);
    hadamard::invert(numbers, query.size(2));
  });
  attend<float, Quantized<BITS>>(call, transformed, attended);
  auto* target = output.mutable_data_ptr<Element>();
  for_each_head(attended, [&](float* numbers, int64_t token, int64_t head) {
    hadamard::undo(numbers, value_size);
    for (int64_t i = 0; i < value_size; i += kLanes)
      store(target + (token * heads + head) * value_size + i, load(numbers + i) + Vec{});  // no result is -0
  });
}

template <class Element, class T>
void attend_in(Plain<T>, const Call& call, const Tensor& query, const Tensor& output) {
  if constexpr (std::is_same_v<Element, T> || std::is_same_v<Element, float>) {
    attend<Element, Plain<T>>(call, query, output);
  } else {
    TWOSTEP_CHECK(false, "a cache has no more bits than queries");
  }
}

template <class Element, int BITS>
void attend_in(Quantized<BITS>, const Call& call, const Tensor& query, const Tensor& output) {
  attend_transformed<Element, BITS>(call, query, output);
}

}  // namespace

Tensor paged_attention(const Tensor& query, const Tensor& key_cache, const Tensor& value_cache,
                       const Tensor& block_tables, const Tensor& cu_seqlens_q, const Tensor& context_lens,
                       double scaling, std::optional<int64_t> sliding_window, std::optional<double> softcap,
                       const std::optional<Tensor>& sinks, const Buffer& out) {
  check_caches(key_cache, value_cache);
  check_metadata(block_tables, cu_seqlens_q, context_lens);
  TWOSTEP_CHECK(query.dim() == 3 && query.size(2) == num_numbers(key_cache), "query is [tokens, heads, head size]");
  TWOSTEP_CHECK(query.size(1) % key_cache.size(1) == 0, "query heads must be a multiple of kv heads");
  check_numbers(block_tables, cu_seqlens_q, context_lens, query.size(0), key_cache.size(0), key_cache.size(2));
  TWOSTEP_CHECK(scaling > 0, "scaling must be positive");
  TWOSTEP_CHECK(!sliding_window || *sliding_window > 0, "sliding_window must be positive");
  const Tensor rows = query.stride(2) == 1 ? query : query.contiguous();
  const Tensor logits = sinks ? sinks->to(kFloat).contiguous() : Tensor();
  TWOSTEP_CHECK(!sinks || logits.numel() == query.size(1), "sinks is [heads]");
  const Tensor& output = out.get({query.size(0), query.size(1) * num_numbers(value_cache)}, query);
  const Call call{key_cache, value_cache, block_tables, cu_seqlens_q, context_lens, scaling, sliding_window, softcap,
                  sinks ? logits.const_data_ptr<float>() : nullptr};
  with_format(key_cache, [&](auto format) {
    if (query.scalar_type() == kFloat) {
      attend_in<float>(format, call, rows, output);
    } else {
      TWOSTEP_CHECK(query.scalar_type() == kBFloat16, "paged_attention takes float32 or bfloat16");
      attend_in<BFloat16>(format, call, rows, output);
    }
  });
  return output;
}

}  // namespace twostep
