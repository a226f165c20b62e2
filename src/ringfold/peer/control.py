"""The control connection: reaching a master, proving the token, and checking what a master sends. Pure.

The masters are tried in turn. A round without success is followed by a pause that doubles, until the deadline of the
join. A newcomer that all masters of a round refuse gives up: a wrong token stays wrong. A refusal with `again` comes
from a master that does not lead; the next one may.

A peer that was welcomed once has a *ticket*, with the secret that it was given. When its master is gone it tries all
masters again, with shorter timeouts and pauses, and proves the ticket: a master with a higher fence lets it resume.

Any process can listen at the port of a dead master. A peer of the run believes only what is proven with the token:
`Resumed`, `Evicted`, and that the run has ended. Everything else (another refusal, another protocol version, an
eviction without a proof) is a failed attempt, and the peer goes on to the next master until its deadline.

A master that has proven the token is trusted in what it decides, but its messages are still checked for values that no
master can mean: an epoch that does not fit its field in a frame, a ring without its dialers, a heartbeat every zero
milliseconds. Such a message would fail in the engine, after the machine has changed its state.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from ringfold.errors import ConfigError, Evicted, MasterUnreachable, RemoteProtocolError, RingfoldError
from ringfold.limits import MAX_CHANNELS, MAX_LANES_OF_A_PATH, MAX_PATHS
from ringfold.peer.effects import CloseConn, Dial, Effect, MakeControl, Notify, ResumeReading, SendMessage
from ringfold.peer.settings import MS, Identity, PeerTimings
from ringfold.peer.states import CONTROL_TRANSITIONS, ControlInput, ControlState, next_state
from ringfold.topology.ring import edges_of
from ringfold.wire import frames, messages
from ringfold.wire.decoding import checked
from ringfold.wire.diagnostics import explain_connect_error, explain_no_challenge, explain_not_a_master
from ringfold.wire.messages import (
    PROTOCOL_VERSION,
    Challenge,
    Epoch,
    FromMaster,
    Hello,
    Liveness,
    Measure,
    Member,
    PeerId,
    Record,
    Resumed,
    SyncPlan,
    Welcome,
)
from ringfold.wire.notices import MasterAway
from ringfold.wire.proof import NONCE_BYTES, prove, proven

LOG_EVERY_NS = 5_000 * MS
"""How often the log says why no master can be reached; the first time at once."""


@dataclass(slots=True)
class ControlFailed:
    """A master has refused this peer, or none was reached in time."""

    error: RingfoldError


@dataclass(slots=True)
class Ticket:
    """What lets a peer resume at another master: its id, its secret, and the newest fence and epoch that it knows."""

    peer: PeerId
    secret: bytes
    fence: int
    epoch: Epoch = 0


class Control:
    """The connection to the master, from the first dial on."""

    def __init__(self, identity: Identity, timings: PeerTimings) -> None:
        self.state = ControlState.IDLE
        self.conn: int | None = None
        self.masters: tuple[tuple[str, int], ...] = ()
        self._identity = identity
        self._timings = timings
        self._at = 0
        self._since_ns = 0
        self._deadline_ns = 0
        self._pause_ms = timings.master_retry_ms
        self._next_ns: int | None = None  # the next attempt when idle, the deadline of the handshake otherwise
        self._nonce = b""
        self._challenge = b""
        self.ticket: Ticket | None = None
        self._reasons: dict[str, str] = {}
        """Why the last attempt to reach each master failed."""
        self._log_ns: int | None = None
        self._refusals: list[ConfigError] = []
        """Of a newcomer, in this round of masters."""

    def _enter(self, given: ControlInput) -> None:
        self.state = next_state(CONTROL_TRANSITIONS, self.state, given)

    @property
    def is_proven(self) -> bool:
        return self.state is ControlState.PROVEN

    @property
    def key(self) -> bytes:
        """Both nonces of this connection: what the connection of this peer's guardian is proven with."""
        return self._challenge + self._nonce

    @property
    def address(self) -> str:
        return _shown(*self.masters[self._at])

    @property
    def addresses(self) -> tuple[str, ...]:
        """Of all masters, from this one on."""
        return tuple(_shown(*master) for master in (*self.masters[self._at :], *self.masters[: self._at]))

    def next_deadline_ns(self) -> int | None:
        if self.is_proven or not self.masters:
            return None
        return self._deadline_ns if self._next_ns is None else min(self._next_ns, self._deadline_ns)

    def start(self, now_ns: int, masters: tuple[tuple[str, int], ...], deadline_ns: int) -> list[Effect]:
        """Reach one of `masters` before the deadline."""
        assert masters
        self.masters = masters
        self._at = 0
        self._since_ns = now_ns
        self._deadline_ns = deadline_ns
        return self._dial()

    def lost(self, now_ns: int, deadline_ns: int, epoch: Epoch) -> list[Effect]:
        """The master is gone: seek one, this or another, until the deadline. The next one in the list is tried first,
        because this one is down."""
        assert self.ticket is not None
        self.ticket.epoch = epoch
        self._enter(ControlInput.LOST)
        self.conn = None
        self._since_ns = now_ns
        self._deadline_ns = deadline_ns
        self._pause_ms = self._timings.master_retry_ms
        self._reasons = {}
        self._log_ns = None
        self._at = (self._at + 1) % len(self.masters)
        return self._dial()

    def dialled(self, conn: int) -> None:
        self.conn = conn

    def opened(self, now_ns: int, nonce: bytes) -> None:
        self._enter(ControlInput.OPENED)
        self._nonce = nonce
        self._next_ns = now_ns + self._timeout_ms * MS

    @property
    def may_resume(self) -> bool:
        """Whether another master could know this peer: its own one has a journal."""
        return self.ticket is not None and bool(self.ticket.secret)

    @property
    def _timeout_ms(self) -> int:
        return self._timings.handshake_ms if self.ticket is None else self._timings.reconnect_try_ms

    def failed(self, now_ns: int, reason: str) -> list[Effect]:
        """This attempt failed: try the next master, after a pause when all were tried."""
        self._reasons[self.address] = reason
        self._enter(ControlInput.ATTEMPT_FAILED)
        self.conn = None
        if self._at + 1 < len(self.masters):
            self._at += 1
            return self._dial()
        self._next_ns = now_ns + self._pause_ms * MS
        timings = self._timings
        max_ms = timings.master_retry_most_ms if self.ticket is None else timings.reconnect_most_ms
        self._pause_ms = min(2 * self._pause_ms, max_ms)
        if self._log_ns is not None and now_ns < self._log_ns:
            return []
        self._log_ns = now_ns + LOG_EVERY_NS
        left_ms = max(0, self._deadline_ns - now_ns) // MS
        return [Notify(MasterAway(dict(self._reasons), left_ms, self._timeout_setting))]

    def not_connected(self, now_ns: int, reason: str) -> list[Effect]:
        """No connection was established."""
        return self.failed(now_ns, explain_connect_error(reason))

    def closed(self, now_ns: int, reason: str) -> list[Effect]:
        """The connection ended in the handshake."""
        if self.state is ControlState.DIALLING:
            return self.not_connected(now_ns, reason)
        if self.state is ControlState.CHALLENGE:
            return self.failed(now_ns, explain_not_a_master(reason))
        return self.failed(now_ns, f"it closed the connection in the handshake ({reason})")

    @property
    def _timeout_setting(self) -> str:
        """The setting that limits the attempts."""
        return "master_patience_s" if self.ticket is not None and self.ticket.epoch else "join_timeout_s"

    def tick(self, now_ns: int) -> list[Effect] | ControlFailed:
        if self.is_proven or not self.masters:
            return []
        if now_ns >= self._deadline_ns:
            return ControlFailed(self._unreachable())
        if self._next_ns is None or now_ns < self._next_ns:
            return []
        if self.state is ControlState.IDLE:
            self._at = 0
            self._refusals.clear()
            return self._dial()
        assert self.conn is not None
        is_silent = self.state is ControlState.CHALLENGE
        reason = explain_no_challenge(self._timeout_ms) if is_silent else "it did not answer the handshake in time"
        return self._close(now_ns, reason)

    def _unreachable(self) -> MasterUnreachable:
        """No master was reached before the deadline: the reason for each."""
        reasons = self._reasons or {self.address: "no attempt has ended yet"}
        over = f"given up after {(self._deadline_ns - self._since_ns) / MS / 1000:.1f} s, {self._timeout_setting}"
        if len(reasons) == 1:
            [(address, reason)] = reasons.items()
            return MasterUnreachable(address, f"{reason} ({over})")
        why = "; ".join(f"{address}: {reason}" for address, reason in reasons.items())
        return MasterUnreachable(", ".join(reasons), f"{why} ({over})")

    def message(self, now_ns: int, body: bytes) -> tuple[list[Effect], Welcome | Resumed | ControlFailed | None]:
        """One message of the handshake: effects, and the outcome if this was the last one."""
        assert self.conn is not None
        try:
            message = decode_from_master(body)
        except RemoteProtocolError as error:
            is_first = self.state is ControlState.CHALLENGE
            reason = explain_not_a_master(str(error)) if is_first else f"it breaks the protocol ({error})"
            return self._close(now_ns, reason), None
        match message:
            case Challenge() if self.state is ControlState.CHALLENGE:
                return self._send_hello(now_ns, message)
            case Welcome() if self.state is ControlState.WELCOME:
                return self._welcomed(now_ns, message)
            case Resumed() if self.state is ControlState.WELCOME and self.ticket is not None:
                return self._resumed(now_ns, message, self.ticket)
            case messages.Evicted(reason=reason, proof=proof) if self._proves("evicted", reason, proof) and self.ticket:
                return [], ControlFailed(Evicted(reason))
            case messages.Refused(reason=reason, proof=proof) if self._proves("refused", reason, proof):
                return [], ControlFailed(ConfigError(f"the master at {self.address} refused this peer: {reason}"))
            case messages.Refused(reason=reason, again=True):
                return self._close(now_ns, reason), None
            case messages.Refused(reason=reason):
                return self._refused(now_ns, f"refused this peer: {reason}")
            case _:
                return self._close(now_ns, f"it sent {type(message).__name__} out of turn"), None

    def _close(self, now_ns: int, reason: str) -> list[Effect]:
        """End this attempt, and go on to the next master."""
        assert self.conn is not None
        return [CloseConn(self.conn, reason), *self.failed(now_ns, reason)]

    def _dial(self) -> list[Effect]:
        self._enter(ControlInput.DIAL)
        self._next_ns = None
        host, port = self.masters[self._at]
        return [Dial(CONTROL_KEY, host, port, self._timeout_ms)]

    def _proves(self, purpose: str, reason: str, proof: bytes) -> bool:
        """Whether the sender has proven the run's token."""
        if self.state is not ControlState.WELCOME:
            return False
        return proven(self._identity.token, proof, purpose, self._challenge, self._nonce, reason.encode())

    def _refused(self, now_ns: int, what: str) -> tuple[list[Effect], ControlFailed | None]:
        """A server at a master's address refuses this peer without a proof: `what` it did.

        A newcomer gives up when all masters of the list refuse it. For a member it is a failed attempt.
        """
        if self.ticket is None:
            self._refusals.append(ConfigError(f"the master at {self.address} {what}"))
            if len(self._refusals) == len(self.masters):
                return [], ControlFailed(self._refusals[0])
        return self._close(now_ns, f"it {what}"), None

    def _send_hello(self, now_ns: int, challenge: Challenge) -> tuple[list[Effect], ControlFailed | None]:
        assert self.conn is not None
        if not challenge.oldest <= PROTOCOL_VERSION <= challenge.newest:
            spoken = f"{challenge.oldest} to {challenge.newest}"
            return self._refused(
                now_ns,
                f"speaks protocol versions {spoken}, this peer {PROTOCOL_VERSION}; install matching versions",
            )
        me = self._identity
        self._enter(ControlInput.HELLO_SENT)
        self._challenge = challenge.nonce
        if self.ticket is not None:
            return [SendMessage(self.conn, self._resume(self.ticket)), ResumeReading(self.conn)], None
        hello = Hello(
            version=PROTOCOL_VERSION,
            group=me.group,
            host=me.host,
            name=me.name,
            addresses=list(me.addresses),
            paths=me.paths,
            cores=me.cores,
            threads=me.threads,
            here=me.here,
            port=me.port,
            nonce=self._nonce,
            proof=prove(me.token, "hello", challenge.nonce, self._nonce),
            probes=me.probes,
            listen_only=me.listen_only,
            run=me.run,
        )
        assert len(self._nonce) == NONCE_BYTES
        return [SendMessage(self.conn, hello), ResumeReading(self.conn)], None

    def _resume(self, ticket: Ticket) -> messages.Resume:
        me, nonces = self._identity, (self._challenge, self._nonce)
        return messages.Resume(
            version=PROTOCOL_VERSION,
            peer=ticket.peer,
            fence=ticket.fence,
            epoch=ticket.epoch,
            group=me.group,
            host=me.host,
            name=me.name,
            addresses=list(me.addresses),
            port=me.port,
            nonce=self._nonce,
            proof=prove(me.token, "resume", *nonces),
            member_proof=prove(ticket.secret, "member", *nonces),
            probes=me.probes,
            listen_only=me.listen_only,
            paths=me.paths,
            cores=me.cores,
            threads=me.threads,
            here=me.here,
            run=me.run,
        )

    def _resumed(self, now_ns: int, message: Resumed, ticket: Ticket) -> tuple[list[Effect], Resumed | None]:
        """A master knows this peer. A master whose fence is not higher than the ticket's does not lead."""
        bound = (self._challenge, self._nonce, message.fence.to_bytes(8, "little"))
        expected = prove(ticket.secret, "resumed", *bound)
        is_proven = proven(self._identity.token, message.proof, "resumed", *bound, expected)
        if message.fence <= ticket.fence or not is_proven:
            reason = f"its fence is {message.fence}, and this peer knows {ticket.fence}, or its proof is wrong"
            return self._close(now_ns, reason), None
        ticket.fence = message.fence
        return self._proven(message.liveness), message

    def _proven(self, liveness: messages.Liveness) -> list[Effect]:
        assert self.conn is not None
        self._enter(ControlInput.PROVED)
        self._next_ns = None
        dead_after_ms = self._timings.master_patience * liveness.evict_after_ms
        return [MakeControl(self.conn, liveness.heartbeat_ms, dead_after_ms)]

    def _welcomed(self, now_ns: int, welcome: Welcome) -> tuple[list[Effect], Welcome | ControlFailed | None]:
        if not proven(self._identity.token, welcome.proof, "welcome", self._nonce, self._challenge):
            return self._refused(now_ns, "does not know this run's token")
        self.ticket = Ticket(welcome.peer, welcome.secret, welcome.fence)
        return self._proven(welcome.liveness), welcome


def _shown(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


CONTROL_KEY = 0
"""The key of the dial to a master; lanes count from 1."""


_I31, _U32, _U63, _U64 = 1 << 31, 1 << 32, 1 << 63, 1 << 64
MAX_MEMBERS = 65_535
MAX_MEASURE_MS = 3_600_000
MAX_EVICT_MS = 24 * 3_600_000
"""Far more than the setting allows; a peer waits a few times as long, and the engine counts that in 31 bits."""


def decode_from_master(body: bytes) -> FromMaster:
    """The decoded message; RemoteProtocolError if it is none, or not one that a master sends."""
    message = frames.decode_from_master(body)
    if (fault := checked(fault_of, message)) is not None:
        raise RemoteProtocolError(f"{type(message).__name__}: {fault}")
    return message


def fault_of(message: FromMaster) -> str | None:
    """What is wrong with the message, in any state; None if nothing is."""
    match message:
        case Welcome(peer=peer, fence=fence, liveness=liveness):
            if not 0 < peer < _U63:
                return f"{peer} is no peer's number"
            return _fence_fault(fence) or _liveness_fault(liveness)
        case Resumed(fence=fence, liveness=liveness):
            return _fence_fault(fence) or _liveness_fault(liveness)
        case Record():
            return _record_fault(message)
        case messages.Seal(epoch=epoch) | messages.Installed(epoch=epoch):
            return None if 0 <= epoch < _U32 else f"there is no epoch {epoch}"
        case messages.Registrations(count=count):
            return None if 0 <= count < _U63 else f"there are no {count} registrations"
        case SyncPlan():
            return _plan_fault(message)
        case Measure(test=test, other=other, most_ms=most_ms):
            if not 0 <= test < _U63 or not 0 < most_ms <= MAX_MEASURE_MS:
                return f"measurement {test} for {most_ms} ms"
            return _members_fault([other])
        case _:
            return None


def _fence_fault(fence: int) -> str | None:
    return None if 0 <= fence < _U63 else f"there is no fence {fence}"


def _liveness_fault(liveness: Liveness) -> str | None:
    if 0 < liveness.heartbeat_ms < liveness.evict_after_ms <= MAX_EVICT_MS:
        return None
    return f"a heartbeat every {liveness.heartbeat_ms} ms, and eviction after {liveness.evict_after_ms} ms"


def _record_fault(record: Record) -> str | None:
    if not 0 < record.epoch < _U32 or not 0 <= record.previous < record.epoch:
        return f"epoch {record.epoch} after epoch {record.previous}"
    if not 0 < len(record.members) <= MAX_MEMBERS:
        return f"{len(record.members)} members"
    if (fault := _members_fault(record.members)) is not None:
        return fault
    edges = edges_of([member.peer for member in record.members])
    if len(record.dialers) != len(edges) or any(
        dialer not in edge for dialer, edge in zip(record.dialers, edges, strict=True)
    ):
        return "its dialers are not ends of its edges"
    if not 0 < record.channels <= MAX_CHANNELS:
        return f"{record.channels} channels"
    if not 0 < record.lanes * record.channels <= MAX_LANES_OF_A_PATH:
        return f"{record.lanes} lanes in each of {record.channels} channels"
    if record.hosts != 1 and not (
        1 < record.hosts <= len(record.members) // 2
        and len(record.members) % record.hosts == 0
        and record.lanes == 1
        and all(member.paths == 1 for member in record.members)
    ):
        return f"{len(record.members)} members with {record.lanes} lanes on {record.hosts} hosts"
    if not (0 <= record.small_bytes < _I31 and 0 < record.segment_bytes < _I31):
        return f"small ops up to {record.small_bytes} bytes, segments of {record.segment_bytes}"
    if not 0 <= record.registrations < _U63:
        return f"{record.registrations} registrations"
    for verdict in record.verdicts:
        op = verdict.op
        if not (0 <= op.tag < _U64 and 0 <= op.sequence < _U32 and 0 <= verdict.registrations < _U63):
            return f"a verdict about tag {op.tag} sequence {op.sequence}"
        if len(verdict.descriptor) != frames.DESCRIPTOR_BYTES:
            return f"a verdict about an op with a descriptor of {len(verdict.descriptor)} bytes"
    return _fence_fault(record.fence)


def _plan_fault(plan: SyncPlan) -> str | None:
    if not (0 <= plan.sync < _U63 and 0 <= plan.revision < _U63):
        return f"sync {plan.sync} of revision {plan.revision}"
    return _members_fault(plan.holders) or _members_fault(plan.receivers)


def _members_fault(members: Sequence[Member]) -> str | None:
    if len({member.peer for member in members}) < len(members):
        return "a member comes twice"
    for member in members:
        if not 0 < member.peer < _U63 or not 0 < member.port < 1 << 16:
            return f"peer {member.peer} at port {member.port}"
        if not 0 < member.paths <= MAX_PATHS or (member.paths > 1 and len(member.addresses) < member.paths):
            return f"peer {member.peer} has {member.paths} paths over {len(member.addresses)} addresses"
        if not messages.is_local_name(member.here):
            return f"peer {member.peer} is to be reached at {member.here[:80]!r} on its host"
    return None
