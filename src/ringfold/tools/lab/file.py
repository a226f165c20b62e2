"""A lab as a TOML file: hosts, paths, commands, and what changes when. Every mistake is reported with its place.

`docs/guides/lab.md` explains the file. Reading it needs no root and makes nothing.
"""

import re
import shlex
import signal
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path as File
from typing import Any, ParamSpec, TypeVar

import msgspec

from ringfold.config import TELEMETRY_PORT
from ringfold.errors import UsageError
from ringfold.tools.lab.model import SWITCH, Change, LabLayout, Path, plan
from ringfold.tools.lab.timeline import Action, Kill, LabCommand, Script, ScriptEvent

_P = ParamSpec("_P")
_T = TypeVar("_T")
_SOONEST_NS = 10_000_000
_PLACE = re.compile(r"\{([A-Za-z][A-Za-z0-9_-]*)(?:\.([A-Za-z][A-Za-z0-9_-]*))?\}")


class PathTable(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """`[[path]]`: a network that all hosts meet on. The fields are those of `Path`."""

    name: str
    rate: str | float | None = None
    up: str | float | None = None
    down: str | float | None = None
    burst_bytes: int | None = None
    queue_ms: float | None = None
    queue_bytes: int | None = None
    rtt_ms: float | None = None
    loss: float | None = None
    mtu: int | None = None


class CableTable(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """`[[cable]]`: what is different about one host's cable to one path."""

    host: str
    path: str
    rate: str | float | None = None
    up: str | float | None = None
    down: str | float | None = None
    burst_bytes: int | None = None
    queue_ms: float | None = None
    queue_bytes: int | None = None
    rtt_ms: float | None = None
    loss: float | None = None


class CommandTable(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """`[[command]]`: what runs where, and from when on."""

    name: str
    host: str
    run: str | list[str]
    at_s: float = 0.0
    background: bool = False
    restart: bool = False
    may_fail: bool = False
    env: dict[str, str] = {}


class ChangeTable(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """`[[change]]`: what becomes different, and when: the cables of a path, or a command that gets a signal."""

    at_s: float
    path: str | None = None
    host: str | None = None
    rate: str | float | None = None
    up: str | float | None = None
    down: str | float | None = None
    rtt_ms: float | None = None
    loss: float | None = None
    cut: str | bool | None = None
    command: str | None = None
    signal: str = "KILL"


class TelemetryTable(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """`[telemetry]`: the switch sends the state of its queues to the hosts' agents."""

    every_ms: float = 5.0
    port: int = TELEMETRY_PORT
    via: str | None = None
    key: str | None = None
    key_id: int = 0


class LabTable(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """The whole file."""

    hosts: int | list[str]
    path: list[PathTable]
    cable: list[CableTable] = []
    command: list[CommandTable] = []
    change: list[ChangeTable] = []
    telemetry: TelemetryTable | None = None
    queues_s: float | None = None
    end_s: float | None = None
    seed: int = 1


@dataclass(frozen=True, slots=True)
class LabFile:
    """A lab that was read: how to build it, and what happens in it."""

    plan: LabLayout
    cables: Mapping[tuple[str | int, str | int], Path]
    script: Script
    seed: int
    telemetry: TelemetryTable | None = None
    queues_ns: int | None = None

    @property
    def is_relayed(self) -> bool:
        """Whether packets are delayed or lost somewhere."""
        return any(path.is_relayed for path in (*self.plan.paths, *self.cables.values()))


def read(file: File, python: str) -> LabFile:
    """Read a lab's file. `python` is what `{python}` in a command stands for. A mistake is a UsageError."""
    try:
        tree = tomllib.loads(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise UsageError(f"cannot read the lab {file}: {error}") from None
    try:
        return parse(tree, python)
    except (msgspec.ValidationError, ValueError) as error:
        raise UsageError(f"{file}: {error}") from None


def parse(tree: Mapping[str, object], python: str) -> LabFile:
    """The lab of a TOML tree. A mistake is a ValueError, or msgspec's ValidationError."""
    table = msgspec.convert(tree, LabTable)
    events = [
        ScriptEvent(at_ns=_ns(each.at_s, f"change {number}"), action=_at(f"change {number}", _action, each))
        for number, each in enumerate(table.change, 1)
    ]
    moved = {event.action.path for event in events if isinstance(event.action, Change) and event.action.needs_relay}
    paths = [_at(f"path {each.name!r}", _path, each, each.name in moved) for each in table.path]
    made = plan(table.hosts, paths)
    cables: dict[tuple[str | int, str | int], Path] = {}
    for cable in table.cable:
        where = f"cable of {cable.host!r} to {cable.path!r}"
        made.host(cable.host)
        cables[cable.host, cable.path] = _at(where, _cable, paths[made.path(cable.path)], cable)
    for number, event in enumerate(events, 1):
        _at(f"change {number}", _check_deed, event, made, [each.name for each in table.command])
    commands = [_at(f"command {each.name!r}", _command, each, made, python) for each in table.command]
    end_ns = None if table.end_s is None else _ns(table.end_s, "end_s")
    queues_ns = None if table.queues_s is None else max(_SOONEST_NS, _ns(table.queues_s, "queues_s"))
    if table.telemetry is not None:
        _at("telemetry", _check_telemetry, table.telemetry, made)
    script = Script(tuple(commands), tuple(events), end_ns)
    return LabFile(made, cables, script, table.seed, table.telemetry, queues_ns)


def _path(table: PathTable, relay: bool) -> Path:
    return Path(relay=relay, **_given(table))


def _cable(path: Path, table: CableTable) -> Path:
    """The path as this host has it. A rate for the cable is one for both directions, whatever the path has for them."""
    given = _given(table)
    del given["host"], given["path"]
    if "rate" in given:
        path = replace(path, up=None, down=None)
    return replace(path, **given)


def _action(table: ChangeTable) -> Action:
    given = {name: value for name, value in _given(table).items() if name not in ("at_s", "signal", "command")}
    if table.command is not None:
        if given:
            raise ValueError(f"a signal to a command and {', '.join(sorted(given))} of a path are two changes")
        name = "SIG" + table.signal.removeprefix("SIG")
        if name not in signal.Signals.__members__:
            raise ValueError(f"there is no signal {table.signal!r}")
        return Kill(table.command, int(signal.Signals[name]))
    if table.path is None:
        raise ValueError("name the path that changes, or the command that gets a signal")
    if isinstance(table.cut, bool):
        given["cut"] = "silent" if table.cut else "no"
    change = Change(**given)
    if not given.keys() - {"path", "host"}:
        raise ValueError("nothing changes: give a rate, up, down, rtt_ms, loss or cut")
    return change


def _check_deed(event: ScriptEvent, made: LabLayout, commands: list[str]) -> None:
    match event.action:
        case Kill(name):
            if name not in commands:
                raise ValueError(f"there is no command {name!r}; there are {', '.join(commands) or 'none'}")
        case Change(path=path, host=host):
            made.path(path)
            if host is not None and made.host(host) == len(made.hosts):
                raise ValueError("the switch has no cable: name a host")


def _check_telemetry(table: TelemetryTable, made: LabLayout) -> None:
    made.path(table.via if table.via is not None else 0)
    if table.every_ms < 0.5:
        raise ValueError(f"every_ms is 0.5 at least, not {table.every_ms}")
    if not 1 <= table.port <= 65_535:
        raise ValueError(f"there is no port {table.port}")
    if not 0 <= table.key_id <= 255 or (table.key is not None and len(table.key.encode()) < 16):
        raise ValueError("a key has 16 bytes or more, and a key_id is 0 to 255")


def _command(table: CommandTable, made: LabLayout, python: str) -> LabCommand:
    made.host(table.host)
    arguments = shlex.split(table.run) if isinstance(table.run, str) else table.run
    if not arguments:
        raise ValueError("run is empty")
    return LabCommand(
        name=table.name,
        host=table.host,
        arguments=tuple(_filled(argument, made, python) for argument in arguments),
        env=tuple(sorted((key, _filled(value, made, python)) for key, value in table.env.items())),
        at_ns=_ns(table.at_s, "at_s"),
        background=table.background or table.restart,
        restart=table.restart,
        may_fail=table.may_fail,
    )


def _filled(argument: str, made: LabLayout, python: str) -> str:
    """`{host.path}` is an address, `{host}` that on the first path. Other braces stay as they are."""

    def stand_in(found: re.Match[str]) -> str:
        name, path = found[1], found[2]
        if name == "python" and path is None:
            return python
        if name not in (*made.hosts, SWITCH):
            return found[0]
        return made.address(name, path if path is not None else 0)

    return _PLACE.sub(stand_in, argument)


def _given(table: msgspec.Struct) -> dict[str, Any]:
    return {name: value for name, value in msgspec.structs.asdict(table).items() if value is not None}


def _ns(seconds: float, where: str) -> int:
    if not 0 <= seconds < 1e7:
        raise ValueError(f"{where}: {seconds} s is no time after the beginning")
    return round(seconds * 1e9)


def _at(where: str, make: Callable[_P, _T], *arguments: _P.args, **named: _P.kwargs) -> _T:
    """The same mistake, with its place before it."""
    try:
        return make(*arguments, **named)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None
