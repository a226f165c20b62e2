"""What a round's result says about the next one: how densely to probe, and whether something is wrong. Pure.

*Unrest* is how much a round surprised (`GraphResult.unrest_ns`). A network and clocks that do as predicted need few
probes; when they do not, shorter windows follow them sooner, and shorter pauses see more. Between calm and restless
there is a stretch where nothing changes, so that the cadence does not swing; and getting slower takes patience,
getting faster does not.
"""

from collections.abc import Sequence

from ringfold.probe.graph.clocks import GraphResult
from ringfold.probe.rounds.settings import Adaptive
from ringfold.wire.probing import Advice, Cadence

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
