"""Numbers that are no arrays, such as learning rates and the counters of a scheduler, as one array.

A tree is what `state_dict` returns: dicts, lists and tuples with leaves. A leaf that is a number, a tensor with one
element, or None has a row of two int64: its kind, and its bits. So a leaf may change from None to a number, or from an
integer to a float, without a change of the array's shape. Text and functions have no row: they must be the same on all
peers, so they become facts (`tensors.py`).
"""

import struct
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from ringfold.errors import UsageError
from ringfold.torch.tensors import Arrays, fact

Rows = npt.NDArray[np.int64]
Tree = Any
"""Whatever a foreign object returns as its state."""

_NONE, _BOOL, _INT, _FLOAT = range(4)


def pack(tree: Tree, path: str) -> tuple[Rows, Arrays]:
    """The rows of a tree's numbers, and the facts that it holds. `path` is the tree's name in errors and facts."""
    rows: list[tuple[int, int]] = []
    facts: Arrays = {}
    for where, leaf in _leaves(tree, path):
        if isinstance(leaf, str):
            facts |= fact("text", where, repr(leaf))
        elif callable(leaf) and not isinstance(leaf, torch.Tensor):
            facts |= fact("text", where, getattr(leaf, "__qualname__", type(leaf).__qualname__))
        else:
            rows.append(_row(leaf, where))
    return np.array(rows, np.int64).reshape(-1, 2), facts


def unpack(tree: Tree, rows: Rows) -> Tree:
    """The tree with the numbers of these rows. Tensors are written in place; containers are new."""
    left = iter(rows.tolist())
    return _rebuilt(tree, left)


def _leaves(tree: Tree, path: str) -> Iterator[tuple[str, Tree]]:
    match tree:
        case dict():
            for key in _sorted(tree):
                yield from _leaves(tree[key], f"{path}.{key}")
        case list() | tuple():
            for number, each in enumerate(tree):
                yield from _leaves(each, f"{path}.{number}")
        case _:
            yield path, tree


def _sorted(tree: dict[Any, Tree]) -> list[Any]:
    """The keys in an order that does not depend on the history of the dict."""
    return sorted(tree, key=lambda key: (type(key).__name__, str(key)))


def _row(leaf: Tree, path: str) -> tuple[int, int]:
    value = leaf
    if isinstance(leaf, torch.Tensor | np.generic | np.ndarray):
        count = leaf.numel() if isinstance(leaf, torch.Tensor) else leaf.size
        if count != 1:
            raise UsageError(f"{path!r} is an array of {count} elements among numbers; share it by a name of its own")
        value = leaf.item()
    match value:
        case None:
            return _NONE, 0
        case bool():
            return _BOOL, int(value)
        case int() if -(1 << 63) <= value < 1 << 63:
            return _INT, value
        case float():
            return _FLOAT, struct.unpack("<q", struct.pack("<d", value))[0]
    raise UsageError(f"{path!r} is {_shown(value)}, which is neither a number nor text; it cannot be shared")


def _shown(value: object) -> str:
    return f"the integer {value}" if isinstance(value, int) else f"a {type(value).__name__}"


def _rebuilt(tree: Tree, left: Iterator[list[int]]) -> Tree:
    match tree:
        case dict():
            new = {key: _rebuilt(tree[key], left) for key in _sorted(tree)}
            same = tree.copy()  # the type, and the order of the keys
            for key in tree:
                same[key] = new[key]  # `update` of a Counter would add
            return same
        case list():
            return [_rebuilt(each, left) for each in tree]
        case tuple():
            rebuilt = [_rebuilt(each, left) for each in tree]
            return type(tree)(*rebuilt) if hasattr(tree, "_fields") else tuple(rebuilt)
        case torch.Tensor() | np.ndarray():
            value = _number(*next(left))
            if value is not None:
                with torch.no_grad():
                    tree.fill_(value) if isinstance(tree, torch.Tensor) else tree.fill(value)
            return tree
        case str():
            return tree
    return tree if callable(tree) else _number(*next(left))


def _number(kind: int, bits: int) -> bool | int | float | None:
    match kind:
        case 0:
            return None
        case 1:
            return bool(bits)
        case 2:
            return bits
    return float(struct.unpack("<d", struct.pack("<q", bits))[0])
