"""PCCL's results, and the one mapping from Ringfold's errors to them. The guide shows it as a table.

After an error a PCCL program reads the world size and calls again. That is right after an abort, and a busy loop if
this peer is no longer in the run. So an eviction is a MASTER_CONNECTION_FAILED, like a lost master, and not a
RANK_CONNECTION_LOST.
"""

from enum import IntEnum
from typing import Self

from ringfold.errors import (
    CollectiveAborted,
    ConfigError,
    DeadlineExceeded,
    Evicted,
    HashMismatch,
    MasterUnreachable,
    RemoteProtocolError,
    RingfoldError,
    StateError,
    StateLost,
    TooFewPeers,
    TopologyFailed,
    UsageError,
)


class Result(IntEnum):
    """How a call ended. An integer, so that it compares with the status of an async op."""

    SUCCESS = 0
    NOT_INITIALIZED = 1
    INTERNAL_ERROR = 2
    INVALID_ARGUMENT = 3
    INVALID_USAGE = 4
    TOO_FEW_PEERS = 5
    MASTER_CONNECTION_FAILED = 6
    RANK_CONNECTION_FAILED = 7
    RANK_CONNECTION_LOST = 8
    NO_SHARED_STATE_AVAILABLE = 9
    PENDING_ASYNC_OPS = 10
    UPDATE_TOPOLOGY_FAILED = 11
    TOPOLOGY_OPTIMIZATION_FAILED = 12


class PCCLError(Exception):
    """A call failed: `func_name` with `result`, because of `text`. `__cause__` is Ringfold's own error.

    `completed_tags` are the ops of a batch that succeeded before it failed: the same ones on every survivor.
    """

    def __init__(self, result: Result, func_name: str, text: str = "", completed_tags: tuple[int, ...] = ()) -> None:
        super().__init__(result, func_name, text, completed_tags)
        self.result, self.func_name, self.text, self.completed_tags = result, func_name, text, completed_tags

    def __str__(self) -> str:
        return f"{self.func_name}: {self.result.name}" + (f": {self.text}" if self.text else "")

    @staticmethod
    def check(result: int, func_name: str) -> None:
        """Raise PCCLError unless `result`, a status as `AsyncReduceHandle.wait` returns it, is SUCCESS."""
        if result != Result.SUCCESS:
            raise PCCLError(Result(result), func_name)

    @classmethod
    def of(cls, error: RingfoldError, func_name: str, completed_tags: tuple[int, ...] = ()) -> Self:
        return cls(result_of(error, func_name), func_name, str(error), completed_tags)


TOPOLOGY_CALLS = {
    "update_topology": Result.UPDATE_TOPOLOGY_FAILED,
    "optimize_topology": Result.TOPOLOGY_OPTIMIZATION_FAILED,
}
"""The result of an abort or a deadline in a topology call; in other calls it is RANK_CONNECTION_LOST."""


def result_of(error: RingfoldError, func_name: str) -> Result:
    """The PCCL result for an error of Ringfold."""
    match error:
        case ConfigError():
            return Result.INVALID_ARGUMENT
        case UsageError():
            return Result.INVALID_USAGE
        case CollectiveAborted() | DeadlineExceeded() | RemoteProtocolError():
            return TOPOLOGY_CALLS.get(func_name, Result.RANK_CONNECTION_LOST)
        case TooFewPeers():
            return Result.TOO_FEW_PEERS
        case Evicted() | MasterUnreachable():
            return Result.MASTER_CONNECTION_FAILED
        case StateLost():
            return Result.NO_SHARED_STATE_AVAILABLE
        case HashMismatch(peers=peers) if peers:
            return Result.INTERNAL_ERROR
        case StateError():
            return Result.INVALID_USAGE
        case TopologyFailed():
            return Result.TOPOLOGY_OPTIMIZATION_FAILED
    return Result.INTERNAL_ERROR
