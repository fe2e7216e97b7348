// Affine quantization of a weight: codes, scales and minimums. Its reference, with explanations, is
// engine/weights/affine_quantization.py: the same operations in the same order, so the same bits, in a twentieth of the
// time.

#pragma once

#include <algorithm>
#include <limits>

#include "base/bfloat16.h"
#include "base/vec.h"
#include "linear/problem.h"

namespace twostep::quantizing {

constexpr int64_t kGroup8 = 256, kGroup4 = 32;  // numbers along K with one scale and minimum, by their codes' bits

// A value for each number of a group.
template <int kVectors>
struct Values {
  Vec part[kVectors];
};

template <int kVectors, class F>
Values<kVectors> each_vector(F f) {
  Values<kVectors> values;
  unroll<kVectors>([&](auto i) { values.part[i] = f(i); });
  return values;
}

template <int N>
Values<N> operator+(const Values<N>& a, const Values<N>& b) {
  return each_vector<N>([&](int i) { return a.part[i] + b.part[i]; });
}
template <int N>
Values<N> operator-(const Values<N>& a, const Values<N>& b) {
  return each_vector<N>([&](int i) { return a.part[i] - b.part[i]; });
}
template <int N>
Values<N> operator*(const Values<N>& a, const Values<N>& b) {
  return each_vector<N>([&](int i) { return a.part[i] * b.part[i]; });
}
template <int N>
Values<N> operator/(const Values<N>& a, const Values<N>& b) {
  return each_vector<N>([&](int i) { return a.part[i] / b.part[i]; });
}
template <int N>
Values<N> all(float value) {
  return each_vector<N>([&](int) { return broadcast(value); });
}

// Combines vector i with vector i + N / 2, then halves again, down to one.
template <int N, class F>
Vec fold_vectors(const Values<N>& values, F combine) {
  if constexpr (N == 1) {
    return values.part[0];
  } else {
    const auto pair = [&](int i) { return combine(values.part[i], values.part[i + N / 2]); };
    return fold_vectors(each_vector<N / 2>(pair), combine);
  }
}

template <int N>
float sum(const Values<N>& values) {
  return fold_add(fold_vectors(values, [](Vec a, Vec b) { return a + b; }));
}
template <int N>
float mean(const Values<N>& values) {
  return sum(values) / (N * kLanes);
}
template <int N>
float largest(const Values<N>& values) {
  return fold_max(fold_vectors(values, [](Vec a, Vec b) { return max(a, b); }));
}

inline float rounded(float value) { return BFloat16(value); }

inline float rounded_down(float value) {
  BFloat16 number(value);
  if (float(number) > value) number.bits += number.bits & 0x8000 ? 1 : -1;
  return number;
}

// Returns the nearest integers from 0 to max_code.
inline Vec nearest_codes(Vec values, float max_code) {
  const Vec zero{}, end = broadcast(max_code), shift = broadcast(12582912.0f);  // as in exp_nonpositive
  const Vec positive = where_less(zero, values, values, zero);
  return where_less(positive, end, positive, end) + shift - shift;
}

template <int N>
Values<N> nearest_codes(const Values<N>& values, float max_code) {
  return each_vector<N>([&](int i) { return nearest_codes(values.part[i], max_code); });
}

template <int N>
class Fitter {
 public:
  struct Fit {
    Values<N> codes;
    float scale, minimum, error;
  };

  Fitter(const Values<N>& numbers, int64_t bits)
      : numbers_(numbers), lowest_(-largest(Values<N>{} - numbers)), highest_(largest(numbers)), bits_(bits) {}

  Fit best(int64_t num_refits) const {
    Fit best = through_ends(), fit = best;
    for (int64_t i = 0; i < num_refits; ++i) keep_better(best, fit = refitted(fit));
    keep_better(best, around_zero());
    return best;
  }

 private:
  static void keep_better(Fit& best, const Fit& other) {
    if (other.error < best.error) best = other;
  }

  Fit through_ends() const {
    const float minimum = rounded_down(lowest_);
    return with((highest_ - minimum) / max_code(), minimum);
  }

  Fit around_zero() const {
    const float farthest = highest_ > -lowest_ ? highest_ : lowest_, middle = 1 << (bits_ - 1);
    const float scale = rounded(farthest / -middle);
    return with(scale, scale * -middle);
  }

  Fit refitted(const Fit& fit) const {
    const float mean_code = mean(fit.codes), mean_number = mean(numbers_);
    const Values<N> centred = fit.codes - all<N>(mean_code);
    const float covariance = sum(centred * (numbers_ - all<N>(mean_number)));
    const float scale = covariance / std::max(sum(centred * centred), 1e-9f);
    return with(scale, mean_number - scale * mean_code);
  }

  Fit with(float scale, float minimum) const {
    scale = rounded(scale), minimum = rounded(minimum);
    const float divisor = scale != 0 ? scale : std::numeric_limits<float>::infinity();
    const Values<N> codes = nearest_codes((numbers_ - all<N>(minimum)) / all<N>(divisor), max_code());
    const Values<N> errors = all<N>(minimum) + codes * all<N>(scale) - numbers_;
    return {codes, scale, minimum, sum(errors * errors)};
  }

  float max_code() const { return float((1 << bits_) - 1); }

  Values<N> numbers_;
  float lowest_, highest_;
  int64_t bits_;
};

// Loads a group, padded with its last number, row[end - 1], which is in the group anyway.
template <int N, class Element>
Values<N> load_group(const Element* row, int64_t start, int64_t end) {
  constexpr int64_t kGroup = N * kLanes;
  Element numbers[kGroup];
  const int64_t count = std::min(kGroup, end - start);
  std::fill(std::copy_n(row + start, count, numbers), numbers + kGroup, row[end - 1]);
  return each_vector<N>([&](int i) { return load(numbers + i * kLanes); });
}

template <int N>
void store_codes(const Values<N>& codes, int64_t count, uint8_t* to) {
  float wide[N * kLanes];
  unroll<N>([&](auto i) { store(wide + i * kLanes, codes.part[i]); });
  for (int64_t i = 0; i < std::min<int64_t>(N * kLanes, count); ++i) to[i] = uint8_t(int32_t(wide[i]));
}

template <int64_t kGroup, class Element>
void quantize_row(const Element* row, int64_t k, int64_t bits, int64_t num_refits, uint8_t* codes, BFloat16* scales,
                  BFloat16* minimums) {
  constexpr int N = kGroup / kLanes;
  for (int64_t start = 0; start < k; start += kGroup) {
    const auto fit = Fitter<N>(load_group<N>(row, start, k), bits).best(num_refits);
    store_codes(fit.codes, k - start, codes + start);
    *scales++ = fit.scale;
    *minimums++ = fit.minimum;
  }
}

}  // namespace twostep::quantizing
