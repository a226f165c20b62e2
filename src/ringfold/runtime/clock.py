"""The clock: integer nanoseconds, monotonic, the only one that decisions see. And a thread's use of the CPU."""

import time


def monotonic_ns() -> int:
    return time.monotonic_ns()


def thread_cpu_ns() -> int:
    """How long the calling thread has run so far; time in which others had the core does not count."""
    return time.thread_time_ns()
