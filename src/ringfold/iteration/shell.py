"""The shells around `machine.py`: `GlobalIteration` takes part in a global iteration, `Observer` only looks at one.

Two threads run steps of one machine: the caller's, inside `next` and `arrive`, and one in the background that sends
heartbeats. They take turns by a lock. It is held while a step is computed, and never during a store operation.
"""

import logging
from collections.abc import Callable, Iterator
from contextlib import suppress
from types import TracebackType
from typing import TypeVar, assert_never

from msgspec import Struct

from ringfold.errors import LeaseLost, RingfoldError, StoreError, StoreUnreachable, UsageError
from ringfold.iteration.liveness import Look, Timing
from ringfold.iteration.machine import Begun, Machine, Resumed, State
from ringfold.iteration.operations import (
    Answer,
    Beat,
    CompareAndSet,
    Delete,
    Get,
    ListKeys,
    Ns,
    Operation,
    Outcome,
    Pause,
    Steps,
    WaitFor,
    sent,
)
from ringfold.iteration.record import NONE_YET, Hold, Quorum, Record, Rules, Self, decide
from ringfold.runtime import clock, threads
from ringfold.store import open_store
from ringfold.store.base import Lease, Store

Value = TypeVar("Value")
_log = logging.getLogger(__name__)
_LEAVE_S = 5.0

Begin = Callable[[int, float], Steps[Value]]
"""Begins steps: called with the time, and the timeout in seconds."""


class Stopped(Exception):
    """The thread that carries out a course has to end."""


class Carrier:
    """Carries out courses on one store, and holds the lease that shows life there."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._lock = threads.Lock()
        self._lease: Lease | None = None

    def let_go(self, timeout_s: float) -> None:
        """Give the lease up, if there is one."""
        if self._lease is not None:
            with suppress(StoreError):
                self._lease.release(timeout_s)

    def carry_out(self, course: Steps[Value], stop: threads.Event | None = None) -> Value:
        """Take the steps of a course until it is over; raises Stopped between two of them once `stop` is set."""
        answer: Answer | None = None
        while True:
            with self._lock:
                try:
                    operation = next(course) if answer is None else sent(course, answer)
                except StopIteration as over:
                    value: Value = over.value
                    return value
            outcome: Outcome
            try:
                outcome = self._asked(operation, stop)
            except RingfoldError as error:
                outcome = error
            if stop is not None and stop.is_set():
                raise Stopped
            answer = Answer(clock.monotonic_ns(), outcome)

    def _asked(self, operation: Operation, stop: threads.Event | None) -> Outcome:
        store = self._store
        match operation:
            case Get(key):
                return store.get(key)
            case ListKeys(prefix):
                return store.list(prefix)
            case CompareAndSet(key, expected, value, lasting):
                return store.compare_and_set(key, expected, value, lasting=lasting)
            case Delete(key, expected):
                store.delete(key, expected)
            case WaitFor(key, seen, timeout_s):
                return store.wait(key, seen, timeout_s)
            case Beat(key, value, ttl_s):
                self._beat(key, value, ttl_s)
            case Pause(seconds):
                (stop or threads.Event()).wait(seconds)
            case _:
                assert_never(operation)
        return None

    def _beat(self, key: str, value: bytes, ttl_s: float) -> None:
        """Hold the key by a lease, or write it anew where there are none."""
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
            # An earlier try was made after all, or this process was away for long: nobody else uses this key.
            self._store.delete(key)
            self._lease = self._store.lease(key, value, ttl_s)
        if self._lease is None:
            raise StoreUnreachable(getattr(self._store, "name", ""), "the lease that shows life could not be taken")


class GlobalIteration:
    """The iteration that all ranks agree on, through a store alone.

        for n in GlobalIteration("etcd://10.0.0.5:2379", rank, world, until=1000):
            train(n)

    Every rank is handed the same numbers, one after the other, and n + 1 only after all active ranks have finished n.
    Ranks may crash, restart and come later: a rank that was away goes on with the present iteration. `rank` is between
    0 and `world` - 1, and one process speaks for it: a second one takes over, and the first is told (`Superseded`).

    A rank shows life every `heartbeat_s`; who shows none for `inactive_after_s` is not waited for. `min_ranks` is how
    many it takes to go on; `quorum="majority"` asks for more than half of those who agreed on the iteration before.
    Both and `world` must be the same on all ranks. `timeout_s` is how long one call may wait before it raises
    `DeadlineExceeded`, which names the ranks that were waited for; call again to go on waiting. `until` ends the loop.

    `store` is an address or an open store; one that was opened here is closed at the end. `name` tells several global
    iterations in one store apart. The first call of `next` registers the rank.
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
    ) -> None:
        rules = Rules(world, min_ranks, quorum)
        timing = Timing(heartbeat_s=heartbeat_s, inactive_after_s=inactive_after_s)
        if timeout_s <= 0:
            raise UsageError(f"timeout_s must be positive, not {timeout_s}")
        self._owns_store = isinstance(store, str)
        self._store: Store = open_store(store) if isinstance(store, str) else store
        me = Self(
            rank=rank,
            incarnation=clock.random_bytes(8).hex(),
            can_list=self._store.can_list,
            has_leases=self._store.has_leases,
            name=name,
            store=getattr(self._store, "name", "the store"),
        )
        try:
            self._machine = Machine(me, rules, timing)
        except BaseException:
            self._close_store()
            raise
        self._timeout_s, self._until, self._machine.until = timeout_s, until, until
        self._carrier = Carrier(self._store)
        self._calling = threads.Lock()
        self._stop = threads.Event()
        self._pulse: threads.Thread | None = None
        self._fault: Exception | None = None
        self._last: Begun | None = None
        self._is_closed = False

    # What ranks do

    def next(self, timeout_s: float | None = None) -> int:
        """Finish the present iteration, wait until all active ranks have, and return the next.

        The first call returns the iteration at which this rank begins. Raises DeadlineExceeded (call again),
        StoreUnreachable (call again), Superseded or StoreWentBack (this process cannot go on); never returns a guess.
        """
        return self._called(self._machine.next, timeout_s).iteration

    def next_after(self, finished: int, *, until: int | None = None, timeout_s: float | None = None) -> int:
        """`next` for a process that goes on with what others of its rank have done: all up to `finished` is.

        A restarted rank that is a member of the present iteration is handed that one again, unless it has finished it.
        From `until` on an iteration is the end, which is returned although this rank may have no part in it. Raises
        UsageError if nobody has agreed on `finished` so far: then the state that it came from is of another history.
        """
        self._machine.until = self._until if until is None else until
        return self._called(lambda now_ns, limit_s: self._machine.next(now_ns, limit_s, finished), timeout_s).iteration

    def arrive(self, timeout_s: float | None = None) -> None:
        """Say that the present iteration is finished here, without waiting for the others. `next` does that, too."""
        self._called(self._machine.arrive, timeout_s)

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
        """Leave: nobody waits for this rank any more. An iteration that it has not finished is not finished by this.

        Without `leave` the rank is kept for another process that goes on with it, and waited for as if this one had
        crashed.
        """
        with self._calling:
            if self._is_closed:
                return
            self._is_closed = True
            self._stop.set()
            if self._pulse is not None:
                self._pulse.join(_LEAVE_S)
            if leave:
                self._leave()
            self._close_store()

    def __enter__(self) -> "GlobalIteration":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # What can be seen

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
        """Which life of the rank this is."""
        return self._machine.me.incarnation

    @property
    def state(self) -> State:
        return self._machine.state

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
        """How many iterations passed by without this rank between the last two that it was handed."""
        return 0 if self._last is None else self._last.missed

    @property
    def is_winner(self) -> bool:
        """Whether it was this rank that made the present iteration; exactly one did, if it still lives."""
        return self._last is not None and self._last.is_winner

    @property
    def resumed(self) -> Resumed | None:
        """What this rank found when it registered, if it had been there before: where it was, and where the others are.

        None before the first `next`, and for a rank that is new.
        """
        return self._machine.resumed

    @property
    def error(self) -> Exception | None:
        """What has ended this process's part for good, as soon as it is known; every later call raises it."""
        return self._machine.error or self._fault

    @property
    def fence(self) -> int:
        """A number that is higher than that of any earlier process of this rank; for writes to elsewhere."""
        return self._machine.fence

    @property
    def waiting_for(self) -> str:
        """What this rank waits for just now; empty when it does not."""
        hold = self._machine.hold
        return "" if hold is None else hold.reason

    def active_ranks(self) -> list[int]:
        """The ranks that show life now, as far as this one can see. Asks the store."""
        self._look()
        record = self._machine.record
        return [] if record is None else [rank for rank in record.roster if not self._machine.is_dead(rank)]

    def last_iteration(self, rank: int) -> int | None:
        """The last iteration that a rank had a part in; None if there was none so far. Asks the store."""
        self._look()
        record: Record | None = self._machine.record
        seat = None if record is None else record.roster.get(rank)
        return None if seat is None or seat.last == NONE_YET else seat.last

    # Steps, and how they are carried out

    def _look(self) -> Look:
        self._check_open()
        return self._carrier.carry_out(self._machine.observe(clock.monotonic_ns(), self._timeout_s))

    def _called(self, begin: Begin[Value], timeout_s: float | None) -> Value:
        with self._calling:
            self._check_open()
            limit_s = self._timeout_s if timeout_s is None else timeout_s
            if self._pulse is None:
                self._carrier.carry_out(self._machine.register(clock.monotonic_ns(), limit_s))
                self._pulse = threads.start("ringfold-iteration", self._show_life)
            value = self._carrier.carry_out(begin(clock.monotonic_ns(), limit_s))
            if isinstance(value, Begun):
                self._last = value
            return value

    def _check_open(self) -> None:
        if self._is_closed:
            raise UsageError("this GlobalIteration was closed; make a new one to come back")
        if self._fault is not None:
            raise self._fault

    def _show_life(self) -> None:
        try:
            self._carrier.carry_out(self._machine.pulse(), self._stop)
        except Stopped:
            pass
        except RingfoldError as error:
            if self._machine.error is None:
                self._fault = error
            _log.error("rank %d no longer shows life: %s", self.rank, error)

    def _leave(self) -> None:
        if self._machine.error is None and self._fault is None:
            with suppress(RingfoldError):
                self._carrier.carry_out(self._machine.leave(clock.monotonic_ns(), _LEAVE_S))
        self._carrier.let_go(_LEAVE_S)

    def _close_store(self) -> None:
        if self._owns_store:
            self._store.close()


class RankView(Struct, frozen=True):
    """One rank. `state` is TRAINING or READY for members, JOINING for who gets in next, INACTIVE, or LEFT.

    `silent_s` is for how long the observer has seen nothing new of it, at least; None where a lease shows its life.
    """

    rank: int
    state: str
    incarnation: str
    fence: int
    last: int
    silent_s: float | None


class View(Struct, frozen=True):
    """A global iteration as it stands. `iteration` is -1 before the first; `waiting_for` are ranks."""

    iteration: int
    version: int
    winner: int | None
    rules: Rules
    ranks: list[RankView]
    waiting_for: list[int]
    reason: str


def view(now_ns: Ns, machine: Machine, look: Look) -> View | None:
    """What a look showed, for people; None when there is nothing yet. Pure."""
    record = machine.record
    if record is None:
        return None
    decision = decide(record, look.arrived, look.dead)
    missing = list(decision.missing) if isinstance(decision, Hold) else []
    return View(
        record.iteration,
        record.version,
        record.winner,
        record.rules,
        [_rank(now_ns, machine, record, look, rank) for rank in record.roster],
        missing,
        decision.reason if isinstance(decision, Hold) else "all have arrived",
    )


def _rank(now_ns: Ns, machine: Machine, record: Record, look: Look, rank: int) -> RankView:
    seat = record.roster[rank]
    if seat.gone:
        state = "LEFT"
    elif rank in look.dead:
        state = "INACTIVE"
    elif rank not in record.members:
        state = "JOINING"
    else:
        state = "READY" if rank in look.arrived else "TRAINING"
    age_ns = machine.lookout.watch.age_ns(now_ns, seat.incarnation)
    return RankView(rank, state, seat.incarnation, seat.fence, seat.last, None if age_ns is None else age_ns / 1e9)


class Observer:
    """Watches a global iteration in a store. The longer it watches, the more it knows of who is silent."""

    def __init__(
        self, store: Store, *, name: str = "iteration", heartbeat_s: float = 5.0, inactive_after_s: float = 30.0
    ) -> None:
        me = Self(
            rank=0, incarnation="", can_list=store.can_list, has_leases=store.has_leases, name=name, store="the store"
        )
        timing = Timing(heartbeat_s=heartbeat_s, inactive_after_s=inactive_after_s)
        self._machine = Machine(me, Rules(1), timing)
        self._carrier = Carrier(store)

    def look(self, timeout_s: float = 5.0) -> View | None:
        """How it stands now; None when no rank has registered yet."""
        look = self._carrier.carry_out(self._machine.observe(clock.monotonic_ns(), timeout_s))
        return view(clock.monotonic_ns(), self._machine, look)
