"""Many all-reduces at once, by tags: `python examples/pccl/many_tags.py [MASTER] [ROUNDS]`, two or more times.

First by hand, with a handle per tag; then with the helper that bounds how many are in flight and calls those again that
a lost peer has aborted. Kill one of three in the middle: the others' sums are right, with one contribution less.
"""

import sys

import numpy as np

from ringfold.compat.pccl import (
    Attribute,
    Communicator,
    PCCLError,
    ReduceDescriptor,
    ReduceOp,
    ReduceOpDescriptor,
)

LAYERS = [784 * 128, 128, 128 * 64, 64, 64 * 10, 10]


def main(master: str = "127.0.0.1:48148", rounds: str = "100") -> None:
    peer = Communicator(master)
    peer.connect(n_attempts=15)
    while peer.get_attribute(Attribute.GLOBAL_WORLD_SIZE) < 2:
        peer.update_topology()
    for number in range(int(rounds)):
        world = by_hand(peer)
        batch = [np.ones(size, np.float32) for size in LAYERS]
        info = peer.all_reduce_multiple_with_retry(descriptors(batch), max_in_flight=4)
        if number % 10 == 0:
            sums = [float(layer[0]) for layer in batch]
            print(f"round {number}: {world} peers by hand, then {info.local_world_size}: sums {sums}", flush=True)
    print("done", flush=True)


def by_hand(peer: Communicator) -> int:
    """One op per layer, all in flight at once. What fails is begun again, until nothing is left."""
    layers = {tag: np.ones(size, np.float32) for tag, size in enumerate(LAYERS)}
    world = 0
    while layers:
        handles = {tag: peer.all_reduce_async(each, each, op=ReduceOp.AVG, tag=tag) for tag, each in layers.items()}
        for tag, handle in handles.items():
            is_success, _, info = handle.wait()
            if is_success:
                world = info.local_world_size
                del layers[tag]
    return world


def descriptors(layers: list[np.ndarray]) -> list[ReduceOpDescriptor]:
    return [
        ReduceOpDescriptor.from_numpy(layer, layer, ReduceDescriptor(count=layer.size, op=ReduceOp.SUM, tag=tag))
        for tag, layer in enumerate(layers)
    ]


if __name__ == "__main__":
    try:
        main(*sys.argv[1:])
    except PCCLError as error:
        sys.exit(f"many_tags: {error}")
