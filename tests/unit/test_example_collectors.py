"""What gnmic and sflowtool print becomes telemetry: recorded in their formats, through the example and the adapter."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from ringfold.agent.adapters import JsonAdapter, Observation
from ringfold.wire.telemetry import Congestion, Refusal, prefix_number

EXAMPLE = Path(__file__).parents[2] / "examples" / "telemetry"

GNMI = """\
[
  {
    "name": "default-1763226000",
    "timestamp": 1763226000100000000,
    "tags": {
      "interface_interface-id": "swp1",
      "queue_name": "0",
      "source": "leaf-1:9339",
      "subscription-name": "default-1763226000"
    },
    "values": {
      "/qos/interfaces/interface/output/queues/queue/state/instant-queue-len": "400000",
      "/qos/interfaces/interface/output/queues/queue/state/transmit-uc-pkts": "81234"
    }
  },
  {
    "name": "default-1763226000",
    "timestamp": 1763226000100000000,
    "tags": {
      "interface_interface-id": "swp1",
      "queue_name": "1",
      "source": "leaf-1:9339",
      "subscription-name": "default-1763226000"
    },
    "values": {
      "/qos/interfaces/interface/output/queues/queue/state/instant-queue-len": 200000
    }
  }
]
[
  {
    "name": "default-1763226000",
    "timestamp": 1763226000200000000,
    "tags": {
      "interface_interface-id": "swp9",
      "queue_name": "0",
      "source": "leaf-1:9339",
      "subscription-name": "default-1763226000"
    },
    "values": {
      "/qos/interfaces/interface/output/queues/queue/state/instant-queue-len": "900000"
    }
  },
  {
    "name": "default-1763226000",
    "timestamp": 1763226000200000000,
    "tags": {
      "interface_interface-id": "swp1",
      "queue_name": "0",
      "source": "leaf-1:9339",
      "subscription-name": "default-1763226000"
    },
    "deletes": [
      "/qos/interfaces/interface/output/queues/queue/state"
    ]
  }
]
"""


def datagram(up_ms: int, octets: int, discards: int) -> str:
    """A counters sample as `sflowtool -j` prints it, in one line; -J breaks it at each comma."""
    interface = {
        "counterBlock_tag": "0:1", "ifIndex": "14", "networkType": "6", "ifSpeed": "1000000000", "ifDirection": "1",
        "ifStatus": "3", "ifInOctets": "4839078", "ifInUcastPkts": "15205", "ifInMulticastPkts": "0",
        "ifInBroadcastPkts": "4294967295", "ifInDiscards": "0", "ifInErrors": "0", "ifInUnknownProtos": "4294967295",
        "ifOutOctets": str(octets), "ifOutUcastPkts": "158884229", "ifOutMulticastPkts": "4294967295",
        "ifOutBroadcastPkts": "4294967295", "ifOutDiscards": str(discards), "ifOutErrors": "0",
        "ifPromiscuousMode": "0",
    }  # fmt: skip
    flow = {
        "sampleType_tag": "0:1", "sampleType": "FLOWSAMPLE", "sampleSequenceNo": "650", "sourceId": "0:9",
        "elements": [{"flowBlock_tag": "0:1", "flowSampleType": "HEADER", "headerProtocol": "1"}],
    }  # fmt: skip
    counters = {
        "sampleType_tag": "0:2", "sampleType": "COUNTERSSAMPLE", "sampleSequenceNo": "368", "sourceId": "0:14",
        "elements": [{"counterBlock_tag": "0:2", "dot3StatsAlignmentErrors": "0"}, interface],
    }  # fmt: skip
    fields = {
        "datagramSourceIP": "192.0.2.9", "datagramSize": "344", "unixSecondsUTC": "1763226000",
        "localtime": "2025-11-15T17:00:00+0000", "datagramVersion": "5", "agentSubId": "0", "agent": "192.0.2.9",
        "packetSequenceNo": "5912", "sysUpTime": str(up_ms), "samplesInPacket": "2", "samples": [flow, counters],
    }  # fmt: skip
    return json.dumps(fields, separators=(",", ":"))


def through_the_example(kind: str, text: str, complaints: int = 0) -> list[Observation | Refusal]:
    """What the agent sees of it; and so many lines are complained about."""
    command = [sys.executable, str(EXAMPLE / "collectors.py"), kind, str(EXAMPLE / "ports.json")]
    ran = subprocess.run(command, input=text, capture_output=True, text=True, timeout=60, check=True)
    assert len(ran.stderr.splitlines()) == complaints
    return JsonAdapter().feed(ran.stdout.encode())


def seen(destination: str, path: int, level: int, depth: int = 0, unix_ns: int | None = None) -> Observation:
    address, bits = prefix_number(destination)
    return Observation(Congestion(0, address, path, level, depth, 0, bits), unix_ns)


def test_queues_of_gnmic_events_add_up_by_port() -> None:
    assert through_the_example("gnmi", GNMI) == [
        seen("10.0.0.2", 0, 80, 400_000, 1763226000100000000),
        seen("10.0.0.2", 0, 120, 600_000, 1763226000100000000),
    ]


@pytest.mark.parametrize("is_pretty", [False, True])
def test_use_and_drops_of_a_port_come_out_of_sflow_counters(is_pretty: bool) -> None:
    datagrams = [
        datagram(1_000, 10_000_000, 5),
        datagram(2_000, 10_000_000 + 62_500_000, 5),  # half of what 1 Gbit/s takes in a second
        datagram(3_000, 10_000_000 + 70_000_000, 6),
        datagram(200, 7_000, 0),  # the switch was restarted
        datagram(1_200, 7_000 + 200_000_000, 0),
    ]
    if is_pretty:
        datagrams = [json.dumps(json.loads(each), indent=1) for each in datagrams]
    assert through_the_example("sflow", "\n".join(datagrams) + "\n") == [
        seen("10.1.0.2", 1, 100),
        seen("10.1.0.2", 1, 220),
        seen("10.1.0.2", 1, 200),
    ]


def test_what_is_not_of_the_collector_is_skipped_and_reported() -> None:
    text = "connecting to leaf-1\n" + '{"samples": [{"elements": [{"ifIndex": "14"}]}]}\n' + "[1, 2]\n{broken}\n" + GNMI
    assert len(through_the_example("gnmi", text, complaints=3)) == 2
