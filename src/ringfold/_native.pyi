"""
Ringfold's native core: kernels, the state hash, the sans-I/O engine core, the engine with sockets, the prober, and hints.
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

class Blocks:
    """
    How far the copies of an op's memory are, from a device and towards it.
    """

    def __init__(self, ends: Sequence[int]) -> None:
        """Where each block of the op's bytes ends."""

    def fill(self, block: int) -> None:
        """The caller's values are there: the op may use them."""

    @property
    def count(self) -> int: ...

    @property
    def filled(self) -> int:
        """How many are filled."""

    def take_final(self, timeout_s: float) -> tuple[int, list[int]]:
        """
        Block without the GIL until blocks have their results, or it is closed: the attempt, and those that were not taken before.
        """

    def close(self) -> None:
        """Wake the thread in take_final."""

class OpRequest:
    """A collective. Its arrays are read and written until it has ended."""

    def __init__(self, *, kind: int, reduce_op: int, tag: int, source: Sequence[NDArray], dtypes: Sequence[int], retry: int, timeout_ns: int, target: Sequence[NDArray] | None = None, root: int = 0, quantisation: int = 0, again: bool = False, contribute: bool = True, blocks: Blocks | None = None) -> None:
        """
        `again`: another attempt of the last call on this tag. Without `contribute` the content of `source` has no part in a reduction. Without `target` the op is in place. With `blocks` it goes on as they are filled.
        """

    @property
    def kind(self) -> int: ...

    @property
    def reduce_op(self) -> int: ...

    @property
    def tag(self) -> int: ...

    @property
    def root(self) -> int: ...

    @property
    def source(self, /) -> list[NDArray]:
        """The arrays, as they were passed in."""

    @property
    def target(self, /) -> list[NDArray] | None: ...

    @property
    def dtypes(self) -> list[int]: ...

    @property
    def retry(self) -> int: ...

    @property
    def timeout_ns(self) -> int: ...

    @property
    def quantisation(self) -> int: ...

    @property
    def again(self) -> bool: ...

    @property
    def contribute(self) -> bool: ...

class OpResult:
    """How an op ended."""

    def __init__(self, *, status: int, reason: bytes = ..., epoch: int = 0, contributors: Sequence[int] = (), registrations: int = 0, sent_bytes: int = 0, received_bytes: int = 0) -> None: ...

    @property
    def status(self) -> int: ...

    @property
    def reason(self) -> bytes: ...

    @property
    def epoch(self) -> int: ...

    @property
    def contributors(self) -> tuple[int, ...]: ...

    @property
    def registrations(self) -> int: ...

    @property
    def sent_bytes(self) -> int: ...

    @property
    def received_bytes(self) -> int: ...

class EpochSpec:
    """An epoch as this rank installs it."""

    def __init__(self, *, epoch: int, rank: int, members: Sequence[int], evidence_by_master: bool, small_bytes: int, segment_bytes: int, peers_here: int = 1, multipath: bool = False, channels: int = 1, direct: bool = False, hosts: int = 1) -> None: ...

    @property
    def epoch(self) -> int: ...

    @property
    def rank(self) -> int: ...

    @property
    def members(self) -> list[int]:
        """Peer ids, by rank."""

    @property
    def evidence_by_master(self) -> bool: ...

    @property
    def small_bytes(self) -> int: ...

    @property
    def segment_bytes(self) -> int: ...

    @property
    def peers_here(self) -> int:
        """Members on this host."""

    @property
    def multipath(self) -> bool: ...

    @property
    def channels(self) -> int:
        """Channels that carry ops."""

    @property
    def direct(self) -> bool:
        """Whether Dones go straight to every member that direct lanes lead to."""

    @property
    def hosts(self) -> int:
        """Above 1: ops are reduced inside each of so many hosts first."""

MAX_CHANNELS: int = 16

class OpAtSeal:
    """The state of an op when its epoch was sealed."""

    @property
    def tag(self) -> int: ...

    @property
    def sequence(self) -> int: ...

    @property
    def state(self) -> int:
        """0 unfinished, 1 done, 2 committed."""

    @property
    def registrations(self) -> int: ...

    @property
    def payloads(self) -> list[bytes | None] | None:
        """By rank."""

    @property
    def descriptor(self) -> bytes: ...

class OpVerdict:
    """The master's decision about an op of a sealed epoch."""

    def __init__(self, *, tag: int, sequence: int, fingerprint: int, commit: bool, registrations: int, payloads: Sequence[bytes | None] | None, final: int, reason: bytes) -> None:
        """`fingerprint` is that of the op's descriptor, `final` a `Final`."""

    @property
    def tag(self) -> int: ...

    @property
    def sequence(self) -> int: ...

    @property
    def commit(self) -> bool: ...

class LanePromotion:
    """A connection that becomes a lane."""

    def __init__(self, *, conn: int, outgoing: bool, peer: int, lane: int, shared: bool = False, path: int = 0, paths: int = 1, epoch: int = 0, channel: int = 0, direct: bool = False) -> None:
        """With `epoch` installed already, the lane joins that epoch late."""

    @property
    def conn(self) -> int: ...

    @conn.setter
    def conn(self, arg: int, /) -> None: ...

class LaneInfo:
    """A lane of the ring."""

    @property
    def conn(self) -> int: ...

    @conn.setter
    def conn(self, arg: int, /) -> None: ...

    @property
    def outgoing(self) -> bool: ...

    @property
    def peer(self) -> int: ...

    @property
    def lane(self) -> int: ...

    @property
    def channel(self) -> int: ...

    @property
    def in_memory(self) -> bool:
        """Whether it goes through shared memory."""

    @property
    def direct(self) -> bool:
        """Whether it leads to a member that is no neighbour in the ring."""

class EngineEvent:
    """
    What happened in the engine. `kind` decides which of the fields are set.
    """

    @property
    def kind(self) -> str: ...

    @property
    def conn(self) -> int:
        """opened, accepted, message, closed, silent, blocks, sample"""

    @conn.setter
    def conn(self, arg: int, /) -> None: ...

    @property
    def peer(self) -> int:
        """link_lost, mismatch"""

    @property
    def outgoing(self) -> bool:
        """link_lost"""

    @property
    def direct(self) -> bool:
        """link_lost: of direct lanes"""

    @property
    def died(self) -> bool:
        """link_lost: the neighbour's process has died, for certain"""

    @property
    def text(self) -> str:
        """accepted: the remote address; closed, link_lost: the reason"""

    @property
    def body(self) -> bytes:
        """message: its bytes"""

    @property
    def epoch(self) -> int:
        """mismatch, op_timeout, op_cancelled: in which the op ran"""

    @property
    def tag(self) -> int: ...

    @property
    def sequence(self) -> int: ...

    @property
    def descriptor(self) -> bytes:
        """mismatch, op_timeout: of the call that was made here"""

    @property
    def other_descriptor(self) -> bytes:
        """mismatch: of the call that the neighbour made"""

    @property
    def waited_ms(self) -> int:
        """op_timeout, silent"""

    @property
    def batch(self) -> int:
        """blocks: the number that was passed to expect_blocks"""

    @property
    def bad(self) -> list[int]:
        """blocks: the indices of those with another hash"""

    @property
    def elapsed_ns(self) -> int:
        """sample: since the first filler"""

    @property
    def counted_ns(self) -> int:
        """sample: when `received_bytes` had come"""

    @property
    def received_bytes(self) -> int:
        """sample: filler after the first, until `counted_ns`"""

    def __repr__(self) -> str: ...

class Core:
    """The engine without I/O, for the simulation."""

    def __init__(self) -> None: ...

    def send(self, conn: int, body: bytes) -> None:
        """Queue a message."""

    def resume(self, conn: int) -> None:
        """Deliver the next message of a connection in its handshake."""

    def make_control(self, conn: int, heartbeat_ms: int, dead_after_ms: int) -> None:
        """The connection is the control connection: heartbeats flow."""

    def promote(self, lane: LanePromotion) -> None:
        """The connection is a lane."""

    def set_path_shares(self, peer: int, shares: Sequence[int], flags: int = 0) -> None:
        """
        Advice about the paths to a neighbour: shares out of 65535, a veto bit per path, bit 16: shares are fixed.
        """

    def path_bytes(self, to_next: bool) -> list[int]:
        """Payload assigned to each path of a link since the epoch began."""

    def close(self, conn: int, reason: str = '') -> None:
        """Send what is queued, then close."""

    def lanes(self) -> list[LaneInfo]:
        """All lanes."""

    def set_registrations(self, count: int) -> None:
        """What every later Done repeats."""

    def seal(self, epoch: int) -> list[OpAtSeal]:
        """Send no more Done, accept no more evidence; the state of every op."""

    def settle(self, epoch: int, verdicts: Sequence[OpVerdict], default_reason: bytes) -> None:
        """Decide every op of the sealed epoch."""

    def refuse(self, tag: int, step: int, call: int, reason: bytes) -> None:
        """This call fails, also if it has not been made here yet."""

    def restart_calls(self) -> None:
        """A peer was admitted: all members count their calls from 0 again."""

    def install(self, epoch: EpochSpec) -> None:
        """Begin an epoch: mark the lanes, start the waiting ops."""

    def progress(self) -> list[tuple[int, int]]:
        """Committed ops per tag in the installed epoch."""

    def fail_all(self, status: int, reason: bytes) -> None:
        """Every op fails, now and later."""

    def set_report(self, report: bytes) -> None:
        """
        What the next heartbeat carries, and the first one to every new master.
        """

    def ended_ops(self, since: int) -> tuple[int, bytes]:
        """
        The number of the next op that ends, and those from this number on that are still known, packed.
        """

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
        These blocks come next, in this order, each (array, offset, length, expected hash or None); the event `blocks` reports when all are in, and which have another hash.
        """

    def fill(self, conn: int, on: bool) -> None:
        """Send filler whenever nothing else is to be sent, or no more of it."""

    def sample(self, conn: int, every_ns: int) -> None:
        """Tell how much filler came, about every so often; 0: no more."""

    def set_first_sequence(self, first: int) -> None: ...

    def set_now(self, now: int) -> None: ...

    def open(self, remote: str, accepted: bool) -> int: ...

    def receive(self, now: int, conn: int, data: bytes) -> None: ...

    def transmit(self, now: int, conn: int, limit: int) -> bytes: ...

    def readable(self, conn: int) -> bool: ...

    def lost(self, now: int, conn: int, reason: str) -> None: ...

    def tick(self, now: int) -> None: ...

    def acknowledged(self, now: int, conn: int, unacknowledged: int, rtt: int = 0) -> None: ...

    def next_deadline(self) -> int: ...

    def next_event(self) -> EngineEvent | None: ...

    def conns_to_flush(self) -> list[int]: ...

    def conns_to_close(self) -> list[int]: ...

    def submit(self, request: OpRequest) -> int: ...

    def poll(self, op: int) -> OpResult | None: ...

    def set_step(self, step: int) -> None: ...

    def tags_in_flight(self) -> list[int]: ...

    def cancel(self, op: int) -> bool: ...

    def release(self, op: int) -> None: ...

class Engine:
    """Sockets, lanes and ops of one peer, with a thread of its own."""

    def __init__(self, spin_us: int = 300, same_host_buffer: int = 1048576, congestion: str = 'auto') -> None: ...

    def send(self, conn: int, body: bytes) -> None:
        """Queue a message."""

    def resume(self, conn: int) -> None:
        """Deliver the next message of a connection in its handshake."""

    def make_control(self, conn: int, heartbeat_ms: int, dead_after_ms: int) -> None:
        """The connection is the control connection: heartbeats flow."""

    def promote(self, lane: LanePromotion) -> None:
        """The connection is a lane."""

    def set_path_shares(self, peer: int, shares: Sequence[int], flags: int = 0) -> None:
        """
        Advice about the paths to a neighbour: shares out of 65535, a veto bit per path, bit 16: shares are fixed.
        """

    def path_bytes(self, to_next: bool) -> list[int]:
        """Payload assigned to each path of a link since the epoch began."""

    def close(self, conn: int, reason: str = '') -> None:
        """Send what is queued, then close."""

    def lanes(self) -> list[LaneInfo]:
        """All lanes."""

    def set_registrations(self, count: int) -> None:
        """What every later Done repeats."""

    def seal(self, epoch: int) -> list[OpAtSeal]:
        """Send no more Done, accept no more evidence; the state of every op."""

    def settle(self, epoch: int, verdicts: Sequence[OpVerdict], default_reason: bytes) -> None:
        """Decide every op of the sealed epoch."""

    def refuse(self, tag: int, step: int, call: int, reason: bytes) -> None:
        """This call fails, also if it has not been made here yet."""

    def restart_calls(self) -> None:
        """A peer was admitted: all members count their calls from 0 again."""

    def install(self, epoch: EpochSpec) -> None:
        """Begin an epoch: mark the lanes, start the waiting ops."""

    def progress(self) -> list[tuple[int, int]]:
        """Committed ops per tag in the installed epoch."""

    def fail_all(self, status: int, reason: bytes) -> None:
        """Every op fails, now and later."""

    def set_report(self, report: bytes) -> None:
        """
        What the next heartbeat carries, and the first one to every new master.
        """

    def ended_ops(self, since: int) -> tuple[int, bytes]:
        """
        The number of the next op that ends, and those from this number on that are still known, packed.
        """

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
        These blocks come next, in this order, each (array, offset, length, expected hash or None); the event `blocks` reports when all are in, and which have another hash.
        """

    def fill(self, conn: int, on: bool) -> None:
        """Send filler whenever nothing else is to be sent, or no more of it."""

    def sample(self, conn: int, every_ns: int) -> None:
        """Tell how much filler came, about every so often; 0: no more."""

    def listen(self, host: str, first_port: int, tries: int) -> int:
        """Bind the data port and return it."""

    def dial(self, host: str, port: int, timeout_ms: int, source: str = '', name: str = '', carries_little: bool = False) -> int:
        """
        Begin to connect to a literal address, from one of this host's own; a peer of this host by its name.
        """

    def listen_here(self) -> str:
        """
        Listen for peers of this host, which can share memory; the name to dial, or empty where that is not possible.
        """

    def start_guardian(self, program: str, master: int, message: str) -> bool:
        """
        Start a process that sends the message (in hex) over the connection when this process dies; False if it cannot be started.
        """

    def next_event(self, timeout_s: float) -> EngineEvent | None:
        """Block without the GIL until something happened or the time is over."""

    def wake(self) -> None: ...

    def follow_hints(self, peer: int, file: str, slot: int, generation: int) -> None:
        """Where the agent's advice about the paths to a peer is."""

    def forget_hints(self, peer: int) -> None:
        """Lanes to this peer just pull."""

    def path_rates(self, peer: int) -> list[int]:
        """
        Bytes per second on each path to a peer while it was busy; 0 where none were measured in the last second.
        """

    def path_rtts(self, peer: int) -> list[tuple[int, int]]:
        """
        The smoothed and the minimum RTT of each path to a peer in microseconds; 0 where none was measured lately.
        """

    def submit(self, request: OpRequest) -> int:
        """
        Begin an op that the engine's own thread drives, or run_op() if it has blocks; its id.
        """

    def collective(self, request: OpRequest) -> OpResult:
        """
        Begin an op, drive it from this thread to its end, and return its result.
        """

    def all_reduce(self, array: Annotated[NDArray, dict(order='C', device='cpu')], dtype: int, reduce_op: int, tag: int, retry: int, timeout_ns: int) -> OpResult:
        """A collective of one array in place, with fewer arguments."""

    def tags_in_flight(self) -> list[int]:
        """The tags of all ops that have not ended."""

    def set_step(self, step: int) -> None:
        """
        The program begins this step (2**64 - 1: none): calls are counted from 0 again.
        """

    def run_op(self, op: int) -> OpResult:
        """Drive from this thread until the op ended; its result, once."""

    def wait_op(self, op: int, timeout_s: float) -> bool:
        """Block without the GIL until the op ended."""

    def poll(self, op: int) -> OpResult | None:
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

class ProbeWindow:
    """What a window holds about one out-edge."""

    @property
    def dst(self) -> int: ...

    @property
    def begin_ns(self) -> int: ...

    @property
    def end_ns(self) -> int: ...

    @property
    def exchanges(self) -> Annotated[NDArray[numpy.int64], dict(shape=(None, 8))]:
        """Eight stamps each."""

    @property
    def kept(self) -> Annotated[NDArray[numpy.uint8], dict(shape=(None,))]:
        """Bits by exchange."""

    @property
    def sent(self) -> int: ...

    @property
    def lost(self) -> int: ...

    @property
    def duplicates(self) -> int: ...

    @property
    def filtered(self) -> int: ...

    @property
    def threshold_ns(self) -> int: ...

    @property
    def user_stamps(self) -> bool: ...

    @property
    def stepped(self) -> str: ...

class Prober:
    """The probe socket of one node, with a thread of its own."""

    def __init__(self, *, node: int, host: str, port: int, anchor_ns: int, offset_ns: int, drift_ppb: int, user_stamps: bool) -> None: ...

    @property
    def port(self) -> int:
        """The UDP port."""

    def configure(self, key: bytes, out: Sequence[tuple[int, str, int]], into: Sequence[tuple[int, str, int]]) -> None:
        """
        The nodes to probe and the nodes to answer, each (node, address, port).
        """

    def resume(self, gap_ns: int, pause_ns: int) -> None:
        """Begin a window, and probe."""

    def pause(self) -> None:
        """Send no more probes; answer."""

    def rotate(self) -> list[ProbeWindow]:
        """Close the window and begin the next; the closed one, by edge."""

    def so_far(self) -> list[ProbeWindow]:
        """The window as `rotate` would give it now; it goes on."""

    def peek(self, most: int) -> list[ProbeWindow]:
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

HINT_SLOTS: int = 4096

HINT_MAX_PATHS: int = 16

HINT_ABI: int = 1

HINT_LAST_GENERATION: int = 1048575

def hint_share_of_sup_bw(sup_bw: int) -> int:
    """The classic multiplier as a share of 65535."""

def hint_word(generation: int, shares: Sequence[int], backpressure: int = 0) -> int:
    """The word of a hint for two to four paths."""

def hint_word_parts(word: int) -> tuple:
    """(valid, generation, form, shares, backpressure) of a word."""

class HintWriter:
    """The one writer of a file of hints."""

    def __init__(self, path: str, stale_after_ns: int, mode: int) -> None: ...

    @property
    def generation(self) -> int:
        """Counts the lives of the agent."""

    def slot_generations(self) -> list[int]:
        """The generation that each slot had last."""

    def open(self, slot: int, generation: int) -> None:
        """The slot has a new owner, and no advice yet."""

    def publish(self, slot: int, shares: Sequence[int], backpressure: int = 0, is_fixed: bool = False) -> None:
        """
        Advise the owner: a share of 65535 for each path. Fixed shares bind over the whole transfer.
        """

    def withdraw(self, slot: int) -> None:
        """No advice any more: the owner's local policy."""

    def word(self, slot: int) -> int:
        """The word as readers see it."""

    def beat(self) -> None:
        """Say that the agent lives."""

    def close(self) -> None:
        """Say that the agent has ended, and let go of the file."""

class HintReader:
    """Reads hints without waiting; what cannot be read is local (None)."""

    def __init__(self, path: str) -> None: ...

    def look(self) -> str:
        """
        Once per turn: fresh, missing, foreign, other version or stale. All but fresh mean local.
        """

    @property
    def table_generation(self) -> int:
        """The agent's life that wrote the file, or 0."""

    def written_ns(self, slot: int) -> int:
        """When the agent changed a slot last, or 0."""

    def word(self, slot: int, generation: int) -> int:
        """The slot's word for this owner, or 0: local."""

    def read(self, slot: int, generation: int) -> tuple | None:
        """(shares, backpressure) for this owner, or None: local."""

    def is_fixed(self, slot: int, generation: int) -> bool:
        """Whether there is a hint for this owner whose shares bind."""
