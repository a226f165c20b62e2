// Writing and reading hints without pause, to find torn ones. For benchmarks and crash tests.
#pragma once

#include <cstdint>
#include <span>

#include "ringfold/hints.hpp"

namespace ringfold::hints {

// The parts of every hint belong together, so that a torn one shows.
struct Hammered {
  std::uint64_t hints = 0, local = 0, busy = 0, torn = 0, nanoseconds = 0;
};
// Publishes patterns of 2, 3, 4 and 8 paths, in `slots` slots, `rounds` times (0: until the process is killed).
void hammer_writes(Writer& writer, std::uint32_t slots, std::uint64_t rounds);
Hammered hammer_reads(Reader& reader, std::uint32_t slots, std::span<const std::uint32_t> generations,
                      std::uint64_t reads);
// Nanoseconds per read of one slot's word, as the engine reads it.
double read_cost_ns(Reader& reader, std::uint32_t slot, std::uint32_t generation, std::uint64_t reads);

}  // namespace ringfold::hints
