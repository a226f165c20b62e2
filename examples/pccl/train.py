"""A PCCL training loop with peers that come and go: `python examples/pccl/train.py [MASTER [STEPS]]`.

Start a master (`pccl_master`), then this program as often as you like. Kill some, start others: those that live go on,
and each newcomer gets the weights and the revision of the others. The model is a straight line through noisy points.

Only the import shows that this is not PCCL.
"""

import os
import sys
import time

import numpy as np

from ringfold.compat.pccl import (
    Attribute,
    Communicator,
    PCCLError,
    ReduceOp,
    Result,
    SharedState,
    TensorInfo,
)

FEATURES, BATCH = 64, 256
TRUTH = np.random.default_rng(0).normal(size=FEATURES).astype(np.float32)


def main(master: str = "127.0.0.1:48148", steps: str = "1000") -> None:
    weights, velocity = np.zeros(FEATURES, np.float32), np.zeros(FEATURES, np.float32)
    state = SharedState([TensorInfo.from_numpy(weights, "weights"), TensorInfo.from_numpy(velocity, "velocity")])
    batches = np.random.default_rng(os.getpid())
    peer = Communicator(master)
    peer.connect(n_attempts=15)

    is_new = True
    while state.revision < int(steps):
        # A peer that was just accepted does not call it: the peers that accepted it have called it, and continue.
        if not is_new and peer.are_peers_pending():
            peer.update_topology()
        is_new = False
        if peer.get_attribute(Attribute.GLOBAL_WORLD_SIZE) < 2:
            time.sleep(0.1)
            continue
        try:
            peer.sync_shared_state(state)
            grads, loss = gradients(weights, batches)
            world = average(peer, grads)
        except PCCLError as error:
            if error.result is Result.MASTER_CONNECTION_FAILED:
                raise
            continue  # left alone, or a peer was lost during the sync: nothing has changed here
        velocity *= 0.9
        velocity -= 0.02 * grads
        weights += velocity
        state.push_revision()
        if state.revision % 100 == 0:
            print(f"revision {state.revision}: loss {loss:.4f}, {world} peers", flush=True)

    print(f"trained: {np.abs(weights - TRUTH).max():.4f} away from the truth", flush=True)


def average(peer: Communicator, grads: np.ndarray) -> int:
    """All-reduce in place. An abort leaves the array as it was, so that the call may simply be repeated."""
    while True:
        try:
            return peer.all_reduce(grads, grads, op=ReduceOp.AVG).local_world_size
        except PCCLError as error:
            if error.result is not Result.RANK_CONNECTION_LOST:
                raise


def gradients(weights: np.ndarray, batches: np.random.Generator) -> tuple[np.ndarray, float]:
    """The gradient of the mean squared error on a new batch, and the error."""
    points = batches.normal(size=(BATCH, FEATURES)).astype(np.float32)
    error = points @ weights - (points @ TRUTH + batches.normal(scale=0.1, size=BATCH).astype(np.float32))
    return points.T @ error * np.float32(1 / BATCH), float((error**2).mean())


if __name__ == "__main__":
    main(*sys.argv[1:])
