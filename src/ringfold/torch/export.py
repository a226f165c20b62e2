"""Checkpoints as files that other programs read (safetensors, `torch.save`), and such files as checkpoints.

The names in a file are those of the model's `state_dict`: the keys of the checkpoint without the prefix, and every name
of a tensor that has several. safetensors stores no tensor twice by reference, so there each name gets a copy.

A file is complete or absent: it is written under a temporary name, synced and renamed. No file can run code: a torch
file is read with `weights_only`.
"""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ringfold.errors import StateError, UsageError
from ringfold.runtime.clock import random_bytes
from ringfold.state.checkpoint import (
    CheckpointEntry,
    CheckpointManifest,
    Checkpoints,
    find_checkpoint,
    read_arrays,
    read_manifest,
)
from ringfold.state.hashing import Bytes
from ringfold.state.shared import MayDiffer, SharedState
from ringfold.torch.tensors import Arrays, add_array, fact, facts_in, in_order

_TORCH_ENDINGS = (".pt", ".pth", ".bin")


class Exported(NamedTuple):
    """What was written: the file, the checkpoint that it comes from, and how many tensors and bytes it has."""

    path: Path
    checkpoint: Path
    revision: int
    tensors: int
    nbytes: int


def read_checkpoint(source: str | os.PathLike[str], *, prefix: str = "model.") -> dict[str, torch.Tensor]:
    """The tensors of a checkpoint whose keys begin with `prefix`, without it: what `load_state_dict` of a model takes.

    `source` is a checkpoint, or a directory of which the newest one is read. All content is verified. With the prefix
    "" it is everything, the optimizer included.
    """
    path = find_checkpoint(source)
    return _tensors(path, read_manifest(path), prefix)


def export_checkpoint(
    source: str | os.PathLike[str], output: str | os.PathLike[str], *, prefix: str = "model."
) -> Exported:
    """Write what `read_checkpoint` returns to `output`, by its ending as safetensors or as a file of `torch.save`."""
    path, target = find_checkpoint(source), Path(output)
    _check_ending(target)
    manifest = read_manifest(path)
    tensors = _tensors(path, manifest, prefix)
    with _written(target) as unfinished:
        if target.suffix == ".safetensors":
            metadata = {"format": "pt", "ringfold.revision": str(manifest.revision)}
            _safetensors().save_file(_unshared(tensors), unfinished, metadata)
        else:
            with open(unfinished, "wb") as file:
                torch.save(tensors, file)
    nbytes = sum(each.nbytes for each in tensors.values())
    return Exported(target, path, manifest.revision, len(tensors), nbytes)


def import_checkpoint(
    source: str | os.PathLike[str],
    directory: str | os.PathLike[str],
    *,
    prefix: str = "model.",
    like: str | os.PathLike[str] | None = None,
    revision: int | None = None,
) -> Path:
    """Make a checkpoint in `directory` from a safetensors or torch file of tensors by name, and return its path.

    With `like`, a checkpoint, the tensors replace those of that one, and all else in it stays: optimizer, scheduler,
    and the revision. Without it the checkpoint has only these tensors, at revision 0: for a state of one module.
    """
    tensors = _read_file(Path(source))
    arrays, present = _alone(tensors, prefix), 0
    if like is not None:
        path = find_checkpoint(like)
        manifest = read_manifest(path)
        arrays, present = _replaced(path, manifest, tensors, prefix), manifest.revision
    state = SharedState(arrays, revision=present if revision is None else revision)
    return Checkpoints(directory, keep=1 << 31).save(state)


# From a checkpoint


def _tensors(path: Path, manifest: CheckpointManifest, prefix: str) -> dict[str, torch.Tensor]:
    entries = {entry.name: entry for entry in manifest.keys}
    facts = facts_in(entries)
    keys = {f"{kind} {subject} = {value}" for kind, found in facts.items() for subject, value in found.items()}
    names = {name: name for name in entries.keys() - keys if name.startswith(prefix)}
    names |= {name: first for name, first in facts["tied"].items() if name.startswith(prefix) and first in entries}
    if not names:
        there = sorted({f"{name.partition('.')[0]}." for name in entries.keys() - keys if "." in name})
        raise UsageError(f"{path} has no array whose name begins with {prefix!r}; names begin with {', '.join(there)}")
    content = read_arrays(path, set(names.values()))
    read = {name: _tensor(entries[name], each, facts["layout"].get(name)) for name, each in content.items()}
    return {name.removeprefix(prefix): read[first] for name, first in sorted(names.items())}


def _tensor(entry: CheckpointEntry, content: Bytes, order: str | None) -> torch.Tensor:
    dtype = getattr(torch, entry.dtype, None)
    if not isinstance(dtype, torch.dtype):
        raise UsageError(f"{entry.name!r} is {entry.dtype}, which torch does not have; choose another prefix")
    tensor = torch.empty(entry.shape, dtype=dtype)
    if tensor.nbytes != content.size:
        raise StateError(f"{entry.name!r} has {content.size} bytes, but its shape needs {tensor.nbytes}")
    tensor.reshape(-1).view(torch.uint8).copy_(torch.from_numpy(content))
    return tensor if order is None else in_order(tensor, order)


def _unshared(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Each tensor in memory of its own, in the usual order."""
    seen: set[int] = set()
    found = {}
    for name, tensor in tensors.items():
        found[name] = tensor.clone() if id(tensor) in seen else tensor.contiguous()
        seen.add(id(tensor))
    return found


# To a checkpoint


def _alone(tensors: Mapping[str, torch.Tensor], prefix: str) -> Arrays:
    """The arrays of a state that has only these tensors. Names of one memory are tied."""
    arrays: Arrays = {}
    seen: dict[object, str] = {}
    for name, tensor in tensors.items():
        where = (tensor.data_ptr(), tensor.shape, tensor.dtype) if tensor.numel() else name
        first = seen.setdefault(where, prefix + name)
        if first == prefix + name:
            add_array(arrays, first, tensor)
        else:
            arrays |= fact("tied", prefix + name, first)
    return arrays


def _replaced(path: Path, manifest: CheckpointManifest, tensors: Mapping[str, torch.Tensor], prefix: str) -> Arrays:
    """The arrays of a checkpoint, those with the prefix from `tensors`."""
    entries = {entry.name: entry for entry in manifest.keys}
    facts = facts_in(entries)
    content = read_arrays(path, entries.keys())
    arrays: Arrays = {name: _stored(entries[name], each) for name, each in content.items()}
    for name, tensor in tensors.items():
        key = prefix + name
        if facts["tied"].get(key) in entries:
            continue  # the same tensor as another one, which is in the file by its first name
        if key not in entries:
            raise UsageError(f"{path} does not hold {key!r}, which the file has")
        order = facts["layout"].get(key)
        new = tensor if order is None else tensor.permute([int(dim) for dim in order.split(",")])
        here, there = f"{new.dtype} {list(new.shape)}", f"torch.{entries[key].dtype} {entries[key].shape}"
        if here != there:
            raise UsageError(f"{key!r} is {here} in the file, but {there} in {path}")
        arrays[key] = new.contiguous()
    replaced = {prefix + name for name in tensors}
    missing = [name for name in entries if name.startswith(prefix) and name not in replaced]
    if missing:
        raise UsageError(f"the file does not have {missing[0].removeprefix(prefix)!r}, which {path} holds")
    return {name: MayDiffer(each) if entries[name].may_differ else each for name, each in arrays.items()}


def _stored(entry: CheckpointEntry, content: Bytes) -> object:
    """An array as it was stored; of a dtype that only NumPy has, too."""
    if isinstance(getattr(torch, entry.dtype, None), torch.dtype):
        return _tensor(entry, content, None)
    return content.view(entry.dtype).reshape(entry.shape)


# Files


def _read_file(path: Path) -> dict[str, torch.Tensor]:
    _check_ending(path)
    try:
        if path.suffix == ".safetensors":
            found: Any = _safetensors().load_file(path)
        else:
            found = torch.load(path, map_location="cpu", weights_only=True)
    except UsageError:
        raise
    except Exception as error:  # each format has errors of its own
        raise StateError(f"{path} cannot be read: {str(error).splitlines()[0]}") from error
    if not isinstance(found, dict) or not found or not all(isinstance(each, torch.Tensor) for each in found.values()):
        raise UsageError(f"{path} is no file of tensors by name, such as torch.save(model.state_dict(), path)")
    return {str(name): tensor.detach() for name, tensor in found.items()}


def _check_ending(path: Path) -> None:
    if path.suffix not in (".safetensors", *_TORCH_ENDINGS):
        raise UsageError(f"{path} must end with .safetensors, {', '.join(_TORCH_ENDINGS)}: it says the format")


def _safetensors() -> Any:  # noqa: ANN401  # an optional package
    try:
        import safetensors.torch
    except ImportError as error:
        raise UsageError("a .safetensors file needs safetensors: pip install ringfold[torch]") from error
    return safetensors.torch


@contextmanager
def _written(path: Path) -> Iterator[Path]:
    """A temporary name, which becomes `path` when the file is whole and on the disk."""
    unfinished = path.with_name(f".{path.name}.{random_bytes(8).hex()}.saving")
    try:
        yield unfinished
        descriptor = os.open(unfinished, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        unfinished.rename(path)
    except UsageError:
        raise
    except Exception as error:  # a full disk is an OSError, a RuntimeError or an error of safetensors
        raise StateError(f"{path} cannot be written: {str(error).splitlines()[0]}") from error
    finally:
        unfinished.unlink(missing_ok=True)
