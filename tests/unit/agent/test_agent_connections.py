"""The clients of an agent are served in turn."""

import asyncio
import os
import socket
from collections.abc import Callable

import pytest

from ringfold.agent.connections import ClientConnection, ClientScheduler, CpuBudget
from ringfold.agent.events import Event, MalformedMessageReceived, MessageReceived
from ringfold.wire.agent import AskAgent, agent_frame


class RecordingHost:
    """Records the clients whose messages were received, in order."""

    def __init__(self) -> None:
        self.received: list[int] = []
        self.batches = 0
        self.dropped: set[int] = set()
        self.last = 0

    def step(self, event: Event) -> None:
        assert isinstance(event, MessageReceived | MalformedMessageReceived)
        self.received.append(event.client)
        if isinstance(event, MalformedMessageReceived):
            self.dropped.add(event.client)

    def decide(self) -> None:
        self.batches += 1

    def connection_opened(self, connection: ClientConnection, uid: int, pid: int) -> int:
        assert (uid, pid) == (os.geteuid(), os.getpid())
        self.last += 1
        return self.last

    def connection_closed(self, client: int) -> None:
        self.dropped.add(client)

    def is_open(self, client: int) -> bool:
        return client not in self.dropped


async def run_until(holds: Callable[[], bool]) -> None:
    """Run the event loop until `holds` returns true."""
    for _ in range(100_000):
        if holds():
            return
        await asyncio.sleep(0)
    raise AssertionError("the condition was never true")


async def exchange(*contents: bytes, wanted: int) -> RecordingHost:
    """Let several clients send at the same time, until `wanted` messages were received."""
    host = RecordingHost()
    scheduler, loop = ClientScheduler(host), asyncio.get_running_loop()
    ours = []
    for _ in contents:
        mine, theirs = socket.socketpair()
        ours.append(mine)
        await loop.connect_accepted_socket(lambda: ClientConnection(scheduler), theirs)
    for mine, content in zip(ours, contents, strict=True):
        mine.sendall(content)
    await run_until(lambda: len(host.received) >= wanted)
    for mine in ours:
        mine.close()
    await run_until(lambda: len(host.dropped) == len(contents))
    return host


REQUEST = agent_frame(AskAgent(1))


def test_a_client_with_one_request_does_not_wait_for_one_with_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ringfold.agent.connections.TURN_NS", 0)
    host = asyncio.run(exchange(REQUEST * 500, REQUEST, wanted=501))
    assert (host.received.count(1), host.received.count(2)) == (500, 1)
    assert host.received.index(2) < 10


def test_the_event_loop_does_other_work_between_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ringfold.agent.connections.TURN_NS", 0)
    monkeypatch.setattr("ringfold.agent.connections.BATCH_NS", 0)
    host = asyncio.run(exchange(REQUEST * 200, wanted=200))
    assert host.batches >= 200


class Insatiable(ClientConnection):
    """Always has requests left."""

    turns = 0

    def serve(self, deadline_ns: int) -> bool:
        self.turns += 1
        return False


async def served(scheduler: ClientScheduler) -> int:
    """How many turns such a client gets in a thousand iterations of the event loop."""
    connection = Insatiable(scheduler)
    scheduler.enqueue(connection)
    for _ in range(1_000):
        await asyncio.sleep(0)
    return connection.turns


def test_clients_that_send_without_end_wait_when_their_cpu_share_is_used_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ringfold.agent.connections.BATCH_NS", 0)
    assert asyncio.run(served(ClientScheduler(RecordingHost()))) > 900
    for name, value in (("CPU_SHARE", 0), ("BURST_NS", 1), ("REST_S", 3_600)):
        monkeypatch.setattr(f"ringfold.agent.connections.{name}", value)
    assert asyncio.run(served(ClientScheduler(RecordingHost()))) == 1


def test_a_client_is_not_served_after_a_malformed_message() -> None:
    host = asyncio.run(exchange(REQUEST * 3 + b"\xff" * 64 + REQUEST * 50, REQUEST * 2, wanted=6))
    assert (host.received.count(1), host.received.count(2)) == (4, 2)


def test_a_cpu_budget_is_a_share_of_the_time_plus_savings() -> None:
    budget = CpuBudget(0.5, 100)
    assert not budget.is_spent
    budget.spend(1_000, 1_100)
    assert not budget.is_spent  # the savings were just enough
    budget.spend(1_100, 1_110)
    assert budget.is_spent
    budget.spend(1_130, 1_130)
    assert not budget.is_spent  # half of the time since then was earned
    budget.spend(10**9, 10**9 + 101)
    assert budget.is_spent  # savings are bounded
