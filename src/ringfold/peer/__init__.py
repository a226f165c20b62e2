"""The communicator: what a training process holds.

Read `machine.py` first: it owns every transition of a peer, from the first word with the master to the last. Its parts
are `control.py` (reaching the master and proving the token), `lanes.py` (connecting the ring of an epoch), `calls.py`
(run-wide votes) and `memory.py` (what the next master cannot know, should this one be lost); `events.py` and
`effects.py` are its words, `settings.py` its numbers. All these are pure.

Then the shell: `carry.py` (effects -> engine commands), `session.py` (the engine, one thread, and who waits for what),
`outcome.py` (how an op's end becomes a value or an exception), `ops.py` (ops that run in any epoch, or in one),
`results.py` (results of another size than the array). On top of it what users see: `handle.py`, `communicator.py`,
`steps.py` with `step_ops.py` (several ops of a step in flight), and `joining.py`: from an address to a communicator.
"""
