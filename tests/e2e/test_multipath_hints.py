"""Two hosts with two paths, and an agent on one of them: a switch's telemetry decides where segments go."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from ringfold.agent.client import AgentConsole
from ringfold.runtime.clock import monotonic_ns
from ringfold.tools import lab as labs
from ringfold.tools.bench import multipath
from ringfold.tools.bench.multipath import send_congestion, start_lab_agent
from ringfold.tools.cluster import LocalCluster
from ringfold.tools.lab import Lab
from ringfold.wire.agent import HINTS_NAME, SOCKET_NAME, ListedFlow

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
