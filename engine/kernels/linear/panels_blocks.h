// A weight that stays in the blocks of a file, as the vector kernels read it: group by group it is expanded to float32,
// in registers where it is multiplied once; else the first pass keeps a piece's numbers for all others.

#pragma once

#include <cstdint>
#include <cstring>

#include "base/prefetch.h"
#include "blocks/expand.h"
#include "linear/formats_vector.h"
#include "linear/panels_vector.h"

namespace twostep::vector {

struct BlockPanels {
  using Format = WideFloat32;
  using Kept = PlainPanels<Format>;
  static_assert(Format::kPanel == blocks::kColumns);
  static constexpr int64_t kWholeSteps = blocks::kMostGroup / kStep;     // a piece has whole groups of all kinds
  static constexpr int64_t kPieceSteps = (16 << 10) / Kept::kStepBytes;  // half of an L1 cache
  static constexpr int64_t kPieceElements = kPieceSteps * Kept::kStepElements;
  static constexpr int64_t kFirstRows = kWideExpandingRows;
  static_assert(kPieceSteps % kWholeSteps == 0);

  // A step of codes. With kKeeps, its numbers are stored, too.
  template <bool kKeeps>
  struct Step {
    const uint8_t* codes;
    const Vec *scales, *offsets;  // [kVectors]
    float* kept;

    template <int kIndex>
    TWOSTEP_INLINE Vec vector() const {
      constexpr int kVector = kIndex % Format::kVectors;
      const Vec integers = blocks::load_signed_bytes(codes + kIndex * kLanes);
      const Vec numbers = fma_part(integers, scales[kVector], offsets[kVector]);
      if constexpr (kKeeps) std::memcpy(kept + kIndex * kLanes, &numbers, sizeof(numbers));
      return numbers;
    }
  };

  // A pass over the steps. With kPrefetches, what the panel has further on is asked for meanwhile.
  template <bool kPrefetches, bool kKeeps>
  class Steps {
   public:
    Steps(const BlockPanels& panels, const Piece& piece)
        : reader_(panels.reader_of(piece)), group_(&panels.group), block_(panels.start_of(piece)),
          next_(piece.step * kStep / reader_.group % reader_.groups), kept_(panels.kept) {
      group_->factors = panels.header.start_of(piece.panel);
      if constexpr (kPrefetches) {
        const int64_t lines = divide_up(panels.bytes_of(piece), kLineBytes);
        ahead_ = Prefetcher(block_ + kAheadBytes, lines, 0, 1, piece.steps);
      }
    }

    TWOSTEP_INLINE Step<kKeeps> next() {
      if (left_ == 0) [[unlikely]] expand();
      if constexpr (kPrefetches) ahead_.fetch();
      const Step<kKeeps> step{codes_, scales_, offsets_, kept_};
      codes_ += Kept::kStepElements, --left_;
      if constexpr (kKeeps) kept_ += Kept::kStepElements;
      return step;
    }

   private:
    static constexpr int64_t kAheadBytes = 2048;

    TWOSTEP_INLINE void expand() {
      reader_.expand(block_, next_, *group_);
      codes_ = group_->codes, left_ = reader_.group / kStep;
      unroll<Format::kVectors>([&](auto v) TWOSTEP_INLINE {
        scales_[v] = Float32::load(group_->scales + v * kLanes);
        offsets_[v] = Float32::load(group_->offsets + v * kLanes);
      });
      if (++next_ == reader_.groups) next_ = 0, block_ += reader_.block_bytes;
    }

    const blocks::Reader reader_;
    blocks::Group* const group_;
    const uint8_t *block_, *codes_ = nullptr;
    int64_t next_, left_ = 0;  // the group of the block that is expanded next, steps until then
    Vec scales_[Format::kVectors], offsets_[Format::kVectors];
    float* kept_;
    Prefetcher ahead_;
  };

  const blocks::Header& header;
  blocks::Group& group;
  float* kept;  // a piece's numbers

  blocks::Reader reader_of(const Piece& piece) const { return blocks::reader_of(header.panels[piece.panel].kind); }
  const uint8_t* start_of(const Piece& piece) const {
    const blocks::Reader reader = reader_of(piece);
    const int64_t blocks = piece.step * kStep / (reader.group * reader.groups);
    return header.start_of(piece.panel) + reader.factor_bytes + blocks * reader.block_bytes;
  }
  int64_t bytes_of(const Piece& piece) const {
    const blocks::Reader reader = reader_of(piece);
    return divide_up(piece.steps * kStep * reader.block_bytes, reader.group * reader.groups);
  }
  Steps<true, false> only_pass(const Piece& piece) const { return {*this, piece}; }
  Steps<false, true> first_pass(const Piece& piece) const { return {*this, piece}; }
  Kept::Steps<false> later_pass(const Piece& /*piece*/) const { return Kept::Steps<false>(kept); }
};

}  // namespace twostep::vector
