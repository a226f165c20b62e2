// The control connection of a peer with ops in flight: heartbeats, evidence and messages of a master that is not sane.
//
// Checked: an op is committed only with a payload of the right size of every rank, and then its buffer is what those
// payloads say; in every other case, however it ends, its buffer is as it was passed in.
#include <array>

#include "fuzz.hpp"

using namespace ringfold;
using fuzz::Input;

namespace {

constexpr std::uint32_t epoch = 3;
constexpr std::uint32_t size = 3;

struct Called {
  OpPtr op;
  std::vector<std::uint32_t> values, original, expected;
  std::vector<std::uint32_t> gathered;
};

class Peer {
 public:
  explicit Peer(Input& input) {
    control = core.open("master", false);
    core.make_control(now, control, 1'000'000'000, 10'000'000'000);
    const ConnId out = core.open("next", false), in = core.open("previous", true);
    core.promote(now, out, true, 2, 0);
    core.promote(now, in, false, 3, 0);
    core.install(now, {epoch, 0, size, {1, 2, 3}, input.chance(200), 64, 128});
    for (std::uint64_t tag = 0; tag < 4; ++tag) submit(input, tag);
  }

  void submit(Input& input, std::uint64_t tag) {
    Called& call = calls[tag];
    const std::size_t count = std::array<std::size_t, 4>{4, 16, 0, 40}[input.below(4)];
    call.values.assign(count, static_cast<std::uint32_t>(tag * 100));
    call.original = call.values;
    call.expected.clear();
    call.gathered.assign(count * size, 0);
    OpSpec spec;
    spec.kind = std::array{OpKind::all_reduce, OpKind::broadcast, OpKind::all_gather, OpKind::barrier}[input.below(4)];
    if (spec.kind == OpKind::barrier) call.values.clear(), call.original.clear();
    spec.root = static_cast<std::uint16_t>(input.below(size));
    spec.tag = tag;
    spec.timeout = 1'000'000'000'000;
    auto* at = reinterpret_cast<std::byte*>(call.values.data());
    if (spec.kind != OpKind::barrier) spec.spans.push_back({at, at, call.values.size() * 4, kernels::DType::u32, 0});
    spec.gathered = reinterpret_cast<std::byte*>(call.gathered.data());
    call.op = core.find(core.submit(now, spec));
  }

  // What the buffer is after evidence with these payloads, if it is taken.
  void expect(Called& call, const std::vector<std::vector<std::uint32_t>>& payloads) {
    call.expected = call.original;
    if (call.op->spec.kind == OpKind::broadcast) call.expected = payloads[call.op->spec.root];
    if (call.op->spec.kind != OpKind::all_reduce) return;
    for (std::size_t i = 0; i < call.expected.size(); ++i) {
      call.expected[i] = 0;
      for (const auto& payload : payloads) call.expected[i] += i < payload.size() ? payload[i] : 0;
    }
  }

  void check() {
    for (const Called& call : calls) {
      const bool is_ok = call.op->state == OpState::finished && call.op->result.status == OpStatus::ok;
      if (is_ok && !call.op->small) {  // only a rank that receives nothing has finished its part without lanes
        REQUIRE(call.op->spec.kind == OpKind::broadcast && call.op->spec.root == 0, "tag %d has finished",
                int(call.op->spec.tag));
        REQUIRE(call.values == call.original, "tag %d is not as it was", int(call.op->spec.tag));
      } else if (is_ok) {
        REQUIRE(!call.expected.empty() || call.original.empty(), "tag %d is committed without evidence",
                int(call.op->spec.tag));
        REQUIRE(call.values == call.expected, "tag %d has a wrong result", int(call.op->spec.tag));
      } else {
        REQUIRE(call.values == call.original, "tag %d is not as it was", int(call.op->spec.tag));
      }
    }
  }

  Core core;
  Ns now = 1'000'000'000;
  ConnId control = 0;
  std::array<Called, 4> calls;
};

constexpr std::uint32_t no_payload = 0xffff'ffff;  // of a rank that contributes nothing

Bytes evidence(Input& input, Peer& peer) {
  Called& call = peer.calls[input.below(4)];
  Bytes body;
  const auto its_epoch = input.number<std::uint32_t>({epoch});
  const auto sequence = input.number<std::uint32_t>({call.op->sequence});
  const auto fingerprint = input.number<std::uint32_t>({call.op->fingerprint});
  const auto count = input.number<std::uint16_t>({size});
  put(body, its_epoch);
  put(body, call.op->spec.tag);
  put(body, sequence);
  put(body, fingerprint);
  put(body, input.value<std::uint64_t>());
  put(body, count);
  std::vector<std::vector<std::uint32_t>> payloads(size);
  bool is_whole =
      its_epoch == epoch && sequence == call.op->sequence && fingerprint == call.op->fingerprint && count == size;
  for (std::uint16_t i = 0; i < count; ++i) {
    const bool silent = !call.op->small || (call.op->spec.kind == OpKind::broadcast && i != call.op->spec.root);
    const std::size_t wanted = silent ? 0 : call.op->bytes;
    const auto length = input.number<std::uint32_t>({static_cast<std::uint32_t>(wanted), no_payload});
    put(body, length);
    const bool is_absent = length == no_payload && (call.op->reduces() || !call.op->small);
    is_whole = is_whole && (length == wanted || is_absent);
    if (i < size && !is_absent) payloads[i].assign(wanted / 4, i);
    if (i > 4'000) break;
  }
  for (const auto& payload : payloads) {
    const auto* at = reinterpret_cast<const std::byte*>(payload.data());
    body.insert(body.end(), at, at + payload.size() * 4);
  }
  const std::size_t whole = body.size();
  if (input.chance(32)) body.resize(input.below(body.size() + 1));
  else if (input.chance(32)) body.resize(body.size() + input.below(64));
  is_whole = is_whole && body.size() >= whole;
  if (is_whole && call.op->small && call.op->state != OpState::finished) peer.expect(call, payloads);
  return body;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t bytes) {
  Input input(data, bytes);
  Peer peer(input);
  std::size_t delivered = 0;
  const std::size_t before = fuzz::bytes_held;
  for (int steps = 0; steps < 500 && !input.is_used_up(); ++steps) {
    const std::size_t most = input.chance(32) ? 1 + input.below(8) : ~std::size_t{0};
    Bytes frame;
    switch (input.byte() % 9) {
      case 0:
        frame = input.bytes(input.below(64));
        break;
      case 1: {
        const Bytes body = input.bytes(input.below(64));
        const auto length =
            input.number<std::uint32_t>({static_cast<std::uint32_t>(body.size() + 1), 0, max_control_bytes});
        frame = fuzz::control_frame(length, input.number<std::uint8_t>({0, 1, 3, 2, 4, 5}), body);
        break;
      }
      case 2:
      case 3:
      case 4: {
        const Bytes body = evidence(input, peer);
        frame = fuzz::control_frame(static_cast<std::uint32_t>(body.size() + 1), 3, body);
        break;
      }
      case 5:
        frame = fuzz::control_frame(17, 1, input.bytes(16));
        break;
      case 6:
        peer.now += input.value<std::uint32_t>();
        peer.core.tick(peer.now);
        fuzz::take(peer.core, peer.control, peer.now, input.below(256));
        break;
      case 7: {
        const std::size_t tag = input.below(4);
        Called& call = peer.calls[tag];
        if (call.op->state == OpState::finished) peer.check(), peer.submit(input, tag);
        else peer.core.ops().cancel(call.op->id);
        break;
      }
      case 8:
        if (input.chance(32)) peer.core.seal(epoch);
        break;
    }
    delivered += fuzz::feed(peer.core, peer.control, frame, peer.now, most);
    while (peer.core.next_event()) {
    }
    REQUIRE(peer.core.lanes().size() == 2, "%zu lanes", peer.core.lanes().size());
    peer.check();
    const std::size_t held = fuzz::bytes_held - std::min(before, fuzz::bytes_held);
    REQUIRE(held < 4 * delivered + 256 * static_cast<std::size_t>(steps) + (4u << 20), "%zu bytes held of %zu", held,
            delivered);
  }
  peer.core.ops().fail_all(OpStatus::failed, {});
  peer.check();
  return 0;
}
