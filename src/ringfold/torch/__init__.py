"""PyTorch: a model and all that trains it as one shared state, and checkpoints as files that other programs read.

    state = rf.torch.shared_state(model, optimizer, scheduler)

`state.py` has `shared_state` and the state that it makes. Its components: `optimizers.py` (state that an optimizer
creates in its first step), `number_trees.py` (learning rates, counters and other numbers that are no arrays) and
`tensors.py` (a tensor as an array; what a key's name says beyond the name). `export.py` turns checkpoints into
safetensors and torch files, and back.

This package needs the extra `torch`: `pip install ringfold[torch]`. `import ringfold` does not load it.
"""

try:
    import torch as _torch  # noqa: F401  # says what is missing before a module here fails
except ImportError as error:
    raise ImportError("ringfold.torch needs PyTorch: pip install ringfold[torch]") from error

from ringfold.torch.export import export_checkpoint, import_checkpoint, read_checkpoint
from ringfold.torch.state import TorchState, shared_state

__all__ = ["TorchState", "export_checkpoint", "import_checkpoint", "read_checkpoint", "shared_state"]
