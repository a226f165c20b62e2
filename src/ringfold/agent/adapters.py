"""Telemetry from other sources than packets: an adapter parses the output of a collector into observations of queues.

An adapter is pure: bytes in, observations out. The bytes come from `runtime/feeds.py`, so any adapter reads from
standard input, a file, a Unix socket or an HTTP page that is polled. `pump` connects the two.

The built-in adapter, `json`, takes a JSON object per line, or an array of them on one line:

    {"source": "10.0.0.1", "destination": "10.0.1.0/24", "path": 1, "congestion": 180}
    {"destination": "10.0.0.2", "path": 0, "depth_bytes": 40000, "limit_bytes": 100000, "unix_ns": 1700000000000000000}

`source` and `destination` are addresses, networks, or "any", the default. Congestion is given, 0 to 255, or computed
from the depth and the limit (full is 200). `unix_ns` is the time of measurement, by default now. Other fields are
ignored.

Other packages add adapters with an entry point of the group `ringfold.telemetry`, as this package does for `json`: a
callable without arguments that returns an `Adapter`. docs/guides/telemetry.md shows how to feed
it from gNMI and sFlow collectors.
"""

from collections.abc import Callable
from contextlib import aclosing
from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import Annotated, Protocol

import msgspec

from ringfold.errors import ConfigError, RemoteProtocolError
from ringfold.limits import MAX_PATHS
from ringfold.runtime.feeds import chunks
from ringfold.wire.decoding import decode
from ringfold.wire.telemetry import FULL_QUEUE, Congestion, Refusal, prefix_number

ENTRY_POINTS = "ringfold.telemetry"
MAX_LINE_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Observation:
    """A queue as an adapter reports it. `unix_ns` None: now."""

    body: Congestion
    unix_ns: int | None = None


class Adapter(Protocol):
    """Parses the bytes of a feed, in chunks of any size. Input that cannot be parsed becomes a Refusal."""

    def feed(self, chunk: bytes) -> list[Observation | Refusal]: ...


_Level = Annotated[float, msgspec.Meta(ge=0, le=255)]
_Bytes = Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]


class _JsonLine(msgspec.Struct):
    path: Annotated[int, msgspec.Meta(ge=0, lt=MAX_PATHS)]
    source: str = "any"
    destination: str = "any"
    congestion: _Level | None = None
    depth_bytes: _Bytes = 0
    limit_bytes: _Bytes | None = None
    unix_ns: _Bytes | None = None


class JsonAdapter:
    """JSON lines, as described at the head of this file."""

    def __init__(self) -> None:
        self._rest = b""
        self._is_skipping = False
        self._decoder = msgspec.json.Decoder(_JsonLine | list[_JsonLine])

    def feed(self, chunk: bytes) -> list[Observation | Refusal]:
        *lines, self._rest = (self._rest + chunk).split(b"\n")
        found: list[Observation | Refusal] = []
        for line in lines:
            if self._is_skipping:
                self._is_skipping = False  # the end of the line that was too long
            elif line.strip():
                found += self._line(line)
        if len(self._rest) > MAX_LINE_BYTES:
            if not self._is_skipping:
                found.append(Refusal("feed", f"a line is longer than {MAX_LINE_BYTES} bytes"))
            self._rest, self._is_skipping = b"", True
        return found

    def _line(self, line: bytes) -> list[Observation | Refusal]:
        try:
            parsed = decode(self._decoder.decode, line, what="not a line of telemetry: ")
        except RemoteProtocolError as error:
            return [Refusal("feed", str(error))]
        return [_parse_observation(one) for one in (parsed if isinstance(parsed, list) else [parsed])]


def _parse_observation(line: _JsonLine) -> Observation | Refusal:
    try:
        source, source_bits = prefix_number(line.source)
        destination, destination_bits = prefix_number(line.destination)
    except ValueError as error:
        return Refusal("feed", str(error))
    if line.congestion is not None:
        level = line.congestion
    elif line.limit_bytes:
        level = FULL_QUEUE * min(1.0, line.depth_bytes / line.limit_bytes)
    else:
        return Refusal("feed", "neither congestion nor limit_bytes: the congestion is unknown")
    depth = line.depth_bytes
    body = Congestion(source, destination, line.path, round(level), depth, source_bits, destination_bits)
    return Observation(body, line.unix_ns)


BUILT_IN: dict[str, Callable[[], Adapter]] = {"json": JsonAdapter}


def open_adapter(name: str) -> Adapter:
    """The adapter of this name, built in or from an entry point. Raises ConfigError if there is none."""
    if (make := BUILT_IN.get(name)) is not None:
        return make()
    found = {point.name: point for point in entry_points(group=ENTRY_POINTS)}
    if name not in found:
        known = ", ".join(sorted({*BUILT_IN, *found}))
        raise ConfigError(f"there is no telemetry adapter {name!r}; there are {known}")
    try:
        adapter: Adapter = found[name].load()()
    except Exception as error:
        raise ConfigError(f"the telemetry adapter {name!r} does not work: {type(error).__name__}: {error}") from error
    return adapter


def parse_feed(text: str) -> tuple[str, str]:
    """`ADAPTER=WHERE` as (adapter, where): "json=unix:/run/collector.sock"."""
    name, separator, where = text.partition("=")
    if not separator or not name or not where:
        raise ConfigError(f"{text!r} is not a feed; write ADAPTER=WHERE, as in json=/run/telemetry.fifo")
    return name, where


async def pump(
    adapter: Adapter, where: str, deliver: Callable[[Observation | Refusal], None], poll_s: float = 1.0
) -> None:
    """Deliver all observations of a feed, until it ends or the task is cancelled."""
    async with aclosing(chunks(where, poll_s)) as source:
        async for chunk in source:
            for observation in adapter.feed(chunk):
                deliver(observation)
