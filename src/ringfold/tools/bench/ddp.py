"""`ringfold bench ddp`: the time of a training step with averaged gradients, against DDP on gloo in the same run.

Each library has a team of processes of its own; the teams take turns in rounds of some steps, on the same model and
batches. A step is forward, backward and optimizer, on one thread. Its figure is the median over all steps of rank 0.
`alone` is the same step without communication, all ranks at the same time: what a library adds to it is what it does
not hide. The share of communication is judged by gloo's steps, so that it does not depend on Ringfold.
"""

import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.progress import Progress

from ringfold.tools.bench import report as reports
from ringfold.tools.bench.report import Column, Row, microseconds, spread, times
from ringfold.tools.cluster import LocalCluster, Message

WORKER = str(Path(__file__).with_name("ddp_worker.py"))
MODELS = ("300K", "3M", "30M")
START_S = 120.0
ROUND_S = 300.0

COLUMNS = (
    Column("peers", "world"),
    Column("parameters", "model"),
    Column("alone", "alone_median_us", microseconds),
    Column("ringfold", "ringfold_median_us", microseconds),
    Column("p99", "ringfold_p99_us", microseconds),
    Column("gloo", "gloo_median_us", microseconds),
    Column("p99", "gloo_p99_us", microseconds),
    Column("gloo/ours", "gloo_over_ringfold", times),
    Column("communication in gloo's step", "communication_share", lambda value: f"{float(value or 0):.0%}"),
    Column("same bits", "identical", lambda value: "yes" if value else "NO"),
)


def command(
    world: Annotated[str, typer.Option(help="Numbers of peers, comma-separated.")] = "4",
    models: Annotated[str, typer.Option(help=f"Parameters of the models: {', '.join(MODELS)}.")] = "3M,30M",
    steps: Annotated[int, typer.Option(help="Steps of a round.", min=1)] = 20,
    rounds: Annotated[int, typer.Option(help="Turns that the libraries take with each model.", min=1)] = 5,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    check: Annotated[bool, typer.Option("--check", help="Compare with benchmarks/targets.toml.")] = False,
) -> None:
    """Time a PyTorch training step with averaged gradients, against DDP on gloo."""
    if importlib.util.find_spec("torch") is None:
        raise typer.BadParameter("PyTorch is not installed: pip install 'ringfold[torch]'")
    sizes = models.split(",")
    if unknown := sorted(set(sizes) - set(MODELS)):
        raise typer.BadParameter(f"--models knows {', '.join(MODELS)}, not {', '.join(unknown)}")
    figures: list[Row] = []
    worlds = [int(one) for one in world.split(",")]
    with reports.guarded(as_json=as_json) as progress:
        task = progress.add_task("starting", total=len(worlds) * len(sizes) * rounds)
        for peers in worlds:
            with LocalCluster() as cluster:
                progress.update(task, description=f"{peers} peers: starting")
                for library in ("ringfold", "gloo"):
                    start_team(cluster, library, peers)
                for size in sizes:
                    progress.update(task, description=f"{peers} peers, {size} parameters")
                    figures.append(measure(cluster, peers, size, steps, rounds, progress))
    settings: dict[str, object] = {"world": worlds, "models": sizes, "steps": steps, "rounds": rounds}
    result = reports.report("ddp", settings, figures, peers=["ringfold", "gloo"])
    reports.finish(result, COLUMNS, as_json=as_json, against_targets=check)
    if not all(row["identical"] for row in figures):
        raise typer.Exit(1)


def start_team(cluster: LocalCluster, library: str, world: int) -> None:
    env = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    where = str(cluster.directory / "gloo-store") if library == "gloo" else cluster.start_master().address
    names = team(library, world)
    for rank, name in enumerate(names):
        cluster.start(
            name, [sys.executable, "-P", WORKER, library, cluster.address, str(world), str(rank), where], env=env
        )
    cluster.wait_connected(names, START_S)
    cluster.gather(names, START_S)


def team(library: str, world: int) -> list[str]:
    return [f"{library}.{rank}" for rank in range(world)]


def measure(cluster: LocalCluster, world: int, size: str, steps: int, rounds: int, progress: Progress) -> Row:
    durations: dict[str, list[int]] = {"ringfold": [], "gloo": [], "alone": []}
    identical = True
    play(cluster, "ringfold", world, size, 5)
    play(cluster, "gloo", world, size, 5)
    for _ in range(rounds):
        for library in ("ringfold", "gloo"):
            replies = play(cluster, library, world, size, steps)
            durations[library] += replies[0]["durations_ns"]
            durations["alone"] += replies[0]["alone_ns"]
            if library == "ringfold":
                identical = identical and len({reply["digest"] for reply in replies}) == 1
        progress.advance(progress.task_ids[0])
    row: Row = {"world": world, "model": size, "identical": identical}
    for library, values in durations.items():
        row.update(spread(values, f"{library}_"))
    gloo, own, alone = (float(row[f"{one}_median_us"] or 0) for one in ("gloo", "ringfold", "alone"))
    row["gloo_over_ringfold"] = gloo / own
    row["communication_share"] = max(0.0, 1 - alone / gloo)
    return row


def play(cluster: LocalCluster, library: str, world: int, size: str, steps: int) -> "Sequence[Message]":
    names = team(library, world)
    cluster.send(names, {"do": "round", "model": size, "steps": steps, "alone": max(1, steps // 4)})
    replies = cluster.gather(names, ROUND_S)
    return [replies[name] for name in names]
