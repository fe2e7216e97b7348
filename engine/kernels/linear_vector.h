// Linear layers over prepacked weights whose every output is a sum in one fixed order, so that a row's result does
// not depend on how many rows there are, where it stands among them, or how many threads run.
//
// Weights are stored as panels of kPanel columns, [ceil(N / kPanel)][ceil(K / pack)][kPanel][pack], zero padded. One
// micro-kernel, a template over the number of rows in registers, walks a panel from k = 0 to K with explicit fused
// multiply-adds: rows of a full tile and rows of a tail run the same instructions. The compiler's target selects the
// vector width and, for bfloat16, the dot-product instruction; everything else is shared.

#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "huge_pages.h"
#include "linear.h"

#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace twostep::vector {

// kTileRows * kVectors sums, kVectors weights and one value of x fill the vector registers.
#if defined(__AVX512F__)
constexpr int kVectorBytes = 64, kVectors = 3, kTileRows = 8;
#elif defined(__AVX2__) && defined(__FMA__)
constexpr int kVectorBytes = 32, kVectors = 2, kTileRows = 6;
#elif defined(__aarch64__)
constexpr int kVectorBytes = 16, kVectors = 3, kTileRows = 8;
#else
constexpr int kVectorBytes = 16, kVectors = 2, kTileRows = 6;
#endif
constexpr int kLanes = kVectorBytes / 4;
constexpr int kPanel = kLanes * kVectors;  // columns of one panel
constexpr int64_t kRowsPerTask = 16 * kTileRows;

typedef float Vec __attribute__((vector_size(kVectorBytes)));
typedef uint32_t VecU32 __attribute__((vector_size(kVectorBytes)));
typedef uint16_t VecU16 __attribute__((vector_size(kVectorBytes / 2)));

inline Vec fused_multiply_add(Vec a, Vec b, Vec c) {
#if defined(__AVX512F__)
  return (Vec)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__AVX2__) && defined(__FMA__)
  return (Vec)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__FP_FAST_FMAF)
  for (int lane = 0; lane < kLanes; ++lane) c[lane] = __builtin_fmaf(a[lane], b[lane], c[lane]);
  return c;
#else
  return a * b + c;  // a target without fused multiply-add has nothing to contract this into
#endif
}

inline float widen(at::BFloat16 value) {
  const uint32_t bits = uint32_t(value.x) << 16;
  float wide;
  std::memcpy(&wide, &bits, sizeof(wide));
  return wide;
}

// The bits of the nearest bfloat16, ties to even. The NaNs there can be have zeros in the low half, as all bfloat16
// numbers, and stay NaNs.
inline VecU32 rounded_bits(Vec values) {
  const VecU32 bits = (VecU32)values;
  return (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
}

// What a format tells the micro-kernel: how to load one vector of weights, kLanes columns times kPack values along K.
struct Float32 {
  using Element = float;
  using Weights = Vec;
  using Input = Vec;
  static constexpr int kPack = 1;
  static Weights load(const Element* p) {
    Vec w;
    std::memcpy(&w, p, sizeof(w));
    return w;
  }
  static Input broadcast(const Element* x) { return *x - Vec{}; }
  static Input broadcast_last(const Element* x) { return broadcast(x); }
  static Vec step(Vec sum, Weights w, Input x) { return fused_multiply_add(w, x, sum); }
};

#if defined(__AVX512BF16__)
struct BFloat16 {
  using Element = at::BFloat16;
  using Weights = __m512bh;
  using Input = __m512bh;
  static constexpr int kPack = 2;  // vdpbf16ps sums pairs along K
  static Weights load(const Element* p) { return (__m512bh)_mm512_loadu_si512(p); }
  static Input broadcast(const Element* x) {
    int32_t pair;
    std::memcpy(&pair, x, sizeof(pair));
    return (__m512bh)_mm512_set1_epi32(pair);
  }
  static Input broadcast_last(const Element* x) { return (__m512bh)_mm512_set1_epi32(x->x); }
  static Vec step(Vec sum, Weights w, Input x) { return (Vec)_mm512_dpbf16_ps((__m512)sum, w, x); }
};
#else
struct BFloat16 {
  using Element = at::BFloat16;
  using Weights = Vec;
  using Input = Vec;
  static constexpr int kPack = 1;
  static Weights load(const Element* p) {
    VecU16 w;
    std::memcpy(&w, p, sizeof(w));
    return (Vec)(__builtin_convertvector(w, VecU32) << 16);
  }
  static Input broadcast(const Element* x) { return widen(*x) - Vec{}; }
  static Input broadcast_last(const Element* x) { return broadcast(x); }
  static Vec step(Vec sum, Weights w, Input x) { return fused_multiply_add(w, x, sum); }
};
#endif

inline void narrow_store(Vec values, float* out) { std::memcpy(out, &values, sizeof(values)); }

inline void narrow_store(Vec values, at::BFloat16* out) {
  const VecU16 half = __builtin_convertvector(rounded_bits(values), VecU16);
  std::memcpy(out, &half, sizeof(half));
}

// Asks for a later step of that many elements. One row is faster than memory: it asks further ahead.
template <int kRows, int kStep, class Element>
TWOSTEP_INLINE inline void ask_for_step(const Element* at) {
  const char* ahead = reinterpret_cast<const char*>(at + kStep * (kRows == 1 ? 64 : 16));
  for (size_t byte = 0; byte < kStep * sizeof(Element); byte += 64) __builtin_prefetch(ahead + byte);
}

// Rows [row, row + kRows) times one panel.
template <class Format, int kRows>
void multiply_tile(const Problem<typename Format::Element>& p, int64_t row, int64_t panel,
                   const typename Format::Element* packed) {
  using Element = typename Format::Element;
  constexpr int kStep = kPanel * Format::kPack;
  const Element* at = packed + panel * kStep * divide_up(p.k, Format::kPack);
  const Element* x = p.x + row * p.k;
  Vec sums[kRows][kVectors] = {};
  const auto step = [&](auto broadcast, int64_t k) {
    ask_for_step<kRows, kStep>(at);
    typename Format::Weights weights[kVectors];
    for (int v = 0; v < kVectors; ++v) weights[v] = Format::load(at + v * kLanes * Format::kPack);
    for (int r = 0; r < kRows; ++r) {
      const auto value = broadcast(x + r * p.k + k);
      for (int v = 0; v < kVectors; ++v) sums[r][v] = Format::step(sums[r][v], weights[v], value);
    }
    at += kStep;
  };
  const int64_t whole = p.k - p.k % Format::kPack;
  for (int64_t k = 0; k < whole; k += Format::kPack) step(Format::broadcast, k);
  if (whole < p.k) step(Format::broadcast_last, whole);
  const int64_t column = panel * kPanel;
  const int64_t columns = std::min<int64_t>(kPanel, p.n - column);
  float bias[kPanel] = {};
  for (int64_t i = 0; p.bias && i < columns; ++i) bias[i] = float(p.bias[column + i]);
  for (int r = 0; r < kRows; ++r) {
    Element line[kPanel];
    Element* out = p.out + (row + r) * p.n + column;
    Element* target = columns == kPanel ? out : line;
    for (int v = 0; v < kVectors; ++v) {
      narrow_store(sums[r][v] + Float32::load(bias + v * kLanes), target + v * kLanes);
    }
    if (target == line) std::memcpy(out, line, columns * sizeof(Element));
  }
}

template <class Format, int kRows = kTileRows>
void multiply_rows(const Problem<typename Format::Element>& p, int64_t row, int64_t rows, int64_t panel,
                   const typename Format::Element* packed) {
  if constexpr (kRows > 0) {
    if (rows == kRows) return multiply_tile<Format, kRows>(p, row, panel, packed);
    multiply_rows<Format, kRows - 1>(p, row, rows, panel, packed);
  }
}

template <class Format>
void multiply(const Problem<typename Format::Element>& p, const typename Format::Element* packed) {
  const int64_t panels = divide_up(p.n, kPanel), row_blocks = divide_up(p.rows, kRowsPerTask);
  run_tasks(panels * row_blocks, is_small(p), [&](int64_t task) {
    const int64_t panel = task / row_blocks, start = task % row_blocks * kRowsPerTask;
    const int64_t end = std::min(start + kRowsPerTask, p.rows);
    // Tiles of nearly equal height: 8 rows run as 4 + 4, not as 6 + 2.
    int64_t row = start;
    for (int64_t tiles = divide_up(end - start, kTileRows); tiles > 0; --tiles) {
      const int64_t rows = divide_up(end - row, tiles);
      multiply_rows<Format>(p, row, rows, panel, packed);
      row += rows;
    }
  });
}

template <class Format>
at::Tensor pack(const at::Tensor& weight) {
  using Element = typename Format::Element;
  constexpr int kPack = Format::kPack;
  const int64_t n = weight.size(0), k = weight.size(1);
  const int64_t panels = divide_up(n, kPanel), groups = divide_up(k, kPack);
  at::Tensor packed = zeros_in_huge_pages({panels, groups, kPanel, kPack}, weight.options());
  const Element* source = weight.const_data_ptr<Element>();
  Element* target = packed.mutable_data_ptr<Element>();
  run_tasks(panels, false, [&](int64_t panel) {
    const int64_t columns = std::min<int64_t>(kPanel, n - panel * kPanel);
    for (int64_t column = 0; column < columns; ++column) {
      const Element* from = source + (panel * kPanel + column) * k;
      Element* to = target + panel * groups * kPanel * kPack + column * kPack;
      for (int64_t i = 0; i < k; ++i) to[i / kPack * kPanel * kPack + i % kPack] = from[i];
    }
  });
  return packed;
}

}  // namespace twostep::vector
