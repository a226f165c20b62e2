"""The master of a run: a pure state machine, `step(now, event) -> effects`.

A run has peers, and the peers are in groups. Each group has a numbered *epoch*: an agreement on its members and their
order around the ring. A master does this:

* It authenticates connections (here, `requests.py`): a connection proves the token, and becomes a peer, a node that
  only probes, or a command; or it is closed with a reason.
* It changes epochs (`epochs.py`): whatever joins, leaves or fails, the group seals its epoch, and gets a new one with a
  verdict for each op that was in doubt (`verdicts.py`). Ops themselves need no master; if evidence travels through it,
  it counts Dones and nothing else (`ops.py`).
* It runs the probing rounds (`probing.py`): which node probes which, when windows end, and the result of all of them.
* It continues a run of another master (`journal.py`, `recovery.py`), and makes sure that others can continue its own:
  what a later master needs is written before it is sent.
* It loses peers whose connection closes, or whose process has died, as its guardian saw (`native/guardian`).
* It evicts peers that are silent (`liveness.py`), that keep all others waiting (`stalls.py`), or whose eviction was
  requested (`requests.py`).
* It completes run-wide calls (`calls.py`). Two kinds take long: a sync of shared state (`syncs.py`), and the choice of
  better rings by measured links (`topology.py`).
* It decides which members are wrong if they call different things, or calls that conflict (`disputes.py`).

It trusts no peer. A message that no correct peer sends raises RemoteProtocolError; `step` then closes the connection
that sent it, and a peer behind it is evicted. Messages that were in flight when a newer decision was sent are normal,
and are ignored. So no input raises, and an AssertionError is a bug in here. Whatever a check or a rendering raises,
which change nothing, counts as RemoteProtocolError (`checked`): a bug there costs one connection. A bug in what changes
the tables ends the run's machine, and the run restarts from its journal.

The state is in tables (`run.py`). After each event the machine settles: it takes all steps that the facts allow. So
what happens depends on what is true, and not on the order in which it became true.
"""

import functools
import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import assert_never

from msgspec import structs

from ringfold.config import DEFAULT_RUN
from ringfold.errors import RemoteProtocolError
from ringfold.master import lifecycle, verdicts
from ringfold.master.calls import Calls
from ringfold.master.disputes import Disputes
from ringfold.master.effects import (
    CloseConnection,
    Effect,
    RaiseFrameLimit,
    RecordEvents,
    SendEvents,
    SendHeartbeat,
    SendMessage,
)
from ringfold.master.epochs import Epochs
from ringfold.master.events import (
    Conn,
    ConnectionClosed,
    ConnectionOpened,
    DoneReceived,
    Event,
    FramePartReceived,
    HeartbeatReceived,
    MalformedReceived,
    MessageReceived,
    MoonshotFinished,
    Ns,
    StopRequested,
    Tick,
)
from ringfold.master.journal import Journal, JournalPolicy, restore, restore_links
from ringfold.master.lifecycle import Life
from ringfold.master.liveness import StallCompensatedClock, evict_reason, is_suspected, silent_ms
from ringfold.master.ops import OpReports
from ringfold.master.probing import Probing
from ringfold.master.recovery import Recovery
from ringfold.master.requests import (
    OLDEST_VERSION,
    RunRequest,
    authenticate,
    check_evict_request,
    check_guardian,
    check_hello,
    eviction_reasons,
    select_peer,
)
from ringfold.master.run import Connection, Peer, Run
from ringfold.master.settings import MasterSettings
from ringfold.master.stalls import Watchdog
from ringfold.master.states import EpochPhase, Membership
from ringfold.master.status import all_links, render_status, render_waiting, ring_links
from ringfold.master.syncs import Syncs
from ringfold.master.topology import Topology
from ringfold.master.verdicts import Cause
from ringfold.probe.graph.draw import draw
from ringfold.probe.rounds.calculation import Calculation
from ringfold.probe.rounds.master import RoundMaster
from ringfold.units import MS
from ringfold.wire.decoding import checked
from ringfold.wire.frames import Heartbeat
from ringfold.wire.messages import (
    PROTOCOL_VERSION,
    Attached,
    AttachFailed,
    Busy,
    Challenge,
    EventsRequest,
    EvictRequest,
    EvictResponse,
    ForgetRun,
    GuardianHello,
    GuardianWelcome,
    Hello,
    Leave,
    LinkLost,
    LinkMeasured,
    OpCancelled,
    OpMismatch,
    OpTimeout,
    PeerDied,
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
from ringfold.wire.regions import RelayAlarm, RelayHello, RelayNodes, RelayReports
from ringfold.wire.status import Progress, RunInfo, RunState, Waiting


class Master:
    """One run. `run_secret` is fresh randomness; `token` may be empty (then every client can prove it). `now_ns` is a
    clock that no decision uses: it measures how long a calculation took."""

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
        """With `journal` the run continues from there, under its secret; `fence` must be higher than the journal's.
        `links` are those of the last `WriteLinks`, if there are any; `life` is that of a run whose journal is
        closed."""
        self.settings = settings
        self.fence = fence
        if journal is not None:
            assert fence > journal.fence, "a master that takes over has a higher fence"
            run_secret = journal.secret
        self._secret, self._leader = run_secret, leader
        self._token = token
        self._started_ns = started_ns
        self._clock = StallCompensatedClock(started_ns)
        self._run = Run(settings, name, wall_s)
        if life is not None:
            self._run.life, self._run.revision = life, life.revision
            self._run.phase = lifecycle.phase_of(life)
        if journal is not None:
            restore(self._run, journal, started_ns)
            restore_links(self._run, links, started_ns)
        self._journal_policy = JournalPolicy(self._run, fence, run_secret, leader, is_on=keeps_journal)
        self._epochs = Epochs(self._run, run_secret, fence, lambda seals, causes: self._verdicts(seals, causes))
        self._disputes = Disputes(self._run, self._epochs)
        self._ops = OpReports(self._run, self._epochs, self._disputes)
        self._watchdog = Watchdog(self._run, self._epochs, self._ops.failed)
        self._recovery = Recovery(self._run, self._epochs, fence)
        self._syncs = Syncs(self._run, run_secret)
        self._topology = Topology(self._run, self._epochs, run_secret)
        self._calls = Calls(self._run, self._epochs, self._syncs, self._topology, self._disputes)
        key = functools.partial(_probe_key, run_secret)
        rounds = settings.rounds if self._run.probing is None else replace(settings.rounds, is_on=self._run.probing)
        calculation = Calculation(rounds, now_ns=now_ns)
        self._probing = Probing(
            self._run, RoundMaster(rounds, fence, key, draw, calculation, sequence=self._run.rounds)
        )
        self._heartbeat_number = 0
        self._last_heartbeat_ns = started_ns

    def step(self, now_ns: Ns, event: Event) -> list[Effect]:
        """Apply one event; return what the shell must now do, in order."""
        if isinstance(event, StopRequested):
            return self._journal_policy.stop(event)
        out = self._run.out = []
        now = self._clock.read(now_ns, tick=isinstance(event, Tick))
        try:
            if isinstance(event, DoneReceived):
                # The hot path: a Done changes no table that the rest of the machine reads.
                self._ops.done(now, event)
                return out
            if self._apply_to_probing(now, event):
                # Hundreds of nodes send these: only what they can have changed is settled.
                self._probing.settle(now)
                self._journal_policy.settle(out)
                return out
            self._apply(now_ns, now, event)
        except RemoteProtocolError as error:
            assert not isinstance(event, Tick | MoonshotFinished)
            self._drop(now, event.conn, str(error))
        self._recovery.settle(now)
        self._calls.settle_withdrawn(now)
        self._disputes.settle(now)
        while self._epochs.advance(now) or self._settle_life(now) or self._calls.settle(now):
            pass
        self._probing.settle(now)
        self._check_invariants()
        self._journal_policy.settle(out)
        return out

    def _settle_life(self, now: Ns) -> bool:
        """Detect the run's end, before any peer is admitted after it. False if no peer is evicted for it."""
        lifecycle.settle(self._run)
        waiting = list(self._run.peers.values()) if (refusal := lifecycle.refusal(self._run)) else []
        for peer in waiting:
            self._epochs.evict(now, peer, "run_over", refusal)
        return bool(waiting)

    def journal(self) -> Journal:
        """All that a later master needs to continue from here."""
        return self._journal_policy.journal()

    @property
    def is_used(self) -> bool:
        """Whether a peer ever joined the run, or a node probes in it."""
        run = self._run
        return bool(run.registrations or run.life.end) or any(
            each.node or each.is_relay for each in run.connections.values()
        )

    @property
    def is_idle(self) -> bool:
        """Whether no deadline can pass: no client is connected, and no peer may join."""
        return bool(lifecycle.refusal(self._run)) and not self._run.connections and not self._run.away

    def info(self) -> RunInfo:
        """The run in one line, for `ringfold runs`."""
        run, away = self._run, len(self._run.away.keys() - self._run.peers.keys())
        is_there = run.peers or away
        state: RunState = "running" if is_there else run.life.end or ("new" if not run.registrations else "running")
        return RunInfo(run.name, state, len(run.peers), away, run.revision, run.life.incarnation, run.life.since_s)

    def next_round_ns(self, now_ns: Ns) -> Ns | None:
        """When a probing round needs a Tick, by the real clock; other deadlines can wait for a periodic one."""
        due = self._probing.next_deadline_ns()
        return None if due is None else due + now_ns - self._clock.peek(now_ns)

    def status(self, now_ns: Ns, *, only_ring_links: bool = False) -> Status:
        """The whole run, for `ringfold status`; on request only with the links of its rings."""
        uptime_ms = (now_ns - self._started_ns) // MS
        now = self._clock.peek(now_ns)
        waiting = render_waiting(self._run, self._epochs, self._watchdog, now)
        links = ring_links(self._run, now) if only_ring_links else all_links(self._run, now)
        return render_status(self._run, waiting, links, now, self.fence, uptime_ms, self._leader)

    def waiting(self, now_ns: Ns) -> list[Waiting]:
        """Everything that peers wait for: which peers wait, which are missing, and for how long."""
        return render_waiting(self._run, self._epochs, self._watchdog, self._clock.peek(now_ns))

    def _verdicts(self, seals: Mapping[PeerId, Sequence[SealedOp]], causes: Sequence[Cause]) -> list[Verdict]:
        """The verdict rule. A method, so that a simulation can plant a wrong one and must find it."""
        return verdicts.decide(seals, causes)

    def _apply_to_probing(self, now: Ns, event: Event) -> bool:
        """Apply an event that concerns probing alone: no table of peers, groups and calls changes. False if it is
        another one, and nothing was done."""
        match event:
            case HeartbeatReceived(conn, heartbeat):
                connection = self._run.connections.get(conn)
                if connection is None or connection.peer is not None:
                    return False
                self._heartbeat(now, conn, heartbeat)
            case MessageReceived(conn, RoundReport() | RoundAlarm() as message, size, retransmits):
                connection = self._signs_of_life(now, conn)
                if connection is not None:
                    self._probing.report(now, connection.node, message, size, retransmits)
            case MessageReceived(conn, RelayNodes() | RelayReports() | RelayAlarm() as message, size):
                connection = self._signs_of_life(now, conn)
                if connection is not None:
                    self._probing.relayed(now, connection, message, size)
            case _:
                return False
        return True

    def _signs_of_life(self, now: Ns, conn: Conn) -> Connection | None:
        """The connection that a message came from, if it is still known; its client is alive."""
        connection = self._run.connections.get(conn)
        if connection is None:
            return None
        if connection.peer is not None:
            connection.peer.last_received_ns = now
        elif connection.node or connection.is_relay:
            self._probing.received(now, connection)
        return connection

    def _apply(self, now_ns: Ns, now: Ns, event: Event) -> None:
        match event:
            case StopRequested():
                raise AssertionError("nothing is decided after StopRequested")
            case DoneReceived():
                self._ops.done(now, event)
            case MoonshotFinished(group, solution):
                self._topology.moonshot_finished(group, solution)
            case ConnectionOpened():
                self._open(now, event)
            case MessageReceived(conn, message):
                connection = self._signs_of_life(now, conn)
                if connection is None:
                    return
                if connection.peer is None:
                    self._from_client(now_ns, now, connection, message)
                else:
                    self._from_peer(now, connection.peer, message)
            case HeartbeatReceived(conn, heartbeat):
                self._heartbeat(now, conn, heartbeat)
            case FramePartReceived(conn):
                self._frame_part(now, conn)
            case MalformedReceived(conn, reason):
                self._drop(now, conn, reason)
            case ConnectionClosed(conn, reason):
                self._close(now, conn, reason)
            case Tick():
                self._tick(now_ns, now)
            case _:
                assert_never(event)

    # Connections

    def _open(self, now: Ns, event: ConnectionOpened) -> None:
        run = self._run
        token = self._token if event.token is None else event.token
        connection = Connection(event.conn, event.remote, event.nonce, now, token)
        run.connections[event.conn] = run.unproven[event.conn] = connection
        if event.token is None:
            run.out.append(SendMessage(event.conn, Challenge(event.nonce, OLDEST_VERSION, PROTOCOL_VERSION)))
        if len(run.unproven) > self.settings.max_unproven:
            oldest = next(iter(run.unproven))
            reason = f"more than {self.settings.max_unproven} connections are not authenticated yet"
            self._drop(now, oldest, reason, again=True)

    def _from_client(self, now_ns: Ns, now: Ns, connection: Connection, message: ToMaster) -> None:
        match message:
            case Hello() if not connection.proven:
                self._authenticate(connection, "hello", message)
                self._hello(now, connection, message)
            case Resume() if not connection.proven:
                self._resume(now, connection, message)
            case GuardianHello() if not connection.proven:
                self._guard(connection, message)
            case PeerDied() if connection.guarded is not None:
                self._epochs.lose(now, connection.guarded, "its process has died, as its guardian saw")
            case _ if connection.guarded is not None:
                raise RemoteProtocolError(f"{type(message).__name__} from a guardian")
            case StatusRequest():
                self._authenticate(connection, "status", message)
                connection.opened_ns = now
                # Rendering the status changes nothing: if it fails, only this client gets no response.
                self._run.out.append(SendMessage(connection.id, checked(self.status, now_ns)))
            case EventsRequest():
                self._authenticate(connection, "status", message)
                connection.opened_ns = now
                self._run.out.append(SendEvents(connection.id, max(0, message.after)))
            case EvictRequest():
                self._authenticate(connection, "evict", message)
                connection.opened_ns = now
                self._evict_on_request(now, connection, message)
            case ProbeCommand():
                self._authenticate(connection, "probe", message)
                connection.opened_ns = now
                self._probing.command(now, connection.id, message)
            case NodeHello() if not connection.proven:
                self._authenticate(connection, "node", message)
                proof = prove(self._token, "welcome", message.nonce, connection.nonce)
                self._probing.add_node(now, connection, message, proof)
            case RelayHello() if not connection.proven:
                self._authenticate(connection, "relay", message)
                proof = prove(self._token, "welcome", message.nonce, connection.nonce)
                self._probing.add_relay(now, connection, message, proof)
            case _:
                raise RemoteProtocolError(f"{type(message).__name__} where Hello, NodeHello or a request is expected")

    def _evict_on_request(self, now: Ns, connection: Connection, request: EvictRequest) -> None:
        checked(check_evict_request, request)
        chosen = select_peer(self._run, request.peer)
        if isinstance(chosen, str):
            self._run.out.append(SendMessage(connection.id, EvictResponse(False, self._run.add_names(chosen))))
            return
        why, name = eviction_reasons(request), chosen.member.name
        self._epochs.evict(now, chosen, "request", *why)
        text = f"{self._run.add_names(f'peer {chosen.id}')} is evicted; it may join again"
        self._run.out.append(SendMessage(connection.id, EvictResponse(True, text, chosen.id, name)))

    def _resume(self, now: Ns, connection: Connection, resume: Resume) -> None:
        """A peer of the run reconnects. A peer that was not a member registers again."""
        self._authenticate(connection, "resume", resume)
        if resume.peer < 1:
            raise RemoteProtocolError(f"{resume.peer} is not a peer's number")
        secret = self._member_secret(resume.peer)
        nonces = connection.nonce, resume.nonce
        is_member = proven(secret, resume.member_proof, "member", *nonces)
        known = self._run.peers.get(resume.peer) if is_member else None
        if known is not None and resume.fence <= self.fence:
            self._close_old_connection(now, known)
        is_new = resume.epoch == 0 and resume.peer not in self._run.away
        refusal = None if is_new else self._recovery.refusal(resume, is_member)
        if refusal is not None:
            proof = prove(self._token, "evicted", *nonces, refusal.reason.encode())
            self._run.drop_connection(connection, structs.replace(refusal, proof=proof), refusal.reason)
            return
        hello = Hello(
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
            listen_only=resume.listen_only,
            cores=resume.cores,
            threads=resume.threads,
            here=resume.here,
        )
        if is_new:
            self._hello(now, connection, hello)
            return
        checked(check_hello, hello)
        peer = self._recovery.resume(now, connection, resume)
        bound = self.fence.to_bytes(8, "little")
        both = prove(self._token, "resumed", *nonces, bound, prove(secret, "resumed", *nonces, bound))
        self._run.send(peer, Resumed(self.fence, both, self.settings.liveness))
        if resume.probes:
            self._probing.add_peer(now, connection, hello)

    def _guard(self, connection: Connection, hello: GuardianHello) -> None:
        """A peer opens a connection for its guardian. Only a death counts there: its end means nothing."""
        self._authenticate(connection, "guardian", hello)
        peer = checked(check_guardian, self._run, hello, connection.nonce)
        connection.guarded, peer.guardian = peer, connection.id
        proof = prove(self._token, "guardian welcome", hello.nonce, connection.nonce)
        self._run.out.append(SendMessage(connection.id, GuardianWelcome(proof)))

    def _close_old_connection(self, now: Ns, peer: Peer) -> None:
        """A peer has a new connection: its old one is gone, whether or not that was detected here."""
        connection = self._run.connections[peer.conn]
        self._run.out.append(CloseConnection(connection.id, "it has another connection"))
        self._close(now, connection.id, "it has another one")

    def _member_secret(self, peer: PeerId) -> bytes:
        return derive(self._secret, "member", peer)

    def _hello(self, now: Ns, connection: Connection, hello: Hello) -> None:
        checked(check_hello, hello)
        if over := lifecycle.refusal(self._run):
            proof = prove(self._token, "refused", connection.nonce, hello.nonce, over.encode())
            self._run.notify(ConnectionDropped(connection.remote, over))
            self._run.drop_connection(connection, Refused(over, proof=proof), over)
            return
        refusal = self._disputes.bans.refusal(now, hello.name, hello.host)
        if refusal is not None:
            raise RemoteProtocolError(refusal)
        peer = self._run.register(now, connection, hello)
        proof = prove(self._token, "welcome", hello.nonce, connection.nonce)
        # Without a journal there will be no other master to prove it to.
        secret = self._member_secret(peer.id) if self._journal_policy.is_on else b""
        self._run.send(peer, Welcome(peer.id, self.fence, proof, self.settings.liveness, secret))
        self._run.notify(PeerRegistered(peer.id, hello.name, hello.group, connection.remote))
        if hello.probes:
            self._probing.add_peer(now, connection, hello)
        registrations = Registrations(self._run.registrations)
        for other in self._run.accepted():
            self._run.send(other, registrations)

    def _authenticate(self, connection: Connection, purpose: str, request: RunRequest) -> None:
        """Check version and proof of a request; from here on the connection may send full-size frames."""
        checked(authenticate, request, connection.token, purpose, connection.nonce)
        if not connection.proven:
            connection.proven = True
            del self._run.unproven[connection.id]
            self._run.out.append(RaiseFrameLimit(connection.id))

    def _drop(self, now: Ns, conn: Conn, reason: str, *, again: bool = False) -> None:
        """Close a connection that does not follow the protocol. A peer behind it is evicted.

        A client that may try `again` (it was only slow) is not sent `Refused`: that would end its join.
        """
        connection = self._run.connections.get(conn)
        if connection is None:
            return
        peer = connection.peer
        if peer is None:
            self._run.notify(ConnectionDropped(connection.remote, reason))
            self._run.drop_connection(connection, None if again else Refused(reason), reason)
        else:
            self._run.notify(
                ConnectionDropped(self._run.add_names(f"peer {peer.id}") + f" at {connection.remote}", reason)
            )
            self._epochs.evict(now, peer, "protocol", reason)

    def _close(self, now: Ns, conn: Conn, reason: str) -> None:
        connection = self._run.connections.get(conn)
        if connection is None:
            return
        self._run.forget_connection(connection)
        if connection.peer is not None and connection.peer.id in self._run.away:
            connection.peer.enter(Membership.GONE)
            self._run.drop_guardian(connection.peer)
            del self._run.peers[connection.peer.id]  # it was about to return, and may try again
        elif connection.peer is not None:
            self._epochs.lose(now, connection.peer, f"its connection closed{f' ({reason})' if reason else ''}")

    # Peers

    def _from_peer(self, now: Ns, peer: Peer, message: ToMaster) -> None:
        if peer.id in self._run.away and not isinstance(message, Returned):
            raise RemoteProtocolError(f"{type(message).__name__} before Returned")
        peer.step_progress.last_progress_ns = now
        match message:
            case Vote():
                self._calls.vote(now, peer, message)
                self._watchdog.count_calls(peer, message)
            case VoteWithdrawn():
                if not self._watchdog.call_overdue(now, peer, message):
                    self._calls.withdraw(now, peer, message)
            case Busy():
                self._watchdog.busy(now, peer, message)
            case Sealed():
                self._epochs.sealed(now, peer, message)
                self._watchdog.count_calls(peer, message)
            case Attached():
                self._epochs.attached(now, peer, message)
            case AttachFailed():
                self._epochs.attach_failed(now, peer, message)
            case LinkLost():
                self._epochs.link_lost(now, peer, message)
            case Returned():
                self._recovery.returned(peer, message)
                self._recovery.send_newest_epoch(peer)
            case Leave():
                self._epochs.leave(now, peer, message)
            case SyncReport():
                self._syncs.report(now, peer, message)
            case LinkMeasured():
                self._topology.measured(now, peer, message)
            case OpTimeout():
                if not self._watchdog.op_overdue(now, peer, message):
                    self._ops.failed(now, peer, message)
            case OpMismatch() | OpCancelled():
                self._ops.failed(now, peer, message)
            case Hello() | Resume() | StatusRequest() | EventsRequest() | EvictRequest() | NodeHello() | ProbeCommand():
                raise RemoteProtocolError(f"{type(message).__name__} from a peer that has joined")
            case RunsRequest() | ForgetRun() | RelayHello() | GuardianHello() | PeerDied():
                raise RemoteProtocolError(f"{type(message).__name__} from a peer that has joined")
            case RoundReport() | RoundAlarm() | RelayNodes() | RelayReports() | RelayAlarm():
                raise AssertionError("these are handled before")
            case _:
                assert_never(message)

    # Liveness

    def _heartbeat(self, now: Ns, conn: Conn, heartbeat: Heartbeat) -> None:
        connection = self._run.connections.get(conn)
        if connection is None:
            return
        peer = connection.peer
        if peer is None and not connection.node and not connection.is_relay:
            raise RemoteProtocolError("a heartbeat from a client that has not joined")
        if heartbeat.echo > self._heartbeat_number:
            raise RemoteProtocolError(
                f"it echoes heartbeat {heartbeat.echo}, but the last one was {self._heartbeat_number}"
            )
        if peer is None:
            self._probing.heartbeat(now, connection, heartbeat)
            return
        if heartbeat.epoch > (self._run.groups[peer.group].epoch if peer.is_member else 0):
            # A peer that is not a member yet has been in no epoch, and has no ops.
            raise RemoteProtocolError(f"a heartbeat of epoch {heartbeat.epoch}, of which it is no member")
        if heartbeat.echo > peer.heartbeat.echo or heartbeat.received > peer.heartbeat.received:
            peer.last_echo_ns = now
        committed, in_call = heartbeat.committed != peer.heartbeat.committed, peer.ballot is not None
        peer.step_progress.on_heartbeat(now, committed=committed, in_op=bool(heartbeat.ops), in_call=in_call)
        peer.last_received_ns = peer.last_heartbeat_ns = now
        peer.heartbeat = heartbeat
        if heartbeat.progress is not None:
            self._note_progress(now, peer, heartbeat.progress)
        self._topology.on_heartbeat(now, peer, heartbeat)

    def _note_progress(self, now: Ns, peer: Peer, progress: Progress) -> None:
        """What its program reports. Events that came with an earlier report, to this master, are not new."""
        if new := progress.events[max(0, peer.next_event - progress.first_event) :]:
            self._run.out.append(RecordEvents(peer.id, new))
        peer.next_event = max(peer.next_event, progress.first_event + len(progress.events))
        peer.progress, peer.progress_ns = structs.replace(progress, events=[]), now

    def _frame_part(self, now: Ns, conn: Conn) -> None:
        """Heartbeats and echoes wait behind a large frame; its bytes are a sign of life, too."""
        connection = self._run.connections.get(conn)
        if connection is not None and connection.peer is not None:
            connection.peer.last_received_ns = connection.peer.last_echo_ns = now
        elif connection is not None and (connection.node or connection.is_relay):
            self._probing.received(now, connection)

    def _tick(self, now_ns: Ns, now: Ns) -> None:
        """Check every deadline of the master."""
        limit = self.settings.handshake_ms
        for connection in [each for each in self._run.unproven.values() if now - each.opened_ns >= limit * MS]:
            self._drop(now, connection.id, f"it was not authenticated within {limit} ms", again=True)
        for client in [each for each in self._run.connections.values() if each.is_idle_client(now)]:
            self._drop(now, client.id, "it has sent no request for a while", again=True)
        self._send_heartbeats(now_ns)
        for peer in list(self._run.peers.values()):
            self._check_silence(now, peer)
        self._recovery.tick(now)
        self._epochs.tick(now)
        self._topology.tick(now)
        self._probing.tick(now)
        self._calls.tick(now)
        self._watchdog.tick(now)
        self._syncs.tick(now)
        self._journal_policy.tick(now)

    def _send_heartbeats(self, now_ns: Ns) -> None:
        """By the real clock: after a gap, the peers must get a heartbeat at once."""
        if now_ns - self._last_heartbeat_ns < self.settings.liveness.heartbeat_ms * MS:
            return
        self._last_heartbeat_ns = now_ns
        self._heartbeat_number += 1
        for peer in self._run.peers.values():
            self._run.out.append(SendHeartbeat(peer.conn, self._heartbeat_number, peer.heartbeat.number))
        self._probing.send_heartbeats(self._heartbeat_number)

    def _check_silence(self, now: Ns, peer: Peer) -> None:
        reason = evict_reason(now, peer.last_received_ns, peer.last_echo_ns, self.settings.liveness)
        if reason is not None:
            self._epochs.evict(now, peer, "silent", reason)
            return
        silence = silent_ms(now, peer.last_received_ns, peer.last_echo_ns)
        was, peer.suspected = peer.suspected, is_suspected(silence, self.settings.liveness)
        if peer.suspected and not was:
            self._run.notify(PeerSuspected(peer.id, silence, peer.member.name))
        if peer.suspected != was:
            self._probing.suspect_peer(now, peer.id, silence, is_suspected=peer.suspected)

    # Invariants

    def _check_invariants(self) -> None:
        run = self._run
        rings = {group.id: set(group.ring) for group in run.groups.values()}
        assert len(run.unproven) <= self.settings.max_unproven
        for peer in run.peers.values():
            assert run.connections[peer.conn].peer is peer
            assert peer.guardian is None or run.connections[peer.guardian].guarded is peer
            assert peer.is_member == (peer.id in rings[peer.group])
        for group in run.groups.values():
            assert (group.change is None) == (group.phase is EpochPhase.IDLE)
            if group.change is None:
                assert all(peer in run.peers and run.peers[peer].membership is Membership.MEMBER for peer in group.ring)
            else:
                assert self._epochs.missing(group), "a change that waits for no peer must have moved on"


def _probe_key(run_secret: bytes, graph: int) -> bytes:
    """The key of the tags of one graph's packets."""
    return hashlib.blake2b(b"probe %d" % graph, digest_size=KEY_BYTES, key=run_secret).digest()
