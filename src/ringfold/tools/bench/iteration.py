"""`ringfold bench iteration`: how long ranks take to agree on the next iteration, through each kind of store.

Every rank is a process, and has nothing to do but to agree. (All are forked from one that has imported what they need:
128 times torch would be 19 GB.) An iteration's time is from the instant at which all ranks
had the one before to that at which all have this one; so it contains everything that every rank does. `from_last` is
from the last rank's call on: what a rank that comes last has to wait. `per_rank` is the median divided by the number of
ranks: on a machine with fewer cores than ranks it shows whether the cost of a rank grows with their number.
`operations_per_rank` counts the requests to the store of one rank in one iteration, and `most_operations` those of the
rank with the most. Then one rank stays away for some seconds, and the CPU that the others use meanwhile is measured.

Servers are started for the purpose, durable as they would have to be (see `stores.py`).
"""

from pathlib import Path
from typing import Annotated

import numpy as np
import typer

from ringfold.tools.bench import report as reports
from ringfold.tools.bench.report import Column, Row, microseconds, spread
from ringfold.tools.cluster import LocalCluster, ProcessFailed
from ringfold.tools.stores import KINDS, StoreServer, missing

WORKER = str(Path(__file__).with_name("workers.py"))
RANKS = "ranks"
"""The process from which the ranks are forked; RANKS.0 is the first rank."""
START_S = 300.0
REPLY_S = 240.0
COLUMNS = (
    Column("store", "store"),
    Column("ranks", "ranks"),
    Column("iterations", "count"),
    Column("median", "median_us", microseconds),
    Column("p99", "p99_us", microseconds),
    Column("from the last one", "from_last_median_us", microseconds),
    Column("per rank", "per_rank_us", microseconds),
    Column("operations of a rank", "operations_per_rank", lambda value: f"{value:.1f}"),
    Column("CPU of a waiting rank", "waiting_cpu_percent", lambda value: "-" if value is None else f"{value:.2f} %"),
)


def command(
    ranks: Annotated[str, typer.Option(help="Numbers of ranks, with commas.")] = "2,8,32,64,128",
    store: Annotated[str, typer.Option(help="Kinds of store, with commas.")] = ",".join(KINDS),
    iterations: Annotated[int, typer.Option(help="How many iterations are measured.", min=2)] = 200,
    wait_s: Annotated[float, typer.Option(help="For how long ranks wait for the CPU figure; 0: not.", min=0)] = 10.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    check: Annotated[bool, typer.Option("--check", help="Compare with benchmarks/targets.toml.")] = False,
) -> None:
    """Time of one agreed iteration, and what waiting costs."""
    worlds = [_number(text) for text in ranks.split(",")]
    kinds = [_kind(text) for text in store.split(",")]
    skipped = {kind: why for kind in kinds if (why := missing(kind))}
    figures: list[Row] = []
    with reports.guarded(as_json=as_json) as progress:
        task = progress.add_task("", total=len(kinds) * len(worlds))
        for kind in kinds:
            for world in worlds:
                progress.update(task, description=f"{kind}, {world} ranks")
                if kind not in skipped:
                    figures.append({"store": kind, "ranks": world, **measured(kind, world, iterations, wait_s)})
                progress.advance(task)
    settings: dict[str, object] = {"ranks": worlds, "stores": kinds, "iterations": iterations, "wait_s": wait_s}
    result = reports.report("iteration", settings, figures, skipped=skipped)
    reports.finish(result, COLUMNS, as_json=as_json, against_targets=check)


def _number(text: str) -> int:
    if not text.strip().isdigit() or int(text) < 1:
        raise typer.BadParameter(f"{text!r} is no number of ranks")
    return int(text)


def _kind(text: str) -> str:
    if text.strip() not in KINDS:
        raise typer.BadParameter(f"{text!r} is no kind of store; there are {', '.join(KINDS)}")
    return text.strip()


def measured(kind: str, world: int, iterations: int, wait_s: float) -> Row:
    """The figures of so many ranks on a fresh store."""
    with LocalCluster() as cluster:
        server = StoreServer(cluster, kind)
        server.start()
        server.wait()
        cluster.start_worker(RANKS, WORKER, "iteration", server.url, world)
        names = [f"{RANKS}.{rank}" for rank in range(world)]
        cluster.wait_connected(names, START_S)
        cluster.gather(names, START_S)
        cluster.send(names, {"what": "agree", "count": 10})
        cluster.gather(names, REPLY_S)
        cluster.send(names, {"what": "agree", "count": iterations})
        replies = cluster.gather(names, REPLY_S).values()
        operations = np.array([reply["operations"] for reply in replies], float) / iterations
        if len({tuple(reply["numbers"]) for reply in replies}) != 1:
            raise ProcessFailed(names[0], "the ranks were handed different numbers")
        called = np.array([reply["called"] for reply in replies], np.int64)
        returned = np.array([reply["returned"] for reply in replies], np.int64)
        ends = returned.max(axis=0)
        row: Row = {**spread(np.diff(ends)), **spread(ends - called.max(axis=0), "from_last_")}
        row["per_rank_us"] = float(np.median(np.diff(ends))) / 1_000 / world
        row["operations_per_rank"], row["most_operations"] = float(operations.mean()), float(operations.max())
        if wait_s and world > 1:
            cluster.send(names, {"what": "wait", "s": wait_s})
            shares = [reply["cpu_share"] for reply in cluster.gather(names, REPLY_S).values() if reply]
            row["waiting_cpu_percent"] = 100 * float(np.median(shares))
        for name in (RANKS, *names):
            cluster.allow_exit(name)
        return row
