// All lanes of one channel between this peer and another member: a neighbour in the ring, on one of its two sides, or a
// member that direct lanes lead to. They share the link's work.
//
// Segments are pulled by whichever lane can take more, so the lanes' rates need not be known beforehand. What remains
// is the end: a lane that is slow, or dead, holds frames that all peers wait for.
//
//   The tail. An idle lane takes over the last frame of the slowest one, if it is likely to deliver it sooner. What the
//   slow lane has not begun is taken away from it; the rest is sent twice.
//
// link.cpp has the lanes and the tail, choice.cpp decides which lane takes the next segment.
//
// Invariants:
// - Receivers handle duplicates: segments by the part's bitmap, Dones by rank, Open and Ready are idempotent, early
//   frames by what is stashed already; frames of finished sequences are drained.
// - A segment that is sent twice never reads the caller's memory any more: the copy that arrived may have led to that
//   memory being overwritten, by the value that came back around the ring. So the second one is a copy, made while the
//   memory was right (`superseded`), and the rest of a first one that has begun becomes a copy, too.
// - A flight that another lane sends again belongs to that lane; if that lane is lost, it is sent again from there.
// - What may be sent is sent. There is always a lane that may take the next segment, and a lane that leaves it to
//   others wakes them (`leave_to_others`).
//
// A link belongs to one channel: see channel.hpp for who may touch it.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>

#include "ringfold/epoch_state.hpp"
#include "ringfold/event.hpp"
#include "ringfold/lane.hpp"
#include "ringfold/path_shares.hpp"
#include "ringfold/planted.hpp"

namespace ringfold {

// What the links of a channel work with.
struct LinkContext {
  const EpochState& epoch;
  const ShareSources& advice;
  const Planted& planted;
  FlushList& flush;
  Stats& stats;
};

class Link {
 public:
  // What a link is called by: the member at its other end, and how it stands to this one.
  struct Key {
    PeerId peer = 0;
    bool outgoing = false;
    bool direct = false;
    auto operator<=>(const Key&) const = default;
  };

  Link(Key key, const LinkContext& context) : key(key), context_(context) {}

  const Key key;
  // In the installed epoch; no_side: it has no place in it.
  Side side() const { return context_.epoch.side_of(key.peer, key.outgoing, key.direct); }
  // One of its lanes has sent the mark of the installed epoch.
  bool is_marked() const;

  Lane& add(Lane lane);
  std::map<ConnId, Lane>& lanes() { return lanes_; }
  const std::map<ConnId, Lane>& lanes() const { return lanes_; }
  // Takes a lane out. What it had not delivered goes over the others.
  void remove(ConnId id);

  // An epoch was installed: nothing of the one before counts.
  void install(Ns now);
  // Sends the mark of the installed epoch.
  void mark(Lane& lane);
  // Sends a control frame over the lane that is likely to deliver it first. Without a lane it is dropped.
  void send(const FrameHeader& header, Payload payload);
  void flush_all();
  // Those lanes that may have waited for this one.
  void flush_idle_but(const Lane& lane);

  // Whether this lane may take the next segment of a part, rather than another one.
  bool may_take(const Lane& lane, const OpPart& part) const;
  // It leaves it to others. False: there is no other lane for it.
  bool leave_to_others(const Lane& lane, const OpPart& part);
  void count_assigned(const Lane& lane, OpPart& part, std::size_t bytes);
  // An idle lane takes over the tail of a slow one. False: there is none.
  bool reissue(Lane& idle);
  // An op begins, and none is in flight.
  void forgive_credits(std::size_t largest_segment);

  // Bytes of payload assigned to each path since the epoch began; what another path took over is counted there.
  const std::array<std::uint64_t, max_paths>& path_bytes() const { return path_bytes_; }

 private:
  struct Tail {
    Lane* lane = nullptr;
    std::size_t at = 0;  // in its `tx` or its `flights`
    bool is_queued = false;
  };

  bool is_marked(const Lane& lane) const { return lane.mark_sent == context_.epoch.number(); }

  // link.cpp
  Lane* lane_for_control();
  void requeue(const FrameHeader& header, const PartPtr& part, const Sendable& item, const Payload& owned);
  bool worth_sending(const FrameHeader& header, const PartPtr& part, const Sendable& item) const;
  Ns arrives_in(const Lane& lane, std::size_t bytes) const;
  Tail tail_of(Lane& lane, std::uint64_t& end, std::size_t& length, bool& is_copy) const;
  Tail find_tail(const Lane& idle);
  void count_taken_over(const Lane& slow, const Lane& idle, std::size_t bytes, bool is_moved);

  // choice.cpp
  std::optional<PathShares> advice_for(const Lane& lane) const;
  bool is_fixed(const Lane& lane) const;
  bool may_take_fixed(const Lane& lane, const OpPart& part) const;
  bool too_late(const Lane& lane, const OpPart& part) const;
  bool too_late_by_shares(const Lane& lane, const OpPart& part, const PathShares& advice) const;
  double presumed_rate(const Lane& lane) const;
  bool is_measured() const;
  std::array<bool, max_paths> usable_paths(const Lane& lane, const PathShares& advice) const;
  bool is_vetoed(const Lane& lane) const;
  bool is_advised(const Lane& lane, const OpPart& part) const;
  bool is_within_share(const Lane& lane, std::size_t next, std::size_t segment, const PathShares& advice) const;
  void charge(const Lane& lane, double bytes);

  const LinkContext& context_;
  std::map<ConnId, Lane> lanes_;
  std::array<std::uint64_t, max_paths> path_bytes_{};
  PathCredits credits_;
};

}  // namespace ringfold
