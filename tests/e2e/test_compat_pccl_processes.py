"""What only real processes show of the PCCL API: deaths, freezes, and master scripts that stay up."""

import os
import random
import signal
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from programs import WAIT_S, ClusterProcess, ProgramCluster, ProgramContext

from ringfold import Communicator as Underneath
from ringfold.compat.pccl import (
    Attribute,
    Communicator,
    PCCLError,
    ReduceDescriptor,
    ReduceOp,
    ReduceOpDescriptor,
    Result,
)

pytestmark = pytest.mark.waiting

SUM = ReduceOp.SUM
CHURN_S = 10.0
FEWEST_DEAD = 3
"""The churn goes on until so many were killed: on a loaded machine, Python alone takes seconds to start."""
CHURN = Path(__file__).with_name("pccl_churn.py")


def connected(me: ProgramContext, peers: int) -> Communicator:
    peer = Communicator(me.address)
    peer.connect()
    while peer.get_attribute(Attribute.GLOBAL_WORLD_SIZE) < peers:
        peer.update_topology()
    return peer


def batch_of(arrays: list[np.ndarray]) -> list[ReduceOpDescriptor]:
    return [
        ReduceOpDescriptor.from_numpy(array, array, ReduceDescriptor(array.size, SUM, tag))
        for tag, array in enumerate(arrays)
    ]


# Deaths


def test_a_batch_is_right_although_a_peer_died_in_the_middle_of_it(cluster: ProgramCluster) -> None:
    cluster.start_master()
    survivors = [cluster.start_one(reduces_a_batch, value=value) for value in (1, 2)]
    victim = cluster.start_one(dies_in_a_batch, value=3)
    victim.expect("dying")
    for peer in survivors:
        # Two ops had everybody in them; the others were called again with those who are left.
        assert peer.expect("reduced")["values"] == [6.0, 6.0] + [3.0] * 6
        assert peer.reports("reduced")[0]["world"] == 2
        peer.wait_success()


def reduces_a_batch(me: ProgramContext) -> None:
    peer = connected(me, 3)
    arrays = [np.full(300_000, float(me.options["value"])) for _ in range(8)]
    info = peer.all_reduce_multiple_with_retry(batch_of(arrays), max_in_flight=4)
    assert all((array == array[0]).all() for array in arrays)
    me.report("reduced", values=[float(array[0]) for array in arrays], world=info.local_world_size)


def dies_in_a_batch(me: ProgramContext) -> None:
    peer = connected(me, 3)
    arrays = [np.full(300_000, float(me.options["value"])) for _ in range(2)]
    peer.all_reduce_multiple_with_retry(batch_of(arrays))
    me.report("dying")
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_frozen_peer_is_noticed_and_may_come_back(cluster: ProgramCluster) -> None:
    cluster.start_master()
    peers = cluster.start_program(reduces_and_reconnects, 3)
    for peer in peers:
        peer.expect("reduced", world=3)
    peers[0].freeze()
    for peer in peers[1:]:
        peer.expect("reduced", world=2)
    peers[0].send_signal(signal.SIGCONT)
    assert peers[0].expect("failed")["result"] == Result.MASTER_CONNECTION_FAILED
    assert peers[0].expect("asked")["result"] == Result.MASTER_CONNECTION_FAILED
    for peer in peers:
        peer.expect("reduced", world=3)
        peer.send("stop")
    for peer in peers:
        peer.wait_success()


def reduces_and_reconnects(me: ProgramContext) -> None:
    peer, stop = connected(me, 3), False
    while not stop:
        numbers = np.array([me.has_message()], np.int64)
        try:
            if peer.are_peers_pending():
                peer.update_topology()
            info = peer.all_reduce(numbers, numbers, op=SUM)
        except PCCLError as error:
            me.report("failed", result=error.result)
            if error.result is Result.MASTER_CONNECTION_FAILED:
                me.report("asked", result=result_of_asking(peer))
                peer.connect()
            continue
        me.report("reduced", world=info.local_world_size)
        stop = numbers[0] == info.local_world_size


def result_of_asking(peer: Communicator) -> Result:
    try:
        peer.get_attribute(Attribute.GLOBAL_WORLD_SIZE)
    except PCCLError as error:
        return error.result
    return Result.SUCCESS


def test_a_run_goes_on_while_peers_are_killed_and_added_all_the_time(cluster: ProgramCluster, tmp_path: Path) -> None:
    seed = int(os.environ.get("CHURN_SEED", "1"))
    rng, churn = random.Random(seed), Churn(cluster, tmp_path / "stop")
    print(f"CHURN_SEED={seed}")  # noqa: T201 - pytest shows it when the test fails
    churn.start(4)
    ends_at = time.monotonic() + CHURN_S
    while time.monotonic() < ends_at or len(churn.dead) < FEWEST_DEAD:
        churn.progress(rng.randint(1, 10))
        for _ in range(rng.choice([1, 1, 1, 2])):
            churn.kill(rng.choice(churn.alive))
        churn.start(rng.choice([0, 1, 2]) if len(churn.alive) > 3 else 2)
    churn.end()
    assert churn.compared >= 10


class Churn:
    """A run of `pccl_churn.py` peers under `pccl_master`."""

    def __init__(self, cluster: ProgramCluster, stop_file: Path) -> None:
        self.cluster, self.stop_file = cluster, stop_file
        self.alive: list[ClusterProcess] = []
        self.dead: list[ClusterProcess] = []
        self.compared = 0
        command = [*PCCL_MASTER, "--listen-address", "127.0.0.1:0"]
        self.address = listening(cluster.start("pccl_master", command, env=LIVELY))

    def start(self, count: int) -> None:
        for _ in range(min(count, 6 - len(self.alive))):
            name = f"churn {len(self.alive) + len(self.dead)}"
            self.alive.append(self.cluster.start_worker(name, CHURN, self.address, self.stop_file))

    def kill(self, peer: ClusterProcess) -> None:
        """Not if the step would be lost with it: two that know it stay."""
        if sum(bool(other.reports("step")) for other in self.alive if other is not peer) < 2:
            return
        peer.kill()
        self.alive.remove(peer)
        self.dead.append(peer)

    def progress(self, steps: int) -> None:
        """Wait until some living peer has done so many steps more."""
        goal = max((fact["step"] for peer in self.alive for fact in peer.reports("step")), default=-1) + steps
        deadline = time.monotonic() + WAIT_S
        while not any(fact["step"] >= goal for peer in self.alive for fact in peer.reports("step")[-1:]):
            for peer in self.alive:
                if not peer.is_running:
                    raise peer.failed("ended")
            if time.monotonic() > deadline:
                raise AssertionError("no progress\n" + "\n".join(peer.describe() for peer in self.alive))
            time.sleep(0.005)

    def end(self) -> None:
        """All that live end at the same step, and nobody who lived on ever saw another result than the others."""
        for peer in self.alive:  # who comes after the others' end would wait for company
            peer.expect("step")
        self.stop_file.touch()
        for peer in self.alive:
            peer.wait_success()
        assert len({peer.expect("end")["step"] for peer in self.alive}) == 1
        digests: dict[int, set[int]] = {}
        for peer in self.alive + self.dead:
            facts = peer.reports("step")
            # The last step of a peer that was killed may be one that the others never finished with it.
            for fact in facts if peer in self.alive else facts[:-1]:
                digests.setdefault(fact["step"], set()).add(fact["digest"])
                self.compared += 1
        assert not {step: found for step, found in digests.items() if len(found) > 1}


# Masters


PCCL_MASTER = [sys.executable, "-c", "from ringfold.compat.master import main; main()"]
LIVELY = {"RINGFOLD_HEARTBEAT_MS": "100", "RINGFOLD_SUSPECT_AFTER_MS": "1000", "RINGFOLD_EVICT_AFTER_MS": "3000"}

BEGIN = """
import signal
signal.signal(signal.SIGINT, signal.default_int_handler)  # a test run in the background has it ignored
from ringfold.compat.pccl import MasterNode
def say(node): print("listening on", node.listen_address)
"""
RUNS = BEGIN + "node = MasterNode(listen_address='127.0.0.1:0'); node.run()"
IN_A_MODULE = RUNS + "; say(node)"
IN_A_FUNCTION = BEGIN + (
    "def main():\n    node = MasterNode('127.0.0.1:0')\n    node.run()\n    say(node)\nmain()\nprint('after')"
)


def listening(child: ClusterProcess) -> str:
    return child.expect_output("listening on").removeprefix("listening on ")


def script(cluster: ProgramCluster, text: str, **env: str) -> ClusterProcess:
    return cluster.start(f"master script {len(cluster.processes)}", [sys.executable, "-c", text], env=env)


def ends_well(child: ClusterProcess) -> None:
    assert child.wait() == 0, child.describe()
    assert not [line for line in child.stderr.lines if "Traceback" in line or "ignored" in line], child.describe()


@pytest.mark.parametrize("text", [IN_A_MODULE, IN_A_FUNCTION], ids=["module", "function"])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_master_script_stays_up_until_a_signal(cluster: ProgramCluster, text: str, number: signal.Signals) -> None:
    child = script(cluster, text)
    address = listening(child)
    peer = Communicator(address)
    peer.connect()
    peer.update_topology()
    assert peer.get_attribute(Attribute.GLOBAL_WORLD_SIZE) == 1
    del peer
    child.send_signal(number)
    ends_well(child)


def test_a_master_script_with_its_own_handler_is_interrupted_by_it(cluster: ProgramCluster) -> None:
    handler = "signal.signal(signal.SIGINT, lambda *_: node.interrupt())\n"
    child = script(cluster, BEGIN + handler + "node = MasterNode('127.0.0.1:0'); node.run(); say(node)")
    listening(child)
    child.send_signal(signal.SIGINT)
    ends_well(child)


def test_ctrl_c_reaches_a_program_that_does_something_beside_its_master(cluster: ProgramCluster) -> None:
    wait = "try:\n    say(node); threading.Event().wait()\nexcept KeyboardInterrupt:\n    print('heard')"
    child = script(cluster, f"{RUNS}; import threading\n{wait}")
    listening(child)
    child.send_signal(signal.SIGINT)
    ends_well(child)
    assert "heard" in child.stdout.text()


def test_sigterm_ends_a_program_that_does_something_beside_its_master(cluster: ProgramCluster) -> None:
    child = script(cluster, f"{IN_A_MODULE}\nimport threading; threading.Event().wait()")
    listening(child)
    child.send_signal(signal.SIGTERM)
    assert child.wait() == -signal.SIGTERM


def test_interrupt_ends_a_master_without_a_signal(cluster: ProgramCluster) -> None:
    child = script(cluster, IN_A_MODULE + "\nnode.interrupt(); node.interrupt()")
    listening(child)
    ends_well(child)


def test_a_master_beyond_loopback_wants_a_token_or_a_word(cluster: ProgramCluster) -> None:
    text = BEGIN + "node = MasterNode('0.0.0.0:0'); node.run(); say(node); node.interrupt()"
    child = script(cluster, text)
    assert child.wait() == 1
    assert "RINGFOLD_INSECURE" in child.stderr.text()
    child = script(cluster, text, RINGFOLD_INSECURE="1")
    listening(child)
    ends_well(child)


def test_pccl_master_serves_until_a_signal(cluster: ProgramCluster) -> None:
    child = cluster.start("pccl_master", [*PCCL_MASTER, "--listen-address", "localhost:0"])
    peer = Communicator(listening(child).split(",")[0])
    peer.connect()
    assert peer.get_attribute(Attribute.GLOBAL_WORLD_SIZE) == 1
    del peer
    child.send_signal(signal.SIGTERM)
    ends_well(child)


@pytest.mark.parametrize("address", ["0.0.0.0:0", "nowhere:x"])
def test_pccl_master_refuses_with_one_line(cluster: ProgramCluster, address: str) -> None:
    child = cluster.start("pccl_master", [*PCCL_MASTER, "--listen-address", address])
    assert child.wait() == 2
    assert "pccl_master: error: " in child.stderr.lines[-1]


# Examples


EXAMPLES = Path(__file__).resolve().parents[2] / "examples" / "pccl"


def example(cluster: ProgramCluster, name: str, *arguments: str) -> ClusterProcess:
    return cluster.start(f"{name} {len(cluster.processes)}", [sys.executable, str(EXAMPLES / name), *arguments])


def test_the_example_of_many_tags_runs_under_the_example_of_a_master(cluster: ProgramCluster) -> None:
    master = example(cluster, "master.py", "127.0.0.1:0")
    address = listening(master)
    peers = [example(cluster, "many_tags.py", address, "11") for _ in range(2)]
    for peer in peers:
        assert peer.wait() == 0, peer.describe()
        assert peer.stdout.lines[0] == "round 0: 2 peers by hand, then 2: sums [2.0, 2.0, 2.0, 2.0, 2.0, 2.0]"
        assert peer.stdout.lines[-1] == "done"
    master.send_signal(signal.SIGTERM)
    ends_well(master)


@pytest.mark.skipif(not hasattr(Underneath, "sync_shared_state"), reason="no shared state underneath")
def test_the_example_of_training_survives_a_death_and_takes_a_newcomer(cluster: ProgramCluster) -> None:
    address = listening(example(cluster, "master.py", "127.0.0.1:0"))
    # Enough of them that the newcomer is there before the others have ended: alone it would wait for ever.
    peers = [example(cluster, "train.py", address, "4000") for _ in range(3)]
    peers[0].expect_output("revision 100")
    peers.pop().kill()
    peers.append(example(cluster, "train.py", address, "4000"))
    for peer in peers:
        assert peer.wait(90) == 0, peer.describe()
        assert "trained: 0.0" in peer.stdout.lines[-1]
