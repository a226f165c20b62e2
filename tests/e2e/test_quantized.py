"""Quantised all-reduce between peers: near the truth, the same bits everywhere, fewer bytes, all or nothing."""

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
from training_program import check_same_bits, end_training, gradients, start_training, step_with

import ringfold as rf
from ringfold.master.server import MasterThread

T = TypeVar("T")
DEADLINE_S = 30.0
SCHEMES = {"minmax8": 255, "minmax4": 15, "zeroscale8": 255, "zeroscale4": 15}
"""The largest code of each."""
LARGE = 70_001


@pytest.fixture(scope="module")
def master() -> Iterator[MasterThread]:
    with MasterThread() as running:
        yield running


def together(master: MasterThread, peers: int, body: Callable[[rf.Communicator], T]) -> list[T]:
    """Run `body` on `peers` peers of one group at the same time; their results by rank."""

    def one() -> tuple[int, T]:
        with rf.join(master.address, timeout_s=DEADLINE_S, op_timeout_s=DEADLINE_S) as run:
            while run.group_size < peers:
                run.update_topology(min_world=peers)
            return run.rank, body(run)

    with ThreadPoolExecutor(peers) as pool:
        results = dict(future.result() for future in [pool.submit(one) for _ in range(peers)])
    return [results[rank] for rank in sorted(results)]


def part(rank: int, size: int = LARGE, dtype: Any = np.float32) -> npt.NDArray[Any]:  # noqa: ANN401 - a dtype
    """A rank's numbers, between -1 and 1."""
    return np.random.default_rng([rank, size]).uniform(-1, 1, size).astype(dtype)


def most_error(peers: int, top: int) -> float:
    """Of a sum: the partial sum of k numbers between -1 and 1 is quantised with steps of up to 2k / top, for each k."""
    return sum(k / top for k in range(1, peers)) + peers / top + 1e-4


@pytest.mark.parametrize("peers", [2, 3, 4, 5])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_every_op_is_near_the_true_result_and_the_same_everywhere(
    master: MasterThread, peers: int, scheme: str
) -> None:
    def body(run: rf.Communicator) -> dict[str, npt.NDArray[np.float32]]:
        results = {}
        for op in ("sum", "avg", "min", "max"):
            results[op] = part(run.rank)
            assert len(run.all_reduce(results[op], op=op, quantize=scheme).contributors) == peers
        return results

    all_ranks = together(master, peers, body)
    parts = np.stack([part(rank).astype(np.float64) for rank in range(peers)])
    truth = {"sum": parts.sum(0), "avg": parts.mean(0), "min": parts.min(0), "max": parts.max(0)}
    # A minimum keeps its range and so its step; every hop may still add half a step.
    bounds = dict.fromkeys(("min", "max"), peers / SCHEMES[scheme] + 1e-4)
    bounds |= {"sum": most_error(peers, SCHEMES[scheme]), "avg": most_error(peers, SCHEMES[scheme]) / peers + 1e-2}
    for op, wanted in truth.items():
        assert len({results[op].tobytes() for results in all_ranks}) == 1, op
        assert np.abs(all_ranks[0][op] - wanted).max() <= bounds[op], op


@pytest.mark.parametrize(("scheme", "ratio"), [("minmax8", 3.9), ("zeroscale4", 7.5)])
@pytest.mark.parametrize("peers", [2, 3])
def test_the_info_shows_the_bytes_that_were_saved(master: MasterThread, peers: int, scheme: str, ratio: float) -> None:
    def body(run: rf.Communicator) -> tuple[rf.ReduceInfo, rf.ReduceInfo]:
        return run.all_reduce(part(run.rank)), run.all_reduce(part(run.rank), quantize=scheme)

    for plain, quantised in together(master, peers, body):
        assert plain.tx_bytes / quantised.tx_bytes > ratio
        assert plain.rx_bytes / quantised.rx_bytes > ratio


def test_arrays_of_all_dtypes_in_one_op(master: MasterThread) -> None:
    kinds = {"a": np.float16, "b": np.float32, "c": ml_dtypes.bfloat16, "tiny": np.float32}

    def body(run: rf.Communicator) -> list[bytes]:
        arrays = {name: part(run.rank, 3 if name == "tiny" else 9_001, kind) for name, kind in kinds.items()}
        arrays["a"] *= np.float16(100)  # an array's range does not blur its neighbours
        run.all_reduce(arrays, op="avg", quantize="minmax8")
        for name, kind in kinds.items():
            parts = np.stack([part(rank, arrays[name].size, kind).astype(np.float64) for rank in range(3)])
            scale = 100 if name == "a" else 1
            error = np.abs(arrays[name].astype(np.float64) - parts.mean(0) * scale).max() / scale
            assert error < most_error(3, 255) / 3 + (1e-2 if kind == ml_dtypes.bfloat16 else 5e-3), name
        return [array.tobytes() for array in arrays.values()]

    all_ranks = together(master, 3, body)
    assert all_ranks == [all_ranks[0]] * 3


def test_a_small_op_is_exact(master: MasterThread) -> None:
    def body(run: rf.Communicator) -> bytes:
        plain, quantised = part(run.rank, 1_000), part(run.rank, 1_000)
        run.all_reduce(plain)
        run.all_reduce(quantised, quantize="minmax4")
        assert plain.tobytes() == quantised.tobytes()
        return plain.tobytes()

    assert len(set(together(master, 3, body))) == 1


def test_out_and_handles(master: MasterThread) -> None:
    def body(run: rf.Communicator) -> bytes:
        source, out, other = part(run.rank), np.zeros(LARGE, np.float32), part(run.rank)
        source.flags.writeable = False
        handle = run.all_reduce_async(other, tag=3, quantize="zeroscale8")
        run.all_reduce(source, out=out, quantize="zeroscale8")
        handle.wait()
        assert (source == part(run.rank)).all()
        assert out.tobytes() == other.tobytes()
        return out.tobytes()

    assert len(set(together(master, 3, body))) == 1


@pytest.mark.parametrize("scheme", SCHEMES)
def test_what_is_not_finite_is_never_made_finite(master: MasterThread, scheme: str) -> None:
    def body(run: rf.Communicator) -> bytes:
        numbers = part(run.rank)
        numbers[10 + run.rank] = np.nan
        numbers[20_000] = np.inf
        numbers[30_000] = -np.inf if run.rank == 1 else 1.0
        numbers[40_000] = np.inf if run.rank == 2 else -np.inf
        numbers[50_000] = 3e38
        run.all_reduce(numbers, quantize=scheme)
        assert np.isnan(numbers[10:13]).all()
        assert numbers[20_000] == np.inf
        assert numbers[30_000] == -np.inf
        assert np.isnan(numbers[40_000])
        assert numbers[50_000] == np.inf  # the sum overflows
        assert np.isfinite(numbers).sum() == LARGE - 7
        return numbers.tobytes()

    assert len(set(together(master, 3, body))) == 1


def test_equal_numbers_are_summed_exactly(master: MasterThread) -> None:
    def body(run: rf.Communicator) -> None:
        for scheme in SCHEMES:
            numbers = np.full(LARGE, 0.1 * (run.rank + 1), np.float32)
            expected = numbers.copy()
            run.all_reduce(expected)
            run.all_reduce(numbers, quantize=scheme)
            np.testing.assert_allclose(numbers, expected, rtol=1e-6)
            assert len(np.unique(numbers)) == 1

    together(master, 3, body)


def test_what_cannot_be_quantised_is_refused_before_anything_is_sent(master: MasterThread) -> None:
    def body(run: rf.Communicator) -> None:
        numbers = part(run.rank)
        with pytest.raises(rf.UsageError, match="there are minmax8, minmax4, zeroscale8, zeroscale4"):
            run.all_reduce(numbers, quantize="int8")
        with pytest.raises(rf.UsageError, match="does not go with op='prod'"):
            run.all_reduce(numbers, op="prod", quantize="minmax8")
        with pytest.raises(rf.UsageError, match="an array of float64 and of int32"):
            run.all_reduce([numbers, np.ones(4, np.int32), np.ones(4)], quantize="minmax8")
        with pytest.raises(rf.UsageError, match="an array of int32"):
            run.all_reduce_async(np.ones(LARGE, np.int32), quantize="zeroscale4")
        assert (numbers == part(run.rank)).all()
        assert len(run.all_reduce(numbers, quantize="minmax8").contributors) == 2

    together(master, 2, body)


@pytest.mark.parametrize("world", [2, 3, 4])
def test_processes_agree_on_every_bit(cluster: ProgramCluster, world: int) -> None:
    cluster.start_master()
    end_training(start_training(cluster, world, quantize="minmax8"))


def test_survivors_go_on_after_a_kill_in_the_middle_of_an_op(cluster: ProgramCluster) -> None:
    cluster.start_master()
    peers = start_training(cluster, 3, quantize="zeroscale8", floats=3_000_000, strike="SIGKILL")
    peers[1].send("strike")
    at = peers[1].expect("striking")["at"]
    for peer in (peers[0], peers[2]):
        step_with(peer, 2, after=at)
    check_same_bits(peers)


def test_without_retry_a_death_in_the_middle_leaves_the_buffer_as_it_was(cluster: ProgramCluster) -> None:
    cluster.start_master()
    peers = by_id(cluster.start_program(die_in_the_middle, 3))
    for peer in (peers[1], peers[3]):
        lost = peer.expect("lost")
        assert lost["error"] == "PeerLost"
        assert lost["intact"]
        assert peer.expect("reduced")["contributors"] == 2
        peer.wait_success()


def die_in_the_middle(me: ProgramContext) -> None:
    """Peer 2 kills itself when final values reach it: then the peer before it in the ring has written them, too."""
    count = 8_000_000
    with me.join() as run:
        while run.group_size < 3:
            run.update_topology(min_world=3)
        me.report("joined", peer=run.peer_id)
        buffer = gradients(run.peer_id, 0, count)
        before = buffer.copy()
        if run.peer_id == 2:
            # The chunk with a rank's own number is finished by the rank before, and the first to come back.
            chunk = slice(run.rank * count // 3 + 64, (run.rank + 1) * count // 3 - 64, 512)
            arguments = (buffer[chunk], before[chunk].copy())
            threading.Thread(target=_kill_this_once_changed, args=arguments, daemon=True).start()
        with me.failing("lost") as facts:
            try:
                run.all_reduce(buffer, retry=False, quantize="minmax8")
            finally:
                facts["intact"] = buffer.tobytes() == before.tobytes()
        me.report("reduced", contributors=len(run.all_reduce(buffer, quantize="minmax8").contributors))


def _kill_this_once_changed(samples: npt.NDArray[np.float32], before: npt.NDArray[np.float32]) -> None:
    while (samples == before).all():
        pass
    os.kill(os.getpid(), signal.SIGKILL)
