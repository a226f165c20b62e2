// Quantisation: floats as 8 or 4 bits each on the wire, per block of elements.
//
// Words: a *piece* is a run of elements of one array; it is cut into *blocks* of `block_elements`, the last one
// shorter. A block is encoded as a *step* (f32), a *base* and one *code* per element. `top` is the largest code, 255
// or 15.
//
//   minmax:     v = base + code * step, base = min, step = (max - min) / top
//   zeroscale:  v = (code - base) * step, step = (max(max, 0) - min(min, 0)) / top, base = the code of 0 (integer)
//
// What holds for every block, on every CPU level and with the same bits:
// * A value comes back within half a step, and f32 rounding. Steps are at least 2^-126, so subnormals have that error.
// * A block of equal values comes back exactly (a negative zero as a zero); zeroscale brings back every zero exactly.
// * A block with an infinity, a NaN or a value from 2^126 on is *special*, which a negative step marks: min-max over
//   its finite values with a `top` less by three, and three codes for -inf, +inf and NaN. So each of those arrives in
//   its place, and no other value becomes one of them.
// * A block so short that it would not get smaller is not encoded at all: its elements travel as they are. So a piece
//   is never larger encoded than it was.
//
// f16 and bf16 are widened to f32, which is exact, and rounded to nearest even when they are narrowed again. None of
// this reads the FPU's rounding mode or whether it flushes subnormals: peers that differ in these still get the same
// bits.
//
// Block layout, little-endian: f32 step | f32 base (minmax, special) or i32 base (zeroscale) | codes. Four bits: byte i
// has the code of element i in its low half and of element i + (count + 1) / 2 in its high half.
//
// Pointers need no alignment, and no two ranges overlap unless they are the same.
#pragma once

#include <cstddef>
#include <cstdint>

#include "ringfold/kernels.hpp"

namespace ringfold::quantize {

// The numbers travel in the fingerprint of an op: append, never reorder.
enum class Scheme : uint8_t { none, minmax8, minmax4, zeroscale8, zeroscale4 };

inline constexpr size_t scheme_count = 5;
inline constexpr size_t block_elements = 512;

// Whether elements of this type, and this op over them, can be quantised.
bool supports(kernels::DType dtype);
bool supports(kernels::ReduceOp op);

// How many bytes a piece of `count` elements has on the wire.
size_t encoded_bytes(Scheme scheme, kernels::DType dtype, size_t count);

void encode(Scheme scheme, kernels::DType dtype, void* encoded, const void* values, size_t count);

// Saves the target's old bytes, then decodes into it.
void decode(Scheme scheme, kernels::DType dtype, void* target, const void* encoded, size_t count,
            kernels::Backup backup = {});

// The ring's inner step: `forward` = encode(decode(encoded) op local), computed in f32 without rounding to the dtype
// between.
void reduce(Scheme scheme, kernels::DType dtype, kernels::ReduceOp op, void* forward, const void* encoded,
            const void* local, size_t count);

// The last reduce of a piece: as above, but the result is divided by `divisor` before it is encoded, and its decoded
// value is written to `target`, whose old bytes are saved first. The target may be `local`.
void finish(Scheme scheme, kernels::DType dtype, kernels::ReduceOp op, void* forward, const void* encoded,
            const void* local, size_t count, uint32_t divisor, void* target, kernels::Backup backup);

}  // namespace ringfold::quantize
