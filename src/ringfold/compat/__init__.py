"""Other libraries' APIs on top of the communicator, so that their programs run after changing an import.

`pccl.py` is the only door: it has every name of PCCL's Python package. Behind it, `words.py` has the enumerations and
descriptors, `results.py` says which error of Ringfold becomes which result of PCCL, `operands.py` checks arrays,
`batch.py` is the helper that retries many ops, `shared.py` the shared state, and `master.py` the master node.
"""
