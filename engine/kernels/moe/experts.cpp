#include "moe/experts.h"

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "base/bfloat16.h"
#include "base/check.h"
#include "base/huge_pages.h"
#include "base/rows.h"
#include "base/small_vector.h"
#include "base/tensor.h"
#include "base/thread_pool.h"

namespace twostep::moe {
namespace {

constexpr int64_t kGrainBytes = 1 << 16;  // below which waking another thread costs more than it saves

// Experts that were chosen, and those that could have been, over all layers that ran on this thread.
struct Counts {
  int64_t read = 0, all = 0;
};
thread_local Counts counts;

// Intermediate results, which the next call overwrites.
struct Workspace {
  Buffer rows, gate_up, gated, outputs;
};

// Rows [first, first + count) of a matrix, which is no view if these are all.
Tensor rows_of(const Tensor& matrix, int64_t first, int64_t count) {
  return count == matrix.size(0) ? matrix : matrix.narrow(0, first, count);
}

// Gathers the rows [T, H] at `count` places from `first` on: [count, H].
Tensor gather(const Tensor& hidden, const Order& order, int64_t num_slots, int64_t first, int64_t count,
              const Buffer& buffer) {
  const Tensor& rows = buffer.get({count, hidden.size(1)}, hidden);
  const int64_t row_bytes = hidden.size(1) * hidden.element_size();
  const auto* from = static_cast<const char*>(hidden.const_data_ptr());
  auto* to = static_cast<char*>(rows.mutable_data_ptr());
  run_ranges(count, divide_up(kGrainBytes, row_bytes), [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      std::memcpy(to + i * row_bytes, from + order.slot_at(first + i) / num_slots * row_bytes, row_bytes);
    }
  });
  return rows;
}

// The weights of all slots. Products with those of the rows' dtype are rounded to it, as torch does.
struct SlotWeights {
  SlotWeights(const Tensor& weights, Dtype row_type)
      : numbers(weights.numel()), are_rounded(weights.scalar_type() == row_type) {
    const Tensor all = weights.contiguous();
    TWOSTEP_CHECK(all.scalar_type() == kFloat || all.scalar_type() == kBFloat16,
                  "experts' weights are float32 or bfloat16, not ", all.scalar_type());
    const auto copy = [&](const auto* from) { std::copy_n(from, numbers.size(), numbers.begin()); };
    all.scalar_type() == kFloat ? copy(all.const_data_ptr<float>()) : copy(all.const_data_ptr<BFloat16>());
  }

  std::vector<float> numbers;
  bool are_rounded;
};

// outputs [T * S, H], by place -> sums of each row's slots [T, H]
template <class Element>
void weigh(const Element* outputs, const Order& order, const SlotWeights& weights, int64_t num_slots, int64_t size,
           int64_t row, Element* to) {
  for_each_vector(size, [&](int64_t i, int64_t count) TWOSTEP_INLINE {
    Vec sum{};
    for (int64_t slot = row * num_slots; slot < (row + 1) * num_slots; ++slot) {
      Vec weighed = load_upto(outputs + order.place_of(slot) * size + i, count) * broadcast(weights.numbers[slot]);
      if (weights.are_rounded) weighed = rounded_to(weighed, outputs);
      sum = slot == row * num_slots ? weighed : sum + weighed;
    }
    store_upto(to + i, count, sum);
  });
}

template <class Element>
void weigh_all(const Tensor& outputs, const Order& order, const SlotWeights& weights, int64_t num_slots,
               const Tensor& result) {
  const int64_t size = result.size(1), row_bytes = num_slots * size * sizeof(Element);
  const auto* from = outputs.const_data_ptr<Element>();
  auto* to = result.mutable_data_ptr<Element>();
  run_ranges(result.size(0), divide_up(kGrainBytes, row_bytes), [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) weigh(from, order, weights, num_slots, size, row, to + row * size);
  });
}

constexpr int64_t kFewSlots = 512;    // up to these, memory is kept for the next call
constexpr int64_t kBatchRows = 1024;  // about so many are multiplied at once, and stay in the caches
constexpr int64_t kKeptBytes = int64_t{64} << 20;

// Returns memory for the outputs of many rows. Up to kKeptBytes of it are kept for the next layer and step: what malloc
// would map anew each time, the system would fill with zeros, page by page.
Tensor outputs_of_many(int64_t rows, int64_t size, const Tensor& like) {
  static thread_local Tensor kept;
  const int64_t bytes = rows * size * like.element_size();
  if (bytes > kKeptBytes) return new_empty({rows, size}, like.scalar_type());
  if (!kept.defined() || kept.numel() < bytes) {
    kept.reset();
    kept = zeros_in_huge_pages({bytes}, kByte);
  }
  return kept.narrow(0, 0, bytes).view(like.scalar_type()).view({rows, size});
}

// hidden [T, H] -> all experts' outputs, by place [T * S, H]
Tensor multiply(const Experts& experts, const Tensor& hidden, const Order& order, int64_t num_slots,
                const Workspace& work) {
  const int64_t size = experts.down->out_features;
  const bool is_many = order.count() > kFewSlots;
  const Tensor outputs =
      is_many ? outputs_of_many(order.count(), size, hidden) : work.outputs.get({order.count(), size}, hidden);
  for (int64_t first = 0, end; first < order.num_experts(); first = end) {
    end = order.end_of_batch(first, kBatchRows);
    const int64_t start = order.start_of(first), count = order.count_of(first, end);
    if (count == 0) continue;
    const Tensor rows = gather(hidden, order, num_slots, start, count, work.rows);
    const Tensor own = (*experts.gate)(experts.up->multiply(rows, order, first, end, work.gate_up), work.gated);
    const Tensor gated = experts.gated_columns ? (**experts.gated_columns)(own, {}) : own;
    experts.down->multiply(gated, order, first, end, Buffer(rows_of(outputs, start, count)));
  }
  return outputs;
}

}  // namespace

std::tuple<int64_t, int64_t> take_experts_read() {
  const Counts taken = std::exchange(counts, {});
  return {taken.read, taken.all};
}

Stack::Stack(std::vector<Tensor> weights, const std::optional<Tensor>& biases, int64_t out_features, int64_t bits)
    : weights(std::move(weights)), out_features(out_features), bits(bits) {
  if (biases.has_value()) this->biases = biases->contiguous().unbind();
  TWOSTEP_CHECK(this->biases.empty() || this->biases.size() == this->weights.size(), "each expert has its bias");
}

Tensor Stack::multiply(const Tensor& rows, const Order& order, int64_t first, int64_t end, const Buffer& out) const {
  SmallVector<Share, 16> shares;
  for (int64_t expert = first; expert < end; ++expert) {
    const int64_t count = order.count_of(expert, expert + 1);
    if (count > 0) shares.push_back({&weights[expert], biases.empty() ? Tensor() : biases[expert], count});
  }
  const auto& multiply = bits == 8 ? grouped_linear_int8 : bits == 4 ? grouped_linear_int4 : grouped_linear;
  return multiply(rows, shares, out_features, Activation::kNone, out);
}

Tensor Stack::multiply_each(const Tensor& rows, const Buffer& out) const {
  const int64_t count = weights.size();
  TWOSTEP_CHECK(rows.dim() == 3 && rows.size(0) == count && bits == 0 && biases.empty(),
                "rows [E, T, K] are of all weights, which are dense");
  SmallVector<Share, 16> shares;
  for (const Tensor& weight : weights) shares.push_back({&weight, Tensor(), rows.size(1)});
  const Tensor products =
      grouped_linear(rows.reshape({-1, rows.size(2)}), shares, out_features, Activation::kNone, out);
  return products.view({count, rows.size(1), out_features});
}

Tensor Experts::run(const Tensor& hidden, const Tensor& chosen, const Tensor& weights) const {
  TWOSTEP_CHECK(hidden.scalar_type() == kFloat || hidden.scalar_type() == kBFloat16,
                "experts take float32 or bfloat16, not ", hidden.scalar_type());
  TWOSTEP_CHECK(hidden.dim() == 2 && chosen.dim() == 2 && chosen.size(0) == hidden.size(0) && chosen.size(1) > 0 &&
                    weights.sizes() == chosen.sizes(),
                "each row has its experts, and their weights");
  const Tensor rows = hidden.contiguous();
  const Order order(chosen.to(kLong).contiguous(), up->weights.size());
  counts.read += order.num_chosen();
  counts.all += order.num_experts();
  static thread_local Workspace work_of_few;
  Workspace work_of_many, &work = order.count() <= kFewSlots ? work_of_few : work_of_many;
  const Tensor outputs = multiply(*this, rows, order, chosen.size(1), work);
  const Tensor result = new_empty({rows.size(0), down->out_features}, rows.scalar_type());
  const SlotWeights numbers(weights, rows.scalar_type());
  rows.scalar_type() == kFloat ? weigh_all<float>(outputs, order, numbers, chosen.size(1), result)
                               : weigh_all<BFloat16>(outputs, order, numbers, chosen.size(1), result);
  return result_columns ? (**result_columns)(result, {}) : result;
}

}  // namespace twostep::moe
