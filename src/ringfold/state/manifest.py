"""What a peer has at one moment, without the bytes: names, sizes and hashes of its arrays, and the offer made of them.

Pure. The bytes that a manifest describes are in the `Snapshot` that it belongs to (`snapshot.py`), which only the shell
holds.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import NamedTuple

import msgspec
from msgspec.structs import replace

from ringfold.state.blocks import BLOCK_BYTES
from ringfold.wire.messages import Branch, HashKind, KeyOffer, Lineage, Offer, SyncStrategy

_encoder = msgspec.msgpack.Encoder()


class LoadedCheckpoint(NamedTuple):
    """A checkpoint that was loaded: its revision, and the digest of its content."""

    revision: int
    digest: bytes


@dataclass(frozen=True, slots=True, eq=False)
class StateManifest:
    """The arrays of a state in the order of their names. An array's key is its index in these lists.

    Two manifests are the same only if they are one object: each sync call makes its own.
    """

    revision: int
    hash: HashKind
    torn: bool
    keys: list[KeyOffer]
    sizes: list[int]
    """Per key the bytes of the array."""
    hashes: list[bytes]
    """Per key the hashes of its blocks, one after the other; empty for an array that may differ."""
    block_bytes: int = BLOCK_BYTES
    lineage: Lineage | None = None
    loaded: LoadedCheckpoint | None = None
    """The checkpoint that was loaded last."""
    is_saved: bool = False
    """Whether the program saves checkpoints of the state."""

    @property
    def nbytes(self) -> int:
        """The size of the state, all arrays together."""
        return sum(self.sizes)

    def offer(
        self,
        strategy: SyncStrategy,
        *,
        stepped: bool = False,
        rollback: bool = False,
        checkpoints: Sequence[Branch] = (),
    ) -> Offer:
        """What this peer sends to the master at the beginning of a sync."""
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
    """Whether two peers have the same names, dtypes, shapes and hash, so that their content can be compared."""
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
    """16 bytes that are equal for two offers with the same structure and the same content that counts."""
    keys = offer.keys
    if any(key.may_differ and key.root for key in keys):
        keys = [replace(key, root=b"") if key.may_differ else key for key in keys]
    return blake2b(_encoder.encode((offer.hash, keys)), digest_size=16).digest()
