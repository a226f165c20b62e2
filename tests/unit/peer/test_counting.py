"""Steps numbered by a global iteration: one number for all peers of a group, and for all groups that agree."""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, closing

import numpy as np
import pytest

import ringfold as rf
from ringfold.iteration.record import Record, decode
from ringfold.master.server import MasterThread
from ringfold.peer.counting import Counting, Facts, NoSpeaker, NotYet
from ringfold.runtime.clock import monotonic_ns
from ringfold.runtime.master_client import MasterClient
from ringfold.store.base import Generation, Write, Written
from ringfold.store.client import StoreClient
from ringfold.store.in_memory import MemoryDriver, MemoryServer

DEADLINE_S = 30.0

# The speaker, and the numbers: pure


class Fake:
    """A counter that hands out what the test says."""

    def __init__(self, rank: int = 0, world: int = 2, number: int = 0) -> None:
        self.rank, self.world, self.timeout_s, self.number = rank, world, 1.0, number
        self.calls: list[int] = []
        self.left: bool | None = None
        self.is_superseded = self.is_waiting = False

    def next_after(self, finished: int, *, until: int | None = None, timeout_s: float | None = None) -> int:
        self.calls.append(finished)
        if self.is_waiting:
            raise rf.DeadlineExceeded("next", (1,), 1_000, "rank 1 has not arrived")
        if self.is_superseded:
            raise rf.Superseded(self.rank, "old", "new")
        return self.number

    def close(self, *, leave: bool = True) -> None:
        self.left = leave


class Member:
    """A peer of a group that is played by the test."""

    def __init__(self, peer: int, **counter: int) -> None:
        self.peer, self.counter = peer, Fake(**counter)
        self.counting = Counting(self.counter, None)


def shared(members: list[Member], finished: int = -1) -> list[int | NotYet | NoSpeaker]:
    """One op of the group: what each of them makes of the largest facts."""
    facts: list[Facts] = [member.counting.facts(member.peer, finished) for member in members]
    return [member.counting.judge(member.peer, np.max(facts, axis=0)) for member in members]


def agreed(members: list[Member], finished: int = -1) -> list[int | NotYet | NoSpeaker]:
    """Ops until there is a speaker."""
    numbers = shared(members, finished)
    return shared(members, finished) if isinstance(numbers[0], NoSpeaker) else numbers


def test_the_longest_member_speaks_and_all_take_its_number() -> None:
    group = [Member(peer, number=7) for peer in (5, 3, 9)]
    assert {type(answer) for answer in shared(group)} == {NoSpeaker}
    assert shared(group) == [7, 7, 7]
    assert [member.counter.calls for member in group] == [[], [-1], []]


def test_a_speaker_goes_on_speaking_though_others_have_lower_numbers() -> None:
    """The order of the ring, and its members, may change; a superseded speaker could never come back."""
    group = [Member(4), Member(8)]
    agreed(group)
    for member in group:
        member.counting.finish()
    older = Member(1)
    group[0].counter.number = 1
    assert shared([older, *group], 0) == [1, 1, 1]
    assert older.counter.calls == []


def test_a_successor_reports_what_the_group_has_finished() -> None:
    group = [Member(1), Member(2), Member(3)]
    agreed(group)
    for member in group:
        member.counting.finish()
    group[1].counter.number = 1
    assert agreed(group[1:], finished=0) == [1, 1]
    assert group[1].counter.calls == [0]


def test_newcomers_get_the_number_of_the_present_step() -> None:
    """Also when the speaker is gone: the members of the step know it."""
    group = [Member(1, number=6), Member(2)]
    agreed(group)
    assert shared([group[1], Member(3)], finished=5) == [6, 6]


def test_a_number_that_was_lost_with_the_speaker_is_requested_again() -> None:
    group = [Member(1, number=6), Member(2, number=6)]
    shared(group, 5)
    group[0].counting.facts(1, 5)  # it is handed the number, and dies
    assert agreed(group[1:], 5) == [6]
    assert group[1].counter.calls == [5]


def test_a_speaker_that_was_superseded_still_comes_to_the_op_which_knows_whether_it_was_evicted() -> None:
    thawed = Member(1)
    agreed([thawed])
    thawed.counting.finish()
    thawed.counter.is_superseded = True
    assert thawed.counting.facts(1, 0)[0] == -1


def test_a_group_whose_rank_was_taken_over_by_another_process_gets_an_error() -> None:
    lone = Member(1)
    agreed([lone])
    lone.counting.finish()
    lone.counter.is_superseded = True
    with pytest.raises(rf.Superseded):
        shared([lone], 0)


def test_while_the_speaker_waits_the_group_repeats_the_op_and_gets_no_second_speaker() -> None:
    group = [Member(1, number=3), Member(2)]
    group[0].counter.timeout_s, group[0].counter.is_waiting = 600.0, True
    group[0].counting = Counting(group[0].counter, None)
    agreed(group)
    assert {type(answer) for answer in shared(group)} == {NotYet}
    group[0].counter.is_waiting = False
    assert shared(group) == [3, 3]
    assert group[1].counter.calls == []


def test_a_speaker_that_has_waited_for_as_long_as_it_may_raises() -> None:
    lone = Member(1)
    lone.counter.timeout_s, lone.counter.is_waiting = 3.0, True
    lone.counting = Counting(lone.counter, None)
    assert [type(answer) for answer in shared([lone])] == [NoSpeaker]
    for _ in range(2):
        assert [type(answer) for answer in shared([lone])] == [NotYet]
    with pytest.raises(rf.DeadlineExceeded):
        shared([lone])


@pytest.mark.parametrize(("other", "text"), [({"rank": 1}, "ranks 0 to 1"), ({"world": 3}, "worlds 2 to 3")])
def test_peers_of_one_group_with_different_counters_are_refused(other: dict[str, int], text: str) -> None:
    with pytest.raises(rf.UsageError, match=text):
        shared([Member(1), Member(2, **other)])


def test_a_speaker_leaves_at_the_end_and_else_hands_over() -> None:
    for is_end in (True, False):
        group = [Member(1), Member(2)]
        agreed(group)
        for member in group:
            member.counting.end(leave=is_end)
        assert [member.counter.left for member in group] == [is_end, False], (
            "a member that never was the speaker has nothing to leave"
        )


# Real peers, on a store in memory


class Server(MemoryServer):
    """One write at a time, although peers are threads here."""

    def __init__(self) -> None:
        super().__init__()
        self.lock = threading.Lock()

    def write(self, write: Write, guard: Generation) -> Written:
        with self.lock:
            return super().write(write, guard)

    def scanned(self) -> list[str]:
        with self.lock:
            return list(self.entries)

    @property
    def record(self) -> Record:
        return decode("memory:", self.entries["run/iteration/record"].value)


class Peer:
    """A training program: what it was handed, and what it does at a step."""

    def __init__(
        self, server: Server, master: MasterThread, rank: int, *, world: int = 2, until: int = 20, **more: object
    ) -> None:
        self.server, self.master, self.rank, self.world, self.until = server, master, rank, world, until
        self.more = {"min_world": 2, "wait_s": DEADLINE_S, **more}
        self.min_ranks, self.group = world, 0
        self.weights = np.zeros(8)
        self.numbers: list[int] = []
        self.missed: list[int] = []
        self.at: dict[int, Callable[[], object]] = {}

    def counter(self) -> rf.GlobalIteration:
        driver = MemoryDriver(self.server, sleep=lambda s: threading.Event().wait(min(s, 0.002)))
        client = StoreClient(driver, prefix="run", timeout_s=5, now_ns=monotonic_ns)
        return rf.GlobalIteration(client, self.rank, self.world, min_ranks=self.min_ranks, timeout_s=DEADLINE_S)

    def train(self) -> "Peer":
        where = {"timeout_s": DEADLINE_S, "op_timeout_s": DEADLINE_S, "group": self.group}
        with rf.join(self.master.address, **where) as run:  # type: ignore[arg-type]
            state = rf.SharedState(weights=self.weights)
            for step in run.steps(state, until=self.until, counter=self.counter(), **self.more):  # type: ignore[arg-type]
                if self.at.get(step.number, lambda: None)() == "leave":
                    return self
                gradients = np.ones(8)
                step.all_reduce(gradients, op="avg")
                self.weights += gradients
                self.numbers.append(step.number)
                self.missed.append(step.missed)
        return self


class Scene:
    """Runs, a store, and a pool of peers."""

    def __init__(self, stack: ExitStack) -> None:
        self.server = Server()
        self.pool = stack.enter_context(ThreadPoolExecutor(8))
        self.runs = [stack.enter_context(MasterThread()) for _ in range(2)]

    def peer(self, rank: int, **options: object) -> Peer:
        return Peer(self.server, self.runs[rank], rank, **options)  # type: ignore[arg-type]

    def begin(self, peer: Peer) -> "Future[Peer]":
        return self.pool.submit(peer.train)

    def train(self, *peers: Peer) -> None:
        for future in [self.begin(peer) for peer in peers]:
            future.result(DEADLINE_S)


@pytest.fixture
def scene() -> Iterator[Scene]:
    with ExitStack() as stack:
        yield Scene(stack)


def test_the_peers_of_two_runs_take_the_same_steps(scene: Scene) -> None:
    peers = [scene.peer(rank) for rank in (0, 0, 1, 1)]
    scene.train(*peers)
    assert [peer.numbers for peer in peers] == [list(range(20))] * 4
    assert scene.server.record.iteration == 20
    assert all(entry.gone for entry in scene.server.record.roster.values()), "both have left"


def test_the_groups_of_one_run_are_ranks_of_their_own(scene: Scene) -> None:
    """So are peers, if each has a group: here one group has two, and one has one."""
    peers = [Peer(scene.server, scene.runs[0], rank, min_world=1) for rank in (0, 0, 1)]
    for peer in peers:
        peer.group = peer.rank
    scene.train(*peers)
    assert peers[2].numbers == list(range(20))
    assert {tuple(peer.numbers) for peer in peers[:2]} <= {tuple(range(first, 20)) for first in range(20)}


def test_no_run_is_ahead_of_another_by_more_than_one_step(scene: Scene) -> None:
    peers = [scene.peer(0), scene.peer(0), scene.peer(1, min_world=1)]
    arrived, go_on = threading.Event(), threading.Event()
    peers[2].at[5] = lambda: (arrived.set(), go_on.wait(DEADLINE_S))
    futures = [scene.begin(peer) for peer in peers]
    assert arrived.wait(DEADLINE_S)
    assert scene.server.record.iteration == 5
    go_on.set()
    for future in futures:
        future.result(DEADLINE_S)
    assert [peer.numbers for peer in peers] == [list(range(20))] * 3


def test_when_the_speaker_leaves_another_peer_goes_on_and_no_step_is_missed(scene: Scene) -> None:
    """It leaves in the middle of step 5, which the survivors finish; none does 5 twice, and none skips 6."""
    peers = [scene.peer(0), scene.peer(0), scene.peer(0), scene.peer(1, min_world=1)]
    peers[0].at[5] = lambda: "leave"
    started = scene.begin(peers[0])
    _until(lambda: _registered(scene.runs[0]) == 1)  # so it is the longest member
    rest = [scene.begin(peer) for peer in peers[1:]]
    assert started.result(DEADLINE_S).numbers == list(range(5))
    for future in rest:
        future.result(DEADLINE_S)
    for peer in peers[1:]:
        assert peer.numbers == list(range(peer.numbers[0], 20))
        assert set(peer.missed[1:]) == {0}
    assert peers[3].numbers == list(range(20))


def test_a_newcomer_begins_at_the_agreed_number(scene: Scene) -> None:
    old = [scene.peer(0, until=200), scene.peer(0, until=200), scene.peer(1, min_world=1, until=200)]
    arrived, go_on = threading.Event(), threading.Event()
    old[0].at[3] = lambda: (arrived.set(), go_on.wait(DEADLINE_S))
    futures = [scene.begin(peer) for peer in old]
    assert arrived.wait(DEADLINE_S)
    new = scene.peer(0, until=200)
    futures.append(scene.begin(new))
    _until(lambda: _registered(scene.runs[0]) == 3)
    go_on.set()
    for future in futures:
        future.result(DEADLINE_S)
    assert new.numbers == list(range(new.numbers[0], 200))
    assert 3 < new.numbers[0] < 200
    assert (new.weights == old[0].weights).all()


def test_a_peer_is_admitted_while_its_run_waits_for_another_run(scene: Scene) -> None:
    first, second = scene.peer(0, min_world=1), scene.peer(0, min_world=1)
    futures = [scene.begin(first)]
    _until(lambda: "run/iteration/record" in scene.server.scanned())  # it waits: no other run is there yet
    futures.append(scene.begin(second))
    _until(lambda: _accepted(scene.runs[0]) == 2)
    futures.append(scene.begin(scene.peer(1, min_world=1)))
    for future in futures:
        future.result(DEADLINE_S)
    assert first.numbers == second.numbers == list(range(20))


def test_a_peer_that_joins_while_the_others_wait_in_a_step_gets_its_number(scene: Scene) -> None:
    """With min_world the survivor's first op of step 5 waits for a newcomer, which takes part in that very step."""
    stays, leaves, other = scene.peer(0), scene.peer(0), scene.peer(1, min_world=1)
    leaves.at[5] = lambda: "leave"
    futures = [scene.begin(peer) for peer in (stays, leaves, other)]
    futures[1].result(DEADLINE_S)
    new = scene.peer(0)
    futures.append(scene.begin(new))
    for future in futures:
        future.result(DEADLINE_S)
    assert new.numbers == list(range(5, 20))
    assert stays.numbers == other.numbers == list(range(20))


def test_a_run_that_comes_late_skips_what_it_missed_and_logs_it(scene: Scene) -> None:
    early, late = scene.peer(0, min_world=1), [scene.peer(1), scene.peer(1)]
    arrived, go_on = threading.Event(), threading.Event()
    for peer in (early, *late):
        peer.min_ranks = 1
    early.at[6] = lambda: (arrived.set(), go_on.wait(DEADLINE_S))
    future = scene.begin(early)
    assert arrived.wait(DEADLINE_S)
    others = [scene.begin(peer) for peer in late]
    _until(lambda: any(key.startswith("run/iteration/ranks/1/") and "arrived" in key for key in scene.server.scanned()))
    go_on.set()
    for each in (future, *others):
        each.result(DEADLINE_S)
    assert early.numbers == list(range(20))
    assert [peer.numbers for peer in late] == [list(range(7, 20))] * 2
    assert [peer.missed for peer in late] == [[7] + [0] * 12] * 2


def test_a_run_that_comes_after_the_end_ends_at_once(scene: Scene) -> None:
    early, late = scene.peer(0, min_world=1), scene.peer(1, min_world=1)
    early.min_ranks = late.min_ranks = 1
    scene.train(early)
    scene.train(late)
    assert (early.numbers, late.numbers) == (list(range(20)), [])


def test_a_state_of_another_history_is_refused(scene: Scene) -> None:
    with rf.join(scene.runs[0].address, timeout_s=DEADLINE_S) as run:
        peer = scene.peer(0, world=1)
        state = rf.SharedState({"w": np.zeros(2)}, revision=7)
        with pytest.raises(rf.UsageError, match="finished iteration 6, but the ranks have only agreed on -1"):
            next(iter(run.steps(state, until=9, counter=peer.counter())))


def _until(condition: Callable[[], bool]) -> None:
    end_ns = monotonic_ns() + int(DEADLINE_S * 1e9)
    while not condition():
        assert monotonic_ns() < end_ns
        threading.Event().wait(0.005)


def _accepted(master: MasterThread) -> int:
    with closing(MasterClient(master.address, b"")) as connection:
        return sum(len(group.ring) for group in connection.status().groups)


def _registered(master: MasterThread) -> int:
    with closing(MasterClient(master.address, b"")) as connection:
        return len(connection.status().peers)
