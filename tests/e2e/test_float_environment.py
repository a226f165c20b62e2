"""The rounding mode and the treatment of subnormal numbers belong to a thread. Results must not depend on them."""

import ctypes
import platform
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
from test_api import DEADLINE_S, together

import ringfold as rf
from ringfold.master.server import MasterThread

pytestmark = pytest.mark.skipif(platform.machine() != "x86_64", reason="sets a register of x86-64")

libm = ctypes.CDLL("libm.so.6")
MXCSR_AT = 28
"""Where glibc's fenv_t keeps MXCSR on x86-64."""
FLUSH_TO_ZERO, DENORMALS_ARE_ZERO, ROUND_UP = 0x8000, 0x0040, 0x4000
TINY = np.float32(1e-45)  # the smallest subnormal number


class Environment(ctypes.Structure):
    _fields_ = [("text", ctypes.c_uint8 * MXCSR_AT), ("mxcsr", ctypes.c_uint32)]


def mxcsr() -> int:
    now = Environment()
    libm.fegetenv(ctypes.byref(now))
    return int(now.mxcsr)


@contextmanager
def other_arithmetic(bits: int) -> Iterator[None]:
    """What torch.set_flush_denormal, or a library that was compiled with -ffast-math, does to its thread."""
    before = Environment()
    libm.fegetenv(ctypes.byref(before))
    changed = Environment.from_buffer_copy(before)
    changed.mxcsr |= bits
    libm.fesetenv(ctypes.byref(changed))
    try:
        yield
    finally:
        libm.fesetenv(ctypes.byref(before))


def test_the_test_itself_changes_the_arithmetic() -> None:
    tiny = np.full(64, TINY)
    with other_arithmetic(FLUSH_TO_ZERO | DENORMALS_ARE_ZERO):
        assert not (tiny + tiny).any()
    assert (tiny + tiny).all()


@pytest.mark.parametrize("quantize", [None, "minmax8"])
@pytest.mark.parametrize("floats", [100, 5_000, 60_000, 1_000_000], ids=lambda floats: f"{floats}-floats")
def test_all_peers_get_the_same_bits_whatever_their_threads_have_set(floats: int, quantize: str | None) -> None:
    """Small ops are folded when they commit; large ones are reduced by the thread that drives the engine."""
    bits = FLUSH_TO_ZERO | DENORMALS_ARE_ZERO | ROUND_UP

    def numbers(rank: int, kind: int) -> np.ndarray:
        if kind == 0:
            return np.full(floats, TINY * (rank + 1), np.float32)
        return np.random.default_rng((rank, kind)).standard_normal(floats).astype(np.float32)

    def body(run: rf.Communicator) -> list[bytes]:
        rank, results = run.rank, []
        inputs = [(numbers(rank, kind), numbers(rank, kind)) for kind in range(2)]
        with other_arithmetic(bits if rank == 0 else 0):
            before = mxcsr()
            for blocking, handled in inputs:
                run.all_reduce(blocking, quantize=quantize)
                run.all_reduce_async(handled, quantize=quantize, tag=1).wait(DEADLINE_S)
                results += [blocking.tobytes(), handled.tobytes()]
            assert mxcsr() & bits == before & bits, "the caller's own environment is not put back"
        return results

    with MasterThread() as master:
        all_ranks = together(master, 3, body)
    assert all_ranks[0] == all_ranks[1] == all_ranks[2]
    if quantize is None:
        assert (np.frombuffer(all_ranks[0][0], np.float32) == 6 * TINY).all()


def test_a_session_that_is_made_under_other_arithmetic_computes_like_the_rest() -> None:
    """A thread inherits the environment of the one that made it, and the engine's is made in `join`."""
    made = threading.Barrier(2)

    def join(bits: int, results: list[bytes]) -> None:
        with other_arithmetic(bits), rf.join(master.address, timeout_s=DEADLINE_S) as run:
            while run.group_size < 2:
                run.update_topology(min_world=2)
            made.wait(DEADLINE_S)
            array = np.full(400_000, TINY)
            run.all_reduce_async(array).wait(DEADLINE_S)
            results.append(array.tobytes())
            run.barrier()

    results: list[bytes] = []
    with MasterThread() as master:
        both = (0, FLUSH_TO_ZERO | DENORMALS_ARE_ZERO)
        peers = [threading.Thread(target=join, args=(bits, results)) for bits in both]
        for peer in peers:
            peer.start()
        for peer in peers:
            peer.join(DEADLINE_S)
    assert len(results) == 2
    assert results[0] == results[1] == np.full(400_000, 2 * TINY).tobytes()
