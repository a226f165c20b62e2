"""A tensor as an array of a shared state, and the facts about a state that its keys' names carry.

An array must be contiguous. A tensor whose elements are dense in another order (channels_last) is shared as the view of
it that is contiguous. The order is a fact that all peers must agree on, as are names that stand for one tensor (tied
weights) and settings that are text. Such a fact is a key without content, whose name says it:

    layout model.conv.weight = 0,2,3,1
    tied model.head.weight = model.embed.weight
    text scheduler.mode = 'min'

So two peers that differ in one of them differ in the structure of their states, and the error names it.
"""

import re
from collections.abc import Iterable

import numpy as np
import torch

from ringfold.errors import UsageError

Arrays = dict[str, object]
"""Arrays by key, as a shared state takes them."""

_FACT = re.compile(r"(layout|tied|text) (.*?) = (.*)", re.DOTALL)


def fact(kind: str, subject: str, value: object) -> Arrays:
    """A key that says something, and has no content."""
    return {f"{kind} {subject} = {value}": np.zeros(0, np.uint8)}


def facts_in(keys: Iterable[str]) -> dict[str, dict[str, str]]:
    """The facts that these keys say: kind -> subject -> value."""
    found: dict[str, dict[str, str]] = {"layout": {}, "tied": {}, "text": {}}
    for key in keys:
        if match := _FACT.fullmatch(key):
            found[match[1]][match[2]] = match[3]
    return found


def add_array(arrays: Arrays, name: str, tensor: torch.Tensor) -> None:
    """Add the tensor as a contiguous array in its own memory, with its layout if that is not the usual one."""
    if type(tensor) not in (torch.nn.Parameter, torch.Tensor):
        if torch.nn.parameter.is_lazy(tensor):
            raise UsageError(f"{name!r} has no shape yet; run one forward pass before the state is shared")
        if hasattr(tensor, "to_local"):
            raise UsageError(f"{name!r} is a DTensor, of which this process has a part; such models are not supported")
    if tensor.layout != torch.strided or tensor.is_meta or tensor.is_contiguous():
        arrays[name] = tensor  # what has no memory is an error of the state, which names it
        return
    order = order_of(tensor)
    view = tensor.detach().permute(order)
    if not view.is_contiguous():
        raise UsageError(f"{name!r} is not dense in memory (strides {tensor.stride()}); share x.contiguous()")
    arrays[name] = view
    arrays |= fact("layout", name, ",".join(map(str, order)))


def order_of(tensor: torch.Tensor) -> list[int]:
    """The dimensions in the order in which they lie in memory, outermost first."""
    return sorted(range(tensor.dim()), key=lambda dim: (-tensor.stride(dim), dim))


def in_order(stored: torch.Tensor, order: str) -> torch.Tensor:
    """The tensor whose contiguous view was stored, by the layout that its key says."""
    dims = [int(dim) for dim in order.split(",")]
    return stored.permute([dims.index(dim) for dim in range(len(dims))])
