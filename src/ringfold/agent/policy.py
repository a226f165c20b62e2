"""From congestion and measured rates to the shares of each flow's paths. Pure.

How it is called, every poll interval or when there is new information:

    policy = Policy(PolicySettings())
    decisions = policy.step(now_ns, [
        FlowInput(flow=7, paths=(
            PathInput(congestion=12, age_ns=2_000_000, rate=25e6),
            PathInput(congestion=None, local=40, rate=6e6, shared="eth1"),
        )),
    ])
    for decision in decisions:
        ...  # decision.flow, .shares (sum to 1), .backpressure (a flag for each path), .why (a sentence)
    policy.forget(7)

A call may name any of the flows; the others stay as they were. `flow` is any key, for example a slot, as long as it is
forgotten before another flow gets the same key.

**Terms.** The *pressure* of a path, 0 to 255, is the maximum of what the network reports (`congestion`) and what the
host's own NIC reports (`local`). A path is *held* while it is under backpressure, and *opens* for a while afterwards.

**The law.** The weight of path i is

    weight_i = rate_i * exp(-gain * pressure_i / 255) * opening_i

and its share is its part of the sum of weights. Rates and pressures are smoothed (EWMA). So:

- equal pressure everywhere: shares are proportional to the measured rates. That is the fixed point; it is not 50/50.
- only differences count. The logarithm of the ratio of two shares moves in proportion to the difference of pressures: a
  proportional controller. The queue itself integrates: a path that gets more than it drains grows a queue until its
  share fits, so the remaining error is a short queue, not a wrong share.
- shares are positive, sum to 1, and never grow when the pressure of their own path does.

**Why it does not oscillate.** A controller with late measurements and a high gain oscillates. Two things prevent it.
The gain falls with the age of the measurements, by 1 / (1 + age / age_scale): with an age of 100 ms it is a tenth of
the gain for fresh ones. And an age that is not reported (a switch that stamps its packets late) shows as oscillation:
after two swings of a share by more than `swing` within a second the gain of the flow is halved, and it recovers slowly.

**Backpressure.** At `hold_at` (240) the share of a path is zero at once, whatever the smoothed value; the floor does
not apply. Only the network holds a path. The host's own queue does not: it is normally full for a sender that has more
to send, and pulling waits there anyway. A path is released when its congestion has stayed at or below `release_at` for
the hold time, which doubles if it is held again soon after. Then it opens over `open_ms`, instead of getting its whole
share at once. Each time it is held again it is trusted less: a path that cannot carry its share ends with one that it
can, and does not oscillate for ever. If nothing is known of a held path any more it is released after `forget_ms`: the
sender of the telemetry is gone, and nothing waits for ever.

If *every* path is held, all flags are set and shares follow the rates alone: the bytes must go somewhere, no path is
better than the others, and the flags tell senders to slow down.

**Unknown** is neither clear nor congested. A path of unknown pressure is presumed to have the mean of the known
pressures, at most 128. So it neither attracts nor repels traffic while all is clear, and takes over from a path that is
known to be bad. An unknown rate is presumed to be the mean of the known rates.

**Fairness.** Flows may name what their paths share (`shared`: a NIC, a port of a switch). As that resource becomes
congested, the rate that counts for each of its flows moves from the flow's own rate to the mean over all its flows:
flows that started first get no more than later ones. While it is not congested, every flow uses its own measurement.
The congestion of the resource itself is not measured, but all of its flows see it: the lowest pressure among them is an
upper bound. So a flow whose remote end is slow is not averaged with the others of the same NIC.

**The floor.** A path that is not held keeps at least `floor`, so that it is still measured.
"""

import math
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field

from ringfold.errors import ConfigError
from ringfold.wire.telemetry import FULL_QUEUE

FULL_QUEUE_S = 0.05
"""A queue that takes this long to drain counts as full, whatever its limit."""
MAX_PRESUMED_PRESSURE = 128.0
_MAX_PRESSURE = 255.0
_AGE_DECAY_MS = 2_000.0
_GAIN_RECOVERY_MS = 5_000.0
_SHARED_AGE_NS_PER_PATH = 20_000
_MAX_SHARED_AGE_NS = 100_000_000
"""How long the mean over a shared resource is reused: per path of it, and at most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicySettings:
    """How the policy steers. Times in milliseconds, pressures of 255, shares of 1."""

    gain: float = 2.0
    """The exponent of a full difference of pressure."""
    age_scale_ms: float = 10.0
    """At this age of the measurements the gain is half of that for fresh ones."""
    pressure_ms: float = 4.0
    """Time constant of pressure; half of the age of the measurements if that is longer."""
    rate_ms: float = 100.0
    """Time constant of rates."""
    floor: float = 0.015
    hold_at: int = 240
    release_at: int = 160
    hold_ms: float = 20.0
    max_hold_ms: float = 2_000.0
    open_ms: float = 50.0
    forget_ms: float = 1_000.0
    fair_from: int = 32
    """The pressure of a shared resource at which fairness begins; it is complete at `release_at`."""
    distrust: float = 0.7
    """The factor on a path's weight each time it is held again."""
    min_trust: float = 0.02
    trust_ms: float = 10_000.0
    """How long it takes until trust has grown e-fold."""
    swing: float = 0.04
    min_gain: float = 0.03
    """The lowest factor that swings put on the gain."""

    def __post_init__(self) -> None:
        times = (self.age_scale_ms, self.pressure_ms, self.rate_ms, self.hold_ms, self.open_ms, self.forget_ms)
        if min(*times, self.trust_ms, self.gain, self.swing) <= 0:
            raise ConfigError("the gain, the swing and all times of a policy must be positive")
        if not all(0 < part <= 1 for part in (self.min_gain, self.distrust, self.min_trust)):
            raise ConfigError("min_gain, distrust and min_trust must be above 0, and 1 at most")
        if not 0 <= self.floor <= 0.05:
            raise ConfigError(f"the floor must be a share from 0 to 0.05, not {self.floor}")
        if not 0 <= self.fair_from < self.release_at < self.hold_at <= 255:
            raise ConfigError("need fair_from < release_at < hold_at <= 255")
        if self.max_hold_ms < self.hold_ms:
            raise ConfigError("need hold_ms <= max_hold_ms")


@dataclass(frozen=True, slots=True)
class PathInput:
    """What is known about one path of a flow. None is unknown."""

    congestion: float | None = None
    """From telemetry, 0 to 255."""
    age_ns: int = 0
    """How old `congestion` is."""
    local: float | None = None
    """The pressure of the host's own NIC, 0 to 255."""
    rate: float | None = None
    """Bytes a second that the flow gets there while it is busy."""
    shared: Hashable = None
    """The resource that this path shares with paths of other flows, if any."""
    depth_bytes: int = 0
    """What waits in the queue that `congestion` is about; 0 is empty or unknown."""


@dataclass(frozen=True, slots=True)
class FlowInput:
    """What is known about one flow. `fixed` are shares that were set by hand: they are used unchanged."""

    flow: Hashable
    paths: tuple[PathInput, ...]
    fixed: tuple[float, ...] | None = None


@dataclass(frozen=True, slots=True)
class Decision:
    """The shares of a flow's paths, which paths are under backpressure, and the inputs."""

    flow: Hashable
    shares: tuple[float, ...]
    backpressure: tuple[bool, ...]
    pressures: tuple[float | None, ...] = ()
    rates: tuple[float | None, ...] = ()
    gain: float = 0.0
    is_fixed: bool = False

    @property
    def why(self) -> str:
        """The reasons, for people."""
        if self.is_fixed:
            return "fixed: " + _percents(self.shares)
        parts = [_percents(self.shares)]
        if all(self.backpressure):
            parts.append("every path is under backpressure: shares by rates alone, all flagged, slow down")
        elif any(self.backpressure):
            held = [str(path) for path, is_held in enumerate(self.backpressure) if is_held]
            parts.append(f"path {' and '.join(held)} held by backpressure")
        known = [f"{rate * 8e-6:.0f}" if rate is not None else "?" for rate in self.rates]
        parts.append(f"rates {' : '.join(known)} Mbit/s" if any(self.rates) else "no rates known, taken as equal")
        seen = [f"{pressure:.0f}" if pressure is not None else "unknown" for pressure in self.pressures]
        parts.append(f"pressure {' : '.join(seen)} of 255 at gain {self.gain:.2f}")
        return "; ".join(parts)


@dataclass(slots=True)
class _Path:
    pressure: float | None = None
    rate: float | None = None
    is_held: bool = False
    clear_since_ns: int | None = None
    silent_since_ns: int | None = None
    hold_ms: float = 0.0
    released_ns: int | None = None
    trust: float = 1.0
    """The factor on its weight that repeated holds have left."""
    shared: Hashable = None


@dataclass(slots=True)
class _Flow:
    paths: list[_Path]
    at_ns: int
    age_ms: float = 0.0
    gain_factor: float = 1.0
    """The factor on the gain that swings have left."""
    turning_share: float | None = None
    """The first path's share where it last changed direction, or the extreme since."""
    direction: int = 0
    swings: list[int] = field(default_factory=list)


@dataclass(slots=True)
class _SharedResource:
    """The paths that share a resource. Their mean rate and lowest pressure are cached for a moment: a NIC may have
    thousands of flows, and each of them uses these values."""

    paths: dict[tuple[Hashable, int], _Path] = field(default_factory=dict)
    at_ns: int | None = None
    rate: float | None = None
    pressure: float = 0.0

    def update(self, now_ns: int) -> None:
        known = [path.rate for path in self.paths.values() if path.rate is not None]
        self.rate = sum(known) / len(known) if known else None
        self.pressure = min(path.pressure or 0.0 for path in self.paths.values())
        self.at_ns = now_ns


class Policy:
    """Holds the smoothed inputs and the holds of each flow; `step` decides."""

    def __init__(self, settings: PolicySettings | None = None) -> None:
        self._settings = settings or PolicySettings()
        self._flows: dict[Hashable, _Flow] = {}
        self._shared: dict[Hashable, _SharedResource] = {}

    def step(self, now_ns: int, inputs: Iterable[FlowInput]) -> list[Decision]:
        """A decision for each named flow, in the same order. Time must not go back."""
        inputs = list(inputs)
        # All inputs are stored before the first decision: flows that share a resource see each other's inputs.
        for one in inputs:
            if one.fixed is None:
                self._update_inputs(now_ns, one)
        return [self._fixed(one) if one.fixed is not None else self._decide(now_ns, one) for one in inputs]

    def forget(self, flow: Hashable) -> None:
        """The flow has ended. No effect for an unknown flow."""
        known = self._flows.pop(flow, None)
        for number, path in enumerate(known.paths if known else ()):
            self._leave_shared(flow, number, path)

    # Inputs

    def _update_inputs(self, now_ns: int, one: FlowInput) -> None:
        known = self._flows.get(one.flow)
        if known is None or len(known.paths) != len(one.paths):
            if len(one.paths) < 1:
                raise ValueError(f"flow {one.flow!r} has no paths")
            self.forget(one.flow)
            known = self._flows[one.flow] = _Flow([_Path() for _ in one.paths], now_ns)
        elapsed_ms = max(0, now_ns - known.at_ns) / 1e6
        known.at_ns = now_ns
        ages = [path.age_ns for path in one.paths if path.congestion is not None]
        # The oldest counts: the difference of two pressures is as old as the older one. And its recent peak counts:
        # between two reports the age grows and falls, and the gain must not.
        faded = known.age_ms * math.exp(-elapsed_ms / _AGE_DECAY_MS)
        known.age_ms = max(max(ages, default=0) / 1e6, faded)
        blend = 1 - math.exp(-elapsed_ms / max(self._settings.pressure_ms, known.age_ms / 2))
        rate_blend = 1 - math.exp(-elapsed_ms / self._settings.rate_ms)
        for number, (path, news) in enumerate(zip(known.paths, one.paths, strict=True)):
            # A rate stays while it is not measured: the capacity of an unused path does not change.
            if news.rate is not None and news.rate > 0:
                path.rate = _smoothed(path.rate, news.rate, rate_blend)
            congestion = _max_known(news.congestion, _depth_pressure(news.depth_bytes, path.rate))
            path.pressure = _smoothed(path.pressure, _max_known(congestion, news.local), blend)
            if news.shared != path.shared:
                self._leave_shared(one.flow, number, path)
                path.shared = news.shared
                if news.shared is not None:
                    resource = self._shared.setdefault(news.shared, _SharedResource())
                    resource.paths[one.flow, number], resource.at_ns = path, None
            path.trust = _recover(path.trust, elapsed_ms / self._settings.trust_ms)
            self._update_hold(now_ns, path, news.congestion)
        known.gain_factor = _recover(known.gain_factor, elapsed_ms / _GAIN_RECOVERY_MS)

    def _leave_shared(self, flow: Hashable, number: int, path: _Path) -> None:
        resource = self._shared.get(path.shared)
        if resource is not None:
            resource.paths.pop((flow, number), None)
            resource.at_ns = None
            if not resource.paths:
                del self._shared[path.shared]

    def _update_hold(self, now_ns: int, path: _Path, congestion: float | None) -> None:
        """Hold or release a path, depending on the congestion that the network reports."""
        settings = self._settings
        if congestion is not None and congestion >= settings.hold_at:
            if not path.is_held:
                is_again = path.released_ns is not None and now_ns - path.released_ns < 10e6 * path.hold_ms
                path.hold_ms = min(settings.max_hold_ms, 2 * path.hold_ms) if is_again else settings.hold_ms
                if path.released_ns is not None:
                    path.trust = max(settings.min_trust, path.trust * settings.distrust)
            path.is_held, path.clear_since_ns, path.silent_since_ns = True, None, None
            return
        if not path.is_held:
            return
        if congestion is None:
            path.clear_since_ns = None
            if path.silent_since_ns is None:
                path.silent_since_ns = now_ns
            is_over = now_ns - path.silent_since_ns >= settings.forget_ms * 1e6
        else:
            path.silent_since_ns = None
            if congestion > settings.release_at:
                path.clear_since_ns = None
            elif path.clear_since_ns is None:
                path.clear_since_ns = now_ns
            is_over = path.clear_since_ns is not None and now_ns - path.clear_since_ns >= path.hold_ms * 1e6
        if is_over:
            path.is_held, path.released_ns = False, now_ns

    # Decisions

    def _decide(self, now_ns: int, one: FlowInput) -> Decision:
        known, settings = self._flows[one.flow], self._settings
        held = tuple(path.is_held for path in known.paths)
        is_all_held = all(held)
        gain = settings.gain * known.gain_factor / (1 + known.age_ms / settings.age_scale_ms)
        pressures = _fill_unknown([path.pressure for path in known.paths], ceiling=MAX_PRESUMED_PRESSURE)
        rates = _fill_unknown([self._fair_rate(now_ns, path) for path in known.paths], otherwise=1.0)
        weights = [
            rate
            if is_all_held
            else 0.0
            if path.is_held
            else rate * math.exp(-gain * pressure / _MAX_PRESSURE) * path.trust * self._opening(now_ns, path)
            for path, rate, pressure in zip(known.paths, rates, pressures, strict=True)
        ]
        is_open = [is_all_held or not is_held for is_held in held]
        shares = _apply_floor(weights, is_open, settings.floor)
        if not any(held):
            self._detect_swings(now_ns, known, shares[0])
        return Decision(
            one.flow,
            shares,
            held,
            tuple(path.pressure for path in known.paths),
            tuple(path.rate for path in known.paths),
            gain,
        )

    def _fixed(self, one: FlowInput) -> Decision:
        assert one.fixed is not None
        if len(one.fixed) != len(one.paths) or min(one.fixed) < 0 or abs(sum(one.fixed) - 1) > 1e-3:
            raise ValueError(f"flow {one.flow!r}: {one.fixed} are not the shares of {len(one.paths)} paths")
        return Decision(one.flow, one.fixed, (False,) * len(one.paths), is_fixed=True)

    def _opening(self, now_ns: int, path: _Path) -> float:
        """From 0 to 1, over `open_ms` after the path was released."""
        if path.released_ns is None:
            return 1.0
        return min(1.0, (now_ns - path.released_ns) / (self._settings.open_ms * 1e6))

    def _fair_rate(self, now_ns: int, path: _Path) -> float | None:
        """The path's own rate, or the mean over its shared resource, or a mix of both: the more congested, the more
        mean."""
        resource = self._shared.get(path.shared) if path.shared is not None else None
        if resource is None or len(resource.paths) < 2:
            return path.rate
        if resource.at_ns is None or now_ns - resource.at_ns >= min(
            _MAX_SHARED_AGE_NS, len(resource.paths) * _SHARED_AGE_NS_PER_PATH
        ):
            resource.update(now_ns)
        settings = self._settings
        span = settings.release_at - settings.fair_from
        fairness = min(1.0, max(0.0, (resource.pressure - settings.fair_from) / span))
        if resource.rate is None or not fairness:
            return path.rate
        return resource.rate if path.rate is None else path.rate + fairness * (resource.rate - path.rate)

    def _detect_swings(self, now_ns: int, known: _Flow, share: float) -> None:
        """Detect swings: a share that changed direction after a large move. Two within a second halve the gain."""
        if known.turning_share is None:
            known.turning_share = share
            return
        away = share - known.turning_share
        if known.direction == 0:
            known.direction = (away > self._settings.swing) - (away < -self._settings.swing)
            if known.direction:
                known.turning_share = share
        elif away * known.direction > 0:
            known.turning_share = share  # further in the same direction
        elif abs(away) > self._settings.swing:
            known.turning_share, known.direction = share, -known.direction
            known.swings = [at for at in known.swings if now_ns - at < 1_000_000_000] + [now_ns]
            if len(known.swings) >= 2:
                known.gain_factor = max(self._settings.min_gain, known.gain_factor / 2)
                known.swings.clear()


def _depth_pressure(depth_bytes: int, rate: float | None) -> float | None:
    """The pressure of so many bytes in a queue: full is what the flow's rate there takes FULL_QUEUE_S to drain.

    A large buffer is a long wait before it is full, and its congestion does not show that.
    """
    if not depth_bytes or not rate:
        return None
    return FULL_QUEUE * min(1.0, depth_bytes / (rate * FULL_QUEUE_S))


def _max_known(one: float | None, other: float | None) -> float | None:
    """The maximum of the known values."""
    if one is None or other is None:
        return other if one is None else one
    return max(one, other)


def _smoothed(old: float | None, new: float | None, blend: float) -> float | None:
    """An EWMA that begins with its first value, and is unknown when its input is."""
    if old is None or new is None:
        return new
    return old + blend * (new - old)


def _recover(part: float, times: float) -> float:
    """Let a lowered factor grow e-fold each time, to 1 at most. The gap may be hours, if the agent was stopped."""
    return 1.0 if times >= -math.log(part) else part * math.exp(times)


def _fill_unknown(values: Sequence[float | None], *, ceiling: float = math.inf, otherwise: float = 0.0) -> list[float]:
    """Replace unknown values by the mean of the known ones, at most `ceiling`; all unknown: by `otherwise`."""
    known = [value for value in values if value is not None]
    stand_in = min(ceiling, sum(known) / len(known)) if known else otherwise
    return [stand_in if value is None else value for value in values]


def _apply_floor(weights: Sequence[float], is_open: Sequence[bool], floor: float) -> tuple[float, ...]:
    """Shares in proportion to the weights; open paths get at least the floor, at the cost of the others."""
    floor = min(floor, 1 / (2 * len(weights)))
    low = {path for path, can in enumerate(is_open) if can and weights[path] <= 0}
    while True:
        rest = sum(weight for path, weight in enumerate(weights) if path not in low)
        left = 1 - floor * len(low)
        if rest <= 0:  # no path has weight: all open paths get the same share
            low = {path for path, can in enumerate(is_open) if can}
            return tuple(1 / len(low) if path in low else 0.0 for path in range(len(weights)))
        below = {
            path for path, can in enumerate(is_open) if can and path not in low and weights[path] / rest * left < floor
        }
        if not below:
            return tuple(floor if path in low else weight / rest * left for path, weight in enumerate(weights))
        low |= below


def _percents(shares: Sequence[float]) -> str:
    return " : ".join(f"{share * 100:.1f}" for share in shares) + " %"
