"""`ringfold evict`: evict a peer; the run goes on without it."""

from pathlib import Path
from typing import Annotated

import typer


def evict(
    peer: Annotated[str, typer.Argument(help="Its number, or its name, as `ringfold status` shows them.")],
    address: Annotated[str | None, typer.Argument(help="The master's address.", show_default=False)] = None,
    reason: Annotated[str, typer.Option(help="The reason in the error of the peer and in the log.")] = "",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    run: Annotated[str | None, typer.Option(help="Its run; without it `default`, or the only one.")] = None,
    token_file: Annotated[Path | None, typer.Option(help="File with the join token of the run.")] = None,
    config: Annotated[Path | None, typer.Option(help="Settings file (TOML).")] = None,
) -> None:
    """Evict a peer: the others go on without it, and lose nothing. It may join again.

    For a peer that is alive and makes no progress. Without an address it connects to the master of the settings
    (`master`, by default on this machine). Exit status 1 if no peer was evicted: there is no such peer, or it is the
    last one of its group.
    """
    from ringfold import config as settings
    from ringfold.cli.output import console, print_json
    from ringfold.errors import RingfoldError
    from ringfold.runtime import master_client, network, process

    resolved = settings.load({"master": address, "run": run, "token_file": token_file, "config": config})
    masters, token, wanted = resolved.listed("master"), resolved.token(), resolved.named_run()
    by = f"{process.user_name()} on {network.host_name()}"
    response = master_client.ask(masters, token, lambda client: client.evict(peer, reason, by), run=wanted)
    if as_json:
        print_json(response)
        raise typer.Exit(0 if response.done else 1)
    if not response.done:
        raise RingfoldError(response.text)
    console.print(response.text, markup=False, soft_wrap=True)
