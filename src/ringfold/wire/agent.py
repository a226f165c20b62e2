"""What processes and the transport agent of their host say to each other on its Unix socket.

A frame is as on a control connection (`frames.py`), always of kind MESSAGE. A client says AgentHello first; after that
it may send any number of requests without waiting: each has a number of the client's own, and its answer carries that
number. Answers come in the order of the requests. The end of a connection removes every flow that it registered.
"""

from typing import Literal

import msgspec
from msgspec import Struct, field

from ringfold.errors import RemoteProtocolError
from ringfold.wire.base import Message
from ringfold.wire.decoding import decode
from ringfold.wire.frames import FrameKind, frame

AGENT_PROTOCOL = 1
SOCKET_NAME = "agent.sock"
HINTS_NAME = "hints"
"""The two files in an agent's runtime directory."""
MAX_REQUEST_BYTES = 16 * 1024
"""The largest frame that an agent takes. Sixteen paths of IPv6 addresses need about 2 KiB."""
MAX_ANSWER_BYTES = 1024 * 1024
PAGE_FLOWS = 100
"""How many flows one answer to ListFlows holds at most: with all that a flow may say, 6 KiB each."""

Place = tuple[int, int]
"""Where a flow's hint is: its slot, and the slot's generation."""
RefusalKind = Literal["version", "invalid", "duplicate", "unknown", "quota", "full", "forbidden"]


class Flow(Struct, frozen=True):
    """Bytes that go from a source to a destination over two or more paths.

    `connection` is the client's own number for it. Each path is a local and a remote address, in the order in which
    hints speak of them; classic pairs have SOUT first and SUP second. Flows with the same addresses and paths share
    a slot, whoever registers them. Host names are for people.
    """

    connection: int
    source: str
    destination: str
    paths: tuple[tuple[str, str], ...]
    source_host: str = ""
    destination_host: str = ""


class AgentHello(Message, frozen=True, tag="agent_hello"):
    """The first message of a client: who it is, for people."""

    version: int
    name: str


class AgentWelcome(Message, frozen=True, tag="agent_welcome"):
    """The client may go on. `generation` counts the agent's lives."""

    version: int
    generation: int


class Register(Message, frozen=True, tag="register"):
    """There is a flow; which slot has its hints?"""

    request: int
    flow: Flow


class Registered(Message, frozen=True, tag="registered"):
    """Its hints are in this slot, under this generation of it."""

    request: int
    connection: int
    slot: int
    generation: int


class Deregister(Message, frozen=True, tag="deregister"):
    """A flow that this client registered has ended."""

    request: int
    connection: int


class Deregistered(Message, frozen=True, tag="deregistered"):
    """The flow is gone; its slot may be another's at once."""

    request: int
    connection: int


class Measured(Message, frozen=True, tag="measured"):
    """What a flow's sender measured on each path: bytes acknowledged over busy time (0: nothing was sent), and the
    newest smoothed and shortest round trip (0: not known). There is no answer."""

    connection: int
    bytes_per_s: tuple[int, ...]
    srtt_us: tuple[int, ...] = ()
    min_rtt_us: tuple[int, ...] = ()


class SetShares(Message, frozen=True, tag="set_shares"):
    """Fix the shares of every flow between two addresses, or (no shares) let the policy decide again.

    Only the agent's own user and root may.
    """

    request: int
    source: str
    destination: str
    shares: tuple[float, ...] = ()


class SharesSet(Message, frozen=True, tag="shares_set"):
    """So many slots follow these shares now."""

    request: int
    slots: int


class ListFlows(Message, frozen=True, tag="list_flows"):
    """Which flows are there? `after` is the number of the last one that is known already."""

    request: int
    after: int = 0


class ListedFlow(Struct, frozen=True):
    """One flow: who registered it, where its hints are, what they say now, and what its sender measured last."""

    number: int
    pid: int
    uid: int
    client: str
    flow: Flow
    slot: int
    generation: int
    shares: tuple[float, ...] = ()
    backpressure: tuple[bool, ...] = ()
    why: str = ""
    bytes_per_s: tuple[int, ...] = ()
    srtt_us: tuple[int, ...] = ()
    min_rtt_us: tuple[int, ...] = ()


class FlowList(Message, frozen=True, tag="flow_list"):
    """Flows that the asking user may see: all for root and the agent's user, else his own. `more`: ask on."""

    request: int
    flows: list[ListedFlow]
    more: bool


class AskAgent(Message, frozen=True, tag="ask_agent"):
    """How does the agent stand?"""

    request: int


class UserUse(Struct, frozen=True):
    """What one user has of the quota."""

    uid: int
    clients: int
    flows: int
    slots: int


class AgentStatus(Message, frozen=True, tag="agent_status"):
    """The agent at one instant. `refused` counts by kind what it did not accept, on the socket and as telemetry."""

    request: int
    pid: int
    uptime_ms: int
    generation: int
    policy: str
    clients: int
    flows: int
    slots_used: int
    slots: int
    hints: str
    users: list[UserUse]
    counts: dict[str, int]
    refused: dict[str, int]
    telemetry: tuple[str, ...] = ()
    monitors: dict[str, str] = field(default_factory=dict)
    """NIC monitors by name, and why one is not used (empty: it is)."""


class AgentRefused(Message, frozen=True, tag="agent_refused"):
    """A request was not carried out, and why. Request 0 speaks of the connection itself, which is closed then."""

    request: int
    kind: RefusalKind
    text: str


ToAgent = AgentHello | Register | Deregister | Measured | SetShares | ListFlows | AskAgent
FromAgent = AgentWelcome | Registered | Deregistered | SharesSet | FlowList | AgentStatus | AgentRefused

_encoder = msgspec.msgpack.Encoder()
_to_agent: msgspec.msgpack.Decoder[ToAgent] = msgspec.msgpack.Decoder(ToAgent)
_from_agent: msgspec.msgpack.Decoder[FromAgent] = msgspec.msgpack.Decoder(FromAgent)


def agent_frame(message: ToAgent | FromAgent) -> bytes:
    return frame(FrameKind.MESSAGE, _encoder.encode(message))


def decode_to_agent(kind: FrameKind, body: bytes) -> ToAgent:
    """The request in a frame; anything else raises RemoteProtocolError."""
    _check(kind)
    return decode(_to_agent.decode, body, what="not a request to an agent: ")


def decode_from_agent(kind: FrameKind, body: bytes) -> FromAgent:
    _check(kind)
    return decode(_from_agent.decode, body, what="not an answer of an agent: ")


def _check(kind: FrameKind) -> None:
    if kind is not FrameKind.MESSAGE:
        raise RemoteProtocolError(f"a {kind.name} frame on an agent's socket")
