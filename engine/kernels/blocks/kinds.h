// The kinds of blocks that files store numbers in: what a block in the file consists of. A kind's number is that of
// GGUF, its formula that of llama.cpp's ggml-quants.c: a number is `code * scale + offset`, or `code * scale`. Scales
// are made of what the members of `Block` hold (see expand.h); engine/checkpoint/gguf/blocks.py is the plain path.
// NVFP4 is that of safetensors, whose plain path is in engine/checkpoint/published/codecs.py.

#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

namespace twostep::blocks {

constexpr int kMostNumbers = 256, kMostGroups = 16;  // of a block
constexpr int kMostGroup = 32;                       // numbers of a group

// What a block in a file says.
struct Block {
  uint8_t codes[kMostNumbers];     // unsigned, but for Q8_0
  uint16_t halves[2];              // float16: the scale and the offset, or what the levels of a group multiply
  uint8_t levels[2][kMostGroups];  // of scales and offsets
};

inline void read_half(const uint8_t* from, uint16_t& half) { std::memcpy(&half, from, sizeof(half)); }

// The lower halves of `size` bytes, then the upper ones.
inline void read_nibbles(const uint8_t* from, int size, uint8_t* codes) {
  for (int i = 0; i < size; ++i) codes[i] = from[i] & 15, codes[size + i] = from[i] >> 4;
}

// Adds a bit, or two, of `size` bytes to codes, from the lowest on: those of all bytes, and then the next ones.
template <int kBits, int kShift>
void read_upper(const uint8_t* from, int size, uint8_t* codes) {
  for (int i = 0; i < size * (8 / kBits); ++i) {
    codes[i] |= (from[i % size] >> (i / size * kBits) & ((1 << kBits) - 1)) << kShift;
  }
}

// What the kinds differ in. The low bits of codes are packed in one plane, the high ones in another (see layout.h).
template <int kNumbersOf, int kBytesOf, int kGroupOf, int kLow, int kHigh, int kHalvesOf, int kLevelsOf>
struct Shape {
  static constexpr int kNumbers = kNumbersOf, kBytes = kBytesOf;        // of a block in the file
  static constexpr int kGroup = kGroupOf, kGroups = kNumbers / kGroup;  // numbers with one scale
  static constexpr int kLowBits = kLow, kHighBits = kHigh;
  static constexpr int kHalves = kHalvesOf;  // of a block
  static constexpr int kLevels = kLevelsOf;  // of a group
  static constexpr int kBias = 0;            // which is taken from a code
  static constexpr std::nullptr_t kTable = nullptr;  // or what a code stands for
  static constexpr bool kIsPower = false;            // whether a level is the exponent of a power of two
  static constexpr bool kIsE4m3 = false;             // or a number of 8 bits
  static constexpr int kFactors = 0;  // float32 numbers that a row begins with, which multiply its scales
};

inline constexpr int8_t kInt4Table[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};
inline constexpr int8_t kFp4Table[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};  // doubled

struct Q8_0 : Shape<32, 34, 32, 8, 0, 1, 0> {
  static void read(const uint8_t* from, Block& to) {
    read_half(from, to.halves[0]);
    std::memcpy(to.codes, from + 2, kNumbers);
  }
};

struct Q4_0 : Shape<32, 18, 32, 4, 0, 1, 0> {
  static constexpr int kBias = 8;
  static void read(const uint8_t* from, Block& to) {
    read_half(from, to.halves[0]);
    read_nibbles(from + 2, 16, to.codes);
  }
};

struct Q4_1 : Shape<32, 20, 32, 4, 0, 2, 0> {
  static void read(const uint8_t* from, Block& to) {
    read_half(from, to.halves[0]), read_half(from + 2, to.halves[1]);
    read_nibbles(from + 4, 16, to.codes);
  }
};

// A fifth bit of each code: bit i of a word is code i's.
inline void read_fifth_bits(const uint8_t* from, uint8_t* codes) {
  for (int i = 0; i < 32; ++i) codes[i] |= (from[i / 8] >> i % 8 & 1) << 4;
}

struct Q5_0 : Shape<32, 22, 32, 4, 1, 1, 0> {
  static constexpr int kBias = 16;
  static void read(const uint8_t* from, Block& to) {
    read_half(from, to.halves[0]);
    read_nibbles(from + 6, 16, to.codes);
    read_fifth_bits(from + 2, to.codes);
  }
};

struct Q5_1 : Shape<32, 24, 32, 4, 1, 2, 0> {
  static void read(const uint8_t* from, Block& to) {
    read_half(from, to.halves[0]), read_half(from + 2, to.halves[1]);
    read_nibbles(from + 8, 16, to.codes);
    read_fifth_bits(from + 4, to.codes);
  }
};

struct IQ4_NL : Shape<32, 18, 32, 4, 0, 1, 0> {
  static constexpr const int8_t* kTable = kInt4Table;
  static void read(const uint8_t* from, Block& to) {
    read_half(from, to.halves[0]);
    read_nibbles(from + 2, 16, to.codes);
  }
};

struct MXFP4 : Shape<32, 17, 32, 4, 0, 0, 1> {
  static constexpr const int8_t* kTable = kFp4Table;
  static constexpr bool kIsPower = true;
  static void read(const uint8_t* from, Block& to) {
    to.levels[0][0] = from[0];
    read_nibbles(from + 1, 16, to.codes);
  }
};

// Codes of neighbours share bytes.
struct NVFP4 : Shape<16, 9, 16, 4, 0, 0, 1> {
  static constexpr const int8_t* kTable = kFp4Table;
  static constexpr bool kIsE4m3 = true;
  static constexpr int kFactors = 1;
  static void read(const uint8_t* from, Block& to) {
    to.levels[0][0] = from[0];
    for (int i = 0; i < kNumbers; ++i) to.codes[i] = from[1 + i / 2] >> i % 2 * 4 & 15;
  }
};

struct IQ4_XS : Shape<256, 136, 32, 4, 0, 1, 1> {
  static constexpr const int8_t* kTable = kInt4Table;
  static void read(const uint8_t* from, Block& to) {
    read_half(from, to.halves[0]);
    for (int g = 0; g < kGroups; ++g) {
      const int low = from[4 + g / 2] >> g % 2 * 4 & 15, high = from[2 + g / 4] >> g % 4 * 2 & 3;
      to.levels[0][g] = uint8_t((low | high << 4) - 32);
      read_nibbles(from + 8 + g * 16, 16, to.codes + g * 32);
    }
  }
};

// Two levels of six bits for each of eight groups, in twelve bytes.
inline void read_levels_of_6_bits(const uint8_t* from, Block& to) {
  const uint8_t *first = from, *second = from + 4, *third = from + 8;
  for (int g = 0; g < 4; ++g) {
    to.levels[0][g] = first[g] & 63, to.levels[1][g] = second[g] & 63;
    to.levels[0][g + 4] = (third[g] & 15) | first[g] >> 6 << 4;
    to.levels[1][g + 4] = third[g] >> 4 | second[g] >> 6 << 4;
  }
}

struct Q4_K : Shape<256, 144, 32, 4, 0, 2, 2> {
  static void read(const uint8_t* from, Block& to) {
    read_half(from, to.halves[0]), read_half(from + 2, to.halves[1]);
    read_levels_of_6_bits(from + 4, to);
    for (int i = 0; i < 4; ++i) read_nibbles(from + 16 + i * 32, 32, to.codes + i * 64);
  }
};

struct Q5_K : Shape<256, 176, 32, 4, 1, 2, 2> {
  static void read(const uint8_t* from, Block& to) {
    read_half(from, to.halves[0]), read_half(from + 2, to.halves[1]);
    read_levels_of_6_bits(from + 4, to);
    for (int i = 0; i < 4; ++i) read_nibbles(from + 48 + i * 32, 32, to.codes + i * 64);
    read_upper<1, 4>(from + 16, 32, to.codes);
  }
};

struct Q6_K : Shape<256, 210, 16, 4, 2, 1, 1> {
  static constexpr int kBias = 32;
  static void read(const uint8_t* from, Block& to) {
    read_half(from + 208, to.halves[0]);
    std::memcpy(to.levels[0], from + 192, kGroups);
    for (int i = 0; i < 2; ++i) {
      read_nibbles(from + i * 64, 64, to.codes + i * 128);
      read_upper<2, 4>(from + 128 + i * 32, 32, to.codes + i * 128);
    }
  }
};

// Two bits of each code.
inline void read_pairs_of_bits(const uint8_t* from, uint8_t* codes) {
  std::memset(codes, 0, kMostNumbers);
  for (int i = 0; i < 2; ++i) read_upper<2, 0>(from + i * 32, 32, codes + i * 128);
}

struct Q2_K : Shape<256, 84, 16, 2, 0, 2, 2> {
  static void read(const uint8_t* from, Block& to) {
    read_half(from + 80, to.halves[0]), read_half(from + 82, to.halves[1]);
    for (int g = 0; g < kGroups; ++g) to.levels[0][g] = from[g] & 15, to.levels[1][g] = from[g] >> 4;
    read_pairs_of_bits(from + 16, to.codes);
  }
};

struct Q3_K : Shape<256, 110, 16, 2, 1, 1, 1> {
  static constexpr int kBias = 4;
  static void read(const uint8_t* from, Block& to) {
    const uint8_t* levels = from + 96;
    read_half(from + 108, to.halves[0]);
    for (int g = 0; g < kGroups; ++g) {
      const int low = levels[g % 8] >> g / 8 * 4 & 15, high = levels[8 + g % 4] >> g / 4 * 2 & 3;
      to.levels[0][g] = uint8_t((low | high << 4) - 32);
    }
    read_pairs_of_bits(from + 32, to.codes);
    read_upper<1, 2>(from, 32, to.codes);
  }
};

// Calls f.operator()<Kind>() for the kind of that number; returns whether there is one.
template <class F>
bool with_kind(int64_t number, const F& f) {
  switch (number) {
    case 2: f.template operator()<Q4_0>(); return true;
    case 3: f.template operator()<Q4_1>(); return true;
    case 6: f.template operator()<Q5_0>(); return true;
    case 7: f.template operator()<Q5_1>(); return true;
    case 8: f.template operator()<Q8_0>(); return true;
    case 10: f.template operator()<Q2_K>(); return true;
    case 11: f.template operator()<Q3_K>(); return true;
    case 12: f.template operator()<Q4_K>(); return true;
    case 13: f.template operator()<Q5_K>(); return true;
    case 14: f.template operator()<Q6_K>(); return true;
    case 20: f.template operator()<IQ4_NL>(); return true;
    case 23: f.template operator()<IQ4_XS>(); return true;
    case 39: f.template operator()<MXFP4>(); return true;
    case 256: f.template operator()<NVFP4>(); return true;
    default: return false;
  }
}

}  // namespace twostep::blocks
