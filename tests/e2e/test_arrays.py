"""Arrays of any strides and on devices, between real processes: elements meet by their indices, and abort by none.

Each peer keeps the same logical array in another memory layout. What comes back is compared with NumPy, and the digests
of all peers with each other.
"""

import os
import signal
import threading
import zlib
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest
from programs import ProgramCluster, ProgramContext

pytestmark = pytest.mark.waiting

WORLD = 3
Array = Any
Run = Any

SHAPES = ((2, 3, 4), (40, 31, 23))
"""Within one small op, and beyond it."""
ODD_SHAPES = ((), (0, 3), (1, 5), (4, 1))


def in_layout(numbers: Array, number: int) -> Array:
    """The same elements in C order, in Fortran order, or as a slice that runs backwards through a larger array."""
    match number % 3 if numbers.ndim else 0:
        case 0:
            return np.ascontiguousarray(numbers)
        case 1:
            return np.asfortranarray(numbers)
    around = np.full(tuple(2 * length + 1 for length in numbers.shape), 77, numbers.dtype)
    inner = around[(slice(-2, 0, -2),) * numbers.ndim]
    inner[...] = numbers
    return inner


def content(rank: int, shape: tuple[int, ...], dtype: str = "float32") -> Array:
    return np.random.default_rng(rank).integers(-8, 9, shape).astype(dtype)


def total(shape: tuple[int, ...], dtype: str = "float32") -> Array:
    return sum(content(rank, shape, dtype) for rank in range(WORLD))


def gathered(me: ProgramContext, world: int = WORLD) -> Run:
    run = me.join(op_timeout_s=30.0)
    while run.group_size < world:
        run.update_topology(min_world=world)
    return run


# Every collective


def test_peers_with_different_layouts_reduce_the_same_elements(cluster: ProgramCluster) -> None:
    cluster.package = "torch" if find_spec("torch") else "ringfold"
    cluster.start_master()
    peers = cluster.start_program(exercise, WORLD)
    for name in EXERCISES:
        digests = {peer.expect("digest", name=name, timeout_s=60)["digest"] for peer in peers}
        assert len(digests) == 1, name
    for peer in peers:
        peer.wait_success()


def exercise(me: ProgramContext) -> None:
    with gathered(me) as run:
        for name, body in EXERCISES.items():
            digest = 0
            for shared in body(run):
                digest = zlib.crc32(np.array(shared, order="C").tobytes(), digest)
            me.report("digest", name=name, digest=digest)
        run.barrier()


def test_peers_that_leave_out_different_arrays_never_reduce_them_with_each_other(cluster: ProgramCluster) -> None:
    cluster.start_master()
    peers = cluster.start_program(leave_out_another, WORLD)
    reported = [peer.expect("ended") for peer in peers]
    assert sorted(fact["error"] for fact in reported) == ["", "", "CallMismatch"]
    [wrong] = [fact for fact in reported if fact["error"]]
    assert "layout" in wrong["message"]
    assert wrong["left"] == [1.0, 1.0]
    assert all(fact["left"] == [2.0, 2.0] for fact in reported if not fact["error"])
    for peer in peers:
        peer.wait_success()


def leave_out_another(me: ProgramContext) -> None:
    """One of three leaves out another array of the same size: the two others go on."""
    from ringfold import CallMismatch

    with gathered(me) as run:
        arrays = [np.ones(5), np.ones(5), np.ones(5)]
        arrays[run.rank // 2] = None
        error = text = ""
        try:
            run.all_reduce(arrays, skip_none=True)
        except CallMismatch as failure:
            error, text = type(failure).__name__, str(failure)
        me.report("ended", error=error, message=text, left=[float(each[0]) for each in arrays if each is not None])


def in_place(run: Run) -> Iterator[Array]:
    for shape in (*SHAPES, *ODD_SHAPES):
        for dtype in ("int8", "float32", "float64"):
            mine = in_layout(content(run.rank, shape, dtype), run.rank)
            assert len(run.all_reduce(mine).contributors) == WORLD
            assert (mine == total(shape, dtype)).all()
            if run.rank == 2 and shape:
                assert (mine.base == 77).sum() == mine.base.size - mine.size, "what lies between is left alone"
            yield mine


def fused(run: Run) -> Iterator[Array]:
    """Of each peer other arrays of the list are staged."""
    for shape in SHAPES:
        for op, expected in (("sum", total), ("max", largest)):
            arrays = [in_layout(content(run.rank, shape), run.rank + place) for place in range(4)]
            run.all_reduce(arrays, op=op)
            for mine in arrays:
                assert (mine == expected(shape)).all()
            yield from arrays


def largest(shape: tuple[int, ...]) -> Array:
    return np.max([content(rank, shape) for rank in range(WORLD)], axis=0)


def quantized(run: Run) -> Iterator[Array]:
    mine = in_layout(content(run.rank, SHAPES[1]), run.rank)
    run.all_reduce([None, mine], quantize="minmax8", skip_none=True)
    assert np.abs(mine - total(SHAPES[1])).max() < 1
    yield mine


def by_handles(run: Run) -> Iterator[Array]:
    """The result is there when the handle is done, or returns from a wait."""
    for shape in SHAPES:
        arrays = [in_layout(content(run.rank, shape), run.rank) for _ in range(4)]
        handles = [run.all_reduce_async(mine, tag=tag) for tag, mine in enumerate(arrays)]
        for tag, (handle, mine) in enumerate(zip(handles, arrays, strict=True)):
            if tag % 2:
                handle.wait()
            while not handle.done():
                pass
            assert (mine == total(shape)).all()
        yield from arrays


def to_out(run: Run) -> Iterator[Array]:
    for shape in SHAPES:
        source = in_layout(content(run.rank, shape), run.rank)
        source.flags.writeable = False
        out = in_layout(np.zeros(shape, np.float32), run.rank + 1)
        run.all_reduce(source, out=out)
        assert (out == total(shape)).all()
        run.all_reduce(out, out=out[...])
        assert (out == WORLD * total(shape)).all()
        assert (source == content(run.rank, shape)).all()
        yield out


def broadcasts(run: Run) -> Iterator[Array]:
    for shape in SHAPES:
        for root in range(WORLD):
            mine = in_layout(content(run.rank, shape), run.rank)
            run.broadcast(mine, root=root)
            assert (mine == content(root, shape)).all()
            yield mine


def gathers(run: Run) -> Iterator[Array]:
    for shape in SHAPES:
        expected = np.stack([content(rank, shape) for rank in range(WORLD)])
        source = in_layout(content(run.rank, shape), run.rank)
        out = in_layout(np.zeros((WORLD, *shape), np.float32), run.rank + 1)
        for result in (run.all_gather(source), run.all_gather(source, out=out), out):
            assert (result == expected).all()
            yield result


def scatters(run: Run) -> Iterator[Array]:
    for shape in ((WORLD, 4, 5), (6 * WORLD, 31, 23)):
        source = in_layout(content(run.rank, shape), run.rank)
        out = in_layout(np.zeros((shape[0] // WORLD, shape[1] * shape[2]), np.float32), run.rank + 1)
        chunk = run.reduce_scatter(source)
        assert run.reduce_scatter(source, out=out) is out
        assert (out.reshape(-1) == chunk).all()
        whole = run.all_gather(out)
        assert (whole.reshape(shape) == total(shape)).all()
        yield whole


def without_some(run: Run) -> Iterator[Array]:
    """What is None is left out."""
    mine = [None, in_layout(content(run.rank, SHAPES[0]), run.rank), None]
    run.all_reduce(mine, skip_none=True)
    assert (mine[1] == total(SHAPES[0])).all()
    run.all_reduce({"bias": None, "weight": mine[1]}, op="avg", skip_none=True)
    run.all_reduce_async({"bias": None, "weight": mine[1]}, op="avg", skip_none=True).wait()
    run.all_reduce([None, None], skip_none=True)
    yield mine[1]


def tensors(run: Run) -> Iterator[Array]:
    """A NumPy array meets a tensor in channels_last and one that is a slice."""
    import ml_dtypes

    shape = (2, 3, 4, 5)
    for dtype in ("float32", "bfloat16"):
        mine = content(run.rank, shape).astype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
        if run.rank:
            try:
                import torch
            except ImportError:
                run.all_reduce([mine])
            else:
                tensor = torch.from_numpy(content(run.rank, shape)).to(getattr(torch, dtype))
                if run.rank == 1:
                    tensor = tensor.to(memory_format=torch.channels_last)
                else:
                    tensor = torch.stack([tensor, tensor], dim=2)[:, :, 1]
                assert not tensor.is_contiguous()
                run.all_reduce([tensor.requires_grad_()])
                mine = tensor.detach().to(torch.float32).numpy()
        else:
            run.all_reduce([mine])
        assert (mine.astype(np.float32) == total(shape)).all()
        yield mine.astype(np.float32)


def jax_sources(run: Run) -> Iterator[Array]:
    """JAX arrays are immutable, so the result goes to NumPy arrays."""
    try:
        import jax.numpy as jnp
    except ImportError:
        return
    for shape in SHAPES:
        for dtype in ("float32", "bfloat16"):
            source = jnp.array(content(run.rank, shape)).astype(dtype)
            out = in_layout(np.empty(source.shape, source.dtype), run.rank)
            run.all_reduce([source], out=[out])
            assert (out.astype(np.float32) == total(shape)).all()
            assert (np.asarray(source.astype("float32")) == content(run.rank, shape)).all()
            yield out
        all_ranks = run.all_gather(jnp.array(content(run.rank, shape)).astype("bfloat16"))
        assert (all_ranks[1].astype(np.float32) == content(1, shape)).all()


EXERCISES: dict[str, Callable[[Run], Iterator[Array]]] = {
    body.__name__: body
    for body in (
        in_place,
        fused,
        quantized,
        by_handles,
        to_out,
        broadcasts,
        gathers,
        scatters,
        without_some,
        tensors,
        jax_sources,
    )
}


# Steps


@pytest.mark.parametrize("world", [1, 2, 3])
def test_steps_take_the_same_arrays(cluster: ProgramCluster, world: int) -> None:
    """With one peer, with two, and with three, which take different branches of the loop."""
    cluster.start_master()
    peers = cluster.start_program(train, world, world=world)
    for peer in peers:
        assert peer.expect("trained")["sums"] == [world, world]
        peer.wait_success()


def train(me: ProgramContext) -> None:
    world = int(me.options["world"])
    with me.join() as run:
        for step in run.steps(until=2, min_world=world):
            mine = in_layout(np.ones((6, 7), np.float32), run.rank + 1)
            out = in_layout(np.zeros((6, 7), np.float32), run.rank + 2)
            step.all_reduce([None, mine], skip_none=True)
            step.all_reduce({"a": mine, "b": None}, out={"a": out, "b": None}, op="avg", skip_none=True)
            sums = [float(mine.mean()), float(out.mean())]
        me.report("trained", sums=sums)


# Aborts


def test_an_aborted_op_leaves_strided_arrays_as_they_were(cluster: ProgramCluster) -> None:
    """Peer 2 dies in the middle of the op. Of the others one waits in the call, and one for a handle."""
    cluster.start_master()
    peers = {peer.expect("joined")["peer"]: peer for peer in cluster.start_program(reduce_without_retry, WORLD)}
    for peer in (peers[1], peers[3]):
        lost = peer.expect("lost")
        assert lost["error"] == "PeerLost"
        assert lost["intact"]
        assert peer.expect("reduced")["contributors"] == 2
        peer.wait_success()


def reduce_without_retry(me: ProgramContext) -> None:
    shape = (2_000, 4_000)
    with gathered(me) as run:
        me.report("joined", peer=run.peer_id)
        mine = in_layout(content(run.peer_id, shape), {1: 1, 2: 0, 3: 2}[run.peer_id])
        memory = mine if mine.base is None else mine.base
        before = memory.tobytes(order="A")
        if run.peer_id == 2:
            sums = sum(content(peer, shape) for peer in (1, 2, 3)).reshape(-1)[::1024]
            threading.Thread(target=die_once_summed, args=(mine.reshape(-1)[::1024], sums), daemon=True).start()
        with me.failing("lost") as facts:
            try:
                if run.peer_id == 1:
                    run.all_reduce_async(mine, retry=False).wait()
                else:
                    run.all_reduce(mine, retry=False)
            finally:
                facts["intact"] = memory.tobytes(order="A") == before
        info = run.all_reduce(mine)
        assert (mine == content(1, shape) + content(3, shape)).all()
        me.report("reduced", contributors=len(info.contributors))


def die_once_summed(samples: Array, sums: Array) -> None:
    while (samples == sums).mean() < 0.1:  # by chance it is one in 17
        pass
    os.kill(os.getpid(), signal.SIGKILL)


# Devices


def test_tensors_on_a_device_are_reduced_through_host_memory(cluster: ProgramCluster) -> None:
    """One peer has its tensors on a device; torch's own machinery copies them, as it does for a GPU."""
    registration = pytest.importorskip("torch.utils.backend_registration")
    if not hasattr(registration, "_setup_privateuseone_for_python_backend"):
        pytest.skip("needs a PyTorch with devices in Python")
    cluster.package = "torch"
    cluster.start_master()
    peers = cluster.start_program(reduce_on_a_device, 2)
    for peer in peers:
        peer.wait_success()


def reduce_on_a_device(me: ProgramContext) -> None:
    from ringfold import UsageError

    def placed(numbers: Array) -> Array:
        if run.rank == 0:
            return numbers
        from far_device import FarTensor

        return FarTensor(numbers)

    with gathered(me, 2) as run:
        shape = (20, 30, 4)
        both = content(0, shape) + content(1, shape)
        memory = content(run.rank, shape)
        mine = placed(memory)
        run.all_reduce([mine])
        assert (memory == both).all()
        run.all_reduce_async(mine, op="avg").wait()
        assert (memory == both).all()
        memory *= run.rank + 1
        run.broadcast(mine, root=1)
        assert (memory == 2 * both).all()
        out = np.zeros((2, *shape), np.float32)
        for result in (run.all_gather(mine, out=placed(out)), out):
            assert (result == 2 * both).all()
        chunk = np.zeros(memory.size // 2, np.float32)
        run.reduce_scatter(mine, out=placed(chunk))
        assert (chunk == 4 * both.reshape(2, -1)[run.rank]).all()
        bits = np.full(4, 0x3F80, np.uint16)
        run.all_reduce(placed(bits), dtype="bfloat16")
        assert (bits == 0x4000).all()
        if run.rank:
            with pytest.raises(UsageError, match="written twice"):
                run.all_reduce([mine, mine])
        run.barrier()
