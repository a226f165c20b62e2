"""A process that only probes, as a node of a master: the connection to the master, and reconnecting. A shell; asyncio.

The master is tried again and again; while it cannot be reached the node goes on alone, as its machine decides. The node
ends by `stop`, or when a master refuses it: a wrong token does not become right by a retry. It also ends by an error of
its own, for example a log that cannot be written.

While it is connected, the node sends heartbeats, and expects those of the master: so each side notices within seconds
that the other one is frozen, or has lost power.
"""

import asyncio
import contextlib
import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from ringfold.config import DEFAULT_RUN, Resolved, check_run_name, split_address
from ringfold.errors import ConfigError, RemoteProtocolError
from ringfold.probe.logs.files import ExportSettings, ProbeLog, check_writable
from ringfold.probe.nodes.callbacks import ProbeWindow
from ringfold.probe.nodes.prober import ProbeSocket
from ringfold.probe.nodes.shell import NodeShell
from ringfold.probe.rounds.events import (
    FromRoundMaster,
    MasterConnected,
    MasterDisconnected,
    MasterMessageReceived,
    ToRoundMaster,
)
from ringfold.probe.rounds.node import RoundNode
from ringfold.runtime import asyncio_support, network
from ringfold.runtime.clock import random_bytes
from ringfold.runtime.process import close_on_fork, keep_on_fork
from ringfold.wire.diagnostics import explain_connect_error, explain_no_challenge, explain_not_a_master
from ringfold.wire.frames import (
    HEAD_BYTES,
    MAX_FRAME_BYTES,
    FrameKind,
    FrameReader,
    Heartbeat,
    decode_from_master,
    decode_master_heartbeat,
    heartbeat_frame,
    message_frame,
)
from ringfold.wire.messages import PROTOCOL_VERSION, Challenge, Message, Refused
from ringfold.wire.probing import (
    NodeClock,
    NodeHello,
    NodeId,
    NodeWelcome,
    ProbeGraph,
    ProbeHalt,
    RoundClock,
    RoundEnd,
    RoundStart,
)
from ringfold.wire.proof import NONCE_BYTES, prove, proven, run_token

MIN_PAUSE_S, MAX_PAUSE_S = 0.05, 1.0
HANDSHAKE_TIMEOUT_S = 5.0
MAX_SLEEP_S = 0.5
PORT_TRIES = 512
KEEPALIVE_S = 6
"""TCP keep-alive, for masters without heartbeats: a node that sends nothing would never notice that the master's
machine is gone."""

_log = logging.getLogger("ringfold.probe")


class _RefusedByMaster(ConfigError):
    """A master does not accept this node. Any other ConfigError is this node's own."""


class JoinedNode:
    """One node. Set `shell` after construction: its `send` is this node's."""

    shell: NodeShell

    def __init__(
        self,
        masters: Sequence[str],
        token: bytes,
        *,
        name: str,
        host: str,
        addresses: Sequence[str],
        port: int,
        listen_only: bool = False,
        run: str = DEFAULT_RUN,
        on_connected: Callable[[str, int], None] | None = None,
        on_message: Callable[[FromRoundMaster], None] | None = None,
    ) -> None:
        """`token` is the run's. `on_message` is called with every message before the machine gets it."""
        self.masters = tuple(masters)
        self._masters = [split_address(address) for address in masters]
        if not self._masters:
            raise ConfigError("no address of a master was given")
        self._token = token
        self._run = run
        self.name = name
        self._host = host
        self.addresses = list(addresses)
        self._port = port
        self._listen_only = listen_only
        self._on_connected = on_connected
        self._on_message = on_message
        self._writer: asyncio.StreamWriter | None = None
        self._earlier_deadline = asyncio.Event()
        self._wakes_at_s = 0.0
        self._is_master = self._was_welcomed = False
        self._was_lost = False
        """Whether the last connection was an accepted one: the master was lost, and perhaps by many nodes at once."""
        self.bind = ""
        """The local address of its socket."""
        self.away_reason = ""
        """Why the last attempt to connect failed."""
        self.control_messages = self.control_bytes = 0
        """Sent and received, heartbeats not counted."""
        self._heartbeat_ms = self._evict_after_ms = 0
        self._last_received_s = 0.0
        self._last_heartbeat = 0
        """The number of the master's last heartbeat."""

    def send(self, message: ToRoundMaster) -> None:
        """Send a message, if there is a connection."""
        if self._writer is not None:
            frame = message_frame(message)
            self._count(len(frame))
            self._writer.write(frame)

    def _count(self, size: int) -> None:
        self.control_messages += 1
        self.control_bytes += size

    async def run(self, stop: asyncio.Event) -> None:
        """Run the node until `stop` is set. Raises ConfigError if a master refuses it before one has accepted it, or
        if the log cannot be written."""
        parts = (self._stay_connected(), self._tick_when_due(), stop.wait())
        try:
            await asyncio_support.run_until_first_ends("ringfold node", *parts)
        finally:
            self.shell.close()

    async def _tick_when_due(self) -> None:
        """Tick when it is due, and often enough for the machine to notice a clock step."""
        while True:
            self._wakes_at_s = self._next_tick_s()
            self._earlier_deadline.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(self._wakes_at_s):
                    await self._earlier_deadline.wait()
            self.shell.tick()

    def _next_tick_s(self) -> float:
        """When the next tick is due, by the loop's clock."""
        due_s = self.shell.due_s()
        return asyncio.get_running_loop().time() + min(MAX_SLEEP_S if due_s is None else due_s, MAX_SLEEP_S)

    def _wake_if_earlier(self) -> None:
        """The machine may have an earlier deadline now. Most of the time it has not, and the timer stays."""
        if self._next_tick_s() < self._wakes_at_s:
            self._earlier_deadline.set()

    async def _stay_connected(self) -> None:
        pause_s = MIN_PAUSE_S
        last_reason = ""
        while True:
            for host, port in self._masters:
                try:
                    if self._was_lost:
                        await asyncio.sleep(asyncio_support.jittered(MIN_PAUSE_S))
                    await self._run_connection(host, port)
                    reason = "it closed the connection"
                    pause_s = MIN_PAUSE_S
                except _RefusedByMaster as error:
                    # The token was right before: another process may listen at the port of a dead master.
                    if not self._was_welcomed:
                        raise
                    reason = str(error)
                except (OSError, UnicodeError, RemoteProtocolError) as error:
                    reason = away_reason(error)
                self.away_reason = reason
                if reason != last_reason:
                    _log.warning("the master at %s:%d is away (%s); this node goes on", host, port, reason)
                    last_reason = reason
            await asyncio.sleep(asyncio_support.jittered(pause_s))
            pause_s = min(2 * pause_s, MAX_PAUSE_S)

    async def _run_connection(self, host: str, port: int) -> None:
        """One connection, from its first byte to its last."""
        async with asyncio.timeout(HANDSHAKE_TIMEOUT_S):
            reader, writer = await asyncio.open_connection(host, port)
        fd = writer.get_extra_info("socket").fileno()
        close_on_fork(fd)
        asyncio_support.no_delay(writer.transport)
        asyncio_support.keep_alive(writer.transport, KEEPALIVE_S)
        beating: asyncio.Task[None] | None = None
        try:
            frames = FrameReader()
            early = await self._handshake(reader, writer, frames, f"{host}:{port}")
            self._writer = writer
            if self._heartbeat_ms:
                asyncio_support.user_timeout(writer.transport, self._evict_after_ms)
                beating = asyncio.create_task(self._send_heartbeats(writer), name="ringfold node heartbeats")
            for message in early:
                self._receive(message)
            while chunk := await reader.read(65_536):
                self._last_received_s = asyncio.get_running_loop().time()
                for kind, body in frames.feed(chunk):
                    self._receive_frame(kind, body)
            if beating is not None and beating.done():
                beating.result()
        finally:
            if beating is not None:
                beating.cancel()
            keep_on_fork(fd)
            was_welcomed = self._writer is not None
            self._writer = None
            writer.close()
            self._was_lost = was_welcomed
            if was_welcomed:
                self.shell.step(MasterDisconnected("the connection is gone"))
                self._wake_if_earlier()

    async def _send_heartbeats(self, writer: asyncio.StreamWriter) -> None:
        """Send heartbeats, and end the connection if the master sends none.

        A node that was suspended itself reads first what has arrived meanwhile.
        """
        loop, number = asyncio.get_running_loop(), 0
        interval_s, limit_s = self._heartbeat_ms / 1_000, self._evict_after_ms / 1_000
        self._last_received_s, self._last_heartbeat = loop.time(), 0
        while True:
            number += 1
            writer.write(heartbeat_frame(Heartbeat(number, self._last_heartbeat)))
            due_s = loop.time() + interval_s
            await asyncio.sleep(interval_s)
            if loop.time() > due_s + interval_s:
                self._last_received_s = loop.time()
            if loop.time() - self._last_received_s > limit_s:
                writer.transport.abort()
                raise RemoteProtocolError(f"it was silent for {self._evict_after_ms} ms")

    def _receive_frame(self, kind: FrameKind, body: bytes) -> None:
        match kind:
            case FrameKind.MESSAGE:
                self._count(HEAD_BYTES + len(body))
                self._receive(decode_from_master(body))
            case FrameKind.HEARTBEAT if self._heartbeat_ms:
                self._last_heartbeat = max(self._last_heartbeat, decode_master_heartbeat(body)[0])
            case _:
                raise RemoteProtocolError(f"it sent a {kind.name} frame to a node")

    async def _handshake(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, frames: FrameReader, where: str
    ) -> list[Message]:
        """`_join` with a timeout. The error says so if the listener is not a master at all."""
        self._is_master = False
        try:
            async with asyncio.timeout(HANDSHAKE_TIMEOUT_S):
                return await self._join(reader, writer, frames, where)
        except TimeoutError:
            raise RemoteProtocolError(explain_no_challenge(int(HANDSHAKE_TIMEOUT_S * 1_000))) from None
        except RemoteProtocolError as error:
            if self._is_master:
                raise
            raise RemoteProtocolError(explain_not_a_master(str(error))) from None

    async def _join(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, frames: FrameReader, where: str
    ) -> list[Message]:
        """Prove the token and get a NodeWelcome. Returns the messages that followed it in the same read."""
        mine = random_bytes(NONCE_BYTES)
        challenge: Challenge | None = None
        welcome: NodeWelcome | None = None
        early: list[Message] = []
        while welcome is None:
            chunk = await reader.read(65_536)
            if not chunk:
                raise RemoteProtocolError("it closed the connection in the handshake")
            for kind, body in frames.feed(chunk):
                if kind is FrameKind.HEARTBEAT and welcome is not None:
                    self._receive_frame(kind, body)
                    continue
                if kind is not FrameKind.MESSAGE:
                    raise RemoteProtocolError(f"it began with a {kind.name} frame")
                message = decode_from_master(body)
                self._is_master = True
                match message:
                    case Refused(reason, again=True):
                        raise RemoteProtocolError(reason)  # it is not the leader: another one may be
                    case Refused(reason):
                        raise _RefusedByMaster(f"the master at {where} refused this node: {reason}")
                    case Challenge() if challenge is None:
                        challenge = message
                        writer.write(message_frame(self._hello(challenge, mine)))
                    case NodeWelcome() if challenge is not None and welcome is None:
                        if not proven(self._token, message.proof, "welcome", mine, challenge.nonce):
                            raise _RefusedByMaster(f"the master at {where} does not know this run's token")
                        welcome = message
                        self._heartbeat_ms, self._evict_after_ms = message.heartbeat_ms, message.evict_after_ms
                        frames.limit = MAX_FRAME_BYTES
                    case _ if welcome is not None:
                        early.append(message)
                    case _:
                        raise RemoteProtocolError(f"it sent {type(message).__name__} out of turn")
        self._writer = writer
        self._was_welcomed = True
        self.shell.step(MasterConnected(welcome.node))
        if self._on_connected is not None:
            self._on_connected(where, welcome.node)
        self._wake_if_earlier()
        return early

    def _hello(self, challenge: Challenge, mine: bytes) -> NodeHello:
        if not challenge.oldest <= PROTOCOL_VERSION <= challenge.newest:
            raise _RefusedByMaster(
                f"the master speaks protocol versions {challenge.oldest} to {challenge.newest}, this node "
                f"{PROTOCOL_VERSION}: install the same Ringfold on both sides"
            )
        return NodeHello(
            version=PROTOCOL_VERSION,
            host=self._host,
            name=self.name,
            addresses=self.addresses,
            port=self._port,
            listen_only=self._listen_only,
            last=self.shell.machine.last,
            nonce=mine,
            proof=prove(self._token, "node", challenge.nonce, mine),
            number=self.shell.prober.node,
            run=self._run,
            heartbeats=True,
        )

    def _receive(self, message: Message) -> None:
        match message:
            case ProbeGraph() | RoundStart() | RoundEnd() | RoundClock() | ProbeHalt():
                if self._on_message is not None:
                    self._on_message(message)
                self.shell.step(MasterMessageReceived(message))
                self._wake_if_earlier()
            case Refused(reason, again=True):
                raise RemoteProtocolError(reason)
            case Refused(reason):
                raise _RefusedByMaster(f"the master has removed this node: {reason}")
            case _:
                raise RemoteProtocolError(f"it sent {type(message).__name__} to a node")


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeRequest:
    """How a process takes part that only probes. An empty `name` is the host's name with the process id."""

    name: str = ""
    token: bytes | None = None
    """None: that of the settings."""
    address: str = ""
    """Where others reach it, and what its socket is bound to. Empty: `advertise`, or the address towards the master."""
    port: int | None = None
    """The UDP port; None: the first that is free."""
    listen_only: bool = False
    estimator: str = "auto"
    export: Path | None = None
    points: bool = False
    offset_ns: int = 0
    drift_ppb: int = 0


def make_node(
    settings: Resolved,
    request: NodeRequest,
    adopt: Callable[[NodeClock], None],
    *,
    on_connected: Callable[[str, NodeId], None] | None = None,
    on_message: Callable[[FromRoundMaster], None] | None = None,
    on_window: Callable[[ProbeWindow], None] | None = None,
) -> JoinedNode:
    """A node of the settings' run and masters, with a socket and a shell; `run` makes it connect."""
    masters = settings.listed("master")
    bind, addresses = _addresses(settings, request)
    run = check_run_name(settings.text("run"))
    token = run_token(settings.token() if request.token is None else request.token, run)
    directory = request.export or settings.value("probe_export")
    if isinstance(directory, Path):
        check_writable(directory)
    name = request.name or settings.text("name") or f"{network.host_name()}:{os.getpid()}"
    prober = _bound(bind, settings.integer("data_port"), request)
    node = JoinedNode(
        masters,
        token,
        name=name,
        host=network.host_name(),
        addresses=addresses,
        port=prober.port,
        listen_only=request.listen_only,
        run=run,
        on_connected=on_connected,
        on_message=on_message,
    )

    node.bind = bind

    def open_log(node_id: NodeId) -> ProbeLog | None:
        if not isinstance(directory, Path):
            return None
        export = ExportSettings(directory=directory, points=request.points)
        return ProbeLog(export, node=node_id, name=name, host=network.host_name())

    node.shell = NodeShell(
        RoundNode(),
        prober,
        node.send,
        adopt,
        open_log=open_log,
        estimator=request.estimator,
        token=token,
        on_window=on_window,
        log_fits=settings.switch("probe_log_fits"),
    )
    return node


def _addresses(settings: Resolved, request: NodeRequest) -> tuple[str, list[str]]:
    """The local address of the socket, and those at which others reach it."""
    if request.address:
        literal = _literals("the address of this node", [request.address])
        return literal[0], literal
    local = _address_towards(settings.listed("master"))
    advertised = _literals("advertise", settings.listed("advertise"))
    if not advertised:
        return local, [local]
    return "::" if ":" in local else "0.0.0.0", advertised


def _literals(what: str, names: Sequence[str]) -> list[str]:
    try:
        return [network.literals(name, 0)[0] for name in names]
    except OSError as error:
        raise ConfigError(f"{what}: {', '.join(names)} is not known ({error})") from None


def _address_towards(masters: Sequence[str]) -> str:
    """This host's address on the way to the first master that has a known name and a route."""
    reasons = []
    for master in masters:
        host, port = split_address(master)
        try:
            return network.local_address_towards(network.literals(host, port)[0], port)
        except OSError as error:
            reasons.append(f"no route to the master at {master}: {error}")
    raise ConfigError("; ".join(reasons) or "no address of a master was given")


def _bound(bind: str, first_port: int, request: NodeRequest) -> ProbeSocket:
    """A prober at the requested UDP port, or at the first free one."""
    ports = range(first_port, min(first_port + PORT_TRIES, 65_536)) if request.port is None else [request.port]
    reason: ConfigError | None = None
    for port in ports:
        try:
            return ProbeSocket(0, bind, port, offset_ns=request.offset_ns, drift_ppb=request.drift_ppb)
        except ConfigError as error:
            reason = error
    raise ConfigError(f"no free UDP port from {ports[0]} on: {reason}")


def away_reason(error: Exception) -> str:
    """Why a connection to a master could not be made, or ended, and what to do about it."""
    if isinstance(error, TimeoutError):
        return explain_connect_error("timed out")
    if isinstance(error, OSError) and error.errno:
        # asyncio's own text repeats the address, which is in the log line already.
        return explain_connect_error(os.strerror(error.errno))
    return str(error) or type(error).__name__
