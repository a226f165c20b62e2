// What frames mean for ops; the life of an op from its start to its commit.
#include <algorithm>
#include <cassert>
#include <stdexcept>

#include "ringfold/core.hpp"

namespace ringfold {
namespace {

constexpr std::size_t max_control = 4096;                      // Open, Ready and the like, of one op
constexpr std::size_t min_timed_bytes = std::size_t{4} << 20;  // of payload: less does not show a link's rate
constexpr std::size_t max_tags = 4096;  // called by one peer in an epoch: what its seal may have to list
// Calls of both neighbours that are not called here yet: each of them counts its own.
constexpr std::size_t max_known_tags = 3 * max_tags;

constexpr std::uint32_t no_payload = 0xffff'ffff;  // in evidence, instead of a length: the rank contributes nothing

Bytes bytes_of(const std::byte* at, std::size_t count) { return {at, at + count}; }

bool intact(const FrameHeader& header, const std::byte* payload) {
  return crc32c(payload, header.length) == header.payload_crc;
}

}  // namespace

FrameHeader Core::header_for(const OpPtr& op, LaneFrame kind) const {
  FrameHeader header;
  header.kind = kind;
  header.epoch = spec_.epoch;
  header.sequence = op->sequence;
  header.tag = op->spec.tag;
  header.fingerprint = op->fingerprint;
  header.origin = spec_.rank;
  return header;
}

// Frames. Each returns false with a reason when the neighbour breaks the protocol: its lane is then dropped.

bool Core::on_lane_frame(Conn& conn, const FrameHeader& header, const std::byte* payload, std::string& why) {
  if (header.kind == LaneFrame::mark) {
    if (header.epoch <= conn.mark_seen) {
      why = "the mark of epoch " + std::to_string(header.epoch) + " after that of " + std::to_string(conn.mark_seen);
      return false;
    }
    conn.mark_seen = header.epoch;
    conn.held = header.epoch > spec_.epoch;
    return true;
  }
  if (header.epoch != conn.mark_seen) {
    why = "a frame of epoch " + std::to_string(header.epoch) + " after the mark of " + std::to_string(conn.mark_seen);
    return false;
  }
  if ((header.epoch != spec_.epoch || sealed_) && !planted_.accept_old_epoch) {
    ++stats_.drained;
    return true;
  }
  const bool known =
      (header.kind >= LaneFrame::mark && header.kind <= LaneFrame::ready) || header.kind == LaneFrame::absent;
  if (!known || (header.kind == LaneFrame::open && conn.outgoing)) {
    why = "frame kind " + std::to_string(static_cast<int>(header.kind)) + " has no place here";
    return false;
  }
  if (tags_.size() >= max_known_tags && !tags_.contains(header.tag)) {
    why = "more than " + std::to_string(max_known_tags) + " tags";
    return false;
  }
  TagState& tag = tag_state(header.tag);
  const bool confused = planted_.apply_finished && tag.running && is_before(header.sequence, tag.running->sequence);
  if (tag.running && (header.sequence == tag.running->sequence || confused)) {
    return on_op_frame(OpPtr(tag.running), conn.outgoing, header, payload, why);
  }
  if (is_before(header.sequence, tag.next)) {
    ++stats_.drained;
    return true;
  }
  return stash(tag, conn, header, payload, why);
}

// A frame of an op that is not called here yet.
bool Core::stash(TagState& tag, Conn& conn, const FrameHeader& header, const std::byte* payload, std::string& why) {
  const auto same = [&](const Stashed& other) {
    return other.from_next == conn.outgoing && other.header.kind == header.kind && other.header.stage == header.stage &&
           other.header.offset == header.offset && other.header.origin == header.origin;
  };
  if (conn.sharing.shared && std::any_of(tag.stash.begin(), tag.stash.end(), same)) {
    ++stats_.duplicates;  // it came again over another lane
    return true;
  }
  // Of each op: a segment from both sides, the payloads of a small one, and Open, Ready and Dones without a payload. Of
  // all ops together: segments up to the limit that the sender knows, too. The payloads of small ops are limited by
  // their tags.
  const bool is_segment = header.kind == LaneFrame::data;
  const std::size_t early = is_segment ? header.length : 0;
  const std::size_t of_tag = 2 * frame_limit() + spec_.size * (spec_.small_bytes + sizeof header) + max_control;
  const bool is_too_much = tag.stash_bytes + header.length + sizeof header > of_tag ||
                           stashed_segments_[conn.outgoing] + early > early_limit() ||
                           (!is_segment && header.length > sizeof(Descriptor) &&
                            std::size_t{header.length} * spec_.size > max_payload_bytes(header.tag));
  if (header.sequence != tag.next || is_too_much) {
    why = "op " + std::to_string(header.sequence) + " of tag " + std::to_string(header.tag) + " is too far ahead";
    return false;
  }
  if (!intact(header, payload)) {
    why = "a frame with a wrong checksum";
    return false;
  }
  tag.stash.push_back({conn.outgoing, header, bytes_of(payload, header.length)});
  tag.stash_bytes += header.length + sizeof header;
  tag.stashed_segments[conn.outgoing] += early;
  stashed_segments_[conn.outgoing] += early;
  on_early_bytes(conn.outgoing, early);
  return true;
}

bool Core::on_op_frame(const OpPtr& op, bool from_next, const FrameHeader& header, const std::byte* payload,
                       std::string& why) {
  on_neighbour_called(op, from_next);
  if (header.kind == LaneFrame::ready) return true;
  if (header.kind == LaneFrame::open) {
    if (header.length != sizeof(Descriptor) || !intact(header, payload)) {
      why = "a broken descriptor";
      return false;
    }
    if (header.fingerprint != op->fingerprint && !op->mismatch_reported) {
      op->mismatch_reported = true;
      Event event{.kind = Event::Kind::mismatch,
                  .peer = previous_peer(),
                  .epoch = op->epoch,
                  .tag = header.tag,
                  .sequence = header.sequence};
      event.body = raw(op->descriptor);
      event.other = bytes_of(payload, header.length);
      push_event(std::move(event));
    }
    return true;
  }
  if (header.fingerprint != op->fingerprint) return true;  // its descriptor shows that, and the op ends by a verdict
  if (header.kind == LaneFrame::data) return on_data(op, from_next, header, payload, why);
  if (header.kind == LaneFrame::absent) return on_absent(op, from_next, header, why);
  return on_done(op, from_next, header, payload, why);
}

bool Core::on_data(const OpPtr& op, bool from_next, const FrameHeader& header, const std::byte* payload,
                   std::string& why) {
  if (!intact(header, payload)) {
    why = "a segment with a wrong checksum";
    return false;
  }
  if (op->small) {
    why = "a segment for an op that travels inside Done";
    return false;
  }
  switch (op->apply(from_next, header.stage, header.offset, payload, header.length, header.payload_crc,
                    header.contributors, planted_.apply_duplicate)) {
    case Op::Applied::invalid:
      why = "a segment that is in nobody's plan";
      return false;
    case Op::Applied::duplicate:
      ++stats_.duplicates;
      return true;
    case Op::Applied::yes:
      break;
  }
  op->result.received_bytes += header.length;
  if (!op->ready_sent[from_next]) {
    op->early_received[from_next] += header.length;
    on_early_bytes(from_next, header.length);
  }
  mark_dirty_for(op);
  if (op->state == OpState::running && op->local_part_finished()) local_part_done(op);
  return true;
}

// How far the frame of rank `origin` has come, and how far it goes: what all ranks must know travels in both directions
// around the ring and stops half-way, where the frame from the other side has been.
Core::Journey Core::journey(std::uint32_t origin, bool from_next) const {
  const std::uint32_t n = spec_.size;
  const std::uint32_t travelled = from_next ? (origin + n - spec_.rank) % n : (spec_.rank + n - origin) % n;
  return {travelled, from_next ? (n - 1) / 2 : n / 2};
}

// The ranks that contribute nothing. The count of the final value determines how many there are.
bool Core::on_absent(const OpPtr& op, bool from_next, const FrameHeader& header, std::string& why) {
  const bool is_rank = header.origin < spec_.size && header.origin != spec_.rank;
  if (!is_rank || header.length != 0 || op->small || !op->reduces()) {
    why = "a rank that cannot be absent";
    return false;
  }
  if (op->is_absent(header.origin)) return true;
  const Journey journey = this->journey(header.origin, from_next);
  if (journey.travelled > journey.reach || !op->set_absent(header.origin)) {
    why = "a rank that is absent, although it contributed or is too far away";
    return false;
  }
  if (journey.travelled < journey.reach) send_absent(op, !from_next, header.origin);
  if (op->state == OpState::running && op->local_part_finished()) local_part_done(op);
  return true;
}

void Core::send_absent(const OpPtr& op, bool to_next, std::uint32_t origin) {
  Conn* conn = lane_for_control(to_next);
  if (conn == nullptr) return;
  FrameHeader header = header_for(op, LaneFrame::absent);
  header.origin = origin;
  lane_frame(*conn, header, {});
}

bool Core::on_done(const OpPtr& op, bool from_next, const FrameHeader& header, const std::byte* payload,
                   std::string& why) {
  if (header.origin >= spec_.size || header.origin == spec_.rank || !intact(header, payload)) {
    why = "a broken Done";
    return false;
  }
  const bool silent = !op->small || (op->spec.kind == OpKind::broadcast && header.origin != op->spec.root);
  const bool contributes = header.contributors > 0 || silent || !op->reduces();
  if (header.length != (silent || !contributes ? 0 : op->bytes)) {
    why = "a Done with " + std::to_string(header.length) + " bytes";
    return false;
  }
  if (op->dones[header.origin]) return true;
  const Journey journey = this->journey(header.origin, from_next);
  if (journey.travelled > journey.reach) {
    why = "a Done that went too far";
    return false;
  }
  if (op->small) {
    if (contributes) op->payloads[header.origin] = bytes_of(payload, header.length);
    op->result.received_bytes += header.length;
  }
  op->dones[header.origin] = true;
  ++op->done_count;
  op->registrations = std::max(op->registrations, header.registrations);
  if (journey.travelled < journey.reach) send_done(op, !from_next, header.origin, header.registrations);
  check_evidence(op);
  return true;
}

bool Core::on_evidence(const std::byte* body, std::size_t bytes, std::string& why) {
  Reader reader(body, bytes);
  std::uint32_t epoch = 0, sequence = 0, fingerprint = 0;
  std::uint64_t tag = 0, registrations = 0;
  std::uint16_t count = 0;
  bool whole = reader.get(epoch) && reader.get(tag) && reader.get(sequence) && reader.get(fingerprint) &&
               reader.get(registrations) && reader.get(count);
  std::vector<std::uint32_t> lengths(count);
  for (std::uint32_t& length : lengths) whole = whole && reader.get(length);
  Payloads payloads;
  for (const std::uint32_t length : lengths) {
    const std::byte* at = reader.at();
    const bool is_there = length != no_payload;
    whole = whole && reader.skip(is_there ? length : 0);
    if (whole) payloads.push_back(is_there ? Payload(bytes_of(at, length)) : Payload());
  }
  if (!whole) {
    why = "broken evidence";
    return false;
  }
  if (epoch != spec_.epoch || sealed_) return true;
  const auto found = tags_.find(tag);
  if (found == tags_.end() || !found->second.running || found->second.running->sequence != sequence) return true;
  const OpPtr op = found->second.running;
  if (count != spec_.size || fingerprint != op->fingerprint) return true;
  if (op->small) op->payloads = std::move(payloads);
  op->dones.assign(spec_.size, true);
  op->done_count = spec_.size;
  op->registrations = std::max(op->registrations, registrations);
  check_evidence(op);
  return true;
}

// The life of an op.

std::uint64_t Core::submit(Ns now, OpSpec spec) {
  for (const auto* ops : {&running_, &waiting_}) {
    for (const OpPtr& op : *ops) {
      if (op->spec.tag == spec.tag) throw std::invalid_argument("an op with this tag is in flight");
    }
  }
  const auto known = tags_.find(spec.tag);
  if (called_tags_ >= max_tags && (known == tags_.end() || !known->second.called)) {
    throw std::invalid_argument("more than 4096 different tags in one epoch: use a tag again once its op is done");
  }
  std::uint32_t& calls = calls_[spec.tag];
  if (spec.again && calls == 0) throw std::invalid_argument("another attempt of a call that was never made");
  spec.step = step_;
  spec.call = spec.again ? calls - 1 : calls++;
  const std::uint64_t id = next_op_++;
  const auto op = std::make_shared<Op>(id, std::move(spec));
  op->started = now;
  op->deadline = now + op->spec.timeout;
  ops_.emplace(id, op);
  const auto refusal = refused_.find({op->spec.tag, op->spec.step, op->spec.call});
  if (over_) {
    finish(op, over_status_, over_reason_);
  } else if (refusal != refused_.end()) {
    op->epoch = refusal->second.epoch;
    finish(op, OpStatus::aborted, std::move(refusal->second.reason));
    refused_.erase(refusal);
  } else if (sealed_ || (known != tags_.end() && known->second.cancelled)) {
    waiting_.push_back(op);
  } else {
    try {
      start(now, op);
    } catch (...) {
      ops_.erase(id);
      calls -= !op->spec.again;
      throw;
    }
  }
  return id;
}

void Core::start(Ns now, const OpPtr& op) {
  if (spec_.size < 2) {
    op->result.contributors = spec_.members;
    finish(op, OpStatus::too_few, {});
    return;
  }
#ifdef RINGFOLD_PLANTED
  op->divide_by_size = planted_.divide_by_size;
#endif
  // Memory first: if there is none, the tag's sequence has not moved.
  op->start(spec_.rank, spec_.size, spec_.small_bytes, spec_.segment_bytes, spec_.multipath, pool_);
  TagState& tag = tag_state(op->spec.tag);
  called_tags_ += !std::exchange(tag.called, true);
  op->sequence = tag.next++;
  op->epoch = spec_.epoch;
  op->started = now;
  op->deadline = now + op->spec.timeout;
  now_ = now;
  tag.running = op;
  largest_segment_ = std::max(largest_segment_, op->plan().segment_bytes);
  if (running_.empty()) forgive_credits();
  running_.push_back(op);

  const bool whole_through_master = op->small && spec_.evidence_by_master;
  if (!whole_through_master) {
    if (Conn* next = lane_for_control(true)) lane_frame(*next, header_for(op, LaneFrame::open), raw(op->descriptor));
  }
  for (const bool from_next : {false, true}) {
    op->early_received[from_next] = std::exchange(tag.stashed_segments[from_next], 0);
    stashed_segments_[from_next] -= op->early_received[from_next];
    const std::size_t expected = from_next ? op->plan().bytes_from_next : op->plan().bytes_from_previous;
    if (op->small) continue;
    // Up to a segment it may all come early, unless much has come early already.
    if (expected > spec_.segment_bytes || 2 * early_received_[from_next] > early_limit()) send_ready(op, from_next);
  }
  if (op->small) op->payloads[spec_.rank] = op->own_payload();
  if (!op->small && op->is_absent(spec_.rank)) {
    send_absent(op, true, spec_.rank);
    if (spec_.size > 2) send_absent(op, false, spec_.rank);
  }
  if (op->small || op->local_part_finished()) local_part_done(op);
  mark_dirty_for(op);

  const std::vector<Stashed> stashed = std::exchange(tag.stash, {});
  tag.stash_bytes = 0;
  for (const bool from_next : {false, true}) {
    // Counted when they came, and again below, as what comes to an op that runs.
    early_received_[from_next] -= std::exchange(op->early_received[from_next], 0);
  }
  for (const Stashed& frame : stashed) {
    if (op->state == OpState::finished) return;
    std::string why;
    if (on_op_frame(op, frame.from_next, frame.header, frame.payload.data(), why)) continue;
    if (Conn* conn = lane_for_control(frame.from_next)) violation(now, *conn, std::move(why));
    return;
  }
}

void Core::send_ready(const OpPtr& op, bool to_next) {
  if (std::exchange(op->ready_sent[to_next], true)) return;
  early_received_[to_next] -= std::exchange(op->early_received[to_next], 0);
  if (Conn* conn = lane_for_control(to_next)) lane_frame(*conn, header_for(op, LaneFrame::ready), {});
}

// Early segments came. If they are many, the neighbour may be held back by them: it gets Ready for all ops that are
// called here.
void Core::on_early_bytes(bool from_next, std::size_t bytes) {
  early_received_[from_next] += bytes;
  if (2 * early_received_[from_next] <= early_limit()) return;
  for (const OpPtr& op : running_) {
    if (!op->small) send_ready(op, from_next);
  }
}

// A frame about an op came from a neighbour, so it has called the op. Between two peers both neighbours are one.
void Core::on_neighbour_called(const OpPtr& op, bool next) {
  for (const bool to_next : {false, true}) {
    if (op->peer_ready[to_next] || (to_next != next && spec_.size > 2)) continue;
    op->peer_ready[to_next] = true;
    release_early(op, to_next);
    mark_dirty_for(op);
  }
}

// What was sent early of an op counts no longer. Others that were held back by it may go on.
void Core::release_early(const OpPtr& op, bool to_next) {
  const std::size_t released = std::exchange(op->early_sent[to_next], 0);
  if (released == 0) return;
  const bool was_full = early_sent_[to_next] + frame_limit() > early_limit();
  early_sent_[to_next] -= released;
  if (!was_full) return;
  for (auto& [id, conn] : conns_) {
    if (conn.role == Role::lane && conn.outgoing == to_next) mark_dirty(conn);
  }
}

void Core::local_part_done(const OpPtr& op) {
  if (!op->small) op->state = OpState::done;
  const std::uint64_t out_bytes = op->eager_sent[true];
  if (out_bytes >= min_timed_bytes && op->absent_count() == 0) {
    const double seconds = static_cast<double>(std::max<Ns>(now_ - op->started, 1)) / 1e9;
    best_out_rate_ = std::max(best_out_rate_, static_cast<std::uint64_t>(static_cast<double>(out_bytes) / seconds));
  }
  op->dones[spec_.rank] = true;
  ++op->done_count;
  op->registrations = std::max(op->registrations, registrations_);
  if (spec_.evidence_by_master) {
    send_done_to_master(op);
  } else {
    send_done(op, true, spec_.rank, registrations_);
    if (spec_.size > 2) send_done(op, false, spec_.rank, registrations_);
  }
  check_evidence(op);
}

void Core::send_done_to_master(const OpPtr& op) {
  Conn* conn = find_conn(control_);
  if (conn == nullptr) return;
  Bytes body;
  body.reserve(sizeof(FrameHeader) + (op->small ? op->bytes : 0));
  put(body, spec_.epoch);
  put(body, op->spec.tag);
  put(body, op->sequence);
  put(body, spec_.rank);
  put(body, op->descriptor);
  put(body, registrations_);
  put(body, static_cast<std::uint8_t>(!op->small || op->payloads[spec_.rank].is_there()));
  if (op->small) {
    const Payload& payload = op->payloads[spec_.rank];
    body.insert(body.end(), payload.data(), payload.data() + payload.size());
    op->result.sent_bytes += payload.size();
  }
  control_frame(*conn, ControlFrame::done, body.data(), body.size());
}

void Core::send_done(const OpPtr& op, bool to_next, std::uint32_t origin, std::uint64_t registrations) {
  Conn* conn = lane_for_control(to_next);
  if (conn == nullptr) return;
  FrameHeader header = header_for(op, LaneFrame::done);
  header.origin = origin;
  header.registrations = registrations;
  Payload payload;
  if (op->small) payload = op->payloads[origin];
  header.contributors = !op->small || payload.is_there() ? 1 : 0;
  op->result.sent_bytes += payload.size();
  lane_frame(*conn, header, std::move(payload));
}

void Core::check_evidence(const OpPtr& op) {
  const std::uint32_t needed = planted_.commit_missing_done && !op->small ? spec_.size - 1 : spec_.size;
  if (op->done_count < needed) return;
  if (op->small ? op->payloads_fit() : op->state == OpState::done) commit(op);
}

void Core::commit(const OpPtr& op) {
  TagState& tag = tag_state(op->spec.tag);
  detach(op);
  if (op->small) op->fold();
  op->deliver();
  tag.has_committed = true;
  tag.committed = op->sequence;
  tag.committed_descriptor = op->descriptor;
  tag.committed_registrations = op->registrations;
  tag.committed_payloads.reset();
  if (op->small) tag.committed_payloads = std::move(op->payloads);
  for (std::uint32_t rank = 0; rank < spec_.size; ++rank) {
    if (!op->is_absent(rank)) op->result.contributors.push_back(spec_.members[rank]);
  }
  std::sort(op->result.contributors.begin(), op->result.contributors.end());
  finish(op, OpStatus::ok, {});
}

void Core::finish(const OpPtr& op, OpStatus status, Bytes reason) {
  op->state = OpState::finished;
  op->result.status = status;
  op->result.reason = std::move(reason);
  op->result.epoch = op->epoch;
  op->result.registrations = op->registrations;
  op->release_memory(pool_);
  for (const bool direction : {false, true}) {
    early_received_[direction] -= std::exchange(op->early_received[direction], 0);
    release_early(op, direction);
  }
  std::erase(running_, op);
  std::erase(waiting_, op);
  const auto tag = tags_.find(op->spec.tag);
  if (tag != tags_.end() && tag->second.running == op) tag->second.running = nullptr;
  ++(status == OpStatus::ok ? stats_.committed : stats_.aborted);
  ++finished_count_;
}

// The caller's memory is about to be changed or given back: lanes must not read from it any more. Frames that have not
// begun are dropped; the rest of one that has begun is copied, so that the lane stays in step.
void Core::detach(const OpPtr& op) {
  for (auto& [id, conn] : conns_) {
    for (auto frame = conn.tx.begin(); frame != conn.tx.end();) {
      if (frame->op != op) {
        ++frame;
      } else if (frame->sent == 0) {
        conn.tx_bytes -= frame->total;
        frame = conn.tx.erase(frame);
      } else {
        if (!frame->copied) copy_segment(*frame);
        frame->op = nullptr;
        ++frame;
      }
    }
    // What is done on all ranks, or starts again, need not be sent again.
    for (Flight& flight : conn.flights) {
      if (flight.op != op) continue;
      flight.op = nullptr;
      flight.item = {};  // it may hold an encoded segment
    }
  }
}

void Core::undo(const OpPtr& op) {
  detach(op);
  for (const bool direction : {false, true}) {
    early_received_[direction] -= std::exchange(op->early_received[direction], 0);
    op->early_sent[direction] = 0;  // but the neighbour keeps it until the epoch ends: it stays in `early_sent_`
  }
  if (!planted_.no_restore) op->restore();
}

OpPtr Core::find(std::uint64_t id) const {
  const auto it = ops_.find(id);
  return it == ops_.end() ? nullptr : it->second;
}

std::vector<std::uint64_t> Core::tags_in_flight() const {
  std::vector<std::uint64_t> out;
  for (const auto* ops : {&running_, &waiting_}) {
    for (const OpPtr& op : *ops) out.push_back(op->spec.tag);
  }
  std::sort(out.begin(), out.end());
  return out;
}

// Only an op whose Done has not been sent can be cancelled: no rank can have committed it.
bool Core::cancel(std::uint64_t id) {
  const OpPtr op = find(id);
  if (op == nullptr || op->state == OpState::finished) return true;
  if (op->state == OpState::done || (op->state == OpState::running && op->small)) return false;
  if (op->state == OpState::running) {
    undo(op);
    tag_state(op->spec.tag).cancelled = true;
    push_event({.kind = Event::Kind::op_cancelled, .epoch = op->epoch, .tag = op->spec.tag, .sequence = op->sequence});
  }
  uncount(op);  // the others wait for this call
  finish(op, OpStatus::cancelled, {});
  return true;
}

// The call counts as never made: the next one on its tag has its name.
void Core::uncount(const OpPtr& op) {
  std::uint32_t& calls = calls_[op->spec.tag];
  if (op->spec.step == step_ && calls == op->spec.call + 1) --calls;
}

void Core::release(std::uint64_t id) {
  const OpPtr op = find(id);
  if (op != nullptr && op->state == OpState::finished) ops_.erase(id);
}

}  // namespace ringfold
