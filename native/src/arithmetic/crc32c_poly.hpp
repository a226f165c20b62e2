// Arithmetic of polynomials over GF(2) modulo CRC-32C's, which every fast CRC is built from.
//
// A polynomial of degree < 32 is held reflected, as the CRC register holds it: bit i is the coefficient of x^(31-i).
// Running a register over n zero bytes multiplies it by x^(8n); so two halves of a message can be summed up separately
// and joined, and 16 bytes at a time can be folded onto the bytes that follow them.
#pragma once

#include <cstddef>
#include <cstdint>

#include "cpu.hpp"

namespace ringfold::crc {

namespace {  // internal linkage: the files that include this are compiled for different CPUs

inline constexpr uint32_t polynomial = 0x82f63b78;
inline constexpr uint32_t one = 0x80000000;

constexpr uint32_t times_x(uint32_t a) { return (a >> 1) ^ (a & 1 ? polynomial : 0); }

constexpr uint32_t multiply(uint32_t a, uint32_t b) {
  uint32_t product = 0;
  for (; b != 0; b <<= 1, a = times_x(a))
    if (b & one) product ^= a;
  return product;
}

constexpr uint32_t x_to_the(uint64_t power) {
  uint32_t result = one;
  for (uint32_t square = one >> 1; power != 0; power >>= 1, square = multiply(square, square))
    if (power & 1) result = multiply(result, square);
  return result;
}

}  // namespace

// The implementations, each continuing a register over more bytes.
uint32_t extend_portable(uint32_t state, const uint8_t* bytes, size_t count);
#if defined(__x86_64__)
uint32_t extend_sse42(uint32_t state, const uint8_t* bytes, size_t count);
uint32_t extend_avx512(uint32_t state, const uint8_t* bytes, size_t count);
#endif

}  // namespace ringfold::crc
