"""One peer of the state benchmark: `workers_state.py LINE NAME MASTER BYTES HOLDERS`, told what to do on its line.

The parent says who holds the state and who lacks it; the peers meet in a barrier, sync, and report what it cost. This
file is run by path, without its package, to keep a peer's start short.
"""

import os
import sys

import numpy as np
import numpy.typing as npt

import ringfold as rf
from ringfold.runtime.clock import monotonic_ns
from ringfold.runtime.hardware import usable_cores
from ringfold.state.hashing import block_hashes
from ringfold.tools.spawn import Line, LineClosed, Message

Bytes = npt.NDArray[np.uint8]


def main(arguments: list[str]) -> None:
    address, name, where, size, holders = arguments
    line = Line.dial(address, name)
    try:
        live(line, where, int(size), int(holders))
    except LineClosed:
        os._exit(0)
    except Exception as error:
        line.send({"error": f"{type(error).__name__}: {error}"})
        raise


def live(line: Line, where: str, size: int, holders: int) -> None:
    """Join, then sync as often as the parent says. The state is random: zeros would be too easy for everybody."""
    content = np.random.default_rng(1).bytes(size)
    memory = np.frombuffer(bytearray(content), np.uint8)
    state = rf.SharedState(state=memory)
    run = rf.join(where)
    while run.group_size < holders + 1:
        run.update_topology(min_world=holders + 1)
    run.sync_shared_state(state)
    line.send({"peer": run.peer_id})
    while True:
        order = line.receive()
        assert order is not None
        if order["what"] == "hash":
            line.send(hash_rate(run, memory))
            continue
        spoil(memory, order["spoil"])
        reply = timed_sync(run, state)
        reply["is_whole"] = memory.tobytes() == content
        line.send(reply)


def timed_sync(run: rf.Communicator, state: rf.SharedState) -> Message:
    """One sync that all begin together."""
    run.barrier()
    began = monotonic_ns()
    info = run.sync_shared_state(state)
    took = monotonic_ns() - began
    return {"took_ns": took, "rx_bytes": info.rx_bytes, "tx_bytes": info.tx_bytes}


def hash_rate(run: rf.Communicator, memory: Bytes) -> Message:
    """Hash what a sync hashes, and as it does: all peers of the machine at once, each on all cores."""
    run.barrier()
    began = monotonic_ns()
    block_hashes(memory, "rf64")
    together = monotonic_ns() - began
    run.barrier()
    alone = 0
    if run.rank == 0:
        began = monotonic_ns()
        block_hashes(memory, "rf64", threads=1)
        alone = monotonic_ns() - began
    run.barrier()
    return {"together_ns": together, "alone_ns": alone, "cores": usable_cores()}


def spoil(memory: Bytes, how: str) -> None:
    """Make this peer lack everything, one block or nothing."""
    match how:
        case "everything":
            np.bitwise_xor(memory, np.uint8(0x5A), out=memory)
        case "one block":
            memory[memory.size // 2] ^= 0xFF


if __name__ == "__main__":
    main(sys.argv[1:])
