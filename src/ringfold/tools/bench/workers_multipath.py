"""One side of `ringfold bench multipath`: `workers_multipath.py WHAT LINE NAME ...`.

`ringfold LINE NAME MASTER ADDRESSES` is a peer whose addresses are its paths. `streams LINE NAME NUMBER MINE THEIRS
KIND` is one end of plain TCP streams, one per path, or of an MPTCP connection (kind `mptcp`); the side with number 0
listens. Each does what its line tells it. This file is run by path, without its package, to keep the start short.
"""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

import ringfold as rf
from ringfold.peer.engine import CAPPED, Engine
from ringfold.runtime import threads
from ringfold.runtime.clock import monotonic_ns
from ringfold.tools import streams
from ringfold.tools.spawn import Line, LineClosed, Message

PORT = 5_201
WHOLE = 65_535
CONGESTION = {"tcp": "cubic", "mptcp": "cubic", "host": ""}
"""The control of plain streams by their kind; another kind is the name of one."""


def main(arguments: list[str]) -> None:
    what, address, name, *rest = arguments
    line = Line.dial(address, name)
    try:
        (peer if what == "ringfold" else plain)(line, *rest)
    except LineClosed:
        os._exit(0)
    except Exception as error:
        line.send({"error": f"{type(error).__name__}: {error}"})
        raise


def peer(line: Line, master: str, addresses: str) -> None:
    run = rf.join(master, advertise=addresses.split(","))
    while run.group_size < 2:
        run.update_topology(min_world=2)
    engine = run._session.engine
    neighbour = next(other for _, outgoing, other, _ in engine.lanes() if outgoing)
    line.send({"ready": True})
    buffer = np.zeros(1, np.float32)
    while (order := line.receive()) is not None:
        if order["do"] == "shares":  # none: pull again
            shares = [int(share * WHOLE) for share in order["shares"]]
            engine.set_path_shares(neighbour, shares, CAPPED if order.get("capped", True) else 0)
            line.send({"done": True})
            continue
        if buffer.nbytes != order["size_bytes"]:
            buffer = np.zeros(order["size_bytes"] // 4, np.float32)
        buffer[:] = np.arange(buffer.size, dtype=np.float32) % 251
        before, was = engine.stats(), engine.path_bytes(True)
        run.barrier()
        line.send({"began_ns": monotonic_ns()})
        began = monotonic_ns()
        with watching(engine, on=order["do"] == "watch") as given:
            info = run.all_reduce(buffer, op="sum", timeout_s=60)
        took = monotonic_ns() - began
        right = bool((buffer == (np.arange(buffer.size, dtype=np.float32) % 251) * 2).all())
        after, now = engine.stats(), engine.path_bytes(True)
        line.send(
            {
                "took_ns": took,
                "right": right and len(info.contributors) == 2,
                "epoch": info.epoch,
                "path_bytes": [new - old for new, old in zip(now, was, strict=True)],
                "lanes": len(engine.lanes()),
                "given_ns": given,
                **{key: after[key] - before[key] for key in ("reissued", "lanes_lost", "aborted")},
            }
        )


@contextmanager
def watching(engine: Engine, *, on: bool) -> Iterator[list[int]]:
    """When path 1 was given payload to send, looked at a few thousand times a second."""
    given: list[int] = []
    if not on:
        yield given
        return
    over = threads.Event()

    def look() -> None:
        last = engine.path_bytes(True)[1]
        while not over.wait(0.0002):
            if (now := engine.path_bytes(True)[1]) != last:
                last = now
                given.append(monotonic_ns())

    thread = threads.start("watching", look)
    try:
        yield given
    finally:
        over.set()
        thread.join()


def plain(line: Line, number: str, mine: str, theirs: str, kind: str) -> None:
    is_mptcp, congestion = kind == "mptcp", CONGESTION.get(kind, kind)
    if number == "0":
        with streams.listening(mine.split(","), PORT, mptcp=is_mptcp) as listeners:
            line.send({"ready": True})
            made = streams.accepted(listeners, congestion=congestion)
    else:
        line.send({"ready": True})
        _order(line)
        made = streams.connected(mine.split(","), theirs.split(","), PORT, mptcp=is_mptcp, congestion=congestion)
    while (order := line.receive()) is not None:
        if order["do"] == "saturate":
            line.send({"rates": streams.saturate(made, order["settle_s"], order["seconds"])})
        else:
            line.send({"took_ns": streams.exchange(made[0], order["size_bytes"])})


def _order(line: Line) -> Message:
    order = line.receive()
    assert order is not None
    return order


if __name__ == "__main__":
    main(sys.argv[1:])
