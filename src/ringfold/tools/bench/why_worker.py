"""The peers of `ringfold bench why`: `why_worker.py ADDRESS NAME ARGUMENT...`.

A peer trains nothing, in steps as of a real loop: it waits for a loader, computes, and reduces gradients.
"""

import os
import sys
from contextlib import suppress

import numpy as np

import ringfold as rf
from ringfold.runtime.clock import thread_cpu_ns
from ringfold.runtime.threads import pause
from ringfold.tools.cluster import Channel, ChannelClosed
from ringfold.units import MS


def peer(
    channel: Channel,
    where: str,
    world: int,
    steps: int,
    size: int,
    compute_ms: float,
    loader_ms: float,
    model_ms: float,
    core: int,
) -> None:
    """Run the steps; `core` is the one that this process may use (-1: any)."""
    if core >= 0:
        os.sched_setaffinity(0, {core})
    gradients, weights = np.ones(size // 4, np.float32), np.zeros(16, np.float32)
    with rf.join(where) as run:
        channel.send({"peer": run.peer_id})
        state = rf.SharedState(weights=weights)
        for step in run.steps(state, until=steps, min_world=world):
            pause(loader_ms / 1_000)
            _burn(compute_ms + model_ms)
            step.all_reduce(gradients, op="avg")
            weights += 1
    channel.send({"done": True})
    with suppress(ChannelClosed):
        channel.receive()  # its end would be taken for a failure


def _burn(milliseconds: float) -> None:
    """So much CPU time, however long that takes."""
    until = thread_cpu_ns() + int(milliseconds * MS)
    while thread_cpu_ns() < until:
        pass


def main(arguments: list[str]) -> None:
    address, name, where, world, steps, size, *numbers, core = arguments
    compute_ms, loader_ms, model_ms = map(float, numbers)
    channel = Channel.connect(address, name)
    peer(channel, where, int(world), int(steps), int(size), compute_ms, loader_ms, model_ms, int(core))


if __name__ == "__main__":
    main(sys.argv[1:])
