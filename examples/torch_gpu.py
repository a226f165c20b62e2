"""A PyTorch training on GPUs that survives: `python examples/torch_gpu.py [MASTER]`, once or several times per GPU.

Kill some, start others: the run goes on. `LOCAL_RANK` says which GPU a process has; without any it trains on the CPU.
The samples lie in the memory of the GPU, where each step picks its own.
"""

import os
import sys

import torch
from torch import nn

import ringfold as rf

PASSES = int(os.environ.get("PASSES", "3"))
SAMPLES = 20_000


def pick_device() -> torch.device:
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def dataset(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Points, and the class of each: which of ten random directions it is nearest to."""
    generator = torch.Generator().manual_seed(0)
    points = torch.randn(SAMPLES, 64, generator=generator)
    return points.to(device), (points @ torch.randn(64, 10, generator=generator)).argmax(1).to(device)


def main(master: str = "127.0.0.1:48148") -> None:
    torch.manual_seed(1)
    torch.set_num_threads(1)
    device = pick_device()
    points, classes = dataset(device)
    net = nn.Sequential(nn.Linear(64, 512), nn.GELU(), nn.Linear(512, 512), nn.GELU(), nn.Linear(512, 10)).to(device)
    optimizer = torch.optim.AdamW(net.parameters(), lr=3e-3)

    with rf.join(master) as run:
        model = rf.torch.DataParallel(net, run)
        state = rf.torch.shared_state(model, optimizer, rf.Sampler(SAMPLES, batch_size=128))
        for step in run.steps(state, passes=PASSES, min_world=2):
            if mine := step.shard():
                chosen = torch.from_numpy(mine.indices).to(device)
                with torch.autocast(device.type, torch.bfloat16):
                    loss = nn.functional.cross_entropy(model(points[chosen]), classes[chosen])
                loss.backward()
                if step.number % 50 == 0:
                    print(f"step {step.number} on {device}: loss {loss.item():.4f}, {run.group_size} peers", flush=True)
            else:
                model.skip()  # the end of a pass: no samples are left for this peer
            optimizer.step()
            optimizer.zero_grad()
    print(f"trained: {(net(points).argmax(1) == classes).float().mean().item():.1%} of the samples are right")


if __name__ == "__main__":
    main(*sys.argv[1:])
