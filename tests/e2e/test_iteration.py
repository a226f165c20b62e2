"""The global iteration on real stores: ranks are processes, which are killed, frozen and started again."""

import json
import os
import shutil
import signal
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from fork_server import Forked
from store_servers import SERVERS, SOURCE, Etcd, EtcdCluster, Popen, Server, Sqlite, those, until

import ringfold as rf
from ringfold.iteration import State
from ringfold.store import StoreClient, open_store
from ringfold.store.base import Store

pytestmark = pytest.mark.waiting

LIMIT_S = 60.0
MAIN = "from ringfold.cli import main; main()"
PROGRAM = """
import os
import signal
import sys
import ringfold as rf
from ringfold.store import base, client

def write_and_die(self, key, expected, value, *more, **options):
    outcome = write(self, key, expected, value, *more, **options)
    if isinstance(outcome, base.Won) and key.endswith("record") and b'"iteration":%d,' % die_at in value:
        os.kill(os.getpid(), signal.SIGKILL)
    return outcome

die_at = int(os.environ.get("DIE_AS_WINNER_OF", "-1"))
write = client.StoreClient.compare_and_set
if die_at >= 0:
    client.StoreClient.compare_and_set = write_and_die
url, rank, world, last, heartbeat_s, inactive_s, options = sys.argv[1:]
until = int(last)
options = {"timeout_s": 60, "until": until, **eval(options)}
with rf.GlobalIteration(url, int(rank), int(world), heartbeat_s=float(heartbeat_s), inactive_after_s=float(inactive_s),
                        **options) as iteration:
    try:
        for n in iteration:
            print(n, *iteration.members, flush=True)
            sys.stdin.readline()
        print("over", flush=True)
    except rf.RingfoldError as error:
        print(type(error).__name__, flush=True)
"""


@pytest.fixture(params=sorted(SERVERS))
def server(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Server]:
    kind = SERVERS[request.param]
    if reason := kind.missing():
        pytest.skip(reason)
    running = kind(tmp_path)
    running.start()
    yield running
    running.stop()


class Rank:
    """A rank in a process of its own, which finishes an iteration when it is told to."""

    def __init__(self, server: Server, rank: int, world: int, **options: object) -> None:
        self.rank = rank
        more, url = options.pop("environment", {}), str(options.pop("url", server.url))
        assert isinstance(more, dict)
        timing = [str(options.pop("last", 1000)), str(options.pop("heartbeat_s", 1)), str(options.pop("inactive_s", 4))]
        self._process = server.python(PROGRAM, url, str(rank), str(world), *timing, repr(options), env=more)
        assert self._process.stdout is not None
        os.set_blocking(self._process.stdout.fileno(), False)
        self._heard = b""

    def heard(self) -> str | None:
        """The next line, if there is one."""
        assert self._process.stdout is not None
        self._heard += self._process.stdout.read() or b""
        if b"\n" not in self._heard:
            return None
        line, _, self._heard = self._heard.partition(b"\n")
        return line.decode()

    def said(self) -> str:
        """The next line, which must come."""
        lines: list[str] = []
        until(lambda: (line := self.heard()) is not None and not lines.append(line), f"rank {self.rank}", LIMIT_S)
        return lines[0]

    def begins(self) -> int:
        return int(self.said().split()[0])

    def finishes(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(b"\n")
        self._process.stdin.flush()

    def signal(self, number: signal.Signals) -> None:
        self._process.send_signal(number)
        if number == signal.SIGKILL:
            self._process.wait()

    @property
    def is_dead(self) -> bool:
        return self._process.poll() is not None

    def end(self) -> None:
        self._process.kill()
        self._process.communicate()


@pytest.fixture
def crew() -> Iterator[list[Rank]]:
    ranks: list[Rank] = []
    yield ranks
    for rank in ranks:
        rank.end()


def together(crew: list[Rank], server: Server, world: int, **options: object) -> list[Rank]:
    """Ranks that begin iteration 0 together."""
    crew += [Rank(server, rank, world, min_ranks=world, **options) for rank in range(world)]
    assert [rank.begins() for rank in crew] == [0] * world
    return list(crew)


def requests_per_iteration(url: str, prefix: str, world: int, iterations: int) -> float:
    """Ranks that only agree, each in a thread with a client of its own: the mean number of requests to the store."""
    clients = [open_store(url, prefix=prefix, timeout_s=LIMIT_S) for _ in range(world)]
    started = threading.Barrier(world)
    counts: list[int] = []

    def agree(rank: int, client: StoreClient) -> None:
        # No heartbeats while it is measured: they are per second, and not per iteration.
        with rf.GlobalIteration(
            client, rank, world, min_ranks=world, heartbeat_s=600, inactive_after_s=1200, timeout_s=LIMIT_S
        ) as iteration:
            iteration.next()
            iteration.next()
            started.wait(LIMIT_S)
            before = client.operations
            for _ in range(iterations):
                iteration.next()
            counts.append(client.operations - before)
            started.wait(LIMIT_S)

    ranks = [threading.Thread(target=agree, args=each) for each in enumerate(clients)]
    for each in ranks:
        each.start()
    for each in ranks:
        each.join()
    for client in clients:
        client.close()
    assert len(counts) == world
    return sum(counts) / world / iterations


def test_the_requests_of_a_rank_do_not_grow_with_the_ranks(server: Server) -> None:
    few, many = (requests_per_iteration(server.url, f"of-{world}", world, 10) for world in (4, 24))
    assert many < 2 * few + 1


def come_together(ranks: list[Rank]) -> int:
    """Let ranks that may have begun with fewer finish until all are in one iteration; returns its number."""
    last: dict[int, list[str]] = {}

    def are_together() -> bool:
        for rank in ranks:
            if (line := rank.heard()) is not None:
                last[rank.rank] = line.split()
                if len(last[rank.rank]) < len(ranks) + 1:
                    rank.finishes()
        return len(last) == len(ranks) and all(len(line) == len(ranks) + 1 for line in last.values())

    until(are_together, "all ranks to be in one iteration", LIMIT_S)
    (number,) = {line[0] for line in last.values()}
    return int(number)


def all_step(ranks: list[Rank]) -> list[int]:
    for rank in ranks:
        rank.finishes()
    return [rank.begins() for rank in ranks]


def test_all_ranks_are_handed_the_same_numbers(server: Server, crew: list[Rank]) -> None:
    ranks = together(crew, server, 3, last=10)
    for number in range(1, 10):
        assert all_step(ranks) == [number] * 3
    for rank in ranks:
        rank.finishes()
    assert [rank.said() for rank in ranks] == ["over"] * 3


def test_a_rank_that_crashes_in_training_is_given_up(server: Server, crew: list[Rank]) -> None:
    crew += [Rank(server, rank, 3) for rank in range(3)]
    come_together(crew)
    crew[2].signal(signal.SIGKILL)
    for rank in crew[:2]:
        rank.finishes()
    assert [rank.said().split()[1:] for rank in crew[:2]] == [["0", "1"]] * 2


def test_a_rank_that_restarts_at_once_does_its_iteration_again(server: Server, crew: list[Rank]) -> None:
    """The early restart race: nobody has missed it yet, and nobody goes on without it."""
    ranks = together(crew, server, 2)
    ranks[1].signal(signal.SIGKILL)
    ranks[0].finishes()
    crew.append(again := Rank(server, 1, 2, min_ranks=2))
    assert again.begins() == 0
    again.finishes()
    assert (ranks[0].begins(), again.begins()) == (1, 1)


def test_when_the_winner_dies_after_winning_the_others_go_on(server: Server, crew: list[Rank]) -> None:
    """Whoever wins iteration 1 dies of it, before it learns so. Nothing is undone: the other is in 1 already, and so is
    the successor, to whom it was never handed before."""
    ranks = together(crew, server, 2, environment={"DIE_AS_WINNER_OF": "1"})
    for rank in ranks:
        rank.finishes()
    until(lambda: any(rank.is_dead for rank in ranks), "the winner to die", LIMIT_S)
    winner, other = sorted(ranks, key=lambda rank: not rank.is_dead)
    assert winner.heard() is None
    assert other.begins() == 1
    assert not other.is_dead
    crew.append(again := Rank(server, winner.rank, 2, min_ranks=2))
    assert again.begins() == 1
    assert all_step([other, again]) == [2, 2]


def test_all_ranks_restart_where_they_were(server: Server, crew: list[Rank]) -> None:
    for rank in together(crew, server, 2):
        rank.finishes()
    assert [rank.begins() for rank in crew] == [1, 1]
    for rank in crew:
        rank.signal(signal.SIGKILL)
    again = [Rank(server, rank, 2, min_ranks=2) for rank in range(2)]
    crew += again
    assert [rank.begins() for rank in again] == [1, 1]


def test_of_two_processes_with_one_rank_the_older_is_superseded(server: Server, crew: list[Rank]) -> None:
    old, other = together(crew, server, 2)
    crew.append(new := Rank(server, 0, 2, min_ranks=2))
    assert new.begins() == 0
    old.finishes()
    assert old.said() == "Superseded"
    assert all_step([new, other]) == [1, 1]


def test_a_frozen_rank_is_given_up_and_comes_back(server: Server, crew: list[Rank]) -> None:
    crew += [Rank(server, rank, 2) for rank in range(2)]
    at = come_together(crew)
    crew[1].signal(signal.SIGSTOP)
    crew[0].finishes()
    assert crew[0].said().split() == [str(at + 1), "0"]
    crew[1].signal(signal.SIGCONT)
    crew[1].finishes()
    crew[0].finishes()
    assert come_together(crew) >= at + 2


class Clocks:
    """The clocks of processes that are started with this environment: shifted by some seconds, now or later."""

    def __init__(self, folder: Path) -> None:
        self._file, library = folder / "shift", folder / "clock_shift.so"
        self.shift(0)
        source = Path(__file__).with_name("clock_shift.c")
        subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-o", library, source, "-ldl", "-pthread"], check=True)
        self.environment = {"LD_PRELOAD": str(library), "CLOCK_SHIFT": str(self._file)}

    def shift(self, seconds: int) -> None:
        with self._file.open("r+b" if self._file.exists() else "wb") as file:
            file.write(struct.pack("q", seconds))

    def shown(self) -> list[float]:
        """What a process of today's reads from its clocks."""
        show = "import time; print(time.monotonic(), time.time())"
        environment = {**os.environ, **self.environment}
        said = subprocess.run([sys.executable, "-c", show], env=environment, capture_output=True, check=True).stdout
        return [float(word) for word in said.split()]


@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
def test_a_rank_whose_clocks_jump_by_an_hour_gives_nobody_up(tmp_path: Path, crew: list[Rank]) -> None:
    """Monotonic and wall clock alike, forth and back, while it waits for a rank that takes its time."""
    (tmp_path / "store").mkdir()
    server, clocks = Sqlite(tmp_path / "store"), Clocks(tmp_path)
    server.start()
    crew += [Rank(server, 0, 2, environment=clocks.environment, timeout_s=100_000), Rank(server, 1, 2, heartbeat_s=2)]
    at = come_together(crew)
    crew[0].finishes()
    before = clocks.shown()
    with open_store(server.url) as store:
        for seconds in (3_600, 0):
            clocks.shift(seconds)
            # It goes on showing life, and between two signs it looks at the others.
            for _ in range(2):
                seen = _sign_of_life(store, 0)
                until(lambda seen=seen: _sign_of_life(store, 0) != seen, "rank 0 to show life", LIMIT_S)
            if seconds:
                assert min(now - then for now, then in zip(clocks.shown(), before, strict=True)) >= 3_600
        assert crew[0].heard() is None, "it went on without rank 1"
        crew[1].finishes()
        assert [rank.said().split() for rank in crew] == [[str(at + 1), "0", "1"]] * 2


def _sign_of_life(store: Store, rank: int) -> int:
    return max(entry.version for key, entry in store.list(f"iteration/ranks/{rank}/").items() if key.endswith("alive"))


def test_a_minority_waits_with_a_quorum(server: Server, crew: list[Rank]) -> None:
    options = {"quorum": "majority", "min_ranks": 1, "last": 1000}
    crew += [Rank(server, rank, 3, **options) for rank in range(3)]
    at = come_together(crew)
    for rank in crew[1:]:
        rank.signal(signal.SIGKILL)
    crew[0].finishes()
    with open_store(server.url, timeout_s=10) as store:
        from ringfold.iteration.shell import Observer

        observer = Observer(store, heartbeat_s=1, inactive_after_s=4)
        until(lambda: "no majority" in _reason(observer), "the minority to stand still", 30)
        seen = observer.look()
    assert seen is not None
    assert (seen.iteration, seen.waiting_for) == (at, [1, 2])
    crew.append(again := Rank(server, 1, 3, **options))
    assert again.begins() == at
    again.finishes()
    assert crew[0].said().split() == [str(at + 1), "0", "1"]


def _reason(observer: object) -> str:
    seen = observer.look()  # type: ignore[attr-defined]
    return "" if seen is None else str(seen.reason)


@pytest.mark.parametrize("server", those("can_restart"), indirect=True)
def test_a_store_that_restarts_is_waited_for(server: Server, crew: list[Rank]) -> None:
    ranks = together(crew, server, 2, inactive_s=30, heartbeat_s=1)
    ranks[0].finishes()
    server.restart()
    ranks[1].finishes()
    assert [rank.begins() for rank in ranks] == [1, 1]
    assert all_step(ranks) == [2, 2]


def test_an_iteration_goes_on_when_etcd_loses_its_leader(tmp_path: Path, crew: list[Rank]) -> None:
    """Three members, four ranks in processes; the leader is killed while some ranks have arrived and others train."""
    if reason := Etcd.missing():
        pytest.skip(reason)
    cluster = EtcdCluster(tmp_path)
    try:
        server = cluster.members[0]
        ranks = [Rank(server, rank, 4, min_ranks=4, inactive_s=30, heartbeat_s=1, url=cluster.url) for rank in range(4)]
        crew += ranks
        assert [rank.begins() for rank in ranks] == [0] * 4
        assert all_step(ranks) == [1] * 4
        ranks[0].finishes()
        ranks[1].finishes()
        cluster.leader().kill()
        ranks[2].finishes()
        ranks[3].finishes()
        assert [rank.begins() for rank in ranks] == [2] * 4
        for number in range(3, 6):
            assert all_step(ranks) == [number] * 4
        assert not any(rank.is_dead for rank in ranks)
    finally:
        cluster.stop()


def test_a_store_that_was_emptied_is_refused(server: Server, crew: list[Rank]) -> None:
    ranks = together(crew, server, 2)
    assert all_step(ranks) == [1, 1]
    server.wipe()
    for rank in ranks:
        rank.finishes()
    assert {rank.said() for rank in ranks} <= {"StoreReset", "StoreWentBack"}


@pytest.mark.parametrize("server", those("can_restart", "can_go_back"), indirect=True)
def test_a_store_that_went_back_is_refused(server: Server, crew: list[Rank]) -> None:
    ranks = together(crew, server, 2, inactive_s=60, heartbeat_s=5)
    server.snapshot()
    for number in range(1, 6):
        assert all_step(ranks) == [number] * 2
    server.go_back()
    for rank in ranks:
        rank.finishes()
    assert {rank.said() for rank in ranks} == {"StoreWentBack"}


def test_what_one_rank_can_see(server: Server) -> None:
    with (
        rf.GlobalIteration(server.url, 0, 2, timeout_s=30) as zero,
        rf.GlobalIteration(server.url, 1, 2, timeout_s=30) as one,
    ):
        assert zero.iteration == -1
        one.arrive()
        assert zero.next() == 0
        assert (zero.state, zero.iteration, zero.members) == (State.TRAINING, 0, (0, 1))
        assert one.next() == 0
        assert zero.active_ranks() == [0, 1]
        one.arrive()
        assert zero.next() == 1
        assert zero.is_winner
        assert (zero.last_iteration(1), zero.last_iteration(7)) == (1, None)
        one.close()
        assert zero.active_ranks() == [0]
        assert zero.next() == 2
        assert zero.members == (0,)
    with pytest.raises(rf.UsageError, match="closed"):
        zero.next()


def test_the_command_runs_once_per_iteration_and_shows_how_it_stands(server: Server, tmp_path: Path) -> None:
    def iterate(*arguments: str) -> Popen | Forked:
        return server.python(MAIN, "iterate", "--store", server.url, *arguments)

    write = f"echo $RINGFOLD_RANK $RINGFOLD_ITERATION $RINGFOLD_MEMBERS >> {tmp_path}/log-$RINGFOLD_RANK"
    options = ["--world", "2", "--min-ranks", "2", "--until", "3", "--", "sh", "-c", write]
    ranks = [iterate("--rank", str(rank), *options) for rank in range(2)]
    for process in ranks:
        process.communicate(timeout=LIMIT_S)
    assert [rank.returncode for rank in ranks] == [0, 0]
    for rank in range(2):
        assert (tmp_path / f"log-{rank}").read_text().splitlines() == [f"{rank} {n} 0,1" for n in range(3)]
    shown = iterate("--json")
    seen = json.loads(shown.communicate(timeout=LIMIT_S)[0])
    assert shown.returncode == 0
    assert seen["iteration"] == 3
    assert [rank["state"] for rank in seen["ranks"]] == ["LEFT", "LEFT"]


def test_a_command_that_fails_ends_its_rank_with_its_code(tmp_path: Path) -> None:
    main = [sys.executable, "-c", MAIN, "iterate"]
    options = ["--store", f"sqlite://{tmp_path}/store.db", "--rank", "0", "--world", "1"]
    whole = [*main, *options, "--", "sh", "-c", "exit 7"]
    environment = {**os.environ, "PYTHONPATH": str(SOURCE)}
    assert subprocess.run(whole, env=environment, capture_output=True, timeout=LIMIT_S).returncode == 7


def test_ctrl_c_ends_a_command_and_leaves(tmp_path: Path) -> None:
    main = [sys.executable, "-c", MAIN, "iterate"]
    store = f"sqlite://{tmp_path}/store.db"
    sleep = ["sh", "-c", f"touch {tmp_path}/runs; exec sleep 100"]
    whole = [*main, "--store", store, "--rank", "0", "--world", "1", "--", *sleep]
    environment = {**os.environ, "PYTHONPATH": str(SOURCE)}
    running = subprocess.Popen(whole, env=environment, stderr=subprocess.PIPE, start_new_session=True)
    until((tmp_path / "runs").exists, "the command to run")
    os.killpg(running.pid, signal.SIGINT)
    _, complaint = running.communicate(timeout=LIMIT_S)
    assert running.returncode == 130
    assert b"has left" in complaint
    assert b"Traceback" not in complaint
    with open_store(store) as opened:
        entry = opened.get("iteration/record")
    assert entry is not None
    assert json.loads(entry.value)["roster"]["0"]["gone"]
