#include "ringfold/op.hpp"

#include <algorithm>
#include <cassert>

namespace ringfold {
namespace {

using kernels::item_bytes;

// The backup of a larger op would only push segments out of the cache.
constexpr std::size_t past_cache_bytes = std::size_t{4} << 20;
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

// What leaves every value as it is when it is added: also a zero of either sign.
std::vector<std::byte> negative_zeros(kernels::DType dtype, std::size_t items) {
  const std::size_t size = item_bytes(dtype);
  std::vector<std::byte> out(items * size);
  for (std::size_t i = 0; i < items; ++i) out[i * size + size - 1] = std::byte{0x80};
  return out;
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

void Op::start(std::uint32_t rank, std::uint32_t size, std::size_t small_bytes, std::size_t segment_bytes, bool fine,
               BackupPool& pool) {
  small = bytes <= small_bytes && bytes * size <= max_payload_bytes(spec.tag);
  state = OpState::running;
  mismatch_reported = timeout_reported = false;
  for (const bool to_next : {false, true}) {
    peer_ready[to_next] = ready_sent[to_next] = false;
    eager_sent[to_next] = early_sent[to_next] = early_received[to_next] = 0;
    own_[to_next].clear();
    forwards_[to_next].clear();
    again_[to_next].clear();
    assigned[to_next].fill(0);
  }
  early_.clear();
  dones.assign(size, false);
  done_count = 0;
  registrations = 0;
  payloads.clear();
  received_ = 0;
  absent_.assign(size, false);
  absent_count_ = final_count_ = 0;
  has_final_ = false;
  if (small) {
    payloads.resize(size);
    plan_ = Plan{};
    plan_.rank = rank;
    plan_.size = size;
    return;
  }
  const bool gathers = spec.kind == OpKind::all_gather;
  if (quantised()) segment_bytes = std::min(segment_bytes, quantised_segment_bytes);
  if (fine) segment_bytes = std::min(segment_bytes, fine_segment(bytes, size));
  plan_ = make_plan(spec.kind, gathers ? bytes * size : bytes, rank, size, spec.root, segment_bytes, quantised());
  bitmap_.assign((plan_.receive_segments + 63) / 64, 0);
  stage_counts_.assign(plan_.receives.size(), 0);
  if (reduces() && !spec.contribute) set_absent(rank);
  if (saves() || spec.kind == OpKind::reduce_scatter) {
    if (backup_.bytes() < bytes) backup_ = pool.take(bytes);
  }
  if (gathers) std::memcpy(spec.gathered + plan_.chunk_begin[rank], spec.spans.front().source, bytes);
  for (const Origin& origin : plan_.origins) {
    const std::size_t end = plan_.chunk_begin[origin.chunk + 1];
    for (std::size_t at = plan_.chunk_begin[origin.chunk]; at < end; at += plan_.segment_bytes) {
      const std::uint32_t length = wire_bytes(at, segment_end(origin.chunk, at));
      own_[origin.send.to_next].push_back({.stage = origin.send.stage,
                                           .own = true,
                                           .length = length,
                                           .offset = at,
                                           .contributors = !reduces() || spec.contribute ? 1u : 0u});
    }
  }
  if (quantised()) count_wire_bytes();
}

std::size_t Op::segment_end(std::int32_t chunk, std::size_t offset) const {
  return std::min(offset + plan_.segment_bytes, plan_.chunk_begin[static_cast<std::size_t>(chunk) + 1]);
}

std::uint32_t Op::wire_bytes(std::size_t from, std::size_t to) const {
  if (!quantised()) return static_cast<std::uint32_t>(to - from);
  std::size_t sum = 0;
  for_spans(from, to, [&](const Span& span, std::size_t, std::size_t, std::size_t count) {
    sum += quantize::encoded_bytes(spec.scheme, span.dtype, count / item_bytes(span.dtype));
  });
  return static_cast<std::uint32_t>(sum);
}

// What is to come counts as it travels: whether it all fits into what may be sent eagerly.
void Op::count_wire_bytes() {
  plan_.bytes_from_previous = plan_.bytes_from_next = 0;
  for (const Receive& receive : plan_.receives) {
    if (receive.chunk < 0) continue;
    const std::size_t end = plan_.chunk_begin[receive.chunk + 1];
    for (std::size_t at = plan_.chunk_begin[receive.chunk]; at < end; at += plan_.segment_bytes) {
      (receive.from_next ? plan_.bytes_from_next : plan_.bytes_from_previous) +=
          wire_bytes(at, segment_end(receive.chunk, at));
    }
  }
}

std::vector<std::byte> Op::encoded(std::size_t from, std::size_t to) const {
  std::vector<std::byte> out(wire_bytes(from, to));
  std::size_t at = 0;
  for_spans(from, to, [&](const Span& span, std::size_t inside, std::size_t, std::size_t count) {
    const std::size_t items = count / item_bytes(span.dtype);
    quantize::encode(spec.scheme, span.dtype, out.data() + at, span.source + inside, items);
    at += quantize::encoded_bytes(spec.scheme, span.dtype, items);
  });
  return out;
}

void Op::resend(bool to_next, Sendable item) {
  item.again = true;
  again_[to_next].push_back(std::move(item));
}

bool Op::superseded(const Sendable& item) const {
  if (plan_.exchange || item.encoded.size() > 0) return false;
  for (std::size_t stage = item.stage; stage < plan_.receives.size(); ++stage) {
    const Receive& receive = plan_.receives[stage];
    if (receive.chunk < 0) continue;
    const bool same =
        item.offset >= plan_.chunk_begin[receive.chunk] && item.offset < plan_.chunk_begin[receive.chunk + 1];
    if (same && received(static_cast<std::uint16_t>(stage), item.offset)) return true;
  }
  return false;
}

Sendable Op::take_sendable(bool to_next) {
  std::deque<Sendable>& queue = !again_[to_next].empty()     ? again_[to_next]
                                : forwards_[to_next].empty() ? own_[to_next]
                                                             : forwards_[to_next];
  Sendable item = std::move(queue.front());
  queue.pop_front();
  if (quantised() && item.own && item.contributors > 0) {
    item.encoded = encoded(item.offset, segment_end(plan_.origins.front().chunk, item.offset));
    item.own = false;
  }
  return item;
}

template <typename Visit>
void Op::for_spans(std::size_t from, std::size_t to, Visit visit) const {
  auto span = std::upper_bound(spec.spans.begin(), spec.spans.end(), from,
                               [](std::size_t at, const Span& s) { return at < s.at + s.bytes; });
  for (; span != spec.spans.end() && span->at < to; ++span) {
    const std::size_t begin = std::max(from, span->at);
    const std::size_t end = std::min(to, span->at + span->bytes);
    if (begin < end) visit(*span, begin - span->at, begin, end - begin);
  }
}

// Where the value at `at` of the virtual range lives while the op runs, if it does not live in the spans' targets.
std::byte* Op::work(std::size_t at) const {
  if (spec.kind == OpKind::all_gather) return spec.gathered + at;
  if (spec.kind == OpKind::reduce_scatter) return backup_.at() + at;
  return nullptr;
}

void Op::pieces(const Sendable& item, std::vector<Piece>& out) const {
  if (item.contributors == 0) return;
  if (item.encoded.size() > 0) {
    out.push_back({item.encoded.data(), item.encoded.size()});
    return;
  }
  const bool gathers = spec.kind == OpKind::all_gather;
  if (gathers || (spec.kind == OpKind::reduce_scatter && !item.own)) {
    out.push_back({work(item.offset), item.length});
    return;
  }
  if (plan_.exchange && item.own && saves() && received(item.stage, item.offset)) {
    out.push_back({backup_.at() + item.offset, item.length});  // overwritten meanwhile: the original is in the backup
    return;
  }
  for_spans(item.offset, item.offset + item.length,
            [&](const Span& span, std::size_t inside, std::size_t, std::size_t count) {
              out.push_back({(item.own ? span.source : span.target) + inside, count});
            });
}

bool Op::received(std::uint16_t stage, std::uint64_t offset) const {
  const Receive& receive = plan_.receives[stage];
  const std::size_t bit = receive.first_bit + (offset - plan_.chunk_begin[receive.chunk]) / plan_.segment_bytes;
  return (bitmap_[bit / 64] >> (bit % 64) & 1) != 0;
}

std::uint32_t Op::crc_of(const Sendable& item) const {
  std::vector<Piece> memory;
  pieces(item, memory);
  std::uint32_t crc = 0;
  for (const Piece& piece : memory) crc = crc32c(piece.at, piece.bytes, crc);
  return crc;
}

Op::Applied Op::apply(bool from_next, std::uint16_t stage, std::uint64_t offset, const std::byte* payload,
                      std::uint32_t length, std::uint32_t crc, std::uint32_t contributors, bool ignore_bitmap) {
  if (stage >= plan_.receives.size() || plan_.receives[stage].chunk < 0) return Applied::invalid;
  const Receive& receive = plan_.receives[stage];
  const std::size_t begin = plan_.chunk_begin[receive.chunk];
  const std::size_t end = plan_.chunk_begin[receive.chunk + 1];
  if (receive.from_next != from_next) return Applied::invalid;
  if (offset < begin || offset >= end || (offset - begin) % plan_.segment_bytes != 0) return Applied::invalid;
  const std::uint32_t value_bytes = wire_bytes(offset, segment_end(receive.chunk, offset));
  if (length != (contributors > 0 ? value_bytes : 0)) return Applied::invalid;
  const bool seen = received(stage, offset);
  if (seen && !ignore_bitmap) return Applied::duplicate;
  if (receive.after >= 0 && !received(static_cast<std::uint16_t>(receive.after), offset)) {
    for (const Early& other : early_) {
      if (other.stage == stage && other.offset == offset) return Applied::duplicate;
    }
    early_.push_back({stage, offset, crc, contributors, {payload, payload + length}});
    return Applied::yes;
  }
  const std::uint32_t own = spec.contribute ? 1 : 0;
  const Incoming in{offset,       payload,
                    value_bytes,  crc,
                    contributors, receive.after >= 0 ? stage_counts_[static_cast<std::size_t>(receive.after)] : own};
  if (!count(receive, stage, in)) return Applied::invalid;
  if (!seen) {
    const std::size_t bit = receive.first_bit + (offset - begin) / plan_.segment_bytes;
    bitmap_[bit / 64] |= std::uint64_t{1} << (bit % 64);
    ++received_;
  }
  if (quantised()) write_quantised(receive, in);
  else write(receive, in);
  apply_early(stage, offset);
  return Applied::yes;
}

// Counts the contributors of the value that a segment makes. False: they cannot be so many.
bool Op::count(const Receive& receive, std::uint16_t stage, const Incoming& in) {
  if (!reduces()) return in.contributors == 1;
  const std::uint32_t together = receive.reduce ? in.together() : in.contributors;
  if (in.contributors > plan_.size || together > plan_.size) return false;
  stage_counts_[stage] = together;
  if (receive.reduce && !receive.last_reduce) return true;
  if (has_final_ ? together != final_count_ : together + absent_count_ > plan_.size) return false;
  has_final_ = true;
  final_count_ = together;
  return true;
}

bool Op::set_absent(std::uint32_t rank) {
  if (absent_[rank]) return true;
  if (has_final_ && final_count_ + absent_count_ >= plan_.size) return false;
  absent_[rank] = true;
  ++absent_count_;
  return true;
}

void Op::apply_early(std::uint16_t after, std::uint64_t offset) {
  for (std::size_t i = 0; i < early_.size(); ++i) {
    const Receive& receive = plan_.receives[early_[i].stage];
    if (receive.after != after || early_[i].offset != offset) continue;
    const Early found = std::move(early_[i]);
    early_.erase(early_.begin() + static_cast<std::ptrdiff_t>(i));
    apply(receive.from_next, found.stage, offset, found.payload.data(),
          static_cast<std::uint32_t>(found.payload.size()), found.crc, found.contributors);
    return;
  }
}

std::uint32_t Op::divisor(const Receive& receive, std::uint32_t contributors) const {
  if (!receive.last_reduce || spec.reduce_op != kernels::ReduceOp::avg) return 1;
  return divide_by_size ? plan_.size : contributors;
}

// Reduces or overwrites, saves what was there, and queues the result for the next hops.
void Op::write(const Receive& receive, const Incoming& in) {
  const bool passes_on = receive.pass_count > 0;
  const std::uint32_t together = receive.reduce ? in.together() : in.contributors;
  std::uint32_t forward_crc = in.crc;
  if (spec.kind == OpKind::all_gather) {
    kernels::overwrite(work(in.offset), in.payload, in.length, {}, bytes >= past_cache_bytes && !passes_on);
  } else {
    std::size_t parts = 0;
    std::uint32_t part_crc = 0;
    for_spans(in.offset, in.offset + in.length,
              [&](const Span& span, std::size_t inside, std::size_t at, std::size_t count) {
                part_crc = write_span(receive, in, span, inside, at, count);
                ++parts;
              });
    const bool is_new = receive.reduce && together > 0 && (in.here > 0 || divisor(receive, together) > 1);
    if (is_new && passes_on) {
      const bool is_known = parts == 1 && in.here > 0 && in.contributors > 0;
      forward_crc = is_known ? part_crc : crc_of({.length = in.length, .offset = in.offset});
    }
  }
  for (std::uint8_t i = 0; i < receive.pass_count; ++i) {
    const Send& send = receive.passes[i];
    forwards_[send.to_next].push_back({.stage = send.stage,
                                       .length = in.length,
                                       .offset = in.offset,
                                       .crc = forward_crc,
                                       .crc_known = true,
                                       .contributors = together});
  }
}

// The CRC of what was written, if the segment is of one piece and was reduced; otherwise 0.
std::uint32_t Op::write_span(const Receive& receive, const Incoming& in, const Span& span, std::size_t inside,
                             std::size_t at, std::size_t count) {
  const bool passes_on = receive.pass_count > 0, past_cache = bytes >= past_cache_bytes;
  const kernels::Backup backup{saves() && receive.first_touch ? backup_.at() + at : nullptr, past_cache};
  std::byte* target = spec.kind == OpKind::reduce_scatter ? work(at) : span.target + inside;
  const std::byte* local = receive.after >= 0 ? target : span.source + inside;
  const std::byte* incoming = in.payload + (at - in.offset);
  const std::size_t items = count / item_bytes(span.dtype);
  const std::uint32_t by = divisor(receive, in.together());
  if (receive.reduce && in.here > 0 && in.contributors > 0) {
    return kernels::reduce_step(span.dtype, spec.reduce_op, target, local, incoming, items, backup, by,
                                passes_on && count == in.length, plan_.exchange && plan_.rank > 0);
  }
  if (in.contributors > 0) {
    kernels::overwrite(target, incoming, count, backup, past_cache && !passes_on);
  } else {
    if (backup.at != nullptr) std::memcpy(backup.at, target, count);
    const bool is_final = receive.last_reduce || !receive.reduce;
    if (receive.reduce && in.here > 0) std::memmove(target, local, count);
    else if (is_final) std::memset(target, 0, count);
  }
  if (receive.reduce && by > 1) kernels::divide(span.dtype, target, by, items);
  return 0;
}

// Reduces into the segment for the next hop, or passes the segment on as it came. Memory is written once the value is
// final.
void Op::write_quantised(const Receive& receive, const Incoming& in) {
  const std::uint32_t together = receive.reduce ? in.together() : in.contributors;
  const std::uint32_t by = divisor(receive, together);
  const bool reduces_here = receive.reduce && in.here > 0, has_value = in.contributors > 0;
  const bool is_new = reduces_here || (has_value && by > 1);  // otherwise it is passed on as it came
  std::vector<std::byte> forward(
      is_new || receive.pass_count > 0 ? wire_bytes(in.offset, segment_end(receive.chunk, in.offset)) : 0);
  std::size_t wire_at = 0;
  for_spans(in.offset, segment_end(receive.chunk, in.offset),
            [&](const Span& span, std::size_t inside, std::size_t at, std::size_t count) {
              const std::size_t items = count / item_bytes(span.dtype);
              const kernels::Backup backup{saves() ? backup_.at() + at : nullptr, bytes >= past_cache_bytes};
              const std::byte* incoming = in.payload + wire_at;
              const std::byte* local = span.source + inside;
              std::byte* encoded = forward.data() + wire_at;
              std::byte* target = span.target + inside;
              const auto finish = [&](const std::byte* with) {
                quantize::finish(spec.scheme, span.dtype, spec.reduce_op, encoded, incoming, with, items, by, target,
                                 backup);
              };
              wire_at += quantize::encoded_bytes(spec.scheme, span.dtype, items);
              if (reduces_here && has_value && receive.last_reduce) {
                finish(local);
              } else if (reduces_here && has_value) {
                quantize::reduce(spec.scheme, span.dtype, spec.reduce_op, encoded, incoming, local, items);
              } else if (reduces_here) {
                quantize::encode(spec.scheme, span.dtype, encoded, local, items);
                if (receive.last_reduce) quantize::decode(spec.scheme, span.dtype, target, encoded, items, backup);
              } else if (is_new) {
                finish(negative_zeros(span.dtype, items).data());
              } else if (receive.reduce && !receive.last_reduce) {
                return;
              } else if (has_value) {
                quantize::decode(spec.scheme, span.dtype, target, incoming, items, backup);
              } else {
                if (backup.at != nullptr) std::memcpy(backup.at, target, count);
                std::memset(target, 0, count);
              }
            });
  if (receive.pass_count == 0) return;
  std::uint32_t crc = in.crc;
  if (is_new) crc = crc32c(forward.data(), forward.size());
  else if (has_value) std::memcpy(forward.data(), in.payload, forward.size());
  const Payload shared = together > 0 ? Payload(std::move(forward)) : Payload();
  for (std::uint8_t i = 0; i < receive.pass_count; ++i) {
    const Send& send = receive.passes[i];
    forwards_[send.to_next].push_back({.stage = send.stage,
                                       .length = in.length,
                                       .offset = in.offset,
                                       .crc = crc,
                                       .crc_known = true,
                                       .encoded = shared,
                                       .contributors = together});
  }
}

Payload Op::own_payload() const {
  if (reduces() && !spec.contribute) return {};
  std::vector<std::byte> out;
  if (spec.kind == OpKind::broadcast && plan_.rank != spec.root) return out;
  out.reserve(bytes);
  for (const Span& span : spec.spans) out.insert(out.end(), span.source, span.source + span.bytes);
  return out;
}

bool Op::payloads_fit() const {
  if (payloads.size() != plan_.size) return false;
  for (std::uint32_t rank = 0; rank < plan_.size; ++rank) {
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
  const std::uint32_t n = plan_.size;
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
  const std::size_t from = scatters ? bytes / n * plan_.rank : 0;
  const std::size_t to = scatters ? from + bytes / n : bytes;
  std::vector<const std::byte*> operands;
  for (std::uint32_t rank = 0; rank < n; ++rank) {
    if (payloads[rank].is_there()) operands.push_back(payloads[rank].data());
    else set_absent(rank);
  }
  const auto contributors = static_cast<std::uint32_t>(operands.size());
  for_spans(from, to, [&](const Span& span, std::size_t inside, std::size_t at, std::size_t count) {
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
  for (const Receive& receive : plan_.receives) {
    if (receive.chunk < 0 || !receive.first_touch) continue;
    const std::size_t begin = plan_.chunk_begin[receive.chunk];
    const std::size_t end = plan_.chunk_begin[receive.chunk + 1];
    for (std::size_t at = begin; at < end; at += plan_.segment_bytes) {
      if (!received(static_cast<std::uint16_t>(&receive - plan_.receives.data()), at)) continue;
      for_spans(at, segment_end(receive.chunk, at),
                [&](const Span& span, std::size_t inside, std::size_t where, std::size_t count) {
                  std::memcpy(span.target + inside, backup_.at() + where, count);
                });
    }
  }
  std::fill(bitmap_.begin(), bitmap_.end(), 0);
  received_ = 0;
}

void Op::deliver() {
  if (small || spec.kind != OpKind::reduce_scatter) return;
  const std::size_t begin = plan_.chunk_begin[plan_.rank];
  const std::size_t count = plan_.chunk_bytes(static_cast<std::int32_t>(plan_.rank));
  if (count) std::memcpy(spec.gathered, backup_.at() + begin, count);
}

void Op::release_memory(BackupPool& pool) {
  for (const bool to_next : {false, true}) {
    own_[to_next].clear();
    forwards_[to_next].clear();
    again_[to_next].clear();
  }
  early_.clear();
  pool.give_back(std::move(backup_));
  backup_ = {};
}

}  // namespace ringfold
