// The ops of this peer, from their call to their end: their tags, the evidence for them, and the verdicts.
//
// An op is finished with success when Done of every member has been received (evidence), or by a verdict. After a seal
// no Done leaves and no evidence counts, until settle() has decided every op; the retryable ones start again in the
// next epoch.
//
// What a channel reports about an op comes in by on_report(). A Done leaves when all parts of the op have all their
// segments, and memory is changed or given back only after every channel has let go of it (Channel::end): an op whose
// evidence is complete is `ending` until then. Calls, evidence and reports may come while other threads drive the
// channels, so what they lead to goes to the channels as commands. Verdicts, cancelling and the end of all ops touch
// the channels themselves: all of them stand still meanwhile, and no command is outstanding, so no op is `ending`
// either.
//
// How Dones travel. Around the ring, in both directions to half-way, passed on from rank to rank. Or, where direct
// lanes lead to all members that are no neighbours, straight to each of them: then nobody passes them on (`is_direct`).
// Every rank decides that for its own Dones, whenever one leaves, because either is complete by itself: each Done
// reaches each rank exactly once, so who has them all has also passed on what it had to. A direct lane that breaks may
// have lost a Done; therefore it ends the epoch, like any other link.
//
// When segments take direct lanes, too. All ranks must plan an op alike, and lanes connect at different times. So every
// Done says whether its rank has lanes to all others, in all channels. A rank that commits an op has the Dones of all
// ranks, the same as every other rank has: if all say yes, they all plan the next op of the tag for a mesh. By the same
// agreement the Dones of 4, 8 or 16 ranks that are on one host, but do not share memory, are exchanged by recursive
// doubling: there the number of system calls counts, not the number of hops.
//
// It belongs to the core: see there who may touch it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "ringfold/call_names.hpp"
#include "ringfold/channels.hpp"
#include "ringfold/op_log.hpp"

namespace ringfold {

struct SealedOp {
  std::uint64_t tag;
  std::uint32_t sequence;
  int state;  // 0 unfinished, 1 done, 2 committed
  std::uint64_t registrations;
  std::optional<Payloads> payloads;
  Descriptor descriptor;
};

struct Verdict {
  std::uint64_t tag;
  std::uint32_t sequence;
  std::uint32_t fingerprint;  // of the op's descriptor
  bool commit;
  std::uint64_t registrations;
  std::optional<Payloads> payloads;
  int final;  // 0: tried again where it is retryable; 1: over
  Bytes reason;
};

class OpTable {
 public:
  OpTable(EpochState& epoch, Channels& channels, EventQueue& events, const Planted& planted)
      : epoch_(epoch), channels_(channels), events_(events), planted_(planted) {}

  // Calls. Throws std::invalid_argument when the tag is in flight.
  std::uint64_t submit(Ns now, OpSpec spec);
  OpPtr find(std::uint64_t id) const;
  // Only an op whose Done has not been sent can be cancelled: no rank can have committed it.
  bool cancel(std::uint64_t id);
  void release(std::uint64_t id);
  // This call fails, also if it has not been made here yet.
  void refuse(const CallName& name, Bytes reason);
  CallNames& names() { return names_; }
  void set_registrations(std::uint64_t count) { registrations_ = count; }
  // Where the ops of each tag begin to count, the same with all peers. For tests, which begin shortly before it wraps.
  void set_first_sequence(std::uint32_t first);

  // Epochs.
  std::vector<SealedOp> seal();
  void settle(Ns now, const std::vector<Verdict>& verdicts, const Bytes& default_reason);
  // An epoch was installed: what waits starts.
  void restart(Ns now);
  void fail_all(OpStatus status, Bytes reason);
  // Committed ops per tag in the installed epoch.
  std::vector<std::pair<std::uint64_t, std::uint32_t>> progress() const;

  // What was heard about ops. on_evidence: false, with a reason, when the master breaks the protocol.
  void on_report(Ns now, const Report& report);
  bool on_evidence(Ns now, const std::byte* body, std::size_t bytes, std::string& why);
  // Dones for the master.
  std::vector<Bytes> take_dones() { return std::exchange(dones_, {}); }

  // Time: this process slept; ops are late; what a heartbeat tells about ops.
  void shift(Ns gap);
  void check_deadlines(Ns now);
  void announce(Ns now, Bytes& heartbeat) const;
  // When the oldest op that runs began.
  std::optional<Ns> oldest() const;
  // Of the ops that ended since the last call, in bytes per second.
  std::uint64_t take_out_rate() { return std::exchange(best_out_rate_, 0); }

  bool any_in_flight() const { return !running_.empty() || !waiting_.empty(); }
  std::vector<std::uint64_t> tags_in_flight() const;
  const OpLog& log() const { return log_; }
  std::uint64_t finished_count() const { return finished_count_; }
  const Stats& stats() const { return stats_; }

 private:
  struct TagState {
    std::uint32_t next = 0;  // sequence
    OpPtr running{};
    bool called = false;
    // An op was cancelled here that the neighbours still wait for: the next one runs in the next epoch.
    bool cancelled = false;
    std::uint8_t links = 0;  // what all Dones of the last op say about lanes
    bool has_committed = false;
    std::uint32_t committed = 0;
    Descriptor committed_descriptor{};
    std::uint64_t committed_registrations = 0;
    std::optional<Payloads> committed_payloads{};
  };

  TagState& tag_state(std::uint64_t tag) {
    return tags_.try_emplace(tag, TagState{.next = first_sequence_}).first->second;
  }
  void check_tag(std::uint64_t tag) const;
  void start(Ns now, const OpPtr& op);
  void begin_in_epoch(Ns now, Op& op);
  Cut cut() const;
  OpPtr running_op(const PartPtr& part) const;

  // Frames about an op as a whole. Each returns false with a reason when the neighbour breaks the protocol.
  bool on_frame(Ns now, const OpPtr& op, const Report& report, std::string& why);
  bool on_open(Op& op, const FrameHeader& header, const Payload& payload, std::string& why);
  bool on_absent(Ns now, const OpPtr& op, const Report& report, std::string& why);
  bool on_done(const OpPtr& op, const Report& report, std::string& why);
  void send_absent(const Op& op, Side to, std::uint32_t origin);
  void send_done(Op& op, Side to, std::uint32_t origin, std::uint64_t registrations, std::uint16_t stage = 0);
  void double_dones(Op& op);
  bool is_of_block(std::uint32_t origin, Side from) const;
  void send_done_to_master(Op& op);

  void local_part_done(Ns now, const OpPtr& op);
  void check_evidence(const OpPtr& op);
  void commit(const OpPtr& op);
  void conclude(const OpPtr& op);
  void note_rate(const Op& op);
  void finish(const OpPtr& op, OpStatus status, Bytes reason);
  void undo(const OpPtr& op);
  void record(const Op& op);
  void forget_tags();

  EpochState& epoch_;
  Channels& channels_;
  EventQueue& events_;
  const Planted& planted_;
  Stats stats_;
  Ns now_ = 0;  // as of the last call that said it: for times that only people look at
  OpLog log_;
  CallNames names_;
  BackupPool pool_;
  std::uint64_t registrations_ = 0;
  std::uint32_t first_sequence_ = 0;
  std::unordered_map<std::uint64_t, TagState> tags_;
  std::size_t called_tags_ = 0;
  std::uint64_t next_op_ = 1;
  std::unordered_map<std::uint64_t, OpPtr> ops_;
  std::vector<OpPtr> running_;  // in the order they were called
  std::vector<OpPtr> waiting_;
  std::vector<Bytes> dones_;
  std::uint64_t best_out_rate_ = 0;
  std::uint64_t finished_count_ = 0;
  bool over_ = false;
  OpStatus over_status_ = OpStatus::failed;
  Bytes over_reason_;
};

}  // namespace ringfold
