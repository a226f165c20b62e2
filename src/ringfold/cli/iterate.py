"""`ringfold iterate`: run a command per global iteration, or show the state of the ranks."""

from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    import subprocess

    from rich.console import Group
    from rich.text import Text

    from ringfold.iteration.shell import GlobalIteration, Observer, RankView, View
    from ringfold.store.client import StoreClient

POLL_S = 0.5
"""How often the rank of a running command is checked for an error."""
GRACE_S = 5.0
"""How long a command may take to end after Ctrl-C, and again after SIGTERM."""


def iterate(
    store: Annotated[str, typer.Option(help="Where the ranks agree: sqlite:///PATH, etcd://, redis://, tcp://.")],
    command: Annotated[
        list[str] | None, typer.Argument(help="What to run in each iteration, after `--`.", show_default=False)
    ] = None,
    rank: Annotated[int | None, typer.Option(help="The rank of this process, from 0.", show_default=False)] = None,
    world: Annotated[int | None, typer.Option(help="How many ranks there are.", show_default=False)] = None,
    until: Annotated[int | None, typer.Option(help="End before this iteration.", show_default=False)] = None,
    min_ranks: Annotated[int, typer.Option(help="How many ranks an iteration needs.", min=1)] = 1,
    majority: Annotated[
        bool, typer.Option("--majority", help="Go on only with more than half of the ranks of the last iteration.")
    ] = False,
    heartbeat_s: Annotated[float, typer.Option(help="Interval of heartbeats.")] = 5.0,
    inactive_after_s: Annotated[float, typer.Option(help="Silence after which a rank is inactive.")] = 30.0,
    timeout_s: Annotated[float, typer.Option(help="How long to wait for the other ranks.")] = 600.0,
    keep_going: Annotated[bool, typer.Option("--keep-going", help="Continue after a failed command.")] = False,
    watch: Annotated[bool, typer.Option("--watch", help="Show the state of the ranks, until Ctrl-C.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Show the state of the ranks, as one JSON object.")] = False,
    every_ms: Annotated[int, typer.Option(help="The interval of --watch.", min=50)] = 500,
    look_s: Annotated[float, typer.Option(help="How long --json observes first, for silent ranks.", min=0)] = 0.0,
    name: Annotated[str, typer.Option(help="Which global iteration of the store.")] = "iteration",
) -> None:
    """Run a command per global iteration, or show the state of the ranks.

    With a command, this process is one rank: it runs the command once in every iteration, and the next iteration begins
    when the commands of all active ranks have ended. The command has RINGFOLD_ITERATION, RINGFOLD_RANK,
    RINGFOLD_WORLD, RINGFOLD_MEMBERS, RINGFOLD_MISSED and RINGFOLD_FENCE in its environment. If it fails, this rank ends
    with its exit code.

    Without a command it shows a global iteration: once, as JSON (--json), or repeatedly (--watch).
    """
    from ringfold.errors import UsageError
    from ringfold.iteration.shell import GlobalIteration, Observer
    from ringfold.store import open_store

    if watch + as_json + bool(command) > 1:
        raise UsageError("give only one of these: a command, --watch, or --json")
    with open_store(store) as opened:
        if not command:
            observer = Observer(opened, name=name, heartbeat_s=heartbeat_s, inactive_after_s=inactive_after_s)
            return _print(observer, look_s, every_ms) if as_json else _show(opened, observer, watch, every_ms)
        if rank is None or world is None:
            raise UsageError("a command runs as one rank of several: give --rank and --world")
        iterations = GlobalIteration(
            opened,
            rank,
            world,
            heartbeat_s=heartbeat_s,
            inactive_after_s=inactive_after_s,
            min_ranks=min_ranks,
            quorum="majority" if majority else None,
            timeout_s=timeout_s,
            until=until,
            name=name,
        )
        code = _run(iterations, world, command, keep_going=keep_going)
    if code:
        raise typer.Exit(code)


def _run(iterations: "GlobalIteration", world: int, command: list[str], *, keep_going: bool) -> int:
    """Run the command in every iteration; return the exit code."""
    from ringfold.cli.output import error_console
    from ringfold.runtime.process import term_is_exit

    try:
        with term_is_exit(), iterations:
            for number in iterations:
                ranks = ", ".join(map(str, iterations.members))
                missed = f", {iterations.missed} missed" if iterations.missed else ""
                error_console.print(f"iteration {number}, ranks {ranks}{missed}", style="dim", soft_wrap=True)
                code = _run_once(iterations, world, number, command)
                if code and not keep_going:
                    error_console.print(f"the command ended with {code} in iteration {number}", style="red")
                    return code
    except KeyboardInterrupt:
        error_console.print("interrupted; the rank has left", style="dim")
        return 130
    return 0


def _run_once(iterations: "GlobalIteration", world: int, number: int, command: list[str]) -> int:
    """Run the command once; return its exit code, 128 + n after signal n."""
    import os
    import subprocess

    from ringfold.errors import UsageError

    facts = {
        "RINGFOLD_ITERATION": number,
        "RINGFOLD_RANK": iterations.rank,
        "RINGFOLD_WORLD": world,
        "RINGFOLD_MEMBERS": ",".join(map(str, iterations.members)),
        "RINGFOLD_MISSED": iterations.missed,
        "RINGFOLD_FENCE": iterations.fence,
    }
    try:
        child = subprocess.Popen(command, env={**os.environ, **{key: str(fact) for key, fact in facts.items()}})
    except OSError as error:
        raise UsageError(f"cannot run {command[0]!r}: {error}") from error
    try:
        while iterations.error is None:
            try:
                code = child.wait(POLL_S)
            except subprocess.TimeoutExpired:
                continue
            return code if code >= 0 else 128 - code
        raise iterations.error
    except BaseException as error:
        # The terminal has sent Ctrl-C to the command, too.
        _end(child, GRACE_S if isinstance(error, KeyboardInterrupt) else 0)
        raise


def _end(child: "subprocess.Popen[bytes]", grace_s: float) -> None:
    import subprocess

    for stop in (child.terminate, child.kill):
        try:
            child.wait(grace_s)
            return
        except subprocess.TimeoutExpired:
            stop()
            grace_s = GRACE_S
    child.wait()


def _print(observer: "Observer", look_s: float, every_ms: int) -> None:
    """One JSON object; null when no rank has registered yet."""
    from ringfold.cli.output import print_json
    from ringfold.runtime import clock, threads

    end_ns = clock.monotonic_ns() + round(look_s * 1e9)
    view = observer.look()
    while clock.monotonic_ns() < end_ns:
        threads.Event().wait(every_ms / 1000)
        view = observer.look()
    print_json(view)


def _show(store: "StoreClient", observer: "Observer", watch: bool, every_ms: int) -> None:
    from rich.live import Live

    from ringfold.cli.output import console
    from ringfold.runtime import threads

    if not watch:
        console.print(render(store.name, observer.look()))
        return
    try:
        with Live(console=console, auto_refresh=False) as live:
            while True:
                live.update(render(store.name, observer.look()), refresh=True)
                threads.Event().wait(every_ms / 1000)
    except KeyboardInterrupt:
        return


def render(store: str, view: "View | None") -> "Group | Text":
    """How the ranks stand, for a terminal."""
    from rich.console import Group
    from rich.text import Text

    from ringfold.cli.output import table

    if view is None:
        return Text(f"{store}: no rank has registered yet")
    rules = view.rules
    quorum = ", majority" if rules.quorum else ""
    head = "no iteration yet" if view.iteration < 0 else f"iteration {view.iteration}, won by rank {view.winner}"
    return Group(
        Text(f"{store}: {head}; {len(view.ranks)} of {rules.world} ranks, at least {rules.min_ranks}{quorum}"),
        Text(),
        table("ranks", ["rank", "state", "last iteration", "silent for", "incarnation"], map(_row, view.ranks)),
        Text(),
        Text(view.reason, style="yellow" if view.waiting_for else "dim"),
    )


def _row(rank: "RankView") -> list["str | Text"]:
    from rich.text import Text

    from ringfold.cli.output import duration

    style = {"INACTIVE": "yellow", "LEFT": "dim", "READY": "green"}.get(rank.state, "")
    silent = "" if rank.silent_s is None else duration(1000 * rank.silent_s)
    last = "" if rank.last < 0 else str(rank.last)
    return [str(rank.rank), Text(rank.state, style=style), last, silent, rank.incarnation[:8]]
