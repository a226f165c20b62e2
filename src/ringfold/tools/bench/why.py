"""`ringfold bench why`: whether `ringfold trace --why` names the right one.

Each run is one of real processes on hosts of their own (network namespaces, which need root), whose cables are shaped
to the same rate, and one thing is wrong: a link is slow, a peer's loader waits, a peer's model computes longer, or
other processes have the core that a peer is pinned to. Or nothing is wrong, or three of these at once. Which peer it is
changes from run to run. All processes record their events, and the diagnosis of the run directory is compared with what
was done.
"""

import os
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from ringfold.observe.processes import gather
from ringfold.observe.records import read_directory
from ringfold.observe.why import Diagnosis, diagnose
from ringfold.runtime.hardware import usable_cores
from ringfold.tools.bench import report as reports
from ringfold.tools.bench.report import Column, Row, size_bytes
from ringfold.tools.cluster import MASTER_PORT, LocalCluster
from ringfold.tools.shaped import HUB, Shape, ShapedNetwork, ShapingFailed, missing

WORKER = str(Path(__file__).with_name("why_worker.py"))
WORKERS = str(Path(__file__).with_name("workers.py"))
START_S = 60.0
RUN_S = 240.0
CASES = ("healthy", "loader", "model", "host", "link", "all")
COMPUTE_MS = 10.0
HOGS = 8
PRIORITY = -10
"""Of the peers and hogs: what else runs on this machine is no part of the experiment."""

COLUMNS = (
    Column("case", "case"),
    Column("runs", "runs"),
    Column("right", "right"),
    Column("wrong", "wrong"),
    Column("blamed besides", "besides"),
)


class WhyPlan(msgspec.Struct, frozen=True):
    """What is run, and how often."""

    cases: list[str]
    runs: int
    peers: int
    steps: int
    size_bytes: int
    mbit: float
    slow_mbit: float
    loader_ms: float
    model_ms: float


@dataclass(slots=True)
class Faults:
    """What is wrong in a run, by the number of the host."""

    loader: int | None = None
    model: int | None = None
    host: int | None = None
    link: tuple[int, int] | None = None


@dataclass(slots=True)
class Outcome:
    """What was found in a run: findings as text, and what should have been among them."""

    wanted: set[str]
    found: set[str]
    diagnosis: Diagnosis = field(repr=False)

    @property
    def is_right(self) -> bool:
        return self.wanted == self.found


def command(
    cases: Annotated[str, typer.Option(help="What is wrong, comma-separated.")] = ",".join(CASES),
    runs: Annotated[int, typer.Option(help="Runs of each case.", min=1)] = 20,
    peers: Annotated[int, typer.Option(help="Peers, each on a host of its own.", min=2)] = 4,
    steps: Annotated[int, typer.Option(help="Steps of a run.", min=10)] = 50,
    size: Annotated[str, typer.Option(help="Size of the gradients.")] = "1M",
    mbit: Annotated[float, typer.Option(help="Rate of every host's cable, in Mbit/s.", min=1.0)] = 200.0,
    slow_mbit: Annotated[float, typer.Option(help="Rate of the slow link, in Mbit/s.", min=0.1)] = 15.0,
    loader_ms: Annotated[float, typer.Option(help="What the slow loader waits in a step.", min=0.0)] = 50.0,
    model_ms: Annotated[float, typer.Option(help="What the slow model computes more.", min=0.0)] = 50.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    check: Annotated[bool, typer.Option("--check", help="Compare with benchmarks/targets.toml.")] = False,
) -> None:
    """Run loops with a known straggler, and count how often the diagnosis names it (needs root for namespaces)."""
    chosen = cases.split(",")
    if unknown := set(chosen) - set(CASES):
        raise typer.BadParameter(f"--cases: {', '.join(sorted(unknown))} is none of {', '.join(CASES)}")
    plan = WhyPlan(chosen, runs, peers, steps, size_bytes(size), mbit, slow_mbit, loader_ms, model_ms)
    skipped: dict[str, str] = {}
    rows: list[Row] = []
    notes: list[str] = []
    with reports.guarded(as_json=as_json) as progress:
        task = progress.add_task("runs", total=len(chosen) * runs)
        if why := missing():
            skipped["why"] = f"{why}; run it as root"
        elif usable_cores() < 2:
            skipped["why"] = "a busy host needs a core of its own, and there is only one core"
        try:
            for case in () if skipped else chosen:
                progress.update(task, description=case)
                rows.append(measure(case, plan, notes, lambda: progress.advance(task)))
        except ShapingFailed as error:
            skipped["why"] = f"links cannot be shaped here: {error}"
    if skipped:
        rows = [{"case": case, "runs": runs, "right_part": None} for case in chosen]
    reports.finish(
        reports.report("why", msgspec.to_builtins(plan), rows, skipped=skipped, notes=notes),
        COLUMNS,
        as_json=as_json,
        against_targets=check,
    )


def measure(case: str, plan: WhyPlan, notes: list[str], advance: Callable[[], None]) -> Row:
    """One row: how many of the runs of one case were diagnosed right."""
    right = 0
    besides: set[str] = set()
    for number in range(plan.runs):
        outcome = run_once(plan, faults(case, number, plan.peers))
        right += outcome.is_right
        besides |= {f"{extra} (run {number})" for extra in outcome.found - outcome.wanted}
        if not outcome.is_right:
            notes.append(f"{case}, run {number}: wanted {sorted(outcome.wanted)}; {outcome.diagnosis.verdict}")
        advance()
    return {
        "case": case,
        "runs": plan.runs,
        "right": right,
        "wrong": plan.runs - right,
        "right_part": right / plan.runs,
        "besides": ", ".join(sorted(besides)),
    }


def faults(case: str, number: int, peers: int) -> Faults:
    """What is wrong in a run of a case. It is another peer in each."""
    one = number % peers
    match case:
        case "loader":
            return Faults(loader=one)
        case "model":
            return Faults(model=one)
        case "host":
            return Faults(host=one)
        case "link":
            return Faults(link=(one, (one + 1) % peers))
        case "all":
            return Faults(loader=one, host=(one + 1) % peers, link=((one + 2) % peers, (one + 3) % peers))
    return Faults()


def run_once(plan: WhyPlan, wrong: Faults) -> Outcome:
    """One run, and its diagnosis."""
    directory = Path(tempfile.mkdtemp(prefix="ringfold-why-"))
    try:
        numbers = _run(plan, wrong, directory)
        processes = [gather(each.name, each.begun, each.events()) for each in read_directory(directory)]
        found = diagnose(processes)
    finally:
        shutil.rmtree(directory)
    wanted = set()
    if wrong.loader is not None:
        wanted.add(f"compute: peer {numbers[wrong.loader]}")
    if wrong.model is not None:
        wanted.add(f"compute: peer {numbers[wrong.model]}")
    if wrong.host is not None:
        wanted.add(f"host: peer {numbers[wrong.host]}")
    if wrong.link is not None:
        wanted.add(f"link: peer {numbers[wrong.link[0]]} to peer {numbers[wrong.link[1]]}")
    return Outcome(wanted, {_named(each.cause, each.peer, each.target) for each in found.findings}, found)


def _named(cause: str, peer: int, target: int) -> str:
    return f"{cause}: peer {peer} to peer {target}" if cause == "link" else f"{cause}: peer {peer}"


def _run(plan: WhyPlan, wrong: Faults, directory: Path) -> dict[int, int]:
    """Run all processes to their end; the peer of each host."""
    shape = Shape(up_mbit=plan.mbit, down_mbit=plan.mbit)
    pairs = {wrong.link: plan.slow_mbit} if wrong.link is not None else {}
    with ShapedNetwork([shape] * plan.peers, pairs) as network, LocalCluster() as cluster:
        where = f"{network.address(HUB)}:{MASTER_PORT}"
        master = cluster.start_master(
            listen=where,
            arguments=["--insecure", "--log-json", "--log-level", "info"],
            inside=network.inside(HUB),
            events_dir=directory,
        )
        # All but the busy host's peer are kept off the core that its hogs have.
        cores = [-1] * plan.peers
        if wrong.host is not None:
            cores = [0 if host == wrong.host else 1 for host in range(plan.peers)]
            for hog in range(HOGS):
                cluster.start_worker(f"hog-{hog}", WORKERS, "busy", 0)
                cluster.allow_exit(f"hog-{hog}")
        names = {host: f"peer-{host}" for host in range(plan.peers)}
        for host, name in names.items():
            loader = plan.loader_ms if host == wrong.loader else 0.0
            model = plan.model_ms if host == wrong.model else 0.0
            arguments = (where, plan.peers, plan.steps, plan.size_bytes, COMPUTE_MS, loader, model, cores[host])
            env = {"RINGFOLD_EVENTS_DIR": str(directory), "OMP_NUM_THREADS": "1"}
            cluster.start_worker(name, WORKER, *arguments, inside=network.inside(host), env=env)
            # In the order of the hosts, so that neighbours here are neighbours in the ring.
            master.expect_events("peer_registered", host + 1, START_S)
        for name in [*names.values(), *(name for name in cluster.processes if name.startswith("hog"))]:
            prioritise(cluster.processes[name].pid)
        cluster.wait_connected(names.values(), START_S)
        joined = cluster.gather(names.values(), START_S)
        cluster.gather(names.values(), RUN_S)
        return {host: int(joined[name]["peer"]) for host, name in names.items()}


def prioritise(pid: int) -> None:
    """Raise the priority of a process, and that of its session, which Linux shares cores among before processes."""
    os.setpriority(os.PRIO_PROCESS, pid, PRIORITY)
    group = Path(f"/proc/{pid}/autogroup")
    if group.exists():
        group.write_text(str(PRIORITY))
