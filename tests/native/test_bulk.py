"""Bulk connections through Python: two engines on loopback, and two cores of the simulation."""

import gc
import importlib
import weakref
from collections.abc import Callable, Iterator
from threading import Thread
from time import monotonic
from typing import Any

import numpy as np
import pytest

from ringfold.peer.engine import Engine, RawBlock, RawEvent, event_of, new_engine
from ringfold.peer.events import BlocksReceived, Sampled
from ringfold.testing.core import Core, new_core

MiB = 1 << 20
DEADLINE_S = 60.0
Bytes = np.ndarray[Any, np.dtype[np.uint8]]


def noise(size: int, seed: int = 0) -> Bytes:
    return np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8)


class Visit:
    """Two engines with one connection between them, past its handshake."""

    def __init__(self, left: Engine, right: Engine) -> None:
        self.left, self.right = left, right
        port = right.listen("127.0.0.1", 0, 1)
        self.a = left.dial("127.0.0.1", port, 5_000)
        assert self.wait(left, "opened") == ("opened", self.a)
        self.b = int(self.wait(right, "accepted")[1])
        left.make_bulk(self.a)
        right.make_bulk(self.b)

    @staticmethod
    def wait(engine: Engine, kind: str) -> RawEvent:
        """The next event of this kind; an end of the connection that nobody waits for fails."""
        until = monotonic() + DEADLINE_S
        while monotonic() < until:
            event = engine.next_event(0.5)
            if event is not None and event[0] == kind:
                return event
            assert event is None or event[0] != "closed", event
        raise AssertionError(f"no {kind!r} within {DEADLINE_S} s")


@pytest.fixture
def visit() -> Iterator[Visit]:
    engines = new_engine(0), new_engine(0)
    yield Visit(*engines)
    for engine in engines:
        engine.shutdown()


def blocks_of(memory: Bytes, hashes: list[int | None] | None = None, size: int = MiB) -> list[RawBlock]:
    starts = range(0, len(memory), size)
    return [
        (memory, at, min(size, len(memory) - at), None if hashes is None else hashes[number])
        for number, at in enumerate(starts)
    ]


def hash_of(memory: Bytes) -> int:
    """The hash that the core wants of a block."""
    native = importlib.import_module("ringfold._native")
    if not hasattr(native, "hash_block"):
        pytest.skip("this build has no hash_block for Python")
    return int(native.hash_block(memory))


def serve(engine: Engine, conn: int, memory: Bytes, hashes: list[int | None], batches: int) -> None:
    """Answer each message with the blocks it names by their first and last number."""
    blocks = blocks_of(memory, hashes)
    for _ in range(batches):
        first, last = np.frombuffer(Visit.wait(engine, "message")[2], np.uint32)
        assert engine.send_blocks(conn, blocks[first:last]) == []


def test_a_quarter_of_a_gigabyte_arrives_whole(visit: Visit) -> None:
    """Four batches of 2 MiB are under way at a time, as in a sync. Prints the rate (pytest -s)."""
    source, target = noise(256 * MiB), np.full(256 * MiB, 7, np.uint8)
    native = importlib.import_module("ringfold._native")
    hashes: list[int | None] = [None] * 256
    if hasattr(native, "hash_block"):
        hashes = [int(native.hash_block(source[at : at + MiB])) for at in range(0, len(source), MiB)]
    incoming = blocks_of(target, hashes)
    per_batch, ahead = 2, 4
    batches = len(incoming) // per_batch
    thread = Thread(target=serve, args=(visit.right, visit.b, source, hashes, batches))
    thread.start()
    began = monotonic()
    asked = 0
    for done in range(batches):
        while asked < min(batches, done + ahead):
            first, last = asked * per_batch, (asked + 1) * per_batch
            visit.left.expect_blocks(visit.a, asked, incoming[first:last])
            visit.left.send(visit.a, np.array([first, last], np.uint32).tobytes())
            asked += 1
        assert visit.wait(visit.left, "blocks") == ("blocks", visit.a, done, [])
    seconds = monotonic() - began
    thread.join(DEADLINE_S)
    hashed = "" if hashes[0] is None else ", hashed on both sides"
    print(f"\n{len(source) / seconds / 1e9:.2f} GB/s{hashed}")  # noqa: T201 - a figure for who looks (-s)
    assert np.array_equal(source, target)


def test_many_tiny_blocks_arrive_whole(visit: Visit) -> None:
    source, target = noise(100_003, 2), np.zeros(100_003, np.uint8)
    visit.left.expect_blocks(visit.a, 1, blocks_of(target, size=97))
    assert visit.right.send_blocks(visit.b, blocks_of(source, size=97)) == []
    assert visit.wait(visit.left, "blocks") == ("blocks", visit.a, 1, [])
    assert np.array_equal(source, target)


def test_content_that_changed_is_not_sent(visit: Visit) -> None:
    memory = noise(3 * MiB)
    hashes: list[int | None] = [hash_of(memory[at : at + MiB]) for at in range(0, 3 * MiB, MiB)]
    memory[MiB + 5] ^= 1
    assert visit.right.send_blocks(visit.b, blocks_of(memory, hashes)) == [1]
    visit.right.send(visit.b, b"nothing came before this")
    assert visit.wait(visit.left, "message")[2] == b"nothing came before this"


def test_wrong_content_is_reported_by_its_index(visit: Visit) -> None:
    source, target = noise(3_000), np.zeros(3_000, np.uint8)
    first = hash_of(source[:1000])
    visit.left.expect_blocks(visit.a, 4, blocks_of(target, [first, first, None], size=1000))
    visit.right.send_blocks(visit.b, blocks_of(source, size=1000))
    assert visit.wait(visit.left, "blocks") == ("blocks", visit.a, 4, [1])


def test_a_read_only_array_is_sent_and_not_received_into(visit: Visit) -> None:
    source, target = noise(1_000), np.zeros(1_000, np.uint8)
    source.flags.writeable = False
    visit.left.expect_blocks(visit.a, 1, blocks_of(target))
    assert visit.right.send_blocks(visit.b, blocks_of(source)) == []
    visit.wait(visit.left, "blocks")
    assert np.array_equal(source, target)
    with pytest.raises(TypeError):
        visit.left.expect_blocks(visit.a, 2, blocks_of(source))


@pytest.mark.parametrize(
    ("block", "error"),
    [
        ((np.zeros(10, np.uint8), 0, 0, None), ValueError),
        ((np.zeros(10, np.uint8), 5, 6, None), ValueError),
        ((np.zeros(10, np.uint8), 11, 1, None), ValueError),
        ((np.zeros(10, np.float32), 0, 4, None), TypeError),
        ((np.zeros((2, 5), np.uint8), 0, 4, None), TypeError),
        ((np.zeros(20, np.uint8)[::2], 0, 4, None), TypeError),
    ],
)
def test_a_block_that_makes_no_sense_is_refused(visit: Visit, block: RawBlock, error: type[Exception]) -> None:
    with pytest.raises(error):
        visit.left.send_blocks(visit.a, [block])
    with pytest.raises(error):
        visit.left.expect_blocks(visit.a, 1, [block])


def test_arrays_are_kept_until_their_blocks_are_through_and_no_longer(visit: Visit) -> None:
    source, target = noise(MiB), np.zeros(MiB, np.uint8)
    kept = weakref.ref(source), weakref.ref(target)
    expected = bytes(source[:100])
    visit.left.expect_blocks(visit.a, 1, blocks_of(target))
    visit.right.send_blocks(visit.b, blocks_of(source))
    del source
    visit.wait(visit.left, "blocks")
    assert bytes(target[:100]) == expected
    del target
    visit.left.send(visit.a, b"through")
    visit.wait(visit.right, "message")
    gc.collect()
    assert [ref() for ref in kept] == [None, None]


def test_a_lost_connection_lets_go_of_the_arrays(visit: Visit) -> None:
    target = np.zeros(MiB, np.uint8)
    kept = weakref.ref(target)
    visit.left.expect_blocks(visit.a, 1, blocks_of(target))
    del target
    assert kept() is not None
    visit.right.close(visit.b, "")
    event = visit.left.next_event(DEADLINE_S)
    assert event is not None
    assert event[:2] == ("closed", visit.a)
    gc.collect()
    assert kept() is None


def test_a_shut_down_engine_lets_go_of_the_arrays(visit: Visit) -> None:
    target = np.zeros(MiB, np.uint8)
    kept = weakref.ref(target)
    visit.left.expect_blocks(visit.a, 1, blocks_of(target))
    del target
    visit.left.shutdown()
    gc.collect()
    assert kept() is None


def test_filler_flows_both_ways_and_is_sampled_while_messages_pass(visit: Visit) -> None:
    for engine, conn in ((visit.left, visit.a), (visit.right, visit.b)):
        engine.sample(conn, 5_000_000)
        engine.fill(conn, True)
    for engine in (visit.left, visit.right):
        first, second = visit.wait(engine, "sample"), visit.wait(engine, "sample")
        assert second[2] >= first[2] + 5_000_000
        assert second[3] > first[3]
        assert second[4] > first[4] > 0
    visit.left.send(visit.a, b"enough")
    assert visit.wait(visit.right, "message")[2] == b"enough"
    visit.left.close(visit.a, "")
    until = monotonic() + DEADLINE_S
    while (event := visit.right.next_event(1.0)) is None or event[0] != "closed":
        assert monotonic() < until


def test_several_visits_share_and_leave_the_others_alone() -> None:
    """Two visitors fill a host at once; a third one's messages still come through."""
    host, guests = new_engine(0), [new_engine(0) for _ in range(3)]
    try:
        port = host.listen("127.0.0.1", 0, 1)
        dialled = [guest.dial("127.0.0.1", port, 5_000) for guest in guests]
        accepted = [int(Visit.wait(host, "accepted")[1]) for _ in guests]
        for guest, conn in zip(guests, dialled, strict=True):
            Visit.wait(guest, "opened")
            guest.make_bulk(conn)
        for conn in accepted:
            host.make_bulk(conn)
            host.sample(conn, 10_000_000)
        for guest, conn in zip(guests[:2], dialled[:2], strict=True):
            guest.fill(conn, True)
        sampled: set[int] = set()
        while len(sampled) < 2:
            sampled.add(int(Visit.wait(host, "sample")[1]))
        guests[2].send(dialled[2], b"may I")
        assert Visit.wait(host, "message")[2] == b"may I"
    finally:
        for engine in (host, *guests):
            engine.shutdown()


# The core of the simulation


def shuttle(now: int, left: tuple[Core, int], right: tuple[Core, int], step: int) -> None:
    """Move bytes both ways until nothing moves."""
    moved = True
    while moved:
        moved = False
        for (source, a), (target, b) in ((left, right), (right, left)):
            if chunk := source.transmit(now, a, step):
                target.receive(now, b, chunk)
                moved = True


@pytest.mark.parametrize("step", [1, 6, 4_097, 1 << 22])
def test_the_core_carries_blocks_in_pieces_of_any_size(step: int) -> None:
    size = 3_001 if step < 10 else 300_001
    left, right = new_core(), new_core()
    a, b = left.open("b", False), right.open("a", False)
    left.make_bulk(a)
    right.make_bulk(b)
    source, target = noise(size), np.zeros(size, np.uint8)
    right.expect_blocks(b, 9, blocks_of(target, size=size // 3))
    left.send(a, b"they come")
    left.send_blocks(a, blocks_of(source, size=size // 3))
    shuttle(1, (left, a), (right, b), step)
    events: list[RawEvent] = []
    while (event := right.next_event()) is not None:
        events.append(event)
    assert events == [("opened", b), ("message", b, b"they come"), ("blocks", b, 9, [])]
    assert np.array_equal(source, target)


def test_reports_of_a_visit_become_events() -> None:
    core = new_core()
    nonce: Callable[[], bytes] = bytes
    assert event_of(core, ("blocks", 3, 7, [1, 2]), nonce) == BlocksReceived(3, 7, (1, 2))
    assert event_of(core, ("sample", 3, 1_000, 900, 64), nonce) == Sampled(3, 1_000, 900, 64)
