"""The parent of the soak of iterations: ranks and their stores, killed, frozen and started again without a pause.

Each kind of store has a *world* of its own: so many ranks, that agree through it. Rank 0 is never touched, and rank 1
is only frozen now and then, so that growth shows in them. All others are killed and come back at once or late, are
frozen, are doubled (a second process takes over the rank while the first one lives), or leave and come back. Redis and
etcd are killed, too, and started again on what they kept, or frozen for a while.

No hang. A process that is neither frozen nor dead reports an iteration within `HANG_S`. That is much longer than a
store is away and a silent rank is waited for.
"""

import os
import signal
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import msgspec
import numpy as np

from ringfold.runtime.clock import monotonic_ns
from ringfold.store import open_store
from ringfold.tools.cluster import LocalCluster, Message, ProcessFailed
from ringfold.tools.soak.checks import Hang, ResourceSample, SoakCheck, growth, sample, shown
from ringfold.tools.soak.faults import FaultSchedule, S, SoakFault
from ringfold.tools.soak.rank import IterationEntry
from ringfold.tools.stores import StoreServer

VETERANS = 2
HANG_S = 60.0
SAMPLE_S = 1.0
END_S = 30.0
MAX_AWAY_S = 8.0
"""How long a rank is dead or frozen at most: twice the time after which it is inactive."""


@dataclass(slots=True)
class RankProcess:
    """A process of a rank, as far as it has reported."""

    name: str
    rank: int
    deadline_ns: int
    """By when it must report again."""
    number: int = -1
    members: int = 0
    is_frozen: bool = False
    is_ending: bool = False
    """It was sent a stop, or its rank was taken over."""


@dataclass(slots=True)
class StoreWorld:
    """A store, and the ranks that agree through it."""

    server: StoreServer
    folder: Path
    is_up: bool = True
    is_frozen: bool = False
    lives: dict[int, RankProcess] = field(default_factory=dict)
    """The newest process of each rank that has one."""
    started: Counter[int] = field(default_factory=Counter)

    @property
    def kind(self) -> str:
        return self.server.kind

    @property
    def number(self) -> int:
        """The highest iteration that was reported."""
        return max((life.number for life in self.lives.values()), default=-1)

    def log(self, rank: int) -> Path:
        return self.folder / f"{self.kind}-{rank}"

    def entries(self, rank: int) -> list[IterationEntry]:
        """All that any process of a rank was handed."""
        lines = self.log(rank).read_bytes().splitlines() if self.log(rank).exists() else []
        return [msgspec.json.decode(line, type=IterationEntry) for line in lines]


@dataclass(slots=True)
class IterationSoakOutcome:
    """What came out of it, for `checks` to judge."""

    seed: int
    faults: dict[str, int] = field(default_factory=dict)
    logs: dict[str, dict[int, list[IterationEntry]]] = field(default_factory=dict)
    """Per kind of store and rank."""
    agreed: dict[str, int] = field(default_factory=dict)
    """The iteration in each store's record at the end."""
    keys: dict[str, list[str]] = field(default_factory=dict)
    """What is in each store at the end, below the record."""
    samples: dict[str, list[ResourceSample]] = field(default_factory=dict)
    longest_silence_s: float = 0.0
    left_behind: list[str] = field(default_factory=list)


class IterationSoak:
    """Disturbs ranks and stores for a while. `faults` and `worlds` can be shown meanwhile."""

    def __init__(self, cluster: LocalCluster, kinds: Sequence[str], ranks: int, every_s: float, seed: int) -> None:
        self.pids: set[int] = set()
        self._cluster, self._ranks, self._every_s = cluster, ranks, every_s
        self._random = np.random.default_rng(seed)
        self._scratch = cluster.directory / "scratch"  # whatever a child puts there must be gone at the end
        self._scratch.mkdir()
        self.worlds = [StoreWorld(StoreServer(cluster, kind, kind), cluster.directory) for kind in kinds]
        self._lives: dict[str, tuple[StoreWorld, RankProcess]] = {}
        self._outcome = IterationSoakOutcome(seed)
        self.faults = FaultSchedule(
            [
                SoakFault("rank killed", 0.35, self._kill_rank),
                SoakFault("rank frozen", 0.2, self._freeze_rank),
                SoakFault("rank doubled", 0.1, self._double_rank),
                SoakFault("rank left", 0.1, self._let_rank_leave),
                SoakFault("store killed", 0.15, self._kill_store),
                SoakFault("store frozen", 0.1, self._freeze_store),
            ],
            self._random,
        )

    def direct(self, minutes: float, on_change: Callable[[float], None] = lambda seconds: None) -> IterationSoakOutcome:
        """Disturb for so long, then let all meet and end. `on_change` gets the seconds that have passed."""
        for world in self.worlds:
            world.server.start()
        for world in self.worlds:
            world.server.wait()
            self._note_pid(world.server.name)
            for rank in range(self._ranks):
                self._start(world, rank)
        self._watch_until(self._are_together)
        began_ns = next_fault_ns = next_sample_ns = monotonic_ns()
        while (now_ns := monotonic_ns()) < began_ns + int(minutes * 60 * S):
            if now_ns >= next_sample_ns:
                self._sample()
                next_sample_ns = now_ns + int(SAMPLE_S * S)
            if now_ns >= next_fault_ns:
                self.faults.inject(now_ns)
                next_fault_ns = now_ns + int(self._every_s * S)
            self._watch(0.1)
            on_change((now_ns - began_ns) / S)
        self._watch_until(lambda: not self.faults.run_due(monotonic_ns()))
        self._watch_until(self._are_together)
        self._end()
        return self._outcome

    # Disturbances

    def _any_world(self, fits: Callable[[StoreWorld], bool] = lambda world: True) -> StoreWorld | None:
        fitting = [world for world in self.worlds if fits(world)]
        return fitting[int(self._random.integers(len(fitting)))] if fitting else None

    def _any_life(self, *, first: int = VETERANS) -> tuple[StoreWorld, RankProcess] | None:
        """A process that iterates, of a rank from `first` on, in a world of which most are there."""
        world = self._any_world(lambda world: len(world.lives) > self._ranks // 2)
        if world is None:
            return None
        found = [life for rank, life in world.lives.items() if rank >= first and not life.is_frozen and life.members]
        return (world, found[int(self._random.integers(len(found)))]) if found else None

    def _kill_rank(self, now_ns: int) -> bool:
        if (found := self._any_life()) is None:
            return False
        world, life = found
        self._cluster.kill(life.name)
        self._cluster.wait_exit(life.name, 10)
        self._forget(life.name)
        del world.lives[life.rank]
        # At once, before it is missed; or after it was declared dead.
        self.faults.later(now_ns + self.faults.seconds(0.05, MAX_AWAY_S), lambda: self._start(world, life.rank))
        return True

    def _freeze_rank(self, now_ns: int) -> bool:
        if (found := self._any_life(first=1)) is None:
            return False
        life = found[1]
        self._cluster.freeze(life.name)
        life.is_frozen = True
        self.faults.later(now_ns + self.faults.seconds(0.1, MAX_AWAY_S), lambda: self._thaw(life))
        return True

    def _thaw(self, life: RankProcess) -> None:
        self._cluster.thaw(life.name)
        if life.is_ending:
            self._cluster.allow_exit(life.name)
        life.is_frozen, life.deadline_ns = False, monotonic_ns() + int(HANG_S * S)

    def _double_rank(self, now_ns: int) -> bool:
        """A second process of a rank; the first may be frozen, and wakes up later."""
        if (found := self._any_life()) is None:
            return False
        world, life = found
        if self._random.random() < 0.5:
            self._cluster.freeze(life.name)
            life.is_frozen = True
            self.faults.later(now_ns + self.faults.seconds(0.5, MAX_AWAY_S), lambda: self._thaw(life))
        self._let_end(world, life)
        self._start(world, life.rank)
        return True

    def _let_rank_leave(self, now_ns: int) -> bool:
        if (found := self._any_life()) is None:
            return False
        world, life = found
        self._cluster.send([life.name], {"what": "stop"})
        self._let_end(world, life)
        self.faults.later(now_ns + self.faults.seconds(0.05, MAX_AWAY_S), lambda: self._start(world, life.rank))
        return True

    def _let_end(self, world: StoreWorld, life: RankProcess) -> None:
        self._cluster.allow_exit(life.name)
        life.is_ending, life.deadline_ns = True, monotonic_ns() + int(HANG_S * S)
        del world.lives[life.rank]

    def _kill_store(self, now_ns: int) -> bool:
        world = self._any_world(lambda world: world.server.name is not None and world.is_up and not world.is_frozen)
        if world is None:
            return False
        world.server.kill()
        world.is_up = False

        def start() -> None:
            world.server.start()
            self._note_pid(world.server.name)
            world.is_up = True

        self.faults.later(now_ns + self.faults.seconds(0.02, 2), start)
        return True

    def _freeze_store(self, now_ns: int) -> bool:
        world = self._any_world(lambda world: world.server.name is not None and world.is_up and not world.is_frozen)
        if world is None:
            return False
        name = world.server.name
        assert name is not None
        self._cluster.freeze(name)
        world.is_frozen = True

        def thaw() -> None:
            self._cluster.thaw(name)
            world.is_frozen = False

        self.faults.later(now_ns + self.faults.seconds(0.1, 3), thaw)
        return True

    def _start(self, world: StoreWorld, rank: int) -> None:
        world.started[rank] += 1
        name = f"{world.kind}-rank-{rank}.{world.started[rank]}"
        arguments = (world.server.url, rank, self._ranks, world.log(rank))
        self._cluster.start_worker(name, "ringfold.tools.soak.rank", *arguments, env={"TMPDIR": str(self._scratch)})
        self._note_pid(name)
        life = world.lives[rank] = RankProcess(name, rank, monotonic_ns() + int(HANG_S * S))
        self._lives[name] = (world, life)

    def _note_pid(self, name: str | None) -> None:
        if name is not None:
            self.pids.add(self._cluster.pid(name))

    def _forget(self, name: str) -> None:
        del self._lives[name]

    # Watching

    def _watch(self, seconds: float) -> None:
        """Receive reports for a while; do what is due; raise if a process hangs."""
        end_ns = monotonic_ns() + int(seconds * S)
        while (left_ns := end_ns - monotonic_ns()) > 0:
            if (got := self._cluster.receive(left_ns / S)) is not None:
                self._note(*got)
        now_ns = monotonic_ns()
        self.faults.run_due(now_ns)
        for world, life in list(self._lives.values()):
            if not life.is_frozen and now_ns > life.deadline_ns:
                raise self._hang(world, life)

    def _note(self, name: str, message: Message) -> None:
        if name not in self._lives:
            return
        if "error" in message:
            raise ProcessFailed(name, str(message["error"]), self._cluster.log_tail(name))
        _, life = self._lives[name]
        now_ns = monotonic_ns()
        match message["what"]:
            case "step":
                if life.members and not life.is_frozen:
                    silence_s = HANG_S - (life.deadline_ns - now_ns) / S
                    self._outcome.longest_silence_s = max(self._outcome.longest_silence_s, silence_s)
                life.number, life.members = message["number"], message["members"]
                if not life.is_ending:
                    life.deadline_ns = now_ns + int(HANG_S * S)
            case "ended":
                if message["superseded"] and not life.is_ending:
                    raise ProcessFailed(
                        name, "was superseded, and no other process had its rank", self._cluster.log_tail(name)
                    )
                if (status := self._cluster.wait_exit(name, END_S)) != 0:
                    self._outcome.left_behind.append(f"{name} ended with status {status}")
                self._forget(name)

    def _watch_until(self, settled: Callable[[], bool]) -> None:
        """The watchdog is the deadline."""
        while not settled():
            self._watch(0.1)

    def _are_together(self) -> bool:
        """Every rank of every world iterates, with all the others."""
        return all(
            len(world.lives) == self._ranks
            and all(life.members == self._ranks and not life.is_frozen for life in world.lives.values())
            for world in self.worlds
        )

    def _hang(self, world: StoreWorld, life: RankProcess) -> Hang:
        os.kill(self._cluster.pid(life.name), signal.SIGUSR1)
        self._cluster.pause(0.5)
        others = ", ".join(f"{other.name} at {other.number}" for other in world.lives.values() if other is not life)
        what = "did not end" if life.is_ending else "hangs: no iteration"
        text = f"{what} for {HANG_S:.0f} s, the last one was {life.number} ({others})"
        return Hang(life.name, text, None, self._cluster.log_tail(life.name))

    def _sample(self) -> None:
        for world in self.worlds:
            for rank in range(min(VETERANS, self._ranks)):
                life = world.lives[rank]
                self._outcome.samples.setdefault(life.name, []).append(sample(self._cluster.pid(life.name)))

    # The end

    def _end(self) -> None:
        """All leave; then what they wrote and what is left in the stores is taken down."""
        outcome = self._outcome
        for world in self.worlds:
            for life in list(world.lives.values()):
                self._cluster.send([life.name], {"what": "stop"})
                self._let_end(world, life)
        self._watch_until(lambda: not self._lives)
        outcome.faults = dict(self.faults.counts)
        for world in self.worlds:
            outcome.logs[world.kind] = {rank: world.entries(rank) for rank in range(self._ranks)}
            with open_store(world.server.url, timeout_s=END_S) as store:
                record = store.get("iteration/record")
                outcome.agreed[world.kind] = -1 if record is None else msgspec.json.decode(record.value)["iteration"]
                outcome.keys[world.kind] = sorted(store.list("iteration/ranks/"))
        outcome.left_behind += [f"in the temporary directory: {path.name}" for path in self._scratch.iterdir()]


@dataclass(slots=True)
class IterationHistory:
    """What was found: breaches, by what they break, and some figures."""

    going_back: list[str] = field(default_factory=list)
    two_winners: list[str] = field(default_factory=list)
    two_histories: list[str] = field(default_factory=list)
    entries: int = 0
    lives: int = 0
    last: int = -1
    missed: int = 0
    orphaned: int = 0
    """Iterations whose winner reported to no rank: it was killed, or frozen and superseded, just after it won."""


def judge(logs: Mapping[int, Sequence[IterationEntry]]) -> IterationHistory:
    """Hold the logs of one store's ranks (by rank) against each other."""
    found = IterationHistory()
    winners: dict[int, set[str]] = defaultdict(set)
    members: dict[int, set[tuple[int, ...]]] = defaultdict(set)
    for rank, log in logs.items():
        _judge_rank(found, rank, log)
        for entry in log:
            members[entry.iteration].add(entry.members)
            if entry.is_winner:
                winners[entry.iteration].add(entry.incarnation)
            if rank not in entry.members:
                found.two_histories.append(f"rank {rank} was handed {entry.iteration}, which has {entry.members}")
    for number, sets in sorted(members.items()):
        found.last = max(found.last, number)
        if len(sets) > 1:
            found.two_histories.append(f"iteration {number} has members {' and '.join(map(str, sorted(sets)))}")
        if len(winners[number]) > 1:
            found.two_winners.append(f"iteration {number}: {', '.join(sorted(winners[number]))}")
        found.orphaned += not winners[number]
    return found


def _judge_rank(found: IterationHistory, rank: int, log: Sequence[IterationEntry]) -> None:
    """In one process numbers grow, and skip those reported as missed; the next process continues above them."""
    lives: dict[tuple[int, str], list[IterationEntry]] = defaultdict(list)
    for entry in log:
        lives[entry.fence, entry.incarnation].append(entry)
    found.entries += len(log)
    found.lives += len(lives)
    reached = -1
    for (fence, incarnation), life in sorted(lives.items()):
        if life[0].iteration < reached:
            text = f"rank {rank}: {incarnation} (fence {fence}) begins at {life[0].iteration}, after {reached}"
            found.going_back.append(text)
        for before, after in pairwise(life):
            found.missed += after.missed
            if after.iteration != before.iteration + 1 + after.missed or after.missed < 0:
                text = f"{before.iteration} is followed by {after.iteration}, with {after.missed} missed"
                found.going_back.append(f"rank {rank}, {incarnation}: {text}")
        reached = max(reached, life[-1].iteration)


def histories(outcome: IterationSoakOutcome) -> dict[str, IterationHistory]:
    """The histories in the logs of each store."""
    return {kind: judge(logs) for kind, logs in outcome.logs.items()}


def checks(outcome: IterationSoakOutcome) -> list[SoakCheck]:
    """A hang ends a soak at once, so what is left to judge is what was written."""
    faults = ", ".join(f"{name} {count} times" for name, count in sorted(outcome.faults.items())) or "no faults"
    silence = f"the longest silence of a living rank was {outcome.longest_silence_s:.1f} s"
    found = [SoakCheck("nothing hangs", True, f"{faults}; {silence}")]
    for kind, history in histories(outcome).items():
        agreed = outcome.agreed[kind]
        figures = (
            f"{history.last + 1} iterations, {history.entries} entries of {history.lives} processes, "
            f"{history.missed} missed by a rank, {history.orphaned} without a report of the winner"
        )
        found += [
            SoakCheck(
                f"{kind}: iterations grow strictly in every rank's log",
                not history.going_back and history.entries > 0,
                shown(history.going_back) or figures,
            ),
            SoakCheck(
                f"{kind}: an iteration has one winner",
                not history.two_winners,
                shown(history.two_winners) or f"{history.last + 1 - history.orphaned} winners that reported it",
            ),
            SoakCheck(
                f"{kind}: there is one history",
                not history.two_histories and agreed >= history.last,
                shown(history.two_histories) or f"same members everywhere; the record ends at iteration {agreed}",
            ),
            SoakCheck(
                f"{kind}: nothing is left in the store but the record",
                not outcome.keys[kind],
                shown(outcome.keys[kind]) or "no key of any of these processes",
            ),
        ]
    for name, samples in outcome.samples.items():
        found += [
            SoakCheck(f"{name} does not grow in {each.what}", each.is_flat, str(each)) for each in growth(name, samples)
        ]
    left = "; ".join(outcome.left_behind) or "no process, no file, no shared memory"
    found.append(SoakCheck("nothing is left behind", not outcome.left_behind, left))
    return found
