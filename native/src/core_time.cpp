// Time: heartbeats, silence, deadlines. A gap between ticks means that this process slept: all deadlines are shifted by
// it.
#include <algorithm>
#include <utility>

#include "ringfold/core.hpp"

namespace ringfold {
namespace {

constexpr Ns millisecond = 1'000'000;
constexpr Ns late_after = 200 * millisecond;  // a gap between ticks that means: the observer itself was late
constexpr Ns flush_before_close = 1'000 * millisecond;
constexpr Ns announce_after = 100 * millisecond;  // younger ops are not reported
constexpr std::size_t max_announced = 64;

}  // namespace

void Core::tick(Ns now) {
  if (last_tick_ != 0 && now - last_tick_ > late_after) {
    const Ns gap = now - last_tick_;
    last_received_ += gap;
    last_echoed_ += gap;
    for (auto& [id, conn] : conns_) {
      conn.last_received += gap;
      conn.last_acknowledged += gap;
    }
    for (const OpPtr& op : running_) op->deadline += gap;
    for (const OpPtr& op : waiting_) op->deadline += gap;
  }
  last_tick_ = now;
  for (auto it = conns_.begin(); it != conns_.end();) {
    Conn& conn = (it++)->second;
    if (!conn.closing) continue;
    if (conn.closing_since == 0) conn.closing_since = now;
    if (now - conn.closing_since < flush_before_close) continue;
    closing_.push_back(conn.id);
    conns_.erase(conn.id);
  }
  if (control_ != 0) {
    if (now >= next_heartbeat_) {
      beat(now);
      next_heartbeat_ = now + heartbeat_;
    }
    const Ns silent = now - std::min(last_received_, last_echoed_);
    if (silent > dead_after_ && !silence_reported_) {
      silence_reported_ = true;
      push_event({.kind = Event::Kind::silent,
                  .conn = control_,
                  .milliseconds = static_cast<std::uint64_t>(silent / millisecond)});
    }
  }
  for (auto& [id, conn] : conns_) {
    if (conn.role == Role::bulk) take_sample(now, conn);
  }
  for (const auto* ops : {&running_, &waiting_}) {
    for (const OpPtr& op : *ops) {
      if (op->timeout_reported || now < op->deadline) continue;
      op->timeout_reported = true;
      push_event({.kind = Event::Kind::op_timeout,
                  .epoch = op->epoch,
                  .tag = op->spec.tag,
                  .sequence = op->sequence,
                  .milliseconds = static_cast<std::uint64_t>((now - op->started) / millisecond),
                  .body = raw(op->descriptor)});
    }
  }
}

Ns Core::next_deadline() const { return control_ != 0 ? next_heartbeat_ : 0; }

void Core::beat(Ns now) {
  Conn* conn = find_conn(control_);
  if (conn == nullptr) return;
  Bytes body;
  put(body, ++heartbeat_number_);
  put(body, received_number_);
  put(body, spec_.epoch);
  put(body, static_cast<std::uint32_t>(stalled_ms(now, true)));
  put(body, static_cast<std::uint32_t>(in_starved_ms(now)));
  put(body, static_cast<std::uint32_t>(stalled_ms(now, false)));
  put(body, stats_.committed);
  put(body, conn->received_total);
  put(body, std::exchange(best_out_rate_, 0));
  std::vector<OpPtr> old;
  for (const OpPtr& op : running_) {
    if (now - op->started >= announce_after && old.size() < max_announced) old.push_back(op);
  }
  put(body, static_cast<std::uint16_t>(old.size()));
  for (const OpPtr& op : old) {
    put(body, op->spec.tag);
    put(body, op->sequence);
    put(body, static_cast<std::uint32_t>((now - op->started) / millisecond));
    put(body, op->fingerprint);
    put(body, static_cast<std::uint8_t>(op->state == OpState::done || op->small));
  }
  control_frame(*conn, ControlFrame::heartbeat, body.data(), body.size());
}

std::uint64_t Core::stalled_ms(Ns now, bool outgoing) const {
  if (running_.empty() || sealed_) return 0;
  // A link moves while one of its lanes does, or has nothing to do.
  bool any = false;
  Ns least = 0;
  for (const auto& [id, conn] : conns_) {
    if (conn.role != Role::lane || conn.outgoing != outgoing) continue;
    const bool waits = conn.unacknowledged > 0 || !conn.tx.empty();
    const Ns since = waits ? now - conn.last_acknowledged : 0;
    least = any ? std::min(least, since) : since;
    any = true;
  }
  return static_cast<std::uint64_t>(std::max<Ns>(least, 0) / millisecond);
}

std::uint64_t Core::in_starved_ms(Ns now) const {
  if (running_.empty() || sealed_ || spec_.size < 2) return 0;
  Ns since = 0;
  for (const OpPtr& op : running_) since = since == 0 ? op->started : std::min(since, op->started);
  for (const auto& [id, conn] : conns_) {
    if (conn.role == Role::lane && !conn.outgoing) since = std::max(since, conn.last_received);
  }
  return static_cast<std::uint64_t>(std::max<Ns>(now - since, 0) / millisecond);
}

}  // namespace ringfold
