"""`ringfold config`: every setting, its value, and where the value comes from."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from ringfold.config import Resolved


def config(
    file: Annotated[Path | None, typer.Option("--config", help="Settings file (TOML).")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Show every setting, its value, and where the value comes from.

    Arguments win over environment variables, those over the settings file, and that over the defaults. A token is
    never shown, only the name of its file.
    """
    from rich.text import Text

    from ringfold.cli.output import console, error_console, print_json, table
    from ringfold.config import SETTINGS, load

    resolved = load({"config": file})
    for warning in resolved.warnings:
        error_console.print(Text("warning: ", style="yellow").append(warning), soft_wrap=True)
    if as_json:
        settings = {name: {"value": resolved.value(name), "origin": resolved.origin(name)} for name in SETTINGS}
        print_json({"file": resolved.file, "settings": settings})
        return
    rows = ([name, _shown(resolved, name), resolved.origin(name)] for name in SETTINGS)
    console.print(table(f"settings (file: {resolved.file or 'none'})", ["setting", "value", "from"], rows))


def _shown(resolved: "Resolved", name: str) -> str:
    match resolved.value(name):
        case None | "" | ():
            return "-"
        case tuple() as listed:
            return ", ".join(listed)
        case bool() as switch:
            return "true" if switch else "false"
        case value:
            return str(value)
