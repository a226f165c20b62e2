"""`ringfold bench rounds`: how long probing pauses between two windows, and what a round costs.

A real master, real connections. Two kinds of nodes:

- `processes`: every node is a process with a prober of its own: real windows, real fits. Up to 8 of them.
- `recorded`: a few processes hold all nodes, each with the production machine and a connection of its own, and with
  fits of windows that were recorded at the start. So what is measured is the protocol and the master, and not what 128
  probers and their fits cost on one machine. A process handles its nodes one after the other, which no real node waits
  for. So there are as many processes (`workers`) as usable cores, less one for the master: from 2 to 8.

The figure of a round (`turn`) depends on its kind. `master`: from ROUND_END being sent to the last node's receiving
ROUND_START, by the one monotonic clock of this machine. `gloo`: from the first window's end to the last rank's next
window. `time`: from the last window's end to the last node's ROUND_START; no node pauses meanwhile. `local` has no
rounds, only windows.

In rows with steps, every fourth node's clock steps by a millisecond in every window, forward and back in turn.

With `--regions` there are only recorded rounds of the kind `master`, for each number of nodes with that many relays and
without any, in processes for half of the cores (a quarter for the relays). `root` is what the master sends and receives
in a round: messages and bytes, heartbeats not counted.

In rows with a silent node, one node does nothing from some instant of a window on: it is `frozen` (its process is
stopped), or `stuck` (it sends heartbeats and nothing else). Rounds from that window on count, and the turn is that of
all other nodes.

*Where the turn of `master` goes.* The monotonic clock of this machine splits it exactly, at four instants: the last
node has received ROUND_END (`end_ms`), the last report is sent (`held_ms`), ROUND_START is sent (`master_ms`), and the
last node has received it (`start_ms`).
"""

import importlib.util
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np
import typer

from ringfold.probe.fit import fit
from ringfold.probe.logs.files import ExportSettings, LogReader, ProbeLog, logs_in
from ringfold.probe.logs.lines import FitLine, RoundLine, WindowFields, WindowLine, window_lines
from ringfold.probe.models import MODELS, window
from ringfold.runtime.clock import monotonic_ns, thread_cpu_ns
from ringfold.runtime.hardware import usable_cores
from ringfold.tools.bench import report as reports
from ringfold.tools.bench.report import Column, Row, Sheet, microseconds
from ringfold.tools.bench.rounds_worker import Mark, Marks, WorkerOrder
from ringfold.tools.bench.targets import Value
from ringfold.tools.cluster import LocalCluster, free_port
from ringfold.wire.probing import RoundId, RoundMetrics

WORKER = str(Path(__file__).with_name("rounds_worker.py"))
MAX_PROCESSES = 8
MAX_RANKS = 32
"""Ranks of a Gloo group: every one is a process that has loaded torch."""
RECORDED_WORKERS = 2, 8
"""In how many processes recorded nodes are, at least and at most."""
START_S = 120.0
SHORT_MS, RECORDED_MS, LONG_MS, TIME_MS, REGION_MS = 500, 250, 4_000, 1_500, 2_000
KINDS = ("master", "time", "gloo", "local")
LOGGED = 100
"""Windows that are written and read to see how fast that is."""
WARM_UP = 2
"""Rounds of a row that do not count: the first calculation of a process takes several times as long as the next."""
SLOW_HEARTBEATS = {"heartbeat_ms": 1_000, "suspect_after_ms": 10_000, "evict_after_ms": 30_000}
"""A thousand nodes in a few processes on a few cores are slow, and not gone."""
LOST_NS = 200_000_000
"""The master's time does not run while the master was kept from running for longer than this."""


NOBODY, FROZEN, STUCK = "nobody", "frozen", "stuck"
SILENT_AFTER_S = 0.9
"""How long after a round's end a node falls silent: in the window that follows."""


class Case(msgspec.Struct, frozen=True):
    """One row."""

    kind: str
    nodes: int
    is_recorded: bool
    window_ms: int
    rounds: int
    steps: bool = False
    points: bool = False
    silent: str = NOBODY
    regions: int = 0

    @property
    def mode(self) -> str:
        return "regions" if self.regions else "recorded" if self.is_recorded else "processes"

    @property
    def text(self) -> str:
        what = f"in {self.regions} regions" if self.regions else self.mode
        return f"{self.kind}, {self.nodes} {what}, {self.window_ms} ms{', steps' if self.steps else ''}{self.silence}"

    @property
    def silence(self) -> str:
        return "" if self.silent == NOBODY else f", one {self.silent}"


def command(
    nodes: Annotated[str, typer.Option(help="Numbers of nodes, comma-separated.")] = "2,8,32,128",
    rounds: Annotated[int, typer.Option(help="Rounds of a row with short windows.", min=2)] = 60,
    long_rounds: Annotated[int, typer.Option(help="Rounds of a row with windows of 4 s; 0: none.", min=0)] = 5,
    kinds: Annotated[str, typer.Option(help="Kinds of round, comma-separated.")] = ",".join(KINDS),
    regions: Annotated[int, typer.Option(help="Only recorded nodes, without relays and with so many.", min=0)] = 0,
    match: Annotated[str, typer.Option(help="Only rows with this in their names, such as '4000 ms' or 'frozen'.")] = "",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    check: Annotated[bool, typer.Option("--check", help="Compare with benchmarks/targets.toml.")] = False,
) -> None:
    """Time from ROUND_END to the last ROUND_START, and what rounds cost, for 2 to 128 nodes."""
    counts, wanted = _numbers(nodes), _kinds(kinds)
    skipped: dict[str, str] = {}
    cases = plan_regions(counts, regions, rounds) if regions else plan(counts, wanted, rounds, long_rounds, skipped)
    if match:
        names = [case.text for case in cases]
        cases = [case for case in cases if match in case.text]
        if not cases:
            raise typer.BadParameter(f"no row has {match!r} in its name; there are: {'; '.join(names)}")
    rows: list[Row] = []
    with reports.guarded(as_json=as_json) as progress:
        task = progress.add_task("starting", total=len(cases))
        for case in cases:
            progress.update(task, description=case.text)
            rows.append(measure(case))
            progress.advance(task)
    notes = []
    if not regions and not match:
        rows += [log_row(LOGGED, points=points) for points in (False, True)]
    if growth := growth_of(rows):
        rows.append(growth)
        notes.append(_growth_text(growth))
    settings: dict[str, object] = {"nodes": counts, "rounds": rounds, "long_rounds": long_rounds, "kinds": wanted}
    settings |= {"regions": regions, "match": match}
    result = reports.report("rounds", settings, rows, skipped=skipped, notes=notes)
    reports.finish(result, _sheets(rows), as_json=as_json, against_targets=check)


def plan_regions(counts: Sequence[int], regions: int, rounds: int) -> list[Case]:
    """The same numbers of nodes without relays and with them."""
    return [
        Case("master", count, True, REGION_MS, max(4, rounds // 3), regions=relays)
        for count in counts
        for relays in (0, min(regions, count))
    ]


def plan(counts: Sequence[int], kinds: Sequence[str], rounds: int, long: int, skipped: dict[str, str]) -> list[Case]:
    """Which rows there are; what cannot be measured here goes to `skipped`, with the reason."""
    few = [count for count in counts if count <= MAX_PROCESSES]
    cases: list[Case] = []
    if "master" in kinds:
        cases += [Case("master", count, False, SHORT_MS, rounds) for count in few]
        cases += [Case("master", count, True, RECORDED_MS, rounds) for count in counts]
        if long and few:
            cases += [Case("master", count, False, LONG_MS, long) for count in few]
            cases.append(Case("master", few[-1], False, LONG_MS, long, steps=True))
            cases.append(Case("master", few[0], False, LONG_MS, 2, points=True))
            cases += [Case("master", few[-1], False, LONG_MS, long, silent=silent) for silent in (FROZEN, STUCK)]
        if long:
            cases += [Case("master", counts[-1], True, LONG_MS, long, steps=steps) for steps in (False, True)]
            cases += [Case("master", counts[-1], True, LONG_MS, long, silent=silent) for silent in (FROZEN, STUCK)]
    if "time" in kinds:
        cases += [Case("time", count, False, TIME_MS, max(2, rounds // 6)) for count in few[-1:]]
        cases += [Case("time", count, True, TIME_MS, max(2, rounds // 6)) for count in counts if count not in few]
    if "gloo" in kinds:
        if importlib.util.find_spec("torch") is None:
            skipped["gloo"] = "torch is not installed (pip install torch)"
        else:
            ranks = [count for count in counts if count <= MAX_RANKS]
            cases += [Case("gloo", count, False, SHORT_MS, rounds) for count in ranks]
            if ranks != list(counts):
                skipped[f"gloo beyond {MAX_RANKS} nodes"] = "every rank is a process that has loaded torch"
    if "local" in kinds:
        cases += [Case("local", count, False, SHORT_MS, max(2, rounds // 6)) for count in few[-1:]]
    return cases


def measure(case: Case) -> Row:
    """One row: a fresh master (or a fresh group), and so many rounds."""
    with LocalCluster() as cluster:
        logs = cluster.directory / "logs"
        outcome = _gloo(cluster, case, logs) if case.kind == "gloo" else _with_master(cluster, case, logs)
        row: Row = {
            "kind": case.kind,
            "nodes": case.nodes,
            "mode": case.mode,
            "regions": case.regions,
            "window_ms": case.window_ms,
            "steps": case.steps,
            "points": case.points,
            "silent": case.silent,
            "workers": len(shares_of(case, usable_cores())),
        }
        marks = list(outcome.marks.values())
        nodes = case.nodes if case.silent == NOBODY else case.nodes - 1
        turns = turns_of(case.kind, nodes, marks)
        row |= _root(case, outcome)
        row |= {"master_cpu_ms": outcome.master_cpu_ns / 1e6 / len(turns) if turns and outcome.master_cpu_ns else None}
        row |= _turns(turns[WARM_UP if case.silent == NOBODY else 0 :], case.window_ms)
        row |= parts_of(nodes, marks) if case.kind == "master" else {}
        fits = [ns for each in marks for ns in each.fits_ns]
        rotates = [ns for each in marks for ns in each.rotates_ns]
        row |= {"node_fit_us": statistics.median(fits) / 1e3 if fits else None}
        row |= {"node_rotate_us": statistics.median(rotates) / 1e3 if rotates else None}
        return row | _logged(logs)


class RoundMarks(msgspec.Struct, frozen=True):
    marks: dict[str, Marks]
    master_cpu_ns: int = 0
    root: tuple[int, int] | None = None
    """Messages and bytes at the master in all rounds; None where they were not counted."""


def _root(case: Case, outcome: RoundMarks) -> Row:
    """What the master sent and received in a round, the warm-up included."""
    if outcome.root is None:
        return {"root_messages": None, "root_bytes": None}
    messages, size = outcome.root
    rounds = case.rounds + WARM_UP
    return {"root_messages": messages / rounds, "root_bytes": size / rounds}


def _start_relays(cluster: LocalCluster, where: str, case: Case) -> tuple[list[str], list[str]]:
    """Start the relays of a row, in several processes; their addresses and the names of the processes."""
    addresses = [f"127.0.0.1:{free_port()}" for _ in range(case.regions)]
    workers = min(case.regions, max(1, usable_cores() // 4))
    names = [f"relays-{number}" for number in range(workers)] if addresses else []
    for number, name in enumerate(names):
        order = WorkerOrder(where, relays=addresses[number::workers])
        cluster.start_worker(name, WORKER, "relays", _text(order))
    cluster.wait_connected(names, START_S)
    cluster.gather(names, START_S)
    return addresses, names


def _count_relays(cluster: LocalCluster, names: Sequence[str], nodes: int) -> tuple[int, int]:
    """Messages and bytes between the relays and the master so far. All nodes must be behind relays."""
    cluster.send(names, {"count": True})
    counts = list(cluster.gather(names, START_S).values())
    behind = sum(int(each["nodes"]) for each in counts)
    if behind != nodes:
        raise RuntimeError(f"{behind} of {nodes} nodes are behind relays")
    return sum(int(each["messages"]) for each in counts), sum(int(each["bytes"]) for each in counts)


def _with_master(cluster: LocalCluster, case: Case, logs: Path) -> RoundMarks:
    settings: dict[str, Any] = {"probe_kind": case.kind, "probe_window_ms": case.window_ms, "probe_adapt": "false"}
    if case.window_ms == REGION_MS:
        settings |= SLOW_HEARTBEATS
    where = cluster.start_master(probe_export=logs, **settings).address
    shares = shares_of(case, usable_cores())
    names = [f"worker-{number}" for number in range(len(shares))]
    addresses, relays = _start_relays(cluster, where, case)
    first = 0
    for name, share in zip(names, shares, strict=True):
        export = "" if case.is_recorded else str(logs)
        order = WorkerOrder(where, share, first, case.is_recorded, case.steps, export, case.points, addresses)
        cluster.start_worker(name, WORKER, "nodes", _text(order))
        first += share
    cluster.wait_connected(names, START_S)
    cluster.gather(names, START_S)
    if case.kind == "local":
        cluster.pause(case.window_ms * case.rounds / 1_000)
        return RoundMarks({})
    timeout_s = START_S + 3 * case.rounds * case.window_ms / 1_000
    if case.silent != NOBODY:
        return _with_silent_node(cluster, case, names, timeout_s)
    before, counted = cpu_ns(cluster.pid("master")), _count_relays(cluster, relays, case.nodes) if relays else (0, 0)
    cluster.send(names, {"rounds": case.rounds + WARM_UP})
    marks = _marks(cluster.gather(names, timeout_s))
    spent_ns = cpu_ns(cluster.pid("master")) - before
    now = sum(each.messages for each in marks.values()), sum(each.bytes for each in marks.values())
    now = _count_relays(cluster, relays, case.nodes) if relays else now
    return RoundMarks(marks, spent_ns, (now[0] - counted[0], now[1] - counted[1]))


def shares_of(case: Case, cores: int) -> list[int]:
    """How many nodes each process has. Recorded nodes share processes: one for each core but the master's, within
    limits. A node that falls silent has a process of its own."""
    if not case.is_recorded:
        return [1] * case.nodes
    low, high = RECORDED_WORKERS
    # Relays need cores, too.
    wanted = max(low, cores // 2) if case.window_ms == REGION_MS else min(max(low, cores - 1), high)
    together = case.nodes - (case.silent != NOBODY)
    workers = min(wanted, together)
    return [len(range(worker, together, workers)) for worker in range(workers)] + [1] * (case.nodes - together)


def _with_silent_node(cluster: LocalCluster, case: Case, names: Sequence[str], timeout_s: float) -> RoundMarks:
    """Some rounds with all nodes; then the last node falls silent in the middle of a window."""
    cluster.send(names, {"rounds": WARM_UP})
    cluster.gather(names, timeout_s)
    cluster.pause(SILENT_AFTER_S)
    *others, last = names
    if case.silent == FROZEN:
        cluster.processes[last].freeze()
    else:
        cluster.send([last], {"stuck": True})
    silent_ns, before = monotonic_ns(), cpu_ns(cluster.pid("master"))
    cluster.send(others, {"rounds": case.rounds})
    marks = _marks(cluster.gather(others, timeout_s))
    for each in marks.values():
        each.ends = {sequence: mark for sequence, mark in each.ends.items() if mark.first_ns >= silent_ns}
    return RoundMarks(marks, cpu_ns(cluster.pid("master")) - before)


def _gloo(cluster: LocalCluster, case: Case, logs: Path) -> RoundMarks:
    names = [f"rank-{number}" for number in range(case.nodes)]
    port, ports = free_port(), [free_port() for _ in names]
    for number, name in enumerate(names):
        order = WorkerOrder(
            first=number, export=str(logs), window_ms=case.window_ms, size=case.nodes, port=port, probe_ports=ports
        )
        cluster.start_worker(name, WORKER, "rank", _text(order), env={"OMP_NUM_THREADS": "1"})
    cluster.wait_connected(names, START_S)
    cluster.gather(names, START_S)
    cluster.send(names, {"rounds": case.rounds + WARM_UP})
    return RoundMarks(_marks(cluster.gather(names, START_S + 3 * case.rounds * case.window_ms / 1_000)))


def _text(order: WorkerOrder) -> str:
    return msgspec.json.encode(order).decode()


def _marks(messages: Mapping[str, Mapping[str, object]]) -> dict[str, Marks]:
    return {name: msgspec.convert(message, Marks, strict=False) for name, message in messages.items()}


def cpu_ns(pid: int) -> int:
    """How long a process has run so far, all its threads."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks)


# From marks to figures


def turns_of(kind: str, nodes: int, workers: Sequence[Marks]) -> list[int]:
    """The figure of each round in which every node took part, in the order of rounds."""
    ends = _together([marks.ends for marks in workers])
    starts = _together([marks.starts for marks in workers])
    whole = [each for each in sorted(starts) if starts[each].count == nodes]
    if kind == "time":
        return [starts[each].last_ns - starts[each].closed_ns for each in whole if starts[each].closed_ns]
    turns: list[int] = []
    behind: int | None = None
    for each in reversed(whole):
        end = ends.get(each - 1)
        if end is None or end.count != nodes:
            continue
        if kind == "master":
            behind = _behind(behind, end, starts[each])
        turns.append(starts[each].last_ns - end.sent_ns - (behind if behind and behind > LOST_NS else 0))
    return turns[::-1]


def _behind(known: int | None, end: Mark, start: Mark) -> int:
    """By how much the master's clock was behind, at most; `known` is that of the round after this one.

    What it is behind only grows, so no message that came later can have been faster.
    """
    late = min(end.first_ns - end.sent_ns, start.first_ns - start.sent_ns)
    return late if known is None else min(known, late)


def parts_of(nodes: int, workers: Sequence[Marks]) -> Row:
    """Where the turns of `master` rounds go: medians of the four parts, in ms, and the worst of each."""
    ends = _together([marks.ends for marks in workers])
    reports = _together([marks.reports for marks in workers])
    starts = _together([marks.starts for marks in workers])
    split: list[tuple[int, int, int, int]] = []
    behind: int | None = None
    for each in sorted(ends, reverse=True):
        if each not in reports or each + 1 not in starts:
            continue
        end, report, start = ends[each], reports[each], starts[each + 1]
        if not end.count == report.count == start.count == nodes:
            continue
        behind = _behind(behind, end, start)
        lost_ns = behind if behind > LOST_NS else 0
        end_sent_ns, start_sent_ns = end.sent_ns + lost_ns, start.sent_ns + lost_ns
        held_ns, master_ns = report.last_ns - end.last_ns, start_sent_ns - report.last_ns
        split.append((end.last_ns - end_sent_ns, held_ns, master_ns, start.last_ns - start_sent_ns))
    names = ("end", "held", "master", "start")
    columns = dict(zip(names, zip(*split, strict=True), strict=True)) if split else {}
    row: Row = {f"{name}_ms": statistics.median(times) / 1e6 for name, times in columns.items()}
    return row | {f"{name}_max_ms": max(times) / 1e6 for name, times in columns.items()}


def _together(workers: Sequence[Mapping[int, Mark]]) -> dict[int, Mark]:
    """The marks of all workers as one."""
    together: dict[int, Mark] = {}
    for marks in workers:
        for sequence, mark in marks.items():
            known = together.get(sequence)
            if known is None:
                together[sequence] = msgspec.structs.replace(mark)
            else:
                known.sent_ns = min(known.sent_ns, mark.sent_ns)
                known.first_ns, known.last_ns = min(known.first_ns, mark.first_ns), max(known.last_ns, mark.last_ns)
                known.count, known.closed_ns = known.count + mark.count, max(known.closed_ns, mark.closed_ns)
    return together


def _turns(turns: Sequence[int], window_ms: int) -> Row:
    if not turns:
        return {"rounds": 0, "p50_ms": None, "p99_ms": None, "max_ms": None, "of_window": None}
    p50, p99, most = (float(np.percentile(turns, percent)) / 1e6 for percent in (50, 99, 100))
    return {"rounds": len(turns), "p50_ms": p50, "p99_ms": p99, "max_ms": most, "of_window": p99 / window_ms}


def _logged(logs: Path) -> Row:
    """From the logs: the split of a round (medians), and the bytes of what was written down."""
    if not logs.exists():
        return {}
    row: Row = {}
    run = logs / "run.jsonl"
    if run.exists() and run.stat().st_size:
        lines = [line for line in LogReader(run) if isinstance(line, RoundLine)]
        metrics = [line.summary.metrics for line in lines[2:]] or [line.summary.metrics for line in lines]
        row |= _split(metrics)
        row["round_bytes"] = run.stat().st_size // max(1, len(lines))
        row["missing"] = sum(len(line.summary.missing) for line in lines[2:])
    windows, size = 0, 0
    for path in logs_in([logs]) if any(logs.glob("*.jsonl")) else []:
        if path != run:
            windows += len({(line.node, line.window) for line in LogReader(path) if isinstance(line, FitLine)})
            size += path.stat().st_size
    return row | ({"window_bytes": size // windows} if windows else {})


def _split(metrics: Sequence[RoundMetrics]) -> Row:
    parts = ("stop", "fit", "gather", "calculate", "restart", "total")
    row: Row = {f"{part}_ms": statistics.median(getattr(one, f"{part}_ns") for one in metrics) / 1e6 for part in parts}
    row["report_bytes"] = int(statistics.median(one.report_bytes for one in metrics))
    row["stop_spread_ms"] = statistics.median(one.stop_spread_ns for one in metrics) / 1e6
    row["resume_spread_ms"] = statistics.median(one.resume_spread_ns for one in metrics) / 1e6
    return row


def growth_of(rows: Sequence[Row]) -> Row | None:
    """How the medians of recorded rounds grow with the number of nodes: the straight line through them, and the power.

    `over_linear` is how many times the largest is as slow as the smallest, in relation to how many more nodes it has.
    """
    points = sorted(
        (int(row["nodes"]), float(row["p50_ms"]))
        for row in rows
        if row["kind"] == "master" and row["mode"] == "recorded" and row["window_ms"] == RECORDED_MS
        if isinstance(row["nodes"], int) and isinstance(row["p50_ms"], float)
    )
    if len(points) < 3:
        return None
    nodes, times = (np.array(column, np.float64) for column in zip(*points, strict=True))
    per_node, fixed = np.polyfit(nodes, times, 1)
    exponent = float(np.polyfit(np.log(nodes), np.log(times), 1)[0])
    return {
        "kind": "growth",
        "nodes": int(nodes[-1]),
        "mode": "recorded",
        "fixed_ms": float(fixed),
        "per_node_ms": float(per_node),
        "exponent": exponent,
        "over_linear": float(times[-1] / times[0] / (nodes[-1] / nodes[0])),
    }


def _growth_text(growth: Row) -> str:
    fixed, per_node, exponent = (growth[key] for key in ("fixed_ms", "per_node_ms", "exponent"))
    return (
        f"recorded windows: {fixed:.2f} ms and {per_node:.3f} ms a node; it grows like nodes to the power "
        f"of {exponent:.2f}"
    )


# Tables


def _ms(value: Value) -> str:
    assert isinstance(value, int | float)
    return microseconds(value * 1_000)


def _short(value: Value) -> str:
    return f"{value:.3g}"


def _bytes(value: Value) -> str:
    return f"{value:,.0f}"


# Three tables of the same rows, because one would not fit 80 columns.
_CASE = Column("", "case")
TURNS = (
    _CASE,
    Column("p50", "p50_ms", _ms),
    Column("p99", "p99_ms", _ms),
    Column("max", "max_ms", _ms),
    Column("share", "of_window", lambda value: f"{value:.1%}"),
    Column("missing", "missing"),
)
PARTS = (
    _CASE,
    *(Column(part, f"{part}_ms", _short) for part in ("end", "held", "master", "start")),
    Column("fits", "node_fit_us", microseconds),
    Column("rotate", "node_rotate_us", microseconds),
)
METRICS = (
    _CASE,
    Column("workers", "workers"),
    *(Column(part, f"{part}_ms", _short) for part in ("stop", "fit", "gather", "calculate", "restart")),
)
COSTS = (
    _CASE,
    Column("rounds", "rounds"),
    Column("CPU", "master_cpu_ms", _ms),
    Column("root messages", "root_messages", lambda value: f"{value:,.0f}"),
    Column("root bytes", "root_bytes", _bytes),
    Column("reports", "report_bytes", _bytes),
    Column("a round", "round_bytes", _bytes),
    Column("a window", "window_bytes", _bytes),
)
LOGS = (
    Column("every exchange", "points", lambda value: "yes" if value else "no"),
    Column("a window", "window_bytes", lambda value: f"{value:,} B"),
    Column("an edge", "edge_bytes", lambda value: f"{value:,} B"),
    Column("written", "write_mb_per_s", lambda value: f"{value:.0f} MB/s"),
    Column("read", "read_mb_per_s", lambda value: f"{value:.0f} MB/s"),
    Column("to write a window", "write_us", microseconds),
)


def _sheets(rows: Sequence[Row]) -> list[Sheet]:
    cases = [{**row, "case": _case(row)} for row in rows if row["kind"] in KINDS]
    logs = [row for row in rows if row["kind"] == "log"]
    return [
        Sheet("rounds: from one window to the next (share: p99, of a window)", cases, TURNS),
        Sheet("where a turn goes (ms, medians)", cases, PARTS),
        Sheet("the same from the summaries' metrics (ms)", cases, METRICS),
        Sheet("the master's CPU for a round; bytes of reports and of logs", cases, COSTS),
        Sheet("a node's log, 4 edges and 1,000 exchanges each", logs, LOGS),
    ]


def _case(row: Row) -> str:
    """What was measured: kind, nodes, how they were made, their windows."""
    more = " steps" if row.get("steps") else ""
    more += f" {row['regions']} relays" if row.get("regions") else ""
    more += "" if row.get("silent", NOBODY) == NOBODY else f" {row['silent']}"
    return f"{row['kind']} {row['nodes']} {row['mode']} {row['window_ms']} ms{more}"


def _numbers(text: str) -> list[int]:
    try:
        counts = sorted({int(each) for each in text.split(",")})
    except ValueError:
        counts = []
    if not counts or counts[0] < 2:
        raise typer.BadParameter(f"{text!r} is not a list of numbers from 2 on, such as 2,8,32,128")
    return counts


def _kinds(text: str) -> list[str]:
    kinds = [each.strip() for each in text.split(",")]
    if unknown := sorted(set(kinds) - set(KINDS)):
        raise typer.BadParameter(f"there is no kind {', '.join(unknown)}; there are {', '.join(KINDS)}")
    return kinds


EDGES, PAIRS = 4, 1_000


def log_row(windows: int, *, points: bool) -> Row:
    """Write so many windows of a node, and read them again. Rates are by CPU time: nothing here waits for the disk."""
    model = next(iter(MODELS.values()))
    samples = [window(model, np.random.default_rng(seed), PAIRS) for seed in range(EDGES)]
    edges = [replace(sample.window, src=1, dst=2 + place) for place, sample in enumerate(samples)]
    fits = [fit(each) for each in edges]
    with tempfile.TemporaryDirectory(prefix="ringfold-log-") as directory:
        settings = ExportSettings(directory=Path(directory), points=points, file_bytes=1 << 30)
        with ProbeLog(settings, node=1) as log:
            began = thread_cpu_ns()
            for number in range(windows):
                stretch = WindowFields(
                    node=1, window=number, begin_ns=0, end_ns=1, utc_ns=0, round_id=RoundId(1, number)
                )
                log.write(window_lines(stretch, edges, fits, points=points))
            wrote_ns = thread_cpu_ns() - began
            size = log.path.stat().st_size
            began = thread_cpu_ns()
            lines = sum(1 for line in LogReader(log.path) if isinstance(line, WindowLine | FitLine))
            read_ns = thread_cpu_ns() - began
    assert lines == 2 * EDGES * windows
    return {
        "kind": "log",
        "points": points,
        "edges": EDGES,
        "pairs": PAIRS,
        "window_bytes": size // windows,
        "edge_bytes": size // windows // EDGES,
        "write_mb_per_s": size / 1e6 / (wrote_ns / 1e9),
        "read_mb_per_s": size / 1e6 / (read_ns / 1e9),
        "write_us": wrote_ns / 1e3 / windows,
    }
