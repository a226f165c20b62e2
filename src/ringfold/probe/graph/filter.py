"""The filter of edges: the lines of several windows combined into one, with a known error. Pure.

A window gives the offset of an edge at its middle, and the skew. The next window gives both again, and between the two
a clock has changed its rate a little. How little is not known: an oscillator in a still room wanders by 1e-9 in a
second, one beside a fan by a hundred times that. So a *bank* of Kalman filters runs for each edge. Each assumes another
wander of the rate (a random walk), predicts the new window from the former ones, and corrects itself by it. The
probability of a filter follows from how well it predicted, and is forgotten over some windows; the combined line is the
mean of the bank, and its variance includes that the filters differ. The filter with the largest wander hardly remembers
anything: if clocks are restless, the combined line is that of the window alone.

*What does not average out.* Errors of one estimator on one link are alike from window to window, because the shape of
the delays is. And where delays are asymmetric, windows with few pairs promise too much: within three of their own
standard errors lie as few as 59 % of them. So a window counts with twice its standard error (`caution`), and the
combined line never promises more than the window alone (`systematic`). With both, the truth is within STATED standard
errors in at least COVERAGE of all windows (`ringfold.testing.filtering`). A constant asymmetry of the link is not part
of it, as everywhere: that is what the certified bounds are for.

*Steps.* If a filter's prediction is off by more than `gate` allows, a clock has stepped, or the delay of one direction
has changed: it starts again from the window. The combined line must lie inside the certified corridor of the newest
window wherever the line of that window does; if not, the edge starts again. So no former window overrules a proof. An
edge that starts again keeps the caution in its standard error, or the graph would believe it more than those that hold.

*Repeats.* Where windows end by the nodes' own clocks, a round may have no new window of an edge, and the newest one is
in it again, with the same t0. It says nothing new: the bank stays as it is, and the combined line is the one it has.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from ringfold.errors import ConfigError
from ringfold.probe.graph.edges import EdgeName, Edges
from ringfold.probe.graph.tree import Floats, Ints

STATED, COVERAGE = 3.0, 0.95
"""The truth is within so many standard errors, in at least this share of all windows."""
MAX_AGE_NS = 300_000_000_000
"""An edge that was silent for longer starts again."""
MAX_ABSENT_ROUNDS = 64
MIN_PROBABILITY = 1e-3
MIN_SIGMA_NS = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class FilterSettings:
    """What the filters assume. The defaults are those that the head of this file is about."""

    wanders: tuple[float, ...] = (1e-9, 1e-8, 1e-7)
    """The random walk of a rate, per root of a second, that each filter of a bank assumes."""
    caution: float = 2.0
    """A window counts with so many times its own standard error."""
    systematic: float = 1.0
    """The share of a window's standard error that does not average out."""
    gate: float = 25.0
    """The squared error of a prediction, in units of its variance (two degrees of freedom): 4e-6 of normal errors."""
    forget: float = 0.9
    """The weight of a window in a filter's probability, one window later."""

    def __post_init__(self) -> None:
        if not self.wanders or min(self.wanders) <= 0 or self.caution <= 0 or self.systematic < 0:
            raise ConfigError("need wanders > 0, caution > 0 and systematic >= 0")
        if not (self.gate > 0 and 0 < self.forget <= 1):
            raise ConfigError("need gate > 0 and 0 < forget <= 1")


DEFAULTS = FilterSettings()


@dataclass(frozen=True, slots=True)
class EdgeFilters:
    """The banks of all edges: a row for each edge, a column for each filter. Start with `EdgeFilters()`."""

    names: tuple[EdgeName, ...] = ()
    t0: Ints = field(default_factory=lambda: np.empty(0, np.int64))
    beta: Ints = field(default_factory=lambda: np.empty(0, np.int64))
    """The combined offset at t0, rounded; `state` is relative to it."""
    state: Floats = field(default_factory=lambda: np.empty((0, 0, 2)))
    """Offset (ns) and skew."""
    covariance: Floats = field(default_factory=lambda: np.empty((0, 0, 2, 2)))
    probability: Floats = field(default_factory=lambda: np.empty((0, 0)))
    windows: Ints = field(default_factory=lambda: np.empty((0, 0), np.int64))
    """How many windows each filter has combined."""
    absent: Ints = field(default_factory=lambda: np.empty(0, np.int64))
    """For how many rounds the edge had no line."""

    def rows_of(self, names: Sequence[EdgeName]) -> tuple[Ints, npt.NDArray[np.bool_]]:
        """The row of each of these edges, and whether it is known; an unknown one has the row 0."""
        if tuple(names) == self.names:
            return np.arange(len(names)), np.ones(len(names), np.bool_)
        place = {name: row for row, name in enumerate(self.names)}
        rows = np.array([place.get(name, -1) for name in names], np.int64)
        return np.maximum(rows, 0), rows >= 0


@dataclass(frozen=True, slots=True)
class Combined:
    """The edges with combined lines, how many windows each line is made of, and the filters after this round."""

    edges: Edges
    windows: Ints
    filters: EdgeFilters


def combine(
    edges: Edges, names: Sequence[EdgeName], filters: EdgeFilters, settings: FilterSettings = DEFAULTS
) -> Combined:
    """Combine the lines of a round with those of former rounds. Edges without a line in this round keep their bank.

    The combined line is at the window's own t0, and its corridor is that of the window, relative to the new line.
    """
    if not len(edges):
        return Combined(edges, np.empty(0, np.int64), filters)
    fresh = _fresh(edges, names, settings)
    known = _known(filters, names, fresh)
    bank = _updated(edges, fresh, known, settings)
    combined, windows = _line(edges, bank, known.is_known, settings)
    is_proven_wrong = _leaves_corridor(combined) & ~_leaves_corridor(edges)
    if is_proven_wrong.any():
        bank = _where(is_proven_wrong, fresh, bank)
        combined, windows = _line(edges, bank, known.is_known, settings)
    settled = replace(bank, beta=combined.beta, state=_rebased(bank, combined.beta))
    return Combined(combined, windows, _merged(filters, settled))


def _fresh(edges: Edges, names: Sequence[EdgeName], settings: FilterSettings) -> EdgeFilters:
    """Banks that know this window only."""
    size, filters = len(edges), len(settings.wanders)
    state = np.zeros((size, filters, 2))
    state[:, :, 1] = edges.alpha[:, None]
    covariance = np.zeros((size, filters, 2, 2))
    covariance[:, :, 0, 0] = (settings.caution * np.maximum(edges.sigma, MIN_SIGMA_NS)[:, None]) ** 2
    covariance[:, :, 1, 1] = (settings.caution * np.maximum(edges.sigma_alpha, MIN_SIGMA_NS / edges.half)[:, None]) ** 2
    probability = np.full((size, filters), 1 / filters)
    return EdgeFilters(
        tuple(names),
        edges.t0,
        edges.beta,
        state,
        covariance,
        probability,
        windows=np.ones((size, filters), np.int64),
        absent=np.zeros(size, np.int64),
    )


@dataclass(frozen=True, slots=True)
class _Known:
    """The banks of some edges before this window; those that cannot be continued are fresh."""

    before: EdgeFilters
    is_known: npt.NDArray[np.bool_]
    """Whether the edge had a window before, be it too old to be continued."""
    is_continued: npt.NDArray[np.bool_]
    is_repeated: npt.NDArray[np.bool_]
    """Whether the bank has this very window already. It is continued, too."""


def _known(filters: EdgeFilters, names: Sequence[EdgeName], fresh: EdgeFilters) -> _Known:
    rows, is_known = filters.rows_of(names)
    if not is_known.any():
        return _Known(fresh, is_known, is_known, is_known)
    before = EdgeFilters(
        tuple(names),
        filters.t0[rows],
        filters.beta[rows],
        filters.state[rows],
        filters.covariance[rows],
        filters.probability[rows],
        filters.windows[rows],
        fresh.absent,
    )
    age = fresh.t0 - before.t0
    is_continued = is_known & (age >= 0) & (age <= MAX_AGE_NS)
    return _Known(_where(~is_continued, fresh, before), is_known, is_continued, is_continued & (age == 0))


def _updated(edges: Edges, fresh: EdgeFilters, known: _Known, settings: FilterSettings) -> EdgeFilters:
    """Predict and correct, every filter of every edge at once. A repeated window corrects nothing."""
    before, is_continued, is_repeated = known.before, known.is_continued, known.is_repeated[:, None]
    if not is_continued.any():
        return fresh
    since = (edges.t0 - before.t0).astype(np.float64)
    predicted, expected = _predicted(before, since, np.array(settings.wanders))
    # The difference of two offsets that may be years: of integers first.
    moved = (edges.beta - before.beta).astype(np.float64)
    error = np.stack([moved[:, None] - predicted[:, :, 0], edges.alpha[:, None] - predicted[:, :, 1]], axis=2)
    total = expected + fresh.covariance
    inverse = np.linalg.inv(total)
    squared = np.einsum("efi,efij,efj->ef", error, inverse, error)
    gain = np.where(is_repeated[:, :, None, None], 0.0, expected @ inverse)
    state = predicted + np.einsum("efij,efj->efi", gain, error)
    state[:, :, 0] -= moved[:, None]  # relative to the window's own beta
    covariance = expected - gain @ expected
    restarts = ((squared > settings.gate) & ~is_repeated) | ~is_continued[:, None]
    likelihood = np.exp(-0.5 * np.minimum(squared, settings.gate)) / np.sqrt(np.linalg.det(total))
    weight = before.probability**settings.forget * likelihood
    probability = weight / np.maximum(weight.sum(axis=1, keepdims=True), np.finfo(np.float64).tiny)
    probability = np.maximum(probability, MIN_PROBABILITY)
    probability = np.where(restarts.all(axis=1)[:, None], fresh.probability, probability)
    probability = np.where(is_repeated, before.probability, probability)
    return EdgeFilters(
        fresh.names,
        edges.t0,
        edges.beta,
        np.where(restarts[:, :, None], fresh.state, state),
        np.where(restarts[:, :, None, None], fresh.covariance, covariance),
        probability / probability.sum(axis=1, keepdims=True),
        np.where(restarts, 1, before.windows + ~is_repeated),
        fresh.absent,
    )


def _predicted(before: EdgeFilters, since_ns: Floats, wanders: Floats) -> tuple[Floats, Floats]:
    """State and covariance of all filters, so much later in each edge's source clock."""
    since = since_ns[:, None]
    state = before.state.copy()
    state[:, :, 0] += state[:, :, 1] * since
    old = before.covariance
    seconds = since / 1e9
    walk = wanders[None, :] ** 2
    offset = old[:, :, 0, 0] + 2 * since * old[:, :, 0, 1] + since**2 * old[:, :, 1, 1] + walk * seconds**3 / 3 * 1e18
    cross = old[:, :, 0, 1] + since * old[:, :, 1, 1] + walk * seconds**2 / 2 * 1e9
    rate = old[:, :, 1, 1] + walk * seconds
    covariance = np.empty_like(old)
    covariance[:, :, 0, 0], covariance[:, :, 1, 1] = offset, rate
    covariance[:, :, 0, 1] = covariance[:, :, 1, 0] = cross
    return state, covariance


def _line(
    edges: Edges, bank: EdgeFilters, is_known: npt.NDArray[np.bool_], settings: FilterSettings
) -> tuple[Edges, Ints]:
    """The mean of each bank as a line, with its standard errors; and how many windows it is made of, on average.

    `is_known` are the edges that had windows before.
    """
    share = bank.probability
    offset, alpha = ((share * bank.state[:, :, which]).sum(axis=1) for which in (0, 1))
    apart = bank.state - np.stack([offset, alpha], axis=1)[:, None, :]
    variances = [(share * (bank.covariance[:, :, i, i] + apart[:, :, i] ** 2)).sum(axis=1) for i in (0, 1)]
    whole = np.rint(offset)
    floors = (settings.systematic * edges.sigma, settings.systematic * edges.sigma_alpha)
    sigma, sigma_alpha = (np.sqrt(variance + floor**2) for variance, floor in zip(variances, floors, strict=True))
    shift = -whole[:, None] + (edges.alpha - alpha)[:, None] * edges.half[:, None] * np.array([-1.0, 0.0, 1.0])
    is_alone = (bank.windows == 1).all(axis=1)  # then it is the line of the window itself
    is_first = is_alone & ~is_known
    combined = replace(
        edges,
        beta=edges.beta + whole.astype(np.int64),
        alpha=np.where(is_alone, edges.alpha, alpha),
        sigma=np.where(is_first, edges.sigma, sigma),
        sigma_alpha=np.where(is_first, edges.sigma_alpha, sigma_alpha),
        low=np.where(is_alone[:, None], edges.low, np.floor(edges.low + shift)),
        high=np.where(is_alone[:, None], edges.high, np.ceil(edges.high + shift)),
    )
    windows: Ints = np.rint((share * bank.windows).sum(axis=1)).astype(np.int64)
    return combined, windows


def _leaves_corridor(edges: Edges) -> npt.NDArray[np.bool_]:
    """Whether the truth cannot lie on the line, at the beginning, the middle or the end of the window."""
    leaves: npt.NDArray[np.bool_] = np.logical_or.reduce((edges.low > 0) | (edges.high < 0), axis=1)
    return leaves


def _rebased(bank: EdgeFilters, beta: Ints) -> Floats:
    state = bank.state.copy()
    state[:, :, 0] -= (beta - bank.beta).astype(np.float64)[:, None]
    return state


def _where(which: npt.NDArray[np.bool_], one: EdgeFilters, other: EdgeFilters) -> EdgeFilters:
    """The rows of `one` where `which`, else those of `other`; both are of the same edges."""
    chosen = {}
    for name in _COLUMNS:
        mine, theirs = getattr(one, name), getattr(other, name)
        chosen[name] = np.where(which.reshape(-1, *(1,) * (mine.ndim - 1)), mine, theirs)
    return EdgeFilters(one.names, **chosen)


def _merged(former: EdgeFilters, newest: EdgeFilters) -> EdgeFilters:
    """The newest banks, and those of edges that are absent in this round, for MAX_ABSENT_ROUNDS."""
    if former.names == newest.names or not former.names:
        return newest
    present = set(newest.names)
    kept = [
        row for row, name in enumerate(former.names) if name not in present and former.absent[row] < MAX_ABSENT_ROUNDS
    ]
    waiting = replace(former, absent=former.absent + 1)
    joined = {name: np.concatenate([getattr(newest, name), getattr(waiting, name)[kept]]) for name in _COLUMNS}
    return EdgeFilters((*newest.names, *(former.names[row] for row in kept)), **joined)


_COLUMNS = tuple(name for name in EdgeFilters.__slots__ if name != "names")
