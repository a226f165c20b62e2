"""The events of a master's machines: what the shell reports to them. The effects are in `effects.py`.

The shell chooses a number for each connection and never uses it again. After a `CloseConnection` effect the machine has
forgotten the connection; it ignores whatever the shell still reports about it.
"""

from msgspec import Struct

from ringfold.config import DEFAULT_RUN
from ringfold.topology.solve import Solution
from ringfold.wire.frames import Done, Heartbeat
from ringfold.wire.messages import GroupId, ToMaster

Ns = int
"""Integer nanoseconds."""
Conn = int
"""A control connection."""


class ConnectionOpened(Struct, frozen=True):
    """A client connected. `nonce` is fresh randomness for its challenge.

    With a `token` the challenge was sent before, and the client's requests are proven with that token.
    """

    conn: Conn
    remote: str
    nonce: bytes
    token: bytes | None = None


class MessageReceived(Struct, frozen=True):
    """A message arrived; `size` is its length in bytes. With a RoundReport, `retransmits` counts the segments that were
    sent again on this connection so far."""

    conn: Conn
    message: ToMaster
    size: int = 0
    retransmits: int = 0


class HeartbeatReceived(Struct, frozen=True):
    conn: Conn
    heartbeat: Heartbeat


class FramePartReceived(Struct, frozen=True):
    """Bytes arrived, but no frame is complete: the connection is busy with a large one."""

    conn: Conn


class DoneReceived(Struct, frozen=True, gc=False):
    """A peer's local part of an op is done (evidence by the master)."""

    conn: Conn
    done: Done


class MalformedReceived(Struct, frozen=True):
    """The connection sent bytes that are not of this protocol."""

    conn: Conn
    reason: str


class ConnectionClosed(Struct, frozen=True):
    """The connection is gone, and the machine did not request it."""

    conn: Conn
    reason: str


class Tick(Struct, frozen=True):
    """Arrives every 50 ms. All deadlines are checked here."""


class MoonshotFinished(Struct, frozen=True):
    """The result of a run's `StartMoonshot`, if there is one."""

    group: GroupId
    solution: Solution
    run: str = DEFAULT_RUN


class StopRequested(Struct, frozen=True):
    """The master is stopped on purpose: its journal is closed, and its peers are notified. This is the last event."""

    reason: str


Event = (
    StopRequested
    | ConnectionOpened
    | MessageReceived
    | HeartbeatReceived
    | FramePartReceived
    | DoneReceived
    | MalformedReceived
    | ConnectionClosed
    | Tick
    | MoonshotFinished
)
