"""Simulated networks: windows of exchanges whose truth is known, for tests and for comparing estimators and filters.

A *delay model* gives the delay of each packet beyond the minimum of the path, and the errors of its timestamps. All
random numbers come from the caller's generator, so a seed determines a window. The minimum delay is the same in both
directions: a constant asymmetry is invisible to any estimator and would only shift all of them alike.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from ringfold.probe.exchanges import BACKWARD_KEPT, FORWARD_KEPT, EdgeWindow

Floats = npt.NDArray[np.float64]
Delay = Callable[[np.random.Generator, int], Floats]

GAP_NS, TURN_NS = 800_000, 20_000
"""Between the packets of a pair; the time that the responder takes."""


@dataclass(frozen=True, slots=True)
class Model:
    """The delays of packets: `forward` and `backward` draw nanoseconds beyond `shortest_ns`."""

    name: str
    forward: Delay
    backward: Delay
    shortest_ns: float = 10_000.0
    noise_ns: float = 0.0
    """Standard deviation of a timestamp's error; every difference of two timestamps gets one such error."""
    early_share: float = 0.0
    early_ns: float = 0.0
    """Some points are too early by this much: a late timestamp at the sender or an early one at the receiver."""
    pairs: int = 1_000
    """The default number of pairs."""

    @property
    def stamps_are_right(self) -> bool:
        """Whether no packet seems to arrive before it was sent: then the certified bound must hold."""
        return self.early_share == 0.0


def _exponential(mean_ns: float) -> Delay:
    return lambda rng, count: rng.exponential(mean_ns, count)


def _mixed(share: float, spread_ns: float, queue_ns: float) -> Delay:
    """`share` of the packets at the minimum, normally distributed; the others wait in a queue."""

    def draw(rng: np.random.Generator, count: int) -> Floats:
        at_floor = rng.random(count) < share
        return np.where(at_floor, rng.normal(0.0, spread_ns, count), rng.exponential(queue_ns, count))

    return draw


def _pareto(shape: float, scale_ns: float) -> Delay:
    return lambda rng, count: scale_ns * rng.pareto(shape, count)


def _busy(share: float, low_ns: float, high_ns: float, jitter_ns: float) -> Delay:
    """`share` of the packets find the link busy with a large packet and wait for a part of it."""

    def draw(rng: np.random.Generator, count: int) -> Floats:
        waits = rng.random(count) < share
        return rng.exponential(jitter_ns, count) + np.where(waits, rng.uniform(low_ns, high_ns, count), 0.0)

    return draw


def _preempted(typical_ns: float, share: float, stall_ns: float) -> Delay:
    """A loopback: a narrow distribution, and sometimes another process has the core."""

    def draw(rng: np.random.Generator, count: int) -> Floats:
        stalled = rng.random(count) < share
        return rng.gamma(2.0, typical_ns / 2.0, count) + np.where(stalled, rng.exponential(stall_ns, count), 0.0)

    return draw


def _congested(begin: float, end: float, queue_ns: float, quiet: Delay) -> Delay:
    """Congestion in one interval of the window (0 to 1): nearly every packet in it waits."""

    def draw(rng: np.random.Generator, count: int) -> Floats:
        place = np.linspace(0.0, 1.0, count)
        queue = rng.gamma(3.0, queue_ns / 3.0, count)
        return quiet(rng, count) + np.where((begin < place) & (place < end), queue, 0.0)

    return draw


_QUICK = _exponential(5_000.0)
_SLOW = _exponential(50_000.0)
_SHORT = _exponential(2_000.0)
_FLOOR = _mixed(0.5, 300.0, 50_000.0)
_TAIL = _pareto(1.5, 5_000.0)
_LOCAL = _preempted(150.0, 0.02, 100_000.0)
_OFTEN_BUSY, _SELDOM_BUSY = (_busy(share, 1_000.0, 120_000.0, 300.0) for share in (0.8, 0.1))
_OFTEN_QUEUED, _SELDOM_QUEUED = (_mixed(share, 300.0, 50_000.0) for share in (0.2, 0.8))

MODELS = {
    model.name: model
    for model in (
        Model("exponential", _QUICK, _QUICK),
        Model("noisy", _QUICK, _QUICK, noise_ns=200.0),
        Model("mixed", _FLOOR, _FLOOR),
        Model("mixed-early", _FLOOR, _FLOOR, early_share=0.005, early_ns=3_000.0),
        Model("pareto", _TAIL, _TAIL, noise_ns=50.0),
        Model("busy-forward", _OFTEN_BUSY, _SELDOM_BUSY, noise_ns=50.0),
        Model("asymmetric", _SLOW, _QUICK),
        Model("asymmetric-noisy", _SLOW, _QUICK, noise_ns=200.0),
        Model("asymmetric-mixed", _OFTEN_QUEUED, _SELDOM_QUEUED),
        Model("congested", _congested(0.2, 0.8, 80_000.0, _SHORT), _SHORT, noise_ns=50.0),
        Model("congested-end", _congested(0.4, 1.0, 80_000.0, _SHORT), _SHORT, noise_ns=50.0),
        Model("sparse", _QUICK, _QUICK, pairs=30),
        Model("sparse-noisy", _QUICK, _QUICK, noise_ns=200.0, pairs=30),
        Model("loopback", _LOCAL, _LOCAL, shortest_ns=450.0, noise_ns=15.0),
    )
}
"""The first four are simple; the others are like real networks, or have few packets."""


@dataclass(frozen=True, slots=True)
class Sample:
    """A window, and the truth that it was made from."""

    window: EdgeWindow
    alpha: float
    offset_ns: int
    origin_ns: int

    def truth(self, at_ns: int) -> float:
        """C_dst - C_src at `at_ns` of the source's clock, minus `offset_ns`: small, so that a float holds it."""
        return self.alpha * (at_ns - self.origin_ns)


def window(
    model: Model,
    rng: np.random.Generator,
    pairs: int = 0,
    window_ns: int = 4_000_000_000,
    alpha: float = 20e-6,
    offset_ns: int = 50_000_000,
    origin_ns: int = 10**13,
) -> Sample:
    """Draw a window that begins at `origin_ns`, where C_dst - C_src is `offset_ns`; `pairs` 0 means the model's own.

    Exchanges are spread over the window with a little jitter, nothing is lost and nothing filtered.
    """
    count = pairs or model.pairs
    spacing = window_ns / count
    starts = (np.arange(count) + rng.uniform(0.0, 0.2, count)) * spacing
    columns = np.empty((count, 8), np.int64)
    for first, begin in ((0, starts), (2, starts + GAP_NS)):
        columns[:, first], columns[:, first + 1] = _packet(model, rng, model.forward, begin, alpha)
    for first, begin in ((4, starts + TURN_NS), (6, starts + GAP_NS + TURN_NS)):
        sent = begin + 2 * model.shortest_ns
        arrived, left = _packet(model, rng, model.backward, sent, alpha, back=True)
        columns[:, first], columns[:, first + 1] = left, arrived
    columns += origin_ns
    columns[:, [1, 3, 4, 6]] += offset_ns
    return Sample(
        EdgeWindow(
            src=1,
            dst=2,
            begin_ns=origin_ns,
            end_ns=origin_ns + window_ns,
            exchanges=columns,
            kept=np.full(count, FORWARD_KEPT | BACKWARD_KEPT, np.uint8),
            sent=count,
            lost=0,
            duplicates=0,
            filtered=0,
            threshold_ns=160_000,
            stamps="kernel",
        ),
        alpha,
        offset_ns,
        origin_ns,
    )


def _packet(
    model: Model, rng: np.random.Generator, delay: Delay, begin: Floats, alpha: float, *, back: bool = False
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """The times of packets at the source and at the destination, each by its own clock; `begin` by the source's."""
    count = len(begin)
    took = model.shortest_ns + delay(rng, count) + rng.normal(0.0, model.noise_ns, count)
    took = took - model.early_ns * (rng.random(count) < model.early_share)
    here, there = (begin + took, begin) if back else (begin, begin + took)
    there = there * (1.0 + alpha)
    return np.rint(here).astype(np.int64), np.rint(there).astype(np.int64)


@dataclass(frozen=True, slots=True, kw_only=True)
class Course:
    """How the clocks and the link of an edge change over successive windows."""

    windows: int = 24
    window_ns: int = 4_000_000_000
    wander: float = 0.0
    """The random walk of the skew, per root of a second; within a window it is constant."""
    loss: float = 0.0
    """The share of exchanges that are lost."""
    step_at: int = -1
    step_ns: int = 0
    """At the beginning of this window a clock steps by so much; -1: it never does."""
    delay_at: int = -1
    forward_ns: int = 0
    backward_ns: int = 0
    """From this window on, the shortest delay of each direction is longer by so much; -1: never."""


@dataclass(frozen=True, slots=True)
class CourseWindow:
    """A window of a course. `asymmetry_ns` is half the difference of the shortest delays: no estimator can see it."""

    sample: Sample
    asymmetry_ns: float


def follow(model: Model, rng: np.random.Generator, course: Course, pairs: int = 0) -> Iterator[CourseWindow]:
    """Draw the windows of a course, one after another without a pause."""
    offset_ns, origin_ns, alpha = 50_000_000, 10**13, 20e-6
    window_s = course.window_ns / 1e9
    for number in range(course.windows):
        if number == course.step_at:
            offset_ns += course.step_ns
        sample = window(model, rng, pairs, course.window_ns, alpha, offset_ns, origin_ns)
        asymmetry_ns = 0.0
        if course.delay_at >= 0 and number >= course.delay_at:
            sample.window.exchanges[:, [1, 3]] += course.forward_ns
            sample.window.exchanges[:, [5, 7]] += course.backward_ns
            asymmetry_ns = (course.forward_ns - course.backward_ns) / 2
        if course.loss:
            kept = rng.random(len(sample.window.exchanges)) >= course.loss
            left = replace(
                sample.window,
                exchanges=sample.window.exchanges[kept],
                kept=sample.window.kept[kept],
                lost=int(np.count_nonzero(~kept)),
            )
            sample = replace(sample, window=left)
        yield CourseWindow(sample, asymmetry_ns)
        offset_ns += round(alpha * course.window_ns)
        origin_ns += course.window_ns
        alpha += course.wander * float(np.sqrt(window_s)) * float(rng.standard_normal())
