"""The global iteration, simulated: ranks with the production steps over a store in memory, and everything goes wrong.

A *life* is one process of one rank. It runs two sequences of steps, as the real one has two threads: its program (next
iteration, train, next, ...) and its pulse. Every operation they yield travels to the store, is carried out there at one
instant, and its answer travels back. At each of them the life may die, before it is carried out or after; the answer
may be lost; the operation may be late. Besides, lives are paused, cut off, doubled, restarted at once or much later,
their clocks jump by an hour, and the store stands still, is emptied or put back.

What is checked, for any protocol, by what lives really did:
- nobody wins an iteration that somebody else has won;
- what a life is handed grows by one; it may skip only what it had no part in;
- nobody begins n while somebody who is healthy, and began n - 1, has not finished it;
- nobody goes on with a store that is not the one it knew;
- once the faults have stopped, everybody goes on.
And for the record, at every change: its versions, fences and members, the quorum, and that nobody came back who was
superseded.
"""

from collections.abc import Callable
from random import Random
from typing import assert_never

from ringfold.errors import DeadlineExceeded, RingfoldError, StoreUnreachable, StoreWentBack, Superseded
from ringfold.iteration.machine import Machine
from ringfold.iteration.model import Self
from ringfold.iteration.operations import (
    NS,
    Answer,
    Beat,
    CompareAndSet,
    Delete,
    Get,
    ListKeys,
    Operation,
    Outcome,
    Pause,
    WaitFor,
)
from ringfold.store.base import version_of
from ringfold.store.client import StoreClient
from ringfold.store.memory import Crashed, Fault, MemoryDriver, MemoryServer, Snapshot
from ringfold.testing.iterating_checks import Broken, Checks
from ringfold.testing.iterating_parts import (
    PREFIX,
    SETTLED,
    TIMING,
    Agreeing,
    Course,
    Fiber,
    Life,
    Result,
    Story,
    Trouble,
)
from ringfold.testing.scheduler import MS, Scheduler, SimulationFailure, Trace

RECORD = f"{PREFIX}/iteration/record"


class StoryFailure(SimulationFailure):
    """A promise of the global iteration was broken."""

    def __str__(self) -> str:
        lines = [f"seed {self.seed}: {self.text}"]
        lines.append(f"replay with: python -m ringfold.testing --iterations --seed {self.seed} --trace")
        return "\n".join([*lines, f"the last {len(self.tail)} events:", *self.tail])


AgreeingOf = Callable[["Simulated", Life], Agreeing]


def production(sim: "Simulated", life: Life) -> Agreeing:
    return Machine(sim.self_of(life), sim.story.rules, TIMING)


class Simulated:
    """A store and its ranks, driven by one story."""

    def __init__(
        self, story: Story, agreeing: AgreeingOf = production, echo: Callable[[str], None] | None = None
    ) -> None:
        self.story, self._agreeing = story, agreeing
        self.sched = Scheduler(story.seed, Trace(echo=echo))
        self.rng = Random(f"{story.seed}/iterating")
        self.server = MemoryServer()
        self.lives: list[Life] = []
        self.history = 0
        self._back_ns = -(10**12)
        self.is_down = False
        self.is_quiet = False
        self.operations: dict[int, int] = {}
        self.checks = Checks(story.rules, self.lives)
        self._leases: dict[str, int] = {}
        self._waiting: list[tuple[str, int, Callable[[], None]]] = []
        self._snapshot: Snapshot | None = None

    # The course of a story

    def run(self) -> Result:
        try:
            self._run()
        except AssertionError as broken:
            raise self._failure(str(broken)) from broken
        return Result(
            max((life.log[-1] for life in self.lives if life.log), default=-1),
            len(self.lives),
            sum(self.operations.values()),
            self.sched.now / MS,
            tuple(trouble.kind for trouble in self.story.troubles),
        )

    def _run(self) -> None:
        story = self.story
        for rank in range(story.rules.world):
            self.sched.after(self.rng.randrange(400 * MS), self._start, rank)
        for trouble in story.troubles:
            self.sched.at(trouble.at_ms * MS, self._strike, trouble)
        self.sched.run_until(lambda: False, story.quiet_ms * MS)
        self._heal()
        before = {life.incarnation: len(life.log) for life in self.lives}
        limit_ns = self.sched.now + 150_000 * MS
        if not self.sched.run_until(lambda: self._is_settled(before), limit_ns):
            raise Broken(f"nobody goes on: {self._stuck()}")
        self.checks.at_end()

    def _is_settled(self, before: dict[str, int]) -> bool:
        """Whether every rank that is not dead for good was handed some iterations since then, in one life."""
        settled = {
            life.rank
            for life in self.lives
            if life.is_up and len(life.log) >= before.get(life.incarnation, 0) + SETTLED
        }
        return len(settled.union(self.story.stay_dead)) == self.story.rules.world

    def _heal(self) -> None:
        """The faults stop: everything is there again."""
        self.is_quiet, self.is_down = True, False
        for life in list(self.lives):
            life.is_cut = False
            if life.is_paused:
                self._resume(life)
        for life in list(self.lives):
            if life.rank in self.story.stay_dead and life.is_up:
                self._end(life, "stays dead")
        for rank in range(self.story.rules.world):
            if not self._up(rank) and rank not in self.story.stay_dead:
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
                if self.story.has_leases:
                    for life in self.lives:
                        life.is_troubled = True  # a lease goes on ending while nobody can renew it
                return
            case "wipe" | "restore":
                self._go_back(trouble)
                return
        for rank in trouble.ranks:
            for life in self._up(rank)[-1:]:
                self._strike_one(trouble, life)

    def _strike_one(self, trouble: Trouble, life: Life) -> None:
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

    def _uncut(self, life: Life) -> None:
        life.is_cut = False

    def _resume(self, life: Life) -> None:
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
            if self._snapshot.stamp == self.server.stamp:
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

    def self_of(self, life: Life) -> Self:
        return Self(
            rank=life.rank,
            incarnation=life.incarnation,
            can_list=self.story.can_list,
            has_leases=self.story.has_leases,
        )

    def now_ns(self, life: Life) -> int:
        return self.sched.now + life.jump_ns

    def note(self, life: Life, what: str) -> None:
        self.sched.trace.note(self.sched.now, str(life), what)

    def _up(self, rank: int) -> list[Life]:
        return [life for life in self.lives if life.rank == rank and life.is_up]

    def _start(self, rank: int) -> None:
        others = self._up(rank)
        number = sum(life.rank == rank for life in self.lives)
        life = Life(rank, f"{rank}.{number}", self.sched.now)
        for one in (*others, life) if others else ():
            one.is_troubled = True  # which of them registers last is open
        self.lives.append(life)
        self.note(life, "starts")
        self._open(life)

    def _open(self, life: Life) -> None:
        """Connect to the store, which is an operation like any other."""
        if not life.is_up:
            return
        if life.is_paused:
            life.held.append(lambda: self._open(life))
            return
        life.driver = MemoryDriver(self.server, sleep=lambda seconds: None, fault=lambda call: life.fault)
        life.fault = self._draw_fault(life)
        try:
            # No patience: the steps have their own, and the time of an operation stands still.
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
        life.fibers = [Fiber(self._program(life, life.agreeing)), Fiber(life.agreeing.pulse())]
        for fiber in life.fibers:
            self._send(life, fiber, None)

    def _program(self, life: Life, agreeing: Agreeing) -> Course:
        """What a training process does."""
        draw = Random(f"{self.story.seed}/{life.incarnation}")
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
            if life.is_leaving and isinstance(agreeing, Machine):
                try:
                    yield from agreeing.leave(self.now_ns(life), 5)
                except (DeadlineExceeded, StoreUnreachable) as error:
                    self.note(life, f"leaves without a word: {error}")
                self._end(life, "leaves")
                self._restart_later(life)
                return
            is_slow = not self.is_quiet and draw.random() < self.story.slow
            yield Pause(draw.uniform(6, 9) if is_slow else draw.choice((0.0, draw.uniform(0, 0.2), draw.uniform(0, 1))))
            life.finished = begun.iteration

    def _die(self, life: Life, how: str) -> None:
        self._end(life, how)
        self._restart_later(life)

    def _restart_later(self, life: Life) -> None:
        is_fast = self.rng.random() < 0.6
        delay_ms = self.rng.randint(1, 100) if is_fast else self.rng.randint(100, 9_000)
        self.sched.after(delay_ms * MS, self._restart, life)

    def _restart(self, life: Life) -> None:
        """What starts a rank's processes starts one when there is none."""
        stays = self.is_quiet and life.rank in self.story.stay_dead
        if not self._up(life.rank) and not stays:
            self._start(life.rank)

    def _end(self, life: Life, how: str) -> None:
        self.note(life, how)
        life.is_up, life.is_troubled = False, True
        life.held.clear()
        for fiber in life.fibers:
            fiber.close()

    # Steps

    def _send(self, life: Life, fiber: Fiber, outcome: Outcome) -> None:
        """Hand an answer to a sequence of steps, and see to what it asks for next."""
        if not life.is_up:
            return
        if life.is_paused:
            life.held.append(lambda: self._send(life, fiber, outcome))
            return
        is_program = fiber is life.fibers[0]
        try:
            operation = fiber.send(Answer(self.now_ns(life), outcome))
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

    def _ask(self, life: Life, fiber: Fiber, operation: Operation) -> None:
        match operation:
            case Pause(seconds):
                self.sched.after(round(seconds * NS), self._send, life, fiber, None)
            case WaitFor(key, seen, timeout_s):
                self._park(life, fiber, key, seen, timeout_s)
            case _:
                self.sched.after(self._delay_ns(), self._perform, life, fiber, operation)

    def _park(self, life: Life, fiber: Fiber, key: str, seen: int, timeout_s: float) -> None:
        """Wait for a change of a key, then read it."""
        is_woken = False

        def wake() -> None:
            nonlocal is_woken
            if not is_woken:
                is_woken = True
                self.sched.after(self._delay_ns(), self._perform, life, fiber, Get(key))

        full = f"{PREFIX}/{key}"
        if version_of(self.server.entries.get(full)) != seen:
            wake()
            return
        self._waiting.append((full, seen, wake))
        self.sched.after(round(timeout_s * NS), wake)

    def _perform(self, life: Life, fiber: Fiber, operation: Operation) -> None:
        """The operation reaches the store, unless something happens to it."""
        if not life.is_up and self.rng.random() < 0.5:
            return  # it was still on its way out when the process died
        life.fault = self._draw_fault(life) if life.is_up else "lost reply"
        self._expire()
        outcome: Outcome
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
        self.sched.after(self._delay_ns(), self._send, life, fiber, outcome)

    def _carried_out(self, life: Life, operation: Operation) -> Outcome:
        client = life.client
        assert client is not None
        match operation:
            case Get(key):
                return client.get(key)
            case ListKeys(prefix):
                return client.list(prefix)
            case CompareAndSet(key, expected, value):
                return client.compare_and_set(key, expected, value)
            case Delete(key, expected):
                client.delete(key, expected)
                return None
            case Beat(key, value, ttl_s):
                if self.story.has_leases:
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
        """Check the record if it has changed, and wake those who wait for it."""
        self.checks.look(self.server, RECORD, self.history)
        for waiting in [one for one in self._waiting if version_of(self.server.entries.get(one[0])) != one[1]]:
            self._waiting.remove(waiting)
            waiting[2]()

    def _expire(self) -> None:
        for key in [key for key, at in self._leases.items() if at <= self.sched.now]:
            del self._leases[key]
            self.server.entries.pop(key, None)

    def _draw_fault(self, life: Life) -> Fault | None:
        number = self.operations[life.rank] = self.operations.get(life.rank, 0) + 1
        if life.is_cut or self.is_down:
            return "unreachable"
        crash = self.story.crash_at
        if crash is not None and crash[:2] == (life.rank, number):
            return crash[2]
        if self.is_quiet or self.rng.random() >= self.story.losses:
            return None
        kinds: tuple[Fault, ...] = ("unreachable", "lost reply", "lost reply", "late", "crash", "crash after")
        return self.rng.choice(kinds)

    def _delay_ns(self) -> int:
        return self.rng.randrange(300 * MS) if self.rng.random() < 0.02 else self.rng.randrange(50_000, 5 * MS)

    def _failure(self, text: str) -> SimulationFailure:
        return StoryFailure(self.story.seed, text, self.sched.trace.tail())
