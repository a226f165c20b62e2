"""The lab: hosts on this machine that meet on two or more paths, each with its own rate, delay and loss.

    from ringfold.tools.lab import Lab, Path, missing

    if why := missing():
        ...  # show `why`, and skip
    with Lab(hosts=2, paths=[Path(rate="200mbit"), Path(rate="50mbit", rtt_ms=20, loss=0.001)]) as lab:
        server = lab.start(0, [sys.executable, "server.py", lab.address(0, 0), lab.address(0, 1)])
        lab.set_rate(0, "50mbit")
        lab.cut(1)
        lab.run(1, [sys.executable, "client.py", lab.address(0, 0), lab.address(0, 1)])

It needs root, `ip`, `tc` and `bridge`. Leaving the context ends what runs inside and removes everything; what a lab
that was killed outright has left behind is removed by the next one.

Read `model.py` (hosts, paths, cables), then `network.py` (the namespaces, and the native relay that delays and loses
packets); `switch.py` is telemetry. `file.py`, `timeline.py` and `runner.py` are `ringfold lab`: what a file contains,
what happens when, and doing it. `traffic.py` sends and receives plain traffic.
"""

from ringfold.tools.lab.model import SWITCH, Change, Path
from ringfold.tools.lab.network import Lab, missing
from ringfold.tools.lab.switch import Queue, Queues, Sample, Telemetry, TelemetrySender
from ringfold.tools.namespaces import ShapingFailed

__all__ = [
    "SWITCH",
    "Change",
    "Lab",
    "Path",
    "Queue",
    "Queues",
    "Sample",
    "ShapingFailed",
    "Telemetry",
    "TelemetrySender",
    "missing",
]
