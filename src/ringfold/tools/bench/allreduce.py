"""`ringfold bench allreduce`: in-place all-reduce on one host, against gloo and Open MPI in the same run.

`mpi` is Open MPI over TCP, `mpi-shm` over shared memory. With several numbers of threads or transports, each has teams
of its own, and every library is measured again beside it.

For each world size, one team of processes per library is started; idle teams sleep in a read. For each size, the teams
take turns in rounds, so that a drift of the machine affects all of them. A round is a block of ops back to back. The
figure of a library is the median over all rounds of rank 0's op times. Beside it is the mean over ranks of the block
time per op, which a library cannot improve by letting rank 0 run ahead, and the CPU time per op and rank, of all
threads of a process together; divided by the size of the buffer it is the CPU time per GB.

`ringfold bench memory`: how much an in-place all-reduce raises a peer's peak resident memory. The peak (VmHWM) is reset
just before the op, with the buffer resident already. What it grows by belongs to the op: scratch, and the backup from
which a late abort is restored.
"""

import importlib.util
import itertools
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.progress import Progress

from ringfold.tools.bench import plot as pictures
from ringfold.tools.bench import report as reports
from ringfold.tools.bench.allreduce_worker import DTYPES
from ringfold.tools.bench.report import Column, Row, Sheet, microseconds, seconds, size_bytes, size_text, spread, times
from ringfold.tools.cluster import LocalCluster, Message, ProcessFailed

LIBRARIES = ("gloo", "mpi", "mpi-shm")
TRANSPORTS = {"tcp": "tcp", "shm": "auto"}
"""The setting for each; peers of one host share memory by themselves."""
MPI_TRANSPORTS = {
    "mpi": ["--mca", "btl", "tcp,self", "--mca", "btl_tcp_if_include", "lo"],
    "mpi-shm": ["--mca", "btl", "vader,self"],
}
WORKER = str(Path(__file__).with_name("allreduce_worker.py"))
START_S = 120.0
ROUND_S = 300.0
MAX_ITERATIONS = 20_000
LARGE_BYTES = 16 << 20

COLUMNS = (
    Column("peers", "world"),
    Column("threads", "threads"),
    Column("by", "transport"),
    Column("size", "size_bytes", size_text),
    Column("ringfold", "ringfold_median_us", microseconds),
    Column("p99", "ringfold_p99_us", microseconds),
    Column("gloo", "gloo_median_us", microseconds),
    Column("mpi", "mpi_median_us", microseconds),
    Column("mpi-shm", "mpi_shm_median_us", microseconds),
    Column("gloo/ours", "gloo_over_ringfold", times),
    Column("mpi/ours", "mpi_over_ringfold", times),
    Column("mpi-shm/ours", "mpi_shm_over_ringfold", times),
    Column("async/one", "async_over_one", times),
    Column("right", "verified", lambda value: "yes" if value else "NO"),
)
CPU_COLUMNS = (
    *COLUMNS[:4],
    Column("ringfold/op", "ringfold_cpu_us", microseconds),
    Column("ringfold/GB", "ringfold_cpu_s_per_gb", seconds),
    Column("gloo/GB", "gloo_cpu_s_per_gb", seconds),
    Column("mpi/GB", "mpi_cpu_s_per_gb", seconds),
    Column("mpi-shm/GB", "mpi_shm_cpu_s_per_gb", seconds),
)


class AllReducePlan(msgspec.Struct, frozen=True):
    """What is measured, and for how long."""

    worlds: list[int]
    sizes: list[int]
    libraries: list[str]
    dtype: str
    min_time_s: float
    rounds: int
    threads: list[str] = msgspec.field(default_factory=lambda: ["auto"])
    transports: list[str] = msgspec.field(default_factory=lambda: ["tcp"])
    tags: int = 1


def command(
    world: Annotated[str, typer.Option(help="Numbers of peers, comma-separated.")] = "2,4",
    sizes: Annotated[str, typer.Option(help="Buffer sizes, comma-separated.")] = "4K,16K,64K,1M,16M,64M,256M",
    against: Annotated[str, typer.Option(help="Libraries to compare with: gloo, mpi, mpi-shm, or none.")] = "gloo,mpi",
    dtype: Annotated[str, typer.Option(help=f"Element type: {', '.join(DTYPES)}.")] = "f32",
    min_time: Annotated[
        float, typer.Option(help="Seconds of ops per round (for small ops: at most 20,000 ops).", min=0.0)
    ] = 1.0,
    rounds: Annotated[int, typer.Option(help="Turns that the libraries take at each size.", min=1)] = 3,
    threads: Annotated[str, typer.Option(help="Threads of each peer, comma-separated: numbers, or auto.")] = "auto",
    transport: Annotated[
        str, typer.Option(help="What carries Ringfold's lanes, comma-separated: tcp, shm (shared memory).")
    ] = "tcp",
    tags: Annotated[
        int, typer.Option(help="Also cut each buffer into so many async ops in flight, and compare their speed.", min=1)
    ] = 1,
    plot: Annotated[
        Path | None, typer.Option(help="Draw time per op over size into FILE.svg or .png (needs the extra `report`).")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    check: Annotated[bool, typer.Option("--check", help="Compare with benchmarks/targets.toml.")] = False,
) -> None:
    """Time in-place all-reduce against gloo and Open MPI, interleaved, with verified results."""
    plan = AllReducePlan(
        worlds=[int(one) for one in world.split(",")],
        sizes=[size_bytes(one) for one in sizes.split(",")],
        libraries=[one for one in against.split(",") if one not in ("", "none")],
        dtype=dtype,
        min_time_s=min_time,
        rounds=rounds,
        threads=threads.split(","),
        transports=transport.split(","),
        tags=tags,
    )
    check_plan(plan)
    if plot is not None:
        pictures.check_file(plot)
    skipped = missing_libraries(plan.libraries)
    teams = ["ringfold", *(one for one in plan.libraries if one not in skipped)]
    with reports.guarded(as_json=as_json) as progress:
        figures = measure_cases(plan, teams, progress)
    for row in figures:
        row.update({f"{key_of(library)}_over_ringfold": None for library in skipped})
    result = reports.report("allreduce", msgspec.to_builtins(plan), figures, peers=teams, skipped=skipped)
    if not all(row["verified"] for row in figures):
        result.notes.append("A RESULT WAS WRONG: see `verified`")
    if plot is not None:
        pictures.draw([result], plot)
        result.notes.append(f"the picture is in {plot}")
    reports.finish(result, sheets(figures), as_json=as_json, against_targets=check)
    if not all(row["verified"] for row in figures):
        raise typer.Exit(1)


def check_plan(plan: AllReducePlan) -> None:
    """Complain about names that this benchmark does not know."""
    for option, given, known in (
        ("--transport", plan.transports, TRANSPORTS),
        ("--against", plan.libraries, LIBRARIES),
        ("--dtype", [plan.dtype], DTYPES),
    ):
        if unknown := sorted(set(given) - set(known)):
            raise typer.BadParameter(f"{option} knows {', '.join(known)}, not {', '.join(unknown)}")


def sheets(figures: Sequence[Row]) -> list[Sheet]:
    """The two tables: times, and what they cost in CPU time."""
    return [
        Sheet("ringfold bench allreduce: time of an op", figures, COLUMNS),
        Sheet("CPU time of a rank: of an op, and per GB of the buffer", figures, CPU_COLUMNS),
    ]


def missing_libraries(libraries: Sequence[str]) -> dict[str, str]:
    """Libraries that cannot be measured here, each with the reason."""
    missing: dict[str, str] = {}
    if "gloo" in libraries and importlib.util.find_spec("torch") is None:
        missing["gloo"] = "torch is not installed (pip install torch)"
    for library in set(libraries) & MPI_TRANSPORTS.keys():
        if importlib.util.find_spec("mpi4py") is None:
            missing[library] = "mpi4py is not installed (pip install mpi4py)"
        elif shutil.which("mpirun") is None:
            missing[library] = "mpirun is not on the PATH (apt install openmpi-bin)"
    return missing


def key_of(library: str) -> str:
    """How the figures of a library begin."""
    return library.replace("-", "_")


def team(library: str, world: int) -> list[str]:
    return [f"{library}.{rank}" for rank in range(world)]


def start_team(cluster: LocalCluster, library: str, world: int, threads: str = "auto", transport: str = "tcp") -> None:
    """Start a library's ranks and wait until they are connected with each other."""
    env = {"OMP_NUM_THREADS": "1", "RINGFOLD_THREADS": threads, "RINGFOLD_TRANSPORT": TRANSPORTS[transport]}
    # Without -P the folder of the script would become importable, `join.py` and `master.py` included.
    rank_command = [sys.executable, "-P", WORKER, library, cluster.address, str(world)]
    if library in MPI_TRANSPORTS:
        where = "-"
        mpirun = ["mpirun", *MPI_TRANSPORTS[library], "--oversubscribe", "--allow-run-as-root", "-n", str(world)]
        # Its session files go where the cluster removes them.
        env["TMPDIR"] = str(cluster.directory)
        cluster.start(library, [*mpirun, *rank_command, "-", where], env=env, terminate_first=True)
    else:
        if library == "gloo":
            env["GLOO_SOCKET_IFNAME"] = "lo"
            where = str(cluster.directory / "gloo-store")
        else:
            where = cluster.start_master().address
        for rank, name in enumerate(team(library, world)):
            cluster.start(name, [*rank_command, str(rank), where], env=env)
    cluster.wait_connected(team(library, world), START_S)
    cluster.gather(team(library, world), START_S)


def measure_cases(plan: AllReducePlan, teams: Sequence[str], progress: Progress) -> list[Row]:
    """All sizes with each number of peers, number of threads and transport; each of these has new processes."""
    figures: list[Row] = []
    cases = list(itertools.product(plan.worlds, plan.threads, plan.transports))
    task = progress.add_task("starting", total=len(cases) * len(plan.sizes) * plan.rounds)
    for peers, count, carrier in cases:
        with LocalCluster() as cluster:
            progress.update(task, description=f"{peers} peers: starting {', '.join(teams)}")
            for library in teams:
                start_team(cluster, library, peers, count, carrier)
            for size in plan.sizes:
                progress.update(task, description=f"{peers} peers, {size_text(size)}")
                row = measure(cluster, teams, peers, size, plan, lambda: progress.advance(task))
                figures.append({"threads": count, "transport": carrier, **row})
            for library in teams:
                cluster.send(team(library, peers), {"do": "end"})
    return figures


def measure(
    cluster: LocalCluster, teams: Sequence[str], world: int, size: int, plan: AllReducePlan, advance: Callable[[], None]
) -> Row:
    """All rounds of all teams at one size, as one row of figures."""
    iterations = {
        library: iterations_for(play(cluster, library, world, size, plan, 3)["durations_ns"], size, plan)
        for library in teams
    }
    durations: dict[str, list[int]] = {library: [] for library in teams}
    blocks: dict[str, list[float]] = {library: [] for library in teams}
    cpu: dict[str, list[float]] = {library: [] for library in teams}
    together: list[int] = []
    verified, identical = True, {library: True for library in teams}
    for number in range(plan.rounds):
        if plan.tags > 1:
            outcome = play(cluster, "ringfold", world, size, plan, iterations["ringfold"], tags=plan.tags)
            together += outcome["durations_ns"]
            verified = verified and outcome["verified"]
        for library in teams:
            outcome = play(cluster, library, world, size, plan, iterations[library], digest=number == 0)
            durations[library] += outcome["durations_ns"]
            blocks[library].append(outcome["block_ns"] / iterations[library])
            cpu[library].append(outcome["cpu_ns"] / iterations[library])
            verified = verified and outcome["verified"]
            identical[library] = identical[library] and outcome["identical"]
        advance()
    row: Row = {"world": world, "size_bytes": size, "dtype": plan.dtype}
    for library in teams:
        key = key_of(library)
        row.update(spread(durations[library], f"{key}_"))
        row[f"{key}_block_us"] = sum(blocks[library]) / len(blocks[library]) / 1_000
        row[f"{key}_cpu_us"] = sum(cpu[library]) / len(cpu[library]) / 1_000
        row[f"{key}_cpu_s_per_gb"] = sum(cpu[library]) / len(cpu[library]) / size
        row[f"{key}_bit_identical"] = identical[library]
    if plan.tags > 1:
        row.update(spread(together, "async_"))
        row["async_over_one"] = ratio(row, "ringfold", "median_us", over="async")
    for library in teams[1:]:
        key = key_of(library)
        row[f"{key}_over_ringfold"] = ratio(row, key, "median_us")
        row[f"{key}_over_ringfold_block"] = ratio(row, key, "block_us")
    # Other libraries do not promise the same bits on every rank; Ringfold does.
    row["verified"] = verified and identical["ringfold"]
    return row


def play(
    cluster: LocalCluster,
    library: str,
    world: int,
    size: int,
    plan: AllReducePlan,
    iterations: int,
    *,
    digest: bool = False,
    tags: int = 1,
) -> Message:
    """One round of one team, joined into one message: rank 0's op times, the mean block, and the verdicts of all."""
    order = {
        "do": "round",
        "size_bytes": size,
        "dtype": plan.dtype,
        "iterations": iterations,
        "digest": digest,
        "tags": tags,
    }
    order["warm_up"] = 1 if size >= LARGE_BYTES else 10
    names = team(library, world)
    cluster.send(names, order)
    replies = cluster.gather(names, ROUND_S)
    return {
        "durations_ns": replies[names[0]]["durations_ns"],
        "block_ns": sum(reply["block_ns"] for reply in replies.values()) / world,
        "cpu_ns": sum(reply["cpu_ns"] for reply in replies.values()) / world,
        "verified": all(reply["verified"] for reply in replies.values()),
        "identical": len({reply["digest"] for reply in replies.values()}) == 1,
    }


def iterations_for(trial_ns: Sequence[int], size: int, plan: AllReducePlan) -> int:
    """How many ops fill a round: 20 at least; large buffers need that many over all rounds only."""
    one_ns = sorted(trial_ns)[len(trial_ns) // 2]
    wanted = int(plan.min_time_s * 1e9 / max(one_ns, 1))
    fewest = -(-20 // plan.rounds) if size >= LARGE_BYTES else 20
    return max(fewest, min(wanted, MAX_ITERATIONS))


def ratio(row: Row, library: str, figure: str, *, over: str = "ringfold") -> float:
    other, own = row[f"{library}_{figure}"], row[f"{over}_{figure}"]
    if not (isinstance(other, float) and isinstance(own, float)):
        raise ProcessFailed(library, "no figures to compare")
    return other / own


PEER_WORKER = str(Path(__file__).with_name("workers.py"))
MEMORY_S = 120.0

MEMORY_COLUMNS = (
    Column("peers", "peers"),
    Column("size", "size_bytes", reports.size_text),
    Column("extra, first op", "first_over_buffer", times),
    Column("extra, second op", "second_over_buffer", times),
    Column("worst", "extra_over_buffer", times),
)


def memory_command(
    size: Annotated[str, typer.Option(help="Bytes of the buffer.")] = "256M",
    peers: Annotated[int, typer.Option(help="Peers in the run.", min=2)] = 2,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    check: Annotated[bool, typer.Option("--check", help="Compare with benchmarks/targets.toml.")] = False,
) -> None:
    """Extra peak memory of an in-place all-reduce, as a multiple of its buffer."""
    buffer = size_bytes(size)
    names = [f"peer-{number}" for number in range(peers)]
    with reports.guarded(as_json=as_json) as progress, LocalCluster() as cluster:
        progress.add_task("measuring", total=None)
        where = cluster.start_master().address
        for name in names:
            cluster.start_worker(name, PEER_WORKER, "memory", where, buffer, peers)
        cluster.wait_connected(names, MEMORY_S)
        replies = cluster.gather(names, MEMORY_S)
        if wrong := [name for name, reply in replies.items() if not reply["verified"]]:
            raise ProcessFailed(wrong[0], "holds a wrong sum")
    first, second = (max(int(reply["extra_bytes"][op]) for reply in replies.values()) for op in range(2))
    row: Row = {
        "peers": peers,
        "size_bytes": buffer,
        "extra_bytes": max(first, second),
        "first_over_buffer": first / buffer,
        "second_over_buffer": second / buffer,
        "extra_over_buffer": max(first, second) / buffer,
    }
    result = reports.report("memory", {"size": size, "peers": peers}, [row])
    reports.finish(result, MEMORY_COLUMNS, as_json=as_json, against_targets=check)
