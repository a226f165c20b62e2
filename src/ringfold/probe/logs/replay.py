"""A recorded log, fitted again: the same exchanges, any estimator. Pure; the fit is handed in."""

from collections.abc import Callable, Iterable, Iterator

from msgspec import Struct

from ringfold.errors import UsageError
from ringfold.probe.base import EdgeWindow
from ringfold.probe.logs.lines import FitLine, HeaderLine, Line, RoundLine, WindowLine, edge_window
from ringfold.wire.probing import EdgeFit, NodeId, RoundId

Fit = Callable[[EdgeWindow, str], EdgeFit]
"""Turns a window into a line with the estimator of that name."""


class Refit(Struct, frozen=True):
    """One edge and window: what the log says was fitted (None: nothing), and what is fitted now."""

    src: NodeId
    dst: NodeId
    node: NodeId
    window: int
    round_id: RoundId
    label: str
    begin_ns: int
    end_ns: int
    old: EdgeFit | None
    new: EdgeFit
    moved_ns: float | None
    """How far the new line lies above the old one at the old t0; None if one of them was refused."""


def replay(lines: Iterable[Line], fit: Fit, estimator: str) -> Iterator[Refit]:
    """Every recorded window fitted again, in the order of the log; needs the memory of one window.

    Windows without points are passed over; a log that has only such ones is a UsageError.
    """
    waiting: dict[tuple[NodeId, NodeId], WindowLine] = {}
    current: tuple[NodeId, int] | None = None
    recorded = bare = 0
    for line in lines:
        if isinstance(line, RoundLine):
            continue
        place = None if isinstance(line, HeaderLine) else (line.node, line.window)
        if place != current:
            yield from (_refit(left, None, fit, estimator) for left in waiting.values())
            waiting.clear()
            current = place
        match line:
            case WindowLine(exchanges=None):
                bare += 1
            case WindowLine():
                waiting[line.src, line.dst] = line
                recorded += 1
            case FitLine(fit=old) if (found := waiting.pop((old.src, old.dst), None)) is not None:
                yield _refit(found, old, fit, estimator)
    yield from (_refit(left, None, fit, estimator) for left in waiting.values())
    if not recorded:
        what = "was written without its points (--points writes them)" if bare else "has no windows of a node"
        raise UsageError(f"the log {what}, so nothing can be fitted again")


def _refit(line: WindowLine, old: EdgeFit | None, fit: Fit, estimator: str) -> Refit:
    window = edge_window(line)
    assert window is not None
    new = fit(window, estimator)
    return Refit(
        src=line.src,
        dst=line.dst,
        node=line.node,
        window=line.window,
        round_id=line.round_id,
        label=line.label,
        begin_ns=line.begin_ns,
        end_ns=line.end_ns,
        old=old,
        new=new,
        moved_ns=None if old is None else moved_ns(old, new),
    )


def moved_ns(old: EdgeFit, new: EdgeFit) -> float | None:
    """How far the new line lies above the old one at the old t0. The large parts are subtracted as integers."""
    if old.refused or new.refused:
        return None
    return (new.beta_ns - old.beta_ns) + new.alpha * (old.t0_ns - new.t0_ns)
