// Which lane of a link takes the next segment: the first that can, unless a better one is known.
//
// A lane that has room checks whether it *may take* the next segment. There are two reasons against it. It would be
// *too late*: the others will have sent all that is left before it could deliver one segment more. Or it is not
// *advised*: the host's agent, or the program, has set how the paths of this link are to share the work. Shares count
// for the first segments of an op, where pulling has shown nothing yet; a path under backpressure gets nothing while
// another path is alive.
//
// *Fixed* shares bind. Each path has a credit, in bytes, per link and direction: with every segment that the link
// sends, each path earns its share of the segment's bytes, and the path that takes it pays all of them. Only the path
// with the most credit takes the next segment, or one that would be at most half a segment ahead of its share
// afterwards. So bytes are split by the shares at any time, whatever the size of ops, their number in flight, and the
// order in which segments arrive. Rates do not count: nobody is too late, and the end of a slow path is not sent again
// on a fast one. A path that is silent earns on, and catches up when it is heard again (a lost packet can silence it
// for 200 ms); meanwhile the others take its part. A path without lanes earns nothing, and begins with the others when
// it is back. What is left of a fault when no op is in flight is forgiven.
//
// Invariant: what may be sent is sent. There is always a lane that may take the next segment, and a lane that leaves it
// to others wakes them (`leave_to_others`).
#include <algorithm>
#include <limits>
#include <optional>
#include <tuple>

#include "ringfold/core.hpp"

namespace ringfold {
namespace {

constexpr double benefit_of_doubt = 8;
constexpr std::uint64_t weighed_segments = 8;  // of an op: as long as this, pulling has shown nothing yet
constexpr double any_rate = 0.125;  // bytes a nanosecond, where nothing is known: only what waits before it counts then

}  // namespace

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

// Only on the link that carries the payload: the reverse direction carries so little that its rate would be that of its
// few frames, not of the path.
bool Core::may_take(const Conn& conn, const OpPtr& op) const {
  if (!conn.sharing.shared) return true;
  if (is_fixed(conn)) return may_take_fixed(conn, op);
  return is_advised(conn, op) && !too_late(conn, op);
}

bool Core::is_fixed(const Conn& conn) const {
  PathShares advice;
  return advice_for(conn, advice) && (advice.flags & PathShares::fixed) != 0;
}

// A lane that is silent leaves the segment to one that is not: what it takes would only be late.
bool Core::may_take_fixed(const Conn& conn, const OpPtr& op) const {
  const bool is_silent = silent(conn) >= no_longer_counted_on;
  const bool is_alone = std::none_of(conns_.begin(), conns_.end(), [&](const auto& each) {
    const Conn& other = each.second;
    return same_link(other, conn) && other.mark_sent == spec_.epoch && !is_vetoed(other) &&
           silent(other) < no_longer_counted_on;
  });
  return is_alone || (!is_silent && is_advised(conn, op));
}

// A lane that leaves a segment to others wakes them: one of them may have declined before, when this lane was the
// better one, and nothing has happened to it since. False: there is no other lane for it. Hints can change between two
// reads; then each lane may find that another one should take it, and a segment that none takes would never be sent.
bool Core::leave_to_others(const Conn& conn, const OpPtr& op) {
  if (planted_.tell_nobody) return true;
  bool is_left = false;
  for (auto& [id, other] : conns_) {
    if (id == conn.id || !same_link(other, conn) || other.mark_sent != spec_.epoch) continue;
    const bool will_look = other.dirty || !other.tx.empty();
    if (!will_look && !may_take(other, op)) continue;
    if (!will_look) mark_dirty(other);
    is_left = true;
  }
  return is_left;
}

// Near the end a slow lane leaves what is left to the others, if they will have sent all of it before it could deliver
// one segment more. So little has to be sent twice. A lane is never late if none of the others is sooner: so there is
// always one that may take the next segment. And a lane gets the benefit of the doubt: whatever its last rate was, an
// eighth of the others' is assumed. Otherwise a lane that was slow once would get nothing, and never show that it is
// fast again.
bool Core::too_late(const Conn& conn, const OpPtr& op) const {
  if (PathShares advice; !is_measured(conn) && advice_for(conn, advice)) return too_late_by_shares(conn, op, advice);
  if (conn.rate <= 0) return false;
  double rate = 0;
  auto bytes = static_cast<double>(op->sendable_bytes(conn.outgoing));
  const std::size_t segment = op->plan().segment_bytes;
  Ns soonest = std::numeric_limits<Ns>::max();
  std::array<std::optional<bool>, max_paths> advised;  // the lanes of a path are advised alike
  for (const auto& [id, other] : conns_) {
    if (id == conn.id || !same_link(other, conn) || other.mark_sent != spec_.epoch) continue;
    if (other.rate <= 0 || silent(other) >= no_longer_counted_on) continue;
    std::optional<bool>& its_path = advised[other.sharing.path];
    if (!its_path) its_path = is_advised(other, op);
    if (!*its_path) continue;
    rate += other.rate;
    bytes += static_cast<double>(other.sent_total - other.acknowledged_total + other.tx_bytes);
    soonest = std::min(soonest, arrives_in(other, segment));
  }
  if (rate <= 0) return false;
  const Ns without = std::max(time_for(bytes, rate), soonest);
  const auto ahead = static_cast<double>(conn.sent_total - conn.acknowledged_total + conn.tx_bytes + segment);
  const Ns takes = time_for(ahead, std::max(conn.rate, rate / benefit_of_doubt));
  return std::max(takes, conn.rtt) + silent(conn) > without;
}

// A lane whose rate is not known is presumed to be like the others, in proportion to the shares if there are any: at a
// cold start a Done must not go behind a segment on the slow path, nor the slow path take over what the fast one is
// about to bring.
double Core::presumed_rate(const Conn& conn) const {
  if (conn.rate > 0) return conn.rate;
  PathShares advice;
  const bool is_advised = advice_for(conn, advice);
  const auto weight = [&](const Conn& lane) {
    return is_advised ? std::max<double>(advice.share[lane.sharing.path], 1) : 1.0;
  };
  double rates = 0, weights = 0, most = weight(conn);
  for (const auto& [id, other] : conns_) {
    if (!same_link(other, conn)) continue;
    most = std::max(most, weight(other));
    if (other.rate <= 0) continue;
    rates += other.rate;
    weights += weight(other);
  }
  return weight(conn) * (rates > 0 ? rates / weights : any_rate / most);
}

// Whether the rate of every lane of this lane's link is known.
bool Core::is_measured(const Conn& conn) const {
  return std::all_of(conns_.begin(), conns_.end(), [&](const auto& each) {
    return !same_link(each.second, conn) || each.second.mark_sent != spec_.epoch || each.second.rate > 0;
  });
}

// The same at a cold start: while rates are not known, shares stand for them. It is only their ratio that counts.
bool Core::too_late_by_shares(const Conn& conn, const OpPtr& op, const PathShares& advice) const {
  const auto segment = static_cast<double>(op->plan().segment_bytes);
  const auto takes = [&](const Conn& lane) {
    const auto ahead = static_cast<double>(lane.sent_total - lane.acknowledged_total + lane.tx_bytes);
    return (ahead + segment) / advice.share[lane.sharing.path];
  };
  double shares = 0, soonest = std::numeric_limits<double>::infinity();
  auto bytes = static_cast<double>(op->sendable_bytes(conn.outgoing));
  for (const auto& [id, other] : conns_) {
    if (id == conn.id || !same_link(other, conn) || other.mark_sent != spec_.epoch) continue;
    if (advice.share[other.sharing.path] == 0 || silent(other) >= no_longer_counted_on || !is_advised(other, op))
      continue;
    shares += advice.share[other.sharing.path];
    bytes += static_cast<double>(other.sent_total - other.acknowledged_total + other.tx_bytes);
    soonest = std::min(soonest, takes(other));
  }
  return shares > 0 && takes(conn) > std::max(bytes / shares, soonest);
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
    if (path == conn.sharing.path || silent(other) < no_longer_counted_on) counts[path] = true;
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
  const std::size_t length = op->next_sendable(conn.outgoing).length;
  if ((advice.flags & PathShares::fixed) != 0 && !planted_.shares_expire) {
    return is_within_share(conn, length, op->plan().segment_bytes, advice);
  }
  const auto next = static_cast<double>(length);
  const auto segment = static_cast<double>(op->plan().segment_bytes);
  if (sent >= weighed_segments * segment) return true;
  // How far a path would be behind its share. The one furthest behind may always take the next segment.
  const auto behind = [&](std::size_t path) {
    return advice.share[path] / whole * (sent + next) - static_cast<double>(op->assigned[conn.outgoing][path]);
  };
  double most = 0;
  for (std::size_t path = 0; path < max_paths; ++path) {
    if (counts[path] && advice.share[path] > 0) most = std::max(most, behind(path));
  }
  return advice.share[mine] > 0 && (behind(mine) >= next - segment / 2 || behind(mine) >= most);
}

// Fixed shares: this path has the most credit of those that can be counted on, or is at most half a segment ahead of
// its share when it has taken the next one.
bool Core::is_within_share(const Conn& conn, std::size_t next, std::size_t segment, const PathShares& advice) const {
  const auto counts = usable_paths(conn, advice);
  double whole = 0;
  for (std::size_t path = 0; path < max_paths; ++path) whole += counts[path] ? advice.share[path] : 0;
  const auto after = [&](std::size_t path) {
    return credit(conn.outgoing, advice, path) + advice.share[path] / whole * static_cast<double>(next);
  };
  const std::size_t mine = conn.sharing.path;
  double most = std::numeric_limits<double>::lowest();
  for (std::size_t path = 0; path < max_paths; ++path) {
    if (counts[path] && advice.share[path] > 0) most = std::max(most, after(path));
  }
  const double ahead = static_cast<double>(next) - after(mine);
  return advice.share[mine] > 0 && (after(mine) >= most || ahead <= static_cast<double>(segment) / 2);
}

// What a path is behind its share, in bytes. Other shares than those before: all begin from nothing.
double Core::credit(bool outgoing, const PathShares& advice, std::size_t path) const {
  return advice.share == credited_shares_[outgoing] ? credits_[outgoing][path] : 0;
}

// The path of this lane takes so many bytes: it pays for them, and every path with a lane earns its share of them.
// Negative: it gives them back.
void Core::charge(const Conn& conn, double bytes) {
  PathShares advice;
  auto& shares = credited_shares_[conn.outgoing];
  auto& credits = credits_[conn.outgoing];
  if (!advice_for(conn, advice) || (advice.flags & PathShares::fixed) == 0) {
    shares.fill(0);
    return;
  }
  if (shares != advice.share) {
    shares = advice.share;
    credits.fill(0);
  }
  std::array<bool, max_paths> earns{};
  for (const auto& [id, other] : conns_) {
    if (same_link(other, conn) && other.mark_sent == spec_.epoch) earns[other.sharing.path] = true;
  }
  if (planted_.absent_earns) earns.fill(true);
  double whole = 0;
  for (std::size_t path = 0; path < max_paths; ++path) {
    earns[path] = earns[path] && (advice.flags >> path & 1) == 0;
    whole += earns[path] ? shares[path] : 0;
  }
  for (std::size_t path = 0; path < max_paths; ++path) {
    if (!earns[path]) credits[path] = 0;
    else if (whole > 0) credits[path] += shares[path] / whole * bytes;
  }
  if (earns[conn.sharing.path]) credits[conn.sharing.path] -= bytes;
}

// An op begins, and none is in flight: a path that was silent in the last transfer does not carry all of the next one.
// What rounding left, less than two segments of any op before, stays: many small ops follow the shares together.
void Core::forgive_credits() {
  const auto most = 2 * static_cast<double>(largest_segment_);
  for (auto& credits : credits_) {
    for (double& each : credits) each = std::clamp(each, -most, most);
  }
}

void Core::count_assigned(Conn& conn, const OpPtr& op, std::size_t bytes) {
  if (conn.sharing.paths < 2) return;
  op->assigned[conn.outgoing][conn.sharing.path] += bytes;
  path_bytes_[conn.outgoing][conn.sharing.path] += bytes;
  if (hints_ == nullptr && shares_.empty()) return;
  charge(conn, static_cast<double>(bytes));
  // Others had to wait until this one had taken its share.
  for (auto& [id, other] : conns_) {
    if (id != conn.id && same_link(other, conn) && other.tx.empty()) mark_dirty(other);
  }
}

// The tail of one lane goes to another one: so many bytes of payload, which the slow one has sent, too, unless they
// were moved.
void Core::count_taken_over(const Conn& slow, const Conn& idle, std::size_t bytes, bool is_moved) {
  if (idle.sharing.paths < 2) return;
  const auto charged = static_cast<double>(bytes);
  if (is_moved) {
    path_bytes_[slow.outgoing][slow.sharing.path] -= bytes;
    charge(slow, -charged);
  }
  path_bytes_[idle.outgoing][idle.sharing.path] += bytes;
  charge(idle, charged);
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
    if (best == nullptr || std::tie(vetoed, soon, conn.tx_bytes) < std::tie(best_is_vetoed, soonest, best->tx_bytes)) {
      best = &conn;
      soonest = soon;
      best_is_vetoed = vetoed;
    }
  }
  return best;
}

}  // namespace ringfold
