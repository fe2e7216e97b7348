// Panels of AMX tiles in 11 bits a number (coded/bf16_11bit.h).

#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "base/bfloat16.h"
#include "base/prefetch.h"
#include "base/tensor.h"
#include "coded/bf16_11bit.h"
#include "linear/panels_amx.h"

namespace twostep::amx {

constexpr int64_t kStepUnits = kStepElements / exponents::kUnit, kStepQuarters = kStepUnits * exponents::kQuarters;

struct CodedPanels {
  static constexpr int64_t kStepBytes = kStepUnits * exponents::kUnitBytes;
  // In a single pass, every vector prefetches later ones, which is faster than a share after each product.
  static constexpr bool kPrefetchesItself = true;

  class Steps;

  exponents::Panels panels;
  uint8_t* places;  // memory of a piece's expanded steps

  const uint8_t* start_of(const Piece& piece) const { return panels.unit_of(piece.panel, piece.step * kStepUnits); }
  Steps only_pass(const Piece& piece) const;

  // Expands a piece for several passes; meanwhile what comes next is prefetched, kTurns times in a step.
  static constexpr int64_t kTurns = 4;
  PlainPanels::Steps expanded(const Piece& piece, Prefetcher& ahead) const {
    exponents::Expander expander(panels, piece.panel, piece.step * kStepUnits);
    uint8_t* to = places;
    for (int64_t step = 0; step < piece.steps; ++step, to += PlainPanels::kStepBytes) {
      unroll<kStepQuarters>([&](auto i) TWOSTEP_INLINE {
        if (i % (kStepQuarters / kTurns) == 0) ahead.fetch();
        expander.expand<false>(i % exponents::kQuarters).store(to + i * Expanded::kBytes);
      });
    }
    return {reinterpret_cast<const BFloat16*>(places)};
  }
};

// The steps of a piece in a single pass, each of which is expanded while the one before is multiplied: two places, in
// turn, are enough for them.
class CodedPanels::Steps {
 public:
  Steps(const CodedPanels& coded, const Piece& piece)
      : expander_(coded.panels, piece.panel, piece.step * kStepUnits), places_(coded.places), left_(piece.steps) {}

  const BFloat16* operator[](int64_t step) const { return reinterpret_cast<const BFloat16*>(place_of(step)); }

  template <int kRowTiles>
  void prepare_first() {
    prepare<kRowTiles, 1>(0);
  }

  // Expands a share of the next step, an equal one after each product.
  template <int kRowTiles>
  TWOSTEP_INLINE void prepare_next(int product) {
    prepare<kRowTiles, 2 * kRowTiles>(product);
  }

 private:
  template <int kRowTiles, int kShares>
  TWOSTEP_INLINE void prepare(int share) {
    constexpr int64_t kQuarters = kStepQuarters / kShares;
    if (left_ == 0) return;
    uint8_t* to = place_of(next_);
    unroll<kQuarters>([&](auto i) TWOSTEP_INLINE {
      const int number = share * kQuarters + i;
      expander_.expand<true>(number % exponents::kQuarters).store(to + number * Expanded::kBytes);
    });
    if (share == kShares - 1) ++next_, --left_;
  }

  uint8_t* place_of(int64_t step) const { return places_ + (step & 1) * PlainPanels::kStepBytes; }

  exponents::Expander expander_;
  uint8_t* places_;
  int64_t next_ = 0, left_;
};

inline CodedPanels::Steps CodedPanels::only_pass(const Piece& piece) const { return {*this, piece}; }

// Whether `packed` was made by pack_coded of a weight [n, k].
inline bool is_coded(const Tensor& packed, int64_t n, int64_t k) {
  return exponents::is_coded(packed, divide_up(n, kPanel), divide_up(k, kStep) * kStepUnits);
}

// Codes a weight; returns nothing where its numbers do not allow it.
inline std::optional<Tensor> pack_coded(const Tensor& weight) {
  return exponents::pack(weight, kPanel, divide_up(weight.size(1), kStep) * kStepUnits,
                         [&](const auto& use) { for_each_panel(weight, use); });
}

}  // namespace twostep::amx
