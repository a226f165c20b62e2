"""`ringfold bench clock`: the error of the nodes' global clocks against a known truth, and the error of each estimator.

Virtual clocks, real UDP. Nodes in this process probe each other through the kernel. Drawing, probing, fitting and
calculating are production code. Only the transport of a report to the master is left out: this process reads the window
of each prober, one after the other, which takes microseconds. The truth (`clock_truth.py`) is known because each node's
clock is virtual. A *column* is a condition:

- `idle`: loopback, and no other load.
- `loaded`: the same, while a busy process runs on every core.
- `shaped`: every node is a host of its own. Half of the hosts have a slow downlink and a fast uplink, the others the
  opposite, so the two directions between them differ; and bursts of other traffic go to the slow downlinks, where
  probes wait behind them, in that direction only. `standing` is the same with so much traffic that the queues never
  empty. Both need root. (Why downlinks: the kernel stamps a packet after the sender's own queue, so waiting there is
  no delay to anybody.)

The kinds of rows (`part`): `nodes` has the error of the nodes' clocks in each column, at many instants of every window;
`edges` has every estimator on the very same windows; `models` has every estimator on simulated windows, where delays
are drawn from models. `filter` has each column calculated twice from the very same windows, once from each window alone
and once from several combined: `ahead_*` is the error during the *next* window, which is when a clock is read;
`filter-models` is the same on simulated edges whose clocks wander. `density` has each column once for each preset.

A permanent asymmetry (the shortest delays of the two directions differ) looks like an offset to any estimator. The
truth shows it: `asymmetry_*` is half that difference, the part of the error that no estimator can avoid.
"""

import math
import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import msgspec
import numpy as np
import numpy.typing as npt
import typer

from ringfold.probe.courses import FilterScenario, follow_course, rms
from ringfold.probe.exchanges import EdgeWindow
from ringfold.probe.fit import BASELINES, ESTIMATORS, fit
from ringfold.probe.graph.draw import draw
from ringfold.probe.graph.filter import STATED, FilterSettings
from ringfold.probe.models import MODELS, Course, Sample
from ringfold.probe.nodes.nodes_file import derive_key
from ringfold.probe.nodes.prober import ProbeSocket, ProbeStats, raw_now
from ringfold.probe.rounds.calculation import Calculation, RoundResult
from ringfold.probe.rounds.settings import DENSITIES, RoundSettings
from ringfold.tools.bench import report as reports
from ringfold.tools.bench.clock_truth import (
    INSTANTS,
    MARGIN,
    MARGIN_NS,
    Clocks,
    NodeErrors,
    asymmetry_ns,
    compare,
    edge_outside,
    node_errors,
    simulated,
    spread_clocks,
    with_truth,
)
from ringfold.tools.bench.report import Column, Row, Sheet
from ringfold.tools.bench.targets import Value
from ringfold.tools.cluster import LocalCluster
from ringfold.tools.shaped import HUB, Shape, ShapedNetwork, ShapingFailed, missing
from ringfold.wire.probing import EdgeFit, Neighbour, NodeId

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
WORKER = str(Path(__file__).with_name("workers.py"))
START_S = 30.0
PACKETS_PER_EXCHANGE, PACKET_BYTES = 5, 40
"""Two probes, two responses and the packet with the last timestamp; without the headers of UDP and IP."""
SETTLED = 2
"""Rounds before there is something to combine."""
FILTER_WANDERS = (0.0, 3e-9, 3e-8)
FILTER_EDGES = 6


def _ns(value: Value) -> str:
    """Nanoseconds with the digits that matter, in the unit that reads best."""
    assert isinstance(value, int | float)
    return f"{value:.3g} ns" if abs(value) < 1_000 else reports.microseconds(value / 1_000)


NODE_COLUMNS = (
    Column("column", "column"),
    Column("p50", "p50_ns", _ns),
    Column("p99", "p99_ns", _ns),
    Column("max", "max_ns", _ns),
    Column("bound", "bound_p50_ns", _ns),
    Column("outside", "outside"),
    Column("asymmetry", "asymmetry_p50_ns", _ns),
    Column("CPU", "cpu_share", lambda value: f"{value:.1%}"),
)
DENSITY_COLUMNS = (
    Column("column", "column"),
    Column("density", "density"),
    Column("p50", "p50_ns", _ns),
    Column("p99", "p99_ns", _ns),
    Column("next window p50", "ahead_p50_ns", _ns),
    Column("pairs/s", "pairs_per_s", lambda value: f"{value:.0f}"),
    Column("KB/s and edge", "bytes_per_s", lambda value: f"{float(value or 0) / 1e3:.0f}"),
    Column("CPU", "cpu_share", lambda value: f"{value:.1%}"),
)
FILTER_COLUMNS = (
    Column("column", "column"),
    Column("windows", "windows"),
    Column("p50", "p50_ns", _ns),
    Column("p99", "p99_ns", _ns),
    Column("next window p50", "ahead_p50_ns", _ns),
    Column("p99", "ahead_p99_ns", _ns),
    Column("covered", "covered", lambda value: f"{value:.1%}"),
    Column("outside", "outside"),
)
FILTER_MODEL_COLUMNS = (
    Column("column", "column"),
    Column("wander", "wander", lambda value: f"{value:g}"),
    Column("alone", "alone_ns", _ns),
    Column("combined", "combined_ns", _ns),
    Column("next window alone", "ahead_alone_ns", _ns),
    Column("combined", "ahead_combined_ns", _ns),
    Column("covered", "covered", lambda value: f"{value:.1%}"),
)
ESTIMATOR_COLUMNS = (
    Column("column", "column"),
    *(Column(name, name, _ns) for name in ESTIMATORS + BASELINES),
    Column("enough", "within", lambda value: "yes" if value else "no"),
)


class ClockPlan(msgspec.Struct, frozen=True):
    """What is measured."""

    nodes: int
    offset_ms: float
    drift_ppm: float
    rounds: int
    columns: list[str]
    window_ms: int
    neighbours: int
    seeds: int
    densities: list[str]


def command(
    nodes: Annotated[int, typer.Option(help="Nodes, each with a clock of its own.", min=2, max=64)] = 8,
    offset_ms: Annotated[float, typer.Option(help="Clocks are off by up to this, ahead or behind.", min=0)] = 50.0,
    drift_ppm: Annotated[
        float, typer.Option(help="Clocks drift by up to this, faster or slower.", min=0, max=400)
    ] = 30.0,
    rounds: Annotated[int, typer.Option(help="Windows in each column.", min=1)] = 3,
    columns: Annotated[str, typer.Option(help="Conditions, comma-separated.")] = ",".join(CONDITIONS),
    window_ms: Annotated[int, typer.Option(help="Length of a window.", min=100)] = 4_000,
    neighbours: Annotated[int, typer.Option(help="How many others a node probes.", min=1)] = 4,
    seeds: Annotated[int, typer.Option(help="Simulated windows of each delay model; 0: none.", min=0)] = 40,
    densities: Annotated[str, typer.Option(help="Presets to compare, comma-separated.")] = ",".join(DENSITIES),
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    check: Annotated[bool, typer.Option("--check", help="Compare with benchmarks/targets.toml.")] = False,
) -> None:
    """Error of the global clock against a known truth, on loopback, under load and on shaped links (needs root)."""
    wanted = [column.strip() for column in columns.split(",")]
    if unknown := sorted(set(wanted) - set(CONDITIONS)):
        raise typer.BadParameter(f"there is no column {', '.join(unknown)}; there are {', '.join(CONDITIONS)}")
    presets = [density.strip() for density in densities.split(",")]
    if unknown := sorted(set(presets) - set(DENSITIES)):
        raise typer.BadParameter(f"there is no density {', '.join(unknown)}; there are {', '.join(DENSITIES)}")
    plan = ClockPlan(nodes, offset_ms, drift_ppm, rounds, wanted, window_ms, neighbours, seeds, presets)
    skipped: dict[str, str] = {}
    rows: list[Row] = []
    samples: dict[str, list[Sample]] = {}
    before = os.getloadavg()[0]
    with reports.guarded(as_json=as_json) as progress:
        # The default is always measured: the other parts are about it.
        others = [density for density in presets if density != "default"]
        total = plan.rounds * len(wanted) * (1 + len(others))
        task = progress.add_task("", total=total + 2)
        for column in wanted:
            for density in ("default", *others):
                progress.update(task, description=f"{column} ({density})")
                seen = measure(column, plan, skipped, lambda: progress.advance(task), density)
                if density == "default":
                    rows += [nodes_row(column, seen), *filter_rows(column, seen)]
                if density == "default" and seen is not None:
                    samples[column] = [sample for one in seen.rounds for sample in one.samples]
                if density in presets:
                    rows.append(density_row(column, density, seen))
        progress.update(task, description="estimators", completed=total)
        rows += estimator_rows("edges", samples)
        progress.update(task, description="models", advance=1)
        rows += estimator_rows("models", simulated(seeds) if seeds else {})
        rows += filter_model_rows(seeds)
        progress.advance(task)
    notes = [f"load average {before:.1f} before, {os.getloadavg()[0]:.1f} after", *_notes(rows)]
    result = reports.report("clock", msgspec.to_builtins(plan), rows, skipped=skipped, notes=notes)
    reports.finish(result, _sheets(rows), as_json=as_json, against_targets=check)


# ClockNodes


Wait = Callable[[float], None]
"""Lets so many seconds pass."""


@dataclass(frozen=True, slots=True)
class RoundSeen:
    """One round: its windows beside the truth, what production made of them, and how far off that is."""

    samples: list[Sample]
    fits: list[EdgeFit]
    """In the order of the samples."""
    result: RoundResult
    nodes: NodeErrors
    edges_outside: int
    """How many corridors (of an edge at an instant) do not contain the truth."""
    compared: "dict[str, Compared]"
    """The same windows, alone and combined with former ones."""


@dataclass(frozen=True, slots=True)
class Compared:
    """The errors of a round's clocks, in the window itself and during the next one, and what was stated."""

    within: NodeErrors
    ahead: NodeErrors
    sigmas_ns: list[float]
    """Of the same nodes, in the order of the errors' rows."""


@dataclass(frozen=True, slots=True)
class ColumnSeen:
    """All rounds under one condition, and what probing cost each node."""

    rounds: list[RoundSeen]
    cpu_shares: list[float]
    """Of one core, while it probed; by node."""
    stats: list[ProbeStats]
    """By node."""
    out_edges: int
    in_edges: int
    """What the node with the most has."""


class ClockNodes:
    """One prober for each virtual clock, as a context. The graph is drawn, and no prober sends yet."""

    def __init__(self, clocks: Clocks, settings: RoundSettings, network: ShapedNetwork | None = None) -> None:
        self._clocks, self._settings = clocks, settings
        self.probers: dict[NodeId, ProbeSocket] = {}
        self._stack = ExitStack()
        try:
            for host, (node, clock) in enumerate(sorted(clocks.items())):
                with network.within(host) if network else nullcontext():
                    prober = ProbeSocket(
                        node,
                        network.address(host) if network else "127.0.0.1",
                        offset_ns=clock.offset_ns,
                        drift_ppb=clock.drift_ppb,
                        anchor_ns=clock.anchor_ns,
                    )
                self.probers[node] = self._stack.enter_context(prober)
            self.edges = draw(sorted(clocks), (), settings.neighbours, settings.seed)
            self._configure(network)
        except BaseException:
            self._stack.close()
            raise

    def __enter__(self) -> "ClockNodes":
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _configure(self, network: ShapedNetwork | None) -> None:
        """Configure every prober: which nodes it probes, and which may probe it."""
        known = {
            node: Neighbour(node, f"node-{node}", network.address(host) if network else "127.0.0.1", prober.port)
            for host, (node, prober) in enumerate(self.probers.items())
        }
        key = derive_key(b"bench clock")
        for node, prober in self.probers.items():
            out = [known[dst] for src, dst in self.edges if src == node]
            into = [known[src] for src, dst in self.edges if dst == node]
            prober.configure(key, out, into)

    def rounds(self, count: int, wait: Wait, advance: Callable[[], None]) -> ColumnSeen:
        """Probe for `count` windows without a pause between them, and calculate each as soon as it is over."""
        cadence = self._settings.cadence
        variants = {"alone": replace(self._settings, combine_windows=False), "combined": self._settings}
        calculations = {name: Calculation(settings) for name, settings in variants.items()}
        probers = list(self.probers.values())
        histories: dict[str, object] = dict.fromkeys(variants)
        seen: list[RoundSeen] = []
        began_ns, before_ns = raw_now(), [prober.stats().cpu_ns for prober in probers]
        for prober in probers:
            prober.resume(cadence.gap_us, cadence.pause_us)
        for _ in range(count):
            opened_ns = raw_now()
            wait(cadence.window_ms / 1_000)
            instants = [round(instant) for instant in np.linspace(opened_ns, raw_now(), INSTANTS)]
            windows = [window for prober in probers for window in prober.rotate()]
            utc = {prober.node: prober.utc() for prober in probers}
            fits = [fit(window) for window in windows]
            results = {name: calculation(fits, utc, histories[name]) for name, calculation in calculations.items()}
            histories = {name: result.history for name, result in results.items()}
            seen.append(self._judge(windows, fits, results, instants))
            advance()
        took_ns, stats = raw_now() - began_ns, [prober.stats() for prober in probers]
        shares = [(now.cpu_ns - before) / took_ns for now, before in zip(stats, before_ns, strict=True)]
        ends = [Counter(ends).most_common(1)[0][1] for ends in zip(*self.edges, strict=True)]
        return ColumnSeen(seen, shares, stats, out_edges=ends[0], in_edges=ends[1])

    def _judge(
        self,
        windows: Sequence[EdgeWindow],
        fits: list[EdgeFit],
        results: dict[str, RoundResult],
        instants: Sequence[int],
    ) -> RoundSeen:
        samples = [with_truth(window, self._clocks) for window in windows]
        outside = sum(edge_outside(sample, found) for sample, found in zip(samples, fits, strict=True))
        later = [instant + instants[-1] - instants[0] for instant in instants]
        compared = {name: self._compared(result, instants, later) for name, result in results.items()}
        return RoundSeen(samples, fits, results["combined"], compared["combined"].within, outside, compared)

    def _compared(self, result: RoundResult, instants: Sequence[int], later: Sequence[int]) -> Compared:
        sigmas = {clock.node: clock.sigma_ns for clock in result.nodes if clock.node != result.reference}
        within, ahead = (
            node_errors(result.nodes, result.reference, self._clocks, which) for which in (instants, later)
        )
        return Compared(within, ahead, [sigmas[node] for node in sorted(sigmas)])


# Columns


def measure(
    column: str, plan: ClockPlan, skipped: dict[str, str], advance: Callable[[], None], density: str = "default"
) -> ColumnSeen | None:
    """All rounds of a column; None, and the reason in `skipped`, where it cannot be had."""
    if column in SHAPED and (why := missing()):
        skipped[column] = f"{why}; run it as root"
        return None
    drift_ppb, offset_ns = round(plan.drift_ppm * 1_000), round(plan.offset_ms * 1e6)
    preset = DENSITIES[density]
    settings = RoundSettings(
        window_ms=plan.window_ms, neighbours=plan.neighbours, gap_us=preset.gap_us, pause_us=preset.pause_us
    )
    try:
        with _condition(column, plan.nodes) as (cluster, network):
            clocks = spread_clocks(plan.nodes, offset_ns, drift_ppb, raw_now())
            with ClockNodes(clocks, settings, network) as nodes:
                return nodes.rounds(plan.rounds, cluster.pause, advance)
    except ShapingFailed as error:
        skipped[column] = f"links cannot be shaped here: {error}"
        return None


@contextmanager
def _condition(column: str, nodes: int) -> Iterator[tuple[LocalCluster, ShapedNetwork | None]]:
    """The world of a column. Leaving it ends all load, and removes the network."""
    if column not in SHAPED:
        with LocalCluster() as cluster:
            if column == "loaded":
                start_busy_cores(cluster)
            yield cluster, None
        return
    slow, fast = Shape(up_mbit=SLOW_MBIT, down_mbit=FAST_MBIT), Shape(up_mbit=FAST_MBIT, down_mbit=SLOW_MBIT)
    period_us = round(BURST_BYTES * 8 / (SLOW_MBIT * LOADS[column]))
    with ShapedNetwork([(slow, fast)[host % 2] for host in range(nodes)]) as network, LocalCluster() as cluster:
        for host in range(1, nodes, 2):
            start_bursts(cluster, network, host, period_us)
        yield cluster, network


def start_busy_cores(cluster: LocalCluster) -> list[str]:
    """Keep every core busy that this process may use, by one process each; returns their names once all of them run."""
    names = []
    for core in sorted(os.sched_getaffinity(0)):
        names.append(f"busy-{core}")
        cluster.start_worker(names[-1], WORKER, "busy", core)
    cluster.wait_connected(names, START_S)
    return names


def start_bursts(cluster: LocalCluster, network: ShapedNetwork, host: int, period_us: int) -> None:
    """Send bursts from the hub to a host, until the cluster ends. Whether anything listens does not matter."""
    name = f"bursts-{host}"
    arguments = (network.address(host), DISCARD_PORT, BURST_BYTES, period_us)
    cluster.start_worker(name, WORKER, "bursts", *arguments, inside=network.inside(HUB))
    cluster.wait_connected([name], START_S)


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


def density_row(column: str, density: str, seen: ColumnSeen | None) -> Row:
    """The accuracy of a preset, and what it costs: CPU of a node's prober, and the traffic of one edge."""
    row: Row = {"part": "density", "column": column, "density": density}
    whole = nodes_row(column, seen)
    figures = ("p50_ns", "p99_ns", "max_ns", "cpu_share", "lost_share")
    row |= {name: whole.get(name) for name in figures}
    if seen is None:
        return {**row, "pairs_per_s": None, "bytes_per_s": None}
    sent = [found.sent / (2 * found.half_ns / 1e9) for one in seen.rounds for found in one.fits if found.half_ns]
    pairs = float(np.median(sent)) if sent else None
    ahead = np.concatenate([np.abs(one.compared["alone"].ahead.errors).ravel() for one in seen.rounds])
    return {
        **row,
        "ahead_p50_ns": float(np.percentile(ahead, 50)) if ahead.size else None,
        "pairs_per_s": pairs,
        "bytes_per_s": None if pairs is None else pairs * PACKETS_PER_EXCHANGE * PACKET_BYTES,
    }


def filter_rows(column: str, seen: ColumnSeen | None) -> list[Row]:
    """The same windows of a column, alone and combined. The first rounds have little to combine, and do not count."""
    rows: list[Row] = []
    for name in ("alone", "combined"):
        row: Row = {"part": "filter", "column": column, "windows": name}
        if seen is None or len(seen.rounds) <= SETTLED:
            rows.append({**row, "p50_ns": None, "p99_ns": None, "ahead_p50_ns": None, "ahead_p99_ns": None})
            continue
        found = [one.compared[name] for one in seen.rounds[SETTLED:]]
        within, ahead = (
            np.concatenate([np.abs(errors).ravel() for errors in every])
            for every in ([one.within.errors for one in found], [one.ahead.errors for one in found])
        )
        middles = [np.abs(one.within.errors[:, INSTANTS // 2]) <= STATED * np.array(one.sigmas_ns) for one in found]
        rows.append(
            {
                **row,
                **_tail(within, {"p50_ns": 50, "p99_ns": 99}),
                **_tail(ahead, {"ahead_p50_ns": 50, "ahead_p99_ns": 99}),
                "covered": float(np.mean(np.concatenate(middles))),
                "outside": sum(one.within.outside + one.ahead.outside for one in found),
                "rounds": len(found),
            }
        )
    return rows


def filter_model_rows(seeds: int) -> list[Row]:
    """Simulated edges of every delay model, on clocks that wander more and more. None without seeds."""
    rows: list[Row] = []
    for name, model in MODELS.items() if seeds else ():
        for wander in FILTER_WANDERS:
            scenario = FilterScenario(name, Course(wander=wander))
            if model.stamps_are_right:
                outcome = follow_course(seeds, scenario, FilterSettings(), edges=min(seeds, FILTER_EDGES))
                rows.append(
                    {
                        "part": "filter-models",
                        "column": name,
                        "wander": wander,
                        "alone_ns": rms(outcome.alone_ns),
                        "combined_ns": rms(outcome.combined_ns),
                        "ahead_alone_ns": rms(outcome.predicted_alone_ns),
                        "ahead_combined_ns": rms(outcome.predicted_ns),
                        "ahead_ratio": rms(outcome.predicted_ns) / max(rms(outcome.predicted_alone_ns), 1.0),
                        "covered": outcome.coverage,
                        "windows": int(outcome.combined_ns.size),
                    }
                )
    return rows


def _tail(values: Floats | Ints, names: dict[str, int]) -> Row:
    return {name: float(np.percentile(values, at)) if values.size else None for name, at in names.items()}


def estimator_rows(part: str, columns: dict[str, list[Sample]]) -> list[Row]:
    """Every estimator on the same windows. `beyond_ns` is how much too far the default is from the best one.

    `asymmetry_rms_ns` is the part of the error that no estimator can avoid on these windows.
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
    """For the eye: the nodes, densities and filters, and an estimator a column."""
    sheets = []
    for part, title, columns in (
        ("nodes", "error of the nodes' clocks", NODE_COLUMNS),
        ("density", "accuracy and cost of the presets", DENSITY_COLUMNS),
        ("filter", "each window alone, and several combined", FILTER_COLUMNS),
        ("filter-models", "the same on simulated edges (RMS)", FILTER_MODEL_COLUMNS),
    ):
        if of_part := [row for row in rows if row["part"] == part]:
            sheets.append(Sheet(title, of_part, columns))
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
            sheets += [Sheet(title, list(by_column.values()), ESTIMATOR_COLUMNS)] if by_column else []
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
