#include "ringfold/part.hpp"

#include <algorithm>
#include <cassert>

#include "ringfold/op.hpp"

namespace ringfold {
namespace {

using kernels::item_bytes;

// The backup of a larger op would only push segments out of the cache.
constexpr std::size_t past_cache_bytes = std::size_t{4} << 20;

// What leaves every value as it is when it is added: also a zero of either sign.
Bytes negative_zeros(kernels::DType dtype, std::size_t items) {
  const std::size_t size = item_bytes(dtype);
  Bytes out(items * size);
  for (std::size_t i = 0; i < items; ++i) out[i * size + size - 1] = std::byte{0x80};
  return out;
}

}  // namespace

OpPart::OpPart(const Op& op, std::uint32_t channel, Plan plan)
    : op(op),
      channel(channel),
      sides(plan.bytes_from.size()),
      plan_(std::move(plan)),
      bitmap_((plan_.receive_segments + 63) / 64),
      stage_counts_(plan_.receives.size()),
      is_filling_(op.spec.blocks != nullptr && !op.spec.blocks->are_all_filled()) {
  queue_own();
  if (quantised() && !op.small) count_wire_bytes();
}

const OpSpec& OpPart::op_spec() const { return op.spec; }

void OpPart::queue_own() {
  for (const Origin& origin : plan_.origins) {
    const Range chunk = plan_.chunk(origin.chunk);
    for (std::size_t at = chunk.begin; at < chunk.end; at += plan_.segment_bytes) {
      sides[origin.send.to].own.push({.stage = origin.send.stage,
                                      .own = true,
                                      .length = wire_bytes(at, segment_end(origin.chunk, at)),
                                      .offset = at,
                                      .contributors = !op.reduces() || op.spec.contribute ? 1u : 0u});
    }
  }
}

std::size_t OpPart::segment_end(std::int32_t chunk, std::size_t offset) const {
  return std::min(offset + plan_.segment_bytes, plan_.chunk(chunk).end);
}

std::uint32_t OpPart::wire_bytes(std::size_t from, std::size_t to) const {
  if (!quantised()) return static_cast<std::uint32_t>(to - from);
  std::size_t sum = 0;
  for_spans(op.spec.spans, from, to, [&](const Span& span, std::size_t, std::size_t, std::size_t count) {
    sum += quantize::encoded_bytes(op.spec.scheme, span.dtype, count / item_bytes(span.dtype));
  });
  return static_cast<std::uint32_t>(sum);
}

// What is to come counts as it travels: whether it all fits into what may be sent eagerly.
void OpPart::count_wire_bytes() {
  std::fill(plan_.bytes_from.begin(), plan_.bytes_from.end(), 0);
  for (const Receive& receive : plan_.receives) {
    if (receive.chunk < 0) continue;
    const Range chunk = plan_.chunk(receive.chunk);
    for (std::size_t at = chunk.begin; at < chunk.end; at += plan_.segment_bytes) {
      plan_.bytes_from[receive.from] += wire_bytes(at, segment_end(receive.chunk, at));
    }
  }
}

Bytes OpPart::encoded(std::size_t from, std::size_t to) const {
  Bytes out(wire_bytes(from, to));
  std::size_t at = 0;
  for_spans(op.spec.spans, from, to, [&](const Span& span, std::size_t inside, std::size_t, std::size_t count) {
    const std::size_t items = count / item_bytes(span.dtype);
    quantize::encode(op.spec.scheme, span.dtype, out.data() + at, span.source + inside, items);
    at += quantize::encoded_bytes(op.spec.scheme, span.dtype, items);
  });
  return out;
}

void OpPart::resend(Side to, Sendable item) {
  item.again = true;
  sides[to].again.push(std::move(item));
}

bool OpPart::superseded(const Sendable& item) const {
  if (plan_.exchange || item.encoded.size() > 0) return false;
  for (std::size_t stage = item.stage; stage < plan_.receives.size(); ++stage) {
    const Receive& receive = plan_.receives[stage];
    if (receive.chunk < 0) continue;
    const bool same = plan_.chunk(receive.chunk).has(item.offset);
    if (same && received(static_cast<std::uint16_t>(stage), item.offset)) return true;
  }
  return false;
}

Sendable OpPart::take_sendable(Side to) {
  SideState& side = sides[to];
  Fifo<Sendable>& queue = !side.again.empty() ? side.again : side.forwards.empty() ? side.own : side.forwards;
  Sendable item = queue.pop();
  if (quantised() && item.own && item.contributors > 0) {
    item.encoded = encoded(item.offset, segment_end(plan_.origins.front().chunk, item.offset));
    item.own = false;
  }
  return item;
}

// Where the value at `at` of the virtual range lives while the op runs, if it does not live in the spans' targets.
std::byte* OpPart::work(std::size_t at) const {
  if (op.spec.kind == OpKind::all_gather) return op.spec.gathered + at;
  if (op.spec.kind == OpKind::reduce_scatter) return op.backup() + at;
  return nullptr;
}

void OpPart::pieces(const Sendable& item, std::vector<Piece>& out) const {
  if (item.contributors == 0) return;
  if (item.encoded.size() > 0) {
    out.push_back({item.encoded.data(), item.encoded.size()});
    return;
  }
  const bool gathers = op.spec.kind == OpKind::all_gather;
  if (gathers || (op.spec.kind == OpKind::reduce_scatter && !item.own)) {
    out.push_back({work(item.offset), item.length});
    return;
  }
  if (plan_.exchange && item.own && op.saves() && received(item.stage, item.offset)) {
    out.push_back({op.backup() + item.offset, item.length});  // overwritten meanwhile: the original is in the backup
    return;
  }
  for_spans(op.spec.spans, item.offset, item.offset + item.length,
            [&](const Span& span, std::size_t inside, std::size_t, std::size_t count) {
              out.push_back({(item.own ? span.source : span.target) + inside, count});
            });
}

std::size_t OpPart::bit_of(std::uint16_t stage, std::uint64_t offset) const {
  const Receive& receive = plan_.receives[stage];
  return receive.first_bit + (offset - plan_.chunk(receive.chunk).begin) / plan_.segment_bytes;
}

bool OpPart::received(std::uint16_t stage, std::uint64_t offset) const {
  const std::size_t bit = bit_of(stage, offset);
  return (bitmap_[bit / 64] >> (bit % 64) & 1) != 0;
}

std::uint32_t OpPart::crc_of(const Sendable& item) const {
  std::vector<Piece> memory;
  pieces(item, memory);
  std::uint32_t crc = 0;
  for (const Piece& piece : memory) crc = crc32c(piece.at, piece.bytes, crc);
  return crc;
}

OpPart::Applied OpPart::apply(Side from, std::uint16_t stage, std::uint64_t offset, const std::byte* payload,
                              std::uint32_t length, std::optional<std::uint32_t> crc, std::uint32_t contributors,
                              bool ignore_bitmap) {
  if (stage >= plan_.receives.size() || plan_.receives[stage].chunk < 0) return Applied::invalid;
  const Receive& receive = plan_.receives[stage];
  const Range chunk = plan_.chunk(receive.chunk);
  if (receive.from != from) return Applied::invalid;
  if (!chunk.has(offset) || (offset - chunk.begin) % plan_.segment_bytes != 0) return Applied::invalid;
  const std::uint32_t value_bytes = wire_bytes(offset, segment_end(receive.chunk, offset));
  if (length != (contributors > 0 ? value_bytes : 0)) return Applied::invalid;
  const bool seen = received(stage, offset);
  if (seen && !ignore_bitmap) return Applied::duplicate;
  if (must_wait(receive, offset)) {
    for (const Early& other : early_) {
      if (other.stage == stage && other.offset == offset) return Applied::duplicate;
    }
    early_.push_back({stage, offset, crc, contributors, {payload, payload + length}});
    return Applied::yes;
  }
  const std::uint32_t own = op.spec.contribute ? 1 : 0;
  const Incoming in{offset,       payload,
                    value_bytes,  crc,
                    contributors, receive.after >= 0 ? stage_counts_[static_cast<std::size_t>(receive.after)] : own};
  if (!count(receive, stage, in)) return Applied::invalid;
  if (!seen) {
    const std::size_t bit = bit_of(stage, offset);
    bitmap_[bit / 64] |= std::uint64_t{1} << (bit % 64);
    ++received_;
  }
  if (quantised()) write_quantised(receive, in);
  else write(receive, in);
  if (op.spec.blocks != nullptr && !seen) note_final(receive, in);
  apply_early(stage, offset);
  return Applied::yes;
}

// For the segment that it is reduced into, or for memory to be filled.
bool OpPart::must_wait(const Receive& receive, std::uint64_t offset) const {
  if (receive.after >= 0 && !received(static_cast<std::uint16_t>(receive.after), offset)) return true;
  return !is_filled(offset, segment_end(receive.chunk, offset));
}

bool OpPart::is_filled(std::size_t from, std::size_t to) const {
  return !is_filling_ || op.spec.blocks->is_filled(from, to);
}

bool OpPart::is_here(const Sendable& own) const {
  if (!is_filling_ || own.contributors == 0) return true;
  return is_filled(own.offset,
                   quantised() ? segment_end(plan_.origins.front().chunk, own.offset) : own.offset + own.length);
}

bool OpPart::look_at_blocks() {
  if (!is_filling_) return false;
  const std::size_t filled = op.spec.blocks->filled();
  if (filled == filled_) return false;
  filled_ = filled;
  is_filling_ = filled < op.spec.blocks->count();
  while (apply_next_filled()) {
  }
  return true;
}

bool OpPart::apply_next_filled() {
  for (std::size_t i = 0; i < early_.size(); ++i) {
    if (must_wait(plan_.receives[early_[i].stage], early_[i].offset)) continue;
    apply_again(i);
    return true;
  }
  return false;
}

void OpPart::note_final(const Receive& receive, const Incoming& in) {
  if (receive.last_reduce || !receive.reduce)
    op.spec.blocks->add_final(in.offset, segment_end(receive.chunk, in.offset));
}

// Counts the contributors of the value that a segment makes. False: they cannot be so many.
bool OpPart::count(const Receive& receive, std::uint16_t stage, const Incoming& in) {
  if (!op.reduces()) return in.contributors == 1;
  const std::uint32_t together = receive.reduce ? in.together() : in.contributors;
  if (in.contributors > plan_.size || together > plan_.size) return false;
  stage_counts_[stage] = together;
  if (receive.reduce && !receive.last_reduce) return true;
  if (final_count_ && together != *final_count_) return false;
  final_count_ = together;
  return true;
}

void OpPart::apply_early(std::uint16_t after, std::uint64_t offset) {
  for (std::size_t i = 0; i < early_.size(); ++i) {
    const Receive& receive = plan_.receives[early_[i].stage];
    if (receive.after != after || early_[i].offset != offset) continue;
    if (!must_wait(receive, offset)) apply_again(i);
    return;
  }
}

void OpPart::apply_again(std::size_t early) {
  const Early found = std::move(early_[early]);
  early_.erase(early_.begin() + static_cast<std::ptrdiff_t>(early));
  apply(plan_.receives[found.stage].from, found.stage, found.offset, found.payload.data(),
        static_cast<std::uint32_t>(found.payload.size()), found.crc, found.contributors);
}

std::uint32_t OpPart::divisor(const Receive& receive, std::uint32_t contributors) const {
  if (!receive.last_reduce || op.spec.reduce_op != kernels::ReduceOp::avg) return 1;
  return op.divide_by_size ? plan_.size : contributors;
}

// Reduces or overwrites, saves what was there, and queues the result for the next hops.
void OpPart::write(const Receive& receive, const Incoming& in) {
  const bool passes_on = receive.passes_on();
  const std::uint32_t together = receive.reduce ? in.together() : in.contributors;
  std::optional<std::uint32_t> forward_crc = in.crc;
  if (op.spec.kind == OpKind::all_gather) {
    kernels::overwrite(work(in.offset), in.payload, in.length, {}, op.bytes >= past_cache_bytes && !passes_on);
  } else {
    std::size_t parts = 0;
    std::uint32_t part_crc = 0;
    for_spans(op.spec.spans, in.offset, in.offset + in.length,
              [&](const Span& span, std::size_t inside, std::size_t at, std::size_t count) {
                part_crc = write_span(receive, in, span, inside, at, count);
                ++parts;
              });
    const bool is_new = receive.reduce && together > 0 && (in.here > 0 || divisor(receive, together) > 1);
    if (is_new && passes_on) {
      const bool is_known = checksums && parts == 1 && in.here > 0 && in.contributors > 0;
      forward_crc = is_known ? std::optional(part_crc) : std::nullopt;
    }
  }
  pass_on(receive, in, forward_crc, {}, together);
}

void OpPart::pass_on(const Receive& receive, const Incoming& in, std::optional<std::uint32_t> crc,
                     const Payload& encoded, std::uint32_t contributors) {
  const auto pass = [&](const Send& send) {
    sides[send.to].forwards.push({.stage = send.stage,
                                  .length = in.length,
                                  .offset = in.offset,
                                  .crc = crc.value_or(0),
                                  .crc_known = crc.has_value(),
                                  .encoded = encoded,
                                  .contributors = contributors});
  };
  for (std::uint8_t i = 0; i < receive.pass_count; ++i) pass(receive.passes[i]);
  if (receive.to_all) std::for_each(plan_.to_all.begin(), plan_.to_all.end(), pass);
}

// The CRC of what was written, if the segment is of one piece and was reduced; otherwise 0.
std::uint32_t OpPart::write_span(const Receive& receive, const Incoming& in, const Span& span, std::size_t inside,
                                 std::size_t at, std::size_t count) {
  const bool passes_on = receive.passes_on(), past_cache = op.bytes >= past_cache_bytes;
  const kernels::Backup backup{op.saves() && receive.first_touch ? op.backup() + at : nullptr, past_cache};
  std::byte* target = op.spec.kind == OpKind::reduce_scatter ? work(at) : span.target + inside;
  const std::byte* local = receive.after >= 0 ? target : span.source + inside;
  const std::byte* incoming = in.payload + (at - in.offset);
  const std::size_t items = count / item_bytes(span.dtype);
  const std::uint32_t by = divisor(receive, in.together());
  if (receive.reduce && in.here > 0 && in.contributors > 0) {
    return kernels::reduce_step(span.dtype, op.spec.reduce_op, target, local, incoming, items, backup, by,
                                passes_on && checksums && count == in.length, plan_.exchange && plan_.rank > 0);
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
void OpPart::write_quantised(const Receive& receive, const Incoming& in) {
  const std::uint32_t together = receive.reduce ? in.together() : in.contributors;
  const std::uint32_t by = divisor(receive, together);
  const bool reduces_here = receive.reduce && in.here > 0, has_value = in.contributors > 0;
  const bool is_new = reduces_here || (has_value && by > 1);  // otherwise it is passed on as it came
  Bytes forward(is_new || receive.pass_count > 0 ? wire_bytes(in.offset, segment_end(receive.chunk, in.offset)) : 0);
  std::size_t wire_at = 0;
  for_spans(op.spec.spans, in.offset, segment_end(receive.chunk, in.offset),
            [&](const Span& span, std::size_t inside, std::size_t at, std::size_t count) {
              const std::size_t items = count / item_bytes(span.dtype);
              const kernels::Backup backup{op.saves() ? op.backup() + at : nullptr, op.bytes >= past_cache_bytes};
              const std::byte* incoming = in.payload + wire_at;
              const std::byte* local = span.source + inside;
              std::byte* encoded = forward.data() + wire_at;
              std::byte* target = span.target + inside;
              const auto finish = [&](const std::byte* with) {
                quantize::finish(op.spec.scheme, span.dtype, op.spec.reduce_op, encoded, incoming, with, items, by,
                                 target, backup);
              };
              wire_at += quantize::encoded_bytes(op.spec.scheme, span.dtype, items);
              if (reduces_here && has_value && receive.last_reduce) {
                finish(local);
              } else if (reduces_here && has_value) {
                quantize::reduce(op.spec.scheme, span.dtype, op.spec.reduce_op, encoded, incoming, local, items);
              } else if (reduces_here) {
                quantize::encode(op.spec.scheme, span.dtype, encoded, local, items);
                if (receive.last_reduce) quantize::decode(op.spec.scheme, span.dtype, target, encoded, items, backup);
              } else if (is_new) {
                finish(negative_zeros(span.dtype, items).data());
              } else if (receive.reduce && !receive.last_reduce) {
                return;
              } else if (has_value) {
                quantize::decode(op.spec.scheme, span.dtype, target, incoming, items, backup);
              } else {
                if (backup.at != nullptr) std::memcpy(backup.at, target, count);
                std::memset(target, 0, count);
              }
            });
  if (receive.pass_count == 0) return;
  std::optional<std::uint32_t> crc = in.crc;
  if (is_new) crc = checksums ? std::optional(crc32c(forward.data(), forward.size())) : std::nullopt;
  else if (has_value) std::memcpy(forward.data(), in.payload, forward.size());
  pass_on(receive, in, crc, together > 0 ? Payload(std::move(forward)) : Payload(), together);
}

void OpPart::restore() {
  for (const Receive& receive : plan_.receives) {
    if (receive.chunk < 0 || !receive.first_touch) continue;
    const Range chunk = plan_.chunk(receive.chunk);
    for (std::size_t at = chunk.begin; at < chunk.end; at += plan_.segment_bytes) {
      if (!received(static_cast<std::uint16_t>(&receive - plan_.receives.data()), at)) continue;
      for_spans(op.spec.spans, at, segment_end(receive.chunk, at),
                [&](const Span& span, std::size_t inside, std::size_t where, std::size_t count) {
                  std::memcpy(span.target + inside, op.backup() + where, count);
                });
    }
  }
  std::fill(bitmap_.begin(), bitmap_.end(), 0);
  received_ = 0;
}

}  // namespace ringfold
