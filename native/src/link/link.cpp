#include "ringfold/link.hpp"

#include <algorithm>
#include <tuple>
#include <utility>

namespace ringfold {
namespace {

constexpr Ns tail_margin = 1'000'000;  // sending twice must gain at least this

}  // namespace

Lane& Link::add(Lane lane) {
  const ConnId id = lane.id;
  return lanes_.emplace(id, std::move(lane)).first->second;
}

void Link::remove(ConnId id) {
  const auto gone = lanes_.extract(id);
  const Lane& lost = gone.mapped();
  if (!lost.sharing.shared || context_.epoch.is_sealed() || !is_marked(lost)) return;
  flush_all();  // it may have left something to these
  for (const Flight& flight : lost.flights.all()) {
    if (!flight.again) requeue(flight.header, flight.part, flight.item, flight.owned);
  }
  for (const OutFrame& frame : lost.tx) {
    if (frame.has_header && !frame.again) requeue(frame.header, frame.part, frame.item, frame.owned);
  }
}

bool Link::is_marked() const {
  return std::any_of(lanes_.begin(), lanes_.end(), [this](const auto& each) { return is_marked(each.second); });
}

void Link::install(Ns now) {
  path_bytes_.fill(0);
  credits_.clear();
  for (auto& [id, lane] : lanes_) {
    lane.last_received = now;
    lane.meter.begin(now);
    lane.flights.forget();
    mark(lane);
  }
}

void Link::mark(Lane& lane) {
  FrameHeader mark;
  mark.epoch = context_.epoch.number();
  lane.mark_sent = mark.epoch;
  lane.queue_control(mark, {});
  context_.flush.add(lane);
}

void Link::send(const FrameHeader& header, Payload payload) {
  Lane* lane = lane_for_control();
  if (lane == nullptr) return;
  lane->queue_control(header, std::move(payload));
  context_.flush.add(*lane);
}

void Link::flush_all() {
  for (auto& [id, lane] : lanes_) context_.flush.add(lane);
}

void Link::flush_idle_but(const Lane& lane) {
  for (auto& [id, other] : lanes_) {
    if (id != lane.id && other.tx.empty()) context_.flush.add(other);
  }
}

Lane* Link::lane_for_control() {
  Lane* best = nullptr;
  Ns soonest = 0;
  bool best_is_vetoed = false;
  for (auto& [id, lane] : lanes_) {
    if (!is_marked(lane)) continue;
    const bool vetoed = is_vetoed(lane);  // behind a full queue even the shortest frame is late
    const Ns soon = lane.sharing.shared ? arrives_in(lane, sizeof(FrameHeader)) : 0;
    const std::size_t queued = lane.tx.bytes();
    if (best != nullptr &&
        std::make_tuple(vetoed, soon, queued) >= std::make_tuple(best_is_vetoed, soonest, best->tx.bytes()))
      continue;
    best = &lane;
    soonest = soon;
    best_is_vetoed = vetoed;
  }
  return best;
}

// What is sent again.

bool Link::worth_sending(const FrameHeader& header, const PartPtr& part, const Sendable& item) const {
  if (header.epoch != context_.epoch.number()) return false;
  if (header.kind == LaneFrame::mark || header.kind == LaneFrame::applied) return false;
  if (header.kind != LaneFrame::data) return true;
  return part != nullptr && !part->superseded(item);  // an op that has ended has been detached
}

void Link::requeue(const FrameHeader& header, const PartPtr& part, const Sendable& item, const Payload& owned) {
  if (context_.planted.forget_lane || !worth_sending(header, part, item)) return;
  ++context_.stats.reissued;
  if (header.kind == LaneFrame::data) {
    part->resend(side(), item);
    flush_all();
  } else {
    send(header, owned);
  }
}

// How long until so many more bytes, sent now, have arrived.
Ns Link::arrives_in(const Lane& lane, std::size_t bytes) const {
  const double ahead = lane.ahead() + static_cast<double>(bytes);
  return std::max(LaneMeter::time_for(ahead, presumed_rate(lane)), lane.meter.rtt()) + lane.meter.silent();
}

// The last frame of a lane that is worth sending again, where it ends, how long it is, and whether it is a copy.
Link::Tail Link::tail_of(Lane& lane, std::uint64_t& end, std::size_t& length, bool& is_copy) const {
  end = lane.meter.sent_total() + lane.tx.bytes();
  for (std::size_t i = lane.tx.size(); i-- > 0;) {
    const OutFrame& frame = lane.tx[i];
    length = frame.total;
    is_copy = frame.is_copy;
    if (frame.has_header && !frame.again && worth_sending(frame.header, frame.part, frame.item))
      return {&lane, i, true};
    end -= frame.total - frame.sent;
  }
  const auto& flights = lane.flights.all();
  for (std::size_t i = flights.size(); i-- > 0;) {
    const Flight& flight = flights[i];
    if (flight.end <= lane.meter.acknowledged_total()) break;
    if (flight.again || !worth_sending(flight.header, flight.part, flight.item)) continue;
    end = flight.end;
    length = sizeof(FrameHeader) + flight.header.length;
    is_copy = flight.is_copy;
    return {&lane, i, false};
  }
  return {};
}

Link::Tail Link::find_tail(const Lane& idle) {
  Tail found;
  if (!idle.sharing.shared || context_.epoch.is_sealed() || !is_marked(idle) || !idle.tx.empty()) return found;
  if (is_vetoed(idle)) return found;
  const bool is_bound = is_fixed(idle);
  Ns worst = 0;
  for (auto& [id, lane] : lanes_) {
    if (id == idle.id || !is_marked(lane)) continue;
    // Fixed shares: a path that is slow for its share is waited for, one that is silent is not.
    if (is_bound && lane.sharing.path != idle.sharing.path && !lane.meter.is_silent()) continue;
    std::uint64_t end = 0;
    std::size_t length = 0;
    bool is_copy = false;
    const Tail tail = tail_of(lane, end, length, is_copy);
    if (tail.lane == nullptr) continue;
    const Ns late = lane.meter.overdue_by(end, is_copy);
    const Ns soon = arrives_in(idle, length);
    if (late <= soon + soon / 4 + tail_margin || late <= worst) continue;
    worst = late;
    found = tail;
  }
  return found;
}

bool Link::reissue(Lane& idle) {
  const Tail tail = find_tail(idle);
  if (tail.lane == nullptr) return false;
  Lane& slow = *tail.lane;
  ++context_.stats.reissued;
  OutFrame frame;
  const bool is_moved = tail.is_queued && slow.tx[tail.at].sent == 0;
  if (is_moved) {
    frame = slow.tx.take(tail.at);
  } else if (tail.is_queued) {
    OutFrame& begun = slow.tx[tail.at];
    if (begun.header.kind == LaneFrame::data && !begun.copied) begun.copy_segment();
    frame = begun;
    frame.sent = 0;
    begun.again = true;
  } else {
    Flight& flight = slow.flights.all()[tail.at];
    flight.again = true;
    frame.header = flight.header;
    frame.has_header = true;
    frame.owned = flight.owned;
    frame.part = flight.part;
    frame.item = flight.item;
    frame.total = sizeof(FrameHeader) + flight.header.length;
    if (frame.header.kind == LaneFrame::data) frame.copy_segment();
  }
  if (frame.part) count_taken_over(slow, idle, frame.header.length, is_moved);
  frame.is_copy = true;
  idle.tx.push(std::move(frame));
  return true;
}

// What each path carries.

void Link::count_assigned(const Lane& lane, OpPart& part, std::size_t bytes) {
  if (lane.sharing.paths < 2) return;
  part.sides[side()].assigned[lane.sharing.path] += bytes;
  path_bytes_[lane.sharing.path] += bytes;
  if (context_.advice.empty()) return;
  charge(lane, static_cast<double>(bytes));
  flush_idle_but(lane);  // others had to wait until this one had taken its share
}

// The tail of one lane goes to another one: so many bytes of payload, which the slow one has sent, too, unless they
// were moved.
void Link::count_taken_over(const Lane& slow, const Lane& idle, std::size_t bytes, bool is_moved) {
  if (idle.sharing.paths < 2) return;
  const auto charged = static_cast<double>(bytes);
  if (is_moved) {
    path_bytes_[slow.sharing.path] -= bytes;
    charge(slow, -charged);
  }
  path_bytes_[idle.sharing.path] += bytes;
  charge(idle, charged);
}

}  // namespace ringfold
