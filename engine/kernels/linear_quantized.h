// Weights as codes of 8 or 4 bits, in groups of 32 along K: a weight is minimum + scale * code, computed in float32 and
// rounded to the format of the rows. What is multiplied is that rounded weight, by the very instructions of the dense
// kernels: so results are, bit for bit, those of the dense layer that holds these weights. Where a weight is expanded,
// in registers for a few rows or in a scratch panel for many, changes nothing.
//
// A panel's group is [columns] scales, [columns] minimums, both bfloat16, and the codes in the order in which they are
// used, a unit of kLanes columns times kPack values along K after the other. With 4 bits, a byte holds a code of the
// unit's first half in its low bits and one of the second half in its high bits.

#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "linear_vector.h"

#if defined(__AMX_BF16__)
#include "linear_amx.h"
#endif

namespace twostep {

constexpr int64_t kQuantGroup = 32;  // weights along K with one scale and one minimum

constexpr int64_t group_bytes(int64_t columns, int64_t bits) {
  return columns * (2 * sizeof(at::BFloat16) + kQuantGroup * bits / 8);
}

namespace vector {

typedef uint8_t VecU8 __attribute__((vector_size(kLanes)));
typedef int32_t VecI32 __attribute__((vector_size(kVectorBytes)));

// GCC would widen bytes one at a time, and warns of its own intrinsic without a mask.
inline VecI32 widen(VecU8 bytes) {
#if defined(__AVX512F__)
  return (VecI32)_mm512_maskz_cvtepu8_epi32(__mmask16(-1), (__m128i)bytes);
#elif defined(__AVX2__)
  return (VecI32)_mm256_cvtepu8_epi32(_mm_cvtsi64_si128((int64_t)bytes));
#else
  return __builtin_convertvector(bytes, VecI32);
#endif
}

inline Vec to_floats(VecI32 integers) { return __builtin_convertvector(integers, Vec); }

// One unit's codes as kPack vectors.
template <int kBits, int kPack>
inline void load_codes(const uint8_t* from, Vec (&codes)[kPack]) {
  VecU8 bytes;
  if constexpr (kBits == 8) {
    for (int i = 0; i < kPack; ++i) {
      std::memcpy(&bytes, from + i * kLanes, sizeof(bytes));
      codes[i] = to_floats(widen(bytes));
    }
  } else if constexpr (kPack == 2) {
    std::memcpy(&bytes, from, sizeof(bytes));
    const VecI32 both = widen(bytes);
    codes[0] = to_floats(both & 15);
    codes[1] = to_floats(both >> 4);
  } else {
    using Half = std::conditional_t<kLanes == 16, uint64_t, std::conditional_t<kLanes == 8, uint32_t, uint16_t>>;
    typedef Half Halves __attribute__((vector_size(kLanes)));
    Half packed;
    std::memcpy(&packed, from, sizeof(packed));
    const Halves halves = {packed, Half(packed >> 4)};
    codes[0] = to_floats(widen((VecU8)halves & 15));
  }
}

// The values of kLanes columns, each as often as the column has codes in a unit.
template <int kPack>
inline void load_columns(const at::BFloat16* from, Vec (&values)[kPack]) {
  VecU16 words;
  std::memcpy(&words, from, sizeof(words));
  values[0] = (Vec)(__builtin_convertvector(words, VecU32) << 16);
#if defined(__AVX512BF16__)
  if constexpr (kPack == 2) {
    values[1] = __builtin_shuffle(values[0], VecI32{8, 8, 9, 9, 10, 10, 11, 11, 12, 12, 13, 13, 14, 14, 15, 15});
    values[0] = __builtin_shuffle(values[0], VecI32{0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7});
  }
#endif
}

// The scales and minimums of kLanes columns, ready for their units.
template <class Format, int kBits>
struct Expander {
  static constexpr int kPack = Format::kPack;
  static constexpr int64_t kUnitBytes = kLanes * kPack * kBits / 8;

  Vec scales[kPack], minimums[kPack];

  Expander() = default;
  Expander(const at::BFloat16* scales_from, const at::BFloat16* minimums_from) {
    load_columns<kPack>(scales_from, scales);
    load_columns<kPack>(minimums_from, minimums);
  }
  // The product is exact in float32, so it makes no difference whether the target fuses it.
  typename Format::Weights operator()(const uint8_t* unit) const {
    Vec values[kPack];
    load_codes<kBits, kPack>(unit, values);
    for (int i = 0; i < kPack; ++i) values[i] = fused_multiply_add(values[i], scales[i], minimums[i]);
    return Format::round(values);
  }
};

template <class Format, int kBits>
struct QuantizedWeight {
  using Element = typename Format::Element;
  static constexpr int kStep = kPanel * Format::kPack;
  static constexpr int64_t kGroupSteps = kQuantGroup / Format::kPack, kGroupBytes = group_bytes(kPanel, kBits);

  const uint8_t* packed;

  // Walks one panel, expanding it in registers.
  struct Steps {
    using ExpanderOf = Expander<Format, kBits>;
    const uint8_t* at;
    int64_t step = 0;
    ExpanderOf expanders[kVectors];

    explicit Steps(const uint8_t* panel) : at(panel) {}

    template <int kRows>
    void begin() {
      if (step++ % kGroupSteps == 0) start_group();
      constexpr int64_t kStepBytes = kVectors * ExpanderOf::kUnitBytes, kAhead = 32 * kStepBytes;
      for (int64_t byte = 0; byte < kStepBytes; byte += 64) __builtin_prefetch(at + kAhead + byte);
    }
    typename Format::Weights load(int v) const { return expanders[v](at + v * ExpanderOf::kUnitBytes); }
    void end() { at += kVectors * ExpanderOf::kUnitBytes; }

    void start_group() {
      const auto* header = reinterpret_cast<const at::BFloat16*>(at);
      for (int v = 0; v < kVectors; ++v) expanders[v] = {header + v * kLanes, header + kPanel + v * kLanes};
      at += 2 * kPanel * sizeof(at::BFloat16);
    }
  };

  template <class Multiply>
  void with_panel(int64_t panel, int64_t k, int64_t rows, const Multiply& multiply) const {
    Steps steps(packed + panel * divide_up(k, kQuantGroup) * kGroupBytes);
    if (rows <= kTileRows) return multiply(steps);
    static thread_local Scratch<Element> scratch;
    const int64_t num_steps = divide_up(k, Format::kPack);
    Element* to = scratch.get(num_steps * kStep);
    for (int64_t i = 0; i < num_steps; ++i, steps.end()) {
      steps.template begin<1>();
      for (int v = 0; v < kVectors; ++v) Format::store(steps.load(v), to + i * kStep + v * kLanes * Format::kPack);
    }
    multiply(typename DenseWeight<Format>::Steps{to});
  }
};

}  // namespace vector

#if defined(__AMX_BF16__)
namespace amx {

// Its groups are the steps along K, its units the tiles' rows, one tile's after the other's.
template <int kBits>
struct QuantizedWeight {
  using Expander = vector::Expander<vector::BFloat16, kBits>;
  static constexpr int64_t kGroupBytes = group_bytes(kPanel, kBits), kAhead = 8 * kGroupBytes;
  static_assert(kStep == kQuantGroup && kTile == vector::kLanes);

  const uint8_t* packed;
  int64_t all_steps;

  // Expands each step for the block's first rows, while the one before is multiplied; the rows below find it expanded.
  // Where there are no rows below, two places in turn are enough, which stay in the L1 cache.
  struct Steps {
    const uint8_t* from;
    BFloat16* to;
    int64_t mask, to_expand;
    int64_t step = 0;

    const BFloat16* next() {
      const int64_t now = step++;
      if (step < to_expand) expand(from + step * kGroupBytes, to + (step & mask) * kStepElements);
      return to + (now & mask) * kStepElements;
    }
  };

  static void expand(const uint8_t* from, BFloat16* to) {
    for (int64_t byte = 0; byte < kGroupBytes; byte += 64) __builtin_prefetch(from + kAhead + byte);
    const auto* header = reinterpret_cast<const BFloat16*>(from);
    const uint8_t* codes = from + 2 * kPanel * sizeof(BFloat16);
    for (int64_t tile = 0; tile < 2; ++tile) {
      const Expander expander(header + tile * kTile, header + kPanel + tile * kTile);
      for (int64_t row = 0; row < kTile; ++row, codes += Expander::kUnitBytes, to += kStep) {
        vector::BFloat16::store(expander(codes), to);
      }
    }
  }

  Steps steps_of(const Block& block, int64_t tile, int64_t panel, int64_t step, int64_t steps) const {
    static thread_local Scratch<BFloat16> scratch;
    BFloat16* to = scratch.get(kBlockPanels * kBlockSteps * kStepElements);
    const uint8_t* from = packed + (panel * all_steps + step) * kGroupBytes;
    const bool is_only = block.row_tile_end - block.row_tile <= 2;
    if (!is_only) to += (panel - block.panel) * kBlockSteps * kStepElements;
    if (tile != block.row_tile) return {from, to, -1, 0};
    expand(from, to);
    return {from, to, is_only ? 1 : -1, steps};
  }
};

}  // namespace amx
#endif

}  // namespace twostep
