"""Bugs on purpose in the round machines: the simulation of rounds must find every one of them."""

from collections.abc import Iterable
from dataclasses import replace
from functools import partial

from planted import Bug
from ringfold.probe.rounds.effects import NodeEffect
from ringfold.probe.rounds.events import MS, CommandReceived, FromRoundMaster, NodeConnected
from ringfold.probe.rounds.gather import NewestWindows, OpenRound, TakenReports
from ringfold.probe.rounds.liveness import NodeTable
from ringfold.probe.rounds.master import RoundMaster
from ringfold.probe.rounds.metrics import ReceivedReport
from ringfold.probe.rounds.node import RoundNode
from ringfold.testing.probing import ProbingSetup, draw_rounds, run_rounds
from ringfold.wire.probing import NodeId, ProbeGraph, ProbeHalt, RoundEnd, RoundId, RoundStart


def _bug(text: str, setup: ProbingSetup) -> Bug:
    """Tried are the seeds whose kind of round has to do with it."""
    return Bug(text, partial(run_rounds, setup=setup), lambda seed: draw_rounds(seed).settings.kind in setup.kinds)


# Nodes


class AcceptsLowerIds(RoundNode):
    def _is_higher(self, round: RoundId, step: int) -> bool:
        return (round, step) != self._position


class NeverGoesOnAlone(RoundNode):
    def _continue_alone(self, now_ns: int) -> list[NodeEffect]:
        self._deadline_ns = None
        return []


class WakesFromAHalt(RoundNode):
    def _halt(self, now_ns: int, halt: ProbeHalt) -> list[NodeEffect]:
        deadline_ns = self._deadline_ns
        effects = super()._halt(now_ns, halt)
        self._deadline_ns = deadline_ns
        return effects


class CountsWindowsPerRound(RoundNode):
    def _start_round(self, now_ns: int, start: RoundStart) -> list[NodeEffect]:
        if start.round.fence > self._position[0].fence:
            self._next_window = 1
        return super()._start_round(now_ns, start)


class RemembersOldGraphs(RoundNode):
    """A graph's number is compared with that of another master's graph."""

    _highest_graph = 0

    def _is_newer(self, graph: ProbeGraph) -> bool:
        is_newer = graph.number > self._highest_graph
        self._highest_graph = max(self._highest_graph, graph.number)
        return is_newer


# The master


class WaitsForListeners(RoundMaster):
    def _pending_nodes(self, round: OpenRound) -> list[NodeId]:
        listeners = {node for node, member in self._members.items() if member.listen_only}
        return sorted(set(super()._pending_nodes(round)) | (listeners - round.received.keys()))

    def _is_complete(self, now_ns: int, round: OpenRound) -> bool:
        return super()._is_complete(now_ns, round) and not self._pending_nodes(round)


class ForgetsTheDeadline(RoundMaster):
    def _end_window(self, now_ns: int, round: OpenRound) -> None:
        super()._end_window(now_ns, round)
        round.deadline_ns += 3_600_000 * MS


class RestartsAtOne(RoundMaster):
    def _raise_highest(self, seen: RoundId, node: NodeId) -> None:
        return


class CountsLateReports(RoundMaster):
    """A late report is taken for one of the present round."""

    def _is_counted(self, round: OpenRound, node: NodeId, received: ReceivedReport) -> bool:
        is_first = node in round.participants and node not in round.received
        return self.is_gathering and is_first


class ForgetsWhoIsMissing(RoundMaster):
    def _take_reports(self, now_ns: int, round: OpenRound) -> TakenReports:
        return replace(super()._take_reports(now_ns, round), missing={})


class CountsLateReportsInOnePlace(RoundMaster):
    """A report that arrives between the end of its round and the calculation is combined; it stays named as missing."""

    def _add_late_report(self, now_ns: int, round: OpenRound, node: NodeId, received: ReceivedReport) -> None:
        gathered = self._gathered
        if gathered is not None and received.report.round == gathered.round.id:
            gathered.taken.fits.extend(received.report.edges)
        super()._add_late_report(now_ns, round, node, received)


class CountsLateReportsTwice(RoundMaster):
    """A late report counts for the next round, and for the one after it."""

    def _begin_round(self, now_ns: int) -> None:
        late = self._previous.late if self._previous is not None else {}
        super()._begin_round(now_ns)
        if self._round is not None:
            self._round.late |= {node: one for node, one in late.items() if node in self._round.participants}


class WaitsForSilentNodes(RoundMaster):
    """A node without heartbeats, or out of the graph, holds the deadline."""

    def _stop_awaiting(self, round: OpenRound) -> None:
        return


class NeverHurries(RoundMaster):
    def _hurry(self, now_ns: int, round: OpenRound) -> None:
        return


class LooksTooSeldom(RoundMaster):
    """The deadline is earlier by now, and there is no tick at it."""

    def next_deadline_ns(self) -> int | None:
        due_ns = super().next_deadline_ns()
        round = self._round
        if due_ns is None or round is None or not self.is_gathering or not round.end_sent_ns:
            return due_ns
        return max(due_ns, round.end_sent_ns + self.settings.report_timeout_ms * MS // 2)


class _Tolerant(NodeTable):
    def missed(self, node: NodeId) -> bool:
        return False


class NeverExcludes(RoundMaster):
    def __init__(self, *arguments: object, **named: object) -> None:
        super().__init__(*arguments, **named)  # type: ignore[arg-type]
        self._nodes = _Tolerant(self.settings.max_missed)


class _Unforgiving(NodeTable):
    def reported(self, node: NodeId) -> bool:
        return not self.is_excluded(node) and super().reported(node)


class NeverReadmits(RoundMaster):
    """A node that is out of the graph stays out, whatever it reports."""

    def __init__(self, *arguments: object, **named: object) -> None:
        super().__init__(*arguments, **named)  # type: ignore[arg-type]
        self._nodes = _Unforgiving(self.settings.max_missed)


class ExcludesForEver(RoundMaster):
    """Nodes that are out of the graph are not asked to report."""

    def _send(self, node: NodeId, message: FromRoundMaster) -> None:
        if not (isinstance(message, RoundEnd) and self._nodes.is_excluded(node)):
            super()._send(node, message)


class KeepsTheGraph(RoundMaster):
    def _add_node(self, now_ns: int, event: NodeConnected) -> None:
        was_dirty = self._is_graph_stale
        super()._add_node(now_ns, event)
        self._is_graph_stale = was_dirty


class IgnoresNeighbourLists(RoundMaster):
    def _given_edges(self, members: Iterable[NodeConnected]) -> list[tuple[NodeId, NodeId]]:
        nodes = sorted(member.node for member in members)
        listeners = [node for node in nodes if self._members[node].listen_only]
        return self._draw_edges(nodes, listeners, self.settings.neighbours, self.settings.seed) if nodes[1:] else []


class HandsDownClocks(RoundMaster):
    def _remove_node(self, now_ns: int, node: NodeId, reason: str) -> None:
        super()._remove_node(now_ns, node, reason)
        if self._round is not None:
            self._round.present.add(node)


class ForgetsTheAsker(RoundMaster):
    def _handle_command(self, now_ns: int, event: CommandReceived) -> None:
        if event.action == "stop":
            self._requests.take()
        super()._handle_command(now_ns, event)


class _EqualIds(NewestWindows):
    def is_fresh(self, now_ns: int, node: NodeId) -> bool:
        newest = max((one.report.window for one in self.reports.values()), default=0)
        return super().is_fresh(now_ns, node) and self.reports[node].report.window == newest


class CombinesByEqualIds(RoundMaster):
    """`time`: only windows with the same number are combined."""

    def __init__(self, *arguments: object, **named: object) -> None:
        super().__init__(*arguments, **named)  # type: ignore[arg-type]
        self._newest_windows = _EqualIds()


class _Ageless(NewestWindows):
    def is_recent(self, now_ns: int, round: RoundId) -> bool:
        return True


class CombinesOldWindows(RoundMaster):
    """`time`: a report counts however old it is."""

    def __init__(self, *arguments: object, **named: object) -> None:
        super().__init__(*arguments, **named)  # type: ignore[arg-type]
        self._newest_windows = _Ageless()


BUGS: dict[str, Bug] = {
    "lower_id": _bug("a node accepts a lower id", ProbingSetup(node=AcceptsLowerIds)),
    "never_alone": _bug("a node never goes on alone", ProbingSetup(node=NeverGoesOnAlone, kinds=("master", "gloo"))),
    "wakes_from_halt": _bug(
        "a halted node starts again by itself", ProbingSetup(node=WakesFromAHalt, kinds=("master", "time"))
    ),
    "windows_restart": _bug(
        "a node numbers its windows from the start again", ProbingSetup(node=CountsWindowsPerRound)
    ),
    "old_graph_number": _bug(
        "a node compares graphs of two masters", ProbingSetup(node=RemembersOldGraphs, kinds=("master",))
    ),
    "waits_for_listeners": _bug("the master waits for listeners", ProbingSetup(WaitsForListeners, kinds=("master",))),
    "no_deadline": _bug("the master forgets the deadline", ProbingSetup(ForgetsTheDeadline, kinds=("master", "time"))),
    "restarts_at_one": _bug("a new master counts from 1 again", ProbingSetup(RestartsAtOne)),
    "late_report": _bug(
        "a late report is taken for the present round's", ProbingSetup(CountsLateReports, kinds=("master",))
    ),
    "late_in_one_place": _bug(
        "a late report counts for its own round in one place, and not in another",
        ProbingSetup(CountsLateReportsInOnePlace, kinds=("master",)),
    ),
    "late_twice": _bug("a late report counts twice", ProbingSetup(CountsLateReportsTwice, kinds=("master",))),
    "waits_for_silent": _bug("a silent node holds the deadline", ProbingSetup(WaitsForSilentNodes, kinds=("master",))),
    "never_hurries": _bug(
        "the last node holds all others for as long as a slow round would",
        ProbingSetup(NeverHurries, kinds=("master",)),
    ),
    "looks_too_seldom": _bug(
        "the master does not look whether its deadline is earlier", ProbingSetup(LooksTooSeldom, kinds=("master",))
    ),
    "never_excluded": _bug(
        "a node that misses every round stays in the graph", ProbingSetup(NeverExcludes, kinds=("master",))
    ),
    "excluded_for_ever": _bug(
        "a node that is out of the graph is not asked to report", ProbingSetup(ExcludesForEver, kinds=("master",))
    ),
    "never_readmitted": _bug(
        "a node that is out of the graph never comes back", ProbingSetup(NeverReadmits, kinds=("master", "time"))
    ),
    "unnamed": _bug("nobody is named as missing", ProbingSetup(ForgetsWhoIsMissing, kinds=("master", "time"))),
    "old_graph": _bug("no new graph for a newcomer", ProbingSetup(KeepsTheGraph, kinds=("master", "time"))),
    "neighbour_lists": _bug("given neighbour lists are ignored", ProbingSetup(IgnoresNeighbourLists)),
    "former_clock": _bug(
        "a node gets the clock of its former life", ProbingSetup(HandsDownClocks, kinds=("master", "time"))
    ),
    "asker": _bug("stop forgets who waits for a round", ProbingSetup(ForgetsTheAsker, kinds=("master", "time"))),
    "equal_ids": _bug("windows are combined by equal ids", ProbingSetup(CombinesByEqualIds, kinds=("time",))),
    "old_windows": _bug("old windows are combined as new", ProbingSetup(CombinesOldWindows, kinds=("time",))),
}
