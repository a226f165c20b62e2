"""Ringfold: all-reduce over plain IP that survives. Peers come, go, freeze and die, and the run goes on.

    import ringfold as rf

    with rf.join("10.0.0.1:48148") as run:
        for step in run.steps(rf.SharedState(model=weights), until=1000, min_world=2):
            step.all_reduce(gradients(weights), op="avg")

Importing this is cheap: what needs NumPy or the native core is loaded when it is first used.
"""

# The packages, in the order of imports (each uses those above it, never those below or beside it):
#
#   errors, config   every exception, by what the caller does next; every setting and its sources
#   units, limits    nanoseconds and bytes; the limits that several packages enforce
#   states           transition tables of state machines
#   wire             messages and frames, as types and as bytes
#   runtime          sockets, clocks, randomness, threads, processes: the only Python code that uses them
#   store            a key-value store with compare-and-set and leases: sqlite, TCPStore, etcd, Redis
#   topology         the ring order from measured links. Pure
#   probe, clock     UDP probes between nodes, lines between their clocks; the global clock
#   iteration        the global iteration: agreement through a store alone
#   agent            the per-host agent: flows, telemetry, and hints how to split traffic over paths
#   data             which peer takes which samples of a data set. Pure
#   state            shared state: the arrays that are bit-identical on all peers
#   master           the state machine of a run, and the server around it
#   peer             the communicator of a training process, and its native engine
#   observe          views of the events of a run: records, live state, traces
#   torch            PyTorch: a model and its optimizer as shared state; checkpoints as torch and safetensors files
#   compat           the PCCL API on top of the communicator
#   torch            for PyTorch programs: a loader for the samples of a step
#   cli, testing     the commands; the deterministic simulation, public
#   tools            programs around the library: benchmarks, soak tests, the demo, the lab
#
# `_native` is the compiled core: kernels, the engine without I/O, and the engine with sockets (see native/).

from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from ringfold.errors import (
    CallMismatch,
    ClockNotReady,
    CollectiveAborted,
    ConfigError,
    DeadlineExceeded,
    EpochChanged,
    Evicted,
    HashMismatch,
    MasterUnreachable,
    PeerLost,
    RemoteProtocolError,
    RevisionViolation,
    RingfoldError,
    StateDiverged,
    StateError,
    StateLost,
    StoreError,
    StoreReset,
    StoreUnknown,
    StoreUnreachable,
    StoreWentBack,
    Superseded,
    TooFewPeers,
    TopologyFailed,
    UsageError,
)

if TYPE_CHECKING:
    from ringfold import torch as torch
    from ringfold.clock.prober import Prober
    from ringfold.config import Resolved
    from ringfold.data.sampler import Sampler, Share
    from ringfold.iteration.shell import GlobalIteration
    from ringfold.master.server import MasterThread
    from ringfold.peer.communicator import Communicator
    from ringfold.peer.joining import JoinRequest
    from ringfold.peer.outcome import Handle, Meeting, ReduceInfo
    from ringfold.peer.settings import PeerTimings
    from ringfold.peer.step_ops import StepHandle
    from ringfold.peer.steps import Step
    from ringfold.peer.sync.sync_call import SyncInfo
    from ringfold.runtime.rendezvous import Rendezvous
    from ringfold.state.checkpoint import Checkpoints
    from ringfold.state.shared import MayDiffer, SharedState
    from ringfold.wire.status import Divergence

__version__ = "0.1.0"
__all__ = [
    "CallMismatch",
    "Checkpoints",
    "ClockNotReady",
    "CollectiveAborted",
    "Communicator",
    "ConfigError",
    "DeadlineExceeded",
    "Divergence",
    "EpochChanged",
    "Evicted",
    "GlobalIteration",
    "Handle",
    "HashMismatch",
    "MasterUnreachable",
    "MayDiffer",
    "Meeting",
    "PeerLost",
    "PeerTimings",
    "Prober",
    "ReduceInfo",
    "RemoteProtocolError",
    "RevisionViolation",
    "RingfoldError",
    "Sampler",
    "Share",
    "SharedState",
    "StateDiverged",
    "StateError",
    "StateLost",
    "Step",
    "StepHandle",
    "StoreError",
    "StoreReset",
    "StoreUnknown",
    "StoreUnreachable",
    "StoreWentBack",
    "Superseded",
    "SyncInfo",
    "TooFewPeers",
    "TopologyFailed",
    "UsageError",
    "join",
]
_LAZY = {
    "Checkpoints": "ringfold.state.checkpoint",
    "Communicator": "ringfold.peer.communicator",
    "Divergence": "ringfold.wire.status",
    "GlobalIteration": "ringfold.iteration.shell",
    "Handle": "ringfold.peer.outcome",
    "MayDiffer": "ringfold.state.shared",
    "Meeting": "ringfold.peer.outcome",
    "PeerTimings": "ringfold.peer.settings",
    "Prober": "ringfold.clock.prober",
    "ReduceInfo": "ringfold.peer.outcome",
    "Sampler": "ringfold.data.sampler",
    "Share": "ringfold.data.sampler",
    "SharedState": "ringfold.state.shared",
    "Step": "ringfold.peer.steps",
    "StepHandle": "ringfold.peer.step_ops",
    "SyncInfo": "ringfold.peer.sync.sync_call",
}


def join(
    address: str | Sequence[str] | None = None,
    *,
    run: str | None = None,
    group: int = 0,
    token: str | bytes | None = None,
    token_file: str | Path | None = None,
    name: str | None = None,
    host: str | None = None,
    advertise: str | Sequence[str] | None = None,
    port: int | None = None,
    host_master: bool = False,
    timeout_s: float | None = None,
    op_timeout_s: float | None = None,
    probe: 'bool | Literal["listen"] | None' = None,
    timings: "PeerTimings | None" = None,
) -> "Communicator":
    """Join a run of the master at `address`, and return once this process is a member of its group.

    `run` is the run's name, by default `default`. One master serves several runs, which have nothing to do with each
    other. A run with a name of its own ends once: after its last member has left, no peer can join it.

    `address` is `host`, `host:port` or `[IPv6]:port`; several, separated by commas or in a list, are tried in turn,
    again and again until `timeout_s`. The first peers of a run are members at once; a later one waits until all members
    call `update_topology` (`steps` does): while they make progress as long as it takes, else until `timeout_s`. With
    `host_master` this process runs the master, too, at the first address: no other process is needed, but the run ends
    for all peers when this peer leaves. If another process of this user hosts the same run there already, this one
    joins it: the same script may be started several times on a host.

    `group` selects the peers with which this peer reduces. `token` or `token_file` is the run's join token. `advertise`
    are the addresses at which the other peers reach this one, if they are not those of its connection to the master;
    `port` is the first data port to try. `name` and `host` are what `ringfold status` shows. With `probe` this peer
    measures links and clocks all the time, and has the global clock `run.clock`; with `probe="listen"` it has the
    clock, responds to probes and sends none. What is left out comes from the environment, the settings file, or a
    default (see `ringfold config`).
    """
    from ringfold.peer import joining
    from ringfold.peer.settings import PeerTimings

    request = joining.JoinRequest(
        address=address,
        run=run,
        group=group,
        token=token,
        token_file=token_file,
        name=name,
        host=host,
        advertise=advertise,
        port=port,
        timeout_s=timeout_s,
        op_timeout_s=op_timeout_s,
        probe=probe,
        timings=timings or PeerTimings(),
    )
    joined = _join_own_master(request) if host_master else joining.join(request)
    _serve_metrics(joined, request)
    return joined


def _serve_metrics(joined: "Communicator", request: "JoinRequest") -> None:
    """Serve this peer's metrics, if the settings say so."""
    from ringfold.peer import joining

    settings = joining.settings_of(request)
    if settings.integer("metrics_port"):
        from ringfold.observe.peer_endpoint import serve

        serve(joined, settings, joining.token_of(request, settings))


def _join_own_master(request: "JoinRequest") -> "Communicator":
    """Run a master inside this process, and join it; or join the one that another process of this user hosts here, for
    the same run and address. It ends when the communicator of its host is closed.
    """
    from dataclasses import replace

    from ringfold.config import check_run_name, load, rendezvous_directory, split_address
    from ringfold.peer import joining
    from ringfold.runtime.clock import monotonic_ns
    from ringfold.runtime.rendezvous import Rendezvous
    from ringfold.runtime.threads import pause

    given = {"master": joining.listed(request.address), "run": request.run, "join_timeout_s": request.timeout_s}
    settings = load({**given, "token_file": request.token_file})
    host, port = split_address(settings.listed("master")[0])
    if port == 0:
        return _host(request, settings, None)  # a port of its own, which no other process can mean
    run = check_run_name(settings.text("run"))
    meeting = Rendezvous(rendezvous_directory(), f"{run}@{host.replace('/', '_')}:{port}")
    deadline_ns = monotonic_ns() + int(settings.number("join_timeout_s") * 1e9)
    try:
        while not meeting.take():
            if address := meeting.address():
                meeting.close()
                return joining.join(replace(request, address=address))
            if monotonic_ns() >= deadline_ns:
                raise MasterUnreachable(
                    f"{host}:{port}", f"the process that hosts it does not listen yet ({meeting.path})"
                )
            pause(0.02)
        return _host(request, settings, meeting)
    except BaseException:
        meeting.close()
        raise


def _host(request: "JoinRequest", settings: "Resolved", meeting: "Rendezvous | None") -> "Communicator":
    """Run a master inside this process, and join it.

    A master that listens on all addresses is joined at the one that other machines see, so that they can reach this
    peer, too.
    """
    from dataclasses import replace

    from ringfold.peer import joining

    # A host that was killed loses its lock a moment before its port: the holder of the lock now waits for that.
    master = _listen(request, settings, tries=1 if meeting is None else 20)

    def end() -> None:
        if meeting is not None:
            meeting.withdraw()
        master.stop()
        if meeting is not None:
            meeting.close()

    address = joining.reachable(master.address)
    try:
        if meeting is not None:
            meeting.announce(address)
        return joining.join(replace(request, address=address), at_end=end)
    except BaseException:
        end()
        raise


def _listen(request: "JoinRequest", settings: "Resolved", tries: int) -> "MasterThread":
    """A master at the first address; a port that is in use is tried so often, for a second in all at 20 tries."""
    import errno

    from ringfold.master.server import MasterThread
    from ringfold.master.settings import master_settings
    from ringfold.peer import joining
    from ringfold.runtime import threads

    token, listen = joining.token_of(request, settings), settings.listed("master")[:1]
    while True:
        tries -= 1
        try:
            return MasterThread(master_settings(settings), listen, token, settings.switch("insecure"))
        except OSError as error:
            if error.errno != errno.EADDRINUSE or tries <= 0:
                raise ConfigError(f"the master cannot listen on {', '.join(listen)}: {error}") from error
        threads.pause(0.05)


def __getattr__(name: str) -> object:
    """The public names that need NumPy, loaded at their first use; `ringfold.torch` needs PyTorch."""
    if name == "torch":
        return import_module("ringfold.torch")
    if name not in _LAZY:
        raise AttributeError(f"module 'ringfold' has no attribute {name!r}")
    value = getattr(import_module(_LAZY[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
