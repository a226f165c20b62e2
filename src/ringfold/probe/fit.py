"""From exchanges to lines: the terms of probing, a window of exchanges of one edge, and its fit.

An *exchange* is five packets between a prober P and a responder R. The kernel timestamps each packet at both ends:

    P                                R
    Pt1 --- t1_tx -------- t1_rx --->      then, one gap later:
    Pt2 --- t2_tx -------- t2_rx --->      (carries t1_tx)
        <-- r1_rx -------- r1_tx --- Pr1   (carries t1_rx)
        <-- r2_rx -------- r2_tx --- Pr2   (carries r1_tx and t2_rx)
        <------------------------- Pd1     (carries r2_tx)

t*_tx and r*_rx are times of the prober's clock, t*_rx and r*_tx of the responder's. A packet cannot arrive before it
was sent. So t_rx - t_tx bounds C_dst - C_src from above, and r_tx - r_rx bounds it from below. If two packets were sent
one gap apart and did not arrive one gap apart, one of them was queued: such a pair is *filtered*.

The estimators are native (`native/src/fit_*.cpp`, each with its idea at the head); docs/concepts/estimators.md compares
them. `fit` adds the counts of the window.
"""

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from ringfold.errors import UsageError
from ringfold.wire.probing import EdgeFit, NodeId

COLUMNS = ("t1_tx", "t1_rx", "t2_tx", "t2_rx", "r1_tx", "r1_rx", "r2_tx", "r2_rx")
FORWARD_KEPT, BACKWARD_KEPT = 1, 2

Stamps = Literal["kernel", "user"]


@dataclass(frozen=True, slots=True)
class EdgeWindow:
    """All that one window holds about one edge, at its prober.

    `exchanges` is an int64 matrix, a row for each exchange of which at least one pair came whole, columns as COLUMNS
    says, in the order of sending; a stamp that is missing is 0. `kept` has a uint8 for each row: FORWARD_KEPT if its
    pair Pt1-Pt2 is whole and passed the filter, BACKWARD_KEPT for Pr1-Pr2. Times are nanoseconds of each node's clock.
    """

    src: NodeId
    dst: NodeId
    begin_ns: int
    end_ns: int
    exchanges: npt.NDArray[np.int64]
    kept: npt.NDArray[np.uint8]
    sent: int
    """Exchanges begun."""
    lost: int
    """Exchanges of which an answer did not come in time."""
    duplicates: int
    filtered: int
    """Pairs that came whole and did not pass the filter."""
    threshold_ns: int
    """How much a pair's spacing could change at the end of the window and pass."""
    stamps: Stamps
    stepped: str = ""
    """What the host's clock did, if it stepped during the window; then the stamps prove nothing."""


ESTIMATORS = ("auto", "quantile", "hull", "svm")
BASELINES = ("least-squares", "min-rtt")
"""What others do; for comparison only."""


def fit(window: EdgeWindow, estimator: str = "auto") -> EdgeFit:
    """The line of an edge over a window, with its uncertainty, or the reason why there is none (`refused`).

    Pure and deterministic: the same window gives the same bits. `estimator` is one of ESTIMATORS or BASELINES; "auto"
    chooses for each window, and the result names the one that was chosen and why. `low` and `high` do not depend on
    that choice except for being relative to the line.
    """
    if estimator not in ESTIMATORS + BASELINES:
        raise UsageError(f"there is no estimator {estimator!r}; there are {', '.join(ESTIMATORS + BASELINES)}")
    if window.stepped:
        pairs = int(np.count_nonzero(window.kept == FORWARD_KEPT | BACKWARD_KEPT))
        found: dict[str, Any] = {"pairs": pairs, "refused": f"a clock stepped: {window.stepped}"}
    else:
        stamps, kept = np.ascontiguousarray(window.exchanges, np.int64), np.ascontiguousarray(window.kept, np.uint8)
        from ringfold import _native  # loaded when something is fitted: a master never does

        found = _native.fit_edge(stamps, kept, estimator)
    return EdgeFit(
        src=window.src,
        dst=window.dst,
        sent=window.sent,
        lost=window.lost,
        duplicates=window.duplicates,
        filtered=window.filtered,
        **found,
    )
