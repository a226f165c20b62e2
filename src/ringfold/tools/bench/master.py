"""`ringfold bench master`: how many ops a second one master carries when it brings the evidence.

One process has all peers, so the master has a core to itself. An op is: every peer's Done comes in, evidence
goes out to every peer; the next op starts when the last one has it. Beside the rate stands the master's own processor
time per op, which is what bounds it when peers are many machines.
"""

from pathlib import Path
from typing import Annotated

import typer

from ringfold.config import split_address
from ringfold.tools.bench import report as reports
from ringfold.tools.bench.report import Column, Row, microseconds, spread
from ringfold.tools.cluster import LocalCluster

WORKER = str(Path(__file__).with_name("master_worker.py"))
WAIT_S = 120.0

COLUMNS = (
    Column("peers", "connections"),
    Column("payload", "payload_bytes", reports.size_text),
    Column("ops/s", "ops_per_s", lambda value: f"{value:,.0f}"),
    Column("median", "median_us", microseconds),
    Column("p99", "p99_us", microseconds),
    Column("master CPU/op", "master_cpu_us_per_op", microseconds),
    Column("most ops/s", "most_ops_per_s", lambda value: f"{value:,.0f}"),
)


def command(
    connections: Annotated[int, typer.Option(help="The largest number of peers.", min=2)] = 64,
    payload: Annotated[str, typer.Option(help="Bytes that each peer's Done carries.")] = "1K",
    min_time: Annotated[float, typer.Option(help="Seconds per row.", min=0.1)] = 2.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    check: Annotated[bool, typer.Option("--check", help="Compare with benchmarks/targets.toml.")] = False,
) -> None:
    """Ops per second of a master that brings the evidence, with up to 64 peers."""
    payload_bytes = reports.size_bytes(payload)
    counts = sorted({count for count in (2, 8, connections) if count <= connections})
    cases = [(count, size) for size in sorted({0, payload_bytes}) for count in counts]
    figures: list[Row] = []
    with reports.guarded(as_json=as_json) as progress:
        task = progress.add_task("starting", total=len(cases))
        for count, size in cases:
            progress.update(task, description=f"{count} peers, {size} bytes each")
            figures.append(measure(count, size, min_time))
            progress.advance(task)
    settings: dict[str, object] = {"connections": connections, "payload": payload, "min_time_s": min_time}
    result = reports.report("master", settings, figures, notes=[what_it_allows(figures)])
    reports.finish(result, COLUMNS, as_json=as_json, against_targets=check)


def measure(connections: int, payload_bytes: int, seconds: float) -> Row:
    """One row: a fresh master, so many peers, ops for so long."""
    with LocalCluster() as cluster:
        where = cluster.start_master(evidence="master").address
        host, port = split_address(where)
        cluster.start_worker("peers", WORKER, host, port)
        cluster.wait_connected(["peers"], WAIT_S)
        order = {"connections": connections, "payload_bytes": payload_bytes, "warm_up": 20, "seconds": seconds}
        cluster.send(["peers"], {**order, "master_pid": cluster.pid("master")})
        outcome = cluster.gather(["peers"], WAIT_S)["peers"]
    ops = len(outcome["durations_ns"])
    per_op_us = outcome["master_cpu_ns"] / 1_000 / ops
    return {
        "connections": connections,
        "payload_bytes": payload_bytes,
        "ops_per_s": ops / (outcome["took_ns"] / 1e9),
        **spread(outcome["durations_ns"]),
        "master_cpu_us_per_op": per_op_us,
        "most_ops_per_s": 1e6 / per_op_us if per_op_us else None,
    }


def what_it_allows(figures: list[Row]) -> str:
    """The rate with the most peers, as a sentence."""
    row = max(figures, key=lambda row: (row["connections"], row["payload_bytes"]))
    rate, cpu_us = row["ops_per_s"], row["master_cpu_us_per_op"]
    assert isinstance(rate, float)
    assert isinstance(cpu_us, float)
    return (
        f"With {row['connections']} peers and {row['payload_bytes']} bytes each, the master carried {rate:,.0f} ops a "
        f"second beside this client. A run of 10 steps a second with 4 ops each keeps {40 * cpu_us / 1e6:.1%} of a "
        "core busy."
    )
