// The layout of a weight that stays in the blocks of a file: panels of columns, each of one kind of blocks.
//
// A panel begins with the factors of its columns, if its kind has them. Then it has one block of all its columns after
// the other along K. Such a block begins with the halves, column by column; then come the groups, each with its levels,
// column by column, and its codes in two planes, of the low bits and of the high ones. In a plane the codes of all
// columns for one place along K follow each other, or in a weight for rows of integers four along K of one column, and
// then those of the next. Parts of a plane share bytes: the lowest bits of all bytes are those of the first codes, the
// next bits those of the codes after them.

#pragma once

#include <cstdint>
#include <cstring>

#include "base/array_ref.h"
#include "base/prefetch.h"
#include "base/sizes.h"
#include "base/tensor.h"
#include "base/vec.h"
#include "blocks/kinds.h"

namespace twostep::blocks {

constexpr int kColumns = 4 * kPartLanes;  // of a panel

// Sizes in bytes of what a panel of a kind consists of.
template <class Kind>
struct Sizes {
  static constexpr int64_t kCodes = Kind::kGroup * kColumns;  // of a group; their number, not bytes
  static constexpr int64_t kLow = kCodes * Kind::kLowBits / 8, kHigh = kCodes * Kind::kHighBits / 8;
  static constexpr int64_t kLevels = Kind::kLevels * kColumns, kGroup = kLevels + kLow + kHigh;
  static constexpr int64_t kHalves = Kind::kHalves * kColumns * sizeof(uint16_t);
  static constexpr int64_t kBlock = kHalves + Kind::kGroups * kGroup;
  static constexpr int64_t kRowFactors = Kind::kFactors * sizeof(float), kFactors = kRowFactors * kColumns;
};

struct Panel {
  int64_t kind, offset;  // from the packed weight's first byte
};

// What a packed weight begins with.
struct Header {
  int64_t size, n, k, columns;  // bytes in all, sizes of the weight, columns of a panel
  int64_t is_for_integers;      // whether it is multiplied by rows of integers
  Panel panels[];

  const uint8_t* start_of(int64_t panel) const {
    return reinterpret_cast<const uint8_t*>(this) + panels[panel].offset;
  }
};

// Where a group has the code of a place along K.
inline int64_t place_of(int64_t i, int64_t column, bool is_for_integers) {
  return is_for_integers ? (i / 4 * kColumns + column) * 4 + i % 4 : i * kColumns + column;
}

inline const Header& header_of(const void* packed) { return *static_cast<const Header*>(packed); }

// Whether `packed` was made by pack_blocks of a weight [n, k].
inline bool is_packed(const Tensor& packed, int64_t n, int64_t k) {
  if (packed.scalar_type() != kByte || packed.dim() != 1 || !packed.is_contiguous()) return false;
  if (packed.numel() < int64_t(sizeof(Header))) return false;
  const Header& header = header_of(packed.const_data_ptr());
  return header.size == packed.numel() && header.n == n && header.k == k && header.columns == kColumns;
}

}  // namespace twostep::blocks
