"""Runs a program on a simulated peer: carries out what it yields, and resumes it with what that returned.

The thread that runs a program wakes up a moment after its call is over, so it is resumed after a drawn delay; in
between the peer's other events may happen.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, assert_never

from ringfold.errors import Evicted, MasterUnreachable, RingfoldError, UsageError
from ringfold.peer.effects import CallSucceeded, SyncInterrupted, SyncSucceeded
from ringfold.peer.sync.sync_call import Attempt
from ringfold.testing.checks import Violation
from ringfold.testing.program import (
    ArePending,
    BusyFor,
    Call,
    Collective,
    Leave,
    OfferState,
    OptimizeTopology,
    ProgramOf,
    Reduced,
    Rejoin,
    Request,
    Sleep,
    Sync,
    UpdateTopology,
    Wait,
)
from ringfold.testing.scheduler import MS
from ringfold.wire.messages import VoteKind

if TYPE_CHECKING:
    from ringfold.testing.peers import SimPeer

WAKE_UP_NS = 50_000
"""The longest delay between the end of a call and the program's next step."""

Outcome = object | RingfoldError


class Runner:
    """One program on one peer."""

    def __init__(self, peer: "SimPeer", program: ProgramOf) -> None:
        self._peer = peer
        self._program = program(peer)
        self._flying: dict[int, Call] = {}
        self._landed: dict[int, tuple[Call, Outcome]] = {}
        self._awaited_op: int | None = None
        self._awaited_ballot: int | None = None
        self._awaited_kind: VoteKind = "update"
        self._awaited_sync: Attempt | None = None
        self._sync: Sync | None = None
        self._leaving = False
        self._wakes = 0
        self.doing = "starting"
        self.at_work_since: int | None = None
        self.finished = False

    def start(self) -> None:
        self._resume_soon(None)

    @property
    def flying(self) -> list[int]:
        """Ops that the engine has not finished."""
        return list(self._flying)

    def goes_on_with(self, peer: "SimPeer", error: RingfoldError | None = None) -> None:
        """The program joined again: as this peer, which is a member now, or is out already for this error."""
        self._peer = peer
        self._resume_soon(peer if error is None else error)

    def landed(self, op: int, outcome: Reduced | RingfoldError, epoch: int) -> None:
        """The engine has finished an op. Its buffers are judged now; the program gets it when it waits for it."""
        call, history = self._flying.pop(op), self._peer.book.history
        if isinstance(outcome, Reduced):
            history.succeeded(call, outcome.epoch, outcome.contributors)
        else:
            history.failed(call, type(outcome).__name__, epoch)
        self._landed[op] = call, outcome
        if self._awaited_op == op:
            self._awaited_op = None
            self._deliver(op)

    def look_at(self, op: int) -> Outcome | None:
        """How an op has ended that the program has not waited for; None while it is in flight."""
        return self._landed[op][1] if op in self._landed else None

    def release(self, op: int) -> None:
        """The program has seen the end of an op by looking at it."""
        if op in self._landed:
            call, outcome = self._landed.pop(op)
            self._peer.book.history.returned(call)
            if isinstance(outcome, Reduced):
                self._peer.op_returned(outcome)

    def call_over(self, ballot: int, outcome: Outcome) -> None:
        """A run-wide call is over."""
        if self._awaited_ballot == ballot:
            self._awaited_ballot = None
            self._resume_soon(outcome)

    def session_over(self, error: RingfoldError | None) -> None:
        """The peer is out of the run. Ops in flight fail by themselves; everything else that waits ends here."""
        if self._leaving:
            self._resume_soon(error)
        elif self._awaited_ballot is not None:
            self._resume_soon(error or UsageError("this peer has left the run"))
        self._awaited_ballot = None

    # Inside

    def _deliver(self, op: int) -> None:
        call, outcome = self._landed.pop(op)
        self._resume_soon(outcome, call)

    def _resume_soon(self, outcome: Outcome, call: Call | None = None) -> None:
        delay = self._peer.sim.rng.randint(0, WAKE_UP_NS)
        self._later(delay, lambda: self._resume(outcome, call))

    def _later(self, delay_ns: int, action: Callable[[], None]) -> None:
        self._wakes += 1
        wake = self._wakes

        def run() -> None:
            if wake == self._wakes and not self.finished:
                action()

        self._peer.later(delay_ns, run)

    def _resume(self, outcome: Outcome, call: Call | None) -> None:
        """Let the program run until it waits for something."""
        self._peer.book.syncs.goes_on(self._peer.peer)
        if call is not None:
            self._peer.book.history.returned(call)
        if isinstance(outcome, Reduced):
            self._peer.op_returned(outcome)
        elif isinstance(outcome, CallSucceeded):
            outcome = self._peer.call_returned(self._awaited_kind, outcome)
        elif self._awaited_sync is not None:
            outcome = self._sync_returned(outcome)
            if isinstance(outcome, SyncInterrupted):
                assert self._sync is not None
                self._begin_sync(self._sync)
                return
        while True:
            try:
                if isinstance(outcome, RingfoldError):
                    request = self._program.throw(outcome)
                else:
                    request = self._program.send(outcome)
            except StopIteration:
                self._end()
                return
            except (Evicted, MasterUnreachable) as error:
                self._give_up(error)
                return
            except RingfoldError as error:
                raise Violation(f"{self._peer.name}'s program ended with {type(error).__name__}: {error}") from error
            try:
                waits, outcome = self._carry_out(request)
            except RingfoldError as error:
                waits, outcome = False, error
            if waits:
                if not isinstance(request, Sync | OfferState):
                    self._peer.book.syncs.rests(self._peer.peer)
                return

    def _sync_returned(self, outcome: Outcome) -> Outcome:
        """What `sync_state` does at its end."""
        assert self._awaited_sync is not None
        attempt, self._awaited_sync = self._awaited_sync, None
        if isinstance(outcome, SyncSucceeded):
            return attempt.succeeded(self._peer.machine, outcome)
        attempt.failed(self._peer.machine)
        return outcome

    def _carry_out(self, request: Request) -> tuple[bool, Outcome]:
        """Start what the program requests: (True, _) if it waits, else the value that it continues with."""
        peer = self._peer
        self.doing = _words(request)
        self.at_work_since = peer.sim.scheduler.now if isinstance(request, Sleep) else None
        match request:
            case Collective():
                call = peer.book.history.called(peer.peer, request)
                op = peer.submit(request)
                self._flying[op] = call
                if not request.wait:
                    return False, op
                return self._wait_for(op)
            case Wait(handle):
                return self._wait_for(handle)
            case UpdateTopology(min_world, timeout_ms):
                self._awaited_kind = "update"
                self._awaited_ballot = peer.vote("update", min_world, timeout_ms)
            case OptimizeTopology(timeout_ms):
                self._awaited_kind = "optimize"
                self._awaited_ballot = peer.vote("optimize", 0, timeout_ms)
            case ArePending(timeout_ms, vote, elsewhere, question):
                answer = None if vote or elsewhere or question else peer.pending_here()
                if answer is not None:
                    peer.book.history.answered(peer.peer, answer)
                    return False, answer
                self._awaited_kind = "pending"
                asked = None if vote else question or peer.next_question()
                self._awaited_ballot = peer.vote("pending", 0, timeout_ms, question=asked)
            case Sync():
                self._begin_sync(request)
            case OfferState(offer, snapshot, min_world, timeout_ms):
                self._awaited_ballot = peer.vote("sync", min_world, timeout_ms, offer, snapshot)
            case Leave(stopped):
                self._leaving = True
                if peer.leave(stopped):
                    return False, None
            case Rejoin():
                peer.comes_back(self)
            case BusyFor(ms):
                peer.busy_for(ms)
                return False, None
            case Sleep(ms):
                self._later(int(ms * MS), lambda: self._resume(None, None))
            case _:
                assert_never(request)
        return True, None

    def _begin_sync(self, sync: Sync) -> None:
        """What `sync_state` does at its beginning."""
        self._sync = sync
        peer, attempt = self._peer, Attempt(sync.state, threads=1)
        snapshot = attempt.snapshot
        offer = snapshot.manifest.offer(sync.strategy, stepped=sync.stepped, rollback=sync.rollback)
        ballot = self._awaited_ballot = peer.vote("sync", sync.min_world, sync.timeout_ms, offer, snapshot)
        self._awaited_sync = attempt
        if sync.meddle is not None:
            delay_ms, action = sync.meddle
            peer.later(int(delay_ms * MS), lambda: peer.meddle(ballot, action))

    def _wait_for(self, op: int) -> tuple[bool, Outcome]:
        if op in self._landed:
            self._deliver(op)
        else:
            self._awaited_op = op
        return True, None

    def _end(self) -> None:
        if not self._leaving:
            self._leaving = True
            if not self._peer.leave():
                return  # `session_over` resumes the program, which is at its end: this is called again
        self.finished = True
        self._peer.program_over(None)

    def stop(self) -> None:
        """The process is gone, and its program with it."""
        self.finished = True
        self._program.close()

    def _give_up(self, error: RingfoldError) -> None:
        self.finished = True
        self._peer.program_over(error)


def _words(request: Request) -> str:
    match request:
        case Collective(array, op, tag, retry, kind):
            again = "" if retry else ", no retry"
            return f"in {kind.name.lower()}({array.size} {array.dtype}, {op}, tag {tag}{again})"
        case Wait(handle):
            return f"waiting for op {handle}"
        case UpdateTopology(min_world):
            return f"in update_topology(min_world={min_world})"
        case OptimizeTopology():
            return "in optimize_topology()"
        case ArePending():
            return "in are_peers_pending()"
        case Sync(state, strategy):
            return f"in sync_shared_state({state}, {strategy})"
        case OfferState(offer):
            return f"in sync_shared_state(revision {offer.revision}, {offer.strategy})"
        case Leave():
            return "leaving"
        case Rejoin():
            return "joining again"
        case BusyFor(ms):
            return f"busy for {ms} ms"
        case Sleep(ms):
            return f"at work for {ms} ms"
        case _:
            assert_never(request)
