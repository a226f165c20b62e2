"""The command line: one file per command. A command parses its arguments, calls a package, and prints the result.

`output.py` has tables, JSON and error messages, and `logs.py` sets up logging. Commands of a run: `master.py`,
`status.py`, `top.py`, `events.py`, `otel.py`, `dashboard.py`, `replay.py`, `runs.py`, `evict.py`, `probe/`. Of a run
directory: `report.py`, `trace.py`. Of this machine: `agent.py`, `doctor.py`, `config.py`, `lab.py`. `viewer_token.py`
prints a token, `serving.py` serves metrics.
`checkpoint.py` exports and imports checkpoints. `iterate.py` runs a command per global iteration. `reference.py` writes
the reference pages. The programs `demo`, `soak` and `bench` are in `ringfold.tools`.

Only the files of commands that occur in the arguments are imported, and a command imports its packages when it runs:
`ringfold --help` loads neither NumPy nor the native core.
"""

import importlib
import importlib.util
import sys
from collections.abc import Collection
from typing import Annotated, NamedTuple

import typer

from ringfold.errors import RingfoldError


class Command(NamedTuple):
    """A command: its summary in `--help`, and its attribute in its module (a function, or an `app` of sub-commands)."""

    name: str
    summary: str
    attribute: str
    package: str = __name__

    @property
    def module(self) -> str:
        return f"{self.package}.{self.name.replace('-', '_')}"


TOOLS = "ringfold.tools"

COMMANDS = (
    Command("master", "Run the master: the process that peers join and that manages their epochs.", "master"),
    Command("status", "Show a run: members, epochs, rings, and which peers wait for which others.", "status"),
    Command("events", "Show what happened in a run: from a master, or from a run directory.", "events"),
    Command("dashboard", "Serve a web page that shows runs live.", "dashboard"),
    Command("replay", "Show finished runs on the same page, with a time slider.", "replay"),
    Command("top", "Show a run on the terminal, live, with keys to sort and to look at one peer.", "top"),
    Command("otel", "Send steps, syncs, epoch changes and failovers to an OpenTelemetry collector.", "otel"),
    Command("evict", "Evict a peer: the others go on without it, and it may join again.", "evict"),
    Command("iterate", "Run a command per iteration that all ranks agree on through a store, or show it.", "iterate"),
    Command("report", "Write one HTML page about a run: what happened, what it cost, who was slow.", "report"),
    Command("demo", "Train a small model on several peers while some are killed, frozen and added.", "demo", TOOLS),
    Command("trace", "Write the trace of a run for Perfetto, or find out who made it slow.", "trace"),
    Command("doctor", "Check whether this machine has what a run needs, and print advice.", "doctor"),
    Command("soak", "Kill, freeze and add peers for long, and check that nothing is lost or leaks.", "soak", TOOLS),
    Command("lab", "Build hosts with several slow or lossy paths on this machine, and run commands in them.", "lab"),
    Command("viewer-token", "Print the token with which metrics and the dashboard can be read.", "viewer_token"),
    Command("config", "Show every setting, its value, and where the value comes from.", "config"),
    # Groups of sub-commands are last, because typer puts them there.
    Command("runs", "List the runs of a master, or forget one that has ended.", "app"),
    Command("checkpoint", "Turn checkpoints into files that PyTorch and other programs read, and back.", "app"),
    Command("probe", "Measure links and clocks, and show the measurements.", "app"),
    Command("agent", "Run the transport agent of this host, show its state, and set shares.", "app"),
    Command("bench", "Measure Ringfold on this machine, beside other libraries and against its targets.", "app", TOOLS),
)


def build(load: Collection[str] | None = None) -> typer.Typer:
    """The command line with the named commands loaded (None: all); the others only have their summary."""
    app = typer.Typer(
        name="ringfold",
        help="Keeps a distributed training run going over plain IP while machines come and go.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
    )
    app.callback()(_root)
    for command in COMMANDS:
        spec = importlib.util.find_spec(command.module)
        if spec is None or spec.origin is None:
            continue
        if load is not None and command.name not in load:
            app.command(command.name, help=command.summary)(_not_loaded)
            continue
        entry = getattr(importlib.import_module(command.module), command.attribute)
        if isinstance(entry, typer.Typer):
            app.add_typer(entry, name=command.name, short_help=command.summary)
        else:
            app.command(command.name, short_help=command.summary)(entry)
    return app


def _version(is_requested: bool) -> None:
    """Called when the option is parsed, because no command needs to follow it."""
    if is_requested:
        from importlib import metadata

        typer.echo(f"ringfold {metadata.version('ringfold')}")
        raise typer.Exit


def _root(
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
    version: Annotated[
        bool, typer.Option("--version", help="Show the version and exit.", is_eager=True, callback=_version)
    ] = False,
) -> None:
    return  # `main` and `_version` read these options


def _not_loaded() -> None:
    raise AssertionError("a command ran that does not occur in the arguments")


def main() -> None:
    """The `ringfold` command. Exit codes: 0 done, 1 it failed, 2 the call or a setting must be fixed."""
    arguments = sys.argv[1:]
    try:
        build(arguments)()
    except RingfoldError as error:
        if "--debug" in arguments:
            raise
        from ringfold.cli.output import print_error

        sys.exit(print_error(error))
