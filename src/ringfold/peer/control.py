"""The control connection: reaching a master, proving the token, and checking what a master sends. Pure.

The masters are tried in turn. A round without success is followed by a pause that doubles, until the deadline of the
join. A newcomer that all masters of a round refuse gives up: a wrong token stays wrong. A refusal with `again` comes
from a master that does not lead; the next one may.

A peer that was welcomed once has a *ticket*, with the secret that it was given. When its master is gone it tries all
masters again, with shorter timeouts and pauses, and proves the ticket: a master with a higher fence lets it resume.

Anybody can listen at the port of a dead master. A peer of the run believes only what is proven with the token:
`Resumed`, `Evicted`, and that the run has ended. Everything else (another refusal, another protocol version, an
eviction without a proof) is a failed attempt, and the peer goes on to the next master until its deadline.

A master that has proven the token is trusted in what it decides, but its messages are still checked for values that no
master can mean: an epoch that does not fit its field in a frame, a ring without its dialers, a heartbeat every zero
milliseconds. Such a message would fail in the engine, after the machine has changed its state.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from ringfold.errors import ConfigError, Evicted, MasterUnreachable, RemoteProtocolError, RingfoldError
from ringfold.peer.effects import CloseConn, Dial, Effect, MakeControl, Resume, SendMessage, Tell
from ringfold.peer.settings import MS, Identity, PeerTimings
from ringfold.topology.ring import edges_of
from ringfold.wire import frames, messages
from ringfold.wire.decoding import checked
from ringfold.wire.events import MasterAway
from ringfold.wire.messages import (
    MAX_PATHS,
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
from ringfold.wire.proof import NONCE_BYTES, prove, proven
from ringfold.wire.reaching import in_plain_words, not_a_master, said_nothing

TELL_NS = 5_000 * MS
"""How often the log says why nobody can be reached; the first time at once."""

Stage = Literal["idle", "dialling", "challenge", "welcome", "proven"]


@dataclass(slots=True)
class Refusal:
    """The master will not have this peer, or nobody can be reached any more."""

    error: RingfoldError


@dataclass(slots=True)
class Ticket:
    """What lets a peer come back: who it is, its secret, and the newest fence and epoch that it knows."""

    peer: PeerId
    secret: bytes
    fence: int
    epoch: Epoch = 0


class Control:
    """The control connection, and the way to it."""

    def __init__(self, identity: Identity, timings: PeerTimings) -> None:
        self.stage: Stage = "idle"
        self.conn: int | None = None
        self.masters: tuple[tuple[str, int], ...] = ()
        self._identity, self._timings = identity, timings
        self._at = 0
        self._since_ns = self._deadline_ns = 0
        self._pause_ms = timings.master_retry_ms
        self._next_ns: int | None = None  # the next try when idle, the end of the handshake otherwise
        self._nonce = self._challenge = b""
        self.ticket: Ticket | None = None
        self._reasons: dict[str, str] = {}
        """Why each master could not be reached when it was last tried."""
        self._tell_ns: int | None = None
        self._refusals: list[ConfigError] = []
        """Of a newcomer, in this round of masters."""

    @property
    def address(self) -> str:
        return _shown(*self.masters[self._at])

    @property
    def addresses(self) -> tuple[str, ...]:
        """Of all masters, from this one on."""
        return tuple(_shown(*master) for master in (*self.masters[self._at :], *self.masters[: self._at]))

    def next_deadline_ns(self) -> int | None:
        if self.stage == "proven" or not self.masters:
            return None
        return self._deadline_ns if self._next_ns is None else min(self._next_ns, self._deadline_ns)

    def start(self, now_ns: int, masters: tuple[tuple[str, int], ...], deadline_ns: int) -> list[Effect]:
        assert self.stage == "idle"
        assert masters
        self.masters, self._deadline_ns, self._at = masters, deadline_ns, 0
        self._since_ns = now_ns
        return self._dial()

    def lost(self, now_ns: int, deadline_ns: int, epoch: Epoch) -> list[Effect]:
        """The master is gone: look for one, this or another, until the deadline. The next one in the list comes first,
        because this one is not there."""
        assert self.ticket is not None
        self.ticket.epoch = epoch
        self.stage, self.conn, self._deadline_ns = "idle", None, deadline_ns
        self._pause_ms = self._timings.master_retry_ms
        self._reasons, self._tell_ns, self._since_ns = {}, None, now_ns
        self._at = (self._at + 1) % len(self.masters)
        return self._dial()

    def dialled(self, conn: int) -> None:
        self.conn = conn

    def opened(self, now_ns: int, nonce: bytes) -> None:
        self.stage, self._nonce = "challenge", nonce
        self._next_ns = now_ns + self._try_ms * MS

    @property
    def may_return(self) -> bool:
        """Whether another master could know this peer: its own keeps a journal."""
        return self.ticket is not None and bool(self.ticket.secret)

    @property
    def _try_ms(self) -> int:
        return self._timings.handshake_ms if self.ticket is None else self._timings.reconnect_try_ms

    def failed(self, now_ns: int, reason: str) -> list[Effect]:
        """This try came to nothing: the next master, after a pause when all were tried."""
        self._reasons[self.address] = reason
        self.stage, self.conn = "idle", None
        if self._at + 1 < len(self.masters):
            self._at += 1
            return self._dial()
        self._next_ns = now_ns + self._pause_ms * MS
        timings = self._timings
        longest_ms = timings.master_retry_most_ms if self.ticket is None else timings.reconnect_most_ms
        self._pause_ms = min(2 * self._pause_ms, longest_ms)
        if self._tell_ns is not None and now_ns < self._tell_ns:
            return []
        self._tell_ns = now_ns + TELL_NS
        return [Tell(MasterAway(dict(self._reasons), max(0, self._deadline_ns - now_ns) // MS, self._patience))]

    def not_connected(self, now_ns: int, reason: str) -> list[Effect]:
        """Nobody took the connection."""
        return self.failed(now_ns, in_plain_words(reason))

    def closed(self, now_ns: int, reason: str) -> list[Effect]:
        """The connection ended in the handshake, or was ended because of what came."""
        if self.stage == "dialling":
            return self.not_connected(now_ns, reason)
        if self.stage == "challenge":
            return self.failed(now_ns, not_a_master(reason))
        return self.failed(now_ns, f"it closed the connection in the handshake ({reason})")

    @property
    def _patience(self) -> str:
        """The setting that ends the attempts."""
        return "master_patience_s" if self.ticket is not None and self.ticket.epoch else "join_timeout_s"

    def tick(self, now_ns: int) -> list[Effect] | Refusal:
        if self.stage == "proven" or not self.masters:
            return []
        if now_ns >= self._deadline_ns:
            return Refusal(self._unreachable())
        if self._next_ns is None or now_ns < self._next_ns:
            return []
        if self.stage == "idle":
            self._at = 0
            self._refusals.clear()
            return self._dial()
        assert self.conn is not None
        reason = said_nothing(self._try_ms) if self.stage == "challenge" else "it did not answer the handshake in time"
        return [CloseConn(self.conn, reason), *self.failed(now_ns, reason)]

    def _unreachable(self) -> MasterUnreachable:
        """Nobody of the list, until the end: why not, of each."""
        reasons = self._reasons or {self.address: "no attempt has ended yet"}
        over = f"given up after {(self._deadline_ns - self._since_ns) / MS / 1000:.1f} s, {self._patience}"
        if len(reasons) == 1:
            [(address, reason)] = reasons.items()
            return MasterUnreachable(address, f"{reason} ({over})")
        why = "; ".join(f"{address}: {reason}" for address, reason in reasons.items())
        return MasterUnreachable(", ".join(reasons), f"{why} ({over})")

    def message(self, now_ns: int, body: bytes) -> tuple[list[Effect], Welcome | Resumed | Refusal | None]:
        """One message of the handshake: what to do, and the outcome if this was the last one."""
        assert self.conn is not None
        try:
            said = decode_from_master(body)
        except RemoteProtocolError as error:
            reason = not_a_master(str(error)) if self.stage == "challenge" else f"it breaks the protocol ({error})"
            return [CloseConn(self.conn, reason), *self.failed(now_ns, reason)], None
        match said:
            case Challenge() if self.stage == "challenge":
                return self._answer(now_ns, said)
            case Welcome() if self.stage == "welcome":
                return self._welcomed(now_ns, said)
            case Resumed() if self.stage == "welcome" and self.ticket is not None:
                return self._resumed(now_ns, said, self.ticket)
            case messages.Evicted(reason=reason, proof=proof) if self._proves("evicted", reason, proof) and self.ticket:
                return [], Refusal(Evicted(reason))
            case messages.Refused(reason=reason, proof=proof) if self._proves("refused", reason, proof):
                return [], Refusal(ConfigError(f"the master at {self.address} refused this peer: {reason}"))
            case messages.Refused(reason=reason, again=True):
                return [CloseConn(self.conn, reason), *self.failed(now_ns, reason)], None
            case messages.Refused(reason=reason):
                return self._refused(now_ns, f"refused this peer: {reason}")
            case _:
                reason = f"it said {type(said).__name__} out of turn"
                return [CloseConn(self.conn, reason), *self.failed(now_ns, reason)], None

    def _dial(self) -> list[Effect]:
        self.stage, self._next_ns = "dialling", None
        host, port = self.masters[self._at]
        return [Dial(CONTROL_KEY, host, port, self._try_ms)]

    def _proves(self, purpose: str, reason: str, proof: bytes) -> bool:
        """Whether who says so knows the run's token."""
        nonces = (self._challenge, self._nonce)
        return self.stage == "welcome" and proven(self._identity.token, proof, purpose, *nonces, reason.encode())

    def _refused(self, now_ns: int, what: str) -> tuple[list[Effect], Refusal | None]:
        """Somebody at a master's address does not want this peer, and proves nothing: `what` it did.

        A newcomer has nothing to lose, and gives up when nobody in the list wants it. Else it is a try that failed.
        """
        assert self.conn is not None
        if self.ticket is None:
            self._refusals.append(ConfigError(f"the master at {self.address} {what}"))
            if len(self._refusals) == len(self.masters):
                return [], Refusal(self._refusals[0])
        return [CloseConn(self.conn, f"it {what}"), *self.failed(now_ns, f"it {what}")], None

    def _answer(self, now_ns: int, challenge: Challenge) -> tuple[list[Effect], Refusal | None]:
        assert self.conn is not None
        if not challenge.oldest <= PROTOCOL_VERSION <= challenge.newest:
            spoken = f"{challenge.oldest} to {challenge.newest}"
            return self._refused(
                now_ns,
                f"speaks protocol versions {spoken}, this peer {PROTOCOL_VERSION}; install matching versions",
            )
        me = self._identity
        self.stage, self._challenge = "welcome", challenge.nonce
        if self.ticket is not None:
            return [SendMessage(self.conn, self._resume(self.ticket)), Resume(self.conn)], None
        hello = Hello(
            version=PROTOCOL_VERSION,
            group=me.group,
            host=me.host,
            name=me.name,
            addresses=list(me.addresses),
            paths=me.paths,
            port=me.port,
            nonce=self._nonce,
            proof=prove(me.token, "hello", challenge.nonce, self._nonce),
            probes=me.probes,
            run=me.run,
        )
        assert len(self._nonce) == NONCE_BYTES
        return [SendMessage(self.conn, hello), Resume(self.conn)], None

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
            paths=me.paths,
            run=me.run,
        )

    def _resumed(self, now_ns: int, said: Resumed, ticket: Ticket) -> tuple[list[Effect], Resumed | None]:
        """A master knows this peer. One whose fence is no higher than what is known here does not lead."""
        assert self.conn is not None
        bound = (self._challenge, self._nonce, said.fence.to_bytes(8, "little"))
        expected = prove(ticket.secret, "resumed", *bound)
        if said.fence <= ticket.fence or not proven(self._identity.token, said.proof, "resumed", *bound, expected):
            reason = f"its fence is {said.fence}, and this peer knows {ticket.fence}, or its proof is wrong"
            return [CloseConn(self.conn, reason), *self.failed(now_ns, reason)], None
        ticket.fence = said.fence
        return self._proven(said.liveness), said

    def _proven(self, liveness: messages.Liveness) -> list[Effect]:
        assert self.conn is not None
        self.stage, self._next_ns = "proven", None
        dead_after_ms = self._timings.master_patience * liveness.evict_after_ms
        return [MakeControl(self.conn, liveness.heartbeat_ms, dead_after_ms)]

    def _welcomed(self, now_ns: int, welcome: Welcome) -> tuple[list[Effect], Welcome | Refusal | None]:
        assert self.conn is not None
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
MAX_LANES = 4_096
"""Of one link: far more than the setting `lanes` allows."""
MAX_MEASURE_MS = 3_600_000
MAX_EVICT_MS = 24 * 3_600_000
"""Far more than the setting allows; a peer waits a few times as long, and the engine counts that in 31 bits."""


def decode_from_master(body: bytes) -> FromMaster:
    """The message; RemoteProtocolError if it is none, or none that a master sends."""
    message = frames.decode_from_master(body)
    if (fault := checked(fault_of, message)) is not None:
        raise RemoteProtocolError(f"{type(message).__name__}: {fault}")
    return message


def fault_of(message: FromMaster) -> str | None:
    """What is wrong with the message by itself, whatever the state; None if nothing is."""
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
    if not 0 < record.lanes <= MAX_LANES // MAX_PATHS:
        return f"{record.lanes} lanes"
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
    return None
