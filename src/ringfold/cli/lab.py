"""`ringfold lab`: hosts on one machine with several slow or lossy paths, and a script that changes the paths."""

from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ringfold.tools.lab import Lab
    from ringfold.tools.lab.file import LabFile
    from ringfold.tools.lab.runner import LabEvent, Show

COLOURS = ("cyan", "green", "magenta", "yellow", "blue", "bright_cyan", "bright_green", "bright_magenta")


def lab(
    file: Annotated[Path, typer.Argument(help="The lab, as TOML: hosts, paths, commands, changes.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print events as JSON lines.")] = False,
    check: Annotated[bool, typer.Option("--check", help="Only read the file and show it; needs no root.")] = False,
) -> None:
    """Build hosts with several paths on this machine, run commands in them, and change the paths over time.

    It needs root, and `ip`, `tc` and `bridge` (iproute2). Ctrl-C ends it and removes everything. Exit code: 0 if every
    command in the foreground succeeded, 1 if one failed, 2 for a mistake in the file, 130 after Ctrl-C.
    """
    import sys

    from ringfold.cli.output import error_console
    from ringfold.errors import RingfoldError, UsageError
    from ringfold.tools.lab import Lab, ShapingFailed, missing
    from ringfold.tools.lab.file import read
    from ringfold.tools.lab.runner import run_script

    found = read(file, sys.executable)
    if check:
        return _show(found)
    if why := missing(delay=found.is_relayed):
        raise UsageError(f"a lab cannot be built here: {why}")
    try:
        with Lab(found.plan.hosts, found.plan.paths, cables=found.cables, seed=found.seed) as made:
            if made.removed:
                error_console.print(
                    f"removed what an earlier lab left: {', '.join(made.removed)}", style="dim", soft_wrap=True
                )
            show = _as_json() if as_json else _as_text(found)
            with _telemetry(made, found):
                status = run_script(made, found.script, show, queues_ns=found.queues_ns)
    except ShapingFailed as error:
        raise RingfoldError(str(error)) from error
    except KeyboardInterrupt:
        error_console.print("interrupted; the lab is removed")
        status = 130
    if status:
        raise typer.Exit(status)


@contextmanager
def _telemetry(made: "Lab", found: "LabFile") -> "Iterator[None]":
    """Let the switch send telemetry to the agents of the hosts, if the file says so."""
    from ringfold.tools.lab import Telemetry, TelemetrySender

    if (wanted := found.telemetry) is None:
        yield
        return
    key = None if wanted.key is None else wanted.key.encode()
    via = made.paths[0] if wanted.via is None else wanted.via
    with (
        TelemetrySender(made, wanted.port, via=via, key=key, key_id=wanted.key_id) as send,
        Telemetry(made, send, every_ms=wanted.every_ms),
    ):
        yield


def _as_json() -> "Show":
    import sys

    import msgspec

    def show(event: "LabEvent") -> None:
        sys.stdout.write(msgspec.json.encode(event).decode() + "\n")
        sys.stdout.flush()

    return show


def _as_text(found: "LabFile") -> "Show":
    """Lines with the command's name in front, and what the lab does itself in between."""
    from rich.text import Text

    from ringfold.cli.output import console

    names = [command.name for command in found.script.commands]
    width = max(map(len, names), default=0)

    def show(event: "LabEvent") -> None:
        at = Text(f"{event.at_ms / 1000:8.2f} ", style="dim")
        if event.event == "line":
            colour = COLOURS[names.index(event.command) % len(COLOURS)]
            line = at.append(f"{event.command:<{width}} | ", style=colour).append(event.text)
        else:
            line = at.append(f"{'lab':<{width}} | {_describe(event)}", style="bold")
        console.print(line, soft_wrap=True)

    return show


def _describe(event: "LabEvent") -> str:
    match event.event:
        case "started":
            return f"{event.command} started on {event.host}: {event.text}"
        case "ended":
            return f"{event.command} ended with status {event.status}"
        case "signalled":
            return f"{event.text} to {event.command}"
        case "queue":
            place = f"{event.path} at {event.host}" if event.end == "up" else f"{event.path} towards {event.host}"
            return f"queue of {place}: {event.backlog_bytes:,} of {event.limit_bytes:,} B, {event.drops} dropped"
        case "over":
            return f"over, status {event.status}: {event.text}"
        case _:
            return f"{event.event}: {event.text}"


def _show(found: "LabFile") -> None:
    """Print the content of the file as tables."""
    from ringfold.cli.output import console, table
    from ringfold.tools.lab import SWITCH

    plan = found.plan
    rows = [[host, *(plan.address(host, path) for path in plan.names)] for host in (*plan.hosts, SWITCH)]
    console.print(table("addresses", ["host", *plan.names], rows))
    cables = [[host, path, *_cable(found, host, path)] for path in plan.names for host in plan.hosts]
    console.print(table("cables", ["host", "path", "up", "down", "queue", "round trip", "loss"], cables))
    commands = [
        [f"{each.at_ns / 1e9:g} s", each.name, each.host, " ".join(each.arguments)] for each in found.script.commands
    ]
    console.print(table("commands", ["at", "name", "host", "command"], commands))
    changes = [[f"{each.at_ns / 1e9:g} s", str(each.action)] for each in found.script.events]
    console.print(table("changes", ["at", "what"], changes))


def _cable(found: "LabFile", host: str, path: str) -> list[str]:
    cable = found.cables.get((host, path), found.plan.paths[found.plan.path(path)]).cable()
    rates = ["" if mbit is None else f"{mbit:g} Mbit/s" for mbit in (cable.up_mbit, cable.down_mbit)]
    slowest = min((mbit for mbit in (cable.up_mbit, cable.down_mbit) if mbit is not None), default=None)
    queue = "" if slowest is None else f"{cable.limit_bytes(slowest):,} B"
    return [*rates, queue, f"{cable.rtt_ms:g} ms", f"{cable.loss:.3%}"]
