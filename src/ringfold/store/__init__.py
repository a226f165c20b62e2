"""A key-value store that agreement can be built on: compare-and-set, waiting for changes, leases, generations.

Read `base.py` first: its head defines the terms, `Store` is the interface for callers, `Driver` the one for backends.
`client.py` makes a `Store` of a driver, with leases, and opens one by its address. The backends are `sqlite.py`,
`tcp.py` (torch's TCPStore), `etcd.py`, `redis.py` and, for simulations, `in_memory.py`.
"""

from ringfold.store.base import ABSENT, Entry, Generation, Lease, Lost, Store, Won, version_of
from ringfold.store.client import StoreClient, open_store

__all__ = [
    "ABSENT",
    "Entry",
    "Generation",
    "Lease",
    "Lost",
    "Store",
    "StoreClient",
    "Won",
    "open_store",
    "version_of",
]
