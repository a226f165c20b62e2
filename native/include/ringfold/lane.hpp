// One connection between two members, most often neighbours in the ring: its frames, what the transport reports about
// it, and what it has sent that the other side has not handled yet.
//
// Two things are known about a frame that a lane has sent. The transport reports how many bytes the other side's
// *kernel* has acknowledged: this shows how fast a lane is (`LaneMeter`). And the other side's *core* reports how many
// frames it has handled (`applied`): this shows what may be forgotten. In between a frame is a *flight*: the lane keeps
// enough of it to let another lane of its link send it again (`Flights`).
//
// A lane belongs to its link, and with it to one channel: see channel.hpp for who may touch it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <string>
#include <vector>

#include "ringfold/part.hpp"
#include "ringfold/stream.hpp"

namespace ringfold {

// How a lane stands to the others of its link.
struct Sharing {
  bool shared = false;  // the link is to have several lanes: one that is lost costs nothing but time
  std::uint32_t path = 0;
  std::uint32_t paths = 1;
  std::uint32_t epoch = 0;  // if this one is installed already, the lane joins it late and is marked at once
  std::uint32_t channel = 0;
  bool direct = false;  // it leads to a member that is no neighbour in the ring
};

struct LaneInfo {
  ConnId conn;
  bool outgoing;
  PeerId peer;
  std::uint32_t lane;
  bool shared = false;
  std::uint32_t paths = 1;
  std::uint32_t channel = 0;
  bool in_memory = false;
  bool direct = false;
};

// The round-trip time of a path: smoothed, and its minimum (0: unknown). What exceeds the minimum is time in queues, or
// a delayed acknowledgement.
struct Rtt {
  Ns smoothed = 0, min = 0;
};

// A frame to be sent: a header, then a segment of an op's part, or bytes of its own. What a connection had to send
// before it became a lane has no header.
struct OutFrame {
  FrameHeader header{};
  bool has_header = false;
  Payload owned{};
  PartPtr part{};
  Sendable item{};
  bool copied = false;   // the segment is in `owned`, not in the op's memory
  bool again = false;    // as of a flight
  bool is_copy = false;  // another lane had it before
  std::size_t sent = 0;
  std::size_t total = 0;

  static OutFrame control(FrameHeader header, Payload payload);
  // Takes the segment out of the op's memory.
  void copy_segment();

  template <typename Add>
  void visit(Add add) const {
    if (has_header) add(reinterpret_cast<const std::byte*>(&header), sizeof header);
    if (part && !copied) {
      std::vector<Piece> pieces;
      part->pieces(item, pieces);
      for (const Piece& piece : pieces) add(piece.at, piece.bytes);
    } else if (owned.size() > 0) {
      add(owned.data(), owned.size());
    }
  }
};

// What the transport reports about a lane: how fast it is, and for how long it has been silent.
//
// The rate is measured over stretches in which something was in flight all the time.
//
// On a high-RTT path, one whose RTT exceeds such a stretch, two more things count. Nothing comes back in the first RTT,
// however fast the lane is: the first stretch begins with the first acknowledgement, and every one lasts an RTT or
// more, because acknowledgements come in the bursts in which the bytes were sent. And the rate of a lane that ran dry
// is limited by its work, not by its path: such a stretch does not count. Otherwise a lane would lose its rate whenever
// an op begins, and look late to all others.
class LaneMeter {
 public:
  void begin(Ns now) { last_acknowledged_ = now; }
  void shift(Ns gap) { last_acknowledged_ += gap; }
  void sent(Ns now, std::size_t bytes);
  // `has_more`: the lane has something to send. `is_shared`: measure its rate.
  void acknowledged(Ns now, std::uint64_t unacknowledged, Ns rtt, Ns min_rtt, bool has_more, bool is_shared);

  std::uint64_t sent_total() const { return sent_total_; }
  std::uint64_t acknowledged_total() const { return acknowledged_total_; }
  std::uint64_t in_flight() const { return sent_total_ - acknowledged_total_; }
  std::uint64_t unacknowledged() const { return unacknowledged_; }
  Ns last_acknowledged() const { return last_acknowledged_; }
  Ns rtt() const { return rtt_; }
  double rate() const { return rate_; }  // of acknowledged bytes, per nanosecond; 0: unknown
  // The same over about the last second of such time, in bytes per second; 0: not measured in the last second.
  std::uint64_t recent_rate(Ns now) const;
  // Zeros: not measured in the last second.
  Rtt recent_rtt(Ns now) const;

  // How much longer than an RTT nothing in flight has been acknowledged, as of the last query: later than that nothing
  // is known, and a peer that was late itself must not take the others for silent.
  Ns stalled() const;
  // The same with the benefit of the doubt: a short frame that nothing follows is acknowledged late on the best of
  // paths. So the time counts from when so much was in flight that it is acknowledged at once.
  Ns silent() const;
  bool is_silent() const { return silent() >= no_longer_counted_on; }
  // How long until the byte at `end` has arrived, estimated. A frame that was sent twice already gets the benefit of
  // the doubt: otherwise two lanes would send a short frame back and forth until it is acknowledged.
  Ns overdue_by(std::uint64_t end, bool is_copy) const;
  // How long so many bytes take at a rate.
  static Ns time_for(double bytes, double rate);

 private:
  static constexpr Ns no_longer_counted_on = 20'000'000;  // after so long without an acknowledgement that is due

  void measure(Ns now, std::uint64_t acknowledged, bool has_more);
  void note_rate(Ns now, std::uint64_t acknowledged);

  std::uint64_t sent_total_ = 0, acknowledged_total_ = 0, unacknowledged_ = 0;
  Ns last_acknowledged_ = 0;
  double rate_ = 0;
  Ns rtt_ = 0, min_rtt_ = 0;
  Ns rtt_sampled_at_ = 0;   // when the transport last reported it
  Ns saturated_since_ = 0;  // since when so much is in flight that it is acknowledged at once
  Ns looked_at_ = 0;        // when the transport was last queried
  Ns busy_since_ = 0;       // where the present stretch of that began, and what was acknowledged then
  std::uint64_t busy_from_ = 0;
  bool awaits_first_ = false;            // it began from nothing, and nothing has been acknowledged since
  bool ran_dry_ = false;                 // there was a moment without anything to send in it
  Ns measured_ = 0;                      // when `rate_` was last looked at
  double busy_bytes_ = 0, busy_ns_ = 0;  // over about the last second of such time
};

// A frame that a shared lane has sent and the other side has not reported as applied.
struct Flight {
  FrameHeader header;
  Payload owned;
  PartPtr part;
  Sendable item;
  std::uint64_t end = 0;  // bytes that the lane had sent with it
  bool again = false;     // another lane sends a copy of it
  bool is_copy = false;
};

// Frames count from the lane's first, in the order of sending, `applied` frames not among them: both ends agree.
class Flights {
 public:
  std::deque<Flight>& all() { return flights_; }
  const std::deque<Flight>& all() const { return flights_; }
  std::uint64_t sent() const { return confirmed_ + flights_.size(); }
  void note_sent(OutFrame& frame, std::uint64_t end);
  // The other side has handled so many frames. False: so many were never sent.
  bool applied(std::uint64_t count);
  // The epoch is over: they are not needed any more.
  void forget();
  // So much is unreported that the other side does not mean to report at all.
  bool are_too_many(std::uint64_t sent_total) const;

  // A frame came; true when it is time to report.
  bool came(std::size_t bytes);
  // What to report.
  std::uint64_t report();

 private:
  std::deque<Flight> flights_;
  std::uint64_t confirmed_ = 0;  // frames of this lane before the first of `flights_`
  std::uint64_t seen_ = 0;       // received, without `applied`
  std::uint64_t reported_ = 0;   // of those
  std::size_t bytes_unreported_ = 0;
};

struct Lane : Connection {
  Lane(Connection base, bool outgoing, PeerId peer, std::uint32_t number, Sharing sharing);

  const bool outgoing;
  const PeerId peer;
  const std::uint32_t number;
  const Sharing sharing;
  std::uint32_t mark_sent = 0;
  std::uint32_t mark_seen = 0;
  Ns last_received = 0;
  Ns frame_since = 0;      // when the first byte came of the frame that is being read
  bool in_memory = false;  // the bytes go through memory that both peers share
  Ns offered_since = 0;    // since when the transport is to take what is first in `tx`; 0: there is nothing
  SendQueue<OutFrame> tx;
  LaneMeter meter;
  Flights flights;

  // Control goes before payload that has not begun.
  void queue_control(FrameHeader header, Payload payload);
  // Bytes that have not arrived as far as is known, and those that wait to be sent.
  double ahead() const { return static_cast<double>(meter.in_flight() + tx.bytes()); }
  // How many bytes the kernel should hold unsent: enough for as long as this thread may not get a core, and no more,
  // because they cannot be given to another lane. 0: as many as it likes.
  std::size_t unsent_wanted() const;
  // The op's memory is about to be changed or given back: frames that have not begun are dropped, the rest of one that
  // has begun becomes a copy, so that the lane stays in step.
  void detach(const OpPart& part);
};

}  // namespace ringfold
