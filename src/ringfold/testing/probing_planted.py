"""Bugs on purpose in the round machines: the simulation of rounds must find every one of them."""

from dataclasses import dataclass
from itertools import count, islice

from ringfold.probe.rounds.events import MS, Commanded, NodeCame, NodeEffect
from ringfold.probe.rounds.gather import Newest, OpenRound
from ringfold.probe.rounds.master import RoundMaster
from ringfold.probe.rounds.metrics import Received
from ringfold.probe.rounds.node import RoundNode
from ringfold.testing.probing import ProbingSetup, draw_rounds, run_rounds
from ringfold.testing.scheduler import SimulationFailure
from ringfold.wire.probing import EdgeFit, NodeId, ProbeGraph, ProbeHalt, RoundId, RoundStart


@dataclass(frozen=True, slots=True)
class RoundBug:
    """What is wrong, and the machines that do it wrong."""

    text: str
    setup: ProbingSetup


# Nodes


class AcceptsLowerIds(RoundNode):
    def _is_higher(self, round: RoundId, step: int) -> bool:
        return (round, step) != self._position


class NeverGoesOnAlone(RoundNode):
    def _go_on_alone(self, now_ns: int) -> list[NodeEffect]:
        self._deadline_ns = None
        return []


class WakesFromAHalt(RoundNode):
    def _halt(self, now_ns: int, halt: ProbeHalt) -> list[NodeEffect]:
        deadline_ns = self._deadline_ns
        effects = super()._halt(now_ns, halt)
        self._deadline_ns = deadline_ns
        return effects


class CountsWindowsPerRound(RoundNode):
    def _start(self, now_ns: int, start: RoundStart) -> list[NodeEffect]:
        if start.round.fence > self._position[0].fence:
            self._next_window = 1
        return super()._start(now_ns, start)


class RemembersOldGraphs(RoundNode):
    """A graph's number is compared with that of another master's graph."""

    _highest_graph = 0

    def _is_newer(self, graph: ProbeGraph) -> bool:
        is_newer = graph.number > self._highest_graph
        self._highest_graph = max(self._highest_graph, graph.number)
        return is_newer


# The master


class WaitsForListeners(RoundMaster):
    def _waiting_for(self, round: OpenRound) -> list[NodeId]:
        listeners = {node for node, member in self._members.items() if member.listen_only}
        return sorted(set(super()._waiting_for(round)) | (listeners - round.received.keys()))

    def _is_complete(self, now_ns: int, round: OpenRound) -> bool:
        return super()._is_complete(now_ns, round) and not self._waiting_for(round)


class ForgetsTheDeadline(RoundMaster):
    def _end(self, now_ns: int, round: OpenRound) -> None:
        super()._end(now_ns, round)
        round.deadline_ns += 3_600_000 * MS


class RestartsAtOne(RoundMaster):
    def _learn(self, seen: RoundId, node: NodeId) -> None:
        return


class CountsLateReports(RoundMaster):
    def _counts(self, round: OpenRound, node: NodeId, received: Received) -> bool:
        is_first = node in round.participants and node not in round.received
        return round.is_gathering and is_first


class ForgetsWhoIsMissing(RoundMaster):
    def _take(self, now_ns: int, round: OpenRound) -> tuple[dict[NodeId, Received], list[EdgeFit], dict[NodeId, str]]:
        received, fits, _ = super()._take(now_ns, round)
        return received, fits, {}


class KeepsTheGraph(RoundMaster):
    def _came(self, now_ns: int, event: NodeCame) -> None:
        was_dirty = self._is_dirty
        super()._came(now_ns, event)
        self._is_dirty = was_dirty


class HandsDownClocks(RoundMaster):
    def _gone(self, now_ns: int, node: NodeId, reason: str) -> None:
        super()._gone(now_ns, node, reason)
        if self._round is not None:
            self._round.present.add(node)


class ForgetsTheAsker(RoundMaster):
    def _command(self, now_ns: int, event: Commanded) -> None:
        if event.action == "stop":
            self._asks.take()
        super()._command(now_ns, event)


class _EqualIds(Newest):
    def is_fresh(self, now_ns: int, node: NodeId) -> bool:
        newest = max((one.report.window for one in self.reports.values()), default=0)
        return super().is_fresh(now_ns, node) and self.reports[node].report.window == newest


class CombinesByEqualIds(RoundMaster):
    """`time`: only windows with the same number are combined."""

    def __init__(self, *arguments: object, **named: object) -> None:
        super().__init__(*arguments, **named)  # type: ignore[arg-type]
        self._newest = _EqualIds()


class _Ageless(Newest):
    def is_young(self, now_ns: int, round: RoundId) -> bool:
        return True


class CombinesOldWindows(RoundMaster):
    """`time`: a report counts however old it is."""

    def __init__(self, *arguments: object, **named: object) -> None:
        super().__init__(*arguments, **named)  # type: ignore[arg-type]
        self._newest = _Ageless()


ROUND_BUGS: dict[str, RoundBug] = {
    "lower_id": RoundBug("a node accepts a lower id", ProbingSetup(node=AcceptsLowerIds)),
    "never_alone": RoundBug(
        "a node never goes on alone", ProbingSetup(node=NeverGoesOnAlone, kinds=("master", "gloo"))
    ),
    "wakes_from_halt": RoundBug(
        "a halted node starts again by itself", ProbingSetup(node=WakesFromAHalt, kinds=("master", "time"))
    ),
    "windows_restart": RoundBug("a node counts its windows anew", ProbingSetup(node=CountsWindowsPerRound)),
    "old_graph_number": RoundBug(
        "a node compares graphs of two masters", ProbingSetup(node=RemembersOldGraphs, kinds=("master",))
    ),
    "waits_for_listeners": RoundBug(
        "the master waits for listeners", ProbingSetup(WaitsForListeners, kinds=("master",))
    ),
    "no_deadline": RoundBug(
        "the master forgets the deadline", ProbingSetup(ForgetsTheDeadline, kinds=("master", "time"))
    ),
    "restarts_at_one": RoundBug("a new master counts from 1 again", ProbingSetup(RestartsAtOne)),
    "late_report": RoundBug(
        "a late report counts for the next round", ProbingSetup(CountsLateReports, kinds=("master",))
    ),
    "unnamed": RoundBug("nobody is named as missing", ProbingSetup(ForgetsWhoIsMissing, kinds=("master", "time"))),
    "old_graph": RoundBug("no new graph for a newcomer", ProbingSetup(KeepsTheGraph, kinds=("master", "time"))),
    "former_clock": RoundBug(
        "a node gets the clock of its former life", ProbingSetup(HandsDownClocks, kinds=("master", "time"))
    ),
    "asker": RoundBug("stop forgets who waits for a round", ProbingSetup(ForgetsTheAsker, kinds=("master", "time"))),
    "equal_ids": RoundBug("windows are combined by equal ids", ProbingSetup(CombinesByEqualIds, kinds=("time",))),
    "old_windows": RoundBug("old windows are combined as new", ProbingSetup(CombinesOldWindows, kinds=("time",))),
}


def find_in_rounds(name: str, first: int, most: int) -> SimulationFailure | None:
    """The first failure that a planted bug leads to; None if it stays hidden.

    Tried are `most` seeds from `first` on, of those whose kind of round has to do with it.
    """
    bug = ROUND_BUGS[name]
    seeds = (seed for seed in count(first) if draw_rounds(seed).settings.kind in bug.setup.kinds)
    for seed in islice(seeds, most):
        try:
            run_rounds(seed, bug.setup)
        except SimulationFailure as failure:
            return failure
    return None
