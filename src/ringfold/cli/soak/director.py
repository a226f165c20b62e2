"""The parent of the soak: it starts a master and peers, and from then on disturbs them without a pause.

Who lives how long. *Veterans* are there from the beginning to the end, so that growth shows in them: the first one is
never touched, the second one is frozen now and then (so it joins anew, again and again, in one process). All others
are killed, frozen, and replaced. The world stays between a half of the peers and all of them.

No hang. Every peer that is neither frozen nor dead reports a step within `HANG_S`; a newcomer has `START_S` for its
first one. Who does not is named, with the run's status and the stacks of its threads.
"""

import contextlib
import os
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from ringfold.cli.bench.masters import start_master
from ringfold.cli.soak.growth import Sample
from ringfold.errors import RingfoldError
from ringfold.runtime.ask import StatusConnection
from ringfold.runtime.clock import monotonic_ns
from ringfold.runtime.spawn import Crew, Message
from ringfold.wire.messages import Status

LIVENESS = {"heartbeat_ms": 100, "suspect_after_ms": 600, "evict_after_ms": 2_000}
VETERANS = 2
HANG_S = 30.0
START_S = 60.0
SAMPLE_S = 1.0
S = 1_000_000_000
MASTER = "master"


class Hang(Exception):
    """A peer made no progress. `status` is the run as the master saw it then, `log` what the peer wrote last."""

    def __init__(self, name: str, text: str, status: Status | None, log: str) -> None:
        super().__init__(name, text, log)
        self.name, self.text, self.status, self.log = name, text, status, log


@dataclass(slots=True)
class Peer:
    """A peer process, as far as it has reported."""

    name: str
    deadline_ns: int
    """By when it must report again."""
    joined: bool = False
    frozen_until_ns: int | None = None
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
    step: int = 0
    epoch: int = 0
    fetched_bytes: int = 0
    longest_silence_s: float = 0.0


@dataclass(slots=True)
class Outcome:
    """What came out of it, for `checks.py` to judge."""

    tally: Tally
    minutes: float
    seed: int
    digests: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Per peer that was there at the end: its last step, and the digest of its state."""
    samples: dict[str, list[Sample]] = field(default_factory=dict)
    left_behind: list[str] = field(default_factory=list)


class Director:
    """Disturbs a run for a while. `tally` and `peers` are there for whoever shows them."""

    def __init__(self, crew: Crew, peers: int, every_s: float, seed: int, state_bytes: int) -> None:
        self.tally = Tally()
        self.peers: dict[str, Peer] = {}
        self.pids: set[int] = set()
        self._crew, self._most, self._every_s, self._seed, self._state_bytes = crew, peers, every_s, seed, state_bytes
        self._fewest = max(VETERANS + 1, peers // 2)
        self._random = np.random.default_rng(seed)
        self._veterans = [f"veteran-{number}" for number in range(VETERANS)]
        self._samples: dict[str, list[Sample]] = {name: [] for name in (MASTER, *self._veterans)}
        self._started = 0
        self._where = ""
        # Whatever a child puts into its temporary directory must be gone at the end.
        self._scratch = crew.directory / "scratch"
        self._scratch.mkdir()

    def direct(self, minutes: float, on_change: Callable[[float], None] = lambda seconds: None) -> Outcome:
        """Disturb the run for so long, then let it settle and end. `on_change` hears how many seconds have passed."""
        self._where = start_master(self._crew, MASTER, **LIVENESS)
        self.pids.add(self._crew.pid(MASTER))
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
                self._disturb(now_ns)
                next_action_ns = now_ns + int(self._every_s * S)
            self._watch(0.1)
            on_change((now_ns - began_ns) / S)
        self._watch_until(self._all_step)
        outcome = Outcome(self.tally, minutes, self._seed, samples=self._samples)
        self._end(outcome)
        return outcome

    # Disturbances

    def _disturb(self, now_ns: int) -> None:
        """One of: a kill, a freeze, a newcomer."""
        awake = [peer for peer in self.peers.values() if peer.frozen_until_ns is None]
        mortal = [peer.name for peer in awake if peer.name not in self._veterans]
        if len(self.peers) < self._most and (len(awake) <= self._fewest or self._random.random() < 0.5):
            self._start()
        elif len(awake) <= self._fewest or not mortal:
            return
        elif self._random.random() < 0.3:
            # The veteran often: what an eviction leaves behind in a process adds up only there.
            victim = self._veterans[-1] if self._random.random() < 0.4 else str(self._random.choice(mortal))
            if self.peers[victim].frozen_until_ns is None and self.peers[victim].joined:
                # Long enough for an eviction, or not.
                self._freeze(self.peers[victim], now_ns + int(self._random.uniform(0.1, 5.0) * S))
        else:
            self._kill(str(self._random.choice(mortal)))

    def _start(self, name: str = "") -> None:
        if not name:
            name = f"peer-{self._started}"
            self._started += 1
        module = ["-m", "ringfold.cli.soak.trainer"]
        command = [sys.executable, "-P", *module, self._crew.address, name, self._where, str(self._seed)]
        env = {"OPENBLAS_NUM_THREADS": "1", "RINGFOLD_TOKEN_FILE": "", "TMPDIR": str(self._scratch)}
        self._crew.start(name, [*command, str(self._state_bytes)], env=env)
        self.peers[name] = Peer(name, monotonic_ns() + int(START_S * S))
        self.pids.add(self._crew.pid(name))
        self.tally.joins += 1

    def _kill(self, name: str) -> None:
        self._crew.kill(name)
        self._crew.reap(name, 10)
        del self.peers[name]
        self.tally.kills += 1

    def _freeze(self, peer: Peer, until_ns: int) -> None:
        self._crew.freeze(peer.name)
        peer.frozen_until_ns = until_ns
        self.tally.freezes += 1

    # Watching

    def _watch(self, seconds: float) -> None:
        """Take in what is reported for a while; wake whom it is time to wake; see whether anybody hangs."""
        end_ns = monotonic_ns() + int(seconds * S)
        while (left_ns := end_ns - monotonic_ns()) > 0:
            if (got := self._crew.receive(left_ns / S)) is not None:
                self._note(*got)
        now_ns = monotonic_ns()
        for peer in self.peers.values():
            if peer.frozen_until_ns is not None:
                if now_ns >= peer.frozen_until_ns:
                    self._crew.thaw(peer.name)
                    peer.frozen_until_ns = None
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
                if peer.joined and peer.frozen_until_ns is None:
                    silence_s = HANG_S - (peer.deadline_ns - now_ns) / S
                    self.tally.longest_silence_s = max(self.tally.longest_silence_s, silence_s)
                peer.joined, peer.step, peer.world = True, message["step"], message["world"]
                self.tally.step = max(self.tally.step, message["step"])
                self.tally.epoch = max(self.tally.epoch, message["epoch"])
                self.tally.fetched_bytes += message["rx_bytes"]
            case "evicted":
                self.tally.evictions += 1
            case "finished":
                peer.step, peer.digest = message["step"], message["digest"]
        peer.deadline_ns = now_ns + int((HANG_S if peer.joined else START_S) * S)

    def _watch_until(self, settled: Callable[[], bool]) -> None:
        """The watchdog is the deadline."""
        while not settled():
            self._watch(0.1)

    def _all_step(self) -> bool:
        """Everybody is awake, and takes steps with all the others."""
        everybody = self.peers.values()
        return all(peer.frozen_until_ns is None and peer.joined and peer.world == len(everybody) for peer in everybody)

    def _hang(self, peer: Peer) -> Hang:
        status = None
        with contextlib.suppress(RingfoldError), StatusConnection(self._where, b"") as connection:
            status = connection.ask()
        os.kill(self._crew.pid(peer.name), signal.SIGUSR1)
        self._crew.pause(0.5)
        limit_s = HANG_S if peer.joined else START_S
        others = ", ".join(f"{other.name} at step {other.step}" for other in self.peers.values() if other is not peer)
        text = f"hangs: no step for {limit_s:.0f} s, the last one was {peer.step} ({others})"
        return Hang(peer.name, text, status, self._crew.log_tail(peer.name))

    def _sample(self) -> None:
        for name, samples in self._samples.items():
            samples.append(sample(self._crew.pid(name)))

    # The end

    def _end(self, outcome: Outcome) -> None:
        """All stop at the same step, compare, and end by themselves."""
        for name in self.peers:
            self._crew.release(name)
        self._crew.send(self._veterans[:1], {"what": "stop"})
        self._watch_until(lambda: all(peer.digest is not None for peer in self.peers.values()))
        for name, peer in self.peers.items():
            assert peer.digest is not None
            outcome.digests[name] = (peer.step, peer.digest)
            if (status := self._crew.reap(name, 30)) != 0:
                outcome.left_behind.append(f"{name} ended with status {status}")
        outcome.left_behind += [f"in the temporary directory: {path.name}" for path in self._scratch.iterdir()]


def sample(pid: int) -> Sample:
    """Resident memory and open descriptors of a process."""
    resident = 0
    for text in Path(f"/proc/{pid}/status").read_text().splitlines():
        if text.startswith("VmRSS:"):
            resident = int(text.split()[1]) * 1024
    return Sample(resident, len(os.listdir(f"/proc/{pid}/fd")))


def of_sessions(pids: set[int]) -> list[str]:
    """The processes that still live in a session that one of these led."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                command, _, facts = entry.joinpath("stat").read_text().rpartition(")")
                if int(facts.split()[3]) in pids:
                    found.append(command.replace(" (", ": ", 1))
    return found


def shared_memory() -> set[str]:
    """What lies in /dev/shm under our name."""
    where = Path("/dev/shm")
    return {path.name for path in where.iterdir() if "ringfold" in path.name} if where.is_dir() else set()
