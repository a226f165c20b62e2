"""The per-host transport agent: it watches paths and tells every process on the host how to split its flows over them.

Read `wire/agent.py` for what processes say to it, `registry.py` for who has which slot, `steering.py` for how
congestion becomes advice, and `machine.py`, which ties them together. `daemon.py` is the shell with the sockets and
the hints, `doors.py` has the clients' connections; `client.py` is what a process holds, around `enrolment.py`.
The layout of the hints is in include/ringfold_hints.h.

For what it knows and decides, read `policy.py` (congestion and rates -> shares), `telemetry.py` (what switches said,
and which flows it is about), `adapters.py` (other feeds into the same), `monitors.py` (the host's own queues) and
`reports.py` (what the agent tells the switches).
"""
