"""From congestion and rates to advice for each pair. Pure.

What people fixed (`agent set`) comes first, then a static policy, then the policy that follows congestion. That one
smooths, so a pair is looked at again and again after something new is known about it: FIRST_LOOKS times every POLL_NS,
then whenever its shares are expected to have moved by STRIDE, at least every HELD_NS while a path is held and every
WARM_NS else, and not at all when nothing is known about it. `wake_ns` says when the next look is due; an agent without
news sleeps. Looks fall on a common grid of POLL_NS, so that there is one call for many pairs.

A pair of which nothing is known gets no advice: its sender's local policy is better than a guess. Nor does one whose
paths are said to be clear and whose rates are not known: equal shares would be a guess as well, and a bad one where
paths are unequal. If everything that was known has become stale, the advice is withdrawn.

Round trips that senders measured are kept to be looked at, and steer nothing. The time beyond the shortest one would be
time in queues if nothing else took time, but a sender with more to send fills the queue of its path itself (its rate
says already what it gets there), and one with little to send is acknowledged late (delayed acknowledgements: 2 to 40 ms
on a way that is empty).

One look costs some ten microseconds, and there may be thousands of pairs: `decide` takes the MOST_AT_ONCE that have
waited for longest, and the shell leaves a pause between two calls that is as long as the call was, at least. What is
*urgent* does not wait for that: backpressure, and news about a pair that was not looked at just now, unless it is news
about many. `decide_urgent` takes MOST_URGENT of them, so that the shell gets to its other duties; then it is called on.
"""

import heapq
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import TypeVar

from ringfold.agent.adapters import Observation
from ringfold.agent.policy import Decision, FlowInput, PathInput, Policy
from ringfold.agent.registry import Pair
from ringfold.agent.telemetry import TelemetryDesk
from ringfold.errors import ConfigError
from ringfold.wire.agent import Measured
from ringfold.wire.telemetry import EXACT, Congestion, Refusal, address_number, masked

POLL_NS = 1_000_000
HELD_NS = 5_000_000
WARM_NS = 50_000_000
FIRST_LOOKS = 5
MOST_AT_ONCE = 16
MOST_URGENT = 64
MOST_REPORTS = 64
"""Of so many flows of a pair what they measured is kept."""
SAME = 1e-4
"""Shares that differ by less are the same."""
STRIDE = 0.02
BACKPRESSURE = 240
CONGESTED = 32
"""Less than this is no reason to move bytes while rates are not known."""
RATE_STALE_NS = 10_000_000_000

_Exact = tuple[int, int, int]
K = TypeVar("K")
V = TypeVar("V")


@dataclass(frozen=True, slots=True)
class Advice:
    """How a pair's bytes should be split (shares of 1), which paths must not be used, and what that comes from.

    No shares: there is no advice any more.
    """

    pair: Pair
    shares: Sequence[float]
    backpressure: Sequence[bool]
    reason: str | Decision = ""

    @property
    def why(self) -> str:
        return self.reason if isinstance(self.reason, str) else self.reason.why


@dataclass(frozen=True, slots=True)
class _Report:
    """The rate that one flow measured on each path."""

    at_ns: int
    rates: Sequence[float | None]


@dataclass(eq=False, slots=True)
class _Known:
    """A pair that is steered: its paths' addresses as numbers, what was measured, and when it is looked at."""

    pair: Pair
    ends: list[tuple[int, int]]
    reports: dict[int, _Report] = field(default_factory=dict)
    """The newest of each flow of the pair that has rates, by the flow's number."""
    said: dict[int, Measured] = field(default_factory=dict)
    """The newest of each flow, whatever it says."""
    due_ns: int | None = None
    looked_ns: int = -POLL_NS
    looks: int = 0
    """Since the last news."""
    told: Decision | None = None
    fixed: tuple[float, ...] | None = None


class Steering:
    """Holds what is known about each pair, and says when advice changes."""

    def __init__(
        self,
        static: Sequence[float] | None = None,
        desk: TelemetryDesk | None = None,
        policy: Policy | None = None,
    ) -> None:
        self._static = static
        self._desk, self._policy = desk or TelemetryDesk(), policy or Policy()
        self._known: dict[int, _Known] = {}
        self._exact: dict[_Exact, set[int]] = {}
        self._by_local: dict[int, set[int]] = {}
        self._by_remote: dict[int, set[int]] = {}
        self._local: dict[int, float] = {}
        self._due: list[tuple[int, int]] = []
        self._urgent: dict[int, None] = {}

    @property
    def name(self) -> str:
        return "auto" if self._static is None else "static:" + ",".join(f"{share:g}" for share in self._static)

    @property
    def counts(self) -> Counter[str]:
        table = self._desk.table
        found = Counter({f"telemetry {name}": count for name, count in table.counts.items()})
        return found + Counter({"telemetry packets": self._desk.gate.accepted})

    @property
    def refused(self) -> Counter[str]:
        return Counter({f"telemetry {name}": count for name, count in self._desk.gate.refused.items()})

    # Pairs

    def added(self, pair: Pair) -> Advice | None:
        """There is a new pair: advice for it, if there is any already. What the policy says follows with `decide`."""
        ends = [(address_number(local), address_number(remote)) for local, remote in pair.paths]
        self._known[pair.slot] = _Known(pair, ends)
        for path, (source, destination) in enumerate(ends):
            self._exact.setdefault((source, destination, path), set()).add(pair.slot)
            self._by_local.setdefault(source, set()).add(pair.slot)
            self._by_remote.setdefault(destination, set()).add(pair.slot)
        if len(self._desk.table):
            self._look_at(pair.slot, 0)
        return self._standing(pair)

    def removed(self, pair: Pair) -> None:
        known = self._known.pop(pair.slot)
        self._urgent.pop(pair.slot, None)
        self._policy.forget(pair.slot)
        for path, (source, destination) in enumerate(known.ends):
            _without(self._exact, (source, destination, path), pair.slot)
            _without(self._by_local, source, pair.slot)
            _without(self._by_remote, destination, pair.slot)

    def fix(self, pair: Pair, shares: Sequence[float]) -> Advice | None:
        """Somebody decided; without shares, nobody did any more."""
        known = self._known[pair.slot]
        known.fixed, known.told = tuple(shares) or None, None
        self._look_at(pair.slot, 0)
        return self._standing(pair)

    def _standing(self, pair: Pair) -> Advice | None:
        """What does not depend on anything that is measured."""
        clear = (False,) * len(pair.paths)
        if (fixed := self._known[pair.slot].fixed) is not None:
            return Advice(pair, fixed, clear, "fixed by hand")
        if self._static is not None and len(self._static) == len(pair.paths):
            return Advice(pair, self._static, clear, "the static policy of this agent")
        return None

    # News

    def datagram(self, now_ns: int, unix_ns: int, content: bytes, address: str) -> None:
        """Telemetry, or what claims to be."""
        news = self._desk.datagram(now_ns, unix_ns, content, address)
        if isinstance(news, Congestion):
            self._stir(now_ns, news)

    def observed(self, now_ns: int, unix_ns: int, what: Observation | Refusal) -> None:
        """The same for what an adapter brought."""
        if isinstance(what, Refusal):
            self._desk.gate.refused[what.reason] += 1
        elif self._desk.table.observed(now_ns, unix_ns, what.body, what.unix_ns or unix_ns):
            self._stir(now_ns, what.body)

    def _stir(self, now_ns: int, news: Congestion) -> None:
        if news.source_bits == news.destination_bits == EXACT:
            slots = list(self._exact.get((news.source, news.destination, news.path), ()))
        else:
            slots = [slot for slot in self._candidates(news) if _is_about(news, self._known[slot].ends)]
        is_urgent = news.congestion >= BACKPRESSURE
        for slot in slots:
            self._news(now_ns, slot, is_urgent=is_urgent, may_wait=not is_urgent and len(slots) > MOST_AT_ONCE)

    def _candidates(self, news: Congestion) -> Iterable[int]:
        """The slots that a packet with a prefix may be about: a switch's port has a host at one of its ends."""
        if news.destination_bits == EXACT:
            return self._by_remote.get(news.destination, ())
        if news.source_bits == EXACT:
            return self._by_local.get(news.source, ())
        return self._known

    def measured(self, now_ns: int, pair: Pair, flow: int, report: Measured) -> None:
        """What the sender of one flow (by its number) measured on the paths of this pair.

        A report without rates takes back none: rates are good for RATE_STALE_NS.
        """
        known = self._known[pair.slot]
        _keep(known.said, flow, report)
        rates = [float(rate) if rate > 0 else None for rate in report.bytes_per_s]
        if any(rates):
            _keep(known.reports, flow, _Report(now_ns, rates))
            self._news(now_ns, pair.slot)

    def last_report(self, slot: int, flow: int) -> Measured | None:
        """What this flow of the pair in this slot measured last; None if nothing is known."""
        known = self._known.get(slot)
        return None if known is None else known.said.get(flow)

    def local(self, now_ns: int, pressures: Mapping[int, float]) -> None:
        """How full the queue of the own interface is (0 to 255) that each local address belongs to."""
        before, self._local = self._local, dict(pressures)
        for address in sorted(before.keys() | pressures.keys()):
            if before.get(address) != pressures.get(address):
                for slot in self._by_local.get(address, ()):
                    self._news(now_ns, slot, may_wait=True)

    def _news(self, now_ns: int, slot: int, *, is_urgent: bool = False, may_wait: bool = False) -> None:
        """A stream of news is looked at every POLL_NS; what comes after a while is urgent.

        Unless it may wait: a NIC's queue is news for all its pairs, which may be thousands, a thousand times a second.
        """
        known = self._known[slot]
        known.looks = 0
        if may_wait:
            self._look_at(slot, _on_grid(max(now_ns, known.looked_ns + POLL_NS)))
        elif is_urgent or now_ns - known.looked_ns >= POLL_NS:
            self._urgent[slot] = None
        else:
            self._look_at(slot, _on_grid(known.looked_ns + POLL_NS))

    # Decisions

    def wake_ns(self) -> int | None:
        """When `decide` has something to do; None: not before there is news."""
        while self._due:
            due_ns, slot = self._due[0]
            known = self._known.get(slot)
            if known is not None and known.due_ns == due_ns:
                return due_ns
            heapq.heappop(self._due)
        return None

    @property
    def is_urgent(self) -> bool:
        """Whether there is something that `decide_urgent` should not wait with."""
        return bool(self._urgent)

    def decide_urgent(self, now_ns: int) -> list[Advice]:
        """Advice that is new about what is urgent, or about some of it: look at `is_urgent` again."""
        slots = list(islice(self._urgent, MOST_URGENT))
        for slot in slots:
            del self._urgent[slot]
        return self._decide(now_ns, slots)

    def decide(self, now_ns: int) -> list[Advice]:
        """Advice that is new about the pairs that are due."""
        slots: list[int] = []
        while len(slots) < MOST_AT_ONCE and (due_ns := self.wake_ns()) is not None and due_ns <= now_ns:
            _, slot = heapq.heappop(self._due)
            self._known[slot].due_ns = None
            slots.append(slot)
        return self._decide(now_ns, slots)

    def _decide(self, now_ns: int, slots: Sequence[int]) -> list[Advice]:
        inputs: list[FlowInput] = []
        advice: list[Advice] = []
        for slot in slots:
            known = self._known[slot]
            if self._standing(known.pair) is not None:
                continue
            paths = self._inputs(now_ns, known)
            if _is_worth(paths, has_advice=known.told is not None):
                inputs.append(FlowInput(slot, paths))
                continue
            known.looked_ns = now_ns
            if known.told is not None:
                known.told = None
                self._policy.forget(slot)
                advice.append(Advice(known.pair, (), (), "nothing is known any more"))
        for one, decision in zip(inputs, self._policy.step(now_ns, inputs), strict=True):
            assert isinstance(one.flow, int)
            advice += self._conclude(now_ns, self._known[one.flow], decision)
        return advice

    def _inputs(self, now_ns: int, known: _Known) -> tuple[PathInput, ...]:
        """What is known of each path now. The flows of a pair share its paths: what they got there together counts."""
        rated = [report.rates for report in known.reports.values() if now_ns - report.at_ns <= RATE_STALE_NS]
        inputs = []
        for path, (source, destination) in enumerate(known.ends):
            reading = self._desk.table.reading(now_ns, source, destination, path)
            rates = [rate for each in rated if (rate := each[path]) is not None]
            inputs.append(
                PathInput(
                    congestion=None if reading is None else reading.congestion,
                    age_ns=0 if reading is None else reading.age_ns,
                    local=self._local.get(source),
                    rate=sum(rates) if rates else None,
                    shared=source,
                )
            )
        return tuple(inputs)

    def _conclude(self, now_ns: int, known: _Known, decision: Decision) -> list[Advice]:
        """Tell it if it is another one than before, and say when to look again."""
        told = known.told
        elapsed_ns = max(POLL_NS, now_ns - known.looked_ns)
        known.looked_ns = now_ns
        known.looks += 1
        moved = 1.0 if told is None or told.backpressure != decision.backpressure else _distance(told, decision)
        pause_ns = POLL_NS
        if known.looks > FIRST_LOOKS:
            longest_ns = HELD_NS if any(decision.backpressure) else WARM_NS
            pause_ns = int(min(longest_ns, max(POLL_NS, elapsed_ns * STRIDE / max(moved, SAME))))
        self._look_at(known.pair.slot, _on_grid(now_ns + pause_ns))
        if moved < SAME:
            return []
        known.told = decision
        return [Advice(known.pair, decision.shares, decision.backpressure, decision)]

    def _look_at(self, slot: int, at_ns: int) -> None:
        known = self._known[slot]
        if known.due_ns is None or at_ns < known.due_ns:
            known.due_ns = at_ns
            heapq.heappush(self._due, (at_ns, slot))


def _is_about(news: Congestion, ends: Sequence[tuple[int, int]]) -> bool:
    """Whether a packet with a prefix speaks of a path between these ends."""
    if news.path >= len(ends):
        return False
    source, destination = ends[news.path]
    return masked(source, news.source_bits) == news.source and (
        masked(destination, news.destination_bits) == news.destination
    )


def _is_worth(paths: Sequence[PathInput], *, has_advice: bool) -> bool:
    """Whether advice is better than none. Advice that was given stands until nothing is known any more."""
    if any(path.rate is not None for path in paths):
        return True
    return any(path.congestion is not None and (has_advice or path.congestion >= CONGESTED) for path in paths)


def _keep(newest: dict[int, V], flow: int, report: V) -> None:
    """The newest stands last, and of MOST_REPORTS flows one is kept."""
    newest.pop(flow, None)
    newest[flow] = report
    if len(newest) > MOST_REPORTS:
        del newest[next(iter(newest))]


def _on_grid(at_ns: int) -> int:
    return -(-at_ns // POLL_NS) * POLL_NS


def _distance(one: Decision, other: Decision) -> float:
    return max(abs(mine - yours) for mine, yours in zip(one.shares, other.shares, strict=True))


def _without(index: dict[K, set[int]], key: K, slot: int) -> None:
    slots = index.get(key, set())
    slots.discard(slot)
    if not slots:
        index.pop(key, None)


def parse_policy(text: str) -> tuple[float, ...] | None:
    """`static:SHARE` (of SUP, two paths) or `static:S0,S1,...`; None for the policy that follows congestion."""
    if text == "auto":
        return None
    kind, _, numbers = text.partition(":")
    try:
        if kind != "static":
            raise ValueError
        shares = tuple(float(number) for number in numbers.split(","))
    except ValueError:
        raise ConfigError(f"{text!r} is no policy; write auto, static:SHARE or static:SHARE,SHARE,...") from None
    if len(shares) == 1:
        shares = (1 - shares[0], shares[0])
    if not all(0 <= share <= 1 for share in shares) or abs(sum(shares) - 1) > 1e-3:
        raise ConfigError(f"the shares of {text!r} do not lie between 0 and 1, or do not sum to 1")
    return shares
