"""
What only tests and benchmarks need of the native code: planted bugs, hammers, and the relay.
"""

from collections.abc import Sequence
from typing import Annotated

import numpy
from numpy.typing import NDArray

import ringfold._native


class PlantedCore:
    """The engine without I/O, with a bug that the simulation must find."""

    def __init__(self, bug: str) -> None: ...

    def send(self, conn: int, body: bytes) -> None:
        """Queue a message."""

    def resume(self, conn: int) -> None:
        """Deliver the next message of a connection in its handshake."""

    def make_control(self, conn: int, heartbeat_ms: int, dead_after_ms: int) -> None:
        """The connection is the control connection: heartbeats flow."""

    def promote(self, lane: ringfold._native.LanePromotion) -> None:
        """The connection is a lane."""

    def set_path_shares(self, peer: int, shares: Sequence[int], flags: int = 0) -> None:
        """
        Advice about the paths to a neighbour: shares out of 65535, a veto bit per path, bit 16: shares are fixed.
        """

    def path_bytes(self, to_next: bool) -> list[int]:
        """Payload assigned to each path of a link since the epoch began."""

    def close(self, conn: int, reason: str = '') -> None:
        """Send what is queued, then close."""

    def lanes(self) -> list[ringfold._native.LaneInfo]:
        """All lanes."""

    def set_registrations(self, count: int) -> None:
        """What every later Done repeats."""

    def seal(self, epoch: int) -> list[ringfold._native.OpAtSeal]:
        """Send no more Done, accept no more evidence; the state of every op."""

    def settle(self, epoch: int, verdicts: Sequence[ringfold._native.OpVerdict], default_reason: bytes) -> None:
        """Decide every op of the sealed epoch."""

    def refuse(self, tag: int, step: int, call: int, reason: bytes) -> None:
        """This call fails, also if it has not been made here yet."""

    def restart_calls(self) -> None:
        """A peer was admitted: all members count their calls from 0 again."""

    def install(self, epoch: ringfold._native.EpochSpec) -> None:
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

    def next_event(self) -> ringfold._native.EngineEvent | None: ...

    def conns_to_flush(self) -> list[int]: ...

    def conns_to_close(self) -> list[int]: ...

    def submit(self, request: ringfold._native.OpRequest) -> int: ...

    def poll(self, op: int) -> ringfold._native.OpResult | None: ...

    def set_step(self, step: int) -> None: ...

    def tags_in_flight(self) -> list[int]: ...

    def cancel(self, op: int) -> bool: ...

    def release(self, op: int) -> None: ...

def tear_hint(writer: ringfold._native.HintWriter, slot: int) -> None:
    """As if the writer was killed in the middle of a write."""

def hammer_hint_writes(writer: ringfold._native.HintWriter, slots: int, rounds: int) -> None:
    """
    Publish patterns without pause (0 rounds: until the process is killed).
    """

def hammer_hint_reads(reader: ringfold._native.HintReader, slots: int, generations: Sequence[int], reads: int) -> dict:
    """Read patterns without pause, and count those whose parts disagree."""

def hint_read_cost_ns(reader: ringfold._native.HintReader, slot: int, generation: int, reads: int) -> float:
    """Nanoseconds per read of a word."""

class Relay:
    """
    Cables with a delay and a loss between pairs of descriptors, and a thread for them.
    """

    def __init__(self) -> None: ...

    def add(self, near: int, far: int, delay_ns: int, loss: float, seed: int) -> int:
        """
        Join two descriptors by a cable; its number. What goes from `near` to `far` may get lost.
        """

    def set(self, cable: int, delay_ns: int, loss: float) -> None:
        """Another delay (each direction) and loss, for packets from now on."""

    def stats(self, cable: int) -> tuple[dict, dict]:
        """Counts of what went from `near` to `far`, and back."""

    def close(self) -> None:
        """End the thread. What is in flight is lost. Safe to call twice."""
