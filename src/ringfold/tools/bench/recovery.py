"""`ringfold bench recovery`, `ringfold bench failover`: how long a run stands still without a peer, or its master.

*recovery*: peers reduce without a pause. The parent kills one of them at a random instant and waits until every
survivor has committed an op without it; the figure is the time from just before the signal to the *last* survivor's
commit. Then a new peer takes the place of the killed one, and the next round begins when all have committed an op with
it.

With `--resident` the peers that are killed have so much in memory. The kernel frees that before it closes their
connections; their guardians, and neighbours that share memory with them, see the death before. With `--hosts` every
peer is on a host of its own, a network namespace, and has no such neighbour; `--no-guardian` takes the guardians away.

*failover*: peers reduce without a pause, with evidence by the master, so that no op can end without one. The parent
kills the leader at a random instant.

- `standby`: another master on the same store takes over. The figure is the time from just before the signal to the
  *last* peer's first commit under the new leader.
- `restart`: the same command is started again. The figure is the time from just before that start.
- `without a master`: evidence travels on the ring, and no master leads for a second. The figure is the longest time
  between two commits of any peer.

All masters run on this machine, where a standby sees that the leader's process has ended and does not wait for its
lease. Between machines the lease comes on top of the figure.
"""

import contextlib
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from ringfold.runtime.clock import monotonic_ns
from ringfold.tools.bench import report as reports
from ringfold.tools.bench.report import Column, Row, microseconds, size_bytes, spread
from ringfold.tools.cluster import MASTER_PORT, LocalCluster, ProcessFailed, free_port
from ringfold.tools.shaped import HUB, MAX_HOSTS, Shape, ShapedNetwork, missing

TRANSPORTS = {"shm": "auto", "tcp": "tcp"}
WORKER = str(Path(__file__).with_name("workers.py"))
START_S = 60.0
REPLY_S = 30.0

COLUMNS = (
    Column("what", "signal"),
    Column("peers", "peers"),
    Column("size", "size_bytes", reports.size_text),
    Column("resident", "resident_bytes", reports.size_text),
    Column("by", "transport"),
    Column("hosts", "hosts"),
    Column("guardians", "guardians"),
    Column("times", "count"),
    Column("median", "median_us", microseconds),
    Column("p90", "p90_us", microseconds),
    Column("worst", "worst_us", microseconds),
    Column("worst beyond eviction", "worst_beyond_eviction_us", microseconds),
)


def command(
    peers: Annotated[int, typer.Option(help="Peers in the run.", min=3)] = 4,
    size: Annotated[str, typer.Option(help="Bytes that each op reduces.")] = "1M",
    kills: Annotated[int, typer.Option(help="How often a peer is killed.", min=1)] = 20,
    stop: Annotated[bool, typer.Option("--stop", help="Freeze (SIGSTOP) instead; three times by default.")] = False,
    stops: Annotated[int, typer.Option(help="How often a peer is frozen, with --stop.", min=1)] = 3,
    evict_after_ms: Annotated[int, typer.Option(help="Silence after which the master evicts.", min=1_001)] = 5_000,
    seed: Annotated[int, typer.Option(help="Decides which peer is killed, and after how long.")] = 1,
    resident: Annotated[
        str, typer.Option(help="Bytes that the peers to be killed have in memory; with any, the last one is killed.")
    ] = "0",
    transport: Annotated[str, typer.Option(help="What carries lanes: shm (shared memory) or tcp.")] = "shm",
    hosts: Annotated[
        bool, typer.Option("--hosts", help="Each peer on a host of its own: a network namespace (needs root).")
    ] = False,
    guardian: Annotated[bool, typer.Option("--guardian/--no-guardian", help="Whether peers have guardians.")] = True,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    check: Annotated[bool, typer.Option("--check", help="Compare with benchmarks/targets.toml.")] = False,
) -> None:
    """Time from the end of a peer to the survivors' next committed op."""
    rounds = stops if stop else kills
    if transport not in TRANSPORTS:
        raise typer.BadParameter(f"--transport knows {', '.join(TRANSPORTS)}, not {transport}")
    if hosts and (why := missing()):
        raise typer.BadParameter(f"--hosts: {why}")
    if hosts and peers > MAX_HOSTS:
        raise typer.BadParameter(f"--hosts: at most {MAX_HOSTS} peers")
    taken: list[int] = []
    settings = {"RINGFOLD_TRANSPORT": TRANSPORTS[transport], "RINGFOLD_GUARDIAN": str(guardian).lower()}
    with contextlib.ExitStack() as stack:
        progress = stack.enter_context(reports.guarded(as_json=as_json))
        network = stack.enter_context(ShapedNetwork([Shape()] * peers)) if hosts else None
        cluster = stack.enter_context(LocalCluster())
        task = progress.add_task("starting", total=rounds)
        memory = 0 if resident == "0" else size_bytes(resident)
        run = RecoveryRun(cluster, peers, size_bytes(size), evict_after_ms, memory, settings, network)
        generator = np.random.default_rng(seed)
        for _ in progress.track(range(rounds), task_id=task, description="freezing" if stop else "killing"):
            cluster.pause(float(generator.uniform(0.05, 0.15)))
            victim = run.names[-1 if memory else int(generator.integers(peers))]
            taken.append(run.lose(victim, freeze=stop))
            run.replace(victim)
    row: Row = {"signal": "SIGSTOP" if stop else "SIGKILL", "peers": peers, "size_bytes": size_bytes(size)}
    row |= {"resident_bytes": memory, "transport": "tcp" if hosts else transport, "hosts": peers if hosts else 1}
    row["guardians"] = "yes" if guardian else "no"
    row.update(spread(taken))
    if stop:
        row["evict_after_ms"] = evict_after_ms
        row["worst_beyond_eviction_us"] = max(taken) / 1_000 - evict_after_ms * 1_000
    chosen: dict[str, object] = {"peers": peers, "size": size, "rounds": rounds, "seed": seed}
    chosen |= {"resident": resident, "transport": transport, "hosts": hosts, "guardian": guardian}
    result = reports.report("recovery", chosen, [row])
    result.samples_ms["recovery"] = [one / 1e6 for one in taken]
    reports.finish(result, COLUMNS, as_json=as_json, against_targets=check)


class RecoveryRun:
    """A master and peers that reduce without a pause. `names` are the peers alive."""

    def __init__(
        self,
        cluster: LocalCluster,
        peers: int,
        size: int,
        evict_after_ms: int,
        resident: int = 0,
        env: Mapping[str, str] | None = None,
        network: ShapedNetwork | None = None,
    ) -> None:
        """With a network, peers are on its hosts, and the master is in its hub."""
        self._cluster, self._peers, self._size = cluster, peers, size
        self._resident, self._env, self._network = resident, env, network
        self._evict_after_s = evict_after_ms / 1_000
        self._where = self._start_master(evict_after_ms)
        self._free_hosts = list(range(peers))
        self._hosts: dict[str, int] = {}
        self._started = 0
        self.names: list[str] = []
        for number in range(peers):
            self._start(founders=peers, resident=resident if number == peers - 1 else 0)
        cluster.wait_connected(self.names, START_S)
        self._wait_for(peers, START_S)

    def lose(self, victim: str, *, freeze: bool) -> int:
        """End or freeze a peer; return the nanoseconds until the last survivor committed without it."""
        at = self._cluster.freeze(victim) if freeze else self._cluster.kill(victim)
        self.names.remove(victim)
        last = self._wait_for(self._peers - 1, REPLY_S + self._evict_after_s)
        if freeze:
            self._cluster.kill(victim)
        self._cluster.wait_exit(victim, REPLY_S)
        self._free_hosts.append(self._hosts.pop(victim))
        return last - at

    def replace(self, victim: str) -> None:
        """Start a peer in the lost one's place, and wait until everybody has committed an op with it."""
        self._start(founders=0, resident=self._resident)
        self._cluster.wait_connected(self.names, START_S)
        self._wait_for(self._peers, START_S)

    def _start_master(self, evict_after_ms: int) -> str:
        network, cluster = self._network, self._cluster
        if network is None:
            return cluster.start_master(evict_after_ms=evict_after_ms).address
        listen, inside = f"{network.address(HUB)}:{MASTER_PORT}", network.inside(HUB)
        chosen = cluster.start_master(
            listen=listen, arguments=["--insecure"], inside=inside, evict_after_ms=evict_after_ms
        )
        return chosen.address

    def _start(self, founders: int, resident: int) -> None:
        name = f"peer-{self._started}"
        self._started += 1
        host = self._hosts[name] = self._free_hosts.pop(0)
        arguments = ("recovery", self._where, self._size, founders, resident)
        inside = () if self._network is None else self._network.inside(host)
        self._cluster.start_worker(name, WORKER, *arguments, inside=inside, env=self._env)
        self.names.append(name)

    def _wait_for(self, contributors: int, timeout_s: float) -> int:
        """Wait until each living peer has committed an op of so many; return the instant of the last one's first."""
        first: dict[str, int] = {}
        while missing := [name for name in self.names if name not in first]:
            got = self._cluster.receive(timeout_s, missing)
            if got is None:
                log = self._cluster.log_tail(missing[0])
                raise ProcessFailed(missing[0], f"committed no op of {contributors} within {timeout_s:.0f} s", log)
            if got[1]["contributors"] == contributors:
                first[got[0]] = int(got[1]["at_ns"])
        return max(first.values())


ALONE_S = 1.0

FAILOVER_COLUMNS = (
    Column("what", "what"),
    Column("peers", "peers"),
    Column("times", "count"),
    Column("lease", "lease_us", microseconds),
    Column("median", "median_us", microseconds),
    Column("p90", "p90_us", microseconds),
    Column("worst", "worst_us", microseconds),
    Column("median beyond the lease", "median_beyond_lease_us", microseconds),
)


def failover_command(
    peers: Annotated[int, typer.Option(help="Peers in the run.", min=2)] = 4,
    size: Annotated[str, typer.Option(help="Bytes that each op reduces.")] = "1M",
    kills: Annotated[int, typer.Option(help="How often a master is killed, in each part.", min=1)] = 5,
    lease_s: Annotated[float, typer.Option(help="The lease of the leading master.", min=0.5)] = 3.0,
    seed: Annotated[int, typer.Option(help="Decides after how long a master is killed.")] = 1,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    check: Annotated[bool, typer.Option("--check", help="Compare with benchmarks/targets.toml.")] = False,
) -> None:
    """Time from the end of a master to the peers' next committed op, with a standby, after a restart, and alone."""
    generator = np.random.default_rng(seed)
    rows: list[Row] = []
    with reports.guarded(as_json=as_json) as progress, tempfile.TemporaryDirectory(prefix="ringfold-") as folder:
        task = progress.add_task("failing over", total=2 * kills + 1)
        for what in ("standby", "restart"):
            with LocalCluster() as cluster:
                journal, standby = Path(folder) / f"{what}.db", what == "standby"
                run = FailoverRun(cluster, peers, size_bytes(size), journal, lease_s, standby=standby)
                taken = []
                for _ in range(kills):
                    cluster.pause(float(generator.uniform(0.2, 0.5)))
                    taken.append(run.replace() if what == "standby" else run.restart())
                    progress.advance(task)
            row: Row = {"what": what, "peers": peers, "lease_us": lease_s * 1e6, **spread(taken)}
            if what == "standby":
                row["median_beyond_lease_us"] = float(np.median(taken)) / 1e3 - lease_s * 1e6
            rows.append(row)
        with LocalCluster() as cluster:
            run = FailoverRun(cluster, peers, size_bytes(size), Path(folder) / "alone.db", lease_s, evidence="ring")
            longest = run.alone()
            rows.append({"what": "without a master", "peers": peers, "lease_us": lease_s * 1e6, **spread(longest)})
            progress.advance(task)
    settings: dict[str, object] = {"peers": peers, "size": size, "kills": kills, "lease_s": lease_s, "seed": seed}
    reports.finish(reports.report("failover", settings, rows), FAILOVER_COLUMNS, as_json=as_json, against_targets=check)


class FailoverRun:
    """Peers that reduce without a pause, and one master that leads, or two."""

    def __init__(
        self,
        cluster: LocalCluster,
        peers: int,
        size: int,
        journal: Path,
        lease_s: float,
        *,
        standby: bool = False,
        evidence: str = "master",
    ) -> None:
        self._cluster = cluster
        self._settings: dict[str, Any] = {"store": f"sqlite://{journal}", "lease_s": lease_s, "evidence": evidence}
        first = cluster.start_master("master-0", **self._settings)
        first.wait_leading()
        self._leader = first.name
        self._masters = {first.name: first.address}
        self._started = 1
        self._spare = f"127.0.0.1:{free_port()}"
        self._where = f"{first.address},{self._spare}" if standby else first.address
        if standby:
            self._stand_by()
        self._names = [f"peer-{number}" for number in range(peers)]
        for name in self._names:
            cluster.start_worker(name, WORKER, "failover", self._where, size, peers)
        cluster.wait_connected(self._names, START_S)
        self._epoch = 0
        self._wait(peers)

    def _stand_by(self) -> None:
        """Start a master on the address that is free; it finds that another one leads."""
        name = f"master-{self._started}"
        self._started += 1
        self._cluster.start_master(name, listen=self._spare, wait=False, **self._settings)
        self._masters[name] = self._spare

    def replace(self) -> int:
        """Kill the leader; the nanoseconds until all peers have committed under the standby. Then it has one itself."""
        at, old = self._cluster.kill(self._leader), self._leader
        last = self._wait(len(self._names))
        self._cluster.wait_exit(old, START_S)
        self._spare = self._masters.pop(old)
        [self._leader] = self._masters
        self._stand_by()
        self._cluster.pause(1.0)
        return last - at

    def restart(self) -> int:
        """Kill the master and start it again; the nanoseconds from the start to the last peer's commit."""
        self._cluster.kill(self._leader)
        self._cluster.wait_exit(self._leader, START_S)
        address = self._masters.pop(self._leader)
        self._cluster.pause(0.5)
        self._leader = f"master-{self._started}"
        self._started += 1
        at = monotonic_ns()
        master = self._cluster.start_master(self._leader, listen=address, wait=False, **self._settings)
        self._masters[self._leader] = address
        last = self._wait(len(self._names))
        master.wait_leading()
        return last - at

    def alone(self) -> list[int]:
        """Kill the master, and let no master lead for a while; each peer's longest time between two commits."""
        self._cluster.send(self._names, {"begin": True})
        self._cluster.kill(self._leader)
        self._cluster.pause(ALONE_S)
        self._cluster.send(self._names, {"report": True})
        return [self._longest(name) for name in self._names]

    def _longest(self, name: str) -> int:
        while True:
            got = self._cluster.receive(START_S, [name])
            if got is None:
                raise ProcessFailed(name, f"did not report within {START_S:.0f} s", self._cluster.log_tail(name))
            if "longest_ns" in got[1]:
                return int(got[1]["longest_ns"])

    def _wait(self, peers: int) -> int:
        """Wait until all have committed an op in a newer epoch; the instant of the last one's first."""
        first: dict[str, tuple[int, int]] = {}
        while len(first) < peers or len({epoch for epoch, _ in first.values()}) > 1:
            got = self._cluster.receive(START_S, self._names)
            if got is None:
                raise ProcessFailed(
                    self._names[0], f"no op within {START_S:.0f} s", self._cluster.log_tail(self._names[0])
                )
            name, report = got
            if report["contributors"] == peers and report["epoch"] > self._epoch:
                first[name] = (int(report["epoch"]), int(report["at_ns"]))
        self._epoch = max(epoch for epoch, _ in first.values())
        return max(at for _, at in first.values())
