"""Events of a relay's state machine: what has happened at its connection to the root, and at its links to nodes.

All times are the relay's monotonic clock, in integer nanoseconds.
"""

from msgspec import Struct

from ringfold.probe.rounds.events import Tick as Tick
from ringfold.probe.rounds.events import ToRoundMaster
from ringfold.wire.regions import FromRoot, Link, NodeEntry, RelayWelcome


class RootConnected(Struct, frozen=True):
    """A root master has accepted this relay."""

    welcome: RelayWelcome


class RootDisconnected(Struct, frozen=True):
    """The connection to the root is lost."""

    reason: str = ""


class RootMessageReceived(Struct, frozen=True):
    """The root has sent a message."""

    message: FromRoot


class RootHeartbeatReceived(Struct, frozen=True):
    """The root has sent a heartbeat."""


class NodeRequested(Struct, frozen=True):
    """A node has connected, and has proven the token."""

    entry: NodeEntry
    has_heartbeats: bool = True


class LinkClosed(Struct, frozen=True):
    """The connection to a node is lost."""

    link: Link
    reason: str = ""


class LinkMessageReceived(Struct, frozen=True):
    """A node has sent a message."""

    link: Link
    message: ToRoundMaster


class LinkHeartbeatReceived(Struct, frozen=True):
    """A node has sent a heartbeat, or a part of a message."""

    link: Link


RelayEvent = (
    RootConnected
    | RootDisconnected
    | RootMessageReceived
    | RootHeartbeatReceived
    | NodeRequested
    | LinkClosed
    | LinkMessageReceived
    | LinkHeartbeatReceived
    | Tick
)
