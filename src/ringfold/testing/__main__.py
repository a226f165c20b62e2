"""`python -m ringfold.testing`: run many seeds, or replay one."""

import argparse
import logging
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from itertools import islice
from typing import Protocol, TypeVar

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from ringfold.testing.agents import AgentOutcome, run_agents
from ringfold.testing.forwarding import run_forwarding
from ringfold.testing.probing import RoundOutcome, run_rounds
from ringfold.testing.probing_regions import run_regions
from ringfold.testing.resuming import run_resume
from ringfold.testing.sampled import run_samples
from ringfold.testing.scenario import Outcome, run_channels, run_failover, run_hosts, run_seed, run_stalls
from ringfold.testing.scheduler import SimulationFailure
from ringfold.testing.several import run_several
from ringfold.testing.sharing import run_shares

BATCH = 10
"""Seeds per task: enough that handing them out costs nothing."""

Result = TypeVar("Result")
Added = TypeVar("Added", contravariant=True)


class Sum(Protocol[Added]):
    """What outcomes add up to."""

    seeds: int
    failures: list[SimulationFailure]

    def add(self, outcome: Added | SimulationFailure) -> None: ...


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


@dataclass
class RoundTotal:
    """All outcomes of rounds so far."""

    seeds: int = 0
    counts: Counter[str] = field(default_factory=Counter)
    virtual_ms: float = 0.0
    failures: list[SimulationFailure] = field(default_factory=list)

    def add(self, outcome: RoundOutcome | SimulationFailure) -> None:
        self.seeds += 1
        if isinstance(outcome, SimulationFailure):
            self.failures.append(outcome)
            return
        self.virtual_ms += outcome.virtual_ms
        self.counts[f"{outcome.kind}: seeds"] += 1
        self.counts[f"{outcome.kind}: windows"] += outcome.windows
        if outcome.kind != "local":
            self.counts[f"{outcome.kind}: rounds"] += outcome.rounds
            self.counts[f"{outcome.kind}: with all nodes"] += outcome.whole
        self.counts.update({f"fault: {kind}": count for kind, count in outcome.faults.items()})


@dataclass
class AgentTotal:
    """All outcomes of agents so far."""

    seeds: int = 0
    counts: Counter[str] = field(default_factory=Counter)
    virtual_ms: float = 0.0
    failures: list[SimulationFailure] = field(default_factory=list)

    def add(self, outcome: AgentOutcome | SimulationFailure) -> None:
        self.seeds += 1
        if isinstance(outcome, SimulationFailure):
            self.failures.append(outcome)
            return
        self.virtual_ms += outcome.virtual_ms
        self.counts.update(outcome.counts)
        self.counts.update({f"fault: {kind}": count for kind, count in outcome.faults.items()})


def run_batch(seeds: Sequence[int]) -> list[Outcome | SimulationFailure]:
    """Run some seeds; a violation is an outcome too."""
    return [_caught(run_seed, seed) for seed in seeds]


def run_failover_batch(seeds: Sequence[int]) -> list[Outcome | SimulationFailure]:
    """Run some seeds in which masters are lost; a violation is an outcome too."""
    return [_caught(run_failover, seed) for seed in seeds]


def run_stall_batch(seeds: Sequence[int]) -> list[Outcome | SimulationFailure]:
    """Run some seeds in which programs hang; a violation is an outcome too."""
    return [_caught(run_stalls, seed) for seed in seeds]


def run_resume_batch(seeds: Sequence[int]) -> list[Outcome | SimulationFailure]:
    """Run some seeds in which all peers are killed; a violation is an outcome too."""
    return [_caught(run_resume, seed) for seed in seeds]


def run_several_batch(seeds: Sequence[int]) -> list[Outcome | SimulationFailure]:
    """Run some seeds of several runs on one master; a violation is an outcome too."""
    return [_caught(run_several, seed) for seed in seeds]


def run_sample_batch(seeds: Sequence[int]) -> list[Outcome | SimulationFailure]:
    """Run some seeds of loops with samplers; a violation is an outcome too."""
    return [_caught(run_samples, seed) for seed in seeds]


def run_share_batch(seeds: Sequence[int]) -> list[Outcome | SimulationFailure]:
    """Run some seeds with fixed shares of paths; a broken promise is an outcome too."""
    return [_caught(run_shares, seed) for seed in seeds]


def run_channel_batch(seeds: Sequence[int]) -> list[Outcome | SimulationFailure]:
    """Run some seeds with several channels; a broken promise is an outcome too."""
    return [_caught(run_channels, seed) for seed in seeds]


def run_host_batch(seeds: Sequence[int]) -> list[Outcome | SimulationFailure]:
    """Run some seeds with several peers on each host; a broken promise is an outcome too."""
    return [_caught(run_hosts, seed) for seed in seeds]


def run_round_batch(seeds: Sequence[int]) -> list[RoundOutcome | SimulationFailure]:
    """Run the rounds of some seeds; a violation is an outcome too."""
    return [_caught(run_rounds, seed) for seed in seeds]


def run_region_batch(seeds: Sequence[int]) -> list[RoundOutcome | SimulationFailure]:
    """Run the regions of some seeds; a violation is an outcome too."""
    return [_caught(run_regions, seed) for seed in seeds]


def run_agent_batch(seeds: Sequence[int]) -> list[AgentOutcome | SimulationFailure]:
    """Run the hosts of some seeds; a violation is an outcome too."""
    return [_caught(run_agents, seed) for seed in seeds]


def run_forwarding_batch(seeds: Sequence[int]) -> list[AgentOutcome | SimulationFailure]:
    """Run the telemetry of some seeds; a violation is an outcome too."""
    return [_caught(run_forwarding, seed) for seed in seeds]


def _caught(run: Callable[[int], Result], seed: int) -> Result | SimulationFailure:
    try:
        return run(seed)
    except SimulationFailure as failure:
        return failure


def run_many(
    first: int,
    count: int,
    jobs: int,
    console: Console,
    total: Sum[Result],
    run: Callable[[Sequence[int]], list[Result | SimulationFailure]],
) -> None:
    """Run `count` seeds from `first` on, in so many processes, with a progress bar, and add them up."""
    with progress_bar(console) as progress:
        task = progress.add_task("seeds", total=count)
        for batch in _in_processes(_batches(range(first, first + count)), jobs, run):
            for outcome in batch:
                total.add(outcome)
                if isinstance(outcome, SimulationFailure):
                    what = outcome.text.splitlines()[0]
                    console.print(f"[red]violation[/red] {escape(what)} [dim](seed {outcome.seed})[/dim]")
            progress.advance(task, len(batch))


def _in_processes(
    batches: Iterable[Sequence[int]], jobs: int, run: Callable[[Sequence[int]], list[Result | SimulationFailure]]
) -> Iterator[list[Result | SimulationFailure]]:
    if jobs == 1:
        yield from map(run, batches)
        return
    with ProcessPoolExecutor(jobs) as pool:
        yield from pool.map(run, batches)


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
    _show_end(table, total.virtual_ms, total.failures, console)


def show_counts(total: RoundTotal | AgentTotal, what: str, first: int, console: Console) -> None:
    """The summary of simulated rounds or agents."""
    table = Table(title=f"{what}: {total.seeds} seeds from {first}", show_header=False)
    for name, count in sorted(total.counts.items()):
        table.add_row(name, f"{count:,}")
    _show_end(table, total.virtual_ms, total.failures, console)


def _show_end(table: Table, virtual_ms: float, failures: Sequence[SimulationFailure], console: Console) -> None:
    table.add_row("virtual time", f"{virtual_ms / 1000:,.0f} s")
    table.add_row("violations", f"[red]{len(failures)}[/red]" if failures else "[green]0[/green]")
    console.print(table)
    for failure in failures[:3]:
        console.print(str(failure), markup=False, highlight=False)


def replay(seed: int, trace: bool, run: Callable[..., object], console: Console) -> int:
    """Run one seed again; with `trace`, print everything that happens in it."""
    echo = (lambda line: console.print(line, markup=False, highlight=False)) if trace else None
    try:
        outcome = run(seed, echo=echo)
    except SimulationFailure as failure:
        console.print(str(failure), markup=False, highlight=False)
        return 1
    console.print(f"seed {seed}: no violation; {outcome}", markup=False, highlight=False)
    return 0


def progress_bar(console: Console) -> Progress:
    """A progress bar that is gone when the work is done."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, TimeRemainingColumn(), console=console, transient=True)


def fresh_seed() -> int:
    """A random number; it is printed, so that a failure can be replayed."""
    return int.from_bytes(os.urandom(4), "little")


RUNS: dict[str, Callable[..., object]] = {
    "regions": run_regions,
    "forwarding": run_forwarding,
    "shares": run_shares,
    "channels": run_channels,
    "hosts": run_hosts,
    "stalls": run_stalls,
    "resume": run_resume,
    "runs": run_several,
    "samples": run_samples,
    "agents": run_agents,
    "probing": run_rounds,
    "failover": run_failover,
}
"""What an option runs, for one seed."""
BATCHES = {
    "hosts": run_host_batch,
    "shares": run_share_batch,
    "channels": run_channel_batch,
    "stalls": run_stall_batch,
    "resume": run_resume_batch,
    "runs": run_several_batch,
    "samples": run_sample_batch,
    "failover": run_failover_batch,
}
"""The same for many seeds of a simulated run."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse, run, show; 1 if there was a violation."""
    parser = argparse.ArgumentParser(prog="python -m ringfold.testing", description=__doc__)
    parser.add_argument("--seeds", type=int, default=100, help="how many seeds to run")
    parser.add_argument("--from", type=int, dest="first", default=None, help="the first seed; else a fresh number")
    parser.add_argument("--seed", type=int, help="run only this one")
    parser.add_argument("--trace", action="store_true", help="with --seed: print every event")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes")
    parser.add_argument("--probing", action="store_true", help="rounds of probing instead of collectives")
    parser.add_argument("--regions", action="store_true", help="rounds of probing with relays")
    parser.add_argument("--iterations", action="store_true", help="schedules of the global iteration over a store")
    parser.add_argument("--agents", action="store_true", help="transport agents of a host and their clients")
    parser.add_argument(
        "--forwarding", action="store_true", help="telemetry among the transport agents of several hosts"
    )
    parser.add_argument("--failover", action="store_true", help="also lose and replace masters")
    parser.add_argument("--stalls", action="store_true", help="also let programs hang, be slow, or be busy")
    parser.add_argument("--resume", action="store_true", help="all peers are killed, and come back")
    parser.add_argument("--runs", action="store_true", help="several runs on the same masters, which are lost, too")
    parser.add_argument("--samples", action="store_true", help="loops with a sampler: every sample once per pass")
    parser.add_argument("--shares", action="store_true", help="fixed shares of paths, which break and come back")
    parser.add_argument("--channels", action="store_true", help="ops are cut into 2 to 4 slices, each with its lanes")
    parser.add_argument(
        "--hosts", action="store_true", help="several peers on each host, and lanes between all members"
    )
    options = parser.parse_args(arguments)
    logging.getLogger("ringfold").addHandler(logging.NullHandler())  # the logs of programs are not shown here
    console = Console(soft_wrap=True)
    if options.iterations:
        return _iterations(options, console)
    if options.seed is not None:
        run = next((run for mode, run in RUNS.items() if getattr(options, mode)), run_seed)
        return replay(options.seed, options.trace, run, console)
    first = fresh_seed() if options.first is None else options.first
    console.print(f"seeds {first} to {first + options.seeds - 1}")
    if options.probing or options.regions:
        rounds = RoundTotal()
        round_batch = run_region_batch if options.regions else run_round_batch
        run_many(first, options.seeds, options.jobs, console, rounds, round_batch)
        show_counts(rounds, "rounds of probing", first, console)
        return 1 if rounds.failures else 0
    if options.agents or options.forwarding:
        agents = AgentTotal()
        agent_batch = run_forwarding_batch if options.forwarding else run_agent_batch
        run_many(first, options.seeds, options.jobs, console, agents, agent_batch)
        show_counts(agents, "transport agents", first, console)
        return 1 if agents.failures else 0
    total = Total()
    batch = next((batch for mode, batch in BATCHES.items() if getattr(options, mode)), run_batch)
    run_many(first, options.seeds, options.jobs, console, total, batch)
    show(total, first, console)
    return 1 if total.failures else 0


def _iterations(options: argparse.Namespace, console: Console) -> int:
    from ringfold.testing import iterating_schedules

    if options.seed is not None:
        return iterating_schedules.replay(options.seed, trace=options.trace, console=console)
    first = fresh_seed() if options.first is None else options.first
    return iterating_schedules.run(first=first, count=options.seeds, jobs=options.jobs, console=console)


if __name__ == "__main__":
    sys.exit(main())
