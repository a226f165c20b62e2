"""The shell of the agent: a Unix socket and telemetry in, hints in shared memory out. It decides nothing.

In the runtime directory there are two things. `hints` is the table, locked by the one agent that writes it; the lock is
what makes an agent the only one, so a killed agent leaves nothing that its successor could not take over. `agent.sock`
is replaced by whoever holds the lock.

Who may do what follows from who runs it. An agent of root serves everybody on the host: the directory is 0755, the
socket 0666, the hints 0644. Anybody else's agent serves its own user: 0700, 0600, 0600. Hints hold no addresses, and
registering is bounded by a quota per user.
"""

import asyncio
import itertools
import logging
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import assert_never

from ringfold import _native
from ringfold.agent.doors import BURST_NS, PART, REST_S, Allowance, Door, Rounds
from ringfold.agent.machine import (
    AgentMachine,
    Answer,
    ClientGone,
    ClientMalformed,
    ClientOpened,
    ClientSaid,
    Datagram,
    Decide,
    Drop,
    Effect,
    Event,
    Observed,
    OpenSlot,
    PairCame,
    PairWent,
    Publish,
    Self,
    Withdraw,
)
from ringfold.agent.registry import Client, Quota, Registry
from ringfold.agent.reports import ReportSettings
from ringfold.agent.steering import Steering, parse_policy
from ringfold.agent.surroundings import Surroundings
from ringfold.agent.telemetry import TelemetryDesk
from ringfold.agent.watching import NicWatch
from ringfold.config import TELEMETRY_PORT, is_loopback, split_address
from ringfold.errors import ConfigError
from ringfold.runtime import asyncio_support
from ringfold.runtime.clock import monotonic_ns, unix_ns
from ringfold.runtime.datagrams import DatagramPort
from ringfold.runtime.local import BACKLOG, identity, listen_unix, own_directory, touch
from ringfold.runtime.log_limit import LogRateLimiter
from ringfold.runtime.process import close_on_fork, keep_on_fork
from ringfold.wire.agent import HINTS_NAME, SOCKET_NAME
from ringfold.wire.telemetry import Gate, GateSettings

BEAT_S = 0.1
STALE_NS = 1_000_000_000
"""Readers go by their local policy when the heartbeat is this old: ten beats, because a busy host may hold up a few."""

"""Of so many dropped clients the log tells in this time; beyond that it only counts them."""
FILES_EVERY = 10
TOUCH_EVERY = 36_000
"""How many beats lie between two looks at the own files, and between two marks for those who tidy up /tmp."""

_log = logging.getLogger("ringfold.agent")


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentSettings:
    """How one agent runs. `is_shared`: for all users of the host, or only for its own (None: if it is root's)."""

    directory: Path
    policy: str = "auto"
    quota: Quota = field(default_factory=Quota)
    is_shared: bool | None = None
    telemetry: tuple[str, ...] = (f"127.0.0.1:{TELEMETRY_PORT}",)
    gate: GateSettings = field(default_factory=GateSettings)
    feeds: tuple[str, ...] = ()
    """Other feeds of telemetry, ADAPTER=WHERE."""
    report_to: tuple[str, ...] = ()
    reports: ReportSettings = field(default_factory=ReportSettings)
    watch_nics: bool = True
    monitors: tuple[str, ...] = ()
    """NIC monitors from other packages, by their names."""

    def __post_init__(self) -> None:
        for address in self.telemetry:
            host, _ = split_address(address, TELEMETRY_PORT)
            if not is_loopback(host) and self.gate.allow == GateSettings().allow and not self.gate.keys:
                raise ConfigError(f"taking telemetry at {host} lets others steer: give a list of senders, or a key")

    @property
    def shared(self) -> bool:
        return os.geteuid() == 0 if self.is_shared is None else self.is_shared


class AgentServer:
    """One agent on real sockets."""

    def __init__(self, settings: AgentSettings) -> None:
        """Takes the directory; raises ConfigError if it is not to be had, or another agent has it."""
        self._settings = settings
        steering = Steering(parse_policy(settings.policy), TelemetryDesk(Gate(settings.gate)))
        self.directory = settings.directory
        own_directory(self.directory, 0o755 if settings.shared else 0o700)
        self._hints = _open_hints(self.directory / HINTS_NAME, 0o644 if settings.shared else 0o600)
        me = Self(
            pid=os.getpid(),
            uid=os.geteuid(),
            generation=self._hints.generation,
            hints=str(self.directory / HINTS_NAME),
            started_ns=monotonic_ns(),
        )
        self._machine = AgentMachine(me, Registry(self._hints.slot_generations(), settings.quota), steering)
        self._doors: dict[Client, Door] = {}
        self._rounds = Rounds(self)
        self._last_client = 0
        self._stopping: asyncio.Event | None = None
        self._failure: BaseException | None = None
        self._surroundings = self._look_around()
        self._ears: list[_Ear] = []
        self._alarm: asyncio.TimerHandle | None = None
        self._alarm_ns = 0
        self._rest_until_ns = 0
        self._log_limit = LogRateLimiter()
        self._files: dict[Path, tuple[int, int, int] | None] = {}

    @property
    def telemetry(self) -> list[str]:
        """Where it takes telemetry, once it does; with the ports that the kernel chose for port 0."""
        return self._machine.telemetry

    def _look_around(self) -> Surroundings:
        chosen = self._settings
        watch: NicWatch | None = None
        try:
            watch = NicWatch(chosen.monitors) if chosen.watch_nics else None
            if watch is not None:
                self._machine.monitors = watch.states
            return Surroundings(
                self._told, watch=watch, report_to=chosen.report_to, reports=chosen.reports, feeds=chosen.feeds
            )
        except BaseException:
            if watch is not None:
                watch.close()
            self._hints.close()
            raise

    def _told(self, event: Event) -> None:
        self.step(event)
        self.decide()

    async def serve(self, ready: Callable[[], None] | None = None) -> None:
        """Serve until `stop`. `ready` is called once clients may come."""
        self._stopping = asyncio.Event()
        path = self.directory / SOCKET_NAME
        server: asyncio.Server | None = None
        beating = asyncio.create_task(self._beat(), name="ringfold agent heartbeat")
        try:
            sock = listen_unix(path, 0o666 if self._settings.shared else 0o600)
            server = await asyncio.get_running_loop().create_unix_server(
                lambda: Door(self._rounds), sock=sock, backlog=BACKLOG
            )
            close_on_fork(sock.fileno())
            self._files = {each: identity(each) for each in (path, self.directory / HINTS_NAME)}
            for address in self._settings.telemetry:
                self._listen(address)
            self._surroundings.start()
            heard = f", telemetry at {', '.join(self.telemetry)}" if self.telemetry else ""
            _log.info("serving at %s, life %d of this table%s", path, self._hints.generation, heard)
            if ready is not None:
                ready()
            await self._stopping.wait()
        finally:
            beating.cancel()
            await asyncio.gather(beating, return_exceptions=True)
            if server is not None:
                for each in server.sockets:
                    keep_on_fork(each.fileno())
                server.close()
                if identity(path) == self._files.get(path):
                    path.unlink(missing_ok=True)
            for ear in self._ears:
                ear.port.close()
            await self._surroundings.stop()
            if self._alarm is not None:
                self._alarm.cancel()
            for door in list(self._doors.values()):
                door.leave()
            self._doors.clear()
            self.close()
        if self._failure is not None:
            raise self._failure

    def stop(self) -> None:
        """End `serve`. Call it in the agent's loop."""
        if self._stopping is not None:
            self._stopping.set()

    def close(self) -> None:
        """Let go of the hints; readers see at once that nobody is there. `serve` does it at its end."""
        self._hints.close()

    async def _beat(self) -> None:
        for number in itertools.count():
            self._hints.beat()
            if number % FILES_EVERY == 0:
                self._look_at_files()
            if number % TOUCH_EVERY == 0:
                touch(self.directory / HINTS_NAME)
            await asyncio.sleep(BEAT_S)

    def _look_at_files(self) -> None:
        """An agent whose files were taken away is found by nobody, and another one can start beside it: it ends."""
        gone = [str(path) for path, file in self._files.items() if identity(path) != file]
        if gone and self._failure is None:
            taken = f"{' and '.join(gone)} was removed, replaced or truncated"
            self._failure = ConfigError(f"{taken}; the agent ends: start it anew")
            self.stop()

    def _listen(self, address: str) -> None:
        host, port = split_address(address, TELEMETRY_PORT)
        try:
            ear = _Ear(self, host, port)
        except OSError as error:
            raise ConfigError(f"cannot take telemetry at {address}: {error.strerror or error}") from None
        self._ears.append(ear)
        self._machine.telemetry.append(asyncio_support.address_text(ear.port.name))

    # Decisions

    def decide(self) -> None:
        """Decide what is due now, and come back for what is due later. Call it after every event or batch of them."""
        if self._machine.is_urgent:
            self.step(Decide(only_urgent=True))
        wake_ns = self._machine.wake_ns()
        if wake_ns is not None and max(wake_ns, self._rest_until_ns) <= monotonic_ns():
            began_ns = monotonic_ns()
            self.step(Decide())
            ended_ns = monotonic_ns()
            self._rest_until_ns = 2 * ended_ns - began_ns
            wake_ns = self._machine.wake_ns()
        if self._machine.is_urgent:
            at_ns = 0  # and before that, everybody else's turn
        elif wake_ns is None:
            return
        else:
            at_ns = max(wake_ns, self._rest_until_ns)
        if self._alarm is not None:
            if self._alarm_ns <= at_ns:
                return
            self._alarm.cancel()
        self._alarm_ns = at_ns
        self._alarm = asyncio.get_running_loop().call_later(max(0, at_ns - monotonic_ns()) / 1e9, self._rang)

    def _rang(self) -> None:
        self._alarm = None
        self.decide()

    # Events in, effects out

    def step(self, event: Event) -> None:
        """Step the machine and do what it says. What breaks it because of a remote's message costs that remote its
        connection. If its tables are not sound after that, or nobody is to blame, they are worth nothing: it ends."""
        if self._failure is not None:
            return
        try:
            self._do_all(event)
        except Exception as error:
            try:
                if not isinstance(event, ClientSaid | Datagram | Observed):
                    raise
                self._warn("the agent broke at %r", event, exc_info=True)
                if isinstance(event, ClientSaid):
                    self._do_all(
                        ClientMalformed(event.client, f"the agent broke at its {type(event.message).__name__}")
                    )
                self._machine.check()
            except Exception:
                _log.exception("the agent broke at %r, and cannot go on", event)
                self._failure = error
                self.stop()

    def _do_all(self, event: Event) -> None:
        for effect in self._machine.step(monotonic_ns(), event):
            self._do(effect)

    def _warn(self, text: str, *facts: object, exc_info: bool = False) -> None:
        """Log what a client did, or what came of it. Lines that differ by the client's number alone are the same."""
        if (more := self._log_limit.take(monotonic_ns(), f"{text}: {facts[-1]}")) is not None:
            _log.warning(text + "%s", *facts, more, exc_info=exc_info)

    def _do(self, effect: Effect) -> None:
        match effect:
            case Answer(client, message):
                if (door := self._doors.get(client)) is not None:
                    door.answer(message)
            case OpenSlot(slot, generation):
                self._hints.open(slot, generation)
            case Publish(slot, shares, backpressure):
                self._hints.publish(slot, shares, backpressure)
            case Withdraw(slot):
                self._hints.withdraw(slot)
            case PairCame(pair):
                self._surroundings.pair_came(pair)
            case PairWent(pair):
                self._surroundings.pair_went(pair)
            case Drop(client, why):
                self._warn("client %d is dropped: %s", client, why)
                if (door := self._doors.pop(client, None)) is not None:
                    door.leave()
            case _:
                assert_never(effect)

    # Doors

    def opened(self, door: Door, uid: int, pid: int) -> Client:
        self._last_client += 1
        self._doors[self._last_client] = door
        self.step(ClientOpened(self._last_client, uid, pid))
        return self._last_client

    def lost(self, client: Client) -> None:
        if self._doors.pop(client, None) is not None:
            self.step(ClientGone(client))

    def is_open(self, client: Client) -> bool:
        return client in self._doors


class _Ear:
    """A port for telemetry. Whatever comes is the machine's to judge; nothing is ever answered.

    Anybody may send anything, as fast as he likes: what takes more than PART of a core is left to the kernel to drop.
    """

    def __init__(self, server: AgentServer, host: str, port: int) -> None:
        self._server, self._allowance = server, Allowance(PART, BURST_NS)
        self.port = DatagramPort(host, port, self._heard)

    def _heard(self, content: bytes, address: str) -> None:
        began_ns = monotonic_ns()
        self._server.step(Datagram(unix_ns(), content, address))
        self._server.decide()
        self._allowance.spend(began_ns, monotonic_ns())
        if self._allowance.is_spent:
            self.port.pause(REST_S)


class AgentThread:
    """An agent in a thread of its own, for tests and notebooks. Use it with `with`."""

    def __init__(self, settings: AgentSettings) -> None:
        """Returns once clients may come."""
        self.server = AgentServer(settings)
        self._thread = asyncio_support.LoopThread("ringfold-agent", self.server.serve)
        self._thread.wait_ready()

    def call(self, function: Callable[[], None]) -> None:
        """Run something in the agent's loop."""
        self._thread.call(function)

    def stop(self) -> None:
        self._thread.call(self.server.stop)
        self.join()

    def join(self) -> None:
        """Wait until it ends by itself; raises what it ended of."""
        self._thread.join()

    def __enter__(self) -> "AgentThread":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


def _open_hints(path: Path, mode: int) -> _native.HintWriter:
    try:
        return _native.HintWriter(str(path), STALE_NS, mode)
    except BlockingIOError as error:
        raise ConfigError(f"{error}; one agent serves a host") from None
    except RuntimeError as error:
        raise ConfigError(str(error)) from None
