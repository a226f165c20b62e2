// Files without a name, in memory, whose size cannot change any more: what processes of one host map together.
#pragma once

#include <cstddef>

namespace ringfold {

// -1: there are none here.
int make_sealed_file(const char* name, std::size_t bytes);
// Whether a file that another process has sent is one, of this size and writable.
bool is_sealed_file(int fd, std::size_t bytes);

}  // namespace ringfold
