// The inner loop of rf64, which every CPU level has its own version of.
//
// Words first. A *word* is 64 bits, little-endian. A *row* is 32 words; a *lane* is the words at one place of all rows.
// Each lane has a state, and absorbs its word of a row by
//
//     x = state ^ word;  x += low(x) * first;  swap the halves of x;  x += low(x) * second;  state = x
//
// where low(x) are the lower 32 bits. Why this:
// - Both additions can be undone (the factors are even, so the lower half is multiplied by an odd number, and it
//   determines what was added to the upper half). So a changed word always changes the state, and later words cannot
//   undo it unless they are changed as well.
// - Each half is multiplied with all 64 bits of the product kept: a difference in the highest bit spreads as far as one
//   in the lowest.
// - It needs one 32-bit multiplication per half, which AVX2 and GPUs have, and lanes know nothing of each other.
#pragma once

#include <cstddef>
#include <cstdint>

namespace ringfold::hash {

inline constexpr size_t lanes = 32;
inline constexpr size_t row_bytes = lanes * 8;

inline constexpr uint64_t first = 0xb5470916;
inline constexpr uint64_t second = 0xd1310ba6;

// Lets the `lanes` states absorb `count` rows. The rows need no alignment; the states are aligned to 64 bytes.
using Absorb = void (*)(uint64_t* states, const uint8_t* rows, size_t count);

void absorb_generic(uint64_t* states, const uint8_t* rows, size_t count);
#if defined(__x86_64__)
void absorb_avx2(uint64_t* states, const uint8_t* rows, size_t count);
void absorb_avx512(uint64_t* states, const uint8_t* rows, size_t count);
#endif

}  // namespace ringfold::hash
