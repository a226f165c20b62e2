"""Many stories of the global iteration at once: what `python -m ringfold.testing --iterations` does."""

from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from ringfold.testing.iterating_parts import Result
from ringfold.testing.iterating_stories import BUGS, draw, find, run_story
from ringfold.testing.scheduler import SimulationFailure

_BATCH = 25


def run(*, first: int, count: int, jobs: int, planted: bool, console: Console) -> int:
    """Run many stories, show what they came to, and look for the planted bugs; 1 if something is wrong."""
    counts: Counter[str] = Counter()
    failures: list[SimulationFailure] = []
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("stories", total=count)
        for outcomes in _batches(range(first, first + count), jobs):
            progress.advance(task, len(outcomes))
            for outcome in outcomes:
                if isinstance(outcome, SimulationFailure):
                    failures.append(outcome)
                    console.print(f"[red]violation[/red] {outcome.text} [dim](seed {outcome.seed})[/dim]")
                else:
                    _count(counts, outcome)
    table = Table(title=f"{count} stories of the global iteration from {first}", show_header=False)
    for what, number in sorted(counts.items()):
        table.add_row(what, f"{number:,}")
    table.add_row("violations", f"[red]{len(failures)}[/red]" if failures else "[green]0[/green]")
    console.print(table)
    for failure in failures[:3]:
        console.print(str(failure), markup=False, highlight=False)
    hidden = _plant(first, jobs, console) if planted else 0
    return 1 if failures or hidden else 0


def replay(seed: int, *, trace: bool, console: Console) -> int:
    """Run one story again."""
    echo = (lambda line: console.print(line, markup=False, highlight=False)) if trace else None
    console.print(str(draw(seed)), markup=False, highlight=False)
    try:
        console.print(str(run_story(seed, echo)), markup=False, highlight=False)
    except SimulationFailure as failure:
        console.print(str(failure), markup=False, highlight=False)
        return 1
    return 0


def run_batch(seeds: Sequence[int]) -> list[Result | SimulationFailure]:
    """Some stories; a broken promise is an outcome too."""
    outcomes: list[Result | SimulationFailure] = []
    for seed in seeds:
        try:
            outcomes.append(run_story(seed))
        except SimulationFailure as failure:
            outcomes.append(failure)
    return outcomes


def _batches(seeds: range, jobs: int) -> Iterator[list[Result | SimulationFailure]]:
    batches = [seeds[start : start + _BATCH] for start in range(0, len(seeds), _BATCH)]
    if jobs == 1:
        yield from map(run_batch, batches)
        return
    with ProcessPoolExecutor(jobs) as pool:
        yield from pool.map(run_batch, batches)


def _count(counts: Counter[str], result: Result) -> None:
    counts["iterations"] += result.iterations + 1
    counts["lives"] += result.lives
    counts["store operations"] += result.operations
    counts["virtual seconds"] += round(result.virtual_ms / 1_000)
    counts.update(f"trouble: {kind}" for kind in result.troubles)


def _plant(first: int, jobs: int, console: Console, most: int = 1_000) -> int:
    """How many planted bugs stay hidden."""
    table = Table("planted bug", "found by seed", "after", "as")
    hidden = 0
    with ProcessPoolExecutor(jobs) as pool:
        found = pool.map(find, BUGS, [first] * len(BUGS), [most] * len(BUGS))
        for name, failure in zip(BUGS, found, strict=True):
            if failure is None:
                hidden += 1
                table.add_row(name, "[red]not found[/red]", f"{most} stories", "")
            else:
                table.add_row(name, str(failure.seed), f"{failure.seed - first + 1} stories", failure.text)
    console.print(table)
    return hidden
