"""The stamps of a window as few bytes, and back without losing a bit.

Eight stamps of eight bytes make an exchange, and nearly all of it can be guessed: packets leave at a cadence, arrive
one delay later, and the other end answers after about a gap. So each column is written as its difference to what the
columns before it foretell (`_foretold`), and of the two that have a trend (when exchanges begin; by how much the clocks
differ, which skew moves by 20 ns a millisecond) the change from row to row. What is left is the jitter of the senders
and of the network: a byte or two a stamp.

The bytes, before zlib; n is the number of rows, integers are little-endian:

    n bytes      which stamps are there: bit c for column c
    n bytes      `kept`
    then for each of the eight columns
      1 byte     w, from 0 to 8
      8 bytes    the first value, only for the first two columns (0 for none)
      8 bytes    the least value (of the changes, in the first two columns); signed
      w * n      how far each is above the least: all lowest bytes first, then all second ones, and so on

A stamp that is missing (0) is written as if its difference had not changed since the row before, which costs nothing.
All arithmetic wraps at 64 bits on both sides, so any stamps at all come back as they were.
"""

import zlib
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from ringfold.errors import UsageError
from ringfold.probe.exchanges import COLUMNS

MOST_ROWS = 1 << 22
"""More than four hours of one edge at the default cadence: who claims more in one window has damaged or evil bytes."""

_T1_TX, _T1_RX, _T2_TX, _T2_RX, _R1_TX, _R1_RX, _R2_TX, _R2_RX = range(len(COLUMNS))
_TRENDS = (_T1_TX, _T1_RX)
_LEVEL = 1
"""What is left is noise, on which a higher level spends time and saves 2 %."""

Stamps = npt.NDArray[np.int64]
Flags = npt.NDArray[np.uint8]


def pack(exchanges: Stamps, kept: Flags) -> bytes:
    """The matrix and the flags of an EdgeWindow as bytes."""
    rows = exchanges.shape[0]
    if exchanges.shape != (rows, len(COLUMNS)) or kept.shape != (rows,) or rows > MOST_ROWS:
        raise UsageError(f"exchanges of shape {exchanges.shape} with {kept.shape} flags are no window")
    there = exchanges != 0
    parts = [np.packbits(there, axis=1, bitorder="little").tobytes(), kept.astype(np.uint8).tobytes()]
    filled: list[Stamps] = []
    for column in range(len(COLUMNS)):
        foretold = _foretold(filled, rows)
        surprise = _carried(exchanges[:, column] - foretold, there[:, column])
        filled.append(surprise + foretold)
        parts += _column(surprise, has_trend=column in _TRENDS)
    return zlib.compress(b"".join(parts), _LEVEL)


def unpack(packed: bytes, rows: int) -> tuple[Stamps, Flags]:
    """What `pack` was given. Bytes that it did not make are a UsageError, and never cost more memory than `rows` do."""
    if not 0 <= rows <= MOST_ROWS:
        raise UsageError(f"{rows} exchanges in one window are not believable")
    most = rows * (2 + 8 * len(COLUMNS)) + 17 * len(COLUMNS)
    inflater = zlib.decompressobj()
    try:
        content = _Cursor(inflater.decompress(packed, most + 1))
    except zlib.error as error:
        raise UsageError(f"the exchanges are damaged: {error}") from None
    if not inflater.eof:
        raise UsageError("the exchanges are damaged: they end too early or go on too long")
    there = np.unpackbits(content.take(rows)[:, None], axis=1, bitorder="little")
    kept = content.take(rows).copy()
    filled: list[Stamps] = []
    for column in range(len(COLUMNS)):
        surprise = _read_column(content, rows, has_trend=column in _TRENDS)
        filled.append(surprise + _foretold(filled, rows))
    content.end()
    return np.where(there, np.stack(filled, axis=1), 0), kept


def _foretold(before: Sequence[Stamps], rows: int) -> Stamps:
    """What the columns before the next one say about it; see `exchanges.py` for the names."""
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


def _carried(values: Stamps, there: npt.NDArray[np.bool_]) -> Stamps:
    """The values; where one is missing, the one before it (at the start: the first that is there), or 0 for none."""
    if there.all():
        return values
    if not there.any():
        return np.zeros_like(values)
    newest = np.maximum.accumulate(np.where(there, np.arange(values.size), -1))
    carried: Stamps = values[np.where(newest < 0, int(there.argmax()), newest)]
    return carried


def _column(values: Stamps, *, has_trend: bool) -> list[bytes]:
    first = values[:1].tobytes() if values.size else bytes(8)
    if has_trend:
        values = np.diff(values, prepend=values[:1])
    least = values.min() if values.size else np.int64(0)
    above = values.view(np.uint64) - least.view(np.uint64)
    width = (int(above.max()).bit_length() + 7) // 8 if values.size else 0
    planes = above.astype("<u8").view(np.uint8).reshape(-1, 8)[:, :width]
    head = bytes([width]) + (first if has_trend else b"") + least.astype("<i8").tobytes()
    return [head, np.ascontiguousarray(planes.T).tobytes()]


def _read_column(content: "_Cursor", rows: int, *, has_trend: bool) -> Stamps:
    width = int(content.take(1)[0])
    if width > 8:
        raise UsageError("the exchanges are damaged: a number of more than 64 bits")
    first = content.take(8).view("<i8") if has_trend else None
    least = content.take(8).view("<u8")
    planes = np.zeros((rows, 8), np.uint8)
    planes[:, :width] = content.take(width * rows).reshape(width, rows).T
    values: Stamps = (planes.view("<u8").reshape(rows) + least).astype(np.uint64).view(np.int64)
    if first is None or not rows:
        return values
    values[0] = first[0]
    return np.cumsum(values)


class _Cursor:
    """Reads bytes from the front, and refuses to read beyond the end or to leave any."""

    def __init__(self, content: bytes) -> None:
        self._rest = np.frombuffer(content, np.uint8)

    def take(self, count: int) -> Flags:
        if count > self._rest.size:
            raise UsageError("the exchanges are damaged: they end too early")
        taken, self._rest = self._rest[:count], self._rest[count:]
        return taken

    def end(self) -> None:
        if self._rest.size:
            raise UsageError(f"the exchanges are damaged: {self._rest.size} bytes too many")
