"""Which nodes a round waits for, and for how long. Pure.

*The deadline.* A round ends when all awaited nodes have reported, and not later than its deadline. The deadline follows
what reports usually take: for each node the median time from RoundEnd sent to its report received, over its last
MAX_TIMES reports, plus DEVIATIONS median deviations from it. The deadline is that of the slowest node, but not more
than MAX_OVER_MEDIAN times that of the median node: one slow node cannot make all others wait. It lies between a floor
and the report timeout, and is the timeout as long as nothing is known.

The retransmission timer of TCP (RFC 6298) has smoothed means in place of these medians. It is fed many times a second;
a node reports once in a window. The first report of a node is the slowest, because nothing is warm yet, and a mean
would remember it, and every pause of a busy machine, for minutes. All that time one stuck node would cost the others
several times what their reports take.

*The last nodes.* A busy machine or network makes all reports of a round late together. So once only the last nodes are
missing (one in LAST_SHARE), the round itself tells how long its reports take. From then on it waits for them half as
long again as the others took, or as these nodes take at the median, if that is longer; but never longer than before.

*Nodes.* A node that is SUSPECTED (its heartbeats are missing) is not awaited. A node that misses `max_missed` rounds in
a row is EXCLUDED: it is not awaited, and the next graph is drawn without it. Its next report makes it ACTIVE again.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum

from ringfold.states import Transitions
from ringfold.units import MS
from ringfold.wire.probing import NodeId

MAX_OVER_MEDIAN = 3
DEVIATIONS = 4
MAX_TIMES = 8
LAST_SHARE = 8


class NodeLiveness(Enum):
    """See the head of this file."""

    ACTIVE = "active"
    SUSPECTED = "suspected"
    EXCLUDED = "excluded"


TRANSITIONS = Transitions(
    {
        NodeLiveness.ACTIVE: {NodeLiveness.SUSPECTED, NodeLiveness.EXCLUDED},
        NodeLiveness.SUSPECTED: {NodeLiveness.ACTIVE, NodeLiveness.EXCLUDED},
        NodeLiveness.EXCLUDED: {NodeLiveness.ACTIVE},
    }
)
"""An excluded node stays excluded when its heartbeats return: only a report shows that it takes part again."""


@dataclass(slots=True)
class _Node:
    state: NodeLiveness = NodeLiveness.ACTIVE
    silent_ms: int = 0
    missed: int = 0
    """How many rounds in a row it has missed."""
    times_ns: list[int] = field(default_factory=list)
    """What its last reports took, the newest last."""
    reports: int = 0
    """How many reports these are the last of."""
    median_ns: int = 0
    """Of these times; 0: it has not reported yet."""
    usual_ns: int = 0
    """Within what time its report usually arrives; 0: it has not reported yet."""
    retransmits: int = 0
    """Segments that were sent to it again, as of its last report."""

    def move_to(self, state: NodeLiveness) -> None:
        self.state = TRANSITIONS.move(self.state, state)

    def took(self, took_ns: int) -> None:
        """Its report took so long."""
        self.reports += 1
        self.times_ns = times = [*self.times_ns, took_ns][-MAX_TIMES:]
        self.median_ns = middle = max(1, _median(times))
        # Few reports say little about how much they differ: after the first one, a half of it; later less and less.
        deviation = max(_median([abs(time - middle) for time in times]), middle // (2 * self.reports))
        self.usual_ns = middle + DEVIATIONS * deviation


class NodeTable:
    """The liveness of all connected nodes."""

    def __init__(self, max_missed: int) -> None:
        self._max_missed = max_missed
        self._nodes: dict[NodeId, _Node] = {}

    def add(self, node: NodeId) -> None:
        self._nodes[node] = _Node()

    def remove(self, node: NodeId) -> None:
        self._nodes.pop(node, None)

    def is_awaited(self, node: NodeId) -> bool:
        """Whether a round waits for its report."""
        known = self._nodes.get(node)
        return known is not None and known.state is NodeLiveness.ACTIVE

    def is_excluded(self, node: NodeId) -> bool:
        known = self._nodes.get(node)
        return known is not None and known.state is NodeLiveness.EXCLUDED

    def excluded(self) -> dict[NodeId, str]:
        """The nodes that are out of the graph, with the reason."""
        return {node: self.reason(node) for node in sorted(self._nodes) if self.is_excluded(node)}

    def reason(self, node: NodeId) -> str:
        """Why a node is not awaited."""
        known = self._nodes[node]
        if known.state is NodeLiveness.EXCLUDED:
            return f"it has missed {known.missed} rounds in a row"
        return f"it has been silent for {known.silent_ms} ms"

    # What happens to a node

    def suspect(self, node: NodeId, silent_ms: int) -> None:
        """Its heartbeats are missing."""
        known = self._nodes.get(node)
        if known is not None and known.state is NodeLiveness.ACTIVE:
            known.silent_ms = silent_ms
            known.move_to(NodeLiveness.SUSPECTED)

    def recover(self, node: NodeId) -> None:
        """Its heartbeats are back."""
        known = self._nodes.get(node)
        if known is not None and known.state is NodeLiveness.SUSPECTED:
            known.move_to(NodeLiveness.ACTIVE)

    def reported(self, node: NodeId) -> bool:
        """It has sent a report, of whatever round. Returns whether it was excluded, and may be in the next graph."""
        known = self._nodes[node]
        was_excluded = known.state is NodeLiveness.EXCLUDED
        known.missed = 0
        if known.state is not NodeLiveness.ACTIVE:
            known.move_to(NodeLiveness.ACTIVE)
        return was_excluded

    def retransmitted(self, node: NodeId, so_far: int) -> int:
        """How many segments were sent to it again since its last report, of `so_far` on its connection."""
        known = self._nodes[node]
        since, known.retransmits = max(0, so_far - known.retransmits), so_far
        return since

    def missed(self, node: NodeId) -> bool:
        """A round has ended without any report of it. Returns whether it is excluded by that."""
        known = self._nodes.get(node)
        if known is None:
            return False
        known.missed += 1
        if known.missed < self._max_missed or known.state is NodeLiveness.EXCLUDED:
            return False
        known.move_to(NodeLiveness.EXCLUDED)
        return True

    # The deadline

    def took(self, node: NodeId, took_ns: int) -> None:
        """Its report arrived so long after RoundEnd was sent."""
        self._nodes[node].took(took_ns)

    def wait_ms(self, nodes: Iterable[NodeId], floor_ms: int, timeout_ms: int) -> int:
        """How long after RoundEnd the reports of these nodes are awaited; rounded up to milliseconds."""
        known = [self._nodes[node] for node in nodes if node in self._nodes]
        usual = sorted(one.usual_ns for one in known if one.usual_ns)
        if not usual:
            return timeout_ms
        longest_ns = min(usual[-1], MAX_OVER_MEDIAN * usual[len(usual) // 2])
        return min(max(-(-longest_ns // MS), floor_ms), timeout_ms)

    def last_wait_ms(self, nodes: Iterable[NodeId], took_ns: int, floor_ms: int) -> int | None:
        """How long after RoundEnd the last nodes are awaited, if the others took so long; rounded up to milliseconds.
        None: one of them has never reported, and what it takes is not known."""
        medians = [self._nodes[node].median_ns for node in nodes]
        if not all(medians):
            return None
        return max(-(-half_again(max(took_ns, *medians)) // MS), floor_ms)


def are_last(pending: int, awaited: int) -> bool:
    """Whether so many of the awaited nodes are the last ones: one of them, or one in LAST_SHARE."""
    return 0 < pending <= max(1, awaited // LAST_SHARE)


def half_again(time_ns: int) -> int:
    return time_ns * 3 // 2


def _median(values: list[int]) -> int:
    """The middle one; of two, the higher."""
    return sorted(values)[len(values) // 2]
