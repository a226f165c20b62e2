"""What a benchmark reports: figures with the machine and the versions they belong to, as a table or as one JSON
object."""

import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime

import msgspec
import numpy as np
import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from ringfold.errors import ConfigError
from ringfold.runtime import hardware
from ringfold.runtime.clock import unix_ns
from ringfold.runtime.process import term_is_exit
from ringfold.tools.bench.sizes import size_bytes as size_bytes
from ringfold.tools.bench.sizes import size_text as size_text
from ringfold.tools.bench.targets import TargetCheck, Value, check
from ringfold.tools.cluster import ProcessFailed
from ringfold.units import S

Row = dict[str, Value]


class BenchReport(msgspec.Struct, kw_only=True):
    """One run of one benchmark. `figures` are flat rows, so that targets and scripts can pick from them by key."""

    bench: str
    settings: dict[str, object]
    figures: list[Row]
    samples_ms: dict[str, list[float]] = {}
    machine: hardware.Hardware
    date: str = ""
    """The day of the run, in UTC."""
    versions: dict[str, str]
    peers: list[str]
    skipped: dict[str, str]
    notes: list[str] = []
    checks: list[TargetCheck] | None = None


def report(
    bench: str,
    settings: dict[str, object],
    figures: list[Row],
    *,
    peers: Sequence[str] = ("ringfold",),
    skipped: dict[str, str] | None = None,
    notes: Sequence[str] = (),
) -> BenchReport:
    """A report about this machine and these versions."""
    facts = hardware.read_hardware()
    return BenchReport(
        bench=bench,
        settings=settings,
        figures=figures,
        machine=facts,
        date=datetime.fromtimestamp(unix_ns() / S, UTC).date().isoformat(),
        versions={"python": facts.python, **facts.versions, **_openmpi_version()},
        peers=list(peers),
        skipped=skipped or {},
        notes=list(notes),
    )


def finish(
    result: BenchReport, columns: "Sequence[Column] | Sequence[Sheet]", *, as_json: bool, against_targets: bool
) -> None:
    """Print the report (and the check, if wanted); raise `typer.Exit(1)` on a miss.

    With columns, the text is one table of all figures; with sheets, a table for each of them.
    """
    unchecked: ConfigError | None = None
    if against_targets:
        try:
            result.checks = check(result.bench, result.figures, result.skipped, result.machine.cores)
        except ConfigError as error:
            unchecked = error  # what was measured is shown all the same
    if as_json:
        sys.stdout.write(msgspec.json.encode(result).decode() + "\n")
    else:
        render(result, sheets_of(result, columns), Console())
    if unchecked is not None:
        raise unchecked
    if result.checks is not None:
        judged = [found for found in result.checks if found.is_judged]
        if not judged or any(found.verdict == "miss" for found in judged):
            raise typer.Exit(1)


class Column(msgspec.Struct, frozen=True):
    """A column of the text table: a heading and how to write a row's value."""

    heading: str
    key: str
    write: Callable[[Value], str] = str


class Sheet(msgspec.Struct, frozen=True):
    """One of several text tables. Its rows may be the figures in another arrangement."""

    title: str
    rows: Sequence[Row]
    columns: Sequence[Column]


def sheets_of(result: BenchReport, columns: Sequence[Column] | Sequence[Sheet]) -> list[Sheet]:
    sheets = [each for each in columns if isinstance(each, Sheet)]
    plain = [each for each in columns if isinstance(each, Column)]
    return sheets or [Sheet(f"ringfold bench {result.bench}", result.figures, plain)]


def render(result: BenchReport, sheets: Sequence[Sheet], console: Console) -> None:
    for sheet in sheets:
        table = _table(sheet.title)
        shown = [column for column in sheet.columns if any(column.key in row for row in sheet.rows)]
        for column in shown:
            table.add_column(column.heading, justify="right", overflow="fold")  # nothing is cut, however narrow it is
        for row in sheet.rows:
            table.add_row(*(_cell(column, row) for column in shown))
        console.print(table)
    for name, reason in sorted(result.skipped.items()):
        console.print(f"[yellow]{name} skipped:[/] {escape(reason)}", highlight=False)
    for note in result.notes:
        console.print(note, markup=False, highlight=False)
    console.print(
        f"{result.machine.cpu}, {result.machine.cores} cores, Linux {result.machine.kernel}; "
        + ", ".join(f"{name} {version}" for name, version in result.versions.items()),
        style="dim",
        markup=False,
        highlight=False,
    )
    if result.checks is not None:
        _render_checks(result.checks, console)


def _table(title: str) -> Table:
    return Table(title=title, title_justify="left", title_style="bold", header_style="dim", box=None, pad_edge=False)


def _cell(column: Column, row: Row) -> str:
    value = row.get(column.key)
    return "-" if value is None else escape(column.write(value))


def _render_checks(checks: Sequence[TargetCheck], console: Console) -> None:
    colours = {"hit": "green", "miss": "red", "not asked": "dim"}
    table = _table("targets")
    for heading in ("", "target", "condition", "measured"):
        table.add_column(heading)
    elsewhere: dict[str, list[str]] = {}
    for found in checks:
        if found.verdict == "other machine":
            elsewhere.setdefault(found.cores, []).append(found.id.partition(":")[0])
            continue
        colour = colours[found.verdict]
        table.add_row(f"[{colour}]{found.verdict}[/]", *map(escape, (found.text, found.condition, found.measured)))
    console.print(table)
    for cores, ids in sorted(elsewhere.items()):
        text = f"not judged, for machines with {cores}: {', '.join(dict.fromkeys(ids))}"
        console.print(text, style="dim", markup=False, highlight=False)
    if not any(found.is_judged for found in checks):
        console.print("[red]no target applies to what was measured here[/]")


@contextmanager
def guarded(*, as_json: bool) -> Iterator[Progress]:
    """A progress bar on stderr (none with JSON), and a readable end for children that fail and for Ctrl-C."""
    console = Console(stderr=True)
    progress = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
        transient=True,
        disable=as_json,
    )
    try:
        with term_is_exit(), progress:
            yield progress
    except KeyboardInterrupt:
        console.print("interrupted; all child processes are ended")
        raise typer.Exit(130) from None
    except ProcessFailed as error:
        console.print(f"[red]failed:[/] {escape(f'{error.name}: {error.text}')}", highlight=False)
        if error.log:
            console.print(error.log, style="dim", markup=False, highlight=False)
        raise typer.Exit(1) from None


def spread(values_ns: Sequence[int] | np.ndarray, prefix: str = "") -> Row:
    """Median, p10, p90, p99 and worst in microseconds, and how many values they come from."""
    values = np.asarray(values_ns, dtype=np.float64) / 1_000
    names = {"median_us": 50, "p10_us": 10, "p90_us": 90, "p99_us": 99, "worst_us": 100}
    figures: Row = {prefix + name: float(np.percentile(values, percent)) for name, percent in names.items()}
    figures[prefix + "count"] = len(values)
    return figures


def _openmpi_version() -> dict[str, str]:
    if shutil.which("mpirun") is None:
        return {}
    printed = subprocess.run(["mpirun", "--version"], capture_output=True, text=True, check=False).stdout
    version = re.search(r"Open MPI\) (\S+)", printed)
    return {"openmpi": version[1]} if version else {}


def microseconds(value: Value) -> str:
    """A duration with three digits that matter, in the unit that reads best."""
    assert isinstance(value, int | float)
    if abs(value) >= 1_000_000:
        return f"{value / 1_000_000:.2f} s"
    return f"{value / 1_000:.4g} ms" if abs(value) >= 1_000 else f"{value:.3g} us"


def times(value: Value) -> str:
    assert isinstance(value, int | float)
    return f"{value:.2f}x"


def seconds(value: Value) -> str:
    assert isinstance(value, int | float)
    return f"{value:.3g} s"
