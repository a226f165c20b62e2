"""An optimizer as arrays: the state of each parameter, and the numbers of the parameter groups.

Most optimizers create the state of a parameter in the first step that has a gradient for it. A state must have the same
keys on a peer that has just begun and on one that has trained for a week, so the *layout* of that state is found
beforehand: the optimizer steps once with its own settings, but on zeros instead of the parameters and with an empty
state. Nothing of that step is kept but names, shapes, dtypes and devices.

Each parameter has a flag that says whether its state has *begun*. Where it has, the optimizer's own tensors are shared.
Where it has not, zeros stand in for them until the end of the sync. A peer that receives a state that has begun gives
the stand-ins, which are then filled, to its optimizer. The optimizer of a fresh run keeps its empty state, so its first
step is exactly the one that it would have made without Ringfold.

Tensors without dimensions (step counters) are shared together, as one array for each dtype.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeGuard

import numpy as np
import torch

from ringfold.errors import UsageError
from ringfold.torch.number_trees import Rows, pack, unpack
from ringfold.torch.tensors import Arrays, add_array

_GROUP_KEYS_LEFT_OUT = ("params", "param_names")


@dataclass(frozen=True, slots=True)
class TensorLayout:
    """A tensor of a parameter's state, without its content."""

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    def zeros(self) -> torch.Tensor:
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=self.device).zero_()


Layout = dict[str, "TensorLayout | type | None"]
"""The state of one parameter: per name a tensor, the type of a number, or None."""


class OptimizerComponent:
    """An optimizer in a shared state. `names` has the keys of the tensors in the state, by identity."""

    def __init__(self, name: str, optimizer: Any, names: Mapping[int, str]) -> None:  # noqa: ANN401  # torch's types are not there
        self.name, self.optimizer = name, optimizer
        self._names = names
        self._signature: object = None
        self._layouts: list[Layout] = []
        self._stand_ins: dict[int, dict[str, torch.Tensor]] = {}
        self._packed: dict[str, Any] = {}
        """What is shared as a copy: numbers, flags, and tensors without dimensions."""
        self._before: dict[str, bytes] = {}
        """The same as it was read, to see what was written."""

    def arrays(self) -> Arrays:
        """The optimizer as it is now."""
        params = self._params()
        signature = [(id(each), each.shape, each.dtype, each.device) for each in params]
        if signature != self._signature:
            self._layouts = find_layouts(self.optimizer, self.name, params)
            self._signature = signature
        groups, arrays = pack(self._groups(), f"{self.name}.groups")
        self._stand_ins = {}
        begun = np.zeros(len(params), np.uint8)
        scalars: dict[torch.dtype, list[torch.Tensor]] = defaultdict(list)
        numbers: list[Any] = []
        for index, (param, layout) in enumerate(zip(params, self._layouts, strict=True)):
            live = self._live(index, param)
            begun[index] = live is not None
            stand_ins: dict[str, torch.Tensor] = {}
            for key, what in layout.items():
                if isinstance(what, TensorLayout):
                    tensor = what.zeros() if live is None else live[key]
                    if live is None:
                        stand_ins[key] = tensor
                    if what.shape:
                        add_array(arrays, f"{self.name}.{key}.{self._names[id(param)]}", tensor)
                    else:
                        scalars[what.dtype].append(tensor)
                elif what is not None:
                    numbers.append(0 if live is None else live[key])
            if live is None:
                self._stand_ins[index] = stand_ins
        self._packed = {f"{self.name}.groups": groups}
        if any(self._layouts):
            self._packed[f"{self.name}.begun"] = begun
        if numbers:
            self._packed[f"{self.name}.numbers"] = pack(numbers, f"{self.name}.numbers")[0]
        for dtype, tensors in scalars.items():
            self._packed[self._scalars_of(dtype)] = _gathered(tensors, dtype)
        self._before = {key: _bits(array) for key, array in self._packed.items()}
        return arrays | self._packed

    def apply(self) -> None:
        """Give the optimizer what was written. Cheap if nothing was."""
        params = self._params()
        if self._is_written(f"{self.name}.groups"):
            self._set_groups(self._packed[f"{self.name}.groups"])
        if any(self._is_written(key) for key in self._packed):
            self._set_states(params)
        self._stand_ins = {}

    def _is_written(self, key: str) -> bool:
        return _bits(self._packed[key]) != self._before[key]

    def _params(self) -> list[torch.Tensor]:
        params = [param for group in self.optimizer.param_groups for param in group["params"]]
        for number, param in enumerate(params):
            if id(param) not in self._names:
                raise UsageError(
                    f"parameter {number} of {self.name!r} (shape {list(param.shape)}) is in no module of the shared "
                    "state; pass the module, or the tensor by a name"
                )
        return params

    def _scalars_of(self, dtype: torch.dtype) -> str:
        return f"{self.name}.scalars.{str(dtype).removeprefix('torch.')}"

    def _groups(self) -> list[dict[str, Any]]:
        return [
            {key: value for key, value in group.items() if key not in _GROUP_KEYS_LEFT_OUT}
            for group in self.optimizer.param_groups
        ]

    def _set_groups(self, rows: Rows) -> None:
        for group, values in zip(self.optimizer.param_groups, unpack(self._groups(), rows), strict=True):
            group.update(values)

    def _live(self, index: int, param: torch.Tensor) -> dict[str, Any] | None:
        """The state of a parameter; None if it has not begun. An error if it does not have its layout."""
        state, layout = self.optimizer.state.get(param), self._layouts[index]
        if not state or all(value is None for value in state.values()):
            return None
        wrong = state.keys() ^ layout.keys()
        for key, what in layout.items():
            if type(what) is TensorLayout and key not in wrong:
                value = state[key]
                if not isinstance(value, torch.Tensor) or value.dim() != len(what.shape):
                    wrong.add(key)
        if wrong:
            raise UsageError(
                f"{self.name!r} has an unexpected {min(wrong)!r} in its state of {self._names[id(param)]!r}: after a "
                "change of settings that need another state, call shared_state again"
            )
        return state  # type: ignore[no-any-return]

    def _set_states(self, params: list[torch.Tensor]) -> None:
        begun = self._packed.get(f"{self.name}.begun")
        scalars = {
            dtype: iter(self._packed[self._scalars_of(dtype)].unbind())
            for dtype in {what.dtype for each in self._layouts for what in each.values() if _is_scalar(what)}
        }
        packed = self._packed.get(f"{self.name}.numbers")
        count = 0 if packed is None else len(packed)
        numbers = iter([] if packed is None else unpack([0] * count, packed))
        for index, (param, layout) in enumerate(zip(params, self._layouts, strict=True)):
            received: dict[str, Any] = {}
            for key, what in layout.items():
                if _is_scalar(what):
                    received[key] = next(scalars[what.dtype])
                elif isinstance(what, type):
                    received[key] = next(numbers)
            if begun is None or not begun[index]:
                self.optimizer.state.pop(param, None)
            else:
                self._set_state(index, param, received)

    def _set_state(self, index: int, param: torch.Tensor, received: dict[str, Any]) -> None:
        live = self._live(index, param)
        if live is None:
            stand_ins = self._stand_ins[index]
            live = {key: stand_ins.get(key) for key in self._layouts[index]}
            self.optimizer.state[param] = live
        for key, value in received.items():
            if isinstance(value, torch.Tensor):
                live[key].detach().copy_(value)
            else:
                live[key] = value


def _is_scalar(what: object) -> TypeGuard[TensorLayout]:
    return isinstance(what, TensorLayout) and not what.shape


def _gathered(tensors: list[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    """Tensors without dimensions, copied into one on the host."""
    if len({each.device for each in tensors}) > 1:
        tensors = [each.cpu() for each in tensors]
    return torch.stack([each.detach().to(dtype) for each in tensors]).cpu()


def _bits(array: Any) -> bytes:  # noqa: ANN401
    flat = array.view(torch.uint8).numpy() if isinstance(array, torch.Tensor) else array
    return bytes(flat.tobytes())


# The layout of the state


def find_layouts(optimizer: Any, name: str, params: list[torch.Tensor]) -> list[Layout]:  # noqa: ANN401
    """What the state of each parameter will hold once it has begun. The optimizer and its parameters do not change."""
    kind = type(optimizer).__name__
    if isinstance(optimizer, torch.optim.LBFGS):
        raise UsageError(f"{name!r} is an LBFGS: its step needs a closure and its state grows, so it cannot be shared")
    errors: list[str] = []
    for sparse, keeps in ((False, False), (False, True), (True, False)):
        try:
            with _in_a_vacuum(optimizer, params, sparse=sparse, keeps=keeps) as state:
                _bare_step(optimizer)
                if strange := [key for key in state if not isinstance(key, torch.Tensor)]:
                    raise UsageError(f"{name!r} ({kind}) keeps {strange[0]!r} in its state, which is no parameter")
                return [_layout_of(state.get(param) or {}, name) for param in params]
        except UsageError:
            raise
        except Exception as error:  # whatever a step of foreign code raises
            errors.append(f"{type(error).__name__}: {error}")
    raise UsageError(f"{name!r} ({kind}) cannot be shared: a step with zero gradients failed: {'; '.join(errors)}")


def _bare_step(optimizer: Any) -> None:  # noqa: ANN401
    """A step without the hooks, the profiler and what schedulers put around it."""
    step = type(optimizer).step
    while getattr(step, "hooked", False) and hasattr(step, "__wrapped__"):  # more than once after torch.compile
        step = step.__wrapped__
    with torch.no_grad():
        step(optimizer)


@contextmanager
def _in_a_vacuum(
    optimizer: Any,  # noqa: ANN401
    params: list[torch.Tensor],
    *,
    sparse: bool,
    keeps: bool,
) -> Iterator[dict[Any, Any]]:
    """The optimizer with zeros for parameters and gradients, and with a state of its own. Afterwards all is as before.

    With `keeps` that state begins as a copy of the present one: some optimizers create it when they are made.
    """
    attributes = dict(vars(optimizer))
    groups = [(group, dict(group)) for group in optimizer.param_groups]
    tensors = [(each, each.clone()) for _, group in groups for each in group.values() if isinstance(each, torch.Tensor)]
    memory = [(param, param.data, param.grad) for param in params]
    state: dict[Any, Any] = defaultdict(dict)
    if keeps:
        for param, values in optimizer.state.items():
            state[param] = {key: _copied(value) for key, value in values.items()}
    try:
        optimizer.state = state
        for param, data, _ in memory:
            param.data = torch.zeros_like(data)
            param.grad = _no_gradient(data) if sparse else torch.zeros_like(data)
        yield state
    finally:
        for param, data, grad in memory:
            param.grad = None
            param.data = data
            param.grad = grad
        vars(optimizer).clear()
        vars(optimizer).update(attributes)
        for group, values in groups:
            group.clear()
            group.update(values)
        with torch.no_grad():
            for tensor, content in tensors:
                tensor.copy_(content)


def _copied(value: Any) -> Any:  # noqa: ANN401
    return value.clone() if isinstance(value, torch.Tensor) else value


def _no_gradient(data: torch.Tensor) -> torch.Tensor:
    """A sparse gradient without elements."""
    indices = torch.zeros((1, 0), dtype=torch.int64, device=data.device)
    values = torch.zeros((0, *data.shape[1:]), dtype=data.dtype, device=data.device)
    return torch.sparse_coo_tensor(indices, values, data.shape, check_invariants=False)


def _layout_of(state: dict[str, Any], name: str) -> Layout:
    found: Layout = {}
    for key, value in state.items():
        match value:
            case torch.Tensor():
                found[key] = TensorLayout(value.shape, tuple(value.stride()), value.dtype, value.device)
            case None:
                found[key] = None
            case bool() | int() | float():
                found[key] = type(value)
            case _:
                raise UsageError(f"{name!r} keeps a {type(value).__name__} in {key!r} of its state, which is no number")
    return found
