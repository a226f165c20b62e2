"""The global iteration, simulated: ranks with the production steps over a store in memory, and everything goes wrong.

A *life* is one process of one rank. It runs two sequences of steps, as the real one has two threads: its program (next
iteration, train, next, ...) and its heartbeats. Every operation they yield travels to the store, is carried out there
at one instant, and its answer travels back. At each of them the life may die, before it is carried out or after; the
answer may be lost; the operation may be late. Besides, lives are paused, cut off, doubled, restarted at once or much
later, their clocks jump by an hour, and the store stands still, loses its leader (no request is answered for a while,
and of those that write some are carried out, some are not, and some are later), is emptied or put back.

What is checked, for any protocol, by what lives really did:
- no rank wins an iteration that another one has won;
- what a life is handed grows by one; it may skip only what it had no part in;
- no rank begins n while a healthy rank that began n - 1 has not finished it;
- no rank continues with a store that is not the one it knew;
- once the faults have stopped, all ranks continue;
- and in an iteration that began after that, when all have arrived, not all of them wait: one tries to advance at once.
And for the record, at every change: its versions, fences and members, the quorum, and that no rank came back that was
superseded.
"""

from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import TYPE_CHECKING, Literal, Protocol, assert_never

from ringfold.errors import DeadlineExceeded, RingfoldError, StoreUnreachable, StoreWentBack, Superseded
from ringfold.iteration.liveness import LivenessTiming, finished_iteration
from ringfold.iteration.machine import BegunIteration, IterationMachine
from ringfold.iteration.operations import (
    NS,
    CompareAndSet,
    Delete,
    Get,
    GetMany,
    Heartbeat,
    Increment,
    ListKeys,
    Operation,
    Pause,
    Steps,
    StoreOutcome,
    StoreReply,
    WaitFor,
    send_reply,
)
from ringfold.iteration.record import Advance, Keys, RankIdentity, Record, Rules, decide, decode
from ringfold.store.base import Entry, version_of
from ringfold.store.client import StoreClient
from ringfold.store.in_memory import Crashed, Fault, MemoryDriver, MemoryServer, StoreSnapshot
from ringfold.testing.scheduler import MS, Scheduler, SimulationFailure, Trace

PREFIX = "run"
TIMING = LivenessTiming(heartbeat_s=1.0, inactive_after_s=6.0)
SETTLED = 3
"""So many iterations all ranks must get once the faults have stopped."""

Kind = Literal["crash", "pause", "cut", "twin", "leave", "jump", "outage", "leader", "wipe", "restore"]
Moment = Literal["crash", "crash after"]


class Agreeing(Protocol):
    """A protocol for the global iteration, as the simulation drives it."""

    def next(self, now_ns: int, timeout_s: float) -> Steps[BegunIteration]: ...

    def send_heartbeats(self) -> Steps[None]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Trouble:
    """Something that happens to ranks, or to the store, at an instant."""

    kind: Kind
    at_ms: int
    ranks: tuple[int, ...] = ()
    for_ms: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class IterationSchedule:
    """One schedule: everything that is not drawn while it runs."""

    seed: int
    rules: Rules
    can_list: bool = True
    has_leases: bool = False
    counts_writes: bool = False
    has_counters: bool = False
    troubles: tuple[Trouble, ...] = ()
    crash_at: tuple[int, int, Moment] | None = None
    """A rank, the number of one of its store operations, and when in it the life ends."""
    losses: float = 0.0
    """The share of operations to which something happens, until the faults stop."""
    quiet_ms: int = 0
    """When the faults stop."""
    stay_dead: tuple[int, ...] = ()
    slow: float = 0.05
    """The share of trainings that take longer than it takes to be given up."""


@dataclass(frozen=True, slots=True)
class ScheduleResult:
    """What a schedule came to."""

    iterations: int
    lives: int
    operations: int
    virtual_ms: float
    troubles: tuple[str, ...]


Course = Generator[Operation, StoreReply, None]


@dataclass(eq=False, slots=True)
class Fiber:
    """One of the two sequences of steps of a life."""

    course: Course
    has_begun: bool = False
    is_running: bool = False

    def send(self, answer: StoreReply) -> Operation:
        """Hand over what became of the last operation; returns the next."""
        self.is_running = True
        try:
            if not self.has_begun:
                self.has_begun = True
                return next(self.course)
            return send_reply(self.course, answer)
        finally:
            self.is_running = False

    def close(self) -> None:
        if not self.is_running:
            self.course.close()


@dataclass(eq=False, slots=True)
class RankProcess:
    """One process of one rank."""

    rank: int
    incarnation: str
    born_ns: int
    agreeing: Agreeing | None = None
    client: StoreClient | None = None
    driver: MemoryDriver | None = None
    history: int = -1
    jump_ns: int = 0
    log: list[int] = field(default_factory=list)
    finished: int = -1
    is_up: bool = True
    is_paused: bool = False
    is_cut: bool = False
    is_leaving: bool = False
    is_troubled: bool = False
    """Whether anything ever happened to it for which the others may give it up."""
    fault: Fault | None = None
    fibers: list[Fiber] = field(default_factory=list)
    held: list[Callable[[], None]] = field(default_factory=list)

    def __str__(self) -> str:
        return f"rank {self.incarnation}"


_KEYS = Keys("iteration")
RECORD = f"{PREFIX}/{_KEYS.record}"


class IterationFailure(SimulationFailure):
    """A promise of the global iteration was broken."""

    def __str__(self) -> str:
        lines = [f"seed {self.seed}: {self.text}"]
        lines.append(f"replay with: python -m ringfold.testing --iterations --seed {self.seed} --trace")
        return "\n".join([*lines, f"the last {len(self.tail)} events:", *self.tail])


AgreeingOf = Callable[["Simulated", RankProcess], Agreeing]


def production(sim: "Simulated", life: RankProcess) -> Agreeing:
    return IterationMachine(sim.self_of(life), sim.schedule.rules, TIMING)


class Simulated:
    """A store and its ranks, driven by one schedule."""

    def __init__(
        self, schedule: IterationSchedule, agreeing: AgreeingOf = production, echo: Callable[[str], None] | None = None
    ) -> None:
        self.schedule, self._agreeing = schedule, agreeing
        self.sched = Scheduler(schedule.seed, Trace(echo=echo))
        self.rng = Random(f"{schedule.seed}/iterating")
        self.server = MemoryServer()
        self.lives: list[RankProcess] = []
        self.history = 0
        self._back_ns = -(10**12)
        self.is_down = False
        self.leaderless = 0
        """How many losses of the leader are not over."""
        self.is_quiet = False
        self.operations: dict[int, int] = {}
        self.checks = Checks(schedule.rules, self.lives)
        self._leases: dict[str, int] = {}
        self._waiting: list[tuple[str, int, Callable[[], None]]] = []
        self._parked: dict[str, int] = {}
        """The incarnations whose programs wait for a record of another version than this."""
        self._last_faulty = 0
        """The iteration in which the faults stopped."""
        self._snapshot: StoreSnapshot | None = None

    # Running a schedule

    def run(self) -> ScheduleResult:
        try:
            self._run()
        except AssertionError as broken:
            raise self._failure(str(broken)) from broken
        return ScheduleResult(
            max((life.log[-1] for life in self.lives if life.log), default=-1),
            len(self.lives),
            sum(self.operations.values()),
            self.sched.now / MS,
            tuple(trouble.kind for trouble in self.schedule.troubles),
        )

    def _run(self) -> None:
        schedule = self.schedule
        for rank in range(schedule.rules.world):
            self.sched.after(self.rng.randrange(400 * MS), self._start, rank)
        for trouble in schedule.troubles:
            self.sched.at(trouble.at_ms * MS, self._strike, trouble)
        self.sched.run_until(lambda: False, schedule.quiet_ms * MS)
        self._heal()
        before = {life.incarnation: len(life.log) for life in self.lives}
        limit_ns = self.sched.now + 150_000 * MS
        if not self.sched.run_until(lambda: self._is_settled(before), limit_ns):
            raise Broken(f"no rank continues: {self._stuck()}")
        self.checks.at_end()

    def _is_settled(self, before: dict[str, int]) -> bool:
        """Whether every rank that is not dead for good was handed some iterations since then, in one life."""
        settled = {
            life.rank
            for life in self.lives
            if life.is_up and len(life.log) >= before.get(life.incarnation, 0) + SETTLED
        }
        return len(settled.union(self.schedule.stay_dead)) == self.schedule.rules.world

    def _heal(self) -> None:
        """The faults stop: everything is there again."""
        self.is_quiet, self.is_down, self.leaderless = True, False, 0
        self._last_faulty = self.checks.iteration
        for life in list(self.lives):
            life.is_cut = False
            if life.is_paused:
                self._resume(life)
        for life in list(self.lives):
            if life.rank in self.schedule.stay_dead and life.is_up:
                self._end(life, "stays dead")
        for rank in range(self.schedule.rules.world):
            if not self._up(rank) and rank not in self.schedule.stay_dead:
                self._start(rank)

    def _stuck(self) -> str:
        return "; ".join(f"{life} has {life.log[-3:]}{'' if life.is_up else ' (down)'}" for life in self.lives)

    # Troubles

    def _strike(self, trouble: Trouble) -> None:
        if self.is_quiet:
            return
        self.sched.trace.note(self.sched.now, "trouble", f"{trouble.kind} {trouble.ranks} for {trouble.for_ms} ms")
        match trouble.kind:
            case "outage":
                self.is_down = True
                self.sched.after(trouble.for_ms * MS, self._back)
                if self.schedule.has_leases:
                    for life in self.lives:
                        life.is_troubled = True  # leases keep expiring while they cannot be renewed
                return
            case "leader":
                self.leaderless += 1
                self.sched.after(trouble.for_ms * MS, self._elect)
                if self.schedule.has_leases:
                    for life in self.lives:
                        life.is_troubled = True
                return
            case "wipe" | "restore":
                self._go_back(trouble)
                return
        for rank in trouble.ranks:
            for life in self._up(rank)[-1:]:
                self._strike_one(trouble, life)

    def _strike_one(self, trouble: Trouble, life: RankProcess) -> None:
        match trouble.kind:
            case "crash":
                self._die(life, "was killed")
            case "pause":
                life.is_paused = life.is_troubled = True
                self.sched.after(trouble.for_ms * MS, self._resume, life)
            case "cut":
                life.is_cut = life.is_troubled = True
                self.sched.after(trouble.for_ms * MS, self._uncut, life)
            case "twin":
                life.is_troubled = True
                self._start(life.rank)
            case "leave":
                life.is_leaving = life.is_troubled = True
            case "jump":
                life.jump_ns += 3_600 * NS

    def _back(self) -> None:
        self.is_down = False

    def _elect(self) -> None:
        self.leaderless = max(0, self.leaderless - 1)

    def _uncut(self, life: RankProcess) -> None:
        life.is_cut = False

    def _resume(self, life: RankProcess) -> None:
        held, life.held, life.is_paused = life.held, [], False
        for action in held:
            self.sched.after(self.rng.randrange(MS), action)

    def _go_back(self, trouble: Trouble) -> None:
        """The store loses what it held since `for_ms` ago, or everything."""
        if trouble.kind == "restore" and self._snapshot is None:
            self._snapshot = self.server.snapshot()
            self.sched.after(trouble.for_ms * MS, self._strike, trouble)
            return
        if self._snapshot is not None and trouble.kind == "restore":
            if self._snapshot.generation == self.server.generation:
                return
            self.server.restore(self._snapshot)
        else:
            self.server.wipe()
        self.history += 1
        self._back_ns = self.sched.now
        until_ns = self.sched.now + round(TIMING.inactive_after_s * NS)
        self._leases = {key: until_ns for key in self.server.entries if key.endswith("/alive")}
        self.checks.new_history(self.server, RECORD, self.history)

    # Lives

    def self_of(self, life: RankProcess) -> RankIdentity:
        return RankIdentity(
            rank=life.rank,
            incarnation=life.incarnation,
            can_list=self.schedule.can_list,
            has_leases=self.schedule.has_leases,
            counts_writes=self.schedule.counts_writes,
            has_counters=self.schedule.has_counters,
        )

    def now_ns(self, life: RankProcess) -> int:
        return self.sched.now + life.jump_ns

    def note(self, life: RankProcess, what: str) -> None:
        self.sched.trace.note(self.sched.now, str(life), what)

    def _up(self, rank: int) -> list[RankProcess]:
        return [life for life in self.lives if life.rank == rank and life.is_up]

    def _start(self, rank: int) -> None:
        others = self._up(rank)
        number = sum(life.rank == rank for life in self.lives)
        life = RankProcess(rank, f"{rank}.{number}", self.sched.now)
        for one in (*others, life) if others else ():
            one.is_troubled = True  # which of them registers last is open
        self.lives.append(life)
        self.note(life, "starts")
        self._open(life)

    def _open(self, life: RankProcess) -> None:
        """Connect to the store, which is an operation like any other."""
        if not life.is_up:
            return
        if life.is_paused:
            life.held.append(lambda: self._open(life))
            return
        life.driver = MemoryDriver(self.server, sleep=lambda seconds: None, fault=lambda call: life.fault)
        life.fault = self._draw_fault(life)
        try:
            # No timeout here: the steps have their own, and an operation takes no simulated time.
            nonce = f"{self.history}/{life.incarnation}"
            life.client = StoreClient(life.driver, prefix=PREFIX, timeout_s=0.001, now_ns=lambda: 0, nonce=nonce)
        except StoreUnreachable:
            self.sched.after(50 * MS, self._open, life)
            return
        except Crashed:
            self._die(life, "dies while it connects")
            return
        life.history = self.history
        life.agreeing = self._agreeing(self, life)
        life.fibers = [Fiber(self._program(life, life.agreeing)), Fiber(life.agreeing.send_heartbeats())]
        for fiber in life.fibers:
            self._send(life, fiber, None)

    def _program(self, life: RankProcess, agreeing: Agreeing) -> Course:
        """What a training process does."""
        draw = Random(f"{self.schedule.seed}/{life.incarnation}")
        while True:
            try:
                begun = yield from agreeing.next(self.now_ns(life), 20)
            except (DeadlineExceeded, StoreUnreachable) as error:
                self.note(life, f"tries again: {error}")
                yield Pause(0.1)
                continue
            self.note(life, f"begins {begun.iteration} of {list(begun.members)}{', won' if begun.is_winner else ''}")
            is_on_its_way = self.sched.now - self._back_ns < 700 * MS
            self.checks.begun(life, begun, self.history, is_on_its_way=is_on_its_way)
            if life.is_leaving and isinstance(agreeing, IterationMachine):
                try:
                    yield from agreeing.leave(self.now_ns(life), 5)
                except (DeadlineExceeded, StoreUnreachable) as error:
                    self.note(life, f"leaves without a message: {error}")
                self._end(life, "leaves")
                self._restart_later(life)
                return
            is_slow = not self.is_quiet and draw.random() < self.schedule.slow
            yield Pause(draw.uniform(6, 9) if is_slow else draw.choice((0.0, draw.uniform(0, 0.2), draw.uniform(0, 1))))
            life.finished = begun.iteration

    def _die(self, life: RankProcess, how: str) -> None:
        self._end(life, how)
        self._restart_later(life)

    def _restart_later(self, life: RankProcess) -> None:
        is_fast = self.rng.random() < 0.6
        delay_ms = self.rng.randint(1, 100) if is_fast else self.rng.randint(100, 9_000)
        self.sched.after(delay_ms * MS, self._restart, life)

    def _restart(self, life: RankProcess) -> None:
        """What starts a rank's processes starts one when there is none."""
        stays = self.is_quiet and life.rank in self.schedule.stay_dead
        if not self._up(life.rank) and not stays:
            self._start(life.rank)

    def _end(self, life: RankProcess, how: str) -> None:
        self.note(life, how)
        life.is_up, life.is_troubled = False, True
        life.held.clear()
        for fiber in life.fibers:
            fiber.close()

    # Steps

    def _send(self, life: RankProcess, fiber: Fiber, outcome: StoreOutcome) -> None:
        """Hand an answer to a sequence of steps, and see to what it asks for next."""
        if not life.is_up:
            return
        if life.is_paused:
            life.held.append(lambda: self._send(life, fiber, outcome))
            return
        is_program = fiber is life.fibers[0]
        try:
            operation = fiber.send(StoreReply(self.now_ns(life), outcome))
        except StopIteration:
            return
        except Superseded as error:
            self.note(life, str(error))
            self.checks.superseded(life)
            if is_program:
                self._die(life, "ends")
            return
        except StoreWentBack as error:
            self.note(life, str(error))
            self.checks.refused(life, self.history)
            life.is_troubled = True  # it shows no life any more, and the others may notice before its program does
            if is_program:
                self._die(life, "ends")
            return
        if life.is_up:
            self._ask(life, fiber, operation)

    def _ask(self, life: RankProcess, fiber: Fiber, operation: Operation) -> None:
        match operation:
            case Pause(seconds):
                self.sched.after(round(seconds * NS), self._send, life, fiber, None)
            case WaitFor(key, seen, timeout_s):
                self._park(life, fiber, key, seen, timeout_s)
            case GetMany(keys) if keys:
                self._read_in_parts(life, fiber, keys, {})
            case _:
                self._request(life, operation, lambda outcome: self._send(life, fiber, outcome))

    def _read_in_parts(self, life: RankProcess, fiber: Fiber, keys: tuple[str, ...], found: dict[str, Entry]) -> None:
        """Read many keys at several instants, because no store promises that it is a snapshot."""
        count = self.rng.randint(1, len(keys))

        def proceed(outcome: StoreOutcome) -> None:
            if isinstance(outcome, dict):
                found.update(outcome)
                if keys[count:] and life.is_up:
                    self._read_in_parts(life, fiber, keys[count:], found)
                    return
                outcome = found
            self._send(life, fiber, outcome)

        self._request(life, GetMany(keys[:count]), proceed)

    def _request(self, life: RankProcess, operation: Operation, reply: Callable[[StoreOutcome], None]) -> None:
        self.sched.after(self._delay_ns(), self._perform, life, operation, reply)

    def _park(self, life: RankProcess, fiber: Fiber, key: str, seen: int, timeout_s: float) -> None:
        """Wait for a change of a key, then read it."""
        is_woken = False

        def wake() -> None:
            nonlocal is_woken
            if not is_woken:
                is_woken = True
                self._parked.pop(life.incarnation, None)
                self._request(life, Get(key), lambda outcome: self._send(life, fiber, outcome))

        full = f"{PREFIX}/{key}"
        if version_of(self.server.entries.get(full)) != seen:
            wake()
            return
        self._waiting.append((full, seen, wake))
        self.sched.after(round(timeout_s * NS), wake)
        if full == RECORD and fiber is life.fibers[0]:
            self._parked[life.incarnation] = seen
            if self.is_quiet and self.checks.iteration > self._last_faulty:
                self.checks.parked(self.server, self._parked)

    def _perform(self, life: RankProcess, operation: Operation, reply: Callable[[StoreOutcome], None]) -> None:
        """The operation reaches the store, unless something happens to it."""
        if not life.is_up and self.rng.random() < 0.5:
            return  # it was still on its way out when the process died
        life.fault = self._draw_fault(life) if life.is_up else "lost reply"
        self._expire()
        outcome: StoreOutcome
        try:
            outcome = self._carried_out(life, operation)
        except Crashed as crash:
            self._die(life, f"dies at operation {self.operations[life.rank]}, {crash.args[0]} {crash.args[1]}")
            outcome = None
        except RingfoldError as error:
            outcome = error
        if life.fault == "late" and life.driver is not None:
            self.sched.after(self.rng.randrange(3_000 * MS), self._deliver_late, life.driver)
        self._noticed()
        self.sched.after(self._delay_ns(), reply, outcome)

    def _carried_out(self, life: RankProcess, operation: Operation) -> StoreOutcome:
        client = life.client
        assert client is not None
        match operation:
            case Get(key):
                return client.get(key)
            case GetMany(keys):
                return client.get_many(keys)
            case ListKeys(prefix):
                return client.list(prefix)
            case CompareAndSet(key, expected, value):
                return client.compare_and_set(key, expected, value)
            case Increment(key, by):
                return client.increment(key, by)
            case Delete(key, expected):
                client.delete(key, expected)
                return None
            case Heartbeat(key, value, ttl_s):
                if self.schedule.has_leases:
                    self._leases[f"{PREFIX}/{key}"] = self.sched.now + round(ttl_s * NS)
                client.set(key, value)
                return None
            case WaitFor() | Pause():
                raise AssertionError("no operation of the store")
            case _:
                assert_never(operation)

    def _deliver_late(self, driver: MemoryDriver) -> None:
        driver.deliver_late()
        self._noticed()

    def _noticed(self) -> None:
        """Check the record if it has changed, and wake the waiters."""
        self.checks.look(self.server, RECORD, self.history)
        for waiting in [one for one in self._waiting if version_of(self.server.entries.get(one[0])) != one[1]]:
            self._waiting.remove(waiting)
            waiting[2]()

    def _expire(self) -> None:
        for key in [key for key, at in self._leases.items() if at <= self.sched.now]:
            del self._leases[key]
            self.server.entries.pop(key, None)

    def _draw_fault(self, life: RankProcess) -> Fault | None:
        number = self.operations[life.rank] = self.operations.get(life.rank, 0) + 1
        if life.is_cut or self.is_down:
            return "unreachable"
        if self.leaderless:
            unanswered: tuple[Fault, ...] = ("unreachable", "lost reply", "late")
            return self.rng.choice(unanswered)
        crash = self.schedule.crash_at
        if crash is not None and crash[:2] == (life.rank, number):
            return crash[2]
        if self.is_quiet or self.rng.random() >= self.schedule.losses:
            return None
        kinds: tuple[Fault, ...] = ("unreachable", "lost reply", "lost reply", "late", "crash", "crash after")
        return self.rng.choice(kinds)

    def _delay_ns(self) -> int:
        return self.rng.randrange(300 * MS) if self.rng.random() < 0.02 else self.rng.randrange(50_000, 5 * MS)

    def _failure(self, text: str) -> SimulationFailure:
        return IterationFailure(self.schedule.seed, text, self.sched.trace.tail())


# Checks


if TYPE_CHECKING:
    from ringfold.testing.iterating import RankProcess


class Broken(AssertionError):
    """A promise was broken; the text says which."""


class Checks:
    """The history of one store, as an outsider sees it."""

    def __init__(self, rules: Rules, lives: Sequence["RankProcess"]) -> None:
        self._rules, self._lives = rules, lives
        self._winners: dict[tuple[int, int], str] = {}
        self._members: dict[tuple[int, int], dict[int, str]] = {}
        self._ousted: set[str] = set()
        self._record: Record | None = None
        self._version = 0

    # What lives are handed

    def begun(self, life: "RankProcess", begun: BegunIteration, history: int, *, is_on_its_way: bool) -> None:
        """A life is handed an iteration; perhaps the answer was on its way when the store went back."""
        number, last = begun.iteration, life.log[-1] if life.log else None
        if not self._may_go_on(life, history):
            if not is_on_its_way or (life.history, number) not in self._members:
                raise Broken(f"{life} goes on with {number} although the store went back")
            history = life.history
        life.history = history
        if last is not None and number <= last:
            raise Broken(f"{life} is handed {number} after {last}: a repeated iteration")
        if last is not None and number > last + 1:
            self._skipped(life, range(last + 1, number), history)
        if begun.is_winner:
            other = self._winners.setdefault((history, number), life.incarnation)
            if other != life.incarnation:
                raise Broken(f"iteration {number} has two winners: {other} and {life.incarnation}")
        for one in self._lives:
            is_healthy = one.is_up and not one.is_troubled and one.history == history
            if is_healthy and one.log and one.log[-1] == number - 1 > one.finished:
                raise Broken(f"{life} begins {number}, and {one} has not finished {number - 1}")
        life.log.append(number)
        agreed = self._members.get((history, number))
        if agreed is not None and list(agreed) != list(begun.members):
            raise Broken(f"{life} believes that {begun.members} are in {number}; agreed are {list(agreed)}")

    def _skipped(self, life: "RankProcess", numbers: range, history: int) -> None:
        if not life.is_troubled:
            raise Broken(f"{life} lost iteration {numbers[0]}, and nothing ever happened to it")
        for number in numbers:
            # It may have become a member without noticing, and been given up then: the next one began without it.
            both = (self._members.get((history, one), {}) for one in (number, number + 1))
            if all(members.get(life.rank) == life.incarnation for members in both):
                raise Broken(f"{life} lost iteration {number}, in which the others waited for it")

    def superseded(self, life: "RankProcess") -> None:
        """A life reports that another one has registered for its rank."""
        if not any(one.rank == life.rank and one is not life for one in self._lives):
            raise Broken(f"{life} believes that it was superseded, and there is no other one")

    def refused(self, life: "RankProcess", history: int) -> None:
        """A life reports that the store went back."""
        if life.history == history:
            raise Broken(f"{life} believes that the store went back, and it did not")

    def parked(self, server: MemoryServer, seen: Mapping[str, int]) -> None:
        """These incarnations wait for a record of another version than they have seen."""
        record = self._record
        if record is None:
            return
        present = {rank: one.incarnation for rank, one in record.roster.items() if not one.gone}
        if any(seen.get(one) != self._version for one in present.values()):
            return
        arrivals = {rank: server.entries.get(f"{PREFIX}/{_KEYS.arrived(rank, one)}") for rank, one in present.items()}
        arrived = [rank for rank, entry in arrivals.items() if finished_iteration(entry) >= record.iteration]
        if isinstance(decide(record, arrived, ()), Advance):
            raise Broken(f"all ranks have arrived at {record.iteration}, and all of them wait")

    # The record

    @property
    def iteration(self) -> int:
        return -1 if self._record is None else self._record.iteration

    def _may_go_on(self, life: "RankProcess", history: int) -> bool:
        """Whether a life knows this store, or an earlier one of which it has seen nothing that was taken back."""
        if life.history == history:
            return True
        return bool(life.log) and self._members.get((history, life.log[-1])) is self._members.get(
            (life.history, life.log[-1]), {}
        )

    def new_history(self, server: MemoryServer, key: str, history: int) -> None:
        """The store went back: what is in it now is where it begins."""
        entry = server.entries.get(key)
        self._ousted.clear()
        self._version = version_of(entry)
        self._record = None if entry is None else decode("memory:", entry.value)
        kept = -1 if self._record is None else self._record.iteration
        past = [(number, members) for (one, number), members in self._members.items() if one == history - 1]
        self._members.update({(history, number): members for number, members in past if number <= kept})

    def look(self, server: MemoryServer, key: str, history: int) -> None:
        """Check the record if it was changed."""
        entry = server.entries.get(key)
        if version_of(entry) == self._version:
            return
        if entry is None:
            raise Broken("the record was removed")
        record, before = decode("memory:", entry.value), self._record or Record(self._rules)
        self._version, self._record = entry.version, record
        if record.version != before.version + 1:
            raise Broken(f"the record's version went from {before.version} to {record.version}")
        if record.fence < before.fence:
            raise Broken(f"the fence went from {before.fence} to {record.fence}")
        self._check_registrations(before, record)
        if record.iteration == before.iteration:
            return
        if record.iteration != before.iteration + 1:
            raise Broken(f"the iteration went from {before.iteration} to {record.iteration}")
        self._members[history, record.iteration] = record.members
        self._check_advance(before, record)

    def _check_registrations(self, before: Record, record: Record) -> None:
        for rank, entry in before.roster.items():
            now = record.roster.get(rank)
            if now is None:
                raise Broken(f"rank {rank} lost its registration")
            if now.incarnation != entry.incarnation:
                self._ousted.add(entry.incarnation)
                if now.fence <= entry.fence:
                    raise Broken(f"rank {rank} was taken over with fence {now.fence}, after {entry.fence}")
        for entry in record.roster.values():
            if entry.incarnation in self._ousted:
                raise Broken(f"{entry.incarnation} is registered again although it was superseded")

    def _check_advance(self, before: Record, record: Record) -> None:
        lives = {life.incarnation: life for life in self._lives}
        if len(record.members) < self._rules.min_ranks:
            raise Broken(f"iteration {record.iteration} began with {len(record.members)} ranks")
        present = [rank for rank in before.members if not before.roster[rank].gone]
        if self._rules.quorum == "majority":
            voters = present or range(self._rules.world)
            if 2 * sum(rank in record.members for rank in voters) <= len(voters):
                raise Broken(f"iteration {record.iteration} began without a majority of {list(voters)}")
        for rank, incarnation in record.members.items():
            life = lives[incarnation]
            if before.members.get(rank) == incarnation and life.finished < before.iteration:
                raise Broken(f"{life} counts as arrived at {before.iteration}, which it has not finished")
        for rank in present:
            life = lives[before.members[rank]]
            if rank not in record.members and not life.is_troubled:
                raise Broken(f"{life} was left behind in {before.iteration}, and nothing ever happened to it")

    def at_end(self) -> None:
        """The logs of all ranks once more, as a whole."""
        for life in self._lives:
            if life.log != sorted(set(life.log)):
                raise Broken(f"{life} was handed {life.log}")
