"""The shell of the agent: a Unix socket and telemetry in, hints in shared memory out. It decides nothing.

The runtime directory has two files. `hints` is the table. The agent that writes it holds a lock on it, so that there is
only one agent, and a killed agent leaves nothing behind that its successor cannot take over. `agent.sock` is replaced
by the agent that holds the lock.

An agent that root runs serves all users of the host: the directory has mode 0755, the socket 0666, the hints 0644. The
agent of another user serves only that user: 0700, 0600, 0600. Hints hold no addresses, and a quota bounds what each
user registers.
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
from ringfold.agent.connections import BURST_NS, CPU_SHARE, REST_S, ClientConnection, ClientScheduler, CpuBudget
from ringfold.agent.effects import (
    CloseConnection,
    Effect,
    ForwardTelemetry,
    OpenSlot,
    PublishAdvice,
    SendMessage,
    UnwatchPair,
    WatchPair,
    WithdrawAdvice,
)
from ringfold.agent.events import (
    ConnectionClosed,
    ConnectionOpened,
    DatagramReceived,
    Event,
    MalformedMessageReceived,
    MessageReceived,
    QueueObserved,
    Tick,
)
from ringfold.agent.host_monitor import HostMonitor
from ringfold.agent.machine import AgentIdentity, AgentMachine
from ringfold.agent.monitors import NicWatch
from ringfold.agent.policy import Policy
from ringfold.agent.registry import Client, Quota, Registry
from ringfold.agent.steering import Steering, parse_policy
from ringfold.agent.telemetry import QueueTable, ReportSettings, TelemetryIngest
from ringfold.agent.tuning import AgentTuning
from ringfold.config import TELEMETRY_PORT, is_loopback, split_address
from ringfold.errors import ConfigError
from ringfold.runtime import asyncio_support, threads
from ringfold.runtime.clock import monotonic_ns, unix_ns
from ringfold.runtime.datagrams import DatagramPort
from ringfold.runtime.local import BACKLOG, identity, listen_unix, own_directory, touch
from ringfold.runtime.log_limit import LogRateLimiter
from ringfold.runtime.process import close_on_fork, keep_on_fork
from ringfold.wire.agent import HINTS_NAME, SOCKET_NAME, AgentStatus
from ringfold.wire.telemetry import Gate, GateSettings

HEARTBEAT_S = 0.1
STALE_NS = 1_000_000_000
"""Readers use their local policy when the heartbeat is this old: ten heartbeats, because a busy host may delay a
few."""
CHECK_FILES_EVERY = 10
"""Heartbeats between two checks that the socket and the hints are still this agent's."""
TOUCH_EVERY = 36_000
"""Heartbeats between two touches of the hints, so that programs that clean up /tmp do not remove them."""

_log = logging.getLogger("ringfold.agent")


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentSettings:
    """How one agent runs. `is_shared`: it serves all users of the host, or only its own (None: all if root runs it)."""

    directory: Path
    policy: str = "auto"
    tuning: AgentTuning = field(default_factory=AgentTuning)
    quota: Quota = field(default_factory=Quota)
    is_shared: bool | None = None
    telemetry: tuple[str, ...] = (f"127.0.0.1:{TELEMETRY_PORT}",)
    is_telemetry_optional: bool = False
    """Whether nobody chose the addresses: if one cannot be used, the agent warns, and goes on without it."""
    gate: GateSettings = field(default_factory=GateSettings)
    feeds: tuple[str, ...] = ()
    """Other feeds of telemetry, ADAPTER=WHERE."""
    report_to: tuple[str, ...] = ()
    reports: ReportSettings = field(default_factory=ReportSettings)
    forward_port: int = TELEMETRY_PORT
    """Where the agents of other hosts receive telemetry; 0: nothing is forwarded to them."""
    watch_nics: bool = True
    monitors: tuple[str, ...] = ()
    """NIC monitors from other packages, by their names."""

    def __post_init__(self) -> None:
        for address in self.telemetry:
            host, _ = split_address(address, TELEMETRY_PORT)
            if not is_loopback(host) and self.gate.allow == GateSettings().allow and not self.gate.keys:
                raise ConfigError(f"other machines can send telemetry to {host}: give a list of senders, or a key")

    @property
    def shared(self) -> bool:
        return os.geteuid() == 0 if self.is_shared is None else self.is_shared


class AgentServer:
    """One agent on real sockets."""

    def __init__(self, settings: AgentSettings) -> None:
        """Take over the directory; raises ConfigError if that fails, or if another agent has it."""
        self._settings = settings
        tuning = settings.tuning
        steering = Steering(
            parse_policy(settings.policy),
            TelemetryIngest(Gate(settings.gate), QueueTable(tuning.telemetry())),
            Policy(tuning.policy()),
            interval_ns=tuning.interval_ns,
            backpressure=tuning.backpressure,
        )
        self.directory = settings.directory
        own_directory(self.directory, 0o755 if settings.shared else 0o700)
        self._hints = _open_hints(self.directory / HINTS_NAME, 0o644 if settings.shared else 0o600)
        me = AgentIdentity(
            pid=os.getpid(),
            uid=os.geteuid(),
            generation=self._hints.generation,
            hints=str(self.directory / HINTS_NAME),
            started_ns=monotonic_ns(),
        )
        self._machine = AgentMachine(me, Registry(self._hints.slot_generations(), settings.quota), steering, tuning)
        self._connections: dict[Client, ClientConnection] = {}
        self._scheduler = ClientScheduler(self)
        self._last_client = 0
        self._stopping: asyncio.Event | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._failure: BaseException | None = None
        self._host_monitor = self._make_host_monitor()
        self._listeners: list[TelemetryListener] = []
        self._timer: asyncio.TimerHandle | None = None
        self._timer_ns = 0
        self._rest_until_ns = 0
        self._log_limit = LogRateLimiter()
        self._files: dict[Path, tuple[int, int, int] | None] = {}

    @property
    def telemetry(self) -> list[str]:
        """The addresses at which it receives telemetry, once it serves. Port 0 is replaced by the actual port."""
        return self._machine.telemetry

    def _make_host_monitor(self) -> HostMonitor:
        chosen = self._settings
        watch: NicWatch | None = None
        try:
            watch = NicWatch(chosen.monitors, chosen.tuning.interval_ns) if chosen.watch_nics else None
            if watch is not None:
                self._machine.monitors = watch.states
            return HostMonitor(
                self._take_event,
                watch=watch,
                report_to=chosen.report_to,
                reports=chosen.reports,
                feeds=chosen.feeds,
                forward_port=chosen.forward_port,
            )
        except BaseException:
            if watch is not None:
                watch.close()
            self._hints.close()
            raise

    def _take_event(self, event: Event) -> None:
        self.step(event)
        self.decide()

    async def serve(self, ready: Callable[[], None] | None = None) -> None:
        """Serve until `stop`. `ready` is called once clients can connect."""
        self._stopping, self._loop = asyncio.Event(), asyncio.get_running_loop()
        path = self.directory / SOCKET_NAME
        server: asyncio.Server | None = None
        heartbeats = asyncio.create_task(self._send_heartbeats(), name="ringfold agent heartbeat")
        try:
            sock = listen_unix(path, 0o666 if self._settings.shared else 0o600)
            server = await asyncio.get_running_loop().create_unix_server(
                lambda: ClientConnection(self._scheduler), sock=sock, backlog=BACKLOG
            )
            close_on_fork(sock.fileno())
            self._files = {each: identity(each) for each in (path, self.directory / HINTS_NAME)}
            for address in self._settings.telemetry:
                self._listen(address)
            self._host_monitor.start()
            receives = f", telemetry at {', '.join(self.telemetry)}" if self.telemetry else ""
            _log.info("serving at %s, life %d of this table%s", path, self._hints.generation, receives)
            if ready is not None:
                ready()
            await self._stopping.wait()
        finally:
            heartbeats.cancel()
            await asyncio.gather(heartbeats, return_exceptions=True)
            if server is not None:
                for each in server.sockets:
                    keep_on_fork(each.fileno())
                server.close()
                if identity(path) == self._files.get(path):
                    path.unlink(missing_ok=True)
            for listener in self._listeners:
                listener.port.close()
            await self._host_monitor.stop()
            if self._timer is not None:
                self._timer.cancel()
            for connection in list(self._connections.values()):
                connection.close()
            self._connections.clear()
            self.close()
        if self._failure is not None:
            raise self._failure

    def stop(self) -> None:
        """End `serve`. Call it in the agent's loop."""
        if self._stopping is not None:
            self._stopping.set()

    def status(self, timeout_s: float) -> AgentStatus:
        """The status of this instant, for another thread than the agent's own. TimeoutError if its loop is too busy, or
        does not run."""
        if self._loop is None:
            raise TimeoutError
        pending: threads.PendingCall[AgentStatus] = threads.PendingCall()
        try:
            self._loop.call_soon_threadsafe(pending.run, lambda: self._machine.status(monotonic_ns()))
        except RuntimeError:  # the loop is closed
            raise TimeoutError from None
        return pending.result(timeout_s)

    def close(self) -> None:
        """Release the hints; readers see at once that there is no agent. `serve` calls it at its end."""
        self._hints.close()

    async def _send_heartbeats(self) -> None:
        for number in itertools.count():
            self._hints.beat()
            if number % CHECK_FILES_EVERY == 0:
                self._check_files()
            if number % TOUCH_EVERY == 0:
                touch(self.directory / HINTS_NAME)
            await asyncio.sleep(HEARTBEAT_S)

    def _check_files(self) -> None:
        """End if the socket or the hints were removed: no client finds this agent then, and another one can start."""
        removed = [str(path) for path, file in self._files.items() if identity(path) != file]
        if removed and self._failure is None:
            what = f"{' and '.join(removed)} was removed, replaced or truncated"
            self._failure = ConfigError(f"{what}; the agent ends: start it again")
            self.stop()

    def _listen(self, address: str) -> None:
        host, port = split_address(address, TELEMETRY_PORT)
        try:
            listener = TelemetryListener(self, host, port)
        except OSError as error:
            why = f"cannot receive telemetry at {address}: {error.strerror or error}"
            if not self._settings.is_telemetry_optional:
                raise ConfigError(why) from None
            _log.warning("%s. This is the default, and the agent goes on without it: --telemetry names another", why)
            return
        self._listeners.append(listener)
        self._machine.telemetry.append(asyncio_support.address_text(listener.port.name))

    # Decisions

    def decide(self) -> None:
        """Let the machine decide what is due, and set a timer for the rest. Call it after every event or batch of
        them."""
        if self._machine.is_urgent:
            self.step(Tick(only_urgent=True))
        wake_ns = self._machine.wake_ns()
        if wake_ns is not None and max(wake_ns, self._rest_until_ns) <= monotonic_ns():
            began_ns = monotonic_ns()
            self.step(Tick())
            ended_ns = monotonic_ns()
            self._rest_until_ns = 2 * ended_ns - began_ns
            wake_ns = self._machine.wake_ns()
        if self._machine.is_urgent:
            at_ns = 0  # after the other callbacks of the event loop
        elif wake_ns is None:
            return
        else:
            at_ns = max(wake_ns, self._rest_until_ns)
        if self._timer is not None:
            if self._timer_ns <= at_ns:
                return
            self._timer.cancel()
        self._timer_ns = at_ns
        self._timer = asyncio.get_running_loop().call_later(max(0, at_ns - monotonic_ns()) / 1e9, self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        self.decide()

    # Events in, effects out

    def step(self, event: Event) -> None:
        """Step the machine and carry out the effects.

        If the message of a client raises an exception, that client is disconnected. The agent ends if its tables are
        inconsistent after that, or if the event came from no client.
        """
        if self._failure is not None:
            return
        try:
            self._apply(event)
        except Exception as error:
            try:
                if not isinstance(event, MessageReceived | DatagramReceived | QueueObserved):
                    raise
                self._warn("exception at %r", event, exc_info=True)
                if isinstance(event, MessageReceived):
                    text = f"the agent failed on its {type(event.message).__name__}"
                    self._apply(MalformedMessageReceived(event.client, text))
                self._machine.check()
            except Exception:
                _log.exception("exception at %r; the agent ends", event)
                self._failure = error
                self.stop()

    def _apply(self, event: Event) -> None:
        for effect in self._machine.step(monotonic_ns(), event):
            self._carry_out(effect)

    def _warn(self, text: str, *facts: object, exc_info: bool = False) -> None:
        """Log an error of a client, rate-limited. The number of the client does not make two lines different."""
        if (more := self._log_limit.take(monotonic_ns(), f"{text}: {facts[-1]}")) is not None:
            _log.warning(text + "%s", *facts, more, exc_info=exc_info)

    def _carry_out(self, effect: Effect) -> None:
        match effect:
            case SendMessage(client, message):
                if (connection := self._connections.get(client)) is not None:
                    connection.send(message)
            case OpenSlot(slot, generation):
                self._hints.open(slot, generation)
            case PublishAdvice(slot, shares, backpressure, is_fixed):
                self._hints.publish(slot, shares, backpressure, is_fixed)
            case WithdrawAdvice(slot):
                self._hints.withdraw(slot)
            case ForwardTelemetry(address, report, measured_unix_ns):
                if not self._host_monitor.forward(address, report, measured_unix_ns):
                    self._machine.counts["telemetry forwards lost"] += 1
            case WatchPair(pair):
                self._host_monitor.watch_pair(pair)
            case UnwatchPair(pair):
                self._host_monitor.unwatch_pair(pair)
            case CloseConnection(client, why):
                self._warn("client %d is disconnected: %s", client, why)
                if (connection := self._connections.pop(client, None)) is not None:
                    connection.close()
            case _:
                assert_never(effect)

    # Connections

    def connection_opened(self, connection: ClientConnection, uid: int, pid: int) -> Client:
        self._last_client += 1
        self._connections[self._last_client] = connection
        self.step(ConnectionOpened(self._last_client, uid, pid))
        return self._last_client

    def connection_closed(self, client: Client) -> None:
        if self._connections.pop(client, None) is not None:
            self.step(ConnectionClosed(client))

    def is_open(self, client: Client) -> bool:
        return client in self._connections


class TelemetryListener:
    """A UDP port for telemetry. The machine decides what is accepted; there are no responses.

    Anyone may send anything at any rate. Processing takes at most CPU_SHARE of a core; beyond that the kernel drops
    datagrams.
    """

    def __init__(self, server: AgentServer, host: str, port: int) -> None:
        self._server, self._budget = server, CpuBudget(CPU_SHARE, BURST_NS)
        self.port = DatagramPort(host, port, self._receive)

    def _receive(self, content: bytes, address: str) -> None:
        began_ns = monotonic_ns()
        self._server.step(DatagramReceived(unix_ns(), content, address))
        self._server.decide()
        self._budget.spend(began_ns, monotonic_ns())
        if self._budget.is_spent:
            self.port.pause(REST_S)


class AgentThread:
    """An agent in a thread of its own, for tests and notebooks. Use it with `with`."""

    def __init__(self, settings: AgentSettings) -> None:
        """Returns once clients can connect."""
        self.server = AgentServer(settings)
        self._thread = asyncio_support.LoopThread("ringfold-agent", self.server.serve)
        self._thread.wait_ready()

    def call(self, function: Callable[[], None]) -> None:
        """Run a function in the agent's event loop."""
        self._thread.call(function)

    def stop(self) -> None:
        self._thread.call(self.server.stop)
        self.join()

    def join(self) -> None:
        """Wait until it ends; raises the error that ended it."""
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
