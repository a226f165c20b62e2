"""Inbound connections to the data port, until a lane or a bulk session takes them over. Pure.

Other peers connect for a lane of the ring (`lanes.py`), for a sync of shared state or for the measurement of a link
(both are bulk sessions, `side_channels.py`). What a connection is for, only its hello says:

    accepted --> Challenge is sent --> LaneHello or BulkHello --+--> proven: its owner takes the connection
                                                                 +--> too early: parked until the master announces it
                                                                 +--> wrong: refused and closed

A pending connection has proven nothing. There are few of them, and each has a deadline.
"""

from dataclasses import dataclass

from ringfold.errors import RemoteProtocolError
from ringfold.peer.effects import CloseConn, Effect, Notify, SendMessage
from ringfold.peer.lanes import Lanes, LaneUpdate
from ringfold.peer.settings import MS, PeerTimings
from ringfold.peer.side_channels import SideChannels
from ringfold.wire import frames
from ringfold.wire.messages import PROTOCOL_VERSION, BulkHello, Challenge, LaneHello, Refused
from ringfold.wire.notices import ConnectionAbandoned, ConnectionDropped

CLOSED_BY_CLIENT = ("closed by the other side", "Connection reset by peer", "Broken pipe")
"""The engine's reasons for a connection that its other end closed: its own, and the kernel's."""


@dataclass(slots=True)
class PendingInbound:
    """A connection to the data port that has proven nothing yet."""

    remote: str
    nonce: bytes
    accepted_ns: int
    deadline_ns: int
    parked: LaneHello | BulkHello | None = None
    """A hello that the master has not announced here yet."""
    round_trip_ns: int = 0
    """From the challenge to the hello."""


class Acceptor:
    """The inbound connections that have no owner yet."""

    def __init__(self, timings: PeerTimings, lanes: Lanes, channels: SideChannels) -> None:
        self._timings = timings
        self._lanes = lanes
        self._channels = channels
        self._pending: dict[int, PendingInbound] = {}  # in order of arrival

    def __contains__(self, conn: int) -> bool:
        return conn in self._pending

    def accepted(self, now_ns: int, conn: int, remote: str, nonce: bytes) -> list[Effect]:
        """Send the challenge. If too many are pending, one of them is closed first."""
        effects: list[Effect] = []
        if len(self._pending) >= self._timings.unproven_most:
            # A connection without a hello is closed before one that waits for its epoch.
            oldest = min(self._pending, key=lambda pending: self._pending[pending].parked is not None)
            effects += self._drop(oldest, "too many connections that have proven nothing")
        self._pending[conn] = PendingInbound(remote, nonce, now_ns, now_ns + self._timings.handshake_ms * MS)
        effects.append(SendMessage(conn, Challenge(nonce, PROTOCOL_VERSION, PROTOCOL_VERSION)))
        return effects

    def message(self, now_ns: int, conn: int, body: bytes) -> LaneUpdate:
        """The hello of a pending connection."""
        pending = self._pending[conn]
        try:
            hello = frames.decode_handshake(body)
        except RemoteProtocolError as error:
            return LaneUpdate(self._drop(conn, str(error)))
        match hello:
            case LaneHello() if pending.parked is None:
                pending.parked = hello
                return self._check_lane(conn, pending, hello)
            case BulkHello() if pending.parked is None:
                pending.parked = hello
                pending.round_trip_ns = now_ns - pending.accepted_ns
                return LaneUpdate(self.check_sessions(now_ns))
            case _:
                return LaneUpdate(self._drop(conn, f"it sent {type(hello).__name__} out of turn"))

    def check_lanes(self) -> LaneUpdate:
        """The lanes have a new record: some of the parked connections may belong to it."""
        update = LaneUpdate()
        for conn, pending in list(self._pending.items()):
            if isinstance(pending.parked, LaneHello):
                update.add(self._check_lane(conn, pending, pending.parked))
        return update

    def check_sessions(self, now_ns: int) -> list[Effect]:
        """Look at the parked connections for bulk sessions: the master may have announced them, or they may be over."""
        effects: list[Effect] = []
        for conn, pending in list(self._pending.items()):
            if not isinstance(pending.parked, BulkHello):
                continue
            verdict = self._channels.sessions.accept(conn, pending.nonce, pending.parked, pending.round_trip_ns)
            if isinstance(verdict, str):
                effects += self._refuse(conn, verdict)
            elif verdict is not None:
                del self._pending[conn]
                effects += self._channels.report(now_ns, verdict[0], [verdict[1]])
        return effects

    def closed(self, conn: int, reason: str) -> list[Effect]:
        """A pending connection is gone: its client closed it, or it breached the protocol."""
        remote = self._pending.pop(conn).remote
        if reason in CLOSED_BY_CLIENT:
            return [Notify(ConnectionAbandoned(remote, reason))]
        return [Notify(ConnectionDropped(remote, reason))]

    def tick(self, now_ns: int) -> list[Effect]:
        effects: list[Effect] = []
        for conn, pending in list(self._pending.items()):
            if now_ns >= pending.deadline_ns:
                effects += self._drop(conn, _why_late(pending.parked))
        return effects

    def next_deadline_ns(self) -> int | None:
        return min((pending.deadline_ns for pending in self._pending.values()), default=None)

    def end(self, reason: str) -> list[Effect]:
        """Close everything."""
        effects: list[Effect] = [CloseConn(conn, reason) for conn in self._pending]
        self._pending.clear()
        return effects

    def _check_lane(self, conn: int, pending: PendingInbound, hello: LaneHello) -> LaneUpdate:
        verdict = self._lanes.accept(conn, pending.nonce, hello)
        if verdict is None:
            return LaneUpdate()
        if isinstance(verdict, str):
            return LaneUpdate(self._refuse(conn, verdict))
        del self._pending[conn]
        return verdict

    def _refuse(self, conn: int, reason: str) -> list[Effect]:
        return [SendMessage(conn, Refused(reason)), *self._drop(conn, reason)]

    def _drop(self, conn: int, reason: str) -> list[Effect]:
        remote = self._pending.pop(conn).remote
        return [CloseConn(conn, reason), Notify(ConnectionDropped(remote, reason))]


def _why_late(parked: LaneHello | BulkHello | None) -> str:
    match parked:
        case LaneHello():
            return "its epoch was not recorded here in time"
        case BulkHello(purpose=purpose, number=number):
            return f"the master did not announce {purpose} {number} here"
        case None:
            return "no handshake in time"
