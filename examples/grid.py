"""A grid of shards and replicas, like FSDP's: `python examples/grid.py MASTER SHARD [STEPS [FEWEST]]`.

The model is cut into two shards. A peer has one of them, and reduces it with the others that have the same one: the
shard's number is its group. The peers of one replica, one per shard, would compute gradients together by whatever is
fast between them; that part is made up here.

                 shard 0     shard 1
    replica A    peer        peer           a row computes together (NCCL, a pipe, one host)
    replica B    peer        peer
                 group 0     group 1        a column is one group: it reduces, and has one shared state

Start peers of both shards in any order. Nothing happens until every shard has a peer, and there are FEWEST peers; from
then on peers may come and go. All groups take the same steps at the same time, because all decide by the
result of the same `meet`.
"""

import sys
import time
from contextlib import suppress

import numpy as np
import numpy.typing as npt

import ringfold as rf

SHARDS = 2
FEATURES = 1_000
"""Of one shard."""
Floats = npt.NDArray[np.float32]


def main(master: str, shard: int, steps: int = 300, fewest: int = SHARDS) -> None:
    weights = np.zeros(FEATURES, np.float32)
    state = rf.SharedState(weights=weights)

    with rf.join(master, group=shard) as run:
        while state.revision < steps:
            grid = run.meet()
            if grid.groups == SHARDS and grid.world_size >= fewest:
                take_step(run, shard, state, weights)
                if state.revision % 50 == 0:
                    report(run, grid, state, weights, shard)
            else:
                time.sleep(0.02)  # then look again, together with all peers that are here
            if grid.pending:
                run.update_topology()

    print(f"shard {shard}: {np.abs(weights - truth(shard)).max():.4f} away from the truth after {state.revision} steps")


def take_step(run: rf.Communicator, shard: int, state: rf.SharedState, weights: Floats) -> None:
    """One step of one shard. Newcomers get the shard and the step's number in the sync."""
    run.sync_shared_state(state)
    grads = compute(shard, weights, state.revision, run.rank)
    with suppress(rf.TooFewPeers):  # no other peer has this shard now, so these are the gradients
        run.all_reduce(grads, op="avg")
    weights -= np.float32(0.1) * grads
    state.push_revision()


def report(run: rf.Communicator, grid: rf.Meeting, state: rf.SharedState, weights: Floats, shard: int) -> None:
    holes = SHARDS * grid.largest_group - grid.world_size
    error = np.abs(weights - truth(shard)).max()
    print(
        f"step {state.revision}: shard {shard} on {run.group_size} of {grid.world_size} peers, "
        f"{holes} places of the grid are empty, error {error:.4f}",
        flush=True,
    )


def truth(shard: int) -> Floats:
    return np.random.default_rng(shard).standard_normal(FEATURES, np.float32)


def compute(shard: int, weights: Floats, step: int, rank: int) -> Floats:
    """What a replica would compute: the way to the truth, and noise that no other rank has."""
    noise = np.random.default_rng((shard, step, rank)).standard_normal(FEATURES, np.float32)
    time.sleep(0.005)  # stands for the work of a real model
    return weights - truth(shard) + np.float32(0.1) * noise


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
