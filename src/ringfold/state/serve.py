"""What a peer sends to the receivers of a sync: hash lists and blocks, or the reason why it refuses. Pure.

A holder has everything. A receiver serves what it has received and verified so far, and the keys that it need not
fetch. Content that may differ is never served. Blocks are named here, with the hash that they must have; the shell
reads them and compares the hash before they are sent. So a holder whose own state changed during the sync finds that
out itself, before its receivers do.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from ringfold.errors import RemoteProtocolError
from ringfold.state.blocks import BlockRange, BlockRef, block_count, block_ref, digest_bytes
from ringfold.state.fetch import BATCH_BLOCKS, HASHES_BYTES, HASHES_KEYS, WINDOW_BLOCKS, Fetch
from ringfold.state.fetch_effects import WantedKey
from ringfold.state.manifest import StateManifest


@dataclass(frozen=True, slots=True)
class BlockRefusal:
    """Why a receiver does not get what it requested. A peer that keeps to the protocol never gets this."""

    text: str


class BlockServer:
    """Answers the requests of receivers. `fetch` is what this peer itself receives, if it does."""

    def __init__(self, manifest: StateManifest, fetch: Fetch | None = None) -> None:
        self._manifest = manifest
        self._fetch = fetch
        self._digest = digest_bytes(manifest.hash)

    def announcements(self) -> list[list[BlockRange]]:
        """What a receiver announces to another one that has just connected, one `Have` each: all that is here now, and
        an empty one if nothing new will come from here any more.
        """
        counts = [block_count(nbytes, self._manifest.block_bytes) for nbytes in self._manifest.sizes]
        ranges = [(key, 0, count) for key, count in enumerate(counts) if count and self._is_whole(key)]
        if self._fetch is None:
            return [ranges, []] if ranges else [[]]
        ranges += self._fetch.here()
        return ([ranges] if ranges else []) + ([[]] if self._fetch.at_end else [])

    def hashes_for(self, keys: Sequence[int]) -> list[tuple[int, bytes]] | BlockRefusal:
        """The hash lists of these keys, at most as many as a `Fetch` requests at once."""
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

    def blocks_for(self, blocks: Sequence[tuple[int, int]]) -> list[BlockRef] | BlockRefusal:
        """These blocks, in this order, with the digests that they must have when they are sent."""
        if not blocks:
            return BlockRefusal("no blocks were requested")
        manifest = self._manifest
        max_bytes = 2 * WINDOW_BLOCKS * manifest.block_bytes
        if len(blocks) > WINDOW_BLOCKS * BATCH_BLOCKS:
            return BlockRefusal(f"{len(blocks)} blocks at once are too many")
        refs = []
        size = 0
        for key, block in blocks:
            hashes = self._hashes_of(key)
            if hashes is None or not 0 <= block < len(hashes) // self._digest:
                return BlockRefusal(f"there is no block {block} of key {key} here")
            if not self._is_whole(key) and not (self._fetch is not None and self._fetch.has(key, block)):
                return BlockRefusal(f"block {block} of key {key} is not here yet")
            ref = block_ref(key, block, manifest.sizes[key], hashes, manifest.hash, manifest.block_bytes)
            size += ref.nbytes
            if size > max_bytes:
                return BlockRefusal(f"more than {max_bytes} bytes at once are too many")
            refs.append(ref)
        return refs

    def _hashes_of(self, key: int) -> bytes | None:
        """The hash list of the content that won; None where it may differ, or is not known yet."""
        if not 0 <= key < len(self._manifest.keys) or self._manifest.keys[key].may_differ:
            return None
        if self._fetch is not None and self._fetch.fetches(key):
            return self._fetch.hashes_of(key)
        return self._manifest.hashes[key]

    def _is_whole(self, key: int) -> bool:
        fetched = self._fetch is not None and self._fetch.fetches(key)
        return not fetched and not self._manifest.keys[key].may_differ


def wanted_of(manifest: StateManifest, fetch: Sequence[tuple[int, bytes]]) -> list[WantedKey]:
    """A plan's list of keys to fetch, with what is here of them now. Raises `RemoteProtocolError` for unknown keys."""
    if len({key for key, _ in fetch}) < len(fetch):
        raise RemoteProtocolError("the plan of a sync names a key twice")
    for key, root in fetch:
        known = 0 <= key < len(manifest.keys) and not manifest.keys[key].may_differ
        if not known or len(root) != digest_bytes(manifest.hash):
            raise RemoteProtocolError(f"the plan of a sync names key {key}, which cannot be fetched here")
    return [WantedKey(key, root, manifest.sizes[key], manifest.hashes[key]) for key, root in fetch]
