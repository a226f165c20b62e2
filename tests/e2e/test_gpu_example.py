"""`examples/torch_gpu.py` as people start it, all processes on one GPU; one is killed. Without a GPU, on the CPU."""

import sys
from pathlib import Path

import pytest
from programs import ProgramCluster

pytest.importorskip("torch", reason="needs PyTorch (ringfold[torch])")
pytestmark = pytest.mark.waiting

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "torch_gpu.py"


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_example_survives_a_kill(cluster: ProgramCluster, device: str) -> None:
    if device == "cuda" and not Path("/dev/nvidiactl").exists():
        pytest.skip("needs a CUDA device")
    master = cluster.start_master()
    command = [sys.executable, "-P", str(EXAMPLE), master.address]
    # Passes are short on a GPU: the last process must find the others at work.
    env = {"PASSES": "3", "CUDA_VISIBLE_DEVICES": ""} if device == "cpu" else {"PASSES": "60"}
    peers = [cluster.start(f"example {number}", command, env=env) for number in range(3)]
    for peer in peers:
        peer.expect_output(f"on {device}", timeout_s=120)
    victim = peers.pop()
    victim.kill()
    shown = set()
    for peer in peers:
        shown.add(peer.expect_output("trained", timeout_s=120))
        peer.wait_success()
    [line] = shown
    assert float(line.split()[1].rstrip("%")) > 60, line
    assert len(EXAMPLE.read_text().splitlines()) < 60
