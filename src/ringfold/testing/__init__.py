"""A deterministic simulation of Ringfold: whole runs in one process, on a simulated network and clock.

A seed drives the production master, the production peer machine and the production engine core. The same seed always
gives the same events. A failure is printed with the command that replays it.

    sim = Simulation(seed=7)
    cluster = sim.cluster(peers=5)
    sim.crash(sim.rng.choice(cluster.peers), within_ms=2_000)
    sim.run_until(cluster.finished, limit_ms=60_000)

The base: `scheduler.py` (time and the trace), `network.py` (connections and what may happen to bytes), `nodes.py` (the
master process), `peers.py` (the peer process) with `core.py` and `sockets.py` (the engine core and its sockets),
`masters.py` (masters that fail over), `hostile.py` (hostile input).

Programs and checks: `program.py` (what a user's program may call), `runner.py` (runs it), `blocking.py` (programs in
plain blocking code), `workloads.py`, `stateful.py` and `stalling.py` (the programs), `checks.py` and `sync_checks.py`
(the promises). `simulation.py` puts a run together.

From seeds to runs: `faults.py`, `scenario.py`, `several.py` (several runs on one master), `resuming.py` (all peers are
killed), `sampled.py` (loops with a sampler) and `sharing.py` (fixed shares of paths). `python -m ringfold.testing` runs
many seeds. Bugs that the simulation must find are in `tests/planted`.

Probe rounds have a simulation of their own: `probing.py`, `probing_world.py`, `probing_checks.py`, and with relays
`probing_regions.py`. So have the filter of edges, `filtering.py`, and the global iteration: `iterating.py`,
`iterating_schedules.py`. So have the transport agent of a host with its clients,
`agents.py`, and the agents of several hosts, `forwarding.py`.

For what reads the records of runs: `recorded.py` makes run directories with known clocks and known stragglers, and
`trace_checks.py` checks traces strictly.
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
