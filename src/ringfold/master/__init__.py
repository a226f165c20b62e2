"""The master: the pure state machine of a run, the runs of a master, and the server around them.

Read `machine.py` first: it says what a master does for a run, and takes every event of it. `events.py` has its events
and effects, `settings.py` its settings, `run.py` the state that all parts share. Then the parts: `epochs.py` (the one
mechanism that changes a group) with `verdicts.py` (why a commit is safe), `evidence.py` and `edges.py`; `calls.py`
(votes and admission), `ops.py` (ops that cannot succeed) with `meeting.py` and `disputes.py` (calls that differ);
`syncs.py` and `resuming.py` (shared state), `topology.py` (ring order), `stalls.py` (members that others wait for),
`liveness.py`, `evicting.py`, `probing.py`, `life.py` (how a run ends), `status.py`.

`runs.py` is all runs of a master: which connection belongs to which (`claims.py`), and what happens when one fails.

How a run outlives its master: `journal.py` (what must not be forgotten), `keeping.py` (when it is written), `outbox.py`
(effects that wait for that) and `returning.py` (how members come back) are pure; `keeper.py` is the journal in a store,
`directory.py` the list of all runs there, and `leading.py` decides which of several masters leads.

The shell: `server.py` carries the effects out over real sockets, `door.py` is one connection of it, `turns.py` chooses
whose frames are handled next, and `thread.py` is a master inside another program.
"""
