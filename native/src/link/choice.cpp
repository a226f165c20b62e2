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
#include <algorithm>
#include <limits>
#include <optional>

#include "ringfold/link.hpp"
#include "ringfold/op.hpp"

namespace ringfold {
namespace {

constexpr double benefit_of_doubt = 8;
constexpr std::uint64_t weighed_segments = 8;  // of an op: as long as this, pulling has shown nothing yet
constexpr double any_rate = 0.125;  // bytes a nanosecond, where nothing is known: only what waits before it counts then

}  // namespace

// Only on the link that carries the payload: the reverse direction carries so little that its rate would be that of its
// few frames, not of the path.
bool Link::may_take(const Lane& lane, const OpPart& part) const {
  if (!lane.sharing.shared) return true;
  if (is_fixed(lane)) return may_take_fixed(lane, part);
  return is_advised(lane, part) && !too_late(lane, part);
}

bool Link::is_fixed(const Lane& lane) const {
  const auto advice = advice_for(lane);
  return advice && advice->is_fixed();
}

// A lane that is silent leaves the segment to one that is not: what it takes would only be late.
bool Link::may_take_fixed(const Lane& lane, const OpPart& part) const {
  const bool is_alone = std::none_of(lanes_.begin(), lanes_.end(), [&](const auto& each) {
    const Lane& other = each.second;
    return is_marked(other) && !is_vetoed(other) && !other.meter.is_silent();
  });
  return is_alone || (!lane.meter.is_silent() && is_advised(lane, part));
}

// A lane that leaves a segment to others wakes them: one of them may have declined before, when this lane was the
// better one, and nothing has happened to it since. False: there is no other lane for it. Hints can change between two
// reads; then each lane may find that another one should take it, and a segment that none takes would never be sent.
bool Link::leave_to_others(const Lane& lane, const OpPart& part) {
  if (context_.planted.tell_nobody) return true;
  bool is_left = false;
  for (auto& [id, other] : lanes_) {
    if (id == lane.id || !is_marked(other)) continue;
    const bool will_look = other.dirty || !other.tx.empty();
    if (!will_look && !may_take(other, part)) continue;
    if (!will_look) context_.flush.add(other);
    is_left = true;
  }
  return is_left;
}

// Near the end a slow lane leaves what is left to the others, if they will have sent all of it before it could deliver
// one segment more. So little has to be sent twice. A lane is never late if none of the others is sooner: so there is
// always one that may take the next segment. And a lane gets the benefit of the doubt: whatever its last rate was, an
// eighth of the others' is assumed. Otherwise a lane that was slow once would get nothing, and never show that it is
// fast again.
bool Link::too_late(const Lane& lane, const OpPart& part) const {
  if (!is_measured()) {
    if (const auto advice = advice_for(lane)) return too_late_by_shares(lane, part, *advice);
  }
  if (lane.meter.rate() <= 0) return false;
  double rate = 0;
  auto bytes = static_cast<double>(part.sendable_bytes(side()));
  const std::size_t segment = part.plan().segment_bytes;
  Ns soonest = std::numeric_limits<Ns>::max();
  std::array<std::optional<bool>, max_paths> advised;  // the lanes of a path are advised alike
  for (const auto& [id, other] : lanes_) {
    if (id == lane.id || !is_marked(other)) continue;
    if (other.meter.rate() <= 0 || other.meter.is_silent()) continue;
    std::optional<bool>& its_path = advised[other.sharing.path];
    if (!its_path) its_path = is_advised(other, part);
    if (!*its_path) continue;
    rate += other.meter.rate();
    bytes += other.ahead();
    soonest = std::min(soonest, arrives_in(other, segment));
  }
  if (rate <= 0) return false;
  const Ns without = std::max(LaneMeter::time_for(bytes, rate), soonest);
  const Ns takes = LaneMeter::time_for(lane.ahead() + static_cast<double>(segment),
                                       std::max(lane.meter.rate(), rate / benefit_of_doubt));
  return std::max(takes, lane.meter.rtt()) + lane.meter.silent() > without;
}

// A lane whose rate is not known is presumed to be like the others, in proportion to the shares if there are any: at a
// cold start a Done must not go behind a segment on the slow path, nor the slow path take over what the fast one is
// about to bring.
double Link::presumed_rate(const Lane& lane) const {
  if (lane.meter.rate() > 0) return lane.meter.rate();
  const auto advice = advice_for(lane);
  const auto weight = [&](const Lane& each) {
    return advice ? std::max<double>(advice->share[each.sharing.path], 1) : 1.0;
  };
  double rates = 0, weights = 0, most = weight(lane);
  for (const auto& [id, other] : lanes_) {
    most = std::max(most, weight(other));
    if (other.meter.rate() <= 0) continue;
    rates += other.meter.rate();
    weights += weight(other);
  }
  return weight(lane) * (rates > 0 ? rates / weights : any_rate / most);
}

// Whether the rate of every lane is known.
bool Link::is_measured() const {
  return std::all_of(lanes_.begin(), lanes_.end(),
                     [&](const auto& each) { return !is_marked(each.second) || each.second.meter.rate() > 0; });
}

// The same at a cold start: while rates are not known, shares stand for them. It is only their ratio that counts.
bool Link::too_late_by_shares(const Lane& lane, const OpPart& part, const PathShares& advice) const {
  const auto segment = static_cast<double>(part.plan().segment_bytes);
  const auto takes = [&](const Lane& each) { return (each.ahead() + segment) / advice.share[each.sharing.path]; };
  double shares = 0, soonest = std::numeric_limits<double>::infinity();
  auto bytes = static_cast<double>(part.sendable_bytes(side()));
  for (const auto& [id, other] : lanes_) {
    if (id == lane.id || !is_marked(other)) continue;
    if (advice.share[other.sharing.path] == 0 || other.meter.is_silent() || !is_advised(other, part)) continue;
    shares += advice.share[other.sharing.path];
    bytes += other.ahead();
    soonest = std::min(soonest, takes(other));
  }
  return shares > 0 && takes(lane) > std::max(bytes / shares, soonest);
}

// What is advised for this link now.
std::optional<PathShares> Link::advice_for(const Lane& lane) const {
  PathShares advice;
  if (lane.sharing.paths < 2 || context_.advice.empty() || !context_.advice.read(key.peer, advice)) return std::nullopt;
  return advice;
}

// Paths that are not vetoed and can be counted on.
std::array<bool, max_paths> Link::usable_paths(const Lane& lane, const PathShares& advice) const {
  std::array<bool, max_paths> counts{};
  for (const auto& [id, other] : lanes_) {
    const std::uint32_t path = other.sharing.path;
    if (!is_marked(other) || advice.is_vetoed(path)) continue;
    if (path == lane.sharing.path || !other.meter.is_silent()) counts[path] = true;
  }
  return counts;
}

// Whether this lane is to get nothing now, neither new segments nor the tail of another lane.
bool Link::is_vetoed(const Lane& lane) const {
  const auto advice = advice_for(lane);
  if (!advice || !advice->is_vetoed(lane.sharing.path)) return false;
  const auto counts = usable_paths(lane, *advice);
  return std::any_of(counts.begin(), counts.end(), [](bool each) { return each; });
}

bool Link::is_advised(const Lane& lane, const OpPart& part) const {
  const auto advice = advice_for(lane);
  if (!advice) return true;
  const std::uint32_t mine = lane.sharing.path;
  const auto counts = usable_paths(lane, *advice);
  const bool alone = std::none_of(counts.begin(), counts.end(), [](bool each) { return each; });
  if (advice->is_vetoed(mine)) return alone;
  double whole = 0, sent = 0;
  for (std::size_t path = 0; path < max_paths; ++path) {
    if (!counts[path]) continue;
    whole += advice->share[path];
    sent += static_cast<double>(part.sides[side()].assigned[path]);
  }
  if (whole == 0) return true;
  const std::size_t length = part.next_sendable(side()).length, segment_bytes = part.plan().segment_bytes;
  if (advice->is_fixed() && !context_.planted.shares_expire) {
    return is_within_share(lane, length, segment_bytes, *advice);
  }
  const auto next = static_cast<double>(length), segment = static_cast<double>(segment_bytes);
  if (sent >= weighed_segments * segment) return true;
  // How far a path would be behind its share. The one furthest behind may always take the next segment.
  const auto behind = [&](std::size_t path) {
    return advice->share[path] / whole * (sent + next) - static_cast<double>(part.sides[side()].assigned[path]);
  };
  double most = 0;
  for (std::size_t path = 0; path < max_paths; ++path) {
    if (counts[path] && advice->share[path] > 0) most = std::max(most, behind(path));
  }
  return advice->share[mine] > 0 && (behind(mine) >= next - segment / 2 || behind(mine) >= most);
}

// Fixed shares: this path has the most credit of those that can be counted on, or is at most half a segment ahead of
// its share when it has taken the next one.
bool Link::is_within_share(const Lane& lane, std::size_t next, std::size_t segment, const PathShares& advice) const {
  const auto counts = usable_paths(lane, advice);
  double whole = 0;
  for (std::size_t path = 0; path < max_paths; ++path) whole += counts[path] ? advice.share[path] : 0;
  const auto after = [&](std::size_t path) {
    return credits_.of(advice, path) + advice.share[path] / whole * static_cast<double>(next);
  };
  const std::size_t mine = lane.sharing.path;
  double most = std::numeric_limits<double>::lowest();
  for (std::size_t path = 0; path < max_paths; ++path) {
    if (counts[path] && advice.share[path] > 0) most = std::max(most, after(path));
  }
  const double ahead = static_cast<double>(next) - after(mine);
  return advice.share[mine] > 0 && (after(mine) >= most || ahead <= static_cast<double>(segment) / 2);
}

// The path of this lane takes so many bytes; every path with a lane that is not vetoed earns its share of them.
void Link::charge(const Lane& lane, double bytes) {
  const auto advice = advice_for(lane);
  if (!advice || !advice->is_fixed()) {
    credits_.clear();
    return;
  }
  std::array<bool, max_paths> earns{};
  for (const auto& [id, other] : lanes_) {
    if (is_marked(other)) earns[other.sharing.path] = true;
  }
  if (context_.planted.absent_earns) earns.fill(true);
  for (std::size_t path = 0; path < max_paths; ++path) earns[path] = earns[path] && !advice->is_vetoed(path);
  credits_.charge(*advice, earns, lane.sharing.path, bytes);
}

// A path that was silent in the last transfer does not carry all of the next one. What rounding left, less than two
// segments of any op before, stays: many small ops follow the shares together.
void Link::forgive_credits(std::size_t largest_segment) { credits_.limit(2 * static_cast<double>(largest_segment)); }

}  // namespace ringfold
