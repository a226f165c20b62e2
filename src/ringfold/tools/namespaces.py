"""Network namespaces: whether this process may make them, a builder that leaves none behind, and commands in them.

A namespace that we make is called `PREFIX-PID-NUMBER-HOST`: PID is the process that removes it. A process that was
killed cannot clean up, so the next one that makes namespaces first removes those of processes that no longer exist,
with everything that still runs inside them. Interfaces, addresses and shapers live in the namespaces and end with them.

`Namespaces` is the builder of every network of this package: hosts around a bridge (`shaped.py`) and hosts with several
paths (`lab/network.py`).
"""

import contextlib
import ctypes
import itertools
import os
import shutil
import signal
import subprocess
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from ringfold.runtime.process import term_is_exit

_NAMES = Path("/run/netns")
_CAPABILITIES = 1 << 21 | 1 << 12
_CLONE_NEWNET = 0x40000000
_numbers = itertools.count()


class ShapingFailed(OSError):
    """A namespace, a link or a shaper could not be made. The text is the command and its error."""


def missing(tools: Sequence[str] = ("ip", "tc")) -> str | None:
    """Why namespaces cannot be made here, or None when they can (as far as one can tell without making one)."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    for text in Path("/proc/self/status").read_text().splitlines():
        if text.startswith("CapEff:") and int(text.split()[1], 16) & _CAPABILITIES != _CAPABILITIES:
            return "network namespaces need CAP_SYS_ADMIN and CAP_NET_ADMIN, which this root does not have"
    absent = [name for name in tools if shutil.which(name) is None]
    return f"{' and '.join(absent)} not found (apt install iproute2)" if absent else None


class Namespaces:
    """The namespaces of one network, by host, as a context. Leaving it removes all of them."""

    def __init__(self, prefix: str) -> None:
        self._kind, self._prefix = prefix, f"{prefix}-{os.getpid()}-{next(_numbers)}"
        self._made: list[str] = []
        self._guard = contextlib.ExitStack()
        self.removed: list[str] = []
        """The names of what earlier processes had left behind, removed when this was entered."""

    def __enter__(self) -> Self:
        self._guard.enter_context(term_is_exit())
        self.removed = remove_orphans(self._kind)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.close()
        finally:
            self._guard.close()

    def name(self, host: str) -> str:
        """The name of a host's namespace."""
        return f"{self._prefix}-{host}"

    def add(self, host: str) -> str:
        """Make the namespace of a host, with its loopback up; the name."""
        space = self.name(host)
        # Noted first: an interrupt after the command must not leave it behind.
        self._made.append(space)
        run_command("ip", "netns", "add", space)
        run_command("ip", "-n", space, "link", "set", "lo", "up")
        return space

    def inside(self, host: str, command: Sequence[str] = ()) -> list[str]:
        """The command line that runs `command` on a host, or its prefix. Process and session stay the same."""
        return ["ip", "netns", "exec", self.name(host), *command]

    def within(self, host: str) -> contextlib.AbstractContextManager[None]:
        """The calling thread moves to a host: sockets that it makes belong there. Other threads stay where they are."""
        return _within(self.name(host))

    def kill_processes(self) -> None:
        """SIGKILL everything that runs in the namespaces, except this process."""
        for space in self._made:
            _kill_inside(space)

    def close(self) -> None:
        """Remove all namespaces. Safe to call twice. Processes inside keep a nameless one until they end."""
        while self._made:
            _remove(self._made.pop())


class CommandBatch:
    """Lines for `ip`, `tc` and `bridge`, run together: one process per tool and namespace, all at once.

    A rate that changes for eight hosts concerns nine namespaces. One after the other that takes a tenth of a second
    on a busy machine, in which some hosts have the new rate and some the old one. The lines of one tool in one
    namespace keep their order.
    """

    def __init__(self) -> None:
        self._lines: dict[tuple[str, str], list[str]] = {}

    def add(self, tool: str, space: str, *lines: str) -> None:
        """Add lines, to be run later."""
        self._lines.setdefault((tool, space), []).extend(lines)

    def extend(self, tool: str, space: str, lines: Iterable[str]) -> None:
        self.add(tool, space, *lines)

    def run(self) -> None:
        """Run all that was added. When one fails, the others are run all the same; then the failure is raised."""
        batches = [(words, "\n".join(lines) + "\n") for words, lines in self._lines.items() if lines]
        self._lines.clear()
        begun = [
            subprocess.Popen(
                [tool, "-n", space, "-batch", "-"],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
            )
            for (tool, space), _ in batches
        ]
        failures = []
        for child, ((tool, space), text) in zip(begun, batches, strict=True):
            _, errors = child.communicate(text)
            if child.returncode != 0:
                failures.append(f"{tool} -n {space}: {errors.strip()}\nin: {text}")
        if failures:
            raise ShapingFailed("".join(failures))


def run_command(*words: str) -> str:
    """Run a command to its end; its output. A failure raises `ShapingFailed` with its error text."""
    ran = subprocess.run(words, capture_output=True, text=True, check=False)
    if ran.returncode != 0:
        raise ShapingFailed(f"{' '.join(words)}: {ran.stderr.strip()}")
    return ran.stdout


def remove_orphans(prefix: str) -> list[str]:
    """Remove the namespaces of processes that no longer exist, and what runs inside them; the names."""
    gone = []
    for name in sorted(path.name for path in _NAMES.glob(f"{prefix}-*")) if _NAMES.is_dir() else []:
        pid = name.removeprefix(f"{prefix}-").split("-")[0]
        if pid.isdigit() and not Path("/proc", pid).exists():
            _kill_inside(name)
            _remove(name)
            gone.append(name)
    return gone


def _remove(space: str) -> None:
    subprocess.run(["ip", "netns", "del", space], check=False, capture_output=True)


def _kill_inside(space: str) -> None:
    ran = subprocess.run(["ip", "netns", "pids", space], check=False, capture_output=True, text=True)
    for pid in map(int, ran.stdout.split()):
        if pid != os.getpid():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


@contextlib.contextmanager
def _within(space: str) -> Iterator[None]:
    with open("/proc/thread-self/ns/net", "rb") as home, (_NAMES / space).open("rb") as away:
        _set_namespace(away.fileno())
        try:
            yield
        finally:
            _set_namespace(home.fileno())


def _set_namespace(descriptor: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(descriptor, _CLONE_NEWNET) != 0:
        number = ctypes.get_errno()
        raise ShapingFailed(number, f"setns: {os.strerror(number)}")
