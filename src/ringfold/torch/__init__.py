"""Ringfold for PyTorch programs.

`loader.py`: batches of a data set for the shares that a `Sampler` gives out, with prefetching.
"""

from ringfold.torch.loader import Loader

__all__ = ["Loader"]
