"""`ringfold bench torchft`: the same training script with Ringfold and with torchft, in the same run, on the CPU.

Each library has a team of replicas that train a model of 1 MiB without a pause; the other team sleeps. The figures:

- `step`: what a step costs beyond the same step without any library, of rank 0.
- `step CPU`: the same of the CPU time of all threads of a replica. It does not depend on how many replicas share a
  core, nor on who waits for whom; the master and the lighthouse are not in it.
- `SIGKILL`: from just before the signal to the *last* survivor's first committed step without the killed replica.
- `SIGKILL, 100 ms`: the same where torchft's lighthouse gives stragglers 100 ms to join the quorum.
- `SIGSTOP`: the same for a frozen replica. Ringfold evicts it after `evict_after_ms`, 5 s; so long is torchft's timeout
  of an op here.
- `join`: from the order to join to the newcomer's first committed step with all; its imports are done before.

torchft's lighthouse has `heartbeat_timeout_ms` 1,000 instead of 5,000. Its other settings are the defaults of
`torchft_lighthouse`, the command that torchft recommends: above all, `join_timeout_ms` is 60,000. A lighthouse waits so
long for a replica whose last heartbeat is recent, and one that was killed sent it just before. `LighthouseServer`,
which torchft has for tests, waits for 100 ms by default: kills cost less, and a replica that is later than that once,
because its machine is busy, is left out of the quorum.
"""

import importlib.util
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated

import numpy as np
import typer

from ringfold.runtime.clock import monotonic_ns
from ringfold.tools.bench import report as reports
from ringfold.tools.bench.report import Column, Row, microseconds, times
from ringfold.tools.cluster import LocalCluster, Message, ProcessFailed

WORKER = str(Path(__file__).with_name("torchft_worker.py"))
Figures = dict[str, list[float]]
"""Of a library: nanoseconds, by what took them."""
JOIN_TIMEOUT_MS = 60_000
SHORT_JOIN_TIMEOUT_MS = 100
SHORT = f"SIGKILL, {SHORT_JOIN_TIMEOUT_MS} ms"
START_S = 120.0
REPLY_S = 60.0

PAUSE_S = 0.3
"""Of undisturbed steps before a signal, and before a join."""
WHAT = ("step", "step CPU", "SIGKILL", SHORT, "SIGSTOP", "join")
COLUMNS = (
    Column("what", "what"),
    Column("replicas", "replicas"),
    Column("times", "count"),
    Column("ringfold", "ringfold_median_us", microseconds),
    Column("worst", "ringfold_worst_us", microseconds),
    Column("torchft", "torchft_median_us", microseconds),
    Column("worst", "torchft_worst_us", microseconds),
    Column("torchft/ours", "torchft_over_ringfold", times),
)


def command(
    replicas: Annotated[int, typer.Option(help="Replicas of the model.", min=3)] = 4,
    kills: Annotated[int, typer.Option(help="How often a replica is killed, and another one joins.", min=1)] = 5,
    stops: Annotated[int, typer.Option(help="How often a replica is frozen.", min=0)] = 1,
    seconds: Annotated[float, typer.Option(help="For how long steps are timed.", min=0.1)] = 5.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    check: Annotated[bool, typer.Option("--check", help="Compare with benchmarks/targets.toml.")] = False,
) -> None:
    """Time steps, recovery and joins of one script with Ringfold and with torchft."""
    skipped = missing_libraries()
    libraries = [one for one in ("ringfold", "torchft") if one not in skipped]
    if "ringfold" in skipped:
        raise typer.BadParameter(skipped["ringfold"])
    taken: dict[str, Figures] = {}
    with reports.guarded(as_json=as_json) as progress:
        short_kills = kills if "torchft" in libraries else 0
        task = progress.add_task("starting", total=len(libraries) * (1 + kills + stops) + short_kills)
        losses = ["SIGKILL"] * kills + ["SIGSTOP"] * stops
        for library in libraries:
            progress.update(task, description=library)
            with LocalCluster() as cluster:
                team = Team(cluster, library, replicas)
                taken[library] = team.step_overhead(seconds)
                progress.advance(task)
                team.lose_and_join(losses, taken[library], lambda: progress.advance(task))
        if short_kills:
            progress.update(task, description=SHORT)
            apart: Figures = {}
            with LocalCluster() as cluster:
                team = Team(cluster, "torchft", replicas, SHORT_JOIN_TIMEOUT_MS)
                team.lose_and_join(["SIGKILL"] * kills, apart, lambda: progress.advance(task))
            taken["torchft"][SHORT], taken["ringfold"][SHORT] = apart["SIGKILL"], taken["ringfold"]["SIGKILL"]
    figures = [row_of(what, replicas, taken) for what in WHAT if what in taken["ringfold"]]
    settings: dict[str, object] = {"replicas": replicas, "kills": kills, "stops": stops, "seconds": seconds}
    result = reports.report("torchft", settings, figures, peers=libraries, skipped=skipped)
    reports.finish(result, COLUMNS, as_json=as_json, against_targets=check)


def missing_libraries() -> dict[str, str]:
    missing = {}
    if importlib.util.find_spec("torch") is None:
        missing["ringfold"] = "PyTorch is not installed: pip install 'ringfold[torch]'"
    if importlib.util.find_spec("torchft") is None:
        missing["torchft"] = "it is not installed (pip install torchft)"
    return missing


def row_of(what: str, replicas: int, taken: dict[str, Figures]) -> Row:
    row: Row = {"what": what, "replicas": replicas, "torchft_over_ringfold": None}
    for library, found in taken.items():
        values = found[what]
        row["count"] = len(values)
        row[f"{library}_median_us"] = float(np.median(values)) / 1_000
        row[f"{library}_worst_us"] = max(values) / 1_000
    own, other = row["ringfold_median_us"], row.get("torchft_median_us")
    if isinstance(own, float) and isinstance(other, float):
        row["torchft_over_ringfold"] = other / own
    return row


class Team:
    """The server and the replicas of one library, and what is done to them."""

    def __init__(
        self, cluster: LocalCluster, library: str, replicas: int, join_timeout_ms: int = JOIN_TIMEOUT_MS
    ) -> None:
        self._cluster, self._library, self._replicas = cluster, library, replicas
        self._started = 0
        self._where = self._start_server(join_timeout_ms)
        self.names: list[str] = []
        self._armed = [self._arm() for _ in range(replicas)]
        for name in list(self._armed):
            self._order_to_join(name)
        self._wait_for(replicas, START_S)

    def step_overhead(self, seconds: float) -> Figures:
        """The nanoseconds of rank 0's steps beyond the mean of steps without a library; of each replica, of CPU.

        The mean: where replicas outnumber the cores, most of these short steps end before the kernel takes the core
        away, so that their median leaves the others' computation out.
        """
        self._cluster.pause(1.0)
        self._times()
        self._cluster.pause(seconds)
        times = self._times()
        first = times[self.names[0]]
        alone = float(np.mean(first["alone_ns"]))
        return {
            "step": [each - alone for each in first["durations_ns"]],
            "step CPU": [each["cpu_ns"] - each["alone_cpu_ns"] for each in times.values()],
        }

    def lose_and_join(self, losses: Sequence[str], found: Figures, advance: Callable[[], None]) -> None:
        for what in losses:
            self._cluster.pause(PAUSE_S)
            found.setdefault(what, []).append(self.lose(freeze=what == "SIGSTOP"))
            found.setdefault("join", []).append(self.join())
            advance()

    def lose(self, *, freeze: bool) -> float:
        victim = self.names.pop()
        at = self._cluster.freeze(victim) if freeze else self._cluster.kill(victim)
        last = max(self._wait_for(self._replicas - 1, REPLY_S).values())
        if freeze:
            self._cluster.kill(victim)
        self._cluster.wait_exit(victim, REPLY_S)
        return last - at

    def join(self) -> float:
        name = self._arm()
        self._cluster.pause(PAUSE_S)
        at = monotonic_ns()
        self._order_to_join(name)
        return self._wait_for(self._replicas, START_S)[name] - at

    def _start_server(self, join_timeout_ms: int) -> str:
        if self._library == "ringfold":
            return self._cluster.start_master().address
        self._cluster.start_worker("lighthouse", WORKER, "lighthouse", join_timeout_ms)
        self._cluster.wait_connected(["lighthouse"], START_S)
        return str(self._cluster.gather(["lighthouse"], START_S)["lighthouse"]["address"])

    def _arm(self) -> str:
        name = f"replica-{self._started}"
        self._started += 1
        self._cluster.start_worker(name, WORKER, self._library, self._where, self._replicas)
        self._cluster.wait_connected([name], START_S)
        self._cluster.gather([name], START_S)
        return name

    def _order_to_join(self, name: str) -> None:
        self._cluster.send([name], {"do": "join"})
        self.names.append(name)

    def _times(self) -> dict[str, Message]:
        """Of each replica, its report on the steps since the last call, and on steps without a library.

        All measure the latter at the same time.
        """
        self._cluster.send(self.names, {"do": "report"})
        found: dict[str, Message] = {}
        while missing := [name for name in self.names if name not in found]:
            got = self._cluster.receive(REPLY_S, missing)
            if got is None:
                raise ProcessFailed(missing[0], "sent no times", self._cluster.log_tail(missing[0]))
            if "durations_ns" in got[1]:
                found[got[0]] = got[1]
        return found

    def _wait_for(self, participants: int, timeout_s: float) -> dict[str, int]:
        """Wait until each living replica has committed a step of so many; the instant of each one's first."""
        first: dict[str, int] = {}
        while missing := [name for name in self.names if name not in first]:
            got = self._cluster.receive(timeout_s, missing)
            if got is None:
                log = self._cluster.log_tail(missing[0])
                raise ProcessFailed(missing[0], f"committed no step of {participants} within {timeout_s:.0f} s", log)
            if got[1].get("participants") == participants:
                first[got[0]] = int(got[1]["at_ns"])
        return first
