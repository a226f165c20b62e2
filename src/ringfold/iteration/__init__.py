"""The global iteration: ranks agree on the next one through a store alone, without a master.

Read `record.py` first (the one record, what may become of it, and when it may move on), then `machine.py` (the protocol
of one rank, as steps over store operations), with `operations.py`, `asking.py`, `looking.py` and `liveness.py` as its
parts. All of that is pure. `shell.py` carries the steps out on a store: `GlobalIteration` is what programs use.
"""

from ringfold.iteration.model import Resumed, State
from ringfold.iteration.shell import GlobalIteration

__all__ = ["GlobalIteration", "Resumed", "State"]
