#include "ringfold/op.hpp"

#include <algorithm>
#include <cassert>

namespace ringfold {
namespace {

using kernels::item_bytes;

// A quantised op is for slow links: smaller segments are on their way to the next hop sooner, and are encoded in cache.
constexpr std::size_t quantised_segment_bytes = std::size_t{256} << 10;
constexpr std::size_t smallest_fine_segment = std::size_t{16} << 10;
// On several paths the slow one holds the op up by as long as its last segment takes. A thousandth of what travels is
// soon through; but every segment has a price.
std::size_t fine_segment(std::size_t bytes, std::uint32_t size) {
  const std::size_t chunk = size > 2 ? bytes / size : bytes;
  std::size_t segment = smallest_fine_segment;
  while (segment * 2 * 1024 <= chunk) segment *= 2;
  return segment;
}

// A part that is shorter is not worth waking a thread for.
constexpr std::size_t smallest_part = std::size_t{128} << 10;
// Around a ring of several channels: a stage of the ring begins with its first segment, so the fewer bytes that is, the
// sooner all peers have work. A pair exchanges everything at once.
constexpr std::size_t smallest_ring_segment = std::size_t{128} << 10;
// Direct lanes in shared memory have short FIFOs, and a frame of half of one is reduced out of it.
constexpr std::size_t largest_mesh_segment = std::size_t{64} << 10;
constexpr std::size_t ring_segments = 32;  // of each chunk in each channel, where they are not too small

std::size_t ring_segment(std::size_t chunk, std::size_t most) {
  return std::clamp(chunk / ring_segments, std::min(smallest_ring_segment, most), most);
}

std::vector<Span> laid_out(std::vector<Span> spans) {
  std::size_t at = 0;
  for (Span& span : spans) {
    span.at = at;
    at += span.bytes;
  }
  return spans;
}

OpSpec with_layout(OpSpec spec) {
  spec.spans = laid_out(std::move(spec.spans));
  return spec;
}

std::size_t total_bytes(const OpSpec& spec) {
  return spec.spans.empty() ? 0 : spec.spans.back().at + spec.spans.back().bytes;
}

}  // namespace

// The last committed small op of every tag is kept whole, for a seal to carry. All of them together must fit into a
// control frame: a few tags may have large payloads, many tags smaller ones, and the rest goes around the ring. Every
// peer decides this from what it knows without a message: tag, bytes and members.
std::size_t max_payload_bytes(std::uint64_t tag) {
  if (tag < 16) return std::size_t{1} << 20;
  return tag < 256 ? std::size_t{128} << 10 : 0;
}

Descriptor describe(const OpSpec& spec) {
  Descriptor out;
  out.kind = static_cast<std::uint8_t>(spec.kind);
  out.reduce_op = static_cast<std::uint8_t>(spec.reduce_op);
  out.quantisation = static_cast<std::uint8_t>(spec.scheme);
  out.retry = static_cast<std::uint8_t>(spec.retry);
  out.step = spec.step;
  out.call = spec.call;
  out.root = spec.root;
  out.arrays = static_cast<std::uint32_t>(spec.spans.size());
  bool mixed = false;
  for (const Span& span : spec.spans) {
    mixed |= span.dtype != spec.spans.front().dtype;
    const std::uint64_t facts[2] = {static_cast<std::uint64_t>(span.dtype), span.bytes};
    out.layout = crc32c(facts, sizeof facts, out.layout);
    out.count += span.bytes / item_bytes(span.dtype);
    out.bytes += span.bytes;
  }
  if (!spec.spans.empty()) out.dtype = mixed ? 255 : static_cast<std::uint8_t>(spec.spans.front().dtype);
  return out;
}

Op::Op(std::uint64_t id, OpSpec given)
    : id(id),
      spec(with_layout(std::move(given))),
      descriptor(describe(spec)),
      fingerprint(descriptor.fingerprint()),
      bytes(total_bytes(spec)) {}

Placement place(const OpSpec& spec, const Cut& cut) {
  std::size_t bytes = 0;
  for (const Span& span : spec.spans) bytes += span.bytes;
  if (bytes <= cut.small_bytes && bytes * cut.size <= max_payload_bytes(spec.tag)) return {.small = true};
  const std::size_t whole = spec.kind == OpKind::all_gather ? bytes * cut.size : bytes;
  const std::size_t least = std::min(smallest_part, cut.segment_bytes / 2);
  if (whole >= cut.channels * least) return {.slices = cut.channels};
  return {.channel = static_cast<std::uint32_t>(whole >= least ? spec.tag % cut.channels : 0)};
}

void Op::start(const Cut& cut, std::uint32_t number, BackupPool& pool) {
  const Placement placed = place(spec, cut);
  sequence = number;
  rank_ = cut.rank;
  size_ = cut.size;
  small = placed.small;
  state = OpState::running;
  mismatch_reported = timeout_reported = false;
  local = first_done = last_done = 0;
  last_rank.reset();
  dones.assign(size_, false);
  links.assign(size_, 0);
  doubled = 0;
  done_count = 0;
  registrations = 0;
  payloads.clear();
  absent_.assign(size_, false);
  absent_count_ = 0;
  final_count_.reset();
  parts.clear();
  parts_to_finish = 0;
  is_received_ = true;
  if (spec.blocks) spec.blocks->restart();
  if (small) {
    payloads.resize(size_);
    parts.push_back(std::make_shared<OpPart>(*this, 0, no_plan()));
    return;
  }
  if (saves() || spec.kind == OpKind::reduce_scatter) {
    if (backup_.bytes() < bytes) backup_ = pool.take(bytes);
  }
  if (reduces() && !spec.contribute) set_absent(rank_);
  const bool gathers = spec.kind == OpKind::all_gather, quantised = spec.scheme != quantize::Scheme::none;
  if (gathers) std::memcpy(spec.gathered + rank_ * bytes, spec.spans.front().source, bytes);
  std::size_t segment_bytes = cut.segment_bytes;
  if (quantised) segment_bytes = std::min(segment_bytes, quantised_segment_bytes);
  if (cut.fine) segment_bytes = std::min(segment_bytes, fine_segment(bytes, size_));
  const std::size_t whole = gathers ? bytes * size_ : bytes;
  const std::uint32_t slices = placed.slices;
  const bool is_meshed = spec.kind == OpKind::all_reduce && takes_mesh(whole, size_, quantised, cut.topology);
  if (is_meshed) segment_bytes = std::min(segment_bytes, largest_mesh_segment);
  else if (slices > 1 && size_ > 2 && !quantised) segment_bytes = ring_segment(whole / size_ / slices, segment_bytes);
  for (std::uint32_t slice = 0; slice < slices; ++slice) {
    Plan plan =
        make_plan(spec.kind, whole, rank_, size_, spec.root, segment_bytes, quantised, {slice, slices}, cut.topology);
    const std::uint32_t channel = slices > 1 ? slice : placed.channel;
    if (parts.empty() && channel > 0) parts.push_back(std::make_shared<OpPart>(*this, 0, no_plan()));
    parts.push_back(std::make_shared<OpPart>(*this, channel, std::move(plan)));
  }
  parts_to_finish = static_cast<std::uint32_t>(
      std::count_if(parts.begin(), parts.end(), [](const PartPtr& part) { return !part->is_finished(); }));
  is_received_ = parts_to_finish == 0;
}

Plan Op::no_plan() const {
  Plan nothing;
  nothing.rank = rank_;
  nothing.size = size_;
  return nothing;
}

FrameHeader Op::header(LaneFrame kind) const {
  FrameHeader header;
  header.kind = kind;
  header.epoch = epoch;
  header.sequence = sequence;
  header.tag = spec.tag;
  header.fingerprint = fingerprint;
  header.origin = rank_;
  return header;
}

bool Op::parts_finished() {
  is_received_ = true;
  if (!reduces()) return true;
  for (const PartPtr& part : parts) {
    const auto count = part->final_count();
    if (!count) continue;
    if (final_count_ ? *count != *final_count_ : *count + absent_count_ > size_) return false;
    final_count_ = count;
  }
  return true;
}

bool Op::set_absent(std::uint32_t rank) {
  if (absent_[rank]) return true;
  if (final_count_ && *final_count_ + absent_count_ >= size_) return false;
  absent_[rank] = true;
  ++absent_count_;
  return true;
}

std::uint64_t Op::sent_to_next() const {
  std::uint64_t sum = 0;
  for (const PartPtr& part : parts) sum += part->sides[next_side].eager_sent;
  return sum;
}

Payload Op::own_payload() const {
  if (reduces() && !spec.contribute) return {};
  Bytes out;
  if (spec.kind == OpKind::broadcast && rank_ != spec.root) return out;
  out.reserve(bytes);
  for (const Span& span : spec.spans) out.insert(out.end(), span.source, span.source + span.bytes);
  return out;
}

bool Op::payloads_fit() const {
  if (payloads.size() != size_) return false;
  for (std::uint32_t rank = 0; rank < size_; ++rank) {
    if (!payloads[rank].is_there()) {
      if (!reduces()) return false;
      continue;
    }
    const bool silent = spec.kind == OpKind::broadcast && rank != spec.root;
    if (payloads[rank].size() != (silent ? 0 : bytes)) return false;
  }
  return true;
}

void Op::fold() {
  assert(payloads_fit());
  const std::uint32_t n = size_;
  switch (spec.kind) {
    case OpKind::barrier:
      return;
    case OpKind::broadcast:
      for (const Span& span : spec.spans) {
        if (span.bytes) std::memcpy(span.target, payloads[spec.root].data() + span.at, span.bytes);
      }
      return;
    case OpKind::all_gather:
      for (std::uint32_t rank = 0; rank < n; ++rank) {
        if (bytes) std::memcpy(spec.gathered + rank * bytes, payloads[rank].data(), bytes);
      }
      return;
    case OpKind::all_reduce:
    case OpKind::reduce_scatter:
      break;
  }
  const bool scatters = spec.kind == OpKind::reduce_scatter;
  const std::size_t from = scatters ? bytes / n * rank_ : 0;
  const std::size_t to = scatters ? from + bytes / n : bytes;
  std::vector<const std::byte*> operands;
  for (std::uint32_t rank = 0; rank < n; ++rank) {
    if (payloads[rank].is_there()) operands.push_back(payloads[rank].data());
    else set_absent(rank);
  }
  const auto contributors = static_cast<std::uint32_t>(operands.size());
  for_spans(spec.spans, from, to, [&](const Span& span, std::size_t inside, std::size_t at, std::size_t count) {
    std::byte* target = scatters ? spec.gathered + (at - from) : span.target + inside;
    const std::size_t items = count / item_bytes(span.dtype);
    if (contributors == 0) std::memset(target, 0, count);
    if (contributors == 1) std::memcpy(target, operands[0] + at, count);
    if (contributors > 1)
      kernels::reduce(span.dtype, spec.reduce_op, target, operands[0] + at, operands[1] + at, items);
    for (std::uint32_t i = 2; i < contributors; ++i) {
      kernels::reduce(span.dtype, spec.reduce_op, target, target, operands[i] + at, items);
    }
    if (spec.reduce_op == kernels::ReduceOp::avg)
      kernels::divide(span.dtype, target, divide_by_size ? n : contributors, items);
  });
}

void Op::restore() {
  if (small || !saves()) return;
  for (const PartPtr& part : parts) part->restore();
}

void Op::deliver() {
  if (small || spec.kind != OpKind::reduce_scatter) return;
  const std::size_t count = bytes / size_;
  if (count) std::memcpy(spec.gathered, backup_.at() + rank_ * count, count);
}

void Op::release_memory(BackupPool& pool) {
  for (const PartPtr& part : parts) {
    result.sent_bytes += part->sent_bytes;
    result.received_bytes += part->received_bytes;
  }
  parts.clear();
  pool.give_back(std::move(backup_));
  backup_ = {};
}

}  // namespace ringfold
