"""The masters of the soak: two on one journal, of which one leads, and their faults.

* The leader is killed, and started again a little later: it finds that the other one leads, and stands by.
* The leader is frozen for longer than its lease. When it wakes up it still has its peers' connections and its plans,
  but another one leads; what it decides then must not count.
* Both are killed. One is started again, and finds in the journal what it must go on with; the other one follows.

Faults may overlap: the new leader may be killed while the old one is still frozen. Then no master leads for a while. A
new leader waits for members that died with the old one (10 s), and steps need a leader. So that the run makes progress
at all, masters are left alone after `MAX_MASTER_FAULTS` faults, until the run has made a step again.
"""

import os
import signal
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from ringfold.errors import RingfoldError
from ringfold.runtime.master_client import MasterClient
from ringfold.tools.cluster import LocalCluster, MasterProcess, ProcessFailed, free_port
from ringfold.tools.soak.faults import FaultSchedule, SoakFault
from ringfold.wire.messages import Status

LEASE_S = 2.0
MAX_AWAY_S = 4.0
"""How long a master stays dead at most."""
MAX_MASTER_FAULTS = 2
AFTERMATH_NS = 500_000_000
"""A step that is reported so soon after a fault may have been made before it."""
ASK_S = 0.5
START_S = 20.0
END_S = 10.0


@dataclass(slots=True)
class SoakMaster:
    """An address at which there is a master, one life after the other."""

    address: str
    title: str
    lives: int = 0
    is_up: bool = False
    is_frozen: bool = False

    @property
    def name(self) -> str:
        """The cluster's name of the present life."""
        return f"{self.title}.{self.lives}"


class SoakMasters:
    """A leader and a standby. `where` is what peers join with."""

    def __init__(self, cluster: LocalCluster, journal: Path, settings: dict[str, Any]) -> None:
        self._cluster = cluster
        self._settings: dict[str, Any] = {**settings, "store": f"sqlite://{journal}", "lease_s": LEASE_S}
        self.masters = [SoakMaster(f"127.0.0.1:{free_port()}", f"master-{letter}") for letter in "ab"]
        self.where = ",".join(master.address for master in self.masters)
        self.pids: set[int] = set()
        self._faults_since_step = self._last_fault_ns = 0

    def start(self) -> None:
        """The first one leads when this returns; the second one begins."""
        first, second = self.masters
        self._start(first).wait_leading()
        self._start(second)

    def status(self) -> tuple[SoakMaster, Status] | None:
        """The leader, and the run as it reports it; None if no master responds."""
        for master in self.masters:
            if master.is_up and not master.is_frozen:
                try:
                    with MasterClient(master.address, b"", ASK_S) as connection:
                        return master, connection.status()
                except RingfoldError:
                    continue
        return None

    def stepped(self, now_ns: int) -> None:
        """The run goes on: a step was reported."""
        if now_ns > self._last_fault_ns + AFTERMATH_NS:
            self._faults_since_step = 0

    def faults(self, faults: FaultSchedule) -> list[SoakFault]:
        """What can be done to them. What ends a fault is left with `faults`."""

        def leader() -> SoakMaster | None:
            found = self.status() if self._faults_since_step < MAX_MASTER_FAULTS else None
            return None if found is None else found[0]

        def counted(inject: Callable[[int], bool]) -> Callable[[int], bool]:
            def inject_and_count(now_ns: int) -> bool:
                if not inject(now_ns):
                    return False
                self._faults_since_step, self._last_fault_ns = self._faults_since_step + 1, now_ns
                return True

            return inject_and_count

        def kill_leader(now_ns: int) -> bool:
            if (master := leader()) is None:
                return False
            self._kill(master)
            faults.later(now_ns + faults.seconds(0.05, MAX_AWAY_S), partial(self._start, master))
            return True

        def freeze_leader(now_ns: int) -> bool:
            if (master := leader()) is None:
                return False
            self._cluster.freeze(master.name)
            master.is_frozen, name = True, master.name

            def thaw() -> None:
                if master.is_frozen and master.name == name:
                    self._cluster.thaw(name)
                    master.is_frozen = False

            faults.later(now_ns + faults.seconds(1.1 * LEASE_S, 3 * LEASE_S), thaw)
            return True

        def kill_both(now_ns: int) -> bool:
            if leader() is None or not all(master.is_up for master in self.masters):
                return False
            due_ns = now_ns
            for place in faults.order(len(self.masters)):
                master = self.masters[place]
                self._kill(master)
                due_ns += faults.seconds(0.05, MAX_AWAY_S / 2)
                faults.later(due_ns, partial(self._start, master))
            return True

        return [
            SoakFault("master killed", 0.12, counted(kill_leader)),
            SoakFault("master frozen", 0.08, counted(freeze_leader)),
            SoakFault("both masters killed", 0.05, counted(kill_both)),
        ]

    def end(self) -> list[str]:
        """Stop all, with the peers gone; what did not end as it should."""
        for master in self.masters:
            # One that was just started does not handle SIGTERM yet.
            self._cluster.processes[master.name].expect_output("listening on", START_S)
            self._cluster.allow_exit(master.name)
            os.kill(self._cluster.pid(master.name), signal.SIGTERM)
        wrong = []
        for master in self.masters:
            try:
                status = self._cluster.wait_exit(master.name, END_S)
            except ProcessFailed as error:
                wrong.append(str(error))
            else:
                if status != 0:
                    wrong.append(f"{master.name} ended with status {status}: {self._cluster.log_tail(master.name)}")
        return wrong

    def _start(self, master: SoakMaster) -> MasterProcess:
        master.lives += 1
        process = self._cluster.start_master(master.name, listen=master.address, wait=False, **self._settings)
        self.pids.add(process.pid)
        master.is_up = True
        return process

    def _kill(self, master: SoakMaster) -> None:
        self._cluster.kill(master.name)
        self._cluster.wait_exit(master.name, END_S)
        master.is_up = master.is_frozen = False
