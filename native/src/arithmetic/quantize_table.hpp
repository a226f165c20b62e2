// What one compilation of quantize_level.inc offers: loops over one block of f32.
#pragma once

#include <cstddef>
#include <cstdint>

namespace ringfold::quantize {

// What a block's values span. `top_bits` is the largest absolute value as its bits, which order like integers: from
// 0x7f800000 on, there is an infinity or a NaN in the block, and `low` and `high` mean nothing. Zeros are positive.
struct Extent {
  float low, high;
  uint32_t top_bits;
};

// `steps_per_unit` is one over the step, `base` is the value of code 0 (min-max) or the zero point (zero-scale).
using ExtentKernel = Extent (*)(const float* values, size_t count);
using EncodeKernel = void (*)(uint8_t* codes, const float* values, size_t count, float steps_per_unit, float base);
using DecodeKernel = void (*)(float* values, const uint8_t* codes, size_t count, float step, float base);

struct Table {
  ExtentKernel extent;     // of at least one value
  EncodeKernel encode[4];  // by scheme, less one
  DecodeKernel decode[4];
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

}  // namespace ringfold::quantize
