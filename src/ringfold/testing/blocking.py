"""Programs in plain blocking code, on the production communicator: what a user writes is what is simulated.

    def main(run: SimRun, me: Self) -> None:
        for step in run.steps(state, until=10):
            step.all_reduce(gradients)

    sim.cluster(peers=3, program=blocking(main))

The simulation knows programs as generators. Blocking code runs in a thread of its own instead, and the two threads hand
control to each other: only one of them runs at any time, so that a seed stays the whole history. Where a session would
wait for its thread, this one yields the request that a generator would yield.

A program whose peer is killed is hung up: its call raises `HungUp`, which no program should catch, and its thread ends.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, TypeVar, cast

import numpy as np

from ringfold._native import OpRequest, OpResult
from ringfold.errors import RingfoldError, UsageError
from ringfold.peer.codes import DTYPES, REDUCE_OPS, OpStatus
from ringfold.peer.communicator import Communicator
from ringfold.peer.effects import CallSucceeded, SyncInterrupted, SyncSucceeded
from ringfold.peer.engine import Array
from ringfold.peer.machine import PeerMachine
from ringfold.peer.outcome import copy_error
from ringfold.peer.session import Session
from ringfold.runtime import threads
from ringfold.runtime.sigterm import Sigterm
from ringfold.state.snapshot import Snapshot
from ringfold.testing.program import (
    ArePending,
    Collective,
    Kind,
    Leave,
    OfferState,
    Program,
    ProgramOf,
    Reduced,
    Rejoin,
    Request,
    Self,
    Sleep,
    UpdateTopology,
    Wait,
)
from ringfold.testing.scheduler import MS
from ringfold.wire.messages import Offer, PendingQuestion, Record, VoteKind

if TYPE_CHECKING:
    from ringfold.testing.peers import SimPeer

T = TypeVar("T")
OPS = {number: name for name, number in REDUCE_OPS.items()}
OP_TIMEOUT_S = 300.0
SIGTERM_GRACE_MS = 40.0
LOOK_AGAIN_MS = 0.2
"""A session is woken when an epoch is installed; here it is polled this often."""


class HungUp(BaseException):
    """The process that ran this program is no more."""


class SimRun(Communicator):
    """The communicator of a simulated peer."""

    def __init__(self, session: "SimSession") -> None:
        super().__init__(cast(Session, session), OP_TIMEOUT_S)
        self._close.atexit = False
        self._line, self._peer = session.line, session.peer
        self._sigterm_type = partial(SimSigterm, self)
        self.sigterm_at_ms: float | None = None
        """When the process gets SIGTERM, if it does."""

    @property
    def peer(self) -> "SimPeer":
        """The peer that the program runs on: another one after it has joined again."""
        return self._peer

    def rejoin(self) -> None:
        """As in production, with a peer that the simulation makes."""
        peer = cast("SimPeer", self._line.request(Rejoin()))
        self._close.detach()
        self._peer = peer
        self._hold(cast(Session, SimSession(self._line, peer)))
        self._close.atexit = False
        self._begin_session()

    def are_peers_pending(self) -> bool:
        """As in production; the checkers get the answer."""
        requests = self._line.requests
        answer = super().are_peers_pending()
        if requests == self._line.requests:  # the runner reports the answers of votes
            self._peer.book.history.answered(self._peer.peer, answer)
        return answer

    def sleep(self, ms: float) -> None:
        """The user's own work, for so long."""
        self._line.request(Sleep(ms))


class SimSigterm(Sigterm):
    """SIGTERM for simulated programs, which are not in the main thread: it comes at a time of the simulation.

    The former handler does nothing, so that the program goes on after its loop.
    """

    def __init__(self, run: SimRun, grace_s: float, abort: Callable[[], None]) -> None:
        super().__init__(grace_s, abort)
        self._run = run

    @property
    def is_installed(self) -> bool:
        return True

    def install(self) -> bool:
        if self._run.sigterm_at_ms is not None:
            scheduler = self._run.peer.sim.scheduler
            scheduler.at(max(scheduler.now, int(self._run.sigterm_at_ms * MS)), self._come)
        return True

    def uninstall(self) -> None:
        self._is_over = True

    @contextmanager
    def waiting(self) -> Iterator[None]:
        self._is_waiting = True
        if self.is_requested:
            self._time_is_over()
        try:
            yield
        finally:
            self._is_waiting = False

    def deliver(self) -> None:
        """The program knows by the end of its loop."""

    def _come(self) -> None:
        self.is_requested = True
        scheduler = self._run.peer.sim.scheduler
        scheduler.after(0 if self._is_waiting else int(SIGTERM_GRACE_MS * MS), self._time_is_over)

    def _time_is_over(self) -> None:
        if not self._is_over and not self.is_overdue:
            self.is_overdue = True
            self._run.peer.cut_off()


Main = Callable[[SimRun, Self], None]


def blocking(main: Main) -> ProgramOf:
    """The program that calls `main` with a communicator. It leaves when `main` returns."""

    def program(me: Self) -> Program:
        peer = cast("SimPeer", me)
        line = Line()

        def talk() -> None:
            with peer.run_type(SimSession(line, peer)) as run:
                main(run, cast(Self, _Current(run)))

        try:
            request = line.begin(f"simulated {peer.name}", talk)
            while request is not None:
                try:
                    answer = yield request
                except RingfoldError as error:
                    answer = error
                request = line.answer(answer)
        finally:
            line.hang_up()

    return program


class _Current:
    """A program's own peer, by whatever number it is in the run."""

    def __init__(self, run: SimRun) -> None:
        object.__setattr__(self, "_run", run)

    def __getattr__(self, name: str) -> object:
        run: SimRun = object.__getattribute__(self, "_run")
        return getattr(run.peer, name)

    def __setattr__(self, name: str, value: object) -> None:
        setattr(object.__getattribute__(self, "_run").peer, name, value)


class Line:
    """Between the simulation's thread and a program's: one speaks, the other waits."""

    def __init__(self) -> None:
        self.requests = 0
        self._to_program, self._to_simulation = threads.Lock(), threads.Lock()
        self._to_program.acquire()
        self._to_simulation.acquire()
        self._request: Request | None = None
        self._answer: object = None
        self._failure: BaseException | None = None
        self.is_over = True
        self._thread: threads.Thread | None = None

    # The simulation's side

    def begin(self, name: str, talk: Callable[[], None]) -> Request | None:
        """Run `talk` in a thread, up to its first request; None when it has none."""

        def run() -> None:
            self._to_program.acquire()
            try:
                talk()
            except HungUp:
                pass
            except BaseException as error:
                self._failure = error
            self._request, self.is_over = None, True
            self._to_simulation.release()

        self.is_over = False
        self._thread = threads.start(name, run)
        return self.answer(None)

    def answer(self, answer: object) -> Request | None:
        """Let the program go on with this; its next request, or None at its end. Raises what the program raised."""
        self._answer = answer
        self._to_program.release()
        self._to_simulation.acquire()
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure
        return self._request

    def hang_up(self) -> None:
        """End the thread, if it has not ended."""
        while not self.is_over:
            self.answer(HungUp())

    # The program's side

    @property
    def is_mine(self) -> bool:
        """Whether the calling thread is the program's."""
        return threads.is_current(self._thread)

    def request(self, request: Request) -> object:
        """Wait for the simulation; what the request gave. Raises what it raised."""
        assert self.is_mine
        self.requests += 1
        self._request = request
        self._to_simulation.release()
        self._to_program.acquire()
        if isinstance(self._answer, RingfoldError | HungUp):
            raise self._answer
        return self._answer


class SimSession:
    """As much of a session as a communicator needs."""

    def __init__(self, line: Line, peer: "SimPeer") -> None:
        self.line, self.peer = line, peer
        self.machine: PeerMachine = peer.machine
        self.engine = SimEngine(line, peer)
        self.joined_with: Record | None = peer.joined_with
        self.final_tags: set[int] = set()
        self._is_closed = self.stopped = False

    @property
    def error(self) -> RingfoldError | None:
        return self.peer.ended_with

    @property
    def is_over(self) -> bool:
        return self.machine.ended

    @property
    def is_shut_down(self) -> bool:
        return self._is_closed

    def vote(
        self, kind: VoteKind, operation: str, min_world: int, timeout_s: float, *, final: bool = True
    ) -> CallSucceeded:
        self.check_usable(operation)
        timeout_ms = int(timeout_s * 1_000)
        if kind not in ("update", "pending"):
            raise NotImplementedError(f"{operation} is not simulated")
        self.line.request(
            ArePending(timeout_ms, vote=True) if kind == "pending" else UpdateTopology(min_world, timeout_ms)
        )
        assert self.peer.last_call is not None
        return self.peer.last_call

    def ask(self, question: PendingQuestion, operation: str, timeout_s: float) -> bool:
        self.check_usable(operation)
        self.line.request(ArePending(int(timeout_s * 1_000), question=question))
        assert self.peer.last_call is not None
        return self.peer.last_call.pending

    def sync(
        self, offer: Offer, snapshot: Snapshot, min_world: int, timeout_s: float, *, final: bool = True
    ) -> SyncSucceeded | SyncInterrupted:
        self.check_usable("sync_shared_state")
        outcome = self.line.request(OfferState(offer, snapshot, min_world, int(timeout_s * 1_000)))
        assert isinstance(outcome, SyncSucceeded | SyncInterrupted)
        return outcome

    def busy(self, up_to_s: float) -> AbstractContextManager[None]:
        """No simulated program does anything long of its own in here."""
        return nullcontext()

    def submit_in_epoch(self, operation: str, submit: Callable[[Record], T]) -> T:
        while not self.machine.is_running:
            self.check_usable(operation)
            self.line.request(Sleep(LOOK_AGAIN_MS))
        self.check_usable(operation)
        assert self.machine.record is not None
        return submit(self.machine.record)

    def locked(self, look: Callable[[PeerMachine], T]) -> T:
        return look(self.machine)

    def check_process(self, operation: str) -> None:
        """There are no forks here."""

    def check_usable(self, operation: str) -> None:
        if self.machine.ended:
            left = UsageError(f"{operation}: this peer has left the run")
            raise left if self.error is None else copy_error(self.error)

    def close(self) -> None:
        """Leave. A communicator that is garbage calls this too, from anywhere."""
        if not self._is_closed and self.line.is_mine:
            self._is_closed = True
            if not self.machine.ended:
                self.line.request(Leave(self.stopped))


class SimEngine:
    """As much of an engine as ops need. An op that fails raises its error here already."""

    def __init__(self, line: Line, peer: "SimPeer") -> None:
        self._line, self._peer = line, peer
        self._ended: dict[int, object] = {}

    def submit(self, request: OpRequest) -> int:
        codes = [DTYPES[array.dtype.name] for array in request.source]
        if request.target is not None or len(request.source) > 1 or codes != request.dtypes:
            raise NotImplementedError("one array, in place, in its own dtype: the rest is not simulated")
        handle = self._line.request(
            Collective(
                request.source[0] if request.source else np.zeros(0, np.uint8),
                OPS[request.reduce_op],
                request.tag,
                request.retry,
                Kind(request.kind),
                request.root,
                request.timeout_ns // MS,
                wait=False,
                quantisation=request.quantisation,
                again=request.again,
                contribute=request.contribute,
            )
        )
        assert isinstance(handle, int)
        return handle

    def poll(self, op: int) -> OpResult | None:
        ended = self._ended.get(op) or self._peer.look_at(op)
        if isinstance(ended, RingfoldError):
            raise ended
        return None if ended is None else _result(ended)

    def wait_op(self, op: int, timeout_s: float) -> bool:
        """Until the op has ended, without a timeout."""
        if op not in self._ended and self._peer.look_at(op) is None:
            try:
                self._ended[op] = self._line.request(Wait(op))
            except RingfoldError as error:
                self._ended[op] = error
        return True

    def release(self, op: int) -> None:
        if self._ended.pop(op, None) is None:
            self._peer.release(op)

    def run_op(self, op: int) -> OpResult:
        return _result(self._line.request(Wait(op)))

    def collective(self, request: OpRequest) -> OpResult:
        return self.run_op(self.submit(request))

    def all_reduce(self, array: Array, dtype: int, reduce_op: int, tag: int, retry: int, timeout_ns: int) -> OpResult:
        request = OpRequest(
            kind=Kind.ALL_REDUCE,
            reduce_op=reduce_op,
            tag=tag,
            source=[array],
            dtypes=[dtype],
            retry=retry,
            timeout_ns=timeout_ns,
        )
        return self.collective(request)

    def tags_in_flight(self) -> list[int]:
        return []

    def stats(self) -> dict[str, int]:
        return self._peer.core.stats()

    def set_step(self, step: int) -> None:
        self._peer.core.set_step(step)


def _result(reduced: object) -> OpResult:
    assert isinstance(reduced, Reduced)
    return OpResult(
        status=OpStatus.OK,
        epoch=reduced.epoch,
        contributors=reduced.contributors,
        registrations=reduced.registrations,
    )
