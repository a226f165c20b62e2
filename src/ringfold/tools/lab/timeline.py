"""What happens in a lab, and when: a pure state machine. `runner.py` carries out its effects.

A lab *runs* while a command in the foreground has not ended; a command in the background lives as long as the lab. It
*ends* when the last one in the foreground has ended, when one fails that may not, at `end_ns`, or when it is
interrupted. Then what still runs gets SIGTERM, and SIGKILL after a moment. With nothing in the foreground and no
`end_ns` it runs until it is interrupted.

A command that the script itself sends a signal is not a failure, whatever its status. One with `restart` is started
again a second after its end, until the lab ends.
"""

import heapq
import itertools
import signal
from dataclasses import dataclass, field
from typing import assert_never

from ringfold.tools.lab.model import Change

GRACE_NS = 3_000_000_000
RESTART_NS = 1_000_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class LabCommand:
    """A command of the script: what runs on which host, and from when on."""

    name: str
    host: str
    arguments: tuple[str, ...]
    env: tuple[tuple[str, str], ...] = ()
    at_ns: int = 0
    background: bool = False
    restart: bool = False
    may_fail: bool = False


@dataclass(frozen=True, slots=True)
class Kill:
    """A command gets a signal."""

    command: str
    signal: int

    def __str__(self) -> str:
        return f"{signal.Signals(self.signal).name} to {self.command}"


Action = Change | Kill


@dataclass(frozen=True, slots=True)
class ScriptEvent:
    """Something to do, at an instant after the beginning."""

    at_ns: int
    action: Action


@dataclass(frozen=True, slots=True)
class Script:
    """All that is to happen."""

    commands: tuple[LabCommand, ...] = ()
    events: tuple[ScriptEvent, ...] = ()
    end_ns: int | None = None

    def __post_init__(self) -> None:
        names = [command.name for command in self.commands]
        for name in names:
            if not name or not name.isprintable():
                raise ValueError(f"{name!r} is no name of a command")
            if names.count(name) > 1:
                raise ValueError(f"there are two commands with the name {name!r}")


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed."""


@dataclass(frozen=True, slots=True)
class CommandEnded:
    """A command has ended; its status is negative when a signal ended it."""

    command: str
    status: int


@dataclass(frozen=True, slots=True)
class Interrupted:
    """The lab shall end."""

    reason: str


Event = Tick | CommandEnded | Interrupted


@dataclass(frozen=True, slots=True)
class Start:
    """Start a command."""

    command: LabCommand


@dataclass(frozen=True, slots=True)
class Ending:
    """From now on the lab ends; emitted once."""

    reason: str


@dataclass(frozen=True, slots=True)
class Over:
    """Nothing runs any more. The exit status of the lab."""

    status: int
    reason: str


Effect = Start | Change | Kill | Ending | Over


@dataclass(slots=True)
class Timeline:
    """The machine. The instant 0 is the beginning of the lab."""

    script: Script
    _pending: list[tuple[int, int, LabCommand | Action]] = field(default_factory=list)
    _order: "itertools.count[int]" = field(default_factory=itertools.count)
    _running: dict[str, LabCommand] = field(default_factory=dict)
    _signalled: set[str] = field(default_factory=set)
    _unfinished: set[str] = field(default_factory=set)
    _kill_ns: int | None = None
    _status: int = 0
    _reason: str = ""
    _is_over: bool = False

    def __post_init__(self) -> None:
        for command in self.script.commands:
            self._put(command.at_ns, command)
            if not command.background:
                self._unfinished.add(command.name)
        for event in self.script.events:
            self._put(event.at_ns, event.action)

    def step(self, now_ns: int, event: Event) -> list[Effect]:
        """Apply one event; what is to be done now, in order."""
        effects: list[Effect] = []
        match event:
            case Tick():
                pass
            case CommandEnded(name, status):
                effects += self._ended(now_ns, name, status)
            case Interrupted(reason):
                effects += self._end(now_ns, 130 if self._unfinished else 0, reason)
            case _:
                assert_never(event)
        return effects + self._due(now_ns)

    def next_ns(self) -> int | None:
        """When time alone will make something happen."""
        if self._reason:
            return self._kill_ns
        instants = [each for each in (self.script.end_ns,) if each is not None]
        return min([*instants, *(at for at, _, _ in self._pending[:1])], default=None)

    def _put(self, at_ns: int, what: LabCommand | Action) -> None:
        heapq.heappush(self._pending, (at_ns, next(self._order), what))

    def _due(self, now_ns: int) -> list[Effect]:
        effects: list[Effect] = []
        while not self._reason and self._pending and self._pending[0][0] <= now_ns:
            what = heapq.heappop(self._pending)[2]
            match what:
                case LabCommand():
                    self._running[what.name] = what
                    effects.append(Start(what))
                case Kill():
                    if what.command in self._running:
                        self._signalled.add(what.command)
                        effects.append(what)
                case Change():
                    effects.append(what)
                case _:
                    assert_never(what)
        if not self._reason and self.script.end_ns is not None and now_ns >= self.script.end_ns:
            effects += self._end(now_ns, 0, f"the end, {self.script.end_ns / 1e9:g} s after the beginning")
        if self._kill_ns is not None and now_ns >= self._kill_ns:
            self._kill_ns = None
            effects += [Kill(name, int(signal.SIGKILL)) for name in sorted(self._running)]
        if self._reason and not self._running and not self._is_over:
            self._is_over, self._kill_ns = True, None
            effects.append(Over(self._status, self._reason))
        return effects

    def _ended(self, now_ns: int, name: str, status: int) -> list[Effect]:
        command = self._running.pop(name)
        wanted = name in self._signalled or command.may_fail or bool(self._reason)
        self._signalled.discard(name)
        if self._reason:
            return []
        if command.restart:
            self._put(now_ns + RESTART_NS, command)
            return []
        if status != 0 and not wanted:
            return self._end(now_ns, 1, f"{name} {_describe(status)}")
        self._unfinished.discard(name)
        if not self._unfinished and not command.background:
            return self._end(now_ns, 0, "all commands in the foreground have ended")
        return []

    def _end(self, now_ns: int, status: int, reason: str) -> list[Effect]:
        if self._reason:
            return []
        self._status, self._reason, self._kill_ns = status, reason, now_ns + GRACE_NS
        return [Ending(reason), *(Kill(name, int(signal.SIGTERM)) for name in sorted(self._running))]


def _describe(status: int) -> str:
    if status >= 0:
        return f"failed with status {status}"
    try:
        return f"was ended by {signal.Signals(-status).name}"
    except ValueError:
        return f"was ended by signal {-status}"
