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
// On several paths the slow one holds the op up by as long as its last segment takes. A thousandth of what travels is soon
// through; but every segment has a price.
std::size_t fine_segment(std::size_t bytes, std::uint32_t size) {
  const std::size_t chunk = size > 2 ? bytes / size : bytes;
  std::size_t segment = smallest_fine_segment;
  while (segment * 2 * 1024 <= chunk) segment *= 2;
  return segment;
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

// The last committed small op of every tag is kept whole, for a seal to carry. All of them together must fit into a control
// frame: a few tags may have large payloads, many tags smaller ones, and the rest goes around the ring. Every peer decides
// this from what it knows without asking: tag, bytes and members.
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
  mismatch_told = deadline_told = false;
  for (const bool to_next : {false, true}) {
    peer_ready[to_next] = told_ready[to_next] = false;
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
  if (saves() || spec.kind == OpKind::reduce_scatter) {
    if (backup_.bytes() < bytes) backup_ = pool.take(bytes);
  }
  if (gathers) std::memcpy(spec.gathered + plan_.chunk_begin[rank], spec.spans.front().source, bytes);
  for (const Origin& origin : plan_.origins) {
    const std::size_t end = plan_.chunk_begin[origin.chunk + 1];
    for (std::size_t at = plan_.chunk_begin[origin.chunk]; at < end; at += plan_.segment_bytes) {
      const std::uint32_t length = wire_bytes(at, segment_end(origin.chunk, at));
      own_[origin.send.to_next].push_back({origin.send.stage, true, length, at, 0, false});
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

void Op::send_again(bool to_next, Sendable item) {
  item.again = true;
  again_[to_next].push_back(std::move(item));
}

bool Op::superseded(const Sendable& item) const {
  if (plan_.exchange || item.encoded.size() > 0) return false;
  for (std::size_t stage = item.stage; stage < plan_.receives.size(); ++stage) {
    const Receive& receive = plan_.receives[stage];
    if (receive.chunk < 0) continue;
    const bool same = item.offset >= plan_.chunk_begin[receive.chunk] && item.offset < plan_.chunk_begin[receive.chunk + 1];
    if (same && received(static_cast<std::uint16_t>(stage), item.offset)) return true;
  }
  return false;
}

Sendable Op::take_sendable(bool to_next) {
  std::deque<Sendable>& queue = !again_[to_next].empty()      ? again_[to_next]
                                : forwards_[to_next].empty() ? own_[to_next]
                                                             : forwards_[to_next];
  Sendable item = std::move(queue.front());
  queue.pop_front();
  if (quantised() && item.own) {
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
                      std::uint32_t length, std::uint32_t crc, bool ignore_bitmap) {
  if (stage >= plan_.receives.size() || plan_.receives[stage].chunk < 0) return Applied::invalid;
  const Receive& receive = plan_.receives[stage];
  const std::size_t begin = plan_.chunk_begin[receive.chunk];
  const std::size_t end = plan_.chunk_begin[receive.chunk + 1];
  if (receive.from_next != from_next) return Applied::invalid;
  if (offset < begin || offset >= end || (offset - begin) % plan_.segment_bytes != 0) return Applied::invalid;
  if (length != wire_bytes(offset, segment_end(receive.chunk, offset))) return Applied::invalid;
  const bool seen = received(stage, offset);
  if (seen && !ignore_bitmap) return Applied::duplicate;
  if (receive.after >= 0 && !received(static_cast<std::uint16_t>(receive.after), offset)) {
    for (const Early& other : early_) {
      if (other.stage == stage && other.offset == offset) return Applied::duplicate;
    }
    early_.push_back({stage, offset, crc, {payload, payload + length}});
    return Applied::yes;
  }
  if (!seen) {
    const std::size_t bit = receive.first_bit + (offset - begin) / plan_.segment_bytes;
    bitmap_[bit / 64] |= std::uint64_t{1} << (bit % 64);
    ++received_;
  }
  if (quantised()) write_quantised(receive, offset, payload, length, crc);
  else write(receive, offset, payload, length, crc);
  apply_early(stage, offset);
  return Applied::yes;
}

void Op::apply_early(std::uint16_t after, std::uint64_t offset) {
  for (std::size_t i = 0; i < early_.size(); ++i) {
    const Receive& receive = plan_.receives[early_[i].stage];
    if (receive.after != after || early_[i].offset != offset) continue;
    const Early found = std::move(early_[i]);
    early_.erase(early_.begin() + static_cast<std::ptrdiff_t>(i));
    apply(receive.from_next, found.stage, offset, found.payload.data(),
          static_cast<std::uint32_t>(found.payload.size()), found.crc);
    return;
  }
}

// Reduces or overwrites, saves what was there, and queues the result for the next hops.
void Op::write(const Receive& receive, std::uint64_t offset, const std::byte* payload, std::uint32_t length,
               std::uint32_t crc) {
  const bool passes_on = receive.pass_count > 0;
  const std::uint32_t divisor =
      receive.last_reduce && spec.reduce_op == kernels::ReduceOp::avg ? plan_.size : 1;
  const bool save = saves() && receive.first_touch;
  const bool incoming_first = plan_.exchange && plan_.rank > 0;
  std::uint32_t forward_crc = crc;
  if (spec.kind == OpKind::all_gather) {
    kernels::overwrite(work(offset), payload, length, {}, bytes >= past_cache_bytes && !passes_on);
  } else {
    std::size_t parts = 0;
    std::uint32_t part_crc = 0;
    for_spans(offset, offset + length, [&](const Span& span, std::size_t inside, std::size_t at, std::size_t count) {
      const kernels::Backup backup{save ? backup_.at() + at : nullptr, bytes >= past_cache_bytes};
      std::byte* target = spec.kind == OpKind::reduce_scatter ? work(at) : span.target + inside;
      const std::byte* local = receive.after >= 0 ? target : span.source + inside;
      const std::byte* incoming = payload + (at - offset);
      if (receive.reduce) {
        part_crc = kernels::reduce_step(span.dtype, spec.reduce_op, target, local, incoming,
                                        count / item_bytes(span.dtype), backup, divisor,
                                        passes_on && count == length, incoming_first);
      } else {
        kernels::overwrite(target, incoming, count, backup, bytes >= past_cache_bytes && !passes_on);
      }
      ++parts;
    });
    if (receive.reduce && passes_on) {
      forward_crc = parts == 1 ? part_crc : crc_of({0, false, length, offset, 0, false});
    }
  }
  for (std::uint8_t i = 0; i < receive.pass_count; ++i) {
    const Send& send = receive.passes[i];
    forwards_[send.to_next].push_back({send.stage, false, length, offset, forward_crc, true});
  }
}

// Reduces into the segment for the next hop, or passes the segment on as it came. Memory is written once the value is final.
void Op::write_quantised(const Receive& receive, std::uint64_t offset, const std::byte* payload, std::uint32_t length,
                         std::uint32_t crc) {
  const std::uint32_t divisor = receive.last_reduce && spec.reduce_op == kernels::ReduceOp::avg ? plan_.size : 1;
  std::vector<std::byte> forward(receive.pass_count > 0 || receive.reduce ? length : 0);
  std::size_t wire_at = 0;
  for_spans(offset, segment_end(receive.chunk, offset),
            [&](const Span& span, std::size_t inside, std::size_t at, std::size_t count) {
              const std::size_t items = count / item_bytes(span.dtype);
              const kernels::Backup backup{saves() ? backup_.at() + at : nullptr, bytes >= past_cache_bytes};
              const std::byte* incoming = payload + wire_at;
              std::byte* target = span.target + inside;
              if (receive.last_reduce) {
                quantize::finish(spec.scheme, span.dtype, spec.reduce_op, forward.data() + wire_at, incoming,
                                 span.source + inside, items, divisor, target, backup);
              } else if (receive.reduce) {
                quantize::reduce(spec.scheme, span.dtype, spec.reduce_op, forward.data() + wire_at, incoming,
                                 span.source + inside, items);
              } else {
                quantize::decode(spec.scheme, span.dtype, target, incoming, items, backup);
              }
              wire_at += quantize::encoded_bytes(spec.scheme, span.dtype, items);
            });
  if (receive.pass_count == 0) return;
  if (receive.reduce) crc = crc32c(forward.data(), length);
  else std::memcpy(forward.data(), payload, length);
  const Payload shared(std::move(forward));
  for (std::uint8_t i = 0; i < receive.pass_count; ++i) {
    const Send& send = receive.passes[i];
    forwards_[send.to_next].push_back({send.stage, false, length, offset, crc, true, shared});
  }
}

std::vector<std::byte> Op::own_payload() const {
  std::vector<std::byte> out;
  if (spec.kind == OpKind::broadcast && plan_.rank != spec.root) return out;
  out.reserve(bytes);
  for (const Span& span : spec.spans) out.insert(out.end(), span.source, span.source + span.bytes);
  return out;
}

bool Op::payloads_fit() const {
  if (payloads.size() != plan_.size) return false;
  for (std::uint32_t rank = 0; rank < plan_.size; ++rank) {
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
  for_spans(from, to, [&](const Span& span, std::size_t inside, std::size_t at, std::size_t count) {
    std::byte* target = scatters ? spec.gathered + (at - from) : span.target + inside;
    const std::size_t items = count / item_bytes(span.dtype);
    kernels::reduce(span.dtype, spec.reduce_op, target, payloads[0].data() + at, payloads[1].data() + at, items);
    for (std::uint32_t rank = 2; rank < n; ++rank) {
      kernels::reduce(span.dtype, spec.reduce_op, target, target, payloads[rank].data() + at, items);
    }
    if (spec.reduce_op == kernels::ReduceOp::avg) kernels::divide(span.dtype, target, n, items);
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

void Op::let_go_of_memory(BackupPool& pool) {
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
