"""The per-host transport agent: it measures paths and advises every process on the host how to split its flows.

The messages between processes and the agent are in `wire/agent.py`; the layout of the hints is in
include/ringfold_hints.h. Read `registry.py` first (which client has which flow in which slot), then `machine.py`, the
state machine, with `events.py` and `effects.py`. It advises by `steering.py` (when to decide about which pair) and
`policy.py` (congestion and rates become shares), with the settings in `tuning.py`. `telemetry.py` takes the reports of
switches and makes those of the agent, `adapters.py` parses other feeds, and `monitors.py` reads the queues of the
host's interfaces.

`daemon.py` is the shell with the sockets and the hints; `connections.py` serves the clients, and `host_monitor.py` runs
the monitors, reports and feeds. `client.py` is what a process uses to register its flows.
"""
