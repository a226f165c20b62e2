"""Which flows there are, whose they are, and which slot has their hints. Pure.

A *client* is one connection of one process. A *pair* is a source, a destination and the paths between them: all flows
of a pair share a slot, also those of different clients and users, because advice about a pair is the same for all.
A slot is a pair's from its first flow to its last. Freed slots wait in a queue, so the one that has been free for the
longest is used next, and each new owner gets the next generation: a reader that has not noticed its end yet finds
a number that is not its own.

An address may be written in several ways (2001:DB8::1, 2001:db8:0::1; ::ffff:10.0.0.1 is 10.0.0.1): a pair has them in
one. A link-local address keeps its interface (fe80::1%eth0): without it, it is another one.

One user cannot take the table from the others: `Quota` bounds clients, flows and slots per user. A flow counts for the
user who registered it; a slot counts for every user who has a flow in it, so that sharing gives nobody more.

Invariants: a pair has a slot if and only if it has flows; a slot is free or one pair's; a user's counts are those of
his flows; every flow is one client's.
"""

import ipaddress
import re
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

from ringfold.wire.agent import MOST_PATHS, Flow, Place, RefusalKind

Client = int
PairKey = tuple[str, str, tuple[tuple[str, str], ...]]
LAST_GENERATION = 0xFFFFF
"""Generations have 20 bits in a slot's word, and are never 0."""
MAX_NAME = 255
MAX_ADDRESS = 64
MAX_CONNECTION = 2**63


@dataclass(frozen=True, slots=True, kw_only=True)
class Quota:
    """What one user may have at once."""

    clients: int = 1_024
    flows: int = 16_384
    slots: int = 2_048


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why something was not done."""

    kind: RefusalKind
    text: str


@dataclass(eq=False, slots=True)
class Pair:
    """A source and a destination with a slot. `users` counts the flows of each user."""

    key: PairKey
    slot: int
    generation: int
    flows: int = 0
    users: Counter[int] = field(default_factory=Counter)

    @property
    def source(self) -> str:
        return self.key[0]

    @property
    def destination(self) -> str:
        return self.key[1]

    @property
    def paths(self) -> tuple[tuple[str, str], ...]:
        return self.key[2]

    @property
    def place(self) -> Place:
        return self.slot, self.generation


@dataclass(eq=False, slots=True)
class Entry:
    """A registered flow. `number` grows with every registration, so that lists can go on where they stopped."""

    number: int
    client: Client
    flow: Flow
    pair: Pair


@dataclass(eq=False, slots=True)
class Tenant:
    """A client: the process behind a connection, as the kernel says it, and its flows by their own numbers."""

    uid: int
    pid: int
    name: str = ""
    flows: dict[int, Entry] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Change:
    """What a call did: flows that came or went, and the pair if it is new or gone with them."""

    entry: Entry
    pair_changed: bool


class Registry:
    """All flows of a host. `generations` is what each slot had last."""

    def __init__(self, generations: Sequence[int], quota: Quota | None = None) -> None:
        self.quota = quota or Quota()
        self.slots = len(generations)
        self._generations = list(generations)
        self._free = deque(range(self.slots))
        self._pairs: dict[PairKey, Pair] = {}
        self._tenants: dict[Client, Tenant] = {}
        self._entries: dict[int, Entry] = {}
        self._last_number = 0
        self._user_clients: Counter[int] = Counter()
        self._user_flows: Counter[int] = Counter()
        self._user_slots: Counter[int] = Counter()

    # Clients

    def open(self, client: Client, uid: int, pid: int) -> Refusal | None:
        """A connection; refused if its user has too many."""
        assert client not in self._tenants
        if self._user_clients[uid] >= self.quota.clients:
            return Refusal("quota", f"user {uid} has {self.quota.clients} connections, and no more are allowed")
        self._tenants[client] = Tenant(uid, pid)
        self._user_clients[uid] += 1
        return None

    def close(self, client: Client) -> list[Change]:
        """The connection ended: all its flows go. A client that is not there has none."""
        tenant = self._tenants.get(client)
        if tenant is None:
            return []
        changes = [self._remove(tenant, entry) for entry in list(tenant.flows.values())]
        del self._tenants[client]
        _less(self._user_clients, tenant.uid)
        return changes

    def tenant(self, client: Client) -> Tenant | None:
        return self._tenants.get(client)

    # Flows

    def register(self, client: Client, flow: Flow) -> Change | Refusal:
        """Add a flow; on refusal nothing has changed."""
        tenant = self._tenants[client]
        if why := fault(flow):
            return Refusal("invalid", why)
        if flow.connection in tenant.flows:
            return Refusal("duplicate", f"connection {flow.connection} is registered already")
        uid = tenant.uid
        if self._user_flows[uid] >= self.quota.flows:
            return Refusal("quota", f"user {uid} has {self.quota.flows} flows, and no more are allowed")
        key = pair_key(flow)
        pair = self._pairs.get(key)
        if (pair is None or not pair.users[uid]) and self._user_slots[uid] >= self.quota.slots:
            return Refusal("quota", f"user {uid} has flows in {self.quota.slots} slots, and no more are allowed")
        if pair is None:
            if not self._free:
                return Refusal("full", f"all {self.slots} slots are taken")
            pair = self._open_pair(key)
        self._last_number += 1
        entry = Entry(self._last_number, client, flow, pair)
        tenant.flows[flow.connection] = entry
        self._entries[entry.number] = entry
        self._user_flows[uid] += 1
        if not pair.users[uid]:
            self._user_slots[uid] += 1
        pair.users[uid] += 1
        pair.flows += 1
        return Change(entry, pair.flows == 1)

    def deregister(self, client: Client, connection: int) -> Change | Refusal:
        """Remove a flow of this client; another's flows are unknown to it."""
        tenant = self._tenants[client]
        entry = tenant.flows.get(connection)
        if entry is None:
            return Refusal("unknown", f"this client has no connection {connection}")
        return self._remove(tenant, entry)

    def _open_pair(self, key: PairKey) -> Pair:
        slot = self._free.popleft()
        self._generations[slot] = self._generations[slot] % LAST_GENERATION + 1
        pair = self._pairs[key] = Pair(key, slot, self._generations[slot])
        return pair

    def _remove(self, tenant: Tenant, entry: Entry) -> Change:
        pair, uid = entry.pair, tenant.uid
        del tenant.flows[entry.flow.connection]
        del self._entries[entry.number]
        _less(self._user_flows, uid)
        _less(pair.users, uid)
        if not pair.users[uid]:
            _less(self._user_slots, uid)
        pair.flows -= 1
        if not pair.flows:
            del self._pairs[pair.key]
            self._free.append(pair.slot)
        return Change(entry, not pair.flows)

    # Looking

    @property
    def flows(self) -> int:
        return len(self._entries)

    @property
    def clients(self) -> int:
        return len(self._tenants)

    @property
    def pairs(self) -> Sequence[Pair]:
        """All pairs, in the order in which they came."""
        return list(self._pairs.values())

    @property
    def pair_count(self) -> int:
        return len(self._pairs)

    def between(self, source: str, destination: str) -> list[Pair]:
        """The pairs with these ends, whatever their paths."""
        ends = (canonical(source[:MAX_ADDRESS]), canonical(destination[:MAX_ADDRESS]))
        return [pair for key, pair in self._pairs.items() if key[:2] == ends]

    def entries(self, after: int = 0) -> Iterator[Entry]:
        """Flows with a higher number than `after`, in the order of their numbers."""
        return (entry for number, entry in self._entries.items() if number > after)

    def users(self) -> list[tuple[int, int, int, int]]:
        """(uid, clients, flows, slots) of everybody who is there."""
        return [
            (uid, clients, self._user_flows[uid], self._user_slots[uid])
            for uid, clients in sorted(self._user_clients.items())
        ]

    def check(self) -> None:
        """The invariants; for tests, because it looks at everything."""
        entries = [entry for tenant in self._tenants.values() for entry in tenant.flows.values()]
        assert {entry.number for entry in entries} == self._entries.keys()
        taken = [pair.slot for pair in self._pairs.values()]
        assert sorted([*taken, *self._free]) == list(range(self.slots))
        for pair in self._pairs.values():
            owners = Counter(self._tenants[entry.client].uid for entry in entries if entry.pair is pair)
            assert pair.flows == owners.total() > 0
            assert dict(pair.users) == dict(owners)
        assert dict(self._user_flows) == Counter(self._tenants[entry.client].uid for entry in entries)
        assert dict(self._user_slots) == Counter(uid for pair in self._pairs.values() for uid in pair.users)
        assert dict(self._user_clients) == Counter(tenant.uid for tenant in self._tenants.values())


def fault(flow: Flow) -> str:
    """What is wrong with a flow; empty if nothing is."""
    if not 0 <= flow.connection < MAX_CONNECTION:
        return f"connection {flow.connection} is not a number from 0 to 2^63"
    if not 2 <= len(flow.paths) <= MOST_PATHS:
        return f"a flow has 2 to {MOST_PATHS} paths, not {len(flow.paths)}"
    for name in (flow.source_host, flow.destination_host):
        if len(name) > MAX_NAME or not name.isprintable():
            return "a host name is printable and has 255 letters at most"
    for address in (flow.source, flow.destination, *(end for path in flow.paths for end in path)):
        if len(address) > MAX_ADDRESS or not canonical(address):
            return f"{address[:MAX_ADDRESS]!r} is not an IP address"
    return ""


def pair_key(flow: Flow) -> PairKey:
    """What tells the pair of a flow without fault from others."""
    paths = tuple((canonical(local), canonical(remote)) for local, remote in flow.paths)
    return canonical(flow.source), canonical(flow.destination), paths


@lru_cache(maxsize=8_192)
def canonical(text: str) -> str:
    """An IP address as everybody writes it; empty if it is none. The same few come again and again, and parsing one
    costs more than all the rest."""
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        return ""
    if isinstance(address, ipaddress.IPv4Address):
        return str(address)
    if address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    # Whatever stands behind the % counts as a part of the address to the parser, escape sequences too.
    is_plain = address.scope_id is None or re.fullmatch(r"[\w.:@-]{1,15}", address.scope_id, re.ASCII)
    return str(address) if is_plain else ""


def _less(counter: Counter[int], key: int) -> None:
    """One less; nothing is kept of what is zero."""
    counter[key] -= 1
    if not counter[key]:
        del counter[key]
