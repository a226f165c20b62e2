"""The timestamps of a window as few bytes, and back without losing a bit.

Eight timestamps of eight bytes make an exchange, and nearly all of it is predictable: packets are sent at a cadence,
arrive one delay later, and the response follows after about a gap. So each column is stored as its difference to the
prediction from the columns before it (`_predicted`), and for the two that have a trend (when exchanges begin; the
difference of the clocks, which skew moves by 20 ns a millisecond) the change from row to row. The rest is the jitter of
the senders and of the network: a byte or two a timestamp.

The bytes, before zlib; n is the number of rows, integers are little-endian:

    n bytes      which timestamps are present: bit c for column c
    n bytes      `kept`
    then for each of the eight columns
      1 byte     w, from 0 to 8
      8 bytes    the first value, only for the first two columns (0 for none)
      8 bytes    the minimum (of the changes, in the first two columns); signed
      w * n      how far each is above the minimum: all lowest bytes first, then all second ones, and so on

A missing timestamp (0) is stored as if its difference had not changed since the row before, which costs nothing. All
arithmetic wraps at 64 bits on both sides, so any timestamps are restored exactly.
"""

import zlib
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from ringfold.errors import UsageError
from ringfold.probe.exchanges import COLUMNS

MAX_ROWS = 1 << 22
"""More than four hours of one edge at the default cadence: a larger claim is corrupt or malicious."""

_T1_TX, _T1_RX, _T2_TX, _T2_RX, _R1_TX, _R1_RX, _R2_TX, _R2_RX = range(len(COLUMNS))
_TRENDS = (_T1_TX, _T1_RX)
_LEVEL = 1
"""The rest is noise: a higher level takes more time and saves 2 %."""

Stamps = npt.NDArray[np.int64]
Flags = npt.NDArray[np.uint8]


def pack(exchanges: Stamps, kept: Flags) -> bytes:
    """The matrix and the flags of an EdgeWindow as bytes."""
    rows = exchanges.shape[0]
    if exchanges.shape != (rows, len(COLUMNS)) or kept.shape != (rows,) or rows > MAX_ROWS:
        raise UsageError(f"exchanges of shape {exchanges.shape} with {kept.shape} flags are not a window")
    present = exchanges != 0
    parts = [np.packbits(present, axis=1, bitorder="little").tobytes(), kept.astype(np.uint8).tobytes()]
    filled: list[Stamps] = []
    for column in range(len(COLUMNS)):
        predicted = _predicted(filled, rows)
        residual = _filled_forward(exchanges[:, column] - predicted, present[:, column])
        filled.append(residual + predicted)
        parts += _column(residual, has_trend=column in _TRENDS)
    return zlib.compress(b"".join(parts), _LEVEL)


def unpack(packed: bytes, rows: int) -> tuple[Stamps, Flags]:
    """The arguments of `pack`. Invalid bytes are a UsageError, and never cost more memory than `rows` need."""
    if not 0 <= rows <= MAX_ROWS:
        raise UsageError(f"{rows} exchanges in one window are too many")
    most = rows * (2 + 8 * len(COLUMNS)) + 17 * len(COLUMNS)
    inflater = zlib.decompressobj()
    try:
        content = _ByteReader(inflater.decompress(packed, most + 1))
    except zlib.error as error:
        raise UsageError(f"the exchanges are corrupt: {error}") from None
    if not inflater.eof:
        raise UsageError("the exchanges are corrupt: they end too early or go on too long")
    present = np.unpackbits(content.take(rows)[:, None], axis=1, bitorder="little")
    kept = content.take(rows).copy()
    filled: list[Stamps] = []
    for column in range(len(COLUMNS)):
        residual = _read_column(content, rows, has_trend=column in _TRENDS)
        filled.append(residual + _predicted(filled, rows))
    content.end()
    return np.where(present, np.stack(filled, axis=1), 0), kept


def _predicted(before: Sequence[Stamps], rows: int) -> Stamps:
    """The prediction of the next column from those before it; see `exchanges.py` for the names."""
    match COLUMNS[len(before)]:
        case "t1_tx":
            return np.zeros(rows, np.int64)
        case "t1_rx" | "t2_tx":
            return before[_T1_TX]
        case "t2_rx":
            return before[_T1_RX] + (before[_T2_TX] - before[_T1_TX])
        case "r1_tx":
            return before[_T1_RX]
        case "r1_rx":
            return before[_T1_TX] + (before[_R1_TX] - before[_T1_RX])
        case "r2_tx":
            return before[_R1_TX]
        case _:
            return before[_R1_RX] + (before[_R2_TX] - before[_R1_TX])


def _filled_forward(values: Stamps, present: npt.NDArray[np.bool_]) -> Stamps:
    """The values; where one is missing, the one before it (at the start: the first present one), or 0 for none."""
    if present.all():
        return values
    if not present.any():
        return np.zeros_like(values)
    newest = np.maximum.accumulate(np.where(present, np.arange(values.size), -1))
    filled_values: Stamps = values[np.where(newest < 0, int(present.argmax()), newest)]
    return filled_values


def _column(values: Stamps, *, has_trend: bool) -> list[bytes]:
    first = values[:1].tobytes() if values.size else bytes(8)
    if has_trend:
        values = np.diff(values, prepend=values[:1])
    minimum = values.min() if values.size else np.int64(0)
    above = values.view(np.uint64) - minimum.view(np.uint64)
    width = (int(above.max()).bit_length() + 7) // 8 if values.size else 0
    planes = above.astype("<u8").view(np.uint8).reshape(-1, 8)[:, :width]
    head = bytes([width]) + (first if has_trend else b"") + minimum.astype("<i8").tobytes()
    return [head, np.ascontiguousarray(planes.T).tobytes()]


def _read_column(content: "_ByteReader", rows: int, *, has_trend: bool) -> Stamps:
    width = int(content.take(1)[0])
    if width > 8:
        raise UsageError("the exchanges are corrupt: a number of more than 64 bits")
    first = content.take(8).view("<i8") if has_trend else None
    minimum = content.take(8).view("<u8")
    planes = np.zeros((rows, 8), np.uint8)
    planes[:, :width] = content.take(width * rows).reshape(width, rows).T
    values: Stamps = (planes.view("<u8").reshape(rows) + minimum).astype(np.uint64).view(np.int64)
    if first is None or not rows:
        return values
    values[0] = first[0]
    return np.cumsum(values)


class _ByteReader:
    """Reads bytes in order, and raises an error if present are too few or too many."""

    def __init__(self, content: bytes) -> None:
        self._rest = np.frombuffer(content, np.uint8)

    def take(self, count: int) -> Flags:
        if count > self._rest.size:
            raise UsageError("the exchanges are corrupt: they end too early")
        taken, self._rest = self._rest[:count], self._rest[count:]
        return taken

    def end(self) -> None:
        if self._rest.size:
            raise UsageError(f"the exchanges are corrupt: {self._rest.size} bytes too many")
