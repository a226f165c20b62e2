"""A deterministic simulation of Ringfold: whole runs in one process, on a simulated network and clock.

The production master, the production peer machine and the production engine core are driven by a seed. What a seed
does wrong it does wrong again, event by event; what it finds is printed with the command that replays it.

    sim = Simulation(seed=7)
    cluster = sim.cluster(peers=5)
    sim.crash(sim.rng.choice(cluster.peers), within_ms=2_000)
    sim.run_until(cluster.finished, limit_ms=60_000)

Read `scheduler.py` (time and the trace) and `network.py` (what may happen to bytes) first, then `nodes.py` and
`peers.py` (the two processes; `sockets.py` and `core.py` stand between a peer and its engine), `program.py` and
`runner.py` (what users do on a peer; `blocking.py` for users who write plain code), `checks.py` and `sync_checks.py`
(the promises), `simulation.py` (all of it together). On top: `workloads.py`, `stateful.py`, `faults.py` and
`scenario.py` draw a run from a seed, and `python -m ringfold.testing` runs seeds by the thousand; bugs that it must
find are in `tests/planted`. Rounds of probing and the global iteration have simulations of their own, which begin in
`probing.py` and `iterating.py`.
"""

from ringfold.testing.blocking import SimRun, blocking
from ringfold.testing.checks import Violation
from ringfold.testing.network import Network, Weather
from ringfold.testing.peers import SimPeer
from ringfold.testing.probing import ProbingSetup, RoundOutcome, RoundScenario, draw_rounds, run_rounds
from ringfold.testing.program import (
    AllReduce,
    ArePending,
    Barrier,
    Broadcast,
    Collective,
    Leave,
    OptimizeTopology,
    Program,
    ProgramOf,
    Reduced,
    Request,
    Self,
    Sleep,
    SmallState,
    Sync,
    UpdateTopology,
    Wait,
)
from ringfold.testing.scenario import Outcome, Scenario, draw, run_seed
from ringfold.testing.scheduler import Scheduler, SimulationFailure
from ringfold.testing.simulation import Cluster, Setup, Simulation, quick_settings
from ringfold.testing.stateful import Looping, Syncing, looping, syncing
from ringfold.testing.workloads import Training, training

__all__ = [
    "AllReduce",
    "ArePending",
    "Barrier",
    "Broadcast",
    "Cluster",
    "Collective",
    "Leave",
    "Looping",
    "Network",
    "OptimizeTopology",
    "Outcome",
    "ProbingSetup",
    "Program",
    "ProgramOf",
    "Reduced",
    "Request",
    "RoundOutcome",
    "RoundScenario",
    "Scenario",
    "Scheduler",
    "Self",
    "Setup",
    "SimPeer",
    "SimRun",
    "Simulation",
    "SimulationFailure",
    "Sleep",
    "SmallState",
    "Sync",
    "Syncing",
    "Training",
    "UpdateTopology",
    "Violation",
    "Wait",
    "Weather",
    "blocking",
    "draw",
    "draw_rounds",
    "looping",
    "quick_settings",
    "run_rounds",
    "run_seed",
    "syncing",
    "training",
]
