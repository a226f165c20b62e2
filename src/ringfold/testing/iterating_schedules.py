"""Schedules for the global iteration, drawn from a seed; and one crash at every operation.

Half of the drawn schedules have one life end at one store operation, drawn from all that a rank makes in its first
seconds, before or after it is carried out; `every_crash` goes through all of them for a small schedule. The rest of a
schedule is drawn freely. A store that goes back is a schedule of its own: a life that is cut off all the while cannot
know.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from random import Random

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from ringfold.iteration.record import Quorum, Rules
from ringfold.testing.iterating import IterationSchedule, Kind, Moment, ScheduleResult, Simulated, Trouble
from ringfold.testing.scheduler import SimulationFailure

_WITHIN_MS = 9_000
_OPERATIONS = 60
"""About what a rank makes of them in its first seconds."""


def draw(seed: int) -> IterationSchedule:
    """The schedule of a seed."""
    rng = Random(f"{seed}/story")
    world = rng.choice((1, 2, 2, 3, 3, 3, 4, 5))
    quorum: Quorum | None = rng.choice((None, None, "majority"))
    rules = Rules(world, rng.choice((1, 1, rng.randint(1, world))), quorum)
    goes_back = rng.random() < 0.12
    moments: tuple[Moment, Moment] = ("crash", "crash after")
    crash_at = (rng.randrange(world), rng.randint(1, _OPERATIONS), rng.choice(moments))
    spare = 0 if quorum else world - rules.min_ranks
    counts = Random(f"{seed}/counts").random()
    stay_dead = tuple(sorted(rng.sample(range(world), rng.randint(0, spare)))) if rng.random() < 0.3 else ()
    return IterationSchedule(
        seed=seed,
        rules=rules,
        can_list=rng.random() < 0.6,
        has_leases=rng.random() < 0.4,
        counts_writes=counts < 0.4,
        has_counters=0.4 <= counts < 0.8,
        troubles=_going_back(rng) if goes_back else _with_leaders_lost(seed, _troubles(rng, world)),
        crash_at=crash_at if rng.random() < 0.5 else None,
        losses=rng.choice((0.0, 0.0, 0.01, 0.05)),
        quiet_ms=rng.randint(2_000, 12_000),
        stay_dead=() if len(stay_dead) == world else stay_dead,
        slow=rng.choice((0.0, 0.02, 0.1)),
    )


def _troubles(rng: Random, world: int) -> tuple[Trouble, ...]:
    return tuple(
        sorted((_trouble(rng, world) for _ in range(rng.choice((0, 1, 1, 2, 3, 5)))), key=lambda trouble: trouble.at_ms)
    )


def _with_leaders_lost(seed: int, troubles: tuple[Trouble, ...]) -> tuple[Trouble, ...]:
    """Besides, in every other schedule, a store with several members loses its leader, up to three times."""
    rng = Random(f"{seed}/leaders")
    count = rng.choice((0, 0, 0, 1, 2, 3))
    lost = [
        Trouble(kind="leader", at_ms=rng.randrange(_WITHIN_MS), for_ms=rng.choice((50, 500, 3_000)))
        for _ in range(count)
    ]
    return tuple(sorted((*troubles, *lost), key=lambda trouble: trouble.at_ms))


def _trouble(rng: Random, world: int) -> Trouble:
    kinds: tuple[Kind, ...] = ("crash", "crash", "pause", "cut", "twin", "leave", "jump", "outage")
    kind = rng.choice(kinds)
    one = (rng.randrange(world),)
    some = tuple(sorted(rng.sample(range(world), rng.randint(1, world))))
    ranks = some if kind == "cut" or rng.random() < 0.2 else one
    return Trouble(kind=kind, at_ms=rng.randrange(_WITHIN_MS), ranks=ranks, for_ms=rng.choice((200, 2_000, 9_000)))


def _going_back(rng: Random) -> tuple[Trouble, ...]:
    """The store is emptied, or put back to how it was some seconds ago; the ranks are otherwise left alone."""
    if rng.random() < 0.5:
        return (Trouble(kind="wipe", at_ms=rng.randrange(500, _WITHIN_MS)),)
    return (Trouble(kind="restore", at_ms=rng.randrange(300, _WITHIN_MS // 2), for_ms=rng.randrange(2_500, 5_000)),)


def run_schedule(seed: int, echo: Callable[[str], None] | None = None) -> ScheduleResult:
    """Run the schedule of a seed; raises SimulationFailure on a violation."""
    return Simulated(draw(seed), echo=echo).run()


def every_crash(schedule: IterationSchedule) -> Iterator[IterationSchedule]:
    """The same schedule again and again, with a crash at every operation of every rank, before and after it."""
    calm = Simulated(schedule)
    calm.run()
    for rank, count in sorted(calm.operations.items()):
        for number in range(1, count + 1):
            yield _with_crash(schedule, rank, number, "crash")
            yield _with_crash(schedule, rank, number, "crash after")


def _with_crash(schedule: IterationSchedule, rank: int, number: int, moment: Moment) -> IterationSchedule:
    return replace(schedule, crash_at=(rank, number, moment))


# Many schedules at once: `python -m ringfold.testing --iterations`

_BATCH = 25


def run(*, first: int, count: int, jobs: int, console: Console) -> int:
    """Run many schedules and show what they came to; 1 if something is wrong."""
    counts: Counter[str] = Counter()
    failures: list[SimulationFailure] = []
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("schedules", total=count)
        for outcomes in _batches(range(first, first + count), jobs):
            progress.advance(task, len(outcomes))
            for outcome in outcomes:
                if isinstance(outcome, SimulationFailure):
                    failures.append(outcome)
                    console.print(f"[red]violation[/red] {escape(outcome.text)} [dim](seed {outcome.seed})[/dim]")
                else:
                    _count(counts, outcome)
    table = Table(title=f"{count} schedules of the global iteration from {first}", show_header=False)
    for what, number in sorted(counts.items()):
        table.add_row(what, f"{number:,}")
    table.add_row("violations", f"[red]{len(failures)}[/red]" if failures else "[green]0[/green]")
    console.print(table)
    for failure in failures[:3]:
        console.print(str(failure), markup=False, highlight=False)
    return 1 if failures else 0


def replay(seed: int, *, trace: bool, console: Console) -> int:
    """Run one schedule again."""
    echo = (lambda line: console.print(line, markup=False, highlight=False)) if trace else None
    console.print(str(draw(seed)), markup=False, highlight=False)
    try:
        console.print(str(run_schedule(seed, echo)), markup=False, highlight=False)
    except SimulationFailure as failure:
        console.print(str(failure), markup=False, highlight=False)
        return 1
    return 0


def run_batch(seeds: Sequence[int]) -> list[ScheduleResult | SimulationFailure]:
    """Some schedules; a violation is an outcome too."""
    outcomes: list[ScheduleResult | SimulationFailure] = []
    for seed in seeds:
        try:
            outcomes.append(run_schedule(seed))
        except SimulationFailure as failure:
            outcomes.append(failure)
    return outcomes


def _batches(seeds: range, jobs: int) -> Iterator[list[ScheduleResult | SimulationFailure]]:
    batches = [seeds[start : start + _BATCH] for start in range(0, len(seeds), _BATCH)]
    if jobs == 1:
        yield from map(run_batch, batches)
        return
    with ProcessPoolExecutor(jobs) as pool:
        yield from pool.map(run_batch, batches)


def _count(counts: Counter[str], result: ScheduleResult) -> None:
    counts["iterations"] += result.iterations + 1
    counts["lives"] += result.lives
    counts["store operations"] += result.operations
    counts["virtual seconds"] += round(result.virtual_ms / 1_000)
    counts.update(f"trouble: {kind}" for kind in result.troubles)
