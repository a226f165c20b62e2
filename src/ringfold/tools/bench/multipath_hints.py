"""The part of `ringfold bench multipath` with real agents: what their hints are worth, and how soon they count.

- *cold start*: the first op of fresh connections, with unequal paths; the agents know the rates (a fixed share), the
  peers do not. `gain` is the time without hints over that with them.
- *switch*: a third host begins to fill the queue of one path inside the switch, where no sender can see it; the switch
  tells the agents (the lab's telemetry, every 5 ms). One op of one to four segments, or a larger one, 0.3 s after that.
- *backpressure*: in the middle of an op a telemetry packet says 255 for one path. `latency_ms` is how much later the
  last segment was given to that path, of the worst of several packets; `back_ms` how long after the packet that says
  0 the next one was.
- *steady*: ops without a pause, with the switch's real telemetry: how much the agent's share varies (`std`, of 1), with
  the bottleneck at the hosts and with it inside the switch, where the senders' own bytes fill the queues.
"""

import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from ringfold.agent.client import AgentConsole
from ringfold.runtime import threads
from ringfold.runtime.clock import monotonic_ns
from ringfold.tools import lab as labs
from ringfold.tools.bench.agents import send_congestion, start_agent
from ringfold.tools.bench.report import Row
from ringfold.tools.lab import Lab, Telemetry, TelemetrySender
from ringfold.tools.spawn import ChildFailed, Crew, Message
from ringfold.wire.agent import HINTS_NAME

NAMES = ("side-0", "side-1")
SEGMENT_BYTES = 16 << 10
COLD_RATES = (100.0, 10.0)
COLD_BYTES = (2 * SEGMENT_BYTES, 4 * SEGMENT_BYTES, 16 * SEGMENT_BYTES)
COLD_STARTS = 5
RATE = 40.0
CROSS_MBIT = 55.0
UNSEEN_ROUNDS = 5
FILL_S = 0.3
LOADS = ("load-0", "load-1")
SHORT_BURST, LONG_BURST = 3_200, 67_050
HELD_S, CLEAR_S = 0.2, 0.4
TELEMETRY_MS = 5.0
WATCHED_BYTES = 48 << 20
STEADY_BYTES = 4 << 20
SETTLED_S, SAMPLE_S = 5.0, 0.01
START_S, OP_S = 30.0, 90.0
S, MS = 1e9, 1e6


def measure(steady_s: float, packets: int) -> list[Row]:
    """All rows. Needs what a lab needs."""
    rows = list(_cold())
    rows += _unseen()
    rows.append(_backpressure(packets))
    rows += [_steady(steady_s, at_switch=at_switch) for at_switch in (False, True)]
    return rows


def _paths(rates: Sequence[float], *, at_switch: bool = False, burst_bytes: int = LONG_BURST) -> list[labs.Path]:
    shaped = []
    for number, rate in enumerate(rates):
        up, down = (None, rate) if at_switch else (rate, None)
        shaped.append(labs.Path(name=f"path{number}", up=up, down=down, burst_bytes=burst_bytes))
    return [*shaped, labs.Path(name="control")]


@contextmanager
def _advised(lab: Lab, *, agents: bool, policy: str = "auto") -> Iterator[tuple[Crew, list[Path]]]:
    """Two peers on two paths, each with an agent or both without, and ready: their flows have places."""
    from ringfold.tools.bench.multipath import _peers

    with tempfile.TemporaryDirectory(prefix="ringfold-bench-") as root, Crew() as daemons:
        directories = [Path(root) / f"agent{host}" for host in range(2)] if agents else []
        for host, directory in enumerate(directories):
            start_agent(daemons, f"agent-{host}", lab, host, directory, policy=policy)
        for directory in directories:
            _until(daemons, (directory / HINTS_NAME).exists, "an agent does not start")
        with _peers(lab, 2, small_bytes=0, agents=dict(enumerate(directories))) as crew:
            for directory in directories:
                _until(crew, partial(_has_flow, directory), "no flow is registered")
            yield crew, directories


def _until(crew: Crew, holds: Callable[[], bool], what: str) -> None:
    deadline_ns = monotonic_ns() + int(START_S * S)
    while not holds():
        if monotonic_ns() > deadline_ns:
            raise ChildFailed("agent", what)
        crew.pause(0.01)


def _has_flow(directory: Path) -> bool:
    return bool(_shares(directory))


def _shares(directory: Path) -> list[tuple[float, ...]]:
    """The shares of each flow of an agent."""
    with AgentConsole([directory]) as console:
        return [flow.shares for flow in console.flows()]


def _op(crew: Crew, size: int) -> float:
    """Microseconds of one verified op."""
    from ringfold.tools.bench.multipath import _op

    return _op(crew, size)[0] / 1_000


def _cold() -> Iterator[Row]:
    share = COLD_RATES[1] / sum(COLD_RATES)
    for size in COLD_BYTES:
        without = None
        for way in ("ringfold", "with hints"):
            took = []
            for _ in range(COLD_STARTS):
                with (
                    Lab(hosts=2, paths=_paths(COLD_RATES, burst_bytes=SHORT_BURST)) as lab,
                    _advised(lab, agents=way == "with hints", policy=f"static:{share:.4f}") as (crew, _),
                ):
                    took.append(_op(crew, size))
            median = statistics.median(took)
            row: Row = {"part": "cold start", "way": way, "size_bytes": size, "median_us": median}
            without = without or median
            yield row if way == "ringfold" else row | {"gain": without / median}


def _unseen() -> Iterator[Row]:
    """A third host begins to fill path 1 inside the switch, both ways; soon after, there is one op. Several times."""
    sizes = [segments * SEGMENT_BYTES for segments in (1, 2, 3, 4, 64)]
    without: dict[int, float] = {}
    for way in ("ringfold", "with hints"):
        took: dict[int, list[float]] = {size: [] for size in sizes}
        with (
            Lab(hosts=3, paths=_paths((RATE, RATE), at_switch=True, burst_bytes=SHORT_BURST)) as lab,
            _advised(lab, agents=way == "with hints") as (crew, _),
            TelemetrySender(lab, via="control") as tell,
            Telemetry(lab, tell, every_ms=TELEMETRY_MS),
            Crew() as others,
        ):
            traffic = [sys.executable, "-m", "ringfold.tools.lab.traffic"]
            for host in range(2):
                target = f"{lab.address(host, 1)}:9"
                others.start(f"sink-{host}", lab.inside(host, [*traffic, "receive", target]))
                load = ["udp", target, "--seconds", "600", "--mbit", str(CROSS_MBIT)]
                others.start(LOADS[host], lab.inside(2, [*traffic, *load]))
            others.pause(0.5)
            for size in sizes * UNSEEN_ROUNDS:
                for load_name in LOADS:
                    others.freeze(load_name)
                others.pause(CLEAR_S)
                for _ in range(3):  # both paths are seen to be good
                    _op(crew, 16 * SEGMENT_BYTES)
                for load_name in LOADS:
                    others.thaw(load_name)
                others.pause(FILL_S)
                took[size].append(_op(crew, size))
        for size, times in took.items():
            median = statistics.median(times)
            row: Row = {"part": "switch", "way": way, "size_bytes": size, "median_us": median}
            gain = without.setdefault(size, median) / median
            yield row if way == "ringfold" else row | {"gain": gain}


def _backpressure(packets: int) -> Row:
    with Lab(hosts=2, paths=_paths((RATE, RATE))) as lab, _advised(lab, agents=True) as (crew, _):
        crew.send(NAMES, {"do": "watch", "size_bytes": WATCHED_BYTES})
        crew.gather(NAMES, OP_S)
        crew.pause(CLEAR_S)
        said: list[tuple[int, int]] = []
        for _ in range(packets):
            held_ns = monotonic_ns()
            send_congestion(lab, 0, path=1, congestion=255)
            crew.pause(HELD_S)
            clear_ns = monotonic_ns()
            send_congestion(lab, 0, path=1, congestion=0)
            said.append((held_ns, clear_ns))
            crew.pause(CLEAR_S)
        replies = crew.gather(NAMES, OP_S)
    return {"part": "backpressure", "way": "with hints", **judged(replies["side-0"], said)}


def judged(reply: Message, said: Sequence[tuple[int, int]]) -> Row:
    """From when the path got segments, and when it was held and cleared, to how late both were."""
    given: list[int] = reply["given_ns"]
    late, back = [], []
    for held_ns, clear_ns in said:
        if not any(held_ns - HELD_S * S < at < held_ns for at in given):
            continue  # it was not in use: nothing is shown
        late.append(max((at - held_ns for at in given if held_ns < at < clear_ns), default=0))
        back.append(min((at - clear_ns for at in given if at > clear_ns), default=None))
    if not late:
        return {"packets": 0, "latency_ms": None}
    known = [each for each in back if each is not None]
    median = statistics.median(late) / MS
    row: Row = {"packets": len(late), "median_us": median * 1_000, "latency_ms": max(late) / MS}
    return row | {"returned": len(known), "back_ms": statistics.median(known) / MS if known else None}


@contextmanager
def _sampled(directory: Path) -> Iterator[list[tuple[int, float]]]:
    """When, and what the second path's share was then, of an agent's only flow: looked at all the time."""
    samples: list[tuple[int, float]] = []
    over = threads.Event()

    def look() -> None:
        with AgentConsole([directory]) as console:
            while not over.wait(SAMPLE_S):
                samples.extend((monotonic_ns(), flow.shares[1]) for flow in console.flows() if flow.shares)

    thread = threads.start("sampling", look)
    try:
        yield samples
    finally:
        over.set()
        thread.join()


def _steady(seconds: float, *, at_switch: bool) -> Row:
    rates = (RATE, RATE / 2)
    with (
        Lab(hosts=2, paths=_paths(rates, at_switch=at_switch)) as lab,
        _advised(lab, agents=True) as (crew, directories),
        TelemetrySender(lab, via="control") as tell,
        Telemetry(lab, tell, every_ms=TELEMETRY_MS),
    ):
        ends_ns = monotonic_ns() + int((SETTLED_S + seconds) * S)
        settled_ns = monotonic_ns() + int(SETTLED_S * S)
        with _sampled(directories[0]) as samples:
            while monotonic_ns() < ends_ns:
                _op(crew, STEADY_BYTES)
    shares = [share for at_ns, share in samples if at_ns >= settled_ns]
    base: Row = {"part": "steady", "way": "with hints", "layout": "switch" if at_switch else "hosts"}
    if len(shares) < 2:
        return base | {"std": None}
    figures: Row = {"samples": len(shares), "mean": statistics.fmean(shares), "std": statistics.pstdev(shares)}
    return base | figures
