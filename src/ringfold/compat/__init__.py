"""APIs of other libraries on top of the communicator: their programs run after changing an import.

`pccl.py` has every name of PCCL's Python package; programs import nothing else. It defines the communicator, and uses
`descriptors.py` (enumerations, descriptors, arrays and shared state, with their checks), `results.py` (which error of
Ringfold becomes which result of PCCL), `master.py` (the master node) and `cuda.py` (whether there is a CUDA device).
"""
