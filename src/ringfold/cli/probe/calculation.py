"""Clocks out of nodes' logs where no master calculated any: the graph calculation, fed with what the logs hold."""

import importlib
from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ringfold.probe.logs.lines import FitLine
    from ringfold.wire.probing import RoundSummary


def rounds_of(fits: "Iterable[FitLine]") -> "list[RoundSummary]":
    """The result of each gathering, oldest first; none without fits."""
    from ringfold.probe.logs.offline import combine, gather

    gatherings = gather(fits)
    if not gatherings:
        return []
    return combine(gatherings, importlib.import_module("ringfold.probe.graph.clocks").calculate)
