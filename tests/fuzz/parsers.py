"""Every decoder of bytes from outside, under damaged bytes of its own kind: only its documented error may escape."""

import struct
import tempfile
from collections.abc import Callable
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path
from random import Random
from typing import Any

import msgspec

from ringfold.agent.adapters import JsonAdapter, _JsonLine
from ringfold.agent.telemetry import TelemetryIngest
from ringfold.errors import RemoteProtocolError, RingfoldError, StateError, StoreError, UsageError
from ringfold.iteration import record
from ringfold.master import journal, journal_store
from ringfold.master.run import Run
from ringfold.master.settings import MasterSettings
from ringfold.probe.logs import lines
from ringfold.probe.rounds import gloo
from ringfold.state import checkpoint
from ringfold.store.base import Entry
from ringfold.topology import moonshot
from ringfold.wire import agent, agent_fixed, descriptor, frames, messages, telemetry
from ringfold.wire.frames import MAX_HANDSHAKE_BYTES, FrameKind, FrameReader
from ringfold.wire.telemetry import Gate, GateSettings, Refusal
from tests.fuzz.values import Values, damaged

MAX_REASON_CHARS = 1_000
Step = list[Any]
Parser = tuple[type[RingfoldError], Callable[[bytes], object], Callable[[Values], bytes]]


def _packed(kind: object) -> Callable[[Values], bytes]:
    return lambda values: msgspec.msgpack.encode(values.of(kind))


def _fixed(encode: Callable[[Any], bytes], kind: object) -> Callable[[Values], bytes]:
    flow = agent.Flow(3, "10.0.0.1", "10.0.0.2", (("10.0.0.1", "10.0.0.2"), ("fe80::1%eth0", "::1")))
    hints: dict[str, list[Any]] = {"flow": [flow], "request": [1, 2**32 - 1], "connection": [0, 2**64 - 1]}
    return lambda values: encode(Values(values.rng, hints).of(kind))[5:]


def _json(kind: object) -> Callable[[Values], bytes]:
    return lambda values: msgspec.json.encode(values.of(kind))


def _frames(raw: bytes) -> None:
    """A stream in pieces, as a connection cuts it."""
    reader = FrameReader(MAX_HANDSHAKE_BYTES)
    for start in range(0, len(raw), 7):
        for kind, body in reader.feed(raw[start : start + 7]):
            assert kind in FrameKind
            assert len(body) < MAX_HANDSHAKE_BYTES


def _stream(values: Values) -> bytes:
    return b"".join(frames.message_frame(values.of(messages.ToMaster)) for _ in range(2))


def _links(raw: bytes) -> None:
    journal.restore_links(Run(MasterSettings()), raw, 0)


class _Store:
    def __init__(self, value: bytes) -> None:
        self._value = value

    def get(self, key: str) -> Entry:
        return Entry(self._value, 1)


def _kept(raw: bytes) -> object:
    return journal_store.JournalStore(_Store(raw), "here").read()  # type: ignore[arg-type]


def _manifest(raw: bytes) -> None:
    digest = blake2b(raw, digest_size=16).digest()
    head = struct.pack("<8sIIQ16s", checkpoint.MAGIC, checkpoint.VERSION, 0, len(raw), digest)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "file"
        path.write_bytes(head + raw)
        with path.open("rb", buffering=0) as file:
            checkpoint._manifest_in(path, file)


_ingest = TelemetryIngest(Gate(GateSettings(keys={}, allow=("any",))))


def _datagram(raw: bytes) -> None:
    """The gate and the table behind it, which keep what was accepted."""
    for now in (0, 10**9):
        _ingest.datagram(now, 10**18 + now, raw, "10.0.0.1")
    _ingest.table.reading(10**9, 1, 2, 3)
    assert len(_ingest.gate._seen) <= GateSettings().most_senders


def _lines(raw: bytes) -> None:
    adapter = JsonAdapter()
    for start in range(0, len(raw), 11):
        for observation in adapter.feed(raw[start : start + 11]):
            if not isinstance(observation, Refusal):
                _ingest.table.add_observation(0, 10**18, observation.body, observation.unix_ns or 0)
    adapter.feed(b"\n")


def _telemetry(values: Values) -> bytes:
    rng = values.rng
    body = rng.choice(
        (
            telemetry.Congestion(rng.getrandbits(128), rng.getrandbits(128), rng.randrange(16), 200, 5),
            telemetry.Congestion(0, 0, 1, 255, 2**32 - 1, 0, 0),
            telemetry.FlowAdded(1, 2, 3, 4, 2),
            telemetry.NicQueues("eth0", 7, None, 5),
        )
    )
    sequence = rng.choice((0, 1, 2**63, 2**64 - 1))
    return telemetry.encode(telemetry.Packet(body, sequence, rng.choice((0, 10**18, 2**63 - 1)), 0))


def _reports(values: Values) -> bytes:
    return msgspec.msgpack.encode(values.of(messages.RoundReport))


PARSERS: dict[str, Parser] = {
    "to-master": (RemoteProtocolError, frames.decode_to_master, _packed(messages.ToMaster)),
    "from-master": (RemoteProtocolError, frames.decode_from_master, _packed(messages.FromMaster)),
    "handshake": (RemoteProtocolError, frames.decode_handshake, _packed(messages.Handshake)),
    "visit": (RemoteProtocolError, frames.decode_bulk, _packed(messages.BulkMessage)),
    "frames": (RemoteProtocolError, _frames, _stream),
    "heartbeat": (RemoteProtocolError, frames.decode_heartbeat, lambda values: values.rng.randbytes(58 + 42)),
    "master-beat": (RemoteProtocolError, frames.decode_master_heartbeat, lambda values: values.rng.randbytes(16)),
    "done": (RemoteProtocolError, frames.decode_done, lambda values: values.rng.randbytes(70)),
    "descriptor": (RemoteProtocolError, descriptor.describe, lambda values: values.rng.randbytes(32)),
    "to-agent": (
        RemoteProtocolError,
        lambda raw: agent.decode_to_agent(FrameKind.MESSAGE, raw),
        _packed(agent.ToAgent),
    ),
    "from-agent": (
        RemoteProtocolError,
        lambda raw: agent.decode_from_agent(FrameKind.MESSAGE, raw),
        _packed(agent.FromAgent),
    ),
    "to-agent-fixed": (
        RemoteProtocolError,
        lambda raw: agent_fixed.decode_fixed_request(FrameKind.MESSAGE, raw),
        _fixed(agent_fixed.fixed_request, agent.Register | agent.Measured | agent.AgentHello | agent.Renew),
    ),
    "from-agent-fixed": (
        RemoteProtocolError,
        lambda raw: agent_fixed.decode_fixed_response(FrameKind.MESSAGE, raw),
        _fixed(agent_fixed.fixed_response, agent.AgentRefused | agent.Registered | agent.AgentWelcome),
    ),
    "gloo": (RemoteProtocolError, lambda raw: gloo._decode(gloo._report_decoder, raw, 1), _reports),
    "journal": (StoreError, lambda raw: journal.decode(raw, "here"), _packed(journal.Journal)),
    "kept-journal": (StoreError, _kept, _packed(journal_store._Head)),
    "links": (StoreError, _links, _packed(journal.Links)),
    "iteration": (StoreError, lambda raw: record.decode("here", raw), _json(record.Record)),
    "checkpoint": (StateError, _manifest, _json(checkpoint.CheckpointManifest)),
    "probe-log": (UsageError, lines.decode, _json(lines.Line)),
    "moonshot-answer": (RemoteProtocolError, moonshot.decode_response, _json(moonshot.MoonshotResponse)),
    "telemetry": (RemoteProtocolError, _datagram, _telemetry),
    "adapter": (UsageError, _lines, _json(_JsonLine)),
}


def replayed(script: list[Step]) -> None:
    for name, text in script:
        error, read, _ = PARSERS[name]
        reason = ""
        try:
            read(bytes.fromhex(text))
        except error as fault:
            reason = str(fault)
        assert len(reason) <= MAX_REASON_CHARS, f"a reason of {len(reason)} letters"


def drawn(rng: Random) -> tuple[list[Step], BaseException | None]:
    script: list[Step] = []
    try:
        for _ in range(20):
            name = rng.choice(list(PARSERS))
            raw = b""
            with suppress(Exception):  # values that do not fit an encoder: lone surrogates, NaN in JSON, large numbers
                raw = PARSERS[name][2](Values(rng))
            if rng.random() < 0.8:
                raw = damaged(rng, raw)
            script.append([name, raw.hex()])
            replayed(script[-1:])
    except Exception as error:
        return script, error
    return script, None
