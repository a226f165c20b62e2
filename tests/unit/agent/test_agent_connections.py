"""Clients of an agent are served in turns."""

import asyncio
import os
import socket
from collections.abc import Callable

import pytest

from ringfold.agent.connections import ClientConnection, ClientScheduler, CpuBudget
from ringfold.agent.events import Event, MalformedMessageReceived, MessageReceived
from ringfold.wire.agent import AskAgent, agent_frame


class Hall:
    """Writes down who was heard, in order."""

    def __init__(self) -> None:
        self.heard: list[int] = []
        self.rounds = 0
        self.dropped: set[int] = set()
        self.last = 0

    def step(self, event: Event) -> None:
        assert isinstance(event, MessageReceived | MalformedMessageReceived)
        self.heard.append(event.client)
        if isinstance(event, MalformedMessageReceived):
            self.dropped.add(event.client)

    def decide(self) -> None:
        self.rounds += 1

    def opened(self, door: ClientConnection, uid: int, pid: int) -> int:
        assert (uid, pid) == (os.geteuid(), os.getpid())
        self.last += 1
        return self.last

    def lost(self, client: int) -> None:
        self.dropped.add(client)

    def is_open(self, client: int) -> bool:
        return client not in self.dropped


async def turns(holds: Callable[[], bool]) -> None:
    """Let the loop turn until something holds."""
    for _ in range(100_000):
        if holds():
            return
        await asyncio.sleep(0)
    raise AssertionError("it did not come to that")


async def said(*contents: bytes, wanted: int) -> Hall:
    """What each of several clients sent at the same time, until so many were heard."""
    hall = Hall()
    rounds, loop = ClientScheduler(hall), asyncio.get_running_loop()
    ours = []
    for _ in contents:
        mine, theirs = socket.socketpair()
        ours.append(mine)
        await loop.connect_accepted_socket(lambda: ClientConnection(rounds), theirs)
    for mine, content in zip(ours, contents, strict=True):
        mine.sendall(content)
    await turns(lambda: len(hall.heard) >= wanted)
    for mine in ours:
        mine.close()
    await turns(lambda: len(hall.dropped) == len(contents))
    return hall


ASK = agent_frame(AskAgent(1))


def test_a_client_with_one_question_does_not_wait_for_one_with_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ringfold.agent.connections.TURN_NS", 0)
    hall = asyncio.run(said(ASK * 500, ASK, wanted=501))
    assert (hall.heard.count(1), hall.heard.count(2)) == (500, 1)
    assert hall.heard.index(2) < 10


def test_the_agent_gets_to_other_things_between_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ringfold.agent.connections.TURN_NS", 0)
    monkeypatch.setattr("ringfold.agent.connections.BATCH_NS", 0)
    hall = asyncio.run(said(ASK * 200, wanted=200))
    assert hall.rounds >= 200


class Insatiable(ClientConnection):
    """Always has something left to do."""

    turns = 0

    def serve(self, until_ns: int) -> bool:
        self.turns += 1
        return False


async def served(rounds: ClientScheduler) -> int:
    """How many turns such a client has while the loop turns a thousand times."""
    door = Insatiable(rounds)
    rounds.ask(door)
    for _ in range(1_000):
        await asyncio.sleep(0)
    return door.turns


def test_clients_that_ask_without_end_wait_when_their_part_is_used_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ringfold.agent.connections.BATCH_NS", 0)
    assert asyncio.run(served(ClientScheduler(Hall()))) > 900
    for name, value in (("CPU_SHARE", 0), ("BURST_NS", 1), ("REST_S", 3_600)):
        monkeypatch.setattr(f"ringfold.agent.connections.{name}", value)
    assert asyncio.run(served(ClientScheduler(Hall()))) == 1


def test_nothing_is_heard_of_a_client_after_its_garbage() -> None:
    hall = asyncio.run(said(ASK * 3 + b"\xff" * 64 + ASK * 50, ASK * 2, wanted=6))
    assert (hall.heard.count(1), hall.heard.count(2)) == (4, 2)


def test_an_allowance_is_a_part_of_the_time_and_what_was_saved() -> None:
    allowance = CpuBudget(0.5, 100)
    assert not allowance.is_spent
    allowance.spend(1_000, 1_100)
    assert not allowance.is_spent  # the savings were just enough
    allowance.spend(1_100, 1_110)
    assert allowance.is_spent
    allowance.spend(1_130, 1_130)
    assert not allowance.is_spent  # half of the time since makes up for it
    allowance.spend(10**9, 10**9 + 101)
    assert allowance.is_spent  # nobody saves for ever
