"""A state at one moment: its manifest, and the memory of each array.

A snapshot copies nothing: it is valid while the arrays are not changed, which is until the sync has ended. Taking one
reads the whole state once, at memory speed. The content of an array that may differ is not read.
"""

from dataclasses import dataclass

from ringfold.state.array_memory import ArrayMemory, memory_of
from ringfold.state.blocks import BLOCK_BYTES, root_hash
from ringfold.state.manifest import StateManifest
from ringfold.state.shared import SharedState
from ringfold.wire.messages import KeyOffer


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The state as it was when the snapshot was taken."""

    manifest: StateManifest
    memories: list[ArrayMemory]
    """By key, as the lists of the manifest."""

    @classmethod
    def take(cls, state: SharedState, threads: int = 0, *, private: bool = False) -> "Snapshot":
        """Hash everything with so many threads (0: one per core). `private`: also the content that may differ."""
        state._before_read()
        kind, block_bytes = state.hash, state._block_bytes
        memories: list[ArrayMemory] = []
        hashes: list[bytes] = []
        keys: list[KeyOffer] = []
        for name, array in state.arrays.items():
            memory = memory_of(array, name)
            differs = state.may_differ(name)
            if differs and not private:
                blocks, root = b"", b""
            else:
                blocks = memory.block_hashes(kind, 1 if memory.nbytes <= BLOCK_BYTES else threads, block_bytes)
                root = root_hash(blocks, memory.nbytes, kind)
            memories.append(memory)
            hashes.append(blocks)
            keys.append(KeyOffer(name, memory.dtype, list(memory.shape), root, differs))
        manifest = StateManifest(
            revision=state.revision,
            hash=kind,
            torn=state.torn,
            keys=keys,
            sizes=[memory.nbytes for memory in memories],
            hashes=hashes,
            block_bytes=block_bytes,
            lineage=state._lineage,
            loaded=state._loaded,
            is_saved=state._is_saved,
        )
        return cls(manifest, memories)
