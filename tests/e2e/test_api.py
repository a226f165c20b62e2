"""The communicator over real sockets: several peers in one process, one thread each."""

import array
import asyncio
import contextlib
import gc
import logging
import re
import socket
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import ml_dtypes
import numpy as np
import pytest
from ports import free_port

import ringfold as rf
from ringfold.master.server import MasterThread
from ringfold.master.settings import MasterSettings

T = TypeVar("T")
DEADLINE_S = 30.0


@pytest.fixture
def master() -> Iterator[MasterThread]:
    with MasterThread() as running:
        yield running


def soon(look: Callable[[], bool]) -> None:
    """Look again and again until it is so."""
    deadline = time.monotonic() + DEADLINE_S
    while not look():
        assert time.monotonic() < deadline, "not in time"


def together(master: MasterThread, peers: int, body: Callable[[rf.Communicator], T]) -> list[T]:
    """Run `body` on `peers` peers of one group at the same time; their results by rank."""

    def one() -> tuple[int, T]:
        with rf.join(master.address, timeout_s=DEADLINE_S, op_timeout_s=DEADLINE_S) as run:
            while run.group_size < peers:
                run.update_topology(min_world=peers)
            rank = run.rank
            return rank, body(run)

    with ThreadPoolExecutor(peers) as pool:
        results = dict(future.result() for future in [pool.submit(one) for _ in range(peers)])
    return [results[rank] for rank in sorted(results)]


SIZES = [0, 1, 2, 7, 1_000, 5_000, 70_001]
"""Empty, smaller than the world, odd, inside one small op, and beyond it."""


@pytest.mark.parametrize("peers", [2, 3, 4, 5])
@pytest.mark.parametrize("evidence", ["ring", "master"])
def test_all_reduce_equals_numpy_and_is_the_same_everywhere(peers: int, evidence: str) -> None:
    settings = MasterSettings(evidence=evidence)  # type: ignore[arg-type]

    def body(run: rf.Communicator) -> list[bytes]:
        results = []
        for size in SIZES:
            numbers = np.random.default_rng([size, run.rank]).standard_normal(size).astype(np.float32)
            info = run.all_reduce(numbers)
            assert len(info.contributors) == peers
            results.append(numbers.tobytes())
        return results

    with MasterThread(settings) as master:
        results_of_all = together(master, peers, body)
    for index, size in enumerate(SIZES):
        assert len({results[index] for results in results_of_all}) == 1
        parts = [np.random.default_rng([size, rank]).standard_normal(size).astype(np.float32) for rank in range(peers)]
        expected = np.sum(parts, axis=0)
        np.testing.assert_allclose(np.frombuffer(results_of_all[0][index], np.float32), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("op", "expected"), [("sum", 9), ("avg", 3), ("prod", 24), ("min", 2), ("max", 4)])
def test_every_reduce_op(master: MasterThread, op: str, expected: int) -> None:
    def body(run: rf.Communicator) -> list[int]:
        numbers = np.full(3, run.rank + 2, np.int64)
        run.all_reduce(numbers, op=op)
        return [int(number) for number in numbers]

    assert together(master, 3, body) == [[expected] * 3] * 3


def test_lists_dicts_and_other_arrays_are_fused_and_changed_in_place(master: MasterThread) -> None:
    def body(run: rf.Communicator) -> None:
        ones = {
            "a": np.ones(5, np.float64),
            "b": array.array("h", [1] * 3),
            "c": np.ones(4, ml_dtypes.bfloat16),
            "d": bytearray(b"\x01" * 7),
        }
        run.all_reduce(ones)
        for name, numbers in ones.items():
            assert np.asarray(numbers).astype(np.float64).tolist() == [2.0] * len(numbers), name  # type: ignore[arg-type]

    together(master, 2, body)


def test_out_receives_the_result_and_the_source_is_kept(master: MasterThread) -> None:
    def body(run: rf.Communicator) -> None:
        for size in (10, 50_000):
            source, out = np.ones(size, np.float32), np.zeros(size, np.float32)
            source.flags.writeable = False
            run.all_reduce(source, out=out)
            assert (source == 1).all()
            assert (out == 2).all()

    together(master, 2, body)


def test_bits_may_be_called_bfloat16(master: MasterThread) -> None:
    def body(run: rf.Communicator) -> list[int]:
        bits = np.full(2, 0x3F80, np.uint16)
        run.all_reduce(bits, dtype="bfloat16")
        return [int(bit) for bit in bits]

    assert together(master, 2, body) == [[0x4000, 0x4000]] * 2


def test_the_other_collectives(master: MasterThread) -> None:
    def body(run: rf.Communicator) -> None:
        rank, size = run.rank, run.group_size
        for count in (3, 20_000):
            for root in range(size):
                numbers = np.full(count, rank, np.int32)
                run.broadcast(numbers, root=root)
                assert (numbers == root).all()
            gathered = run.all_gather(np.full((2, count), rank, np.int16))
            assert gathered.shape == (size, 2, count)
            assert [int(block.max()) for block in gathered] == list(range(size))
            source = np.arange(count * size, dtype=np.int64)
            chunk = run.reduce_scatter(source)
            assert chunk.tolist() == (size * source[rank * count : (rank + 1) * count]).tolist()
            assert source[-1] == count * size - 1
        out = np.zeros((size, 4), np.float32)
        assert run.all_gather(np.full(4, rank, np.float32), out=out) is out
        assert out[:, 0].tolist() == list(range(size))
        assert len(run.barrier().contributors) == size

    together(master, 3, body)


def test_many_tags_in_flight_and_handles_from_other_threads(master: MasterThread) -> None:
    def body(run: rf.Communicator) -> None:
        buffers = [np.full(1 + 4_000 * tag, tag, np.float32) for tag in range(20)]
        handles = [run.all_reduce_async(buffer, tag=tag) for tag, buffer in enumerate(buffers)]
        with ThreadPoolExecutor(4) as pool:
            infos = list(pool.map(lambda handle: handle.wait(DEADLINE_S), reversed(handles)))
        assert {len(info.contributors) for info in infos} == {2}
        assert all((buffer == 2 * tag).all() for tag, buffer in enumerate(buffers))
        assert handles[3].wait() is handles[3].wait()
        assert handles[3].done()

    together(master, 2, body)


def test_handles_can_be_awaited_without_blocking_the_loop(master: MasterThread) -> None:
    async def main(run: rf.Communicator) -> None:
        numbers = np.ones(10)
        handle = run.all_reduce_async(numbers, tag=1)
        if run.rank == 0:
            await handle
        else:
            # The loop turns while the other side is waited for.
            waiting, turns = asyncio.ensure_future(_of(handle)), 0
            while not waiting.done():
                await asyncio.sleep(0)
                turns += 1
            assert turns
        assert len((await handle).contributors) == 2
        assert (numbers == 2).all()

    async def _of(handle: rf.Handle) -> rf.ReduceInfo:
        return await handle

    together(master, 2, lambda run: asyncio.run(main(run)))


def test_a_wait_that_ends_early_leaves_the_op_running(master: MasterThread) -> None:
    late = threading.Event()

    def body(run: rf.Communicator) -> None:
        if run.rank == 0:
            handle = run.all_reduce_async(np.ones(3), tag=5)
            with pytest.raises(rf.DeadlineExceeded, match="still runs"):
                handle.wait(0.05)
            assert not handle.done()
            late.set()
            assert len(handle.wait(DEADLINE_S).contributors) == 2
        else:
            assert late.wait(DEADLINE_S)
            run.all_reduce(np.ones(3), tag=5)

    together(master, 2, body)


def test_ops_in_flight_exclude_topology_calls_and_their_own_tag(master: MasterThread) -> None:
    def body(run: rf.Communicator) -> None:
        handle = run.all_reduce_async(np.ones(3), tag=2)
        for call in (run.update_topology, run.meet, lambda: run.all_reduce(np.ones(3), tag=2)):
            with pytest.raises(rf.UsageError, match="in flight"):
                call()
        assert not run.are_peers_pending()
        run.all_reduce(np.ones(3), tag=3)
        handle.wait(DEADLINE_S)
        assert not run.are_peers_pending()

    together(master, 2, body)


def test_of_two_that_call_different_things_the_longer_member_is_right(master: MasterThread) -> None:
    def body(run: rf.Communicator) -> str:
        numbers = np.ones(3 + run.rank)
        with pytest.raises((rf.CallMismatch, rf.TooFewPeers)) as caught:
            run.all_reduce(numbers)
        assert (numbers == 1).all()
        return f"{type(caught.value).__name__}: {caught.value}"

    right, wrong = sorted(together(master, 2, body), reverse=True)
    assert right.startswith("TooFewPeers")
    assert wrong.startswith("CallMismatch")
    assert "3 x f64" in wrong
    assert ", you) called all_reduce(op=sum, 4 x f64" in wrong


def test_of_two_calls_that_can_never_meet_the_longest_members_is_right(master: MasterThread) -> None:
    def body(run: rf.Communicator) -> str:
        numbers = np.ones(100_000)
        if run.rank == 0:
            run.update_topology()
            return ""
        with pytest.raises(rf.CallMismatch, match="can never meet") as caught:
            run.all_reduce(numbers)
        assert (numbers == 1).all()
        return str(caught.value)

    right, wrong = sorted(together(master, 2, body))
    assert not right
    assert "waits in update_topology" in wrong
    assert ", you) waits in op tag 0 sequence 0" in wrong


def test_a_peer_that_does_not_take_part_is_named_at_the_ops_deadline(master: MasterThread) -> None:
    given_up = threading.Event()

    def body(run: rf.Communicator) -> None:
        if run.rank == 0:
            numbers = np.arange(100_000.0)
            with pytest.raises(rf.DeadlineExceeded) as caught:
                run.all_reduce(numbers, timeout_s=0.3)
            assert caught.value.peers == (run.members[1],)
            assert (numbers == np.arange(100_000.0)).all()
            given_up.set()
        else:
            assert given_up.wait(DEADLINE_S)
            with pytest.raises(rf.DeadlineExceeded, match="waited"):  # the same call, late
                run.all_reduce(np.arange(100_000.0))
        run.barrier()

    together(master, 2, body)


def test_a_vote_that_not_all_cast_names_the_missing_peers(master: MasterThread) -> None:
    given_up = threading.Event()

    def body(run: rf.Communicator) -> None:
        if run.rank == 0:
            with pytest.raises(rf.DeadlineExceeded) as caught:
                run.update_topology(timeout_s=0.3)
            assert caught.value.peers == (run.members[1],)
            given_up.set()
        else:
            assert given_up.wait(DEADLINE_S)
        run.barrier()

    together(master, 2, body)


def test_a_lone_peer_gets_too_few_peers(master: MasterThread) -> None:
    with rf.join(master.address) as run:
        for call in (run.barrier, lambda: run.all_reduce(np.ones(2)), lambda: run.all_gather(np.ones(2))):
            with pytest.raises(rf.TooFewPeers):
                call()
        assert not run.are_peers_pending()
        assert (run.rank, run.group_size, run.world_size, run.groups, run.largest_group) == (0, 1, 1, 1, 1)


def test_a_plain_loop_sees_a_newcomer_and_admits_it(master: MasterThread) -> None:
    """All members see the newcomer at the same turn of the loop: otherwise one would vote and the other reduce."""
    formed = threading.Event()

    def third() -> int:
        assert formed.wait(DEADLINE_S)
        with rf.join(master.address, timeout_s=DEADLINE_S) as run:
            return len(run.all_reduce(np.ones(1)).contributors)

    def body(run: rf.Communicator) -> int:
        formed.set()
        pending = False
        while not pending:
            run.all_reduce(np.ones(1))
            pending = run.are_peers_pending()
        run.update_topology()
        return len(run.all_reduce(np.ones(1)).contributors)

    with ThreadPoolExecutor(1) as pool:
        newcomer = pool.submit(third)
        assert together(master, 2, body) == [3, 3]
        assert newcomer.result(DEADLINE_S) == 3


def test_a_peer_that_leaves_does_not_disturb_the_others(master: MasterThread) -> None:
    def body(run: rf.Communicator) -> int:
        if run.rank == 1:
            return 0
        contributors = 3
        while contributors == 3:
            numbers = np.ones(40_000)
            contributors = len(run.all_reduce(numbers, op="avg").contributors)
            assert (numbers == 1).all()
        return contributors

    assert together(master, 3, body) == [2, 0, 2]


def test_without_retry_a_lost_peer_is_an_error_and_the_buffers_are_restored(master: MasterThread) -> None:
    begun = threading.Barrier(3, timeout=DEADLINE_S)

    def body(run: rf.Communicator) -> bool:
        if run.rank == 2:
            begun.wait()
            return False
        numbers, lost = np.arange(100_000.0), run.members[2]
        handle = run.all_reduce_async(numbers, retry=False)
        begun.wait()
        with pytest.raises(rf.PeerLost) as caught:
            handle.wait(DEADLINE_S)
        assert caught.value.peers == (lost,)
        assert (numbers == np.arange(100_000.0)).all()
        return len(run.all_reduce(numbers).contributors) == 2

    assert together(master, 3, body) == [True, True, False]


def test_groups_of_one_run_reduce_apart(master: MasterThread) -> None:
    ready = threading.Barrier(3, timeout=DEADLINE_S)

    def one(group: int, peers: int) -> float:
        with rf.join(master.address, group=group, timeout_s=DEADLINE_S, op_timeout_s=DEADLINE_S) as run:
            while run.world_size < 3:  # the same question on all peers, so that all leave the loop together
                run.update_topology()
            numbers = np.full(4, group + 1.0)
            if peers > 1:
                run.all_reduce(numbers)
            assert not run.are_peers_pending()
            assert (run.world_size, run.groups, run.largest_group) == (3, 2, 2)
            ready.wait()
            return float(numbers[0])

    with ThreadPoolExecutor(3) as pool:
        futures = [pool.submit(one, 0, 2), pool.submit(one, 0, 2), pool.submit(one, 1, 1)]
        assert [future.result(DEADLINE_S) for future in futures] == [2.0, 2.0, 2.0]


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda run: run.all_reduce(np.ones(3), op="median"), "median"),
        (lambda run: run.all_reduce(np.ones(3), tag=-1), "tag"),
        (lambda run: run.all_reduce(np.ones(3), timeout_s=0), "timeout"),
        (lambda run: run.all_reduce(np.ones(3), out=np.ones(4)), "out="),
        (lambda run: run.all_reduce([np.ones(4), None]), "array 1 is None"),
        (lambda run: run.broadcast(np.ones(3), root=9), "rank 9"),
        (lambda run: run.all_gather(np.ones(3), out=np.ones(5)), "out="),
        (lambda run: run.reduce_scatter(np.ones(3)), "equal chunks"),
        (lambda run: run.steps(min_world=0), "min_world"),
        (lambda run: run.steps(rf.SharedState(w=np.ones(2, object))), "'w'"),
    ],
)
def test_wrong_arguments_are_refused_before_anything_happens(
    master: MasterThread, call: Callable[[rf.Communicator], object], text: str
) -> None:
    def body(run: rf.Communicator) -> None:
        with pytest.raises(rf.UsageError, match=text):
            call(run)
        run.barrier()

    together(master, 2, body)


def test_a_handle_that_has_ended_keeps_no_arrays(master: MasterThread) -> None:
    """A program may keep its handles, of arrays that are used where they lie and of those that are staged."""

    def body(run: rf.Communicator) -> None:
        arrays = [np.ones((3, 4)), np.ones((3, 4)).T]
        handle = run.all_reduce_async(arrays)
        assert len(handle.wait().contributors) == 2
        assert (arrays[1] == 2).all()
        kept = [weakref.ref(array) for array in arrays]
        arrays.clear()
        assert [ref() for ref in kept] == [None, None]

    together(master, 2, body)


def test_nothing_is_left_after_leaving(master: MasterThread) -> None:
    before = threading.active_count()
    run = rf.join(master.address)
    assert threading.active_count() > before
    run.leave()
    run.leave()
    assert threading.active_count() == before
    for call in (lambda: run.all_reduce(np.ones(2)), run.update_topology, run.are_peers_pending, run.barrier):
        with pytest.raises(rf.UsageError, match="left the run"):
            call()


def test_a_peer_that_leaves_with_ops_in_flight_keeps_nothing_of_the_engine(master: MasterThread) -> None:
    """An evicted program often has handles that it never waits for; it may join again and again."""
    gc.collect()
    gc.disable()
    try:
        with rf.join(master.address) as other:
            run = _second(master, other)
            run.all_reduce_async(np.ones(50_000), tag=3)
            session = weakref.ref(run._session)
            run.leave()
            del run
            assert session() is None
    finally:
        gc.enable()


def _second(master: MasterThread, first: rf.Communicator) -> rf.Communicator:
    """One more peer of the run of `first`."""
    with ThreadPoolExecutor(1) as pool:
        joining = pool.submit(rf.join, master.address, timeout_s=DEADLINE_S)
        soon(first.are_peers_pending)
        first.update_topology()
        return joining.result()


def test_a_communicator_that_is_dropped_leaves_by_itself(master: MasterThread) -> None:
    before = threading.active_count()
    run = rf.join(master.address)
    del run
    assert threading.active_count() == before


def test_the_join_token_is_needed_and_enough() -> None:
    with MasterThread(token=b"secret") as master:
        with pytest.raises(rf.ConfigError, match=r"needs a token, and none was given: set RINGFOLD_TOKEN_FILE"):
            rf.join(master.address)
        with pytest.raises(rf.ConfigError, match=r"refused.* wrong token"):
            rf.join(master.address, token="wrong")
        with rf.join(master.address, token="secret") as run:
            assert run.group_size == 1


def test_a_token_for_a_master_that_has_none_is_refused_as_unexpected(master: MasterThread) -> None:
    with pytest.raises(rf.ConfigError, match=r"refused.* this master has no token, but one was given"):
        rf.join(master.address, token="secret")


def test_a_master_that_is_not_there_is_logged_at_once(caplog: pytest.LogCaptureFixture) -> None:
    unused = f"127.0.0.1:{free_port()}"
    why = r"nothing listens there \(Connection refused\): start `ringfold master` there, or correct the address"
    with pytest.raises(rf.MasterUnreachable, match=rf"{why} \(given up after 1\.0 s, join_timeout_s\)"):
        rf.join(unused, timeout_s=1)
    [line] = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert re.fullmatch(
        rf"the master at {unused} cannot be reached: {why}\. Trying for another 1 s \(join_timeout_s\)", line
    )


@pytest.mark.parametrize(
    ("sent", "why"),
    [
        (b"SSH-2.0-OpenSSH_9.6\r\n", r"no Ringfold master: it began with 'SSH-' \(an SSH server\?\)"),
        (b"", r"sent nothing within 0\.3 s, and a Ringfold master sends first"),
    ],
)
def test_something_that_is_no_master_is_named(sent: bytes, why: str, caplog: pytest.LogCaptureFixture) -> None:
    timings = rf.PeerTimings(handshake_ms=300)
    with _server(sent) as address, pytest.raises(rf.MasterUnreachable, match=why):
        rf.join(address, timeout_s=1, timings=timings)
    assert re.search(why, caplog.text)


@contextlib.contextmanager
def _server(sent: bytes) -> Iterator[str]:
    """Another program's port: it sends `sent` to every client, and waits."""
    came: list[socket.socket] = []
    with socket.create_server(("127.0.0.1", 0)) as listener, contextlib.ExitStack() as stack:

        def serve() -> None:
            with contextlib.suppress(OSError):
                while True:
                    came.append(stack.enter_context(listener.accept()[0]))
                    came[-1].sendall(sent)

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield f"127.0.0.1:{listener.getsockname()[1]}"
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            thread.join()


def test_an_unreachable_master_is_an_error_that_names_it() -> None:
    with pytest.raises(rf.MasterUnreachable, match=r"127\.0\.0\.1:1 .*refused"):
        rf.join("127.0.0.1:1", timeout_s=0.2)


def test_addresses_are_tried_in_turn(master: MasterThread) -> None:
    with rf.join(f"127.0.0.1:1, {master.address}", timeout_s=DEADLINE_S) as run:
        assert run.group_size == 1


def test_a_process_may_host_the_master() -> None:
    before = threading.active_count()
    with rf.join("127.0.0.1:0", host_master=True) as run:
        assert run.group_size == 1
    assert threading.active_count() == before


def test_losing_the_master_ends_the_session_with_its_reason(caplog: pytest.LogCaptureFixture) -> None:
    with MasterThread() as master:
        run = rf.join(master.address)
    with caplog.at_level(logging.WARNING), pytest.raises(rf.MasterUnreachable):
        run.update_topology(timeout_s=DEADLINE_S)
    with pytest.raises(rf.MasterUnreachable):
        run.all_reduce(np.ones(2))
    run.leave()


def test_out_may_be_the_buffer_itself_and_nothing_that_overlaps_it(master: MasterThread) -> None:
    def body(run: rf.Communicator) -> tuple[float, float]:
        memory = np.full(300_000, run.rank + 1.0)
        run.all_reduce(memory, out=memory)
        with pytest.raises(rf.UsageError, match="overlaps"):
            run.all_reduce(memory[:200], out=memory[100:300])
        with pytest.raises(rf.UsageError, match="written twice"):
            run.all_reduce([memory[:200], memory[100:300]])
        return float(memory.min()), float(memory.max())

    assert together(master, 2, body) == [(3.0, 3.0)] * 2


def test_pending_is_the_same_whatever_the_order_of_waiting(master: MasterThread) -> None:
    """Of two ops, only the second knows of the newcomer; both orders of waiting for them must give one answer."""

    def body(run: rf.Communicator) -> bool:
        first = run.all_reduce_async(np.ones(4), tag=1)
        soon(lambda: run._session.engine.stats()["committed"] == 1)  # done() would wait for it
        begun.wait()
        if run.rank == 0:
            # The master knows of a newcomer before a peer does: only what this peer has received goes into its next op.
            soon(lambda: run._session.locked(lambda machine: machine._facts.registrations) == 3)
        second = run.all_reduce_async(np.ones(4), tag=2)
        for handle in (second, first) if run.rank == 0 else (first, second):
            handle.wait(DEADLINE_S)
        pending = run.are_peers_pending()
        if pending:
            run.update_topology()
        return pending

    def newcomer() -> int:
        begun.wait()
        with rf.join(master.address, timeout_s=DEADLINE_S) as run:
            return run.group_size

    begun = threading.Barrier(3, timeout=DEADLINE_S)
    with ThreadPoolExecutor(1) as pool:
        late = pool.submit(newcomer)
        assert together(master, 2, body) == [True, True]
        assert late.result(DEADLINE_S) == 3


def test_a_death_after_many_small_ops_under_many_tags_is_survived(master: MasterThread) -> None:
    """A seal carries the last small result of every tag; together they must fit into what a connection takes."""

    def body(run: rf.Communicator) -> int:
        numbers = np.ones(8_000, np.float32)
        for tag in range(1_000):
            run.all_reduce(numbers, op="max", tag=tag)
        run.barrier()
        if run.rank == 2:
            return 0
        info = run.all_reduce(numbers, op="max")
        while len(info.contributors) == 3:
            info = run.all_reduce(numbers, op="max")
        return len(info.contributors)

    assert together(master, 3, body) == [2, 2, 0]


def test_a_host_of_the_master_that_listens_everywhere_can_be_joined() -> None:
    with rf.join("0.0.0.0:0", host_master=True, token="a secret of 16 bytes or more", timeout_s=DEADLINE_S) as run:
        assert run.world_size == 1


def test_a_port_that_is_taken_is_a_clear_error_of_the_hosting_peer(master: MasterThread) -> None:
    with pytest.raises(rf.ConfigError, match="cannot listen"):
        rf.join(master.address, host_master=True, timeout_s=DEADLINE_S)


def test_a_congestion_control_that_the_kernel_does_not_have_is_a_clear_error(
    master: MasterThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RINGFOLD_CONGESTION", "nonsense")
    with pytest.raises(rf.ConfigError, match="congestion: this kernel has no 'nonsense'"):
        rf.join(master.address, timeout_s=DEADLINE_S)


def test_a_call_that_missed_its_deadline_is_never_joined_by_a_late_peer(master: MasterThread) -> None:
    """A's call 0 ends with DeadlineExceeded, A goes on to call 1, and B, which is late, makes call 0: it fails, too."""
    gave_up = threading.Event()

    def body(run: rf.Communicator) -> list[float]:
        results = []
        is_late = run.rank == 1
        for call in range(2):
            numbers = np.full(100_000, 10.0**call)
            if is_late and call == 0:
                assert gave_up.wait(DEADLINE_S)
            try:
                run.all_reduce(numbers, timeout_s=0.3 if (call, is_late) == (0, False) else 3.0)
                results.append(float(numbers[0]))
            except rf.DeadlineExceeded:
                results.append(-1.0)
            if not is_late:
                gave_up.set()
        return results

    early, late = together(master, 2, body)
    assert early[0] == -1.0
    assert 11.0 not in (*early, *late), "call 1 of one peer was reduced with call 0 of the other"
    assert late == early


def test_a_newcomer_waits_for_long_steps_beyond_its_timeout(master: MasterThread) -> None:
    """The steps take longer than its timeout, and it is admitted at the end of one all the same."""
    work_s, stepping = 3.0, threading.Event()

    def train(name: str, timeout_s: float, work_s: float) -> int:
        """How many took part in the last step."""
        contributors = 0
        with rf.join(master.address, name=name, timeout_s=timeout_s) as run:
            for step in run.steps(rf.SharedState(w=np.zeros(4, np.float32)), until=4, min_world=2):
                if step.number == 1:
                    stepping.set()
                if step.number < 3:
                    threading.Event().wait(work_s)
                contributors = len(step.all_reduce(np.ones(4, np.float32)).contributors)
        return contributors

    with ThreadPoolExecutor(3) as pool:
        results = [pool.submit(train, name, DEADLINE_S, work_s) for name in ("one", "two")]
        assert stepping.wait(DEADLINE_S)
        results.append(pool.submit(train, "late", 2.0, 0.0))
        assert [result.result() for result in results] == [3, 3, 3]


def test_a_newcomer_that_is_not_admitted_names_the_peers_that_have_not_voted(master: MasterThread) -> None:
    with rf.join(master.address, name="busy") as run:
        why = (
            r"peer 2 \(late, you\) was not admitted within .* these have not called update_topology: "
            r"peer 1 \(busy\) has been in its own code for .* join_timeout_s \(2 s\)"
        )
        with pytest.raises(rf.DeadlineExceeded, match=why) as caught:
            rf.join(master.address, name="late", timeout_s=2)
        assert caught.value.peers == (run.peer_id,)


def test_a_run_in_which_all_is_well_warns_of_nothing(caplog: pytest.LogCaptureFixture) -> None:
    def body(run: rf.Communicator) -> int:
        contributors = 0
        for step in run.steps(rf.SharedState(w=np.zeros(4, np.float32)), until=20, min_world=3):
            contributors = len(step.all_reduce(np.ones(4, np.float32)).contributors)
        return contributors

    with caplog.at_level(logging.INFO, "ringfold"), MasterThread() as master:
        assert together(master, 3, body) == [3, 3, 3]
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING] == []
    assert "registered for group 0" in caplog.text
