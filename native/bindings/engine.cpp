// The engine with sockets: commands release the GIL, and calls that drive look for Ctrl-C now and then.
#include "ringfold/engine.hpp"

#include <unordered_map>
#include <unordered_set>

#include "commands.hpp"

namespace ringfold {
namespace {

constexpr Ns signal_check_every = 100 * millisecond;
constexpr int max_checks_after_interrupt = 50;  // in signal checks: how long a Done op may still be decided

class PyEngine {
 public:
  PyEngine(int spin_us, int same_host_buffer, std::string congestion)
      : engine_(EngineSettings{
            .spin = Ns{spin_us} * 1000, .same_host_buffer = same_host_buffer, .congestion = std::move(congestion)}) {}

  Engine& engine() { return engine_; }
  const std::shared_ptr<ReleaseQueue>& release_queue() const { return release_queue_; }

  std::uint64_t submit(Call call) {
    sweep();
    std::uint64_t op = 0;
    {
      nb::gil_scoped_release free;
      // The caller of an op with blocks drives it, too, but it must know its number before: to give it up.
      op = call.spec.blocks ? engine_.submit_to_drive(std::move(call.spec)) : engine_.submit(std::move(call.spec));
    }
    kept_.emplace(op, std::move(call.arrays));
    return op;
  }

  OpResult collective(Call call) {
    std::uint64_t op = 0;
    bool finished = false;
    {
      nb::gil_scoped_release free;
      op = engine_.submit_to_drive(std::move(call.spec));
      finished = engine_.run(op, signal_check_every);
    }
    if (finished) return take(op);
    kept_.emplace(op, std::move(call.arrays));  // Ctrl-C may end the call before the op
    return run_on(op);
  }

  OpResult run_op(std::uint64_t op) { return run_on(op); }

  bool wait_op(std::uint64_t op, double timeout_s) {
    nb::gil_scoped_release free;
    return engine_.run(op, static_cast<Ns>(timeout_s * 1e9));
  }

  std::optional<OpResult> poll(std::uint64_t op) {
    OpPtr found;
    bool finished = false;
    {
      nb::gil_scoped_release free;
      engine_.look_at_ops([&](OpTable& ops) {
        found = ops.find(op);
        finished = found != nullptr && found->state == OpState::finished;
      });
    }
    if (found == nullptr) throw nb::key_error("no such op");
    if (!finished) return std::nullopt;
    kept_.erase(op);
    return found->result;
  }

  bool cancel(std::uint64_t op) {
    nb::gil_scoped_release free;
    return engine_.with_core([&](Core& core, Ns) { return core.ops().cancel(op); });
  }

  // Forgets an op. One in flight keeps its memory until it has ended.
  void release(std::uint64_t op) {
    abandoned_.insert(op);
    sweep();
  }

 private:
  OpResult run_on(std::uint64_t op) {
    int interrupts = 0;
    while (true) {
      bool finished = false;
      {
        nb::gil_scoped_release free;
        finished = engine_.run(op, signal_check_every);
      }
      if (finished && interrupts == 0) return take(op);
      if (interrupts == 0 && PyErr_CheckSignals() == 0) continue;
      // Ctrl-C. An op whose Done has left may be committed elsewhere: its outcome is waited for, but not without a
      // limit.
      ++interrupts;
      if (finished || cancel(op) || interrupts > max_checks_after_interrupt) {
        release(op);
        throw nb::python_error();
      }
    }
  }

  OpResult take(std::uint64_t op) {
    OpPtr found;
    {
      nb::gil_scoped_release free;
      engine_.look_at_ops([&](OpTable& ops) {
        found = ops.find(op);
        ops.release(op);
      });
    }
    kept_.erase(op);
    if (found == nullptr) throw nb::key_error("no such op");
    return std::move(found->result);  // the core has forgotten the op
  }

  void sweep() {
    if (abandoned_.empty()) return;
    const std::vector<std::uint64_t> unwanted(abandoned_.begin(), abandoned_.end());
    std::vector<std::uint64_t> ended;
    {
      nb::gil_scoped_release free;
      engine_.look_at_ops([&](OpTable& ops) {
        for (const std::uint64_t op : unwanted) {
          const OpPtr found = ops.find(op);
          if (found != nullptr && found->state != OpState::finished) continue;
          ops.release(op);
          ended.push_back(op);
        }
      });
    }
    for (const std::uint64_t op : ended) {
      abandoned_.erase(op);
      kept_.erase(op);
    }
  }

  const std::shared_ptr<ReleaseQueue> release_queue_ = std::make_shared<ReleaseQueue>();
  // The arrays of ops in flight. Declared before the engine, so that they outlive its thread, which may write to them.
  std::unordered_map<std::uint64_t, std::vector<Array>> kept_;
  std::unordered_set<std::uint64_t> abandoned_;
  Engine engine_;
};

}  // namespace

void bind_engine(nb::module_& m) {
  nb::class_<PyEngine> cls(m, "Engine", "Sockets, lanes and ops of one peer, with a thread of its own.");
  cls.def(nb::init<int, int, std::string>(), "spin_us"_a = 300, "same_host_buffer"_a = 1 << 20,
          "congestion"_a = "auto");
  bind_commands(cls, [](PyEngine& self, auto command) {
    nb::gil_scoped_release free;
    self.engine().with_core(command);
  });
  cls.def(
      "listen",
      [](PyEngine& self, const std::string& host, std::uint16_t first_port, int tries) {
        return self.engine().listen(host, first_port, tries);
      },
      "host"_a, "first_port"_a, "tries"_a, "Bind the data port and return it.");
  cls.def(
      "dial",
      [](PyEngine& self, const std::string& host, std::uint16_t port, int timeout_ms, const std::string& source,
         const std::string& name, bool carries_little) {
        nb::gil_scoped_release free;
        return self.engine().dial(host, port, timeout_ms * millisecond, source, name, carries_little);
      },
      "host"_a, "port"_a, "timeout_ms"_a, "source"_a = "", "name"_a = "", "carries_little"_a = false,
      "Begin to connect to a literal address, from one of this host's own; a peer of this host by its name.");
  cls.def(
      "listen_here",
      [](PyEngine& self) {
        nb::gil_scoped_release free;
        return self.engine().listen_here();
      },
      "Listen for peers of this host, which can share memory; the name to dial, or empty where that is not possible.");
  cls.def(
      "start_guardian",
      [](PyEngine& self, const std::string& program, int master, const std::string& message) {
        nb::gil_scoped_release free;
        return self.engine().start_guardian(program, master, message);
      },
      "program"_a, "master"_a, "message"_a,
      "Start a process that sends the message (in hex) over the connection when this process dies; False if it cannot "
      "be started.");
  cls.def(
      "next_event",
      [](PyEngine& self, double timeout_s) {
        std::optional<Event> event;
        {
          nb::gil_scoped_release free;
          event = self.engine().next_event(static_cast<Ns>(timeout_s * 1e9));
        }
        self.release_queue()->release_queued();
        return event;
      },
      "timeout_s"_a, "Block without the GIL until something happened or the time is over.");
  cls.def("wake", [](PyEngine& self) {
    nb::gil_scoped_release free;
    self.engine().with_core([](Core& core, Ns) { core.push_event({}); });
  });
  cls.def(
      "follow_hints",
      [](PyEngine& self, PeerId peer, const std::string& file, std::uint32_t slot, std::uint32_t generation) {
        nb::gil_scoped_release free;
        self.engine().follow_hints(peer, file, slot, generation);
      },
      "peer"_a, "file"_a, "slot"_a, "generation"_a, "Where the agent's advice about the paths to a peer is.");
  cls.def(
      "forget_hints",
      [](PyEngine& self, PeerId peer) {
        nb::gil_scoped_release free;
        self.engine().forget_hints(peer);
      },
      "peer"_a, "Lanes to this peer just pull.");
  cls.def(
      "path_rates",
      [](PyEngine& self, PeerId peer) {
        nb::gil_scoped_release free;
        const auto found = self.engine().look([&](Core& core) { return core.path_rates(monotonic_now(), peer); });
        return std::vector<std::uint64_t>(found.begin(), found.end());
      },
      "peer"_a,
      "Bytes per second on each path to a peer while it was busy; 0 where none were measured in the last second.");
  cls.def(
      "path_rtts",
      [](PyEngine& self, PeerId peer) {
        nb::gil_scoped_release free;
        const auto found = self.engine().look([&](Core& core) { return core.path_rtts(monotonic_now(), peer); });
        std::vector<std::pair<std::uint64_t, std::uint64_t>> rtts;
        rtts.reserve(found.size());
        for (const Rtt& rtt : found) rtts.emplace_back(rtt.smoothed / 1'000, rtt.min / 1'000);
        return rtts;
      },
      "peer"_a,
      "The smoothed and the minimum RTT of each path to a peer in microseconds; 0 where none was measured lately.");
  cls.def(
      "submit", [](PyEngine& self, const OpRequest& request) { return self.submit(make_call(request)); }, "request"_a,
      "Begin an op that the engine's own thread drives, or run_op() if it has blocks; its id.");
  cls.def(
      "collective", [](PyEngine& self, const OpRequest& request) { return self.collective(make_call(request)); },
      "request"_a, "Begin an op, drive it from this thread to its end, and return its result.");
  cls.def(
      "all_reduce",
      [](PyEngine& self, const Array& array, int dtype, int reduce_op, std::uint64_t tag, int retry, Ns timeout_ns) {
        return self.collective(make_call({.reduce_op = reduce_op,
                                          .tag = tag,
                                          .source = {array},
                                          .target = std::nullopt,
                                          .dtypes = {dtype},
                                          .retry = retry,
                                          .timeout = timeout_ns}));
      },
      "array"_a.noconvert(), "dtype"_a, "reduce_op"_a, "tag"_a, "retry"_a, "timeout_ns"_a,
      "A collective of one array in place, with fewer arguments.");
  cls.def(
      "tags_in_flight",
      [](PyEngine& self) {
        nb::gil_scoped_release free;
        return self.engine().look_at_ops([](OpTable& ops) { return ops.tags_in_flight(); });
      },
      "The tags of all ops that have not ended.");
  cls.def(
      "set_step",
      [](PyEngine& self, std::uint64_t step) {
        nb::gil_scoped_release free;
        self.engine().look_at_ops([step](OpTable& ops) { ops.names().set_step(step); });
      },
      "step"_a, "The program begins this step (2**64 - 1: none): calls are counted from 0 again.");
  cls.def("run_op", &PyEngine::run_op, "op"_a, "Drive from this thread until the op ended; its result, once.");
  cls.def("wait_op", &PyEngine::wait_op, "op"_a, "timeout_s"_a, "Block without the GIL until the op ended.");
  cls.def("poll", &PyEngine::poll, "op"_a, "The op's result, or None while it is in flight.");
  cls.def("cancel", &PyEngine::cancel, "op"_a, "Give an op up; False when it may be committed elsewhere already.");
  cls.def("release", &PyEngine::release, "op"_a, "Forget an op, at the latest when it has ended.");
  cls.def("shutdown", [](PyEngine& self) {
    {
      nb::gil_scoped_release free;
      self.engine().shutdown();
    }
    self.release_queue()->release_queued();
  });
  cls.def("before_fork", [](PyEngine& self) {
    nb::gil_scoped_release free;  // the holder of the mutex may need the GIL to release it
    self.engine().before_fork();
  });
  cls.def("forked_parent", [](PyEngine& self) { self.engine().forked_parent(); });
  cls.def("forked_child", [](PyEngine& self) { self.engine().forked_child(); });
}

}  // namespace ringfold
