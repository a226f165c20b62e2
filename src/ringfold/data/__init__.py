"""Which peer takes which samples of a data set, while peers come and go. Pure, and without PyTorch.

Read `order.py` (the order of the samples in a pass), `queue.py` (how a step's shares are cut from it, and what becomes
of them) and `sampler.py` (the same as arrays of a shared state, which is what programs use). The step loop's part, who
has which share and who has contributed, is `peer/sampling.py`; the loader for PyTorch is `torch/loader.py`.
"""
