// Probe packets: what unknown senders, and neighbours that know the key, send to a node that probes and is probed.
//
// Checked: a sender that does not know the key changes nothing and gets no answer; a neighbour gets at most three
// answers for each sequence, none larger than its probe; exchanges and answers in flight are bounded; any stamps,
// however absurd, can be filtered.
#include "fuzz.hpp"
#include "ringfold/probe.hpp"

using fuzz::Input;
using ringfold::Ns;
using namespace ringfold::probe;

namespace {

constexpr Node me = 1;
constexpr Ns gap = 800'000, pause_ns = 3'000'000, second = 1'000'000'000;
constexpr std::uint64_t first_sequence = 1'000'000;

Endpoint endpoint(std::uint8_t number) {
  Endpoint out;
  out.length = 16;
  out.bytes[0] = number;
  return out;
}

class Probing {
 public:
  Probing() : core(me, first_sequence) {
    key.fill(7);
    configure();
    core.resume(now, now, gap, pause_ns);
  }
  void configure() {
    core.configure(now, key, {{2, endpoint(2)}, {3, endpoint(3)}}, {{2, endpoint(2)}, {4, endpoint(4)}});
  }

  void step(Input& input) {
    std::vector<Outgoing> out;
    core.step(now, out);
    for (const Outgoing& each : out) {
      if (each.packet.kind == Kind::pt1) newest = each.packet.sequence;
      const bool is_answer = each.packet.kind != Kind::pt1 && each.packet.kind != Kind::pt2;
      answers += is_answer;
      if (each.wants_stamp() && !input.chance(32)) core.stamped(each.owner, input.number<Ns>({now}));
    }
  }

  Core core;
  Key key{};
  Ns now = 10 * second;
  std::uint64_t newest = first_sequence, answers = 0;
};

Packet packet(Input& input, const Probing& probing) {
  Packet out;
  out.kind = static_cast<Kind>(1 + input.below(5));
  out.user_stamps = input.chance(32);
  out.stepped = input.chance(32);
  out.src = input.number<std::uint32_t>({2, 2, 3, 4, 1});
  out.dst = input.number<std::uint32_t>({me});
  out.sequence = input.chance(32) ? input.value<std::uint64_t>() & sequence_mask
                                  : probing.newest - input.below(8) + input.below(4);
  out.a = input.number<Ns>({probing.now, 0});
  out.b = input.number<Ns>({probing.now, 0});
  return out;
}

void look(std::vector<Window> windows) {
  for (Window& window : windows) {
    filter(window, gap);
    REQUIRE(window.kept.size() == window.rows.size(), "%zu flags of %zu rows", window.kept.size(), window.rows.size());
    REQUIRE(window.lost <= window.sent && window.rows.size() <= window.sent, "%d lost of %d", int(window.lost),
            int(window.sent));
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  Input input(data, size);
  Probing probing;
  std::uint64_t probes = 0;
  for (int steps = 0; steps < 1'000 && !input.is_used_up(); ++steps) {
    const Ns stamp = input.number<Ns>({probing.now, probing.now, 0});
    switch (input.byte() % 9) {
      case 0:
      case 1:
        probing.now = std::max(probing.now, probing.core.due().value_or(probing.now));
        probing.step(input);
        break;
      case 2:
        probing.now += input.value<std::uint32_t>() % (2 * second);
        probing.step(input);
        break;
      case 3:
      case 4:
      case 5: {
        const Packet good = packet(input, probing);
        probes += good.kind == Kind::pt1 || good.kind == Kind::pt2;
        probing.core.received(probing.now, encode(probing.key, good), endpoint(9), stamp);
        break;
      }
      case 6: {  // one bit, another key, or anything: nothing comes of it
        Wire wire = encode(probing.key, packet(input, probing));
        std::vector<std::uint8_t> bytes(wire.begin(), wire.end());
        if (input.chance(64)) {
          Key other = probing.key;
          other[input.below(other.size())] ^= 1;
          wire = encode(other, packet(input, probing));
          bytes.assign(wire.begin(), wire.end());
        } else if (input.chance(64)) {
          bytes.resize(input.below(64));
          if (bytes.size() == packet_bytes) bytes[0] ^= 1;
        } else {
          bytes[input.below(bytes.size())] ^= static_cast<std::uint8_t>(1 + input.below(255));
        }
        const CoreStats before = probing.core.stats();
        const std::size_t in_flight = probing.core.in_flight();
        probing.core.received(probing.now, bytes, endpoint(9), stamp);
        const CoreStats& after = probing.core.stats();
        REQUIRE(after.malformed + after.spoofed == before.malformed + before.spoofed + 1, "a forged packet was taken");
        REQUIRE(after.valid == before.valid && probing.core.in_flight() == in_flight,
                "a forged packet has changed something");
        break;
      }
      case 7:
        if (input.chance(64)) {
          look(probing.core.rotate(probing.now, probing.now));
        } else {
          look(probing.core.so_far(probing.now));
          probing.core.peek(probing.now, input.below(16));
        }
        break;
      case 8:
        if (input.chance(32)) probing.configure();
        if (input.chance(32)) probing.core.stepped(probing.now, "it stepped");
        if (input.chance(32)) probing.core.pause();
        if (input.chance(128)) probing.core.resume(probing.now, probing.now, gap, pause_ns);
        break;
    }
    REQUIRE(probing.answers <= 3 * probes, "%d answers to %d probes", int(probing.answers), int(probes));
    REQUIRE(probing.core.in_flight() <= 2 * 256 + 2 * 1'300, "%zu in flight", probing.core.in_flight());
  }
  look(probing.core.rotate(probing.now, probing.now));
  return 0;
}
