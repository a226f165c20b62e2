"""The array and the result of an op whose result has another size than its array: all_gather and reduce_scatter."""

from typing import Any

import numpy as np
import numpy.typing as npt

from ringfold.errors import UsageError
from ringfold.peer.buffers import ArrayLike, Spans, check_apart, operand_of

Array = npt.NDArray[Any]


class Source:
    """The array of an op whose result has another size."""

    def __init__(self, array: ArrayLike, dtype: str | None) -> None:
        self.operand = operand_of(array, dtype=dtype, writable=False)
        self.spans = Spans.of([self.operand])
        self.shape = self.spans.arrays[0].shape
        # bfloat16 of a NumPy extension (JAX's is) gives results of its own dtype; other libraries' come as bits.
        kind = getattr(array, "dtype", None)
        self.kind = kind if isinstance(kind, np.dtype) else self.spans.arrays[0].dtype


class Result:
    """Where the result of an op goes whose size depends on the ring: the caller's `out`, or an array made for it."""

    def __init__(self, source: Source, out: ArrayLike | None, dtype: str | None) -> None:
        self._source, self._dtype = source, dtype
        self._out = None if out is None else operand_of(out, "out=", dtype)
        self._array = out if isinstance(out, np.ndarray) else None if self._out is None else self._out.view
        self._spans = Spans([], [])

    def of_shape(self, shape: tuple[int, ...]) -> Spans:
        """Where an op in a ring of this size writes to."""
        source, operand = self._source.operand, self._out
        if operand is None:
            self._array = np.empty(shape, self._source.kind)
            operand = operand_of(self._array, dtype=self._dtype)
        elif operand.code != source.code or operand.size != int(np.prod(shape)):
            raise UsageError(f"out= must have the array's dtype and the shape {shape}, not {operand.described}")
        check_apart([operand], [source])
        self._spans = Spans.of([operand], read=False)
        return self._spans

    def written(self) -> Array:
        """The op has committed: its result, as NumPy sees it."""
        self._spans.copy_back()
        return self._spans.arrays[0] if self._array is None else self._array


def result_alone(
    array: ArrayLike, out: ArrayLike | None, dtype: str | None, *, gathers: bool, contribute: bool = True
) -> Array:
    """What an all_gather, or a reduce_scatter, gives a group of one."""
    source = Source(array, dtype)
    result = Result(source, out, dtype)
    spans = result.of_shape((1, *source.shape) if gathers else (source.operand.size,))
    given, there = source.spans.arrays[0].reshape(-1), spans.arrays[0].reshape(-1)
    there[:] = given if contribute else 0
    return result.written()
