// One collective call: its name, its state, the evidence for it, and the parts that carry it.
//
// The op is the head: what it is, who has reported Done, how it ended. What moves is in its parts (`part.hpp`), one for
// each channel that carries a slice of it. The head belongs to the op table; see there who may touch it.
//
// A rank may take part in a reduction without contributing to it: its operand does not exist, whatever its memory
// holds. A rank knows all contributors before its local part is finished: the count of the final value determines how
// many absent ranks it must learn of (`set_absent`).
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "ringfold/op_spec.hpp"
#include "ringfold/part.hpp"
#include "ringfold/pool.hpp"

namespace ringfold {

enum class OpStatus : std::uint8_t { ok = 0, aborted = 1, too_few = 2, failed = 3, cancelled = 4 };

enum class OpState : std::uint8_t {
  waiting,   // for an epoch to run in
  running,   // in the installed epoch, local part not finished
  done,      // local part finished, evidence not complete
  ending,    // evidence complete, but not every channel has let go of its memory
  finished,  // `result` is final
};

struct OpResult {
  OpStatus status = OpStatus::ok;
  Bytes reason;
  std::uint32_t epoch = 0;
  std::vector<std::uint64_t> contributors;  // peer ids, sorted
  std::uint64_t registrations = 0;
  std::uint64_t sent_bytes = 0;
  std::uint64_t received_bytes = 0;
};

// How an op is cut, the same with every member.
struct Cut {
  std::uint32_t rank = 0, size = 1;
  std::size_t small_bytes = 0, segment_bytes = 0;
  bool fine = false;  // segments small enough that paths of different speed end together
  std::uint32_t channels = 1;
  Topology topology{};
};

// Which channels carry an op. Everybody decides alike, from what is called and from the epoch.
struct Placement {
  bool small = false;         // whole inside Done, in channel 0
  std::uint32_t slices = 1;   // above 1: one in each of so many channels
  std::uint32_t channel = 0;  // of an op that is not cut
};
Placement place(const OpSpec& spec, const Cut& cut);

class Op {
 public:
  Op(std::uint64_t id, OpSpec spec);

  const std::uint64_t id;
  const OpSpec spec;
  const Descriptor descriptor;
  const std::uint32_t fingerprint;
  const std::size_t bytes;  // of the caller's arrays

  OpState state = OpState::waiting;
  OpResult result;
  std::uint32_t epoch = 0;
  std::uint32_t sequence = 0;
  Ns called = 0;
  Ns started = 0;
  Ns local = 0;                            // when the local part was done
  Ns first_done = 0, last_done = 0;        // when the first and the last Done of another rank came
  std::optional<std::uint32_t> last_rank;  // whose it was
  std::uint32_t attempts = 0;
  Ns deadline = 0;
  bool timeout_reported = false;
  bool small = false;
  bool mismatch_reported = false;

  std::vector<bool> dones;          // by rank
  std::vector<std::uint8_t> links;  // by rank, what its Done says about its lanes (LinkFacts)
  std::uint32_t doubled = 0;        // recursive doubling of Dones: so many steps have been sent
  bool doubles = false;             // instead of around the ring, or straight to all
  std::uint32_t done_count = 0;
  std::uint64_t registrations = 0;
  Payloads payloads;  // small ops only
  std::vector<PartPtr> parts;
  // Parts that still miss segments, and parts of a committed op that a channel still holds. Each channel counts its own
  // down, and the one that comes to 0 reports it. After the last count the op may be gone.
  mutable std::atomic<std::uint32_t> parts_to_finish = 0, parts_to_end = 0;
#ifdef RINGFOLD_PLANTED
  bool divide_by_size = false;  // a planted bug: the division is by the ring's size, not by the count of contributors
#else
  static constexpr bool divide_by_size = false;
#endif

  // Begins (again) in an epoch, as the `sequence`-th op of its tag. Everything of an earlier attempt is forgotten.
  //
  // A large op has a part in every channel. Where its parts would be too short, the op is not cut: its tag says which
  // channel carries it, so that ops in flight on several tags use all channels, and those on tag 0 the one that the
  // caller drives; so do those that are too small to wake another thread for. Every op has a part in channel 0, which
  // may be empty: that channel carries the frames about the op as a whole, also where members disagree what it is.
  void start(const Cut& cut, std::uint32_t sequence, BackupPool& pool);

  bool reduces() const { return spec.kind == OpKind::all_reduce || spec.kind == OpKind::reduce_scatter; }
  // Whether what is overwritten is saved.
  bool saves() const { return spec.in_place && spec.kind != OpKind::all_gather && spec.kind != OpKind::reduce_scatter; }
  std::byte* backup() const { return backup_.at(); }

  // The header of a frame about this op.
  FrameHeader header(LaneFrame kind) const;

  // All parts have all their segments. False: they have counted different contributors, or more than there can be.
  bool parts_finished();
  bool local_part_finished() const {
    return is_received_ && (!reduces() || final_count_.value_or(0) + absent_count_ == size_);
  }
  // A rank contributes nothing. False: it cannot be, because the final value has another count.
  bool set_absent(std::uint32_t rank);
  bool is_absent(std::uint32_t rank) const { return absent_[rank]; }
  std::uint32_t absent_count() const { return absent_count_; }

  // Bytes of payload that were sent to the next peer. For when the channels have let go of it.
  std::uint64_t sent_to_next() const;

  // A small op: what this rank contributes, and the result once every rank's payload is here.
  Payload own_payload() const;
  bool payloads_fit() const;
  void fold();

  // Puts back every byte that was overwritten in place.
  void restore();
  // The last copy of a reduce_scatter, when the op is committed.
  void deliver();
  void release_memory(BackupPool& pool);

 private:
  Plan no_plan() const;

  std::uint32_t rank_ = 0, size_ = 1;
  bool is_received_ = false;  // by all parts
  std::vector<bool> absent_;  // by rank
  std::uint32_t absent_count_ = 0;
  std::optional<std::uint32_t> final_count_;  // contributors of the final value, once all parts are finished
  BackupPool::Buffer backup_;                 // in place: the saved bytes; reduce_scatter: the partial sums
};

using OpPtr = std::shared_ptr<Op>;

}  // namespace ringfold
