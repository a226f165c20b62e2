"""The shell around a peer's machine: what a program may rely on when a session ends under its call."""

import queue
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from ringfold._native import EngineEvent
from ringfold.errors import RingfoldError, UsageError
from ringfold.peer import session as session_module
from ringfold.peer.effects import CallFinished, Effect, Ended, SyncSucceeded, WriteBlocks
from ringfold.peer.engine import Engine
from ringfold.peer.events import BlocksWritten, CallBusy, CallLeave, CallVote, Closed, Event
from ringfold.peer.machine import PeerMachine
from ringfold.peer.session import Session
from ringfold.peer.settings import Identity, PeerTimings
from ringfold.probe.nodes.shell import NodeShell
from ringfold.probe.rounds.events import MasterConnected, MasterDisconnected, MasterMessageReceived
from ringfold.runtime.clock import monotonic_ns
from ringfold.state.shared import SharedState
from ringfold.state.snapshot import Snapshot
from ringfold.wire import frames
from ringfold.wire.probing import ProbeHalt, RoundAlarm, RoundId

DEADLINE_S = 30.0
IDENTITY = Identity(group=0, host="h", name="n", addresses=("127.0.0.1",), port=1)


def engine_event(kind: str, **fields: object) -> EngineEvent:
    """An event as the engine reports it, with these fields."""
    return cast(EngineEvent, SimpleNamespace(kind=kind, **fields))


class BrokenEngine:
    """An engine that fails on demand, and takes its time to close its sockets."""

    def __init__(self) -> None:
        self.broken = threading.Event()
        self.returned = threading.Event()
        self.was_early: bool | None = None

    def next_event(self, timeout_s: float) -> None:
        if self.broken.wait(timeout_s):
            raise OSError("out of order")

    def dial(
        self, host: str, port: int, timeout_ms: int, source: str = "", name: str = "", little: bool = False
    ) -> int:
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


def test_no_call_returns_before_the_engine_is_shut_down() -> None:
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
    """The node of a peer of which every method fails."""

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


def test_a_node_that_cannot_be_closed_delays_nothing() -> None:
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


def test_a_peer_is_busy_until_the_last_of_its_blocks_ends() -> None:
    deadlines: list[int] = []
    session = Session(cast(Engine, cast(Any, BrokenEngine())), IDENTITY, PeerTimings())
    step = session.machine.step

    def note(now_ns: int, event: Event) -> list[Effect]:
        if isinstance(event, CallBusy):
            deadlines.append(0 if not event.until_ns else round((event.until_ns - now_ns) / 1e9))
        return step(now_ns, event)

    session.machine.step = note  # type: ignore[method-assign]
    with session.busy(100):
        with session.busy(900), session.busy(50):
            pass
        with pytest.raises(KeyError), session.busy(300):
            raise KeyError
    assert deadlines == [100, 900, 900, 900, 100, 300, 100, 0]
    session.engine.broken.set()  # type: ignore[attr-defined]


@pytest.mark.parametrize("up_to_s", [0, -1, float("nan"), float("inf"), 8 * 86_400])
def test_a_busy_without_a_sensible_end_is_refused(up_to_s: float) -> None:
    engine = BrokenEngine()
    session = Session(cast(Engine, cast(Any, engine)), IDENTITY, PeerTimings())
    with pytest.raises(UsageError, match="up to a week"), session.busy(up_to_s):
        pass
    engine.broken.set()


class ScriptedEngine(WakefulEngine):
    """An engine that reports what a test puts into it, and keeps what is sent."""

    def __init__(self) -> None:
        super().__init__()
        self.reports: queue.SimpleQueue[EngineEvent] = queue.SimpleQueue()
        self.sent: list[tuple[int, bytes]] = []

    def next_event(self, timeout_s: float) -> EngineEvent | None:  # type: ignore[override]
        try:
            return self.reports.get(timeout=min(timeout_s, 0.01))
        except queue.Empty:
            return None

    def send(self, conn: int, body: bytes) -> None:
        self.sent.append((conn, body))


class ProvenMachine:
    """A machine with a proven master; it counts the events that reach it."""

    def __init__(self) -> None:
        self.control_conn: int | None = 7
        self.peer = 5
        self.ended = False
        self.events: list[Event] = []

    def next_deadline_ns(self) -> int | None:
        return None

    def step(self, now_ns: int, event: Event) -> list[Effect]:
        self.events.append(event)
        if isinstance(event, Closed):
            self.control_conn = None
        if isinstance(event, CallLeave):
            self.ended = True
            return [Ended(None)]
        return []


class RecordingNode:
    """A probing shell that keeps its inputs."""

    def __init__(self) -> None:
        self.inputs: queue.SimpleQueue[object] = queue.SimpleQueue()

    def due_s(self) -> float:
        return 60.0

    def tick(self) -> None:
        return None

    def step(self, event: object) -> None:
        self.inputs.put(event)

    def close(self) -> None:
        return None


def test_messages_about_probing_go_past_the_machine() -> None:
    """From the master to the probing shell and back; without a master its messages are dropped, and it knows."""
    engine, machine, node = ScriptedEngine(), ProvenMachine(), RecordingNode()
    session = Session(cast(Engine, cast(Any, engine)), IDENTITY, PeerTimings())
    session.machine = cast(PeerMachine, cast(Any, machine))
    session.probing = cast(NodeShell, cast(Any, node))
    halt = ProbeHalt(RoundId(1, 1), "stopped")
    engine.reports.put(engine_event("message", conn=7, body=frames.encode(halt)))
    assert node.inputs.get(timeout=DEADLINE_S) == MasterConnected(5)
    assert node.inputs.get(timeout=DEADLINE_S) == MasterMessageReceived(halt)
    alarm = RoundAlarm(RoundId(1, 1), 5, 6, 1_000, 2_000)
    session.locked(lambda _: session._send_probe_message(alarm))
    assert engine.sent == [(7, frames.encode(alarm))]
    assert machine.events == []
    engine.reports.put(engine_event("closed", conn=7, text="reset"))
    assert isinstance(node.inputs.get(timeout=DEADLINE_S), MasterDisconnected)
    session.locked(lambda _: session._send_probe_message(alarm))
    assert len(engine.sent) == 1
    assert machine.events == [Closed(7, "reset")]
    session.close()
    assert node.inputs.empty()


class SlowTransfer:
    """A copy that takes until it is allowed to end."""

    is_in_place = False

    def __init__(self) -> None:
        self.running, self.may_end = threading.Event(), threading.Event()
        self.writer: threading.Thread | None = None

    def write(self, effect: WriteBlocks) -> BlocksWritten:
        self.writer = threading.current_thread()
        self.running.set()
        assert self.may_end.wait(DEADLINE_S)
        return BlocksWritten(effect.conn, effect.batch, effect.bad)


class SyncingSession:
    """A session whose machine wants one batch written as soon as a sync is called, and ends the sync when it is."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.transfer = SlowTransfer()
        monkeypatch.setattr(session_module, "BlockTransfer", lambda snapshot: self.transfer)
        self.engine = WakefulEngine()
        self.engine.progress = list  # type: ignore[attr-defined]
        self.session = Session(cast(Engine, cast(Any, self.engine)), IDENTITY, PeerTimings())
        self.session.machine.step = self._step  # type: ignore[method-assign]
        self.events: list[Event] = []

    def _step(self, now_ns: int, event: Event) -> list[Effect]:
        self.events.append(event)
        match event:
            case CallVote():
                return [WriteBlocks(1, 0, ())]
            case BlocksWritten():
                return [CallFinished(1, SyncSucceeded(7, 0, 4))]
        return []

    def sync(self) -> object:
        snapshot = Snapshot.take(SharedState(a=np.zeros(4)))
        return self.session.sync(snapshot.manifest.offer("enforce-popular"), snapshot, 0, DEADLINE_S)

    def end(self) -> None:
        self.engine.broken.set()
        self.engine.wake()


def test_blocks_are_copied_without_the_lock(monkeypatch: pytest.MonkeyPatch) -> None:
    of = SyncingSession(monkeypatch)
    with ThreadPoolExecutor(2) as pool:
        syncing = pool.submit(of.sync)
        assert of.transfer.running.wait(DEADLINE_S)
        looking = pool.submit(of.session.locked, lambda machine: "free")
        assert looking.result(DEADLINE_S) == "free"
        assert not syncing.done()
        of.transfer.may_end.set()
        assert syncing.result(DEADLINE_S) == SyncSucceeded(7, 0, 4)
    of.end()


def test_blocks_that_arrived_in_place_are_not_queued_and_end_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    of = SyncingSession(monkeypatch)
    of.transfer.is_in_place = True
    of.transfer.may_end.set()
    assert of.sync() == SyncSucceeded(7, 0, 4)
    assert threading.current_thread() is of.transfer.writer
    of.end()


def test_no_sync_returns_while_a_copy_runs_and_what_comes_of_the_copy_is_dropped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The call may end at any moment, by a deadline or Ctrl-C; its arrays must be at rest when the program has them."""
    of = SyncingSession(monkeypatch)
    with ThreadPoolExecutor(1) as pool:
        syncing = pool.submit(of.sync)
        assert of.transfer.running.wait(DEADLINE_S)
        with of.session._changed:
            of.session._outcomes[1] = SyncSucceeded(8, 0, 0)
            of.session._changed.notify_all()
            while of.session._transfer is not None:
                of.session._changed.wait(0.01)
        assert not syncing.done()
        of.transfer.may_end.set()
        assert syncing.result(DEADLINE_S) == SyncSucceeded(8, 0, 0)
    of.end()
    of.session._thread.join(DEADLINE_S)
    assert not any(isinstance(event, BlocksWritten) for event in of.events)
