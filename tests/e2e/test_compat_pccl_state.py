"""Shared state, measured topology and quantisation through the PCCL API, over real sockets: one thread per peer."""

import inspect
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import ml_dtypes
import numpy as np
import pytest

from ringfold import Communicator as Underneath
from ringfold.compat import pccl
from ringfold.compat.pccl import (
    Attribute,
    Communicator,
    PCCLError,
    ReduceOp,
    Result,
    SharedState,
    SharedStateSyncStrategy,
    TensorInfo,
)
from ringfold.master.server import MasterThread

pytestmark = pytest.mark.waiting

T = TypeVar("T")
DEADLINE_S = 30.0
SUM = ReduceOp.SUM
Strategy = SharedStateSyncStrategy

needs_state = pytest.mark.skipif(not hasattr(Underneath, "sync_shared_state"), reason="no shared state underneath")
needs_topology = pytest.mark.skipif(not hasattr(Underneath, "optimize_topology"), reason="no measurements underneath")
needs_quantisation = pytest.mark.skipif(
    "quantize" not in inspect.signature(Underneath.all_reduce).parameters, reason="no quantisation underneath"
)


@pytest.fixture(autouse=True)
def _deadlines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RINGFOLD_OP_TIMEOUT_S", str(DEADLINE_S))
    monkeypatch.setenv("RINGFOLD_JOIN_TIMEOUT_S", str(DEADLINE_S))


@pytest.fixture
def master() -> Iterator[MasterThread]:
    with MasterThread() as running:
        yield running


def connected(address: str, peers: int) -> Communicator:
    peer = Communicator(address)
    peer.connect()
    while peer.get_attribute(Attribute.GLOBAL_WORLD_SIZE) < peers:
        peer.update_topology()
    return peer


def together(master: MasterThread, peers: int, body: Callable[[Communicator, int], T]) -> list[T]:
    """Run `body` on several peers at the same time; nobody leaves before all have ended."""

    def one(number: int) -> tuple[Communicator, T]:
        peer = connected(master.address, peers)
        return peer, body(peer, number)

    with ThreadPoolExecutor(peers) as pool:
        ended = [future.result(DEADLINE_S) for future in [pool.submit(one, number) for number in range(peers)]]
    return [result for _, result in ended]


def failing(call: Callable[[], object], result: Result) -> PCCLError:
    with pytest.raises(PCCLError) as caught:
        call()
    assert caught.value.result is result, caught.value
    return caught.value


def state_of(**arrays: np.ndarray) -> SharedState:
    return SharedState([TensorInfo.from_numpy(array, name) for name, array in arrays.items()])


@needs_state
def test_the_popular_content_wins(master: MasterThread) -> None:
    def body(peer: Communicator, number: int) -> tuple[float, int, bool]:
        weights = np.full(300_000, 7.0 if number else 1.0)
        state = state_of(weights=weights)
        info = peer.sync_shared_state(state)
        return float(weights.max()), state.revision, (info.rx_bytes > 0) == (number == 0)

    assert together(master, 3, body) == [(7.0, 0, True)] * 3


@needs_state
def test_a_newcomer_gets_content_and_revision(master: MasterThread) -> None:
    def body(peer: Communicator, number: int) -> tuple[float, int]:
        weights = np.zeros(1000)
        state = state_of(weights=weights)
        peer.sync_shared_state(state)
        for _ in range(3):
            weights += 1
            state.push_revision()
            peer.sync_shared_state(state)
        if number == 0:
            newcomer.append(pool.submit(joins_late))
        while peer.get_attribute(Attribute.GLOBAL_WORLD_SIZE) < 3:
            peer.update_topology()
        peer.sync_shared_state(state)
        return float(weights[0]), state.revision

    def joins_late() -> tuple[Communicator, float, int]:
        peer = Communicator(master.address)
        peer.connect()
        weights = np.full(1000, -1.0)
        state = state_of(weights=weights)
        peer.sync_shared_state(state)
        return peer, float(weights[-1]), state.revision

    newcomer: list[Any] = []
    with ThreadPoolExecutor(1) as pool:
        assert together(master, 2, body) == [(3.0, 3)] * 2
        assert newcomer[0].result(DEADLINE_S)[1:] == (3.0, 3)


@needs_state
@pytest.mark.parametrize("dtype", [np.int16, np.float16, ml_dtypes.bfloat16, np.uint8, np.float32, np.float64])
def test_every_dtype_is_synced_also_where_it_is_not_aligned(master: MasterThread, dtype: type) -> None:
    def body(peer: Communicator, number: int) -> list[bool]:
        value = 3 if number else 5
        plain: np.ndarray[Any, Any] = np.full(2000, value, dtype)
        bytes_of_one = np.zeros(2000 * plain.itemsize + 1, np.uint8)
        shifted: np.ndarray[Any, Any] = bytes_of_one[1:].view(dtype)
        shifted[:] = value
        peer.sync_shared_state(state_of(plain=plain, shifted=shifted))
        return [bool((array.astype(float) == 3).all()) for array in (plain, shifted)]

    assert together(master, 3, body) == [[True, True]] * 3


@needs_state
def test_content_that_may_differ_is_left_alone(master: MasterThread) -> None:
    def body(peer: Communicator, number: int) -> float:
        own = np.full(10, float(number))
        common = np.ones(10)
        infos = [
            TensorInfo.from_numpy(own, "own", allow_content_inequality=True),
            TensorInfo.from_numpy(common, "common"),
        ]
        peer.sync_shared_state(SharedState(infos))
        return float(own[0])

    assert together(master, 2, body) == [0.0, 1.0]


@needs_state
def test_torch_tensors_are_synced(master: MasterThread) -> None:
    torch = pytest.importorskip("torch")

    def body(peer: Communicator, number: int) -> bool:
        weights = torch.full((40, 50), 2.0 if number else 9.0, dtype=torch.bfloat16)
        peer.sync_shared_state(SharedState([TensorInfo.from_torch(weights, "weights")]))
        return bool((weights == 2).all())

    assert together(master, 3, body) == [True] * 3


@needs_state
def test_a_revision_goes_up_by_exactly_one(master: MasterThread) -> None:
    def body(peer: Communicator, number: int) -> str:
        state = state_of(weights=np.zeros(10))
        peer.sync_shared_state(state)
        state.revision += 2
        return str(failing(lambda: peer.sync_shared_state(state), Result.INVALID_USAGE))

    for text in together(master, 2, body):
        assert "revision" in text


@needs_state
def test_a_sender_wins_over_receivers(master: MasterThread) -> None:
    def body(peer: Communicator, number: int) -> float:
        weights = np.full(5000, float(number))
        strategy = Strategy.RECEIVE_ONLY if number else Strategy.SEND_ONLY
        peer.sync_shared_state(state_of(weights=weights), strategy)
        return float(weights.max())

    assert together(master, 3, body) == [0.0] * 3


@needs_state
def test_enforcing_the_popular_content_is_for_all_or_for_nobody(master: MasterThread) -> None:
    def body(peer: Communicator, number: int) -> Result:
        strategy = Strategy.RECEIVE_ONLY if number else Strategy.ENFORCE_POPULAR
        state = state_of(weights=np.zeros(10))
        return failing(lambda: peer.sync_shared_state(state, strategy), Result.INVALID_USAGE).result

    assert together(master, 2, body) == [Result.INVALID_USAGE] * 2


@needs_state
def test_a_sync_waits_for_no_op_in_flight(master: MasterThread) -> None:
    def body(peer: Communicator, number: int) -> bool:
        handle = peer.all_reduce_async(np.ones(4), np.empty(4), op=SUM)
        state = state_of(weights=np.zeros(10))
        failing(lambda: peer.sync_shared_state(state), Result.PENDING_ASYNC_OPS)
        return handle.wait()[0]

    assert together(master, 2, body) == [True, True]


@needs_topology
def test_the_topology_is_optimised_and_ops_go_on(master: MasterThread) -> None:
    def body(peer: Communicator, number: int) -> float:
        peer.optimize_topology()
        ones = np.ones(50_000)
        peer.all_reduce(ones, ones, op=SUM)
        return float(ones.max())

    assert together(master, 3, body) == [3.0] * 3


@needs_quantisation
@pytest.mark.parametrize("algorithm", [pccl.QuantizationAlgorithm.MIN_MAX, pccl.QuantizationAlgorithm.ZERO_POINT_SCALE])
def test_quantised_values_are_close_the_same_everywhere_and_cheap(
    master: MasterThread, algorithm: pccl.QuantizationAlgorithm
) -> None:
    options = pccl.QuantizationOptions(pccl.DataType.UINT8, algorithm)
    size = 500_000

    def body(peer: Communicator, number: int) -> tuple[bytes, float, bool]:
        send, recv = np.random.default_rng(number).random(size, np.float32), np.empty(size, np.float32)
        info = peer.all_reduce(send, recv, op=ReduceOp.AVG, quantization_options=options)
        exact = sum(np.random.default_rng(each).random(size, np.float32) for each in range(3)) / 3
        return recv.tobytes(), float(np.abs(recv - exact).max()), info.tx_bytes < 4 * size / 2

    results = together(master, 3, body)
    assert len({values for values, _, _ in results}) == 1
    assert all(error < 0.02 and is_cheap for _, error, is_cheap in results)


@needs_quantisation
def test_a_peer_that_quantises_differently_is_told_both_sides_and_the_others_go_on(master: MasterThread) -> None:
    def body(peer: Communicator, number: int) -> str:
        both = np.ones(100_000, np.float32)
        is_odd = number == 2

        def call() -> pccl.ReduceInfo:
            options = pccl.QuantizationOptions() if is_odd else None
            return peer.all_reduce(both, both, op=SUM, quantization_options=options)

        if is_odd:
            return str(failing(call, Result.INVALID_USAGE))
        failing(call, Result.RANK_CONNECTION_LOST)
        assert call().local_world_size == 2
        return ""

    [text] = filter(None, together(master, 3, body))
    assert "minmax8" in text
    assert ", you) called " in text
