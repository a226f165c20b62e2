"""The clock: integer nanoseconds, monotonic, the only one that decisions see."""

import time


def monotonic_ns() -> int:
    return time.monotonic_ns()
