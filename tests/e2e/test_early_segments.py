"""Peers that call many ops before a neighbour does: what is sent early has a limit that both sides know."""

import threading
import time
from collections.abc import Callable

import numpy as np
import pytest
from test_api import DEADLINE_S, together

import ringfold as rf
from ringfold.master.server import MasterThread
from ringfold.master.settings import MasterSettings

MIB = 1 << 20
QUIET_S = 0.3
HEARTBEATS_BYTES = 10_000


def in_turns(peers: int, ops: int, floats: int, late: int) -> Callable[[rf.Communicator], tuple[int, ...]]:
    """A program with many ops in flight; the rank that is late makes its calls when the others have made all theirs."""
    called = threading.Barrier(peers)

    def body(run: rf.Communicator) -> tuple[int, ...]:
        run.barrier()
        world, epoch = run.group_size, run.epoch
        arrays = [np.full(floats, tag + run.rank, np.float32) for tag in range(ops)]
        if run.rank == late:
            called.wait(DEADLINE_S)
            until_nothing_comes(run)
        handles = [run.all_reduce_async(array, tag=tag) for tag, array in enumerate(arrays)]
        if run.rank != late:
            called.wait(DEADLINE_S)
        for handle in handles:
            handle.wait(DEADLINE_S)
        members = (run.epoch - epoch, *sorted(run.members))
        for tag, array in enumerate(arrays):
            assert (array == world * tag + sum(range(world))).all(), tag
        run.barrier()
        return members

    return body


def until_nothing_comes(run: rf.Communicator) -> None:
    """The neighbours have sent what they may send early when nothing has come for a while."""
    received, since = 0, time.monotonic()
    while time.monotonic() - since < QUIET_S:
        now = run._session.engine.stats()["received_bytes"]
        if now - received > HEARTBEATS_BYTES:
            received, since = now, time.monotonic()


@pytest.mark.parametrize(
    ("peers", "ops", "op_bytes", "segment_bytes"),
    [(2, 70, MIB, MIB), (2, 400, 192 * 1024, MIB), (2, 20, 8 * MIB, 8 * MIB), (3, 250, MIB, MIB)],
    ids=["70 ops of 1 MiB", "400 ops of 192 KiB", "large segments", "three peers"],
)
def test_a_peer_that_calls_late_stays_a_member(peers: int, ops: int, op_bytes: int, segment_bytes: int) -> None:
    with MasterThread(MasterSettings(segment_bytes=segment_bytes)) as master:
        ends = together(master, peers, in_turns(peers, ops, op_bytes // 4, late=1))
    assert set(ends) == {(0, *range(1, peers + 1))}, "a link was dropped"
