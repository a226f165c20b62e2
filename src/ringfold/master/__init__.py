"""The master: the pure state machine of a run, the runs of a master, and the server around them.

Read `machine.py` first: it tells what a master does for a run, and takes every event of it. Then `run.py` (the state),
`epochs.py` (the one mechanism that changes a group) with `verdicts.py` (why a commit is safe), `calls.py` (votes and
admission), and `life.py` (how a run ends). `runs.py` is all runs of a master: which connection belongs to which, and
what happens when one breaks. `stalls.py` decides who keeps the others waiting for too long. The leaves are short:
`claims.py`, `edges.py`, `evidence.py`, `evicting.py`, `liveness.py`, `meeting.py`, `status.py`.

How a run outlives its master: `journal.py` (what must not be forgotten), `keeping.py` (when it is written), `outbox.py`
(what waits for that) and `returning.py` (how members come back) are pure; `keeper.py` is the journal in a store,
`directory.py` the list of all runs there, and `leading.py` decides who of several masters leads.

The shell: `server.py` carries the effects out over real sockets, `door.py` is one connection of it, `turns.py` says
whose frames are handled next, and `thread.py` is a master inside somebody else's program.
"""
