"""The shell around a peer's machine: what a program may rely on when a session ends under its call."""

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

import pytest

from ringfold.dataplane.engine import Engine
from ringfold.errors import RingfoldError
from ringfold.peer.session import Session
from ringfold.peer.settings import Identity, PeerTimings
from ringfold.probe.shell import NodeShell
from ringfold.runtime.clock import monotonic_ns

DEADLINE_S = 30.0


class BrokenEngine:
    """An engine that fails when it is told to, and takes its time to let go of its sockets."""

    def __init__(self) -> None:
        self.broken = threading.Event()
        self.returned = threading.Event()
        self.was_early: bool | None = None

    def next_event(self, timeout_s: float) -> None:
        if self.broken.wait(timeout_s):
            raise OSError("out of order")

    def dial(self, host: str, port: int, timeout_ms: int, source: str = "") -> int:
        return 1

    def wake(self) -> None:
        return None

    def fail_all(self, status: int, reason: bytes) -> None:
        return None

    def shutdown(self) -> None:
        self.was_early = self.returned.wait(0.2)

    def before_fork(self) -> None:
        return None

    def forked_parent(self) -> None:
        return None


def test_nobody_returns_from_a_call_before_the_engine_has_let_go() -> None:
    """Until then it may still write blocks of a state into the program's arrays."""
    engine = BrokenEngine()
    identity = Identity(group=0, host="h", name="n", addresses=("127.0.0.1",), port=1)
    session = Session(cast(Engine, cast(Any, engine)), identity, PeerTimings())

    def join() -> None:
        try:
            session.join((("127.0.0.1", 1),), monotonic_ns() + 60_000_000_000)
        finally:
            engine.returned.set()

    with ThreadPoolExecutor(1) as pool:
        joining = pool.submit(join)
        engine.broken.set()
        with pytest.raises(RingfoldError, match="out of order"):
            joining.result(DEADLINE_S)
    assert engine.was_early is False


class WakefulEngine(BrokenEngine):
    """One that can be woken."""

    def __init__(self) -> None:
        super().__init__()
        self.returned.set()
        self.woken = threading.Event()

    def next_event(self, timeout_s: float) -> None:
        self.woken.wait(timeout_s)
        self.woken.clear()
        if self.broken.is_set():
            raise OSError("out of order")

    def wake(self) -> None:
        self.woken.set()


class FailingNode:
    """The node of a peer that fails whatever is asked of it."""

    def __init__(self) -> None:
        self.ticked = threading.Event()
        self.closed = threading.Event()

    def due_s(self) -> float:
        return 0.0

    def tick(self) -> None:
        self.ticked.set()
        raise ValueError("a fit went wrong")

    def close(self) -> None:
        self.closed.set()
        raise OSError("and the log as well")


def test_a_node_that_fails_does_not_end_the_peer(caplog: pytest.LogCaptureFixture) -> None:
    engine, node = WakefulEngine(), FailingNode()
    identity = Identity(group=0, host="h", name="n", addresses=("127.0.0.1",), port=1)
    session = Session(cast(Engine, cast(Any, engine)), identity, PeerTimings())
    session.probing = cast(NodeShell, cast(Any, node))
    with ThreadPoolExecutor(1) as pool:
        joining = pool.submit(session.join, (("127.0.0.1", 1),), monotonic_ns() + 60_000_000_000)
        assert node.ticked.wait(DEADLINE_S)
        assert node.closed.wait(DEADLINE_S)
        session.locked(lambda machine: None)
        assert session.probing is None
        assert not session.is_over
        engine.broken.set()
        engine.wake()
        with pytest.raises(RingfoldError, match="out of order"):
            joining.result(DEADLINE_S)
    assert "goes on without it" in caplog.text


def test_a_node_that_cannot_be_closed_keeps_nobody_waiting() -> None:
    engine = BrokenEngine()
    engine.returned.set()
    identity = Identity(group=0, host="h", name="n", addresses=("127.0.0.1",), port=1)
    session = Session(cast(Engine, cast(Any, engine)), identity, PeerTimings())
    session.probing = cast(NodeShell, cast(Any, FailingNode()))
    with ThreadPoolExecutor(1) as pool:
        joining = pool.submit(session.join, (("127.0.0.1", 1),), monotonic_ns() + 60_000_000_000)
        engine.broken.set()
        with pytest.raises(RingfoldError, match="out of order"):
            joining.result(DEADLINE_S)
