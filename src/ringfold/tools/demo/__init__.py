"""`ringfold demo`: a training run that survives, on one machine, in well under a minute.

Read `trainer.py` first: it is what a user of Ringfold writes. `model.py` is what it trains, `director.py` is the parent
that kills, freezes and adds peers, `outcome.py` checks the result, `screen.py` shows the progress, and `views.py`
writes the report and the trace of the run.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from ringfold.tools.demo.outcome import DemoOutcome
    from ringfold.tools.demo.screen import Quiet


def demo(
    peers: Annotated[int, typer.Option(help="Peers that begin the run.", min=3, max=16)] = 4,
    steps: Annotated[int | None, typer.Option(help="Training steps; 1500, or 240 with --fast.", min=100)] = None,
    seed: Annotated[int, typer.Option(help="Decides the first weights and all batches.", min=0)] = 1,
    events: Annotated[
        Path | None,
        typer.Option(
            help="Directory for the events, the report and the trace of the run; it must be empty. Without it: a new "
            "one below ~/.local/state/ringfold/demo.",
        ),
    ] = None,
    fast: Annotated[bool, typer.Option("--fast", help="A short run.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Train a small model on several peers while some are killed, frozen and added.

    The model learns to continue the text of Python's manual. One peer is killed inside an all-reduce, one is frozen
    until it is evicted and then woken, one joins in the middle. At the end all peers must hold the same bits, and the
    loss must be as good as that of an undisturbed training. Exit code 1 when a check fails.

    A dashboard shows the run while it goes on, if the extra `dashboard` is installed. All events are recorded, and a
    report and a trace of them are written at the end.
    """
    from ringfold.cli.output import console, error_console, print_json
    from ringfold.tools.cluster import ProcessFailed
    from ringfold.tools.demo import outcome as results
    from ringfold.tools.demo.director import DemoFailed
    from ringfold.tools.demo.screen import Plain, Quiet, Terminal
    from ringfold.tools.demo.views import new_directory

    screen = Quiet() if as_json else Terminal(console) if console.is_terminal else Plain(console)
    try:
        outcome = _perform(screen, new_directory(events), peers, steps or (240 if fast else 1_500), seed)
    except (DemoFailed, ProcessFailed) as error:
        error_console.print(f"the demo failed: {error}", style="red", markup=False, soft_wrap=True)
        raise typer.Exit(1) from None
    except KeyboardInterrupt:
        error_console.print("interrupted; all processes of the demo are ended")
        raise typer.Exit(130) from None
    checks = results.checks(outcome)
    if as_json:
        print_json(results.as_json(outcome, checks))
    else:
        console.print(results.as_text(outcome, checks))
        console.print("\nTo look at", style="bold")
        for what, where in outcome.views.items():
            # Never folded, so that it can be copied.
            console.print(f"{what:<12}  {where}", soft_wrap=True)
    if broken := [check.promise for check in checks if not check.kept]:
        error_console.print(f"failed: {'; '.join(broken)}", style="bold red")
        raise typer.Exit(1)


def _perform(screen: "Quiet", events: Path, peers: int, steps: int, seed: int) -> "DemoOutcome":
    """The disturbed run, and after it the same training without disturbance, to compare with."""
    from ringfold.tools.cluster import LocalCluster
    from ringfold.tools.demo.director import DemoDirector
    from ringfold.tools.demo.views import write_views

    with LocalCluster() as cluster:
        director = DemoDirector(cluster, events, peers, steps, seed)
        with screen.watching(director):
            outcome = director.direct()
        screen.follow(director.compare(), steps, "now the same training in one process, undisturbed")
    outcome.views = write_views(events)
    return outcome
