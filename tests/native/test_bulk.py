"""Bulk connections through Python: two engines on loopback, and two cores of the simulation."""

import gc
import importlib
import weakref
from collections.abc import Callable, Iterator
from threading import Thread
from time import monotonic
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from ringfold._native import EngineEvent
from ringfold.peer.engine import Engine, RawBlock, event_of, new_engine
from ringfold.peer.events import BlocksReceived, Sampled
from ringfold.testing.core import Core, new_core

MiB = 1 << 20
DEADLINE_S = 60.0
Bytes = np.ndarray[Any, np.dtype[np.uint8]]


def noise(size: int, seed: int = 0) -> Bytes:
    return np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8)


class BulkPair:
    """Two engines with one connection between them, past its handshake."""

    def __init__(self, left: Engine, right: Engine) -> None:
        self.left, self.right = left, right
        port = right.listen("127.0.0.1", 0, 1)
        self.a = left.dial("127.0.0.1", port, 5_000)
        assert self.wait(left, "opened").conn == self.a
        self.b = self.wait(right, "accepted").conn
        left.make_bulk(self.a)
        right.make_bulk(self.b)

    @staticmethod
    def wait(engine: Engine, kind: str) -> EngineEvent:
        """The next event of this kind; an unexpected end of the connection fails."""
        until = monotonic() + DEADLINE_S
        while monotonic() < until:
            event = engine.next_event(0.5)
            if event is not None and event.kind == kind:
                return event
            assert event is None or event.kind != "closed", event
        raise AssertionError(f"no {kind!r} within {DEADLINE_S} s")


def blocks_in(event: EngineEvent) -> tuple[int, int, list[int]]:
    """Connection and batch of blocks that have come, and which of them have another hash."""
    assert event.kind == "blocks"
    return event.conn, event.batch, event.bad


@pytest.fixture
def pair() -> Iterator[BulkPair]:
    engines = new_engine(0), new_engine(0)
    yield BulkPair(*engines)
    for engine in engines:
        engine.shutdown()


def blocks_of(memory: Bytes, hashes: list[int | None] | None = None, size: int = MiB) -> list[RawBlock]:
    starts = range(0, len(memory), size)
    return [
        (memory, at, min(size, len(memory) - at), None if hashes is None else hashes[number])
        for number, at in enumerate(starts)
    ]


def hash_of(memory: Bytes) -> int:
    """The hash that the core expects of a block."""
    native = importlib.import_module("ringfold._native")
    if not hasattr(native, "hash_block"):
        pytest.skip("this build has no hash_block for Python")
    return int(native.hash_block(memory))


def serve(engine: Engine, conn: int, memory: Bytes, hashes: list[int | None], batches: int) -> None:
    """Answer each message with the blocks it names by their first and last number."""
    blocks = blocks_of(memory, hashes)
    for _ in range(batches):
        first, last = np.frombuffer(BulkPair.wait(engine, "message").body, np.uint32)
        assert engine.send_blocks(conn, blocks[first:last]) == []


def test_a_quarter_of_a_gigabyte_arrives_whole(pair: BulkPair) -> None:
    """Four batches of 2 MiB are in flight at a time, as in a sync. Prints the rate (pytest -s)."""
    source, target = noise(256 * MiB), np.full(256 * MiB, 7, np.uint8)
    native = importlib.import_module("ringfold._native")
    hashes: list[int | None] = [None] * 256
    if hasattr(native, "hash_block"):
        hashes = [int(native.hash_block(source[at : at + MiB])) for at in range(0, len(source), MiB)]
    incoming = blocks_of(target, hashes)
    per_batch, ahead = 2, 4
    batches = len(incoming) // per_batch
    thread = Thread(target=serve, args=(pair.right, pair.b, source, hashes, batches))
    thread.start()
    began = monotonic()
    requested = 0
    for done in range(batches):
        while requested < min(batches, done + ahead):
            first, last = requested * per_batch, (requested + 1) * per_batch
            pair.left.expect_blocks(pair.a, requested, incoming[first:last])
            pair.left.send(pair.a, np.array([first, last], np.uint32).tobytes())
            requested += 1
        assert blocks_in(pair.wait(pair.left, "blocks")) == (pair.a, done, [])
    seconds = monotonic() - began
    thread.join(DEADLINE_S)
    hashed = "" if hashes[0] is None else ", hashed on both sides"
    print(f"\n{len(source) / seconds / 1e9:.2f} GB/s{hashed}")  # noqa: T201 - a figure, shown with -s
    assert np.array_equal(source, target)


def test_many_tiny_blocks_arrive_whole(pair: BulkPair) -> None:
    source, target = noise(100_003, 2), np.zeros(100_003, np.uint8)
    pair.left.expect_blocks(pair.a, 1, blocks_of(target, size=97))
    assert pair.right.send_blocks(pair.b, blocks_of(source, size=97)) == []
    assert blocks_in(pair.wait(pair.left, "blocks")) == (pair.a, 1, [])
    assert np.array_equal(source, target)


def test_content_that_changed_is_not_sent(pair: BulkPair) -> None:
    memory = noise(3 * MiB)
    hashes: list[int | None] = [hash_of(memory[at : at + MiB]) for at in range(0, 3 * MiB, MiB)]
    memory[MiB + 5] ^= 1
    assert pair.right.send_blocks(pair.b, blocks_of(memory, hashes)) == [1]
    pair.right.send(pair.b, b"nothing came before this")
    assert pair.wait(pair.left, "message").body == b"nothing came before this"


def test_wrong_content_is_reported_by_its_index(pair: BulkPair) -> None:
    source, target = noise(3_000), np.zeros(3_000, np.uint8)
    first = hash_of(source[:1000])
    pair.left.expect_blocks(pair.a, 4, blocks_of(target, [first, first, None], size=1000))
    pair.right.send_blocks(pair.b, blocks_of(source, size=1000))
    assert blocks_in(pair.wait(pair.left, "blocks")) == (pair.a, 4, [1])


def test_a_read_only_array_is_sent_and_not_received_into(pair: BulkPair) -> None:
    source, target = noise(1_000), np.zeros(1_000, np.uint8)
    source.flags.writeable = False
    pair.left.expect_blocks(pair.a, 1, blocks_of(target))
    assert pair.right.send_blocks(pair.b, blocks_of(source)) == []
    pair.wait(pair.left, "blocks")
    assert np.array_equal(source, target)
    with pytest.raises(TypeError):
        pair.left.expect_blocks(pair.a, 2, blocks_of(source))


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
def test_an_invalid_block_is_refused(pair: BulkPair, block: RawBlock, error: type[Exception]) -> None:
    with pytest.raises(error):
        pair.left.send_blocks(pair.a, [block])
    with pytest.raises(error):
        pair.left.expect_blocks(pair.a, 1, [block])


def test_arrays_are_kept_until_their_blocks_are_through_and_no_longer(pair: BulkPair) -> None:
    source, target = noise(MiB), np.zeros(MiB, np.uint8)
    kept = weakref.ref(source), weakref.ref(target)
    expected = bytes(source[:100])
    pair.left.expect_blocks(pair.a, 1, blocks_of(target))
    pair.right.send_blocks(pair.b, blocks_of(source))
    del source
    pair.wait(pair.left, "blocks")
    assert bytes(target[:100]) == expected
    del target
    pair.left.send(pair.a, b"through")
    pair.wait(pair.right, "message")
    gc.collect()
    assert [ref() for ref in kept] == [None, None]


def test_a_lost_connection_releases_the_arrays(pair: BulkPair) -> None:
    target = np.zeros(MiB, np.uint8)
    kept = weakref.ref(target)
    pair.left.expect_blocks(pair.a, 1, blocks_of(target))
    del target
    assert kept() is not None
    pair.right.close(pair.b, "")
    event = pair.left.next_event(DEADLINE_S)
    assert event is not None
    assert (event.kind, event.conn) == ("closed", pair.a)
    gc.collect()
    assert kept() is None


def test_a_shut_down_engine_releases_the_arrays(pair: BulkPair) -> None:
    target = np.zeros(MiB, np.uint8)
    kept = weakref.ref(target)
    pair.left.expect_blocks(pair.a, 1, blocks_of(target))
    del target
    pair.left.shutdown()
    gc.collect()
    assert kept() is None


def test_filler_flows_in_both_directions_and_is_sampled_while_messages_pass(pair: BulkPair) -> None:
    for engine, conn in ((pair.left, pair.a), (pair.right, pair.b)):
        engine.sample(conn, 5_000_000)
        engine.fill(conn, True)
    for engine in (pair.left, pair.right):
        first, second = pair.wait(engine, "sample"), pair.wait(engine, "sample")
        assert second.elapsed_ns >= first.elapsed_ns + 5_000_000
        assert second.counted_ns > first.counted_ns
        assert second.received_bytes > first.received_bytes > 0
    pair.left.send(pair.a, b"enough")
    assert pair.wait(pair.right, "message").body == b"enough"
    pair.left.close(pair.a, "")
    until = monotonic() + DEADLINE_S
    while (event := pair.right.next_event(1.0)) is None or event.kind != "closed":
        assert monotonic() < until


def test_several_bulk_connections_share_an_engine() -> None:
    """Two clients fill a server at once; the messages of a third one still come through."""
    server, clients = new_engine(0), [new_engine(0) for _ in range(3)]
    try:
        port = server.listen("127.0.0.1", 0, 1)
        dialled = [client.dial("127.0.0.1", port, 5_000) for client in clients]
        accepted = [BulkPair.wait(server, "accepted").conn for _ in clients]
        for client, conn in zip(clients, dialled, strict=True):
            BulkPair.wait(client, "opened")
            client.make_bulk(conn)
        for conn in accepted:
            server.make_bulk(conn)
            server.sample(conn, 10_000_000)
        for client, conn in zip(clients[:2], dialled[:2], strict=True):
            client.fill(conn, True)
        sampled: set[int] = set()
        while len(sampled) < 2:
            sampled.add(BulkPair.wait(server, "sample").conn)
        clients[2].send(dialled[2], b"may I")
        assert BulkPair.wait(server, "message").body == b"may I"
    finally:
        for engine in (server, *clients):
            engine.shutdown()


# The core of the simulation


def shuttle(now: int, left: tuple[Core, int], right: tuple[Core, int], step: int) -> None:
    """Move bytes in both directions until nothing moves."""
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
    events: list[EngineEvent] = []
    while (event := right.next_event()) is not None:
        events.append(event)
    opened, message, blocks = events
    assert (opened.kind, opened.conn) == ("opened", b)
    assert (message.kind, message.conn, message.body) == ("message", b, b"they come")
    assert blocks_in(blocks) == (b, 9, [])
    assert np.array_equal(source, target)


def test_reports_of_a_bulk_connection_become_events() -> None:
    core = new_core()
    nonce: Callable[[], bytes] = bytes
    blocks = SimpleNamespace(kind="blocks", conn=3, batch=7, bad=[1, 2])
    assert event_of(core, cast(EngineEvent, blocks), nonce) == BlocksReceived(3, 7, (1, 2))
    sample = SimpleNamespace(kind="sample", conn=3, elapsed_ns=1_000, counted_ns=900, received_bytes=64)
    assert event_of(core, cast(EngineEvent, sample), nonce) == Sampled(3, 1_000, 900, 64)
