"""The parent of the demo: it starts a master and peers, disturbs them, and writes down what they report.

`DemoDirector.direct` is the whole sequence. It never waits for a time, only for something that a peer reports.

How does it know that a peer dies *inside* an all-reduce? A peer reports "entering" right before the call and "left"
right after it. The director kills the first peer that enters a step: that one must wait there for the others. Then the
survivors report. If they reduced that step without the killed peer, the op was aborted and run again. If the op was
finished with the killed peer after all, the kill came too late; the demo shows that, and kills another peer.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from string import ascii_uppercase
from typing import Any

from ringfold.cli.output import duration
from ringfold.errors import UsageError
from ringfold.runtime.clock import monotonic_ns
from ringfold.tools.cluster import ClusterProcess, LocalCluster, Message, ProcessFailed, settings_environment
from ringfold.tools.demo.outcome import Arrival, DemoOutcome, MasterLoss, PeerLoss
from ringfold.units import MS as MS

LIVENESS = {"heartbeat_ms": 100, "suspect_after_ms": 400, "evict_after_ms": 1_500}
"""Shorter than a real run's, so that the demo does not wait five seconds for a frozen peer."""
CHILD_ENVIRONMENT = {
    # The processes share the machine's cores already; two that use all of them would mostly wait for each other.
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "OMP_NUM_THREADS": "1",
    # A token of the user's own runs is not used here: this master does not have it.
    "RINGFOLD_TOKEN_FILE": "",
}
MAX_KILLS = 3
REPORT_TIMEOUT_S = 30.0
"""How long all peers may be silent. While they report, they take steps, and the steps come to an end."""


class DemoFailed(Exception):
    """Something that had to happen did not. The text has what, and the state of every peer."""


@dataclass(slots=True)
class Commit:
    """A peer's report of an all-reduce that has returned."""

    step: int
    at_ns: int
    loss: float
    epoch: int
    world: int
    retried: bool


@dataclass(slots=True)
class DemoPeer:
    """A peer process, as far as it has reported."""

    name: str
    state: str = "starting"
    inside: int | None = None
    """The step whose all-reduce it has entered and not left."""
    commits: list[Commit] = field(default_factory=list)
    digest: str = ""
    held_out: float = 0.0

    @property
    def last(self) -> Commit | None:
        return self.commits[-1] if self.commits else None

    @property
    def is_alive(self) -> bool:
        return self.state not in ("killed", "frozen")

    def after_epoch(self, epoch: int) -> Commit | None:
        """Its first commit in an epoch that is younger."""
        return next((commit for commit in self.commits if commit.epoch > epoch), None)

    def at_step(self, step: int) -> Commit | None:
        return next((commit for commit in reversed(self.commits) if commit.step == step), None)

    def since(self, at_ns: int) -> Commit | None:
        """Its first commit after an instant."""
        return next((commit for commit in self.commits if commit.at_ns > at_ns), None)


class DemoDirector:
    """Runs the sequence. `peers` and `events` can be shown; `on_change` is called when they change."""

    def __init__(self, cluster: LocalCluster, events: Path, founders: int, steps: int, seed: int) -> None:
        """The events of the run are recorded in the directory `events`."""
        self.steps = steps
        self.peers: dict[str, DemoPeer] = {}
        self.events: list[str] = []
        self.on_change: Callable[[], None] = lambda: None
        self._cluster, self._founders, self._seed = cluster, founders, seed
        self._where, self._master = "", "master"
        # With evidence by the master no op can end without one: that it is gone cannot be overlooked.
        journal = f"sqlite://{cluster.directory / 'journal.db'}"
        self._master_settings: dict[str, Any] = {**LIVENESS, "store": journal, "evidence": "master"}
        recording = {"events_dir": events, "flight_dir": events / "flight"}
        self._master_settings |= recording
        self._peer_environment = {**CHILD_ENVIRONMENT, **settings_environment(recording)}
        self._began_ns = monotonic_ns()
        self._outcome = DemoOutcome(founders=founders, steps=steps, seed=seed)

    # The sequence

    def direct(self) -> DemoOutcome:
        """Train to the last step; kill, add, freeze and wake peers meanwhile, and kill the master."""
        master = self._cluster.start_master(self._master, **self._master_settings)
        master.wait_leading()
        self._where = master.address
        dashboard = self._start_dashboard()
        founders = [self._start() for _ in range(self._founders)]
        newcomer = self._start()
        self._let_join(*founders)
        if dashboard is not None:
            self._show_dashboard(dashboard)
        self._reach(0.15)
        for _ in range(MAX_KILLS):
            killed = self._kill_inside_an_all_reduce()
            self._welcome(newcomer)
            if killed.inside:
                break
            newcomer = self._start()
        self._reach(0.5)
        frozen = self._freeze(next(peer for peer in self._alive() if peer is not newcomer))
        self._reach(0.65)
        self._wake(frozen)
        self._reach(0.8)
        for _ in range(MAX_KILLS):
            if self._lose_the_master().inside:
                break
        self._finish()
        return self._outcome

    def compare(self) -> Iterator[int]:
        """Train once more, undisturbed, and add the loss to the outcome. Yields the steps."""
        name = "undisturbed"
        self._spawn(name, "model", self._seed, self.steps, self._founders)
        self._cluster.wait_connected([name], REPORT_TIMEOUT_S)
        while (got := self._cluster.receive(REPORT_TIMEOUT_S, [name])) is not None:
            if "held_out" in got[1]:
                self._cluster.allow_exit(name)
                self._outcome.undisturbed = got[1]["held_out"]
                return
            yield got[1]["step"]
        raise DemoFailed(f"the undisturbed training has been silent for {REPORT_TIMEOUT_S:.0f} s")

    # Its steps

    def _start_dashboard(self) -> ClusterProcess | None:
        """A dashboard beside the master, which it outlives; None without its packages."""
        from ringfold.cli.dashboard import check_installed

        try:
            check_installed()
        except UsageError as error:
            self._log_event(str(error))
            return None
        dashboard = self._cluster.start_command("dashboard", "dashboard", self._where, token_file="")
        dashboard.allow_exit()
        return dashboard

    def _show_dashboard(self, dashboard: ClusterProcess) -> None:
        """Show its address, as soon as it has one. The run goes on without it."""
        try:
            line = dashboard.expect_output("dashboard at ", REPORT_TIMEOUT_S)
        except ProcessFailed as error:
            self._log_event(f"there is no dashboard: {error}")
            return
        self._outcome.dashboard = line.removeprefix("dashboard at ")
        self._log_event(f"{line} until the demo ends")

    def _start(self) -> DemoPeer:
        """Start a peer that loads everything and then waits for the message to join."""
        peer = DemoPeer(f"peer {ascii_uppercase[len(self.peers)]}")
        self.peers[peer.name] = peer
        self._spawn(peer.name, "trainer", self._where, self._seed, self.steps, env=self._peer_environment)
        return peer

    def _let_join(self, *peers: DemoPeer) -> int:
        """Send the message to join; return when it was sent, on the clock that all processes share."""
        self._cluster.wait_connected([peer.name for peer in peers], REPORT_TIMEOUT_S)
        self._until(lambda: all(peer.state == "ready" for peer in peers), "all were ready")
        sent_ns = monotonic_ns()
        for peer in peers:
            peer.state = "joining"
        self._cluster.send([peer.name for peer in peers], {"join": True})
        return sent_ns

    def _kill_inside_an_all_reduce(self) -> PeerLoss:
        """Kill the first peer that enters the next step; the others' reports show whether the op was aborted."""
        step = self._newest_step() + 1
        reporting = self._changes("a peer entered an all-reduce")
        victim = next(peer for peer in reporting if peer.inside is not None and peer.inside >= step)
        at_ns = self._cluster.kill(victim.name)
        assert victim.inside is not None
        step, victim.state = victim.inside, "killed"
        fault = self._recover(victim, "SIGKILL", step, at_ns)
        reports = [commit for peer in self._alive() if (commit := peer.at_step(step))]
        fault.inside = all(commit.world == fault.ring for commit in reports)
        where = "inside" if fault.inside else "too late to stop"
        took = duration(fault.recovery_ms)
        self._log_event(
            f"{victim.name} killed {where} the all-reduce of step {step} -> ring of {fault.ring} after {took}"
        )
        return fault

    def _welcome(self, newcomer: DemoPeer) -> None:
        self._arrive(newcomer, "joined", self._let_join(newcomer))

    def _freeze(self, victim: DemoPeer) -> DemoPeer:
        step = victim.last.step if victim.last else 0
        at_ns = self._cluster.freeze(victim.name)
        victim.state = "frozen"
        self._log_event(f"{victim.name} frozen (SIGSTOP) at step {step}")
        fault = self._recover(victim, "SIGSTOP", step, at_ns)
        self._log_event(f"{victim.name} evicted -> ring of {fault.ring} after {duration(fault.recovery_ms)}")
        return victim

    def _wake(self, frozen: DemoPeer) -> None:
        self._log_event(f"{frozen.name} woken (SIGCONT) while the others are at step {self._newest_step()}")
        frozen.state = "waking"
        at_ns = self._cluster.thaw(frozen.name)
        self._until(lambda: bool(self._outcome.evictions), f"{frozen.name} saw that it was evicted")
        self._arrive(frozen, "rejoined", at_ns)

    def _lose_the_master(self) -> MasterLoss:
        """Kill the master when a peer has entered the next step, and start it again.

        With evidence by the master no peer can leave that step without one, unless the evidence was in flight already.
        """
        step = self._newest_step() + 1
        reporting = self._changes("a peer entered an all-reduce")
        step = next(peer.inside for peer in reporting if peer.inside is not None and peer.inside >= step)
        peers = self._alive()
        epoch = max(peer.last.epoch for peer in peers if peer.last)
        at_ns = self._cluster.kill(self._master)
        self._cluster.wait_exit(self._master, REPORT_TIMEOUT_S)
        self._log_event(f"the master killed in step {step}")
        self._master = f"{self._master}, again"
        self._cluster.start_master(self._master, listen=self._where, wait=False, **self._master_settings)
        self._until(lambda: all(peer.after_epoch(epoch) for peer in peers), "the peers went on with the next master")
        first = [commit for peer in peers if (commit := peer.after_epoch(epoch))]
        recovery_ms = (max(commit.at_ns for commit in first) - at_ns) / MS
        reports = [commit for peer in peers if (commit := peer.at_step(step))]
        inside = len(reports) == len(peers) and all(commit.at_ns > at_ns for commit in reports)
        lost = self._outcome.master = MasterLoss(step, recovery_ms, len(peers), first[0].world, inside)
        where = "inside its all-reduce" if inside else "too late to be inside its all-reduce"
        self._log_event(f"that was {where}; started again -> ring of {lost.kept} after {duration(recovery_ms)}")
        return lost

    def _finish(self) -> None:
        survivors = self._alive()
        self._until(lambda: all(peer.state == "finished" for peer in survivors), "all peers had finished")
        outcome = self._outcome
        outcome.seconds = (monotonic_ns() - self._began_ns) / 1e9
        outcome.exit_codes = {peer.name: self._cluster.wait_exit(peer.name, REPORT_TIMEOUT_S) for peer in survivors}
        outcome.digests = {peer.name: peer.digest for peer in survivors}
        outcome.held_out = {peer.name: peer.held_out for peer in survivors}
        commits = [commit for peer in self.peers.values() for commit in peer.commits]
        outcome.epochs = max(commit.epoch for commit in commits)
        outcome.retries = sum(commit.retried for commit in commits)
        outcome.aborts = len({commit.step for commit in commits if commit.retried})
        outcome.events = self.events

    # What the steps are made of

    def _spawn(self, name: str, module: str, *arguments: object, env: Mapping[str, str] = CHILD_ENVIRONMENT) -> None:
        self._cluster.start_worker(name, f"ringfold.tools.demo.{module}", *arguments, env=env)

    def _recover(self, victim: DemoPeer, signal: str, step: int, at_ns: int) -> PeerLoss:
        """Wait until every survivor has committed an op in an epoch without the victim."""
        survivors = self._alive()
        epoch = max(peer.last.epoch for peer in [*survivors, victim] if peer.last)
        what = f"the survivors of {victim.name} went on"
        self._until(lambda: all(peer.after_epoch(epoch) for peer in survivors), what)
        first = [commit for peer in survivors if (commit := peer.after_epoch(epoch))]
        recovery_ms = (max(commit.at_ns for commit in first) - at_ns) / MS
        fault = PeerLoss(victim.name, signal, step, recovery_ms, ring=first[0].world)
        self._outcome.faults.append(fault)
        return fault

    def _arrive(self, peer: DemoPeer, how: str, since_ns: int) -> None:
        """Wait until a peer that joins has committed an op with the others."""
        self._until(lambda: peer.since(since_ns) is not None, f"{peer.name} took part")
        commit = peer.since(since_ns)
        assert commit is not None
        arrival = Arrival(peer.name, how, commit.step, (commit.at_ns - since_ns) / MS)
        self._outcome.arrivals.append(arrival)
        took = duration(arrival.took_ms)
        self._log_event(f"{peer.name} {how} at step {commit.step} -> ring of {commit.world} after {took}")

    def _reach(self, part: float) -> None:
        """Wait until the run has done this part of its steps, with every peer that has joined."""
        step = int(part * self.steps)
        self._until(lambda: all(peer.last and peer.last.step >= step for peer in self._trainees()), f"step {step}")

    def _alive(self) -> list[DemoPeer]:
        return [peer for peer in self._trainees() if peer.is_alive]

    def _trainees(self) -> list[DemoPeer]:
        """Every peer that was sent the message to join and is able to continue."""
        waiting = ("starting", "ready")
        return [peer for peer in self.peers.values() if peer.is_alive and peer.state not in waiting]

    def _newest_step(self) -> int:
        """The highest step that a peer has entered."""
        entered = [peer.inside for peer in self.peers.values() if peer.inside is not None]
        return max([*entered, *(peer.last.step for peer in self.peers.values() if peer.last)], default=0)

    def _log_event(self, text: str) -> None:
        self.events.append(f"{(monotonic_ns() - self._began_ns) / 1e9:5.1f} s  {text}")
        self.on_change()

    # Reports

    def _until(self, condition: Callable[[], bool], what: str) -> None:
        """Take reports in until the condition holds."""
        if condition():
            return
        for _ in self._changes(what):
            if condition():
                return

    def _changes(self, what: str) -> Iterator[DemoPeer]:
        """Each peer that reports, right after it did. Fails when the run stands still, or ends, before `what` came."""
        while (got := self._cluster.receive(REPORT_TIMEOUT_S)) is not None:
            peer = self.peers[got[0]]
            self._take(peer, got[1])
            yield peer
            self.on_change()
            if (trainees := self._trainees()) and all(one.state == "finished" for one in trainees):
                raise DemoFailed(f"the run ended before {what}; it needs more --steps than {self.steps}")
        raise DemoFailed(
            f"no peer has reported for {REPORT_TIMEOUT_S:.0f} s, while waiting for {what}; {self._positions()}"
        )

    def _take(self, peer: DemoPeer, message: Message) -> None:
        match message:
            case {"what": "ready"}:
                peer.state = "ready"
            case {"what": "joined"}:
                peer.state = "training"
            case {"what": "entering", "step": step}:
                peer.inside = step
            case {"what": "left", **report}:
                peer.inside = None
                peer.commits.append(Commit(**report))
            case {"what": "evicted", "reason": reason}:
                peer.state = "joining"
                self._outcome.evictions.append(f"{peer.name}: {reason}")
                self._log_event(f"{peer.name} sees that it was evicted: {reason}")
            case {"what": "finished", "digest": digest, "held_out": held_out, "sample": sample}:
                peer.state, peer.digest, peer.held_out = "finished", digest, held_out
                self._outcome.sample = sample
                self._cluster.allow_exit(peer.name)
            case _:
                raise AssertionError(f"{peer.name} reported {message}")

    def _positions(self) -> str:
        steps = {peer.name: peer.last.step if peer.last else "none" for peer in self.peers.values()}
        return ", ".join(f"{peer.name} {peer.state} at step {steps[peer.name]}" for peer in self.peers.values())
