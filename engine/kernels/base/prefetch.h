// Prefetches of memory that is read next.

#pragma once

#include <cstdint>

#include "base/vec.h"

namespace twostep {

constexpr int64_t kLineBytes = 64;  // of a cache line

// Prefetches bytes at two distances, with every vector that is read: a core has only some line fill buffers, and the
// prefetches of a whole step at once would wait for them. The far one goes into the L2 cache, from which the near one
// is short; it also walks the page tables, for which the core would stall. Always inlined: GCC takes a function that
// only prefetches for one without effect, and drops its calls. Without a far distance there is one prefetch.
template <int kNear = 1024, int kFar = 3072>
TWOSTEP_INLINE inline void prefetch_ahead(const void* at) {
  const char* byte = static_cast<const char*>(at);
  __builtin_prefetch(byte + kNear);
  if constexpr (kFar > 0) __builtin_prefetch(byte + kFar, 0, 2);
}

// The steps [step, step + steps) of a weight's panel.
struct Piece {
  int64_t panel = 0, step = 0, steps = 0;
};

// Prefetches some cache lines into the L2 cache, a few of them at each turn, while other data is multiplied. Turns are
// frequent, and lines are spread over them evenly. With all lines of a step at once 32 rows took 6 % more time in
// tiles, since a core has buffers for 16 only and drops or delays the others; two lines a turn, and none at the last
// turns, took a fifth more for 8 rows in vectors. Prefetching every second line only, and leaving the others to the
// hardware, was slower.
//
// It is small enough to be passed and returned in registers: in memory, written and read in different pieces, it would
// fail store forwarding and wait until all earlier stores, sums of tiles above all, have reached the cache.
class Prefetcher {
 public:
  Prefetcher() = default;

  // Prefetches share `number` of `shares` equal ones of the lines from `start` on, in `turns` turns.
  Prefetcher(const void* start, int64_t num_lines, int64_t number, int64_t shares, int64_t turns) {
    const int64_t first = num_lines * number / shares, end = num_lines * (number + 1) / shares;
    at_ = static_cast<const char*>(start) + first * kLineBytes;
    per_turn_ = uint32_t(((end - first) * kLine + turns - 1) / turns);
  }

  TWOSTEP_INLINE void fetch() {
    for (due_ += per_turn_; due_ >= kLine; due_ -= kLine, at_ += kLineBytes) __builtin_prefetch(at_, 0, 2);
  }

 private:
  static constexpr uint32_t kLine = 1 << 20;  // fixed point: a turn's share need not be whole lines

  const char* at_ = nullptr;
  uint32_t due_ = 0, per_turn_ = 0;
};
static_assert(sizeof(Prefetcher) <= 16);

}  // namespace twostep
