"""What the tests of probing share: nodes as processes of their own, rounds as the master logs them, logs as written."""

import itertools
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from programs import WAIT_S, ClusterProcess, MasterProcess, Message, ProgramCluster

from ringfold.probe.logs.files import LogReader, logs_in
from ringfold.probe.logs.lines import FitLine, RoundLine, WindowLine
from ringfold.wire.probing import RoundId

WINDOW_MS = 300
SHORT: dict[str, Any] = {"probe_window_ms": WINDOW_MS, "probe_adapt": "false", "log_level": "debug"}
"""Settings of a master whose rounds are short, stay so, and are logged each."""


class Rounds:
    """The rounds of a master, from what it logs: looked at one after the other, each once."""

    def __init__(self, master: MasterProcess) -> None:
        self._master, self._seen = master, 0

    def next(
        self, where: Callable[[Message], bool] = lambda summary: True, what: str = "any", timeout_s: float = WAIT_S
    ) -> Message:
        """The next round's summary that fits; those before it count as seen."""

        deadline = time.monotonic() + timeout_s
        while True:
            rounds = self._master.events("round_done")
            for index in range(self._seen, len(rounds)):
                summary: Message = rounds[index]["summary"]
                if where(summary):
                    self._seen = index + 1
                    return summary
            if time.monotonic() >= deadline or not self._master.is_running:
                raise AssertionError(f"no such round within {timeout_s:g} s ({what}){self._quote()}")
            time.sleep(0.01)

    def whole(self, *names: str) -> Message:
        """The next round in which exactly these nodes have a clock, and none is missing."""
        return self.next(lambda summary: clocked(summary) == set(names) and not missing(summary), f"of all {names}")

    def without(self, name: str) -> Message:
        """The next round that names this node as missing."""
        return self.next(lambda summary: name in missing(summary), f"without {name}")

    def _quote(self) -> str:
        rounds = [line["message"] for line in self._master.events("round_done")]
        return "\n".join(["", *rounds[-8:]])


def clocked(summary: Message) -> set[str]:
    """The names of the nodes that a round gave a clock."""
    return {summary["names"][str(clock["node"])] for clock in summary["nodes"]}


def missing(summary: Message) -> dict[str, str]:
    """By name, why a node is missing."""
    return {summary["names"][node]: why for node, why in summary.get("missing", {}).items()}


def excluded(summary: Message) -> dict[str, str]:
    """By name, why a node is out of the graph."""
    return {summary["names"][node]: why for node, why in summary.get("excluded", {}).items()}


def start_nodes(
    cluster: ProgramCluster,
    names: Sequence[str],
    *options: str,
    export: Path | None = None,
    inside: Sequence[Sequence[str]] = (),
) -> list[ClusterProcess]:
    """`ringfold probe --master`, once for each name, with a log of its own under `export`. Returns once all are in.

    `inside` are prefixes of the commands, such as `network.inside(host)`.
    """
    assert cluster.master is not None
    nodes = []
    for place, name in enumerate(names):
        log = [] if export is None else ["--export", str(export / name)]
        nodes.append(
            cluster.start_command(
                f"node {name}",
                "probe",
                "--master",
                cluster.master.address,
                "--name",
                name,
                *log,
                *options,
                inside=inside[place] if inside else (),
            )
        )
    for node in nodes:
        node.expect_output("of the master at")
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
