// The tile arithmetic of attention/worker.h over quantized keys and values: products of integers.
//
// Levels of keys and values become pairs of 16 bits. Queries are rounded to 16 bits, too, and so are a row's weights of
// a tile, times the scales of a group of values. So sums of products are exact, in whatever order: of a key and a group
// of its numbers, of a tile and a column.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

#include "attention/vector.h"
#include "base/int_dot.h"

namespace twostep::attention {

using integers::Dots, integers::PartI;
typedef int16_t PartS __attribute__((vector_size(4 * kPartLanes)));

constexpr float kLargestLevel = 32767.0f;

// Numbers as levels of 16 bits: times `inverse` rounded, and these times `unit` are about the numbers.
struct Rounding {
  float unit, inverse;

  // `largest` is the magnitude of the numbers' largest, infinite or NaN where one is not finite.
  explicit Rounding(float largest) {
    const bool is_finite = largest < kInfinity;
    inverse = is_finite && largest > kSmallestScale ? kLargestLevel / largest : 0.0f;
    unit = is_finite ? largest / kLargestLevel : std::numeric_limits<float>::quiet_NaN();
  }
};

// Pairs of a query's levels, number n beside n + 2, and behind them its unit. A tile of keys has the scales of each
// group there.
struct IntegerWords {
  static constexpr int64_t kGroupWords = 16;

  static int64_t num_words(int64_t head_size) { return head_size / 2 + divide_up(head_size / 2, kGroupWords); }
  static int64_t num_pairs(int64_t num_words) { return num_words - divide_up(num_words, kGroupWords + 1); }

  static void load_query(const float* source, int64_t size, float* target) {
    Dots magnitudes{};
    for (int64_t i = 0; i < size; i += kLanes) magnitudes = integers::larger(magnitudes, load(source + i));
    const Rounding rounding(integers::fold_larger(magnitudes));
    target[size / 2] = rounding.unit;
    const auto level = [&](int64_t i) {
      return rounding.inverse == 0.0f ? 0 : int32_t(std::nearbyint(source[i] * rounding.inverse));
    };
    for (int64_t i = 0; i < size; i += 4)
      for (int64_t n = 0; n < 2; ++n) {
        const int32_t pair = integers::pair_of(level(i + n), level(i + n + 2));
        std::memcpy(target + i / 2 + n, &pair, sizeof(pair));
      }
  }
};

// ---- Keys -----------------------------------------------------------------------------------------------------------

// Sixteen keys as pairs, number n beside n + 2: calls f(n, pairs) for every first two n of four.
template <int BITS, class F>
TWOSTEP_INLINE inline void for_each_pair(Quantized<BITS> format, const SixteenRows<uint8_t>& rows, int64_t size, F f) {
  int64_t half = 0;
  const auto begin = [&](int64_t, int64_t count) { half = count / 2; };
  for_each_word(format, rows, size, begin, [&](int64_t number, Vec word) TWOSTEP_INLINE {
    const auto pairs = [&](int shift) TWOSTEP_INLINE {
      return each_part([&](int i) {
        const PartS bytes = (PartS)word.part[i];
        if constexpr (BITS == 8) return (PartF)(bytes << (8 - shift) >> 8);
        return (PartF)((bytes >> shift & 15) - 8);
      });
    };
    f(number, pairs(0)), f(number + 1, pairs(8));
    if constexpr (BITS == 4) f(number + half, pairs(4)), f(number + half + 1, pairs(12));
  });
}

// scores[row][key] = sum over groups, in order, of the exact sum of a group's products, times its scale; all times the
// query's unit.
template <int ROWS>
void score_integers(const float* queries, const float* keys, int64_t num_words, float* scores) {
  constexpr int kVecs = vectors_at_once(ROWS);
  const int64_t num_pairs = IntegerWords::num_pairs(num_words);
  for (int column = 0; column < kTileKeys; column += kVecs * kLanes) {
    for (int64_t first = 0; first < num_pairs; first += IntegerWords::kGroupWords) {
      Dots sums[ROWS][kVecs] = {};
      const int64_t end = std::min(num_pairs, first + IntegerWords::kGroupWords);
      for (int64_t word = first; word < end; ++word) {
        Vec key[kVecs];
        unroll<kVecs>([&](auto v) TWOSTEP_INLINE { key[v] = load(keys + word * kTileKeys + column + v * kLanes); });
        unroll<ROWS>([&](auto row) TWOSTEP_INLINE {
          const Vec query = broadcast(queries[row * num_words + word]);
          unroll<kVecs>([&](auto v)
                            TWOSTEP_INLINE { sums[row][v] = integers::add_pairs(sums[row][v], key[v], query); });
        });
      }
      const float* scales = keys + (num_pairs + first / IntegerWords::kGroupWords) * kTileKeys;
      unroll<ROWS>([&](auto row) TWOSTEP_INLINE {
        unroll<kVecs>([&](auto v) TWOSTEP_INLINE {
          float* score = scores + row * kTileKeys + column + v * kLanes;
          const Vec scale = load(scales + column + v * kLanes), before = first == 0 ? Vec{} : load(score);
          const Vec sum = fma(integers::to_floats(sums[row][v]), scale, before);
          store(score, end < num_pairs ? sum : sum * broadcast(queries[row * num_words + num_pairs]));
        });
      });
    }
  }
}

// ---- Values ---------------------------------------------------------------------------------------------------------

// The levels of 32 numbers of 8 bits.
inline PartS widened_levels(const uint8_t* bytes) {
  typedef int8_t Narrow __attribute__((vector_size(2 * kPartLanes)));
  Narrow narrow;
  std::memcpy(&narrow, bytes, sizeof(narrow));
#if defined(__AVX512BW__)
  return (PartS)_mm512_cvtepi8_epi16((__m256i)narrow);
#elif defined(__AVX2__) && defined(__FMA__)
  return (PartS)_mm256_cvtepi8_epi16((__m128i)narrow);
#else
  return __builtin_convertvector(narrow, PartS);
#endif
}

// Pairs of x and y: of each eight numbers the first four, or the others.
template <bool OTHERS>
inline PartI interleaved(PartS x, PartS y) {
#if defined(__AVX512BW__)
  const __m512i a = (__m512i)x, b = (__m512i)y;
  return (PartI)(OTHERS ? _mm512_unpackhi_epi16(a, b) : _mm512_unpacklo_epi16(a, b));
#elif defined(__AVX2__) && defined(__FMA__)
  const __m256i a = (__m256i)x, b = (__m256i)y;
  return (PartI)(OTHERS ? _mm256_unpackhi_epi16(a, b) : _mm256_unpacklo_epi16(a, b));
#else
  constexpr int i = OTHERS ? 4 : 0;
  return (PartI)PartS{x[i], y[i], x[i + 1], y[i + 1], x[i + 2], y[i + 2], x[i + 3], y[i + 3]};
#endif
}

// A whole group of two values as pairs, the first or the second sixteen of them. With 8 bits of each eight numbers the
// first four are in the first sixteen.
template <int SECOND>
TWOSTEP_INLINE inline Vec pair_up(Quantized<8>, const uint8_t* a, const uint8_t* b) {
  return each_part([&](int i) {
    const int64_t offset = i * 2 * kPartLanes;
    return (PartF)interleaved<SECOND>(widened_levels(a + offset), widened_levels(b + offset));
  });
}

template <int SECOND>
TWOSTEP_INLINE inline Vec pair_up(Quantized<4>, const uint8_t* a, const uint8_t* b) {
  return each_part([&](int i) {
    const auto bytes = [&](const uint8_t* from) {
      typedef uint8_t Narrow __attribute__((vector_size(kPartLanes)));
      Narrow narrow;
      std::memcpy(&narrow, from + i * kPartLanes, sizeof(narrow));
#if defined(__AVX512F__)
      return (PartI)_mm512_cvtepu8_epi32((__m128i)narrow);
#elif defined(__AVX2__) && defined(__FMA__)
      return (PartI)_mm256_cvtepu8_epi32(__m128i{(long long)narrow, 0});
#else
      return __builtin_convertvector(narrow, PartI);
#endif
    };
    const PartI pairs = bytes(a) | bytes(b) << 16;
    return (PartF)((PartS)((SECOND ? pairs >> 4 : pairs) & 0x000f000f) - 8);
  });
}

// Returns the sixteen sums from `column` on in the order of the numbers, where a whole group's are as `pair_up` has it.
inline Vec in_order(Quantized<8>, const float* group, int64_t column) {
  const auto quad = [&](int64_t i) {
    Quad quad;
    std::memcpy(&quad, group + column / 2 + i, sizeof(quad));
    return quad;
  };
  return concatenate(quad(0), quad(kLanes), quad(4), quad(kLanes + 4));
}
inline Vec in_order(Quantized<4>, const float* group, int64_t column) { return load(group + column); }

// ---- The interface of tile arithmetic for attention/worker.h --------------------------------------------------------

// Values are read in place. Their memory has the scales [groups][kTileKeys]; then, for each row of a block and each
// group, the weights times these scales as pairs of levels, key k beside k + 16; and then the units of these.
template <int BITS>
class IntegerTiles {
 public:
  using Element = float;
  using Words = IntegerWords;
  using Format = Quantized<BITS>;
  using Stored = uint8_t;
  static constexpr int kRowBlock = kMaxRows, kRowsPerTask = 64;

  static int64_t query_words(int64_t head_size) { return IntegerWords::num_words(head_size); }
  static int64_t value_words(int64_t stride) {
    return divide_up(stride, Format::kGroup) * (kTileKeys + kMaxRows * (kTilePairs + 1));
  }

  static void load_keys(const Stored* cache, int64_t row, int64_t head_size, const int64_t* entries, float* target) {
    const auto rows = sixteen_rows(cache, row, entries);
    for_each_pair(Format(), rows, head_size, [&](int64_t number, Vec pairs) TWOSTEP_INLINE {
      store(target + (number / 4 * 2 + number % 2) * kTileKeys, pairs);
    });
    for_each_scale(Format(), rows, head_size, [&](int64_t group, Vec scales) TWOSTEP_INLINE {
      store(target + (head_size / 2 + group) * kTileKeys, scales);
    });
  }

  void load_values(const Stored* cache, int64_t row, int64_t row_numbers, int64_t value_size, const int64_t* entries,
                   int64_t first, int64_t /*num_keys*/, float* memory) {
    row_numbers_ = row_numbers, size_ = value_size, groups_ = divide_up(value_size, Format::kGroup);
    scales_ = memory, weights_ = scales_ + groups_ * kTileKeys, units_ = weights_ + kMaxRows * groups_ * kTilePairs;
    const auto rows = sixteen_rows(cache, row, entries + first);
    std::copy(rows.begin(), rows.end(), at_ + first);
    for_each_scale(Format(), rows, row_numbers, [&](int64_t group, Vec scales) TWOSTEP_INLINE {
      if (group < groups_) store(memory + group * kTileKeys + first, scales);
    });
  }

  static void score(int rows, const float* queries, const float* keys, int64_t num_words, float* scores) {
    with_rows(rows, [&](auto n) { score_integers<n.value>(queries, keys, num_words, scores); });
  }

  void put_weights(int row, const Vec (&weights)[kTileVecs], const float*) {
    for (int64_t group = 0; group < groups_; ++group) {
      Vec x[kTileVecs];
      Dots magnitudes{};
      for (int v = 0; v < kTileVecs; ++v) {
        x[v] = weights[v] * load(scales_ + group * kTileKeys + v * kLanes);
        magnitudes = integers::larger(magnitudes, x[v]);
      }
      const Rounding rounding(integers::fold_larger(magnitudes));
      units_[row * groups_ + group] = rounding.unit;
      float* pairs = weights_ + (row * groups_ + group) * kTilePairs;
      for (int v = 0; v < kTileVecs; v += 2)
        store(pairs + v / 2 * kLanes, pairs_of(x[v], x[v + 1], broadcast(rounding.inverse)));
    }
  }

  void add(int rows, const float*, const float* factors, const float*, int begin, int end, int64_t stride,
           float* out) const {
    with_rows(rows, [&](auto n) {
      // As many vectors as have registers for their sums.
      constexpr int kVecs = n.value > 4 ? std::min(2, vectors_at_once(n.value)) : vectors_at_once(n.value);
      const int64_t whole = size_ / Format::kGroup;
      int64_t group = 0;
      if constexpr (kVecs == 4)
        for (; group + 2 <= whole; group += 2) add_columns<n.value, 4, 0>(group, factors, begin, end, stride, out);
      for (; group < whole; ++group) {
        add_columns<n.value, std::min(kVecs, 2), 0>(group, factors, begin, end, stride, out);
        if constexpr (kVecs == 1) add_columns<n.value, 1, 1>(group, factors, begin, end, stride, out);
      }
      if (group < groups_) add_half_group<n.value>(factors, begin, end, stride, out);
    });
  }

  // Returns sixteen of a row's sums, from `column` on.
  static Vec load_sums(const float* out, int64_t size, int64_t column) {
    const int64_t group = column / Format::kGroup * Format::kGroup;
    return size - group < Format::kGroup ? load(out + column) : in_order(Format(), out + group, column - group);
  }

 private:
  static constexpr int kTilePairs = kTileKeys / 2;

  // The low halves of what two vectors are after rounding.
  static Vec pairs_of(Vec a, Vec b, Vec inverse) {
    const Vec shift = broadcast(12582912.0f);  // leaves integers in the low bits
    const Vec low = fma(a, inverse, shift), high = fma(b, inverse, shift);
    return each_part([&](int i) { return (PartF)(((PartU)low.part[i] & 0xffffu) | (PartU)high.part[i] << 16); });
  }

  // out[row] = out[row] * factors[row] + the sum over keys [begin, end) of weights times values, for VECS vectors of
  // columns from vector FIRST of a group on; `load(v, a, b)` are those of the values a and b.
  template <int ROWS, int VECS, int FIRST, class Load>
  void add_vectors(int64_t group, const float* factors, int begin, int end, int64_t stride, float* out,
                   Load load_pairs) const {
    Dots sums[ROWS][VECS] = {};
    const float* weights = weights_ + group * kTilePairs;
    for (int half = 0; half < 2; ++half) {
      const int first = half * kTilePairs, count = std::min(kLanes, end - first);
      if (first + kTilePairs <= begin) continue;
      for (int i = 0; i < count; ++i) {
        Vec pairs[VECS];
        unroll<VECS>([&](auto v) TWOSTEP_INLINE {
          pairs[v] = load_pairs(v, at_[first + i], at_[first + kLanes + i]);
        });
        unroll<ROWS>([&](auto row) TWOSTEP_INLINE {
          unroll<VECS>([&](auto v) TWOSTEP_INLINE {
            const int64_t number = (row * groups_ + (FIRST + v) / 2) * kTilePairs + half * kLanes + i;
            sums[row][v] = integers::add_pairs(sums[row][v], pairs[v], broadcast(weights[number]));
          });
        });
      }
    }
    unroll<ROWS>([&](auto row) TWOSTEP_INLINE {
      unroll<VECS>([&](auto v) TWOSTEP_INLINE {
        float* target = out + row * stride + group * Format::kGroup + (FIRST + v) * kLanes;
        const Vec unit = broadcast(units_[row * groups_ + group + (FIRST + v) / 2]);
        store(target, fma(integers::to_floats(sums[row][v]), unit, load(target) * broadcast(factors[row])));
      });
    });
  }

  template <int ROWS, int VECS, int FIRST>
  void add_columns(int64_t group, const float* factors, int begin, int end, int64_t stride, float* out) const {
    constexpr int64_t kBytes = Format::level_bytes(Format::kGroup);
    add_vectors<ROWS, VECS, FIRST>(group, factors, begin, end, stride, out,
                                   [&](auto v, const uint8_t* a, const uint8_t* b) TWOSTEP_INLINE {
                                     const int64_t offset = (group + (FIRST + v) / 2) * kBytes;
                                     return pair_up<(FIRST + v) % 2>(Format(), a + offset, b + offset);
                                   });
  }

  // The last sixteen columns.
  template <int ROWS>
  void add_half_group(const float* factors, int begin, int end, int64_t stride, float* out) const {
    const int64_t group = groups_ - 1, column = group * Format::kGroup;
    add_vectors<ROWS, 1, 0>(group, factors, begin, end, stride, out,
                            [&](auto, const uint8_t* a, const uint8_t* b) TWOSTEP_INLINE {
                              const Dots low = integers::to_integers(load_levels(Format(), a, row_numbers_, column));
                              const Dots high = integers::to_integers(load_levels(Format(), b, row_numbers_, column));
                              return each_part([&](int i) {
                                return (PartF)((low.part[i] & 0xffff) | (PartI)((PartU)high.part[i] << 16));
                              });
                            });
  }

  const uint8_t* at_[kTileKeys];
  int64_t row_numbers_, size_, groups_;  // numbers of a row, and the first of them that are the value
  float *scales_, *weights_, *units_;
};

}  // namespace twostep::attention
