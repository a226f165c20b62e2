// Bulk connections: requested blocks and others, filler, messages, and requests of the other side for blocks.
//
// Checked: only the memory of expected blocks is written, and never after the connection has ended; a batch is reported
// once, with exactly the blocks whose hash is another one; one connection's end leaves the others; memory held is
// bounded by what was delivered and queued.
#include <array>
#include <map>
#include <memory>

#include "fuzz.hpp"
#include "ringfold/hash.hpp"

using namespace ringfold;
using fuzz::Input;

namespace {

constexpr std::size_t guard = 16;  // bytes around every block that must not be written
constexpr std::size_t max_connections = 3;

// The memory of one expected batch.
struct Batch {
  std::vector<Bytes> memory;
  std::vector<std::uint64_t> hashes;
  std::vector<Block> blocks() {
    std::vector<Block> out;
    for (std::size_t i = 0; i < memory.size(); ++i)
      out.push_back({memory[i].data() + guard, memory[i].size() - 2 * guard, hashes[i]});
    return out;
  }
  void check_guards() const {
    for (const Bytes& each : memory) {
      for (std::size_t i = 0; i < guard; ++i) {
        REQUIRE(each[i] == std::byte{9} && each[each.size() - 1 - i] == std::byte{9},
                "memory beside a block was written");
      }
    }
  }
};

struct Visit {
  std::map<std::uint64_t, Batch> expected;  // by number, in order
  std::vector<std::size_t> to_come;         // sizes of the blocks that are expected, in order
  std::uint64_t next_batch = 1;
};

class Peer {
 public:
  void open() {
    const ConnId conn = core.open("visitor", true);
    core.make_bulk(now, conn);
    visits[conn];
  }

  void expect(Input& input, ConnId conn) {
    Visit& visit = visits[conn];
    if (visit.expected.size() >= 8) return;
    Batch batch;
    const std::size_t count = 1 + input.below(4);
    for (std::size_t i = 0; i < count; ++i) {
      const std::size_t bytes = input.chance(4) ? 65'536 + input.below(3) : 1 + input.below(90);
      batch.memory.emplace_back(bytes + 2 * guard, std::byte{9});
      const Bytes wanted(bytes, static_cast<std::byte>(7));
      batch.hashes.push_back(hash_block(wanted.data(), wanted.size()));
      visit.to_come.push_back(bytes);
    }
    const std::uint64_t number = visit.next_batch++;
    Batch& kept = visit.expected[number] = std::move(batch);
    core.expect_blocks(conn, number, kept.blocks(), std::make_shared<int>(0));
  }

  void take_events() {
    while (const auto event = core.next_event()) {
      if (event->kind == Event::Kind::accepted) continue;
      const auto visit = visits.find(event->conn);
      REQUIRE(visit != visits.end(), "event %d of connection %u", int(event->kind), event->conn);
      if (event->kind == Event::Kind::closed) end(event->conn);
      if (event->kind != Event::Kind::blocks) continue;
      auto& expected = visit->second.expected;
      REQUIRE(!expected.empty() && expected.begin()->first == event->batch, "batch %d is out of order",
              int(event->batch));
      Batch& batch = expected.begin()->second;
      batch.check_guards();
      REQUIRE(event->bad == differing(batch.blocks()), "the wrong blocks were called bad");
      expected.erase(expected.begin());
    }
  }

  // From now on nothing of the visit's memory may change.
  void end(ConnId conn) {
    const auto visit = visits.find(conn);
    for (auto& [number, batch] : visit->second.expected) {
      batch.check_guards();
      ended.push_back({batch, std::move(batch)});
    }
    visits.erase(visit);
    if (ended.size() > 4) ended.erase(ended.begin(), ended.end() - 4);
  }

  void check() const {
    for (const auto& [copy, memory] : ended) REQUIRE(copy.memory == memory.memory, "memory was written after the end");
  }

  Core core;
  Ns now = 1'000'000'000;
  std::map<ConnId, Visit> visits;
  std::vector<std::pair<Batch, Batch>> ended;
};

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  static Bytes served(70'000, std::byte{5});
  Input input(data, size);
  Peer peer;
  std::size_t delivered = 0, requested = 0;
  const std::size_t before = fuzz::bytes_held;
  for (int steps = 0; steps < 400 && !input.is_used_up(); ++steps) {
    const unsigned action = input.byte() % 14;
    if (peer.visits.empty() || (action == 0 && peer.visits.size() < max_connections)) peer.open();
    peer.take_events();
    auto at = peer.visits.begin();
    std::advance(at, static_cast<std::ptrdiff_t>(input.below(peer.visits.size())));
    const ConnId conn = at->first;
    const std::size_t most = input.chance(64) ? 1 + input.below(40) : ~std::size_t{0};
    const auto connections = peer.visits.size();
    Bytes frame;
    switch (action) {
      case 1:
      case 2:
        requested += 400'000;
        peer.expect(input, conn);
        break;
      case 3:
      case 4:
      case 5: {  // the block that is expected next, or nearly
        std::vector<std::size_t>& to_come = at->second.to_come;
        std::size_t bytes = to_come.empty() ? 8 : to_come.front();
        if (!to_come.empty()) to_come.erase(to_come.begin());
        Bytes body(bytes, static_cast<std::byte>(7));
        if (input.chance(64)) body[input.below(body.size())] = static_cast<std::byte>(input.byte());
        if (input.chance(16)) bytes += input.below(4);
        if (input.chance(16)) body.resize(input.below(body.size() + 1));
        frame = fuzz::control_frame(static_cast<std::uint32_t>(bytes + 1), 4, body);
        break;
      }
      case 6: {
        const Bytes body = input.bytes(input.below(64));
        const auto length =
            input.number<std::uint32_t>({static_cast<std::uint32_t>(body.size() + 1), 0, max_bulk_bytes + 1});
        frame = fuzz::control_frame(length, input.number<std::uint8_t>({0, 4, 5, 1, 3}), body);
        break;
      }
      case 7: {
        const Bytes body(input.chance(32) ? 70'000 : input.below(256), std::byte{1});
        frame = fuzz::control_frame(static_cast<std::uint32_t>(body.size() + 1), 5, body);
        break;
      }
      case 8:
        frame = input.bytes(input.below(64));
        break;
      case 9: {
        const std::size_t bytes = input.chance(32) ? served.size() : 1 + input.below(200);
        requested += 1'000;
        peer.core.send_blocks(peer.now, conn, {{served.data(), bytes, std::nullopt}}, std::make_shared<int>(0));
        break;
      }
      case 10:
        peer.core.send(conn, "words", 5);
        fuzz::take(peer.core, conn, peer.now, input.chance(64) ? input.below(300) : 100'000);
        requested += 1'000;
        break;
      case 11:
        peer.core.fill(conn, input.byte() % 2 == 0);
        peer.core.sample(peer.now, conn, input.value<std::uint32_t>());
        peer.core.take_filling();
        requested += 10'000;
        break;
      case 12:
        peer.now += input.value<std::uint32_t>();
        peer.core.tick(peer.now);
        break;
      case 13:
        if (input.byte() % 2 == 0) {
          peer.core.close(conn);
          peer.end(conn);
          fuzz::feed(peer.core, conn, Bytes(300, std::byte{7}), peer.now);
        } else {
          peer.core.lost(peer.now, conn, "reset");
        }
        break;
      default:
        break;
    }
    delivered += fuzz::feed(peer.core, conn, frame, peer.now, most);
    peer.take_events();
    REQUIRE(peer.visits.size() + 1 >= connections, "one connection took another one with it");
    peer.core.take_closing();
    if (steps % 8 == 0) peer.check();
    const std::size_t held = fuzz::bytes_held - std::min(before, fuzz::bytes_held);
    REQUIRE(held < 4 * delivered + 8 * requested + 8 * size + (std::size_t{8} << 20), "%zu bytes held, %zu delivered",
            held, delivered);
  }
  peer.core.forget_blocks();
  peer.check();
  return 0;
}
