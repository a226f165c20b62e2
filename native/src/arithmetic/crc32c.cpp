#include "ringfold/crc32c.hpp"

#include <array>
#include <cstring>

#if defined(__ARM_FEATURE_CRC32)
#include <arm_acle.h>
#endif

#include "crc32c_poly.hpp"

namespace ringfold {

namespace crc {

#if defined(__ARM_FEATURE_CRC32)

uint32_t extend_portable(uint32_t state, const uint8_t* bytes, size_t count) {
  for (; count >= 8; count -= 8, bytes += 8) {
    uint64_t word;
    std::memcpy(&word, bytes, 8);
    state = __crc32cd(state, word);
  }
  for (; count != 0; --count) state = __crc32cb(state, *bytes++);
  return state;
}

#else

namespace {

// tables[k][byte]: what `byte` becomes after itself and k zero bytes.
constexpr auto tables = [] {
  std::array<std::array<uint32_t, 256>, 8> all{};
  for (uint32_t byte = 0; byte < 256; ++byte) {
    uint32_t value = byte;
    for (int bit = 0; bit < 8; ++bit) value = times_x(value);
    all[0][byte] = value;
  }
  for (size_t k = 1; k < 8; ++k)
    for (size_t byte = 0; byte < 256; ++byte) all[k][byte] = (all[k - 1][byte] >> 8) ^ all[0][all[k - 1][byte] & 0xff];
  return all;
}();

}  // namespace

uint32_t extend_portable(uint32_t state, const uint8_t* bytes, size_t count) {
  for (; count >= 8; count -= 8, bytes += 8) {
    const uint32_t low = state ^ (bytes[0] | bytes[1] << 8 | bytes[2] << 16 | static_cast<uint32_t>(bytes[3]) << 24);
    state = tables[7][low & 0xff] ^ tables[6][low >> 8 & 0xff] ^ tables[5][low >> 16 & 0xff] ^ tables[4][low >> 24] ^
            tables[3][bytes[4]] ^ tables[2][bytes[5]] ^ tables[1][bytes[6]] ^ tables[0][bytes[7]];
  }
  for (; count != 0; --count) state = (state >> 8) ^ tables[0][(state ^ *bytes++) & 0xff];
  return state;
}

#endif

}  // namespace crc

uint32_t crc32c(const void* bytes, size_t count, uint32_t seed) {
  return ~active_level().crc(~seed, static_cast<const uint8_t*>(bytes), count);
}

uint32_t crc32c_combine(uint32_t crc_a, uint32_t crc_b, size_t bytes_b) {
  // The inversions before and after cancel out, as b's initial register is part of crc_b already.
  return crc::multiply(crc_a, crc::x_to_the(8 * static_cast<uint64_t>(bytes_b))) ^ crc_b;
}

}  // namespace ringfold
