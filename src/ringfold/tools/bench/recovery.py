"""`ringfold bench recovery`: how long a run stands still when a peer is killed or frozen.

Peers reduce without a pause. The parent kills one of them at a random instant and waits until every survivor has
committed an op without it; the figure is the time from just before the signal to the *last* survivor's commit. Then a
new peer takes the dead one's place, and the next round begins when all have committed an op with it.
"""

import sys
from pathlib import Path
from typing import Annotated

import numpy as np
import typer

from ringfold.tools.bench import report as reports
from ringfold.tools.bench.masters import start_master
from ringfold.tools.bench.report import Column, Row, microseconds, size_bytes, spread
from ringfold.tools.spawn import ChildFailed, Crew

WORKER = str(Path(__file__).with_name("workers_run.py"))
START_S = 60.0
REPLY_S = 30.0

COLUMNS = (
    Column("what", "signal"),
    Column("peers", "peers"),
    Column("size", "size_bytes", reports.size_text),
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
    stop: Annotated[bool, typer.Option("--stop", help="Freeze (SIGSTOP) instead; three times unless told.")] = False,
    stops: Annotated[int, typer.Option(help="How often a peer is frozen, with --stop.", min=1)] = 3,
    evict_after_ms: Annotated[int, typer.Option(help="Silence after which the master evicts.", min=1_001)] = 5_000,
    seed: Annotated[int, typer.Option(help="Decides who is killed, and after how long.")] = 1,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    check: Annotated[bool, typer.Option("--check", help="Compare with benchmarks/targets.toml.")] = False,
) -> None:
    """Time from the end of a peer to the survivors' next committed op."""
    rounds = stops if stop else kills
    taken: list[int] = []
    with reports.guarded(as_json=as_json) as progress, Crew() as crew:
        task = progress.add_task("starting", total=rounds)
        run = Run(crew, peers, size_bytes(size), evict_after_ms)
        generator = np.random.default_rng(seed)
        for _ in progress.track(range(rounds), task_id=task, description="freezing" if stop else "killing"):
            crew.pause(float(generator.uniform(0.05, 0.15)))
            victim = run.names[int(generator.integers(peers))]
            taken.append(run.lose(victim, freeze=stop))
            run.replace(victim)
    row: Row = {"signal": "SIGSTOP" if stop else "SIGKILL", "peers": peers, "size_bytes": size_bytes(size)}
    row.update(spread(taken))
    if stop:
        row["evict_after_ms"] = evict_after_ms
        row["worst_beyond_eviction_us"] = max(taken) / 1_000 - evict_after_ms * 1_000
    settings: dict[str, object] = {"peers": peers, "size": size, "rounds": rounds, "seed": seed}
    result = reports.report("recovery", settings, [row])
    result.samples_ms["recovery"] = [one / 1e6 for one in taken]
    reports.finish(result, COLUMNS, as_json=as_json, against_targets=check)


class Run:
    """A master and peers that reduce without a pause. `names` are the peers alive."""

    def __init__(self, crew: Crew, peers: int, size: int, evict_after_ms: int) -> None:
        self._crew, self._peers, self._size = crew, peers, size
        self._evict_after_s = evict_after_ms / 1_000
        self._where = start_master(crew, "master", evict_after_ms=evict_after_ms)
        self._started = 0
        self.names: list[str] = []
        for _ in range(peers):
            self._start(founders=peers)
        crew.meet(self.names, START_S)
        self._wait_for(peers, START_S)

    def lose(self, victim: str, *, freeze: bool) -> int:
        """End or freeze a peer; return the nanoseconds until the last survivor committed without it."""
        at = self._crew.freeze(victim) if freeze else self._crew.kill(victim)
        self.names.remove(victim)
        last = self._wait_for(self._peers - 1, REPLY_S + self._evict_after_s)
        if freeze:
            self._crew.kill(victim)
        self._crew.reap(victim, REPLY_S)
        return last - at

    def replace(self, victim: str) -> None:
        """Start a peer in the lost one's place, and wait until everybody has committed an op with it."""
        self._start(founders=0)
        self._crew.meet(self.names, START_S)
        self._wait_for(self._peers, START_S)

    def _start(self, founders: int) -> None:
        name = f"peer-{self._started}"
        self._started += 1
        command = [sys.executable, "-P", WORKER, "recovery", self._crew.address, name, self._where]
        self._crew.start(name, [*command, str(self._size), str(founders)])
        self.names.append(name)

    def _wait_for(self, contributors: int, timeout_s: float) -> int:
        """Wait until each living peer has committed an op of so many; return the instant of the last one's first."""
        first: dict[str, int] = {}
        while missing := [name for name in self.names if name not in first]:
            got = self._crew.receive(timeout_s, missing)
            if got is None:
                log = self._crew.log_tail(missing[0])
                raise ChildFailed(missing[0], f"committed no op of {contributors} within {timeout_s:.0f} s", log)
            if got[1]["contributors"] == contributors:
                first[got[0]] = int(got[1]["at_ns"])
        return max(first.values())
