#if defined(__x86_64__)

#include <immintrin.h>

#include "hash_lanes.hpp"

namespace ringfold::hash {

void absorb_avx512(uint64_t* states, const uint8_t* rows, size_t count) {
  constexpr size_t registers = row_bytes / 64;
  const __m512i a = _mm512_set1_epi64(first), b = _mm512_set1_epi64(second);
  __m512i s[registers];
#pragma GCC unroll 4
  for (size_t i = 0; i < registers; ++i) s[i] = _mm512_load_si512(states + 8 * i);
  for (; count != 0; --count, rows += row_bytes) {
#pragma GCC unroll 4
    for (size_t i = 0; i < registers; ++i) {
      __m512i x = _mm512_xor_si512(s[i], _mm512_loadu_si512(rows + 64 * i));
      x = _mm512_add_epi64(x, _mm512_mul_epu32(x, a));
      x = _mm512_shuffle_epi32(x, _MM_PERM_CDAB);
      s[i] = _mm512_add_epi64(x, _mm512_mul_epu32(x, b));
    }
  }
#pragma GCC unroll 4
  for (size_t i = 0; i < registers; ++i) _mm512_store_si512(states + 8 * i, s[i]);
}

}  // namespace ringfold::hash

#endif
