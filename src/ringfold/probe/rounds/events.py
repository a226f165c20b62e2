"""Events of the two round machines: what has happened, for `RoundMaster` and for `RoundNode`.

The master's machine uses the master's monotonic clock, a node's machine the node's own clock (the one that timestamps
its probes). Both are integers of nanoseconds. The two are never compared.
"""

from collections.abc import Sequence

from msgspec import Struct

from ringfold.units import MS as MS
from ringfold.wire.probing import (
    EdgeFit,
    Neighbour,
    NodeId,
    ProbeAction,
    ProbeGraph,
    ProbeHalt,
    RoundAlarm,
    RoundClock,
    RoundEnd,
    RoundId,
    RoundReport,
    RoundStart,
)

FromRoundMaster = ProbeGraph | RoundStart | RoundEnd | RoundClock | ProbeHalt
ToRoundMaster = RoundReport | RoundAlarm


class Tick(Struct, frozen=True):
    """Time has passed: `next_deadline_ns` is reached."""


# Of the master


class NodeConnected(Struct, frozen=True):
    """A node is connected. `facts` is how its neighbours reach it, `last` the newest round that it has seen."""

    node: NodeId
    facts: Neighbour
    listen_only: bool
    last: RoundId


class NodeDisconnected(Struct, frozen=True):
    """A node's connection is lost, or it left."""

    node: NodeId
    reason: str = ""


class NodeSuspected(Struct, frozen=True):
    """A node's heartbeats are missing for `silent_ms`; its connection is still open."""

    node: NodeId
    silent_ms: int


class NodeRecovered(Struct, frozen=True):
    """The heartbeats of a suspected node are back."""

    node: NodeId


class ReportReceived(Struct, frozen=True):
    """A node's report has arrived. `bytes` is its size, `retransmits` how many segments were sent to the node again so
    far on its connection."""

    node: NodeId
    report: RoundReport
    bytes: int = 0
    retransmits: int = 0


class AlarmReceived(Struct, frozen=True):
    """A node reports an anomaly in its open window."""

    node: NodeId
    alarm: RoundAlarm


class CommandReceived(Struct, frozen=True):
    """A client controls probing. `requester` identifies it for the response."""

    requester: int
    action: ProbeAction
    label: str = ""


MasterEvent = (
    NodeConnected
    | NodeDisconnected
    | NodeSuspected
    | NodeRecovered
    | ReportReceived
    | AlarmReceived
    | CommandReceived
    | Tick
)


# Of a node


class MasterConnected(Struct, frozen=True):
    """A master has accepted this node under this id."""

    node: NodeId


class MasterDisconnected(Struct, frozen=True):
    """The connection to the master is lost."""

    reason: str = ""


class MasterMessageReceived(Struct, frozen=True):
    """The master has sent a message."""

    message: FromRoundMaster


class WindowFitted(Struct, frozen=True):
    """The result of RotateWindow: the window's edges are fitted. Times are the node's clock.

    `utc_ns` is CLOCK_REALTIME minus the node's clock. The sequences are those of the window's first and last probe, and
    of the next window's first one.
    """

    window: int
    edges: Sequence[EdgeFit]
    begin_ns: int
    end_ns: int
    utc_ns: int
    fit_ns: int = 0
    first_sequence: int = 0
    last_sequence: int = 0
    next_sequence: int = 0


class ResidualObserved(Struct, frozen=True):
    """The open window was checked: `residual_ns` is how far an edge is off its last line."""

    src: NodeId
    dst: NodeId
    residual_ns: int


NodeEvent = MasterConnected | MasterDisconnected | MasterMessageReceived | WindowFitted | ResidualObserved | Tick
