"""`ringfold trace`: a run directory as a trace for Perfetto."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

if TYPE_CHECKING:
    from collections.abc import Callable

    from ringfold.observe.align import Alignment
    from ringfold.observe.processes import Process
    from ringfold.observe.trace import Trace, Window

Number = TypeVar("Number", int, float)

MAX_OPS, MIN_OPS = 600_000, 20_000
"""Of all records, and of each: so many ops are in memory, about a gigabyte."""
MARGIN_STEPS = 3
"""More steps than are wanted: the diagnosis looks at the one before, and leaves out the first of a run."""


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
    from ringfold.observe import torch_traces
    from ringfold.observe import trace as traces
    from ringfold.observe.align import align
    from ringfold.observe.processes import gather
    from ringfold.observe.records import read_directory

    if (check or why) and (output or torch):
        raise UsageError("--check and --why print what they find; leave out --output and --torch")
    if check and why:
        raise UsageError("choose one of --check and --why")
    if why and seconds:
        raise UsageError("--why is about steps: choose some with --steps")
    if check and (steps or seconds):
        raise UsageError("--check is about the whole run; leave out --steps and --seconds")
    window = traces.Window(steps=_range("--steps", steps, int), seconds=_range("--seconds", seconds, float))
    records = read_directory(directory)
    wanted = None if window.steps is None else (window.steps[0] - MARGIN_STEPS, window.steps[1] + MARGIN_STEPS)
    each = max(MIN_OPS, MAX_OPS // len(records))
    processes = [gather(one.name, one.begun, one.events(), max_ops=each, steps=wanted) for one in records]
    _note_unread(processes, window)
    if why:
        _why(processes, window.steps, as_json=as_json)
        return
    alignment = align(processes)
    if check:
        _check(processes, alignment, as_json=as_json)
        return
    built = traces.build(processes, alignment, window, torch_traces.merged(torch or [], processes, alignment))
    path = output or directory / "trace.json.gz"
    about = {"run": processes[0].begun.run, "left_out": built.left_out, "origin_unix_ns": alignment.origin}
    _written(path, built, traces.write(built, path, about), alignment, processes, as_json=as_json)


def _note_unread(processes: "list[Process]", window: "Window") -> None:
    """Say on standard error that a long record was not read whole. Ops outside of chosen steps are no loss."""
    from ringfold.cli.output import error_console

    unread = sum(process.ops_unread for process in processes)
    if unread and window.steps is None:
        error_console.print(f"{unread} earlier ops are left out, to save memory: choose others with --steps")


def _range(option: str, text: str | None, kind: "Callable[[str], Number]") -> "tuple[Number, Number] | None":
    from ringfold.errors import UsageError

    if text is None:
        return None
    first, colon, last = text.partition(":")
    try:
        found = kind(first), kind(last if colon else first)
    except ValueError as error:
        raise UsageError(f"{option} is FIRST:LAST, not {text!r}") from error
    if found[0] > found[1]:
        raise UsageError(f"{option} {text} is empty: the first is above the last")
    return found


def _written(
    path: Path, built: "Trace", size: int, alignment: "Alignment", processes: "list[Process]", *, as_json: bool
) -> None:
    from ringfold.cli.output import console, print_json

    aligned = [
        {"process": process.title, "by": alignment.by(index), "uncertainty_ns": uncertainty(index, process, alignment)}
        for index, process in enumerate(processes)
    ]
    if as_json:
        found = {"file": path, "events": len(built.events), "bytes": size, "left_out": built.left_out}
        print_json({**found, "aligned": aligned})
        return
    console.print(f"{path}: {len(built.events)} events of {len(processes)} processes, {size / 1e6:.1f} MB uncompressed")
    for line in built.left_out:
        console.print(f"left out: {line}")
    for each in aligned:
        error = each["uncertainty_ns"]
        known = f"+-{error / 1_000:.1f} us" if isinstance(error, int) else "uncertain by nobody knows how much"
        console.print(f"{each['process']}: aligned by {each['by']}, {known}")
    console.print("open it at https://ui.perfetto.dev: it is read in the browser, and not sent anywhere")


def uncertainty(index: int, process: "Process", alignment: "Alignment") -> int | None:
    """The largest uncertainty of its ops, or of its other events; None if one is unknown."""
    times = [op.at for op in process.ops] or [event.stamp.at for event in process.others] or [0]
    errors = [alignment.error_ns(index, at) for at in times[:: max(1, len(times) // 1_000)]]
    return None if None in errors else max(error for error in errors if error is not None)


def _check(processes: "list[Process]", alignment: "Alignment", *, as_json: bool) -> None:
    from ringfold.cli.output import console, print_json, table
    from ringfold.observe.align import compare
    from ringfold.observe.orders import RULES

    before, after = compare(processes, alignment)
    rows = list(zip(before, after, strict=True))
    impossible = sum(count.impossible for count in after)
    if as_json:
        found = {
            old.rule: {
                "checked": old.checked,
                "impossible_before": old.impossible,
                "worst_before_ns": old.worst_ns,
                "impossible_after": new.impossible,
                "worst_after_ns": new.worst_ns,
            }
            for old, new in rows
        }
        print_json({"impossible": impossible, "contradiction_ns": alignment.broken_ns, "orders": found})
    else:
        columns = ["impossible order", "checked", "before", "worst", "after", "worst "]
        cells = [
            [
                RULES[old.rule],
                str(old.checked),
                str(old.impossible),
                f"{old.worst_ns / 1e6:.3f} ms" if old.impossible else "",
                str(new.impossible),
                f"{new.worst_ns / 1e6:.3f} ms" if new.impossible else "",
            ]
            for old, new in rows
        ]
        console.print(table("before and after alignment", columns, cells, whole=columns[1:]))
    if impossible:
        raise typer.Exit(1)


def _why(processes: "list[Process]", steps: tuple[int, int] | None, *, as_json: bool) -> None:
    from rich.text import Text

    from ringfold.cli.output import console, print_json, table
    from ringfold.observe.why import diagnose

    found = diagnose(processes, steps)
    if as_json:
        print_json(found)
        return
    console.print(Text(found.verdict, style="bold"))
    for finding in found.findings:
        for line in finding.evidence:
            console.print(f"  {finding.name}: {line}")
    if found.slowest:
        columns = ["step", "took", "lost", "straggler", "evidence"]
        rows = [
            [str(slow.step), f"{slow.took_ms:.1f} ms", f"{slow.lost_ms:.1f} ms", slow.culprit, slow.evidence]
            for slow in found.slowest
        ]
        title = f"the slowest of {found.slow_steps} slow steps of {found.steps} (usually {found.usual_step_ms:.1f} ms)"
        console.print(table(title, columns, rows, whole=columns[:3]))
