"""`ringfold bench clock`: how far the nodes' global clocks are from the truth, and how good each estimator is.

Virtual clocks, real UDP. Nodes in this process probe each other through the kernel, and rounds are calculated as in
production; the truth (`clock_truth.py`) is known because each node's clock was made up. A *column* is a condition:

- `idle`: loopback, and nothing besides.
- `loaded`: the same, while a busy process sits on every core.
- `shaped`: every node is a host of its own. Half of the hosts have a slow downlink and a fast uplink, the others the
  opposite, so the two directions between them differ; and bursts of other traffic go to the slow downlinks, where
  probes wait behind them, in that direction only. `standing` is the same with so much traffic that the queues never
  empty. Both need root. (Why downlinks: the kernel stamps a packet after the sender's own queue, so what waits there
  is no delay to anybody.)

Three kinds of rows (`part`): `nodes` has the error of the nodes' clocks in each column, at many instants of every
window; `edges` has every estimator on the very same windows; `models` has every estimator on simulated windows, where
delays are drawn from models.

An asymmetry that never goes away (the shortest delay there is not the shortest delay back) looks like an offset to any
estimator. The truth shows it: `asymmetry_*` is half that difference, the part of the error nobody could avoid.
"""

import math
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Annotated

import msgspec
import numpy as np
import numpy.typing as npt
import typer

from ringfold.probe import fit
from ringfold.probe.models import Sample
from ringfold.probe.nodes.prober import raw_now
from ringfold.probe.rounds.settings import RoundSettings
from ringfold.tools import load
from ringfold.tools.bench import report as reports
from ringfold.tools.bench.clock_nodes import ColumnSeen, Nodes
from ringfold.tools.bench.clock_truth import asymmetry_ns, spread_clocks
from ringfold.tools.bench.estimators import MARGIN, MARGIN_NS, compare, simulated
from ringfold.tools.bench.report import Column, Row, Sheet
from ringfold.tools.bench.targets import Value
from ringfold.tools.shaped import HUB, Shape, ShapedNetwork, ShapingFailed, missing
from ringfold.tools.spawn import Crew

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

CONDITIONS = ("idle", "loaded", "shaped", "standing")
SHAPED = ("shaped", "standing")
SLOW_MBIT, FAST_MBIT = 40.0, 200.0
BURST_BYTES = 131_072
"""Twice what a shaper lets through at once: the second half waits in its queue."""
LOADS = {"shaped": 0.6, "standing": 1.1}
"""Other traffic, as a share of a slow downlink."""
DISCARD_PORT = 9


def _ns(value: Value) -> str:
    """Nanoseconds with the digits that matter, in the unit that reads best."""
    assert isinstance(value, int | float)
    return f"{value:.3g} ns" if abs(value) < 1_000 else reports.microseconds(value / 1_000)


NODES = (
    Column("column", "column"),
    Column("p50", "p50_ns", _ns),
    Column("p99", "p99_ns", _ns),
    Column("max", "max_ns", _ns),
    Column("bound", "bound_p50_ns", _ns),
    Column("outside", "outside"),
    Column("asymmetry", "asymmetry_p50_ns", _ns),
    Column("CPU", "cpu_share", lambda value: f"{value:.1%}"),
)
ESTIMATORS = (
    Column("column", "column"),
    *(Column(name, name, _ns) for name in fit.ESTIMATORS + fit.BASELINES),
    Column("enough", "within", lambda value: "yes" if value else "no"),
)


class Plan(msgspec.Struct, frozen=True):
    """What is measured."""

    nodes: int
    offset_ms: float
    drift_ppm: float
    rounds: int
    columns: list[str]
    window_ms: int
    neighbours: int
    seeds: int


def command(
    nodes: Annotated[int, typer.Option(help="Nodes, each with a clock of its own.", min=2, max=64)] = 8,
    offset_ms: Annotated[float, typer.Option(help="Clocks are off by up to this, both ways.", min=0)] = 50.0,
    drift_ppm: Annotated[float, typer.Option(help="Clocks drift by up to this, both ways.", min=0, max=400)] = 30.0,
    rounds: Annotated[int, typer.Option(help="Windows in each column.", min=1)] = 3,
    columns: Annotated[str, typer.Option(help="Conditions, comma-separated.")] = ",".join(CONDITIONS),
    window_ms: Annotated[int, typer.Option(help="Length of a window.", min=100)] = 4_000,
    neighbours: Annotated[int, typer.Option(help="How many others a node probes.", min=1)] = 4,
    seeds: Annotated[int, typer.Option(help="Simulated windows of each delay model; 0: none.", min=0)] = 40,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    check: Annotated[bool, typer.Option("--check", help="Compare with benchmarks/targets.toml.")] = False,
) -> None:
    """Error of the global clock against a known truth, on loopback, under load and on shaped links (needs root)."""
    asked = [column.strip() for column in columns.split(",")]
    if unknown := sorted(set(asked) - set(CONDITIONS)):
        raise typer.BadParameter(f"there is no column {', '.join(unknown)}; there are {', '.join(CONDITIONS)}")
    plan = Plan(nodes, offset_ms, drift_ppm, rounds, asked, window_ms, neighbours, seeds)
    skipped: dict[str, str] = {}
    rows: list[Row] = []
    samples: dict[str, list[Sample]] = {}
    before = os.getloadavg()[0]
    with reports.guarded(as_json=as_json) as progress:
        task = progress.add_task("", total=plan.rounds * len(asked) + 2)
        for column in asked:
            progress.update(task, description=column)
            seen = measure(column, plan, skipped, lambda: progress.advance(task))
            rows.append(nodes_row(column, seen))
            if seen is not None:
                samples[column] = [sample for one in seen.rounds for sample in one.samples]
        progress.update(task, description="estimators", completed=plan.rounds * len(asked))
        rows += estimator_rows("edges", samples)
        progress.update(task, description="models", advance=1)
        rows += estimator_rows("models", simulated(seeds) if seeds else {})
        progress.advance(task)
    notes = [f"load average {before:.1f} before, {os.getloadavg()[0]:.1f} after", *_notes(rows)]
    result = reports.report("clock", msgspec.to_builtins(plan), rows, skipped=skipped, notes=notes)
    reports.finish(result, _sheets(rows), as_json=as_json, against_targets=check)


# Columns


def measure(column: str, plan: Plan, skipped: dict[str, str], advance: Callable[[], None]) -> ColumnSeen | None:
    """All rounds of a column; None, and the reason in `skipped`, where it cannot be had."""
    if column in SHAPED and (why := missing()):
        skipped[column] = f"{why}; run it as root"
        return None
    drift_ppb, offset_ns = round(plan.drift_ppm * 1_000), round(plan.offset_ms * 1e6)
    settings = RoundSettings(window_ms=plan.window_ms, neighbours=plan.neighbours)
    try:
        with _condition(column, plan.nodes) as (crew, network):
            clocks = spread_clocks(plan.nodes, offset_ns, drift_ppb, raw_now())
            with Nodes(clocks, settings, network) as nodes:
                return nodes.rounds(plan.rounds, crew.pause, advance)
    except ShapingFailed as error:
        skipped[column] = f"links cannot be shaped here: {error}"
        return None


@contextmanager
def _condition(column: str, nodes: int) -> Iterator[tuple[Crew, ShapedNetwork | None]]:
    """The world of a column. Leaving it ends all load, and removes the network."""
    if column not in SHAPED:
        with Crew() as crew:
            if column == "loaded":
                load.busy_cores(crew)
            yield crew, None
        return
    slow, fast = Shape(up_mbit=SLOW_MBIT, down_mbit=FAST_MBIT), Shape(up_mbit=FAST_MBIT, down_mbit=SLOW_MBIT)
    period_us = round(BURST_BYTES * 8 / (SLOW_MBIT * LOADS[column]))
    with ShapedNetwork([(slow, fast)[host % 2] for host in range(nodes)]) as network, Crew() as crew:
        for host in range(1, nodes, 2):
            to = (network.address(host), DISCARD_PORT)
            load.bursts(crew, f"bursts-{host}", to, BURST_BYTES, period_us, partial(network.inside, HUB))
        yield crew, network


# Figures


def nodes_row(column: str, seen: ColumnSeen | None) -> Row:
    """The error of the nodes' clocks in a column; figures that could not be had are None."""
    row: Row = {"part": "nodes", "column": column}
    if seen is None:
        # A figure that could not be measured was not shown: rows without it make `--check` a miss.
        return {**row, "p50_ns": None, "p99_ns": None, "max_ns": None, "outside": None, "missing": None}
    errors = np.concatenate([np.abs(one.nodes.errors).ravel() for one in seen.rounds])
    bounds = np.concatenate([one.nodes.bounds.ravel() for one in seen.rounds])
    fits = [found for one in seen.rounds for found in one.fits]
    views = [view for one in seen.rounds for view in one.result.edges]
    halves = _asymmetry([sample for one in seen.rounds for sample in one.samples])
    nodes_outside = sum(one.nodes.outside for one in seen.rounds)
    edges_outside = sum(one.edges_outside for one in seen.rounds)
    return {
        **row,
        **_tail(errors, {"p50_ns": 50, "p99_ns": 99, "max_ns": 100}),
        "rounds": len(seen.rounds),
        "instants": int(errors.size),
        **_tail(bounds, {"bound_p50_ns": 50, "bound_max_ns": 100}),
        "outside": nodes_outside + edges_outside,
        "nodes_outside": nodes_outside,
        "edges_outside": edges_outside,
        "missing": sum(len(one.result.missing) for one in seen.rounds),
        "windows": len(fits),
        "refused": sum(bool(found.refused) for found in fits),
        "dropped": sum(bool(view.dropped) and not view.fit.refused for view in views),
        "lost_share": sum(found.lost for found in fits) / max(1, sum(found.sent for found in fits)),
        "stamps": "kernel" if all(one.stamps == "kernel" for one in seen.stats) else "user",
        "cpu_share": max(seen.cpu_shares),
        "cpu_share_median": float(np.median(seen.cpu_shares)),
        "out_edges": seen.out_edges,
        "in_edges": seen.in_edges,
        **_tail(halves, {"asymmetry_p50_ns": 50, "asymmetry_max_ns": 100}),
    }


def _tail(values: Floats | Ints, names: dict[str, int]) -> Row:
    return {name: float(np.percentile(values, at)) if values.size else None for name, at in names.items()}


def estimator_rows(part: str, columns: dict[str, list[Sample]]) -> list[Row]:
    """Every estimator on the same windows. `beyond_ns` is how much too far the default is from the best one.

    `asymmetry_rms_ns` tells how much of the error the windows leave no way to avoid.
    """
    rows: list[Row] = []
    unseen = {name: _asymmetry(samples) for name, samples in columns.items()}
    for found in compare(columns):
        column = str(found.pop("model"))
        row: Row = {"part": part, "column": column, **found}
        best, mine = row.get("best_ns"), row["rms_ns"]
        if isinstance(best, float) and isinstance(mine, float):
            row["beyond_ns"] = max(0.0, mine - max(MARGIN * best, best + MARGIN_NS)) if mine < math.inf else None
            row["asymmetry_rms_ns"] = float(np.sqrt(np.mean(np.square(unseen[column])))) if unseen[column].size else 0.0
        rows.append(row)
    return rows


def _asymmetry(samples: Sequence[Sample]) -> Floats:
    """Of each window that has packets in both directions."""
    halves = np.array([asymmetry_ns(sample) for sample in samples], np.float64)
    kept: Floats = np.abs(halves[np.isfinite(halves)])
    return kept


def _sheets(rows: Sequence[Row]) -> list[Sheet]:
    """For the eye: the nodes, and an estimator a column."""
    sheets = [Sheet("error of the nodes' clocks", [row for row in rows if row["part"] == "nodes"], NODES)]
    parts = {"edges": "of the same windows", "models": "of simulated windows"}
    for part, of_what in parts.items():
        for key, where in (("rms_ns", "in the middle"), ("ends_rms_ns", "at the ends")):
            by_column: dict[Value, Row] = {}
            for row in rows:
                if row["part"] == part:
                    line = by_column.setdefault(row["column"], {"column": row["column"]})
                    line[str(row["estimator"])] = row[key]
                    if key == "rms_ns" and "within" in row:
                        line["within"] = row["within"]
            title = f"error (RMS) of each estimator {where} {of_what}"
            sheets += [Sheet(title, list(by_column.values()), ESTIMATORS)] if by_column else []
    return sheets


def _notes(rows: Sequence[Row]) -> list[str]:
    """What the tables have no room for."""
    return [
        f"{row['column']}: {row['windows']} windows of edges, {row['refused']} without a line, {row['dropped']} left "
        f"out as outliers; {row['missing']} times a node without a clock; of {row['instants']} bounds of nodes "
        f"{row['nodes_outside']} miss the truth, of the edges' {row['edges_outside']}"
        for row in rows
        if row["part"] == "nodes" and row["max_ns"] is not None
    ]
