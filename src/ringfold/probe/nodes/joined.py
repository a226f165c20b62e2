"""A process that only probes, as a node of a master: the way to the master, and back to it. A shell; asyncio.

The master is tried again and again; while it is away the node goes on alone, because its machine says so. What ends the
node is `stop`, or a master that refuses it: a wrong token does not get better by asking again.
"""

import asyncio
import contextlib
import logging
import os
from collections.abc import Callable, Sequence

from ringfold.config import DEFAULT_RUN, split_address
from ringfold.errors import ConfigError, RemoteProtocolError
from ringfold.probe.nodes.shell import NodeShell
from ringfold.probe.rounds.events import Connected, Disconnected, FromRoundMaster, Heard, ToRoundMaster
from ringfold.runtime import asyncio_support
from ringfold.runtime.clock import random_bytes
from ringfold.runtime.process import close_on_fork, keep_on_fork
from ringfold.wire.frames import MAX_FRAME_BYTES, FrameKind, FrameReader, decode_from_master, message_frame
from ringfold.wire.messages import PROTOCOL_VERSION, Challenge, Message, Refused
from ringfold.wire.probing import (
    NodeHello,
    NodeWelcome,
    ProbeGraph,
    ProbeHalt,
    RoundClock,
    RoundEnd,
    RoundStart,
)
from ringfold.wire.proof import NONCE_BYTES, prove, proven
from ringfold.wire.reaching import in_plain_words, not_a_master, said_nothing

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.05, 1.0
HANDSHAKE_S = 5.0
LONGEST_SLEEP_S = 0.5
SILENCE_S = 6
"""A node alone says nothing to its master, and would never learn that the master's machine is gone."""

_log = logging.getLogger("ringfold.probe")


class JoinedNode:
    """One node. Give `shell` after making it: its `say` is this node's."""

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
        on_heard: Callable[[FromRoundMaster], None] | None = None,
    ) -> None:
        """`token` is the run's. `on_heard` is shown every message before the machine sees it."""
        self._masters = [split_address(address) for address in masters]
        if not self._masters:
            raise ConfigError("no address of a master was given")
        self._token, self._run = token, run
        self._name, self._host, self._addresses, self._port = name, host, list(addresses), port
        self._listen_only = listen_only
        self._on_connected, self._on_heard = on_connected, on_heard
        self._writer: asyncio.StreamWriter | None = None
        self._sooner = asyncio.Event()
        self._wakes_s = 0.0
        self._is_master = self._was_welcomed = False

    def say(self, message: ToRoundMaster) -> None:
        """Send a message, if the master is there."""
        if self._writer is not None:
            self._writer.write(message_frame(message))

    async def run(self, stop: asyncio.Event) -> None:
        """Be a node until `stop` is set. Raises ConfigError if a master refuses it before one has welcomed it."""
        parts = [
            asyncio.create_task(self._keep_connected(), name="ringfold node"),
            asyncio.create_task(self._keep_time(), name="ringfold node ticks"),
            asyncio.create_task(stop.wait(), name="ringfold node stop"),
        ]
        try:
            done, _ = await asyncio.wait(parts, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            for task in parts:
                task.cancel()
            await asyncio.gather(*parts, return_exceptions=True)
            self.shell.close()

    async def _keep_time(self) -> None:
        """Tick when it is due, and often enough for the machine to notice a clock that stepped."""
        while True:
            self._wakes_s = self._due_s()
            self._sooner.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(self._wakes_s):
                    await self._sooner.wait()
            self.shell.tick()

    def _due_s(self) -> float:
        """When the next tick is due, by the loop's clock."""
        due_s = self.shell.due_s()
        return asyncio.get_running_loop().time() + min(LONGEST_SLEEP_S if due_s is None else due_s, LONGEST_SLEEP_S)

    def _stepped(self) -> None:
        """The machine may have a nearer deadline now. Most of the time it has not, and nobody need wake up."""
        if self._due_s() < self._wakes_s:
            self._sooner.set()

    async def _keep_connected(self) -> None:
        pause_s, said = FIRST_PAUSE_S, ""
        while True:
            for host, port in self._masters:
                try:
                    await self._converse(host, port)
                    reason = "it closed the connection"
                    pause_s = FIRST_PAUSE_S
                except ConfigError as error:
                    # Its token was right once: somebody else may listen at a dead master's port, and proves nothing.
                    if not self._was_welcomed:
                        raise
                    reason = str(error)
                except TimeoutError:
                    reason = in_plain_words("timed out")
                except (OSError, UnicodeError, RemoteProtocolError) as error:
                    # asyncio's own words repeat the address, which stands in the line already.
                    number = error.errno if isinstance(error, OSError) else None
                    reason = in_plain_words(os.strerror(number)) if number else str(error) or type(error).__name__
                if reason != said:
                    _log.warning("the master at %s:%d is away (%s); this node goes on", host, port, reason)
                    said = reason
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    async def _converse(self, host: str, port: int) -> None:
        """One connection, from its first byte to its last."""
        async with asyncio.timeout(HANDSHAKE_S):
            reader, writer = await asyncio.open_connection(host, port)
        fd = writer.get_extra_info("socket").fileno()
        close_on_fork(fd)
        asyncio_support.no_delay(writer.transport)
        asyncio_support.keep_alive(writer.transport, SILENCE_S)
        try:
            frames = FrameReader()
            early = await self._shake_hands(reader, writer, frames, f"{host}:{port}")
            self._writer = writer
            for message in early:
                self._hear(message)
            while chunk := await reader.read(65_536):
                for kind, body in frames.feed(chunk):
                    if kind is not FrameKind.MESSAGE:
                        raise RemoteProtocolError(f"it sent a {kind.name} frame to a node")
                    self._hear(decode_from_master(body))
        finally:
            keep_on_fork(fd)
            was_in, self._writer = self._writer is not None, None
            writer.close()
            if was_in:
                self.shell.step(Disconnected("the connection is gone"))
                self._stepped()

    async def _shake_hands(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, frames: FrameReader, where: str
    ) -> list[Message]:
        """As `_join`, in time. What listens there may be no master at all, and is called so."""
        self._is_master = False
        try:
            async with asyncio.timeout(HANDSHAKE_S):
                return await self._join(reader, writer, frames, where)
        except TimeoutError:
            raise RemoteProtocolError(said_nothing(int(HANDSHAKE_S * 1_000))) from None
        except RemoteProtocolError as error:
            if self._is_master:
                raise
            raise RemoteProtocolError(not_a_master(str(error))) from None

    async def _join(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, frames: FrameReader, where: str
    ) -> list[Message]:
        """Prove the token and be welcomed; what the master has said after that, if it came along."""
        mine, challenge, welcome = random_bytes(NONCE_BYTES), None, None
        early: list[Message] = []
        while welcome is None:
            chunk = await reader.read(65_536)
            if not chunk:
                raise RemoteProtocolError("it closed the connection in the handshake")
            for kind, body in frames.feed(chunk):
                if kind is not FrameKind.MESSAGE:
                    raise RemoteProtocolError(f"it began with a {kind.name} frame")
                said = decode_from_master(body)
                self._is_master = True
                match said:
                    case Refused(reason, again=True):
                        raise RemoteProtocolError(reason)  # it does not lead: another one may
                    case Refused(reason):
                        raise ConfigError(f"the master at {where} refused this node: {reason}")
                    case Challenge() if challenge is None:
                        challenge = said
                        writer.write(message_frame(self._hello(challenge, mine)))
                    case NodeWelcome() if challenge is not None and welcome is None:
                        if not proven(self._token, said.proof, "welcome", mine, challenge.nonce):
                            raise ConfigError(f"the master at {where} does not know this run's token")
                        welcome, frames.limit = said, MAX_FRAME_BYTES
                    case _ if welcome is not None:
                        early.append(said)
                    case _:
                        raise RemoteProtocolError(f"it said {type(said).__name__} out of turn")
        self._writer, self._was_welcomed = writer, True
        self.shell.step(Connected(welcome.node))
        if self._on_connected is not None:
            self._on_connected(where, welcome.node)
        self._stepped()
        return early

    def _hello(self, challenge: Challenge, mine: bytes) -> NodeHello:
        if not challenge.oldest <= PROTOCOL_VERSION <= challenge.newest:
            raise ConfigError(
                f"the master speaks protocol versions {challenge.oldest} to {challenge.newest}, this node "
                f"{PROTOCOL_VERSION}: install the same Ringfold on both sides"
            )
        return NodeHello(
            version=PROTOCOL_VERSION,
            host=self._host,
            name=self._name,
            addresses=self._addresses,
            port=self._port,
            listen_only=self._listen_only,
            last=self.shell.machine.last,
            nonce=mine,
            proof=prove(self._token, "node", challenge.nonce, mine),
            number=self.shell.prober.node,
            run=self._run,
        )

    def _hear(self, message: Message) -> None:
        match message:
            case ProbeGraph() | RoundStart() | RoundEnd() | RoundClock() | ProbeHalt():
                if self._on_heard is not None:
                    self._on_heard(message)
                self.shell.step(Heard(message))
                self._stepped()
            case Refused(reason, again=True):
                raise RemoteProtocolError(reason)
            case Refused(reason):
                raise ConfigError(f"the master does not want this node any more: {reason}")
            case _:
                raise RemoteProtocolError(f"it said {type(message).__name__} to a node")
