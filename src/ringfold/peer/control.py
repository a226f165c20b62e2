"""Reaching the master and proving the token: from an address to a control connection. Pure.

The masters are tried in turn, and a round without success is followed by a pause that doubles, until the join's
deadline. A newcomer that all masters of a round refuse gives up: a wrong token does not get better by asking again. One
that may be asked `again` does not lead, and the next one may.

A peer that was welcomed once has a *ticket*, the secret that it was given. When its master is gone it goes around
again, shorter at each and sooner back, and shows the ticket: a master with a higher fence lets it go on where it was.

Whoever listens at a dead master's port can say anything. A peer of the run believes only what is proven with the token:
`Resumed`, `Evicted`, and that the run has ended. Everything else (another refusal, a foreign version, an eviction
without a proof) is an attempt that failed, and the peer goes on to the next master, until its patience ends.
"""

from dataclasses import dataclass
from typing import Literal

from ringfold.errors import ConfigError, Evicted, MasterUnreachable, RemoteProtocolError, RingfoldError
from ringfold.peer.effects import CloseConn, Dial, Effect, MakeControl, Resume, SendMessage, Tell
from ringfold.peer.incoming import decode_from_master
from ringfold.peer.settings import MS, Identity, PeerTimings
from ringfold.wire import messages
from ringfold.wire.diagnostics import explain_connect_error, explain_no_challenge, explain_not_a_master
from ringfold.wire.messages import PROTOCOL_VERSION, Challenge, Epoch, Hello, PeerId, Resumed, Welcome
from ringfold.wire.notices import MasterAway
from ringfold.wire.proof import NONCE_BYTES, prove, proven

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
        return self.failed(now_ns, explain_connect_error(reason))

    def closed(self, now_ns: int, reason: str) -> list[Effect]:
        """The connection ended in the handshake, or was ended because of what came."""
        if self.stage == "dialling":
            return self.not_connected(now_ns, reason)
        if self.stage == "challenge":
            return self.failed(now_ns, explain_not_a_master(reason))
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
        reason = (
            explain_no_challenge(self._try_ms)
            if self.stage == "challenge"
            else "it did not answer the handshake in time"
        )
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
            reason = (
                explain_not_a_master(str(error)) if self.stage == "challenge" else f"it breaks the protocol ({error})"
            )
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
