"""`examples/torch_train.py` as people start it; one peer comes later than the others, and one is killed."""

import sys
from pathlib import Path

import pytest
from programs import ProgramCluster

pytest.importorskip("torch", reason="needs PyTorch (ringfold[torch])")
pytestmark = pytest.mark.waiting

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "torch_train.py"


def test_the_example_trains_while_peers_come_and_go(cluster: ProgramCluster, tmp_path: Path) -> None:
    master = cluster.start_master()
    command = [sys.executable, "-P", str(EXAMPLE), master.address]
    env = {"PASSES": "1", "CHECKPOINT": str(tmp_path)}
    peers = [cluster.start(f"example {number}", command, env=env) for number in range(3)]
    for peer in peers:
        peer.expect_output("step ", timeout_s=90)
    victim = peers.pop()
    victim.kill()
    shown = set()
    for peer in peers:
        shown.add(peer.expect_output("trained", timeout_s=120))
        peer.wait_success()
    [line] = shown
    assert float(line.split()[1].rstrip("%")) > 70, line
    assert len(EXAMPLE.read_text().splitlines()) < 60
