// Lossless coding of bfloat16 weights in 12 bits a number. A number's low byte is stored as it is. Few high bytes, the
// sign and seven bits of the exponent, are frequent: each panel has a table of its 16 most frequent ones, and four bits
// of a number are an index into it. Numbers with another high byte are exceptions, which are listed: of normally
// distributed weights, one in 6,000 to 16,000. Memory is read in three quarters of the time, and numbers are expanded
// meanwhile.
//
// Layout of a panel: its header, with the table and the list, and its numbers in units. A unit has 128 numbers: 64
// bytes of codes, then 128 low bytes. Where vectors have 32 bytes, it has 32: 16 bytes of codes, then 32 low bytes.

#pragma once

#include <immintrin.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <optional>
#include <vector>

#include "base/bfloat16.h"
#include "base/huge_pages.h"
#include "base/prefetch.h"
#include "base/tensor.h"
#include "base/thread_pool.h"
#include "base/vec.h"
#include "coded/coding.h"

namespace twostep::high_bytes {


constexpr int64_t kUnit = Expanded::kNumbers, kCodeBytes = kUnit / 2;  // numbers of a unit, bytes of its codes
constexpr int64_t kUnitBytes = kCodeBytes + kUnit;
#if defined(__AVX512BW__)
constexpr int64_t kAlignment = kLineBytes;  // of a weight, for aligned loads of vectors
#else
constexpr int64_t kAlignment = 16;  // of a weight, for aligned loads of tables
#endif

// A number's index in its panel << 8 | its high byte, in ascending order, kNoException after the last one.
using Exception = uint32_t;
constexpr Exception kNoException = ~Exception{0};
constexpr int64_t kMaxUnits = (kNoException >> 8) / kUnit;
constexpr int64_t kMaxExceptionShare = 256;  // at most one in so many numbers: else expanding takes longer than reading

constexpr int64_t kTableSize = 16;
struct Header {
  uint8_t table[kTableSize];
  uint32_t units;  // of the panel, to reject rows of another length
  Exception exceptions[];
};

// A coded weight's panels.
struct Panels {
  const uint8_t* packed;
  int64_t panel_bytes, header_bytes;

  Panels(const uint8_t* packed, int64_t panel_bytes, int64_t units)
      : packed(packed), panel_bytes(panel_bytes), header_bytes(panel_bytes - units * kUnitBytes) {}

  const Header& header_of(int64_t panel) const {
    return *reinterpret_cast<const Header*>(packed + panel * panel_bytes);
  }
  const uint8_t* unit_of(int64_t panel, int64_t unit) const {
    return packed + panel * panel_bytes + header_bytes + unit * kUnitBytes;
  }
};

// Expands a panel's numbers, in order, from a unit on.
class Expander {
 public:
  Expander(const Panels& panels, int64_t panel, int64_t unit)
      : from_(panels.unit_of(panel, unit)), index_(unit * kUnit) {
    const Header& header = panels.header_of(panel);
    const __m128i table = _mm_load_si128(reinterpret_cast<const __m128i*>(header.table));
#if defined(__AVX512BW__)
    table_ = _mm512_broadcast_i32x4(table);
#else
    table_ = _mm256_broadcastsi128_si256(table);
#endif
    const auto* end = reinterpret_cast<const Exception*>(panels.unit_of(panel, 0));
    exception_ = std::lower_bound(header.exceptions, end, index_ << 8);
  }

  // Expands the next unit; prefetches later ones if kPrefetches. Its vectors pass through memory, for which a core
  // would wait, only where there are exceptions: so all of this is inlined.
  template <bool kPrefetches>
  TWOSTEP_INLINE Expanded expand() {
    Expanded unit = expand_codes<kPrefetches>();
    if (has_exception()) [[unlikely]] {
      alignas(kLineBytes) uint8_t numbers[Expanded::kBytes];
      unit.store(numbers);
      for (; has_exception(); ++exception_) {
        numbers[((*exception_ >> 8) - index_) * sizeof(BFloat16) + 1] = static_cast<uint8_t>(*exception_);
      }
      unit = Expanded::load(numbers);
    }
    index_ += kUnit;
    return unit;
  }

 private:
  TWOSTEP_INLINE bool has_exception() const { return *exception_ >> 8 < index_ + kUnit; }

#if defined(__AVX512BW__)
  template <bool kPrefetches>
  TWOSTEP_INLINE Expanded expand_codes() {
    const __m512i nibbles = _mm512_set1_epi8(15), codes = load<kPrefetches>(0);
    Expanded unit;
    expand_half(load<kPrefetches>(1), _mm512_and_si512(codes, nibbles), unit.vectors);
    expand_half(load<kPrefetches>(2), _mm512_and_si512(_mm512_srli_epi16(codes, 4), nibbles), unit.vectors + 2);
    from_ += kUnitBytes;
    return unit;
  }

  template <bool kPrefetches>
  TWOSTEP_INLINE __m512i load(int64_t line) const {
    if constexpr (kPrefetches) prefetch_ahead(from_ + line * kLineBytes);
    return _mm512_load_si512(from_ + line * kLineBytes);
  }

  // Interleaves low and high bytes to words; unpacking changes their order: see PanelCoder.
  TWOSTEP_INLINE void expand_half(__m512i low, __m512i codes, __m512i* words) const {
    const __m512i high = _mm512_shuffle_epi8(table_, codes);
    words[0] = _mm512_unpacklo_epi8(low, high);
    words[1] = _mm512_unpackhi_epi8(low, high);
  }
#else
  template <bool kPrefetches>
  TWOSTEP_INLINE Expanded expand_codes() {
    if constexpr (kPrefetches) prefetch_ahead(from_);
    const __m256i both = _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from_)));
    const __m256i codes = _mm256_srlv_epi32(both, _mm256_setr_epi32(0, 0, 0, 0, 4, 4, 4, 4));  // each lane's nibble
    const __m256i high = _mm256_shuffle_epi8(table_, _mm256_and_si256(codes, _mm256_set1_epi8(15)));
    const __m256i low = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from_ + kCodeBytes));
    from_ += kUnitBytes;
    return {{_mm256_unpacklo_epi8(low, high), _mm256_unpackhi_epi8(low, high)}};
  }
#endif

  ByteVector table_;
  const uint8_t* from_;
  const Exception* exception_;
  Exception index_;  // of the next number, for comparison with exceptions
};

// Codes a panel, by the frequencies of its high bytes.
class PanelCoder {
 public:
  explicit PanelCoder(const Frequencies& frequencies) {
    const auto bytes = most_frequent(frequencies);
    std::copy_n(bytes.begin(), kTableSize, table_.begin());
    codes_.fill(kNoCode);
    for (int64_t code = 0; code < kTableSize; ++code) codes_[table_[code]] = code;
    for (int64_t i = kTableSize; i < 256; ++i) num_exceptions_ += frequencies[bytes[i]];
  }

  int64_t num_exceptions() const { return num_exceptions_; }

  // Codes the panel into `to`, which must be zeros.
  void write(const std::vector<BFloat16>& numbers, uint8_t* to, int64_t header_bytes) const {
    auto& header = *reinterpret_cast<Header*>(to);
    std::copy(table_.begin(), table_.end(), header.table);
    header.units = numbers.size() / kUnit;
    uint8_t* units = to + header_bytes;
    Exception* exception = header.exceptions;
    for (size_t unit = 0; unit < numbers.size(); unit += kUnit, units += kUnitBytes) {
      for (int64_t i = 0; i < kUnit; ++i) {
        const uint16_t number = numbers[unit + i].bits;
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

#if defined(__AVX512BW__)
  // A unit is two halves of two vectors of words. A half has its low bytes in a vector of its own, and its codes in one
  // half of each byte of the vector of codes: in groups of 16, eight of the first, then eight of the second.
  static constexpr Place place_of(int64_t number) {
    const int64_t half = number / 64, vector = number % 64 / 32, word = number % 32;
    const int64_t byte = word / 8 * 16 + vector * 8 + word % 8;
    return {(half + 1) * kLineBytes + byte, byte, half * 4};
  }
#else
  // A unit is two vectors of words. Each half of them has 16 low bytes, eight of the first, then eight of the second,
  // and its codes in the same order in one half of each byte of codes.
  static constexpr Place place_of(int64_t number) {
    const int64_t vector = number / 16, half = number % 16 / 8, byte = vector * 8 + number % 8;
    return {kCodeBytes + half * 16 + byte, byte, half * 4};
  }
#endif

  std::array<uint8_t, kTableSize> table_;
  std::array<uint8_t, 256> codes_;
  int64_t num_exceptions_ = 0;
};

inline uint8_t high_byte_of(uint16_t number) { return number >> 8; }

// Whether `packed` was made by `pack` of a weight with these numbers of panels, and of units in each.
inline bool is_coded(const Tensor& packed, int64_t panels, int64_t units) {
  if (packed.dim() != 2) return false;
  const int64_t header_bytes = packed.size(1) - units * kUnitBytes;
  if (packed.numel() == 0 || !packed.is_contiguous() || packed.size(0) != panels) return false;
  const auto* header = packed.const_data_ptr<uint8_t>();
  return header_bytes > 0 && header_bytes % kLineBytes == 0 && reinterpret_cast<uintptr_t>(header) % kAlignment == 0 &&
         reinterpret_cast<const Header*>(header)->units == units;
}

// Codes a weight [N, K] as [panel, bytes of one]; returns nothing where a panel has too many exceptions or units. The
// arguments are the columns and the units of a panel; for_each_panel(use) calls use(panel, numbers) for each panel.
template <class ForEachPanel>
std::optional<Tensor> pack(const Tensor& weight, int64_t columns, int64_t units, const ForEachPanel& for_each_panel) {
  if (units > kMaxUnits) return {};
  const int64_t panels = divide_up(weight.size(0), columns), size = units * kUnit;
  const auto coders = coders_of<PanelCoder>(weight, columns, size, high_byte_of);
  int64_t most = 0;
  for (const auto& coder : coders) most = std::max(most, coder->num_exceptions());
  if (most * kMaxExceptionShare > size) return {};
  const int64_t header_bytes = round_up(sizeof(Header) + (most + 1) * sizeof(Exception), kLineBytes);
  const int64_t panel_bytes = header_bytes + units * kUnitBytes;
  Tensor packed = zeros_in_huge_pages({panels, panel_bytes}, kByte);
  uint8_t* target = packed.mutable_data_ptr<uint8_t>();
  for_each_panel([&](int64_t panel, const std::vector<BFloat16>& numbers) {
    coders[panel]->write(numbers, target + panel * panel_bytes, header_bytes);
  });
  return packed;
}

}  // namespace twostep::high_bytes
