"""A PyTorch training that survives: `python examples/torch_train.py [MASTER]`, as often as you like, on any machine.

Kill some, freeze some, start others, restart the master: the run goes on. Every sample is used once per pass, a new
peer has the weights, the optimizer and the position of the others; `CHECKPOINT=DIR` survives the loss of all of them.
"""

import os
import sys

import torch
from torch import nn
from torch.utils.data import TensorDataset

import ringfold as rf

PASSES = int(os.environ.get("PASSES", "3"))


def dataset() -> TensorDataset:
    """Points, and the class of each: which of ten random directions it is nearest to."""
    generator = torch.Generator().manual_seed(0)
    points, directions = torch.randn(20_000, 32, generator=generator), torch.randn(32, 10, generator=generator)
    return TensorDataset(points, (points @ directions).argmax(1))


def main(master: str = "127.0.0.1:48148") -> None:
    torch.manual_seed(1)
    torch.set_num_threads(1)
    samples = dataset()
    net = nn.Sequential(nn.Linear(32, 256), nn.GELU(), nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 10))
    optimizer = torch.optim.AdamW(net.parameters(), lr=3e-3)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.999)
    loader = rf.torch.Loader(samples, num_workers=1)

    with rf.join(master) as run:
        model = rf.torch.DataParallel(net, run)
        sampler = rf.Sampler(len(samples), batch_size=32)
        state = rf.torch.shared_state(model, optimizer, scheduler, sampler)
        steps = run.steps(state, passes=PASSES, min_world=2, checkpoint=os.environ.get("CHECKPOINT"), every=200)
        for step, batch in loader.batches(steps):
            if batch is None:
                model.skip()  # the end of a pass: no samples are left for this peer
            else:
                points, classes = batch
                loss = nn.functional.cross_entropy(model(points), classes)
                loss.backward()
                if step.number % 100 == 0:
                    print(f"step {step.number}: loss {loss.item():.4f}, {run.group_size} peers", flush=True)
            nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()

    points, classes = samples.tensors
    print(f"trained: {(net(points).argmax(1) == classes).float().mean().item():.1%} of the samples are right")


if __name__ == "__main__":
    main(*sys.argv[1:])
