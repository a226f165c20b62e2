"""The global iteration's core, step by step on a store in memory: the classic scenarios, and single decisions."""

import pickle
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from msgspec.structs import replace

from ringfold.errors import (
    DeadlineExceeded,
    RingfoldError,
    StoreError,
    StoreReset,
    StoreUnreachable,
    StoreWentBack,
    Superseded,
    UsageError,
)
from ringfold.iteration.liveness import LivenessMonitor, LivenessTiming
from ringfold.iteration.machine import BegunIteration, IterationMachine, State
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
from ringfold.iteration.record import NONE_YET, Advance, Hold, RankIdentity, Record, Rules, decide, decode, encode
from ringfold.iteration.shell import GlobalIteration
from ringfold.store import open_store
from ringfold.store.base import version_of
from ringfold.store.client import StoreClient
from ringfold.store.in_memory import Crashed, Fault, MemoryDriver, MemoryServer, StoreCall

TIMING = LivenessTiming(heartbeat_s=5, inactive_after_s=30)


class SimStore:
    """A store, and a clock that moves only when somebody waits."""

    def __init__(self) -> None:
        self.server = MemoryServer()
        self.now_ns = 0
        self.count = 0

    def rank(self, rank: int, rules: Rules, **flavour: bool) -> "Process":
        self.count += 1
        me = RankIdentity(rank=rank, incarnation=f"{rank}-{self.count}", **flavour)  # type: ignore[arg-type]
        return Process(self, me, rules)

    def ranks(self, rules: Rules, **flavour: bool) -> list["Process"]:
        """All ranks, in their first iteration."""
        processes = [self.rank(rank, rules, **flavour) for rank in range(rules.world)]
        for process in processes:
            process.arrives()
        for process in processes:
            process.next()
        assert {process.machine.iteration for process in processes} == {0}
        return processes

    @property
    def record(self) -> Record:
        return decode("memory:", self.server.entries["run/iteration/record"].value)

    def keys(self) -> list[str]:
        return [key.removeprefix("run/iteration/") for key in sorted(self.server.entries)]


class Process:
    """One incarnation, whose steps are taken operation by operation."""

    def __init__(self, store: SimStore, me: RankIdentity, rules: Rules) -> None:
        self.store, self.machine = store, IterationMachine(me, rules, TIMING)
        self.fault: Callable[[StoreCall], Fault | None] = lambda call: None
        self.jump_ns = 0
        self.operations: list[Operation] = []
        driver = MemoryDriver(store.server, sleep=lambda s: None, fault=lambda call: self.fault(call))
        self.driver = driver
        self.client = StoreClient(driver, prefix="run", timeout_s=0.001, now_ns=lambda: 0, nonce=f"g{store.count}")
        self._waiting: tuple[Steps[BegunIteration], WaitFor] | None = None

    @property
    def now_ns(self) -> int:
        return self.store.now_ns + self.jump_ns

    def register(self) -> None:
        self._run_to_end(self.machine.register(self.now_ns, 600))

    def next(self, timeout_s: float = 600, finished: int = NONE_YET) -> BegunIteration:
        """The next iteration, which must be there without waiting for anybody."""
        begun = self._advance(self.machine.next(self.now_ns, timeout_s, finished), None)
        assert begun is not None, f"it waits: {self.machine.hold}"
        return begun

    def waits(self, timeout_s: float = 600, finished: int = NONE_YET) -> Hold:
        """Ask for the next iteration, which must not be there yet."""
        assert self._advance(self.machine.next(self.now_ns, timeout_s, finished), None) is None
        assert self.machine.hold is not None
        return self.machine.hold

    def goes_on(self) -> BegunIteration:
        """A process that waited reads again, and must get the next iteration now."""
        begun = self.looks_again()
        assert begun is not None, f"it still waits: {self.machine.hold}"
        return begun

    def looks_again(self) -> BegunIteration | None:
        assert self._waiting is not None
        steps, wait = self._waiting
        return self._advance(steps, StoreReply(self.now_ns, self.client.get(wait.key)))

    def sends_heartbeat(self) -> None:
        """Send a heartbeat, once."""
        steps = self.machine.send_heartbeats()
        operation = next(steps)
        while not isinstance(operation, Pause):
            operation = send_reply(steps, StoreReply(self.now_ns, self._call_store(operation)))

    def leaves(self) -> None:
        self._run_to_end(self.machine.leave(self.now_ns, 5))

    def arrives(self) -> None:
        self._run_to_end(self.machine.arrive(self.now_ns, 600))

    def _run_to_end(self, steps: Steps[None]) -> None:
        answer: StoreReply | None = None
        while True:
            try:
                operation = next(steps) if answer is None else send_reply(steps, answer)
            except StopIteration:
                return
            answer = StoreReply(self.now_ns, self._call_store(operation))

    def _advance(self, steps: Steps[BegunIteration], answer: StoreReply | None) -> BegunIteration | None:
        while True:
            try:
                operation = next(steps) if answer is None else send_reply(steps, answer)
            except StopIteration as over:
                return over.value  # type: ignore[no-any-return]
            if isinstance(operation, WaitFor):
                entry = self.client.get(operation.key)
                if version_of(entry) == operation.seen:
                    self._waiting = steps, operation
                    return None
                answer = StoreReply(self.now_ns, entry)
                continue
            answer = StoreReply(self.now_ns, self._call_store(operation))

    def _call_store(self, operation: Operation) -> StoreOutcome:
        self.operations.append(operation)
        try:
            match operation:
                case Get(key):
                    return self.client.get(key)
                case GetMany(keys):
                    return self.client.get_many(keys)
                case ListKeys(prefix):
                    return self.client.list(prefix)
                case CompareAndSet(key, expected, value):
                    return self.client.compare_and_set(key, expected, value)
                case Increment(key, by):
                    return self.client.increment(key, by)
                case Delete(key, expected):
                    self.client.delete(key, expected)
                case Heartbeat(key, value):
                    self.client.set(key, value)
                case Pause(seconds):
                    self.store.now_ns += round(seconds * NS)
                case WaitFor():
                    raise AssertionError("steps that must not wait do wait")
        except RingfoldError as error:
            return error
        return None


def until(condition: Callable[[], object], what: str) -> None:
    """Wait for a condition that another thread brings about."""
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline, f"not within 30 s: {what}"
        time.sleep(0.01)


def fails_once(kind: str, key: str, fault: Fault) -> Callable[[StoreCall], Fault | None]:
    """A fault at the next call of a kind to a key that ends like this."""
    left = [fault]
    return lambda call: left.pop() if left and call.kind == kind and call.key.endswith(key) else None


def until_excluded(store: SimStore, waiting: Process, alive: list[Process], seconds: int = 60) -> BegunIteration:
    """Let time pass: some processes send heartbeats, one waits, until it gets the next iteration."""
    for second in range(seconds):
        store.now_ns += NS
        if second % 5 == 0:
            for process in alive:
                process.sends_heartbeat()
        begun = waiting.looks_again()
        if begun is not None:
            return begun
    raise AssertionError(f"it still waits after {seconds} s: {waiting.machine.hold}")


# The classic scenarios


def test_a_rank_that_crashes_in_training_is_excluded_and_no_other() -> None:
    store = SimStore()
    zero, one, _ = store.ranks(Rules(3))
    one.waits()
    zero.waits()
    begun = until_excluded(store, zero, [zero, one])
    assert (begun.iteration, begun.members) == (1, (0, 1))
    assert 30 <= store.now_ns / NS <= 35
    assert one.goes_on().members == (0, 1)


def test_the_early_restart_race_is_no_race() -> None:
    """A rank that restarts before anybody misses it does the iteration again, and the others wait for that."""
    store = SimStore()
    zero, old = store.ranks(Rules(2))
    zero.waits()
    old.arrives()  # and dies: what it says it has done is not in its successor
    again = store.rank(1, Rules(2))
    assert again.next().iteration == 0
    assert again.machine.resumed is not None
    assert not again.machine.resumed.has_moved
    assert zero.looks_again() is None
    assert zero.machine.hold is not None
    assert zero.machine.hold.missing == (1,)
    assert again.next().iteration == 1
    assert zero.goes_on().iteration == 1


def test_a_rank_that_dies_after_writing_the_record_leaves_nothing_undone() -> None:
    store = SimStore()
    winner, one, two = store.ranks(Rules(3))
    one.waits()
    two.waits()
    winner.fault = fails_once("write", "/record", "crash after")
    with pytest.raises(Crashed):
        winner.next()
    assert one.goes_on() == BegunIteration(1, (0, 1, 2), 0, False)
    assert two.goes_on() == BegunIteration(1, (0, 1, 2), 0, False)
    one.waits()
    two.waits()
    assert until_excluded(store, one, [one, two]).members == (1, 2)


def test_the_last_rank_to_arrive_dies_before_it_writes_and_the_others_continue() -> None:
    store = SimStore()
    zero, one = store.ranks(Rules(2))
    zero.waits()
    one.fault = fails_once("write", "/record", "crash")
    with pytest.raises(Crashed):
        one.next()
    assert until_excluded(store, zero, [zero]).iteration == 1


def test_of_two_processes_with_one_rank_the_older_is_superseded() -> None:
    store = SimStore()
    zero, old = store.ranks(Rules(2))
    new = store.rank(1, Rules(2))
    new.register()
    version = store.record.version
    for call in (old.next, old.next, old.arrives):
        with pytest.raises(Superseded) as told:
            call()
    assert (told.value.rank, told.value.successor) == (1, new.machine.me.incarnation)
    assert store.record.version == version
    assert new.machine.fence > old.machine.fence
    zero.waits()
    new.next()
    assert new.next().iteration == 1
    assert str(pickle.loads(pickle.dumps(told.value))) == str(told.value)


def test_when_all_ranks_restart_they_go_on_where_they_were() -> None:
    store = SimStore()
    for process in (first := store.ranks(Rules(3)))[:-1]:
        process.waits()
    first[-1].next()  # only this one has begun 1 when all of them die
    again = [store.rank(rank, Rules(3)) for rank in range(3)]
    assert [process.next().iteration for process in again] == [1, 1, 1]
    assert [process.machine.resumed.last for process in again if process.machine.resumed] == [1, 1, 1]


def test_a_store_that_restarts_is_waited_for() -> None:
    store = SimStore()
    zero, one = store.ranks(Rules(2))
    zero.waits()
    down = iter(["unreachable"] * 6)
    one.fault = lambda call: next(down, None)  # type: ignore[return-value]
    assert one.next().iteration == 1
    assert store.now_ns > 0
    assert zero.goes_on().iteration == 1


def test_a_store_that_stays_unreachable_is_an_error() -> None:
    store = SimStore()
    zero, one = store.ranks(Rules(2))
    zero.waits()
    one.fault = lambda call: "unreachable"
    with pytest.raises(StoreUnreachable):
        one.next(timeout_s=10)
    one.fault = lambda call: None
    assert one.next().iteration == 1


def test_a_store_that_was_emptied_is_refused() -> None:
    store = SimStore()
    zero, _ = store.ranks(Rules(2))
    store.server.wipe()
    for _ in range(2):
        with pytest.raises(StoreReset):
            zero.next()
    assert store.server.entries == {}


def test_a_store_that_went_back_is_refused() -> None:
    store = SimStore()
    zero, one = store.ranks(Rules(2))
    snapshot = store.server.snapshot()
    zero.waits()
    one.next()
    zero.goes_on()
    store.server.restore(snapshot)
    with pytest.raises(StoreWentBack):
        zero.next()


def test_a_record_that_went_back_is_refused_though_the_store_did_not() -> None:
    """A snapshot that has overtaken the revision a client remembers is known by the record's own version."""
    store = SimStore()
    zero, one = store.ranks(Rules(2))
    old = store.server.entries["run/iteration/record"]
    zero.waits()
    one.next()
    zero.goes_on()
    one.client.set("iteration/record", old.value)
    with pytest.raises(StoreWentBack, match="version"):
        zero.next()
    with pytest.raises(StoreWentBack):
        zero.next()


def test_a_store_that_went_back_and_has_overtaken_what_a_rank_knew_is_refused() -> None:
    store = SimStore()
    zero, one = store.ranks(Rules(2))
    snapshot = store.server.snapshot()
    zero.waits()
    one.next()
    zero.goes_on()
    store.server.restore(snapshot)
    known = zero.client.generation.revision
    again = store.rank(1, Rules(2))
    again.next()
    while store.server.generation is None or store.server.generation.revision <= known:
        again.sends_heartbeat()
    store.rank(1, Rules(2)).next()
    with pytest.raises(StoreWentBack, match="is not a successor of"):
        zero.next()


def test_a_minority_behind_a_partition_waits_with_a_quorum() -> None:
    store = SimStore()
    five = store.ranks(Rules(5, 1, "majority"))
    five[0].waits()
    hold = five[1].waits()
    for _ in range(100):
        store.now_ns += NS
        assert five[0].looks_again() is None
        assert five[1].looks_again() is None
        for process in five[:2]:
            process.sends_heartbeat()
        assert five[0].machine.hold is not None
        hold = five[0].machine.hold
    assert hold.missing == (2, 3, 4)
    assert "no majority" in hold.reason
    for process in five[2:4]:
        process.waits()
    assert five[4].next().members == (0, 1, 2, 3, 4)


def test_a_minority_goes_on_without_a_quorum() -> None:
    store = SimStore()
    five = store.ranks(Rules(5))
    five[0].waits()
    five[1].waits()
    assert until_excluded(store, five[0], five[:2]).members == (0, 1)


@pytest.mark.parametrize("has_leases", [True, False])
def test_a_clock_that_jumps_by_an_hour_excludes_nobody(has_leases: bool) -> None:
    store = SimStore()
    zero, one = store.ranks(Rules(2), has_leases=has_leases)
    zero.waits(timeout_s=20_000)
    for _ in range(3):
        zero.jump_ns += 3_600 * NS
        assert zero.looks_again() is None
        store.now_ns += 5 * NS
        one.sends_heartbeat()
    assert one.next().members == (0, 1)


# Outcomes that are unknown


@pytest.mark.parametrize("fault", ["lost reply", "late"])
@pytest.mark.parametrize("key", ["/record", "/arrived", "/alive"])
def test_a_lost_answer_changes_nothing_about_what_is_agreed(fault: Fault, key: str) -> None:
    store = SimStore()
    zero, one = store.ranks(Rules(2))
    one.fault = fails_once("write", key, fault)
    zero.fault = fails_once("write", key, fault)
    zero.waits()
    begun = one.next()
    one.driver.deliver_late()
    zero.driver.deliver_late()
    one.sends_heartbeat()
    assert (begun.iteration, store.record.iteration) == (1, 1)
    assert zero.goes_on().iteration == 1


def test_a_writer_that_lost_its_answer_finds_its_own_nonce() -> None:
    store = SimStore()
    zero, one = store.ranks(Rules(2))
    zero.waits()
    one.fault = fails_once("write", "/record", "lost reply")
    assert one.next().is_winner
    assert store.record.nonce.startswith(one.machine.me.incarnation)
    assert not zero.goes_on().is_winner


def test_a_registration_of_unknown_outcome_is_not_repeated_over_a_successor() -> None:
    store = SimStore()
    store.ranks(Rules(2))
    old, new = store.rank(1, Rules(2)), store.rank(1, Rules(2))
    once = fails_once("write", "/record", "lost reply")

    def and_then(call: StoreCall) -> Fault | None:
        if call.kind == "read" and store.record.roster[1].incarnation == old.machine.me.incarnation:
            new.register()  # after the write that lost its answer, and before that is looked into
        return once(call)

    old.fault = and_then
    with pytest.raises(Superseded):
        old.next()
    assert store.record.roster[1].incarnation == new.machine.me.incarnation


# Coming, going, and what is left behind


def test_a_newcomer_is_a_member_of_the_next_iteration() -> None:
    store = SimStore()
    rules = Rules(2)
    zero = store.rank(0, rules)
    assert zero.next() == BegunIteration(0, (0,), 0, True)
    one = store.rank(1, rules)
    assert one.waits().missing == (0,)
    assert zero.next().members == (0, 1)
    assert one.goes_on().members == (0, 1)
    assert one.machine.resumed is None


def test_a_rank_that_was_away_catches_up_and_learns_that_the_others_moved() -> None:
    store = SimStore()
    zero, _ = store.ranks(Rules(2))
    zero.waits()
    assert until_excluded(store, zero, [zero]).iteration == 1
    assert zero.next().iteration == 2
    again = store.rank(1, Rules(2))
    again.waits()
    assert again.machine.resumed is not None
    assert (again.machine.resumed.last, again.machine.resumed.iteration) == (0, 2)
    assert again.machine.resumed.has_moved
    assert zero.next().members == (0, 1)
    assert again.goes_on().iteration == 3


def test_a_successor_that_has_finished_the_iteration_does_not_do_it_again() -> None:
    """What a predecessor did may live on elsewhere: in the peers of its group, or in a checkpoint."""
    store = SimStore()
    rules = Rules(2, 2)
    zero, _ = store.ranks(rules)
    successor = store.rank(1, rules)
    assert successor.waits(finished=0).missing == (0,)
    assert zero.next().iteration == 1
    assert successor.goes_on() == BegunIteration(1, (0, 1), 0, False)


def test_a_successor_gets_the_iteration_that_its_predecessor_began() -> None:
    store = SimStore()
    rules = Rules(2, 2)
    zero, one = store.ranks(rules)
    zero.arrives()
    assert one.next().iteration == 1  # and dies at once
    assert store.rank(1, rules).next(finished=0).iteration == 1


def test_a_rank_that_finished_an_iteration_nobody_agreed_on_is_refused() -> None:
    store = SimStore()
    rules = Rules(2, 2)
    store.ranks(rules)
    with pytest.raises(UsageError, match="finished iteration 5, but the ranks have only agreed on 0"):
        store.rank(1, rules).next(finished=5)


def test_a_rank_whose_heartbeat_was_late_comes_back_with_its_incarnation() -> None:
    store = SimStore()
    zero, one = store.ranks(Rules(2))
    zero.waits()
    until_excluded(store, zero, [zero])
    assert one.waits().missing == (0,)
    assert zero.next().members == (0, 1)
    begun = one.goes_on()
    assert (begun.iteration, begun.missed) == (2, 1)


def test_a_rank_that_left_is_not_waited_for() -> None:
    store = SimStore()
    zero, one, two = store.ranks(Rules(3, 1, "majority"))
    one.leaves()
    two.leaves()
    assert zero.next().members == (0,)
    with pytest.raises(UsageError, match="left"):
        one.next()


def test_a_member_that_left_does_its_iteration_again_if_it_is_still_on() -> None:
    store = SimStore()
    zero, one = store.ranks(Rules(2))
    zero.leaves()
    one.leaves()
    assert [store.rank(rank, Rules(2)).next().iteration for rank in (0, 1)] == [0, 0]


def test_nothing_is_left_of_past_iterations_and_incarnations() -> None:
    store = SimStore()
    zero, one = store.ranks(Rules(2))
    for _ in range(20):
        zero.waits()
        one.next()
        zero.goes_on()
    again = store.rank(1, Rules(2))
    again.next()
    names = [process.machine.me.incarnation for process in (zero, again)]
    kept = {f"ranks/{rank}/{name}/{key}" for rank, name in enumerate(names) for key in ("alive", "arrived")}
    assert set(store.keys()) <= kept | {"record"}


def test_what_a_superseded_incarnation_wrote_late_is_removed() -> None:
    store = SimStore()
    zero, old = store.ranks(Rules(2))
    new = store.rank(1, Rules(2))
    new.next()
    old.client.set(f"iteration/ranks/1/{old.machine.me.incarnation}/arrived", b"0")
    zero.waits()
    new.next()
    assert old.machine.me.incarnation not in " ".join(store.keys())


@pytest.mark.parametrize("world", [2, 20])
def test_where_the_store_lists_the_reads_of_a_rank_do_not_grow_with_the_ranks(world: int) -> None:
    store = SimStore()
    processes = store.ranks(Rules(world))
    for process in processes:
        process.operations.clear()
    for process in processes[:-1]:
        process.waits()
    processes[-1].next()
    reads = [sum(isinstance(one, Get | ListKeys) for one in process.operations) for process in processes]
    assert max(reads) <= 2


@pytest.mark.parametrize("world", [2, 20, 128])
def test_where_versions_count_writes_only_the_last_rank_looks_at_the_others(world: int) -> None:
    store = SimStore()
    processes = store.ranks(Rules(world), counts_writes=True)
    for turn in range(3):
        for process in processes:
            process.operations.clear()
        (winner,) = [process for process in processes if process.machine._won == process.machine.iteration]
        others = [process for process in processes if process is not winner]
        for process in [winner, *others[:-1]]:
            process.waits()
        begun = others[-1].next()
        assert len(begun.members) == world
        for process in [winner, *others[:-1]]:
            process.goes_on()
        lists = sum(isinstance(one, ListKeys) for process in processes for one in process.operations)
        # The last one lists, and the winner of the iteration before, which expects to be the last again. In the first
        # turn some ranks have not seen when the iteration began: they registered before others did.
        assert not turn or lists <= 2 + (world == 2)
        assert max(len(process.operations) for process in processes) <= 3


@pytest.mark.parametrize("world", [2, 20, 128])
def test_where_the_store_has_counters_only_the_last_rank_reads_the_others(world: int) -> None:
    store = SimStore()
    processes = store.ranks(Rules(world), can_list=False, has_counters=True)
    for _ in range(3):
        for process in processes:
            process.operations.clear()
        (winner,) = [process for process in processes if process.machine._won == process.machine.iteration]
        others = [process for process in processes if process is not winner]
        for process in [winner, *others[:-1]]:
            process.waits()
        assert len(others[-1].next().members) == world
        for process in [winner, *others[:-1]]:
            process.goes_on()
        reads = [sum(isinstance(one, Get | GetMany) for one in process.operations) for process in processes]
        assert sorted(reads) == [*[0] * (world - 1), 1]
        assert max(len(process.operations) for process in processes) <= 5


@pytest.mark.parametrize("flavour", [{"counts_writes": True}, {"can_list": False, "has_counters": True}])
def test_a_rank_that_came_early_continues_at_once_if_the_others_have_arrived_until_it_calls_next(
    flavour: dict[str, bool],
) -> None:
    store = SimStore()
    processes = store.ranks(Rules(3), **flavour)
    for process in processes:
        process.arrives()
    assert processes[0].next().members == (0, 1, 2)


def test_where_the_store_has_counters_a_winner_that_comes_last_needs_no_arrival() -> None:
    store = SimStore()
    processes = store.ranks(Rules(4), can_list=False, has_counters=True)
    (winner,) = [process for process in processes if process.machine._won == 0]
    for process in processes:
        if process is not winner:
            process.waits()
    winner.operations.clear()
    assert winner.next().is_winner
    assert sum(isinstance(one, CompareAndSet) for one in winner.operations) == 1


def test_a_rank_that_died_before_it_counted_its_arrival_delays_the_others_only() -> None:
    store = SimStore()
    zero, one, two = store.ranks(Rules(3), can_list=False, has_counters=True)
    zero.waits()
    one.fault = lambda call: "crash" if call.kind == "increment" and call.number > 1 else None
    with pytest.raises(Crashed):
        one.arrives()
    two.waits()
    assert two.goes_on().members == (0, 1, 2)


@pytest.mark.parametrize("fault", ["lost reply", "late"])
def test_an_arrival_whose_count_is_unknown_is_counted_again(fault: Fault) -> None:
    store = SimStore()
    zero, one = store.ranks(Rules(2), can_list=False, has_counters=True)
    faults: list[Fault] = [fault]
    one.fault = lambda call: faults.pop() if faults and call.kind == "increment" else None
    one.waits()
    one.looks_again()
    assert store.server.counters["run/iteration/arrivals/0"] >= 1
    assert zero.next().members == (0, 1)


def test_counters_of_past_iterations_are_removed() -> None:
    store = SimStore()
    processes = store.ranks(Rules(2), can_list=False, has_counters=True)
    for _ in range(5):
        processes[0].waits()
        processes[1].next()
        processes[0].goes_on()
    assert len(store.server.counters) <= 2


def test_with_too_few_registered_ranks_nobody_looks() -> None:
    store = SimStore()
    processes = [store.rank(rank, Rules(9, min_ranks=9), can_list=False) for rank in range(8)]
    for process in processes:
        process.register()
    for process in processes:
        process.operations.clear()
        assert process.waits().missing == (8,)
        assert not any(isinstance(one, Get | GetMany) for one in process.operations)


def test_a_rank_that_came_early_looks_again_when_it_has_waited() -> None:
    """The last one writes its arrival, and dies before it looks."""
    store = SimStore()
    zero, one, two = store.ranks(Rules(3), counts_writes=True)
    zero.waits()
    one.waits()
    two.arrives()
    assert zero.goes_on().members == (0, 1, 2)


def test_a_change_of_the_record_in_the_iteration_does_not_hide_arrivals() -> None:
    """Its version is higher than those of the arrivals before it."""
    store = SimStore()
    processes = store.ranks(Rules(4), counts_writes=True)
    for process in processes[:2]:
        process.waits()
    again = store.rank(2, Rules(4), counts_writes=True)
    again.register()
    assert again.next().iteration == 0
    again.waits()
    assert processes[3].next().members == (0, 1, 2, 3)


def test_where_the_store_cannot_list_the_roster_says_whom_to_ask_for() -> None:
    store = SimStore()
    processes = store.ranks(Rules(4), can_list=False)
    for process in processes[:-1]:
        assert process.waits().missing
    assert processes[-1].next().members == (0, 1, 2, 3)
    assert not any(isinstance(one, ListKeys) for process in processes for one in process.operations)


def test_where_the_store_cannot_list_one_request_of_a_heartbeat_observes_all_ranks() -> None:
    store = SimStore()
    zero, *others = store.ranks(Rules(20), can_list=False)
    others[-1].leaves()
    zero.operations.clear()
    zero.sends_heartbeat()
    assert [type(one) for one in zero.operations] == [Heartbeat, Get, GetMany]
    (request,) = [one for one in zero.operations if isinstance(one, GetMany)]
    assert len(request.keys) == 2 * 19
    assert [rank for rank in range(20) if zero.machine.is_dead(rank)] == [19]


def test_keys_of_somebody_else_are_left_alone() -> None:
    store = SimStore()
    zero, one = store.ranks(Rules(2))
    one.client.set("iteration/ranks/arrived", b"not ours")
    for _ in range(50):
        store.now_ns += 2 * NS
        one.sends_heartbeat()
        zero.waits()
        one.next()
        zero.goes_on()
    assert "run/iteration/ranks/arrived" in store.server.entries


def test_an_arrival_that_is_no_number_counts_for_nothing() -> None:
    store = SimStore()
    zero, one = store.ranks(Rules(2))
    one.client.set(f"iteration/ranks/1/{one.machine.me.incarnation}/arrived", b"what?")
    assert zero.waits().missing == (1,)
    assert one.next().iteration == 1


# Waiting


def test_a_deadline_names_who_is_waited_for_and_one_may_call_again() -> None:
    store = SimStore()
    zero, one, two = store.ranks(Rules(3))
    one.waits()
    zero.waits(timeout_s=20)
    store.now_ns += 25 * NS
    with pytest.raises(DeadlineExceeded, match="rank 2 of 3 members") as overdue:
        zero.looks_again()
    assert overdue.value.peers == (2,)
    assert overdue.value.waited_ms == 25_000
    assert two.next().iteration == 1
    assert zero.next().iteration == 1


def test_ranks_below_min_ranks_wait_for_more() -> None:
    store = SimStore()
    zero, one = store.rank(0, Rules(3, 2)), store.rank(1, Rules(3, 2))
    assert "1 of at least 2" in zero.waits().reason
    assert one.next().members == (0, 1)


def test_the_states_follow_one_another() -> None:
    store = SimStore()
    zero, one = store.ranks(Rules(2))
    assert zero.machine.state is State.TRAINING
    zero.waits()
    assert zero.machine.state is State.READY
    one.next()
    zero.goes_on()
    assert zero.machine.state is State.TRAINING


def test_every_change_of_state_is_remembered_with_its_iteration() -> None:
    store = SimStore()
    zero, one = store.ranks(Rules(2))
    for process in (zero, one):
        process.machine.changes.clear()
    zero.waits()
    one.next()
    zero.goes_on()
    waited = [(State.READY, 0), (State.ADVANCE, 0), (State.NEW_ITERATION, 1), (State.TRAINING, 1)]
    assert [(change.state, change.iteration) for change in zero.machine.changes] == waited
    won = [change.state for change in one.machine.changes]
    assert won[-4:] == [State.CONSENSUS, State.ADVANCE, State.NEW_ITERATION, State.TRAINING]


def test_the_states_and_a_callback_show_every_new_iteration(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    seen: list[tuple[State, int]] = []

    def note(state: State, iteration: int) -> None:
        seen.append((state, iteration))
        if state is State.TRAINING:
            raise ValueError("a callback that fails harms nobody")

    with GlobalIteration(f"sqlite://{tmp_path}/store.db", 0, 1, on_state=note) as iteration:
        assert [iteration.next() for _ in range(3)] == [0, 1, 2]
        assert [number for state, number in seen if state is State.NEW_ITERATION] == [0, 1, 2]
        assert [(change.state, change.iteration) for change in iteration.states] == seen
    assert "on_state failed" in caplog.text


def test_a_callback_is_called_in_the_thread_of_the_call_only_and_after_an_error_too(tmp_path: Path) -> None:
    threads: set[str] = set()
    seen: list[State] = []

    def note(state: State, iteration: int) -> None:
        threads.add(threading.current_thread().name)
        seen.append(state)

    url = f"sqlite://{tmp_path}/store.db"
    with GlobalIteration(url, 0, 2, on_state=note, heartbeat_s=0.001, min_ranks=2) as iteration:
        with pytest.raises(DeadlineExceeded):
            iteration.next(timeout_s=0.3)
        with GlobalIteration(url, 1, 2, heartbeat_s=0.001, min_ranks=2) as other:
            other.arrive()
            assert iteration.next() == 0
        with pytest.raises(DeadlineExceeded):
            iteration.next(timeout_s=0.1)
        assert [change.state for change in iteration.states] == seen
    assert threads == {threading.current_thread().name}


def test_a_call_inside_a_callback_is_an_error_and_no_deadlock(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with GlobalIteration(
        f"sqlite://{tmp_path}/store.db", 0, 1, on_state=lambda state, number: iteration.close()
    ) as iteration:
        assert [iteration.next(), iteration.next()] == [0, 1]
    assert "close: not in on_state" in caplog.text


def test_close_ends_a_call_that_waits_in_another_thread(tmp_path: Path) -> None:
    iteration = GlobalIteration(f"sqlite://{tmp_path}/store.db", 0, 2, min_ranks=2)
    errors: list[RingfoldError] = []

    def wait() -> None:
        try:
            iteration.next()
        except RingfoldError as error:
            errors.append(error)

    waiting = threading.Thread(target=wait)
    waiting.start()
    until(lambda: iteration.waiting_for, "the call waits")
    with pytest.raises(DeadlineExceeded, match="another thread"):
        iteration.next(timeout_s=0.01)
    iteration.close()
    waiting.join(30)
    assert [type(error) for error in errors] == [UsageError]
    with pytest.raises(UsageError, match="was closed"):
        iteration.next()


def test_a_store_that_refuses_a_heartbeat_for_a_while_ends_no_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    store, left = open_store(f"sqlite://{tmp_path}/store.db"), [0]
    write = store.set

    def refuse(key: str, value: bytes, **more: bool) -> object:
        if left[0]:
            left[0] -= 1
            raise StoreError("sqlite", "database or disk is full (SQLITE_FULL)")
        return write(key, value, **more)

    monkeypatch.setattr(store, "set", refuse)
    with store, GlobalIteration(store, 0, 1, heartbeat_s=0.01) as iteration:
        assert iteration.next() == 0
        left[0] = 3
        until(lambda: not left[0], "all heartbeats that are refused are sent")
        assert iteration.next() == 1
        assert iteration.error is None
    assert caplog.text.count("disk is full") == 1


@pytest.mark.parametrize("timeout_s", [0.0, -1.0, float("inf"), float("nan")])
def test_a_timeout_that_is_none_is_refused(tmp_path: Path, timeout_s: float) -> None:
    with pytest.raises(UsageError, match="timeout_s"):
        GlobalIteration(f"sqlite://{tmp_path}/store.db", 0, 1, timeout_s=timeout_s)


def test_a_finished_run_needs_no_members_to_be_seen_as_finished() -> None:
    store = SimStore()
    rules = Rules(2, 2)
    zero, one = store.ranks(rules)
    one.waits()
    zero.next()
    one.goes_on()
    zero.leaves()
    one.leaves()
    late = store.rank(1, rules)
    late.machine.until = 1
    assert late.next().iteration == 1


# Decisions


def record(members: list[int], *, world: int = 5, gone: tuple[int, ...] = (), rules: Rules | None = None) -> Record:
    made = Record(rules or Rules(world), 3)
    for rank in range(world):
        made = made.with_registration(rank, f"i{rank}", "n")
    made = replace(made, members={rank: f"i{rank}" for rank in members})
    for rank in gone:
        made = made.with_departure(rank, "n")
    return made


@pytest.mark.parametrize(
    ("members", "arrived", "dead", "gone", "decision"),
    [
        ([0, 1, 2], {0, 1, 2}, (), (), Advance((0, 1, 2))),
        ([0, 1, 2], {0, 1, 4}, (2,), (), Advance((0, 1, 4))),
        ([0, 1, 2], {0, 1, 2}, (1,), (), Advance((0, 2))),
        ([0, 1, 2], {0, 1}, (), (2,), Advance((0, 1))),
        ([0, 1, 2, 3], {0, 1}, (2, 3), (), Hold((2, 3), "")),
        ([0, 1, 2, 3], {0, 1, 4}, (2, 3), (), Hold((2, 3), "")),
        ([0, 1], {0}, (1,), (), Hold((1,), "")),
        ([0, 1], {0}, (), (), Hold((1,), "")),
        ([], {0, 1}, (), (), Hold((2, 3, 4), "")),
        ([], {0, 1, 3}, (), (), Advance((0, 1, 3))),
    ],
)
def test_a_majority_is_of_those_who_agreed_before(
    members: list[int],
    arrived: set[int],
    dead: tuple[int, ...],
    gone: tuple[int, ...],
    decision: Advance | Hold,
) -> None:
    found = decide(record(members, gone=gone, rules=Rules(5, 1, "majority")), arrived, dead)
    assert type(found) is type(decision)
    if isinstance(found, Hold) and isinstance(decision, Hold):
        assert found.missing == decision.missing
    else:
        assert found == decision


def test_a_record_survives_the_store() -> None:
    before = record([0, 1]).with_next_iteration([0, 1, 2], 1, "nonce")
    assert decode("memory:", encode(before)) == before
    assert (before.iteration, before.winner, before.members) == (4, 1, {0: "i0", 1: "i1", 2: "i2"})
    assert [seat.last for seat in before.roster.values()] == [4, 4, 4, NONE_YET, NONE_YET]


def test_a_record_comes_out_of_those_before_it_and_of_no_other() -> None:
    base = record([0, 1])
    line = [base]
    for number in range(40):
        line.append(line[-1].with_next_iteration([0, 1], 0, f"a{number}"))
    other = base
    for number in range(3):
        other = other.with_next_iteration([0, 1], 0, f"b{number}")
    assert all(late.follows(early) for at, late in enumerate(line) for early in line[: at + 1])
    assert not any(early.follows(late) for at, late in enumerate(line) for early in line[:at])
    assert not any(late.follows(other) for late in line[1:16])
    assert other.follows(base)


@pytest.mark.parametrize(
    "value",
    [
        b"",
        b"7",
        b"{}",
        b'{"rules": {"world": 0}}',
        b'{"rules": {"world": 2}, "members": {"0": "a"}}',
        b'{"rules": {"world": 2}, "format": 2}',
        b'{"rules": {"world": 2}, "more": 1}',
    ],
)
def test_what_is_no_record_is_refused(value: bytes) -> None:
    with pytest.raises(StoreError, match="record"):
        decode("memory:", value)


def test_ranks_with_different_rules_are_told_both() -> None:
    store = SimStore()
    store.rank(0, Rules(2)).next()
    with pytest.raises(UsageError, match=r"quorum='majority'.*quorum=None"):
        store.rank(1, Rules(2, 1, "majority")).next()


@pytest.mark.parametrize(
    "make",
    [
        lambda: Rules(0),
        lambda: Rules(2, 3),
        lambda: Rules(2, 0),
        lambda: Rules(2, 1, "half"),  # type: ignore[arg-type]
        lambda: LivenessTiming(heartbeat_s=5, inactive_after_s=9),
        lambda: LivenessTiming(heartbeat_s=0, inactive_after_s=9),
        lambda: IterationMachine(RankIdentity(rank=2, incarnation="a"), Rules(2), TIMING),
        lambda: IterationMachine(RankIdentity(rank=-1, incarnation="a"), Rules(2), TIMING),
    ],
)
def test_settings_that_make_no_sense_are_refused(make: Callable[[], object]) -> None:
    with pytest.raises(UsageError):
        make()


# Liveness


def watch(*, has_leases: bool = False) -> LivenessMonitor:
    return LivenessMonitor(has_leases=has_leases, inactive_after_ns=30 * NS, absent_ns=5 * NS)


def test_a_rank_whose_version_changes_is_alive() -> None:
    seen = watch()
    assert not any(seen.observe(second * NS, "a", second // 5) for second in range(1, 300))


def test_a_rank_whose_version_stands_still_is_inactive_after_the_timeout() -> None:
    seen = watch()
    assert next(second for second in range(60) if seen.observe(second * NS, "a", 7)) == 30


def test_a_rank_with_a_lease_is_alive_whatever_its_version() -> None:
    seen = watch(has_leases=True)
    assert not any(seen.observe(second * NS, "a", 7) for second in range(300))
    assert next(second for second in range(300, 400) if seen.observe(second * NS, "a", 0)) == 305


def test_an_observer_that_was_paused_excludes_nobody() -> None:
    seen = watch()
    seen.observe(0, "a", 7)
    assert not seen.observe(3_600 * NS, "a", 7)
    assert not seen.observe(7_200 * NS, "a", 7)
    assert seen.age_ns(7_200 * NS, "a") == 7_200 * NS
