"""The simulated peer process: the production machine and the production engine core, with virtual sockets under them.

It does what the peer's session and the engine's epoll loop do together: bytes that arrive go into the core, what the
core reports goes to the machine, the machine's effects become commands of the core (`ringfold.peer.engine`, the same
code), and what the core wants to send goes into the network as its windows allow.

A connection is known to the machine by the number of the network's end, because a dial has no connection in the core
before it is established; `sockets.py` translates.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from ringfold._native import OpRequest, OpResult
from ringfold.config import DEFAULT_RUN
from ringfold.errors import RingfoldError, UsageError
from ringfold.peer.codes import DTYPES, REDUCE_OPS, OpStatus
from ringfold.peer.effects import (
    CallFinished,
    CallOutcome,
    CallSucceeded,
    Dial,
    Effect,
    Ended,
    EngineEffect,
    ExpectBlocks,
    Install,
    Joined,
    Notify,
    SendBlocks,
    SetRegistrations,
    Settle,
    SyncInterrupted,
    SyncSucceeded,
    WriteBlocks,
)
from ringfold.peer.engine import event_of, execute
from ringfold.peer.events import (
    BlocksChanged,
    CallBusy,
    CallJoin,
    CallLeave,
    CallVote,
    Closed,
    Dialled,
    Event,
    OpTimedOut,
    Tick,
)
from ringfold.peer.machine import PeerMachine
from ringfold.peer.outcome import copy_error, error_of, error_of_op
from ringfold.peer.settings import Identity
from ringfold.peer.sync.transfer import BlockTransfer
from ringfold.state.shared import SharedState
from ringfold.state.snapshot import Snapshot
from ringfold.testing.blocking import SimRun
from ringfold.testing.checks import Violation
from ringfold.testing.core import new_core
from ringfold.testing.hostile import garbled, garbled_blocks
from ringfold.testing.network import End, on_path
from ringfold.testing.nodes import MASTER_PORT
from ringfold.testing.program import AGREE_TAG, USUAL_TIMEOUT_MS, Collective, ProgramOf, Reduced
from ringfold.testing.runner import Runner
from ringfold.testing.scheduler import MS
from ringfold.testing.sockets import Sockets
from ringfold.wire.messages import Offer, PendingQuestion, Reason, Record, VoteKind
from ringfold.wire.proof import NONCE_BYTES, run_token

if TYPE_CHECKING:
    from ringfold.testing.simulation import Simulation

DATA_PORT = 48149
TOKEN = b"simulated"
TICK_NS = 20 * MS
JOIN_NS = 600_000 * MS


class SimPeer:
    """A process that runs a program over the production peer machine and engine core."""

    machine_type: type[PeerMachine] = PeerMachine
    run_type: type[SimRun] = SimRun

    def __init__(self, sim: "Simulation", name: str, group: int, program: ProgramOf, run: str = DEFAULT_RUN) -> None:
        self.sim, self.name, self.group, self.run = sim, name, group, run
        self.book = sim.book(run)
        self.host = sim.network.add_host(name, self)
        self.digest = ""
        self.gone = False
        self.busy = True
        self.error: RingfoldError | None = None
        paths = sim.setup.paths
        addresses = tuple(on_path(name, path) for path in range(paths))
        identity = Identity(
            group=group,
            host=f"host-{len(sim.peers) % sim.setup.hosts}" if sim.setup.hosts else name,
            name=sim.given_names.get(name, name),
            addresses=addresses,
            port=DATA_PORT,
            token=run_token(TOKEN, run),
            run=run,
            paths=paths,
        )
        self.machine = self.machine_type(identity, sim.setup.timings)
        self.core = new_core(sim.setup.planted)
        self.core.set_first_sequence(sim.setup.first_sequence)
        self._sockets = Sockets(self.core, sim.network)
        self.program = program
        self._runner: Runner | None = None
        self._coming: Runner | None = None
        """A program that goes on as soon as this peer is a member."""
        self._ballot = 0
        self._syncing: int | None = None
        """The ballot of the sync that the program waits in."""
        self._transfer: BlockTransfer | None = None
        """The arrays of the sync that the program called last."""
        self._calls = 0
        self._usual_tags: set[int] = set()
        """Tags whose op in flight has no timeout of its own."""
        self._when_called: dict[int, list[Callable[[], object]]] = {}
        self.ended_with: RingfoldError | None = None
        self._last_op: Reduced | None = None
        """The op that last returned, if no run-wide call came after it."""
        self._call, self._questions, self._groups = 0, 0, 1
        """The number of the last run-wide call, the questions since then, and the groups that it left."""
        self._asked: PendingQuestion | None = None
        self.last_call: CallSucceeded | None = None
        self.received_registrations = 0
        self.joined_with: Record | None = None
        self.lies = False
        """Whether the blocks and hashes that it sends are wrong."""
        self._restarts = self._is_cut_off = False
        self._asleep: list[Callable[[], None]] = []
        """What came due while the process was frozen."""
        self._starved: dict[int, None] = {}
        """Connections with more to send than there was room for, in the order in which they ran out of it."""
        self._paused: list[tuple[int, End, bytes]] = []
        """Connections that must not be read now, with bytes that came too early."""

    @property
    def peer(self) -> int:
        return self.machine.peer

    @property
    def world(self) -> int:
        record = self.machine.record
        return 0 if record is None else len(record.members)

    @property
    def members(self) -> tuple[int, ...]:
        record = self.machine.record
        return () if record is None else tuple(member.peer for member in record.members)

    @property
    def doing(self) -> str:
        return self._runner.doing if self._runner is not None else "joining"

    # Life

    def start(self) -> None:
        if self.host.alive:
            self.host.listening.add(DATA_PORT)
            self.later(TICK_NS, self._tick)
            masters = tuple((name, MASTER_PORT) for name in self.sim.masters)
            self._react(CallJoin(masters, self.sim.scheduler.now + JOIN_NS))

    def kill(self, silently: bool = False) -> None:
        """End the process, or its host's power."""
        if not self.host.alive:
            return
        self.sim.note(self.name, "loses its power" if silently else "is killed")
        if silently:
            self.sim.network.power_off(self.host)
        else:
            self.sim.network.kill(self.host)
        self.stop_program()
        self._over(gone=True)

    def stop_program(self) -> None:
        """Let go of the program, wherever it stands."""
        for runner in (self._runner, self._coming):
            if runner is not None:
                runner.stop()

    def comes_back(self, runner: Runner) -> None:
        """The program joins again: it goes on as another peer, and this one is gone."""
        self._runner = None
        self.host.listening.clear()
        self._over(gone=True)
        self.sim.check_cast_out(self, self.ended_with)
        self.sim.join(self.program, group=self.group, run=self.run)._coming = runner

    def program_over(self, error: RingfoldError | None) -> None:
        """The program has ended: with its peer out of the run as it wished, or not."""
        self.error = error
        self.sim.note(self.name, f"ends{f': {error}' if error else ''}")
        self.host.listening.clear()
        # A program may end by itself, and not know that the others went on without it.
        self._over(gone=error is not None or self.ended_with is not None or self._is_cut_off)
        if error is not None:
            self.sim.was_cast_out(self)
        elif self._restarts:
            self.sim.start_again(self)

    def _over(self, *, gone: bool) -> None:
        if self.busy:
            self.busy = False
            self.gone = gone
            self.sim.busy -= 1
            if self.peer in self.book.history.peers:
                self.book.history.ended(self.peer, gone=gone)

    def later(self, delay_ns: int, action: Callable[[], None]) -> None:
        """Do something in this process's own time: not while it is frozen, and not after its end."""
        self.sim.scheduler.after(delay_ns, self._due, action)

    def _due(self, action: Callable[[], None]) -> None:
        if self.host.frozen:
            self._asleep.append(action)
        elif self.host.alive:
            action()

    def check_neighbours(self) -> None:
        """All peers follow the protocol on their lanes: none may have reported a violation by a neighbour."""
        if self.core.stats()["lane_violations"]:
            raise Violation(f"{self.name} dropped the lanes of a neighbour that keeps to the protocol")

    # What the network calls

    def accepted(self, end: End) -> None:
        self._sockets.add(end, accepted=True)
        self._turn()

    def opened(self, end: End) -> None:
        self._sockets.add(end, accepted=False)
        self._turn()

    def received(self, end: End, chunk: bytes) -> None:
        number = self._sockets.number(end)
        if number is None:
            return
        if self.core.readable(number):
            self.core.receive(self.sim.scheduler.now, number, chunk)
            chunk = b""
        if not self.core.readable(number):
            # The core holds this connection: a handshake message is being judged, or its mark is of a later epoch.
            end.paused = True
            self._paused.append((number, end, chunk))
        self._turn()

    def writable(self, end: End) -> None:
        self._turn()

    def lost(self, end: End, reason: str) -> None:
        number = self._sockets.number(end)
        if number is None:
            self._react(Closed(end.id, reason))
        else:
            self.core.lost(self.sim.scheduler.now, number, reason)
            self._turn()

    def woken(self) -> None:
        overdue, self._asleep = self._asleep, []
        for action in overdue:
            self.sim.scheduler.after(self.sim.rng.randint(0, MS), self._due, action)

    # What the program calls

    def on_call(self, number: int, action: Callable[[], object]) -> None:
        """Do something when the program makes its op number so and so."""
        self._when_called.setdefault(number, []).append(action)

    def advised(self, shares: Sequence[int], flags: int) -> None:
        """The agent advises how to split links over paths."""
        for neighbour in self.members:
            self.core.set_path_shares(neighbour, shares, flags)
        self.later(0, self._turn)

    def may_be_evicted(self) -> None:
        """The program hangs from here on."""
        self.sim.touched.add(self.name)

    def busy_for(self, ms: float) -> None:
        """The program reports that it is busy, or no longer."""
        until = self.sim.scheduler.now + int(ms * MS) if ms else 0
        self.later(0, lambda: self._react(CallBusy(until)))

    @property
    def at_work_since(self) -> int | None:
        """Since when the program is at its own work; None if it is in a call."""
        return None if self._runner is None else self._runner.at_work_since

    def restart(self) -> None:
        """When the program has ended, start it again, as another process."""
        self._restarts = True

    def step_begins(self, state: SharedState) -> None:
        """Tell the checkers that a step loop is at this revision."""
        self.book.syncs.stepped(self.peer, state.revision)

    def submit(self, request: Collective) -> int:
        """Begin an op; the engine's number of it."""
        self._count_call()
        if self.book.syncs.is_torn(self.peer) and request.tag != AGREE_TAG:
            raise Violation(f"peer {self.peer} goes on with a torn state")
        self.core.set_now(self.sim.scheduler.now)
        barrier = not request.array.size
        op = self.core.submit(
            OpRequest(
                kind=request.kind,
                reduce_op=REDUCE_OPS[request.op],
                tag=request.tag,
                root=request.root,
                source=[] if barrier else [request.array],
                dtypes=[] if barrier else [DTYPES[request.array.dtype.name]],
                retry=request.retry,
                timeout_ns=self._timeout_ms(request) * MS,
                quantisation=request.quantisation,
                again=request.again,
                contribute=request.contribute,
            )
        )
        self.later(0, self._turn)
        return op

    def _timeout_ms(self, request: Collective) -> int:
        if request.timeout_ms != USUAL_TIMEOUT_MS:
            self._usual_tags.discard(request.tag)
            return request.timeout_ms
        self._usual_tags.add(request.tag)
        return self.sim.setup.op_timeout_ms

    def look_at(self, op: int) -> object | None:
        """How an op has ended, if it has: a value or an error."""
        return None if self._runner is None else self._runner.look_at(op)

    def release(self, op: int) -> None:
        """The program has seen how an op ended."""
        if self._runner is not None:
            self._runner.release(op)

    def _count_call(self) -> None:
        self._calls += 1
        for action in self._when_called.pop(self._calls, ()):
            action()

    def vote(
        self,
        kind: VoteKind,
        min_world: int,
        timeout_ms: int,
        offer: Offer | None = None,
        snapshot: Snapshot | None = None,
        question: PendingQuestion | None = None,
    ) -> int:
        """Wait in a run-wide call, in a sync, or for the answer to a question; its ballot."""
        if self.machine.ended:
            raise (
                copy_error(self.ended_with) if self.ended_with is not None else UsageError("this peer has left the run")
            )
        self._ballot += 1
        final = timeout_ms != USUAL_TIMEOUT_MS or question is not None
        self._asked = question
        timeout_ms = timeout_ms if timeout_ms != USUAL_TIMEOUT_MS else self.sim.setup.op_timeout_ms
        ballot, deadline = self._ballot, self.sim.scheduler.now + timeout_ms * MS
        if offer is not None and snapshot is not None:
            self._count_call()
            self._syncing = ballot
            self._transfer = BlockTransfer(snapshot)
            self.book.syncs.offered(self.peer, self.group, ballot, offer, snapshot)
        progress = tuple(self.core.progress())
        manifest = None if snapshot is None else snapshot.manifest
        facts = (progress, offer, manifest, None, final, question)
        call = CallVote(ballot, kind, min_world, deadline, *facts)
        self.later(0, lambda: self._react(call))
        return ballot

    def meddle(self, ballot: int, action: Callable[[], object]) -> None:
        """Another thread of the program writes to the state, if this sync is not over."""
        if self._syncing == ballot:
            self.book.syncs.meddled(self.peer, ballot)
            action()

    def pending_here(self) -> bool | None:
        """Whether peers are pending, if this peer knows it without the master; else None."""
        # The rule of `Communicator.are_peers_pending`.
        last = self._last_op
        facts = None if last is None else self.machine.facts[last.epoch]
        if last is None or facts is None or self.world < 2 or facts.groups > 1:
            return None
        return last.registrations > facts.registrations

    def next_question(self) -> PendingQuestion:
        """The question that this peer asks the master now."""
        return PendingQuestion(self._call, self._questions + 1)

    def op_returned(self, info: Reduced) -> None:
        """The program goes on after an op that succeeded."""
        self._last_op = info

    def call_returned(self, kind: VoteKind, outcome: CallSucceeded) -> bool:
        """The program goes on after a run-wide call, which answers whether peers are pending."""
        self.last_call = outcome
        if kind != "pending":
            self._last_op = None
            self._call, self._questions, self._groups = outcome.call, 0, outcome.groups
        else:
            self.book.history.answered(self.peer, outcome.pending)
            if self._asked is not None:
                self._questions = self._asked.number
                self.book.history.answered_by_master(self.peer, self._asked, outcome.pending)
        return outcome.pending

    def cut_off(self) -> None:
        """Leave in the middle of whatever the program does."""
        self._is_cut_off = True
        self.leave(stopped=True)

    def leave(self, stopped: bool = False) -> bool:
        """Ask to leave. True if the peer is out already."""
        if self.machine.ended:
            return True
        self.later(0, lambda: self._react(CallLeave(stopped)))
        return False

    # Inside

    def _tick(self) -> None:
        now = self.sim.scheduler.now
        for number, end in self._sockets.live():
            trip_ns = end.outbound.link.latency_ns + end.inbound.link.latency_ns
            self.core.acknowledged(now, number, end.outbound.in_flight, trip_ns)
        self.core.tick(now)
        deadline = self.machine.next_deadline_ns()
        if deadline is not None and deadline <= now:
            self._react(Tick())
        else:
            self._turn()
        if self.busy or not self.machine.ended:
            self.later(TICK_NS, self._tick)

    def _react(self, event: Event) -> None:
        """Pass an event to the machine, and run until nothing is left to do."""
        self.core.set_now(self.sim.scheduler.now)
        self._step(event)
        self._turn()

    def _turn(self) -> None:
        """Hand on what the core reports and wants sent, until it is quiet."""
        core, sockets = self.core, self._sockets
        core.set_now(self.sim.scheduler.now)
        while (reported := core.next_event()) is not None:
            event = event_of(sockets, sockets.translate(reported), self._nonce)
            if isinstance(event, OpTimedOut):
                event = replace(event, final=event.tag not in self._usual_tags)
            if event is not None:
                self._step(event)
        self._transmit()
        self._land()
        if self._paused:
            self._read_on()

    def _transmit(self) -> None:
        """Send for the connections that the core has marked, as the engine does: what it forgets sleeps here, too."""
        network, sockets = self.sim.network, self._sockets
        while marked := self._marked():
            for number in marked:
                self._send(number)
        for number in self.core.conns_to_close():
            network.close(sockets.ends[number])

    def _marked(self) -> list[int]:
        with_room = [number for number in self._starved if self._sockets.ends[number].room > 0]
        for number in with_room:
            del self._starved[number]
        return with_room + self.core.conns_to_flush()

    def _send(self, number: int) -> None:
        end = self._sockets.ends[number]
        if end.closed:
            return
        if end.room > 0:
            self.sim.network.send(end, self.core.transmit(self.sim.scheduler.now, number, end.room))
        end.starved = end.room == 0
        if end.starved:
            self._starved[number] = None

    def _land(self) -> None:
        runner = self._runner
        if runner is None:
            return
        for op in runner.flying:
            result = self.core.poll(op)
            if result is not None:
                self.core.release(op)
                runner.landed(op, self._outcome(result), result.epoch)

    def _outcome(self, result: OpResult) -> Reduced | RingfoldError:
        if result.status == OpStatus.OK:
            return Reduced(result.epoch, result.contributors, result.registrations)
        return error_of_op(result, "op", self.ended_with, self.machine.peer)

    def _read_on(self) -> None:
        waiting, self._paused = self._paused, []
        for number, end, chunk in waiting:
            if end.closed:
                continue
            if self.core.readable(number):
                self.sim.network.read_on(end)
                if chunk:
                    self.received(end, chunk)
            else:
                self._paused.append((number, end, chunk))

    def _step(self, event: Event) -> None:
        for effect in self.machine.step(self.sim.scheduler.now, event):
            self._carry_out(effect)

    def _carry_out(self, effect: Effect) -> None:
        match effect:
            case Dial(key, host, port, timeout_ms, source):
                end = self.sim.network.dial(self.host, host, port, timeout_ms * MS, source)
                self._sockets.dialled(end)
                self._step(Dialled(key, end.id))
            case Joined(record):
                self._begin(record)
            case CallFinished(ballot, outcome):
                self._call_over(ballot, outcome)
            case Ended(error):
                self.ended_with = error
                self._sync_over(error)
                if self._coming is not None:
                    self._take_over(error)
                elif self._runner is None:
                    self.program_over(error)
                else:
                    self._runner.session_over(error)
            case Notify(notice):
                self.sim.note(self.name, str(notice))
            case ExpectBlocks():
                self._blocks.expect(self._sockets, effect)
            case WriteBlocks():
                self._step(self._blocks.write(effect))
            case SendBlocks():
                self._send_blocks(effect)
            case _:
                self._watch(effect)
                answer = execute(self._sockets, garbled(self.sim.rng, effect) if self.lies else effect)
                if answer is not None:
                    self._step(answer)

    @property
    def _blocks(self) -> BlockTransfer:
        assert self._transfer is not None
        return self._transfer

    def _send_blocks(self, effect: SendBlocks) -> None:
        """As `BlockTransfer.send`, with wrong bytes where this peer lies."""
        blocks = self._blocks.read(effect)
        changed = self._blocks.changed(effect, blocks)
        if not changed:
            sent = garbled_blocks(self.sim.rng, blocks) if self.lies else blocks
            changed = self._sockets.send_blocks(effect.conn, sent)
        if changed:
            self._step(BlocksChanged(effect.conn, tuple(changed)))

    def _watch(self, effect: EngineEffect) -> None:
        """Pass what this peer received about epochs to the checkers."""
        match effect:
            case SetRegistrations(count):
                self.received_registrations = count
            case Settle(epoch):
                self.book.history.settled(self.peer, epoch)
            case Install(epoch, _, members):
                if self.peer not in self.book.history.peers:
                    self.book.history.joined(self.peer, self.group)
                self.book.history.installed(self.peer, epoch, list(members))
                self.sim.note(self.name, f"installs epoch {epoch} as peer {self.peer} of {list(members)}")

    def _begin(self, record: Record) -> None:
        self.joined_with = record
        self._call, self._questions, self._groups = record.call, 0, record.world.groups
        if self._coming is not None:
            self._take_over(None)
        else:
            self._runner = Runner(self, self.program)
            self._runner.start()

    def _take_over(self, error: RingfoldError | None) -> None:
        self._runner, self._coming = self._coming, None
        assert self._runner is not None
        self._runner.goes_on_with(self, error)

    def _call_over(self, ballot: int, outcome: CallOutcome) -> None:
        if self._runner is None:
            return
        if isinstance(outcome, SyncInterrupted):
            self._syncing = None
            self.book.syncs.failed(self.peer, ballot, "interruption")
        if isinstance(outcome, Reason):
            error = error_of(outcome, "call", self.machine.engine_epoch, self.machine.peer)
            if ballot == self._syncing:
                self._sync_over(error)
            self._runner.call_over(ballot, error)
            return
        if isinstance(outcome, SyncSucceeded):
            self._syncing = None
            self.book.syncs.succeeded(self.peer, ballot, outcome.revision)
        self._runner.call_over(ballot, outcome)

    def _sync_over(self, error: RingfoldError | None) -> None:
        ballot, self._syncing = self._syncing, None
        if ballot is not None:
            self.sim.note(self.name, f"its sync ends: {error}")
            self.book.syncs.failed(self.peer, ballot, type(error).__name__)

    def _nonce(self) -> bytes:
        return self.sim.rng.randbytes(NONCE_BYTES)
