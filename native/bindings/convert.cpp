#include "convert.hpp"

#include <algorithm>

namespace ringfold {

Bytes from_python(const nb::bytes& bytes) {
  const auto* at = reinterpret_cast<const std::byte*>(bytes.c_str());
  return {at, at + bytes.size()};
}

nb::bytes to_python(const Bytes& bytes) { return nb::bytes(reinterpret_cast<const char*>(bytes.data()), bytes.size()); }

nb::object to_python(const std::optional<Payloads>& payloads) {
  if (!payloads) return nb::none();
  nb::list out;
  for (const Payload& payload : *payloads) {
    if (payload.is_there()) out.append(nb::bytes(reinterpret_cast<const char*>(payload.data()), payload.size()));
    else out.append(nb::none());
  }
  return out;
}

nb::tuple to_python(const Event& event) {
  switch (event.kind) {
    case Event::Kind::opened:
      return nb::make_tuple("opened", event.conn);
    case Event::Kind::accepted:
      return nb::make_tuple("accepted", event.conn, event.text);
    case Event::Kind::message:
      return nb::make_tuple("message", event.conn, to_python(event.body));
    case Event::Kind::closed:
      return nb::make_tuple("closed", event.conn, event.text);
    case Event::Kind::link_lost:
      return nb::make_tuple("link_lost", event.peer, event.outgoing, event.text);
    case Event::Kind::mismatch:
      return nb::make_tuple("mismatch", event.peer, event.epoch, event.tag, event.sequence, to_python(event.body),
                            to_python(event.other));
    case Event::Kind::op_timeout:
      return nb::make_tuple("op_timeout", event.epoch, event.tag, event.sequence, event.milliseconds,
                            to_python(event.body));
    case Event::Kind::op_cancelled:
      return nb::make_tuple("op_cancelled", event.epoch, event.tag, event.sequence);
    case Event::Kind::silent:
      return nb::make_tuple("silent", event.conn, event.milliseconds);
    case Event::Kind::blocks:
      return nb::make_tuple("blocks", event.conn, event.batch, event.bad);
    case Event::Kind::sample:
      return nb::make_tuple("sample", event.conn, event.elapsed, event.counted, event.bytes);
    case Event::Kind::wake:
      break;
  }
  return nb::make_tuple("wake");
}

nb::tuple to_python(const OpResult& result) {
  const auto contributors = nb::steal<nb::tuple>(PyTuple_New(static_cast<Py_ssize_t>(result.contributors.size())));
  for (std::size_t i = 0; i < result.contributors.size(); ++i) {
    PyTuple_SetItem(contributors.ptr(), static_cast<Py_ssize_t>(i), nb::int_(result.contributors[i]).release().ptr());
  }
  return nb::make_tuple(static_cast<int>(result.status), to_python(result.reason), result.epoch, contributors,
                        result.registrations, result.sent_bytes, result.received_bytes);
}

nb::list to_python(const std::vector<SealedOp>& ops) {
  nb::list out;
  for (const SealedOp& op : ops) {
    const Bytes descriptor = raw(op.descriptor);
    out.append(
        nb::make_tuple(op.tag, op.sequence, op.state, op.registrations, to_python(op.payloads), to_python(descriptor)));
  }
  return out;
}

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
  return out;
}

std::vector<Verdict> from_python(const std::vector<RawVerdict>& raw) {
  std::vector<Verdict> out;
  for (const auto& [tag, sequence, fingerprint, commit, registrations, payloads, final, reason] : raw) {
    Verdict verdict{tag, sequence, fingerprint, commit, registrations, std::nullopt, final, from_python(reason)};
    if (payloads) {
      verdict.payloads.emplace();
      for (const std::optional<nb::bytes>& payload : *payloads) {
        verdict.payloads->push_back(payload ? Payload(from_python(*payload)) : Payload());
      }
    }
    out.push_back(std::move(verdict));
  }
  return out;
}

namespace {

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

}  // namespace

Call make_call(int kind, int reduce_op, std::uint64_t tag, int root, const std::vector<Array>& source,
               const std::optional<std::vector<Array>>& target, const std::vector<int>& dtypes, int retry, Ns timeout,
               int quantisation) {
  if (kind < 0 || kind > 4 || reduce_op < 0 || reduce_op > 4) throw nb::value_error("unknown kind or reduce op");
  if (retry < 0 || retry > 2) throw nb::value_error("unknown kind of retry");
  if (dtypes.size() != source.size()) throw nb::value_error("one dtype per array");
  Call call;
  call.spec.kind = static_cast<OpKind>(kind);
  call.spec.reduce_op = static_cast<kernels::ReduceOp>(reduce_op);
  call.spec.tag = tag;
  call.spec.root = static_cast<std::uint16_t>(root);
  call.spec.retry = static_cast<Retry>(retry);
  call.spec.timeout = timeout;
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
  call.spec.scheme = checked_scheme(quantisation, call.spec);
  settle_aliases(call.spec, target ? *target : std::vector<Array>{});
  call.arrays = source;
  if (target) call.arrays.insert(call.arrays.end(), target->begin(), target->end());
  return call;
}

EpochSpec epoch_spec(std::uint32_t epoch, std::uint32_t rank, std::uint32_t size, std::vector<PeerId> members,
                     bool by_master, std::size_t small_bytes, std::size_t segment_bytes, std::uint32_t peers_here) {
  if (members.size() != size || rank >= size) throw nb::value_error("rank, size and members do not agree");
  return {epoch, rank, size, std::move(members), by_master, small_bytes, segment_bytes, peers_here};
}

}  // namespace ringfold
