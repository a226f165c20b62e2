"""The fixed layout of the agent's socket: what it says is what msgpack says, and anything else is refused."""

import json
from pathlib import Path

import pytest

from ringfold.errors import RemoteProtocolError
from ringfold.wire.agent import (
    MAX_REQUEST_BYTES,
    AgentHello,
    AgentRefused,
    AgentStatus,
    AgentWelcome,
    AskAgent,
    Deregister,
    Deregistered,
    Flow,
    FromAgent,
    Measured,
    Register,
    Registered,
    Renew,
    ToAgent,
    agent_frame,
)
from ringfold.wire.agent_fixed import (
    FIXED_VERSION,
    ClientCodec,
    FixedType,
    Layout,
    decode_fixed_request,
    decode_fixed_response,
    fixed_request,
    fixed_response,
    is_fixed,
)
from ringfold.wire.frames import FrameKind, FrameReader

ROOT = Path(__file__).resolve().parents[3]
VECTORS = json.loads((ROOT / "tests" / "native" / "agent_socket_vectors.json").read_text())
PATHS = (("10.0.0.1", "10.0.0.2"), ("fe80::1%eth0", "2001:db8::2"))
REQUESTS: dict[str, ToAgent] = {
    "hello": AgentHello(1, "größer"),
    "register": Register(7, Flow(2**40, "10.0.0.1", "10.0.0.2", PATHS, "here", "there")),
    "renew": Renew(8, 5),
    "deregister": Deregister(9, 5),
    "measured": Measured(5, (10**9, 0), (120, 7), (100, 0)),
}
RESPONSES: dict[str, FromAgent] = {
    "welcome": AgentWelcome(1, 3, 16),
    "registered": Registered(7, 2**40, 4_095, 1_048_575),
    "deregistered": Deregistered(9, 5),
    "refused": AgentRefused(7, "quota", "user 0 has 1 flows, the most that are allowed"),
}


def body_of(raw: bytes) -> bytes:
    [(kind, body)] = FrameReader(MAX_REQUEST_BYTES).feed(raw)
    assert kind is FrameKind.MESSAGE
    return body


@pytest.mark.parametrize("name", REQUESTS)
def test_a_request_is_read_as_it_was_written(name: str) -> None:
    body = body_of(fixed_request(REQUESTS[name]))
    assert is_fixed(body)
    assert decode_fixed_request(FrameKind.MESSAGE, body) == REQUESTS[name]
    assert body.hex() == VECTORS[name]


@pytest.mark.parametrize("name", RESPONSES)
def test_a_response_is_read_as_it_was_written(name: str) -> None:
    body = body_of(fixed_response(RESPONSES[name]))
    assert decode_fixed_response(FrameKind.MESSAGE, body) == RESPONSES[name]
    assert body.hex() == VECTORS[name]


def test_the_reference_page_has_the_short_vectors_and_all_types() -> None:
    page = (ROOT / "docs" / "reference" / "agent-socket.md").read_text()
    assert not [hex_ for name, hex_ in VECTORS.items() if len(hex_) <= 64 and f"`{hex_}`" not in page]
    assert not [each.name for each in FixedType if f"| {each.value} | {each.name} |" not in page]


def test_no_msgpack_request_looks_like_the_fixed_layout() -> None:
    assert not any(is_fixed(body_of(agent_frame(message))) for message in (*REQUESTS.values(), AskAgent(1)))


def test_a_long_text_is_cut_between_two_characters() -> None:
    refused = AgentRefused(0, "invalid", "ö" * 200)
    read = decode_fixed_response(FrameKind.MESSAGE, body_of(fixed_response(refused)))
    assert read == AgentRefused(0, "invalid", "ö" * 55)


def changed(name: str, at: int, value: int) -> bytes:
    body = bytearray(body_of(fixed_request(REQUESTS[name])))
    body[at] = value
    return bytes(body)


@pytest.mark.parametrize(
    ("body", "why"),
    [
        (changed("hello", 1, FIXED_VERSION + 1), "version 2"),
        (changed("hello", 2, 99), "99"),
        (changed("hello", 2, FixedType.WELCOME), "WELCOME is a response"),
        (changed("hello", 8, 1), "reserved"),
        (changed("hello", 16 + 63, 1), "zeros"),
        (changed("renew", 3, 1), "reserved"),
        (changed("register", 3, 0), "0 paths"),
        (changed("register", 3, 17), "17 paths"),
        (changed("register", 3, 3), "bytes behind the head"),
        (changed("measured", 3, 1), "bytes behind the head"),
        (changed("measured", 4, 1), "reserved"),
        (body_of(fixed_request(REQUESTS["renew"])) + b"\0", "1 bytes behind the head"),
        (b"\xc1", "1 bytes, and the head has 16"),
    ],
)
def test_anything_else_is_refused_with_a_reason(body: bytes, why: str) -> None:
    with pytest.raises(RemoteProtocolError, match=why):
        decode_fixed_request(FrameKind.MESSAGE, body)


def test_responses_come_in_the_layout_of_the_first_request() -> None:
    codec = ClientCodec()
    assert codec.encode(RESPONSES["refused"]) == agent_frame(RESPONSES["refused"])
    codec.decode(FrameKind.MESSAGE, body_of(fixed_request(REQUESTS["hello"])))
    assert codec.layout is Layout.FIXED
    assert codec.encode(RESPONSES["refused"]) == fixed_response(RESPONSES["refused"])
    with pytest.raises(RemoteProtocolError, match="a msgpack request on a connection with the fixed layout"):
        codec.decode(FrameKind.MESSAGE, body_of(agent_frame(REQUESTS["renew"])))
    other = ClientCodec()
    other.decode(FrameKind.MESSAGE, body_of(agent_frame(REQUESTS["hello"])))
    with pytest.raises(RemoteProtocolError, match="a fixed request on a connection with the msgpack layout"):
        other.decode(FrameKind.MESSAGE, body_of(fixed_request(REQUESTS["renew"])))
    with pytest.raises(RemoteProtocolError, match="HEARTBEAT"):
        ClientCodec().decode(FrameKind.HEARTBEAT, body_of(fixed_request(REQUESTS["hello"])))


def test_what_consoles_use_is_not_in_the_layout() -> None:
    with pytest.raises(ValueError, match="AskAgent"):
        fixed_request(AskAgent(1))
    status = AgentStatus(1, 1, 1, 1, "auto", 0, 0, 0, 0, "", [], {}, {})
    with pytest.raises(ValueError, match="AgentStatus"):
        fixed_response(status)
