"""Bytes to typed messages and back; whatever is not exactly the protocol is a RemoteProtocolError."""

import contextlib
import struct
from functools import partial
from typing import get_args

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringfold.errors import RemoteProtocolError
from ringfold.probe.rounds.events import ToRoundMaster
from ringfold.wire import frames, messages, probing, status
from ringfold.wire.frames import (
    DESCRIPTOR_BYTES,
    MAX_FRAME_BYTES,
    MAX_HANDSHAKE_BYTES,
    MAX_REPORT_BYTES,
    Announced,
    Done,
    Evidence,
    FrameKind,
    FrameReader,
    Heartbeat,
    decode_done,
    decode_from_master,
    decode_handshake,
    decode_heartbeat,
    decode_master_heartbeat,
    decode_to_master,
    done_frame,
    encode,
    evidence_frame,
    frame,
    heartbeat_frame,
    master_heartbeat,
    message_frame,
)
from ringfold.wire.proof import derive, prove, proven
from ringfold.wire.status import OpTotals, Progress

u8, u16, u32, u64 = (st.integers(0, 2**bits - 1) for bits in (8, 16, 32, 64))
texts = st.text(max_size=40)
blobs = st.binary(max_size=40)


def strategy(hint: object, *, allow_infinity: bool = True) -> st.SearchStrategy[object]:
    """Values of a field's type, for every type that occurs in the messages. An unknown type is an error here."""
    inner = partial(strategy, allow_infinity=allow_infinity)
    match hint:
        case msgspec.inspect.IntType():
            return st.integers(-(2**63), 2**63 - 1)
        case msgspec.inspect.FloatType():
            return st.floats(allow_nan=False, allow_infinity=allow_infinity)
        case msgspec.inspect.StrType():
            return texts
        case msgspec.inspect.BytesType():
            return blobs
        case msgspec.inspect.BoolType():
            return st.booleans()
        case msgspec.inspect.NoneType():
            return st.none()
        case msgspec.inspect.LiteralType(values):
            return st.sampled_from(values)
        case msgspec.inspect.ListType():
            return st.lists(inner(hint.item_type), max_size=3)
        case msgspec.inspect.DictType():
            return st.dictionaries(inner(hint.key_type), inner(hint.value_type), max_size=3)
        case msgspec.inspect.TupleType():
            return st.tuples(*map(inner, hint.item_types))
        case msgspec.inspect.UnionType():
            return st.one_of(*map(inner, hint.types))
        case msgspec.inspect.StructType():
            return st.builds(hint.cls, **{field.name: inner(field.type) for field in hint.fields})
    raise AssertionError(f"no strategy for {hint}")


def values_of(union: object) -> st.SearchStrategy[messages.Message]:
    return strategy(msgspec.inspect.type_info(union))  # type: ignore[return-value]


def cut(reader: FrameReader, stream: bytes) -> list[tuple[FrameKind, bytes]]:
    return list(reader.feed(stream))


# Messages


@given(values_of(messages.ToMaster))
def test_a_message_to_the_master_survives_the_trip(message: messages.Message) -> None:
    assert decode_to_master(encode(message)) == message


@given(values_of(messages.FromMaster))
def test_a_message_from_the_master_survives_the_trip(message: messages.Message) -> None:
    assert decode_from_master(encode(message)) == message


@given(values_of(messages.Handshake))
def test_a_handshake_message_survives_the_trip(message: messages.Message) -> None:
    assert decode_handshake(encode(message)) == message


def test_every_message_belongs_to_a_direction() -> None:
    """A message that no decoder takes could be sent and never understood."""
    unions = (messages.ToMaster, messages.FromMaster, messages.Handshake, messages.BulkMessage)
    known = {kind for union in unions for kind in get_args(union)}
    defined = {
        thing
        for module in (messages, probing, status)
        for thing in vars(module).values()
        if isinstance(thing, type) and issubclass(thing, messages.Message) and thing is not messages.Message
    }
    assert defined == known


@pytest.mark.parametrize("kind", get_args(ToRoundMaster), ids=lambda kind: kind.__name__)
def test_the_master_understands_what_a_node_sends(kind: type[messages.Message]) -> None:
    """A node whose clock jumped sends an alarm: the master must accept it from that node."""
    assert kind in get_args(messages.ToMaster)


@given(st.binary(max_size=200))
def test_random_bytes_are_refused(body: bytes) -> None:
    """No random input gets through as a message, and none raises anything but the one error."""
    for decode in (decode_to_master, decode_from_master, decode_handshake):
        with pytest.raises(RemoteProtocolError):
            decode(body)


@given(values_of(messages.ToMaster), st.data())
def test_a_truncated_message_is_refused(message: messages.Message, data: st.DataObject) -> None:
    body = encode(message)
    with pytest.raises(RemoteProtocolError):
        decode_to_master(body[: data.draw(st.integers(0, len(body) - 1))])


def test_an_unknown_type_is_refused() -> None:
    with pytest.raises(RemoteProtocolError, match="not a message"):
        decode_to_master(msgspec.msgpack.encode({"type": "shutdown"}))


def test_an_unknown_field_is_refused() -> None:
    with pytest.raises(RemoteProtocolError, match="unknown field"):
        decode_to_master(msgspec.msgpack.encode({"type": "attached", "epoch": 1, "more": 2}))


def test_a_field_of_another_type_is_refused() -> None:
    for epoch in ("1", 1.5, None, [1], True):
        with pytest.raises(RemoteProtocolError):
            decode_to_master(msgspec.msgpack.encode({"type": "attached", "epoch": epoch}))


def test_a_message_of_the_other_direction_is_refused() -> None:
    with pytest.raises(RemoteProtocolError):
        decode_to_master(encode(messages.Left()))
    with pytest.raises(RemoteProtocolError):
        decode_from_master(encode(messages.Leave()))
    with pytest.raises(RemoteProtocolError):
        decode_handshake(encode(messages.Leave()))


def test_a_deeply_nested_body_is_refused() -> None:
    """msgpack of 100,000 nested lists is small; it must not exhaust the stack."""
    with pytest.raises(RemoteProtocolError):
        decode_to_master(b"\x91" * 100_000 + b"\xc0")


# Frames


@given(st.lists(st.tuples(st.sampled_from(FrameKind), st.binary(max_size=50)), max_size=5), st.data())
def test_frames_are_found_however_the_stream_is_cut(sent: list[tuple[FrameKind, bytes]], data: st.DataObject) -> None:
    stream = b"".join(frame(kind, body) for kind, body in sent)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=6)))
    reader, got = FrameReader(), []
    for begin, end in zip([0, *cuts], [*cuts, len(stream)], strict=True):
        got += cut(reader, stream[begin:end])
    assert got == sent


def test_a_half_frame_yields_nothing_until_it_is_whole() -> None:
    stream = message_frame(messages.Leave())
    reader = FrameReader()
    assert cut(reader, stream[:-1]) == []
    assert [kind for kind, _ in cut(reader, stream[-1:])] == [FrameKind.MESSAGE]


def test_the_limit_is_exact() -> None:
    assert len(cut(FrameReader(100), frame(FrameKind.DONE, bytes(99)))) == 1
    with pytest.raises(RemoteProtocolError, match="limit 100"):
        cut(FrameReader(100), frame(FrameKind.DONE, bytes(100)))


def test_a_large_length_is_refused_by_its_head_alone() -> None:
    """A remote cannot make us wait for, or keep memory for, a frame that will be refused anyway."""
    with pytest.raises(RemoteProtocolError, match="limit"):
        cut(FrameReader(), struct.pack("<IB", 2**32 - 1, 0))
    with pytest.raises(RemoteProtocolError, match="limit"):
        cut(FrameReader(), struct.pack("<IB", MAX_HANDSHAKE_BYTES + 1, 0))


def test_the_limit_can_be_raised_after_the_proof() -> None:
    reader = FrameReader()
    reader.limit = MAX_FRAME_BYTES
    assert len(cut(reader, frame(FrameKind.MESSAGE, bytes(MAX_HANDSHAKE_BYTES)))) == 1


def test_an_empty_frame_is_refused() -> None:
    with pytest.raises(RemoteProtocolError, match="0 bytes"):
        cut(FrameReader(), struct.pack("<IB", 0, 0))


@given(u8.filter(lambda kind: kind not in set(FrameKind)))
def test_an_unknown_kind_is_refused(kind: int) -> None:
    with pytest.raises(RemoteProtocolError, match=f"kind {kind}"):
        cut(FrameReader(), struct.pack("<IB", 1, kind))


# Fixed frames


@given(u64, u64)
def test_a_masters_heartbeat_survives_the_round_trip(number: int, echo: int) -> None:
    [(kind, body)] = cut(FrameReader(), master_heartbeat(number, echo))
    assert kind is FrameKind.HEARTBEAT
    assert decode_master_heartbeat(body) == (number, echo)


announced = st.builds(Announced, u64, u32, u32, u32, st.booleans())
totals = st.builds(OpTotals, *[u64] * 11, st.lists(u64, min_size=11, max_size=11))
numbers = st.one_of(st.none(), st.floats(allow_nan=False, allow_infinity=False))
progress = st.builds(
    Progress,
    version=st.text(max_size=8),
    step=st.integers(-1, 2**63 - 1),
    steps=u32,
    in_step=st.booleans(),
    logged=st.dictionaries(st.text(max_size=8), numbers, max_size=4),
    clock_offset_ns=st.one_of(st.none(), st.integers(-(2**62), 2**62)),
    clock_error_ns=st.one_of(st.none(), u32),
    events=st.lists(st.binary(max_size=40), max_size=4),
    first_event=u32,
    events_dropped=u32,
)
heartbeats = st.builds(
    Heartbeat, u64, u64, u32, u32, u32, u64, st.lists(announced, max_size=4), u64, u64, u32, totals,
    st.one_of(st.none(), progress),
)  # fmt: skip


@given(heartbeats)
def test_a_heartbeat_survives_the_round_trip(heartbeat: Heartbeat) -> None:
    [(kind, body)] = cut(FrameReader(), heartbeat_frame(heartbeat))
    assert kind is FrameKind.HEARTBEAT
    assert decode_heartbeat(body) == heartbeat


@given(heartbeats, st.data())
def test_a_heartbeat_of_another_length_is_refused(heartbeat: Heartbeat, data: st.DataObject) -> None:
    [(_, body)] = cut(FrameReader(), heartbeat_frame(heartbeat))
    with pytest.raises(RemoteProtocolError):
        decode_heartbeat(body[: data.draw(st.integers(0, len(body) - 1))])
    with pytest.raises(RemoteProtocolError):
        decode_heartbeat(body + b"\0")


def report_of(length: int) -> bytes:
    """A heartbeat whose report has this length, and is a report only if it is as long as an empty map of one byte."""
    [(_, body)] = cut(FrameReader(), heartbeat_frame(Heartbeat(1, 2)))
    return body[:-4] + struct.pack("<I", length) + bytes([0x80]) * length


def test_a_report_is_bounded_and_must_be_one() -> None:
    assert decode_heartbeat(report_of(0)).progress is None
    assert decode_heartbeat(report_of(1)).progress == Progress()
    with pytest.raises(RemoteProtocolError, match="not a report of a peer"):
        decode_heartbeat(report_of(2))
    with pytest.raises(RemoteProtocolError, match=f"limit {MAX_REPORT_BYTES}"):
        decode_heartbeat(report_of(MAX_REPORT_BYTES + 1))


@given(st.binary(min_size=1, max_size=60))
def test_a_report_of_any_bytes_is_one_or_refused(report: bytes) -> None:
    body = report_of(0)[:-4] + struct.pack("<I", len(report)) + report
    with contextlib.suppress(RemoteProtocolError):
        assert decode_heartbeat(body).progress is not None


def test_an_op_count_beyond_the_heartbeat_is_refused() -> None:
    [(_, body)] = cut(FrameReader(), heartbeat_frame(Heartbeat(1, 2)))
    at = 16 + struct.calcsize("<IIIIQQQ")
    with pytest.raises(RemoteProtocolError):
        decode_heartbeat(body[:at] + struct.pack("<H", 60_000) + body[at + 2 :])


descriptors = st.binary(min_size=DESCRIPTOR_BYTES, max_size=DESCRIPTOR_BYTES)
dones = st.builds(Done, u32, u64, u32, u32, descriptors, u64, st.none() | st.binary(max_size=60))


@given(dones)
def test_done_survives_the_trip(done: Done) -> None:
    [(kind, body)] = cut(FrameReader(), done_frame(done))
    assert kind is FrameKind.DONE
    assert decode_done(body) == done


@given(dones)
def test_a_done_without_its_whole_head_is_refused(done: Done) -> None:
    head = len(done_frame(done)) - len(done.payload or b"") - 5
    [(_, body)] = cut(FrameReader(), done_frame(done))
    with pytest.raises(RemoteProtocolError):
        decode_done(body[: head - 1])


def test_a_done_that_contributes_nothing_has_no_payload() -> None:
    body = cut(FrameReader(), done_frame(Done(1, 2, 3, 0, bytes(DESCRIPTOR_BYTES), 0, None)))[0][1]
    assert decode_done(body).payload is None
    with pytest.raises(RemoteProtocolError, match="contributes nothing, and 1 bytes"):
        decode_done(body + b"x")


@given(st.builds(Evidence, u32, u64, u32, u32, u64, st.lists(st.none() | st.binary(max_size=30), max_size=4)))
def test_evidence_has_the_layout_that_the_engine_reads(evidence: Evidence) -> None:
    """The native side decodes it; here its documented layout is written a second time, field by field."""
    [(kind, body)] = cut(FrameReader(), evidence_frame(evidence))
    assert kind is FrameKind.EVIDENCE
    head = struct.unpack_from("<IQIIQH", body)
    assert head == (
        evidence.epoch,
        evidence.tag,
        evidence.sequence,
        evidence.fingerprint,
        evidence.registrations,
        len(evidence.payloads),
    )
    at, payloads = struct.calcsize("<IQIIQH"), []
    lengths = struct.unpack_from(f"<{head[-1]}I", body, at)
    at += 4 * head[-1]
    for length in lengths:
        is_there = length != 0xFFFF_FFFF
        payloads.append(body[at : at + length] if is_there else None)
        at += length if is_there else 0
    assert payloads == evidence.payloads
    assert at == len(body)


@given(st.binary(max_size=80))
def test_random_fixed_frames_raise_nothing_but_the_one_error(body: bytes) -> None:
    for decode in (decode_master_heartbeat, decode_heartbeat, decode_done):
        try:
            decode(body)
        except RemoteProtocolError:
            continue


def test_the_layouts_are_what_native_code_was_written_for() -> None:
    """These sizes are in C++ too; a change must change both and raise the protocol version."""
    assert {
        name: getattr(frames, name).size
        for name in ("_HEAD", "_HEARTBEAT_NUMBERS", "_REPORT", "_ANNOUNCED", "_DONE", "_EVIDENCE")
    } == {"_HEAD": 5, "_HEARTBEAT_NUMBERS": 16, "_REPORT": 42, "_ANNOUNCED": 21, "_DONE": 77, "_EVIDENCE": 30}


# Proofs


@given(blobs, texts, st.lists(blobs, max_size=3))
def test_a_proof_holds_for_its_own_claim(secret: bytes, purpose: str, parts: list[bytes]) -> None:
    assert proven(secret, prove(secret, purpose, *parts), purpose, *parts)


@given(blobs, blobs)
def test_another_secret_proves_nothing(secret: bytes, other: bytes) -> None:
    # HMAC pads keys with zeros, so a secret and the same with zeros behind it are one key by definition.
    same = secret.rstrip(b"\0") == other.rstrip(b"\0")
    assert proven(secret, prove(other, "hello", b"nonce"), "hello", b"nonce") == same


def test_a_proof_is_bound_to_purpose_and_order_and_cut() -> None:
    """A proof made for one thing must not open another, nor the same bytes cut elsewhere."""
    made = prove(b"token", "hello", b"ab", b"c")
    assert not proven(b"token", made, "welcome", b"ab", b"c")
    assert not proven(b"token", made, "hello", b"c", b"ab")
    assert not proven(b"token", made, "hello", b"a", b"bc")
    assert not proven(b"token", made, "hello", b"abc")
    assert not proven(b"token", b"", "hello", b"ab", b"c")


def test_derived_secrets_differ_by_purpose_and_number() -> None:
    numbers = ((), (1,), (1, 2), (2, 1))
    made = {derive(b"run", purpose, *some) for purpose in ("epoch", "lane") for some in numbers}
    assert len(made) == 8
