"""`rf.torch.DataParallel` and the hook for DDP: alone in this process, and with peers that are killed."""

import threading
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
from programs import Message, ProgramCluster, ProgramContext

torch = pytest.importorskip("torch", reason="needs PyTorch (ringfold[torch])")

import ringfold as rf  # noqa: E402
from ringfold.torch.comm_hook import HookState, comm_hook  # noqa: E402
from ringfold.torch.data_parallel import DataParallel, make_buckets, trained_parameters  # noqa: E402

nn = torch.nn


@pytest.fixture
def cluster(cluster: ProgramCluster) -> ProgramCluster:
    cluster.package = "torch"
    return cluster


# Alone: a group of one has its own gradients


@pytest.fixture
def run() -> Iterator[rf.Communicator]:
    with rf.join("127.0.0.1:0", host_master=True) as run:
        yield run


class Net(nn.Module):  # type: ignore[misc,name-defined]
    """Two branches; `forward(x, "left")` uses one of them. One layer is frozen."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.frozen = nn.Linear(6, 6).requires_grad_(False)
        self.left = nn.Linear(6, 5)
        self.right = nn.Linear(6, 5)

    def forward(self, x: Any, *branches: str) -> Any:  # noqa: ANN401 - tensors
        x = self.frozen(x).relu()
        return sum(getattr(self, each)(x).square().mean() for each in branches or ("left", "right"))


def batch() -> Any:  # noqa: ANN401 - a tensor
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(1))


def expected(net: Any, factor: float = 1.0) -> dict[str, Any]:  # noqa: ANN401 - a module
    loss = net(batch()) * factor
    named = [(name, each) for name, each in net.named_parameters() if each.requires_grad]
    grads = torch.autograd.grad(loss, [each for _, each in named])
    return {name: grad for (name, _), grad in zip(named, grads, strict=True)}


def check_grads(net: Any, wanted: dict[str, Any]) -> None:  # noqa: ANN401 - a module
    for name, parameter in net.named_parameters():
        grad = parameter.grad
        assert torch.equal(grad, wanted[name]) if name in wanted else grad is None, name


@pytest.mark.parametrize("bucket_bytes", [1, 150, 1 << 20])
@pytest.mark.parametrize("set_to_none", [True, False])
def test_backward_leaves_the_gradients_as_views_of_buckets(
    run: rf.Communicator, bucket_bytes: int, set_to_none: bool
) -> None:
    net = Net()
    model = DataParallel(net, run, bucket_bytes=bucket_bytes)
    wanted = expected(net)
    for _ in run.steps(until=3):
        model(batch()).backward()
        check_grads(net, wanted)
        flats = [bucket.flat.untyped_storage().data_ptr() for bucket in model._buckets]
        assert all(each.grad.untyped_storage().data_ptr() in flats for each in net.parameters() if each.requires_grad)
        assert len(model.reductions) == len(flats) == {1: 4, 150: 2, 1 << 20: 1}[bucket_bytes]
        for parameter in net.parameters():
            if parameter.grad is not None:
                parameter.grad = None if set_to_none else parameter.grad.zero_()


def test_no_sync_accumulates_and_the_next_pass_reduces_the_sum(run: rf.Communicator) -> None:
    net = Net()
    model = DataParallel(net, run)
    for _ in run.steps(until=1):
        with model.no_sync():
            model(batch()).backward()
            assert model.reductions == ()
        model(batch()).backward()
        check_grads(net, expected(net, 2.0))
        assert len(model.reductions) == 1


def test_a_parameter_that_nobody_used_has_no_gradient(run: rf.Communicator) -> None:
    net = Net()
    model = DataParallel(net, run)
    for _ in run.steps(until=2):
        model(batch(), "left").backward()
        assert net.left.weight.grad is not None
        assert net.right.weight.grad is None
        for parameter in net.parameters():
            parameter.grad = None


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_a_parameter_that_nobody_used_has_no_gradient_in_any_dtype(run: rf.Communicator, dtype: Any) -> None:  # noqa: ANN401
    net = Net().to(dtype)
    model = DataParallel(net, run)
    for _ in run.steps(until=1):
        model(batch().to(dtype), "left").backward()
        assert net.left.weight.grad is not None
        assert net.right.weight.grad is None
        assert [len(info.contributors) for info in model.reductions] == [1]


def test_the_bucket_that_is_ready_last_begins_at_the_end_of_the_pass(run: rf.Communicator) -> None:
    model = DataParallel(Net(), run, bucket_bytes=1)
    in_flight = []
    for each in model.module.parameters():
        if each.requires_grad:
            each.register_post_accumulate_grad_hook(
                lambda _: in_flight.append(sum(bucket.handle is not None for bucket in model._buckets))
            )
    for _ in run.steps(until=1):
        model(batch()).backward()
        assert in_flight == [1, 2, 3, 3]
        assert len(model.reductions) == 4


def test_with_two_models_every_bucket_begins_when_it_is_ready(run: rf.Communicator) -> None:
    """Another peer may end their passes in another order: a peer that waits must have begun all."""
    models = [DataParallel(Net(), run), DataParallel(Net(), run)]
    buckets = [bucket for model in models for bucket in model._buckets]
    in_flight = []
    for each in (each for model in models for each in model.parameters() if each.requires_grad):
        each.register_post_accumulate_grad_hook(
            lambda _: in_flight.append(sum(bucket.handle is not None for bucket in buckets))
        )
    for _ in run.steps(until=1):
        sum(model(batch()) for model in models).backward()
        assert max(in_flight) == len(buckets) == 2


def test_a_peer_without_a_batch_skips(run: rf.Communicator) -> None:
    net = Net()
    model = DataParallel(net, run)
    for _ in run.steps(until=1):
        model.skip()
        assert [info.contributors for info in model.reductions] == [()]
        assert net.left.weight.grad is None, "nobody has used it"


def test_backward_outside_a_step_is_an_error_that_says_where_it_belongs(run: rf.Communicator) -> None:
    model = DataParallel(Net(), run)
    with pytest.raises(rf.UsageError, match=r"for step in run.steps"):
        model(batch()).backward()


def test_backward_in_another_thread_is_an_error(run: rf.Communicator) -> None:
    """The loop's thread would not see the ops, and what it has seen decides about votes."""
    model, errors = DataParallel(Net(), run), []

    def backward() -> None:
        try:
            model(batch()).backward()
        except rf.UsageError as error:
            errors.append(str(error))

    for _ in run.steps(until=1):
        thread = threading.Thread(target=backward)
        thread.start()
        thread.join()
        assert "set_multithreading_enabled(False)" in errors[0]
        model.skip()


def test_hooks_of_modules_on_a_device_run_in_the_thread_of_forward(run: rf.Communicator) -> None:
    torch.autograd.set_multithreading_enabled(True)
    net = Net()
    model = DataParallel(net, run)
    assert torch._C._is_multithreading_enabled(), "nothing is changed for modules in host memory"
    model._is_on_device = True
    try:
        model(batch())
        assert not torch._C._is_multithreading_enabled()
    finally:
        torch.autograd.set_multithreading_enabled(True)


@pytest.mark.parametrize("reentrant", [True, False])
def test_activation_checkpointing(run: rf.Communicator, reentrant: bool) -> None:
    """A layer that is used twice, recomputed: with reentrant checkpointing its gradient comes in two passes."""
    from torch.utils.checkpoint import checkpoint

    torch.manual_seed(5)
    layer = nn.Linear(6, 6)
    model = DataParallel(layer, run)
    x = batch().requires_grad_()

    def loss(of: Any) -> Any:  # noqa: ANN401 - a module and a tensor
        twice = checkpoint(of, checkpoint(of, x, use_reentrant=reentrant), use_reentrant=reentrant)
        return twice.square().sum()

    wanted = torch.autograd.grad(layer(layer(x)).square().sum(), list(layer.parameters()))
    for _ in run.steps(until=2):
        loss(model).backward()
        assert all(torch.allclose(each.grad, grad) for each, grad in zip(layer.parameters(), wanted, strict=True))
        layer.zero_grad()


def test_a_backward_that_failed_half_way_is_ended_by_skip(run: rf.Communicator) -> None:
    class Fails(torch.autograd.Function):  # type: ignore[misc,name-defined]
        @staticmethod
        def forward(ctx: Any, x: Any) -> Any:  # noqa: ANN401 - tensors
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: Any) -> Any:  # noqa: ANN401 - tensors
            raise ValueError("out of memory, say")

    net = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
    model = DataParallel(net, run, bucket_bytes=1)

    def fail() -> None:
        with pytest.raises(ValueError, match="say"):
            net[1](Fails.apply(net[0](batch()))).sum().backward()

    for _ in run.steps(until=2):
        fail()
        with pytest.raises(rf.UsageError, match=r"call skip\(\)"):
            model(batch()).sum().backward()
        model.skip()
        assert [len(info.contributors) for info in model.reductions] == [1, 1, 0, 0]
        net.zero_grad()
        fail()  # the next step begins with nothing of it
        net.zero_grad()


def test_a_compiled_model_and_clipping_and_autocast(run: rf.Communicator) -> None:
    net = Net()
    model = DataParallel(torch.compile(net, backend="aot_eager"), run)
    for _ in run.steps(until=2):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model(batch())
        loss.backward()
        norm = nn.utils.clip_grad_norm_(net.parameters(), 1e-3)
        assert norm > 1e-3
        clipped = torch.linalg.vector_norm(torch.stack([g.grad.norm() for g in net.parameters() if g.grad is not None]))
        assert clipped <= 1.001e-3
        model.zero_grad()


def test_buckets_hold_one_dtype_each() -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4).bfloat16(), nn.Linear(4, 4))
    buckets = make_buckets(trained_parameters(net)[::-1], 1 << 20, with_flags=True)
    assert [bucket.flat.dtype for bucket in buckets] == [torch.float32, torch.bfloat16]
    assert [len(bucket.parameters) for bucket in buckets] == [4, 2]


def test_a_model_without_trained_parameters_is_refused(run: rf.Communicator) -> None:
    with pytest.raises(rf.UsageError, match="no parameters that require gradients"):
        DataParallel(nn.Linear(2, 2).requires_grad_(False), run)


def test_a_module_is_wrapped_once_at_a_time(run: rf.Communicator) -> None:
    net = Net()
    model = DataParallel(net, run)
    with pytest.raises(rf.UsageError, match=r"call its unwrap\(\)"):
        DataParallel(net, run)
    model = DataParallel(model.unwrap(), run)
    for _ in run.steps(until=1):
        model(batch()).backward()
        check_grads(net, expected(net))


def test_two_models_may_be_in_one_backward(run: rf.Communicator) -> None:
    nets = [Net(), Net()]
    models = [DataParallel(net, run) for net in nets]
    for _ in run.steps(until=2):
        (models[0](batch()) + models[1](batch())).backward()
        for net in nets:
            check_grads(net, expected(net))
            net.zero_grad()


def test_unwrap_removes_the_hooks(run: rf.Communicator) -> None:
    net = Net()
    assert DataParallel(net, run).unwrap() is net
    net(batch()).backward()
    assert net.left.weight.grad is not None


def test_the_hook_for_ddp_averages_its_buckets(run: rf.Communicator) -> None:
    distributed = torch.distributed
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        net = Net()
        model = nn.parallel.DistributedDataParallel(net, bucket_cap_mb=1e-5, find_unused_parameters=True)
        state = HookState(run)
        model.register_comm_hook(state, comm_hook)
        wanted = expected(net)
        for _ in run.steps(until=3):
            model(batch()).backward()
            check_grads(net, wanted)
            assert all(info.contributors == (run.peer_id,) for info in state.reductions)
            assert state.reductions
            net.zero_grad()
    finally:
        distributed.destroy_process_group()


def test_the_hook_refuses_buckets_that_ddp_has_ordered_again(run: rf.Communicator) -> None:
    """A newcomer would have the first order, and average other gradients."""
    distributed = torch.distributed
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        net = Backwards()
        model = nn.parallel.DistributedDataParallel(net, bucket_cap_mb=1e-5)
        model.register_comm_hook(HookState(run), comm_hook)
        for step in run.steps(until=2):
            loss = model(torch.ones(2, 24)).sum()
            if step.number == 0:
                loss.backward()
                continue
            with pytest.raises(Exception, match="find_unused_parameters=True"):
                loss.backward()
    finally:
        distributed.destroy_process_group()


# With peers

GRID = 2.0**-14
"""Gradients are whole multiples of it, so that their sums are exact, in whatever order a ring adds them."""


class Backwards(nn.Module):  # type: ignore[misc,name-defined]
    """Its layers are registered in another order than they are used in."""

    def __init__(self) -> None:
        super().__init__()
        self.last, self.first, self.middle = nn.Linear(64, 8), nn.Linear(24, 64), nn.Linear(64, 64)

    def forward(self, x: Any) -> Any:  # noqa: ANN401 - tensors
        return self.last(self.middle(self.first(x).tanh()).tanh())


def network() -> Any:  # noqa: ANN401 - a module
    torch.manual_seed(7)
    net = Backwards()
    for parameter in net.parameters():
        parameter.register_hook(lambda grad: (grad / GRID).round() * GRID)
    return net


def loss_of(net: Any, peer: int, step: int) -> Any:  # noqa: ANN401 - a module, and a tensor
    x = torch.randn(16, 24, generator=torch.Generator().manual_seed(1_000 * peer + step))
    return (net(x) - x[:, :8]).square().mean()


def bits_of(net: Any) -> list[str]:  # noqa: ANN401 - a module
    return [each.detach().numpy().tobytes().hex() for each in net.parameters()]


def train(me: ProgramContext) -> None:
    torch.set_num_threads(1)
    net = network()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.125, momentum=0.5)
    with me.join() as run:
        while run.group_size < me.options.get("world", 1):
            run.update_topology(min_world=me.options["world"])
        model = DataParallel(net, run, bucket_bytes=4_096)
        state = rf.torch.shared_state(model if me.options.get("is_order_shared") else net, optimizer)
        for step in run.steps(state, until=me.options["until"], min_world=me.options["min_world"]):
            if step.number == me.options.get("wait_at"):
                me.report("waiting")
                me.receive()
            number = step.number
            loss = loss_of(model, run.peer_id, number)
            me.report("loss", step=number)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            named = {id(each): name for name, each in net.named_parameters()}
            names = [[named[id(each)] for each in bucket.parameters] for bucket in model._buckets]
            shares = [info.contributors for info in model.reductions]
            me.report("step", step=step.number, computed_for=number, names=names, shares=shares)
        me.report("end", weights=bits_of(net))
        me.receive()


def replay(history: list[Any]) -> list[str]:
    """The weights after this committed history, computed in one process."""
    net = network()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.125, momentum=0.5)
    named = dict(net.named_parameters())
    for number, fact in enumerate(history):
        assert fact["step"] == number
        grads = {}
        for peer in sorted({peer for share in fact["shares"] for peer in share}):
            values = torch.autograd.grad(loss_of(net, peer, number), list(named.values()))
            grads[peer] = {name: (value / GRID).round() * GRID for name, value in zip(named, values, strict=True)}
        for names, share in zip(fact["names"], fact["shares"], strict=True):
            for name in names:
                named[name].grad = sum(grads[peer][name] for peer in share) / len(share)
        optimizer.step()
    return bits_of(net)


def is_at(step: int, fact: Message) -> bool:
    return bool(fact["step"] >= step)


@pytest.mark.waiting
@pytest.mark.parametrize("is_order_shared", [True])
def test_two_of_four_are_killed_and_the_history_gives_the_same_bits(
    cluster: ProgramCluster, is_order_shared: bool
) -> None:
    cluster.start_master()
    options: dict[str, Any] = {"until": 40, "min_world": 2, "is_order_shared": is_order_shared}
    peers = cluster.start_program(train, 4, world=4, **options)
    for victim, step in ((peers[1], 8), (peers[3], 17)):
        victim.expect("loss", partial(is_at, step), timeout_s=120)  # its pass goes on
        victim.kill()
    ends = [peer.expect("end", timeout_s=120) for peer in (peers[0], peers[2])]
    assert ends[0]["weights"] == ends[1]["weights"]
    history = {fact["step"]: fact for fact in peers[0].reports("step")}
    other = {fact["step"]: fact for fact in peers[2].reports("step")}
    assert all(other[step]["shares"] == fact["shares"] for step, fact in history.items() if step in other)
    whole = {**other, **history}
    assert len(whole) == 40
    assert any(len(share) == 4 for share in whole[5]["shares"])
    assert all(len(share) == 2 for share in whole[39]["shares"])
    assert replay([whole[step] for step in range(40)]) == ends[0]["weights"]
    for peer in (peers[0], peers[2]):
        peer.send()
        peer.wait_success()


def train_quantised(me: ProgramContext) -> None:
    """The right branch is used by rank 0 only, and by nobody in the last step. Averages are near, and equal."""
    torch.set_num_threads(1)
    net, reference = Net(), Net()
    with me.join() as run:
        while run.group_size < 2:
            run.update_topology(min_world=2)
        model = DataParallel(net, run, bucket_bytes=64, quantize="minmax8")
        right = []
        for step in run.steps(until=2, min_world=2):
            branches = ("left", "right") if run.rank == 0 and step.number == 0 else ("left",)
            model(batch() * (run.rank + 1), *branches).backward()
            for name in ("left", "right"):
                wanted = torch.zeros(5, 6)
                for rank in range(2):
                    if name == "left" or (rank == 0 and step.number == 0):
                        reference.zero_grad()
                        reference(batch() * (rank + 1), name).backward()
                        wanted += getattr(reference, name).weight.grad / 2
                found = getattr(net, name).weight.grad
                right.append(bool((found - wanted).abs().max() <= wanted.abs().max() / 50))
            bits = b"".join(each.grad.numpy().tobytes() for each in net.parameters() if each.requires_grad)
            me.report("step", right=right, bits=bits.hex())
            net.zero_grad()


@pytest.mark.waiting
def test_quantised_averages_are_near_and_have_the_same_bits(cluster: ProgramCluster) -> None:
    cluster.start_master()
    peers = cluster.start_program(train_quantised, 2)
    for _ in range(2):
        steps = [peer.expect("step", timeout_s=120) for peer in peers]
        assert steps[0]["bits"] == steps[1]["bits"]
        assert all(all(step["right"]) for step in steps)


@pytest.mark.waiting
def test_a_newcomer_has_the_order_of_the_buckets_that_the_others_agreed_on(cluster: ProgramCluster) -> None:
    master = cluster.start_master()
    options: dict[str, Any] = {"until": 20, "min_world": 2, "is_order_shared": True}
    peers = cluster.start_program(train, 2, world=2, wait_at=10, **options)
    for peer in peers:
        peer.expect("waiting", timeout_s=120)
    peers += cluster.start_program(train, 1, **options)
    master.expect_events("peer_registered", 3, timeout_s=120)
    for peer in peers[:2]:
        peer.send()
    ends = [peer.expect("end", timeout_s=120)["weights"] for peer in peers]
    assert ends[0] == ends[1] == ends[2]
    first, late = peers[0].reports("step"), peers[2].reports("step")
    assert late[-1]["names"] == first[-1]["names"] != first[0]["names"]
    assert all(len(share) == 3 for share in late[-1]["shares"])
    for peer in peers:
        peer.send()
        peer.wait_success()
