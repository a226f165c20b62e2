"""The settings of an agent's decisions change its decisions, and contradictions are refused."""

from pathlib import Path

import pytest

from ringfold.agent.effects import PublishAdvice, SendMessage
from ringfold.agent.events import ConnectionOpened, DatagramReceived, Event, MessageReceived, Tick
from ringfold.agent.machine import AgentIdentity, AgentMachine
from ringfold.agent.monitors import NicWatch
from ringfold.agent.policy import Policy
from ringfold.agent.registry import Registry
from ringfold.agent.steering import Steering
from ringfold.agent.telemetry import QueueTable, TelemetryIngest
from ringfold.agent.tuning import AgentTuning
from ringfold.cli.agent import _settings
from ringfold.config import load
from ringfold.errors import ConfigError
from ringfold.wire.agent import AGENT_PROTOCOL, AgentHello, AgentStatus, AgentWelcome, AskAgent, Flow, Register
from ringfold.wire.telemetry import Congestion, Gate, GateSettings, Packet, address_number, encode

MS = 1_000_000
PATHS = (("10.0.0.1", "10.0.0.2"), ("10.1.0.1", "10.1.0.2"))


class Host:
    """An agent with these settings, and one flow."""

    def __init__(self, tuning: AgentTuning) -> None:
        ingest = TelemetryIngest(Gate(GateSettings(allow=("any",))), QueueTable(tuning.telemetry()))
        steering = Steering(
            None,
            ingest,
            Policy(tuning.policy()),
            interval_ns=tuning.interval_ns,
            backpressure=tuning.backpressure,
        )
        me = AgentIdentity(pid=1, uid=500, generation=3, hints="", started_ns=0)
        self.machine = AgentMachine(me, Registry([0] * 8), steering, tuning)
        self.now = 0
        self.sequence = 0
        self.step(ConnectionOpened(1, 500, 7))
        [self.welcome] = self.step(MessageReceived(1, AgentHello(AGENT_PROTOCOL, "job")))
        self.step(MessageReceived(1, Register(1, Flow(1, "10.0.0.1", "10.0.0.2", PATHS))))

    def step(self, event: Event) -> list[object]:
        return list(self.machine.step(self.now, event))

    def congested(self, *levels: int) -> list[PublishAdvice]:
        """What is published while path 0 is clear, and path 1 is reported with these levels, one a millisecond."""
        published: list[object] = []
        for level in levels:
            self.now += MS
            for path, congestion in enumerate((0, level)):
                self.sequence += 1
                source, destination = map(address_number, PATHS[path])
                content = encode(
                    Packet(Congestion(source, destination, path, congestion, 9), self.sequence, 10**18 + self.now)
                )
                published += self.step(DatagramReceived(10**18 + self.now, content, "10.0.0.9"))
            published += self.step(Tick())
        return [each for each in published if isinstance(each, PublishAdvice)]


def test_a_higher_gain_moves_more_of_the_bytes() -> None:
    shares = [Host(AgentTuning(gain=gain)).congested(*[150] * 20)[-1].shares[1] for gain in (0.5, 2.0, 4.0)]
    assert shares[0] > shares[1] > shares[2]


def test_the_threshold_decides_when_a_path_is_disabled() -> None:
    assert Host(AgentTuning()).congested(200)[-1].backpressure == 0
    assert Host(AgentTuning(backpressure=200)).congested(200)[-1].backpressure == 2


def test_more_smoothing_follows_later() -> None:
    def share_after_a_change(smoothing_ms: float) -> int:
        host = Host(AgentTuning(smoothing_ms=smoothing_ms))
        host.congested(*[40] * 20)
        return host.congested(*[200] * 5)[-1].shares[1]

    assert share_after_a_change(1.0) < share_after_a_change(50.0)


def test_a_longer_interval_decides_less_often() -> None:
    levels = [50, 200] * 25
    often, seldom = (len(Host(AgentTuning(interval_ms=ms)).congested(*levels)) for ms in (1.0, 10.0))
    assert 0 < seldom < often / 3


@pytest.mark.parametrize(("stale_ms", "is_known"), [(100, False), (10_000, True)])
def test_staleness_decides_how_long_a_queue_is_known(stale_ms: int, is_known: bool) -> None:
    table = TelemetryIngest(table=QueueTable(AgentTuning(stale_ms=stale_ms).telemetry())).table
    source, destination = map(address_number, PATHS[1])
    table.add_observation(0, 10**18, Congestion(source, destination, 1, 150, 9), 10**18)
    assert (table.reading(500 * MS, source, destination, 1) is not None) is is_known


def test_a_busy_interface_is_read_at_the_interval() -> None:
    watch = NicWatch((), 7 * MS)
    assert watch.next_ns(0) == 7 * MS
    watch.close()


def test_clients_and_the_status_get_the_settings() -> None:
    host = Host(AgentTuning(requests_per_hint=16, gain=3.0))
    assert isinstance(host.welcome, SendMessage)
    assert host.welcome.message == AgentWelcome(AGENT_PROTOCOL, 3, 16)
    [sent] = host.step(MessageReceived(1, AskAgent(2)))
    assert isinstance(sent, SendMessage)
    assert isinstance(sent.message, AgentStatus)
    assert (sent.message.tuning["gain"], sent.message.tuning["requests_per_hint"]) == (3.0, 16)


@pytest.mark.parametrize(
    "wrong",
    [
        {"release": 240},
        {"release": 20},
        {"interval_ms": 0.0},
        {"requests_per_hint": 0},
        {"gain": -1.0},
        {"stale_ms": 0},
    ],
)
def test_settings_that_contradict_each_other_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ConfigError):
        AgentTuning(**wrong)  # type: ignore[arg-type]


def test_every_setting_is_set_by_its_name(tmp_path: Path) -> None:
    names = {f"agent_{name}": value for name, value in AgentTuning().shown().items()}
    changed = {**names, "agent_gain": 3.0, "agent_stale_ms": 5_000, "agent_release": 100, "agent_interval_ms": 2.0}
    file = tmp_path / "agent.toml"
    file.write_text("\n".join(f"{name} = {value}" for name, value in changed.items()))
    tuned = _settings(load({"config": file, "agent_dir": tmp_path}))
    assert tuned.tuning == AgentTuning(gain=3.0, stale_ms=5_000, release=100, interval_ms=2.0)
    assert tuned.reports.interval_ms == 2.0
