"""One rank of `ringfold bench ddp`, for each library: `ddp_worker.py LIBRARY ADDRESS WORLD RANK WHERE`.

The rank trains a small model on random batches. A *round* is some steps of the model that the order names: forward,
backward with averaged gradients, optimizer. The libraries differ in who averages, and in nothing else. `alone` steps
average nothing: they are the computation that communication can hide behind. This file is run by path.
"""

import copy
import hashlib
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from ringfold.runtime.clock import monotonic_ns
from ringfold.tools.cluster import Channel, ChannelClosed, Message, die_with_parent

WIDTHS = {"3M": (512, 12), "30M": (1_600, 12), "300K": (160, 12)}
"""Width and number of the layers of a model, by its parameters."""
BATCH = 32


class Trainer:
    """A model, wrapped by a library, and its optimizer."""

    def __init__(self, size: str, wrap: "Callable[[nn.Module], nn.Module]", rank: int) -> None:
        width, layers = WIDTHS[size]
        torch.manual_seed(1)
        blocks = [nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(layers)]
        self.net = nn.Sequential(*blocks, nn.Linear(width, 16))
        self.model = wrap(self.net)
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=1e-3, momentum=0.9)
        self._batches = torch.Generator().manual_seed(rank)
        self._width = width

    def step(self) -> None:
        batch = torch.randn(BATCH, self._width, generator=self._batches)
        self.model(batch).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def digest(self) -> str:
        found = hashlib.blake2b(digest_size=16)
        for parameter in self.net.parameters():
            found.update(parameter.detach().numpy().data)
        return found.hexdigest()


class Ringfold:
    """`rf.torch.DataParallel`, in the steps of a run."""

    def __init__(self, world: int, rank: int, where: str) -> None:
        import ringfold as rf

        self._run = rf.join(where)
        while self._run.group_size < world:
            self._run.update_topology(min_world=world)
        self._world = world
        self._steps: Iterator[Any] = self._run.steps(min_world=world)

    def wrap(self, net: nn.Module) -> nn.Module:
        from ringfold.torch.data_parallel import DataParallel

        return DataParallel(net, self._run)

    def steps(self, count: int) -> Iterator[object]:
        return (next(self._steps) for _ in range(count))


class Gloo:
    """`DistributedDataParallel` on gloo."""

    def __init__(self, world: int, rank: int, where: str) -> None:
        torch.distributed.init_process_group("gloo", init_method=f"file://{where}", world_size=world, rank=rank)

    def wrap(self, net: nn.Module) -> nn.Module:
        return nn.parallel.DistributedDataParallel(net, gradient_as_bucket_view=True)

    def steps(self, count: int) -> Iterator[object]:
        return iter(range(count))


def main(arguments: list[str]) -> None:
    die_with_parent()
    library, address, world, rank, where = arguments
    torch.set_num_threads(1)
    channel = Channel.connect(address, f"{library}.{rank}")
    try:
        connected = (Ringfold if library == "ringfold" else Gloo)(int(world), int(rank), where)
        channel.send({"ready": True})
        trainers: dict[str, Trainer] = {}
        while (order := channel.receive()) is not None and order["do"] == "round":
            size = order["model"]
            if size not in trainers:
                trainers = {size: Trainer(size, connected.wrap, int(rank))}
            channel.send(round_of(trainers[size], connected, order))
    except ChannelClosed:
        os._exit(0)
    except Exception as error:
        channel.send({"error": f"{type(error).__name__}: {error}"})
        raise


def round_of(trainer: Trainer, connected: Ringfold | Gloo, order: Message) -> Message:
    durations = []
    for _ in connected.steps(order["steps"]):
        before = monotonic_ns()
        trainer.step()
        durations.append(monotonic_ns() - before)
    digest = trainer.digest()
    return {"durations_ns": durations, "alone_ns": alone_times(trainer, order["alone"]), "digest": digest}


def alone_times(trainer: Trainer, count: int) -> list[int]:
    """The times of steps without communication; afterwards the model and its optimizer are as before."""
    weights = copy.deepcopy(trainer.net.state_dict())
    momentum = copy.deepcopy(trainer.optimizer.state_dict())
    durations = []
    with trainer.model.no_sync():
        for _ in range(count):
            before = monotonic_ns()
            trainer.step()
            durations.append(monotonic_ns() - before)
    trainer.net.load_state_dict(weights)
    trainer.optimizer.load_state_dict(momentum)
    return durations


if __name__ == "__main__":
    main(sys.argv[1:])
