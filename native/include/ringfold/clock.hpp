// The clock of the engine.
#pragma once

#include <ctime>

#include "ringfold/op_spec.hpp"

namespace ringfold {

inline Ns monotonic_now() {
  timespec now{};
  ::clock_gettime(CLOCK_MONOTONIC, &now);
  return Ns{now.tv_sec} * 1'000'000'000 + now.tv_nsec;
}

}  // namespace ringfold
