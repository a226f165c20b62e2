#include "convert.hpp"

#include <algorithm>

namespace ringfold {

Bytes from_python(const nb::bytes& bytes) {
  const auto* at = reinterpret_cast<const std::byte*>(bytes.c_str());
  return {at, at + bytes.size()};
}

nb::bytes to_python(const Bytes& bytes) { return nb::bytes(reinterpret_cast<const char*>(bytes.data()), bytes.size()); }

nb::dict to_python(const Stats& stats) {
  nb::dict out;
  out["committed"] = stats.committed;
  out["aborted"] = stats.aborted;
  out["restarted"] = stats.restarted;
  out["sent_bytes"] = stats.sent_bytes;
  out["received_bytes"] = stats.received_bytes;
  out["duplicates"] = stats.duplicates;
  out["drained"] = stats.drained;
  out["reissued"] = stats.reissued;
  out["lanes_lost"] = stats.lanes_lost;
  out["lane_violations"] = stats.lane_violations;
  out["memory_bytes"] = stats.memory_bytes;
  out["op_bytes"] = stats.op_bytes;
  out["busy_ns"] = stats.busy;
  out["waited_ns"] = stats.waited;
  out["blocked_ns"] = stats.blocked;
  for (std::size_t i = 0; i < stats.durations.size(); ++i) {
    out[("duration_" + std::to_string(i)).c_str()] = stats.durations[i];
  }
  return out;
}

namespace {

constexpr std::size_t least_blocks_bytes = std::size_t{1} << 20;

using Range = std::pair<const std::byte*, const std::byte*>;

std::vector<Range> sorted_ranges(std::vector<Range> ranges) {
  std::erase_if(ranges, [](const Range& range) { return range.first == range.second; });
  std::sort(ranges.begin(), ranges.end());
  return ranges;
}

// Writing to memory that is still to be read would corrupt the op: `out` is the buffers themselves, or apart from them.
void settle_aliases(OpSpec& spec, const std::vector<Array>& target) {
  std::vector<Range> sources, written;
  bool same = !target.empty() && spec.gathered == nullptr;
  for (const Span& span : spec.spans) {
    sources.emplace_back(span.source, span.source + span.bytes);
    same &= span.target == span.source;
    if (target.empty()) written.emplace_back(span.target, span.target + span.bytes);
  }
  for (const Array& array : target) {
    const auto* at = static_cast<const std::byte*>(array.data());
    written.emplace_back(at, at + array.nbytes());
  }
  written = sorted_ranges(std::move(written));
  for (std::size_t i = 1; i < written.size(); ++i) {
    if (written[i].first < written[i - 1].second) throw nb::value_error("the same memory is written twice");
  }
  if (same) spec.in_place = true;
  if (spec.in_place) return;
  for (const Range& source : sorted_ranges(std::move(sources))) {
    const auto after = std::partition_point(written.begin(), written.end(),
                                            [&](const Range& range) { return range.second <= source.first; });
    if (after != written.end() && after->first < source.second) {
      throw nb::value_error("out= overlaps the buffers: give the buffers themselves, or memory apart from them");
    }
  }
}

// Python reports this with a better text before; here it protects the engine.
quantize::Scheme checked_scheme(int quantisation, const OpSpec& spec) {
  if (quantisation < 0 || quantisation >= static_cast<int>(quantize::scheme_count)) {
    throw nb::value_error("unknown quantisation");
  }
  const auto scheme = static_cast<quantize::Scheme>(quantisation);
  if (scheme == quantize::Scheme::none) return scheme;
  bool fits = spec.kind == OpKind::all_reduce && quantize::supports(spec.reduce_op);
  for (const Span& span : spec.spans) fits = fits && quantize::supports(span.dtype);
  if (!fits) throw nb::value_error("only a sum, avg, min or max all_reduce of f16, bf16 or f32 can be quantised");
  return scheme;
}

// An op that is small enough to travel inside Done reads its memory at once.
BlocksPtr checked_blocks(const BlocksPtr& blocks, const OpSpec& spec) {
  if (blocks == nullptr) return blocks;
  std::size_t bytes = 0;
  for (const Span& span : spec.spans) bytes += span.bytes;
  if (spec.kind != OpKind::all_reduce || bytes < least_blocks_bytes || blocks->bytes() != bytes) {
    throw nb::value_error("blocks are for an all_reduce of a MiB or more, and end where it ends");
  }
  return blocks;
}

}  // namespace

Call make_call(const OpRequest& request) {
  const auto& source = request.source;
  const auto& target = request.target;
  const auto& dtypes = request.dtypes;
  if (request.kind < 0 || request.kind > 4 || request.reduce_op < 0 || request.reduce_op > 4)
    throw nb::value_error("unknown kind or reduce op");
  if (request.retry < 0 || request.retry > 2) throw nb::value_error("unknown kind of retry");
  if (dtypes.size() != source.size()) throw nb::value_error("one dtype per array");
  Call call;
  call.spec.kind = static_cast<OpKind>(request.kind);
  call.spec.reduce_op = static_cast<kernels::ReduceOp>(request.reduce_op);
  call.spec.tag = request.tag;
  call.spec.root = static_cast<std::uint16_t>(request.root);
  call.spec.retry = static_cast<Retry>(request.retry);
  call.spec.timeout = request.timeout;
  call.spec.again = request.again;
  call.spec.contribute = request.contribute;
  call.spec.in_place = !target.has_value();
  const bool gathers = call.spec.kind == OpKind::all_gather || call.spec.kind == OpKind::reduce_scatter;
  if (gathers && (!target || target->size() != 1 || source.size() != 1)) {
    throw nb::value_error("all_gather and reduce_scatter take one array and one target");
  }
  if (target && !gathers && target->size() != source.size()) throw nb::value_error("one target per array");
  for (std::size_t i = 0; i < source.size(); ++i) {
    if (dtypes[i] < 0 || dtypes[i] > 11) throw nb::value_error("unknown dtype");
    Span span;
    span.dtype = static_cast<kernels::DType>(dtypes[i]);
    span.bytes = source[i].nbytes();
    span.source = static_cast<std::byte*>(const_cast<void*>(static_cast<const void*>(source[i].data())));
    span.target = span.source;
    if (span.bytes % kernels::item_bytes(span.dtype) != 0) throw nb::value_error("an array with a broken item");
    if (target && !gathers) {
      if ((*target)[i].nbytes() != span.bytes) throw nb::value_error("a target of another size");
      span.target = static_cast<std::byte*>((*target)[i].data());
    }
    call.spec.spans.push_back(span);
  }
  if (gathers) call.spec.gathered = static_cast<std::byte*>(target->front().data());
  call.spec.scheme = checked_scheme(request.quantisation, call.spec);
  settle_aliases(call.spec, target ? *target : std::vector<Array>{});
  call.spec.blocks = checked_blocks(request.blocks, call.spec);
  call.arrays = source;
  if (target) call.arrays.insert(call.arrays.end(), target->begin(), target->end());
  return call;
}

}  // namespace ringfold
