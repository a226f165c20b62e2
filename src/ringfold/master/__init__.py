"""The master: the pure state machine of a run, the runs of a master, and the server around them.

Start with `machine.py`: it says what a master does for a run, and handles every event of it (`events.py`,
`effects.py`). `states.py` has the states of all machines in here, and their transitions; `run.py` has the tables of a
run, and `settings.py` its settings. Then the decisions, all pure:

* `epochs.py`: the one mechanism that changes a group, with `edges.py` (which links to avoid), `channels.py` (how many
  threads each peer's ops have) and `verdicts.py` (which ops commit, and why that is safe).
* `calls.py`: votes and admission, with `syncs.py` (shared state), `topology.py` (better rings) and `pending.py` (one
  answer to all peers that ask whether others are pending).
* `ops.py`: ops that fail; `disputes.py`: members that called different things.
* `liveness.py` and `stalls.py`: which peers are evicted because they are silent, or keep the others waiting.
* `requests.py`: which first messages of a connection are valid; `probing.py`: rounds of probing; `status.py`: the run
  as `ringfold status` shows it, with `connection_states.py` (PCCL's names for what peers and ops do); `lifecycle.py`:
  how a run ends.

`runs.py` is all runs of a master: which connection belongs to which run, and what happens when a run's machine breaks.

How a run outlives its master: `journal.py` (what is journalled, when, and which effects wait for it), `recovery.py`
(how members return to a new master), `journal_store.py` (the journals in a store) and `leadership.py` (which of several
masters leads).

The shell: `server.py` executes the effects over real sockets, `scheduling.py` decides whose frames are handled next,
and `records.py` keeps the events of all runs.
"""
