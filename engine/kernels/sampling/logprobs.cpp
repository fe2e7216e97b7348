// Log-probabilities of tokens and of the likeliest tokens; engine/runner/logprobs.py has the same in torch.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <tuple>

#include "base/bfloat16.h"
#include "base/check.h"
#include "base/operators.h"
#include "base/tensor.h"
#include "base/thread_pool.h"
#include "base/vec.h"
#include "sampling/logits.h"

namespace twostep {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

// Calls visit for the numbers, sixteen at a time, padded with `filler`.
template <class Element, class Visit>
void visit_all(const Element* row, int64_t size, float filler, const Visit& visit) {
  int64_t i = 0;
  for (; i + kLanes <= size; i += kLanes) visit(load(row + i));
  if (i == size) return;
  alignas(64) float last[kLanes];
  std::fill_n(last, kLanes, filler);
  std::copy_n(row + i, size - i, last);
  visit(load(last));
}

// Returns the logarithm of the sum of e**(x - largest). Only short sums are in single precision.
template <class Element>
double log_sum(const Element* row, int64_t size, float largest) {
  double total = 0;
  for (int64_t start = 0; start < size; start += kLogitsAtOnce) {
    Vec sum = broadcast(0);
    visit_all(row + start, std::min(kLogitsAtOnce, size - start), -kInfinity,
              [&](Vec x) { sum = sum + exp_nonpositive(x - broadcast(largest)); });
    total += fold_add(sum);
  }
  return std::log(total);
}

template <class Element>
int64_t count_above(const Element* row, int64_t size, float limit) {
  PartU counts[kParts] = {};
  visit_all(row, size, -kInfinity, [&](Vec x) {
    const Vec limits = broadcast(limit);
    unroll<kParts>([&](auto part) { counts[part] -= (PartU)(x.part[part] > limits.part[part]); });
  });
  int64_t count = 0;
  for (int lane = 0; lane < kLanes; ++lane) count += counts[lane / kPartLanes][lane % kPartLanes];
  return count;
}

// Returns the `num_top` largest, in descending order; of equals the first ones.
template <class Element>
void find_top(const Element* row, int64_t size, int64_t num_top, int64_t* top) {
  const auto is_before = [=](int64_t a, int64_t b) { return float(row[a]) > float(row[b]); };
  int64_t num_found = 0;
  for (int64_t start = 0; start < size && num_top > 0; start += kLogitsAtOnce) {
    const int64_t end = std::min(start + kLogitsAtOnce, size);
    if (num_found == num_top && are_at_most(row[top[num_top - 1]], row + start, end - start)) continue;
    for (int64_t i = start; i < end; ++i) {
      if (num_found == num_top && !is_before(i, top[num_top - 1])) continue;
      num_found = std::min(num_found + 1, num_top);
      int64_t place = num_found - 1;
      for (; place > 0 && is_before(i, top[place - 1]); --place) top[place] = top[place - 1];
      top[place] = i;
    }
  }
}

struct Scores {
  Tensor logprobs, ranks, top_logprobs, top_ids;
};

template <class Element>
void score_rows(const Tensor& logits, const int64_t* tokens, Scores& scores) {
  const Element* from = logits.const_data_ptr<Element>();
  const int64_t size = logits.size(1), num_top = scores.top_ids.size(1);
  float *logprobs = scores.logprobs.mutable_data_ptr<float>(), *values = scores.top_logprobs.mutable_data_ptr<float>();
  int64_t *ranks = scores.ranks.mutable_data_ptr<int64_t>(), *ids = scores.top_ids.mutable_data_ptr<int64_t>();
  run_ranges(logits.size(0), 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const Element* row = from + i * size;
      const float largest = row[argmax_row(row, size)];
      const double rest = largest + log_sum(row, size, largest);
      logprobs[i] = row[tokens[i]] - rest;
      ranks[i] = count_above(row, size, row[tokens[i]]) + 1;
      int64_t* top = ids + i * num_top;
      find_top(row, size, num_top, top);
      for (int64_t place = 0; place < num_top; ++place) values[i * num_top + place] = row[top[place]] - rest;
    }
  });
}

}  // namespace

std::tuple<Tensor, Tensor, Tensor, Tensor> score_tokens(const Tensor& logits, const Tensor& tokens, int64_t num_top) {
  TWOSTEP_CHECK(logits.dim() == 2 && logits.size(1) > 0, "logits are rows [T, V]");
  TWOSTEP_CHECK(tokens.dim() == 1 && tokens.size(0) == logits.size(0), "there is one token a row");
  TWOSTEP_CHECK(tokens.scalar_type() == kLong, "tokens are int64");
  TWOSTEP_CHECK(0 <= num_top && num_top <= logits.size(1), num_top, " of ", logits.size(1), " tokens");
  const Tensor rows = logits.contiguous(), ids = tokens.contiguous();
  check_tokens(ids, rows.size(1));
  const int64_t num_rows = rows.size(0);
  Scores scores{new_empty({num_rows}, kFloat), new_empty({num_rows}, ids.scalar_type()),
                new_empty({num_rows, num_top}, kFloat), new_empty({num_rows, num_top}, ids.scalar_type())};
  switch (rows.scalar_type()) {
    case kFloat: score_rows<float>(rows, ids.const_data_ptr<int64_t>(), scores); break;
    case kBFloat16: score_rows<BFloat16>(rows, ids.const_data_ptr<int64_t>(), scores); break;
    default: fail_not_implemented("scores of ", rows.scalar_type(), " are not implemented");
  }
  return {scores.logprobs, scores.ranks, scores.top_logprobs, scores.top_ids};
}

}  // namespace twostep
