// What the programs of this folder share: the same numbers on every machine, comparisons with a plain reference, and a
// digest of the bits of results, a line each. The bits of one machine's output are compared with another's.

#pragma once

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

namespace checks {

// Knuth's generator of 64 bits, of which the upper ones are taken.
class Numbers {
 public:
  uint32_t next() { return uint32_t((state_ = state_ * 6364136223846793005u + 1442695040888963407u) >> 32); }
  int32_t between(int32_t low, int32_t high) { return low + int32_t(next() % uint32_t(high - low + 1)); }
  float real(float magnitude) { return (float(next() >> 8) / float(1 << 23) - 1.0f) * magnitude; }

  template <class T, class F>
  std::vector<T> many(int64_t count, const F& one) {
    std::vector<T> all(count);
    for (T& each : all) each = T(one());
    return all;
  }
  template <class T = float>
  std::vector<T> reals(int64_t count, float magnitude = 1.0f) {
    return many<T>(count, [&] { return real(magnitude); });
  }

 private:
  uint64_t state_ = 1;
};

inline void expect_equal(const char* what, const void* found, const void* expected, size_t bytes) {
  if (std::memcmp(found, expected, bytes) == 0) return;
  std::printf("%s differs from its reference\n", what);
  std::exit(1);
}

inline void print_bits(const char* what, const void* data, size_t bytes) {
  uint64_t digest = 0xcbf29ce484222325u;  // FNV-1a
  for (size_t i = 0; i < bytes; ++i) digest = (digest ^ static_cast<const uint8_t*>(data)[i]) * 0x100000001b3u;
  std::printf("%s: %016llx\n", what, static_cast<unsigned long long>(digest));
}
template <class T>
void print_bits(const char* what, const std::vector<T>& numbers) {
  print_bits(what, numbers.data(), numbers.size() * sizeof(T));
}

}  // namespace checks
