"""The shell of the master's machines: asyncio sockets in, effects out. It decides nothing.

One `Door` per connection (`door.py`) cuts bytes into frames and turns them into events; `MasterServer` steps the runs
(`runs.py`) and does what their effects say, in order. Everything runs in one loop, so a step is never interrupted.

Runs take turns (`turns.py`): peers that send without end delay no other run by more than their run's share of frames.
A connection that does not read is no danger to the others: what is queued for it is bounded, and what must still be
flushed when it is closed has FLUSH_S to go.

With journals, what a run says waits until what it must not forget is written, off the loop (`outbox.py`, `keeper.py`);
no other run waits for that. The runs are served only while this master leads (`leading.py`): one write that fails ends
its lead of all of them. A client that connects while it does not lead is told so, and goes on to the next master.

The result of a round of probing is written down when the machine tells it, which is after the next window's starts were
sent. A disk that is full ends the log, and nothing else.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import assert_never

import msgspec

from ringfold.config import DEFAULT_RUN, check_exposure, split_address
from ringfold.errors import ConfigError, RemoteProtocolError, StoreError
from ringfold.master.door import Door
from ringfold.master.events import (
    Broken,
    Close,
    Closed,
    Conn,
    Effect,
    Ended,
    Event,
    KeepLinks,
    MoonshotFound,
    Opened,
    Persist,
    Send,
    SendBeat,
    SendEvidence,
    StartMoonshot,
    Tell,
    Tick,
    Trust,
)
from ringfold.master.journal import Journal
from ringfold.master.keeper import Deposed
from ringfold.master.leading import TROUBLE_S, Candidate, Leadership
from ringfold.master.outbox import Outbox
from ringfold.master.runs import Routed, Runs
from ringfold.master.settings import MasterSettings
from ringfold.master.turns import Turns
from ringfold.probe.logs.files import ExportSettings, ProbeLog
from ringfold.runtime import asyncio_support
from ringfold.runtime.clock import monotonic_ns, random_bytes, unix_ns
from ringfold.runtime.log_limit import LogRateLimiter
from ringfold.runtime.process import close_on_fork, keep_on_fork, run_in_subprocess
from ringfold.store import StoreClient, open_store
from ringfold.topology.moonshot import MoonshotRequest, decode_response
from ringfold.wire.frames import (
    MAX_FRAME_BYTES,
    evidence_frame,
    master_beat,
    message_frame,
)
from ringfold.wire.messages import FromMaster, GroupId, Refused
from ringfold.wire.notices import ConnectionDropped, Notice, RoundDone
from ringfold.wire.proof import NONCE_BYTES

TICK_S = 0.05
LEASE_S = 3.0
"""Shorter than what peers with several masters take for silence, so that a leader that slept knows before they go."""
MOONSHOT_S = 60.0
FLUSH_S = 1.0
LAST_WORDS_S = 5.0
"""How long a clean end waits for the journal to be closed."""

_log = logging.getLogger("ringfold.master")
_LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}


class MasterServer:
    """A master of one or more runs, on real sockets. `listen` holds addresses like `127.0.0.1:48148`, `[::1]:0` or
    `localhost:48148`.

    Other addresses than loopback need a token of 16 bytes or more, or `insecure` said aloud. With `journal`, the
    address of a store, the run outlives this process; of several masters on one store one leads, and the others stand
    by. A master that is `alone` with its journal shares it with nobody: when it is stopped, the run is ended, and its
    journal is closed. One that is not hands the run over.
    """

    def __init__(
        self,
        settings: MasterSettings,
        listen: Sequence[str],
        token: bytes = b"",
        insecure: bool = False,
        on_notice: Callable[[Notice], None] | None = None,
        journal: str | None = None,
        lease_s: float = LEASE_S,
        *,
        alone: bool = False,
    ) -> None:
        self._listen = [split_address(address) for address in listen]
        if not self._listen:
            raise ConfigError("the master needs an address to listen on")
        for host, _ in self._listen:
            check_exposure(host, token, insecure=insecure)
        self._on_notice = on_notice
        self._log_limit = LogRateLimiter()
        self._export = settings.export
        self._rounds: ProbeLog | None = None
        self._other_rounds: dict[str, ProbeLog] = {}
        self._settings, self._token = settings, token
        alive, self._stepped_ns = settings.liveness, 0
        # Whom they have not heard since a heartbeat before it fell asleep, peers may leave this soon.
        self._patience_ns = (alive.evict_after_ms - alive.heartbeat_ms) * 1_000_000
        self._journal, self._lease_s, self._alone = journal, lease_s, alone
        self._runs: Runs | None = None
        self._candidate: Candidate | None = None
        self._leadership: Leadership | None = None
        self._held: Leadership | None = None
        """Whose lease is to be given back in the end."""
        self._deposed: asyncio.Future[str] | None = None
        self._writing: dict[str, asyncio.Task[None]] = {}
        self._stray: set[asyncio.Task[None] | None] = set()
        """Writes of an earlier lead that have not ended: nobody waits for them but the end of this server."""
        self._keeping: dict[str, asyncio.Task[None]] = {}
        self._outboxes: dict[str, Outbox] = {}
        """By the name of the run."""
        self._doors: dict[Conn, Door] = {}
        self._turns = Turns()
        self._is_turning = False
        self._servers: list[asyncio.Server] = []
        self._leaving: dict[asyncio.Transport, asyncio.TimerHandle] = {}
        self._last_conn = 0
        self._encoded: tuple[FromMaster, bytes] | None = None
        self._moonshot: asyncio.Task[None] | None = None
        self._one_left = asyncio.Event()
        self._stopping: asyncio.Event | None = None
        self._failure: BaseException | None = None
        self.addresses: list[str] = []
        """Where it listens, once it does; with the ports that the kernel chose for port 0."""

    async def serve(self, ready: Callable[[], None] | None = None) -> None:
        """Listen, and serve until `stop`. `ready` is called once peers may come.

        Raises OSError if it cannot listen, ConfigError if it cannot write rounds down where it should, and StoreError
        if the journal's store cannot be opened.
        """
        self._stopping = asyncio.Event()
        ticking: asyncio.Task[None] | None = None
        leading: asyncio.Task[None] | None = None
        store: StoreClient | None = None
        try:
            if self._journal is not None:
                store = await asyncio.to_thread(open_store, self._journal)
            await self._open()
            ticking = asyncio.create_task(self._tick(), name="ringfold master ticks")
            _log.info("listening on %s", ", ".join(self.addresses))
            if store is None:
                self._begin(None)
            else:
                name = ", ".join(self.addresses)
                self._candidate = Candidate(store, store.name, name, self._lease_s, alone=self._alone)
                leading = asyncio.create_task(self._lead(self._candidate), name="ringfold leadership")
            if ready is not None:
                ready()
            await self._stopping.wait()
            await self._end_run()
        finally:
            tasks = [task for task in (ticking, self._moonshot, leading) if task is not None]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self._shut()
            await self._let_go(store)
        if self._failure is not None:
            raise self._failure

    def stop(self) -> None:
        """End `serve`: all sockets are closed when it returns. Call it in the server's loop."""
        if self._stopping is not None:
            self._stopping.set()

    async def _open(self) -> None:
        if self._export is not None:
            self._rounds = ProbeLog(ExportSettings(directory=self._export))
        loop = asyncio.get_running_loop()
        for host, port in self._listen:
            server = await loop.create_server(lambda: Door(self), host, port, reuse_address=True, backlog=1024)
            self._servers.append(server)
            for sock in server.sockets:
                close_on_fork(sock.fileno())
                self.addresses.append(asyncio_support.address_text(sock.getsockname()))

    async def _shut(self) -> None:
        for server in self._servers:
            for sock in server.sockets:
                keep_on_fork(sock.fileno())
            server.close()
        for door in list(self._doors.values()):
            self._say_goodbye(door)
        self._doors.clear()
        # Each connection that is leaving has its timer, so this wait ends.
        while self._leaving:
            self._one_left.clear()
            await self._one_left.wait()
        for server in self._servers:
            await server.wait_closed()
        if self._rounds is not None:
            for log in (self._rounds, *self._other_rounds.values()):
                log.close()
            self._rounds = None
            self._other_rounds.clear()

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            self.step(Tick())

    # Leading

    async def _lead(self, candidate: Candidate) -> None:
        """Stand by, lead, be deposed, and stand by again. What nobody foresaw ends the server, and is not silent."""
        try:
            while True:
                await self._lead_once(candidate)
        except Exception as error:
            if not isinstance(error, ConfigError):
                _log.exception("leading broke")
            self._failure = error
            self.stop()

    async def _lead_once(self, candidate: Candidate) -> None:
        leadership = await candidate.lead()
        clock = asyncio.get_running_loop().time
        self._deposed, began = asyncio.get_running_loop().create_future(), clock()
        holding = asyncio.create_task(candidate.hold(leadership, self.step_down), name="ringfold lease")
        try:
            runs = self._begin(leadership)
            # The fence is raised in each journal first: until that is written, everything that is said waits.
            for name, journal in runs.first_journals().items():
                self._carry_out(name, self._outbox(name).put([Persist(journal)]))
            candidate.trouble(await self._deposed)
            await candidate.give_up(leadership)
            self._held = None
        finally:
            holding.cancel()
            self._end_leading()
        if clock() < began + TROUBLE_S:
            await asyncio.sleep(TROUBLE_S)  # it could not even begin, and would not at once

    def _begin(self, leadership: Leadership | None) -> Runs:
        now, fence, name = monotonic_ns(), 1, ", ".join(self.addresses)
        if leadership is not None:
            fence, away = leadership.fence, sum(journal.members for journal in leadership.journals.values())
            going = sum(journal.members > 0 for journal in leadership.journals.values())
            of = "the run" if going == 1 else f"{going} runs"
            waits = f"; waiting up to {self._settings.return_ms // 1_000} s for the {away} members of {of}"
            _log.info("leading with fence %d%s", fence, waits if away else "")
        self._runs = Runs(
            self._settings,
            self._token,
            random_bytes(32),
            fence,
            now,
            keeps_journal=leadership is not None,
            leader=name,
            now_ns=monotonic_ns,
            wall_s=lambda: unix_ns() // 1_000_000_000,
        )
        self._outboxes = {}
        if leadership is not None:
            for run in leadership.keepers:
                self._route(self._runs.restore(now, run, leadership.journals.get(run), leadership.links[run]))
        self._stepped_ns = now
        self._leadership = self._held = leadership
        return self._runs

    def _outbox(self, run: str) -> Outbox:
        return self._outboxes.setdefault(run, Outbox())

    def step_down(self, reason: str) -> None:
        """Decide nothing any more: another one leads, or nobody can."""
        if self._deposed is not None and not self._deposed.done():
            _log.warning("this master does not lead any more: %s", reason)
            self._deposed.set_result(reason)
            self._end_leading()

    async def _end_run(self) -> None:
        """A clean end of a master that is alone with its journals: peers are told when theirs is closed."""
        if not self._alone or self._runs is None or self._leadership is None or self._failure is not None:
            return
        self.step(Ended("the master was stopped, and the run with it"))
        self._runs = None
        try:
            async with asyncio.timeout(LAST_WORDS_S):
                while self._writing:
                    await asyncio.wait(self._writing.values())
        except TimeoutError:
            _log.warning("the journal was not closed within %g s", LAST_WORDS_S)

    def _end_leading(self) -> None:
        self._runs = self._leadership = None
        self._stray.update(self._writing.values())
        self._writing.clear()
        for door in list(self._doors.values()):
            self._say_goodbye(door)
        self._doors.clear()

    def _write_journal(self, run: str) -> None:
        """Begin to write what a run must not forget, unless a write of it is under way."""
        leadership, outbox = self._leadership, self._outbox(run)
        if leadership is None or run in self._writing:
            return
        journal = outbox.begin()
        if journal is not None:
            work = self._write_aside(leadership, run, outbox, journal)
            self._writing[run] = asyncio.create_task(work, name=f"ringfold journal of {run}")

    async def _write_aside(self, leadership: Leadership, run: str, outbox: Outbox, journal: Journal) -> None:
        try:
            await asyncio.to_thread(leadership.write, run, journal)
        except Deposed:
            if leadership is self._leadership:
                self.step_down("another master has taken the journal over")
        except StoreError as error:
            if leadership is self._leadership:
                self.step_down(f"the journal cannot be written: {error}")
        except Exception as error:
            _log.exception("writing the journal broke")
            self._failure = error
            self.stop()
        finally:
            self._stray.discard(task := asyncio.current_task())
            if self._writing.get(run) is task:
                del self._writing[run]
        if leadership is not self._leadership or self._failure is not None:
            return
        if outbox is self._outboxes.get(run):
            self._carry_out(run, outbox.written())
            if journal.is_forgotten and not outbox.waiting():
                del self._outboxes[run]
        else:
            self._write_journal(run)  # the run broke meanwhile, and has begun again

    async def _let_go(self, store: "StoreClient | None") -> None:
        """A clean end: the last write is made, and the lease is given back."""
        stray = [task for task in self._stray if task is not None]
        await asyncio.gather(*self._writing.values(), *stray, *self._keeping.values(), return_exceptions=True)
        if self._candidate is not None and self._held is not None:
            await self._candidate.give_up(self._held)
        if store is not None:
            await asyncio.to_thread(store.close)

    # Events in, effects out

    def step(self, event: Event) -> None:
        """Step the runs and do what they say. A run that breaks ends alone; what breaks here ends the server."""
        if self._failure is not None or self._runs is None:
            return
        now = monotonic_ns()
        slept_ns, self._stepped_ns = now - self._stepped_ns, now
        if self._leadership is not None and not self._leadership.is_certain():
            self.step_down(self._leadership.trouble or "it was not there to renew its lease")
            return
        if self._leadership is not None and slept_ns > self._patience_ns:
            # With the same fence it would have to evict all who come back. With a higher one they go on.
            self.step_down(f"it was asleep for {slept_ns / 1e9:.1f} s, and its peers look for another master by now")
            return
        try:
            self._route(self._runs.step(now, event))
        except Exception as error:
            _log.exception("the master broke at %r", event)
            self._failure = error
            self.stop()

    def _route(self, routed: Sequence[Routed]) -> None:
        for run, effects in routed:
            if run and not isinstance(effects[0], Broken):
                self._carry_out(run, self._outbox(run).put(effects))
                continue
            # Of a run that broke, nothing that still waits is said any more; but who was to go goes.
            void = self._outboxes.pop(run, Outbox()).waiting() if run else []
            for effect in (*(each for each in void if isinstance(each, Close)), *effects):
                self._do(run, effect)

    def _carry_out(self, run: str, effects: Sequence[Effect]) -> None:
        for effect in effects:
            self._do(run, effect)
        self._write_journal(run)

    def _do(self, run: str, effect: Effect) -> None:
        match effect:
            case SendEvidence(conns, evidence):
                frame = evidence_frame(evidence)
                for conn in conns:
                    self._write(conn, frame)
            case Send(conn, message):
                self._write(conn, self._encode(message))
            case SendBeat(conn, number, echo):
                self._write(conn, master_beat(number, echo))
            case Trust(conn):
                if conn in self._doors:
                    self._doors[conn].frames.limit = MAX_FRAME_BYTES
            case Close(conn, _):
                door = self._doors.pop(conn, None)
                if door is not None:
                    self._say_goodbye(door)
            case Tell(notice):
                self._tell(run, notice)
            case KeepLinks(raw):
                if self._leadership is not None and (run not in self._keeping or self._keeping[run].done()):
                    work = _keep_links(self._leadership, run, raw)
                    self._keeping[run] = asyncio.create_task(work, name="ringfold links")
            case Persist():
                raise AssertionError("the outbox keeps these")
            case Broken(error, event, pause_ns):
                then = "it is over" if pause_ns is None else f"it begins again in {pause_ns / 1e9:g} s"
                _log.error("run %s broke at %s; %s, and no other run is touched", run, event, then, exc_info=error)
            case StartMoonshot(group, question):
                if self._moonshot is None or self._moonshot.done():
                    self._moonshot = asyncio.create_task(self._search(run, group, question), name="ringfold moonshot")
            case _:
                assert_never(effect)

    async def _search(self, run: str, group: GroupId, question: MoonshotRequest) -> None:
        """The long search for a better ring. Nobody waits for it, so that its failure is only logged."""
        try:
            said = await run_in_subprocess("ringfold.topology.moonshot", msgspec.json.encode(question), MOONSHOT_S)
        except OSError as error:
            _log.warning("the long search for a better ring cannot be started: %s", error)
            return
        if said is None:
            _log.info("the long search for a better ring of group %d came to nothing", group)
            return
        try:
            found = decode_response(said)
        except RemoteProtocolError as error:
            _log.warning("the long search for a better ring of group %d wrote no answer: %s", group, error)
            return
        if found.solution is not None:
            self.step(MoonshotFound(group, found.solution, run))

    def _tell(self, run: str, notice: Notice) -> None:
        """ProbeLog it, write a round down, pass it to the observer. A run does not end because its observer does."""
        more: str | None = ""
        if isinstance(notice, ConnectionDropped):
            more = self._log_limit.take(monotonic_ns(), notice.reason)
        if more is not None:
            whose = "" if run in ("", DEFAULT_RUN) else f"run {run}: "
            _log.log(_LEVELS[notice.level], "%s%s%s", whose, notice, more)
        try:
            log = self._round_log(run) if isinstance(notice, RoundDone) else None
            if log is not None and isinstance(notice, RoundDone):
                log.round(notice.summary)
            if self._on_notice is not None:
                self._on_notice(notice)
        except Exception:
            _log.exception("an observer failed at %r", notice)

    def _round_log(self, run: str) -> ProbeLog | None:
        """Where a run's rounds are written down: in a folder of its own, unless it is the default one."""
        if self._rounds is None or self._export is None or run == DEFAULT_RUN:
            return self._rounds
        if run not in self._other_rounds:
            self._other_rounds[run] = ProbeLog(ExportSettings(directory=self._export / run))
        return self._other_rounds[run]

    def _encode(self, message: FromMaster) -> bytes:
        """A record goes to every member and may be large: it is encoded once and its bytes are shared."""
        if self._encoded is None or self._encoded[0] is not message:
            self._encoded = (message, message_frame(message))
        return self._encoded[1]

    def _write(self, conn: Conn, frame: bytes) -> None:
        door = self._doors.get(conn)
        if door is not None and door.transport is not None:
            door.transport.write(frame)

    def _say_goodbye(self, door: Door) -> None:
        """Close after what is queued has been sent, or FLUSH_S later."""
        transport = door.transport
        if transport is None:
            return
        timer = asyncio.get_running_loop().call_later(FLUSH_S, transport.abort)
        self._leaving[transport] = timer
        transport.close()

    # Doors

    def opened(self, door: Door, remote: str) -> Conn:
        self._last_conn += 1
        self._doors[self._last_conn] = door
        if self._runs is None:
            refusal = Refused(self._candidate.why_not if self._candidate is not None else "it ends", again=True)
            self._write(self._last_conn, message_frame(refusal))
            self._say_goodbye(self._doors.pop(self._last_conn))
            return self._last_conn
        self.step(Opened(self._last_conn, remote, random_bytes(NONCE_BYTES)))
        return self._last_conn

    def arrived(self, door: Door) -> None:
        """A connection has frames: they are handled now, as far as its run's share goes, and the rest in turn."""
        run = "" if self._runs is None else self._runs.owner(door.conn)
        budget = self._turns.budget(run)
        if budget:
            self._turns.spend(run, door.handle(budget))
        if door.has_frames:
            self._turns.wait(run, door.conn)
        if not self._is_turning:
            self._is_turning = True
            asyncio.get_running_loop().call_soon(self._turn)

    def _turn(self) -> None:
        """The loop has come by again: every run has its share."""
        self._turns.begin()
        while (chosen := self._turns.next()) is not None:
            run, conn, most = chosen
            door = self._doors.get(conn)
            if door is None:
                continue
            self._turns.spend(run, door.handle(most))
            if door.has_frames:
                self._turns.wait("" if self._runs is None else self._runs.owner(conn), conn)
        self._is_turning = not self._turns.is_over
        if self._is_turning:
            asyncio.get_running_loop().call_soon(self._turn)

    def lost(self, door: Door, reason: str) -> None:
        """The connection is gone; the machine is told unless it closed it itself."""
        if door.transport is not None and (timer := self._leaving.pop(door.transport, None)) is not None:
            timer.cancel()
            self._one_left.set()
        if self._doors.pop(door.conn, None) is not None:
            self.step(Closed(door.conn, reason))

    @property
    def is_stopping(self) -> bool:
        return self._stopping is not None and self._stopping.is_set()

    def is_open(self, conn: Conn) -> bool:
        return conn in self._doors


async def _keep_links(leadership: Leadership, run: str, raw: bytes) -> None:
    keeper = leadership.keepers.get(run)
    if keeper is None:
        return  # the run is not in the store yet, or not any more
    try:
        await asyncio.to_thread(keeper.write_links, raw)
    except StoreError as error:
        _log.debug("what is known about links was not written down: %s", error)
