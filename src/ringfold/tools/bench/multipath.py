"""`ringfold bench multipath`: two hosts with several paths between them, and how much of those a transfer uses.

The hosts are network namespaces whose paths have the rates of a layout (`200+50`: two paths, in Mbit/s), one queue per
path at the sender. The *ceiling* is measured in the same lab: plain TCP on all paths at once, both ways as an
all-reduce of two peers uses them, in bytes of payload per second, the slower direction's sum. An op of B bytes sends
and receives B bytes, so `share` is B / (time * ceiling).

Beside ours (lanes on all paths that pull segments): the first path alone, a fixed split into equal parts by the same
engine, and the kernel's Multipath TCP with the same bytes both ways. Then in mid-transfer: the rates of the first two
paths are swapped (`over_best` is the time over that of the ceiling, the median of some swaps), and each of them is cut
without a word, one after the other: the op must succeed in the same epoch, and the path be used again after it is
whole (`back_s` later).

Last, ops of one to four segments without and with hints (shares by the paths' rates): `gain` is the time without over
that with them. `multipath_hints.py` has the parts with real agents; `--hints` is those alone.

Needs root, `ip` and `tc`: without them everything is skipped, and `--check` is a miss.
"""

import statistics
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from ringfold.tools import lab as labs
from ringfold.tools.bench import multipath_hints
from ringfold.tools.bench import report as reports
from ringfold.tools.bench.masters import HUB_PORT, master_command
from ringfold.tools.bench.multipath_sheets import sheets
from ringfold.tools.bench.report import Row, size_bytes
from ringfold.tools.lab import SWITCH, Lab, ShapingFailed
from ringfold.tools.spawn import ChildFailed, Crew, Message
from ringfold.tools.streams import mptcp_commands, mptcp_missing

WORKER = str(Path(__file__).with_name("workers_multipath.py"))
START_S = 60.0
OP_S = 90.0
SETTLE_S = 0.6
CEILING_S = 2.0
BACK_WITHIN_S = 20.0
SWAPS = 5
WARM_UP = 3
SEGMENT_BYTES = 16 << 10
FEW_ROUNDS = 21
PACKETS = 10
NAMES = ("side-0", "side-1")
Order = dict[str, object]


class Plan(msgspec.Struct, frozen=True):
    """What is measured."""

    layouts: list[str]
    sizes: list[int]
    rounds: int
    change_bytes: int
    steady_s: float = 30.0


def command(
    layouts: Annotated[str, typer.Option(help="Rates of the paths in Mbit/s, layouts comma-separated.")] = (
        "200+50,100+100,120+60+30"
    ),
    sizes: Annotated[str, typer.Option(help="Sizes of ops, comma-separated.")] = "2M,16M",
    rounds: Annotated[int, typer.Option(help="Timed ops of each size.", min=1)] = 7,
    hints: Annotated[bool, typer.Option("--hints", help="Only the parts with agents and their hints.")] = False,
    steady: Annotated[float, typer.Option(help="Seconds of ops over which an agent's share is watched.")] = 30.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    check: Annotated[bool, typer.Option("--check", help="Compare with benchmarks/targets.toml.")] = False,
) -> None:
    """Transfers over several shaped paths beside the ceiling, a single path, a fixed split and MPTCP (needs root)."""
    chosen = [] if hints else layouts.split(",")
    plan = Plan(chosen, [size_bytes(one) for one in sizes.split(",")], rounds, 32 << 20, steady)
    for layout in plan.layouts:
        rates_of(layout)
    skipped: dict[str, str] = {}
    rows: list[Row] = []
    with reports.guarded(as_json=as_json) as progress:
        if why := labs.missing():
            skipped["paths"] = f"{why}; run it as root"
        elif why := mptcp_missing():
            skipped["mptcp"] = why
        task = progress.add_task("paths", total=len(plan.layouts) + 1)
        try:
            for layout in plan.layouts if "paths" not in skipped else ():
                progress.update(task, description=layout)
                rows += measure(layout, plan, with_mptcp="mptcp" not in skipped)
                progress.advance(task)
            progress.update(task, description="hints")
            rows += multipath_hints.measure(plan.steady_s, PACKETS) if "paths" not in skipped else []
        except ShapingFailed as error:
            skipped["paths"], rows = f"paths cannot be shaped here: {error}", []
    if "paths" in skipped:
        # A figure that could not be measured was not shown: rows without it make `--check` a miss.
        rows = [{"part": "swap", "over_best": None}, {"part": "cut", "succeeded": None}]
        rows += [{"part": "backpressure", "latency_ms": None}, {"part": "steady", "std": None}]
        unmeasured: Row = {"part": "transfer", "way": "ringfold", "share": None}
        rows += [{**unmeasured, "layout": one, "size_bytes": size} for one in plan.layouts for size in plan.sizes]
    result = reports.report("multipath", msgspec.to_builtins(plan), rows, skipped=skipped)
    reports.finish(result, sheets(rows), as_json=as_json, against_targets=check)


def rates_of(layout: str) -> list[float]:
    try:
        rates = [float(one) for one in layout.split("+")]
    except ValueError:
        rates = []
    if len(rates) < 2 or min(rates) <= 0:
        raise typer.BadParameter(f"--layouts wants two or more rates such as 200+50, not {layout!r}")
    return rates


def measure(layout: str, plan: Plan, *, with_mptcp: bool) -> list[Row]:
    """All rows of one layout, in one lab."""
    rates = rates_of(layout)
    # The last path is the master's: not shaped, and no lane uses it.
    paths = [labs.Path(name=f"path{number}", up=rate) for number, rate in enumerate(rates)]
    rows: list[Row] = []
    with Lab(hosts=2, paths=[*paths, labs.Path(name="control")]) as lab:
        ceiling = _ceiling(lab, len(rates))
        rows.append({"part": "ceiling", "layout": layout, "way": "plain TCP", "mbit": ceiling * 8 / 1e6, "share": 1.0})
        base: Row = {"part": "transfer", "layout": layout}
        with _peers(lab, len(rates)) as crew:
            rows += [{**base, **row} for row in _transfers(crew, "ringfold", plan, ceiling)]
            _ask(crew, {"do": "shares", "shares": [1 / len(rates)] * len(rates), "capped": True})
            rows += [{**base, **row} for row in _transfers(crew, "equal split", plan, ceiling)]
            _ask(crew, {"do": "shares", "shares": [], "capped": False})
            rows += [{"layout": layout, **row} for row in _changes(lab, crew, rates, plan, ceiling)]
        with _peers(lab, 1) as crew:
            rows += [{**base, **row} for row in _transfers(crew, "first path", plan, ceiling)]
        if with_mptcp:
            rows += [{**base, **row} for row in _mptcp(lab, len(rates), plan, ceiling)]
    rows += [{"part": "few segments", "layout": layout, **row} for row in _few(rates)]
    return rows


# Ours


@contextmanager
def _peers(
    lab: Lab, paths: int, *, small_bytes: int | None = None, agents: Mapping[int, Path] | None = None
) -> Iterator[Crew]:
    """Two peers and a master, stopped at the end. `agents` are the directories of hosts' agents; no other is asked."""
    with Crew() as crew:
        where = f"{lab.address(SWITCH, 'control')}:{HUB_PORT}"
        command = lab.inside(SWITCH, master_command(where))
        small = {} if small_bytes is None else {"RINGFOLD_SMALL_BYTES": str(small_bytes)}
        crew.start("master", command, env={"RINGFOLD_TOKEN_FILE": "", **small})
        for host, name in enumerate(NAMES):
            mine = ",".join(lab.addresses(host)[:paths])
            order = [sys.executable, "-P", WORKER, "ringfold", crew.address, name, where, mine]
            agent = (agents or {}).get(host)
            advice = {"RINGFOLD_AGENT": "off"} if agent is None else {"RINGFOLD_AGENT_DIR": str(agent)}
            crew.start(name, lab.inside(host, order), env={"RINGFOLD_DATA_PORT": "48149", **advice})
        crew.meet(NAMES, START_S)
        crew.gather(NAMES, START_S)
        yield crew
        for name in NAMES:
            crew.release(name)


def _ask(crew: Crew, order: Order) -> dict[str, Message]:
    crew.send(NAMES, order)
    return crew.gather(NAMES, OP_S)


def _op(crew: Crew, size: int) -> tuple[int, dict[str, Message]]:
    """One verified op: how long it took the slower side, and what both said."""
    _ask(crew, {"do": "op", "size_bytes": size})
    return _result(crew)


def _result(crew: Crew) -> tuple[int, dict[str, Message]]:
    replies = crew.gather(NAMES, OP_S)
    for name, reply in replies.items():
        if not reply["right"] or reply["aborted"]:
            raise ChildFailed(name, f"the op went wrong: {reply}", crew.log_tail(name))
    return max(int(reply["took_ns"]) for reply in replies.values()), replies


def _transfers(crew: Crew, way: str, plan: Plan, ceiling: float) -> Iterator[Row]:
    for _ in range(WARM_UP):  # a fresh connection finds its rate by losing packets
        _op(crew, max(plan.sizes))
    for size in plan.sizes:
        _op(crew, size)
        ops = [_op(crew, size) for _ in range(plan.rounds)]
        again = sum(int(reply["reissued"]) for _, replies in ops for reply in replies.values())
        yield _row(way, size, [took for took, _ in ops], ceiling) | {"reissued": again}


def _row(way: str, size: int, took_ns: Sequence[int], ceiling: float) -> Row:
    median = statistics.median(took_ns)
    rate = size / median * 1e9
    worst = size / max(took_ns) * 1e9
    row: Row = {"way": way, "size_bytes": size, "median_us": median / 1_000, "mbit": rate * 8 / 1e6}
    return row | {"share": rate / ceiling, "worst_share": worst / ceiling}


def _few(rates: Sequence[float]) -> Iterator[Row]:
    """Ops of one to four segments, without and with hints: so few say nothing about the paths by being pulled.

    A shaper's burst would let all of them go at once, so these have nearly none.
    """
    paths = [labs.Path(name=f"path{number}", up=rate, burst_bytes=3_200) for number, rate in enumerate(rates)]
    without: dict[int, float] = {}
    with Lab(hosts=2, paths=[*paths, labs.Path(name="control")]) as lab:
        for way in ("ringfold", "with hints"):
            with _peers(lab, len(rates), small_bytes=0) as crew:
                if way == "with hints":
                    _ask(crew, {"do": "shares", "shares": [rate / sum(rates) for rate in rates], "capped": False})
                for segments in range(1, 5):
                    size = segments * SEGMENT_BYTES
                    took = statistics.median(_op(crew, size)[0] for _ in range(FEW_ROUNDS))
                    row: Row = {"way": way, "size_bytes": size, "median_us": took / 1_000}
                    gain = without.setdefault(segments, took) / took
                    yield row if way == "ringfold" else row | {"gain": gain}


# In mid-transfer


def _changes(lab: Lab, crew: Crew, rates: Sequence[float], plan: Plan, ceiling: float) -> Iterator[Row]:
    size = plan.change_bytes
    best_s = size / ceiling
    swapped = [*rates[1::-1], *rates[2:]]
    if rates[0] != rates[1]:
        ops = []
        for _ in range(SWAPS):
            _op(crew, size // 4)
            _ask(crew, {"do": "op", "size_bytes": size})
            crew.pause(0.4 * best_s)
            _set_rates(lab, swapped)
            ops.append(_result(crew))
            _set_rates(lab, rates)
        took, replies = sorted(ops, key=lambda op: op[0])[SWAPS // 2]
        yield {"part": "swap", "way": "ringfold", **_changed(size, took, best_s, replies)}
    for path in range(2):
        _op(crew, size // 16)
        left = sum(rates) - rates[path]
        _ask(crew, {"do": "op", "size_bytes": size})
        crew.pause(0.4 * best_s)
        lab.cut(path)
        took, replies = _result(crew)
        lab.restore(path)
        best = 0.4 * best_s + 0.6 * best_s * sum(rates) / left
        row: Row = {"part": "cut", "way": "ringfold", "path": path, "back_s": _used_again(crew, path)}
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


def _used_again(crew: Crew, path: int) -> float | None:
    """After how many seconds of ops the path carries a tenth of what it should again; None: not in time."""
    passed = 0.0
    while passed < BACK_WITHIN_S:
        took, replies = _op(crew, 4 << 20)
        passed += took / 1e9
        given = [reply["path_bytes"] for reply in replies.values()]
        if all(sent[path] > 0.02 * sum(sent) for sent in given):
            return passed
        crew.pause(0.1)
        passed += 0.1
    return None


# The kernel alone


def _ceiling(lab: Lab, paths: int) -> float:
    """Payload per second over all paths, in the direction that has less of it. Two streams fill what one loses."""
    with _streams(lab, paths, "tcp") as crew:
        replies = _ask(crew, {"do": "saturate", "settle_s": SETTLE_S, "seconds": CEILING_S})
    return min(sum(reply["rates"]) for reply in replies.values())


def _mptcp(lab: Lab, paths: int, plan: Plan, ceiling: float) -> Iterator[Row]:
    for words in mptcp_commands([lab.space(0), lab.space(1)], lab.addresses(0)[:paths], lab.paths[:paths]):
        subprocess.run(words, check=True, capture_output=True)
    with _streams(lab, paths, "mptcp") as crew:
        for _ in range(WARM_UP):
            _ask(crew, {"do": "exchange", "size_bytes": max(plan.sizes)})
        for size in plan.sizes:
            took = []
            for _ in range(1 + plan.rounds):
                replies = _ask(crew, {"do": "exchange", "size_bytes": size})
                took.append(max(int(reply["took_ns"]) for reply in replies.values()))
            yield _row("MPTCP", size, took[1:], ceiling)


@contextmanager
def _streams(lab: Lab, paths: int, kind: str) -> Iterator[Crew]:
    per_path = 1 if kind == "mptcp" else 2
    ways = [",".join(lab.addresses(host)[:paths] * per_path) for host in range(2)]
    with Crew() as crew:
        for host, name in enumerate(NAMES):
            order = [sys.executable, "-P", WORKER, "streams", crew.address, name, str(host), ways[host], ways[1 - host]]
            crew.start(name, lab.inside(host, [*order, kind]))
        crew.meet(NAMES, START_S)
        crew.gather(NAMES, START_S)
        crew.send(NAMES[1:], {"do": "connect"})
        yield crew
        for name in NAMES:
            crew.release(name)
