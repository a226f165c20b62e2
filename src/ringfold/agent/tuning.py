"""What an operator may set of an agent's decisions: how often, how strongly and how smoothly it follows congestion."""

from dataclasses import asdict, dataclass

from ringfold.agent.policy import PolicySettings
from ringfold.agent.telemetry import TelemetrySettings
from ringfold.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentTuning:
    """The settings `agent_*` that tune an agent. Raises ConfigError for values that contradict each other."""

    interval_ms: float = 1.0
    """Between two decisions about a pair, two reads of a busy interface, and two reports about it."""
    backpressure: int = 240
    """Congestion at which a path is disabled at once."""
    release: int = 160
    """Congestion at which a disabled path is used again, after a while."""
    gain: float = 2.0
    stale_ms: int = 1_000
    """A queue that was not reported for so long is unknown."""
    smoothing_ms: float = 4.0
    """Time constant of congestion."""
    rate_smoothing_ms: float = 100.0
    """Time constant of rates."""
    requests_per_hint: int = 1
    """How many requests of a flow share a read of its hint: advice to clients."""

    def __post_init__(self) -> None:
        if self.interval_ms <= 0 or self.requests_per_hint < 1:
            raise ConfigError("the interval of an agent must be positive, and at least 1 request shares a hint")
        if not self.release < self.backpressure:
            raise ConfigError(
                f"need agent_release < agent_backpressure, but they are {self.release} and {self.backpressure}"
            )
        self.policy(), self.telemetry()

    @property
    def interval_ns(self) -> int:
        return int(self.interval_ms * 1e6)

    def policy(self) -> PolicySettings:
        return PolicySettings(
            gain=self.gain,
            hold_at=self.backpressure,
            release_at=self.release,
            pressure_ms=self.smoothing_ms,
            rate_ms=self.rate_smoothing_ms,
        )

    def telemetry(self) -> TelemetrySettings:
        return TelemetrySettings(stale_after_ms=self.stale_ms)

    def shown(self) -> dict[str, float]:
        """All of it, for the status."""
        return asdict(self)
