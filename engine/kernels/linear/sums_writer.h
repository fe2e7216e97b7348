// What is done with the finished sums of a panel.

#pragma once

#include <algorithm>
#include <cstdint>

#include "base/activations.h"
#include "base/rows.h"
#include "linear/formats_vector.h"
#include "linear/problem.h"

namespace twostep::vector {

// Adds the bias to the finished sums of one panel, and rounds or gates them.
template <class Element, int kPanel>
class SumsWriter {
 public:
  SumsWriter(const Problem<Element>& p, int64_t panel)
      : p_(p), column_(panel * kPanel), columns_(std::min<int64_t>(kPanel, p.n - column_)) {
    for (int64_t i = 0; p.bias && i < columns_; ++i) bias_[i] = float(p.bias[column_ + i]);
  }

  void write(int64_t row, const float* sums) const {
    Element line[kPanel];
    const bool is_gated = p_.activation != Activation::kNone;
    Element* out = p_.out + row * p_.n + column_;
    Element* target = is_gated || columns_ < kPanel ? line : out;
    for (int i = 0; i < kPanel; i += kLanes) {
      narrow_store(Float32::load(sums + i) + Float32::load(bias_ + i), target + i);
    }
    if (is_gated) return gate(line, p_.out + (row * p_.n + column_) / 2);
    if (target == line) std::copy_n(line, columns_, out);
  }

 private:
  void gate(const Element* line, Element* out) const {
    with_activation(p_.activation, [&]<class Op>() { gate_row<Op>(line, columns_ / 2, out); });
  }

  const Problem<Element>& p_;
  const int64_t column_, columns_;
  float bias_[kPanel] = {};
};

}  // namespace twostep::vector
