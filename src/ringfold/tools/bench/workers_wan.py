"""One peer of `ringfold bench wan`: `workers_wan.py LINE NAME MASTER ADDRESS`.

It does what its line tells it: one large op (`large`), or many small ones back to back (`small`). This file is run by
path, without its package, to keep the start short.
"""

import os
import sys

import numpy as np

import ringfold as rf
from ringfold.runtime.clock import monotonic_ns
from ringfold.tools.spawn import Line, LineClosed, Message

OP_S = 120.0


def main(arguments: list[str]) -> None:
    address, name, master, mine = arguments
    line = Line.dial(address, name)
    try:
        serve(line, master, mine)
    except LineClosed:
        os._exit(0)
    except Exception as error:
        line.send({"error": f"{type(error).__name__}: {error}"})
        raise


def serve(line: Line, master: str, mine: str) -> None:
    run = rf.join(master, advertise=[mine])
    while run.group_size < 2:
        run.update_topology(min_world=2)
    line.send({"lanes": sum(outgoing for _, outgoing, _, _ in run._session.engine.lanes())})
    while (order := line.receive()) is not None:
        line.send((large if order["do"] == "large" else small)(run, order))


def large(run: rf.Communicator, order: Message) -> Message:
    """One op that both sides begin together, as nearly as a barrier can say."""
    expected = np.arange(order["size_bytes"] // 4, dtype=np.float32) % 251
    buffer = expected.copy()
    expected *= 2
    before = run._session.engine.stats()
    run.barrier()
    began = monotonic_ns()
    info = run.all_reduce(buffer, op="sum", timeout_s=OP_S)
    took = monotonic_ns() - began
    after = run._session.engine.stats()
    right = len(info.contributors) == 2 and bool((buffer == expected).all())
    counts = {key: after[key] - before[key] for key in ("reissued", "lanes_lost", "aborted")}
    return {"took_ns": [took], "right": right, **counts}


def small(run: rf.Communicator, order: Message) -> Message:
    """Ops back to back: each begins here when the one before is known to be done everywhere."""
    buffer = np.zeros(order["size_bytes"] // 4, np.float32)
    took, right = [], True
    for number in range(order["count"]):
        buffer[:] = number
        began = monotonic_ns()
        run.all_reduce(buffer, op="sum", timeout_s=OP_S)
        took.append(monotonic_ns() - began)
        right = right and bool((buffer == 2 * number).all())
    return {"took_ns": took, "right": right, "aborted": 0}


if __name__ == "__main__":
    main(sys.argv[1:])
