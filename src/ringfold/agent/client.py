"""What a process holds of its host's agent: it registers flows and is told where their hints are.

`AgentClient` never makes its caller wait and never raises because of the agent. A thread of its own looks for the
agent, connects, registers everything, and does it again whenever the agent was away. Without an agent, flows have no
place, which means the local policy. It is looked for ever more seldom (`pause_s`), and at once for a new flow.

A client belongs to the process that made it. In a forked child its copy is dead: it registers nothing, and neither its
end nor the child's takes anything from the parent. What a child has mapped of the hints is read-only.

An agent is trusted if its directory belongs to root or to this user, and others cannot write to it: hints are advice
about where bytes go.
"""

import logging
import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import TracebackType

from ringfold import _native
from ringfold.agent.enrolment import SERVED_S, Enrolment, pause_s
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
    Flow,
    FlowList,
    FromAgent,
    ListedFlow,
    ListFlows,
    Measured,
    Place,
    SetShares,
    SharesSet,
    ToAgent,
    agent_frame,
    decode_from_agent,
)
from ringfold.wire.frames import FrameReader

RETRY_S = 1.0
MAX_QUEUED_BYTES = 16 * 1024 * 1024

_log = logging.getLogger("ringfold.agent.client")


class AgentClient:
    """Registers flows with the agent of this host, for as long as it lives. Use it with `with`, or `close` it.

    `directories` are looked at in turn; the first with an agent is taken. `on_place` is called with a flow's connection
    and its place (None: local policy) whenever that changes, in the client's own thread.
    """

    def __init__(
        self,
        directories: Sequence[Path],
        name: str = "",
        on_place: Callable[[int, Place | None], None] | None = None,
    ) -> None:
        self._directories, self._on_place = list(directories), on_place
        self._enrolment = Enrolment(name)
        self._changed = threads.Condition()
        self._outbox: list[ToAgent] = []
        self._bell = WakeEvent()
        self._is_closing = self._is_closed = self._is_wanted = False
        self._pid = os.getpid()
        self._last_connection = 0
        self._directory: Path | None = None
        self._retry_ns: int | None = None
        self._warned: set[str] = set()
        self.distrusted = ""
        """Why the last agent that was found is not used, if it was for its files."""
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
        """There is a flow; returns its connection number at once. Its place comes when an agent has given it one."""
        if self._is_foreign:
            raise UsageError("this agent client belongs to the process that forked this one; make another")
        with self._changed:
            if self._is_closing:
                raise UsageError("this agent client is closed")
            self._last_connection += 1
            flow = Flow(self._last_connection, source, destination, tuple(paths), source_host, destination_host)
            try:
                self._post(self._enrolment.want(flow))
            except (TypeError, ValueError, AttributeError) as error:
                raise UsageError(f"a flow has addresses as text, and pairs of them as paths: {error}") from None
            self._is_wanted = True
            self._bell.ring()
        return flow.connection

    def deregister(self, connection: int) -> None:
        """The flow has ended."""
        if self._is_foreign:
            return
        with self._changed:
            self._post(self._enrolment.drop(connection))

    def measured(
        self, connection: int, bytes_per_s: Sequence[int], srtt_us: Sequence[int] = (), min_rtt_us: Sequence[int] = ()
    ) -> None:
        """Tell the agent what was measured on each path of a flow. Without an agent, nobody is told."""
        if self._is_foreign:
            return
        report = Measured(connection, tuple(bytes_per_s), tuple(srtt_us), tuple(min_rtt_us))
        with self._changed:
            self._post(self._enrolment.measured(report))

    def place(self, connection: int) -> Place | None:
        """Where the hints of a flow are: (slot, generation). None: local policy."""
        wish = self._enrolment.wishes.get(connection)
        return None if wish is None else wish.place

    def refusal(self, connection: int) -> str:
        """Why the agent gave this flow no place; empty if it did not say no."""
        wish = self._enrolment.wishes.get(connection)
        return "" if wish is None else wish.refused

    @property
    def hints(self) -> Path | None:
        """The file that the places are in; None without an agent."""
        return None if self._directory is None else self._directory / HINTS_NAME

    def reader(self) -> _native.HintReader | None:
        """A reader of that file, for consumers in Python."""
        return None if self.hints is None else _native.HintReader(str(self.hints))

    def wait(self, holds: Callable[["AgentClient"], bool], timeout_s: float) -> bool:
        """Wait until something holds, looking again at each change of a place; whether it did in time."""
        with self._changed:
            return self._changed.wait_for(lambda: holds(self), timeout_s)

    def close(self) -> None:
        """Deregister everything and end. May be called again."""
        if self._is_foreign:
            return
        with self._changed:
            self._is_closing = True
            if not self._is_closed:
                self._bell.ring()
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
            self._is_wanted = False
            connection = self._connect()
            if connection is not None:
                began_ns = monotonic_ns()
                self._serve(connection)
                if monotonic_ns() - began_ns > SERVED_S * 1e9:
                    away_ns = monotonic_ns()
            now_ns = monotonic_ns()
            until_ns = now_ns + int(pause_s((now_ns - away_ns) / 1e9) * 1e9)
            while not (self._is_closing or self._is_wanted) and (left_ns := until_ns - monotonic_ns()) > 0:
                self._bell.wait(left_ns / 1e9)
        with self._changed:
            self._is_closed = True
            self._bell.close()

    @property
    def _is_foreign(self) -> bool:
        """Asked before the lock is taken: in a forked child nobody may be there to let go of it."""
        return os.getpid() != self._pid

    def _post(self, messages: Sequence[ToAgent]) -> None:
        """For the thread to send. The lock is held."""
        if messages and not self._is_closed:
            self._outbox += messages
            self._bell.ring()

    def _connect(self) -> LocalConnection | None:
        for directory in self._directories:
            if identity(directory / SOCKET_NAME) is None:
                continue
            if why := distrust(directory) or distrust(directory / HINTS_NAME):
                if why not in self._warned:
                    self._warned.add(why)
                    _log.warning("an agent is not used: %s", why)
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
        """Talk until the connection ends, whoever ends it."""
        reader = FrameReader(MAX_ANSWER_BYTES)
        fd = connection.fileno()
        close_on_fork(fd)
        try:
            with self._changed:
                self._outbox = self._enrolment.connected()
            while not self._is_closing:
                self._send(connection)
                chunk = connection.wait(self._retry_s(), self._bell)
                if chunk == b"":
                    return
                if chunk:
                    self._heard([decode_from_agent(*each) for each in reader.feed(chunk)])
        except (OSError, RemoteProtocolError) as error:
            _log.info("the agent's connection is given up: %s", error)
        finally:
            keep_on_fork(fd)
            connection.close()
            with self._changed:
                lost, self._outbox, self._directory = self._enrolment.disconnected(), [], None
                self._tell(lost)

    def _retry_s(self) -> float | None:
        """How long to wait at most; asks again for a flow that was refused when that time has come."""
        with self._changed:
            if not self._enrolment.has_refused:
                self._retry_ns = None
                return None
            now_ns = monotonic_ns()
            if self._retry_ns is not None and now_ns >= self._retry_ns:
                self._outbox += self._enrolment.retry()
                self._retry_ns = None
                return 0.0
            if self._retry_ns is None:
                self._retry_ns = now_ns + int(RETRY_S * 1e9)
            return (self._retry_ns - now_ns) / 1e9

    def _send(self, connection: LocalConnection) -> None:
        with self._changed:
            outgoing, self._outbox = self._outbox, []
        if outgoing:
            connection.send(b"".join(map(agent_frame, outgoing)))
        if connection.queued > MAX_QUEUED_BYTES:
            raise ConnectionError("it does not read")

    def _heard(self, messages: Sequence[FromAgent]) -> None:
        with self._changed:
            for message in messages:
                if isinstance(message, AgentRefused):
                    _log.info("the agent refuses: %s", message.text)
                self._tell(self._enrolment.heard(message))

    def _tell(self, connections: Sequence[int]) -> None:
        for connection in connections:
            if self._on_place is not None:
                self._on_place(connection, self.place(connection))
        self._changed.notify_all()


class AgentConsole:
    """A connection of somebody who looks at an agent or steers it. Each question has `timeout_s` to be answered."""

    def __init__(self, directories: Sequence[Path], timeout_s: float = 5.0) -> None:
        self._timeout_s, self._last_request = timeout_s, 0
        self._reader = FrameReader(MAX_ANSWER_BYTES)
        self._waiting: list[FromAgent] = []
        self._where, self._connection = _first(directories)
        try:
            welcome = self._question(AgentHello(AGENT_PROTOCOL, "console"))
            if not isinstance(welcome, AgentWelcome):
                raise RemoteProtocolError(f"{self._where} did not begin with a welcome: is it a Ringfold agent?")
        except BaseException:
            self._connection.close()
            raise

    def status(self) -> AgentStatus:
        answer = self._question(AskAgent(self._next()))
        assert isinstance(answer, AgentStatus), answer
        return answer

    def flows(self) -> list[ListedFlow]:
        """All flows that this user may see."""
        flows: list[ListedFlow] = []
        more = True
        while more:
            answer = self._question(ListFlows(self._next(), flows[-1].number if flows else 0))
            assert isinstance(answer, FlowList), answer
            flows += answer.flows
            more = answer.more
        return flows

    def set_shares(self, source: str, destination: str, shares: Sequence[float]) -> int:
        """Fix shares (none: let the policy decide); returns how many slots follow. Raises UsageError if refused."""
        answer = self._question(SetShares(self._next(), source, destination, tuple(shares)))
        assert isinstance(answer, SharesSet), answer
        return answer.slots

    def _next(self) -> int:
        self._last_request += 1
        return self._last_request

    def _question(self, message: ToAgent) -> FromAgent:
        deadline_ns = monotonic_ns() + int(self._timeout_s * 1e9)
        try:
            self._connection.send(agent_frame(message))
            while not self._waiting:
                left_s = (deadline_ns - monotonic_ns()) / 1e9
                if left_s <= 0:
                    raise AgentUnreachable(self._where, f"no answer within {self._timeout_s:g} s")
                chunk = self._connection.wait(left_s)
                if chunk == b"":
                    raise AgentUnreachable(self._where, "it closed the connection")
                self._waiting += [decode_from_agent(*each) for each in self._reader.feed(chunk or b"")]
        except OSError as error:
            raise AgentUnreachable(self._where, error.strerror or str(error)) from None
        answer = self._waiting.pop(0)
        if isinstance(answer, AgentRefused):
            raise UsageError(f"the agent refused: {answer.text}")
        return answer

    def close(self) -> None:
        self._connection.close()

    def __enter__(self) -> "AgentConsole":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _first(directories: Sequence[Path]) -> tuple[str, LocalConnection]:
    """The first agent that takes a connection: a killed one leaves its socket behind."""
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
