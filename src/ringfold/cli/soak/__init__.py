"""`ringfold soak`: real processes that are killed, frozen and added without a pause, for as long as one likes.

Read `trainer.py` first: what a peer does, and what it checks at every step. `director.py` is the parent that disturbs
and watches; `growth.py` and `checks.py` judge what came out.
"""

from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rich.progress import Progress

    from ringfold.cli.soak.director import Director, Outcome


def soak(
    minutes: Annotated[float, typer.Option(help="How long to go on.", min=0.1)] = 10.0,
    peers: Annotated[int, typer.Option(help="The most peers at a time.", min=4, max=64)] = 8,
    every_s: Annotated[float, typer.Option(help="Seconds between two disturbances.", min=0.05)] = 2.0,
    state: Annotated[str, typer.Option(help="Bytes of shared state.")] = "16M",
    seed: Annotated[int | None, typer.Option(help="Decides all sizes and draws; a new one each time.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Kill, freeze and add peers while all of them reduce and sync, and check that nothing is lost, hangs or leaks.

    Every peer reduces arrays of random sizes on 8 tags and compares the shared state by hash at every step. Exit code
    1 when a check fails or a peer hangs; the seed is printed.
    """
    from ringfold.cli.bench.report import size_bytes
    from ringfold.cli.output import complaints, console, print_json
    from ringfold.cli.soak.checks import checks
    from ringfold.cli.soak.director import Hang
    from ringfold.runtime.entropy import random_bytes
    from ringfold.runtime.spawn import ChildFailed

    chosen = int.from_bytes(random_bytes(4), "little") if seed is None else seed
    try:
        outcome = _perform(minutes, peers, every_s, size_bytes(state), chosen, quiet=as_json)
    except KeyboardInterrupt:
        complaints.print("interrupted; all processes of the soak are ended")
        raise typer.Exit(130) from None
    except Hang as error:
        from ringfold.cli.status import render

        complaints.print(f"failed (seed {chosen}): {error.name} {error.text}", style="red", markup=False)
        complaints.print(error.log, style="dim", markup=False)
        if error.status is not None:
            complaints.print(render("the master", error.status))
        raise typer.Exit(1) from None
    except ChildFailed as error:
        complaints.print(f"failed (seed {chosen}): {error}", style="red", markup=False, soft_wrap=True)
        raise typer.Exit(1) from None
    found = checks(outcome)
    if as_json:
        print_json({"seed": chosen, "minutes": minutes, "tally": outcome.tally, "checks": [c._asdict() for c in found]})
    else:
        console.print(f"seed {chosen}")
        for check in found:
            mark, colour = ("kept", "green") if check.kept else ("BROKEN", "bold red")
            console.print(f"[{colour}]{mark}[/] {check.promise}: {check.fact}", soft_wrap=True)
    if not all(check.kept for check in found):
        raise typer.Exit(1)


def _perform(minutes: float, peers: int, every_s: float, state_bytes: int, seed: int, *, quiet: bool) -> "Outcome":
    from ringfold.cli.soak.director import Director, of_sessions, shared_memory
    from ringfold.runtime.spawn import Crew

    before = shared_memory()
    with _progress(quiet) as progress, Crew() as crew:
        task = progress.add_task("starting", total=minutes * 60)
        director = Director(crew, peers, every_s, seed, state_bytes)

        def show(seconds: float) -> None:
            progress.update(task, completed=min(seconds, minutes * 60), description=_line(director))

        outcome = director.direct(minutes, show)
    if crew.directory.exists():
        outcome.left_behind.append(str(crew.directory))
    outcome.left_behind += [f"process {found}" for found in of_sessions(director.pids)]
    outcome.left_behind += [f"/dev/shm/{name}" for name in sorted(shared_memory() - before)]
    return outcome


def _line(director: "Director") -> str:
    tally = director.tally
    return (
        f"step {tally.step}, {len(director.peers)} peers, {tally.kills} kills, {tally.freezes} freezes, "
        f"{tally.joins} joins"
    )


def _progress(quiet: bool) -> "Progress":
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    return Progress(*columns, console=Console(stderr=True), transient=True, disable=quiet)
