// Finds codes, scales and minimums for a weight as engine/quantization.py says, where what follows is explained: the
// same operations in the same order, so the same bits, in a twentieth of the time.

#pragma once

#include <limits>

#include "linear.h"
#include "vec.h"

namespace twostep::quantizing {

constexpr int64_t kGroup = 2 * kLanes;

// A group's numbers, or what belongs to each of them.
struct Values {
  Vec low, high;
};

inline Values operator+(const Values& a, const Values& b) { return {a.low + b.low, a.high + b.high}; }
inline Values operator-(const Values& a, const Values& b) { return {a.low - b.low, a.high - b.high}; }
inline Values operator*(const Values& a, const Values& b) { return {a.low * b.low, a.high * b.high}; }
inline Values operator/(const Values& a, const Values& b) { return {a.low / b.low, a.high / b.high}; }
inline Values all(float value) { return {broadcast(value), broadcast(value)}; }
inline float sum(const Values& values) { return fold_add(values.low + values.high); }
inline float mean(const Values& values) { return sum(values) / kGroup; }
inline float largest(const Values& values) { return fold_max(max(values.low, values.high)); }

inline float rounded(float value) { return at::BFloat16(value); }

inline float rounded_down(float value) {
  at::BFloat16 number(value);
  if (float(number) > value) number.x += number.x & 0x8000 ? 1 : -1;
  return number;
}

// The integers nearest to numbers from 0 to max_code, of other numbers the nearer end.
inline Vec nearest_codes(Vec values, float max_code) {
  const Vec zero{}, end = broadcast(max_code), shift = broadcast(12582912.0f);  // as in exp_nonpositive
  const Vec positive = where_less(zero, values, values, zero);
  return where_less(positive, end, positive, end) + shift - shift;
}

struct Fit {
  Values codes;
  float scale, minimum, error;
};

class Fitter {
 public:
  Fitter(const Values& numbers, int64_t bits)
      : numbers_(numbers), lowest_(-largest(Values{} - numbers)), highest_(largest(numbers)), bits_(bits) {}

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
    const Values centred = fit.codes - all(mean_code);
    const float covariance = sum(centred * (numbers_ - all(mean_number)));
    const float scale = covariance / std::max(sum(centred * centred), 1e-9f);
    return with(scale, mean_number - scale * mean_code);
  }

  Fit with(float scale, float minimum) const {
    scale = rounded(scale), minimum = rounded(minimum);
    const float divisor = scale != 0 ? scale : std::numeric_limits<float>::infinity();
    const Values places = (numbers_ - all(minimum)) / all(divisor);
    const Values codes{nearest_codes(places.low, max_code()), nearest_codes(places.high, max_code())};
    const Values errors = all(minimum) + codes * all(scale) - numbers_;
    return {codes, scale, minimum, sum(errors * errors)};
  }

  float max_code() const { return float((1 << bits_) - 1); }

  Values numbers_;
  float lowest_, highest_;
  int64_t bits_;
};

template <class Element>
Values load_group(const Element* row, int64_t start, int64_t end) {
  if (start + kGroup <= end) return {load(row + start), load(row + start + kLanes)};
  Element numbers[kGroup];
  std::fill_n(std::copy(row + start, row + end, numbers), kGroup - (end - start), row[end - 1]);
  return {load(numbers), load(numbers + kLanes)};
}

template <class Element>
void quantize_row(const Element* row, int64_t k, int64_t bits, int64_t num_refits, uint8_t* codes,
                  at::BFloat16* scales, at::BFloat16* minimums) {
  for (int64_t start = 0; start < k; start += kGroup) {
    const Fit fit = Fitter(load_group(row, start, k), bits).best(num_refits);
    float wide[kGroup];
    store(wide, fit.codes.low);
    store(wide + kLanes, fit.codes.high);
    for (int64_t i = 0; i < std::min(kGroup, k - start); ++i) codes[start + i] = uint8_t(int32_t(wide[i]));
    *scales++ = fit.scale;
    *minimums++ = fit.minimum;
  }
}

}  // namespace twostep::quantizing
