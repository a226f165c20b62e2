"""Masters that are lost and replaced: the journal they share, which one leads, and what happens to leaders.

There may be several hosts for masters, of which one leads. The journal of a run is a value with compare-and-set; a
write takes time, and a process may die, freeze or be deposed before, during and after it. A new leader reads the
journals, and writes them back under a higher fence: that of a single run in one instant, those of several runs one by
one, each in its own time, while the old leader may still write to those that are not taken over yet. Whether the old
one is dead, asleep or wide awake then makes no difference to it, and must make none to the runs: that is what is tested
here.
"""

from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING, Literal, get_args

from msgspec import structs

from ringfold.master.journal import decode, encode
from ringfold.master.runs import Runs
from ringfold.testing.scheduler import MS

if TYPE_CHECKING:
    from ringfold.testing.simulation import Simulation

MASTER_HOSTS = ("master", "master-2", "master-3")
LEASE_MS = 200
"""A leader that was asleep for longer has lost its lease."""

MasterFaultKind = Literal["crash", "depose", "split", "doom"]
DOOMS = ("Record", "Record", "CallDone", "SyncDone", "SyncPlan", "Seal", "Installed", "CallFailed", "Welcome", "Left")


class SimStore:
    """The place of the journals: a value for each run, which only a master that knows its version may replace; and the
    list of runs with the newest fence, to which only the master with that fence may add."""

    def __init__(self) -> None:
        self.journals: dict[str, bytes] = {}
        self.links: dict[str, bytes] = {}
        self.fence = 0
        self._versions: dict[str, int] = {}

    def version(self, run: str) -> int:
        return self._versions.get(run, 0)

    def take_over(self, fence: int) -> None:
        """A new leader has this fence, and adds runs from now on."""
        self.fence = fence

    def write(self, run: str, expected: int, raw: bytes) -> int | None:
        """The new version; None if the value is not the expected one any more, or a deposed leader adds a run."""
        is_new = run not in self.journals
        if expected != self.version(run) or (is_new and decode(raw, "simulated").fence < self.fence):
            return None
        self.journals[run], self._versions[run] = raw, self.version(run) + 1
        return self._versions[run]


@dataclass(frozen=True, slots=True)
class MasterFault:
    """Something that happens to the leader: at an instant, or so long after a peer's call number `call`.

    `crash` kills it, `depose` freezes it, `split` leaves it as it is, and `doom` kills it right after it has sent so
    many messages of a kind. In all cases another one leads `lead_ms` later.
    """

    kind: MasterFaultKind
    at_ms: float
    call: int
    lead_ms: float
    for_ms: float
    message: str = ""
    count: int = 0

    def __str__(self) -> str:
        when = f"{self.at_ms:.1f} ms after call {self.call}" if self.call else f"at {self.at_ms:.1f} ms"
        what = f" after {self.count} {self.message}" if self.kind == "doom" else ""
        return f"master {self.kind}{what} {when}, another leads {self.lead_ms:.1f} ms later"


def draw_masters(rng: Random, horizon_ms: float) -> list[MasterFault]:
    """One to four things that happen to leaders."""
    faults = []
    for _ in range(rng.choice((1, 1, 2, 2, 3, 4))):
        kind = rng.choice(get_args(MasterFaultKind))
        call = rng.randint(1, 25) if rng.random() < 0.5 else 0
        at_ms = rng.uniform(0, rng.choice((0.5, 5, 20)) if call else horizon_ms)
        lead_ms, for_ms = rng.choice((1, 20, 150, 400)) * rng.uniform(0.5, 1), rng.uniform(50, 1_500)
        faults.append(MasterFault(kind, at_ms, call, lead_ms, for_ms, rng.choice(DOOMS), rng.randint(1, 6)))
    return faults


def inject_master(sim: "Simulation", fault: MasterFault) -> None:
    """Schedule it."""
    if fault.call:
        sim.originals[0].on_call(fault.call, lambda: sim.scheduler.after(int(fault.at_ms * MS), _begin, sim, fault))
    else:
        sim.scheduler.at(int(fault.at_ms * MS), _begin, sim, fault)


def _begin(sim: "Simulation", fault: MasterFault) -> None:
    leader = sim.master
    if leader.is_over or leader.host.frozen:
        return
    sim.note("fault", str(fault))
    sim.injected[f"master {fault.kind}"] += 1
    match fault.kind:
        case "doom":
            leader.doom(fault.message, fault.count, fault.lead_ms)
            return
        case "crash":
            leader.die("is killed")
        case "depose":
            sim.freeze(leader, for_ms=fault.for_ms)
        case "split":
            pass
    lead_later(sim, fault.lead_ms)


def lead_later(sim: "Simulation", after_ms: float) -> None:
    """A master leads after that time, unless a newer one leads by then."""
    fence = sim.store.fence

    def begin() -> None:
        if sim.store.fence == fence:
            lead(sim)

    sim.scheduler.after(int(after_ms * MS), begin)


def lead(sim: "Simulation") -> None:
    """A new leader takes over, on a host where no master runs. A deposed one that sleeps on may have to make room."""
    free = [name for name in MASTER_HOSTS if name not in sim.network.hosts or not sim.network.hosts[name].alive]
    if not free:
        asleep = [shell for shell in sim.shells if not shell.is_over and shell is not sim.master]
        asleep[0].die("is replaced")
        free = [asleep[0].name]
    store, setup, now = sim.store, sim.setup, sim.scheduler.now
    fence = store.fence + 1
    store.take_over(fence)
    is_shared = len(sim.books) > 1
    secret = sim.rng.randbytes(32) if is_shared else b""
    runs = Runs(setup.settings, b"simulated", secret, fence, now, keeps_journal=True, machine=setup.master)
    for run, raw in sorted(store.journals.items()):
        journal = decode(raw, "simulated")
        runs.restore(now, run, journal, store.links.get(run, b""))
        if not is_shared:
            store.write(run, store.version(run), encode(structs.replace(journal, fence=fence)))
    shell = setup.shell(sim, runs, fence, sim.rng.choice(free), store)
    sim.take_lead(shell)
    sim.note(sim.master.name, f"leads with fence {fence}")
    if is_shared:
        shell.raise_fences()
