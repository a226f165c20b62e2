"""The effects of the agent's state machine: what its shell must do, in the order in which they are returned."""

from msgspec import Struct

from ringfold.agent.registry import Client, Pair
from ringfold.wire.agent import FromAgent
from ringfold.wire.telemetry import Congestion


class SendMessage(Struct, frozen=True):
    """Send a message to a client."""

    client: Client
    message: FromAgent


class CloseConnection(Struct, frozen=True):
    """Close a connection after sending what is queued. The flows of the client are removed already."""

    client: Client
    why: str


class OpenSlot(Struct, frozen=True):
    """Give the slot to a new owner, without advice."""

    slot: int
    generation: int


class PublishAdvice(Struct, frozen=True):
    """Write new advice to a slot: shares of 65535, and a bit for each path under backpressure. Fixed shares bind."""

    slot: int
    shares: list[int]
    backpressure: int
    is_fixed: bool = False


class WithdrawAdvice(Struct, frozen=True):
    """Remove the advice from a slot."""

    slot: int


class ForwardTelemetry(Struct, frozen=True):
    """Send a report about traffic to this host to the agent of the host that sends it, at this address."""

    address: str
    report: Congestion
    measured_unix_ns: int


class WatchPair(Struct, frozen=True):
    """A pair has its first flow: watch its interfaces, and report it to the switches."""

    pair: Pair


class UnwatchPair(Struct, frozen=True):
    """The last flow of a pair has ended: stop what WatchPair started."""

    pair: Pair


Effect = (
    SendMessage
    | CloseConnection
    | OpenSlot
    | PublishAdvice
    | WithdrawAdvice
    | ForwardTelemetry
    | WatchPair
    | UnwatchPair
)
