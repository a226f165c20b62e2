"""The parent of the soak: it starts masters and peers, and from then on disturbs them without a pause.

Lifetimes. *Veterans* live from the beginning to the end, so that growth shows in them: the first one is never
disturbed, the second one is frozen now and then, so it rejoins many times in one process. All others are killed, frozen
and replaced. The world stays between half of the peers and all of them. `masters.py` disturbs the two masters at the
same time.

No hang. Every peer that is neither frozen nor dead reports a step within `HANG_S`; a newcomer has `START_S` for its
first one. A peer that does not is named, with the run's status and the stacks of its threads. That is longer than the
run may make no progress: twice the time for which a new leader waits for the members that died with the old one, and
the lease.
"""

import os
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import numpy as np

from ringfold.runtime.clock import monotonic_ns
from ringfold.tools.cluster import LocalCluster, Message
from ringfold.tools.soak.checks import Hang, ResourceSample, SoakCheck, growth, sample, shown
from ringfold.tools.soak.epochs import EpochHistory, Line, judge
from ringfold.tools.soak.faults import FaultSchedule, SoakFault
from ringfold.tools.soak.masters import SoakMasters
from ringfold.units import S as S

LIVENESS: dict[str, object] = {"heartbeat_ms": 100, "suspect_after_ms": 600, "evict_after_ms": 2_000}
VETERANS = 2
HANG_S = 45.0
START_S = 60.0
SAMPLE_S = 1.0
AFTER_THAW_S = 5.0
"""An eviction so soon after a freeze is a consequence of it."""
LEADER = "the leading master"


@dataclass(slots=True)
class SoakPeer:
    """A peer process, as far as it has reported."""

    name: str
    deadline_ns: int
    """By when it must report again."""
    joined: bool = False
    frozen_until_ns: int | None = None
    thawed_ns: int | None = None
    """When it was last woken."""
    step: int = -1
    world: int = 0
    digest: int | None = None


@dataclass(slots=True)
class Tally:
    """What has happened so far."""

    kills: int = 0
    freezes: int = 0
    joins: int = 0
    evictions: int = 0
    awake_evictions: list[str] = field(default_factory=list)
    """Of peers that were not frozen shortly before, with the reason."""
    evidence: str = ""
    masters_killed: int = 0
    masters_frozen: int = 0
    both_masters_killed: int = 0
    step: int = 0
    epoch: int = 0
    fetched_bytes: int = 0
    lanes: Counter[str] = field(default_factory=Counter)
    """How many reports of steps came from peers with lanes of this kind."""
    longest_silence_s: float = 0.0
    longest_without_commit_s: float = 0.0
    """At the peer that is never touched."""

    def count_master_faults(self, faults: FaultSchedule) -> None:
        self.masters_killed, self.masters_frozen = faults.counts["master killed"], faults.counts["master frozen"]
        self.both_masters_killed = faults.counts["both masters killed"]


@dataclass(slots=True)
class PeerSoakOutcome:
    """What came out of it, for `checks` to judge."""

    tally: Tally
    minutes: float
    seed: int
    digests: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Per peer that was there at the end: its last step, and the digest of its state."""
    samples: dict[str, list[ResourceSample]] = field(default_factory=dict)
    """Per veteran, and of the leader."""
    master_samples: dict[str, list[ResourceSample]] = field(default_factory=dict)
    """Per life of a master: while it led, because a standby has no peers."""
    history: EpochHistory = field(default_factory=EpochHistory)
    left_behind: list[str] = field(default_factory=list)


class PeerSoak:
    """Disturbs a run for a while. `tally` and `peers` can be shown meanwhile."""

    def __init__(self, cluster: LocalCluster, peers: int, every_s: float, seed: int, state_bytes: int) -> None:
        # Both routes of evidence, in turn: with evidence by the master every op needs one.
        self.tally = Tally(evidence=("ring", "master")[seed % 2])
        self.peers: dict[str, SoakPeer] = {}
        self._cluster, self._most, self._every_s, self._seed, self._state_bytes = (
            cluster,
            peers,
            every_s,
            seed,
            state_bytes,
        )
        self._fewest = max(VETERANS + 1, peers // 2)
        self._random = np.random.default_rng(seed)
        self._faults = FaultSchedule(
            [
                SoakFault("join", 0.5, self._add_one),
                SoakFault("freeze", 0.15, self._freeze_one),
                SoakFault("kill", 0.35, self._kill_one),
            ],
            self._random,
        )
        self._masters = SoakMasters(
            cluster, cluster.directory / "journal.db", {**LIVENESS, "evidence": self.tally.evidence}
        )
        self.pids = self._masters.pids
        """Of all processes that were ever started."""
        self._faults.add(self._masters.faults(self._faults))
        self._veterans = [f"veteran-{number}" for number in range(VETERANS)]
        self._samples: dict[str, list[ResourceSample]] = {name: [] for name in (LEADER, *self._veterans)}
        self._master_samples: dict[str, list[ResourceSample]] = {}
        self._started = 0
        # Whatever a child puts into its temporary directory must be gone at the end.
        self._scratch = cluster.directory / "scratch"
        self._scratch.mkdir()
        self._logs = cluster.directory / "logs"
        self._logs.mkdir()

    def direct(self, minutes: float, on_change: Callable[[float], None] = lambda seconds: None) -> PeerSoakOutcome:
        """Disturb the run for so long, then let it settle and end. `on_change` gets the seconds that have passed."""
        self._masters.start()
        for name in self._veterans:
            self._start(name)
        for _ in range(self._most - VETERANS):
            self._start()
        began_ns = monotonic_ns()
        self._watch_until(self._all_step)
        next_action_ns = next_sample_ns = monotonic_ns()
        while (now_ns := monotonic_ns()) < began_ns + int(minutes * 60 * S):
            if now_ns >= next_sample_ns:
                self._sample()
                next_sample_ns = now_ns + int(SAMPLE_S * S)
            if now_ns >= next_action_ns:
                self._faults.inject(now_ns)
                self.tally.count_master_faults(self._faults)
                next_action_ns = now_ns + int(self._every_s * S)
            self._watch(0.1)
            on_change((now_ns - began_ns) / S)
        self._watch_until(lambda: not self._faults.run_due(monotonic_ns()))
        self._watch_until(self._all_step)
        outcome = PeerSoakOutcome(
            self.tally, minutes, self._seed, samples=self._samples, master_samples=self._master_samples
        )
        self._end(outcome)
        return outcome

    # Disturbances

    @property
    def _awake(self) -> list[SoakPeer]:
        return [peer for peer in self.peers.values() if peer.frozen_until_ns is None]

    def _disturbable(self) -> list[str]:
        """The peers that may be disturbed now; none if too few would be left."""
        awake = self._awake
        return [p.name for p in awake if p.name not in self._veterans] if len(awake) > self._fewest else []

    def _add_one(self, now_ns: int) -> bool:
        if len(self.peers) < self._most:
            self._start()
            return True
        return False

    def _freeze_one(self, now_ns: int) -> bool:
        """Long enough for an eviction, or not."""
        if not (candidates := self._disturbable()):
            return False
        # The veteran often: what an eviction leaves behind in a process adds up only there.
        victim = self._veterans[-1] if self._random.random() < 0.4 else str(self._random.choice(candidates))
        if self.peers[victim].frozen_until_ns is None and self.peers[victim].joined:
            self._freeze(self.peers[victim], now_ns + int(self._random.uniform(0.1, 5.0) * S))
            return True
        return False

    def _kill_one(self, now_ns: int) -> bool:
        if not (candidates := self._disturbable()):
            return False
        self._kill(str(self._random.choice(candidates)))
        return True

    def _start(self, name: str = "") -> None:
        if not name:
            name = f"peer-{self._started}"
            self._started += 1
        env = {"OPENBLAS_NUM_THREADS": "1", "RINGFOLD_TOKEN_FILE": "", "TMPDIR": str(self._scratch)}
        arguments = (self._masters.where, self._seed, self._state_bytes, self.tally.joins, self._logs / name)
        self._cluster.start_worker(name, "ringfold.tools.soak.peer", *arguments, env=env)
        self.peers[name] = SoakPeer(name, monotonic_ns() + int(START_S * S))
        self.pids.add(self._cluster.pid(name))
        self.tally.joins += 1

    def _kill(self, name: str) -> None:
        self._cluster.kill(name)
        self._cluster.wait_exit(name, 10)
        del self.peers[name]
        self.tally.kills += 1

    def _freeze(self, peer: SoakPeer, until_ns: int) -> None:
        self._cluster.freeze(peer.name)
        peer.frozen_until_ns = until_ns
        self.tally.freezes += 1

    # Watching

    def _watch(self, seconds: float) -> None:
        """Receive reports for a while; wake the peers whose freeze is over; raise if a peer hangs."""
        end_ns = monotonic_ns() + int(seconds * S)
        while (left_ns := end_ns - monotonic_ns()) > 0:
            if (got := self._cluster.receive(left_ns / S)) is not None:
                self._note(*got)
        now_ns = monotonic_ns()
        self._faults.run_due(now_ns)
        for peer in self.peers.values():
            if peer.frozen_until_ns is not None:
                if now_ns >= peer.frozen_until_ns:
                    self._cluster.thaw(peer.name)
                    peer.frozen_until_ns, peer.thawed_ns = None, now_ns
                    peer.deadline_ns = now_ns + int(HANG_S * S)
            elif now_ns > peer.deadline_ns:
                raise self._hang(peer)

    def _note(self, name: str, message: Message) -> None:
        peer = self.peers.get(name)
        if peer is None:
            return
        now_ns = monotonic_ns()
        match message["what"]:
            case "step":
                self._masters.stepped(now_ns)
                if peer.joined and peer.frozen_until_ns is None:
                    silence_s = HANG_S - (peer.deadline_ns - now_ns) / S
                    self.tally.longest_silence_s = max(self.tally.longest_silence_s, silence_s)
                peer.joined, peer.step, peer.world = True, message["step"], message["world"]
                self.tally.step = max(self.tally.step, message["step"])
                self.tally.epoch = max(self.tally.epoch, message["epoch"])
                self.tally.fetched_bytes += message["rx_bytes"]
                if message["lanes"]:  # none, while a neighbour has just been lost
                    self.tally.lanes[lanes_kind(message["lanes"], message["in_memory"])] += 1
            case "evicted":
                self.tally.evictions += 1
                if peer.thawed_ns is None or now_ns > peer.thawed_ns + int(AFTER_THAW_S * S):
                    self.tally.awake_evictions.append(f"{name}: {message['reason']}")
            case "finished":
                peer.step, peer.digest = message["step"], message["digest"]
        peer.deadline_ns = now_ns + int((HANG_S if peer.joined else START_S) * S)

    def _watch_until(self, settled: Callable[[], bool]) -> None:
        """The watchdog is the deadline."""
        while not settled():
            self._watch(0.1)

    def _all_step(self) -> bool:
        """No peer is frozen, and all take steps together."""
        peers = self.peers.values()
        return all(peer.frozen_until_ns is None and peer.joined and peer.world == len(peers) for peer in peers)

    def _hang(self, peer: SoakPeer) -> Hang:
        found = self._masters.status()
        os.kill(self._cluster.pid(peer.name), signal.SIGUSR1)
        self._cluster.pause(0.5)
        limit_s = HANG_S if peer.joined else START_S
        others = ", ".join(f"{other.name} at step {other.step}" for other in self.peers.values() if other is not peer)
        text = f"hangs: no step for {limit_s:.0f} s, the last one was {peer.step} ({others})"
        return Hang(peer.name, text, None if found is None else found[1], self._cluster.log_tail(peer.name))

    def _sample(self) -> None:
        self._cluster.pause(0)  # it raises if a master has ended that was not killed
        for name in self._veterans:
            self._samples[name].append(sample(self._cluster.pid(name)))
        if (found := self._masters.status()) is not None:
            taken = sample(self._cluster.pid(found[0].name))
            self._samples[LEADER].append(taken)
            self._master_samples.setdefault(found[0].name, []).append(taken)

    # The end

    def _end(self, outcome: PeerSoakOutcome) -> None:
        """All stop at the same step, compare, and end by themselves."""
        for name in self.peers:
            self._cluster.allow_exit(name)
        self._cluster.send(self._veterans[:1], {"what": "stop"})
        self._watch_until(lambda: all(peer.digest is not None for peer in self.peers.values()))
        for name, peer in self.peers.items():
            assert peer.digest is not None
            outcome.digests[name] = (peer.step, peer.digest)
            if (status := self._cluster.wait_exit(name, 30)) != 0:
                outcome.left_behind.append(f"{name} ended with status {status}")
        outcome.left_behind += self._masters.end()
        outcome.history = judge({path.name: _lines(path) for path in sorted(self._logs.iterdir())})
        self.tally.longest_without_commit_s = outcome.history.longest_ns[self._veterans[0]] / S
        outcome.left_behind += [f"in the temporary directory: {path.name}" for path in self._scratch.iterdir()]


def lanes_kind(lanes: int, in_memory: int) -> str:
    """What carries the lanes of a peer with two neighbours, and how many channels it has."""
    carrier = "memory" if in_memory == lanes else "memory and TCP" if in_memory else "TCP"
    return f"{carrier}, {'one channel' if lanes <= 2 else 'several channels'}"


def _lines(path: Path) -> Iterator[Line]:
    """What a peer wrote; a kill may have cut the last line short."""
    decode = msgspec.json.Decoder(Line).decode
    with path.open("rb") as log:
        for text in log:
            if text.endswith(b"\n"):
                yield decode(text)


def checks(outcome: PeerSoakOutcome) -> list[SoakCheck]:
    """Divergence and hangs end a soak at once, so what is left to judge is how it ended."""
    tally = outcome.tally
    found = [
        SoakCheck(
            "nothing hangs, and no member of a sync diverges",
            True,
            f"{tally.step} steps with evidence by {tally.evidence}; peers: {tally.kills} kills, {tally.freezes} "
            f"freezes ({tally.evictions} evictions), {tally.joins} joins; masters killed {tally.masters_killed} times, "
            f"frozen {tally.masters_frozen} times, both killed {tally.both_masters_killed} times; the longest silence "
            f"was {tally.longest_silence_s:.1f} s, the longest time without a committed op "
            f"{tally.longest_without_commit_s:.1f} s",
        ),
        *_history(outcome),
        SoakCheck(
            "lanes are in shared memory and TCP",
            any(kind.startswith("memory") for kind in tally.lanes) and any("TCP" in kind for kind in tally.lanes),
            ", ".join(f"{kind}: {count} reports" for kind, count in sorted(tally.lanes.items())),
        ),
    ]
    ends = set(outcome.digests.values())
    last = ", ".join(f"step {step}, digest {digest:08x}" for step, digest in sorted(ends))
    found.append(SoakCheck("all end with the same bits", len(ends) == 1, f"{len(outcome.digests)} peers: {last}"))
    for name, samples in outcome.samples.items():
        for each in growth(name, samples):
            found.append(SoakCheck(f"{name} does not grow in {each.what}", each.is_flat, str(each)))
    found += _masters(outcome)
    left = "; ".join(outcome.left_behind) or "no process, no file, no shared memory"
    found.append(SoakCheck("nothing is left behind", not outcome.left_behind, left))
    return found


def _history(outcome: PeerSoakOutcome) -> list[SoakCheck]:
    history = outcome.history
    leaders = f"{history.epochs} epochs of {history.fences} leaderships"
    return [
        SoakCheck(
            "epochs and steps grow strictly in every peer's log",
            not history.going_back,
            shown(history.going_back) or f"{len(history.longest_ns)} logs",
        ),
        SoakCheck(
            "there is one history of epochs",
            not history.two_histories and history.epochs > 0,
            shown(history.two_histories) or leaders,
        ),
        SoakCheck(
            "peers agree on what was committed",
            not history.ops_apart and history.committed > 0,
            shown(history.ops_apart) or f"{history.committed} ops of {history.steps} steps",
        ),
    ]


def _masters(outcome: PeerSoakOutcome) -> list[SoakCheck]:
    """No single life grows, either: one that leads, is deposed and leads again could keep what it had."""
    grown = [each for name, samples in outcome.master_samples.items() for each in growth(name, samples)]
    if not grown:
        return []
    wrong = [str(each) for each in grown if not each.is_flat]
    worst = max(grown, key=lambda each: (each.last - each.first) / each.allowed)
    lives = len({each.name for each in grown})
    return [SoakCheck("no life of a master grows", not wrong, shown(wrong) or f"{lives} lives; {worst}")]
