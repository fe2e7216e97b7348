// Batch-invariant silu, sigmoid, gelu and softplus: the result for an element depends on that element alone.
//
// torch's own take a vectorised path through the middle of a thread's share and a scalar path at its end, and the two
// differ in the last bit: an activation then depends on how many rows are computed at once. Here every element goes
// through the same instructions.

#include "layers/elementwise.h"

#include <cmath>
#include <string_view>

#include "base/activations.h"
#include "base/bfloat16.h"
#include "base/check.h"
#include "base/tensor.h"
#include "base/thread_pool.h"

namespace twostep::elementwise {
namespace {

constexpr int64_t kGrain = 1 << 13;  // elements below which waking another thread costs more than it saves

// Computes sixteen elements at a time; the last few are padded with zeros.
template <class Op, class Element>
void run(const Element* from, int64_t size, Element* to) {
  for_each_vector(size, [&](int64_t i, int64_t count) TWOSTEP_INLINE {
    store_upto(to + i, count, Op::apply(load_upto(from + i, count)));
  });
}

template <class Op>
void run(const double* from, int64_t size, double* to) {
  for (int64_t i = 0; i < size; ++i) to[i] = Op::apply(from[i]);
}

template <class Op, class Element>
void run_all(const Tensor& input, Tensor& output) {
  const Element* from = input.const_data_ptr<Element>();
  Element* to = output.mutable_data_ptr<Element>();
  run_ranges(input.numel(), kGrain, [&](int64_t begin, int64_t end) {
    run<Op>(from + begin, end - begin, to + begin);
  });
}

// Writes to `output`, which is contiguous and may be the input.
template <class Op>
void map_into(const Tensor& input, Tensor& output) {
  const Tensor source = input.contiguous();
  switch (input.scalar_type()) {
    case kFloat: return run_all<Op, float>(source, output);
    case kBFloat16: return run_all<Op, BFloat16>(source, output);
    case kDouble: return run_all<Op, double>(source, output);
    default: fail_not_implemented("activation of ", input.scalar_type(), " is not implemented");
  }
}

template <class Op>
Tensor map(const Tensor& input) {
  Tensor output = new_empty_like(input);
  map_into<Op>(input, output);
  return output;
}

template <class Op>
void map_in_place(const Tensor& self) {
  Tensor output = self.is_contiguous() ? self : new_empty_like(self);
  map_into<Op>(self, output);
  if (!output.is_same(self)) self.copy_(output);
}

}  // namespace

Tensor silu(const Tensor& x) { return map<Silu>(x); }
void silu_in_place(const Tensor& x) { map_in_place<Silu>(x); }
Tensor sigmoid(const Tensor& x) { return map<Sigmoid>(x); }
void sigmoid_in_place(const Tensor& x) { map_in_place<Sigmoid>(x); }

Tensor gelu(const Tensor& x, std::string_view approximate) {
  return approximate == "tanh" ? map<GeluTanh>(x) : map<GeluErf>(x);
}

void gelu_in_place(const Tensor& x, std::string_view approximate) {
  approximate == "tanh" ? map_in_place<GeluTanh>(x) : map_in_place<GeluErf>(x);
}

Tensor softplus(const Tensor& x) { return map<Softplus>(x); }

}  // namespace twostep::elementwise
