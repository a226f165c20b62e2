// The only file that knows Python. Commands convert, release the GIL, and call the engine or the core.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <unordered_map>
#include <unordered_set>

#include "ringfold/core.hpp"
#include "ringfold/engine.hpp"
#include "ringfold/kernels.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace ringfold {
namespace {

using Array = nb::ndarray<nb::device::cpu, nb::c_contig>;
using RawVerdict = std::tuple<std::uint64_t, std::uint32_t, bool, std::uint64_t, std::optional<std::vector<nb::bytes>>,
                              int, nb::bytes>;

constexpr Ns millisecond = 1'000'000;
constexpr Ns signal_check_every = 100 * millisecond;
constexpr int patience_after_interrupt = 50;  // in signal checks: how long a Done op may still be decided

Bytes from_python(const nb::bytes& bytes) {
  const auto* at = reinterpret_cast<const std::byte*>(bytes.c_str());
  return {at, at + bytes.size()};
}

nb::bytes to_python(const Bytes& bytes) { return nb::bytes(reinterpret_cast<const char*>(bytes.data()), bytes.size()); }

nb::object to_python(const std::optional<Payloads>& payloads) {
  if (!payloads) return nb::none();
  nb::list out;
  for (const Bytes& payload : *payloads) out.append(to_python(payload));
  return out;
}

nb::tuple to_python(const Event& event) {
  switch (event.kind) {
    case Event::Kind::opened:
      return nb::make_tuple("opened", event.conn);
    case Event::Kind::accepted:
      return nb::make_tuple("accepted", event.conn, event.text);
    case Event::Kind::message:
      return nb::make_tuple("message", event.conn, to_python(event.body));
    case Event::Kind::closed:
      return nb::make_tuple("closed", event.conn, event.text);
    case Event::Kind::link_lost:
      return nb::make_tuple("link_lost", event.peer, event.outgoing, event.text);
    case Event::Kind::mismatch:
      return nb::make_tuple("mismatch", event.peer, event.tag, event.sequence, to_python(event.body),
                            to_python(event.other));
    case Event::Kind::op_timeout:
      return nb::make_tuple("op_timeout", event.tag, event.sequence, event.milliseconds);
    case Event::Kind::op_cancelled:
      return nb::make_tuple("op_cancelled", event.tag, event.sequence);
    case Event::Kind::silent:
      return nb::make_tuple("silent", event.conn, event.milliseconds);
    case Event::Kind::wake:
      break;
  }
  return nb::make_tuple("wake");
}

nb::tuple to_python(const OpResult& result) {
  return nb::make_tuple(static_cast<int>(result.status), to_python(result.reason), result.epoch, result.contributors,
                        result.registrations, result.sent_bytes, result.received_bytes);
}

nb::list to_python(const std::vector<SealedOp>& ops) {
  nb::list out;
  for (const SealedOp& op : ops) {
    out.append(nb::make_tuple(op.tag, op.sequence, op.state, op.registrations, to_python(op.payloads)));
  }
  return out;
}

nb::dict to_python(const Stats& stats) {
  nb::dict out;
  out["committed"] = stats.committed;
  out["aborted"] = stats.aborted;
  out["restarted"] = stats.restarted;
  out["sent_bytes"] = stats.sent_bytes;
  out["received_bytes"] = stats.received_bytes;
  out["duplicates"] = stats.duplicates;
  out["drained"] = stats.drained;
  return out;
}

std::vector<Verdict> from_python(const std::vector<RawVerdict>& raw) {
  std::vector<Verdict> out;
  for (const auto& [tag, sequence, commit, registrations, payloads, final, reason] : raw) {
    Verdict verdict{tag, sequence, commit, registrations, std::nullopt, final, from_python(reason)};
    if (payloads) {
      verdict.payloads.emplace();
      for (const nb::bytes& payload : *payloads) verdict.payloads->push_back(from_python(payload));
    }
    out.push_back(std::move(verdict));
  }
  return out;
}

// What Python hands over for one op. The arrays stay alive as long as this does.
struct Call {
  OpSpec spec;
  std::vector<Array> arrays;
};

Call make_call(int kind, int reduce_op, std::uint64_t tag, int root, const std::vector<Array>& source,
               const std::optional<std::vector<Array>>& target, const std::vector<int>& dtypes, bool retry,
               Ns timeout) {
  if (kind < 0 || kind > 4 || reduce_op < 0 || reduce_op > 4) throw nb::value_error("unknown kind or reduce op");
  if (dtypes.size() != source.size()) throw nb::value_error("one dtype per array");
  Call call;
  call.spec.kind = static_cast<OpKind>(kind);
  call.spec.reduce_op = static_cast<kernels::ReduceOp>(reduce_op);
  call.spec.tag = tag;
  call.spec.root = static_cast<std::uint16_t>(root);
  call.spec.retry = retry;
  call.spec.timeout = timeout;
  call.spec.in_place = !target.has_value();
  const bool gathers = call.spec.kind == OpKind::all_gather || call.spec.kind == OpKind::reduce_scatter;
  if (gathers && (!target || target->size() != 1 || source.size() != 1)) {
    throw nb::value_error("all_gather and reduce_scatter take one array and one target");
  }
  if (target && !gathers && target->size() != source.size()) throw nb::value_error("one target per array");
  for (std::size_t i = 0; i < source.size(); ++i) {
    if (dtypes[i] < 0 || dtypes[i] > 11) throw nb::value_error("unknown dtype");
    Span span;
    span.dtype = static_cast<kernels::DType>(dtypes[i]);
    span.bytes = source[i].nbytes();
    span.source = static_cast<std::byte*>(const_cast<void*>(static_cast<const void*>(source[i].data())));
    span.target = span.source;
    if (span.bytes % kernels::item_bytes(span.dtype) != 0) throw nb::value_error("an array with a broken item");
    if (target && !gathers) {
      if ((*target)[i].nbytes() != span.bytes) throw nb::value_error("a target of another size");
      span.target = static_cast<std::byte*>((*target)[i].data());
    }
    call.spec.spans.push_back(span);
  }
  if (gathers) call.spec.gathered = static_cast<std::byte*>(target->front().data());
  call.arrays = source;
  if (target) call.arrays.insert(call.arrays.end(), target->begin(), target->end());
  return call;
}

EpochSpec epoch_spec(std::uint32_t epoch, std::uint32_t rank, std::uint32_t size, std::vector<PeerId> members,
                     bool by_master, std::size_t small_bytes, std::size_t segment_bytes) {
  if (members.size() != size || rank >= size) throw nb::value_error("rank, size and members do not agree");
  return {epoch, rank, size, std::move(members), by_master, small_bytes, segment_bytes};
}

class PyEngine {
 public:
  PyEngine(int spin_us, int same_host_buffer) : engine_(EngineSettings{Ns{spin_us} * 1000, same_host_buffer}) {}

  Engine& engine() { return engine_; }

  std::uint64_t submit(Call call) {
    sweep();
    std::uint64_t op = 0;
    {
      nb::gil_scoped_release free;
      op = engine_.submit(std::move(call.spec));
    }
    kept_.emplace(op, std::move(call.arrays));
    return op;
  }

  nb::tuple collective(Call call) {
    std::uint64_t op = 0;
    bool finished = false;
    {
      nb::gil_scoped_release free;
      op = engine_.submit_to_drive(std::move(call.spec));
      finished = engine_.run(op, signal_check_every);
    }
    return finished ? take(op) : run_on(op);
  }

  nb::tuple run_op(std::uint64_t op) { return run_on(op); }

  bool wait_op(std::uint64_t op, double timeout_s) {
    nb::gil_scoped_release free;
    return engine_.wait(op, static_cast<Ns>(timeout_s * 1e9));
  }

  nb::object poll(std::uint64_t op) {
    OpPtr found;
    bool finished = false;
    {
      nb::gil_scoped_release free;
      engine_.with_core([&](Core& core, Ns) {
        found = core.find(op);
        finished = found != nullptr && found->state == OpState::finished;
      });
    }
    if (found == nullptr) throw nb::key_error("no such op");
    if (!finished) return nb::none();
    kept_.erase(op);
    return to_python(found->result);
  }

  bool cancel(std::uint64_t op) {
    nb::gil_scoped_release free;
    return engine_.with_core([&](Core& core, Ns) { return core.cancel(op); });
  }

  // Forgets an op. One in flight keeps its memory until it has ended.
  void release(std::uint64_t op) {
    abandoned_.insert(op);
    sweep();
  }

 private:
  nb::tuple run_on(std::uint64_t op) {
    int interrupts = 0;
    while (true) {
      bool finished = false;
      {
        nb::gil_scoped_release free;
        finished = engine_.run(op, signal_check_every);
      }
      if (finished && interrupts == 0) return take(op);
      if (interrupts == 0 && PyErr_CheckSignals() == 0) continue;
      // Ctrl-C. An op whose Done has left may be committed elsewhere: its fate is waited for, but not for ever.
      ++interrupts;
      if (finished || cancel(op) || interrupts > patience_after_interrupt) {
        release(op);
        throw nb::python_error();
      }
    }
  }

  nb::tuple take(std::uint64_t op) {
    OpPtr found;
    {
      nb::gil_scoped_release free;
      engine_.locked([&](Core& core) {
        found = core.find(op);
        core.release(op);
      });
    }
    kept_.erase(op);
    if (found == nullptr) throw nb::key_error("no such op");
    return to_python(found->result);
  }

  void sweep() {
    if (abandoned_.empty()) return;
    std::vector<std::uint64_t> ended;
    {
      nb::gil_scoped_release free;
      engine_.locked([&](Core& core) {
        for (const std::uint64_t op : abandoned_) {
          const OpPtr found = core.find(op);
          if (found != nullptr && found->state != OpState::finished) continue;
          core.release(op);
          ended.push_back(op);
        }
      });
    }
    for (const std::uint64_t op : ended) {
      abandoned_.erase(op);
      kept_.erase(op);
    }
  }

  Engine engine_;
  std::unordered_map<std::uint64_t, std::vector<Array>> kept_;
  std::unordered_set<std::uint64_t> abandoned_;
};

// The core for the simulation: the same commands, with virtual connections and a virtual clock.
class PyCore {
 public:
  explicit PyCore(const std::string& planted) : core_(plant(planted)) {}

  static Planted plant(const std::string& name) {
    Planted planted;
    if (name == "commit_missing_done") planted.commit_missing_done = true;
    else if (name == "no_restore") planted.no_restore = true;
    else if (name == "accept_old_epoch") planted.accept_old_epoch = true;
    else if (name == "apply_duplicate") planted.apply_duplicate = true;
    else if (name == "done_after_seal") planted.done_after_seal = true;
    else if (!name.empty()) throw nb::value_error("no such planted bug");
    return planted;
  }

  void receive(Ns now, ConnId conn, const nb::bytes& bytes) {
    now_ = now;
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
  }

  nb::bytes transmit(Ns now, ConnId conn, std::size_t limit) {
    now_ = now;
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

  Ns now_ = 0;
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
  std::unordered_map<ConnId, Bytes> unread_;
};

template <typename Class, typename With>
void bind_commands(nb::class_<Class>& cls, With with) {
  cls.def(
      "send", [with](Class& self, ConnId conn, const nb::bytes& body) {
        const char* at = body.c_str();
        const std::size_t bytes = body.size();
        with(self, [&](Core& core, Ns) { core.send(conn, at, bytes); });
      },
      "conn"_a, "body"_a, "Queue a message.");
  cls.def(
      "resume", [with](Class& self, ConnId conn) { with(self, [&](Core& core, Ns now) { core.resume(now, conn); }); },
      "conn"_a, "Deliver the next message of a connection in its handshake.");
  cls.def(
      "make_control",
      [with](Class& self, ConnId conn, int heartbeat_ms, int dead_after_ms) {
        with(self, [&](Core& core, Ns now) {
          core.make_control(now, conn, heartbeat_ms * millisecond, dead_after_ms * millisecond);
        });
      },
      "conn"_a, "heartbeat_ms"_a, "dead_after_ms"_a, "The connection is the control connection: heartbeats flow.");
  cls.def(
      "promote",
      [with](Class& self, ConnId conn, bool outgoing, PeerId peer, std::uint32_t lane) {
        with(self, [&](Core& core, Ns now) { core.promote(now, conn, outgoing, peer, lane); });
      },
      "conn"_a, "outgoing"_a, "peer"_a, "lane"_a, "The connection is a lane.");
  cls.def(
      "close", [with](Class& self, ConnId conn, const std::string&) {
        with(self, [&](Core& core, Ns) { core.close(conn); });
      },
      "conn"_a, "reason"_a = "", "Send what is queued, then close.");
  cls.def(
      "lanes",
      [with](Class& self) {
        std::vector<LaneInfo> found;
        with(self, [&](Core& core, Ns) { found = core.lanes(); });
        std::vector<std::tuple<ConnId, bool, PeerId, std::uint32_t>> out;
        for (const LaneInfo& lane : found) out.emplace_back(lane.conn, lane.outgoing, lane.peer, lane.lane);
        return out;
      },
      "All lanes: (conn, outgoing, peer, lane).");
  cls.def(
      "set_registrations",
      [with](Class& self, std::uint64_t count) { with(self, [&](Core& core, Ns) { core.set_registrations(count); }); },
      "count"_a, "What every later Done repeats.");
  cls.def(
      "seal",
      [with](Class& self, std::uint32_t epoch) {
        std::vector<SealedOp> ops;
        with(self, [&](Core& core, Ns) { ops = core.seal(epoch); });
        return to_python(ops);
      },
      "epoch"_a, "Send no more Done, accept no more evidence; where every op stands.");
  cls.def(
      "settle",
      [with](Class& self, std::uint32_t epoch, const std::vector<RawVerdict>& verdicts, const nb::bytes& reason) {
        const std::vector<Verdict> decided = from_python(verdicts);
        const Bytes otherwise = from_python(reason);
        with(self, [&](Core& core, Ns now) { core.settle(now, epoch, decided, otherwise); });
      },
      "epoch"_a, "verdicts"_a, "default_reason"_a, "Decide every op of the sealed epoch.");
  cls.def(
      "install",
      [with](Class& self, std::uint32_t epoch, std::uint32_t rank, std::uint32_t size, std::vector<PeerId> members,
             bool evidence_by_master, std::size_t small_bytes, std::size_t segment_bytes, std::uint64_t) {
        EpochSpec spec =
            epoch_spec(epoch, rank, size, std::move(members), evidence_by_master, small_bytes, segment_bytes);
        with(self, [&](Core& core, Ns now) { core.install(now, std::move(spec)); });
      },
      "epoch"_a, "rank"_a, "size"_a, "members"_a, "evidence_by_master"_a, "small_bytes"_a, "segment_bytes"_a,
      "base_registrations"_a = 0, "Begin an epoch: mark the lanes, start the waiting ops.");
  cls.def(
      "progress",
      [with](Class& self) {
        std::vector<std::pair<std::uint64_t, std::uint32_t>> out;
        with(self, [&](Core& core, Ns) { out = core.progress(); });
        return out;
      },
      "Committed ops per tag in the installed epoch.");
  cls.def(
      "fail_all",
      [with](Class& self, int status, const nb::bytes& reason) {
        Bytes why = from_python(reason);
        with(self, [&](Core& core, Ns) { core.fail_all(static_cast<OpStatus>(status), std::move(why)); });
      },
      "status"_a, "reason"_a, "Every op fails, now and later.");
  cls.def(
      "stats",
      [with](Class& self) {
        Stats stats;
        with(self, [&](Core& core, Ns) { stats = core.stats(); });
        return to_python(stats);
      },
      "Counters since the start.");
}


void bind_engine(nb::module_& m) {
  nb::class_<PyEngine> cls(m, "Engine", "Sockets, lanes and ops of one peer, with a thread of its own.");
  cls.def(nb::init<int, int>(), "spin_us"_a = 100, "same_host_buffer"_a = 1 << 20);
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
      [](PyEngine& self, const std::string& host, std::uint16_t port, int timeout_ms) {
        nb::gil_scoped_release free;
        return self.engine().dial(host, port, timeout_ms * millisecond);
      },
      "host"_a, "port"_a, "timeout_ms"_a, "Begin to connect to a literal address.");
  cls.def(
      "next_event",
      [](PyEngine& self, double timeout_s) -> nb::object {
        std::optional<Event> event;
        {
          nb::gil_scoped_release free;
          event = self.engine().next_event(static_cast<Ns>(timeout_s * 1e9));
        }
        return event ? nb::object(to_python(*event)) : nb::none();
      },
      "timeout_s"_a, "Block without the GIL until something happened or the time is over.");
  cls.def("wake", [](PyEngine& self) {
    nb::gil_scoped_release free;
    self.engine().with_core([](Core& core, Ns) { core.push_event({}); });
  });
  const auto submit = [](PyEngine& self, int kind, int reduce_op, std::uint64_t tag, int root,
                       const std::vector<Array>& source, const std::optional<std::vector<Array>>& target,
                       const std::vector<int>& dtypes, bool retry, Ns timeout_ns) {
    return self.submit(make_call(kind, reduce_op, tag, root, source, target, dtypes, retry, timeout_ns));
  };
  cls.def("submit", submit, "kind"_a, "reduce_op"_a, "tag"_a, "root"_a, "source"_a, "target"_a.none(), "dtypes"_a,
          "retry"_a, "timeout_ns"_a, "Begin an op that the engine's own thread drives; its id.");
  cls.def(
      "collective",
      [](PyEngine& self, int kind, int reduce_op, std::uint64_t tag, int root, const std::vector<Array>& source,
         const std::optional<std::vector<Array>>& target, const std::vector<int>& dtypes, bool retry, Ns timeout_ns) {
        return self.collective(make_call(kind, reduce_op, tag, root, source, target, dtypes, retry, timeout_ns));
      },
      "kind"_a, "reduce_op"_a, "tag"_a, "root"_a, "source"_a, "target"_a.none(), "dtypes"_a, "retry"_a, "timeout_ns"_a,
      "Begin an op, drive it from this thread to its end, and return its result.");
  cls.def(
      "all_reduce",
      [](PyEngine& self, const Array& array, int dtype, int reduce_op, std::uint64_t tag, bool retry, Ns timeout_ns) {
        return self.collective(make_call(0, reduce_op, tag, 0, {array}, std::nullopt, {dtype}, retry, timeout_ns));
      },
      "array"_a.noconvert(), "dtype"_a, "reduce_op"_a, "tag"_a, "retry"_a, "timeout_ns"_a,
      "The short way for one array in place.");
  cls.def(
      "tags_in_flight",
      [](PyEngine& self) {
        nb::gil_scoped_release free;
        return self.engine().locked([](Core& core) { return core.tags_in_flight(); });
      },
      "The tags of all ops that have not ended.");
  cls.def("run_op", &PyEngine::run_op, "op"_a, "Drive from this thread until the op ended; its result, once.");
  cls.def("wait_op", &PyEngine::wait_op, "op"_a, "timeout_s"_a, "Block without the GIL until the op ended.");
  cls.def("poll", &PyEngine::poll, "op"_a, "The op's result, or None while it is in flight.");
  cls.def("cancel", &PyEngine::cancel, "op"_a, "Give an op up; False when it may be committed elsewhere already.");
  cls.def("release", &PyEngine::release, "op"_a, "Forget an op, at the latest when it has ended.");
  cls.def("shutdown", [](PyEngine& self) {
    nb::gil_scoped_release free;
    self.engine().shutdown();
  });
  cls.def("before_fork", [](PyEngine& self) { self.engine().before_fork(); });
  cls.def("forked_parent", [](PyEngine& self) { self.engine().forked_parent(); });
  cls.def("forked_child", [](PyEngine& self) { self.engine().forked_child(); });
}

void bind_core(nb::module_& m) {
  nb::class_<PyCore> cls(m, "Core", "The engine without I/O, for the simulation.");
  cls.def(nb::init<const std::string&>(), "planted"_a = "");
  bind_commands(cls, [](PyCore& self, auto command) {
    command(self.core_, self.now_);
    self.retry_unread();
  });
  cls.def("set_now", [](PyCore& self, Ns now) { self.now_ = now; }, "now"_a);
  cls.def(
      "open", [](PyCore& self, const std::string& remote, bool accepted) {
        const ConnId conn = self.core_.open(remote, accepted);
        if (!accepted) self.core_.opened(conn);
        return conn;
      },
      "remote"_a, "accepted"_a);
  cls.def("receive", &PyCore::receive, "now"_a, "conn"_a, "data"_a);
  cls.def("transmit", &PyCore::transmit, "now"_a, "conn"_a, "limit"_a);
  cls.def(
      "readable", [](PyCore& self, ConnId conn) { return !self.core_.receive_space(conn).empty(); }, "conn"_a);
  cls.def(
      "lost",
      [](PyCore& self, Ns now, ConnId conn, const std::string& reason) {
        self.now_ = now;
        self.core_.lost(now, conn, reason);
        self.forget(conn);
      },
      "now"_a, "conn"_a, "reason"_a);
  cls.def("tick", [](PyCore& self, Ns now) {
    self.now_ = now;
    self.core_.tick(now);
  }, "now"_a);
  cls.def("acknowledged", [](PyCore& self, Ns now, ConnId conn, std::uint64_t left) {
    self.core_.acknowledged(now, conn, left);
  }, "now"_a, "conn"_a, "unacknowledged"_a);
  cls.def("next_deadline", [](PyCore& self) { return self.core_.next_deadline(); });
  cls.def("next_event", [](PyCore& self) -> nb::object {
    const auto event = self.core_.next_event();
    return event ? nb::object(to_python(*event)) : nb::none();
  });
  cls.def("conns_with_output", [](PyCore& self) { return self.core_.conns_with_output(); });
  cls.def("conns_to_close", [](PyCore& self) { return self.core_.take_closing(); });
  cls.def(
      "submit",
      [](PyCore& self, int kind, int reduce_op, std::uint64_t tag, int root, const std::vector<Array>& source,
         const std::optional<std::vector<Array>>& target, const std::vector<int>& dtypes, bool retry, Ns timeout_ns) {
        Call call = make_call(kind, reduce_op, tag, root, source, target, dtypes, retry, timeout_ns);
        const std::uint64_t op = self.core_.submit(self.now_, std::move(call.spec));
        self.kept_.emplace(op, std::move(call.arrays));
        return op;
      },
      "kind"_a, "reduce_op"_a, "tag"_a, "root"_a, "source"_a, "target"_a.none(), "dtypes"_a, "retry"_a,
      "timeout_ns"_a);
  cls.def("poll", [](PyCore& self, std::uint64_t op) -> nb::object {
    const OpPtr found = self.core_.find(op);
    if (found == nullptr) throw nb::key_error("no such op");
    return found->state == OpState::finished ? nb::object(to_python(found->result)) : nb::none();
  }, "op"_a);
  cls.def("cancel", [](PyCore& self, std::uint64_t op) { return self.core_.cancel(op); }, "op"_a);
  cls.def("release", [](PyCore& self, std::uint64_t op) {
    self.core_.release(op);
    self.kept_.erase(op);
  }, "op"_a);
}

void bind_kernels(nb::module_& m) {
  m.def("cpu_level", &kernels::cpu_level, "Which kernels run here: avx512, avx2 or generic.");
  m.def("set_cpu_level", &kernels::set_cpu_level, "level"_a, "For tests: choose the kernels; False if the CPU cannot.");
  m.def(
      "crc32c", [](const nb::bytes& bytes, std::uint32_t seed) { return crc32c(bytes.c_str(), bytes.size(), seed); },
      "data"_a, "seed"_a = 0, "CRC-32C, chained from `seed`.");
  m.def(
      "reduce",
      [](int dtype, int op, const Array& target, const Array& a, const Array& b) {
        if (dtype < 0 || dtype > 11 || op < 0 || op > 4) throw nb::value_error("unknown dtype or op");
        if (target.nbytes() != a.nbytes() || a.nbytes() != b.nbytes()) throw nb::value_error("sizes differ");
        const auto type = static_cast<kernels::DType>(dtype);
        kernels::reduce(type, static_cast<kernels::ReduceOp>(op), target.data(), a.data(), b.data(),
                        a.nbytes() / kernels::item_bytes(type));
      },
      "dtype"_a, "reduce_op"_a, "target"_a.noconvert(), "a"_a.noconvert(), "b"_a.noconvert(),
      "target = a op b, elementwise.");
  m.def(
      "divide",
      [](int dtype, const Array& target, std::uint32_t divisor) {
        if (dtype < 0 || dtype > 11 || divisor == 0) throw nb::value_error("unknown dtype, or division by zero");
        const auto type = static_cast<kernels::DType>(dtype);
        kernels::divide(type, target.data(), divisor, target.nbytes() / kernels::item_bytes(type));
      },
      "dtype"_a, "target"_a.noconvert(), "divisor"_a, "target /= divisor, elementwise.");
}

}  // namespace
}  // namespace ringfold

NB_MODULE(_native, m) {
  m.doc() = "Ringfold's native core: kernels, the sans-I/O engine core, and the engine with sockets.";
  nb::set_leak_warnings(false);
  ringfold::bind_kernels(m);
  ringfold::bind_core(m);
  ringfold::bind_engine(m);
}
