// Several lanes share a link's work.
//
// Segments are pulled by whichever lane can take more, so the lanes' rates need not be known beforehand. What remains
// is the end: a lane that is slow, or dead, holds frames that all peers wait for. Two things are known about a frame
// that a lane has sent. The transport reports how many bytes the other side's *kernel* has acknowledged: this shows how
// fast a lane is. And the other side's *core* reports how many frames it has handled (`applied`): this shows what may
// be forgotten. In between a frame is a *flight*: the lane keeps enough of it to let another lane send it again.
//
//   The tail. An idle lane takes over the last frame of the slowest one, if it is likely to deliver it sooner. What the
//   slow lane has not begun is taken away from it; the rest is sent twice.
//
// Invariants:
// - Frames count from the lane's first, in the order of sending, `applied` frames not among them: both ends agree.
// - Receivers handle duplicates: segments by the op's bitmap, Dones by rank, Open and Ready are idempotent, early
//   frames by what is stashed already; frames of finished sequences are drained.
// - A segment that is sent twice never reads the caller's memory any more: the copy that arrived may have led to that
//   memory being overwritten, by the value that came back around the ring. So the second one is a copy, made while the
//   memory was right (`superseded`), and the rest of a first one that has begun becomes a copy, too.
// - A flight that another lane sends again belongs to that lane; if that lane is lost, it is sent again from there.
#include <algorithm>
#include <cassert>
#include <cmath>
#include <limits>

#include "ringfold/core.hpp"

namespace ringfold {
namespace {

constexpr std::size_t report_after_bytes = 128 * 1024;
constexpr std::uint64_t report_after_frames = 64;
// What a neighbour may have read without a report, or have in its kernel. Beyond, it does not mean to report at all.
constexpr std::uint64_t max_unreported_bytes = std::uint64_t{1} << 30;
constexpr std::size_t max_unreported_frames = std::size_t{1} << 18;
constexpr Ns millisecond = 1'000'000;
constexpr Ns tail_margin = millisecond;     // sending twice must gain at least this
constexpr Ns rate_over = 10 * millisecond;  // shorter stretches do not show a lane's rate
constexpr Ns unsent_for = 4 * millisecond;
constexpr std::size_t min_unsent = 16 * 1024, max_unsent = 1024 * 1024;
constexpr std::uint64_t acknowledged_at_once = 18'000;  // two packets, however large; less may wait for more to come,
constexpr Ns acknowledged_later = 50 * millisecond;     // and Linux waits 40 ms
constexpr double busy_window = 1e9;
constexpr Ns rate_is_new = 1000 * millisecond;  // older rates do not describe the paths now
constexpr double for_ever = 1e15;               // eleven days: so many nanoseconds can be added up without a thought

}  // namespace

bool Core::same_link(const Conn& a, const Conn& b) {
  return a.role == Role::lane && b.role == Role::lane && a.peer == b.peer && a.outgoing == b.outgoing;
}

bool Core::has_sibling(const Conn& conn) const {
  return std::any_of(conns_.begin(), conns_.end(), [&](const auto& each) {
    return each.first != conn.id && !each.second.closing && same_link(each.second, conn);
  });
}

// What was sent, and what has come of it.

void Core::note_sent(Conn& conn, OutFrame& frame, std::uint64_t end) {
  if (frame.header.kind == LaneFrame::applied) return;
  Flight flight;
  flight.header = frame.header;
  flight.op = frame.op;
  flight.end = end;
  flight.again = frame.again;
  flight.is_copy = frame.is_copy;
  if (frame.header.kind == LaneFrame::data) flight.item = std::move(frame.item);
  else flight.owned = std::move(frame.owned);
  conn.flights.push_back(std::move(flight));
}

bool Core::has_too_much_unreported(const Conn& conn) {
  if (conn.flights.empty()) return false;
  return conn.flights.size() > max_unreported_frames ||
         conn.sent_total - conn.flights.front().end > max_unreported_bytes;
}

void Core::report_applied(Conn& conn) {
  const std::uint64_t unacked = conn.frames_seen - conn.frames_acked;
  if (conn.bytes_unacked < report_after_bytes && unacked < report_after_frames) return;
  FrameHeader header;
  header.kind = LaneFrame::applied;
  header.epoch = conn.mark_sent;
  header.offset = conn.frames_seen;
  conn.frames_acked = conn.frames_seen;
  conn.bytes_unacked = 0;
  lane_frame(conn, header, {});
}

bool Core::on_applied(Conn& conn, std::uint64_t count, std::string& why) {
  if (!conn.sharing.shared || count > conn.confirmed + conn.flights.size()) {
    why = "it has applied " + std::to_string(count) + " frames, but " +
          std::to_string(conn.confirmed + conn.flights.size()) + " were sent";
    return false;
  }
  while (conn.confirmed < count) {
    conn.flights.pop_front();
    ++conn.confirmed;
  }
  return true;
}

void Core::acknowledged(Ns now, ConnId id, std::uint64_t unacknowledged, Ns rtt, Ns min_rtt) {
  Conn* conn = find_conn(id);
  if (conn == nullptr) return;
  now_ = now;
  const std::uint64_t total = conn->sent_total - std::min(unacknowledged, conn->sent_total);
  if (conn->sharing.shared) measure(*conn, now, total);
  if (total > conn->acknowledged_total) {
    conn->acknowledged_total = total;
    conn->last_acknowledged = now;
    if (id == control_ && unacknowledged > 0) last_echoed_ = now;  // the large frame is the kernel's by now
  }
  conn->unacknowledged = unacknowledged;
  if (rtt > 0) {
    conn->rtt = rtt;
    if (min_rtt > 0) conn->min_rtt = min_rtt;
    else conn->min_rtt = conn->min_rtt > 0 ? std::min(conn->min_rtt, rtt) : rtt;
    conn->rtt_sampled_at = now;
  }
  conn->looked_at = now;
  if (!conn->sharing.shared || unacknowledged == 0) return;
  // An idle lane checks again whether to take over from this one.
  for (auto& [other_id, other] : conns_) {
    if (other_id != id && same_link(other, *conn) && other.tx.empty()) mark_dirty(other);
  }
}

// Measured over stretches in which something was in flight all the time.
//
// On a high-RTT path, one whose RTT exceeds such a stretch, two more things count. Nothing comes back in the first RTT,
// however fast the lane is: the first stretch begins with the first acknowledgement, and every one lasts an RTT or
// more, because acknowledgements come in the bursts in which the bytes were sent. And the rate of a lane that ran dry
// is limited by its work, not by its path: such a stretch does not count. Otherwise a lane would lose its rate whenever
// an op begins, and look late to all others.
void Core::measure(Conn& conn, Ns now, std::uint64_t acknowledged) {
  const bool busy = conn.sent_total > acknowledged;
  const bool is_far = conn.min_rtt >= rate_over;
  if (conn.tx.empty()) conn.ran_dry = true;
  if (is_far && conn.awaits_first && busy) {
    if (acknowledged == conn.busy_from) return;
    conn.awaits_first = conn.ran_dry = false;
    conn.busy_since = now;
    conn.busy_from = acknowledged;
    return;
  }
  const Ns stretch = is_far ? conn.min_rtt : rate_over;
  if (conn.busy_since != 0 && now - conn.busy_since >= stretch) {
    if (!is_far || !conn.ran_dry) note_rate(conn, now, acknowledged);
    conn.busy_since = 0;
    conn.awaits_first = false;
  } else if (conn.busy_since == 0) {
    conn.awaits_first = true;
  }
  if (!busy) conn.busy_since = 0;
  if (busy && conn.busy_since == 0) {
    conn.busy_since = now;
    conn.busy_from = acknowledged;
    conn.ran_dry = false;
  }
}

void Core::note_rate(Conn& conn, Ns now, std::uint64_t acknowledged) {
  const auto took = static_cast<double>(now - conn.busy_since);
  const auto bytes = static_cast<double>(acknowledged - conn.busy_from);
  conn.rate = conn.rate > 0 ? (conn.rate + bytes / took) / 2 : bytes / took;
  conn.measured = now;
  const double keep = std::exp(-took / busy_window);
  conn.busy_bytes = conn.busy_bytes * keep + bytes;
  conn.busy_ns = conn.busy_ns * keep + took;
}

std::size_t Core::unsent_wanted(ConnId id) const {
  const Conn* conn = find_conn(id);
  if (conn == nullptr || !conn->sharing.shared) return 0;
  const auto bytes = static_cast<std::size_t>(conn->rate * static_cast<double>(unsent_for));
  return std::clamp(bytes, min_unsent, max_unsent);
}

bool Core::shared_in_flight() const {
  return shared_lanes_ > 0 && std::any_of(conns_.begin(), conns_.end(), [](const auto& each) {
           const Conn& conn = each.second;
           return conn.sharing.shared && conn.sent_total > conn.acknowledged_total;
         });
}

std::array<std::uint64_t, max_paths> Core::path_rates(Ns now, PeerId peer) const {
  std::array<std::uint64_t, max_paths> rates{};
  for (const auto& [id, conn] : conns_) {
    if (conn.role != Role::lane || conn.peer != peer || !conn.outgoing || conn.rate <= 0) continue;
    if (conn.measured == 0 || now - conn.measured > rate_is_new) continue;
    rates[conn.sharing.path] += static_cast<std::uint64_t>(conn.busy_bytes / conn.busy_ns * 1e9);
  }
  return rates;
}

// Of several lanes: the mean of their smoothed RTTs, and the minimum of their minima.
std::array<Rtt, max_paths> Core::path_rtts(Ns now, PeerId peer) const {
  std::array<Rtt, max_paths> rtts{};
  std::array<Ns, max_paths> lanes{};
  for (const auto& [id, conn] : conns_) {
    if (conn.role != Role::lane || conn.peer != peer || !conn.sharing.shared) continue;
    if (conn.rtt_sampled_at == 0 || now - conn.rtt_sampled_at > rate_is_new) continue;
    Rtt& rtt = rtts[conn.sharing.path];
    rtt.smoothed += conn.rtt;
    ++lanes[conn.sharing.path];
    if (conn.min_rtt > 0 && (rtt.min == 0 || conn.min_rtt < rtt.min)) rtt.min = conn.min_rtt;
  }
  for (std::size_t path = 0; path < max_paths; ++path) {
    if (lanes[path] > 0) rtts[path].smoothed /= lanes[path];
  }
  return rtts;
}

// A lost lane.

void Core::send_elsewhere(Conn& lost) {
  --shared_lanes_;
  if (sealed_ || lost.mark_sent != spec_.epoch) return;
  for (auto& [id, other] : conns_) {
    if (id != lost.id && same_link(other, lost)) mark_dirty(other);  // it may have left something to this one
  }
  for (const Flight& flight : lost.flights) {
    if (!flight.again) requeue(lost.outgoing, flight.header, flight.op, flight.item, flight.owned);
  }
  for (const OutFrame& frame : lost.tx) {
    if (frame.has_header && !frame.again) requeue(lost.outgoing, frame.header, frame.op, frame.item, frame.owned);
  }
}

bool Core::worth_sending(const FrameHeader& header, const OpPtr& op, const Sendable& item) const {
  if (header.epoch != spec_.epoch || header.kind == LaneFrame::mark || header.kind == LaneFrame::applied) return false;
  if (header.kind != LaneFrame::data) return true;
  const bool active = op != nullptr && (op->state == OpState::running || op->state == OpState::done);
  return active && op->epoch == spec_.epoch && !op->superseded(item);
}

void Core::requeue(bool outgoing, const FrameHeader& header, const OpPtr& op, const Sendable& item,
                   const Payload& owned) {
  if (planted_.forget_lane || !worth_sending(header, op, item)) return;
  ++stats_.reissued;
  if (header.kind == LaneFrame::data) {
    op->resend(outgoing, item);
    mark_dirty_for(op);
  } else if (Conn* conn = lane_for_control(outgoing)) {
    lane_frame(*conn, header, owned);
  }
}

void Core::copy_segment(OutFrame& frame) const {
  std::vector<Piece> pieces;
  frame.op->pieces(frame.item, pieces);
  Bytes copy;
  copy.reserve(frame.item.travelling_bytes());
  for (const Piece& piece : pieces) copy.insert(copy.end(), piece.at, piece.at + piece.bytes);
  frame.owned = std::move(copy);
  frame.copied = true;
}

// The tail of a slow lane.

// How much longer than an RTT nothing in flight has been acknowledged, as of the last query: later than that nothing is
// known, and a peer that was late itself must not take the others for silent.
Ns Core::stalled(const Conn& conn) {
  if (conn.sent_total == conn.acknowledged_total) return 0;
  return std::max<Ns>(conn.looked_at - conn.last_acknowledged - conn.rtt, 0);
}

// The same with the benefit of the doubt: a short frame that nothing follows is acknowledged late on the best of paths.
// So the time counts from when so much was in flight that it is acknowledged at once.
Ns Core::silent(const Conn& conn) {
  const Ns at_least = std::max<Ns>(stalled(conn) - acknowledged_later, 0);
  if (conn.sent_total - conn.acknowledged_total <= acknowledged_at_once) return at_least;
  return std::max(conn.looked_at - std::max(conn.last_acknowledged, conn.saturated_since) - conn.rtt, at_least);
}

void Core::note_saturation(Conn& conn, Ns now, std::size_t more) {
  const std::uint64_t before = conn.sent_total - conn.acknowledged_total;
  if (before <= acknowledged_at_once && before + more > acknowledged_at_once) conn.saturated_since = now;
}

// How long so many bytes take. The rate of a lane that was silent for a second is next to nothing, and what it would
// take is more than a number of nanoseconds can hold.
Ns Core::time_for(double bytes, double rate) { return static_cast<Ns>(std::min(bytes / rate, for_ever)); }

// How long until so many more bytes, sent now, have arrived.
Ns Core::arrives_in(const Conn& conn, std::size_t bytes) const {
  const auto ahead = static_cast<double>(conn.sent_total - conn.acknowledged_total + conn.tx_bytes + bytes);
  return std::max(time_for(ahead, presumed_rate(conn)), conn.rtt) + silent(conn);
}

// How long until the byte at `end` has arrived, estimated. A frame that was sent twice already gets the benefit of the
// doubt: otherwise two lanes would send a short frame back and forth until it is acknowledged.
Ns Core::overdue_by(const Conn& conn, std::uint64_t end, bool is_copy) {
  const auto left = static_cast<double>(end - std::min(end, conn.acknowledged_total));
  const Ns takes = conn.rate > 0 ? time_for(left, conn.rate) : 0;
  return std::max(takes, is_copy ? silent(conn) : stalled(conn));
}

Core::Tail Core::find_tail(const Conn& idle) {
  Tail found;
  if (!idle.sharing.shared || sealed_ || idle.mark_sent != spec_.epoch || !idle.tx.empty()) return found;
  if (is_vetoed(idle)) return found;
  const bool is_bound = is_fixed(idle);
  Ns worst = 0;
  for (auto& [id, conn] : conns_) {
    if (id == idle.id || !same_link(conn, idle) || conn.mark_sent != spec_.epoch) continue;
    // Fixed shares: a path that is slow for its share is waited for, one that is silent is not.
    if (is_bound && conn.sharing.path != idle.sharing.path && silent(conn) < no_longer_counted_on) continue;
    Tail tail;
    std::uint64_t end = conn.sent_total + conn.tx_bytes;
    std::size_t length = 0;
    bool is_copy = false;
    for (std::size_t i = conn.tx.size(); i-- > 0 && tail.lane == nullptr;) {
      const OutFrame& frame = conn.tx[i];
      length = frame.total;
      is_copy = frame.is_copy;
      if (frame.has_header && !frame.again && worth_sending(frame.header, frame.op, frame.item))
        tail = {&conn, i, true};
      else end -= frame.total - frame.sent;
    }
    for (std::size_t i = conn.flights.size(); i-- > 0 && tail.lane == nullptr;) {
      const Flight& flight = conn.flights[i];
      if (flight.end <= conn.acknowledged_total) break;
      if (flight.again || !worth_sending(flight.header, flight.op, flight.item)) continue;
      tail = {&conn, i, false};
      end = flight.end;
      length = sizeof(FrameHeader) + flight.header.length;
      is_copy = flight.is_copy;
    }
    if (tail.lane == nullptr) continue;
    const Ns late = overdue_by(conn, end, is_copy);
    const Ns soon = arrives_in(idle, length);
    if (late <= soon + soon / 4 + tail_margin || late <= worst) continue;
    worst = late;
    found = tail;
  }
  return found;
}

bool Core::reissue(Conn& idle) {
  const Tail tail = find_tail(idle);
  if (tail.lane == nullptr) return false;
  Conn& slow = *tail.lane;
  ++stats_.reissued;
  OutFrame frame;
  if (tail.is_queued && slow.tx[tail.at].sent == 0) {
    frame = std::move(slow.tx[tail.at]);
    slow.tx.erase(slow.tx.begin() + static_cast<std::ptrdiff_t>(tail.at));
    slow.tx_bytes -= frame.total;
    if (frame.op) count_taken_over(slow, idle, frame.header.length, true);
  } else if (tail.is_queued) {
    OutFrame& begun = slow.tx[tail.at];
    if (begun.header.kind == LaneFrame::data && !begun.copied) copy_segment(begun);
    frame = begun;
    frame.sent = 0;
    begun.again = true;
    if (frame.op) count_taken_over(slow, idle, frame.header.length, false);
  } else {
    Flight& flight = slow.flights[tail.at];
    flight.again = true;
    frame.header = flight.header;
    frame.has_header = true;
    frame.owned = flight.owned;
    frame.op = flight.op;
    frame.item = flight.item;
    frame.total = sizeof(FrameHeader) + flight.header.length;
    if (frame.header.kind == LaneFrame::data) copy_segment(frame);
    if (frame.op) count_taken_over(slow, idle, frame.header.length, false);
  }
  frame.is_copy = true;
  idle.tx_bytes += frame.total;
  idle.tx.push_back(std::move(frame));
  return true;
}

}  // namespace ringfold
