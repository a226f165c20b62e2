// Probing without sockets: packets, the map between clocks, and the exchanges of one node. Words and the picture of an
// exchange are in src/ringfold/probe/exchanges.py; the shell with the socket and the thread is in probe_socket.hpp.
//
// A packet has 40 bytes, little-endian:
//
//    0  u64  stamp a   } Pt2: t1_tx, -       Pr1: t1_rx, -       by the sender's clock; 0 where there is none
//    8  u64  stamp b   } Pr2: r1_tx, t2_rx   Pd1: r2_tx, r1_tx
//   16  u8   marker 0x52
//   17  u8   bits 0-2 kind, bit 3 the sender's stamps are made in user space, bit 4 its host's clock stepped a
//            moment ago, bits 5-7 version (1)
//   18  u32  source node
//   22  u32  destination node
//   26  u48  sequence
//   32  u64  tag: SipHash-2-4 of bytes 0 to 31 under the key of the probe graph
//
// The tag is the authority: a packet without the key is ignored. Addresses are not compared, and answers go to where
// the probe came from, because a neighbour behind NAT does not come from the address by which it is known. That cannot
// be turned against others: an answer is as large as a probe, there are three for each sequence that is received for
// the first time, and a captured probe is accepted once at most.
//
// Sequences start from the time of day (Unix nanoseconds / 2^16) and grow by one a cycle, which is slower than the time
// of day grows. So a prober that was restarted goes on above where it stopped, and a responder can refuse what is old.
#pragma once

#include <array>
#include <bitset>
#include <cstdint>
#include <deque>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "ringfold/frame.hpp"

namespace ringfold::probe {

using Node = std::uint32_t;
using Key = std::array<std::uint8_t, 16>;

enum class Kind : std::uint8_t { pt1 = 1, pt2, pr1, pr2, pd1 };

struct Packet {
  Kind kind = Kind::pt1;
  bool user_stamps = false;
  bool stepped = false;
  Node src = 0, dst = 0;
  std::uint64_t sequence = 0;
  Ns a = 0, b = 0;
};

inline constexpr std::size_t packet_bytes = 40;
inline constexpr std::uint64_t sequence_mask = (std::uint64_t{1} << 48) - 1;
using Wire = std::array<std::uint8_t, packet_bytes>;

enum class Reading { good, malformed, spoofed };

std::uint64_t siphash(const Key& key, std::span<const std::uint8_t> bytes);
Wire encode(const Key& key, const Packet& packet);
Reading decode(const Key& key, std::span<const std::uint8_t> bytes, Packet& packet);

// The node's clock, if it is not the raw one: raw + offset + floor((raw - anchor) * drift / 10^9), in integers.
Ns virtual_clock(Ns raw, Ns anchor, Ns offset, std::int64_t drift_ppb);

// From CLOCK_REALTIME, in which the kernel stamps, to CLOCK_MONOTONIC_RAW, which is not steered.
//
// A sample is a reading of the one between two readings of the other. Between changes of the kernel's steering both
// clocks are straight lines of the same counter, so a line through the last samples is more exact than any sample. A
// sample that lies off the line beyond its own uncertainty is a *bend* (the steering changed): what came before the
// last sample is forgotten. One that lies off by more than steering can explain is a *step*: everything before it is
// forgotten, and a stamp made since the last sample could be of either side, so the shell throws it away.
class ClockMap {
 public:
  // `slope`: by how much CLOCK_REALTIME is steered to run faster, as far as it is known.
  explicit ClockMap(double slope = 0) : slope_(slope) {}
  void add(Ns raw_before, Ns real, Ns raw_after);
  // Any time; exact for what was stamped within some milliseconds of a sample.
  Ns to_raw(Ns real) const;
  bool is_ready() const { return !samples_.empty(); }
  // By how much CLOCK_REALTIME jumped just before the last sample; 0 if it did not.
  Ns step() const { return step_; }
  // How far samples lie from the line (RMS), in nanoseconds.
  double noise() const { return noise_; }
  std::uint64_t bends() const { return bends_; }

 private:
  struct Sample {
    Ns raw, lead;  // lead: real - raw
  };
  double predicted(Ns raw) const;
  void fit();

  std::deque<Sample> samples_;
  double slope_, intercept_ = 0;  // of lead, around the last sample
  double noise_ = 0;
  Ns step_ = 0;
  std::uint64_t bends_ = 0;
};

// A socket address, which the core only carries around.
struct Endpoint {
  std::array<std::uint8_t, 28> bytes{};
  std::uint8_t length = 0;
};

struct Link {
  Node node = 0;
  Endpoint at;
};

// Which packet a transmit stamp belongs to.
struct Owner {
  std::uint32_t generation = 0;
  std::uint32_t link = 0;
  std::uint64_t sequence = 0;
  Kind kind = Kind::pt1;
};

struct Outgoing {
  Packet packet;
  Endpoint to;
  Owner owner;
  bool wants_stamp() const { return packet.kind != Kind::pd1; }
};

// t1_tx, t1_rx, t2_tx, t2_rx, r1_tx, r1_rx, r2_tx, r2_rx
using Row = std::array<Ns, 8>;

// What a window holds about one out-edge; EdgeWindow in exchanges.py says what the fields mean.
struct Window {
  Node src = 0, dst = 0;
  Ns begin = 0, end = 0;
  std::vector<Row> rows{};
  std::vector<std::uint8_t> kept{};
  std::uint64_t sent = 0, lost = 0, duplicates = 0, filtered = 0;
  Ns threshold = 0;
  bool user_stamps = false;
  std::string stepped{};
};

// Fills `kept`, `filtered` and `threshold` from the rows.
//
// By how much the spacing of a pair changed in flight is compared with how much the spacing of the window's other
// pairs did, in each direction by itself: centre (the clocks' drift moves it) and spread are medians. The threshold is
// six spreads (four standard deviations, were they normal), at least `min_threshold` and at most a fifth of the gap.
// And whatever the noise, the best quarter passes, and no fewer than 20 pairs: on a path that is bad all the time, a
// bad estimate with an honest uncertainty is better than none.
void filter(Window& window, Ns gap);

struct CoreStats {
  std::uint64_t received = 0, malformed = 0, spoofed = 0, strangers = 0, replayed = 0, duplicates = 0, refused = 0;
  std::uint64_t unstamped = 0, ticks = 0, ticks_late = 0, tx_stamps = 0, valid = 0, complete = 0;
  std::uint64_t sequence = 0;  // of the newest probe
};

// The exchanges of one node, as prober and as responder. `now` is raw time and only plans; stamps are by the node's
// clock.
//
// Everything is sent at two instants of a cycle of gap + pause, because the kernel stamps what comes in between:
//   first   all Pt1; all Pr1 of exchanges whose Pt2 is in (or will not come); Pd1 of the last cycle's answers
//   second  one gap later: all Pt2 and Pr2
// So a node wakes twice a cycle, however many edges it has, and an answer comes within a cycle.
//
// Invariants: sequences of an edge's exchanges are consecutive. An exchange is decided once: complete, or lost, or
// dropped because its window ended. A responder holds at most `max_answers` of one neighbour.
class Core {
 public:
  Core(Node me, std::uint64_t first_sequence) : me_(me), sequence_(first_sequence & sequence_mask) {
    stats_.sequence = sequence_;
  }

  // Forgets what is in flight and begins a new window. What was received under the same key stays known as received.
  void configure(Ns node_now, const Key& key, const std::vector<Link>& out, const std::vector<Link>& into);
  void resume(Ns now, Ns node_now, Ns gap, Ns pause);
  void pause();
  // Closes the window. Exchanges in flight belong to no window: they are neither sent nor lost.
  std::vector<Window> rotate(Ns now, Ns node_now);
  // The window as it would be if it were closed now; nothing changes.
  std::vector<Window> so_far(Ns node_now) const;
  // The newest rows of the open window, at most so many of each edge; nothing changes.
  std::vector<Window> peek(Ns node_now, std::size_t most) const;
  // The node's number is another one from now on; neighbours of the old one must be configured again.
  void rename(Node me) { me_ = me; }

  void received(Ns now, std::span<const std::uint8_t> bytes, const Endpoint& from, Ns stamp);
  void stamped(const Owner& owner, Ns stamp);
  // This host's clock stepped: the window says so, and for a moment the packets do.
  void stepped(Ns now, const std::string& what);
  void use_user_stamps() { user_stamps_ = true; }

  // When step() wants to be called; nothing while there is nothing to do before something comes.
  std::optional<Ns> due() const;
  void step(Ns now, std::vector<Outgoing>& out);

  const Key& key() const { return key_; }
  Ns gap() const { return gap_; }
  const CoreStats& stats() const { return stats_; }
  // Of now: exchanges begun and not decided, and answers begun and not finished.
  std::size_t in_flight() const;

 private:
  enum class Fate : std::uint8_t { open, complete, lost, dropped };
  struct Exchange {
    Ns begun = 0;
    Row row{};
    std::uint8_t got = 0;  // bit 0 Pr1, bit 1 Pr2, bit 2 Pd1
    bool has_second = false;
    Fate fate = Fate::open;
  };
  struct OutEdge {
    Link link;
    std::uint64_t first = 0;  // sequence of the oldest exchange
    std::deque<Exchange> exchanges{};
    std::vector<Row> rows{};
    std::vector<std::uint64_t> sequences{};  // of the rows
    std::uint64_t sent = 0, lost = 0, duplicates = 0, newest_complete = 0;
    bool user_stamps = false, stepped = false;
  };
  enum class Stage : std::uint8_t { waiting, first_sent, second_sent };
  struct Answer {
    std::uint64_t sequence = 0;
    Endpoint to{};
    Ns came = 0, sent = 0;
    Ns t1_rx = 0, t2_rx = 0, r1_tx = 0, r2_tx = 0;
    bool has1 = false, has2 = false;
    Stage stage = Stage::waiting;
  };
  // Which of the last sequences have been received.
  class Heard {
   public:
    bool accept(std::uint64_t sequence);

   private:
    static constexpr std::uint64_t span = 1024;
    std::uint64_t newest_ = 0;
    std::bitset<span> seen_;
  };
  struct InEdge {
    Link link;
    Heard first{}, second{};
    std::vector<Answer> answers{};
  };

  void probe_came(Ns now, InEdge& edge, const Packet& packet, const Endpoint& from, Ns stamp);
  void answer_came(OutEdge& edge, const Packet& packet, Ns stamp);
  Window closed(Ns node_now, const OutEdge& edge, std::vector<Row> rows) const;
  void decide(OutEdge& edge, std::uint64_t sequence, Exchange& exchange, Fate fate);
  void expire(Ns now, OutEdge& edge);
  void first_instant(Ns now, std::vector<Outgoing>& out);
  void second_instant(Ns now, std::vector<Outgoing>& out);
  void send(Ns now, std::vector<Outgoing>& out, Kind kind, std::size_t link, const Link& to, std::uint64_t sequence,
            Ns a, Ns b);
  void take_turns(std::vector<Outgoing>& out) const;
  void begin_window(Ns node_now);
  bool is_busy() const;

  Node me_;
  std::uint64_t sequence_;
  std::uint32_t generation_ = 0;
  Key key_{};
  bool has_key_ = false, probing_ = false, user_stamps_ = false;
  std::vector<OutEdge> out_;
  std::vector<InEdge> in_;
  Ns gap_ = 800'000, pause_ = 3'000'000;
  Ns window_begin_ = 0;
  std::string window_stepped_;
  Ns stepped_until_ = 0;
  bool ticking_ = false, at_second_ = false;
  Ns cycle_ = 0, next_ = 0;  // planned begin of the cycle; the next instant
  std::uint64_t cycles_ = 0;
  CoreStats stats_;
};

}  // namespace ringfold::probe
