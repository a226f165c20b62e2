"""`ringfold bench hints`: what hints cost, how soon they follow telemetry, and that none is ever torn.

Four parts, each a row. *read*: a hint read natively, as the engine does it. *telemetry*: from just before a packet with
backpressure is sent until it is written into shared memory; the agent is the real command in a process of its own, and
sleeps between packets. *registry*: flows registered and removed over the Unix socket, pipelined. *torn*: reads against
a writer that never pauses, dwells in the middle of its writes, and is killed again and again.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from ringfold import _native
from ringfold.agent.client import AgentClient, AgentConsole
from ringfold.errors import AgentUnreachable
from ringfold.runtime.clock import monotonic_ns, unix_ns
from ringfold.runtime.datagrams import DatagramSender
from ringfold.runtime.development import require_testing_module
from ringfold.runtime.local import LocalConnection
from ringfold.runtime.process import request_prompt_scheduling
from ringfold.tools.bench import report as reports
from ringfold.tools.bench.report import Column, Row, Sheet, microseconds, spread
from ringfold.tools.cluster import LocalCluster, ProcessFailed, free_port
from ringfold.wire.agent import (
    AGENT_PROTOCOL,
    HINTS_NAME,
    MAX_ANSWER_BYTES,
    SOCKET_NAME,
    AgentHello,
    AgentRefused,
    Deregister,
    Flow,
    Register,
    agent_frame,
    decode_from_agent,
)
from ringfold.wire.frames import FrameReader
from ringfold.wire.telemetry import Congestion, Packet, address_number, encode

WORKER = str(Path(__file__).with_name("workers.py"))
PATHS = (("10.0.0.1", "10.0.0.2"), ("10.1.0.1", "10.1.0.2"))
TORN_SLOTS = 4
TORN_GENERATION = 11
PAIRS = 100
START_S = 20.0
WAIT_S = 5.0
CHUNK = 1_000_000


def command(
    reads: Annotated[int, typer.Option(help="Reads against the writer that is killed.", min=1_000)] = 100_000_000,
    packets: Annotated[int, typer.Option(help="Telemetry packets.", min=10)] = 1_000,
    flows: Annotated[int, typer.Option(help="Flows registered and removed.", min=10, max=16_000)] = 10_000,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    check: Annotated[bool, typer.Option("--check", help="Compare with benchmarks/targets.toml.")] = False,
) -> None:
    """What hints cost, how soon they follow telemetry, and that none is ever torn."""
    with reports.guarded(as_json=as_json) as progress:
        task = progress.add_task("reading", total=4)
        figures = [read_cost()]
        progress.update(task, description="registering", advance=1)
        figures.append(registry(flows))
        progress.update(task, description="killing writers", advance=1)
        figures.append(torn(reads))
        progress.update(task, description="telemetry", advance=1)
        request_prompt_scheduling()  # a late send would count as delay of the agent; nothing comes after this
        figures.append(telemetry(packets))
    settings: dict[str, object] = {"reads": reads, "packets": packets, "flows": flows}
    result = reports.report("hints", settings, figures)
    reports.finish(result, _sheets(figures), as_json=as_json, against_targets=check)


def _sheets(figures: Sequence[Row]) -> list[Sheet]:
    columns = {
        "read": (Column("a read", "read_ns", lambda value: f"{value:.1f} ns"),),
        "telemetry": (
            Column("packets", "count"),
            Column("median", "median_us", microseconds),
            Column("p99", "p99_us", microseconds),
            Column("worst", "worst_us", microseconds),
        ),
        "registry": (
            Column("flows", "flows"),
            Column("registered and removed", "flows_per_s", lambda value: f"{value:,.0f} a second"),
            Column("through AgentClient", "client_flows_per_s", lambda value: f"{value:,.0f} a second"),
        ),
        "torn": (
            Column("reads", "reads", lambda value: f"{value:,}"),
            Column("hints among them", "hints", lambda value: f"{value:,}"),
            Column("writers killed", "kills"),
            Column("torn", "torn"),
        ),
    }
    return [Sheet(str(row["part"]), [row], columns[str(row["part"])]) for row in figures]


def read_cost() -> Row:
    """The best of several turns: what a read costs, not what else the machine does."""
    require_testing_module()
    from ringfold import _native_testing

    with LocalCluster() as cluster:
        path = str(cluster.directory / HINTS_NAME)
        writer = _native.HintWriter(path, 60_000_000_000, 0o600)
        writer.open(5, 1)
        writer.publish(5, [21_845, 43_690])
        reader = _native.HintReader(path)
        costs = [_native_testing.hint_read_cost_ns(reader, 5, 1, 5_000_000) for _ in range(7)]
        writer.close()
    return {"part": "read", "read_ns": min(costs), "worst_turn_ns": max(costs)}


def start_agent(cluster: LocalCluster, *options: str) -> Path:
    """A real agent in a directory of its own; returns once it answers."""
    directory = cluster.directory / "agent"
    cluster.start_agent("agent", directory, *options)
    for _ in range(int(START_S / 0.05)):
        try:
            AgentConsole([directory]).close()
        except AgentUnreachable:
            cluster.pause(0.05)
        else:
            return directory
    raise ProcessFailed("agent", f"does not answer after {START_S:.0f} s", cluster.log_tail("agent"))


def telemetry(packets: int) -> Row:
    """Each packet puts a path of one pair under backpressure. It is let go at once, and its turn comes again later."""
    port = free_port()
    times: list[int] = []
    with LocalCluster() as cluster:
        directory = start_agent(cluster, "--telemetry", f"127.0.0.1:{port}")
        with AgentClient([directory], "bench") as client, DatagramSender("127.0.0.1", port) as sender:
            ends = [(f"10.9.0.{number}", f"10.9.1.{number}") for number in range(PAIRS)]
            flows = [client.register(source, target, [(source, target), *PATHS[1:]]) for source, target in ends]
            if not client.wait(lambda each: each.place(flows[-1]) is not None, START_S):
                raise ProcessFailed("agent", "gave no slot to a flow", cluster.log_tail("agent"))
            reader = client.reader()
            assert reader is not None
            for turn in range(packets):
                number = turn % PAIRS
                place = client.place(flows[number])
                assert place is not None
                times.append(_written_after(cluster, sender, _packet(ends[number], 255, 2 * turn), reader, place))
                sender.send(_packet(ends[number], 0, 2 * turn + 1))
                cluster.pause(0.01)
    return {"part": "telemetry", **spread(times)}


def _packet(ends: tuple[str, str], level: int, sequence: int) -> bytes:
    source, target = map(address_number, ends)
    return encode(Packet(Congestion(source, target, 0, level), sequence, unix_ns()))


def _written_after(
    cluster: LocalCluster, sender: DatagramSender, packet: bytes, reader: _native.HintReader, place: tuple[int, int]
) -> int:
    """From before the packet is sent until its backpressure was written, which the slot records: this process
    may be without a core by then, and is not what is measured."""
    _wait_for(cluster, reader, place, held=False)
    began_ns = monotonic_ns()
    sender.send(packet)
    _wait_for(cluster, reader, place, held=True)
    return reader.written_ns(place[0]) - began_ns


def _wait_for(cluster: LocalCluster, reader: _native.HintReader, place: tuple[int, int], *, held: bool) -> None:
    """Wait until path 0 is under backpressure, or free of it."""
    limit_ns = monotonic_ns() + int(WAIT_S * 1e9)
    while bool(reader.word(*place) >> 36 & 1) != held:
        cluster.pause(0.001)
        reader.look()
        if monotonic_ns() > limit_ns:
            raise ProcessFailed("agent", f"a packet did not show within {WAIT_S:.0f} s", cluster.log_tail("agent"))


def registry(flows: int) -> Row:
    with LocalCluster() as cluster:
        directory = start_agent(cluster, "--telemetry", f"127.0.0.1:{free_port()}")
        connection = LocalConnection(directory / SOCKET_NAME)
        try:
            _exchange(connection, [agent_frame(AgentHello(AGENT_PROTOCOL, "bench"))])
            wanted = [Flow(n, "10.0.0.1", f"10.0.{n % 4}.{n % 250}", PATHS) for n in range(flows)]
            frames = [agent_frame(Register(n + 1, flow)) for n, flow in enumerate(wanted)]
            frames += [agent_frame(Deregister(flows + n + 1, n)) for n in range(flows)]
            began_ns = monotonic_ns()
            _exchange(connection, frames[:flows])
            _exchange(connection, frames[flows:])
            plain_s = (monotonic_ns() - began_ns) / 1e9
        finally:
            connection.close()
        with AgentClient([directory], "bench") as client, AgentConsole([directory]) as console:
            began_ns = monotonic_ns()
            numbers = [client.register("10.0.0.1", f"10.0.{n % 4}.{n % 250}", PATHS) for n in range(flows)]
            client.wait(lambda each: each.place(numbers[-1]) is not None, START_S)
            for number in numbers:
                client.deregister(number)
            while console.status().flows and monotonic_ns() - began_ns < START_S * 1e9:
                cluster.pause(0.005)
            client_s = (monotonic_ns() - began_ns) / 1e9
    return {"part": "registry", "flows": flows, "flows_per_s": flows / plain_s, "client_flows_per_s": flows / client_s}


def _exchange(connection: LocalConnection, frames: Sequence[bytes]) -> None:
    """Send all of it without waiting, then take as many answers."""
    reader = FrameReader(MAX_ANSWER_BYTES)
    connection.send(b"".join(frames))
    left, limit_ns = len(frames), monotonic_ns() + int(START_S * 1e9)
    while left:
        chunk = connection.wait(START_S)
        if chunk == b"" or monotonic_ns() > limit_ns:
            raise ProcessFailed("agent", f"{left} requests were not answered")
        for kind, body in reader.feed(chunk or b""):
            answer = decode_from_agent(kind, body)
            if isinstance(answer, AgentRefused):
                raise ProcessFailed("agent", answer.text)
            left -= 1


def torn(reads: int) -> Row:
    """The writers are in another process, which counts them; this one only reads.

    A read that finds no writer's hint proves nothing, and is done in no time: those do not count as reads.
    """
    require_testing_module()
    from ringfold import _native_testing

    found = {"hints": 0, "local": 0, "busy": 0, "torn": 0, "nanoseconds": 0}
    with LocalCluster() as cluster:
        path = str(cluster.directory / HINTS_NAME)
        slots = [str(TORN_SLOTS), str(TORN_GENERATION)]
        cluster.start_worker("writers", WORKER, "hints", path, *slots)
        cluster.wait_connected(["writers"], START_S)
        cluster.gather(["writers"], START_S)
        reader = _native.HintReader(path)
        generations, began_ns = [TORN_GENERATION] * TORN_SLOTS, monotonic_ns()
        while (done := found["hints"] + found["busy"]) < reads:
            if not done and monotonic_ns() - began_ns > START_S * 1e9:
                raise ProcessFailed("writers", f"wrote no hint in {START_S:.0f} s", cluster.log_tail("writers"))
            some = _native_testing.hammer_hint_reads(reader, TORN_SLOTS, generations, min(CHUNK, reads - done))
            for key, count in some.items():
                found[key] += count
        cluster.send(["writers"], {"what": "stop"})
        kills = cluster.gather(["writers"], START_S)["writers"]["kills"]
        cluster.allow_exit("writers")
    return {"part": "torn", "reads": reads, "kills": kills, **{key: found[key] for key in found}}
