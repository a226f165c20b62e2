"""The processes that probe.

Read `prober.py` (the handle on the native prober), `open_window.py` (early fits and checks of the open window),
`callbacks.py` (what a program sees of a node), `shell.py` (the shell of a node's round machine), then `joined.py` (a
process that only probes, with a master), `relay.py` (one connection to the master for all nodes of a region),
`nodes_file.py` (the nodes and their graph where there is no master) and
`alone.py` (a node without a master). `rf.Prober`, in `ringfold.clock`, is made of the last two.
"""
