"""The settings of rounds: frozen, with the unit in the name, checked where they are made."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, get_args

from ringfold.errors import ConfigError
from ringfold.wire.probing import MAX_GAP_US, MAX_PAUSE_US, MIN_GAP_US, MIN_PAUSE_US, Cadence, RoundKind

Density = Literal["default", "dense"]
DENSITIES: Mapping[str, Cadence] = {"default": Cadence(), "dense": Cadence(pause_us=Cadence().gap_us)}
"""Presets. `dense`: 800 us between all probes, inside a pair and between pairs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Adaptive:
    """How the cadence adapts: slower when rounds are stable, faster when they are not (`calculation.py`).

    A round's instability is compared with two thresholds, and the range between them is the hysteresis: `calm_rounds`
    rounds in a row below `stable_ns` make the next one slower, a single one over `unstable_ns` makes it faster.
    """

    is_on: bool = True
    stable_ns: int = 200
    unstable_ns: int = 2_000
    calm_rounds: int = 3
    step: float = 1.5
    """By how much faster or slower."""
    pause_min_us: int = 1_500
    pause_max_us: int = 24_000
    window_min_ms: int = 1_000
    window_max_ms: int = 16_000
    gap_max_us: int = Cadence().gap_us
    """How far the spacing inside a pair may grow when probing gets slower; faster probing returns to the setting."""

    def __post_init__(self) -> None:
        if not 0 <= self.stable_ns < self.unstable_ns:
            raise ConfigError("need 0 <= stable_ns < unstable_ns: without a range between them the cadence oscillates")
        if self.calm_rounds < 1 or not self.step > 1:
            raise ConfigError(f"need calm_rounds >= 1 and step > 1, not {self.calm_rounds} and {self.step}")
        if not MIN_PAUSE_US <= self.pause_min_us <= self.pause_max_us <= MAX_PAUSE_US:
            raise ConfigError(f"need {MIN_PAUSE_US} <= pause_min_us <= pause_max_us <= {MAX_PAUSE_US}")
        if not MIN_GAP_US <= self.gap_max_us <= MAX_GAP_US:
            raise ConfigError(f"gap_max_us is from {MIN_GAP_US} to {MAX_GAP_US}, not {self.gap_max_us}")
        if not 0 < self.window_min_ms <= self.window_max_ms:
            raise ConfigError("need 0 < window_min_ms <= window_max_ms")


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundSettings:
    """How the rounds of a run work."""

    kind: RoundKind = "master"
    gap_us: int = Cadence().gap_us
    pause_us: int = Cadence().pause_us
    window_ms: int = Cadence().window_ms
    neighbours: int = 4
    """K: how many others a node probes."""
    seed: int = 0
    """Another seed draws another graph of the same nodes."""
    graph: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Neighbour lists by name: whom each node probes. Empty: the graph is drawn."""
    combine_windows: bool = True
    """Whether the lines of several windows of an edge are combined."""
    report_timeout_ms: int = 1_000
    """`master`: how long after ROUND_END reports count, at most."""
    report_floor_ms: int = 25
    """`master`: how long after ROUND_END reports count at least, however fast they usually are (`liveness.py`)."""
    max_missed: int = 3
    """A node that misses so many rounds in a row is out of the graph until it reports again."""
    time_margin_ms: int = 1_000
    """`time`: what is left of a window when the master stops waiting for reports."""
    gloo_timeout_ms: int = 30_000
    """`gloo`: the timeout of one collective."""
    gloo_interface: str = ""
    """`gloo`: the network interface, as in GLOO_SOCKET_IFNAME; empty: Gloo's own choice."""
    grace_ms: int = 1_000
    """What a node adds to the longest duration of a round before it goes on alone."""
    settle_ms: int = 100
    """How long the first window waits for other nodes that connect at the same time."""
    combine_after_ms: int = 20
    """How long after the next start a round is combined: nodes on the master's machine begin their windows first. With
    128 nodes on two cores that takes 10 ms; clocks that arrive a little later cost nothing."""
    anomaly_ns: int = 100_000
    """A residual over this is an anomaly: in an open window it ends the round early."""
    least_window_ms: int = 500
    """No round is ended earlier than this after it began."""
    alarm_rest_ms: int = 10_000
    """After a round that an anomaly ended, the next anomaly may do so only after this time."""
    adaptive: Adaptive = Adaptive()
    is_on: bool = True
    """Whether probing runs when the master starts, or waits for `ringfold probe start`."""

    def __post_init__(self) -> None:
        if self.kind not in get_args(RoundKind):
            raise ConfigError(f"rounds must be one of {', '.join(get_args(RoundKind))}, not {self.kind!r}")
        positive = ("window_ms", "neighbours", "report_timeout_ms", "gloo_timeout_ms", "report_floor_ms", "max_missed")
        for name in (*positive, "grace_ms", "anomaly_ns", "least_window_ms"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, not {getattr(self, name)}")
        limits = (("gap_us", MIN_GAP_US, MAX_GAP_US), ("pause_us", MIN_PAUSE_US, MAX_PAUSE_US))
        for name, low, high in limits:
            if not low <= getattr(self, name) <= high:
                raise ConfigError(f"{name} is from {low} to {high}, not {getattr(self, name)}")
        for name in ("settle_ms", "time_margin_ms", "alarm_rest_ms", "combine_after_ms"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name} must not be negative, but is {getattr(self, name)}")
        if self.report_floor_ms > self.report_timeout_ms:
            raise ConfigError(
                f"need report_floor_ms <= report_timeout_ms, not {self.report_floor_ms} and {self.report_timeout_ms}"
            )
        if self.kind == "time" and self.window_ms <= self.time_margin_ms:
            raise ConfigError(f"time rounds need window_ms > time_margin_ms, not {self.window_ms} ms")

    @property
    def cadence(self) -> Cadence:
        """The cadence that probing starts with."""
        return Cadence(self.gap_us, self.pause_us, self.window_ms)

    @property
    def longest_window_ms(self) -> int:
        """No window is longer, whatever the rounds advise."""
        return max(self.window_ms, self.adaptive.window_max_ms)

    def gather_ms(self, cadence: Cadence) -> int:
        """How long reports of a window of this cadence are awaited, at most."""
        match self.kind:
            case "time":
                return max(cadence.window_ms - self.time_margin_ms, cadence.window_ms // 2)
            case "gloo":
                return self.gloo_timeout_ms
            case _:
                return self.report_timeout_ms

    def deadline_ms(self, cadence: Cadence) -> int:
        """When a node that receives nothing after ROUND_START goes on alone; 0 where nothing has to follow."""
        if self.kind == "local":
            return 0
        return cadence.window_ms + self.gather_ms(cadence) + self.grace_ms
