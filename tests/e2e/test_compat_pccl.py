"""The PCCL API over real sockets, written as a PCCL user writes: several peers in one process, one thread each."""

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import ml_dtypes
import numpy as np
import pytest

from ringfold.compat import pccl
from ringfold.compat.pccl import Attribute, Communicator, PCCLError, ReduceOp, Result
from ringfold.master.server import MasterThread

T = TypeVar("T")
DEADLINE_S = 30.0
SUM = ReduceOp.SUM


@pytest.fixture(autouse=True)
def _deadlines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RINGFOLD_OP_TIMEOUT_S", str(DEADLINE_S))
    monkeypatch.setenv("RINGFOLD_JOIN_TIMEOUT_S", str(DEADLINE_S))


@pytest.fixture
def master() -> Iterator[MasterThread]:
    with MasterThread() as running:
        yield running


def connected(address: str, peers: int, group: int = 0) -> Communicator:
    """A peer, once the run has so many."""
    peer = Communicator(address, group)
    peer.connect()
    deadline = time.monotonic() + DEADLINE_S
    while (found := peer.get_attribute(Attribute.GLOBAL_WORLD_SIZE)) < peers:
        assert time.monotonic() < deadline, f"{found} peers, not {peers}"
        peer.update_topology()
    return peer


def together(address: str, peers: int, body: Callable[[Communicator, int], T], groups: int = 1) -> list[T]:
    """Run `body` on several peers at the same time; each is given its number. Its communicator is destroyed after."""
    all_connected = threading.Barrier(peers)  # else one that is soon through has left before another has seen it

    def one(number: int) -> T:
        peer = connected(address, peers, number % groups)
        all_connected.wait(DEADLINE_S)
        return body(peer, number)

    with ThreadPoolExecutor(peers) as pool:
        return [future.result(DEADLINE_S) for future in [pool.submit(one, number) for number in range(peers)]]


def failing(call: Callable[[], object], result: Result, text: str = "") -> PCCLError:
    with pytest.raises(PCCLError) as caught:
        call()
    assert caught.value.result is result, caught.value
    assert text in str(caught.value)
    return caught.value


# Connecting


def test_connect_gives_up_after_its_attempts_with_a_plain_exception() -> None:
    with MasterThread() as master:
        address = master.address
    began = time.monotonic()
    with pytest.raises(Exception, match="in 2 attempts") as caught:
        Communicator(address).connect(n_attempts=2)
    assert type(caught.value) is Exception
    assert 1.0 <= time.monotonic() - began < 5.0


def test_connect_finds_a_master_that_comes_between_two_attempts() -> None:
    with MasterThread() as master:
        address = master.address
    peer = Communicator(address)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(peer.connect, 20)
        with MasterThread(listen=[address]):
            waiting.result(DEADLINE_S)
            assert peer.get_attribute(Attribute.GLOBAL_WORLD_SIZE) == 1
            del peer


def test_connect_returns_when_the_others_accept(master: MasterThread) -> None:
    first = connected(master.address, 1)
    second = Communicator(master.address)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(second.connect)
        deadline = time.monotonic() + DEADLINE_S
        while not first.are_peers_pending():
            assert time.monotonic() < deadline
        assert not waiting.done()
        assert first.get_attribute(Attribute.GLOBAL_WORLD_SIZE) == 1
        first.update_topology()
        waiting.result(DEADLINE_S)
    assert second.get_attribute(Attribute.GLOBAL_WORLD_SIZE) == 2


def test_a_connected_communicator_does_not_connect_again(master: MasterThread) -> None:
    peer = connected(master.address, 1)
    failing(peer.connect, Result.INVALID_USAGE, "is connected")


def test_a_refusal_ends_connect_at_once() -> None:
    with MasterThread(token=b"secret") as master, pytest.raises(Exception, match="refused") as caught:
        Communicator(master.address).connect(n_attempts=1_000)
    assert type(caught.value) is Exception


def test_a_token_file_in_the_environment_opens_the_door(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "token"
    file.write_text("secret\n")
    file.chmod(0o600)
    monkeypatch.setenv("RINGFOLD_TOKEN_FILE", str(file))
    with MasterThread(token=b"secret") as master:
        assert connected(master.address, 1).get_attribute(Attribute.LOCAL_WORLD_SIZE) == 1


@pytest.mark.parametrize("listen", ["localhost:0", "[::1]:0"])
def test_names_and_ipv6_addresses_are_connected_to(listen: str) -> None:
    with MasterThread(listen=[listen]) as master:
        port = master.address.rpartition(":")[2]
        address = f"{listen.rpartition(':')[0]}:{port}"
        results = together(address, 2, lambda peer, _: peer.all_reduce(np.ones(4), np.empty(4), op=SUM))
    assert [info.local_world_size for info in results] == [2, 2]


def test_a_communicator_leaves_when_it_is_destroyed(master: MasterThread) -> None:
    def body(peer: Communicator, number: int) -> int:
        if number == 0:
            return 0
        with pytest.raises(PCCLError):
            peer.all_reduce(np.ones(4), np.empty(4), op=SUM)
        return peer.get_attribute(Attribute.GLOBAL_WORLD_SIZE)

    assert together(master.address, 2, body)[1] == 1


def test_attributes_tell_of_groups(master: MasterThread) -> None:
    def body(peer: Communicator, number: int) -> list[int]:
        return [peer.get_attribute(attribute) for attribute in Attribute]

    ready = threading.Barrier(3)

    def steady(peer: Communicator, number: int) -> list[int]:
        found = body(peer, number)
        ready.wait(DEADLINE_S)
        return found

    assert together(master.address, 3, steady, groups=2) == [[3, 2, 2, 2], [3, 1, 2, 2], [3, 2, 2, 2]]


# All-reduce


DTYPES = [
    *(np.uint8, np.int8, np.uint16, np.int16, np.uint32, np.int32, np.uint64, np.int64),
    *(np.float16, ml_dtypes.bfloat16, np.float32, np.float64),
]


@pytest.mark.parametrize("op", list(ReduceOp))
def test_every_dtype_is_reduced(master: MasterThread, op: ReduceOp) -> None:
    expected = {"SUM": 6, "AVG": 3, "PROD": 8, "MAX": 4, "MIN": 2}[op.name]

    def body(peer: Communicator, number: int) -> list[bool]:
        right = []
        for dtype in DTYPES:
            for size in (5, 40_000):
                send, recv = np.full(size, 2 + 2 * number, dtype), np.zeros(size, dtype)
                info = peer.all_reduce(send, recv, op=op)
                right.append(info.local_world_size == 2 and bool((recv.astype(float) == expected).all()))
                right.append(bool((send.astype(float) == 2 + 2 * number).all()))
        return right

    assert all(all(right) for right in together(master.address, 2, body))


def test_torch_tensors_are_reduced(master: MasterThread) -> None:
    torch = pytest.importorskip("torch")

    def body(peer: Communicator, number: int) -> list[bool]:
        right = []
        for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8):
            both = torch.full((300, 7), number + 1, dtype=dtype)
            peer.all_reduce(both, both, op=SUM)
            right.append(bool((both == 3).all()))
        return right

    assert together(master.address, 2, body) == [[True] * 5] * 2


def test_memory_that_is_not_aligned_is_reduced(master: MasterThread) -> None:
    def body(peer: Communicator, number: int) -> list[float]:
        both = np.zeros(4 * 1000 + 1, np.uint8)[1:].view(np.float32)
        both += number + 1
        peer.all_reduce(both, both, op=SUM)
        return sorted({float(value) for value in both})

    assert together(master.address, 2, body) == [[3.0], [3.0]]


def test_alone_there_are_too_few_peers(master: MasterThread) -> None:
    peer = connected(master.address, 1)
    ones = np.ones(4)
    failing(lambda: peer.all_reduce(ones, ones, op=SUM), Result.TOO_FEW_PEERS)
    failing(lambda: peer.all_reduce_async(ones, ones, op=SUM), Result.TOO_FEW_PEERS)
    batch = [pccl.ReduceOpDescriptor.from_numpy(ones, ones, pccl.ReduceDescriptor(4, SUM, 0))]
    failing(lambda: peer.all_reduce_multiple_with_retry(batch), Result.TOO_FEW_PEERS)
    assert (ones == 1).all()


def test_of_two_peers_that_disagree_the_later_one_is_told_both_sides(master: MasterThread) -> None:
    def body(peer: Communicator, number: int) -> tuple[Result, str]:
        both = np.ones(1000 + number, np.float32)
        with pytest.raises(PCCLError) as caught:
            peer.all_reduce(both, both, op=SUM)
        assert (both == 1).all()
        return caught.value.result, str(caught.value)

    results = dict(together(master.address, 2, body))
    assert results.keys() == {Result.INVALID_USAGE, Result.RANK_CONNECTION_LOST}
    assert "4000 bytes" in results[Result.INVALID_USAGE]
    assert "4004 bytes" in results[Result.INVALID_USAGE]


@pytest.mark.parametrize("size", [50, 400_000])
def test_an_aborted_op_leaves_its_buffer_as_it_was_and_is_called_again(master: MasterThread, size: int) -> None:
    """Two of three are in an op when the third goes; they read the world size and call again, as PCCL programs do."""

    def body(peer: Communicator, number: int) -> tuple[list[Result], float]:
        both = np.full(size, number + 1.0)
        seen: list[Result] = []
        if number == 2:
            peer.all_reduce(np.ones(1), np.ones(1), op=SUM, tag=1)  # all are here
            return seen, 0.0
        peer.all_reduce(np.ones(1), np.ones(1), op=SUM, tag=1)
        while True:
            try:
                info = peer.all_reduce(both, both, op=SUM)
                break
            except PCCLError as error:
                seen.append(error.result)
                assert (both == number + 1).all()
                assert peer.get_attribute(Attribute.LOCAL_WORLD_SIZE) == 2
        assert info.local_world_size == 2
        return seen, float(both.max())

    results = together(master.address, 3, body)
    assert [value for _, value in results[:2]] == [3.0, 3.0]
    assert {result for seen, _ in results for result in seen} <= {Result.RANK_CONNECTION_LOST}


def test_a_program_that_goes_to_its_loops_top_after_an_abort_meets_the_others(master: MasterThread) -> None:
    """One peer saw the abort and updates the topology; the other had not called the op yet and stands in it."""
    gone, aborted = threading.Event(), threading.Event()

    def body(peer: Communicator, number: int) -> float:
        both = np.full(10, number + 1.0)
        peer.all_reduce(np.ones(1), np.ones(1), op=SUM, tag=1)
        if number == 2:
            del peer
            gone.set()
            return 3.0
        if number == 1:
            assert aborted.wait(DEADLINE_S)
        while True:
            try:
                peer.all_reduce(both, both, op=SUM)
                return float(both[0])
            except PCCLError:
                aborted.set()
                peer.update_topology()

    def leaving(number: int) -> float:
        return body(connected(master.address, 3), number)

    with ThreadPoolExecutor(3) as pool:
        futures = [pool.submit(leaving, number) for number in range(3)]
        assert [future.result(DEADLINE_S) for future in futures] == [3.0, 3.0, 3.0]


# Async


def test_many_tags_in_flight(master: MasterThread) -> None:
    def body(peer: Communicator, number: int) -> list[float]:
        arrays = [np.full(3000, float(number + tag)) for tag in range(16)]
        order = range(16) if number else reversed(range(16))
        handles = {tag: peer.all_reduce_async(arrays[tag], arrays[tag], op=SUM, tag=tag) for tag in order}
        for tag in range(16):
            is_success, status, info = handles[tag].wait()
            assert (is_success, status, info.local_world_size) == (True, Result.SUCCESS, 2)
            assert info.tx_bytes > 0
            assert handles[tag].wait() == (is_success, status, info)
        return [float(array.max()) for array in arrays]

    expected = [2.0 * tag + 1 for tag in range(16)]
    assert together(master.address, 2, body) == [expected, expected]


def test_a_failed_wait_raises_nothing_and_gives_the_same_answer_twice(master: MasterThread) -> None:
    # A peer that calls the op only after it failed for the others starts it again, alone, while they continue.
    called = threading.Barrier(3, timeout=DEADLINE_S)

    def body(peer: Communicator, number: int) -> bool:
        both = np.full(100_000, number + 1.0)
        peer.all_reduce(np.ones(1), np.ones(1), op=SUM)
        if number == 2:
            called.wait()
            return True
        handle = peer.all_reduce_async(both, both, op=SUM, tag=5)
        called.wait()
        answer = handle.wait()
        assert answer == (False, Result.RANK_CONNECTION_LOST, pccl.ReduceInfo(0, 0, 0)) == handle.wait()
        assert (both == number + 1).all()
        peer.update_topology()  # it has been waited for, so nothing is in flight
        return peer.get_attribute(Attribute.LOCAL_WORLD_SIZE) == 2

    assert together(master.address, 3, body) == [True, True, True]


def test_run_wide_calls_wait_for_no_op_in_flight(master: MasterThread) -> None:
    def body(peer: Communicator, number: int) -> list[str]:
        both = np.ones(8)
        handle = peer.all_reduce_async(both, both, op=SUM, tag=9)
        errors = [
            failing(peer.update_topology, Result.PENDING_ASYNC_OPS, "tag 9"),
            failing(peer.optimize_topology, Result.PENDING_ASYNC_OPS),
        ]
        assert not peer.are_peers_pending()  # PCCL's programs call it with ops in flight
        assert handle.wait()[0]
        peer.update_topology()
        return [error.func_name for error in errors]

    assert together(master.address, 2, body) == [["update_topology", "optimize_topology"]] * 2


def test_a_tag_is_free_as_soon_as_its_op_is_done(master: MasterThread) -> None:
    """A program need not wait for a handle before the next op under its tag, if it knows that the op is done."""

    def body(peer: Communicator, number: int) -> float:
        first, second = np.ones(8), np.ones(8)
        early = peer.all_reduce_async(first, first, op=SUM, tag=1)
        deadline = time.monotonic() + DEADLINE_S
        while first[0] == 1 and time.monotonic() < deadline:
            pass
        late = None
        while late is None:
            try:
                late = peer.all_reduce_async(second, second, op=SUM, tag=1)
            except PCCLError:  # the bytes are there a moment before the op is over
                assert time.monotonic() < deadline
        assert early.wait()[0]
        assert late.wait()[0]
        return float(second[0])

    assert together(master.address, 2, body) == [2.0, 2.0]


# The batch


def batch_of(arrays: list[np.ndarray], op: ReduceOp = SUM) -> list[pccl.ReduceOpDescriptor]:
    return [
        pccl.ReduceOpDescriptor.from_numpy(array, array, pccl.ReduceDescriptor(array.size, op, tag))
        for tag, array in enumerate(arrays)
    ]


def test_a_batch_reduces_everything(master: MasterThread) -> None:
    def body(peer: Communicator, number: int) -> tuple[int, list[float]]:
        arrays = [np.full(5000 + tag, float(number + tag)) for tag in range(11)]
        info = peer.all_reduce_multiple_with_retry(batch_of(arrays), max_in_flight=3)
        assert info.tx_bytes > 0
        assert info.rx_bytes > 0
        peer.update_topology()  # nothing is in flight any more
        return info.local_world_size, [float(array.max()) for array in arrays]

    assert together(master.address, 2, body) == [(2, [2.0 * tag + 1 for tag in range(11)])] * 2


def test_a_batch_without_ops_tells_the_world_size(master: MasterThread) -> None:
    info = connected(master.address, 1).all_reduce_multiple_with_retry([])
    assert info == pccl.ReduceInfo(1, 0, 0)


def test_bad_batches_are_refused_before_anything_is_sent(master: MasterThread) -> None:
    refused = threading.Event()

    def body(peer: Communicator, number: int) -> bool:
        twice = [batch_of([np.ones(4)])[0], batch_of([np.ones(4)])[0]]
        run = peer.all_reduce_multiple_with_retry
        failing(lambda: run(twice), Result.INVALID_ARGUMENT, "two ops of the batch have tag 0")
        failing(lambda: run(batch_of([np.ones(4)]), max_in_flight=0), Result.INVALID_ARGUMENT, "max_in_flight")
        if number:
            assert refused.wait(DEADLINE_S)
        handle = peer.all_reduce_async(np.ones(4), np.empty(4), op=SUM, tag=0)
        if not number:
            failing(lambda: run(batch_of([np.ones(4)])), Result.INVALID_USAGE, "tag 0 is in flight")
            refused.set()
        return handle.wait()[0]

    assert together(master.address, 2, body) == [True, True]


def test_a_batch_whose_peers_all_leave_tells_what_was_completed(master: MasterThread) -> None:
    def body(peer: Communicator, number: int) -> tuple[int, ...]:
        arrays = [np.ones(4) for _ in range(6)]
        if number == 1:
            peer.all_reduce_multiple_with_retry(batch_of(arrays[:2]))
            return ()
        call = peer.all_reduce_multiple_with_retry
        error = failing(lambda: call(batch_of(arrays), max_in_flight=2), Result.TOO_FEW_PEERS)
        assert [float(array[0]) for array in arrays] == [2.0, 2.0, 1.0, 1.0, 1.0, 1.0]
        return error.completed_tags

    assert together(master.address, 2, body)[0] == (0, 1)


def test_a_batch_meets_single_ops_of_the_same_tags(master: MasterThread) -> None:
    """One peer uses the helper, the other plain calls: as in PCCL, that is the same."""

    def body(peer: Communicator, number: int) -> list[float]:
        arrays = [np.ones(20_000) for _ in range(4)]
        if number:
            for tag, array in enumerate(arrays):
                peer.all_reduce(array, array, op=SUM, tag=tag)
        else:
            peer.all_reduce_multiple_with_retry(batch_of(arrays))
        return [float(array[-1]) for array in arrays]

    assert together(master.address, 2, body) == [[2.0] * 4] * 2
