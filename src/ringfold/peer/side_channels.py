"""BulkSessions: connections between members beside the ring, for the blocks of a sync or to measure a link. Pure.

A visit is announced by the master: it tells both sides a number and a secret. The visitor dials the host's data port,
each of its addresses once, and proves the secret:

    visitor                                   host
       |  <---------------- Challenge(nonce)    |     a guest of `lanes.py`, as every inbound connection is at first
       |  VisitHello(number, proof) -------->   |     parked while the master's word has not come here yet,
       |                                        |     refused where the task is over already
       |  <---------------- VisitWelcome(proof) |     open at the host
       |  open at the visitor                   |     the round trip: challenge to hello, hello to welcome

An open visit carries bulk frames. What they mean is for its purpose to say: `syncing.py` or `link_rate.py`.
"""

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from ringfold.errors import RemoteProtocolError
from ringfold.peer.effects import CloseConn, Dial, Effect, MakeBulk, Resume, SendMessage
from ringfold.peer.settings import MS, PeerTimings
from ringfold.wire import frames
from ringfold.wire.decoding import checked
from ringfold.wire.messages import (
    PROTOCOL_VERSION,
    Challenge,
    Member,
    PeerId,
    Purpose,
    Refused,
    VisitHello,
    VisitWelcome,
)
from ringfold.wire.proof import link_key, prove, proven

FIRST_KEY = 1 << 32
"""Dial keys of visits are above those of lanes."""

REMEMBERED_TASKS = 256

TaskId = tuple[Purpose, int]
"""What a visit is for: a purpose, and the number of the sync or measurement."""


@dataclass(frozen=True, slots=True)
class SessionOpened:
    """A visit is open, and bulk frames may be sent. `round_trip_ns` is that of the handshake."""

    task: TaskId
    peer: PeerId
    conn: int
    is_dialler: bool
    round_trip_ns: int = 0


@dataclass(frozen=True, slots=True)
class SessionFailed:
    """A visit could not be made, or an open one is over. `is_refused`: the host does not want it, now or later."""

    task: TaskId
    peer: PeerId
    conn: int | None
    is_dialler: bool
    reason: str
    is_refused: bool = False


SessionOutcome = SessionOpened | SessionFailed


@dataclass(slots=True)
class _ExpectedTask:
    """The master's word about an task: who may come for it, and the key of their proofs."""

    key: bytes
    visitors: frozenset[PeerId]


@dataclass(slots=True)
class OutgoingDial:
    """A visit that this peer is about to make."""

    task: TaskId
    host: Member
    key: int = 0
    address: int = -1
    conn: int | None = None
    stage: Literal["pause", "dialling", "challenge", "welcome"] = "dialling"
    nonce: bytes = b""
    challenge: bytes = b""
    hello_ns: int = 0
    until_ns: int = 0
    reason: str = "it has no address"
    is_refused: bool = False


class BulkSessions:
    """All visits of a peer, made and received."""

    def __init__(self, timings: PeerTimings, token: bytes = b"") -> None:
        self.me: PeerId = 0
        self._token = token
        self.open: dict[int, SessionOpened] = {}
        self._timings = timings
        self._expected: dict[TaskId, _ExpectedTask] = {}
        self._over: deque[TaskId] = deque(maxlen=REMEMBERED_TASKS)
        self._setting: list[OutgoingDial] = []
        self._last_key = FIRST_KEY

    # What the master's word begins and ends

    def expect(self, task: TaskId, secret: bytes, visitors: Iterable[PeerId]) -> None:
        """From now on these members may visit for `task`, and this peer may visit others for it."""
        if task in self._over:
            self._over.remove(task)
        self._expected[task] = _ExpectedTask(link_key(self._token, secret), frozenset(visitors))

    def dial(
        self, now_ns: int, task: TaskId, host: Member, pause_ms: int = 0
    ) -> tuple[list[Effect], list[SessionFailed]]:
        """Set out for `host`, after a pause. `SessionOpened` or `SessionFailed` follows."""
        setting = OutgoingDial(task, host)
        self._setting.append(setting)
        if pause_ms:
            setting.stage, setting.until_ns = "pause", now_ns + pause_ms * MS
            return [], []
        return self._next_address(now_ns, setting)

    def cancel_dial(self, task: TaskId, host: PeerId, reason: str) -> list[Effect]:
        """Do not set out for `host` any more; its owner knows."""
        back = [each for each in self._setting if (each.task, each.host.peer) == (task, host)]
        self._setting = [each for each in self._setting if each not in back]
        return [CloseConn(each.conn, reason) for each in back if each.conn is not None]

    def stop(self, task: TaskId, reason: str) -> list[Effect]:
        """The task is over: close everything that belongs to it, without a word to its owner. Who comes for it now is
        turned away.
        """
        self._expected.pop(task, None)
        self._over.append(task)
        gone = [setting.conn for setting in self._setting if setting.task == task]
        gone += [conn for conn, visit in self.open.items() if visit.task == task]
        self._setting = [setting for setting in self._setting if setting.task != task]
        closing: list[Effect] = []
        for conn in gone:
            if conn is not None:
                self.open.pop(conn, None)
                closing.append(CloseConn(conn, reason))
        return closing

    def drop(self, conn: int, reason: str) -> list[Effect]:
        """Close one open visit; its owner knows."""
        return [CloseConn(conn, reason)] if self.open.pop(conn, None) is not None else []

    def end(self, reason: str) -> list[Effect]:
        """Close everything."""
        tasks = {*self._expected, *(setting.task for setting in self._setting)}
        return [effect for task in sorted(tasks) for effect in self.stop(task, reason)]

    # What happens to a visit on its way

    def is_dialling(self, conn: int) -> bool:
        return any(setting.conn == conn for setting in self._setting)

    def next_deadline_ns(self) -> int | None:
        return min((setting.until_ns for setting in self._setting), default=None)

    def tick(self, now_ns: int) -> tuple[list[Effect], list[SessionFailed]]:
        """Nobody waits for ever at a door: a host that parks its visitor may never hear of the task."""
        effects: list[Effect] = []
        failed: list[SessionFailed] = []
        for setting in [each for each in self._setting if now_ns >= each.until_ns]:
            if setting.conn is not None:
                effects.append(CloseConn(setting.conn, "no answer in time"))
            if setting.stage != "pause":
                setting.reason, setting.is_refused = "no answer in time", False
            more, lost = self._next_address(now_ns, setting)
            effects += more
            failed += lost
        return effects, failed

    def dialled(self, key: int, conn: int) -> list[Effect]:
        setting = next((each for each in self._setting if each.key == key), None)
        if setting is None:
            return [CloseConn(conn, "no longer wanted")]
        setting.conn = conn
        return []

    def dial_failed(self, now_ns: int, key: int, reason: str) -> tuple[list[Effect], list[SessionFailed]]:
        setting = next((each for each in self._setting if each.key == key), None)
        if setting is None:
            return [], []
        setting.reason, setting.is_refused = reason, False
        return self._next_address(now_ns, setting)

    def opened(self, conn: int, nonce: bytes) -> None:
        for setting in self._setting:
            if setting.conn == conn:
                setting.stage, setting.nonce = "challenge", nonce

    def message(self, now_ns: int, conn: int, body: bytes) -> tuple[list[Effect], list[SessionOutcome]]:
        """The host's side of the handshake."""
        setting = next(each for each in self._setting if each.conn == conn)
        key = self._expected[setting.task].key
        try:
            said = frames.decode_handshake(body)
        except RemoteProtocolError as error:
            return self._turned_away(now_ns, setting, str(error))
        match said:
            case Challenge(nonce=challenge) if setting.stage == "challenge":
                setting.stage, setting.challenge, setting.hello_ns = "welcome", challenge, now_ns
                claim = (*setting.task, self.me, setting.host.peer)
                proof = prove(key, "visit", challenge, setting.nonce, *_as_parts(*claim))
                hello = VisitHello(PROTOCOL_VERSION, *claim, setting.nonce, proof)
                return [SendMessage(conn, hello), Resume(conn)], []
            case VisitWelcome(proof=proof) if setting.stage == "welcome":
                if not proven(key, proof, "visit_welcome", setting.nonce, setting.challenge):
                    return self._turned_away(now_ns, setting, "it does not know the secret of this visit")
                self._setting.remove(setting)
                arrived = SessionOpened(setting.task, setting.host.peer, conn, True, now_ns - setting.hello_ns)
                self.open[conn] = arrived
                return [MakeBulk(conn)], [arrived]
            case Refused(reason=words):
                return self._turned_away(now_ns, setting, f"refused: {words}")
            case _:
                return self._turned_away(now_ns, setting, f"it said {type(said).__name__} out of turn")

    def closed(self, now_ns: int, conn: int, reason: str) -> tuple[list[Effect], list[SessionFailed]] | None:
        """A connection is gone. None if it was no visit."""
        visit = self.open.pop(conn, None)
        if visit is not None:
            return [], [SessionFailed(visit.task, visit.peer, conn, visit.is_dialler, reason)]
        setting = next((each for each in self._setting if each.conn == conn), None)
        if setting is None:
            return None
        setting.reason, setting.is_refused = reason, False
        return self._next_address(now_ns, setting)

    def _turned_away(
        self, now_ns: int, setting: OutgoingDial, reason: str
    ) -> tuple[list[Effect], list[SessionOutcome]]:
        assert setting.conn is not None
        closing: list[Effect] = [CloseConn(setting.conn, reason)]
        setting.reason, setting.is_refused = reason, True
        effects, failed = self._next_address(now_ns, setting)
        return closing + effects, list(failed)

    def _next_address(self, now_ns: int, setting: OutgoingDial) -> tuple[list[Effect], list[SessionFailed]]:
        """Each address of the host is tried once."""
        setting.address += 1
        setting.conn, setting.stage = None, "dialling"
        if setting.address >= len(setting.host.addresses):
            self._setting.remove(setting)
            return [], [SessionFailed(setting.task, setting.host.peer, None, True, setting.reason, setting.is_refused)]
        self._last_key += 1
        setting.key = self._last_key
        setting.until_ns = now_ns + (self._timings.connect_ms + self._timings.handshake_ms) * MS
        address = setting.host.addresses[setting.address]
        return [Dial(setting.key, address, setting.host.port, self._timings.connect_ms)], []

    # Guests that want to visit this peer

    def judge(
        self, conn: int, nonce: bytes, hello: VisitHello, round_trip_ns: int = 0
    ) -> tuple[list[Effect], SessionOpened] | str | None:
        """Let a guest in, or say why not; None: the master's word about its task has not come here yet."""
        task: TaskId = (hello.purpose, hello.number)
        try:
            fault = checked(self._fault_of, nonce, hello)
        except RemoteProtocolError as error:
            fault = str(error)
        if fault is not None:
            return fault
        expected = self._expected.get(task)
        if expected is None:
            return None
        arrived = SessionOpened(task, hello.source, conn, False, round_trip_ns)
        self.open[conn] = arrived
        welcome = VisitWelcome(prove(expected.key, "visit_welcome", hello.nonce, nonce))
        return [SendMessage(conn, welcome), MakeBulk(conn)], arrived

    def _fault_of(self, nonce: bytes, hello: VisitHello) -> str | None:
        """Why this hello is wrong; None also while the master's word about its task has not come here yet."""
        if hello.version != PROTOCOL_VERSION:
            return f"protocol version {hello.version}, but this peer speaks {PROTOCOL_VERSION}"
        task: TaskId = (hello.purpose, hello.number)
        expected = self._expected.get(task)
        if expected is None:
            return f"{hello.purpose} {hello.number} is over here" if task in self._over else None
        claim = (hello.number, hello.source, hello.target)
        if min(claim) < 0 or max(claim) >= 1 << 63:
            return "numbers out of range"
        parts = _as_parts(hello.purpose, *claim)
        if not proven(expected.key, hello.proof, "visit", nonce, hello.nonce, *parts):
            return "it does not know the secret of this visit"
        if hello.target != self.me or hello.source not in expected.visitors:
            return f"peer {hello.source} has no business with peer {hello.target} here"
        return None


def _as_parts(purpose: Purpose, *numbers: int) -> tuple[bytes, ...]:
    return (purpose.encode(), *(number.to_bytes(8, "little") for number in numbers))


class TaskOwner(Protocol):
    """A part of the peer that uses bulk sessions: the sync of shared state, or the measurement of a link."""

    def session_opened(self, now_ns: int, session: SessionOpened) -> list[Effect]: ...
    def session_failed(self, now_ns: int, failed: SessionFailed) -> list[Effect]: ...
    def message(self, now_ns: int, conn: int, body: bytes) -> list[Effect]: ...
    def tick(self, now_ns: int) -> list[Effect]: ...
    def next_deadline_ns(self) -> int | None: ...
    def end(self, reason: str) -> list[Effect]: ...


class SideChannels:
    """All bulk sessions of a peer, and the owner of each by its purpose."""

    def __init__(self, sessions: BulkSessions, owners: Mapping[Purpose, TaskOwner]) -> None:
        self.sessions = sessions
        self._owners = owners

    def report(self, now_ns: int, effects: list[Effect], outcomes: Sequence[SessionOutcome]) -> list[Effect]:
        """Report to the owners which sessions are open and which failed; `effects` come first."""
        for outcome in outcomes:
            owner = self._owners[outcome.task[0]]
            if isinstance(outcome, SessionOpened):
                effects += owner.session_opened(now_ns, outcome)
            else:
                effects += owner.session_failed(now_ns, outcome)
        return effects

    def message(self, now_ns: int, conn: int, body: bytes) -> list[Effect]:
        """A message on an open session goes to the owner of its task."""
        return self._owners[self.sessions.open[conn].task[0]].message(now_ns, conn, body)

    def tick(self, now_ns: int) -> list[Effect]:
        effects = self.report(now_ns, *self.sessions.tick(now_ns))
        for owner in self._owners.values():
            effects += owner.tick(now_ns)
        return effects

    def next_deadline_ns(self) -> int | None:
        times = [self.sessions.next_deadline_ns(), *(owner.next_deadline_ns() for owner in self._owners.values())]
        return min((time for time in times if time is not None), default=None)

    def end(self, reason: str) -> list[Effect]:
        """Close everything."""
        effects = [effect for owner in self._owners.values() for effect in owner.end(reason)]
        return effects + self.sessions.end(reason)
