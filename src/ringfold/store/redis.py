"""Redis: each call is one Lua script, so it is one atomic step and one round trip.

A key is a hash with value, version and time to live; a lease is its expiry, by Redis itself. Another hash of the
namespace has the generation and the revision, and a sorted set has the names, for listing (an expired lease leaves its
name there until the next list). All names of a namespace share one hash tag, so they are on one node of a cluster.

*Notification.* A script that changes a key publishes on a channel with its name. Published messages are not stored, so
waiters also poll once a second; the expiry of a lease is seen by polling, too.

*Durability* depends on the server's settings: `appendonly yes` and `appendfsync always` are equal to what a sqlite file
does by default. With anything less a crash of the server loses acknowledged writes, and with replicas a failover does.
The revision shows that, and the client refuses to continue.
"""

import hashlib
import logging
import os
from collections.abc import Sequence
from functools import cache
from importlib import import_module
from types import ModuleType
from typing import Any, Protocol

from ringfold.errors import ConfigError, MissingPackage, StoreError, StoreUnknown, StoreUnreachable
from ringfold.runtime import threads
from ringfold.store.base import Added, AnyVersion, Deadline, Entry, Generation, Read, Scanned, Write, Written, read_each

Word = str | int | bytes
_log = logging.getLogger(__name__)
_SLOW_POLL_S = 1.0

_FITS = """
local function generation() return redis.call('HMGET', KEYS[1], 'id', 'revision') end
local function entry(key) return redis.call('HMGET', key, 'value', 'version', 'ttl_ms') end
local function fits(at) return at[1] == ARGV[1] and tonumber(at[2]) >= tonumber(ARGV[2]) end
local function put(value, ttl_ms)
  local version = redis.call('HINCRBY', KEYS[1], 'revision', 1)
  redis.call('DEL', KEYS[2])
  redis.call('HSET', KEYS[2], 'value', value, 'version', version, 'ttl_ms', ttl_ms)
  if tonumber(ttl_ms) > 0 then redis.call('PEXPIRE', KEYS[2], ttl_ms) end
  redis.call('ZADD', KEYS[3], 0, KEYS[2])
  redis.call('PUBLISH', KEYS[2], 'changed')
end
"""
_FOUND = """
if ARGV[1] ~= '' and redis.call('EXISTS', KEYS[1]) == 0 then
  redis.call('HSET', KEYS[1], 'id', ARGV[1], 'revision', 1)
end
return redis.call('HMGET', KEYS[1], 'id', 'revision')
"""
_READ = _FITS + "return {generation(), entry(KEYS[2])}"
_WRITE = (
    _FITS
    + """
local at, now = generation(), entry(KEYS[2])
-- Version and value: after a restore, the numbers after the snapshot are used again.
local is_met = ARGV[3] == 'any' or ((now[2] or '0') == ARGV[3] and (now[1] or '') == ARGV[4])
if not fits(at) or not is_met then return {at, now, 0, 0} end
local existed = now[2] and 1 or 0
if ARGV[5] == 'put' then
  put(ARGV[6], ARGV[7])
elseif existed == 1 then
  redis.call('HINCRBY', KEYS[1], 'revision', 1)
  redis.call('DEL', KEYS[2])
  redis.call('ZREM', KEYS[3], KEYS[2])
  redis.call('PUBLISH', KEYS[2], 'changed')
end
return {generation(), entry(KEYS[2]), 1, existed}
"""
)
_ADD = (
    _FITS
    + """
local at, now = generation(), entry(KEYS[2])
local text = now[1] or '0'
if not fits(at) then return {at, '0'} end
if not string.match(text, '^-?%d+$') or #text > 16 then return {at, false} end
local total = string.format('%.0f', tonumber(text) + tonumber(ARGV[3]))
put(total, 0)
return {generation(), total}
"""
)
_KEEP = (
    _FITS
    + """
local at, now = generation(), entry(KEYS[2])
if not fits(at) or now[2] ~= ARGV[3] or now[1] ~= ARGV[5] then return {at, now, 0, 0} end
redis.call('PEXPIRE', KEYS[2], ARGV[4])
return {at, now, 1, 1}
"""
)
_SCAN = (
    _FITS
    + """
local found = {}
for _, name in ipairs(redis.call('ZRANGEBYLEX', KEYS[3], '[' .. KEYS[2], '(' .. KEYS[2] .. '\\255')) do
  local now = entry(name)
  if now[2] then
    found[#found + 1] = {name, now}
  else
    redis.call('ZREM', KEYS[3], name)
  end
end
return {generation(), found}
"""
)


_TEMPORARY_ERRORS = ("ReadOnlyError", "ClusterDownError", "MasterDownError", "OutOfMemoryError", "TryAgainError")
_TEMPORARY = ("READONLY", "CLUSTERDOWN", "MASTERDOWN", "OOM ", "TRYAGAIN", "MISCONF", "NOREPLICAS")


class _UnknownScript(Exception):
    """The server does not have a script that was named by its digest."""


@cache
def _digest(script: str) -> str:
    """The name of a script: Redis executes it by this, without reading its text again."""
    return hashlib.sha1(script.encode(), usedforsecurity=False).hexdigest()


class RedisConnection(Protocol):
    """What is used of redis-py's connection: encoding, authentication and TLS; the deadlines are not."""

    socket_connect_timeout: float
    socket_timeout: float

    def connect(self) -> None: ...

    def disconnect(self) -> None: ...

    def send_command(self, *words: Word) -> None: ...

    def can_read(self, timeout: float) -> bool: ...

    def read_response(self) -> list[Any]: ...


class RedisDriver:
    """One namespace of a Redis server, through as many connections as threads use it at once."""

    can_list = True
    has_leases = True
    counts_writes = True
    has_counters = False

    def __init__(self, url: str, namespace: str) -> None:
        try:
            self._redis: ModuleType = import_module("redis")
        except ImportError as error:
            raise MissingPackage("redis", "redis", "a store at redis://") from error
        head, at, tail = url.rpartition("@")
        self.name = f"{head.partition('://')[0]}://{tail}" if at else url
        self._namespace = namespace
        try:
            self._pool = self._redis.ConnectionPool.from_url(url, protocol=2)
        except ValueError as error:
            raise ConfigError(f"{self.name} is not an address of a Redis server: {error}") from error
        self._lock = threads.Lock()
        self._idle: list[RedisConnection] = []
        self._pid = os.getpid()

    def ensure_generation(self, nonce: str | None, deadline: Deadline) -> Generation | None:
        if nonce is not None:
            self._warn_if_not_durable(deadline)
        return _generation(
            self._call(("EVAL", _FOUND, 1, self._key("!generation"), nonce or ""), deadline, is_read=True)
        )

    def read(self, key: str, guard: Generation, deadline: Deadline) -> Read:
        at, now = self._run(_READ, key, guard, deadline, is_read=True)
        return Read(_entry(now), _generation(at))

    def write(self, write: Write, guard: Generation, deadline: Deadline) -> Written:
        expected = b""
        match write.condition:
            case AnyVersion():
                condition = "any"
            case None:
                condition = "0"
            case Entry(value=expected, version=version):
                condition = str(version)
        change = ("drop",) if write.value is None else ("put", write.value, write.ttl_ms)
        return _written(self._run(_WRITE, write.key, guard, deadline, condition, expected, *change))

    def add(self, key: str, delta: int, guard: Generation, deadline: Deadline) -> Added:
        at, total = self._run(_ADD, key, guard, deadline, delta)
        return Added(None if total is None else int(total), _generation(at))

    def read_many(self, keys: Sequence[str], guard: Generation, deadline: Deadline) -> Scanned:
        return read_each(self, keys, guard, deadline)

    def increment(self, key: str, by: int, guard: Generation, deadline: Deadline) -> Added:
        raise AssertionError("this store has no atomic counters")

    def scan(self, prefix: str, guard: Generation, deadline: Deadline) -> Scanned:
        at, found = self._run(_SCAN, prefix, guard, deadline, is_read=True)
        skip = len(self._key(""))
        entries = {f"{self._namespace}/{name.decode(errors='replace')[skip:]}": _entry(now) for name, now in found}
        return Scanned({name: entry for name, entry in entries.items() if entry is not None}, _generation(at))

    def renew(self, key: str, entry: Entry, guard: Generation, deadline: Deadline) -> Written:
        # Renewal is idempotent: its outcome need not be known.
        arguments = (entry.version, entry.ttl_ms, entry.value)
        return _written(self._run(_KEEP, key, guard, deadline, *arguments, is_read=True))

    def watch(self, key: str, deadline: Deadline) -> "RedisKeyWatch":
        connection = self._connected(deadline)
        try:
            connection.send_command("SUBSCRIBE", self._full(key))
            if not connection.can_read(deadline.left_s()):
                raise StoreUnreachable(self.name, f"no response within {deadline.timeout_s:g} s")
            connection.read_response()
        except (self._redis.ConnectionError, self._redis.TimeoutError) as error:
            connection.disconnect()
            raise StoreUnreachable(self.name, str(error)) from error
        except BaseException:
            connection.disconnect()
            raise
        return RedisKeyWatch(self._redis, connection, self.name)

    def close(self) -> None:
        with self._lock:
            idle, self._idle = self._idle, []
        for connection in idle:
            connection.disconnect()

    def _key(self, rest: str) -> str:
        return f"{{{self._namespace}}}/{rest}"

    def _full(self, key: str) -> str:
        """The name in Redis of a key with its namespace."""
        return self._key(key[len(self._namespace) + 1 :])

    def _run(
        self, script: str, key: str, guard: Generation, deadline: Deadline, *rest: Word, is_read: bool = False
    ) -> list[Any]:
        keys = (self._key("!generation"), self._full(key), self._key("!names"))
        arguments = (3, *keys, guard.id, guard.revision, *rest)
        try:
            return self._call(("EVALSHA", _digest(script), *arguments), deadline, is_read=is_read)
        except _UnknownScript:  # nothing was done; the server compiles and remembers it now
            return self._call(("EVAL", script, *arguments), deadline, is_read=is_read)

    def _call(self, command: tuple[Word, ...], deadline: Deadline, *, is_read: bool) -> list[Any]:
        """Send one command and read its response. If that is lost it is StoreUnknown, unless the command only reads."""
        connection = self._connected(deadline)
        lost = StoreUnreachable if is_read else StoreUnknown
        try:
            connection.send_command(*command)
            if not connection.can_read(max(0.001, deadline.left_s())):
                connection.disconnect()
                raise lost(self.name, f"no response within {deadline.timeout_s:g} s")
            response = connection.read_response()
        except self._redis.exceptions.BusyLoadingError as error:
            connection.disconnect()
            raise StoreUnreachable(self.name, str(error)) from error
        except self._redis.exceptions.NoScriptError as error:
            connection.disconnect()
            raise _UnknownScript from error
        except (self._redis.ConnectionError, self._redis.TimeoutError) as error:
            connection.disconnect()
            raise lost(self.name, str(error)) from error
        except self._redis.RedisError as error:
            connection.disconnect()
            # Nothing was written, and it may pass: a failover, or no memory.
            kind = StoreUnreachable if self._is_temporary(error) else StoreError
            raise kind(self.name, str(error)) from error
        with self._lock:
            self._idle.append(connection)
        return response

    def _is_temporary(self, error: Exception) -> bool:
        """Whether the server refuses commands for now. A script reports it in its text, other commands by a class."""
        kinds = tuple(getattr(self._redis.exceptions, name) for name in _TEMPORARY_ERRORS)
        return isinstance(error, kinds) or any(word in str(error) for word in _TEMPORARY)

    def _connected(self, deadline: Deadline) -> RedisConnection:
        """A connection for exclusive use. One that the server has closed in the meantime is not used."""
        while (connection := self._taken()) is not None:
            try:
                if not connection.can_read(0):
                    return connection
            except self._redis.RedisError:
                pass
            connection.disconnect()
        # The pool itself would also count connections that are closed.
        made: RedisConnection = self._pool.connection_class(**self._pool.connection_kwargs)
        made.socket_connect_timeout = made.socket_timeout = max(0.05, deadline.left_s())
        try:
            made.connect()
        except self._redis.exceptions.BusyLoadingError as error:
            raise StoreUnreachable(self.name, str(error)) from error
        except (self._redis.AuthenticationError, self._redis.ResponseError) as error:
            raise StoreError(self.name, str(error)) from error
        except (self._redis.ConnectionError, self._redis.TimeoutError) as error:
            raise StoreUnreachable(self.name, str(error)) from error
        return made

    def _taken(self) -> RedisConnection | None:
        with self._lock:
            if self._pid != os.getpid():  # after a fork they belong to the parent
                self._pid, self._idle = os.getpid(), []
            return self._idle.pop() if self._idle else None

    def _warn_if_not_durable(self, deadline: Deadline) -> None:
        try:
            values = self._call(("CONFIG", "GET", "appendonly"), deadline, is_read=True)
        except StoreError:
            return  # CONFIG may be forbidden
        if values and values[-1] != b"yes":
            _log.warning("%s has no append-only file: a crash of the server ends the run (appendonly yes)", self.name)


def _generation(row: list[bytes | None]) -> Generation | None:
    name, revision = row
    return None if name is None or revision is None else Generation(name.decode(errors="replace"), int(revision))


def _entry(row: list[bytes | None]) -> Entry | None:
    value, version, ttl_ms = row
    return None if value is None or version is None else Entry(value, int(version), int(ttl_ms or 0))


def _written(response: list[Any]) -> Written:
    at, now, was_applied, existed = response
    return Written(bool(was_applied), _entry(now), _generation(at), bool(existed))


class RedisKeyWatch:
    """A connection that is subscribed to the changes of one key."""

    def __init__(self, redis: ModuleType, connection: RedisConnection, name: str) -> None:
        self._redis = redis
        self._connection = connection
        self._name = name

    def wait(self, read: Read, timeout_s: float) -> None:
        try:
            if self._connection.can_read(min(timeout_s, _SLOW_POLL_S)):
                self._connection.read_response()
                while self._connection.can_read(0):  # of several changes the last one is read anyway
                    self._connection.read_response()
        except (self._redis.ConnectionError, self._redis.TimeoutError) as error:
            raise StoreUnreachable(self._name, str(error)) from error

    def close(self) -> None:
        self._connection.disconnect()
