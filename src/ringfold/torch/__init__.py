"""PyTorch: a model and all that trains it as one shared state, and gradients that are averaged during backward().

    model = rf.torch.DataParallel(net, run)
    state = rf.torch.shared_state(model, optimizer, scheduler)

`state.py` has `shared_state` and the state that it makes. Its components: `optimizers.py` (state that an optimizer
creates in its first step), `number_trees.py` (learning rates, counters and other numbers that are no arrays) and
`tensors.py` (a tensor as an array; what a key's name says beyond the name). `export.py` turns checkpoints into
safetensors and torch files, and back. `data_parallel.py` is the wrapper with buckets, and `comm_hook.py` the same for
torch's own wrapper. `loader.py` has batches of a data set for the shares that a `Sampler` gives out, loaded ahead.

This package needs the extra `torch`: `pip install ringfold[torch]`. `import ringfold` does not load it.
"""

try:
    import torch as _torch  # noqa: F401  # says what is missing before a module here fails
except ImportError as error:
    raise ImportError("ringfold.torch needs PyTorch: pip install ringfold[torch]") from error

from ringfold.torch.comm_hook import HookState, comm_hook
from ringfold.torch.data_parallel import DataParallel
from ringfold.torch.export import export_checkpoint, import_checkpoint, read_checkpoint
from ringfold.torch.loader import Loader
from ringfold.torch.state import TorchState, shared_state

__all__ = [
    "DataParallel",
    "HookState",
    "Loader",
    "TorchState",
    "comm_hook",
    "export_checkpoint",
    "import_checkpoint",
    "read_checkpoint",
    "shared_state",
]
