// CRC-32C by folding: a 16-byte lane that lies D bits before another is multiplied by x^D and added to it, which leaves
// the checksum of the whole unchanged. Eight registers of four lanes each walk through the message; at the end they are
// folded onto one lane, and the crc32 instruction reduces that to 32 bits.

#if defined(__x86_64__)

#include <immintrin.h>

#include "crc32c_poly.hpp"

namespace ringfold::crc {

namespace {

constexpr size_t line_bytes = 64;
constexpr size_t lines = 8;

// The two halves of a lane need x^(D+64) and x^D; the reflected product of two 64-bit halves is one x short of aligned.
constexpr int64_t factor(uint64_t power) {
  return static_cast<int64_t>(static_cast<uint64_t>(x_to_the(power - 1)) << 32);
}

template <size_t distance_bytes>
inline __m512i fold(__m512i from, __m512i onto) {
  constexpr int64_t low = factor(8 * distance_bytes + 64);
  constexpr int64_t high = factor(8 * distance_bytes);
  const __m512i factors = _mm512_set_epi64(high, low, high, low, high, low, high, low);
  const __m512i a = _mm512_clmulepi64_epi128(from, factors, 0x00);
  const __m512i b = _mm512_clmulepi64_epi128(from, factors, 0x11);
  return _mm512_ternarylogic_epi64(a, b, onto, 0x96);
}

template <size_t distance_bytes>
inline __m128i fold(__m128i from, __m128i onto) {
  constexpr int64_t low = factor(8 * distance_bytes + 64);
  constexpr int64_t high = factor(8 * distance_bytes);
  const __m128i factors = _mm_set_epi64x(high, low);
  const __m128i a = _mm_clmulepi64_si128(from, factors, 0x00);
  const __m128i b = _mm_clmulepi64_si128(from, factors, 0x11);
  return _mm_ternarylogic_epi64(a, b, onto, 0x96);
}

// Folds whole lines into a register; needs one line at least.
inline uint32_t extend_lines(uint32_t state, const uint8_t*& bytes, size_t& count) {
  const auto line = [&](size_t i) { return _mm512_loadu_si512(bytes + i * line_bytes); };
  const __m512i seed = _mm512_zextsi128_si512(_mm_cvtsi32_si128(static_cast<int32_t>(state)));
  __m512i sum = _mm512_xor_si512(line(0), seed);
  if (count >= 2 * lines * line_bytes) {
    __m512i s1 = line(1), s2 = line(2), s3 = line(3), s4 = line(4), s5 = line(5), s6 = line(6), s7 = line(7);
    constexpr size_t all = lines * line_bytes;
    for (bytes += all, count -= all; count >= all; bytes += all, count -= all) {
      sum = fold<all>(sum, line(0));
      s1 = fold<all>(s1, line(1));
      s2 = fold<all>(s2, line(2));
      s3 = fold<all>(s3, line(3));
      s4 = fold<all>(s4, line(4));
      s5 = fold<all>(s5, line(5));
      s6 = fold<all>(s6, line(6));
      s7 = fold<all>(s7, line(7));
    }
    // A tree: the last of the three levels waits for one multiplication, not for seven.
    const __m512i a = fold<64>(sum, s1), b = fold<64>(s2, s3), c = fold<64>(s4, s5), d = fold<64>(s6, s7);
    sum = fold<256>(fold<128>(a, b), fold<128>(c, d));
  } else {
    bytes += line_bytes, count -= line_bytes;
  }
  for (; count >= line_bytes; bytes += line_bytes, count -= line_bytes) sum = fold<64>(sum, line(0));

  const __m128i front = fold<16>(_mm512_castsi512_si128(sum), _mm512_extracti32x4_epi32(sum, 1));
  const __m128i back = fold<16>(_mm512_extracti32x4_epi32(sum, 2), _mm512_extracti32x4_epi32(sum, 3));
  const __m128i lane = fold<32>(front, back);
  const uint64_t half = _mm_crc32_u64(0, static_cast<uint64_t>(_mm_cvtsi128_si64(lane)));
  return static_cast<uint32_t>(_mm_crc32_u64(half, static_cast<uint64_t>(_mm_extract_epi64(lane, 1))));
}

}  // namespace

uint32_t extend_avx512(uint32_t state, const uint8_t* bytes, size_t count) {
  if (count >= 2 * line_bytes) state = extend_lines(state, bytes, count);
  for (; count >= 8; count -= 8, bytes += 8) {
    uint64_t word;
    __builtin_memcpy(&word, bytes, 8);
    state = static_cast<uint32_t>(_mm_crc32_u64(state, word));
  }
  for (; count != 0; --count) state = _mm_crc32_u8(state, *bytes++);
  return state;
}

}  // namespace ringfold::crc

#endif
