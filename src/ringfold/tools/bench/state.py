"""`ringfold bench state`: what it costs to give a newcomer the shared state, and to find that nothing differs.

One peer lacks the state, or a block of it, or nothing; the others hold it. All begin a sync at once, and the figure is
the time of the call, hashing included. The links are loopback, or (root only) one network namespace a peer with each
holder's uplink shaped, where a newcomer that fetches from several holders at once must be faster than with one.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import numpy as np
import typer

from ringfold.tools import shaped
from ringfold.tools.bench import report as reports
from ringfold.tools.bench.report import Column, Row, microseconds, size_bytes, times
from ringfold.tools.bench.targets import Value
from ringfold.tools.cluster import LocalCluster, Message, ProcessFailed
from ringfold.tools.shaped import Shape, ShapedNetwork

WORKER = str(Path(__file__).with_name("workers.py"))
NEWCOMER = "newcomer"
WAIT_S = 120.0
HASH_BYTES_PER_S = 8e9
"""The required speed of hashing, per core."""


def _rate(value: Value) -> str:
    assert isinstance(value, int | float)
    return f"{value:.3g} GB/s"


COLUMNS = (
    Column("what", "what"),
    Column("links", "links"),
    Column("holders", "holders"),
    Column("time", "median_us", microseconds),
    Column("rate", "gb_per_s", _rate),
    Column("vs one", "over_one_holder", times),
    Column("received", "rx_bytes", reports.size_text),
)


def command(
    size: Annotated[str, typer.Option(help="Bytes of the state.")] = "256M",
    holders: Annotated[str, typer.Option(help="How many holders, on shaped links.")] = "1,3",
    mbit: Annotated[float, typer.Option(help="Uplink of a holder on shaped links, in Mbit/s.", min=1)] = 200.0,
    rounds: Annotated[int, typer.Option(help="Syncs of each kind on loopback.", min=1)] = 5,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    check: Annotated[bool, typer.Option("--check", help="Compare with benchmarks/targets.toml.")] = False,
) -> None:
    """Time of a sync: a newcomer that lacks all, one block that differs, nothing that differs."""
    total, counts = size_bytes(size), _counts(holders)
    skipped: dict[str, str] = {}
    with reports.guarded(as_json=as_json) as progress:
        task = progress.add_task("loopback", total=1 + len(counts))
        figures = _on_loopback(total, rounds)
        progress.advance(task)
        why = shaped.missing()
        if why is not None:
            skipped["shaped links"] = why
        for count in counts:
            progress.update(task, description=f"{count} holders at {mbit:g} Mbit/s")
            row: Row = {"what": "newcomer", "links": f"{mbit:g} Mbit/s", "holders": count, "size_bytes": total}
            row |= {"over_one_holder": None} if why is not None else _on_shaped_links(total, count, mbit)
            figures.append(row)
            progress.advance(task)
    _compare([row for row in figures if row["links"] != "loopback"])
    settings: dict[str, object] = {"size": size, "holders": counts, "mbit": mbit, "rounds": rounds}
    result = reports.report("state", settings, figures, skipped=skipped, notes=_notes(figures))
    reports.finish(result, COLUMNS, as_json=as_json, against_targets=check)


def _counts(text: str) -> list[int]:
    try:
        counts = [int(each) for each in text.split(",")]
    except ValueError:
        counts = []
    if not counts or min(counts) < 1:
        raise typer.BadParameter(f"{text!r} is not a list of numbers such as 1,3")
    return counts


def _compare(rows: Sequence[Row]) -> None:
    """Each row on shaped links, in relation to the one with one holder."""
    one = next((row.get("gb_per_s") for row in rows if row["holders"] == 1), None)
    for row in rows:
        rate = row.get("gb_per_s")
        if isinstance(one, float) and isinstance(rate, float) and row["holders"] != 1:
            row["over_one_holder"] = rate / one


def _notes(rows: Sequence[Row]) -> list[str]:
    """What the table has no room for."""
    row = next(row for row in rows if row["what"] == "unchanged")
    size, hashing, beyond = row["size_bytes"], row["hash_gb_per_s"], row["beyond_hashing_us"]
    hashed = f"a state of {reports.size_text(size)}; one core hashed it at {_rate(hashing)} in the same run"
    return [hashed, f"unchanged, beyond hashing at 8 GB/s per core: {microseconds(beyond)}"]


def _on_loopback(total: int, rounds: int) -> list[Row]:
    """One holder: everything, one block, nothing; and what hashing alone costs in the same processes."""
    with LocalCluster() as cluster:
        where = cluster.start_master().address
        names = _start(cluster, where, total, 1)
        facts: Row = {"links": "loopback", "holders": 1, "size_bytes": total}
        everything = [_sync(cluster, names, "everything") for _ in range(rounds)]
        one_block = [_sync(cluster, names, "one block") for _ in range(rounds)]
        nothing = [_sync(cluster, names, "nothing") for _ in range(rounds)]
        cluster.send(names, {"what": "hash"})
        hashed = cluster.gather(names, WAIT_S).values()
    alone_ns = max(int(reply["alone_ns"]) for reply in hashed)
    cores = min(int(reply["cores"]) for reply in hashed)
    hashing_us = total * len(names) / (HASH_BYTES_PER_S * cores) * 1e6
    unchanged = reports.spread([reply["took_ns"] for reply in nothing])
    median = unchanged["median_us"]
    assert isinstance(median, float)
    return [
        {"what": "newcomer", **facts, **_transfer(everything)},
        {"what": "one block", **facts, **_transfer(one_block), "gb_per_s": None},
        {
            "what": "unchanged",
            **facts,
            **unchanged,
            "rx_bytes": max(int(reply["rx_bytes"]) for reply in nothing),
            "hash_gb_per_s": total / alone_ns,
            "hash_together_us": max(int(reply["together_ns"]) for reply in hashed) / 1_000,
            "beyond_hashing_us": median - hashing_us,
        },
    ]


def _on_shaped_links(total: int, holders: int, mbit: float) -> Row:
    """A host for each peer. The holders' uplinks are the narrow place, the newcomer's link is not."""
    shapes = [*[Shape(up_mbit=mbit)] * holders, Shape()]
    with ShapedNetwork(shapes) as network, LocalCluster() as cluster:
        where = network.start_master(cluster).address
        names = _start(cluster, where, total, holders, network)
        return _transfer([_sync(cluster, names, "everything")])


def _start(
    cluster: LocalCluster, where: str, total: int, holders: int, network: ShapedNetwork | None = None
) -> list[str]:
    names = [*(f"holder-{number}" for number in range(holders)), NEWCOMER]
    for host, name in enumerate(names):
        inside = () if network is None else network.inside(host)
        cluster.start_worker(name, WORKER, "state", where, total, holders, inside=inside)
    cluster.wait_connected(names, WAIT_S)
    cluster.gather(names, WAIT_S)
    return names


def _sync(cluster: LocalCluster, names: Sequence[str], spoil: str) -> Message:
    """One sync of which the newcomer lacks so much; what it reported, once all have the same again."""
    for name in names:
        cluster.send([name], {"what": "sync", "spoil": spoil if name == NEWCOMER else "nothing"})
    replies = cluster.gather(names, WAIT_S)
    if wrong := [name for name, reply in replies.items() if not reply["is_whole"]]:
        raise ProcessFailed(wrong[0], "has a wrong state after a sync")
    return replies[NEWCOMER]


def _transfer(replies: Sequence[Message]) -> Row:
    row = reports.spread([reply["took_ns"] for reply in replies])
    rates = [reply["rx_bytes"] / reply["took_ns"] for reply in replies]
    received = max(int(reply["rx_bytes"]) for reply in replies)
    return {**row, "gb_per_s": float(np.median(rates)), "rx_bytes": received}
