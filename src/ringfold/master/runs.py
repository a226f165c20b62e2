"""The runs of a master: which connection belongs to which run, and what happens when a run breaks. Pure.

A connection belongs to no run until its first message, a request, has named a run and proven that run's token. From
then on it belongs to that run's machine (`machine.py`), which knows of no other run. A run is created by the first
request that names it. Runs share the master's clock, lease and fence, and nothing else: each has its own secret, ids,
epochs, state, journal and probing rounds.

A machine that raises an unexpected exception is broken. Its connections are closed, and no other run is affected. With
a journal the run restarts from what was written last, as after a change of masters: under a higher fence of its own,
and after a pause that doubles each time. Without a journal it is over.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import assert_never

from msgspec import structs

from ringfold.config import DEFAULT_RUN, check_run_name
from ringfold.errors import ConfigError, RemoteProtocolError
from ringfold.master.effects import (
    CloseConnection,
    Effect,
    Notify,
    RaiseFrameLimit,
    ReportBrokenRun,
    SendMessage,
    WriteJournal,
)
from ringfold.master.events import (
    Conn,
    ConnectionClosed,
    ConnectionOpened,
    DoneReceived,
    Event,
    FramePartReceived,
    HeartbeatReceived,
    MalformedReceived,
    MessageReceived,
    MoonshotFinished,
    Ns,
    StopRequested,
    Tick,
)
from ringfold.master.journal import Journal, forgotten_journal
from ringfold.master.liveness import StallCompensatedClock
from ringfold.master.machine import Master
from ringfold.master.requests import OLDEST_VERSION, FirstRequest, RunRequest, authenticate
from ringfold.master.run import CLIENT_IDLE_NS
from ringfold.master.settings import MasterSettings
from ringfold.units import MS
from ringfold.wire.decoding import checked, reason_of
from ringfold.wire.messages import (
    PROTOCOL_VERSION,
    Challenge,
    EventsRequest,
    EvictRequest,
    ForgetRun,
    GuardianHello,
    Hello,
    Refused,
    Resume,
    RunList,
    RunsRequest,
    Status,
    StatusRequest,
    ToMaster,
)
from ringfold.wire.notices import ConnectionDropped, RunForgotten
from ringfold.wire.probing import NodeHello, ProbeCommand
from ringfold.wire.proof import prove, run_token
from ringfold.wire.regions import RelayHello
from ringfold.wire.status import RunInfo

FIRST_PAUSE_NS, MAX_PAUSE_NS = 1_000 * MS, 60_000 * MS
"""How long a broken run waits before it restarts."""
_PURPOSES: dict[type[ToMaster], str] = {
    Hello: "hello",
    Resume: "resume",
    GuardianHello: "guardian",
    StatusRequest: "status",
    EventsRequest: "status",
    EvictRequest: "evict",
    NodeHello: "node",
    RelayHello: "relay",
    ProbeCommand: "probe",
    RunsRequest: "runs",
    ForgetRun: "forget",
}
Routed = tuple[str, list[Effect]]
"""The effects of one run, with its name. Effects that belong to no run have an empty name, and do not wait."""


@dataclass(slots=True)
class _Unauthenticated:
    """A connection that belongs to no run: it is not authenticated yet, or requests the list of runs."""

    remote: str
    nonce: bytes
    since_ns: Ns
    proven: bool = False


@dataclass(slots=True)
class _Served:
    """One run. Without a machine it is broken."""

    name: str
    fence: int
    machine: Master | None
    journal: Journal | None = None
    """The newest journal that was handed out to be written."""
    breaks: int = 0
    restart_ns: Ns | None = None
    """When a broken run restarts; None: never."""
    why: str = ""


class Runs:
    """All runs of one master. `secret` is fresh randomness; `wall_s` and `now_ns` are clocks that no decision uses."""

    def __init__(
        self,
        settings: MasterSettings,
        token: bytes,
        secret: bytes,
        fence: int = 1,
        started_ns: Ns = 0,
        *,
        keeps_journal: bool = False,
        leader: str = "",
        now_ns: Callable[[], Ns] = lambda: 0,
        wall_s: Callable[[], int] = int,
        machine: type[Master] = Master,
    ) -> None:
        self._settings, self._token, self._secret, self._fence = settings, token, secret, fence
        self._keeps_journal, self._leader = keeps_journal, leader
        self._now_ns, self._wall_s, self._machine = now_ns, wall_s, machine
        self._served: dict[str, _Served] = {}
        self._made = 0
        self._unauthenticated: dict[Conn, _Unauthenticated] = {}
        self._owner: dict[Conn, str] = {}
        self._out: list[Routed] = []
        self._clock = StallCompensatedClock(started_ns)
        self._now = started_ns
        """By the master's own clock, which stops while the master does not run."""
        self._start(started_ns, DEFAULT_RUN)

    # The table of runs

    @property
    def names(self) -> list[str]:
        return sorted(self._served)

    def restore(self, now_ns: Ns, name: str, journal: Journal | None, links: bytes = b"") -> list[Routed]:
        """Continue a run of another master, or remember one that has ended. It may have no journal.

        A journal that cannot be restored breaks that run, and no other.
        """
        self._out = []
        try:
            self._start(now_ns, name, journal, links)
        except Exception as error:
            served = self._served.setdefault(name, _Served(name, self._fence, None))
            served.journal = journal
            self._break(served, "its journal", error)
        return self._out

    def first_journals(self) -> dict[str, Journal]:
        """What must be written first for each run: its raised fence."""
        return {name: served.machine.journal() for name, served in self._served.items() if served.machine is not None}

    def statuses(self, now_ns: Ns) -> list[Status]:
        """The statuses of all runs that have a machine and were ever used, with the links of their rings only."""
        machines = [served.machine for _, served in sorted(self._served.items()) if served.machine is not None]
        return [machine.status(now_ns, only_ring_links=True) for machine in machines if machine.is_used]

    def machine_of(self, name: str) -> Master | None:
        served = self._served.get(name)
        return None if served is None else served.machine

    def owner(self, conn: Conn) -> str:
        """The run that a connection belongs to; empty if it belongs to none."""
        return self._owner.get(conn, "")

    def infos(self) -> list[RunInfo]:
        """All runs that were ever used. If there are none, the default run, which is new."""
        shown = [served for _, served in sorted(self._served.items()) if self._is_used(served)]
        return [_info(served) for served in shown or [self._served[DEFAULT_RUN]]]

    def _is_used(self, served: _Served) -> bool:
        return served.machine is None or served.machine.is_used

    def _start(self, now_ns: Ns, name: str, journal: Journal | None = None, links: bytes = b"") -> _Served:
        """Make a machine for a run, new or from a journal. A closed journal has only the run's end."""
        before = self._served.get(name)
        known, self._made = before or _Served(name, self._fence, None), self._made + 1
        is_closed = journal is not None and journal.is_closed
        machine = self._machine(
            self._settings,
            run_token(self._token, name),
            prove(self._secret, "run secret", name.encode(), self._made.to_bytes(8, "little")),
            known.fence,
            now_ns,
            self._now_ns,
            None if is_closed else journal,
            self._leader,
            keeps_journal=self._keeps_journal,
            links=links,
            name=name,
            wall_s=self._wall_s,
            life=journal.life if journal is not None and is_closed else None,
        )
        known.machine, known.journal, known.restart_ns, known.why = machine, machine.journal(), None, ""
        self._served[name] = known
        return known

    # Events

    def step(self, now_ns: Ns, event: Event) -> list[Routed]:
        """Apply one event; return what the shell must now do, run by run, in order."""
        self._out, self._now = [], self._clock.read(now_ns, tick=isinstance(event, Tick))
        match event:
            case (
                DoneReceived()
                | HeartbeatReceived()
                | MessageReceived()
                | FramePartReceived()
                | MalformedReceived()
                | ConnectionClosed()
            ):
                owner = self._owner.get(event.conn)
                if owner is not None:
                    if isinstance(event, ConnectionClosed):
                        del self._owner[event.conn]
                    self._step(now_ns, owner, event)
                elif event.conn in self._unauthenticated:
                    self._from_unauthenticated(now_ns, event.conn, event)
            case Tick():
                self._tick(now_ns)
            case StopRequested():
                for name in self.names:
                    self._step(now_ns, name, event)
                for conn in list(self._unauthenticated):
                    self._close(conn, event.reason)
            case ConnectionOpened():
                self._open(event)
            case MoonshotFinished(run=run):
                self._step(now_ns, run, event)
            case _:
                assert_never(event)
        return self._out

    def next_round_ns(self, now_ns: Ns) -> Ns | None:
        """When a probing round of any run needs a Tick; None if none does."""
        machines = [served.machine for served in self._served.values() if served.machine is not None]
        times = [due for machine in machines if (due := machine.next_round_ns(now_ns)) is not None]
        return min(times, default=None)

    def _step(self, now_ns: Ns, name: str, event: Event) -> None:
        served = self._served.get(name)
        if served is None or served.machine is None:
            return
        try:
            effects = served.machine.step(now_ns, event)
        except Exception as error:
            self._break(served, repr(event), error)
            return
        for index, effect in enumerate(effects):
            if isinstance(effect, CloseConnection):
                self._owner.pop(effect.conn, None)
            elif isinstance(effect, WriteJournal):
                served.journal = effect.journal
            elif isinstance(effect, SendMessage) and isinstance(effect.message, Status):
                others = [info.name for info in self.infos() if info.name != name]
                effects[index] = SendMessage(effect.conn, structs.replace(effect.message, other_runs=others))
        if effects:
            self._out.append((name, effects))

    def _tick(self, now_ns: Ns) -> None:
        limit_ms = self._settings.handshake_ms
        for conn, client in list(self._unauthenticated.items()):
            if not client.proven and self._now - client.since_ns >= limit_ms * MS:
                self._drop(conn, f"it was not authenticated within {limit_ms} ms", again=True)
            elif client.proven and self._now - client.since_ns >= CLIENT_IDLE_NS:
                self._drop(conn, "it has sent no request for a while", again=True)
        for name in self.names:
            served = self._served[name]
            if served.machine is None and served.restart_ns is not None and self._now >= served.restart_ns:
                self._restart(now_ns, served)
            if name != DEFAULT_RUN and not self._is_used(served):
                self._forget(now_ns, name, [])  # no peer ever joined it
            elif served.machine is not None and not served.machine.is_idle:
                self._step(now_ns, name, Tick())

    # Broken runs

    def _break(self, served: _Served, where: str, error: Exception) -> None:
        """End this run's machine, and nothing else."""
        served.why, served.machine = f"run {served.name} broke in the master: {reason_of(error)}", None
        served.breaks += 1
        may_restart = self._keeps_journal or served.name == DEFAULT_RUN
        pause_ns = min(FIRST_PAUSE_NS << min(served.breaks - 1, 16), MAX_PAUSE_NS)
        served.restart_ns = self._now + pause_ns if may_restart else None
        effects: list[Effect] = [ReportBrokenRun(error, where, pause_ns if may_restart else None)]
        for conn in [conn for conn, name in self._owner.items() if name == served.name]:
            del self._owner[conn]
            if not self._keeps_journal:
                effects.append(
                    SendMessage(conn, Refused(self._why_broken(served)))
                )  # with a journal they reconnect by themselves
            effects.append(CloseConnection(conn, served.why))
        self._out.append((served.name, effects))

    def _why_broken(self, served: _Served) -> str:
        if served.restart_ns is not None:
            return f"{served.why}; it restarts soon"
        return f"{served.why}; its log has more. Join another run, or `ringfold runs forget {served.name}`"

    def _restart(self, now_ns: Ns, served: _Served) -> None:
        journal = served.journal if self._keeps_journal else None
        served.fence += self._keeps_journal
        try:
            self._start(now_ns, served.name, journal)
        except Exception as error:
            self._break(served, "its journal", error)
            return
        if self._keeps_journal:
            # The fence is raised in the journal before anything is sent.
            assert served.journal is not None
            self._out.append((served.name, [WriteJournal(served.journal)]))

    # Unauthenticated connections

    def _open(self, event: ConnectionOpened) -> None:
        self._unauthenticated[event.conn] = _Unauthenticated(event.remote, event.nonce, self._now)
        self._emit([SendMessage(event.conn, Challenge(event.nonce, OLDEST_VERSION, PROTOCOL_VERSION))])
        unproven = [conn for conn, client in self._unauthenticated.items() if not client.proven]
        if len(unproven) > self._settings.max_unproven:
            reason = f"more than {self._settings.max_unproven} connections are not authenticated yet"
            self._drop(unproven[0], reason, again=True)

    def _from_unauthenticated(
        self,
        now_ns: Ns,
        conn: Conn,
        event: MessageReceived
        | HeartbeatReceived
        | FramePartReceived
        | DoneReceived
        | MalformedReceived
        | ConnectionClosed,
    ) -> None:
        match event:
            case MessageReceived(message=message):
                try:
                    self._first_request(now_ns, conn, event, message)
                except RemoteProtocolError as error:
                    self._drop(conn, str(error))
            case HeartbeatReceived():
                self._drop(conn, "a heartbeat from a client that has not joined")
            case DoneReceived():
                self._drop(conn, "a Done from a client that has not joined")
            case MalformedReceived(reason=reason):
                self._drop(conn, reason)
            case ConnectionClosed():
                del self._unauthenticated[conn]
            case FramePartReceived():
                pass

    def _first_request(self, now_ns: Ns, conn: Conn, event: MessageReceived, message: ToMaster) -> None:
        """The first message of a connection, which says what it requests."""
        client = self._unauthenticated[conn]
        match message:
            case (
                Hello()
                | Resume()
                | GuardianHello()
                | StatusRequest()
                | EventsRequest()
                | EvictRequest()
                | NodeHello()
                | RelayHello()
                | ProbeCommand()
            ):
                if client.proven:
                    raise RemoteProtocolError(f"{type(message).__name__} from a client that requested the list of runs")
                name, token = self._run_name(message), run_token(self._token, check_name(message.run))
                self._prove(message, token, client)
                self._hand_over(now_ns, conn, event, name, token)
            case RunsRequest():
                self._prove(message, self._token, client)
                client.proven, client.since_ns = True, self._now
                self._emit([RaiseFrameLimit(conn), SendMessage(conn, RunList(self.infos()))])
            case ForgetRun(name=name):
                self._prove(message, self._token, client)
                client.proven, client.since_ns = True, self._now
                self._emit([RaiseFrameLimit(conn)])
                self._forget_if_over(now_ns, conn, check_name(name))
            case _:
                what = type(message).__name__
                raise RemoteProtocolError(f"{what} where Hello, NodeHello or a request is expected")

    def _prove(self, request: FirstRequest, token: bytes, client: _Unauthenticated) -> None:
        checked(authenticate, request, token, _PURPOSES[type(request)], client.nonce)

    def _run_name(self, request: RunRequest) -> str:
        """The run that a request names. A command without a name means the only run, if there is one."""
        is_command = isinstance(request, StatusRequest | EventsRequest | EvictRequest | ProbeCommand)
        name = check_name(request.run)
        if is_command and not request.run:
            [first, *others] = self.infos()
            return name if others else first.name
        if (is_command or isinstance(request, GuardianHello)) and name not in self._served:
            there = ", ".join(info.name for info in self.infos())
            raise RemoteProtocolError(f"there is no run {name} here; there are: {there}")
        return name

    def _hand_over(self, now_ns: Ns, conn: Conn, event: MessageReceived, name: str, token: bytes) -> None:
        """From now on the connection belongs to that run."""
        served = self._served.get(name)
        if served is None:
            if len(self._served) >= self._settings.max_runs:
                full = f"this master serves {len(self._served)} runs, and max_runs allows no more"
                raise RemoteProtocolError(f"{full}: free a name with `ringfold runs forget`, or raise max_runs")
            served = self._start(now_ns, name)
        if served.machine is None:
            self._drop(conn, self._why_broken(served), again=served.restart_ns is not None, is_told=True)
            return
        client = self._unauthenticated.pop(conn)
        self._owner[conn] = name
        self._step(now_ns, name, ConnectionOpened(conn, client.remote, client.nonce, token))
        self._step(now_ns, name, event)

    def _forget_if_over(self, now_ns: Ns, conn: Conn, name: str) -> None:
        served = self._served.get(name)
        if served is None or not self._is_used(served):
            there = ", ".join(info.name for info in self.infos())
            raise RemoteProtocolError(f"there is no run {name} here; there are: {there}")
        peers = 0 if served.machine is None else served.machine.info().peers + served.machine.info().away
        if peers:
            raise RemoteProtocolError(f"run {name} has {peers} peers: stop them first, then forget it")
        left = [info for info in self.infos() if info.name != name]
        self._forget(now_ns, name, [Notify(RunForgotten(name)), SendMessage(conn, RunList(left))])

    def _forget(self, now_ns: Ns, name: str, after: list[Effect]) -> None:
        """Forget a run, once that is written. The default run exists again at once, and is new."""
        for conn in [conn for conn, owner in self._owner.items() if owner == name]:
            del self._owner[conn]
            self._emit([CloseConnection(conn, f"run {name} was forgotten")])
        journal = forgotten_journal(self._served.pop(name).fence)
        if name == DEFAULT_RUN:
            journal = self._start(now_ns, name).journal or journal
        self._out.append((name, [WriteJournal(journal), *after] if self._keeps_journal else after))

    def _drop(self, conn: Conn, reason: str, *, again: bool = False, is_told: bool = False) -> None:
        """Close a connection. A client that may try `again` (it was only slow) is not sent `Refused`, unless
        `is_told`."""
        client = self._unauthenticated[conn]
        self._emit([Notify(ConnectionDropped(client.remote, reason))])
        if not again or is_told:
            self._emit([SendMessage(conn, Refused(reason, again))])
        self._close(conn, reason)

    def _close(self, conn: Conn, reason: str) -> None:
        del self._unauthenticated[conn]
        self._emit([CloseConnection(conn, reason)])

    def _emit(self, effects: Iterable[Effect]) -> None:
        """Add effects that belong to no run."""
        self._out.append(("", list(effects)))


def check_name(name: str) -> str:
    """The run that a message names; RemoteProtocolError if it is not a valid name."""
    try:
        return check_run_name(name)
    except ConfigError as error:
        raise RemoteProtocolError(str(error)) from None


def _info(served: _Served) -> RunInfo:
    if served.machine is None:
        return RunInfo(served.name, "broken", why=served.why)
    return served.machine.info()
