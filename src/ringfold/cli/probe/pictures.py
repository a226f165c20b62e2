"""The pictures of a report: offsets over time, delays of the edges, the graph.

Drawn with matplotlib's figures alone (no pyplot, hence no window and no global state). Up to `FEW` nodes or edges each
has its own colour or row; beyond that all are shown as a mass, and those that stand out are named. Colours are those of
Okabe and Ito, and cividis for scales: both keep their order for people who do not see all colours.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import cache
from math import cos, log10, pi, sin
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np

from ringfold.errors import ConfigError, UsageError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.colors import Colormap, LogNorm
    from matplotlib.figure import Figure

    from ringfold.probe.logs.report import Delays, EdgeReport, LogReport, TrackPoint

FEW_NODES = 8
FEW_EDGES = 40
ARROWS_UP_TO = 16
"""Nodes; with more, arrows hide what they point at."""
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#8C6D1F")
GREY = "#9A9A9A"

_Drawn = tuple["EdgeReport", "Delays"]


def need_matplotlib() -> None:
    """Complain before any work is done if the pictures cannot be drawn."""
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError:
        raise UsageError("pictures need matplotlib: pip install 'ringfold[report]'") from None


def draw(report: "LogReport", directory: Path, kind: Literal["png", "svg"] = "png") -> list[Path]:
    """Write the three pictures and return their paths. A picture of what the logs do not have says so."""
    need_matplotlib()
    from matplotlib.figure import Figure

    pictures: dict[str, Callable[[Figure, LogReport], None]] = {
        "offsets": draw_offsets,
        "delays": draw_delays,
        "graph": draw_graph,
    }
    paths = []
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for name, drawing in pictures.items():
            figure = Figure(figsize=(9, 6), layout="constrained")
            drawing(figure, report)
            paths.append(directory / f"{name}.{kind}")
            figure.savefig(paths[-1], dpi=150, format=kind)
    except OSError as error:
        raise ConfigError(f"pictures cannot be written into {directory}: {error.strerror or error}") from None
    return paths


# Offsets over time


def draw_offsets(figure: "Figure", report: "LogReport") -> None:
    """Above: how far each clock went since its first round. Below: what is left without its straight line."""
    tracks = {node: pieces for node, pieces in sorted(report.tracks.items()) if any(pieces)}
    if not tracks:
        return _nothing(figure, "no rounds in the logs: no offsets")
    above, below = figure.subplots(2, 1, sharex=True)
    start = min(piece[0].at_ns for pieces in tracks.values() for piece in pieces)
    end = max(piece[-1].at_ns for pieces in tracks.values() for piece in pieces)
    time_unit, time_ns = ("min", 60e9) if end - start > 600e9 else ("s", 1e9)
    wander = {node: [_wander(piece) for piece in pieces] for node, pieces in tracks.items()}
    gone = [abs(each.ahead_ns - piece[0].ahead_ns) for pieces in tracks.values() for piece in pieces for each in piece]
    far_unit, far_ns = _unit(max(gone))
    near_unit, near_ns = _unit(max(float(np.abs(line).max()) for lines in wander.values() for line in lines))
    named = _outstanding(tracks, wander)
    others = len(tracks) - len(named)
    for node in sorted(tracks, key=lambda node: node in named):
        colour = named.get(node, GREY)
        style = {"color": colour, "linewidth": 1.4 if node in named else 0.5, "alpha": 1.0 if node in named else 0.5}
        label: str | None = _name(report, node) if node in named else None
        for piece, line in zip(tracks[node], wander[node], strict=True):
            times = [(sample.at_ns - start) / time_ns for sample in piece]
            marker = "o" if len(piece) <= 30 and node in named else ""
            went = [(sample.ahead_ns - piece[0].ahead_ns) / far_ns for sample in piece]
            above.plot(times, went, marker=marker, markersize=3, label=label, **style)
            below.plot(times, line / near_ns, marker=marker, markersize=3, **style)
            label = None
    if others:
        above.plot([], [], color=GREY, linewidth=0.8, label=f"{others} others")
    above.set_title("Clock minus global time, since the first round", loc="left", fontsize=11)
    above.set_ylabel(f"change of offset ({far_unit})")
    below.set_title("The same without each clock's straight line", loc="left", fontsize=11)
    below.set_ylabel(f"wander ({near_unit})")
    below.set_xlabel(f"time since the first round ({time_unit})")
    for axes in (above, below):
        axes.axhline(0, color="black", linewidth=0.5, zorder=0)
        plain_axes(axes)
    figure.legend(loc="outside right upper", frameon=False, fontsize=9)


def _wander(piece: "Sequence[TrackPoint]") -> "np.ndarray[tuple[int], np.dtype[np.float64]]":
    """What a straight line does not explain, in ns; from integers, as the values are too large for floats."""
    times = np.array([sample.at_ns - piece[0].at_ns for sample in piece], np.float64) / 1e9
    ahead = np.array([sample.ahead_ns - piece[0].ahead_ns for sample in piece], np.float64)
    if len(piece) < 3:
        return np.zeros(len(piece))
    times -= times.mean()
    ahead -= ahead.mean()
    return np.asarray(ahead - times * (times @ ahead) / (times @ times))


def _outstanding(
    tracks: "dict[int, list[list[TrackPoint]]]", wander: "dict[int, list[np.ndarray[tuple[int], np.dtype[np.float64]]]]"
) -> dict[int, str]:
    """The nodes to name, with their colours: all, or those that went farthest either way and those that wander most."""
    if len(tracks) <= FEW_NODES:
        return dict(zip(tracks, COLOURS, strict=False))
    went = sorted(tracks, key=lambda node: tracks[node][-1][-1].ahead_ns - tracks[node][-1][0].ahead_ns)
    restless = sorted(tracks, key=lambda node: -max(float(np.abs(line).max()) for line in wander[node]))
    chosen = dict.fromkeys([*went[:2], *went[-2:], *restless[:4]])
    return dict(zip(sorted(chosen), COLOURS, strict=False))


# Delays


def draw_delays(figure: "Figure", report: "LogReport") -> None:
    """Few edges: a row for each. Many: all in the order of their medians, the slowest named."""
    drawn = sorted(_with_delays(report), key=lambda each: (each[1].p50_ns, each[0].src, each[0].dst))
    if not drawn:
        return _nothing(figure, "no fits in the logs: no delays")
    unit, unit_ns = _unit(float(np.median([delays.p50_ns for _, delays in drawn])))
    axes = figure.subplots()
    if len(drawn) <= FEW_EDGES:
        figure.set_figheight(max(3.0, 1.4 + 0.24 * len(drawn)))
        _delay_rows(axes, drawn, unit_ns)
        axes.set_xlabel(f"one-way delay ({unit})")
    else:
        _delay_bands(axes, drawn, unit, unit_ns)
        axes.set_ylabel(f"one-way delay ({unit})")
    axes.set_title("Delay of each edge (half of the round trip)", loc="left", fontsize=11)
    plain_axes(axes)
    figure.legend(loc="outside lower center", ncols=4, frameon=False, fontsize=9)


def _delay_rows(axes: "Axes", drawn: Sequence[_Drawn], unit_ns: float) -> None:
    rows = range(len(drawn))
    low = np.array([max(1, delays.min_ns) for _, delays in drawn]) / unit_ns
    high = np.array([max(1, delays.p99_ns) for _, delays in drawn]) / unit_ns
    axes.hlines(rows, low, high, color=COLOURS[5], linewidth=1.6, label="least to 99 %")
    boxes = [(row, delays.p25_ns, delays.p75_ns) for row, (_, delays) in enumerate(drawn)]
    whole = [(row, p25 / unit_ns, p75 / unit_ns) for row, p25, p75 in boxes if p25 is not None and p75 is not None]
    if whole:
        at, p25, p75 = zip(*whole, strict=True)
        axes.hlines(at, p25, p75, color=COLOURS[0], linewidth=6, label="middle half")
    medians = [max(1, delays.p50_ns) / unit_ns for _, delays in drawn]
    axes.plot(medians, rows, "|", color="black", markersize=9, markeredgewidth=1.8, label="median")
    axes.set_xscale("log")
    axes.set_yticks(rows, [f"{edge.src} → {edge.dst}" for edge, _ in drawn], fontsize=8)
    axes.set_ylim(-0.7, len(drawn) - 0.3)
    _number_ticks(axes.xaxis)


def _delay_bands(axes: "Axes", drawn: Sequence[_Drawn], unit: str, unit_ns: float) -> None:
    ranks = np.arange(len(drawn))

    def column(values: Sequence[int | None]) -> "np.ndarray[tuple[int], np.dtype[np.float64]]":
        return np.array([np.nan if value is None else max(1, value) for value in values]) / unit_ns

    least, high = column([d.min_ns for _, d in drawn]), column([d.p99_ns for _, d in drawn])
    axes.fill_between(ranks, least, high, color=COLOURS[5], alpha=0.4, linewidth=0, label="least to 99 %")
    if any(delays.p25_ns is not None for _, delays in drawn):
        low, top = column([d.p25_ns for _, d in drawn]), column([d.p75_ns for _, d in drawn])
        axes.fill_between(ranks, low, top, color=COLOURS[0], alpha=0.6, linewidth=0, label="middle half")
    axes.plot(ranks, column([d.p50_ns for _, d in drawn]), color="black", linewidth=1.4, label="median")
    slowest = [f"{edge.src} → {edge.dst}: {delays.p50_ns / unit_ns:.3g} {unit}" for edge, delays in drawn[:-6:-1]]
    text = "\n".join(["the slowest medians", *slowest])
    axes.text(0.03, 0.97, text, transform=axes.transAxes, va="top", fontsize=9, linespacing=1.4)
    axes.set_yscale("log")
    axes.set_xlim(-0.01 * len(drawn), 1.01 * len(drawn))
    axes.set_xlabel(f"the {len(drawn)} edges, by their median")
    _number_ticks(axes.yaxis)


# The graph


def draw_graph(figure: "Figure", report: "LogReport") -> None:
    """Nodes on a circle, edges coloured by their median delay; thick: in the tree; dotted: not used in the result."""
    from matplotlib.cm import ScalarMappable

    drawn = list(_with_delays(report))
    nodes = sorted({node for edge in report.edges for node in (edge.src, edge.dst)})
    if not nodes:
        return _nothing(figure, "no edges in the logs: no graph")
    figure.set_size_inches(9, 8)
    axes = figure.subplots()
    angles = {node: pi / 2 - 2 * pi * place / len(nodes) for place, node in enumerate(nodes)}
    places = {node: (cos(angle), sin(angle)) for node, angle in angles.items()}
    unit, unit_ns = _unit(float(np.median([delays.p50_ns for _, delays in drawn])) if drawn else 1e3)
    norm = _delay_scale([delays.p50_ns / unit_ns for _, delays in drawn])
    for edge in report.edges:
        _draw_edge(axes, edge, places, norm, unit_ns, crowded=len(nodes) > ARROWS_UP_TO)
    _draw_nodes(axes, report, angles)
    if drawn:
        bar = figure.colorbar(ScalarMappable(norm, _delay_colours()), ax=axes, shrink=0.7)
        bar.set_label(f"median one-way delay ({unit})")
        _number_ticks(bar.ax.yaxis)
    axes.set_title(f"{len(nodes)} nodes, {len(report.edges)} edges", loc="left", fontsize=11)
    axes.set_aspect("equal")
    axes.set_axis_off()
    axes.set_xlim(-1.25, 1.25)
    axes.set_ylim(-1.15, 1.15)
    _graph_legend(axes, report, crowded=len(nodes) > ARROWS_UP_TO)


def _draw_edge(
    axes: "Axes",
    edge: "EdgeReport",
    places: dict[int, tuple[float, float]],
    norm: "LogNorm",
    unit_ns: float,
    *,
    crowded: bool,
) -> None:
    from matplotlib.patches import FancyArrowPatch

    colour = GREY if edge.delays is None else _delay_colours()(norm(edge.delays.p50_ns / unit_ns))
    unused = bool(edge.dropped) or edge.alpha is None
    thin, thick = (0.5, 1.4) if crowded else (1.0, 2.4)
    begin, end = np.array(places[edge.src]), np.array(places[edge.dst])
    axes.add_patch(
        FancyArrowPatch(
            (begin[0], begin[1]),
            (end[0], end[1]),
            connectionstyle="arc3,rad=0.13",  # so that the two directions of a pair do not lie on each other
            arrowstyle="-" if crowded else "-|>",
            mutation_scale=11,
            shrinkA=3 if crowded else 13,
            shrinkB=3 if crowded else 13,
            color=colour,
            linewidth=thick if edge.in_tree else thin,
            linestyle=":" if unused else "-",
            zorder=2 if edge.in_tree else 1,
        )
    )
    if edge.loss > 0.01 and not crowded:
        # On the arc: it bows to the right of the way by half of rad.
        middle = (begin + end) / 2 + 0.065 * np.array([end[1] - begin[1], begin[0] - end[0]])
        label = {"facecolor": "white", "edgecolor": "none", "pad": 0.6, "alpha": 0.85}
        axes.text(middle[0], middle[1], f"{edge.loss:.0%}", fontsize=8, ha="center", va="center", bbox=label, zorder=4)


def _draw_nodes(axes: "Axes", report: "LogReport", angles: dict[int, float]) -> None:
    reference = {node.node for node in report.nodes if node.is_reference}
    crowded = len(angles) > ARROWS_UP_TO
    for node, angle in angles.items():
        x, y = cos(angle), sin(angle)
        fill = "black" if node in reference else "white"
        axes.plot(x, y, "o", color=fill, markeredgecolor="black", markersize=5 if crowded else 20, zorder=5)
        if crowded:
            turn = (angle * 180 / pi + 90) % 180 - 90
            size = 8 if len(angles) <= 64 else 6.5
            axes.text(1.05 * x, 1.05 * y, str(node), rotation=turn, ha="center", va="center", fontsize=size)
            continue
        ink = "white" if node in reference else "black"
        axes.text(x, y, str(node), color=ink, ha="center", va="center", fontsize=10, zorder=6)
        if name := report.names.get(node):
            side = "left" if x > 0.1 else "right" if x < -0.1 else "center"
            axes.text(1.1 * x, 1.1 * y, name, ha=side, va="center", fontsize=9)


def _graph_legend(axes: "Axes", report: "LogReport", *, crowded: bool) -> None:
    from matplotlib.lines import Line2D

    keys: list[Line2D] = []
    if any(node.is_reference for node in report.nodes):
        keys.append(Line2D([], [], marker="o", color="black", linestyle="", label="reference"))
    if any(edge.in_tree for edge in report.edges):
        keys.append(Line2D([], [], color="black", linewidth=2.4, label="in the tree"))
    if any(edge.dropped or edge.alpha is None for edge in report.edges):
        keys.append(Line2D([], [], color="black", linestyle=":", label="not used"))
    if not crowded and any(edge.loss > 0.01 for edge in report.edges):
        keys.append(Line2D([], [], linestyle="", label="per cent: exchanges lost"))
    if keys:
        axes.legend(handles=keys, loc="lower left", frameon=False, fontsize=9)


def _delay_scale(delays: Sequence[float]) -> "LogNorm":
    from matplotlib.colors import LogNorm

    low, high = (min(delays), max(delays)) if delays else (1.0, 1.0)
    low = max(low, 1e-3)
    return LogNorm(low / 1.1, max(high, low) * 1.1)


@cache
def _delay_colours() -> "Colormap":
    """Cividis without its bright end, which is hard to see on white."""
    from matplotlib import colormaps
    from matplotlib.colors import ListedColormap

    return ListedColormap(colormaps["cividis"](np.linspace(0, 0.88, 256)))


# All pictures


def _with_delays(report: "LogReport") -> Iterator[_Drawn]:
    for edge in report.edges:
        if edge.delays is not None:
            yield edge, edge.delays


def _unit(largest_ns: float) -> tuple[str, float]:
    """The unit in which such a time is a handy number."""
    return next(((unit, ns) for unit, ns in (("s", 1e9), ("ms", 1e6), ("µs", 1e3)) if largest_ns >= ns), ("ns", 1.0))


def _name(report: "LogReport", node: int) -> str:
    name = report.names.get(node, "")
    offset = next((each for each in report.nodes if each.node == node), None)
    drift = f", {offset.drift_ppm:+z.2f} ppm" if offset else ""
    return f"{node} {name}".strip() + drift


def plain_axes(axes: "Axes") -> None:
    """No frame, and a faint grid behind what is drawn."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(which="major", color="#DDDDDD", linewidth=0.6)
    axes.set_axisbelow(True)


def _number_ticks(axis: object) -> None:
    """A logarithmic axis with plain numbers, also where it spans less than a decade."""
    from matplotlib.axis import Axis
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    assert isinstance(axis, Axis)
    low, high = sorted(axis.get_view_interval())
    decades = log10(high / low) if low > 0 else 9.0
    steps = (1.0, 2.0, 5.0) if decades < 3 else (1.0,)
    axis.set_major_locator(LogLocator(subs=(1.0, 1.5, 2.0, 3.0, 5.0, 7.0) if decades < 1 else steps, numticks=30))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_formatter(NullFormatter())


def _nothing(figure: "Figure", why: str) -> None:
    figure.set_size_inches(6, 2)
    figure.text(0.5, 0.5, why, ha="center", va="center", color="#555555")
