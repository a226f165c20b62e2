"""A key-value store that agreement can be built on: compare-and-set, waiting for changes, leases, generations.

Read `base.py` first: its head fixes the words, `Store` is what everybody uses, `Driver` is what a backend fills in.
`client.py` makes a `Store` of a driver, with `leases.py` and `counting.py` as its pure parts. The backends are
`sqlite.py`, `tcp.py` (torch's TCPStore), `etcd.py`, `redis.py` and, for simulations, `memory.py`. `opening.py` turns an
address into a store.
"""

from ringfold.store.base import ABSENT, Entry, Generation, Lease, Lost, Store, Won, version_of
from ringfold.store.client import StoreClient
from ringfold.store.opening import open_store

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
