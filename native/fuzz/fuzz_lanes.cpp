// A ring of cores with a proxy on every lane that tampers with what passes: flips bits, drops, repeats, reorders and
// forges frames, loses lanes, and begins new epochs, while ops are in flight.
//
// Checked, at every rank and for every op:
// - a committed op has the right result, of those ranks that contribute, and names these, unless a forged frame with
//   right checksums came into the ring (a peer that knows the secrets of an epoch and forges a segment is believed);
// - an op that is not committed leaves its buffer as it was passed in;
// - without forged frames, a new epoch with new lanes completes every op, whatever was lost or repeated before;
// - what is wrong on one link closes that link and no other, and a frame that closes it counts for nothing;
// - memory held is bounded by what was delivered, not by what a header promises.
#include <array>
#include <deque>
#include <map>
#include <memory>
#include <numeric>

#include "fuzz.hpp"

using namespace ringfold;
using fuzz::Input;

namespace {

constexpr Ns timeout = 1'000'000'000'000;
constexpr std::uint64_t tags = 2;

// One direction of a lane: frames that one core has sent and the other has not got.
struct Stream {
  std::size_t from = 0, to = 0;
  ConnId source = 0, target = 0;
  bool to_next = false;
  Bytes partial;
  std::deque<Bytes> frames;
  bool is_aligned = true;  // every delivery so far was one whole frame
};

struct Call {
  std::uint64_t number = 0;
  OpPtr op;
  std::vector<std::int32_t> values, original, gathered;
};

struct Shape {
  std::uint32_t size, lanes, paths;
  bool shared;
  std::size_t small, segment, count;
  OpKind kind;
  quantize::Scheme scheme;
  unsigned silent;  // by rank, shifted by one with each call: which contribute nothing
  bool is_float() const { return scheme != quantize::Scheme::none; }
};

class Ring {
 public:
  explicit Ring(Input& input) {
    shape.size = 2 + static_cast<std::uint32_t>(input.below(3));
    shape.lanes = 1 + static_cast<std::uint32_t>(input.below(3));
    shape.paths = 1 + static_cast<std::uint32_t>(input.below(2));
    shape.shared = input.byte() % 2 != 0;
    shape.small = input.byte() % 4 == 1 ? 64 : 0;
    shape.segment = input.byte() % 2 == 0 ? 64 : 256;
    shape.count = shape.size * (1 + input.below(64));
    shape.kind = std::array{OpKind::all_reduce, OpKind::all_reduce, OpKind::broadcast, OpKind::all_gather,
                            OpKind::reduce_scatter}[input.below(5)];
    const bool quantised = shape.kind == OpKind::all_reduce && input.byte() % 4 == 1;
    shape.scheme = quantised ? quantize::Scheme::minmax8 : quantize::Scheme::none;
    const std::uint8_t rest = input.byte();
    may_forge = rest % 2 != 0;
    shape.silent = rest >> 1 & rest >> 5;
    for (std::uint32_t i = 0; i < shape.size; ++i) cores.push_back(std::make_unique<Core>());
    calls.resize(shape.size);
    connect();
    install();
    for (std::uint32_t rank = 0; rank < shape.size; ++rank) {
      for (std::uint64_t tag = 0; tag < tags; ++tag) submit(rank, tag);
    }
  }

  void connect() {
    streams.clear();
    for (std::uint32_t i = 0; i < shape.size; ++i) {
      const std::uint32_t next = (i + 1) % shape.size;
      for (std::uint32_t lane = 0; lane < shape.lanes; ++lane) {
        const Sharing sharing{shape.shared, lane % shape.paths, shape.paths, 0};
        const ConnId out = cores[i]->open("next", false), in = cores[next]->open("previous", true);
        cores[i]->promote(now, out, true, next, lane, sharing);
        cores[next]->promote(now, in, false, i, lane, sharing);
        streams.push_back({i, next, out, in, true, {}, {}, true});
        streams.push_back({next, i, in, out, false, {}, {}, true});
      }
    }
  }

  void install() {
    ++epoch;
    std::vector<PeerId> members(shape.size);
    std::iota(members.begin(), members.end(), PeerId{0});
    for (std::uint32_t i = 0; i < shape.size; ++i) {
      EpochSpec spec{epoch, i, shape.size, members, false, shape.small, shape.segment};
      spec.multipath = shape.shared;
      cores[i]->install(now, spec);
    }
  }

  // As a master does it: what is committed anywhere is committed everywhere, the rest runs again.
  void next_epoch() {
    std::map<std::pair<std::uint64_t, std::uint32_t>, Verdict> verdicts;
    for (const auto& core : cores) {
      for (const SealedOp& op : core->seal(epoch)) {
        if (op.state != 2) continue;
        verdicts[{op.tag, op.sequence}] = {
            op.tag, op.sequence, op.descriptor.fingerprint(), true, op.registrations, op.payloads, 0, {}};
      }
    }
    std::vector<Verdict> all;
    for (const auto& [key, verdict] : verdicts) all.push_back(verdict);
    for (const auto& core : cores) {
      core->settle(now, epoch, all, {});
      for (const LaneInfo& lane : core->lanes()) core->close(lane.conn);
    }
    connect();
    install();
  }

  static std::int32_t value(std::uint32_t rank, std::uint64_t tag, std::uint64_t call, std::size_t at) {
    return static_cast<std::int32_t>((rank + 1) * 1000 + tag * 100 + call % 50 * 2 + at % 2);
  }

  bool contributes(std::uint32_t rank, std::uint64_t call) const {
    return (shape.silent >> (rank + call) % 4 & 1) == 0;
  }

  void fill(std::vector<std::int32_t>& values, std::uint32_t rank, std::uint64_t tag, std::uint64_t call) const {
    values.resize(shape.count);
    for (std::size_t at = 0; at < values.size(); ++at) {
      values[at] = value(rank, tag, call, at);
      const auto real = static_cast<float>(values[at]);
      if (shape.is_float()) std::memcpy(&values[at], &real, sizeof real);
    }
  }

  void submit(std::uint32_t rank, std::uint64_t tag) {
    Call& call = calls[rank][tag];
    fill(call.values, rank, tag, call.number);
    call.original = call.values;
    call.gathered.assign(shape.count * shape.size, 0);
    OpSpec spec;
    spec.kind = shape.kind;
    spec.scheme = shape.scheme;
    spec.tag = tag;
    spec.root = static_cast<std::uint16_t>(tag % shape.size);
    spec.timeout = timeout;
    spec.contribute = contributes(rank, call.number);
    auto* at = reinterpret_cast<std::byte*>(call.values.data());
    spec.spans.push_back(
        {at, at, call.values.size() * 4, shape.is_float() ? kernels::DType::f32 : kernels::DType::i32, 0});
    spec.gathered = reinterpret_cast<std::byte*>(call.gathered.data());
    call.op = cores[rank]->find(cores[rank]->submit(now, spec));
  }

  bool is_right(std::uint32_t rank, std::uint64_t tag) const {
    const Call& call = calls[rank][tag];
    std::vector<std::vector<std::int32_t>> inputs(shape.size);
    for (std::uint32_t r = 0; r < shape.size; ++r) fill(inputs[r], r, tag, call.number);
    if (shape.kind == OpKind::broadcast) return call.values == inputs[tag % shape.size];
    if (shape.kind == OpKind::all_gather) {
      for (std::uint32_t r = 0; r < shape.size; ++r) {
        if (!std::equal(inputs[r].begin(), inputs[r].end(),
                        call.gathered.begin() + static_cast<std::ptrdiff_t>(r * shape.count)))
          return false;
      }
      return call.values == call.original;
    }
    const bool scatters = shape.kind == OpKind::reduce_scatter;
    const std::size_t chunk = shape.count / shape.size, from = scatters ? rank * chunk : 0;
    for (std::size_t at = 0; at < (scatters ? chunk : shape.count); ++at) {
      std::int32_t sum = 0;
      for (std::uint32_t r = 0; r < shape.size; ++r)
        sum += contributes(r, call.number) ? value(r, tag, call.number, from + at) : 0;
      if (shape.is_float()) {
        float real = 0;
        std::memcpy(&real, &call.values[at], sizeof real);
        // A quantised sum is near: every hop may be off by a level of the range, which is below 2 here.
        if (!(real > static_cast<float>(sum) - 2.0f && real < static_cast<float>(sum) + 2.0f)) return false;
      } else if ((scatters ? call.gathered : call.values)[at] != sum) {
        return false;
      }
    }
    return !scatters || call.values == call.original;
  }

  bool are_named(const Call& call) const {
    std::vector<PeerId> names;
    const bool reduces = shape.kind == OpKind::all_reduce || shape.kind == OpKind::reduce_scatter;
    for (std::uint32_t rank = 0; rank < shape.size; ++rank) {
      if (!reduces || contributes(rank, call.number)) names.push_back(rank);
    }
    return call.op->result.contributors == names;
  }

  void check() const {
    for (std::uint32_t rank = 0; rank < shape.size; ++rank) {
      for (std::uint64_t tag = 0; tag < tags; ++tag) {
        const Call& call = calls[rank][tag];
        if (call.op->state != OpState::finished) continue;
        if (call.op->result.status == OpStatus::ok) {
          REQUIRE(is_forged || is_right(rank, tag), "rank %u tag %d call %d: a wrong result", rank, int(tag),
                  int(call.number));
          REQUIRE(is_forged || are_named(call), "rank %u tag %d call %d: wrong names", rank, int(tag),
                  int(call.number));
        } else {
          REQUIRE(call.values == call.original, "rank %u tag %d call %d: not as it was", rank, int(tag),
                  int(call.number));
        }
      }
    }
  }

  // What has ended is called again: the next one if it was committed, the same one if it was given up.
  void call_again(std::uint32_t rank, std::uint64_t tag) {
    Call& call = calls[rank][tag];
    if (call.op->state != OpState::finished) return;
    check();
    if (call.op->result.status == OpStatus::ok) ++call.number;
    cores[rank]->ops().release(call.op->id);
    submit(rank, tag);
  }

  bool pull(Stream& stream, std::size_t most) {
    const Bytes sent = fuzz::take(*cores[stream.from], stream.source, now, most);
    stream.partial.insert(stream.partial.end(), sent.begin(), sent.end());
    FrameHeader header;
    while (stream.partial.size() >= sizeof header) {
      std::memcpy(&header, stream.partial.data(), sizeof header);
      const std::size_t whole = sizeof header + header.length;
      if (stream.partial.size() < whole) break;
      const auto end = stream.partial.begin() + static_cast<std::ptrdiff_t>(whole);
      stream.frames.emplace_back(stream.partial.begin(), end);
      stream.partial.erase(stream.partial.begin(), end);
    }
    return !sent.empty();
  }

  // Lanes of the core that a stream leads to: of the stream's own link, and of all others.
  std::pair<std::size_t, std::size_t> lanes_of(const Stream& stream) const {
    std::size_t own = 0, others = 0;
    for (const LaneInfo& lane : cores[stream.to]->lanes()) {
      ++(lane.peer == stream.from && lane.outgoing != stream.to_next ? own : others);
    }
    return {own, others};
  }

  // How far the ops of a rank are.
  std::vector<std::uint64_t> progress_of(std::size_t rank) const {
    std::vector<std::uint64_t> out;
    for (const Call& call : calls[rank]) {
      out.insert(out.end(), {std::uint64_t(call.op->state), call.op->done_count, call.op->result.received_bytes,
                             call.op->registrations});
    }
    return out;
  }

  static bool is_one_frame(const Bytes& bytes) {
    FrameHeader header;
    if (bytes.size() < sizeof header) return false;
    std::memcpy(&header, bytes.data(), sizeof header);
    return bytes.size() == sizeof header + header.length;
  }

  void deliver(Stream& stream, const Bytes& bytes, std::size_t most = ~std::size_t{0}) {
    const auto before = lanes_of(stream);
    const auto progress = progress_of(stream.to);
    const std::size_t taken = fuzz::feed(*cores[stream.to], stream.target, bytes, now, most);
    delivered += taken;
    const auto after = lanes_of(stream);
    REQUIRE(after.second == before.second, "%zu other lanes of rank %zu, of %zu", after.second, stream.to,
            before.second);
    stream.is_aligned = stream.is_aligned && taken == bytes.size() && is_one_frame(bytes);
    const bool is_refused = before.first > 0 && after.first == 0;
    REQUIRE(!stream.is_aligned || !is_refused || progress == progress_of(stream.to), "a frame that was refused counts");
  }

  void deliver_front(Stream& stream, std::size_t most = ~std::size_t{0}) {
    if (stream.frames.empty() || cores[stream.to]->receive_space(stream.target).empty()) return;
    const Bytes frame = std::move(stream.frames.front());
    stream.frames.pop_front();
    deliver(stream, frame, most);
  }

  // Nothing is tampered with until nothing moves any more.
  void settle_down() {
    bool moved = true;
    for (int rounds = 0; moved && rounds < 2'000; ++rounds) {
      moved = false;
      for (Stream& stream : streams) {
        moved |= pull(stream, 4096);
        while (!stream.frames.empty() && !cores[stream.to]->receive_space(stream.target).empty()) {
          deliver_front(stream);
          moved = true;
        }
      }
    }
  }

  // New lanes without tampering: every rank gets as far as the furthest one, and all calls are committed.
  void complete() {
    next_epoch();
    for (int rounds = 0; rounds < 100; ++rounds) {
      settle_down();
      take_events();
      bool is_called = false;
      for (std::uint64_t tag = 0; tag < tags; ++tag) {
        std::uint64_t furthest = 0;
        for (const auto& rank : calls) furthest = std::max(furthest, rank[tag].number);
        for (std::uint32_t rank = 0; rank < shape.size; ++rank) {
          const Call& call = calls[rank][tag];
          if (call.op->state != OpState::finished) continue;
          if (call.op->result.status == OpStatus::ok && call.number == furthest) continue;
          call_again(rank, tag);
          is_called = true;
        }
      }
      if (!is_called) break;
    }
    for (const auto& rank : calls) {
      for (const Call& call : rank) {
        REQUIRE(call.op->state == OpState::finished && call.op->result.status == OpStatus::ok,
                "call %d of tag %d never ends", int(call.number), int(call.op->spec.tag));
      }
    }
  }

  void take_events() {
    for (const auto& core : cores) {
      while (core->next_event()) {
      }
      core->take_closing();
      core->take_dirty();
      core->take_new_lanes();
    }
  }

  Shape shape{};
  std::vector<std::unique_ptr<Core>> cores;
  std::vector<Stream> streams;
  std::vector<std::array<Call, tags>> calls;
  std::uint32_t epoch = 0;
  Ns now = 1'000'000'000;
  bool may_forge = false, is_forged = false;
  std::size_t delivered = 0;
};

// Any frame for the op in flight, with right checksums unless it is to be broken.
Bytes forged(Input& input, Ring& ring, const Stream& stream) {
  const std::uint64_t tag = input.below(tags);
  const Op& op = *ring.calls[stream.to][tag].op;
  FrameHeader header;
  header.kind = static_cast<LaneFrame>(input.number<std::uint8_t>({3, 4, 2, 5, 6, 1, 7}));
  header.stage = input.number<std::uint16_t>({0, 1, 2, 3, 5});
  header.epoch = input.number<std::uint32_t>({ring.epoch, ring.epoch, ring.epoch, ring.epoch + 1, ring.epoch - 1});
  header.sequence = input.number<std::uint32_t>({op.sequence, op.sequence, op.sequence + 1});
  header.tag = input.number<std::uint64_t>({tag, tag, 77});
  header.offset = input.number<std::uint64_t>({0, 64, 128, 256, 512, 1});
  header.fingerprint = input.number<std::uint32_t>({op.fingerprint});
  header.origin = input.number<std::uint32_t>({0, 1, 2, 3});
  header.registrations = input.byte();
  header.contributors = std::array{1u, 1u, 0u, 2u}[header.registrations % 4];
  const std::size_t left = op.bytes - std::min<std::size_t>(header.offset, op.bytes);
  const std::size_t fitting = header.kind == LaneFrame::open   ? sizeof(Descriptor)
                              : header.contributors == 0       ? 0
                              : header.kind == LaneFrame::data ? std::min(left, ring.shape.segment)
                              : header.kind == LaneFrame::done ? (op.small ? op.bytes : 0)
                                                               : 0;
  const Bytes payload = input.bytes(input.chance(32) ? input.below(600) : fitting);
  header.length = static_cast<std::uint32_t>(payload.size());
  if (input.chance(8)) header.length = input.value<std::uint32_t>();
  if (input.chance(8)) header.version = input.byte();
  fuzz::seal(header, payload);
  if (input.chance(8)) header.header_crc ^= 1;
  return fuzz::lane_frame(header, payload);
}

// Changes a field of a frame that is honest otherwise, and its checksum with it.
Bytes changed(Input& input, const Bytes& frame) {
  FrameHeader header;
  std::memcpy(&header, frame.data(), sizeof header);
  Bytes payload(frame.begin() + sizeof header, frame.end());
  auto* raw = reinterpret_cast<std::byte*>(&header);
  const std::size_t at = 4 + input.below(offsetof(FrameHeader, header_crc) - 4);
  raw[at] = static_cast<std::byte>(input.byte());
  if (input.chance(64)) payload.resize(input.below(payload.size() + 64));
  if (!payload.empty() && input.chance(64)) payload[input.below(payload.size())] = static_cast<std::byte>(input.byte());
  if (input.chance(192)) header.length = static_cast<std::uint32_t>(payload.size());
  fuzz::seal(header, payload);
  return fuzz::lane_frame(header, payload);
}

void act(Input& input, Ring& ring) {
  const unsigned action = input.byte() % 18;
  Stream& stream = ring.streams[input.below(ring.streams.size())];
  Core& to = *ring.cores[stream.to];
  switch (action) {
    case 0:
    case 1:
      ring.pull(stream, input.chance(64) ? input.below(256) : 4096);
      break;
    case 2:
    case 3:
      ring.deliver_front(stream, input.chance(32) ? 1 + input.below(64) : ~std::size_t{0});
      break;
    case 4:  // one byte that is wrong: a checksum always finds it
      if (stream.frames.empty()) break;
      stream.frames.front()[input.below(stream.frames.front().size())] ^= static_cast<std::byte>(1 + input.below(255));
      ring.deliver_front(stream);
      break;
    case 5:
      if (stream.frames.empty() || !ring.may_forge) break;
      stream.frames.front() = changed(input, stream.frames.front());
      ring.is_forged = true;
      ring.deliver_front(stream);
      break;
    case 6:
    case 7:
      if (!ring.may_forge) break;
      ring.is_forged = true;
      ring.deliver(stream, forged(input, ring, stream), input.chance(32) ? 1 + input.below(64) : ~std::size_t{0});
      break;
    case 8:
      if (!stream.frames.empty()) stream.frames.push_front(Bytes(stream.frames.front()));
      break;
    case 9:
      if (!stream.frames.empty()) stream.frames.pop_front();
      break;
    case 10:
      if (stream.frames.size() > 1) std::swap(stream.frames[0], stream.frames[1]);
      break;
    case 11:
      ring.deliver(stream, input.bytes(input.below(130)));
      break;
    case 12:
      to.lost(ring.now, stream.target, "reset");
      ring.cores[stream.from]->lost(ring.now, stream.source, "reset");
      break;
    case 13:
      ring.now += input.value<std::uint32_t>();
      to.acknowledged(ring.now, stream.target, input.value<std::uint16_t>(), input.value<std::uint32_t>(),
                      input.value<std::uint16_t>());
      break;
    case 14:
      ring.now += input.value<std::uint32_t>();
      to.tick(ring.now);
      to.path_rates(ring.now, stream.from);
      to.path_rtts(ring.now, stream.from);
      break;
    case 15:
      ring.next_epoch();
      break;
    case 16: {
      const std::uint64_t tag = input.below(tags);
      if (input.chance(32)) to.ops().cancel(ring.calls[stream.to][tag].op->id);
      ring.call_again(static_cast<std::uint32_t>(stream.to), tag);
      break;
    }
    case 17: {
      PathShares shares;
      for (std::uint16_t& share : shares.share) share = input.byte();
      shares.flags = input.byte() | (input.chance(64) ? PathShares::fixed : 0);
      to.set_path_shares(stream.from, shares);
      break;
    }
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  Input input(data, size);
  const std::size_t before = fuzz::bytes_held;
  Ring ring(input);
  const std::size_t lanes = ring.streams.size();
  const std::size_t usual = fuzz::bytes_held - before + lanes * (std::size_t{256} << 10) + (std::size_t{1} << 20);
  for (int steps = 0; steps < 400 && !input.is_used_up(); ++steps) {
    act(input, ring);
    ring.take_events();
    ring.check();
    const std::size_t held = fuzz::bytes_held - std::min(before, fuzz::bytes_held);
    REQUIRE(held < usual + 8 * ring.delivered + 4096 * static_cast<std::size_t>(steps), "%zu bytes held, %zu delivered",
            held, ring.delivered);
  }
  ring.settle_down();
  ring.check();
  if (!ring.is_forged) ring.complete();
  for (const auto& core : ring.cores) core->ops().fail_all(OpStatus::failed, {});
  ring.check();
  return 0;
}
