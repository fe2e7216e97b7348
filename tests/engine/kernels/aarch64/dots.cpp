// Dot products of integers against plain loops, at the ends of their ranges, too; vectors and transforms by their bits.

#include "base/activations.h"
#include "base/hadamard.h"
#include "checks.h"
#include "base/int_dot.h"

namespace {

using namespace twostep;
using namespace twostep::integers;

checks::Numbers numbers;

// Every fourth is an end of the range.
int32_t any_of(int32_t low, int32_t high) {
  const uint32_t kind = numbers.next() % 8;
  return kind == 0 ? low : kind == 1 ? high : numbers.between(low, high);
}

struct Columns {
  uint8_t bytes[kLanes][4];  // four along K
};

template <class Number>
Columns columns_between(int32_t low, int32_t high) {
  Columns columns;
  for (auto& column : columns.bytes)
    for (uint8_t& byte : column) byte = uint8_t(Number(any_of(low, high)));
  return columns;
}

struct Expected {
  int32_t sums[kLanes] = {};

  // Of the weights that bytes stand for.
  template <class X, class WeightOf>
  void add(const Columns& columns, const X* x, const WeightOf& weight_of) {
    for (int lane = 0; lane < kLanes; ++lane)
      for (int i = 0; i < 4; ++i) sums[lane] += weight_of(columns.bytes[lane][i]) * x[i];
  }
};

Bytes bytes_of(const Columns& columns) { return load_bytes(&columns.bytes[0][0]); }

void check_weights_with_sign() {
  Expected expected;
  int8_t x[4];
  int32_t row_sum = 0;
  Dots dots{};
  for (int step = 0; step < 64; ++step) {
    for (int8_t& each : x) each = any_of(-127, 127), row_sum += each;
    Columns columns = columns_between<int8_t>(-127, 127);
    expected.add(columns, x, [](uint8_t byte) { return int32_t(int8_t(byte)); });
    for (auto& column : columns.bytes)
      for (uint8_t& byte : column) byte += kOffset;
    dots = add_products(dots, bytes_of(columns), x);
  }
  const Dots first = first_sums(row_sum);
  unroll<kParts>([&](auto i) { dots.part[i] += first.part[i]; });
  checks::expect_equal("add_products", &dots, expected.sums, sizeof(expected.sums));
}

void check_codes() {
  Expected expected;
  int8_t x[64][4];
  int32_t row_sum = 0;
  for (auto& four : x)
    for (int8_t& each : four) each = any_of(-127, 127), row_sum += each;
  CodeDots dots = CodeDots::first(row_sum);
  for (const auto& four : x) {
    const Columns columns = columns_between<uint8_t>(0, 255);
    expected.add(columns, four, [](uint8_t byte) { return int32_t(byte); });
    dots.add_products(bytes_of(columns), four);
  }
  checks::expect_equal("CodeDots", &dots.total(), expected.sums, sizeof(expected.sums));
}

// 32 along K, of which a column's bytes hold four each in their low and high halves.
void check_codes_of_4_bits() {
  Expected expected;
  int8_t x[8];
  CodeSums sums;
  for (int step = 0; step < 4; ++step) {
    for (int8_t& each : x) each = any_of(-127, 127);
    const Columns columns = columns_between<uint8_t>(0, 255);
    expected.add(columns, x, [](uint8_t byte) { return byte & 15; });
    expected.add(columns, x + 4, [](uint8_t byte) { return byte >> 4; });
    sums.add_products(bytes_of(columns), x);
  }
  Dots times;
  unroll<kParts>([&](auto i) { times.part[i] = sums.times(i, PartI{} + 13); });
  for (int32_t& sum : expected.sums) sum *= 13;
  checks::expect_equal("CodeSums", &times, expected.sums, sizeof(expected.sums));
}

// Rows as SixteenBits stores them.
void check_rows_of_16_bits() {
  constexpr int32_t kLargest = 127 * 256 + 127;
  Expected expected;
  WideDots dots = WideDots::first(0.0f);
  for (int step = 0; step < 16; ++step) {
    int32_t x[kLanes];
    for (int32_t& each : x) each = any_of(-kLargest, kLargest);
    std::vector<int8_t> row(2 * kTileBytes);
    Dots integers;
    std::memcpy(&integers, x, sizeof(x));
    if constexpr (kHalvesApart) {
      store_low_bytes(row.data(), upper_halves(integers));
      store_low_bytes(row.data() + kTileBytes, integers);
    } else {
      store_wide(row.data(), integers);
    }
    for (int k = 0; k < kLanes; k += 4) {
      const Columns columns = columns_between<uint8_t>(0, 255);
      expected.add(columns, x + k, [](uint8_t byte) { return int32_t(byte); });
      dots.add_products(bytes_of(columns), row.data() + k * (kHalvesApart ? 1 : 2));
    }
  }
  const Dots total = dots.total();
  checks::expect_equal("WideDots", &total, expected.sums, sizeof(expected.sums));
}

void check_sums() {
  int8_t x[32];
  int32_t sum = 0;
  for (int8_t& each : x) each = any_of(-128, 127), sum += each;
  const int32_t found = sum_of_32(x);
  checks::expect_equal("sum_of_32", &found, &sum, sizeof(sum));
  int32_t pairs[2][kPartLanes], products[kPartLanes];
  for (int lane = 0; lane < kPartLanes; ++lane) {
    const int32_t a = any_of(-32767, 32767), b = any_of(-32768, 32767), c = any_of(-32767, 32767), d = any_of(-1, 1);
    pairs[0][lane] = pair_of(a, b), pairs[1][lane] = pair_of(c, d), products[lane] = a * c + b * d;
  }
  PartI left, right;
  std::memcpy(&left, pairs[0], sizeof(left)), std::memcpy(&right, pairs[1], sizeof(right));
  const PartI both = times_pairs(left, right);
  checks::expect_equal("times_pairs", &both, products, sizeof(products));
}

template <class F>
void print_function(const char* what, const std::vector<float>& x, const F& f) {
  std::vector<float> results(x.size());
  for (size_t i = 0; i < x.size(); i += kLanes) store(results.data() + i, f(load(x.data() + i)));
  checks::print_bits(what, results);
}

void print_functions() {
  const std::vector<float> x = numbers.reals(4096, 20.0f);
  std::vector<float> negative = x;
  for (float& each : negative) each = each < 0 ? 5 * each : -5 * each;
  print_function("fused: exp_nonpositive", negative, [](Vec v) { return exp_nonpositive(v); });
  print_function("fused: exp2_of_product", negative, [](Vec v) { return exp2_of_product(v, broadcast(1.7f)); });
  print_function("fused: tanh", x, [](Vec v) { return tanh(v); });
  print_function("fused: silu", x, [](Vec v) { return Silu::apply(v); });
  print_function("fused: gelu_tanh", x, [](Vec v) { return GeluTanh::apply(v); });
  print_function("arithmetic", x, [](Vec v) { return max(v / (v * v + broadcast(3)), v - broadcast(7)); });
  print_function("sums of lanes", x, [](Vec v) { return broadcast(fold_add(v) + fold_max(v)); });
}

void print_layouts() {
  const std::vector<float> x = numbers.reals(4 * kLanes, 3e4f);
  Vec v[4];
  for (int i = 0; i < 4; ++i) v[i] = load(x.data() + i * kLanes);
  transpose_quarters(v);
  checks::print_bits("transpose_quarters", v, sizeof(v));
  const Quad q{1, 2, 3, 4};
  const Vec joined = concatenate(q, q + q, q * q, q - q);
  checks::print_bits("concatenate", &joined, sizeof(joined));
}

// What is rounded to bfloat16: numbers, ties, infinity and NaN.
void print_rounding() {
  std::vector<float> x = numbers.many<float>(4096, [] {
    const uint32_t tie = numbers.next() % 2, bits = tie ? numbers.next() << 16 | 0x8000 : numbers.next();
    float number;
    std::memcpy(&number, &bits, sizeof(number));
    return number;
  });
  std::vector<BFloat16> rounded(x.size());
  for (size_t i = 0; i < x.size(); i += kLanes) store(rounded.data() + i, load(x.data() + i));
  checks::print_bits("rounded to bfloat16", rounded);
  for (size_t i = 0; i < x.size(); i += kLanes) store(x.data() + i, load(rounded.data() + i));
  checks::print_bits("widened from bfloat16", x);
}

void print_transforms() {
  std::vector<float> x = numbers.reals(256 + 128 + 64, 2.0f);
  hadamard::transform(x.data(), x.size());
  checks::print_bits("hadamard", x);
  hadamard::invert(x.data(), x.size());
  checks::print_bits("hadamard, inverted", x);
}

}  // namespace

int main() {
  for (int i = 0; i < 20; ++i) {
    check_weights_with_sign(), check_codes(), check_codes_of_4_bits(), check_rows_of_16_bits(), check_sums();
  }
  numbers = {};  // the checks take as many as a level's vectors have lanes
  print_functions(), print_layouts(), print_rounding(), print_transforms();
}
