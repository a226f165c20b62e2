"""Run directories that tests write, as a master and peers would: `RunDirectory` for single records, `write_run` for all
records of a plausible run with a kill, a join, a frozen peer and a change of masters.

Times are given as true time in nanoseconds since 1970. Each host has a CLOCK_MONOTONIC with a base, an offset and a
drift of its own, and a wall clock that is off: a reader that does not map them gets the order of events wrong.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from ringfold.units import MIB, MS, US, S
from ringfold.wire.events import (
    ClockSampled,
    EpochRuns,
    LeaderChanged,
    OpEnded,
    PeerEvicted,
    PeerJoined,
    RecordBegun,
    Role,
    Stamp,
    StateSynced,
    StatusSampled,
    StepEnded,
    encode_event,
)
from ringfold.wire.notices import (
    EpochInstalled,
    EpochRecorded,
    EpochSealing,
    MasterLost,
    Notice,
    PeerGone,
    PeerRegistered,
    PeersStalled,
    PeerSuspected,
    RunEnded,
    SyncBegun,
    SyncEnded,
)
from ringfold.wire.status import (
    GroupStatus,
    LinkStatus,
    OpTotals,
    PeerStatus,
    Progress,
    RingLink,
    Status,
    Waiting,
    World,
)

BEGIN_NS = 1_780_000_000 * S
"""True time at which the run of `write_run` begins."""


@dataclass(frozen=True, slots=True)
class Host:
    """A host with its clocks. `wall_offset_ns` is by how much its wall clock is ahead of true time."""

    name: str
    boot_id: str
    monotonic_base_ns: int
    wall_offset_ns: int = 0
    drift_ppm: float = 0.0

    def monotonic(self, true_ns: int) -> int:
        elapsed = true_ns - BEGIN_NS
        return self.monotonic_base_ns + elapsed + int(elapsed * self.drift_ppm / 1e6)

    def wall(self, true_ns: int) -> int:
        elapsed = true_ns - BEGIN_NS
        return true_ns + self.wall_offset_ns + int(elapsed * self.drift_ppm / 1e6)


HOSTS = (
    Host("oslo", "boot-of-oslo", 5_000 * S, 3 * MS, 12.0),
    Host("lima", "boot-of-lima", 900_000 * S, -40 * MS, -25.0),
)


@dataclass(slots=True)
class RecordWriter:
    """The record of one process. Lines are collected, and written by `RunDirectory.write`."""

    name: str
    host: Host
    begun: RecordBegun
    lines: list[bytes] = field(default_factory=list)

    def add(self, true_ns: int, notice: Notice, *, peer: int = 0, with_wall: bool = True) -> None:
        wall = self.host.wall(true_ns) if with_wall else 0
        self.lines.append(encode_event(Stamp(self.host.monotonic(true_ns), wall, peer), notice))

    def clock(self, true_ns: int, *, error_ns: int | None = 150 * US) -> None:
        """A sample of the clocks; without `error_ns` there is no global clock yet."""
        global_ns = None if error_ns is None else true_ns
        at, wall = self.host.monotonic(true_ns), self.host.wall(true_ns)
        self.lines.append(encode_event(Stamp(at), ClockSampled(at - 7 * MS, wall, global_ns, error_ns)))

    def raw(self, line: bytes) -> None:
        self.lines.append(line)


class RunDirectory:
    """Collects records and writes them to a directory."""

    def __init__(self, directory: Path, run: str = "default") -> None:
        self.directory, self.run = directory, run
        self.records: list[RecordWriter] = []

    def record(self, role: Role, name: str, host: Host = HOSTS[0], *, true_ns: int = BEGIN_NS) -> RecordWriter:
        pid = 4_000 + len(self.records)
        begun = RecordBegun(1, role, self.run, name, host.name, host.boot_id, pid, "0.1.0")
        writer = RecordWriter(f"{role}-{name.replace('/', '_')}-{pid}", host, begun)
        writer.add(true_ns, begun)
        self.records.append(writer)
        return writer

    def write(self) -> Path:
        self.directory.mkdir(parents=True, exist_ok=True)
        for record in self.records:
            (self.directory / f"{record.name}.0001.jsonl").write_bytes(b"".join(line + b"\n" for line in record.lines))
        return self.directory


@dataclass(slots=True)
class _Peer:
    """A peer process of `write_run`, and what its engine has counted."""

    name: str
    id: int
    record: RecordWriter
    compute_ns: int
    totals: OpTotals = field(default_factory=OpTotals)
    steps: int = 0
    step: int = -1

    def count(self, ended: OpEnded, duration_ns: int, waited_ns: int) -> None:
        is_local = self.record.host is HOSTS[0]
        self.totals = OpTotals(
            committed=self.totals.committed + 1,
            bytes=self.totals.bytes + ended.bytes,
            sent_bytes=self.totals.sent_bytes + ended.sent_bytes,
            received_bytes=self.totals.received_bytes + ended.received_bytes,
            memory_bytes=self.totals.memory_bytes + (ended.sent_bytes // 2 if is_local else 0),
            busy_ns=self.totals.busy_ns + duration_ns,
            waited_ns=self.totals.waited_ns + waited_ns,
        )


def _ring_link(source: int, target: int) -> RingLink:
    """Peers of one host share memory: those whose ids are both even, or both odd."""
    in_memory = source % 2 == target % 2
    return RingLink(source, target, "shm" if in_memory else "tcp", 2, 2 if in_memory else 0)


class _SimulatedRun:
    """A run, step by step. Every method advances `now`."""

    def __init__(self, files: RunDirectory, steps: int, names: Iterable[str]) -> None:
        self.files, self.steps, self.now = files, steps, BEGIN_NS
        self.master = files.record("master", "m1", HOSTS[0])
        self.standby = files.record("master", "m2", HOSTS[1])
        self.fence, self.epoch, self.next_id, self.sequence = 1, 0, 1, 0
        self.peers: list[_Peer] = []
        self.sampled_ns = self.linked_ns = self.clocked_ns = 0
        self.master.add(self.now, LeaderChanged("m1", True, 1))
        founders = [self.register(name, host=HOSTS[place % 2]) for place, name in enumerate(names)]
        self.now += 40 * MS
        self.install("", founders)

    def register(self, name: str, host: Host, record: RecordWriter | None = None) -> _Peer:
        record = record or self.files.record("peer", name, host, true_ns=self.now)
        compute_ns = 44 * MS if name == "d" else 30 * MS
        peer = _Peer(name, self.next_id, record, compute_ns)
        self.next_id += 1
        self.now += 2 * MS
        self.master.add(self.now, PeerRegistered(peer.id, name, 0, f"10.0.0.{peer.id}:48149"))
        return peer

    def install(self, reason: str, newcomers: Iterable[_Peer] = (), aborted: int = 0) -> None:
        """The next epoch, with the newcomers."""
        began, group, joined = self.now, 0, list(newcomers)
        if reason:
            self.master.add(self.now, EpochSealing(group, self.epoch, reason))
        self.epoch += 1
        self.sequence = 0
        self.peers += joined
        ring = [peer.id for peer in self.peers]
        self.now += 3 * MS
        self.master.add(self.now, EpochRecorded(group, self.epoch, ring, 0, aborted))
        self.now += 9 * MS
        for peer in self.peers:
            peer.record.add(self.now - MS, EpochRuns(group, self.epoch, self.fence, ring), peer=peer.id)
            if peer in joined:
                peer.record.add(self.now, PeerJoined(peer.id, group, self.epoch), peer=peer.id)
        self.master.add(self.now, EpochInstalled(group, self.epoch, (self.now - began) // MS))
        if joined and len(joined) < len(self.peers):
            self.sync(joined)

    def sync(self, receivers: list[_Peer]) -> None:
        holders = [peer.id for peer in self.peers if peer not in receivers]
        self.master.add(self.now, SyncBegun(0, 1, 7, holders, [peer.id for peer in receivers]))
        self.now += 60 * MS
        for peer in receivers:
            peer.record.add(self.now, StateSynced(7, 48 * MIB, 60), peer=peer.id)
        self.master.add(self.now, SyncEnded(0, 1, 7, 60))

    def step(self, number: int, *, began: int = 0, retried_until: int = 0) -> None:
        """One step of all members: compute, one all-reduce. `retried_until`: the op starts again then."""
        began = began or self.now
        ready = {
            peer.id: began + peer.compute_ns + (number * 7_919 + peer.id * 104_729) % 4_000_000 for peer in self.peers
        }
        begin = max(max(ready.values()), retried_until)
        last = max(self.peers, key=lambda peer: ready[peer.id])
        self.now = begin + 6 * MS
        self.sequence += 1
        for peer in self.peers:
            end = self.now + peer.id * 10_000
            called = ready[peer.id]
            started = retried_until or called
            at = peer.record.host.monotonic
            op = OpEnded(
                "all_reduce", 0, self.sequence, self.epoch, "committed", 16 * MIB, at(called), at(started), step=number,
                attempts=2 if retried_until else 1, out_first_ns=at(started + MS), out_last_ns=at(end - 2 * MS),
                in_first_ns=at(begin + MS), in_last_ns=at(end - MS), local_ns=at(end - MS),
                last_peer=0 if peer is last else last.id, sent_bytes=24 * MIB, received_bytes=24 * MIB,
            )  # fmt: skip
            peer.record.add(end, op, peer=peer.id, with_wall=False)
            peer.count(op, end - started, begin + MS - started)
            peer.steps, peer.step = peer.steps + 1, number
            loss = 4.0 / (1 + number / 60) + 0.02 * ((number * 31 + peer.id * 17) % 11)
            logged: dict[str, float | None] = {"loss": loss, "tokens": 4096.0}
            ended = StepEnded(number, self.epoch, len(self.peers), at(began), cpu_ns=28 * MS, logged=logged)
            peer.record.add(end + 50_000, ended, peer=peer.id, with_wall=False)
        self.now += MS
        self.sample()

    def sample(self) -> None:
        if self.now - self.sampled_ns > S:
            self.sampled_ns = self.now
            self.master.add(self.now, StatusSampled(self.status()))
        if self.now - self.clocked_ns > 2 * S:
            self.clocked_ns = self.now
            for record in [self.master, *(peer.record for peer in self.peers)]:
                record.clock(self.now)

    def status(self, waiting: Iterable[Waiting] = ()) -> Status:
        ring = [peer.id for peer in self.peers]
        edges = list(zip(ring, [*ring[1:], *ring[:1]], strict=True))
        links: list[LinkStatus] = []
        if self.now - self.linked_ns > 15 * S or not self.linked_ns:
            self.linked_ns = self.now
            links = [LinkStatus(a, b, 1.1e9 / (1 + a), 120.0 + b, 400, "collective", 0.001) for a, b in edges]
        return Status(
            fence=self.fence, uptime_ms=(self.now - BEGIN_NS) // MS, registrations=self.next_id - 1, epochs=self.epoch,
            world=World(len(ring), 1, len(ring)),
            peers=[
                PeerStatus(
                    peer.id, peer.name, peer.record.host.name, 0, "PEER_ACCEPTED", [f"10.0.0.{peer.id}"], 48149, 20,
                    False, peer.totals.committed, totals=peer.totals, progress=Progress("0.1.0", peer.step, peer.steps),
                )
                for peer in self.peers
            ],
            groups=[
                GroupStatus(
                    0, self.epoch, "IDLE", ring, "ring",
                    ring_links=[_ring_link(a, b) for a, b in edges],
                )
            ],
            waiting=list(waiting), links=links, known_links=len(edges), leader=self.master.begun.name,
        )  # fmt: skip

    def remove(self, name: str) -> _Peer:
        peer = next(peer for peer in self.peers if peer.name == name)
        self.peers.remove(peer)
        return peer

    def kill(self, name: str, number: int) -> None:
        """The peer dies in the op of this step, which the others run again."""
        victim, began = self.remove(name), self.now
        self.now += 31 * MS
        self.master.add(self.now, PeerGone(victim.id, name, "lost", "its connection closed"))
        self.install(f"peer {victim.id} ({name}) its connection closed", aborted=1)
        self.step(number, began=began, retried_until=self.now)

    def freeze(self, name: str, number: int) -> _Peer:
        """The peer is frozen in this step, and evicted 1.5 s later."""
        victim, began = self.remove(name), self.now
        self.now += 30 * MS + 400 * MS
        self.master.add(self.now, PeerSuspected(victim.id, 400, name))
        self.now += 600 * MS
        others = [peer.id for peer in self.peers]
        wait = Waiting(f"all_reduce #{self.sequence}", others, [victim.id], 1_000, "evicted in 0.5 s", 500)
        self.master.add(self.now, StatusSampled(self.status([wait])))
        self.now += 500 * MS
        self.master.add(self.now, PeersStalled(0, [victim.id], [name], others, "all_reduce", 1_500, "evict_after_ms"))
        self.master.add(self.now, PeerGone(victim.id, name, "evicted", "silent for 1500 ms"))
        self.install(f"peer {victim.id} ({name}) silent for 1500 ms", aborted=1)
        self.step(number, began=began, retried_until=self.now)
        return victim

    def rejoin(self, victim: _Peer) -> None:
        victim.record.add(self.now, PeerEvicted("silent for 1500 ms"), peer=victim.id)
        back = self.register(victim.name, victim.record.host, victim.record)
        self.now += 10 * MS
        self.install(f"peer {back.id} joins", [back])

    def fail_over(self, number: int) -> None:
        """The master is killed in this step; the standby leads 700 ms later."""
        began = self.now
        self.now += 20 * MS
        for peer in self.peers:
            peer.record.add(self.now, MasterLost("10.0.0.1:48148", "its connection closed"), peer=peer.id)
        self.now += 700 * MS
        self.fence, self.master = 2, self.standby
        self.master.add(self.now, LeaderChanged("m2", True, 2, "the lease of m1 has expired"))
        self.now += 40 * MS
        self.install("the master changed", aborted=1)
        self.step(number, began=began, retried_until=self.now)

    def leave(self) -> None:
        self.sample()
        for peer in list(self.peers):
            self.now += MS
            self.master.add(self.now, PeerGone(peer.id, peer.name, "left", "it sent Leave"))
            peer.record.clock(self.now)
        self.master.add(self.now, RunEnded("default", "finished", self.steps))
        self.master.clock(self.now)


def write_run(directory: Path, steps: int = 400, *, calm: bool = False, ended: bool = True) -> Path:
    """A run of a, b, c and d (which is slow) on two hosts.

    Unless it is `calm`, c is killed, e joins, the master is replaced, and b is frozen, evicted and joins again.
    """
    simulated = _SimulatedRun(RunDirectory(directory), steps, "abcd")
    frozen = None
    for number in range(steps):
        at = number if not calm else -1
        if at == steps // 5:
            simulated.kill("c", number)
        elif at == steps * 2 // 5:
            simulated.install("peer 5 joins", [simulated.register("e", HOSTS[1])])
            simulated.step(number)
        elif at == steps * 3 // 5:
            simulated.fail_over(number)
        elif at == steps * 7 // 10:
            frozen = simulated.freeze("b", number)
        elif at == steps * 17 // 20 and frozen is not None:
            simulated.rejoin(frozen)
            simulated.step(number)
        else:
            simulated.step(number)
    if ended:
        simulated.leave()
    return simulated.files.write()
