"""From a window of one edge to its line.

The estimators are native (`native/src/probe/fit_*.cpp`, each with its idea at the head);
docs/concepts/estimators.md compares them. `fit` adds the counts of the window.
"""

from typing import Any

import numpy as np

from ringfold import _native
from ringfold.errors import UsageError
from ringfold.probe.exchanges import BACKWARD_KEPT, FORWARD_KEPT, EdgeWindow
from ringfold.wire.probing import EdgeFit

ESTIMATORS = ("auto", "quantile", "hull", "svm")
BASELINES = ("least-squares", "min-rtt")
"""Common methods, for comparison only."""


def fit(window: EdgeWindow, estimator: str = "auto") -> EdgeFit:
    """The line of an edge over a window, with its uncertainty, or the reason why there is none (`refused`).

    Pure and deterministic: the same window gives the same bits. `estimator` is one of ESTIMATORS or BASELINES; "auto"
    chooses for each window, and the result names the one that was chosen and why. `low` and `high` do not depend on
    that choice, except that they are relative to the line.
    """
    if estimator not in ESTIMATORS + BASELINES:
        raise UsageError(f"there is no estimator {estimator!r}; there are {', '.join(ESTIMATORS + BASELINES)}")
    if window.stepped:
        pairs = int(np.count_nonzero(window.kept == FORWARD_KEPT | BACKWARD_KEPT))
        found: dict[str, Any] = {"pairs": pairs, "refused": f"a clock stepped: {window.stepped}"}
    else:
        stamps, kept = np.ascontiguousarray(window.exchanges, np.int64), np.ascontiguousarray(window.kept, np.uint8)
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
