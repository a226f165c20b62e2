"""One rank of the soak: `python -m ringfold.tools.soak.rank ADDRESS NAME STORE RANK WORLD LOG`.

What it is handed it writes to its log at once, in one write, so that whatever was handed out before it is killed can be
judged afterwards (see `iterations.py`). All lives of a rank share one log.

A wait ends every now and then, as `next` allows: it continues by calling again, and receives from the parent meanwhile.
SIGUSR1 writes the stacks of all threads to the process's output: the parent sends it to a process that hangs.
"""

import faulthandler
import os
import signal
import sys

import msgspec

import ringfold as rf
from ringfold.runtime import threads
from ringfold.runtime.clock import monotonic_ns
from ringfold.tools.cluster import Channel, ChannelClosed

HEARTBEAT_S = 1.0
INACTIVE_S = 4.0
MIN_RANKS = 2
TURN_S = 2.0
"""How long one call waits."""
WORK_S = 0.02
"""What takes the place of training."""
REPORT_NS = 100_000_000


class IterationEntry(msgspec.Struct, frozen=True):
    """An iteration that was handed to a rank, with what the store had about it."""

    iteration: int
    incarnation: str
    fence: int
    members: tuple[int, ...]
    missed: int
    is_winner: bool


def main(arguments: list[str]) -> None:
    address, name, store, rank, world, log = arguments
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    channel = Channel.connect(address, name)
    try:
        with open(log, "ab", buffering=0) as book:
            live(channel, store, int(rank), int(world), book.fileno())
    except ChannelClosed:
        os._exit(0)
    except Exception as error:
        channel.send({"error": f"{type(error).__name__}: {error}"})
        raise


def live(channel: Channel, store: str, rank: int, world: int, book: int) -> None:
    """Iterate until the parent sends a stop, or another process takes the rank over."""
    opened = rf.GlobalIteration(
        store, rank, world, heartbeat_s=HEARTBEAT_S, inactive_after_s=INACTIVE_S, min_ranks=min(MIN_RANKS, world)
    )
    last_ns, is_superseded = 0, False
    with opened as iteration:
        while (order := channel.receive(0)) is None or order["what"] != "stop":
            try:
                number = iteration.next(TURN_S)
            except (rf.DeadlineExceeded, rf.StoreUnreachable):
                continue
            except rf.Superseded:
                is_superseded = True
                break
            entry = IterationEntry(
                number,
                iteration.incarnation,
                iteration.fence,
                iteration.members,
                iteration.missed,
                iteration.is_winner,
            )
            os.write(book, msgspec.json.encode(entry) + b"\n")
            if monotonic_ns() - last_ns > REPORT_NS:
                last_ns = monotonic_ns()
                channel.send({"what": "step", "number": number, "members": len(iteration.members)})
            threads.Event().wait(WORK_S)
    channel.send({"what": "ended", "superseded": is_superseded})


if __name__ == "__main__":
    main(sys.argv[1:])
