// Linear layers over weights of 8 bits, in groups of 32 along K. A weight is minimum + scale * code in float32; for rows
// of bfloat16 it is rounded to the upper half of its bits, half a step away from zero. What is multiplied is that number,
// by the very instructions of the dense kernels: so results are, bit for bit, those of the dense layer that holds these
// weights. Where a weight is expanded, in registers for a few rows or in a scratch panel for many, changes nothing.
//
// For few rows a core has some 40 picoseconds per weight, if it is to keep up with memory. So a code becomes a float
// without a conversion: put into the bits of kOrigin, from bit 8 up, it makes the number kOrigin + code.
//
// A panel's group is a word per column, the scale in its upper half and the minimum in its lower, and then the codes, in
// words of four along K. The first is at bit 8, the next above it, the last at bit 0: turning a word brings one after
// the other to bit 8. The words of kLanes columns lie side by side.

#pragma once

#include <cstdint>
#include <cstring>

#include "linear_vector.h"

#if defined(__AMX_BF16__)
#include "linear_amx.h"
#endif

namespace twostep {

constexpr int64_t kInt8Group = 32;  // weights along K with one scale and one minimum

constexpr int64_t int8_group_bytes(int64_t columns) {
  return columns * (2 * sizeof(at::BFloat16) + kInt8Group);
}

namespace vector {

inline VecU32 load_words(const uint8_t* from) {
  VecU32 words;
  std::memcpy(&words, from, sizeof(words));
  return words;
}

// Numbers of kLanes columns in one group.
template <class Format>
class Expander {
 public:
  Expander() = default;
  explicit Expander(const uint8_t* header) {
    const VecU32 words = load_words(header);
    scale_ = (Vec)(words & 0xffff0000u);
    offset_ = fused_multiply_add(scale_, Vec{} - kOrigin, (Vec)(words << 16));
  }

  // The next kPack along K; `words` turn to the codes after them.
  typename Format::Weights next(VecU32& words) const {
    Vec numbers[Format::kPack];
    numbers[0] = expand((words & kCodeBits) | kOriginBits);
    if constexpr (Format::kPack == 2) numbers[1] = expand(second_of(words));
    constexpr int kBits = 8 * Format::kPack;
    words = words >> kBits | words << (32 - kBits);
    return Format::cut(numbers);
  }

 private:
  static constexpr float kOrigin = 1 << 15;  // a code's lowest bit, bit 8, is its 1
  static constexpr uint32_t kOriginBits = 0x47000000, kCodeBits = 0xff00;
  static constexpr bool kIsRounded = sizeof(typename Format::Element) == 2;

  // The words' second code at its place in kOrigin.
  static VecU32 second_of(VecU32 words) {
#if defined(__AVX512BW__)
    const __m512i origin = _mm512_set1_epi32(kOriginBits), up = _mm512_set4_epi32(0x0e00, 0x0a00, 0x0600, 0x0200);
    return (VecU32)_mm512_mask_shuffle_epi8(origin, 0x2222222222222222, (__m512i)words, up);
#else
    return (words >> 8 & kCodeBits) | kOriginBits;
#endif
  }

  // Products are exact, of 16 and 8 bits, so it makes no difference whether the target fuses them.
  Vec expand(VecU32 bits) const {
    const Vec number = fused_multiply_add((Vec)bits, scale_, offset_);
    return kIsRounded ? (Vec)((VecU32)number + 0x8000u) : number;
  }

  Vec scale_, offset_;
};

template <class Format>
struct Int8Weight {
  using Element = typename Format::Element;
  static constexpr int kStep = kPanel * Format::kPack;
  static constexpr int64_t kGroupSteps = kInt8Group / Format::kPack, kWordSteps = kGroupSteps / 8;
  static constexpr int64_t kGroupBytes = int8_group_bytes(kPanel);

  const uint8_t* packed;

  // Walks one panel, expanding it in registers.
  struct Steps {
    const uint8_t* at;
    int64_t step = 0;
    Expander<Format> expanders[kVectors];
    VecU32 words[kVectors];

    explicit Steps(const uint8_t* panel) : at(panel) {}

    template <int kRows>
    void begin() {
      if (step % kGroupSteps == 0) start_group();
      if (step++ % kWordSteps == 0) start_words();
    }
    typename Format::Weights load(int v) { return expanders[v].next(words[v]); }
    void end() {}

    void start_group() {
      for (auto& expander : expanders) expander = Expander<Format>(take());
    }
    void start_words() {
      for (VecU32& each : words) each = load_words(take());
    }
    const uint8_t* take() {
      ask_ahead(at);
      at += kVectorBytes;
      return at - kVectorBytes;
    }
  };

  template <class Multiply>
  void with_panel(int64_t panel, int64_t k, int64_t rows, const Multiply& multiply) const {
    Steps steps(packed + panel * divide_up(k, kInt8Group) * kGroupBytes);
    if (rows <= kTileRows) return multiply(steps);
    static thread_local Scratch<Element> scratch;
    const int64_t num_steps = divide_up(k, Format::kPack);
    Element* to = scratch.get(num_steps * kStep);
    for (int64_t i = 0; i < num_steps; ++i) {
      steps.template begin<1>();
      for (int v = 0; v < kVectors; ++v) Format::store(steps.load(v), to + i * kStep + v * kLanes * Format::kPack);
    }
    multiply(typename DenseWeight<Format>::Steps{to});
  }
};

}  // namespace vector

#if defined(__AMX_BF16__)
namespace amx {

// Its groups are the steps along K; the words of one tile's columns come before those of the other's.
struct Int8Weight {
  using Expander = vector::Expander<vector::BFloat16>;
  static constexpr int64_t kGroupBytes = int8_group_bytes(kPanel), kWordRows = kTile / 8;
  static_assert(kStep == kInt8Group && kTile == vector::kLanes);

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
    const uint8_t* codes = from + kPanel * sizeof(uint32_t);
    for (int64_t tile = 0; tile < 2; ++tile, from += kTile * sizeof(uint32_t)) {
      ask_ahead(from);
      const Expander expander(from);
      for (int64_t i = 0; i < 8; ++i, codes += vector::kVectorBytes) {
        ask_ahead(codes);
        vector::VecU32 words = vector::load_words(codes);
        for (int64_t row = 0; row < kWordRows; ++row, to += kStep) vector::BFloat16::store(expander.next(words), to);
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

  // Expanding asks for codes itself, but only what it expands next.
  Ahead ahead_of(const Piece& now, const Piece& then, int64_t pass, int64_t passes) const {
    if (passes == 1) return {};
    const auto* start = reinterpret_cast<const char*>(packed + (then.panel * all_steps + then.step) * kGroupBytes);
    return Ahead::share(start, then.steps * kGroupBytes / Ahead::kLine, pass, passes, now.steps);
  }
};

}  // namespace amx
#endif

}  // namespace twostep
