// Numbers of 16 bits with the exponents of float32.

#pragma once

#include <bit>
#include <cstdint>

namespace twostep {

// The upper half of a float32's bits, to which one is rounded: to the nearest, of two the even one.
struct BFloat16 {
  uint16_t bits;

  BFloat16() = default;
  BFloat16(float number) : bits(rounded(std::bit_cast<uint32_t>(number))) {}     // NOLINT(google-explicit-constructor)
  operator float() const { return std::bit_cast<float>(uint32_t{bits} << 16); }  // NOLINT(google-explicit-constructor)

 private:
  static uint16_t rounded(uint32_t number) {
    const bool is_nan = (number & 0x7fffffff) > 0x7f800000;
    return is_nan ? 0x7fc0 : static_cast<uint16_t>((number + 0x7fff + (number >> 16 & 1)) >> 16);
  }
};

}  // namespace twostep
