// One floating-point environment for every thread that reduces: all peers must get the same bits.
//
// The rounding mode, and whether subnormal numbers are flushed to zero, belong to the thread, and any library may
// change them (torch.set_flush_denormal, -ffast-math at start-up, fesetround). A thread also inherits them from the one
// that made it.
#pragma once

#include <cstdint>

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace ringfold {

// While this lives, the thread rounds to nearest, keeps subnormal numbers and traps nothing. Then its own environment
// is back, with the exception flags that it had.
class FloatEnvironment {
 public:
  FloatEnvironment() : saved_(get()) { set(standard); }
  ~FloatEnvironment() { set(saved_); }
  FloatEnvironment(const FloatEnvironment&) = delete;
  FloatEnvironment& operator=(const FloatEnvironment&) = delete;

 private:
#if defined(__x86_64__)
  using Word = std::uint32_t;
  static constexpr Word standard = 0x1f80;  // MXCSR: every exception masked, nothing else
  static Word get() { return _mm_getcsr(); }
  static void set(Word word) { _mm_setcsr(word); }
#elif defined(__aarch64__)
  using Word = std::uint64_t;
  static constexpr Word standard = 0;  // FPCR
  static Word get() {
    Word word = 0;
    asm volatile("mrs %0, fpcr" : "=r"(word));
    return word;
  }
  static void set(Word word) { asm volatile("msr fpcr, %0" : : "r"(word) : "memory"); }
#else
#error "how does this processor keep its rounding mode?"
#endif

  const Word saved_;
};

}  // namespace ringfold
