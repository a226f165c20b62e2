"""`--check`: the targets, against the figures that were measured.

A target in `benchmarks/targets.toml` names a bench, a key of its rows, which rows it is about, and a bound. It is
judged by the worst of its rows. A row whose value is missing because a library was skipped is a miss: what could not
be measured was not shown. A target about rows that were not measured (another world or size) is "not asked".
"""

import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

import msgspec

from ringfold.errors import ConfigError

Value = float | int | str | bool | None
Bound = Literal["at_least", "above", "at_most", "below"]


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
    where: dict[str, int | str | bool | Range] = {}
    at_least: float | None = None
    above: float | None = None
    at_most: float | None = None
    below: float | None = None

    @property
    def bound(self) -> tuple[Bound, float]:
        bounds: list[tuple[Bound, float | None]] = [
            ("at_least", self.at_least),
            ("above", self.above),
            ("at_most", self.at_most),
            ("below", self.below),
        ]
        given = [(name, limit) for name, limit in bounds if limit is not None]
        if len(given) != 1:
            raise ConfigError(f"target {self.id} needs exactly one of at_least, above, at_most, below")
        return given[0]

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
    verdict: Literal["hit", "miss", "not asked"]
    measured: str
    value: float | None = None


class _File(msgspec.Struct, forbid_unknown_fields=True):
    target: list[Target]


def load(path: Path | None = None) -> list[Target]:
    """All targets. Every one is checked for a sound bound, and ids are unique."""
    path = path or _default_path()
    try:
        targets = msgspec.convert(tomllib.loads(path.read_text()), _File).target
    except (OSError, tomllib.TOMLDecodeError, msgspec.ValidationError) as error:
        raise ConfigError(f"cannot read the targets in {path}: {error}") from error
    ids = [target.id for target in targets if target.bound]
    if doubled := {name for name in ids if ids.count(name) > 1}:
        raise ConfigError(f"targets named twice in {path}: {sorted(doubled)}")
    return targets


def check(
    bench: str, rows: Sequence[Mapping[str, Value]], skipped: Mapping[str, str], path: Path | None = None
) -> list[TargetCheck]:
    """Judge every target of `bench` by the worst of its rows. Empty when no target is about these rows."""
    found = [_judge(target, rows, skipped) for target in load(path) if target.bench == bench]
    return found if any(one.verdict != "not asked" for one in found) else []


def _judge(target: Target, rows: Sequence[Mapping[str, Value]], skipped: Mapping[str, str]) -> TargetCheck:
    name, limit = target.bound
    condition = f"{target.figure} {name.replace('_', ' ')} {limit:g}"
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
