// CRC-32C with the crc32 instruction. It takes 3 cycles but starts every cycle: three stretches of the message are
// summed up side by side, and joined with a carry-less multiplication.

#if defined(__x86_64__)

#include <immintrin.h>

#include "crc32c_poly.hpp"

namespace ringfold::crc {

namespace {

inline uint64_t word_at(const uint8_t* p) {
  uint64_t word;
  __builtin_memcpy(&word, p, 8);
  return word;
}

// state * x^(8 * bytes). The reflected product is one x short of aligned, and the crc32 instruction multiplies by x^32.
template <uint64_t bytes>
inline uint32_t advance(uint64_t state) {
  constexpr uint32_t factor = x_to_the(8 * bytes - 33);
  const __m128i product = _mm_clmulepi64_si128(_mm_cvtsi64_si128(static_cast<int64_t>(state)),
                                               _mm_cvtsi32_si128(static_cast<int32_t>(factor)), 0);
  return static_cast<uint32_t>(_mm_crc32_u64(0, static_cast<uint64_t>(_mm_cvtsi128_si64(product))));
}

template <size_t stretch>
inline uint64_t three_stretches(uint64_t state, const uint8_t*& bytes, size_t& count) {
  for (; count >= 3 * stretch; count -= 3 * stretch, bytes += 3 * stretch) {
    uint64_t second = 0, third = 0;
    for (size_t i = 0; i < stretch; i += 8) {
      state = _mm_crc32_u64(state, word_at(bytes + i));
      second = _mm_crc32_u64(second, word_at(bytes + stretch + i));
      third = _mm_crc32_u64(third, word_at(bytes + 2 * stretch + i));
    }
    state = advance<2 * stretch>(state) ^ advance<stretch>(second) ^ third;
  }
  return state;
}

}  // namespace

uint32_t extend_sse42(uint32_t state, const uint8_t* bytes, size_t count) {
  uint64_t wide = three_stretches<1024>(state, bytes, count);
  wide = three_stretches<128>(wide, bytes, count);
  for (; count >= 8; count -= 8, bytes += 8) wide = _mm_crc32_u64(wide, word_at(bytes));
  auto narrow = static_cast<uint32_t>(wide);
  for (; count != 0; --count) narrow = _mm_crc32_u8(narrow, *bytes++);
  return narrow;
}

}  // namespace ringfold::crc

#endif
