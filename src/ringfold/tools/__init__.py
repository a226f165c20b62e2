"""Programs around the library, which the library never imports: benchmarks, soak tests, the demo, the lab.

Read `cluster.py` (a local cluster of processes, which never outlive their parent), `namespaces.py` (network
namespaces), `shaped.py` (hosts around a bridge) and `lab/` (hosts with several paths); then the programs: `demo/`,
`soak/`, `bench/`. `stores.py` starts store servers for the soak and the benchmarks; `streams.py` has plain TCP and UDP
traffic to compare with. `made_up_run.py` has statuses and events of a run that never was, for tests and pictures of
views, `made_up_page.py` serves them, and `screenshots.py` takes the pictures of the documentation.
"""
