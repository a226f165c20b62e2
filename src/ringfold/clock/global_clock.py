"""The global clock of one node: the time that all nodes share, with a bound on its error.

`ClockModel` is the mathematics, and pure: readings of the node's own clock are arguments. `GlobalClock` is what users
have as `run.clock`.

Every round gives a *mapping* from the node's clock to global time, with a bound (`NodeClock`). There are two queries:

- *The time now* (`read`). The newest mapping determines it, but not at once: it differs from the one before by the
  errors of both, and a clock that is read continuously must not jump. So a reading starts at the old mapping, and
  approaches the new one by no more than `max_slew`: 500 ppm closes 2 us in 4 ms. It never goes back. As readings are
  whole nanoseconds, two that are one nanosecond apart may be equal.
- *The time of a past instant* (`to_global`). Here all mappings are known. Between the instants of two rounds they are
  interpolated. Mappings of all nodes are made for the same instants, so all nodes interpolate alike, and what holds for
  the mappings holds for the interpolation. No slewing: this is more exact, and the one to use for traces.

Bounds are relative to the reference (see docs/concepts/graph-calculation.md): global time is what the reference's
mapping makes of its clock at the same instant. They grow with the distance from a round's instant, so also when rounds
stop. The bound of a reading extends from the new mapping's bound to the reading itself, so it contains the truth during
the slew.

The whole state is one immutable value that is replaced at once: any thread may read while one adopts.
"""

import math
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass

from ringfold.errors import ClockNotReady, ConfigError
from ringfold.wire.probing import NodeClock


@dataclass(frozen=True, slots=True)
class Instant:
    """An instant in global time, in nanoseconds that read like Unix time; the truth is in earliest..latest."""

    ns: int
    earliest: int
    latest: int

    @property
    def error_ns(self) -> int:
        """The largest possible error of `ns`."""
        return max(self.ns - self.earliest, self.latest - self.ns)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClockSettings:
    """How a clock follows the rounds."""

    max_slew: float = 5e-4
    """How much faster or slower it may run to close a difference."""
    rounds: int = 1_024
    """How many are kept: more than an hour of 4 s windows."""
    lead_ns: int = 1_000_000
    """A new mapping takes effect this much later, so that threads that read at that time all use the same one."""

    def __post_init__(self) -> None:
        if not 0 < self.max_slew < 0.1:
            raise ConfigError("max_slew must lie between 0 and 0.1")
        if self.rounds < 2 or self.lead_ns < 0:
            raise ConfigError("need rounds >= 2 and lead_ns >= 0")


@dataclass(frozen=True, slots=True)
class _Slew:
    """From `begin_ns` of the node's clock on, readings approach `clock`; at that time they were `ahead` of it."""

    begin_ns: int
    clock: NodeClock
    ahead: float
    before: "_Slew | None"

    def at(self, c_ns: int, max_slew: float) -> tuple[int, float]:
        """The reading: whole nanoseconds, and a fraction to add before rounding."""
        left = max(abs(self.ahead) - max_slew * max(c_ns - self.begin_ns, 0), 0.0)
        whole, fraction = _mapped(self.clock, c_ns)
        return whole, fraction + math.copysign(left, self.ahead)


@dataclass(frozen=True, slots=True)
class _State:
    slew: _Slew
    rounds: tuple[NodeClock, ...]
    """By their t0, ascending."""


_MAX_SLEWS = 4
"""How many slews are kept for readings of a slightly older time."""


class ClockModel:
    """The global clock as one node sees it. One thread adopts; any may read."""

    def __init__(self, settings: ClockSettings | None = None) -> None:
        self.settings = settings or ClockSettings()
        self._state: _State | None = None

    @property
    def newest(self) -> NodeClock | None:
        """The mapping of the newest round; None before the first."""
        return self._state.rounds[-1] if self._state else None

    def adopt(self, clock: NodeClock, at_ns: int) -> bool:
        """Follow this round's mapping from now on; `at_ns` is what the node's clock reads now.

        False, without any change, if it is not newer than the present one, or in the future: a mapping in the future
        would block all that follow.
        """
        state = self._state
        if clock.t0_ns > at_ns or not all(map(math.isfinite, (clock.rate, clock.growth))):
            return False
        if state is None:
            self._state = _State(_Slew(at_ns, clock, 0.0, None), (clock,))
            return True
        if clock.t0_ns <= state.rounds[-1].t0_ns:
            return False
        begin_ns = max(at_ns + self.settings.lead_ns, state.slew.begin_ns)
        whole, fraction = state.slew.at(begin_ns, self.settings.max_slew)
        new_whole, new_small = _mapped(clock, begin_ns)
        slew = _Slew(
            begin_ns, clock, (whole - new_whole) + (fraction - new_small), _truncated(state.slew, _MAX_SLEWS - 1)
        )
        self._state = _State(slew, (*state.rounds, clock)[-self.settings.rounds :])
        return True

    def read(self, c_ns: int) -> Instant:
        """Global time when the node's clock reads `c_ns`, for a reading of about now. Never goes back, never jumps.

        A later `c_ns` never gives an earlier time, and one that is two nanoseconds later gives a later time.
        """
        slew = self._ready().slew
        while c_ns < slew.begin_ns and slew.before is not None:
            slew = slew.before
        whole, fraction = slew.at(c_ns, self.settings.max_slew)
        ns = whole + round(fraction)
        true = _at(slew.clock, c_ns)
        return Instant(ns, min(true.earliest, ns), max(true.latest, ns))

    def to_global(self, c_ns: int) -> Instant:
        """Global time when the node's clock read `c_ns`, by the rounds before and after it, without slewing."""
        rounds = self._ready().rounds
        after = bisect_right(rounds, c_ns, key=lambda clock: clock.t0_ns)
        if after == 0:
            return _at(rounds[0], c_ns)
        if after == len(rounds):
            return _at(rounds[-1], c_ns)
        return _interpolated(rounds[after - 1], rounds[after], c_ns)

    def _ready(self) -> _State:
        if self._state is None:
            raise ClockNotReady()
        return self._state


def _mapped(clock: NodeClock, c_ns: int) -> tuple[int, float]:
    """G(c) as whole nanoseconds and a fraction fraction: a float alone would lose hundreds of nanoseconds."""
    since = c_ns - clock.t0_ns
    return clock.global_ns + since, clock.rate * since


def _bound(clock: NodeClock, c_ns: int) -> tuple[float, float]:
    grown = clock.growth * abs(c_ns - clock.t0_ns)
    return clock.low_ns - grown, clock.high_ns + grown


def _at(clock: NodeClock, c_ns: int) -> Instant:
    whole, fraction = _mapped(clock, c_ns)
    low, high = _bound(clock, c_ns)
    return _instant(whole, fraction, low, high)


def _interpolated(old: NodeClock, new: NodeClock, c_ns: int) -> Instant:
    share = (c_ns - old.t0_ns) / (new.t0_ns - old.t0_ns)
    whole, fraction = _mapped(old, c_ns)
    new_whole, new_small = _mapped(new, c_ns)
    fraction += share * ((new_whole - whole) + (new_small - fraction))
    (low, high), (new_low, new_high) = _bound(old, c_ns), _bound(new, c_ns)
    return _instant(whole, fraction, low + share * (new_low - low), high + share * (new_high - high))


def _instant(whole: int, fraction: float, low: float, high: float) -> Instant:
    """Rounded, the bounds outwards. They contain the reading, even where a mapping is known to be wrong."""
    ns = whole + round(fraction)
    return Instant(ns, min(whole + math.floor(fraction + low), ns), max(whole + math.ceil(fraction + high), ns))


def _truncated(slew: _Slew, length: int) -> _Slew | None:
    if length == 0:
        return None
    before = None if slew.before is None else _truncated(slew.before, length - 1)
    return _Slew(slew.begin_ns, slew.clock, slew.ahead, before)


class GlobalClock:
    """The time that all nodes of a run share, with its error: nanoseconds that read like Unix time.

    Probing updates it, and it is ready after the first round. Safe to use from any thread.
    """

    def __init__(self, model: ClockModel, read_ns: Callable[[], int]) -> None:
        """`read_ns` reads the node's own clock, the one that probing measures (CLOCK_MONOTONIC_RAW)."""
        self._model = model
        self._read_ns = read_ns

    @property
    def is_ready(self) -> bool:
        """Whether there has been a round; `now` and `to_global` raise `ClockNotReady` before."""
        return self._model.newest is not None

    def now(self) -> Instant:
        """The time now. It never goes back and never jumps: a correction is spread over some time.

        `earliest` and `latest` bound the truth, including the rest of a correction. They widen when rounds stop.
        """
        return self._model.read(self._read_ns())

    def to_global(self, ns: int) -> Instant:
        """The time at which the node's clock (CLOCK_MONOTONIC_RAW) read `ns`, by the rounds around it.

        More exact than `now` for the past, because the rounds after it are used too. The result for the same `ns` may
        change slightly with the next round, until two rounds enclose it.
        """
        return self._model.to_global(ns)

    @property
    def uncertainty_ns(self) -> int:
        """The largest possible error of `now()`."""
        return self.now().error_ns

    @property
    def newest(self) -> NodeClock | None:
        """The mapping of the newest round, as calculated; None before the first."""
        return self._model.newest

    def __repr__(self) -> str:
        if not self.is_ready:
            return "<GlobalClock: not ready, no round of probing yet>"
        return f"<GlobalClock: +-{self.uncertainty_ns} ns>"
