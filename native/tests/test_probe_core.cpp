// Exchanges between cores, over a network that loses, repeats, delays and lies.
#include <algorithm>
#include <functional>
#include <map>
#include <random>
#include <set>

#include "check.hpp"
#include "ringfold/probe.hpp"

using namespace ringfold;
using namespace ringfold::probe;

namespace {

constexpr Ns us = 1'000, ms = 1'000'000, s = 1'000'000'000;

Key counting_key() {
  Key key{};
  for (std::size_t i = 0; i < key.size(); ++i) key[i] = static_cast<std::uint8_t>(i);
  return key;
}

Endpoint endpoint_of(Node node) {
  Endpoint out;
  out.length = 16;
  out.bytes[0] = static_cast<std::uint8_t>(node);
  return out;
}

// Cores on a simulated network: every packet takes `delay`; `copies_of` returns the extra delay of each copy that
// arrives.
class Network {
 public:
  using Copies = std::vector<Ns>;  // extra delays
  std::function<Copies(const Packet&)> copies_of = [](const Packet&) { return Copies{0}; };
  std::map<Node, Core> cores;
  std::map<Node, Ns> offset;
  std::vector<std::pair<Node, Wire>> packets;  // everything that was sent, with its receiver
  Ns now = 10 * s, delay = 30 * us;
  std::map<Kind, int> sent;
  std::set<int> addressed;

  Core& add(Node node, Ns ahead = 0) {
    offset[node] = ahead;
    return cores.emplace(node, Core(node, 1'000'000)).first->second;
  }
  void run(Ns time) {
    const Ns until = now + time;
    for (; now < until; now += 20 * us) {
      deliver();
      for (auto& [node, core] : cores) {
        std::vector<Outgoing> out;
        core.step(now, out);
        for (const Outgoing& each : out) send(node, core, each);
      }
    }
  }
  void inject(Node to, std::span<const std::uint8_t> bytes, Ns stamp = 1) {
    cores.at(to).received(now, bytes, endpoint_of(99), stamp);
  }

 private:
  struct Flying {
    Node to, from;
    Wire wire;
    Ns stamp;
  };
  void send(Node node, Core& core, const Outgoing& each) {
    ++sent[each.packet.kind];
    addressed.insert(each.to.bytes[0]);
    const Wire wire = encode(core.key(), each.packet);
    packets.emplace_back(each.packet.dst, wire);
    if (each.wants_stamp()) core.stamped(each.owner, now + offset[node]);
    for (const Ns extra : copies_of(each.packet)) {
      const Ns at = now + delay + extra;
      flying_.emplace(at, Flying{each.packet.dst, node, wire, at});
    }
  }
  void deliver() {
    while (!flying_.empty() && flying_.begin()->first <= now) {
      const Flying next = flying_.begin()->second;
      flying_.erase(flying_.begin());
      const auto core = cores.find(next.to);
      if (core != cores.end())
        core->second.received(now, next.wire, endpoint_of(next.from), next.stamp + offset[next.to]);
    }
  }
  std::multimap<Ns, Flying> flying_;
};

// Node 1 probes node 2.
struct Pair : Network {
  Core& prober = add(1, 5 * ms);
  Core& responder = add(2, 77 * ms);
  Pair() {
    prober.configure(0, counting_key(), {{2, endpoint_of(2)}}, {});
    responder.configure(0, counting_key(), {}, {{1, endpoint_of(1)}});
    prober.resume(now, now, 800 * us, 3 * ms);
  }
  Window rotate() {
    std::vector<Window> windows = prober.rotate(now, now);
    CHECK(windows.size() == 1);
    filter(windows[0], 800 * us);
    return windows[0];
  }
};

TEST(exchanges_give_whole_rows_in_order) {
  Pair net;
  net.run(2 * s);
  const Window window = net.rotate();
  CHECK(window.src == 1 && window.dst == 2 && window.end - window.begin == 2 * s);
  CHECK_MESSAGE(window.rows.size() > 515 && window.rows.size() < 530, "%zu rows", window.rows.size());
  CHECK(window.sent == window.rows.size() && window.lost == 0 && window.duplicates == 0 && window.filtered == 0);
  for (std::size_t i = 0; i < window.rows.size(); ++i) {
    const Row& row = window.rows[i];
    CHECK(row[1] - row[0] == net.delay + 72 * ms && row[3] - row[2] == net.delay + 72 * ms);
    CHECK(row[5] - row[4] == net.delay - 72 * ms && row[7] - row[6] == net.delay - 72 * ms);
    CHECK(net.addressed == (std::set<int>{1, 2}));
    CHECK(std::abs(row[2] - row[0] - 800 * us) < 50 * us && std::abs(row[6] - row[4] - 800 * us) < 50 * us);
    CHECK(i == 0 || row[0] > window.rows[i - 1][0]);
    CHECK(window.kept[i] == 3);
  }
}

TEST(a_lost_packet_costs_its_pair_and_counts) {
  for (const Kind kind : {Kind::pt1, Kind::pt2, Kind::pr1, Kind::pr2, Kind::pd1}) {
    Pair net;
    int count = 0;
    net.copies_of = [&](const Packet& packet) {
      return packet.kind == kind && ++count % 10 == 0 ? Network::Copies{} : Network::Copies{0};
    };
    net.run(3 * s);
    const Window window = net.rotate();
    CHECK_MESSAGE(std::abs(static_cast<double>(window.lost) / static_cast<double>(window.sent) - 0.1) < 0.01,
                  "kind %d: %llu of %llu lost", static_cast<int>(kind), static_cast<unsigned long long>(window.lost),
                  static_cast<unsigned long long>(window.sent));
    std::size_t forward = 0, backward = 0;
    for (const Row& row : window.rows) {
      forward += row[0] != 0 && row[1] != 0 && row[2] != 0 && row[3] != 0;
      backward += row[4] != 0 && row[5] != 0 && row[6] != 0 && row[7] != 0;
    }
    const std::size_t whole = window.sent - window.lost;
    // Without Pt1 there is nothing to answer; Pr2 has a part in both pairs.
    const bool costs_forward = kind != Kind::pd1, costs_backward = kind != Kind::pt2;
    CHECK_MESSAGE(forward == (costs_forward ? whole : window.sent), "kind %d forward", static_cast<int>(kind));
    CHECK_MESSAGE(backward == (costs_backward ? whole : window.sent), "kind %d backward", static_cast<int>(kind));
    CHECK(std::is_sorted(window.rows.begin(), window.rows.end()));
  }
}

TEST(copies_are_counted_and_change_nothing) {
  Pair net;
  net.copies_of = [](const Packet&) { return Network::Copies{0, 40 * us, 300 * ms}; };
  net.run(2 * s);
  const Window window = net.rotate();
  CHECK(window.lost == 0 && window.rows.size() > 515);
  for (const Row& row : window.rows)
    CHECK(row[1] - row[0] == net.delay + 72 * ms && row[5] - row[4] == net.delay - 72 * ms);
  CHECK(window.duplicates > 5 * window.rows.size() / 2);
  CHECK(net.sent[Kind::pr1] <= net.sent[Kind::pt1]);
  CHECK(net.responder.stats().duplicates + net.responder.stats().replayed > 3 * window.rows.size());
}

TEST(reordering_loses_nothing) {
  Pair net;
  std::mt19937 rng(7);
  net.copies_of = [&](const Packet&) { return Network::Copies{static_cast<Ns>(rng() % 9) * ms}; };
  net.run(3 * s);
  const Window window = net.rotate();
  CHECK(window.lost == 0 && window.rows.size() > 700);
  CHECK(std::is_sorted(window.rows.begin(), window.rows.end()));
  for (const Row& row : window.rows)
    CHECK(row[1] - row[0] >= net.delay + 72 * ms && row[5] - row[4] >= net.delay - 72 * ms);
}

TEST(a_replayed_packet_is_ignored) {
  Pair net;
  net.run(s);
  net.prober.pause();
  net.run(2 * s);
  const auto old = net.packets;
  const auto sent = net.sent;
  const std::uint64_t at_responder = net.responder.stats().replayed, at_prober = net.prober.stats().duplicates;
  for (const auto& [to, wire] : old) net.inject(to, wire);
  net.run(s);
  CHECK(net.sent == sent);
  CHECK(net.responder.stats().replayed - at_responder ==
        static_cast<std::uint64_t>(sent.at(Kind::pt1) + sent.at(Kind::pt2)));
  CHECK(net.prober.stats().duplicates + net.prober.stats().replayed - at_prober ==
        static_cast<std::uint64_t>(sent.at(Kind::pr1) + sent.at(Kind::pr2) + sent.at(Kind::pd1)));
}

TEST(received_sequences_stay_known_under_the_same_key_only) {
  Pair net;
  net.run(100 * ms);
  const Wire old = net.packets[0].second;
  net.responder.configure(0, counting_key(), {}, {{1, endpoint_of(1)}});
  net.inject(2, old);
  CHECK(net.responder.in_flight() == 0);
  Key other = counting_key();
  other[0] ^= 1;
  net.responder.configure(0, other, {}, {{1, endpoint_of(1)}});
  net.inject(2, encode(other, {.kind = Kind::pt1, .src = 1, .dst = 2, .sequence = 5}));
  CHECK(net.responder.in_flight() == 1);
}

TEST(unknown_and_spoofed_senders_are_counted_and_get_no_answer) {
  Pair net;
  net.prober.pause();
  const auto forged = [](Kind kind, Node src, Node dst) {
    return encode(counting_key(), {.kind = kind, .src = src, .dst = dst, .sequence = 1'000'005});
  };
  net.inject(2, forged(Kind::pt1, 3, 2));  // not a neighbour
  net.inject(2, forged(Kind::pt1, 1, 4));  // for another node
  net.inject(2, forged(Kind::pr1, 1, 2));  // a response to a node that sent no probe
  net.inject(1, forged(Kind::pt1, 2, 1));  // a probe from a node that may only answer
  CHECK(net.responder.stats().strangers == 3 && net.prober.stats().strangers == 1);
  Wire wrong = forged(Kind::pt1, 1, 2);
  wrong[39] ^= 1;
  net.inject(2, wrong);
  CHECK(net.responder.stats().spoofed == 1);
  net.inject(2, {wrong.data(), 39});
  CHECK(net.responder.stats().malformed == 1);
  net.inject(1, forged(Kind::pr1, 2, 1));  // a response without a probe
  CHECK(net.prober.stats().replayed == 1);
  CHECK(net.responder.in_flight() == 0);
  net.run(100 * ms);
  CHECK(net.sent.empty());
}

TEST(without_a_key_no_packet_counts) {
  Core core(1, 0);
  core.received(0, encode(Key{}, {.kind = Kind::pt1, .src = 0, .dst = 1, .sequence = 1}), endpoint_of(2), 1);
  CHECK(core.stats().spoofed == 1);
}

// A neighbour behind NAT does not come from the address that the graph says.
TEST(answers_go_to_where_the_probe_came_from) {
  Pair net;
  net.prober.pause();
  for (const Kind kind : {Kind::pt1, Kind::pt2}) {
    net.inject(2, encode(counting_key(), {.kind = kind, .src = 1, .dst = 2, .sequence = 2'000'000}));
  }
  net.run(100 * ms);
  CHECK(net.sent[Kind::pr1] == 1 && net.sent[Kind::pr2] == 1 && net.sent[Kind::pd1] == 1);
  CHECK(net.addressed == std::set<int>{99});
}

TEST(answers_are_bounded) {
  Pair net;
  net.prober.pause();
  for (std::uint64_t i = 0; i < 5'000; ++i) {
    net.inject(2, encode(counting_key(), {.kind = Kind::pt1, .src = 1, .dst = 2, .sequence = 2'000'000 + i}));
  }
  CHECK(net.responder.in_flight() == 256);
  CHECK(net.responder.stats().refused == 5'000 - 256);
}

TEST(a_silent_neighbour_is_all_loss) {
  Pair net;
  net.copies_of = [](const Packet&) { return Network::Copies{}; };
  net.run(4 * s);
  const Window window = net.rotate();
  CHECK(window.rows.empty() && window.sent > 700 && window.lost == window.sent);
}

TEST(losses_of_the_last_second_count) {
  Pair net;
  int count = 0;
  net.copies_of = [&](const Packet& packet) {
    return packet.kind == Kind::pr1 && ++count % 2 == 0 ? Network::Copies{} : Network::Copies{0};
  };
  net.run(900 * ms);
  const Window window = net.rotate();
  CHECK(window.lost > 100);
}

TEST(a_rotation_drops_what_is_in_flight) {
  Pair net;
  std::uint64_t rows = 0;
  for (int i = 0; i < 100; ++i) {
    net.run(20 * ms + i * 130 * us);
    const Window window = net.rotate();
    CHECK(window.lost == 0 && window.sent == window.rows.size() && window.duplicates == 0);
    for (const Row& row : window.rows) CHECK(row[0] >= window.begin + 5 * ms);
    rows += window.rows.size();
  }
  const auto begun = static_cast<std::uint64_t>(net.sent[Kind::pt1]);
  CHECK_MESSAGE(rows > begun * 7 / 10 && rows < begun, "%llu of %llu", static_cast<unsigned long long>(rows),
                static_cast<unsigned long long>(begun));
}

TEST(paused_means_answering_only) {
  Pair net;
  net.run(100 * ms);
  net.prober.pause();
  net.run(10 * ms);
  const int probes = net.sent[Kind::pt1] + net.sent[Kind::pt2];
  net.run(s);
  CHECK(net.sent[Kind::pt1] + net.sent[Kind::pt2] == probes);
  CHECK(!net.prober.due() && !net.responder.due());
  const Window window = net.rotate();
  CHECK(window.lost == 0 && window.rows.size() >= 25);
  net.prober.resume(net.now, net.now, 800 * us, 3 * ms);
  net.run(100 * ms);
  CHECK(net.rotate().rows.size() >= 24);
}

TEST(a_step_shows_at_both_ends) {
  Pair net;
  net.run(100 * ms);
  net.responder.stepped(net.now, "it stepped");
  net.run(200 * ms);
  CHECK(net.rotate().stepped.find("node 2") != std::string::npos);
  net.run(100 * ms);
  CHECK(net.rotate().stepped.empty());
  net.prober.stepped(net.now, "it stepped");
  net.run(200 * ms);
  CHECK(net.rotate().stepped == "it stepped");
  CHECK(net.rotate().stepped.empty());
}

TEST(user_stamps_of_either_end_show) {
  Pair net;
  net.run(100 * ms);
  CHECK(!net.rotate().user_stamps);
  net.responder.use_user_stamps();
  net.run(100 * ms);
  CHECK(net.rotate().user_stamps);
}

TEST(a_missing_stamp_costs_its_pair_only) {
  Pair net;
  const Packet answer{.kind = Kind::pr1, .src = 2, .dst = 1, .sequence = 1'000'013, .a = 5};
  net.copies_of = [&](const Packet& packet) {
    return packet.sequence == answer.sequence && packet.kind == Kind::pr1 ? Network::Copies{} : Network::Copies{0};
  };
  while (net.sent[Kind::pt1] < 13) net.run(us);
  net.run(10 * ms);
  net.inject(1, encode(counting_key(), answer), 0);
  net.run(2 * s);
  const Window window = net.rotate();
  const auto partial = std::find_if(window.rows.begin(), window.rows.end(), [](const Row& row) { return row[5] == 0; });
  CHECK(partial != window.rows.end() && (*partial)[1] == 5);
  CHECK(window.lost == 1);
}

TEST(many_edges_wake_no_more_often) {
  const auto ticks = [](Node others) {
    Network net;
    std::vector<Link> links;
    for (Node i = 2; i < 2 + others; ++i) links.push_back({i, endpoint_of(i)});
    net.add(1).configure(0, counting_key(), links, links);
    for (const Link& link : links)
      net.add(link.node).configure(0, counting_key(), {{1, endpoint_of(1)}}, {{1, endpoint_of(1)}});
    for (auto& [node, core] : net.cores) core.resume(net.now, net.now, 800 * us, 3 * ms);
    net.run(s);
    for (const Window& window : net.cores.at(1).rotate(net.now, net.now))
      CHECK(window.rows.size() > 255 && window.lost == 0);
    return net.cores.at(1).stats().ticks;
  };
  CHECK(ticks(1) == ticks(8));
  CHECK(ticks(8) < 2 * 265);
}

// The first packet pays for cold caches: over time, every probe and every response is first equally often.
TEST(packets_take_turns_in_going_first) {
  Core core(1, 0);
  const std::vector<Link> links{{2, endpoint_of(2)}, {3, endpoint_of(3)}};
  core.configure(0, counting_key(), links, links);
  core.resume(0, 0, 800 * us, 3 * ms);
  std::map<std::pair<Kind, Node>, int> went_first;
  Ns now = 0;
  for (std::uint64_t i = 0; i < 400; ++i, now = *core.due()) {
    for (const Node node : {2u, 3u}) {  // at the first instants Pt1, at the second Pt2
      const Packet packet{.kind = i % 2 == 0 ? Kind::pt1 : Kind::pt2, .src = node, .dst = 1, .sequence = 1 + i / 2};
      core.received(now, encode(counting_key(), packet), endpoint_of(node), 5);
    }
    std::vector<Outgoing> out;
    core.step(now, out);
    if (i < 4) continue;
    CHECK(out.size() == 4);
    ++went_first[{out[0].packet.kind, out[0].packet.dst}];
  }
  CHECK(went_first.size() == 8);
  for (const auto& [node, count] : went_first) CHECK_MESSAGE(count >= 45 && count <= 55, "%d times", count);
}

TEST(garbage_does_no_harm) {
  Pair net;
  std::mt19937 rng(11);
  for (int i = 0; i < 20'000; ++i) {
    const auto below = [&](unsigned limit) { return static_cast<unsigned>(rng() % limit); };
    const Node src = below(5);
    Wire wire = encode(counting_key(), {.kind = static_cast<Kind>(1 + below(5)),
                                        .src = src,
                                        .dst = below(3),
                                        .sequence = 1'000'000 + below(2'000),
                                        .a = static_cast<Ns>(rng()),
                                        .b = -1});
    if (src < 3)
      wire[below(40)] ^= static_cast<std::uint8_t>(1 + below(255));  // a sender with the key that is no neighbour
    net.inject(1 + below(2), {wire.data(), i % 16 == 0 ? below(40) : 40}, static_cast<Ns>(rng() % 3));
    if (i % 100 == 0) net.run(us);
  }
  net.run(2 * s);
  CHECK(net.rotate().rows.size() > 500);
}

}  // namespace
