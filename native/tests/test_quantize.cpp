// Quantisation on every CPU level: the same bits from the same values, whatever their alignment, count, size or kind,
// and whatever the program did to the FPU.

#include <cfenv>
#include <cmath>
#include <cstring>
#include <random>
#include <vector>

#if defined(__SSE2__)
#include <immintrin.h>
#endif

#include "check.hpp"
#include "ringfold/quantize.hpp"

using namespace ringfold;
using kernels::DType;
using kernels::ReduceOp;
using quantize::Scheme;

namespace {

constexpr Scheme schemes[] = {Scheme::minmax8, Scheme::minmax4, Scheme::zeroscale8, Scheme::zeroscale4};
constexpr DType dtypes[] = {DType::f16, DType::bf16, DType::f32};
constexpr size_t counts[] = {0, 1, 2, 3, 5, 8, 9, 16, 31, 511, 512, 513, 1029};

// What encode, reduce and finish make of a piece, and what decode makes of that, at an odd address if asked for.
struct Outcome {
  std::vector<uint8_t> encoded, forward, finished, target, decoded, saved;
  bool operator==(const Outcome&) const = default;
};

Outcome outcome(Scheme scheme, DType dtype, ReduceOp op, const std::vector<uint8_t>& values, size_t count,
                size_t shift) {
  const size_t bytes = count * kernels::item_bytes(dtype), wire = quantize::encoded_bytes(scheme, dtype, count);
  const auto room = [&](size_t size) { return std::vector<uint8_t>(size + shift + 1, 0xee); };
  auto local = room(bytes), encoded = room(wire), forward = room(wire), finished = room(wire), target = room(bytes),
       decoded = room(bytes), saved = room(bytes);
  if (bytes > 0) std::memcpy(local.data() + shift, values.data(), bytes);
  quantize::encode(scheme, dtype, encoded.data() + shift, local.data() + shift, count);
  quantize::reduce(scheme, dtype, op, forward.data() + shift, encoded.data() + shift, local.data() + shift, count);
  target = local;
  quantize::finish(scheme, dtype, op, finished.data() + shift, forward.data() + shift, target.data() + shift, count, 3,
                   target.data() + shift, {saved.data() + shift, false});
  CHECK(std::memcmp(saved.data() + shift, local.data() + shift, bytes) == 0);
  decoded = local;
  saved = room(bytes);
  quantize::decode(scheme, dtype, decoded.data() + shift, finished.data() + shift, count, {saved.data() + shift, true});
  CHECK(decoded == target);  // the owner has what the others get
  CHECK(std::memcmp(saved.data() + shift, local.data() + shift, bytes) == 0);
  for (auto* each : {&encoded, &forward, &finished, &target, &decoded, &saved}) {
    CHECK(each->back() == 0xee);
    each->erase(each->begin(), each->begin() + static_cast<std::ptrdiff_t>(shift));
  }
  return {encoded, forward, finished, target, decoded, saved};
}

// Bit patterns of every kind: all of them at random, or finite and close together, or few different ones.
std::vector<uint8_t> patterns(DType dtype, size_t count, unsigned seed) {
  std::mt19937 rng(seed);
  std::vector<uint8_t> out(count * kernels::item_bytes(dtype) + 1);
  for (size_t i = 0; i + 1 < out.size(); ++i) out[i] = static_cast<uint8_t>(rng());
  const size_t item = kernels::item_bytes(dtype);
  if (seed % 3 == 0) return out;
  for (size_t i = 0; i < count; ++i) {
    uint8_t& top = out[i * item + item - 1];
    top = seed % 3 == 1 ? static_cast<uint8_t>((top & 0x81) | 0x38) : 0;  // near one; or tiny, with subnormals
  }
  return out;
}

TEST(every_level_gives_the_same_bits_at_every_address) {
  for (const Scheme scheme : schemes) {
    for (const DType dtype : dtypes) {
      for (const size_t count : counts) {
        for (unsigned seed = 0; seed < 6; ++seed) {
          const auto values = patterns(dtype, count, seed);
          const auto op = static_cast<ReduceOp>(std::vector<int>{0, 1, 3, 4}[seed % 4]);
          CHECK(kernels::set_cpu_level("generic"));
          const Outcome expected = outcome(scheme, dtype, op, values, count, 0);
          for (const char* level : {"generic", "avx2", "avx512"}) {
            if (!kernels::set_cpu_level(level)) continue;
            for (const size_t shift : {0, 1, 4}) {
              CHECK(outcome(scheme, dtype, op, values, count, shift) == expected);
            }
          }
        }
      }
    }
  }
}

TEST(the_state_of_the_fpu_does_not_matter) {
  for (const Scheme scheme : schemes) {
    for (unsigned seed = 1; seed < 6; ++seed) {
      const auto values = patterns(DType::f32, 1029, seed);
      const Outcome expected = outcome(scheme, DType::f32, ReduceOp::sum, values, 1029, 0);
      std::fesetround(FE_UPWARD);
#if defined(__SSE2__)
      const unsigned before = _mm_getcsr();
      _mm_setcsr(before | 0x8040);  // flush to zero, subnormals are zero
#endif
      const Outcome found = outcome(scheme, DType::f32, ReduceOp::sum, values, 1029, 0);
#if defined(__SSE2__)
      CHECK(_mm_getcsr() >> 6 == (before | 0x8040) >> 6);  // left as it was
      _mm_setcsr(before);
#endif
      std::fesetround(FE_TONEAREST);
      CHECK(found == expected);
    }
  }
}

TEST(a_piece_is_never_larger_than_it_was) {
  for (const Scheme scheme : schemes) {
    for (const DType dtype : dtypes) {
      for (size_t count = 0; count < 2000; ++count) {
        const size_t wire = quantize::encoded_bytes(scheme, dtype, count);
        CHECK(wire <= count * kernels::item_bytes(dtype));
        CHECK((wire == 0) == (count == 0));
      }
    }
  }
}

}  // namespace
