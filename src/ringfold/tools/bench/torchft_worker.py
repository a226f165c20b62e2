"""One replica of `ringfold bench torchft`, for either library: `torchft_worker.py ADDRESS NAME LIBRARY WHERE REPLICAS`.

It trains a model of 1 MiB on random batches without a pause, and reports each step whose number of participants is a
new one. On request it reports the times of its steps since the last request, and the CPU time of all its threads in
them. The libraries differ in `steps_of_...` only. With `lighthouse` as the library it is torchft's server, and WHERE is
the join timeout in milliseconds. This file is run by path.
"""

import importlib
import os
import sys
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch
from torch import nn

from ringfold.runtime.clock import monotonic_ns, process_cpu_ns
from ringfold.tools.cluster import Channel, ChannelClosed, die_with_parent

WIDTH = 512
"""Of one layer: 1 MiB of parameters."""
BATCH = 8
OP_TIMEOUT = timedelta(seconds=5)
"""torchft's, for everything that has one: a frozen replica is noticed after it."""
HEARTBEAT_TIMEOUT_MS = 1_000
Step = tuple[int, int]
"""Of a committed step: its participants, and its nanoseconds."""


def main(arguments: list[str]) -> None:
    die_with_parent()
    address, name, library, *rest = arguments
    torch.set_num_threads(1)
    channel = Channel.connect(address, name)
    try:
        if library == "lighthouse":
            serve_lighthouse(channel, int(rest[0]))
            return
        where, replicas = rest[0], int(rest[1])
        importlib.import_module("ringfold.torch.data_parallel" if library == "ringfold" else "torchft.ddp")
        alone_times(3)  # torch loads half of itself in the first step of an optimizer
        channel.send({"armed": True})
        channel.receive()
        report(channel, {"ringfold": steps_of_ringfold, "torchft": steps_of_torchft}[library](where, name, replicas))
    except ChannelClosed:
        os._exit(0)
    except Exception as error:
        channel.send({"error": f"{type(error).__name__}: {error}"})
        raise


def report(channel: Channel, steps: Iterator[Step]) -> None:
    participants, durations, since = 0, list[int](), process_cpu_ns()
    for now, took in steps:
        durations.append(took)
        if now != participants:
            participants = now
            channel.send({"participants": now, "at_ns": monotonic_ns()})
        if channel.receive(0.0) is not None:
            used, began = process_cpu_ns() - since, process_cpu_ns()
            alone = alone_times()
            cpu, alone_cpu = used // len(durations), (process_cpu_ns() - began) // len(alone)
            channel.send({"durations_ns": durations, "alone_ns": alone, "cpu_ns": cpu, "alone_cpu_ns": alone_cpu})
            durations, since = [], process_cpu_ns()


def model_of(seed: int = 1) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Linear(WIDTH, WIDTH, bias=False)


def loss_of(model: nn.Module) -> torch.Tensor:
    return model(torch.randn(BATCH, WIDTH)).square().mean()


def alone_times(count: int = 50) -> list[int]:
    """Steps of the same model without any library."""
    model = model_of()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    durations = []
    for _ in range(count):
        before = monotonic_ns()
        optimizer.zero_grad()
        loss_of(model).backward()
        optimizer.step()
        durations.append(monotonic_ns() - before)
    return durations


def steps_of_ringfold(where: str, name: str, replicas: int) -> Iterator[Step]:
    import ringfold as rf
    from ringfold.torch.data_parallel import DataParallel

    net = model_of()
    with rf.join(where, name=name) as run:
        model = DataParallel(net, run)
        optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
        state = rf.SharedState({key: each.data for key, each in net.named_parameters()})
        before = monotonic_ns()
        for _ in run.steps(state, min_world=2):
            optimizer.zero_grad()
            loss_of(model).backward()
            optimizer.step()
            after = monotonic_ns()
            yield len(model.reductions[0].contributors), after - before
            before = after


def steps_of_torchft(where: str, name: str, replicas: int) -> Iterator[Step]:
    from torchft import Manager, Optimizer, ProcessGroupGloo
    from torchft.ddp import PureDistributedDataParallel

    net = model_of()
    inner = torch.optim.SGD(net.parameters(), lr=1e-3)

    def load(state: dict[str, Any]) -> None:
        net.load_state_dict(state["model"])
        inner.load_state_dict(state["optimizer"])

    store = torch.distributed.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=OP_TIMEOUT),
        load_state_dict=load,
        state_dict=lambda: {"model": net.state_dict(), "optimizer": inner.state_dict()},
        min_replica_size=2,
        timeout=OP_TIMEOUT,
        quorum_timeout=timedelta(seconds=60),
        connect_timeout=OP_TIMEOUT,
        rank=0,
        world_size=1,
        store_addr="localhost",
        store_port=store.port,
        lighthouse_addr=where,
        replica_id=name,
        hostname="localhost",
    )
    # Its DistributedDataParallel (0.2.0) fails with an AssertionError in the survivors of a kill. With one parameter
    # this one has the same single op.
    model = PureDistributedDataParallel(manager, net)
    optimizer = Optimizer(manager, inner)
    before = monotonic_ns()
    while True:
        step = manager.current_step()
        optimizer.zero_grad()
        loss_of(model).backward()
        optimizer.step()
        if manager.current_step() == step:
            continue  # not committed
        after = monotonic_ns()
        yield manager.num_participants(), after - before
        before = after


def serve_lighthouse(channel: Channel, join_timeout_ms: int) -> None:
    from torchft.coordination import LighthouseServer

    server = LighthouseServer(
        bind="[::]:0",
        min_replicas=2,
        join_timeout_ms=join_timeout_ms,
        quorum_tick_ms=100,
        heartbeat_timeout_ms=HEARTBEAT_TIMEOUT_MS,
    )
    channel.send({"address": server.address()})
    channel.receive()


if __name__ == "__main__":
    main(sys.argv[1:])
