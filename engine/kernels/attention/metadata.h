// Checks of what tells where the sequences of a batch lie, in it and in the cache; see engine/attention/metadata.py.

#pragma once

#include <algorithm>
#include <cstdint>

#include "base/check.h"
#include "base/sizes.h"
#include "base/tensor.h"

namespace twostep {

inline void check_metadata(const Tensor& block_tables, const Tensor& cu_seqlens_q, const Tensor& context_lens) {
  for (const Tensor* tensor : {&block_tables, &cu_seqlens_q, &context_lens})
    TWOSTEP_CHECK(tensor->scalar_type() == kInt && tensor->is_contiguous(), "metadata must be contiguous int32");
  TWOSTEP_CHECK(block_tables.dim() == 2 && block_tables.size(0) == context_lens.numel() &&
                    cu_seqlens_q.numel() == context_lens.numel() + 1,
                "metadata differ in their number of sequences");
}

// Checks the numbers by which kernels address blocks and tokens.
inline void check_numbers(const Tensor& block_tables, const Tensor& cu_seqlens_q, const Tensor& context_lens,
                          int64_t num_tokens, int64_t num_blocks, int64_t block_size) {
  const auto *tables = block_tables.const_data_ptr<int32_t>(), *starts = cu_seqlens_q.const_data_ptr<int32_t>();
  const auto* lens = context_lens.const_data_ptr<int32_t>();
  const int64_t num_seqs = block_tables.size(0), max_blocks = block_tables.size(1);
  TWOSTEP_CHECK(starts[0] == 0 && starts[num_seqs] == num_tokens, "cu_seqlens_q must cover all queries");
  for (int64_t i = 0; i < num_seqs; ++i) {
    const int64_t count = int64_t{starts[i + 1]} - starts[i], blocks = divide_up(lens[i], block_size);
    TWOSTEP_CHECK(0 <= count && count <= lens[i] && blocks <= max_blocks, "sequence ", i, " has ", count,
                  " queries, a context of ", lens[i], " and a table of ", max_blocks, " blocks");
    const auto* table = tables + i * max_blocks;
    TWOSTEP_CHECK(std::all_of(table, table + blocks, [&](int64_t block) { return 0 <= block && block < num_blocks; }),
                  "a block of sequence ", i, " is out of range");
  }
}

}  // namespace twostep
