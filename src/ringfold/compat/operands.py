"""What a program hands to an all-reduce, checked before anything is sent: INVALID_ARGUMENT says what is wrong.

`send` and `recv` are both NumPy arrays or both torch tensors, with the same dtype and size. They are the same memory or
apart from each other. The same memory means an op in place, which an abort leaves as it was.
"""

from dataclasses import dataclass
from typing import Self

import numpy as np

from ringfold.compat.results import PCCLError, Result
from ringfold.compat.descriptors import (
    DataType,
    QuantizationOptions,
    ReduceDescriptor,
    ReduceOp,
    ReduceOperandDescriptor,
)
from ringfold.errors import UsageError
from ringfold.peer.buffers import ArrayLike, Operand, operand_of
from ringfold.peer.codes import DTYPES

_NAMES = {code: name for name, code in DTYPES.items()}


@dataclass(frozen=True, slots=True)
class Operands:
    """A checked op: what the communicator is called with."""

    send: ArrayLike
    recv: ArrayLike
    op: str
    tag: int
    quantize: str | None


@dataclass(frozen=True)
class ReduceOpDescriptor:
    """An op of a batch with its arrays."""

    send: ArrayLike
    recv: ArrayLike
    reduce_descriptor: ReduceDescriptor

    @classmethod
    def from_torch(cls, send: ArrayLike, recv: ArrayLike, reduce_descriptor: ReduceDescriptor) -> Self:
        return cls._of("torch", send, recv, reduce_descriptor)

    @classmethod
    def from_numpy(cls, send: ArrayLike, recv: ArrayLike, reduce_descriptor: ReduceDescriptor) -> Self:
        return cls._of("numpy", send, recv, reduce_descriptor)

    @classmethod
    def _of(cls, library: str, send: ArrayLike, recv: ArrayLike, reduce_descriptor: ReduceDescriptor) -> Self:
        func = f"ReduceOpDescriptor.from_{library}"
        for name, array in (("send", send), ("recv", recv)):
            if library_of(array) != library:
                raise _invalid(func, f"{name} is a {type(array).__name__}, not of {library}")
        return cls(send, recv, reduce_descriptor)

    def operands(self, func: str) -> Operands:
        """Checked, also against the count that the descriptor says."""
        says = self.reduce_descriptor
        checked = check(
            func, self.send, self.recv, says.op, says.tag, says.operand_descriptor, says.quantization_options
        )
        size = operand_of(self.send, writable=False).size
        if says.count != size:
            raise _invalid(func, f"the descriptor of tag {says.tag} counts {says.count} elements, but send has {size}")
        return checked


def check(
    func: str,
    send: ArrayLike,
    recv: ArrayLike,
    op: ReduceOp,
    tag: int,
    operand: ReduceOperandDescriptor | None,
    quantization: QuantizationOptions | None,
) -> Operands:
    """Raises PCCLError(INVALID_ARGUMENT) for whatever cannot be reduced."""
    if not isinstance(op, ReduceOp):
        raise _invalid(func, f"op is a ReduceOp, not {op!r}")
    if isinstance(tag, bool) or not isinstance(tag, int | np.integer) or not 0 <= tag < 1 << 64:
        raise _invalid(func, f"a tag is an integer from 0 to 2**64 - 1, not {tag!r}")
    libraries = library_of(send), library_of(recv)
    if libraries not in (("numpy", "numpy"), ("torch", "torch")):
        kinds = f"{type(send).__name__} and {type(recv).__name__}"
        raise _invalid(func, f"send and recv must both be NumPy arrays or both torch tensors, not {kinds}")
    try:
        source, target = operand_of(send, "send", writable=False), operand_of(recv, "recv")
    except UsageError as error:
        raise _invalid(func, str(error)) from None
    code = source.code
    if code != target.code or source.size != target.size:
        sides = f"{_NAMES[code]} of {source.size} and {_NAMES[target.code]} of {target.size}"
        raise _invalid(func, f"send and recv must have the same dtype and size, not {sides}")
    if _overlap(source, target) and not source.is_at(target):
        raise _invalid(func, "send and recv overlap: give the same array twice, or arrays apart from each other")
    if operand is not None and operand.datatype is not DataType(_NAMES[code]):
        raise _invalid(func, f"the operand is described as {operand.datatype.name}, but holds {_NAMES[code]}")
    return Operands(send, recv, op.value, int(tag), None if quantization is None else quantization.scheme)


def _overlap(source: Operand, target: Operand) -> bool:
    return source.view is not None and target.view is not None and np.shares_memory(source.view, target.view)


def library_of(array: ArrayLike) -> str:
    """Which library an array belongs to. torch is never imported for it: whoever holds a tensor has it loaded."""
    if isinstance(array, np.ndarray):
        return "numpy"
    return "torch" if hasattr(array, "data_ptr") and hasattr(array, "is_contiguous") else ""


def _invalid(func: str, text: str) -> PCCLError:
    return PCCLError(Result.INVALID_ARGUMENT, func, text)
