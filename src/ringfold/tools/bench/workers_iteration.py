"""One rank of the iteration benchmark: `workers_iteration.py LINE NAME STORE RANK WORLD`, told what to do on its line.

This file is run by path, without its package, to keep a rank's start short.
"""

import os
import sys

import ringfold as rf
from ringfold.runtime import threads
from ringfold.runtime.clock import monotonic_ns, process_cpu_ns
from ringfold.tools.spawn import Line, LineClosed, Message

WAIT_S = 240.0


def main(arguments: list[str]) -> None:
    address, name, store, rank, world = arguments
    line = Line.dial(address, name)
    try:
        live(line, store, int(rank), int(world))
    except LineClosed:
        os._exit(0)
    except Exception as error:
        line.send({"error": f"{type(error).__name__}: {error}"})
        raise


def live(line: Line, store: str, rank: int, world: int) -> None:
    """Begin with all others, then do what the parent says."""
    with rf.GlobalIteration(store, rank, world, min_ranks=world, timeout_s=WAIT_S) as iteration:
        line.send({"first": iteration.next()})
        while True:
            order = line.receive()
            assert order is not None
            line.send(agree(iteration, order["count"]) if order["what"] == "agree" else wait(iteration, order["s"]))


def agree(iteration: rf.GlobalIteration, count: int) -> Message:
    """So many iterations with nothing to do in them: when each was asked for, and when it was there."""
    called, returned, numbers = [], [], []
    for _ in range(count):
        called.append(monotonic_ns())
        numbers.append(iteration.next())
        returned.append(monotonic_ns())
    return {"called": called, "returned": returned, "numbers": numbers}


def wait(iteration: rf.GlobalIteration, seconds: float) -> Message:
    """One iteration that rank 0 does not finish for a while: the share of one core that waiting takes."""
    if iteration.rank == 0:
        threads.Event().wait(seconds)
        iteration.next()
        return {}
    began, began_cpu = monotonic_ns(), process_cpu_ns()
    iteration.next()
    return {"cpu_share": (process_cpu_ns() - began_cpu) / (monotonic_ns() - began)}


if __name__ == "__main__":
    main(sys.argv[1:])
