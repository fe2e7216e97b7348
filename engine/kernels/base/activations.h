// Activation functions of sixteen elements, whose results do not depend on each other; also of doubles, for float64.

#pragma once

#include <cmath>
#include <string_view>

#include "base/check.h"
#include "base/vec.h"

namespace twostep {

// 1 / (1 + e**-x), from e**-|x|, which cannot overflow.
inline Vec sigmoid_of(Vec x) {
  const Vec minus_magnitude = each_part([&](int i) { return (PartF)((PartU)x.part[i] | 0x80000000u); });
  const Vec one = broadcast(1.0f), decay = exp_nonpositive(minus_magnitude);
  return where_less(x, Vec{}, decay, one) / (one + decay);
}

struct Sigmoid {
  static Vec apply(Vec x) { return sigmoid_of(x); }
  static double apply(double x) { return 1.0 / (1.0 + std::exp(-x)); }
};

struct Silu {
  static Vec apply(Vec x) { return x * sigmoid_of(x); }
  static double apply(double x) { return x / (1.0 + std::exp(-x)); }
};

// x / 2 * (1 + tanh(u)) with u = sqrt(2 / pi) * (x + 0.044715 x**3), which is x * sigmoid(2 u).
struct GeluTanh {
  static Vec apply(Vec x) {
    const Vec u = fma(x * x * x, broadcast(0.044715f), x);
    return x * sigmoid_of(u * broadcast(1.5957691216f));
  }
  static double apply(double x) { return x / (1.0 + std::exp(-1.5957691216057308 * (x + 0.044715 * x * x * x))); }
};

// x / 2 * (1 + erf(x / sqrt(2))): the library's erf, one element at a time.
struct GeluErf {
  static Vec apply(Vec x) {
    alignas(64) float values[kLanes];
    store(values, x);
    for (float& value : values) value = 0.5f * value * (1.0f + std::erf(value * 0.70710678f));
    return load(values);
  }
  static double apply(double x) { return 0.5 * x * (1.0 + std::erf(x * 0.7071067811865476)); }
};

// log(1 + e**x) as max(x, 0) + log(1 + e), with e = e**-|x|, to 2 units in the last place: that logarithm is
// 2 atanh(e / (2 + e)), of whose series nine terms are left, as e / (2 + e) is a third at most.
struct Softplus {
  static Vec apply(Vec x) {
    const Vec minus_magnitude = each_part([&](int i) { return (PartF)((PartU)x.part[i] | 0x80000000u); });
    const Vec e = exp_nonpositive(minus_magnitude), s = e / (broadcast(2.0f) + e), z = s * s;
    Vec p = broadcast(1.0f / 17.0f);
    unroll<8>([&](auto i) TWOSTEP_INLINE { p = fma(p, z, broadcast(1.0f / float(15 - 2 * i))); });
    const Vec logarithm = broadcast(2.0f) * s * p;
    return where_less(x, Vec{}, logarithm, x + logarithm);
  }
  static double apply(double x) { return x > 20.0 ? x : std::log1p(std::exp(x)); }
};

// The activations that gate an MLP.
enum class Activation { kNone, kSilu, kGeluTanh };

inline Activation activation_named(std::string_view name) {
  if (name == "silu") return Activation::kSilu;
  TWOSTEP_CHECK(name == "gelu_tanh", "the activation ", name, " is not known");
  return Activation::kGeluTanh;
}

// Calls f.operator()<Op>() with the activation's function; it must not be kNone.
template <class F>
auto with_activation(Activation activation, const F& f) {
  TWOSTEP_CHECK(activation != Activation::kNone, "no activation has nothing to apply");
  return activation == Activation::kSilu ? f.template operator()<Silu>() : f.template operator()<GeluTanh>();
}

}  // namespace twostep
