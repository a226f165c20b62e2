#if defined(__x86_64__)

#include <immintrin.h>

#include "hash_lanes.hpp"

namespace ringfold::hash {

// The states of all lanes stay in eight of the sixteen registers; eight independent chains hide the multiplications'
// latency.
void absorb_avx2(uint64_t* states, const uint8_t* rows, size_t count) {
  constexpr size_t registers = row_bytes / 32;
  const __m256i a = _mm256_set1_epi64x(first), b = _mm256_set1_epi64x(second);
  __m256i s[registers];
#pragma GCC unroll 8
  for (size_t i = 0; i < registers; ++i) s[i] = _mm256_load_si256(reinterpret_cast<const __m256i*>(states) + i);
  for (; count != 0; --count, rows += row_bytes) {
#pragma GCC unroll 8
    for (size_t i = 0; i < registers; ++i) {
      __m256i x = _mm256_xor_si256(s[i], _mm256_loadu_si256(reinterpret_cast<const __m256i*>(rows) + i));
      x = _mm256_add_epi64(x, _mm256_mul_epu32(x, a));
      x = _mm256_shuffle_epi32(x, _MM_SHUFFLE(2, 3, 0, 1));
      s[i] = _mm256_add_epi64(x, _mm256_mul_epu32(x, b));
    }
  }
#pragma GCC unroll 8
  for (size_t i = 0; i < registers; ++i) _mm256_store_si256(reinterpret_cast<__m256i*>(states) + i, s[i]);
}

}  // namespace ringfold::hash

#endif
