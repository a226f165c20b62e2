"""`ringfold bench events`: what it costs to record events.

Two ranks have three runs each, in the same processes: one that records nothing, one that records in memory (as every
peer does), and one with `events_dir`. The runs take turns of a few ops or steps, so that all meet the same noise of the
machine, and in every round the turns begin with another run.

*op*: an in-place all-reduce, as rank 0 sees it. `median_ratio` is the median, over the rounds, of the median duration
in the run's turn over that of the run that records nothing; `p99_ratio` compares the p99 of all ops. The engine's own
log of ops, one copy of 144 bytes an op, is in all three. *step*: a loop of `run.steps` that does nothing but
`step.log`, with two values.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

import numpy as np
import typer

from ringfold.tools.bench import report as reports
from ringfold.tools.bench.report import Column, Row, Sheet, microseconds, size_bytes, size_text, spread
from ringfold.tools.cluster import LocalCluster
from ringfold.units import S

WORKER = str(Path(__file__).with_name("workers.py"))
RANKS = ("rank-0", "rank-1")
MODES = ("off", "memory", "files")
OPS = 16
STEPS = 200
WARM_UP = 50
START_S = 60.0
REPLY_S = 120.0

Durations = Mapping[str, Sequence[Sequence[int]]]
"""Nanoseconds by mode and round."""


def command(
    size: Annotated[str, typer.Option(help="Bytes of an op.")] = "1M",
    rounds: Annotated[int, typer.Option(help=f"Rounds of {OPS} ops in each run.", min=3)] = 300,
    step_rounds: Annotated[int, typer.Option(help=f"Rounds of {STEPS} steps in each run.", min=1)] = 15,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    check: Annotated[bool, typer.Option("--check", help="Compare with benchmarks/targets.toml.")] = False,
) -> None:
    """What recording events costs: ops and steps with and without."""
    nbytes = size_bytes(size)
    with reports.guarded(as_json=as_json) as progress, LocalCluster() as cluster:
        task = progress.add_task("ops", total=rounds + step_rounds)
        where = cluster.start_master().address
        for rank in RANKS:
            cluster.start_worker(rank, WORKER, "events", where, cluster.directory / "events", nbytes, len(RANKS))
        cluster.wait_connected(RANKS, START_S)
        cluster.gather(RANKS, START_S)
        ops = {mode: list[Sequence[int]]() for mode in MODES}
        steps = {mode: list[Sequence[int]]() for mode in MODES}
        for mode in MODES:
            turn(cluster, "ops", mode, WARM_UP)
        for number in range(rounds):
            for mode in in_turn(number):
                ops[mode].append(turn(cluster, "ops", mode, OPS))
            progress.advance(task)
        progress.update(task, description="steps")
        for number in range(step_rounds):
            for mode in in_turn(number):
                steps[mode].append(turn(cluster, "steps", mode, STEPS))
            progress.advance(task)
        for rank in RANKS:
            cluster.allow_exit(rank)
        cluster.send(RANKS, {"do": "end"})
        for rank in RANKS:
            cluster.wait_exit(rank, REPLY_S)
    figures = [*op_figures(nbytes, ops), *step_figures(steps)]
    settings: dict[str, object] = {"size": size_text(nbytes), "rounds": rounds, "step_rounds": step_rounds}
    result = reports.report("events", settings, figures)
    reports.finish(result, _sheets(figures), as_json=as_json, against_targets=check)


def in_turn(number: int) -> Sequence[str]:
    """The modes in the order of a round."""
    first = number % len(MODES)
    return [*MODES[first:], *MODES[:first]]


def turn(cluster: LocalCluster, what: str, mode: str, count: int) -> Sequence[int]:
    """The durations at rank 0."""
    cluster.send(RANKS, {"do": what, "mode": mode, "count": count})
    durations: Sequence[int] = cluster.gather(RANKS, REPLY_S)[RANKS[0]]["durations_ns"]
    return durations


def op_figures(nbytes: int, ops: Durations) -> list[Row]:
    figures: list[Row] = []
    without = np.asarray(ops["off"], dtype=np.float64)
    for mode in MODES:
        durations = np.asarray(ops[mode], dtype=np.float64)
        ratios = np.median(durations, axis=1) / np.median(without, axis=1)
        row: Row = {"part": "op", "mode": mode, "size_bytes": nbytes, **spread(durations.ravel())}
        row["median_ratio"] = float(np.median(ratios))
        row["p99_ratio"] = float(np.percentile(durations, 99) / np.percentile(without, 99))
        figures.append(row)
    return figures


def step_figures(steps: Durations) -> list[Row]:
    rates = {mode: STEPS * S / np.asarray(steps[mode], dtype=np.float64).ravel() for mode in MODES}
    return [
        {
            "part": "step",
            "mode": mode,
            "steps_per_s": float(np.median(rates[mode])),
            "step_us": float(1e6 / np.median(rates[mode])),
            "more_us": float(np.median(1e6 / rates[mode] - 1e6 / rates["off"])),
        }
        for mode in MODES
    ]


def _sheets(figures: Sequence[Row]) -> list[Sheet]:
    ratio = "{:.4f}".format
    return [
        Sheet(
            "ringfold bench events: ops",
            [row for row in figures if row["part"] == "op"],
            (
                Column("recorded", "mode"),
                Column("ops", "count"),
                Column("median", "median_us", microseconds),
                Column("over off", "median_ratio", ratio),
                Column("p99", "p99_us", microseconds),
                Column("over off", "p99_ratio", ratio),
            ),
        ),
        Sheet(
            "ringfold bench events: steps that only log",
            [row for row in figures if row["part"] == "step"],
            (
                Column("recorded", "mode"),
                Column("steps a second", "steps_per_s", "{:,.0f}".format),
                Column("a step", "step_us", microseconds),
                Column("more than off", "more_us", microseconds),
            ),
        ),
    ]
