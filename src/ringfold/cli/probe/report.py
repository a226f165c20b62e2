"""`ringfold probe --report`: what logs say about edges and nodes, as tables, pictures or JSON."""

import importlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from rich.console import Group, RenderableType
    from rich.text import Text

    from ringfold.probe.logs.report import EdgeReport, LogReport, NodeReport

MAX_ROWS = 64
"""More edges or nodes do not fit on a screen: the worst are shown, and `--json` has all."""


def show(logs: Sequence[Path], pictures: Path | None, kind: Literal["png", "svg"], *, as_json: bool) -> None:
    """Read the logs, print the report, and write the pictures if a directory for them is given."""
    from ringfold.cli.output import console, error_console, print_json

    if pictures is not None:
        from ringfold.cli.probe.pictures import need_matplotlib

        need_matplotlib()
    report, notes = read(logs)
    show_notes(notes)
    if as_json:
        print_json({
            "logs": list(logs),
            "windows": report.windows,
            "rounds": report.rounds,
            "edges": report.edges,
            "nodes": report.nodes,
            "missing": report.missing,
            "anomaly": report.anomaly,
            "notes": notes,
        })  # fmt: skip
    else:
        console.print(render(report))
    if pictures is not None:
        from ringfold.cli.probe.pictures import draw

        for path in draw(report, pictures, kind):
            error_console.print(f"wrote {path}", markup=False, soft_wrap=True)


def read(paths: Sequence[Path]) -> "tuple[LogReport, list[str]]":
    """The report, and notes about what could not be read. Without any round in the logs, clocks are calculated now."""
    from ringfold.cli.probe.report import rounds_of
    from ringfold.probe.logs.files import LogReader, logs_in
    from ringfold.probe.logs.lines import FitLine
    from ringfold.probe.logs.report import ReportCollector

    readers = [LogReader(path) for path in logs_in(paths)]
    collector = ReportCollector()
    for reader in readers:
        for line in reader:
            collector.add(line)
    notes = [note for reader in readers for note in reader.notes]
    if not collector.has_rounds:
        fits = (line for reader in readers for line in reader if isinstance(line, FitLine))
        for summary in rounds_of(fits):
            collector.add_round(summary)
    return collector.report(), notes


def show_notes(notes: Sequence[str]) -> None:
    """Print on standard error what was skipped."""
    from rich.text import Text

    from ringfold.cli.output import error_console

    for note in notes:
        error_console.print(Text("note: ", style="yellow").append(note), soft_wrap=True)


def render(report: "LogReport") -> "Group":
    """The whole report for a terminal."""
    from rich.console import Group
    from rich.text import Text

    from ringfold.cli.output import table

    parts: list[RenderableType] = [Text(f"{len(report.edges)} edges, {report.windows} windows, {report.rounds} rounds")]
    edges = _worst_edges(report.edges)
    columns = ["edge", "windows", "min", "p50", "p99", "loss", "alpha (ppm)", "beta at t0", "+-"]
    unit, unit_ns = _delay_unit(edges)
    rows = (_edge_row(edge, unit_ns) for edge in edges)
    parts += [Text(), table(f"edges (one-way delay in {unit}; alpha and beta of the newest window)", columns, rows)]
    if len(edges) < len(report.edges):
        parts.append(Text(f"the {len(edges)} with most loss and delay of {len(report.edges)}; --json has all", "dim"))
    parts += [Text(remark, "yellow") for edge in edges for remark in _remarks(edge)]
    if report.nodes:
        columns = ["node", "name", "offset", "drift (ppm)", "+-", "certified within"]
        nodes = sorted(sorted(report.nodes, key=lambda node: -node.sigma_ns)[:MAX_ROWS], key=lambda node: node.node)
        parts += [Text(), table("nodes (offset: to the reference's clock)", columns, map(_node_row, nodes))]
        if len(nodes) < len(report.nodes):
            parts.append(Text(f"the {len(nodes)} least certain of {len(report.nodes)}; --json has all", "dim"))
    for node, why in sorted(report.missing.items()):
        parts.append(Text(f"missing in the last round: node {node}: {why}", "yellow"))
    if report.anomaly:
        parts.append(Text(f"anomaly in the last round: {report.anomaly}", "yellow"))
    return Group(*parts)


def _worst_edges(edges: "list[EdgeReport]") -> "list[EdgeReport]":
    """All in their order, or if they are too many: those with most loss, then with most delay."""
    if len(edges) <= MAX_ROWS:
        return edges
    worst = sorted(edges, key=lambda edge: (edge.loss, edge.delays.p50_ns if edge.delays else 0), reverse=True)
    return sorted(worst[:MAX_ROWS], key=lambda edge: (edge.src, edge.dst))


def _delay_unit(edges: "list[EdgeReport]") -> tuple[str, float]:
    """One unit for all delays, so that they can be compared at a glance."""
    return ("ms", 1e6) if any(edge.delays and edge.delays.p50_ns >= 10_000_000 for edge in edges) else ("us", 1e3)


def _edge_row(edge: "EdgeReport", unit_ns: float) -> "list[str | Text]":
    from rich.text import Text

    delays = edge.delays
    times = ["-"] * 3
    if delays:
        times = [_three_digits(ns / unit_ns) for ns in (delays.min_ns, delays.p50_ns, delays.p99_ns)]
    loss = Text(f"{edge.loss:.2%}", "yellow" if edge.loss > 0.01 else "")
    line = ["-"] * 3
    if edge.alpha is not None and edge.beta_ns is not None and edge.sigma_ns is not None:
        line = [f"{edge.alpha * 1e6:+z.3f}", time(edge.beta_ns, signed=True), time(edge.sigma_ns)]
    return [f"{edge.src} -> {edge.dst}", str(edge.windows), *times, loss, *line]


def _three_digits(value: float) -> str:
    return f"{value:.0f}" if value >= 1_000 else f"{value:.3g}"


def _remarks(edge: "EdgeReport") -> list[str]:
    remarks = []
    if edge.refused:
        remarks.append(f"{edge.src} -> {edge.dst}: {edge.refused} of {edge.windows} refused: {edge.why_refused}")
    if edge.dropped:
        remarks.append(f"{edge.src} -> {edge.dst}: dropped in the last round: {edge.dropped}")
    return remarks


def _node_row(node: "NodeReport") -> list[str]:
    offset = "reference" if node.is_reference else time(node.offset_ns, signed=True)
    bound = f"{time(node.low_ns, signed=True)} .. {time(node.high_ns, signed=True)}"
    return [str(node.node), node.name, offset, f"{node.drift_ppm:+z.3f}", time(node.sigma_ns), bound]


def time(nanoseconds: float, *, signed: bool = False) -> str:
    """A time with a unit that suits it, four digits: 12 ns, 3.412 us, 51.03 ms, 2.5 s, 3.1 h."""
    sign = "+" if signed and nanoseconds > 0 else ""
    size = abs(nanoseconds)
    for unit, length in (("d", 86_400e9), ("h", 3_600e9), ("s", 1e9), ("ms", 1e6), ("us", 1e3)):
        if size >= length:
            return f"{sign}{nanoseconds / length:.4g} {unit}"
    return f"{sign}{nanoseconds:.3g} ns"


if TYPE_CHECKING:
    from ringfold.probe.logs.lines import FitLine
    from ringfold.wire.probing import RoundSummary


def rounds_of(fits: "Iterable[FitLine]") -> "list[RoundSummary]":
    """Calculate clocks from nodes' logs where no master did: the result of each gathering, oldest first."""
    from ringfold.probe.logs.replay import combine, gather

    gatherings = gather(fits)
    if not gatherings:
        return []
    return combine(gatherings, importlib.import_module("ringfold.probe.graph.clocks").calculate)
