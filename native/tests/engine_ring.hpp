// A ring of engines in one process, for tests with threads: connected over loopback or in shared memory, with what a
// master does when a link is lost.
//
// Threads wait for what they need, with a deadline, and never for a time.
#pragma once

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <numeric>
#include <thread>
#include <tuple>
#include <vector>

#include "check.hpp"
#include "ringfold/engine.hpp"

namespace ringfold {

inline constexpr Ns second = 1'000'000'000;
inline constexpr Ns test_timeout = 60 * second;
inline constexpr Ns op_timeout = 300 * second;

inline std::ptrdiff_t open_descriptors() {
  return std::distance(std::filesystem::directory_iterator("/proc/self/fd"), std::filesystem::directory_iterator());
}

// At the end of a test, as many descriptors are open as at its beginning.
class DescriptorCheck {
 public:
  ~DescriptorCheck() { CHECK(open_descriptors() == before_); }

 private:
  const std::ptrdiff_t before_ = open_descriptors();
};

template <typename Condition>
bool eventually(Condition holds) {
  for (const Ns until = monotonic_now() + test_timeout; monotonic_now() < until;) {
    if (holds()) return true;
    std::this_thread::yield();
  }
  return false;
}

// Waits until an op that the engine's own thread drives has ended.
inline bool ended(Engine& engine, std::uint64_t op) {
  return eventually([&] {
    return engine.look_at_ops([&](OpTable& ops) {
      const OpPtr found = ops.find(op);
      return found == nullptr || found->state == OpState::finished;
    });
  });
}

class Threads {
 public:
  ~Threads() { join(); }
  void start(std::function<void()> work) { threads_.emplace_back(std::move(work)); }
  void join() {
    for (std::thread& each : threads_) each.join();
    threads_.clear();
  }

 private:
  std::vector<std::thread> threads_;
};

// An engine and the thread that takes its events, as a peer's session does.
class Peer {
 public:
  explicit Peer(Ns spin) : engine(EngineSettings{.spin = spin, .same_host_buffer = 1 << 16, .congestion = "host"}) {
    port = engine.listen("127.0.0.1", 0, 1);
    name = engine.listen_here();
    CHECK(!name.empty());
    session_ = std::thread([this] { take_events(); });
  }
  ~Peer() { stop(); }

  void stop() {
    engine.shutdown();
    stopping_.store(true);
    if (session_.joinable()) session_.join();
  }

  // The next event of a kind, with the connection that it is about.
  Event await(Event::Kind kind) {
    std::unique_lock lock(mutex_);
    Event found;
    const auto arrived = [&] {
      const auto at =
          std::find_if(events_.begin(), events_.end(), [&](const Event& each) { return each.kind == kind; });
      if (at == events_.end()) return false;
      found = std::move(*at);
      events_.erase(at);
      return true;
    };
    CHECK(arrived_.wait_for(lock, std::chrono::nanoseconds(test_timeout), arrived));
    return found;
  }

  bool has(Event::Kind kind) {
    std::unique_lock lock(mutex_);
    return std::any_of(events_.begin(), events_.end(), [&](const Event& each) { return each.kind == kind; });
  }

  Engine engine;
  std::uint16_t port = 0;
  std::string name;

 private:
  void take_events() {
    while (!stopping_.load()) {
      auto event = engine.next_event(second / 20);
      if (!event) continue;
      std::unique_lock lock(mutex_);
      events_.push_back(std::move(*event));
      arrived_.notify_all();
    }
  }

  std::mutex mutex_;
  std::condition_variable arrived_;
  std::vector<Event> events_;
  std::atomic<bool> stopping_{false};
  std::thread session_;
};

struct Shape {
  std::uint32_t size = 3, lanes = 1, paths = 1, channels = 1;
  std::size_t small = 256, segment = 4096;
  bool memory = false;
  Ns spin = 100'000;
};

class Ring {
 public:
  explicit Ring(Shape shape) : shape_(shape) {
    for (std::uint32_t i = 0; i < shape.size; ++i) peers_.push_back(std::make_unique<Peer>(shape.spin));
    connect();
    install();
  }

  Peer& peer(std::size_t i) { return *peers_[i]; }
  Engine& engine(std::size_t i) { return peers_[i]->engine; }
  std::uint32_t size() const { return shape_.size; }

  // Both ends of a connection from one peer to another, past their handshake: a message, by which each knows the other.
  std::pair<ConnId, ConnId> connection(std::uint32_t from, std::uint32_t to) {
    const ConnId out =
        engine(from).dial("127.0.0.1", peer(to).port, 5 * second, {}, shape_.memory ? peer(to).name : std::string());
    CHECK(peer(from).await(Event::Kind::opened).conn == out);
    engine(from).with_core([&](Core& core, Ns) { core.send(out, "hello", 5); });
    const Event hello = peer(to).await(Event::Kind::message);
    CHECK(hello.body.size() == 5);
    return {out, hello.conn};
  }

  void connect() {
    for (std::uint32_t i = 0; i < size(); ++i) {
      for (std::uint32_t lane = 0; lane < shape_.lanes * shape_.channels; ++lane) {
        const std::uint32_t next = (i + 1) % size(), channel = lane / shape_.lanes;
        const auto [out, in] = connection(i, next);
        const Sharing sharing{shape_.lanes > 1, lane % shape_.lanes % shape_.paths, shape_.paths, 0, channel};
        engine(i).with_core([&](Core& core, Ns now) { core.promote(now, out, true, next, lane, sharing); });
        engine(next).with_core([&](Core& core, Ns now) { core.promote(now, in, false, i, lane, sharing); });
      }
    }
  }

  void install() {
    ++epoch_;
    std::vector<PeerId> members(size());
    std::iota(members.begin(), members.end(), PeerId{0});
    for (std::uint32_t i = 0; i < size(); ++i) {
      EpochSpec spec{epoch_, i, size(), members, false, shape_.small, shape_.segment};
      spec.peers_here = size();
      spec.multipath = shape_.lanes > 1;
      spec.channels = shape_.channels;
      const auto in_memory = engine(i).look([](Core& core) {
        const std::vector<LaneInfo> lanes = core.lanes();
        return std::count_if(lanes.begin(), lanes.end(), [](const LaneInfo& lane) { return lane.in_memory; });
      });
      CHECK(in_memory == (shape_.memory ? 2 * shape_.channels : 0));
      engine(i).with_core([&](Core& core, Ns now) { core.install(now, spec); });
    }
  }

  // What a master does when a link is lost: all seal, an op that is committed anywhere is committed everywhere, the
  // rest runs again in the next epoch, over new lanes.
  void next_epoch() {
    std::map<std::pair<std::uint64_t, std::uint32_t>, Verdict> verdicts;
    for (std::uint32_t i = 0; i < size(); ++i) {
      const auto sealed = engine(i).with_core([&](Core& core, Ns) { return core.seal(epoch_); });
      for (const SealedOp& op : sealed) {
        if (op.state != 2) continue;
        verdicts[{op.tag, op.sequence}] = {
            op.tag, op.sequence, op.descriptor.fingerprint(), true, op.registrations, op.payloads, 0, {}};
      }
    }
    std::vector<Verdict> all;
    for (auto& [key, verdict] : verdicts) all.push_back(verdict);
    for (std::uint32_t i = 0; i < size(); ++i) {
      engine(i).with_core([&](Core& core, Ns now) {
        core.settle(now, epoch_, all, {});
        for (const LaneInfo& lane : core.lanes()) core.close(lane.conn);
      });
    }
    connect();
    install();
  }

 private:
  Shape shape_;
  std::uint32_t epoch_ = 0;
  std::vector<std::unique_ptr<Peer>> peers_;
};

inline OpSpec all_reduce(std::vector<float>& values, std::uint64_t tag, Retry retry = Retry::engine) {
  OpSpec spec;
  spec.tag = tag;
  spec.retry = retry;
  spec.timeout = op_timeout;
  auto* at = reinterpret_cast<std::byte*>(values.data());
  spec.spans.push_back({at, at, values.size() * sizeof(float), kernels::DType::f32, 0});
  return spec;
}

inline OpStatus status_of(Engine& engine, std::uint64_t op) {
  return engine.look([&](Core& core) {
    const OpPtr found = core.find(op);
    const OpStatus status = found == nullptr ? OpStatus::failed : found->result.status;
    core.ops().release(op);
    return status;
  });
}

// One call of an all-reduce: driven by this thread, or by the engine's own while this one waits.
inline OpStatus call(Engine& engine, std::vector<float>& values, std::uint64_t tag, bool drives) {
  if (drives) {
    const std::uint64_t op = engine.submit_to_drive(all_reduce(values, tag));
    CHECK(eventually([&] { return engine.run(op, second / 10); }));
    return status_of(engine, op);
  }
  const std::uint64_t op = engine.submit(all_reduce(values, tag));
  CHECK(ended(engine, op));
  return status_of(engine, op);
}

// A loop of calls on one tag at one rank; every result is looked at.
inline void call_often(Ring& ring, std::uint32_t rank, std::uint64_t tag, int calls, std::size_t count) {
  for (int i = 0; i < calls; ++i) {
    std::vector<float> values(count);
    for (std::size_t at = 0; at < count; ++at)
      values[at] = static_cast<float>(rank + 1 + tag + (at + static_cast<std::size_t>(i)) % 5);
    const bool drives = (tag + rank + static_cast<std::uint64_t>(i)) % 2 == 0;
    CHECK(call(ring.engine(rank), values, tag, drives) == OpStatus::ok);
    const auto n = static_cast<float>(ring.size());
    const float ranks = n * (n + 1) / 2;
    for (std::size_t at = 0; at < count; ++at) {
      const float rest = static_cast<float>(tag + (at + static_cast<std::size_t>(i)) % 5);
      if (values[at] == ranks + n * rest) continue;
      CHECK_MESSAGE(false, "rank %u tag %llu call %d: element %zu is %f", rank, static_cast<unsigned long long>(tag), i,
                    at, static_cast<double>(values[at]));
      break;
    }
  }
}

}  // namespace ringfold
