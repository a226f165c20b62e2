"""The named arrays that all peers keep bit-identical, and the revision, which counts their common changes.

A state is *torn* while some of its blocks come from another state than the rest: a sync, or the loading of a
checkpoint, began to write and did not end. A torn state never votes. It is whole again after a sync, or after a
checkpoint was loaded completely.
"""

import operator
from collections.abc import Iterator, Mapping
from typing import Protocol, SupportsIndex, get_args, runtime_checkable

from ringfold.errors import UsageError
from ringfold.limits import MAX_KEYS
from ringfold.state import hashing
from ringfold.state.array_memory import memory_of
from ringfold.state.blocks import BLOCK_BYTES
from ringfold.state.manifest import LoadedCheckpoint
from ringfold.wire.messages import HashKind, Lineage


class MayDiffer:
    """Marks an array of a shared state whose content is each peer's own: `SharedState(seen=rf.MayDiffer(counts))`.

    All peers must have it with the same dtype and shape. Its content plays no part in a sync, is never sent, and is
    never overwritten; checkpoints do hold it.
    """

    __slots__ = ("array",)

    def __init__(self, array: object) -> None:
        self.array = array

    def __repr__(self) -> str:
        return f"MayDiffer({self.array!r})"


@runtime_checkable
class HasSharedArrays(Protocol):
    """An object that keeps its state in arrays. In a shared state it stands for all of them: its own name, a dot, and
    the name that it gives each."""

    def shared_arrays(self) -> Mapping[str, object]: ...


class SharedState:
    """Names arrays that must be the same on every peer: `SharedState(model=weights, momentum=velocity)`.

    The arrays are referred to, not copied: change them in place, because a name that is bound to another array is not
    seen here. They may be NumPy arrays, torch tensors on the CPU or on a GPU, or anything else with the buffer protocol
    or DLPack, of any dtype that holds no Python objects; they must be contiguous and writable. An array in `MayDiffer`
    is only compared by dtype and shape. A `Sampler` stands for the arrays that it keeps its position in.

    `revision` counts how often the state has been changed by all; a run that continues from a checkpoint begins with
    the checkpoint's. `hash` says how content is compared: "rf64" is fast, and "blake3" also stands up to peers that
    lie (it needs the extra `blake3`). All peers must use the same one.
    """

    _block_bytes = BLOCK_BYTES
    """What is hashed and transferred as one. Only simulated states, which are small, have another size."""

    def __init__(
        self,
        arrays: Mapping[str, object] | None = None,
        /,
        *,
        revision: int = 0,
        hash: HashKind = "rf64",
        **named: object,
    ) -> None:
        both = dict(arrays or {})
        if twice := sorted(both.keys() & named.keys()):
            raise UsageError(f"the shared state has two arrays named {twice[0]!r}")
        both.update(named)
        if not both:
            raise UsageError("a shared state needs at least one array")
        self._fill(both, revision, hash)

    @classmethod
    def _without_arrays(cls, revision: int = 0) -> "SharedState":
        """A state that is only a revision: for a step loop whose caller shares nothing."""
        state = cls.__new__(cls)
        state._fill({}, revision, "rf64")
        return state

    def _fill(self, arrays: dict[str, object], revision: int, hash: HashKind) -> None:
        if strange := [name for name in arrays if not isinstance(name, str) or not name]:
            raise UsageError(f"an array's name must be a non-empty string, not {strange[0]!r}")
        if len(arrays) > MAX_KEYS:
            raise UsageError(f"a shared state has at most {MAX_KEYS} arrays, not {len(arrays)}; share larger ones")
        if hash not in get_args(HashKind):
            raise UsageError(f"unknown hash {hash!r}; there are {', '.join(get_args(HashKind))}")
        hashing.check_available(hash)
        self._bind(arrays)
        for name, array in self._arrays.items():
            memory_of(array, name)  # raises now what each sync would raise
        self._hash: HashKind = hash
        self._torn = False
        self._lineage: Lineage | None = None
        self._loaded: LoadedCheckpoint | None = None
        self._is_saved = False
        self.revision = revision

    def _bind(self, arrays: Mapping[str, object]) -> None:
        self._arrays: dict[str, object] = {}
        self._may_differ: set[str] = set()
        self._objects = {name: each for name, each in arrays.items() if isinstance(each, HasSharedArrays)}
        arrays = _with_arrays_of(self._objects, arrays)
        for name in sorted(arrays):
            array = arrays[name]
            if isinstance(array, MayDiffer):
                self._may_differ.add(name)
                array = array.array
            self._arrays[name] = array

    def _before_read(self) -> None:
        """The arrays are about to be hashed, saved or overwritten. A state made of other objects gets them here."""

    def _after_write(self) -> None:
        """A sync or a load has ended well; the state still counts as torn. Other objects get their content here."""

    @property
    def arrays(self) -> Mapping[str, object]:
        """The arrays by name, sorted, so that all peers go through them in the same order."""
        return self._arrays

    @property
    def objects(self) -> Mapping[str, object]:
        """The objects by name that keep their state in some of the arrays."""
        return self._objects

    @property
    def revision(self) -> int:
        """How often the state has been changed by all. Syncs and checkpoints set it; so may the program."""
        return self._revision

    @revision.setter
    def revision(self, revision: SupportsIndex) -> None:
        try:
            number = operator.index(revision)
        except TypeError:
            raise UsageError(f"a revision is a whole number, not {revision!r}") from None
        if not 0 <= number < 1 << 63:
            raise UsageError(f"a revision counts from 0 and fits into 63 bits, so {number} is none")
        self._revision = number

    def push_revision(self) -> int:
        """Count one more change of the state, and return the new revision. Once between two syncs, on every peer."""
        self.revision += 1
        return self.revision

    @property
    def hash(self) -> HashKind:
        """How content is compared."""
        return self._hash

    @property
    def torn(self) -> bool:
        """Whether the state is only partly written, by a sync or a checkpoint that did not end. Sync again, or load."""
        return self._torn

    def may_differ(self, name: str) -> bool:
        """Whether the content of this array is each peer's own."""
        return name in self._may_differ

    def __iter__(self) -> Iterator[str]:
        return iter(self._arrays)

    def __len__(self) -> int:
        return len(self._arrays)

    def __repr__(self) -> str:
        torn = ", torn" if self._torn else ""
        return f"SharedState({', '.join(self._arrays)}; revision {self.revision}{torn})"


def _with_arrays_of(objects: Mapping[str, HasSharedArrays], arrays: Mapping[str, object]) -> dict[str, object]:
    """The arrays, with those of the objects instead of the objects."""
    given = {name: array for name, array in arrays.items() if name not in objects}
    for name, each in objects.items():
        for part, array in each.shared_arrays().items():
            if f"{name}.{part}" in given:
                raise UsageError(f"the shared state has two arrays named {f'{name}.{part}'!r}")
            given[f"{name}.{part}"] = array
    return given


def set_torn(state: SharedState, torn: bool) -> None:
    """Mark a state as torn before the first byte of another one is written into it; unmark it after the last."""
    state._torn = torn


def note_saved(state: SharedState) -> None:
    """The program saves checkpoints of this state: after a loss, its process may come back with one."""
    state._is_saved = True


def lineage_of(state: SharedState) -> Lineage | None:
    """The lineage that the state belongs to, according to the last sync or the last loaded checkpoint."""
    return state._lineage


def set_lineage(state: SharedState, lineage: Lineage | None, loaded: LoadedCheckpoint | None = None) -> None:
    """The state is part of this lineage from now on. `loaded` names the checkpoint that it is now, if it is one."""
    state._lineage, state._loaded = lineage, loaded
