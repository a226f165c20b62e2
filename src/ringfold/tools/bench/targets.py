"""`--check`: the targets, against the figures that were measured.

A target in `benchmarks/targets.toml` names a bench, a key of its rows, which rows it is about, and a bound. It is
judged by the worst of its rows. A row whose value is missing because a library was skipped is a miss: what could not
be measured was not shown. A target about rows that were not measured (another world or size) is "not asked". A target
with `cores` holds on machines with so many only; on others it is "other machine", and not judged.

A bound may be a table of sizes, each with its own limit: `at_least = { 4K = 14, 1M = 3 }`. That is a target for each of
these sizes.
"""

import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal

import msgspec
import typer
from msgspec.structs import replace

from ringfold.errors import ConfigError
from ringfold.tools.bench.sizes import size_bytes, size_text

Value = float | int | str | bool | None
Bound = Literal["at_least", "above", "at_most", "below"]
Limit = float | dict[str, float]
Verdict = Literal["hit", "miss", "not asked", "other machine"]


class Range(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Rows whose key lies between two numbers, both included."""

    min: float = float("-inf")
    max: float = float("inf")


class Target(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One target. `text` is the requirement as it was given; exactly one bound makes it checkable."""

    id: str
    text: str
    bench: str
    figure: str
    cores: int | Range | None = None
    """The machines that it is for, by their usable cores; None: all."""
    where: dict[str, int | str | bool | Range] = {}
    at_least: Limit | None = None
    above: Limit | None = None
    at_most: Limit | None = None
    below: Limit | None = None

    @property
    def _given(self) -> tuple[Bound, Limit]:
        bounds: list[tuple[Bound, Limit | None]] = [
            ("at_least", self.at_least),
            ("above", self.above),
            ("at_most", self.at_most),
            ("below", self.below),
        ]
        given = [(name, limit) for name, limit in bounds if limit is not None]
        if len(given) != 1:
            raise ConfigError(f"target {self.id} needs exactly one of at_least, above, at_most, below")
        return given[0]

    @property
    def bound(self) -> tuple[Bound, float]:
        name, limit = self._given
        assert not isinstance(limit, dict), f"target {self.id} is a table"
        return name, limit

    def by_size(self) -> "Iterator[Target]":
        """This target, or one for each size in its table."""
        name, limits = self._given
        if not isinstance(limits, dict):
            yield self
            return
        if not limits or "size_bytes" in self.where:
            raise ConfigError(f"target {self.id} needs sizes in its table, and none in `where`")
        for text, limit in limits.items():
            size = size_bytes(text)
            where = {**self.where, "size_bytes": size}
            named = replace(self, id=f"{self.id}:{text}", text=f"{self.text}, {size_text(size)}", where=where)
            yield replace(named, **{name: limit})

    def is_for(self, cores: int) -> bool:
        return self.cores is None or _matches(cores, self.cores)

    def is_about(self, row: Mapping[str, Value]) -> bool:
        return all(_matches(row.get(key), wanted) for key, wanted in self.where.items())

    def met_by(self, value: float) -> bool:
        match self.bound:
            case ("at_least", limit):
                return value >= limit
            case ("above", limit):
                return value > limit
            case ("at_most", limit):
                return value <= limit
            case (_, limit):
                return value < limit


class TargetCheck(msgspec.Struct, frozen=True):
    """The result of one target. `measured` is the worst value, and where it was measured."""

    id: str
    text: str
    condition: str
    verdict: Verdict
    measured: str
    value: float | None = None
    cores: str = ""
    """The machines that the target is for; empty: all."""

    @property
    def is_judged(self) -> bool:
        return self.verdict in ("hit", "miss")


class _File(msgspec.Struct, forbid_unknown_fields=True):
    target: list[Target]


def load(path: Path | None = None) -> list[Target]:
    """All targets, one for each size of a table. Every one is checked for a sound bound, and ids are unique."""
    path = path or _default_path()
    try:
        written = msgspec.convert(tomllib.loads(path.read_text()), _File).target
        targets = [target for each in written for target in each.by_size()]
    except (OSError, ValueError, typer.BadParameter) as error:  # those of msgspec and tomllib are ValueErrors, too
        raise ConfigError(f"cannot read the targets in {path}: {error}") from error
    ids = [target.id for target in targets]
    if doubled := {name for name in ids if ids.count(name) > 1}:
        raise ConfigError(f"targets named twice in {path}: {sorted(doubled)}")
    return targets


def check(
    bench: str, rows: Sequence[Mapping[str, Value]], skipped: Mapping[str, str], cores: int, path: Path | None = None
) -> list[TargetCheck]:
    """Judge every target of `bench` by the worst of its rows, on a machine with so many usable cores.

    Empty when no target is about these rows, and none is for other machines.
    """
    found = [_judge(target, rows, skipped, cores) for target in load(path) if target.bench == bench]
    return found if any(one.verdict != "not asked" for one in found) else []


def _judge(target: Target, rows: Sequence[Mapping[str, Value]], skipped: Mapping[str, str], cores: int) -> TargetCheck:
    name, limit = target.bound
    condition = f"{target.figure} {name.replace('_', ' ')} {limit:g}"
    if not target.is_for(cores):
        return TargetCheck(target.id, target.text, condition, "other machine", "", cores=_cores_text(target.cores))
    mine = [row for row in rows if target.figure in row and target.is_about(row)]
    if not mine:
        return TargetCheck(target.id, target.text, condition, "not asked", "")
    values = [(value, row) for row in mine if isinstance(value := row[target.figure], int | float)]
    if len(values) < len(mine):
        why = "; ".join(f"{library} skipped: {reason}" for library, reason in sorted(skipped.items()))
        return TargetCheck(target.id, target.text, condition, "miss", f"not measured ({why or 'no value'})")
    pick = min if name in ("at_least", "above") else max
    value, row = pick(values, key=lambda pair: pair[0])
    keys = dict.fromkeys([*target.where, "world", "size_bytes"])
    where = ", ".join(f"{key} {row[key]}" for key in keys if key in row)
    verdict: Literal["hit", "miss"] = "hit" if target.met_by(value) else "miss"
    return TargetCheck(
        target.id, target.text, condition, verdict, _number(value) + (f" at {where}" if where else ""), value
    )


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1_000 else f"{value:.4g}"


def _cores_text(cores: int | Range | None) -> str:
    if not isinstance(cores, Range):
        return "" if cores is None else f"{cores} cores"
    if cores.max == float("inf"):
        return f"{cores.min:g} cores or more"
    return f"{max(cores.min, 1):g} to {cores.max:g} cores"


def _matches(value: Value, wanted: int | str | bool | Range) -> bool:
    if isinstance(wanted, Range):
        return isinstance(value, int | float) and wanted.min <= value <= wanted.max
    return value == wanted


def _default_path() -> Path:
    """`benchmarks/targets.toml` of the working directory, else of the checkout that this package runs from."""
    places = [Path.cwd(), *Path(__file__).resolve().parents]
    for place in places:
        if (path := place / "benchmarks" / "targets.toml").exists():
            return path
    raise ConfigError("benchmarks/targets.toml was not found: run --check from a checkout of Ringfold")
