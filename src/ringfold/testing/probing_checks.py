"""The promises of rounds, checked against what really happened in a simulated run.

Checked at once, so that the trace ends where it went wrong:
- the newest round that a node knows of never goes back, neither its id nor its sequence; published ids only grow;
- a node's windows are numbered upwards, and none is opened while it is halted;
- a summary combines what it names: windows that this very round has ended, or (in `time`) windows that are not
  older than two of them; and a node that brought nothing new is named;
- a report that was late for its round counts for the next one at most, is named there as late, and counts once; no node
  is missing from a round that counts its report;
- every participant that is missing is named, and nobody else; listeners are not waited for;
- a round does not wait for a node that is silent or has missed too many rounds, once all others have reported; and a
  node that has missed too many rounds is not in the next graph;
- once only one node is missing, a round does not wait for it longer than half as long again as the others took, or as
  that node ever took;
- the master waits no longer than its deadline, nor does a node, nor does somebody who gave a command.
Checked at the end, when all faults are over: a round with everybody, within a bound.

The truth comes from the simulated world (true time, true clocks), and reaches the summary by a note in each fit.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ringfold.probe.rounds.effects import NodeEffect, ResumeProbing, RotateWindow
from ringfold.probe.rounds.events import MS, MasterMessageReceived, NodeEvent
from ringfold.probe.rounds.node import NEVER
from ringfold.probe.rounds.settings import RoundSettings
from ringfold.testing.checks import Violation
from ringfold.wire.probing import Cadence, NodeId, ProbeHalt, RoundId, RoundStart, RoundSummary

AGE_SLACK_NS = 1 * MS
"""Clocks that drift by 100 ppm may count a window this much too short."""


@dataclass(frozen=True, slots=True)
class WindowTruth:
    """A window as it really was: of which process, which round its node stood in at its end, and when that was."""

    process: int
    window: int
    round: RoundId
    ended_ns: int


@dataclass(slots=True)
class RoundTruth:
    """A round as the master began it."""

    participants: set[NodeId]
    listeners: set[NodeId]
    cadence: Cadence
    told: dict[NodeId, object] = field(default_factory=dict)
    """The connection that each node received its start on."""
    before: RoundId | None = None
    """The round that the same master began before."""


@dataclass(slots=True)
class _Process:
    last: RoundId = NEVER
    window: int = 0
    is_halted: bool = False


@dataclass(slots=True)
class RoundHistory:
    """Everything that happened so far, as far as promises are about it."""

    settings: RoundSettings
    windows: dict[str, WindowTruth] = field(default_factory=dict)
    """By the note in the window's fits."""
    rounds: dict[RoundId, RoundTruth] = field(default_factory=dict)
    published: list[RoundSummary] = field(default_factory=list)
    _processes: dict[int, _Process] = field(default_factory=dict)
    _combined: dict[tuple[int, NodeId], int] = field(default_factory=dict)
    """(Master, node) -> the newest window in a result."""
    exports: dict[int, int] = field(default_factory=dict)
    """Process -> windows exported."""

    # Nodes

    def stepped(self, process: int, name: str, last: RoundId, event: NodeEvent, effects: Sequence[NodeEffect]) -> None:
        """A node has handled an event, and now stands at round `last`."""
        known = self._processes.setdefault(process, _Process())
        if last < known.last or last.sequence < known.last.sequence:
            raise Violation(f"{name} went back from round {known.last} to {last}")
        was_last, known.last = known.last, last
        starts = isinstance(event, MasterMessageReceived) and isinstance(event.message, RoundStart) and last > was_last
        if starts:
            known.is_halted = False
        for effect in effects:
            match effect:
                case ResumeProbing(_, window):
                    if known.is_halted:
                        raise Violation(f"{name} was halted, and opens window {window}")
                    if window <= known.window:
                        raise Violation(f"{name} opens window {window} after {known.window}")
                    known.window = window
                case RotateWindow(window):
                    if window < known.window:
                        raise Violation(f"{name} closes window {window} after {known.window}")
                    known.window = window
                case _:
                    pass
        if (
            isinstance(event, MasterMessageReceived)
            and isinstance(event.message, ProbeHalt)
            and event.message.round == last
        ):
            known.is_halted = True

    def waited_too_long(self, name: str, ms: float) -> None:
        raise Violation(f"{name} still waits for a RoundStart, {ms:.0f} ms after its window")

    # The master

    def begun(self, round: RoundId, truth: RoundTruth) -> None:
        self.rounds[round] = truth

    def clock_sent(self, node: NodeId, connection: object, round: RoundId) -> None:
        if self.rounds[round].told.get(node) is not connection:
            raise Violation(f"node {node} is given a clock by round {round}, but came after that round had begun")

    def waits(self, waiting: Sequence[NodeId], listeners: set[NodeId]) -> None:
        if heard := listeners & set(waiting):
            raise Violation(f"the master waits for the listeners {sorted(heard)}")

    def publish(self, now_ns: int, master: int, summary: RoundSummary, listeners: set[NodeId]) -> None:
        """A round has its summary."""
        if self.published and summary.round <= self.published[-1].round:
            raise Violation(f"round {summary.round} is published after {self.published[-1].round}")
        self.published.append(summary)
        truth, missing = self.rounds[summary.round], {int(node) for node in summary.missing}
        if missing & listeners:
            raise Violation(f"round {summary.round} misses the listeners {sorted(missing & listeners)}")
        combined: dict[NodeId, WindowTruth] = {}
        for view in summary.edges:
            node, window = view.fit.src, self.windows[view.fit.why]
            if node not in combined or window.window > combined[node].window:
                combined[node] = window
            self._check_age(now_ns, summary, node, window, truth)
        for each in summary.windows:
            own = truth.before if str(each.node) in summary.late else summary.round
            if summary.kind != "time" and each.round != own:
                raise Violation(f"round {summary.round} lists a window of node {each.node} of round {each.round}")
        processes = [window.process for window in combined.values()]
        if len(set(processes)) < len(processes):
            raise Violation(f"round {summary.round} counts a node twice, under several ids: {sorted(combined)}")
        if summary.kind != "time" and (both := missing & combined.keys()):
            raise Violation(f"round {summary.round} counts reports of {sorted(both)}, and names them as missing")
        for node in sorted(truth.participants - missing):
            if node not in combined:
                raise Violation(f"node {node} is not in round {summary.round}, and is not named as missing")
            if combined[node].window <= self._combined.get((master, node), -1):
                raise Violation(f"round {summary.round} calls window {combined[node].window} of node {node} new")
        self._combined.update({(master, node): window.window for node, window in combined.items()})

    def _check_age(
        self, now_ns: int, summary: RoundSummary, node: NodeId, window: WindowTruth, truth: RoundTruth
    ) -> None:
        what = f"window {window.window} of node {node} in round {summary.round}"
        if summary.late.get(str(node)) == window.round.sequence and window.round == truth.before:
            return
        if summary.kind != "time":
            if window.round != summary.round:
                raise Violation(f"{what} was ended by round {window.round}")
            return
        begun = self.rounds.get(window.round, truth)
        limit = 2 * max(begun.cadence.window_ms, truth.cadence.window_ms) * MS + AGE_SLACK_NS
        if now_ns - window.ended_ns > limit:
            raise Violation(f"{what} is {(now_ns - window.ended_ns) / MS:.0f} ms old")

    def gathers_too_long(self, round: RoundId, ms: float) -> None:
        raise Violation(f"round {round} is still being gathered, {ms:.0f} ms after its window")

    def waits_in_vain(self, round: RoundId, silent: set[NodeId]) -> None:
        raise Violation(f"round {round} waits for the silent nodes {sorted(silent)}, and all others have reported")

    def kept_in_graph(self, round: RoundId, node: NodeId, missed: int) -> None:
        raise Violation(f"node {node} has missed {missed} rounds in a row, and is in the graph of round {round}")

    def unanswered(self, action: str, ms: float) -> None:
        raise Violation(f"the command {action!r} was not answered within {ms:.0f} ms")

    # The end

    def configured(self, name: str, out: Sequence[str], lists: Mapping[str, Sequence[str]]) -> None:
        """A node has a new graph. Where neighbour lists were given, it probes nobody else."""
        unlisted = sorted(set(out) - set(lists.get(name, ())))
        if lists and unlisted:
            raise Violation(f"{name} probes {', '.join(unlisted)}, which its neighbour list does not have")

    def is_whole(self, round: RoundSummary, probers: set[NodeId]) -> bool:
        """Whether everybody who probes had a part in it, with a line for every edge."""
        lines = all(not view.fit.refused for view in round.edges)
        return lines and not round.missing and self.rounds[round.round].participants == probers
