// What lies between the products of recurrent layers and of gated attention: rows that are multiplied by gates.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <string_view>
#include <type_traits>

#include "base/activations.h"
#include "base/check.h"
#include "base/rows.h"
#include "base/sizes.h"
#include "base/tensor.h"
#include "base/thread_pool.h"
#include "base/vec.h"
#include "recurrent/operators.h"

namespace twostep::recurrent {
namespace {

constexpr int64_t kGrain = 1 << 13;  // elements below which waking another thread costs more than it saves

struct Identity {
  static Vec apply(Vec x) { return x; }
};

// Multiplies rows of x by Op(gates). A sigmoid is rounded before, as in transformers' attention, and a silu is not, as
// in its gated norms.
template <class Op, class Element>
void multiply_rows(const Tensor& x, const Tensor& gates) {
  const int64_t size = x.size(1), stride = gates.stride(0);
  auto* to = x.mutable_data_ptr<Element>();
  const auto* from = gates.const_data_ptr<Element>();
  run_ranges(x.size(0), divide_up(kGrain, std::max<int64_t>(1, size)), [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      Element* own = to + row * size;
      for_each_vector(size, [&](int64_t i, int64_t count) TWOSTEP_INLINE {
        Vec factor = Op::apply(load_upto(from + row * stride + i, count));
        if constexpr (std::is_same_v<Op, Sigmoid>) factor = rounded_to(factor, own);
        store_upto(own + i, count, load_upto(own + i, count) * factor);
      });
    }
  });
}

// Writes x * silu(gates) to x, and the RMSNorm of each group of it, times the weight, to `to`.
template <class Element>
void norm_groups(float* x, const Element* gates, const Element* weight, int64_t size, int64_t num_groups, float eps,
                 Element* to) {
  for (int64_t first = 0; first < size * num_groups; first += size) {
    Vec squares{};
    for_each_vector(size, [&](int64_t i, int64_t count) TWOSTEP_INLINE {
      const Vec gated = load_upto(x + first + i, count) * Silu::apply(load_upto(gates + first + i, count));
      store_upto(x + first + i, count, gated);
      squares = squares + gated * gated;
    });
    const Vec factor = broadcast(1.0f / std::sqrt(fold_add(squares) / float(size) + eps));
    for_each_vector(size, [&](int64_t i, int64_t count) TWOSTEP_INLINE {
      const Vec normed = load_upto(x + first + i, count) * factor;
      store_upto(to + first + i, count, normed * load_upto(weight + first + i, count));
    });
  }
}

}  // namespace

void multiply_by_gates(const Tensor& x, const Tensor& gates, std::string_view activation) {
  TWOSTEP_CHECK(x.dim() == 2 && x.is_contiguous() && x.sizes() == gates.sizes() && gates.stride(1) == 1 &&
                    x.scalar_type() == gates.scalar_type(),
                "x and its gates are rows of one size and dtype");
  with_element_of(x, "gates", [&]<class Element>(Element*) {
    if (activation == "sigmoid") return multiply_rows<Sigmoid, Element>(x, gates);
    if (activation == "silu") return multiply_rows<Silu, Element>(x, gates);
    TWOSTEP_CHECK(activation == "none", "gates of ", activation, " are not known");
    multiply_rows<Identity, Element>(x, gates);
  });
}

Tensor gated_group_norm(const Tensor& x, const Tensor& gates, const Tensor& weight, double eps, int64_t num_groups) {
  TWOSTEP_CHECK(x.dim() == 2 && x.is_contiguous() && x.scalar_type() == kFloat && x.sizes() == gates.sizes() &&
                    gates.stride(1) == 1,
                "x, in float32, and its gates are rows of one size");
  TWOSTEP_CHECK(weight.is_contiguous() && weight.numel() == x.size(1) && weight.scalar_type() == gates.scalar_type() &&
                    num_groups > 0 && x.size(1) % num_groups == 0,
                "a weight has the rows' size, which is in groups, and the gates' dtype");
  const int64_t width = x.size(1);
  const Tensor out = new_empty(x.sizes(), gates.scalar_type());
  with_element_of(gates, "gates", [&]<class Element>(Element*) {
    auto* own = x.mutable_data_ptr<float>();
    const auto* factors = gates.const_data_ptr<Element>();
    run_ranges(x.size(0), divide_up(kGrain, width), [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row) {
        norm_groups(own + row * width, factors + row * gates.stride(0), weight.const_data_ptr<Element>(),
                    width / num_groups, num_groups, float(eps), out.mutable_data_ptr<Element>() + row * width);
      }
    });
  });
  return out;
}

Tensor gated_reads(const Tensor& x, const Tensor& gates) {
  TWOSTEP_CHECK(x.dim() == 2 && x.is_contiguous() && x.scalar_type() == kFloat && x.sizes() == gates.sizes() &&
                    gates.stride(1) == 1,
                "x, in float32, and its gates are rows of one size");
  const int64_t width = x.size(1);
  const Tensor out = new_empty(x.sizes(), gates.scalar_type());
  with_element_of(gates, "gates", [&]<class Element>(Element* element) {
    const auto* reads = x.const_data_ptr<float>();
    const auto* factors = gates.const_data_ptr<Element>();
    auto* to = out.mutable_data_ptr<Element>();
    run_ranges(x.size(0), divide_up(kGrain, width), [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row) {
        for_each_vector(width, [&](int64_t i, int64_t count) TWOSTEP_INLINE {
          const Vec factor = rounded_to(Silu::apply(load_upto(factors + row * gates.stride(0) + i, count)), element);
          store_upto(to + row * width + i, count, load_upto(reads + row * width + i, count) * factor);
        });
      }
    });
  });
  return out;
}

}  // namespace twostep::recurrent
