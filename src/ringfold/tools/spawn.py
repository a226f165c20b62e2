"""Child processes that never outlive their parent, and a line of JSON messages to each of them.

The benchmarks start masters, peers, `mpirun` and torch workers, kill and freeze them, and must leave nothing behind
whatever happens. Three things see to that:

* Every child is started through this file run as a script: it asks the kernel for SIGKILL at the parent's death
  (PR_SET_PDEATHSIG, which survives exec) and then becomes the real command. A grandchild, such as a rank that `mpirun`
  started, asks for the same with `die_with_parent()`.
* Every child leads a session of its own, so that a Ctrl-C of the terminal reaches the parent only, and the parent ends
  the children in its own order: first those that tidy up after themselves, then everybody by group.
* Sockets and logs live in one private directory that goes with the crew.

A child connects back to the crew's Unix socket and says its name; from then on both sides send one JSON object per
line. `mpirun` forwards standard input to one rank only, and a waiting MPI rank spins; a line of its own to each
process avoids both.

This file imports the standard library only, because the script half runs before any package is importable.
"""

import contextlib
import ctypes
import json
import os
import random
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

Message = dict[str, Any]

_PR_SET_PDEATHSIG = 1
_LONGEST_TURN_S = 1.0
_LOG_TAIL_BYTES = 2_000


class ChildFailed(RuntimeError):
    """A child ended, fell silent or reported an error while it was needed. The text ends with its last log lines."""

    def __init__(self, name: str, text: str, log: str = "") -> None:
        super().__init__(name, text, log)
        self.name, self.text, self.log = name, text, log

    def __str__(self) -> str:
        return f"{self.name}: {self.text}" + (f"\n{self.log}" if self.log else "")


class LineClosed(EOFError):
    """The other end of a line is gone."""


class Line:
    """One JSON object per line, both ways, over a connected Unix socket."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._partial = b""
        self._messages: deque[Message] = deque()

    @classmethod
    def dial(cls, path: str, name: str) -> "Line":
        """A child's end: connect to the crew at `path` and say who is there."""
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connection.connect(path)
        line = cls(connection)
        line.send({"name": name, "pid": os.getpid()})
        return line

    def fileno(self) -> int:
        return self._connection.fileno()

    def send(self, message: Message) -> None:
        try:
            self._connection.sendall(json.dumps(message).encode() + b"\n")
        except OSError as error:
            raise LineClosed(str(error)) from error

    def receive(self, timeout_s: float | None = None) -> Message | None:
        """The next message, or None when none came in time. Raises `LineClosed` once the other end is gone."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while not self._messages:
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            with selectors.DefaultSelector() as selector:
                selector.register(self._connection, selectors.EVENT_READ)
                if not selector.select(left):
                    return None
            self.pull()
        return self._messages.popleft()

    def pull(self) -> None:
        """Read what has arrived; call it when the line is readable."""
        try:
            chunk = self._connection.recv(1 << 20)
        except OSError as error:
            raise LineClosed(str(error)) from error
        if not chunk:
            raise LineClosed("the other end closed")
        *whole, self._partial = (self._partial + chunk).split(b"\n")
        self._messages.extend(json.loads(text) for text in whole)

    def queued(self) -> Message | None:
        """A message that was read already, if there is one."""
        return self._messages.popleft() if self._messages else None

    def close(self) -> None:
        self._connection.close()


class Crew:
    """The children of one measurement, as a context: leaving it, in whatever way, ends them and removes the rest."""

    def __init__(self) -> None:
        self.directory = Path(tempfile.mkdtemp(prefix="ringfold-crew-"))
        self.address = str(self.directory / "line")
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(self.address)
        self._listener.listen(256)
        self._children: dict[str, subprocess.Popen[bytes]] = {}
        self._tidy: set[str] = set()
        self._lines: dict[str, Line] = {}
        self._unnamed: list[Line] = []
        self._released: set[str] = set()
        self._old_handler: Callable[[int, FrameType | None], Any] | int | signal.Handlers | None = None

    def __enter__(self) -> "Crew":
        # A plain kill of the parent should tidy up like Ctrl-C does. Only the main thread may set handlers.
        with contextlib.suppress(ValueError):
            self._old_handler = signal.signal(signal.SIGTERM, _exit_on_sigterm)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
        if self._old_handler is not None:
            signal.signal(signal.SIGTERM, self._old_handler)

    def start(
        self, name: str, command: Sequence[str], *, env: Mapping[str, str] | None = None, tidies_up: bool = False
    ) -> None:
        """Start a child. `tidies_up` ones (`mpirun`) get SIGTERM and a moment of time before the end."""
        assert name not in self._children, f"{name} was started already"
        with (self.directory / f"{name}.log").open("wb") as log:
            self._children[name] = subprocess.Popen(
                [sys.executable, "-I", "-S", __file__, str(os.getpid()), *command],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, **(env or {})},
                start_new_session=True,
            )
        if tidies_up:
            self._tidy.add(name)

    def meet(self, names: Iterable[str], timeout_s: float) -> None:
        """Wait until each of `names` has a line here."""
        missing = set(names)
        deadline = time.monotonic() + timeout_s
        while missing := missing - self._lines.keys():
            self._check_alive()
            if time.monotonic() > deadline:
                name = min(missing)
                raise ChildFailed(name, f"did not report within {timeout_s:.0f} s", self.log_tail(name))
            self._turn(0.1)

    def send(self, names: Iterable[str], message: Message) -> None:
        for name in names:
            try:
                self._lines[name].send(message)
            except LineClosed as error:
                raise ChildFailed(name, f"is gone: {error}", self.log_tail(name)) from error

    def gather(self, names: Iterable[str], timeout_s: float) -> dict[str, Message]:
        """The next message of each of `names`. Messages of others stay queued."""
        missing, replies = set(names), dict[str, Message]()
        deadline = time.monotonic() + timeout_s
        while missing:
            left = deadline - time.monotonic()
            got = self.receive(max(0.0, left), missing)
            if got is None:
                name = min(missing)
                raise ChildFailed(name, f"did not answer within {timeout_s:.0f} s", self.log_tail(name))
            replies[got[0]] = got[1]
            missing.discard(got[0])
        return replies

    def receive(self, timeout_s: float, names: Iterable[str] | None = None) -> tuple[str, Message] | None:
        """The next message of anybody (or of one of `names`), or None when none came in time."""
        wanted = None if names is None else set(names)
        deadline = time.monotonic() + timeout_s
        while True:
            for name, line in self._lines.items():
                if wanted is not None and name not in wanted:
                    continue
                if (message := line.queued()) is not None:
                    if "error" in message and name not in self._released:
                        raise ChildFailed(name, str(message["error"]), self.log_tail(name))
                    return name, message
            left = deadline - time.monotonic()
            if left <= 0:
                return None
            self._turn(left)

    def pause(self, seconds: float) -> None:
        """Let time pass, while messages are taken in and a child's unexpected end is raised."""
        self.receive(seconds, ())
        self._check_alive()

    def pid(self, name: str) -> int:
        return self._children[name].pid

    def kill(self, name: str) -> int:
        """SIGKILL a child; return the monotonic time (ns) just before."""
        return self._signal(name, signal.SIGKILL)

    def freeze(self, name: str) -> int:
        """SIGSTOP a child; return the monotonic time (ns) just before."""
        return self._signal(name, signal.SIGSTOP)

    def thaw(self, name: str) -> int:
        """SIGCONT a frozen child, and expect it to live again; return the monotonic time (ns) just before."""
        at = self._signal(name, signal.SIGCONT)
        self._released.discard(name)
        return at

    def release(self, name: str) -> None:
        """Expect nothing of a child any more: its end is not an error."""
        self._released.add(name)

    def reap(self, name: str, timeout_s: float) -> int:
        """Wait for the end of a child; return its exit status."""
        child = self._children[name]
        try:
            status = child.wait(timeout_s)
        except subprocess.TimeoutExpired as error:
            raise ChildFailed(name, f"did not end within {timeout_s:.0f} s", self.log_tail(name)) from error
        self._drop_line(name)
        return status

    def close(self) -> None:
        """End every child and remove the directory. Safe to call twice."""
        for line in [*self._lines.values(), *self._unnamed]:
            line.close()
        self._lines.clear()
        self._unnamed.clear()
        self._listener.close()
        tidy = [self._children[name] for name in sorted(self._tidy)]
        for child in tidy:
            _signal_group(child, signal.SIGTERM)
        for child in tidy:
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(3)
        for child in self._children.values():
            _signal_group(child, signal.SIGKILL)
        for child in self._children.values():
            child.wait()
        shutil.rmtree(self.directory, ignore_errors=True)

    def _signal(self, name: str, number: signal.Signals) -> int:
        self._released.add(name)
        at = time.monotonic_ns()
        os.kill(self._children[name].pid, number)
        return at

    def _turn(self, timeout_s: float) -> None:
        """Wait for bytes or newcomers, and take them in."""
        with selectors.DefaultSelector() as selector:
            selector.register(self._listener, selectors.EVENT_READ)
            for line in [*self._lines.values(), *self._unnamed]:
                selector.register(line, selectors.EVENT_READ)
            # A signal that comes just before the system call is noticed only after it, so no call is long.
            ready = {key.fileobj for key, _ in selector.select(min(timeout_s, _LONGEST_TURN_S))}
        for name, line in list(self._lines.items()):
            if line in ready:
                try:
                    line.pull()
                except LineClosed as error:
                    self._drop_line(name)
                    if name not in self._released:
                        self._released.add(name)
                        raise ChildFailed(name, f"ended: {error}", self.log_tail(name)) from error
        for line in list(self._unnamed):
            if line in ready:
                self._introduce(line)
        if self._listener in ready:
            self._unnamed.append(Line(self._listener.accept()[0]))

    def _introduce(self, line: Line) -> None:
        try:
            line.pull()
        except LineClosed:
            self._unnamed.remove(line)
            line.close()
            return
        if (hello := line.queued()) is not None:
            self._unnamed.remove(line)
            self._lines[str(hello["name"])] = line

    def _drop_line(self, name: str) -> None:
        line = self._lines.pop(name, None)
        if line is not None:
            line.close()

    def _check_alive(self) -> None:
        for name, child in self._children.items():
            if name not in self._released and child.poll() is not None:
                self._released.add(name)
                raise ChildFailed(name, f"ended with status {child.returncode}", self.log_tail(name))

    def log_tail(self, name: str) -> str:
        # A rank's output ends in the log of the `mpirun` that started it: "mpi.0" -> "mpi".
        for stem in (name, name.split(".")[0]):
            path = self.directory / f"{stem}.log"
            if path.exists():
                return path.read_bytes()[-_LOG_TAIL_BYTES:].decode(errors="replace").strip()
        return ""


def free_port() -> int:
    """A TCP port of loopback that is free now, and not an ephemeral one, which any connection may take at any time."""
    while True:
        port = random.randrange(10_000, 20_000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def die_with_parent(parent: int | None = None) -> None:
    """From now on the kernel kills this process when its parent dies. `parent` closes the race with a death before."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if parent is not None and os.getppid() != parent:
        os._exit(1)


def _signal_group(child: "subprocess.Popen[bytes]", number: signal.Signals) -> None:
    if child.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, number)


def _exit_on_sigterm(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


def _become(arguments: Sequence[str]) -> None:
    """The script half: bind this process to its parent's life, then become the command."""
    parent, *command = arguments
    die_with_parent(int(parent))
    os.execvp(command[0], command)


if __name__ == "__main__":
    _become(sys.argv[1:])
