"""`ringfold bench dashboard`: what it costs the ops of a run, and its master, that others look at it.

The peers are control connections in one process, as in `bench master`: their ops need the master's evidence, so that
whatever delays the master delays every op. There are four loads: nothing; a dashboard without a page; one with pages;
and *everything*: pages, a scrape of the master's two pages of metrics every second, and events in files.

The loads take turns, so that a machine that gets slower affects all of them, and in every round the turns begin with
another load. A turn has a master and peers of its own, because two masters that do the same differ by a few per cent,
too. After its ops the peers are without ops for a while: what the master uses then is heartbeats and looks, as in a run
with evidence by the ring. On a machine with few cores the peers, the pages and the dashboard compete with the master
for them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import typer

from ringfold.config import split_address
from ringfold.tools.bench import report as reports
from ringfold.tools.bench.master import WAIT_S
from ringfold.tools.bench.master_worker import cpu_ns
from ringfold.tools.bench.report import Column, Row, Sheet, microseconds, spread
from ringfold.tools.cluster import LocalCluster, Message, free_port
from ringfold.units import KIB, S

WORKER = str(Path(__file__).with_name("dashboard_worker.py"))
METRICS_PATHS = ("/metrics", "/metrics/peers")


@dataclass(frozen=True, slots=True)
class Load:
    """Who looks at a run."""

    name: str
    has_dashboard: bool = False
    pages: int = 0
    is_recorded: bool = False
    """Whether metrics are scraped, and events recorded."""


@dataclass(frozen=True, slots=True)
class Turn:
    """What was measured in one turn of a load."""

    peers: Message
    observers: Message
    dashboard_cpu_ns: int
    events_bytes: int

    @property
    def median_ns(self) -> float:
        return float(np.median(self.peers["durations_ns"]))


def loads(pages: int) -> Sequence[Load]:
    """All loads; ratios compare with the first."""
    return (
        Load("nothing"),
        Load("dashboard", has_dashboard=True),
        Load("pages", has_dashboard=True, pages=pages),
        Load("everything", has_dashboard=True, pages=pages, is_recorded=True),
    )


def command(
    pages: Annotated[int, typer.Option(help="Open pages.", min=1)] = 100,
    peers: Annotated[int, typer.Option(help="Peers of the run.", min=2)] = 64,
    rounds: Annotated[int, typer.Option(help="Turns of each load.", min=1)] = 7,
    min_time: Annotated[float, typer.Option(help="Seconds of ops, and then of none, per turn.", min=0.1)] = 3.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    check: Annotated[bool, typer.Option("--check", help="Compare with benchmarks/targets.toml.")] = False,
) -> None:
    """What pages of a dashboard, scraped metrics and recorded events cost the ops of a run, and its master."""
    from ringfold.cli.dashboard import check_installed

    check_installed()
    turns: dict[Load, list[Turn]] = {load: [] for load in loads(pages)}
    with reports.guarded(as_json=as_json) as progress:
        task = progress.add_task("starting", total=rounds * len(turns))
        for number in range(rounds):
            for load in in_turn(list(turns), number):
                progress.update(task, description=load.name)
                turns[load].append(measure(peers, load, min_time))
                progress.advance(task)
    figures = rows(peers, turns)
    settings: dict[str, object] = {"pages": pages, "peers": peers, "rounds": rounds, "min_time_s": min_time}
    result = reports.report("dashboard", settings, figures, notes=[_comparison(figures[-1])])
    reports.finish(result, _sheets(figures), as_json=as_json, against_targets=check)


def in_turn(every: Sequence[Load], number: int) -> Sequence[Load]:
    """The loads in the order of a round."""
    first = number % len(every)
    return [*every[first:], *every[:first]]


def measure(peers: int, load: Load, seconds: float) -> Turn:
    """One turn: a fresh master, so many peers and pages, ops for so long, then none for as long."""
    with LocalCluster() as cluster:
        events = cluster.directory / "events"
        metrics = f"127.0.0.1:{free_port()}"
        recorded = ["--events", str(events), "--metrics-listen", metrics] if load.is_recorded else []
        where = cluster.start_master(arguments=recorded, evidence="master").address
        url, pid = _start_dashboard(cluster, where) if load.has_dashboard else ("", 0)
        cluster.start_worker("peers", WORKER, "peers", *split_address(where))
        observers = ["observers"] if load.pages else []
        for name in observers:
            cluster.start_worker(name, WORKER, "observers")
        cluster.wait_connected(["peers", *observers], WAIT_S)
        order = {"peers": peers, "seconds": seconds, "master_pid": cluster.pid("master")}
        cluster.send(["peers"], {**order, "events_dir": str(events) if load.is_recorded else ""})
        cluster.gather(["peers"], WAIT_S)
        scraped = [f"http://{metrics}{path}" for path in METRICS_PATHS] if load.is_recorded else []
        cluster.send(observers, {"url": url, "pages": load.pages, "scraped": scraped})
        cluster.gather(observers, WAIT_S)
        used_ns = cpu_ns(pid) if pid else 0
        cluster.send(["peers"], {"do": "begin"})
        outcome = cluster.gather(["peers"], WAIT_S + 2 * seconds)
        used_ns = (cpu_ns(pid) if pid else 0) - used_ns
        cluster.send(observers, {"do": "end"})
        outcome |= cluster.gather(observers, WAIT_S)
        written = sum(path.stat().st_size for path in events.glob("*.jsonl"))
    return Turn(outcome["peers"], outcome.get("observers", {}), used_ns, written)


def _start_dashboard(cluster: LocalCluster, where: str) -> tuple[str, int]:
    """The address of its page, and its process."""
    dashboard = cluster.start_command("dashboard", "dashboard", where, "--listen", f"127.0.0.1:{free_port()}")
    return dashboard.expect_output("dashboard at").split()[-1], dashboard.pid


def rows(peers: int, turns: Mapping[Load, Sequence[Turn]]) -> list[Row]:
    """A row for each load. Ratios are those of the turns of a round, and of these the median."""
    first = next(iter(turns.values()))
    return [row(peers, load, mine, first) for load, mine in turns.items()]


def row(peers: int, load: Load, turns: Sequence[Turn], without: Sequence[Turn]) -> Row:
    durations, plain = _durations(turns), _durations(without)
    ratios = [turn.median_ns / other.median_ns for turn, other in zip(turns, without, strict=True)]
    ops_ns, idle_ns = _sum(turns, "ops_ns"), _sum(turns, "idle_ns")
    observed_s = (ops_ns + idle_ns) / S
    seen = {key: sum(turn.observers.get(key, 0) for turn in turns) / observed_s for key in ("messages", "bytes")}
    return {
        "load": load.name,
        "peers": peers,
        "pages": load.pages,
        **spread(durations),
        "median_ratio": float(np.median(ratios)),
        "lowest_ratio": min(ratios),
        "highest_ratio": max(ratios),
        "p99_ratio": float(np.percentile(durations, 99) / np.percentile(plain, 99)),
        "ops_master_share": _sum(turns, "ops_cpu_ns") / ops_ns,
        "idle_master_share": _sum(turns, "idle_cpu_ns") / idle_ns,
        "dashboard_share": sum(turn.dashboard_cpu_ns for turn in turns) / S / observed_s,
        "messages_per_s": seen["messages"] / max(1, load.pages),
        "kib_per_s": seen["bytes"] / KIB / max(1, load.pages),
        "scrapes": sum(turn.observers.get("scrapes", 0) for turn in turns),
        "scraped_kib": sum(turn.observers.get("scraped_bytes", 0) for turn in turns) / KIB,
        "events_kib": sum(turn.events_bytes for turn in turns) / KIB,
    }


def _durations(turns: Sequence[Turn]) -> np.ndarray:
    return np.concatenate([turn.peers["durations_ns"] for turn in turns])


def _sum(turns: Sequence[Turn], key: str) -> int:
    return sum(int(turn.peers[key]) for turn in turns)


def _sheets(figures: Sequence[Row]) -> list[Sheet]:
    ratio, share, three = "{:.3f}".format, "{:.1%}".format, "{:.3g}".format
    return [
        Sheet(
            "ringfold bench dashboard: ops",
            figures,
            (
                Column("load", "load"),
                Column("ops", "count", "{:,}".format),
                Column("median", "median_us", microseconds),
                Column("over nothing", "median_ratio", ratio),
                Column("lowest", "lowest_ratio", ratio),
                Column("highest", "highest_ratio", ratio),
                Column("p99", "p99_us", microseconds),
                Column("over nothing", "p99_ratio", ratio),
            ),
        ),
        Sheet(
            "ringfold bench dashboard: parts of a core, and what was sent",
            figures,
            (
                Column("load", "load"),
                Column("master, ops", "ops_master_share", share),
                Column("master, no ops", "idle_master_share", share),
                Column("dashboard", "dashboard_share", share),
                Column("messages/s a page", "messages_per_s", three),
                Column("KiB/s a page", "kib_per_s", three),
                Column("scrapes", "scrapes"),
                Column("events KiB", "events_kib", "{:,.0f}".format),
            ),
        ),
    ]


def _comparison(everything: Row) -> str:
    """The cost of everything, as a sentence."""
    ratio, share = everything["median_ratio"], everything["idle_master_share"]
    assert isinstance(ratio, float)
    assert isinstance(share, float)
    return (
        f"With {everything['pages']} pages, scrapes every second and events the median op takes {ratio - 1:+.1%}, and "
        f"{everything['peers']} peers without ops keep {share:.1%} of a core of the master's busy."
    )
