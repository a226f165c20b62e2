"""`ringfold probe compare`: several runs side by side, as a table, a picture or JSON."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from rich.console import RenderableType

    from ringfold.probe.logs.compare import EdgeFigures, RunFigures

MAX_EDGES = 32
"""More edges do not fit on a screen: those whose latency differs most are shown, and `--json` has all."""


def command(
    runs: Annotated[
        list[Path],
        typer.Argument(metavar="RUN RUN...", help="Logs of runs (run.jsonl), or directories with one each; in order."),
    ],
    picture: Annotated[
        Path | None, typer.Option(help="Write a picture to this file, .png or .svg (needs the extra `report`).")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Compare consecutive runs: skew, latency, overhead and loss of each, and the edges that all of them have."""
    from rich.console import Group

    from ringfold.cli.output import console, error_console, print_json
    from ringfold.cli.probe.report import show_notes
    from ringfold.errors import UsageError
    from ringfold.probe.logs.compare import MIN_RUNS

    if len(runs) < MIN_RUNS:
        raise UsageError(f"a comparison needs {MIN_RUNS} runs or more, not {len(runs)}")
    if picture is not None and picture.suffix not in (".png", ".svg"):
        raise UsageError(f"a picture is a .png or .svg file, not {picture.name!r}")
    compared, notes = read(runs)
    show_notes(notes)
    if as_json:
        print_json({"runs": compared, "notes": notes})
    else:
        console.print(Group(*render(compared)))
    if picture is not None:
        draw(compared, picture)
        error_console.print(f"wrote {picture}", markup=False, soft_wrap=True)


def read(paths: Sequence[Path]) -> "tuple[list[RunFigures], list[str]]":
    """The figures of each run, and notes about what could not be read."""
    from ringfold.probe.logs.compare import figures
    from ringfold.probe.logs.files import LogReader, logs_in

    compared, notes = [], []
    for path in paths:
        # A directory may also have the logs of nodes, which are long and have no rounds.
        file = path / "run.jsonl" if (path / "run.jsonl").is_file() else path
        readers = [LogReader(each) for each in logs_in([file])]
        compared.append(figures(str(path), (line for reader in readers for line in reader)))
        notes += [note for reader in readers for note in reader.notes]
    return compared, notes


def render(runs: "Sequence[RunFigures]") -> "list[RenderableType]":
    """The comparison for a terminal: a column for each run."""
    from rich.text import Text

    from ringfold.cli.output import table
    from ringfold.probe.logs.compare import common_edges

    rows = [[label, *map(show, runs)] for label, show in FIGURES]
    parts: list[RenderableType] = [table("runs", ["", *(run.name for run in runs)], rows)]
    edges = common_edges(runs)
    if edges:
        shown = sorted(
            sorted(edges, key=_change, reverse=True)[:MAX_EDGES], key=lambda each: (each[0].src, each[0].dst)
        )
        columns = ["edge", *(f"{number}." for number in range(1, len(runs) + 1)), "change"]
        parts += [Text(), table("median latency of the edges that all runs have (us)", columns, map(_edge_row, shown))]
        if len(shown) < len(edges):
            parts.append(Text(f"the {len(shown)} that changed most of {len(edges)}; --json has all", "dim"))
    return parts


def _spread(name: str, part: str) -> "Callable[[RunFigures], str]":
    def show(run: "RunFigures") -> str:
        spread = getattr(run, name)
        return "-" if spread is None else f"{getattr(spread, part):.4g}"

    return show


def _percent(name: str) -> "Callable[[RunFigures], str]":
    def show(run: "RunFigures") -> str:
        share = getattr(run, name)
        return "-" if share is None else f"{share:.2%}"

    return show


FIGURES: "list[tuple[str, Callable[[RunFigures], str]]]" = [
    ("rounds", lambda run: str(run.rounds)),
    ("incomplete rounds", lambda run: str(run.incomplete)),
    ("nodes", lambda run: str(run.nodes)),
    ("skew p50 (ppm)", _spread("skew_ppm", "p50")),
    ("skew max (ppm)", _spread("skew_ppm", "max")),
    ("latency p50 (us)", _spread("latency_us", "p50")),
    ("latency p99 (us)", _spread("latency_us", "p99")),
    ("overhead p50 (ms)", _spread("overhead_ms", "p50")),
    ("overhead p99 (ms)", _spread("overhead_ms", "p99")),
    ("overhead (share)", _percent("overhead_share")),
    ("loss", _percent("loss")),
]


def _change(edge: "tuple[EdgeFigures, ...]") -> float:
    """How much the latency changed from the first run to the last, as a factor above 1."""
    first, last = max(edge[0].latency_us, 1e-3), max(edge[-1].latency_us, 1e-3)
    return max(first / last, last / first)


def _edge_row(edge: "tuple[EdgeFigures, ...]") -> list[str]:
    first, last = edge[0].latency_us, edge[-1].latency_us
    change = f"{last / first - 1:+.0%}" if first > 0 else "-"
    return [f"{edge[0].src} -> {edge[0].dst}", *(f"{each.latency_us:.4g}" for each in edge), change]


def draw(runs: "Sequence[RunFigures]", file: Path) -> None:
    """A picture with four parts: skew, latency, overhead and loss, a bar for each run."""
    from ringfold.cli.probe.pictures import need_matplotlib

    need_matplotlib()
    from matplotlib.figure import Figure

    from ringfold.errors import ConfigError

    figure = Figure(figsize=(9, 6), layout="constrained")
    parts = figure.subplots(2, 2).flat
    for axes, (name, unit) in zip(parts, (("skew", "ppm"), ("latency", "us"), ("overhead", "ms")), strict=False):
        spreads = [getattr(run, f"{name}_{unit}") for run in runs]
        p50 = [spread.p50 if spread else 0.0 for spread in spreads]
        p99 = [spread.p99 if spread else 0.0 for spread in spreads]
        _bars(axes, f"{name} ({unit}): median, and up to p99", runs, p50, p99)
    _bars(next(iter(figure.axes[3:])), "loss (%)", runs, [100 * (run.loss or 0.0) for run in runs])
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(file, dpi=150, format=file.suffix[1:])
    except OSError as error:
        raise ConfigError(f"the picture cannot be written to {file}: {error.strerror or error}") from None


def _bars(
    axes: "Axes", title: str, runs: "Sequence[RunFigures]", heights: Sequence[float], tops: Sequence[float] = ()
) -> None:
    from ringfold.cli.probe.pictures import COLOURS

    places = range(len(runs))
    axes.bar(places, heights, color=[COLOURS[place % len(COLOURS)] for place in places], width=0.6)
    if tops:
        axes.vlines(places, heights, tops, color="black", linewidth=1)
    axes.set_xticks(list(places), [Path(run.name).name for run in runs], rotation=20 if len(runs) > 4 else 0)
    axes.set_ylim(bottom=0)
    axes.set_title(title, loc="left", fontsize=11)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
