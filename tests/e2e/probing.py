"""What the tests of probing share: nodes as processes of their own, rounds as the master logs them, logs as written."""

import itertools
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from cluster import PATIENCE_S, Cluster, Command, Fact, Late, Master

from ringfold.probe.logs.files import LogReader, logs_in
from ringfold.probe.logs.lines import FitLine, RoundLine, WindowLine
from ringfold.wire.probing import RoundId

WINDOW_MS = 300
SHORT = {"probe_window_ms": WINDOW_MS, "probe_adapt": "false", "log_level": "debug"}
"""Settings of a master whose rounds are short, stay so, and are logged each."""


class Rounds:
    """The rounds of a master, from what it logs: looked at one after the other, each once."""

    def __init__(self, master: Master) -> None:
        self._master, self._seen = master, 0

    def next(
        self, where: Callable[[Fact], bool] = lambda summary: True, what: str = "any", timeout_s: float = PATIENCE_S
    ) -> Fact:
        """The next round's summary that fits; those before it count as seen."""

        def wanted(line: Fact) -> bool:
            return line.get("event") == "round_done" and where(line["summary"])

        log = self._master.log
        index = log.find(wanted, self._seen, time.monotonic() + timeout_s)
        if index is None:
            raise Late(f"no such round within {timeout_s:g} s ({what}){self._quote()}")
        self._seen = index + 1
        summary: Fact = log.all[index]["summary"]
        return summary

    def whole(self, *names: str) -> Fact:
        """The next round in which exactly these nodes have a clock, and nobody is missing."""
        return self.next(lambda summary: clocked(summary) == set(names) and not missing(summary), f"of all {names}")

    def without(self, name: str) -> Fact:
        """The next round that names this node as missing."""
        return self.next(lambda summary: name in missing(summary), f"without {name}")

    def _quote(self) -> str:
        rounds = [line["message"] for line in self._master.events("round_done")]
        return "\n".join(["", *rounds[-8:]])


def clocked(summary: Fact) -> set[str]:
    """The names of the nodes that a round gave a clock."""
    return {summary["names"][str(clock["node"])] for clock in summary["nodes"]}


def missing(summary: Fact) -> dict[str, str]:
    """By name, why a node is missing."""
    return {summary["names"][node]: why for node, why in summary.get("missing", {}).items()}


def start_nodes(cluster: Cluster, names: Sequence[str], *options: str, export: Path | None = None) -> list[Command]:
    """`ringfold probe --master`, once for each name, with a log of its own under `export`. Returns once all are in."""
    assert cluster.master is not None
    nodes = []
    for name in names:
        log = [] if export is None else ["--export", str(export / name)]
        nodes.append(
            cluster.start_command(
                f"node {name}", "probe", "--master", cluster.master.address, "--name", name, *log, *options
            )
        )
    for node in nodes:
        node.expect_text("of the master at")
    return nodes


def windows_of(directory: Path) -> list[WindowLine | FitLine]:
    """All lines about windows that a node wrote, in the order of its windows, under whatever number it wrote them."""
    if not directory.exists():
        return []
    lines = [line for path in logs_in([directory]) for line in LogReader(path)]
    return sorted((line for line in lines if isinstance(line, WindowLine | FitLine)), key=lambda line: line.window)


def rounds_in(directory: Path) -> list[RoundLine]:
    """The rounds in the log of the run, in the order of writing."""
    return [line for line in LogReader(directory / "run.jsonl") if isinstance(line, RoundLine)]


def check_never_back(ids: Sequence[RoundId], *, may_repeat: bool) -> None:
    """Round ids only grow; where windows may go by without a new round, they do not fall."""
    assert ids
    for before, after in itertools.pairwise(ids):
        assert before < after or (may_repeat and before == after), f"{before} and then {after}"
