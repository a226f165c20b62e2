"""`ringfold doctor`: check the machine, and a master when one is named."""

from pathlib import Path
from typing import Annotated

import typer


def doctor(
    master: Annotated[str | None, typer.Option(help="Also check the master at this address.")] = None,
    token_file: Annotated[Path | None, typer.Option(help="File with the join token of the run.")] = None,
    config: Annotated[Path | None, typer.Option(help="Settings file (TOML).")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Check whether this machine has what a run needs, and print advice.

    The exit code is 1 if a check failed. A warning means: it works, but slower or less precisely than it could.
    """
    from rich.text import Text

    from ringfold import config as settings
    from ringfold.cli.output import COLOURS, console, print_json, table
    from ringfold.runtime import doctor as checks_of_machine
    from ringfold.runtime.hardware import read_hardware

    resolved = settings.load({"master": master, "token_file": token_file, "config": config})
    # Only a master that was named is checked, not the default address.
    named = resolved.origin("master") != "default"
    checks = checks_of_machine.examine(
        resolved.listed("master") if named else (),
        resolved.token(),
        master_port=settings.split_address(resolved.listed("listen")[0])[1],
        data_port=resolved.integer("data_port"),
    )
    failed = any(check.outcome == "fail" for check in checks)
    if as_json:
        print_json({"ok": not failed, "checks": checks, "machine": read_hardware()})
    else:
        rows = [
            (Text(check.outcome, style=COLOURS[check.outcome]), check.name, check.found, check.advice)
            for check in checks
        ]
        console.print(table("doctor", ["", "check", "found", "what to do"], rows))
    if failed:
        raise typer.Exit(1)
