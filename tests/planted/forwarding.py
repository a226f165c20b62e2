"""Agents that forward telemetry wrongly, on purpose: the simulation of forwarding must find them (see `planted`)."""

from functools import partial

from planted import Bug
from ringfold.agent.machine import AgentMachine
from ringfold.agent.steering import Forward, Steering
from ringfold.agent.telemetry import QueueTable, Reporter, ReportSettings, TelemetryIngest
from ringfold.testing.forwarding import make_machine, run_forwarding
from ringfold.wire.telemetry import Congestion, Gate, Packet, Refusal


class TimeOfReceipt(QueueTable):
    """Every report is as young as if it had been measured when it arrived."""

    def late_ns(self, body: Congestion) -> int:
        return 0


class Floods(Steering):
    """Does not remember what it has forwarded."""

    def _remember_forward(self, now_ns: int, sender: tuple[int, int, int], *, is_held: bool) -> None:
        pass


class DelaysBackpressure(Steering):
    """Backpressure waits for the end of the interval, too."""

    def _remember_forward(self, now_ns: int, sender: tuple[int, int, int], *, is_held: bool) -> None:
        super()._remember_forward(now_ns, sender, is_held=True)
        super()._remember_forward(now_ns, sender, is_held=not is_held)


class ForwardsPrefixes(Steering):
    """Passes a report on as it is: the receiver takes it for one about its own port, and forwards it again."""

    def _on_inbound(self, now_ns: int, report: Congestion) -> list[Forward]:
        return [Forward(each.address, report, each.age_ns) for each in super()._on_inbound(now_ns, report)]


class KeepsToItself(Steering):
    """Accepts reports about traffic to this host, and does nothing with them."""

    def _on_inbound(self, now_ns: int, report: Congestion) -> list[Forward]:
        return []


class ForgetsRestarts(Gate):
    """After the restart of a sender it knows nothing of the time before."""

    def _check_replay(self, source: tuple[int, int | None, int], packet: Packet, unix_ns: int) -> Refusal | None:
        found = super()._check_replay(source, packet, unix_ns)
        self._seen[source].floor_ns = -1
        return found


def _one_sender(unix_ns: int, sender: int, settings: ReportSettings) -> Reporter:
    return Reporter(unix_ns, 0, settings)


def _with_steering(kind: type[Steering], ingest: TelemetryIngest) -> AgentMachine:
    return make_machine(ingest, kind)


def _with_table(kind: type[QueueTable], ingest: TelemetryIngest) -> AgentMachine:
    return make_machine(TelemetryIngest(ingest.gate, kind()))


def _steering(text: str, kind: type[Steering]) -> Bug:
    return Bug(text, partial(run_forwarding, make=partial(_with_steering, kind)))


BUGS: dict[str, Bug] = {
    "time_of_receipt": Bug(
        "a forwarded report is as young as its receipt",
        partial(run_forwarding, make=partial(_with_table, TimeOfReceipt)),
    ),
    "floods": _steering("every report is forwarded, whatever was forwarded just before", Floods),
    "delays_backpressure": _steering("the beginning and the end of backpressure wait", DelaysBackpressure),
    "forwards_prefixes": _steering("a report about many pairs is forwarded as it is", ForwardsPrefixes),
    "one_sender": Bug("all agents are the same sender", partial(run_forwarding, make_reporter=_one_sender)),
    "forgets_restarts": Bug(
        "recorded packets are accepted after the restart of their sender",
        partial(run_forwarding, make_gate=ForgetsRestarts),
    ),
    "keeps_to_itself": _steering("a report about traffic to a host is not forwarded", KeepsToItself),
}
