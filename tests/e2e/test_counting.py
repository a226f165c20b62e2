"""Runs whose steps are numbered by a global iteration: peers are processes, of which one is killed or frozen."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from store_servers import SOURCE, until

from ringfold.config import load
from ringfold.iteration.record import decode
from ringfold.master.server import MasterThread
from ringfold.master.settings import master_settings
from ringfold.runtime.master_client import MasterClient
from ringfold.store import open_store

pytestmark = pytest.mark.waiting

LIMIT_S = 60.0
LAST = 120
PROGRAM = """
import sys
import numpy as np
import ringfold as rf
master, store, rank, last, min_world, pause_at = sys.argv[1:]
weights = np.zeros(100)
state = rf.SharedState(weights=weights)
while state.revision < int(last):
    try:
        with rf.join(master, timeout_s=60, op_timeout_s=60) as run:
            counter = rf.GlobalIteration(store, int(rank), 2, min_ranks=2, timeout_s=60)
            for step in run.steps(state, until=int(last), min_world=int(min_world), counter=counter):
                gradients = np.ones(100)
                step.all_reduce(gradients, op="avg")
                weights += gradients
                print(step.number, run.peer_id, flush=True)
                if step.number == int(pause_at):
                    sys.stdin.readline()
    except rf.Evicted:
        print("evicted", flush=True)
print("over", int(weights[0]), flush=True)
"""


class Peer:
    """A training process, and what it has printed so far."""

    def __init__(self, folder: Path, name: str, master: str, store: str, *rest: int) -> None:
        self._log = folder / name
        path = os.pathsep.join([str(SOURCE), *os.environ.get("PYTHONPATH", "").split(os.pathsep)])
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-c", PROGRAM, master, store, *map(str, rest)],
                env={**os.environ, "PYTHONPATH": path},
                stdin=subprocess.PIPE,
                stdout=log,
            )

    def lines(self) -> list[str]:
        return self._log.read_text().splitlines()

    def numbers(self) -> list[int]:
        """Whole lines only: a process may have been killed in the middle of one."""
        whole = self._log.read_text().rpartition("\n")[0].splitlines()
        return [int(line.split()[0]) for line in whole if line[0].isdigit()]

    def goes_on(self) -> None:
        """The peer that paused at a step."""
        assert self.process.stdin is not None
        self.process.stdin.write(b"\n")
        self.process.stdin.flush()

    def ends_well(self) -> None:
        assert self.process.wait(LIMIT_S) == 0
        assert self.lines()[-1] == f"over {LAST}"


Start = Callable[..., Peer]


@pytest.fixture
def runs() -> Iterator[list[str]]:
    """Two runs that know nothing of each other."""
    timing = {"heartbeat_ms": 100, "suspect_after_ms": 400, "evict_after_ms": 1_000}
    with ExitStack() as stack:
        yield [stack.enter_context(MasterThread(master_settings(load(timing)))).address for _ in range(2)]


@pytest.fixture
def start(tmp_path: Path, runs: list[str]) -> Iterator[Start]:
    """Starts a peer of the run with this rank."""
    started: list[Peer] = []

    def one(rank: int, min_world: int, pause_at: int = -1) -> Peer:
        name, store = f"peer-{len(started)}", f"sqlite://{tmp_path}/store.db"
        started.append(Peer(tmp_path, name, runs[rank], store, rank, LAST, min_world, pause_at))
        return started[-1]

    yield one
    for peer in started:
        peer.process.kill()
        peer.process.communicate()


def together(start: Start, size: int, pause_at: int) -> tuple[Peer, list[Peer], Peer]:
    """So many peers of one run that take steps, and one of the other. The earliest member reports for its run."""
    crew = [start(0, size) for _ in range(size)]
    other = start(1, 1, pause_at)
    until(lambda: all(len(peer.numbers()) > 20 for peer in (*crew, other)), "all peers to take steps", LIMIT_S)
    speaker = min(crew, key=lambda peer: int(peer.lines()[0].split()[1]))
    return speaker, [peer for peer in crew if peer is not speaker], other


def test_when_the_peer_that_speaks_for_its_run_is_killed_no_step_is_lost_or_repeated(start: Start) -> None:
    speaker, rest, other = together(start, 3, pause_at=100)
    speaker.process.kill()
    speaker.process.wait()
    new = start(0, 3)
    other.goes_on()
    for peer in (*rest, new, other):
        peer.ends_well()
    assert other.numbers() == list(range(LAST))
    assert [peer.numbers() for peer in rest] == [list(range(LAST))] * 2
    assert new.numbers() == list(range(new.numbers()[0], LAST))
    assert speaker.numbers() == list(range(len(speaker.numbers())))


def test_a_peer_that_was_frozen_while_it_spoke_for_its_run_comes_back_and_catches_up(
    start: Start, runs: list[str], tmp_path: Path
) -> None:
    """It is frozen while it waits in the store: if it were frozen with sqlite's lock, all others would stop, too."""
    speaker, rest, other = together(start, 2, pause_at=60)
    until(lambda: _arrival(tmp_path) == b"60", "the run to wait for the other one", LIMIT_S)
    before = _incarnation(tmp_path)
    speaker.process.send_signal(signal.SIGSTOP)
    new = start(0, 2)
    until(lambda: _incarnation(tmp_path) != before, "another peer to speak for the run", LIMIT_S)
    speaker.process.send_signal(signal.SIGCONT)
    until(lambda: _peers(runs[0]) == 3, "the peer to come back", LIMIT_S)
    other.goes_on()
    for peer in (speaker, *rest, new, other):
        peer.ends_well()
    assert "evicted" in speaker.lines()
    assert [peer.numbers() for peer in (*rest, other)] == [list(range(LAST))] * 2
    numbers = speaker.numbers()
    assert numbers == sorted(set(numbers)), "no number twice"
    assert numbers[-1] == LAST - 1


def _incarnation(folder: Path) -> str:
    """The incarnation that represents rank 0."""
    with open_store(f"sqlite://{folder}/store.db") as store:
        entry = store.get("iteration/record")
    assert entry is not None
    return decode("sqlite", entry.value).roster[0].incarnation


def _arrival(folder: Path) -> bytes:
    """What rank 0 has finished."""
    with open_store(f"sqlite://{folder}/store.db") as store:
        found = [entry.value for key, entry in store.list("iteration/ranks/0/").items() if key.endswith("arrived")]
    return found[0] if found else b""


def _peers(master: str) -> int:
    with MasterClient(master, b"") as connection:
        return len(connection.status().peers)
