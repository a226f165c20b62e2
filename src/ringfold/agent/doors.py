"""The connections of an agent's clients. Bytes in, events out, and nobody can take the agent from the others.

Requests cost more than they weigh: twenty bytes may ask for a list of half a megabyte. So:

- *Turns.* What a client asked for is worked off TURN_NS at a time, in turn with the other clients, and after ROUND_NS
  of that the loop does something else: the heartbeat, telemetry, the interfaces. While a client has something left to
  be worked off, nothing more is read from it.
- *No more than half.* An agent asks for a better nice value than the programs beside it, and whoever asks without end
  must not use that against them. Clients together get PART of a core; what they did not use, up to BURST_NS, is kept
  for when many flows come at once.
- *Who does not read is not read from.* A client with more than MAX_QUEUED_BYTES of answers in front of it is not served
  until it has taken them.
- *All who do not read together* may have MOST_UNREAD_BYTES in front of them. When it is more, whoever has not read for
  the longest is given up.
"""

import asyncio
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from ringfold.agent.machine import ClientMalformed, ClientSaid, Event
from ringfold.agent.registry import Client
from ringfold.errors import RemoteProtocolError
from ringfold.runtime.clock import monotonic_ns
from ringfold.runtime.local import credentials
from ringfold.runtime.process import close_on_fork, keep_on_fork
from ringfold.wire.agent import MAX_REQUEST_BYTES, FromAgent, agent_frame, decode_to_agent
from ringfold.wire.frames import FrameKind, FrameReader

TURN_NS = 200_000
ROUND_NS = 2_000_000
REST_S = 0.002
PART = 0.5
BURST_NS = 1_000_000_000
MAX_QUEUED_BYTES = 256 * 1024
MOST_UNREAD_BYTES = 32 * 1024 * 1024
READ_BYTES = 32 * 1024
_TOGETHER_BYTES = 64 * 1024
"""Answers go out together up to this."""


class Hall(Protocol):
    """What a door needs of the agent behind it."""

    def step(self, event: Event) -> None: ...

    def decide(self) -> None: ...

    def opened(self, door: "Door", uid: int, pid: int) -> Client: ...

    def lost(self, client: Client) -> None: ...

    def is_open(self, client: Client) -> bool: ...


@dataclass(slots=True)
class Allowance:
    """A part of the time for something that others decide the amount of, and what was saved of it, up to `most_ns`."""

    part: float
    most_ns: float
    left_ns: float = 0
    ended_ns: int = 0

    def spend(self, began_ns: int, ended_ns: int) -> None:
        """It took so long. The first time, all that can be saved has been."""
        earned_ns = self.part * (ended_ns - self.ended_ns) if self.ended_ns else self.most_ns
        self.left_ns = min(self.most_ns, self.left_ns + earned_ns) - (ended_ns - began_ns)
        self.ended_ns = ended_ns

    @property
    def is_spent(self) -> bool:
        return self.left_ns < 0


class Rounds:
    """All doors of one agent: whose turn it is, and who does not read."""

    def __init__(self, hall: Hall) -> None:
        self.hall = hall
        self.room = memoryview(bytearray(READ_BYTES))
        """Where every door's bytes arrive. They are taken out at once, so one is enough for all."""
        self._waiting: deque[Door] = deque()
        self._is_due = False
        self._allowance = Allowance(PART, BURST_NS)
        self._unread: dict[Door, None] = {}

    def ask(self, door: "Door") -> None:
        """This door has something to do."""
        self._waiting.append(door)
        self._come_back()

    def _come_back(self) -> None:
        if self._is_due:
            return
        self._is_due, loop = True, asyncio.get_running_loop()
        if self._allowance.is_spent:
            loop.call_later(REST_S, self._round)
        else:
            loop.call_soon(self._round)

    def _round(self) -> None:
        self._is_due = False
        began_ns = monotonic_ns()
        until_ns = began_ns + ROUND_NS
        while self._waiting:
            door = self._waiting.popleft()
            if not door.serve(monotonic_ns() + TURN_NS):
                self._waiting.append(door)
            if monotonic_ns() >= until_ns:
                break
        self.hall.decide()
        self._allowance.spend(began_ns, monotonic_ns())
        if self._waiting:
            self._come_back()

    def reads_not(self, door: "Door") -> None:
        self._unread[door] = None
        while len(self._unread) > 1 and sum(each.queued for each in self._unread) > MOST_UNREAD_BYTES:
            next(iter(self._unread)).give_up()

    def reads(self, door: "Door") -> None:
        self._unread.pop(door, None)


class Door(asyncio.BufferedProtocol):
    """One client's connection. The answers of one turn go out together."""

    def __init__(self, rounds: Rounds) -> None:
        self._rounds, self._hall = rounds, rounds.hall
        self._frames = FrameReader(MAX_REQUEST_BYTES)
        self._requests: Iterator[tuple[FrameKind, bytes]] = iter(())
        self._transport: asyncio.Transport | None = None
        self._client: Client = 0
        self._fd = -1
        self._answers: list[bytes] = []
        self._answer_bytes = 0
        self._is_serving = self._is_clogged = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        sock = transport.get_extra_info("socket")
        self._fd = sock.fileno()
        close_on_fork(self._fd)
        transport.set_write_buffer_limits(high=MAX_QUEUED_BYTES)
        who = credentials(sock)
        self._client = self._hall.opened(self, who.uid, who.pid)

    # In

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._rounds.room

    def buffer_updated(self, size: int) -> None:
        assert self._transport is not None
        self._requests = self._frames.feed(bytes(self._rounds.room[:size]))
        self._transport.pause_reading()
        self._rounds.ask(self)

    def serve(self, until_ns: int) -> bool:
        """Do what was asked for until that time; whether there is nothing left to do now."""
        self._is_serving = True
        is_done = self._work(until_ns)
        self._is_serving = False
        self._flush()
        if is_done and not self._is_clogged and self._transport is not None:
            self._transport.resume_reading()
        return is_done

    def _work(self, until_ns: int) -> bool:
        try:
            while not self._is_clogged and self._hall.is_open(self._client):
                request = next(self._requests, None)
                if request is None:
                    return True
                self._hall.step(ClientSaid(self._client, decode_to_agent(*request)))
                if monotonic_ns() >= until_ns:
                    return False
        except RemoteProtocolError as error:
            self._hall.step(ClientMalformed(self._client, str(error)))
        return True

    # Out

    @property
    def queued(self) -> int:
        """Bytes in front of the client."""
        return 0 if self._transport is None else self._transport.get_write_buffer_size()

    def answer(self, message: FromAgent) -> None:
        self._answers.append(agent_frame(message))
        self._answer_bytes += len(self._answers[-1])
        if not self._is_serving or self._answer_bytes >= _TOGETHER_BYTES:
            self._flush()

    def _flush(self) -> None:
        answers, self._answers, self._answer_bytes = self._answers, [], 0
        if answers and self._transport is not None and not self._transport.is_closing():
            self._transport.write(b"".join(answers))

    def pause_writing(self) -> None:
        self._is_clogged = True
        self._rounds.reads_not(self)

    def resume_writing(self) -> None:
        self._is_clogged = False
        self._rounds.reads(self)
        self._rounds.ask(self)

    # The end

    def leave(self) -> None:
        """Close after what was answered. What the client does not read within a moment is not worth waiting for."""
        if self._transport is None:
            return
        self._is_serving = False
        self._flush()
        self._transport.close()
        asyncio.get_running_loop().call_later(1.0, self._transport.abort)

    def give_up(self) -> None:
        """It does not read."""
        self._rounds.reads(self)
        if self._transport is not None:
            self._transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        keep_on_fork(self._fd)
        self._rounds.reads(self)
        self._hall.lost(self._client)
