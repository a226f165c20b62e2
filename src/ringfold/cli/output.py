"""The output of commands: tables for people, one JSON object for programs, one line for an error.

Much of it is text of others: names of peers, labels, reasons of a master or an agent. So the consoles never parse text
as markup; what has a style is a `rich.text.Text`, or is printed with `style`.
"""

import sys
from collections.abc import Collection, Iterable, Mapping, Sequence

import msgspec
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ringfold.errors import (
    AgentUnreachable,
    ConfigError,
    MasterUnreachable,
    RemoteProtocolError,
    RingfoldError,
    UsageError,
)

console = Console(highlight=False, markup=False, emoji=False)
error_console = Console(stderr=True, highlight=False, markup=False, emoji=False)

COLOURS: Mapping[str, str] = {"ok": "green", "warn": "yellow", "fail": "bold red"}


def print_json(value: object) -> None:
    """Print one JSON object to standard output, with fields in their declared order; paths and structs are allowed."""
    encoded = msgspec.json.encode(value, enc_hook=str)
    sys.stdout.write(msgspec.json.format(encoded, indent=2).decode() + "\n")
    sys.stdout.flush()


def table(
    title: str, columns: Sequence[str], rows: Iterable[Sequence[str | Text]], *, whole: Collection[str] = ()
) -> Table:
    """A table. Title, headings and cells are plain text: the name of a peer is never parsed as markup.

    If it is too wide, cells are folded: those of the columns `whole` last.
    """
    result = Table(
        title=Text(title), title_justify="left", title_style="bold", header_style="dim", box=None, pad_edge=False
    )
    for column in columns:
        result.add_column(Text(column), overflow="fold", no_wrap=column in whole)
    for row in rows:
        result.add_row(*(cell if isinstance(cell, Text) else Text(cell) for cell in row))
    return result


def duration(milliseconds: float) -> str:
    """A readable duration: 350 ms, 4.2 s, 3 min 20 s, 2 h 5 min."""
    seconds = milliseconds / 1000
    if seconds < 1:
        return f"{milliseconds:.0f} ms"
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(int(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    return f"{minutes // 60} h {minutes % 60} min"


def print_error(error: RingfoldError) -> int:
    """Print an error and a hint to standard error; return the exit code (2: fix the call, 1: any other error)."""
    line = Text("error: ", style="bold red").append(str(error), style="red")
    error_console.print(line, soft_wrap=True)
    if hint := _hint(error):
        error_console.print(Text("hint: ", style="bold").append(hint), soft_wrap=True)
    return 2 if isinstance(error, UsageError) else 1


def _hint(error: RingfoldError) -> str:
    match error:
        case ConfigError():
            return "`ringfold config` shows every setting and where its value comes from"
        case MasterUnreachable():
            return "`ringfold master` starts one; `ringfold doctor` checks this machine and the link to its master"
        case AgentUnreachable():
            return "is it running? start it with `ringfold agent`; --dir sets its directory"
        case RemoteProtocolError():
            return "is that the port of a Ringfold master, of the same version?"
        case _:
            return ""
