// Draws, log-probabilities and the largest of rows of logits, by their bits.

#include "without_torch.h"

#include "checks.h"
#include "sampling/draw.cpp"
#include "sampling/logprobs.cpp"

namespace {

using namespace twostep;

template <class Element>
void sample(checks::Numbers& numbers) {
  constexpr int64_t size = 3001;
  std::vector<Element> logits = numbers.reals<Element>(size, 12.0f);
  logits[7] = -kInfinity;
  const int64_t likeliest = argmax_row(logits.data(), size);
  const float largest = logits[likeliest];
  std::vector<Weight> weights(2 * size);
  std::vector<int64_t> found{likeliest, count_above(logits.data(), size, 3.0f)};
  for (double number : {0.0, 0.3, 0.999}) {
    weigh(logits.data(), size, largest, 0.7f, weights.data());
    filter(weights.data(), size, Controls{0.7, number, 500, 0.9, 0.001}, weights.data() + size);
    found.push_back(find(weights.data(), size, number));
  }
  int64_t top[5];
  find_top(logits.data(), size, 5, top);
  found.insert(found.end(), top, top + 5);
  checks::print_bits("tokens", found);
  weights.resize(size);
  checks::print_bits("weights", weights);
  const float logprob = float(logits[likeliest] - (largest + log_sum(logits.data(), size, largest)));
  checks::print_bits("log-probability", &logprob, sizeof(logprob));
}

}  // namespace

int main() {
  checks::Numbers numbers;
  sample<float>(numbers), sample<BFloat16>(numbers);
}
