"""PCCL's shared state: a list of named tensors over Ringfold's mapping of them."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from ringfold.compat.operands import library_of
from ringfold.compat.results import PCCLError, Result
from ringfold.compat.descriptors import DeviceType
from ringfold.errors import UsageError
from ringfold.peer.buffers import ArrayLike
from ringfold.state import shared


@dataclass(frozen=True)
class TensorInfo:
    """A named tensor of the shared state. It is referred to, not copied: change it in place."""

    name: str
    tensor: ArrayLike
    device_type: DeviceType
    allow_content_inequality: bool

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
            raise PCCLError(Result.INVALID_ARGUMENT, "SharedState", f"a revision counts from 0, so {revision} is none")
        self._state.revision = revision

    def push_revision(self) -> None:
        """Say that the content has changed: the next sync is about the next revision."""
        self._state.revision += 1

    @property
    def underlying(self) -> shared.SharedState:
        """The same state as Ringfold has it."""
        return self._state


def _array(info: TensorInfo) -> ArrayLike:
    if not info.allow_content_inequality:
        return info.tensor
    return shared.MayDiffer(info.tensor)
