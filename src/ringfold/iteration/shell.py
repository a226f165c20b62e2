"""The shells around `machine.py`: `GlobalIteration` takes part in a global iteration, `Observer` only looks at one.

Two threads run steps of one machine: the caller's, inside `next` and `arrive`, and one in the background that sends
heartbeats. They take turns by a lock. It is held while a step is computed, and never during a store operation.
"""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import TracebackType
from typing import TypeVar, assert_never

from msgspec import Struct

from ringfold.errors import DeadlineExceeded, LeaseLost, RingfoldError, StoreError, StoreUnreachable, UsageError
from ringfold.iteration.liveness import LivenessTiming, RankObservation
from ringfold.iteration.machine import BegunIteration, IterationMachine, Resumed, State, StateChange
from ringfold.iteration.operations import (
    CompareAndSet,
    Delete,
    Get,
    GetMany,
    Heartbeat,
    Increment,
    ListKeys,
    Ns,
    Operation,
    Pause,
    Steps,
    StoreOutcome,
    StoreReply,
    WaitFor,
    send_reply,
)
from ringfold.iteration.record import NONE_YET, Hold, Quorum, RankIdentity, Record, Rules, decide
from ringfold.limits import MAX_TIMEOUT_S
from ringfold.runtime import clock, threads
from ringfold.store import open_store
from ringfold.store.base import Lease, Store

Value = TypeVar("Value")
_log = logging.getLogger(__name__)
_LEAVE_S = 5.0

Begin = Callable[[int, float], Steps[Value]]
"""Begins steps: called with the time, and the timeout in seconds."""


class StepsStopped(Exception):
    """The thread that runs the steps must end."""


class StepRunner:
    """Runs steps on one store, and holds the lease that shows that this process is alive."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._lock = threads.Lock()
        self._lease: Lease | None = None
        self._last_warning = ""

    def release_lease(self, timeout_s: float) -> None:
        """Release the lease, if there is one."""
        if self._lease is not None:
            with suppress(StoreError):
                self._lease.release(timeout_s)

    def run(
        self, steps: Steps[Value], stop: threads.Event | None = None, between: Callable[[], None] = lambda: None
    ) -> Value:
        """Run steps to their end; raises StepsStopped between two operations once `stop` is set.

        `between` is called after each step, also after one that raises.
        """
        reply: StoreReply | None = None
        while True:
            try:
                with self._lock:
                    try:
                        operation = next(steps) if reply is None else send_reply(steps, reply)
                    except StopIteration as over:
                        result: Value = over.value
                        return result
            finally:
                between()
            outcome: StoreOutcome
            try:
                outcome = self._execute(operation, stop)
            except RingfoldError as error:
                outcome = error
            if stop is not None and stop.is_set():
                raise StepsStopped
            reply = StoreReply(clock.monotonic_ns(), outcome)

    def _execute(self, operation: Operation, stop: threads.Event | None) -> StoreOutcome:
        store = self._store
        match operation:
            case Get(key):
                return store.get(key)
            case GetMany(keys):
                return store.get_many(keys)
            case ListKeys(prefix):
                return store.list(prefix)
            case CompareAndSet(key, expected, value, lasting):
                return store.compare_and_set(key, expected, value, lasting=lasting)
            case Increment(key, by):
                return store.increment(key, by)
            case Delete(key, expected):
                store.delete(key, expected)
            case WaitFor(key, seen, timeout_s):
                return store.wait(key, seen, timeout_s)
            case Heartbeat(key, value, ttl_s):
                try:
                    self._send_heartbeat(key, value, ttl_s)
                except StoreError as error:
                    self._warn(str(error))
                    raise
                self._last_warning = ""
            case Pause(seconds):
                (stop or threads.Event()).wait(seconds)
            case _:
                assert_never(operation)
        return None

    def _warn(self, text: str) -> None:
        """Log why there is no heartbeat; the same reason once."""
        if text != self._last_warning:
            _log.warning("the heartbeat was not written: %s", text)
        self._last_warning = text

    def _send_heartbeat(self, key: str, value: bytes, ttl_s: float) -> None:
        """Hold the key by a lease, or write it again where there are none."""
        if not self._store.has_leases:
            self._store.set(key, value, lasting=False)
            return
        if self._lease is not None:
            try:
                self._lease.renew()
                return
            except LeaseLost:
                self._lease = None
        self._lease = self._store.lease(key, value, ttl_s)
        if self._lease is None:
            # An earlier try succeeded after all, or this process was suspended: no other process uses this key.
            self._store.delete(key)
            self._lease = self._store.lease(key, value, ttl_s)
        if self._lease is None:
            raise StoreUnreachable(getattr(self._store, "name", ""), "the heartbeat lease could not be taken")


class GlobalIteration:
    """The iteration that all ranks agree on, through a store alone.

        for n in GlobalIteration("etcd://10.0.0.5:2379", rank, world, until=1000):
            train(n)

    Every rank gets the same numbers, one after another, and n + 1 only after all active ranks have finished n. Ranks
    may crash, restart and join later: a rank that was away continues with the present iteration. `rank` is between 0
    and `world` - 1, and one process acts for it: a second one takes over, and the first gets `Superseded`.

    A rank sends a heartbeat every `heartbeat_s`; one without a heartbeat for `inactive_after_s` is not waited for.
    `min_ranks` is how many must continue; `quorum="majority"` requires more than half of the members of the iteration
    before. Both and `world` must be the same on all ranks. `timeout_s` is how long one call may wait before it raises
    `DeadlineExceeded`, which names the ranks that were waited for; call again to continue waiting. `until` ends the
    loop.

    `store` is an address or an open store; a store that was opened here is closed at the end. `name` distinguishes
    several global iterations in one store. The first call of `next` registers the rank.

    `on_state(state, iteration)` is called at every change of state (TRAINING, READY, CONSENSUS, ADVANCE,
    NEW_ITERATION), in the thread that calls `next` or `arrive`; what it raises is logged. `states` has the last ones.

    One thread calls at a time; another one waits for its turn, as long as its own timeout. `close` ends a call that
    waits in another thread, with `UsageError`. Neither may be called inside `on_state`.
    """

    def __init__(
        self,
        store: Store | str,
        rank: int,
        world: int,
        *,
        heartbeat_s: float = 5.0,
        inactive_after_s: float = 30.0,
        min_ranks: int = 1,
        quorum: Quorum | None = None,
        timeout_s: float = 600.0,
        until: int | None = None,
        name: str = "iteration",
        on_state: Callable[[State, int], None] | None = None,
    ) -> None:
        rules = Rules(world, min_ranks, quorum)
        timing = LivenessTiming(heartbeat_s=heartbeat_s, inactive_after_s=inactive_after_s)
        _checked_timeout(timeout_s)
        self._owns_store = isinstance(store, str)
        self._store: Store = open_store(store) if isinstance(store, str) else store
        me = RankIdentity(
            rank=rank,
            incarnation=clock.random_bytes(8).hex(),
            can_list=self._store.can_list,
            has_leases=self._store.has_leases,
            counts_writes=self._store.counts_writes,
            has_counters=self._store.has_counters,
            name=name,
            store=getattr(self._store, "name", "the store"),
        )
        try:
            self._machine = IterationMachine(me, rules, timing)
        except BaseException:
            self._close_store()
            raise
        self._timeout_s = timeout_s
        self._until = until
        self._machine.until = until
        self._runner = StepRunner(self._store)
        self._on_state, self._states_reported = on_state, 0
        self._calling = threads.Lock()
        self._caller = 0  # the thread that holds it
        self._stop = threads.Event()
        self._heartbeats: threads.Thread | None = None
        self._fault: Exception | None = None
        self._last: BegunIteration | None = None
        self._is_closed = False

    # Taking part

    def next(self, timeout_s: float | None = None) -> int:
        """Finish the present iteration, wait until all active ranks have, and return the next.

        The first call returns the iteration at which this rank begins. Raises DeadlineExceeded (call again),
        StoreUnreachable (call again), Superseded or StoreWentBack (this process cannot continue); never returns a
        guess.
        """
        return self._begin_call("next", self._machine.next, timeout_s).iteration

    def next_after(self, finished: int, *, until: int | None = None, timeout_s: float | None = None) -> int:
        """`next` for a process that continues the work of an earlier one of its rank: all up to `finished` is done.

        A restarted rank that is a member of the present iteration gets that one again, unless it has finished it. From
        `until` on an iteration is the end, and is returned even if this rank is not a member of it. Raises UsageError
        if there was no agreement on `finished` so far: then the state that it came from is of another history.
        """
        self._machine.until = self._until if until is None else until
        return self._begin_call(
            "next_after", lambda now_ns, limit_s: self._machine.next(now_ns, limit_s, finished), timeout_s
        ).iteration

    def arrive(self, timeout_s: float | None = None) -> None:
        """Mark the present iteration as finished here, without waiting for the others. `next` does that, too."""
        self._begin_call("arrive", self._machine.arrive, timeout_s)

    def __iter__(self) -> Iterator[int]:
        """The iterations, until `until`. The rank leaves when the loop is over, however it ends."""
        try:
            while True:
                number = self.next()
                if self._until is not None and number >= self._until:
                    return
                yield number
        finally:
            self.close()

    def close(self, *, leave: bool = True) -> None:
        """Leave: no rank waits for this one any more. An iteration that it has not finished is not finished by this.

        Without `leave` another process can continue for the rank; until then the others wait for it as if this one had
        crashed.
        """
        self._check_not_inside("close")
        self._stop.set()
        with self._turn("close", None):
            if self._is_closed:
                return
            self._is_closed = True
            if self._heartbeats is not None:
                self._heartbeats.join(_LEAVE_S)
            if leave:
                self._leave()
            self._close_store()

    def __enter__(self) -> "GlobalIteration":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # Properties

    @property
    def rank(self) -> int:
        return self._machine.me.rank

    @property
    def world(self) -> int:
        return self._machine.rules.world

    @property
    def timeout_s(self) -> float:
        """How long one call may wait."""
        return self._timeout_s

    @property
    def incarnation(self) -> str:
        """The id of this process among all processes of the rank."""
        return self._machine.me.incarnation

    @property
    def state(self) -> State:
        return self._machine.state

    @property
    def states(self) -> tuple[StateChange, ...]:
        """The last changes of state, the oldest first: each with the state and the iteration it is about."""
        return tuple(self._machine.changes)

    @property
    def iteration(self) -> int:
        """The iteration that `next` returned last; -1 before the first."""
        return self._machine.iteration

    @property
    def members(self) -> tuple[int, ...]:
        """The ranks that are in the present iteration."""
        return () if self._last is None else self._last.members

    @property
    def missed(self) -> int:
        """How many iterations passed without this rank between the last two that it got."""
        return 0 if self._last is None else self._last.missed

    @property
    def is_winner(self) -> bool:
        """Whether this rank wrote the present iteration; exactly one rank did."""
        return self._last is not None and self._last.is_winner

    @property
    def resumed(self) -> Resumed | None:
        """What this rank found when it registered, if it had registered before: its last iteration, and the present.

        None before the first `next`, and for a new rank.
        """
        return self._machine.resumed

    @property
    def error(self) -> Exception | None:
        """The error that has ended this process's part for good; every later call raises it."""
        return self._machine.error or self._fault

    @property
    def fence(self) -> int:
        """A number that is higher than that of any earlier process of this rank; a fencing token for other stores."""
        return self._machine.fence

    @property
    def waiting_for(self) -> str:
        """What this rank waits for now; empty if it does not wait."""
        hold = self._machine.hold
        return "" if hold is None else hold.reason

    def active_ranks(self) -> list[int]:
        """The ranks that are alive now, as far as this one can see. Reads the store."""
        self._look()
        record = self._machine.record
        return [] if record is None else [rank for rank in record.roster if not self._machine.is_dead(rank)]

    def last_iteration(self, rank: int) -> int | None:
        """The last iteration that a rank was a member of; None if there was none so far. Reads the store."""
        self._look()
        record: Record | None = self._machine.record
        registration = None if record is None else record.roster.get(rank)
        return None if registration is None or registration.last == NONE_YET else registration.last

    # Steps

    def _report_states(self) -> None:
        """Call `on_state` for the changes since the last time. Only steps of calls change the state."""
        if self._on_state is None:
            return
        changes, count = tuple(self._machine.changes), self._machine.change_count
        new, self._states_reported = count - self._states_reported, count
        for change in changes[max(0, len(changes) - new) :] if new else ():
            try:
                self._on_state(change.state, change.iteration)
            except Exception:
                _log.exception("on_state failed")

    def _look(self) -> RankObservation:
        self._check_open()
        return self._runner.run(self._machine.observe(clock.monotonic_ns(), self._timeout_s))

    @contextmanager
    def _turn(self, operation: str, timeout_s: float | None) -> Iterator[None]:
        """One call at a time. Raises DeadlineExceeded if another thread's call takes longer; None: wait for it."""
        self._check_not_inside(operation)
        if not self._calling.acquire(timeout=-1 if timeout_s is None else max(0.0, timeout_s)):
            waited_ms = int((timeout_s or 0.0) * 1_000)
            text = f"another thread is in a call of this GlobalIteration for {waited_ms} ms"
            raise DeadlineExceeded(operation, (), waited_ms, text)
        self._caller = threads.current()
        try:
            yield
        finally:
            self._caller = 0
            self._calling.release()

    def _check_not_inside(self, operation: str) -> None:
        if self._caller == threads.current():
            raise UsageError(f"{operation}: not in on_state or a signal handler, while this thread is in another call")

    def _begin_call(self, operation: str, begin: Begin[Value], timeout_s: float | None) -> Value:
        limit_s = self._timeout_s if timeout_s is None else _checked_timeout(timeout_s, may_be_zero=True)
        with self._turn(operation, limit_s):
            self._check_open()
            try:
                if self._heartbeats is None:
                    registering = self._machine.register(clock.monotonic_ns(), limit_s)
                    self._runner.run(registering, self._stop, self._report_states)
                    self._heartbeats = threads.start("ringfold-iteration", self._run_heartbeats)
                value = self._runner.run(begin(clock.monotonic_ns(), limit_s), self._stop, self._report_states)
            except StepsStopped:
                raise UsageError(f"{operation}: this GlobalIteration was closed meanwhile") from None
            if isinstance(value, BegunIteration):
                self._last = value
            return value

    def _check_open(self) -> None:
        if self._is_closed or self._stop.is_set():
            raise UsageError("this GlobalIteration was closed; make a new one to return")
        if self._fault is not None:
            raise self._fault

    def _run_heartbeats(self) -> None:
        try:
            self._runner.run(self._machine.send_heartbeats(), self._stop)
        except StepsStopped:
            pass
        except RingfoldError as error:
            if self._machine.error is None:
                self._fault = error
            _log.error("rank %d no longer sends heartbeats: %s", self.rank, error)

    def _leave(self) -> None:
        if self._machine.error is None and self._fault is None:
            with suppress(RingfoldError):
                self._runner.run(self._machine.leave(clock.monotonic_ns(), _LEAVE_S))
        self._runner.release_lease(_LEAVE_S)

    def _close_store(self) -> None:
        if self._owns_store:
            self._store.close()


def _checked_timeout(timeout_s: float, *, may_be_zero: bool = False) -> float:
    if not 0 <= timeout_s <= MAX_TIMEOUT_S or (timeout_s == 0 and not may_be_zero):
        raise UsageError(f"timeout_s must be positive and at most {MAX_TIMEOUT_S:g}, not {timeout_s}")
    return timeout_s


class RankView(Struct, frozen=True):
    """One rank. `state` is TRAINING or READY for members, JOINING for future members, INACTIVE, or LEFT.

    `silent_s` is how long, at least, the observer has seen no heartbeat of it; None where it has a lease.
    """

    rank: int
    state: str
    incarnation: str
    fence: int
    last: int
    silent_s: float | None


class View(Struct, frozen=True):
    """The state of a global iteration. `iteration` is -1 before the first; `waiting_for` are ranks."""

    iteration: int
    version: int
    winner: int | None
    rules: Rules
    ranks: list[RankView]
    waiting_for: list[int]
    reason: str


def view(now_ns: Ns, machine: IterationMachine, observation: RankObservation) -> View | None:
    """The result of an observation, for display; None if there is no record yet. Pure."""
    record = machine.record
    if record is None:
        return None
    decision = decide(record, observation.arrived, observation.dead)
    missing = list(decision.missing) if isinstance(decision, Hold) else []
    return View(
        record.iteration,
        record.version,
        record.winner,
        record.rules,
        [_rank(now_ns, machine, record, observation, rank) for rank in record.roster],
        missing,
        decision.reason if isinstance(decision, Hold) else "all have arrived",
    )


def _rank(now_ns: Ns, machine: IterationMachine, record: Record, observation: RankObservation, rank: int) -> RankView:
    registration = record.roster[rank]
    if registration.gone:
        state = "LEFT"
    elif rank in observation.dead:
        state = "INACTIVE"
    elif rank not in record.members:
        state = "JOINING"
    else:
        state = "READY" if rank in observation.arrived else "TRAINING"
    age_ns = machine.observer.liveness.age_ns(now_ns, registration.incarnation)
    return RankView(
        rank=rank,
        state=state,
        incarnation=registration.incarnation,
        fence=registration.fence,
        last=registration.last,
        silent_s=None if age_ns is None else age_ns / 1e9,
    )


class Observer:
    """Observes a global iteration in a store. It finds inactive ranks only after it has run for some time."""

    def __init__(
        self, store: Store, *, name: str = "iteration", heartbeat_s: float = 5.0, inactive_after_s: float = 30.0
    ) -> None:
        me = RankIdentity(
            rank=0, incarnation="", can_list=store.can_list, has_leases=store.has_leases, name=name, store="the store"
        )
        timing = LivenessTiming(heartbeat_s=heartbeat_s, inactive_after_s=inactive_after_s)
        self._machine = IterationMachine(me, Rules(1), timing)
        self._runner = StepRunner(store)

    def look(self, timeout_s: float = 5.0) -> View | None:
        """The state now; None if no rank has registered yet."""
        observation = self._runner.run(self._machine.observe(clock.monotonic_ns(), timeout_s))
        return view(clock.monotonic_ns(), self._machine, observation)
