// What one compilation of kernels_level.inc offers. Plain function pointers, so that nothing compiled for a wider CPU
// can be picked by the linker for a narrower one.
#pragma once

#include <cstddef>
#include <cstdint>

#include "ringfold/kernels.hpp"

namespace ringfold::kernels {

using ReduceKernel = void (*)(void* target, const void* a, const void* b, size_t count);
using DivideKernel = void (*)(void* target, uint32_t divisor, size_t count);
using WidenKernel = void (*)(float* target, const void* source, size_t count);
using NarrowKernel = void (*)(void* target, const float* source, size_t count);
using CopyKernel = void (*)(void* target, const void* source, size_t bytes);

struct Table {
  ReduceKernel reduce[dtype_count][reduce_op_count];
  DivideKernel divide[dtype_count];  // called with divisor >= 2 only
  WidenKernel widen_f16, widen_bf16;
  NarrowKernel narrow_f16, narrow_bf16;  // rounds to nearest even
  CopyKernel stream_copy;                // writes past the cache where the CPU can; needs stream_fence() afterwards
};

namespace generic {
extern const Table table;
}
#if defined(__x86_64__)
namespace avx2 {
extern const Table table;
}
namespace avx512 {
extern const Table table;
}
#endif

}  // namespace ringfold::kernels
