"""A simulated network: hosts, and connections between them as two ordered pipes of bytes.

What a connection promises is what TCP promises: bytes arrive in order, unchanged, in pieces of any size, or the
connection ends. What the network may do to it:

- every direction of a pair of hosts has its own latency, jitter, rate and window, drawn from the seed. Jitter never
  reorders inside a connection; between connections (two lanes of a link) everything may overtake everything;
- a sender may have at most a window of bytes in flight that the receiver has not read yet. A full window means that
  no more is taken from the sender, until there is room again (`Process.writable`);
- a blocked direction holds bytes back, and connection requests too; they go on when it heals. A partition that lasts
  may reset the connections that cross it;
- a host may have several addresses, one per path; from an address of one host to one of another, conditions are their
  own, and a path may be cut or slow while the others are not. What happens to a pair of hosts happens to all its paths;
- a killed process's connections end at the other side, after what is still in flight or a part of it. A host that
  lost its power sends nothing at all;
- a frozen process reads nothing and runs nothing, while the others' bytes queue up and time goes on.
"""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from random import Random
from typing import Protocol

from ringfold.testing.scheduler import MS, Scheduler

REFUSED = "connection refused"
TIMED_OUT = "connection timed out"
RESET = "connection reset by peer"
CLOSED = "connection closed by the other side"


def on_path(host: str, path: int) -> str:
    """The address of a host on one of its paths."""
    return host if path == 0 else f"{host}@{path}"


def host_of(address: str) -> str:
    return address.split("@")[0]


class Process(Protocol):
    """What the network calls on the process that runs on a host."""

    def accepted(self, end: "End") -> None:
        """A client connected to the port that this process listens on."""

    def opened(self, end: "End") -> None:
        """A connection that this process dialled is established."""

    def received(self, end: "End", chunk: bytes) -> None: ...

    def writable(self, end: "End") -> None:
        """There is room in a window that was full."""

    def lost(self, end: "End", reason: str) -> None:
        """The connection ended, or was never made. Nothing more comes from it."""

    def woken(self) -> None:
        """The process runs again after a freeze."""


@dataclass(slots=True)
class Link:
    """One direction between two hosts."""

    latency_ns: int
    jitter_ns: int
    bytes_per_ms: int
    window_bytes: int
    cuts: int = 0
    """How many faults block this direction right now."""
    dials_refused: bool = False
    dials_dropped: bool = False

    @property
    def blocked(self) -> bool:
        return self.cuts > 0


@dataclass(frozen=True, slots=True)
class Weather:
    """The ranges that links are drawn from."""

    latency_us: tuple[int, int] = (20, 2_000)
    jitter_us: tuple[int, int] = (0, 500)
    bytes_per_ms: tuple[int, int] = (20_000, 1_000_000)
    window_bytes: tuple[int, int] = (1_024, 65_536)
    split_chance: float = 0.3
    """How often one write arrives in several pieces."""

    def draw(self, rng: Random) -> "Link":
        """One direction between two hosts."""
        return Link(
            latency_ns=rng.randint(*self.latency_us) * 1_000,
            jitter_ns=rng.randint(*self.jitter_us) * 1_000,
            bytes_per_ms=rng.randint(*self.bytes_per_ms),
            window_bytes=rng.randint(*self.window_bytes),
        )


class _What(Enum):
    OPENED = "opened"
    ACCEPTED = "accepted"
    DATA = "data"
    END = "end"


class SimulatedHost:
    """One machine with one process on it."""

    def __init__(self, name: str, process: Process) -> None:
        self.name, self.process = name, process
        self.alive = True
        self.frozen = False
        self.dark = False
        """It has no power: nothing answers, not even its kernel."""
        self.ends: dict[int, End] = {}
        self.listening: set[int] = set()


class End:
    """One end of a connection, as the process on its host holds it."""

    __slots__ = ("closed", "established", "host", "id", "inbound", "other", "outbound", "paused", "remote", "starved")

    def __init__(self, number: int, host: SimulatedHost, remote: SimulatedHost) -> None:
        self.id, self.host, self.remote = number, host, remote
        self.closed = False
        self.established = False
        self.paused = False
        """The process does not want to read now; see `Network.read_on`."""
        self.starved = False
        """The process had more to send than fitted; `writable` is called when there is room."""
        self.outbound: _Pipe
        self.inbound: _Pipe
        self.other: End

    @property
    def room(self) -> int:
        """How many bytes may be sent now."""
        return 0 if self.closed else self.outbound.link.window_bytes - self.outbound.in_flight

    def __repr__(self) -> str:
        return f"{self.host.name}>{self.remote.name}#{self.id}"


class _Pipe:
    """The bytes of one direction of one connection that are in flight."""

    __slots__ = ("busy_until", "in_flight", "last_arrival", "link", "queue", "scheduled", "source", "stalled", "target")

    def __init__(self, link: Link, source: End, target: End) -> None:
        self.link, self.source, self.target = link, source, target
        self.queue: deque[tuple[int, _What, bytes]] = deque()
        self.in_flight = 0
        self.busy_until = 0
        self.last_arrival = 0
        self.scheduled = False
        self.stalled = False


class Network:
    """All hosts and connections of a simulated run."""

    def __init__(self, scheduler: Scheduler, weather: Weather | None = None) -> None:
        self.scheduler = scheduler
        self.weather = weather or Weather()
        self.hosts: dict[str, SimulatedHost] = {}
        self.bytes_delivered = 0
        self._links: dict[tuple[str, str], Link] = {}
        self._ends = 0
        self._stalled: list[_Pipe] = []

    # What processes call

    def add_host(self, name: str, process: Process) -> SimulatedHost:
        """A machine with a process on it. Where a process has died, another one may be started."""
        host = self.hosts.get(name)
        if host is None:
            host = self.hosts[name] = SimulatedHost(name, process)
        elif host.alive or host.dark:
            raise ValueError(f"there is a host {name} already")
        host.process, host.alive, host.frozen = process, True, False
        return host

    def dial(self, host: SimulatedHost, target: str, port: int, timeout_ns: int, source: str = "") -> End:
        """Connect to a port of `target`. The process gets `opened`, or `lost` if there is no answer in time."""
        remote = self.hosts.get(host_of(target))
        near_address = source or host.name
        there, back = self.link(near_address, target), self.link(target, near_address)
        near = self._pair(host, remote or SimulatedHost(host_of(target), host.process), there, back)
        trip_ns = self._delay(there) + self._delay(back)
        if there.dials_dropped:
            self.scheduler.after(timeout_ns, self._fail, near, TIMED_OUT)
        elif there.dials_refused or remote is None:
            self.scheduler.after(trip_ns, self._fail, near, REFUSED)
        else:
            self._push(near.outbound, self.scheduler.now + self._delay(there), _What.ACCEPTED, port.to_bytes(2, "big"))
            self.scheduler.after(timeout_ns, self._expire, near)
        return near

    def send(self, end: End, chunk: bytes) -> None:
        """Put bytes in flight. The caller keeps to `end.room`."""
        if not chunk or end.closed:
            return
        pipe, link, scheduler = end.outbound, end.outbound.link, self.scheduler
        assert len(chunk) <= end.room, f"{end}: {len(chunk)} bytes into a window with room for {end.room}"
        pipe.in_flight += len(chunk)
        pieces: Iterable[bytes] = (chunk,)
        if len(chunk) > 1 and scheduler.rng.random() < self.weather.split_chance:
            pieces = self._split(chunk)
        depart = max(scheduler.now, pipe.busy_until)
        for piece in pieces:
            depart += len(piece) * MS // link.bytes_per_ms
            self._push(pipe, depart + self._delay(link), _What.DATA, piece)
        pipe.busy_until = depart

    def read_on(self, end: End) -> None:
        """The process wants to read again from an end that it had paused."""
        end.paused = False
        pipe = end.inbound
        if pipe.stalled and not pipe.link.cuts and not end.host.frozen:
            self._stalled.remove(pipe)
            pipe.stalled, pipe.scheduled = False, True
            self.scheduler.after(0, self._arrive, pipe)

    def close(self, end: End) -> None:
        """End the connection from this side; what was sent before still arrives."""
        if not end.closed:
            self._release(end)
            self._push(end.outbound, self.scheduler.now + self._delay(end.outbound.link), _What.END, CLOSED.encode())

    # What happens to hosts and links

    def link(self, source: str, target: str) -> Link:
        """The conditions from one host or address to another, drawn at first use."""
        link = self._links.get((source, target))
        if link is None:
            link = self._links[source, target] = self.weather.draw(self.scheduler.rng)
            hosts = host_of(source), host_of(target)
            if hosts != (source, target):  # faults of the hosts also apply to a path that was not used yet
                whole = self.link(*hosts)
                link.cuts, link.dials_refused, link.dials_dropped = whole.cuts, whole.dials_refused, whole.dials_dropped
        return link

    def links(self, source: str, target: str) -> list[Link]:
        """All ways from one host to another that are known; from one address to another, that one."""
        self.link(source, target)
        wanted = (source, target)
        return [link for ends, link in self._links.items() if ends == wanted or tuple(map(host_of, ends)) == wanted]

    def block(self, source: str, target: str) -> None:
        """Hold everything back in this direction until `unblock` was called as often."""
        for link in self.links(source, target):
            link.cuts += 1

    def unblock(self, source: str, target: str) -> None:
        for link in self.links(source, target):
            link.cuts -= 1
            assert link.cuts >= 0, f"{source} -> {target} was not blocked"
        self._go_on()

    def reset_between(self, one: str, two: str) -> None:
        """Both ends of every connection between two hosts find out that it is gone."""
        if one in self.hosts:
            for end in list(self.hosts[one].ends.values()):
                if end.remote.name == two:
                    other = end.other
                    self._fail(end, TIMED_OUT)
                    self._fail(other, TIMED_OUT)

    def reset_path(self, one: str, two: str, keep: int = 0) -> int:
        """Both ends of every connection between two addresses, except the first `keep`, find out that it is gone."""
        ways = {id(self.link(one, two)), id(self.link(two, one))}
        host = self.hosts.get(host_of(one))
        ends = [] if host is None else [end for end in host.ends.values() if id(end.outbound.link) in ways]
        for end in ends[keep:]:
            other = end.other
            self._fail(end, TIMED_OUT)
            self._fail(other, TIMED_OUT)
        return len(ends[keep:])

    def kill(self, host: SimulatedHost) -> None:
        """The process ends; its kernel closes every connection. What it had sent arrives, or a part of it."""
        host.alive = False
        host.listening.clear()
        for end in list(host.ends.values()):
            self._release(end)
            pipe = end.outbound
            if self.scheduler.rng.random() < 0.5:
                self._truncate(pipe)
            self._push(pipe, self.scheduler.now + self._delay(pipe.link), _What.END, RESET.encode())

    def power_off(self, host: SimulatedHost) -> None:
        """The host is gone and closes no connection: nothing arrives from it any more, or gets through to it."""
        host.alive, host.dark = False, True
        for end in list(host.ends.values()):
            self._release(end)
            self._truncate(end.outbound)

    def freeze(self, host: SimulatedHost) -> None:
        host.frozen = True

    def wake(self, host: SimulatedHost) -> None:
        host.frozen = False
        if host.alive:
            host.process.woken()
        self._go_on()

    # Inside

    def _pair(self, host: SimulatedHost, remote: SimulatedHost, there: Link, back: Link) -> End:
        self._ends += 2
        near, far = End(self._ends, host, remote), End(self._ends + 1, remote, host)
        near.other, far.other = far, near
        near.outbound = far.inbound = _Pipe(there, near, far)
        far.outbound = near.inbound = _Pipe(back, far, near)
        host.ends[near.id] = near
        return near

    def _delay(self, link: Link) -> int:
        return link.latency_ns + int(link.jitter_ns * self.scheduler.rng.random())

    def _split(self, chunk: bytes) -> list[bytes]:
        cuts = sorted(self.scheduler.rng.randrange(1, len(chunk)) for _ in range(self.scheduler.rng.randint(1, 3)))
        return [chunk[a:b] for a, b in zip([0, *cuts], [*cuts, len(chunk)], strict=True) if a < b]

    def _push(self, pipe: _Pipe, arrival: int, what: _What, payload: bytes) -> None:
        # Never before what was sent earlier on the same connection.
        pipe.last_arrival = arrival = max(arrival, pipe.last_arrival)
        pipe.queue.append((arrival, what, payload))
        if not pipe.scheduled and not pipe.stalled:
            pipe.scheduled = True
            self.scheduler.at(arrival, self._arrive, pipe)

    def _go_on(self) -> None:
        """Let the pipes go on whose way has become free."""
        stalled, self._stalled = self._stalled, []
        for pipe in stalled:
            if pipe.link.cuts or pipe.target.host.frozen or pipe.target.paused:
                self._stalled.append(pipe)
            else:
                pipe.stalled = False
                pipe.scheduled = True
                self.scheduler.after(self._delay(pipe.link), self._arrive, pipe)

    def _arrive(self, pipe: _Pipe) -> None:
        """Hand over what has arrived; stop where the way is blocked or the receiver sleeps."""
        pipe.scheduled = False
        scheduler, target, queue = self.scheduler, pipe.target, pipe.queue
        while queue and queue[0][0] <= scheduler.now:
            if pipe.link.cuts or target.host.frozen or target.paused:
                pipe.stalled = True
                self._stalled.append(pipe)
                return
            if target.host.dark:
                queue.clear()
                return
            _, what, payload = queue.popleft()
            if what is _What.DATA:
                pipe.in_flight -= len(payload)
                if not target.closed:
                    self.bytes_delivered += len(payload)
                    scheduler.trace.bytes_moved(scheduler.now, payload)
                    target.host.process.received(target, payload)
            elif what is _What.ACCEPTED:
                self._accept(pipe, int.from_bytes(payload, "big"))
            elif what is _What.OPENED:
                if not target.closed:
                    target.established = True
                    target.host.process.opened(target)
            else:
                self._fail(target, payload.decode())
        if queue and not pipe.scheduled:
            pipe.scheduled = True
            scheduler.at(queue[0][0], self._arrive, pipe)
        source = pipe.source
        if source.starved and not source.closed:
            source.starved = False
            scheduler.after(pipe.link.latency_ns, self._room, source)

    def _room(self, end: End) -> None:
        if end.closed:
            return
        if end.host.frozen:
            end.starved = True  # it requests it again when it wakes
            return
        end.host.process.writable(end)

    def _accept(self, pipe: _Pipe, port: int) -> None:
        far, host = pipe.target, pipe.target.host
        answer = self.scheduler.now + self._delay(far.outbound.link)
        if not host.alive or port not in host.listening:
            far.closed = True
            self._push(far.outbound, answer, _What.END, REFUSED.encode())
            return
        host.ends[far.id] = far
        far.established = True
        self._push(far.outbound, answer, _What.OPENED, b"")
        host.process.accepted(far)

    def _expire(self, near: End) -> None:
        # The request or its answer is still held back somewhere: the dialler's kernel gives up.
        if not near.established:
            self._fail(near, TIMED_OUT)

    def _fail(self, end: End, reason: str) -> None:
        if end.closed:
            return
        if end.id not in end.host.ends:
            end.closed = True  # a request that never became a connection: its host knows nothing of it
            return
        if end.host.frozen:
            self._push(end.inbound, self.scheduler.now, _What.END, reason.encode())
            return
        self._release(end)
        # The other side is notified, unless it knows already: a half-open connection does not stay.
        other = end.other
        if not other.closed and (other.established or end.outbound.queue):
            self._push(end.outbound, self.scheduler.now + self._delay(end.outbound.link), _What.END, RESET.encode())
        end.host.process.lost(end, reason)

    def _release(self, end: End) -> None:
        end.closed, end.paused = True, False
        end.host.ends.pop(end.id, None)

    def _truncate(self, pipe: _Pipe) -> None:
        """Lose a random tail of what is in flight."""
        keep = self.scheduler.rng.randint(0, len(pipe.queue))
        while len(pipe.queue) > keep:
            _, what, payload = pipe.queue.pop()
            if what is _What.DATA:
                pipe.in_flight -= len(payload)
        pipe.last_arrival = pipe.queue[-1][0] if pipe.queue else 0
