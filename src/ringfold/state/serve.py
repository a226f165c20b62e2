"""What a peer gives to a visitor during a sync: hash lists and blocks, or the reason why not.

A holder has everything. A receiver gives what it has got and verified so far, and the keys that it need not fetch. What
may differ is never given. The peer that sends a block compares it with its hash first: a holder whose own state changed
during the sync finds that out here, and not its visitors.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from ringfold.errors import RemoteProtocolError
from ringfold.state.array_memory import block_count, block_range
from ringfold.state.fetch import BATCH_BLOCKS, HASHES_BYTES, HASHES_KEYS, WINDOW_BLOCKS, Fetch
from ringfold.state.fetch_effects import BlockRange, WantedKey
from ringfold.state.hashing import Bytes, digest_bytes
from ringfold.state.manifest import Snapshot


@dataclass(frozen=True, slots=True)
class Piece:
    """A block to send: `length` bytes of `memory` from `offset` on, and the hash that they must have."""

    memory: Bytes
    offset: int
    length: int
    expected: bytes


@dataclass(frozen=True, slots=True)
class BlockRefusal:
    """Why a visitor does not get what it asked for. An honest one never hears this."""

    text: str


class BlockServer:
    """What is here to be given. `fetch` is what this peer itself receives, if it does."""

    def __init__(self, snapshot: Snapshot, fetch: Fetch | None = None) -> None:
        self._snapshot = snapshot
        self._fetch = fetch
        self._digest = digest_bytes(snapshot.hash)

    def greeting(self) -> list[list[BlockRange]]:
        """What a receiver announces to a fellow that has just come, one `Have` each: all that is here now, and an empty
        one if nothing new will come from here any more.
        """
        block_bytes = self._snapshot.block_bytes
        sizes = [block_count(memory.nbytes, block_bytes) for memory in self._snapshot.memories]
        ranges = [(key, 0, count) for key, count in enumerate(sizes) if count and self._is_whole(key)]
        if self._fetch is None:
            return [ranges, []] if ranges else [[]]
        ranges += self._fetch.here()
        return ([ranges] if ranges else []) + ([[]] if self._fetch.at_end else [])

    def hashes_for(self, keys: Sequence[int]) -> list[tuple[int, bytes]] | BlockRefusal:
        """The hash lists of these keys, no more of them than a `Fetch` asks for at once."""
        if not 0 < len(keys) <= HASHES_KEYS:
            return BlockRefusal(f"the block hashes of {len(keys)} keys at once: from 1 to {HASHES_KEYS} are given")
        lists: list[tuple[int, bytes]] = []
        size = 0
        for key in keys:
            found = self._hashes_of(key)
            if found is None:
                return BlockRefusal(f"the block hashes of key {key} are not here")
            size += len(found)
            if lists and size > HASHES_BYTES:
                return BlockRefusal(f"more than {HASHES_BYTES} bytes of block hashes at once are too many")
            lists.append((key, found))
        return lists

    def blocks_for(self, blocks: Sequence[tuple[int, int]]) -> list[Piece] | BlockRefusal:
        """The memory of these blocks, in this order. A block on a device is copied to the host for it."""
        if not blocks:
            return BlockRefusal("no blocks were asked for")
        block_bytes, most = self._snapshot.block_bytes, 2 * WINDOW_BLOCKS * self._snapshot.block_bytes
        if len(blocks) > WINDOW_BLOCKS * BATCH_BLOCKS:
            return BlockRefusal(f"{len(blocks)} blocks at once are too many")
        pieces = []
        size = 0
        for key, block in blocks:
            hashes = self._hashes_of(key)
            if hashes is None or not 0 <= block < len(hashes) // self._digest:
                return BlockRefusal(f"there is no block {block} of key {key} here")
            if not self._is_whole(key) and not (self._fetch is not None and self._fetch.has(key, block)):
                return BlockRefusal(f"block {block} of key {key} is not here yet")
            memory = self._snapshot.memories[key]
            first, last = block_range(block, memory.nbytes, block_bytes)
            size += last - first
            if size > most:
                return BlockRefusal(f"more than {most} bytes at once are too many")
            expected = hashes[block * self._digest : (block + 1) * self._digest]
            if memory.host is not None:
                pieces.append(Piece(memory.host, first, last - first, expected))
            else:
                pieces.append(Piece(memory.read(first, last), 0, last - first, expected))
        return pieces

    def _hashes_of(self, key: int) -> bytes | None:
        """The hash list of the content that won; None where it may differ, or is not known yet."""
        if not 0 <= key < len(self._snapshot.keys) or self._snapshot.keys[key].may_differ:
            return None
        if self._fetch is not None and self._fetch.fetches(key):
            return self._fetch.hashes_of(key)
        return self._snapshot.hashes[key]

    def _is_whole(self, key: int) -> bool:
        fetched = self._fetch is not None and self._fetch.fetches(key)
        return not fetched and not self._snapshot.keys[key].may_differ


def wanted_of(snapshot: Snapshot, fetch: Sequence[tuple[int, bytes]]) -> list[WantedKey]:
    """A plan's list of keys to fetch, with what is here of them now. Raises `RemoteProtocolError` on strange keys."""
    if len({key for key, _ in fetch}) < len(fetch):
        raise RemoteProtocolError("the plan of a sync names a key twice")
    for key, root in fetch:
        known = 0 <= key < len(snapshot.keys) and not snapshot.keys[key].may_differ
        if not known or len(root) != digest_bytes(snapshot.hash):
            raise RemoteProtocolError(f"the plan of a sync names key {key}, which cannot be fetched here")
    return [WantedKey(key, root, snapshot.memories[key].nbytes, snapshot.hashes[key]) for key, root in fetch]
