"""A peer's part in a sync of the shared state.

Read `syncing.py` (from the master's plan to the end of the sync; pure), `transfer.py` (the bytes of blocks, read and
written for the machine by the shell), `sync_call.py` (one sync as a program calls it) and `resume.py` (what a step loop
does when the run has lost its last revision).
"""
