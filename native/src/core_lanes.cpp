// Several lanes share a link's work.
//
// Segments are pulled by whichever lane can take more, so nobody has to know the lanes' rates beforehand. What remains is
// the end: a lane that is slow, or dead, holds frames that everybody waits for. Two things are known about a frame that a
// lane has sent. The transport says how many bytes the other side's *kernel* has got: good for judging how fast a lane
// is. And the other side's *core* reports how many frames it has dealt with (`applied`): good for knowing what may be
// forgotten. In between a frame is a *flight*: the lane remembers enough of it to let another lane send it again.
//
//   The tail. A lane that has nothing to do takes over the last frame of the slowest one, if it is likely to bring it
//   sooner. What the slow lane has not begun is taken away from it; the rest is sent twice.
//   A lost lane. Everything that was not reported goes again on the others: segments while their op is active, control
//   frames of the epoch always, because a neighbour may still need the Done of an op that is finished here.
//
// Invariants:
// - Frames count from the lane's first, in the order of sending, `applied` frames not among them: both ends agree.
// - Receivers take everything twice without harm: segments by the op's bitmap, Dones by rank, Open and Ready as they are,
//   early frames by what is stashed already; frames of finished sequences are drained.
// - A segment that is sent twice never reads the caller's memory any more: the copy that arrived may have led to that
//   memory being overwritten, by the value that came back around the ring. So the second one is a copy, made while the
//   memory was right (`superseded`), and the rest of a first one that has begun becomes a copy, too.
// - A flight that another lane sends again is that lane's business; if that lane is lost, it goes again from there.
#include <algorithm>
#include <cassert>
#include <cmath>
#include <limits>

#include "ringfold/core.hpp"

namespace ringfold {
namespace {

constexpr std::size_t tell_after_bytes = 128 * 1024;
constexpr std::uint64_t tell_after_frames = 64;
constexpr Ns millisecond = 1'000'000;
constexpr Ns tail_margin = millisecond;           // sending twice must gain at least this
constexpr Ns rate_over = 10 * millisecond;        // shorter stretches say little about a lane's rate
constexpr Ns unsent_for = 4 * millisecond;
constexpr std::size_t least_unsent = 16 * 1024, most_unsent = 1024 * 1024;
constexpr Ns no_longer_counted_on = 20 * millisecond;
constexpr double benefit_of_doubt = 8;
constexpr double busy_window = 1e9;
constexpr Ns rate_is_new = 1000 * millisecond;    // for those who want to know what the paths do now
constexpr std::uint64_t weighed_segments = 8;     // of an op: as long as this, pulling has shown nothing yet

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
  if (frame.header.kind == LaneFrame::data) flight.item = std::move(frame.item);
  else flight.owned = std::move(frame.owned);
  conn.flights.push_back(std::move(flight));
}

void Core::tell_applied(Conn& conn) {
  const std::uint64_t untold = conn.frames_seen - conn.frames_told;
  if (conn.bytes_untold < tell_after_bytes && untold < tell_after_frames) return;
  FrameHeader header;
  header.kind = LaneFrame::applied;
  header.epoch = conn.mark_sent;
  header.offset = conn.frames_seen;
  conn.frames_told = conn.frames_seen;
  conn.bytes_untold = 0;
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

void Core::acknowledged(Ns now, ConnId id, std::uint64_t unacknowledged, Ns round_trip) {
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
  if (round_trip > 0) conn->round_trip = round_trip;
  if (!conn->sharing.shared || unacknowledged == 0) return;
  // Whoever has nothing to do looks again whether to help this one.
  for (auto& [other_id, other] : conns_) {
    if (other_id != id && same_link(other, *conn) && other.tx.empty()) mark_dirty(other);
  }
}

// Over stretches in which something was on the way all the time.
void Core::measure(Conn& conn, Ns now, std::uint64_t acknowledged) {
  const bool busy = conn.sent_total > acknowledged;
  if (conn.busy_since != 0 && now - conn.busy_since >= rate_over) {
    const double sample =
        static_cast<double>(acknowledged - conn.busy_from) / static_cast<double>(now - conn.busy_since);
    conn.rate = conn.rate > 0 ? (conn.rate + sample) / 2 : sample;
    conn.measured = now;
    const auto took = static_cast<double>(now - conn.busy_since);
    const double keep = std::exp(-took / busy_window);
    conn.busy_bytes = conn.busy_bytes * keep + static_cast<double>(acknowledged - conn.busy_from);
    conn.busy_ns = conn.busy_ns * keep + took;
    conn.busy_since = 0;
  }
  if (!busy) conn.busy_since = 0;
  if (busy && conn.busy_since == 0) {
    conn.busy_since = now;
    conn.busy_from = acknowledged;
  }
}

std::size_t Core::unsent_wanted(ConnId id) const {
  const Conn* conn = find_conn(id);
  if (conn == nullptr || !conn->sharing.shared) return 0;
  const auto bytes = static_cast<std::size_t>(conn->rate * static_cast<double>(unsent_for));
  return std::clamp(bytes, least_unsent, most_unsent);
}

bool Core::shared_in_flight() const {
  return shared_lanes_ > 0 && std::any_of(conns_.begin(), conns_.end(), [](const auto& each) {
           const Conn& conn = each.second;
           return conn.sharing.shared && conn.sent_total > conn.acknowledged_total;
         });
}

// A lost lane.

void Core::send_elsewhere(Conn& lost) {
  --shared_lanes_;
  if (sealed_ || lost.mark_sent != spec_.epoch) return;
  for (const Flight& flight : lost.flights) {
    if (!flight.again) go_again(lost.outgoing, flight.header, flight.op, flight.item, flight.owned);
  }
  for (const OutFrame& frame : lost.tx) {
    if (frame.has_header && !frame.again) go_again(lost.outgoing, frame.header, frame.op, frame.item, frame.owned);
  }
}

bool Core::worth_sending(const FrameHeader& header, const OpPtr& op, const Sendable& item) const {
  if (header.epoch != spec_.epoch || header.kind == LaneFrame::mark || header.kind == LaneFrame::applied) return false;
  if (header.kind != LaneFrame::data) return true;
  const bool active = op != nullptr && (op->state == OpState::running || op->state == OpState::done);
  return active && op->epoch == spec_.epoch && !op->superseded(item);
}

void Core::go_again(bool outgoing, const FrameHeader& header, const OpPtr& op, const Sendable& item,
                    const Payload& owned) {
  if (planted_.forget_lane || !worth_sending(header, op, item)) return;
  ++stats_.reissued;
  if (header.kind == LaneFrame::data) {
    op->send_again(outgoing, item);
    mark_dirty_for(op);
  } else if (Conn* conn = lane_for_control(outgoing)) {
    lane_frame(*conn, header, owned);
  }
}

void Core::copy_segment(OutFrame& frame) const {
  std::vector<Piece> pieces;
  frame.op->pieces(frame.item, pieces);
  Bytes copy;
  copy.reserve(frame.item.length);
  for (const Piece& piece : pieces) copy.insert(copy.end(), piece.at, piece.at + piece.bytes);
  frame.owned = std::move(copy);
  frame.copied = true;
}

// The tail of a slow lane.

// For how much longer than a round trip nothing has been acknowledged of what is on the way.
Ns Core::stalled(const Conn& conn) const {
  if (conn.sent_total == conn.acknowledged_total) return 0;
  return std::max<Ns>(now_ - conn.last_acknowledged - conn.round_trip, 0);
}

// How long until so many more bytes, sent now, have arrived.
Ns Core::arrives_in(const Conn& conn, std::size_t bytes) const {
  const auto ahead = static_cast<double>(conn.sent_total - conn.acknowledged_total + conn.tx_bytes + bytes);
  const Ns takes = conn.rate > 0 ? static_cast<Ns>(ahead / conn.rate) : 0;
  return std::max(takes, conn.round_trip) + stalled(conn);
}

// How long until the byte at `end` has arrived, as far as one can tell.
Ns Core::overdue_by(const Conn& conn, std::uint64_t end) const {
  const auto left = static_cast<double>(end - std::min(end, conn.acknowledged_total));
  const Ns takes = conn.rate > 0 ? static_cast<Ns>(left / conn.rate) : 0;
  return std::max(takes, stalled(conn));
}

Core::Tail Core::find_tail(const Conn& idle) {
  Tail found;
  if (!idle.sharing.shared || sealed_ || idle.mark_sent != spec_.epoch || !idle.tx.empty()) return found;
  if (is_vetoed(idle)) return found;
  Ns worst = 0;
  for (auto& [id, conn] : conns_) {
    if (id == idle.id || !same_link(conn, idle) || conn.mark_sent != spec_.epoch) continue;
    Tail tail;
    std::uint64_t end = conn.sent_total + conn.tx_bytes;
    std::size_t length = 0;
    for (std::size_t i = conn.tx.size(); i-- > 0 && tail.lane == nullptr;) {
      const OutFrame& frame = conn.tx[i];
      length = frame.total;
      if (frame.has_header && !frame.again && worth_sending(frame.header, frame.op, frame.item)) tail = {&conn, i, true};
      else end -= frame.total - frame.sent;
    }
    for (std::size_t i = conn.flights.size(); i-- > 0 && tail.lane == nullptr;) {
      const Flight& flight = conn.flights[i];
      if (flight.end <= conn.acknowledged_total) break;
      if (flight.again || !worth_sending(flight.header, flight.op, flight.item)) continue;
      tail = {&conn, i, false};
      end = flight.end;
      length = sizeof(FrameHeader) + flight.header.length;
    }
    if (tail.lane == nullptr) continue;
    const Ns late = overdue_by(conn, end);
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
  } else if (tail.is_queued) {
    OutFrame& begun = slow.tx[tail.at];
    if (begun.header.kind == LaneFrame::data && !begun.copied) copy_segment(begun);
    frame = begun;
    frame.sent = 0;
    begun.again = true;
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
  }
  idle.tx_bytes += frame.total;
  idle.tx.push_back(std::move(frame));
  return true;
}

// Advice.

void Core::set_path_shares(PeerId peer, const PathShares& shares) {
  const bool none = shares.flags == 0 && shares.share == std::array<std::uint16_t, max_paths>{};
  if (none) shares_.erase(peer);
  else shares_[peer] = shares;
  for (auto& [id, conn] : conns_) {
    if (conn.role == Role::lane && conn.peer == peer) mark_dirty(conn);
  }
}

void Core::advice_changed() {
  for (auto& [id, conn] : conns_) {
    if (conn.role == Role::lane && conn.sharing.paths > 1 && conn.tx.empty()) mark_dirty(conn);
  }
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

bool Core::may_take(const Conn& conn, const OpPtr& op) const {
  return !conn.sharing.shared || (!too_late(conn, op) && is_advised(conn, op));
}

// Near the end a slow lane leaves what is left to the others, if they will have sent all of it before it could bring one
// segment more. So there is little to be sent twice. A lane is never late beside others of which none is sooner: so there is
// always one that may take the next segment. And a lane is given the benefit of the doubt: whatever its last rate was, an eighth
// of the others' is assumed. Otherwise one that was slow once would get nothing, and never show that it is fast again.
bool Core::too_late(const Conn& conn, const OpPtr& op) const {
  if (conn.rate <= 0) return false;
  double rate = 0;
  auto bytes = static_cast<double>(op->sendable_bytes(conn.outgoing));
  const std::size_t segment = op->plan().segment_bytes;
  Ns soonest = std::numeric_limits<Ns>::max();
  for (const auto& [id, other] : conns_) {
    if (id == conn.id || !same_link(other, conn) || other.mark_sent != spec_.epoch) continue;
    if (other.rate <= 0 || stalled(other) >= no_longer_counted_on || !is_advised(other, op)) continue;
    rate += other.rate;
    bytes += static_cast<double>(other.sent_total - other.acknowledged_total + other.tx_bytes);
    soonest = std::min(soonest, arrives_in(other, segment));
  }
  if (rate <= 0) return false;
  const Ns without = std::max(static_cast<Ns>(bytes / rate), soonest);
  const auto ahead = static_cast<double>(conn.sent_total - conn.acknowledged_total + conn.tx_bytes + segment);
  const auto takes = static_cast<Ns>(ahead / std::max(conn.rate, rate / benefit_of_doubt));
  return std::max(takes, conn.round_trip) + stalled(conn) > without;
}

// What is advised for the link of this lane now; false: nothing.
bool Core::advice_for(const Conn& conn, PathShares& advice) const {
  if (conn.sharing.paths < 2 || (hints_ == nullptr && shares_.empty())) return false;
  if (hints_ != nullptr && hints_->read(conn.peer, advice)) return true;
  const auto given = shares_.find(conn.peer);
  if (given == shares_.end()) return false;
  advice = given->second;
  return true;
}

// Paths of this lane's link that are not vetoed and can be counted on.
std::array<bool, max_paths> Core::usable_paths(const Conn& conn, const PathShares& advice) const {
  std::array<bool, max_paths> counts{};
  for (const auto& [id, other] : conns_) {
    const std::uint32_t path = other.sharing.path;
    if (!same_link(other, conn) || other.mark_sent != spec_.epoch || (advice.flags >> path & 1) != 0) continue;
    if (path == conn.sharing.path || stalled(other) < no_longer_counted_on) counts[path] = true;
  }
  return counts;
}

// Whether this lane is to get nothing now, neither new segments nor the tail of another lane.
bool Core::is_vetoed(const Conn& conn) const {
  PathShares advice;
  if (!advice_for(conn, advice) || (advice.flags >> conn.sharing.path & 1) == 0) return false;
  const auto counts = usable_paths(conn, advice);
  return std::any_of(counts.begin(), counts.end(), [](bool each) { return each; });
}

bool Core::is_advised(const Conn& conn, const OpPtr& op) const {
  PathShares advice;
  if (!advice_for(conn, advice)) return true;
  const std::uint32_t mine = conn.sharing.path;
  const auto counts = usable_paths(conn, advice);
  const bool alone = std::none_of(counts.begin(), counts.end(), [](bool each) { return each; });
  if ((advice.flags >> mine & 1) != 0) return alone;
  double whole = 0, sent = 0;
  for (std::size_t path = 0; path < max_paths; ++path) {
    if (!counts[path]) continue;
    whole += advice.share[path];
    sent += static_cast<double>(op->assigned[conn.outgoing][path]);
  }
  if (whole == 0) return true;
  const auto next = static_cast<double>(op->next_sendable(conn.outgoing).length);
  const auto segment = static_cast<double>(op->plan().segment_bytes);
  if ((advice.flags & PathShares::capped) == 0 && sent >= weighed_segments * segment) return true;
  // How far a path would be behind its share. Who is furthest behind may always take the next segment.
  const auto behind = [&](std::size_t path) {
    return advice.share[path] / whole * (sent + next) - static_cast<double>(op->assigned[conn.outgoing][path]);
  };
  double most = 0;
  for (std::size_t path = 0; path < max_paths; ++path) {
    if (counts[path] && advice.share[path] > 0) most = std::max(most, behind(path));
  }
  return advice.share[mine] > 0 && (behind(mine) >= next - segment / 2 || behind(mine) >= most);
}

void Core::count_assigned(Conn& conn, const OpPtr& op, std::size_t bytes) {
  if (conn.sharing.paths < 2) return;
  op->assigned[conn.outgoing][conn.sharing.path] += bytes;
  path_bytes_[conn.outgoing][conn.sharing.path] += bytes;
  if (hints_ == nullptr && shares_.empty()) return;
  // Others had to wait until this one had taken its share.
  for (auto& [id, other] : conns_) {
    if (id != conn.id && same_link(other, conn) && other.tx.empty()) mark_dirty(other);
  }
}

Core::Conn* Core::lane_for_control(bool outgoing) {
  const PeerId peer = outgoing ? next_peer() : previous_peer();
  Conn* best = nullptr;
  Ns soonest = 0;
  bool best_is_vetoed = false;
  for (auto& [id, conn] : conns_) {
    if (conn.role != Role::lane || conn.outgoing != outgoing || conn.peer != peer) continue;
    if (conn.mark_sent != spec_.epoch) continue;
    const bool vetoed = is_vetoed(conn);  // behind a full queue even the shortest frame is late
    const Ns soon = conn.sharing.shared ? arrives_in(conn, sizeof(FrameHeader)) : 0;
    if (best == nullptr ||
        std::tie(vetoed, soon, conn.tx_bytes) < std::tie(best_is_vetoed, soonest, best->tx_bytes)) {
      best = &conn;
      soonest = soon;
      best_is_vetoed = vetoed;
    }
  }
  return best;
}

}  // namespace ringfold
