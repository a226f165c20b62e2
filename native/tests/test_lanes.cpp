// Links with several lanes: lanes that end at every point of an op, that are slow, that come late; and advice about
// paths.
#include <algorithm>
#include <cstring>
#include <memory>
#include <numeric>
#include <random>
#include <string>

#include <unistd.h>

#include "check.hpp"
#include "ringfold/core.hpp"
#include "ringfold/path_hints.hpp"

using namespace ringfold;

namespace {

constexpr Ns millisecond = 1'000'000;
constexpr Ns timeout = 300'000 * millisecond;

struct Wire {
  std::size_t a_core, b_core;
  ConnId a, b;
  std::uint32_t path;
  bool cut = false;
  std::size_t in_kernel[2] = {};  // by direction: taken by the transport, and not delivered
  std::size_t carried[2] = {};    // by direction: delivered
};

// Cores in a ring, one lane per path and edge. A wire that is cut delivers nothing, but takes what a window has room
// for.
class Ring {
 public:
  Ring(std::uint32_t size, std::uint32_t paths, std::size_t segment, unsigned seed) : rng_(seed), paths_(paths) {
    for (std::uint32_t i = 0; i < size; ++i) cores_.push_back(std::make_unique<Core>());
    for (std::uint32_t i = 0; i < size; ++i) {
      for (std::uint32_t path = 0; path < paths; ++path) connect(i, path, 0);
    }
    std::vector<PeerId> members(size);
    std::iota(members.begin(), members.end(), PeerId{0});
    for (std::uint32_t i = 0; i < size; ++i) {
      EpochSpec spec{1, i, size, members, false, 0, segment};
      spec.multipath = true;
      core(i).install(now, spec);
    }
  }

  void connect(std::uint32_t from, std::uint32_t path, std::uint32_t epoch) {
    const auto to = static_cast<std::uint32_t>((from + 1) % cores_.size());
    const ConnId out = core(from).open("next", false), in = core(to).open("previous", true);
    core(from).promote(now, out, true, to, path, {true, path, paths_, epoch});
    core(to).promote(now, in, false, from, path, {true, path, paths_, epoch});
    wires_.push_back({from, to, out, in, path});
  }

  Core& core(std::size_t i) { return *cores_[i]; }
  std::size_t size() const { return cores_.size(); }
  std::vector<Wire>& wires() { return wires_; }

  void end_wire(std::size_t at) {
    const Wire wire = wires_[at];
    wires_.erase(wires_.begin() + static_cast<std::ptrdiff_t>(at));
    core(wire.a_core).lost(now, wire.a, "reset");
    core(wire.b_core).lost(now, wire.b, "reset");
  }

  bool move() {
    std::shuffle(wires_.begin(), wires_.end(), rng_);
    for (Wire& wire : wires_) {
      if (carry(wire, 0) || carry(wire, 1)) return true;
    }
    return false;
  }
  void run() {
    while (move()) {
    }
  }
  // As a shell does while something is in flight: report to the cores what the transport knows.
  void look(Ns later) {
    now += later;
    for (const Wire& wire : wires_) {
      core(wire.a_core).acknowledged(now, wire.a, wire.in_kernel[0], millisecond);
      core(wire.b_core).acknowledged(now, wire.b, wire.in_kernel[1], millisecond);
    }
  }

  Ns now = 1;
  std::mt19937 rng_;

 private:
  bool carry(Wire& wire, int direction) {
    const auto [from, source, to, target] = direction == 0 ? std::tuple(wire.a_core, wire.a, wire.b_core, wire.b)
                                                           : std::tuple(wire.b_core, wire.b, wire.a_core, wire.a);
    iovec pieces[8];
    const std::size_t count = core(from).gather(source, pieces, 8);
    if (count == 0) return false;
    std::size_t bytes =
        std::min<std::size_t>(std::uniform_int_distribution<std::size_t>(1, 700)(rng_), pieces[0].iov_len);
    if (wire.cut) {
      bytes = std::min(bytes, window - std::min(window, wire.in_kernel[direction]));
      if (bytes == 0) return false;
      wire.in_kernel[direction] += bytes;
      core(from).sent(now, source, bytes);
      return true;
    }
    const auto space = core(to).receive_space(target);
    bytes = std::min(bytes, space.size());
    if (bytes == 0) return false;
    std::memcpy(space.data(), pieces[0].iov_base, bytes);
    core(from).sent(now, source, bytes);
    core(to).received(now, target, bytes);
    wire.carried[direction] += bytes;
    return true;
  }

  static constexpr std::size_t window = 900;
  std::uint32_t paths_;
  std::vector<std::unique_ptr<Core>> cores_;
  std::vector<Wire> wires_;
};

OpSpec call(std::vector<float>& values) {
  OpSpec spec;
  spec.timeout = timeout;
  auto* at = reinterpret_cast<std::byte*>(values.data());
  spec.spans.push_back({at, at, values.size() * sizeof(float), kernels::DType::f32, 0});
  return spec;
}

struct Run {
  std::vector<std::vector<float>> data;
  std::vector<std::uint64_t> ids;
};

Run begin(Ring& ring, std::size_t count) {
  Run run;
  run.data.assign(ring.size(), std::vector<float>(count));
  for (std::size_t r = 0; r < ring.size(); ++r) {
    for (std::size_t i = 0; i < count; ++i) run.data[r][i] = static_cast<float>((r + 1) * 10 + i % 7);
  }
  for (std::size_t r = 0; r < ring.size(); ++r) run.ids.push_back(ring.core(r).submit(ring.now, call(run.data[r])));
  return run;
}

void check_end(Ring& ring, const Run& run) {
  const auto n = static_cast<float>(ring.size());
  for (std::size_t r = 0; r < ring.size(); ++r) {
    const OpPtr op = ring.core(r).find(run.ids[r]);
    CHECK(op->state == OpState::finished && op->result.status == OpStatus::ok);
    for (std::size_t i = 0; i < run.data[r].size(); ++i) {
      CHECK(run.data[r][i] == 10 * n * (n + 1) / 2 + n * static_cast<float>(i % 7));
    }
  }
}

// Whatever had been sent, delivered or reported at that point: everybody ends with the sum, and nobody loses a link.
TEST(lanes_that_end_at_any_point_cost_no_op) {
  for (const std::uint32_t ranks : {2u, 3u, 4u, 5u}) {
    for (unsigned seed = 0; seed < 60; ++seed) {
      Ring ring(ranks, 3, 256, seed);
      ring.run();
      Run run = begin(ring, 1200);
      for (int lost = 0; lost < 2; ++lost) {
        const int steps = std::uniform_int_distribution<int>(0, 300)(ring.rng_);
        for (int i = 0; i < steps; ++i) ring.move();
        const std::uint32_t path = lost;  // of every edge: a switch went down
        for (std::size_t at = ring.wires().size(); at-- > 0;) {
          if (ring.wires()[at].path == path) ring.end_wire(at);
        }
      }
      ring.run();
      check_end(ring, run);
      for (std::size_t r = 0; r < ranks; ++r) {
        while (const auto event = ring.core(r).next_event()) CHECK(event->kind != Event::Kind::link_lost);
      }
    }
  }
}

TEST(a_lane_that_comes_late_takes_part) {
  Ring ring(2, 2, 256, 5);
  for (std::size_t at = ring.wires().size(); at-- > 0;) {
    if (ring.wires()[at].path == 1) ring.end_wire(at);
  }
  ring.run();
  for (const std::uint32_t rank : {0u, 1u}) ring.connect(rank, 1, 1);
  Run run = begin(ring, 4000);
  ring.run();
  check_end(ring, run);
  CHECK(ring.core(0).path_bytes(true)[1] > 0);
}

// A path that swallows everything is not an end of its lanes, but what it holds goes again over the other one.
TEST(the_tail_of_a_silent_lane_is_sent_again) {
  Ring ring(2, 2, 256, 7);
  ring.run();
  for (Wire& wire : ring.wires()) wire.cut = wire.path == 1;
  Run run = begin(ring, 4000);
  ring.run();
  CHECK(ring.core(0).find(run.ids[0])->state != OpState::finished);
  for (int i = 0; i < 60; ++i) {
    ring.look(5 * millisecond);
    ring.run();
  }
  check_end(ring, run);
  CHECK(ring.core(0).stats().reissued > 0 && ring.core(0).stats().lanes_lost == 0);
}

TEST(memory_is_released_when_a_segment_was_sent_twice) {
  Ring ring(2, 2, 256, 8);
  ring.run();
  for (Wire& wire : ring.wires()) wire.cut = wire.path == 1;
  Run run = begin(ring, 4000);
  for (int i = 0; i < 60; ++i) {
    ring.run();
    ring.look(5 * millisecond);
  }
  check_end(ring, run);
  for (auto& each : run.data) each = std::vector<float>();  // a lane that still read from it would be found by ASan
  for (Wire& wire : ring.wires()) {
    wire.cut = false;
    CHECK(wire.path == 0 || wire.in_kernel[0] + wire.in_kernel[1] > 0);
  }
  for (std::size_t r = 0; r < 2; ++r) {
    for (const Wire& wire : ring.wires()) {
      iovec pieces[8];
      ring.core(wire.a_core).gather(wire.a, pieces, 8);
    }
  }
}

std::array<std::uint64_t, max_paths> split(const PathShares& shares, std::size_t count, std::uint32_t paths = 2) {
  Ring ring(2, paths, 256, 11);
  ring.run();
  ring.core(0).set_path_shares(1, shares);
  Run run = begin(ring, count);
  ring.run();
  check_end(ring, run);
  return ring.core(0).path_bytes(true);
}

TEST(shares_bind_when_they_are_fixed) {
  const auto even = split({{100, 100}, PathShares::fixed}, 64'000);
  CHECK(std::max(even[0], even[1]) - std::min(even[0], even[1]) <= 256);
  const auto fifth = split({{80, 20}, PathShares::fixed}, 64'000);
  CHECK(fifth[1] > 50'000 && fifth[1] < 52'500);
  const auto thirds = split({{100, 100, 100}, PathShares::fixed}, 64'000, 3);
  CHECK(thirds[0] + thirds[1] + thirds[2] == 256'000);
}

TEST(a_weight_decides_the_first_segments) {
  const auto one = split({{60'000, 5'000}, 0}, 64);  // a single segment
  CHECK(one[0] == 256 && one[1] == 0);
  const auto four = split({{48'000, 16'000}, 0}, 256);
  CHECK(four[0] == 768 && four[1] == 256);
}

// At a cold start no rate is known: near the end a path of a small share is not waited for.
TEST(shares_stand_for_rates_that_are_not_known) {
  const auto few = split({{60'000, 6'000}, 0}, 16 * 64);
  CHECK(few[0] + few[1] == 16 * 256 && few[1] <= 2 * 256);
  const auto equal = split({{33'000, 33'000}, 0}, 16 * 64);
  CHECK(equal[1] >= 6 * 256 && equal[1] <= 10 * 256);
}

TEST(a_vetoed_path_gets_nothing_while_another_one_lives) {
  const auto vetoed = split({{}, 1u << 0}, 10'000);
  CHECK(vetoed[0] == 0 && vetoed[1] == 40'000);
  const auto both = split({{}, 3u}, 10'000);
  CHECK(both[0] + both[1] == 40'000);
}

class Advice : public PathHints {
 public:
  bool read(PeerId peer, PathShares& out) const override {
    ++asked;
    out = given;
    return fresh && (about == anybody || about == peer);
  }
  static constexpr PeerId anybody = 1000;
  PeerId about = anybody;
  mutable int asked = 0;
  bool fresh = true;
  PathShares given{{}, 2u};
};

TEST(hints_are_read_before_each_segment_and_may_be_missing) {
  Ring ring(2, 2, 256, 12);
  ring.run();
  Advice advice;
  ring.core(0).set_path_hints(&advice);
  Run first = begin(ring, 10'000);
  ring.run();
  check_end(ring, first);
  const auto vetoed = ring.core(0).path_bytes(true);
  CHECK(vetoed[1] == 0 && advice.asked >= 157);
  advice.fresh = false;
  Run second = begin(ring, 10'000);
  ring.run();
  check_end(ring, second);
  CHECK(ring.core(0).path_bytes(true)[1] > 0);
}

// What is said back to the previous member goes by the advice about that neighbour, whatever is said of the next one.
TEST(the_reverse_direction_follows_its_own_advice) {
  for (const std::uint32_t vetoed : {0u, 1u}) {
    Ring ring(3, 2, 256, 15);
    ring.run();
    Advice advice;
    advice.given = {{}, 1u << vetoed};
    advice.about = 2;
    ring.core(0).set_path_hints(&advice);
    for (Wire& wire : ring.wires()) wire.carried[0] = wire.carried[1] = 0;
    Run run = begin(ring, 512);
    ring.run();
    check_end(ring, run);
    for (const Wire& wire : ring.wires()) {
      if (wire.a_core == 2) CHECK((wire.carried[1] == 0) == (wire.path == vetoed));
    }
    const auto sent = ring.core(0).path_bytes(true);
    CHECK(sent[0] > 0 && sent[1] > 0);
  }
}

// A file of hints with one owner in slot 7, and a core that follows it.
struct Agent {
  Agent() : path("/tmp/ringfold-test-lanes-" + std::to_string(::getpid())), writer(path, 1'000'000'000, 0600) {
    generation = writer.slot_generations()[7] + 1;
    writer.open(7, generation);
    writer.beat();
    followed.follow(1, path, 7, generation);
  }
  ~Agent() { ::unlink(path.c_str()); }
  Ns now() const { return static_cast<Ns>(ringfold_hints_now()); }

  std::string path;
  hints::Writer writer;
  std::uint32_t generation;
  FollowedHints followed;
};

std::array<std::uint64_t, max_paths> sent_with(Ring& ring, std::size_t count) {
  const auto before = ring.core(0).path_bytes(true);
  Run run = begin(ring, count);
  ring.run();
  check_end(ring, run);
  auto sent = ring.core(0).path_bytes(true);
  for (std::size_t path = 0; path < max_paths; ++path) sent[path] -= before[path];
  return sent;
}

TEST(a_hint_word_is_weight_and_veto_and_nothing_when_it_is_stale) {
  Agent agent;
  Ring ring(2, 2, 256, 13);
  ring.run();
  ring.core(0).set_path_hints(&agent.followed);

  CHECK(!agent.followed.look(agent.now()));  // a slot without a hint: no advice
  const std::uint16_t three_quarters[] = {49'151, 16'384};
  agent.writer.publish(7, three_quarters, 0);
  CHECK(agent.followed.look(agent.now()));
  CHECK(!agent.followed.look(agent.now()));
  const auto weighed = sent_with(ring, 256);  // four segments
  CHECK(weighed[0] == 768 && weighed[1] == 256);

  const std::uint16_t second_only[] = {0, 65'535};
  agent.writer.publish(7, second_only, 1);
  const auto held = sent_with(ring, 10'000);  // at the next segment: no look in between
  CHECK(held[0] == 0 && held[1] == 40'000);
  agent.writer.publish(7, second_only, 0);  // no backpressure, and no share either
  CHECK(sent_with(ring, 10'000)[0] == 0);
  agent.writer.publish(7, three_quarters, 3);  // all are equally bad: by the shares
  const auto all = sent_with(ring, 256);
  CHECK(all[0] == 768 && all[1] == 256);

  agent.writer.publish(7, second_only, 1);
  CHECK(agent.followed.look(agent.now() + 2'000'000'000));  // no heartbeat for so long
  CHECK(sent_with(ring, 10'000)[0] > 0);
  CHECK(agent.followed.look(agent.now()));
  CHECK(sent_with(ring, 10'000)[0] == 0);
  agent.writer.open(7, agent.generation + 1);  // the slot has another owner
  agent.writer.publish(7, second_only, 1);
  CHECK(sent_with(ring, 10'000)[0] > 0);
}

TEST(a_hint_that_is_fixed_binds_over_the_whole_transfer) {
  Agent agent;
  Ring ring(2, 2, 256, 18);
  ring.run();
  ring.core(0).set_path_hints(&agent.followed);
  const std::uint16_t nine_tenths[] = {58'982, 6'553};
  agent.writer.publish(7, nine_tenths, 0, RINGFOLD_HINT_FIXED);
  CHECK(agent.followed.look(agent.now()));
  const auto bound = sent_with(ring, 64'000);
  CHECK(bound[1] > 25'200 && bound[1] < 26'000);
  agent.writer.publish(7, nine_tenths, 0);  // the same shares of the policy: from the next segment on they are weights
  CHECK(agent.followed.look(agent.now()));
  PathShares found;
  CHECK(agent.followed.read(1, found) && found.flags == 0);
}

TEST(the_advice_of_many_paths_is_read_whole) {
  Agent agent;
  const std::uint16_t shares[] = {10'000, 20'000, 0, 30'000, 5'535};
  agent.writer.publish(7, shares, 1u << 2);
  agent.followed.look(agent.now());
  PathShares found;
  CHECK(agent.followed.read(1, found));
  CHECK(found.share[3] == 30'000 && found.flags == 1u << 2);
  agent.writer.publish(7, shares, 1u << 2, RINGFOLD_HINT_FIXED);
  CHECK(agent.followed.read(1, found) && found.flags == (1u << 2 | PathShares::fixed));
  CHECK(!agent.followed.read(2, found));  // another peer
  agent.followed.forget(1);
  CHECK(!agent.followed.read(1, found));
}

TEST(a_vetoed_path_does_not_get_the_tail_of_another_one) {
  Ring ring(2, 2, 256, 14);
  ring.run();
  Advice advice;
  advice.given = {{}, 1u << 1};
  ring.core(0).set_path_hints(&advice);
  for (Wire& wire : ring.wires()) wire.cut = wire.path == 0 && wire.a_core == 0;
  Run run = begin(ring, 512);
  ring.run();
  ring.look(10 * millisecond);
  ring.run();
  CHECK(ring.core(0).stats().reissued == 0);
  // A path that is silent for longer does not count any more: then a bad one is better than none.
  for (int i = 0; i < 10; ++i) {
    ring.look(10 * millisecond);
    ring.run();
  }
  check_end(ring, run);
}

TEST(rtts_are_reported_by_path_and_only_while_they_are_new) {
  Core core;
  const Ns now = 5'000 * millisecond;
  ConnId lanes[4];
  for (std::uint32_t lane = 0; lane < 4; ++lane) {
    lanes[lane] = core.open("x", true);
    core.promote(now, lanes[lane], lane == 3, 7, lane, {true, lane % 2, 2, 0});
  }
  core.acknowledged(now, lanes[0], 0, 10 * millisecond, 3 * millisecond);
  core.acknowledged(now, lanes[2], 0, 20 * millisecond, 2 * millisecond);
  core.acknowledged(now, lanes[3], 0, 5 * millisecond);
  const auto rtts = core.path_rtts(now, 7);
  CHECK(rtts[0].smoothed == 15 * millisecond && rtts[0].min == 2 * millisecond);
  CHECK(rtts[1].smoothed == 5 * millisecond && rtts[1].min == 5 * millisecond);  // the kernel did not send_text
  CHECK(core.path_rtts(now, 8)[0].smoothed == 0);
  CHECK(core.path_rtts(now + 1'001 * millisecond, 7)[0].smoothed == 0);
}

// A process that gets no core for a while reads what has come before it looks at what was acknowledged meanwhile.
TEST(a_peer_that_was_late_itself_does_not_take_a_path_for_silent) {
  Ring ring(2, 2, 256, 15);
  ring.run();
  ring.core(0).set_path_shares(1, {{}, 1u << 1});
  Run run = begin(ring, 10'000);
  for (int i = 0; i < 100; ++i) ring.move();
  for (const Wire& wire : ring.wires()) {
    if (wire.a_core == 0) ring.core(0).acknowledged(ring.now, wire.a, 300, millisecond);
  }
  ring.now += 100 * millisecond;
  ring.run();
  check_end(ring, run);
  CHECK(ring.core(0).path_bytes(true)[1] == 0);
}

// 1 MB/s over 100 ms. Neither the first round trip, in which nothing comes back, nor a lane that ran dry says anything
// of a rate.
TEST(on_a_high_rtt_path_the_rate_is_that_of_the_path) {
  constexpr Ns trip = 100 * millisecond;
  Ring ring(2, 2, 1 << 20, 15);
  ring.run();
  Core& core = ring.core(0);
  const auto& wires = ring.wires();
  const ConnId lane =
      std::find_if(wires.begin(), wires.end(), [](const Wire& each) { return each.a_core == 0 && each.path == 0; })->a;
  std::vector<float> values(200'000);
  core.submit(ring.now, call(values));
  std::size_t in_flight = 0;
  const auto send = [&](std::size_t bytes) {
    iovec pieces[8];
    while (bytes > 0 && core.gather(lane, pieces, 8) > 0) {
      const std::size_t some = std::min(bytes, pieces[0].iov_len);
      core.sent(ring.now, lane, some);
      in_flight += some;
      bytes -= some;
    }
  };
  const auto pass = [&](std::size_t acknowledged) {
    ring.now += 10 * millisecond;
    in_flight -= acknowledged;
    core.acknowledged(ring.now, lane, in_flight, trip);
  };
  const auto rate = [&] { return core.path_rates(ring.now, 1)[0]; };
  send(100'000);
  for (int i = 0; i < 10; ++i) pass(0);
  for (int i = 0; i < 30; ++i) {
    pass(10'000);
    send(10'000);
  }
  CHECK(rate() > 950'000 && rate() < 1'050'000);
  send(values.size() * sizeof(float));
  for (int i = 0; i < 15; ++i) pass(10'000);
  const std::uint64_t before = rate();
  for (int i = 0; i < 30; ++i) pass(1'000);
  CHECK(rate() == before);
}

TEST(a_report_of_more_than_was_sent_ends_the_link) {
  Core core;
  const ConnId conn = core.open("x", true);
  core.promote(1, conn, false, 4, 0, {true, 0, 2, 0});
  FrameHeader header;
  header.kind = LaneFrame::applied;
  header.offset = 1;
  header.header_crc = header.crc();
  const auto space = core.receive_space(conn);
  std::memcpy(space.data(), &header, sizeof header);
  core.received(1, conn, sizeof header);
  bool reported = false;
  while (const auto event = core.next_event()) reported |= event->kind == Event::Kind::link_lost;
  CHECK(reported);
}

// After an op a lane may have the last, short frame in flight for as long as the other kernel likes to wait for more.
TEST(a_late_acknowledgement_of_a_short_frame_is_no_silence) {
  Ring ring(2, 2, 256, 16);
  ring.run();
  ring.core(0).set_path_shares(1, {{}, 1u << 1});
  ring.now += 42 * millisecond;
  for (const Wire& wire : ring.wires()) {
    if (wire.a_core == 0 && wire.path == 0) ring.core(0).acknowledged(ring.now, wire.a, 64, millisecond);
  }
  Run run = begin(ring, 10'000);
  ring.run();
  check_end(ring, run);
  CHECK(ring.core(0).path_bytes(true)[1] == 0);
}

TEST(a_short_frame_does_not_go_back_and_forth_until_it_is_acknowledged) {
  Ring ring(2, 2, 256, 17);
  ring.run();
  Run run = begin(ring, 1'000);
  ring.run();
  check_end(ring, run);
  for (Wire& wire : ring.wires()) wire.in_kernel[0] = sizeof(FrameHeader);  // arrived, and not acknowledged
  for (int i = 0; i < 40; ++i) {
    ring.look(millisecond);
    ring.run();
  }
  CHECK(ring.core(0).stats().reissued <= 2);
}

void feed(Core& core, ConnId conn, FrameHeader header) {
  header.header_crc = header.crc();
  const auto space = core.receive_space(conn);
  std::memcpy(space.data(), &header, sizeof header);
  core.received(1, conn, sizeof header);
}

// What was sent is remembered until it is reported: a neighbour that never reports must not fill the memory.
TEST(a_neighbour_that_reports_nothing_loses_the_link) {
  Core core;
  ConnId out[2];
  for (std::uint32_t lane = 0; lane < 2; ++lane) {
    out[lane] = core.open("next", false);
    core.promote(1, out[lane], true, 1, lane, {true, 0, 1, 0});
  }
  core.install(1, {1, 0, 2, {0, 1}, false, 0, 64});
  std::vector<float> values(std::size_t{6} << 20);
  const OpPtr op = core.find(core.submit(1, call(values)));
  FrameHeader header;
  header.epoch = 1;
  feed(core, out[0], header);  // its mark
  header.kind = LaneFrame::ready;
  header.sequence = op->sequence;
  header.tag = op->spec.tag;
  feed(core, out[0], header);
  std::size_t frames = 0;
  iovec pieces[8];
  while (const std::size_t count = core.gather(out[0], pieces, 8)) {
    std::size_t bytes = 0;
    for (std::size_t i = 0; i < count; ++i) bytes += pieces[i].iov_len;
    core.sent(1, out[0], bytes);
    ++frames;
  }
  bool reported = false;
  while (const auto event = core.next_event()) reported |= event->kind == Event::Kind::link_lost;
  CHECK(reported && frames > 200'000 && frames < 300'000);
}

}  // namespace
