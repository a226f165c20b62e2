"""`ringfold bench join`: how fast a newcomer is accepted once the others have voted.

Members take steps of about a millisecond. When the master reports that the newcomers are registered, the members are
sent a request to vote, and all vote after the same op. The figure is the time from the last member's vote to the
instant at which the (last) newcomer's `join` returns. First one newcomer at a time joins a growing group, then all of
them at once join fresh groups of two.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from ringfold.runtime.master_client import MasterClient
from ringfold.tools.bench import report as reports
from ringfold.tools.bench.report import Column, Row, microseconds, spread
from ringfold.tools.cluster import LocalCluster, ProcessFailed

WORKER = str(Path(__file__).with_name("workers.py"))
FOUNDERS = 2
START_S = 60.0
REPLY_S = 60.0

COLUMNS = (
    Column("newcomers", "newcomers"),
    Column("into a group of", "into"),
    Column("times", "count"),
    Column("median", "median_us", microseconds),
    Column("worst", "worst_us", microseconds),
)


def command(
    peers: Annotated[int, typer.Option(help="How many newcomers join, one at a time and all at once.", min=1)] = 8,
    repeats: Annotated[int, typer.Option(help="How often all join at once.", min=1)] = 3,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    check: Annotated[bool, typer.Option("--check", help="Compare with benchmarks/targets.toml.")] = False,
) -> None:
    """Time from the others' vote to the newcomer's acceptance."""
    alone: list[int] = []
    together: list[int] = []
    with reports.guarded(as_json=as_json) as progress:
        task = progress.add_task("one at a time", total=peers + repeats)
        with LocalCluster() as cluster:
            run = JoinRun(cluster, newcomers=peers)
            for newcomer in list(run.waiting):
                alone.append(run.admit([newcomer]))
                progress.advance(task)
        for _ in range(repeats):
            progress.update(task, description=f"{peers} at once")
            with LocalCluster() as cluster:
                run = JoinRun(cluster, newcomers=peers)
                together.append(run.admit(list(run.waiting)))
                progress.advance(task)
    into = f"{FOUNDERS} to {FOUNDERS + peers - 1}" if peers > 1 else str(FOUNDERS)
    figures: list[Row] = [
        {"mode": "one at a time", "newcomers": 1, "into": into, **spread(alone)},
        {"mode": "at once", "newcomers": peers, "into": str(FOUNDERS), **spread(together)},
    ]
    result = reports.report("join", {"peers": peers, "repeats": repeats}, figures)
    result.samples_ms = {"one at a time": [ns / 1e6 for ns in alone], "at once": [ns / 1e6 for ns in together]}
    reports.finish(result, COLUMNS, as_json=as_json, against_targets=check)


class JoinRun:
    """A master, two members that take steps, and newcomers whose processes wait for the request to join."""

    def __init__(self, cluster: LocalCluster, newcomers: int) -> None:
        self._cluster = cluster
        self._where = cluster.start_master().address
        self.members = [f"member-{number}" for number in range(FOUNDERS)]
        self.waiting = [f"newcomer-{number}" for number in range(newcomers)]
        self._round = 0
        for name in [*self.members, *self.waiting]:
            founders = FOUNDERS if name in self.members else 0
            cluster.start_worker(name, WORKER, "join", self._where, founders)
        cluster.wait_connected([*self.members, *self.waiting], START_S)
        cluster.gather([*self.members, *self.waiting], START_S)
        cluster.send(self.members, {"round": 0})
        cluster.gather(self.members, START_S)

    def admit(self, newcomers: Sequence[str]) -> int:
        """Let newcomers join; return the nanoseconds from the last vote to the last acceptance."""
        self._round += 1
        self._cluster.send(newcomers, {"round": self._round})
        self._wait_registered(len(self.members) + len(newcomers))
        self._cluster.send(self.members, {"round": self._round})
        votes = self._cluster.gather(self.members, REPLY_S)
        joined = self._cluster.gather(newcomers, REPLY_S)
        self.members += newcomers
        self.waiting = [name for name in self.waiting if name not in newcomers]
        sizes = {reply["group_size"] for reply in [*votes.values(), *joined.values()]}
        if sizes != {len(self.members)}:
            raise ProcessFailed(newcomers[0], f"groups of {sorted(sizes)} where {len(self.members)} was expected")
        last_vote = max(int(reply["voted_ns"]) for reply in votes.values())
        return max(int(reply["joined_ns"]) for reply in joined.values()) - last_vote

    def _wait_registered(self, count: int) -> None:
        """Wait until so many peers have ever registered."""
        for _ in range(int(REPLY_S / 0.005)):
            with MasterClient(self._where, b"") as connection:
                if connection.status().registrations >= count:
                    return
            self._cluster.pause(0.005)
        raise ProcessFailed("master", f"fewer than {count} peers registered within {REPLY_S:.0f} s")
