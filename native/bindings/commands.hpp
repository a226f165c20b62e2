// The commands that the core and the engine have in common. `with(self, command)` runs `command(core, now)`.
#pragma once

#include "bulk.hpp"
#include "convert.hpp"

namespace ringfold {

template <typename Class, typename With>
void bind_commands(nb::class_<Class>& cls, With with) {
  cls.def(
      "send",
      [with](Class& self, ConnId conn, const nb::bytes& body) {
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
      [with](Class& self, const LanePromotion& lane) {
        with(self, [&](Core& core, Ns now) {
          core.promote(now, lane.conn, lane.outgoing, lane.peer, lane.lane, lane.sharing);
        });
      },
      "lane"_a, "The connection is a lane.");
  cls.def(
      "set_path_shares",
      [with](Class& self, PeerId peer, const std::vector<std::uint16_t>& shares, std::uint32_t flags) {
        if (shares.size() > max_paths) throw nb::value_error("more shares than a link can have paths");
        PathShares out;
        std::copy(shares.begin(), shares.end(), out.share.begin());
        out.flags = flags;
        with(self, [&](Core& core, Ns) { core.set_path_shares(peer, out); });
      },
      "peer"_a, "shares"_a, "flags"_a = 0,
      "Advice about the paths to a neighbour: shares out of 65535, a veto bit per path, bit 16: shares are fixed.");
  cls.def(
      "path_bytes",
      [with](Class& self, bool to_next) {
        std::array<std::uint64_t, max_paths> found{};
        with(self, [&](Core& core, Ns) { found = core.path_bytes(to_next); });
        return std::vector<std::uint64_t>(found.begin(), found.end());
      },
      "to_next"_a, "Payload assigned to each path of a link since the epoch began.");
  cls.def(
      "close",
      [with](Class& self, ConnId conn, const std::string&) { with(self, [&](Core& core, Ns) { core.close(conn); }); },
      "conn"_a, "reason"_a = "", "Send what is queued, then close.");
  cls.def(
      "lanes",
      [with](Class& self) {
        std::vector<LaneInfo> found;
        with(self, [&](Core& core, Ns) { found = core.lanes(); });
        return found;
      },
      "All lanes.");
  cls.def(
      "set_registrations",
      [with](Class& self, std::uint64_t count) {
        with(self, [&](Core& core, Ns) { core.ops().set_registrations(count); });
      },
      "count"_a, "What every later Done repeats.");
  cls.def(
      "seal",
      [with](Class& self, std::uint32_t epoch) {
        std::vector<SealedOp> ops;
        with(self, [&](Core& core, Ns) { ops = core.seal(epoch); });
        return ops;
      },
      "epoch"_a, "Send no more Done, accept no more evidence; the state of every op.");
  cls.def(
      "settle",
      [with](Class& self, std::uint32_t epoch, const std::vector<Verdict>& verdicts, const nb::bytes& reason) {
        const Bytes otherwise = from_python(reason);
        with(self, [&](Core& core, Ns now) { core.settle(now, epoch, verdicts, otherwise); });
      },
      "epoch"_a, "verdicts"_a, "default_reason"_a, "Decide every op of the sealed epoch.");
  cls.def(
      "refuse",
      [with](Class& self, std::uint64_t tag, std::uint64_t step, std::uint32_t call, const nb::bytes& reason) {
        Bytes why = from_python(reason);
        with(self, [&](Core& core, Ns) { core.ops().refuse({tag, step, call}, std::move(why)); });
      },
      "tag"_a, "step"_a, "call"_a, "reason"_a, "This call fails, also if it has not been made here yet.");
  cls.def(
      "restart_calls", [with](Class& self) { with(self, [](Core& core, Ns) { core.ops().names().restart(); }); },
      "A peer was admitted: all members count their calls from 0 again.");
  cls.def(
      "install",
      [with](Class& self, const EpochSpec& epoch) {
        with(self, [&](Core& core, Ns now) { core.install(now, epoch); });
      },
      "epoch"_a, "Begin an epoch: mark the lanes, start the waiting ops.");
  cls.def(
      "progress",
      [with](Class& self) {
        std::vector<std::pair<std::uint64_t, std::uint32_t>> out;
        with(self, [&](Core& core, Ns) { out = core.ops().progress(); });
        return out;
      },
      "Committed ops per tag in the installed epoch.");
  cls.def(
      "fail_all",
      [with](Class& self, int status, const nb::bytes& reason) {
        Bytes why = from_python(reason);
        with(self, [&](Core& core, Ns) { core.ops().fail_all(static_cast<OpStatus>(status), std::move(why)); });
      },
      "status"_a, "reason"_a, "Every op fails, now and later.");
  cls.def(
      "set_report",
      [with](Class& self, const nb::bytes& report) {
        Bytes body = from_python(report);
        with(self, [&](Core& core, Ns) { core.set_report(std::move(body)); });
      },
      "report"_a, "What the next heartbeat carries, and the first one to every new master.");
  cls.def(
      "ended_ops",
      [with](Class& self, std::uint64_t from) {
        std::vector<OpEntry> found;
        std::uint64_t next = 0;
        with(self, [&](Core& core, Ns) {
          found = core.ops().log().since(from);
          next = core.ops().log().count();
        });
        return std::make_pair(next, nb::bytes(found.data(), found.size() * sizeof(OpEntry)));
      },
      "since"_a, "The number of the next op that ends, and those from this number on that are still known, packed.");
  cls.def(
      "stats",
      [with](Class& self) {
        Stats stats;
        with(self, [&](Core& core, Ns) { stats = core.stats(); });
        return to_python(stats);
      },
      "Counters since the start.");
  bind_bulk_commands(cls, with);
}

}  // namespace ringfold
