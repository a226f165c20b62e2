"""Side channels: bulk sessions between members beside the ring, for the blocks of a sync or to measure a link. Pure.

A bulk session is one connection. The master announces it: it sends both ends the number of a task (a sync or a
measurement) and a secret. One end dials the data port of the other, each of its addresses once, and proves the secret:

    dialler                                   acceptor
       |  <---------------- Challenge(nonce)    |     pending in `acceptor.py`, as every inbound connection is at first
       |  BulkHello(number, proof) -------->   |     parked while the master's announcement has not arrived here,
       |                                        |     refused if the task is over already
       |  <---------------- BulkWelcome(proof) |     open at the acceptor
       |  open at the dialler                   |     the RTT: challenge to hello, hello to welcome

An open session carries bulk frames. `SideChannels` hands its messages to the owner of the task: `sync/syncing.py` or
`measure/link_rate.py`. The states of a dial are in `states.py`.
"""

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from ringfold.errors import RemoteProtocolError
from ringfold.peer.effects import CloseConn, Dial, Effect, MakeBulk, ResumeReading, SendMessage
from ringfold.peer.settings import MS, PeerTimings
from ringfold.peer.states import DIAL_TRANSITIONS, DialInput, DialState, next_state
from ringfold.wire import frames
from ringfold.wire.decoding import checked
from ringfold.wire.messages import (
    PROTOCOL_VERSION,
    BulkHello,
    BulkWelcome,
    Challenge,
    Member,
    PeerId,
    Purpose,
    Refused,
)
from ringfold.wire.proof import link_key, prove, proven

FIRST_KEY = 1 << 32
"""Dial keys of bulk sessions are above those of lanes."""

REMEMBERED_TASKS = 256

TaskId = tuple[Purpose, int]
"""What a session is for: a purpose, and the number of the sync or measurement."""


@dataclass(frozen=True, slots=True)
class SessionOpened:
    """A session is open, and bulk frames may be sent. `round_trip_ns` is that of the handshake."""

    task: TaskId
    peer: PeerId
    conn: int
    is_dialler: bool
    round_trip_ns: int = 0


@dataclass(frozen=True, slots=True)
class SessionFailed:
    """A session could not be opened, or an open one is over. `is_refused`: the other end will not accept it later."""

    task: TaskId
    peer: PeerId
    conn: int | None
    is_dialler: bool
    reason: str
    is_refused: bool = False


SessionOutcome = SessionOpened | SessionFailed


@dataclass(slots=True)
class _ExpectedTask:
    """The master's announcement of a task: the peers that may dial this one for it, and the key of their proofs."""

    key: bytes
    diallers: frozenset[PeerId]


@dataclass(slots=True)
class OutgoingDial:
    """A session that this peer is about to open."""

    task: TaskId
    target: Member
    key: int = 0
    address: int = -1
    conn: int | None = None
    state: DialState = DialState.PAUSED
    nonce: bytes = b""
    challenge: bytes = b""
    hello_ns: int = 0
    deadline_ns: int = 0
    reason: str = "it has no address"
    is_refused: bool = False

    def enter(self, given: DialInput) -> None:
        self.state = next_state(DIAL_TRANSITIONS, self.state, given)


class BulkSessions:
    """All bulk sessions of a peer, dialled and accepted."""

    def __init__(self, timings: PeerTimings, token: bytes = b"") -> None:
        self.me: PeerId = 0
        self._token = token
        self.open: dict[int, SessionOpened] = {}
        self._timings = timings
        self._expected: dict[TaskId, _ExpectedTask] = {}
        self._over: deque[TaskId] = deque(maxlen=REMEMBERED_TASKS)
        self._dials: list[OutgoingDial] = []
        self._last_key = FIRST_KEY

    # Tasks begin and end

    def expect(self, task: TaskId, secret: bytes, diallers: Iterable[PeerId]) -> None:
        """From now on `diallers` may open sessions for `task`, and this peer may dial others for it."""
        if task in self._over:
            self._over.remove(task)
        self._expected[task] = _ExpectedTask(link_key(self._token, secret), frozenset(diallers))

    def dial(
        self, now_ns: int, task: TaskId, target: Member, pause_ms: int = 0
    ) -> tuple[list[Effect], list[SessionFailed]]:
        """Open a session with `target`, after a pause. `SessionOpened` or `SessionFailed` follows."""
        dial = OutgoingDial(task, target)
        self._dials.append(dial)
        if pause_ms:
            dial.deadline_ns = now_ns + pause_ms * MS
            return [], []
        return self._next_address(now_ns, dial)

    def cancel_dial(self, task: TaskId, target: PeerId, reason: str) -> list[Effect]:
        """Stop dialling `target`. The owner of the task is not notified."""
        cancelled = [dial for dial in self._dials if (dial.task, dial.target.peer) == (task, target)]
        self._dials = [dial for dial in self._dials if dial not in cancelled]
        return [CloseConn(dial.conn, reason) for dial in cancelled if dial.conn is not None]

    def stop(self, task: TaskId, reason: str) -> list[Effect]:
        """The task is over: close everything that belongs to it, without a notice to its owner.

        Peers that connect for it from now on are refused.
        """
        self._expected.pop(task, None)
        self._over.append(task)
        gone = [dial.conn for dial in self._dials if dial.task == task]
        gone += [conn for conn, session in self.open.items() if session.task == task]
        self._dials = [dial for dial in self._dials if dial.task != task]
        closing: list[Effect] = []
        for conn in gone:
            if conn is not None:
                self.open.pop(conn, None)
                closing.append(CloseConn(conn, reason))
        return closing

    def drop(self, conn: int, reason: str) -> list[Effect]:
        """Close one open session. The owner of the task is not notified."""
        return [CloseConn(conn, reason)] if self.open.pop(conn, None) is not None else []

    def end(self, reason: str) -> list[Effect]:
        """Close everything."""
        tasks = {*self._expected, *(dial.task for dial in self._dials)}
        return [effect for task in sorted(tasks) for effect in self.stop(task, reason)]

    # Sessions that this peer dials

    def is_dialling(self, conn: int) -> bool:
        return any(dial.conn == conn for dial in self._dials)

    def next_deadline_ns(self) -> int | None:
        return min((dial.deadline_ns for dial in self._dials), default=None)

    def tick(self, now_ns: int) -> tuple[list[Effect], list[SessionFailed]]:
        """Every dial has a deadline: a peer that parks the connection may never receive the announcement."""
        effects: list[Effect] = []
        failed: list[SessionFailed] = []
        for dial in [each for each in self._dials if now_ns >= each.deadline_ns]:
            if dial.conn is not None:
                effects.append(CloseConn(dial.conn, "no response in time"))
            if dial.state is not DialState.PAUSED:
                dial.reason = "no response in time"
                dial.is_refused = False
            more, lost = self._next_address(now_ns, dial)
            effects += more
            failed += lost
        return effects, failed

    def dialled(self, key: int, conn: int) -> list[Effect]:
        dial = next((each for each in self._dials if each.key == key), None)
        if dial is None:
            return [CloseConn(conn, "no longer needed")]
        dial.conn = conn
        return []

    def dial_failed(self, now_ns: int, key: int, reason: str) -> tuple[list[Effect], list[SessionFailed]]:
        dial = next((each for each in self._dials if each.key == key), None)
        if dial is None:
            return [], []
        dial.reason = reason
        dial.is_refused = False
        return self._next_address(now_ns, dial)

    def opened(self, conn: int, nonce: bytes) -> None:
        for dial in self._dials:
            if dial.conn == conn:
                dial.enter(DialInput.OPENED)
                dial.nonce = nonce

    def message(self, now_ns: int, conn: int, body: bytes) -> tuple[list[Effect], list[SessionOutcome]]:
        """A message of the handshake from the acceptor."""
        dial = next(each for each in self._dials if each.conn == conn)
        key = self._expected[dial.task].key
        try:
            message = frames.decode_handshake(body)
        except RemoteProtocolError as error:
            return self._refused(now_ns, dial, str(error))
        match message:
            case Challenge(nonce=challenge) if dial.state is DialState.CHALLENGE:
                dial.enter(DialInput.HELLO_SENT)
                dial.challenge = challenge
                dial.hello_ns = now_ns
                claim = (*dial.task, self.me, dial.target.peer)
                proof = prove(key, "visit", challenge, dial.nonce, *_as_parts(*claim))
                hello = BulkHello(PROTOCOL_VERSION, *claim, dial.nonce, proof)
                return [SendMessage(conn, hello), ResumeReading(conn)], []
            case BulkWelcome(proof=proof) if dial.state is DialState.WELCOME:
                if not proven(key, proof, "visit_welcome", dial.nonce, dial.challenge):
                    return self._refused(now_ns, dial, "it does not know the secret of this session")
                self._dials.remove(dial)
                opened = SessionOpened(dial.task, dial.target.peer, conn, True, now_ns - dial.hello_ns)
                self.open[conn] = opened
                return [MakeBulk(conn)], [opened]
            case Refused(reason=text):
                return self._refused(now_ns, dial, f"refused: {text}")
            case _:
                return self._refused(now_ns, dial, f"it sent {type(message).__name__} out of turn")

    def closed(self, now_ns: int, conn: int, reason: str) -> tuple[list[Effect], list[SessionFailed]] | None:
        """A connection is gone. None if it was no bulk session."""
        session = self.open.pop(conn, None)
        if session is not None:
            return [], [SessionFailed(session.task, session.peer, conn, session.is_dialler, reason)]
        dial = next((each for each in self._dials if each.conn == conn), None)
        if dial is None:
            return None
        dial.reason = reason
        dial.is_refused = False
        return self._next_address(now_ns, dial)

    def _refused(self, now_ns: int, dial: OutgoingDial, reason: str) -> tuple[list[Effect], list[SessionOutcome]]:
        assert dial.conn is not None
        closing: list[Effect] = [CloseConn(dial.conn, reason)]
        dial.reason = reason
        dial.is_refused = True
        effects, failed = self._next_address(now_ns, dial)
        return closing + effects, list(failed)

    def _next_address(self, now_ns: int, dial: OutgoingDial) -> tuple[list[Effect], list[SessionFailed]]:
        """Dial the next address. Each address of the target is tried once."""
        dial.address += 1
        dial.conn = None
        if dial.address >= len(dial.target.addresses):
            dial.enter(DialInput.GIVE_UP)
            self._dials.remove(dial)
            return [], [SessionFailed(dial.task, dial.target.peer, None, True, dial.reason, dial.is_refused)]
        dial.enter(DialInput.DIAL)
        self._last_key += 1
        dial.key = self._last_key
        dial.deadline_ns = now_ns + (self._timings.connect_ms + self._timings.handshake_ms) * MS
        address = dial.target.addresses[dial.address]
        return [Dial(dial.key, address, dial.target.port, self._timings.connect_ms)], []

    # Sessions that other peers dial

    def accept(
        self, conn: int, nonce: bytes, hello: BulkHello, round_trip_ns: int = 0
    ) -> tuple[list[Effect], SessionOpened] | str | None:
        """Decide about an inbound connection. Effects and a session: it is open. Text: refuse it for this reason.

        None: the master has not announced its task here yet.
        """
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
        opened = SessionOpened(task, hello.source, conn, False, round_trip_ns)
        self.open[conn] = opened
        welcome = BulkWelcome(prove(expected.key, "visit_welcome", hello.nonce, nonce))
        return [SendMessage(conn, welcome), MakeBulk(conn)], opened

    def _fault_of(self, nonce: bytes, hello: BulkHello) -> str | None:
        """Why this hello is wrong; None also while the master has not announced its task here."""
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
            return "it does not know the secret of this session"
        if hello.target != self.me or hello.source not in expected.diallers:
            return f"peer {hello.source} has no session with peer {hello.target} here"
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
