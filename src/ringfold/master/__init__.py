"""The master: the pure state machine of a run, and the server around it.

Read `machine.py` first: it tells what a master does, and takes every event. Then `run.py` (the state), `epochs.py` (the
one mechanism that changes a group) with `verdicts.py` (why a commit is safe), and `calls.py` (votes and admission). The
leaves are short: `claims.py`, `edges.py`, `evidence.py`, `evicting.py`, `liveness.py`, `meeting.py`, `status.py`.
`stalls.py` decides who keeps the others waiting for too long.

How a run outlives its master: `journal.py` (what must not be forgotten), `keeping.py` (when it is written), `outbox.py`
(what waits for that) and `returning.py` (how members come back) are pure; `keeper.py` is the journal in a store, and
`leading.py` decides who of several masters leads.

The shell: `server.py` carries the effects out over real sockets, `door.py` is one connection of it, and `thread.py` is
a master inside somebody else's program.
"""
