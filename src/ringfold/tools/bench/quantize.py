"""`ringfold bench quantize`: what quantisation costs a core, and what it saves on a slow link.

*Kernels*: quantise and dequantise a buffer that is larger than the caches, in this process, on one core. The figure is
the buffer's bytes of f32 over the CPU time of both, one after the other: what a core does, also where others share it.

*Links*: each peer is a host of its own whose cable is shaped in both directions (network namespaces, which need root).
All peers reduce the same buffers unquantised and with each scheme, in turns, so that a drift of the machine hits all of
them. An op takes from the moment at which all have met in a barrier to the return of the slowest peer; the figure is
the median over all turns.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated

import msgspec
import numpy as np
import typer

from ringfold import _native
from ringfold.peer.codes import DTYPES, QUANTISATIONS
from ringfold.runtime.clock import thread_cpu_ns
from ringfold.tools.bench import report as reports
from ringfold.tools.bench.report import Column, Row, microseconds, size_bytes, size_text, spread, times
from ringfold.tools.cluster import LocalCluster, ProcessFailed
from ringfold.tools.shaped import Shape, ShapedNetwork, ShapingFailed, missing

WORKER = str(Path(__file__).with_name("workers.py"))
PLAIN = "none"
KERNEL_BYTES = 64 << 20
KERNEL_REPEATS = 9
START_S = 60.0
ROUND_S = 300.0

COLUMNS = (
    Column("scheme", "scheme"),
    Column("size", "size_bytes", size_text),
    Column("out GB/s", "quantise_gb_per_s", lambda value: f"{value:.1f}"),
    Column("in GB/s", "dequantise_gb_per_s", lambda value: f"{value:.1f}"),
    Column("GB/s", "gb_per_s", lambda value: f"{value:.1f}"),
    Column("peers", "world"),
    Column("median", "median_us", microseconds),
    Column("f32/ours", "f32_over_quantised", times),
    Column("right", "verified", lambda value: "yes" if value else "NO"),
)


class QuantizePlan(msgspec.Struct, frozen=True):
    """What is measured on links, and how often."""

    worlds: list[int]
    size_bytes: int
    mbit: float
    rounds: int


def command(
    world: Annotated[str, typer.Option(help="Numbers of peers, comma-separated.")] = "2,4",
    size: Annotated[str, typer.Option(help="Size of the f32 buffer.")] = "16M",
    mbit: Annotated[
        float, typer.Option(help="Rate of every peer's link, in Mbit/s, in each direction.", min=0.1)
    ] = 200.0,
    rounds: Annotated[int, typer.Option(help="Ops of each kind.", min=1)] = 7,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    check: Annotated[bool, typer.Option("--check", help="Compare with benchmarks/targets.toml.")] = False,
) -> None:
    """Time quantisation on one core, and quantised all-reduce on slow links (needs root for network namespaces)."""
    plan = QuantizePlan([int(one) for one in world.split(",")], size_bytes(size), mbit, rounds)
    if min(plan.worlds) < 2:
        raise typer.BadParameter("--world needs 2 peers or more")
    skipped: dict[str, str] = {}
    links: list[Row] = []
    with reports.guarded(as_json=as_json) as progress:
        task = progress.add_task("kernels", total=len(QUANTISATIONS) + len(plan.worlds) * plan.rounds)
        kernels = measure_kernels(lambda: progress.advance(task))
        if why := missing():
            skipped["links"] = f"{why}; run it as root"
        try:
            for peers in plan.worlds if not skipped else ():
                progress.update(task, description=f"{peers} peers at {plan.mbit:g} Mbit/s")
                links += measure_links(peers, plan, lambda: progress.advance(task))
        except ShapingFailed as error:
            skipped["links"], links = f"links cannot be shaped here: {error}", []
    if skipped:
        # A figure that could not be measured was not shown: rows without it make `--check` a miss.
        unmeasured: Row = {"f32_over_quantised": None}
        links = [link_row(peers, plan, scheme) | unmeasured for peers in plan.worlds for scheme in QUANTISATIONS]
    result = reports.report("quantize", msgspec.to_builtins(plan), [*kernels, *links], skipped=skipped)
    result.settings["cpu_level"] = _native.cpu_level()
    right = all(row.get("verified", True) for row in result.figures)
    if not right:
        result.notes.append("A RESULT WAS WRONG: see `verified`")
    reports.finish(result, COLUMNS, as_json=as_json, against_targets=check)
    if not right:
        raise typer.Exit(1)


def measure_kernels(advance: Callable[[], None]) -> list[Row]:
    """One row per scheme, over a buffer of normally distributed f32."""
    values = np.random.default_rng(1).standard_normal(KERNEL_BYTES // 4, np.float32)
    back, rows = np.empty_like(values), list[Row]()
    for scheme, number in QUANTISATIONS.items():
        code = DTYPES["float32"]
        encoded = np.zeros(_native.quantized_bytes(number, code, values.size), np.uint8)
        out_ns, in_ns = [], []
        for _ in range(KERNEL_REPEATS):
            begin = thread_cpu_ns()
            _native.quantize(number, code, encoded, values)
            between = thread_cpu_ns()
            _native.dequantize(number, code, back, encoded)
            in_ns.append(thread_cpu_ns() - between)
            out_ns.append(between - begin)
        out, back_in = float(np.median(out_ns)), float(np.median(in_ns))
        row: Row = {"part": "kernel", "scheme": scheme, "bits": bits_of(scheme), "size_bytes": KERNEL_BYTES}
        row |= {"quantise_gb_per_s": KERNEL_BYTES / out, "dequantise_gb_per_s": KERNEL_BYTES / back_in}
        rows.append({**row, "gb_per_s": KERNEL_BYTES / (out + back_in)})
        advance()
    return rows


def measure_links(peers: int, plan: QuantizePlan, advance: Callable[[], None]) -> list[Row]:
    """One row per scheme, the unquantised one first, for one number of peers."""
    schemes = [PLAIN, *QUANTISATIONS]
    took: dict[str, list[int]] = {scheme: [] for scheme in schemes}
    sent: dict[str, int] = {}
    right = dict.fromkeys(schemes, True)
    with ShapedNetwork([Shape(up_mbit=plan.mbit, down_mbit=plan.mbit)] * peers) as network, LocalCluster() as cluster:
        names = start_peers(network, cluster, peers, plan.size_bytes)
        for _ in range(plan.rounds):
            for scheme in schemes:
                cluster.send(names, {"scheme": None if scheme == PLAIN else scheme})
                replies = cluster.gather(names, ROUND_S)
                took[scheme].append(max(int(reply["took_ns"]) for reply in replies.values()))
                sent[scheme] = max(int(reply["sent_bytes"]) for reply in replies.values())
                same = len({reply["digest"] for reply in replies.values()}) == 1
                right[scheme] &= same and all(reply["near"] for reply in replies.values())
            advance()
        for name in names:
            cluster.allow_exit(name)
    rows = []
    for scheme in schemes:
        row = link_row(peers, plan, scheme) | spread(took[scheme])
        row |= {"sent_bytes": sent[scheme], "verified": right[scheme]}
        if scheme != PLAIN:
            row["f32_over_quantised"] = float(np.median(took[PLAIN]) / np.median(took[scheme]))
        rows.append(row)
    return rows


def start_peers(network: ShapedNetwork, cluster: LocalCluster, peers: int, size: int) -> Sequence[str]:
    """A master in the hub and a peer on each host, all in one group."""
    where = network.start_master(cluster).address
    names = [f"peer-{number}" for number in range(peers)]
    for number, name in enumerate(names):
        env = {"OMP_NUM_THREADS": "1"}
        cluster.start_worker(name, WORKER, "quantize", where, size, peers, inside=network.inside(number), env=env)
    cluster.wait_connected(names, START_S)
    for name, reply in cluster.gather(names, START_S).items():
        if reply["group_size"] != peers:
            raise ProcessFailed(name, f"is in a group of {reply['group_size']}, not {peers}")
    return names


def link_row(peers: int, plan: QuantizePlan, scheme: str) -> Row:
    return {
        "part": "link",
        "scheme": scheme,
        "bits": bits_of(scheme),
        "world": peers,
        "size_bytes": plan.size_bytes,
        "mbit": plan.mbit,
    }


def bits_of(scheme: str) -> int:
    return 32 if scheme == PLAIN else int(scheme[-1])
