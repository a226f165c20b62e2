// Mappings of a file that another process may truncate.
//
// A process that truncates a file removes the pages of its mappings, and the next read of one is a SIGBUS. For hints
// that would be one careless `cp` into the agent's directory, and the end of every training process on the host. So the
// range of a mapping is guarded: when a read in it fails, zeros are put in its place, for good, and the read finds
// those. Zeros are no hints; the reader sees that at its next look, and opens the file again. The same for the agent
// that writes: what it writes from then on goes nowhere, and it ends when it looks at its file.
//
// The handler is installed with the first guard and stays. Every other SIGBUS goes to the handler that was installed
// before.
#pragma once

#include <cstddef>

namespace ringfold {

// At most 64 ranges are guarded at a time; more are left alone.
void guard_mapping(const void* base, std::size_t bytes);
// Before it is unmapped. One that is not guarded is fine.
void unguard_mapping(const void* base);

}  // namespace ringfold
