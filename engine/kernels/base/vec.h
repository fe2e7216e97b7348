// Sixteen floats as one value, the same arithmetic for every instruction set: one 512-bit register, two of 256 bits or
// four of 128, as the compiler's target has them (GCC's vector types). Nothing here is fused, reordered or treated
// apart at a tail unless a comment says so: a lane's result depends on that lane's inputs only.

#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

#if defined(__AVX2__)
#include <immintrin.h>
#elif defined(__SSE2__)
#include <emmintrin.h>
#elif defined(__ARM_NEON)
#include <arm_neon.h>
#endif

#include "base/bfloat16.h"

namespace twostep {

constexpr int kLanes = 16;

#if defined(__AVX512F__)
constexpr int kPartLanes = 16;
#elif defined(__AVX2__) && defined(__FMA__)
constexpr int kPartLanes = 8;
#else
constexpr int kPartLanes = 4;
#endif
constexpr int kParts = kLanes / kPartLanes;

typedef float PartF __attribute__((vector_size(4 * kPartLanes)));
typedef uint32_t PartU __attribute__((vector_size(4 * kPartLanes)));
typedef uint16_t PartH __attribute__((vector_size(2 * kPartLanes)));
typedef float Quad __attribute__((vector_size(16)));

struct Vec {
  PartF part[kParts];
};

#define TWOSTEP_INLINE __attribute__((always_inline))

// f(0), f(1), ... f(N - 1) with constants, written out before the compiler decides what stays in registers: a loop over
// an array of vectors would keep them in memory.
template <int N, class F>
TWOSTEP_INLINE inline void unroll(F f) {
  [&]<int... I>(std::integer_sequence<int, I...>) TWOSTEP_INLINE { (f(std::integral_constant<int, I>{}), ...); }
  (std::make_integer_sequence<int, N>{});
}

// Returns the Vec whose part i is f(i).
template <class F>
TWOSTEP_INLINE inline Vec each_part(F f) {
  return [&]<int... I>(std::integer_sequence<int, I...>) TWOSTEP_INLINE { return Vec{{f(I)...}}; }
  (std::make_integer_sequence<int, kParts>{});
}

inline PartF fma_part(PartF a, PartF b, PartF c) {
#if defined(__AVX512F__)
  return (PartF)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__AVX2__) && defined(__FMA__)
  return (PartF)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__ARM_NEON) && defined(__ARM_FEATURE_FMA)
  return (PartF)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
  return a * b + c;  // two roundings, always: such a target has nothing to fuse them into
#endif
}

inline Vec operator+(Vec a, Vec b) { return each_part([&](int i) { return a.part[i] + b.part[i]; }); }
inline Vec operator-(Vec a, Vec b) { return each_part([&](int i) { return a.part[i] - b.part[i]; }); }
inline Vec operator*(Vec a, Vec b) { return each_part([&](int i) { return a.part[i] * b.part[i]; }); }
inline Vec operator/(Vec a, Vec b) { return each_part([&](int i) { return a.part[i] / b.part[i]; }); }
inline Vec max(Vec a, Vec b) {
  return each_part([&](int i) { return a.part[i] > b.part[i] ? a.part[i] : b.part[i]; });
}
// a * b + c, fused wherever the target can.
inline Vec fma(Vec a, Vec b, Vec c) {
  return each_part([&](int i) { return fma_part(a.part[i], b.part[i], c.part[i]); });
}
inline Vec broadcast(float x) {
#if defined(__AVX512F__)
  return Vec{{(PartF)_mm512_set1_ps(x)}};
#elif defined(__AVX2__) && defined(__FMA__)
  return each_part([&](int) { return (PartF)_mm256_set1_ps(x); });
#else
  return each_part([&](int) { return PartF{x, x, x, x}; });
#endif
}
// `yes` in the lanes where a < b, else `no`.
inline Vec where_less(Vec a, Vec b, Vec yes, Vec no) {
  return each_part([&](int i) { return a.part[i] < b.part[i] ? yes.part[i] : no.part[i]; });
}

inline Vec load(const float* source) {
  return each_part([&](int i) {
    PartF part;
    std::memcpy(&part, source + i * kPartLanes, sizeof(part));
    return part;
  });
}
inline PartF widened(PartH halves) {
#if defined(__AVX512F__)
  const PartU words = (PartU)_mm512_cvtepu16_epi32((__m256i)halves);
#elif defined(__AVX2__) && defined(__FMA__)
  const PartU words = (PartU)_mm256_cvtepu16_epi32((__m128i)halves);
#else
  const PartU words = __builtin_convertvector(halves, PartU);
#endif
  return (PartF)(words << 16);
}
inline Vec load(const BFloat16* source) {
  return each_part([&](int i) {
    PartH halves;
    std::memcpy(&halves, source + i * kPartLanes, sizeof(halves));
    return widened(halves);
  });
}
// Loads the first `count` < 16 elements, with zeros after them; reads nothing beyond them.
template <class Element>
inline Vec load_first(const Element* source, int64_t count) {
  Element buffer[kLanes] = {};
  std::memcpy(buffer, source, count * sizeof(Element));
  return load(buffer);
}
inline void store(float* target, Vec v) {
  unroll<kParts>([&](auto i) { std::memcpy(target + i * kPartLanes, &v.part[i], sizeof(v.part[i])); });
}
// The nearest bfloat16, ties to even; a NaN stays one. What is so small that it is subnormal becomes zero where the CPU
// has an instruction for this, as in its dot products.
#if defined(__AVX512BF16__)
inline PartH rounded_to_halves(PartF x) { return (PartH)_mm512_cvtneps_pbh((__m512)x); }
inline PartF rounded_to_bfloat16(PartF x) { return widened(rounded_to_halves(x)); }
#else
// The bfloat16 bits in the upper halves of words; lower halves are unspecified.
inline PartU rounded_bits(PartF x) {
  const PartU bits = (PartU)x;
  return x == x ? bits + 0x7fffu + ((bits >> 16) & 1u) : bits | 0x400000u;
}
inline PartH rounded_to_halves(PartF x) { return __builtin_convertvector(rounded_bits(x) >> 16, PartH); }
inline PartF rounded_to_bfloat16(PartF x) { return (PartF)(rounded_bits(x) & 0xffff0000u); }
#endif
inline void store(BFloat16* target, Vec v) {
  unroll<kParts>([&](auto i) {
    const PartH halves = rounded_to_halves(v.part[i]);
    std::memcpy(target + i * kPartLanes, &halves, sizeof(halves));
  });
}
template <class Element>
inline void store_first(Element* target, int64_t count, Vec v) {
  Element buffer[kLanes];
  store(buffer, v);
  std::memcpy(target, buffer, count * sizeof(Element));
}

// Loads the next elements of which `count` are left, at most sixteen.
template <class Element>
TWOSTEP_INLINE inline Vec load_upto(const Element* source, int64_t count) {
  return count >= kLanes ? load(source) : load_first(source, count);
}
template <class Element>
TWOSTEP_INLINE inline void store_upto(Element* target, int64_t count, Vec v) {
  count >= kLanes ? store(target, v) : store_first(target, count, v);
}

// Calls f(i, count) for every sixteen elements of `size`, and for the rest. Where f is inlined, the compiler knows
// which calls have a whole vector.
template <class F>
TWOSTEP_INLINE inline void for_each_vector(int64_t size, F f) {
  int64_t i = 0;
  for (; i + kLanes <= size; i += kLanes) f(i, kLanes);
  if (i < size) [[unlikely]] f(i, size - i);
}

// 0, 1, ... 15
inline Vec lane_numbers() {
  alignas(64) static constexpr float numbers[kLanes] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  return load(numbers);
}

// Combines all lanes: lane i with lane i + 8, then with i + 4, i + 2, i + 1.
template <class F>
inline float fold(Vec v, F combine) {
  alignas(64) float x[kLanes];
  store(x, v);
  Quad a, b, c, d;
  std::memcpy(&a, x, 16);
  std::memcpy(&b, x + 4, 16);
  std::memcpy(&c, x + 8, 16);
  std::memcpy(&d, x + 12, 16);
  Quad q = combine(combine(a, c), combine(b, d));
  q = combine(q, Quad{q[2], q[3], q[0], q[1]});
  q = combine(q, Quad{q[1], q[0], q[3], q[2]});
  return q[0];
}
inline float fold_max(Vec v) {
  return fold(v, [](Quad a, Quad b) { return a > b ? a : b; });
}
inline float fold_add(Vec v) {
  return fold(v, [](Quad a, Quad b) { return a + b; });
}

// e**x for x <= 0, to 1 or 2 units in the last place; e**0 is 1, x < -87 gives 0 (near the least normal number), and
// NaN stays NaN.
//
// e**x = 2**n * e**r with n = round(x / ln 2) and |r| <= ln(2) / 2; e**r is 1 + r + r**2 * P(r), with P fitted for the
// least relative error on that interval (3e-9). Adding 1.5 * 2**23 rounds to an integer and leaves it in the low bits.
inline Vec exp_nonpositive(Vec x) {
  const Vec shift = broadcast(12582912.0f + 127.0f);  // of 2**n as a float, 127 + n is the exponent
  const Vec shifted = fma(x, broadcast(1.44269504f), shift);
  const Vec n = shifted - shift;
  Vec r = fma(n, broadcast(-0.693359375f), x);  // ln 2 in two steps: n times the first is exact
  r = fma(n, broadcast(2.12194440e-4f), r);
  Vec p = fma(broadcast(0.0013814596f), r, broadcast(0.0083687175f));
  p = fma(p, r, broadcast(0.04166839f));
  p = fma(p, r, broadcast(0.16666521f));
  p = fma(p, r, broadcast(0.49999994f));
  p = fma(p, r * r, r) + broadcast(1.0f);
  const Vec power = each_part([&](int i) { return (PartF)((PartU)shifted.part[i] << 23); });
  return where_less(x, broadcast(-87.0f), Vec{}, p * power);
}
inline float exp_nonpositive(float x) { return exp_nonpositive(broadcast(x)).part[0][0]; }

// 2**(x * scale) for x * scale <= 0, to 2 or 3 units in the last place; 2**0 is 1, and below 2**-125 it is 0.
//
// As in exp_nonpositive with r = x * scale - n, and 2**r = 1 + r * P(r), P fitted for the least relative error (1e-7).
inline Vec exp2_of_product(Vec x, Vec scale) {
  const Vec shift = broadcast(12582912.0f);
  const Vec shifted = fma(x, scale, shift);
  const Vec minus_n = shift - shifted;
  const Vec r = fma(x, scale, minus_n);
  Vec p = fma(broadcast(0.0013264591f), r, broadcast(0.009671619f));
  p = fma(p, r, broadcast(0.05550735f));
  p = fma(p, r, broadcast(0.24022241f));
  p = fma(p, r, broadcast(0.693147f));
  p = fma(p, r, broadcast(1.0f));
  const Vec scaled = each_part([&](int i) { return (PartF)((PartU)p.part[i] + ((PartU)shifted.part[i] << 23)); });
  return where_less(broadcast(125.0f), minus_n, Vec{}, scaled);
}

// The hyperbolic tangent, to about 2 units in the last place: near zero an odd polynomial (fitted likewise on |x| <=
// 0.625, relative error 4e-9), else through e**(-2|x|).
inline Vec tanh(Vec x) {
  const Vec magnitude = max(x, Vec{} - x);
  const Vec z = x * x;
  Vec p = fma(broadcast(-0.0057049785f), z, broadcast(0.020639079f));
  p = fma(p, z, broadcast(-0.05373971f));
  p = fma(p, z, broadcast(0.13331442f));
  p = fma(p, z, broadcast(-0.3333328f));
  const Vec near_zero = fma(p * z, x, x);
  const Vec decay = exp_nonpositive(broadcast(-2.0f) * magnitude);
  const Vec far = (broadcast(1.0f) - decay) / (broadcast(1.0f) + decay);
  const Vec signed_far = where_less(x, Vec{}, Vec{} - far, far);
  return where_less(magnitude, broadcast(0.625f), near_zero, signed_far);
}

// Four rows of four lanes in each quarter of the registers, transposed within the quarters: afterwards register i holds
// element i of rows 4q to 4q + 3 in its quarter q, if before register r held row 4q + r there.
inline void transpose_quarters(Vec (&v)[4]) {
  const auto interleave = [](Vec a, Vec b, bool upper) {
    return each_part([&](int i) {
#if defined(__AVX512F__)
      const __m512 x = (__m512)a.part[i], y = (__m512)b.part[i];
      return (PartF)(upper ? _mm512_unpackhi_ps(x, y) : _mm512_unpacklo_ps(x, y));
#elif defined(__AVX2__) && defined(__FMA__)
      const __m256 x = (__m256)a.part[i], y = (__m256)b.part[i];
      return (PartF)(upper ? _mm256_unpackhi_ps(x, y) : _mm256_unpacklo_ps(x, y));
#else
      const PartF x = a.part[i], y = b.part[i];
      return upper ? PartF{x[2], y[2], x[3], y[3]} : PartF{x[0], y[0], x[1], y[1]};
#endif
    });
  };
  // Interleaving rows (0, 2) and (1, 3), then those results, is a transposition.
  const Vec low02 = interleave(v[0], v[2], false), high02 = interleave(v[0], v[2], true);
  const Vec low13 = interleave(v[1], v[3], false), high13 = interleave(v[1], v[3], true);
  v[0] = interleave(low02, low13, false);
  v[1] = interleave(low02, low13, true);
  v[2] = interleave(high02, high13, false);
  v[3] = interleave(high02, high13, true);
}

// Four quads side by side.
inline Vec concatenate(Quad a, Quad b, Quad c, Quad d) {
#if defined(__AVX512F__)
  __m512 v = _mm512_castps128_ps512((__m128)a);
  v = _mm512_insertf32x4(v, (__m128)b, 1);
  v = _mm512_insertf32x4(v, (__m128)c, 2);
  v = _mm512_insertf32x4(v, (__m128)d, 3);
  return Vec{{(PartF)v}};
#elif defined(__AVX2__) && defined(__FMA__)
  return Vec{{(PartF)_mm256_set_m128((__m128)b, (__m128)a), (PartF)_mm256_set_m128((__m128)d, (__m128)c)}};
#else
  return Vec{{a, b, c, d}};
#endif
}

}  // namespace twostep
