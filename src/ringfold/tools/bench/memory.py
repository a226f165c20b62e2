"""`ringfold bench memory`: how much an in-place all-reduce raises a peer's peak of resident memory.

The peak (VmHWM) is reset just before the op, with the buffer resident already; what it grows by is the op's own: the
backup that a late abort is restored from, and scratch.
"""

import sys
from pathlib import Path
from typing import Annotated

import typer

from ringfold.tools.bench import report as reports
from ringfold.tools.bench.masters import start_master
from ringfold.tools.bench.report import Column, Row, size_bytes, times
from ringfold.tools.spawn import ChildFailed, Crew

WORKER = str(Path(__file__).with_name("workers_run.py"))
WAIT_S = 120.0

COLUMNS = (
    Column("peers", "peers"),
    Column("size", "size_bytes", reports.size_text),
    Column("extra, first op", "first_over_buffer", times),
    Column("extra, second op", "second_over_buffer", times),
    Column("worst", "extra_over_buffer", times),
)


def command(
    size: Annotated[str, typer.Option(help="Bytes of the buffer.")] = "256M",
    peers: Annotated[int, typer.Option(help="Peers in the run.", min=2)] = 2,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    check: Annotated[bool, typer.Option("--check", help="Compare with benchmarks/targets.toml.")] = False,
) -> None:
    """Extra peak memory of an in-place all-reduce, as a multiple of its buffer."""
    buffer = size_bytes(size)
    names = [f"peer-{number}" for number in range(peers)]
    with reports.guarded(as_json=as_json) as progress, Crew() as crew:
        progress.add_task("measuring", total=None)
        where = start_master(crew, "master")
        for name in names:
            command = [sys.executable, "-P", WORKER, "memory", crew.address, name, where, str(buffer), str(peers)]
            crew.start(name, command)
        crew.meet(names, WAIT_S)
        replies = crew.gather(names, WAIT_S)
        if wrong := [name for name, reply in replies.items() if not reply["verified"]]:
            raise ChildFailed(wrong[0], "holds a wrong sum")
    first, second = (max(int(reply["extra_bytes"][op]) for reply in replies.values()) for op in range(2))
    row: Row = {
        "peers": peers,
        "size_bytes": buffer,
        "extra_bytes": max(first, second),
        "first_over_buffer": first / buffer,
        "second_over_buffer": second / buffer,
        "extra_over_buffer": max(first, second) / buffer,
    }
    result = reports.report("memory", {"size": size, "peers": peers}, [row])
    reports.finish(result, COLUMNS, as_json=as_json, against_targets=check)
