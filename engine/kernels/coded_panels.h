// Weights of bfloat16 in 12 bits a number, exactly. A number's low byte stays as it is. Its high byte, the sign and
// seven bits of the exponent, has few values that matter: each panel has a table of its 16 most frequent ones, and four
// bits of a number say which. Where it has another one, that is listed: of weights that are normally distributed, one
// in 6,000 to 16,000. Memory is read in three quarters of the time, and numbers are expanded while it is.
//
// A panel: its header, with the table and the list, and its steps, in units of 128 numbers: 64 bytes of codes, then 128
// low bytes.

#pragma once

#include <immintrin.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <numeric>
#include <optional>
#include <vector>

#include "linear.h"
#include "panels_amx.h"

namespace twostep::amx {

constexpr int64_t kUnit = 128, kUnitBytes = kUnit * 3 / 2;  // numbers, and what they take
constexpr int64_t kStepUnits = kStepElements / kUnit;

// A number's index in its panel << 8 | its high byte, in ascending order, kNoException after the last one.
using Exception = uint32_t;
constexpr Exception kNoException = ~Exception{0};
constexpr int64_t kMaxCodedSteps = (kNoException >> 8) / kStepElements;
constexpr int64_t kMaxExceptionShare = 256;  // one of so many numbers: else expanding takes longer than reading

constexpr int64_t kTableSize = 16;
struct Header {
  uint8_t table[kTableSize];
  uint32_t steps;  // of the panel, to refuse rows of another length
  Exception exceptions[];
};

struct CodedPanels {
  static constexpr int64_t kStepBytes = kStepUnits * kUnitBytes, kStepsAhead = 4;  // one is expanded already
  // A piece is expanded in the first pass over it, for all others: panel by panel it stays in the L1 cache.
  static constexpr bool kIsPanelByPanel = true;
  // Of one row tile: every vector asks for those to come, which is faster than a share after each product.
  static constexpr bool kAsksForItself = true;

  class Steps;

  const uint8_t* packed;
  int64_t panel_bytes, header_bytes;
  uint8_t* expanded;  // of a piece

  const Header& header_of(int64_t panel) const {
    return *reinterpret_cast<const Header*>(packed + panel * panel_bytes);
  }
  const uint8_t* start_of(const Piece& piece) const {
    return packed + piece.panel * panel_bytes + header_bytes + piece.step * kStepBytes;
  }
  Steps first_pass(const Piece& piece, bool is_only_pass) const;
  PlainPanels::Steps later_pass(const Piece&) const { return {reinterpret_cast<const BFloat16*>(expanded)}; }
};

// The steps of a piece, each of which is expanded while the one before is multiplied. Where one pass is all, two places
// in turn are enough for them.
class CodedPanels::Steps {
 public:
  Steps(const CodedPanels& panels, const Piece& piece, bool is_only_pass)
      : units_(panels.start_of(piece)), expanded_(panels.expanded), mask_(is_only_pass ? 1 : -1), left_(piece.steps),
        index_(piece.step * kStepElements) {
    const Header& header = panels.header_of(piece.panel);
    table_ = _mm512_broadcast_i32x4(_mm_load_si128(reinterpret_cast<const __m128i*>(header.table)));
    const auto* end = reinterpret_cast<const Exception*>(panels.start_of({piece.panel}));
    exception_ = std::lower_bound(header.exceptions, end, index_ << 8);
  }

  const BFloat16* operator[](int64_t step) const { return reinterpret_cast<const BFloat16*>(place_of(step)); }

  template <int kRowTiles>
  void prepare_first() {
    prepare<kRowTiles, 1>(0);
  }

  // A share of the next step, as large as that of every other product.
  template <int kRowTiles>
  TWOSTEP_INLINE void prepare_next(int product) {
    prepare<kRowTiles, 2 * kRowTiles>(product);
  }

 private:
  template <int kRowTiles, int kShares>
  TWOSTEP_INLINE void prepare(int share) {
    constexpr int64_t kUnits = kStepUnits / kShares;
    constexpr bool kAsks = kAsksForItself && kRowTiles == 1;
    if (left_ == 0) return;
    uint8_t* to = place_of(next_);
    for (int64_t i = 0; i < kUnits; ++i) expand_unit<kAsks>(to + (share * kUnits + i) * 2 * kUnit);
    if (share == kShares - 1) finish_step(to);
  }

  uint8_t* place_of(int64_t step) const { return expanded_ + (step & mask_) * PlainPanels::kStepBytes; }

  template <bool kAsks>
  TWOSTEP_INLINE void expand_unit(uint8_t* to) {
    const __m512i nibbles = _mm512_set1_epi8(15), codes = load<kAsks>(0);
    write_half(load<kAsks>(1), _mm512_and_si512(codes, nibbles), to);
    write_half(load<kAsks>(2), _mm512_and_si512(_mm512_srli_epi16(codes, 4), nibbles), to + kUnit);
    units_ += kUnitBytes;
  }

  template <bool kAsks>
  TWOSTEP_INLINE __m512i load(int64_t line) const {
    if constexpr (kAsks) ask_ahead(units_ + line * kLineBytes);
    return _mm512_load_si512(units_ + line * kLineBytes);
  }

  // Words of a low and a high byte, which unpacking leaves in another order than it found them: see PanelCoder.
  TWOSTEP_INLINE void write_half(__m512i low, __m512i codes, uint8_t* to) const {
    const __m512i high = _mm512_shuffle_epi8(table_, codes);
    _mm512_store_si512(to, _mm512_unpacklo_epi8(low, high));
    _mm512_store_si512(to + kLineBytes, _mm512_unpackhi_epi8(low, high));
  }

  TWOSTEP_INLINE void finish_step(uint8_t* to) {
    for (; *exception_ >> 8 < index_ + kStepElements; ++exception_) {
      to[((*exception_ >> 8) - index_) * sizeof(BFloat16) + 1] = static_cast<uint8_t>(*exception_);
    }
    index_ += kStepElements, ++next_, --left_;
  }

  __m512i table_;
  const uint8_t* units_;
  uint8_t* expanded_;
  int64_t mask_, next_ = 0, left_;
  const Exception* exception_;
  Exception index_;  // of the next step's first number
};

inline CodedPanels::Steps CodedPanels::first_pass(const Piece& piece, bool is_only_pass) const {
  return {*this, piece, is_only_pass};
}

// The codes of a panel, by how many of its numbers have each high byte.
class PanelCoder {
 public:
  using Counts = std::array<int64_t, 256>;

  explicit PanelCoder(const Counts& counts) {
    std::array<uint8_t, 256> bytes;
    std::iota(bytes.begin(), bytes.end(), 0);
    std::stable_sort(bytes.begin(), bytes.end(), [&](uint8_t a, uint8_t b) { return counts[a] > counts[b]; });
    std::copy_n(bytes.begin(), kTableSize, table_.begin());
    codes_.fill(kNoCode);
    for (int64_t code = 0; code < kTableSize; ++code) codes_[table_[code]] = code;
    for (int64_t i = kTableSize; i < 256; ++i) num_exceptions_ += counts[bytes[i]];
  }

  int64_t num_exceptions() const { return num_exceptions_; }

  // `to` holds zeros.
  void write(const std::vector<BFloat16>& numbers, uint8_t* to, int64_t header_bytes) const {
    auto& header = *reinterpret_cast<Header*>(to);
    std::copy(table_.begin(), table_.end(), header.table);
    header.steps = numbers.size() / kStepElements;
    uint8_t* units = to + header_bytes;
    Exception* exception = header.exceptions;
    for (size_t unit = 0; unit < numbers.size(); unit += kUnit, units += kUnitBytes) {
      for (int64_t i = 0; i < kUnit; ++i) {
        const uint16_t number = numbers[unit + i].x;
        const uint8_t code = codes_[number >> 8];
        if (code == kNoCode) *exception++ = Exception(unit + i) << 8 | number >> 8;
        const auto [low_at, code_at, shift] = place_of(i);
        units[low_at] = number & 255;
        units[code_at] |= (code == kNoCode ? 0 : code) << shift;
      }
    }
    std::fill(exception, reinterpret_cast<Exception*>(to + header_bytes), kNoException);
  }

 private:
  static constexpr uint8_t kNoCode = 255;

  struct Place {
    int64_t low_byte, code, shift;
  };

  // A unit is two halves of two lines of words. A half has its low bytes in a vector of its own, and its codes in one
  // half of each byte of the vector of codes: in groups of 16, eight of the first line, then eight of the second.
  static constexpr Place place_of(int64_t number) {
    const int64_t half = number / 64, line = number % 64 / 32, word = number % 32;
    const int64_t byte = word / 8 * 16 + line * 8 + word % 8;
    return {(half + 1) * kLineBytes + byte, byte, half * 4};
  }

  std::array<uint8_t, kTableSize> table_;
  std::array<uint8_t, 256> codes_;
  int64_t num_exceptions_ = 0;
};

// Of the numbers of one panel of a weight [N, K], zeros that fill it up included.
inline PanelCoder::Counts counts_of(const at::Tensor& weight, int64_t panel) {
  const int64_t k = weight.size(1), first = panel * kPanel, columns = std::min(kPanel, weight.size(0) - first);
  const BFloat16* numbers = weight.const_data_ptr<BFloat16>() + first * k;
  PanelCoder::Counts counts{};
  for (int64_t i = 0; i < columns * k; ++i) ++counts[numbers[i].x >> 8];
  counts[0] += divide_up(k, kStep) * kStepElements - columns * k;
  return counts;
}

// Whether pack_coded made it of a weight [n, k].
inline bool is_coded(const at::Tensor& packed, int64_t n, int64_t k) {
  const int64_t steps = divide_up(k, kStep), header_bytes = packed.size(1) - steps * CodedPanels::kStepBytes;
  if (packed.numel() == 0 || !packed.is_contiguous() || packed.size(0) != divide_up(n, kPanel)) return false;
  const auto* header = packed.const_data_ptr<uint8_t>();
  return header_bytes > 0 && header_bytes % kLineBytes == 0 && reinterpret_cast<uintptr_t>(header) % kLineBytes == 0 &&
         reinterpret_cast<const Header*>(header)->steps == steps;
}

// weight [N, K] -> [panel, bytes of one]; none where a panel has too many exceptions or steps.
inline std::optional<at::Tensor> pack_coded(const at::Tensor& weight) {
  const int64_t panels = divide_up(weight.size(0), kPanel), steps = divide_up(weight.size(1), kStep);
  if (steps > kMaxCodedSteps) return {};
  std::vector<std::optional<PanelCoder>> coders(panels);
  run_tasks(panels, false, [&](int64_t panel) { coders[panel].emplace(counts_of(weight, panel)); });
  int64_t most = 0;
  for (const auto& coder : coders) most = std::max(most, coder->num_exceptions());
  if (most * kMaxExceptionShare > steps * kStepElements) return {};
  const int64_t header_bytes = divide_up(sizeof(Header) + (most + 1) * sizeof(Exception), kLineBytes) * kLineBytes;
  const int64_t panel_bytes = header_bytes + steps * CodedPanels::kStepBytes;
  at::Tensor packed = zeros_in_huge_pages({panels, panel_bytes}, weight.options().dtype(at::kByte));
  uint8_t* target = packed.mutable_data_ptr<uint8_t>();
  for_each_panel(weight, [&](int64_t panel, const std::vector<BFloat16>& numbers) {
    coders[panel]->write(numbers, target + panel * panel_bytes, header_bytes);
  });
  return packed;
}

}  // namespace twostep::amx
