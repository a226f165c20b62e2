"""The clock: integer nanoseconds, monotonic, the only one that decisions see. And clocks that measure: the raw one that
probes are stamped by, and a thread's use of the CPU."""

import time


def monotonic_ns() -> int:
    return time.monotonic_ns()


def unix_ns() -> int:
    """The wall clock, which others may set: only to compare with what other machines wrote down."""
    return time.time_ns()


def raw_ns() -> int:
    """CLOCK_MONOTONIC_RAW: nobody steers it, so it runs straight. Where there is none, the monotonic clock."""
    return time.clock_gettime_ns(_RAW)


_RAW = getattr(time, "CLOCK_MONOTONIC_RAW", time.CLOCK_MONOTONIC)


def thread_cpu_ns() -> int:
    """How long the calling thread has run so far; time in which others had the core does not count."""
    return time.thread_time_ns()


def process_cpu_ns() -> int:
    """How long all threads of this process have run so far, together."""
    return time.process_time_ns()
