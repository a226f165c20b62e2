"""The runs of a master: who talks to which of them, and what happens when one breaks. Pure.

A connection is nobody's until its first message, a claim, has named a run and proven that run's token. From then on it
belongs to that run's machine (`machine.py`), which knows of no other. A run comes into being with the first claim that
names it. Runs share the master's clock, lease and fence, and nothing else: each has its own secret, ids, epochs, state,
journal and rounds of probing.

A machine that raises what nobody foresaw is worth nothing any more. Its connections are closed, and no other run
notices. With a journal the run begins again from what was written last, as after a change of masters: under a fence of
its own that is higher, and after a pause that doubles. Without a journal it is over.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import assert_never

from msgspec import structs

from ringfold.config import DEFAULT_RUN, check_run_name
from ringfold.errors import ConfigError, RemoteProtocolError
from ringfold.master.claims import OLDEST_VERSION, Claim, RunClaim, check_claim
from ringfold.master.events import (
    Beat,
    Broken,
    Close,
    Closed,
    Conn,
    DoneSeen,
    Effect,
    Ended,
    Event,
    Malformed,
    MoonshotFound,
    Ns,
    Opened,
    Persist,
    Piece,
    Received,
    Send,
    Tell,
    Tick,
    Trust,
)
from ringfold.master.journal import Journal, forgotten
from ringfold.master.liveness import MS, PatientClock
from ringfold.master.machine import Master
from ringfold.master.run import WATCHER_IDLE_NS
from ringfold.master.settings import MasterSettings
from ringfold.wire.decoding import checked, reason_of
from ringfold.wire.messages import (
    PROTOCOL_VERSION,
    Challenge,
    EvictRequest,
    ForgetRun,
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
from ringfold.wire.status import RunInfo

FIRST_PAUSE_NS, LONGEST_PAUSE_NS = 1_000 * MS, 60_000 * MS
"""How long a run that broke waits before it begins again."""
_PURPOSES: dict[type[ToMaster], str] = {
    Hello: "hello",
    Resume: "resume",
    StatusRequest: "status",
    EvictRequest: "evict",
    NodeHello: "node",
    ProbeCommand: "probe",
    RunsRequest: "runs",
    ForgetRun: "forget",
}
Routed = tuple[str, list[Effect]]
"""Effects of one run, by its name; those of no run have the empty one, and wait for nothing."""


@dataclass(slots=True)
class _Stranger:
    """A connection that belongs to no run: it has proven nothing yet, or asks about the runs themselves."""

    remote: str
    nonce: bytes
    since: Ns
    proven: bool = False


@dataclass(slots=True)
class _Served:
    """One run. Without a machine it is broken."""

    name: str
    fence: int
    machine: Master | None
    journal: Journal | None = None
    """What was to be written last."""
    breaks: int = 0
    begins_ns: Ns | None = None
    """When a broken run begins again; None: never."""
    why: str = ""


class Runs:
    """All runs of one master. `secret` is fresh randomness; `wall_s` and `now_ns` are clocks that decide nothing."""

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
        self._strangers: dict[Conn, _Stranger] = {}
        self._owner: dict[Conn, str] = {}
        self._out: list[Routed] = []
        self._clock = PatientClock(started_ns)
        self._now = started_ns
        """By the master's own time, which does not run while the master does not."""
        self._begin(started_ns, DEFAULT_RUN)

    # Which runs there are

    @property
    def names(self) -> list[str]:
        return sorted(self._served)

    def restore(self, now_ns: Ns, name: str, journal: Journal | None, links: bytes = b"") -> list[Routed]:
        """Go on with a run that another master began, or know of one that has ended. It may have written nothing.

        A journal that no machine can be made of breaks that run, and no other.
        """
        self._out = []
        try:
            self._begin(now_ns, name, journal, links)
        except Exception as error:
            served = self._served.setdefault(name, _Served(name, self._fence, None))
            served.journal = journal
            self._broke(served, "its journal", error)
        return self._out

    def first_journals(self) -> dict[str, Journal]:
        """What each run must have written before anything else: its fence, raised."""
        return {name: served.machine.journal() for name, served in self._served.items() if served.machine is not None}

    def machine_of(self, name: str) -> Master | None:
        served = self._served.get(name)
        return None if served is None else served.machine

    def owner(self, conn: Conn) -> str:
        """The run that a connection belongs to; empty if none."""
        return self._owner.get(conn, "")

    def infos(self) -> list[RunInfo]:
        """All runs that anybody ever came to. If there are none, the default one, which is new."""
        shown = [served for _, served in sorted(self._served.items()) if self._is_used(served)]
        return [_info(served) for served in shown or [self._served[DEFAULT_RUN]]]

    def _is_used(self, served: _Served) -> bool:
        return served.machine is None or served.machine.is_used

    def _begin(self, now_ns: Ns, name: str, journal: Journal | None = None, links: bytes = b"") -> _Served:
        """Make a machine for a run, new or known from a journal. A closed journal tells no more than its end."""
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
        known.machine, known.journal, known.begins_ns, known.why = machine, machine.journal(), None, ""
        self._served[name] = known
        return known

    # Events

    def step(self, now_ns: Ns, event: Event) -> list[Routed]:
        """Apply one event; return what the shell must now do, run by run, in order."""
        self._out, self._now = [], self._clock.read(now_ns, tick=isinstance(event, Tick))
        match event:
            case DoneSeen() | Beat() | Received() | Piece() | Malformed() | Closed():
                owner = self._owner.get(event.conn)
                if owner is not None:
                    if isinstance(event, Closed):
                        del self._owner[event.conn]
                    self._step(now_ns, owner, event)
                elif event.conn in self._strangers:
                    self._from_stranger(now_ns, event.conn, event)
            case Tick():
                self._tick(now_ns)
            case Ended():
                for name in self.names:
                    self._step(now_ns, name, event)
                for conn in list(self._strangers):
                    self._close(conn, event.reason)
            case Opened():
                self._open(event)
            case MoonshotFound(run=run):
                self._step(now_ns, run, event)
            case _:
                assert_never(event)
        return self._out

    def _step(self, now_ns: Ns, name: str, event: Event) -> None:
        served = self._served.get(name)
        if served is None or served.machine is None:
            return
        try:
            effects = served.machine.step(now_ns, event)
        except Exception as error:
            self._broke(served, repr(event), error)
            return
        for index, effect in enumerate(effects):
            if isinstance(effect, Close):
                self._owner.pop(effect.conn, None)
            elif isinstance(effect, Persist):
                served.journal = effect.journal
            elif isinstance(effect, Send) and isinstance(effect.message, Status):
                others = [info.name for info in self.infos() if info.name != name]
                effects[index] = Send(effect.conn, structs.replace(effect.message, other_runs=others))
        if effects:
            self._out.append((name, effects))

    def _tick(self, now_ns: Ns) -> None:
        limit_ms = self._settings.handshake_ms
        for conn, stranger in list(self._strangers.items()):
            if not stranger.proven and self._now - stranger.since >= limit_ms * MS:
                self._drop(conn, f"it proved nothing within {limit_ms} ms", again=True)
            elif stranger.proven and self._now - stranger.since >= WATCHER_IDLE_NS:
                self._drop(conn, "it has asked for nothing for a while", again=True)
        for name in self.names:
            served = self._served[name]
            if served.machine is None and served.begins_ns is not None and self._now >= served.begins_ns:
                self._begin_again(now_ns, served)
            if name != DEFAULT_RUN and not self._is_used(served):
                self._forget(now_ns, name, [])  # nobody ever joined it
            elif served.machine is not None and not served.machine.is_idle:
                self._step(now_ns, name, Tick())

    # A run that breaks

    def _broke(self, served: _Served, where: str, error: Exception) -> None:
        """End the machine, and nothing else."""
        served.why, served.machine = f"run {served.name} broke in the master: {reason_of(error)}", None
        served.breaks += 1
        may_begin = self._keeps_journal or served.name == DEFAULT_RUN
        pause_ns = min(FIRST_PAUSE_NS << min(served.breaks - 1, 16), LONGEST_PAUSE_NS)
        served.begins_ns = self._now + pause_ns if may_begin else None
        effects: list[Effect] = [Broken(error, where, pause_ns if may_begin else None)]
        for conn in [conn for conn, name in self._owner.items() if name == served.name]:
            del self._owner[conn]
            if not self._keeps_journal:
                effects.append(Send(conn, Refused(self._why_broken(served))))  # else they come back by themselves
            effects.append(Close(conn, served.why))
        self._out.append((served.name, effects))

    def _why_broken(self, served: _Served) -> str:
        if served.begins_ns is not None:
            return f"{served.why}; it begins again soon"
        return f"{served.why}; its log has more. Join another run, or `ringfold runs forget {served.name}`"

    def _begin_again(self, now_ns: Ns, served: _Served) -> None:
        journal = served.journal if self._keeps_journal else None
        served.fence += self._keeps_journal
        try:
            self._begin(now_ns, served.name, journal)
        except Exception as error:
            self._broke(served, "its journal", error)
            return
        if self._keeps_journal:
            # The fence is raised in the journal before anything is said.
            assert served.journal is not None
            self._out.append((served.name, [Persist(served.journal)]))

    # Strangers

    def _open(self, event: Opened) -> None:
        self._strangers[event.conn] = _Stranger(event.remote, event.nonce, self._now)
        self._emit([Send(event.conn, Challenge(event.nonce, OLDEST_VERSION, PROTOCOL_VERSION))])
        unproven = [conn for conn, stranger in self._strangers.items() if not stranger.proven]
        if len(unproven) > self._settings.max_unproven:
            reason = f"more than {self._settings.max_unproven} connections have proven nothing yet"
            self._drop(unproven[0], reason, again=True)

    def _from_stranger(
        self, now_ns: Ns, conn: Conn, event: Received | Beat | Piece | DoneSeen | Malformed | Closed
    ) -> None:
        match event:
            case Received(message=message):
                try:
                    self._claim(now_ns, conn, event, message)
                except RemoteProtocolError as error:
                    self._drop(conn, str(error))
            case Beat():
                self._drop(conn, "a heartbeat from somebody who has not joined")
            case DoneSeen():
                self._drop(conn, "a Done from somebody who has not joined")
            case Malformed(reason=reason):
                self._drop(conn, reason)
            case Closed():
                del self._strangers[conn]
            case Piece():
                pass

    def _claim(self, now_ns: Ns, conn: Conn, event: Received, message: ToMaster) -> None:
        """The first word of a connection, which says what it wants."""
        stranger = self._strangers[conn]
        match message:
            case Hello() | Resume() | StatusRequest() | EvictRequest() | NodeHello() | ProbeCommand():
                if stranger.proven:
                    raise RemoteProtocolError(f"{type(message).__name__} from somebody who asks about runs")
                name, token = self._named(message), run_token(self._token, check_name(message.run))
                self._prove(message, token, stranger)
                self._hand_over(now_ns, conn, event, name, token)
            case RunsRequest():
                self._prove(message, self._token, stranger)
                stranger.proven, stranger.since = True, self._now
                self._emit([Trust(conn), Send(conn, RunList(self.infos()))])
            case ForgetRun(name=name):
                self._prove(message, self._token, stranger)
                stranger.proven, stranger.since = True, self._now
                self._emit([Trust(conn)])
                self._forget_if_over(now_ns, conn, check_name(name))
            case _:
                what = type(message).__name__
                raise RemoteProtocolError(f"{what} where Hello, NodeHello or a question is expected")

    def _prove(self, claim: Claim, token: bytes, stranger: _Stranger) -> None:
        checked(check_claim, claim, token, _PURPOSES[type(claim)], stranger.nonce)

    def _named(self, claim: RunClaim) -> str:
        """The run that a claim is about. Who only looks and names none means the one that is there."""
        looks = isinstance(claim, StatusRequest | EvictRequest | ProbeCommand)
        name = check_name(claim.run)
        if looks and not claim.run:
            [first, *others] = self.infos()
            return name if others else first.name
        if looks and name not in self._served:
            there = ", ".join(info.name for info in self.infos())
            raise RemoteProtocolError(f"there is no run {name} here; there are: {there}")
        return name

    def _hand_over(self, now_ns: Ns, conn: Conn, event: Received, name: str, token: bytes) -> None:
        """The connection belongs to that run from now on."""
        served = self._served.get(name)
        if served is None:
            if len(self._served) >= self._settings.max_runs:
                full = f"this master serves {len(self._served)} runs, and max_runs allows no more"
                raise RemoteProtocolError(f"{full}: free a name with `ringfold runs forget`, or raise max_runs")
            served = self._begin(now_ns, name)
        if served.machine is None:
            self._drop(conn, self._why_broken(served), again=served.begins_ns is not None, tell=True)
            return
        stranger = self._strangers.pop(conn)
        self._owner[conn] = name
        self._step(now_ns, name, Opened(conn, stranger.remote, stranger.nonce, token))
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
        self._forget(now_ns, name, [Tell(RunForgotten(name)), Send(conn, RunList(left))])

    def _forget(self, now_ns: Ns, name: str, after: list[Effect]) -> None:
        """Nothing of the run is left, once that is written. The default one is there again at once, and new."""
        for conn in [conn for conn, owner in self._owner.items() if owner == name]:
            del self._owner[conn]
            self._emit([Close(conn, f"run {name} was forgotten")])
        journal = forgotten(self._served.pop(name).fence)
        if name == DEFAULT_RUN:
            journal = self._begin(now_ns, name).journal or journal
        self._out.append((name, [Persist(journal), *after] if self._keeps_journal else after))

    def _drop(self, conn: Conn, reason: str, *, again: bool = False, tell: bool = False) -> None:
        """Turn somebody away. Who may come `again` (it was only slow) is not told that it is refused, unless `tell`."""
        stranger = self._strangers[conn]
        self._emit([Tell(ConnectionDropped(stranger.remote, reason))])
        if not again or tell:
            self._emit([Send(conn, Refused(reason, again))])
        self._close(conn, reason)

    def _close(self, conn: Conn, reason: str) -> None:
        del self._strangers[conn]
        self._emit([Close(conn, reason)])

    def _emit(self, effects: Iterable[Effect]) -> None:
        """What concerns no run."""
        self._out.append(("", list(effects)))


def check_name(name: str) -> str:
    """The run that a message names; RemoteProtocolError if there can be none."""
    try:
        return check_run_name(name)
    except ConfigError as error:
        raise RemoteProtocolError(str(error)) from None


def _info(served: _Served) -> RunInfo:
    if served.machine is None:
        return RunInfo(served.name, "broken", why=served.why)
    return served.machine.info()
