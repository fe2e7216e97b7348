// Writes the finished sums of AMX tiles as rows of the result.

#pragma once

#include <immintrin.h>

#include <algorithm>
#include <cstdint>

#include "base/activations.h"
#include "base/bfloat16.h"
#include "base/rows.h"
#include "base/vec.h"
#include "linear/panels_amx.h"
#include "linear/problem.h"

namespace twostep::amx {

// Finishes the sums of a row in one panel: rounded, they are the result.
struct Rounded {
  static constexpr int64_t kColumns = kPanel;  // of the result

  static void write(__m512 low, __m512 high, __mmask32 mask, BFloat16* out) {
    _mm512_mask_storeu_epi16(out, mask, (__m512i)_mm512_cvtne2ps_pbh(high, low));
  }
};

// Finishes the sums of a row in one panel: one tile of it gates the other.
template <class Op>
struct Gated {
  static constexpr int64_t kColumns = kTile;
  static_assert(kColumns == kGateBlock && kColumns == kLanes);

  static void write(__m512 gate, __m512 up, __mmask32, BFloat16* out) {
    const __m512i both = (__m512i)_mm512_cvtne2ps_pbh(up, gate);
    const Vec product = gated<Op>(widen(_mm512_castsi512_si256(both)), widen(_mm512_extracti64x4_epi64(both, 1)), out);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(out), (__m256i)_mm512_cvtneps_pbh(product.part[0]));
  }

 private:
  static Vec widen(__m256i x) { return Vec{{widened((PartH)x)}}; }
};

// Adds the bias to the finished sums of some rows of one panel, and finishes them: one row at a turn, between the tile
// multiplications that follow, which leave the vector units idle. Two rows at a turn are too many to overlap. The first
// turns are skipped, until what tiles have just stored can be read.
template <class Finish>
class RowWriter {
 public:
  explicit RowWriter(const Problem<BFloat16>& p) : p_(p), row_size_(p.n * Finish::kColumns / kPanel) {}
  ~RowWriter() { finish(); }

  // Starts with the sums of rows [row, row_end), which must stay valid until the next call.
  void start(int64_t row, int64_t row_end, int64_t panel, const float* sums) {
    finish();
    const int64_t column = panel * kPanel, columns = std::min(kPanel, p_.n - column);
    for (int64_t i = 0; p_.bias && i < columns; ++i) bias_[i] = float(p_.bias[column + i]);
    mask_ = columns == kPanel ? ~__mmask32{0} : (__mmask32{1} << columns) - 1;
    out_ = p_.out + row * row_size_ + panel * Finish::kColumns;
    sums_ = sums;
    num_rows_ = row_end - row;
    turns_to_pass_ = kTurnsToPass;
  }

  void take_turn() {
    if (turns_to_pass_ > 0) {
      --turns_to_pass_;
    } else if (num_rows_ > 0) {
      write_row();
    }
  }

 private:
  static constexpr int64_t kTurnsToPass = 16;

  void finish() {
    while (num_rows_ > 0) write_row();
  }

  // Writes a row, and prefetches its place in the next panel.
  void write_row() {
    const __m512 low = _mm512_add_ps(_mm512_load_ps(sums_), _mm512_load_ps(bias_));
    const __m512 high = _mm512_add_ps(_mm512_load_ps(sums_ + kTile), _mm512_load_ps(bias_ + kTile));
    Finish::write(low, high, mask_, out_);
    __builtin_prefetch(out_ + Finish::kColumns, 1);
    --num_rows_, out_ += row_size_, sums_ += kPanel;
  }

  const Problem<BFloat16>& p_;
  const int64_t row_size_;  // of the result
  alignas(64) float bias_[kPanel] = {};
  __mmask32 mask_ = 0;
  BFloat16* out_ = nullptr;
  const float* sums_ = nullptr;
  int64_t num_rows_ = 0, turns_to_pass_ = 0;
};

}  // namespace twostep::amx
