"""`ringfold bench gpu`: what CUDA tensors cost beside tensors in host memory, and what a backward pass hides of it.

The peers are processes that share one GPU. So they also share its link to the host, which peers with a GPU each do not:
what is measured here is the worst case. For each transport there is one team of peers.

- `op`: an in-place all-reduce of one tensor. The peers do rounds of ops on CUDA tensors and on CPU tensors by turns. An
  op is timed from the call, with an idle device, until the device has the result; the figure is the median of rank 0.
  `cuda_speed` is the time on CPU tensors over that on CUDA tensors.
- `overlap`: passes (forward and backward) of a model that `DataParallel` wraps. `alone` has no communication, and
  `communication` reduces tensors as the buckets are, without a pass. Of the communication, `hidden` is the share that
  does not make a step longer: 1 - (step - alone) / communication, of medians. The batch is the smallest power of two
  with which the *backward* pass, about two thirds of a pass, takes at least `--compute` times the communication.
"""

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import msgspec
import numpy as np
import typer
from rich.progress import Progress

from ringfold.tools.bench import report as reports
from ringfold.tools.bench.allreduce import TRANSPORTS
from ringfold.tools.bench.report import Column, Row, Sheet, microseconds, size_bytes, size_text, spread
from ringfold.tools.bench.targets import Value
from ringfold.tools.cluster import LocalCluster, Message

WORKER = str(Path(__file__).with_name("gpu_worker.py"))
DEVICES = ("cuda", "cpu")
START_S = 180.0
ROUND_S = 300.0
MAX_ITERATIONS = 2_000
FEWEST_ITERATIONS = 7
MAX_BATCH = 1 << 17
LAYER_BYTES = 16 << 20
"""Of a model's layer, and of a bucket."""
BACKWARD = 2 / 3
"""The share of a pass that is its backward pass: it has two products of matrices for each one of the forward pass."""


def share(value: Value) -> str:
    assert isinstance(value, int | float)
    return f"{value:.0%}"


OP_COLUMNS = (
    Column("peers", "world"),
    Column("by", "transport"),
    Column("size", "size_bytes", size_text),
    Column("CPU tensor", "cpu_median_us", microseconds),
    Column("p99", "cpu_p99_us", microseconds),
    Column("CUDA tensor", "cuda_median_us", microseconds),
    Column("p99", "cuda_p99_us", microseconds),
    Column("speed on CUDA", "cuda_speed", share),
    Column("right", "verified", lambda value: "yes" if value else "NO"),
)
OVERLAP_COLUMNS = (
    Column("peers", "world"),
    Column("by", "transport"),
    Column("gradients", "size_bytes", size_text),
    Column("batch", "batch"),
    Column("pass alone", "alone_median_us", microseconds),
    Column("communication alone", "communication_median_us", microseconds),
    Column("both", "step_median_us", microseconds),
    Column("backward/communication", "backward_over_communication", reports.times),
    Column("hidden", "hidden", share),
)


class GpuPlan(msgspec.Struct, frozen=True):
    """What is measured, and for how long."""

    peers: int
    sizes: list[int]
    transports: list[str]
    rounds: int
    min_time_s: float
    layers: int
    compute: float
    steps: int
    device: str = "cuda"


def command(
    peers: Annotated[int, typer.Option(help="Peers, all on one GPU.", min=2)] = 2,
    sizes: Annotated[str, typer.Option(help="Tensor sizes, comma-separated.")] = "1M,16M,64M,256M",
    transport: Annotated[
        str, typer.Option(help="What carries the lanes, comma-separated: shm (shared memory), tcp.")
    ] = "shm,tcp",
    rounds: Annotated[int, typer.Option(help="Turns that CUDA and CPU tensors take at each size.", min=1)] = 5,
    min_time: Annotated[float, typer.Option(help="Seconds of ops per round.", min=0.0)] = 0.2,
    layers: Annotated[
        int, typer.Option(help="Layers of the overlap's model, 16 MiB of gradients each; 0: no overlap.", min=0)
    ] = 16,
    compute: Annotated[
        float, typer.Option(help="A backward pass takes at least so many times the communication.", min=0.1)
    ] = 1.5,
    steps: Annotated[int, typer.Option(help="Steps of the overlap that are timed.", min=1)] = 15,
    device: Annotated[
        str, typer.Option(help="cuda; or cpu, to see how far two measurements of the same differ.")
    ] = "cuda",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    check: Annotated[bool, typer.Option("--check", help="Compare with benchmarks/targets.toml.")] = False,
) -> None:
    """Time all-reduce of CUDA tensors against CPU tensors, and how much of it a backward pass hides."""
    plan = GpuPlan(
        peers=peers,
        sizes=[size_bytes(one) for one in sizes.split(",")] if sizes else [],
        transports=transport.split(","),
        rounds=rounds,
        min_time_s=min_time,
        layers=layers,
        compute=compute,
        steps=steps,
        device=device,
    )
    check_plan(plan)
    if reason := missing(plan.device):
        raise typer.BadParameter(reason)
    figures: list[Row] = []
    notes: list[str] = []
    with reports.guarded(as_json=as_json) as progress:
        rows = len(plan.sizes) + bool(plan.layers)
        task = progress.add_task("starting", total=len(plan.transports) * rows)
        for carrier in plan.transports:
            with LocalCluster() as cluster:
                progress.update(task, description=f"{carrier}: starting")
                team = Team(cluster, plan, carrier)
                figures += team.figures(progress)
                notes = [f"device: {team.device_name}"]
    result = reports.report("gpu", msgspec.to_builtins(plan), figures, notes=notes)
    reports.finish(result, sheets(figures), as_json=as_json, against_targets=check)
    if not all(row.get("verified", True) for row in figures):
        raise typer.Exit(1)


def check_plan(plan: GpuPlan) -> None:
    if unknown := sorted(set(plan.transports) - set(TRANSPORTS)):
        raise typer.BadParameter(f"--transport knows {', '.join(TRANSPORTS)}, not {', '.join(unknown)}")
    if plan.device not in DEVICES:
        raise typer.BadParameter(f"--device knows {', '.join(DEVICES)}, not {plan.device}")
    if any(size < 4 or size % 4 for size in plan.sizes):
        raise typer.BadParameter("--sizes are multiples of 4 bytes: the tensors are of float32")


def missing(device: str) -> str | None:
    """Why this device cannot be measured here."""
    if importlib.util.find_spec("torch") is None:
        return "PyTorch is not installed: pip install 'ringfold[torch]'"
    if device == "cuda":
        import torch

        if not torch.cuda.device_count():  # unlike is_available, it does not begin CUDA in this process
            return "PyTorch finds no CUDA device here"
    return None


def sheets(figures: Sequence[Row]) -> list[Sheet]:
    """The two tables."""
    parts = {
        "op": ("ringfold bench gpu: time of an all-reduce", OP_COLUMNS),
        "overlap": ("Communication that a backward pass hides", OVERLAP_COLUMNS),
    }
    return [
        Sheet(title, rows, columns)
        for part, (title, columns) in parts.items()
        if (rows := [row for row in figures if row["part"] == part])
    ]


class Team:
    """The peers of one transport."""

    def __init__(self, cluster: LocalCluster, plan: GpuPlan, transport: str) -> None:
        self._cluster, self._plan, self._transport = cluster, plan, transport
        self._names = [f"peer-{number}" for number in range(plan.peers)]
        where = cluster.start_master().address
        env = {"OMP_NUM_THREADS": "1", "RINGFOLD_TRANSPORT": TRANSPORTS[transport]}
        for name in self._names:
            cluster.start_worker(name, WORKER, where, plan.peers, plan.device, env=env)
        cluster.wait_connected(self._names, START_S)
        self.device_name = str(cluster.gather(self._names, START_S)[self._names[0]]["device"])

    def figures(self, progress: Progress) -> list[Row]:
        rows: list[Row] = []
        for size in self._plan.sizes:
            progress.update(progress.task_ids[0], description=f"{self._transport}: {size_text(size)}")
            rows.append(self._ops(size))
            progress.advance(progress.task_ids[0])
        if self._plan.layers:
            progress.update(progress.task_ids[0], description=f"{self._transport}: overlap")
            rows.append(self._overlap())
            progress.advance(progress.task_ids[0])
        return rows

    def _ops(self, size: int) -> Row:
        """All rounds at one size."""
        plan = self._plan
        sides = {"cpu": "cpu", "cuda": plan.device}
        trials = {side: self._play_ops(sides[side], size, 3)["durations_ns"] for side in sides}
        counts = {side: iterations_for(trials[side], plan) for side in sides}
        durations: dict[str, list[int]] = {side: [] for side in sides}
        verified = True
        for _ in range(plan.rounds):
            for side in sides:
                outcome = self._play_ops(sides[side], size, counts[side])
                durations[side] += outcome["durations_ns"]
                verified = verified and outcome["verified"]
        row: Row = {"part": "op", "world": plan.peers, "transport": self._transport, "size_bytes": size}
        row["verified"] = verified
        return row | op_figures(durations)

    def _play_ops(self, device: str, size: int, iterations: int) -> Message:
        """One round: the durations of rank 0, and the verdict of all."""
        order = {"do": "ops", "device": device, "size_bytes": size, "iterations": iterations, "warm_up": 2}
        replies = self._play(order)
        return {
            "durations_ns": replies[self._names[0]]["durations_ns"],
            "verified": all(reply["verified"] for reply in replies.values()),
        }

    def _overlap(self) -> Row:
        plan, batch = self._plan, 64
        while batch < MAX_BATCH and not is_enough(self._play_steps(batch, 4), plan.compute):
            batch *= 2
        row: Row = {"part": "overlap", "world": plan.peers, "transport": self._transport}
        row |= {"size_bytes": plan.layers * LAYER_BYTES, "batch": batch}
        return row | overlap_figures(self._play_steps(batch, plan.steps + 1))

    def _play_steps(self, batch: int, count: int) -> dict[str, list[int]]:
        """The durations of rank 0, without those of the first step, which allocates."""
        replies = self._play({"do": "steps", "layers": self._plan.layers, "batch": batch, "count": count})
        first = replies[self._names[0]]
        return {what: first[f"{what}_ns"][1:] for what in ("alone", "communication", "step")}

    def _play(self, order: Message) -> dict[str, Message]:
        self._cluster.send(self._names, order)
        return dict(self._cluster.gather(self._names, ROUND_S))


def iterations_for(trial_ns: Sequence[int], plan: GpuPlan) -> int:
    """How many ops fill a round."""
    wanted = int(plan.min_time_s * 1e9 / max(float(np.median(trial_ns)), 1.0))
    return max(FEWEST_ITERATIONS, min(wanted, MAX_ITERATIONS))


def op_figures(durations: dict[str, list[int]]) -> Row:
    row: Row = {}
    for side, values in durations.items():
        row.update(spread(values, f"{side}_"))
    row["cuda_speed"] = float(np.median(durations["cpu"]) / np.median(durations["cuda"]))
    return row


def is_enough(durations: dict[str, list[int]], compute: float) -> bool:
    return backward_over_communication(durations) >= compute


def backward_over_communication(durations: dict[str, list[int]]) -> float:
    return BACKWARD * float(np.median(durations["alone"]) / np.median(durations["communication"]))


def overlap_figures(durations: dict[str, list[int]]) -> Row:
    row: Row = {}
    for what, values in durations.items():
        row.update(spread(values, f"{what}_"))
    alone, communication, step = (float(np.median(durations[what])) for what in ("alone", "communication", "step"))
    row["backward_over_communication"] = backward_over_communication(durations)
    row["hidden"] = 1 - (step - alone) / communication
    return row
