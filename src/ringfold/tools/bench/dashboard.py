"""`ringfold bench dashboard`: what open pages of a dashboard cost the ops of a run, and the master.

The peers are those of `bench master`: control connections in one process, whose ops need the master's evidence, so that
whatever delays the master delays every op. First there is no dashboard, then one without a page, then one with pages.
After the ops the peers are idle for a while: what the master uses then is heartbeats and looks. On a machine with few
cores the peers, the pages and the dashboard compete with the master for them, and the first row shows by how much less.
"""

from pathlib import Path
from typing import Annotated

import typer

from ringfold.config import split_address
from ringfold.tools.bench import report as reports
from ringfold.tools.bench.master import WAIT_S
from ringfold.tools.bench.master import WORKER as PEERS
from ringfold.tools.bench.master_worker import cpu_ns
from ringfold.tools.bench.report import Column, Row, microseconds, spread
from ringfold.tools.cluster import LocalCluster, free_port

WORKER = str(Path(__file__).with_name("dashboard_worker.py"))


def _share(value: object) -> str:
    return f"{value:.1%}" if isinstance(value, float) else ""


COLUMNS = (
    Column("dashboard", "dashboard"),
    Column("pages", "pages"),
    Column("median op", "median_us", microseconds),
    Column("p99", "p99_us", microseconds),
    Column("master, idle peers", "idle_master_share", _share),
    Column("dashboard's core", "dashboard_share", _share),
    Column("messages/s a page", "messages_per_s", lambda value: f"{value:.2g}"),
    Column("KiB/s a page", "kib_per_s", lambda value: f"{value:.3g}"),
)


def command(
    pages: Annotated[int, typer.Option(help="Open pages.", min=1)] = 100,
    peers: Annotated[int, typer.Option(help="Peers of the run.", min=2)] = 64,
    min_time: Annotated[float, typer.Option(help="Seconds of ops, and then of idle peers, per row.", min=0.1)] = 5.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    check: Annotated[bool, typer.Option("--check", help="Compare with benchmarks/targets.toml.")] = False,
) -> None:
    """What open pages of a dashboard cost the ops of a run, and its master."""
    from ringfold.cli.dashboard import check_installed

    check_installed()
    figures: list[Row] = []
    with reports.guarded(as_json=as_json) as progress:
        task = progress.add_task("starting", total=3)
        for has_dashboard, count in ((False, 0), (True, 0), (True, pages)):
            progress.update(task, description=f"{count} pages" if has_dashboard else "no dashboard")
            figures.append(measure(peers, count, min_time, has_dashboard=has_dashboard))
            progress.advance(task)
    settings: dict[str, object] = {"pages": pages, "peers": peers, "min_time_s": min_time}
    result = reports.report("dashboard", settings, figures, notes=[_comparison(figures)])
    reports.finish(result, COLUMNS, as_json=as_json, against_targets=check)


def measure(peers: int, pages: int, seconds: float, *, has_dashboard: bool) -> Row:
    """One row: a fresh master, so many peers and pages, ops for so long, then none for as long."""
    with LocalCluster() as cluster:
        where = cluster.start_master(evidence="master").address
        host, port = split_address(where)
        url, pid = "", 0
        if has_dashboard:
            dashboard = cluster.start_command("dashboard", "dashboard", where, "--listen", f"127.0.0.1:{free_port()}")
            url, pid = dashboard.expect_output("dashboard at").split()[-1], dashboard.pid
        cluster.start_worker("peers", PEERS, host, port)
        names = ["peers"]
        if pages:
            cluster.start_worker("pages", WORKER)
            names.append("pages")
        cluster.wait_connected(names, WAIT_S)
        if pages:
            cluster.send(["pages"], {"url": url, "pages": pages, "seconds": 2 * seconds})
        order = {"connections": peers, "payload_bytes": 0, "warm_up": 20, "seconds": seconds, "idle_s": seconds}
        used_ns = cpu_ns(pid) if pid else 0
        cluster.send(["peers"], {**order, "master_pid": cluster.pid("master")})
        outcomes = cluster.gather(names, WAIT_S)
        used_ns = (cpu_ns(pid) if pid else 0) - used_ns
    ran, read = outcomes["peers"], outcomes.get("pages", {"messages": 0, "bytes": 0})
    took_s = (ran["took_ns"] + ran["idle_ns"]) / 1e9
    return {
        "dashboard": "yes" if has_dashboard else "no",
        "pages": pages,
        **spread(ran["durations_ns"]),
        "idle_master_share": ran["idle_cpu_ns"] / ran["idle_ns"],
        "dashboard_share": used_ns / 1e9 / took_s,
        "messages_per_s": read["messages"] / max(1, pages) / (2 * seconds),
        "kib_per_s": read["bytes"] / 1_024 / max(1, pages) / (2 * seconds),
    }


def _comparison(figures: list[Row]) -> str:
    """The cost of the pages, as a sentence."""
    without, _, with_pages = figures
    before, after = without["median_us"], with_pages["median_us"]
    assert isinstance(before, float)
    assert isinstance(after, float)
    return f"With {with_pages['pages']} pages the median op takes {after / before - 1:+.1%} against no dashboard."
