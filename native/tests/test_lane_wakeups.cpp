// Lanes that sleep until they are woken: does every op end, whatever happens to lanes, paths and advice?
//
// Stories are drawn from seeds: ops over lanes (lane_net.hpp) that are cut, end, come back, and become faster and
// slower; epochs that change in mid-op; advice that changes at random, at each read if it must. When the faults are
// over, everything that was called has to end soon, with the sums.
//
// More seeds than CI has time for: SEEDS=FIRST:COUNT test_lane_wakeups 'every_op_ends*'.
#include <cmath>
#include <cstdlib>

#include "lane_net.hpp"

using namespace ringfold;

namespace {

constexpr Ns timeout = 3'600'000 * millisecond;

// What every rank calls, in the same order: one op at a time with each tag.
struct Program {
  struct Call {
    std::uint64_t tag, id = 0;
    std::size_t count;
    OpKind kind = OpKind::all_reduce;
    std::uint16_t root = 0;
    std::vector<float> values{}, out{};
    bool is_called = false;
  };
  std::vector<std::vector<Call>> ranks;
};

float value_of(std::size_t rank, std::size_t call, std::size_t at) {
  return static_cast<float>((rank + 1) * 10 + call + at % 7);
}

class Story {
 public:
  // `mixed`: all kinds of ops that go over the ring, not only all_reduce in place.
  explicit Story(unsigned seed, bool mixed = false, Planted planted = {}) : weather_(seed), seed_(seed) {
    const auto size = static_cast<std::uint32_t>(weather_.pick(2, 5)),
               paths = static_cast<std::uint32_t>(weather_.pick(1, 3));
    lanes_ = static_cast<std::uint32_t>(paths > 1 ? weather_.pick(1, 2) : weather_.pick(2, 4));
    net_ = std::make_unique<Net>(size, paths, lanes_, weather_, planted);
    for (std::uint32_t edge = 0; edge < size; ++edge) {
      for (std::uint32_t path = 0; path < paths; ++path) change_rate(edge, path);
    }
    if (weather_.chance(0.4)) {
      fickle_ = std::make_unique<Fickle>(seed, paths);
      fickle_->changes = weather_.chance(0.5) ? 0.5 : 0.01;
      for (std::uint32_t i = 0; i < size; ++i) net_->core(i).set_path_hints(fickle_.get());
    }
    program_.ranks.resize(size);
    const std::size_t calls = weather_.pick(2, 8), tags = weather_.pick(1, 2);
    for (std::size_t call = 0; call < calls; ++call) {
      const std::size_t tag = weather_.pick(1, tags);
      const std::size_t count = weather_.chance(0.5) ? weather_.pick(16, 400) : weather_.pick(400, 4'000);
      Program::Call one{tag, 0, count};
      if (mixed) {
        one.kind = static_cast<OpKind>(weather_.pick(0, 3));
        one.root = static_cast<std::uint16_t>(weather_.pick(0, size - 1));
        if (one.kind == OpKind::reduce_scatter) one.count = (count / size + 1) * size;
      }
      for (auto& rank : program_.ranks) rank.push_back(one);
    }
  }

  // Whether everything has ended well.
  bool ends() {
    const Ns faults_until = net_->now + static_cast<Ns>(weather_.pick(50, 1'500)) * millisecond;
    while (net_->now < faults_until && !is_over()) {
      if (weather_.chance(0.02)) break_something();
      step();
    }
    for (const Heal& heal : heals_) net_->path(heal.edge, heal.path).is_cut = false;
    heals_.clear();
    const Ns by = net_->now + 60'000 * millisecond;
    while (net_->now < by && !is_over()) step();
    return is_over() && sums_are_right();
  }

 private:
  struct Heal {
    Ns at;
    std::uint32_t edge, path;
  };

  void step() {
    for (std::size_t at = heals_.size(); at-- > 0;) {
      if (heals_[at].at > net_->now) continue;
      net_->path(heals_[at].edge, heals_[at].path).is_cut = false;
      heals_.erase(heals_.begin() + static_cast<std::ptrdiff_t>(at));
    }
    if (weather_.chance(0.05)) reconnect();
    call_what_is_due();
    net_->turn(static_cast<Ns>(weather_.pick(20, 600)) * microsecond);
    for (std::size_t i = 0; i < net_->size(); ++i) {
      while (const auto event = net_->core(i).next_event()) {
        CHECK_MESSAGE(event->kind != Event::Kind::link_lost, "seed %u: a link was lost: %s", seed_,
                      event->text.c_str());
      }
    }
  }

  void call_what_is_due() {
    for (std::size_t rank = 0; rank < net_->size(); ++rank) {
      Core& core = net_->core(rank);
      for (std::size_t at = 0; at < program_.ranks[rank].size(); ++at) {
        Program::Call& call = program_.ranks[rank][at];
        if (call.is_called) continue;
        const auto tags = core.ops().tags_in_flight();
        if (std::find(tags.begin(), tags.end(), call.tag) != tags.end() || weather_.chance(0.7)) break;
        call.values.resize(call.count);
        for (std::size_t i = 0; i < call.count; ++i) call.values[i] = value_of(rank, at, i);
        OpSpec spec;
        spec.tag = call.tag;
        spec.timeout = timeout;
        auto* memory = reinterpret_cast<std::byte*>(call.values.data());
        spec.spans.push_back({memory, memory, call.count * sizeof(float), kernels::DType::f32, 0});
        spec.kind = call.kind;
        spec.root = call.root;
        if (call.kind == OpKind::all_gather) call.out.resize(call.count * net_->size());
        if (call.kind == OpKind::reduce_scatter) call.out.resize(call.count / net_->size());
        spec.gathered = reinterpret_cast<std::byte*>(call.out.data());
        call.id = core.submit(net_->now, spec);
        call.is_called = true;
      }
    }
  }

  bool is_over() {
    for (std::size_t rank = 0; rank < net_->size(); ++rank) {
      for (const Program::Call& call : program_.ranks[rank]) {
        if (!call.is_called || net_->core(rank).find(call.id)->state != OpState::finished) return false;
      }
    }
    return true;
  }

  bool sums_are_right() {
    const std::size_t n = net_->size();
    for (std::size_t rank = 0; rank < n; ++rank) {
      for (std::size_t at = 0; at < program_.ranks[rank].size(); ++at) {
        const Program::Call& call = program_.ranks[rank][at];
        if (net_->core(rank).find(call.id)->result.status != OpStatus::ok) return false;
        const bool apart = call.kind == OpKind::all_gather || call.kind == OpKind::reduce_scatter;
        const std::vector<float>& result = apart ? call.out : call.values;
        for (std::size_t i = 0; i < result.size(); ++i) {
          if (result[i] != expected(call, rank, at, i)) return false;
        }
      }
    }
    return true;
  }

  float expected(const Program::Call& call, std::size_t rank, std::size_t number, std::size_t at) {
    if (call.kind == OpKind::broadcast) return value_of(call.root, number, at);
    if (call.kind == OpKind::all_gather) return value_of(at / call.count, number, at % call.count);
    if (call.kind == OpKind::reduce_scatter) at += rank * (call.count / net_->size());
    float sum = 0;
    for (std::size_t each = 0; each < net_->size(); ++each) sum += value_of(each, number, at);
    return sum;
  }

  // What goes wrong.

  void break_something() {
    const auto edge = static_cast<std::uint32_t>(weather_.pick(0, net_->size() - 1));
    const auto path = static_cast<std::uint32_t>(weather_.pick(0, net_->paths() - 1));
    switch (weather_.pick(0, 5)) {
      case 0: {
        const double longest = weather_.chance(0.3) ? 1'500 : 60;
        net_->path(edge, path).is_cut = true;
        heals_.push_back({net_->now + static_cast<Ns>(weather_.between(1, longest) * millisecond), edge, path});
        return;
      }
      case 1:
        return reset(edge, path);
      case 2:
        return change_rate(edge, path);
      case 3:
        return new_epoch();
      default: {
        const PeerId peer = weather_.chance(0.8) ? (edge + 1) % net_->size() : (edge + net_->size() - 1) % net_->size();
        net_->core(edge).set_path_shares(peer, weather_.advice(net_->paths()));
      }
    }
  }

  void change_rate(std::uint32_t edge, std::uint32_t path) {
    Path& way = net_->path(edge, path);
    way.rate = std::pow(10, weather_.between(-4.3, -1.7));
    way.latency = static_cast<Ns>(weather_.between(10, weather_.chance(0.3) ? 5'000 : 300)) * microsecond;
  }

  // All lanes of a path, or one of them; but one of the link stays.
  void reset(std::uint32_t edge, std::uint32_t path) {
    const bool all = weather_.chance(0.5);
    for (std::size_t at = net_->lanes().size(); at-- > 0;) {
      const NetLane& lane = *net_->lanes()[at];
      if (lane.edge != edge || lane.path != path || lanes_of(edge) == 1) continue;
      net_->end_lane(at);
      if (!all) return;
    }
  }

  std::size_t lanes_of(std::uint32_t edge) {
    return static_cast<std::size_t>(std::count_if(net_->lanes().begin(), net_->lanes().end(),
                                                  [&](const auto& lane) { return lane->edge == edge; }));
  }

  void reconnect() {
    const auto edge = static_cast<std::uint32_t>(weather_.pick(0, net_->size() - 1));
    const auto number = static_cast<std::uint32_t>(weather_.pick(0, lanes_ * net_->paths() - 1));
    const bool is_there = std::any_of(net_->lanes().begin(), net_->lanes().end(),
                                      [&](const auto& lane) { return lane->edge == edge && lane->number == number; });
    if (!is_there && !net_->path(edge, number % net_->paths()).is_cut) net_->connect(edge, number, epoch_);
  }

  void wait_a_little() {
    for (std::size_t turns = weather_.pick(0, 4); turns > 0; --turns) {
      net_->turn(static_cast<Ns>(weather_.pick(20, 600)) * microsecond);
    }
  }

  // As the master does it: an op is committed if every member is done with it.
  void new_epoch() {
    std::vector<std::vector<SealedOp>> sealed;
    for (std::size_t i = 0; i < net_->size(); ++i) {
      sealed.push_back(net_->core(i).seal(epoch_));
      wait_a_little();
    }
    std::vector<Verdict> verdicts;
    for (const SealedOp& op : sealed.front()) {
      const bool commit = std::all_of(sealed.begin(), sealed.end(), [&](const std::vector<SealedOp>& one) {
        return std::any_of(one.begin(), one.end(), [&](const SealedOp& other) {
          return other.tag == op.tag && other.sequence == op.sequence && other.state >= 1;
        });
      });
      if (!commit) continue;
      verdicts.push_back({op.tag, op.sequence, op.descriptor.fingerprint(), true, 0, std::nullopt, 0, {}});
    }
    for (std::size_t i = 0; i < net_->size(); ++i) {
      net_->core(i).settle(net_->now, epoch_, verdicts, {});
      wait_a_little();
    }
    ++epoch_;
    for (std::uint32_t i = 0; i < net_->size(); ++i) {
      net_->install(i, epoch_);
      wait_a_little();
    }
  }

  Weather weather_;
  unsigned seed_;
  std::uint32_t lanes_ = 1, epoch_ = 1;
  std::unique_ptr<Fickle> fickle_;
  std::unique_ptr<Net> net_;
  Program program_;
  std::vector<Heal> heals_;
};

// The first seed and how many: from the environment, or `usual` of them from 0.
std::pair<unsigned, unsigned> seeds(unsigned usual) {
  unsigned first = 0, count = usual;
  const char* given = std::getenv("SEEDS");
  if (given != nullptr) CHECK(std::sscanf(given, "%u:%u", &first, &count) == 2);
  return {first, count};
}

void every_op_ends(unsigned first, unsigned count, bool mixed = false) {
  for (unsigned seed = first; seed < first + count; ++seed) {
    CHECK_MESSAGE(Story(seed, mixed).ends(), "seed %u%s does not end well", seed, mixed ? ", mixed," : "");
  }
}

// 289: lanes that had been silent for long, each of which was sure that another one was sooner. 1970, 14954: advice
// that changed between two reads, so that each lane left the segment to the other.
TEST(seeds_that_found_something_find_nothing_any_more) {
  for (const unsigned seed : {289u, 1970u, 14954u}) every_op_ends(seed, 1);
}

// 404 is the first; what else changes in the engine may make another one the first.
TEST(a_forgotten_wake_up_is_found) {
  Planted planted;
  planted.tell_nobody = true;
  bool is_found = false;
  for (unsigned seed = 404; seed < 1'400 && !is_found; ++seed) is_found = !Story(seed, false, planted).ends();
  CHECK(is_found);
}

struct Pair {
  explicit Pair(Net& net, std::size_t count) : net(net), values(2, std::vector<float>(count, 1)) {
    for (std::size_t rank = 0; rank < 2; ++rank) {
      OpSpec spec;
      spec.timeout = timeout;
      auto* memory = reinterpret_cast<std::byte*>(values[rank].data());
      spec.spans.push_back({memory, memory, count * sizeof(float), kernels::DType::f32, 0});
      ids.push_back(net.core(rank).submit(net.now, spec));
    }
  }
  bool is_over() {
    return net.core(0).find(ids[0])->state == OpState::finished && net.core(1).find(ids[1])->state == OpState::finished;
  }
  Net& net;
  std::vector<std::vector<float>> values;
  std::vector<std::uint64_t> ids;
};

LaneFrame first_frame(Core& core, ConnId conn) {
  iovec pieces[8];
  FrameHeader header;
  if (core.gather(conn, pieces, 8) > 0) std::memcpy(&header, pieces[0].iov_base, sizeof header);
  return header.kind;
}

// The rate of a lane that had been silent for a second was next to nothing, and the time for one frame at that rate
// more than a number can hold: it became the fastest of all.
TEST(a_lane_that_was_silent_is_not_taken_for_the_soonest) {
  for (int phase = 0; phase < 10; ++phase) {
    Weather weather(1);
    Net net(2, 2, 1, weather);
    for (const std::uint32_t edge : {0u, 1u}) {
      net.path(edge, 0) = {2e-4, 100 * microsecond};
      net.path(edge, 1) = {2e-4, 50 * microsecond};
    }
    Pair measured(net, 10'000);
    while (!measured.is_over()) net.turn(millisecond);
    for (const std::uint32_t edge : {0u, 1u}) net.path(edge, 1).is_cut = true;
    Pair hindered(net, 1'000);
    for (int i = 0; i < 1'200 + phase; ++i) net.turn(millisecond);
    CHECK(hindered.is_over());
    for (const std::uint32_t edge : {0u, 1u}) net.path(edge, 1).is_cut = false;
    for (int i = 0; i < 5; ++i) net.turn(millisecond);
    Pair after(net, 1'000);
    CHECK_MESSAGE(first_frame(net.core(0), net.lanes()[0]->out.source) == LaneFrame::open, "healed in phase %d", phase);
    for (int i = 0; i < 1'000 && !after.is_over(); ++i) net.turn(millisecond);
    CHECK(after.is_over());
  }
}

TEST(every_op_ends_in_stories_of_equal_lanes) {
  const auto [first, count] = seeds(150);
  every_op_ends(first, count);
}

TEST(every_op_ends_in_stories_of_mixed_lanes) {
  const auto [first, count] = seeds(100);
  every_op_ends(first, count, true);
}

}  // namespace
