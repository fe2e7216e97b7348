// Dot products of integers: weights of 8 bits, times rows of 8 or 16.

#pragma once

#include <cstdint>
#include <cstring>

#include "base/vec.h"

namespace twostep::integers {

constexpr int64_t kStep = 64;  // along K, of a tile
constexpr int64_t kTileRows = 16;
constexpr int64_t kTileBytes = kTileRows * kStep;  // of one step

typedef uint8_t PartB __attribute__((vector_size(4 * kPartLanes)));
typedef int32_t PartI __attribute__((vector_size(4 * kPartLanes)));

// Sixteen columns times four along K.
struct Bytes {
  PartB part[kParts];
};

// Sixteen columns.
struct Dots {
  PartI part[kParts];
};

inline Vec to_floats(const Dots& dots) {
  return each_part([&](int i) { return __builtin_convertvector(dots.part[i], PartF); });
}

inline Dots to_integers(Vec numbers) {
  Dots integers;
  unroll<kParts>([&](auto i) { integers.part[i] = __builtin_convertvector(numbers.part[i], PartI); });
  return integers;
}

// Returns the bits of each lane's larger magnitude as an integer. Those of infinity and NaN are larger than all others.
inline Dots larger(Dots largest, Vec x) {
  unroll<kParts>([&](auto i) {
    const PartI magnitude = (PartI)x.part[i] & 0x7fffffff;
    largest.part[i] = magnitude > largest.part[i] ? magnitude : largest.part[i];
  });
  return largest;
}

inline float fold_larger(const Dots& magnitudes) {
  typedef int32_t QuadI __attribute__((vector_size(16)));
  return fold(each_part([&](int i) { return (PartF)magnitudes.part[i]; }),
              [](Quad a, Quad b) { return (QuadI)a > (QuadI)b ? a : b; });
}

// The low bytes of sixteen integers.
inline void store_low_bytes(int8_t* to, const Dots& integers) {
  typedef int8_t PartB __attribute__((vector_size(kPartLanes)));
  unroll<kParts>([&](auto i) {
    const PartB bytes = __builtin_convertvector(integers.part[i], PartB);
    std::memcpy(to + i * kPartLanes, &bytes, sizeof(bytes));
  });
}

inline Bytes load_bytes(const uint8_t* from) {
  Bytes bytes;
  unroll<kParts>([&](auto i) { std::memcpy(&bytes.part[i], from + i * sizeof(PartB), sizeof(PartB)); });
  return bytes;
}

// Four numbers.
inline int32_t word_of(const int8_t* x) {
  int32_t word;
  std::memcpy(&word, x, sizeof(word));
  return word;
}

inline int32_t sum_of_32(const int8_t* x) {
#if defined(__AVX2__) && defined(__FMA__)
  const __m256i positive = _mm256_xor_si256(_mm256_loadu_si256((const __m256i*)x), _mm256_set1_epi8(-128));
  const __m256i eights = _mm256_sad_epu8(positive, _mm256_setzero_si256());
  const __m128i both = _mm_add_epi32(_mm256_castsi256_si128(eights), _mm256_extracti128_si256(eights, 1));
  return _mm_cvtsi128_si32(both) + _mm_extract_epi32(both, 2) - 32 * 128;
#else
  int32_t sum = 0;
  for (int i = 0; i < 32; ++i) sum += x[i];
  return sum;
#endif
}

// Two numbers of 16 bits with their sign, as one of 32.
inline int32_t pair_of(int32_t low, int32_t high) { return (low & 0xffff) | high * 65536; }

// The sum of two products, of pairs.
inline PartI times_pairs(PartI a, PartI b) {
#if defined(__AVX512BW__)
  return (PartI)_mm512_madd_epi16((__m512i)a, (__m512i)b);
#elif defined(__AVX2__) && defined(__FMA__)
  return (PartI)_mm256_madd_epi16((__m256i)a, (__m256i)b);
#elif defined(__SSE2__)
  return (PartI)_mm_madd_epi16((__m128i)a, (__m128i)b);
#elif defined(__ARM_NEON)
  const int16x8_t x = (int16x8_t)a, y = (int16x8_t)b;
  return (PartI)vpaddq_s32(vmull_s16(vget_low_s16(x), vget_low_s16(y)), vmull_high_s16(x, y));
#else
  return (a << 16 >> 16) * (b << 16 >> 16) + (a >> 16) * (b >> 16);
#endif
}

// sums + the products of pairs of 16 bits.
TWOSTEP_INLINE inline Dots add_pairs(Dots sums, Vec a, Vec b) {
  unroll<kParts>([&](auto i) TWOSTEP_INLINE {
#if defined(__AVX512VNNI__)
    sums.part[i] = (PartI)_mm512_dpwssd_epi32((__m512i)sums.part[i], (__m512i)a.part[i], (__m512i)b.part[i]);
#else
    sums.part[i] += times_pairs((PartI)a.part[i], (PartI)b.part[i]);
#endif
  });
  return sums;
}

// The offset that is added to the bytes of a weight, from -127 to 127, to make them operands of add_products.
#if defined(__AVX512VNNI__)
constexpr int32_t kOffset = 128;
#else
constexpr int32_t kOffset = 0;
#endif

// sum + (weights + kOffset) * x, four products per lane.
inline PartI add_products(PartI sum, PartB weights, const int8_t* x) {
  [[maybe_unused]] const int32_t four = word_of(x);
#if defined(__AVX512VNNI__)
  return (PartI)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)weights, _mm512_set1_epi32(four));
#elif defined(__AVX512BW__)
  // The weight's sign goes to x: two products of its magnitude fit in 16 bits.
  const __m512i w = (__m512i)weights, fours = _mm512_set1_epi32(four);
  const __m512i signed_x = _mm512_mask_sub_epi8(fours, _mm512_movepi8_mask(w), _mm512_setzero_si512(), fours);
  const __m512i pairs = _mm512_maddubs_epi16(_mm512_abs_epi8(w), signed_x);
  return sum + (PartI)_mm512_madd_epi16(pairs, _mm512_set1_epi16(1));
#elif defined(__AVX2__) && defined(__FMA__)
  const __m256i w = (__m256i)weights, signed_x = _mm256_sign_epi8(_mm256_set1_epi32(four), w);
  const __m256i pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(w), signed_x);
  return sum + (PartI)_mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
#elif defined(__ARM_FEATURE_DOTPROD)
  return (PartI)vdotq_s32((int32x4_t)sum, (int8x16_t)weights, vreinterpretq_s8_s32(vdupq_n_s32(four)));
#else
  for (int lane = 0; lane < kPartLanes; ++lane) {
    for (int i = 0; i < 4; ++i) sum[lane] += int8_t(weights[4 * lane + i]) * x[i];
  }
  return sum;
#endif
}

inline Dots add_products(Dots sums, const Bytes& weights, const int8_t* x) {
  unroll<kParts>([&](auto i) { sums.part[i] = add_products(sums.part[i], weights.part[i], x); });
  return sums;
}

// The amount by which codes from 0 to 255 are too large for add_products.
constexpr int32_t kCodeOffset = 128 - kOffset;

// Returns the start of sums that compensates for kOffset, given the sum of a row's numbers.
inline Dots first_sums(int32_t row_sum) {
  Dots dots;
  unroll<kParts>([&](auto i) { dots.part[i] = PartI{} - kOffset * row_sum; });
  return dots;
}

// ---- rows of 8 bits, weights from 0 to 255 ----

class CodeDots {
 public:
  static CodeDots first(int32_t row_sum) {
    CodeDots first;
    for (PartI& part : first.dots_.part) part = PartI{} + kCodeOffset * row_sum;
    return first;
  }

  // += weights * x, four products per lane.
  TWOSTEP_INLINE void add_products(const Bytes& weights, const int8_t* x) {
    unroll<kParts>([&](auto i) TWOSTEP_INLINE {
      dots_.part[i] = integers::add_products(dots_.part[i], weights.part[i] ^ uint8_t(kCodeOffset), x);
    });
  }

  const Dots& total() const { return dots_; }

 private:
  Dots dots_;
};

// ---- rows of 8 bits, weights from 0 to 15 ----

// Whether a target adds pairs of products: that is cheaper for unsigned weights, and sums of 32 along K fit in 16 bits.
#if defined(__AVX2__) && defined(__FMA__) && !defined(__AVX512VNNI__)
constexpr bool kAddsPairs = true;
#else
constexpr bool kAddsPairs = false;
#endif

// Dot products over 32 along K.
class CodeSums {
 public:
  // += weights * x, eight products per lane: of four along K in the low halves of bytes, and four in the high.
  TWOSTEP_INLINE void add_products(const Bytes& weights, const int8_t* x) {
    unroll<kParts>([&](auto i) TWOSTEP_INLINE {
      sums_.part[i] = add(add(sums_.part[i], weights.part[i] & 15, x), weights.part[i] >> 4, x + 4);
    });
  }

  // Returns a part of the sums, times numbers from 0 to 15.
  TWOSTEP_INLINE PartI times(int i, PartI factors) const {
    if constexpr (kAddsPairs) return times_pairs(sums_.part[i], factors | factors << 16);
    return sums_.part[i] * factors;
  }

 private:
  TWOSTEP_INLINE static PartI add(PartI sums, PartB weights, const int8_t* x) {
#if defined(__AVX512BW__) && !defined(__AVX512VNNI__)
    const __m512i pairs = _mm512_maddubs_epi16((__m512i)weights, _mm512_set1_epi32(word_of(x)));
    return (PartI)_mm512_add_epi16((__m512i)sums, pairs);
#elif defined(__AVX2__) && defined(__FMA__) && !defined(__AVX512VNNI__)
    // In assembly, since GCC would reorder intrinsics and run out of registers.
    PartI pairs;
    const PartI fours = PartI{} + word_of(x);
    asm("vpmaddubsw %2, %3, %1\n\tvpaddw %1, %0, %0" : "+x"(sums), "=&x"(pairs) : "x"(fours), "x"(weights));
    return sums;
#else
    return integers::add_products(sums, weights, x);
#endif
  }

  Dots sums_{};
};

// ---- rows of 16 bits, weights from 0 to 255 ----

// Whether rows are stored as signed halves of 8 bits, a tile of each, one after the other; else four numbers along K
// are together, in the order 0, 2, 1, 3.
#if defined(__AVX512VNNI__) || defined(__ARM_FEATURE_MATMUL_INT8)
constexpr bool kHalvesApart = true;
#else
constexpr bool kHalvesApart = false;
#endif

// Returns the upper half of a number whose lower half is the signed low byte.
inline Dots upper_halves(Dots integers) {
  for (PartI& part : integers.part) part = (part + 128) >> 8;
  return integers;
}

inline Dots joined(Dots upper, const Dots& lower) {
  unroll<kParts>([&](auto i) { upper.part[i] = (upper.part[i] << 8) + lower.part[i]; });
  return upper;
}

inline void store_wide(int8_t* to, const Dots& integers) {
  int32_t numbers[kLanes];
  std::memcpy(numbers, &integers, sizeof(numbers));
  int16_t ordered[kLanes];
  for (int i = 0; i < kLanes; ++i) ordered[(i & ~3) | (i & 1) << 1 | (i >> 1 & 1)] = int16_t(numbers[i]);
  std::memcpy(to, ordered, sizeof(ordered));
}

class WideDots {
 public:
  static WideDots first(float /*row_sum*/) { return {}; }

  // += weights * x, four products per lane.
  TWOSTEP_INLINE void add_products(const Bytes& weights, const int8_t* x) {
    unroll<kParts>([&](auto i) TWOSTEP_INLINE { add_part(i, weights.part[i], x); });
  }

  Dots total() const {
    if constexpr (kHalvesApart) return joined(upper_, lower_);
    return lower_;
  }

 private:
  TWOSTEP_INLINE void add_part(int i, PartB weights, const int8_t* x) {
#if defined(__AVX512VNNI__)
    upper_.part[i] = (PartI)_mm512_dpbusd_epi32((__m512i)upper_.part[i], (__m512i)weights, fours(x));
    lower_.part[i] = (PartI)_mm512_dpbusd_epi32((__m512i)lower_.part[i], (__m512i)weights, fours(x + kTileBytes));
#elif defined(__ARM_FEATURE_MATMUL_INT8)
    const uint8x16_t w = (uint8x16_t)weights;
    upper_.part[i] = (PartI)vusdotq_s32((int32x4_t)upper_.part[i], w, fours(x));
    lower_.part[i] = (PartI)vusdotq_s32((int32x4_t)lower_.part[i], w, fours(x + kTileBytes));
#elif defined(__AVX512BW__)
    const __m512i w = (__m512i)weights;
    const __m512i even = _mm512_and_si512(w, _mm512_set1_epi16(255)), odd = _mm512_srli_epi16(w, 8);
    lower_.part[i] += (PartI)_mm512_madd_epi16(even, _mm512_set1_epi32(word_of(x)));
    lower_.part[i] += (PartI)_mm512_madd_epi16(odd, _mm512_set1_epi32(word_of(x + 4)));
#elif defined(__AVX2__) && defined(__FMA__)
    const __m256i w = (__m256i)weights;
    const __m256i even = _mm256_and_si256(w, _mm256_set1_epi16(255)), odd = _mm256_srli_epi16(w, 8);
    lower_.part[i] += (PartI)_mm256_madd_epi16(even, _mm256_set1_epi32(word_of(x)));
    lower_.part[i] += (PartI)_mm256_madd_epi16(odd, _mm256_set1_epi32(word_of(x + 4)));
#else
    int16_t numbers[4];
    std::memcpy(numbers, x, sizeof(numbers));
    const PartU words = (PartU)weights;
    lower_.part[i] += (PartI)(words & 255) * numbers[0] + (PartI)(words >> 8 & 255) * numbers[2] +
                      (PartI)(words >> 16 & 255) * numbers[1] + (PartI)(words >> 24) * numbers[3];
#endif
  }

#if defined(__AVX512VNNI__)
  static __m512i fours(const int8_t* x) { return _mm512_set1_epi32(word_of(x)); }
#elif defined(__ARM_FEATURE_MATMUL_INT8)
  static int8x16_t fours(const int8_t* x) { return vreinterpretq_s8_s32(vdupq_n_s32(word_of(x))); }
#endif

  Dots upper_{}, lower_{};
};

}  // namespace twostep::integers
