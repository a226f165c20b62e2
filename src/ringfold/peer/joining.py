"""From an address to a communicator: settings, names and ports, then the session."""

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import metadata
from pathlib import Path
from typing import Literal

from ringfold import config
from ringfold.errors import ConfigError, MasterUnreachable
from ringfold.limits import MAX_PATHS
from ringfold.peer.communicator import Communicator
from ringfold.peer.control import LOG_EVERY_NS
from ringfold.peer.engine import Engine, new_engine
from ringfold.peer.guardian import GuardianStarter
from ringfold.peer.ops import positive_ns
from ringfold.peer.path_shares import PathShares
from ringfold.peer.recording import Recording
from ringfold.peer.session import S, Session
from ringfold.peer.settings import Identity, PeerTimings
from ringfold.probe.logs.files import ExportSettings, ProbeLog
from ringfold.probe.nodes.prober import ProbeSocket
from ringfold.runtime import network, recorder, threads
from ringfold.runtime.clock import monotonic_ns
from ringfold.runtime.hardware import usable_cores, whole_cores
from ringfold.runtime.network import congestion_missing
from ringfold.wire.events import PathSharesChanged
from ringfold.wire.proof import run_token

PORT_TRIES = 512
PROBING_CORES = 8
"""With `probe` at "auto", hosts with fewer cores do not probe: it would take too much of one from the training."""
_log = logging.getLogger("ringfold.peer")
_WILDCARDS = ("0.0.0.0", "::", "*")


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinRequest:
    """The arguments of `ringfold.join`; None: the value of the settings."""

    address: str | Sequence[str] | None = None
    group: int = 0
    run: str | None = None
    token: str | bytes | None = None
    token_file: str | Path | None = None
    name: str | None = None
    host: str | None = None
    advertise: str | Sequence[str] | None = None
    port: int | None = None
    timeout_s: float | None = None
    op_timeout_s: float | None = None
    probe: bool | Literal["listen"] | None = None
    timings: PeerTimings = field(default_factory=PeerTimings)


def join(request: JoinRequest, at_end: Callable[[], None] | None = None) -> Communicator:
    """Join the run, and return when this peer is a member of a group. `at_end` is called when everything is closed."""
    settings = settings_of(request)
    recording = _recording(request, settings)

    def end() -> None:
        recording.close()
        if at_end is not None:
            at_end()

    try:
        session, join_run = _new_session(request, settings, recording)
        join_run()
    except BaseException:
        recording.close()
        raise
    session.at_end = end
    return Communicator(
        session,
        settings.number("op_timeout_s"),
        settings.number("sigterm_grace_s"),
        lambda: _new_session(request, settings, recording),
        recording,
    )


def _recording(request: JoinRequest, settings: config.Resolved) -> Recording:
    run, host = config.check_run_name(settings.text("run")), request.host or network.host_name()
    name = settings.text("name") or f"{host}:{os.getpid()}"
    capacity_bytes = settings.integer("events_mb") << 20
    about = recorder.begun("peer", run, name, host, metadata.version("ringfold"))
    directory, flights = config.run_directory(settings, run), config.flight_directory(settings)
    return Recording(about, directory, flights, capacity_bytes=capacity_bytes)


_PROBE: Mapping[bool | str | None, str | None] = {True: "on", False: "off", "listen": "listen", None: None}


def settings_of(request: JoinRequest) -> config.Resolved:
    """The settings, with the arguments of `ringfold.join`."""
    if request.group < 0:
        raise ConfigError(f"a group is a number from 0 on, not {request.group}")
    return config.load(
        {
            "master": listed(request.address),
            "token_file": request.token_file,
            "run": request.run,
            "name": request.name,
            "advertise": listed(request.advertise),
            "data_port": request.port,
            "join_timeout_s": request.timeout_s,
            "op_timeout_s": request.op_timeout_s,
            "probe": _PROBE.get(request.probe, str(request.probe)),  # a wrong word is an error of the setting
        }
    )


def _new_session(
    request: JoinRequest, settings: config.Resolved, recording: Recording
) -> tuple[Session, Callable[[], None]]:
    """A session that has not joined yet, and the function that joins; if that fails, the session is closed."""
    run = config.check_run_name(settings.text("run"))
    token = run_token(token_of(request, settings), run)
    deadline_ns = monotonic_ns() + positive_ns(settings.number("join_timeout_s"))
    masters = _resolved(settings.listed("master"), deadline_ns)
    advertised = tuple(_literal(host) for host in settings.listed("advertise"))
    if len(advertised) > MAX_PATHS:
        raise ConfigError(f"advertise: {len(advertised)} addresses, but a peer has at most {MAX_PATHS} paths")
    local = _local_addresses(masters)
    host = request.host or network.host_name()
    engine = new_engine(settings.integer("spin_us"), _congestion(settings.text("congestion")))
    bind = _bind_host(local, advertised)
    try:
        port, prober = _listen(engine, settings, bind)
    except (RuntimeError, OSError) as error:
        engine.shutdown()
        raise ConfigError(f"no free data port from {settings.integer('data_port')} on: {error}") from error
    identity = Identity(
        group=request.group,
        host=host,
        name=settings.text("name") or f"{host}:{os.getpid()}",
        addresses=advertised or local,
        port=port,
        token=token,
        run=run,
        probes=prober is not None,
        listen_only=settings.text("probe") == "listen",
        paths=max(1, len(advertised)),
        cores=whole_cores(),
        threads=0 if settings.value("threads") == "auto" else settings.integer("threads"),
        here="" if settings.text("transport") == "tcp" else engine.listen_here(),
    )
    session = Session(engine, identity, _timings(request.timings, settings), recording)
    recording.attach(engine, session.clock)
    if settings.switch("guardian"):
        session.guardian = GuardianStarter(engine, identity)
    if settings.text("agent") == "auto":
        chosen = settings.value("agent_dir")
        assert chosen is None or isinstance(chosen, Path)
        session.path_shares = PathShares(
            engine,
            config.agent_directories(chosen),
            identity.name,
            on_shares=lambda peer, shares: recording.emit(PathSharesChanged(peer, list(shares))),
        )

    def join_run() -> None:
        try:
            if prober is not None:
                session.probe(prober, lambda node: _log_of(settings, node, identity))
            session.join(masters, deadline_ns)
        except BaseException:
            session.close()
            raise

    return session, join_run


def _congestion(wanted: str) -> str:
    if wanted not in ("auto", "host") and (why := congestion_missing(wanted)):
        raise ConfigError(f"congestion: {why}")
    return wanted


def _timings(timings: PeerTimings, settings: config.Resolved) -> PeerTimings:
    """With several masters, a peer goes to the next one after the silence that would get a peer evicted."""
    master_patience = 1 if len(settings.listed("master")) > 1 else timings.master_patience
    reconnect_ms = max(1, int(settings.number("master_patience_s") * 1_000))
    return replace(timings, master_patience=master_patience, reconnect_ms=reconnect_ms)


def _listen(engine: Engine, settings: config.Resolved, bind: str) -> tuple[int, ProbeSocket | None]:
    """Listen at the first free port; if this peer is to probe, the port is free for UDP as well.

    A peer that cannot probe still trains.
    """
    first, wanted = settings.integer("data_port"), settings.text("probe")
    if wanted == "off" or (wanted == "auto" and usable_cores() < PROBING_CORES):
        return engine.listen(bind, first, PORT_TRIES), None
    reason: ConfigError | RuntimeError | OSError | None = None
    for port in range(first, min(first + PORT_TRIES, 65_536)):
        try:
            prober = ProbeSocket(0, bind, port)
        except ConfigError as error:
            reason = error
            continue
        try:
            return engine.listen(bind, port, 1), prober
        except (RuntimeError, OSError) as error:
            prober.close()
            reason = error
    _log.warning("this peer does not probe: %s", reason)
    return engine.listen(bind, first, PORT_TRIES), None


def _log_of(settings: config.Resolved, node: int, identity: Identity) -> ProbeLog | None:
    directory = settings.value("probe_export")
    if not isinstance(directory, Path):
        return None
    try:
        return ProbeLog(ExportSettings(directory=directory), node=node, name=identity.name, host=identity.host)
    except ConfigError as error:
        _log.warning("probe windows are not exported: %s", error)
        return None


def reachable(address: str) -> str:
    """`address` as other machines reach it: a wildcard becomes this machine's own address."""
    host, port = config.split_address(address)
    if host not in _WILDCARDS:
        return address
    own = network.own_address(v6=":" in host)
    return f"[{own}]:{port}" if ":" in own else f"{own}:{port}"


def listed(names: str | Sequence[str] | None) -> list[str] | None:
    if names is None:
        return None
    return [part.strip() for part in names.split(",") if part.strip()] if isinstance(names, str) else list(names)


def token_of(request: JoinRequest, settings: config.Resolved) -> bytes:
    token = settings.token() if request.token is None else request.token
    return token.encode() if isinstance(token, str) else token


def _resolved(addresses: Sequence[str], deadline_ns: int) -> tuple[tuple[str, int], ...]:
    """Every master as IP literal and port. A name that cannot be resolved is tried again until the deadline."""
    if not addresses:
        raise ConfigError("the list of masters is empty; name at least one address")
    pause_s, log_ns = 0.05, 0
    while True:
        found: list[tuple[str, int]] = []
        reason = ""
        for host, port in map(config.split_address, addresses):
            if host in _WILDCARDS:
                raise ConfigError(f"{host} is no address to connect to; name the master's own")
            try:
                found += [(literal, port) for literal in network.literals(host, port)]
            except OSError as error:
                reason = error.strerror or str(error)
        if found:
            return tuple(found)
        if monotonic_ns() + int(pause_s * S) >= deadline_ns:
            raise MasterUnreachable(", ".join(addresses), f"the name is not known ({reason}): correct the address")
        if monotonic_ns() >= log_ns:
            log_ns, left_s = monotonic_ns() + LOG_EVERY_NS, (deadline_ns - monotonic_ns()) / S
            shown = ", ".join(addresses)
            _log.warning("no such name: %s (%s); trying for another %.0f s (join_timeout_s)", shown, reason, left_s)
        threads.pause(pause_s)
        pause_s = min(2 * pause_s, 1.0)


def _literal(host: str) -> str:
    try:
        return network.literals(host, 0)[0]
    except OSError as error:
        raise ConfigError(f"advertise: {host!r} is no address of this machine ({error})") from error


def _local_addresses(masters: Sequence[tuple[str, int]]) -> tuple[str, ...]:
    """This machine's source addresses towards each master: any of the masters may be the one that responds.

    Loopback is useful to other peers only if all masters are there.
    """
    found: dict[str, None] = {}
    reason: OSError | None = None
    for master in masters:
        try:
            found[network.local_address_towards(*master)] = None
        except OSError as error:
            reason = error
    if not found:
        shown = ", ".join(f"{host}:{port}" for host, port in masters)
        raise MasterUnreachable(shown, f"no route to it ({reason})")
    reachable = tuple(address for address in found if not config.is_loopback(address))
    return reachable or tuple(found)


def _bind_host(local: tuple[str, ...], advertised: tuple[str, ...]) -> str:
    """The address to listen on: the one towards the master; all addresses, if that is not one."""
    wanted = advertised or local
    if wanted == local and len(local) == 1:
        return local[0]
    return "::" if any(":" in address for address in wanted) else "0.0.0.0"
