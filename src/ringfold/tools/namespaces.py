"""Network namespaces by name: whether this process may make them, how to enter one, and how none is left behind.

A namespace that we make is called `PREFIX-PID-...`: PID is the process that answers for it. One that was killed
outright cannot tidy up, so whoever makes namespaces next first sweeps away those of processes that are no more, with
everything that still runs inside them. Interfaces, addresses and shapers live in the namespaces and end with them.
"""

import contextlib
import ctypes
import os
import shutil
import signal
import subprocess
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

_NAMES = Path("/run/netns")
_CAPABILITIES = 1 << 21 | 1 << 12
_CLONE_NEWNET = 0x40000000


class ShapingFailed(OSError):
    """A namespace, a link or a shaper could not be made. The text is the command and what it said."""


def missing(tools: Sequence[str] = ("ip", "tc")) -> str | None:
    """Why namespaces cannot be made here, or None when they can (as far as one can tell without making one)."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    for text in Path("/proc/self/status").read_text().splitlines():
        if text.startswith("CapEff:") and int(text.split()[1], 16) & _CAPABILITIES != _CAPABILITIES:
            return "network namespaces need CAP_SYS_ADMIN and CAP_NET_ADMIN, which this root does not have"
    absent = [name for name in tools if shutil.which(name) is None]
    return f"{' and '.join(absent)} not found (apt install iproute2)" if absent else None


def command(*words: str, text: str | None = None) -> str:
    """Run a command to its end, `text` on its standard input; its output. One that fails raises what it said."""
    ran = subprocess.run(words, input=text, capture_output=True, text=True, check=False)
    if ran.returncode != 0:
        raise ShapingFailed(f"{' '.join(words)}: {ran.stderr.strip()}")
    return ran.stdout


def inside(space: str, words: Sequence[str]) -> list[str]:
    """The command that runs `words` in a namespace. It becomes the command: same process, same session."""
    return ["ip", "netns", "exec", space, *words]


@contextlib.contextmanager
def within(space: str) -> Iterator[None]:
    """The calling thread moves to a namespace: sockets that it makes belong there. Other threads stay put."""
    with open("/proc/thread-self/ns/net", "rb") as home, (_NAMES / space).open("rb") as away:
        _set_namespace(away.fileno())
        try:
            yield
        finally:
            _set_namespace(home.fileno())


def remove(space: str) -> None:
    """Remove a namespace if it is there. Processes inside keep a nameless rest of it until they end."""
    subprocess.run(["ip", "netns", "del", space], check=False, capture_output=True)


def end_inside(space: str) -> None:
    """SIGKILL every process that runs in a namespace, except this one."""
    ran = subprocess.run(["ip", "netns", "pids", space], check=False, capture_output=True, text=True)
    for pid in map(int, ran.stdout.split()):
        if pid != os.getpid():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def sweep(prefix: str) -> list[str]:
    """Remove the namespaces of processes that no longer exist, and what runs inside them; the names."""
    gone = []
    for name in sorted(path.name for path in _NAMES.glob(f"{prefix}-*")) if _NAMES.is_dir() else []:
        pid = name.removeprefix(f"{prefix}-").split("-")[0]
        if pid.isdigit() and not Path("/proc", pid).exists():
            end_inside(name)
            remove(name)
            gone.append(name)
    return gone


def _set_namespace(descriptor: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(descriptor, _CLONE_NEWNET) != 0:
        number = ctypes.get_errno()
        raise ShapingFailed(number, f"setns: {os.strerror(number)}")


class Orders:
    """Lines for `ip`, `tc` and `bridge`, by namespace. Those of one tool in one namespace keep their order."""

    def __init__(self) -> None:
        self._lines: dict[tuple[str, str], list[str]] = {}

    def add(self, tool: str, space: str, *lines: str) -> None:
        """More lines, for later."""
        self._lines.setdefault((tool, space), []).extend(lines)

    def extend(self, tool: str, space: str, lines: Iterable[str]) -> None:
        self.add(tool, space, *lines)

    def carry_out(self) -> None:
        """All that was collected. When one fails, the others are carried out all the same; then it is raised."""
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
