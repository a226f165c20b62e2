"""One rank of `ringfold bench allreduce`, for each library: `allreduce_worker.py LIBRARY ADDRESS WORLD RANK WHERE`.

The rank does what it is sent: a *round* is a verified op, some ops to warm up, `iterations` timed ops back to
back, and a verified op again, all in place on one buffer. The three libraries differ in one function only, so that the
method is the same for all. This file is run by path, without its package, to keep a rank's start short.

Timed ops run on zeros: in place, any other sum grows until it overflows. The verified ops run on the same buffer.
"""

import hashlib
import importlib
import os
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from ringfold.runtime.clock import monotonic_ns, process_cpu_ns
from ringfold.tools.cluster import Channel, ChannelClosed, Message, die_with_parent

Array = npt.NDArray[Any]
AllReduce = Callable[[], object]
Bind = Callable[[Array, int], AllReduce]
"""Makes the all-reduce of one buffer; what a library can prepare for a buffer is not in the time of its ops.

With more than one tag the buffer is cut into that many, each an op of its own, and all of them are in flight at once.
"""

DTYPES = {"f32": np.float32, "f64": np.float64, "i32": np.int32, "i64": np.int64}
PATTERN = 251


def main(arguments: list[str]) -> None:
    die_with_parent()
    library, address, world, rank, where = arguments
    if library.startswith("mpi"):  # mpirun gives the ranks
        rank = importlib.import_module("mpi4py.MPI").COMM_WORLD.Get_rank()
    channel = Channel.connect(address, f"{library}.{rank}")
    try:
        connect = {"ringfold": connect_ringfold, "gloo": connect_gloo}.get(library, connect_mpi)
        bind = connect(int(world), int(rank), where)
        channel.send({"ready": True})
        while (order := channel.receive()) is not None and order["do"] == "round":
            channel.send(round_of(bind, int(world), int(rank), order))
    except ChannelClosed:
        os._exit(0)
    except Exception as error:
        channel.send({"error": f"{type(error).__name__}: {error}"})
        raise


def connect_ringfold(world: int, rank: int, where: str) -> Bind:
    import ringfold as rf

    run = rf.join(where)
    while run.group_size < world:
        run.update_topology(min_world=world)

    def bind(buffer: Array, tags: int) -> AllReduce:
        if tags == 1:
            return lambda: run.all_reduce(buffer, op="sum")
        pieces = np.array_split(buffer, tags)

        def all_at_once() -> None:
            for handle in [run.all_reduce_async(piece, op="sum", tag=tag) for tag, piece in enumerate(pieces)]:
                handle.wait()

        return all_at_once

    return bind


def connect_gloo(world: int, rank: int, where: str) -> Bind:
    torch: Any = importlib.import_module("torch")
    distributed: Any = importlib.import_module("torch.distributed")
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=f"file://{where}", world_size=world, rank=rank)

    def bind(buffer: Array, tags: int) -> AllReduce:
        tensor = torch.from_numpy(buffer)  # shares the buffer's memory
        return lambda: distributed.all_reduce(tensor)

    return bind


def connect_mpi(world: int, rank: int, where: str) -> Bind:
    mpi: Any = importlib.import_module("mpi4py.MPI")
    comm = mpi.COMM_WORLD
    assert (comm.Get_size(), comm.Get_rank()) == (world, rank)
    in_place, total = mpi.IN_PLACE, mpi.SUM
    return lambda buffer, tags: lambda: comm.Allreduce(in_place, buffer, op=total)


def round_of(bind: Bind, world: int, rank: int, order: Message) -> Message:
    """One round at one size: verified, warmed up, timed op by op, verified again."""
    dtype = DTYPES[order["dtype"]]
    buffer = np.empty(order["size_bytes"] // np.dtype(dtype).itemsize, dtype)
    all_reduce = bind(buffer, order["tags"])
    verified = verified_op(all_reduce, buffer, world, rank)
    buffer.fill(0)
    for _ in range(order["warm_up"]):
        all_reduce()
    durations = [0] * order["iterations"]
    cpu = process_cpu_ns()
    start = before = monotonic_ns()
    for index in range(len(durations)):
        all_reduce()
        after = monotonic_ns()
        durations[index] = after - before
        before = after
    block, cpu = before - start, process_cpu_ns() - cpu
    verified = verified and not buffer.any() and verified_op(all_reduce, buffer, world, rank)
    digest = digest_of_op(all_reduce, buffer, rank) if order["digest"] else None
    # Only rank 0's op times are used; the others' lists would be wasted bytes.
    return {
        "verified": bool(verified),
        "digest": digest,
        "block_ns": block,
        "cpu_ns": cpu,
        "durations_ns": durations if rank == 0 else [],
    }


def verified_op(all_reduce: AllReduce, buffer: Array, world: int, rank: int) -> bool:
    """Whether the sum of known values, different at every place of a chunk and exact in every dtype, comes out."""
    pattern = np.resize(np.arange(1, PATTERN + 1, dtype=buffer.dtype), buffer.size)
    np.multiply(pattern, rank + 1, out=buffer)
    all_reduce()
    pattern *= world * (world + 1) // 2
    return bool(np.array_equal(buffer, pattern))


def digest_of_op(all_reduce: AllReduce, buffer: Array, rank: int) -> str:
    """A hash of the sum of values whose rounding depends on the order of summation: equal only if all bits are."""
    generator = np.random.default_rng(rank)
    if np.issubdtype(buffer.dtype, np.floating):
        generator.random(out=buffer, dtype=buffer.dtype)
        buffer -= buffer.dtype.type(0.5)
    else:
        buffer[:] = generator.integers(0, 1 << 20, size=buffer.size)
    all_reduce()
    return hashlib.blake2b(buffer.data, digest_size=16).hexdigest()


if __name__ == "__main__":
    main(sys.argv[1:])
