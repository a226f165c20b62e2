"""The connections of an agent's clients: bytes in, events out. No client can starve the others or the agent.

A request can cost far more than its size: twenty bytes may request a list of half a megabyte. So:

- *Turns.* The requests of a client are served for TURN_NS at a time, in turn with the other clients. After BATCH_NS the
  event loop does other work: the heartbeat, telemetry, the interfaces. While a client has requests left, nothing more
  is read from it.
- *A bounded share of the CPU.* An agent requests a better nice value than the programs beside it, and clients must not
  use that against those programs. All clients together get CPU_SHARE of a core. Unused time is saved, up to BURST_NS,
  for when many flows are registered at once.
- *Backpressure.* A client with more than MAX_QUEUED_BYTES of unread responses is not served until it reads.
- *Bounded memory.* All clients that do not read may have MAX_UNREAD_BYTES queued together. Beyond that, the client that
  has not read for longest is disconnected.
"""

import asyncio
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from ringfold.agent.events import Event, MalformedMessageReceived, MessageReceived
from ringfold.agent.registry import Client
from ringfold.errors import RemoteProtocolError
from ringfold.runtime.clock import monotonic_ns
from ringfold.runtime.local import credentials
from ringfold.runtime.process import close_on_fork, keep_on_fork
from ringfold.wire.agent import MAX_REQUEST_BYTES, FromAgent
from ringfold.wire.agent_fixed import ClientCodec
from ringfold.wire.frames import FrameKind, FrameReader

TURN_NS = 200_000
BATCH_NS = 2_000_000
REST_S = 0.002
"""How long work rests that has used up its share of the CPU."""
CPU_SHARE = 0.5
BURST_NS = 1_000_000_000
CLOSE_TIMEOUT_S = 1.0
"""How long a connection that is being closed waits until its client has read the last responses."""
MAX_QUEUED_BYTES = 256 * 1024
MAX_UNREAD_BYTES = 32 * 1024 * 1024
READ_BYTES = 32 * 1024
_FLUSH_BYTES = 64 * 1024
"""Responses are joined into one write up to this size."""


class Host(Protocol):
    """The part of the agent that its connections use."""

    def step(self, event: Event) -> None: ...

    def decide(self) -> None: ...

    def connection_opened(self, connection: "ClientConnection", uid: int, pid: int) -> Client: ...

    def connection_closed(self, client: Client) -> None: ...

    def is_open(self, client: Client) -> bool: ...


@dataclass(slots=True)
class CpuBudget:
    """A share of the time for work whose amount others decide. Unused time is saved, up to `max_saved_ns`."""

    share: float
    max_saved_ns: float
    left_ns: float = 0
    last_end_ns: int = 0

    def spend(self, began_ns: int, ended_ns: int) -> None:
        """Count work that took this long. Before the first time, the most that can be saved is there."""
        earned_ns = self.share * (ended_ns - self.last_end_ns) if self.last_end_ns else self.max_saved_ns
        self.left_ns = min(self.max_saved_ns, self.left_ns + earned_ns) - (ended_ns - began_ns)
        self.last_end_ns = ended_ns

    @property
    def is_spent(self) -> bool:
        return self.left_ns < 0


class ClientScheduler:
    """Serves all connections of one agent in turn, and disconnects clients that do not read."""

    def __init__(self, host: Host) -> None:
        self.host = host
        self.read_buffer = memoryview(bytearray(READ_BYTES))
        """Shared by all connections: each takes its bytes out at once."""
        self._ready: deque[ClientConnection] = deque()
        self._is_scheduled = False
        self._budget = CpuBudget(CPU_SHARE, BURST_NS)
        self._blocked: dict[ClientConnection, None] = {}
        """The connections whose clients do not read; the first one has not read for longest."""

    def enqueue(self, connection: "ClientConnection") -> None:
        """Serve this connection when its turn comes."""
        self._ready.append(connection)
        self._schedule()

    def _schedule(self) -> None:
        if self._is_scheduled:
            return
        self._is_scheduled = True
        loop = asyncio.get_running_loop()
        if self._budget.is_spent:
            loop.call_later(REST_S, self._serve_batch)
        else:
            loop.call_soon(self._serve_batch)

    def _serve_batch(self) -> None:
        self._is_scheduled = False
        began_ns = monotonic_ns()
        deadline_ns = began_ns + BATCH_NS
        while self._ready:
            connection = self._ready.popleft()
            if not connection.serve(monotonic_ns() + TURN_NS):
                self._ready.append(connection)
            if monotonic_ns() >= deadline_ns:
                break
        self.host.decide()
        self._budget.spend(began_ns, monotonic_ns())
        if self._ready:
            self._schedule()

    def on_write_blocked(self, connection: "ClientConnection") -> None:
        self._blocked[connection] = None
        while len(self._blocked) > 1 and sum(each.queued_bytes for each in self._blocked) > MAX_UNREAD_BYTES:
            next(iter(self._blocked)).abort()

    def on_write_resumed(self, connection: "ClientConnection") -> None:
        self._blocked.pop(connection, None)


class ClientConnection(asyncio.BufferedProtocol):
    """The connection of one client. The responses of one turn are written together."""

    def __init__(self, scheduler: ClientScheduler) -> None:
        self._scheduler, self._host = scheduler, scheduler.host
        self._frames, self._codec = FrameReader(MAX_REQUEST_BYTES), ClientCodec()
        self._requests: Iterator[tuple[FrameKind, bytes]] = iter(())
        self._transport: asyncio.Transport | None = None
        self._client: Client = 0
        self._fd = -1
        self._responses: list[bytes] = []
        self._response_bytes = 0
        self._is_serving = False
        self._is_write_blocked = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        sock = transport.get_extra_info("socket")
        self._fd = sock.fileno()
        close_on_fork(self._fd)
        transport.set_write_buffer_limits(high=MAX_QUEUED_BYTES)
        remote = credentials(sock)
        self._client = self._host.connection_opened(self, remote.uid, remote.pid)

    # Requests

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._scheduler.read_buffer

    def buffer_updated(self, size: int) -> None:
        assert self._transport is not None
        self._requests = self._frames.feed(bytes(self._scheduler.read_buffer[:size]))
        self._transport.pause_reading()
        self._scheduler.enqueue(self)

    def serve(self, deadline_ns: int) -> bool:
        """Serve requests until the deadline; return whether none is left, or none can be served now."""
        self._is_serving = True
        is_done = self._serve_requests(deadline_ns)
        self._is_serving = False
        self._flush()
        if is_done and not self._is_write_blocked and self._transport is not None:
            self._transport.resume_reading()
        return is_done

    def _serve_requests(self, deadline_ns: int) -> bool:
        try:
            while not self._is_write_blocked and self._host.is_open(self._client):
                request = next(self._requests, None)
                if request is None:
                    return True
                self._host.step(MessageReceived(self._client, self._codec.decode(*request)))
                if monotonic_ns() >= deadline_ns:
                    return False
        except RemoteProtocolError as error:
            self._host.step(MalformedMessageReceived(self._client, str(error)))
        return True

    # Responses

    @property
    def queued_bytes(self) -> int:
        """Bytes that the client has not read."""
        return 0 if self._transport is None else self._transport.get_write_buffer_size()

    def send(self, message: FromAgent) -> None:
        self._responses.append(self._codec.encode(message))
        self._response_bytes += len(self._responses[-1])
        if not self._is_serving or self._response_bytes >= _FLUSH_BYTES:
            self._flush()

    def _flush(self) -> None:
        responses, self._responses, self._response_bytes = self._responses, [], 0
        if responses and self._transport is not None and not self._transport.is_closing():
            self._transport.write(b"".join(responses))

    def pause_writing(self) -> None:
        self._is_write_blocked = True
        self._scheduler.on_write_blocked(self)

    def resume_writing(self) -> None:
        self._is_write_blocked = False
        self._scheduler.on_write_resumed(self)
        self._scheduler.enqueue(self)

    # The end

    def close(self) -> None:
        """Close after the queued responses, and after CLOSE_TIMEOUT_S even if the client has not read them."""
        if self._transport is None:
            return
        self._is_serving = False
        self._flush()
        self._transport.close()
        asyncio.get_running_loop().call_later(CLOSE_TIMEOUT_S, self._transport.abort)

    def abort(self) -> None:
        """Disconnect a client that does not read."""
        self._scheduler.on_write_resumed(self)
        if self._transport is not None:
            self._transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        keep_on_fork(self._fd)
        self._scheduler.on_write_resumed(self)
        self._host.connection_closed(self._client)
