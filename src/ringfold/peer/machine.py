"""The peer's machine: every decision of a peer, from the first message to a master to the last. Pure.

The states and their transitions are in `states.py`:

    CONNECTING --> REGISTERED --> ATTACHING --> INSTALLED --> STEADY          (a member, epoch after epoch)
     Hello/        waits to be      |  ^  lanes     |  Attached    | Installed: every member is attached
     Welcome       admitted         |  |  complete  v              v
                                    |  +-- Record -- SEALED <----- Seal       (any change of members or order)
                                    +--------------> SEALED

Two epochs matter. `record.epoch` is the newest one that the master recorded; `engine_epoch` is the one that the engine
runs. They differ between Record and Install. A Seal may name an epoch that this peer never installed (another member
could not attach): the response is then an empty list, and the verdicts of that epoch do not concern this peer, whose
ops never ran in it.

Verdicts arrive with the Record and settle the old epoch before anything is connected: the program learns of an abort as
early as possible, and ops that are retried wait in the engine for the Install.

A lost master does not end the session: the peer *seeks* one (`control.py`), with everything else as it was, until it
has resumed; the new master then seals the epoch, as for any other change.

Messages about probing do not pass through here: the session hands them to the probing shell.

Invariants: the engine's epoch never exceeds the record's; a vote is cast only in a steady epoch; after `Ended` nothing
is sent.
"""

from collections.abc import Iterable
from typing import assert_never

from msgspec import structs

from ringfold.errors import (
    CallMismatch,
    DeadlineExceeded,
    Evicted,
    MasterUnreachable,
    RemoteProtocolError,
    RingfoldError,
)
from ringfold.peer.acceptor import Acceptor
from ringfold.peer.codes import Final
from ringfold.peer.control import CONTROL_KEY, Control, ControlFailed, decode_from_master
from ringfold.peer.effects import (
    CallFinished,
    CloseConn,
    Effect,
    Ended,
    FailAll,
    Install,
    Joined,
    Notify,
    RefuseCalls,
    RestartCalls,
    SealEngine,
    SendMessage,
    SetRegistrations,
    Settle,
    SyncInterrupted,
    SyncSucceeded,
)
from ringfold.peer.events import (
    Accepted,
    BlocksChanged,
    BlocksReceived,
    BlocksWritten,
    CallBusy,
    CallGivenUp,
    CallJoin,
    CallLeave,
    CallVote,
    Closed,
    DialFailed,
    Dialled,
    EngineInstalled,
    EngineSealed,
    Event,
    LinkLost,
    MessageReceived,
    OpCancelled,
    Opened,
    OpMismatched,
    OpTimedOut,
    Sampled,
    Silent,
    Tick,
)
from ringfold.peer.lanes import Lanes, LaneUpdate
from ringfold.peer.measure.link_rate import LinkMeasurement
from ringfold.peer.settings import MS, Identity, PeerTimings
from ringfold.peer.side_channels import FIRST_KEY as FIRST_SESSION_KEY
from ringfold.peer.side_channels import BulkSessions, SideChannels
from ringfold.peer.states import PEER_TRANSITIONS, PeerInput, PeerState, next_state
from ringfold.peer.sync.syncing import Syncing
from ringfold.peer.votes import AnswerLog, PendingCalls, RunFacts
from ringfold.state.manifest import StateManifest
from ringfold.wire import messages
from ringfold.wire.diagnostics import with_names, with_you
from ringfold.wire.messages import (
    Divergence,
    Epoch,
    Message,
    OpRef,
    PeerId,
    Reason,
    Record,
    Resumed,
    Verdict,
    Welcome,
    World,
)
from ringfold.wire.notices import (
    AdmissionDelayed,
    ConnectionDropped,
    MasterLost,
    PeerDiverged,
    ResumeDelayed,
    StateRolledBack,
)
from ringfold.wire.probing import NodeWelcome, ProbeAnswer, ProbeGraph, ProbeHalt, RoundClock, RoundEnd, RoundStart
from ringfold.wire.regions import RelayAnswers, RelayClocks, RelayGraph, RelayRound, RelayWelcome

LOG_ADMISSION_NS = 10_000 * MS
"""How often the log says what the admission waits for."""


class PeerMachine:
    """Everything that a peer decides. `step` is the only input; the attributes are for reading."""

    def __init__(self, identity: Identity, timings: PeerTimings) -> None:
        self.identity = identity
        self.state = PeerState.CONNECTING
        self.peer: PeerId = 0
        self.record: Record | None = None
        self.engine_epoch: Epoch = 0
        self.world = World()
        self._facts = RunFacts()
        self.facts = self._facts.by_epoch
        self.unsynced: set[PeerId] = set()
        """The peers that were admitted since the program last synced state."""
        self._timings = timings
        self._control = Control(identity, timings)
        self._lanes = Lanes(timings, identity.token)
        self._sessions = BulkSessions(timings, identity.token)
        self._syncing = Syncing(self._sessions, self._send_to_master)
        self._measurement = LinkMeasurement(self._sessions, self._send_to_master)
        self._channels = SideChannels(self._sessions, {"state": self._syncing, "measure": self._measurement})
        self._acceptor = Acceptor(timings, self._lanes, self._channels)
        self._calls = PendingCalls(timings.answer_ms)
        self._answers = AnswerLog()
        self._sync_fence = 0  # the fence of the master that planned the sync in which this peer takes part
        self._leaving: messages.Leave | None = None
        self._last_steady_epoch: Epoch = 0  # 0: this peer has never been a member of a steady epoch
        self._join_since_ns = 0
        self._join_deadline_ns = 0
        self._join_timeout_ns = 0
        self._log_admission_ns = 0
        self._admission: messages.AdmissionWaits | None = None
        self._busy_until_ns = 0

    def _enter(self, given: PeerInput) -> None:
        self.state = next_state(PEER_TRANSITIONS, self.state, given)

    @property
    def ended(self) -> bool:
        """Whether this peer is out of the run."""
        return self.state is PeerState.ENDED

    @property
    def has_joined(self) -> bool:
        """Whether this peer has been a member of an epoch that every member has installed."""
        return self._last_steady_epoch > 0

    @property
    def is_running(self) -> bool:
        """Whether the engine runs the newest record, so that an op submitted now belongs to it."""
        return self.state in (PeerState.INSTALLED, PeerState.STEADY)

    @property
    def control_conn(self) -> int | None:
        """The connection to a proven master; None while there is none."""
        return self._control.conn if self._control.is_proven and not self.ended else None

    @property
    def control_key(self) -> bytes:
        """What a guardian's connection is proven with, to the master of `control_conn`."""
        return self._control.key

    @property
    def masters(self) -> tuple[str, ...]:
        """The addresses of all masters that this peer knows, beginning with the present one."""
        return self._control.addresses

    @property
    def names(self) -> dict[PeerId, str]:
        """The names of the members of the newest record."""
        return {} if self.record is None else {member.peer: member.name for member in self.record.members}

    @property
    def _me(self) -> str:
        return with_you(with_names(f"peer {self.peer}", {self.peer: self.identity.name}), self.peer)

    def has_written(self, manifest: StateManifest) -> bool:
        """Whether a sync has begun to write blocks of another state into the arrays of this one."""
        return self._syncing.written_to is manifest

    def synced(self) -> None:
        """The program has seen a sync end well."""
        self.unsynced.clear()
        self._syncing.written_to = None

    def next_deadline_ns(self) -> int | None:
        """When the next Tick is due."""
        if self.ended:
            return None
        parts = (self._control, self._acceptor, self._lanes, self._channels, self._calls)
        times = [time for part in parts if (time := part.next_deadline_ns()) is not None]
        if self._control.is_proven and not self.has_joined:
            times.append(self._join_deadline_ns)
        return min(times, default=None)

    def step(self, now_ns: int, event: Event) -> list[Effect]:
        """Apply one event; return what the shell must now do, in order."""
        if self.ended:
            return self._after_end(event)
        match event:
            case MessageReceived():
                effects = self._message(now_ns, event)
            case Dialled() | DialFailed() | Opened() | Accepted() | Closed():
                effects = self._connection(now_ns, event)
            case LinkLost(peer, outgoing, reason, live_conns, died, direct):
                link = self._lanes.direct_link(peer) if direct else (outgoing, peer)
                update = self._lanes.link_lost(now_ns, link, live_conns, reason, direct=direct)
                effects = self._report_lost(update, died=died)
            case OpMismatched() | OpTimedOut() | OpCancelled():
                effects = self._op_report(event)
            case BlocksReceived():
                effects = self._syncing.received(now_ns, event)
            case BlocksWritten():
                effects = self._syncing.written(now_ns, event)
            case BlocksChanged():
                effects = self._syncing.changed(event)
            case Sampled():
                effects = self._measurement.sampled(event)
            case Silent(conn, silent_ms):
                effects = self._master_silent(now_ns, conn, silent_ms)
            case EngineInstalled(epoch, in_memory):
                effects = self._report_attached(epoch, in_memory)
            case EngineSealed(epoch, ops):
                effects = self._send_to_master(messages.Sealed(epoch, list(ops)))
            case Tick():
                effects = self._tick(now_ns)
            case CallJoin() | CallVote() | CallBusy() | CallGivenUp() | CallLeave():
                effects = self._call(now_ns, event)
            case _:
                assert_never(event)
        effects += self._install_if_attached(now_ns)
        if self._measurement.is_busy and not self._calls.is_waiting_in("optimize"):
            effects += self._measurement.end("the call is over")
        self._check_invariants()
        return effects

    # Calls of the program

    def _call(self, now_ns: int, event: CallJoin | CallVote | CallBusy | CallGivenUp | CallLeave) -> list[Effect]:
        match event:
            case CallJoin(masters, deadline_ns):
                self._join_since_ns = now_ns
                self._join_deadline_ns = deadline_ns
                self._join_timeout_ns = deadline_ns - now_ns
                self._log_admission_ns = now_ns + LOG_ADMISSION_NS
                return self._control.start(now_ns, masters, deadline_ns)
            case CallVote():
                self._answers.repeats_sync &= event.kind == "sync"
                steady_epoch = self.engine_epoch if self.state is PeerState.STEADY else None
                return self._send_all(self._calls.add(now_ns, event, self.engine_epoch, steady_epoch))
            case CallBusy(until_ns):
                self._busy_until_ns = until_ns
                return self._send_to_master(messages.Busy(self._busy_ms(now_ns)))
            case CallGivenUp(ballot):
                withdrawn = self._calls.give_up(now_ns, ballot)
                self._answers.repeats_sync = False
                return [] if withdrawn is None else [*self._send_to_master(withdrawn), *self._end_sync(ballot)]
            case CallLeave(stopped):
                self._leaving = messages.Leave(stopped)
                is_known = self._control.is_proven or self.record is not None
                return self._send_to_master(self._leaving) if is_known else self._end(None, "left")

    # Connections

    def _connection(self, now_ns: int, event: Dialled | DialFailed | Opened | Accepted | Closed) -> list[Effect]:
        control, lanes, sessions = self._control, self._lanes, self._sessions
        match event:
            case Dialled(key, conn):
                if key >= FIRST_SESSION_KEY:
                    return sessions.dialled(key, conn)
                if key != CONTROL_KEY:
                    return lanes.dialled(key, conn)
                control.dialled(conn)
                return []
            case DialFailed(key, reason):
                if key >= FIRST_SESSION_KEY:
                    return self._channels.report(now_ns, *sessions.dial_failed(now_ns, key, reason))
                if key == CONTROL_KEY:
                    return control.not_connected(now_ns, reason)
                return lanes.dial_failed(now_ns, key, reason)
            case Opened(conn, nonce):
                if conn == control.conn:
                    control.opened(now_ns, nonce)
                elif sessions.is_dialling(conn):
                    sessions.opened(conn, nonce)
                else:
                    lanes.opened(conn, nonce)
                return []
            case Accepted(conn, remote, nonce):
                return self._acceptor.accepted(now_ns, conn, remote, nonce)
            case Closed(conn, reason):
                return self._closed(now_ns, conn, reason)

    def _closed(self, now_ns: int, conn: int, reason: str) -> list[Effect]:
        if conn == self._control.conn:
            if not self._control.is_proven:
                return self._control.closed(now_ns, reason)
            return self._seek_master(now_ns, f"its connection closed ({reason})")
        if conn in self._acceptor:
            return self._acceptor.closed(conn, reason)
        outcome = self._sessions.closed(now_ns, conn, reason)
        if outcome is not None:
            return self._channels.report(now_ns, *outcome)
        return self._report_lost(self._lanes.closed(now_ns, conn, reason))

    def _report_lost(self, update: LaneUpdate, *, died: bool = False) -> list[Effect]:
        """Report lost links to the master, but only those of an epoch that runs: a seal outdates them."""
        effects = update.effects
        if self.is_running:
            for lost in update.lost:
                source, target = self._lanes.ends((lost.outgoing, lost.peer))
                loss = messages.LinkLost(self.engine_epoch, source, target, lost.reason, died)
                effects += self._send_to_master(loss)
        return effects

    def _install_if_attached(self, now_ns: int) -> list[Effect]:
        """Install the epoch when its lanes are complete, or report which edges cannot be connected."""
        lanes, record = self._lanes, self.record
        if record is None or not lanes.attaching:
            return []
        if failed := lanes.failed_edges(now_ns):
            self._enter(PeerInput.ATTACH_FAILED)
            return [
                *lanes.stop("the epoch cannot be attached"),
                *self._send_to_master(messages.AttachFailed(record.epoch, failed)),
            ]
        if not lanes.is_complete(now_ns):
            return []
        dialling = lanes.installed(now_ns)
        self._enter(PeerInput.LANES_COMPLETE)
        self.engine_epoch = record.epoch
        members = tuple(member.peer for member in record.members)
        install = Install(
            epoch=record.epoch,
            rank=members.index(self.peer),
            members=members,
            evidence_by_master=record.evidence == "master",
            small_bytes=record.small_bytes,
            segment_bytes=record.segment_bytes,
            peers_here=max(1, sum(member.host == self.identity.host for member in record.members)),
            multipath=record.lanes > 1 or any(member.paths > 1 for member in record.members),
            channels=record.channels,
            direct=record.direct,
            hosts=record.hosts,
        )
        # Install comes first: its response goes to the master before anything else happens.
        return [install, *dialling]

    def _report_attached(self, epoch: Epoch, in_memory: tuple[int, ...]) -> list[Effect]:
        if not self.is_running or epoch != self.engine_epoch:
            return []
        lanes = self._lanes.conns_to_next()
        return self._send_to_master(messages.Attached(epoch, len(lanes), len(lanes.intersection(in_memory))))

    # Messages

    def _message(self, now_ns: int, event: MessageReceived) -> list[Effect]:
        conn, body = event.conn, event.body
        if conn in self._sessions.open:
            return self._channels.message(now_ns, conn, body)
        if self._sessions.is_dialling(conn):
            return self._channels.report(now_ns, *self._sessions.message(now_ns, conn, body))
        if conn in self._acceptor:
            return self._report_lost(self._acceptor.message(now_ns, conn, body))
        if conn != self._control.conn:
            return self._lanes.message(now_ns, conn, body)
        if not self._control.is_proven:
            return self._handshake(now_ns, body)
        try:
            message = decode_from_master(body)
        except RemoteProtocolError as error:
            return self._lose_master(f"it breaks the protocol ({error})")
        self._answers.note(message)
        return self._from_master(now_ns, message)

    def _handshake(self, now_ns: int, body: bytes) -> list[Effect]:
        """A message of a master that has not proven the token yet."""
        effects, outcome = self._control.message(now_ns, body)
        match outcome:
            case Welcome():
                self.peer = self._lanes.me = self._sessions.me = outcome.peer
                if self.state is PeerState.CONNECTING:
                    self._enter(PeerInput.WELCOMED)
            case Resumed():
                effects += self._resumed(now_ns)
            case ControlFailed(error):
                if isinstance(error, Evicted):
                    error = Evicted(error.reason, self._me)
                effects += self._end(None if self._leaving else error, "the master refused")
        return effects

    def _from_master(self, now_ns: int, message: messages.FromMaster) -> list[Effect]:
        match message:
            case messages.Registrations(count=count):
                self._facts.registrations = count
                return [SetRegistrations(count)]
            case messages.AdmissionWaits():
                return self._admission_waits(now_ns, message)
            case messages.Seal(epoch=epoch):
                return self._seal(epoch)
            case Record():
                return self._recorded(now_ns, message)
            case messages.Installed(epoch=epoch, world=world):
                return self._installed(epoch, world)
            case messages.CallDone():
                return self._call_done(message)
            case messages.CallFailed(ballot=ballot, reason=reason):
                self._facts.call_failed()
                effects = self._end_sync(ballot)
                return [*effects, CallFinished(ballot, reason)] if self._calls.finish(ballot) else effects
            case messages.CallExtended(ballot=ballot):
                self._calls.resume(now_ns, ballot)
                return []
            case messages.SyncExtended(ballot=ballot):
                self._calls.extend(now_ns, ballot)
                return []
            case messages.ResumeWaits(ballot=ballot):
                self._calls.extend(now_ns, ballot)
                return [Notify(ResumeDelayed(self.identity.group, message.revision, message.names, message.left_ms))]
            case messages.SyncPlan():
                return self._sync_planned(now_ns, message)
            case messages.SyncDone():
                return self._sync_done(message)
            case messages.Measure():
                if not self._calls.is_waiting_in("optimize"):
                    return self._measurement.refuse(message)
                return [*self._measurement.begin(now_ns, message), *self._acceptor.check_sessions(now_ns)]
            case messages.Evicted(reason=reason, for_call=for_call, on_request=on_request):
                mismatch = with_you(reason, self.peer) or "this peer called something else than the others"
                error = CallMismatch(mismatch) if for_call else Evicted(reason, self._me, on_request)
                return self._end(error, f"evicted: {reason}")
            case messages.Left():
                return self._end(None, "left")
            case messages.Refused(reason=reason):
                return self._lose_master(f"it refuses this peer ({reason})")
            case ProbeGraph() | RoundStart() | RoundEnd() | RoundClock() | ProbeHalt():
                return []  # this peer does not probe: else the session has handed it to the probing shell
            case (
                messages.Challenge()
                | messages.Status()
                | messages.Events()
                | messages.EvictResponse()
                | messages.RunList()
            ):
                return self._lose_master(f"it message {type(message).__name__} out of turn")
            case RelayWelcome() | RelayAnswers() | RelayRound() | RelayGraph() | RelayClocks():
                return self._lose_master(f"it message {type(message).__name__} out of turn")
            case NodeWelcome() | ProbeAnswer() | Welcome() | Resumed() | messages.GuardianWelcome():
                return self._lose_master(f"it message {type(message).__name__} out of turn")
            case _:
                assert_never(message)

    def _admission_waits(self, now_ns: int, waits: messages.AdmissionWaits) -> list[Effect]:
        """While the peers that the admission waits for make progress, the timeout of the join starts again."""
        if self.has_joined:
            return []
        self._admission = waits
        if waits.moving:
            self._join_deadline_ns = max(self._join_deadline_ns, now_ns + self._join_timeout_ns)
        if now_ns < self._log_admission_ns:
            return []
        self._log_admission_ns = now_ns + LOG_ADMISSION_NS
        left_ms = None if waits.moving else max(0, self._join_deadline_ns - now_ns) // MS
        text = with_you(waits.text, self.peer)
        return [Notify(AdmissionDelayed((now_ns - self._join_since_ns) // MS, text, left_ms))]

    def _sync_planned(self, now_ns: int, plan: messages.SyncPlan) -> list[Effect]:
        call = self._calls.mark_planned(plan.ballot)
        if call is None:
            # The program has given up the call, and the master receives that. Peers that connect for it are refused.
            stopping = self._sessions.stop(("state", plan.sync), "it was given up")
            return [*stopping, *self._acceptor.check_sessions(now_ns)]
        try:
            if call.manifest is None:
                raise RemoteProtocolError(f"it plans a sync for call {plan.ballot}, which is none")
            effects = self._syncing.begin(now_ns, self.peer, plan, call.manifest)
            self._sync_fence = self._fence
        except RemoteProtocolError as error:
            return self._lose_master(f"it breaks the protocol ({error})")
        return effects + self._acceptor.check_sessions(now_ns)

    def _sync_done(self, message: messages.SyncDone) -> list[Effect]:
        moved = self._syncing.moved(message.ballot)
        diverged, participants = tuple(message.diverged), tuple(message.participants)
        done = SyncSucceeded(message.revision, *moved, diverged, message.lineage, participants)
        effects = self._end_sync(message.ballot)
        if not self._calls.finish(message.ballot):
            return effects
        if message.rollback is not None:
            effects.append(Notify(StateRolledBack(self.identity.group, message.rollback)))
        return [*effects, *self._report_diverged(message.diverged), CallFinished(message.ballot, done)]

    def _report_diverged(self, diverged: Iterable[Divergence]) -> list[Effect]:
        return [Notify(PeerDiverged(self.identity.group, each)) for each in diverged]

    def _end_sync(self, ballot: int) -> list[Effect]:
        return self._syncing.end("the sync is over") if self._syncing.ballot == ballot else []

    # Epochs

    def _seal(self, epoch: Epoch) -> list[Effect]:
        if self.record is not None and epoch == self.record.epoch:
            self._enter(PeerInput.SEALED)
        # SealEngine comes last: its response goes to the master before anything else happens.
        return [*self._lanes.stop("the epoch is sealed"), SealEngine(epoch)]

    def _recorded(self, now_ns: int, record: Record) -> list[Effect]:
        before = self.record
        known = 0 if before is None else before.epoch
        members = [member.peer for member in record.members]
        if record.fence > self._fence or record.epoch <= known or self.peer not in members:
            reason = f"a record of epoch {record.epoch} (fence {record.fence}) that is not for this peer"
            return [Notify(ConnectionDropped(self._control.address, reason))]
        effects: list[Effect] = []
        if before is not None:
            if self.engine_epoch == before.epoch == record.previous:
                effects.append(self._settle(record))
            if is_admission(before, record):
                effects.append(RestartCalls())
            elif refused := refusals(before, record):
                # Calls of an epoch that never ran here ended for this peer, too.
                effects.append(RefuseCalls(refused))
        self._enter(PeerInput.RECORDED)
        self.record = record
        self.world = record.world
        self.unsynced.update(record.newcomers)
        self._facts.recorded(record)
        effects += self._interrupt_sync(record.fence)
        effects += self._syncing.members(now_ns, set(members))
        update = self._lanes.begin(now_ns, record)
        update.add(self._acceptor.check_lanes())
        return effects + self._report_lost(update)

    def _settle(self, record: Record) -> Settle:
        assert self.record is not None
        return settlement(self.record, record)

    def _installed(self, epoch: Epoch, world: World) -> list[Effect]:
        if not self.is_running or epoch != self.engine_epoch:
            return []  # crossed a seal on the wire
        assert self.record is not None
        self._enter(PeerInput.ALL_ATTACHED)
        self.world = world
        effects: list[Effect] = []
        if not self.has_joined:
            effects.append(Joined(self._facts.joined(self.record)))
        self._last_steady_epoch = epoch
        return effects + self._send_all(self._calls.cast(epoch))

    def _call_done(self, done: messages.CallDone) -> list[Effect]:
        call = self._calls.finish(done.ballot)
        if call is None or self.record is None:
            return []
        self.world = done.world
        if call.question is not None:
            return [CallFinished(done.ballot, self._facts.answered(call.question, done))]
        return [CallFinished(done.ballot, self._facts.call_done(done, self.record))]

    # Another master

    @property
    def _fence(self) -> int:
        return 0 if self._control.ticket is None else self._control.ticket.fence

    def _seek_master(self, now_ns: int, reason: str) -> list[Effect]:
        """Seek a master with a higher fence. Ops go on as far as they need no master, and calls wait."""
        if not self._control.may_resume:
            return self._lose_master(reason)
        assert self._control.conn is not None
        closing = CloseConn(self._control.conn, reason)
        self._enter(PeerInput.MASTER_LOST)
        epoch = 0 if self.record is None else self.record.epoch
        deadline_ns = now_ns + self._timings.reconnect_ms * MS if epoch else self._join_deadline_ns
        lost = Notify(MasterLost(self._control.address, reason))
        return [closing, lost, *self._control.lost(now_ns, deadline_ns, epoch)]

    def _resumed(self, now_ns: int) -> list[Effect]:
        """A new master knows this peer: send it what it cannot know."""
        is_installed = self.record is not None and self._last_steady_epoch == self.record.epoch
        report = self._answers.report(self._calls.ballot, is_installed, self._facts.answers)
        busy = [messages.Busy(self._busy_ms(now_ns))] if self._busy_until_ns > now_ns else []
        leaving = [] if self._leaving is None else [self._leaving]
        return self._send_all([report, *busy, *self._calls.withdraw_overdue(now_ns), *leaving])

    def _busy_ms(self, now_ns: int) -> int:
        return max(0, -((now_ns - self._busy_until_ns) // MS))

    def _interrupt_sync(self, fence: int) -> list[Effect]:
        """A record of another master than the one that planned the sync: that sync will never end."""
        if fence <= self._sync_fence:
            return []
        ballots = self._calls.interrupt_syncs()
        self._answers.repeats_sync |= bool(ballots)
        diverged = self._syncing.diverged
        effects = self._syncing.end("its master is gone") if self._syncing.ballot is not None else []
        effects += self._report_diverged(diverged)
        return effects + [CallFinished(ballot, SyncInterrupted(diverged)) for ballot in ballots]

    # Ops, deadlines and the end

    def _op_report(self, event: OpMismatched | OpTimedOut | OpCancelled) -> list[Effect]:
        """Forward the engine's report of an op to the master, unless its epoch is sealed or over: verdicts decide then.

        In the next epoch the same tag and sequence may be another op, which is not at fault.
        """
        if not self.is_running or event.epoch != self.engine_epoch:
            return []
        return self._send_to_master(op_report(event))

    def _tick(self, now_ns: int) -> list[Effect]:
        effects = self._control.tick(now_ns)
        if isinstance(effects, ControlFailed):
            return self._end(effects.error, "the master is unreachable")
        if self._control.is_proven and not self.has_joined and now_ns >= self._join_deadline_ns:
            return self._join_too_late(now_ns)
        effects = effects + self._acceptor.tick(now_ns) + self._lanes.tick(now_ns) + self._channels.tick(now_ns)
        withdrawn, failed = self._calls.tick(now_ns)
        effects += self._send_all(withdrawn)
        for ballot, reason in failed:
            self._answers.repeats_sync = False
            effects += [*self._end_sync(ballot), CallFinished(ballot, reason)]
        return effects

    def _join_too_late(self, now_ns: int) -> list[Effect]:
        waited_ms = (now_ns - self._join_since_ns) // MS
        error = join_too_late(self._me, waited_ms, self._join_timeout_ns // MS, self._admission)
        return self._send_to_master(messages.Leave()) + self._end(error, "not admitted in time")

    def _master_silent(self, now_ns: int, conn: int, silent_ms: int) -> list[Effect]:
        if conn != self.control_conn:
            return []
        return self._seek_master(now_ns, f"it has been silent for {silent_ms} ms")

    def _lose_master(self, reason: str) -> list[Effect]:
        """The master is gone for good."""
        error = None if self._leaving else MasterUnreachable(self._control.address, reason)
        return self._end(error, reason)

    def _end(self, error: RingfoldError | None, reason: str) -> list[Effect]:
        self._enter(PeerInput.ENDED)
        effects = self._lanes.end(reason) + self._acceptor.end(reason) + self._channels.end(reason)
        if self._control.conn is not None:
            effects.append(CloseConn(self._control.conn, reason))
        return [*effects, FailAll(Reason("evicted", reason)), Ended(error)]

    def _after_end(self, event: Event) -> list[Effect]:
        match event:
            case Accepted(conn, _, _) | Dialled(_, conn):
                return [CloseConn(conn, "this peer is out of the run")]
        return []

    def _send_to_master(self, message: Message) -> list[Effect]:
        """Send a message to the master. Without a master it is dropped: the next one begins with a seal."""
        if not self._control.is_proven:
            return []
        assert self._control.conn is not None
        return [SendMessage(self._control.conn, message)]

    def _send_all(self, several: Iterable[Message]) -> list[Effect]:
        return [effect for message in several for effect in self._send_to_master(message)]

    def _check_invariants(self) -> None:
        newest = 0 if self.record is None else self.record.epoch
        assert self.engine_epoch <= newest
        assert self.is_running <= (self.engine_epoch == newest)
        assert self.state is not PeerState.STEADY or self._control.is_proven


# Verdicts of a record, reports of ops


def settlement(before: Record, record: Record) -> Settle:
    """How the ops of the epoch `before` end, by the record after it."""
    default = _default_reason(before, record)
    return Settle(record.previous, _with_reasons(record, default), default)


def refusals(before: Record, record: Record) -> tuple[Verdict, ...]:
    """The calls of the epoch before that ended without success and are not retried."""
    verdicts = _with_reasons(record, _default_reason(before, record))
    return tuple(verdict for verdict in verdicts if Final.of(verdict) is Final.OVER)


def is_admission(before: Record, record: Record) -> bool:
    """Whether the new record has members that the old one had not. All others wait in `update_topology`."""
    return not {member.peer for member in record.members} <= {member.peer for member in before.members}


def op_report(
    event: OpMismatched | OpTimedOut | OpCancelled,
) -> messages.OpMismatch | messages.OpTimeout | messages.OpCancelled:
    """The report to the master about an op that cannot succeed."""
    epoch, op = event.epoch, OpRef(event.tag, event.sequence)
    match event:
        case OpMismatched():
            return messages.OpMismatch(epoch, op, event.peer, event.mine, event.theirs)
        case OpTimedOut():
            return messages.OpTimeout(epoch, op, event.waited_ms, event.descriptor, event.final)
        case OpCancelled():
            return messages.OpCancelled(epoch, op)
        case _:
            assert_never(event)


def join_too_late(who: str, waited_ms: int, timeout_ms: int, waits: messages.AdmissionWaits | None) -> DeadlineExceeded:
    """The error of a join that was not admitted in time. It names the peers that the admission waited for, by the
    master's last report."""
    why = "not all peers of the run have called update_topology, or they could not be connected"
    peers: list[PeerId] = []
    if waits is not None:
        why, peers = waits.text, waits.peers
    text = (
        f"join: {who} was not admitted within {waited_ms / 1000:.1f} s: {why}. `steps` calls update_topology between "
        "steps; other programs must call it on all peers. The setting join_timeout_s "
        f"({timeout_ms / 1000:.0f} s) says how long to wait while nothing moves"
    )
    return DeadlineExceeded("join", peers, waited_ms, text)


def _default_reason(before: Record, record: Record) -> Reason:
    gone = sorted({member.peer for member in before.members} - {member.peer for member in record.members})
    return Reason("lost" if gone else "edge", record.reason, gone)


def _with_reasons(record: Record, default: Reason) -> tuple[Verdict, ...]:
    return tuple(
        verdict if verdict.commit or verdict.reason is not None else structs.replace(verdict, reason=default)
        for verdict in record.verdicts
    )
