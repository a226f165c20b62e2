"""
Ringfold's native core: kernels, the state hash, the sans-I/O engine core, the engine with sockets, and the prober.
"""

from collections.abc import Sequence
from typing import Annotated

import numpy
from numpy.typing import NDArray


def cpu_level() -> str:
    """Which kernels run here: avx512, avx2 or generic."""

def set_cpu_level(level: str) -> bool:
    """For tests: choose the kernels; False if the CPU cannot."""

def crc32c(data: bytes, seed: int = 0) -> int:
    """CRC-32C, chained from `seed`."""

def reduce(dtype: int, reduce_op: int, target: Annotated[NDArray, dict(order='C', device='cpu')], a: Annotated[NDArray, dict(order='C', device='cpu')], b: Annotated[NDArray, dict(order='C', device='cpu')]) -> None:
    """target = a op b, elementwise."""

def divide(dtype: int, target: Annotated[NDArray, dict(order='C', device='cpu')], divisor: int) -> None:
    """target /= divisor, elementwise."""

def quantized_bytes(scheme: int, dtype: int, count: int) -> int:
    """How many bytes `count` elements have on the wire."""

def quantize(scheme: int, dtype: int, encoded: Annotated[NDArray, dict(order='C', device='cpu')], values: Annotated[NDArray, dict(order='C', device='cpu')]) -> None:
    """Encode `values` as they travel."""

def dequantize(scheme: int, dtype: int, values: Annotated[NDArray, dict(order='C', device='cpu')], encoded: Annotated[NDArray, dict(order='C', device='cpu')]) -> None:
    """Decode what `quantize` made."""

def hash_block(buffer: object) -> int:
    """The rf64 hash of one block."""

def hash_blocks(buffer: object, threads: int) -> bytes:
    """
    The rf64 hashes of all blocks, 8 little-endian bytes each; `threads` 0 means one per core.
    """

def hash_root(hashes: bytes, total_bytes: int) -> int:
    """
    The rf64 root of an array, from what `hash_blocks` gave for it and its size.
    """

class Core:
    """The engine without I/O, for the simulation."""

    def __init__(self, planted: str = '') -> None: ...

    def send(self, conn: int, body: bytes) -> None:
        """Queue a message."""

    def resume(self, conn: int) -> None:
        """Deliver the next message of a connection in its handshake."""

    def make_control(self, conn: int, heartbeat_ms: int, dead_after_ms: int) -> None:
        """The connection is the control connection: heartbeats flow."""

    def promote(self, conn: int, outgoing: bool, peer: int, lane: int) -> None:
        """The connection is a lane."""

    def close(self, conn: int, reason: str = '') -> None:
        """Send what is queued, then close."""

    def lanes(self) -> list[tuple[int, bool, int, int]]:
        """All lanes: (conn, outgoing, peer, lane)."""

    def set_registrations(self, count: int) -> None:
        """What every later Done repeats."""

    def seal(self, epoch: int) -> list:
        """Send no more Done, accept no more evidence; where every op stands."""

    def settle(self, epoch: int, verdicts: Sequence[tuple[int, int, bool, int, Sequence[bytes] | None, int, bytes]], default_reason: bytes) -> None:
        """Decide every op of the sealed epoch."""

    def install(self, epoch: int, rank: int, size: int, members: Sequence[int], evidence_by_master: bool, small_bytes: int, segment_bytes: int, peers_here: int = 1) -> None:
        """Begin an epoch: mark the lanes, start the waiting ops."""

    def progress(self) -> list[tuple[int, int]]:
        """Committed ops per tag in the installed epoch."""

    def fail_all(self, status: int, reason: bytes) -> None:
        """Every op fails, now and later."""

    def stats(self) -> dict:
        """Counters since the start."""

    def make_bulk(self, conn: int) -> None:
        """The connection carries messages, blocks and filler from now on."""

    def send_blocks(self, conn: int, blocks: Sequence[tuple[Annotated[NDArray[numpy.uint8], dict(shape=(None,), order='C', device='cpu', writable=False)], int, int, int | None]]) -> list[int]:
        """
        Queue blocks, each (array, offset, length, expected hash or None). If some have another hash by now, nothing is queued and their indices are returned.
        """

    def expect_blocks(self, conn: int, batch: int, blocks: Sequence[tuple[Annotated[NDArray[numpy.uint8], dict(shape=(None,), order='C', device='cpu')], int, int, int | None]]) -> None:
        """
        These blocks come next, in this order, each (array, offset, length, expected hash or None); the event `blocks` tells when all are in, and which have another hash.
        """

    def fill(self, conn: int, on: bool) -> None:
        """Send filler whenever nothing else is to be sent, or no more of it."""

    def sample(self, conn: int, every_ns: int) -> None:
        """Tell how much filler came, about every so often; 0: no more."""

    def set_now(self, now: int) -> None: ...

    def open(self, remote: str, accepted: bool) -> int: ...

    def receive(self, now: int, conn: int, data: bytes) -> None: ...

    def transmit(self, now: int, conn: int, limit: int) -> bytes: ...

    def readable(self, conn: int) -> bool: ...

    def lost(self, now: int, conn: int, reason: str) -> None: ...

    def tick(self, now: int) -> None: ...

    def acknowledged(self, now: int, conn: int, unacknowledged: int) -> None: ...

    def next_deadline(self) -> int: ...

    def next_event(self) -> object: ...

    def conns_with_output(self) -> list[int]: ...

    def conns_to_close(self) -> list[int]: ...

    def submit(self, kind: int, reduce_op: int, tag: int, root: int, source: Sequence[Annotated[NDArray, dict(order='C', device='cpu')]], target: Sequence[Annotated[NDArray, dict(order='C', device='cpu')]] | None, dtypes: Sequence[int], retry: bool, timeout_ns: int, quantisation: int = 0) -> int: ...

    def poll(self, op: int) -> object: ...

    def cancel(self, op: int) -> bool: ...

    def release(self, op: int) -> None: ...

class Engine:
    """Sockets, lanes and ops of one peer, with a thread of its own."""

    def __init__(self, spin_us: int = 300, same_host_buffer: int = 1048576) -> None: ...

    def send(self, conn: int, body: bytes) -> None:
        """Queue a message."""

    def resume(self, conn: int) -> None:
        """Deliver the next message of a connection in its handshake."""

    def make_control(self, conn: int, heartbeat_ms: int, dead_after_ms: int) -> None:
        """The connection is the control connection: heartbeats flow."""

    def promote(self, conn: int, outgoing: bool, peer: int, lane: int) -> None:
        """The connection is a lane."""

    def close(self, conn: int, reason: str = '') -> None:
        """Send what is queued, then close."""

    def lanes(self) -> list[tuple[int, bool, int, int]]:
        """All lanes: (conn, outgoing, peer, lane)."""

    def set_registrations(self, count: int) -> None:
        """What every later Done repeats."""

    def seal(self, epoch: int) -> list:
        """Send no more Done, accept no more evidence; where every op stands."""

    def settle(self, epoch: int, verdicts: Sequence[tuple[int, int, bool, int, Sequence[bytes] | None, int, bytes]], default_reason: bytes) -> None:
        """Decide every op of the sealed epoch."""

    def install(self, epoch: int, rank: int, size: int, members: Sequence[int], evidence_by_master: bool, small_bytes: int, segment_bytes: int, peers_here: int = 1) -> None:
        """Begin an epoch: mark the lanes, start the waiting ops."""

    def progress(self) -> list[tuple[int, int]]:
        """Committed ops per tag in the installed epoch."""

    def fail_all(self, status: int, reason: bytes) -> None:
        """Every op fails, now and later."""

    def stats(self) -> dict:
        """Counters since the start."""

    def make_bulk(self, conn: int) -> None:
        """The connection carries messages, blocks and filler from now on."""

    def send_blocks(self, conn: int, blocks: Sequence[tuple[Annotated[NDArray[numpy.uint8], dict(shape=(None,), order='C', device='cpu', writable=False)], int, int, int | None]]) -> list[int]:
        """
        Queue blocks, each (array, offset, length, expected hash or None). If some have another hash by now, nothing is queued and their indices are returned.
        """

    def expect_blocks(self, conn: int, batch: int, blocks: Sequence[tuple[Annotated[NDArray[numpy.uint8], dict(shape=(None,), order='C', device='cpu')], int, int, int | None]]) -> None:
        """
        These blocks come next, in this order, each (array, offset, length, expected hash or None); the event `blocks` tells when all are in, and which have another hash.
        """

    def fill(self, conn: int, on: bool) -> None:
        """Send filler whenever nothing else is to be sent, or no more of it."""

    def sample(self, conn: int, every_ns: int) -> None:
        """Tell how much filler came, about every so often; 0: no more."""

    def listen(self, host: str, first_port: int, tries: int) -> int:
        """Bind the data port and return it."""

    def dial(self, host: str, port: int, timeout_ms: int) -> int:
        """Begin to connect to a literal address."""

    def next_event(self, timeout_s: float) -> object:
        """Block without the GIL until something happened or the time is over."""

    def wake(self) -> None: ...

    def submit(self, kind: int, reduce_op: int, tag: int, root: int, source: Sequence[Annotated[NDArray, dict(order='C', device='cpu')]], target: Sequence[Annotated[NDArray, dict(order='C', device='cpu')]] | None, dtypes: Sequence[int], retry: bool, timeout_ns: int, quantisation: int = 0) -> int:
        """Begin an op that the engine's own thread drives; its id."""

    def collective(self, kind: int, reduce_op: int, tag: int, root: int, source: Sequence[Annotated[NDArray, dict(order='C', device='cpu')]], target: Sequence[Annotated[NDArray, dict(order='C', device='cpu')]] | None, dtypes: Sequence[int], retry: bool, timeout_ns: int, quantisation: int = 0) -> tuple:
        """
        Begin an op, drive it from this thread to its end, and return its result.
        """

    def all_reduce(self, array: Annotated[NDArray, dict(order='C', device='cpu')], dtype: int, reduce_op: int, tag: int, retry: bool, timeout_ns: int) -> tuple:
        """The short way for one array in place."""

    def tags_in_flight(self) -> list[int]:
        """The tags of all ops that have not ended."""

    def run_op(self, op: int) -> tuple:
        """Drive from this thread until the op ended; its result, once."""

    def wait_op(self, op: int, timeout_s: float) -> bool:
        """Block without the GIL until the op ended."""

    def poll(self, op: int) -> object:
        """The op's result, or None while it is in flight."""

    def cancel(self, op: int) -> bool:
        """Give an op up; False when it may be committed elsewhere already."""

    def release(self, op: int) -> None:
        """Forget an op, at the latest when it has ended."""

    def shutdown(self) -> None: ...

    def before_fork(self) -> None: ...

    def forked_parent(self) -> None: ...

    def forked_child(self) -> None: ...

def probe_virtual(raw_ns: int, anchor_ns: int, offset_ns: int, drift_ppb: int) -> int:
    """What a virtual clock shows at a raw time."""

def probe_siphash(key: bytes, bytes: bytes) -> int:
    """SipHash-2-4."""

def probe_packet(key: bytes, kind: int, src: int, dst: int, sequence: int, a: int = 0, b: int = 0) -> bytes:
    """The bytes of a probe packet (kind 1 to 5: Pt1, Pt2, Pr1, Pr2, Pd1)."""

class Prober:
    """The probe socket of one node, with a thread of its own."""

    def __init__(self, node: int, host: str, port: int, anchor_ns: int, offset_ns: int, drift_ppb: int, user_stamps: bool) -> None: ...

    @property
    def port(self) -> int:
        """The UDP port."""

    def configure(self, key: bytes, out: Sequence[tuple[int, str, int]], into: Sequence[tuple[int, str, int]]) -> None:
        """Whom to probe and whom to answer, each (node, address, port)."""

    def resume(self, gap_ns: int, pause_ns: int) -> None:
        """Begin a window, and probe."""

    def pause(self) -> None:
        """Send no more probes; answer."""

    def rotate(self) -> list:
        """
        Close the window: for each edge (dst, begin, end, rows, kept, sent, lost, duplicates, filtered, threshold, user stamps, stepped).
        """

    def peek(self, most: int) -> list:
        """
        The newest exchanges of the open window, unfiltered, as `rotate` gives them.
        """

    def rename(self, node: int) -> None:
        """The node has another number from now on."""

    def stats(self) -> dict:
        """Counts since the beginning."""

    def now(self) -> int:
        """The node's clock."""

    def utc(self) -> int:
        """CLOCK_REALTIME minus the node's clock."""

    def pretend_step(self, step_ns: int) -> None:
        """As if the time of day had been set."""

    def shutdown(self) -> None: ...

    def before_fork(self) -> None: ...

    def forked_parent(self) -> None: ...

    def forked_child(self) -> None: ...

def probe_raw_now() -> int:
    """CLOCK_MONOTONIC_RAW."""

def fit_edge(exchanges: Annotated[NDArray[numpy.int64], dict(shape=(None, 8), order='C', device='cpu', writable=False)], kept: Annotated[NDArray[numpy.uint8], dict(shape=(None,), order='C', device='cpu', writable=False)], estimator: str) -> dict:
    """
    The line through a window of exchanges, as the fields of an EdgeFit that the stamps determine.
    """
