"""From a collector to the agent: `COLLECTOR | python examples/telemetry/collectors.py KIND PORTS.json > FEED`.

KIND is `gnmi` for what `gnmic subscribe --format event` prints, and `sflow` for what `sflowtool -j` prints (or `-J`).
Out come lines for the agent's feed `json`. PORTS.json knows the cabling: which queue a port of a switch is.

    {"leaf-1 Ethernet1": {"destination": "10.0.0.2", "path": 0, "limit_bytes": 1000000},
     "leaf-1 Ethernet2": {"destination": "10.0.0.3", "path": 0, "limit_bytes": 1000000}}

A port is named by its switch, as the collector calls it (for sFlow: the agent's address), and its name (for sFlow: its
ifIndex). What else is said of it goes into every line: `destination` and `path` for the queue of the port that leads to
a host, `source` and `path` for one that a host sends through.

gNMI brings the depth of each queue of a port, and what counts is their sum, of `limit_bytes`. sFlow has counters only:
out of two samples of a port come the use of the link, as a congestion of up to 200, and whether it dropped anything
between them, which is 220. Neither ever says 240, which would take the path away at once: that is for switches that
really push back.
"""

import json
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

Ports = dict[str, dict[str, Any]]
Line = dict[str, Any]

DEPTH = "instant-queue-len"
"""The last word of the path of what is taken for a queue's depth; other vendors have other words."""
PORT_TAGS = ("interface_interface-id", "interface_name", "port_port-id")
IN_USE, DROPPED = 200, 220
MOST_TEXT = 1 << 20


def whole(lines: Iterable[str]) -> Iterator[Any]:
    """The JSON values in a stream: one on each line, or spread over lines, of which the first and the last begin with a
    bracket and the others do not."""
    text = ""
    for line in lines:
        text = line if line[:1] in "[{" else text + line
        if line[:1] in "]}" or (line[:1] in "[{" and line.rstrip()[-1:] in "]}"):
            try:
                yield json.loads(text)
            except ValueError as error:
                print(f"not JSON: {error}", file=sys.stderr)
            text = ""
        elif len(text) > MOST_TEXT:
            print("this does not look like JSON of a collector", file=sys.stderr)
            text = ""


@dataclass
class Gnmi:
    """Events of gnmic: an array of them for each notification, one for each queue."""

    ports: Ports
    depths: dict[str, dict[str, int]] = field(default_factory=dict)

    def lines(self, events: list[dict[str, Any]]) -> Iterator[Line]:
        for event in events:
            tags, values = event.get("tags", {}), event.get("values", {})
            switch = tags.get("source", "").rpartition(":")[0] or tags.get("source", "")
            name = next((tags[tag] for tag in PORT_TAGS if tag in tags), "")
            port = f"{switch} {name}"
            found = [int(value) for path, value in values.items() if path.rpartition("/")[2] == DEPTH]
            if port in self.ports and found:
                queues = self.depths.setdefault(port, {})
                queues[tags.get("queue_name", "")] = found[0]
                yield {**self.ports[port], "depth_bytes": sum(queues.values()), "unix_ns": event["timestamp"]}


@dataclass
class Sflow:
    """Datagrams of sflowtool. All numbers are strings there; `sysUpTime` is the switch's own clock, in milliseconds."""

    ports: Ports
    last: dict[str, tuple[int, int, int]] = field(default_factory=dict)

    def lines(self, datagram: dict[str, Any]) -> Iterator[Line]:
        for sample in datagram.get("samples", []):
            for block in sample.get("elements", []):
                port = f"{datagram['agent']} {block.get('ifIndex')}"
                if port in self.ports and "ifOutOctets" in block:
                    yield from self._counters(port, int(datagram["sysUpTime"]), block)

    def _counters(self, port: str, now_ms: int, block: dict[str, str]) -> Iterator[Line]:
        sent, dropped, bits_s = (int(block[name]) for name in ("ifOutOctets", "ifOutDiscards", "ifSpeed"))
        before, self.last[port] = self.last.get(port), (now_ms, sent, dropped)
        if before is None or now_ms <= before[0] or sent < before[1] or not bits_s:
            return  # the first sample, or the switch restarted its counters
        use = (sent - before[1]) * 8_000 / (now_ms - before[0]) / bits_s
        level = DROPPED if dropped > before[2] else round(IN_USE * min(1.0, use))
        yield {**self.ports[port], "congestion": level}


def main(kind: str, ports_file: str) -> None:
    with open(ports_file, encoding="utf-8") as file:
        ports: Ports = json.load(file)
    said = {"gnmi": Gnmi, "sflow": Sflow}[kind](ports)
    for value in whole(sys.stdin):
        try:
            for line in said.lines(value):
                print(json.dumps(line), flush=True)
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            print(f"not what {kind} says: {error!r}", file=sys.stderr)


if __name__ == "__main__":
    if len(sys.argv) != 3 or sys.argv[1] not in ("gnmi", "sflow"):
        sys.exit("usage: collectors.py gnmi|sflow PORTS.json")
    main(*sys.argv[1:])
