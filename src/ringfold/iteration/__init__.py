"""The global iteration: ranks agree on the next iteration through a store alone, without a master.

Read `record.py` first (the one record, how it changes, and when it may advance), then `operations.py` (requests to a
store), `liveness.py` (which ranks have arrived, and which are dead) and `machine.py` (the protocol of one rank). All of
that is pure. `shell.py` runs the steps on a store: programs use its `GlobalIteration`.
"""

from ringfold.iteration.machine import Resumed, State, StateChange
from ringfold.iteration.shell import GlobalIteration

__all__ = ["GlobalIteration", "Resumed", "State", "StateChange"]
