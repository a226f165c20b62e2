"""Effects of a relay's state machine: what its shell must do."""

from msgspec import Struct

from ringfold.probe.rounds.effects import LogNote as LogNote
from ringfold.probe.rounds.events import FromRoundMaster
from ringfold.wire.probing import NodeId
from ringfold.wire.regions import Link, ToRoot


class SendToRoot(Struct, frozen=True):
    """Send a message to the root."""

    message: ToRoot


class SendToLinks(Struct, frozen=True):
    """Send a message to each of these nodes."""

    links: tuple[Link, ...]
    message: FromRoundMaster


class SendHeartbeats(Struct, frozen=True):
    """Send a heartbeat to the root and to all accepted nodes."""

    number: int


class WelcomeNode(Struct, frozen=True):
    """Accept a node under this id: send its NodeWelcome, with the timings of heartbeats."""

    link: Link
    node: NodeId
    heartbeat_ms: int
    evict_after_ms: int


class RefuseNode(Struct, frozen=True):
    """Refuse a node, and close its connection. It may try another master, or this relay later, if `again`."""

    link: Link
    reason: str
    again: bool


class CloseLink(Struct, frozen=True):
    """Close the connection to a node; it connects again by itself."""

    link: Link
    reason: str


class CloseRoot(Struct, frozen=True):
    """Close the connection to the root, and connect again."""

    reason: str


RelayEffect = SendToRoot | SendToLinks | SendHeartbeats | WelcomeNode | RefuseNode | CloseLink | CloseRoot | LogNote
