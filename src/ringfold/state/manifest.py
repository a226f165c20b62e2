"""What a peer has at one moment: the memory of each array, the hashes of its blocks, and the offer made of them.

A snapshot copies nothing: it holds for as long as nobody changes the arrays, which is until the sync has ended. Making
one reads the whole state once, at the speed of memory. The content of an array that may differ is not read at all.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

import msgspec
from msgspec.structs import replace

from ringfold.state import hashing
from ringfold.state.array_memory import ArrayMemory, memory_of
from ringfold.state.hashing import BLOCK_BYTES
from ringfold.state.shared import Loaded, SharedState
from ringfold.wire.messages import Branch, HashKind, KeyOffer, Lineage, Offer, SyncStrategy

_encoder = msgspec.msgpack.Encoder()


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The state as it was taken, keys in the order of the manifest. A key's number is its place in these lists."""

    revision: int
    hash: HashKind
    torn: bool
    memories: list[ArrayMemory]
    hashes: list[bytes]
    """Per key the hashes of its blocks, one after the other; empty for one that may differ."""
    keys: list[KeyOffer]
    block_bytes: int = BLOCK_BYTES
    lineage: Lineage | None = None
    loaded: Loaded | None = None
    """The checkpoint that was loaded last."""
    is_saved: bool = False
    """Whether the program keeps checkpoints of it."""

    @classmethod
    def take(cls, state: SharedState, threads: int = 0, *, private: bool = False) -> "Snapshot":
        """Hash everything with so many threads (0: one per core). `private`: also the content that may differ."""
        kind, block_bytes = state.hash, state._block_bytes
        memories, hashes, keys = [], [], []
        for name, array in state.arrays.items():
            memory = memory_of(array, name)
            differs = state.may_differ(name)
            if differs and not private:
                blocks, root = b"", b""
            else:
                blocks = memory.block_hashes(kind, 1 if memory.nbytes <= BLOCK_BYTES else threads, block_bytes)
                root = hashing.root_hash(blocks, memory.nbytes, kind)
            memories.append(memory)
            hashes.append(blocks)
            keys.append(KeyOffer(name, memory.dtype, list(memory.shape), root, differs))
        history = state._lineage, state._loaded, state._is_saved
        return cls(state.revision, kind, state.torn, memories, hashes, keys, block_bytes, *history)

    @property
    def nbytes(self) -> int:
        """How large the state is, all arrays together."""
        return sum(memory.nbytes for memory in self.memories)

    def offer(
        self,
        strategy: SyncStrategy,
        *,
        stepped: bool = False,
        rollback: bool = False,
        checkpoints: Sequence[Branch] = (),
    ) -> Offer:
        """What this peer says to the master at the beginning of a sync."""
        offer = Offer(
            self.revision,
            strategy,
            self.hash,
            self.keys,
            self.torn,
            stepped,
            rollback,
            self.lineage,
            checkpoints=list(checkpoints),
            is_saved=self.is_saved,
        )
        if self.loaded is None or self.torn or self.loaded != (self.revision, digest_of(offer)):
            return offer
        return replace(offer, is_loaded=True)


def have_one_structure(one: Offer, other: Offer) -> bool:
    """Whether two peers have in common what they must before their content can be compared."""
    return (
        one.hash == other.hash
        and len(one.keys) == len(other.keys)
        and all(
            here.name == there.name
            and here.dtype == there.dtype
            and here.shape == there.shape
            and here.may_differ == there.may_differ
            for here, there in zip(one.keys, other.keys, strict=True)
        )
    )


def digest_of(offer: Offer) -> bytes:
    """16 bytes that are equal where two offers have the same structure and the same content that counts."""
    keys = offer.keys
    if any(key.may_differ and key.root for key in keys):
        keys = [replace(key, root=b"") if key.may_differ else key for key in keys]
    return blake2b(_encoder.encode((offer.hash, keys)), digest_size=16).digest()
