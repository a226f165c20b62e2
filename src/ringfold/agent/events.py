"""The events of the agent's state machine: what clients sent, what was measured, and the passing of time."""

from collections.abc import Mapping

from msgspec import Struct

from ringfold.agent.adapters import Observation
from ringfold.agent.registry import Client
from ringfold.wire.agent import ToAgent
from ringfold.wire.telemetry import Refusal as TelemetryRefusal


class ConnectionOpened(Struct, frozen=True):
    """A client connected. The kernel reported its user and process."""

    client: Client
    uid: int
    pid: int


class MessageReceived(Struct, frozen=True):
    """A client sent a message."""

    client: Client
    message: ToAgent


class MalformedMessageReceived(Struct, frozen=True):
    """A client sent something that is not a message of this protocol."""

    client: Client
    text: str


class ConnectionClosed(Struct, frozen=True):
    """The connection of a client has ended."""

    client: Client


class DatagramReceived(Struct, frozen=True):
    """A datagram arrived at a telemetry port. `unix_ns` is the wall clock."""

    unix_ns: int
    content: bytes
    address: str


class QueueObserved(Struct, frozen=True):
    """A feed reported a queue, or something that could not be parsed."""

    unix_ns: int
    observation: Observation | TelemetryRefusal


class NicQueuesRead(Struct, frozen=True):
    """The queues of this host's interfaces were read: how full each is, 0 to 255, by the number of its address."""

    pressures: Mapping[int, float]


class Tick(Struct, frozen=True):
    """It is time to decide about pairs that are due; or only about urgent ones."""

    only_urgent: bool = False


Event = (
    ConnectionOpened
    | MessageReceived
    | MalformedMessageReceived
    | ConnectionClosed
    | DatagramReceived
    | QueueObserved
    | NicQueuesRead
    | Tick
)
