// Files without a name, in memory, whose size cannot change any more: what processes of one host map together.
#pragma once

#include <cstddef>

namespace ringfold {

// Its memory is there from the beginning: no access fails for want of it. The maker seals it once it has mapped it.
// -1: there are none here.
int make_file(const char* name, std::size_t bytes);
// With `for_others_read_only` nobody can map it for writing any more. False: this kernel cannot.
bool seal_file(int fd, bool for_others_read_only);
// Whether a file that another process has sent is one, of this size and writable.
bool is_sealed_file(int fd, std::size_t bytes);

}  // namespace ringfold
