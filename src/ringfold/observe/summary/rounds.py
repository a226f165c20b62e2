"""Probing rounds and clocks, as tallies. Pure."""

from dataclasses import dataclass, field

from ringfold.observe.summary.results import ClockFigures, RoundFigures, Series, SeriesPoint
from ringfold.observe.summary.thinning import LogHistogram, ThinnedSeries
from ringfold.units import S
from ringfold.wire.events import ClockSampled
from ringfold.wire.probing import RoundSummary

MAX_CLOCK_POINTS = 300
_MIN_DRIFT_NS = 10 * S
"""Over less time, the errors of two samples are larger than the drift between them."""


@dataclass(slots=True)
class RoundTally:
    rounds: int = 0
    with_missing: int = 0
    anomalies: int = 0
    retries: int = 0
    nodes: LogHistogram = field(default_factory=LogHistogram)
    duration_ns: LogHistogram = field(default_factory=LogHistogram)
    stop_spread_ns: LogHistogram = field(default_factory=LogHistogram)
    control_latency_ns: LogHistogram = field(default_factory=LogHistogram)
    report_bytes: LogHistogram = field(default_factory=LogHistogram)
    uncertainty_ns: LogHistogram = field(default_factory=LogHistogram)

    def add(self, done: RoundSummary) -> None:
        self.rounds += 1
        self.with_missing += bool(done.missing)
        self.anomalies += bool(done.anomaly)
        self.retries += done.metrics.retries
        self.nodes.add(len(done.nodes))
        self.duration_ns.add(done.metrics.total_ns)
        self.stop_spread_ns.add(done.metrics.stop_spread_ns)
        for latency in done.metrics.control_latency_ns:
            self.control_latency_ns.add(latency)
        self.report_bytes.add(done.metrics.report_bytes)
        self.uncertainty_ns.add(int(max((node.sigma_ns for node in done.nodes), default=0.0)))

    def figures(self) -> RoundFigures | None:
        if not self.rounds:
            return None
        return RoundFigures(
            self.rounds,
            self.with_missing,
            self.anomalies,
            round(self.nodes.quantile(0.5)),
            _two(self.duration_ns, 1e6),
            _two(self.stop_spread_ns, 1e3),
            _two(self.control_latency_ns, 1e3),
            _two(self.report_bytes, 1.0),
            _two(self.uncertainty_ns, 1e3),
            self.retries,
        )


def _two(values: LogHistogram, unit: float) -> tuple[float, float]:
    return values.quantile(0.5) / unit, values.greatest / unit


@dataclass(slots=True)
class ClockTally:
    """The samples of one process that has the global clock."""

    process: str
    host: str
    samples: int = 0
    bounds_ns: LogHistogram = field(default_factory=LogHistogram)
    offsets: ThinnedSeries = field(default_factory=lambda: ThinnedSeries(MAX_CLOCK_POINTS))
    _first: tuple[int, int, int] = (0, 0, 0)
    _last: tuple[int, int, int] = (0, 0, 0)
    """Global, raw and wall."""

    def add(self, sample: ClockSampled, unix_ns: int) -> None:
        if sample.global_ns is None:
            return
        self._last = (sample.global_ns, sample.raw_ns, sample.wall_ns)
        if not self.samples:
            self._first = self._last
        self.samples += 1
        self.bounds_ns.add(sample.error_ns or 0)
        self.offsets.add(unix_ns, (sample.global_ns - sample.wall_ns) / 1e3)

    def figures(self, began_ns: int) -> ClockFigures:
        (first, first_raw, first_wall), (last, last_raw, last_wall) = self._first, self._last
        is_long = last - first >= _MIN_DRIFT_NS
        return ClockFigures(
            self.process,
            self.host,
            self.samples,
            (first - first_wall) / 1e3,
            (last - last_wall) / 1e3,
            ((last_raw - first_raw) / (last - first) - 1) * 1e6 if is_long else None,
            self.bounds_ns.quantile(0.5) / 1e3,
            self.bounds_ns.greatest / 1e3,
            series_of(self.process, self.offsets, began_ns),
        )


def series_of(name: str, values: ThinnedSeries, began_ns: int, not_finite: int = 0) -> Series:
    """With times since the run's begin."""
    points = [
        SeriesPoint(((bucket.first_ns + bucket.last_ns) / 2 - began_ns) / 1e9, bucket.mean, bucket.low, bucket.high)
        for bucket in values.buckets()
    ]
    return Series(name, values.added, points, not_finite)
