"""Probing from the command line, inside a training run, and with unauthenticated packets at the ports."""

import asyncio
import json
import random
import select
import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from probe_nodes import SHORT, Rounds, clocked, rounds_in, start_nodes, windows_of
from programs import WAIT_S, ClusterProcess, Message, ProgramCluster, ProgramContext, until

from ringfold.wire.probing import RoundId

MARKER, VERSION = 0x52, 1
PT1 = 1


# The command line


def probe(cluster: ProgramCluster, *arguments: str, **settings: object) -> tuple[int, ClusterProcess]:
    """Run `ringfold probe ...` to its end; its exit status."""
    assert cluster.master is not None
    action, *options = arguments
    command = cluster.start_command(f"probe {action}", "probe", action, cluster.master.address, *options, **settings)
    return command.wait(WAIT_S), command


def answer_of(cluster: ProgramCluster, *arguments: str) -> Message:
    """The JSON that a command of steering prints."""
    status, command = probe(cluster, *arguments, "--json")
    assert status == 0, command.describe()
    return _printed(command)


def _printed(command: ClusterProcess) -> Message:
    """The one JSON object that a command printed, over one line or many."""
    printed: Message = json.loads(command.stdout.text())
    return printed


def test_probing_is_stopped_started_and_asked_for_one_round(cluster: ProgramCluster, tmp_path: Path) -> None:
    master = cluster.start_master(probe_export=tmp_path / "run", **SHORT)
    names = ["n0", "n1"]
    start_nodes(cluster, names, export=tmp_path)
    rounds = Rounds(master)
    rounds.whole(*names)

    assert not answer_of(cluster, "stop")["is_on"]
    stopped = answer_of(cluster, "show")
    assert not stopped["is_on"]

    labelled = answer_of(cluster, "round", "--label", "before lunch")
    assert labelled["summary"]["label"] == "before lunch"
    assert clocked(labelled["summary"]) == set(names)
    assert not labelled["is_on"]
    until(lambda: rounds_in(tmp_path / "run")[-1].label == "before lunch", "the log of the run has the requested round")
    *_, before, last = rounds_in(tmp_path / "run")
    assert [before.label, last.label] == ["", "before lunch"]
    assert before.round_id == RoundId(*stopped["summary"]["round"]), "none came in between: probing is off"

    assert answer_of(cluster, "start", "--label", "all day")["is_on"]
    assert rounds.next(lambda summary: summary["label"] == "all day")["round"] > labelled["summary"]["round"]
    labels = {"before lunch", "all day"}
    until(lambda: labels <= {line.label for line in rounds_in(tmp_path / "run")}, "the log of the run has the labels")
    for name in names:
        windows = tmp_path / name
        until(lambda windows=windows: labels <= {line.label for line in windows_of(windows)}, "a node's has")  # type: ignore[misc]
    status, shown = probe(cluster, "show")
    assert status == 0
    shown.expect_output("(fence 1), kind master")


def test_a_round_without_nodes_is_refused_with_the_reason(cluster: ProgramCluster) -> None:
    cluster.start_master(**SHORT)
    status, command = probe(cluster, "round")
    assert status == 1
    command.expect_output("there is nobody to probe")


def test_a_node_that_finds_another_program_at_the_masters_port_reports_it(cluster: ProgramCluster) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        address = f"127.0.0.1:{other.getsockname()[1]}"
        node = cluster.start_command("a node", "probe", "--master", address)
        other.settimeout(WAIT_S)
        visitor, _ = other.accept()
        with visitor:
            visitor.sendall(b"SSH-2.0-OpenSSH_9.6\r\n")
            node.expect_log("what listens there is no Ringfold master: it began with 'SSH-' (an SSH server?)")


def test_a_wrong_token_is_refused_with_a_clear_error(cluster: ProgramCluster, tmp_path: Path) -> None:
    right, wrong = tmp_path / "right", tmp_path / "wrong"
    right.write_text("the token of this run")
    wrong.write_text("guessed")
    master = cluster.start_master(token_file=right, **SHORT)
    refused = cluster.start_command("wrong token", "probe", "--master", master.address, token_file=wrong)
    assert refused.wait() == 2
    refused.expect_log("wrong token")
    status, asking = probe(cluster, "stop", token_file=wrong)
    assert status == 2
    asking.expect_log("wrong token")
    friend = cluster.start_command("a friend", "probe", "--master", master.address, token_file=right)
    friend.expect_output("of the master at")


# Peers of a run


def trains_and_probes(me: ProgramContext) -> None:
    """Reduce forever, and report the clock, between two readings of the clock that both peers share."""
    from ringfold.runtime.clock import raw_ns

    with me.join(probe=True) as run:
        while run.group_size < me.options["world"]:
            run.update_topology(min_world=me.options["world"])
        me.report("joined", peer=run.peer_id)
        ready = False
        step = 0
        while True:
            run.all_reduce(np.ones(1_000, np.float32))
            step += 1
            if run.clock.is_ready and not ready:
                ready = True
                me.report("ready", step=step)
            # A step of a few milliseconds, as training has: probes and rounds get a core as well.
            select.select([me.fileno()], [], [], 0.005)
            if me.has_message():
                me.receive("time")
                before = raw_ns()
                now = run.clock.now()
                facts = {"earliest": now.earliest, "latest": now.latest, "ns": now.ns}
                me.report("time", before=before, after=raw_ns(), step=step, **facts)


def test_peers_that_probe_share_a_clock_while_they_train(cluster: ProgramCluster) -> None:
    master = cluster.start_master(**SHORT)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as other:
        # Somebody else has the UDP port of the first data port: the peers take others.
        other.bind(("127.0.0.1", 0))
        peers = cluster.start_program(trains_and_probes, 2, world=2, join={"port": other.getsockname()[1]})
        for peer in peers:
            peer.expect("ready")
    Rounds(master).whole("p0", "p1")
    first, second = (_time(peer) for peer in peers)
    # Both are processes of one host: at one instant, both clocks are off from the clock of the host by the same.
    assert first["earliest"] - first["after"] <= second["latest"] - second["before"]
    assert second["earliest"] - second["after"] <= first["latest"] - first["before"]
    assert first["earliest"] <= first["ns"] <= first["latest"]
    assert _time(peers[0])["step"] > first["step"], "ops go on meanwhile"
    links = _links(cluster)
    assert {(link["source"], link["target"]) for link in links} >= {(1, 2), (2, 1)}
    for link in links:
        assert link["delay_us"] > 0
        assert 0 <= link["loss"] < 1


def _time(peer: ClusterProcess) -> Message:
    peer.send("time")
    return peer.expect("time")


def _links(cluster: ProgramCluster) -> list[Message]:
    assert cluster.master is not None
    status = cluster.start_command("status", "status", cluster.master.address, "--json")
    assert status.wait() == 0
    links: list[Message] = _printed(status)["links"]
    return links


# Unauthenticated packets


def counted_node(me: ProgramContext) -> None:
    """A node that reports its number and port, and on request what its prober has counted. It is known at `port`."""
    from ringfold.probe.nodes.joined import JoinedNode
    from ringfold.probe.nodes.prober import ProbeSocket
    from ringfold.probe.nodes.shell import NodeShell
    from ringfold.probe.rounds.node import RoundNode

    async def run() -> None:
        prober = ProbeSocket(0, "127.0.0.1")
        me.report("port", port=prober.port)
        known_at = me.receive("known at")["port"]
        node = JoinedNode(
            [me.address], b"", name=me.options["name"], host="here", addresses=["127.0.0.1"], port=known_at,
            on_connected=lambda _, number: me.report("connected", node=number),
        )  # fmt: skip
        node.shell = NodeShell(RoundNode(), prober, node.send, lambda clock: None)
        stop = asyncio.Event()
        living = asyncio.create_task(node.run(stop))
        while True:
            await asyncio.to_thread(me.receive, "stats")
            assert not living.done()
            stats = prober.stats()
            me.report("stats", **{name: getattr(stats, name) for name in stats.__struct_fields__})

    asyncio.run(run())


def _start_counted(cluster: ProgramCluster, name: str) -> tuple[ClusterProcess, int]:
    peer = cluster.start_one(counted_node, name=name)
    return peer, peer.expect("port")["port"]


def _stats(peer: ClusterProcess) -> Message:
    peer.send("stats")
    return peer.expect("stats")


def test_garbage_and_spoofed_packets_are_counted_and_ignored(cluster: ProgramCluster) -> None:
    master = cluster.start_master(**SHORT)
    victim, port = _start_counted(cluster, "n0")
    victim.send("known at", port=port)
    me = victim.expect("connected")["node"]
    start_nodes(cluster, ["n1"])
    rounds = Rounds(master)
    other = next(node for node in map(int, rounds.whole("n0", "n1")["names"]) if node != me)
    before = _stats(victim)
    rng, count = random.Random(4), 200
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
        for number in range(count):
            for size in (0, 1, 39, 40, 41, 1_400):
                sender.sendto(rng.randbytes(size), ("127.0.0.1", port))
            sender.sendto(_probe(other, me, number, tag=rng.randbytes(8)), ("127.0.0.1", port))
    until(lambda: _stats(victim)["spoofed"] >= before["spoofed"] + 1, "a forged probe was counted")
    after = _stats(victim)
    # The socket's buffer may drop some of a burst: what came was counted, and nothing of it was answered or kept.
    assert after["malformed"] > before["malformed"]
    assert after["spoofed"] > before["spoofed"]
    assert after["strangers"] == before["strangers"]
    whole = rounds.whole("n0", "n1")
    assert all(edge["fit"].get("duplicates", 0) == 0 for edge in whole["edges"])


def _probe(src: int, dst: int, sequence: int, tag: bytes) -> bytes:
    head = struct.pack("<QQBBII", 0, 0, MARKER, PT1 | VERSION << 5, src, dst)
    return head + sequence.to_bytes(6, "little") + tag


def test_replayed_packets_are_counted_and_ignored(cluster: ProgramCluster) -> None:
    """A relay stands before a node, as a NAT would; it keeps what it forwarded, and sends it again later."""
    master = cluster.start_master(**SHORT)
    victim, port = _start_counted(cluster, "n0")
    with Relay(port).running() as relay:
        victim.send("known at", port=relay.port)
        victim.expect("connected")
        start_nodes(cluster, ["n1"])
        rounds = Rounds(master)
        rounds.whole("n0", "n1")
        rounds.whole("n0", "n1")
        before = _stats(victim)["replayed"]
        relay.again(100)
        until(lambda: _stats(victim)["replayed"] > before, "replayed packets are counted")
        for _ in range(20):  # a node that gets no core for most of a window has few pairs of it
            whole = rounds.whole("n0", "n1")
            if all(edge["fit"]["pairs"] >= 10 for edge in whole["edges"]):
                break
    assert all(edge["fit"]["pairs"] >= 10 for edge in whole["edges"])


class Relay:
    """Passes UDP packets between one client and the port behind it, in both directions."""

    def __init__(self, behind: int) -> None:
        self._outer = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._inner = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        for end in (self._outer, self._inner):
            end.bind(("127.0.0.1", 0))
        self.port: int = self._outer.getsockname()[1]
        self._behind = ("127.0.0.1", behind)
        self._client: tuple[str, int] | None = None
        self._passed: list[bytes] = []

    @contextmanager
    def running(self) -> Iterator["Relay"]:
        threads = [threading.Thread(target=serve) for serve in (self._inwards, self._outwards)]
        for thread in threads:
            thread.start()
        try:
            yield self
        finally:
            for end in (self._outer, self._inner):
                # An empty packet of our own wakes the thread that waits in it.
                end.sendto(b"", end.getsockname())
            for thread in threads:
                thread.join(WAIT_S)
            for end in (self._outer, self._inner):
                end.close()

    def again(self, count: int) -> None:
        """Say once more what was passed on first."""
        for packet in self._passed[:count]:
            self._inner.sendto(packet, self._behind)

    def _inwards(self) -> None:
        while True:
            packet, self._client = self._outer.recvfrom(2_048)
            if not packet:
                return
            self._passed.append(packet)
            self._inner.sendto(packet, self._behind)

    def _outwards(self) -> None:
        while True:
            packet, _ = self._inner.recvfrom(2_048)
            if not packet:
                return
            assert self._client is not None
            self._outer.sendto(packet, self._client)
