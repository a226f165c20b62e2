"""Clocks and random bytes: the two inputs that pure code never reads itself. Its shell puts them into events."""

import os
import time

_CLOCK_RAW = getattr(time, "CLOCK_MONOTONIC_RAW", time.CLOCK_MONOTONIC)


def monotonic_ns() -> int:
    """The clock that all decisions use."""
    return time.monotonic_ns()


def unix_ns() -> int:
    """The wall clock, which may be set at any time: use it only to compare with times that other machines recorded."""
    return time.time_ns()


def raw_ns() -> int:
    """CLOCK_MONOTONIC_RAW, which NTP does not slew: probes are stamped with it. CLOCK_MONOTONIC where it is absent."""
    return time.clock_gettime_ns(_CLOCK_RAW)


def thread_cpu_ns() -> int:
    """CPU time of the calling thread."""
    return time.thread_time_ns()


def process_cpu_ns() -> int:
    """CPU time of all threads of this process."""
    return time.process_time_ns()


def random_bytes(count: int) -> bytes:
    """Random bytes from the kernel, for nonces and secrets."""
    return os.urandom(count)
