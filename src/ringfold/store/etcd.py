"""etcd: the store between machines. Durable and replicated, with leases and watches of its own.

The driver uses the JSON gateway that every etcd from 3.4 on has on its client port (see docs/adr/0021): a call is one
POST, and except for leases one call is one transaction, which etcd executes atomically and in one order for all.

*Version* is the key's `mod_revision`. *Generation* is the value of one key of the namespace, and *revision* is that
key's `mod_revision`: every write also writes this key, with the same value. So a transaction can require both, "this
id" and "not older than I know", and a store that was restored refuses the write by itself.

*Leases* are etcd's, in whole seconds, rounded up, and not shorter than a few elections (2 s by default). *Notification*
is a watch, with a slow poll in case the server of the watch hangs.

With several members, the next one is tried when one does not respond.
"""

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import TypeVar
from urllib.parse import unquote

import msgspec

from ringfold.errors import ConfigError, StoreError, StoreUnknown, StoreUnreachable
from ringfold.runtime import http, threads
from ringfold.store.base import (
    Added,
    AnyVersion,
    Deadline,
    Entry,
    Generation,
    Read,
    Scanned,
    Write,
    Written,
    add_by_writing,
    read_each,
)
from ringfold.wire.decoding import decode

_PORT = 2379
_SLOW_POLL_S = 1.0
_NOT_FOUND, _EXHAUSTED, _UNAUTHENTICATED = 5, 8, 16
_OPEN_CODES = frozenset({1, 2, 4, 10, 13, 14})
"""gRPC codes after which a change may have been made: cancelled, unknown, timed out, aborted, internal, unavailable."""

Json = Mapping[str, "Json | list[Json] | str | int | bytes | bool"]


class _Pair(msgspec.Struct):
    key: bytes = b""
    value: bytes = b""
    mod_revision: int = 0


class _Range(msgspec.Struct):
    kvs: list[_Pair] = []


class _Response(msgspec.Struct):
    response_range: _Range | None = None


class _Header(msgspec.Struct):
    revision: int = 0


class _Transaction(msgspec.Struct):
    header: _Header = msgspec.field(default_factory=_Header)
    succeeded: bool = False
    responses: list[_Response] = []

    def pairs(self, number: int) -> list[_Pair]:
        found = self.responses[number].response_range
        return [] if found is None else found.kvs


class _Lease(msgspec.Struct):
    ID: int = 0
    TTL: int = 0


class _KeptAlive(msgspec.Struct):
    result: _Lease


class _Token(msgspec.Struct):
    token: str = ""


class _Fault(msgspec.Struct):
    code: int = 2
    message: str = ""
    error: object = ""


Response = TypeVar("Response", _Transaction, _Lease, _KeptAlive, _Token)


class _EtcdError(Exception):
    """The server responded with an error."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(code, text)
        self.code = code
        self.text = text


def _error_of(body: bytes) -> tuple[int, str]:
    fault = msgspec.json.decode(body, type=_Fault, strict=False)
    return fault.code, fault.message or str(fault.error)


class EtcdDriver:
    """One namespace of an etcd cluster."""

    can_list = True
    has_leases = True
    counts_writes = True
    has_counters = False

    def __init__(self, url: str, namespace: str) -> None:
        scheme, _, rest = url.partition("://")
        credentials, _, hosts = rest.rpartition("@")
        hosts = hosts.rstrip("/")
        self.name = f"{scheme}://{hosts}"
        self._user, _, self._password = (unquote(part) for part in credentials.partition(":"))
        self._members = [http.HttpClient(*_address(host), tls=scheme == "etcds") for host in hosts.split(",")]
        self._member = 0
        self._token = ""
        self._generation_key = f"{namespace}/!generation".encode()
        self._lock = threads.Lock()
        self._leases: dict[str, int] = {}

    def ensure_generation(self, nonce: str | None, deadline: Deadline) -> Generation | None:
        look = _range(self._generation_key)
        is_absent: Json = {"target": "CREATE", "key": self._generation_key, "create_revision": 0}
        make: Json = {"request_put": {"key": self._generation_key, "value": (nonce or "").encode()}}
        conditions, then = ([is_absent], [make, look]) if nonce else ([], [look])
        done = self._transact(conditions, then, [look], deadline, lost=False)
        return _generation(done.pairs(len(done.responses) - 1))

    def read(self, key: str, guard: Generation, deadline: Deadline) -> Read:
        done = self._transact([], [_range(self._generation_key), _range(key.encode())], [], deadline, lost=False)
        return Read(_entry(done.pairs(1)), _generation(done.pairs(0)))

    def read_many(self, keys: Sequence[str], guard: Generation, deadline: Deadline) -> Scanned:
        return read_each(self, keys, guard, deadline)

    def increment(self, key: str, by: int, guard: Generation, deadline: Deadline) -> Added:
        raise AssertionError("this store has no atomic counters")

    def scan(self, prefix: str, guard: Generation, deadline: Deadline) -> Scanned:
        start = prefix.encode()
        until = start[:-1] + bytes([start[-1] + 1])
        done = self._transact([], [_range(self._generation_key), _range(start, until)], [], deadline, lost=False)
        found = {pair.key.decode(errors="replace"): Entry(pair.value, pair.mod_revision) for pair in done.pairs(1)}
        return Scanned(found, _generation(done.pairs(0)))

    def write(self, write: Write, guard: Generation, deadline: Deadline) -> Written:
        lease = self._grant(write.ttl_ms, deadline) if write.ttl_ms else 0
        written = self._write_in_transaction(write, guard, lease, deadline)
        with self._lock:
            ended = (
                lease
                if lease and not written.was_applied
                else self._leases.pop(write.key, 0)
                if written.was_applied
                else 0
            )
            if lease and written.was_applied:
                self._leases[write.key] = lease
        if ended:
            self._revoke(ended, deadline)
        return written

    def _write_in_transaction(self, write: Write, guard: Generation, lease: int, deadline: Deadline) -> Written:
        key, look = write.key.encode(), [_range(self._generation_key), _range(write.key.encode())]
        change: Json = (
            {"request_delete_range": {"key": key}}
            if write.value is None
            else {"request_put": {"key": key, "value": write.value, "lease": lease}}
        )
        touch: Json = {"request_put": {"key": self._generation_key, "value": guard.id.encode()}}
        conditions = [*self._guard_conditions(guard), *_condition_of(key, write)]
        done = self._transact(conditions, [*look, change, touch], look, deadline, lost=True)
        before = _entry(done.pairs(1))
        if not done.succeeded:
            return Written(False, before, _generation(done.pairs(0)))
        entry = None if write.value is None else Entry(write.value, done.header.revision)
        return Written(True, entry, Generation(guard.id, done.header.revision), existed=before is not None)

    def add(self, key: str, delta: int, guard: Generation, deadline: Deadline) -> Added:
        return add_by_writing(self, key, delta, guard, deadline)

    def renew(self, key: str, entry: Entry, guard: Generation, deadline: Deadline) -> Written:
        with self._lock:
            lease = self._leases.get(key, 0)
        kept = self._request("lease/keepalive", {"ID": lease}, _KeptAlive, deadline, lost=False)
        read = self.read(key, guard, deadline)
        is_held = kept.result.TTL > 0 and read.entry is not None and read.entry.version == entry.version
        return Written(is_held, read.entry, read.generation, existed=read.entry is not None)

    def watch(self, key: str, deadline: Deadline) -> "EtcdKeyWatch":
        request = msgspec.json.encode({"create_request": {"key": key.encode()}})
        try:
            member = self._members[self._member]
            stream = member.stream("/v3/watch", request, self._headers(deadline), deadline.left_s())
        except OSError as error:
            self._next_member()
            raise StoreUnreachable(self.name, str(error)) from error
        except _EtcdError as error:
            raise StoreError(self.name, error.text) from error
        if stream.status != 200:
            stream.close()
            self._token = ""
            raise StoreUnreachable(self.name, f"the watch was refused: {stream.first[:200].decode(errors='replace')}")
        return EtcdKeyWatch(stream, self.name)

    def close(self) -> None:
        for member in self._members:
            member.close()

    def _guard_conditions(self, guard: Generation) -> list[Json]:
        """The condition that the store has the known generation, and is not older."""
        return [
            {"target": "VALUE", "key": self._generation_key, "value": guard.id.encode()},
            {"target": "MOD", "key": self._generation_key, "mod_revision": guard.revision - 1, "result": "GREATER"},
        ]

    def _grant(self, ttl_ms: int, deadline: Deadline) -> int:
        # A lease without a key expires: its outcome need not be known.
        return self._request("lease/grant", {"TTL": math.ceil(ttl_ms / 1_000)}, _Lease, deadline, lost=False).ID

    def _revoke(self, lease: int, deadline: Deadline) -> None:
        with suppress(StoreError):  # it expires
            self._request("lease/revoke", {"ID": lease}, _Lease, deadline, lost=False)

    def _transact(
        self, conditions: list[Json], then: list[Json], otherwise: list[Json], deadline: Deadline, *, lost: bool
    ) -> _Transaction:
        request: Json = {"compare": conditions, "success": then, "failure": otherwise}
        done = self._request("kv/txn", request, _Transaction, deadline, lost=lost)
        if len(done.responses) < len(then if done.succeeded else otherwise):
            unclear = StoreUnknown if lost else StoreError
            raise unclear(self.name, "this is not an etcd: the response to a transaction is incomplete")
        return done

    def _request(self, path: str, request: Json, kind: type[Response], deadline: Deadline, *, lost: bool) -> Response:
        """One request. `lost`: it changes something, so its outcome is unknown if the response is lost."""
        unanswered = StoreUnknown if lost else StoreUnreachable
        try:
            try:
                return self._post(path, request, kind, deadline)
            except _EtcdError as error:
                if error.code != _UNAUTHENTICATED or not self._user:
                    raise
                self._token = ""  # it has expired
                return self._post(path, request, kind, deadline)
        except http.NotSent as error:
            self._next_member()
            raise StoreUnreachable(self.name, str(error)) from error
        except http.NoAnswer as error:
            self._next_member()
            raise unanswered(self.name, f"no response within {deadline.timeout_s:g} s: {error}") from error
        except _EtcdError as error:
            if error.code in _OPEN_CODES:
                self._next_member()
                raise unanswered(self.name, error.text) from error
            if error.code == _EXHAUSTED:  # too many requests, or no space: nothing was written, and it may pass
                self._next_member()
                raise StoreUnreachable(self.name, error.text) from error
            if error.code == _NOT_FOUND and "lease" in error.text:
                raise StoreUnreachable(self.name, "the lease ended before it was used") from error
            raise StoreError(self.name, error.text) from error

    def _post(self, path: str, request: Json, kind: type[Response], deadline: Deadline) -> Response:
        headers = self._headers(deadline) if path != "auth/authenticate" else {}
        member, body = self._members[self._member], msgspec.json.encode(request)
        # One member that hangs must leave time to try another.
        limit_s = deadline.left_s() if len(self._members) == 1 else deadline.left_s() / 2
        status, response = member.post(f"/v3/{path}", body, headers, limit_s)
        error, what = partial(StoreError, self.name), f"this is not an etcd with a JSON gateway (status {status}): "
        if status != 200:
            raise _EtcdError(*decode(_error_of, response, error, what))
        return decode(msgspec.json.Decoder(kind, strict=False).decode, response, error, what)

    def _headers(self, deadline: Deadline) -> dict[str, str]:
        if self._user and not self._token:
            proof: Json = {"name": self._user, "password": self._password}
            self._token = self._post("auth/authenticate", proof, _Token, deadline).token
        return {"Authorization": self._token} if self._token else {}

    def _next_member(self) -> None:
        self._member = (self._member + 1) % len(self._members)


def _address(host: str) -> tuple[str, int]:
    name, colon, port = host.rpartition(":")
    if not colon or host.endswith("]"):
        name, port = host, str(_PORT)
    if not name or not port.isdecimal() or not 0 < int(port) < 65_536:
        raise ConfigError(f"{host!r} is not an address of an etcd server; write host or host:port")
    return name.removeprefix("[").removesuffix("]"), int(port)


def _range(key: bytes, until: bytes = b"") -> Json:
    return {"request_range": {"key": key, "range_end": until} if until else {"key": key}}


def _condition_of(key: bytes, write: Write) -> list[Json]:
    """A write's condition. Version and value: after a restore, etcd reuses old numbers for new writes."""
    match write.condition:
        case AnyVersion():
            return []
        case None:
            return [{"target": "CREATE", "key": key, "create_revision": 0}]
        case Entry(value=value, version=version):
            return [
                {"target": "MOD", "key": key, "mod_revision": version},
                {"target": "VALUE", "key": key, "value": value},
            ]


def _generation(pairs: list[_Pair]) -> Generation | None:
    return Generation(pairs[0].value.decode(errors="replace"), pairs[0].mod_revision) if pairs else None


def _entry(pairs: list[_Pair]) -> Entry | None:
    return Entry(pairs[0].value, pairs[0].mod_revision) if pairs else None


class EtcdKeyWatch:
    """A watch of one key."""

    def __init__(self, stream: http.HttpStream, name: str) -> None:
        self._stream = stream
        self._name = name

    def wait(self, read: Read, timeout_s: float) -> None:
        try:
            self._stream.wait(min(timeout_s, _SLOW_POLL_S))
        except OSError as error:
            raise StoreUnreachable(self._name, str(error)) from error

    def close(self) -> None:
        self._stream.close()
