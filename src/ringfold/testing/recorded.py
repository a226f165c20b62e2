"""Run directories that no run wrote: records of a modelled run, with known clocks, and known reasons of slow steps.

A `Scene` says what the run is like. `play` calculates when everything happens, in true time, and returns the events of
each process as its own clock would have stamped them; `write` makes a run directory of them. `with_clock` gives a
record of a real run another clock. The model of an all-reduce
is the ring: 2(n-1) stages, each link with its rate and delay, a transport that takes some payload without waiting, and
Dones that go straight to all. That is enough to try whatever reads records: alignment, traces, diagnoses.
"""

import random
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from msgspec.structs import replace

from ringfold.wire import events, notices
from ringfold.wire.events import Event, Stamp
from ringfold.wire.notices import Notice

MS = 1_000_000
_SECOND = 1_000_000_000
_BEGIN = 1_790_000_000 * _SECOND
"""Unix time of the beginning."""


@dataclass(slots=True, kw_only=True)
class Scene:
    """A run. Peers are numbered from 1; each is on a host of its own, unless `hosts` says otherwise."""

    peers: int = 4
    steps: int = 60
    ops: int = 1
    bytes: int = 4 << 20
    compute_ms: float = 20.0
    jitter: float = 0.05
    """The standard deviation of computing times, as a part of them."""
    mbit: float = 1_000.0
    delay_us: float = 100.0
    buffer_bytes: int = 256 << 10
    """What the transport takes without waiting."""
    hosts: Mapping[int, str] = field(default_factory=dict)

    offsets_ms: Mapping[int, float] = field(default_factory=dict)
    """By how much a peer's wall clock is wrong."""
    drifts_ppm: Mapping[int, float] = field(default_factory=dict)
    """By how much a peer's clocks run too fast."""
    global_error_us: float | None = 20.0
    """The bound of the global clock's error; it is never more than half as wrong. None: there is no global clock."""
    global_after_s: float = 4.0
    """The global clock is ready so late."""

    slow_loader: Mapping[int, float] = field(default_factory=dict)
    """Peer -> milliseconds more that it waits before it computes."""
    slow_model: Mapping[int, float] = field(default_factory=dict)
    """Peer -> milliseconds more that it computes."""
    busy_host: Mapping[int, float] = field(default_factory=dict)
    """Peer -> the part of the time in which its core belongs to others."""
    slow_link: Mapping[tuple[int, int], float] = field(default_factory=dict)
    """(source, target) -> Mbit/s."""
    hiccups: float = 0.0
    """How often in a step a peer loses its core for about one step's computing time, any of them."""
    seed: int = 1


@dataclass(slots=True)
class PlayedProcess:
    """One process, and its events in the order of its record."""

    name: str
    begun: events.RecordBegun
    events: list[Event] = field(default_factory=list)


@dataclass(slots=True)
class _HostClock:
    """True time to what a host's clocks read."""

    boot: int
    wall_error: int
    rate: float

    def at(self, true: int) -> int:
        return self.boot + true + int(true * self.rate)

    def wall(self, true: int) -> int:
        return _BEGIN + self.wall_error + true + int(true * self.rate)


@dataclass(slots=True)
class _Timing:
    """One op at one peer, in true time."""

    called: int
    out_first: int = 0
    out_last: int = 0
    in_first: int = 0
    in_last: int = 0
    local: int = 0
    blocked: int = 0
    arriving: int = 0
    ended: int = 0
    last_peer: int = 0


def play(scene: Scene) -> list[PlayedProcess]:
    """The events of the master and of all peers."""
    return _Play(scene).run()


def write(scene: Scene, directory: Path) -> None:
    """A run directory of the scene."""
    directory.mkdir(parents=True, exist_ok=True)
    for process in play(scene):
        first = process.events[0].stamp
        lines = [events.encode_event(Stamp(first.at, first.wall), process.begun)]
        lines += [events.encode_event(event.stamp, event.notice) for event in process.events]
        (directory / f"{process.name}.0000.jsonl").write_bytes(b"\n".join(lines) + b"\n")


_TIMES = {
    events.OpEnded: (
        "called_ns",
        "started_ns",
        "out_first_ns",
        "out_last_ns",
        "in_first_ns",
        "in_last_ns",
        "local_ns",
    ),
    events.StepEnded: ("began_ns", "waited_ns"),
    events.ClockSampled: ("raw_ns",),
}
"""The fields that are times of the host's clock."""


def with_clock(record: Iterable[Event], offset_ns: int, drift_ppm: float) -> Iterator[Event]:
    """The events of a record as they would be if its host's clocks were ahead by `offset_ns`, and drifted.

    What they say about global time stays right: the global clock of such a host would know.
    """
    first: int | None = None
    for event in record:
        first = event.stamp.at if first is None else first

        def moved(at: int, first: int = first) -> int:
            return at + offset_ns + int((at - first) * drift_ppm * 1e-6) if at else 0

        later = moved(event.stamp.at) - event.stamp.at
        changed = {name: moved(getattr(event.notice, name)) for name in _TIMES.get(type(event.notice), ())}
        if isinstance(event.notice, events.ClockSampled):
            changed["wall_ns"] = event.notice.wall_ns + later
        stamp = Stamp(event.stamp.at + later, event.stamp.wall and event.stamp.wall + later, event.stamp.peer)
        yield Event(stamp, replace(event.notice, **changed))


class _Play:
    def __init__(self, scene: Scene) -> None:
        self._scene, self._rng = scene, random.Random(scene.seed)
        self._ring = list(range(1, scene.peers + 1))
        self._hosts = {0: "host-0"} | {peer: scene.hosts.get(peer, f"host-{peer}") for peer in self._ring}
        self._clocks: dict[str, _HostClock] = {}
        for peer, host in self._hosts.items():
            if host not in self._clocks:
                error = int(scene.offsets_ms.get(peer, 0.0) * MS)
                boot = self._rng.randrange(3_600 * _SECOND, 900_000 * _SECOND)
                self._clocks[host] = _HostClock(boot, error, scene.drifts_ppm.get(peer, 0.0) * 1e-6)
        self._processes = {peer: self._process(peer) for peer in [0, *self._ring]}
        self._sequence = 0

    def run(self) -> list[PlayedProcess]:
        self._note(0, 0, notices.EpochSealing(0, 0, "peers are admitted"))
        for peer in self._ring:
            self._note(peer, MS + peer * 20_000, events.PeerJoined(peer, 0, 1))
            self._note(peer, MS + peer * 20_000, events.EpochRuns(0, 1, 1, self._ring))
        self._note(0, 3 * MS, notices.EpochInstalled(0, 1, 3))
        free = {peer: 4 * MS + self._rng.randrange(MS) for peer in self._ring}
        for step in range(self._scene.steps):
            free = self._step(step, free)
        end = max(free.values())
        for peer in [0, *self._ring]:
            self._sample_clocks(peer, end)
            self._processes[peer].events.sort(key=lambda event: event.stamp.at)
        return list(self._processes.values())

    def _process(self, peer: int) -> PlayedProcess:
        role: events.Role = "peer" if peer else "master"
        name, host = f"{role}-{peer}", self._hosts[peer]
        begun = events.RecordBegun(events.RECORD_FORMAT, role, "played", name, host, f"boot-{host}", 1_000 + peer, "0")
        return PlayedProcess(f"{role}-{name}-{1_000 + peer}", begun)

    def _note(self, peer: int, true: int, notice: Notice, *, wall: bool = True) -> None:
        clock = self._clocks[self._hosts[peer]]
        stamp = Stamp(clock.at(true), clock.wall(true) if wall else 0, peer)
        self._processes[peer].events.append(Event(stamp, notice))  # type: ignore[arg-type]

    def _sample_clocks(self, peer: int, end: int) -> None:
        scene, clock = self._scene, self._clocks[self._hosts[peer]]
        for true in range(self._rng.randrange(_SECOND // 2), end + 2 * _SECOND, 2 * _SECOND):
            reading: tuple[int, int] | None = None
            if scene.global_error_us is not None and peer and true >= scene.global_after_s * _SECOND:
                error = int(scene.global_error_us * 1_000)
                reading = (_BEGIN + true + self._rng.randrange(-error // 2, error // 2 + 1), error)
            sample = events.ClockSampled(clock.at(true) + 12_345, clock.wall(true), *(reading or (None, None)))
            self._note(peer, true, sample)

    # Steps

    def _step(self, step: int, free: dict[int, int]) -> dict[int, int]:
        scene = self._scene
        began, cpu, queued = dict(free), dict.fromkeys(free, 0), dict.fromkeys(free, 0)
        now, first = dict(free), dict(free)
        for number in range(scene.ops):
            for peer in self._ring:
                used, waited, slept = self._computing(peer, 0.9 / scene.ops, loads=number == 0)
                now[peer] += used + waited + slept
                if number == 0:
                    cpu[peer], queued[peer], first[peer] = used, waited, now[peer]
            timings = self._all_reduce(now)
            for peer, timing in timings.items():
                self._note_op(peer, step, timing)
                now[peer] = timing.ended
            self._sequence += 1
        for peer in self._ring:
            now[peer] += sum(self._computing(peer, 0.1, loads=False))
            at = self._clocks[self._hosts[peer]].at
            ended = events.StepEnded(
                step, 1, scene.peers, at(began[peer]), at(first[peer]), cpu[peer], queued[peer], 20_000, {"loss": 2.0}
            )
            self._note(peer, now[peer], ended, wall=False)
            now[peer] += 50_000
        return now

    def _computing(self, peer: int, part: float, *, loads: bool = True) -> tuple[int, int, int]:
        """CPU time, time without a core, and time asleep."""
        scene, rng = self._scene, self._rng
        used = scene.compute_ms * part * max(0.2, rng.gauss(1.0, scene.jitter)) * MS
        slept = 0.0
        if loads:
            extra = max(0.2, rng.gauss(1.0, 0.2)) * MS
            used += scene.slow_model.get(peer, 0.0) * extra
            slept = scene.slow_loader.get(peer, 0.0) * extra + abs(rng.gauss(0, 0.02)) * MS
        busy = scene.busy_host.get(peer, 0.0)
        waited = used * busy / (1 - busy) * max(0.1, rng.gauss(1.0, 0.3))
        if rng.random() < scene.hiccups * part:
            waited += scene.compute_ms * rng.expovariate(1.0) * MS
        return int(used), int(waited), int(slept)

    # The all-reduce

    def _all_reduce(self, called: Mapping[int, int]) -> dict[int, _Timing]:
        scene, ring = self._scene, self._ring
        timings = {peer: _Timing(called[peer]) for peer in ring}
        following = {peer: ring[(place + 1) % len(ring)] for place, peer in enumerate(ring)}
        chunk, delay = scene.bytes // len(ring), int(scene.delay_us * 1_000)
        ready = {peer: called[peer] + self._handling(peer) for peer in ring}
        free = dict(ready)
        for stage in range(2 * (len(ring) - 1)):
            following_ready = {}
            for peer in ring:
                timing, target = timings[peer], following[peer]
                mbit = scene.slow_link.get((peer, target), scene.mbit)
                start = max(ready[peer], free[peer])
                sending = int(chunk * 8_000 / mbit * max(0.8, self._rng.gauss(1.0, 0.05)))
                free[peer] = start + sending
                if stage == 0:
                    timing.out_first = start
                taken = free[peer] - int(min(chunk, scene.buffer_bytes) * 8_000 / mbit)
                timing.blocked += max(0, taken - ready[peer])
                timing.out_last = max(ready[peer], taken)
                arrived = max(free[peer] + delay, called[target] + 1_000)
                receiver = timings[target]
                receiver.in_first = receiver.in_first or arrived
                receiver.in_last = arrived
                receiver.arriving += min(sending, max(0, arrived - called[target]))
                following_ready[target] = arrived + self._handling(target)
            ready = following_ready
        for peer in ring:
            timings[peer].local = max(ready[peer], timings[peer].out_last)
        for peer in ring:
            done = {j: timings[j].local + (0 if j == peer else delay + self._rng.randrange(20_000)) for j in ring}
            last = max(done, key=lambda j: done[j])
            timings[peer].last_peer = 0 if last == peer else last
            timings[peer].ended = done[last] + 2_000
        return timings

    def _handling(self, peer: int) -> int:
        """The time to reduce a chunk, and to get a core for it."""
        busy = self._scene.busy_host.get(peer, 0.0)
        waited = int(self._rng.expovariate(1.0) * 4 * MS) if self._rng.random() < busy else 0
        return 20_000 + waited

    def _note_op(self, peer: int, step: int, timing: _Timing) -> None:
        at = self._clocks[self._hosts[peer]].at
        ended = events.OpEnded(
            "all_reduce",
            0,
            self._sequence,
            1,
            "committed",
            self._scene.bytes,
            at(timing.called),
            at(timing.called + 1_000),
            step=step,
            out_first_ns=at(timing.out_first),
            out_last_ns=at(timing.out_last),
            in_first_ns=at(timing.in_first),
            in_last_ns=at(timing.in_last),
            local_ns=at(timing.local),
            blocked_ns=timing.blocked,
            arriving_ns=timing.arriving,
            arriving_from=self._ring[self._ring.index(peer) - 1],
            last_peer=timing.last_peer,
            sent_bytes=self._scene.bytes * 2 * (len(self._ring) - 1) // len(self._ring),
            received_bytes=self._scene.bytes * 2 * (len(self._ring) - 1) // len(self._ring),
        )
        self._note(peer, timing.ended, ended, wall=False)
