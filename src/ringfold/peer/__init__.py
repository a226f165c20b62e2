"""The communicator: what a training process holds.

The core is pure. Read `machine.py` first: it makes every decision of a peer, from the first message to a master to the
last. `states.py` owns the states and transitions, `events.py` and `effects.py` the machine's inputs and outputs,
`settings.py` its numbers. Its parts are `control.py` (reaching a master, proving the token, checking its messages),
`votes.py` (run-wide calls), `lanes.py` (connecting the ring of an epoch), `side_channels.py` (bulk sessions between
members beside the ring) with their two users, `sync/` (shared state) and `measure/` (the rate of a link), and
`acceptor.py` (inbound connections for all of these).

Then the shell: `codes.py` (numbers shared with the native engine), `engine.py` (its commands, and effects as commands),
`path_shares.py` (the path shares of the host's agent), `guardian.py` (the process that reports a death), `session.py`
(the engine, one thread, and the calls that wait), `recording.py` (its events, ops and steps), `buffers.py` (arrays as
the engine takes them) with `staging.py` and `cuda_copies.py` (those that it works on in a copy, and the copies of CUDA
tensors), `outcome.py` (how an op ends: value, exception, handle) and `ops.py` (ops that run in any epoch, or in one).
On top of it what users see:
`communicator.py`, `steps.py` with `step_ops.py` (several ops of a step in flight), `sampling.py` (the samples of a
step) and `counting.py` (steps numbered by a global iteration), and `joining.py`: from an address to a communicator.
"""
