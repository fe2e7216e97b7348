// AMX: each thread has eight tiles, registers of up to 16 rows of 64 bytes.

#pragma once

#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstdint>

namespace twostep::amx {

constexpr int64_t kTile = 16;                          // rows and columns of sums in one tile
constexpr int64_t kStep = 32;                          // K per tile multiplication
constexpr int64_t kTileElements = kTile * kStep;       // elements of one operand's tile
constexpr int64_t kPanel = 2 * kTile;                  // columns of one panel: two tiles
constexpr int64_t kStepElements = 2 * kTileElements;   // of one panel

// Linux saves tile registers only for processes that have requested permission to use them.
inline bool is_granted() {
  constexpr int kRequestPermission = 0x1023, kTileData = 18;
  static const bool granted = syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
  return granted;
}

// The instructions themselves: GCC's intrinsics do not tell the compiler what memory they read.
// Streamed operands will not be loaded again soon, and leave more of the L1 cache to all else.
template <int kDestination, bool kIsStreamed = false>
inline void load_tile(const void* from, int64_t row_bytes) {
  if constexpr (kIsStreamed) {
    asm volatile("tileloaddt1 (%0,%1,1), %%tmm%c2" ::"r"(from), "r"(row_bytes), "i"(kDestination) : "memory");
  } else {
    asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(from), "r"(row_bytes), "i"(kDestination) : "memory");
  }
}

template <int kSource>
inline void store_tile(void* to, int64_t row_bytes) {
  asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(to), "r"(row_bytes), "i"(kSource) : "memory");
}

template <int kDestination>
inline void zero_tile() {
  asm volatile("tilezero %%tmm%c0" ::"i"(kDestination));
}

template <int kSums, int kRows, int kColumns>
inline void multiply_tile() {
  asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(kSums), "i"(kRows), "i"(kColumns));
}

// sums += products of four signed bytes each
template <int kSums, int kRows, int kColumns>
inline void multiply_bytes() {
  asm volatile("tdpbssd %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(kSums), "i"(kRows), "i"(kColumns));
}

inline void release_tiles() { asm volatile("tilerelease"); }

// Configures the calling thread's tiles: 0 to 3 are sums, with `rows` rows of 64 bytes, 4 and 5 as many rows of
// `row_bytes`, and 6 and 7 weights, a row of 64 bytes for four bytes of those.
inline void configure_tiles(int64_t rows, int64_t row_bytes = 64) {
  struct alignas(64) {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
    uint8_t rows[16] = {};
  } config;
  for (int64_t tile = 0; tile < 8; ++tile) config.rows[tile] = tile < 6 ? rows : row_bytes / 4;
  config.row_bytes[4] = config.row_bytes[5] = row_bytes;
  asm volatile("ldtilecfg %0" ::"m"(config));
}

}  // namespace twostep::amx
