"""The peer's machine: every transition of a peer, from the first word with the master to the last. Pure.

    joining ----> registered ----> attaching ----> installed ----> steady          (a member, epoch after epoch)
     Hello/        waits to be       |  ^   lanes     | Attached     | Installed: every member is attached
     Welcome       admitted          |  |   complete  v              v
                                     |  +-- Record -- sealed <------ Seal          (any change of members or order)
                                     +--------------> sealed

Two epochs matter. `record.epoch` is the newest one the master recorded; `engine_epoch` is the one the engine runs. They
differ between Record and Install. A Seal may name an epoch that this peer never installed (somebody else could not
attach): the answer is then an empty list, and verdicts about that epoch are not for this peer, whose ops never ran in
it.

Verdicts come with the Record and settle the old epoch before anything is connected: the program learns of an abort as
early as it can, and ops that are retried wait in the engine for the Install.

A master that is gone is not the end: the peer is *seeking* one (`control.py`), with everything else as it was, until it
has resumed; the new master then seals the epoch, as for any other change.

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
from ringfold.peer.codes import Final
from ringfold.peer.control import CONTROL_KEY, Control, Refusal, decode_from_master
from ringfold.peer.effects import (
    CallFinished,
    CloseConn,
    Effect,
    Ended,
    FailAll,
    Install,
    Joined,
    ProbeCut,
    ProbeHeard,
    RefuseCalls,
    RestartCalls,
    SealEngine,
    SendMessage,
    SetRegistrations,
    Settle,
    SyncInterrupted,
    SyncSucceeded,
    Tell,
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
    EngineSealed,
    Event,
    LinkLost,
    MessageReceived,
    Mismatch,
    OpCancelled,
    Opened,
    OpTimedOut,
    ProbeSays,
    Sampled,
    Silent,
    Tick,
)
from ringfold.peer.lanes import Lanes, Turn
from ringfold.peer.measure.link_rate import LinkMeasurement
from ringfold.peer.settings import MS, Identity, PeerTimings
from ringfold.peer.side_channels import FIRST_KEY as FIRST_SESSION_KEY
from ringfold.peer.side_channels import BulkSessions, SideChannels
from ringfold.peer.sync.syncing import Syncing
from ringfold.peer.votes import Calls, Facts, Memory
from ringfold.state.manifest import StateManifest
from ringfold.wire import messages
from ringfold.wire.events import (
    AdmissionDelayed,
    ConnectionDropped,
    MasterLost,
    PeerDiverged,
    ResumeDelayed,
    StateRolledBack,
)
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
from ringfold.wire.naming import with_names, with_you
from ringfold.wire.probing import NodeWelcome, ProbeAnswer, ProbeGraph, ProbeHalt, RoundClock, RoundEnd, RoundStart

TELL_ADMISSION_NS = 10_000 * MS
"""How often the log says what the admission waits for."""


class PeerMachine:
    """Everything a peer decides. `step` is the only way in; the attributes are for reading."""

    def __init__(self, identity: Identity, timings: PeerTimings) -> None:
        self.identity = identity
        self.peer: PeerId = 0
        self.record: Record | None = None
        self.engine_epoch: Epoch = 0
        self.world = World()
        self._facts = Facts()
        self.facts = self._facts.by_epoch
        self.unsynced: set[PeerId] = set()
        """Who was admitted since the program last synced state."""
        self.ended = False
        self._timings = timings
        self._control = Control(identity, timings)
        self._lanes = Lanes(timings, identity.token)
        self._sessions = BulkSessions(timings, identity.token)
        self._syncing = Syncing(self._sessions, self._say)
        self._measurement = LinkMeasurement(self._sessions, self._say)
        self._channels = SideChannels(self._sessions, {"state": self._syncing, "measure": self._measurement})
        self._calls = Calls(timings.answer_ms)
        self._memory = Memory()
        self._planned_by = 0  # the fence of the master whose sync this peer takes part in
        self._leaving: messages.Leave | None = None
        self._sealed = False
        self._steady = False
        self._steady_epoch = 0  # the last one of which every member is known to be attached
        self._joined = False
        self._settled = True
        self._join_since_ns = self._join_by_ns = self._join_patience_ns = 0
        self._tell_admission_ns = 0
        self._admission: messages.AdmissionWaits | None = None
        self._busy_until_ns = 0

    @property
    def is_running(self) -> bool:
        """Whether the engine runs the newest record, so that an op submitted now belongs to it."""
        return self.record is not None and self.engine_epoch == self.record.epoch and not self._sealed

    @property
    def masters(self) -> tuple[str, ...]:
        """The addresses of all masters that this peer knows; first the one that it is connected to."""
        return self._control.addresses

    @property
    def names(self) -> dict[PeerId, str]:
        """Of the members of the newest record."""
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
        parts = (self._control, self._lanes, self._channels, self._calls)
        times = [time for part in parts if (time := part.next_deadline_ns()) is not None]
        if self._control.stage == "proven" and not self._joined:
            times.append(self._join_by_ns)
        return min(times, default=None)

    def step(self, now_ns: int, event: Event) -> list[Effect]:
        """Apply one event; return what the shell must now do, in order."""
        if self.ended:
            return self._after_the_end(event)
        match event:
            case MessageReceived():
                effects = self._message(now_ns, event)
            case Dialled() | DialFailed() | Opened() | Accepted() | Closed():
                effects = self._connection(now_ns, event)
            case LinkLost(peer, outgoing, reason, still_there):
                effects = self._turn(now_ns, self._lanes.link_lost(now_ns, (outgoing, peer), still_there, reason))
            case Mismatch() | OpTimedOut() | OpCancelled():
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
                effects = self._silent(now_ns, conn, silent_ms)
            case EngineSealed(epoch, ops):
                effects = self._say(messages.Sealed(epoch, list(ops)))
            case Tick():
                effects = self._tick(now_ns)
            case CallJoin(masters, deadline_ns):
                self._join_since_ns, self._join_by_ns = now_ns, deadline_ns
                self._join_patience_ns, self._tell_admission_ns = deadline_ns - now_ns, now_ns + TELL_ADMISSION_NS
                effects = self._control.start(now_ns, masters, deadline_ns)
            case CallVote():
                self._memory.redoes &= event.kind == "sync"
                steady = self.engine_epoch if self._steady else None
                votes = self._calls.ask(now_ns, event, self.engine_epoch, steady)
                effects = [effect for vote in votes for effect in self._say(vote)]
            case CallBusy(until_ns):
                self._busy_until_ns = until_ns
                effects = self._say(messages.Busy(self._busy_ms(now_ns)))
            case CallGivenUp(ballot):
                withdrawn, self._memory.redoes = self._calls.give_up(now_ns, ballot), False
                effects = [] if withdrawn is None else [*self._say(withdrawn), *self._sync_over(ballot)]
            case CallLeave(stopped):
                self._leaving = messages.Leave(stopped)
                is_in = self._control.stage == "proven" or self.record is not None
                effects = self._say(self._leaving) if is_in else self._end(None, "left")
            case ProbeSays(message):
                effects = self._say(message)
            case _:
                assert_never(event)
        effects += self._attached(now_ns)
        if self._measurement.is_busy and not self._calls.waits_in("optimize"):
            effects += self._measurement.end("the call is over")
        self._check_invariants()
        return effects

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
                return lanes.accepted(now_ns, conn, remote, nonce)
            case Closed(conn, reason):
                if conn == control.conn:
                    if control.stage != "proven":
                        return control.closed(now_ns, reason)
                    return self._seek_master(now_ns, f"its connection closed ({reason})")
                over = sessions.closed(now_ns, conn, reason)
                if over is not None:
                    return self._channels.report(now_ns, *over)
                return self._turn(now_ns, lanes.closed(now_ns, conn, reason))

    def _let_visitors_in(self, now_ns: int) -> list[Effect]:
        """Look at the guests that want to visit: the master may have spoken of them by now."""
        effects: list[Effect] = []
        for conn, nonce, hello, round_trip_ns in self._lanes.visitors():
            verdict = self._sessions.judge(conn, nonce, hello, round_trip_ns)
            if isinstance(verdict, str):
                effects += self._lanes.turn_away(conn, verdict)
            elif verdict is not None:
                self._lanes.let_in(conn)
                effects += self._channels.report(now_ns, verdict[0], [verdict[1]])
        return effects

    def _turn(self, now_ns: int, turn: Turn) -> list[Effect]:
        """A turn of the lanes. Links that broke are reported only in an epoch that runs: a seal outdates them."""
        effects = turn.effects
        if turn.visitor is not None:
            effects += self._let_visitors_in(now_ns)
        if self.is_running:
            for lost in turn.lost:
                source, target = self._lanes.ends((lost.outgoing, lost.peer))
                effects += self._say(messages.LinkLost(self.engine_epoch, source, target, lost.reason))
        return effects

    def _attached(self, now_ns: int) -> list[Effect]:
        """Install the epoch when its lanes are complete, or report what cannot be had."""
        lanes, record = self._lanes, self.record
        if record is None or not lanes.attaching:
            return []
        if failing := lanes.hopeless(now_ns):
            return [
                *lanes.stop("the epoch cannot be attached"),
                *self._say(messages.AttachFailed(record.epoch, failing)),
            ]
        if not lanes.complete(now_ns):
            return []
        dialling = lanes.installed(now_ns)
        self.engine_epoch, self._settled = record.epoch, False
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
        )
        return [install, *self._say(messages.Attached(record.epoch)), *dialling]

    # What the master says

    def _message(self, now_ns: int, event: MessageReceived) -> list[Effect]:
        if event.conn in self._sessions.open:
            return self._channels.message(now_ns, event.conn, event.body)
        if self._sessions.is_dialling(event.conn):
            return self._channels.report(now_ns, *self._sessions.message(now_ns, event.conn, event.body))
        if event.conn != self._control.conn:
            return self._turn(now_ns, self._lanes.message(now_ns, event.conn, event.body))
        if self._control.stage != "proven":
            effects, outcome = self._control.message(now_ns, event.body)
            match outcome:
                case Welcome():
                    self.peer = self._lanes.me = self._sessions.me = outcome.peer
                case Resumed():
                    effects += self._resumed(now_ns)
                case Refusal(error):
                    if isinstance(error, Evicted):
                        error = Evicted(error.reason, self._me)
                    effects += self._end(None if self._leaving else error, "the master refused")
            return effects
        try:
            said = decode_from_master(event.body)
        except RemoteProtocolError as error:
            return self._lose_master(f"it does not keep to the protocol ({error})")
        self._memory.hear(said)
        return self._master_says(now_ns, said)

    def _master_says(self, now_ns: int, said: messages.FromMaster) -> list[Effect]:
        match said:
            case messages.Registrations(count=count):
                self._facts.heard = count
                return [SetRegistrations(count)]
            case messages.AdmissionWaits():
                return self._admission_waits(now_ns, said)
            case messages.Seal(epoch=epoch):
                return self._seal(epoch)
            case Record():
                return self._recorded(now_ns, said)
            case messages.Installed(epoch=epoch, world=world):
                return self._installed(epoch, world)
            case messages.CallDone():
                return self._call_done(said)
            case messages.CallFailed(ballot=ballot, reason=reason):
                self._facts.call_failed()
                over = self._sync_over(ballot)
                return [*over, CallFinished(ballot, reason)] if self._calls.finish(ballot) else over
            case messages.CallGoesOn(ballot=ballot):
                self._calls.resume(now_ns, ballot)
                return []
            case messages.SyncGoesOn(ballot=ballot):
                self._calls.goes_on(now_ns, ballot)
                return []
            case messages.ResumeWaits(ballot=ballot):
                self._calls.goes_on(now_ns, ballot)
                return [Tell(ResumeDelayed(self.identity.group, said.revision, said.names, said.left_ms))]
            case messages.SyncPlan():
                return self._sync_planned(now_ns, said)
            case messages.SyncDone():
                return self._sync_done(said)
            case messages.Measure():
                if not self._calls.waits_in("optimize"):
                    return self._measurement.refuse(said)
                return [*self._measurement.begin(now_ns, said), *self._let_visitors_in(now_ns)]
            case messages.Evicted(reason=reason, for_call=for_call, on_request=on_request):
                told = with_you(reason, self.peer) or "this peer called something else than the others"
                error = CallMismatch(told) if for_call else Evicted(reason, self._me, on_request)
                return self._end(error, f"evicted: {reason}")
            case messages.Left():
                return self._end(None, "left")
            case messages.Refused(reason=reason):
                return self._lose_master(f"it refuses this peer ({reason})")
            case ProbeGraph() | RoundStart() | RoundEnd() | RoundClock() | ProbeHalt():
                return [ProbeHeard(said)] if self.identity.probes else []
            case messages.Challenge() | messages.Status() | messages.EvictResponse() | messages.RunList():
                return self._lose_master(f"it said {type(said).__name__} out of turn")
            case NodeWelcome() | ProbeAnswer() | Welcome() | Resumed():
                return self._lose_master(f"it said {type(said).__name__} out of turn")
            case _:
                assert_never(said)

    def _admission_waits(self, now_ns: int, waits: messages.AdmissionWaits) -> list[Effect]:
        """As long as those who are waited for get on with their work, this peer's patience starts again."""
        if self._joined:
            return []
        self._admission = waits
        if waits.moving:
            self._join_by_ns = max(self._join_by_ns, now_ns + self._join_patience_ns)
        if now_ns < self._tell_admission_ns:
            return []
        self._tell_admission_ns = now_ns + TELL_ADMISSION_NS
        left_ms = None if waits.moving else max(0, self._join_by_ns - now_ns) // MS
        text = with_you(waits.text, self.peer)
        return [Tell(AdmissionDelayed((now_ns - self._join_since_ns) // MS, text, left_ms))]

    def _sync_planned(self, now_ns: int, plan: messages.SyncPlan) -> list[Effect]:
        asked = self._calls.planned(plan.ballot)
        if asked is None:
            # The program gave the call up, and the master hears of it. Who wants to visit need not wait here.
            return [*self._sessions.stop(("state", plan.sync), "it was given up"), *self._let_visitors_in(now_ns)]
        try:
            if asked.manifest is None:
                raise RemoteProtocolError(f"it plans a sync for call {plan.ballot}, which is none")
            effects = self._syncing.begin(now_ns, self.peer, plan, asked.manifest)
            self._planned_by = self._fence
        except RemoteProtocolError as error:
            return self._lose_master(f"it does not keep to the protocol ({error})")
        return effects + self._let_visitors_in(now_ns)

    def _sync_done(self, said: messages.SyncDone) -> list[Effect]:
        done = SyncSucceeded(said.revision, *self._syncing.moved(said.ballot), tuple(said.diverged), said.lineage)
        over = self._sync_over(said.ballot)
        if not self._calls.finish(said.ballot):
            return over
        if said.rollback is not None:
            over.append(Tell(StateRolledBack(self.identity.group, said.rollback)))
        return [*over, *self._report_diverged(said.diverged), CallFinished(said.ballot, done)]

    def _report_diverged(self, diverged: Iterable[Divergence]) -> list[Effect]:
        return [Tell(PeerDiverged(self.identity.group, each)) for each in diverged]

    def _sync_over(self, ballot: int) -> list[Effect]:
        return self._syncing.end("the sync is over") if self._syncing.ballot == ballot else []

    def _seal(self, epoch: Epoch) -> list[Effect]:
        if self.record is not None and epoch == self.record.epoch:
            self._sealed, self._steady = True, False
        # SealEngine comes last: its answer goes to the master before anything else happens.
        return [*self._lanes.stop("the epoch is sealed"), SealEngine(epoch)]

    def _recorded(self, now_ns: int, record: Record) -> list[Effect]:
        known = 0 if self.record is None else self.record.epoch
        members = [member.peer for member in record.members]
        if record.fence > self._fence or record.epoch <= known or self.peer not in members:
            reason = f"a record of epoch {record.epoch} (fence {record.fence}) that is not for this peer"
            return [Tell(ConnectionDropped(self._control.address, reason))]
        settling: list[Effect] = []
        if not self._settled and self.engine_epoch == record.previous:
            settling.append(self._settle(record))
        if self.record is not None:
            if is_admission(self.record, record):
                settling.append(RestartCalls())
            elif refused := refusals(self.record, record):
                # Calls of an epoch that never ran here ended for this peer, too.
                settling.append(RefuseCalls(refused))
        self._settled = True
        self.record, self.world = record, record.world
        self._sealed = self._steady = False
        self.unsynced.update(record.newcomers)
        self._facts.recorded(record)
        settling += self._interrupted(record.fence)
        settling += self._syncing.members(now_ns, set(members))
        return settling + self._turn(now_ns, self._lanes.begin(now_ns, record))

    def _settle(self, record: Record) -> Settle:
        assert self.record is not None
        return settlement(self.record, record)

    def _installed(self, epoch: Epoch, world: World) -> list[Effect]:
        if not self.is_running or epoch != self.engine_epoch:
            return []  # crossed a seal on the wire
        assert self.record is not None
        self._steady, self._steady_epoch, self.world = True, epoch, world
        effects: list[Effect] = []
        if not self._joined:
            self._joined = True
            effects.append(Joined(self._facts.joined(self.record)))
        return effects + [effect for vote in self._calls.cast(epoch) for effect in self._say(vote)]

    def _call_done(self, done: messages.CallDone) -> list[Effect]:
        if not self._calls.finish(done.ballot) or self.record is None:
            return []
        self.world = done.world
        return [CallFinished(done.ballot, self._facts.call_done(done, self.record))]

    # Another master

    @property
    def _fence(self) -> int:
        return 0 if self._control.ticket is None else self._control.ticket.fence

    def _seek_master(self, now_ns: int, reason: str) -> list[Effect]:
        """Ops go on as far as they need no master, calls wait, and one with a higher fence is sought."""
        if not self._control.may_return:
            return self._lose_master(reason)
        assert self._control.conn is not None
        closing, self._steady = CloseConn(self._control.conn, reason), False
        epoch = 0 if self.record is None else self.record.epoch
        until_ns = now_ns + self._timings.reconnect_ms * MS if epoch else self._join_by_ns
        cut: list[Effect] = [ProbeCut()] if self.identity.probes else []
        lost = Tell(MasterLost(self._control.address, reason))
        return [closing, lost, *cut, *self._control.lost(now_ns, until_ns, epoch)]

    def _resumed(self, now_ns: int) -> list[Effect]:
        """A new master knows this peer: bring along what it cannot know."""
        is_installed = self.record is not None and self._steady_epoch == self.record.epoch
        brought = self._memory.brought(self._calls.ballot, is_installed)
        busy = [messages.Busy(self._busy_ms(now_ns))] if self._busy_until_ns > now_ns else []
        leaving = [] if self._leaving is None else [self._leaving]
        words = (brought, *busy, *self._calls.overdue(now_ns), *leaving)
        return [said for word in words for said in self._say(word)]

    def _busy_ms(self, now_ns: int) -> int:
        return max(0, -((now_ns - self._busy_until_ns) // MS))

    def _interrupted(self, fence: int) -> list[Effect]:
        """A record of another master than the one that planned the sync: that sync will never end."""
        if fence <= self._planned_by:
            return []
        ballots = self._calls.interrupt()
        self._memory.redoes |= bool(ballots)
        diverged = self._syncing.diverged
        over = self._syncing.end("its master is gone") if self._syncing.ballot is not None else []
        over += self._report_diverged(diverged)
        return over + [CallFinished(ballot, SyncInterrupted(diverged)) for ballot in ballots]

    # Ops, time and the end

    def _op_report(self, event: Mismatch | OpTimedOut | OpCancelled) -> list[Effect]:
        """What the engine says of an op goes to the master, unless its epoch is sealed or over: verdicts decide then.

        In the next epoch the same tag and sequence may be another op, which has done nothing wrong.
        """
        if not self.is_running or event.epoch != self.engine_epoch:
            return []
        return self._say(op_report(event))

    def _tick(self, now_ns: int) -> list[Effect]:
        reaching = self._control.tick(now_ns)
        if isinstance(reaching, Refusal):
            return self._end(reaching.error, "the master is unreachable")
        if self._control.stage == "proven" and not self._joined and now_ns >= self._join_by_ns:
            return self._join_too_late(now_ns)
        effects = reaching + self._lanes.tick(now_ns) + self._channels.tick(now_ns)
        withdrawn, failed = self._calls.tick(now_ns)
        for vote in withdrawn:
            effects += self._say(vote)
        for ballot, reason in failed:
            self._memory.redoes = False
            effects += [*self._sync_over(ballot), CallFinished(ballot, reason)]
        return effects

    def _join_too_late(self, now_ns: int) -> list[Effect]:
        waited_ms, patience_ms = (now_ns - self._join_since_ns) // MS, self._join_patience_ns // MS
        error = join_too_late(self._me, waited_ms, patience_ms, self._admission)
        return self._say(messages.Leave()) + self._end(error, "not admitted in time")

    def _silent(self, now_ns: int, conn: int, silent_ms: int) -> list[Effect]:
        reason = f"it has been silent for {silent_ms} ms"
        return self._seek_master(now_ns, reason) if conn == self._control.conn else []

    def _lose_master(self, reason: str) -> list[Effect]:
        error = None if self._leaving else MasterUnreachable(self._control.address, reason)
        return self._end(error, reason)

    def _end(self, error: RingfoldError | None, reason: str) -> list[Effect]:
        assert not self.ended
        self.ended, self._steady = True, False
        effects = self._lanes.end(reason) + self._channels.end(reason)
        if self._control.conn is not None:
            effects.append(CloseConn(self._control.conn, reason))
        return [*effects, FailAll(Reason("evicted", reason)), Ended(error)]

    def _after_the_end(self, event: Event) -> list[Effect]:
        match event:
            case Accepted(conn, _, _) | Dialled(_, conn):
                return [CloseConn(conn, "this peer is out of the run")]
        return []

    def _say(self, message: Message) -> list[Effect]:
        """To the master. While there is none it goes unsaid: the next one begins with a seal, which settles it."""
        if self._control.stage != "proven":
            return []
        assert self._control.conn is not None
        return [SendMessage(self._control.conn, message)]

    def _check_invariants(self) -> None:
        newest = 0 if self.record is None else self.record.epoch
        assert self.engine_epoch <= newest
        assert not self._steady or self.engine_epoch == newest
        assert self.ended or not self._steady or self._control.stage == "proven"


def settlement(before: Record, record: Record) -> Settle:
    """How the ops of the epoch `before` end, by the record that follows it."""
    default = _default_reason(before, record)
    return Settle(record.previous, _with_reasons(record, default), default)


def refusals(before: Record, record: Record) -> tuple[Verdict, ...]:
    """The calls of the epoch before that ended without success, and that nobody tries again."""
    verdicts = _with_reasons(record, _default_reason(before, record))
    return tuple(verdict for verdict in verdicts if Final.of(verdict) is Final.OVER)


def is_admission(before: Record, record: Record) -> bool:
    """Whether somebody is a member of the new record who was in none before. All others wait in `update_topology`."""
    return not {member.peer for member in record.members} <= {member.peer for member in before.members}


def op_report(
    event: Mismatch | OpTimedOut | OpCancelled,
) -> messages.OpMismatch | messages.OpTimeout | messages.OpCancelled:
    """What the master is told of an op that cannot end well."""
    epoch, op = event.epoch, OpRef(event.tag, event.sequence)
    match event:
        case Mismatch():
            return messages.OpMismatch(epoch, op, event.peer, event.mine, event.theirs)
        case OpTimedOut():
            return messages.OpTimeout(epoch, op, event.waited_ms, event.descriptor, event.final)
        case OpCancelled():
            return messages.OpCancelled(epoch, op)
        case _:
            assert_never(event)


def join_too_late(
    who: str, waited_ms: int, patience_ms: int, waits: messages.AdmissionWaits | None
) -> DeadlineExceeded:
    """What a program hears that joined in vain: whom its admission waited for, as the master said last."""
    why = "not all peers of the run have called update_topology, or they could not be connected"
    peers: list[PeerId] = []
    if waits is not None:
        why, peers = waits.text, waits.peers
    text = (
        f"join: {who} was not admitted within {waited_ms / 1000:.1f} s: {why}. `steps` calls update_topology between "
        "steps; other programs must call it on all peers. The setting join_timeout_s "
        f"({patience_ms / 1000:.0f} s) says how long to wait while nothing moves"
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
