// Kernels and paths for tests of lanes: cores in a ring, and lanes that sleep until they are woken.
//
// As in the engine, a lane is flushed when the core has marked it, or when its kernel has room again after it was full;
// nobody else looks at it. So a wake-up that the core forgets is an op that never ends. A path has a rate and a
// latency, so lanes have rates, round trips and bytes in flight; it may be cut (nothing arrives, nothing is lost), and
// its connections may end.
#pragma once

#include <algorithm>
#include <cstring>
#include <deque>
#include <memory>
#include <numeric>
#include <random>

#include "check.hpp"
#include "ringfold/core.hpp"

namespace ringfold {

inline constexpr Ns microsecond = 1'000, millisecond = 1'000'000;
inline constexpr Ns look_every = 500 * microsecond;

// One path between two neighbours, the same both ways.
struct Path {
  double rate = 1e-3;  // bytes per nanosecond
  Ns latency = 100 * microsecond;
  bool is_cut = false;
};

// One direction of a lane: what a kernel has taken and the other one has not got, in order.
struct Direction {
  struct Chunk {
    Bytes bytes;
    Ns arrives;
  };
  std::size_t from = 0, to = 0;  // cores
  ConnId source = 0, target = 0;
  Path* path = nullptr;
  std::deque<Chunk> in_flight;
  std::size_t in_kernel = 0;
  Ns free_at = 0;  // when the path has sent all of it
  bool is_blocked = false;
};

struct NetLane {
  std::uint32_t edge, number, path;
  Direction out, back;
};

class Weather {
 public:
  explicit Weather(unsigned seed) : rng(seed) {}
  std::size_t pick(std::size_t from, std::size_t to) {
    return std::uniform_int_distribution<std::size_t>(from, to)(rng);
  }
  double between(double from, double to) { return std::uniform_real_distribution<double>(from, to)(rng); }
  bool chance(double of) { return between(0, 1) < of; }

  PathShares advice(std::uint32_t paths) {
    PathShares out;
    if (chance(0.2)) return out;
    const auto kind = pick(0, 3);
    for (std::uint32_t path = 0; path < paths; ++path) {
      if (kind != 0) out.share[path] = static_cast<std::uint16_t>(chance(0.3) ? 0 : pick(1, 65'535));
      if (kind != 1 && chance(0.4)) out.flags |= 1u << path;
    }
    if (kind == 3 || chance(0.3)) out.flags |= PathShares::fixed;
    return out;
  }

  std::mt19937 rng;
};

// An agent that changes its mind all the time.
class Fickle : public PathHints {
 public:
  Fickle(unsigned seed, std::uint32_t paths) : weather_(seed), paths_(paths) {}
  bool read(PeerId, PathShares& out) const override {
    if (weather_.chance(changes)) {
      given_ = weather_.advice(paths_);
      has_given_ = weather_.chance(0.8);
    }
    out = given_;
    return has_given_;
  }
  double changes = 0.5;

 private:
  mutable Weather weather_;
  mutable PathShares given_;
  mutable bool has_given_ = false;
  std::uint32_t paths_;
};

class Net {
 public:
  Net(std::uint32_t size, std::uint32_t paths, std::uint32_t lanes, Weather& weather, Planted planted = {})
      : size_(size), paths_(paths), window_(weather.pick(300, 3'000)) {
    for (std::uint32_t i = 0; i < size; ++i) cores_.push_back(std::make_unique<Core>(planted));
    links_.resize(size);
    for (auto& edge : links_) edge.resize(paths);
    for (std::uint32_t edge = 0; edge < size; ++edge) {
      for (std::uint32_t lane = 0; lane < lanes * paths; ++lane) connect(edge, lane, 0);
    }
    for (std::uint32_t i = 0; i < size; ++i) install(i, 1);
  }

  Core& core(std::size_t i) { return *cores_[i]; }
  Path& path(std::uint32_t edge, std::uint32_t path) { return links_[edge][path]; }
  std::vector<std::unique_ptr<NetLane>>& lanes() { return lanes_; }
  std::uint32_t size() const { return size_; }
  std::uint32_t paths() const { return paths_; }

  void install(std::uint32_t i, std::uint32_t epoch) {
    std::vector<PeerId> members(size_);
    std::iota(members.begin(), members.end(), PeerId{0});
    EpochSpec spec{epoch, i, size_, members, false, 0, 256};
    spec.multipath = true;
    core(i).install(now, spec);
  }

  void connect(std::uint32_t edge, std::uint32_t number, std::uint32_t epoch) {
    const std::uint32_t to = (edge + 1) % size_, path = number % paths_;
    auto lane = std::make_unique<NetLane>();
    lane->edge = edge;
    lane->number = number;
    lane->path = path;
    const ConnId out = core(edge).open("next", false), in = core(to).open("previous", true);
    core(edge).promote(now, out, true, to, number, {true, path, paths_, epoch});
    core(to).promote(now, in, false, edge, number, {true, path, paths_, epoch});
    lane->out = {edge, to, out, in, &links_[edge][path], {}, 0, 0, false};
    lane->back = {to, edge, in, out, &links_[edge][path], {}, 0, 0, false};
    lanes_.push_back(std::move(lane));
  }

  void end_lane(std::size_t at) {
    const auto lane = std::move(lanes_[at]);
    lanes_.erase(lanes_.begin() + static_cast<std::ptrdiff_t>(at));
    core(lane->out.from).lost(now, lane->out.source, "reset");
    core(lane->out.to).lost(now, lane->out.target, "reset");
  }

  // A turn of every engine: what has arrived, what the kernels say, and what the cores have marked.
  void turn(Ns later) {
    now += later;
    for (std::size_t at = 0; at < lanes_.size(); ++at) {
      for (Direction* direction : {&lanes_[at]->out, &lanes_[at]->back}) deliver(*direction);
    }
    if (now - last_look_ >= look_every) {
      last_look_ = now;
      for (const auto& lane : lanes_) {
        for (const Direction* direction : {&lane->out, &lane->back}) {
          core(direction->from)
              .acknowledged(now, direction->source, direction->in_kernel, 2 * direction->path->latency);
        }
      }
    }
    for (const auto& lane : lanes_) {
      for (Direction* direction : {&lane->out, &lane->back}) {
        if (direction->is_blocked && has_room(*direction)) {
          direction->is_blocked = false;
          flush(*direction);
        }
      }
    }
    flush_marked();
  }

  void flush_marked() {
    bool any = true;
    for (int rounds = 0; any; ++rounds) {
      CHECK_MESSAGE(rounds < 10'000, "lanes wake each other for ever");
      if (rounds >= 10'000) return;
      any = false;
      for (std::size_t i = 0; i < size_; ++i) {
        for (const ConnId conn : core(i).take_dirty()) {
          any = true;
          if (Direction* direction = direction_from(i, conn); direction != nullptr && !direction->is_blocked)
            flush(*direction);
        }
      }
    }
  }

  Ns now = 1'000 * millisecond;

 private:
  bool has_room(const Direction& direction) const { return direction.in_kernel <= window_ / 2; }

  Direction* direction_from(std::size_t i, ConnId conn) {
    for (const auto& lane : lanes_) {
      for (Direction* direction : {&lane->out, &lane->back}) {
        if (direction->from == i && direction->source == conn) return direction;
      }
    }
    return nullptr;
  }

  void flush(Direction& direction) {
    while (true) {
      iovec pieces[64];
      const std::size_t count = core(direction.from).gather(direction.source, pieces, 64);
      if (count == 0) return;
      Bytes bytes;
      for (std::size_t i = 0; i < count; ++i) {
        const auto* at = static_cast<const std::byte*>(pieces[i].iov_base);
        bytes.insert(bytes.end(), at, at + pieces[i].iov_len);
      }
      const std::size_t room = window_ - std::min(window_, direction.in_kernel), offered = bytes.size();
      bytes.resize(std::min(room, offered));
      if (!bytes.empty()) {
        const std::size_t taken = bytes.size();
        direction.free_at =
            std::max(direction.free_at, now) + static_cast<Ns>(static_cast<double>(taken) / direction.path->rate);
        direction.in_flight.push_back({std::move(bytes), direction.free_at + direction.path->latency});
        direction.in_kernel += taken;
        core(direction.from).sent(now, direction.source, taken);
      }
      if (room < offered) {
        direction.is_blocked = true;
        return;
      }
    }
  }

  void deliver(Direction& direction) {
    if (direction.path->is_cut) return;
    while (!direction.in_flight.empty() && direction.in_flight.front().arrives <= now) {
      Direction::Chunk& chunk = direction.in_flight.front();
      const auto space = core(direction.to).receive_space(direction.target);
      const std::size_t count = std::min(space.size(), chunk.bytes.size());
      if (count == 0) return;  // the other side does not read now
      std::memcpy(space.data(), chunk.bytes.data(), count);
      chunk.bytes.erase(chunk.bytes.begin(), chunk.bytes.begin() + static_cast<std::ptrdiff_t>(count));
      direction.in_kernel -= count;
      if (chunk.bytes.empty()) direction.in_flight.pop_front();
      core(direction.to).received(now, direction.target, count);
    }
  }

  std::uint32_t size_, paths_;
  std::size_t window_;
  std::vector<std::unique_ptr<Core>> cores_;
  std::vector<std::vector<Path>> links_;  // by edge
  std::vector<std::unique_ptr<NetLane>> lanes_;
  Ns last_look_ = 0;
};

}  // namespace ringfold
