"""The picture of an all-reduce benchmark: time per op over buffer size, from one report or several.

`ringfold bench allreduce --plot FILE` draws its own run; `ringfold bench plot` draws reports that were saved. Each
number of peers has a panel. A library has a colour; TCP is a solid line and shared memory a dashed one, so that the
picture can also be read without colours. It has a background of its own, and so looks the same on a dark page.

A library that was measured several times at one size, because it took its turns beside each transport or because there
are several reports, is drawn at the median of its medians.
"""

from collections.abc import Iterator, Sequence
from math import floor, log2, log10
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from ringfold.errors import ConfigError
from ringfold.tools.bench.report import BenchReport, Row, microseconds, size_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

KINDS = ("svg", "png")
PANEL_INCHES = 3.5
LEFT_INCHES, RIGHT_INCHES, BETWEEN_INCHES = 0.85, 0.35, 0.4
TOP_INCHES, AXES_INCHES, BOTTOM_INCHES = 0.95, 3.3, 1.15
LEGEND_COLUMNS = 3
MAX_SIZE_TICKS = 5

NAMES = {"ringfold": "Ringfold", "gloo": "gloo", "mpi": "Open MPI", "mpi_shm": "Open MPI"}
TRANSPORT_NAMES = {"tcp": "TCP", "shm": "shared memory"}
PLACES = {"ringfold": 0, "gloo": 1, "mpi": 2, "mpi_shm": 2}
"""Which of the colours each library has."""
VERSIONS = {"gloo": ("PyTorch", "torch"), "mpi": ("Open MPI", "openmpi"), "mpi-shm": ("Open MPI", "openmpi")}
"""What each of the other libraries is a part of, and whose version a report has."""
SPARE_PLACE = 3
"""Of the colours, the first that no library has: for other numbers of threads."""


class Series(msgspec.Struct, frozen=True, order=True):
    """One line of the picture. `threads` is empty where all of Ringfold's rows have the same."""

    library: str
    transport: str
    threads: str = ""

    @property
    def label(self) -> str:
        threads = f", threads {self.threads}" if self.threads else ""
        return f"{NAMES[self.library]}, {TRANSPORT_NAMES[self.transport]}{threads}"


Points = dict[int, float]
"""Size in bytes -> median time of an op in microseconds."""


def command(
    reports: Annotated[list[Path], typer.Argument(help="Reports of `bench allreduce --json`, of one machine.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="The picture to write: FILE.svg or FILE.png.")],
) -> None:
    """Draw saved reports of `bench allreduce`: time per op over buffer size (needs the extra `report`)."""
    check_file(output)
    draw([load(path) for path in reports], output)
    typer.echo(f"wrote {output}")


def check_file(file: Path) -> None:
    """Complain before any work is done if this picture cannot be drawn."""
    from ringfold.cli.probe.pictures import need_matplotlib

    if file.suffix[1:] not in KINDS:
        raise typer.BadParameter(f"a picture is a file that ends with .svg or .png, not {file.name}")
    need_matplotlib()


def load(path: Path) -> BenchReport:
    """A report of `bench allreduce` that was saved with --json."""
    try:
        found = msgspec.json.decode(path.read_bytes(), type=BenchReport)
    except (OSError, msgspec.DecodeError) as error:
        raise ConfigError(f"cannot read the report {path}: {error}") from error
    if found.bench != "allreduce":
        raise ConfigError(f"{path} is a report of bench {found.bench}; only those of bench allreduce are drawn")
    return found


def draw(reports: Sequence[BenchReport], file: Path) -> None:
    """Write the picture of these reports; the end of the file's name says in which format."""
    machines = sorted({f"{report.machine.cpu}, {report.machine.cores} cores" for report in reports})
    if len(machines) > 1:
        raise ConfigError(f"reports of different machines cannot be in one picture: {'; '.join(machines)}")
    panels = panels_of([row for report in reports for row in report.figures])
    if not panels:
        raise ConfigError("the reports have no figures to draw")
    from matplotlib import rc_context

    # The same reports give the same bytes: a picture that is kept in a repository changes only with its figures.
    with rc_context({"svg.hashsalt": "ringfold"}):
        figure = _figure(panels, _about(reports, machines[0]))
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            kind = file.suffix[1:]
            figure.savefig(file, dpi=150, format=kind, metadata={"Date": None} if kind == "svg" else None)
        except OSError as error:
            raise ConfigError(f"the picture cannot be written to {file}: {error.strerror or error}") from None


def panels_of(rows: Sequence[Row]) -> dict[int, dict[Series, Points]]:
    """For each number of peers the lines, each with its points."""
    has_threads = len({row.get("threads") for row in rows}) > 1
    found: dict[int, dict[Series, dict[int, list[float]]]] = {}
    for row in rows:
        world, size = row["world"], row["size_bytes"]
        assert isinstance(world, int)
        assert isinstance(size, int)
        for series, value in _figures_of(row, has_threads=has_threads):
            found.setdefault(world, {}).setdefault(series, {}).setdefault(size, []).append(value)
    return {
        world: {
            series: {size: median(values) for size, values in sorted(points.items())}
            for series, points in sorted(lines.items(), key=lambda line: _order(line[0]))
        }
        for world, lines in sorted(found.items())
    }


def _figures_of(row: Row, *, has_threads: bool) -> Iterator[tuple[Series, float]]:
    """The medians of one row; reports of earlier versions name neither transports nor threads."""
    transport = str(row.get("transport", "tcp"))
    threads = str(row.get("threads", "auto")) if has_threads else ""
    for series in (
        Series("ringfold", transport, threads),
        Series("gloo", "tcp"),
        Series("mpi", "tcp"),
        Series("mpi_shm", "shm"),
    ):
        value = row.get(f"{series.library}_median_us")
        if isinstance(value, int | float):
            yield series, float(value)


def _order(series: Series) -> tuple[int, bool, str]:
    return PLACES[series.library], series.transport == "shm", series.threads


def _about(reports: Sequence[BenchReport], machine: str) -> str:
    """The machine, the versions and the days of the runs, on one line."""
    dates = sorted({report.date for report in reports if report.date})
    kernels = sorted({report.machine.kernel.split("-")[0] for report in reports})
    versions = sorted(
        {
            f"{name} {report.versions[package].partition('+')[0]}"
            for report in reports
            for library, (name, package) in VERSIONS.items()
            if library in report.peers and package in report.versions
        }
    )
    days = [" to ".join(dict.fromkeys((dates[0], dates[-1])))] if dates else []
    return "; ".join([f"{machine}, Linux {', '.join(kernels)}", *([", ".join(versions)] if versions else []), *days])


def _figure(panels: dict[int, dict[Series, Points]], about: str) -> "Figure":
    from matplotlib.figure import Figure

    width = LEFT_INCHES + RIGHT_INCHES + len(panels) * (PANEL_INCHES + BETWEEN_INCHES) - BETWEEN_INCHES
    height = TOP_INCHES + AXES_INCHES + BOTTOM_INCHES
    figure = Figure(figsize=(max(width, 6.5), height), facecolor="white")
    width = float(figure.get_figwidth())
    several = figure.subplots(
        1,
        len(panels),
        sharey=True,
        squeeze=False,
        gridspec_kw={
            "left": LEFT_INCHES / width,
            "right": 1 - RIGHT_INCHES / width,
            "top": 1 - TOP_INCHES / height,
            "bottom": BOTTOM_INCHES / height,
            "wspace": BETWEEN_INCHES / PANEL_INCHES,
        },
    )[0]
    everything = list(dict.fromkeys(series for lines in panels.values() for series in lines))
    threads = sorted({series.threads for series in everything})
    for axes, (world, lines) in zip(several, panels.items(), strict=True):
        for series, points in lines.items():
            axes.plot(list(points), list(points.values()), label=series.label, **_style(series, threads))
        _scales(axes, lines)
        axes.set_title(f"{world} peers", loc="left", fontsize=11)
    several[0].set_ylabel("median time per op")
    handles = {handle.get_label(): handle for axes in several for handle in axes.get_lines()}
    middle = (LEFT_INCHES + (width - RIGHT_INCHES)) / 2 / width
    figure.text(middle, (BOTTOM_INCHES - 0.5) / height, "buffer size", ha="center", fontsize=10)
    figure.legend(
        handles=[handles[series.label] for series in sorted(everything, key=_order)],
        loc="lower center",
        bbox_to_anchor=(middle, 0.02),
        ncols=min(LEGEND_COLUMNS, len(everything)),
        frameon=False,
        fontsize=9,
        handlelength=3,
    )
    left = 0.2 / width
    figure.text(left, 1 - 0.3 / height, "All-reduce in place on one host: lower is faster", fontsize=13, weight="bold")
    figure.text(left, 1 - 0.54 / height, about, fontsize=8.5, color="#555555")
    return figure


def _style(series: Series, threads: Sequence[str]) -> dict[str, object]:
    from ringfold.cli.probe.pictures import COLOURS

    mine, more = series.library == "ringfold", threads.index(series.threads) if series.threads else 0
    place = SPARE_PLACE + more - 2 if mine and more > 1 else PLACES[series.library]
    in_memory = series.transport == "shm"
    return {
        "color": COLOURS[place % len(COLOURS)],
        "linewidth": 2.4 if mine else 1.5,
        "linestyle": (0, (4, 1.6)) if in_memory else "-",
        "marker": "s" if in_memory else "o",
        "markersize": 5 if mine else 4,
        "zorder": 3 if mine else 2,
    }


def _scales(axes: "Axes", lines: dict[Series, Points]) -> None:
    """Both logarithmic, with ticks that are sizes (4 KiB, 1 MiB) and times (10 us, 1 ms)."""
    from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullFormatter, NullLocator

    from ringfold.cli.probe.pictures import plain_axes

    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    sizes = sorted({size for points in lines.values() for size in points})
    axes.xaxis.set_major_locator(FixedLocator(size_ticks(sizes[0], sizes[-1])))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: size_text(int(value))))
    times = [value for points in lines.values() for value in points.values()]
    steps = (1.0, 2.0, 5.0) if log10(max(times) / min(times)) < 1.5 else (1.0,)
    axes.yaxis.set_major_locator(LogLocator(subs=steps, numticks=30))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: microseconds(value)))
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.tick_params(labelsize=9)
    plain_axes(axes)


def size_ticks(smallest: int, largest: int) -> list[int]:
    """Powers of two from the smallest size on, so few that their labels do not touch."""
    first, octaves = floor(log2(smallest)), log2(largest / smallest)
    step = next(step for step in (1, 2, 4, 8, 16, 32) if octaves / step < MAX_SIZE_TICKS)
    return [1 << power for power in range(first, floor(log2(largest)) + 1, step)]
