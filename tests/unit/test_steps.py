"""The training loop: numbers, admission, sync, waiting and retry come out the same on all peers."""

import logging
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import numpy.typing as npt
import pytest

import ringfold as rf
from ringfold.master.server import MasterThread

DEADLINE_S = 30.0
LAST = 20_000
Weights = npt.NDArray[np.float64]


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
                self.contributors.append(step.all_reduce(gradients, op="avg").contributors)
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


def test_with_too_few_peers_the_step_waits_and_says_so(master: MasterThread, caplog: pytest.LogCaptureFixture) -> None:
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


def test_survivors_of_a_pair_join_forces_again(master: MasterThread) -> None:
    """With min_world=2 the last one waits inside its step; whoever comes takes over its number and state."""
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
