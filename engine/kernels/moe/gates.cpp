#include "moe/gates.h"

#include <algorithm>
#include <cstdint>
#include <string>
#include <utility>

#include "base/check.h"
#include "base/rows.h"
#include "base/thread_pool.h"
#include "base/vec.h"

namespace twostep::moe {
namespace {

// activation(gate) * up
template <class Op>
struct Gated {
  template <class Element>
  static Vec apply(Vec gate, Vec up, float /*alpha*/, const Element* element) {
    return gated<Op>(gate, up, element);
  }
};

// gate * sigmoid(alpha * gate) * (up + 1), as in gpt-oss
struct Swiglu {
  template <class Element>
  static Vec apply(Vec gate, Vec up, float alpha, const Element* element) {
    const auto rounded = [&](Vec v) { return rounded_to(v, element); };
    const Vec sigmoid = rounded(Sigmoid::apply(rounded(gate * broadcast(alpha))));
    return rounded(up + broadcast(1.0f)) * rounded(gate * sigmoid);
  }
};

// Loads columns [i, i + count) of gate and of up from a row of `size` of each; at most sixteen.
template <bool kInTurn, class Element>
TWOSTEP_INLINE inline std::pair<Vec, Vec> load_gate_up(const Element* row, int64_t size, int64_t i, int64_t count) {
  if constexpr (!kInTurn) return {load_upto(row + i, count), load_upto(row + size + i, count)};
  Element gate[kLanes] = {}, up[kLanes] = {};
  for (int64_t j = 0; j < count; ++j) gate[j] = row[2 * (i + j)], up[j] = row[2 * (i + j) + 1];
  return {load(gate), load(up)};
}

// What is above the limit becomes the limit, and what is NaN stays it.
inline Vec at_most(Vec x, float limit) { return where_less(broadcast(limit), x, broadcast(limit), x); }
inline Vec within(Vec x, float limit) { return where_less(x, broadcast(-limit), broadcast(-limit), at_most(x, limit)); }

struct Numbers {
  float limit, alpha;
};

constexpr int64_t kGrain = 1 << 13;  // elements below which waking another thread costs more than it saves

template <class Function, bool kInTurn, class Element>
void run_rows(const Tensor& rows, const Numbers& numbers, const Tensor& out) {
  const int64_t size = out.size(1);
  const auto* from = rows.const_data_ptr<Element>();
  auto* to = out.mutable_data_ptr<Element>();
  run_ranges(out.size(0), divide_up(kGrain, std::max<int64_t>(1, size)), [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      for_each_vector(size, [&](int64_t i, int64_t count) TWOSTEP_INLINE {
        const auto [gate, up] = load_gate_up<kInTurn>(from + row * 2 * size, size, i, count);
        const Vec limited = at_most(gate, numbers.limit);
        store_upto(to + row * size + i, count,
                   Function::apply(limited, within(up, numbers.limit), numbers.alpha, from));
      });
    }
  });
}

// The square of what is positive.
template <class Element>
void square_rows(const Tensor& rows, const Tensor& out) {
  const auto* from = rows.const_data_ptr<Element>();
  auto* to = out.mutable_data_ptr<Element>();
  run_ranges(rows.numel(), kGrain, [&](int64_t begin, int64_t end) {
    for_each_vector(end - begin, [&](int64_t i, int64_t count) TWOSTEP_INLINE {
      const Vec v = load_upto(from + begin + i, count), positive = where_less(v, Vec{}, Vec{}, v);
      store_upto(to + begin + i, count, positive * positive);
    });
  });
}

template <class Function, class Element>
void run_layout(bool is_in_turn, const Tensor& rows, const Numbers& numbers, const Tensor& out) {
  is_in_turn ? run_rows<Function, true, Element>(rows, numbers, out)
             : run_rows<Function, false, Element>(rows, numbers, out);
}

}  // namespace

Gate::Gate(const std::string& name, double limit, double alpha, bool is_in_turn)
    : limit_(float(limit)), alpha_(float(alpha)), is_in_turn_(is_in_turn), is_swiglu_(name == "swiglu"),
      is_plain_(name == "square_relu"),
      activation_(is_swiglu_ || is_plain_ ? Activation::kNone : activation_named(name)) {}

Tensor Gate::operator()(const Tensor& gate_up, const Buffer& buffer) const {
  TWOSTEP_CHECK(gate_up.dim() == 2 && (is_plain_ || gate_up.size(1) % 2 == 0),
                "a row has as many columns of gate as of up");
  const Tensor rows = gate_up.contiguous();
  if (is_plain_) {
    const Tensor& out = buffer.get(rows.sizes(), rows);
    with_element_of(rows, "gates", [&]<class Element>(Element*) { square_rows<Element>(rows, out); });
    return out;
  }
  const Tensor& out = buffer.get({rows.size(0), rows.size(1) / 2}, rows);
  with_element_of(rows, "gates", [&]<class Element>(Element*) {
    if (is_swiglu_) return run_layout<Swiglu, Element>(is_in_turn_, rows, {limit_, alpha_}, out);
    with_activation(activation_,
                    [&]<class Op>() { run_layout<Gated<Op>, Element>(is_in_turn_, rows, {limit_, alpha_}, out); });
  });
  return out;
}

}  // namespace twostep::moe
