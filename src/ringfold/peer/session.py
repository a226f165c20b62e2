"""The shell around a peer's machine: the engine, one thread, and the calls that wait.

The thread blocks in the engine without the GIL, steps the machine, and carries effects out. A call of the program
(join, vote, leave) steps the machine from its own thread. One lock serialises steps; it is held while a step and its
effects run, never during a wait for the network. So no epoch is sealed or installed while it is held, and an op that
is submitted under it belongs to the epoch of the record that was read under it (`submit_in_epoch`).

The bytes of a sync's blocks are read, verified and written by the thread without the lock (`_copy_blocks`), so that a
copy to or from a GPU, or a blake3 hash, does not block threads that only read the machine. This is safe because no
other thread touches the arrays meanwhile: the program that owns them is blocked in the sync, and its call does not
return, for whatever reason, while a copy runs (`_end_transfer`). All copies of a peer are made by this one thread, one
after the other, before it takes the next event; so no source is lost or replaced during one. A program that writes to
its arrays from another thread during a sync breaks the contract of `sync_shared_state`, with or without the lock; the
hashes find that out.

A peer that probes is a node, too. Its probing shell runs in the same thread under the same lock; it gets the master's
messages about probing from here and sends its own over the control connection, past the machine. Training does not
depend on it: any exception ends probing, and nothing else. The same holds for the path shares of the host's agent.

Whatever ends the session, in the end there is no thread and no socket left. A forked child closes the parent's sockets
at once, so that a data loader does not keep a dead trainer alive; its copy of the session is dead.
"""

import contextlib
import logging
import os
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import NoReturn, TypeVar

import msgspec

from ringfold.clock.global_clock import ClockModel, GlobalClock
from ringfold.errors import RemoteProtocolError, RingfoldError, UsageError
from ringfold.peer.effects import (
    CallFinished,
    CallOutcome,
    CallSucceeded,
    Dial,
    Effect,
    Ended,
    ExpectBlocks,
    FailAll,
    Install,
    Joined,
    Notify,
    SendBlocks,
    SendMessage,
    SyncInterrupted,
    SyncSucceeded,
    WriteBlocks,
)
from ringfold.peer.engine import Engine, event_of, execute
from ringfold.peer.events import (
    BlocksReceived,
    BlocksWritten,
    CallBusy,
    CallGivenUp,
    CallJoin,
    CallLeave,
    CallVote,
    DialFailed,
    Dialled,
    Event,
    MessageReceived,
    OpTimedOut,
    Tick,
)
from ringfold.peer.guardian import GuardianStarter
from ringfold.peer.machine import PeerMachine
from ringfold.peer.outcome import copy_error, error_of
from ringfold.peer.path_shares import PathShares, flows_of, hosts_of
from ringfold.peer.recording import Recording
from ringfold.peer.settings import Identity, PeerTimings
from ringfold.peer.sync.transfer import BlockTransfer
from ringfold.probe.logs.files import ProbeLog
from ringfold.probe.nodes.callbacks import ProbeEvents
from ringfold.probe.nodes.prober import ProbeSocket
from ringfold.probe.nodes.shell import NodeShell
from ringfold.probe.rounds.events import (
    FromRoundMaster,
    MasterConnected,
    MasterDisconnected,
    MasterMessageReceived,
    ToRoundMaster,
)
from ringfold.probe.rounds.node import RoundNode
from ringfold.runtime import master_client, threads
from ringfold.runtime.clock import monotonic_ns, random_bytes, raw_ns
from ringfold.runtime.log_limit import LogRateLimiter
from ringfold.state.snapshot import Snapshot
from ringfold.units import MS
from ringfold.units import S as S
from ringfold.wire.decoding import decode
from ringfold.wire.diagnostics import with_names
from ringfold.wire.events import EpochRuns, PeerEvicted, PeerJoined, StateSynced
from ringfold.wire.messages import (
    MAX_BUSY_MS,
    Offer,
    PendingQuestion,
    Reason,
    Record,
    VoteKind,
)
from ringfold.wire.notices import ConnectionAbandoned, ConnectionDropped, Notice
from ringfold.wire.probing import NodeClock, NodeId, RoundSummary
from ringfold.wire.proof import NONCE_BYTES

_log = logging.getLogger("ringfold.peer")
_LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}
_sessions: "weakref.WeakSet[Session]" = weakref.WeakSet()

LEAVE_S = 2.0
"""How long closing waits for the master's answer to `Leave`."""
MAX_SLEEP_S = 60.0
SIGNAL_S = 1.0
"""A call waits in slices of this length: a signal that arrives right before a wait does not end it, and its handler
runs between two slices."""

T = TypeVar("T")


class Session:
    """A peer's membership in a run, from join to leave. Thread-safe."""

    def __init__(
        self, engine: Engine, identity: Identity, timings: PeerTimings, recording: Recording | None = None
    ) -> None:
        self.engine = engine
        self.machine = PeerMachine(identity, timings)
        self.error: RingfoldError | None = None
        self.is_over = False
        self.joined_with: Record | None = None
        """The record that made this peer a member: its communicator uses it until the first op has returned."""
        self.is_forked = False
        """This is the copy of a forked child: nothing works here."""
        self.at_end: Callable[[], None] | None = None
        """Called once, in the session's thread, when everything is closed."""
        self.stopped = False
        """Whether this peer, if it left now, would leave before its program has finished."""
        self.probing: NodeShell | None = None
        """The probing shell, if this peer probes."""
        self.path_shares: PathShares | None = None
        """The hints of the host's agent about paths, if they are to be used."""
        self.guardian: GuardianStarter | None = None
        """What starts this peer's guardian at each new master, if it is to have one."""
        self.recording = recording
        """The record of this process's events."""
        self.probe_events = ProbeEvents(self.newest_round)
        self._probe_conn: int | None = None
        """The control connection over which the probing shell is connected to the master."""
        self._log_limit = LogRateLimiter()
        self._clock_model = ClockModel()
        self.clock = GlobalClock(self._clock_model, raw_ns)
        self._changed = threads.Condition(threads.RLock())
        self._joined = False
        self._stopping = False
        self._outcomes: dict[int, CallOutcome] = {}
        self._last_ballot = 0
        self._busy: dict[object, int] = {}
        """The deadlines of all active `busy` blocks."""
        self.final_tags: set[int] = set()
        """Tags whose op in flight has a timeout that its call chose."""
        self._calling = ""  # the run-wide call that a thread waits in
        self._is_asking = False
        """Whether that call is a question, which waits for no other peer."""
        self._transfer: BlockTransfer | None = None
        """The arrays of the sync that a thread waits in."""
        self._copies: deque[tuple[BlockTransfer, SendBlocks | WriteBlocks]] = deque()
        """Block effects for the thread to carry out without the lock."""
        self._is_copying = False
        self._thread = threads.start("ringfold-peer", self._serve)
        _sessions.add(self)

    # Calls of the program

    def join(self, masters: tuple[tuple[str, int], ...], deadline_ns: int) -> None:
        """Block until this peer is a member of an installed epoch; raise if it does not become one."""
        with self._changed:
            self._call(CallJoin(masters, deadline_ns))
            while not self._joined and not self.is_over:
                self._changed.wait()
            if not self._joined:
                self._raise_over("join")

    def vote(
        self, kind: VoteKind, operation: str, min_world: int, timeout_s: float, *, final: bool = True
    ) -> CallSucceeded:
        """Block in a run-wide call until it is complete on all peers. `final`: the caller chose the timeout."""
        outcome = self._call_and_wait(kind, operation, min_world, timeout_s, final=final)
        assert isinstance(outcome, CallSucceeded)
        return outcome

    def ask(self, question: PendingQuestion, operation: str, timeout_s: float) -> bool:
        """Whether peers are pending, by the master's answer to this question: other peers are not waited for."""
        outcome = self._call_and_wait("pending", operation, 0, timeout_s, final=True, question=question)
        assert isinstance(outcome, CallSucceeded)
        return outcome.pending

    def sync(
        self, offer: Offer, snapshot: Snapshot, min_world: int, timeout_s: float, *, final: bool = True
    ) -> SyncSucceeded | SyncInterrupted:
        """Block in a sync until every member that takes part has the winning state, or its master is gone."""
        since_ns = monotonic_ns()
        outcome = self._call_and_wait("sync", "sync_shared_state", min_world, timeout_s, offer, snapshot, final=final)
        if isinstance(outcome, SyncSucceeded):
            self._record(StateSynced(outcome.revision, outcome.rx_bytes, (monotonic_ns() - since_ns) // MS))
        assert isinstance(outcome, SyncSucceeded | SyncInterrupted)
        return outcome

    def _call_and_wait(
        self,
        kind: VoteKind,
        operation: str,
        min_world: int,
        timeout_s: float,
        offer: Offer | None = None,
        snapshot: Snapshot | None = None,
        *,
        final: bool,
        question: PendingQuestion | None = None,
    ) -> CallSucceeded | SyncSucceeded | SyncInterrupted:
        with self._changed:
            self.check_usable(operation)
            while self._is_asking:  # the question of another thread takes one round trip
                self._changed.wait(SIGNAL_S)
                self.check_usable(operation)
            if self._calling:
                raise UsageError(f"{operation}: another thread of this process waits in {self._calling}")
            self._calling, self._is_asking = operation, question is not None
            self._transfer = None if snapshot is None else BlockTransfer(snapshot)
            manifest = None if snapshot is None else snapshot.manifest
            self._last_ballot += 1
            ballot = self._last_ballot
            try:
                called_ns = monotonic_ns()
                deadline_ns = called_ns + int(timeout_s * S)
                progress = tuple(self.engine.progress())
                facts = (progress, offer, manifest, called_ns, final, question)
                self._call(CallVote(ballot, kind, min_world, deadline_ns, *facts))
                while ballot not in self._outcomes and not self.is_over:
                    self._changed.wait(SIGNAL_S)
            except BaseException:
                self._call(CallGivenUp(ballot))
                self._outcomes.pop(ballot, None)
                raise
            finally:
                self._calling, self._is_asking = "", False
                self._changed.notify_all()
                self._end_transfer()
            outcome = self._outcomes.pop(ballot, None)
            if outcome is None:
                self._raise_over(operation)
            if isinstance(outcome, Reason):
                raise error_of(outcome, operation, self.machine.engine_epoch, self.machine.peer)
            return outcome

    def _end_transfer(self) -> None:
        """The program goes on, and may change its arrays: wait for the copy that runs, and begin no other."""
        self._transfer = None
        self._copies.clear()
        while self._is_copying:
            self._changed.wait()

    @contextlib.contextmanager
    def busy(self, up_to_s: float) -> Iterator[None]:
        """The program is busy with something else, for `up_to_s` at most. Several may overlap: the last one counts.

        A session that is over does not fail here: the next call raises."""
        if not 0 < up_to_s <= MAX_BUSY_MS / 1_000:
            raise UsageError(f"busy: up_to_s is a positive number of seconds, up to a week, not {up_to_s!r}")
        self.check_process("busy")
        mine = object()
        self._note_busy(mine, monotonic_ns() + int(up_to_s * S))
        try:
            yield
        finally:
            self._note_busy(mine, None)

    def _note_busy(self, which: object, until_ns: int | None) -> None:
        with self._changed:
            if until_ns is None:
                self._busy.pop(which, None)
            else:
                self._busy[which] = until_ns
            if not self.is_over:
                self._call(CallBusy(max(self._busy.values(), default=0)))

    def probe(self, prober: ProbeSocket, open_log: Callable[[NodeId], ProbeLog | None]) -> None:
        """Probe from the join on. The session closes the prober in the end."""
        self.probing = NodeShell(
            RoundNode(),
            prober,
            self._send_probe_message,
            self._adopt,
            open_log=open_log,
            token=self.machine.identity.token,
            on_window=self.probe_events.publish,
        )

    def newest_round(self) -> RoundSummary | None:
        """The newest round of probing, read from the master."""
        machine = self.machine
        identity = machine.identity
        return master_client.ask(
            machine.masters,
            identity.token,
            lambda client: client.probe("show").summary,
            run=identity.run,
            is_run_token=True,
        )

    def _adopt(self, clock: NodeClock) -> None:
        if self._clock_model.adopt(clock, raw_ns()):
            self.probe_events.publish(clock)

    def _send_probe_message(self, message: ToRoundMaster) -> None:
        """Send a message of the probing shell to the master. Without a master it is dropped."""
        conn = self.machine.control_conn
        if conn is not None:
            execute(self.engine, SendMessage(conn, message))

    def _receive_probe_message(self, event: MessageReceived) -> bool:
        """Hand a message of the master about probing to the probing shell; False if it is for the machine."""
        if self.probing is None or event.conn != self.machine.control_conn:
            return False
        message = _probe_message_of(event.body)
        if message is None:
            return False
        if self._probe_conn is None:
            self._probe_conn = event.conn
            self._probe(lambda shell: shell.step(MasterConnected(self.machine.peer)))
        self._probe(lambda shell: shell.step(MasterMessageReceived(message)))
        return True

    def _note_lost_master(self) -> None:
        """The master is gone: the probing shell goes on without one, and keeps its clock, until another one calls."""
        if self._probe_conn is not None and self._probe_conn != self.machine.control_conn and not self.machine.ended:
            self._probe_conn = None
            self._probe(lambda shell: shell.step(MasterDisconnected("the master is gone")))

    def _probe(self, do: Callable[[NodeShell], None]) -> None:
        """Call the probing shell. If it fails, probing ends, and the peer goes on without it."""
        if self.probing is None:
            return
        try:
            do(self.probing)
        except Exception:
            _log.exception("probing failed; this peer goes on without it")
            self._end_probing()

    def _end_probing(self) -> None:
        shell, self.probing = self.probing, None
        self.probe_events.close(0)
        if shell is not None:
            try:
                shell.close()
            except Exception:
                _log.exception("probing could not be closed")

    def _use_path_shares(self, do: Callable[[PathShares], None]) -> None:
        """As with probing: if they fail, the peer goes on without them."""
        if self.path_shares is None:
            return
        try:
            do(self.path_shares)
        except Exception:
            _log.exception("the agent's path shares failed; this peer goes on without them")
            self._end_path_shares()

    def _follow_paths(self, shares: PathShares) -> None:
        assert self.machine.record is not None
        record, me = self.machine.record, self.machine.peer
        shares.follow(flows_of(record, me), hosts_of(record, me))

    def _end_path_shares(self) -> None:
        shares, self.path_shares = self.path_shares, None
        if shares is not None:
            try:
                shares.close()
            except Exception:
                _log.exception("the agent's path shares could not be closed")

    def submit_in_epoch(self, operation: str, submit: Callable[[Record], T]) -> T:
        """Wait until the newest record runs, then call `submit` with it while it cannot change.

        For ops whose arguments depend on the ring: a rank, a size. An attachment has a deadline, so this wait ends.
        """
        with self._changed:
            while not self.machine.is_running:
                self.check_usable(operation)
                self._changed.wait()
            self.check_usable(operation)
            assert self.machine.record is not None
            return submit(self.machine.record)

    def locked(self, look: Callable[[PeerMachine], T]) -> T:
        """Read the machine between two steps, or clear what the program has handled."""
        with self._changed:
            return look(self.machine)

    def check_process(self, operation: str) -> None:
        """Raise in a forked child: it has no thread that drives the ops, so no call would ever return."""
        if self.is_forked:
            raise UsageError(f"{operation}: this communicator belongs to the process that forked this one; join again")

    def check_usable(self, operation: str) -> None:
        self.check_process(operation)
        if self.is_over:
            self._raise_over(operation)

    def close(self) -> None:
        """Leave the run, end the thread and close all sockets. Safe to call twice, from any thread, at any time."""
        if self.is_forked or self._stopping:
            return
        if threads.is_current(self._thread):
            self._stopping = True  # called by the garbage collector in the session's own thread, which ends by itself
            return
        with self._changed:
            if not self.is_over:
                self._call(CallLeave(self.stopped))
                self._changed.wait_for(lambda: self.is_over, LEAVE_S)
            self._stopping = True
        self.engine.wake()
        self._thread.join(LEAVE_S)

    @property
    def is_shut_down(self) -> bool:
        """Whether the engine is shut down: it writes to the program's memory no more."""
        return not self._thread.is_alive()

    def forked(self) -> None:
        """In a forked child. The lock is replaced, because a thread that does not exist here may hold the old one."""
        self._changed = threads.Condition(threads.RLock())
        self.is_forked = True
        self.is_over = True
        if self.recording is not None:
            self.recording.forked()
        self.engine.forked_child()

    # The thread

    def _serve(self) -> None:
        try:
            while not self._stopping:
                raw = self.engine.next_event(self._sleep_s())
                with self._changed:
                    event = None if raw is None else event_of(self.engine, raw, _nonce)
                    if isinstance(event, OpTimedOut):
                        event = replace(event, final=event.tag in self.final_tags)
                        if self.recording is not None:
                            self.recording.dump(f"an op on tag {event.tag} is late", stacks=True)
                    if isinstance(event, MessageReceived) and self._receive_probe_message(event):
                        event = None
                    if event is not None:
                        self._step(event)
                    due = self.machine.next_deadline_ns()
                    if due is not None and due <= monotonic_ns():
                        self._step(Tick())
                    self._probe(lambda shell: shell.tick())
                    self._use_path_shares(lambda shares: shares.tick(monotonic_ns()))
                self._copy_blocks()
                if self.recording is not None:
                    self.recording.tick()
        except Exception as error:
            _log.exception("the peer's thread failed; the session is over")
            if self.recording is not None:
                self.recording.dump(f"the peer's thread failed: {error!r}", stacks=True)
            self.error = RingfoldError(f"the peer's thread failed: {error!r}")
        finally:
            self._shut_down()

    def _copy_blocks(self) -> None:
        """Carry out the block effects of the sync in progress, without the lock, and step the machine with the results.

        What is queued for a sync that is over is dropped: its arrays are the program's again.
        """
        while self._copies:
            with self._changed:
                if not self._copies:
                    return  # the call has ended
                transfer, effect = self._copies.popleft()
                self._is_copying = True
            event: Event | None
            try:
                if isinstance(effect, WriteBlocks):
                    event = transfer.write(effect)
                else:
                    event = transfer.send(self.engine, effect)
            finally:
                with self._changed:
                    self._is_copying = False
                    if transfer is not self._transfer:
                        self._changed.notify_all()  # the call waits in `_end_transfer`
            with self._changed:
                if event is not None and transfer is self._transfer:
                    self._step(event)

    def _sleep_s(self) -> float:
        shares = self.path_shares
        dues = [self.machine.next_deadline_ns(), None if shares is None else shares.next_deadline_ns()]
        dues.append(None if self.recording is None else self.recording.due_ns())
        due = min((each for each in dues if each is not None), default=None)
        sleep_s = MAX_SLEEP_S if due is None else min(max(0.0, (due - monotonic_ns()) / S), MAX_SLEEP_S)
        probing = self.probing
        probe_s = None if probing is None else probing.due_s()
        return sleep_s if probe_s is None else min(sleep_s, probe_s)

    def _shut_down(self) -> None:
        with self._changed:
            if not self.machine.ended and self.error is None:
                self._step(CallLeave(stopped=True))  # sent; the answer is not waited for
            execute(self.engine, FailAll(Reason("evicted", "this peer has left the run")))
            self._end_path_shares()
            # Before any call returns: until then the engine may still write into the program's arrays.
            self.engine.shutdown()
            self._end_probing()
            self.is_over = True
            self._changed.notify_all()
        if self.guardian is not None:
            self.guardian.close()
        if self.at_end is not None:
            self.at_end()

    # Effects

    def _call(self, event: Event) -> None:
        """An event of the program. It may move the next deadline, so the thread is woken."""
        self._step(event)
        self.engine.wake()

    def _step(self, event: Event) -> None:
        now_ns = monotonic_ns()
        for effect in self.machine.step(now_ns, event):
            response = self._carry_out(effect)
            if response is not None:
                self._step(response)
        self._note_lost_master()
        if self.recording is not None:
            self.recording.follow(self.machine.control_conn)
        if self.guardian is not None and (conn := self.machine.control_conn) is not None:
            self.guardian.follow(conn, self.machine)
        # No thread waits for a batch to arrive. To wake the program for each would cost more than the step; the end of
        # its call wakes it (`CallFinished`).
        if not isinstance(event, BlocksReceived | BlocksWritten):
            self._changed.notify_all()

    def _carry_out(self, effect: Effect) -> Event | None:
        """Carry out one effect; if it has a response, that is the machine's next event."""
        match effect:
            case Dial(key, host, port, timeout_ms, source, here, carries_little):
                try:
                    return Dialled(key, self.engine.dial(host, port, timeout_ms, source, here, carries_little))
                except (RuntimeError, OSError, ValueError) as error:
                    return DialFailed(key, str(error))
            case Joined(record):
                self._joined = True
                self.joined_with = record
                if self.recording is not None:
                    self.recording.joined(self.machine.peer)
                self._record(PeerJoined(self.machine.peer, record.group, record.epoch))
            case CallFinished(ballot, outcome):
                self._outcomes[ballot] = outcome
                self._changed.notify_all()
            case Ended(error):
                self.is_over = True
                self.error = error
                if error is not None and self._joined:
                    _log.warning("%s", error)
                    self._record(PeerEvicted(str(error)))
                    if self.recording is not None:
                        self.recording.dump(f"this peer's membership has ended: {error}", stacks=True)
            case Notify(notice):
                more: str | None = ""
                if isinstance(notice, ConnectionAbandoned | ConnectionDropped):
                    more = self._log_limit.take(monotonic_ns(), notice.reason)
                if more is not None:
                    self._record(notice)
                    _log.log(_LEVELS[notice.level], "%s%s", with_names(str(notice), self.machine.names), more)
            case ExpectBlocks():
                # At once: the request for these blocks is the next effect, and they may arrive right after it.
                assert self._transfer is not None
                self._transfer.expect(self.engine, effect)
            case WriteBlocks() if self._transfer is not None and self._transfer.is_in_place:
                return self._transfer.write(effect)  # the bytes are where they belong: there is nothing to copy
            case SendBlocks() | WriteBlocks():
                assert self._transfer is not None
                self._copies.append((self._transfer, effect))
            case Install():
                if self.machine.record is not None:
                    self._note_epoch(self.machine.record)
                installed = execute(self.engine, effect)
                self._use_path_shares(self._follow_paths)
                return installed
            case _:
                return execute(self.engine, effect)
        return None

    def _note_epoch(self, record: Record) -> None:
        runs = EpochRuns(record.group, record.epoch, record.fence, [member.peer for member in record.members])
        _log.debug("%s", runs)
        self._record(runs)

    def _record(self, notice: Notice) -> None:
        if self.recording is not None:
            self.recording.emit(notice)

    def _raise_over(self, operation: str) -> NoReturn:
        if self.error is not None:
            raise copy_error(self.error)
        raise UsageError(f"{operation}: this peer has left the run; join again")


_probe_messages: msgspec.msgpack.Decoder[FromRoundMaster] = msgspec.msgpack.Decoder(FromRoundMaster)


def _probe_message_of(body: bytes) -> FromRoundMaster | None:
    """The message, if it is one about probing."""
    try:
        return decode(_probe_messages.decode, body, what="not about probing: ")
    except RemoteProtocolError:
        return None


def _nonce() -> bytes:
    return random_bytes(NONCE_BYTES)


_forking: "dict[int, list[Session]]" = {}
"""By thread: several may fork at once, and each releases exactly the sessions that it holds."""


def _before_fork() -> None:
    sessions = sorted(_sessions, key=id)
    for session in sessions:
        session.engine.before_fork()
    _forking[threads.current()] = sessions


def _in_forking_parent() -> None:
    for session in _forking.pop(threads.current(), ()):
        session.engine.forked_parent()


def _in_forked_child() -> None:
    mine = _forking.pop(threads.current(), ())
    _forking.clear()
    for session in mine:
        session.forked()


os.register_at_fork(before=_before_fork, after_in_parent=_in_forking_parent, after_in_child=_in_forked_child)
