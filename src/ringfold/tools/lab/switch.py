"""The switch of a lab measures its real queues, and sends them to the hosts' agents: telemetry as from hardware.

A queue of the switch is the shaper of the port towards one host on one path (`down` in `model.py`). All
traffic to that host on that path passes it, so the switch sends every other host one UDP packet: the congestion from
that host to the destination, on that path. A packet has the addresses of the pair on its path, and the path's number in
the lab.

How congested: 0 to 200 is how full the queue is, of the shaper's limit. No more than that, because a full queue is what
every TCP makes of a path that it has for itself: to call it backpressure would make a sender stop using the path that
it uses well, and again as soon as it came back. 255, backpressure, is a queue that throws away a good part of
what comes, as no TCP alone makes it: a sender ignores congestion.
"""

import contextlib
import errno
import math
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Literal, Self

from ringfold.config import TELEMETRY_PORT
from ringfold.runtime.netlink import QdiscReader, interface_index
from ringfold.tools.lab.model import SWITCH
from ringfold.tools.lab.network import Lab
from ringfold.wire.telemetry import (
    FULL_QUEUE,
    MAX_CONGESTION,
    Congestion,
    Packet,
    address_number,
    encode,
)

OVERRUN_FROM = 0.15
"""The part of all packets that is lost in a queue that is overrun."""
_LOST_OVER_S = 0.1
_LOST = frozenset(
    {
        errno.EAGAIN,
        errno.ECONNREFUSED,
        errno.ENETUNREACH,
        errno.EHOSTUNREACH,
        errno.ENETDOWN,
        errno.ENOBUFS,
        errno.EPERM,
    }
)


@dataclass(frozen=True, slots=True)
class Queue:
    """What waits at one end of a cable: at the host's (`up`) or at the switch's (`down`)."""

    host: str
    path: str
    end: Literal["up", "down"]
    backlog_bytes: int
    limit_bytes: int
    drops: int
    sent_bytes: int
    sent_packets: int


@dataclass(frozen=True, slots=True)
class Sample:
    """The queue that packets from `source` to `destination` wait in, inside the switch, on one path."""

    source: str
    destination: str
    path: str
    backlog_bytes: int
    limit_bytes: int
    lost: float = 0.0
    """The part of the packets that it has thrown away lately."""

    @property
    def congestion(self) -> int:
        """0 is empty, 200 full, 255 overrun. Without a limit it is never full; with anything in it it is not empty."""
        if not self.backlog_bytes or not self.limit_bytes:
            return 0
        if self.lost >= OVERRUN_FROM:
            return MAX_CONGESTION
        return max(1, min(FULL_QUEUE, FULL_QUEUE * self.backlog_bytes // self.limit_bytes))


class Losses:
    """What part of the packets each queue throws away, over the last tenth of a second or so."""

    def __init__(self) -> None:
        self._last: dict[tuple[str, str], tuple[float, Queue]] = {}
        self._seen: dict[tuple[str, str], tuple[float, float]] = {}

    def of(self, now_s: float, queue: Queue) -> float:
        """Called with each reading of a queue, in turn."""
        name = queue.host, queue.path
        then_s, before = self._last.get(name, (now_s, queue))
        self._last[name] = now_s, queue
        keep = math.exp(-(now_s - then_s) / _LOST_OVER_S)
        # A shaper that was replaced, for another rate, counts from zero again.
        lost, sent = (part * keep for part in self._seen.get(name, (0.0, 0.0)))
        lost += max(0, queue.drops - before.drops)
        sent += max(0, queue.sent_packets - before.sent_packets)
        self._seen[name] = lost, sent
        return lost / (lost + sent) if lost + sent >= 1 else 0.0


class Queues:
    """Reads the queues of a lab, as a context. Not for several threads at once."""

    def __init__(self, lab: Lab, ends: Sequence[Literal["up", "down"]] = ("up", "down")) -> None:
        self._open = contextlib.ExitStack()
        self._places: list[tuple[QdiscReader, int, str, str, Literal["up", "down"]]] = []
        try:
            if "down" in ends:
                with lab.within(SWITCH):
                    reader = self._open.enter_context(QdiscReader())
                    for host in lab.hosts:
                        for path in lab.paths:
                            self._places.append((reader, interface_index(lab.port(host, path)), host, path, "down"))
            for host in lab.hosts if "up" in ends else ():
                with lab.within(host):
                    reader = self._open.enter_context(QdiscReader())
                    for path in lab.paths:
                        self._places.append((reader, interface_index(path), host, path, "up"))
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def read(self) -> list[Queue]:
        """What waits now. A cable end without a shaper has no queue and is left out."""
        found = []
        for reader, index, host, path, end in self._places:
            root = reader.root(index)
            if root is not None and root.kind == "tbf":
                figures = (root.backlog_bytes, root.limit_bytes, root.drops, root.sent_bytes, root.sent_packets)
                found.append(Queue(host, path, end, *figures))
        return found

    def close(self) -> None:
        self._open.close()


class Telemetry:
    """A thread that measures the switch's queues every `every_ms` and passes each sample to `send`, as a context."""

    def __init__(self, lab: Lab, send: Callable[[Sample], None], *, every_ms: float = 5.0) -> None:
        if every_ms < 0.5:
            raise ValueError(f"the switch measures every 0.5 ms at most, not every {every_ms}")
        self._send, self._every_s, self._hosts = send, every_ms / 1_000, lab.hosts
        self._queues = Queues(lab, ["down"])
        self._stop = threading.Event()
        self._thread = threading.Thread(name="ringfold-lab-telemetry", target=self._run, daemon=True)
        self.rounds = 0
        """How often it has measured."""

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join()
        self._queues.close()

    def _run(self) -> None:
        due, losses = time.monotonic(), Losses()
        while not self._stop.is_set():
            for queue in self._queues.read():
                figures = (queue.backlog_bytes, queue.limit_bytes, losses.of(time.monotonic(), queue))
                for source in self._hosts:
                    if source != queue.host:
                        self._send(Sample(source, queue.host, queue.path, *figures))
            self.rounds += 1
            # A round that was late is not made up for: telemetry is about now.
            due = max(due + self._every_s, time.monotonic())
            self._stop.wait(max(0.0, due - time.monotonic()))


class TelemetrySender:
    """Sends samples to the agents of the hosts that send into the queues, from the switch, over the path `via`."""

    def __init__(
        self,
        lab: Lab,
        port: int = TELEMETRY_PORT,
        *,
        via: str | int = 0,
        key: bytes | None = None,
        key_id: int = 0,
    ) -> None:
        # A socket for each: what waits for one host, behind a queue that is full, must not hold up the others.
        self._sockets: dict[str, socket.socket] = {}
        with lab.within(SWITCH):
            for host in lab.hosts:
                kind = socket.SOCK_DGRAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC
                self._sockets[host] = socket.socket(socket.AF_INET, kind)
                self._sockets[host].connect((lab.address(host, via), port))
        self._lab, self._key, self._key_id = lab, key, None if key is None else key_id
        self._sequence = time.time_ns()
        self.sent = self.lost = 0

    def __call__(self, sample: Sample) -> None:
        ends = (self._lab.address(end, sample.path) for end in (sample.source, sample.destination))
        source, destination = map(address_number, ends)
        path = self._lab.plan.path(sample.path)
        body = Congestion(source, destination, path, sample.congestion, sample.backlog_bytes)
        self._sequence += 1
        packet = encode(Packet(body, self._sequence, time.time_ns(), key_id=self._key_id), self._key)
        try:
            self._sockets[sample.source].send(packet)
            self.sent += 1
        except OSError as error:
            # Nothing listens there, or a queue is full: telemetry gets lost like everything else.
            if error.errno not in _LOST:
                raise
            self.lost += 1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        for each in self._sockets.values():
            each.close()
