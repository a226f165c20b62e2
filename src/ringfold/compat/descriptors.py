"""PCCL's enumerations and descriptors: plain values, checked where they are made.

`DataType.INT16` is more than PCCL has: its arrays can be reduced and shared here like all others.
"""

from dataclasses import dataclass
from enum import Enum
from importlib import import_module
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from ringfold.compat.results import PCCLError, Result


class Attribute(Enum):
    """What `Communicator.get_attribute` tells."""

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


class DistributionHint(Enum):
    """How an operand's values are spread. A hint only: nothing depends on it."""

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
    """How values travel. Types of 8 bits are supported: wider ones would not save what quantising costs."""

    quantized_datatype: DataType = DataType.UINT8
    algorithm: QuantizationAlgorithm = QuantizationAlgorithm.MIN_MAX

    def __post_init__(self) -> None:
        narrow = self.quantized_datatype in (DataType.UINT8, DataType.INT8)
        if self.algorithm is not QuantizationAlgorithm.NONE and not narrow:
            text = f"values are quantised to UINT8 or INT8, not to {self.quantized_datatype.name}"
            raise PCCLError(Result.INVALID_ARGUMENT, "QuantizationOptions", text)

    @property
    def scheme(self) -> str | None:
        """What Ringfold calls it; None: not quantised."""
        return None if self.algorithm is QuantizationAlgorithm.NONE else f"{self.algorithm.value}8"


@dataclass(frozen=True)
class ReduceOperandDescriptor:
    """What an operand holds. The type must be that of the arrays: it is checked, not converted to."""

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
    """What an op tells: how many peers' values are in the result, and the bytes this peer moved. All 0: it failed."""

    local_world_size: int
    tx_bytes: int
    rx_bytes: int


@dataclass(frozen=True)
class SharedStateSyncInfo:
    tx_bytes: int
    rx_bytes: int


class SharedStateSyncStrategy(Enum):
    """Who decides what the state is."""

    ENFORCE_POPULAR = "enforce-popular"
    """The content that most peers have. If one peer uses it, all must."""
    RECEIVE_ONLY = "receive-only"
    """This peer has no vote, and never sends."""
    SEND_ONLY = "send-only"
    """This peer's content must win."""
