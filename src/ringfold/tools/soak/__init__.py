"""`ringfold soak`: real processes that are killed, frozen and added without a pause.

There are three parts.

* *Peers* of a run and its two masters: read `peer.py` first, a peer and what it checks at every step; `peers.py`
  is the parent that disturbs and watches, `masters.py` disturbs the masters, and `epochs.py` compares all peers' logs.
* *Ranks* that agree through stores (`--iterations`): `rank.py` and `iterations.py`.
* *Members* that fail in other ways than by dying (`--members`): `member.py` and `members.py`.

The first two draw from a list of `faults.py`. `checks.py` is shared: checks, growth of memory, descriptors and
threads, hangs, and what is left behind.
"""

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from ringfold.tools.soak.checks import SoakCheck

STORES = "sqlite,redis,etcd"


def soak(
    minutes: Annotated[float, typer.Option(help="How long to run.", min=0.1)] = 10.0,
    peers: Annotated[int, typer.Option(help="The most peers at a time.", min=4, max=64)] = 8,
    every_s: Annotated[float, typer.Option(help="Seconds between two disturbances.", min=0.05)] = 2.0,
    state: Annotated[str, typer.Option(help="Bytes of shared state.")] = "16M",
    iterations: Annotated[
        bool, typer.Option("--iterations", help="Ranks that agree through stores, no peers.")
    ] = False,
    members: Annotated[
        bool, typer.Option("--members", help="Members that fail, and a second run beside theirs.")
    ] = False,
    store: Annotated[str, typer.Option(help="With --iterations: kinds of store, with commas.")] = STORES,
    ranks: Annotated[int, typer.Option(help="With --iterations: ranks of each store.", min=3, max=64)] = 4,
    seed: Annotated[int | None, typer.Option(help="Decides all sizes and draws; a new one each time.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Kill, freeze and add peers while all of them reduce and sync, and check that nothing is lost, hangs or leaks.

    Every peer reduces arrays of random sizes on 8 tags and compares the shared state by hash at every step. Some share
    memory, others have TCP, with one thread or several; a peer that joins again changes that. There are
    two masters, a leader and a standby: the leader is killed, or frozen for longer than its lease, or both are killed,
    and the peers' logs must have one history of epochs. With --iterations, ranks and the stores through which they
    agree are killed, frozen and started again. With --members, members of a run pass an array too many, hang in their
    loader, skip a step, diverge, get SIGTERM, or are all killed; a second run on the same master must not be affected,
    and replaying what was committed must give the same weights. Exit code 1 when a check fails or a process hangs;
    the seed is printed.
    """
    from ringfold.runtime.clock import random_bytes
    from ringfold.tools.bench.report import size_bytes

    chosen = int.from_bytes(random_bytes(4), "little") if seed is None else seed
    if members:
        _finish(chosen, minutes, lambda: _misbehave(minutes, quiet=as_json), as_json)
    elif iterations:
        kinds = _kinds(store)
        _finish(chosen, minutes, lambda: _iterate(minutes, kinds, ranks, every_s, chosen, quiet=as_json), as_json)
    else:
        size = size_bytes(state)
        _finish(chosen, minutes, lambda: _reduce(minutes, peers, every_s, size, chosen, quiet=as_json), as_json)


def _kinds(text: str) -> list[str]:
    from ringfold.cli.output import error_console
    from ringfold.tools.stores import KINDS, missing

    kinds = [kind.strip() for kind in text.split(",")]
    # A TCPStore is gone with its process, and could not be started again.
    if unknown := [kind for kind in kinds if kind not in KINDS or kind == "tcp"]:
        raise typer.BadParameter(f"{unknown[0]!r} is no kind of store for a soak; there are {STORES}")
    for kind in kinds:
        if why := missing(kind):
            error_console.print(f"{kind} is left out: it {why}", markup=False)
    return [kind for kind in kinds if not missing(kind)]


def _finish(seed: int, minutes: float, perform: Callable[[], tuple[object, "list[SoakCheck]"]], as_json: bool) -> None:
    """Run a part, print its checks, and exit with 1 if one failed."""
    from rich.text import Text

    from ringfold.cli.output import console, error_console, print_json
    from ringfold.tools.cluster import ProcessFailed
    from ringfold.tools.soak.checks import Hang

    try:
        tally, found = perform()
    except KeyboardInterrupt:
        error_console.print("interrupted; all processes of the soak are ended")
        raise typer.Exit(130) from None
    except Hang as error:
        from ringfold.cli.status import render

        error_console.print(f"failed (seed {seed}): {error.name} {error.text}", style="red", markup=False)
        error_console.print(error.log, style="dim", markup=False)
        if error.status is not None:
            error_console.print(render("the master", error.status))
        raise typer.Exit(1) from None
    except ProcessFailed as error:
        error_console.print(f"failed (seed {seed}): {error}", style="red", markup=False, soft_wrap=True)
        raise typer.Exit(1) from None
    if as_json:
        print_json({"seed": seed, "minutes": minutes, "tally": tally, "checks": [c._asdict() for c in found]})
    else:
        console.print(f"seed {seed}")
        for check in found:
            mark, colour = ("kept", "green") if check.kept else ("BROKEN", "bold red")
            console.print(Text.assemble((mark, colour), f" {check.promise}: {check.fact}"), soft_wrap=True)
    if not all(check.kept for check in found):
        raise typer.Exit(1)


def _reduce(
    minutes: float, peers: int, every_s: float, state_bytes: int, seed: int, *, quiet: bool
) -> tuple[object, "list[SoakCheck]"]:
    """The part with peers."""
    from ringfold.tools.cluster import LocalCluster
    from ringfold.tools.soak.checks import left_by, shared_memory
    from ringfold.tools.soak.peers import PeerSoak, checks

    before = shared_memory()
    with _progress(minutes, quiet) as show, LocalCluster() as cluster:
        director = PeerSoak(cluster, peers, every_s, seed, state_bytes)
        tally = director.tally

        def line() -> str:
            masters = tally.masters_killed + tally.masters_frozen + tally.both_masters_killed
            counts = f"{tally.kills} kills, {tally.freezes} freezes, {tally.joins} joins, {masters} faults of masters"
            return f"step {tally.step}, {len(director.peers)} peers, {counts}"

        outcome = director.direct(minutes, lambda seconds: show(seconds, line()))
    outcome.left_behind += left_by(cluster, director.pids, before)
    return tally, checks(outcome)


def _iterate(
    minutes: float, kinds: list[str], ranks: int, every_s: float, seed: int, *, quiet: bool
) -> tuple[object, "list[SoakCheck]"]:
    """The part with ranks and stores."""
    from ringfold.tools.cluster import LocalCluster
    from ringfold.tools.soak.checks import left_by, shared_memory
    from ringfold.tools.soak.iterations import IterationSoak, checks, histories

    before = shared_memory()
    with _progress(minutes, quiet) as show, LocalCluster() as cluster:
        director = IterationSoak(cluster, kinds, ranks, every_s, seed)

        def line() -> str:
            numbers = ", ".join(f"{world.kind} {world.number}" for world in director.worlds)
            return f"{numbers}; {director.faults.counts.total()} faults"

        outcome = director.direct(minutes, lambda seconds: show(seconds, line()))
    outcome.left_behind += left_by(cluster, director.pids, before)
    iterations = {kind: history.last + 1 for kind, history in histories(outcome).items()}
    tally = {"iterations": iterations, "faults": outcome.faults, "longest_silence_s": outcome.longest_silence_s}
    return tally, checks(outcome)


def _misbehave(minutes: float, *, quiet: bool) -> tuple[object, "list[SoakCheck]"]:
    """The part with members that fail."""
    from ringfold.tools.cluster import LocalCluster
    from ringfold.tools.soak.checks import left_by, shared_memory
    from ringfold.tools.soak.members import MemberSoak, checks

    before = shared_memory()
    with _progress(minutes, quiet) as show, LocalCluster() as cluster:
        director = MemberSoak(cluster)

        def line() -> str:
            steps = {slot.run: slot.step for slot in director.slots.values()}
            return f"{', '.join(f'{run} at step {step}' for run, step in steps.items())}; {director.scene}"

        outcome = director.direct(minutes, lambda seconds: show(seconds, line()))
    outcome.left_behind += left_by(cluster, director.pids, before)
    tally = {"scenes": outcome.scenes, "steps": outcome.steps, "lost": outcome.lost}
    return tally, checks(outcome)


def _progress(minutes: float, quiet: bool) -> "AbstractContextManager[Callable[[float, str], None]]":
    """A progress bar: called with the seconds that have passed and the text to show."""
    from contextlib import contextmanager

    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    @contextmanager
    def bar() -> Iterator[Callable[[float, str], None]]:
        columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), TimeRemainingColumn())
        with Progress(*columns, console=Console(stderr=True), transient=True, disable=quiet) as progress:
            task = progress.add_task("starting", total=minutes * 60)
            yield lambda seconds, text: progress.update(task, completed=min(seconds, minutes * 60), description=text)

    return bar()
