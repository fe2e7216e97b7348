// The tile arithmetic of attention/worker.h in vector registers, for every instruction set and type.
//
// Queries and keys are packed into 32-bit words along the head size, padded with zeros. In memory a word is one float32
// or two bfloat16; `Words` defines how it is loaded and how two words are multiplied.

#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "attention/problem.h"
#include "attention/quantized_rows.h"
#include "base/bfloat16.h"
#include "base/int_dot.h"
#include "base/sizes.h"
#include "base/vec.h"

namespace twostep::attention {

constexpr int kTileKeys = 64;
constexpr int kTileVecs = kTileKeys / kLanes;

// Sums of a block of rows stay in registers: so many vectors of each row. Few rows take several at once, since a sum
// waits for the one before.
#if defined(__AVX512F__)
constexpr int kMaxRows = 7;
constexpr int vectors_at_once(int /*rows*/) { return 4; }
#else
constexpr int kMaxRows = 6;
constexpr int vectors_at_once(int rows) { return rows * kParts > 4 ? 1 : rows * kParts > 2 ? 2 : 4; }
#endif

// ---- Words ----------------------------------------------------------------------------------------------------------

struct FloatWords {
  static constexpr int kElementsPerWord = 1, kWordsPerStored = 1;

  static void load_query(const float* source, int64_t size, float* target) { std::copy_n(source, size, target); }
  static void store_keys(float* target, Vec words) { store(target, words); }
  static Vec multiply_add(Vec sum, Vec keys, const float* query) { return fma(keys, broadcast(*query), sum); }
};

// Each bfloat16 becomes a float32 word of its own: two words where memory had one.
struct WidenedWords {
  static constexpr int kElementsPerWord = 2, kWordsPerStored = 2;

  template <class Element>
  static void load_query(const Element* source, int64_t size, float* target) {
    for (int64_t i = 0; i < size; ++i) target[i] = float(source[i]);
  }
  static void store_keys(float* target, Vec words) {
    store(target, each_part([&](int i) { return (PartF)((PartU)words.part[i] << 16); }));
    store(target + kTileKeys, each_part([&](int i) { return (PartF)((PartU)words.part[i] & 0xffff0000u); }));
  }
  static Vec multiply_add(Vec sum, Vec keys, const float* query) { return fma(keys, broadcast(*query), sum); }
};

// Pairs of bfloat16 stay as they are; their products are exact in float32.
struct PairWords {
  static constexpr int kElementsPerWord = 2, kWordsPerStored = 1;

  static void load_query(const BFloat16* source, int64_t size, float* target) {
    std::memcpy(target, source, size * sizeof(source[0]));
  }
  static void load_query(const float* source, int64_t size, float* target) {
    auto* halves = reinterpret_cast<BFloat16*>(target);
    for_each_vector(size,
                    [&](int64_t i, int64_t count) { store_upto(halves + i, count, load_upto(source + i, count)); });
  }
  static void store_keys(float* target, Vec words) { store(target, words); }
#if defined(__AVX512BF16__)
  static Vec multiply_add(Vec sum, Vec keys, const float* query) {
    const __m512bh pair = (__m512bh)_mm512_set1_ps(*query);
    return Vec{{(PartF)_mm512_dpbf16_ps((__m512)sum.part[0], (__m512bh)(__m512)keys.part[0], pair)}};
  }
#endif
};

// Number of words that a head of this size is packed into: keys are transposed four stored words at a time.
template <class Words>
inline int64_t num_words(int64_t head_size) {
  return round_up(head_size, 4 * Words::kElementsPerWord) / Words::kElementsPerWord * Words::kWordsPerStored;
}
// ---- Loading a tile -------------------------------------------------------------------------------------------------

// Four stored words of one key; those past the head size are zero.
template <class Element>
inline Quad load_words(const Element* key, int64_t first, int64_t head_size) {
  constexpr int64_t kElements = sizeof(Quad) / sizeof(Element);
  Quad words{};
  if (first + kElements <= head_size) {
    std::memcpy(&words, key + first, sizeof(words));
  } else {
    std::memcpy(&words, key + first, (head_size - first) * sizeof(Element));
  }
  return words;
}

// Sixteen keys become columns of target [num_words][kTileKeys].
template <class Words, class Element>
inline void load_sixteen_keys(Plain<Element>, const SixteenRows<Element>& keys, int64_t head_size, float* target) {
  constexpr int kElements = 4 * Words::kElementsPerWord;
  for (int64_t first = 0; first < head_size; first += kElements) {
    const auto words = [&](int key) { return load_words(keys[key], first, head_size); };
    Vec v[4];
#pragma GCC unroll 4
    for (int r = 0; r < 4; ++r) v[r] = concatenate(words(r), words(4 + r), words(8 + r), words(12 + r));
    transpose_quarters(v);
#pragma GCC unroll 4
    for (int r = 0; r < 4; ++r) {
      Words::store_keys(target, v[r]);
      target += Words::kWordsPerStored * kTileKeys;
    }
  }
}

// Calls f with the number of rows, 1 to kMaxRows, as a compile-time constant.
template <class F>
inline void with_rows(int rows, F f) {
  switch (rows) {
    case 1: return f(std::integral_constant<int, 1>{});
    case 2: return f(std::integral_constant<int, 2>{});
    case 3: return f(std::integral_constant<int, 3>{});
    case 4: return f(std::integral_constant<int, 4>{});
    case 5: return f(std::integral_constant<int, 5>{});
    case 6: return f(std::integral_constant<int, 6>{});
    default: return f(std::integral_constant<int, kMaxRows>{});
  }
}

// ---- ROWS query rows against a tile ---------------------------------------------------------------------------------

// scores[row][key] = sum over words, in order; keys is [num_words][kTileKeys].
template <class Words, int ROWS>
void score_rows(const float* queries, const float* keys, int64_t num_words, float* scores) {
  constexpr int kVecs = vectors_at_once(ROWS);
  for (int column = 0; column < kTileKeys; column += kVecs * kLanes) {
    Vec sums[ROWS][kVecs] = {};
    for (int64_t word = 0; word < num_words; ++word) {
      unroll<ROWS>([&](auto row) TWOSTEP_INLINE {
        unroll<kVecs>([&](auto v) TWOSTEP_INLINE {
          const Vec key = load(keys + word * kTileKeys + column + v * kLanes);
          sums[row][v] = Words::multiply_add(sums[row][v], key, queries + row * num_words + word);
        });
      });
    }
    unroll<ROWS>([&](auto row) TWOSTEP_INLINE {
      unroll<kVecs>([&](auto v) TWOSTEP_INLINE {
        store(scores + row * kTileKeys + column + v * kLanes, sums[row][v]);
      });
    });
  }
}

// A tile's values, read in place: expanding them takes no time beside the products of a block of rows.
template <class Element>
struct Values {
  const Element* at[kTileKeys];
  int64_t size;

  // The sixteen numbers of a value from `column` on, or the `count` that are left.
  Vec load(int64_t key, int64_t column, int64_t count) const { return load_upto(at[key] + column, count); }
};

// out[row] = out[row] * factors[row] + sum over keys [begin, end), in order, of weights[row][key] * values[key], for
// VECS vectors of columns; several are within the values.
template <int ROWS, int VECS, class Element>
void add_columns(const float* weights, const float* factors, const Values<Element>& values, int64_t column, int begin,
                 int end, int64_t stride, float* out) {
  Vec sums[ROWS][VECS];
  unroll<ROWS>([&](auto row) TWOSTEP_INLINE {
    unroll<VECS>([&](auto v) TWOSTEP_INLINE {
      sums[row][v] = load(out + row * stride + column + v * kLanes) * broadcast(factors[row]);
    });
  });
  for (int key = begin; key < end; ++key) {
    Vec value[VECS];
    unroll<VECS>([&](auto v) TWOSTEP_INLINE {
      const int64_t first = column + v * kLanes;
      value[v] = values.load(key, first, VECS > 1 ? kLanes : values.size - first);
    });
    unroll<ROWS>([&](auto row) TWOSTEP_INLINE {
      const Vec weight = broadcast(weights[row * kTileKeys + key]);
      unroll<VECS>([&](auto v) TWOSTEP_INLINE { sums[row][v] = fma(weight, value[v], sums[row][v]); });
    });
  }
  unroll<ROWS>([&](auto row) TWOSTEP_INLINE {
    unroll<VECS>([&](auto v) TWOSTEP_INLINE { store(out + row * stride + column + v * kLanes, sums[row][v]); });
  });
}

template <int ROWS, class Element>
void add_rows(const float* weights, const float* factors, const Values<Element>& values, int begin, int end,
              int64_t stride, float* out) {
  constexpr int kVecs = vectors_at_once(ROWS);
  int64_t column = 0;
  for (; column + kVecs * kLanes <= values.size; column += kVecs * kLanes)
    add_columns<ROWS, kVecs>(weights, factors, values, column, begin, end, stride, out);
  for (; column < stride; column += kLanes)
    add_columns<ROWS, 1>(weights, factors, values, column, begin, end, stride, out);
}

// ---- The interface of tile arithmetic for attention/worker.h --------------------------------------------------------

template <class TheElement, class TheWords, class TheFormat = Plain<TheElement>>
struct VectorTiles {
  using Element = TheElement;  // of queries and outputs
  using Words = TheWords;
  using Format = TheFormat;
  using Stored = typename Format::Stored;
  static constexpr int kRowBlock = kMaxRows;  // rows computed together, at most
  static constexpr int kRowsPerTask = 64;     // rows (tokens x heads of a group) that share each loaded tile

  static int64_t query_words(int64_t head_size) { return num_words<Words>(head_size); }
  static int64_t value_words(int64_t /*stride*/) { return 0; }

  // Packs the keys of sixteen entries into columns of target [num_words][kTileKeys].
  static void load_keys(const Stored* cache, int64_t row, int64_t head_size, const int64_t* entries, float* target) {
    load_sixteen_keys<Words>(Format(), sixteen_rows(cache, row, entries), head_size, target);
  }

  // Sets the values of sixteen keys from `first` on; values beyond the last key are not read.
  void load_values(const Stored* cache, int64_t row, int64_t /*row_numbers*/, int64_t value_size,
                   const int64_t* entries, int64_t first, int64_t /*num_keys*/, float* /*memory*/) {
    values_.size = value_size;
    for (int64_t key = first; key < first + kLanes; ++key) values_.at[key] = cache + entries[key] * row;
  }

  // Computes scores [rows][kTileKeys] of queries [rows][num_words].
  static void score(int rows, const float* queries, const float* keys, int64_t num_words, float* scores) {
    with_rows(rows, [&](auto n) { score_rows<Words, n.value>(queries, keys, num_words, scores); });
  }

  // Keeps a row's weights for `add`, where its scores were.
  static void put_weights(int row, const Vec (&weights)[kTileVecs], float* scores) {
    for (int v = 0; v < kTileVecs; ++v) store(scores + row * kTileKeys + v * kLanes, weights[v]);
  }

  // out [rows][stride] = out * factors + weights [rows][kTileKeys] * values, where weights outside of the keys
  // [begin, end) are all zero.
  void add(int rows, const float* weights, const float* factors, const float* /*values*/, int begin, int end,
           int64_t stride, float* out) const {
    with_rows(rows, [&](auto n) { add_rows<n.value>(weights, factors, values_, begin, end, stride, out); });
  }

  static Vec load_sums(const float* out, int64_t /*size*/, int64_t column) { return twostep::load(out + column); }

 private:
  Values<Stored> values_;
};

}  // namespace twostep::attention
