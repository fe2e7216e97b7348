// The operands of the vector kernels: vectors of the compiler's target, and the formats of numbers.

#pragma once

#include <cstdint>
#include <cstring>

#include "base/bfloat16.h"
#include "base/vec.h"

namespace twostep::vector {

using Vec = PartF;  // one register
constexpr int kLanes = kPartLanes, kVectorBytes = sizeof(Vec);

// kTileRows * kVectors sums, kVectors weights and one value of x fill the vector registers. Sums of kWideningRows leave
// room to widen weights, too.
#if defined(__AVX512F__)
constexpr int kVectors = 4, kTileRows = 6, kWideningRows = 6;
#elif defined(__aarch64__)
constexpr int kVectors = 3, kTileRows = 8, kWideningRows = 8;
#else
constexpr int kVectors = 2, kTileRows = 6, kWideningRows = 4;
#endif
constexpr int kPanel = kLanes * kVectors;  // columns of one panel
constexpr int64_t kStep = 2, kStepElements = kStep * kPanel;  // of K, and of a panel

// A weight of few columns is read in panels of one vector, else most of what is read would be padding.
constexpr int64_t kNarrowColumns = kVectors / 2 * kLanes;
inline bool is_narrow(int64_t n) { return n <= kNarrowColumns; }

// Sums of one row wait for one another, so what has few bytes a number is read in panels of more columns.
constexpr int kWideVectors = 4;
#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int kWideTileRows = 6, kWideExpandingRows = 6;
#else
constexpr int kWideTileRows = 3, kWideExpandingRows = 2;
#endif

// A step of a panel in its packed memory, with the interface that every kind of step has.
struct StepInMemory {
  const char* at;

  template <int kIndex>
  TWOSTEP_INLINE Vec vector() const {
    Vec v;
    std::memcpy(&v, at + kIndex * kVectorBytes, sizeof(v));
    return v;
  }
};

// A step of pairs along K, of so many vectors, as Floats have it: a number is the lower or the upper half of a word, so
// it takes one instruction. With kKeeps, it is stored, too.
template <class Pairs, int kVectors, bool kKeeps>
struct WidenedStep {
  Pairs pairs;
  float* kept;

  template <int kIndex>
  TWOSTEP_INLINE Vec vector() const {
    const PartU words = (PartU)pairs.template vector<kIndex % kVectors>();
    const Vec numbers = (Vec)(kIndex < kVectors ? words << 16 : words & 0xffff0000u);
    if constexpr (kKeeps) std::memcpy(kept + kIndex * kLanes, &numbers, sizeof(numbers));
    return numbers;
  }
};

// A format's interface to the micro-kernel. A step of a panel is kStep along K times kPanel columns, of which kAtOnce
// along K are multiplied at once: the part i of a step has kVectors vectors of weights. `broadcast` gives a row's
// numbers for that part, x + i * kAtOnce being the first; `broadcast_last` its last number, where K ends with the first
// of a step.
template <int kVectorsOf, int kTileRowsOf>
struct Floats {
  using Element = float;
  using Weights = Vec;
  using Input = Vec;
  static constexpr int kVectors = kVectorsOf, kTileRows = kTileRowsOf, kPanel = kLanes * kVectors;
  static constexpr int kPack = 1;  // numbers of a column along K that lie side by side
  static constexpr int kAtOnce = 1;

  static Vec load(const float* p) {
    Vec v;
    std::memcpy(&v, p, sizeof(v));
    return v;
  }
  template <int kPart, int kVector>
  TWOSTEP_INLINE static Weights weights(const auto& step) {
    return step.template vector<kPart * kVectors + kVector>();
  }
  template <int kPart>
  static Input broadcast(const Element* x) {
    return x[kPart] - Vec{};
  }
  static Input broadcast_last(const Element* x) { return *x - Vec{}; }
  static Vec multiply_add(Vec sum, Weights w, Input x) { return fma_part(w, x, sum); }
};

using Float32 = Floats<kVectors, kTileRows>;
using NarrowFloat32 = Floats<1, kTileRows>;
using WideFloat32 = Floats<kWideVectors, kWideTileRows>;

#if defined(__AVX512BF16__)
constexpr bool kWidens = false;

template <int kVectorsOf>
struct BFloat16s {
  using Element = twostep::BFloat16;
  using Weights = __m512bh;
  using Input = __m512bh;
  static constexpr int kVectors = kVectorsOf, kTileRows = vector::kTileRows, kPanel = kLanes * kVectors;
  static constexpr int kPack = 2;
  static constexpr int kAtOnce = 2;  // vdpbf16ps sums pairs along K

  template <int, int kVector>
  TWOSTEP_INLINE static Weights weights(const auto& step) {
    return (__m512bh)step.template vector<kVector>();
  }
  template <int>
  static Input broadcast(const Element* x) {
    int32_t pair;
    std::memcpy(&pair, x, sizeof(pair));
    return (__m512bh)_mm512_set1_epi32(pair);
  }
  static Input broadcast_last(const Element* x) { return (__m512bh)_mm512_set1_epi32(x->bits); }
  static Vec multiply_add(Vec sum, Weights w, Input x) { return (Vec)_mm512_dpbf16_ps((__m512)sum, w, x); }
};
#else
constexpr bool kWidens = true;

// The packed format of bfloat16 that is multiplied as Floats: see WidenedPanels.
template <int kVectorsOf>
struct BFloat16s {
  using Element = twostep::BFloat16;
  static constexpr int kVectors = kVectorsOf, kTileRows = vector::kTileRows, kPanel = kLanes * kVectors;
  static constexpr int kPack = 2;
};
#endif

using BFloat16 = BFloat16s<kVectors>;
using NarrowBFloat16 = BFloat16s<1>;

inline void narrow_store(Vec values, float* out) { std::memcpy(out, &values, sizeof(values)); }

inline void narrow_store(Vec values, twostep::BFloat16* out) {
  const PartH halves = rounded_to_halves(values);
  std::memcpy(out, &halves, sizeof(halves));
}

}  // namespace twostep::vector
