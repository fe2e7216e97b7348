// Activations of MLPs without a gate, in the place of their rows. Results are rounded wherever the modules of
// transformers round, and each depends on its own number alone.

#include <cstdint>

#include "base/activations.h"
#include "base/check.h"
#include "base/operators.h"
#include "base/rows.h"
#include "base/tensor.h"
#include "base/thread_pool.h"

namespace twostep {
namespace {

constexpr int64_t kGrain = 1 << 13;  // elements below which waking another thread costs more than it saves

// Replaces each vector v of a contiguous tensor by f(v, element), with a null pointer of the element type.
template <class F>
void map_in_place(const Tensor& x, const F& f) {
  TWOSTEP_CHECK(x.is_contiguous(), "rows that are activated must be contiguous");
  with_element_of(x, "activations in place", [&]<class Element>(Element* element) {
    auto* data = x.mutable_data_ptr<Element>();
    run_ranges(x.numel(), kGrain, [&](int64_t begin, int64_t end) {
      for_each_vector(end - begin, [&](int64_t i, int64_t count) TWOSTEP_INLINE {
        store_upto(data + begin + i, count, f(load_upto(data + begin + i, count), element));
      });
    });
  });
}

// e**x - 1 for x <= 0, to a few units in the last place: by a series near zero, and else by the difference.
Vec expm1_nonpositive(Vec x) {
  constexpr float kFactors[] = {1.0f / 40320, 1.0f / 5040, 1.0f / 720, 1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f};
  Vec series{};
  for (const float factor : kFactors) series = fma(series, x, broadcast(factor));
  return where_less(x, broadcast(-0.5f), exp_nonpositive(x) - broadcast(1.0f), series * x);
}

// The hyperbolic tangent, to a few units in the last place of 1.
Vec tanh_of(Vec x) {
  const Vec two = broadcast(2.0f);
  return two * sigmoid_of(two * x) - broadcast(1.0f);
}

}  // namespace

void square_relu(const Tensor& x) {
  map_in_place(x, [](Vec v, const auto*) TWOSTEP_INLINE {
    const Vec positive = where_less(v, Vec{}, Vec{}, v);
    return positive * positive;
  });
}

void xielu(const Tensor& x, const Xielu& numbers) {
  const Vec positive = broadcast(float(numbers.positive)), negative = broadcast(float(numbers.negative));
  const Vec slope = broadcast(float(numbers.slope)), bound = broadcast(float(numbers.bound));
  map_in_place(x, [&](Vec v, const auto* element) TWOSTEP_INLINE {
    const auto rounded = [&](Vec each) { return rounded_to(each, element); };
    const Vec square = rounded(rounded(positive * v) * v), linear = rounded(slope * v);
    const Vec below = rounded(expm1_nonpositive(where_less(bound, v, bound, v)));
    const Vec curved = rounded(rounded(below - v) * negative);
    return where_less(Vec{}, v, square, curved) + linear;
  });
}

void gelu_new(const Tensor& x) {
  map_in_place(x, [](Vec v, const auto* element) TWOSTEP_INLINE {
    const auto rounded = [&](Vec each) { return rounded_to(each, element); };
    const Vec cube = rounded(rounded(v * v) * v), inner = rounded(v + rounded(broadcast(0.044715f) * cube));
    const Vec bent = rounded(tanh_of(rounded(broadcast(0.79788456f) * inner)));
    return rounded(broadcast(0.5f) * v) * rounded(broadcast(1.0f) + bent);
  });
}

}  // namespace twostep
