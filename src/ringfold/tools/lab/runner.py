"""Runs a script in a lab: starts commands, reads their lines, changes cables, and shows all of it as it happens.

One thread waits for everything: lines from the commands, their ends (as descriptors of processes), signals to us, and
the timeline's next instant. Commands have sessions of their own, so Ctrl-C on the terminal reaches only this process,
which ends them in good order; a second one ends them at once.
"""

import contextlib
import os
import selectors
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import assert_never

import msgspec

from ringfold.tools.lab.model import Change
from ringfold.tools.lab.network import Lab
from ringfold.tools.lab.switch import Queues
from ringfold.tools.lab.timeline import (
    CommandEnded,
    Ending,
    Event,
    Interrupted,
    Kill,
    Over,
    Script,
    Start,
    Tick,
    Timeline,
)

_CHUNK = 65_536
_MAX_LINE = 1 << 20


class LabEvent(msgspec.Struct, omit_defaults=True):
    """Something that happened, `at_ms` after the beginning.

    `event` is started, line, ended, changed, signalled, queue, ending or over. A line has `stream` (out or err) and
    `text`; an end has `status`; what changed and why it ends is in `text`. A queue is at one `end` (up or down) of the
    cable of a `host` to a `path`.
    """

    at_ms: float
    event: str
    command: str = ""
    host: str = ""
    stream: str = ""
    text: str = ""
    pid: int = 0
    status: int | None = None
    path: str = ""
    end: str = ""
    backlog_bytes: int | None = None
    limit_bytes: int | None = None
    drops: int | None = None


Show = Callable[[LabEvent], None]


def run_script(lab: Lab, script: Script, show: Show, *, queues_ns: int | None = None) -> int:
    """Run a script in a lab that was entered; the exit status. Every event is shown as it happens.

    Queues that are not empty are shown every `queues_ns`, if that is given.
    """
    with ScriptRun(lab, script, show, queues_ns) as performance:
        return performance.run()


class _CommandOutput:
    """The lines of one stream of a command, as they become whole."""

    def __init__(self, command: str, stream: str, descriptor: int) -> None:
        self.command, self.stream, self.descriptor = command, stream, descriptor
        self._rest = b""

    def lines(self) -> tuple[list[str], bool]:
        """What has come, and whether more may come."""
        try:
            chunk = os.read(self.descriptor, _CHUNK)
        except BlockingIOError:
            return [], True
        whole = (self._rest + chunk).split(b"\n")
        self._rest = whole.pop()
        if self._rest and (not chunk or len(self._rest) > _MAX_LINE):
            whole.append(self._rest)
            self._rest = b""
        return [each.decode(errors="replace").rstrip("\r") for each in whole], bool(chunk)


class ScriptRun:
    """One script in one lab, as a context."""

    def __init__(self, lab: Lab, script: Script, show: Show, queues_ns: int | None = None) -> None:
        self._lab, self._timeline, self._show = lab, Timeline(script), show
        self._selector = selectors.DefaultSelector()
        self._children: dict[str, tuple[subprocess.Popen[bytes], int]] = {}
        self._pipes: list[_CommandOutput] = []
        self._events: list[Event] = []
        self._signals = 0
        self._over: Over | None = None
        self._queues_ns, self._look_ns = queues_ns, queues_ns
        self._queues: Queues | None = None
        self._guard = contextlib.ExitStack()
        self._began_ns = time.monotonic_ns()

    def __enter__(self) -> "ScriptRun":
        self._guard.callback(self._selector.close)
        self._guard.enter_context(self._signals_as_events())
        if self._queues_ns is not None:
            self._queues = self._guard.enter_context(Queues(self._lab))
        return self

    def __exit__(self, *_: object) -> None:
        for child, descriptor in self._children.values():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()
            os.close(descriptor)
        for pipe in self._pipes:
            os.close(pipe.descriptor)
        self._guard.close()

    def run(self) -> int:
        """From the beginning to the end; the exit status."""
        self._began_ns = time.monotonic_ns()
        self._events.append(Tick())
        while self._over is None:
            while self._events and self._over is None:
                self._step(self._events.pop(0))
            if self._over is None:
                self._wait()
        return self._over.status

    def _now_ns(self) -> int:
        return time.monotonic_ns() - self._began_ns

    def _emit(self, event: str, **facts: object) -> None:
        self._show(msgspec.convert({"at_ms": round(self._now_ns() / 1e6, 1), "event": event, **facts}, LabEvent))

    def _step(self, event: Event) -> None:
        effects = self._timeline.step(self._now_ns(), event)
        changes = [effect for effect in effects if isinstance(effect, Change)]
        if changes:  # those of one instant at once
            self._lab.apply(*changes)
        for effect in effects:
            match effect:
                case Start():
                    self._start(effect)
                case Change():
                    self._emit("changed", text=str(effect))
                case Kill():
                    self._signal(effect)
                case Ending(reason):
                    self._emit("ending", text=reason)
                case Over(status, reason):
                    self._over = effect
                    self._emit("over", status=status, text=reason)
                case _:
                    assert_never(effect)

    def _start(self, start: Start) -> None:
        command = start.command
        given = {"LAB_HOST": command.host, "LAB_ADDRESSES": ",".join(self._lab.addresses(command.host))}
        child = self._lab.start(
            command.host,
            command.arguments,
            env={"PYTHONUNBUFFERED": "1", **given, **dict(command.env)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        # A descriptor of the process becomes readable at its end, also when its pipes live on in its children.
        descriptor = os.pidfd_open(child.pid)
        self._children[command.name] = (child, descriptor)
        self._selector.register(descriptor, selectors.EVENT_READ, command.name)
        for stream, source in (("out", child.stdout), ("err", child.stderr)):
            assert source is not None
            pipe = _CommandOutput(command.name, stream, os.dup(source.fileno()))
            source.close()
            os.set_blocking(pipe.descriptor, False)
            self._pipes.append(pipe)
            self._selector.register(pipe.descriptor, selectors.EVENT_READ, pipe)
        self._emit("started", command=command.name, host=command.host, pid=child.pid, text=" ".join(command.arguments))

    def _signal(self, kill: Kill) -> None:
        child, _ = self._children[kill.command]
        # The whole session: a shell's children, too. One that only stops or wakes reaches all of them as well.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, kill.signal)
        self._emit("signalled", command=kill.command, text=signal.Signals(kill.signal).name)

    def _wait(self) -> None:
        """Until something happens; it is in the list of events then."""
        due = min((at for at in (self._timeline.next_ns(), self._look_ns) if at is not None), default=None)
        ready = self._selector.select(None if due is None else max(0.0, (due - self._now_ns()) / 1e9))
        ended = []
        for key, _ in ready:
            match key.data:
                case _CommandOutput() as pipe:
                    self._pull(pipe)
                case str() as name:
                    ended.append(name)
                case None:
                    self._take_signals()
        for name in ended:
            self._reap(name)
        self._look()
        self._events.append(Tick())

    def _look(self) -> None:
        """Show the queues, when it is time to."""
        if self._queues is None or self._queues_ns is None or self._look_ns is None or self._now_ns() < self._look_ns:
            return
        self._look_ns = self._now_ns() + self._queues_ns
        for queue in self._queues.read():
            if queue.backlog_bytes:
                facts = {name: getattr(queue, name) for name in ("host", "path", "end", "drops")}
                self._emit("queue", **facts, backlog_bytes=queue.backlog_bytes, limit_bytes=queue.limit_bytes)

    def _pull(self, pipe: _CommandOutput) -> None:
        lines, more = pipe.lines()
        for text in lines:
            self._emit("line", command=pipe.command, stream=pipe.stream, text=text)
        if not more:
            self._selector.unregister(pipe.descriptor)
            self._pipes.remove(pipe)
            os.close(pipe.descriptor)

    def _reap(self, name: str) -> None:
        child, descriptor = self._children.pop(name)
        self._selector.unregister(descriptor)
        os.close(descriptor)
        status = child.wait()
        for pipe in [each for each in self._pipes if each.command == name]:
            # What it printed last comes before its end. A pipe that its children hold stays.
            while pipe in self._pipes and _is_readable(pipe.descriptor):
                self._pull(pipe)
        self._emit("ended", command=name, status=status)
        self._events.append(CommandEnded(name, status))

    @contextlib.contextmanager
    def _signals_as_events(self) -> Iterator[None]:
        """SIGINT and SIGTERM become events. Only the main thread can have it so; elsewhere they stay what they are."""
        awake, ring = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._awake = awake

        def note(number: int, frame: FrameType | None) -> None:
            with contextlib.suppress(BlockingIOError):
                os.write(ring, bytes([number]))

        before = {}
        try:
            with contextlib.suppress(ValueError):
                for number in (signal.SIGINT, signal.SIGTERM):
                    before[number] = signal.signal(number, note)
            self._selector.register(awake, selectors.EVENT_READ, None)
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
            os.close(awake)
            os.close(ring)

    def _take_signals(self) -> None:
        for number in os.read(self._awake, 64):
            self._signals += 1
            self._events.append(Interrupted(f"{signal.Signals(number).name}"))
            if self._signals > 1:
                for name in sorted(self._children):
                    self._signal(Kill(name, int(signal.SIGKILL)))


def _is_readable(descriptor: int) -> bool:
    with selectors.PollSelector() as selector:
        selector.register(descriptor, selectors.EVENT_READ)
        return bool(selector.select(0))
