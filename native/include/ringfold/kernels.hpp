// Elementwise kernels of the data plane: what runs once per byte of a reduce.
//
// Every function picks the widest code the CPU can run, once per process. The levels give the same bits: each element
// is computed by the same IEEE operations in the same order, and every NaN written is the one canonical quiet NaN of
// its type (positive, no payload), because which payload survives an addition is up to the compiler's choice of operand
// order.
//
// Pointers need no alignment. `target` is exactly `a`, or overlaps nothing else.
#pragma once

#include <cstddef>
#include <cstdint>

namespace ringfold::kernels {

// The numbers travel in the fingerprint of an op: append, never reorder.
enum class DType : uint8_t { u8, i8, u16, i16, u32, i32, u64, i64, f16, bf16, f32, f64 };
enum class ReduceOp : uint8_t { sum, avg, prod, min, max };

inline constexpr size_t dtype_count = 12;
inline constexpr size_t reduce_op_count = 5;

size_t item_bytes(DType dtype);

// target[i] = a[i] op b[i]. `avg` adds, the division comes once, in the last stage.
// Integers wrap around. f16 and bf16 are computed in f32 and rounded to nearest even. min and max propagate NaN.
void reduce(DType dtype, ReduceOp op, void* target, const void* a, const void* b, size_t count);

// Where old bytes are saved before they are overwritten. A backup that is larger than the cache is written past it.
struct Backup {
  void* at = nullptr;  // nullptr: nothing is saved
  bool past_cache = false;
};

// The ring's inner step in one pass over the cache: save `a`, target = a op b (or b op a: the order decides between
// zeros of different sign), and when divisor > 1, target = target / divisor. Returns the CRC-32C of the target's bytes,
// or 0 when it is not wanted. The target may be `a`.
uint32_t reduce_step(DType dtype, ReduceOp op, void* target, const void* a, const void* b, size_t count, Backup backup,
                     uint32_t divisor, bool want_crc, bool b_first = false);

// target[i] = target[i] / divisor: correctly rounded for floats, truncating for integers. 0 and 1 leave it as it is.
void divide(DType dtype, void* target, uint32_t divisor, size_t count);

// Save the target's old bytes, then copy `source` over it: into the cache if it is sent on next, past it if it is large
// and it is not read soon. No two ranges overlap.
void overwrite(void* target, const void* source, size_t bytes, Backup backup, bool past_cache = false);

// "avx512", "avx2" or "generic".
const char* cpu_level();

// Choose another level, for tests and benchmarks; CRC-32C follows. False when the name is unknown or the CPU lacks it.
bool set_cpu_level(const char* name);

}  // namespace ringfold::kernels
