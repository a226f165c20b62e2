"""`ringfold demo`: a training run that survives, on one machine, in well under a minute.

Read `trainer.py` first: it is what a user of Ringfold writes. `model.py` is what it trains, `director.py` is the parent
that kills, freezes and adds peers, `outcome.py` checks the result, and `screen.py` shows the progress.
"""

from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from ringfold.tools.demo.outcome import DemoOutcome
    from ringfold.tools.demo.screen import Quiet


def demo(
    peers: Annotated[int, typer.Option(help="Peers that begin the run.", min=3, max=16)] = 4,
    steps: Annotated[int | None, typer.Option(help="Training steps; 1500, or 240 with --fast.", min=100)] = None,
    seed: Annotated[int, typer.Option(help="Decides the first weights and all batches.", min=0)] = 1,
    fast: Annotated[bool, typer.Option("--fast", help="A short run.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Train a small model on several peers while some are killed, frozen and added.

    The model learns to continue the text of Python's manual. One peer is killed inside an all-reduce, one is frozen
    until it is evicted and then woken, one joins in the middle. At the end all peers must hold the same bits, and the
    loss must be as good as that of an undisturbed training. Exit code 1 when a check fails.
    """
    from ringfold.cli.output import console, error_console, print_json
    from ringfold.tools.cluster import ProcessFailed
    from ringfold.tools.demo import outcome as results
    from ringfold.tools.demo.director import DemoFailed
    from ringfold.tools.demo.screen import Plain, Quiet, Terminal

    screen = Quiet() if as_json else Terminal(console) if console.is_terminal else Plain(console)
    try:
        outcome = _perform(screen, peers, steps or (240 if fast else 1_500), seed)
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
    if broken := [check.promise for check in checks if not check.kept]:
        error_console.print(f"failed: {'; '.join(broken)}", style="bold red")
        raise typer.Exit(1)


def _perform(screen: "Quiet", peers: int, steps: int, seed: int) -> "DemoOutcome":
    """The disturbed run, and after it the same training without disturbance, to compare with."""
    from ringfold.tools.cluster import LocalCluster
    from ringfold.tools.demo.director import DemoDirector

    with LocalCluster() as cluster:
        director = DemoDirector(cluster, peers, steps, seed)
        with screen.watching(director):
            outcome = director.direct()
        screen.follow(director.compare(), steps, "now the same training in one process, undisturbed")
    return outcome
