"""Which flows there are, which client registered each, and which slot has its hints. Pure.

A *client* is one connection of one process. A *pair* is a source, a destination and the paths between them. All flows
of a pair share a slot, also flows of different clients and users, because the advice for a pair is the same for all. A
pair has its slot from its first flow to its last. Freed slots are queued, so that the slot that has been free for
longest is used next. Each new owner gets the next generation: a reader of the former owner finds a generation that is
not its own.

An address may be written in several forms (2001:DB8::1, 2001:db8:0::1; ::ffff:10.0.0.1 is 10.0.0.1): a pair has them in
one form. A link-local address keeps its interface (fe80::1%eth0): without it, it is another address.

One user cannot take the whole table: `Quota` bounds clients, flows and slots per user. A flow counts for the user that
registered it. A slot counts for every user that has a flow in it, so that sharing raises no limit.

Invariants: a pair has a slot if and only if it has flows; a slot is free or belongs to one pair; the counts of a user
are those of its flows; every flow belongs to one client.
"""

import ipaddress
import re
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

from ringfold.limits import MAX_PATHS
from ringfold.wire.agent import Flow, Place, RefusalKind

Client = int
PairKey = tuple[str, str, tuple[tuple[str, str], ...]]
MAX_GENERATION = 0xFFFFF
"""A generation has 20 bits in a slot, and is never 0."""
MAX_NAME_CHARS = 255
MAX_ADDRESS_CHARS = 64
MAX_CONNECTION = 2**63


@dataclass(frozen=True, slots=True, kw_only=True)
class Quota:
    """The limits of one user."""

    clients: int = 1_024
    flows: int = 16_384
    slots: int = 2_048


@dataclass(frozen=True, slots=True)
class RequestRefusal:
    """Why a request is refused."""

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
class RegisteredFlow:
    """A registered flow. `number` grows with every registration, so that a list can be continued."""

    number: int
    client: Client
    flow: Flow
    pair: Pair


@dataclass(eq=False, slots=True)
class ClientRecord:
    """A client: the process of a connection, as the kernel reports it, and its flows by their connection numbers."""

    uid: int
    pid: int
    name: str = ""
    flows: dict[int, RegisteredFlow] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class RegistryChange:
    """A flow was added or removed. `pair_changed`: its pair was added or removed with it."""

    entry: RegisteredFlow
    pair_changed: bool


class Registry:
    """All flows of a host. `generations` are the last ones of each slot."""

    def __init__(self, generations: Sequence[int], quota: Quota | None = None) -> None:
        self.quota = quota or Quota()
        self.slots = len(generations)
        self._generations = list(generations)
        self._free = deque(range(self.slots))
        self._pairs: dict[PairKey, Pair] = {}
        self._clients: dict[Client, ClientRecord] = {}
        self._entries: dict[int, RegisteredFlow] = {}
        self._last_number = 0
        self._user_clients: Counter[int] = Counter()
        self._user_flows: Counter[int] = Counter()
        self._user_slots: Counter[int] = Counter()

    # Clients

    def open(self, client: Client, uid: int, pid: int) -> RequestRefusal | None:
        """Add a client; refused if its user has too many."""
        assert client not in self._clients
        if self._user_clients[uid] >= self.quota.clients:
            return RequestRefusal(
                "quota", f"user {uid} has {self.quota.clients} connections, the most that are allowed"
            )
        self._clients[client] = ClientRecord(uid, pid)
        self._user_clients[uid] += 1
        return None

    def close(self, client: Client) -> list[RegistryChange]:
        """Remove a client and all its flows. No effect for an unknown client."""
        record = self._clients.get(client)
        if record is None:
            return []
        changes = [self._remove(record, entry) for entry in list(record.flows.values())]
        del self._clients[client]
        _decrement(self._user_clients, record.uid)
        return changes

    def record(self, client: Client) -> ClientRecord | None:
        return self._clients.get(client)

    # Flows

    def register(self, client: Client, flow: Flow) -> RegistryChange | RequestRefusal:
        """Add a flow. A refusal changes nothing."""
        record = self._clients[client]
        if why := invalid_flow(flow):
            return RequestRefusal("invalid", why)
        if flow.connection in record.flows:
            return RequestRefusal("duplicate", f"connection {flow.connection} is registered already")
        uid = record.uid
        if self._user_flows[uid] >= self.quota.flows:
            return RequestRefusal("quota", f"user {uid} has {self.quota.flows} flows, the most that are allowed")
        key = pair_key(flow)
        pair = self._pairs.get(key)
        if (pair is None or not pair.users[uid]) and self._user_slots[uid] >= self.quota.slots:
            return RequestRefusal(
                "quota", f"user {uid} has flows in {self.quota.slots} slots, the most that are allowed"
            )
        if pair is None:
            if not self._free:
                return RequestRefusal("full", f"all {self.slots} slots are in use")
            pair = self._open_pair(key)
        self._last_number += 1
        entry = RegisteredFlow(self._last_number, client, flow, pair)
        record.flows[flow.connection] = entry
        self._entries[entry.number] = entry
        self._user_flows[uid] += 1
        if not pair.users[uid]:
            self._user_slots[uid] += 1
        pair.users[uid] += 1
        pair.flows += 1
        return RegistryChange(entry, pair.flows == 1)

    def deregister(self, client: Client, connection: int) -> RegistryChange | RequestRefusal:
        """Remove a flow of this client. The flows of other clients are unknown to it."""
        record = self._clients[client]
        entry = record.flows.get(connection)
        return _unknown(connection) if entry is None else self._remove(record, entry)

    def place(self, client: Client, connection: int) -> Place | RequestRefusal:
        """Where the hints of a flow of this client are."""
        entry = self._clients[client].flows.get(connection)
        return _unknown(connection) if entry is None else entry.pair.place

    def _open_pair(self, key: PairKey) -> Pair:
        slot = self._free.popleft()
        self._generations[slot] = self._generations[slot] % MAX_GENERATION + 1
        pair = self._pairs[key] = Pair(key, slot, self._generations[slot])
        return pair

    def _remove(self, record: ClientRecord, entry: RegisteredFlow) -> RegistryChange:
        pair, uid = entry.pair, record.uid
        del record.flows[entry.flow.connection]
        del self._entries[entry.number]
        _decrement(self._user_flows, uid)
        _decrement(pair.users, uid)
        if not pair.users[uid]:
            _decrement(self._user_slots, uid)
        pair.flows -= 1
        if not pair.flows:
            del self._pairs[pair.key]
            self._free.append(pair.slot)
        return RegistryChange(entry, not pair.flows)

    # Queries

    @property
    def flows(self) -> int:
        return len(self._entries)

    @property
    def clients(self) -> int:
        return len(self._clients)

    @property
    def pairs(self) -> Sequence[Pair]:
        """All pairs, in the order in which they were added."""
        return list(self._pairs.values())

    @property
    def pair_count(self) -> int:
        return len(self._pairs)

    def between(self, source: str, destination: str) -> list[Pair]:
        """The pairs with this source and destination, over any paths."""
        ends = (canonical(source[:MAX_ADDRESS_CHARS]), canonical(destination[:MAX_ADDRESS_CHARS]))
        return [pair for key, pair in self._pairs.items() if key[:2] == ends]

    def entries(self, after: int = 0) -> Iterator[RegisteredFlow]:
        """Flows with a higher number than `after`, in the order of their numbers."""
        return (entry for number, entry in self._entries.items() if number > after)

    def users(self) -> list[tuple[int, int, int, int]]:
        """(uid, clients, flows, slots) of every user that has a client."""
        return [
            (uid, clients, self._user_flows[uid], self._user_slots[uid])
            for uid, clients in sorted(self._user_clients.items())
        ]

    def check(self) -> None:
        """Check the invariants. Slow: for tests, and after an error."""
        entries = [entry for record in self._clients.values() for entry in record.flows.values()]
        assert {entry.number for entry in entries} == self._entries.keys()
        taken = [pair.slot for pair in self._pairs.values()]
        assert sorted([*taken, *self._free]) == list(range(self.slots))
        for pair in self._pairs.values():
            owners = Counter(self._clients[entry.client].uid for entry in entries if entry.pair is pair)
            assert pair.flows == owners.total() > 0
            assert dict(pair.users) == dict(owners)
        assert dict(self._user_flows) == Counter(self._clients[entry.client].uid for entry in entries)
        assert dict(self._user_slots) == Counter(uid for pair in self._pairs.values() for uid in pair.users)
        assert dict(self._user_clients) == Counter(record.uid for record in self._clients.values())


def invalid_flow(flow: Flow) -> str:
    """Why a flow is not valid; empty if it is."""
    if not 0 <= flow.connection < MAX_CONNECTION:
        return f"connection {flow.connection} is not from 0 to 2^63 - 1"
    if not 2 <= len(flow.paths) <= MAX_PATHS:
        return f"a flow has 2 to {MAX_PATHS} paths, not {len(flow.paths)}"
    for name in (flow.source_host, flow.destination_host):
        if len(name) > MAX_NAME_CHARS or not name.isprintable():
            return f"a host name has {MAX_NAME_CHARS} printable characters at most"
    for address in (flow.source, flow.destination, *(end for path in flow.paths for end in path)):
        if len(address) > MAX_ADDRESS_CHARS or not canonical(address):
            return f"{address[:MAX_ADDRESS_CHARS]!r} is not an IP address"
    return ""


def pair_key(flow: Flow) -> PairKey:
    """The key of the pair of a valid flow."""
    paths = tuple((canonical(local), canonical(remote)) for local, remote in flow.paths)
    return canonical(flow.source), canonical(flow.destination), paths


@lru_cache(maxsize=8_192)
def canonical(text: str) -> str:
    """The canonical form of an IP address; empty if it is not one. Cached: parsing costs more than all the rest of a
    registration."""
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        return ""
    if isinstance(address, ipaddress.IPv4Address):
        return str(address)
    if address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    # The parser accepts any text behind the %, escape sequences included.
    is_plain = address.scope_id is None or re.fullmatch(r"[\w.:@-]{1,15}", address.scope_id, re.ASCII)
    return str(address) if is_plain else ""


def _unknown(connection: int) -> RequestRefusal:
    return RequestRefusal("unknown", f"this client has no connection {connection}")


def _decrement(counter: Counter[int], key: int) -> None:
    """Subtract one, and remove the key at zero."""
    counter[key] -= 1
    if not counter[key]:
        del counter[key]
