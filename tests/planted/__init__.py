"""Planted bugs: small wrong versions of production rules, which the simulation must find.

If it does not find these, its silence about the real code means nothing. `PYTHONPATH=tests python -m planted` looks for
all of them (`__main__.py`). By simulation: `runs.py` (collectives, epochs, syncs), `failover.py` (masters are lost),
`stalls.py` (the watchdog), `resume.py` (all peers are killed), `several.py` (several runs), `hosts.py` (direct lanes),
`channels.py` (slices of ops), `samples.py` (samplers), `shares.py` (fixed shares of paths), `probing.py` (rounds),
`filters.py` (the filter of edges), `iterations.py` (the global iteration) with `classic_iteration.py` (the protocol
that it replaces), `agents.py` (the transport agent and its clients, also in C), `forwarding.py` (telemetry among
agents).
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import count, islice

from ringfold.testing.scheduler import SimulationFailure


def _any_seed(seed: int) -> bool:
    return True


@dataclass(frozen=True, slots=True)
class Bug:
    """A planted bug: what is wrong, and how a seed is run with it."""

    text: str
    run: Callable[[int], object]
    """Raises SimulationFailure if the seed finds it."""
    concerns: Callable[[int], bool] = _any_seed
    """Whether a seed has what is needed to find it; the others are not tried."""


def find(bug: Bug, first: int, max_seeds: int) -> SimulationFailure | None:
    """The first failure that a planted bug leads to; None if none of `max_seeds` seeds from `first` on finds it."""
    for seed in islice(filter(bug.concerns, count(first)), max_seeds):
        try:
            bug.run(seed)
        except SimulationFailure as failure:
            return failure
    return None
