"""What is calculated when a round ends: clocks, anomaly, and advice for the cadence of the next round.

*Errors.* The reports are checked edge by edge. Numbers that are valid one by one may still be impossible together: for
example offsets whose sum overflows a clock. Then the calculation fails, and the failure is the result of the round. It
must not end the master and the training that depends on it.

*Advice.* The *instability* of a round is how far it was from the prediction (`GraphResult.unrest_ns`). If network and
clocks follow the prediction, few probes are enough. Otherwise shorter windows follow them sooner, and shorter pauses
see more. Between the two thresholds nothing changes, so that the cadence does not oscillate. It takes several stable
rounds to become slower, and one unstable round to become faster.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ringfold.probe.graph.clocks import GraphResult, GraphSettings, calculate
from ringfold.probe.graph.outliers import History
from ringfold.probe.rounds.events import Calculated
from ringfold.probe.rounds.settings import Adaptive, RoundSettings
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


DEFAULTS = Adaptive()


def advise(unrest_ns: Sequence[float], now: Cadence, settings: Adaptive = DEFAULTS) -> Advice:
    """The cadence of the next window. `unrest_ns` are the rounds since the cadence last changed, the newest last."""
    if not settings.is_on:
        return Advice(now.pause_us, now.window_ms, "as before: the cadence is fixed")
    newest = unrest_ns[-1] if unrest_ns else 0.0
    recent = unrest_ns[-settings.calm_rounds :]
    if newest > settings.unstable_ns:
        return _changed(now, 1 / settings.step, f"unrest {newest:.0f} ns > {settings.unstable_ns} ns", settings)
    if len(recent) == settings.calm_rounds and max(recent) < settings.stable_ns:
        return _changed(now, settings.step, f"{len(recent)} rounds below {settings.stable_ns} ns of unrest", settings)
    if newest < settings.stable_ns:
        why = f"as before: unrest {newest:.0f} ns is calm, but not for {settings.calm_rounds} rounds yet"
    else:
        why = f"as before: unrest {newest:.0f} ns is between calm and restless"
    return Advice(now.pause_us, now.window_ms, why)


def _changed(now: Cadence, factor: float, cause: str, settings: Adaptive) -> Advice:
    """Faster or slower within the limits; never moved the wrong way by them."""
    pick = max if factor > 1 else min
    pause = pick(now.pause_us, _within(now.pause_us * factor, settings.pause_min_us, settings.pause_max_us))
    window = pick(now.window_ms, _within(now.window_ms * factor, settings.window_min_ms, settings.window_max_ms))
    word = "slower" if factor > 1 else "faster"
    if (pause, window) == (now.pause_us, now.window_ms):
        return Advice(pause, window, f"as before: {cause}, but {word} is beyond the limits")
    return Advice(pause, window, f"{word}: {cause}")


def _within(value: float, low: int, high: int) -> int:
    return min(max(round(value), low), high)


def anomaly(result: GraphResult, threshold_ns: float) -> str:
    """Name the worst edge or loop if it is off by more than the threshold; empty if none is.

    Edges that were dropped as outliers count: that they are out of the result makes them no less of an anomaly.
    """
    worst = max(result.edges, key=lambda view: abs(view.residual_ns), default=None)
    if worst is not None and abs(worst.residual_ns) > threshold_ns:
        text = f"edge {worst.fit.src}->{worst.fit.dst} is {worst.residual_ns:.0f} ns off what the graph says"
        return f"{text} (limit {threshold_ns:.0f} ns)"
    loop = result.loops[0] if result.loops else None
    if loop is not None and abs(loop.residual_ns) > threshold_ns:
        way = "-".join(str(node) for node in [*loop.nodes, loop.nodes[0]])
        return f"the loop {way} does not close by {loop.residual_ns:.0f} ns (limit {threshold_ns:.0f} ns)"
    return ""
