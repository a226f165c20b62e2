"""From congestion and rates to advice for each pair. Pure.

Shares that were fixed by hand (`agent set`) come first, then a static policy, then the policy that follows congestion.
That policy smooths its inputs, so after new information about a pair it decides several times: FAST_DECISIONS times
every POLL_INTERVAL_NS (a setting), then whenever the shares are expected to have moved by TARGET_CHANGE, at least every
HELD_INTERVAL_NS while a path is held and every MAX_INTERVAL_NS otherwise, and not at all if nothing is known about the
pair. `wake_ns` is when the next decision is due; an agent without new information sleeps. Decisions fall on a common
grid of POLL_INTERVAL_NS, so that one call serves many pairs.

A pair without information gets no advice: the local policy of its sender is better than a guess. Nor does a pair whose
paths are clear and whose rates are unknown: equal shares would be a guess, too, and a bad one for unequal paths. If all
information about a pair has become stale, its advice is withdrawn.

Telemetry has a direction. A report about a path that a flow of this host sends on leads to a decision. One about
traffic *to* this host is for the host that sends it: nobody else can choose another path. It is forwarded to that
host's agent, at the address that the traffic comes from, once for each sender that a flow of this host leads back to,
and not more often than every FORWARD_INTERVAL_NS unless backpressure begins or ends. A report about neither is counted
as not for us. A forwarded report names one pair, whose sender receives it: it is never forwarded again.

RTTs that senders measured are only shown; they do not change shares. RTT above the minimum is not a measure of queues:
a sender with more to send fills the queue of its path itself (its rate includes that already), and one with little to
send gets late acknowledgements (delayed ACKs add 2 to 40 ms on an empty path).

A decision costs some ten microseconds, and there may be thousands of pairs. `decide` takes the MAX_DUE_PER_CALL pairs
that have been due for longest, and the shell pauses between two calls at least as long as the call took. *Urgent* pairs
do not wait for that: those with backpressure, and those with new information and no recent decision, unless the
information is about many pairs. `decide_urgent` takes MAX_URGENT_PER_CALL of them, so that the shell gets to its other
work; then it is called again.
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
from ringfold.agent.telemetry import TelemetryIngest
from ringfold.errors import ConfigError
from ringfold.wire.agent import Measured
from ringfold.wire.telemetry import EXACT, Congestion, Refusal, address_number, address_text, masked

POLL_INTERVAL_NS = 1_000_000
HELD_INTERVAL_NS = 5_000_000
MAX_INTERVAL_NS = 50_000_000
FAST_DECISIONS = 5
MAX_DUE_PER_CALL = 16
MAX_URGENT_PER_CALL = 64
FORWARD_INTERVAL_NS = 1_000_000
MAX_FORWARDS_PER_REPORT = 64
MAX_FORWARDS_REMEMBERED = 4_096
MAX_REPORTS_PER_PAIR = 64
"""The measurements of this many flows of a pair are kept."""
MIN_CHANGE = 1e-4
"""Shares that differ by less count as equal."""
TARGET_CHANGE = 0.02
BACKPRESSURE = 240
MIN_CONGESTION = 32
"""Less congestion is no reason for advice while rates are unknown."""
RATE_STALE_NS = 10_000_000_000

_Exact = tuple[int, int, int]
K = TypeVar("K")
V = TypeVar("V")


@dataclass(frozen=True, slots=True)
class Advice:
    """The shares of a pair's paths (they sum to 1), which paths are under backpressure, and the reason.

    No shares: the advice is withdrawn. Fixed shares bind over whole transfers; others are where a transfer begins.
    """

    pair: Pair
    shares: Sequence[float]
    backpressure: Sequence[bool]
    reason: str | Decision = ""
    is_fixed: bool = False

    @property
    def why(self) -> str:
        return self.reason if isinstance(self.reason, str) else self.reason.why


@dataclass(frozen=True, slots=True)
class Forward:
    """A report for the agent of another host, which has this address, and how old it is."""

    address: str
    report: Congestion
    age_ns: int


@dataclass(frozen=True, slots=True)
class _RateReport:
    """The rates that one flow measured on each path."""

    at_ns: int
    rates: Sequence[float | None]


@dataclass(eq=False, slots=True)
class _SteeredPair:
    """A pair: the addresses of its paths as numbers, what was measured, and when the next decision is due."""

    pair: Pair
    ends: list[tuple[int, int]]
    reports: dict[int, _RateReport] = field(default_factory=dict)
    """The newest report with rates of each flow, by its number."""
    last_reports: dict[int, Measured] = field(default_factory=dict)
    """The newest report of each flow."""
    due_ns: int | None = None
    last_decision_ns: int = -POLL_INTERVAL_NS
    decisions: int = 0
    """Since the last new information."""
    published: Decision | None = None
    fixed: tuple[float, ...] | None = None


class Steering:
    """Holds what is known about each pair, and returns advice when it changes."""

    def __init__(
        self,
        static: Sequence[float] | None = None,
        ingest: TelemetryIngest | None = None,
        policy: Policy | None = None,
        *,
        interval_ns: int = POLL_INTERVAL_NS,
        backpressure: int = BACKPRESSURE,
    ) -> None:
        self._static, self._interval_ns, self._backpressure = static, interval_ns, backpressure
        self._ingest, self._policy = ingest or TelemetryIngest(), policy or Policy()
        self._pairs: dict[int, _SteeredPair] = {}
        self._exact: dict[_Exact, set[int]] = {}
        self._by_local: dict[int, set[int]] = {}
        self._by_remote: dict[int, set[int]] = {}
        self._local: dict[int, float] = {}
        self._due: list[tuple[int, int]] = []
        self._urgent: dict[int, None] = {}
        self._directions: Counter[str] = Counter()
        self._forwarded: dict[_Exact, tuple[int, bool]] = {}
        """By sender, own address and path, when a report was last forwarded, and whether it was backpressure."""

    @property
    def name(self) -> str:
        return "auto" if self._static is None else "static:" + ",".join(f"{share:g}" for share in self._static)

    @property
    def counts(self) -> Counter[str]:
        table = self._ingest.table
        found = Counter({f"telemetry {name}": count for name, count in (table.counts + self._directions).items()})
        return found + Counter({"telemetry packets": self._ingest.gate.accepted})

    @property
    def refused(self) -> Counter[str]:
        return Counter({f"telemetry {name}": count for name, count in self._ingest.gate.refused.items()})

    # Pairs

    def added(self, pair: Pair) -> Advice | None:
        """Add a pair. Returns advice that depends on no measurement; the advice of the policy follows with `decide`."""
        ends = [(address_number(local), address_number(remote)) for local, remote in pair.paths]
        self._pairs[pair.slot] = _SteeredPair(pair, ends, last_decision_ns=-self._interval_ns)
        for path, (source, destination) in enumerate(ends):
            self._exact.setdefault((source, destination, path), set()).add(pair.slot)
            self._by_local.setdefault(source, set()).add(pair.slot)
            self._by_remote.setdefault(destination, set()).add(pair.slot)
        if len(self._ingest.table):
            self._schedule(pair.slot, 0)
        return self._static_advice(pair)

    def removed(self, pair: Pair) -> None:
        steered = self._pairs.pop(pair.slot)
        self._urgent.pop(pair.slot, None)
        self._policy.forget(pair.slot)
        for path, (source, destination) in enumerate(steered.ends):
            _discard(self._exact, (source, destination, path), pair.slot)
            _discard(self._by_local, source, pair.slot)
            _discard(self._by_remote, destination, pair.slot)

    def fix(self, pair: Pair, shares: Sequence[float]) -> Advice | None:
        """Fix the shares of a pair by hand; no shares: the policy decides again."""
        steered = self._pairs[pair.slot]
        steered.fixed, steered.published = tuple(shares) or None, None
        self._schedule(pair.slot, 0)
        return self._static_advice(pair)

    def _static_advice(self, pair: Pair) -> Advice | None:
        """Advice that depends on no measurement, if there is any."""
        clear = (False,) * len(pair.paths)
        if (fixed := self._pairs[pair.slot].fixed) is not None:
            return Advice(pair, fixed, clear, "fixed by hand", is_fixed=True)
        if self._static is not None and len(self._static) == len(pair.paths):
            return Advice(pair, self._static, clear, "the static policy of this agent", is_fixed=True)
        return None

    # New information

    def datagram(self, now_ns: int, unix_ns: int, content: bytes, address: str) -> list[Forward]:
        """A datagram from a telemetry port, of any content. Returns what is for other hosts."""
        report = self._ingest.datagram(now_ns, unix_ns, content, address)
        return self._on_congestion(now_ns, report) if isinstance(report, Congestion) else []

    def observed(self, now_ns: int, unix_ns: int, observation: Observation | Refusal) -> list[Forward]:
        """An observation of a feed. Returns what is for other hosts."""
        if isinstance(observation, Refusal):
            self._ingest.gate.refused[observation.reason] += 1
        elif self._ingest.table.add_observation(now_ns, unix_ns, observation.body, observation.unix_ns or unix_ns):
            return self._on_congestion(now_ns, observation.body)
        return []

    def _on_congestion(self, now_ns: int, report: Congestion) -> list[Forward]:
        if report.source_bits == report.destination_bits == EXACT:
            slots = list(self._exact.get((report.source, report.destination, report.path), ()))
        else:
            slots = [slot for slot in self._candidates(report) if _is_about(report, self._pairs[slot].ends)]
        if not slots:
            return self._on_inbound(now_ns, report)
        self._directions["for flows from here"] += 1
        is_urgent = report.congestion >= self._backpressure
        for slot in slots:
            may_wait = not is_urgent and len(slots) > MAX_DUE_PER_CALL
            self._schedule_decision(now_ns, slot, is_urgent=is_urgent, may_wait=may_wait)
        return []

    def _on_inbound(self, now_ns: int, report: Congestion) -> list[Forward]:
        """A report that is about no flow from here: perhaps about traffic to this host, and then for its senders."""
        senders = self._senders(report)
        self._directions["for senders to here" if senders else "not for us"] += 1
        found: list[Forward] = []
        is_held, age_ns = report.congestion >= self._backpressure, self._ingest.table.late_ns(report)
        for remote, local in senders[:MAX_FORWARDS_PER_REPORT]:
            sender = (remote, local, report.path)
            last_ns, was_held = self._forwarded.get(sender, (-FORWARD_INTERVAL_NS, False))
            if is_held == was_held and now_ns - last_ns < FORWARD_INTERVAL_NS:
                continue
            self._remember_forward(now_ns, sender, is_held=is_held)
            exact = Congestion(remote, local, report.path, report.congestion, report.depth_bytes)
            found.append(Forward(address_text(remote), exact, age_ns))
        self._directions["forwarded"] += len(found)
        self._directions["forwards left out"] += len(senders) - len(found)
        return found

    def _remember_forward(self, now_ns: int, sender: _Exact, *, is_held: bool) -> None:
        if len(self._forwarded) >= MAX_FORWARDS_REMEMBERED:
            # Beyond the interval a forward has no effect on the next one.
            recent = {key: last for key, last in self._forwarded.items() if now_ns - last[0] < FORWARD_INTERVAL_NS}
            self._forwarded = recent if len(recent) < MAX_FORWARDS_REMEMBERED else {}
        self._forwarded[sender] = now_ns, is_held

    def _senders(self, report: Congestion) -> list[tuple[int, int]]:
        """The (remote, local) addresses on the path of a report that it is about, where a flow leads back.

        A report about all destinations is about the port that a host sends into, and this host is not it. An address of
        this host is no other host.
        """
        if not report.destination_bits:
            return []
        if report.destination_bits == EXACT:
            slots: Iterable[int] = self._by_local.get(report.destination, ())
        elif report.source_bits == EXACT:
            slots = self._by_remote.get(report.source, ())
        else:
            slots = self._pairs
        found: dict[tuple[int, int], None] = {}
        for slot in sorted(slots):
            ends = [(remote, local) for local, remote in self._pairs[slot].ends]
            if _is_about(report, ends) and ends[report.path][0] not in self._by_local:
                found[ends[report.path]] = None
        return list(found)

    def _candidates(self, report: Congestion) -> Iterable[int]:
        """The slots that a packet with a prefix may be about. If one prefix is a host, only the pairs of that host."""
        if report.destination_bits == EXACT:
            return self._by_remote.get(report.destination, ())
        if report.source_bits == EXACT:
            return self._by_local.get(report.source, ())
        return self._pairs

    def measured(self, now_ns: int, pair: Pair, flow: int, report: Measured) -> None:
        """The sender of a flow (by its number) reported its measurements on the paths of this pair.

        A report without rates keeps the former rates: rates are valid for RATE_STALE_NS.
        """
        steered = self._pairs[pair.slot]
        _keep_newest(steered.last_reports, flow, report)
        rates = [float(rate) if rate > 0 else None for rate in report.bytes_per_s]
        if any(rates):
            _keep_newest(steered.reports, flow, _RateReport(now_ns, rates))
            self._schedule_decision(now_ns, pair.slot)

    def last_report(self, slot: int, flow: int) -> Measured | None:
        """The last report of a flow of the pair in this slot; None if there is none."""
        steered = self._pairs.get(slot)
        return None if steered is None else steered.last_reports.get(flow)

    def local(self, now_ns: int, pressures: Mapping[int, float]) -> None:
        """The queues of this host's interfaces were read: their pressure (0 to 255), by local address."""
        before, self._local = self._local, dict(pressures)
        for address in sorted(before.keys() | pressures.keys()):
            if before.get(address) != pressures.get(address):
                for slot in self._by_local.get(address, ()):
                    self._schedule_decision(now_ns, slot, may_wait=True)

    def _schedule_decision(self, now_ns: int, slot: int, *, is_urgent: bool = False, may_wait: bool = False) -> None:
        """A stream of new information leads to a decision every self._interval_ns; after a pause it is urgent.

        Unless it may wait: the queue of a NIC concerns all its pairs, which may be thousands, a thousand times a
        second.
        """
        steered = self._pairs[slot]
        steered.decisions = 0
        if may_wait:
            self._schedule(slot, self._round_up(max(now_ns, steered.last_decision_ns + self._interval_ns)))
        elif is_urgent or now_ns - steered.last_decision_ns >= self._interval_ns:
            self._urgent[slot] = None
        else:
            self._schedule(slot, self._round_up(steered.last_decision_ns + self._interval_ns))

    # Decisions

    def wake_ns(self) -> int | None:
        """When the next decision is due; None: not before there is new information."""
        while self._due:
            due_ns, slot = self._due[0]
            steered = self._pairs.get(slot)
            if steered is not None and steered.due_ns == due_ns:
                return due_ns
            heapq.heappop(self._due)
        return None

    @property
    def is_urgent(self) -> bool:
        """Whether `decide_urgent` should be called at once."""
        return bool(self._urgent)

    def decide_urgent(self, now_ns: int) -> list[Advice]:
        """New advice about some urgent pairs. Check `is_urgent` again after it."""
        slots = list(islice(self._urgent, MAX_URGENT_PER_CALL))
        for slot in slots:
            del self._urgent[slot]
        return self._decide(now_ns, slots)

    def decide(self, now_ns: int) -> list[Advice]:
        """New advice about the pairs that are due."""
        slots: list[int] = []
        while len(slots) < MAX_DUE_PER_CALL and (due_ns := self.wake_ns()) is not None and due_ns <= now_ns:
            _, slot = heapq.heappop(self._due)
            self._pairs[slot].due_ns = None
            slots.append(slot)
        return self._decide(now_ns, slots)

    def _decide(self, now_ns: int, slots: Sequence[int]) -> list[Advice]:
        inputs: list[FlowInput] = []
        advice: list[Advice] = []
        for slot in slots:
            steered = self._pairs[slot]
            if self._static_advice(steered.pair) is not None:
                continue
            paths = self._inputs(now_ns, steered)
            if _is_advice_useful(paths, has_advice=steered.published is not None):
                inputs.append(FlowInput(slot, paths))
                continue
            steered.last_decision_ns = now_ns
            if steered.published is not None:
                steered.published = None
                self._policy.forget(slot)
                advice.append(Advice(steered.pair, (), (), "nothing is known any more"))
        for one, decision in zip(inputs, self._policy.step(now_ns, inputs), strict=True):
            assert isinstance(one.flow, int)
            advice += self._publish_if_changed(now_ns, self._pairs[one.flow], decision)
        return advice

    def _inputs(self, now_ns: int, steered: _SteeredPair) -> tuple[PathInput, ...]:
        """What is known of each path. The flows of a pair share its paths, so their rates are added."""
        rated = [report.rates for report in steered.reports.values() if now_ns - report.at_ns <= RATE_STALE_NS]
        inputs = []
        for path, (source, destination) in enumerate(steered.ends):
            reading = self._ingest.table.reading(now_ns, source, destination, path)
            rates = [rate for each in rated if (rate := each[path]) is not None]
            inputs.append(
                PathInput(
                    congestion=None if reading is None else reading.congestion,
                    depth_bytes=0 if reading is None else reading.depth_bytes,
                    age_ns=0 if reading is None else reading.age_ns,
                    local=self._local.get(source),
                    rate=sum(rates) if rates else None,
                    shared=source,
                )
            )
        return tuple(inputs)

    def _publish_if_changed(self, now_ns: int, steered: _SteeredPair, decision: Decision) -> list[Advice]:
        """Return the advice if it changed, and schedule the next decision."""
        published = steered.published
        elapsed_ns = max(self._interval_ns, now_ns - steered.last_decision_ns)
        steered.last_decision_ns = now_ns
        steered.decisions += 1
        moved = 1.0
        if published is not None and published.backpressure == decision.backpressure:
            moved = _distance(published, decision)
        pause_ns = self._interval_ns
        if steered.decisions > FAST_DECISIONS:
            max_pause_ns = HELD_INTERVAL_NS if any(decision.backpressure) else MAX_INTERVAL_NS
            expected_ns = elapsed_ns * TARGET_CHANGE / max(moved, MIN_CHANGE)
            pause_ns = int(min(max_pause_ns, max(self._interval_ns, expected_ns)))
        self._schedule(steered.pair.slot, self._round_up(now_ns + pause_ns))
        if moved < MIN_CHANGE:
            return []
        steered.published = decision
        return [Advice(steered.pair, decision.shares, decision.backpressure, decision)]

    def _schedule(self, slot: int, at_ns: int) -> None:
        steered = self._pairs[slot]
        if steered.due_ns is None or at_ns < steered.due_ns:
            steered.due_ns = at_ns
            heapq.heappush(self._due, (at_ns, slot))

    def _round_up(self, at_ns: int) -> int:
        """Decisions fall on a common grid."""
        return -(-at_ns // self._interval_ns) * self._interval_ns


def _is_about(report: Congestion, ends: Sequence[tuple[int, int]]) -> bool:
    """Whether a packet with a prefix is about a path between these addresses."""
    if report.path >= len(ends):
        return False
    source, destination = ends[report.path]
    return masked(source, report.source_bits) == report.source and (
        masked(destination, report.destination_bits) == report.destination
    )


def _is_advice_useful(paths: Sequence[PathInput], *, has_advice: bool) -> bool:
    """Whether advice is better than none. Published advice stays until nothing is known any more."""
    if any(path.rate is not None for path in paths):
        return True
    return any(path.congestion is not None and (has_advice or path.congestion >= MIN_CONGESTION) for path in paths)


def _keep_newest(newest: dict[int, V], flow: int, report: V) -> None:
    """Add the newest report at the end, and keep at most MAX_REPORTS_PER_PAIR."""
    newest.pop(flow, None)
    newest[flow] = report
    if len(newest) > MAX_REPORTS_PER_PAIR:
        del newest[next(iter(newest))]


def _distance(one: Decision, other: Decision) -> float:
    return max(abs(mine - yours) for mine, yours in zip(one.shares, other.shares, strict=True))


def _discard(index: dict[K, set[int]], key: K, slot: int) -> None:
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
        raise ConfigError(f"{text!r} is not a policy; write auto, static:SHARE or static:SHARE,SHARE,...") from None
    if len(shares) == 1:
        shares = (1 - shares[0], shares[0])
    if not all(0 <= share <= 1 for share in shares) or abs(sum(shares) - 1) > 1e-3:
        raise ConfigError(f"the shares of {text!r} do not lie between 0 and 1, or do not sum to 1")
    return shares
