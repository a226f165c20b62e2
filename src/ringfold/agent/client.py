"""What a process uses of its host's agent: it registers flows and learns where their hints are.

`FlowRegistrations` is the pure part: flows in, requests out, places back. It keeps the flows of the process, with or
without an agent. When a connection begins, all of them are registered; when it ends, none has a place any more. So an
agent may start, stop and start again at any time, and the owner of a flow does not notice. A flow that was refused
because of a limit is registered again later, one at a time (`retry`). A place belongs to the connection that gave it. A
response for a flow that has ended needs no handling: the Deregister that was sent after the request undoes it.

`AgentClient` never blocks its caller and never raises because of the agent. A thread of its own looks for the agent,
connects, registers all flows, and repeats that whenever the connection was lost. Without an agent, flows have no place,
which means the local policy. The longer no agent was found, the longer the pause between two attempts
(`reconnect_delay_s`); a new flow ends the pause.

A client belongs to the process that created it. In a forked child its copy does nothing: it registers nothing, and
neither closing it nor the end of the child affects the parent. The child's mapping of the hints is read-only.

An agent is trusted if its directory belongs to root or to this user, and no other user can write to it: hints are
advice about where bytes go.
"""

import logging
import operator
import os
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

from ringfold import _native
from ringfold.agent.registry import invalid_flow
from ringfold.errors import AgentUnreachable, RemoteProtocolError, UsageError
from ringfold.runtime import threads
from ringfold.runtime.clock import monotonic_ns
from ringfold.runtime.local import LocalConnection, WakeEvent, distrust, identity
from ringfold.runtime.process import close_on_fork, keep_on_fork
from ringfold.wire.agent import (
    AGENT_PROTOCOL,
    HINTS_NAME,
    MAX_ANSWER_BYTES,
    SOCKET_NAME,
    AgentHello,
    AgentRefused,
    AgentStatus,
    AgentWelcome,
    AskAgent,
    Deregister,
    Flow,
    FlowList,
    FromAgent,
    ListedFlow,
    ListFlows,
    Measured,
    Place,
    Register,
    Registered,
    SetShares,
    SharesSet,
    ToAgent,
    agent_frame,
    decode_from_agent,
)
from ringfold.wire.frames import FrameReader

MIN_RECONNECT_DELAY_S = 0.05
MAX_RECONNECT_DELAY_S = 30.0
MIN_SERVED_S = 1.0
"""After a connection this long, the delay before the next attempt starts again from the minimum."""
RETRY_INTERVAL_S = 1.0
MAX_QUEUED_BYTES = 16 * 1024 * 1024
MAX_MEASURED = 2**63 - 1

_log = logging.getLogger("ringfold.agent.client")


def reconnect_delay_s(away_s: float) -> float:
    """The pause before the next attempt to connect, if there was no agent for `away_s`.

    An eighth of that time: a restarted agent is found at once. On a host without an agent there are some 70 attempts in
    the first four minutes, each of a few microseconds, and then one every 30 s.
    """
    return min(MAX_RECONNECT_DELAY_S, max(MIN_RECONNECT_DELAY_S, away_s / 8))


@dataclass(eq=False, slots=True)
class WantedFlow:
    """A flow of the process. `place` is where its hints are; None: local policy, and `refused` may be the reason."""

    flow: Flow
    place: Place | None = None
    refused: str = ""
    is_valid: bool = True
    """Whether an agent would accept it; if not, it is not sent."""


@dataclass(eq=False, slots=True)
class FlowRegistrations:
    """The flows of one process and their places."""

    name: str
    flows: dict[int, WantedFlow] = field(default_factory=dict)
    generation: int = 0
    """The generation of the agent's table that the places belong to; 0: there is no agent."""
    requests_per_hint: int = 1
    """How many requests should share a read of a hint, as the last agent advised."""
    refusals: Counter[str] = field(default_factory=Counter)
    _is_connected: bool = False
    _last_request: int = 0
    _pending: dict[int, int] = field(default_factory=dict)
    _over_limit: dict[int, None] = field(default_factory=dict)

    def add(self, flow: Flow) -> list[ToAgent]:
        assert flow.connection not in self.flows
        why = invalid_flow(flow)
        self.flows[flow.connection] = WantedFlow(flow, refused=why, is_valid=not why)
        return [self._register(flow)] if self._is_connected and not why else []

    def remove(self, connection: int) -> list[ToAgent]:
        """The flow has ended. No effect for an unknown flow."""
        self._over_limit.pop(connection, None)
        wanted = self.flows.pop(connection, None)
        if wanted is None or not wanted.is_valid or not self._is_connected:
            return []
        self._last_request += 1
        return [Deregister(self._last_request, connection)]

    def measured(self, report: Measured) -> list[ToAgent]:
        wanted = self.flows.get(report.connection)
        return [report] if wanted is not None and wanted.place is not None else []

    @property
    def has_retries(self) -> bool:
        """Whether `retry` has something to send."""
        return bool(self._over_limit)

    def retry(self) -> list[ToAgent]:
        """Register one flow again that was refused because of a limit."""
        connection = next(iter(self._over_limit), None)
        if connection is None:
            return []
        del self._over_limit[connection]
        return [self._register(self.flows[connection].flow)]

    def connected(self) -> list[ToAgent]:
        """A connection was opened: send the hello, and register all flows."""
        self._is_connected = True
        self._pending.clear()
        valid = [wanted.flow for wanted in self.flows.values() if wanted.is_valid]
        return [AgentHello(AGENT_PROTOCOL, self.name), *map(self._register, valid)]

    def disconnected(self) -> list[int]:
        """The connection was lost. Returns the flows that had a place."""
        self._is_connected, self.generation = False, 0
        self._over_limit.clear()
        lost = [connection for connection, wanted in self.flows.items() if wanted.place is not None]
        for wanted in self.flows.values():
            wanted.place = None
        return lost

    def receive(self, message: FromAgent) -> list[int]:
        """Take a message of the agent. Returns the flows whose place has changed."""
        match message:
            case AgentWelcome(_, generation, requests_per_hint):
                self.generation, self.requests_per_hint = generation, requests_per_hint
            case Registered(request, connection, slot, generation):
                wanted = self.flows.get(connection)
                if self._pending.pop(request, None) is not None and wanted is not None:
                    wanted.place, wanted.refused = (slot, generation), ""
                    return [connection]
            case AgentRefused(request, kind, text):
                self.refusals[kind] += 1
                refused = self._pending.pop(request, None)
                if refused is not None and (wanted := self.flows.get(refused)) is not None:
                    wanted.refused = text
                    if kind in ("quota", "full"):
                        self._over_limit[refused] = None
            case _:
                pass
        return []

    def _register(self, flow: Flow) -> Register:
        self._last_request += 1
        self._pending[self._last_request] = flow.connection
        return Register(self._last_request, flow)


class AgentClient:
    """Registers flows with the agent of this host, for as long as it lives. Use it with `with`, or `close` it.

    `directories` are tried in turn; the first one with an agent is used. `on_place` is called in the client's thread
    with a flow's connection and its place (None: local policy) whenever the place changes. What it raises is logged.
    """

    def __init__(
        self,
        directories: Sequence[Path],
        name: str = "",
        on_place: Callable[[int, Place | None], None] | None = None,
    ) -> None:
        self._directories, self._on_place = list(directories), on_place
        self._registrations = FlowRegistrations(_plain_text(name).encode("utf-8", "replace").decode())
        self._changed = threads.Condition()
        self._outbox: list[ToAgent] = []
        self._wake = WakeEvent()
        self._is_closing = False
        self._is_closed = False
        self._has_new_flow = False
        self._pid = os.getpid()
        self._last_connection = 0
        self._directory: Path | None = None
        self._retry_ns: int | None = None
        self._warned: set[str] = set()
        self.distrusted = ""
        """Why the last agent that was found is not trusted; empty if it is."""
        self._thread = threads.start("ringfold-agent-client", self._run)

    def register(
        self,
        source: str,
        destination: str,
        paths: Iterable[tuple[str, str]],
        *,
        source_host: str = "",
        destination_host: str = "",
    ) -> int:
        """Register a flow, and return its connection number at once. Its place follows when an agent has assigned
        one. Raises UsageError if an address is not text, or a path not a pair of them."""
        if self._is_forked:
            raise UsageError("this agent client belongs to the parent process; create another")
        ends, pairs = (_plain_text(source), _plain_text(destination)), _pairs(paths)
        hosts = (_plain_text(source_host), _plain_text(destination_host))
        with self._changed:
            if self._is_closing:
                raise UsageError("this agent client is closed")
            self._last_connection += 1
            flow = Flow(self._last_connection, *ends, pairs, *hosts)
            self._post(self._registrations.add(flow))
            self._has_new_flow = True
            self._wake.set()
        return flow.connection

    def deregister(self, connection: int) -> None:
        """The flow has ended."""
        if self._is_forked:
            return
        connection = _number(connection)
        with self._changed:
            self._post(self._registrations.remove(connection))

    def measured(
        self, connection: int, bytes_per_s: Sequence[int], srtt_us: Sequence[int] = (), min_rtt_us: Sequence[int] = ()
    ) -> None:
        """Report to the agent what was measured on each path of a flow. No effect without an agent.

        Numbers of any type are rounded down. Raises UsageError if one is negative, not finite, or too large.
        """
        if self._is_forked:
            return
        report = Measured(_number(connection), _measured(bytes_per_s), _measured(srtt_us), _measured(min_rtt_us))
        with self._changed:
            self._post(self._registrations.measured(report))

    def place(self, connection: int) -> Place | None:
        """Where the hints of a flow are: (slot, generation). None: local policy."""
        wanted = self._registrations.flows.get(connection)
        return None if wanted is None else wanted.place

    def refusal(self, connection: int) -> str:
        """Why the agent refused this flow; empty if it did not."""
        wanted = self._registrations.flows.get(connection)
        return "" if wanted is None else wanted.refused

    @property
    def requests_per_hint(self) -> int:
        """How many requests of a flow should share a read of its hint, as the agent advises."""
        return self._registrations.requests_per_hint

    @property
    def hints(self) -> Path | None:
        """The file that the places are in; None without an agent."""
        return None if self._directory is None else self._directory / HINTS_NAME

    def reader(self) -> _native.HintReader | None:
        """A reader of that file, for Python code."""
        return None if self.hints is None else _native.HintReader(str(self.hints))

    def wait(self, holds: Callable[["AgentClient"], bool], timeout_s: float) -> bool:
        """Wait until `holds` returns true, called at each change of a place; whether it did before the timeout."""
        with self._changed:
            return self._changed.wait_for(lambda: holds(self), timeout_s)

    def close(self) -> None:
        """Deregister all flows and end. May be called more than once."""
        if self._is_forked:
            return
        with self._changed:
            self._is_closing = True
            if not self._is_closed:
                self._wake.set()
        if not threads.is_current(self._thread):
            self._thread.join()

    def __enter__(self) -> "AgentClient":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # The thread

    def _run(self) -> None:
        away_ns = monotonic_ns()
        while not self._is_closing:
            self._has_new_flow = False
            connection = self._connect()
            if connection is not None:
                began_ns = monotonic_ns()
                self._serve(connection)
                if monotonic_ns() - began_ns > MIN_SERVED_S * 1e9:
                    away_ns = monotonic_ns()
            now_ns = monotonic_ns()
            until_ns = now_ns + int(reconnect_delay_s((now_ns - away_ns) / 1e9) * 1e9)
            while not (self._is_closing or self._has_new_flow) and (left_ns := until_ns - monotonic_ns()) > 0:
                self._wake.wait(left_ns / 1e9)
        with self._changed:
            self._is_closed = True
            self._wake.close()

    @property
    def _is_forked(self) -> bool:
        """Whether this is a forked child. Checked before the lock: in a child no thread may be left that releases
        it."""
        return os.getpid() != self._pid

    def _post(self, messages: Sequence[ToAgent]) -> None:
        """Queue messages for the thread to send. The lock is held."""
        if messages and not self._is_closed:
            self._outbox += messages
            self._wake.set()

    def _connect(self) -> LocalConnection | None:
        for directory in self._directories:
            if identity(directory / SOCKET_NAME) is None:
                continue
            if why := distrust(directory) or distrust(directory / HINTS_NAME):
                if why not in self._warned:
                    self._warned.add(why)
                    _log.warning("an agent is not trusted: %s", why)
                with self._changed:
                    self.distrusted = why
                    self._changed.notify_all()
                continue
            try:
                connection = LocalConnection(directory / SOCKET_NAME)
            except OSError:
                continue
            self._directory = directory
            return connection
        return None

    def _serve(self, connection: LocalConnection) -> None:
        """Exchange messages until one side closes the connection."""
        reader = FrameReader(MAX_ANSWER_BYTES)
        fd = connection.fileno()
        close_on_fork(fd)
        try:
            with self._changed:
                self._outbox = self._registrations.connected()
            while not self._is_closing:
                self._send(connection)
                chunk = connection.wait(self._retry_s(), self._wake)
                if chunk == b"":
                    return
                if chunk:
                    self._receive([decode_from_agent(*each) for each in reader.feed(chunk)])
        except (OSError, RemoteProtocolError) as error:
            _log.info("the connection to the agent is closed: %s", error)
        finally:
            keep_on_fork(fd)
            connection.close()
            with self._changed:
                lost, self._outbox, self._directory = self._registrations.disconnected(), [], None
                self._announce(lost)

    def _retry_s(self) -> float | None:
        """How long to wait for messages; registers a refused flow again when that is due."""
        with self._changed:
            if not self._registrations.has_retries:
                self._retry_ns = None
                return None
            now_ns = monotonic_ns()
            if self._retry_ns is not None and now_ns >= self._retry_ns:
                self._outbox += self._registrations.retry()
                self._retry_ns = None
                return 0.0
            if self._retry_ns is None:
                self._retry_ns = now_ns + int(RETRY_INTERVAL_S * 1e9)
            return (self._retry_ns - now_ns) / 1e9

    def _send(self, connection: LocalConnection) -> None:
        with self._changed:
            outgoing, self._outbox = self._outbox, []
        if outgoing:
            connection.send(b"".join(map(agent_frame, outgoing)))
        if connection.queued > MAX_QUEUED_BYTES:
            raise ConnectionError("the agent does not read")

    def _receive(self, messages: Sequence[FromAgent]) -> None:
        with self._changed:
            for message in messages:
                if isinstance(message, AgentRefused):
                    _log.info("the agent refused: %s", message.text)
                self._announce(self._registrations.receive(message))

    def _announce(self, connections: Sequence[int]) -> None:
        for connection in connections:
            if self._on_place is not None:
                try:
                    self._on_place(connection, self.place(connection))
                except Exception:
                    _log.exception("on_place failed for flow %d", connection)
        self._changed.notify_all()


# What callers pass is converted in their thread: the encoder takes plain types only, and an agent disconnects a client
# that sends others.


def _plain_text(value: object) -> str:
    if not isinstance(value, str):
        raise UsageError(f"the names and addresses of a flow are text, not {type(value).__name__}")
    return str(value)


def _pairs(paths: Iterable[object]) -> tuple[tuple[str, str], ...]:
    try:
        found = [(path,) if isinstance(path, str) else tuple(path) for path in paths]  # type: ignore[arg-type]
    except TypeError:
        raise UsageError("the paths of a flow are pairs of addresses") from None
    for path in found:
        if len(path) != 2:
            raise UsageError(f"a path is a pair of addresses (local, remote), not {path!r}")
    return tuple((_plain_text(local), _plain_text(remote)) for local, remote in found)


def _number(connection: object) -> int:
    try:
        return operator.index(connection)  # type: ignore[arg-type]
    except TypeError:
        raise UsageError(f"{connection!r} is not the number of a flow") from None


def _measured(values: Iterable[object]) -> tuple[int, ...]:
    try:
        found = tuple(int(value) for value in values)  # type: ignore[call-overload]
    except (TypeError, ValueError, OverflowError) as error:
        raise UsageError(f"what was measured is a number for each path: {error}") from None
    for value in found:
        if not 0 <= value <= MAX_MEASURED:
            raise UsageError(f"what was measured is not negative, and below 2^63: {value}")
    return found


class AgentConsole:
    """A connection that reads the state of an agent or sets shares. Each request has a timeout of `timeout_s`."""

    def __init__(self, directories: Sequence[Path], timeout_s: float = 5.0) -> None:
        self._timeout_s, self._last_request = timeout_s, 0
        self._reader = FrameReader(MAX_ANSWER_BYTES)
        self._received: list[FromAgent] = []
        self._where, self._connection = _connect_first(directories)
        try:
            welcome = self._request(AgentHello(AGENT_PROTOCOL, "console"))
            if not isinstance(welcome, AgentWelcome):
                raise RemoteProtocolError(f"{self._where} did not send a welcome first: is it a Ringfold agent?")
        except BaseException:
            self._connection.close()
            raise

    def status(self) -> AgentStatus:
        response = self._request(AskAgent(self._next_request()))
        assert isinstance(response, AgentStatus), response
        return response

    def flows(self) -> list[ListedFlow]:
        """All flows that this user may see."""
        flows: list[ListedFlow] = []
        more = True
        while more:
            response = self._request(ListFlows(self._next_request(), flows[-1].number if flows else 0))
            assert isinstance(response, FlowList), response
            flows += response.flows
            more = response.more
        return flows

    def set_shares(self, source: str, destination: str, shares: Sequence[float]) -> int:
        """Fix shares (none: the policy decides); returns the number of slots. Raises UsageError if refused."""
        response = self._request(SetShares(self._next_request(), source, destination, tuple(shares)))
        assert isinstance(response, SharesSet), response
        return response.slots

    def _next_request(self) -> int:
        self._last_request += 1
        return self._last_request

    def _request(self, message: ToAgent) -> FromAgent:
        deadline_ns = monotonic_ns() + int(self._timeout_s * 1e9)
        try:
            self._connection.send(agent_frame(message))
            while not self._received:
                left_s = (deadline_ns - monotonic_ns()) / 1e9
                if left_s <= 0:
                    raise AgentUnreachable(self._where, f"no response within {self._timeout_s:g} s")
                chunk = self._connection.wait(left_s)
                if chunk == b"":
                    raise AgentUnreachable(self._where, "it closed the connection")
                self._received += [decode_from_agent(*each) for each in self._reader.feed(chunk or b"")]
        except OSError as error:
            raise AgentUnreachable(self._where, error.strerror or str(error)) from None
        response = self._received.pop(0)
        if isinstance(response, AgentRefused):
            raise UsageError(f"the agent refused: {response.text}")
        return response

    def close(self) -> None:
        self._connection.close()

    def __enter__(self) -> "AgentConsole":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _connect_first(directories: Sequence[Path]) -> tuple[str, LocalConnection]:
    """Connect to the first agent that accepts. A killed agent leaves its socket behind."""
    why = ""
    for directory in directories:
        where = str(directory / SOCKET_NAME)
        try:
            return where, LocalConnection(directory / SOCKET_NAME)
        except FileNotFoundError:
            continue
        except OSError as error:
            why = why or f"{where}: {error.strerror or error}"
    raise AgentUnreachable(str(directories[0]), why or "no agent runs there")
