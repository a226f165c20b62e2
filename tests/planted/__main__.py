"""`PYTHONPATH=tests python -m planted`: is every planted bug found?"""

import argparse
import logging
import os
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor

from rich.console import Console
from rich.table import Column, Table

from planted import (
    Bug,
    agents,
    channels,
    failover,
    filters,
    find,
    forwarding,
    hosts,
    iterations,
    probing,
    regions,
    resume,
    runs,
    samples,
    several,
    shares,
    stalls,
)
from ringfold.testing.__main__ import fresh_seed, progress_bar
from ringfold.testing.scheduler import SimulationFailure

SIMULATIONS: dict[str, dict[str, Bug]] = {
    "runs": runs.BUGS,
    "failover": failover.BUGS,
    "stalls": stalls.BUGS,
    "resume": resume.BUGS,
    "several": several.BUGS,
    "samples": samples.BUGS,
    "shares": shares.BUGS,
    "channels": channels.BUGS,
    "hosts": hosts.BUGS,
    "probing": probing.BUGS,
    "regions": regions.BUGS,
    "filters": filters.BUGS,
    "iterations": iterations.BUGS,
    "agents": agents.BUGS,
    "forwarding": forwarding.BUGS,
}
MAX_SEEDS = 1_000


def search(simulation: str, name: str, first: int) -> SimulationFailure | None:
    return find(SIMULATIONS[simulation][name], first, MAX_SEEDS)


def main(arguments: Sequence[str] | None = None) -> int:
    """Look for every planted bug; 1 if one is not found within MAX_SEEDS seeds."""
    parser = argparse.ArgumentParser(prog="python -m planted", description=__doc__)
    parser.add_argument("simulations", nargs="*", metavar="SIMULATION", help=f"of {', '.join(SIMULATIONS)}; else all")
    parser.add_argument("--from", type=int, dest="first", default=None, help="the first seed; else a fresh number")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes")
    options = parser.parse_args(arguments)
    if unknown := sorted(set(options.simulations) - set(SIMULATIONS)):
        parser.error(f"no simulation {', '.join(unknown)}; there are {', '.join(SIMULATIONS)}")
    logging.getLogger("ringfold").addHandler(logging.NullHandler())
    console = Console(soft_wrap=True)
    first = fresh_seed() if options.first is None else options.first
    console.print(f"planted bugs from seed {first}")
    wanted = [(kind, name) for kind in options.simulations or SIMULATIONS for name in SIMULATIONS[kind]]
    columns = (Column(title, no_wrap=True) for title in ("simulation", "planted bug", "found by seed", "after"))
    table = Table(*columns, Column("as", ratio=1, no_wrap=True, overflow="ellipsis"), expand=True)
    hidden = 0
    with progress_bar(console) as progress, ProcessPoolExecutor(options.jobs) as pool:
        task = progress.add_task("planted bugs", total=len(wanted))
        found = pool.map(search, *zip(*wanted, strict=True), [first] * len(wanted))
        for (kind, name), failure in zip(wanted, found, strict=True):
            progress.advance(task)
            if failure is None:
                hidden += 1
                table.add_row(kind, name, "[red]not found[/red]", f"{MAX_SEEDS} seeds", "")
            else:
                seeds = f"{failure.seed - first + 1} seeds"
                table.add_row(kind, name, str(failure.seed), seeds, failure.text.splitlines()[0])
    console.print(table)
    return 1 if hidden else 0


if __name__ == "__main__":
    sys.exit(main())
