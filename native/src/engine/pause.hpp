// A moment of a thread that spins.
#pragma once

#include "ringfold/frame.hpp"

namespace ringfold {

inline constexpr Ns yield_after = 5'000;  // of spinning

inline void pause_cpu() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

}  // namespace ringfold
