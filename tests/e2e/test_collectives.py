"""Every collective between real processes, by every route of evidence and bytes, checked against NumPy.

One set of three processes per route runs all exercises; each exercise checks its results and reports a digest, and the
test compares the digests of all peers: the same bits everywhere.
"""

import threading
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from programs import ProgramCluster, ProgramContext

pytestmark = pytest.mark.waiting

WORLD = 3
DTYPES = ("uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64")
FLOATS = ("float16", "bfloat16", "float32", "float64")
TOLERANCE = {"float16": 4e-3, "bfloat16": 3e-2, "float32": 1e-5, "float64": 1e-12}
OPS = ("sum", "avg", "prod", "min", "max")
SIZES = (0, 1, 2, 7, 1_001, 40_009)
"""Empty, smaller than the world, odd, within one small op, and beyond it."""
Array = Any
Run = Any


@pytest.mark.parametrize(
    "settings",
    [{"evidence": "ring"}, {"evidence": "master"}, {"evidence": "ring", "lanes": 3, "segment_bytes": 4_096}],
    ids=["ring", "master", "three-lanes"],
)
def test_collectives_equal_numpy_and_are_the_same_everywhere(
    cluster: ProgramCluster, settings: dict[str, object]
) -> None:
    cluster.start_master(**settings)
    peers = cluster.start_program(exercise, WORLD)
    for name in EXERCISES:
        digests = {peer.expect("digest", name=name, timeout_s=60)["digest"] for peer in peers}
        assert len(digests) == 1, name
    for peer in peers:
        peer.wait_success()


def exercise(me: ProgramContext) -> None:
    with me.join(op_timeout_s=30.0) as run:
        while run.group_size < WORLD:
            run.update_topology(min_world=WORLD)
        for name, body in EXERCISES.items():
            digest = 0
            for shared in body(run):
                digest = zlib.crc32(np.ascontiguousarray(shared).tobytes(), digest)
            me.report("digest", name=name, digest=digest)
        run.barrier()


def _dtype(name: str) -> np.dtype[Any]:
    if name == "bfloat16":
        import ml_dtypes

        return np.dtype(ml_dtypes.bfloat16)
    return np.dtype(name)


def _inputs(rank: int, size: int, dtype: str) -> Array:
    """A rank's numbers, small enough that no sum or product of three overflows or is rounded away."""
    kind = _dtype(dtype)
    rng = np.random.default_rng([rank, size])
    if dtype in FLOATS:
        return (rng.integers(-8, 9, size) / 4).astype(kind)
    return rng.integers(0 if kind.kind == "u" else -3, 4, size).astype(kind)


def _expected(op: str, size: int, dtype: str) -> Array:
    """What NumPy computes from all inputs, in the widest type."""
    wide = np.float64 if dtype in FLOATS else np.int64
    all_ranks = np.stack([_inputs(rank, size, dtype).astype(wide) for rank in range(WORLD)])
    match op:
        case "avg":
            total = all_ranks.sum(axis=0)
            return total / WORLD if dtype in FLOATS else np.trunc(total / WORLD).astype(np.int64)
        case "prod":
            return all_ranks.prod(axis=0)
        case _:
            return getattr(all_ranks, op)(axis=0)


def _check(result: Array, op: str, size: int, dtype: str) -> None:
    expected, tolerance = _expected(op, size, dtype), TOLERANCE.get(dtype, 0.0)
    np.testing.assert_allclose(
        result.astype(expected.dtype), expected, tolerance, tolerance, err_msg=f"{op} {size} {dtype}"
    )


def every_dtype_and_op(run: Run) -> Iterator[Array]:
    for dtype in (*DTYPES, *FLOATS):
        for op in OPS:
            for size in SIZES:
                array = _inputs(run.rank, size, dtype)
                info = run.all_reduce(array, op=op)
                assert len(info.contributors) == WORLD
                _check(array, op, size, dtype)
                yield array


def bits_called_bfloat16(run: Run) -> Iterator[Array]:
    array = _inputs(run.rank, 9_001, "bfloat16").view(np.uint16)
    run.all_reduce(array, dtype="bfloat16")
    _check(array.view(_dtype("bfloat16")), "sum", 9_001, "bfloat16")
    yield array


def lists_and_dicts(run: Run) -> Iterator[Array]:
    """Fused into one op, whatever their dtypes, sizes and order of keys."""
    for sizes in ((3, 0, 1), (9_001, 5, 12_345)):
        arrays = [
            _inputs(run.rank, size, dtype) for size, dtype in zip(sizes, ("int8", "float64", "bfloat16"), strict=True)
        ]
        run.all_reduce(arrays)
        for array, size, dtype in zip(arrays, sizes, ("int8", "float64", "bfloat16"), strict=True):
            _check(array, "sum", size, dtype)
        yield from arrays
        names = ("weight", "bias", "scale")
        keys = names if run.rank else tuple(reversed(names))
        named = {key: _inputs(run.rank, sizes[names.index(key)], "float32") for key in keys}
        run.all_reduce(named, op="max")
        for key, size in zip(names, sizes, strict=True):
            _check(named[key], "max", size, "float32")
            yield named[key]


def out_keeps_the_source(run: Run) -> Iterator[Array]:
    for size in SIZES:
        source, out = _inputs(run.rank, size, "float32"), np.empty(size, np.float32)
        source.flags.writeable = False
        run.all_reduce(source, out=out)
        _check(out, "sum", size, "float32")
        assert (source == _inputs(run.rank, size, "float32")).all()
        yield out


def many_dimensions(run: Run) -> Iterator[Array]:
    array = _inputs(run.rank, 60, "float64").reshape(3, 4, 5)
    run.all_reduce(array)
    _check(array.reshape(-1), "sum", 60, "float64")
    yield array


def sixteen_tags_in_flight(run: Run) -> Iterator[Array]:
    """Begun in another order on each peer, and waited for by threads of their own."""
    sizes = [7 + 3_001 * tag for tag in range(16)]
    arrays = [_inputs(run.rank, size, "float32") for size in sizes]
    tags = np.random.default_rng(run.rank).permutation(16)
    handles = {int(tag): run.all_reduce_async(arrays[tag], tag=int(tag) + 100) for tag in tags}
    infos: dict[int, Any] = {}

    def wait(tag: int) -> None:
        infos[tag] = handles[tag].wait(timeout=30)

    threads = [threading.Thread(target=wait, args=(tag,)) for tag in handles]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(handle.done() for handle in handles.values())
    assert [len(infos[tag].contributors) for tag in range(16)] == [WORLD] * 16
    for tag, size in enumerate(sizes):
        _check(arrays[tag], "sum", size, "float32")
    yield from arrays


def broadcasts(run: Run) -> Iterator[Array]:
    for root in range(WORLD):
        for size in SIZES:
            array = _inputs(run.rank, size, "int32")
            run.broadcast(array, root=root)
            assert (array == _inputs(root, size, "int32")).all()
            yield array


def gathers(run: Run) -> Iterator[Array]:
    for size in SIZES:
        out = np.empty((WORLD, size), np.float64)
        for result in (
            run.all_gather(_inputs(run.rank, size, "float64")),
            run.all_gather(_inputs(run.rank, size, "float64"), out=out),
        ):
            assert result.shape == (WORLD, size)
            for rank in range(WORLD):
                assert (result[rank] == _inputs(rank, size, "float64")).all()
            yield result


def scatters(run: Run) -> Iterator[Array]:
    """The chunks differ by rank, so they are gathered before their digest is taken."""
    for size in (0, WORLD, 7 * WORLD, 20_003 * WORLD):
        for op in OPS:
            chunk = run.reduce_scatter(_inputs(run.rank, size, "float32"), op=op)
            whole = run.all_gather(chunk).reshape(-1)
            _check(whole, op, size, "float32")
            yield whole


def refusals(run: Run) -> Iterator[Array]:
    """What cannot be done in place is refused before anything is sent, with a helpful text; then all go on."""
    from ringfold import UsageError

    grid = np.ones((100, 100), np.float32)
    read_only = np.ones(10)
    read_only.flags.writeable = False
    cases: list[tuple[Callable[[], object], str]] = [
        (lambda: run.all_reduce([grid, grid[:, 1]]), "written twice"),
        (lambda: run.all_reduce(grid.T, out=grid), "out= overlaps"),
        (lambda: run.all_reduce(np.lib.stride_tricks.as_strided(grid, (3, 2), (0, 4))), "share their memory"),
        (lambda: run.all_reduce([grid, None]), "array 1 is None"),
        (lambda: run.all_reduce({"a": None}), "'a' is None"),
        (lambda: run.all_reduce(read_only), "read-only"),
        (lambda: run.all_reduce(np.ones(3, ">f4")), "big-endian"),
        (lambda: run.all_reduce(np.ones(3, np.complex64)), "complex64"),
        (lambda: run.all_reduce(grid, op="median"), "unknown op 'median'"),
        (lambda: run.all_reduce(grid, tag=-1), "tag"),
        (lambda: run.all_reduce(grid, out=np.ones(3, np.float32)), "out="),
        (lambda: run.reduce_scatter(np.ones(WORLD + 1)), "equal chunks"),
        (lambda: run.broadcast(grid, root=WORLD), f"rank {WORLD} does not exist"),
    ]
    for call, text in cases:
        with pytest.raises(UsageError, match=text):
            call()
    assert (grid == 1).all()
    run.all_reduce(grid)
    assert (grid == WORLD).all()
    yield grid


EXERCISES: dict[str, Callable[[Run], Iterator[Array]]] = {
    body.__name__: body
    for body in (
        every_dtype_and_op,
        bits_called_bfloat16,
        lists_and_dicts,
        out_keeps_the_source,
        many_dimensions,
        sixteen_tags_in_flight,
        broadcasts,
        gathers,
        scatters,
        refusals,
    )
}


def test_a_barrier_waits_for_all_members(cluster: ProgramCluster) -> None:
    cluster.start_master()
    peers = cluster.start_program(meet_at_a_barrier, WORLD)
    [last] = [peer for peer in peers if peer.expect("joined")["rank"] == 0]
    last.send()
    come = last.expect("come")["at"]
    for peer in peers:
        assert peer.expect("through")["at"] > come
        peer.wait_success()


def meet_at_a_barrier(me: ProgramContext) -> None:
    with me.join() as run:
        while run.group_size < WORLD:
            run.update_topology(min_world=WORLD)
        me.report("joined", rank=run.rank)
        if run.rank == 0:
            me.receive()
            me.report("come")
        run.barrier()
        me.report("through")
