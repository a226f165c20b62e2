"""How a long-running command is told to stop: SIGTERM and Ctrl-C become a call on its event loop.

And how a server inside somebody else's program is: there, the signals also keep the meaning they had. Besides: whether
a process that left its mark somewhere still lives.
"""

import asyncio
import contextlib
import ctypes
import gc
import os
import resource
import signal
import struct
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

_MOST_FILES = 1 << 19
_STOPPING = (signal.SIGTERM, signal.SIGINT)


@contextmanager
def stop_signals(stop: Callable[[str], None]) -> Iterator[None]:
    """Inside, SIGTERM and Ctrl-C call `stop` with the signal's name, on the running event loop, and end nothing.

    A second signal is handled like the first, so an impatient Ctrl-C does not cut a clean end short.
    """
    loop = asyncio.get_running_loop()
    for number in _STOPPING:
        loop.add_signal_handler(number, stop, number.name)
    try:
        yield
    finally:
        for number in _STOPPING:
            loop.remove_signal_handler(number)


@contextmanager
def term_is_exit() -> Iterator[None]:
    """Inside, SIGTERM raises SystemExit: a plain kill tidies up as Ctrl-C does. Only the main thread can have it so."""

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
    """Inside, SIGTERM and Ctrl-C end the process without a word: for waits in foreign code that heed nothing else."""
    try:
        before = [signal.signal(number, signal.SIG_DFL) for number in _STOPPING]
    except ValueError:  # not the main thread
        yield
        return
    try:
        yield
    finally:
        for number, handler in zip(_STOPPING, before, strict=True):
            signal.signal(number, handler)


def stop_at_signals(stop: Callable[[], None], is_waiting: Callable[[], bool]) -> None:
    """From now on SIGINT and SIGTERM call `stop`, and then end the program as they did before.

    While the program only waits for what `stop` ends (`is_waiting`), that is all: it ends well by itself. A handler of
    the program's own is left alone, and so is everything when this is not the main thread. `stop` is called inside a
    signal handler, so it must not take locks.
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


def be_prompt(nice: int = -10) -> None:
    """Ask the scheduler for short and prompt turns: for a process that does little, and is waited for.

    A turn of 0.3 ms instead of some milliseconds needs no right, and Linux 6.12. A better nice value needs one; both
    are asked for, and what is not given is done without.
    """
    with contextlib.suppress(OSError, AttributeError):
        os.setpriority(os.PRIO_PROCESS, 0, nice)
    number = {"x86_64": 314, "aarch64": 274}.get(os.uname().machine)
    if sys.platform != "linux" or number is None:
        return
    # size, policy (SCHED_OTHER), flags, nice, priority, runtime, deadline, period
    wish = struct.pack("=IIQiIQQQ", 48, 0, 0, os.getpriority(os.PRIO_PROCESS, 0), 0, 300_000, 0, 0)
    ctypes.CDLL(None).syscall(number, 0, wish, 0)


def allow_many_files() -> int:
    """Raise the limit of open files as far as it may be raised; what it is now.

    Services start with 1,024 by default, and a server has a file for each connection.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = _MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, _MOST_FILES)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
        return most
    return _MOST_FILES if soft == resource.RLIM_INFINITY else soft


def keep_what_is_there() -> None:
    """Tell the garbage collector that what there is now, modules for the most part, stays: it need not look again.

    For processes that are waited for. With NumPy loaded, a full collection is a pause of 15 ms; after this, one of
    0.2 ms.
    """
    gc.collect()
    gc.freeze()


def process_mark() -> str:
    """This process, told apart from every other one that this machine ever ran."""
    return _mark_of(os.getpid())


def process_of_mark_is_gone(mark: str) -> bool:
    """Whether the process with this mark has certainly ended. Of another machine's, nothing is certain."""
    where, _, number = mark.partition("#")
    if where != _where() or not number.split("@")[0].isdigit():
        return False
    return _mark_of(int(number.split("@")[0])) != mark


def _mark_of(pid: int) -> str:
    return f"{_where()}#{pid}@{_started(pid)}"


def _where() -> str:
    """The boot and the process namespace: in these a number is one process at a time."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot}/{Path('/proc/self/ns/pid').readlink()}"
    except OSError:
        return "unknown"


def _started(pid: int) -> str:
    """When a process was started, in ticks since the boot; empty if there is none, or only its remains."""
    try:
        words = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if words[0] in "ZX" else words[19]
