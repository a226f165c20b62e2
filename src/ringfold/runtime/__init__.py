"""The I/O seam: the only Python code that touches sockets, clocks, randomness, threads, signals and processes.

It decides nothing about a run. Read `clock.py` and `threads.py` first: other packages take time, randomness, threads
and locks from them. `process.py` is about this process and its children, and `sigterm.py` about ending a training loop
on SIGTERM. `network.py` resolves names and lists addresses; `asyncio_support.py` adds to asyncio what servers need, and
`log_limit.py` keeps remote input from filling the log. `local.py` and `rendezvous.py` connect programs of one host.
`master_client.py` sends requests to a running master. `hardware.py` reads what this machine is and `doctor.py` judges
it. The stores use `http.py`; `http_server.py` serves metrics. The agent uses `datagrams.py` and `feeds.py` to receive
telemetry, and `netlink.py` and `bpf.py` to read the queues of network interfaces. `recorder.py` records the events of
this process: in memory, in files and in flight records. `development.py` checks that the native test module is there.
"""
