"""How an op or a call ends for the program: a value, or the exception that says what to do next. The one place."""

from typing import NamedTuple

from ringfold.errors import (
    CollectiveAborted,
    DeadlineExceeded,
    EpochChanged,
    Evicted,
    HashMismatch,
    PeerLost,
    RevisionViolation,
    RingfoldError,
    StateError,
    StateLost,
    TooFewPeers,
    TopologyFailed,
    UsageError,
)
from ringfold.peer.carry import decode_reason
from ringfold.peer.codes import OpStatus
from ringfold.peer.engine import OpResult
from ringfold.wire.diagnostics import with_you
from ringfold.wire.messages import Epoch, PeerId, Reason


class ReduceInfo(NamedTuple):
    """What a committed op tells: who contributed, in which epoch it was committed, and the bytes that this peer moved.

    `contributors` are peer ids, sorted, and the same on every member: those that the result was computed from. Of an
    op that reduces nothing they are all members.
    """

    contributors: tuple[int, ...]
    epoch: int
    tx_bytes: int
    rx_bytes: int


class Meeting(NamedTuple):
    """The run at the moment when all its peers had met: the same numbers for everybody who was there.

    `world_size`, `groups` and `largest_group` are those of the communicator, which change at any time; these do not.
    `pending` says that somebody waits to be admitted.
    """

    world_size: int
    groups: int
    largest_group: int
    pending: bool


_WAIT_LONGER = "; `ringfold status` shows what they do, and op_timeout_s (or timeout_s=) says how long to wait"


def error_of_op(result: OpResult, operation: str, ended: RingfoldError | None, me: PeerId) -> RingfoldError:
    """The exception for an op that did not succeed. `ended` is why the session is over, if it is."""
    status, reason, epoch, contributors = result[:4]
    match OpStatus(status):
        case OpStatus.ABORTED:
            return error_of(decode_reason(reason), operation, epoch, me)
        case OpStatus.TOO_FEW:
            return TooFewPeers(len(contributors))
        case OpStatus.FAILED:
            return again(ended) if ended is not None else UsageError(f"{operation}: this peer has left the run")
        case OpStatus.CANCELLED:
            return CollectiveAborted(f"{operation} was given up here", epoch)
        case OpStatus.OK:
            raise AssertionError("a committed op is no error")


def error_of(reason: Reason, operation: str, epoch: Epoch, me: PeerId) -> RingfoldError:
    """The exception that a reason of the master stands for, as peer `me` reads it."""
    text = f"{operation}: {with_you(reason.text, me)}"
    match reason.kind:
        case "lost":
            return PeerLost(text, epoch, reason.peers)
        case "edge" | "cancelled":
            return EpochChanged(text, epoch, reason.peers)
        case "usage":
            return UsageError(text, reason.peers)
        case "deadline":
            return DeadlineExceeded(operation, reason.peers, reason.waited_ms, f"{text}{_WAIT_LONGER}")
        case "evicted":
            return Evicted(reason.text)
        case "state":
            return StateError(text)
        case "revision":
            return RevisionViolation(_number(reason, 0), _number(reason, 1), text)
        case "hash":
            return HashMismatch(text, reason.peers)
        case "state_lost":
            wanted = reason.checkpoint
            return StateLost(_number(reason, 0), text, None if wanted is None else (wanted.lineage, wanted.revision))
        case "topology":
            return TopologyFailed(text, reason.peers)
        case "too_few":
            return TooFewPeers(_number(reason, 0), _number(reason, 1))


def _number(reason: Reason, place: int) -> int:
    """One of the numbers of a reason; a master that leaves it out is no cause to fail in another way."""
    return reason.numbers[place] if place < len(reason.numbers) else 0


def again(error: RingfoldError) -> RingfoldError:
    """The same error as a new object, so that threads that raise it do not share a traceback."""
    return type(error)(*error.args)
