"""Members without a contribution get the result of the others, bit by bit, and all know which members contributed."""

import os
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
from programs import ProgramCluster, ProgramContext, by_id

import ringfold as rf
from ringfold.master.server import MasterThread
from ringfold.master.settings import MasterSettings

pytestmark = pytest.mark.waiting

T = TypeVar("T")
DEADLINE_S = 30.0
OPS = ("sum", "avg", "min", "max", "prod")
DTYPES = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16, "float16": np.float16, "int32": np.int32}
SIZES = (0, 1, 50, 70_001, 600_000)


@pytest.fixture(scope="module")
def master() -> Iterator[MasterThread]:
    with MasterThread() as running:
        yield running


def together(where: str, peers: int, body: Callable[[rf.Communicator], T], group: int = 0) -> dict[int, T]:
    """Run `body` on `peers` peers of one group at the same time; their results by rank."""

    def one() -> tuple[int, T]:
        with rf.join(where, timeout_s=DEADLINE_S, op_timeout_s=DEADLINE_S, group=group) as run:
            while run.group_size < peers:
                run.update_topology(min_world=peers)
            rank, result = run.rank, body(run)  # a peer that ends first leaves
            return rank, result

    with ThreadPoolExecutor(peers) as pool:
        return dict(sorted(future.result() for future in [pool.submit(one) for _ in range(peers)]))


def part(rank: int, size: int, dtype: Any) -> npt.NDArray[Any]:  # noqa: ANN401 - a dtype
    numbers = np.random.default_rng([rank, size]).uniform(-3, 3, size) * 10
    return numbers.astype(dtype)


def nonsense(size: int, dtype: Any) -> npt.NDArray[Any]:  # noqa: ANN401 - a dtype
    """What a member without a contribution may have in its buffers."""
    return np.full(size, 77, dtype) if np.dtype(dtype).kind == "i" else np.full(size, np.nan, dtype)


@pytest.mark.parametrize("peers", [2, 3, 4])
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_bits_are_those_of_a_reduction_by_the_contributors_alone(
    master: MasterThread, peers: int, dtype: str
) -> None:
    """The contributors differ from call to call. Two operands have one order, so a group of two gives the reference."""
    kind = DTYPES[dtype]

    def among_all(run: rf.Communicator) -> list[tuple[bytes, tuple[int, ...]]]:
        seen, rank, members = [], run.rank, run.members
        for size in SIZES:
            for place, op in enumerate(OPS):
                pair = (place % peers, (place + 1) % peers)
                mine = part(rank, size, kind) if rank in pair else nonsense(size, kind)
                info = run.all_reduce(mine, op=op, contribute=rank in pair)
                assert info.contributors == tuple(sorted(members[each] for each in pair))
                seen.append((mine.tobytes(), pair))
        return seen

    def alone(run: rf.Communicator) -> list[bytes]:
        seen, rank = [], run.rank
        for size in SIZES:
            for place, op in enumerate(OPS):
                pair = sorted({place % peers, (place + 1) % peers})
                mine = part(pair[rank], size, kind)
                run.all_reduce(mine, op=op)
                seen.append(mine.tobytes())
        return seen

    got = together(master.address, peers, among_all)
    wanted = together(master.address, 2, alone)[0]
    for results in got.values():
        assert [result for result, _ in results] == wanted


@pytest.mark.parametrize("evidence", ["ring", "master"])
@pytest.mark.parametrize("size", [10, 200_000])
def test_all_members_name_the_same_contributors_with_each_kind_of_evidence(evidence: str, size: int) -> None:
    def body(run: rf.Communicator) -> list[tuple[int, ...]]:
        named, mine, members = [], run.rank, run.members
        for mask in range(16):
            buffer, given = np.full(size, np.nan), np.full(size, float(1 << mine))
            info = run.all_reduce(given, out=buffer, op="sum", contribute=bool(mask >> mine & 1))
            assert (buffer == mask).all(), "the sum shows which peers contributed"
            assert info.contributors == tuple(sorted(members[rank] for rank in range(4) if mask >> rank & 1))
            assert (given == 1 << mine).all(), "what is not the result's place is left alone"
            named.append(info.contributors)
        return named

    with MasterThread(settings=MasterSettings(evidence=evidence)) as master:
        results = list(together(master.address, 4, body).values())
    assert results == [results[0]] * 4
    assert results[0][0] == ()


def test_an_average_is_over_those_that_contributed(master: MasterThread) -> None:
    def body(run: rf.Communicator) -> list[float]:
        seen = []
        for size in (4, 300_000):
            for quantize in (None, "minmax8"):
                ones = np.full(size, 6.0, np.float32)
                run.all_reduce(ones, op="avg", contribute=run.rank != 1, quantize=quantize)
                assert (ones == ones[0]).all()
                seen.append(float(ones[0]))
        return seen

    for seen in together(master.address, 3, body).values():
        assert seen == [6.0] * 4


def test_async_ops_and_reduce_scatter_take_it_too(master: MasterThread) -> None:
    def body(run: rf.Communicator) -> tuple[list[float], float, tuple[int, ...]]:
        buffers = [np.full(100_000, 2.0 + tag) for tag in range(3)]
        handles = [
            run.all_reduce_async(buffer, op="avg", tag=tag, contribute=run.rank == tag)
            for tag, buffer in enumerate(buffers)
        ]
        named = [handle.wait().contributors for handle in handles]
        assert named == [(run.members[tag],) for tag in range(3)]
        rank = run.rank
        chunk = run.reduce_scatter(np.arange(30_000.0), op="avg", contribute=rank == 0)
        assert (chunk == np.arange(30_000.0)[rank * 10_000 : (rank + 1) * 10_000]).all()
        return [float(buffer[-1]) for buffer in buffers], float(chunk[0]), named[0]

    results = together(master.address, 3, body)
    assert [result[0] for result in results.values()] == [[2.0, 3.0, 4.0]] * 3


@pytest.mark.parametrize("min_world", [1, 3])
def test_a_step_of_several_ops_in_flight_is_the_same_for_all(master: MasterThread, min_world: int) -> None:
    """Each member waits in an order of its own, and leaves one handle to the end of the step."""

    def body(run: rf.Communicator) -> list[float]:
        seen, weights = [], np.zeros(4)
        for step in run.steps(rf.SharedState(weights=weights), until=5, min_world=min_world):
            buffers = [np.full(50_000 if tag % 2 else 5, 1.0) for tag in range(4)]
            handles = [step.all_reduce_async(buffer, tag=tag) for tag, buffer in enumerate(buffers)]
            own = handles[run.rank :] + handles[: run.rank]
            for handle in own[: run.rank + 1]:
                assert len(handle.wait().contributors) == 3
            gathered = step.all_gather(np.array([float(run.rank)]), tag=7)
            assert gathered.ravel().tolist() == [0.0, 1.0, 2.0]
            assert len(step.barrier(tag=8).contributors) == 3
            root = np.full(3, float(run.rank))
            step.broadcast(root, root=1, tag=9)
            assert (root == 1.0).all()
            chunk = step.reduce_scatter(np.ones(6), tag=10, contribute=run.rank != 2)
            assert chunk.tolist() == [2.0, 2.0]
            weights += step.number
            before = buffers
        seen += [float(buffer[0]) for buffer in before]
        return seen

    with MasterThread() as own:
        results = together(own.address, 3, body)
    assert list(results.values()) == [[3.0] * 4] * 3


def test_alone_a_step_gives_what_this_peer_contributed_or_zeros() -> None:
    with MasterThread() as master, rf.join(master.address, timeout_s=DEADLINE_S) as run:
        for step in run.steps(until=1):
            mine, none, out = np.full(3, 5.0), np.full(3, np.nan), np.full(3, np.nan)
            assert step.all_reduce(mine, op="avg").contributors == (run.peer_id,)
            assert step.all_reduce(none, contribute=False).contributors == ()
            assert step.all_reduce(none, out=out, contribute=False).contributors == ()
            assert (mine == 5).all()
            assert (none == 0).all()
            assert (out == 0).all()
            handle, silent = step.all_reduce_async(mine, tag=1), step.all_reduce_async(out, tag=2, contribute=False)
            assert silent.wait().contributors == ()
            assert handle.wait().contributors == (run.peer_id,)
            assert step.barrier().contributors == (run.peer_id,)
            assert step.all_gather(np.ones(2)).shape == (1, 2)
            assert step.reduce_scatter(np.ones(2), contribute=False).tolist() == [0, 0]
            assert step.broadcast(mine).contributors == (run.peer_id,)


def test_ops_of_other_threads_go_beside_those_of_the_loop() -> None:
    """They are tried again by the engine, as ever, whatever the loop's own ops are bound to at the moment."""

    def body(run: rf.Communicator) -> float:
        total = np.zeros(1)

        def beside() -> None:
            for _ in range(200):
                total[0] = 1.0
                run.all_reduce(total, tag=5)

        for step in run.steps(until=1, min_world=3):
            other = threading.Thread(target=beside)
            other.start()
            for _ in range(200):
                step.all_reduce(np.ones(4))
            other.join()
        return float(total[0])

    with MasterThread() as own:
        assert list(together(own.address, 3, body).values()) == [3.0] * 3


def test_a_tag_in_flight_and_a_wait_that_ends_early(master: MasterThread) -> None:
    go = threading.Event()

    def body(run: rf.Communicator) -> None:
        for step in run.steps(until=1, min_world=2):
            if run.rank == 1:
                assert go.wait(DEADLINE_S)
            handle = step.all_reduce_async(np.ones(100_000))
            if run.rank == 0:
                with pytest.raises(rf.UsageError, match="an op with tag 0 is in flight; wait for it"):
                    step.all_reduce_async(np.ones(5))
                with pytest.raises(rf.DeadlineExceeded, match="still runs after 50 ms"):
                    handle.wait(0.05)
                assert not handle.done()
                go.set()
            assert len(handle.wait().contributors) == 2
            assert handle.done()

    with MasterThread() as own:
        together(own.address, 2, body)


# Deaths


def test_a_death_in_the_middle_leaves_the_others_with_their_contributors(cluster: ProgramCluster) -> None:
    cluster.start_master()
    peers = by_id(cluster.start_program(die_in_the_middle, 4))
    facts = [peers[number].expect("reduced") for number in (1, 3, 4)]
    for fact in facts:
        assert fact == {**fact, "contributors": [1, 4], "value": 5.0, "intact": True}
    for number in (1, 3, 4):
        peers[number].wait_success()


def die_in_the_middle(me: ProgramContext) -> None:
    """Peer 2 contributes and kills itself when the first final values reach it; peer 3 contributes nothing."""
    count = 6_000_000
    with me.join() as run:
        while run.group_size < 4:
            run.update_topology(min_world=4)
        me.report("joined", peer=run.peer_id)
        given = np.full(count, float(run.peer_id), np.float32)
        if run.peer_id == 3:
            given.fill(np.nan)
        buffer = given.copy()
        if run.peer_id == 2:
            threading.Thread(target=_kill_this_once_changed, args=(buffer,), daemon=True).start()
        is_intact = True
        while True:
            try:
                info = run.all_reduce(buffer, retry=False, contribute=run.peer_id != 3)
                break
            except rf.PeerLost:
                is_intact &= buffer.tobytes() == given.tobytes()
        facts = {"contributors": list(info.contributors), "value": float(buffer[0]), "intact": is_intact}
        me.report("reduced", same=bool((buffer == buffer[0]).all()), **facts)


def _kill_this_once_changed(buffer: npt.NDArray[np.float32]) -> None:
    samples = buffer[::4096]
    while (samples == 2).all():
        pass
    os.kill(os.getpid(), signal.SIGKILL)


def test_ops_in_flight_of_a_step_survive_a_death_in_any_order_of_waits(cluster: ProgramCluster) -> None:
    """With min_world=3 all of them are bound to an epoch: they are tried again, and wait for a new peer together."""
    cluster.start_master()
    peers = by_id(cluster.start_program(step_in_flight, 3, victim=3))
    peers[3].expect("step")
    peers[3].kill()
    late = cluster.start_one(step_in_flight)
    rest = [peers[1], peers[2], late]
    results = [peer.expect("done", timeout_s=40) for peer in rest]
    for result in results:
        assert result["values"] == [[3.0, 6.0, 9.0], [3.0, 6.0, 9.0]]
        assert result["contributors"] == [[1, 2, 4]] * 3
    for peer in rest:
        peer.wait_success()


def step_in_flight(me: ProgramContext) -> None:
    with me.join() as run:
        while run.group_size < 3:
            run.update_topology(min_world=3)
        me.report("joined", peer=run.peer_id)
        values, named = [], []
        for step in run.steps(until=2, min_world=3):
            buffers = [np.full(400_000, 1.0 + tag) for tag in range(3)]
            if step.number == 0 and run.peer_id == me.options.get("victim"):
                # An op that it had begun could be committed before its death; the others would then finish the step.
                me.report("step")
                me.receive()
            handles = [step.all_reduce_async(buffer, tag=tag) for tag, buffer in enumerate(buffers)]
            infos = {}
            for tag in range(3) if run.peer_id == 1 else reversed(range(3)):
                infos[tag] = handles[tag].wait()
            values.append([float(buffer[0]) for buffer in buffers])
            named = [list(infos[tag].contributors) for tag in range(3)]
        me.report("done", values=values, contributors=named)
