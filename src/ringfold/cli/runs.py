"""`ringfold runs`: list the runs of a master, or forget one that has ended."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

if TYPE_CHECKING:
    from collections.abc import Callable

    from ringfold.runtime.master_client import MasterClient
    from ringfold.wire.status import RunInfo, RunList


class RunsGroup(TyperGroup):
    """A group whose first argument may be the address of the master, as in `ringfold status ADDRESS`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:  # noqa: ANN401 - a private type of typer
        is_address = bool(args) and not args[0].startswith("-") and args[0] not in self.commands
        return super().parse_args(ctx, ["--master", *args] if is_address else args)


app = typer.Typer(cls=RunsGroup, invoke_without_command=True, no_args_is_help=False)

Master = Annotated[list[str] | None, typer.Option(help="The master's address. May be given several times.")]
TokenFile = Annotated[Path | None, typer.Option(help="File with the join token of the master.")]
Config = Annotated[Path | None, typer.Option(help="Settings file (TOML).")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


@app.callback()
def runs(
    context: typer.Context,
    master: Master = None,
    as_json: AsJson = False,
    token_file: TokenFile = None,
    config: Config = None,
) -> None:
    """List the runs of a master: name, state, peers, revision, and since when.

    A run is `running` while it has peers, `finished` after its last member has left with its program done, `abandoned`
    if all were killed or stopped, and `broken` after an error in the master. Without an address (`ringfold runs
    ADDRESS`, or --master) it connects to the master of the settings (`master`, by default on this machine).
    """
    from ringfold.errors import UsageError

    if context.invoked_subcommand is not None:
        if master or as_json or token_file or config:
            raise UsageError(f"write the options after {context.invoked_subcommand!r}")
        return
    where, listed = _ask(master, token_file, config, lambda client: client.runs())
    _show(where, listed, as_json=as_json)


@app.command()
def forget(
    name: Annotated[str, typer.Argument(help="The run, by its name.")],
    address: Annotated[str | None, typer.Argument(help="The master's address.", show_default=False)] = None,
    master: Master = None,
    as_json: AsJson = False,
    token_file: TokenFile = None,
    config: Config = None,
) -> None:
    """Forget a run that has ended, with its state: a new run may use its name.

    A run that has peers is not forgotten. Checkpoints are not touched.
    """
    where, left = _ask([address] if address else master, token_file, config, lambda client: client.forget(name))
    if not as_json:
        typer.echo(f"run {name} is forgotten")
    _show(where, left, as_json=as_json)


def _ask(
    master: list[str] | None,
    token_file: Path | None,
    config: Path | None,
    request: "Callable[[MasterClient], RunList]",
) -> "tuple[str, RunList]":
    """The address that answered, and its runs."""
    from ringfold import config as settings
    from ringfold.runtime import master_client

    resolved = settings.load({"master": master or None, "token_file": token_file, "config": config})
    masters, token = resolved.listed("master"), resolved.token()
    return master_client.ask(masters, token, lambda client: (client.address, request(client)))


def _show(address: str, listed: "RunList", *, as_json: bool) -> None:
    from ringfold.cli.output import console, print_json, table

    if as_json:
        print_json(listed)
        return
    columns = ["run", "state", "peers", "revision", "since"]
    console.print(table(f"runs of {address}", columns, map(_row, listed.runs), whole=columns[:4]))
    for run in listed.runs:
        if run.why:
            console.print(run.why)


def _row(run: "RunInfo") -> list[str]:
    from datetime import UTC, datetime

    peers = f"{run.peers} (waiting for {run.away} more)" if run.away else str(run.peers)
    since = f"{datetime.fromtimestamp(run.since_s, UTC):%Y-%m-%d %H:%M:%S} UTC" if run.since_s else ""
    return [run.name, run.state, peers, str(run.revision), since]
