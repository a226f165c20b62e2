"""Models, optimizers and a scheduler as shared state of real processes: a newcomer has the bits of the others."""

import importlib.util
import zlib
from typing import Any

import pytest
from programs import ProgramCluster, ProgramContext

pytestmark = [
    pytest.mark.waiting,
    pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="needs PyTorch (ringfold[torch])"),
]

UNTIL = 20
NEWCOMER_AT = 5


@pytest.fixture
def cluster(cluster: ProgramCluster) -> ProgramCluster:
    cluster.package = "torch"
    return cluster


def train(me: ProgramContext) -> None:
    """Four models with an optimizer each, one with a scheduler, compared after every step."""
    import torch

    import ringfold as rf

    torch.set_num_threads(1)
    torch.manual_seed(me.options["seed"])
    models: dict[str, Any] = {
        name: torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.BatchNorm1d(6), torch.nn.Linear(6, 2))
        for name in ("sgd", "adamw", "nadam", "rprop")
    }
    optimizers = [
        torch.optim.SGD(models["sgd"].parameters(), lr=0.1, momentum=0.9, dampening=0.5),
        torch.optim.AdamW(models["adamw"].parameters(), amsgrad=True),
        torch.optim.NAdam(models["nadam"].parameters()),
        torch.optim.Rprop(models["rprop"].parameters()),
    ]
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizers[0], 0.5, total_steps=UNTIL + 1)
    state = rf.torch.shared_state(*optimizers, scheduler, statistics="shared", **models)
    params = [param for model in models.values() for param in model.parameters()]
    with me.join() as run:
        me.report("joined", peer=run.peer_id)
        for step in run.steps(state, until=UNTIL, min_world=2, check_every=1, on_divergence="raise"):
            if step.number == NEWCOMER_AT and not me.options["is_newcomer"]:
                me.report("waits")
                me.receive("go on")
            batch = torch.randn(8, 4, generator=torch.Generator().manual_seed(1000 * run.peer_id + step.number))
            for model, optimizer in zip(models.values(), optimizers, strict=True):
                optimizer.zero_grad()
                (model(batch) ** 2).sum().backward()
            step.all_reduce([param.grad for param in params], op="avg")
            state.average_statistics(step)
            for optimizer in optimizers:
                optimizer.step()
            scheduler.step()
            tensors = [each for model in models.values() for each in model.state_dict().values()]
            found = zlib.crc32(b"".join(each.numpy().tobytes() for each in tensors))
            me.report("step", number=step.number, bits=found, lr=optimizers[0].param_groups[0]["lr"])
    me.report("end", revision=state.revision)


def test_a_newcomer_goes_on_with_the_bits_of_the_others(cluster: ProgramCluster) -> None:
    master = cluster.start_master()
    peers = cluster.start_program(train, 2, seed=1, is_newcomer=False)
    for peer in peers:
        peer.expect("waits", timeout_s=120)
    registered = len(master.events("peer_registered"))
    newcomer = cluster.start_one(train, seed=2, is_newcomer=True)
    master.expect_events("peer_registered", registered + 1, timeout_s=120)
    for peer in peers:
        peer.send("go on")
    for number in range(NEWCOMER_AT + 1, UNTIL):
        facts = [each.expect("step", number=number, timeout_s=120) for each in (*peers, newcomer)]
        assert len({(fact["bits"], fact["lr"]) for fact in facts}) == 1, number
    for each in (*peers, newcomer):
        assert each.expect("end", timeout_s=120)["revision"] == UNTIL
        each.wait_success()
