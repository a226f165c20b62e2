// Unauthenticated clients at the data port of a peer with an op in flight: what they send affects their own connection
// only.
//
// Checked: nothing of an unauthenticated client is read beyond the message that is to be judged; none of its lane
// frames counts; the memory held for it is bounded; every event is about such a client; lanes, op and buffer are
// untouched.
#include <map>
#include <set>

#include "fuzz.hpp"

using namespace ringfold;
using fuzz::Input;

namespace {

constexpr std::size_t max_unauthenticated = 4;
constexpr std::size_t held_by_unauthenticated = 2 * (max_handshake_bytes + 4096) + 4096;

class Peer {
 public:
  Peer() : values_(64, 7), original_(values_) {
    const ConnId out = core.open("next", false), in = core.open("previous", true);
    core.promote(now, out, true, 2, 0);
    core.promote(now, in, false, 2, 0);
    core.install(now, {3, 0, 2, {1, 2}, false, 0, 128});
    OpSpec spec;
    spec.timeout = 1'000'000'000'000;
    auto* at = reinterpret_cast<std::byte*>(values_.data());
    spec.spans.push_back({at, at, values_.size() * sizeof(std::int32_t), kernels::DType::i32, 0});
    op_ = core.find(core.submit(now, spec));
    while (core.next_event()) {
    }
  }

  void check_untouched() {
    REQUIRE(core.lanes().size() == 2, "%zu lanes", core.lanes().size());
    REQUIRE(op_->state == OpState::running && values_ == original_, "the op in flight has changed");
    const Stats& stats = core.stats();
    REQUIRE(stats.committed + stats.aborted + stats.drained + stats.duplicates + stats.restarted == 0,
            "a frame was counted");
  }

  // A lane frame as a neighbour could send it.
  Bytes lane_frame(Input& input) const {
    FrameHeader header;
    header.kind = static_cast<LaneFrame>(1 + input.below(6));
    header.epoch = input.number<std::uint32_t>({3, 0, 4});
    header.fingerprint = op_->fingerprint;
    header.origin = 1;
    const Bytes payload = input.bytes(input.below(140));
    header.length = static_cast<std::uint32_t>(payload.size());
    fuzz::seal(header, payload);
    return fuzz::lane_frame(header, payload);
  }

  Core core;
  Ns now = 1'000'000'000;

 private:
  std::vector<std::int32_t> values_, original_;
  OpPtr op_;
};

struct Client {
  bool is_held = false;
  std::size_t messages = 0;
};

void take_events(Peer& peer, std::map<ConnId, Client>& clients) {
  while (const auto event = peer.core.next_event()) {
    const auto found = clients.find(event->conn);
    if (event->kind == Event::Kind::accepted) {
      clients[event->conn] = {};
      continue;
    }
    REQUIRE(found != clients.end(), "event %d of connection %u", static_cast<int>(event->kind), event->conn);
    if (event->kind == Event::Kind::closed) {
      REQUIRE(peer.core.receive_space(event->conn).empty(), "a closed connection is read");
      clients.erase(found);
      continue;
    }
    REQUIRE(event->kind == Event::Kind::message, "event %d", static_cast<int>(event->kind));
    REQUIRE(event->body.size() < max_handshake_bytes, "a message of %zu bytes", event->body.size());
    REQUIRE(!found->second.is_held, "a message was read behind one that is not decided");
    found->second.is_held = true;
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  Input input(data, size);
  Peer peer;
  std::map<ConnId, Client> clients;
  const std::size_t before = fuzz::bytes_held;
  for (int steps = 0; steps < 500 && !input.is_used_up(); ++steps) {
    const unsigned action = input.byte() % 10;
    if (clients.empty() || (action == 0 && clients.size() < max_unauthenticated)) {
      peer.core.open("client", true);
      take_events(peer, clients);
    }
    auto at = clients.begin();
    std::advance(at, static_cast<std::ptrdiff_t>(input.below(clients.size())));
    const ConnId conn = at->first;
    const std::size_t most = input.chance(64) ? 1 + input.below(8) : ~std::size_t{0};
    switch (action) {
      case 1:
        fuzz::feed(peer.core, conn, input.bytes(input.below(64)), peer.now, most);
        break;
      case 2:
      case 3: {
        const Bytes body = input.bytes(input.chance(16) ? input.below(17'000) : input.below(64));
        const auto length = input.number<std::uint32_t>({static_cast<std::uint32_t>(body.size() + 1)});
        fuzz::feed(peer.core, conn, fuzz::control_frame(length, input.number<std::uint8_t>({0, 0, 0, 1, 3}), body),
                   peer.now, most);
        break;
      }
      case 4:
        fuzz::feed(peer.core, conn, peer.lane_frame(input), peer.now, most);
        break;
      case 5:
        at->second.is_held = false;
        peer.core.resume(peer.now, conn);
        break;
      case 6:
        peer.core.send(conn, "no", 2);
        fuzz::take(peer.core, conn, peer.now, input.below(16));
        break;
      case 7:
        peer.core.close(conn);
        clients.erase(at);
        break;
      case 8:
        peer.core.lost(peer.now, conn, "reset");
        break;
      case 9:
        peer.now += input.value<std::uint32_t>();
        peer.core.tick(peer.now);
        break;
      default:
        break;
    }
    take_events(peer, clients);
    peer.core.take_closing();
    peer.check_untouched();
    const std::size_t held = fuzz::bytes_held - std::min(before, fuzz::bytes_held);
    REQUIRE(held < (max_unauthenticated + 1) * held_by_unauthenticated + 64 * size + 65'536,
            "%zu bytes held for %zu clients", held, clients.size());
  }
  return 0;
}
