"""A training loop as a PCCL user writes it, for a run in which peers are killed and added all the time.

    python pccl_churn.py CLUSTER NAME ADDRESS STOP_FILE

Only names of PCCL are used, besides the channel to the test. Each step reduces a batch of arrays in place; every peer
contributes the same known values, so that each result must be a whole number of contributions, the same number in every
element. The peer reports each step that it has finished, with a digest of all results, and ends with the others once
STOP_FILE exists.
"""

import os
import sys
import time
import zlib

import numpy as np

from ringfold.compat.pccl import (
    Attribute,
    Communicator,
    PCCLError,
    ReduceDescriptor,
    ReduceOp,
    ReduceOpDescriptor,
    Result,
)
from ringfold.tools.cluster import Channel

SIZES = [1, 7, 500, 3_000, 20_000, 60_000, 60_001, 5]
AGREE_TAG = 1000


def main(channel: Channel, address: str, stop_file: str) -> None:
    peer = Communicator(address)
    peer.connect(n_attempts=20)
    channel.send({"what": "connected", "world": peer.get_attribute(Attribute.GLOBAL_WORLD_SIZE)})
    step, stop, is_new = 0, False, True
    while not stop:
        # A peer that was just accepted does not call it: those that accepted it have, and go on.
        if not is_new and peer.are_peers_pending():
            peer.update_topology()
        is_new = False
        if peer.get_attribute(Attribute.GLOBAL_WORLD_SIZE) < 2:
            time.sleep(0.01)
            continue
        try:
            # Newcomers learn which step it is, and all end at the same one.
            step, stop = agree(peer, step, os.path.exists(stop_file))
            arrays, info = train(peer, step)
        except PCCLError as error:
            if error.result is not Result.TOO_FEW_PEERS:
                raise
            stop = False
            continue
        check(arrays, step, info)
        channel.send({"what": "step", "step": step, "digest": digest(arrays), "world": info})
        step += 1
    channel.send({"what": "end", "step": step})


def agree(peer: Communicator, step: int, stop: bool) -> tuple[int, bool]:
    numbers = np.array([step, stop], np.int64)
    while True:
        try:
            peer.all_reduce(numbers, numbers, op=ReduceOp.MAX, tag=AGREE_TAG)
            return int(numbers[0]), bool(numbers[1])
        except PCCLError as error:
            if error.result is not Result.RANK_CONNECTION_LOST:
                raise


def train(peer: Communicator, step: int) -> tuple[list[np.ndarray], int]:
    arrays = [np.full(size, share(step, tag), np.int64) for tag, size in enumerate(SIZES)]
    descriptors = [
        ReduceOpDescriptor.from_numpy(array, array, ReduceDescriptor(array.size, ReduceOp.SUM, tag))
        for tag, array in enumerate(arrays)
    ]
    info = peer.all_reduce_multiple_with_retry(descriptors, max_in_flight=3)
    return arrays, info.local_world_size


def share(step: int, tag: int) -> int:
    return 1_000 * step + tag + 1


def check(arrays: list[np.ndarray], step: int, world: int) -> None:
    """Nothing counted twice, nothing half-reduced: an op that was aborted began again from the original values."""
    fewest = min(int(array[0]) // share(step, tag) for tag, array in enumerate(arrays))
    assert fewest == world, (fewest, world)
    for tag, array in enumerate(arrays):
        peers, rest = divmod(int(array[0]), share(step, tag))
        assert rest == 0, (step, tag, array[0])
        assert 2 <= peers <= 16, (step, tag, peers)
        assert (array == array[0]).all(), (step, tag)


def digest(arrays: list[np.ndarray]) -> int:
    value = 0
    for array in arrays:
        value = zlib.crc32(array.tobytes(), value)
    return value


if __name__ == "__main__":
    main(Channel.connect(sys.argv[1], sys.argv[2]), *sys.argv[3:])
