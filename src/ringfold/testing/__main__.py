"""`python -m ringfold.testing`: run many seeds, replay one, or see that planted bugs are found."""

import argparse
import logging
import os
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from itertools import islice

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Column, Table

from ringfold.testing.planted import BUGS, find
from ringfold.testing.scenario import Outcome, run_seed
from ringfold.testing.scheduler import SimulationFailure

BATCH = 10
"""Seeds per task: enough that handing them out costs nothing."""


@dataclass
class Total:
    """All outcomes so far."""

    seeds: int = 0
    committed: int = 0
    aborted: int = 0
    epochs: int = 0
    virtual_ms: float = 0.0
    syncs: Counter[str] = field(default_factory=Counter)
    rings: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)
    failures: list[SimulationFailure] = field(default_factory=list)

    def add(self, outcome: Outcome | SimulationFailure) -> None:
        self.seeds += 1
        if isinstance(outcome, SimulationFailure):
            self.failures.append(outcome)
            return
        self.committed += outcome.committed
        self.aborted += outcome.aborted
        self.epochs += outcome.epochs
        self.virtual_ms += outcome.virtual_ms
        self.syncs.update(outcome.syncs)
        self.rings.update(outcome.rings)
        self.faults.update(outcome.faults)


def run_batch(seeds: Sequence[int]) -> list[Outcome | SimulationFailure]:
    """Run some seeds; a broken promise is an outcome too."""
    outcomes: list[Outcome | SimulationFailure] = []
    for seed in seeds:
        try:
            outcomes.append(run_seed(seed))
        except SimulationFailure as failure:
            outcomes.append(failure)
    return outcomes


def run_many(first: int, count: int, jobs: int, console: Console) -> Total:
    """Run `count` seeds from `first` on, in so many processes, with a progress bar."""
    total = Total()
    with _progress(console) as progress:
        task = progress.add_task("seeds", total=count)
        for batch in _in_processes(_batches(range(first, first + count)), jobs):
            for outcome in batch:
                total.add(outcome)
                if isinstance(outcome, SimulationFailure):
                    what = outcome.text.splitlines()[0]
                    console.print(f"[red]violation[/red] {what} [dim](seed {outcome.seed})[/dim]")
            progress.advance(task, len(batch))
    return total


def _in_processes(batches: Iterable[Sequence[int]], jobs: int) -> Iterator[list[Outcome | SimulationFailure]]:
    if jobs == 1:
        yield from map(run_batch, batches)
        return
    with ProcessPoolExecutor(jobs) as pool:
        yield from pool.map(run_batch, batches)


def _batches(seeds: Iterable[int]) -> Iterator[Sequence[int]]:
    rest = iter(seeds)
    while batch := list(islice(rest, BATCH)):
        yield batch


def show(total: Total, first: int, console: Console) -> None:
    """The summary: what was run, and what went wrong."""
    table = Table(title=f"{total.seeds} seeds from {first}", show_header=False)
    table.add_row("ops committed", f"{total.committed:,}")
    table.add_row("calls aborted", f"{total.aborted:,}")
    table.add_row("epochs", f"{total.epochs:,}")
    for what, count in sorted(total.syncs.items()):
        table.add_row(f"syncs: {what}", f"{count:,}")
    for what, count in sorted(total.rings.items()):
        table.add_row(f"rings: {what}", f"{count:,}")
    for kind, count in sorted(total.faults.items()):
        table.add_row(f"fault: {kind}", f"{count:,}")
    table.add_row("virtual time", f"{total.virtual_ms / 1000:,.0f} s")
    table.add_row("violations", f"[red]{len(total.failures)}[/red]" if total.failures else "[green]0[/green]")
    console.print(table)
    for failure in total.failures[:3]:
        console.print(str(failure), markup=False, highlight=False)


def plant(first: int, most: int, jobs: int, console: Console) -> int:
    """Look for every planted bug; exit code 1 if one stays hidden for `most` seeds."""
    columns = (Column(name, no_wrap=True) for name in ("planted bug", "found by seed", "after"))
    table = Table(*columns, Column("as", ratio=1, no_wrap=True, overflow="ellipsis"), expand=True)
    hidden = 0
    with _progress(console) as progress, ProcessPoolExecutor(jobs) as pool:
        task = progress.add_task("planted bugs", total=len(BUGS))
        for name, found in zip(BUGS, pool.map(find, BUGS, [first] * len(BUGS), [most] * len(BUGS)), strict=True):
            progress.advance(task)
            if found is None:
                hidden += 1
                table.add_row(name, "[red]not found[/red]", f"{most} seeds", "")
            else:
                table.add_row(name, str(found.seed), f"{found.seed - first + 1} seeds", found.text.splitlines()[0])
    console.print(table)
    return 1 if hidden else 0


def replay(seed: int, trace: bool, console: Console) -> int:
    """Run one seed again; with `trace`, print everything that happens in it."""
    echo = (lambda line: console.print(line, markup=False, highlight=False)) if trace else None
    try:
        outcome = run_seed(seed, echo=echo)
    except SimulationFailure as failure:
        console.print(str(failure), markup=False, highlight=False)
        return 1
    console.print(f"seed {seed}: no violation; {outcome}", markup=False, highlight=False)
    return 0


def _progress(console: Console) -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, TimeRemainingColumn(), console=console, transient=True)


def fresh_seed() -> int:
    """A number nobody chose; it is printed, so that a failure can be replayed."""
    return int.from_bytes(os.urandom(4), "little")


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse, run, show; 1 if a promise was broken or a planted bug stayed hidden."""
    parser = argparse.ArgumentParser(prog="python -m ringfold.testing", description=__doc__)
    parser.add_argument("--seeds", type=int, default=100, help="how many seeds to run")
    parser.add_argument("--from", type=int, dest="first", default=None, help="the first seed; else a fresh number")
    parser.add_argument("--seed", type=int, help="run only this one")
    parser.add_argument("--trace", action="store_true", help="with --seed: print every event")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes")
    parser.add_argument("--planted", action="store_true", help="also look for the planted bugs, in up to 1,000 seeds")
    options = parser.parse_args(arguments)
    logging.getLogger("ringfold").addHandler(logging.NullHandler())  # programs log what they go through: not here
    console = Console(soft_wrap=True)
    if options.seed is not None:
        return replay(options.seed, options.trace, console)
    first = fresh_seed() if options.first is None else options.first
    console.print(f"seeds {first} to {first + options.seeds - 1}")
    total = run_many(first, options.seeds, options.jobs, console)
    show(total, first, console)
    code = 1 if total.failures else 0
    if options.planted:
        code = max(code, plant(first, 1_000, options.jobs, console))
    return code


if __name__ == "__main__":
    sys.exit(main())
