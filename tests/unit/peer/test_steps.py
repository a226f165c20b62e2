"""The training loop: numbers, admission, sync, waiting and retry come out the same on all peers."""

import logging
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import TypeVar, cast

import numpy as np
import numpy.typing as npt
import pytest

import ringfold as rf
from ringfold.master.server import MasterThread
from ringfold.peer.buffers import Spans
from ringfold.peer.effects import SyncSucceeded
from ringfold.peer.ops import Ops
from ringfold.peer.steps import Step, StepSettings, steps
from ringfold.state.checkpoint import Checkpoints
from ringfold.state.shared import set_torn
from ringfold.state.snapshot import Snapshot
from ringfold.wire.messages import Offer

DEADLINE_S = 30.0
LAST = 20_000
Weights = npt.NDArray[np.float64]
T = TypeVar("T")


@pytest.fixture
def master() -> Iterator[MasterThread]:
    with MasterThread() as running:
        yield running


class Trainer:
    """A program with a training loop. It counts, so that every step leaves its mark in the weights."""

    def __init__(
        self,
        master: MasterThread,
        *,
        until: int,
        min_world: int,
        wait_s: float = DEADLINE_S,
        enough: int | None = None,
    ) -> None:
        self.address = master.address
        self.enough = enough  # so many steps with three peers, wherever they begin
        self.until, self.min_world, self.wait_s = until, min_world, wait_s
        self.weights: Weights = np.zeros(5_000)
        self.numbers: list[int] = []
        self.contributors: list[int] = []
        self.leave_at: int | None = None
        self.reached = threading.Event()
        self.pause_at: int | None = None
        self.go_on = threading.Event()

    def train(self) -> "Trainer":
        with rf.join(self.address, timeout_s=DEADLINE_S, op_timeout_s=DEADLINE_S) as run:
            state = rf.SharedState(weights=self.weights)
            for step in run.steps(state, until=self.until, min_world=self.min_world, wait_s=self.wait_s):
                if step.number == self.leave_at:
                    return self
                if step.number == self.pause_at:
                    self.reached.set()
                    assert self.go_on.wait(DEADLINE_S)
                gradients = np.full(5_000, 1.0 + step.number)
                self.contributors.append(len(step.all_reduce(gradients, op="avg").contributors))
                self.weights += gradients
                self.numbers.append(step.number)
                if self.contributors.count(3) == self.enough:
                    return self
            assert state.revision == self.until
        return self


def train(pool: ThreadPoolExecutor, trainer: Trainer) -> "Future[Trainer]":
    return pool.submit(trainer.train)


def weights_after(steps: int) -> float:
    return sum(1.0 + number for number in range(steps))


def test_peers_that_begin_together_do_the_same_steps(master: MasterThread) -> None:
    with ThreadPoolExecutor(3) as pool:
        trainers = [Trainer(master, until=20, min_world=3) for _ in range(3)]
        for future in [train(pool, trainer) for trainer in trainers]:
            trainer = future.result(DEADLINE_S)
            assert trainer.numbers == list(range(20))
            assert trainer.contributors == [3] * 20
            assert (trainer.weights == weights_after(20)).all()


def test_a_newcomer_begins_at_the_runs_step_with_the_runs_state(master: MasterThread) -> None:
    with ThreadPoolExecutor(3) as pool:
        old = [Trainer(master, until=LAST, min_world=2, enough=10) for _ in range(2)]
        old[0].pause_at = 10
        futures = [train(pool, trainer) for trainer in old]
        assert old[0].reached.wait(DEADLINE_S)
        new = Trainer(master, until=LAST, min_world=2, enough=10)
        new.weights[:] = -1
        futures.append(train(pool, new))
        old[0].go_on.set()
        trainers = [future.result(DEADLINE_S) for future in futures]
    steps = len(old[0].numbers)
    assert old[0].numbers == old[1].numbers == list(range(steps))
    assert new.numbers == list(range(steps - 10, steps))
    assert new.contributors == [3] * 10
    assert all((trainer.weights == weights_after(steps)).all() for trainer in trainers)


def test_with_too_few_peers_the_step_waits_and_logs_it(master: MasterThread, caplog: pytest.LogCaptureFixture) -> None:
    """Of three peers one leaves; the others wait inside or before the step until a new one comes, and go on with it."""
    with caplog.at_level(logging.INFO, "ringfold.steps"), ThreadPoolExecutor(4) as pool:
        trainers = [Trainer(master, until=30, min_world=3) for _ in range(3)]
        trainers[0].leave_at = 10
        futures = [train(pool, trainer) for trainer in trainers]
        futures[0].result(DEADLINE_S)
        new = Trainer(master, until=30, min_world=3)
        futures.append(train(pool, new))
        for future in futures[1:]:
            trainer = future.result(DEADLINE_S)
            assert (trainer.weights == weights_after(30)).all()
            assert set(trainer.contributors) == {3}
        assert new.numbers == list(range(10, 30))
        assert trainers[1].numbers == list(range(30))
    assert any("2 of at least 3 peers" in message for message in caplog.messages)


def test_waiting_for_peers_ends_at_its_deadline(master: MasterThread) -> None:
    trainer = Trainer(master, until=5, min_world=2, wait_s=0.2)
    with pytest.raises(rf.DeadlineExceeded):
        trainer.train()
    assert trainer.numbers == []


def test_a_peer_that_may_be_alone_goes_on_alone(master: MasterThread) -> None:
    trainer = Trainer(master, until=5, min_world=1)
    trainer.train()
    assert trainer.contributors == [1] * 5
    assert (trainer.weights == weights_after(5)).all()


def test_alone_the_result_is_copied_to_out(master: MasterThread) -> None:
    with rf.join(master.address) as run:
        for step in run.steps(until=1):
            out = np.zeros(3)
            step.all_reduce(np.ones(3), out=out)
            assert out.tolist() == [1, 1, 1]


@pytest.mark.parametrize("min_world", [1, 2, 3])
@pytest.mark.parametrize("looks", range(1, 9))
def test_ops_are_submitted_when_their_copies_are_filled(
    master: MasterThread, monkeypatch: pytest.MonkeyPatch, looks: int, min_world: int
) -> None:
    """A copy from a device may end between any two looks at it."""
    looked: dict[int, tuple[Spans, int]] = {}

    def is_filled(spans: Spans) -> bool:
        _, before = looked.get(id(spans), (spans, 0))
        looked[id(spans)] = spans, before + 1
        return before >= looks

    monkeypatch.setattr(Spans, "is_filled", is_filled)
    world = max(2, min_world)

    def work() -> list[float]:
        sums = []
        with rf.join(master.address, timeout_s=DEADLINE_S, op_timeout_s=DEADLINE_S) as run:
            while run.group_size < world:
                run.update_topology(min_world=world)
            for step in run.steps(until=4, min_world=min_world):
                arrays = [np.full((10, 2), 1.0 + tag)[:, 0] for tag in range(3)]
                handles = [step.all_reduce_async(array, tag=tag) for tag, array in enumerate(arrays)]
                if step.number % 2:
                    step.all_reduce(np.ones(1), tag=9)
                for handle in reversed(handles):
                    assert len(handle.wait().contributors) == world
                sums += [float(array.sum()) for array in arrays]
        return sums

    with ThreadPoolExecutor(world) as pool:
        for future in [pool.submit(work) for _ in range(world)]:
            assert future.result(DEADLINE_S) == [10.0 * world, 20.0 * world, 30.0 * world] * 4


def test_survivors_of_a_pair_join_forces_again(master: MasterThread) -> None:
    """With min_world=2 the last one waits inside its step; the peer that joins takes over its number and state."""
    with ThreadPoolExecutor(3) as pool:
        stays, leaves = Trainer(master, until=20, min_world=2), Trainer(master, until=20, min_world=2)
        leaves.leave_at = 7
        futures = [train(pool, stays), train(pool, leaves)]
        futures[1].result(DEADLINE_S)
        new = Trainer(master, until=20, min_world=2)
        assert train(pool, new).result(DEADLINE_S).numbers == list(range(7, 20))
        assert futures[0].result(DEADLINE_S).numbers == list(range(20))
        assert (new.weights == stays.weights).all()


def test_a_run_continues_from_the_revision_of_its_state(master: MasterThread) -> None:
    with rf.join(master.address) as run:
        state = rf.SharedState({"w": np.zeros(2)}, revision=7)
        assert [step.number for step in run.steps(state, until=10)] == [7, 8, 9]
        assert state.revision == 10


def test_states_with_other_names_are_refused(master: MasterThread) -> None:
    def one(name: str) -> None:
        with rf.join(master.address, timeout_s=DEADLINE_S, op_timeout_s=DEADLINE_S) as run:
            for _ in run.steps(rf.SharedState({name: np.zeros(2)}), until=1, min_world=2, wait_s=5):
                run.barrier()

    # The one that is refused leaves; the other may then be alone before its step begins, and waits for peers in vain.
    with ThreadPoolExecutor(2) as pool:
        errors = [future.exception(DEADLINE_S) for future in [pool.submit(one, name) for name in ("a", "b")]]
    assert any(isinstance(error, rf.StateError) for error in errors)


@pytest.mark.parametrize(
    "make",
    [
        lambda: rf.SharedState(),
        lambda: rf.SharedState({"a": np.zeros(1)}, a=np.zeros(1)),
        lambda: rf.SharedState({"": np.zeros(1)}),
        lambda: rf.SharedState(a=np.zeros(1), revision=-1),
    ],
)
def test_a_shared_state_that_makes_no_sense_is_refused(make: "type[rf.SharedState]") -> None:
    with pytest.raises(rf.UsageError):
        make()


def test_a_shared_state_lists_its_arrays_by_name() -> None:
    assert list(rf.SharedState({"b": np.zeros(1)}, a=np.zeros(1))) == ["a", "b"]


# What the loop decides, with a run of which the test is the master


class Session:
    """A session whose syncs go as the test says."""

    def __init__(self) -> None:
        self.syncs: list[Offer] = []
        self.outcomes: list[Callable[[Snapshot], SyncSucceeded]] = []
        self.machine = SimpleNamespace(synced=self._synced, has_written=lambda manifest: self.has_written)
        self.has_newcomers = self.has_written = False

    def _synced(self) -> None:
        self.has_newcomers = False

    def busy(self, up_to_s: float) -> AbstractContextManager[None]:
        return nullcontext()

    def sync(self, offer: Offer, snapshot: Snapshot, min_world: int, timeout_s: float, *, final: bool) -> SyncSucceeded:
        self.syncs.append(offer)
        if self.outcomes:
            return self.outcomes.pop(0)(snapshot)
        return SyncSucceeded(offer.revision, 0, 0)

    def locked(self, look: "Callable[[SimpleNamespace], T]") -> "T":
        return look(self.machine)


class Run:
    """As much of a communicator as the loop calls. Ops commit in `epoch`."""

    def __init__(self) -> None:
        self.session = Session()
        self.timeout_s = 1.0
        self.epoch, self.group_size, self.spans_groups = 1, 2, False
        self.pending = False
        self.updates = 0
        self.peer_id = 1
        self.steps: list[int | None] = []

    def set_step(self, step: int | None) -> None:
        self.steps.append(step)

    def _set_step(self, step: Step | None) -> None:
        self.step = step

    def leave(self) -> None:
        raise AssertionError("this loop was not stopped")

    @property
    def has_newcomers(self) -> bool:
        return self.session.has_newcomers

    def are_peers_pending(self) -> bool:
        return self.pending

    def update_topology(self, min_world: int = 0, timeout_s: float | None = None) -> None:
        self.updates += 1
        self.pending, self.session.has_newcomers = False, True

    def _admit(self, timeout_s: float) -> None:
        self.update_topology(timeout_s=timeout_s)

    def all_reduce(self, buffers: object, **more: object) -> rf.ReduceInfo:
        return rf.ReduceInfo((1, 2), self.epoch, 0, 0)


def looped(run: Run, state: rf.SharedState, **settings: object) -> "Iterator[Step]":
    made = StepSettings(**settings)  # type: ignore[arg-type]
    return steps(run, cast(Ops, run), state, made)  # type: ignore[arg-type]


def synced_at(run: Run) -> list[int]:
    return [offer.revision for offer in run.session.syncs]


def a_state(revision: int = 0) -> rf.SharedState:
    return rf.SharedState({"w": np.zeros(3)}, revision=revision)


def test_calls_are_named_by_their_step_and_by_none_afterwards() -> None:
    run = Run()
    assert [step.number for step in looped(run, rf.SharedState(a=np.zeros(3)), until=3)] == [0, 1, 2]
    assert run.steps == [0, 1, 2, None]


def test_a_sync_is_due_every_so_many_steps_and_at_the_end() -> None:
    run = Run()
    checked = [step.sync.checked for step in looped(run, a_state(1), until=9, check_every=4)]
    assert synced_at(run) == [4, 8, 9]
    assert checked == [False, False, False, True, False, False, False, True]


def test_offers_of_the_loop_say_that_it_counted() -> None:
    run = Run()
    list(looped(run, a_state(), until=1))
    assert [offer.stepped for offer in run.session.syncs] == [True, True]


def test_a_sync_follows_a_step_whose_op_was_committed_in_another_epoch() -> None:
    """Another epoch means an abort or a death: all members see it in the same op."""
    run = Run()
    for step in looped(run, a_state(1), until=8, check_every=100):
        if step.number == 3:
            run.epoch = 2
        step.all_reduce(np.zeros(1))
    assert synced_at(run) == [4, 8]


def test_an_epoch_that_no_op_ran_in_shakes_nothing() -> None:
    """One member may have received it already, and another one not yet."""
    run, checked = Run(), []
    for step in looped(run, a_state(1), until=4, check_every=100):
        checked.append(step.sync.checked)
        step.all_reduce(np.zeros(1))
        run.epoch = step.number // 2 + 1
    assert checked == [False, False, False], "the op of step 3 is the first in epoch 2"


def test_newcomers_are_synced_before_the_step_after_one_vote() -> None:
    run = Run()
    for step in looped(run, a_state(1), until=6, check_every=100):
        run.pending = step.number == 2
    assert (synced_at(run), run.updates) == ([3, 6], 1)


def test_a_newcomer_takes_the_runs_number() -> None:
    run = Run()
    run.session.has_newcomers = True
    run.session.outcomes = [lambda snapshot: SyncSucceeded(40, 0, 24)]
    state = a_state()
    assert [step.number for step in looped(run, state, until=42, check_every=100)] == [40, 41]
    assert state.revision == 42


def test_a_change_of_content_between_syncs_is_an_error_where_none_is_expected() -> None:
    run = Run()
    run.session.has_newcomers = True
    received = [lambda snapshot: SyncSucceeded(snapshot.manifest.revision, 0, 24)] * 2
    run.session.outcomes = list(received)
    loop = looped(run, a_state(1), until=9, check_every=4, expect_unchanged=True)
    assert [next(loop).number for _ in range(3)] == [1, 2, 3], "what a newcomer receives first is no surprise"
    with pytest.raises(rf.HashMismatch):
        next(loop)


def diverged(peer: int) -> Callable[[Snapshot], SyncSucceeded]:
    """A sync in which this peer was found to hold something else."""
    found = rf.Divergence(peer, "p", 4, 2, ["w"], 1, 24)
    return lambda snapshot: SyncSucceeded(snapshot.manifest.revision, 0, 24, (found,))


def test_a_peer_that_has_diverged_raises_where_that_is_wanted() -> None:
    run = Run()
    run.session.outcomes = [diverged(run.peer_id)]
    loop = looped(run, a_state(4), until=9, check_every=4, on_divergence="raise")
    with pytest.raises(rf.StateDiverged) as caught:
        next(loop)
    error = caught.value
    assert (error.peer, error.name, error.revision, error.since, error.keys) == (1, "p", 4, 2, ("w",))
    assert (error.key_count, error.received_bytes) == (1, 24)


@pytest.mark.parametrize(("peer", "on_divergence"), [(1, "repair"), (2, "raise")])
def test_a_divergence_that_is_repaired_or_another_peers_ends_no_loop(peer: int, on_divergence: str) -> None:
    run = Run()
    run.session.outcomes = [diverged(peer)]
    loop = looped(run, a_state(4), until=6, check_every=4, on_divergence=on_divergence)
    assert [len(step.sync.diverged) for step in loop] == [1, 0]


def test_a_divergence_in_the_last_steps_is_found_at_the_end() -> None:
    run = Run()
    loop = looped(run, a_state(1), until=3, on_divergence="raise")
    assert [next(loop).number for _ in range(2)] == [1, 2]
    run.session.outcomes = [diverged(run.peer_id)]
    with pytest.raises(rf.StateDiverged):
        next(loop)


def test_a_loop_without_a_state_has_nothing_to_compare_at_its_end() -> None:
    run = Run()
    made = StepSettings(until=3, check_every=100)
    assert len(list(steps(run, cast(Ops, run), None, made))) == 3  # type: ignore[arg-type]
    assert synced_at(run) == [0]


def test_what_to_do_on_divergence_is_one_of_two() -> None:
    with pytest.raises(rf.UsageError, match="repair, raise"):
        looped(Run(), a_state(), on_divergence="ignore")


@pytest.mark.parametrize("by", [-1, 2])
def test_a_step_counts_one(by: int) -> None:
    state = a_state(5)
    loop = looped(Run(), state, until=9)
    next(loop)
    state.revision += by
    with pytest.raises(rf.RevisionViolation) as caught:
        next(loop)
    assert (caught.value.expected, caught.value.got) == (6, 5 + by)


def test_a_program_may_count_the_step_itself() -> None:
    state = a_state(5)
    numbers = []
    for step in looped(Run(), state, until=8):
        numbers.append(step.number)
        state.push_revision()
    assert numbers == [5, 6, 7]


def failing(snapshot: Snapshot) -> SyncSucceeded:
    raise rf.DeadlineExceeded("sync_shared_state", (), 1, "too late")


def test_a_torn_state_goes_into_no_step() -> None:
    """Neither in the step that it happened in, nor in a new loop in which no sync would be due."""
    run, state = Run(), a_state(1)
    run.session.outcomes, run.session.has_written = [failing], True
    with pytest.raises(rf.DeadlineExceeded):
        list(looped(run, state, until=9, check_every=4))
    state.revision = 5
    with pytest.raises(rf.StateError, match="torn"):
        next(looped(run, state, until=9, check_every=4))


def test_a_torn_state_reduces_nothing_more_in_its_step() -> None:
    run, state = Run(), a_state(1)
    (step, *_) = looped(run, state, until=2)
    set_torn(state, True)
    with pytest.raises(rf.StateError, match="torn"):
        step.all_reduce(np.zeros(1))


def test_a_torn_state_is_healed_by_a_sync_that_is_due() -> None:
    run, state = Run(), a_state(4)
    set_torn(state, True)
    assert [step.number for step in looped(run, state, until=6, check_every=4)] == [4, 5]
    assert not state.torn


# Checkpoints


def test_checkpoints_are_saved_after_a_sync_and_at_the_end(tmp_path: Path) -> None:
    run = Run()
    list(looped(run, a_state(1), until=7, check_every=100, checkpoint=tmp_path, every=3))
    assert synced_at(run) == [3, 6, 7]
    assert Checkpoints(tmp_path).revisions() == [7, 6, 3]


def test_the_loop_begins_with_the_newest_checkpoint(tmp_path: Path) -> None:
    saved = a_state(5)
    saved.arrays["w"][:] = 3  # type: ignore[index]
    Checkpoints(tmp_path).save(saved)
    state = a_state()
    assert [step.number for step in looped(Run(), state, until=7, checkpoint=tmp_path)] == [5, 6]
    assert state.arrays["w"].tolist() == [3, 3, 3]  # type: ignore[attr-defined]


def test_a_second_loop_does_not_go_back_to_an_older_checkpoint(tmp_path: Path) -> None:
    Checkpoints(tmp_path).save(a_state(5))
    state = a_state(8)
    state.arrays["w"][:] = 3  # type: ignore[index]
    assert [step.number for step in looped(Run(), state, until=10, checkpoint=tmp_path)] == [8, 9]
    assert state.arrays["w"].tolist() == [3, 3, 3]  # type: ignore[attr-defined]


def test_a_disk_that_fails_does_not_end_the_training(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    there = tmp_path / "file"
    run = Run()
    loop = looped(run, a_state(1), until=7, check_every=100, checkpoint=there, every=3)
    there.write_text("no directory")
    assert [step.number for step in loop] == [1, 2, 3, 4, 5, 6]
    assert any("no checkpoint of step 3" in message for message in caplog.messages)


def test_a_newcomer_to_a_run_that_is_past_its_end_calls_nothing_more(tmp_path: Path) -> None:
    """The run goes on with steps that it does not take part in: no peer would come to a second sync."""
    run, state = Run(), a_state()
    run.session.has_newcomers = True
    run.session.outcomes = [lambda snapshot: SyncSucceeded(40, 0, 24)]
    assert list(looped(run, state, until=30, checkpoint=tmp_path)) == []
    assert len(run.session.syncs) == 1
    assert state.revision == 40
    assert Checkpoints(tmp_path).revisions() == [40]


def test_a_group_that_has_shrunk_waits_before_it_syncs() -> None:
    run = Run()

    def too_few(snapshot: Snapshot) -> SyncSucceeded:
        run.group_size = 1
        raise rf.TooFewPeers(1, 2)

    def update_topology(min_world: int = 0, timeout_s: float | None = None) -> None:
        run.updates += 1
        run.group_size = min_world

    run.session.outcomes = [too_few]
    run.update_topology = update_topology  # type: ignore[method-assign]
    assert [step.number for step in looped(run, a_state(4), until=5, check_every=4, min_world=2)] == [4]
    assert (synced_at(run), run.updates) == ([4, 4, 5], 1)


@pytest.mark.parametrize("min_world", [1, 2])
def test_after_its_first_op_a_step_goes_on_with_the_survivors(min_world: int) -> None:
    run, calls = Run(), []

    def all_reduce(buffers: np.ndarray, **more: object) -> rf.ReduceInfo:
        calls.append(run.group_size)
        if run.group_size == 1:
            raise rf.TooFewPeers(1, 2)
        return rf.ReduceInfo((1, 2), run.epoch, 0, 0)

    def update_topology(min_world: int = 0, timeout_s: float | None = None) -> None:
        run.updates += 1
        run.group_size = 2

    run.all_reduce = all_reduce  # type: ignore[method-assign]
    run.update_topology = update_topology  # type: ignore[method-assign]
    contributors = []
    for step in looped(run, a_state(), until=2, min_world=min_world):
        if step.number == 1:
            run.group_size = 1 if min_world == 1 else 2
        contributors.append(len(step.all_reduce(np.ones(3)).contributors))
        run.group_size = 1
        contributors.append(len(step.all_reduce(np.ones(3)).contributors))
    assert contributors == ([2, 1, 1, 1] if min_world == 1 else [2, 1, 2, 1])
    assert run.updates == min_world - 1
