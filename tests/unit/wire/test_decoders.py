"""Every decoder of bytes from outside lets one documented error escape, whatever the bytes are."""

import contextlib
import struct
from collections.abc import Callable
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import cast

import msgspec
import pytest

from ringfold.agent.adapters import JsonAdapter
from ringfold.errors import RemoteProtocolError, RingfoldError, StateError, StoreError, UsageError
from ringfold.iteration import record
from ringfold.master import journal
from ringfold.master.journal_store import JournalStore
from ringfold.master.run import Run
from ringfold.master.settings import MasterSettings
from ringfold.probe.logs import lines
from ringfold.probe.rounds import gloo
from ringfold.state import checkpoint
from ringfold.store.base import Deadline, Entry, Store
from ringfold.store.etcd import EtcdDriver
from ringfold.topology import moonshot
from ringfold.wire import agent, frames, telemetry
from ringfold.wire.decoding import MAX_REASON_CHARS, checked, decode
from ringfold.wire.telemetry import Refusal

NO_TEXT = b"\x81\xa4type\xa2\xff\xfe"
DEEP = b"\x82\xa1x" + b"\x91" * 15_000
HUGE_LISTS = [b"\x81\xa1x" + head + b"\xff" * 4 for head in (b"\xdd", b"\xdf", b"\xc6", b"\xdb")]
MSGPACK = [b"", NO_TEXT, DEEP, b"\x81\xa1\xff\x00", b"\x91" * 15_000, b"\xc1", *HUGE_LISTS, b"\xff" * 100]
JSON = [
    b"",
    b'{"type":"\xff\xfe"}',
    b'{"kind":"\xff\xfe"}',
    b'{"path":0,"source":"\xff"}',
    b'{"x":' + b"[" * 15_000,
    b"[" * 15_000,
    b'{"rules":' + b"9" * 5_000 + b"}",
    b'{"x":"\\ud800"}',
    b"\xff",
    b'"' + b"a" * 100_000 + b'"',
]


def _checkpoint(raw: bytes, tmp: Path) -> object:
    """The manifest of a file with a valid header."""
    digest = blake2b(raw, digest_size=16).digest()
    path = tmp / "file"
    path.write_bytes(struct.pack("<8sIIQ16s", checkpoint.MAGIC, checkpoint.VERSION, 0, len(raw), digest) + raw)
    with path.open("rb", buffering=0) as file:
        return checkpoint._manifest_in(path, file)


class _Store:
    """Holds one value under every key."""

    def __init__(self, value: bytes) -> None:
        self._value = value

    def get(self, key: str) -> Entry:
        return Entry(self._value, 1)


def _read_journal(raw: bytes) -> object:
    return JournalStore(cast(Store, _Store(raw)), "a store").read()


def _read_in_header(raw: bytes) -> object:
    """A journal inside a valid header."""
    return _read_journal(msgspec.msgpack.encode({"fence": 1, "serial": 1, "whole": raw}))


class _Member:
    def __init__(self, status: int, content: bytes) -> None:
        self._answer = status, content

    def post(self, *_: object) -> tuple[int, bytes]:
        return self._answer


def _etcd(status: int, raw: bytes) -> object:
    driver = EtcdDriver("etcd://127.0.0.1:1", "tests")
    driver._members = [_Member(status, raw)]  # type: ignore[list-item]
    return driver.ensure_generation(None, Deadline(lambda: 0, 1.0))


WIRES: dict[str, Callable[[bytes], object]] = {
    "to the master": frames.decode_to_master,
    "from the master": frames.decode_from_master,
    "handshake": frames.decode_handshake,
    "on a bulk session": frames.decode_bulk,
    "heartbeat": frames.decode_heartbeat,
    "master heartbeat": frames.decode_master_heartbeat,
    "done": lambda raw: frames.decode_done(raw[:30]),
    "to the agent": partial(agent.decode_to_agent, frames.FrameKind.MESSAGE),
    "from the agent": partial(agent.decode_from_agent, frames.FrameKind.MESSAGE),
    "of a rank": lambda raw: gloo._decode(gloo._report_decoder, raw, 3),
}


@pytest.mark.parametrize("name", WIRES)
@pytest.mark.parametrize("raw", MSGPACK, ids=lambda raw: repr(raw[:8]))
def test_a_wire_raises_only_protocol_errors(name: str, raw: bytes) -> None:
    with pytest.raises(RemoteProtocolError) as caught:
        WIRES[name](raw)
    assert len(str(caught.value)) < MAX_REASON_CHARS + 100


@pytest.mark.parametrize("raw", MSGPACK, ids=lambda raw: repr(raw[:8]))
def test_a_journal_raises_only_store_errors(raw: bytes) -> None:
    for read in (partial(journal.decode, where="here"), _read_journal, _read_in_header):
        with pytest.raises(StoreError, match="it holds no journal of a master"):
            read(raw)


@pytest.mark.parametrize("parts", [-1, 1 << 40, (1 << 63) - 1])
def test_a_journal_of_absurdly_many_parts_is_refused_before_they_are_read(parts: int) -> None:
    with pytest.raises(StoreError, match=f"it has {parts} parts"):
        _read_journal(msgspec.msgpack.encode({"fence": 1, "serial": 1, "parts": parts}))


@pytest.mark.parametrize("raw", MSGPACK, ids=lambda raw: repr(raw[:8]))
def test_links_that_cannot_be_read_are_not_known(raw: bytes) -> None:
    run = Run(MasterSettings())
    journal.restore_links(run, raw, 0)
    assert len(run.links) == 0


@pytest.mark.parametrize("raw", JSON, ids=lambda raw: repr(raw[:8]))
def test_json_from_outside_raises_only_what_is_documented(raw: bytes, tmp_path: Path) -> None:
    cases: list[tuple[type[RingfoldError], Callable[[bytes], object]]] = [
        (UsageError, lines.decode),
        (UsageError, moonshot.solve_json),
        (RemoteProtocolError, moonshot.decode_response),
        (StoreError, partial(record.decode, "here")),
        (StateError, lambda content: _checkpoint(content, tmp_path)),
        (StoreError, partial(_etcd, 200)),
        (StoreError, partial(_etcd, 503)),
    ]
    for error, read in cases:
        with contextlib.suppress(error):  # not every reader minds fields that it does not know
            read(raw)


@pytest.mark.parametrize("raw", JSON[1:], ids=lambda raw: repr(raw[:8]))
def test_an_adapter_refuses_a_line_and_continues(raw: bytes) -> None:
    adapter = JsonAdapter()
    assert [type(result) for result in adapter.feed(raw + b"\n")] == [Refusal]
    assert not isinstance(adapter.feed(b'{"path": 0, "congestion": 1}\n')[0], Refusal)


@pytest.mark.parametrize("raw", [*MSGPACK, *JSON, b"RFTM" + bytes(96), b"RFTM\x01\x01" + b"\xff" * 94])
def test_telemetry_is_refused_with_a_reason(raw: bytes) -> None:
    assert isinstance(telemetry.decode(raw), Refusal)


def test_an_etcd_with_an_incomplete_response_is_refused() -> None:
    with pytest.raises(StoreError, match="response to a transaction is incomplete"):
        _etcd(200, b'{"succeeded": true}')


def test_whatever_decoding_raises_becomes_the_one_error() -> None:
    def broken(raw: bytes) -> None:
        raise MemoryError

    with pytest.raises(RemoteProtocolError, match="MemoryError"):
        decode(broken, b"")
    with pytest.raises(UsageError, match="no good: MemoryError"):
        decode(broken, b"", UsageError, "no good: ")


def test_whatever_a_check_raises_is_the_remotes_fault() -> None:
    def check(number: int) -> bytes:
        if not number:
            raise RemoteProtocolError("zero")
        return number.to_bytes(8, "little")

    assert checked(check, 1)[0] == 1
    with pytest.raises(RemoteProtocolError, match=r"^zero$"):
        checked(check, 0)
    with pytest.raises(RemoteProtocolError, match=r"OverflowError: .* \(test_decoders.py:\d+\)"):
        checked(check, -1)
