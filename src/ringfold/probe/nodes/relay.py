"""A relay's process: a server for the nodes of a region, and one connection to the root master. A shell; asyncio.

To a node, a relay is a master: the same challenge, the same proofs both ways, the same messages. To the root, it is one
client. It decides nothing (`regions/relay.py`). The root is tried again and again; while it cannot be reached, nodes
are refused, and try the next address of their list. The relay ends by `stop`, or when a root refuses it before one has
accepted it.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import assert_never

from ringfold.config import DEFAULT_RUN, check_exposure, split_address
from ringfold.errors import ConfigError, RemoteProtocolError
from ringfold.probe.nodes.joined import away_reason
from ringfold.probe.regions.effects import (
    CloseLink,
    CloseRoot,
    LogNote,
    RefuseNode,
    RelayEffect,
    SendHeartbeats,
    SendToLinks,
    SendToRoot,
    WelcomeNode,
)
from ringfold.probe.regions.events import (
    LinkClosed,
    LinkHeartbeatReceived,
    LinkMessageReceived,
    NodeRequested,
    RelayEvent,
    RootConnected,
    RootDisconnected,
    RootHeartbeatReceived,
    RootMessageReceived,
    Tick,
)
from ringfold.probe.regions.relay import RelayMachine
from ringfold.runtime import asyncio_support
from ringfold.runtime.clock import monotonic_ns, random_bytes
from ringfold.runtime.process import close_on_fork, keep_on_fork
from ringfold.wire.diagnostics import explain_no_challenge
from ringfold.wire.frames import (
    HEAD_BYTES,
    MAX_FRAME_BYTES,
    FrameKind,
    FrameReader,
    Heartbeat,
    decode_from_master,
    decode_heartbeat,
    decode_master_heartbeat,
    decode_to_master,
    heartbeat_frame,
    master_heartbeat,
    message_frame,
)
from ringfold.wire.messages import PROTOCOL_VERSION, Challenge, Refused, ToMaster
from ringfold.wire.probing import NodeHello, NodeWelcome, RoundAlarm, RoundReport
from ringfold.wire.proof import NONCE_BYTES, prove, proven
from ringfold.wire.regions import (
    Link,
    NodeEntry,
    RelayAnswers,
    RelayClocks,
    RelayGraph,
    RelayHello,
    RelayRound,
    RelayWelcome,
)

MIN_PAUSE_S, MAX_PAUSE_S = 0.05, 1.0
HANDSHAKE_TIMEOUT_S = 5.0
TICK_S = 0.05
MAX_UNPROVEN = 1_024
"""Connections that have not proven the token yet; one more closes the oldest."""
MAX_REPORT_BYTES = 1024 * 1024
"""The largest message of a node."""
MAX_QUEUED_BYTES = 16 * 1024 * 1024
"""A node with a longer send queue does not read, and is disconnected."""
KEEPALIVE_S = 6

_log = logging.getLogger("ringfold.relay")


class _LinkProtocol(asyncio.Protocol):
    """The connection of one node: bytes in, events out."""

    def __init__(self, server: "RelayServer") -> None:
        self._server = server
        self.frames = FrameReader()
        self.link: Link = 0
        self.nonce = random_bytes(NONCE_BYTES)
        self.node_nonce = b""
        self.is_requested = False
        self.is_accepted = False
        self.has_heartbeats = False
        self.last_heartbeat = 0
        """The number of the node's last heartbeat, which the relay's echo."""
        self._fd = -1
        self.transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        self._fd = transport.get_extra_info("socket").fileno()
        close_on_fork(self._fd)
        asyncio_support.no_delay(transport)
        asyncio_support.keep_alive(transport, KEEPALIVE_S)
        transport.set_write_buffer_limits(high=MAX_QUEUED_BYTES)
        self._server.on_opened(self)

    def data_received(self, chunk: bytes) -> None:
        try:
            for kind, body in self.frames.feed(chunk):
                if self.transport is None or self.transport.is_closing():
                    return
                self._server.on_frame(self, kind, body)
        except RemoteProtocolError as error:
            self._server.refuse(self, str(error))

    def write(self, frame: bytes) -> None:
        if self.transport is not None and not self.transport.is_closing():
            self.transport.write(frame)

    def close(self) -> None:
        if self.transport is not None:
            self.transport.close()

    def pause_writing(self) -> None:
        assert self.transport is not None
        self.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        keep_on_fork(self._fd)
        self._server.on_lost(self, str(exc) if exc is not None else "")


@dataclass(frozen=True, slots=True, kw_only=True)
class RelayRequest:
    """What a relay is: `listen` is where its nodes connect, `masters` are the root and its standbys."""

    name: str
    region: str
    listen: Sequence[str]
    masters: Sequence[str]
    token: bytes = b""
    """The run's."""
    run: str = DEFAULT_RUN
    insecure: bool = False


class RelayServer:
    """One relay. `on_connected` is called with the address of each root that accepts it."""

    def __init__(
        self,
        request: RelayRequest,
        *,
        on_connected: Callable[[str], None] | None = None,
        machine: RelayMachine | None = None,
    ) -> None:
        if not request.masters:
            raise ConfigError("no address of a master was given")
        if not request.region or not request.region.isprintable():
            raise ConfigError("a region has a name of printable letters")
        self._listen = [split_address(address) for address in request.listen]
        if not self._listen:
            raise ConfigError("a relay needs an address to listen on")
        for host, _ in self._listen:
            check_exposure(host, request.token, insecure=request.insecure)
        self._request = request
        self._masters = [split_address(address) for address in request.masters]
        self._on_connected = on_connected
        self.machine = machine or RelayMachine()
        self._links: dict[Link, _LinkProtocol] = {}
        self._unproven: dict[Link, _LinkProtocol] = {}
        self._last_link = 0
        self._root: asyncio.StreamWriter | None = None
        self._root_heartbeat = 0
        self.control_messages = self.control_bytes = 0
        """Sent to the root and received from it, heartbeats not counted."""
        self._was_welcomed = False
        self._wake = asyncio.Event()
        self._servers: list[asyncio.Server] = []
        self.addresses: list[str] = []
        """The addresses that it listens on, with the ports that the kernel chose for port 0."""

    async def run(self, stop: asyncio.Event, ready: Callable[[], None] | None = None) -> None:
        """Serve until `stop` is set. Raises ConfigError if a root refuses it before one has accepted it, and OSError if
        it cannot listen."""
        await self._open()
        if ready is not None:
            ready()
        parts = (self._stay_connected(), self._tick_when_due(), stop.wait())
        try:
            await asyncio_support.run_until_first_ends("ringfold relay", *parts)
        finally:
            self._shut()

    async def _open(self) -> None:
        loop = asyncio.get_running_loop()
        for host, port in self._listen:
            server = await loop.create_server(lambda: _LinkProtocol(self), host, port, reuse_address=True, backlog=1024)
            self._servers.append(server)
            for sock in server.sockets:
                close_on_fork(sock.fileno())
                self.addresses.append(asyncio_support.address_text(sock.getsockname()))

    def _shut(self) -> None:
        for server in self._servers:
            for sock in server.sockets:
                keep_on_fork(sock.fileno())
            server.close()
        for client in [*self._links.values(), *self._unproven.values()]:
            client.close()

    # The machine

    def _step(self, event: RelayEvent) -> None:
        for effect in self.machine.step(monotonic_ns(), event):
            self._run_effect(effect)
        self._wake.set()

    def _run_effect(self, effect: RelayEffect) -> None:
        match effect:
            case SendToRoot(message):
                if self._root is not None:
                    frame = message_frame(message)
                    self._count(len(frame))
                    self._root.write(frame)
            case SendToLinks(links, message):
                frame = message_frame(message)
                for link in links:
                    if link in self._links:
                        self._links[link].write(frame)
            case SendHeartbeats(number):
                self._send_heartbeats(number)
            case WelcomeNode(link, node, heartbeat_ms, evict_after_ms):
                if (client := self._links.get(link)) is not None:
                    proof = prove(self._request.token, "welcome", client.node_nonce, client.nonce)
                    client.is_accepted = True
                    client.frames.limit = MAX_REPORT_BYTES
                    client.write(message_frame(NodeWelcome(node, proof, heartbeat_ms, evict_after_ms)))
            case RefuseNode(link, reason, again):
                if (client := self._links.pop(link, None)) is not None:
                    client.write(message_frame(Refused(reason, again=again)))
                    client.close()
            case CloseLink(link, reason):
                if (client := self._links.pop(link, None)) is not None:
                    _log.info("link %d is closed: %s", link, reason)
                    client.close()
            case CloseRoot(reason):
                _log.warning("the root is dropped: %s", reason)
                if self._root is not None:
                    self._root.transport.abort()
            case LogNote(text):
                _log.info("%s", text)
            case _:
                assert_never(effect)

    def _count(self, size: int) -> None:
        self.control_messages += 1
        self.control_bytes += size

    def _send_heartbeats(self, number: int) -> None:
        if self._root is not None:
            self._root.write(heartbeat_frame(Heartbeat(number, self._root_heartbeat)))
            self.machine.set_root_rtt(asyncio_support.min_rtt_ns(self._root.transport))
        for client in self._links.values():
            if client.is_accepted and client.has_heartbeats:
                client.write(master_heartbeat(number, client.last_heartbeat))

    async def _tick_when_due(self) -> None:
        """Tick when it is due, and at least every TICK_S: a longer gap means that this process was suspended."""
        while True:
            due_ns = self.machine.next_deadline_ns()
            due_s = TICK_S if due_ns is None else min(TICK_S, max(0.0, (due_ns - monotonic_ns()) / 1e9))
            self._wake.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(due_s):
                    await self._wake.wait()
                    continue  # an event may have brought an earlier deadline
            self._step(Tick())

    # The root

    async def _stay_connected(self) -> None:
        pause_s, last_reason = MIN_PAUSE_S, ""
        while True:
            for host, port in self._masters:
                try:
                    await self._run_connection(host, port)
                    reason, pause_s = "it closed the connection", MIN_PAUSE_S
                except ConfigError as error:
                    if not self._was_welcomed:
                        raise
                    reason = str(error)
                except (OSError, UnicodeError, RemoteProtocolError) as error:
                    reason = away_reason(error)
                if reason != last_reason:
                    _log.warning("the root master at %s:%d is away (%s); nodes are refused", host, port, reason)
                    last_reason = reason
            await asyncio.sleep(asyncio_support.jittered(pause_s))
            pause_s = min(2 * pause_s, MAX_PAUSE_S)

    async def _run_connection(self, host: str, port: int) -> None:
        async with asyncio.timeout(HANDSHAKE_TIMEOUT_S):
            reader, writer = await asyncio.open_connection(host, port)
        fd = writer.get_extra_info("socket").fileno()
        close_on_fork(fd)
        asyncio_support.no_delay(writer.transport)
        asyncio_support.keep_alive(writer.transport, KEEPALIVE_S)
        frames = FrameReader()
        try:
            welcome = await self._handshake(reader, writer, frames, f"{host}:{port}")
            asyncio_support.user_timeout(writer.transport, welcome.evict_after_ms)
            while chunk := await reader.read(262_144):
                for kind, body in frames.feed(chunk):
                    self._from_root(kind, body)
        finally:
            keep_on_fork(fd)
            self._root = None
            writer.close()
            self._step(RootDisconnected("its connection is gone"))

    async def _handshake(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, frames: FrameReader, where: str
    ) -> RelayWelcome:
        """Prove the token, and get a RelayWelcome. What the root sends next depends on what this relay sends, so
        nothing follows the welcome in the same read but heartbeats."""
        mine = random_bytes(NONCE_BYTES)
        challenge: Challenge | None = None
        try:
            async with asyncio.timeout(HANDSHAKE_TIMEOUT_S):
                while chunk := await reader.read(65_536):
                    for kind, body in frames.feed(chunk):
                        if kind is not FrameKind.MESSAGE:
                            raise RemoteProtocolError(f"it began with a {kind.name} frame")
                        match decode_from_master(body):
                            case Refused(reason, again=True):
                                raise RemoteProtocolError(reason)
                            case Refused(reason):
                                raise ConfigError(f"the master at {where} refused this relay: {reason}")
                            case Challenge() as received:
                                challenge = received
                                writer.write(message_frame(self._hello(received, mine)))
                            case RelayWelcome() as welcome if challenge is not None:
                                if not proven(self._request.token, welcome.proof, "welcome", mine, challenge.nonce):
                                    raise ConfigError(f"the master at {where} does not know this run's token")
                                frames.limit = MAX_FRAME_BYTES
                                self._welcomed(writer, welcome, where)
                                return welcome
                            case message:
                                raise RemoteProtocolError(f"it sent {type(message).__name__} out of turn")
        except TimeoutError:
            raise RemoteProtocolError(explain_no_challenge(int(HANDSHAKE_TIMEOUT_S * 1_000))) from None
        raise RemoteProtocolError("it closed the connection in the handshake")

    def _hello(self, challenge: Challenge, mine: bytes) -> RelayHello:
        if not challenge.oldest <= PROTOCOL_VERSION <= challenge.newest:
            raise ConfigError(
                f"the master speaks protocol versions {challenge.oldest} to {challenge.newest}, this relay "
                f"{PROTOCOL_VERSION}: install the same Ringfold on both sides"
            )
        request = self._request
        proof = prove(request.token, "relay", challenge.nonce, mine)
        return RelayHello(PROTOCOL_VERSION, request.name, request.region, mine, proof, request.run)

    def _welcomed(self, writer: asyncio.StreamWriter, welcome: RelayWelcome, where: str) -> None:
        self._root, self._root_heartbeat, self._was_welcomed = writer, 0, True
        self.machine.set_root_rtt(asyncio_support.min_rtt_ns(writer.transport))
        self._step(RootConnected(welcome))
        _log.info("the root master at %s has accepted this relay", where)
        if self._on_connected is not None:
            self._on_connected(where)

    def _from_root(self, kind: FrameKind, body: bytes) -> None:
        if kind is FrameKind.HEARTBEAT:
            self._root_heartbeat = max(self._root_heartbeat, decode_master_heartbeat(body)[0])
            self._step(RootHeartbeatReceived())
            return
        if kind is not FrameKind.MESSAGE:
            raise RemoteProtocolError(f"it sent a {kind.name} frame to a relay")
        self._count(HEAD_BYTES + len(body))
        match decode_from_master(body):
            case (RelayAnswers() | RelayRound() | RelayGraph() | RelayClocks()) as message:
                self._step(RootMessageReceived(message))
            case Refused(reason):
                raise RemoteProtocolError(f"it has removed this relay: {reason}")
            case message:
                raise RemoteProtocolError(f"it sent {type(message).__name__} to a relay")

    # Nodes

    def on_opened(self, client: _LinkProtocol) -> None:
        self._last_link += 1
        client.link = self._last_link
        self._unproven[client.link] = client
        client.write(message_frame(Challenge(client.nonce, PROTOCOL_VERSION, PROTOCOL_VERSION)))
        asyncio.get_running_loop().call_later(HANDSHAKE_TIMEOUT_S, self._expire, client)
        if len(self._unproven) > MAX_UNPROVEN:
            self._unproven.pop(next(iter(self._unproven))).close()

    def _expire(self, client: _LinkProtocol) -> None:
        if self._unproven.pop(client.link, None) is not None:
            client.close()

    def on_frame(self, client: _LinkProtocol, kind: FrameKind, body: bytes) -> None:
        if kind is FrameKind.HEARTBEAT and client.is_accepted:
            client.last_heartbeat = decode_heartbeat(body).number
            self._step(LinkHeartbeatReceived(client.link))
            return
        if kind is not FrameKind.MESSAGE:
            raise RemoteProtocolError(f"a {kind.name} frame from a node")
        message = decode_to_master(body)
        if client.link in self._unproven:
            self._request_node(client, message)
            return
        match message:
            case RoundReport() | RoundAlarm():
                self._step(LinkMessageReceived(client.link, message))
            case _:
                raise RemoteProtocolError(f"{type(message).__name__} from a node")

    def _request_node(self, client: _LinkProtocol, hello: ToMaster) -> None:
        """The first message of a connection."""
        if not isinstance(hello, NodeHello):
            root = ", ".join(self._request.masters)
            reason = f"this is a relay for nodes that only probe, and not a master: use the master's address ({root})"
            self.refuse(client, reason, again=True)
            return
        if hello.version != PROTOCOL_VERSION:
            raise RemoteProtocolError(f"protocol version {hello.version} is not supported, only {PROTOCOL_VERSION}")
        if (hello.run or DEFAULT_RUN) != self._request.run:
            raise RemoteProtocolError(f"this relay serves run {self._request.run}, not {hello.run!r}")
        is_known = len(hello.nonce) >= NONCE_BYTES // 2 and proven(
            self._request.token, hello.proof, "node", client.nonce, hello.nonce
        )
        if not is_known:
            raise RemoteProtocolError("wrong token: it is not the one that this relay was started with")
        del self._unproven[client.link]
        self._links[client.link] = client
        client.node_nonce, client.has_heartbeats = hello.nonce, hello.heartbeats
        entry = NodeEntry(
            client.link,
            hello.host,
            hello.name,
            hello.addresses,
            hello.port,
            hello.listen_only,
            hello.last,
            hello.number,
        )
        self._step(NodeRequested(entry, hello.heartbeats))

    def refuse(self, client: _LinkProtocol, reason: str, *, again: bool = False) -> None:
        """Close the connection of a node that does not follow the protocol. `again`: another address may accept it."""
        _log.warning("a node is refused: %s", reason)
        client.write(message_frame(Refused(reason, again)))
        client.close()
        self._unproven.pop(client.link, None)
        self._lose(client, reason)

    def on_lost(self, client: _LinkProtocol, reason: str) -> None:
        self._unproven.pop(client.link, None)
        self._lose(client, reason)

    def _lose(self, client: _LinkProtocol, reason: str) -> None:
        if self._links.pop(client.link, None) is not None:
            self._step(LinkClosed(client.link, reason))
