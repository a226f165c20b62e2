"""CUDA tensors in real processes that share one GPU: every collective, streams, buckets, a death, a copy that hangs."""

import zlib
from pathlib import Path

import numpy as np
import pytest
from programs import ProgramCluster, ProgramContext

# Asking torch would begin CUDA in this process, and processes that are forked from it could not use it.
pytestmark = pytest.mark.skipif(not Path("/dev/nvidiactl").exists(), reason="needs a CUDA device")


def gather(me: ProgramContext):  # type: ignore[no-untyped-def]  # noqa: ANN201
    run = me.join()
    while run.group_size < me.options["world"]:
        run.update_topology(min_world=me.options["world"])
    return run


def every_collective(me: ProgramContext) -> None:
    import torch

    with gather(me) as run:
        rank, right = run.rank, []
        for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.float64):
            x = torch.full((1_000, 333), rank + 1, dtype=dtype, device="cuda")
            run.all_reduce(x)
            right.append(bool((x == 3).all()))
        x = torch.arange(12.0, device="cuda").reshape(3, 4).t() * (rank + 1)
        assert not x.is_contiguous()
        run.all_reduce([x, x.new_ones(5), None], skip_none=True)
        right.append(torch.equal(x, torch.arange(12.0, device="cuda").reshape(3, 4).t() * 3))
        source, out = torch.full((70_000,), rank + 1.0, device="cuda"), torch.empty(70_000, device="cuda")
        run.all_reduce(source, out=out, op="avg")
        right.append(bool((out == 1.5).all()) and bool((source == rank + 1).all()))
        handles = [run.all_reduce_async(y := torch.ones(100_000, device="cuda"), tag=tag) for tag in range(4)]
        for handle in handles:
            handle.wait()
        right.append(bool((y == 2).all()))
        z = torch.full((10,), float(rank), device="cuda")
        run.broadcast(z, root=1)
        right.append(bool((z == 1).all()))
        gathered = torch.empty(2, 10, device="cuda")
        run.all_gather(torch.full((10,), float(rank), device="cuda"), out=gathered)
        right.append(gathered[:, 0].tolist() == [0.0, 1.0])
        large = torch.full((6_000_000,), rank + 1.0, device="cuda")
        twice = large.clone()
        run.all_reduce(large)
        right.append(bool((large == 3).all()))
        run.all_reduce(twice, out=large, contribute=rank == 1)
        right.append(bool((large == 2).all()) and bool((twice == rank + 1).all()))
        tensors = [torch.full((1_500_000 + n,), float(n), device="cuda") for n in range(4)]
        run.all_reduce(tensors)
        right.append(all(bool((each == 2 * n).all()) for n, each in enumerate(tensors)))
        mixed = torch.full((5_000_000,), rank + 1.0, device="cuda" if rank else "cpu")
        run.all_reduce(mixed)
        right.append(bool((mixed == 3).all()))
        turned = torch.arange(6_000_000.0, device="cuda").reshape(2_000, 3_000).t() * (rank + 1)
        run.all_reduce(turned)
        right.append(torch.equal(turned, torch.arange(6_000_000.0, device="cuda").reshape(2_000, 3_000).t() * 3))
        part = run.reduce_scatter(torch.ones(10, device="cuda"))
        right.append(bool((np.asarray(part) == 2).all()))
        with torch.inference_mode():
            frozen = torch.ones(7, device="cuda")
        run.all_reduce(frozen)
        right.append(frozen.sum().item() == 14)
        me.report("ended", right=right)


def in_order_of_streams(me: ProgramContext) -> None:
    """A slow kernel before the op, and reads after it: on the program's stream, and on another one."""
    import torch

    with gather(me) as run:
        right = []
        side = torch.cuda.Stream()
        for number, step in enumerate(run.steps(until=6)):
            x = torch.zeros(4 << 20, device="cuda")
            with torch.cuda.stream(side) if number % 2 else torch.cuda.stream(torch.cuda.default_stream()):
                torch.cuda.current_stream().wait_stream(torch.cuda.default_stream())
                torch.cuda._sleep(20_000_000)
                x += run.rank + 1
                if number < 3:
                    step.all_reduce(x)
                else:
                    step.all_reduce_async(x, tag=5).wait()
                x *= 2
                right.append(bool((x == 6).all()))
        me.report("ended", right=right)


def train(me: ProgramContext) -> None:
    """DataParallel on CUDA; `freeze` makes a kernel that never seems to end, in the third step."""
    import torch

    import ringfold as rf

    torch.manual_seed(1)
    net = torch.nn.Sequential(torch.nn.Linear(512, 2048), torch.nn.ReLU(), torch.nn.Linear(2048, 512)).cuda()
    with gather(me) as run:
        model = rf.torch.DataParallel(net, run, bucket_bytes=1 << 20)
        optimizer = torch.optim.AdamW(net.parameters())
        state = rf.torch.shared_state(model, optimizer)
        for step in run.steps(state, until=me.options["steps"]):
            if me.options.get("freeze") == step.number:
                me.report("freezes")
                torch.cuda._sleep(1 << 36)
            x = torch.randn(64, 512, device="cuda", generator=torch.Generator("cuda").manual_seed(step.number))
            model(x * (run.rank + 1)).square().mean().backward()
            assert run._ops.last is not None, "the loop's thread has seen no op: it would ask the master in each step"
            optimizer.step()
            optimizer.zero_grad()
            me.report("step", number=step.number, world=len(model.reductions[-1].contributors))
        digest = sum(float(p.double().sum()) for p in net.parameters())
        me.report("ended", digest=digest)


def train_with_everything(me: ProgramContext) -> None:
    """Fused and capturable optimizers, a scaler, accumulation, clipping, quantisation, two streams, DDP's hook."""
    import torch
    import torch.distributed as dist

    import ringfold as rf

    torch.manual_seed(me.options["seed"])
    nn, side = torch.nn, torch.cuda.Stream()

    class Streams(nn.Module):  # type: ignore[misc,name-defined]
        """The gradients of its layers are computed in two streams."""

        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(64, 256), nn.Linear(64, 256)

        def forward(self, x):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
            main = torch.cuda.current_stream()
            side.wait_stream(main)
            with torch.cuda.stream(side):
                for _ in range(20):
                    x = x + self.two(x)[:, :64] * 0.01
            main.wait_stream(side)
            return self.one(x) + self.two(x)

    nets = {name: Streams().cuda() if name == "streams" else nn.Linear(64, 256).cuda() for name in NETS}
    optimizers = [
        torch.optim.AdamW(nets["fused"].parameters(), fused=True),
        torch.optim.Adam(nets["capturable"].parameters(), capturable=True),
        torch.optim.SGD(nets["streams"].parameters(), lr=0.01, momentum=0.9, foreach=True),
        torch.optim.SGD(nets["quantised"].parameters(), lr=0.01, momentum=0.9, fused=True),
        torch.optim.Adagrad(nets["hook"].parameters()),
    ]
    scaler = torch.amp.GradScaler("cuda", init_scale=1024.0)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    with me.join() as run:
        me.report("joined")
        hooked = rf.torch.HookState(run)
        models = {name: rf.torch.DataParallel(nets[name], run, bucket_bytes=1 << 14) for name in NETS[:3]}
        models["quantised"] = rf.torch.DataParallel(nets["quantised"], run, quantize="minmax8")
        models["hook"] = nn.parallel.DistributedDataParallel(
            nets["hook"], bucket_cap_mb=0.02, find_unused_parameters=True
        )
        models["hook"].register_comm_hook(hooked, rf.torch.comm_hook)
        state = rf.torch.shared_state(*optimizers, scaler, **nets)
        for step in run.steps(state, until=30, min_world=2, check_every=1, on_divergence="raise"):
            if step.number == 10 and not me.options["is_newcomer"]:
                me.report("waits")
                me.receive("go on")
            numbers = torch.Generator("cuda").manual_seed(1_000 * run.peer_id + step.number)
            for (name, model), optimizer in zip(models.items(), optimizers, strict=True):
                if name == "capturable":
                    with model.no_sync():
                        model(torch.randn(32, 64, device="cuda", generator=numbers)).square().mean().backward()
                with torch.autocast("cuda", torch.float16, enabled=name == "fused"):
                    loss = model(torch.randn(32, 64, device="cuda", generator=numbers)).square().mean()
                (scaler.scale(loss) if name == "fused" else loss).backward()
                if name == "fused":
                    scaler.unscale_(optimizer)
                    nn.utils.clip_grad_norm_(nets[name].parameters(), 1.0)
                    scaler.step(optimizer)
                    scaler.update()
                else:
                    optimizer.step()
                optimizer.zero_grad()
            bits = [each.detach().cpu().numpy().tobytes() for net in nets.values() for each in net.parameters()]
            me.report("step", number=step.number, bits=zlib.crc32(b"".join(bits)), world=run.group_size)
    dist.destroy_process_group()
    me.report("ended")


NETS = ("fused", "capturable", "streams", "quantised", "hook")


def test_a_newcomer_has_the_bits_of_the_others(cluster: ProgramCluster) -> None:
    master = cluster.start_master()
    peers = cluster.start_program(train_with_everything, 2, seed=1, is_newcomer=False)
    for peer in peers:
        peer.expect("waits", timeout_s=120)
    peers += cluster.start_program(train_with_everything, 1, seed=2, is_newcomer=True)
    master.expect_events("peer_registered", 3, timeout_s=120)
    for peer in peers[:2]:
        peer.send("go on")
    for number in range(12, 30):
        steps = [peer.expect("step", timeout_s=120, number=number) for peer in peers]
        assert len({step["bits"] for step in steps}) == 1, number
        assert [step["world"] for step in steps] == [3] * 3
    for peer in peers:
        peer.expect("ended", timeout_s=60)


@pytest.mark.parametrize("transport", ["auto", "tcp"])
def test_every_collective(cluster: ProgramCluster, transport: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RINGFOLD_TRANSPORT", transport)
    cluster.start_master()
    for peer in cluster.start_program(every_collective, 2, world=2):
        assert all(peer.expect("ended", timeout_s=120)["right"])


def test_an_op_follows_the_stream_and_the_stream_follows_the_op(cluster: ProgramCluster) -> None:
    cluster.start_master()
    for peer in cluster.start_program(in_order_of_streams, 2, world=2):
        assert peer.expect("ended", timeout_s=120)["right"] == [True] * 6


def test_a_kill_in_the_middle(cluster: ProgramCluster) -> None:
    cluster.start_master()
    peers = cluster.start_program(train, 3, world=3, steps=400)
    for peer in peers:
        peer.expect("step", timeout_s=120, number=20, world=3)
    peers[1].kill()
    digests = {peer.expect("ended", timeout_s=120)["digest"] for peer in (peers[0], peers[2])}
    assert len(digests) == 1


def test_a_copy_that_hangs_is_absence(cluster: ProgramCluster) -> None:
    cluster.start_master(op_timeout_s=3)
    peers = cluster.start_program(train, 2, world=3, steps=60)
    (frozen,) = cluster.start_program(train, 1, world=3, steps=60, freeze=10)
    frozen.expect("freezes", timeout_s=120)
    digests = {peer.expect("ended", timeout_s=120)["digest"] for peer in peers}
    assert len(digests) == 1
    frozen.kill()
