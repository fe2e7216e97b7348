// The experts of a layer, and the registration of their classes.

#include <ATen/core/Tensor.h>
#include <c10/util/BFloat16.h>
#include <c10/util/Exception.h>
#include <torch/custom_class.h>
#include <torch/library.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "base/huge_pages.h"
#include "base/rows.h"
#include "base/tensors.h"
#include "base/thread_pool.h"
#include "moe/experts.h"

namespace twostep::moe {
namespace {

constexpr int64_t kGrainBytes = 1 << 16;  // below which waking another thread costs more than it saves

// Experts that were chosen, and those that could have been, over all layers that ran on this thread.
struct Counts {
  int64_t read = 0, all = 0;
};
thread_local Counts counts;

// Returns both counts, which begin anew.
std::tuple<int64_t, int64_t> take_experts_read() {
  const Counts taken = std::exchange(counts, {});
  return {taken.read, taken.all};
}

// Intermediate results, which the next call overwrites.
struct Workspace {
  Buffer rows, gate_up, gated, outputs;
};

// Rows [first, first + count) of a matrix, which is no view if these are all.
at::Tensor rows_of(const at::Tensor& matrix, int64_t first, int64_t count) {
  return count == matrix.size(0) ? matrix : matrix.narrow(0, first, count);
}

// Gathers the rows [T, H] at `count` places from `first` on: [count, H].
at::Tensor gather(const at::Tensor& hidden, const Order& order, int64_t num_slots, int64_t first, int64_t count,
                  const Buffer& buffer) {
  const at::Tensor& rows = buffer.get({count, hidden.size(1)}, hidden);
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
  SlotWeights(const at::Tensor& weights, at::ScalarType row_type)
      : numbers(weights.numel()), are_rounded(weights.scalar_type() == row_type) {
    const at::Tensor all = weights.contiguous();
    TORCH_CHECK(all.scalar_type() == at::kFloat || all.scalar_type() == at::kBFloat16,
                "experts' weights are float32 or bfloat16, not ", all.scalar_type());
    const auto copy = [&](const auto* from) { std::copy_n(from, numbers.size(), numbers.begin()); };
    all.scalar_type() == at::kFloat ? copy(all.const_data_ptr<float>()) : copy(all.const_data_ptr<at::BFloat16>());
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
void weigh_all(const at::Tensor& outputs, const Order& order, const SlotWeights& weights, int64_t num_slots,
               const at::Tensor& result) {
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
at::Tensor outputs_of_many(int64_t rows, int64_t size, const at::Tensor& like) {
  static thread_local at::Tensor kept;
  const int64_t bytes = rows * size * like.element_size();
  if (bytes > kKeptBytes) return new_empty({rows, size}, like.options());
  if (!kept.defined() || kept.numel() < bytes) {
    kept.reset();
    kept = zeros_in_huge_pages({bytes}, like.options().dtype(at::kByte));
  }
  return kept.narrow(0, 0, bytes).view(like.scalar_type()).view({rows, size});
}

// hidden [T, H] -> all experts' outputs, by place [T * S, H]
at::Tensor multiply(const Experts& experts, const at::Tensor& hidden, const Order& order, int64_t num_slots,
                    const Workspace& work) {
  const int64_t size = experts.down->out_features;
  const bool is_many = order.count() > kFewSlots;
  const at::Tensor outputs = is_many ? outputs_of_many(order.count(), size, hidden)
                                     : work.outputs.get({order.count(), size}, hidden);
  for (int64_t first = 0, end; first < order.num_experts(); first = end) {
    end = order.end_of_batch(first, kBatchRows);
    const int64_t start = order.start_of(first), count = order.count_of(first, end);
    if (count == 0) continue;
    const at::Tensor rows = gather(hidden, order, num_slots, start, count, work.rows);
    const at::Tensor own = (*experts.gate)(experts.up->multiply(rows, order, first, end, work.gate_up), work.gated);
    const at::Tensor gated = experts.gated_columns ? (**experts.gated_columns)(own, {}) : own;
    experts.down->multiply(gated, order, first, end, Buffer(rows_of(outputs, start, count)));
  }
  return outputs;
}

}  // namespace

Stack::Stack(std::vector<at::Tensor> weights, const std::optional<at::Tensor>& biases, int64_t out_features,
             int64_t bits)
    : weights(std::move(weights)), out_features(out_features), bits(bits) {
  if (biases.has_value()) this->biases = biases->contiguous().unbind(0);
  TORCH_CHECK(this->biases.empty() || this->biases.size() == this->weights.size(), "each expert has its bias");
}

at::Tensor Stack::multiply(const at::Tensor& rows, const Order& order, int64_t first, int64_t end,
                           const Buffer& out) const {
  c10::SmallVector<Share, 16> shares;
  for (int64_t expert = first; expert < end; ++expert) {
    const int64_t count = order.count_of(expert, expert + 1);
    if (count > 0) shares.push_back({&weights[expert], biases.empty() ? at::Tensor() : biases[expert], count});
  }
  const auto& multiply = bits == 8 ? grouped_linear_int8 : bits == 4 ? grouped_linear_int4 : grouped_linear;
  return multiply(rows, shares, out_features, Activation::kNone, out);
}

at::Tensor Stack::multiply_each(const at::Tensor& rows, const Buffer& out) const {
  const int64_t count = weights.size();
  TORCH_CHECK(rows.dim() == 3 && rows.size(0) == count && bits == 0 && biases.empty(),
              "rows [E, T, K] are of all weights, which are dense");
  c10::SmallVector<Share, 16> shares;
  for (const at::Tensor& weight : weights) shares.push_back({&weight, at::Tensor(), rows.size(1)});
  const at::Tensor products =
      grouped_linear(rows.reshape({-1, rows.size(2)}), shares, out_features, Activation::kNone, out);
  return products.view({count, rows.size(1), out_features});
}

at::Tensor Experts::run(const at::Tensor& hidden, const at::Tensor& chosen, const at::Tensor& weights) const {
  TORCH_CHECK(hidden.scalar_type() == at::kFloat || hidden.scalar_type() == at::kBFloat16,
              "experts take float32 or bfloat16, not ", hidden.scalar_type());
  TORCH_CHECK(hidden.dim() == 2 && chosen.dim() == 2 && chosen.size(0) == hidden.size(0) && chosen.size(1) > 0 &&
                  weights.sizes() == chosen.sizes(),
              "each row has its experts, and their weights");
  const at::Tensor rows = hidden.contiguous();
  const Order order(chosen.to(at::kLong).contiguous(), up->weights.size());
  counts.read += order.num_chosen();
  counts.all += order.num_experts();
  static thread_local Workspace work_of_few;
  Workspace work_of_many, &work = order.count() <= kFewSlots ? work_of_few : work_of_many;
  const at::Tensor outputs = multiply(*this, rows, order, chosen.size(1), work);
  const at::Tensor result = new_empty({rows.size(0), down->out_features}, rows.options());
  const SlotWeights numbers(weights, rows.scalar_type());
  rows.scalar_type() == at::kFloat ? weigh_all<float>(outputs, order, numbers, chosen.size(1), result)
                                   : weigh_all<at::BFloat16>(outputs, order, numbers, chosen.size(1), result);
  return result_columns ? (**result_columns)(result, {}) : result;
}

void register_classes(torch::Library& library) {
  library.class_<Stack>("ExpertStack")
      .def(torch::init<std::vector<at::Tensor>, std::optional<at::Tensor>, int64_t, int64_t>())
      .def("multiply_each", [](const Ref<Stack>& stack, const at::Tensor& rows) { return stack->multiply_each(rows); });
  library.class_<Gate>("ExpertGate")
      .def(torch::init<std::string, double, double, bool>())
      .def("run", [](const Ref<Gate>& gate, const at::Tensor& gate_up) { return (*gate)(gate_up, {}); });
  library.class_<Experts>("Experts")
      .def(torch::init<Ref<Stack>, Ref<Stack>, Ref<Gate>, ranks::OptionalGather, ranks::OptionalGather>())
      .def("run", &Experts::run);
}

}  // namespace twostep::moe

TORCH_LIBRARY_FRAGMENT(twostep, library) {
  library.def("take_experts_read() -> (int, int)", &twostep::moe::take_experts_read);
}
