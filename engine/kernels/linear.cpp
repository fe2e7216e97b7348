// Linear layers over prepacked weights whose every output is a sum in one fixed order, so that a row's result does
// not depend on how many rows there are, where it stands among them, or how many threads run.
//
// Weights are stored as panels of kPanel columns, [ceil(N / kPanel)][ceil(K / pack)][kPanel][pack], zero padded. One
// micro-kernel, a template over the number of rows in registers, walks a panel from k = 0 to K with explicit fused
// multiply-adds: rows of a full tile and rows of a tail run the same instructions. The compiler's target selects the
// vector width and, for bfloat16, the dot-product instruction; everything else is shared.

#include <torch/library.h>

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "linear.h"

#if defined(__AVX2__)
#include <immintrin.h>
#endif
#if defined(__AMX_BF16__)
#include "linear_amx.h"
#endif

namespace twostep {
namespace {

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

// Rounds to nearest even. The NaNs there can be have zeros in the low half, as all bfloat16 numbers, and stay NaNs.
inline void narrow_store(Vec values, at::BFloat16* out) {
  const VecU32 bits = (VecU32)values;
  const VecU16 half = __builtin_convertvector((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16, VecU16);
  std::memcpy(out, &half, sizeof(half));
}

// Rows [row, row + kRows) times one panel.
template <class Format, int kRows>
void multiply_tile(const Problem<typename Format::Element>& p, int64_t row, int64_t panel) {
  using Element = typename Format::Element;
  constexpr int kGroup = kPanel * Format::kPack;
  constexpr int kPrefetch = kGroup * (kRows == 1 ? 64 : 16);  // one row is faster than memory: asks further ahead
  const Element* x = p.x + row * p.k;
  const Element* w = p.packed + panel * kGroup * ((p.k + Format::kPack - 1) / Format::kPack);
  Vec sums[kRows][kVectors] = {};
  const auto step = [&](auto broadcast, int64_t k) {
    typename Format::Weights weights[kVectors];
    for (int v = 0; v < kVectors; ++v) weights[v] = Format::load(w + v * kLanes * Format::kPack);
    for (int r = 0; r < kRows; ++r) {
      const auto value = broadcast(x + r * p.k + k);
      for (int v = 0; v < kVectors; ++v) sums[r][v] = Format::step(sums[r][v], weights[v], value);
    }
  };
  const int64_t whole = p.k - p.k % Format::kPack;
  for (int64_t k = 0; k < whole; k += Format::kPack, w += kGroup) {
    const char* ahead = reinterpret_cast<const char*>(w + kPrefetch);
    for (size_t byte = 0; byte < kGroup * sizeof(Element); byte += 64) __builtin_prefetch(ahead + byte);
    step(Format::broadcast, k);
  }
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
void multiply_rows(const Problem<typename Format::Element>& p, int64_t row, int64_t rows, int64_t panel) {
  if constexpr (kRows > 0) {
    if (rows == kRows) return multiply_tile<Format, kRows>(p, row, panel);
    multiply_rows<Format, kRows - 1>(p, row, rows, panel);
  }
}

template <class Format>
void multiply(const Problem<typename Format::Element>& p) {
  const int64_t panels = (p.n + kPanel - 1) / kPanel;
  const int64_t row_blocks = (p.rows + kRowsPerTask - 1) / kRowsPerTask;
  run_tasks(panels * row_blocks, is_small(p), [&](int64_t task) {
    const int64_t panel = task / row_blocks;
    int64_t row = task % row_blocks * kRowsPerTask;
    const int64_t end = std::min(row + kRowsPerTask, p.rows);
    // Tiles of nearly equal height: 8 rows run as 4 + 4, not as 6 + 2.
    for (int64_t tiles = (end - row + kTileRows - 1) / kTileRows; tiles > 0; --tiles) {
      const int64_t rows = (end - row + tiles - 1) / tiles;
      multiply_rows<Format>(p, row, rows, panel);
      row += rows;
    }
  });
}

template <class Format>
at::Tensor pack(const at::Tensor& weight) {
  using Element = typename Format::Element;
  constexpr int kPack = Format::kPack;
  const int64_t n = weight.size(0), k = weight.size(1);
  const int64_t panels = (n + kPanel - 1) / kPanel, groups = (k + kPack - 1) / kPack;
  at::Tensor packed = at::zeros({panels, groups, kPanel, kPack}, weight.options());
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

void check_dtype(const at::Tensor& tensor) {
  TORCH_CHECK(tensor.scalar_type() == at::kFloat || tensor.scalar_type() == at::kBFloat16,
              "linear takes float32 or bfloat16, not ", tensor.scalar_type());
}

// weight [N, K] -> [panels, K groups, columns of a panel, K of a group], opaque to the caller.
at::Tensor pack_weight(const at::Tensor& weight) {
  check_dtype(weight);
  TORCH_CHECK(weight.dim() == 2 && weight.numel() > 0, "weight must be a non-empty matrix");
  const at::Tensor dense = weight.contiguous();
  if (dense.scalar_type() == at::kFloat) return pack<Float32>(dense);
#if defined(__AMX_BF16__)
  if (amx::is_granted()) return amx::pack(dense);
#endif
  return pack<BFloat16>(dense);
}

void multiply_any(const Problem<float>& p) { multiply<Float32>(p); }

void multiply_any(const Problem<at::BFloat16>& p) {
#if defined(__AMX_BF16__)
  if (amx::is_granted()) return amx::multiply(p);
#endif
  multiply<BFloat16>(p);
}

template <class Element>
at::Tensor apply(const at::Tensor& x, const at::Tensor& packed, const at::Tensor& bias, int64_t n) {
  at::Tensor out = at::empty({x.size(0), n}, x.options());
  multiply_any({x.const_data_ptr<Element>(), packed.const_data_ptr<Element>(),
                bias.defined() ? bias.const_data_ptr<Element>() : nullptr, out.mutable_data_ptr<Element>(), x.size(0),
                x.size(1), n});
  return out;
}

// x [T, K], packed of a weight [N, K], bias [N] -> [T, N]. Sums in float32, adds the bias to the sum, rounds once.
at::Tensor linear(const at::Tensor& x, const at::Tensor& packed, const std::optional<at::Tensor>& bias, int64_t n) {
  check_dtype(x);
  TORCH_CHECK(x.dim() == 2 && packed.dim() == 4, "linear takes rows [T, K] and a packed weight");
  const auto fits = [&](int64_t size, int dim) {
    return packed.size(dim) == (size + packed.size(dim + 2) - 1) / packed.size(dim + 2);
  };
  TORCH_CHECK(fits(n, 0) && fits(x.size(1), 1) && x.scalar_type() == packed.scalar_type(),
              "rows and packed weight differ in size or dtype");
  at::Tensor addend;
  if (bias.has_value()) {
    TORCH_CHECK(bias->numel() == n && bias->scalar_type() == x.scalar_type(), "bias differs in size or dtype");
    addend = bias->contiguous();
  }
  return x.scalar_type() == at::kFloat ? apply<float>(x.contiguous(), packed, addend, n)
                                       : apply<at::BFloat16>(x.contiguous(), packed, addend, n);
}

}  // namespace
}  // namespace twostep

TORCH_LIBRARY_FRAGMENT(twostep, m) {
  m.def("pack_weight(Tensor weight) -> Tensor");
  m.def("linear(Tensor x, Tensor packed, Tensor? bias, int out_features) -> Tensor");
}

TORCH_LIBRARY_IMPL(twostep, CPU, m) {
  m.impl("pack_weight", twostep::pack_weight);
  m.impl("linear", twostep::linear);
}
