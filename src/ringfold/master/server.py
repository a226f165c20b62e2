"""The shell of the master's machines: asyncio sockets in, effects out. It decides nothing.

A `ClientProtocol` per connection cuts bytes into frames and turns them into events; `MasterServer` steps the runs
(`runs.py`) and executes their effects, in order. Everything runs in one event loop, so a step is never interrupted.
`MasterThread` is a master inside another program.

Runs share the loop fairly (`scheduling.py`): peers that send without end delay no other run by more than their own
run's share of frames. A connection that does not read does not harm the others: its queue is bounded, and after a close
it has FLUSH_S to send the rest.

With journals, a run's effects wait until its journal is written, off the loop (`journal.py`, `journal_store.py`); no
other run waits for that. The runs are served only while this master leads (`leadership.py`): one failed write ends its
lead of all of them. A client that connects while it does not lead is refused, and tries the next master.

The result of a probing round is written when the machine notifies it, which is after the next window was started. A
full disk ends the log, and nothing else.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import assert_never

import msgspec

from ringfold.config import DEFAULT_RUN, check_exposure, split_address
from ringfold.errors import ConfigError, RemoteProtocolError, StoreError
from ringfold.master.effects import (
    CloseConnection,
    Effect,
    Notify,
    RaiseFrameLimit,
    RecordEvents,
    ReportBrokenRun,
    SendEvents,
    SendEvidence,
    SendHeartbeat,
    SendMessage,
    StartMoonshot,
    WriteJournal,
    WriteLinks,
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
    StopRequested,
    Tick,
)
from ringfold.master.journal import Journal, Outbox
from ringfold.master.journal_store import Deposed
from ringfold.master.leadership import RETRY_S, Candidate, Leadership
from ringfold.master.records import MasterRecords
from ringfold.master.runs import Routed, Runs
from ringfold.master.scheduling import FrameScheduler
from ringfold.master.settings import MasterSettings
from ringfold.probe.logs.files import ExportSettings, ProbeLog
from ringfold.runtime import asyncio_support, threads
from ringfold.runtime.clock import monotonic_ns, random_bytes, unix_ns
from ringfold.runtime.log_limit import LogRateLimiter
from ringfold.runtime.process import close_on_fork, keep_on_fork, run_in_subprocess
from ringfold.store import StoreClient, open_store
from ringfold.topology.moonshot import MoonshotRequest, decode_response
from ringfold.wire.events import LeaderChanged
from ringfold.wire.frames import (
    MAX_FRAME_BYTES,
    FrameKind,
    FrameReader,
    decode_done,
    decode_heartbeat,
    decode_to_master,
    evidence_frame,
    master_heartbeat,
    message_frame,
)
from ringfold.wire.messages import FromMaster, GroupId, Refused
from ringfold.wire.notices import ConnectionDropped, Notice, RoundDone
from ringfold.wire.probing import RoundReport
from ringfold.wire.proof import NONCE_BYTES
from ringfold.wire.status import RunInfo, Status

TICK_S, MIN_TICK_S = 0.05, 0.001
LEASE_S = 3.0
"""Shorter than the silence after which peers try another master, so that a suspended leader notices before they
leave."""
MOONSHOT_S = 60.0
FLUSH_S = 1.0
SHUTDOWN_TIMEOUT_S = 5.0
"""How long a clean shutdown waits for the journal to be closed."""

_log = logging.getLogger("ringfold.master")
_LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}
KEEP_ALIVE_S = 60
"""Peers and nodes have heartbeats; this is for commands."""
MAX_QUEUED_BYTES = 256 * 1024 * 1024
"""A peer with a longer send queue does not read, and is disconnected."""


@dataclass(frozen=True, slots=True)
class MasterFacts:
    """A master and its runs at one instant, for metrics. A master that does not lead has no runs."""

    leads: bool
    infos: list[RunInfo]
    statuses: list[Status]
    """With the links of rings only."""
    frames_waiting: int
    """Connections whose frames wait for their turn."""
    effects_waiting: int
    """Messages and other effects that wait for a write of the journal."""
    bytes_waiting: int
    """What clients have not read yet."""


class ClientProtocol(asyncio.Protocol):
    """One connection: bytes in, events out."""

    def __init__(self, server: "MasterServer") -> None:
        self._server = server
        self.frames = FrameReader()
        self.transport: asyncio.Transport | None = None
        self.conn: Conn = 0
        self._fd = -1
        self._chunks: deque[bytes] = deque()
        self._pending_frames: Iterator[tuple[FrameKind, bytes]] = iter(())
        """The frames of the present chunk that are not handled yet."""
        self.has_frames = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        self._fd = transport.get_extra_info("socket").fileno()
        close_on_fork(self._fd)
        asyncio_support.no_delay(transport)
        asyncio_support.keep_alive(transport, KEEP_ALIVE_S)
        asyncio_support.user_timeout(transport, self._server.user_timeout_ms)
        transport.set_write_buffer_limits(high=MAX_QUEUED_BYTES)
        if self._server.is_stopping:
            transport.abort()  # it connected while the server was closing
            return
        self.conn = self._server.on_opened(self, asyncio_support.remote_name(transport))

    def data_received(self, chunk: bytes) -> None:
        if not self._server.is_open(self.conn):
            return
        self._chunks.append(chunk)
        if not self.has_frames:
            self.has_frames = True
            self._server.on_frames(self)
        elif self.transport is not None:
            self.transport.pause_reading()  # it waits for its turn, with one or two chunks at most

    def handle(self, limit: int) -> int:
        """Turn up to `limit` frames into events; returns how many. Nothing is read while some are left."""
        count = self._handle(limit)
        if self.transport is not None and self._server.is_open(self.conn):
            (self.transport.pause_reading if self.has_frames else self.transport.resume_reading)()
        return count

    def _handle(self, limit: int) -> int:
        count = 0
        try:
            while count < limit:
                frame = next(self._pending_frames, None)
                if frame is not None:
                    count += 1
                    self._server.step(self._event(*frame))
                    if not self._server.is_open(self.conn):
                        break
                elif self._chunks:
                    self._pending_frames = self.frames.feed(self._chunks.popleft())
                else:
                    if self.frames.is_inside:
                        self._server.step(FramePartReceived(self.conn))
                    break
            else:
                return count
        except RemoteProtocolError as error:
            self._server.step(MalformedReceived(self.conn, str(error)))
        self._chunks.clear()
        self.has_frames = False
        return count

    def _event(self, kind: FrameKind, body: bytes) -> Event:
        match kind:
            case FrameKind.DONE:
                return DoneReceived(self.conn, decode_done(body))
            case FrameKind.HEARTBEAT:
                return HeartbeatReceived(self.conn, decode_heartbeat(body))
            case FrameKind.MESSAGE:
                message = decode_to_master(body)
                is_report = isinstance(message, RoundReport) and self.transport is not None
                again = asyncio_support.retransmits(self.transport) if is_report else 0
                return MessageReceived(self.conn, message, len(body), again)
            case FrameKind.EVIDENCE:
                raise RemoteProtocolError("only the master sends evidence")

    def pause_writing(self) -> None:
        # The effects of a step in progress filled the queue: report it to the machine after that step.
        assert self.transport is not None
        reason = f"it does not read: more than {MAX_QUEUED_BYTES} bytes are queued for it"
        asyncio.get_running_loop().call_soon(self._server.on_lost, self, reason)
        self.transport.abort()

    def eof_received(self) -> bool:
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        keep_on_fork(self._fd)
        self._server.on_lost(self, str(exc) if exc is not None else "")


class MasterServer:
    """A master of one or more runs, on real sockets. `listen` holds addresses like `127.0.0.1:48148`, `[::1]:0` or
    `localhost:48148`.

    Other addresses than loopback need a token of 16 bytes or more, or `insecure`. With `journal`, the address of a
    store, the run outlives this process; of several masters on one store one leads, and the others stand by. A master
    that is `alone` with its journal shares it with no other master: when it is stopped, the run is ended, and its
    journal is closed. Otherwise another master continues the run.
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
        on_run_notice: Callable[[str, Notice], None] | None = None,
    ) -> None:
        self._listen = [split_address(address) for address in listen]
        if not self._listen:
            raise ConfigError("the master needs an address to listen on")
        for host, _ in self._listen:
            check_exposure(host, token, insecure=insecure)
        self._on_notice, self._on_run_notice = on_notice, on_run_notice
        self._loop: asyncio.AbstractEventLoop | None = None
        self._log_limit = LogRateLimiter()
        self._export = settings.export
        self._rounds: ProbeLog | None = None
        self._other_rounds: dict[str, ProbeLog] = {}
        self._records = MasterRecords(settings.events_dir, settings.flight_dir, settings.events_bytes)
        self._settings, self._token = settings, token
        alive, self._stepped_ns = settings.liveness, 0
        # After this long without a heartbeat, counted from the last one before a suspension, peers may leave.
        self._max_suspension_ns = (alive.evict_after_ms - alive.heartbeat_ms) * 1_000_000
        self.user_timeout_ms = alive.evict_after_ms
        """A host that acknowledges nothing for as long as a silent peer is tolerated is gone."""
        self._journal, self._lease_s, self._alone = journal, lease_s, alone
        self._runs: Runs | None = None
        self._candidate: Candidate | None = None
        self._leadership: Leadership | None = None
        self._held: Leadership | None = None
        """The leadership whose lease is to be released at the end."""
        self._deposed: asyncio.Future[str] | None = None
        self._writing: dict[str, asyncio.Task[None]] = {}
        self._stray: set[asyncio.Task[None] | None] = set()
        """Writes of an earlier lead that have not ended: only the end of this server waits for them."""
        self._link_writes: dict[str, asyncio.Task[None]] = {}
        self._outboxes: dict[str, Outbox] = {}
        """By the name of the run."""
        self._clients: dict[Conn, ClientProtocol] = {}
        self._scheduler = FrameScheduler()
        self._is_turn_scheduled = False
        self._servers: list[asyncio.Server] = []
        self._closing: dict[asyncio.Transport, asyncio.TimerHandle] = {}
        self._last_conn, self._fence = 0, 0
        self._encoded: tuple[FromMaster, bytes] | None = None
        self._moonshot: asyncio.Task[None] | None = None
        self._one_closed = asyncio.Event()
        self._stopping: asyncio.Event | None = None
        self._failure: BaseException | None = None
        self.addresses: list[str] = []
        """The addresses that it listens on, with the ports that the kernel chose for port 0."""

    async def serve(self, ready: Callable[[], None] | None = None) -> None:
        """Listen, and serve until `stop`. `ready` is called when peers may connect.

        Raises OSError if it cannot listen, ConfigError if it cannot write the results of rounds, and StoreError
        if the journal's store cannot be opened.
        """
        self._stopping, self._loop = asyncio.Event(), asyncio.get_running_loop()
        ticking: asyncio.Task[None] | None = None
        leading: asyncio.Task[None] | None = None
        store: StoreClient | None = None
        try:
            if self._journal is not None:
                store = await asyncio.to_thread(open_store, self._journal)
            await self._open()
            self._records.begin(", ".join(self.addresses))
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
            await self._release_store(store)
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
            server = await loop.create_server(
                lambda: ClientProtocol(self), host, port, reuse_address=True, backlog=1024
            )
            self._servers.append(server)
            for sock in server.sockets:
                close_on_fork(sock.fileno())
                self.addresses.append(asyncio_support.address_text(sock.getsockname()))

    async def _shut(self) -> None:
        for server in self._servers:
            for sock in server.sockets:
                keep_on_fork(sock.fileno())
            server.close()
        for client in list(self._clients.values()):
            self._close_client(client)
        self._clients.clear()
        # Each closing connection has a timer, so this wait ends.
        while self._closing:
            self._one_closed.clear()
            await self._one_closed.wait()
        for server in self._servers:
            await server.wait_closed()
        self._records.close()
        if self._rounds is not None:
            for log in (self._rounds, *self._other_rounds.values()):
                log.close()
            self._rounds = None
            self._other_rounds.clear()

    async def _tick(self) -> None:
        """Tick periodically, and when a probing round needs it: nodes wait for the end of a round."""
        while True:
            due_ns = self._runs.next_round_ns(monotonic_ns()) if self._runs is not None else None
            due_s = TICK_S if due_ns is None else (due_ns - monotonic_ns()) / 1e9
            await asyncio.sleep(min(max(MIN_TICK_S, due_s), TICK_S))
            self.step(Tick())
            if self._runs is not None and self._records.is_due(monotonic_ns()):
                self._sample(self._runs)

    def _sample(self, runs: Runs) -> None:
        """Record the status of all runs. What goes wrong here ends no run."""
        now_ns = monotonic_ns()
        try:
            machines = [(name, machine) for name in runs.names if (machine := runs.machine_of(name)) is not None]
            self._records.sample(now_ns, [(name, machine.status(now_ns)) for name, machine in machines])
        except Exception:
            _log.exception("the status could not be recorded")

    # Leading

    async def _lead(self, candidate: Candidate) -> None:
        """Stand by, lead, be deposed, and stand by again. An unexpected exception ends the server, and is raised."""
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
            # The fence is raised in each journal first: until that is written, all effects wait.
            for name, journal in runs.first_journals().items():
                self._execute(name, self._outbox(name).put([WriteJournal(journal)]))
            candidate.set_error(await self._deposed)
            await candidate.release(leadership)
            self._held = None
        finally:
            holding.cancel()
            self._end_leading()
        if clock() < began + RETRY_S:
            await asyncio.sleep(RETRY_S)  # it failed at the start, and would fail again at once

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
            for run in leadership.stores:
                self._route(self._runs.restore(now, run, leadership.journals.get(run), leadership.links[run]))
        self._stepped_ns = now
        self._fence = fence
        self._leadership = self._held = leadership
        for run in self._runs.names:
            self._notify(run, LeaderChanged(name, True, fence))
        return self._runs

    def _outbox(self, run: str) -> Outbox:
        return self._outboxes.setdefault(run, Outbox())

    def step_down(self, reason: str) -> None:
        """Stop to decide: another master leads, or none can."""
        if self._deposed is not None and not self._deposed.done():
            _log.warning("this master does not lead any more: %s", reason)
            self._deposed.set_result(reason)
            names = [] if self._runs is None else self._runs.names
            self._end_leading()
            for run in names:
                self._notify(run, LeaderChanged(", ".join(self.addresses), False, self._fence, reason))

    async def _end_run(self) -> None:
        """A clean end of a master that is alone with its journals: peers are notified when theirs is closed."""
        if not self._alone or self._runs is None or self._leadership is None or self._failure is not None:
            return
        self.step(StopRequested("the master was stopped, and the run with it"))
        self._runs = None
        try:
            async with asyncio.timeout(SHUTDOWN_TIMEOUT_S):
                while self._writing:
                    await asyncio.wait(self._writing.values())
        except TimeoutError:
            _log.warning("the journal was not closed within %g s", SHUTDOWN_TIMEOUT_S)

    def _end_leading(self) -> None:
        self._runs = self._leadership = None
        self._stray.update(self._writing.values())
        self._writing.clear()
        for client in list(self._clients.values()):
            self._close_client(client)
        self._clients.clear()

    def _write_journal(self, run: str) -> None:
        """Start to write a run's journal, unless a write of it is in progress."""
        leadership, outbox = self._leadership, self._outbox(run)
        if leadership is None or run in self._writing:
            return
        journal = outbox.begin()
        if journal is not None:
            work = self._write_off_loop(leadership, run, outbox, journal)
            self._writing[run] = asyncio.create_task(work, name=f"ringfold journal of {run}")

    async def _write_off_loop(self, leadership: Leadership, run: str, outbox: Outbox, journal: Journal) -> None:
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
            self._execute(run, outbox.written())
            if journal.is_forgotten and not outbox.waiting():
                del self._outboxes[run]
        else:
            self._write_journal(run)  # the run broke meanwhile, and has restarted

    async def _release_store(self, store: "StoreClient | None") -> None:
        """A clean end: finish the last writes, and release the lease."""
        stray = [task for task in self._stray if task is not None]
        await asyncio.gather(*self._writing.values(), *stray, *self._link_writes.values(), return_exceptions=True)
        if self._candidate is not None and self._held is not None:
            await self._candidate.release(self._held)
        if store is not None:
            await asyncio.to_thread(store.close)

    # Events in, effects out

    def step(self, event: Event) -> None:
        """Step the runs and execute their effects. A run that raises ends alone; an exception here ends the server."""
        if self._failure is not None or self._runs is None:
            return
        now = monotonic_ns()
        suspended_ns, self._stepped_ns = now - self._stepped_ns, now
        if self._leadership is not None and not self._leadership.is_exclusive():
            self.step_down(self._leadership.renewal_error or "it did not renew its lease in time")
            return
        if self._leadership is not None and suspended_ns > self._max_suspension_ns:
            # With the same fence it would have to evict all peers that return. With a higher one they continue.
            self.step_down(
                f"it was suspended for {suspended_ns / 1e9:.1f} s, and its peers look for another master by now"
            )
            return
        try:
            self._route(self._runs.step(now, event))
        except Exception as error:
            _log.exception("the master broke at %r", event)
            self._failure = error
            self.stop()

    def _route(self, routed: Sequence[Routed]) -> None:
        for run, effects in routed:
            if run and not isinstance(effects[0], ReportBrokenRun):
                self._execute(run, self._outbox(run).put(effects))
                continue
            # Of a broken run, waiting effects are discarded, except closes.
            void = self._outboxes.pop(run, Outbox()).waiting() if run else []
            for effect in (*(each for each in void if isinstance(each, CloseConnection)), *effects):
                self._execute_one(run, effect)

    def _execute(self, run: str, effects: Sequence[Effect]) -> None:
        for effect in effects:
            self._execute_one(run, effect)
        self._write_journal(run)

    def _execute_one(self, run: str, effect: Effect) -> None:
        match effect:
            case SendEvidence(conns, evidence):
                frame = evidence_frame(evidence)
                for conn in conns:
                    self._write(conn, frame)
            case SendMessage(conn, message):
                self._write(conn, self._encode(message))
            case SendHeartbeat(conn, number, echo):
                self._write(conn, master_heartbeat(number, echo))
            case RaiseFrameLimit(conn):
                if conn in self._clients:
                    self._clients[conn].frames.limit = MAX_FRAME_BYTES
            case CloseConnection(conn, _):
                client = self._clients.pop(conn, None)
                if client is not None:
                    self._close_client(client)
            case Notify(notice):
                self._notify(run, notice)
            case RecordEvents():
                self._records.from_peer(run, effect)
            case SendEvents(conn, after):
                self._write(conn, self._encode(self._records.events(run, after, self._fence)))
            case WriteLinks(raw):
                if self._leadership is not None and (run not in self._link_writes or self._link_writes[run].done()):
                    work = _write_links(self._leadership, run, raw)
                    self._link_writes[run] = asyncio.create_task(work, name="ringfold links")
            case WriteJournal():
                raise AssertionError("the outbox removes these")
            case ReportBrokenRun(error, event, pause_ns):
                then = "it is over" if pause_ns is None else f"it restarts in {pause_ns / 1e9:g} s"
                _log.error("run %s broke at %s; %s, and no other run is affected", run, event, then, exc_info=error)
            case StartMoonshot(group, question):
                if self._moonshot is None or self._moonshot.done():
                    self._moonshot = asyncio.create_task(self._search(run, group, question), name="ringfold moonshot")
            case _:
                assert_never(effect)

    async def _search(self, run: str, group: GroupId, question: MoonshotRequest) -> None:
        """The moonshot search for a better ring. Nothing waits for it, so a failure is only logged."""
        try:
            output = await run_in_subprocess("ringfold.topology.moonshot", msgspec.json.encode(question), MOONSHOT_S)
        except OSError as error:
            _log.warning("the moonshot search for a better ring cannot be started: %s", error)
            return
        if output is None:
            _log.info("the moonshot search for a better ring of group %d found none", group)
            return
        try:
            found = decode_response(output)
        except RemoteProtocolError as error:
            _log.warning("the moonshot search for a better ring of group %d wrote no result: %s", group, error)
            return
        if found.solution is not None:
            self.step(MoonshotFinished(group, found.solution, run))

    def _notify(self, run: str, notice: Notice) -> None:
        """Log it, write the result of a round, call the observer. A failing observer does not end a run."""
        more: str | None = ""
        if isinstance(notice, ConnectionDropped):
            more = self._log_limit.take(monotonic_ns(), notice.reason)
        if more is not None:
            whose = "" if run in ("", DEFAULT_RUN) else f"run {run}: "
            _log.log(_LEVELS[notice.level], "%s%s%s", whose, notice, more)
            self._records.notice(run, notice)
        try:
            log = self._round_log(run) if isinstance(notice, RoundDone) else None
            if log is not None and isinstance(notice, RoundDone):
                log.round(notice.summary)
            if self._on_notice is not None:
                self._on_notice(notice)
            if self._on_run_notice is not None:
                self._on_run_notice(run, notice)
        except Exception:
            _log.exception("an observer failed at %r", notice)

    def _round_log(self, run: str) -> ProbeLog | None:
        """The log of a run's rounds: in a folder of its own, unless it is the default run."""
        if self._rounds is None or self._export is None or run == DEFAULT_RUN:
            return self._rounds
        if run not in self._other_rounds:
            self._other_rounds[run] = ProbeLog(ExportSettings(directory=self._export / run))
        return self._other_rounds[run]

    def _encode(self, message: FromMaster) -> bytes:
        """A record goes to every member and may be large: it is encoded once."""
        if self._encoded is None or self._encoded[0] is not message:
            self._encoded = (message, message_frame(message))
        return self._encoded[1]

    def _write(self, conn: Conn, frame: bytes) -> None:
        client = self._clients.get(conn)
        if client is not None and client.transport is not None:
            client.transport.write(frame)

    def _close_client(self, client: ClientProtocol) -> None:
        """Close after the queue was sent, or FLUSH_S later."""
        transport = client.transport
        if transport is None:
            return
        timer = asyncio.get_running_loop().call_later(FLUSH_S, transport.abort)
        self._closing[transport] = timer
        transport.close()

    # Metrics

    def facts(self, timeout_s: float) -> MasterFacts:
        """The facts of this instant, for another thread than the server's own. TimeoutError if its loop is too busy,
        or does not run."""
        if self._loop is None:
            raise TimeoutError
        pending: threads.PendingCall[MasterFacts] = threads.PendingCall()
        try:
            self._loop.call_soon_threadsafe(pending.run, self._facts)
        except RuntimeError:  # the loop is closed
            raise TimeoutError from None
        return pending.result(timeout_s)

    def _facts(self) -> MasterFacts:
        runs = self._runs
        transports = [client.transport for client in self._clients.values() if client.transport is not None]
        return MasterFacts(
            leads=runs is not None,
            infos=[] if runs is None else runs.infos(),
            statuses=[] if runs is None else runs.statuses(monotonic_ns()),
            frames_waiting=self._scheduler.waiting,
            effects_waiting=sum(len(outbox.waiting()) for outbox in self._outboxes.values()),
            bytes_waiting=sum(transport.get_write_buffer_size() for transport in transports),
        )

    # Clients

    def on_opened(self, client: ClientProtocol, remote: str) -> Conn:
        self._last_conn += 1
        self._clients[self._last_conn] = client
        if self._runs is None:
            refusal = Refused(self._candidate.why_not if self._candidate is not None else "it stops", again=True)
            self._write(self._last_conn, message_frame(refusal))
            self._close_client(self._clients.pop(self._last_conn))
            return self._last_conn
        self.step(ConnectionOpened(self._last_conn, remote, random_bytes(NONCE_BYTES)))
        return self._last_conn

    def on_frames(self, client: ClientProtocol) -> None:
        """A connection has frames: handle them now, as far as its run's share allows, and the rest in turn."""
        run = "" if self._runs is None else self._runs.owner(client.conn)
        budget = self._scheduler.budget(run)
        if budget:
            self._scheduler.spend(run, client.handle(budget))
        if client.has_frames:
            self._scheduler.wait(run, client.conn)
        if not self._is_turn_scheduled:
            self._is_turn_scheduled = True
            asyncio.get_running_loop().call_soon(self._turn)

    def _turn(self) -> None:
        """The next turn: every run has its share."""
        self._scheduler.begin()
        while (chosen := self._scheduler.next()) is not None:
            run, conn, limit = chosen
            client = self._clients.get(conn)
            if client is None:
                continue
            self._scheduler.spend(run, client.handle(limit))
            if client.has_frames:
                self._scheduler.wait("" if self._runs is None else self._runs.owner(conn), conn)
        self._is_turn_scheduled = not self._scheduler.is_over
        if self._is_turn_scheduled:
            asyncio.get_running_loop().call_soon(self._turn)

    def on_lost(self, client: ClientProtocol, reason: str) -> None:
        """The connection is gone; the machine gets an event unless it requested the close."""
        if client.transport is not None and (timer := self._closing.pop(client.transport, None)) is not None:
            timer.cancel()
            self._one_closed.set()
        if self._clients.pop(client.conn, None) is not None:
            self.step(ConnectionClosed(client.conn, reason))

    @property
    def is_stopping(self) -> bool:
        return self._stopping is not None and self._stopping.is_set()

    def is_open(self, conn: Conn) -> bool:
        return conn in self._clients


async def _write_links(leadership: Leadership, run: str, raw: bytes) -> None:
    store = leadership.stores.get(run)
    if store is None:
        return  # the run is not in the store yet, or no longer
    try:
        await asyncio.to_thread(store.write_links, raw)
    except StoreError as error:
        _log.debug("the link figures were not written: %s", error)


class MasterThread:
    """A master in a thread, with an event loop of its own: for `rf.join(host_master=True)`, notebooks and tests. Use it
    with `with`."""

    def __init__(
        self,
        settings: MasterSettings | None = None,
        listen: Sequence[str] = ("127.0.0.1:0",),
        token: bytes = b"",
        insecure: bool = False,
        on_notice: Callable[[Notice], None] | None = None,
        journal: str | None = None,
        lease_s: float = LEASE_S,
        *,
        alone: bool = False,
    ) -> None:
        """Returns when it listens; raises OSError if it cannot."""
        used = settings or MasterSettings()
        self._server = MasterServer(used, listen, token, insecure, on_notice, journal, lease_s, alone=alone)
        self._thread = asyncio_support.LoopThread("ringfold-master", self._server.serve)
        self._thread.wait_ready()

    @property
    def address(self) -> str:
        """The first address it listens on."""
        return self._server.addresses[0]

    @property
    def addresses(self) -> list[str]:
        return list(self._server.addresses)

    def stop(self) -> None:
        """End the master and wait until its sockets are closed. May be called again."""
        self._thread.call(self._server.stop)
        self._thread.join()

    def __enter__(self) -> "MasterThread":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
