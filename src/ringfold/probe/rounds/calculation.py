"""What is calculated when a round ends: clocks, anomaly, and advice for the cadence of the next round.

*Errors.* The reports are checked edge by edge. Numbers that are valid one by one may still be impossible together: for
example offsets whose sum overflows a clock. Then the calculation fails, and the failure is the result of the round. It
must not end the master and the training that depends on it.

*Advice.* The *instability* of a round is how far it was from the prediction (`GraphResult.instability_ns`). If network
and clocks follow the prediction, few probes are enough. Otherwise shorter windows follow them sooner, and shorter
pauses give more exchanges. The spacing inside a pair may grow with the pause (`gap_max_us`). Between the two thresholds
nothing changes, so that the cadence does not oscillate. It takes several stable rounds to become slower, and one
unstable round to become faster.
"""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from msgspec import Struct, field

from ringfold.probe.graph.clocks import GraphResult, GraphSettings, calculate
from ringfold.probe.graph.outliers import GraphHistory
from ringfold.probe.rounds.settings import Adaptive, RoundSettings
from ringfold.wire.probing import Advice, Cadence, EdgeFit, EdgeView, LoopResidual, NodeClock, NodeId

MAX_INSTABILITIES = 16
MAX_FAILURES = 3
"""After so many in a row the fault may be in the history: global time starts again without it."""


class RoundResult(Struct, frozen=True):
    """The result of the calculation. `history` is passed to the next calculation, and opaque to all others.

    `missing` are nodes that got no clock, with the reason. `took_ns` is the time that the calculation took, or 0: the
    machine has no clock to measure it, and only passes it on.
    """

    reference: NodeId
    nodes: Sequence[NodeClock]
    edges: Sequence[EdgeView]
    loops: Sequence[LoopResidual] = ()
    missing: Mapping[NodeId, str] = field(default_factory=dict)
    anomaly: str = ""
    advice: Advice | None = None
    history: object = None
    took_ns: int = 0


CalculateRound = Callable[[Sequence[EdgeFit], Mapping[NodeId, int], object], RoundResult]
"""(fits, CLOCK_REALTIME minus the node's clock for each node that reported it, history or None) -> the result."""

DrawGraph = Callable[[Sequence[NodeId], Collection[NodeId], int, int], list[tuple[NodeId, NodeId]]]
"""(all nodes, those of them that only listen, neighbours, seed) -> directed edges."""


@dataclass(frozen=True, slots=True)
class _Past:
    """What one calculation passes to the next."""

    graph: GraphHistory
    cadence: Cadence
    instability_ns: tuple[float, ...] = ()
    """Of the rounds since the cadence last changed."""
    failures: int = 0
    """How many calculations in a row failed."""


class Calculation:
    """Calculates rounds. Pure except for `now_ns`, a clock that only measures how long it took."""

    def __init__(
        self,
        settings: RoundSettings,
        graph: GraphSettings | None = None,
        now_ns: Callable[[], int] = lambda: 0,
    ) -> None:
        self._settings = settings
        self._graph = graph or GraphSettings(combine_windows=settings.combine_windows)
        self._now_ns = now_ns

    def __call__(self, fits: Sequence[EdgeFit], utc: Mapping[NodeId, int], history: object) -> RoundResult:
        began = self._now_ns()
        past = history if isinstance(history, _Past) else _Past(GraphHistory(), self._settings.cadence)
        try:
            result = _checked(fits, utc, past.graph, self._graph)
        except Exception as error:
            return self._failed(fits, past, error, began)
        instability_ns = past.instability_ns
        if result.nodes:
            instability_ns = (*instability_ns, result.instability_ns)[-MAX_INSTABILITIES:]
        advice = advise(instability_ns, past.cadence, self._settings.adaptive, self._settings.gap_us)
        cadence = advised(past.cadence, advice)
        return RoundResult(
            reference=result.reference,
            nodes=result.nodes,
            edges=result.edges,
            loops=result.loops,
            missing=result.missing,
            anomaly=anomaly(result, self._settings.anomaly_ns),
            advice=advice,
            history=_Past(result.history, cadence, instability_ns if cadence == past.cadence else ()),
            took_ns=self._now_ns() - began,
        )

    def _failed(self, fits: Sequence[EdgeFit], past: _Past, error: Exception, began: int) -> RoundResult:
        """A round without clocks. The history is kept for MAX_FAILURES of them."""
        why = f"the calculation failed: {type(error).__name__}: {error}"
        count = past.failures + 1
        graph = past.graph if count < MAX_FAILURES else GraphHistory()
        cadence = past.cadence
        return RoundResult(
            reference=-1,
            nodes=(),
            edges=[EdgeView(fit, dropped=why) for fit in fits],
            missing={node: why for fit in fits for node in (fit.src, fit.dst)},
            anomaly=why,
            advice=Advice(cadence.pause_us, cadence.window_ms, "as before: there is no result"),
            history=_Past(graph, cadence, past.instability_ns, count),
            took_ns=self._now_ns() - began,
        )


def _checked(
    fits: Sequence[EdgeFit], utc: Mapping[NodeId, int], history: GraphHistory, settings: GraphSettings
) -> GraphResult:
    """The calculation, if its result is possible: every number is finite, and every time fits into a message."""
    with np.errstate(all="ignore"):
        result = calculate(fits, utc, history, settings)
    for clock in result.nodes:
        if not _is_possible(clock):
            raise ArithmeticError(f"node {clock.node} would have an impossible clock")
    if not all(math.isfinite(loop.residual_ns) for loop in result.loops):
        raise ArithmeticError("the residual of a loop is not finite")
    return result


def _is_possible(clock: NodeClock) -> bool:
    times = (clock.t0_ns, clock.global_ns, clock.low_ns, clock.high_ns)
    return all(-(1 << 63) <= time < 1 << 63 for time in times) and all(
        map(math.isfinite, (clock.rate, clock.sigma_ns, clock.growth))
    )


DEFAULTS = Adaptive()


def advised(now: Cadence, advice: Advice) -> Cadence:
    """The cadence that follows from an advice."""
    return Cadence(advice.gap_us or now.gap_us, advice.pause_us, advice.window_ms)


def advise(
    instability_ns: Sequence[float], now: Cadence, settings: Adaptive = DEFAULTS, gap_us: int = Cadence().gap_us
) -> Advice:
    """The cadence of the next window. `instability_ns`: of the rounds since the cadence changed, the newest last.

    `gap_us` is the spacing inside a pair that probing starts with: the lower limit.
    """
    if not settings.is_on:
        return Advice(now.pause_us, now.window_ms, "as before: the cadence is fixed")
    newest = instability_ns[-1] if instability_ns else 0.0
    recent = instability_ns[-settings.calm_rounds :]
    if newest > settings.unstable_ns:
        cause = f"instability {newest:.0f} ns > {settings.unstable_ns} ns"
        return _changed(now, 1 / settings.step, cause, settings, gap_us)
    if len(recent) == settings.calm_rounds and max(recent) < settings.stable_ns:
        cause = f"{len(recent)} rounds with an instability below {settings.stable_ns} ns"
        return _changed(now, settings.step, cause, settings, gap_us)
    if newest < settings.stable_ns:
        why = f"as before: instability {newest:.0f} ns is low, but not for {settings.calm_rounds} rounds yet"
    else:
        why = f"as before: instability {newest:.0f} ns is between stable and unstable"
    return Advice(now.pause_us, now.window_ms, why)


def _changed(now: Cadence, factor: float, cause: str, settings: Adaptive, gap_us: int) -> Advice:
    """Faster or slower within the limits. A value beyond a limit is never moved in the other direction."""
    pick = max if factor > 1 else min
    pause = pick(now.pause_us, _within(now.pause_us * factor, settings.pause_min_us, settings.pause_max_us))
    window = pick(now.window_ms, _within(now.window_ms * factor, settings.window_min_ms, settings.window_max_ms))
    gap = pick(now.gap_us, _within(now.gap_us * factor, gap_us, max(gap_us, settings.gap_max_us)))
    changed_gap = gap if gap != now.gap_us else 0
    word = "slower" if factor > 1 else "faster"
    if (gap, pause, window) == (now.gap_us, now.pause_us, now.window_ms):
        return Advice(pause, window, f"as before: {cause}, but {word} is beyond the limits")
    return Advice(pause, window, f"{word}: {cause}", changed_gap)


def _within(value: float, low: int, high: int) -> int:
    return min(max(round(value), low), high)


def anomaly(result: GraphResult, threshold_ns: float) -> str:
    """The worst edge or loop as text if its residual is over the threshold; empty if none is.

    Edges that were dropped as outliers count, too.
    """
    worst = max(result.edges, key=lambda view: abs(view.residual_ns), default=None)
    if worst is not None and abs(worst.residual_ns) > threshold_ns:
        text = f"edge {worst.fit.src}->{worst.fit.dst} is {worst.residual_ns:.0f} ns off what the graph says"
        return f"{text} (limit {threshold_ns:.0f} ns)"
    loop = result.loops[0] if result.loops else None
    if loop is not None and abs(loop.residual_ns) > threshold_ns:
        path = "-".join(str(node) for node in [*loop.nodes, loop.nodes[0]])
        return f"the loop {path} does not close by {loop.residual_ns:.0f} ns (limit {threshold_ns:.0f} ns)"
    return ""
