"""Every optimizer of torch in a shared state: sharing leaves no trace, and a copy goes on with the same bits."""

import copy
from pathlib import Path
from typing import Any

import pytest

import ringfold as rf
from ringfold.state.snapshot import Snapshot

torch = pytest.importorskip("torch", reason="needs PyTorch (ringfold[torch])")


torch.set_num_threads(1)  # the tensors are tiny, and threads of several test processes would wait for each other

CLASSES = sorted(
    {
        kind.__name__: kind
        for kind in vars(torch.optim).values()
        if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer) and kind is not torch.optim.Optimizer
    }.items()
)
VARIANTS: dict[str, list[dict[str, Any]]] = {
    "SGD": [
        {"lr": 0.1},
        {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1},
        {"lr": 0.1, "momentum": 0.9, "dampening": 0.5, "maximize": True},
        {"lr": 0.1, "momentum": 0.9, "foreach": True},
        {"lr": 0.1, "momentum": 0.9, "fused": True},
    ],
    "Adam": [
        {"amsgrad": True, "weight_decay": 0.1},
        {"foreach": True},
        {"fused": True},
        {"lr": torch.tensor(0.01)},
        {"maximize": True},
    ],
    "AdamW": [{}, {"amsgrad": True, "foreach": True}, {"fused": True}],
    "RMSprop": [{}, {"momentum": 0.9, "centered": True}, {"foreach": True}],
    "Adagrad": [{}, {"initial_accumulator_value": 0.1, "lr_decay": 0.1}, {"fused": True}],
    "NAdam": [{}, {"decoupled_weight_decay": True, "weight_decay": 0.1}],
    "ASGD": [{"t0": 2.0}],
    "Adafactor": [{}, {"foreach": True}],
}
"""What else decides which state there is. A class that is not named has one variant, its defaults."""
CASES = [
    pytest.param(kind, options, id=f"{name}-{','.join(options)}")
    for name, kind in CLASSES
    if name != "LBFGS"
    for options in VARIANTS.get(name, [{}])
]


def build(kind: Any, options: dict[str, Any], seed: int = 0) -> tuple[Any, Any]:  # noqa: ANN401
    """A small model and its optimizer; another seed, other weights."""
    torch.manual_seed(seed)
    if kind is torch.optim.SparseAdam:
        model: Any = torch.nn.Embedding(6, 3, sparse=True)
    elif kind.__name__ == "Muon":
        model = torch.nn.Sequential(torch.nn.Linear(4, 6, bias=False), torch.nn.Linear(6, 2, bias=False))
    else:
        model = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.LayerNorm(6), torch.nn.Linear(6, 2))
    return model, kind(model.parameters(), **copy.deepcopy(options))


def train(model: Any, optimizer: Any, first: int, last: int) -> None:  # noqa: ANN401
    """Steps with gradients that depend on nothing but the number of the step. The last parameter begins at step 2."""
    for number in range(first, last):
        optimizer.zero_grad()
        source = torch.Generator().manual_seed(number)
        if isinstance(model, torch.nn.Embedding):
            (model(torch.randint(6, (4,), generator=source)) ** 2).sum().backward()
        else:
            for param in model.parameters():
                param.grad = torch.randn(param.shape, generator=source)
            if number < 2 and not optimizer.param_groups[0].get("fused"):  # fused SGD has no late begin
                param.grad = None
        optimizer.step()


def bits(model: Any) -> list[bytes]:  # noqa: ANN401
    return [each.detach().numpy().tobytes() for each in model.parameters()]


def structure(state: rf.SharedState) -> list[tuple[str, str, list[int], bool]]:
    keys = Snapshot.take(state).manifest.keys
    return [(key.name, key.dtype, key.shape, key.may_differ) for key in keys]


def flat(tree: object) -> list[object]:
    """All leaves of a state_dict, tensors as bytes."""
    if isinstance(tree, dict):
        return [each for key in tree for each in (key, *flat(tree[key]))]
    if isinstance(tree, list | tuple):
        return [leaf for each in tree for leaf in flat(each)]
    return [tree.numpy().tobytes() if isinstance(tree, torch.Tensor) else tree]


@pytest.mark.parametrize(("kind", "options"), CASES)
@pytest.mark.parametrize("age", [0, 4])
def test_sharing_leaves_no_trace(kind: Any, options: dict[str, Any], age: int) -> None:  # noqa: ANN401
    """Weights, gradients, state and settings are as before, no hook is called, and the next steps have equal bits."""
    model, optimizer = build(kind, options)
    other, untouched = build(kind, options)
    train(model, optimizer, 0, age)
    train(other, untouched, 0, age)
    grads = [param.grad for param in model.parameters()]
    called: list[object] = []
    handle = optimizer.register_step_pre_hook(lambda *_: called.append(1))
    state = rf.torch.shared_state(model, optimizer)
    Snapshot.take(state)
    handle.remove()
    assert called == []
    assert all(param.grad is grad for param, grad in zip(model.parameters(), grads, strict=True))
    assert flat(optimizer.state_dict()) == flat(untouched.state_dict())
    assert bits(model) == bits(other)
    train(model, optimizer, age, age + 3)
    train(other, untouched, age, age + 3)
    assert bits(model) == bits(other)
    assert flat(optimizer.state_dict()) == flat(untouched.state_dict())


@pytest.mark.parametrize(("kind", "options"), CASES)
@pytest.mark.parametrize("age", [0, 1, 5])
def test_a_fresh_peer_that_loads_goes_on_with_equal_bits(
    kind: Any,  # noqa: ANN401
    options: dict[str, Any],
    age: int,
    tmp_path: Path,
) -> None:
    model, optimizer = build(kind, options)
    state = rf.torch.shared_state(model, optimizer)
    train(model, optimizer, 0, age)
    newcomer, its_optimizer = build(kind, options, seed=1)
    its_state = rf.torch.shared_state(newcomer, its_optimizer)
    assert structure(state) == structure(its_state)
    checkpoints = rf.Checkpoints(tmp_path)
    checkpoints.save(state)
    checkpoints.load_newest(its_state)
    assert bits(newcomer) == bits(model)
    train(model, optimizer, age, age + 10)
    train(newcomer, its_optimizer, age, age + 10)
    assert bits(newcomer) == bits(model)
    assert flat(its_optimizer.state_dict()["param_groups"]) == flat(optimizer.state_dict()["param_groups"])


@pytest.mark.parametrize(("kind", "options"), CASES)
def test_a_trained_peer_that_loads_a_fresh_state_is_fresh(kind: Any, options: dict[str, Any], tmp_path: Path) -> None:  # noqa: ANN401
    model, optimizer = build(kind, options)
    rf.Checkpoints(tmp_path).save(rf.torch.shared_state(model, optimizer))
    trained, its_optimizer = build(kind, options, seed=1)
    its_state = rf.torch.shared_state(trained, its_optimizer)
    train(trained, its_optimizer, 0, 5)
    rf.Checkpoints(tmp_path).load_newest(its_state)
    train(model, optimizer, 0, 5)
    train(trained, its_optimizer, 0, 5)
    assert bits(trained) == bits(model)


def test_tensors_that_load_state_dict_binds_are_found() -> None:
    model, optimizer = build(torch.optim.Adam, {})
    state = rf.torch.shared_state(model, optimizer)
    train(model, optimizer, 0, 3)
    before = Snapshot.take(state).manifest
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    train(model, optimizer, 3, 4)
    after = Snapshot.take(state)
    assert [key.name for key in after.manifest.keys] == [key.name for key in before.keys]
    assert state.arrays["optimizer.exp_avg.model.0.weight"].data_ptr() == (  # type: ignore[attr-defined]
        optimizer.state[model[0].weight]["exp_avg"].data_ptr()
    )


def test_parameters_that_the_optimizer_no_longer_updates_are_an_error() -> None:
    model, optimizer = build(torch.optim.Adam, {})
    state = rf.torch.shared_state(model, optimizer)
    model.load_state_dict(copy.deepcopy(model.state_dict()), assign=True)
    with pytest.raises(rf.UsageError, match="in no module"):
        Snapshot.take(state)


def test_lbfgs_is_an_error_that_names_it() -> None:
    model = torch.nn.Linear(2, 2)
    with pytest.raises(rf.UsageError, match="LBFGS"):
        rf.torch.shared_state(model, torch.optim.LBFGS(model.parameters()))


class Lookahead(torch.optim.Optimizer):  # type: ignore[name-defined,misc]  # torch's types are not there
    """An optimizer of a program: a counter that is a number, one in its groups, and a lazily created tensor."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:  # noqa: ANN401
        super().__init__(params, {"lr": lr, "turns": 0})

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def step(self) -> None:
        for group in self.param_groups:
            group["turns"] += 1
            for param in group["params"]:
                if param.grad is None:
                    continue
                state = self.state[param]
                if not state:
                    state.update(count=0, slow=param.clone())
                state["count"] += 1
                param -= group["lr"] * param.grad
                if state["count"] % 3 == 0:
                    state["slow"] += 0.5 * (param - state["slow"])
                    param.copy_(state["slow"])


def test_an_optimizer_of_the_program(tmp_path: Path) -> None:
    test_sharing_leaves_no_trace(Lookahead, {}, 2)
    test_a_fresh_peer_that_loads_goes_on_with_equal_bits(Lookahead, {}, 4, tmp_path)


class Broken(torch.optim.Optimizer):  # type: ignore[name-defined,misc]
    """Cannot step without a closure."""

    def step(self, closure: Any) -> Any:  # noqa: ANN401
        return closure()


def test_an_optimizer_that_cannot_step_is_an_error_that_names_it() -> None:
    model = torch.nn.Linear(2, 2)
    with pytest.raises(rf.UsageError, match=r"'optimizer' \(Broken\) cannot be shared: .*closure"):
        rf.torch.shared_state(model, Broken(model.parameters(), {}))
    assert all(param.grad is None for param in model.parameters())


class Counting(torch.optim.SGD):  # type: ignore[name-defined,misc]
    """Has a counter for all parameters in its state."""

    def step(self) -> None:
        self.state["turns"] = self.state.get("turns", 0) + 1


def test_a_state_that_belongs_to_no_parameter_is_an_error_that_names_it() -> None:
    model = torch.nn.Linear(2, 2)
    optimizer = Counting(model.parameters(), lr=0.1)
    with pytest.raises(rf.UsageError, match=r"\(Counting\) keeps 'turns' in its state"):
        rf.torch.shared_state(model, optimizer)
    assert not optimizer.state


def test_frozen_parameters_have_the_same_keys_as_others() -> None:
    model, optimizer = build(torch.optim.AdamW, {})
    keys = structure(rf.torch.shared_state(model, optimizer))
    model.requires_grad_(False)
    assert structure(rf.torch.shared_state(model, optimizer)) == keys
    assert not any(param.requires_grad for param in model.parameters())


def test_moments_of_a_bfloat16_model_are_shared_as_they_are(tmp_path: Path) -> None:
    models = [build(torch.optim.AdamW, {}, seed)[0].bfloat16() for seed in (0, 1)]
    optimizers = [torch.optim.AdamW(each.parameters()) for each in models]
    states = [rf.torch.shared_state(*pair) for pair in zip(models, optimizers, strict=True)]
    for param in models[0].parameters():
        param.grad = torch.ones_like(param)
    optimizers[0].step()
    rf.Checkpoints(tmp_path).save(states[0])
    rf.Checkpoints(tmp_path).load_newest(states[1])
    for one, other in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert torch.equal(optimizers[0].state[one]["exp_avg"], optimizers[1].state[other]["exp_avg"])
        assert optimizers[1].state[other]["exp_avg"].dtype == torch.bfloat16


def test_a_model_that_was_moved_to_another_dtype_has_stand_ins_of_that_dtype() -> None:
    model, optimizer = build(torch.optim.AdamW, {})
    state = rf.torch.shared_state(model, optimizer)
    model.double()
    assert {dtype for name, dtype, *_ in structure(state) if ".exp_avg." in name} == {"float64"}


def test_a_setting_that_needs_another_state_is_an_error() -> None:
    model, optimizer = build(torch.optim.SGD, {"lr": 0.1})
    state = rf.torch.shared_state(model, optimizer)
    optimizer.param_groups[0]["momentum"] = 0.9
    train(model, optimizer, 0, 1)
    with pytest.raises(rf.UsageError, match="unexpected 'momentum_buffer'"):
        Snapshot.take(state)


def test_a_parameter_outside_of_the_state_is_an_error() -> None:
    model, head = torch.nn.Linear(2, 2), torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD([*model.parameters(), *head.parameters()], lr=0.1)
    with pytest.raises(rf.UsageError, match="parameter 2 of 'optimizer'"):
        rf.torch.shared_state(model, optimizer)
    assert len(rf.torch.shared_state(model, optimizer, head=head)) > 4


def test_a_group_that_is_added_later_is_shared() -> None:
    model, head = torch.nn.Linear(2, 2), torch.nn.Linear(2, 1)
    optimizer = torch.optim.Adam(model.parameters())
    state = rf.torch.shared_state(model, optimizer, head=head)
    optimizer.add_param_group({"params": head.parameters(), "lr": 0.5})
    Snapshot.take(state)
    assert "optimizer.exp_avg.head.weight" in state.arrays


def test_no_hook_is_called_after_torch_compile() -> None:
    """torch.compile wraps the steps of some optimizers once more."""
    torch.compile(torch.nn.Linear(2, 2), backend="eager")(torch.zeros(1, 2))
    model, optimizer = build(torch.optim.SparseAdam, {})
    called: list[object] = []
    optimizer.register_step_pre_hook(lambda *_: called.append(1))
    Snapshot.take(rf.torch.shared_state(model, optimizer))
    assert called == []
