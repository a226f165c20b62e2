"""The protocol between processes and the transport agent of their host, on its Unix socket.

A frame is as on a control connection (`frames.py`), always of kind MESSAGE. A client sends AgentHello first; after that
it may send any number of requests without waiting: each has a number chosen by the client, and the response carries
that number. Responses come in the order of the requests. The end of a connection removes every flow that it registered.

Bodies are msgpack. What a transport needs of them also has a fixed layout, for C programs (`agent_fixed.py`).
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
"""The largest frame that an agent accepts. Sixteen paths of IPv6 addresses need about 2 KiB."""
MAX_ANSWER_BYTES = 1024 * 1024
PAGE_FLOWS = 100
"""How many flows one FlowList holds at most: 6 KiB each, at the largest."""

Place = tuple[int, int]
"""The location of a flow's hint: its slot, and the slot's generation."""
RefusalKind = Literal["version", "invalid", "duplicate", "unknown", "quota", "full", "forbidden"]


class Flow(Struct, frozen=True):
    """Bytes that go from a source to a destination over two or more paths.

    `connection` is the client's own number for it. Each path is a local and a remote address, in the order of the
    hints; classic pairs have SOUT first and SUP second. Flows with the same addresses and paths share a slot, also if
    different clients register them. Host names are only shown.
    """

    connection: int
    source: str
    destination: str
    paths: tuple[tuple[str, str], ...]
    source_host: str = ""
    destination_host: str = ""


class AgentHello(Message, frozen=True, tag="agent_hello"):
    """The first message of a client: its name, which is only shown."""

    version: int
    name: str


class AgentWelcome(Message, frozen=True, tag="agent_welcome"):
    """The client is accepted. `generation` counts the agent's restarts."""

    version: int
    generation: int
    requests_per_hint: int = 1
    """How many requests of a flow should share a read of its hint."""


class Register(Message, frozen=True, tag="register"):
    """Register a flow."""

    request: int
    flow: Flow


class Registered(Message, frozen=True, tag="registered"):
    """The flow's hints are in this slot, under this generation."""

    request: int
    connection: int
    slot: int
    generation: int


class Renew(Message, frozen=True, tag="renew"):
    """A renewal: request the slot of a flow of this client again. The response is Registered."""

    request: int
    connection: int


class Deregister(Message, frozen=True, tag="deregister"):
    """Remove a flow of this client, which has ended."""

    request: int
    connection: int


class Deregistered(Message, frozen=True, tag="deregistered"):
    """The flow is removed; its slot may be reused at once."""

    request: int
    connection: int


class Measured(Message, frozen=True, tag="measured"):
    """What a flow's sender measured on each path: bytes acknowledged over busy time (0: nothing was sent), and the
    newest smoothed and minimum RTT (0: not known). There is no response."""

    connection: int
    bytes_per_s: tuple[int, ...]
    srtt_us: tuple[int, ...] = ()
    min_rtt_us: tuple[int, ...] = ()


class SetShares(Message, frozen=True, tag="set_shares"):
    """Fix the shares of every flow between two addresses, or (no shares) let the policy decide again.

    Only the agent's own user and root are allowed to.
    """

    request: int
    source: str
    destination: str
    shares: tuple[float, ...] = ()


class SharesSet(Message, frozen=True, tag="shares_set"):
    """This many slots have these shares now."""

    request: int
    slots: int


class ListFlows(Message, frozen=True, tag="list_flows"):
    """Request the flows after number `after`, the last one that the client has."""

    request: int
    after: int = 0


class ListedFlow(Struct, frozen=True):
    """One flow: its client, the location and content of its hints, and what its sender measured last."""

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
    is_fixed: bool = False
    """The shares bind over whole transfers."""


class FlowList(Message, frozen=True, tag="flow_list"):
    """The flows that the client's user may see: all for root and the agent's user, else its own. `more`: there are
    more."""

    request: int
    flows: list[ListedFlow]
    more: bool


class AskAgent(Message, frozen=True, tag="ask_agent"):
    """Request the agent's status."""

    request: int


class UserUse(Struct, frozen=True):
    """One user's share of the quota."""

    uid: int
    clients: int
    flows: int
    slots: int


class AgentStatus(Message, frozen=True, tag="agent_status"):
    """The agent at one instant. `refused` counts by kind what it refused, on the socket and as telemetry."""

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
    tuning: dict[str, float] = field(default_factory=dict)
    """The settings of its decisions, by name."""


class AgentRefused(Message, frozen=True, tag="agent_refused"):
    """A request was refused, and why. Request 0 is the connection itself, which is closed then."""

    request: int
    kind: RefusalKind
    text: str


ToAgent = AgentHello | Register | Renew | Deregister | Measured | SetShares | ListFlows | AskAgent
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
    return decode(_from_agent.decode, body, what="not a response of an agent: ")


def _check(kind: FrameKind) -> None:
    if kind is not FrameKind.MESSAGE:
        raise RemoteProtocolError(f"a {kind.name} frame on an agent's socket")
