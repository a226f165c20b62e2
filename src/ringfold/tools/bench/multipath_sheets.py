"""The tables of `ringfold bench multipath`: one for each part, with the columns that it has. Pure.

On a terminal of 80 columns every table fits. What was measured without and with hints stands side by side.
"""

from collections.abc import Callable, Sequence

from ringfold.tools.bench.report import Column, Row, Sheet, microseconds, size_text, times
from ringfold.tools.bench.targets import Value

_PATHS = Column("paths", "layout")
_SIZE = Column("size", "size_bytes", size_text)
_TIME = Column("time", "median_us", microseconds)
_TWICE = Column("sent twice", "reissued")
_HINTS = (
    Column("without hints", "without_us", microseconds),
    Column("with hints", "with_us", microseconds),
    Column("gain", "gain", times),
)


def _percent(value: Value) -> str:
    return f"{value:.1%}"


def _milliseconds(value: Value) -> str:
    return f"{value:.1f} ms"


_OVER = Column("over the best", "over_best", lambda value: f"{value:.3f}")
_TRANSFER = (
    _PATHS,
    Column("way", "way"),
    _SIZE,
    _TIME,
    Column("Mbit/s", "mbit", lambda value: f"{value:.1f}"),
    Column("of the ceiling", "share", _percent),
    _TWICE,
)
_CUT = (
    _PATHS,
    Column("cut path", "path"),
    _SIZE,
    _TIME,
    _OVER,
    _TWICE,
    Column("back after", "back_s", lambda value: f"{value:.1f} s"),
)
_BACKPRESSURE = (
    Column("packets", "packets"),
    Column("late, median", "median_us", microseconds),
    Column("late, worst", "latency_ms", _milliseconds),
    Column("came back", "returned"),
    Column("back after", "back_ms", _milliseconds),
)
_STEADY = (
    Column("bottleneck", "layout"),
    Column("samples", "samples"),
    Column("mean share", "mean", _percent),
    Column("share varies", "std", _percent),
)


def side_by_side(rows: Sequence[Row]) -> list[Row]:
    """One row for what was measured without and with hints, by paths and size, in the order of the first of them."""
    found: dict[tuple[Value, Value], Row] = {}
    for row in rows:
        key = (row.get("layout"), row.get("size_bytes"))
        both = found.setdefault(key, {name: row[name] for name in ("layout", "size_bytes") if name in row})
        both["with_us" if row.get("way") == "with hints" else "without_us"] = row.get("median_us")
        if "gain" in row:
            both["gain"] = row["gain"]
    return list(found.values())


def _as_they_are(rows: Sequence[Row]) -> list[Row]:
    return list(rows)


_PARTS: tuple[tuple[str, tuple[str, ...], Sequence[Column], Callable[[Sequence[Row]], list[Row]]], ...] = (
    ("transfers, beside the ceiling that plain TCP reaches", ("ceiling", "transfer"), _TRANSFER, _as_they_are),
    ("rates swapped in mid-transfer", ("swap",), (_PATHS, _SIZE, _TIME, _OVER, _TWICE), _as_they_are),
    ("a path cut in mid-transfer", ("cut",), _CUT, _as_they_are),
    ("few segments", ("few segments",), (_PATHS, _SIZE, *_HINTS), side_by_side),
    ("cold start", ("cold start",), (_SIZE, *_HINTS), side_by_side),
    ("congestion inside the switch", ("switch",), (_SIZE, *_HINTS), side_by_side),
    ("backpressure in mid-transfer", ("backpressure",), _BACKPRESSURE, _as_they_are),
    ("steady state", ("steady",), _STEADY, _as_they_are),
)


def sheets(figures: Sequence[Row]) -> list[Sheet]:
    """A table for each part that has figures."""
    made = []
    for title, parts, columns, arrange in _PARTS:
        rows = [row for row in figures if row["part"] in parts]
        if rows:
            made.append(Sheet(title, arrange(rows), columns))
    return made
