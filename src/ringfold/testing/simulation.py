"""A whole run in one process: a master, peers with programs, a network between them, and faults.

    sim = Simulation(seed=7)
    cluster = sim.cluster(peers=5)
    sim.crash(sim.rng.choice(cluster.peers), within_ms=2_000)
    sim.run_until(cluster.finished, limit_ms=60_000)

Everything that checkers find ends in a `SimulationFailure` that carries the seed.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random

from ringfold.config import DEFAULT_RUN
from ringfold.errors import MasterUnreachable, RingfoldError
from ringfold.master.journal import encode
from ringfold.master.machine import Master
from ringfold.master.runs import Runs
from ringfold.master.settings import MasterSettings
from ringfold.peer.engine import FIXED
from ringfold.peer.settings import PeerTimings
from ringfold.testing.checks import History, Violation
from ringfold.testing.hostile import GarbageClient
from ringfold.testing.masters import MASTER_HOSTS, SimStore
from ringfold.testing.network import Link, Network, Weather, on_path
from ringfold.testing.nodes import MASTER_PORT, SimMaster
from ringfold.testing.peers import DATA_PORT, SimPeer
from ringfold.testing.program import ProgramOf
from ringfold.testing.scheduler import MS, Scheduler, SimulationFailure, Trace
from ringfold.testing.sync_checks import SyncHistory
from ringfold.testing.workloads import Training, training
from ringfold.wire.messages import Liveness

TOKEN = b"simulated"


def quick_settings(**changes: object) -> MasterSettings:
    """Settings for short runs: a few KiB are many segments, and silence is death after 300 ms."""
    values: dict[str, object] = {
        "small_bytes": 64,
        "segment_bytes": 256,
        "liveness": Liveness(heartbeat_ms=40, suspect_after_ms=120, evict_after_ms=300),
        "attach_ms": 2_500,
        "seal_ms": 3_000,
        "edge_stall_ms": 400,
        "resume_wait_ms": 300,
    }
    return MasterSettings(**(values | changes))  # type: ignore[arg-type]


QUICK_TIMINGS = PeerTimings(
    connect_ms=400, attach_ms=1_000, handshake_ms=1_500, path_patience_ms=100, path_redial_most_ms=200
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """What a simulation is made of, besides its seed."""

    settings: MasterSettings = field(default_factory=quick_settings)
    timings: PeerTimings = QUICK_TIMINGS
    weather: Weather = field(default_factory=Weather)
    master: type[Master] = Master
    peer: type[SimPeer] = SimPeer
    shell: type[SimMaster] = SimMaster
    store: type[SimStore] = SimStore
    journal: bool = False
    """Whether masters keep a journal, so that others can take over; then there are several hosts for them."""
    write_us: tuple[int, int] = (20, 2_000)
    """How long half a write takes."""
    paths: int = 1
    """Addresses of every peer, each with conditions of its own."""
    op_timeout_ms: int = 300_000
    """Of calls without a timeout of their own."""
    planted: str = ""
    """A bug for the engine, by name. See `tests/planted`."""
    first_sequence: int = 0
    """Where the ops of every tag begin to count; shortly before 2^32 they wrap around."""
    hosts: int = 0
    """The peers say that they are on so many hosts, in turn; 0: each on its own. They share no memory there."""


def draw_advice(rng: Random, paths: int) -> tuple[list[int], int]:
    """Shares of the paths, and flags: as likely as not foolish."""
    shares = [rng.choice((0, 1, rng.randint(1, 65_535))) for _ in range(paths)] if rng.random() < 0.7 else []
    vetoes = sum(1 << path for path in range(paths) if rng.random() < 0.4) if rng.random() < 0.7 else 0
    return shares, vetoes | (FIXED if rng.random() < 0.3 else 0)


class Book:
    """What the checkers know of one run."""

    def __init__(self) -> None:
        self.history = History()
        self.syncs = SyncHistory()


class Cluster:
    """The peers that one call of `cluster` started, and those that came for them later."""

    def __init__(self, sim: "Simulation", peers: list[SimPeer]) -> None:
        self._sim, self.peers = sim, peers

    @property
    def alive(self) -> list[SimPeer]:
        """Peers that were neither killed nor evicted nor cut off."""
        return [peer for peer in self.peers if not peer.gone]

    def finished(self) -> bool:
        """Every program has come to its end, or its peer was killed."""
        return self._sim.busy == 0


class Simulation:
    """One run, from one seed."""

    def __init__(self, seed: int, setup: Setup | None = None, *, echo: Callable[[str], None] | None = None) -> None:
        self.seed = seed
        self.setup = setup or Setup()
        self.verbose = echo is not None
        self.scheduler = Scheduler(seed, Trace(echo=echo))
        self.network = Network(self.scheduler, self.setup.weather)
        self.books: dict[str, Book] = {DEFAULT_RUN: Book()}
        self.history, self.syncs = self.books[DEFAULT_RUN].history, self.books[DEFAULT_RUN].syncs
        self.by_name: dict[str, SimPeer] = {}
        self.injected: Counter[str] = Counter()
        self.epochs = self.installed = self.busy = 0
        self.rings: Counter[str] = Counter()
        self.searches = 0
        self.peers: list[SimPeer] = []
        self.originals: list[SimPeer] = []
        """The peers that faults are drawn for."""
        self.shells: list[SimMaster] = []
        self.store = self.setup.store()
        self._first_master()
        self.touched: set[str] = set()
        """Peers that a fault was about: they may be evicted for it."""
        self.finished_runs: set[str] = set()
        """Named runs that admit no peer any more."""
        self.master_was_silent = False
        self.judges_evictions = False
        self.rejoin = False
        """Whether a peer that was evicted joins again."""
        self.at_next_sync: list[Callable[[list[int], list[int]], None]] = []
        """What to do when the master has planned the next sync, given the holders and the receivers of the state."""
        self.at_next_admission: list[Callable[[list[str]], None]] = []
        """What to do when members are next notified of newcomers, given their names."""
        self._program: ProgramOf | None = None
        self.given_names: dict[str, str] = {}
        """The names that processes give themselves, by host: one that is started again is known by it."""

    def _first_master(self) -> None:
        setup, secret = self.setup, self.rng.randbytes(32)
        runs = Runs(setup.settings, TOKEN, secret, keeps_journal=setup.journal, machine=setup.master)
        if setup.journal:
            self.store.take_over(1)
            for run, journal in runs.first_journals().items():
                self.store.write(run, 0, encode(journal))
        self.take_lead(setup.shell(self, runs, 1, "master", self.store if setup.journal else None))

    def book(self, run: str) -> Book:
        """What is known of a run."""
        return self.books.setdefault(run, Book())

    def take_lead(self, shell: SimMaster) -> None:
        """This master leads from now on."""
        self.master = shell
        self.shells.append(shell)

    @property
    def masters(self) -> tuple[str, ...]:
        """The hosts that a peer knows masters on."""
        return MASTER_HOSTS if self.setup.journal else ("master",)

    @property
    def rng(self) -> Random:
        return self.scheduler.rng

    @property
    def now_ms(self) -> float:
        return self.scheduler.now / MS

    def note(self, who: str, what: str) -> None:
        """Add a line to the trace."""
        self.scheduler.trace.note(self.scheduler.now, who, what)

    # Participants

    def cluster(
        self,
        peers: int = 3,
        *,
        groups: int = 1,
        program: ProgramOf | None = None,
        within_ms: float = 20,
        run: str = DEFAULT_RUN,
    ) -> Cluster:
        """Start so many peers of a run, at drawn instants, with a program (a training loop if none is given).

        Faults are drawn for those of the default run.
        """
        chosen = program or training(Training(seed=self.seed))
        started = [
            self.join(chosen, group=index % groups, at_ms=self.now_ms + self.rng.uniform(0, within_ms), run=run)
            for index in range(peers)
        ]
        if run == DEFAULT_RUN:
            self._program = chosen
            self.originals += started
        return Cluster(self, started)

    def join(
        self,
        program: ProgramOf | None = None,
        *,
        group: int = 0,
        at_ms: float | None = None,
        name: str = "",
        run: str = DEFAULT_RUN,
    ) -> SimPeer:
        """Start one more peer, by a name that it had before or by a new one."""
        chosen = program or self._program
        assert chosen is not None, "say which program the peer runs"
        host = f"peer-{len(self.peers) + 1}"
        self.given_names[host] = name or host
        peer = self.setup.peer(self, host, group, chosen, run)
        self.peers.append(peer)
        self.by_name[peer.name] = peer
        self.busy += 1
        self.scheduler.at(self.scheduler.now if at_ms is None else int(at_ms * MS), peer.start)
        return peer

    def was_cast_out(self, peer: SimPeer) -> None:
        """A peer's program ended because the run went on without it. It may be started again."""
        if peer.run in self.finished_runs and f"run {peer.run} finished" in str(peer.error):
            return  # it came too late
        self.check_cast_out(peer, peer.error)
        if self.rejoin:
            program = None if peer.run == DEFAULT_RUN else peer.program
            self.join(program, group=peer.group, at_ms=self.now_ms + self.rng.uniform(0, 100), run=peer.run)

    def check_cast_out(self, peer: SimPeer, error: RingfoldError | None) -> None:
        """No peer is evicted without a fault of its own."""
        excused = peer.name in self.touched or (self.master_was_silent and isinstance(error, MasterUnreachable))
        if self.judges_evictions and not excused:
            raise Violation(f"{peer.name} was evicted, and no fault was about it: {error}")

    def start_again(self, peer: SimPeer) -> None:
        """A peer's program has ended and wants to be started again, as one that crashed is."""
        self.join(peer.program, group=peer.group, at_ms=self.now_ms + self.rng.uniform(0, 100), run=peer.run)

    def sync_begins(self, holders: list[int], receivers: list[int]) -> None:
        """The master has planned a sync. Faults may wait for that."""
        waiting, self.at_next_sync = self.at_next_sync, []
        for action in waiting:
            action(holders, receivers)

    def admission_begins(self, newcomers: list[str]) -> None:
        """Members are notified of these newcomers. Faults may wait for that."""
        waiting, self.at_next_admission = self.at_next_admission, []
        for action in waiting:
            action(newcomers)

    # What goes wrong

    def crash(self, peer: SimPeer, *, within_ms: float = 0) -> None:
        """Kill the peer's process, at a drawn instant."""
        self._soon(within_ms, peer.kill)

    def power_off(self, peer: SimPeer, *, within_ms: float = 0) -> None:
        """Take the peer's host down; no connection is closed."""
        self._soon(within_ms, peer.kill, True)

    def freeze(self, node: SimPeer | SimMaster, *, for_ms: float, within_ms: float = 0) -> None:
        """Stop a process (SIGSTOP), and let it go on later (SIGCONT)."""

        def begin() -> None:
            if node.host.alive and not node.host.frozen:
                self.network.freeze(node.host)
                self.scheduler.after(int(for_ms * MS), self.network.wake, node.host)

        self._soon(within_ms, begin)

    def partition(
        self, one: SimPeer | SimMaster, two: SimPeer | SimMaster, *, for_ms: float, one_way: bool = False
    ) -> None:
        """Hold back everything between two hosts (or from `one` to `two` only), until it heals."""
        directions = [(one.name, two.name)] if one_way else [(one.name, two.name), (two.name, one.name)]
        for direction in directions:
            self.network.block(*direction)
            self.scheduler.after(int(for_ms * MS), self.network.unblock, *direction)

    def slow_link(self, one: SimPeer, two: SimPeer, *, for_ms: float) -> None:
        """A hundredth of the rate, and ten times the latency, from `one` to `two`."""
        for link in self.network.links(one.name, two.name):
            self._slow_down(link, for_ms)

    def _slow_down(self, link: Link, for_ms: float) -> None:
        rate, latency = link.bytes_per_ms, link.latency_ns
        link.bytes_per_ms, link.latency_ns = max(rate // 100, 1), latency * 10

        def heal() -> None:
            link.bytes_per_ms, link.latency_ns = rate, latency

        self.scheduler.after(int(for_ms * MS), heal)

    def slow_path(self, one: SimPeer, two: SimPeer, path: int, *, for_ms: float) -> None:
        """The same on one of their paths, both ways."""
        ends = on_path(one.name, path), on_path(two.name, path)
        for direction in (ends, ends[::-1]):
            self._slow_down(self.network.link(*direction), for_ms)

    def cut_path(self, one: SimPeer, two: SimPeer, path: int, *, for_ms: float, gone_after_ms: float) -> None:
        """Hold back everything on one of their paths; after a while their kernels give its connections up."""
        ends = on_path(one.name, path), on_path(two.name, path)
        for direction in (ends, ends[::-1]):
            self.network.block(*direction)
            self.scheduler.after(int(for_ms * MS), self.network.unblock, *direction)
        if gone_after_ms < for_ms:
            self.scheduler.after(int(gone_after_ms * MS), self.network.reset_path, *ends)

    def reset_lanes(self, one: SimPeer, two: SimPeer, path: int) -> None:
        """The connections of one of their paths end; if it is their only one, one of them stays."""
        keep = 1 if self.setup.paths == 1 else 0
        self.network.reset_path(on_path(one.name, path), on_path(two.name, path), keep)

    def advise(self, peer: SimPeer, *, for_ms: float) -> None:
        """Advice about the peer's paths that changes again and again; the last one stays."""
        until = self.scheduler.now + int(for_ms * MS)

        def speak() -> None:
            if peer.host.alive:
                peer.advised(*draw_advice(self.rng, self.setup.paths))
            if self.scheduler.now < until:
                self.scheduler.after(int(self.rng.uniform(0.1, 20) * MS), speak)

        speak()

    def fail_dials(self, one: SimPeer, two: SimPeer, *, for_ms: float) -> None:
        """Connections from `one` to `two` are refused or get no answer; what is connected stays."""
        links = self.network.links(one.name, two.name)
        if links[0].dials_refused or links[0].dials_dropped:
            return
        dropped = self.rng.random() < 0.5
        for link in links:
            link.dials_dropped, link.dials_refused = dropped, not dropped

        def heal() -> None:
            for link in self.network.links(one.name, two.name):
                link.dials_refused = link.dials_dropped = False

        self.scheduler.after(int(for_ms * MS), heal)

    def throw_garbage(self, peer: SimPeer) -> None:
        """A client without a token connects to the master and to a peer, and sends garbage."""
        client = GarbageClient(self.network)
        client.bother(self.master.name, MASTER_PORT)
        client.bother(peer.name, DATA_PORT)

    def lie(self, peer: SimPeer, *, for_ms: float) -> None:
        """Some of the blocks and hashes that the peer sends are wrong."""
        peer.lies = True

        def heal() -> None:
            peer.lies = False

        self.scheduler.after(int(for_ms * MS), heal)

    def crash_holders(self, *, within_ms: float) -> None:
        """When a peer next fetches state, kill all peers that have it, one after the other."""

        def begin(holders: list[int], receivers: list[int]) -> None:
            if not receivers:
                self.at_next_sync.append(begin)
                return
            for peer in self.peers:
                if peer.peer in holders and peer.busy and peer.run == DEFAULT_RUN:
                    self.touched.add(peer.name)
                    self.crash(peer, within_ms=within_ms)

        self.at_next_sync.append(begin)

    def crash_newcomer(self, *, within_ms: float) -> None:
        """When a peer is next admitted, kill one of the members, before it is of any use."""

        def begin(newcomers: list[str]) -> None:
            name = self.rng.choice(newcomers)
            self.touched.add(name)
            self.crash(self.by_name[name], within_ms=within_ms)

        self.at_next_admission.append(begin)

    def find_rings(self) -> None:
        """The moonshot search has found a better ring for every group of the default run."""
        self.searches += 1
        self.master.find_rings(Random(f"{self.seed}/{self.searches} search"))

    # Running and judging

    def is_over(self) -> bool:
        """Every program has come to its end, or its peer was killed."""
        return self.busy == 0

    def run_until(self, condition: Callable[[], bool], limit_ms: float) -> None:
        """Run until `condition` holds; that it does so within `limit_ms` of virtual time is itself a promise."""
        try:
            if not self.scheduler.run_until(condition, int(limit_ms * MS)):
                raise Violation(f"not finished after {limit_ms:.0f} ms of virtual time: {self._unfinished()}")
            if self.busy == 0:
                for book in self.books.values():
                    book.history.check_end()
                for peer in self.peers:
                    peer.check_neighbours()
        except SimulationFailure:
            raise
        except (AssertionError, Exception) as error:
            for peer in self.peers:
                peer.stop_program()
            text = str(error) if isinstance(error, Violation) else f"{type(error).__name__}: {error}"
            raise SimulationFailure(self.seed, text, self.scheduler.trace.tail()) from error

    def _unfinished(self) -> str:
        waiting = [f"{peer.name} ({peer.doing})" for peer in self.peers if peer.busy]
        return ", ".join(waiting) or "no peer is busy"

    def _soon(self, within_ms: float, action: Callable[..., object], *arguments: object) -> None:
        if within_ms <= 0:
            action(*arguments)
        else:
            self.scheduler.after(int(self.rng.uniform(0, within_ms) * MS), action, *arguments)
