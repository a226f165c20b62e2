"""The settings, and the only reader of environment variables and TOML.

A value comes from the first of these that has it: arguments, environment, TOML file, default. The file is the one that
was named (`--config` or RINGFOLD_CONFIG), else `./ringfold.toml`, else `~/.config/ringfold.toml`. Files are never
merged, and `ringfold config` shows the origin of every value.

`SETTINGS` is the list of all settings. The reference page is generated from it.
"""

import difflib
import ipaddress
import logging
import os
import re
import stat
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from ringfold.errors import ConfigError

MASTER_PORT = 48148
DATA_PORT = 48149
TELEMETRY_PORT = 48147
METRICS_PORT = 48146
AGENT_METRICS_PORT = 48145
DEFAULT_RUN = "default"
"""The run of a peer that does not name one."""

Kind = Literal["text", "integer", "number", "switch", "file", "list"]
Value = str | int | float | bool | Path | tuple[str, ...] | None

_log = logging.getLogger(__name__)
_TRUE = frozenset({"1", "true", "yes", "on"})
_FALSE = frozenset({"0", "false", "no", "off"})
_EXPECTED: Mapping[Kind, str] = {
    "text": "text",
    "integer": "a whole number",
    "number": "a number",
    "switch": "true or false",
    "file": "a path",
    "list": "a list of texts (in the environment: separated by commas)",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One setting. Its name is its argument and its TOML key; the environment variable is derived from it."""

    name: str
    kind: Kind
    default: Value
    help: str
    choices: tuple[str, ...] = ()
    low: float | None = None
    high: float | None = None
    words: tuple[str, ...] = ()
    """Texts that are valid instead of a number."""

    @property
    def env(self) -> str:
        return f"RINGFOLD_{self.name.upper()}"

    def check(self, raw: object) -> Value:
        """The typed value. Raises ConfigError with what is expected. None means: not set."""
        if raw is None and self.default is None:
            return None
        if isinstance(raw, str) and raw in self.words:
            return raw
        value = _typed(self.kind, raw)
        if value is None:
            expected = " or ".join([_EXPECTED[self.kind], *self.words])
            raise ConfigError(f"{self.name} must be {expected}, not {raw!r}")
        if self.choices and value not in self.choices:
            raise ConfigError(f"{self.name} must be one of {', '.join(self.choices)}, not {raw!r}")
        # NaN fails every comparison, so this checks "inside", not "outside".
        if isinstance(value, int | float) and not isinstance(value, bool) and not self._inside(value):
            raise ConfigError(f"{self.name} must be {self.range}, not {raw!r}")
        return value

    def _inside(self, value: float) -> bool:
        low = float("-inf") if self.low is None else self.low
        high = float("inf") if self.high is None else self.high
        return low <= value <= high

    @property
    def range(self) -> str:
        """The allowed numbers or texts, for documentation and errors; empty if everything of the kind is allowed."""
        if self.choices:
            return ", ".join(self.choices)
        if self.words:
            return f"{', '.join(self.words)}, or {replace(self, words=()).range}"
        match self.low, self.high:
            case None, None:
                return ""
            case low, None:
                return f"at least {low:g}"
            case None, high:
                return f"at most {high:g}"
            case low, high:
                return f"from {low:.10g} to {high:.10g}"


def _typed(kind: Kind, raw: object) -> Value:
    """`raw` (typed from TOML or an argument, or text from the environment) as its kind; None if it is not one."""
    match kind, raw:
        case "switch", bool():
            return raw
        case "switch", str() if raw.lower() in _TRUE | _FALSE:
            return raw.lower() in _TRUE
        case (_, bool()):
            return None
        case "integer", int() | str():
            return _integer(raw)
        case "number", int() | float() | str():
            return _number(raw)
        case "text", str():
            return raw
        case "file", str() | Path() if str(raw):
            return Path(raw).expanduser()
        case "list", str():
            return tuple(part.strip() for part in raw.split(",") if part.strip())
        case "list", list() | tuple() if all(isinstance(part, str) for part in raw):
            return tuple(raw)
    return None


def _integer(raw: int | str) -> int | None:
    try:
        return int(raw)
    except ValueError:
        return None


def _number(raw: float | str) -> float | None:
    try:
        return float(raw)
    except ValueError:
        return None


_SETTINGS = (
    Setting(name="listen", kind="list", default=(f"127.0.0.1:{MASTER_PORT}",),
            help="Addresses that the master listens on: host:port, [IPv6]:port, or a host name. Beyond loopback it "
                 "needs `token_file`, with 16 bytes or more, or `insecure`."),
    Setting(name="master", kind="list", default=(f"127.0.0.1:{MASTER_PORT}",),
            help="Where peers, `status` and `doctor` find the master; the first address that answers is used."),
    Setting(name="run", kind="text", default=DEFAULT_RUN,
            help="The name of the run to join or to show (letters, digits, `.`, `_` and `-`, at most 64). A master "
                 "serves several runs."),
    Setting(name="max_runs", kind="integer", default=256, low=1, high=65_536,
            help="How many runs a master serves, including those that have ended and are not forgotten. "
                 "Set at the master."),
    Setting(name="token_file", kind="file", default=None,
            help="File with the join token of the run. Peers prove that they have it; it is never sent or shown."),
    Setting(name="insecure", kind="switch", default=False,
            help="Listen beyond loopback without a token. Any host that reaches the port can then join the run."),
    Setting(name="heartbeat_ms", kind="integer", default=250, low=10, high=60_000,
            help="Interval of heartbeats between master and peers. Set at the master, which sends it to all peers."),
    Setting(name="suspect_after_ms", kind="integer", default=1_000, low=20, high=600_000,
            help="Silence after which a peer is suspected. Set at the master."),
    Setting(name="evict_after_ms", kind="integer", default=5_000, low=50, high=3_600_000,
            help="Silence after which a peer is evicted; the run goes on without it. Set at the master."),
    Setting(name="op_timeout_s", kind="number", default=300.0, low=0.001, high=86_400.0,
            help="How long one attempt of an op, or a run-wide call, may take. Then the peers that are absent from it "
                 "are evicted, and it goes on without them; it raises an error if no peer is absent, or if the call "
                 "has a timeout_s of its own."),
    Setting(name="stall_timeout_s", kind="number", default="auto", low=0.1, high=86_400.0, words=("auto", "off"),
            help="How long all other peers wait in an op, a vote or a sync for a minority before it is evicted. "
                 "auto: five times the usual duration of the call, at least 60 s. Never above op_timeout_s (the "
                 "master's). Set at the master."),
    Setting(name="sigterm_grace_s", kind="number", default=20.0, low=0.0, high=86_400.0,
            help="How long a step of `run.steps` may still take after SIGTERM before it is aborted, and the peer "
                 "leaves."),
    Setting(name="join_timeout_s", kind="number", default=60.0, low=0.001, high=86_400.0,
            help="How long joining tries to reach the master, and then waits to be admitted while the run makes no "
                 "progress. While members' ops go on, and no step takes more than twice as long as the longest "
                 "before, it waits without limit."),
    Setting(name="master_patience_s", kind="number", default=60.0, low=0.001, high=86_400.0,
            help="How long a peer tries to reach the master, or another one of its list, after it lost its master. "
                 "Ops go on meanwhile as far as they need no master."),
    Setting(name="resume_wait_s", kind="number", default=60.0, low=0.0, high=86_400.0,
            help="How long a run whose peers were all lost waits for the members of its last sync, by name, before it "
                 "continues from a checkpoint: they may have a newer one. Set at the master."),
    Setting(name="journal", kind="file", default=None,
            help="File of the master's journal (SQLite), from which a restarted master continues its run. Without this "
                 "setting it is in ~/.local/state/ringfold, one file for each machine, address and port; a master on "
                 "port 0 has none. A master that is stopped (SIGTERM, Ctrl-C) ends its run and closes this journal."),
    Setting(name="no_journal", kind="switch", default=False,
            help="Write no journal: the run ends when the master ends."),
    Setting(name="store", kind="text", default="",
            help="Address of the store for the journal, instead of a file: several masters on one store stand by for "
                 "each other, and one that is stopped hands the run over. sqlite:///path on one machine, "
                 "etcd://host:port across machines; with ?prefix=NAME, masters of different clusters share a store."),
    Setting(name="lease_s", kind="number", default=3.0, low=0.5, high=60.0,
            help="How long a leading master may be unreachable before another one on its store takes over."),
    Setting(name="events_dir", kind="file", default=None,
            help="Directory in which this process records its events: those of a run's master and peers together are a "
                 "run directory, which `ringfold report`, `trace` and `replay` read."),
    Setting(name="events_mb", kind="integer", default=1_024, low=1, high=1_048_576,
            help="How large the record of one process may be. When it grows beyond that, its oldest part is deleted."),
    Setting(name="flight", kind="switch", default=True,
            help="Write flight records: the last events and ops of a peer that was evicted or failed, and the last "
                 "events of a master that evicted one."),
    Setting(name="flight_dir", kind="file", default=None,
            help="Directory of flight records. Without this setting it is `flight` beside the journals, in "
                 "~/.local/state/ringfold. The newest 32 are kept."),
    Setting(name="data_port", kind="integer", default=DATA_PORT, low=1, high=65_535,
            help="First data port that a peer tries; it takes the next free one above."),
    Setting(name="lanes", kind="integer", default=1, low=1, high=64,
            help="Connections per path. Paths with a large bandwidth-delay product need several. Set at the master."),
    Setting(name="evidence", kind="text", default="auto", choices=("auto", "ring", "master"),
            help="How peers learn that an op is done everywhere: around the ring, through the master, or by the "
                 "size of the group (master: above 16 members, above 8 without direct lanes). Set at the master."),
    Setting(name="direct_lanes", kind="switch", default=True,
            help="In groups of 4 to 16, members that are no neighbours in the ring connect, too, and tell each other "
                 "directly that an op is done; not with several lanes or paths. Set at the master."),
    Setting(name="hierarchical", kind="switch", default=True,
            help="Where all hosts have the same number of members, two or more, ops are reduced inside each host "
                 "first, then between hosts. Set at the master."),
    Setting(name="small_bytes", kind="integer", default=16 * 1024, low=0, high=1024 * 1024,
            help="Ops up to this size (in groups of 2 to 4 up to 4 times it) are sent whole inside Done. "
                 "Set at the master."),
    Setting(name="segment_bytes", kind="integer", default=1024 * 1024, low=4 * 1024, high=64 * 1024 * 1024,
            help="The part of a chunk that is sent and reduced at once. Set at the master."),
    Setting(name="stale_s", kind="integer", default=600, low=0, high=86_400,
            help="How old a link's measured rate may be before `optimize_topology` measures it again. "
                 "Set at the master."),
    Setting(name="probe", kind="text", default="auto", choices=("auto", "on", "off", "listen"),
            help="Whether this peer measures links and clocks with UDP probes; auto: on a machine with 8 usable cores "
                 "or more; listen: it responds to probes and has the clock, but sends no probes."),
    Setting(name="probe_kind", kind="text", default="master", choices=("master", "time", "local"),
            help="What ends a window of probing: the master, the clock of each node, or each node on its own (nothing "
                 "is combined then). Set at the master."),
    Setting(name="probe_neighbours", kind="integer", default=4, low=1, high=64,
            help="How many neighbours each node probes. Set at the master."),
    Setting(name="probe_seed", kind="integer", default=0, low=0, high=2**63 - 1,
            help="Another seed draws another probe graph of the same nodes. Set at the master."),
    Setting(name="probe_graph", kind="file", default=None,
            help="TOML file whose table [graph] lists for each node, by name, the nodes that it probes; then nothing "
                 "is drawn, and a node without a list only responds. Set at the master."),
    Setting(name="probe_density", kind="text", default="default", choices=("default", "dense"),
            help="How often pairs are sent: default is a pause of 3,000 us between pairs, dense one of 800 us. "
                 "`probe_gap_us` and `probe_pause_us` take precedence. Set at the master."),
    Setting(name="probe_gap_us", kind="integer", default=800, low=50, high=10_000,
            help="The spacing of the two packets of a probe pair. Set at the master."),
    Setting(name="probe_gap_max_us", kind="integer", default=800, low=50, high=10_000,
            help="While `probe_adapt` is on, the spacing inside a pair grows up to this when probing gets slower; not "
                 "above `probe_gap_us`: it stays. Set at the master."),
    Setting(name="probe_pause_us", kind="integer", default=3_000, low=150, high=10_000_000,
            help="The pause between two pairs. Set at the master, which changes it while `probe_adapt` is on."),
    Setting(name="probe_window_ms", kind="integer", default=4_000, low=100, high=600_000,
            help="How long a window of probing is. Set at the master, which changes it while `probe_adapt` is on."),
    Setting(name="probe_adapt", kind="switch", default=True,
            help="Probe slower while clocks and delays are steady, and faster when they are not. Set at the master."),
    Setting(name="probe_stable_ns", kind="integer", default=200, low=0, high=1_000_000_000,
            help="Residuals under this for some rounds: probe slower. Set at the master."),
    Setting(name="probe_unstable_ns", kind="integer", default=2_000, low=1, high=1_000_000_000,
            help="A residual over this: probe faster; from `probe_stable_ns` to this: no change. Set at the master."),
    Setting(name="probe_combine", kind="switch", default=True,
            help="Combine the lines of several windows of an edge, with a known error. Set at the master."),
    Setting(name="probe_anomaly_us", kind="number", default=100.0, low=0.001, high=1e9,
            help="A residual over this ends a round early. Set at the master."),
    Setting(name="probe_report_floor_ms", kind="integer", default=25, low=1, high=600_000,
            help="How long a round waits for reports at least, however fast they usually are. Set at the master."),
    Setting(name="probe_report_timeout_ms", kind="integer", default=1_000, low=1, high=600_000,
            help="How long a round waits for reports at most. Set at the master."),
    Setting(name="probe_max_missed", kind="integer", default=3, low=1, high=1_000_000,
            help="A node that misses so many rounds in a row is out of the graph until it reports again. Set at the "
                 "master."),
    Setting(name="probe_log_fits", kind="switch", default=False,
            help="Log alpha and beta of every edge in every window: at the master those of all nodes, at a process "
                 "that only probes its own."),
    Setting(name="probe_export", kind="file", default=None,
            help="Directory for the JSON lines of probing: a node's windows, and at the master the rounds of the run."),
    Setting(name="spin_us", kind="integer", default=300, low=0, high=1_000_000,
            help="How long a waiting op polls its lanes before it sleeps in the kernel."),
    Setting(name="threads", kind="integer", default="auto", low=1, high=16, words=("auto",),
            help="How many threads move and reduce the data of this peer's ops, that of the caller among them. auto: "
                 "the cores that it may use, shared by the peers of its host, at most 4. All members have as many as "
                 "the one with the fewest."),
    Setting(name="transport", kind="text", default="auto", choices=("auto", "tcp"),
            help="What carries lanes. auto: shared memory between peers of one host that can reach each other there, "
                 "TCP otherwise. tcp: always TCP."),
    Setting(name="guardian", kind="switch", default=True,
            help="Whether each peer has a guardian: a process of about 100 KB that reports the peer's death to the "
                 "master at once, while the kernel still frees the peer's memory."),
    Setting(name="congestion", kind="text", default="auto",
            help="Congestion control of lanes: auto (see the guide \"far apart\"), host (the host's own), or a name."),
    Setting(name="name", kind="text", default="",
            help="This peer's name in logs and `status`; empty: its host name and process id."),
    Setting(name="advertise", kind="list", default=(),
            help="Addresses at which other peers reach this one. Several are paths that are used at the same time: "
                 "list them in the same order on every host. Empty: the address of its connection to the master."),
    Setting(name="agent", kind="text", default="auto", choices=("auto", "off"),
            help="Whether peers with several paths use the advice of the host's agent: auto (if there is one), off."),
    Setting(name="agent_dir", kind="file", default=None,
            help="The runtime directory of this host's transport agent, with its socket and its hints; not set: "
                 "/run/ringfold for the agent of root, and a private one for that of another user. Peers check both."),
    Setting(name="agent_policy", kind="text", default="auto",
            help="How the agent splits flows over their paths: auto (it follows congestion and measured rates), or "
                 "static:SHARE (of the second of two paths) or static:SHARE,SHARE,... Set at the agent."),
    Setting(name="agent_interval_ms", kind="number", default=1.0, low=0.1, high=1_000.0,
            help="How often the agent decides about a flow while it has new information, reads an interface that is "
                 "busy, and reports its queue. Set at the agent."),
    Setting(name="agent_gain", kind="number", default=2.0, low=0.01, high=20.0,
            help="How strongly shares follow differences of congestion: the exponent of a full difference. Above 3 "
                 "shares may oscillate. Set at the agent."),
    Setting(name="agent_backpressure", kind="integer", default=240, low=34, high=255,
            help="The congestion (0 to 255) at which a path is disabled at once. Set at the agent."),
    Setting(name="agent_release", kind="integer", default=160, low=33, high=254,
            help="The congestion below which a disabled path is used again. Set at the agent."),
    Setting(name="agent_stale_ms", kind="integer", default=1_000, low=1, high=600_000,
            help="After how long a queue that is not reported again is unknown. Set at the agent."),
    Setting(name="agent_smoothing_ms", kind="number", default=4.0, low=0.1, high=10_000.0,
            help="Time constant with which the agent smooths congestion; at least half of its age. Set at the agent."),
    Setting(name="agent_rate_smoothing_ms", kind="number", default=100.0, low=0.1, high=60_000.0,
            help="Time constant with which the agent smooths measured rates. Set at the agent."),
    Setting(name="agent_requests_per_hint", kind="integer", default=1, low=1, high=65_536,
            help="How many requests of a flow share one read of its hint, in transports that use the C header and do "
                 "not choose it themselves. Peers read at every segment. Set at the agent."),
    Setting(name="agent_telemetry", kind="list", default=(f"127.0.0.1:{TELEMETRY_PORT}",),
            help="UDP addresses at which the agent receives telemetry. Beyond loopback it needs agent_allow or "
                 "agent_key_file. Set at the agent."),
    Setting(name="agent_allow", kind="list", default=(),
            help="Addresses or networks (10.0.0.0/8) whose telemetry the agent accepts; empty: with keys all, "
                 "without keys only this host. Set at the agent."),
    Setting(name="agent_key_file", kind="file", default=None,
            help="File with the key that telemetry must be signed with. Set at the agent."),
    Setting(name="agent_feeds", kind="list", default=(),
            help="Other feeds of telemetry, each ADAPTER=WHERE, as in json=unix:/run/collector.sock. "
                 "Set at the agent."),
    Setting(name="agent_report_to", kind="list", default=(),
            help="UDP addresses to which the agent reports its flows and queues. Set at the agent."),
    Setting(name="agent_user_flows", kind="integer", default=16_384, low=1, high=1_000_000,
            help="How many flows one user may register. Set at the agent."),
    Setting(name="metrics_listen", kind="list", default=(),
            help="Addresses at which the master serves metrics for Prometheus, such as 127.0.0.1:48146. Beyond "
                 "loopback it needs `token_file`, or `insecure`. Set at the master."),
    Setting(name="metrics_port", kind="integer", default=0, low=0, high=65_535,
            help="First port that a peer tries for its metrics for Prometheus; it takes the next free one above. "
                 "0: it serves none, and the master has its most important ones."),
    Setting(name="metrics_host", kind="text", default="127.0.0.1",
            help="The address at which a peer serves its metrics. Beyond loopback it needs a token, or `insecure`."),
    Setting(name="agent_metrics", kind="list", default=(),
            help="Addresses at which the agent serves metrics for Prometheus, such as 127.0.0.1:48145. Beyond "
                 "loopback it needs `token_file`, or `insecure`. Set at the agent."),
    Setting(name="dashboard", kind="switch", default=False,
            help="Start a dashboard beside the master: a web page that shows its runs, in a process of its own. Needs "
                 "the extra `dashboard`. Set at the master."),
    Setting(name="dashboard_listen", kind="text", default="",
            help="Address of the dashboard, host:port; empty: port 48150 of loopback, or the next free one. Beyond "
                 "loopback it needs `token_file`."),
    Setting(name="log_level", kind="text", default="info", choices=("debug", "info", "warning", "error"),
            help="What commands log to standard error."),
    Setting(name="log_json", kind="switch", default=False, help="Log JSON lines instead of text."),
)  # fmt: skip
SETTINGS: Mapping[str, Setting] = {setting.name: setting for setting in _SETTINGS}


@dataclass(frozen=True, slots=True)
class Resolved:
    """Every setting's value and its origin. The accessors are typed; the wrong accessor asserts."""

    values: Mapping[str, Value]
    origins: Mapping[str, str]
    file: Path | None = None
    warnings: tuple[str, ...] = field(default=())

    def value(self, name: str) -> Value:
        return self.values[name]

    def origin(self, name: str) -> str:
        """ "argument", "environment RINGFOLD_X", the TOML file's path with the line, or "default"."""
        return self.origins[name]

    def is_set(self, name: str) -> bool:
        """Whether it was given, and is not the default."""
        return self.origins[name] != "default"

    def text(self, name: str) -> str:
        value = self.values[name]
        assert isinstance(value, str), name
        return value

    def integer(self, name: str) -> int:
        value = self.values[name]
        assert isinstance(value, int), name
        return value

    def number(self, name: str) -> float:
        value = self.values[name]
        assert isinstance(value, int | float), name
        return float(value)

    def switch(self, name: str) -> bool:
        value = self.values[name]
        assert isinstance(value, bool), name
        return value

    def listed(self, name: str) -> tuple[str, ...]:
        value = self.values[name]
        assert isinstance(value, tuple), name
        return value

    def named_run(self) -> str:
        """The run, if one was named; empty if not."""
        return "" if self.origins["run"] == "default" else check_run_name(self.text("run"))

    def token(self) -> bytes:
        """The join token; empty when no token file is set."""
        path = self.values["token_file"]
        assert path is None or isinstance(path, Path)
        return b"" if path is None else read_token(path)


def load(
    arguments: Mapping[str, object] | None = None,
    *,
    environment: Mapping[str, str] | None = None,
    directory: Path | None = None,
    home: Path | None = None,
) -> Resolved:
    """Resolve every setting. Arguments that are None count as not given; `config` names the TOML file.

    The last three default to the environment, the working directory and the home of this process.
    """
    given = {name: raw for name, raw in (arguments or {}).items() if raw is not None}
    environment = os.environ if environment is None else environment
    file = _file(given.pop("config", None) or environment.get("RINGFOLD_CONFIG"), directory, home)
    _refuse_unknown(given, "argument")
    lines = _read(file) if file else {}
    values: dict[str, Value] = {}
    origins: dict[str, str] = {}
    for name, setting in SETTINGS.items():
        if name in given:
            raw, origin = given[name], "argument"
        elif environment.get(setting.env):
            raw, origin = environment[setting.env], f"environment {setting.env}"
        elif name in lines:
            raw, origin = lines[name].raw, f"{file}:{lines[name].line}"
        else:
            raw, origin = setting.default, "default"
        try:
            values[name] = setting.check(raw)
        except ConfigError as error:
            raise ConfigError(f"{origin}: {error}") from None
        origins[name] = origin
    _check_together(values)
    return Resolved(values, origins, file, _unknown_variables(environment))


@dataclass(frozen=True, slots=True)
class _Line:
    """A TOML value, and its line for messages (0 if the key was not found)."""

    raw: object
    line: int


def _file(named: object, directory: Path | None, home: Path | None) -> Path | None:
    if named:
        path = Path(str(named)).expanduser()
        if not path.is_file():
            raise ConfigError(f"there is no settings file {path}")
        return path
    candidates = [(directory or Path.cwd()) / "ringfold.toml"]
    home = home or Path(os.path.expanduser("~"))
    candidates.append(home / ".config" / "ringfold.toml")
    return next((path for path in candidates if path.is_file()), None)


def _read(file: Path) -> dict[str, _Line]:
    """The settings in a TOML file, each with its line. An unknown key is refused, with a suggestion."""
    try:
        text = file.read_text(encoding="utf-8")
        tree = tomllib.loads(text)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {file}: {error}") from None
    except tomllib.TOMLDecodeError as error:
        place = re.search(r" \(at line (\d+), column (\d+)\)", str(error))
        where = f"{file}:{place[1]}:{place[2]}" if place else str(file)
        what = str(error).replace(place[0], "") if place else str(error)
        raise ConfigError(f"{where}: not TOML: {what}") from None
    found: dict[str, _Line] = {}
    for key, raw in tree.items():
        line = _line_of(text, key)
        _refuse_unknown([key], f"setting in {file}:{line}:")
        found[key] = _Line(_beside(file, raw) if SETTINGS[key].kind == "file" else raw, line)
    return found


def _beside(file: Path, raw: object) -> object:
    """A relative path in a settings file is relative to that file, not to the working directory."""
    return file.absolute().parent / Path(raw).expanduser() if isinstance(raw, str) and raw else raw


def _line_of(text: str, key: str) -> int:
    pattern = re.compile(rf"""^\s*\[*["']?{re.escape(key)}["']?\s*[\].=]""")
    return next((number for number, line in enumerate(text.splitlines(), 1) if pattern.match(line)), 0)


def _refuse_unknown(names: Iterable[str], what: str) -> None:
    for name in names:
        if name not in SETTINGS:
            raise ConfigError(f"unknown {what} {name!r}{_suggestion(name)}")


def _suggestion(name: str) -> str:
    near = difflib.get_close_matches(name.lower().replace("-", "_"), SETTINGS, n=1)
    return f"; did you mean {near[0]!r}?" if near else "; see `ringfold config` for all settings"


GIVEN = frozenset(f"RINGFOLD_{name}" for name in ("ITERATION", "RANK", "WORLD", "MEMBERS", "MISSED", "FENCE"))
"""Not settings: variables that `ringfold iterate` sets for its command."""


def _unknown_variables(environment: Mapping[str, str]) -> tuple[str, ...]:
    """Warnings about variables that look like settings and are not. Not refused: other tools may share the prefix."""
    known = {setting.env for setting in SETTINGS.values()} | {"RINGFOLD_CONFIG"} | GIVEN
    unknown = sorted(key for key in environment if key.startswith("RINGFOLD_") and key not in known)
    return tuple(
        f"environment variable {key} is not a setting{_suggestion(key.removeprefix('RINGFOLD_'))}" for key in unknown
    )


def _check_together(values: Mapping[str, Value]) -> None:
    heartbeat, suspect, evict = (values[name] for name in ("heartbeat_ms", "suspect_after_ms", "evict_after_ms"))
    assert isinstance(heartbeat, int)
    assert isinstance(suspect, int)
    assert isinstance(evict, int)
    if not heartbeat < suspect < evict:
        raise ConfigError(
            f"need heartbeat_ms < suspect_after_ms < evict_after_ms, but they are {heartbeat}, {suspect} and {evict}"
        )
    stable, unstable, window = (values[name] for name in ("probe_stable_ns", "probe_unstable_ns", "probe_window_ms"))
    assert isinstance(stable, int)
    assert isinstance(unstable, int)
    assert isinstance(window, int)
    if not stable < unstable:
        raise ConfigError(f"need probe_stable_ns < probe_unstable_ns, but they are {stable} and {unstable}")
    floor, timeout = (values[name] for name in ("probe_report_floor_ms", "probe_report_timeout_ms"))
    assert isinstance(floor, int)
    assert isinstance(timeout, int)
    if floor > timeout:
        raise ConfigError(f"need probe_report_floor_ms <= probe_report_timeout_ms, but they are {floor} and {timeout}")
    if values["probe_kind"] == "time" and window <= 1_000:
        raise ConfigError(f"rounds of kind time need a probe_window_ms above 1000, not {window}")


def agent_directories(chosen: Path | None, environment: Mapping[str, str] | None = None) -> tuple[Path, ...]:
    """The directories in which this host's agent may be, in this order; a new agent uses the first."""
    if chosen is not None:
        return (chosen,)
    environment = os.environ if environment is None else environment
    shared, uid = Path("/run/ringfold"), os.geteuid()
    if uid == 0:
        return (shared,)
    session = environment.get("XDG_RUNTIME_DIR")
    return Path(session) / "ringfold" if session else Path(f"/tmp/ringfold-{uid}"), shared


def rendezvous_directory(environment: Mapping[str, str] | None = None) -> Path:
    """The directory in which processes of this user on this host find a master that one of them hosts."""
    environment = os.environ if environment is None else environment
    session = environment.get("XDG_RUNTIME_DIR", "")
    return Path(session) / "ringfold-hosts" if session.startswith("/") else Path(f"/tmp/ringfold-hosts-{os.geteuid()}")


def read_token(path: Path) -> bytes:
    """The token in `path`, without surrounding white space. Warns if other users may read the file."""
    try:
        token = path.read_bytes().strip()
        mode = path.stat().st_mode
    except OSError as error:
        raise ConfigError(f"cannot read the token file {path}: {error.strerror or error}") from None
    if not token:
        raise ConfigError(f"the token file {path} is empty")
    if mode & stat.S_IROTH:
        _log.warning("all users of this machine can read the token file %s: chmod 600 it", path)
    return token


def read_keys(path: Path) -> dict[int, bytes]:
    """Keys by their ids: lines of `ID KEY`, or one line with a key, whose id is 0. Empty lines and # are skipped.

    A file that its group or other users can read or write is refused: the key gives control over shares.
    """
    try:
        mode = path.stat().st_mode
    except OSError as error:
        raise ConfigError(f"cannot read the key file {path}: {error.strerror or error}") from None
    if mode & (stat.S_IRGRP | stat.S_IWGRP | stat.S_IROTH | stat.S_IWOTH):
        raise ConfigError(f"other users can read or write the key file {path}: chmod 600 it")
    text = read_token(path).decode("utf-8", "surrogateescape")
    lines = [line.split() for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")]
    if len(lines) == 1 and len(lines[0]) == 1:
        lines = [["0", *lines[0]]]
    keys: dict[int, bytes] = {}
    for words in lines:
        if len(words) != 2 or not words[0].isdecimal() or int(words[0]) > 255 or int(words[0]) in keys:
            raise ConfigError(f"the key file {path} has lines of `ID KEY`, and each id (0 to 255) once")
        keys[int(words[0])] = words[1].encode("utf-8", "surrogateescape")
    if not keys:
        raise ConfigError(f"the key file {path} has no key: packets would be neither signed nor checked")
    return keys


MIN_TOKEN_BYTES = 16
"""128 bits. An attacker that records one handshake can guess a shorter token offline."""
GIVE_TOKEN = "set RINGFOLD_TOKEN_FILE, pass token_file=, or --token-file to a command"
MAKE_TOKEN = "(umask 077; python3 -c 'import secrets; print(secrets.token_hex(32))' > run.token)"


def check_exposure(host: str, token: bytes, *, insecure: bool) -> None:
    """Refuse an address that other machines can reach without a long enough token, unless `insecure` is set."""
    if insecure or is_loopback(host) or len(token) >= MIN_TOKEN_BYTES:
        return
    has = f"and the token has {len(token)} bytes, fewer than {MIN_TOKEN_BYTES}" if token else "and there is no token"
    raise ConfigError(
        f"{host} can be reached from other machines, {has}: make one with {MAKE_TOKEN}, copy it to all machines, and "
        "pass it (--token-file run.token, or RINGFOLD_TOKEN_FILE); or set insecure"
    )


def split_address(text: str, default_port: int = MASTER_PORT) -> tuple[str, int]:
    """Host and port of `host`, `host:port`, an IPv4 or IPv6 literal, or `[IPv6]:port`."""
    host, port = text.strip(), ""
    if match := re.fullmatch(r"\[([^\]]+)\](?::(.*))?", host):
        host, port = match[1], match[2] or ""
    elif host.count(":") == 1:
        host, port = host.split(":")
    if not host or any(letter in host for letter in "[] \t/"):
        raise ConfigError(f"{text!r} is not an address; write host:port, or [IPv6]:port")
    if not port:
        return host, default_port
    if not port.isascii() or not port.isdigit() or not 0 <= int(port) <= 65_535:
        raise ConfigError(f"{text!r} has no valid port (0 to 65535)")
    return host, int(port)


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach `host`. A host name other than localhost counts as reachable by others."""
    try:
        return ipaddress.ip_address(host.split("%")[0]).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def check_run_name(name: str) -> str:
    """The checked name of a run; empty means the default one. Raises ConfigError if it is not a valid name."""
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", name or DEFAULT_RUN):
        rule = "up to 64 letters, digits, dots, underscores and hyphens, of which the first is a letter or a digit"
        raise ConfigError(f"{name!r} is not a valid name of a run: use {rule}")
    return name or DEFAULT_RUN


def flight_directory(settings: "Resolved") -> Path | None:
    """The directory of flight records; None if none are to be written."""
    if not settings.switch("flight"):
        return None
    chosen = settings.value("flight_dir")
    return chosen if isinstance(chosen, Path) else state_directory() / "flight"


def run_directory(settings: "Resolved", run: str) -> Path | None:
    """The directory of a run's records: one of its own, below `events_dir`, unless it is the default run."""
    chosen = settings.value("events_dir")
    if not isinstance(chosen, Path):
        return None
    return chosen if run == DEFAULT_RUN else chosen / run


def state_directory() -> Path:
    """The directory for persistent state of this user: $XDG_STATE_HOME/ringfold, or ~/.local/state/ringfold."""
    base = os.environ.get("XDG_STATE_HOME", "")
    return (Path(base) if base.startswith("/") else Path.home() / ".local" / "state") / "ringfold"
