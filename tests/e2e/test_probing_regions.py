"""Regions: a root master, relays and nodes as real processes. A relay is killed, and another one is frozen."""

import json
from collections.abc import Sequence
from pathlib import Path
from queue import Queue
from typing import Any

from ports import free_port
from probe_nodes import SHORT, Rounds, missing
from programs import WAIT_S, ClusterProcess, Message, ProgramCluster

import ringfold as rf
from ringfold.wire.probing import RoundSummary

LIVELY = {**SHORT, "heartbeat_ms": 100, "suspect_after_ms": 400, "evict_after_ms": 2_000}
"""A master that drops a silent relay soon."""


def start_relay(
    cluster: ProgramCluster,
    region: str,
    *options: str,
    **settings: Any,  # noqa: ANN401
) -> tuple[ClusterProcess, str]:
    """`ringfold probe relay`, once it is connected to the master; and its address."""
    assert cluster.master is not None
    address = f"127.0.0.1:{free_port()}"
    where = ("--region", region, "--listen", address, "--master", cluster.master.address)
    relay = cluster.start_command(f"relay {region}", "probe", "relay", *where, "--name", region, *options, **settings)
    relay.expect_output("is connected to the master at")
    return relay, address


def start_behind(
    cluster: ProgramCluster,
    names: Sequence[str],
    *masters: str,
    **settings: Any,  # noqa: ANN401
) -> None:
    """Nodes with this list of addresses; the first is their relay's."""
    nodes = [
        cluster.start_command(f"node {name}", "probe", "--master", ",".join(masters), "--name", name, **settings)
        for name in names
    ]
    for node in nodes:
        node.expect_output(f"of the master at {masters[0]}")


def shown(cluster: ProgramCluster) -> Message:
    assert cluster.master is not None
    command = cluster.start_command("show", "probe", "show", cluster.master.address, "--json")
    assert command.wait() == 0
    answer: Message = json.loads(command.stdout.text())
    return answer


def test_two_regions_and_a_node_of_its_own_are_one_round_and_lose_their_relays(cluster: ProgramCluster) -> None:
    """One relay is killed in the middle of a window, the other one frozen: every node is back in a later round, under
    the id that it had."""
    master = cluster.start_master(**LIVELY)
    east, west = ["e0", "e1"], ["w0", "w1"]
    killed, at_east = start_relay(cluster, "east")
    frozen, at_west = start_relay(cluster, "west")
    start_behind(cluster, east, at_east, at_west, master.address)
    start_behind(cluster, west, at_west, master.address)
    start_behind(cluster, ["alone"], master.address)
    names = [*east, *west, "alone"]
    rounds = Rounds(master)
    first = rounds.whole(*names)
    ids = {name: node for node, name in first["names"].items()}
    assert len(first["metrics"]["control_latency_ns"]) == len(names)

    relays = {relay["name"]: relay for relay in shown(cluster)["relays"]}
    assert {name: (relay["region"], relay["nodes"]) for name, relay in relays.items()} == {
        "east": ("east", 2),
        "west": ("west", 2),
    }
    assert all(relay["batches"] and not relay["refused"] for relay in relays.values())
    for _ in range(20):  # a node that gets no core is late, and its report comes by itself
        if all(relay["reports"] > relay["batches"] for relay in relays.values()):
            break
        rounds.whole(*names)
        relays = {relay["name"]: relay for relay in shown(cluster)["relays"]}
    assert all(relay["reports"] > relay["batches"] for relay in relays.values()), "reports come together"

    killed.kill()
    after = rounds.whole(*names)
    assert {name: node for node, name in after["names"].items()} == ids
    assert after["round"] > first["round"]
    assert {relay["name"]: relay["nodes"] for relay in shown(cluster)["relays"]} == {"west": 4}

    frozen.freeze()
    rounds.next(
        lambda summary: set(missing(summary)) >= set(west) or bool(summary.get("excluded")), "without the region"
    )
    back = rounds.whole(*names)
    assert back["round"] > after["round"]
    assert shown(cluster)["relays"] == []
    frozen.thaw()
    frozen.expect_output("is connected to the master at")
    rounds.whole(*names)


def test_a_program_behind_a_relay_reads_and_requests_rounds(cluster: ProgramCluster) -> None:
    """The relay, which is first in its list, takes no requests: the master does."""
    master = cluster.start_master(**SHORT)
    _, relay = start_relay(cluster, "east")
    start_behind(cluster, ["n0"], relay, master.address)
    published: Queue[RoundSummary] = Queue()
    with rf.Prober(master=[relay, master.address], me="program") as prober:
        prober.on_round(published.put)
        Rounds(master).whole("n0", "program")
        assert prober.round(label="by hand").label == "by hand"
        assert sorted(prober.names.values()) == ["n0", "program"]
        assert prober.status().world.peers == 0
        assert published.get(timeout=WAIT_S).round.sequence >= 1
    shown = cluster.start_command("show", "probe", "show", "--json", master=f"{relay},{master.address}")
    assert shown.wait() == 0
    status = cluster.start_command("status", "status", "--json", master=f"{relay},{master.address}")
    assert status.wait() == 0


def test_a_relay_needs_the_token_and_its_nodes_too(cluster: ProgramCluster, tmp_path: Path) -> None:
    right, wrong = tmp_path / "right", tmp_path / "wrong"
    right.write_text("the token of this run")
    wrong.write_text("guessed")
    master = cluster.start_master(token_file=right, **SHORT)
    where = ("--region", "east", "--listen", "127.0.0.1:0", "--master", master.address)
    refused = cluster.start_command("wrong relay", "probe", "relay", *where, token_file=wrong)
    assert refused.wait() == 2
    refused.expect_log("wrong token")
    _, address = start_relay(cluster, "west", token_file=right)
    node = cluster.start_command("wrong node", "probe", "--master", address, token_file=wrong)
    assert node.wait() == 2
    node.expect_log("wrong token")
    start_behind(cluster, ["n0", "n1"], address, token_file=right)
    Rounds(master).whole("n0", "n1")
    status = cluster.start_command("status of a relay", "status", address, token_file=right)
    assert status.wait() != 0
    status.expect_log("this is a relay for nodes that only probe")
