"""`ringfold trace`: a run directory as a trace for Perfetto."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from ringfold.observe.align import Alignment
    from ringfold.observe.processes import Process


def trace(
    directory: Annotated[Path, typer.Argument(help="The run directory (events_dir of master and peers).")],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="The file to write; without it DIRECTORY/trace.json.gz.")
    ] = None,
    torch: Annotated[
        list[Path] | None, typer.Option(help="A trace of the PyTorch profiler of a rank. May be given several times.")
    ] = None,
    steps: Annotated[str | None, typer.Option(help="Only these steps, as FIRST:LAST.")] = None,
    seconds: Annotated[str | None, typer.Option(help="Only these seconds since the beginning, as FROM:TO.")] = None,
    check: Annotated[bool, typer.Option("--check", help="Count impossible orders before and after alignment.")] = False,
    why: Annotated[bool, typer.Option("--why", help="Name the straggler of slow steps, and why it was slow.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Write the trace of a run for Perfetto (https://ui.perfetto.dev), or find out who made it slow.

    All processes are on one timeline, aligned by the run's global clock where it had one, and by what the events say
    about each other. Traces of the PyTorch profiler are merged into it.
    """
    from ringfold.errors import UsageError
    from ringfold.observe.align import align

    if (check or why) and (output or torch):
        raise UsageError("--check and --why print what they find; leave out --output and --torch")
    processes = _read(directory)
    _write(directory, processes, align(processes), output, torch, steps, seconds, as_json=as_json)


def _read(directory: Path) -> "list[Process]":
    from ringfold.observe.processes import gather
    from ringfold.observe.records import read_directory

    return [gather(record.name, record.begun, record.events()) for record in read_directory(directory)]


def _write(
    directory: Path,
    processes: "list[Process]",
    alignment: "Alignment",
    output: Path | None,
    torch: list[Path] | None,
    steps: str | None,
    seconds: str | None,
    *,
    as_json: bool,
) -> None:
    from ringfold.observe import trace as traces

    window = traces.Window()
    built = traces.build(processes, alignment, window)
    path = output or directory / "trace.json.gz"
    size = traces.write(built, path, {"run": processes[0].begun.run})
    print(path, size, built.left_out)
