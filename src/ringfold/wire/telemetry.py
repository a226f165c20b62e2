"""Telemetry packets: what switches report to the agents of hosts about queues, and what agents report to switches.

One packet is one UDP datagram of fixed size, in network byte order, so that a switch can fill in a template. The header
is the same for all; the body depends on the kind; a signed packet ends with 16 bytes of HMAC-SHA256 over all bytes
before. docs/reference/telemetry.md has the layout in a table, with packets in hexadecimal.

A packet that is not accepted becomes a `Refusal`, never an exception: garbage is normal on an open UDP port, and
it is counted by reason. `decode` rejects malformed packets; `Gate` also checks the sender, the signature and
replays.
"""

import hmac
import ipaddress
import struct
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Literal, assert_never

from ringfold.errors import ConfigError
from ringfold.limits import MAX_PATHS

VERSION = 1
MAGIC = b"RFTM"
MAC_BYTES = 16
EXACT = 128
"""Bits of a prefix that is one address. Prefixes count in the 128-bit form: an IPv4 /24 has 96 + 24 bits."""
UNKNOWN_BYTES = (1 << 64) - 1
"""On the wire: this depth is unknown."""
REPLAY_WINDOW = 64
SENDER_BYTES = 4

Reason = Literal[
    "length",
    "magic",
    "version",
    "kind",
    "flags",
    "path",
    "prefix",
    "sender",
    "unsigned",
    "key",
    "signature",
    "clock",
    "replayed",
    "feed",
]

_CONGESTION, _FLOW_ADDED, _FLOW_REMOVED, _NIC, _FLOW_PATH, _TX_QUEUE = 1, 2, 3, 4, 5, 6
_SIGNED = 1
_HEADER = struct.Struct("!4sBBBBIQQ")
_PAIR = struct.Struct("!16s16sBBBBQ")
_FLOW = struct.Struct("!16s16sIIB3x")
_QUEUES = struct.Struct("!16s16sQQ")
_PATH = struct.Struct("!16s16sIIIB3x16s")
_TX = struct.Struct("!16s16sIH2xQQQQ")
MAX_BYTES = _HEADER.size + _TX.size + MAC_BYTES
FULL_QUEUE, MAX_CONGESTION = 200, 255
"""The congestion of a full queue, and the highest value."""
_MAPPED = 0xFFFF << 32
_V6 = (1 << 128) - 1


@dataclass(frozen=True, slots=True)
class Congestion:
    """A queue from `source` to `destination` on one path: 0 is empty, 200 is full, 240 is backpressure.

    A full queue is not backpressure: every TCP connection that has a path for itself fills one. Backpressure means that
    the path must not be used now: it is paused, or loses a large part of its packets.

    Addresses are 128-bit numbers (`address_number`). With fewer than 128 bits it is a prefix: a queue that many pairs
    share. 0 bits are all addresses.
    """

    source: int
    destination: int
    path: int
    congestion: int
    depth_bytes: int = 0
    source_bits: int = EXACT
    destination_bits: int = EXACT


@dataclass(frozen=True, slots=True)
class FlowAdded:
    """An agent has a new flow: its ends, its slot and the slot's generation, and its number of paths."""

    source: int
    destination: int
    slot: int
    generation: int
    paths: int


@dataclass(frozen=True, slots=True)
class FlowRemoved:
    """A flow has ended. Slot and generation together identify a flow of this agent."""

    source: int
    destination: int
    slot: int
    generation: int
    paths: int


@dataclass(frozen=True, slots=True)
class NicQueues:
    """The queues of a host's interface: to the network (tx) and from it (rx). None: unknown."""

    name: str
    address: int
    tx_bytes: int | None
    rx_bytes: int | None


@dataclass(frozen=True, slots=True)
class FlowPath:
    """One path of a flow: its addresses, its number, and the interface that it leaves this host by.

    Index 0: unknown.
    """

    source: int
    destination: int
    slot: int
    generation: int
    path: int
    interface_index: int = 0
    interface: str = ""


@dataclass(frozen=True, slots=True)
class TxQueue:
    """One transmit queue of a host's interface: what it has sent so far (the driver's counters), and what is in flight
    to the device, with its limit (byte queue limits). None: the kernel does not have it."""

    name: str
    address: int
    interface_index: int
    queue: int
    sent_bytes: int | None = None
    sent_packets: int | None = None
    inflight_bytes: int | None = None
    limit_bytes: int | None = None


Body = Congestion | FlowAdded | FlowRemoved | NicQueues | FlowPath | TxQueue


@dataclass(frozen=True, slots=True)
class Packet:
    """One packet. `sender` distinguishes exporters behind one address or with one key; a sequence counts up per sender,
    also over its restarts (start with the time in nanoseconds). `unix_ns` is when the body was measured, by the
    sender's clock. `key_id` is the id of the signing key, None if the packet is not signed."""

    body: Body
    sequence: int
    unix_ns: int
    sender: int = 0
    key_id: int | None = None


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a packet was not accepted."""

    reason: Reason
    text: str


def encode(packet: Packet, key: bytes | None = None) -> bytes:
    """The datagram. `key` belongs to the packet's `key_id`; neither or both are given."""
    if (key is None) != (packet.key_id is None):
        raise ValueError("a signed packet has a key and the key's id; an unsigned one has neither")
    kind, body = _encode_body(packet.body)
    flags, key_id = (0, 0) if packet.key_id is None else (_SIGNED, packet.key_id)
    header = _HEADER.pack(MAGIC, VERSION, kind, flags, key_id, packet.sender, packet.sequence, packet.unix_ns)
    return header + body + (b"" if key is None else _mac(key, header + body))


def decode(datagram: bytes, keys: Mapping[int, bytes] | None = None) -> Packet | Refusal:
    """Decode a datagram. A signature is checked: without its key the packet is rejected. The cheap checks come
    first."""
    if not _HEADER.size <= len(datagram) <= MAX_BYTES:
        return Refusal("length", f"{len(datagram)} bytes")
    magic, version, kind, flags, key_id, sender, sequence, unix_ns = _HEADER.unpack_from(datagram)
    if magic != MAGIC:
        return Refusal("magic", "it does not begin with RFTM")
    if version != VERSION:
        return Refusal("version", f"version {version}, and this is {VERSION}")
    shape = _SHAPES.get(kind)
    if shape is None:
        return Refusal("kind", f"kind {kind} is not known")
    if flags & ~_SIGNED or (not flags and key_id):
        return Refusal("flags", f"flags {flags:#x} with key {key_id}")
    signed_bytes = _HEADER.size + shape.size
    if len(datagram) != signed_bytes + (MAC_BYTES if flags else 0):
        return Refusal("length", f"{len(datagram)} bytes for kind {kind}")
    if flags:
        key = (keys or {}).get(key_id)
        if key is None:
            return Refusal("key", f"key {key_id} is not known")
        if not hmac.compare_digest(_mac(key, datagram[:signed_bytes]), datagram[signed_bytes:]):
            return Refusal("signature", f"not signed with key {key_id}")
    body = _decode_body(kind, shape.unpack_from(datagram, _HEADER.size))
    if isinstance(body, Refusal):
        return body
    return Packet(body, sequence, unix_ns, sender, key_id if flags else None)


@lru_cache(maxsize=16_384)
def address_number(text: str) -> int:
    """An IP address as a 128-bit number; IPv4 becomes the IPv4-mapped IPv6 address. Raises ValueError for others."""
    address = ipaddress.ip_address(text)
    return int(address) if address.version == 6 else _MAPPED | int(address)


def address_text(number: int) -> str:
    """The address as text."""
    address = ipaddress.IPv6Address(number)
    return str(address.ipv4_mapped or address)


@lru_cache(maxsize=1_024)
def prefix_number(text: str) -> tuple[int, int]:
    """(address, bits) of an address, a network like 10.0.0.0/8, or `any`. Raises ValueError for others."""
    if text == "any":
        return 0, 0
    network = ipaddress.ip_network(text, strict=False)
    if network.version == 6:
        return int(network.network_address), network.prefixlen
    return _MAPPED | int(network.network_address), 96 + network.prefixlen


def masked(number: int, bits: int) -> int:
    """The first `bits` bits of an address, zeros behind."""
    return number & (_V6 ^ (_V6 >> bits))


@dataclass(frozen=True, slots=True, kw_only=True)
class GateSettings:
    """Which senders may send telemetry. With keys every packet must be signed; `allow` are addresses or networks.

    With neither keys nor `allow` only packets from this host itself are accepted.
    """

    keys: Mapping[int, bytes] = field(default_factory=dict)
    allow: Sequence[str] = ("127.0.0.0/8", "::1")
    max_skew_s: float = 30.0
    """How far the time of a signed packet may differ from ours: older ones may be replays."""
    most_senders: int = 4_096
    """How many senders are remembered; beyond that the one that was silent longest is forgotten."""

    def __post_init__(self) -> None:
        for number, key in self.keys.items():
            if not 0 <= number <= 255 or len(key) < 16:
                raise ConfigError(f"telemetry key {number}: ids are 0 to 255, and a key has 16 bytes or more")
        for text in self.allow:
            try:
                prefix_number(text)
            except ValueError:
                raise ConfigError(f"{text!r} is not an address, a network, or `any`") from None
        if self.max_skew_s <= 0 or self.most_senders < 1:
            raise ConfigError("max_skew_s and most_senders are positive")


@dataclass(slots=True)
class _Seen:
    """The replay window of one sender: the highest sequence, a bit for each below it, the newest time.

    `floor_ns` is the newest time before it restarted its sequence: what is not newer was seen, or may have been.
    """

    highest: int
    bits: int
    newest_ns: int
    floor_ns: int = -1


class Gate:
    """Accepts or rejects packets, and counts. Pure: the time comes with the packet."""

    def __init__(self, settings: GateSettings | None = None) -> None:
        self._settings = settings or GateSettings()
        self._allowed = [prefix_number(text) for text in self._settings.allow]
        self._seen: dict[tuple[int, int | None, int], _Seen] = {}
        self.accepted = 0
        self.refused: Counter[str] = Counter()

    def accept(self, unix_ns: int, datagram: bytes, address: str) -> Packet | Refusal:
        """The packet that arrived from an IP address at `unix_ns` by our wall clock, if it is accepted."""
        result = self._check(unix_ns, datagram, address)
        if isinstance(result, Refusal):
            self.refused[result.reason] += 1
        else:
            self.accepted += 1
        return result

    def _check(self, unix_ns: int, datagram: bytes, address: str) -> Packet | Refusal:
        try:
            number = address_number(address.partition("%")[0])
        except ValueError:
            return Refusal("sender", f"{address!r} is not an IP address")
        if not any(masked(number, bits) == prefix for prefix, bits in self._allowed):
            return Refusal("sender", f"{address} is not on the list of allowed senders")
        packet = decode(datagram, self._settings.keys)
        if isinstance(packet, Refusal):
            return packet
        if self._settings.keys and packet.key_id is None:
            return Refusal("unsigned", "there are keys, and it is not signed")
        skew_s = abs(unix_ns - packet.unix_ns) / 1e9
        if packet.key_id is not None and skew_s > self._settings.max_skew_s:
            return Refusal("clock", f"its time is {skew_s:.0f} s away from ours")
        # A signature binds the packet to its key, not to its source address: a replay may be sent from anywhere, so
        # signed packets have one window per key and sender.
        source = (number if packet.key_id is None else -1, packet.key_id, packet.sender)
        return self._check_replay(source, packet, unix_ns) or packet

    def _check_replay(self, source: tuple[int, int | None, int], packet: Packet, unix_ns: int) -> Refusal | None:
        """None if this sequence is new. A sequence below the window is a restart if it was measured after all before
        it. From then on a signed packet from before the restart is refused, whatever its sequence.

        Without a signature, a time in the future counts as now: a sender whose clock was ahead, or that was spoofed, is
        accepted again when its time is right. With one, it counts as it is: packets of such a sender can be replayed.
        """
        measured_ns = packet.unix_ns if packet.key_id is not None else min(packet.unix_ns, unix_ns)
        seen = self._seen.pop(source, None)
        if seen is None:
            if len(self._seen) >= self._settings.most_senders:
                del self._seen[next(iter(self._seen))]
            self._seen[source] = _Seen(packet.sequence, 1, measured_ns)
            return None
        self._seen[source] = seen  # at the end again: the first entry is the sender that was silent longest
        ahead = packet.sequence - seen.highest
        if packet.key_id is not None and packet.unix_ns <= seen.floor_ns:
            return Refusal("replayed", f"sequence {packet.sequence} is from before the sender's restart")
        if ahead > 0:
            seen.bits = (seen.bits << ahead | 1) & ((1 << REPLAY_WINDOW) - 1) if ahead < REPLAY_WINDOW else 1
            seen.highest = packet.sequence
        elif ahead > -REPLAY_WINDOW and not seen.bits >> -ahead & 1:
            seen.bits |= 1 << -ahead
        elif ahead <= -REPLAY_WINDOW and packet.unix_ns > seen.newest_ns:
            seen.highest, seen.bits, seen.floor_ns = packet.sequence, 1, seen.newest_ns
        else:
            return Refusal("replayed", f"sequence {packet.sequence} after {seen.highest}")
        seen.newest_ns = max(seen.newest_ns, measured_ns)
        return None


_SHAPES = {
    _CONGESTION: _PAIR,
    _FLOW_ADDED: _FLOW,
    _FLOW_REMOVED: _FLOW,
    _NIC: _QUEUES,
    _FLOW_PATH: _PATH,
    _TX_QUEUE: _TX,
}


def _encode_body(body: Body) -> tuple[int, bytes]:
    match body:
        case Congestion():
            ends = (_bytes(body.source), _bytes(body.destination), body.source_bits, body.destination_bits)
            return _CONGESTION, _PAIR.pack(*ends, body.path, body.congestion, body.depth_bytes)
        case FlowAdded() | FlowRemoved():
            kind = _FLOW_ADDED if isinstance(body, FlowAdded) else _FLOW_REMOVED
            ends = (_bytes(body.source), _bytes(body.destination), body.slot, body.generation)
            return kind, _FLOW.pack(*ends, body.paths)
        case NicQueues(name, address, tx, rx):
            return _NIC, _QUEUES.pack(name.encode()[:16], _bytes(address), *map(_known, (tx, rx)))
        case FlowPath():
            ends = (_bytes(body.source), _bytes(body.destination), body.slot, body.generation)
            return _FLOW_PATH, _PATH.pack(*ends, body.interface_index, body.path, body.interface.encode()[:16])
        case TxQueue():
            figures = (body.sent_bytes, body.sent_packets, body.inflight_bytes, body.limit_bytes)
            which = (body.name.encode()[:16], _bytes(body.address), body.interface_index, body.queue)
            return _TX_QUEUE, _TX.pack(*which, *map(_known, figures))
        case _:
            assert_never(body)


def _decode_body(kind: int, parts: tuple[Any, ...]) -> Body | Refusal:
    first, second, *numbers = parts
    source, destination = int.from_bytes(first, "big"), int.from_bytes(second, "big")
    match kind:
        case 1:
            source_bits, destination_bits, path, congestion, depth = numbers
            if path >= MAX_PATHS:
                return Refusal("path", f"path {path}: there are {MAX_PATHS} at most")
            for number, bits in ((source, source_bits), (destination, destination_bits)):
                if bits > EXACT or masked(number, bits) != number:
                    return Refusal("prefix", f"{address_text(number)} is no prefix of {bits} bits")
            return Congestion(source, destination, path, congestion, depth, source_bits, destination_bits)
        case 2 | 3:
            make = FlowAdded if kind == _FLOW_ADDED else FlowRemoved
            return make(source, destination, *numbers)
        case 5:
            slot, generation, index, path, name = numbers
            if path >= MAX_PATHS:
                return Refusal("path", f"path {path}: there are {MAX_PATHS} at most")
            return FlowPath(source, destination, slot, generation, path, index, _name(name))
        case 6:
            index, queue, *figures = numbers
            return TxQueue(_name(first), destination, index, queue, *map(_unknown, figures))
        case _:
            tx, rx = map(_unknown, numbers)
            return NicQueues(_name(first), destination, tx, rx)


def _known(figure: int | None) -> int:
    return UNKNOWN_BYTES if figure is None else figure


def _unknown(figure: int) -> int | None:
    return None if figure == UNKNOWN_BYTES else figure


def _name(field: bytes) -> str:
    return field.rstrip(b"\0").decode("utf-8", "replace")


def _bytes(number: int) -> bytes:
    return number.to_bytes(16, "big")


def _mac(key: bytes, content: bytes) -> bytes:
    return hmac.digest(key, content, "sha256")[:MAC_BYTES]
