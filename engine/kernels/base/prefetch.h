// Memory is asked ahead of time for what is read next.

#pragma once

#include <cstdint>

#include "base/vec.h"

namespace twostep {

constexpr int64_t kLineBytes = 64;  // of caches

// Asks for the bytes to come, with every vector that is read: a core has places for only some of what it asked for, and
// those of a whole step at once would wait for them. First into the L2 cache, from where the way is short; that also
// finds the next page, for which the core would stop. Always inlined: GCC takes a function that does nothing else for
// one without effect, and drops its calls. Without a far distance it asks only once.
template <int kNear = 1024, int kFar = 3072>
TWOSTEP_INLINE inline void ask_ahead(const void* at) {
  const char* byte = static_cast<const char*>(at);
  __builtin_prefetch(byte + kNear);
  if constexpr (kFar > 0) __builtin_prefetch(byte + kFar, 0, 2);
}

// The steps [step, step + steps) of a weight's panel.
struct Piece {
  int64_t panel = 0, step = 0, steps = 0;
};

// Asks for some cache lines, into the L2 cache, a few of them at each turn: what is multiplied next arrives meanwhile.
// Turns come often, and lines are spread over them evenly. With all lines of a step at once 32 rows took 6 % more time
// in tiles, since a core has places for 16 only and drops or delays the others; two lines a turn, and none at the last
// turns, took a fifth more for 8 rows in vectors. Asking for every second line only, and leaving the others to the
// hardware, was slower.
//
// Small enough to be passed and returned in registers. Read in other pieces than it was written in, it would wait until
// all that was stored before, sums of tiles above all, has reached the cache.
class Ahead {
 public:
  Ahead() = default;

  // One of so many equal shares of the lines from `start` on, for that many turns.
  Ahead(const void* start, int64_t num_lines, int64_t number, int64_t shares, int64_t turns) {
    const int64_t first = num_lines * number / shares, end = num_lines * (number + 1) / shares;
    at_ = static_cast<const char*>(start) + first * kLineBytes;
    per_turn_ = uint32_t(((end - first) * kLine + turns - 1) / turns);
  }

  TWOSTEP_INLINE void fetch() {
    for (due_ += per_turn_; due_ >= kLine; due_ -= kLine, at_ += kLineBytes) __builtin_prefetch(at_, 0, 2);
  }

 private:
  static constexpr uint32_t kLine = 1 << 20;  // a line; so a turn's share need not be whole ones

  const char* at_ = nullptr;
  uint32_t due_ = 0, per_turn_ = 0;
};
static_assert(sizeof(Ahead) <= 16);

}  // namespace twostep
