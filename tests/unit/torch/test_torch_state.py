"""What else a shared state of torch holds: parameters, buffers, schedulers, a scaler, averages, generators."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ringfold as rf
from ringfold.state.shared import set_torn
from ringfold.state.snapshot import Snapshot

torch = pytest.importorskip("torch", reason="needs PyTorch (ringfold[torch])")


def copied(source: rf.SharedState, target: rf.SharedState, folder: Path) -> None:
    """Make `target` what `source` is."""
    rf.Checkpoints(folder).save(source)
    rf.Checkpoints(folder).load_newest(target)


def digest(state: rf.SharedState) -> list[bytes]:
    return [key.root for key in Snapshot.take(state).manifest.keys]


def test_names_are_those_of_the_state_dict() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3))
    state = rf.torch.shared_state(model)
    assert list(state) == sorted(f"model.{name}" for name in model.state_dict())
    assert isinstance(state, rf.SharedState)


def test_objects_come_in_any_order_and_by_keyword() -> None:
    model, other = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    state = rf.torch.shared_state(optimizer, model, other, seen=np.zeros(3), mine=rf.MayDiffer(torch.zeros(2)))
    assert {"model.weight", "model2.weight", "optimizer.groups", "seen", "mine"} <= set(state)
    assert state.may_differ("mine")


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of what torch.compile imports
def test_a_compiled_model_has_the_names_of_the_model() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    model[1] = torch.compile(model[1], backend="eager")
    assert list(rf.torch.shared_state(torch.compile(model, backend="eager"))) == [
        "model.0.bias",
        "model.0.weight",
        "model.1.bias",
        "model.1.weight",
    ]


class Tied(torch.nn.Module):  # type: ignore[name-defined,misc]  # torch's types are not there
    """A tied weight, a buffer that state_dict has, one that it has not, and a number without dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(5, 3)
        self.head = torch.nn.Linear(3, 5, bias=False)
        self.head.weight = self.embed.weight
        self.scale = torch.nn.Parameter(torch.tensor(2.0, dtype=torch.bfloat16))
        self.register_buffer("table", torch.arange(4))
        self.register_buffer("cache", torch.zeros(7), persistent=False)


def test_tied_weights_are_shared_once_and_what_state_dict_leaves_out_is_not() -> None:
    state = rf.torch.shared_state(Tied())
    facts = {"tied model.head.weight = model.embed.weight"}
    assert set(state) == {"model.embed.weight", "model.scale", "model.table"} | facts


def test_a_model_that_ties_other_weights_has_another_structure() -> None:
    untied = Tied()
    untied.head.weight = torch.nn.Parameter(untied.embed.weight.detach().clone())
    assert set(rf.torch.shared_state(untied)) != set(rf.torch.shared_state(Tied()))


def test_channels_last_is_shared_in_place(tmp_path: Path) -> None:
    model = torch.nn.Conv2d(3, 4, 2).to(memory_format=torch.channels_last)
    other = torch.nn.Conv2d(3, 4, 2).to(memory_format=torch.channels_last)
    optimizer, its = torch.optim.Adam(model.parameters()), torch.optim.Adam(other.parameters())
    state, its_state = rf.torch.shared_state(model, optimizer), rf.torch.shared_state(other, its)
    model(torch.ones(1, 3, 4, 4)).sum().backward()
    optimizer.step()
    copied(state, its_state, tmp_path)
    assert torch.equal(model.weight, other.weight)
    assert other.weight.stride() == model.weight.stride()
    assert torch.equal(optimizer.state[model.weight]["exp_avg"], its.state[other.weight]["exp_avg"])
    assert "layout model.weight = 0,2,3,1" in state
    with pytest.raises(rf.UsageError, match=r"layout model\.weight"):
        copied(state, rf.torch.shared_state(torch.nn.Conv2d(3, 4, 2)), tmp_path)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: torch.nn.Linear(2, 2, bias=False, device="meta"), "'model.weight' is a tensor without plain memory"),
        (lambda: torch.nn.LazyLinear(2, bias=False), "'model.weight' has no shape yet"),
        (lambda: _with_buffer(torch.eye(3).to_sparse()), "'model.own' is a tensor without plain memory"),
        (lambda: _with_buffer(torch.zeros(3).expand(4, 3)), "'model.own' is not dense in memory"),
    ],
)
def test_a_tensor_without_memory_of_its_own_is_an_error_that_names_it(make: Callable[[], Any], text: str) -> None:
    with pytest.raises(rf.UsageError, match=text):
        rf.torch.shared_state(make())


def _with_buffer(tensor: Any) -> Any:  # noqa: ANN401
    module = torch.nn.Module()
    module.register_buffer("own", tensor)
    return module


def test_a_distributed_tensor_is_an_error_that_names_it() -> None:
    class Sharded(torch.nn.Parameter):  # type: ignore[name-defined,misc]
        def to_local(self) -> Any:  # noqa: ANN401
            return self

    module = torch.nn.Module()
    module.own = Sharded(torch.zeros(2))
    with pytest.raises(rf.UsageError, match=r"'model\.own' is a DTensor"):
        rf.torch.shared_state(module)


def test_statistics_are_each_peers_own_unless_they_are_shared(tmp_path: Path) -> None:
    names = {f"model.{name}" for name in ("running_mean", "running_var", "num_batches_tracked")}
    model, other = torch.nn.BatchNorm1d(3), torch.nn.BatchNorm1d(3)
    own, shared = rf.torch.shared_state(model), rf.torch.shared_state(other, statistics="shared")
    assert {name for name in own if own.may_differ(name)} == names
    assert not any(shared.may_differ(name) for name in shared)
    before = digest(own), digest(shared)
    model(torch.randn(4, 3))
    other(torch.randn(4, 3))
    assert digest(own) == before[0]
    assert digest(shared) != before[1]


class OneStep:
    """A step of a group of two, whose other member has ones."""

    def all_reduce(self, buffers: Any, *, op: str, tag: int) -> str:  # noqa: ANN401
        for each in buffers:
            each.copy_((each + 1) / 2 if op == "avg" else each.clamp(min=1))
        return op


def test_statistics_are_averaged_and_their_counts_are_not() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.BatchNorm1d(3))
    state = rf.torch.shared_state(model, statistics="shared")
    step: Any = OneStep()
    state.average_statistics(step)
    assert model[1].running_mean.tolist() == [0.5] * 3
    assert model[1].num_batches_tracked.item() == 1
    assert rf.torch.shared_state(torch.nn.Linear(2, 2)).average_statistics(step) is None


def trainer(make: Callable[[Any], Any], lr: Any = 0.1) -> tuple[Any, Any, Any, Any]:  # noqa: ANN401
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    scheduler = make(optimizer)
    return model, optimizer, scheduler, rf.torch.shared_state(model, optimizer, scheduler)


lr_scheduler = torch.optim.lr_scheduler
SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "step": lambda of: lr_scheduler.StepLR(of, 2),
    "multistep": lambda of: lr_scheduler.MultiStepLR(of, [2, 2, 4]),
    "lambda": lambda of: lr_scheduler.LambdaLR(of, lambda number: 0.9**number),
    "plateau": lambda of: lr_scheduler.ReduceLROnPlateau(of, patience=0),
    "onecycle": lambda of: lr_scheduler.OneCycleLR(of, 1.0, total_steps=50),
    "cyclic": lambda of: lr_scheduler.CyclicLR(of, 0.1, 1.0),
    "restarts": lambda of: lr_scheduler.CosineAnnealingWarmRestarts(of, 3),
    "sequential": lambda of: lr_scheduler.SequentialLR(
        of, [lr_scheduler.LinearLR(of), lr_scheduler.CosineAnnealingLR(of, 9)], [3]
    ),
    "chained": lambda of: lr_scheduler.ChainedScheduler(
        [lr_scheduler.LinearLR(of), lr_scheduler.ExponentialLR(of, 0.9)]
    ),
}


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("lr", [0.1, torch.tensor(0.1)], ids=["float", "tensor"])
@pytest.mark.parametrize("make", SCHEDULERS.values(), ids=SCHEDULERS.keys())
def test_a_scheduler_goes_on_where_the_other_is(make: Callable[[Any], Any], lr: Any, tmp_path: Path) -> None:  # noqa: ANN401
    def rates(optimizer: Any, scheduler: Any, count: int) -> list[float]:  # noqa: ANN401
        found = []
        for number in range(count):
            optimizer.step()
            scheduler.step(*([1.0 + number % 3] if isinstance(scheduler, lr_scheduler.ReduceLROnPlateau) else []))
            found.append(float(optimizer.param_groups[0]["lr"]))
        return found

    clone = getattr(lr, "clone", lambda: lr)
    _, optimizer, scheduler, state = trainer(make, clone())
    _, its_optimizer, its_scheduler, its_state = trainer(make, clone())
    kept = its_optimizer.param_groups[0]["lr"]
    rates(optimizer, scheduler, 5)
    copied(state, its_state, tmp_path)
    assert its_optimizer.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"]
    assert kept is its_optimizer.param_groups[0]["lr"] or not isinstance(lr, torch.Tensor)
    assert rates(its_optimizer, its_scheduler, 8) == rates(optimizer, scheduler, 8)
    assert digest(its_state) == digest(state)


def test_a_scheduler_with_other_settings_in_text_has_another_structure(tmp_path: Path) -> None:
    *_, state = trainer(lambda of: lr_scheduler.ReduceLROnPlateau(of, mode="min"))
    *_, other = trainer(lambda of: lr_scheduler.ReduceLROnPlateau(of, mode="max"))
    with pytest.raises(rf.UsageError, match=r"text scheduler.mode = '(min|max)'"):
        copied(state, other, tmp_path)


class Strange:
    """Its state is no tree of numbers."""

    def state_dict(self) -> dict[str, object]:
        return {"found": {1, 2}}

    def load_state_dict(self, state: object) -> None:
        raise AssertionError(state)


def test_what_is_no_number_is_an_error_that_names_it() -> None:
    with pytest.raises(rf.UsageError, match=r"'counts.found' is a set"):
        rf.torch.shared_state(counts=Strange())
    with pytest.raises(rf.UsageError, match="'what' is a str"):
        rf.torch.shared_state(what="nothing")
    with pytest.raises(rf.UsageError, match="a Tensor in a shared state needs a name"):
        rf.torch.shared_state(torch.zeros(2))


def test_a_scaler_goes_on_where_the_other_is(tmp_path: Path) -> None:
    scaler, other = (torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2) for _ in range(2))
    state, its_state = rf.torch.shared_state(scaler), rf.torch.shared_state(other)
    scaler.scale(torch.ones(1))
    scaler.update(32.0)
    copied(state, its_state, tmp_path)
    assert other.state_dict() == scaler.state_dict()
    assert float(other.scale(torch.ones(1))) == 32.0


def test_an_average_of_the_model_is_shared(tmp_path: Path) -> None:
    model, other = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    ema, its = (torch.optim.swa_utils.AveragedModel(each) for each in (model, other))
    state, its_state = rf.torch.shared_state(model, ema), rf.torch.shared_state(other, its)
    for _ in range(3):
        ema.update_parameters(model)
    copied(state, its_state, tmp_path)
    assert its.n_averaged.item() == 3
    assert torch.equal(its.module.weight, ema.module.weight)
    assert "ema.module.weight" in state


def test_generators_are_shared_saved_or_left_alone(tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 2)
    assert "rng.cpu" not in rf.torch.shared_state(model)
    saved = rf.torch.shared_state(model, rng="own")
    assert saved.may_differ("rng.cpu")
    assert not rf.torch.shared_state(model, rng="shared").may_differ("rng.cpu")
    with torch.random.fork_rng():
        torch.manual_seed(5)
        rf.Checkpoints(tmp_path).save(saved)
        drawn = torch.rand(3)
        rf.Checkpoints(tmp_path).load_newest(saved)
        assert torch.equal(torch.rand(3), drawn)


@pytest.mark.parametrize(("name", "value"), [("statistics", "some"), ("rng", "none")])
def test_an_unknown_policy_is_an_error(name: str, value: Any) -> None:  # noqa: ANN401
    with pytest.raises(rf.UsageError, match=f"{name} is one of own, shared"):
        rf.torch.shared_state(torch.nn.Linear(2, 2), **{name: value})


def test_a_sync_that_fails_half_way_gives_no_garbage_to_the_objects() -> None:
    """What was written into the packed arrays is gone at the next read, unless the sync has ended."""
    _, optimizer, _, state = trainer(SCHEDULERS["step"])
    before = digest(state)
    for name in ("optimizer.groups", "optimizer.begun", "scheduler"):
        array = state.arrays[name]
        assert isinstance(array, np.ndarray)
        array[...] = 77
    set_torn(state, True)
    assert digest(state) == before
    assert optimizer.param_groups[0]["lr"] == 0.1
    assert not optimizer.state


def test_loading_with_another_hash_keeps_what_was_loaded(tmp_path: Path) -> None:
    """The digest of what was loaded is then computed from the state itself."""
    pytest.importorskip("blake3", reason="needs blake3 (ringfold[blake3])")
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    rf.Checkpoints(tmp_path).save(rf.torch.shared_state(model, optimizer, hash="blake3"))
    optimizer.param_groups[0]["lr"] = 0.1
    rf.Checkpoints(tmp_path).load_newest(rf.torch.shared_state(model, optimizer))
    assert optimizer.param_groups[0]["lr"] == 0.5


def test_a_state_of_thousands_of_tensors_is_read_quickly() -> None:
    """No time is measured here; the number of keys is: scalars of all parameters are together."""
    model = torch.nn.ModuleList(torch.nn.Linear(2, 2) for _ in range(500))
    optimizer = torch.optim.Adam(model.parameters())
    state = rf.torch.shared_state(model, optimizer)
    assert len(state) == 1000 + 2000 + 3


def test_importing_ringfold_does_not_import_torch() -> None:
    code = "import sys, ringfold; ringfold.SharedState; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_without_torch_the_error_says_what_to_install() -> None:
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "import ringfold\n"
        "try: ringfold.torch\n"
        "except ImportError as error: assert 'pip install ringfold[torch]' in str(error), error\n"
        "else: raise AssertionError\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
