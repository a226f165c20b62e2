"""`ringfold top`: a run on a terminal, live."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from ringfold.observe.top import Look


def top(
    address: Annotated[str | None, typer.Argument(help="The master's address.", show_default=False)] = None,
    every_ms: Annotated[int, typer.Option(help="How often it looks.", min=100)] = 500,
    run: Annotated[str | None, typer.Option(help="The run to show; without it `default`, or the only one.")] = None,
    token_file: Annotated[Path | None, typer.Option(help="File with the join token of the run.")] = None,
    config: Annotated[Path | None, typer.Option(help="Settings file (TOML).")] = None,
) -> None:
    """Show a run on this terminal, live: is it training, how fast, who is slow, what broke.

    Keys sort the peers (s: step, l: lag, r: sent per second, w: waits, x: problems first); Enter shows the peer under
    the cursor, i all incidents, m masters, rounds and clocks, q ends it. It needs `pip install 'ringfold[top]'`.
    """
    import sys

    from ringfold import config as settings
    from ringfold.errors import UsageError
    from ringfold.runtime import master_client

    if not sys.stdout.isatty():
        raise UsageError("`ringfold top` needs a terminal; for programs there is `ringfold status --json`")
    try:
        from ringfold.observe.top import Top
    except ImportError as error:
        if not (error.name or "").startswith("textual"):
            raise
        raise UsageError("`ringfold top` needs Textual: pip install 'ringfold[top]'") from None
    resolved = settings.load({"master": address, "run": run, "token_file": token_file, "config": config})
    masters, token, wanted = resolved.listed("master"), resolved.token(), resolved.named_run()

    def looks() -> "Iterator[Look]":
        return master_client.follow(masters, token, every_ms / 1_000, run=wanted)

    application = Top(looks, wanted)
    application.run()
    if application.failure is not None:
        raise application.failure
