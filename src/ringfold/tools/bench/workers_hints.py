"""Writers of hints that are killed again and again: `workers_hints.py LINE NAME FILE SLOTS GENERATION`.

This file is run by path, without its package, to keep its start short. Each writer is a forked child that takes the
file over and publishes without pause; it lives for some milliseconds.
"""

import os
import signal
import sys

from ringfold import _native, _native_testing
from ringfold.tools.spawn import Line, die_with_parent

LIVES_S = 0.02
STALE_NS = 60_000_000_000


def main(arguments: list[str]) -> None:
    address, name, path, slots, generation = arguments
    line = Line.dial(address, name)
    kills = 0
    while True:
        child = _writer(path, int(slots), int(generation))
        if not kills:
            line.send({"ready": True})
        order = line.receive(LIVES_S)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        kills += 1
        if order is not None:
            line.send({"kills": kills})
            return


def _writer(path: str, slots: int, generation: int) -> int:
    parent = os.getpid()
    child = os.fork()
    if child:
        return child
    try:
        die_with_parent(parent)
        writer = _native.HintWriter(path, STALE_NS, 0o600)
        for slot in range(slots):
            writer.open(slot, generation)
        _native_testing.hammer_hint_writes(writer, slots, 0)
    finally:
        os._exit(1)


if __name__ == "__main__":
    main(sys.argv[1:])
