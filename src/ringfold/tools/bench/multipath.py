"""`ringfold bench multipath`: two hosts with several paths between them, and how much of those a transfer uses.

The hosts are network namespaces whose paths have the rates of a layout (`200+50`: two paths, in Mbit/s), one queue per
path at the sender. The *ceiling* is measured in the same lab: plain TCP on all paths at once, in both directions as an
all-reduce of two peers uses them, in bytes of payload per second, the slower direction's sum. An op of B bytes sends
and receives B bytes, so `share` is B / (time * ceiling).

Beside ours (lanes on all paths that pull segments): the first path alone, a fixed split into equal parts by the same
engine, and the kernel's Multipath TCP with the same bytes in both directions. Then in mid-transfer: the rates of the
first two paths are swapped (`over_best` is the time over that of the ceiling, the median of some swaps), and each of
them is cut silently, one after the other: the op must succeed in the same epoch, and the path must be used again after
it is restored (`back_s` later).

Then ops of one to four segments without and with hints (shares by the paths' rates): `gain` is the time without hints
over that with them.

Then fixed shares (`--fixed`: only these), set by real agents (`static:`), that are not those of the rates: one op of
each of `--fixed-sizes`, and a row for each path. `measured` is the part of the payload that both sides gave to the
path, `on_wire` its part of the bytes that the shapers of the hosts let through, with headers, acknowledgements and what
TCP sent again. `off` is how far `measured` is from the share that was asked, relative to it.

The last parts (`--hints`: only these) have real agents:

- *cold start*: the first op of new connections, with unequal paths. The agents know the rates (a fixed share), the
  peers do not.
- *switch*: a third host begins to fill the queue of one path inside the switch, where no sender can see it; the switch
  sends telemetry to the agents every 5 ms. One op of one to four segments, or a larger one, 0.3 s after that.
- *backpressure*: in the middle of an op a telemetry packet has 255 for one path. `latency_ms` is how much later the
  last segment was given to that path, the worst of several packets; `back_ms` is the time from the packet with 0 to
  the next segment on the path.
- *steady*: ops without a pause, with the switch's real telemetry: how much the agent's share varies (`std`, of 1), with
  the bottleneck at the hosts and with it inside the switch, where the senders' own bytes fill the queues.

Needs root, `ip` and `tc`: without them everything is skipped, and `--check` is a miss.
"""

import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from ringfold.agent.client import AgentConsole
from ringfold.config import TELEMETRY_PORT
from ringfold.runtime import threads
from ringfold.runtime.clock import monotonic_ns, unix_ns
from ringfold.runtime.datagrams import DatagramSender
from ringfold.tools import lab as labs
from ringfold.tools.bench import report as reports
from ringfold.tools.bench.report import Column, Row, Sheet, microseconds, size_bytes, size_text, times
from ringfold.tools.bench.targets import Value
from ringfold.tools.cluster import MASTER_PORT, LocalCluster, Message, ProcessFailed
from ringfold.tools.lab import SWITCH, Lab, Queues, ShapingFailed, Telemetry, TelemetrySender
from ringfold.tools.streams import mptcp_commands, mptcp_missing
from ringfold.wire.agent import HINTS_NAME
from ringfold.wire.telemetry import Congestion, Packet, encode, prefix_number

WORKER = str(Path(__file__).with_name("workers.py"))
START_S = 60.0
OP_S = 90.0
SLOWEST_BYTES_S = 1e6
SETTLE_S = 0.6
CEILING_S = 2.0
BACK_WITHIN_S = 20.0
SWAPS = 5
WARM_UP = 3
SEGMENT_BYTES = 16 << 10
FEW_ROUNDS = 21
PACKETS = 10
NAMES = ("side-0", "side-1")
CONTROL = "control"
"""The path of the master and of telemetry: not shaped, and no lane uses it."""
Order = dict[str, object]


class MultipathPlan(msgspec.Struct, frozen=True):
    """What is measured."""

    layouts: list[str]
    sizes: list[int]
    rounds: int
    change_bytes: int
    steady_s: float = 30.0
    fixed_sizes: list[int] = []


def command(
    layouts: Annotated[str, typer.Option(help="Rates of the paths in Mbit/s, layouts comma-separated.")] = (
        "200+50,100+100,120+60+30"
    ),
    sizes: Annotated[str, typer.Option(help="Sizes of ops, comma-separated.")] = "2M,16M",
    rounds: Annotated[int, typer.Option(help="Timed ops of each size.", min=1)] = 7,
    hints: Annotated[bool, typer.Option("--hints", help="Only the parts with agents and their hints.")] = False,
    steady: Annotated[float, typer.Option(help="Seconds of ops over which an agent's share is watched.")] = 30.0,
    fixed: Annotated[bool, typer.Option("--fixed", help="Only the part with fixed shares.")] = False,
    fixed_sizes: Annotated[str, typer.Option(help="Sizes of ops with fixed shares.")] = "16M,64M,256M",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    check: Annotated[bool, typer.Option("--check", help="Compare with benchmarks/targets.toml.")] = False,
) -> None:
    """Transfers over several shaped paths beside the ceiling, a single path, a fixed split and MPTCP (needs root)."""
    if hints and fixed:
        raise typer.BadParameter("--hints and --fixed each choose one part: give one of them")
    chosen = [] if hints or fixed else layouts.split(",")
    bound = [] if hints else [size_bytes(one) for one in fixed_sizes.split(",")]
    plan = MultipathPlan(chosen, [size_bytes(one) for one in sizes.split(",")], rounds, 32 << 20, steady, bound)
    for layout in plan.layouts:
        rates_of(layout)
    if bound and (min(bound) < MIN_FIXED_BYTES):
        raise typer.BadParameter(f"--fixed-sizes wants {size_text(MIN_FIXED_BYTES)} or more: less is a few segments")
    skipped: dict[str, str] = {}
    rows: list[Row] = []
    with reports.guarded(as_json=as_json) as progress:
        if why := labs.missing():
            skipped["paths"] = f"{why}; run it as root"
        elif why := mptcp_missing():
            skipped["mptcp"] = why
        task = progress.add_task("paths", total=len(plan.layouts) + 2)
        try:
            for layout in plan.layouts if "paths" not in skipped else ():
                progress.update(task, description=layout)
                rows += measure(layout, plan, with_mptcp="mptcp" not in skipped)
                progress.advance(task)
            progress.update(task, description="fixed shares")
            rows += measure_fixed(plan.fixed_sizes) if plan.fixed_sizes and "paths" not in skipped else []
            progress.update(task, description="hints", advance=1)
            rows += measure_hints(plan.steady_s, PACKETS) if not fixed and "paths" not in skipped else []
        except ShapingFailed as error:
            skipped["paths"], rows = f"paths cannot be shaped here: {error}", []
    if "paths" in skipped:
        rows = _unmeasured(plan)
    result = reports.report("multipath", msgspec.to_builtins(plan), rows, skipped=skipped)
    reports.finish(result, sheets(rows), as_json=as_json, against_targets=check)


def _unmeasured(plan: MultipathPlan) -> list[Row]:
    """A figure that could not be measured was not shown: rows without it make `--check` a miss."""
    rows: list[Row] = [{"part": "swap", "over_best": None}, {"part": "cut", "succeeded": None}]
    rows += [{"part": "backpressure", "latency_ms": None}, {"part": "steady", "std": None}]
    rows += [{"part": "fixed", "size_bytes": size, "off": None} for size in plan.fixed_sizes]
    transfer: Row = {"part": "transfer", "way": "ringfold", "share": None}
    return rows + [{**transfer, "layout": one, "size_bytes": size} for one in plan.layouts for size in plan.sizes]


def rates_of(layout: str) -> list[float]:
    try:
        rates = [float(one) for one in layout.split("+")]
    except ValueError:
        rates = []
    if len(rates) < 2 or min(rates) <= 0:
        raise typer.BadParameter(f"--layouts wants two or more rates such as 200+50, not {layout!r}")
    return rates


def measure(layout: str, plan: MultipathPlan, *, with_mptcp: bool) -> list[Row]:
    """All rows of one layout, in one lab."""
    rates = rates_of(layout)
    # The last path is the master's: not shaped, and no lane uses it.
    paths = [labs.Path(name=f"path{number}", up=rate) for number, rate in enumerate(rates)]
    rows: list[Row] = []
    with Lab(hosts=2, paths=[*paths, labs.Path(name=CONTROL)]) as lab:
        ceiling = _ceiling(lab, len(rates))
        rows.append({"part": "ceiling", "layout": layout, "way": "plain TCP", "mbit": ceiling * 8 / 1e6, "share": 1.0})
        base: Row = {"part": "transfer", "layout": layout}
        with _peers(lab, len(rates)) as cluster:
            rows += [{**base, **row} for row in _transfers(cluster, "ringfold", plan, ceiling)]
            _request(cluster, {"do": "shares", "shares": [1 / len(rates)] * len(rates), "fixed": True})
            rows += [{**base, **row} for row in _transfers(cluster, "equal split", plan, ceiling)]
            _request(cluster, {"do": "shares", "shares": [], "fixed": False})
            rows += [{"layout": layout, **row} for row in _changes(lab, cluster, rates, plan, ceiling)]
        with _peers(lab, 1) as cluster:
            rows += [{**base, **row} for row in _transfers(cluster, "first path", plan, ceiling)]
        if with_mptcp:
            rows += [{**base, **row} for row in _mptcp(lab, len(rates), plan, ceiling)]
    rows += [{"part": "few segments", "layout": layout, **row} for row in _few(rates)]
    return rows


# Ours


@contextmanager
def _peers(
    lab: Lab, paths: int, *, small_bytes: int | None = None, agents: Mapping[int, Path] | None = None
) -> Iterator[LocalCluster]:
    """Two peers and a master, stopped at the end. `agents` are the directories of hosts' agents."""
    with LocalCluster() as cluster:
        where = f"{lab.address(SWITCH, CONTROL)}:{MASTER_PORT}"
        settings: dict[str, Any] = {} if small_bytes is None else {"small_bytes": small_bytes}
        there = lab.inside(SWITCH)
        cluster.start_master(listen=where, arguments=["--insecure"], inside=there, wait=False, **settings)
        for host, name in enumerate(NAMES):
            mine = ",".join(lab.addresses(host)[:paths])
            agent = (agents or {}).get(host)
            advice = {"RINGFOLD_AGENT": "off"} if agent is None else {"RINGFOLD_AGENT_DIR": str(agent)}
            env = {"RINGFOLD_DATA_PORT": "48149", **advice}
            cluster.start_worker(name, WORKER, "multipath", where, mine, inside=lab.inside(host), env=env)
        cluster.wait_connected(NAMES, START_S)
        cluster.gather(NAMES, START_S)
        yield cluster
        for name in NAMES:
            cluster.allow_exit(name)


def _request(cluster: LocalCluster, order: Order) -> dict[str, Message]:
    cluster.send(NAMES, order)
    return cluster.gather(NAMES, OP_S)


def _op(cluster: LocalCluster, size: int) -> tuple[int, dict[str, Message]]:
    """One verified op: how long it took the slower side, and both reports."""
    cluster.send(NAMES, {"do": "op", "size_bytes": size})
    limit_s = OP_S + size / SLOWEST_BYTES_S  # a large one is also made and verified, on a machine that may be busy
    cluster.gather(NAMES, limit_s)
    return _result(cluster, limit_s)


def _result(cluster: LocalCluster, limit_s: float = OP_S) -> tuple[int, dict[str, Message]]:
    replies = cluster.gather(NAMES, limit_s)
    for name, reply in replies.items():
        if not reply["right"] or reply["aborted"]:
            raise ProcessFailed(name, f"the op went wrong: {reply}", cluster.log_tail(name))
    return max(int(reply["took_ns"]) for reply in replies.values()), replies


def _transfers(cluster: LocalCluster, way: str, plan: MultipathPlan, ceiling: float) -> Iterator[Row]:
    for _ in range(WARM_UP):  # a fresh connection finds its rate by losing packets
        _op(cluster, max(plan.sizes))
    for size in plan.sizes:
        _op(cluster, size)
        ops = [_op(cluster, size) for _ in range(plan.rounds)]
        again = sum(int(reply["reissued"]) for _, replies in ops for reply in replies.values())
        yield _row(way, size, [took for took, _ in ops], ceiling) | {"reissued": again}


def _row(way: str, size: int, took_ns: Sequence[int], ceiling: float) -> Row:
    median = statistics.median(took_ns)
    rate = size / median * 1e9
    worst = size / max(took_ns) * 1e9
    row: Row = {"way": way, "size_bytes": size, "median_us": median / 1_000, "mbit": rate * 8 / 1e6}
    return row | {"share": rate / ceiling, "worst_share": worst / ceiling}


def _few(rates: Sequence[float]) -> Iterator[Row]:
    """Ops of one to four segments, without and with hints: pulling so few does not measure the paths.

    A shaper's burst would let all of them go at once, so these have nearly none.
    """
    paths = [labs.Path(name=f"path{number}", up=rate, burst_bytes=3_200) for number, rate in enumerate(rates)]
    without: dict[int, float] = {}
    with Lab(hosts=2, paths=[*paths, labs.Path(name=CONTROL)]) as lab:
        for way in ("ringfold", "with hints"):
            with _peers(lab, len(rates), small_bytes=0) as cluster:
                if way == "with hints":
                    _request(cluster, {"do": "shares", "shares": [rate / sum(rates) for rate in rates], "fixed": False})
                for segments in range(1, 5):
                    size = segments * SEGMENT_BYTES
                    took = statistics.median(_op(cluster, size)[0] for _ in range(FEW_ROUNDS))
                    row: Row = {"way": way, "size_bytes": size, "median_us": took / 1_000}
                    gain = without.setdefault(segments, took) / took
                    yield row if way == "ringfold" else row | {"gain": gain}


# Fixed shares

MIN_FIXED_BYTES = 1 << 20
FIXED_SHARES = (("100+100", 0.3), ("200+50", 0.5), ("200+50", 0.1))
"""Rates, and the share of the second path: on equal paths, and more and less than the rates of unequal ones say."""


def measure_fixed(sizes: Sequence[int]) -> Iterator[Row]:
    """All rows of fixed shares. Needs what a lab needs."""
    for layout, second in FIXED_SHARES:
        asked = [1 - second, second]
        with (
            Lab(hosts=2, paths=_lab_paths(rates_of(layout))) as lab,
            _advised(lab, agents=True, policy=f"static:{second}") as (cluster, _),
            Queues(lab, ends=("up",)) as queues,
        ):
            _op(cluster, min(sizes))
            for size in sizes:
                before = _on_wire(queues)
                took, replies = _op(cluster, size)
                wire = [now - was for now, was in zip(_on_wire(queues), before, strict=True)]
                given = [sum(reply["path_bytes"][path] for reply in replies.values()) for path in range(len(asked))]
                base: Row = {"part": "fixed", "layout": layout, "size_bytes": size, "median_us": took / 1_000}
                for row in fixed_rows(asked, given, wire):
                    yield base | row


def fixed_rows(asked: Sequence[float], given: Sequence[int], wire: Sequence[int]) -> Iterator[Row]:
    """For each path the share that was asked, and what came of it."""
    for path, share in enumerate(asked):
        measured = given[path] / sum(given)
        off = abs(measured - share) / share
        yield {"path": path, "asked": share, "measured": measured, "on_wire": wire[path] / sum(wire), "off": off}


def _on_wire(queues: Queues) -> list[int]:
    """The bytes that the shapers of both hosts have let through, by path."""
    found: dict[str, int] = {}
    for queue in queues.read():
        found[queue.path] = found.get(queue.path, 0) + queue.sent_bytes
    return list(found.values())


# In mid-transfer


def _changes(
    lab: Lab, cluster: LocalCluster, rates: Sequence[float], plan: MultipathPlan, ceiling: float
) -> Iterator[Row]:
    size = plan.change_bytes
    best_s = size / ceiling
    swapped = [*rates[1::-1], *rates[2:]]
    if rates[0] != rates[1]:
        ops = []
        for _ in range(SWAPS):
            _op(cluster, size // 4)
            _request(cluster, {"do": "op", "size_bytes": size})
            cluster.pause(0.4 * best_s)
            _set_rates(lab, swapped)
            ops.append(_result(cluster))
            _set_rates(lab, rates)
        took, replies = sorted(ops, key=lambda op: op[0])[SWAPS // 2]
        yield {"part": "swap", "way": "ringfold", **_changed(size, took, best_s, replies)}
    for path in range(2):
        _op(cluster, size // 16)
        left = sum(rates) - rates[path]
        _request(cluster, {"do": "op", "size_bytes": size})
        cluster.pause(0.4 * best_s)
        lab.cut(path)
        took, replies = _result(cluster)
        lab.restore(path)
        best = 0.4 * best_s + 0.6 * best_s * sum(rates) / left
        row: Row = {"part": "cut", "way": "ringfold", "path": path, "back_s": _used_again(cluster, path)}
        yield row | _changed(size, took, best, replies)


def _set_rates(lab: Lab, rates: Sequence[float]) -> None:
    for path, rate in enumerate(rates):
        lab.set_rate(path, up=rate)


def _changed(size: int, took_ns: int, best_s: float, replies: dict[str, Message]) -> Row:
    return {
        "size_bytes": size,
        "median_us": took_ns / 1_000,
        "over_best": took_ns / 1e9 / best_s,
        "succeeded": 1,
        "epochs": len({int(reply["epoch"]) for reply in replies.values()}),
        "reissued": sum(int(reply["reissued"]) for reply in replies.values()),
    }


def _used_again(cluster: LocalCluster, path: int) -> float | None:
    """After how many seconds of ops the path carries a tenth of what it should again; None: not in time."""
    passed = 0.0
    while passed < BACK_WITHIN_S:
        took, replies = _op(cluster, 4 << 20)
        passed += took / 1e9
        given = [reply["path_bytes"] for reply in replies.values()]
        if all(sent[path] > 0.02 * sum(sent) for sent in given):
            return passed
        cluster.pause(0.1)
        passed += 0.1
    return None


# The kernel alone


def _ceiling(lab: Lab, paths: int) -> float:
    """Payload per second over all paths, in the direction that has less of it. Two streams fill what one loses."""
    with _streams(lab, paths, "tcp") as cluster:
        replies = _request(cluster, {"do": "saturate", "settle_s": SETTLE_S, "seconds": CEILING_S})
    return min(sum(reply["rates"]) for reply in replies.values())


def _mptcp(lab: Lab, paths: int, plan: MultipathPlan, ceiling: float) -> Iterator[Row]:
    for command in mptcp_commands([lab.space(0), lab.space(1)], lab.addresses(0)[:paths], lab.paths[:paths]):
        subprocess.run(command, check=True, capture_output=True)
    with _streams(lab, paths, "mptcp") as cluster:
        for _ in range(WARM_UP):
            _request(cluster, {"do": "exchange", "size_bytes": max(plan.sizes)})
        for size in plan.sizes:
            took = []
            for _ in range(1 + plan.rounds):
                replies = _request(cluster, {"do": "exchange", "size_bytes": size})
                took.append(max(int(reply["took_ns"]) for reply in replies.values()))
            yield _row("MPTCP", size, took[1:], ceiling)


@contextmanager
def _streams(lab: Lab, paths: int, kind: str) -> Iterator[LocalCluster]:
    per_path = 1 if kind == "mptcp" else 2
    addresses = [",".join(lab.addresses(host)[:paths] * per_path) for host in range(2)]
    with LocalCluster() as cluster:
        for host, name in enumerate(NAMES):
            ends = (host, addresses[host], addresses[1 - host], kind)
            cluster.start_worker(name, WORKER, "streams", *ends, inside=lab.inside(host))
        cluster.wait_connected(NAMES, START_S)
        cluster.gather(NAMES, START_S)
        cluster.send(NAMES[1:], {"do": "connect"})
        yield cluster
        for name in NAMES:
            cluster.allow_exit(name)


COLD_RATES = (100.0, 10.0)
COLD_BYTES = (2 * SEGMENT_BYTES, 4 * SEGMENT_BYTES, 16 * SEGMENT_BYTES)
COLD_STARTS = 5
RATE = 40.0
CROSS_MBIT = 55.0
UNSEEN_ROUNDS = 5
FILL_S = 0.3
LOADS = ("load-0", "load-1")
SHORT_BURST, LONG_BURST = 3_200, 67_050
HELD_S, CLEAR_S = 0.2, 0.4
TELEMETRY_MS = 5.0
WATCHED_BYTES = 48 << 20
STEADY_BYTES = 4 << 20
SETTLED_S, SAMPLE_S = 5.0, 0.01
AGENT_START_S = 30.0
S, MS = 1e9, 1e6


def measure_hints(steady_s: float, packets: int) -> list[Row]:
    """All rows. Needs what a lab needs."""
    rows = list(_cold())
    rows += _unseen()
    rows.append(_backpressure(packets))
    rows += [_steady(steady_s, at_switch=at_switch) for at_switch in (False, True)]
    return rows


def _lab_paths(rates: Sequence[float], *, at_switch: bool = False, burst_bytes: int = LONG_BURST) -> list[labs.Path]:
    shaped = []
    for number, rate in enumerate(rates):
        up, down = (None, rate) if at_switch else (rate, None)
        shaped.append(labs.Path(name=f"path{number}", up=up, down=down, burst_bytes=burst_bytes))
    return [*shaped, labs.Path(name=CONTROL)]


@contextmanager
def _advised(lab: Lab, *, agents: bool, policy: str = "auto") -> Iterator[tuple[LocalCluster, list[Path]]]:
    """Two peers on two paths, each with an agent or both without, and ready: their flows have places."""
    with tempfile.TemporaryDirectory(prefix="ringfold-bench-") as root, LocalCluster() as daemons:
        directories = [Path(root) / f"agent{host}" for host in range(2)] if agents else []
        for host, directory in enumerate(directories):
            start_lab_agent(daemons, f"agent-{host}", lab, host, directory, policy=policy)
        for directory in directories:
            _until(daemons, (directory / HINTS_NAME).exists, "an agent does not start")
        with _peers(lab, 2, small_bytes=0, agents=dict(enumerate(directories))) as cluster:
            for directory in directories:
                _until(cluster, partial(_has_flow, directory), "no flow is registered")
            yield cluster, directories


def start_lab_agent(
    cluster: LocalCluster, name: str, lab: Lab, host: int, directory: Path, *, policy: str = "auto"
) -> None:
    """Start the agent of a host, which receives telemetry on the path `control`.

    It uses telemetry and measured rates, not the host's own queues.
    """
    telemetry = f"{lab.address(host, CONTROL)}:{TELEMETRY_PORT}"
    options = ["--no-nics", "--telemetry", telemetry, "--allow", "0.0.0.0/0", "--policy", policy]
    cluster.start_agent(name, directory, *options, inside=lab.inside(host), log_level="error")


def send_congestion(lab: Lab, host: int, *, path: int, congestion: int) -> None:
    """Send a host's agent the congestion of a path of all its flows, as a switch would."""
    number, bits = prefix_number("any")
    now_ns = unix_ns()
    packet = Packet(Congestion(number, number, path, congestion, 0, bits, bits), now_ns, now_ns)
    with lab.within(host), DatagramSender(lab.address(host, CONTROL), TELEMETRY_PORT) as sender:
        sender.send(encode(packet, None))


def _until(cluster: LocalCluster, holds: Callable[[], bool], what: str) -> None:
    deadline_ns = monotonic_ns() + int(AGENT_START_S * S)
    while not holds():
        if monotonic_ns() > deadline_ns:
            raise ProcessFailed("agent", what)
        cluster.pause(0.01)


def _has_flow(directory: Path) -> bool:
    return bool(_shares(directory))


def _shares(directory: Path) -> list[tuple[float, ...]]:
    """The shares of each flow of an agent."""
    with AgentConsole([directory]) as console:
        return [flow.shares for flow in console.flows()]


def _op_us(cluster: LocalCluster, size: int) -> float:
    """Microseconds of one verified op."""
    return _op(cluster, size)[0] / 1_000


def _cold() -> Iterator[Row]:
    share = COLD_RATES[1] / sum(COLD_RATES)
    for size in COLD_BYTES:
        without = None
        for way in ("ringfold", "with hints"):
            took = []
            for _ in range(COLD_STARTS):
                with (
                    Lab(hosts=2, paths=_lab_paths(COLD_RATES, burst_bytes=SHORT_BURST)) as lab,
                    _advised(lab, agents=way == "with hints", policy=f"static:{share:.4f}") as (cluster, _),
                ):
                    took.append(_op_us(cluster, size))
            median = statistics.median(took)
            row: Row = {"part": "cold start", "way": way, "size_bytes": size, "median_us": median}
            without = without or median
            yield row if way == "ringfold" else row | {"gain": without / median}


def _unseen() -> Iterator[Row]:
    """Several times: a third host begins to fill path 1 inside the switch, in both directions; then there is one op."""
    sizes = [segments * SEGMENT_BYTES for segments in (1, 2, 3, 4, 64)]
    without: dict[int, float] = {}
    for way in ("ringfold", "with hints"):
        took: dict[int, list[float]] = {size: [] for size in sizes}
        with (
            Lab(hosts=3, paths=_lab_paths((RATE, RATE), at_switch=True, burst_bytes=SHORT_BURST)) as lab,
            _advised(lab, agents=way == "with hints") as (cluster, _),
            TelemetrySender(lab, via=CONTROL) as send,
            Telemetry(lab, send, every_ms=TELEMETRY_MS),
            LocalCluster() as others,
        ):
            traffic = [sys.executable, "-m", "ringfold.tools.lab.traffic"]
            for host in range(2):
                target = f"{lab.address(host, 1)}:9"
                others.start(f"sink-{host}", lab.inside(host, [*traffic, "receive", target]))
                load = ["udp", target, "--seconds", "600", "--mbit", str(CROSS_MBIT)]
                others.start(LOADS[host], lab.inside(2, [*traffic, *load]))
            others.pause(0.5)
            for size in sizes * UNSEEN_ROUNDS:
                for load_name in LOADS:
                    others.freeze(load_name)
                others.pause(CLEAR_S)
                for _ in range(3):  # both paths are seen to be good
                    _op_us(cluster, 16 * SEGMENT_BYTES)
                for load_name in LOADS:
                    others.thaw(load_name)
                others.pause(FILL_S)
                took[size].append(_op_us(cluster, size))
        for size, each in took.items():
            median = statistics.median(each)
            row: Row = {"part": "switch", "way": way, "size_bytes": size, "median_us": median}
            gain = without.setdefault(size, median) / median
            yield row if way == "ringfold" else row | {"gain": gain}


def _backpressure(packets: int) -> Row:
    with Lab(hosts=2, paths=_lab_paths((RATE, RATE))) as lab, _advised(lab, agents=True) as (cluster, _):
        cluster.send(NAMES, {"do": "watch", "size_bytes": WATCHED_BYTES})
        cluster.gather(NAMES, OP_S)
        cluster.pause(CLEAR_S)
        holds: list[tuple[int, int]] = []
        for _ in range(packets):
            held_ns = monotonic_ns()
            send_congestion(lab, 0, path=1, congestion=255)
            cluster.pause(HELD_S)
            clear_ns = monotonic_ns()
            send_congestion(lab, 0, path=1, congestion=0)
            holds.append((held_ns, clear_ns))
            cluster.pause(CLEAR_S)
        replies = cluster.gather(NAMES, OP_S)
    return {"part": "backpressure", "way": "with hints", **judged(replies["side-0"], holds)}


def judged(reply: Message, holds: Sequence[tuple[int, int]]) -> Row:
    """From when the path got segments, and when it was held and cleared, to how late both were."""
    given: list[int] = reply["given_ns"]
    late, back = [], []
    for held_ns, clear_ns in holds:
        if not any(held_ns - HELD_S * S < at < held_ns for at in given):
            continue  # it was not in use: nothing is shown
        late.append(max((at - held_ns for at in given if held_ns < at < clear_ns), default=0))
        back.append(min((at - clear_ns for at in given if at > clear_ns), default=None))
    if not late:
        return {"packets": 0, "latency_ms": None}
    known = [each for each in back if each is not None]
    median = statistics.median(late) / MS
    row: Row = {"packets": len(late), "median_us": median * 1_000, "latency_ms": max(late) / MS}
    return row | {"returned": len(known), "back_ms": statistics.median(known) / MS if known else None}


@contextmanager
def _sampled(directory: Path) -> Iterator[list[tuple[int, float]]]:
    """When, and what the second path's share was then, of an agent's only flow: looked at all the time."""
    samples: list[tuple[int, float]] = []
    over = threads.Event()

    def look() -> None:
        with AgentConsole([directory]) as console:
            while not over.wait(SAMPLE_S):
                samples.extend((monotonic_ns(), flow.shares[1]) for flow in console.flows() if flow.shares)

    thread = threads.start("sampling", look)
    try:
        yield samples
    finally:
        over.set()
        thread.join()


def _steady(seconds: float, *, at_switch: bool) -> Row:
    rates = (RATE, RATE / 2)
    with (
        Lab(hosts=2, paths=_lab_paths(rates, at_switch=at_switch)) as lab,
        _advised(lab, agents=True) as (cluster, directories),
        TelemetrySender(lab, via=CONTROL) as send,
        Telemetry(lab, send, every_ms=TELEMETRY_MS),
    ):
        ends_ns = monotonic_ns() + int((SETTLED_S + seconds) * S)
        settled_ns = monotonic_ns() + int(SETTLED_S * S)
        with _sampled(directories[0]) as samples:
            while monotonic_ns() < ends_ns:
                _op_us(cluster, STEADY_BYTES)
    shares = [share for at_ns, share in samples if at_ns >= settled_ns]
    base: Row = {"part": "steady", "way": "with hints", "layout": "switch" if at_switch else "hosts"}
    if len(shares) < 2:
        return base | {"std": None}
    figures: Row = {"samples": len(shares), "mean": statistics.fmean(shares), "std": statistics.pstdev(shares)}
    return base | figures


_PATHS = Column("paths", "layout")
_SIZE = Column("size", "size_bytes", size_text)
_TIME = Column("time", "median_us", microseconds)
_TWICE = Column("sent twice", "reissued")
_HINTS = (
    Column("without hints", "without_us", microseconds),
    Column("with hints", "with_us", microseconds),
    Column("gain", "gain", times),
)


def _percent(value: Value) -> str:
    return f"{value:.1%}"


def _milliseconds(value: Value) -> str:
    return f"{value:.1f} ms"


_OVER = Column("over the best", "over_best", lambda value: f"{value:.3f}")
_TRANSFER = (
    _PATHS,
    Column("way", "way"),
    _SIZE,
    _TIME,
    Column("Mbit/s", "mbit", lambda value: f"{value:.1f}"),
    Column("of the ceiling", "share", _percent),
    _TWICE,
)
_CUT = (
    _PATHS,
    Column("cut path", "path"),
    _SIZE,
    _TIME,
    _OVER,
    _TWICE,
    Column("back after", "back_s", lambda value: f"{value:.1f} s"),
)
_BACKPRESSURE = (
    Column("packets", "packets"),
    Column("late, median", "median_us", microseconds),
    Column("late, worst", "latency_ms", _milliseconds),
    Column("came back", "returned"),
    Column("back after", "back_ms", _milliseconds),
)
_FIXED = (
    _PATHS,
    _SIZE,
    Column("path", "path"),
    Column("asked", "asked", _percent),
    Column("measured", "measured", lambda value: f"{value:.2%}"),
    Column("on the wire", "on_wire", lambda value: f"{value:.2%}"),
    Column("off by", "off", lambda value: f"{value:.2%}"),
    _TIME,
)
_STEADY = (
    Column("bottleneck", "layout"),
    Column("samples", "samples"),
    Column("mean share", "mean", _percent),
    Column("share varies", "std", _percent),
)


def side_by_side(rows: Sequence[Row]) -> list[Row]:
    """One row for what was measured without and with hints, by paths and size, in the order of the first of them."""
    found: dict[tuple[Value, Value], Row] = {}
    for row in rows:
        key = (row.get("layout"), row.get("size_bytes"))
        both = found.setdefault(key, {name: row[name] for name in ("layout", "size_bytes") if name in row})
        both["with_us" if row.get("way") == "with hints" else "without_us"] = row.get("median_us")
        if "gain" in row:
            both["gain"] = row["gain"]
    return list(found.values())


def _as_they_are(rows: Sequence[Row]) -> list[Row]:
    return list(rows)


_PARTS: tuple[tuple[str, tuple[str, ...], Sequence[Column], Callable[[Sequence[Row]], list[Row]]], ...] = (
    ("transfers, beside the ceiling that plain TCP reaches", ("ceiling", "transfer"), _TRANSFER, _as_they_are),
    ("rates swapped in mid-transfer", ("swap",), (_PATHS, _SIZE, _TIME, _OVER, _TWICE), _as_they_are),
    ("a path cut in mid-transfer", ("cut",), _CUT, _as_they_are),
    ("fixed shares", ("fixed",), _FIXED, _as_they_are),
    ("few segments", ("few segments",), (_PATHS, _SIZE, *_HINTS), side_by_side),
    ("cold start", ("cold start",), (_SIZE, *_HINTS), side_by_side),
    ("congestion inside the switch", ("switch",), (_SIZE, *_HINTS), side_by_side),
    ("backpressure in mid-transfer", ("backpressure",), _BACKPRESSURE, _as_they_are),
    ("steady state", ("steady",), _STEADY, _as_they_are),
)


def sheets(figures: Sequence[Row]) -> list[Sheet]:
    """A table for each part that has figures."""
    made = []
    for title, parts, columns, arrange in _PARTS:
        rows = [row for row in figures if row["part"] in parts]
        if rows:
            made.append(Sheet(title, arrange(rows), columns))
    return made
