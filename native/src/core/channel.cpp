#include "ringfold/channel.hpp"

#include <algorithm>
#include <cassert>

namespace ringfold {
namespace {

constexpr std::size_t first_read_bytes = 64 * 1024;
constexpr std::size_t queue_ahead_bytes = 64 * 1024;
constexpr std::size_t queue_ahead_frames = 16;
constexpr std::size_t max_pieces = 32;
constexpr std::size_t max_control = 4096;  // Open, Ready and the like, of one op
// Called by this peer and by both neighbours: each of them counts its own.
constexpr std::size_t max_known_tags = 3 * max_tags;
// A lane may carry frames of an epoch with larger segments than ours, up to its mark: those are drained.
constexpr std::size_t max_payload_ever = std::size_t{64} << 20;

bool intact(const FrameHeader& header, const std::byte* payload) {
  return crc32c(payload, header.length) == header.payload_crc;
}

LaneInfo info_of(const Lane& lane) {
  return {lane.id,
          lane.outgoing,
          lane.peer,
          lane.number,
          lane.sharing.shared,
          lane.sharing.paths,
          lane.sharing.channel,
          lane.in_memory};
}

}  // namespace

Channel::Channel(const EpochState& epoch, const ShareSources& advice, const Planted& planted)
    : epoch_(epoch), planted_(planted), context_{epoch, advice, planted, flush_, stats_} {}

// Lanes.

template <typename Visit>
void Channel::for_lanes(Visit visit) {
  for (const Place& place : lanes_) visit(*place.link, *place.lane);
}

Link* Channel::link(bool to_next) {
  const auto found = links_.find({epoch_.neighbour(to_next), to_next});
  return found == links_.end() ? nullptr : &found->second;
}

void Channel::add_lane(Ns now, Lane given) {
  Link& link = links_.try_emplace({given.peer, given.outgoing}, given.peer, given.outgoing, context_).first->second;
  Lane& lane = link.add(std::move(given));
  const auto after = std::find_if(lanes_.begin(), lanes_.end(), [&](const Place& place) { return place.id > lane.id; });
  lanes_.insert(after, {lane.id, &link, &lane});
  lane.held = false;
  lane.last_received = now;
  lane.meter.begin(now);
  if (!lane.tx.empty()) flush_.add(lane);
  shared_lanes_ += lane.sharing.shared;
  new_lanes_.push_back(info_of(lane));
  if (lane.sharing.epoch != 0 && lane.sharing.epoch == epoch_.number()) link.mark(lane);
  process(lane);
}

void Channel::forget_lane(ConnId id) {
  shared_lanes_ -= lane(id).sharing.shared;
  std::erase_if(lanes_, [id](const Place& place) { return place.id == id; });
  closing_.push_back(id);
}

// A lane that shares its link with others: its loss is reported as that of one connection. Otherwise the link is lost.
void Channel::lost(ConnId id, std::string reason, bool died) {
  Link& link = link_of(id);
  if (!lane(id).sharing.shared || link.lanes().size() < 2) {
    drop_link(link, std::move(reason), died);
    return;
  }
  ++stats_.lanes_lost;
  forget_lane(id);
  link.remove(id);
  report({.kind = Report::Kind::lane_lost, .conn = id, .text = std::move(reason)});
}

void Channel::close(ConnId id) {
  Link& link = link_of(id);
  forget_lane(id);
  link.remove(id);
  if (link.lanes().empty()) links_.erase({link.peer, link.outgoing});
}

void Channel::close_link(PeerId peer, bool outgoing) {
  const auto found = links_.find({peer, outgoing});
  if (found == links_.end()) return;
  for (const auto& [id, lane] : found->second.lanes()) forget_lane(id);
  links_.erase(found);
}

// All lanes of the link are closed, and the loss is reported once.
void Channel::drop_link(Link& link, std::string reason, bool died) {
  const PeerId peer = link.peer;
  const bool outgoing = link.outgoing;
  close_link(peer, outgoing);
  report(
      {.kind = Report::Kind::link_lost, .peer = peer, .outgoing = outgoing, .text = std::move(reason), .died = died});
}

void Channel::report(Report report, bool is_urgent) {
  reports_.push_back(std::move(report));
  has_urgent_report_ |= is_urgent;
}

void Channel::violation(Link& link, std::string reason) {  // another lane would bring the same
  ++stats_.lane_violations;
  drop_link(link, std::move(reason));
}

void Channel::violation(bool from_next, std::string reason) {
  if (Link* found = link(from_next)) violation(*found, std::move(reason));
}

std::vector<LaneInfo> Channel::lanes() const {
  std::vector<LaneInfo> out;
  for (const Place& place : lanes_) out.push_back(info_of(*place.lane));
  return out;
}

std::vector<ConnId> Channel::take_dirty() {
  std::vector<ConnId> ids = flush_.take();
  for (const ConnId id : ids) {
    if (has(id)) lane(id).dirty = false;
  }
  return ids;
}

// Reading: the buffer holds at most one incomplete frame. Once its header is known, exactly its rest and the next
// header are read, so that a stream of large segments is never moved in memory.
std::span<std::byte> Channel::receive_space(ConnId id) {
  Lane& from = lane(id);
  if (from.held) return {};
  std::size_t want = first_read_bytes;
  FrameHeader header;
  if (const std::size_t have = from.rx.size(); have >= sizeof header) {
    std::memcpy(&header, from.rx.data(), sizeof header);
    want = sizeof header + header.length - have + sizeof header;
    // Larger than any frame of this epoch: it will only be drained, and takes as much memory as has come, not as it
    // announces.
    if (header.length > epoch_.frame_limit()) want = std::min(want, first_read_bytes);
  }
  return from.rx.space(want);
}

void Channel::received(Ns now, ConnId id, std::size_t bytes) {
  Lane& from = lane(id);
  from.rx.filled(bytes);
  from.last_received = now;
  stats_.received_bytes += bytes;
  process(from);
}

std::size_t Channel::take(Ns now, ConnId id, std::span<const std::byte> bytes, std::size_t longest) {
  Lane& from = lane(id);
  from.last_received = now;
  std::string why;
  std::size_t used = 0;
  while (!from.held && why.empty() && used < bytes.size()) {
    const auto rest = bytes.subspan(used);
    FrameHeader header;
    const bool begun = from.rx.size() > 0;
    if (!begun && rest.size() >= sizeof header) std::memcpy(&header, rest.data(), sizeof header);
    if (!begun && (rest.size() < sizeof header || sizeof header + header.length <= longest)) {
      const std::size_t frame = process_frame(from, rest, why);
      if (frame == 0) break;
      used += frame;
      continue;
    }
    const auto space = receive_space(id);
    const std::size_t part = std::min(space.size(), rest.size());
    std::memcpy(space.data(), rest.data(), part);
    from.rx.filled(part);
    used += part;
    while (!from.held) {
      const std::size_t frame = process_frame(from, from.rx.bytes(), why);
      if (frame == 0) break;
      from.rx.consume(frame);
    }
  }
  stats_.received_bytes += used;
  if (!why.empty()) violation(link_of(id), std::move(why));
  return used;
}

void Channel::set_in_memory(ConnId id) { lane(id).in_memory = true; }

void Channel::process(Lane& from) {
  std::string why;
  while (!from.held) {
    const std::size_t frame = process_frame(from, from.rx.bytes(), why);
    if (frame == 0) break;
    from.rx.consume(frame);
  }
  if (!why.empty()) violation(link_of(from.id), std::move(why));
}

// The bytes of the frame. 0: it is not whole, or, with a reason, the neighbour breaks the protocol.
std::size_t Channel::process_frame(Lane& from, std::span<const std::byte> bytes, std::string& why) {
  FrameHeader header;
  if (bytes.size() < sizeof header) return 0;
  std::memcpy(&header, bytes.data(), sizeof header);
  if (header.magic != lane_magic || header.version != lane_version || header.header_crc != header.crc()) {
    why = "not a lane frame (magic, version or header checksum)";
    return 0;
  }
  if (header.length > (header.epoch == epoch_.number() ? epoch_.frame_limit() : max_payload_ever)) {
    why = "a lane frame of " + std::to_string(header.length) + " bytes";
    return 0;
  }
  const std::size_t frame_bytes = sizeof header + header.length;
  if (bytes.size() < frame_bytes) return 0;
  const std::byte* payload = bytes.data() + sizeof header;
  if (header.kind == LaneFrame::applied) {
    if (from.sharing.shared && from.flights.applied(header.offset)) return frame_bytes;
    why = "it has applied " + std::to_string(header.offset) + " frames, but " + std::to_string(from.flights.sent()) +
          " were sent";
    return 0;
  }
  if (!on_frame(from, header, payload, why)) return 0;
  if (from.sharing.shared && from.flights.came(header.length)) {
    FrameHeader report;
    report.kind = LaneFrame::applied;
    report.epoch = from.mark_sent;
    report.offset = from.flights.report();
    from.queue_control(report, {});
    flush_.add(from);
  }
  return frame_bytes;
}

// Frames. Each returns false with a reason when the neighbour breaks the protocol.

bool Channel::on_mark(Lane& from, std::uint32_t epoch, std::string& why) {
  if (epoch <= from.mark_seen) {
    why = "the mark of epoch " + std::to_string(epoch) + " after that of " + std::to_string(from.mark_seen);
    return false;
  }
  from.mark_seen = epoch;
  from.held = epoch > epoch_.number();
  return true;
}

bool Channel::on_frame(Lane& from, const FrameHeader& header, const std::byte* payload, std::string& why) {
  if (header.kind == LaneFrame::mark) return on_mark(from, header.epoch, why);
  if (header.epoch != from.mark_seen) {
    why = "a frame of epoch " + std::to_string(header.epoch) + " after the mark of " + std::to_string(from.mark_seen);
    return false;
  }
  if ((header.epoch != epoch_.number() || epoch_.is_sealed()) && !planted_.accept_old_epoch) {
    ++stats_.drained;
    return true;
  }
  const bool known =
      (header.kind >= LaneFrame::mark && header.kind <= LaneFrame::ready) || header.kind == LaneFrame::absent;
  if (!known || (header.kind == LaneFrame::open && from.outgoing)) {
    why = "frame kind " + std::to_string(static_cast<int>(header.kind)) + " has no place here";
    return false;
  }
  if (tags_.size() >= max_known_tags && !tags_.contains(header.tag)) {
    why = "more than " + std::to_string(max_known_tags) + " tags";
    return false;
  }
  TagState& tag = tag_state(header.tag);
  const bool confused = planted_.apply_finished && tag.running && is_before(header.sequence, tag.running->op.sequence);
  const bool is_for_running = tag.running && (header.sequence == tag.running->op.sequence || confused);
  if (!is_for_running && is_before(header.sequence, tag.next)) {
    ++stats_.drained;
    return true;
  }
  if (!from.in_memory && !intact(header, payload)) {
    why = header.kind == LaneFrame::data ? "a segment with a wrong checksum" : "a frame with a wrong checksum";
    return false;
  }
  if (!is_for_running) return stash(tag, from, header, payload, why);
  return on_part_frame(tag.running, {from.outgoing, from.in_memory}, header, payload, why);
}

// A frame of an op that is not called here yet.
bool Channel::stash(TagState& tag, const Lane& from, const FrameHeader& header, const std::byte* payload,
                    std::string& why) {
  const bool from_next = from.outgoing;
  const auto same = [&](const Stashed& other) {
    return other.from_next == from_next && other.header.kind == header.kind && other.header.stage == header.stage &&
           other.header.offset == header.offset && other.header.origin == header.origin;
  };
  if (from.sharing.shared && std::any_of(tag.stash.begin(), tag.stash.end(), same)) {
    ++stats_.duplicates;  // it came again over another lane
    return true;
  }
  // Of each op: a segment from both sides, the payloads of a small one, and Open, Ready and Dones without a payload. Of
  // all ops together: segments up to the limit that the sender knows, too. The payloads of small ops are limited by
  // their tags.
  const bool is_segment = header.kind == LaneFrame::data;
  const std::size_t early = is_segment ? header.length : 0;
  const std::size_t of_tag =
      2 * epoch_.frame_limit() + epoch_.size() * (epoch_.spec().small_bytes + sizeof header) + max_control;
  const bool is_too_much = tag.stash_bytes + header.length + sizeof header > of_tag ||
                           stashed_segments_[from_next] + early > epoch_.early_limit() ||
                           (!is_segment && header.length > sizeof(Descriptor) &&
                            std::size_t{header.length} * epoch_.size() > max_payload_bytes(header.tag));
  if (header.sequence != tag.next || is_too_much) {
    why = "op " + std::to_string(header.sequence) + " of tag " + std::to_string(header.tag) + " is too far ahead";
    return false;
  }
  tag.stash.push_back({from_next, from.in_memory, header, Bytes(payload, payload + header.length)});
  tag.stash_bytes += header.length + sizeof header;
  tag.stashed_segments[from_next] += early;
  stashed_segments_[from_next] += early;
  on_early_bytes(from_next, early);
  return true;
}

bool Channel::on_part_frame(const PartPtr& part, Source from, const FrameHeader& header, const std::byte* payload,
                            std::string& why) {
  on_neighbour_called(*part, from.next);
  if (header.kind == LaneFrame::ready) return true;
  if (header.kind == LaneFrame::data) return on_data(part, from, header, payload, why);
  const bool is_news = header.kind != LaneFrame::open || header.fingerprint != part->op.fingerprint;
  if (!is_news && header.length == sizeof(Descriptor)) return true;
  report({.kind = Report::Kind::op_frame,
          .part = part,
          .from_next = from.next,
          .header = header,
          .payload = Bytes(payload, payload + header.length)});
  return true;
}

bool Channel::on_data(const PartPtr& part, Source from, const FrameHeader& header, const std::byte* payload,
                      std::string& why) {
  const Op& op = part->op;
  const bool from_next = from.next;
  if (header.fingerprint != op.fingerprint) return true;  // its descriptor shows that, and the op ends by a verdict
  if (op.small) {
    why = "a segment for an op that travels inside Done";
    return false;
  }
  const bool was_finished = part->is_finished();
  const auto crc = from.in_memory ? std::nullopt : std::optional(header.payload_crc);
  switch (part->apply(from_next, header.stage, header.offset, payload, header.length, crc, header.contributors,
                      planted_.apply_duplicate)) {
    case OpPart::Applied::invalid:
      why = "a segment that is in nobody's plan";
      return false;
    case OpPart::Applied::duplicate:
      ++stats_.duplicates;
      return true;
    case OpPart::Applied::yes:
      break;
  }
  part->received_bytes += header.length;
  if (!part->ready_sent[from_next]) {
    part->early_received[from_next] += header.length;
    on_early_bytes(from_next, header.length);
  }
  flush_for(*part);
  if (!was_finished && part->is_finished()) {
    report({.kind = Report::Kind::part_finished, .part = part, .from_next = from_next},
           op.parts_to_finish.fetch_sub(1) == 1);
  }
  return true;
}

// Parts.

void Channel::begin(const PartPtr& part) {
  const Op& op = part->op;
  TagState& tag = tag_state(op.spec.tag);
  tag.next = op.sequence + 1;
  tag.running = part;
  largest_segment_ = std::max(largest_segment_, part->plan().segment_bytes);
  if (running_.empty()) {
    for (auto& [key, link] : links_) link.forgive_credits(largest_segment_);
  }
  running_.push_back(part);
  part->checksums =
      std::any_of(lanes_.begin(), lanes_.end(), [](const Place& place) { return !place.lane->in_memory; });
  for (const bool from_next : {false, true}) {
    part->early_received[from_next] = std::exchange(tag.stashed_segments[from_next], 0);
    stashed_segments_[from_next] -= part->early_received[from_next];
    const std::size_t expected = from_next ? part->plan().bytes_from_next : part->plan().bytes_from_previous;
    if (op.small) continue;
    // Up to a segment it may all come early, unless much has come early already.
    if (expected > epoch_.spec().segment_bytes || 2 * early_received_[from_next] > epoch_.early_limit()) {
      send_ready(*part, from_next);
    }
  }
}

void Channel::replay(const PartPtr& part) {
  TagState& tag = tag_state(part->op.spec.tag);
  if (tag.running != part) return;
  flush_for(*part);
  const std::vector<Stashed> stashed = std::exchange(tag.stash, {});
  tag.stash_bytes = 0;
  for (const bool from_next : {false, true}) {
    // Counted when they came, and again below, as what comes to an op that runs.
    early_received_[from_next] -= std::exchange(part->early_received[from_next], 0);
  }
  for (const Stashed& frame : stashed) {
    std::string why;
    if (on_part_frame(part, {frame.from_next, frame.in_memory}, frame.header, frame.payload.data(), why)) continue;
    violation(frame.from_next, std::move(why));
    return;
  }
}

void Channel::pass(const Op& op) {
  TagState& tag = tag_state(op.spec.tag);
  tag.next = op.sequence + 1;
  const std::vector<Stashed> stashed = std::exchange(tag.stash, {});
  tag.stash_bytes = 0;
  for (const bool direction : {false, true}) {
    const std::size_t early = std::exchange(tag.stashed_segments[direction], 0);
    stashed_segments_[direction] -= early;
    early_received_[direction] -= early;
  }
  for (const Stashed& frame : stashed) {
    if (frame.header.fingerprint != op.fingerprint)
      continue;  // its descriptor shows that, and the op ends by a verdict
    violation(frame.from_next, "a frame of an op that this channel has no part of");
    return;
  }
}

void Channel::end(const PartPtr& part, bool committed) {
  for_lanes([&](Link&, Lane& each) { each.detach(*part); });
  for (const bool direction : {false, true}) {
    early_received_[direction] -= std::exchange(part->early_received[direction], 0);
    // Of an op that starts again the neighbour keeps it until the epoch ends: it stays in `early_sent_`.
    if (committed) release_early(*part, direction);
    else part->early_sent[direction] = 0;
  }
  std::erase(running_, part);
  const auto tag = tags_.find(part->op.spec.tag);
  if (tag != tags_.end() && tag->second.running == part) tag->second.running = nullptr;
}

void Channel::send(bool to_next, const FrameHeader& header, Payload payload) {
  if (Link* found = link(to_next)) found->send(header, std::move(payload));
}

// Early segments.

void Channel::send_ready(OpPart& part, bool to_next) {
  if (std::exchange(part.ready_sent[to_next], true)) return;
  early_received_[to_next] -= std::exchange(part.early_received[to_next], 0);
  send(to_next, part.op.header(LaneFrame::ready), {});
}

// Early segments came. If they are many, the neighbour may be held back by them: it gets Ready for all ops that are
// called here.
void Channel::on_early_bytes(bool from_next, std::size_t bytes) {
  early_received_[from_next] += bytes;
  if (2 * early_received_[from_next] <= epoch_.early_limit()) return;
  for (const PartPtr& part : running_) {
    if (!part->op.small) send_ready(*part, from_next);
  }
}

// A frame about an op came from a neighbour, so it has called the op. Between two peers both neighbours are one.
void Channel::on_neighbour_called(OpPart& part, bool next) {
  for (const bool to_next : {false, true}) {
    if (part.peer_ready[to_next] || (to_next != next && epoch_.size() > 2)) continue;
    part.peer_ready[to_next] = true;
    release_early(part, to_next);
    flush_for(part);
  }
}

// What was sent early of an op counts no longer. Others that were held back by it may go on.
void Channel::release_early(OpPart& part, bool to_next) {
  const std::size_t released = std::exchange(part.early_sent[to_next], 0);
  if (released == 0) return;
  const bool was_full = early_sent_[to_next] + epoch_.frame_limit() > epoch_.early_limit();
  early_sent_[to_next] -= released;
  if (!was_full) return;
  for_lanes([&](const Link& link, Lane& each) {
    if (link.outgoing == to_next) flush_.add(each);
  });
}

// Sending: frames that have begun, then control, then segments pulled from the oldest op that may send.

PartPtr Channel::next_part_to_send(bool to_next) const {
  if (epoch_.is_sealed()) return nullptr;
  for (const PartPtr& part : running_) {
    if (!part->has_sendable(to_next)) continue;
    const std::size_t sent = part->eager_sent[to_next];
    const Sendable& next = part->next_sendable(to_next);
    if (part->peer_ready[to_next] || next.again) return part;
    const bool is_eager = sent == 0 || sent + next.length <= epoch_.spec().segment_bytes;
    const bool is_kept =
        early_sent_[to_next] + next.travelling_bytes() <= epoch_.early_limit() || planted_.early_unlimited;
    if (is_eager && is_kept) return part;
  }
  return nullptr;
}

void Channel::flush_for(const OpPart& part) {
  for_lanes([&](const Link& link, Lane& each) {
    if (part.has_sendable(link.outgoing)) flush_.add(each);
  });
}

OutFrame Channel::segment_frame(const Lane& to, const PartPtr& part, Sendable item) {
  OutFrame frame;
  frame.part = part;
  frame.item = std::move(item);
  frame.header = part->op.header(LaneFrame::data);
  frame.header.stage = frame.item.stage;
  frame.header.offset = frame.item.offset;
  frame.header.length = frame.item.travelling_bytes();
  frame.header.contributors = frame.item.contributors;
  if (!to.in_memory) frame.header.payload_crc = frame.item.crc_known ? frame.item.crc : part->crc_of(frame.item);
  frame.header.header_crc = frame.header.crc();
  frame.has_header = true;
  frame.total = sizeof(FrameHeader) + frame.header.length;
  // What goes again is copied: the first one may have arrived, and its memory may be overwritten at any time. And a
  // segment of very many arrays is copied once, instead of being gathered for each write.
  bool is_copied = frame.item.again;
  if (!is_copied && part->op.spec.spans.size() > max_pieces) {
    std::vector<Piece> pieces;
    part->pieces(frame.item, pieces);
    is_copied = pieces.size() > max_pieces;
  }
  if (is_copied) frame.copy_segment();
  return frame;
}

void Channel::pull(Link& link, Lane& to) {
  const bool to_next = link.outgoing;
  // Among several lanes nothing is decided earlier than it must be.
  const std::size_t max_frames = to.sharing.shared ? 1 : queue_ahead_frames;
  while (to.tx.bytes() < queue_ahead_bytes && to.tx.size() < max_frames) {
    const PartPtr part = next_part_to_send(to_next);
    if (part == nullptr && link.reissue(to)) continue;
    if (part == nullptr) return;
    if (!link.may_take(to, *part) && link.leave_to_others(to, *part)) return;
    Sendable item = part->take_sendable(to_next);
    if (item.again && part->superseded(item)) continue;
    if (planted_.apply_duplicate && !item.again && item.offset % 3 == 1) part->resend(to_next, item);
    const std::uint32_t length = item.travelling_bytes();
    if (!item.again) part->eager_sent[to_next] += item.length;
    if (!item.again && !part->peer_ready[to_next]) {
      part->early_sent[to_next] += length;
      early_sent_[to_next] += length;
    }
    link.count_assigned(to, *part, length);
    part->sent_bytes += length;
    to.tx.push(segment_frame(to, part, std::move(item)));
  }
}

std::size_t Channel::gather(ConnId id, iovec* out, std::size_t most) {
  const Place* place = find(id);
  if (place == nullptr) return 0;  // what was sent last may have ended it
  Lane& to = *place->lane;
  if (to.mark_sent == epoch_.number()) pull(*place->link, to);
  return to.tx.gather(out, most);
}

void Channel::sent(Ns now, ConnId id, std::size_t bytes) {
  Lane& to = lane(id);
  stats_.sent_bytes += bytes;
  to.meter.sent(now, bytes);
  to.tx.sent(bytes, [&](OutFrame& frame, std::size_t left) {
    if (to.sharing.shared && frame.has_header) to.flights.note_sent(frame, to.meter.sent_total() - left);
  });
  if (to.sharing.shared && to.flights.are_too_many(to.meter.sent_total())) {
    violation(link_of(id), "it takes frames, but reports none of them");
  }
}

void Channel::acknowledged(Ns now, ConnId id, std::uint64_t unacknowledged, Ns rtt, Ns min_rtt) {
  Lane& of = lane(id);
  of.meter.acknowledged(now, unacknowledged, rtt, min_rtt, !of.tx.empty(), of.sharing.shared);
  // An idle lane checks again whether to take over from this one.
  if (of.sharing.shared && unacknowledged > 0) link_of(id).flush_idle_but(of);
}

// Epochs.

// Early segments belong to the epoch: after it they are counted no more.
void Channel::forget_tags() {
  tags_.clear();
  for (const bool direction : {false, true}) {
    early_sent_[direction] = early_received_[direction] = stashed_segments_[direction] = 0;
  }
}

void Channel::install(Ns now) {
  assert(running_.empty());
  largest_segment_ = 0;
  forget_tags();
  for (auto& [key, link] : links_) link.install(now);
}

void Channel::resume() {
  std::vector<ConnId> held;
  for_lanes([&](const Link&, const Lane& each) {
    if (each.held && each.mark_seen <= epoch_.number()) held.push_back(each.id);
  });
  for (const ConnId id : held) {
    if (!has(id)) continue;  // its link was dropped for what another lane brought
    lane(id).held = false;
    process(lane(id));
  }
}

// Time.

void Channel::shift(Ns gap) {
  for_lanes([&](const Link&, Lane& each) {
    each.last_received += gap;
    each.meter.shift(gap);
  });
}

// A link moves while one of its lanes does, or has nothing to do.
Ns Channel::stalled(Ns now, bool outgoing, Ns oldest) const {
  bool any = false;
  Ns least = 0;
  for (const auto& [key, link] : links_) {
    if (link.outgoing != outgoing) continue;
    for (const auto& [id, each] : link.lanes()) {
      const bool waits = each.meter.unacknowledged() > 0 || !each.tx.empty();
      const Ns since = waits ? now - std::max(oldest, each.meter.last_acknowledged()) : 0;
      least = any ? std::min(least, since) : since;
      any = true;
    }
  }
  return std::max<Ns>(least, 0);
}

Ns Channel::last_received() const {
  Ns last = 0;
  for (const auto& [key, link] : links_) {
    if (link.outgoing) continue;
    for (const auto& [id, each] : link.lanes()) last = std::max(last, each.last_received);
  }
  return last;
}

// Dones come on channel 0.
bool Channel::is_waiting() const {
  return std::any_of(running_.begin(), running_.end(),
                     [](const PartPtr& part) { return !part->is_finished() || part->channel == 0; });
}

// Paths.

bool Channel::shared_in_flight() const {
  if (shared_lanes_ == 0) return false;
  return std::any_of(links_.begin(), links_.end(), [](const auto& each) {
    const auto& lanes = each.second.lanes();
    return std::any_of(lanes.begin(), lanes.end(),
                       [](const auto& one) { return one.second.sharing.shared && one.second.meter.in_flight() > 0; });
  });
}

void Channel::advice_changed() {
  for_lanes([&](const Link&, Lane& each) {
    if (each.sharing.paths > 1 && each.tx.empty()) flush_.add(each);
  });
}

void Channel::advice_changed(PeerId peer) {
  for_lanes([&](const Link& link, Lane& each) {
    if (link.peer == peer) flush_.add(each);
  });
}

std::array<std::uint64_t, max_paths> Channel::path_rates(Ns now, PeerId peer) const {
  std::array<std::uint64_t, max_paths> rates{};
  const auto found = links_.find({peer, true});
  if (found == links_.end()) return rates;
  for (const auto& [id, each] : found->second.lanes()) rates[each.sharing.path] += each.meter.recent_rate(now);
  return rates;
}

// Of several lanes: the mean of their smoothed RTTs, and the minimum of their minima.
std::array<Rtt, max_paths> Channel::path_rtts(Ns now, PeerId peer) const {
  std::array<Rtt, max_paths> rtts{};
  std::array<Ns, max_paths> counted{};
  for (const bool outgoing : {false, true}) {
    const auto found = links_.find({peer, outgoing});
    if (found == links_.end()) continue;
    for (const auto& [id, each] : found->second.lanes()) {
      const Rtt its = each.meter.recent_rtt(now);
      if (!each.sharing.shared || its.smoothed == 0) continue;
      Rtt& rtt = rtts[each.sharing.path];
      rtt.smoothed += its.smoothed;
      ++counted[each.sharing.path];
      if (its.min > 0 && (rtt.min == 0 || its.min < rtt.min)) rtt.min = its.min;
    }
  }
  for (std::size_t path = 0; path < max_paths; ++path) {
    if (counted[path] > 0) rtts[path].smoothed /= counted[path];
  }
  return rtts;
}

std::array<std::uint64_t, max_paths> Channel::path_bytes(bool to_next) const {
  if (epoch_.size() == 0) return {};
  const auto found = links_.find({epoch_.neighbour(to_next), to_next});
  return found == links_.end() ? std::array<std::uint64_t, max_paths>{} : found->second.path_bytes();
}

}  // namespace ringfold
