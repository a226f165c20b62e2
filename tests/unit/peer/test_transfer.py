"""The bytes of blocks: from arrays to the engine and back, on the host and on a device."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import pytest

from ringfold.peer.effects import ExpectBlocks, SendBlocks, WriteBlocks
from ringfold.peer.engine import Commands, RawBlock
from ringfold.peer.events import BlocksChanged, BlocksWritten
from ringfold.peer.sync.transfer import BlockTransfer
from ringfold.state import array_memory
from ringfold.state.array_memory import ArrayMemory
from ringfold.state.blocks import BlockRef
from ringfold.state.hashing import block_hash
from ringfold.state.shared import SharedState
from ringfold.state.snapshot import Snapshot
from ringfold.wire.messages import HashKind

CONN = 5
Numbers = npt.NDArray[np.uint8]


class FakeEngine:
    """Notes what it is to send and where it is to put what comes."""

    def __init__(self) -> None:
        self.expected: dict[int, Sequence[RawBlock]] = {}
        self.sent: list[bytes] = []
        self.changed: list[int] = []

    def expect_blocks(self, conn: int, batch: int, blocks: Sequence[RawBlock]) -> None:
        self.expected[batch] = blocks

    def send_blocks(self, conn: int, blocks: Sequence[RawBlock]) -> list[int]:
        self.sent += [] if self.changed else [bytes(memory[at : at + size]) for memory, at, size, _ in blocks]
        return self.changed

    def arrive(self, batch: int, *contents: bytes) -> None:
        for (memory, at, size, _), content in zip(self.expected[batch], contents, strict=True):
            memory[at : at + size] = np.frombuffer(content, np.uint8)

    @property
    def commands(self) -> Commands:
        return cast(Commands, cast(Any, self))


class FakeTensor:
    """Memory that can be reached only by copying, as on a device."""

    def __init__(self, memory: Numbers) -> None:
        self.memory = memory

    def __getitem__(self, part: slice) -> "FakeTensor":
        return FakeTensor(self.memory[part])

    def cpu(self) -> "FakeTensor":
        return FakeTensor(self.memory.copy())

    def numpy(self) -> Numbers:
        return self.memory

    def copy_(self, source: Numbers) -> None:
        self.memory[:] = source


def on_host(array: Numbers, kind: HashKind = "rf64") -> BlockTransfer:
    return BlockTransfer(Snapshot.take(SharedState(a=array, hash=kind)))


def on_device(array: Numbers, monkeypatch: pytest.MonkeyPatch) -> BlockTransfer:
    monkeypatch.setattr(array_memory, "_torch", lambda: SimpleNamespace(from_numpy=lambda source: source))
    memory = ArrayMemory("uint8", array.shape, array.nbytes, None, cast(Any, FakeTensor(array)))
    return BlockTransfer(Snapshot(Snapshot.take(SharedState(a=array)).manifest, [memory]))


def ref(offset: int, content: bytes, kind: HashKind = "rf64") -> BlockRef:
    return BlockRef(0, offset, len(content), block_hash(content, kind))


def test_blocks_on_the_host_are_received_into_the_array_and_sent_from_it() -> None:
    array, engine = np.zeros(8, np.uint8), FakeEngine()
    transfer = on_host(array)
    transfer.expect(engine.commands, ExpectBlocks(CONN, 1, (ref(0, b"abcd"), ref(4, b"wxyz"))))
    assert all(np.shares_memory(block[0], array) for block in engine.expected[1])
    engine.arrive(1, b"abcd", b"wxyz")
    assert transfer.write(WriteBlocks(CONN, 1, ())) == BlocksWritten(CONN, 1, ())
    assert array.tobytes() == b"abcdwxyz"
    (memory, offset, length, digest) = transfer.read(SendBlocks(CONN, (ref(4, b"wxyz"),)))[0]
    assert np.shares_memory(memory, array)
    assert (offset, length, digest) == (4, 4, int.from_bytes(block_hash(b"wxyz", "rf64"), "little"))


def test_a_device_gets_a_batch_when_it_is_written_and_never_a_wrong_block(monkeypatch: pytest.MonkeyPatch) -> None:
    array, engine = np.zeros(8, np.uint8), FakeEngine()
    transfer = on_device(array, monkeypatch)
    transfer.expect(engine.commands, ExpectBlocks(CONN, 1, (ref(0, b"abcd"), ref(4, b"wxyz"))))
    engine.arrive(1, b"abcd", b"!!!!")
    assert not array.any(), "until the batch is written, it is in host buffers"
    assert transfer.write(WriteBlocks(CONN, 1, (1,))) == BlocksWritten(CONN, 1, (1,))
    assert array.tobytes() == b"abcd" + bytes(4)


def test_blocks_on_a_device_are_copied_to_be_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    array, engine = np.frombuffer(b"abcdwxyz", np.uint8).copy(), FakeEngine()
    transfer = on_device(array, monkeypatch)
    assert transfer.send(engine.commands, SendBlocks(CONN, (ref(4, b"wxyz"), ref(0, b"abcd")))) is None
    assert engine.sent == [b"wxyz", b"abcd"]


def test_what_the_engine_finds_changed_is_reported() -> None:
    array, engine = np.zeros(8, np.uint8), FakeEngine()
    engine.changed = [1]
    sending = SendBlocks(CONN, (ref(0, bytes(4)), ref(4, b"wxyz")))
    assert on_host(array).send(engine.commands, sending) == BlocksChanged(CONN, (1,))
    assert engine.sent == []


def test_blake3_is_verified_here_and_not_by_the_engine() -> None:
    pytest.importorskip("blake3", reason="needs the extra blake3")
    array, engine = np.zeros(8, np.uint8), FakeEngine()
    transfer = on_host(array, "blake3")
    blocks = ref(0, b"abcd", "blake3"), ref(4, b"wxyz", "blake3")
    transfer.expect(engine.commands, ExpectBlocks(CONN, 1, blocks))
    assert [block[3] for block in engine.expected[1]] == [None, None]
    engine.arrive(1, b"abcd", b"!!!!")
    assert transfer.write(WriteBlocks(CONN, 1, ())) == BlocksWritten(CONN, 1, (1,))
    assert transfer.send(engine.commands, SendBlocks(CONN, blocks)) == BlocksChanged(CONN, (1,))
    assert engine.sent == []
