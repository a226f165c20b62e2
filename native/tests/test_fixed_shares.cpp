// Fixed shares: whatever the rates of the paths, the sizes and the number of ops, and whatever happens to lanes, each
// path carries its share of the bytes.
#include <cmath>
#include <cstdlib>

#include "lane_net.hpp"

using namespace ringfold;

namespace {

constexpr Ns timeout = 3'600'000 * millisecond;
constexpr std::size_t segment = 256;
constexpr std::size_t many = 64'000;  // values: 1,000 segments

using Shares = std::vector<std::uint16_t>;
using Bytes2 = std::array<std::uint64_t, max_paths>;

PathShares fixed(const Shares& shares) {
  PathShares out;
  std::copy(shares.begin(), shares.end(), out.share.begin());
  out.flags = PathShares::fixed;
  return out;
}

// Two peers, one lane per path unless more are wanted, and paths of these rates (bytes per nanosecond).
class Transfers {
 public:
  explicit Transfers(const std::vector<double>& rates, std::uint32_t lanes = 1, Planted planted = {})
      : weather_(7), net(2, static_cast<std::uint32_t>(rates.size()), lanes, weather_, planted) {
    for (const std::uint32_t edge : {0u, 1u}) {
      for (std::uint32_t path = 0; path < rates.size(); ++path) {
        net.path(edge, path) = {rates[path], 100 * microsecond};
      }
    }
  }

  void share(const PathShares& shares) { net.core(0).set_path_shares(1, shares); }

  // Begins an all-reduce on both sides; it is the caller's turn to let time pass.
  void begin(std::size_t count, std::uint64_t tag = 1) {
    for (std::size_t rank = 0; rank < 2; ++rank) {
      auto& values = values_.emplace_back(std::make_unique<std::vector<float>>(count, static_cast<float>(rank + 1)));
      OpSpec spec;
      spec.tag = tag;
      spec.timeout = timeout;
      auto* memory = reinterpret_cast<std::byte*>(values->data());
      spec.spans.push_back({memory, memory, count * sizeof(float), kernels::DType::f32, 0});
      ops_.emplace_back(rank, net.core(rank).submit(net.now, spec));
    }
  }

  bool is_over() {
    return std::all_of(ops_.begin(), ops_.end(),
                       [&](const auto& op) { return net.core(op.first).find(op.second)->state == OpState::finished; });
  }

  void end() {
    for (int turns = 0; turns < 2'000'000 && !is_over(); ++turns) net.turn(100 * microsecond);
    CHECK(is_over());
    for (const auto& [rank, id] : ops_) CHECK(net.core(rank).find(id)->result.status == OpStatus::ok);
    for (const auto& values : values_) {
      CHECK(std::all_of(values->begin(), values->end(), [](float value) { return value == 3; }));
    }
    ops_.clear();
    values_.clear();
  }

  // Until the first peer has given out so many bytes of payload.
  void until_sent(std::uint64_t bytes) {
    for (int turns = 0; turns < 1'000'000 && total(sent()) < bytes; ++turns) net.turn(100 * microsecond);
    CHECK(total(sent()) >= bytes);
  }

  void end_path(std::uint32_t path) {
    for (std::size_t at = net.lanes().size(); at-- > 0;) {
      if (net.lanes()[at]->path == path) net.end_lane(at);
    }
  }
  void restore_path(std::uint32_t path) {
    for (const std::uint32_t edge : {0u, 1u}) net.connect(edge, path, 1);
  }

  Bytes2 sent() { return net.core(0).path_bytes(true); }
  static std::uint64_t total(const Bytes2& bytes) {
    return std::accumulate(bytes.begin(), bytes.end(), std::uint64_t{0});
  }

 private:
  Weather weather_;

 public:
  Net net;

 private:
  std::vector<std::unique_ptr<std::vector<float>>> values_;
  std::vector<std::pair<std::size_t, std::uint64_t>> ops_;
};

Bytes2 since(const Bytes2& now, const Bytes2& before) {
  Bytes2 out{};
  for (std::size_t path = 0; path < max_paths; ++path) out[path] = now[path] - before[path];
  return out;
}

// How far the path that is furthest from its share is from it, in segments.
double segments_off(const Bytes2& sent, const Shares& shares) {
  const auto all = static_cast<double>(Transfers::total(sent));
  const double whole = std::accumulate(shares.begin(), shares.end(), 0.0);
  double most = 0;
  for (std::size_t path = 0; path < shares.size(); ++path) {
    most = std::max(most, std::abs(static_cast<double>(sent[path]) - shares[path] / whole * all));
  }
  return most / segment;
}

double one_transfer(const std::vector<double>& rates, const Shares& shares, std::uint32_t lanes = 1,
                    Planted planted = {}) {
  Transfers link(rates, lanes, planted);
  link.share(fixed(shares));
  link.begin(many);
  link.end();
  CHECK(Transfers::total(link.sent()) == many * sizeof(float));
  return segments_off(link.sent(), shares);
}

// Halves, and the second path is away for a quarter of the transfer: how far from halves it is from then on, in
// segments.
double off_after_a_break(Planted planted) {
  Transfers link({1e-3, 1e-3}, 1, planted);
  link.share(fixed({50, 50}));
  link.begin(many);
  link.until_sent(many);
  link.end_path(1);
  link.until_sent(2 * many);
  link.restore_path(1);
  const auto before = link.sent();
  link.end();
  const auto after = since(link.sent(), before);
  CHECK(Transfers::total(after) > 400 * segment);
  return segments_off(after, {50, 50});
}

}  // namespace

TEST(fixed_shares_hold_on_equal_paths) {
  for (const Shares& shares : {Shares{50, 50}, Shares{80, 20}, Shares{1, 99}, Shares{40'000, 25'535}}) {
    CHECK(one_transfer({1e-3, 1e-3}, shares) <= 1);
  }
}

TEST(fixed_shares_hold_on_unequal_paths_whose_segments_arrive_in_any_order) {
  for (const Shares& shares : {Shares{50, 50}, Shares{20, 80}, Shares{80, 20}}) {
    CHECK(one_transfer({2e-3, 5e-4}, shares) <= 1);
    CHECK(one_transfer({1e-2, 1e-4}, shares) <= 1);
  }
  CHECK(one_transfer({2e-3, 1e-3, 5e-4}, {20, 30, 50}) <= 2);
  CHECK(one_transfer({2e-3, 1e-3, 5e-4, 1e-3}, {1, 1, 1, 1}) <= 2);
}

TEST(fixed_shares_hold_with_several_lanes_on_each_path) {
  CHECK(one_transfer({2e-3, 5e-4}, {50, 50}, 3) <= 1);
  CHECK(one_transfer({1e-3, 1e-3}, {70, 30}, 4) <= 1);
}

// The rest of a path that is slow for its share is waited for: sent again on the other, it would not be its share.
TEST(the_tail_of_a_path_that_is_slow_for_its_share_is_not_sent_again) {
  Transfers link({1e-2, 2e-4});
  link.share(fixed({50, 50}));
  link.begin(many);
  link.end();
  CHECK(link.net.core(0).stats().reissued == 0);
}

TEST(fixed_shares_hold_over_two_tags_in_flight) {
  Transfers link({2e-3, 5e-4});
  link.share(fixed({60, 40}));
  for (int turn = 0; turn < 3; ++turn) {
    link.begin(many, 1);
    link.begin(many / 3, 2);
    link.end();
  }
  CHECK(segments_off(link.sent(), {60, 40}) <= 1);
}

// One op of a segment goes over one path; many of them follow the shares together.
TEST(fixed_shares_hold_over_many_ops_of_one_segment) {
  Transfers link({1e-3, 1e-3});
  link.share(fixed({75, 25}));
  for (int op = 0; op < 100; ++op) {
    link.begin(segment / sizeof(float));
    link.end();
  }
  const auto sent = link.sent();
  CHECK(segments_off(sent, {75, 25}) <= 1);
  CHECK(sent[0] == 75 * segment && sent[1] == 25 * segment);
}

TEST(the_others_take_over_from_a_broken_path_by_their_shares) {
  Transfers link({1e-3, 1e-3, 1e-3});
  link.share(fixed({50, 30, 20}));
  link.begin(many);
  link.until_sent(many);
  link.end_path(0);
  const auto before = link.sent();
  link.end();
  const auto after = since(link.sent(), before);
  CHECK(after[0] == 0);
  CHECK(segments_off(after, {0, 30, 20}) <= 2);
  CHECK(link.net.core(0).stats().reissued > 0);  // what the broken path held
}

// It does not make up for the time that it was away: it would carry everything until then.
TEST(a_share_binds_again_when_a_broken_path_is_back) { CHECK(off_after_a_break({}) <= 2); }

TEST(a_path_that_earns_while_it_is_away_is_found) {
  Planted planted;
  planted.absent_earns = true;
  CHECK(off_after_a_break(planted) > 50);
}

TEST(a_path_whose_lanes_are_lost_one_by_one_keeps_its_share) {
  Transfers link({1e-3, 1e-3}, 3);
  link.share(fixed({30, 70}));
  link.begin(many);
  for (const std::uint64_t bytes : {many / 2, many}) {
    link.until_sent(bytes);
    for (std::size_t at = 0; at < link.net.lanes().size(); ++at) {
      const NetLane& lane = *link.net.lanes()[at];
      if (lane.edge == 0 && lane.path == 1) {
        link.net.end_lane(at);
        break;
      }
    }
  }
  link.end();
  // What the lost lanes held was sent again: more bytes than the op has, all of them by the shares.
  CHECK(Transfers::total(link.sent()) > many * sizeof(float));
  CHECK(segments_off(link.sent(), {30, 70}) <= 1);
}

// A lost packet silences a path for 200 ms. The others do not wait so long, and it catches up.
TEST(a_path_that_was_silent_catches_up) {
  Transfers link({1e-3, 1e-3});
  link.share(fixed({50, 50}));
  link.begin(4 * many);
  link.until_sent(many);
  for (const std::uint32_t edge : {0u, 1u}) link.net.path(edge, 1).is_cut = true;
  const auto cut = link.sent();
  for (int turns = 0; turns < 2'000; ++turns) link.net.turn(100 * microsecond);
  const auto meanwhile = since(link.sent(), cut);
  CHECK(meanwhile[0] > 100 * segment && meanwhile[1] < 20 * segment);
  for (const std::uint32_t edge : {0u, 1u}) link.net.path(edge, 1).is_cut = false;
  link.end();
  CHECK(segments_off(link.sent(), {50, 50}) <= 16);  // without what was sent twice meanwhile
}

// But not in the next transfer: nobody remembers why a path carries everything.
TEST(what_a_silent_path_is_behind_is_forgiven_when_the_transfer_is_over) {
  Transfers link({1e-3, 1e-3});
  link.share(fixed({50, 50}));
  link.begin(many);
  link.until_sent(many);
  for (const std::uint32_t edge : {0u, 1u}) link.net.path(edge, 1).is_cut = true;
  link.end();
  for (const std::uint32_t edge : {0u, 1u}) link.net.path(edge, 1).is_cut = false;
  for (int turns = 0; turns < 1'000; ++turns) link.net.turn(100 * microsecond);
  const auto before = link.sent();
  CHECK(segments_off(before, {50, 50}) > 100);
  link.begin(many);
  link.end();
  CHECK(segments_off(since(link.sent(), before), {50, 50}) <= 4);
}

TEST(other_shares_bind_from_the_next_segment_on) {
  Transfers link({1e-3, 1e-3});
  link.share(fixed({90, 10}));
  link.begin(many);
  link.until_sent(2 * many);
  CHECK(segments_off(link.sent(), {90, 10}) <= 1);
  link.share(fixed({20, 80}));
  const auto before = link.sent();
  link.end();
  CHECK(segments_off(since(link.sent(), before), {20, 80}) <= 1);
}

TEST(a_path_without_a_share_gets_nothing_while_another_one_lives) {
  Transfers link({1e-3, 1e-3});
  link.share(fixed({100, 0}));
  link.begin(many);
  link.until_sent(many);
  CHECK(link.sent()[1] == 0);
  link.end_path(0);
  link.end();
  CHECK(link.sent()[1] > 0);
}

// Shares that are not fixed say where to begin; then each path takes what it can.
TEST(weights_do_not_bind) {
  Transfers link({2e-3, 2e-4});
  PathShares weights = fixed({50, 50});
  weights.flags = 0;
  link.share(weights);
  link.begin(many);
  link.end();
  CHECK(segments_off(link.sent(), {50, 50}) > 200);
}

TEST(shares_that_expire_are_found) {
  Planted planted;
  planted.shares_expire = true;
  CHECK(one_transfer({2e-3, 5e-4}, {50, 50}, 1, planted) > 100);
}
