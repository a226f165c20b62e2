#include "ringfold/op_table.hpp"

#include <algorithm>
#include <bit>
#include <new>
#include <numeric>
#include <stdexcept>
#include <tuple>

namespace ringfold {
namespace {

constexpr Ns millisecond = 1'000'000;
constexpr std::size_t min_timed_bytes = std::size_t{4} << 20;  // of payload: less does not show a link's rate
constexpr std::uint32_t no_payload = 0xffff'ffff;  // in evidence, instead of a length: the rank contributes nothing
constexpr Ns announce_after = 100 * millisecond;   // younger ops are not reported
constexpr std::size_t max_announced = 64;
constexpr std::uint16_t direct_stage = 1;    // of a Done that nobody passes on
constexpr std::uint16_t doubling_stage = 2;  // of one that is passed on when a block is complete

// What a Done says about the lanes of its rank.
enum LinkFacts : std::uint8_t { has_mesh = 1, in_memory = 2 };
constexpr std::uint8_t all_facts = has_mesh | in_memory;

// Of two times, where 0 is none.
Ns earlier(Ns a, Ns b) { return a == 0 || (b != 0 && b < a) ? b : a; }

}  // namespace

// Calls.

void OpTable::check_tag(std::uint64_t tag) const {
  for (const auto* ops : {&running_, &waiting_}) {
    for (const OpPtr& op : *ops) {
      if (op->spec.tag == tag) throw std::invalid_argument("an op with this tag is in flight");
    }
  }
  const auto known = tags_.find(tag);
  if (called_tags_ >= max_tags && (known == tags_.end() || !known->second.called)) {
    throw std::invalid_argument("more than 4096 different tags in one epoch: use a tag again once its op is done");
  }
}

std::uint64_t OpTable::submit(Ns now, OpSpec spec) {
  check_tag(spec.tag);
  names_.name(spec);
  now_ = now;
  const std::uint64_t id = next_op_++;
  const auto op = std::make_shared<Op>(id, std::move(spec));
  op->called = op->started = now;
  op->deadline = now + op->spec.timeout;
  ops_.emplace(id, op);
  const auto known = tags_.find(op->spec.tag);
  if (over_) {
    finish(op, over_status_, over_reason_);
  } else if (auto refusal = names_.take_refusal(op->spec)) {
    op->epoch = refusal->epoch;
    finish(op, OpStatus::aborted, std::move(refusal->reason));
  } else if (epoch_.is_sealed() || (known != tags_.end() && known->second.cancelled)) {
    waiting_.push_back(op);
  } else {
    try {
      start(now, op);
    } catch (...) {
      ops_.erase(id);
      if (!op->spec.again) names_.forget(op->spec);
      throw;
    }
  }
  return id;
}

void OpTable::set_first_sequence(std::uint32_t first) {
  first_sequence_ = first;
  channels_.set_first_sequence(first);
}

// The op's place in the epoch. Memory first: if there is none, the tag's sequence has not moved.
void OpTable::begin_in_epoch(Ns now, Op& op) {
  const EpochSpec& spec = epoch_.spec();
  const auto known = tags_.find(op.spec.tag);
  const std::uint32_t sequence = known == tags_.end() ? first_sequence_ : known->second.next;
  Cut cut = this->cut();
  const std::uint8_t links = known == tags_.end() ? 0 : known->second.links;
  cut.topology.mesh = (links & has_mesh) != 0;
  op.doubles = spec.direct && cut.topology.one_host && std::has_single_bit(spec.size) && spec.size > 3 &&
               known != tags_.end() && known->second.has_committed && (links & in_memory) == 0 &&
               (spec.size == 4 || cut.topology.mesh);
  op.start(cut, sequence, pool_);
  TagState& tag = tag_state(op.spec.tag);
  called_tags_ += !std::exchange(tag.called, true);
  ++tag.next;
  op.epoch = spec.epoch;
  op.started = now;
  ++op.attempts;
  op.deadline = now + op.spec.timeout;
}

Cut OpTable::cut() const {
  const EpochSpec& spec = epoch_.spec();
  return {spec.rank,
          spec.size,
          spec.small_bytes,
          spec.segment_bytes,
          spec.multipath,
          spec.channels,
          {spec.hosts, false, spec.peers_here == spec.size}};
}

void OpTable::start(Ns now, const OpPtr& op) {
  const EpochSpec& spec = epoch_.spec();
  if (spec.size < 2) {
    op->result.contributors = spec.members;
    finish(op, OpStatus::too_few, {});
    return;
  }
#ifdef RINGFOLD_PLANTED
  op->divide_by_size = planted_.divide_by_size;
#endif
  begin_in_epoch(now, *op);
  tag_state(op->spec.tag).running = op;
  running_.push_back(op);
  const bool whole_through_master = op->small && spec.evidence_by_master;
  if (!whole_through_master) channels_.at(0).send(next_side, op->header(LaneFrame::open), raw(op->descriptor));
  const std::vector<PartPtr> parts = op->parts;  // until the end of this call, whatever it leads to
  channels_.at(0).begin(now, parts.front());     // it has a part of every op
  for (const PartPtr& part : parts) {
    if (part->channel > 0) channels_.command(part->channel, {ChannelCommand::Kind::begin, part, now});
  }
  if (op->small) op->payloads[spec.rank] = op->own_payload();
  if (!op->small && op->is_absent(spec.rank)) {
    send_absent(*op, next_side, spec.rank);
    if (spec.size > 2) send_absent(*op, previous_side, spec.rank);
  }
  if (op->small || op->local_part_finished()) local_part_done(now, op);
  channels_.at(0).replay(parts.front());
}

OpPtr OpTable::find(std::uint64_t id) const {
  const auto it = ops_.find(id);
  return it == ops_.end() ? nullptr : it->second;
}

bool OpTable::cancel(std::uint64_t id) {
  const OpPtr op = find(id);
  if (op == nullptr || op->state == OpState::finished) return true;
  if (op->state == OpState::done || op->state == OpState::ending || (op->state == OpState::running && op->small))
    return false;
  if (op->state == OpState::running) {
    undo(op);
    tag_state(op->spec.tag).cancelled = true;
    events_.push(
        {.kind = Event::Kind::op_cancelled, .epoch = op->epoch, .tag = op->spec.tag, .sequence = op->sequence});
  }
  names_.forget(op->spec);  // the others wait for this call
  finish(op, OpStatus::cancelled, {});
  return true;
}

void OpTable::release(std::uint64_t id) {
  const OpPtr op = find(id);
  if (op != nullptr && op->state == OpState::finished) ops_.erase(id);
}

void OpTable::refuse(const CallName& name, Bytes reason) {
  for (const OpPtr& each : waiting_) {
    if (std::tie(each->spec.tag, each->spec.step, each->spec.call) != name) continue;
    const OpPtr op = each;  // NOLINT(performance-unnecessary-copy-initialization): `finish` removes it from waiting_
    op->epoch = epoch_.number();
    finish(op, OpStatus::aborted, std::move(reason));
    return;
  }
  names_.refuse(name, {epoch_.number(), std::move(reason)});
}

std::vector<std::uint64_t> OpTable::tags_in_flight() const {
  std::vector<std::uint64_t> out;
  for (const auto* ops : {&running_, &waiting_}) {
    for (const OpPtr& op : *ops) out.push_back(op->spec.tag);
  }
  std::sort(out.begin(), out.end());
  return out;
}

// What was heard.

OpPtr OpTable::running_op(const PartPtr& part) const {
  const auto found = std::find_if(running_.begin(), running_.end(), [&](const OpPtr& op) {
    return std::find(op->parts.begin(), op->parts.end(), part) != op->parts.end();
  });
  return found == running_.end() ? nullptr : *found;
}

// Between a channel's report and this, the op may have ended, or the epoch: then it means nothing any more.
void OpTable::on_report(Ns now, const Report& report) {
  now_ = now;
  const OpPtr op = running_op(report.part);
  if (op == nullptr || (epoch_.is_sealed() && !planted_.accept_old_epoch)) return;
  std::string why;
  if (report.kind == Report::Kind::parts_ended) {
    if (op->state == OpState::ending) conclude(op);
  } else if (report.kind == Report::Kind::parts_finished) {
    if (!op->parts_finished()) why = "a value of more contributors than there are";
    else if (op->state == OpState::running && op->local_part_finished()) local_part_done(now, op);
  } else {
    on_frame(now, op, report, why);
  }
  if (why.empty()) return;
  channels_.command(report.part->channel,
                    {.kind = ChannelCommand::Kind::violation, .from = report.from, .text = std::move(why)});
}

bool OpTable::on_frame(Ns now, const OpPtr& op, const Report& report, std::string& why) {
  const FrameHeader& header = report.header;
  if (header.kind == LaneFrame::open) return on_open(*op, header, report.payload, why);
  if (header.fingerprint != op->fingerprint) return true;  // its descriptor shows that, and the op ends by a verdict
  if (header.kind == LaneFrame::absent) return on_absent(now, op, report, why);
  return on_done(op, report, why);
}

bool OpTable::on_open(Op& op, const FrameHeader& header, const Payload& payload, std::string& why) {
  if (header.length != sizeof(Descriptor)) {
    why = "a broken descriptor";
    return false;
  }
  if (header.fingerprint == op.fingerprint || std::exchange(op.mismatch_reported, true)) return true;
  Event event{.kind = Event::Kind::mismatch,
              .peer = epoch_.neighbour(false),
              .epoch = op.epoch,
              .tag = header.tag,
              .sequence = header.sequence};
  event.body = raw(op.descriptor);
  event.other = Bytes(payload.data(), payload.data() + payload.size());
  events_.push(std::move(event));
  return true;
}

// The ranks that contribute nothing. The count of the final value determines how many there are.
bool OpTable::on_absent(Ns now, const OpPtr& op, const Report& report, std::string& why) {
  const FrameHeader& header = report.header;
  const bool is_rank = header.origin < epoch_.size() && header.origin != epoch_.rank();
  if (!is_rank || header.length != 0 || op->small || !op->reduces()) {
    why = "a rank that cannot be absent";
    return false;
  }
  if (op->is_absent(header.origin)) return true;
  const auto journey = epoch_.journey(header.origin, report.from == next_side);
  if (journey.travelled > journey.reach || !op->set_absent(header.origin)) {
    why = "a rank that is absent, although it contributed or is too far away";
    return false;
  }
  if (journey.travelled < journey.reach) send_absent(*op, Side{report.from == previous_side}, header.origin);
  if (op->state == OpState::running && op->local_part_finished()) local_part_done(now, op);
  return true;
}

void OpTable::send_absent(const Op& op, Side to, std::uint32_t origin) {
  FrameHeader header = op.header(LaneFrame::absent);
  header.origin = origin;
  channels_.at(0).send(to, header, {});
}

bool OpTable::on_done(const OpPtr& op, const Report& report, std::string& why) {
  const FrameHeader& header = report.header;
  if (header.origin >= epoch_.size() || header.origin == epoch_.rank()) {
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
  const auto journey = epoch_.journey(header.origin, report.from == next_side);
  const bool is_direct = header.stage == direct_stage;
  bool belongs = report.from < first_direct_side && journey.travelled <= journey.reach;
  if (op->doubles) belongs = header.stage == doubling_stage && is_of_block(header.origin, report.from);
  else if (is_direct) belongs = header.origin == epoch_.rank_at(report.from);
  if (!belongs) {
    why = "a Done that went too far";
    return false;
  }
  if (op->small) {
    if (contributes) op->payloads[header.origin] = report.payload;
    op->result.received_bytes += header.length;
  }
  op->dones[header.origin] = true;
  op->last_rank = header.origin;
  op->last_done = now_;
  if (op->first_done == 0) op->first_done = now_;
  op->links[header.origin] = static_cast<std::uint8_t>(header.offset & all_facts);
  ++op->done_count;
  op->registrations = std::max(op->registrations, header.registrations);
  if (op->doubles) {
    double_dones(*op);
  } else if (!is_direct && journey.travelled < journey.reach) {
    send_done(*op, Side{report.from == previous_side}, header.origin, header.registrations);
  }
  check_evidence(op);
  return true;
}

bool OpTable::on_evidence(Ns now, const std::byte* body, std::size_t bytes, std::string& why) {
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
    if (whole) payloads.push_back(is_there ? Payload(Bytes(at, at + length)) : Payload());
  }
  if (!whole) {
    why = "broken evidence";
    return false;
  }
  if (epoch != epoch_.number() || epoch_.is_sealed()) return true;
  const auto found = tags_.find(tag);
  if (found == tags_.end() || !found->second.running || found->second.running->sequence != sequence) return true;
  now_ = now;
  const OpPtr op = found->second.running;
  if (count != epoch_.size() || fingerprint != op->fingerprint) return true;
  if (op->small) op->payloads = std::move(payloads);
  op->dones.assign(epoch_.size(), true);
  op->last_rank.reset();
  op->first_done = op->last_done = now;
  op->done_count = epoch_.size();
  op->registrations = std::max(op->registrations, registrations);
  check_evidence(op);
  return true;
}

// Evidence.

void OpTable::local_part_done(Ns now, const OpPtr& op) {
  op->local = now;
  if (!op->small) op->state = OpState::done;
  op->dones[epoch_.rank()] = true;
  if (epoch_.spec().direct && channels_.are_meshed()) op->links[epoch_.rank()] |= has_mesh;
  if (channels_.at(0).is_in_memory()) op->links[epoch_.rank()] |= in_memory;
  ++op->done_count;
  op->registrations = std::max(op->registrations, registrations_);
  if (epoch_.spec().evidence_by_master) {
    send_done_to_master(*op);
  } else if (op->doubles) {
    double_dones(*op);
  } else {
    const bool is_direct = epoch_.spec().direct && channels_.at(0).is_meshed();
    const std::uint16_t stage = is_direct ? direct_stage : 0;
    send_done(*op, next_side, epoch_.rank(), registrations_, stage);
    if (epoch_.size() > 2) send_done(*op, previous_side, epoch_.rank(), registrations_, stage);
    for (Side side = first_direct_side; is_direct && side < epoch_.sides(); ++side) {
      if (planted_.direct_forgotten && side + 1 == epoch_.sides()) continue;
      send_done(*op, side, epoch_.rank(), registrations_, stage);
    }
  }
  check_evidence(op);
}

// Step k of recursive doubling: ranks that differ in their last k + 1 bits exchange the Dones of their blocks of 2^k
// ranks. The partner of the first two steps is a neighbour in the ring.
void OpTable::double_dones(Op& op) {
  const std::uint32_t rank = epoch_.rank(), n = epoch_.size();
  while (1u << op.doubled < n) {
    const std::uint32_t step = op.doubled, first = rank >> step << step, partner = rank ^ ((2u << step) - 1);
    for (std::uint32_t each = first; each < first + (1u << step); ++each) {
      if (!op.dones[each]) return;
    }
    ++op.doubled;
    const Side side = side_towards(rank, n, partner);
    for (std::uint32_t each = first; each < first + (1u << step); ++each) {
      send_done(op, side, each, op.registrations, doubling_stage);
    }
  }
}

bool OpTable::is_of_block(std::uint32_t origin, Side from) const {
  const std::uint32_t rank = epoch_.rank(), partner = epoch_.rank_at(from);
  for (std::uint32_t step = 0; 1u << step < epoch_.size(); ++step) {
    if (partner == (rank ^ ((2u << step) - 1))) return origin >> step == partner >> step;
  }
  return false;
}

void OpTable::send_done_to_master(Op& op) {
  Bytes body;
  body.reserve(sizeof(FrameHeader) + (op.small ? op.bytes : 0));
  put(body, epoch_.number());
  put(body, op.spec.tag);
  put(body, op.sequence);
  put(body, epoch_.rank());
  put(body, op.descriptor);
  put(body, registrations_);
  put(body, static_cast<std::uint8_t>(!op.small || op.payloads[epoch_.rank()].is_there()));
  if (op.small) {
    const Payload& payload = op.payloads[epoch_.rank()];
    body.insert(body.end(), payload.data(), payload.data() + payload.size());
    op.result.sent_bytes += payload.size();
  }
  dones_.push_back(std::move(body));
}

void OpTable::send_done(Op& op, Side to, std::uint32_t origin, std::uint64_t registrations, std::uint16_t stage) {
  FrameHeader header = op.header(LaneFrame::done);
  header.stage = stage;
  header.offset = op.links[origin];
  header.origin = origin;
  header.registrations = registrations;
  Payload payload;
  if (op.small) payload = op.payloads[origin];
  header.contributors = !op.small || payload.is_there() ? 1 : 0;
  op.result.sent_bytes += payload.size();
  channels_.at(0).send(to, header, std::move(payload));
}

void OpTable::check_evidence(const OpPtr& op) {
  const bool too_soon = op->small ? planted_.payload_forgotten && epoch_.spec().direct : planted_.commit_missing_done;
  const std::uint32_t needed = epoch_.size() - too_soon;
  if (op->done_count < needed) return;
  if (op->small ? op->payloads_fit() : op->state == OpState::done) commit(op);
}

// What the channels have of it is theirs until each of them has ended its part. Channel 0 does that at once.
void OpTable::commit(const OpPtr& op) {
  op->state = OpState::ending;
  op->parts_to_end = static_cast<std::uint32_t>(op->parts.size());
  for (auto part = op->parts.rbegin(); part != op->parts.rend(); ++part) {
    if (planted_.end_forgotten && (*part)->channel > 0 && part == op->parts.rbegin()) continue;
    channels_.command((*part)->channel, {ChannelCommand::Kind::end, *part});
  }
  if (op->parts_to_end == 0) conclude(op);
}

void OpTable::conclude(const OpPtr& op) {
  note_rate(*op);
  if (op->small) op->fold();
  op->deliver();
  TagState& tag = tag_state(op->spec.tag);
  tag.has_committed = true;
  tag.committed = op->sequence;
  tag.committed_descriptor = op->descriptor;
  tag.committed_registrations = op->registrations;
  tag.links = std::accumulate(op->links.begin(), op->links.end(), all_facts,
                              [](std::uint8_t all, std::uint8_t one) { return static_cast<std::uint8_t>(all & one); });
  tag.committed_payloads.reset();
  if (op->small) tag.committed_payloads = std::move(op->payloads);
  for (std::uint32_t rank = 0; rank < epoch_.size(); ++rank) {
    if (!op->is_absent(rank)) op->result.contributors.push_back(epoch_.spec().members[rank]);
  }
  std::sort(op->result.contributors.begin(), op->result.contributors.end());
  finish(op, OpStatus::ok, {});
}

// How fast the link to the next peer is, at least, as far as the op shows.
void OpTable::note_rate(const Op& op) {
  const std::uint64_t out_bytes = op.sent_to_next();
  if (out_bytes < min_timed_bytes || op.absent_count() > 0 || epoch_.spec().hosts > 1) return;
  const double seconds = static_cast<double>(std::max<Ns>(op.local - op.started, 1)) / 1e9;
  best_out_rate_ = std::max(best_out_rate_, static_cast<std::uint64_t>(static_cast<double>(out_bytes) / seconds));
}

// The channels have let go of its memory.
void OpTable::finish(const OpPtr& op, OpStatus status, Bytes reason) {
  op->state = OpState::finished;
  op->result.status = status;
  op->result.reason = std::move(reason);
  op->result.epoch = op->epoch;
  op->result.registrations = op->registrations;
  record(*op);
  op->release_memory(pool_);
  std::erase(running_, op);
  std::erase(waiting_, op);
  const auto tag = tags_.find(op->spec.tag);
  if (tag != tags_.end() && tag->second.running == op) tag->second.running = nullptr;
  ++(status == OpStatus::ok ? stats_.committed : stats_.aborted);
  ++finished_count_;
}

// The times of a large op are those of its payload, those of a small one of its Dones.
void OpTable::record(const Op& op) {
  OpEntry entry{.tag = op.spec.tag,
                .step = op.spec.step,
                .bytes = op.bytes,
                .sent_bytes = op.result.sent_bytes,
                .received_bytes = op.result.received_bytes,
                .called = op.called,
                .started = op.attempts > 0 ? op.started : 0,
                .in_first = op.small ? op.first_done : 0,
                .in_last = op.small ? op.last_done : 0,
                .local = op.local,
                .ended = now_,
                .sequence = op.sequence,
                .epoch = op.epoch,
                .call = op.spec.call,
                .attempts = op.attempts,
                .kind = static_cast<std::uint8_t>(op.spec.kind),
                .outcome = static_cast<std::uint8_t>(op.result.status),
                .small = op.small};
  if (op.last_rank && *op.last_rank < epoch_.spec().members.size() && op.epoch == epoch_.number()) {
    entry.last_peer = epoch_.spec().members[*op.last_rank];
  }
  for (const PartPtr& part : op.parts) {
    const OpPart::Times& times = part->times;
    entry.sent_bytes += part->sent_bytes;
    entry.received_bytes += part->received_bytes;
    entry.out_first = earlier(entry.out_first, times.out_first);
    entry.out_last = std::max(entry.out_last, times.out_last);
    entry.blocked = std::max(entry.blocked, times.blocked);
    if (op.small) continue;
    entry.in_first = earlier(entry.in_first, times.in_first);
    entry.in_last = std::max(entry.in_last, times.in_last);
    if (times.arriving > entry.arriving) {
      entry.arriving = times.arriving;
      entry.arriving_from = times.arriving_from;
    }
  }
  // Channels have threads and clocks of their own, and several lanes of a part may wait at the same time.
  if (!op.small && entry.local > 0) entry.local = std::max(entry.local, entry.in_last);
  entry.ended = std::max({entry.ended, entry.called, entry.local, entry.in_last, entry.out_last});
  entry.blocked = std::clamp<Ns>(entry.blocked, 0, entry.ended - std::max(entry.started, entry.called));
  log_.add(entry);
  if (op.result.status != OpStatus::ok) return;
  const Ns busy = std::max<Ns>(entry.ended - entry.started, 0);
  stats_.op_bytes += entry.bytes;
  stats_.busy += static_cast<std::uint64_t>(busy);
  stats_.blocked += static_cast<std::uint64_t>(entry.blocked);
  stats_.waited += static_cast<std::uint64_t>(std::clamp<Ns>(entry.in_first - entry.started, 0, busy));
  ++stats_.durations[duration_class(busy)];
}

// No channel reads or writes the caller's memory after this.
void OpTable::undo(const OpPtr& op) {
  for (const PartPtr& part : op->parts) channels_.at(part->channel).end(part, false);
  if (!planted_.no_restore) op->restore();
}

// Epochs.

std::vector<SealedOp> OpTable::seal() {
  std::vector<SealedOp> out;
  if (!planted_.done_after_seal) epoch_.seal();
  for (const auto& [number, tag] : tags_) {
    if (tag.has_committed) {
      out.push_back(
          {number, tag.committed, 2, tag.committed_registrations, tag.committed_payloads, tag.committed_descriptor});
    }
    if (tag.running) {
      const bool done = tag.running->state == OpState::done;
      out.push_back({number, tag.running->sequence, done ? 1 : 0, tag.running->registrations, std::nullopt,
                     tag.running->descriptor});
    }
  }
  std::sort(out.begin(), out.end(), [](const SealedOp& a, const SealedOp& b) {
    return std::tie(a.tag, a.sequence) < std::tie(b.tag, b.sequence);
  });
  return out;
}

void OpTable::settle(Ns now, const std::vector<Verdict>& verdicts, const Bytes& default_reason) {
  now_ = now;
  epoch_.seal();
  for (const OpPtr& op : std::vector<OpPtr>(running_)) {
    const auto verdict = std::find_if(verdicts.begin(), verdicts.end(), [&](const Verdict& v) {
      return v.tag == op->spec.tag && v.sequence == op->sequence && v.fingerprint == op->fingerprint;
    });
    const bool decided = verdict != verdicts.end();
    if (decided && verdict->commit) {
      op->registrations = verdict->registrations;
      if (op->small && verdict->payloads) op->payloads = *verdict->payloads;
      if (op->small ? op->payloads_fit() : op->state == OpState::done) {
        commit(op);
        continue;
      }
    }
    undo(op);
    if (op->spec.retry == Retry::engine && !(decided && verdict->final)) {
      op->state = OpState::waiting;
      std::erase(running_, op);
      waiting_.push_back(op);
      ++stats_.restarted;
    } else {
      finish(op, OpStatus::aborted, decided ? verdict->reason : default_reason);
    }
  }
  forget_tags();
  std::sort(waiting_.begin(), waiting_.end(), [](const OpPtr& a, const OpPtr& b) { return a->id < b->id; });
}

void OpTable::forget_tags() {
  tags_.clear();
  called_tags_ = 0;
  channels_.forget_tags();
}

void OpTable::restart(Ns now) {
  now_ = now;
  forget_tags();
  best_out_rate_ = 0;  // the next heartbeat is about another link
  const std::vector<OpPtr> again = std::exchange(waiting_, {});
  for (const OpPtr& op : again) {
    try {
      start(now, op);
    } catch (const std::bad_alloc&) {
      finish(op, OpStatus::failed, {});  // the others go on without it; its caller gets the failure
    }
  }
}

std::vector<std::pair<std::uint64_t, std::uint32_t>> OpTable::progress() const {
  std::vector<std::pair<std::uint64_t, std::uint32_t>> out;
  for (const auto& [number, tag] : tags_) {
    if (tag.has_committed) out.emplace_back(number, tag.committed + 1);
  }
  std::sort(out.begin(), out.end());
  return out;
}

void OpTable::fail_all(OpStatus status, Bytes reason) {
  over_ = true;
  over_status_ = status;
  over_reason_ = std::move(reason);
  epoch_.seal();
  for (const OpPtr& op : std::vector<OpPtr>(running_)) {
    undo(op);
    finish(op, status, over_reason_);
  }
  for (const OpPtr& op : std::vector<OpPtr>(waiting_)) finish(op, status, over_reason_);
}

// Time.

void OpTable::shift(Ns gap) {
  for (const auto* ops : {&running_, &waiting_}) {
    for (const OpPtr& op : *ops) op->deadline += gap;
  }
}

void OpTable::check_deadlines(Ns now) {
  now_ = now;
  for (const auto* ops : {&running_, &waiting_}) {
    for (const OpPtr& op : *ops) {
      if (op->timeout_reported || now < op->deadline || op->state == OpState::ending) continue;
      op->timeout_reported = true;
      events_.push({.kind = Event::Kind::op_timeout,
                    .epoch = op->epoch,
                    .tag = op->spec.tag,
                    .sequence = op->sequence,
                    .milliseconds = static_cast<std::uint64_t>((now - op->started) / millisecond),
                    .body = raw(op->descriptor)});
    }
  }
}

void OpTable::announce(Ns now, Bytes& heartbeat) const {
  std::vector<OpPtr> old;
  for (const OpPtr& op : running_) {
    if (now - op->started >= announce_after && old.size() < max_announced) old.push_back(op);
  }
  put(heartbeat, static_cast<std::uint16_t>(old.size()));
  for (const OpPtr& op : old) {
    put(heartbeat, op->spec.tag);
    put(heartbeat, op->sequence);
    put(heartbeat, static_cast<std::uint32_t>((now - op->started) / millisecond));
    put(heartbeat, op->fingerprint);
    put(heartbeat, static_cast<std::uint8_t>(op->state != OpState::running || op->small));
  }
}

std::optional<Ns> OpTable::oldest() const {
  std::optional<Ns> since;
  for (const OpPtr& op : running_) since = std::min(since.value_or(op->started), op->started);
  return since;
}

}  // namespace ringfold
