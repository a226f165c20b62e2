// Starting a guardian (native/guardian): a process that is no child of this one.
#pragma once

#include <string>

namespace ringfold {

// Runs `program` with descriptors `life` and `master`, and `message` as its argument; the descriptors stay open here.
// False: it cannot be run. It takes about a millisecond, whatever the size of this process.
//
// No `wait` of this process sees it, there is no SIGCHLD, and no handler of a fork runs.
bool start_guardian(const std::string& program, int life, int master, const std::string& message);

}  // namespace ringfold
