"""From congestion and measured rates to the shares of each flow's paths. Pure.

How it is called, every poll interval or when something new is known:

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

A call may name any of the flows; those that it does not name stay as they were. `flow` is whatever the caller likes,
a slot for example, as long as it is forgotten before another flow gets the same.

**Words.** *Pressure* of a path, 0 to 255, is the higher one of what the network says (`congestion`) and what the own
NIC says (`local`). A path is *held* while it is under backpressure, and *opens* for a while afterwards.

**The law.** The weight of path i is

    weight_i = rate_i * exp(-gain * pressure_i / 255) * opening_i

and its share is its part of the sum of weights. Rates and pressures are smoothed (EWMA). So:

- equal pressure everywhere: shares are proportional to the measured rates. That is the fixed point; it is not 50/50.
- only differences count. The logarithm of the ratio of two shares moves in proportion to the difference of pressures: a
  proportional controller. The queue itself integrates: a path that gets more than it drains grows a queue until its
  share fits, so what is left in the end is no error of the share but a short queue.
- shares are positive, sum to 1, and never grow when the own pressure does.

**Why it does not oscillate.** A queue that is seen late and steered hard swings. Two things prevent it. The gain falls
with the age of what is known, by 1 / (1 + age / age_scale): what is 100 ms old is steered a tenth as hard as what is
fresh. And an age that nobody declares (a switch that stamps its packets late) shows as swings: after two swings of a
share by more than `swing` within a second the flow's gain is halved, and it comes back slowly when all is calm.

**Backpressure.** At `hold_at` (240) a path's share is zero at once, whatever the smoothed value; the floor does not
apply. Only the network holds a path. The own queue does not: full is the normal state of the queue of a sender that has
more to send, and pulling waits there anyway. A path is let go when its congestion has stayed at or below `release_at`
for the hold time, which doubles when it is held again soon after. Then it opens over `open_ms`, rather than taking its
whole share at once, and each time that it is held again it is trusted with less: a path that cannot bear its share ends
with one that it can, instead of going on and off for ever. If nothing is known of a held path any more it is let go
after `forget_ms`: whoever could have said "clear" is gone, and nothing waits for ever.

If *every* path is held, all flags are set and shares follow the rates alone: the bytes must go somewhere, no path is
better than the others, and senders see from the flags that slowing down is wanted.

**Unknown** is neither clear nor congested. A path of unknown pressure is presumed to be like the mean of the known
ones, but not worse than half-way (128): so it does not attract or repel while all is calm, and does take over from one
that is known to be bad. An unknown rate is presumed to be the mean of the known ones.

**Fairness.** Flows may name what their paths share (`shared`: a NIC, a port of a switch). As it becomes congested, the
rate that counts for each of its flows moves from what the flow got to the mean over all its flows: who came first has
no more of it than who came later. While it is not congested there is nothing to share out, and everybody goes by his
own measurement. How congested the shared thing itself is nobody says, but all of its flows feel it: the least pressure
among them is the most that it can have. So a flow whose far end is slow is not evened out with others of the same NIC.

**The floor.** A path that is not held keeps at least `floor`, so that it is still measured.
"""

import math
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field

from ringfold.errors import ConfigError

HALF_WAY = 128.0
_TOP = 255.0
_AGE_FADES_MS = 2_000.0
_CALM_MS = 5_000.0
_LOOK_NS, _MOST_LOOK_NS = 20_000, 100_000_000
"""How long a look at everything that shares one thing is good for: per path of it, and at most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicySettings:
    """How the policy steers. Times in milliseconds, pressures of 255, shares of 1."""

    gain: float = 2.0
    """How much of e's power a full difference of pressure is worth."""
    age_scale_ms: float = 10.0
    """What is this old is steered half as hard as what is fresh."""
    pressure_ms: float = 4.0
    """Time constant of pressure; half of the age if that is longer."""
    rate_ms: float = 100.0
    """Time constant of rates."""
    floor: float = 0.015
    hold_at: int = 240
    release_at: int = 160
    hold_ms: float = 20.0
    most_hold_ms: float = 2_000.0
    open_ms: float = 50.0
    forget_ms: float = 1_000.0
    fair_from: int = 32
    """The pressure of a shared thing at which its flows begin to be evened out; they are at `release_at`."""
    distrust: float = 0.7
    """What is left of a path's weight each time it is held again."""
    least_trust: float = 0.02
    trust_ms: float = 10_000.0
    """How long it takes until trust has grown e-fold again."""
    swing: float = 0.04
    least_gain: float = 0.03
    """How far swings may lower the gain, as a part of it."""

    def __post_init__(self) -> None:
        times = (self.age_scale_ms, self.pressure_ms, self.rate_ms, self.hold_ms, self.open_ms, self.forget_ms)
        if min(*times, self.trust_ms, self.gain, self.swing) <= 0:
            raise ConfigError("the gain, the swing and all times of a policy are positive")
        if not all(0 < part <= 1 for part in (self.least_gain, self.distrust, self.least_trust)):
            raise ConfigError("least_gain, distrust and least_trust are parts: above 0, and 1 at most")
        if not 0 <= self.floor <= 0.05:
            raise ConfigError(f"a floor is a share from 0 to 0.05, not {self.floor}")
        if not 0 <= self.fair_from < self.release_at < self.hold_at <= 255:
            raise ConfigError("need fair_from < release_at < hold_at <= 255")
        if self.most_hold_ms < self.hold_ms:
            raise ConfigError("need hold_ms <= most_hold_ms")


@dataclass(frozen=True, slots=True)
class PathInput:
    """What is known about one path of a flow now. None is unknown."""

    congestion: float | None = None
    """By telemetry, 0 to 255."""
    age_ns: int = 0
    """How old `congestion` is."""
    local: float | None = None
    """The own NIC's, 0 to 255."""
    rate: float | None = None
    """Bytes a second that the flow gets there while it is busy."""
    shared: Hashable = None
    """What this path shares with paths of other flows, if anything."""


@dataclass(frozen=True, slots=True)
class FlowInput:
    """What is known about one flow. `fixed` are shares that somebody has decided: they are kept as they are."""

    flow: Hashable
    paths: tuple[PathInput, ...]
    fixed: tuple[float, ...] | None = None


@dataclass(frozen=True, slots=True)
class Decision:
    """The shares of a flow's paths, which paths are under backpressure, and what that came from."""

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
    let_go_ns: int | None = None
    trust: float = 1.0
    """What being held again and again has left of its weight."""
    shared: Hashable = None


@dataclass(slots=True)
class _Flow:
    paths: list[_Path]
    at_ns: int
    age_ms: float = 0.0
    calm: float = 1.0
    """What swings have left of the gain."""
    turn: float | None = None
    """The first path's share where it last turned round, or the extreme since."""
    direction: int = 0
    swings: list[int] = field(default_factory=list)


@dataclass(slots=True)
class _Sharing:
    """The paths that share something. Their mean rate and least pressure are kept for a moment: a NIC may have
    thousands of flows, and each of them asks."""

    paths: dict[tuple[Hashable, int], _Path] = field(default_factory=dict)
    at_ns: int | None = None
    rate: float | None = None
    pressure: float = 0.0

    def look(self, now_ns: int) -> None:
        known = [path.rate for path in self.paths.values() if path.rate is not None]
        self.rate = sum(known) / len(known) if known else None
        self.pressure = min(path.pressure or 0.0 for path in self.paths.values())
        self.at_ns = now_ns


class Policy:
    """Holds what is smoothed and held, per flow; `step` decides."""

    def __init__(self, settings: PolicySettings | None = None) -> None:
        self._settings = settings or PolicySettings()
        self._flows: dict[Hashable, _Flow] = {}
        self._sharings: dict[Hashable, _Sharing] = {}

    def step(self, now_ns: int, inputs: Iterable[FlowInput]) -> list[Decision]:
        """A decision for each flow that is named, in the same order. Time does not go back."""
        inputs = list(inputs)
        # All are taken in before the first is decided: flows that share something see each other's news.
        for one in inputs:
            if one.fixed is None:
                self._take(now_ns, one)
        return [self._fixed(one) if one.fixed is not None else self._decide(now_ns, one) for one in inputs]

    def forget(self, flow: Hashable) -> None:
        """The flow has ended. Unknown flows are fine."""
        known = self._flows.pop(flow, None)
        for number, path in enumerate(known.paths if known else ()):
            self._leave(flow, number, path)

    # Taking in

    def _take(self, now_ns: int, one: FlowInput) -> None:
        known = self._flows.get(one.flow)
        if known is None or len(known.paths) != len(one.paths):
            if len(one.paths) < 1:
                raise ValueError(f"flow {one.flow!r} has no paths")
            self.forget(one.flow)
            known = self._flows[one.flow] = _Flow([_Path() for _ in one.paths], now_ns)
        elapsed_ms = max(0, now_ns - known.at_ns) / 1e6
        known.at_ns = now_ns
        ages = [path.age_ns for path in one.paths if path.congestion is not None]
        # The oldest: the difference of two pressures is as old as its older part. And its recent peak: between two
        # reports the age grows and falls, and the gain must not.
        faded = known.age_ms * math.exp(-elapsed_ms / _AGE_FADES_MS)
        known.age_ms = max(max(ages, default=0) / 1e6, faded)
        blend = 1 - math.exp(-elapsed_ms / max(self._settings.pressure_ms, known.age_ms / 2))
        rate_blend = 1 - math.exp(-elapsed_ms / self._settings.rate_ms)
        for number, (path, news) in enumerate(zip(known.paths, one.paths, strict=True)):
            path.pressure = _smoothed(path.pressure, _higher(news.congestion, news.local), blend)
            # A rate that is not measured now is not forgotten: a path that is quiet does not change.
            if news.rate is not None and news.rate > 0:
                path.rate = _smoothed(path.rate, news.rate, rate_blend)
            if news.shared != path.shared:
                self._leave(one.flow, number, path)
                path.shared = news.shared
                if news.shared is not None:
                    sharing = self._sharings.setdefault(news.shared, _Sharing())
                    sharing.paths[one.flow, number], sharing.at_ns = path, None
            path.trust = _regained(path.trust, elapsed_ms / self._settings.trust_ms)
            self._hold(now_ns, path, news.congestion)
        known.calm = _regained(known.calm, elapsed_ms / _CALM_MS)

    def _leave(self, flow: Hashable, number: int, path: _Path) -> None:
        sharing = self._sharings.get(path.shared)
        if sharing is not None:
            sharing.paths.pop((flow, number), None)
            sharing.at_ns = None
            if not sharing.paths:
                del self._sharings[path.shared]

    def _hold(self, now_ns: int, path: _Path, congestion: float | None) -> None:
        """Whether a path is under backpressure, by what the network says of it now."""
        settings = self._settings
        if congestion is not None and congestion >= settings.hold_at:
            if not path.is_held:
                is_again = path.let_go_ns is not None and now_ns - path.let_go_ns < 10e6 * path.hold_ms
                path.hold_ms = min(settings.most_hold_ms, 2 * path.hold_ms) if is_again else settings.hold_ms
                if path.let_go_ns is not None:
                    path.trust = max(settings.least_trust, path.trust * settings.distrust)
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
            path.is_held, path.let_go_ns = False, now_ns

    # Deciding

    def _decide(self, now_ns: int, one: FlowInput) -> Decision:
        known, settings = self._flows[one.flow], self._settings
        held = tuple(path.is_held for path in known.paths)
        is_all_held = all(held)
        gain = settings.gain * known.calm / (1 + known.age_ms / settings.age_scale_ms)
        pressures = _presumed([path.pressure for path in known.paths], ceiling=HALF_WAY)
        rates = _presumed([self._fair_rate(now_ns, path) for path in known.paths], otherwise=1.0)
        weights = [
            rate
            if is_all_held
            else 0.0
            if path.is_held
            else rate * math.exp(-gain * pressure / _TOP) * path.trust * self._opening(now_ns, path)
            for path, rate, pressure in zip(known.paths, rates, pressures, strict=True)
        ]
        is_open = [is_all_held or not is_held for is_held in held]
        shares = _floored(weights, is_open, settings.floor)
        if not any(held):
            self._watch(now_ns, known, shares[0])
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
            raise ValueError(f"flow {one.flow!r}: {one.fixed} are no shares of {len(one.paths)} paths")
        return Decision(one.flow, one.fixed, (False,) * len(one.paths), is_fixed=True)

    def _opening(self, now_ns: int, path: _Path) -> float:
        """From nothing to all, over a while after the path was let go."""
        if path.let_go_ns is None:
            return 1.0
        return min(1.0, (now_ns - path.let_go_ns) / (self._settings.open_ms * 1e6))

    def _fair_rate(self, now_ns: int, path: _Path) -> float | None:
        """The own rate, or the mean of those who share the path, or something between: as it is congested."""
        sharing = self._sharings.get(path.shared) if path.shared is not None else None
        if sharing is None or len(sharing.paths) < 2:
            return path.rate
        if sharing.at_ns is None or now_ns - sharing.at_ns >= min(_MOST_LOOK_NS, len(sharing.paths) * _LOOK_NS):
            sharing.look(now_ns)
        settings = self._settings
        span = settings.release_at - settings.fair_from
        evened = min(1.0, max(0.0, (sharing.pressure - settings.fair_from) / span))
        if sharing.rate is None or not evened:
            return path.rate
        return sharing.rate if path.rate is None else path.rate + evened * (sharing.rate - path.rate)

    def _watch(self, now_ns: int, known: _Flow, share: float) -> None:
        """Notice swings: a share that turned round after going far. Two within a second halve the gain."""
        if known.turn is None:
            known.turn = share
            return
        away = share - known.turn
        if known.direction == 0:
            known.direction = (away > self._settings.swing) - (away < -self._settings.swing)
            if known.direction:
                known.turn = share
        elif away * known.direction > 0:
            known.turn = share  # further the same way
        elif abs(away) > self._settings.swing:
            known.turn, known.direction = share, -known.direction
            known.swings = [at for at in known.swings if now_ns - at < 1_000_000_000] + [now_ns]
            if len(known.swings) >= 2:
                known.calm = max(self._settings.least_gain, known.calm / 2)
                known.swings.clear()


def _higher(one: float | None, other: float | None) -> float | None:
    """The higher one of those that are known."""
    if one is None or other is None:
        return other if one is None else one
    return max(one, other)


def _smoothed(old: float | None, new: float | None, blend: float) -> float | None:
    """An EWMA that begins with its first value, and ends with the knowledge."""
    if old is None or new is None:
        return new
    return old + blend * (new - old)


def _regained(part: float, times: float) -> float:
    """What was lowered grows e-fold each time, to 1 at most. The gap may be hours: an agent that was stopped."""
    return 1.0 if times >= -math.log(part) else part * math.exp(times)


def _presumed(values: Sequence[float | None], *, ceiling: float = math.inf, otherwise: float = 0.0) -> list[float]:
    """Unknown ones are taken as the mean of the known ones, at most `ceiling`; all unknown: `otherwise`."""
    known = [value for value in values if value is not None]
    stand_in = min(ceiling, sum(known) / len(known)) if known else otherwise
    return [stand_in if value is None else value for value in values]


def _floored(weights: Sequence[float], is_open: Sequence[bool], floor: float) -> tuple[float, ...]:
    """Parts of 1 in proportion to the weights; open ones get the floor at least, at the cost of the others."""
    floor = min(floor, 1 / (2 * len(weights)))
    low = {path for path, can in enumerate(is_open) if can and weights[path] <= 0}
    while True:
        rest = sum(weight for path, weight in enumerate(weights) if path not in low)
        left = 1 - floor * len(low)
        if rest <= 0:  # nothing has weight: all that are open get the same
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
