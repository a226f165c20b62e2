"""The metrics of peers: at the master from what they report to it, and at a peer from its own engine.

At the master there are 64 peers and more, so each metric is one list over all of them, with labels that are made once.
"""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from ringfold.observe import metrics
from ringfold.observe.metrics import Exposition, Number, labels
from ringfold.runtime.threads import yield_gil
from ringfold.wire.status import DURATION_BOUNDS_US, LinkStatus, OpTotals, PeerStatus, Progress, RingLink, Status

MAX_LOGGED = 16
"""Of how many names the logged values of a peer are exposed."""
_CLASSES = len(DURATION_BOUNDS_US) + 1


class _Peer(NamedTuple):
    """A peer with its labels, as text, and what the master knows of its link to the next one."""

    labels: str
    status: PeerStatus
    lag: int | None
    waited_for_ms: int
    link: LinkStatus | None
    ring_link: RingLink | None


class Counted(NamedTuple):
    """What a peer has counted itself, with its labels as text."""

    labels: str
    totals: OpTotals
    progress: Progress


def add_peers(out: Exposition, statuses: Sequence[Status]) -> None:
    """All metrics of `/metrics/peers`."""
    peers = [peer for status in statuses for peer in _peers(status)]
    out.add(
        "peer_info",
        [(_info(each.labels, each.status.name, each.status.host, each.status.group), 1) for each in peers],
    )
    add_counted(out, [Counted(each.labels, each.status.totals, each.status.progress) for each in peers])

    def gauge(name: str, value: Callable[[_Peer], Number | None]) -> None:
        out.add(name, [(each.labels, value(each)) for each in peers])

    gauge("lag_steps", lambda peer: peer.lag)
    gauge("peer_silence_seconds", lambda peer: peer.status.silent_ms / 1_000)
    gauge("progress_age_seconds", lambda peer: peer.status.progress_ms / 1_000)
    gauge("waited_for_seconds", lambda peer: peer.waited_for_ms / 1_000)
    gauge("link_throughput_bytes_per_second", _throughput)
    gauge("link_delay_seconds", _delay)
    gauge("link_loss_ratio", lambda peer: None if peer.link is None else peer.link.loss)
    known = [peer for peer in peers if peer.ring_link is not None and peer.ring_link.lanes]
    out.add("lanes", [(f'{each.labels},lane="{lane}"', _lanes(each, lane)) for each in known for lane in metrics.LANES])


def _peers(status: Status) -> list[_Peer]:
    steps = [peer.progress.step for peer in status.peers if peer.progress.step >= 0]
    ahead = max(steps, default=0)
    waited_for: dict[int, int] = {}
    for wait in status.waiting:
        for missing in wait.missing if wait.waiting else []:
            waited_for[missing] = max(waited_for.get(missing, 0), wait.since_ms)
    links = {(link.source, link.target): link for link in status.links}
    ring_links = {link.source: link for group in status.groups for link in group.ring_links}
    found = []
    for peer in status.peers:
        ring_link = ring_links.get(peer.peer)
        link = None if ring_link is None else links.get((ring_link.source, ring_link.target))
        lag = ahead - peer.progress.step if peer.progress.step >= 0 else None
        text = labels(run=status.run, peer=peer.peer)
        found.append(_Peer(text, peer, lag, waited_for.get(peer.peer, 0), link, ring_link))
    return found


def _info(text: str, name: str, host: str, group: int) -> str:
    return f"{text},{labels(name=name, host=host, group=group)}"


def _throughput(peer: _Peer) -> float | None:
    return None if peer.link is None or peer.link.by == "probed" else peer.link.bytes_per_s


def _delay(peer: _Peer) -> float | None:
    return None if peer.link is None or peer.link.delay_us is None else peer.link.delay_us / 1e6


def _lanes(peer: _Peer, lane: str) -> int:
    assert peer.ring_link is not None
    return peer.ring_link.in_memory if lane == "shm" else peer.ring_link.lanes - peer.ring_link.in_memory


def add_counted(out: Exposition, peers: Sequence[Counted]) -> None:
    """What peers count themselves."""

    def one(name: str, value: Callable[[OpTotals], Number]) -> None:
        out.add(name, [(text, value(totals)) for text, totals, _ in peers])
        yield_gil()

    out.add(
        "ops_total",
        [
            sample
            for text, totals, _ in peers
            for sample in (
                (f'{text},outcome="committed"', totals.committed),
                (f'{text},outcome="aborted"', totals.aborted),
            )
        ],
    )
    one("op_retries_total", lambda totals: totals.restarted)
    one("op_bytes_total", lambda totals: totals.bytes)
    out.add_histograms(
        "op_duration_seconds",
        [(text, totals.durations or [0] * _CLASSES, totals.busy_ns / 1e9) for text, totals, _ in peers],
    )
    yield_gil()
    one("op_wait_seconds_total", lambda totals: totals.waited_ns / 1e9)
    one("op_blocked_seconds_total", lambda totals: totals.blocked_ns / 1e9)
    out.add(
        "link_sent_bytes_total",
        [
            sample
            for text, totals, _ in peers
            for sample in (
                (f'{text},lane="tcp"', totals.sent_bytes - totals.memory_bytes),
                (f'{text},lane="shm"', totals.memory_bytes),
            )
        ],
    )
    one("link_received_bytes_total", lambda totals: totals.received_bytes)
    one("lanes_lost_total", lambda totals: totals.lanes_lost)
    _add_progress(out, peers)


def _add_progress(out: Exposition, peers: Sequence[Counted]) -> None:
    """What the programs of peers report."""
    out.add("step", [(text, said.step if said.step >= 0 else None) for text, _, said in peers])
    out.add("steps_total", [(text, said.steps) for text, _, said in peers])
    logged = [
        (f"{text},{labels(name=name)}", math.nan if value is None else value)
        for text, _, said in peers
        for name, value in sorted(said.logged.items())[:MAX_LOGGED]
    ]
    out.add("logged_value", logged)
    out.add("clock_offset_seconds", [(text, _seconds(said.clock_offset_ns)) for text, _, said in peers])
    out.add("clock_uncertainty_seconds", [(text, _seconds(said.clock_error_ns)) for text, _, said in peers])
    out.add("events_dropped_total", [(text, said.events_dropped) for text, _, said in peers])


def _seconds(value_ns: int | None) -> float | None:
    return None if value_ns is None else value_ns / 1e9
