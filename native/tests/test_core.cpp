// The engine core over in-memory lanes: every kind of op in rings of several sizes, aborts at every point, and lies.
#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdio>
#include <functional>
#include <map>
#include <memory>
#include <numeric>
#include <optional>
#include <random>

#include "check.hpp"
#include "ringfold/core.hpp"

using namespace ringfold;

namespace {

constexpr Ns timeout = 300'000'000'000;

struct Wire {
  std::size_t a_core, b_core;
  ConnId a, b;
};

// n cores in a ring, `lanes` connections per edge and channel, bytes moved in random pieces: channels interleave in any
// order. The seed decides how many channels there are, from 1 to 3, if nothing else does.
class Ring {
 public:
  Ring(std::uint32_t size, int lanes, std::size_t small, std::size_t segment, unsigned seed = 1, bool master = false,
       std::uint32_t channels = 0)
      : rng_(seed),
        small_(small),
        segment_(segment),
        master_(master),
        channels_(channels > 0 ? channels : 1 + seed % 3) {
    for (std::uint32_t i = 0; i < size; ++i) cores_.push_back(std::make_unique<Core>());
    for (std::uint32_t i = 0; i < size && size > 1; ++i) {
      const std::uint32_t next = (i + 1) % size;
      for (std::uint32_t lane = 0; lane < static_cast<std::uint32_t>(lanes) * channels_; ++lane) {
        const ConnId out = core(i).open("next", false), in = core(next).open("previous", true);
        Sharing sharing;
        sharing.channel = lane % channels_;
        core(i).promote(now, out, true, next, lane, sharing);
        core(next).promote(now, in, false, i, lane, sharing);
        wires_.push_back({i, next, out, in});
      }
    }
  }

  // Lanes between all members that are no neighbours, in every channel; without `epoch` they wait for the next one.
  void connect_all(std::uint32_t epoch = 0) {
    for (std::uint32_t i = 0; i < size(); ++i) {
      for (std::uint32_t j = i + 2; j < size(); ++j) {
        if (i == 0 && j + 1 == size()) continue;
        for (std::uint32_t channel = 0; channel < channels_; ++channel) {
          const ConnId one = core(i).open("direct", false), other = core(j).open("direct", true);
          Sharing sharing;
          sharing.channel = channel;
          sharing.direct = true;
          sharing.epoch = epoch;
          core(i).promote(now, one, true, j, channel, sharing);
          core(j).promote(now, other, false, i, channel, sharing);
          wires_.push_back({i, j, one, other});
        }
      }
    }
    direct = true;
  }

  // Closes the direct lanes between two members, while nothing is on them.
  void disconnect(std::uint32_t one, std::uint32_t other) {
    for (const auto& [from, to] : {std::pair(one, other), std::pair(other, one)}) {
      for (const LaneInfo& lane : core(from).lanes()) {
        if (lane.direct && lane.peer == to) core(from).close(lane.conn);
      }
    }
  }

  Core& core(std::size_t i) { return *cores_[i]; }
  std::size_t size() const { return cores_.size(); }

  void install(std::uint32_t epoch) {
    for (std::size_t i = 0; i < size(); ++i) install_at(i, epoch);
  }
  void install_at(std::size_t i, std::uint32_t epoch) {
    std::vector<PeerId> members(size());
    std::iota(members.begin(), members.end(), PeerId{0});
    EpochSpec spec{epoch,   static_cast<std::uint32_t>(i), static_cast<std::uint32_t>(size()), members, master_, small_,
                   segment_};
    spec.channels = channels_;
    spec.direct = direct;
    spec.hosts = hosts;
    if (one_host) spec.peers_here = spec.size;
    core(i).install(now, spec);
  }

  // Moves one random piece over one random wire; false when nothing wants to move.
  bool move() {
    std::shuffle(wires_.begin(), wires_.end(), rng_);
    for (const Wire& wire : wires_) {
      if (carry(wire.a_core, wire.a, wire.b_core, wire.b) || carry(wire.b_core, wire.b, wire.a_core, wire.a)) {
        return true;
      }
    }
    return false;
  }
  void run() {
    while (move()) {
    }
  }

  Ns now = 1;
  bool direct = false;
  std::uint32_t hosts = 1;
  bool one_host = false;

 private:
  bool carry(std::size_t from, ConnId source, std::size_t to, ConnId target) {
    const auto space = core(to).receive_space(target);
    if (space.empty()) return false;
    iovec pieces[8];
    const std::size_t count = core(from).gather(source, pieces, 8);
    if (count == 0) return false;
    const std::size_t most = std::uniform_int_distribution<std::size_t>(1, 700)(rng_);
    const std::size_t bytes = std::min({most, space.size(), pieces[0].iov_len});
    std::memcpy(space.data(), pieces[0].iov_base, bytes);
    core(from).sent(now, source, bytes);
    core(to).received(now, target, bytes);
    return true;
  }

  std::mt19937 rng_;
  std::size_t small_, segment_;
  bool master_;
  std::uint32_t channels_;
  std::vector<std::unique_ptr<Core>> cores_;
  std::vector<Wire> wires_;
};

// Threads that drive channels. From the first command that `is_late` on, those for that channel wait until work().
class SlowWorkers : public ChannelDriver {
 public:
  using IsLate = std::function<bool(std::uint32_t channel, const ChannelCommand& command)>;
  SlowWorkers(Core& core, IsLate is_late) : core_(core), is_late_(std::move(is_late)) { core.set_channel_driver(this); }

  bool post(std::uint32_t channel, ChannelCommand& command) override {
    const bool waits = !late_[channel].empty() || is_late_(channel, command);
    if (waits) late_[channel].push_back(std::move(command));
    else core_.channel(channel).execute(command);
    return true;
  }
  std::size_t work() {
    std::size_t count = 0;
    for (const auto& [channel, commands] : std::exchange(late_, {})) {
      for (const ChannelCommand& command : commands) core_.channel(channel).execute(command);
      count += commands.size();
    }
    core_.route(2);
    return count;
  }

 private:
  Core& core_;
  const IsLate is_late_;
  std::map<std::uint32_t, std::vector<ChannelCommand>> late_;
};

OpSpec call(std::vector<float>& values, OpKind kind = OpKind::all_reduce, kernels::ReduceOp op = kernels::ReduceOp::sum,
            Retry retry = Retry::engine) {
  OpSpec spec;
  spec.kind = kind;
  spec.reduce_op = op;
  spec.retry = retry;
  spec.timeout = timeout;
  auto* at = reinterpret_cast<std::byte*>(values.data());
  spec.spans.push_back({at, at, values.size() * sizeof(float), kernels::DType::f32, 0});
  return spec;
}

OpSpec on_tag(std::uint64_t tag, OpSpec spec) {
  spec.tag = tag;
  return spec;
}

std::vector<std::vector<float>> inputs(std::size_t ranks, std::size_t count) {
  std::vector<std::vector<float>> out(ranks, std::vector<float>(count));
  for (std::size_t r = 0; r < ranks; ++r) {
    for (std::size_t i = 0; i < count; ++i) out[r][i] = static_cast<float>((r + 1) * 10 + i % 7);
  }
  return out;
}

float expected(std::size_t ranks, std::size_t i) {
  float sum = 0;
  for (std::size_t r = 0; r < ranks; ++r) sum += static_cast<float>((r + 1) * 10 + i % 7);
  return sum;
}

bool ok(Core& core, std::uint64_t id) {
  const OpPtr op = core.find(id);
  return op->state == OpState::finished && op->result.status == OpStatus::ok;
}

TEST(all_reduce_in_every_shape) {
  for (const std::uint32_t ranks : {2u, 3u, 4u, 5u}) {
    for (const int lanes : {1, 3}) {
      for (const std::size_t count : {0ul, 1ul, 2ul, 17ul, 100ul, 1000ul, 5003ul}) {
        for (const std::size_t small : {0ul, 256ul}) {
          Ring ring(ranks, lanes, small, 256, static_cast<unsigned>(count + ranks));
          ring.install(1);
          auto data = inputs(ranks, count);
          std::vector<std::uint64_t> ids;
          for (std::size_t r = 0; r < ranks; ++r) {
            ids.push_back(ring.core(r).submit(1, call(data[r])));
            for (int i = 0; i < 5; ++i) ring.move();  // some call late: eager segments wait for them
          }
          ring.run();
          for (std::size_t r = 0; r < ranks; ++r) {
            CHECK(ok(ring.core(r), ids[r]));
            CHECK(data[r] == data[0]);
            for (std::size_t i = 0; i < count; ++i) CHECK(data[r][i] == expected(ranks, i));
          }
        }
      }
    }
  }
}

TEST(many_ops_in_a_row_and_many_tags) {
  Ring ring(3, 2, 64, 128, 9);
  ring.install(1);
  for (int round = 0; round < 20; ++round) {
    std::vector<std::vector<std::vector<float>>> data;
    std::vector<std::vector<std::uint64_t>> ids(3);
    for (int tag = 0; tag < 16; ++tag) data.push_back(inputs(3, tag * 23));
    for (std::size_t r = 0; r < 3; ++r) {
      for (int tag = 0; tag < 16; ++tag) {
        OpSpec spec = call(data[tag][r]);
        spec.tag = tag;
        ids[r].push_back(ring.core(r).submit(1, spec));
        ring.move();
      }
    }
    ring.run();
    for (std::size_t r = 0; r < 3; ++r) {
      for (int tag = 0; tag < 16; ++tag) {
        CHECK(ok(ring.core(r), ids[r][tag]));
        CHECK(data[tag][r] == data[tag][0]);
        ring.core(r).ops().release(ids[r][tag]);
      }
    }
  }
  CHECK(ring.core(0).stats().committed == 320);
}

// Its evidence is complete: nobody is to be blamed for it, and the epoch goes on.
TEST(an_op_that_channels_still_hold_does_not_time_out) {
  Ring ring(2, 1, 0, 256, 1, false, 3);
  ring.install(1);
  SlowWorkers workers(ring.core(0), [](std::uint32_t, const ChannelCommand& command) {
    return command.kind == ChannelCommand::Kind::end;
  });
  auto data = inputs(2, 1'000);
  const std::uint64_t first = ring.core(0).submit(1, call(data[0])), second = ring.core(1).submit(1, call(data[1]));
  ring.run();
  CHECK(ok(ring.core(1), second) && ring.core(0).find(first)->state == OpState::ending);
  while (ring.core(0).next_event()) {
  }
  ring.core(0).tick(timeout + 2);
  CHECK(!ring.core(0).has_events());
  CHECK(workers.work() == 2);
  CHECK(ok(ring.core(0), first) && data[0] == data[1]);
}

// A quantised op is cut at whole segments. With few of them some channels have none, and the neighbour ends the op and
// calls the next one of its tag before such a channel gets round to it.
TEST(segments_of_the_next_op_wait_while_a_channel_has_not_begun_the_first) {
  Ring ring(2, 1, 0, 1 << 20, 1, false, 4);
  ring.install(1);
  SlowWorkers workers(ring.core(0), [](std::uint32_t channel, const ChannelCommand& command) {
    return channel == 2 && command.kind == ChannelCommand::Kind::begin;
  });
  auto data = inputs(2, 131'072), more = inputs(2, 262'144);
  std::vector<std::uint64_t> one, next;
  for (std::size_t rank = 0; rank < 2; ++rank) {
    OpSpec spec = call(data[rank]);
    spec.scheme = quantize::Scheme::minmax8;
    one.push_back(ring.core(rank).submit(1, std::move(spec)));
  }
  ring.run();
  CHECK(ok(ring.core(1), one[1]) && ring.core(0).find(one[0])->state == OpState::ending);
  next.push_back(ring.core(1).submit(1, call(more[1])));
  ring.run();
  CHECK(workers.work() > 0);
  ring.run();
  CHECK(ok(ring.core(0), one[0]) && data[0] == data[1]);
  next.push_back(ring.core(0).submit(1, call(more[0])));
  for (ring.run(); workers.work() > 0;) ring.run();
  CHECK(ok(ring.core(0), next[1]) && ok(ring.core(1), next[0]) && more[0] == more[1]);
  CHECK(ring.core(0).stats().lane_violations == 0);
}

// Sums of these depend on the order of operands.
TEST(the_bits_do_not_depend_on_the_number_of_channels) {
  std::mt19937 rng(4);
  std::uniform_real_distribution<float> any(-1e3f, 1e3f);
  for (const std::uint32_t ranks : {2u, 3u, 4u, 5u}) {
    for (const std::size_t count : {40ul, 1000ul, 5003ul, 40'000ul}) {
      for (const quantize::Scheme scheme : {quantize::Scheme::none, quantize::Scheme::minmax8}) {
        std::vector<std::vector<float>> given(ranks, std::vector<float>(count));
        for (auto& values : given) std::generate(values.begin(), values.end(), [&] { return any(rng); });
        std::vector<float> first;
        for (const std::uint32_t channels : {1u, 2u, 3u, 4u}) {
          Ring ring(ranks, 1, 0, 2048, channels, false, channels);
          ring.install(1);
          auto data = given;
          std::vector<std::uint64_t> ids;
          for (std::size_t r = 0; r < ranks; ++r) {
            OpSpec spec = call(data[r]);
            spec.scheme = scheme;
            ids.push_back(ring.core(r).submit(1, spec));
          }
          CHECK(ring.core(0).find(ids[0])->parts.size() == (count * sizeof(float) >= 1024 * channels ? channels : 1));
          ring.run();
          if (first.empty()) first = data[0];
          for (std::size_t r = 0; r < ranks; ++r) {
            CHECK(ok(ring.core(r), ids[r]));
            CHECK(std::memcmp(data[r].data(), first.data(), count * sizeof(float)) == 0);
          }
        }
      }
    }
  }
}

// Dones go straight to all, or around the ring, as each of the ranks can: of small ops and of others, also if some
// ranks call late.
TEST(dones_go_straight_to_all_members_or_around_the_ring) {
  for (const std::uint32_t ranks : {4u, 5u, 6u, 8u, 16u}) {
    for (const int way : {0, 1, 2, 3}) {
      const bool is_late = way % 2 == 1;
      Ring ring(ranks, 1, 256, 256, ranks);
      ring.direct = true;
      ring.one_host = way > 1;  // recursive doubling where it is a power of two
      if (!is_late) ring.connect_all();
      ring.install(1);
      for (int round = 0; round < 12; ++round) {
        if (is_late && round == 4) ring.connect_all(1);
        if (round == 8) {  // their Dones take the ring again, those of the others do not
          ring.disconnect(1, 3);
          ring.install(2);
        }
        auto data = inputs(ranks, round % 3 == 2 ? 500 : 30);
        std::vector<std::uint64_t> ids;
        for (std::size_t r = 0; r < ranks; ++r) {
          ids.push_back(ring.core(r).submit(1, call(data[r])));
          for (int i = 0; i < 5; ++i) ring.move();
        }
        ring.run();
        const bool doubles = ring.one_host && std::has_single_bit(ranks) && round != 0 && round != 8;
        const bool is_complete = ranks == 4 || (round < 8 && round > (is_late ? 4 : 0));
        for (std::size_t r = 0; r < ranks; ++r) {
          CHECK(ok(ring.core(r), ids[r]));
          CHECK(ring.core(r).find(ids[r])->doubles == (doubles && is_complete));
          for (std::size_t i = 0; i < data[r].size(); ++i) CHECK(data[r][i] == expected(ranks, i));
        }
      }
    }
  }
}

std::vector<std::vector<float>> random_buffers(std::mt19937& rng, std::uint32_t ranks, std::size_t count) {
  std::uniform_real_distribution<float> any(-1e3f, 1e3f);
  std::vector<std::vector<float>> given(ranks, std::vector<float>(count));
  for (auto& values : given) std::generate(values.begin(), values.end(), [&] { return any(rng); });
  return given;
}

// The first op of a tag tells all ranks that all have lanes to all; the others go through the mesh, with the same bits
// for any number of channels, also where some ranks call late or contribute nothing.
TEST(short_ops_go_through_a_mesh_once_all_ranks_know_that_it_is_there) {
  std::mt19937 rng(6);
  for (const std::uint32_t ranks : {4u, 5u, 8u}) {
    for (const std::size_t count : {20ul, 1000ul, 5003ul, 30'000ul}) {
      const auto given = random_buffers(rng, ranks, count);
      std::vector<float> first;
      for (const std::uint32_t channels : {1u, 2u, 4u}) {
        Ring ring(ranks, 1, 0, 2048, channels + ranks, false, channels);
        ring.connect_all();
        ring.install(1);
        for (int round = 0; round < 3; ++round) {
          auto data = given;
          std::vector<std::uint64_t> ids;
          for (std::size_t r = 0; r < ranks; ++r) {
            OpSpec spec = call(data[r], OpKind::all_reduce, kernels::ReduceOp::avg);
            spec.contribute = r != 2 || round < 2;
            ids.push_back(ring.core(r).submit(1, spec));
            const std::size_t stages = ring.core(r).find(ids[r])->parts.front()->plan().receives.size();
            CHECK(stages == (round == 0 && ranks == 4 ? 6 : 2 * ranks - 2));
            CHECK(ring.core(r).find(ids[r])->parts.front()->sides.size() == (round == 0 ? 2 : ranks - 1));
            for (int i = 0; i < 20; ++i) ring.move();
          }
          ring.run();
          if (round == 1 && first.empty()) first = data[0];
          for (std::size_t r = 0; r < ranks; ++r) {
            CHECK(ok(ring.core(r), ids[r]));
            CHECK(std::memcmp(data[r].data(), data[0].data(), count * sizeof(float)) == 0);
            if (round == 1) CHECK(std::memcmp(data[r].data(), first.data(), count * sizeof(float)) == 0);
          }
          for (std::size_t i = 0; i < count; ++i) {
            double sum = 0;
            for (std::size_t r = 0; r < ranks; ++r) sum += r != 2 || round < 2 ? given[r][i] : 0;
            CHECK(std::fabs(data[0][i] - sum / (round < 2 ? ranks : ranks - 1)) < 1e-3);
          }
        }
      }
    }
  }
}

// A Done for somebody else does not come over a direct lane, and neither do frames that belong to the ring.
TEST(a_direct_lane_is_for_its_own_members_frames) {
  for (const LaneFrame kind : {LaneFrame::done, LaneFrame::open, LaneFrame::absent}) {
    Ring ring(4, 1, 256, 256, 1, false, 1);
    ring.connect_all();
    ring.install(1);
    ring.run();
    auto data = inputs(4, 20);
    const std::uint64_t id = ring.core(0).submit(1, call(data[0]));
    const auto lanes = ring.core(0).lanes();
    const auto direct = std::find_if(lanes.begin(), lanes.end(), [](const LaneInfo& lane) { return lane.direct; });
    FrameHeader header = ring.core(0).find(id)->header(kind);
    header.origin = 3;  // the lane leads to 2
    header.stage = 1;
    header.contributors = 1;
    const std::vector<std::byte> payload(kind == LaneFrame::done ? 80 : 0);
    header.length = static_cast<std::uint32_t>(payload.size());
    header.payload_crc = crc32c(payload.data(), payload.size());
    header.header_crc = header.crc();
    const auto space = ring.core(0).receive_space(direct->conn);
    std::memcpy(space.data(), &header, sizeof header);
    std::copy(payload.begin(), payload.end(), space.data() + sizeof header);
    ring.core(0).received(1, direct->conn, sizeof header + payload.size());
    bool is_lost = false;
    while (const auto event = ring.core(0).next_event())
      is_lost |= event->kind == Event::Kind::link_lost && event->direct;
    CHECK(is_lost);
  }
}

// Sums of these depend on the order of operands: one rank computes each, in one order for any number of channels.
TEST(ops_are_reduced_host_by_host_with_the_same_bits_everywhere) {
  struct Case {
    std::uint32_t hosts, members;
  };
  std::mt19937 rng(5);
  for (const Case& each : {Case{2, 2}, Case{2, 3}, Case{3, 2}, Case{2, 4}, Case{3, 3}, Case{4, 2}}) {
    const std::uint32_t ranks = each.hosts * each.members;
    for (const std::size_t count : {20ul, 1000ul, 5003ul, 20'000ul}) {
      const auto given = random_buffers(rng, ranks, count);
      std::vector<float> first;
      for (const std::uint32_t channels : {1u, 2u, 4u}) {
        Ring ring(ranks, 1, 0, 2048, channels + ranks, false, channels);
        ring.connect_all();
        ring.hosts = each.hosts;
        ring.install(1);
        auto data = given;
        std::vector<std::uint64_t> ids;
        for (std::size_t r = 0; r < ranks; ++r) {
          ids.push_back(ring.core(r).submit(1, call(data[r], OpKind::all_reduce, kernels::ReduceOp::avg)));
          for (int i = 0; i < 20; ++i) ring.move();
        }
        ring.run();
        if (first.empty()) first = data[0];
        for (std::size_t r = 0; r < ranks; ++r) {
          CHECK(ok(ring.core(r), ids[r]));
          CHECK(std::memcmp(data[r].data(), first.data(), count * sizeof(float)) == 0);
        }
        for (std::size_t i = 0; i < count; ++i) {
          double sum = 0;
          for (const auto& values : given) sum += values[i];
          CHECK(std::fabs(first[i] - sum / ranks) < 1e-3);
        }
      }
    }
  }
}

// Ops that are not cut go to the channel of their tag; what is too small for a thread of its own, to the first.
TEST(ops_that_are_not_cut_use_all_channels) {
  Ring ring(3, 1, 64, 1024, 1, false, 4);
  ring.install(1);
  std::vector<std::vector<std::vector<float>>> data;
  std::vector<std::vector<std::uint64_t>> ids(3);
  std::vector<int> homes(4);
  for (int tag = 0; tag < 8; ++tag) data.push_back(inputs(3, tag == 7 ? 100 : 140));
  for (std::size_t r = 0; r < 3; ++r) {
    for (int tag = 0; tag < 8; ++tag) {
      ids[r].push_back(ring.core(r).submit(1, on_tag(tag, call(data[tag][r]))));
      if (r == 0) ++homes[ring.core(0).find(ids[0][tag])->parts.back()->channel];
    }
  }
  CHECK(homes == std::vector<int>({3, 2, 2, 1}));
  ring.run();
  for (std::size_t r = 0; r < 3; ++r) {
    for (int tag = 0; tag < 8; ++tag) CHECK(ok(ring.core(r), ids[r][tag]) && data[tag][r] == data[tag][0]);
  }
}

// Large enough that segments are shorter than the epoch's, in rings whose chunks do not divide evenly: no element may
// be cut.
TEST(no_element_is_cut_whatever_the_ring_and_its_segments_are) {
  struct Case {
    std::size_t ranks, segment, count;
    std::uint32_t channels;
  };
  const Case cases[] = {{3, 1 << 20, 7'000'001, 2}, {3, 1 << 20, 7'000'003, 4}, {4, 1 << 18, 3'000'001, 3},
                        {3, 100'001, 200'000, 1},   {2, 100'001, 200'000, 2},   {5, 33, 10'000, 2}};
  for (const Case& each : cases) {
    Ring ring(each.ranks, 1, 0, each.segment, 1, false, each.channels);
    ring.install(1);
    std::vector<std::vector<float>> data(each.ranks, std::vector<float>(each.count));
    for (std::size_t r = 0; r < each.ranks; ++r) {
      for (std::size_t at = 0; at < each.count; ++at) data[r][at] = static_cast<float>((at % 1009) * (r + 1));
    }
    std::vector<std::uint64_t> ids;
    for (std::size_t r = 0; r < each.ranks; ++r) ids.push_back(ring.core(r).submit(1, call(data[r])));
    ring.run();
    const float sum = static_cast<float>(each.ranks * (each.ranks + 1) / 2);
    for (std::size_t r = 0; r < each.ranks; ++r) {
      CHECK(ok(ring.core(r), ids[r]));
      std::size_t wrong = 0;
      for (std::size_t at = 0; at < each.count; ++at) wrong += data[r][at] != static_cast<float>(at % 1009) * sum;
      CHECK_MESSAGE(wrong == 0, "%zu ranks, segments of %zu, %u channels: %zu values are wrong", each.ranks,
                    each.segment, each.channels, wrong);
    }
  }
}

// The link is lost as a whole, and once.
TEST(a_lane_that_breaks_in_one_channel_ends_the_link_in_all) {
  Ring ring(2, 1, 0, 256, 1, false, 3);
  ring.install(1);
  Core& core = ring.core(0);
  while (core.next_event()) {
  }
  const auto lanes = core.lanes();
  CHECK(lanes.size() == 6);
  core.lost(1, lanes[2].conn, "reset");
  int lost = 0;
  while (const auto event = core.next_event()) lost += event->kind == Event::Kind::link_lost;
  CHECK(lost == 1 && core.lanes().size() == 3 && core.take_closing().size() == 3);
}

// A small op and one that is not, in channels of their own, on the same tag: their descriptors must meet.
TEST(a_mismatch_is_seen_whatever_the_channels_are) {
  for (const std::uint32_t skipped : {0u, 1u, 2u}) {
    Ring ring(3, 1, 64, 1024, 1, false, 3);
    ring.install(1);
    std::vector<float> little(4), much(100);
    for (std::uint32_t op = 0; op < skipped; ++op) {
      std::vector<std::vector<float>> data(3, std::vector<float>(100));
      for (std::size_t r = 0; r < 3; ++r) ring.core(r).submit(1, call(data[r]));
      ring.run();
    }
    ring.core(0).submit(1, call(little));
    ring.core(1).submit(1, call(little));
    for (int i = 0; i < 20; ++i) ring.move();
    ring.core(2).submit(1, call(much));
    ring.run();
    int seen = 0;
    for (std::size_t r = 0; r < 3; ++r) {
      while (const auto event = ring.core(r).next_event()) {
        seen += event->kind == Event::Kind::mismatch;
        CHECK(event->kind != Event::Kind::link_lost);
      }
    }
    CHECK(seen >= 1);
  }
}

TEST(other_kinds) {
  for (const std::size_t small : {0ul, 4096ul}) {
    Ring ring(4, 1, small, 128, 5);
    ring.install(1);
    auto data = inputs(4, 120);
    const auto before = data;
    std::vector<std::uint64_t> ids;
    for (std::size_t r = 0; r < 4; ++r) {
      OpSpec spec = call(data[r], OpKind::broadcast);
      spec.root = 2;
      ids.push_back(ring.core(r).submit(1, spec));
    }
    ring.run();
    for (std::size_t r = 0; r < 4; ++r) CHECK(ok(ring.core(r), ids[r]) && data[r] == before[2]);

    data = before;
    ids.clear();
    std::vector<std::vector<float>> gathered(4, std::vector<float>(480));
    for (std::size_t r = 0; r < 4; ++r) {
      OpSpec spec = call(data[r], OpKind::all_gather);
      spec.in_place = false;
      spec.gathered = reinterpret_cast<std::byte*>(gathered[r].data());
      ids.push_back(ring.core(r).submit(1, spec));
    }
    ring.run();
    for (std::size_t r = 0; r < 4; ++r) {
      CHECK(ok(ring.core(r), ids[r]) && data[r] == before[r]);
      for (std::size_t i = 0; i < 480; ++i) CHECK(gathered[r][i] == before[i / 120][i % 120]);
    }

    ids.clear();
    std::vector<std::vector<float>> parts(4, std::vector<float>(30));
    for (std::size_t r = 0; r < 4; ++r) {
      OpSpec spec = call(data[r], OpKind::reduce_scatter);
      spec.in_place = false;
      spec.gathered = reinterpret_cast<std::byte*>(parts[r].data());
      ids.push_back(ring.core(r).submit(1, spec));
    }
    ring.run();
    for (std::size_t r = 0; r < 4; ++r) {
      CHECK(ok(ring.core(r), ids[r]) && data[r] == before[r]);
      for (std::size_t i = 0; i < 30; ++i) CHECK(parts[r][i] == expected(4, r * 30 + i));
    }
  }
}

constexpr float nan_with_payload() { return std::bit_cast<float>(0x7fc0'1234u); }
bool same_bits(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

using Operand = std::optional<float>;

Operand together(kernels::ReduceOp op, Operand a, Operand b) {
  if (!a || !b) return a ? a : b;
  switch (op) {
    case kernels::ReduceOp::prod:
      return *a * *b;
    case kernels::ReduceOp::min:
      return std::min(*a, *b);
    case kernels::ReduceOp::max:
      return std::max(*a, *b);
    default:
      return *a + *b;
  }
}

// What element `i` must be, bit by bit: the operands of those that contribute, in the order of the schedule, and no
// others.
float contributed(const std::vector<std::vector<float>>& given, unsigned mask, kernels::ReduceOp op, std::size_t i,
                  bool small) {
  const auto ranks = static_cast<std::uint32_t>(given.size());
  const Plan plan = make_plan(OpKind::all_reduce, given[0].size() * sizeof(float), 0, ranks, 0, 256);
  const auto of = [&](std::uint32_t rank) { return mask >> rank & 1 ? Operand(given[rank][i]) : Operand(); };
  Operand total;
  if (!small && ranks == 4) {  // the square
    total = together(op, together(op, of(0), of(1)), together(op, of(2), of(3)));
  } else {
    std::uint32_t first = 0;
    while (!small && !plan.exchange && plan.chunks[first].end <= i * sizeof(float)) ++first;
    for (std::uint32_t hop = 0; hop < ranks; ++hop) total = together(op, total, of((first + hop) % ranks));
  }
  const auto count = static_cast<float>(std::popcount(mask));
  return !total ? 0 : op == kernels::ReduceOp::avg ? *total / count : *total;
}

std::vector<PeerId> names(unsigned mask) {
  std::vector<PeerId> out;
  for (PeerId rank = 0; rank < 32; ++rank) {
    if (mask >> rank & 1) out.push_back(rank);
  }
  return out;
}

TEST(a_rank_without_a_contribution_gets_the_result_of_the_others) {
  using kernels::ReduceOp;
  for (const std::uint32_t ranks : {2u, 3u, 4u, 5u}) {
    for (unsigned mask = 0; mask < 1u << ranks; ++mask) {
      for (const std::size_t small : {0ul, 4096ul}) {
        for (const ReduceOp op : {ReduceOp::sum, ReduceOp::avg, ReduceOp::prod, ReduceOp::min, ReduceOp::max}) {
          for (const bool in_place : {true, false}) {
            const std::size_t count = mask % 2 == 0 ? 7 : 501;
            Ring ring(ranks, 1 + static_cast<int>(mask % 2), small, 256, mask + ranks);
            ring.install(1);
            auto data = inputs(ranks, count);
            for (std::size_t r = 0; r < ranks; ++r) {
              for (std::size_t i = 0; i < count; ++i) data[r][i] = std::sin(static_cast<float>(r * 1000 + i));
            }
            const auto given = data;
            auto out = inputs(ranks, count);
            std::vector<std::uint64_t> ids;
            for (std::size_t r = 0; r < ranks; ++r) {
              const bool contribute = mask >> r & 1;
              if (!contribute) data[r].assign(count, nan_with_payload());
              OpSpec spec = call(data[r], OpKind::all_reduce, op);
              spec.contribute = contribute;
              spec.in_place = in_place;
              if (!in_place) spec.spans[0].target = reinterpret_cast<std::byte*>(out[r].data());
              ids.push_back(ring.core(r).submit(1, spec));
              for (int i = 0; i < 4; ++i) ring.move();
            }
            const auto before = data;
            ring.run();
            std::vector<float> wanted(count);
            for (std::size_t i = 0; i < count; ++i) wanted[i] = contributed(given, mask, op, i, small > 0);
            for (std::size_t r = 0; r < ranks; ++r) {
              CHECK(ok(ring.core(r), ids[r]));
              CHECK(ring.core(r).find(ids[r])->result.contributors == names(mask));
              CHECK(same_bits(in_place ? data[r] : out[r], wanted));
              if (!in_place) CHECK(same_bits(data[r], before[r]));
            }
          }
        }
      }
    }
  }
}

// Of one contributor nothing is computed: zeros keep their sign and NaNs their payload, wherever it stands in the ring.
TEST(the_bits_of_a_single_contributor_are_the_result) {
  for (const std::uint32_t ranks : {2u, 3u, 4u, 5u}) {
    for (std::uint32_t only = 0; only < ranks; ++only) {
      for (const std::size_t small : {0ul, 4096ul}) {
        for (const auto op : {kernels::ReduceOp::sum, kernels::ReduceOp::avg, kernels::ReduceOp::max}) {
          Ring ring(ranks, 1, small, 128, only);
          ring.install(1);
          auto data = inputs(ranks, 200);
          for (std::size_t i = 0; i < 200; ++i) data[only][i] = i % 2 == 0 ? -0.0f : nan_with_payload();
          const auto wanted = data[only];
          std::vector<std::uint64_t> ids;
          for (std::uint32_t r = 0; r < ranks; ++r) {
            OpSpec spec = call(data[r], OpKind::all_reduce, op);
            spec.contribute = r == only;
            ids.push_back(ring.core(r).submit(1, spec));
          }
          ring.run();
          for (std::uint32_t r = 0; r < ranks; ++r) CHECK(ok(ring.core(r), ids[r]) && same_bits(data[r], wanted));
        }
      }
    }
  }
}

TEST(a_quantised_op_is_over_those_that_contribute) {
  for (const auto scheme : {quantize::Scheme::minmax8, quantize::Scheme::zeroscale8}) {
    for (const std::uint32_t ranks : {2u, 3u, 4u}) {
      for (unsigned mask = 0; mask < 1u << ranks; ++mask) {
        Ring ring(ranks, 1, 0, 1024, mask);
        ring.install(1);
        auto data = inputs(ranks, 3000);
        const auto given = data;
        std::vector<std::uint64_t> ids;
        for (std::uint32_t r = 0; r < ranks; ++r) {
          OpSpec spec = call(data[r], OpKind::all_reduce, kernels::ReduceOp::avg);
          spec.contribute = mask >> r & 1;
          spec.scheme = scheme;
          if (!spec.contribute) data[r].assign(3000, nan_with_payload());
          ids.push_back(ring.core(r).submit(1, spec));
        }
        ring.run();
        for (std::uint32_t r = 0; r < ranks; ++r) {
          CHECK(ok(ring.core(r), ids[r]) && same_bits(data[r], data[0]));
          CHECK(ring.core(r).find(ids[r])->result.contributors == names(mask));
          for (std::size_t i = 0; i < 3000; ++i) {
            CHECK(std::fabs(data[r][i] - contributed(given, mask, kernels::ReduceOp::avg, i, true)) < 1.5);
          }
        }
      }
    }
  }
}

TEST(a_scattered_reduction_is_over_those_that_contribute) {
  for (const std::size_t small : {0ul, 4096ul}) {
    for (unsigned mask = 0; mask < 16; ++mask) {
      Ring ring(4, 1, small, 128, mask);
      ring.install(1);
      auto data = inputs(4, 400);
      const auto given = data;
      std::vector<std::vector<float>> parts(4, std::vector<float>(100));
      std::vector<std::uint64_t> ids;
      for (std::size_t r = 0; r < 4; ++r) {
        OpSpec spec = call(data[r], OpKind::reduce_scatter, kernels::ReduceOp::avg);
        spec.contribute = mask >> r & 1;
        spec.in_place = false;
        spec.gathered = reinterpret_cast<std::byte*>(parts[r].data());
        ids.push_back(ring.core(r).submit(1, spec));
      }
      ring.run();
      for (std::size_t r = 0; r < 4; ++r) {
        CHECK(ok(ring.core(r), ids[r]) && data[r] == given[r]);
        for (std::size_t i = 0; i < 100; ++i) {
          CHECK(std::fabs(parts[r][i] - contributed(given, mask, kernels::ReduceOp::avg, r * 100 + i, true)) < 1e-4);
        }
      }
    }
  }
}

// A verdict commits what all survivors have done: each of them must know by then which ranks contributed, although no
// Done has come.
TEST(contributors_are_known_when_the_local_part_is_done) {
  for (unsigned mask = 0; mask < 32; ++mask) {
    Ring ring(5, 1, 0, 128, mask);
    ring.install(1);
    auto data = inputs(5, 300);
    std::vector<std::uint64_t> ids;
    for (std::size_t r = 0; r < 5; ++r) {
      OpSpec spec = call(data[r]);
      spec.contribute = mask >> r & 1;
      ids.push_back(ring.core(r).submit(1, spec));
    }
    const auto state = [&](std::size_t r) { return ring.core(r).find(ids[r])->state; };
    for (std::size_t r = 0; r < 5; ++r) {
      while (state(r) == OpState::running) ring.move();
      if (state(r) != OpState::done) continue;
      ring.core(r).seal(1);
      const Op& op = *ring.core(r).find(ids[r]);
      ring.core(r).settle(1, 1, {{0, 0, op.fingerprint, true, 7, std::nullopt, 0, {}}}, {});
      CHECK(ok(ring.core(r), ids[r]) && ring.core(r).find(ids[r])->result.contributors == names(mask));
      break;
    }
  }
}

// Where the master sends the payloads, in evidence or in a verdict, it marks the ranks without one.
TEST(a_verdict_brings_the_payloads_of_those_that_contribute) {
  Ring ring(3, 1, 4096, 128, 1);
  ring.install(1);
  auto data = inputs(3, 10);
  const auto given = data;
  const auto id = ring.core(1).submit(1, call(data[1], OpKind::all_reduce, kernels::ReduceOp::avg));
  const auto bytes = [&](std::size_t r) {
    const auto* at = reinterpret_cast<const std::byte*>(given[r].data());
    return Payload(Bytes(at, at + 40));
  };
  ring.core(1).seal(1);
  const std::uint32_t fingerprint = ring.core(1).find(id)->fingerprint;
  ring.core(1).settle(1, 1, {{0, 0, fingerprint, true, 7, Payloads{bytes(0), bytes(1), Payload()}, 0, {}}}, {});
  CHECK(ok(ring.core(1), id) && ring.core(1).find(id)->result.contributors == names(0b011));
  for (std::size_t i = 0; i < 10; ++i) CHECK(data[1][i] == (given[0][i] + given[1][i]) / 2);
}

// Stops a run after every possible number of moves, aborts it, and wants every byte back; then retries to the end. Rank
// 1 may be one that contributes nothing.
void abort_at_every_point(std::size_t ranks, quantize::Scheme scheme = quantize::Scheme::none, bool silent = false,
                          std::uint32_t hosts = 1, bool mesh = false) {
  int unfinished = 0;
  for (int moves = 0; moves < 400; moves += 3) {
    Ring ring(static_cast<std::uint32_t>(ranks), 1, 0, 128, 77);
    if (hosts > 1 || mesh) ring.connect_all();
    ring.direct = mesh;
    ring.hosts = hosts;
    ring.install(1);
    if (mesh) {  // an op by which all learn that it is there
      auto before = inputs(ranks, 1);
      for (std::size_t r = 0; r < ranks; ++r) ring.core(r).submit(1, call(before[r]));
      ring.run();
    }
    auto data = inputs(ranks, 300);
    const auto before = data;
    std::vector<std::uint64_t> ids;
    for (std::size_t r = 0; r < ranks; ++r) {
      OpSpec spec = call(data[r]);
      spec.scheme = scheme;
      spec.contribute = r != 1 || !silent;
      ids.push_back(ring.core(r).submit(1, spec));
    }
    for (int i = 0; i < moves; ++i) ring.move();
    bool all_done = true, any_committed = false;
    for (std::size_t r = 0; r < ranks; ++r) {
      for (const SealedOp& op : ring.core(r).seal(1)) {
        if (mesh && op.sequence == 0) continue;
        all_done &= op.state > 0;
        any_committed |= op.state == 2;
      }
    }
    CHECK(!any_committed || all_done);
    if (all_done) continue;
    for (const auto& values : data) unfinished += values != before[&values - data.data()];
    for (std::size_t r = 0; r < ranks; ++r) {
      ring.core(r).settle(1, 1, {}, {});
      CHECK(data[r] == before[r]);
    }
    // Epochs are installed one after the other: those ahead must wait at the others' marks.
    ring.install_at(1, 2);
    for (int i = 0; i < 50; ++i) ring.move();
    ring.install_at(0, 2);
    for (int i = 0; i < 50; ++i) ring.move();
    for (std::size_t r = 2; r < ranks; ++r) ring.install_at(r, 2);
    ring.run();
    for (std::size_t r = 0; r < ranks; ++r) {
      CHECK(ok(ring.core(r), ids[r]));
      CHECK(data[r] == data[0]);
      for (std::size_t i = 0; i < 300; ++i) {
        const float sum = expected(ranks, i) - (silent ? before[1][i] : 0);
        CHECK(std::fabs(data[r][i] - sum) <= (scheme == quantize::Scheme::none ? 0 : 0.1));
      }
    }
  }
  CHECK(unfinished > 10);  // it was really caught in the middle
}

constexpr quantize::Scheme all_schemes[] = {quantize::Scheme::minmax8, quantize::Scheme::minmax4,
                                            quantize::Scheme::zeroscale8, quantize::Scheme::zeroscale4};

// Values of -1 to 1, so that every quantisation of a partial sum of `ranks` of them has a step of at most 2 ranks /
// top.
std::vector<std::vector<float>> noise(std::size_t ranks, std::size_t count) {
  std::mt19937 rng(static_cast<unsigned>(ranks * 1000 + count));
  std::uniform_real_distribution<float> between(-1, 1);
  std::vector<std::vector<float>> out(ranks, std::vector<float>(count));
  for (auto& values : out) std::generate(values.begin(), values.end(), [&] { return between(rng); });
  return out;
}

TEST(a_quantised_op_is_near_the_sum_with_the_same_bits_everywhere) {
  for (const quantize::Scheme scheme : all_schemes) {
    const bool narrow = scheme == quantize::Scheme::minmax4 || scheme == quantize::Scheme::zeroscale4;
    for (const std::uint32_t ranks : {2u, 3u, 4u, 5u}) {
      for (const std::size_t count : {1ul, 17ul, 1000ul, 20011ul}) {
        Ring ring(ranks, 2, 0, 8192, static_cast<unsigned>(count + ranks));
        ring.install(1);
        auto data = noise(ranks, count);
        const auto before = data;
        std::vector<std::uint64_t> ids;
        for (std::size_t r = 0; r < ranks; ++r) {
          OpSpec spec = call(data[r], OpKind::all_reduce, kernels::ReduceOp::avg);
          spec.scheme = scheme;
          ids.push_back(ring.core(r).submit(1, spec));
          for (int i = 0; i < 5; ++i) ring.move();
        }
        ring.run();
        const double step = 2.0 * ranks / (narrow ? 15 : 255), most = 0.5 * step + 1e-5;
        for (std::size_t r = 0; r < ranks; ++r) {
          CHECK(ok(ring.core(r), ids[r]));
          CHECK(std::memcmp(data[r].data(), data[0].data(), count * 4) == 0);
          const OpResult& result = ring.core(r).find(ids[r])->result;
          if (count > 1000) CHECK(result.sent_bytes < count * 4 * 2 * (ranks - 1) / ranks / (narrow ? 7 : 3));
          for (std::size_t i = 0; i < count; ++i) {
            double sum = 0;
            for (std::size_t k = 0; k < ranks; ++k) sum += before[k][i];
            CHECK(std::fabs(data[r][i] - sum / ranks) <= most);
          }
        }
      }
    }
  }
}

// Many small arrays of all three dtypes in one op: blocks and segments end at odd places.
TEST(a_quantised_op_of_many_arrays) {
  for (const quantize::Scheme scheme : all_schemes) {
    Ring ring(3, 1, 0, 640, 4);
    ring.install(1);
    const std::size_t counts[] = {700, 3, 1, 129, 2, 900, 5, 64, 33};
    std::vector<std::vector<std::vector<std::byte>>> memory(3);
    std::vector<std::uint64_t> ids;
    for (std::size_t r = 0; r < 3; ++r) {
      OpSpec spec;
      spec.reduce_op = kernels::ReduceOp::max;
      spec.scheme = scheme;
      spec.timeout = timeout;
      for (std::size_t i = 0; i < 9; ++i) {
        const auto dtype = i < 4 ? kernels::DType::f32 : i % 2 ? kernels::DType::f16 : kernels::DType::bf16;
        auto& bytes = memory[r].emplace_back(counts[i] * kernels::item_bytes(dtype));
        for (std::size_t k = 0; k < bytes.size(); ++k) {
          bytes[k] = static_cast<std::byte>((k % kernels::item_bytes(dtype) ? 0x30 : 0x41) + k % 7 + r);
        }
        spec.spans.push_back({bytes.data(), bytes.data(), bytes.size(), dtype, 0});
      }
      ids.push_back(ring.core(r).submit(1, spec));
    }
    ring.run();
    for (std::size_t r = 0; r < 3; ++r) CHECK(ok(ring.core(r), ids[r]) && memory[r] == memory[0]);
  }
}

TEST(a_late_verdict_commits_what_everybody_finished) {
  Ring ring(2, 1, 0, 128, 3);
  ring.install(1);
  auto data = inputs(2, 64);
  const auto a = ring.core(0).submit(1, call(data[0])), b = ring.core(1).submit(1, call(data[1]));
  while (ring.core(0).find(a)->state == OpState::running || ring.core(1).find(b)->state == OpState::running) {
    ring.move();
  }
  for (std::size_t r = 0; r < 2; ++r) {
    ring.core(r).seal(1);
    const Op& op = *ring.core(r).find(r == 0 ? a : b);
    ring.core(r).settle(1, 1, {{0, 0, op.fingerprint, true, 7, std::nullopt, 0, {}}}, {});
  }
  CHECK(ok(ring.core(0), a) && ok(ring.core(1), b));
  CHECK(data[0] == data[1] && data[0][5] == expected(2, 5));
}

TEST(a_verdict_about_another_call_of_the_sequence_is_ignored) {
  Ring ring(2, 1, 0, 128, 3);
  ring.install(1);
  auto data = inputs(2, 64);
  const auto before = data;
  const auto a = ring.core(0).submit(1, call(data[0]));
  const std::uint32_t fingerprint = ring.core(0).find(a)->fingerprint;
  ring.core(0).seal(1);
  ring.core(0).settle(1, 1, {{0, 0, fingerprint + 1, false, 0, std::nullopt, 1, {}}}, {});
  CHECK(ring.core(0).find(a)->state == OpState::waiting && data == before);
}

bool is_refused(const Core& core, std::uint64_t id) {
  const OpPtr op = core.find(id);
  return op->state == OpState::finished && op->result.status == OpStatus::aborted;
}

// A call has a name: its tag, its step, and how many calls on the tag were made before it.
TEST(a_refused_call_fails_whenever_it_is_made) {
  Ring ring(2, 1, 0, 128, 3);
  ring.install(1);
  auto data = inputs(2, 64);
  Core& core = ring.core(0);
  core.ops().names().set_step(7);
  core.ops().refuse({0, 7, 1}, {});
  core.ops().refuse({0, 8, 0}, {});
  core.ops().refuse({5, 7, 0}, {});
  core.seal(1);
  const auto first = core.submit(1, call(data[0]));
  CHECK(core.find(first)->state == OpState::waiting);
  core.ops().cancel(first);
  core.ops().release(first);
  const auto again = core.submit(1, call(data[0]));  // given up, so this is call 0 as well
  CHECK(core.find(again)->state == OpState::waiting);
  core.ops().refuse({0, 7, 0}, {});  // and now it is refused while it waits
  CHECK(is_refused(core, again));
  const auto second = core.submit(1, call(data[0]));
  CHECK(is_refused(core, second));
  const auto third = core.submit(1, call(data[0]));
  CHECK(core.find(third)->state == OpState::waiting);
  core.ops().names().set_step(8);
  const auto next = core.submit(1, on_tag(1, call(data[1])));
  CHECK(core.find(next)->state == OpState::waiting && core.find(next)->descriptor.step == 8);
  core.ops().cancel(third);
  CHECK(is_refused(core, core.submit(1, call(data[0]))));  // call 0 of step 8
  const auto other = core.submit(1, on_tag(5, call(data[0])));
  CHECK(core.find(other)->state == OpState::waiting);  // what was refused of step 7 is past
  core.ops().refuse({0, 8, 1}, {});
  core.ops().names().restart();
  const auto admitted = core.submit(1, call(data[0]));
  CHECK(core.find(admitted)->state == OpState::waiting && core.find(admitted)->descriptor.call == 0);
}

TEST(another_attempt_has_the_name_of_the_first) {
  Ring ring(2, 1, 0, 128, 3);
  ring.install(1);
  auto data = inputs(2, 64);
  Core& core = ring.core(0);
  const auto first = core.submit(1, call(data[0], OpKind::all_reduce, kernels::ReduceOp::sum, Retry::caller));
  const std::uint32_t fingerprint = core.find(first)->fingerprint;
  core.seal(1);
  core.settle(1, 1, {}, {});
  CHECK(is_refused(core, first));
  OpSpec spec = call(data[0], OpKind::all_reduce, kernels::ReduceOp::sum, Retry::caller);
  spec.again = true;
  const auto second = core.submit(1, spec);
  CHECK(core.find(second)->fingerprint == fingerprint);
}

TEST(another_quantisation_is_a_mismatch) {
  Ring ring(2, 1, 0, 128, 3);
  ring.install(1);
  auto data = noise(2, 200);
  const auto before = data;
  for (std::size_t r = 0; r < 2; ++r) {
    OpSpec spec = call(data[r]);
    spec.scheme = r == 0 ? quantize::Scheme::minmax8 : quantize::Scheme::zeroscale8;
    ring.core(r).submit(1, spec);
  }
  ring.run();
  for (std::size_t r = 0; r < 2; ++r) {
    int reported = 0;
    while (const auto event = ring.core(r).next_event()) reported += event->kind == Event::Kind::mismatch;
    CHECK(reported == 1);
    CHECK(data[r] == before[r]);
  }
}

TEST(a_mismatch_is_reported_and_applied_nowhere) {
  Ring ring(2, 1, 0, 128, 3);
  ring.install(1);
  auto data = inputs(2, 200);
  data[1].resize(100);
  const auto before = data;
  ring.core(0).submit(1, call(data[0]));
  ring.core(1).submit(1, call(data[1]));
  ring.run();
  for (std::size_t r = 0; r < 2; ++r) {
    int reported = 0;
    while (const auto event = ring.core(r).next_event()) reported += event->kind == Event::Kind::mismatch;
    CHECK(reported == 1);
    CHECK(data[r] == before[r]);
  }
}

TEST(an_op_of_a_single_peer_has_too_few) {
  Ring ring(1, 1, 64, 128);
  ring.install(1);
  auto data = inputs(1, 8);
  const auto id = ring.core(0).submit(1, call(data[0]));
  CHECK(ring.core(0).find(id)->result.status == OpStatus::too_few);
}

TEST(garbage_ends_a_connection_and_nothing_else) {
  std::mt19937 rng(11);
  for (int i = 0; i < 500; ++i) {
    Core core;
    const ConnId conn = core.open("client", true);
    if (i % 2 == 0) core.promote(1, conn, false, 4, 0);
    std::size_t fed = 0;
    while (fed < 4096) {
      const auto space = core.receive_space(conn);
      if (space.empty()) break;
      const std::size_t step = std::min<std::size_t>(space.size(), 64);
      for (std::size_t k = 0; k < step; ++k) space[k] = static_cast<std::byte>(rng());
      core.received(1, conn, step);
      fed += step;
    }
    CHECK(fed < 4096 || i % 2 == 1);
  }
}

TEST(a_cancelled_op_restores_the_memory) {
  Ring ring(2, 1, 0, 128, 3);
  ring.install(1);
  auto data = inputs(2, 400);
  const auto before = data;
  const auto id = ring.core(0).submit(1, call(data[0]));
  ring.core(1).submit(1, call(data[1]));
  for (int i = 0; i < 6; ++i) ring.move();
  CHECK(ring.core(0).ops().cancel(id));
  CHECK(data[0] == before[0]);
  CHECK(ring.core(0).find(id)->result.status == OpStatus::cancelled);
  data[0].assign(400, -1);  // the caller may use its memory at once: lanes read from it no more
  ring.run();
}

TEST(an_abort_at_any_point_restores_the_memory) {
  for (const std::size_t ranks : {2, 3, 4}) abort_at_every_point(ranks);
}

TEST(an_abort_between_hosts_restores_the_memory) {
  for (const bool silent : {false, true}) {
    abort_at_every_point(4, quantize::Scheme::none, silent, 2);
    abort_at_every_point(6, quantize::Scheme::none, silent, 2);
    abort_at_every_point(6, quantize::Scheme::none, silent, 3);
  }
}

TEST(an_abort_in_a_mesh_restores_the_memory) {
  for (const bool silent : {false, true}) {
    for (const std::size_t ranks : {4, 5}) abort_at_every_point(ranks, quantize::Scheme::none, silent, 1, true);
  }
}

TEST(an_abort_of_a_quantised_op_restores_the_memory) {
  for (const std::size_t ranks : {2, 3, 4}) abort_at_every_point(ranks, quantize::Scheme::minmax8);
}

TEST(an_abort_restores_the_memory_of_a_rank_without_a_contribution) {
  for (const std::size_t ranks : {2, 3, 4}) abort_at_every_point(ranks, quantize::Scheme::none, true);
}

TEST(an_abort_of_a_quantised_op_restores_the_memory_of_a_rank_without_a_contribution) {
  for (const std::size_t ranks : {3, 4}) abort_at_every_point(ranks, quantize::Scheme::minmax8, true);
}

}  // namespace
