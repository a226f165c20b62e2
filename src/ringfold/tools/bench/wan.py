"""`ringfold bench wan`: two peers with a high RTT between them, and a master with the same RTT to both.

Three hosts of a lab share one path of a set rate (`--mbit`, in both directions, queues of 50 ms at the senders), on
which our relay delays and loses packets. Each *cell* is one round-trip time, one share of lost packets, one congestion
control and one number of lanes, in a lab of its own, so that no connection inherits what the kernel has learnt from
another cell.

*Ceiling*: what plain TCP carries of payload on the same path at the shortest distance without loss, in both
directions, the slower one counts. It is what the shaper leaves of its rate, measured once a run.

*Large ops*: `share` is the op's bytes over its time, as part of the ceiling: of the median op after a warm-up, and of
the worst. An op has a beginning and an end, which the ceiling has not: `beyond_trips` is how many RTTs the
median op takes beyond its bytes at the ceiling. With `--plain`, `plain_share` is what as many plain streams carry in
the same cell, steadily: what the relay and the kernel can do. `enough` is the answer to "how many lanes": for each path
the fewest whose median reaches 90 % of the ceiling, or those that came nearest.

*Small ops* have the master's evidence: a message goes from a peer to the master and another one back, which is one RTT.
`extra_ms` is what the median op takes beyond the RTT that the relay was set to.

Needs root, `ip`, `tc` and `/dev/net/tun`: without them everything is skipped, and `--check` is a miss.
"""

import statistics
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
from rich.progress import Progress

from ringfold.runtime.network import congestion_missing
from ringfold.tools import lab as labs
from ringfold.tools.bench import report as reports
from ringfold.tools.bench.report import Column, Row, microseconds, size_bytes, size_text
from ringfold.tools.bench.targets import Value
from ringfold.tools.cluster import MASTER_PORT, LocalCluster, ProcessFailed
from ringfold.tools.lab import Lab, ShapingFailed

WORKER = str(Path(__file__).with_name("workers.py"))
START_S = 60.0
OP_S = 180.0
SETTLE_S = 4.0
PLAIN_S = 4.0
WARM_UP = 2
NEAREST_MS = 1.0
CEILING_STREAMS = 8
SMALL_BYTES = 1_024
MASTER = 2
NAMES = ("side-0", "side-1")
ENOUGH = 0.90
AUTO, HOSTS_OWN = "auto", "host"

COLUMNS = (
    Column("part", "part"),
    Column("RTT", "rtt_ms", lambda value: f"{value:g} ms"),
    Column("loss", "loss", lambda value: f"{value:.2%}"),
    Column("congestion", "congestion"),
    Column("lanes", "lanes"),
    Column("size", "size_bytes", size_text),
    Column("time", "median_us", microseconds),
    Column("p99", "p99_us", microseconds),
    Column("Mbit/s", "mbit", lambda value: f"{value:.1f}"),
    Column("of the ceiling", "share", lambda value: f"{value:.1%}"),
    Column("worst", "worst_share", lambda value: f"{value:.1%}"),
    Column("plain TCP", "plain_share", lambda value: f"{value:.1%}"),
    Column("beyond", "beyond_trips", lambda value: f"{value:.2f} RTT"),
    Column("sent twice", "reissued"),
    Column("over a round trip", "extra_ms", lambda value: f"{value:+.2f} ms"),
)


class WanPlan(msgspec.Struct, frozen=True):
    """What is measured."""

    rtts_ms: list[float]
    losses: list[float]
    lanes: list[int]
    congestion: list[str]
    mbit: float
    size_bytes: int
    rounds: int
    small_rounds: int
    plain: bool


class Cell(msgspec.Struct, frozen=True):
    """One path between the hosts, and how many lanes use it."""

    rtt_ms: float
    loss: float
    congestion: str
    lanes: int

    @property
    def text(self) -> str:
        return f"{self.rtt_ms:g} ms, {self.loss:.2%}, {self.lanes} lanes"


def command(
    rtts: Annotated[str, typer.Option("--rtt", help="Round-trip times in ms, comma-separated.")] = "20,80,150",
    losses: Annotated[str, typer.Option("--loss", help="Shares of lost packets, comma-separated.")] = "0,0.001",
    lanes: Annotated[str, typer.Option(help="Numbers of lanes, comma-separated.")] = "1,4,8,16",
    congestion: Annotated[str, typer.Option(help="The peers' setting `congestion`, comma-separated.")] = AUTO,
    mbit: Annotated[float, typer.Option(help="Rate of the path, in both directions, in Mbit/s.", min=1)] = 100.0,
    size: Annotated[str, typer.Option(help="Size of a large op.")] = "64M",
    rounds: Annotated[int, typer.Option(help="Timed large ops of each cell.", min=1)] = 3,
    small_rounds: Annotated[int, typer.Option("--small", help="Small ops of each path; 0: none.", min=0)] = 40,
    plain: Annotated[bool, typer.Option("--plain", help="Plain TCP streams in each cell, too.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    check: Annotated[bool, typer.Option("--check", help="Compare with benchmarks/targets.toml.")] = False,
) -> None:
    """Large ops over one high-RTT, lossy path by number of lanes, and small ops through the master (needs root)."""
    plan = WanPlan(
        numbers("--rtt", rtts, 0.1, 10_000),
        numbers("--loss", losses, 0, 0.5),
        [int(one) for one in numbers("--lanes", lanes, 1, 64)],
        congestion.split(","),
        mbit,
        size_bytes(size),
        rounds,
        small_rounds,
        plain,
    )
    for one in plan.congestion:
        if one not in (AUTO, HOSTS_OWN) and (why := congestion_missing(one)):
            raise typer.BadParameter(f"--congestion: {why}")
    skipped: dict[str, str] = {}
    rows: list[Row] = []
    with reports.guarded(as_json=as_json) as progress:
        if why := labs.missing(delay=True):
            skipped["lab"] = f"{why}; run it as root"
        try:
            rows += run_all(plan, progress) if not skipped else []
        except ShapingFailed as error:
            skipped["lab"] = f"no such path here: {error}"
    rows += enough(rows)
    if skipped:
        # A figure that could not be measured was not shown: rows without it make `--check` a miss.
        rows = [{"part": "enough", "share": None}, {"part": "small", "extra_ms": None}]
    result = reports.report("wan", msgspec.to_builtins(plan), rows, skipped=skipped)
    reports.finish(result, COLUMNS, as_json=as_json, against_targets=check)


def run_all(plan: WanPlan, progress: Progress) -> list[Row]:
    cells = list(cells_of(plan))
    task = progress.add_task("ceiling", total=len(cells) + 1)
    ceiling = ceiling_of(plan)
    rows: list[Row] = [{"part": "ceiling", "mbit": ceiling * 8 / 1e6, "share": 1.0}]
    for cell in cells:
        progress.update(task, advance=1, description=cell.text)
        rows += measured(cell, plan, ceiling)
    return rows


def numbers(option: str, text: str, low: float, high: float) -> list[float]:
    try:
        found = [float(one) for one in text.split(",")]
    except ValueError:
        found = []
    if not found or not all(low <= one <= high for one in found):
        raise typer.BadParameter(f"{option} wants numbers from {low:g} to {high:g}, comma-separated, not {text!r}")
    return found


def cells_of(plan: WanPlan) -> Iterator[Cell]:
    for rtt_ms in plan.rtts_ms:
        for loss in plan.losses:
            for congestion in plan.congestion:
                for lanes in plan.lanes:
                    yield Cell(rtt_ms, loss, congestion, lanes)


def enough(rows: Sequence[Row]) -> list[Row]:
    """For each path the row with the fewest lanes that reach 90 % of the ceiling, or else with the best share."""
    by_path: dict[tuple[Value, ...], list[Row]] = {}
    for row in rows:
        if row["part"] == "large":
            by_path.setdefault((row["rtt_ms"], row["loss"], row["congestion"]), []).append(row)
    return [{**_fewest(tried), "part": "enough"} for tried in by_path.values()]


def _fewest(tried: Sequence[Row]) -> Row:
    def rank(row: Row) -> tuple[bool, float]:
        share, lanes = row["share"], row["lanes"]
        assert isinstance(share, float)
        assert isinstance(lanes, int)
        return (True, -lanes) if share >= ENOUGH else (False, share)

    return max(tried, key=rank)


def measured(cell: Cell, plan: WanPlan, ceiling: float) -> Iterator[Row]:
    """The rows of one cell, in a lab of its own. Small ops use no lane, so one number of lanes is enough for them."""
    base: Row = {"rtt_ms": cell.rtt_ms, "loss": cell.loss, "congestion": cell.congestion, "lanes": cell.lanes}
    with lab_of(plan, cell.rtt_ms, cell.loss) as lab:
        row: Row = {"part": "large", **base}
        if plan.plain:
            control = HOSTS_OWN if cell.congestion == AUTO else cell.congestion
            row["plain_share"] = saturated(lab, cell.lanes, control) / ceiling
        with peers(lab, cell, "auto") as cluster:
            yield row | large(cluster, plan, ceiling, cell.rtt_ms)
        if plan.small_rounds and cell.lanes == plan.lanes[0]:
            with peers(lab, cell, "master") as cluster:
                yield {"part": "small", **base, **small(cluster, plan.small_rounds, cell.rtt_ms)}


def lab_of(plan: WanPlan, rtt_ms: float, loss: float) -> Lab:
    return Lab(hosts=3, paths=[labs.Path(name="far", up=plan.mbit, rtt_ms=rtt_ms, loss=loss)])


@contextmanager
def peers(lab: Lab, cell: Cell, evidence: str) -> Iterator[LocalCluster]:
    """Two peers with the cell's lanes between them, and a master on the third host."""
    with LocalCluster() as cluster:
        where = f"{lab.address(MASTER)}:{MASTER_PORT}"
        mine = {"RINGFOLD_DATA_PORT": "48149", "RINGFOLD_AGENT": "off", "RINGFOLD_CONGESTION": cell.congestion}
        settings: dict[str, Any] = {"lanes": cell.lanes, "evidence": evidence}
        there = lab.inside(MASTER)
        cluster.start_master(listen=where, arguments=["--insecure"], inside=there, wait=False, **settings)
        for host, name in enumerate(NAMES):
            cluster.start_worker(name, WORKER, "wan", where, lab.address(host), inside=lab.inside(host), env=mine)
        cluster.wait_connected(NAMES, START_S)
        cluster.gather(NAMES, START_S)
        yield cluster
        for name in NAMES:
            cluster.allow_exit(name)


def request(cluster: LocalCluster, order: dict[str, object]) -> tuple[list[int], int]:
    """What ops took on the slower side, one by one, and how many frames were sent twice. All must have gone right."""
    cluster.send(NAMES, order)
    replies = cluster.gather(NAMES, OP_S)
    for name, reply in replies.items():
        if not reply["right"] or reply["aborted"]:
            raise ProcessFailed(name, f"the op went wrong: {reply}", cluster.log_tail(name))
    took = [max(both) for both in zip(*(reply["took_ns"] for reply in replies.values()), strict=True)]
    return took, sum(int(reply.get("reissued", 0)) for reply in replies.values())


def large(cluster: LocalCluster, plan: WanPlan, ceiling: float, rtt_ms: float) -> Row:
    order: dict[str, object] = {"do": "large", "size_bytes": plan.size_bytes}
    for _ in range(WARM_UP):
        request(cluster, order)
    ops = [request(cluster, order) for _ in range(plan.rounds)]
    row = judged([took[0] for took, _ in ops], plan.size_bytes, ceiling, rtt_ms)
    return row | {"reissued": sum(more for _, more in ops)}


def judged(took_ns: Sequence[int], size: int, ceiling: float, rtt_ms: float) -> Row:
    """The rate of the median op, and of the worst, as part of the ceiling (bytes a second)."""
    median_s, worst_s = statistics.median(took_ns) / 1e9, max(took_ns) / 1e9
    row: Row = {"size_bytes": size, **reports.spread(took_ns), "mbit": size / median_s * 8 / 1e6}
    row |= {"share": size / median_s / ceiling, "worst_share": size / worst_s / ceiling}
    return row | {"beyond_trips": (median_s - size / ceiling) / rtt_ms * 1e3}


def small(cluster: LocalCluster, count: int, rtt_ms: float) -> Row:
    order: dict[str, object] = {"do": "small", "size_bytes": SMALL_BYTES, "count": count}
    request(cluster, {**order, "count": 3})
    took_ns, _ = request(cluster, order)
    row: Row = {"size_bytes": SMALL_BYTES, **reports.spread(took_ns)}
    return row | {"extra_ms": statistics.median(took_ns) / 1e6 - rtt_ms}


# The kernel alone


def ceiling_of(plan: WanPlan) -> float:
    with lab_of(plan, NEAREST_MS, 0.0) as lab:
        return saturated(lab, CEILING_STREAMS, HOSTS_OWN, settle_s=1.0)


def saturated(lab: Lab, streams: int, congestion: str, settle_s: float = SETTLE_S) -> float:
    """Bytes of payload a second that so many plain streams carry in the slower direction."""
    addresses = [",".join([lab.address(host)] * streams) for host in range(2)]
    with LocalCluster() as cluster:
        for host, name in enumerate(NAMES):
            ends = (host, addresses[host], addresses[1 - host], congestion)
            cluster.start_worker(name, WORKER, "streams", *ends, inside=lab.inside(host))
        cluster.wait_connected(NAMES, START_S)
        cluster.gather(NAMES, START_S)
        cluster.send(NAMES[1:], {"do": "connect"})
        cluster.send(NAMES, {"do": "saturate", "settle_s": settle_s, "seconds": PLAIN_S})
        replies = cluster.gather(NAMES, OP_S)
        for name in NAMES:
            cluster.allow_exit(name)
    return min(sum(reply["rates"]) for reply in replies.values())
