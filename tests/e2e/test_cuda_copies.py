"""Ops on CUDA tensors, with the copies of a device that is simulated: what is queued when, and what becomes of it."""

import threading
from typing import Any

import pytest
from programs import ProgramCluster, ProgramContext

pytest.importorskip("torch", reason="needs PyTorch (ringfold[torch])")

DTYPES = ("float32", "bfloat16", "float64", "int32")


@pytest.fixture
def cluster(cluster: ProgramCluster) -> ProgramCluster:
    cluster.package = "torch"
    return cluster


def gather(me: ProgramContext) -> Any:  # noqa: ANN401 - a communicator
    run = me.join()
    while run.group_size < me.options["world"]:
        run.update_topology(min_world=me.options["world"])
    return run


def fake(me: ProgramContext) -> Any:  # noqa: ANN401 - a module
    import fake_cuda

    from ringfold.peer import cuda_copies

    fake_cuda.install()
    cuda_copies.MIN_BLOCK = 512 << 10  # more of them than an op of this size has
    fake_cuda.slowness_s = me.options.get("slowness_s", 0.0)
    fake_cuda.has_memory = me.options.get("has_memory", True)
    return fake_cuda


def large_ops(me: ProgramContext) -> None:
    """Of all kinds, in place and not; each tensor is as passed in until the op ends, and right afterwards."""
    import torch

    cuda = fake(me)
    with gather(me) as run:
        rank, world, right = run.rank, me.options["world"], []
        for name in DTYPES:
            dtype = getattr(torch, name)
            pattern = (torch.arange(9_000_000 // dtype.itemsize + 3) % 7).to(dtype)
            x = cuda.tensor(pattern * (rank + 1))
            total = pattern * (world * (world + 1) // 2)
            run.all_reduce(x)
            right.append(torch.equal(cuda.numbers(x), total))
            source, out = cuda.tensor(pattern * (rank + 1)), cuda.tensor(pattern * 0)
            run.all_reduce(source, out=out)
            right.append(torch.equal(cuda.numbers(out), total))
            right.append(torch.equal(cuda.numbers(source), pattern * (rank + 1)))
        several = [torch.full((300_000 + place,), float(rank + place)) for place in range(9)]
        tensors = [cuda.tensor(each) if place % 4 else each for place, each in enumerate(several)]
        turned = cuda.tensor(torch.arange(600_000.0).reshape(600, 1_000)).t()
        handle = run.all_reduce_async(turned, tag=3)
        run.all_reduce([*tensors, None], op="avg", skip_none=True)
        mean = sum(range(world)) / world
        for place, each in enumerate(tensors):
            found = cuda.numbers(each) if place % 4 else each
            right.append(bool((found == mean + place).all()))
        handle.wait()
        right.append(torch.equal(cuda.numbers(turned), world * torch.arange(600_000.0).reshape(600, 1_000).t()))
        y, before = cuda.tensor(torch.ones(2_200_000)), cuda.begun()
        run.all_reduce(y, contribute=rank > 0)
        # 17 blocks there and 17 back, and one copy inside the device; if that has no memory left, one back.
        copies = 17 * (rank > 0) + (18 if me.options["has_memory"] else 1)
        right.append(cuda.begun() - before == copies)
        right.append(bool((cuda.numbers(y) == world - 1).all()))
        z = cuda.tensor(torch.linspace(-1, 1, 2_200_000))
        run.all_reduce(z, quantize="minmax8")
        right.append(bool(torch.allclose(cuda.numbers(z), world * torch.linspace(-1, 1, 2_200_000), atol=0.1)))
        host = torch.full((2_200_000,), rank + 1.0)
        here = host if rank == 0 else cuda.tensor(host)
        run.all_reduce(here)
        found = here if rank == 0 else cuda.numbers(here)
        right.append(bool((found == world * (world + 1) // 2).all()))
        me.report("ended", right=right)


@pytest.mark.parametrize(
    ("world", "transport", "slowness_s"),
    [(2, "auto", 0.0), (2, "auto", 0.002), (2, "tcp", 0.002), (3, "tcp", 0.0), (3, "auto", 0.002), (4, "auto", 0.001)],
)
def test_large_ops(
    cluster: ProgramCluster, world: int, transport: str, slowness_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RINGFOLD_TRANSPORT", transport)
    cluster.start_master()
    has_memory = slowness_s > 0 or transport == "auto"
    for peer in cluster.start_program(large_ops, world, world=world, slowness_s=slowness_s, has_memory=has_memory):
        assert all(peer.expect("ended", timeout_s=120)["right"])


def copies_that_fail(me: ProgramContext) -> None:
    """On rank 1 the n-th copy of each op fails, for many n; then it calls the op again, unless that is committed."""
    import torch

    cuda = fake(me)
    with gather(me) as run:
        right, raised = [], 0
        for fails_at in range(1, 32, 2):
            x = cuda.tensor(torch.full((2_200_000,), run.rank + 1.0))
            expected = 3.0
            while True:
                if run.rank == 1 and fails_at:
                    cuda.fails_at, fails_at = cuda.begun() + fails_at, 0
                try:
                    run.all_reduce(x)
                    break
                except RuntimeError as error:
                    raised += "illegal memory access" in str(error)
                    right.append(bool((cuda.numbers(x) == run.rank + 1).all()))
                    if any("is committed" in note for note in getattr(error, "__notes__", ())):
                        expected = run.rank + 1.0
                        break
            right.append(bool((cuda.numbers(x) == expected).all()))
        me.report("ended", right=right, raised=raised)


def test_the_error_of_a_copy_is_raised_and_the_op_can_be_called_again(cluster: ProgramCluster) -> None:
    cluster.start_master()
    ended = [peer.expect("ended", timeout_s=90) for peer in cluster.start_program(copies_that_fail, 2, world=2)]
    assert all(all(each["right"]) for each in ended)
    # Of the 17 copies to the host each that fails ends the op. One back that fails in time is made again.
    assert sorted(each["raised"] >= 9 for each in ended) == [False, True]


def reduce_and_report(me: ProgramContext) -> None:
    """Report each op, and whether one that was aborted has left the tensor as it was."""
    import torch

    import ringfold as rf

    cuda = fake(me)
    with gather(me) as run:
        for number in range(me.options["ops"]):
            x = cuda.tensor(torch.ones(2_200_000))
            try:
                world = len(run.all_reduce(x, retry=me.options["retry"]).contributors)
            except rf.CollectiveAborted:
                world = 1
            me.report("op", number=number, world=world, right=bool((cuda.numbers(x) == world).all()))
        me.report("ended")


@pytest.mark.parametrize("retry", [True, False])
def test_a_death_in_the_middle(cluster: ProgramCluster, retry: bool) -> None:
    """Ops take tens of milliseconds here, so it comes in the middle of one."""
    cluster.start_master()
    peers = cluster.start_program(reduce_and_report, 3, world=3, ops=30, retry=retry, slowness_s=0.004)
    peers[2].expect("op", timeout_s=60, number=4)
    peers[2].kill()
    for peer in peers[:2]:
        peer.expect("ended", timeout_s=60)
        ops = peer.reports("op")
        assert all(op["right"] for op in ops)
        assert [op["world"] for op in ops].count(1) <= (0 if retry else 1)
        assert {3, 2} <= {op["world"] for op in ops}


def end_stall(me: ProgramContext, stall: Any) -> None:  # noqa: ANN401 - an event
    me.receive("go on")
    stall.happen()


def train(me: ProgramContext) -> None:
    """In one step of one peer a kernel does not end, until the test says so."""
    import torch

    cuda = fake(me)
    with gather(me) as run:
        for step in run.steps(until=me.options["steps"], min_world=2):
            x = cuda.tensor(torch.ones(me.options["elements"]))
            if me.options.get("stall") == step.number:
                threading.Thread(target=end_stall, args=(me, cuda.stall()), daemon=True).start()
                me.report("stalls")
            info = step.all_reduce_async(x, tag=1).wait() if me.options["is_async"] else step.all_reduce(x)
            world = len(info.contributors)
            me.report("step", number=step.number, world=world, right=bool((cuda.numbers(x) == world).all()))
        me.report("ended")


@pytest.mark.parametrize("is_async", [True, False])
@pytest.mark.parametrize("elements", [1_000, 2_200_000], ids=["small", "large"])
def test_a_kernel_that_hangs_is_absence(cluster: ProgramCluster, elements: int, is_async: bool) -> None:
    """Heartbeats go on; the op counts as not called, so that its timeout evicts the peer, which joins again later."""
    cluster.start_master(op_timeout_s=1.5)
    options: dict[str, Any] = {"world": 3, "steps": 40, "elements": elements, "is_async": is_async}
    peers = [*cluster.start_program(train, 2, **options), cluster.start_one(train, stall=5, **options)]
    peers[2].expect("stalls", timeout_s=60)
    for peer in peers[:2]:
        peer.expect("step", timeout_s=60, number=5, world=2)
    peers[2].send("go on")
    for peer in peers:
        peer.expect("ended", timeout_s=60)
        assert all(step["right"] for step in peer.reports("step"))
    assert cluster.master is not None
    cluster.master.expect_log(", and it did not come")
