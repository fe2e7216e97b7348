// One call of paged attention, cut into tasks, and the softmax in progress of one of them.

#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <limits>

#include "base/sizes.h"
#include "base/vec.h"

namespace twostep::attention {

// Numbers as they are.
template <class T>
struct Plain {
  using Stored = T;
  static int64_t num_numbers(int64_t row) { return row; }
};

// Rows of sixteen entries of a cache.
template <class Stored>
using SixteenRows = std::array<const Stored*, kLanes>;

template <class Stored>
inline SixteenRows<Stored> sixteen_rows(const Stored* cache, int64_t row, const int64_t* entries) {
  SixteenRows<Stored> rows;
  for (int i = 0; i < kLanes; ++i) rows[i] = cache + entries[i] * row;
  return rows;
}

constexpr int kSplitKeys = 512;
constexpr float kInfinity = std::numeric_limits<float>::infinity();

// `Format` is how keys and values lie in the rows of the cache: `Plain` or `Quantized` (attention/quantized_rows.h).
template <class Element, class Format>
struct Problem {
  const Element* query;  // rows of head_size elements at query + token * query_token_stride + head * query_head_stride
  int64_t query_token_stride, query_head_stride;
  const typename Format::Stored *key_cache, *value_cache;  // [blocks, num_kv_heads, block_size, key_row or value_row]
  int64_t key_row, value_row;
  int64_t value_row_numbers;  // numbers of the row that a value lies in: value_size, or head_size where it is a key's
  const int32_t *block_tables, *cu_seqlens_q, *context_lens;  // as in AttentionMetadata
  int64_t num_seqs, max_blocks;
  const float* sinks;  // [num_heads] or null
  Element* output;     // [num_tokens, num_heads, value_size]
  int64_t num_heads, num_kv_heads, group, block_size, head_size, value_size;
  float scaling, softcap;  // softcap 0: none
  float exponent;          // a score's weight is 2 ** (exponent * score), up to the factor that all of a row share
  int64_t window;          // positions a token sees, its own included; very large: all

  int64_t padded_value_size() const { return round_up(value_size, kLanes); }
  // The token at `position` sees the keys [first_visible(position), position + 1).
  int64_t first_visible(int64_t position) const { return std::max<int64_t>(0, position - window + 1); }
};

// Some consecutive query tokens of one sequence, for one kv head. Row token * group + g is query head
// kv_head * group + g of token first_token + token, at position first_position + token.
struct Task {
  int64_t sequence, kv_head, first_token, num_tokens, first_position;
  int64_t first_split, end_split;  // the splits in which any of its rows sees a key
  float* partials = nullptr;       // one State per split, where several threads share the task

  int64_t last_position() const { return first_position + num_tokens - 1; }
  int64_t num_splits() const { return end_split - first_split; }
};

// Softmax in progress for each of a task's rows: sum of weight * value, largest score, sum of weights.
struct State {
  float *out, *maximum, *total;

  static int64_t num_floats(int64_t rows, int64_t stride) { return round_up(rows * (stride + 2), kLanes); }
  State(float* memory, int64_t rows, int64_t stride)
      : out(memory), maximum(memory + rows * stride), total(maximum + rows) {}
  void clear(int64_t rows, int64_t stride) {
    std::fill_n(out, rows * stride, 0.0f);
    std::fill_n(maximum, rows, -kInfinity);
    std::fill_n(total, rows, 0.0f);
  }
};

}  // namespace twostep::attention
