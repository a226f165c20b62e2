"""How a long-running command is told to stop: SIGTERM and Ctrl-C become a call on its event loop."""

import asyncio
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager

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
