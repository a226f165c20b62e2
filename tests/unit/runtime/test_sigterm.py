"""SIGTERM is taken over by a training loop, and given back whatever ends the loop."""

import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import ringfold as rf
from ringfold.master.server import MasterThread
from ringfold.runtime.sigterm import Sigterm

DEADLINE_S = 30.0


@pytest.fixture
def master() -> Iterator[MasterThread]:
    with MasterThread() as running:
        yield running


@pytest.fixture
def handled() -> Iterator[list[int]]:
    """The signals that a handler of the program's own has got."""
    got: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: got.append(number))
    yield got
    signal.signal(signal.SIGTERM, before)


def current() -> object:
    return signal.getsignal(signal.SIGTERM)


@pytest.mark.parametrize("end", ["until", "break", "error in the loop", "error in a step"])
def test_the_former_handler_is_back_however_the_loop_ends(master: MasterThread, handled: list[int], end: str) -> None:
    former = current()
    with rf.join(master.address) as run:
        try:
            state = rf.SharedState(a=np.zeros(3))
            for step in run.steps(state, until=3):
                assert current() != former
                if end == "break" and step.number == 1:
                    break
                if end == "error in the loop":
                    state.revision += 2
                if end == "error in a step":
                    raise ValueError
        except (rf.RevisionViolation, ValueError):
            assert end.startswith("error")
        assert current() == former
    assert handled == []


def test_a_handler_that_the_program_sets_inside_the_loop_stays(master: MasterThread, handled: list[int]) -> None:
    with rf.join(master.address) as run:
        for _ in run.steps(until=1):
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
    assert current() is signal.SIG_IGN


def test_handle_sigterm_false_leaves_the_signal_alone(master: MasterThread, handled: list[int]) -> None:
    former = current()
    with rf.join(master.address) as run:
        for _ in run.steps(until=1, handle_sigterm=False):
            assert current() == former


def test_an_ignored_signal_stays_ignored(master: MasterThread, handled: list[int]) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    with rf.join(master.address) as run:
        made = []
        for step in run.steps(until=2):
            os.kill(os.getpid(), signal.SIGTERM)
            made.append(step.number)
        assert made == [0, 1]


def test_a_loop_in_another_thread_leaves_the_signal_alone(master: MasterThread, handled: list[int]) -> None:
    former = current()

    def loop() -> list[object]:
        with rf.join(master.address) as run:
            return [current() for _ in run.steps(until=1)]

    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(loop).result(DEADLINE_S) == [former]


def test_the_loop_ends_at_the_next_boundary_and_the_peer_has_left(master: MasterThread, handled: list[int]) -> None:
    numbers = []
    with rf.join(master.address) as run:
        for step in run.steps():
            numbers.append(step.number)
            if step.number == 2:
                os.kill(os.getpid(), signal.SIGTERM)
                assert handled == []
        assert handled == [signal.SIGTERM]
        with pytest.raises(rf.UsageError, match="left the run"):
            run.barrier()
    assert numbers == [0, 1, 2]


def test_a_signal_is_not_lost_when_the_program_breaks_off(master: MasterThread, handled: list[int]) -> None:
    came = threading.Event()
    signal.signal(signal.SIGTERM, lambda number, frame: came.set())
    with rf.join(master.address) as run:
        for _ in run.steps():
            os.kill(os.getpid(), signal.SIGTERM)
            break
        assert came.wait(DEADLINE_S)


def test_a_second_signal_goes_to_the_former_handler_at_once(handled: list[int]) -> None:
    sigterm = Sigterm(DEADLINE_S, lambda: None)
    assert sigterm.install()
    os.kill(os.getpid(), signal.SIGTERM)
    assert (sigterm.is_requested, handled) == (True, [])
    os.kill(os.getpid(), signal.SIGTERM)
    assert handled == [signal.SIGTERM]
    sigterm.deliver()
    sigterm.uninstall()
    assert handled == [signal.SIGTERM], "the former handler runs once for both"


def test_at_the_end_of_the_grace_foreign_code_is_interrupted_after_the_abort(handled: list[int]) -> None:
    done: list[str] = []
    came = threading.Event()

    def handle(number: int, frame: object) -> None:
        done.append("handler")
        came.set()

    signal.signal(signal.SIGTERM, handle)
    sigterm = Sigterm(0.05, lambda: done.append("aborted"))
    assert sigterm.install()
    sigterm.is_inside = False
    os.kill(os.getpid(), signal.SIGTERM)
    assert came.wait(DEADLINE_S)
    sigterm.uninstall()
    assert done == ["aborted", "handler"]


def test_two_loops_in_each_other_both_end(handled: list[int]) -> None:
    """The inner one was the last to take the signal over, and hands it on to the outer one."""
    done: list[str] = []
    outer = Sigterm(DEADLINE_S, lambda: done.append("outer"))
    inner = Sigterm(DEADLINE_S, lambda: done.append("inner"))
    assert outer.install()
    assert inner.install()
    os.kill(os.getpid(), signal.SIGTERM)
    assert (inner.is_requested, outer.is_requested) == (True, False)
    inner.abort()
    inner.deliver()
    inner.uninstall()
    assert (outer.is_requested, handled) == (True, [])
    outer.abort()
    outer.deliver()
    outer.uninstall()
    assert (done, handled) == (["inner", "outer"], [signal.SIGTERM])
