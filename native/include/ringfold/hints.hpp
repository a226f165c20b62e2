// Hints in shared memory: the agent's writer, and the reader that the engine uses at each segment.
//
// The layout and the rules are in include/ringfold_hints.h, which the reader here uses as any other consumer would. The
// writer is the only code that stores into the file, and there is one writer at a time (flock). Its invariants:
//   - a word is stored at once, so a narrow hint is whole or not there;
//   - flags are stored before the word that they are about;
//   - the wide area is written before a word that points at it becomes valid, under a sequence that is odd meanwhile;
//   - a slot's generation only grows (modulo 2^20, never 0), also across restarts: it stays in the file;
//   - after a restart every word is invalid, and every sequence even, before the heartbeat shows that the agent is
//   alive.
#pragma once

#include <cstdint>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

#include "ringfold_hints.h"

namespace ringfold::hints {

using Word = std::uint64_t;

// Another process writes this file: `pid`, or 0 if that is unknown.
struct InUse : std::runtime_error {
  InUse(const std::string& path, std::uint64_t pid);
  std::uint64_t pid;
};

// The word of a hint for two to four paths. The shares are of 65535 and sum to it; path 0 gets what rounding leaves.
Word make_word(std::uint32_t generation, std::span<const std::uint16_t> shares, std::uint32_t backpressure);

class Writer {
 public:
  // Creates the file, or takes over the one that is there, with its inode. `mode` is for a new or an own file.
  Writer(const std::string& path, std::uint64_t stale_after_ns, unsigned mode);
  ~Writer();
  Writer(const Writer&) = delete;
  Writer& operator=(const Writer&) = delete;

  std::uint64_t generation() const;
  std::vector<std::uint32_t> slot_generations() const;

  // A new owner: the slot's generation from now on. There is no advice until `publish`.
  void open(std::uint32_t slot, std::uint32_t generation);
  // `flags`: RINGFOLD_HINT_FIXED, or 0.
  void publish(std::uint32_t slot, std::span<const std::uint16_t> shares, std::uint32_t backpressure,
               std::uint32_t flags = 0);
  // No advice; the owner stays.
  void withdraw(std::uint32_t slot);
  Word word(std::uint32_t slot) const;

  void beat();
  // Marks the agent as gone, and closes the file. May be called again.
  void close();

  // For crash tests: dwells so long between the stores of a wide write. They are one cache line and otherwise appear
  // nearly at once, so that neither a reader nor a SIGKILL would meet the middle.
  void linger(unsigned spins) { spins_ = spins; }
  // For crash tests: leaves a slot as a writer does that was killed between the two halves of a wide write.
  void tear(std::uint32_t slot);

 private:
  ringfold_hints_header* header() const { return static_cast<ringfold_hints_header*>(base_); }
  ringfold_hint_slot& slot(std::uint32_t number) const;
  void lay_out();
  void take_over();
  void store_word(ringfold_hint_slot& slot, Word word);

  int fd_ = -1;
  void* base_ = nullptr;
  unsigned spins_ = 0;
};

enum class State { fresh, missing, foreign, other_abi, stale };
const char* name_of(State state);

// Never throws and never waits: what cannot be read is local. Nor does a file that is truncated end the process
// (mapping_guard.hpp).
class Reader {
 public:
  explicit Reader(std::string path);
  ~Reader();
  Reader(const Reader&) = delete;
  Reader& operator=(const Reader&) = delete;

  // Once per turn. Without an agent the file is looked for again, at most ten times a second.
  State look(std::uint64_t now_ns);
  State state() const { return state_; }

  // The word for this owner, or 0: local. For up to four paths this is the whole hint.
  Word read(std::uint32_t slot, std::uint32_t generation) const {
    if (state_ != State::fresh || slot >= RINGFOLD_HINTS_SLOTS) return 0;
    return ringfold_hint_word(map_.base, slot, generation);
  }
  // The same for any number of paths; on BUSY `hint` is what it was.
  ringfold_hint_result read(std::uint32_t slot, std::uint32_t generation, ringfold_hint& hint) const {
    if (state_ != State::fresh) return RINGFOLD_HINT_LOCAL;
    return ringfold_hint_read(map_.base, slot, generation, &hint);
  }
  // The flags of the hint that was read just before.
  std::uint32_t flags(std::uint32_t slot) const {
    return state_ == State::fresh ? ringfold_hint_flags(map_.base, slot) : 0;
  }
  std::uint64_t table_generation() const;
  // When the agent changed a slot last (CLOCK_MONOTONIC), or 0.
  std::uint64_t written_ns(std::uint32_t slot) const;

 private:
  void unmap();

  std::string path_;
  ringfold_hints_map map_{};
  State state_ = State::missing;
  std::uint64_t next_try_ns_ = 0;
};

}  // namespace ringfold::hints
