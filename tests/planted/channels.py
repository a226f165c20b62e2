"""Channels that do not wait for each other, on purpose: the simulation of channels must find them."""

from functools import partial

from planted import Bug
from ringfold.testing.scenario import run_channels
from ringfold.testing.simulation import Setup

BUGS: dict[str, Bug] = {
    "done_with_one_part": Bug(
        "a Done leaves when one channel has its part of the op",
        partial(run_channels, base=Setup(planted="done_with_one_part")),
    ),
    "end_forgotten": Bug(
        "one channel is not commanded to end its part of a committed op",
        partial(run_channels, base=Setup(planted="end_forgotten")),
    ),
}
