"""A model, its optimizer and all else that training changes, as one shared state.

Each object that is shared is a *component*. Before a sync or a save reads the state, `arrays` of each component gives
the arrays as they are then: tensors are looked up again every time, because `load_state_dict`, `.to()` and the first
step of an optimizer bind other ones. What is no tensor is packed into arrays. After a sync or a load, `apply` gives
what was written to the objects. If a sync fails half-way, `apply` is not called: parameters may then be partly written,
which the state knows (`torn`), and all else is as before.
"""

from collections.abc import Iterator
from typing import Any, Literal, Protocol, cast, get_args

import numpy as np
import torch

from ringfold.errors import UsageError
from ringfold.limits import MAX_KEYS
from ringfold.peer.outcome import ReduceInfo
from ringfold.peer.steps import Step
from ringfold.state.shared import HasSharedArrays, MayDiffer, SharedState
from ringfold.torch.data_parallel import DataParallel
from ringfold.torch.number_trees import pack, unpack
from ringfold.torch.optimizers import OptimizerComponent
from ringfold.torch.tensors import Arrays, add_array, fact
from ringfold.wire.messages import HashKind

Statistics = Literal["own", "shared"]
Rng = Literal["own", "shared"]

_COMPILED = "_orig_mod."
"""What `torch.compile` puts into the names of a module's parameters."""


class Component(Protocol):
    """One shared object."""

    def arrays(self) -> Arrays: ...
    def apply(self) -> None: ...


def shared_state(
    *objects: object,
    statistics: Statistics = "own",
    rng: Rng | None = None,
    revision: int = 0,
    hash: HashKind = "rf64",
    **named: object,
) -> "TorchState":
    """Everything that training changes, as a `SharedState`: `rf.torch.shared_state(model, optimizer, scheduler)`.

    The objects, in any order or by keyword, are modules (also `AveragedModel`, and the one inside a `DataParallel`
    or torch's `DistributedDataParallel`), optimizers, schedulers, a `GradScaler`, and whatever else has
    `state_dict` and `load_state_dict` with numbers in it. Tensors, arrays and `MayDiffer` need a keyword, which is
    their name. Without one the others are named `model`, `ema`, `optimizer`, `scheduler`, `scaler` and `extra`; a
    second one is `model2`. Names must be the same on all peers, and so must the order of objects without a keyword.
    All objects keep their identity, and nothing about them changes here: the first step of a fresh optimizer has
    the same bits as without Ringfold.

    Shared are parameters, buffers that `state_dict` has, the state of optimizers (also if their first step is still to
    come), the settings in their parameter groups, and the numbers in the other objects. Text and functions among them
    must be the same on all peers.

    `statistics` says what becomes of the running statistics of BatchNorm, which differ because each peer sees other
    batches. "own": each peer keeps its own, in checkpoints, too, and a new peer begins with fresh ones. "shared": they
    must be the same bits on all peers, which `state.average_statistics(step)` in every step ensures.

    `rng` says what becomes of torch's random generators. None: they are not part of the state. "own": checkpoints have
    them. "shared": all peers have the same, so that all draw the same numbers.

    `revision` and `hash` are those of `SharedState`.
    """
    for name, value, kinds in (("statistics", statistics, Statistics), ("rng", rng, Rng)):
        if value not in get_args(kinds) and not (name == "rng" and value is None):
            raise UsageError(f"{name} is one of {', '.join(get_args(kinds))}, not {value!r}")
    given = _named(objects, named)
    if not given:
        raise UsageError("a shared state needs at least one module, optimizer or tensor")
    return TorchState(given, statistics=statistics, rng=rng, revision=revision, hash=hash)


class TorchState(SharedState):
    """A `SharedState` of torch's objects; `shared_state` makes it."""

    def __init__(
        self,
        objects: dict[str, object],
        *,
        statistics: Statistics = "own",
        rng: Rng | None = None,
        revision: int = 0,
        hash: HashKind = "rf64",
    ) -> None:
        self._names: dict[int, str] = {}
        self._modules: list[_ModuleComponent] = []
        self._components: list[Component] = []
        optimizers: dict[str, object] = {}
        for name, each in objects.items():
            if isinstance(each, torch.nn.Module):
                if isinstance(each, DataParallel):
                    self._components.append(_ArrayComponent(f"buckets.{name}", each.order, self._names))
                    each.is_order_shared = True
                self._modules.append(_ModuleComponent(name, _unwrapped(each), self._names, statistics))
                self._components.append(self._modules[-1])
            elif _is_optimizer(each):
                optimizers[name] = each
            elif _is_array(each):
                self._components.append(_ArrayComponent(name, each, self._names))
            else:
                self._components.append(_NumbersComponent(name, each))
        # After all tensors that they may update have names.
        self._components += [OptimizerComponent(name, each, self._names) for name, each in optimizers.items()]
        if rng is not None:
            self._components.append(_RngComponent("rng", self._modules, is_shared=rng == "shared"))
        self._fill(self._collected(), revision, hash)

    def average_statistics(self, step: Step, tag: int = 0) -> ReduceInfo | None:
        """Average the running statistics of all BatchNorm layers over the peers; None if there are none.

        Call it in each step with `statistics="shared"`: two more ops, small ones.
        """
        found = [each for component in self._modules for each in component.statistics()]
        counts = [each for each in found if not each.is_floating_point()]
        averaged = [each for each in found if each.is_floating_point()]
        info = step.all_reduce(averaged, op="avg", tag=tag) if averaged else None
        return step.all_reduce(counts, op="max", tag=tag) if counts else info

    def _collected(self) -> Arrays:
        self._names.clear()
        arrays: Arrays = {}
        for component in self._components:
            more = component.arrays()
            if twice := arrays.keys() & more.keys():
                raise UsageError(f"the shared state has two arrays named {min(twice)!r}; rename one of its objects")
            arrays |= more
        if len(arrays) > MAX_KEYS:
            raise UsageError(f"a shared state has at most {MAX_KEYS} arrays, not {len(arrays)}")
        return arrays

    def _before_read(self) -> None:
        self._bind(self._collected())

    def _after_write(self) -> None:
        for component in self._components:
            component.apply()


class _ModuleComponent:
    """The parameters and the persistent buffers of a module. Tensors that several names refer to are shared once."""

    def __init__(self, name: str, module: torch.nn.Module, names: dict[int, str], statistics: Statistics) -> None:
        self._name, self._module, self._names = name, module, names
        self._owns_statistics = statistics == "own"

    def arrays(self) -> Arrays:
        found: Arrays = {}
        for name, tensor, is_statistic in self._tensors():
            key = f"{self._name}.{name}"
            if (first := self._names.setdefault(id(tensor), key)) != key:
                found |= fact("tied", key, first)
            else:
                add_array(found, key, tensor)
                if is_statistic and self._owns_statistics:
                    found[key] = MayDiffer(found[key])
        return found

    def apply(self) -> None:
        """The tensors themselves were written."""

    def statistics(self) -> list[torch.Tensor]:
        """The running statistics, each once."""
        return list({id(tensor): tensor for _, tensor, is_statistic in self._tensors() if is_statistic}.values())

    def _tensors(self) -> Iterator[tuple[str, torch.Tensor, bool]]:
        """Name, tensor, and whether it is a running statistic, by the names of `state_dict`."""
        for path, module in self._module.named_modules(remove_duplicate=False):
            prefix = f"{path}." if path else ""
            prefix = prefix.replace(_COMPILED, "")
            is_norm = isinstance(module, torch.nn.modules.batchnorm._NormBase)
            for name, tensor in module._parameters.items():
                if tensor is not None:
                    yield prefix + name, tensor, False
            for name, tensor in module._buffers.items():
                if tensor is not None and name not in module._non_persistent_buffers_set:
                    yield prefix + name, tensor, is_norm


class _ArrayComponent:
    """A tensor, an array or a sampler by a name."""

    def __init__(self, name: str, array: object, names: dict[int, str]) -> None:
        self._name, self._names = name, names
        self._array, self._differs = (array.array, True) if isinstance(array, MayDiffer) else (array, False)

    def arrays(self) -> Arrays:
        if (first := self._names.setdefault(id(self._array), self._name)) != self._name:
            return fact("tied", self._name, first)
        found: Arrays = {self._name: self._array}
        if isinstance(self._array, torch.Tensor):
            add_array(found, self._name, self._array)
        if self._differs:
            found[self._name] = MayDiffer(found[self._name])
        return found

    def apply(self) -> None:
        """The array itself was written."""


class _NumbersComponent:
    """An object whose state is a tree of numbers: a scheduler, a scaler."""

    def __init__(self, name: str, of: Any) -> None:  # noqa: ANN401  # anything with a state_dict
        self._name, self._of = name, of
        self._tree: Any = None
        self._rows = self._before = np.zeros((0, 2), np.int64)

    def arrays(self) -> Arrays:
        self._tree = self._of.state_dict()
        self._rows, facts = pack(self._tree, self._name)
        self._before = self._rows.copy()
        return {self._name: self._rows, **facts}

    def apply(self) -> None:
        if (self._rows != self._before).any():
            self._of.load_state_dict(unpack(self._tree, self._rows))


class _RngComponent:
    """The state of torch's default generators: on the CPU, and on the device of the first parameter."""

    def __init__(self, name: str, modules: list[_ModuleComponent], *, is_shared: bool) -> None:
        self._name, self._modules, self._is_shared = name, modules, is_shared
        self._states: dict[str, torch.Tensor] = {}
        self._before: dict[str, torch.Tensor] = {}

    def arrays(self) -> Arrays:
        self._states = {f"{self._name}.cpu": torch.get_rng_state()}
        if self._on_cuda():
            self._states[f"{self._name}.cuda"] = torch.cuda.get_rng_state()
        self._before = {key: each.clone() for key, each in self._states.items()}
        return {key: each if self._is_shared else MayDiffer(each) for key, each in self._states.items()}

    def apply(self) -> None:
        for key, state in self._states.items():
            if not torch.equal(state, self._before[key]):
                (torch.cuda.set_rng_state if key.endswith(".cuda") else torch.set_rng_state)(state)

    def _on_cuda(self) -> bool:
        return any(tensor.is_cuda for component in self._modules for _, tensor, _ in component._tensors())


# What an object is


def _unwrapped(module: torch.nn.Module) -> torch.nn.Module:
    """The module inside a wrapper for data parallel training: its names are those of the program."""
    wrappers = (DataParallel, torch.nn.parallel.DistributedDataParallel)
    return cast(torch.nn.Module, module.module) if isinstance(module, wrappers) else module


def _named(objects: tuple[object, ...], named: dict[str, object]) -> dict[str, object]:
    """All objects by name; those without a keyword are named after their kind."""
    found = dict(named)
    for each in objects:
        kind = _kind(each)
        if kind is None:
            raise UsageError(f"a {type(each).__name__} in a shared state needs a name: shared_state(..., name=x)")
        name, number = kind, 1
        while name in found:
            number += 1
            name = f"{kind}{number}"
        found[name] = each
    for name, each in found.items():
        if _kind(each) is None and not _is_array(each):
            raise UsageError(
                f"{name!r} is a {type(each).__name__}: neither a module, an optimizer, a tensor or an array, nor an "
                "object with state_dict and load_state_dict"
            )
    return found


def _kind(each: object) -> str | None:
    """The name that an object gets if it is given none; None for what needs one."""
    if isinstance(each, torch.nn.Module):
        return "ema" if isinstance(each, torch.optim.swa_utils.AveragedModel) else "model"
    if _is_optimizer(each):
        return "optimizer"
    if isinstance(each, torch.optim.lr_scheduler.LRScheduler):
        return "scheduler"
    if isinstance(each, torch.amp.GradScaler):
        return "scaler"
    if isinstance(each, HasSharedArrays):
        return "data"
    return "extra" if hasattr(each, "state_dict") and hasattr(each, "load_state_dict") else None


def _is_optimizer(each: object) -> bool:
    return all(hasattr(each, name) for name in ("param_groups", "state", "step"))


def _is_array(each: object) -> bool:
    return isinstance(each, torch.Tensor | MayDiffer | HasSharedArrays) or (
        not hasattr(each, "state_dict") and (hasattr(each, "__array__") or hasattr(each, "__dlpack__"))
    )
