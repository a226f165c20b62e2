"""Programs around the library, which the library never imports: benchmarks, soak tests, the demo, the lab.

Read `spawn.py` (children that never outlive us), `namespaces.py` (network namespaces), `shaped.py` (hosts with slow
links) and `lab/` (hosts with several paths); then the programs: `demo/`, `soak/`, `bench/`. `load.py` and `streams.py`
are what only benchmarks use.
"""
