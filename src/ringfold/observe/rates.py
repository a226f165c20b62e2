"""Rates of peers, from the differences of what they have counted, and who of them slows the others down. Pure.

A live view has no single op: a peer reports sums in its heartbeats. Of the sums of the last seconds, three shares of
the time tell who is slow. All members end an op together, so the member whose ops are the shortest begins them last,
and the others wait for it; and the member whose transport takes nothing for long has a slow link to the next one.
"""

from collections import deque
from collections.abc import Callable, Mapping
from typing import NamedTuple

from ringfold.wire.base import PeerId
from ringfold.wire.status import OpTotals, PeerStatus, Status

WINDOW_MS = 6_000
MAX_SAMPLES = 32
MAX_STEP_SAMPLES = 48
SLOW_SHARE = 0.10
"""A cause of less than this share of the time is not worth a word."""


class Sample(NamedTuple):
    at_ms: int
    ops: int
    totals: OpTotals


Counter = Callable[[Sample], int]


class Slow(NamedTuple):
    """Who slows the others down, and why. `link`: it is this link; (0, 0) if it is the peer itself."""

    peer: PeerId
    share: float
    text: str
    link: tuple[PeerId, PeerId] = (0, 0)


class PeerRates:
    """The rates of one peer over the last seconds. -1: not known yet."""

    __slots__ = ("_samples", "_steps")

    def __init__(self) -> None:
        self._samples: deque[Sample] = deque(maxlen=MAX_SAMPLES)
        self._steps: deque[tuple[int, int]] = deque(maxlen=MAX_STEP_SAMPLES)

    def add(self, at_ms: int, peer: PeerStatus) -> None:
        samples, steps = self._samples, self._steps
        if samples and (at_ms < samples[-1].at_ms or peer.committed_ops < samples[-1].ops):
            samples.clear()
            steps.clear()
        samples.append(Sample(at_ms, peer.committed_ops, peer.totals))
        while len(samples) > 2 and samples[1].at_ms <= at_ms - WINDOW_MS:
            samples.popleft()
        done = peer.progress.steps
        if steps and done < steps[-1][1]:
            steps.clear()
        if done and (not steps or done > steps[-1][1]):
            steps.append((at_ms, done))
        while len(steps) > 3 and steps[1][0] <= at_ms - WINDOW_MS:
            steps.popleft()

    @property
    def is_known(self) -> bool:
        return len(self._samples) > 1

    @property
    def steps_per_s(self) -> float:
        """Steps end seldom: the rate is that between changes of their number, and falls when the next one is late."""
        if len(self._steps) < 2:
            return -1
        late_ms = self._samples[-1].at_ms - self._steps[-1][0]
        usual = 1_000 / max(0.001, self.step_ms)
        return usual if late_ms <= max(2 * self.step_ms, 1_500) else min(usual, 1_000 / late_ms)

    @property
    def step_ms(self) -> float:
        """How long the last steps took, each; 0: not known."""
        if len(self._steps) < 2:
            return 0.0
        (first_ms, first), (last_ms, last) = self._steps[0], self._steps[-1]
        return (last_ms - first_ms) / (last - first)

    @property
    def ops_per_s(self) -> float:
        return self._per_s(lambda sample: sample.ops)

    @property
    def sent_per_s(self) -> float:
        return self._per_s(lambda sample: sample.totals.sent_bytes)

    @property
    def received_per_s(self) -> float:
        return self._per_s(lambda sample: sample.totals.received_bytes)

    @property
    def busy_share(self) -> float:
        """The share of the time in ops."""
        return self._share(lambda sample: sample.totals.busy_ns)

    @property
    def waited_share(self) -> float:
        """The share of the time in ops before anything of another peer had come."""
        return self._share(lambda sample: sample.totals.waited_ns)

    @property
    def blocked_share(self) -> float:
        """The share of the time in which the transport took nothing for the next peer."""
        return self._share(lambda sample: sample.totals.blocked_ns)

    def _difference(self, of: Counter) -> tuple[float, float]:
        """By how much a count grew, and in how many ms."""
        if len(self._samples) < 2:
            return 0.0, 0.0
        first, last = self._samples[0], self._samples[-1]
        return max(0, of(last) - of(first)), last.at_ms - first.at_ms

    def _per_s(self, of: Counter) -> float:
        grown, took_ms = self._difference(of)
        return 1_000 * grown / took_ms if took_ms > 0 else 0.0

    def _share(self, of: Counter) -> float:
        grown, took_ms = self._difference(of)
        return grown / 1e6 / took_ms if took_ms > 0 else -1.0


def slowest(at_ms: int, status: Status, rates: Mapping[PeerId, PeerRates]) -> Slow | None:
    """Who slows the others down, with the share of the time that it costs them; None if nobody does markedly."""
    for wait in sorted(status.waiting, key=lambda each: -each.since_ms):
        if len(wait.missing) == 1 and wait.since_ms >= 1_000 and wait.waiting:
            late = wait.missing[0]
            count = len(wait.waiting)
            return Slow(late, 1.0, f"{count} peer{'s wait' if count > 1 else ' waits'} for peer {late}")
    worst: Slow | None = None
    for group in status.groups:
        ring = [peer for peer in group.ring if peer in rates and rates[peer].is_known]
        if len(ring) < 2:
            continue
        for found in (_latest(ring, rates), _narrowest(ring, group.ring, rates)):
            if found is not None and found.share >= SLOW_SHARE and (worst is None or found.share > worst.share):
                worst = found
    return worst


def _latest(ring: list[PeerId], rates: Mapping[PeerId, PeerRates]) -> Slow | None:
    """The member whose ops are much shorter than those of the others: it begins them last."""
    busy = {peer: max(0.0, rates[peer].busy_share) for peer in ring}
    late = min(ring, key=lambda peer: (busy[peer], peer))
    others = sorted(busy[peer] for peer in ring if peer != late)
    share = others[len(others) // 2] - busy[late]
    if busy[late] > 0.5 * others[len(others) // 2]:
        return None
    return Slow(late, share, f"peer {late} begins its ops last: the others wait {100 * share:.0f} % of the time")


def _narrowest(ring: list[PeerId], whole: list[PeerId], rates: Mapping[PeerId, PeerRates]) -> Slow | None:
    """The link whose source is blocked for much longer than the others."""
    blocked = {peer: max(0.0, rates[peer].blocked_share) for peer in ring}
    source = max(ring, key=lambda peer: (blocked[peer], -peer))
    others = sorted(blocked[peer] for peer in ring if peer != source)
    if blocked[source] < 2 * others[len(others) // 2]:
        return None
    target = whole[(whole.index(source) + 1) % len(whole)]
    text = f"link {source} → {target} is full {100 * min(1.0, blocked[source]):.0f} % of the time"
    return Slow(source, min(1.0, blocked[source]), text, (source, target))
