"""This process and its children: stop signals, forks, scheduling, limits, its identity, and subprocesses.

Two kinds of programs handle SIGTERM and Ctrl-C here. A command of this package turns them into a call on its event loop
(`stop_signals`). A server inside another program also keeps the effect that the signals had before
(`stop_at_signals`).
"""

import contextlib
import ctypes
import gc
import importlib.util
import os
import pwd
import resource
import signal
import struct
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

# asyncio is imported by the functions that need it: it is slow to import, and stores and iterations run without it.

MAX_OPEN_FILES = 1 << 19
_STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_SUBPROCESS_NICE = 19
_close_on_fork: set[int] = set()

# Stop signals


@contextmanager
def stop_signals(stop: Callable[[str], None]) -> Iterator[None]:
    """Inside, SIGTERM and Ctrl-C call `stop` with the signal's name, on the running event loop, and end nothing.

    A second signal is handled like the first: a second Ctrl-C does not interrupt a clean shutdown.
    """
    import asyncio

    loop = asyncio.get_running_loop()
    for number in _STOP_SIGNALS:
        loop.add_signal_handler(number, stop, number.name)
    try:
        yield
    finally:
        for number in _STOP_SIGNALS:
            loop.remove_signal_handler(number)


@contextmanager
def term_is_exit() -> Iterator[None]:
    """Inside, SIGTERM raises SystemExit, so that `kill` cleans up as Ctrl-C does. No effect outside the main thread."""

    def leave(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    try:
        before = signal.signal(signal.SIGTERM, leave)
    except ValueError:  # not the main thread
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def signals_end_at_once() -> Iterator[None]:
    """Inside, SIGTERM and Ctrl-C end the process at once: for waits in foreign code that cannot be interrupted."""
    try:
        before = [signal.signal(number, signal.SIG_DFL) for number in _STOP_SIGNALS]
    except ValueError:  # not the main thread
        yield
        return
    try:
        yield
    finally:
        for number, handler in zip(_STOP_SIGNALS, before, strict=True):
            signal.signal(number, handler)


def stop_at_signals(stop: Callable[[], None], is_waiting: Callable[[], bool]) -> None:
    """From now on SIGINT and SIGTERM call `stop`, and then end the program as they did before.

    While the program only waits for what `stop` ends (`is_waiting`), they only call `stop`: the program then ends by
    itself. A handler that the program has installed stays. Outside the main thread nothing is changed. `stop` is called
    inside a signal handler, so it must not take locks.
    """

    def handle(number: int, frame: FrameType | None) -> None:
        stop()
        if is_waiting():
            return
        if number == signal.SIGINT:
            signal.default_int_handler(number, frame)
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)

    for number, usual in ((signal.SIGINT, signal.default_int_handler), (signal.SIGTERM, signal.SIG_DFL)):
        if signal.getsignal(number) == usual:
            try:
                signal.signal(number, handle)
            except ValueError:  # not the main thread
                return


# Forks


def close_on_fork(fd: int) -> None:
    """Close this descriptor in forked children: a child that outlives its parent must not keep its connections open."""
    _close_on_fork.add(fd)


def keep_on_fork(fd: int) -> None:
    """Undo `close_on_fork`, before the descriptor is closed and its number is used again."""
    _close_on_fork.discard(fd)


def _close_in_child() -> None:
    # The descriptors are replaced by /dev/null, not closed: objects that the child inherited will close them again.
    if not _close_on_fork:
        return
    null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    for fd in _close_on_fork:
        os.dup2(null, fd, inheritable=False)
    os.close(null)
    _close_on_fork.clear()


os.register_at_fork(after_in_child=_close_in_child)


# Scheduling and limits


def request_prompt_scheduling(nice: int = -10) -> None:
    """Request short time slices and a better nice value: for a process that does little work and that others wait for.

    A slice of 0.3 ms instead of some milliseconds needs Linux 6.12 and no privilege. A better nice value needs a
    privilege. Both are requested; a request that the kernel denies has no effect.
    """
    with contextlib.suppress(OSError, AttributeError):
        os.setpriority(os.PRIO_PROCESS, 0, nice)
    number = {"x86_64": 314, "aarch64": 274}.get(os.uname().machine)
    if sys.platform != "linux" or number is None:
        return
    # size, policy (SCHED_OTHER), flags, nice, priority, runtime, deadline, period
    attributes = struct.pack("=IIQiIQQQ", 48, 0, 0, os.getpriority(os.PRIO_PROCESS, 0), 0, 300_000, 0, 0)
    ctypes.CDLL(None).syscall(number, 0, attributes, 0)


def raise_open_file_limit() -> int:
    """Raise the soft limit of open files to the hard limit, at most MAX_OPEN_FILES; return the limit.

    Services start with 1,024 by default, and a server has a file for each connection.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = MAX_OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < limit:
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
        return limit
    return MAX_OPEN_FILES if soft == resource.RLIM_INFINITY else soft


def freeze_garbage_collector() -> None:
    """Exempt all objects of now, mostly modules, from later garbage collections.

    For processes that others wait for. With NumPy loaded, a full collection takes 15 ms; after this, 0.2 ms.
    """
    gc.collect()
    gc.freeze()


# Identity


def user_name() -> str:
    """The user that runs this process, by name if the machine has a name for it."""
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        return f"user {os.getuid()}"


def process_identity() -> str:
    """An identifier of this process, unique among all processes that this machine has ever run."""
    return _identity_of(os.getpid())


def is_process_gone(identity: str) -> bool:
    """Whether the process with this identity has certainly ended. False for processes of other machines."""
    where, _, number = identity.partition("#")
    if where != _where() or not number.split("@")[0].isdigit():
        return False
    return _identity_of(int(number.split("@")[0])) != identity


def _identity_of(pid: int) -> str:
    return f"{_where()}#{pid}@{_started(pid)}"


def _where() -> str:
    """The boot and the PID namespace: within these, a PID means one process at a time."""
    try:
        return f"{boot_id()}/{Path('/proc/self/ns/pid').readlink()}"
    except OSError:
        return "unknown"


def boot_id() -> str:
    """What the kernel calls this boot of this machine; empty if it does not say."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return ""


def _started(pid: int) -> str:
    """When a process was started, in ticks since the boot; empty if there is none, or only a zombie."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] in "ZX" else fields[19]


class RunQueueClock:
    """For how long the calling thread was ready to run and had no core, since this was made."""

    def __init__(self) -> None:
        self._began_ns = _queued_ns()

    def elapsed_ns(self) -> int:
        """To be called by the same thread."""
        return max(0, _queued_ns() - self._began_ns)


def _queued_ns() -> int:
    """The second figure of schedstat; 0 where the kernel does not count it."""
    try:
        return int(Path("/proc/thread-self/schedstat").read_bytes().split()[1])
    except (OSError, IndexError, ValueError):
        return 0


# Subprocesses


def guardian_program() -> str | None:
    """The program of a peer's guardian, which is installed beside the native module; None if it is not there."""
    module = importlib.util.find_spec("ringfold._native")
    if module is None or module.origin is None:
        return None
    program = os.path.join(os.path.dirname(module.origin), "ringfold-guardian")
    return program if os.access(program, os.X_OK) else None


async def run_in_subprocess(module: str, request: bytes, timeout_s: float) -> bytes | None:
    """What `python -m module` writes to standard output for this input; None if it failed or exceeded `timeout_s`.

    It runs at the lowest priority and in a session of its own, so that Ctrl-C in this terminal does not reach it. It
    never outlives this call: cancelling the call kills the process.
    """
    import asyncio

    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        module,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, process.pid, _SUBPROCESS_NICE)
        async with asyncio.timeout(timeout_s):
            output, _ = await process.communicate(request)
    except TimeoutError:
        return None
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    return output if process.returncode == 0 else None
