// Bugs that the simulation, or a native test with threads and processes, must be able to find.
//
// Only code that is compiled with RINGFOLD_PLANTED can have one: the test module `_native_testing` and the native tests
// that look for them. In the release module `planted_` and `planted_in_engine` are constants without bugs, and every
// branch on them is compiled out.
#pragma once

namespace ringfold {

struct Planted {
  bool commit_missing_done = false;  // an op is committed without the Done of one rank
  bool no_restore = false;           // an aborted op leaves its buffers changed
  bool accept_old_epoch = false;     // frames of another epoch count
  bool apply_duplicate = false;      // a segment that is sent twice is reduced twice
  bool done_after_seal = false;      // a sealed epoch goes on
  bool forget_lane = false;          // what was on a lost lane is not sent again
  bool tell_nobody = false;          // a lane that leaves a segment to others does not wake them
  bool apply_finished = false;       // a frame of a finished sequence counts for the op that runs
  bool divide_by_size = false;       // an average is over the ring, not over those that contributed
  bool shares_expire = false;        // fixed shares count for the first segments of an op only
  bool absent_earns = false;         // a path without lanes earns its fixed share, and takes all of it when it is back
  bool early_unlimited = false;      // each op counts its early segments by itself, and nobody counts all of them
  bool done_with_one_part = false;   // a Done leaves when one channel has its part of the op
  bool end_forgotten = false;        // one channel is not commanded to end its part of a committed op
  bool direct_forgotten = false;     // a Done that goes straight to all members is not sent to one of them
  bool payload_forgotten = false;    // a small op is committed without the payload of one rank
  bool position_first = false;       // a pipe's writer moves its position before it has written the bytes
  bool worker_goes_on = false;       // a standstill does not wait for a worker that is at work
};

// Of what the simulation does not run: pipes and threads. Set before the first thread is started.
#ifdef RINGFOLD_PLANTED
inline Planted planted_in_engine{};
#else
inline constexpr Planted planted_in_engine{};
#endif

}  // namespace ringfold
