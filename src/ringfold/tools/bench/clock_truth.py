"""The true offset and drift of virtual clocks, and the errors of rounds and estimators against them. Pure.

Every node's clock is virtual: raw time plus an offset and a drift that only this side of the benchmark knows. So at any
raw time the true reading of every clock is known to the nanosecond, and with it everything that probing can only
estimate: the line of each edge, the delay of each packet in each direction, the error of each node.

The error of a node at an instant is its clock's global time minus that of the reference's clock at the same instant.
Agreement with the reference is the best that is possible: global time has no other definition.

The second half fits the same windows with every estimator: how far each is from the truth, what it costs, and which one
the default chose. Its windows come from delay models or from anywhere else where the truth is known (`Sample`).
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ringfold.clock.global_clock import ClockModel
from ringfold.probe.exchanges import BACKWARD_KEPT, COLUMNS, FORWARD_KEPT, EdgeWindow
from ringfold.probe.fit import BASELINES, ESTIMATORS, fit
from ringfold.probe.models import MODELS, Sample, window
from ringfold.probe.nodes.prober import virtual
from ringfold.runtime.clock import thread_cpu_ns
from ringfold.tools.bench.report import Row
from ringfold.wire.probing import EdgeFit, NodeClock, NodeId

INSTANTS = 101
"""At so many instants of a window, evenly spread and including its ends, errors and bounds are looked at."""
PPB = 1_000_000_000


@dataclass(frozen=True, slots=True)
class VirtualClock:
    """A node's clock: at `anchor_ns` of raw time it is ahead by the offset, and it drifts from there."""

    anchor_ns: int
    offset_ns: int
    drift_ppb: int

    def at(self, raw_ns: int) -> int:
        """What it shows at a raw time."""
        return virtual(raw_ns, self.anchor_ns, self.offset_ns, self.drift_ppb)


Clocks = Mapping[NodeId, VirtualClock]


def spread_clocks(nodes: int, offset_ns: int, drift_ppb: int, anchor_ns: int) -> dict[NodeId, VirtualClock]:
    """Clocks of nodes 1 to `nodes`: offsets and drifts evenly spread from minus to plus the most; always the same.

    The two are dealt out in different orders, so that a node's drift does not follow from its offset.
    """
    offsets = _spread(offset_ns, nodes)
    drifts = np.random.default_rng(nodes).permutation(np.array(_spread(drift_ppb, nodes), np.int64)).tolist()
    return {
        node: VirtualClock(anchor_ns, offset, drift)
        for node, (offset, drift) in enumerate(zip(offsets, drifts, strict=True), 1)
    }


def _spread(most: int, count: int) -> list[int]:
    return [int(value) for value in np.rint(np.linspace(-most, most, count))]


def with_truth(window: EdgeWindow, clocks: Clocks) -> Sample:
    """The window beside the true line of its edge."""
    src, dst = clocks[window.src], clocks[window.dst]
    return Sample(
        window,
        alpha=(dst.drift_ppb - src.drift_ppb) / (PPB + src.drift_ppb),
        offset_ns=dst.offset_ns - src.offset_ns,
        origin_ns=src.anchor_ns + src.offset_ns,
    )


@dataclass(frozen=True, slots=True)
class NodeErrors:
    """Of all nodes but the reference, a row each; in nanoseconds."""

    errors: npt.NDArray[np.int64]
    """At each instant: G(its clock) - G(the reference's clock)."""
    bounds: npt.NDArray[np.int64]
    """The error bound that the node reports."""
    outside: int
    """How many bounds (of a node at an instant) do not contain the truth."""


def node_errors(found: Sequence[NodeClock], reference: NodeId, clocks: Clocks, instants: Sequence[int]) -> NodeErrors:
    """How far a round's clocks are off at these raw times, and whether their bounds contain the truth."""
    models = {clock.node: _model(clock) for clock in found}
    others = sorted(models.keys() - {reference})
    errors = np.zeros((len(others), len(instants)), np.int64)
    bounds = np.zeros_like(errors)
    outside = 0
    for column, raw_ns in enumerate(instants if others else ()):
        true_ns = models[reference].to_global(clocks[reference].at(raw_ns)).ns
        for row, node in enumerate(others):
            reading = models[node].to_global(clocks[node].at(raw_ns))
            errors[row, column] = reading.ns - true_ns
            bounds[row, column] = reading.error_ns
            outside += not reading.earliest <= true_ns <= reading.latest
    return NodeErrors(errors, bounds, outside)


def _model(clock: NodeClock) -> ClockModel:
    """The clock that a node has after this round alone."""
    model = ClockModel()
    model.adopt(clock, clock.t0_ns)
    return model


def edge_outside(sample: Sample, fit: EdgeFit, instants: int = INSTANTS) -> int:
    """At how many instants of the window the truth is not between the fit's low and high."""
    if fit.refused:
        return 0
    shift = np.linspace(-fit.half_ns, fit.half_ns, instants)
    begin = sample.truth(fit.t0_ns - fit.half_ns)
    truth = sample.offset_ns - fit.beta_ns + begin + sample.alpha * (shift + fit.half_ns)
    off = truth - fit.alpha * shift
    ends = (-fit.half_ns, 0, fit.half_ns)
    return int(np.count_nonzero((off < np.interp(shift, ends, fit.low)) | (off > np.interp(shift, ends, fit.high))))


def floors_ns(sample: Sample) -> tuple[float, float]:
    """The shortest true delay of a window's kept packets, forward and backward; NaN where none was kept."""
    stamps, kept = sample.window.exchanges, sample.window.kept
    column = {name: stamps[:, place] for place, name in enumerate(COLUMNS)}
    forward, backward = (np.flatnonzero(kept & kind) for kind in (FORWARD_KEPT, BACKWARD_KEPT))
    there = [_delays(sample, column[f"{pair}_tx"], column[f"{pair}_rx"], 1, forward) for pair in ("t1", "t2")]
    back = [_delays(sample, column[f"{pair}_rx"], column[f"{pair}_tx"], -1, backward) for pair in ("r1", "r2")]
    return _least(there), _least(back)


def asymmetry_ns(sample: Sample) -> float:
    """Half the difference of the shortest delays: the error that no estimator can see. NaN if a direction has none."""
    there, back = floors_ns(sample)
    return (there - back) / 2


def _delays(
    sample: Sample, here: npt.NDArray[np.int64], there: npt.NDArray[np.int64], sign: int, rows: npt.NDArray[np.intp]
) -> npt.NDArray[np.float64]:
    """True delays: the difference of two clocks' stamps without what the clocks differ by."""
    differ = (there[rows] - here[rows] - sample.offset_ns).astype(np.float64)
    delays: npt.NDArray[np.float64] = sign * (differ - sample.alpha * (here[rows] - sample.origin_ns))
    return delays


def _least(delays: Sequence[npt.NDArray[np.float64]]) -> float:
    both = np.concatenate(delays)
    return float(both.min()) if both.size else float("nan")


MARGIN, MARGIN_NS = 1.10, 25.0
"""The default must be within this factor of the best estimator, or within so many nanoseconds."""


def simulated(seeds: int, pairs: int = 0, names: Iterable[str] = tuple(MODELS)) -> dict[str, list[Sample]]:
    """`seeds` windows of each delay model; the same every time."""
    return {name: [window(MODELS[name], np.random.default_rng(seed), pairs) for seed in range(seeds)] for name in names}


def compare(columns: Mapping[str, Iterable[Sample]]) -> list[Row]:
    """Fit all windows of all columns with all estimators.

    `rms_ns` is the root mean square error at t0, `ends_rms_ns` that at the window's ends, `sigma_ns` what the fits
    reported about it themselves, `outside` how many certified bounds missed the truth. The rows of "auto" also have
    `chose`, `best_ns` (the least `rms_ns` of the column) and `within`: whether auto is as near to the best as it has to
    be.
    """
    rows: list[Row] = []
    for model, samples in columns.items():
        windows = list(samples)
        column = [_row(model, estimator, windows) for estimator in ESTIMATORS + BASELINES]
        best = min(_number(row, "rms_ns") for row in column)
        auto = column[0]
        auto["best_ns"] = best
        auto["within"] = _number(auto, "rms_ns") <= max(MARGIN * best, best + MARGIN_NS)
        rows += column
    return rows


def errors(sample: Sample, found: EdgeFit) -> tuple[float, float, float]:
    """The line minus the truth, at the window's begin, middle and end."""
    offset = found.beta_ns - sample.offset_ns
    before, at, after = (
        offset + found.alpha * shift - sample.truth(found.t0_ns + shift) for shift in (-found.half_ns, 0, found.half_ns)
    )
    return before, at, after


def is_outside(found: EdgeFit, line_minus_truth: tuple[float, float, float]) -> bool:
    """Whether the certified bound misses the truth at the begin, the middle or the end."""
    bounds = zip(found.low, line_minus_truth, found.high, strict=True)
    return not all(low <= -error <= high for low, error, high in bounds)


def _row(model: str, estimator: str, samples: list[Sample]) -> Row:
    off, sigmas, took, outside = [], [], [], 0
    chosen: Counter[str] = Counter()
    for sample in samples:
        begin = thread_cpu_ns()
        found = fit(sample.window, estimator)
        took.append(thread_cpu_ns() - begin)
        if found.refused:
            continue
        error = errors(sample, found)
        off.append(error)
        sigmas.append(found.sigma_ns)
        outside += is_outside(found, error)
        chosen[found.estimator] += 1
    squares = np.square(np.array(off, np.float64).reshape(-1, 3))
    row: Row = {
        "model": model,
        "estimator": estimator,
        "windows": len(samples),
        "refused": len(samples) - len(off),
        "rms_ns": _root_mean(squares[:, 1]),
        "ends_rms_ns": _root_mean(squares[:, ::2]),
        "sigma_ns": _root_mean(np.square(np.array(sigmas, np.float64))),
        "ms": float(np.median(took)) / 1e6,
        "outside": outside,
    }
    if estimator == "auto":
        row["chose"] = ", ".join(f"{name} {count / len(off):.0%}" for name, count in chosen.most_common())
    return row


def _root_mean(squares: np.ndarray) -> float:
    return float(np.sqrt(squares.mean())) if squares.size else float("inf")


def _number(row: Row, key: str) -> float:
    value = row[key]
    assert isinstance(value, float)
    return value
