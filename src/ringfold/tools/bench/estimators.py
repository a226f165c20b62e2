"""All estimators on the same windows: how far each is from the truth, what it costs, and what the default chose.

Plain rows, a row per model and estimator, for a benchmark's report to include. The windows come from delay models or
from anywhere else where the truth is known (`Sample`).
"""

from collections import Counter
from collections.abc import Iterable, Mapping

import numpy as np

from ringfold.probe.fit import BASELINES, ESTIMATORS, fit
from ringfold.probe.models import MODELS, Sample, window
from ringfold.runtime.clock import thread_cpu_ns
from ringfold.tools.bench.report import Column, Row
from ringfold.wire.probing import EdgeFit

MARGIN, MARGIN_NS = 1.10, 25.0
"""The default must be within this factor of the best estimator, or within so many nanoseconds."""

COLUMNS = (
    Column("model", "model"),
    Column("estimator", "estimator"),
    Column("middle ns", "rms_ns", lambda value: f"{value:.1f}"),
    Column("ends ns", "ends_rms_ns", lambda value: f"{value:.1f}"),
    Column("sigma ns", "sigma_ns", lambda value: f"{value:.1f}"),
    Column("ms", "ms", lambda value: f"{value:.3f}"),
    Column("outside", "outside"),
    Column("refused", "refused"),
    Column("chose", "chose"),
)


def simulated(seeds: int, pairs: int = 0, names: Iterable[str] = tuple(MODELS)) -> dict[str, list[Sample]]:
    """`seeds` windows of each delay model; the same every time."""
    return {name: [window(MODELS[name], np.random.default_rng(seed), pairs) for seed in range(seeds)] for name in names}


def compare(columns: Mapping[str, Iterable[Sample]]) -> list[Row]:
    """Fit all windows of all columns with all estimators.

    `rms_ns` is the root mean square error at t0, `ends_rms_ns` that at the window's ends, `sigma_ns` what the fits said
    about it themselves, `outside` how many certified bounds missed the truth. The rows of "auto" also have `chose`,
    `best_ns` (the least `rms_ns` of the column) and `within`: whether auto is as near to the best as it has to be.
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
