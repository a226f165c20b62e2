"""Rare events of peers, over heartbeats that are lost, reports that are replaced, and masters that die: the production
recording, engine core and master machine together."""

from collections import defaultdict

import pytest

from ringfold.clock.global_clock import ClockModel, GlobalClock
from ringfold.master.effects import Effect, RecordEvents
from ringfold.peer import recording
from ringfold.peer.recording import Recording
from ringfold.runtime import recorder
from ringfold.runtime.recorder import begun
from ringfold.testing.core import Core
from ringfold.testing.masters import lead
from ringfold.testing.nodes import SimMaster
from ringfold.testing.peers import SimPeer
from ringfold.testing.simulation import Setup, Simulation, quick_settings
from ringfold.testing.workloads import Training, training
from ringfold.units import MS
from ringfold.wire.events import PeerEvicted, decode_event

EVERY_NS = 7 * MS
"""Several events between two heartbeats, which come every 40 ms."""


class Source:
    """A simulated core as the engine of a recording."""

    def __init__(self, core: Core) -> None:
        self._core = core

    def ended_ops(self, since: int) -> tuple[int, bytes]:
        return since, b""

    def set_report(self, report: bytes) -> None:
        self._core.set_report(report)

    def wake(self) -> None: ...


class Reporter:
    """A peer's recording, which emits numbered events."""

    def __init__(self, sim: Simulation, peer: SimPeer) -> None:
        self.sim, self.peer, self.emitted = sim, peer, 0
        self.recording = Recording(begun("peer", "default", peer.name, "host", "1"), None, None)
        self.recording.attach(Source(peer.core), GlobalClock(ClockModel(), lambda: 0))
        sim.scheduler.after(EVERY_NS, self._emit)

    def _emit(self) -> None:
        if self.peer.host.alive and self.peer.busy:
            self.recording.follow(self.peer.machine.control_conn)
            self.recording.emit(PeerEvicted(f"{self.peer.name} {self.emitted}"))
            self.emitted += 1
            self.sim.scheduler.after(EVERY_NS, self._emit)


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_each_master_records_each_event_once(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    recorded: dict[str, dict[str, list[int]]] = defaultdict(lambda: defaultdict(list))
    carry_out = SimMaster._carry_out

    def carry_out_and_note(master: SimMaster, run: str, effect: Effect) -> None:
        if isinstance(effect, RecordEvents):
            for line in effect.lines:
                event = decode_event(line)
                assert event is not None
                assert isinstance(event.notice, PeerEvicted)
                name, number = event.notice.reason.split()
                recorded[f"{master.name} {master.fence}"][name].append(int(number))
        carry_out(master, run, effect)

    monkeypatch.setattr(SimMaster, "_carry_out", carry_out_and_note)
    sim = Simulation(seed, Setup(settings=quick_settings(evidence="ring", return_ms=2_000), journal=True))
    monkeypatch.setattr(recording, "monotonic_ns", lambda: sim.scheduler.now)
    monkeypatch.setattr(recorder, "monotonic_ns", lambda: sim.scheduler.now)
    cluster = sim.cluster(peers=3, program=training(Training(seed=seed, steps=120, ops=(1, 1), think_ms=5.0)))
    reporters = [Reporter(sim, peer) for peer in cluster.peers]
    for commits in (30, 60):
        sim.run_until(lambda commits=commits: len(sim.history.committed) > commits, limit_ms=10_000)  # type: ignore[misc]
        sim.master.die("is killed")
        sim.scheduler.after(60 * MS, lead, sim)
    sim.run_until(cluster.finished, limit_ms=60_000)

    assert len(recorded) == 3, "three masters"
    for by_peer in recorded.values():
        for numbers in by_peer.values():
            assert numbers == list(range(numbers[0], numbers[-1] + 1)), "in order, none twice, none left out"
    for reporter in reporters:
        found = {number for by_peer in recorded.values() for number in by_peer[reporter.peer.name]}
        assert reporter.emitted > 40
        assert found >= set(range(reporter.emitted - 12)), "all but those after the last heartbeat"
