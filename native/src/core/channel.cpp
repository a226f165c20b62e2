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
          lane.in_memory,
          lane.sharing.direct};
}

}  // namespace

Channel::Channel(std::uint32_t number, const EpochState& epoch, const ShareSources& advice, const Planted& planted)
    : number_(number), epoch_(epoch), planted_(planted), context_{epoch, advice, planted, flush_, stats_} {}

// Lanes.

template <typename Visit>
void Channel::for_lanes(Visit visit) {
  for (const Place& place : lanes_) visit(*place.link, *place.lane);
}

Link* Channel::link(Side side) {
  if (side >= epoch_.sides()) return nullptr;
  const auto found = links_.find({epoch_.peer_at(side), side == next_side, side >= first_direct_side});
  return found == links_.end() ? nullptr : &found->second;
}

void Channel::add_lane(Ns now, Lane given) {
  const Link::Key key{given.peer, given.outgoing && !given.sharing.direct, given.sharing.direct};
  Link& link = links_.try_emplace(key, key, context_).first->second;
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
  look_at_mesh();
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
  if (link.lanes().empty()) links_.erase(Link::Key(link.key));
  look_at_mesh();
}

void Channel::close_link(const Link::Key& key) {
  const auto found = links_.find(key);
  if (found == links_.end()) return;
  for (const auto& [id, lane] : found->second.lanes()) forget_lane(id);
  links_.erase(found);
  look_at_mesh();
}

void Channel::look_at_mesh() {
  bool meshed = epoch_.sides() > first_direct_side;
  for (Side side = first_direct_side; side < epoch_.sides() && meshed; ++side) {
    const Link* found = link(side);
    meshed = found != nullptr && found->is_marked();
  }
  meshed_.store(meshed);
}

// All lanes of the link are closed, and the loss is reported once.
void Channel::drop_link(Link& link, std::string reason, bool died) {
  const Link::Key key = link.key;
  close_link(key);
  report({.kind = Report::Kind::link_lost, .link = key, .text = std::move(reason), .died = died});
}

// What is about an op comes to the op table, which commands channels instead of touching them. Frames about an op as a
// whole come on channel 0, unless a neighbour errs.
void Channel::report(Report report) {
  has_wide_report_ |= report.part == nullptr || (report.kind == Report::Kind::op_frame && number_ != 0);
  reports_.push_back(std::move(report));
}

void Channel::violation(Link& link, std::string reason) {  // another lane would bring the same
  ++stats_.lane_violations;
  drop_link(link, std::move(reason));
}

void Channel::violation(Side from, std::string reason) {
  if (Link* found = link(from)) violation(*found, std::move(reason));
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
  if (from.rx.size() == 0) from.frame_since = now;
  from.rx.filled(bytes);
  now_ = from.last_received = now;
  stats_.received_bytes += bytes;
  process(from);
}

std::size_t Channel::take(Ns now, ConnId id, std::span<const std::byte> bytes, std::size_t longest) {
  Lane& from = lane(id);
  now_ = from.last_received = now;
  std::string why;
  std::size_t used = 0;
  while (!from.held && why.empty() && used < bytes.size()) {
    const auto rest = bytes.subspan(used);
    FrameHeader header;
    const bool begun = from.rx.size() > 0;
    if (!begun && rest.size() >= sizeof header) std::memcpy(&header, rest.data(), sizeof header);
    if (!begun && (rest.size() < sizeof header || sizeof header + header.length <= longest)) {
      from.frame_since = now;
      const std::size_t frame = process_frame(from, rest, why);
      if (frame == 0) break;
      used += frame;
      continue;
    }
    const auto space = receive_space(id);
    const std::size_t part = std::min(space.size(), rest.size());
    std::memcpy(space.data(), rest.data(), part);
    if (!begun) from.frame_since = now;
    from.rx.filled(part);
    used += part;
    process_read(from, why);
  }
  stats_.received_bytes += used;
  if (!why.empty()) violation(link_of(id), std::move(why));
  return used;
}

bool Channel::expects(ConnId id) const {
  const Lane& of = lane(id);
  if (!of.sharing.direct) return !of.outgoing || epoch_.size() > 2;
  return std::any_of(running_.begin(), running_.end(), [](const PartPtr& part) {
    return part->sides.size() > first_direct_side || (part->channel == 0 && part->is_finished());
  });
}

void Channel::set_in_memory(ConnId id) { lane(id).in_memory = true; }

void Channel::process(Lane& from) {
  std::string why;
  process_read(from, why);
  if (!why.empty()) violation(link_of(from.id), std::move(why));
}

// All frames that have been read.
void Channel::process_read(Lane& from, std::string& why) {
  while (!from.held) {
    const std::size_t frame = process_frame(from, from.rx.bytes(), why);
    if (frame == 0) break;
    from.rx.consume(frame);
    from.frame_since = now_;
  }
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
  const Side side = epoch_.side_of(from.peer, from.outgoing, from.sharing.direct);
  const bool is_data = header.kind == LaneFrame::data || header.kind == LaneFrame::ready;
  const bool known =
      (header.kind >= LaneFrame::mark && header.kind <= LaneFrame::ready) || header.kind == LaneFrame::absent;
  const bool is_for_ring = !is_data && header.kind != LaneFrame::done;
  if (!known || side == no_side || (is_for_ring && from.sharing.direct) ||
      (header.kind == LaneFrame::open && from.outgoing)) {
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
  if (!is_for_running) return stash(tag, from, side, header, payload, why);
  const Source source{side, from.in_memory, from.peer, now_ - from.frame_since};
  return on_part_frame(tag.running, source, header, payload, why);
}

// A frame of an op that is not called here yet.
bool Channel::stash(TagState& tag, const Lane& from, Side side, const FrameHeader& header, const std::byte* payload,
                    std::string& why) {
  const auto same = [&](const Stashed& other) {
    return other.from == side && other.header.kind == header.kind && other.header.stage == header.stage &&
           other.header.offset == header.offset && other.header.origin == header.origin;
  };
  if (from.sharing.shared && std::any_of(tag.stash.begin(), tag.stash.end(), same)) {
    ++stats_.duplicates;  // it came again over another lane
    return true;
  }
  // Of each op: a segment from all sides, the payloads of a small one, and Open, Ready and Dones without a payload. Of
  // all ops together: segments up to the limit that the sender knows, too. The payloads of small ops are limited by
  // their tags.
  const bool is_segment = header.kind == LaneFrame::data;
  const std::size_t early = is_segment ? header.length : 0;
  const std::size_t of_tag =
      epoch_.sides() * epoch_.frame_limit() + epoch_.size() * (epoch_.spec().small_bytes + sizeof header) + max_control;
  const bool is_too_much = tag.stash_bytes + header.length + sizeof header > of_tag ||
                           early_[side].stashed + early > epoch_.early_limit() ||
                           (!is_segment && header.length > sizeof(Descriptor) &&
                            std::size_t{header.length} * epoch_.size() > max_payload_bytes(header.tag));
  // Other channels than 0 do not know of ops that they have no part of.
  if ((header.sequence != tag.next && number_ == 0) || is_too_much) {
    why = "op " + std::to_string(header.sequence) + " of tag " + std::to_string(header.tag) + " is too far ahead";
    return false;
  }
  tag.stash.push_back({side, from.in_memory, header, Bytes(payload, payload + header.length)});
  tag.stash_bytes += header.length + sizeof header;
  early_[side].stashed += early;
  on_early_bytes(side, early);
  return true;
}

// Where an op has nothing to move here, the neighbour may have ended it before this, and called the next one of its
// tag. What came of that one stays.
std::vector<Channel::Stashed> Channel::take_stash(TagState& tag, std::uint32_t sequence) {
  const auto later = std::stable_partition(tag.stash.begin(), tag.stash.end(), [sequence](const Stashed& frame) {
    return !is_before(sequence, frame.header.sequence);
  });
  std::vector<Stashed> stashed(std::make_move_iterator(tag.stash.begin()), std::make_move_iterator(later));
  tag.stash.erase(tag.stash.begin(), later);
  for (const Stashed& frame : stashed) {
    tag.stash_bytes -= frame.header.length + sizeof frame.header;
    if (frame.header.kind != LaneFrame::data) continue;
    early_[frame.from].stashed -= frame.header.length;
    early_[frame.from].received -= frame.header.length;
  }
  std::erase_if(stashed, [sequence](const Stashed& frame) { return is_before(frame.header.sequence, sequence); });
  return stashed;
}

bool Channel::on_part_frame(const PartPtr& part, Source from, const FrameHeader& header, const std::byte* payload,
                            std::string& why) {
  if (header.sequence != part->op.sequence && !planted_.apply_finished) {
    why = "op " + std::to_string(header.sequence) + " of tag " + std::to_string(header.tag) + " is too far ahead";
    return false;
  }
  on_neighbour_called(*part, from.side);
  if (header.kind == LaneFrame::ready) return true;
  if (header.kind == LaneFrame::data) return on_data(part, from, header, payload, why);
  const bool is_news = header.kind != LaneFrame::open || header.fingerprint != part->op.fingerprint;
  if (!is_news && header.length == sizeof(Descriptor)) return true;
  report({.kind = Report::Kind::op_frame,
          .part = part,
          .from = from.side,
          .header = header,
          .payload = Bytes(payload, payload + header.length)});
  return true;
}

bool Channel::on_data(const PartPtr& part, Source from, const FrameHeader& header, const std::byte* payload,
                      std::string& why) {
  const Op& op = part->op;
  if (header.fingerprint != op.fingerprint) return true;  // its descriptor shows that, and the op ends by a verdict
  if (op.small) {
    why = "a segment for an op that travels inside Done";
    return false;
  }
  const bool was_finished = part->is_finished();
  const auto crc = from.in_memory ? std::nullopt : std::optional(header.payload_crc);
  switch (part->apply(from.side, header.stage, header.offset, payload, header.length, crc, header.contributors,
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
  part->times.in_last = now_;
  if (part->times.in_first == 0) part->times.in_first = now_;
  // What came before the op was called here waited for this peer.
  Ns& arriving = part->sides[from.side].arriving;
  arriving += std::max<Ns>(0, std::min(from.took, now_ - op.started));
  if (arriving > part->times.arriving) {
    part->times.arriving = arriving;
    part->times.arriving_from = from.peer;
  }
  if (OpPart::SideState& side = part->sides[from.side]; !side.ready_sent) {
    side.early_received += header.length;
    on_early_bytes(from.side, header.length);
  }
  flush_for(*part);
  if (!was_finished && part->is_finished()) finished(part, from.side);
  return true;
}

// Parts.

void Channel::execute(const ChannelCommand& command) {
  switch (command.kind) {
    case ChannelCommand::Kind::begin:
      begin(command.now, command.part);
      replay(command.part);
      break;
    case ChannelCommand::Kind::end:
      end(command.part, true);
      break;
    case ChannelCommand::Kind::violation:
      violation(command.from, command.text);
      break;
  }
}

void Channel::finished(const PartPtr& part, Side from) {
  const bool is_last = part->op.parts_to_finish.fetch_sub(1) == 1;
  if (is_last || planted_.done_with_one_part)
    report({.kind = Report::Kind::parts_finished, .part = part, .from = from});
}

void Channel::begin(Ns now, const PartPtr& part) {
  now_ = now;
  const Op& op = part->op;
  TagState& tag = tag_state(op.spec.tag);
  tag.next = op.sequence + 1;
  tag.running = part;
  largest_segment_ = std::max(largest_segment_, part->plan().segment_bytes);
  if (running_.empty()) {
    for (auto& [key, link] : links_) link.forgive_credits(largest_segment_);
  }
  running_.push_back(part);
  filling_ += part->is_filling();
  part->checksums =
      std::any_of(lanes_.begin(), lanes_.end(), [](const Place& place) { return !place.lane->in_memory; });
  if (op.small) return;
  for (Side from = 0; from < part->sides.size(); ++from) {
    // Up to a segment it may all come early, unless much has come early already.
    const std::size_t expected = part->plan().bytes_from[from];
    if (expected > epoch_.spec().segment_bytes || 2 * early_[from].received > epoch_.early_limit()) {
      send_ready(*part, from);
    }
  }
}

bool Channel::has_early(const OpPart& part) const {
  const auto tag = tags_.find(part.op.spec.tag);
  return tag != tags_.end() && !tag->second.stash.empty();
}

void Channel::replay(const PartPtr& part) {
  TagState& tag = tag_state(part->op.spec.tag);
  if (tag.running != part) return;
  flush_for(*part);
  // What was counted when it came is counted again below, as what comes to an op that runs.
  for (const Stashed& frame : take_stash(tag, part->op.sequence)) {
    std::string why;
    if (on_part_frame(part, {.side = frame.from, .in_memory = frame.in_memory}, frame.header, frame.payload.data(),
                      why))
      continue;
    violation(frame.from, std::move(why));
    return;
  }
}

void Channel::end(const PartPtr& part, bool committed) {
  for_lanes([&](Link&, Lane& each) { each.detach(*part); });
  for (Side side = 0; side < part->sides.size(); ++side) {
    early_[side].received -= std::exchange(part->sides[side].early_received, 0);
    // Of an op that starts again the neighbour keeps it until the epoch ends: it stays in `early_`.
    if (committed) release_early(*part, side);
    else part->sides[side].early_sent = 0;
  }
  filling_ -= std::erase(running_, part) > 0 && part->is_filling();
  const auto tag = tags_.find(part->op.spec.tag);
  if (tag != tags_.end() && tag->second.running == part) tag->second.running = nullptr;
  // After this the op may be gone. The op table itself waits for channel 0.
  const bool is_last = committed && part->op.parts_to_end.fetch_sub(1) == 1;
  if (is_last && number_ != 0) report({.kind = Report::Kind::parts_ended, .part = part});
}

bool Channel::look_at_blocks() {
  if (filling_ == 0) return false;
  bool any = false;
  for (const PartPtr& part : running_) {
    const bool was_finished = part->is_finished();
    if (!part->look_at_blocks()) continue;
    any = true;
    filling_ -= !part->is_filling();
    flush_for(*part);
    if (!was_finished && part->is_finished()) finished(part, previous_side);
  }
  return any;
}

void Channel::send(Side to, const FrameHeader& header, Payload payload) {
  if (Link* found = link(to)) found->send(header, std::move(payload));
}

// Early segments.

void Channel::send_ready(OpPart& part, Side to) {
  if (std::exchange(part.sides[to].ready_sent, true)) return;
  early_[to].received -= std::exchange(part.sides[to].early_received, 0);
  send(to, part.op.header(LaneFrame::ready), {});
}

// Early segments came. If they are many, the neighbour may be held back by them: it gets Ready for all ops that are
// called here.
void Channel::on_early_bytes(Side from, std::size_t bytes) {
  early_[from].received += bytes;
  if (2 * early_[from].received <= epoch_.early_limit()) return;
  for (const PartPtr& part : running_) {
    if (!part->op.small && from < part->sides.size()) send_ready(*part, from);
  }
}

// A frame about an op came from a member, so it has called the op. Between two peers both neighbours are one.
void Channel::on_neighbour_called(OpPart& part, Side side) {
  for (Side each = 0; each < part.sides.size(); ++each) {
    if (part.sides[each].peer_ready || (each != side && epoch_.size() > 2)) continue;
    part.sides[each].peer_ready = true;
    release_early(part, each);
    flush_for(part);
  }
}

// What was sent early of an op counts no longer. Others that were held back by it may go on.
void Channel::release_early(OpPart& part, Side to) {
  const std::size_t released = std::exchange(part.sides[to].early_sent, 0);
  if (released == 0) return;
  const bool was_full = early_[to].sent + epoch_.frame_limit() > epoch_.early_limit();
  early_[to].sent -= released;
  if (Link* found = was_full ? link(to) : nullptr) found->flush_all();
}

// Sending: frames that have begun, then control, then segments pulled from the oldest op that may send.

PartPtr Channel::next_part_to_send(Side to) const {
  if (epoch_.is_sealed()) return nullptr;
  for (const PartPtr& part : running_) {
    if (!part->has_sendable(to)) continue;
    const std::size_t sent = part->sides[to].eager_sent;
    const Sendable& next = part->next_sendable(to);
    if (part->sides[to].peer_ready || next.again) return part;
    const bool is_eager = sent == 0 || sent + next.length <= epoch_.spec().segment_bytes;
    const bool is_kept = early_[to].sent + next.travelling_bytes() <= epoch_.early_limit() || planted_.early_unlimited;
    if (is_eager && is_kept) return part;
  }
  return nullptr;
}

void Channel::flush_for(const OpPart& part) {
  for_lanes([&](const Link& link, Lane& each) {
    if (part.has_sendable(link.side())) flush_.add(each);
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
  const Side side = link.side();
  if (side == no_side) return;
  // Among several lanes nothing is decided earlier than it must be.
  const std::size_t max_frames = to.sharing.shared ? 1 : queue_ahead_frames;
  while (to.tx.bytes() < queue_ahead_bytes && to.tx.size() < max_frames) {
    const PartPtr part = next_part_to_send(side);
    if (part == nullptr && link.reissue(to)) continue;
    if (part == nullptr) return;
    if (!link.may_take(to, *part) && link.leave_to_others(to, *part)) return;
    Sendable item = part->take_sendable(side);
    if (item.again && part->superseded(item)) continue;
    if (planted_.apply_duplicate && !item.again && item.offset % 3 == 1) part->resend(side, item);
    const std::uint32_t length = item.travelling_bytes();
    if (!item.again) part->sides[side].eager_sent += item.length;
    if (!item.again && !part->sides[side].peer_ready) {
      part->sides[side].early_sent += length;
      early_[side].sent += length;
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
  if (to.offered_since == 0 && !to.tx.empty()) to.offered_since = now_;
  return to.tx.gather(out, most);
}

// A whole frame is through. What is behind it is offered from now on.
void Channel::note_sent(Ns now, Lane& to, const OutFrame& frame) const {
  if (frame.part != nullptr && epoch_.size() > 0) {
    OpPart::Times& times = frame.part->times;
    times.out_last = now;
    if (times.out_first == 0) times.out_first = now;
    if (to.offered_since > 0) times.blocked += std::max<Ns>(now - to.offered_since, 0);
  }
  to.offered_since = now;
}

void Channel::sent(Ns now, ConnId id, std::size_t bytes) {
  Lane& to = lane(id);
  now_ = now;
  stats_.sent_bytes += bytes;
  if (to.in_memory) stats_.memory_bytes += bytes;
  to.meter.sent(now, bytes);
  to.tx.sent(bytes, [&](OutFrame& frame, std::size_t left) {
    note_sent(now, to, frame);
    if (to.sharing.shared && frame.has_header) to.flights.note_sent(frame, to.meter.sent_total() - left);
  });
  if (to.sharing.shared && to.flights.are_too_many(to.meter.sent_total())) {
    violation(link_of(id), "it takes frames, but reports none of them");
    return;
  }
  if (to.tx.empty()) to.offered_since = 0;
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
  early_.assign(std::max(epoch_.sides(), 2u), {});
}

void Channel::install(Ns now) {
  assert(running_.empty());
  largest_segment_ = 0;
  forget_tags();
  for (auto& [key, link] : links_) link.install(now);
  look_at_mesh();
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
    if (key.outgoing != outgoing || key.direct) continue;
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
    if (key.outgoing || key.direct) continue;
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
    if (link.key.peer == peer) flush_.add(each);
  });
}

std::array<std::uint64_t, max_paths> Channel::path_rates(Ns now, PeerId peer) const {
  std::array<std::uint64_t, max_paths> rates{};
  const auto found = links_.find({peer, true, false});
  if (found == links_.end()) return rates;
  for (const auto& [id, each] : found->second.lanes()) rates[each.sharing.path] += each.meter.recent_rate(now);
  return rates;
}

// Of several lanes: the mean of their smoothed RTTs, and the minimum of their minima.
std::array<Rtt, max_paths> Channel::path_rtts(Ns now, PeerId peer) const {
  std::array<Rtt, max_paths> rtts{};
  std::array<Ns, max_paths> counted{};
  for (const bool outgoing : {false, true}) {
    const auto found = links_.find({peer, outgoing, false});
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
  const auto found = links_.find({epoch_.neighbour(to_next), to_next, false});
  return found == links_.end() ? std::array<std::uint64_t, max_paths>{} : found->second.path_bytes();
}

}  // namespace ringfold
