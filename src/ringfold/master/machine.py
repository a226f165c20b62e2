"""The master of a run: a pure state machine, `step(now, event) -> effects`.

The run it keeps has peers, and the peers are in groups. Each group has a numbered *epoch*: an agreement on its members
and their order around the ring. Everything a master does comes down to these:

* It keeps the door (here): a connection proves the token, and becomes a peer, a node that only probes, or a watcher,
  or is dropped with a reason.
* It changes epochs (`epochs.py`): whoever comes or goes, and whatever breaks, the group seals its epoch, and gets a new
  one with a verdict for each op that was in doubt (`verdicts.py`). Ops themselves need no master; where evidence
  travels through it, it counts Dones and nothing else (`ops.py`, `evidence.py`).
* It keeps the rounds of probing (`probing.py`): who probes whom, when windows end, and what they say together.
* It goes on with a run that another master began (`journal.py`, `returning.py`), and makes sure that others can go on
  with its own: what must not be forgotten is written down before it is said.
* It evicts who is silent (`liveness.py`), who keeps all others waiting (`stalls.py`), and whom somebody wants out
  (`evicting.py`).
* It answers run-wide calls (`calls.py`). Two kinds take long: a sync of shared state (`syncs.py`), and the choice of
  better rings by measured links (`topology.py`).
* It decides who is right where members call different things (`disputes.py`), or what can never meet (`meeting.py`).

It trusts nobody. A message that no honest peer could send raises RemoteProtocolError where it is noticed; `step` drops
the connection that sent it, and a peer behind it is evicted. Messages that merely crossed with a newer decision are
normal and are ignored. So no input raises; an AssertionError is a bug in here. Whatever a check or a rendering raises,
which change nothing, counts as RemoteProtocolError (`checked`): a bug there costs one connection. A bug in what changes
the tables ends the master, which its journal outlives.

The state lives in tables (`run.py`). After each event the machine settles: it moves everything on that the facts allow,
so that what happens depends on what is true and not on the order in which it became true.
"""

import functools
import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import assert_never

from msgspec import structs

from ringfold.config import DEFAULT_RUN
from ringfold.errors import RemoteProtocolError
from ringfold.master import life as lives
from ringfold.master import verdicts
from ringfold.master.calls import Calls
from ringfold.master.claims import OLDEST_VERSION, RunClaim, check_claim, check_facts
from ringfold.master.disputes import Disputes
from ringfold.master.epochs import Epochs
from ringfold.master.events import (
    Beat,
    Close,
    Closed,
    Conn,
    DoneSeen,
    Effect,
    Ended,
    Event,
    Malformed,
    MoonshotFound,
    Ns,
    Opened,
    Piece,
    Received,
    Send,
    SendBeat,
    Tick,
    Trust,
)
from ringfold.master.evicting import check_request, choose, reasons
from ringfold.master.journal import Journal, restore, restore_links
from ringfold.master.keeping import Keeping
from ringfold.master.life import Life
from ringfold.master.liveness import MS, PatientClock, evict_reason, silent_ms, suspected
from ringfold.master.ops import Ops
from ringfold.master.probing import Probing
from ringfold.master.returning import Returning
from ringfold.master.run import Connection, Peer, Run, Standing
from ringfold.master.settings import MasterSettings
from ringfold.master.stalls import Watchdog
from ringfold.master.status import render_status, render_waiting
from ringfold.master.syncs import Syncs
from ringfold.master.topology import Topology
from ringfold.master.verdicts import Cause
from ringfold.probe.graph.draw import draw
from ringfold.probe.rounds.calculation import Calculation
from ringfold.probe.rounds.master import RoundMaster
from ringfold.wire.decoding import checked
from ringfold.wire.frames import Heartbeat
from ringfold.wire.messages import (
    PROTOCOL_VERSION,
    Attached,
    AttachFailed,
    Busy,
    Challenge,
    EvictRequest,
    EvictResponse,
    ForgetRun,
    Hello,
    Leave,
    LinkLost,
    Measured,
    OpCancelled,
    OpMismatch,
    OpTimeout,
    PeerId,
    Refused,
    Registrations,
    Resume,
    Resumed,
    Returned,
    RunsRequest,
    Sealed,
    SealedOp,
    Status,
    StatusRequest,
    SyncReport,
    ToMaster,
    Verdict,
    Vote,
    VoteWithdrawn,
    Welcome,
)
from ringfold.wire.notices import ConnectionDropped, PeerRegistered, PeerSuspected
from ringfold.wire.probing import KEY_BYTES, NodeHello, ProbeCommand, RoundAlarm, RoundReport
from ringfold.wire.proof import derive, prove, proven
from ringfold.wire.status import RunInfo, RunState, Waiting


class Master:
    """One run. `run_secret` is fresh randomness; `token` may be empty (then everybody can prove it). `now_ns` is a
    clock that decides nothing: it tells how long a calculation took."""

    def __init__(
        self,
        settings: MasterSettings,
        token: bytes,
        run_secret: bytes,
        fence: int = 1,
        started_ns: Ns = 0,
        now_ns: Callable[[], Ns] = lambda: 0,
        journal: Journal | None = None,
        leader: str = "",
        *,
        keeps_journal: bool = False,
        links: bytes = b"",
        name: str = DEFAULT_RUN,
        wall_s: Callable[[], int] = int,
        life: Life | None = None,
    ) -> None:
        """With `journal` the run goes on from there, under its secret; `fence` must be higher than the journal's.
        `links` is what the last `KeepLinks` gave, if anything; `life` how a run ended whose journal is closed."""
        self.settings = settings
        self.fence = fence
        if journal is not None:
            assert fence > journal.fence, "a master that takes over has a higher fence"
            run_secret = journal.secret
        self._secret, self._leader = run_secret, leader
        self._token = token
        self._started_ns = started_ns
        self._clock = PatientClock(started_ns)
        self._run = Run(settings, name, wall_s)
        if life is not None:
            self._run.life, self._run.revision = life, life.revision
        if journal is not None:
            restore(self._run, journal, started_ns)
            restore_links(self._run, links, started_ns)
        self._keeping = Keeping(self._run, fence, run_secret, leader, is_on=keeps_journal)
        self._epochs = Epochs(self._run, run_secret, fence, lambda seals, causes: self._verdicts(seals, causes))
        self._disputes = Disputes(self._run, self._epochs)
        self._ops = Ops(self._run, self._epochs, self._disputes)
        self._watchdog = Watchdog(self._run, self._epochs, self._ops.failed)
        self._returning = Returning(self._run, self._epochs, fence)
        self._syncs = Syncs(self._run, run_secret)
        self._topology = Topology(self._run, self._epochs, run_secret)
        self._calls = Calls(self._run, self._epochs, self._syncs, self._topology, self._disputes)
        key = functools.partial(_probe_key, run_secret)
        rounds = settings.rounds if self._run.probing is None else replace(settings.rounds, is_on=self._run.probing)
        calculation = Calculation(rounds, now_ns=now_ns)
        self._probing = Probing(
            self._run, RoundMaster(rounds, fence, key, draw, calculation, sequence=self._run.rounds)
        )
        self._beat_number = 0
        self._beat_ns = started_ns

    def step(self, now_ns: Ns, event: Event) -> list[Effect]:
        """Apply one event; return what the shell must now do, in order."""
        if isinstance(event, Ended):
            return self._keeping.ended(event)
        out = self._run.out = []
        now = self._clock.read(now_ns, tick=isinstance(event, Tick))
        try:
            if isinstance(event, DoneSeen):
                # The hot path: a Done changes no table that the rest of the machine looks at.
                self._ops.done(now, event)
                return out
            self._apply(now_ns, now, event)
        except RemoteProtocolError as error:
            assert not isinstance(event, Tick | MoonshotFound)
            self._drop(now, event.conn, str(error))
        self._returning.settle(now)
        self._calls.settle_withdrawn(now)
        self._disputes.settle(now)
        while self._epochs.advance(now) or self._finish(now) or self._calls.settle(now):
            pass
        self._probing.settle(now)
        self._check_invariants()
        self._keeping.settle(out)
        return out

    def _finish(self, now: Ns) -> bool:
        """Notice the run's end, before anybody is admitted after it. False if nobody has to go for it."""
        lives.settle(self._run)
        waiting = list(self._run.peers.values()) if (refusal := lives.refusal(self._run)) else []
        for peer in waiting:
            self._epochs.evict(now, peer, refusal)
        return bool(waiting)

    def journal(self) -> Journal:
        """All that a later master needs to go on from here."""
        return self._keeping.journal()

    @property
    def is_used(self) -> bool:
        """Whether anybody ever joined the run, or probes in it."""
        run = self._run
        return bool(run.registrations or run.life.end) or any(each.node for each in run.connections.values())

    @property
    def is_idle(self) -> bool:
        """Whether no deadline can pass: nobody is here, and nobody may come."""
        return bool(lives.refusal(self._run)) and not self._run.connections and not self._run.away

    def info(self) -> RunInfo:
        """The run in one line, for `ringfold runs`."""
        run, away = self._run, len(self._run.away.keys() - self._run.peers.keys())
        is_there = run.peers or away
        state: RunState = "running" if is_there else run.life.end or ("new" if not run.registrations else "running")
        return RunInfo(run.name, state, len(run.peers), away, run.revision, run.life.incarnation, run.life.since_s)

    def status(self, now_ns: Ns) -> Status:
        """The whole run, for `ringfold status`."""
        uptime_ms = (now_ns - self._started_ns) // MS
        now = self._clock.peek(now_ns)
        waiting = render_waiting(self._run, self._epochs, self._watchdog, now)
        return render_status(self._run, waiting, now, self.fence, uptime_ms, self._leader)

    def waiting(self, now_ns: Ns) -> list[Waiting]:
        """All that is waited for: by whom, for whom, and since when."""
        return render_waiting(self._run, self._epochs, self._watchdog, self._clock.peek(now_ns))

    def _verdicts(self, seals: Mapping[PeerId, Sequence[SealedOp]], causes: Sequence[Cause]) -> list[Verdict]:
        """The verdict rule. A method, so that a simulation can plant a wrong one and must find it."""
        return verdicts.decide(seals, causes)

    def _apply(self, now_ns: Ns, now: Ns, event: Event) -> None:
        match event:
            case Ended():
                raise AssertionError("nothing is decided after the end")
            case DoneSeen():
                self._ops.done(now, event)
            case MoonshotFound(group, solution):
                self._topology.found(group, solution)
            case Opened():
                self._open(now, event)
            case Received(conn, message, size):
                connection = self._run.connections.get(conn)
                if connection is None:
                    return
                if connection.peer is not None:
                    connection.peer.heard = now
                if isinstance(message, RoundReport | RoundAlarm):
                    self._probing.report(now, connection.node, message, size)
                elif connection.peer is None:
                    self._at_the_door(now_ns, now, connection, message)
                else:
                    self._from_peer(now, connection.peer, message)
            case Beat(conn, heartbeat):
                self._beat(now, conn, heartbeat)
            case Piece(conn):
                self._piece(now, conn)
            case Malformed(conn, reason):
                self._drop(now, conn, reason)
            case Closed(conn, reason):
                self._close(now, conn, reason)
            case Tick():
                self._tick(now_ns, now)
            case _:
                assert_never(event)

    # The door

    def _open(self, now: Ns, event: Opened) -> None:
        run = self._run
        token = self._token if event.token is None else event.token
        connection = Connection(event.conn, event.remote, event.nonce, now, token)
        run.connections[event.conn] = run.unproven[event.conn] = connection
        if event.token is None:
            run.out.append(Send(event.conn, Challenge(event.nonce, OLDEST_VERSION, PROTOCOL_VERSION)))
        if len(run.unproven) > self.settings.max_unproven:
            oldest = next(iter(run.unproven))
            reason = f"more than {self.settings.max_unproven} connections have proven nothing yet"
            self._drop(now, oldest, reason, again=True)

    def _at_the_door(self, now_ns: Ns, now: Ns, connection: Connection, message: ToMaster) -> None:
        match message:
            case Hello() if not connection.proven:
                self._prove(connection, "hello", message)
                self._hello(now, connection, message)
            case Resume() if not connection.proven:
                self._resume(now, connection, message)
            case StatusRequest():
                self._prove(connection, "status", message)
                connection.opened = now
                # Looking changes nothing: if it fails, only the watcher goes without an answer.
                self._run.out.append(Send(connection.id, checked(self.status, now_ns)))
            case EvictRequest():
                self._prove(connection, "evict", message)
                connection.opened = now
                self._evict_on_request(now, connection, message)
            case ProbeCommand():
                self._prove(connection, "probe", message)
                connection.opened = now
                self._probing.command(now, connection.id, message)
            case NodeHello() if not connection.proven:
                self._prove(connection, "node", message)
                proof = prove(self._token, "welcome", message.nonce, connection.nonce)
                self._probing.node_came(now, connection, message, proof)
            case _:
                raise RemoteProtocolError(f"{type(message).__name__} where Hello, NodeHello or a question is expected")

    def _evict_on_request(self, now: Ns, connection: Connection, request: EvictRequest) -> None:
        checked(check_request, request)
        chosen = choose(self._run, request.peer)
        if isinstance(chosen, str):
            self._run.out.append(Send(connection.id, EvictResponse(False, self._run.named(chosen))))
            return
        why, name = reasons(request), chosen.member.name
        self._epochs.evict(now, chosen, *why, on_request=True)
        text = f"{self._run.named(f'peer {chosen.id}')} is evicted; it may join again"
        self._run.out.append(Send(connection.id, EvictResponse(True, text, chosen.id, name)))

    def _resume(self, now: Ns, connection: Connection, resume: Resume) -> None:
        """A peer of the run comes back. One that was only registered, or is nobody's, registers anew."""
        self._prove(connection, "resume", resume)
        if resume.peer < 1:
            raise RemoteProtocolError(f"{resume.peer} is no peer's number")
        secret = self._member_secret(resume.peer)
        nonces = connection.nonce, resume.nonce
        is_member = proven(secret, resume.member_proof, "member", *nonces)
        known = self._run.peers.get(resume.peer) if is_member else None
        if known is not None and resume.fence <= self.fence:
            self._closes(now, known)
        is_new = resume.epoch == 0 and resume.peer not in self._run.away
        refusal = None if is_new else self._returning.refusal(resume, is_member)
        if refusal is not None:
            proof = prove(self._token, "evicted", *nonces, refusal.reason.encode())
            self._run.drop_connection(connection, structs.replace(refusal, proof=proof), refusal.reason)
            return
        facts = Hello(
            version=resume.version,
            group=resume.group,
            host=resume.host,
            name=resume.name,
            addresses=resume.addresses,
            port=resume.port,
            nonce=resume.nonce,
            proof=resume.proof,
            probes=resume.probes,
            paths=resume.paths,
            run=resume.run,
        )
        if is_new:
            self._hello(now, connection, facts)
            return
        checked(check_facts, facts)
        peer = self._returning.resume(now, connection, resume)
        bound = self.fence.to_bytes(8, "little")
        both = prove(self._token, "resumed", *nonces, bound, prove(secret, "resumed", *nonces, bound))
        self._run.send(peer, Resumed(self.fence, both, self.settings.liveness))
        if resume.probes:
            self._probing.peer_came(now, connection, facts)

    def _closes(self, now: Ns, peer: Peer) -> None:
        """A peer comes on another connection: the one that it had is gone, whether or not this was noticed here."""
        connection = self._run.connections[peer.conn]
        self._run.out.append(Close(connection.id, "it came on another connection"))
        self._close(now, connection.id, "it came on another one")

    def _member_secret(self, peer: PeerId) -> bytes:
        return derive(self._secret, "member", peer)

    def _hello(self, now: Ns, connection: Connection, hello: Hello) -> None:
        checked(check_facts, hello)
        if over := lives.refusal(self._run):
            proof = prove(self._token, "refused", connection.nonce, hello.nonce, over.encode())
            self._run.tell(ConnectionDropped(connection.remote, over))
            self._run.drop_connection(connection, Refused(over, proof=proof), over)
            return
        refusal = self._disputes.bans.refusal(now, hello.name, hello.host)
        if refusal is not None:
            raise RemoteProtocolError(refusal)
        peer = self._run.register(now, connection, hello)
        proof = prove(self._token, "welcome", hello.nonce, connection.nonce)
        # Without a journal there will be no other master to show it to.
        secret = self._member_secret(peer.id) if self._keeping.is_on else b""
        self._run.send(peer, Welcome(peer.id, self.fence, proof, self.settings.liveness, secret))
        self._run.tell(PeerRegistered(peer.id, hello.name, hello.group, connection.remote))
        if hello.probes:
            self._probing.peer_came(now, connection, hello)
        heard = Registrations(self._run.registrations)
        for other in self._run.accepted():
            self._run.send(other, heard)

    def _prove(self, connection: Connection, purpose: str, claim: RunClaim) -> None:
        """Check version and proof of a claim; from here on the connection is trusted with full-size frames."""
        checked(check_claim, claim, connection.token, purpose, connection.nonce)
        if not connection.proven:
            connection.proven = True
            del self._run.unproven[connection.id]
            self._run.out.append(Trust(connection.id))

    def _drop(self, now: Ns, conn: Conn, reason: str, *, again: bool = False) -> None:
        """Turn somebody away who does not keep to the protocol. A peer among them is out of the run.

        Who may come `again` (it was only slow) is not told that it is refused: that would end its join.
        """
        connection = self._run.connections.get(conn)
        if connection is None:
            return
        peer = connection.peer
        if peer is None:
            self._run.tell(ConnectionDropped(connection.remote, reason))
            self._run.drop_connection(connection, None if again else Refused(reason), reason)
        else:
            self._run.tell(ConnectionDropped(self._run.named(f"peer {peer.id}") + f" at {connection.remote}", reason))
            self._epochs.evict(now, peer, reason)

    def _close(self, now: Ns, conn: Conn, reason: str) -> None:
        connection = self._run.connections.get(conn)
        if connection is None:
            return
        self._run.forget_connection(connection)
        if connection.peer is not None and connection.peer.id in self._run.away:
            del self._run.peers[connection.peer.id]  # it was about to come back, and may try again
        elif connection.peer is not None:
            self._epochs.lose(now, connection.peer, f"its connection closed{f' ({reason})' if reason else ''}")

    # Peers

    def _from_peer(self, now: Ns, peer: Peer, message: ToMaster) -> None:
        if peer.id in self._run.away and not isinstance(message, Returned):
            raise RemoteProtocolError(f"{type(message).__name__} before it has said what it brings along")
        peer.pace.moved = now
        match message:
            case Vote():
                self._calls.vote(now, peer, message)
            case VoteWithdrawn():
                if not self._watchdog.call_overdue(now, peer, message):
                    self._calls.withdraw(now, peer, message)
            case Busy():
                self._watchdog.busy(now, peer, message)
            case Sealed():
                self._epochs.sealed(now, peer, message)
            case Attached():
                self._epochs.attached(now, peer, message)
            case AttachFailed():
                self._epochs.attach_failed(now, peer, message)
            case LinkLost():
                self._epochs.link_lost(now, peer, message)
            case Returned():
                self._returning.returned(peer, message)
                self._returning.greet(peer)
            case Leave():
                self._epochs.leave(now, peer, message)
            case SyncReport():
                self._syncs.report(now, peer, message)
            case Measured():
                self._topology.measured(now, peer, message)
            case OpTimeout():
                if not self._watchdog.op_overdue(now, peer, message):
                    self._ops.failed(now, peer, message)
            case OpMismatch() | OpCancelled():
                self._ops.failed(now, peer, message)
            case Hello() | Resume() | StatusRequest() | EvictRequest() | NodeHello() | ProbeCommand():
                raise RemoteProtocolError(f"{type(message).__name__} from a peer that has joined")
            case RunsRequest() | ForgetRun():
                raise RemoteProtocolError(f"{type(message).__name__} from a peer that has joined")
            case RoundReport() | RoundAlarm():
                raise AssertionError("these do not come here")
            case _:
                assert_never(message)

    # Liveness

    def _beat(self, now: Ns, conn: Conn, beat: Heartbeat) -> None:
        connection = self._run.connections.get(conn)
        if connection is None:
            return
        peer = connection.peer
        if peer is None:
            raise RemoteProtocolError("a heartbeat from somebody who has not joined")
        if beat.echo > self._beat_number:
            raise RemoteProtocolError(f"it echoes heartbeat {beat.echo}, but the last one was {self._beat_number}")
        if beat.epoch > (self._run.groups[peer.group].epoch if peer.standing is Standing.ACCEPTED else 0):
            # A peer that is not a member yet has been in no epoch, and its ops are nobody's.
            raise RemoteProtocolError(f"a heartbeat of epoch {beat.epoch}, which it is no member of")
        if beat.echo > peer.beat.echo or beat.received > peer.beat.received:
            peer.echoed = now
        committed, in_call = beat.committed != peer.beat.committed, peer.ballot is not None
        peer.pace.beat(now, committed=committed, in_op=bool(beat.ops), in_call=in_call)
        peer.heard = peer.beat_at = now
        peer.beat = beat
        self._topology.beat(now, peer, beat)

    def _piece(self, now: Ns, conn: Conn) -> None:
        """Heartbeats and echoes wait behind a large frame; its bytes are signs of life as well."""
        connection = self._run.connections.get(conn)
        if connection is not None and connection.peer is not None:
            connection.peer.heard = connection.peer.echoed = now

    def _tick(self, now_ns: Ns, now: Ns) -> None:
        """Every deadline of the master is judged here."""
        limit = self.settings.handshake_ms
        for connection in [each for each in self._run.unproven.values() if now - each.opened >= limit * MS]:
            self._drop(now, connection.id, f"it proved nothing within {limit} ms", again=True)
        for watcher in [each for each in self._run.connections.values() if each.is_idle_watcher(now)]:
            self._drop(now, watcher.id, "it has asked for nothing for a while", again=True)
        self._send_beats(now_ns)
        for peer in list(self._run.peers.values()):
            self._judge(now, peer)
        self._returning.tick(now)
        self._epochs.tick(now)
        self._topology.tick(now)
        self._probing.tick(now)
        self._calls.tick(now)
        self._watchdog.tick(now)
        self._syncs.tick(now)
        self._keeping.tick(now)

    def _send_beats(self, now_ns: Ns) -> None:
        """By the real clock: after a gap, the peers must hear at once that the master is back."""
        if now_ns - self._beat_ns < self.settings.liveness.heartbeat_ms * MS:
            return
        self._beat_ns = now_ns
        self._beat_number += 1
        for peer in self._run.peers.values():
            self._run.out.append(SendBeat(peer.conn, self._beat_number, peer.beat.number))

    def _judge(self, now: Ns, peer: Peer) -> None:
        reason = evict_reason(now, peer.heard, peer.echoed, self.settings.liveness)
        if reason is not None:
            self._epochs.evict(now, peer, reason)
            return
        silence = silent_ms(now, peer.heard, peer.echoed)
        was, peer.suspected = peer.suspected, suspected(silence, self.settings.liveness)
        if peer.suspected and not was:
            self._run.tell(PeerSuspected(peer.id, silence, peer.member.name))

    # What must always hold

    def _check_invariants(self) -> None:
        run = self._run
        rings = {group.id: set(group.ring) for group in run.groups.values()}
        assert len(run.unproven) <= self.settings.max_unproven
        for peer in run.peers.values():
            assert run.connections[peer.conn].peer is peer
            assert (peer.standing is Standing.ACCEPTED) == (peer.id in rings[peer.group])
        for group in run.groups.values():
            if group.change is None:
                assert all(peer in run.peers and not run.peers[peer].leaving for peer in group.ring)
            else:
                assert self._epochs.missing(group), "a change that waits for nobody must have moved on"


def _probe_key(run_secret: bytes, graph: int) -> bytes:
    """What the packets of one graph are tagged with."""
    return hashlib.blake2b(b"probe %d" % graph, digest_size=KEY_BYTES, key=run_secret).digest()
