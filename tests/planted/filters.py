"""Bugs on purpose in the filter of edges: its simulation must find every one of them."""

from functools import partial

from planted import Bug
from ringfold.probe.graph.filter import FilterSettings
from ringfold.testing.filtering import run_filter


def _bug(text: str, settings: FilterSettings) -> Bug:
    return Bug(text, partial(run_filter, settings=settings))


BUGS: dict[str, Bug] = {
    "no_gate": _bug("a step is averaged with what was before", FilterSettings(gate=1e300, wanders=(1e-9, 1e-8))),
    "all_averages_out": _bug("errors that repeat are averaged", FilterSettings(caution=0.3, systematic=0.0)),
    "rates_are_constant": _bug("no clock ever wanders", FilterSettings(wanders=(1e-13,))),
}
