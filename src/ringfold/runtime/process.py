"""How a long-running command is told to stop: SIGTERM and Ctrl-C become a call on its event loop.

And how a server inside somebody else's program is: there, the signals also keep the meaning they had.
"""

import asyncio
import gc
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

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


def keep_what_is_there() -> None:
    """Tell the garbage collector that what there is now, modules for the most part, stays: it need not look again.

    For processes that are waited for. With NumPy loaded, a full collection is a pause of 15 ms; after this, one of
    0.2 ms.
    """
    gc.collect()
    gc.freeze()
