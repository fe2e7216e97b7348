// Lossless coding of bfloat16 weights in about 11.2 bits a number. A number's sign and the seven bits of its mantissa
// are stored as they are. Few exponents are frequent: each panel has a table of its seven most frequent ones, and three
// bits of a number are an index into it, or mark the number as listed. Exponents of listed numbers follow each other in
// a list, a byte each: of normally distributed weights, one in 35 to 47. Memory is read in 0.7 of the time, and numbers
// are expanded meanwhile.
//
// Layout of a weight: its panels, each a header with the table, and its numbers in units of 512: eight lines of signs
// and mantissas, three of codes. Then the position in the list of each unit's part, and the list.

#pragma once

#include <immintrin.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <numeric>
#include <optional>
#include <vector>

#include "base/bfloat16.h"
#include "base/huge_pages.h"
#include "base/prefetch.h"
#include "base/tensor.h"
#include "base/thread_pool.h"
#include "base/vec.h"
#include "coded/coding.h"

namespace twostep::exponents {


constexpr int64_t kQuarters = 4, kUnit = kQuarters * Expanded::kNumbers;  // numbers of a unit
constexpr int64_t kCodesAt = 8, kUnitBytes = 11 * kLineBytes;             // the line in which codes begin
constexpr int64_t kMaxListedShare = 4;  // at most one listed in so many numbers: else little is saved

constexpr int64_t kTableSize = 8;
constexpr uint8_t kIsListed = 128;  // marks a listed exponent; so all from it on, of numbers from 2, are listed

struct alignas(kLineBytes) Header {
  uint8_t table[kTableSize];
  uint32_t listed;         // number of listed ones before this panel
  uint32_t panels, units;  // panels of the weight, units of each panel
  uint64_t bytes;          // size of the weight
};

// A coded weight's panels.
class Panels {
 public:
  Panels(const uint8_t* packed, int64_t panels, int64_t units)
      : packed_(packed), panel_bytes_(sizeof(Header) + units * kUnitBytes), units_(units),
        starts_(reinterpret_cast<const uint32_t*>(packed + panels * panel_bytes_)),
        list_(packed + list_at(panels, units)) {}

  static int64_t list_at(int64_t panels, int64_t units) {
    const int64_t starts = round_up(panels * units * sizeof(uint32_t), kLineBytes);
    return panels * (sizeof(Header) + units * kUnitBytes) + starts;
  }

  const Header& header_of(int64_t panel) const {
    return *reinterpret_cast<const Header*>(packed_ + panel * panel_bytes_);
  }
  const uint8_t* unit_of(int64_t panel, int64_t unit) const {
    return packed_ + panel * panel_bytes_ + sizeof(Header) + unit * kUnitBytes;
  }
  const uint8_t* listed_of(int64_t panel, int64_t unit) const {
    return list_ + (unit == 0 ? header_of(panel).listed : starts_[panel * units_ + unit]);
  }

 private:
  const uint8_t* packed_;
  int64_t panel_bytes_, units_;
  const uint32_t* starts_;
  const uint8_t* list_;
};

// Expands a panel's numbers, in order, from a unit on.
class Expander {
 public:
  Expander(const Panels& panels, int64_t panel, int64_t unit)
      : unit_(panels.unit_of(panel, unit)), listed_(panels.listed_of(panel, unit)) {
    const auto* table = reinterpret_cast<const __m128i*>(panels.header_of(panel).table);
    table_ = _mm512_broadcastq_epi64(_mm_load_si128(table));
  }

  // Expands the next quarter, the `number`-th of its unit; prefetches later ones if kPrefetches.
  template <bool kPrefetches>
  TWOSTEP_INLINE Expanded expand(int number) {
    Expanded quarter;
    expand_half<kPrefetches>(2 * number, quarter.vectors);
    expand_half<kPrefetches>(2 * number + 1, quarter.vectors + 2);
    if (number + 1 == kQuarters) {
      __builtin_prefetch(listed_ + 2 * kLineBytes);
      unit_ += kUnitBytes;
    }
    return quarter;
  }

 private:
  template <bool kPrefetches>
  TWOSTEP_INLINE __m512i load(int line) const {
    if constexpr (kPrefetches) prefetch_ahead<3072, 6144>(unit_ + line * kLineBytes);
    return _mm512_load_si512(unit_ + line * kLineBytes);
  }

  // A line of codes holds two of three bits in each byte, and two bits of a third.
  template <bool kPrefetches>
  TWOSTEP_INLINE __m512i codes(int number) const {
    switch (number) {
      case 0: return load<kPrefetches>(kCodesAt);
      case 1: return _mm512_srli_epi16(load<false>(kCodesAt), 3);
      case 2: return joined<4>(_mm512_srli_epi16(load<false>(kCodesAt), 6));
      case 3: return load<kPrefetches>(kCodesAt + 1);
      case 4: return _mm512_srli_epi16(load<false>(kCodesAt + 1), 3);
      case 5: return joined<5>(_mm512_srli_epi16(load<false>(kCodesAt + 1), 6));
      case 6: return load<kPrefetches>(kCodesAt + 2);
      default: return _mm512_srli_epi16(load<false>(kCodesAt + 2), 3);
    }
  }

  template <int kShift>
  TWOSTEP_INLINE __m512i joined(__m512i low) const {
    const __m512i third = _mm512_set1_epi8(4), high = _mm512_srli_epi16(load<false>(kCodesAt + 2), kShift);
    return _mm512_ternarylogic_epi64(low, high, third, 0xd8);  // third ? high : low
  }

  // Interleaves exponents with signs and mantissas to words; unpacking changes their order.
  template <bool kPrefetches>
  TWOSTEP_INLINE void expand_half(int number, __m512i* lines) {
    const __m512i rest = load<kPrefetches>(number);
    __m512i exponents = _mm512_permutexvar_epi8(codes<kPrefetches>(number), table_);
    const __mmask64 is_listed = _mm512_movepi8_mask(exponents);
    exponents = _mm512_mask_expand_epi8(exponents, is_listed, _mm512_loadu_si512(listed_));
    listed_ += __builtin_popcountll(is_listed);
    lines[0] = turned(_mm512_unpacklo_epi8(rest, exponents));
    lines[1] = turned(_mm512_unpackhi_epi8(rest, exponents));
  }

  // Moves the sign to the front.
  TWOSTEP_INLINE static __m512i turned(__m512i words) { return _mm512_shrdi_epi16(words, words, 1); }

  __m512i table_;
  const uint8_t *unit_, *listed_;
};

inline uint8_t exponent_of(uint16_t number) { return number >> 7; }

// Codes a panel, by the frequencies of its exponents.
class PanelCoder {
 public:
  explicit PanelCoder(const Frequencies& frequencies)
      : num_listed_(std::accumulate(frequencies.begin(), frequencies.end(), int64_t{0})) {
    const auto exponents = most_frequent(frequencies, kIsListed);
    std::copy_n(exponents.begin(), kListed, table_.begin());
    table_[kListed] = kIsListed;
    codes_.fill(kListed);
    for (uint8_t code = 0; code < kListed; ++code) {
      codes_[table_[code]] = code;
      num_listed_ -= frequencies[table_[code]];
    }
  }

  int64_t num_listed() const { return num_listed_; }

  // Codes a panel, whose header has all but the table; it and the list's part must be zeros otherwise.
  void write(const std::vector<BFloat16>& numbers, uint8_t* to, uint32_t* starts, uint8_t* list) const {
    auto& header = *reinterpret_cast<Header*>(to);
    std::copy(table_.begin(), table_.end(), header.table);
    uint32_t listed = header.listed;
    to += sizeof(Header);
    for (int64_t i = 0; i < header.units * kUnit; ++i) {
      const int64_t place = i % kUnit;
      uint8_t* unit = to + i / kUnit * kUnitBytes;
      if (place == 0) starts[i / kUnit] = listed;
      const uint16_t number = numbers[i / kUnit * kUnit + number_at(place)].bits;
      const uint8_t exponent = exponent_of(number), code = codes_[exponent];
      unit[place] = (number & 127) << 1 | number >> 15;
      put_code(unit + kCodesAt * kLineBytes + place % kLineBytes, place / kLineBytes, code);
      if (code == kListed) list[listed++] = exponent;
    }
  }

 private:
  static constexpr uint8_t kListed = kTableSize - 1;  // the code of listed numbers

  // Returns which number of a unit is expanded from a byte of its lines: numbers of two lines alternate by eights.
  static constexpr int64_t number_at(int64_t byte) {
    return byte / 64 * 64 + byte % 16 / 8 * 32 + byte % 64 / 16 * 8 + byte % 8;
  }

  static void put_code(uint8_t* codes, int64_t line, uint8_t code) {
    const int64_t part = line % 3, of = line / 3 * kLineBytes;
    codes[of] |= code << 3 * part;
    if (part == 2) codes[2 * kLineBytes] |= code >> 2 << (6 + line / 3);
  }

  std::array<uint8_t, kTableSize> table_;
  std::array<uint8_t, 256> codes_;
  int64_t num_listed_;
};

// Whether `packed` was made by `pack` of a weight with these numbers of panels, and of units in each.
inline bool is_coded(const Tensor& packed, int64_t panels, int64_t units) {
  if (packed.dim() != 1 || !packed.is_contiguous() || packed.numel() < Panels::list_at(panels, units)) return false;
  const auto* start = packed.const_data_ptr<uint8_t>();
  const auto* header = reinterpret_cast<const Header*>(start);
  return reinterpret_cast<uintptr_t>(start) % kLineBytes == 0 && header->panels == panels && header->units == units &&
         header->bytes == uint64_t(packed.numel());
}

// Codes a weight [N, K] as bytes; returns nothing where too many numbers would be listed. The arguments are the columns
// and the units of a panel; for_each_panel(use) calls use(panel, numbers) for each panel.
template <class ForEachPanel>
std::optional<Tensor> pack(const Tensor& weight, int64_t columns, int64_t units, const ForEachPanel& for_each_panel) {
  const int64_t panels = divide_up(weight.size(0), columns), size = units * kUnit;
  const auto coders = coders_of<PanelCoder>(weight, columns, size, exponent_of);
  int64_t listed = 0;
  for (const auto& coder : coders) listed += coder->num_listed();
  if (listed > std::min<int64_t>(panels * size / kMaxListedShare, UINT32_MAX)) return {};
  const int64_t panel_bytes = sizeof(Header) + units * kUnitBytes, list_at = Panels::list_at(panels, units);
  const int64_t bytes = round_up(list_at + listed, kLineBytes) + kLineBytes;  // the list is read by lines
  Tensor packed = zeros_in_huge_pages({bytes}, kByte);
  uint8_t* target = packed.mutable_data_ptr<uint8_t>();
  listed = 0;
  for (int64_t panel = 0; panel < panels; ++panel) {
    *reinterpret_cast<Header*>(target + panel * panel_bytes) = {
        {}, uint32_t(listed), uint32_t(panels), uint32_t(units), uint64_t(bytes)};
    listed += coders[panel]->num_listed();
  }
  auto* starts = reinterpret_cast<uint32_t*>(target + panels * panel_bytes);
  for_each_panel([&](int64_t panel, const std::vector<BFloat16>& numbers) {
    uint8_t* to = target + panel * panel_bytes;
    coders[panel]->write(numbers, to, starts + panel * units, target + list_at);
  });
  return packed;
}

}  // namespace twostep::exponents
