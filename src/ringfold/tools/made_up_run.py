"""A run that never was: statuses and events as a master would report them, for tests of views and for pictures.

Time is an argument, and nothing is random: the same time gives the same status. The story of a `MadeUpRun` is that of a
training over a WAN: one link is slow from the beginning, a peer is killed, another one joins, one stalls and is
evicted, a standby takes over, and the state of one diverges. With `is_calm` nothing happens.
"""

import math
from collections.abc import Iterator
from pathlib import Path

from ringfold.observe.view import RunView
from ringfold.wire import notices
from ringfold.wire.base import PeerId
from ringfold.wire.events import (
    RECORD_FORMAT,
    Event,
    EventKind,
    LeaderChanged,
    PathSharesChanged,
    RecordBegun,
    Stamp,
    StatusSampled,
    encode_event,
)
from ringfold.wire.messages import Divergence
from ringfold.wire.probing import (
    EdgeFit,
    EdgeView,
    NodeClock,
    RoundId,
    RoundMetrics,
    RoundSummary,
)
from ringfold.wire.status import (
    CollectiveStatus,
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

STEPS_PER_S = 3.42
STEP_BYTES = 4_500_000
BEGIN_MS = 1_790_000_000_000
KILLED_S, JOINED_S, STALLED_S, EVICTED_S, FAILOVER_S, DIVERGED_S = 40, 75, 120, 128, 165, 200
PLACES = ("fra", "ams", "lon", "waw", "mad", "par", "vie", "prg")


class MadeUpRun:
    """A run of `peers`, on hosts of `per_host` peers each. Times are seconds since its begin."""

    def __init__(
        self,
        peers: int = 8,
        per_host: int = 2,
        name: str = "llm-350m",
        *,
        is_calm: bool = False,
        begin_ms: int = BEGIN_MS,
    ) -> None:
        self.name, self.count, self.per_host, self.is_calm, self.begin_ms = name, peers, per_host, is_calm, begin_ms
        self.killed, self.stalled, self.joined = min(3, peers), min(6, peers), peers + 1

    def members(self, at_s: float) -> list[PeerId]:
        """The ring at this time."""
        ring = list(range(1, self.count + 1))
        if self.is_calm:
            return ring
        gone = {self.killed} if at_s >= KILLED_S else set()
        gone |= {self.stalled} if at_s >= EVICTED_S else set()
        return [peer for peer in ring if peer not in gone] + ([self.joined] if at_s >= JOINED_S + 1 else [])

    def view(self, until_s: float, every_s: float = 0.5) -> RunView:
        """The view that has looked at the run from its begin to this time."""
        view = RunView(self.name)
        self.show(view, -every_s, until_s, every_s)
        return view

    def show(self, view: RunView, after_s: float, until_s: float, every_s: float = 0.5) -> None:
        """Let a view look at the run again and again, after the first time and up to the second one."""
        count = round((until_s - after_s) / every_s)
        for number in range(1, count + 1):
            at_s = after_s + number * every_s
            is_last = number == count
            status = self.status(at_s, with_links=is_last or number % 30 == 1)
            view.look(int(self.begin_ms + 1_000 * at_s), status, self.events(at_s - every_s, at_s))

    def record(self, directory: Path, until_s: float) -> None:
        """Write what the master of such a run would have recorded."""
        directory.mkdir(parents=True, exist_ok=True)
        begun = RecordBegun(RECORD_FORMAT, "master", self.name, "master-1", "fra-01", "made-up", 4_711, "0.1.0")
        lines = [(0.0, 0, encode_event(self._stamp(0, 0), begun))]
        for second in range(int(until_s) + 1):
            sampled = StatusSampled(self.status(second, with_links=second % 15 == 0))
            lines.append((second, 1, encode_event(self._stamp(second, 0), sampled)))
        for event in self.events(-1, until_s):
            lines.append((event.stamp.at / 1e9, 2, encode_event(event.stamp, event.notice)))
        text = b"".join(line + b"\n" for _, _, line in sorted(lines, key=lambda each: each[:2]))
        (directory / "master-master-1-4711.0000.jsonl").write_bytes(text)

    def _stamp(self, at_s: float, peer: PeerId) -> Stamp:
        return Stamp(int(1e9 * at_s), int(1e6 * (self.begin_ms + 1_000 * at_s)), peer)

    def status(self, at_s: float, *, with_links: bool = True) -> Status:
        ring = self.members(at_s)
        epoch = 7 if self.is_calm else 7 + sum(at_s >= each for each in (KILLED_S, JOINED_S + 1, EVICTED_S))
        group = GroupStatus(0, epoch, "idle", ring, "ring", channels=2)
        if not self.is_calm and KILLED_S <= at_s < KILLED_S + 0.05:
            group = GroupStatus(0, epoch, "sealing", ring, "ring")
        lanes = [self._ring_link(*edge) for edge in zip(ring, [*ring[1:], ring[0]], strict=True)]
        fence = 2 if not self.is_calm and at_s >= FAILOVER_S else 1
        links = list(self._links(ring, at_s)) if with_links else []
        return Status(
            fence=fence,
            uptime_ms=int(1_000 * at_s),
            registrations=self.count,
            epochs=epoch,
            world=World(len(ring), 1, len(ring)),
            peers=[self._peer(peer, ring, at_s) for peer in ring],
            groups=[GroupStatus(0, epoch, group.phase, ring, "ring", ring_links=lanes, channels=2)],
            waiting=self._waiting(ring, at_s),
            links=links,
            known_links=len(links),
            leader=f"10.0.0.{fence}:48148",
            run=self.name,
        )

    def steps(self, at_s: float) -> int:
        """How many steps the run has finished. While all wait for the stalled peer, none ends."""
        if self.is_calm:
            return 17_900 + int(STEPS_PER_S * at_s)
        waited_s = max(0.0, min(at_s, EVICTED_S) - STALLED_S)
        return 17_900 + int(STEPS_PER_S * (at_s - waited_s))

    def loss(self, step: int) -> float:
        return 1.9 + 1.4 * math.exp(-(step - 17_900) / 260) + 0.03 * _noise(step)

    def events(self, after_s: float, until_s: float) -> list[Event]:
        """The events after the first time, up to the second one."""
        return [
            Event(self._stamp(at_s, peer), notice)
            for at_s, peer, notice in sorted(self._story(after_s, until_s), key=lambda each: each[0])
            if after_s < at_s <= until_s
        ]

    # Parts

    def _peer(self, peer: PeerId, ring: list[PeerId], at_s: float) -> PeerStatus:
        steps = self.steps(at_s)
        is_late = not self.is_calm and peer == self.stalled and at_s >= STALLED_S
        place = ring.index(peer)
        slow = ring[(len(ring) // 2) % len(ring)]
        busy_s = 0.55 * at_s
        blocked_s = (0.41 if peer == slow and not self.is_calm else 0.02 + 0.01 * abs(_noise(peer))) * at_s
        sent = int(STEP_BYTES * (steps - 17_900 + _fraction(at_s)) * (1 + 0.03 * _noise(peer)))
        offset = int(1e3 * 400 * _noise(peer + 31) + 2e3 * math.sin(at_s / 20 + peer))
        in_op = not is_late and (at_s * STEPS_PER_S) % 1 > 0.45
        states = [CollectiveStatus(0, steps, "PERFORM_COLLECTIVE_COMMS", int(90 + 20 * _noise(peer)))] if in_op else []
        host = f"{PLACES[((peer - 1) // self.per_host) % len(PLACES)]}-{(peer - 1) // self.per_host + 1:02d}"
        totals = OpTotals(
            committed=steps - 17_900,
            aborted=1 if not self.is_calm and at_s >= KILLED_S else 0,
            bytes=sent,
            sent_bytes=sent,
            received_bytes=sent,
            memory_bytes=sent if place % self.per_host == 0 and self.per_host > 1 else 0,
            busy_ns=int(1e9 * busy_s),
            waited_ns=int(1e9 * 0.05 * at_s),
            blocked_ns=int(1e9 * blocked_s),
        )
        progress = Progress(
            "0.1.0",
            step=steps - (1 if is_late else 0),
            steps=steps - 17_900 - (1 if is_late else 0),
            in_step=True,
            logged={"loss": round(self.loss(steps), 4), "tokens": 16_384.0},
            clock_offset_ns=offset,
            clock_error_ns=int(9_000 + 4_000 * abs(_noise(peer + 7))),
        )
        return PeerStatus(
            peer=peer,
            name=f"trainer-{peer}",
            host=host,
            group=0,
            phase="PEER_ACCEPTED",
            addresses=[f"10.0.{(peer - 1) // self.per_host}.{peer}"],
            port=48_149,
            silent_ms=40,
            suspected=False,
            committed_ops=steps - 17_900,
            state="COLLECTIVE_COMMUNICATIONS_RUNNING" if in_op else "IDLE",
            op_states=states,
            totals=totals,
            progress=progress,
        )

    def _ring_link(self, source: PeerId, target: PeerId) -> RingLink:
        same = (source - 1) // self.per_host == (target - 1) // self.per_host
        return RingLink(source, target, "shm" if same else "tcp", 4, 4 if same else 0)

    def _links(self, ring: list[PeerId], at_s: float) -> Iterator[LinkStatus]:
        """All pairs of up to 64 peers; of more, the neighbours of some rings."""
        slow = ring[(len(ring) // 2) % len(ring)]
        after = ring[(ring.index(slow) + 1) % len(ring)]
        for source in ring:
            for target in ring:
                if source == target or (len(ring) > 64 and (source + target) % 5 and abs(source - target) > 2):
                    continue
                here, there = (source - 1) // self.per_host, (target - 1) // self.per_host
                apart = abs(here % len(PLACES) - there % len(PLACES)) + (here != there)
                rate = 1.9e9 / (1 + 9 * apart) * (1 + 0.12 * _noise(257 * source + target))
                if (source, target) == (slow, after) and not self.is_calm:
                    rate /= 9
                delay_us = 28 + 6_500 * apart * (1 + 0.1 * _noise(source + 13 * target))
                loss = 0.002 if (source, target) == (slow, after) and not self.is_calm else 0.0
                age_ms = int(1_000 * (at_s % 15)) + 40 * source
                yield LinkStatus(source, target, round(rate), delay_us, age_ms, "measured", loss)

    def _waiting(self, ring: list[PeerId], at_s: float) -> list[Waiting]:
        if self.is_calm or not STALLED_S <= at_s < EVICTED_S or self.stalled not in ring:
            return []
        since_ms = int(1_000 * (at_s - STALLED_S))
        left_ms = int(1_000 * (EVICTED_S - at_s))
        waiting = [peer for peer in ring if peer != self.stalled]
        what = f"group 0: all_reduce {self.steps(at_s)} (tag 0)"
        return [Waiting(what, waiting, [self.stalled], since_ms, f"in {left_ms / 1_000:.1f} s", left_ms)]

    def _story(self, after_s: float, until_s: float) -> Iterator[tuple[float, PeerId, EventKind]]:
        """Time, peer (0: the master), notice: all of this span, and some others."""
        for peer in range(1, self.count + 1):
            yield 0.1, 0, notices.PeerRegistered(peer, f"trainer-{peer}", 0, f"10.0.0.{peer}:40000")
        ring = list(range(1, self.count + 1))
        yield 0.3, 0, notices.EpochRecorded(0, 7, ring, 0, 0)
        yield 0.4, 0, notices.EpochInstalled(0, 7, 120)
        for number in range(max(0, int(after_s // 15) - 1), int(until_s // 15) + 1)[-16:]:
            yield 15.0 * number + 5, 0, notices.RoundDone(self._round(number))
        if self.is_calm:
            return
        yield 5.0, 2, PathSharesChanged(self.killed, [0.64, 0.36])
        yield 5.0, 5, PathSharesChanged(6, [0.5, 0.3, 0.2])
        yield from self._failures()

    def _failures(self) -> Iterator[tuple[float, PeerId, EventKind]]:
        dead, late, new = self.killed, self.stalled, self.joined
        yield KILLED_S, 0, notices.PeerGone(dead, f"trainer-{dead}", "lost", "its control connection closed")
        yield KILLED_S, 0, notices.EpochSealing(0, 7, f"peer {dead} was lost")
        yield KILLED_S + 0.01, 0, notices.EpochRecorded(0, 8, self.members(KILLED_S), 0, 1)
        yield KILLED_S + 0.025, 0, notices.EpochInstalled(0, 8, 25)
        yield JOINED_S, 0, notices.PeerRegistered(new, f"trainer-{new}", 0, "10.0.4.9:40000")
        yield JOINED_S + 0.9, 0, notices.EpochSealing(0, 8, f"peer {new} joins")
        yield JOINED_S + 0.93, 0, notices.EpochRecorded(0, 9, self.members(JOINED_S + 1), 0, 0)
        yield JOINED_S + 0.95, 0, notices.EpochInstalled(0, 9, 50)
        yield JOINED_S + 1, 0, notices.SyncBegun(0, 4, self.steps(JOINED_S), [1, 2], [new])
        yield JOINED_S + 3.4, 0, notices.SyncEnded(0, 4, self.steps(JOINED_S), 2_400)
        others = [peer for peer in self.members(STALLED_S) if peer != late]
        stall = notices.PeersStalled(0, [late], [f"trainer-{late}"], others, "all_reduce", 8_000, "stall_timeout_s = 8")
        yield EVICTED_S, 0, stall
        gone = notices.PeerGone(late, f"trainer-{late}", "evicted", "it kept the others waiting for 8.0 s")
        yield EVICTED_S, 0, gone
        yield EVICTED_S + 0.001, 0, notices.EpochSealing(0, 9, f"peer {late} was evicted")
        yield EVICTED_S + 0.02, 0, notices.EpochRecorded(0, 10, self.members(EVICTED_S), 0, 0)
        yield EVICTED_S + 0.031, 0, notices.EpochInstalled(0, 10, 30)
        yield FAILOVER_S, 0, LeaderChanged("10.0.0.2:48148", True, 2, "the lease of 10.0.0.1:48148 ran out")
        twin = Divergence(
            2, "trainer-2", self.steps(DIVERGED_S), self.steps(DIVERGED_S) - 4, ["embed.weight"], 1, 8_388_608
        )
        yield DIVERGED_S, 0, notices.PeerDiverged(0, twin)

    def _round(self, number: int) -> RoundSummary:
        begin_ns = int(1e6 * self.begin_ms) + 15_000_000_000 * number
        nodes = [
            NodeClock(peer, begin_ns, begin_ns, 0.0, 2_000 + 300 * _noise(peer + number), -9_000, 9_000, 1e-9)
            for peer in range(1, min(self.count, 16) + 1)
        ]
        fit = EdgeFit(1, 2, sent=480, pairs=474, lost=1 + number % 3)
        metrics = RoundMetrics(
            control_latency_ns=[int(11e6 + 1e6 * _noise(number + peer)) for peer in range(4)],
            stop_spread_ns=int(180_000 + 40_000 * _noise(number)),
            resume_spread_ns=int(210_000 + 40_000 * _noise(number + 1)),
            calculate_ns=int(1_900_000 + 300_000 * _noise(number + 2)),
            total_ns=int(46e6 + 5e6 * _noise(number + 3)),
            report_bytes=380 * self.count,
        )
        edges = [EdgeView(fit)] * min(self.count * 3, 48)
        return RoundSummary(
            RoundId(1, number + 1), "master", "", begin_ns, begin_ns + 4_000_000_000, 1, nodes, edges, metrics=metrics
        )


def _noise(number: float) -> float:
    """From -1 to 1, the same for the same number."""
    value = math.sin(12.9898 * number) * 43_758.5453
    return 2 * (value - math.floor(value)) - 1


def _fraction(at_s: float) -> float:
    return (STEPS_PER_S * at_s) % 1
