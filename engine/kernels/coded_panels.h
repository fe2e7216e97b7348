// Panels of tiles in 12 bits a number, as coded_numbers.h says.

#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "ahead.h"
#include "coded_numbers.h"
#include "panels_amx.h"

namespace twostep::amx {

constexpr int64_t kStepUnits = kStepElements / coding::kUnit;

struct CodedPanels {
  static constexpr int64_t kStepBytes = kStepUnits * coding::kUnitBytes, kStepsAhead = 4;  // one is expanded already
  // Of one row tile: every vector asks for those to come, which is faster than a share after each product.
  static constexpr bool kAsksForItself = true;

  class Steps;

  coding::Panels panels;
  uint8_t* places;  // of a piece's expanded steps

  const uint8_t* start_of(const Piece& piece) const { return panels.unit_of(piece.panel, piece.step * kStepUnits); }
  Steps only_pass(const Piece& piece) const;

  // For several passes.
  PlainPanels::Steps expanded(const Piece& piece) const {
    coding::Expander expander(panels, piece.panel, piece.step * kStepUnits);
    uint8_t* to = places;
    for (int64_t step = 0; step < piece.steps; ++step, to += PlainPanels::kStepBytes) {
      for (int64_t i = 0; i < kStepUnits; ++i) {
        expander.expand_unit<false>().store(to + i * coding::kUnit * sizeof(BFloat16));
      }
      expander.put_exceptions(to, kStepElements);
    }
    return {reinterpret_cast<const BFloat16*>(places)};
  }
};

// The steps of a piece, each of which is expanded while the one before is multiplied. Where one pass is all, two places
// in turn are enough for them.
class CodedPanels::Steps {
 public:
  Steps(const CodedPanels& coded, const Piece& piece)
      : expander_(coded.panels, piece.panel, piece.step * kStepUnits), places_(coded.places), left_(piece.steps) {}

  const BFloat16* operator[](int64_t step) const { return reinterpret_cast<const BFloat16*>(place_of(step)); }

  template <int kRowTiles>
  void prepare_first() {
    prepare<kRowTiles, 1>(0);
  }

  // A share of the next step, as large as that of every other product.
  template <int kRowTiles>
  TWOSTEP_INLINE void prepare_next(int product) {
    prepare<kRowTiles, 2 * kRowTiles>(product);
  }

 private:
  template <int kRowTiles, int kShares>
  TWOSTEP_INLINE void prepare(int share) {
    constexpr int64_t kUnits = kStepUnits / kShares;
    constexpr bool kAsks = kAsksForItself && kRowTiles == 1;
    if (left_ == 0) return;
    uint8_t* to = place_of(next_);
    for (int64_t i = 0; i < kUnits; ++i) {
      expander_.expand_unit<kAsks>().store(to + (share * kUnits + i) * coding::kUnit * sizeof(BFloat16));
    }
    if (share == kShares - 1) expander_.put_exceptions(to, kStepElements), ++next_, --left_;
  }

  uint8_t* place_of(int64_t step) const { return places_ + (step & 1) * PlainPanels::kStepBytes; }

  coding::Expander expander_;
  uint8_t* places_;
  int64_t next_ = 0, left_;
};

inline CodedPanels::Steps CodedPanels::only_pass(const Piece& piece) const { return {*this, piece}; }

// Whether pack_coded made it of a weight [n, k].
inline bool is_coded(const at::Tensor& packed, int64_t n, int64_t k) {
  return coding::is_coded(packed, divide_up(n, kPanel), divide_up(k, kStep) * kStepUnits);
}

// None where the numbers do not allow it.
inline std::optional<at::Tensor> pack_coded(const at::Tensor& weight) {
  return coding::pack(weight, kPanel, divide_up(weight.size(1), kStep) * kStepUnits,
                      [&](const auto& use) { for_each_panel(weight, use); });
}

}  // namespace twostep::amx
