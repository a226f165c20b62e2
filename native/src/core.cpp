// Connections, bytes and frames. What a frame means for an op is decided in core_ops.cpp, what it does to a bulk
// connection in core_bulk.cpp.
#include "ringfold/core.hpp"

#include <algorithm>
#include <cassert>

namespace ringfold {
namespace {

constexpr std::size_t first_read_bytes = 64 * 1024;
constexpr std::size_t queue_ahead_bytes = 64 * 1024;
constexpr std::size_t queue_ahead_frames = 16;
constexpr std::size_t max_pieces = 32;

}  // namespace

Core::Conn* Core::find_conn(ConnId id) {
  const auto it = conns_.find(id);
  return it == conns_.end() ? nullptr : &it->second;
}

const Core::Conn* Core::find_conn(ConnId id) const { return const_cast<Core*>(this)->find_conn(id); }

void Core::mark_dirty(Conn& conn) {
  if (conn.dirty) return;
  conn.dirty = true;
  dirty_.push_back(conn.id);
}

void Core::touch(ConnId id) {
  if (Conn* conn = find_conn(id)) mark_dirty(*conn);
}

ConnId Core::open(std::string remote, bool accepted) {
  Conn conn;
  conn.id = next_conn_++;
  conn.accepted = accepted;
  conn.remote = std::move(remote);
  if (accepted) {
    Event event{.kind = Event::Kind::accepted, .conn = conn.id};
    event.text = conn.remote;
    push_event(std::move(event));
  }
  const ConnId id = conn.id;
  conns_.emplace(id, std::move(conn));
  return id;
}

std::size_t Core::unauthenticated() const {
  return static_cast<std::size_t>(std::count_if(conns_.begin(), conns_.end(), [](const auto& each) {
    return each.second.accepted && each.second.role == Role::handshake;
  }));
}

void Core::opened(ConnId id) { push_event({.kind = Event::Kind::opened, .conn = id}); }

void Core::lost(Ns, ConnId id, std::string_view reason) {
  Conn* conn = find_conn(id);
  if (conn == nullptr) return;
  if (conn->role == Role::lane) {
    drop_lane(*conn, std::string(reason));
    return;
  }
  Event event{.kind = Event::Kind::closed, .conn = id};
  event.text = reason;
  if (control_ == id) control_ = 0;
  if (!conn->closing) push_event(std::move(event));
  conns_.erase(id);
}

// A lane that shares its link with others: its loss is reported as that of one connection. Otherwise the link is lost.
void Core::drop_lane(Conn& broken, std::string reason) {
  if (!broken.sharing.shared || broken.closing || !has_sibling(broken)) {
    drop_link(broken, std::move(reason));
    return;
  }
  const ConnId id = broken.id;
  Event event{.kind = Event::Kind::closed, .conn = id};
  event.text = std::move(reason);
  push_event(std::move(event));
  closing_.push_back(id);
  ++stats_.lanes_lost;
  auto lost = conns_.extract(id);
  send_elsewhere(lost.mapped());
}

// All lanes of the link are closed, and the loss is reported once.
void Core::drop_link(Conn& broken, std::string reason) {
  Event event{.kind = Event::Kind::link_lost, .peer = broken.peer, .outgoing = broken.outgoing};
  event.text = std::move(reason);
  const PeerId peer = broken.peer;
  const bool outgoing = broken.outgoing;
  const bool already_reported = broken.closing;
  std::vector<ConnId> gone;
  for (auto& [id, conn] : conns_) {
    if (conn.role == Role::lane && conn.peer == peer && conn.outgoing == outgoing) gone.push_back(id);
  }
  for (const ConnId id : gone) {
    if (find_conn(id)->sharing.shared) --shared_lanes_;
    conns_.erase(id);
    closing_.push_back(id);
  }
  if (!already_reported) push_event(std::move(event));
}

void Core::violation(Ns now, Conn& conn, std::string reason) {
  const ConnId id = conn.id;
  if (conn.role == Role::lane) {  // another lane would bring the same
    ++stats_.lane_violations;
    drop_link(conn, std::move(reason));
    return;
  }
  closing_.push_back(id);
  lost(now, id, reason);
}

void Core::send(ConnId id, const void* body, std::size_t bytes) {
  Conn* conn = find_conn(id);
  if (conn == nullptr || conn->role == Role::lane) return;
  control_frame(*conn, ControlFrame::message, static_cast<const std::byte*>(body), bytes);
}

void Core::control_frame(Conn& conn, ControlFrame kind, const std::byte* body, std::size_t bytes) {
  Bytes whole;
  whole.reserve(control_head_bytes + bytes);
  put(whole, static_cast<std::uint32_t>(bytes + 1));
  put(whole, kind);
  whole.insert(whole.end(), body, body + bytes);
  OutFrame frame;
  frame.owned = std::move(whole);
  frame.total = frame.owned.size();
  queue(conn, std::move(frame));
}

void Core::lane_frame(Conn& conn, FrameHeader header, Payload payload) {
  OutFrame frame;
  header.length = static_cast<std::uint32_t>(payload.size());
  header.payload_crc = crc32c(payload.data(), payload.size());
  header.header_crc = header.crc();
  frame.header = header;
  frame.has_header = true;
  frame.owned = std::move(payload);
  frame.total = sizeof header + frame.owned.size();
  conn.tx_bytes += frame.total;
  // Control goes before payload that has not begun.
  auto at = conn.tx.end();
  while (at != conn.tx.begin() && std::prev(at)->op && std::prev(at)->sent == 0) --at;
  conn.tx.insert(at, std::move(frame));
  mark_dirty(conn);
}

void Core::resume(Ns now, ConnId id) {
  Conn* conn = find_conn(id);
  if (conn == nullptr) return;
  conn->held = false;
  process(now, *conn);
}

void Core::make_control(Ns now, ConnId id, Ns heartbeat, Ns dead_after) {
  Conn* conn = find_conn(id);
  if (conn == nullptr) return;
  conn->role = Role::control;
  conn->held = false;
  control_ = id;
  heartbeat_ = heartbeat;
  dead_after_ = dead_after;
  last_received_ = last_echoed_ = last_tick_ = next_heartbeat_ = now;
  heartbeat_number_ = received_number_ = echoed_number_ = 0;
  silence_reported_ = false;
  process(now, *conn);
}

void Core::promote(Ns now, ConnId id, bool outgoing, PeerId peer, std::uint32_t lane, Sharing sharing) {
  Conn* conn = find_conn(id);
  if (conn == nullptr) return;
  conn->role = Role::lane;
  conn->held = false;
  conn->outgoing = outgoing;
  conn->peer = peer;
  conn->lane = lane;
  conn->last_received = conn->last_acknowledged = now;
  conn->sharing = sharing;
  conn->sharing.path = std::min<std::uint32_t>(sharing.path, max_paths - 1);
  if (sharing.shared) ++shared_lanes_;
  new_lanes_.push_back({id, outgoing, peer, lane, sharing.shared, sharing.paths});
  if (sharing.epoch != 0 && sharing.epoch == spec_.epoch) mark(*conn);
  process(now, *conn);
}

void Core::close(ConnId id) {
  Conn* conn = find_conn(id);
  if (conn == nullptr || conn->closing) return;
  if (control_ == id) control_ = 0;
  conn->closing = true;
  if (conn->role == Role::bulk) drop_blocks(*conn);
  if (conn->role == Role::lane || conn->tx.empty()) {
    closing_.push_back(id);
    auto closed = conns_.extract(id);
    if (closed.mapped().sharing.shared) send_elsewhere(closed.mapped());
  } else {
    mark_dirty(*conn);
  }
}

std::vector<LaneInfo> Core::lanes() const {
  std::vector<LaneInfo> out;
  for (const auto& [id, conn] : conns_) {
    if (conn.role != Role::lane) continue;
    out.push_back({id, conn.outgoing, conn.peer, conn.lane, conn.sharing.shared, conn.sharing.paths});
  }
  return out;
}

std::vector<ConnId> Core::take_closing() { return std::exchange(closing_, {}); }

std::vector<ConnId> Core::take_dirty() {
  for (const ConnId id : dirty_) {
    if (Conn* conn = find_conn(id)) conn->dirty = false;
  }
  return std::exchange(dirty_, {});
}

std::size_t Core::frame_limit() const { return std::max({spec_.segment_bytes, spec_.small_bytes, sizeof(Descriptor)}); }

// A neighbour that has not called an op yet stores its early segments. How much it must be able to store, and how much
// it may be sent, is one number, by direction and over all ops together, that both sides compute from the epoch's
// record.
//
// The sender counts what it sent of ops that the neighbour is not known to have called. Beyond the limit it sends no
// more of them. Any frame about an op shows that its sender has called it, so most ops need no Ready. But an op whose
// last segments are held back may wait for just that. So a peer that has received half the limit, for ops of which it
// has sent nothing, sends Ready for those that it has called (`on_early_bytes`): the other side is held back only by
// more than that.
std::size_t Core::early_limit() const {
  constexpr std::size_t most = std::size_t{64} << 20, segments = 64, min_segments = 4;
  return std::max(std::min(segments * frame_limit(), most), min_segments * frame_limit());
}

// Reading: the buffer holds at most one incomplete frame. Once its header is known, exactly its rest and the next
// header are read, so that a stream of large segments is never moved in memory.
std::span<std::byte> Core::receive_space(ConnId id) {
  Conn* conn = find_conn(id);
  if (conn == nullptr || conn->held || conn->closing) return {};
  const std::size_t have = conn->rx_end - conn->rx_begin;
  std::size_t want = first_read_bytes;
  if (conn->role == Role::bulk && conn->bulk.in_block) {
    const Block& block = conn->bulk.batches.front().blocks[conn->bulk.batches.front().next];
    conn->offered = block.bytes - conn->bulk.filled;
    return {block.at + conn->bulk.filled, conn->offered};
  }
  if (conn->role == Role::lane) {
    FrameHeader header;
    if (have >= sizeof header) {
      std::memcpy(&header, conn->rx.data() + conn->rx_begin, sizeof header);
      want = sizeof header + header.length - have + sizeof header;
      // Larger than any frame of this epoch: it will only be drained, and takes as much memory as has come, not as it
      // announces.
      if (header.length > frame_limit()) want = std::min(want, first_read_bytes);
    }
  } else if (have >= control_head_bytes) {
    std::uint32_t length = 0;
    std::memcpy(&length, conn->rx.data() + conn->rx_begin, sizeof length);
    want = std::min<std::size_t>(4 + length - have, 1 << 20);
  } else {
    want = conn->role == Role::bulk ? bulk_read_bytes(*conn) : 4096;
  }
  compact(*conn, want);
  conn->offered = std::min(want, conn->rx.size() - conn->rx_end);
  return {conn->rx.data() + conn->rx_end, conn->offered};
}

void Core::compact(Conn& conn, std::size_t needed) {
  if (conn.rx_begin == conn.rx_end) conn.rx_begin = conn.rx_end = 0;
  if (conn.rx.size() - conn.rx_end >= needed) return;
  if (conn.rx_begin > 0) {
    std::memmove(conn.rx.data(), conn.rx.data() + conn.rx_begin, conn.rx_end - conn.rx_begin);
    conn.rx_end -= conn.rx_begin;
    conn.rx_begin = 0;
  }
  if (conn.rx.size() - conn.rx_end < needed) conn.rx.resize(conn.rx_end + needed);
}

void Core::received(Ns now, ConnId id, std::size_t bytes) {
  Conn* conn = find_conn(id);
  if (conn == nullptr) return;
  now_ = now;
  const bool was_all = bytes < conn->offered;
  (conn->bulk.in_block ? conn->bulk.filled : conn->rx_end) += bytes;
  conn->last_received = now;
  conn->received_total += bytes;
  stats_.received_bytes += bytes;
  process(now, *conn);
  conn = find_conn(id);
  if (conn != nullptr && conn->role == Role::bulk) {
    if (was_all) count_is_whole(now, conn->bulk);
    take_sample(now, *conn);
  }
  // In the middle of a large frame, heartbeats and echoes wait behind it: its bytes are signs of life as well.
  if (conn != nullptr && id == control_ && conn->rx_begin < conn->rx_end) last_received_ = last_echoed_ = now;
}

void Core::process(Ns now, Conn& conn) {
  const ConnId id = conn.id;
  while (true) {
    Conn* current = find_conn(id);  // a frame may have ended its own connection, or changed its role
    if (current == nullptr || current->held || current->closing) return;
    const bool more = current->role == Role::lane   ? process_lane(now, *current)
                      : current->role == Role::bulk ? process_bulk(now, *current)
                                                    : process_control(now, *current);
    if (!more) return;
  }
}

// One frame of a handshake or control connection; false when there is none to process.
bool Core::process_control(Ns now, Conn& conn) {
  const std::size_t have = conn.rx_end - conn.rx_begin;
  if (have < control_head_bytes) return false;
  const std::byte* at = conn.rx.data() + conn.rx_begin;
  std::uint32_t length = 0;
  std::memcpy(&length, at, sizeof length);
  const auto kind = static_cast<ControlFrame>(at[4]);
  const std::size_t limit = conn.role == Role::control ? max_control_bytes : max_handshake_bytes;
  if (length < 1 || length > limit) {
    violation(now, conn, "a frame of " + std::to_string(length) + " bytes (limit " + std::to_string(limit) + ")");
    return false;
  }
  if (kind != ControlFrame::message && (conn.role != Role::control || kind > ControlFrame::evidence)) {
    violation(now, conn, "unexpected frame kind " + std::to_string(static_cast<int>(kind)));
    return false;
  }
  if (have < 4 + std::size_t{length}) return false;
  const std::byte* body = at + control_head_bytes;
  const std::size_t bytes = length - 1;
  conn.rx_begin += 4 + std::size_t{length};
  if (conn.role == Role::control) last_received_ = now;
  switch (kind) {
    case ControlFrame::message: {
      Event event{.kind = Event::Kind::message, .conn = conn.id};
      event.body.assign(body, body + bytes);
      conn.held = conn.role == Role::handshake;
      push_event(std::move(event));
      return true;
    }
    case ControlFrame::heartbeat: {
      Reader reader(body, bytes);
      std::uint64_t number = 0, echo = 0;
      if (!reader.get(number) || !reader.get(echo)) {
        violation(now, conn, "a heartbeat of " + std::to_string(bytes) + " bytes");
        return false;
      }
      received_number_ = std::max(received_number_, number);
      if (echo > echoed_number_) {
        echoed_number_ = echo;
        last_echoed_ = now;
      }
      silence_reported_ = false;
      return true;
    }
    case ControlFrame::evidence: {
      std::string why;
      if (on_evidence(body, bytes, why)) return true;
      violation(now, conn, std::move(why));
      return false;
    }
    case ControlFrame::done:
    case ControlFrame::block:
    case ControlFrame::filler:
      break;
  }
  violation(now, conn, "a Done from the master");
  return false;
}

bool Core::process_lane(Ns now, Conn& conn) {
  const std::size_t have = conn.rx_end - conn.rx_begin;
  FrameHeader header;
  if (have < sizeof header) return false;
  std::memcpy(&header, conn.rx.data() + conn.rx_begin, sizeof header);
  if (header.magic != lane_magic || header.version != lane_version || header.header_crc != header.crc()) {
    violation(now, conn, "not a lane frame (magic, version or header checksum)");
    return false;
  }
  // A lane may carry frames of an epoch with larger segments than ours, up to its mark: those are drained below.
  constexpr std::size_t largest_ever = std::size_t{64} << 20;
  if (header.length > (header.epoch == spec_.epoch ? frame_limit() : largest_ever)) {
    violation(now, conn, "a lane frame of " + std::to_string(header.length) + " bytes");
    return false;
  }
  if (have < sizeof header + header.length) return false;
  const std::byte* payload = conn.rx.data() + conn.rx_begin + sizeof header;
  conn.rx_begin += sizeof header + header.length;
  std::string why;
  const ConnId id = conn.id;
  const bool fine = header.kind == LaneFrame::applied ? on_applied(conn, header.offset, why)
                                                      : on_lane_frame(conn, header, payload, why);
  if (!fine) {
    violation(now, conn, std::move(why));
    return false;
  }
  Conn* still = find_conn(id);
  if (still != nullptr && still->sharing.shared && header.kind != LaneFrame::applied) {
    ++still->frames_seen;
    still->bytes_unacked += header.length;
    report_applied(*still);
  }
  return true;
}

// Sending: frames that have begun, then control, then segments pulled from the oldest op that may send.
OpPtr Core::next_op_to_send(bool to_next) const {
  if (sealed_) return nullptr;
  for (const OpPtr& op : running_) {
    if (!op->has_sendable(to_next)) continue;
    const std::size_t sent = op->eager_sent[to_next];
    const Sendable& next = op->next_sendable(to_next);
    if (op->peer_ready[to_next] || next.again) return op;
    const bool is_eager = sent == 0 || sent + next.length <= spec_.segment_bytes;
    const bool is_kept = early_sent_[to_next] + next.travelling_bytes() <= early_limit() || planted_.early_unlimited;
    if (is_eager && is_kept) return op;
  }
  return nullptr;
}

void Core::mark_dirty_for(const OpPtr& op) {
  for (auto& [id, conn] : conns_) {
    if (conn.role == Role::lane && op->has_sendable(conn.outgoing)) mark_dirty(conn);
  }
}

// A segment of very many arrays is copied once, instead of being gathered for each write.
void Core::own_many_pieces(OutFrame& frame) {
  std::vector<Piece> pieces;
  frame.op->pieces(frame.item, pieces);
  if (pieces.size() <= max_pieces) return;
  Bytes copy;
  copy.reserve(frame.item.length);
  for (const Piece& piece : pieces) copy.insert(copy.end(), piece.at, piece.at + piece.bytes);
  frame.owned = std::move(copy);
  frame.copied = true;
}

void Core::pull(Conn& conn) {
  // Among several lanes nothing is decided earlier than it must be.
  const std::size_t max_frames = conn.sharing.shared ? 1 : queue_ahead_frames;
  while (conn.tx_bytes < queue_ahead_bytes && conn.tx.size() < max_frames) {
    const bool to_next = conn.outgoing;
    const OpPtr op = next_op_to_send(to_next);
    if (op == nullptr && reissue(conn)) continue;
    if (op == nullptr) return;
    if (!may_take(conn, op) && leave_to_others(conn, op)) return;
    OutFrame frame;
    frame.op = op;
    frame.item = op->take_sendable(to_next);
    const bool again = frame.item.again;
    if (again && op->superseded(frame.item)) continue;
    if (planted_.apply_duplicate && !again && frame.item.offset % 3 == 1) op->resend(to_next, frame.item);
    if (!again) op->eager_sent[to_next] += frame.item.length;
    const std::uint32_t length = frame.item.travelling_bytes();
    if (!again && !op->peer_ready[to_next]) {
      op->early_sent[to_next] += length;
      early_sent_[to_next] += length;
    }
    count_assigned(conn, op, length);
    frame.header = header_for(op, LaneFrame::data);
    frame.header.stage = frame.item.stage;
    frame.header.offset = frame.item.offset;
    frame.header.length = length;
    frame.header.contributors = frame.item.contributors;
    frame.header.payload_crc = frame.item.crc_known ? frame.item.crc : op->crc_of(frame.item);
    frame.header.header_crc = frame.header.crc();
    frame.has_header = true;
    frame.total = sizeof(FrameHeader) + length;
    // What goes again is copied: the first one may have arrived, and its memory may be overwritten at any time.
    if (again) copy_segment(frame);
    else if (op->spec.spans.size() > max_pieces) own_many_pieces(frame);
    conn.tx_bytes += frame.total;
    op->result.sent_bytes += length;
    conn.tx.push_back(std::move(frame));
  }
}

std::size_t Core::gather(ConnId id, iovec* out, std::size_t most) {
  Conn* conn = find_conn(id);
  if (conn == nullptr) return 0;
  if (conn->role == Role::lane && conn->mark_sent == spec_.epoch) pull(*conn);
  if (conn->role == Role::bulk) pull_filler(*conn);
  std::size_t count = 0;
  std::vector<Piece> pieces;
  const auto add = [&](const std::byte* at, std::size_t bytes, std::size_t& skip) {
    if (skip >= bytes) {
      skip -= bytes;
      return;
    }
    if (count < most) out[count++] = {const_cast<std::byte*>(at) + skip, bytes - skip};
    skip = 0;
  };
  for (OutFrame& frame : conn->tx) {
    if (count + 2 > most) break;
    std::size_t skip = frame.sent;
    if (frame.has_header) add(reinterpret_cast<const std::byte*>(&frame.header), sizeof frame.header, skip);
    if (frame.op && !frame.copied) {
      pieces.clear();
      frame.op->pieces(frame.item, pieces);
      for (const Piece& piece : pieces) add(piece.at, piece.bytes, skip);
      if (count == most) break;  // perhaps not all pieces: nothing may follow
    } else {
      if (frame.owned.size() > 0) add(frame.owned.data(), frame.owned.size(), skip);
      if (!frame.borrowed.empty()) add(frame.borrowed.data(), frame.borrowed.size(), skip);
    }
  }
  return count;
}

void Core::sent(Ns now, ConnId id, std::size_t bytes) {
  Conn* conn = find_conn(id);
  if (conn == nullptr) return;
  stats_.sent_bytes += bytes;
  conn->tx_bytes -= bytes;
  if (conn->unacknowledged == 0) conn->last_acknowledged = now;
  if (conn->sharing.shared) note_saturation(*conn, now, bytes);
  conn->sent_total += bytes;
  while (bytes > 0) {
    OutFrame& frame = conn->tx.front();
    const std::size_t step = std::min(bytes, frame.total - frame.sent);
    frame.sent += step;
    bytes -= step;
    if (frame.sent < frame.total) break;
    if (!frame.filler) conn->bulk.queued_blocks -= frame.borrowed.size();
    if (conn->sharing.shared && frame.has_header) note_sent(*conn, frame, conn->sent_total - bytes);
    conn->tx.pop_front();
  }
  if (conn->sharing.shared && has_too_much_unreported(*conn)) {
    violation(now, *conn, "it takes frames, but reports none of them");
    return;
  }
  // Heartbeats wait behind a large frame of our own, so nothing is echoed. Progress of its bytes counts instead.
  if (id == control_ && !conn->tx.empty()) last_echoed_ = now;
  if (conn->closing && conn->tx.empty()) {
    conns_.erase(id);
    closing_.push_back(id);
  }
}

bool Core::expects(ConnId id) const {
  const Conn* conn = find_conn(id);
  return conn != nullptr && (!conn->outgoing || spec_.size > 2);
}

std::optional<Event> Core::next_event() {
  if (events_.empty()) return std::nullopt;
  Event event = std::move(events_.front());
  events_.pop_front();
  return event;
}

}  // namespace ringfold
