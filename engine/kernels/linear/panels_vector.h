// A weight as the vector kernels read it.

#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>
#include <vector>

#include "base/huge_pages.h"
#include "base/prefetch.h"
#include "base/tensor.h"
#include "base/thread_pool.h"
#include "linear/formats_vector.h"

#if defined(__AVX2__)
#include "base/bfloat16.h"
#include "coded/bf16_12bit.h"
#endif

namespace twostep::vector {

// Panels that are multiplied straight from packed memory.
template <class FormatOf>
struct PlainPanels {
  using Format = FormatOf;
  using Element = typename Format::Element;
  static constexpr int64_t kStepElements = kStep * Format::kPanel, kStepBytes = kStepElements * sizeof(Element);
  static constexpr int64_t kPieceSteps = 128;  // at most, where several passes use a piece in the L1 cache
  static constexpr int64_t kWholeSteps = 1;  // a piece has a multiple of them
  static constexpr int64_t kFirstRows = Format::kTileRows;  // at most, of the first pass

  // A pass over the steps, one after the other; prefetches later ones if kPrefetches.
  template <bool kPrefetches>
  class Steps {
   public:
    explicit Steps(const Element* start) : at_(reinterpret_cast<const char*>(start)) {}

    TWOSTEP_INLINE StepInMemory next() {
      const char* at = at_;
      at_ += kStepBytes;
      for (int64_t i = 0; kPrefetches && i < kStepBytes; i += kLineBytes) prefetch_ahead(at + i);
      return {at};
    }

   private:
    const char* at_;
  };

  const Element* packed;
  int64_t all_steps;

  const Element* start_of(const Piece& piece) const {
    return packed + (piece.panel * all_steps + piece.step) * kStepElements;
  }
  int64_t bytes_of(const Piece& piece) const { return piece.steps * kStepBytes; }
  Steps<true> only_pass(const Piece& piece) const { return Steps<true>(start_of(piece)); }
  Steps<false> first_pass(const Piece& piece) const { return Steps<false>(start_of(piece)); }
  Steps<false> later_pass(const Piece& piece) const { return Steps<false>(start_of(piece)); }
};

#if defined(__AVX2__)
// Panels in 12 bits a number, expanded in every pass.
struct CodedPanels {
  using Format = BFloat16;
  static_assert(kStepElements == high_bytes::kUnit);
  static constexpr int64_t kStepBytes = high_bytes::kUnitBytes;
  static constexpr int64_t kPieceSteps = 512, kWholeSteps = 1, kFirstRows = kTileRows;

  struct Step {
    Expanded unit;

    template <int kIndex>
    TWOSTEP_INLINE Vec vector() const {
      return (Vec)unit.vectors[kIndex];
    }
  };

  template <bool kPrefetches>
  class Steps {
   public:
    Steps(const CodedPanels& panels, const Piece& piece) : expander_(panels.numbers, piece.panel, piece.step) {}

    TWOSTEP_INLINE Step next() { return {expander_.expand<kPrefetches>()}; }

   private:
    high_bytes::Expander expander_;
  };

  high_bytes::Panels numbers;

  const uint8_t* start_of(const Piece& piece) const { return numbers.unit_of(piece.panel, piece.step); }
  int64_t bytes_of(const Piece& piece) const { return piece.steps * kStepBytes; }
  Steps<true> only_pass(const Piece& piece) const { return {*this, piece}; }
  Steps<false> first_pass(const Piece& piece) const { return {*this, piece}; }
  Steps<false> later_pass(const Piece& piece) const { return {*this, piece}; }
};
#endif

// Panels of pairs of bfloat16, widened to float32 where no instruction multiplies them. The first of several passes
// keeps a piece's widened numbers for all others, since widening needs the ports that multiply.
template <class Pairs>
struct WidenedPanels {
  using Format = Floats<Pairs::Format::kVectors, kTileRows>;
  using Kept = PlainPanels<Format>;
  static constexpr int64_t kStepBytes = Pairs::kStepBytes;
  static constexpr int64_t kPieceSteps = (16 << 10) / Kept::kStepBytes;  // half of an L1 cache
  static constexpr int64_t kPieceElements = kPieceSteps * Kept::kStepElements;
  static constexpr int64_t kWholeSteps = 1, kFirstRows = kWideningRows;

  template <class PairSteps, bool kKeeps>
  class Steps {
   public:
    Steps(const PairSteps& pairs, float* kept) : pairs_(pairs), kept_(kept) {}

    TWOSTEP_INLINE auto next() {
      float* kept = kept_;
      if constexpr (kKeeps) kept_ += Kept::kStepElements;
      return WidenedStep<decltype(pairs_.next()), Format::kVectors, kKeeps>{pairs_.next(), kept};
    }

   private:
    PairSteps pairs_;
    float* kept_;
  };

  Pairs pairs;
  float* kept;  // a piece's widened numbers

  const auto* start_of(const Piece& piece) const { return pairs.start_of(piece); }
  int64_t bytes_of(const Piece& piece) const { return pairs.bytes_of(piece); }
  auto only_pass(const Piece& piece) const { return steps<false>(pairs.only_pass(piece)); }
  auto first_pass(const Piece& piece) const { return steps<true>(pairs.first_pass(piece)); }
  auto later_pass(const Piece& /*piece*/) const { return typename Kept::template Steps<false>(kept); }

 private:
  template <bool kKeeps, class PairSteps>
  auto steps(const PairSteps& pair_steps) const {
    return Steps<PairSteps, kKeeps>(pair_steps, kept);
  }
};

// Calls use(panel, numbers) for each panel of a weight [N, K], zero padded: [steps][kStep / pack][columns][pack].
template <class Format, class Use>
void for_each_panel(const Tensor& weight, const Use& use) {
  using Element = typename Format::Element;
  constexpr int kPack = Format::kPack, kPanel = Format::kPanel;
  const int64_t n = weight.size(0), k = weight.size(1), steps = divide_up(k, kStep);
  const Element* source = weight.const_data_ptr<Element>();
  run_tasks(divide_up(n, kPanel), false, [&](int64_t panel) {
    std::vector<Element> numbers(steps * kStep * kPanel, Element(0));
    for (int64_t column = 0; column < std::min<int64_t>(kPanel, n - panel * kPanel); ++column) {
      const Element* from = source + (panel * kPanel + column) * k;
      Element* to = numbers.data() + column * kPack;
      for (int64_t i = 0; i < k; ++i) to[i / kPack * kPanel * kPack + i % kPack] = from[i];
    }
    use(panel, numbers);
  });
}

// Packs a weight [N, K] -> [panels, steps, columns of one, kStep].
template <class Format>
Tensor pack_format(const Tensor& weight) {
  using Element = typename Format::Element;
  constexpr int64_t kPanel = Format::kPanel;
  const int64_t panels = divide_up(weight.size(0), kPanel), steps = divide_up(weight.size(1), kStep);
  Tensor packed = zeros_in_huge_pages({panels, steps, kPanel, kStep}, weight.scalar_type());
  Element* target = packed.mutable_data_ptr<Element>();
  for_each_panel<Format>(weight, [&](int64_t panel, const std::vector<Element>& numbers) {
    std::copy(numbers.begin(), numbers.end(), target + panel * steps * kStep * kPanel);
  });
  return packed;
}

// Packs a weight in one format or the other, by how many columns it has.
template <class Format, class Narrow>
Tensor pack(const Tensor& weight) {
  return is_narrow(weight.size(0)) ? pack_format<Narrow>(weight) : pack_format<Format>(weight);
}

#if defined(__AVX2__)
// Whether `packed` was made by pack_coded of a weight [n, k].
inline bool is_coded(const Tensor& packed, int64_t n, int64_t k) {
  return high_bytes::is_coded(packed, divide_up(n, kPanel), divide_up(k, kStep));
}

// Codes a weight; returns nothing where its numbers do not allow it.
inline std::optional<Tensor> pack_coded(const Tensor& weight) {
  return high_bytes::pack(weight, kPanel, divide_up(weight.size(1), kStep),
                          [&](const auto& use) { for_each_panel<BFloat16>(weight, use); });
}
#endif

}  // namespace twostep::vector
