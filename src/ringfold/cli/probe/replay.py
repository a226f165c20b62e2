"""`ringfold probe replay`: fit a recorded log again, with any estimator."""

import importlib
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rich.console import Group, RenderableType

    from ringfold.probe.logs.replay import Fit, Refit
    from ringfold.wire.probing import EdgeFit

MAX_ROWS = 60
"""More is for programs: `--json` has everything."""


def command(
    log: Annotated[Path, typer.Argument(help="A node's log, written with points.")],
    estimator: Annotated[str, typer.Option(help="Which estimator fits; a wrong name lists all.")] = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Fit the windows of a recorded log again, and show each edge's old and new line beside each other."""
    from ringfold.cli.output import console, print_json
    from ringfold.cli.probe.report import show_notes
    from ringfold.probe.logs.files import LogReader
    from ringfold.probe.logs.replay import replay

    fit = fit_with(estimator)
    reader = LogReader(log)
    refits = list(replay(reader, fit, estimator))
    show_notes(reader.notes)
    if as_json:
        print_json({"log": log, "estimator": estimator, "notes": reader.notes, "refits": refits})
    else:
        console.print(render(refits, estimator))


def fit_with(estimator: str) -> "Fit":
    """The function that fits, after a check of the estimator's name."""
    from ringfold.errors import UsageError

    estimators = importlib.import_module("ringfold.probe.fit")
    known: tuple[str, ...] = (*estimators.ESTIMATORS, *getattr(estimators, "BASELINES", ()))
    if estimator not in known:
        raise UsageError(f"there is no estimator {estimator!r}; there are {', '.join(known)}")
    fit: Fit = estimators.fit
    return fit


def render(refits: "list[Refit]", estimator: str) -> "Group":
    """The newest rows as a table, and how many there are."""
    from rich.console import Group
    from rich.text import Text

    from ringfold.cli.output import table

    shown = refits[-MAX_ROWS:]
    columns = ["edge", "window", "by", "alpha (ppm)", "beta (ns)", "+-", "moved"]
    rows = (row for refit in shown for row in _rows(refit))
    parts: list[RenderableType] = [
        table(f"old lines, and below each the new one by {estimator}", columns, rows),
        Text("beta: at each line's t0; moved: from the old line at its t0; +- and moved in ns", style="dim"),
    ]
    parts += [Text(remark, "yellow") for refit in shown for remark in _remarks(refit)]
    if len(shown) < len(refits):
        parts.append(Text(f"the last {len(shown)} of {len(refits)} windows; --json has all", style="dim"))
    return Group(*parts)


def _rows(refit: "Refit") -> list[list[str]]:
    place = [f"{refit.src} -> {refit.dst}", str(refit.window)]
    moved = "" if refit.moved_ns is None else f"{refit.moved_ns:+z.1f}"
    if refit.old is None:
        return [[*place, *_cells(refit.new), moved]]
    return [[*place, *_cells(refit.old), ""], ["", "", *_cells(refit.new), moved]]


def _remarks(refit: "Refit") -> list[str]:
    """Why there is no line where there is none."""
    tried = [("at first", refit.old), ("now", refit.new)]
    return [
        f"{refit.src} -> {refit.dst}, window {refit.window}: refused {when}: {fit.refused}"
        for when, fit in tried
        if fit is not None and fit.refused
    ]


def _cells(fit: "EdgeFit") -> list[str]:
    if fit.refused:
        return [fit.estimator, "refused", "-", "-"]
    return [fit.estimator, f"{fit.alpha * 1e6:+z.4f}", f"{fit.beta_ns:+,}", f"{fit.sigma_ns:.1f}"]
