"""`rf.Prober(master=...)`: a program that does not train is a node of the run, with its rounds, clock and callbacks."""

import re
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from ports import free_port
from probe_nodes import SHORT, Rounds, rounds_in
from programs import ClusterProcess, ProgramCluster, ProgramContext, until

import ringfold as rf

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "probe_links.py"
WAIT_S = 60.0


class Collected:
    """A callback that keeps what it is called with."""

    def __init__(self) -> None:
        self.items: list[Any] = []

    def __call__(self, item: object) -> None:
        self.items.append(item)


def train(me: ProgramContext) -> None:
    """A peer that probes, measures its links once, and reports the clock until it is told to end."""
    with me.join(probe=True) as run:
        while run.world_size < 2:
            run.update_topology()
        run.optimize_topology()
        rounds: list[Any] = []
        run.on_round(rounds.append)
        me.report("ready", peer=run.peer_id)
        while not me.has_message():
            until(lambda: rounds or me.has_message(), "a round, or the end")
            if rounds:
                summary = rounds.pop(0)
                me.report("round", sequence=summary.round.sequence, nodes=[clock.node for clock in summary.nodes])
        me.receive()


def start_peers(cluster: ProgramCluster) -> list[ClusterProcess]:
    peers = [cluster.start_one(train) for _ in range(2)]
    for peer in peers:
        peer.expect("ready")
    return peers


def test_a_program_is_a_node_with_rounds_a_clock_and_callbacks(cluster: ProgramCluster) -> None:
    master = cluster.start_master(**SHORT)
    windows, clocks, rounds = Collected(), Collected(), Collected()
    with (
        rf.Prober(master=master.address, me="one") as one,
        rf.Prober(master=master.address, me="two", offset_ns=7_000_000, drift_ppb=20_000) as two,
    ):
        one.on_window(windows)
        one.on_clock(clocks)
        one.on_round(rounds)
        Rounds(master).whole("one", "two")
        window = one.window(WAIT_S)
        assert [fit.dst for fit in window.fits] == [two.node]
        until(lambda: windows.items and clocks.items and rounds.items, "all callbacks are called")
        until(lambda: two.clock.is_ready, "the second node has its clock")
        before, middle, after = one.clock.now(), two.clock.now(), one.clock.now()
        assert before.earliest <= middle.latest
        assert middle.earliest <= after.latest
        labelled = one.round(label="by hand")
        assert labelled.label == "by hand"
        assert one.names == {one.node: "one", two.node: "two"}
    assert {fit.dst for each in windows.items for fit in each.fits} == {two.node}
    assert [summary.round for summary in rounds.items] == sorted({summary.round for summary in rounds.items})
    assert two.socket.drift_ppb == 20_000


def test_peers_have_the_same_callbacks(cluster: ProgramCluster) -> None:
    master = cluster.start_master(**SHORT)
    peers = start_peers(cluster)
    with rf.Prober(master=master.address, me="watcher") as prober:
        seen = peers[0].expect("round", nodes=[1, 2, prober.node])
        assert seen["sequence"] >= 1


def test_a_listener_has_a_clock_and_no_windows(cluster: ProgramCluster) -> None:
    master = cluster.start_master(**SHORT)
    with (
        rf.Prober(master=master.address),
        rf.Prober(master=master.address),
        rf.Prober(master=master.address, listen_only=True) as listener,
    ):
        until(lambda: listener.clock.is_ready, "a listener gets a clock")
        with pytest.raises(rf.UsageError, match="only listens"):
            listener.window()


def listen(me: ProgramContext) -> None:
    """A peer that trains and only responds to probes."""
    with me.join(probe="listen", name="trainer") as run:
        until(lambda: run.clock.is_ready, "a peer that listens has the global clock")
        me.report("clock", error_ns=run.clock.now().error_ns)
        me.receive()


def test_a_training_peer_can_be_a_listener_only(cluster: ProgramCluster, tmp_path: Path) -> None:
    """And the log of the run says who probed and who listened."""
    master = cluster.start_master(probe_export=tmp_path, **SHORT)
    trainer = cluster.start_one(listen)
    with rf.Prober(master=master.address, me="one"), rf.Prober(master=master.address, me="two"):
        trainer.expect("clock")
        summary = Rounds(master).whole("one", "two", "trainer")
    names = summary["names"]
    assert {names[str(node)] for node in summary["participants"]} == {"one", "two"}
    assert [names[str(node)] for node in summary["listeners"]] == ["trainer"]
    until(lambda: rounds_in(tmp_path), "the rounds are logged")
    line = next(line for line in rounds_in(tmp_path) if line.summary.listeners)
    assert line.names[str(line.summary.listeners[0])] == "trainer"


def test_nodes_probe_by_the_lists_of_the_master(cluster: ProgramCluster, tmp_path: Path) -> None:
    graph = tmp_path / "graph.toml"
    graph.write_text('[graph]\none = ["two"]\ntwo = ["three"]\nthree = ["one"]\n')
    master = cluster.start_master(probe_graph=graph, **SHORT)
    with (
        rf.Prober(master=master.address, me="one"),
        rf.Prober(master=master.address, me="two"),
        rf.Prober(master=master.address, me="three"),
    ):
        summary = Rounds(master).whole("one", "two", "three")
    names = summary["names"]
    edges = {(names[str(edge["fit"]["src"])], names[str(edge["fit"]["dst"])]) for edge in summary["edges"]}
    assert edges == {("one", "two"), ("two", "three"), ("three", "one")}


def test_a_prober_outlives_its_master_and_finds_the_next_one(cluster: ProgramCluster) -> None:
    master = cluster.start_master(**SHORT)
    with rf.Prober(master=master.address, me="one") as one, rf.Prober(master=master.address, me="two"):
        Rounds(master).whole("one", "two")
        master.kill()
        master.wait()
        alone = next(window for window in one.windows() if window.is_alone)
        assert alone.fits[0].sent > 0
        again = cluster.start_master(listen=master.address, **SHORT)
        Rounds(again).whole("one", "two")
        assert next(window for window in one.windows() if not window.is_alone).round > alone.round


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: rf.Prober(), "either `master`"),
        (lambda: rf.Prober({"a": "127.0.0.1", "b": "127.0.0.1:2"}, master="127.0.0.1"), "either `master`"),
        (lambda: rf.Prober(master="127.0.0.1", window_ms=100, seed=3), "seed, window_ms: with `master` these are"),
        (lambda: rf.Prober({"a": "127.0.0.1", "b": "127.0.0.1:2"}, "a", run="x"), "run: only with `master`"),
        (lambda: rf.Prober(master="127.0.0.1", estimator="luck"), "no estimator 'luck'"),
        (
            lambda: rf.Prober("nodes.toml", "a", token="t", listeners=["b"], graph={"a": ["b"]}, seed=1),
            "token, listeners, seed, graph: the file of the nodes says that",
        ),
    ],
)
def test_arguments_that_contradict_are_refused(make: Callable[[], rf.Prober], says: str) -> None:
    with pytest.raises(rf.UsageError, match=re.escape(says)):
        make()


def test_a_prober_without_a_run_has_no_rounds() -> None:
    ports = [free_port() for _ in range(2)]
    nodes = {f"n{number}": f"127.0.0.1:{port}" for number, port in enumerate(ports)}
    with rf.Prober(nodes, me="n0") as prober:
        with pytest.raises(rf.UsageError, match="make it with `master`"):
            prober.summary()
        with pytest.raises(rf.ClockNotReady):
            prober.clock.now()


def test_a_wrong_token_is_refused_and_an_absent_master_is_named(cluster: ProgramCluster, tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("a" * 32)
    token.chmod(0o600)
    master = cluster.start_master(token_file=token)
    with pytest.raises(rf.ConfigError, match="refused this node"):
        rf.Prober(master=master.address, token="b" * 32)
    nowhere = f"127.0.0.1:{free_port()}"
    with pytest.raises(rf.MasterUnreachable, match=nowhere):
        rf.Prober(master=nowhere, timeout_s=0.3)
    assert not [thread for thread in threading.enumerate() if thread.name == "ringfold-prober"]


def test_the_example_draws_delay_loss_and_rate(cluster: ProgramCluster, tmp_path: Path) -> None:
    master = cluster.start_master(**SHORT)
    peers = start_peers(cluster)
    picture = tmp_path / "links.png"
    command = [sys.executable, str(EXAMPLE), master.address, "2", str(picture)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=WAIT_S, check=False)
    assert done.returncode == 0, done.stderr
    last = done.stdout[done.stdout.rindex("round ") :]
    for title in ("delay (us)", "loss (%)", "rate (MB/s)"):
        first, second, watcher = last[last.index(title) :].splitlines()[2:5]
        assert watcher.split()[1] == "links"
        for row, cell in ((first, first[-20:-10]), (second, second[-30:-20])):  # to the other peer
            assert float(cell.split()[0]) >= 0, row
    assert picture.exists() or "matplotlib is not installed" in done.stdout
    assert all(peer.is_running for peer in peers)
