// One collective call: its memory, its progress through a plan, and how it is undone.
//
// The op's arrays are laid end to end into one virtual range of bytes (item sizes descending, so that a cut at a
// multiple of eight never splits an element). In place, `source` and `target` are the same memory and every byte is
// saved to `backup` when it is first overwritten, so that an abort can put it back at any time until the commit.
//
// A quantised op has the same plan and the same offsets, but its segments travel encoded and are therefore shorter. A
// segment's encoding is that of its pieces, one after the other: blocks never reach into another array. Encoded
// segments belong to what is queued for sending, not to the caller's memory.
//
// A rank may take part in a reduction without contributing to it: its operand does not exist, whatever its memory
// holds. So a value has a count of contributors, which travels with each segment; the owner of the final value divides
// by it. A value without contributors has no bytes and travels as an empty segment; where it is final it is written as
// zeros. What is reduced with it is passed on unchanged, so the bits are those of a reduction by the contributors
// alone. A rank knows all contributors before its local part is finished: the count of the final value determines how
// many absent ranks it must learn of (`set_absent`).
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <string>
#include <vector>

#include "ringfold/frame.hpp"
#include "ringfold/kernels.hpp"
#include "ringfold/plan.hpp"
#include "ringfold/pool.hpp"
#include "ringfold/quantize.hpp"

namespace ringfold {

inline constexpr std::size_t max_paths = 16;

struct Span {
  std::byte* source = nullptr;
  std::byte* target = nullptr;
  std::size_t bytes = 0;
  kernels::DType dtype = kernels::DType::u8;
  std::size_t at = 0;  // where it begins in the virtual range
};

// What retries an aborted op: nothing, the engine by itself, or the caller, because its arguments depend on the ring.
enum class Retry : std::uint8_t { never = 0, engine = 1, caller = 2 };

struct OpSpec {
  OpKind kind = OpKind::all_reduce;
  kernels::ReduceOp reduce_op = kernels::ReduceOp::sum;
  quantize::Scheme scheme = quantize::Scheme::none;
  std::uint64_t tag = 0;
  std::uint16_t root = 0;
  Retry retry = Retry::engine;
  bool again = false;  // another attempt of the last call on this tag, which the caller retries
  bool in_place = true;
  bool contribute = true;  // false: this rank's operand does not exist. It is the same call all the same
  Ns timeout = 0;
  std::vector<Span> spans;
  std::uint64_t step = no_step;  // these two are set by the core
  std::uint32_t call = 0;
  // all_gather: the output of all ranks' bytes; reduce_scatter: the output of this rank's chunk.
  std::byte* gathered = nullptr;
};

enum class OpStatus : std::uint8_t { ok = 0, aborted = 1, too_few = 2, failed = 3, cancelled = 4 };

enum class OpState : std::uint8_t {
  waiting,   // for an epoch to run in
  running,   // in the installed epoch, local part not finished
  done,      // local part finished, evidence not complete
  finished,  // `result` is final
};

struct OpResult {
  OpStatus status = OpStatus::ok;
  std::vector<std::byte> reason;
  std::uint32_t epoch = 0;
  std::vector<std::uint64_t> contributors;  // peer ids, sorted
  std::uint64_t registrations = 0;
  std::uint64_t sent_bytes = 0;
  std::uint64_t received_bytes = 0;
};

// Bytes that several holders share without copying them: a small op's payload is folded, forwarded and kept for a seal.
// One that was never given is not there, which is not the same as empty: its rank contributes nothing.
class Payload {
 public:
  Payload() = default;
  Payload(std::vector<std::byte> bytes)  // NOLINT: bytes become a payload wherever one is wanted
      : bytes_(std::make_shared<const std::vector<std::byte>>(std::move(bytes))) {}
  const std::byte* data() const { return bytes_ ? bytes_->data() : nullptr; }
  std::size_t size() const { return bytes_ ? bytes_->size() : 0; }
  bool is_there() const { return bytes_ != nullptr; }

 private:
  std::shared_ptr<const std::vector<std::byte>> bytes_;
};

using Payloads = std::vector<Payload>;  // by rank

// A segment that may be sent now.
struct Sendable {
  std::uint16_t stage = 0;
  bool own = false;          // the caller's bytes, not a value that was received
  std::uint32_t length = 0;  // of a value as it travels
  std::uint64_t offset = 0;
  std::uint32_t crc = 0;
  bool crc_known = false;
  Payload encoded{};               // quantised ops: the segment as it travels; own ones are encoded when they are taken
  bool again = false;              // it has been sent before, on a lane that is lost
  std::uint32_t contributors = 1;  // 0: there is no value, and nothing travels but the header

  std::uint32_t travelling_bytes() const { return contributors > 0 ? length : 0; }
};

// A contiguous piece of memory inside a segment.
struct Piece {
  const std::byte* at;
  std::size_t bytes;
};

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
  Ns started = 0;
  Ns deadline = 0;
  bool timeout_reported = false;
  bool small = false;
  bool mismatch_reported = false;
  // By direction, [1] to the next peer and [0] to the previous one:
  bool peer_ready[2] = {};  // it has called the op: no eager limit any more
  bool ready_sent[2] = {};  // and has received Ready of this peer
  std::size_t eager_sent[2] = {};
  std::size_t early_sent[2] = {};      // of these, before the neighbour was known to have called the op
  std::size_t early_received[2] = {};  // payload that came before Ready was sent to the neighbour
  std::array<std::uint64_t, max_paths> assigned[2] = {};  // bytes by path

  std::vector<bool> dones;  // by rank
  std::uint32_t done_count = 0;
  std::uint64_t registrations = 0;
  Payloads payloads;  // small ops only
#ifdef RINGFOLD_PLANTED
  bool divide_by_size = false;  // a planted bug: the division is by the ring's size, not by the count of contributors
#else
  static constexpr bool divide_by_size = false;
#endif

  // Begins (again) in an epoch. Everything of an earlier attempt is forgotten.
  // `fine`: segments small enough that paths of different speed end together.
  void start(std::uint32_t rank, std::uint32_t size, std::size_t small_bytes, std::size_t segment_bytes, bool fine,
             BackupPool& pool);

  const Plan& plan() const { return plan_; }
  bool local_part_finished() const {
    return received_ == plan_.receive_segments && (!reduces() || final_count_ + absent_count_ == plan_.size);
  }
  bool reduces() const { return spec.kind == OpKind::all_reduce || spec.kind == OpKind::reduce_scatter; }
  // A rank contributes nothing. False: it cannot be, because the final value has another count.
  bool set_absent(std::uint32_t rank);
  bool is_absent(std::uint32_t rank) const { return absent_[rank]; }
  std::uint32_t absent_count() const { return absent_count_; }

  bool has_sendable(bool to_next) const {
    return !again_[to_next].empty() || !forwards_[to_next].empty() || !own_[to_next].empty();
  }
  const Sendable& next_sendable(bool to_next) const {
    if (!again_[to_next].empty()) return again_[to_next].front();
    return forwards_[to_next].empty() ? own_[to_next].front() : forwards_[to_next].front();
  }
  Sendable take_sendable(bool to_next);
  // About how many bytes may be sent now.
  std::size_t sendable_bytes(bool to_next) const {
    return (again_[to_next].size() + forwards_[to_next].size() + own_[to_next].size()) * plan_.segment_bytes;
  }
  void resend(bool to_next, Sendable item);
  // Whether the segment's memory holds a later value by now. That value came around the ring, so the neighbour had the
  // segment, whether or not it has reported that.
  bool superseded(const Sendable& item) const;
  // The memory behind a sendable segment, in order.
  void pieces(const Sendable& item, std::vector<Piece>& out) const;
  std::uint32_t crc_of(const Sendable& item) const;

  enum class Applied { yes, duplicate, invalid };
  // Applies one received segment: reduces or overwrites, saves what was there, and queues it for the next hop.
  Applied apply(bool from_next, std::uint16_t stage, std::uint64_t offset, const std::byte* payload,
                std::uint32_t length, std::uint32_t crc, std::uint32_t contributors, bool ignore_bitmap = false);

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
  // A segment that came before the one it is to be reduced into.
  struct Early {
    std::uint16_t stage;
    std::uint64_t offset;
    std::uint32_t crc;
    std::uint32_t contributors;
    std::vector<std::byte> payload;
  };

  // What a received segment brings, and how many ranks its value is of with what is here.
  struct Incoming {
    std::uint64_t offset;
    const std::byte* payload;
    std::uint32_t length;  // of a value
    std::uint32_t crc;
    std::uint32_t contributors;
    std::uint32_t here;  // contributors of the value that it is reduced into

    std::uint32_t together() const { return contributors + here; }
  };

  void write(const Receive& receive, const Incoming& in);
  std::uint32_t write_span(const Receive& receive, const Incoming& in, const Span& span, std::size_t inside,
                           std::size_t at, std::size_t count);
  void write_quantised(const Receive& receive, const Incoming& in);
  bool count(const Receive& receive, std::uint16_t stage, const Incoming& in);
  std::uint32_t divisor(const Receive& receive, std::uint32_t contributors) const;
  bool quantised() const { return spec.scheme != quantize::Scheme::none; }
  // The part of the virtual range that the segment at `offset` of a chunk covers, and its length as it travels.
  std::size_t segment_end(std::int32_t chunk, std::size_t offset) const;
  std::uint32_t wire_bytes(std::size_t from, std::size_t to) const;
  void count_wire_bytes();
  std::vector<std::byte> encoded(std::size_t from, std::size_t to) const;
  void apply_early(std::uint16_t after, std::uint64_t offset);
  std::byte* work(std::size_t at) const;
  bool received(std::uint16_t stage, std::uint64_t offset) const;
  bool saves() const { return spec.in_place && spec.kind != OpKind::all_gather && spec.kind != OpKind::reduce_scatter; }
  template <typename Visit>
  void for_spans(std::size_t from, std::size_t to, Visit visit) const;

  Plan plan_;
  std::vector<std::uint64_t> bitmap_;
  std::uint32_t received_ = 0;
  std::vector<bool> absent_;  // by rank
  std::uint32_t absent_count_ = 0;
  std::uint32_t final_count_ = 0;  // contributors of the final value, once a segment of it is here
  bool has_final_ = false;
  // By stage: contributors of the value here, as long as a later stage is reduced into it.
  std::vector<std::uint32_t> stage_counts_;
  std::deque<Sendable> own_[2];
  std::deque<Sendable> forwards_[2];
  std::deque<Sendable> again_[2];
  std::vector<Early> early_;
  BackupPool::Buffer backup_;  // in place: the saved bytes; reduce_scatter: the partial sums
};

Descriptor describe(const OpSpec& spec);

// How many bytes the payloads of all ranks may have, together, for an op of this tag to be a small one.
std::size_t max_payload_bytes(std::uint64_t tag);

}  // namespace ringfold
