"""What PCCL programs pass to calls: enumerations, descriptors, arrays and the shared state. All are checked here.

An op is checked before anything is sent, and INVALID_ARGUMENT states what is wrong. `send` and `recv` are both NumPy
arrays or both torch tensors, with the same dtype and size. They are the same memory, or they do not overlap. The same
memory means an op in place, which an abort leaves unchanged.

`DataType.INT16` does not exist in PCCL: its arrays can be reduced and shared here like all others.
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from importlib import import_module
from typing import Any, Self, cast

import numpy as np
import numpy.typing as npt

from ringfold.compat.results import PCCLError, Result
from ringfold.errors import UsageError
from ringfold.peer.buffers import ArrayLike, Operand, operand_of
from ringfold.peer.codes import DTYPES
from ringfold.state import shared


class Attribute(Enum):
    """What `Communicator.get_attribute` returns."""

    GLOBAL_WORLD_SIZE = 1
    LOCAL_WORLD_SIZE = 2
    """The size of this peer's group."""
    NUM_DISTINCT_PEER_GROUPS = 3
    LARGEST_PEER_GROUP_WORLD_SIZE = 4


class ReduceOp(Enum):
    SUM = "sum"
    AVG = "avg"
    PROD = "prod"
    MAX = "max"
    MIN = "min"


class DeviceType(Enum):
    CPU = 0
    CUDA = 1

    @classmethod
    def from_torch_device_type(cls, device_type: str) -> Self | None:
        """The type of a torch device by the name of its type ("cpu", "cuda"); None for any other."""
        return cls[device_type.upper()] if device_type in ("cpu", "cuda") else None


class DistributionHint(Enum):
    """The distribution of the values of an operand. It has no effect."""

    NONE = 0
    NORMAL = 1
    UNIFORM = 2


class DataType(Enum):
    """An element's type; the value is the name that NumPy and torch have in common."""

    UINT8 = "uint8"
    INT8 = "int8"
    UINT16 = "uint16"
    UINT32 = "uint32"
    INT32 = "int32"
    UINT64 = "uint64"
    INT64 = "int64"
    FLOAT16 = "float16"
    BFLOAT16 = "bfloat16"
    FLOAT = "float32"
    DOUBLE = "float64"
    INT16 = "int16"

    @classmethod
    def from_numpy_dtype(cls, dtype: npt.DTypeLike) -> Self:
        """The type of a NumPy dtype, ml_dtypes' bfloat16 included; ValueError for one that no op knows."""
        found = np.dtype(dtype)
        if not found.isnative:
            raise ValueError(f"{found.str} is big-endian; convert it with astype({found.name!r})")
        return cls._named(found.name)

    @classmethod
    def from_torch_dtype(cls, dtype: object) -> Self:
        """The type of a torch dtype; ValueError for one that no op knows."""
        return cls._named(str(dtype).removeprefix("torch."))

    def to_torch_dtype(self) -> Any:  # noqa: ANN401 - a torch.dtype; torch need not be installed
        """The torch dtype of this type."""
        return getattr(import_module("torch"), self.value)

    def to_numpy_dtype(self) -> Any:  # noqa: ANN401 - as to_torch_dtype
        """The NumPy dtype of this type; bfloat16 is that of ml_dtypes."""
        return np.dtype(import_module("ml_dtypes").bfloat16 if self is DataType.BFLOAT16 else self.value)

    @classmethod
    def _named(cls, name: str) -> Self:
        try:
            return cls(name)
        except ValueError:
            known = ", ".join(kind.value for kind in cls)
            raise ValueError(f"the dtype {name} cannot be reduced; supported are {known}") from None


class QuantizationAlgorithm(Enum):
    NONE = "none"
    MIN_MAX = "minmax"
    ZERO_POINT_SCALE = "zeroscale"


@dataclass(frozen=True)
class QuantizationOptions:
    """How values are quantised for transfer. Only types of 8 bits: wider ones save less than quantising costs."""

    quantized_datatype: DataType = DataType.UINT8
    algorithm: QuantizationAlgorithm = QuantizationAlgorithm.MIN_MAX

    def __post_init__(self) -> None:
        narrow = self.quantized_datatype in (DataType.UINT8, DataType.INT8)
        if self.algorithm is not QuantizationAlgorithm.NONE and not narrow:
            text = f"values are quantised to UINT8 or INT8, not to {self.quantized_datatype.name}"
            raise PCCLError(Result.INVALID_ARGUMENT, "QuantizationOptions", text)

    @property
    def scheme(self) -> str | None:
        """Ringfold's name for it; None: not quantised."""
        return None if self.algorithm is QuantizationAlgorithm.NONE else f"{self.algorithm.value}8"


@dataclass(frozen=True)
class ReduceOperandDescriptor:
    """The type of an operand. It must be the dtype of the arrays: it is checked, and nothing is converted."""

    datatype: DataType
    distribution_hint: DistributionHint = DistributionHint.NONE


@dataclass(frozen=True)
class ReduceDescriptor:
    """One op of a batch."""

    count: int
    op: ReduceOp
    tag: int = 0
    operand_descriptor: ReduceOperandDescriptor | None = None
    quantization_options: QuantizationOptions | None = None


@dataclass(frozen=True)
class ReduceInfo:
    """The result of an op: how many peers contributed, and the bytes this peer sent and received. All 0: it failed."""

    local_world_size: int
    tx_bytes: int
    rx_bytes: int


@dataclass(frozen=True)
class SharedStateSyncInfo:
    tx_bytes: int
    rx_bytes: int


class SharedStateSyncStrategy(Enum):
    """Whose content becomes the state of all peers."""

    ENFORCE_POPULAR = "enforce-popular"
    """The content that most peers have. If one peer uses it, all must."""
    RECEIVE_ONLY = "receive-only"
    """This peer does not vote, and never sends."""
    SEND_ONLY = "send-only"
    """This peer's content must win."""


_NAMES = {code: name for name, code in DTYPES.items()}


@dataclass(frozen=True, slots=True)
class Operands:
    """The arguments of a checked op, as the communicator takes them."""

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
        """The checked op. The count of the descriptor is checked, too."""
        descriptor = self.reduce_descriptor
        checked = check_operands(
            func,
            self.send,
            self.recv,
            descriptor.op,
            descriptor.tag,
            descriptor.operand_descriptor,
            descriptor.quantization_options,
        )
        size = operand_of(self.send, writable=False).size
        if descriptor.count != size:
            counted = f"the descriptor of tag {descriptor.tag} counts {descriptor.count} elements"
            raise _invalid(func, f"{counted}, but send has {size}")
        return checked


def check_operands(
    func: str,
    send: ArrayLike,
    recv: ArrayLike,
    op: ReduceOp,
    tag: int,
    operand: ReduceOperandDescriptor | None,
    quantization: QuantizationOptions | None,
) -> Operands:
    """The checked op. Raises PCCLError(INVALID_ARGUMENT) if it cannot be run."""
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
        raise _invalid(func, "send and recv overlap: pass the same array twice, or arrays that do not overlap")
    if operand is not None and operand.datatype is not DataType(_NAMES[code]):
        raise _invalid(func, f"the operand is described as {operand.datatype.name}, but holds {_NAMES[code]}")
    return Operands(send, recv, op.value, int(tag), None if quantization is None else quantization.scheme)


def _overlap(source: Operand, target: Operand) -> bool:
    return source.view is not None and target.view is not None and np.shares_memory(source.view, target.view)


def library_of(array: ArrayLike) -> str:
    """The library of an array: "numpy", "torch" or "". Does not import torch: a program with tensors has it."""
    if isinstance(array, np.ndarray):
        return "numpy"
    return "torch" if hasattr(array, "data_ptr") and hasattr(array, "is_contiguous") else ""


def _invalid(func: str, text: str) -> PCCLError:
    return PCCLError(Result.INVALID_ARGUMENT, func, text)


@dataclass(frozen=True)
class TensorInfo:
    """A named tensor of the shared state. It is a reference, not a copy: change the tensor in place."""

    name: str
    tensor: ArrayLike
    device_type: DeviceType
    allow_content_inequality: bool

    @property
    def numel(self) -> int:
        """How many elements it has."""
        return math.prod(getattr(self.tensor, "shape", ()))

    @property
    def dtype(self) -> DataType:
        given = cast(Any, self.tensor).dtype
        is_torch = library_of(self.tensor) == "torch"
        return DataType.from_torch_dtype(given) if is_torch else DataType.from_numpy_dtype(given)

    @classmethod
    def from_torch(cls, tensor: ArrayLike, name: str, *, allow_content_inequality: bool = False) -> Self:
        """With `allow_content_inequality` peers may hold different content: it is neither compared nor synced."""
        cls._check("torch", tensor)
        kind = str(getattr(getattr(tensor, "device", None), "type", "cpu"))
        return cls(name, tensor, DeviceType.CPU if kind == "cpu" else DeviceType.CUDA, allow_content_inequality)

    @classmethod
    def from_numpy(cls, array: ArrayLike, name: str, *, allow_content_inequality: bool = False) -> Self:
        cls._check("numpy", array)
        return cls(name, array, DeviceType.CPU, allow_content_inequality)

    @classmethod
    def _check(cls, library: str, tensor: ArrayLike) -> None:
        if library_of(tensor) != library:
            text = f"a {type(tensor).__name__} is not of {library}"
            raise PCCLError(Result.INVALID_ARGUMENT, f"TensorInfo.from_{library}", text)


class SharedState:
    """The tensors that must be the same on every peer, and their revision.

    The revision goes up by exactly one between two syncs in which this peer takes part.
    """

    def __init__(self, tensor_infos: Sequence[TensorInfo]) -> None:
        names = Counter(info.name for info in tensor_infos)
        if twice := [name for name, times in names.items() if times > 1]:
            raise PCCLError(Result.INVALID_ARGUMENT, "SharedState", f"two tensors are named {twice[0]!r}")
        try:
            self._state = shared.SharedState({info.name: _array(info) for info in tensor_infos})
        except UsageError as error:
            raise PCCLError(Result.INVALID_ARGUMENT, "SharedState", str(error)) from None

    @property
    def revision(self) -> int:
        return self._state.revision

    @revision.setter
    def revision(self, revision: int) -> None:
        if revision < 0:
            raise PCCLError(Result.INVALID_ARGUMENT, "SharedState", f"a revision is 0 or more, not {revision}")
        self._state.revision = revision

    def push_revision(self) -> None:
        """Count the revision up, because the content has changed: the next sync is about the next revision."""
        self._state.revision += 1

    @property
    def underlying(self) -> shared.SharedState:
        """The state as Ringfold's own class."""
        return self._state


def _array(info: TensorInfo) -> ArrayLike | shared.MayDiffer:
    if not info.allow_content_inequality:
        return info.tensor
    return shared.MayDiffer(info.tensor)
