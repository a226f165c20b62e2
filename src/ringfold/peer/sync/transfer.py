"""The block effects of a sync, carried out on the program's arrays.

The machine (`syncing.py`) names blocks, and this file reads, verifies and writes their bytes:

    ExpectBlocks   give the engine the places of the blocks of a batch
    WriteBlocks    a batch has arrived: verify it, copy it to a device, and report `BlocksWritten`
    SendBlocks     read blocks, verify them, and give them to the engine; `BlocksChanged` if one has another hash

Blocks of an array in host memory are sent from the array and received into it, without a copy. A block on a device is
copied through a host buffer of its size. The engine verifies rf64 as it moves the bytes; blake3 is verified here.

The host buffers are bounded by what a receiver may request: a window per source (`state/fetch.py`), and for each
request that is served at most two windows (`state/serve.py`).
"""

from collections.abc import Sequence
from dataclasses import dataclass

from ringfold.peer.effects import ExpectBlocks, SendBlocks, WriteBlocks
from ringfold.peer.engine import Commands, RawBlock
from ringfold.peer.events import BlocksChanged, BlocksWritten
from ringfold.state.blocks import BlockRef
from ringfold.state.hashing import Bytes, block_hash
from ringfold.state.snapshot import Snapshot


@dataclass(frozen=True, slots=True)
class PendingBlock:
    """A block that was requested, and where it arrives: in the array itself, or in a host buffer for a device."""

    ref: BlockRef
    memory: Bytes


class BlockTransfer:
    """Moves the blocks of one sync between a snapshot's arrays and an engine."""

    def __init__(self, snapshot: Snapshot) -> None:
        self._memories = snapshot.memories
        self._hash = snapshot.manifest.hash
        self.is_in_place = self._hash == "rf64" and all(each.host is not None for each in self._memories)
        """Whether blocks arrive verified and where they belong, so that `write` copies nothing."""
        self._pending: dict[int, list[PendingBlock]] = {}
        """By batch: what was requested and is not written yet."""

    def expect(self, engine: Commands, effect: ExpectBlocks) -> None:
        """Tell the engine where the blocks of a batch belong. Nothing is copied."""
        pending = [
            PendingBlock(ref, self._memories[ref.key].receive_buffer(ref.offset, ref.offset + ref.nbytes))
            for ref in effect.blocks
        ]
        self._pending[effect.batch] = pending
        engine.expect_blocks(
            effect.conn, effect.batch, [(each.memory, 0, each.ref.nbytes, self._rf64(each.ref)) for each in pending]
        )

    def write(self, effect: WriteBlocks) -> BlocksWritten:
        """Verify what the engine did not, and copy to a device what belongs there. Wrong blocks are not copied."""
        bad = set(effect.bad)
        for place, pending in enumerate(self._pending.pop(effect.batch)):
            if self._hash != "rf64" and block_hash(pending.memory, self._hash) != pending.ref.digest:
                bad.add(place)
            if place not in bad:
                self._memories[pending.ref.key].write(pending.ref.offset, pending.memory)
        return BlocksWritten(effect.conn, effect.batch, tuple(sorted(bad)))

    def send(self, engine: Commands, effect: SendBlocks) -> BlocksChanged | None:
        """Give the blocks to the engine; if one has another hash by now, none is sent."""
        blocks = self.read(effect)
        changed = self.changed(effect, blocks) or engine.send_blocks(effect.conn, blocks)
        return BlocksChanged(effect.conn, tuple(changed)) if changed else None

    def read(self, effect: SendBlocks) -> list[RawBlock]:
        """The blocks as the engine takes them. Those on a device are copied to the host."""
        blocks: list[RawBlock] = []
        for ref in effect.blocks:
            memory = self._memories[ref.key]
            if memory.host is not None:
                blocks.append((memory.host, ref.offset, ref.nbytes, self._rf64(ref)))
            else:
                blocks.append((memory.read(ref.offset, ref.offset + ref.nbytes), 0, ref.nbytes, self._rf64(ref)))
        return blocks

    def changed(self, effect: SendBlocks, blocks: Sequence[RawBlock]) -> list[int]:
        """The places of the blocks that do not have their blake3 hash. The engine compares rf64 when it sends."""
        if self._hash == "rf64":
            return []
        content = (memory[offset : offset + length] for memory, offset, length, _ in blocks)
        pairs = zip(effect.blocks, content, strict=True)
        return [place for place, (ref, block) in enumerate(pairs) if block_hash(block, self._hash) != ref.digest]

    def _rf64(self, ref: BlockRef) -> int | None:
        return int.from_bytes(ref.digest, "little") if self._hash == "rf64" else None
