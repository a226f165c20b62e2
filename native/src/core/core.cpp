#include "ringfold/core.hpp"

#include <algorithm>
#include <stdexcept>

namespace ringfold {
namespace {

constexpr Ns millisecond = 1'000'000;
constexpr Ns late_after = 200 * millisecond;  // a gap between ticks that means: the observer itself was late
constexpr Ns flush_before_close = 1'000 * millisecond;
constexpr std::size_t head_read_bytes = 4096;

}  // namespace

// Connections.

MessageConnection* Core::find_conn(ConnId id) {
  const auto it = conns_.find(id);
  return it == conns_.end() ? nullptr : &it->second;
}

ConnId Core::open(std::string remote, bool accepted) {
  MessageConnection conn;
  conn.id = next_conn_++;
  conn.accepted = accepted;
  if (accepted) {
    Event event{.kind = Event::Kind::accepted, .conn = conn.id};
    event.text = std::move(remote);
    events_.push(std::move(event));
  }
  const ConnId id = conn.id;
  conns_.emplace(id, std::move(conn));
  return id;
}

void Core::opened(ConnId id) { events_.push({.kind = Event::Kind::opened, .conn = id}); }

std::size_t Core::unauthenticated() const {
  return static_cast<std::size_t>(std::count_if(conns_.begin(), conns_.end(), [](const auto& each) {
    return each.second.accepted && each.second.is_handshake();
  }));
}

void Core::lost(Ns now, ConnId id, std::string_view reason) {
  if (find_conn(id) != nullptr) {
    drop(id, reason);
  } else if (Channel* channel = channels_.of(id)) {
    channel->lost(id, std::string(reason));
    route(now);
  }
}

// A connection that is no lane has ended.
void Core::drop(ConnId id, std::string_view reason) {
  const MessageConnection* conn = find_conn(id);
  if (conn == nullptr) return;
  if (control_.conn() == id) control_.close();
  Event event{.kind = Event::Kind::closed, .conn = id};
  event.text = reason;
  if (!conn->closing) events_.push(std::move(event));
  conns_.erase(id);
}

void Core::violation(ConnId id, std::string_view reason) {
  closing_.push_back(id);
  drop(id, reason);
}

void Core::send(ConnId id, const void* body, std::size_t bytes) {
  MessageConnection* conn = find_conn(id);
  if (conn == nullptr) return;
  conn->queue(ControlFrame::message, static_cast<const std::byte*>(body), bytes);
  flush_.add(*conn);
}

void Core::resume(Ns now, ConnId id) {
  MessageConnection* conn = find_conn(id);
  if (conn == nullptr) return;
  conn->held = false;
  process(now, *conn);
}

void Core::make_control(Ns now, ConnId id, Ns heartbeat, Ns dead_after) {
  MessageConnection* conn = find_conn(id);
  if (conn == nullptr) return;
  conn->is_control = true;
  conn->held = false;
  control_.open(now, id, heartbeat, dead_after);
  has_new_report_ = !report_.empty();
  last_tick_ = now;
  process(now, *conn);
}

void Core::promote(Ns now, ConnId id, bool outgoing, PeerId peer, std::uint32_t number, Sharing sharing) {
  MessageConnection* conn = find_conn(id);
  if (conn == nullptr) return;
  auto node = conns_.extract(id);
  MessageConnection& was = node.mapped();
  was.dirty = false;  // it is another list's now
  Lane lane(std::move(static_cast<Connection&>(was)), outgoing, peer, number, sharing);
  for (const MessageFrame& message : was.tx) {  // the end of its handshake
    OutFrame frame;
    frame.owned = message.owned;
    frame.sent = message.sent;
    frame.total = message.total;
    lane.tx.push(std::move(frame));
  }
  channels_.at(std::min(sharing.channel, max_channels - 1)).add_lane(now, std::move(lane));
  route(now);
}

void Core::close(ConnId id) {
  if (Channel* channel = channels_.of(id)) {
    channel->close(id);
    return;
  }
  MessageConnection* conn = find_conn(id);
  if (conn == nullptr || conn->closing) return;
  if (control_.conn() == id) control_.close();
  conn->closing = true;
  if (conn->bulk) conn->bulk->close();
  if (conn->tx.empty()) {
    closing_.push_back(id);
    conns_.erase(id);
  } else {
    flush_.add(*conn);
  }
}

std::vector<ConnId> Core::take_closing() {
  std::vector<ConnId> out = channels_.take_closing();
  out.insert(out.end(), closing_.begin(), closing_.end());
  closing_.clear();
  return out;
}

std::vector<ConnId> Core::take_dirty() {
  std::vector<ConnId> out = take_dirty_messages();
  const std::vector<ConnId> lanes = channels_.take_dirty();
  out.insert(out.end(), lanes.begin(), lanes.end());
  return out;
}

std::vector<ConnId> Core::take_dirty_messages() {
  std::vector<ConnId> out = flush_.take();
  for (const ConnId id : out) {
    if (MessageConnection* conn = find_conn(id)) conn->dirty = false;
  }
  return out;
}

void Core::touch(ConnId id) {
  if (MessageConnection* conn = find_conn(id)) flush_.add(*conn);
  else if (Channel* channel = channels_.of(id)) channel->touch(id);
}

// Bytes. A connection that is no lane is found first: while channels are driven, nobody may ask them.

std::span<std::byte> Core::receive_space(ConnId id) {
  MessageConnection* conn = find_conn(id);
  if (conn == nullptr) {
    Channel* channel = channels_.of(id);
    return channel == nullptr ? std::span<std::byte>() : channel->receive_space(id);
  }
  if (conn->held || conn->closing) return {};
  const auto space = conn->bulk ? conn->bulk->receive_space() : conn->message_space(head_read_bytes);
  conn->offered = space.size();
  return space;
}

void Core::received(Ns now, ConnId id, std::size_t bytes) {
  MessageConnection* conn = find_conn(id);
  if (conn == nullptr) {
    Channel* channel = channels_.of(id);
    if (channel == nullptr) return;
    channel->received(now, id, bytes);
    route(now);
    return;
  }
  conn->received_total += bytes;
  stats_.received_bytes += bytes;
  if (conn->bulk) {
    std::string why;
    if (!conn->bulk->received(now, bytes, bytes < conn->offered, why)) violation(id, why);
    return;
  }
  conn->rx.filled(bytes);
  process(now, *conn);
  conn = find_conn(id);
  if (conn != nullptr && conn->is_control && conn->rx.size() > 0) control_.is_receiving(now);
}

// Frames of a handshake, or from the master.
void Core::process(Ns now, MessageConnection& conn) {
  const ConnId id = conn.id;
  std::string why;
  if (conn.bulk) {
    if (!conn.bulk->process(now, why)) violation(id, why);
    return;
  }
  while (why.empty() && !conn.held && !conn.closing) {
    const auto frame = conn.next_frame(why);
    if (!frame) break;
    if (conn.is_control) control_.frame_came(now);
    if (frame->kind == ControlFrame::message) {
      Event event{.kind = Event::Kind::message, .conn = id};
      event.body.assign(frame->body, frame->body + frame->bytes);
      conn.held = conn.is_handshake();
      events_.push(std::move(event));
    } else {
      on_control_frame(now, *frame, why);
    }
  }
  if (!why.empty()) violation(id, why);
}

void Core::on_control_frame(Ns now, const MessageConnection::Incoming& frame, std::string& why) {
  if (frame.kind == ControlFrame::heartbeat) {
    if (!control_.on_heartbeat(now, frame.body, frame.bytes)) {
      why = "a heartbeat of " + std::to_string(frame.bytes) + " bytes";
    }
  } else if (frame.kind == ControlFrame::evidence) {
    ops_.on_evidence(now, frame.body, frame.bytes, why);
  } else {
    why = "a Done from the master";
  }
}

void Core::route_first(Ns now) {
  Channel& channel = channels_.at(0);
  while (channel.has_reports() && !channel.concerns_others()) {
    for (const Report& report : channel.take_reports()) ops_.on_report(now, report);
  }
  send_dones();
}

void Core::on_reports(Ns now, const std::vector<Report>& reports) {
  for (const Report& report : reports) ops_.on_report(now, report);
  route_first(now);
}

void Core::route(Ns now) {
  for (std::size_t i = 0; i < channels_.all().size();) {
    if (!channels_.all()[i]->has_reports()) {
      ++i;
      continue;
    }
    for (const Report& report : channels_.all()[i]->take_reports()) on_report(now, report);
    i = 0;  // what was decided may have led to another report
  }
  send_dones();
}

void Core::send_dones() {
  for (const Bytes& done : ops_.take_dones()) {
    MessageConnection* master = find_conn(control_.conn());
    if (master == nullptr) break;
    master->queue(ControlFrame::done, done.data(), done.size());
    flush_.add(*master);
  }
}

void Core::on_report(Ns now, const Report& report) {
  const bool is_link = report.kind == Report::Kind::link_lost;
  if (!is_link && report.kind != Report::Kind::lane_lost) {
    ops_.on_report(now, report);
    return;
  }
  if (is_link) channels_.close_link(report.link);
  Event event{.kind = is_link ? Event::Kind::link_lost : Event::Kind::closed,
              .conn = report.conn,
              .peer = report.link.peer,
              .outgoing = report.link.outgoing};
  event.direct = report.link.direct;
  event.text = report.text;
  event.died = report.died;
  events_.push(std::move(event));
}

std::size_t Core::gather(ConnId id, iovec* out, std::size_t most) {
  MessageConnection* conn = find_conn(id);
  if (conn == nullptr) {
    Channel* channel = channels_.of(id);
    return channel == nullptr ? 0 : channel->gather(id, out, most);
  }
  if (conn->bulk) conn->bulk->pull();
  return conn->tx.gather(out, most);
}

void Core::sent(Ns now, ConnId id, std::size_t bytes) {
  MessageConnection* conn = find_conn(id);
  if (conn == nullptr) {
    Channel* channel = channels_.of(id);
    if (channel == nullptr) return;
    channel->sent(now, id, bytes);
    route(now);
    return;
  }
  stats_.sent_bytes += bytes;
  conn->sent_total += bytes;
  conn->tx.sent(bytes, [&](const MessageFrame& frame, std::size_t) {
    if (conn->bulk) conn->bulk->frame_is_through(frame);
  });
  if (conn->is_control && !conn->tx.empty()) control_.is_sending(now);
  if (conn->closing && conn->tx.empty()) {
    conns_.erase(id);
    closing_.push_back(id);
  }
}

void Core::acknowledged(Ns now, ConnId id, std::uint64_t unacknowledged, Ns rtt, Ns min_rtt) {
  if (const MessageConnection* conn = find_conn(id)) {
    if (conn->is_control) control_.acknowledged(now, conn->sent_total, unacknowledged);
  } else if (Channel* channel = channels_.of(id)) {
    channel->acknowledged(now, id, unacknowledged, rtt, min_rtt);
  }
}

void Core::set_path_shares(PeerId peer, const PathShares& shares) {
  advice_.set_shares(peer, shares);
  for (const auto& channel : channels_.all()) channel->advice_changed(peer);
}

void Core::advice_changed() {
  for (const auto& channel : channels_.all()) channel->advice_changed();
}

// Bulk connections.

MessageConnection* Core::find_bulk(ConnId id) {
  MessageConnection* conn = find_conn(id);
  if ((conn == nullptr || conn->closing) && channels_.of(id) == nullptr) return nullptr;
  if (conn == nullptr || !conn->bulk) throw std::invalid_argument("not a bulk connection: make_bulk() comes first");
  return conn;
}

void Core::make_bulk(Ns now, ConnId id) {
  MessageConnection* conn = find_conn(id);
  if (conn != nullptr && conn->closing) return;
  if (channels_.of(id) != nullptr || (conn != nullptr && !conn->is_handshake()))
    throw std::invalid_argument("only a connection in its handshake becomes a bulk connection");
  if (conn == nullptr) return;
  conn->bulk = std::make_unique<BulkChannel>(*conn, events_);
  conn->held = false;
  process(now, *conn);
}

bool Core::is_bulk(ConnId id) const {
  const auto it = conns_.find(id);
  return it != conns_.end() && it->second.bulk != nullptr;
}

void Core::send_blocks(Ns, ConnId id, const std::vector<Block>& blocks, const MemoryOwner& keep) {
  MessageConnection* conn = find_bulk(id);
  if (conn == nullptr) return;
  std::string why;
  if (conn->bulk->send_blocks(blocks, keep, why)) flush_.add(*conn);
  else violation(id, why);
}

void Core::expect_blocks(ConnId id, std::uint64_t batch, std::vector<Block> blocks, MemoryOwner keep) {
  if (MessageConnection* conn = find_bulk(id)) conn->bulk->expect(batch, std::move(blocks), std::move(keep));
}

void Core::fill(ConnId id, bool on) {
  MessageConnection* conn = find_bulk(id);
  if (conn == nullptr || !conn->bulk->fill(on)) return;
  filling_.push_back(id);
  flush_.add(*conn);
}

void Core::sample(Ns now, ConnId id, Ns every) {
  if (MessageConnection* conn = find_bulk(id)) conn->bulk->sample(now, every);
}

void Core::forget_blocks() {
  for (auto& [id, conn] : conns_) {
    if (conn.bulk) conn.bulk->close();
  }
}

// Epochs and ops.

std::vector<SealedOp> Core::seal(std::uint32_t epoch) {
  if (epoch != epoch_.number()) return {};
  return ops_.seal();
}

void Core::settle(Ns now, std::uint32_t epoch, const std::vector<Verdict>& verdicts, const Bytes& default_reason) {
  if (epoch == epoch_.number()) ops_.settle(now, verdicts, default_reason);
}

void Core::install(Ns now, EpochSpec spec) {
  epoch_.install(std::move(spec));
  channels_.install(now);
  ops_.restart(now);
  route(now);
  for (const auto& channel : channels_.all()) channel->resume();
  route(now);
}

std::uint64_t Core::submit(Ns now, OpSpec spec) {
  const std::uint64_t id = ops_.submit(now, std::move(spec));
  if (channels_.are_driven()) route_first(now);
  else route(now);
  return id;
}

// Time. A gap between ticks means that this process slept: all deadlines are shifted by it.

bool Core::is_tick_wide(Ns now) const {
  return (last_tick_ != 0 && now - last_tick_ > late_after) || control_.is_due(now);
}

void Core::tick(Ns now) {
  if (last_tick_ != 0 && now - last_tick_ > late_after) {
    const Ns gap = now - last_tick_;
    control_.shift(gap);
    channels_.shift(gap);
    ops_.shift(gap);
  }
  last_tick_ = now;
  close_late(now);
  if (control_.is_due(now)) beat(now);
  if (const auto silent = control_.new_silence(now)) {
    events_.push({.kind = Event::Kind::silent,
                  .conn = control_.conn(),
                  .milliseconds = static_cast<std::uint64_t>(*silent / millisecond)});
  }
  for (auto& [id, conn] : conns_) {
    if (conn.bulk) conn.bulk->take_sample(now);
  }
  ops_.check_deadlines(now);
}

// What could not be sent before its connection is to be closed.
void Core::close_late(Ns now) {
  for (auto it = conns_.begin(); it != conns_.end();) {
    MessageConnection& conn = (it++)->second;
    if (!conn.closing) continue;
    if (conn.closing_since == 0) conn.closing_since = now;
    if (now - conn.closing_since < flush_before_close) continue;
    closing_.push_back(conn.id);
    conns_.erase(conn.id);
  }
}

void Core::beat(Ns now) {
  MessageConnection* conn = find_conn(control_.conn());
  if (conn == nullptr) return;
  const auto [number, received] = control_.beat(now);
  const std::optional<Ns> oldest = epoch_.is_sealed() ? std::nullopt : ops_.oldest();
  const auto stalled_ms = [&](bool outgoing) {
    return static_cast<std::uint32_t>(channels_.stalled(now, outgoing, oldest.value_or(now)) / millisecond);
  };
  const Ns starved = oldest && epoch_.size() > 1 ? channels_.starved(now, *oldest) : 0;
  Bytes body;
  put(body, number);
  put(body, received);
  put(body, epoch_.number());
  put(body, stalled_ms(true));
  put(body, static_cast<std::uint32_t>(std::max<Ns>(starved, 0) / millisecond));
  put(body, stalled_ms(false));
  put(body, stats().committed);
  put(body, conn->received_total);
  put(body, ops_.take_out_rate());
  ops_.announce(now, body);
  const Stats sum = stats();
  for (const std::uint64_t each :
       {sum.committed, sum.aborted, sum.restarted, sum.op_bytes, sum.sent_bytes, sum.received_bytes, sum.memory_bytes,
        sum.busy, sum.waited, sum.blocked, sum.lanes_lost}) {
    put(body, each);
  }
  put(body, sum.durations);
  put(body, static_cast<std::uint32_t>(has_new_report_ ? report_.size() : 0));
  if (has_new_report_) body.insert(body.end(), report_.begin(), report_.end());
  has_new_report_ = false;
  conn->queue(ControlFrame::heartbeat, body.data(), body.size());
  flush_.add(*conn);
}

Stats Core::stats() const {
  Stats sum = stats_;
  sum += channels_.stats();
  sum += ops_.stats();
  return sum;
}

}  // namespace ringfold
