// Expands blocks: a group of a panel becomes codes of 8 bits, and a scale and an offset in float32 for each column. So
// all kinds are multiplied by the same code: a number is code * scale + offset, which is rounded at most once, since a
// code times a scale has no more than 24 bits. Where there is no offset it is -0, to which everything can be added.

#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "base/array_ref.h"
#include "base/check.h"
#include "base/vec.h"
#include "blocks/layout.h"

namespace twostep::blocks {

// An expanded group of a panel. Codes of 8 bits stay where they are.
struct alignas(64) Group {
  uint8_t buffer[kMostGroup * kColumns];  // of other codes
  float scales[kColumns], offsets[kColumns];
  const uint8_t* codes;    // int8, at the places of place_of
  const uint8_t* factors;  // [kColumns] float32, of a panel that has them
};

// code -> number, in place
inline void look_up(const int8_t* table, uint8_t* codes, int64_t count) {
  int64_t i = 0;
#if defined(__AVX512BW__)
  const __m512i numbers = _mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(table)));
  for (; i + 64 <= count; i += 64) {
    _mm512_storeu_si512(codes + i, _mm512_shuffle_epi8(numbers, _mm512_loadu_si512(codes + i)));
  }
#elif defined(__AVX2__)
  const __m256i numbers = _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(table)));
  for (; i + 32 <= count; i += 32) {
    auto* at = reinterpret_cast<__m256i*>(codes + i);
    _mm256_storeu_si256(at, _mm256_shuffle_epi8(numbers, _mm256_loadu_si256(at)));
  }
#elif defined(__aarch64__)
  const int8x16_t numbers = vld1q_s8(table);
  for (; i + 16 <= count; i += 16) {
    vst1q_u8(codes + i, vreinterpretq_u8_s8(vqtbl1q_s8(numbers, vld1q_u8(codes + i))));
  }
#endif
  for (; i < count; ++i) codes[i] = uint8_t(table[codes[i]]);
}

// Of codes that lie in planes, writes each as a byte.
template <class Kind>
inline void expand_codes(const uint8_t* __restrict low, uint8_t* __restrict to) {
  using Size = Sizes<Kind>;
  constexpr int64_t kRun = Kind::kHighBits ? Size::kHigh : Size::kLow;  // codes with one shift in both planes
  constexpr int kLowMask = (1 << Kind::kLowBits) - 1, kHighMask = (1 << Kind::kHighBits) - 1;
  const uint8_t* high = low + Size::kLow;
  unroll<Size::kCodes / kRun>([&](auto run) TWOSTEP_INLINE {
    constexpr int64_t kFirst = run() * kRun, kLowAt = kFirst % Size::kLow;
    constexpr int kLowShift = kFirst / Size::kLow * Kind::kLowBits, kHighShift = run() * Kind::kHighBits;
    for (int64_t i = 0; i < kRun; ++i) {
      int code = low[kLowAt + i] >> kLowShift & kLowMask;
      if constexpr (Kind::kHighBits > 0) code |= (high[i] >> kHighShift & kHighMask) << Kind::kLowBits;
      to[kFirst + i] = uint8_t(code - Kind::kBias);
    }
  });
  if constexpr (!std::is_null_pointer_v<decltype(Kind::kTable)>) look_up(Kind::kTable, to, Size::kCodes);
}

inline float number_of_half(const uint8_t* bytes) {
  uint16_t half;
  std::memcpy(&half, bytes, sizeof(half));
  const uint32_t sign = uint32_t(half & 0x8000) << 16, rest = half & 0x7fff;
  if (rest >= 0x7c00) return std::bit_cast<float>(sign | 0x7f800000 | rest << 13);  // infinite, or not a number
  // A half's exponent is read as that of a float32, whose bias is 112 larger; denormal halves become normal by that.
  return std::bit_cast<float>(sign | std::bit_cast<uint32_t>(std::bit_cast<float>(rest << 13) * 0x1p112f));
}

inline PartF load_halves(const uint8_t* bytes) {
#if defined(__AVX512F__)
  return (PartF)_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(bytes)));
#elif defined(__AVX2__) && defined(__F16C__)
  return (PartF)_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(bytes)));
#else
  PartF numbers;
  for (int i = 0; i < kPartLanes; ++i) numbers[i] = number_of_half(bytes + 2 * i);
  return numbers;
#endif
}

typedef int32_t PartI __attribute__((vector_size(4 * kPartLanes)));

inline PartF load_signed_bytes(const uint8_t* bytes) {
#if defined(__AVX512F__)
  return (PartF)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(bytes))));
#elif defined(__AVX2__)
  return (PartF)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(bytes))));
#else
  typedef int8_t Bytes __attribute__((vector_size(kPartLanes)));
  Bytes all;
  std::memcpy(&all, bytes, sizeof(all));
  return __builtin_convertvector(__builtin_convertvector(all, PartI), PartF);
#endif
}

inline PartF load_unsigned_bytes(const uint8_t* bytes) {
#if defined(__AVX512F__)
  return (PartF)_mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(bytes))));
#elif defined(__AVX2__)
  return (PartF)_mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(bytes))));
#else
  typedef uint8_t Bytes __attribute__((vector_size(kPartLanes)));
  Bytes all;
  std::memcpy(&all, bytes, sizeof(all));
  return __builtin_convertvector(__builtin_convertvector(all, PartI), PartF);
#endif
}

// Powers of two with the exponents that bytes hold, halved: the codes of such a kind are doubled.
inline PartF load_powers(const uint8_t* bytes) {
  PartU bits;
  for (int i = 0; i < kPartLanes; ++i) bits[i] = bytes[i] > 1 ? uint32_t(bytes[i] - 1) << 23 : 0x200000u << bytes[i];
  return (PartF)bits;
}

// Numbers of 8 bits (e4m3) that are not NaN, halved: the codes of such a kind are doubled.
inline PartF load_e4m3(const uint8_t* bytes) {
  typedef uint8_t Bytes __attribute__((vector_size(kPartLanes)));
  Bytes all;
  std::memcpy(&all, bytes, sizeof(all));
  const PartU bits = __builtin_convertvector(all, PartU), magnitude = bits & 0x7f;
  const PartF subnormal = __builtin_convertvector((PartI)magnitude, PartF) * 0x1p-10f;
  const PartF number = magnitude < 8 ? subnormal : (PartF)((magnitude << 20) + (119u << 23));
  return (PartF)((PartU)number | (bits & 0x80) << 24);
}

// A kind's scales and offsets of the columns of a vector; levels are those of a group.
template <class Kind>
inline void expand_scales(const uint8_t* halves, const uint8_t* levels, int64_t column, Group& to) {
  PartF scale, offset = -PartF{};
  if constexpr (Kind::kHalves > 0) scale = load_halves(halves + 2 * column);
  if constexpr (Kind::kHalves == 2) offset = load_halves(halves + 2 * (kColumns + column));
  if constexpr (Kind::kFactors > 0) std::memcpy(&scale, to.factors + 4 * column, sizeof(scale));
  if constexpr (Kind::kIsPower) scale = load_powers(levels + column);
  else if constexpr (Kind::kIsE4m3) scale *= load_e4m3(levels + column);
  else if constexpr (Kind::kLevels == 1) scale *= load_signed_bytes(levels + column);
  else if constexpr (Kind::kLevels == 2) {
    scale *= load_unsigned_bytes(levels + column);
    offset = -(offset * load_unsigned_bytes(levels + kColumns + column));
  }
  std::memcpy(to.scales + column, &scale, sizeof(scale));
  std::memcpy(to.offsets + column, &offset, sizeof(offset));
}

// Expands a group of the block of a panel that begins there. `to` has the panel's factors.
template <class Kind>
void expand(const uint8_t* block, int64_t group, Group& to) {
  using Size = Sizes<Kind>;
  const uint8_t* levels = block + Size::kHalves + group * Size::kGroup;
  for (int64_t column = 0; column < kColumns; column += kPartLanes) {
    expand_scales<Kind>(block, levels, column, to);
  }
  const uint8_t* codes = levels + Size::kLevels;
  to.codes = Kind::kLowBits == 8 ? codes : to.buffer;
  if constexpr (Kind::kLowBits < 8) expand_codes<Kind>(codes, to.buffer);
}

// How the panels of a kind are read.
struct Reader {
  void (*expand)(const uint8_t* block, int64_t group, Group& to);
  int64_t group, groups, block_bytes;  // numbers of a group along K, groups of a block, bytes of a block of a panel
  int64_t factor_bytes;                // of a panel
  bool has_offsets;                    // other than zero

  template <class Kind>
  static constexpr Reader of() {
    using Size = Sizes<Kind>;
    return {expand_kind<Kind>, Kind::kGroup, Kind::kGroups, Size::kBlock, Size::kFactors, Kind::kHalves == 2};
  }

 private:
  template <class Kind>
  static void expand_kind(const uint8_t* block, int64_t group, Group& to) {
    blocks::expand<Kind>(block, group, to);
  }
};

inline Reader reader_of(int64_t kind) {
  Reader reader{};
  TWOSTEP_CHECK(with_kind(kind, [&]<class Kind>() { reader = Reader::of<Kind>(); }), "blocks of kind ", kind);
  return reader;
}

}  // namespace twostep::blocks
