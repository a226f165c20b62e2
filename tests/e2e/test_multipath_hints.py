"""Two hosts with two paths, and an agent on one of them: a switch's telemetry decides where segments go."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from ringfold.agent.client import AgentConsole
from ringfold.config import TELEMETRY_PORT
from ringfold.runtime.clock import monotonic_ns, unix_ns
from ringfold.runtime.datagrams import DatagramSender
from ringfold.tools import lab as labs
from ringfold.tools.bench import multipath
from ringfold.tools.bench.multipath import send_congestion, start_lab_agent
from ringfold.tools.cluster import LocalCluster
from ringfold.tools.lab import Lab
from ringfold.wire.agent import HINTS_NAME, SOCKET_NAME, ListedFlow
from ringfold.wire.telemetry import Congestion, Packet, address_number, encode

pytestmark = pytest.mark.skipif(labs.missing() is not None, reason=str(labs.missing()))

SIZE = 1 << 20
WAIT_S = 30.0


def until(cluster: LocalCluster, holds: Callable[[], bool], what: str) -> None:
    deadline_ns = monotonic_ns() + int(WAIT_S * 1e9)
    while not holds():
        assert monotonic_ns() < deadline_ns, what
        cluster.pause(0.01)


@contextmanager
def two_hosts() -> Iterator[Lab]:
    paths = [labs.Path(name="path0", up=100.0), labs.Path(name="path1", up=50.0), labs.Path(name="control")]
    with Lab(hosts=2, paths=paths) as lab:
        yield lab


def flows(directory: Path) -> list[ListedFlow]:
    if not (directory / SOCKET_NAME).exists():
        return []
    with AgentConsole([directory]) as console:
        return console.flows()


def sent(cluster: LocalCluster) -> list[int]:
    """What the host with the agent sent on each path, in one op."""
    _, replies = multipath._op(cluster, SIZE)
    return list(replies["side-0"]["path_bytes"][:2])


def test_telemetry_takes_a_path_away_and_gives_it_back_and_a_dead_agent_costs_nothing(tmp_path: Path) -> None:
    directory = tmp_path / "agent"
    with two_hosts() as lab, LocalCluster() as agents:
        start_lab_agent(agents, "agent", lab, 0, directory)
        until(agents, lambda: (directory / HINTS_NAME).exists(), "the agent does not start")
        with multipath._peers(lab, 2, agents={0: directory}) as cluster:
            until(cluster, lambda: len(flows(directory)) == 1, "the flow is not registered")
            (flow,) = flows(directory)
            assert [flow.flow.source, flow.flow.destination] == [lab.address(host) for host in (0, 1)]
            assert all(sent(cluster))

            def are_timed() -> bool:
                sent(cluster)
                seen = flows(directory)[0]
                return all(seen.srtt_us) and all(seen.min_rtt_us) and all(seen.bytes_per_s)

            until(cluster, are_timed, "rates and RTTs of the paths do not reach the agent")

            def is_held() -> bool:
                send_congestion(lab, 0, path=1, congestion=255)
                return flows(directory)[0].backpressure == (False, True)

            until(cluster, is_held, "the agent does not receive from the switch")
            send_congestion(lab, 0, path=1, congestion=255)  # good for a second: longer than an op
            first, second = sent(cluster)
            assert (first > 0, second) == (True, 0)

            def is_used_again() -> bool:
                send_congestion(lab, 0, path=1, congestion=0)
                return sent(cluster)[1] > 0

            until(cluster, is_used_again, "a path that is clear again is not used")

            send_congestion(lab, 0, path=1, congestion=255)
            multipath._request(cluster, {"do": "op", "size_bytes": 4 * SIZE})
            agents.kill("agent")
            multipath._result(cluster)  # verified, and in the first attempt
            until(cluster, lambda: sent(cluster)[1] > 0, "the hints of a dead agent are still believed")


def test_a_share_that_is_fixed_by_hand_is_kept_until_it_is_auto_again(tmp_path: Path) -> None:
    """Half of the bytes over the slower path, although it has a third of the rate, also while a path is cut."""
    directory, size = tmp_path / "agent", 16 << 20

    def second_share(replies: Mapping[str, Mapping[str, Any]]) -> float:
        first, second = replies["side-0"]["path_bytes"][:2]
        return float(second / (first + second))

    with two_hosts() as lab, LocalCluster() as agents:
        start_lab_agent(agents, "agent", lab, 0, directory)
        until(agents, lambda: (directory / HINTS_NAME).exists(), "the agent does not start")
        with multipath._peers(lab, 2, agents={0: directory}) as cluster, AgentConsole([directory]) as console:
            until(cluster, lambda: len(flows(directory)) == 1, "the flow is not registered")
            (flow,) = flows(directory)
            console.set_shares(flow.flow.source, flow.flow.destination, (0.5, 0.5))
            (flow,) = flows(directory)
            assert (flow.is_fixed, flow.shares) == (True, (0.5, 0.5))
            assert second_share(multipath._op(cluster, size)[1]) == pytest.approx(0.5, rel=0.02)

            multipath._request(cluster, {"do": "op", "size_bytes": size})
            lab.cut(1)
            multipath._result(cluster)  # the other path takes over: verified, and in the first attempt
            lab.restore(1)
            until(
                cluster,
                lambda: second_share(multipath._op(cluster, size)[1]) == pytest.approx(0.5, rel=0.02),
                "the share does not bind again when the path is back",
            )

            console.set_shares(flow.flow.source, flow.flow.destination, ())
            until(cluster, lambda: not flows(directory)[0].is_fixed, "the share stays fixed")
            assert second_share(multipath._op(cluster, size)[1]) < 0.45


def send_to(lab: Lab, host: int, source: str, destination: str, *, path: int, congestion: int) -> None:
    """Send a host's agent a report about one pair, as a switch would."""
    now_ns = unix_ns()
    body = Congestion(address_number(source), address_number(destination), path, congestion)
    with lab.within(host), DatagramSender(lab.address(host, multipath.CONTROL), TELEMETRY_PORT) as sender:
        sender.send(encode(Packet(body, now_ns, now_ns), None))


def counts(directory: Path) -> dict[str, int]:
    with AgentConsole([directory]) as console:
        return console.status().counts


def test_a_receiver_that_hears_of_its_downlink_tells_the_sender(tmp_path: Path) -> None:
    """Only the sender can choose another path: the receiver's agent forwards the report to the sender's."""
    directories = [tmp_path / f"agent{host}" for host in range(2)]
    with two_hosts() as lab, LocalCluster() as agents:
        for host, directory in enumerate(directories):
            options = ["--no-nics", "--telemetry", f"0.0.0.0:{TELEMETRY_PORT}", "--allow", "10.0.0.0/8"]
            agents.start_agent(f"agent-{host}", directory, *options, inside=lab.inside(host), log_level="error")
        for directory in directories:
            until(agents, (directory / HINTS_NAME).exists, "an agent does not start")
        with multipath._peers(lab, 2, agents=dict(enumerate(directories))) as cluster:
            for directory in directories:
                until(cluster, lambda directory=directory: len(flows(directory)) == 1, "no flow is registered")  # type: ignore[misc]
            (flow,) = flows(directories[0])
            assert flow.flow.source_host
            assert flow.flow.destination_host
            sender, receiver = (lab.address(host, 1) for host in range(2))

            def is_held() -> bool:
                send_to(lab, 1, sender, receiver, path=1, congestion=255)
                return flows(directories[0])[0].backpressure == (False, True)

            until(cluster, is_held, "the sender's agent does not learn of the congestion")
            assert counts(directories[1])["telemetry forwarded"] > 0
            assert counts(directories[0])["telemetry for flows from here"] > 0

            def is_left() -> bool:
                send_to(lab, 1, sender, receiver, path=1, congestion=255)  # good for a second
                return sent(cluster)[1] == 0

            until(cluster, is_left, "the sender goes on using the path")
            send_to(lab, 1, sender, "192.0.2.1", path=1, congestion=255)
            until(cluster, lambda: "telemetry not for us" in counts(directories[1]), "a stray report is not counted")
