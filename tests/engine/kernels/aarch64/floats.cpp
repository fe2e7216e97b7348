// Linear layers and attention of float32 and bfloat16, norms and rotations, by their bits.

#include "without_torch.h"

#include "attention/threads.h"
#include "attention/vector.h"
#include "checks.h"
#include "layers/fused.cpp"
#include "linear/vector.h"

namespace {

using namespace twostep;

checks::Numbers numbers;

template <class Element>
constexpr const char* kName = std::is_same_v<Element, float> ? "float32" : "bfloat16";

template <class Element>
void print(const char* what, const std::vector<Element>& results) {
  std::printf("%s, ", kName<Element>);
  checks::print_bits(what, results);
}

// As linear/panels_vector.h lays weights out; beyond their columns are zeros.
template <class Format, class Element>
std::vector<Element> packed(const std::vector<Element>& weight, int64_t n, int64_t k) {
  using vector::kStep;
  constexpr int64_t kPanel = Format::kPanel;
  const int64_t steps = divide_up(k, kStep), pack = Format::kPack;
  std::vector<Element> panels(divide_up(n, kPanel) * steps * kStep * kPanel, Element(0));
  for (int64_t column = 0; column < n; ++column)
    for (int64_t i = 0; i < k; ++i) {
      const int64_t line = column / kPanel * (steps * kStep / pack) + i / pack;
      panels[(line * kPanel + column % kPanel) * pack + i % pack] = weight[column * k + i];
    }
  return panels;
}

template <class Format>
void multiply(int64_t n) {
  using Element = typename Format::Element;
  constexpr int64_t k = 333;
  const auto weight = packed<Format>(numbers.reals<Element>(n * k), n, k);
  const auto bias = numbers.reals<Element>(n), x = numbers.reals<Element>(21 * k);
  for (int64_t rows : {1, 2, 7, 21}) {
    std::vector<Element> out(rows * n);
    const Problem<Element> p{x.data(), bias.data(), out.data(), rows, k, n, Activation::kNone, weight.data()};
    vector::multiply_format<Format>(p);
    print("linear", out);
  }
}

// Two sequences, of 3 tokens of 700 and one of 65, in blocks of 16 that lie in reverse.
template <class Element, class Words>
void attend(float softcap, int64_t window) {
  constexpr int64_t heads = 4, kv_heads = 2, block = 16, size = 40, value_size = 24, tokens = 4, blocks = 49;
  const auto query = numbers.reals<Element>(tokens * heads * size, 2.0f);
  const auto keys = numbers.reals<Element>(blocks * kv_heads * block * size, 2.0f);
  const auto values = numbers.reals<Element>(blocks * kv_heads * block * value_size);
  const auto sinks = numbers.reals(heads);
  std::vector<int32_t> tables(2 * 44);
  for (int32_t i = 0; i < 44; ++i) tables[i] = 48 - i, tables[44 + i] = i < 5 ? 4 - i : 0;
  const std::vector<int32_t> starts{0, 3, 4}, lens{700, 65};
  std::vector<Element> out(tokens * heads * value_size);
  attention::Problem<Element, attention::Plain<Element>> p{};
  p.query = query.data(), p.query_token_stride = heads * size, p.query_head_stride = size;
  p.key_cache = keys.data(), p.value_cache = values.data(), p.output = out.data();
  p.key_row = size, p.value_row = p.value_row_numbers = value_size;
  p.block_tables = tables.data(), p.cu_seqlens_q = starts.data(), p.context_lens = lens.data();
  p.num_seqs = 2, p.max_blocks = 44, p.sinks = sinks.data();
  p.num_heads = heads, p.num_kv_heads = kv_heads, p.group = heads / kv_heads, p.block_size = block;
  p.head_size = size, p.value_size = value_size;
  p.scaling = 0.15f, p.softcap = softcap, p.exponent = 1.44269504f * (softcap > 0 ? 1.0f : p.scaling);
  p.window = window;
  attention::run_all<attention::VectorTiles<Element, Words>>(p);
  print("attention", out);
}

template <class Element>
void normalize_and_rotate() {
  constexpr int64_t size = 200;
  const auto x = numbers.reals<Element>(size, 5.0f), weight = numbers.reals<Element>(size);
  const auto cos = numbers.reals<Element>(size), sin = numbers.reals<Element>(size);
  std::vector<Element> normed(size), added(size), gated(size / 2);
  normalize(x.data(), weight.data(), size, 1e-6f, normed.data());
  print("norm", normed);
  add(x.data(), normed.data(), size, added.data());
  rotate(added.data(), cos.data(), sin.data(), size / 2);
  print("rotation", added);
  gate_row<Silu>(x.data(), size / 2 / kLanes * kLanes, gated.data());
  print("gate", gated);
}

}  // namespace

int main() {
  multiply<vector::Float32>(50), multiply<vector::BFloat16>(50);
  multiply<vector::NarrowFloat32>(4), multiply<vector::NarrowBFloat16>(4);
  constexpr int64_t kAll = int64_t{1} << 40;
  attend<float, attention::FloatWords>(0, kAll), attend<float, attention::FloatWords>(20, 100);
  attend<BFloat16, attention::WidenedWords>(0, kAll);
  attend<BFloat16, attention::WidenedWords>(20, 100);
  normalize_and_rotate<float>(), normalize_and_rotate<BFloat16>();
}
