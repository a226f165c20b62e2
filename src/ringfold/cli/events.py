"""`ringfold events`: what a run did, from a master or from a run directory."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

if TYPE_CHECKING:
    from rich.text import Text

    from ringfold.config import Resolved
    from ringfold.errors import MasterUnreachable
    from ringfold.observe.stream import Filter, Seen

_STYLES = {"debug": "dim", "info": "", "warning": "yellow", "error": "bold red"}


def events(
    source: Annotated[
        str | None,
        typer.Argument(help="A run directory, a flight record, or the master's address.", show_default=False),
    ] = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until Ctrl-C.")] = False,
    peer: Annotated[
        list[str] | None,
        typer.Option(help="Only events of and about this peer: its number or name, or `master`. Repeatable."),
    ] = None,
    kind: Annotated[
        list[str] | None,
        typer.Option(help="Only this kind of event, of any level, such as peer_gone or op_ended. Repeatable."),
    ] = None,
    level: Annotated[str, typer.Option(help="The lowest level: debug, info, warning or error.")] = "info",
    since: Annotated[
        str | None, typer.Option(help="Not before: 90s, 10m, 2h or 1d ago, or 2026-11-18T14:02:11.")
    ] = None,
    until: Annotated[str | None, typer.Option(help="Not after; as --since.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON object per event.")] = False,
    run: Annotated[str | None, typer.Option(help="The run; without it `default`, or the only one.")] = None,
    token_file: Annotated[Path | None, typer.Option(help="File with the join token of the run.")] = None,
    config: Annotated[Path | None, typer.Option(help="Settings file (TOML).")] = None,
) -> None:
    """Show the events of a run: what happened, when, and why.

    From a master: its own events and the rare ones of its peers, the last few thousand. From a run directory
    (`events_dir`): everything that was recorded; ops and steps are of level debug. Times are local, in JSON UTC.
    """
    from contextlib import suppress

    from ringfold import config as settings
    from ringfold.runtime.clock import unix_ns

    wanted = _filter(peer, kind, level, since, until, unix_ns())
    resolved = settings.load({"token_file": token_file, "run": run, "config": config})
    found = found_in(source, resolved, follow=follow)
    with suppress(KeyboardInterrupt, BrokenPipeError):
        _show(found, wanted, as_json=as_json)


def found_in(source: str | None, resolved: "Resolved", *, follow: bool) -> "Iterator[Seen | MasterUnreachable]":
    """The events of a run directory, or of the master at an address; None: of the master of the settings."""
    from ringfold.errors import UsageError

    if source is None:
        return _of_master(resolved.listed("master"), resolved, follow=follow)
    if Path(source).is_file():
        return _of_file(Path(source))
    if Path(source).is_dir():
        return _of_directory(Path(source), follow=follow)
    if "/" in source:
        raise UsageError(f"there is no run directory {source}")
    return _of_master(tuple(source.split(",")), resolved, follow=follow)


def _filter(
    peer: list[str] | None, kind: list[str] | None, level: str, since: str | None, until: str | None, now_ns: int
) -> "Filter":
    from typing import cast, get_args

    from ringfold.errors import ConfigError
    from ringfold.observe import stream
    from ringfold.wire.events import KINDS
    from ringfold.wire.notices import Level

    stream.check_kinds(kind or (), KINDS)
    if level not in get_args(Level):
        raise ConfigError(f"--level is one of {', '.join(get_args(Level))}, not {level!r}")
    return stream.Filter(
        sources=tuple(peer or ()),
        kinds=tuple(kind or ()),
        level=cast(Literal["debug", "info", "warning", "error"], level),
        since_ns=None if since is None else stream.instant(since, now_ns),
        until_ns=None if until is None else stream.instant(until, now_ns),
    )


def _of_file(path: Path) -> "Iterator[Seen | MasterUnreachable]":
    from ringfold.observe import stream

    yield from stream.of_file(path)


def _of_directory(directory: Path, *, follow: bool) -> "Iterator[Seen | MasterUnreachable]":
    from ringfold.observe import stream

    return stream.follow_directory(directory) if follow else stream.merged(directory)


def _of_master(
    addresses: tuple[str, ...], resolved: "Resolved", *, follow: bool
) -> "Iterator[Seen | MasterUnreachable]":
    from ringfold.observe.stream import Seen
    from ringfold.runtime import master_client

    names: dict[int, str] = {}
    for look in master_client.follow(addresses, resolved.token(), 0.5, run=resolved.named_run()):
        if not isinstance(look, tuple):
            yield look
            continue
        address, status, new = look
        names |= {peer.peer: peer.name for peer in status.peers}
        for event in new:
            name = names.get(event.stamp.peer, "") if event.stamp.peer else address
            yield Seen(event.stamp.wall or event.stamp.at, "peer" if event.stamp.peer else "master", name, event)
        if not follow:
            return


def _show(found: "Iterator[Seen | MasterUnreachable]", wanted: "Filter", *, as_json: bool) -> None:
    from ringfold.cli.output import console
    from ringfold.errors import MasterUnreachable

    for seen in found:
        if isinstance(seen, MasterUnreachable):
            console.print(str(seen), style="yellow", markup=False, highlight=False)
        elif wanted.keeps(seen):
            if as_json:
                typer.echo(_line(seen))
            else:
                console.print(_text(seen), soft_wrap=True)


def _line(seen: "Seen") -> str:
    """The event as one JSON object: when, by which process, how it reads as text, then the fields of the notice."""
    import json
    from datetime import UTC, datetime

    import msgspec

    time = datetime.fromtimestamp(seen.wall_ns / 1e9, UTC).isoformat(timespec="microseconds")
    head = {"time": time, "by": seen.peer, "by_name": seen.source, "level": seen.notice.level}
    return json.dumps(head | {"message": str(seen.notice)} | msgspec.to_builtins(seen.notice))


def _text(seen: "Seen") -> "Text":
    from datetime import datetime

    from rich.text import Text

    time = datetime.fromtimestamp(seen.wall_ns / 1e9).astimezone().strftime("%H:%M:%S.%f")[:-3]
    who = f"peer {seen.peer} ({seen.source})" if seen.peer else f"{seen.role} {seen.source}"
    style = _STYLES[seen.notice.level]
    return Text.assemble(
        (time, "dim"), "  ", (f"{who:<24}", "bold" if seen.peer else ""), "  ", (str(seen.notice), style)
    )
