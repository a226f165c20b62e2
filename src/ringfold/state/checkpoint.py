"""Shared state on disk: one file per checkpoint, complete or not there at all, and checked when it is read.

The file. Its name is `state-REVISION-DIGEST.ringfold`: the revision with twelve digits or more, and 16 hex digits of
the content's digest. Inside, little-endian:

    8 bytes    "RINGFOLD"
    u32, u32   the version of the format (1), and zero
    u64        the length of the manifest
    16 bytes   BLAKE2b of the manifest
    ...        the manifest: JSON, see `CheckpointManifest`; hashes in base64
    ...        zeros up to a multiple of 64; from here on the manifest's offsets count
    ...        the arrays' bytes, each at its offset, which is a multiple of 64

Saving. Everything goes into a file with a name of its own (`.state-...saving`), block by block through one buffer: what
is hashed is what is written. Then the file is synced, renamed, and its directory is synced. A reader sees the whole
file or none, and a crash leaves the older ones alone.

Sharing a directory. Peers of one host save the same content, so the name is the same, too: the second one finds the
file there and has nothing to do, and if two write at once, the second rename puts the same bytes in place. A writer
holds a lock on its unfinished file. So an unfinished file that can be locked has no writer any more, and is removed.

Lineages. The manifest names the lineage that the state belongs to (`ancestry.py`). After a rollback a directory may
hold checkpoints of a branch that the run has abandoned. They are not loaded as the newest. They are pruned separately
from those of the run's own lineage, so that neither kind displaces the other.

Loading. The whole file is checked before the first byte of the state is touched; then it is read again, checked again,
and written into the arrays. A damaged file leaves the state as it was. Only a disk that fails between the two readings
leaves it torn.
"""

import errno
import fcntl
import logging
import os
import re
import struct
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from hashlib import blake2b
from io import FileIO
from pathlib import Path

import msgspec
import numpy as np

from ringfold.errors import StateError, UsageError
from ringfold.runtime.clock import random_bytes
from ringfold.state import hashing
from ringfold.state.ancestry import branch_of, is_abandoned_by_any, is_past
from ringfold.state.array_memory import ArrayMemory, memory_of
from ringfold.state.blocks import BLOCK_BYTES, block_count, digest_bytes
from ringfold.state.hashing import Bytes
from ringfold.state.manifest import LoadedCheckpoint, StateManifest, digest_of
from ringfold.state.shared import SharedState, note_saved, set_lineage, set_torn
from ringfold.state.snapshot import Snapshot
from ringfold.wire.decoding import decode
from ringfold.wire.messages import MAX_CHECKPOINTS, Branch, HashKind, KeyOffer, Lineage, Offer

_log = logging.getLogger(__name__)

MAGIC = b"RINGFOLD"
VERSION = 1
_HEAD = struct.Struct("<8sIIQ16s")
_NAME = re.compile(r"state-(\d{12,19})-([0-9a-f]{16})\.ringfold")
_UNFINISHED = re.compile(r"\.state-\d{12,19}-[0-9a-f]{16}\.saving")
_ALIGNMENT = 64
_CHUNK_BYTES = 8 * BLOCK_BYTES
MAX_MANIFEST_BYTES = 1 << 30


class CheckpointEntry(msgspec.Struct, frozen=True):
    """One array of a checkpoint: what it is, where its bytes begin in the file, and their hashes."""

    name: str
    dtype: str
    shape: list[int]
    may_differ: bool
    offset: int
    nbytes: int
    root: bytes
    hashes: bytes


class CheckpointManifest(msgspec.Struct, frozen=True):
    """The content of a checkpoint: everything but the arrays' bytes."""

    revision: int
    hash: HashKind
    keys: list[CheckpointEntry]
    lineage: Lineage | None = None
    """The lineage that it belongs to; files of older versions name none."""


_manifests = msgspec.json.Decoder(CheckpointManifest)


class _Damaged(StateError):
    """A checkpoint is damaged, or the disk cannot read it: another checkpoint may do."""


class Checkpoints:
    """The checkpoints of a shared state in one directory, of which the newest `keep` revisions stay.

    Several peers may share the directory as long as no array is marked `MayDiffer`: they save the same content. Peers
    whose content differs need a directory each. A directory belongs to one run.
    """

    def __init__(self, directory: str | os.PathLike[str], keep: int = 3) -> None:
        if keep < 1:
            raise UsageError(f"keep says how many checkpoints stay; {keep} is not enough")
        self.directory = Path(directory)
        self.keep = keep

    def save(self, state: SharedState) -> Path:
        """Write the state as it is now, and return the file. Afterwards it survives a crash of the machine.

        The arrays must not change meanwhile. If saving fails, `StateError` says why, and the older checkpoints are all
        still there.
        """
        if state.torn:
            raise StateError("the shared state is torn, so it is not saved: sync first, or load a checkpoint")
        note_saved(state)
        snapshot = Snapshot.take(state, private=True)
        manifest = _laid_out(snapshot.manifest)
        path = self.directory / _file_name(snapshot.manifest)
        with _errors_named(f"the checkpoint {path} cannot be written"):
            _make_directory(self.directory)
            self._remove_leftovers()
            if not _is_there(path, manifest):
                self._write(path, manifest, snapshot.memories)
            _sync_directory(self.directory)
            self._prune(path, manifest.lineage)
        return path

    def load_newest(self, state: SharedState) -> int | None:
        """Load the newest checkpoint that is whole, and return its revision; None if there is none at all.

        A damaged one is named in a warning, and the next older one is tried. If all are damaged, `StateError` says so:
        whether to begin again is for the caller to decide. What a later lineage has abandoned is not tried.
        """
        found = self._not_abandoned()
        was_torn = state.torn
        for path in found:
            try:
                return _load(path, state)
            except _Damaged as error:
                if state.torn and not was_torn:
                    raise
                _log.warning("skipped a checkpoint: %s", error)
        if found:
            raise StateError(f"all {len(found)} checkpoints in {self.directory} are damaged (see the warnings)")
        return None

    def load(self, state: SharedState, revision: int) -> int:
        """Load exactly this revision, and return it. `StateError` if it is not there, or damaged."""
        own = self._not_abandoned()
        others = [path for path in self.paths() if path not in own]
        found = [path for path in (*own, *others) if _revision_of(path) == revision]
        there = ", ".join(str(each) for each in self.revisions()) or "none"
        missing = f"there is no checkpoint of revision {revision} in {self.directory}; there is: {there}"
        return self._load_first(state, found, missing)

    def load_branch(self, state: SharedState, branch: Branch) -> int:
        """Load exactly this revision of exactly this lineage. `StateError` if it is not there, or damaged."""
        found = [
            path for path, lineage in self._lineages() if lineage and branch_of(lineage, _revision_of(path)) == branch
        ]
        missing = f"there is no checkpoint of revision {branch.revision} of that lineage in {self.directory}"
        return self._load_first(state, found, missing)

    def _load_first(self, state: SharedState, found: list[Path], missing: str) -> int:
        was_torn = state.torn
        damage: StateError | None = None
        for path in found:
            try:
                return _load(path, state)
            except _Damaged as error:
                if state.torn and not was_torn:
                    raise
                damage = error
        if damage is not None:
            raise damage
        raise StateError(missing)

    def branches(self) -> list[Branch]:
        """What could be loaded by `load_branch`, newest revision first; the first few dozen."""
        found = ((path, lineage) for path, lineage in self._lineages() if lineage is not None)
        return [branch_of(lineage, _revision_of(path)) for path, lineage in found][:MAX_CHECKPOINTS]

    def _lineages(self) -> list[tuple[Path, Lineage | None]]:
        """The files, as `paths` lists them, each with its lineage. A file that cannot be read has none."""
        found: list[tuple[Path, Lineage | None]] = []
        for path in self.paths():
            lineage = None
            with suppress(OSError, StateError), open(path, "rb", buffering=0) as file:
                lineage = _manifest_in(path, file)[0].lineage
            found.append((path, lineage))
        return found

    def _not_abandoned(self) -> list[Path]:
        """The files without those that a lineage in this directory has abandoned."""
        found = self._lineages()
        known = [lineage for _, lineage in found if lineage is not None]
        return [
            path
            for path, lineage in found
            if lineage is None or not is_abandoned_by_any(branch_of(lineage, _revision_of(path)), known)
        ]

    def revisions(self) -> list[int]:
        """The revisions of which there is a checkpoint, newest first."""
        return sorted({_revision_of(path) for path in self.paths()}, reverse=True)

    def paths(self) -> list[Path]:
        """The files, newest revision first; of one revision, the file that was saved last."""
        with _errors_named(f"the checkpoints in {self.directory} cannot be listed"):
            if not self.directory.exists():
                return []
            found = [path for path in self.directory.iterdir() if _NAME.fullmatch(path.name)]
            dated = []
            for path in found:
                with suppress(FileNotFoundError):  # another peer pruned it
                    dated.append((_revision_of(path), path.stat().st_mtime_ns, path.name, path))
            return [path for *_, path in sorted(dated, reverse=True)]

    def discard_after(self, revision: int) -> list[Path]:
        """Remove the checkpoints that are newer than `revision`: those of a lineage that was rolled back."""
        gone = [path for path in self.paths() if _revision_of(path) > revision]
        with _errors_named(f"the checkpoints in {self.directory} cannot be removed"):
            for path in gone:
                path.unlink(missing_ok=True)
        return gone

    def _prune(self, saved: Path, present: Lineage | None) -> None:
        """Keep the newest revisions, and what was saved just now. A file that cannot be removed does no harm.

        Those of the run's own lineage are counted separately from all others.
        """
        own: list[Path] = []
        others: list[Path] = []
        for path, lineage in self._lineages():
            of = None if lineage is None else branch_of(lineage, _revision_of(path))
            is_own = lineage == present if of is None or present is None else is_past(of, present)
            (own if is_own else others).append(path)
        for paths in (own, others):
            kept = sorted({_revision_of(path) for path in paths}, reverse=True)[: self.keep]
            for path in paths:
                if _revision_of(path) not in kept and path != saved:
                    try:
                        path.unlink(missing_ok=True)
                    except OSError as error:
                        _log.warning("an old checkpoint cannot be removed: %s", error)

    def _remove_leftovers(self) -> None:
        """Remove the unfinished files of crashed saves: those that no writer has locked."""
        for path in [each for each in self.directory.iterdir() if _UNFINISHED.fullmatch(each.name)]:
            with suppress(OSError), open(path, "rb") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.unlink(missing_ok=True)

    def _write(self, path: Path, manifest: CheckpointManifest, memories: list[ArrayMemory]) -> None:
        revision = _revision_of(path)
        unfinished, file = _create(lambda: self.directory / f".state-{revision:012}-{random_bytes(8).hex()}.saving")
        try:
            with file:
                _write_all(file, manifest, memories)
                file.flush()
                os.fsync(file.fileno())
                unfinished.rename(path)
        except BaseException:
            unfinished.unlink(missing_ok=True)
            raise


# Writing


def _create(new_name: Callable[[], Path]) -> tuple[Path, FileIO]:
    """A new file that is locked. If another process removes it before the lock is taken, try another one."""
    while True:
        path = new_name()
        file = open(path, "xb", buffering=0)  # noqa: SIM115  # the caller closes it
        with suppress(OSError):  # a file system without locks: then no process removes it as a leftover either
            fcntl.flock(file, fcntl.LOCK_EX)
        if path.exists():
            return path, file
        file.close()


def _laid_out(state: StateManifest) -> CheckpointManifest:
    """The layout of the file. The offsets are part of the manifest, on whose length they would depend; so they count
    from the begin of the arrays, which `_begin_of` computes.
    """
    entries = []
    offset = 0
    for key, nbytes, hashes in zip(state.keys, state.sizes, state.hashes, strict=True):
        entries.append(
            CheckpointEntry(key.name, key.dtype, key.shape, key.may_differ, offset, nbytes, key.root, hashes)
        )
        offset = _aligned(offset + nbytes)
    return CheckpointManifest(state.revision, state.hash, entries, state.lineage)


def _write_all(file: FileIO, manifest: CheckpointManifest, memories: list[ArrayMemory]) -> None:
    encoded = msgspec.json.encode(manifest)
    _write_bytes(file, _HEAD.pack(MAGIC, VERSION, 0, len(encoded), blake2b(encoded, digest_size=16).digest()))
    _write_bytes(file, encoded)
    begin = _begin_of(encoded)
    buffer = np.empty(_CHUNK_BYTES, np.uint8)
    for entry, memory in zip(manifest.keys, memories, strict=True):
        file.seek(begin + entry.offset)
        for first in range(0, entry.nbytes, _CHUNK_BYTES):
            chunk = buffer[: min(_CHUNK_BYTES, entry.nbytes - first)]
            chunk[:] = memory.read(first, first + chunk.size)
            if not _has_hashes(chunk, entry, first, manifest.hash):
                raise StateError(f"{entry.name!r} was changed while it was saved; nothing was saved")
            _write_bytes(file, chunk)
    file.truncate(_size_of(manifest, begin))


def _write_bytes(file: FileIO, content: bytes | Bytes) -> None:
    """Write all of it: an unbuffered file may take less at a time."""
    view = memoryview(content) if isinstance(content, bytes) else content.data
    while view:
        view = view[file.write(view) :]


def _make_directory(directory: Path) -> None:
    """Make it with its parents. A new directory survives a crash once its parent directory is synced, too."""
    made = [each for each in (directory, *directory.parents) if not each.exists()]
    directory.mkdir(parents=True, exist_ok=True)
    for each in made:
        _sync_directory(each.parent)


def _sync_directory(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # some file systems have no such thing
            raise
    finally:
        os.close(descriptor)


def _is_there(path: Path, manifest: CheckpointManifest) -> bool:
    """Whether exactly this content was saved before: by this peer, or by another one that shares the directory."""
    try:
        with open(path, "rb", buffering=0) as file:
            found, begin = _manifest_in(path, file)
            return found == manifest and os.fstat(file.fileno()).st_size == _size_of(manifest, begin)
    except (OSError, _Damaged):
        return False


# Reading


def find_checkpoint(source: str | os.PathLike[str]) -> Path:
    """The checkpoint that a path means: a file, or the newest in a directory that no later lineage has abandoned."""
    path = Path(source)
    if not path.is_dir():
        return path
    found = Checkpoints(path)._not_abandoned()
    if not found:
        raise StateError(f"there is no checkpoint in {path}")
    return found[0]


def read_manifest(path: Path) -> CheckpointManifest:
    """What a checkpoint holds."""
    with _errors_named(f"the checkpoint {path} cannot be read"), open(path, "rb", buffering=0) as file:
        return _manifest_in(path, file)[0]


def read_arrays(path: Path, names: Collection[str]) -> dict[str, Bytes]:
    """The bytes of these arrays of a checkpoint, verified."""
    with _errors_named(f"the checkpoint {path} cannot be read"), open(path, "rb", buffering=0) as file:
        manifest, begin = _manifest_in(path, file)
        hashing.check_available(manifest.hash)
        wanted = msgspec.structs.replace(manifest, keys=[each for each in manifest.keys if each.name in names])
        size = os.fstat(file.fileno()).st_size
        for entry in wanted.keys:
            count = block_count(entry.nbytes) * digest_bytes(manifest.hash)
            if not 0 <= entry.nbytes <= size or len(entry.hashes) != count or entry.offset < 0:
                raise _Damaged(f"the manifest of {path} makes no sense: {entry.name!r}")
        found = {entry.name: np.empty(entry.nbytes, np.uint8) for entry in wanted.keys}
        for entry, first, chunk in _chunks(path, file, wanted, begin):
            _check_chunk(path, manifest, entry, first, chunk)
            found[entry.name][first : first + chunk.size] = chunk
    return found


def _load(path: Path, state: SharedState) -> int:
    with _errors_named(f"the checkpoint {path} cannot be read"), open(path, "rb", buffering=0) as file:
        manifest, begin = _manifest_in(path, file)
        state._before_read()
        memories = {name: memory_of(array, name) for name, array in state.arrays.items()}
        _check_fit(path, manifest, memories)
        hashing.check_available(manifest.hash)
        for entry, first, chunk in _chunks(path, file, manifest, begin):
            _check_chunk(path, manifest, entry, first, chunk)
        set_torn(state, True)
        for entry, first, chunk in _chunks(path, file, manifest, begin):
            _check_chunk(path, manifest, entry, first, chunk)
            memories[entry.name].write(first, chunk)
    state._after_write()
    state.revision = manifest.revision
    set_lineage(state, manifest.lineage, LoadedCheckpoint(manifest.revision, _digest(manifest, state)))
    set_torn(state, False)
    note_saved(state)
    return manifest.revision


def _digest(manifest: CheckpointManifest, state: SharedState) -> bytes:
    """`digest_of` an offer of exactly this content."""
    if manifest.hash != state.hash:
        return digest_of(Snapshot.take(state).manifest.offer("enforce-popular"))
    keys = [KeyOffer(each.name, each.dtype, each.shape, each.root, each.may_differ) for each in manifest.keys]
    return digest_of(Offer(manifest.revision, "enforce-popular", manifest.hash, keys))


def _manifest_in(path: Path, file: FileIO) -> tuple[CheckpointManifest, int]:
    """The manifest of an open checkpoint, and where its arrays begin."""
    head = file.read(_HEAD.size)
    if len(head) < _HEAD.size or not head.startswith(MAGIC):
        raise _Damaged(f"{path} is no checkpoint of Ringfold, or was cut off")
    _, version, _, length, digest = _HEAD.unpack(head)
    if version != VERSION:
        raise StateError(f"{path} has version {version} of the format; this Ringfold reads version {VERSION}")
    encoded = b""
    if length <= MAX_MANIFEST_BYTES:
        while len(encoded) < length and (more := file.read(length - len(encoded))):
            encoded += more
    if len(encoded) != length or blake2b(encoded, digest_size=16).digest() != digest:
        raise _Damaged(f"the manifest of {path} is damaged")
    manifest = decode(_manifests.decode, encoded, _Damaged, f"the manifest of {path} is none: ")
    return manifest, _begin_of(encoded)


def _check_fit(path: Path, manifest: CheckpointManifest, memories: dict[str, ArrayMemory]) -> None:
    """The program's arrays must be those of the checkpoint."""
    saved = {entry.name: entry for entry in manifest.keys}
    for name in sorted(saved.keys() | memories.keys()):
        if name not in saved:
            raise UsageError(f"{path} does not hold {name!r}; it has {', '.join(sorted(saved)) or 'nothing'}")
        entry = saved[name]
        there = f"{entry.dtype} {entry.shape}"
        if name not in memories:
            raise UsageError(f"{path} holds {name!r} ({there}), which the shared state does not have")
        here = f"{memories[name].dtype} {list(memories[name].shape)}"
        if here != there:
            raise UsageError(f"{name!r} is {there} in {path}, but {here} in the shared state")
        count = block_count(entry.nbytes) * digest_bytes(manifest.hash)
        if entry.nbytes != memories[name].nbytes or len(entry.hashes) != count or entry.offset < 0:
            raise _Damaged(f"the manifest of {path} makes no sense: {name!r}")


def _chunks(
    path: Path, file: FileIO, manifest: CheckpointManifest, begin: int
) -> Iterator[tuple[CheckpointEntry, int, Bytes]]:
    """Every array in chunks of whole blocks, all in one buffer that is reused."""
    buffer = np.empty(_CHUNK_BYTES, np.uint8)
    for entry in manifest.keys:
        file.seek(begin + entry.offset)
        for first in range(0, entry.nbytes, _CHUNK_BYTES):
            chunk = buffer[: min(_CHUNK_BYTES, entry.nbytes - first)]
            rest = chunk.data
            while rest:
                count = file.readinto(rest)
                if not count:
                    raise _Damaged(f"{path} was cut off in {entry.name!r}")
                rest = rest[count:]
            yield entry, first, chunk


def _check_chunk(path: Path, manifest: CheckpointManifest, entry: CheckpointEntry, first: int, chunk: Bytes) -> None:
    if not _has_hashes(chunk, entry, first, manifest.hash):
        raise _Damaged(f"{path} is damaged: the content of {entry.name!r} does not have its hash")


def _has_hashes(chunk: Bytes, entry: CheckpointEntry, first: int, kind: HashKind) -> bool:
    """Whether a chunk of whole blocks of an array has the hashes of the manifest."""
    size = digest_bytes(kind)
    place = first // BLOCK_BYTES * size
    found = hashing.block_hashes(chunk, kind)
    return found == entry.hashes[place : place + len(found)]


# Leaves


def _file_name(state: StateManifest) -> str:
    """The digest covers what may differ, too: two peers whose content differs there do not have the same file."""
    own = blake2b(digest_of(state.offer("enforce-popular")), digest_size=8)
    for key in state.keys:
        own.update(key.root)
    return f"state-{state.revision:012}-{own.hexdigest()}.ringfold"


def _revision_of(path: Path) -> int:
    found = _NAME.fullmatch(path.name)
    assert found is not None
    return int(found[1])


def _aligned(offset: int) -> int:
    return -(-offset // _ALIGNMENT) * _ALIGNMENT


def _begin_of(encoded: bytes) -> int:
    return _aligned(_HEAD.size + len(encoded))


def _size_of(manifest: CheckpointManifest, begin: int) -> int:
    return begin + max((entry.offset + entry.nbytes for entry in manifest.keys), default=0)


@contextmanager
def _errors_named(what: str) -> Iterator[None]:
    """Raise the system's errors as Ringfold's, which name the file."""
    try:
        yield
    except OSError as error:
        kind = _Damaged if error.errno in (errno.EIO, errno.ENOENT) else StateError
        raise kind(f"{what}: {error.strerror or error}") from error
