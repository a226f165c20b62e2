"""What the two round machines are told (events) and what they want done (effects).

The master's machine lives by the master's monotonic clock, a node's by the node's own clock (the one that stamps its
probes). Both are integers of nanoseconds, and nothing in here compares one with the other.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

from ringfold.units import MS as MS
from ringfold.wire.probing import (
    Advice,
    Cadence,
    EdgeFit,
    EdgeView,
    LoopResidual,
    Neighbour,
    NodeClock,
    NodeId,
    ProbeAction,
    ProbeAnswer,
    ProbeGraph,
    ProbeHalt,
    RoundAlarm,
    RoundClock,
    RoundEnd,
    RoundId,
    RoundReport,
    RoundStart,
    RoundSummary,
)

FromRoundMaster = ProbeGraph | RoundStart | RoundEnd | RoundClock | ProbeHalt
ToRoundMaster = RoundReport | RoundAlarm


# What the machines are given


@dataclass(frozen=True, slots=True)
class Calculated:
    """The graph calculation's result. `history` is handed back to the next calculation and looked at by nobody else.

    `missing` are nodes that got no clock, with the reason. `took_ns` is for whoever can read a clock: the machine only
    passes it on.
    """

    reference: NodeId
    nodes: Sequence[NodeClock]
    edges: Sequence[EdgeView]
    loops: Sequence[LoopResidual] = ()
    missing: Mapping[NodeId, str] = field(default_factory=dict)
    anomaly: str = ""
    advice: Advice | None = None
    history: object = None
    took_ns: int = 0


Calculate = Callable[[Sequence[EdgeFit], Mapping[NodeId, int], object], Calculated]
"""(fits, CLOCK_REALTIME minus the node's clock for each node that said it, history or None) -> the result."""

Draw = Callable[[Sequence[NodeId], Collection[NodeId], int, int], list[tuple[NodeId, NodeId]]]
"""(all nodes, those of them that only listen, neighbours, seed) -> directed edges."""


# Master: events


@dataclass(frozen=True, slots=True)
class NodeCame:
    """A node is connected. `facts` is how its neighbours reach it, `last` the newest round that it has seen."""

    node: NodeId
    facts: Neighbour
    listen_only: bool
    last: RoundId


@dataclass(frozen=True, slots=True)
class NodeGone:
    """A node's connection is lost, or it left."""

    node: NodeId
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Reported:
    """A node's report came, in so many bytes."""

    node: NodeId
    report: RoundReport
    bytes: int = 0


@dataclass(frozen=True, slots=True)
class Alarmed:
    """A node sees an anomaly in the middle of its window."""

    node: NodeId
    alarm: RoundAlarm


@dataclass(frozen=True, slots=True)
class Commanded:
    """Somebody steers probing; `asker` is where the answer goes."""

    asker: int
    action: ProbeAction
    label: str = ""


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed: `next_deadline_ns` has come."""


MasterEvent = NodeCame | NodeGone | Reported | Alarmed | Commanded | Tick


# Master: effects


@dataclass(frozen=True, slots=True)
class SendTo:
    """Send a message to a node."""

    node: NodeId
    message: FromRoundMaster


@dataclass(frozen=True, slots=True)
class Answer:
    """Answer a command."""

    asker: int
    answer: ProbeAnswer


@dataclass(frozen=True, slots=True)
class Publish:
    """A round has its result: export it, count it, show it."""

    summary: RoundSummary


@dataclass(frozen=True, slots=True)
class Note:
    """Worth a line in the log."""

    text: str


MasterEffect = SendTo | Answer | Publish | Note


# Node: events


@dataclass(frozen=True, slots=True)
class Connected:
    """There is a connection to a master, and it has let this node in under this id."""

    node: NodeId


@dataclass(frozen=True, slots=True)
class Disconnected:
    """The connection is lost."""

    reason: str = ""


@dataclass(frozen=True, slots=True)
class Heard:
    """The master said something."""

    message: FromRoundMaster


@dataclass(frozen=True, slots=True)
class WindowFitted:
    """The answer to Rotate: the window's edges are fitted. Times are the node's clock.

    `utc_ns` is CLOCK_REALTIME minus the node's clock, `queue_depth` how many windows wait for their fits.
    """

    window: int
    edges: Sequence[EdgeFit]
    begin_ns: int
    end_ns: int
    utc_ns: int
    fit_ns: int = 0
    queue_depth: int = 0


@dataclass(frozen=True, slots=True)
class Watched:
    """A look into the running window: by how much an edge strays from its last line."""

    src: NodeId
    dst: NodeId
    residual_ns: int


NodeEvent = Connected | Disconnected | Heard | WindowFitted | Watched | Tick


# Node: effects


@dataclass(frozen=True, slots=True)
class Say:
    """Send a message to the master."""

    message: ToRoundMaster


@dataclass(frozen=True, slots=True)
class Configure:
    """The prober's edges, from now on."""

    key: bytes
    out: Sequence[Neighbour]
    into: Sequence[Neighbour]


@dataclass(frozen=True, slots=True)
class Resume:
    """Send probes in this cadence. What comes belongs to window number `window`, until Rotate closes it."""

    cadence: Cadence
    window: int


@dataclass(frozen=True, slots=True)
class PauseProbing:
    """Send no probes; go on answering them."""


@dataclass(frozen=True, slots=True)
class Rotate:
    """Close window number `window` now, fit its edges, and answer WindowFitted.

    Unless PauseProbing came just before, probing goes on in the cadence it has, in window number `window` + 1.
    """

    window: int


@dataclass(frozen=True, slots=True)
class Adopt:
    """This node's clock, by the round before the one that now begins."""

    clock: NodeClock


@dataclass(frozen=True, slots=True)
class Export:
    """Write a window down. `is_alone`: no master ended it."""

    round: RoundId
    label: str
    window: int
    begin_ns: int
    end_ns: int
    edges: Sequence[EdgeFit]
    is_alone: bool


NodeEffect = Say | Configure | Resume | PauseProbing | Rotate | Adopt | Export | Note
