"""What a heartbeat reports about ops and links: two cores and a clock that the test sets."""

import numpy as np
import pytest

from ringfold._native import EpochSpec, LanePromotion, OpRequest
from ringfold.testing.core import Core, new_core
from ringfold.wire.frames import FrameKind, FrameReader, Heartbeat, decode_heartbeat

MS = 1_000_000
MiB = 1 << 20
START_NS = 1_000 * MS


class Pair:
    """A ring of two cores, each with a control connection without answers."""

    def __init__(self) -> None:
        self.now = START_NS
        self.cores: list[Core] = [new_core(), new_core()]
        self.masters = [core.open("master", False) for core in self.cores]
        self.lanes: list[tuple[int, int, int, int]] = []
        for core, master in zip(self.cores, self.masters, strict=True):
            core.set_now(self.now)
            core.make_control(master, 250, 60_000)
        for rank in (0, 1):
            out, into = self.cores[rank].open("next", False), self.cores[1 - rank].open("previous", True)
            self.cores[rank].promote(LanePromotion(conn=out, outgoing=True, peer=1 - rank, lane=0))
            self.cores[1 - rank].promote(LanePromotion(conn=into, outgoing=False, peer=rank, lane=0))
            self.lanes += [(rank, out, 1 - rank, into), (1 - rank, into, rank, out)]
        for rank, core in enumerate(self.cores):
            core.install(
                EpochSpec(
                    epoch=1,
                    rank=rank,
                    members=[0, 1],
                    evidence_by_master=False,
                    small_bytes=1024,
                    segment_bytes=MiB,
                )
            )

    def submit(self, rank: int, size: int) -> int:
        """Call an op over `size` bytes at one of the cores; nothing moves yet."""
        self.cores[rank].set_now(self.now)
        array = np.ones(size // 4, np.float32)
        return self.cores[rank].submit(
            OpRequest(kind=0, reduce_op=0, tag=0, source=[array], dtypes=[10], retry=1, timeout_ns=10**12)
        )

    def all_reduce(self, size: int, took_ms: int) -> None:
        """An op over `size` bytes; the clock moves once, before its first byte does."""
        ops = [self.submit(rank, size) for rank in (0, 1)]
        self.now += took_ms * MS
        moved = True
        while moved:
            moved = False
            for source, out, target, into in self.lanes:
                if chunk := self.cores[source].transmit(self.now, out, 1 << 18):
                    self.cores[target].receive(self.now, into, chunk)
                    moved = True
        for core, op in zip(self.cores, ops, strict=True):
            result = core.poll(op)
            assert result is not None
            assert result.status == 0
            core.release(op)

    def tick_for(self, ms: int) -> None:
        for _ in range(ms // 50):
            self.now += 50 * MS
            for core in self.cores:
                core.tick(self.now)

    def next_heartbeat(self, rank: int = 0) -> Heartbeat:
        """The next heartbeat to the master."""
        core, master = self.cores[rank], self.masters[rank]
        core.transmit(self.now, master, 1 << 20)
        self.now += 300 * MS
        core.tick(self.now)
        *_, (kind, body) = FrameReader().feed(core.transmit(self.now, master, 1 << 20))
        assert kind is FrameKind.HEARTBEAT
        return decode_heartbeat(body)


def test_the_rate_of_a_large_op_is_reported_once() -> None:
    pair = Pair()
    pair.all_reduce(8 * MiB, took_ms=100)
    assert pair.next_heartbeat().out_rate == pytest.approx(8 * MiB / 0.1, rel=0.15)
    assert pair.next_heartbeat().out_rate == 0


def test_the_best_op_since_the_last_heartbeat_counts() -> None:
    pair = Pair()
    for took_ms in (200, 50, 400):
        pair.all_reduce(8 * MiB, took_ms)
    assert pair.next_heartbeat().out_rate == pytest.approx(8 * MiB / 0.05, rel=0.15)


def test_a_small_op_gives_no_rate() -> None:
    pair = Pair()
    pair.all_reduce(2 * MiB, took_ms=1)
    assert pair.next_heartbeat().out_rate == 0


def test_the_quiet_before_an_op_does_not_count_as_a_stall_of_its_link() -> None:
    """A thread that is to send its first bytes may be late, but not by the time in which there were none to send."""
    pair = Pair()
    pair.all_reduce(8 * MiB, took_ms=1)
    pair.tick_for(3_000)
    pair.submit(0, 8 * MiB)
    pair.cores[0].transmit(pair.now, pair.masters[0], 1 << 20)
    pair.tick_for(1_000)
    *_, (_, body) = FrameReader().feed(pair.cores[0].transmit(pair.now, pair.masters[0], 1 << 20))
    assert 700 <= decode_heartbeat(body).out_stalled_ms <= 1_000
