"""`ringfold bench topology`: how long `optimize_topology` takes, how right its figures are, and how good its rings.

*Links*: each peer is a host of its own, and each direction between two hosts has a rate of its own, drawn from a seed
(network namespaces, which need root). Nothing is known; all peers meet in a barrier and call `optimize_topology`. The
time is from there to the slowest peer's return. The master's figures are then compared with the rates that the shapers
were given (`worst_error`, as a share), and the ring's slowest link with that of the best of all rings
(`slowest_over_best`), both by the true rates.

*Matrices*: the solver alone, over random matrices of 4 to 7 peers, beside all rings there are (`best_share` of the
matrices must have the best slowest link), and over 64 simulated peers, beside the bound that no ring exceeds.
"""

import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated

import msgspec
import numpy as np
import typer

from ringfold.runtime.clock import thread_cpu_ns
from ringfold.runtime.master_client import MasterClient
from ringfold.tools.bench import report as reports
from ringfold.tools.bench.report import Column, Row, microseconds
from ringfold.tools.cluster import LocalCluster, ProcessFailed
from ringfold.tools.shaped import HUB, Shape, ShapedNetwork, ShapingFailed, missing
from ringfold.topology.ring import edges_of
from ringfold.topology.solve import Solution, best_ring, bottleneck_bound, known_or
from ringfold.wire.status import Status

WORKER = str(Path(__file__).with_name("workers.py"))
START_S = 60.0
CALL_S = 120.0
SMALL = (4, 5, 6, 7)
LARGE = 64

Rates = dict[tuple[int, int], float]
"""By (source, target): what the link can do."""

COLUMNS = (
    Column("part", "part"),
    Column("peers", "peers"),
    Column("time", "took_us", microseconds),
    Column("worst error", "worst_error", lambda value: f"{value:.1%}"),
    Column("median error", "median_error", lambda value: f"{value:.1%}"),
    Column("slowest link / best", "slowest_over_best", lambda value: f"{value:.3f}"),
    Column("matrices", "matrices"),
    Column("best in", "best_share", lambda value: f"{value:.0%}"),
)


class TopologyPlan(msgspec.Struct, frozen=True):
    """What is measured."""

    peers: list[int]
    lowest_mbit: float
    highest_mbit: float
    matrices: int
    seed: int


def command(
    peers: Annotated[str, typer.Option(help="Numbers of peers on shaped links, comma-separated.")] = "4,8",
    mbit: Annotated[str, typer.Option(help="Rates of links are drawn from this range, in Mbit/s.")] = "40-120",
    matrices: Annotated[int, typer.Option(help="Random matrices of each size for the solver.", min=1)] = 20,
    seed: Annotated[int, typer.Option(help="What rates and matrices are drawn from.", min=0)] = 1,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    check: Annotated[bool, typer.Option("--check", help="Compare with benchmarks/targets.toml.")] = False,
) -> None:
    """Time optimize_topology on shaped links (needs root for network namespaces), and judge its figures and rings."""
    plan = plan_of(peers, mbit, matrices, seed)
    skipped: dict[str, str] = {}
    links: list[Row] = []
    with reports.guarded(as_json=as_json) as progress:
        task = progress.add_task("matrices", total=len(SMALL) + 1 + len(plan.peers))
        solved = solve_matrices(plan, lambda: progress.advance(task))
        if why := missing():
            skipped["links"] = f"{why}; run it as root"
        try:
            for count in plan.peers if not skipped else ():
                progress.update(task, description=f"{count} peers")
                links.append(measure(count, plan))
                progress.advance(task)
        except ShapingFailed as error:
            skipped["links"], links = f"links cannot be shaped here: {error}", []
    if skipped:
        # A figure that could not be measured was not shown: rows without it make `--check` a miss.
        unmeasured: Row = {"took_us": None, "worst_error": None, "slowest_over_best": None}
        links = [{"part": "links", "peers": count, **unmeasured} for count in plan.peers]
    result = reports.report("topology", msgspec.to_builtins(plan), [*links, *solved], skipped=skipped)
    reports.finish(result, COLUMNS, as_json=as_json, against_targets=check)


def plan_of(peers: str, mbit: str, matrices: int, seed: int) -> TopologyPlan:
    try:
        counts = [int(one) for one in peers.split(",")]
        low, _, high = mbit.partition("-")
        lowest, highest = float(low), float(high or low)
    except ValueError:
        raise typer.BadParameter("--peers wants numbers as 4,8 and --mbit a range as 40-120") from None
    if min(counts) < 3 or not 1 <= lowest <= highest:
        raise typer.BadParameter("--peers needs 3 or more, and --mbit rates of 1 or more, the lower one first")
    return TopologyPlan(counts, lowest, highest, matrices, seed)


# On shaped links


def measure(peers: int, plan: TopologyPlan) -> Row:
    """One `optimize_topology` of so many peers that know nothing of their links."""
    draw = np.random.default_rng((plan.seed, peers))
    pairs = itertools.permutations(range(peers), 2)
    rates = {pair: round(float(draw.uniform(plan.lowest_mbit, plan.highest_mbit)), 1) for pair in pairs}
    with ShapedNetwork([Shape()] * peers, rates) as network, LocalCluster() as cluster:
        where = network.start_master(cluster).address
        names = [f"peer-{number}" for number in range(peers)]
        for number, name in enumerate(names):
            cluster.start_worker(name, WORKER, "topology", where, peers, inside=network.inside(number))
        cluster.wait_connected(names, START_S)
        cluster.gather(names, START_S)
        cluster.send(names, {"optimize": True})
        replies = cluster.gather(names, CALL_S)
        with network.within(HUB), MasterClient(where, b"") as connection:
            status = connection.status()
        for name in names:
            cluster.allow_exit(name)
    hosts = hosts_of(status, network, peers)
    errors = [
        abs(link.bytes_per_s / (rates[hosts[link.source], hosts[link.target]] * 125_000) - 1) for link in status.links
    ]
    if len(errors) != len(rates):
        raise ProcessFailed("master", f"knows {len(errors)} of {len(rates)} links")
    ring = [hosts[peer] for peer in status.groups[0].ring]
    return {
        "part": "links",
        "peers": peers,
        "took_us": max(int(reply["took_ns"]) for reply in replies.values()) / 1_000,
        "again_us": max(int(reply["again_ns"]) for reply in replies.values()) / 1_000,
        "worst_error": max(errors),
        "median_error": float(np.median(errors)),
        "slowest_over_best": slowest(ring, rates) / best_slowest(range(peers), rates),
    }


def hosts_of(status: Status, network: ShapedNetwork, peers: int) -> dict[int, int]:
    """Which peer of the run is on which host."""
    numbers = {network.address(host): host for host in range(peers)}
    return {peer.peer: numbers[peer.addresses[0]] for peer in status.peers}


# The solver alone


def solve_matrices(plan: TopologyPlan, advance: Callable[[], None]) -> list[Row]:
    """A row for each number of peers."""
    rows: list[Row] = []
    for peers in (*SMALL, LARGE):
        is_small, shares, cpu_ns = peers in SMALL, list[float](), list[int]()
        for number in range(plan.matrices if is_small else max(1, plan.matrices // 5)):
            draw = np.random.default_rng((plan.seed, peers, number))
            rates: Rates = {pair: float(draw.integers(1, 10**9)) for pair in itertools.permutations(range(peers), 2)}
            before = thread_cpu_ns()
            rate, members = known_or(rates, 0.0), range(peers)
            found = best_ring(members, rate, known_or({}, 0.0))
            cpu_ns.append(thread_cpu_ns() - before)
            assert isinstance(found, Solution)
            best = best_slowest(members, rates) if is_small else bottleneck_bound(members, rate)
            shares.append(slowest(found.ring, rates) / best)
        part = "matrices" if is_small else "simulated"
        row: Row = {"part": part, "peers": peers, "took_us": float(np.median(cpu_ns)) / 1_000}
        row |= {"matrices": len(shares), "slowest_over_best": min(shares)}
        rows.append({**row, "best_share": sum(share >= 1 for share in shares) / len(shares)})
        advance()
    return rows


def slowest(ring: Sequence[int], rates: Rates) -> float:
    return min(rates[edge] for edge in edges_of(ring))


def best_slowest(members: Sequence[int], rates: Rates) -> float:
    """The slowest link of the best ring. All rings up to 7 members, the proven bound of the solver beyond."""
    first, *rest = members
    if len(rest) > max(SMALL) - 1:
        found = best_ring(members, known_or(rates, 0.0), known_or({}, 0.0))
        assert isinstance(found, Solution)
        return slowest(found.ring, rates)
    return max(slowest((first, *order), rates) for order in itertools.permutations(rest))
