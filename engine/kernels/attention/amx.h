// The tile arithmetic of attention in AMX tile registers, for bfloat16 on CPUs that have them: about ten times the
// multiplications per cycle of attention/vector.h.
//
// tdpbf16ps adds to each of up to 16 x 16 float32 sums the products of 16 pairs of bfloat16. Each row of sums is
// computed by itself and in one order, so how many rows a tile has changes no bit. Keys are packed as for vectors: 16
// words of 16 keys are the right operand as it stands. A weight of the softmax is float32, and rounding it to bfloat16
// would cost accuracy; it is multiplied as the sum of two bfloat16, which carries 16 bits of it.
//
// A block of 16 rows costs about 200 ns in tile instructions (as measured: 4.6 each multiplication, 2.2 each load, 4.3
// each store, one after the other) and as much in vector instructions, which are fused multiply-adds for the most part:
// for about 100 ns after any tile instruction these run at half their speed. Mixing the two by hand, the weights of one
// block between the multiplications of its neighbours, was a third slower than one after the other.

#pragma once

#include "attention/vector.h"

#if defined(__AMX_BF16__)

#include "attention/quantized_amx.h"
#include "base/amx_tiles.h"
#include "base/bfloat16.h"

namespace twostep::attention {

// A quantized key or value is rounded to bfloat16 when it is packed, and a query, which is then float32, as well.
template <class TheElement, class TheFormat>
class AmxTiles {
 public:
  using Element = TheElement;  // of queries and outputs
  using Words = PairWords;
  using Format = TheFormat;
  using Stored = typename Format::Stored;
  static constexpr int kRowBlock = 16, kRowsPerTask = 128;

  static int64_t query_words(int64_t head_size) { return round_up(num_words<Words>(head_size), 16); }
  static int64_t value_words(int64_t stride) { return kTileKeys / 2 * stride; }

  static void load_keys(const Stored* cache, int64_t row, int64_t head_size, const int64_t* entries, float* target) {
    pack_keys(Format(), sixteen_rows(cache, row, entries), head_size, target);
  }

  AmxTiles() = default;
  AmxTiles(const AmxTiles&) = delete;
  ~AmxTiles() { amx::release_tiles(); }

  // A quarter of the values as pairs of keys: row k % 16 of each half of 32 keys is (k, k + 16), so that weights, too,
  // can be paired lane by lane. Zeros for keys from num_keys on.
  static void load_values(const Stored* cache, int64_t row, int64_t row_numbers, int64_t value_size,
                          const int64_t* entries, int64_t first, int64_t num_keys, float* target) {
    const int64_t half = first / 32 * 32, begin = half + first % 32 / 2, stride = round_up(value_size, kLanes);
    for (int64_t key = begin; key < begin + 8; ++key) {
      float* pairs = target + (half / 2 + key - half) * stride;
      if (key < num_keys) {
        const bool has_other = key + 16 < num_keys;
        const Stored* other = cache + entries[has_other ? key + 16 : key] * row;
        interleave(Format(), cache + entries[key] * row, other, has_other, row_numbers, value_size, pairs);
      } else {
        std::fill_n(pairs, stride, 0.0f);
      }
    }
  }

  void score(int rows, const float* queries, const float* keys, int64_t num_words, float* scores) {
    configure(rows);
    constexpr int64_t kTileBytes = kTileKeys * sizeof(float);
    amx::zero_tile<0>(), amx::zero_tile<1>(), amx::zero_tile<2>(), amx::zero_tile<3>();
    for (int64_t word = 0; word < num_words; word += 16) {
      const float* right = keys + word * kTileKeys;
      amx::load_tile<4>(queries + word, num_words * sizeof(float));
      amx::load_tile<6>(right, kTileBytes), amx::load_tile<7>(right + kLanes, kTileBytes);
      amx::multiply_tile<0, 4, 6>(), amx::multiply_tile<1, 4, 7>();
      amx::load_tile<6>(right + 2 * kLanes, kTileBytes), amx::load_tile<7>(right + 3 * kLanes, kTileBytes);
      amx::multiply_tile<2, 4, 6>(), amx::multiply_tile<3, 4, 7>();
    }
    amx::store_tile<0>(scores, kTileBytes), amx::store_tile<1>(scores + kLanes, kTileBytes);
    amx::store_tile<2>(scores + 2 * kLanes, kTileBytes), amx::store_tile<3>(scores + 3 * kLanes, kTileBytes);
  }

  // high_ + low_ = weights, up to 2**-16 of each.
  void put_weights(int row, const Vec (&weights)[kTileVecs], const float*) {
    for (int half = 0; half < 2; ++half) {
      const PartF a = weights[2 * half].part[0], b = weights[2 * half + 1].part[0];
      const PartU a_high = rounded(a) & 0xffff0000u, b_high = rounded(b) & 0xffff0000u;
      pair_upper_halves(a_high, b_high, high_[row] + 32 * half);
      pair_upper_halves(rounded(a - (PartF)a_high), rounded(b - (PartF)b_high), low_[row] + 32 * half);
    }
  }

  void add(int rows, const float*, const float* factors, const float* values, int, int, int64_t stride,
           float* out) {
    configure(rows);
    for (int row = 0; row < rows; ++row) scale(out + row * stride, factors[row], stride);
    constexpr int64_t kWeightBytes = sizeof(high_[0]);
    amx::load_tile<2>(high_, kWeightBytes), amx::load_tile<3>(high_[0] + 32, kWeightBytes);
    amx::load_tile<4>(low_, kWeightBytes), amx::load_tile<5>(low_[0] + 32, kWeightBytes);
    int64_t column = 0;
    for (; column + 2 * kLanes <= stride; column += 2 * kLanes) add_columns<2>(values + column, stride, out + column);
    if (column < stride) add_columns<1>(values + column, stride, out + column);
  }

  static Vec load_sums(const float* out, int64_t /*size*/, int64_t column) { return twostep::load(out + column); }

 private:
  // Multiplies one or two tiles of columns, so that neither waits for its last sum; the weights are in tiles 2 to 5.
  template <int TILES>
  static void add_columns(const float* values, int64_t stride, float* out) {
    const int64_t row_bytes = stride * sizeof(float);
    const float* last_values = values + 16 * stride;  // values of keys 32 to 63
    amx::load_tile<0>(out, row_bytes), amx::load_tile<6>(values, row_bytes);
    if constexpr (TILES == 2) amx::load_tile<1>(out + kLanes, row_bytes), amx::load_tile<7>(values + kLanes, row_bytes);
    amx::multiply_tile<0, 2, 6>();
    if constexpr (TILES == 2) amx::multiply_tile<1, 2, 7>();
    amx::multiply_tile<0, 4, 6>(), amx::load_tile<6>(last_values, row_bytes);
    if constexpr (TILES == 2) amx::multiply_tile<1, 4, 7>(), amx::load_tile<7>(last_values + kLanes, row_bytes);
    amx::multiply_tile<0, 3, 6>();
    if constexpr (TILES == 2) amx::multiply_tile<1, 3, 7>();
    amx::multiply_tile<0, 5, 6>(), amx::store_tile<0>(out, row_bytes);
    if constexpr (TILES == 2) amx::multiply_tile<1, 5, 7>(), amx::store_tile<1>(out + kLanes, row_bytes);
  }

  // target[column] = the pair (even[column], odd[column]), zeros past the value's end and for an odd key that is not.
  static void interleave(Plain<BFloat16>, const BFloat16* even, const BFloat16* odd, bool has_odd,
                         int64_t /*row_numbers*/, int64_t value_size, float* target) {
    const __m512i lower = _mm512_setr_epi64(0, 1, 8, 9, 2, 3, 10, 11);
    const __m512i upper = _mm512_setr_epi64(4, 5, 12, 13, 6, 7, 14, 15);
    for (int64_t column = 0; column < value_size; column += 2 * kLanes) {
      const int64_t count = std::min<int64_t>(2 * kLanes, value_size - column);
      const __mmask32 mask = ~__mmask32{0} >> (2 * kLanes - count);
      const __m512i a = _mm512_maskz_loadu_epi16(mask, even + column);
      const __m512i b = _mm512_maskz_loadu_epi16(has_odd ? mask : 0, odd + column);
      // Columns 0 to 3, 8 to 11, 16 to 19 and 24 to 27 of 32, and those between.
      const __m512i first = _mm512_unpacklo_epi16(a, b), second = _mm512_unpackhi_epi16(a, b);
      _mm512_storeu_si512(target + column, _mm512_permutex2var_epi64(first, lower, second));
      if (count > kLanes)
        _mm512_storeu_si512(target + column + kLanes, _mm512_permutex2var_epi64(first, upper, second));
    }
  }

  template <int BITS>
  static void interleave(Quantized<BITS> format, const uint8_t* even, const uint8_t* odd, bool has_odd,
                         int64_t row_numbers, int64_t value_size, float* target) {
    pack_two_values(format, even, odd, has_odd, row_numbers, value_size, target);
  }

  template <class T>
  static void pack_keys(Plain<T> format, const SixteenRows<T>& keys, int64_t head_size, float* target) {
    load_sixteen_keys<Words>(format, keys, head_size, target);
  }

  template <int BITS>
  static void pack_keys(Quantized<BITS> format, const SixteenRows<uint8_t>& keys, int64_t head_size, float* target) {
    pack_sixteen_keys(format, keys, head_size, kTileKeys, target);
  }

  void configure(int rows) {
    if (rows == configured_rows_) return;
    amx::configure_tiles(rows);
    configured_rows_ = rows;
  }

  static void scale(float* out, float factor, int64_t stride) {
    for (int64_t i = 0; i < stride; i += kLanes) twostep::store(out + i, twostep::load(out + i) * broadcast(factor));
  }

  // The nearest bfloat16 in the upper half of each lane, for finite numbers.
  static PartU rounded(PartF x) { return (PartU)x + 0x8000u; }

  // target[lane] = the pair (upper half of a[lane], upper half of b[lane]).
  static void pair_upper_halves(PartU a, PartU b, uint16_t* target) {
    const __m512i upper_as_lower = _mm512_set4_epi32(0x0f0e0f0e, 0x0b0a0b0a, 0x07060706, 0x03020302);
    const __mmask64 lower_halves = 0x3333333333333333;
    _mm512_store_si512(target, _mm512_mask_shuffle_epi8((__m512i)b, lower_halves, (__m512i)a, upper_as_lower));
  }

  alignas(64) uint16_t high_[kRowBlock][kTileKeys], low_[kRowBlock][kTileKeys];
  int configured_rows_ = 0;
};

}  // namespace twostep::attention

#endif  // __AMX_BF16__
