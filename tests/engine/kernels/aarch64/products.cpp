// Linear layers of integers, from rows of float32 to rounded outputs, by their bits: panels of any bytes, with scales
// that keep results finite. dots.cpp compares their dot products with plain loops.

#include "without_torch.h"

#include "checks.h"
#include "quantized/int4.h"
#include "quantized/int8.h"

namespace {

using namespace twostep;
using namespace twostep::integers;

constexpr int64_t kRows = 9, kColumns = kPanel, kLength = 600;  // K: two whole groups of 256, a step and a part of one

checks::Numbers numbers;

uint32_t bfloat16_of(float magnitude) { return BFloat16(numbers.real(magnitude)).bits; }

void set_word(uint8_t* header, int64_t lane, uint32_t word) {
  std::memcpy(header + lane * sizeof(word), &word, sizeof(word));
}

template <class Weight>
std::vector<uint8_t> any_panel() {
  return numbers.many<uint8_t>(panel_bytes<Weight>(kLength), [] { return numbers.next(); });
}

template <class Weight>
std::vector<uint8_t> panel_of_8_bits() {
  std::vector<uint8_t> panel = any_panel<Weight>();
  for (int64_t group = 0; group < divide_up(kLength, kGroup); ++group)
    for (int64_t column = 0; column < kPanel; ++column)
      set_word(panel.data() + group * kGroupBytes<Weight>, column, bfloat16_of(0.01f) << 16 | bfloat16_of(1.0f));
  return panel;
}

// Multipliers of 8 or less: their products with codes have 8 bits.
std::vector<uint8_t> panel_of_4_bits() {
  std::vector<uint8_t> panel = any_panel<int4::Weight>();
  for (int64_t tile = 0; tile < 2 * divide_up(kLength, kStep); ++tile)
    for (int64_t lane = 0; lane < kLanes; ++lane) {
      const auto level = [] { return uint32_t(numbers.between(0, 15) << 4 | numbers.between(1, 8)); };
      set_word(panel.data() + tile * int4::kTileBytes, lane, bfloat16_of(0.01f) << 16 | level() << 8 | level());
    }
  return panel;
}

template <class Weight, int kRowsAtOnce>
void multiply(const char* what, const uint8_t* panel, Activation activation = Activation::kNone) {
  numbers = {};
  const std::vector<float> x = numbers.reals(kRows * kLength, 3.0f), bias = numbers.reals(kColumns);
  std::vector<float> out(kRows * kColumns);
  const Problem<float> problem{x.data(), bias.data(), out.data(), kRows, kLength, kColumns, activation};
  const RowsOf<Weight> rows = round_rows<typename Weight::Precision, float>(problem).front();
  const PanelWriter<float> writer(problem, 0);
  for (int64_t row = 0; row + kRowsAtOnce <= kRows; row += kRowsAtOnce)
    multiply_panel<Weight, kRowsAtOnce, false>(rows, 0, row, panel, writer, Prefetcher());
  checks::print_bits(what, out);
}

}  // namespace

int main() {
  const std::vector<uint8_t> bytes = panel_of_8_bits<int8::Weight>();
  multiply<int8::Weight, 1>("8 bits, row by row", bytes.data());
  multiply<int8::Weight, 8>("8 bits, 8 rows", bytes.data());
  multiply<int8::Weight, 3>("8 bits, gated", bytes.data(), Activation::kSilu);
  multiply<int8::WeightForWideRows, 1>("8 bits, a row of 16 bits", bytes.data());
  multiply<int8::WeightForWideRows, 6>("8 bits, rows of 16 bits", bytes.data());
  const std::vector<uint8_t> codes = panel_of_4_bits();
  multiply<int4::Weight, 1>("4 bits, row by row", codes.data());
  multiply<int4::Weight, 3>("4 bits, 3 rows", codes.data());
  multiply<int4::Weight, 4>("4 bits, 4 rows", codes.data());
  multiply<int4::ExpandedWeight, 4>("4 bits, expanded", int4::Weight::expand(codes.data(), divide_up(kLength, kStep)));
}
