"""Events as lines: every kind survives the round trip, and what is no event is None, whatever it is."""

import inspect
import json
from typing import get_args

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_wire import strategy

from ringfold.wire import events, notices
from ringfold.wire.events import (
    KINDS,
    OP_NAMES,
    OP_OUTCOMES,
    Event,
    EventKind,
    OpEnded,
    PeerEvicted,
    Stamp,
    StepEnded,
    decode_event,
    encode_event,
    kind_of,
)
from ringfold.wire.notices import Notice, PeersStalled
from ringfold.wire.status import DURATION_BOUNDS_US, OpTotals

KIND_TYPES: tuple[type[Notice], ...] = get_args(EventKind)
stamps = st.builds(Stamp, *[st.integers(0, 2**63 - 1)] * 2, st.integers(0, 2**31))


def of_type(kind: type[Notice]) -> st.SearchStrategy[Notice]:
    """Any notice of this kind; JSON has no numbers that are not finite."""
    return strategy(msgspec.inspect.type_info(kind), allow_infinity=False)  # type: ignore[return-value]


def notices_of(module: object) -> set[type[Notice]]:
    found = {kind for _, kind in inspect.getmembers(module, inspect.isclass) if issubclass(kind, Notice)}
    return found - {Notice}


def test_every_notice_is_a_kind_of_event() -> None:
    assert set(KIND_TYPES) == notices_of(notices) | notices_of(events)
    assert len(KINDS) == len(KIND_TYPES)
    assert list(KINDS) == sorted(set(KINDS))


@pytest.mark.parametrize("kind", KIND_TYPES, ids=lambda kind: kind.__name__)
def test_no_field_of_a_notice_is_one_of_the_line(kind: type[Notice]) -> None:
    """A line is the stamp's fields and those of the notice in one object; `ringfold events --json` adds a few."""
    of_the_line = {"at", "wall", "by", "event", "time", "by_name", "level", "message"}
    fields = {field.encode_name for field in msgspec.structs.fields(kind)}
    assert not fields & of_the_line


@pytest.mark.parametrize("kind", KIND_TYPES, ids=lambda kind: kind.__name__)
@settings(max_examples=25)
@given(data=st.data())
def test_an_event_survives_the_round_trip(kind: type[Notice], data: st.DataObject) -> None:
    stamp = data.draw(stamps)
    notice = data.draw(of_type(kind))
    line = encode_event(stamp, notice)
    assert b"\n" not in line
    parsed = json.loads(line)
    assert parsed["event"] == kind_of(notice)
    assert parsed["at"] == stamp.at
    assert parsed.get("by", 0) == stamp.peer
    decoded = decode_event(line)
    assert decoded is not None
    assert (decoded.stamp, decoded.notice) == (stamp, notice)


@given(st.data(), st.sampled_from(KIND_TYPES))
def test_a_line_that_is_cut_is_no_event(data: st.DataObject, kind: type[Notice]) -> None:
    line = encode_event(Stamp(1), data.draw(of_type(kind)))
    assert decode_event(line[: data.draw(st.integers(0, len(line) - 1))]) is None


@given(st.binary(max_size=80))
def test_what_is_no_event_is_none(line: bytes) -> None:
    assert decode_event(line) is None


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"[]",
        b'{"at":1,"event":"of_a_newer_version"}',
        b'{"at":1}',
        b'{"event":"peer_evicted","reason":"x"}',
        b'{"at":-1,"event":"peer_evicted","reason":"x"}',
        b'{"at":9223372036854775808,"event":"peer_evicted","reason":"x"}',
        b'{"at":1,"wall":100000000000000000000,"event":"peer_evicted","reason":"x"}',
        b'{"at":1,"event":"peer_evicted","reason":"\xff"}',
        b'{"at":1,"event":"values_logged","logged":{"a":' + b"[" * 5_000,
        b'{"at":1,"event":"values_logged","logged":{"a":1e999}}',
    ],
)
def test_a_bad_line_is_none(line: bytes) -> None:
    assert decode_event(line) is None


def test_a_newer_version_may_add_fields() -> None:
    line = b'{"at":1,"by":2,"new":[1],"event":"peer_evicted","reason":"x","more":{}}'
    assert decode_event(line) == Event(Stamp(1, 0, 2), PeerEvicted("x"))


def test_text_that_utf_8_cannot_encode_is_replaced() -> None:
    """Such as the name of a file in an error, which Python reads with surrogates."""
    line = encode_event(Stamp(1), PeersStalled(0, [1], ["a\udcff"], [2], "\udc80", 3, "limit"))
    event = decode_event(line)
    assert event is not None
    assert isinstance(event.notice, PeersStalled)
    assert event.notice.names == ["a?"]
    assert event.notice.what == "?"


def test_a_value_that_is_not_finite_is_none() -> None:
    line = encode_event(Stamp(1), StepEnded(1, 2, 3, 4, logged={"loss": None, "rate": 0.5}))
    event = decode_event(line)
    assert event is not None
    assert str(event.notice) == "step 1 in epoch 2 with 3 peers, loss not finite, rate 0.5"


def test_the_names_of_ops_and_outcomes_are_those_of_the_engine() -> None:
    from ringfold.peer.codes import OpKind, OpStatus

    assert [kind.name.lower() for kind in OpKind] == list(OP_NAMES)
    assert [status.name.lower() for status in OpStatus] == ["ok", *OP_OUTCOMES[1:]]
    assert OP_OUTCOMES[0] == "committed"
    assert len(OpTotals().durations) == len(DURATION_BOUNDS_US) + 1


def test_an_op_says_how_often_it_was_tried() -> None:
    op = OpEnded("all_reduce", 1, 2, 3, "committed", 4, 5, 6)
    assert str(op).endswith("committed, 1 attempt")
    assert str(msgspec.structs.replace(op, attempts=2)).endswith("2 attempts")
