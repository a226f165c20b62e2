"""All that is calculated when a round ends, as the round machine wants it: clocks, anomaly, advice.

What nodes report is checked edge by edge, but many numbers that are possible one by one may still be impossible
together: offsets that add up to more than a clock can show, for one. Then the calculation breaks down, and that is the
round's result. It must not be the end of the master, and of everybody who trains with it.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ringfold.probe.graph.clocks import GraphResult, GraphSettings, calculate
from ringfold.probe.graph.outliers import History
from ringfold.probe.rounds.advice import advise, anomaly
from ringfold.probe.rounds.events import Calculated
from ringfold.probe.rounds.settings import RoundSettings
from ringfold.wire.probing import Advice, Cadence, EdgeFit, EdgeView, NodeClock, NodeId

MOST_UNREST = 16
MOST_BREAKDOWNS = 3
"""After so many in a row the fault may be in what is remembered: global time begins anew."""


@dataclass(frozen=True, slots=True)
class _Past:
    """What one calculation leaves to the next."""

    graph: History
    cadence: Cadence
    unrest_ns: tuple[float, ...] = ()
    """Of the rounds since the cadence last changed."""
    breakdowns: int = 0
    """How many calculations in a row came to nothing."""


class Calculation:
    """Calculates rounds. Pure but for `now_ns`, a clock that only tells how long it took."""

    def __init__(
        self,
        settings: RoundSettings,
        graph: GraphSettings | None = None,
        now_ns: Callable[[], int] = lambda: 0,
    ) -> None:
        self._settings, self._graph, self._now_ns = settings, graph or GraphSettings(), now_ns

    def __call__(self, fits: Sequence[EdgeFit], utc: Mapping[NodeId, int], history: object) -> Calculated:
        began = self._now_ns()
        past = history if isinstance(history, _Past) else _Past(History(), self._settings.cadence)
        try:
            result = _checked(fits, utc, past.graph, self._graph)
        except Exception as error:
            return self._broken(fits, past, error, began)
        unrest = (*past.unrest_ns, result.unrest_ns)[-MOST_UNREST:] if result.nodes else past.unrest_ns
        advice = advise(unrest, past.cadence, self._settings.adaptive)
        cadence = Cadence(past.cadence.gap_us, advice.pause_us, advice.window_ms)
        return Calculated(
            reference=result.reference,
            nodes=result.nodes,
            edges=result.edges,
            loops=result.loops,
            missing=result.missing,
            anomaly=anomaly(result, self._settings.anomaly_ns),
            advice=advice,
            history=_Past(result.history, cadence, unrest if cadence == past.cadence else ()),
            took_ns=self._now_ns() - began,
        )

    def _broken(self, fits: Sequence[EdgeFit], past: _Past, error: Exception, began: int) -> Calculated:
        """The round without a clock: what is remembered stays, for a while."""
        why = f"the calculation broke down: {type(error).__name__}: {error}"
        count = past.breakdowns + 1
        graph = past.graph if count < MOST_BREAKDOWNS else History()
        cadence = past.cadence
        return Calculated(
            reference=-1,
            nodes=(),
            edges=[EdgeView(fit, dropped=why) for fit in fits],
            missing={node: why for fit in fits for node in (fit.src, fit.dst)},
            anomaly=why,
            advice=Advice(cadence.pause_us, cadence.window_ms, "as before: there is nothing to go by"),
            history=_Past(graph, cadence, past.unrest_ns, count),
            took_ns=self._now_ns() - began,
        )


def _checked(
    fits: Sequence[EdgeFit], utc: Mapping[NodeId, int], history: History, settings: GraphSettings
) -> GraphResult:
    """The calculation, if its result can be true: every number finite, every time one that a message can carry."""
    with np.errstate(all="ignore"):
        result = calculate(fits, utc, history, settings)
    for clock in result.nodes:
        if not _is_possible(clock):
            raise ArithmeticError(f"node {clock.node} would have an impossible clock")
    if not all(math.isfinite(loop.residual_ns) for loop in result.loops):
        raise ArithmeticError("a loop closes nowhere")
    return result


def _is_possible(clock: NodeClock) -> bool:
    times = (clock.t0_ns, clock.global_ns, clock.low_ns, clock.high_ns)
    return all(-(1 << 63) <= time < 1 << 63 for time in times) and all(
        map(math.isfinite, (clock.rate, clock.sigma_ns, clock.growth))
    )
