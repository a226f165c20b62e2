// The core for the simulation: the commands of the engine, with virtual connections and a virtual clock. A template of
// its binding, because the test module has one with planted bugs.
#pragma once

#include <deque>
#include <map>
#include <random>
#include <unordered_map>

#include "commands.hpp"

namespace ringfold {

// The workers of the channels, which carry out commands when they get round to it: before or after what their lanes
// bring, and each at its own pace. What they do is the same in every run of a seed.
class SimulatedWorkers : public ChannelDriver {
 public:
  bool post(std::uint32_t channel, ChannelCommand& command) override {
    if (still_) return false;
    commands_[channel].push_back(std::move(command));
    return true;
  }

  // One that happens to get the processor, or none. Now and then one gets none for long.
  void work_somewhere(Core& core) {
    if (held_for_ > 0) --held_for_;
    if (commands_.empty() || rng_() % 2 == 0) return;
    const auto& [channel, commands] =
        *std::next(commands_.begin(), static_cast<std::ptrdiff_t>(rng_() % commands_.size()));
    if (channel == held_ && held_for_ > 0) return;
    work(core, channel, rng_() % (commands.size() + 1));
    if (held_for_ > 0 || commands.empty() || rng_() % 4 != 0) return;
    held_ = channel;
    held_for_ = rng_() % 500;
  }

  // Around what is done while all stand still, and nothing is outstanding.
  template <typename Command>
  void stand_still(Core& core, Ns now, Command command) {
    for (auto& [channel, commands] : commands_) work(core, channel, commands.size());
    still_ = true;
    core.route(now);
    command();
    still_ = false;
    core.route(now);
  }

 private:
  void work(Core& core, std::uint32_t channel, std::size_t count) {
    auto& commands = commands_[channel];
    for (; count > 0; --count) {
      const ChannelCommand command = std::move(commands.front());
      commands.pop_front();
      core.channel(channel).execute(command);
    }
  }

  std::map<std::uint32_t, std::deque<ChannelCommand>> commands_;
  std::minstd_rand rng_;
  std::uint32_t held_ = 0;
  std::size_t held_for_ = 0;  // so many events more
  bool still_ = false;
};

class SimulatedCore {
 public:
  SimulatedCore() { core_.set_channel_driver(&workers_); }
#ifdef RINGFOLD_PLANTED
  explicit SimulatedCore(Planted planted) : core_(planted) { core_.set_channel_driver(&workers_); }
#endif

  void receive(Ns now, ConnId conn, const nb::bytes& bytes) {
    now_ = now;
    let_workers_work();
    const auto* at = reinterpret_cast<const std::byte*>(bytes.c_str());
    std::size_t left = bytes.size();
    while (left > 0) {
      const auto space = core_.receive_space(conn);
      if (space.empty()) throw nb::value_error("the connection must not be read now: ask readable() first");
      const std::size_t step = std::min(left, space.size());
      std::memcpy(space.data(), at, step);
      core_.received(now, conn, step);
      at += step;
      left -= step;
      if (left > 0 && core_.receive_space(conn).empty()) break;
    }
    unread_[conn].insert(unread_[conn].end(), at, at + left);
    let_workers_work();
  }

  nb::bytes transmit(Ns now, ConnId conn, std::size_t limit) {
    now_ = now;
    let_workers_work();
    std::string out;
    while (out.size() < limit) {
      iovec pieces[16];
      const std::size_t count = core_.gather(conn, pieces, 16);
      std::size_t taken = 0;
      for (std::size_t i = 0; i < count && out.size() < limit; ++i) {
        const std::size_t step = std::min<std::size_t>(pieces[i].iov_len, limit - out.size());
        out.append(static_cast<const char*>(pieces[i].iov_base), step);
        taken += step;
      }
      if (taken == 0) break;
      core_.sent(now, conn, taken);
    }
    return nb::bytes(out.data(), out.size());
  }

  const std::shared_ptr<ReleaseQueue>& release_queue() const { return release_queue_; }

  // What the commands lead to is routed at once.
  void let_workers_work() {
    workers_.work_somewhere(core_);
    core_.route(now_);
  }
  template <typename Command>
  void stand_still(Command command) {
    workers_.stand_still(core_, now_, command);
  }

  Ns now_ = 0;
  SimulatedWorkers workers_;
  Core core_;
  std::unordered_map<std::uint64_t, std::vector<Array>> kept_;

  // Bytes that arrived while the connection was held are offered again as soon as it may be read.
  void retry_unread() {
    bool again = true;
    while (again) {
      again = false;
      for (auto& [conn, bytes] : unread_) {
        if (bytes.empty() || core_.receive_space(conn).empty()) continue;
        const Bytes waiting = std::exchange(bytes, {});
        receive(now_, conn, to_python(waiting));
        again = true;
        break;
      }
    }
  }
  void forget(ConnId conn) { unread_.erase(conn); }

 private:
  const std::shared_ptr<ReleaseQueue> release_queue_ = std::make_shared<ReleaseQueue>();
  std::unordered_map<ConnId, Bytes> unread_;
};

template <typename PyCore>
void bind_simulated_core(nb::class_<PyCore>& cls) {
  bind_commands(cls, [](PyCore& self, auto command) {
    self.stand_still([&] { command(self.core_, self.now_); });
    self.retry_unread();
  });
  cls.def(
      "set_first_sequence", [](PyCore& self, std::uint32_t first) { self.core_.ops().set_first_sequence(first); },
      "first"_a);
  cls.def("set_now", [](PyCore& self, Ns now) { self.now_ = now; }, "now"_a);
  cls.def(
      "open",
      [](PyCore& self, const std::string& remote, bool accepted) {
        const ConnId conn = self.core_.open(remote, accepted);
        if (!accepted) self.core_.opened(conn);
        return conn;
      },
      "remote"_a, "accepted"_a);
  cls.def("receive", &PyCore::receive, "now"_a, "conn"_a, "data"_a);
  cls.def("transmit", &PyCore::transmit, "now"_a, "conn"_a, "limit"_a);
  cls.def("readable", [](PyCore& self, ConnId conn) { return !self.core_.receive_space(conn).empty(); }, "conn"_a);
  cls.def(
      "lost",
      [](PyCore& self, Ns now, ConnId conn, const std::string& reason) {
        self.now_ = now;
        self.stand_still([&] { self.core_.lost(now, conn, reason); });
        self.forget(conn);
      },
      "now"_a, "conn"_a, "reason"_a);
  cls.def(
      "tick",
      [](PyCore& self, Ns now) {
        self.now_ = now;
        if (self.core_.is_tick_wide(now)) {
          self.stand_still([&] { self.core_.tick(now); });
        } else {
          self.core_.tick(now);
          self.core_.route(now);
        }
      },
      "now"_a);
  cls.def(
      "acknowledged",
      [](PyCore& self, Ns now, ConnId conn, std::uint64_t left, Ns rtt) {
        self.core_.acknowledged(now, conn, left, rtt);
      },
      "now"_a, "conn"_a, "unacknowledged"_a, "rtt"_a = 0);
  cls.def("next_deadline", [](PyCore& self) { return self.core_.next_deadline(); });
  cls.def("next_event", [](PyCore& self) {
    std::optional<Event> event = self.core_.next_event();
    self.release_queue()->release_queued();
    return event;
  });
  cls.def("conns_to_flush", [](PyCore& self) { return self.core_.take_dirty(); });
  cls.def("conns_to_close", [](PyCore& self) { return self.core_.take_closing(); });
  cls.def(
      "submit",
      [](PyCore& self, const OpRequest& request) {
        Call call = make_call(request);
        const std::uint64_t op = self.core_.submit(self.now_, std::move(call.spec));
        self.core_.route(self.now_);
        self.kept_.emplace(op, std::move(call.arrays));
        return op;
      },
      "request"_a);
  cls.def(
      "poll",
      [](PyCore& self, std::uint64_t op) -> std::optional<OpResult> {
        const OpPtr found = self.core_.find(op);
        if (found == nullptr) throw nb::key_error("no such op");
        if (found->state != OpState::finished) return std::nullopt;
        return found->result;
      },
      "op"_a);
  cls.def("set_step", [](PyCore& self, std::uint64_t step) { self.core_.ops().names().set_step(step); }, "step"_a);
  cls.def("tags_in_flight", [](PyCore& self) { return self.core_.ops().tags_in_flight(); });
  cls.def(
      "cancel",
      [](PyCore& self, std::uint64_t op) {
        bool is_over = false;
        self.stand_still([&] { is_over = self.core_.ops().cancel(op); });
        return is_over;
      },
      "op"_a);
  cls.def(
      "release",
      [](PyCore& self, std::uint64_t op) {
        self.core_.ops().release(op);
        self.kept_.erase(op);
      },
      "op"_a);
}

}  // namespace ringfold
