"""One rank of `ringfold bench gpu`: `gpu_worker.py ADDRESS NAME WHERE WORLD DEVICE`.

All ranks use the same GPU. A rank does what it is sent:

- `ops`: a verified all-reduce of a tensor on a device, some to warm up, `iterations` timed ones, a verified one again.
  An op begins when the device is idle and ends when the device has the result.
- `steps`: of one model, `count` times a pass without communication, the communication alone and a pass with both. They
  take turns in every step of the run, so that a drift of the machine affects all three.

This file is run by path.
"""

import os
import sys
from typing import Any

import torch
from torch import nn

import ringfold as rf
from ringfold.runtime.clock import monotonic_ns
from ringfold.tools.cluster import Channel, ChannelClosed, Message, die_with_parent
from ringfold.torch.data_parallel import DataParallel

WIDTH = 2_048
"""Of a layer: 16 MiB of weights in f32."""
PATTERN = 251
BUCKET_TAG = 1


def main(arguments: list[str]) -> None:
    die_with_parent()
    address, name, where, world, device = arguments
    torch.set_num_threads(1)
    channel = Channel.connect(address, name)
    try:
        rank = Rank(where, int(world), device)
        channel.send({"ready": True, "device": rank.device_name})
        while (order := channel.receive()) is not None and order["do"] != "end":
            channel.send(rank.ops(order) if order["do"] == "ops" else rank.steps(order))
    except ChannelClosed:
        os._exit(0)
    except Exception as error:
        channel.send({"error": f"{type(error).__name__}: {error}"})
        raise


class Rank:
    """A peer of the run, and the model that it has trained last."""

    def __init__(self, where: str, world: int, device: str) -> None:
        self._device, self._world = device, world
        torch.zeros(1, device=device)  # the device is ready before the others wait for this peer
        self._run = rf.join(where)
        while self._run.group_size < world:
            self._run.update_topology(min_world=world)
        self._model: DataParallel | None = None
        self._layers = 0
        self._gradients: list[torch.Tensor] = []

    @property
    def device_name(self) -> str:
        return torch.cuda.get_device_name() if self._device == "cuda" else self._device

    def ops(self, order: Message) -> Message:
        """All-reduces of one tensor, on the device or in host memory."""
        device = order["device"]
        tensor = torch.empty(order["size_bytes"] // 4, device=device)
        verified = self._verified(tensor)
        tensor.fill_(0)
        for _ in range(order["warm_up"]):
            self._run.all_reduce(tensor)
        durations = []
        for _ in range(order["iterations"]):
            synchronize(device)
            before = monotonic_ns()
            self._run.all_reduce(tensor)
            synchronize(device)
            durations.append(monotonic_ns() - before)
        return {"durations_ns": durations, "verified": verified and self._verified(tensor)}

    def _verified(self, tensor: torch.Tensor) -> bool:
        """Whether the sum of known values, different at every place of a chunk, comes out."""
        pattern = torch.arange(tensor.numel(), device=tensor.device).remainder_(PATTERN).add_(1).to(tensor.dtype)
        tensor.copy_(pattern).mul_(self._run.rank + 1)
        self._run.all_reduce(tensor)
        return bool(torch.equal(tensor, pattern.mul_(self._world * (self._world + 1) // 2)))

    def steps(self, order: Message) -> Message:
        """Passes alone, communication alone, and both, by turns."""
        if self._model is None or self._layers != order["layers"]:
            self._build(order["layers"])
        batch = torch.randn(order["batch"], WIDTH, device=self._device)
        durations: dict[str, list[int]] = {"alone": [], "communication": [], "step": []}
        for step in self._run.steps(until=order["count"], min_world=self._world):
            for what, taken in durations.items():
                step.barrier()
                synchronize(self._device)
                before = monotonic_ns()
                self._do(what, step, batch)
                synchronize(self._device)
                taken.append(monotonic_ns() - before)
        return {f"{what}_ns": taken for what, taken in durations.items()}

    def _build(self, layers: int) -> None:
        if self._model is not None:
            self._model.unwrap()
        torch.manual_seed(1)
        blocks = [nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False), nn.ReLU()) for _ in range(layers)]
        self._model, self._layers = DataParallel(nn.Sequential(*blocks).to(self._device), self._run), layers
        self._gradients = [torch.zeros_like(bucket.flat) for bucket in self._model._buckets]

    def _do(self, what: str, step: Any, batch: torch.Tensor) -> None:  # noqa: ANN401  # a step of the run
        assert self._model is not None
        if what == "communication":
            handles = [
                step.all_reduce_async(gradient, op="avg", tag=BUCKET_TAG + number)
                for number, gradient in enumerate(self._gradients)
            ]
            for handle in handles:
                handle.wait()
        elif what == "alone":
            with self._model.no_sync():
                self._model(batch).square().mean().backward()
        else:
            self._model(batch).square().mean().backward()


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


if __name__ == "__main__":
    main(sys.argv[1:])
