"""The handle on the native prober: one UDP socket, one thread and kernel timestamps, for any number of edges.

The packets, the mapping between clocks and the exchanges are in `native/include/ringfold/probe.hpp`, with the reasons.
"""

import os
import weakref
from collections.abc import Sequence
from types import TracebackType
from typing import Self

from msgspec import Struct

from ringfold import _native
from ringfold.errors import ConfigError, UsageError
from ringfold.probe.exchanges import EdgeWindow, Stamps
from ringfold.runtime import threads
from ringfold.wire.probing import (
    KEY_BYTES,
    MAX_GAP_US,
    MAX_PAUSE_US,
    MIN_GAP_US,
    MIN_PAUSE_US,
    Cadence,
    Neighbour,
    NodeId,
)

_RawNeighbour = tuple[int, str, int]


class ProbeStats(Struct, frozen=True):
    """Counters of a prober since its construction."""

    sent: int
    received: int
    complete: int
    """Exchanges that were completed while their window was open."""
    malformed: int
    """Not a probe packet: another size, marker, version or kind."""
    spoofed: int
    """With a wrong authentication tag."""
    strangers: int
    """From or for a node that is not a neighbour."""
    replayed: int
    """Received before, or never requested."""
    duplicates: int
    """A second copy of a packet that is in flight, or was recently."""
    refused: int
    """Probes of a neighbour that has too many open ones."""
    unstamped: int
    """Packets without a kernel timestamp, or with an ambiguous one because the clock stepped."""
    send_errors: int
    would_block: int
    """Times the socket buffer was full; the other packets of that tick were dropped."""
    icmp_errors: int
    resyncs: int
    """Times the count of transmit timestamps was restarted after an error."""
    wakes: int
    ticks: int
    ticks_late: int
    """Ticks that were more than half a gap late."""
    cpu_ns: int
    """Of the prober's thread."""
    clock_noise_ns: float
    """RMS error of samples of the mapping between the clocks; the mapping itself is several times better."""
    clock_bends: int
    """Times the host changed the frequency of its clock."""
    stamps: Stamps
    sequence: int = 0
    """Of the newest probe. All edges of a node share one count, which starts at a number that depends on the time."""


def virtual(raw_ns: int, anchor_ns: int, offset_ns: int, drift_ppb: int) -> int:
    """What a node's clock reads at a raw time, exactly as the native prober calculates it."""
    return raw_ns + offset_ns + (raw_ns - anchor_ns) * drift_ppb // 1_000_000_000


def raw_now() -> int:
    """CLOCK_MONOTONIC_RAW of this host, in nanoseconds: the clock of a node without offset and drift."""
    return _native.probe_raw_now()


class ProbeSocket:
    """Probes its out-neighbours, responds to its in-neighbours, and collects windows.

    It starts paused and without neighbours. `bind` is a literal address of this host. With `offset_ns` or `drift_ppb`
    every timestamp is of a virtual clock (see `virtual`; at the raw time `anchor_ns`, by default now, the drift is
    zero), so that the result of an estimator can be compared with the truth. No call waits for the network. After a
    fork, only the parent has the prober.
    """

    def __init__(
        self,
        node: NodeId,
        bind: str,
        port: int = 0,
        *,
        offset_ns: int = 0,
        drift_ppb: int = 0,
        anchor_ns: int | None = None,
        user_stamps: bool = False,
    ) -> None:
        if not 0 <= node < 2**32:
            raise UsageError(f"a node id is below 2**32, not {node}")
        if not 0 <= port < 2**16:
            raise ConfigError(f"a UDP port is below 65536, not {port}")
        if abs(drift_ppb) > 1_000_000_000 or abs(offset_ns) >= 2**62:
            raise UsageError("a virtual clock's drift is at most 10**9 ppb, its offset below 2**62 ns")
        self.node = node
        self.anchor_ns = raw_now() if anchor_ns is None else anchor_ns
        self.offset_ns = offset_ns
        self.drift_ppb = drift_ppb
        try:
            self._native = _native.Prober(
                node=node,
                host=bind,
                port=port,
                anchor_ns=self.anchor_ns,
                offset_ns=offset_ns,
                drift_ppb=drift_ppb,
                user_stamps=user_stamps,
            )
        except RuntimeError as error:
            raise ConfigError(str(error)) from None
        self._closed_reason = ""
        _open_probers.add(self)

    @property
    def port(self) -> int:
        """The UDP port that neighbours send to."""
        return self._native.port

    def configure(self, key: bytes, out: Sequence[Neighbour], into: Sequence[Neighbour]) -> None:
        """Probe `out` and respond to `into` from now on, and to no other node; open exchanges and windows are dropped.

        Under the same key, packets that a neighbour sent before are rejected as replays. A new key accepts even a
        neighbour whose time of day went back while it restarted. Raises UsageError, without any change, if a neighbour
        cannot be used.
        """
        self._check()
        if len(key) != KEY_BYTES:
            raise UsageError(f"a probe key has {KEY_BYTES} bytes, not {len(key)}")
        try:
            self._native.configure(key, [_raw(each) for each in out], [_raw(each) for each in into])
        except (ValueError, TypeError) as error:
            raise UsageError(f"neighbours of node {self.node}: {error}") from None

    def resume(self, gap_us: int = Cadence().gap_us, pause_us: int = Cadence().pause_us) -> None:
        """Begin a window at this cadence, and send probes. The exchanges of an open window are dropped."""
        self._check()
        if not MIN_GAP_US <= gap_us <= MAX_GAP_US:
            raise UsageError(f"gap_us is from {MIN_GAP_US} to {MAX_GAP_US}, not {gap_us}")
        if not MIN_PAUSE_US <= pause_us <= MAX_PAUSE_US:
            raise UsageError(f"pause_us is from {MIN_PAUSE_US} to {MAX_PAUSE_US}, not {pause_us}")
        self._native.resume(gap_us * 1_000, pause_us * 1_000)

    def pause(self) -> None:
        """Send no more probes; responses to neighbours continue, and exchanges in flight still count for the window."""
        self._check()
        self._native.pause()

    def rotate(self) -> list[EdgeWindow]:
        """Close the window now and begin the next. Returns the closed window of each out-edge, in configured order.

        Exchanges in flight belong to no window: they are neither sent nor lost.
        """
        self._check()
        return [self._window(window) for window in self._native.rotate()]

    def so_far(self) -> list[EdgeWindow]:
        """The window as `rotate` would return it now. It stays open."""
        self._check()
        return [self._window(window) for window in self._native.so_far()]

    def peek(self, most: int = 128) -> list[EdgeWindow]:
        """The newest exchanges of the open window, at most `most` of each edge, unfiltered. The window stays open."""
        self._check()
        return [self._window(window) for window in self._native.peek(most)]

    def rename(self, node: NodeId) -> None:
        """Change the node's id. Call `configure` next: neighbours reject packets with the old id."""
        self._check()
        if not 0 <= node < 2**32:
            raise UsageError(f"a node id is below 2**32, not {node}")
        self.node = node
        self._native.rename(node)

    def stats(self) -> ProbeStats:
        counts = self._native.stats()
        stamps: Stamps = "user" if counts.pop("user_stamps") else "kernel"
        return ProbeStats(**counts, stamps=stamps)

    def now(self) -> int:
        """The node's clock: raw, or virtual."""
        return self._native.now()

    def utc(self) -> int:
        """CLOCK_REALTIME minus the node's clock."""
        return self._native.utc()

    def pretend_step(self, step_ns: int) -> None:
        """Behave as if the host's time of day was set by this much: for tests of clock steps."""
        self._check()
        self._native.pretend_step(step_ns)

    def close(self) -> None:
        """Stop the thread and close the socket. `stats` still works."""
        if not self._closed_reason:
            self._closed_reason = "this prober is closed"
            _open_probers.discard(self)
            self._native.shutdown()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def forked(self) -> None:
        """In a forked child: the socket belongs to the parent."""
        self._closed_reason = "this prober belongs to the process that forked this one; make a new one"
        self._native.forked_child()

    def _check(self) -> None:
        if self._closed_reason:
            raise UsageError(self._closed_reason)

    def _window(self, window: _native.ProbeWindow) -> EdgeWindow:
        return EdgeWindow(
            src=self.node,
            dst=window.dst,
            begin_ns=window.begin_ns,
            end_ns=window.end_ns,
            exchanges=window.exchanges,
            kept=window.kept,
            sent=window.sent,
            lost=window.lost,
            duplicates=window.duplicates,
            filtered=window.filtered,
            threshold_ns=window.threshold_ns,
            stamps="user" if window.user_stamps else "kernel",
            stepped=window.stepped,
        )


def _raw(neighbour: Neighbour) -> _RawNeighbour:
    return neighbour.node, neighbour.address, neighbour.port


_open_probers: "weakref.WeakSet[ProbeSocket]" = weakref.WeakSet()
_forking: "dict[int, list[ProbeSocket]]" = {}
"""By thread: several may fork at once, and each releases exactly the locks that it took."""


def _before_fork() -> None:
    probers = sorted(_open_probers, key=id)
    for prober in probers:
        prober._native.before_fork()
    _forking[threads.current()] = probers


def _in_forking_parent() -> None:
    for prober in _forking.pop(threads.current(), ()):
        prober._native.forked_parent()


def _in_forked_child() -> None:
    mine = _forking.pop(threads.current(), ())
    _forking.clear()
    for prober in mine:
        prober.forked()


os.register_at_fork(before=_before_fork, after_in_parent=_in_forking_parent, after_in_child=_in_forked_child)
